//! A store served by another process, through its control socket: the same calls as on an open
//! [`Store`](dbs_core::Store), with data over NBD.

mod volume;
mod vouch;

use dbs_control::api::{MARKER, Ranges, Request};
use dbs_control::{Client, Watch, is_trusted};
use dbs_core::info::{Labels, MapRange, SnapshotInfo, Usage, VolumeInfo};
use dbs_core::store::{SnapshotOptions, WrappedKey};
use dbs_core::{Error, ErrorKind, Result};
use dbs_transfer::{BlockAccess, StoreAccess};
use nix::unistd::Uid;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use volume::RemoteVolume;
use vouch::Vouches;

/// The NBD context with a volume's map.
const MAP_CONTEXT: &str = "base:allocation";
/// Most control connections kept for the next command.
const IDLE_MAX: usize = 4;

/// A served store. Each of the threads that run commands at once has a connection of its own; a
/// server that was replaced meanwhile is connected to anew.
pub struct RemoteStore {
    server: Place,
    idle: Mutex<Vec<Client>>,
    /// What was written to its volumes.
    vouches: Arc<Vouches>,
}

/// Where a server is, and which store it must serve.
#[derive(Clone)]
struct Place {
    socket: PathBuf,
    key: String,
    /// Whose server is believed where anybody may listen; `None` where others cannot.
    users: Option<Vec<Uid>>,
}

impl Place {
    fn connect(&self) -> Result<Client> {
        let client = Client::connect(&self.socket)?;
        if self.users.as_ref().is_some_and(|users| !client.is_of(users)) {
            return Err(Error::busy(format!(
                "the server on {} runs neither as root, nor as this user, nor as the owner of the \
                 store, and is not trusted; to trust it, name its directory with DBS_RUNTIME_DIR",
                self.socket.display()
            )));
        }
        client.of_store(&self.key).map_err(|e| e.context(self.socket.display()))
    }

    /// As [`Place::connect`], where there was a server before.
    fn connect_anew(&self) -> Result<Client> {
        self.connect().map_err(|error| match error.kind() {
            // `NotFound` would say of a volume that it was deleted.
            ErrorKind::NotFound => {
                Error::new(ErrorKind::Io, format!("the server has gone: {error}"))
            }
            _ => error,
        })
    }
}

impl RemoteStore {
    /// Connects to the control socket at `path` of the store with this key
    /// ([`dbs_core::Store::key`]), now and whenever it has to connect anew. In a default directory that
    /// another user could have made, the server must be of this user or of root.
    ///
    /// # Errors
    /// As [`Client::connect_to`]; `Busy` for the server of another user there.
    pub fn connect(path: &Path, key: &str) -> Result<Self> {
        let trusted = path.parent().is_none_or(is_trusted);
        let users = (!trusted).then(|| vec![Uid::from_raw(0), Uid::effective()]);
        Self::connect_as(Place { socket: path.to_owned(), key: key.to_owned(), users })
    }

    /// As [`RemoteStore::connect`], to a socket that anybody may have put there: the server must be of
    /// one of these users.
    ///
    /// # Errors
    /// As [`RemoteStore::connect`]; `Busy` if it is not.
    pub(crate) fn connect_found(path: &Path, key: &str, users: Vec<Uid>) -> Result<Self> {
        Self::connect_as(Place { socket: path.to_owned(), key: key.to_owned(), users: Some(users) })
    }

    fn connect_as(server: Place) -> Result<Self> {
        let first = server.connect()?;
        Ok(Self { server, idle: Mutex::new(vec![first]), vouches: Arc::default() })
    }

    /// Runs a command there. See [`Client::call`].
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call(&self, request: &Request, watch: &mut Watch<'_>) -> Result<Value> {
        // Who has written would take either for a word on what was written.
        let vouches = matches!(request, Request::Flush | Request::SnapshotCreate { .. });
        if !vouches {
            return self.with(|client| client.call(request, watch));
        }
        // A connection that is dead shows that another server may answer.
        self.with(|_| Ok(()))?;
        self.vouches.all.check()?;
        let covered = self.vouches.before_flush();
        let value = self.with(|client| client.call(request, watch))?;
        self.vouches.flushed(&covered, &self.vouches.all).map(|()| value)
    }

    /// Makes durable what was written over it. Who wrote nothing, or has flushed it, asks the server for nothing.
    ///
    /// # Errors
    /// As [`Client::call`]; `Io` if something of it may be lost.
    pub fn flush_written(&self) -> Result<()> {
        if !self.vouches.is_owed() {
            return Ok(());
        }
        // Whatever keeps it from being flushed, it may be lost.
        self.run(&Request::Flush).map_err(|error| {
            let text = format!("what was written may not be durable: {error}");
            Error::new(ErrorKind::Io, text)
        })
    }

    /// Writes the metadata to `out`. See [`Client::dump`].
    ///
    /// # Errors
    /// As [`Client::dump`].
    pub fn dump(&self, out: &mut dyn Write, watch: &mut Watch<'_>) -> Result<()> {
        self.with(|client| client.dump(out, watch))
    }

    /// The server's process, if it can be seen from here.
    #[must_use]
    pub fn server_process(&self) -> Option<u32> {
        self.with(|client| Ok(client.server_process())).ok().flatten()
    }

    /// A connection to the server that speaks NBD, which the server begins.
    ///
    /// # Errors
    /// As [`Client::connect_to`].
    pub fn connect_nbd(&self) -> Result<UnixStream> {
        self.server.connect_anew()?.into_nbd()
    }

    fn with<T>(&self, call: impl FnOnce(&mut Client) -> Result<T>) -> Result<T> {
        let idle = lock(&self.idle).pop();
        let found = idle.is_some();
        let mut client = match idle.filter(Client::is_alive) {
            Some(client) => client,
            None => {
                if found {
                    self.vouches.broke();
                }
                self.server.connect_anew()?
            }
        };
        let result = call(&mut client);
        let mut idle = lock(&self.idle);
        match result.as_ref().map_err(Error::kind) {
            // The connection may have failed, and the others with it.
            Err(ErrorKind::Io) => {
                if !client.is_alive() {
                    self.vouches.broke();
                }
                idle.clear();
            }
            // It is closed on our side.
            Err(ErrorKind::Interrupted) => {}
            _ if client.is_alive() && idle.len() < IDLE_MAX => idle.push(client),
            _ => {}
        }
        result
    }

    fn get<T: DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let mut value = self.call(request, &mut |_| true)?;
        fill_usage(&mut value);
        serde_json::from_value(value)
            .map_err(|e| Error::new(ErrorKind::Io, format!("the server's answer: {e}")))
    }

    /// Identity of a volume or snapshot.
    ///
    /// # Errors
    /// `NotFound`, and those of the connection.
    pub fn uuid(&self, spec: &str) -> Result<String> {
        let show = match spec.split_once('@') {
            None => Request::VolumeShow { volume: spec.to_owned(), usage: false },
            Some((volume, snapshot)) => Request::SnapshotShow {
                volume: volume.to_owned(),
                snapshot: snapshot.to_owned(),
                usage: false,
            },
        };
        let answer = self.call(&show, &mut |_| true)?;
        let uuid = answer["uuid"].as_str().map(str::to_owned);
        uuid.ok_or_else(|| Error::new(ErrorKind::Io, "the server's answer has no uuid"))
    }

    /// Whether what there is of this name is a volume that is being filled, or a snapshot of one that is
    /// rebuilt.
    fn is_incomplete(&self, spec: &str) -> Result<bool> {
        let Some((volume, _)) = spec.split_once('@') else {
            return self.volume_info(spec).map(|volume| volume.rebuilding);
        };
        self.uuid(spec)?;
        let received = || Ok::<_, Error>(self.snapshots(volume)?.iter().any(|s| s.name == MARKER));
        Ok(self.volume_info(volume)?.rebuilding && !received()?)
    }

    /// Whether what there is of this name is an encrypted volume that is locked, or a snapshot of one.
    fn is_locked(&self, spec: &str) -> bool {
        let name = spec.split_once('@').map_or(spec, |(name, _)| name);
        let encryption = self.volume_info(name).ok().and_then(|info| info.encryption);
        encryption.is_some_and(|encryption| encryption.locked)
    }

    /// Why the server refuses an export. NBD has no words for "not found", "busy" and "locked": the store says whether it
    /// is that.
    fn refused(&self, spec: &str, error: Error) -> Error {
        match self.is_incomplete(spec) {
            Err(why) => why,
            Ok(true) => Error::busy(error.to_string()),
            Ok(false) if self.is_locked(spec) => Error::new(ErrorKind::Locked, error.to_string()),
            Ok(false) => error,
        }
    }

    fn run(&self, request: &Request) -> Result<()> {
        self.call(request, &mut |_| true).map(drop)
    }
}

impl StoreAccess for RemoteStore {
    fn volume_info(&self, volume: &str) -> Result<VolumeInfo> {
        self.get(&Request::VolumeShow { volume: volume.to_owned(), usage: false })
    }

    fn volumes(&self) -> Result<Vec<VolumeInfo>> {
        self.get(&Request::VolumeList { usage: false })
    }

    fn snapshots(&self, volume: &str) -> Result<Vec<SnapshotInfo>> {
        self.get(&Request::SnapshotList { volume: volume.to_owned(), usage: false })
    }

    fn snapshot_info(&self, volume: &str, snapshot: &str) -> Result<SnapshotInfo> {
        let (volume, snapshot) = (volume.to_owned(), snapshot.to_owned());
        self.get(&Request::SnapshotShow { volume, snapshot, usage: false })
    }

    fn children(&self, volume: &str, snapshot: Option<&str>) -> Result<Vec<String>> {
        let (volume, snapshot) = (volume.to_owned(), snapshot.map(str::to_owned));
        self.get(&Request::VolumeChildren { volume, snapshot })
    }

    fn create_rebuilding(&self, name: &str, size: u64) -> Result<()> {
        self.run(&Request::VolumeCreate { volume: name.to_owned(), size, rebuilding: true })
    }

    fn create_wrapped(&self, name: &str, size: u64, key: &WrappedKey) -> Result<()> {
        self.run(&Request::VolumeCreateWrapped { volume: name.to_owned(), size, key: key.clone() })
    }

    fn wrapped_key(&self, volume: &str) -> Result<WrappedKey> {
        self.get(&Request::VolumeWrappedKey { volume: volume.to_owned() })
    }

    fn clone_rebuilding(&self, volume: &str, snapshot: &str, new: &str) -> Result<()> {
        self.run(&Request::VolumeClone {
            volume: volume.to_owned(),
            snapshot: snapshot.to_owned(),
            new: new.to_owned(),
            rebuilding: true,
        })
    }

    fn complete(&self, volume: &str) -> Result<()> {
        self.run(&Request::VolumeComplete { volume: volume.to_owned(), uuid: None })
    }

    fn resize_volume(&self, name: &str, size: u64) -> Result<()> {
        self.run(&Request::VolumeResize { volume: name.to_owned(), size, shrink: true, uuid: None })
    }

    fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<()> {
        self.run(&Request::SnapshotCreate {
            volume: volume.to_owned(),
            snapshot: name.to_owned(),
            labels: options.labels.clone(),
            system: options.system,
            rebuilding: options.rebuilding,
        })
    }

    fn delete_snapshot(&self, volume: &str, name: &str) -> Result<()> {
        let (volume, snapshot) = (volume.to_owned(), name.to_owned());
        self.run(&Request::SnapshotDelete { volume, snapshot, uuid: None })
    }

    fn rollback(&self, volume: &str, snapshot: &str) -> Result<()> {
        let (volume, snapshot) = (volume.to_owned(), snapshot.to_owned());
        self.run(&Request::SnapshotRollback { volume, snapshot, uuid: None })
    }

    fn set_labels(&self, volume: &str, snapshot: &str, labels: &Labels) -> Result<()> {
        let (volume, snapshot) = (volume.to_owned(), snapshot.to_owned());
        let old = self.snapshot_info(&volume, &snapshot)?;
        let remove = old.labels.into_keys().filter(|key| !labels.contains_key(key)).collect();
        self.run(&Request::SnapshotLabel { volume, snapshot, set: labels.clone(), remove })?;
        self.run(&Request::Flush)
    }

    fn diff(
        &self,
        volume: &str,
        from: Option<&str>,
        to: Option<&str>,
        offset: u64,
        length: u64,
    ) -> Result<Vec<MapRange>> {
        let end = offset.saturating_add(length);
        let mut all = Vec::new();
        let mut next = Some(offset);
        while let Some(offset) = next {
            let part: Ranges = self.get(&Request::VolumeDiff {
                volume: volume.to_owned(),
                from: from.map(str::to_owned),
                to: to.map(str::to_owned),
                offset,
                length: Some(end - offset),
            })?;
            all.extend(part.ranges);
            if part.next.is_some_and(|next| next <= offset || next > end) {
                return Err(Error::new(ErrorKind::Io, "the server's differences do not end"));
            }
            next = part.next;
        }
        Ok(all)
    }

    fn open(&self, spec: &str) -> Result<Box<dyn BlockAccess>> {
        Ok(Box::new(RemoteVolume::open(self, spec, Client::into_nbd)?))
    }

    fn open_stored(&self, spec: &str) -> Result<Box<dyn BlockAccess>> {
        Ok(Box::new(RemoteVolume::open(self, spec, Client::into_stored)?))
    }

    fn open_to_fill(&self, volume: &str, stored: bool) -> Result<Box<dyn BlockAccess>> {
        let speak = if stored { Client::into_fill_stored } else { Client::into_fill };
        Ok(Box::new(RemoteVolume::open(self, volume, speak)?))
    }
}

/// The error for a name that something else has by now.
pub(crate) fn replaced(spec: &str) -> Error {
    Error::not_found(format!(
        "`{spec}` was deleted or renamed, and something else has the name now; look it up again"
    ))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives volumes and snapshots without usage an empty one, so that they read as their type.
pub fn fill_usage(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(fill_usage),
        Value::Object(item) if item.contains_key("created_ns") => {
            let none = || serde_json::to_value(Usage::default()).unwrap_or_default();
            item.entry("usage").or_insert_with(none);
        }
        _ => {}
    }
}
