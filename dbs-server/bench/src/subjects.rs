//! The things that can be measured.

use super::load::{Queue, Subject};
use dbs_core::info::RangeState;
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::io::open::{OpenedStorage, open_storage};
use dbs_core::io::queue::{Action, QueueFile, RequestQueue};
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, ErrorKind, IoDriver, Result};
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::uri::ReadWrite;
use dbs_nbd::wire::{extent_flag, flag};
use dbs_nbd::{Buffered, Client, ClientOptions, Pipeline};
use dbs_transfer::{BlockAccess, translate};
use fastrand::Rng;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Places looked at to estimate how much of a volume holds data.
const SAMPLES: u64 = 256;
/// The same places each time.
const SAMPLES_SEED: u64 = 1;

/// A volume in this process: each request has a thread that waits for it.
pub struct VolumeSubject<'a> {
    /// The volume or snapshot.
    pub access: Box<dyn BlockAccess + 'a>,
    /// Why it cannot be written, if so.
    pub read_only: Option<String>,
}

impl Subject for VolumeSubject<'_> {
    fn size(&self) -> u64 {
        self.access.size()
    }

    fn refuses_writes(&self) -> Option<String> {
        self.read_only.clone()
    }

    fn refuses_flushes(&self) -> Option<String> {
        None
    }

    fn data_share(&self, length: u64) -> Result<Option<f64>> {
        sample(length, &mut |offset| {
            let ranges = self.access.map(offset, BLOCK_BYTES, 1)?;
            Ok(ranges.first().is_some_and(|range| range.state == RangeState::Data))
        })
        .map(Some)
    }

    fn queues(&self, depth: u32, block: u32) -> Result<Vec<Box<dyn Queue + '_>>> {
        Ok(blocking(depth, block, || {
            |action: Action, offset, buf: &mut [u8]| match action {
                Action::Read => self.access.read_at(offset, buf),
                Action::Write => self.access.write_at(offset, buf),
                Action::Flush => self.access.flush(),
            }
        }))
    }
}

/// An NBD client of any stream.
pub type AnyClient = Client<Buffered<Box<dyn ReadWrite>>>;

/// An export of an NBD server: one connection with all requests in flight.
pub struct NbdSubject<'a> {
    connect: Box<dyn Fn() -> Result<Box<dyn ReadWrite>> + Sync + 'a>,
    export: String,
    size: u64,
    flags: u16,
    /// For questions, when nothing is measured.
    client: Mutex<AnyClient>,
}

impl<'a> NbdSubject<'a> {
    /// The export `export` of the server that `connect` reaches.
    ///
    /// # Errors
    /// Those of connecting; the server's refusal.
    pub fn new(
        connect: impl Fn() -> Result<Box<dyn ReadWrite>> + Sync + 'a,
        export: &str,
    ) -> Result<Self> {
        let client = negotiate(connect()?, export)?;
        let (size, flags) = (client.size(), client.flags());
        let (connect, export) = (Box::new(connect), export.to_owned());
        Ok(Self { connect, export, size, flags, client: Mutex::new(client) })
    }
}

impl Subject for NbdSubject<'_> {
    fn size(&self) -> u64 {
        self.size
    }

    fn refuses_writes(&self) -> Option<String> {
        let read_only = self.flags & flag::READ_ONLY != 0;
        read_only.then(|| "the server offers it for reading only".to_owned())
    }

    fn refuses_flushes(&self) -> Option<String> {
        let flushes = self.flags & flag::SEND_FLUSH != 0;
        (!flushes).then(|| "the server offers no flush".to_owned())
    }

    fn data_share(&self, length: u64) -> Result<Option<f64>> {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if !client.contexts().any(|name| name == BASE_ALLOCATION) {
            return Ok(None);
        }
        sample(length, &mut |offset| {
            let extents = client.block_status(BASE_ALLOCATION, offset, BLOCK_BYTES);
            let extents = extents.map_err(translate)?;
            let zero = extent_flag::ZERO | extent_flag::HOLE;
            Ok(extents.first().is_some_and(|extent| extent.flags & zero == 0))
        })
        .map(Some)
    }

    fn queues(&self, depth: u32, block: u32) -> Result<Vec<Box<dyn Queue + '_>>> {
        let client = negotiate((self.connect)()?, &self.export)?;
        let pipeline = Pipeline::new(client, depth as usize, block as usize);
        let pipeline = pipeline.map_err(|e| Error::invalid(e.to_string()))?;
        Ok(vec![Box::new(NbdQueue { pipeline, slots: depth as usize })])
    }
}

fn negotiate(stream: Box<dyn ReadWrite>, export: &str) -> Result<AnyClient> {
    let options = ClientOptions { contexts: vec![BASE_ALLOCATION.to_owned()], extended: false };
    Client::over(Buffered::new(stream), export, &options)
        .map_err(|e| translate(e).context(format!("opening the export `{export}`")))
}

struct NbdQueue {
    pipeline: Pipeline<Box<dyn ReadWrite>>,
    slots: usize,
}

impl Queue for NbdQueue {
    fn slots(&self) -> usize {
        self.slots
    }

    fn buffer(&mut self, slot: usize) -> Result<&mut [u8]> {
        self.pipeline.buffer(slot).map_err(translate)
    }

    fn start(&mut self, slot: usize, action: Action, offset: u64, length: u32) -> Result<()> {
        self.pipeline.start(slot, action, offset, length).map_err(translate)
    }

    fn finish(&mut self, done: &mut Vec<usize>) -> Result<()> {
        self.pipeline.finish(done).map_err(translate)
    }
}

/// A file or block device itself.
pub struct DeviceSubject {
    path: PathBuf,
    io: DeviceIo,
    size: u64,
    /// Around the page cache.
    direct: bool,
}

enum DeviceIo {
    /// A ring with all requests in flight.
    Ring(QueueFile),
    /// A thread for each.
    Threads(OpenedStorage),
}

impl DeviceSubject {
    /// Opens and locks what is at `path`.
    ///
    /// # Errors
    /// As [`open_storage`].
    pub fn open(path: &Path, read_only: bool, driver: IoDriver) -> Result<Self> {
        let ring = match driver {
            IoDriver::Pread => None,
            _ => match QueueFile::open(path, read_only) {
                Err(e) if e.kind() == ErrorKind::Unsupported && driver == IoDriver::Auto => None,
                other => Some(other?),
            },
        };
        let (info, io) = match ring {
            Some(file) => (file.info(), DeviceIo::Ring(file)),
            None => {
                let storage = open_storage(path, read_only, IoDriver::Pread)?;
                (storage.info, DeviceIo::Threads(storage))
            }
        };
        Ok(Self { path: path.to_owned(), io, size: info.size_bytes, direct: info.direct })
    }

    /// What moves the bytes: `io_uring` or `pread`.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        if matches!(self.io, DeviceIo::Ring(_)) { "io_uring" } else { "pread" }
    }

    /// Whether it is around the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl Subject for DeviceSubject {
    fn size(&self) -> u64 {
        self.size
    }

    fn refuses_writes(&self) -> Option<String> {
        // Opening it for writing would have failed.
        None
    }

    fn refuses_flushes(&self) -> Option<String> {
        None
    }

    /// For a file as a whole.
    fn data_share(&self, _length: u64) -> Result<Option<f64>> {
        let metadata = std::fs::metadata(&self.path)
            .map_err(|e| Error::io(e, format!("looking at `{}`", self.path.display())))?;
        if metadata.file_type().is_block_device() {
            return Ok(None);
        }
        let stored = metadata.blocks() as f64 * 512.0;
        Ok(Some((stored / (self.size as f64).max(1.0)).min(1.0)))
    }

    fn queues(&self, depth: u32, block: u32) -> Result<Vec<Box<dyn Queue + '_>>> {
        match &self.io {
            DeviceIo::Ring(file) => {
                let queue = file.queue(depth as usize, block as usize)?;
                Ok(vec![Box::new(DeviceQueue { queue, slots: depth as usize })])
            }
            DeviceIo::Threads(opened) => Ok(blocking(depth, block, || {
                |action, offset, buf: &mut [u8]| {
                    let storage = &opened.storage;
                    match action {
                        Action::Read => storage.read_at(offset, buf),
                        Action::Write => storage.write_at(offset, buf),
                        Action::Flush => storage.flush(),
                    }
                    .map_err(device_failed)
                }
            })),
        }
    }
}

struct DeviceQueue {
    queue: RequestQueue,
    slots: usize,
}

impl Queue for DeviceQueue {
    fn slots(&self) -> usize {
        self.slots
    }

    fn buffer(&mut self, slot: usize) -> Result<&mut [u8]> {
        self.queue.buffer(slot).map_err(device_failed)
    }

    fn start(&mut self, slot: usize, action: Action, offset: u64, length: u32) -> Result<()> {
        self.queue.start(slot, action, offset, length).map_err(device_failed)
    }

    fn finish(&mut self, done: &mut Vec<usize>) -> Result<()> {
        self.queue.finish(done).map_err(device_failed)
    }
}

fn device_failed(error: std::io::Error) -> Error {
    Error::io(error, "a request failed")
}

/// A queue of one request, which is done when it was started.
struct BlockingQueue<F> {
    call: F,
    buf: AlignedBuf,
    done: bool,
}

/// One queue for each request in flight.
fn blocking<'a, F>(depth: u32, block: u32, call: impl Fn() -> F) -> Vec<Box<dyn Queue + 'a>>
where
    F: FnMut(Action, u64, &mut [u8]) -> Result<()> + Send + 'a,
{
    let queue = |_| {
        let buf = AlignedBuf::zeroed(block as usize);
        Box::new(BlockingQueue { call: call(), buf, done: false }) as Box<dyn Queue>
    };
    (0..depth).map(queue).collect()
}

impl<F: FnMut(Action, u64, &mut [u8]) -> Result<()> + Send> Queue for BlockingQueue<F> {
    fn slots(&self) -> usize {
        1
    }

    fn buffer(&mut self, _slot: usize) -> Result<&mut [u8]> {
        Ok(&mut self.buf)
    }

    fn start(&mut self, _slot: usize, action: Action, offset: u64, length: u32) -> Result<()> {
        let Some(part) = self.buf.get_mut(..length as usize) else {
            return Err(Error::invalid("a request longer than its buffer"));
        };
        (self.call)(action, offset, part)?;
        self.done = true;
        Ok(())
    }

    fn finish(&mut self, done: &mut Vec<usize>) -> Result<()> {
        if std::mem::take(&mut self.done) {
            done.push(0);
        }
        Ok(())
    }
}

/// The share of some places for which `holds_data` says so.
fn sample(length: u64, holds_data: &mut dyn FnMut(u64) -> Result<bool>) -> Result<f64> {
    let blocks = (length / BLOCK_BYTES).max(1);
    let mut random = Rng::with_seed(SAMPLES_SEED);
    let mut found = 0;
    for _ in 0..SAMPLES {
        found += u64::from(holds_data(random.u64(..blocks) * BLOCK_BYTES)?);
    }
    Ok(found as f64 / SAMPLES as f64)
}
