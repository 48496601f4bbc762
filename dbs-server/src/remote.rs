//! A store served by another process, through its control socket: the same calls as on an open
//! [`Store`](dbs_core::Store), with data over NBD.

use crate::api::{Ranges, Request};
use crate::control::{Client, Watch};
use crate::nbd::wire::Errno;
use crate::nbd::{self, ClientOptions, Failure};
use crate::transfer::{BlockAccess, StoreAccess};
use dbs_core::info::{Labels, MapRange, RangeState, SnapshotInfo, Usage, VolumeInfo};
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The NBD context with a volume's map.
const MAP_CONTEXT: &str = "base:allocation";
/// Its flag for ranges that are not stored.
const HOLE_FLAG: u32 = 1;
/// Its flag for ranges that read as zeros.
const ZERO_FLAG: u32 = 2;

/// A served store.
pub struct RemoteStore {
    path: PathBuf,
    client: Mutex<Client>,
}

impl RemoteStore {
    /// Connects to the control socket at `path`.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), client: Mutex::new(Client::connect(path)?) })
    }

    /// Runs a command there. See [`Client::call`].
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call(&self, request: &Request, watch: &mut Watch<'_>) -> Result<Value> {
        lock(&self.client).call(request, watch)
    }

    /// Writes the metadata to `out`. See [`Client::dump`].
    ///
    /// # Errors
    /// As [`Client::dump`].
    pub fn dump(&self, out: &mut dyn Write, watch: &mut Watch<'_>) -> Result<()> {
        lock(&self.client).dump(out, watch)
    }

    /// The server's process, if it can be seen from here.
    #[must_use]
    pub fn server_process(&self) -> Option<u32> {
        lock(&self.client).server_process()
    }

    /// A connection to the server that speaks NBD, which the server begins.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_nbd(&self) -> Result<UnixStream> {
        Client::connect(&self.path)?.into_nbd()
    }

    fn get<T: DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let mut value = self.call(request, &mut |_| true)?;
        fill_usage(&mut value);
        serde_json::from_value(value)
            .map_err(|e| Error::new(ErrorKind::Io, format!("the server's answer: {e}")))
    }

    fn find(&self, spec: &str) -> Result<()> {
        let show = match spec.split_once('@') {
            None => Request::VolumeShow { volume: spec.to_owned() },
            Some((volume, snapshot)) => {
                Request::SnapshotShow { volume: volume.to_owned(), snapshot: snapshot.to_owned() }
            }
        };
        self.run(&show)
    }

    fn run(&self, request: &Request) -> Result<()> {
        self.call(request, &mut |_| true).map(drop)
    }
}

impl StoreAccess for RemoteStore {
    fn volume_info(&self, volume: &str) -> Result<VolumeInfo> {
        self.get(&Request::VolumeShow { volume: volume.to_owned() })
    }

    fn snapshots(&self, volume: &str) -> Result<Vec<SnapshotInfo>> {
        self.get(&Request::SnapshotList { volume: volume.to_owned(), usage: false })
    }

    fn create_volume(&self, name: &str, size: u64) -> Result<()> {
        self.run(&Request::VolumeCreate { volume: name.to_owned(), size })
    }

    fn resize_volume(&self, name: &str, size: u64) -> Result<()> {
        self.run(&Request::VolumeResize { volume: name.to_owned(), size, shrink: true })
    }

    fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<()> {
        self.run(&Request::SnapshotCreate {
            volume: volume.to_owned(),
            snapshot: name.to_owned(),
            labels: options.labels.clone(),
            system: options.system,
        })
    }

    fn delete_snapshot(&self, volume: &str, name: &str) -> Result<()> {
        let (volume, snapshot) = (volume.to_owned(), name.to_owned());
        self.run(&Request::SnapshotDelete { volume, snapshot })
    }

    fn set_labels(&self, volume: &str, snapshot: &str, labels: &Labels) -> Result<()> {
        let (volume, snapshot) = (volume.to_owned(), snapshot.to_owned());
        let show = Request::SnapshotShow { volume: volume.clone(), snapshot: snapshot.clone() };
        let old: SnapshotInfo = self.get(&show)?;
        let remove = old.labels.into_keys().filter(|key| !labels.contains_key(key)).collect();
        self.run(&Request::SnapshotLabel { volume, snapshot, set: labels.clone(), remove })?;
        self.run(&Request::Flush)
    }

    fn diff(
        &self,
        volume: &str,
        from: &str,
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
                from: Some(from.to_owned()),
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
        let stream = self.connect_nbd()?;
        let options = ClientOptions { contexts: vec![MAP_CONTEXT.to_owned()], extended: true };
        let client = nbd::Client::over(stream, spec, &options).map_err(|refused| {
            // NBD has no word for "not found": the store says what is wrong, if it is that.
            self.find(spec).err().unwrap_or_else(|| failed(refused, spec))
        })?;
        let (size, spec) = (client.size(), spec.to_owned());
        Ok(Box::new(RemoteVolume { spec, size, client: Mutex::new(client) }))
    }
}

/// A volume or snapshot of a served store.
struct RemoteVolume {
    spec: String,
    size: u64,
    client: Mutex<nbd::Client<UnixStream>>,
}

impl RemoteVolume {
    fn with<T>(
        &self,
        call: impl FnOnce(&mut nbd::Client<UnixStream>) -> io::Result<T>,
    ) -> Result<T> {
        call(&mut lock(&self.client)).map_err(|e| failed(e, &self.spec))
    }
}

impl BlockAccess for RemoteVolume {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.with(|client| client.read_at(offset, buf))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.with(|client| client.write_at(offset, buf, false))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        self.with(|client| client.write_zeroes(offset, length, 0))
    }

    fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.with(|client| client.trim(offset, length, false))
    }

    fn flush(&self) -> Result<()> {
        self.with(nbd::Client::flush)
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        let extents = self.with(|client| client.block_status(MAP_CONTEXT, offset, length))?;
        let mut at = offset;
        let ranges = extents.into_iter().take(limit).map(|extent| {
            let range = MapRange { offset: at, length: extent.length, state: state(extent.flags) };
            at = at.saturating_add(extent.length);
            range
        });
        Ok(ranges.collect())
    }
}

fn state(flags: u32) -> RangeState {
    match (flags & HOLE_FLAG != 0, flags & ZERO_FLAG != 0) {
        (true, true) => RangeState::Hole,
        (false, true) => RangeState::Zero,
        (_, false) => RangeState::Data,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(error: io::Error, spec: &str) -> Error {
    let failure = error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>());
    let kind = match failure.map(|failure| failure.errno) {
        Some(Errno::NoSpace) => ErrorKind::NoSpace,
        Some(Errno::Perm) => ErrorKind::ReadOnly,
        Some(Errno::Invalid | Errno::Overflow) => ErrorKind::Invalid,
        Some(Errno::NotSupported) => ErrorKind::Unsupported,
        Some(Errno::Shutdown) => ErrorKind::Interrupted,
        Some(Errno::Io) => ErrorKind::Io,
        None => return Error::io(error, format!("{spec} on the server")),
    };
    Error::new(kind, failure.map(|failure| failure.message.clone()).unwrap_or_default())
        .context(spec)
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
