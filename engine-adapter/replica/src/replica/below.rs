//! What lies below the oldest layer of a replica: a backing file, which is on each node, and which is no part of
//! what replicas send each other.

use super::Replica;
use dbs_core::{Backing, Error, ErrorKind, Result, Store};
use longhorn_wire::proto::ptypes;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The backing file of a replica.
pub(super) struct Below {
    /// Its path, as others are told.
    path: String,
    file: Arc<dyn Backing>,
    /// What the store was given, which forgets it otherwise: with other replicas in it, theirs.
    attached: Mutex<Option<Arc<dyn Backing>>>,
}

impl Below {
    /// Opens the file at `path`, or the only one in the directory there.
    ///
    /// # Errors
    /// Those of [`dbs_backing::open`].
    pub fn open(path: &Path) -> Result<Self> {
        let path = dbs_backing::file_at(path)?;
        let file = dbs_backing::open(&path)?;
        let path = path.display().to_string();
        Ok(Self { path, file, attached: Mutex::default() })
    }

    /// Gives it to a store.
    fn attach(&self, store: &Store) {
        let attached = store.attach_backing(Arc::clone(&self.file));
        *self.attached.lock().unwrap_or_else(PoisonError::into_inner) = Some(attached);
    }
}

impl Replica {
    /// Identity of the file that the volume in the store rests on, whatever this process was given; nothing if
    /// it rests on none.
    ///
    /// # Errors
    /// `Busy` if the store is with another process; `NotFound` if there is no volume yet.
    pub fn backing_identity(&self) -> Result<String> {
        let file = self.store()?.backing(&self.options.volume)?;
        Ok(file.map(|file| file.identity).unwrap_or_default())
    }

    /// Path of the backing file; nothing if there is none.
    pub(super) fn backing_path(&self) -> &str {
        self.below.as_ref().map_or("", |below| &below.path)
    }

    /// Makes the volume, on the backing file if there is one.
    pub(super) fn make_volume(&self, store: &Store, size: u64) -> Result<()> {
        let volume = &self.options.volume;
        let Some(below) = &self.below else { return store.create_volume(volume, size).map(drop) };
        let least = below.file.size();
        if size < least {
            return Err(Error::invalid(format!(
                "replica size {size} < backing image virtual size {least}"
            )));
        }
        store.create_backed(volume, size, &below.file).map(drop)
    }

    /// Gives the store the backing file, and refuses a volume that rests on another one, or on none. A volume
    /// that is still to be made is none.
    pub(super) fn take_below(&self, store: &Store) -> Result<()> {
        if let Some(below) = &self.below {
            below.attach(store);
        }
        let volume = &self.options.volume;
        let file = match store.backing(volume) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        if let Some(found) = self.attach_taken(store, file.as_ref().map(|file| &*file.identity)) {
            return found;
        }
        match (file, &self.below) {
            (None, None) => Ok(()),
            (Some(file), Some(below)) if file.identity == below.file.identity() => Ok(()),
            (Some(file), Some(below)) => Err(Error::invalid(format!(
                "the backing file `{}` is not the file that the volume `{volume}` was made on: that was {}; \
                 this one is {}",
                below.path,
                file.identity,
                below.file.identity()
            ))),
            (Some(file), None) => Err(Error::invalid(format!(
                "the volume `{volume}` rests on a backing file ({}): start the replica with --backing-file",
                file.identity
            ))),
            (None, Some(below)) => Err(Error::invalid(format!(
                "the volume `{volume}` was made without a backing file: start the replica without \
                 --backing-file {}",
                below.path
            ))),
        }
    }

    /// Adds the backing file to a message: by its path and, of an open replica, as a disk of that name.
    pub(super) fn show_below(&self, message: &mut ptypes::Replica) {
        let Some(below) = &self.below else { return };
        if message.state == "initial" {
            return;
        }
        message.backing_file.clone_from(&below.path);
        if message.disks.is_empty() {
            return;
        }
        // As upstream's: what it takes on the disk, or 0.
        let bytes = std::fs::metadata(&below.path).map_or(0, |metadata| metadata.blocks() * 512);
        let disk = ptypes::DiskInfo {
            name: below.path.clone(),
            size: bytes.to_string(),
            ..Default::default()
        };
        message.disks.insert(below.path.clone(), disk);
    }

    /// Refuses to take layers from a replica that has another backing file: each of them would show
    /// something else.
    ///
    /// # Errors
    /// `Invalid`; as [`Replica::backing_identity`].
    pub fn check_same_below(&self, theirs: &str) -> Result<()> {
        let ours = &*self.backing_identity()?;
        if ours == theirs {
            return Ok(());
        }
        let or_none = |identity: &str| match identity {
            "" => "none".to_owned(),
            file => format!("({file})"),
        };
        Err(Error::invalid(format!(
            "the other replica has another backing file: {}, and this one {}",
            or_none(theirs),
            or_none(ours)
        )))
    }
}
