//! Volumes that rest on a file outside the store.

use super::facts::{identity_of, volume_info};
use super::{Inner, Store};
use crate::error::{Error, ErrorKind, Result};
use crate::format::superblock::INCOMPAT_BACKED;
use crate::info::{BackingInfo, VolumeInfo};
use crate::meta::Meta;
use crate::meta::base::encode_base;
use crate::meta::locks::Space;
use crate::meta::pieces::ReadPiece;
use crate::units::{BLOCK_BYTES, SnapshotId};
use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError, Weak};

/// A file outside the store that has the content of volumes where no layer of theirs has any. Its content
/// never changes.
pub trait Backing: Send + Sync {
    /// What tells the file from every other, and from other versions of it, wherever it lies: at most 4,000
    /// bytes. It is recorded in the store.
    fn identity(&self) -> &str;

    /// What errors call it.
    fn name(&self) -> String;

    /// Bytes of its content, a multiple of 512.
    fn size(&self) -> u64;

    /// Fills `buf` from `offset` of its content; both are multiples of 512, and inside.
    ///
    /// # Errors
    /// If it cannot be read, or is damaged.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Whether a read may take minutes, as over a network. A server keeps those who wait for it from having all of its
    /// threads.
    fn is_far(&self) -> bool {
        false
    }
}

impl fmt::Debug for dyn Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// Files by what the store says of them: its bases' labels as they are stored.
pub(super) type Files = std::collections::HashMap<Vec<u8>, Weak<dyn Backing>>;

impl Store {
    /// Creates a volume that shows the content of `file` where nothing was written to it, and zeros behind
    /// the file's end. The file must be given with each [`Store::attach_backing`] to come; here it is
    /// given already.
    ///
    /// # Errors
    /// As [`Store::create_volume`]; `Invalid` if the volume is smaller than the file's content.
    pub fn create_backed(
        &self,
        name: &str,
        size: u64,
        file: &Arc<dyn Backing>,
    ) -> Result<VolumeInfo> {
        if size < file.size() {
            return Err(Error::invalid(format!(
                "a volume of {size} bytes is smaller than the {} bytes of its backing file {}",
                file.size(),
                file.name()
            )));
        }
        let labels = encode_base(file.identity())?;
        self.inner.check_writable()?;
        let slots = self.make_slots(2)?;
        // What is refused leaves the store to those who do not know bases.
        self.inner.meta().check_new_volume(name, size)?;
        // Who does not know bases would read zeros in their place.
        self.inner.announce(INCOMPAT_BACKED)?;
        let [volume, head] = self.inner.births(None);
        let births = [volume, head, self.inner.birth()];
        let end = file.size().next_multiple_of(BLOCK_BYTES);
        let info = self.inner.command(|meta| {
            let id = meta.create_backed(name, size, (&labels, end), births)?;
            slots.taken(meta);
            Ok(volume_info(meta, id))
        })?;
        self.inner.reserve_for_discards();
        Ok(info)
    }

    /// Gives the store a file that volumes of it may rest on, until the handle that is returned goes: the one
    /// it has already, if it has the same file. A file that no volume rests on is of no use and does no harm.
    #[must_use]
    pub fn attach_backing(&self, file: Arc<dyn Backing>) -> Arc<dyn Backing> {
        let Ok(key) = encode_base(file.identity()) else { return file };
        let mut files = self.inner.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = files.get(&key).and_then(Weak::upgrade) {
            return there;
        }
        files.retain(|_, file| file.strong_count() > 0);
        files.insert(key, Arc::downgrade(&file));
        file
    }

    /// Gives the store files for as long as it is open.
    pub(super) fn keep_backing(&self, files: &[Arc<dyn Backing>]) {
        let kept = files.iter().map(|file| self.attach_backing(Arc::clone(file)));
        // Once, when it is opened.
        let _ = self.inner.given.set(kept.collect());
    }

    /// Takes the file from below a volume that rests on one. `from` is another volume of the store whose newest
    /// snapshot, right below its empty head, shows what the file shows: the caller has seen to that. What
    /// rests on the file builds on that snapshot, which is merged into it in the background as any deleted one is; the other
    /// snapshots of `from` become those of the volume under their names; and `from` is gone.
    ///
    /// It is durable on return. Nothing that the volume shows changes with it. A crash leaves the volume on the file, or on
    /// the snapshots, some of which may still be those of `from`: then that is still there, and a further call does the
    /// rest.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if the volume rests on no file, or `from` has no such snapshot or a head that holds something;
    /// `Busy` if `from` is in use, one of them is being rebuilt, or other volumes rest on the same file or build on `from`;
    /// `Exists` if both have a snapshot of the same name. Nothing has changed after these, unless it is somebody who came
    /// meanwhile: then a further call does the rest.
    pub fn adopt(&self, volume: &str, from: &str) -> Result<()> {
        let inner = &*self.inner;
        inner.check_writable()?;
        if volume == from {
            return Err(Error::invalid("a volume cannot take its own snapshots"));
        }
        // The handle keeps the volume from being deleted meanwhile.
        let handle = self.head(volume)?;
        let id = handle.ids().0;
        {
            // Steps of background work change layers, and writers plan by what is below.
            let _step = inner.steps.take();
            let _head = inner.hold_all(id);
            let _layers = inner.hold_in(Space::Snapshots(id), 0..u64::MAX, true);
            inner.command(|meta| {
                let other = meta.find_volume(from)?;
                Ok(meta.rebase(id, other)?)
            })?;
            let adopted = inner.step_in_group(|meta| {
                let other = meta.find_volume(from)?;
                meta.adopt_some(id, other)?;
                // Before anybody gets at what is left of it.
                Ok(meta.delete_volume(other)?)
            });
            // What was done before it failed is right as it is.
            inner.commit()?;
            adopted
        }
    }

    /// The file that a volume rests on, if it does.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn backing(&self, volume: &str) -> Result<Option<BackingInfo>> {
        let meta = self.inner.meta();
        let id = meta.find_volume(volume)?;
        let base = meta.base_under(meta.volume(id).head);
        Ok(base.map(|base| BackingInfo {
            identity: identity_of(&meta, base),
            attached: self.inner.file_of(&meta, base).is_ok(),
            end: meta.snapshot(base).size,
        }))
    }
}

impl Inner {
    /// Says in the superblock that there is something that everybody must know, durably and before there is any.
    pub(super) fn announce(&self, feature: u64) -> Result<()> {
        self.check_writable()?;
        let superblock = *self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        if superblock.incompat & feature != 0 {
            return Ok(());
        }
        self.look_for_command()?;
        self.update_superblock(|superblock| superblock.incompat |= feature)
    }

    /// Whether some file is far that volumes may rest on. Most stores have none.
    pub(crate) fn has_far(&self) -> bool {
        let is_far = |file: &Weak<dyn Backing>| file.upgrade().is_some_and(|file| file.is_far());
        self.files.lock().unwrap_or_else(PoisonError::into_inner).values().any(is_far)
    }

    /// Whether what is below a snapshot or head is in a file that is far.
    pub(crate) fn is_far(&self, meta: &Meta, id: SnapshotId) -> bool {
        let file = meta.base_under(id).and_then(|base| self.file_of(meta, base).ok());
        file.is_some_and(|file| file.is_far())
    }

    /// The files of those pieces that are in one, in order.
    pub(crate) fn files_of(
        &self,
        meta: &Meta,
        pieces: &[ReadPiece],
    ) -> Result<Vec<Arc<dyn Backing>>> {
        pieces.iter().filter_map(ReadPiece::base).map(|base| self.file_of(meta, base)).collect()
    }

    fn file_of(&self, meta: &Meta, base: SnapshotId) -> Result<Arc<dyn Backing>> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.get(&meta.snapshot(base).labels).and_then(Weak::upgrade).ok_or_else(|| {
            // As a disk that is not there: a client is not told that it asked for something wrong.
            Error::new(ErrorKind::Io, format!(
                "the content is in a backing file that is not given, or is not the file it was: {}; give \
                 that file with --backing-file, a backup with --backing-backup",
                identity_of(meta, base)
            ))
        })
    }
}

/// Fills `buf` from `offset` of the content of a file: zeros behind its end.
pub(crate) fn read_file(file: &dyn Backing, offset: u64, buf: &mut [u8]) -> Result<()> {
    let inside = file.size().saturating_sub(offset).min(buf.len() as u64) as usize;
    let (buf, behind) = buf.split_at_mut(inside);
    behind.fill(0);
    if buf.is_empty() {
        return Ok(());
    }
    file.read_at(offset, buf).map_err(|error| {
        Error::io(error, format!("reading the backing file {} failed", file.name()))
    })
}
