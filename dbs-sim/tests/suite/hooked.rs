//! A simulated disk that calls somebody at a moment that no plan of faults can name.

use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use dbs_sim::SimDisk;
use std::io;
use std::sync::{Arc, Mutex};

type Hook = Box<dyn FnOnce() + Send>;

/// The disk, and what is done at the next call of a kind.
pub struct Hooked {
    pub disk: Arc<SimDisk>,
    on_allocate: Mutex<Option<Hook>>,
    on_discard: Mutex<Option<Hook>>,
    /// Flushes until it, itself counted.
    on_flush: Mutex<Option<(u64, Hook)>>,
    /// Writes at this byte find no space.
    full_at: Mutex<Option<u64>>,
}

impl Hooked {
    pub fn new(disk: &Arc<SimDisk>) -> Arc<Self> {
        Arc::new(Self {
            disk: Arc::clone(disk),
            on_allocate: Mutex::default(),
            on_discard: Mutex::default(),
            on_flush: Mutex::default(),
            full_at: Mutex::default(),
        })
    }

    /// Calls this once, before space is reserved.
    pub fn on_allocate(&self, hook: impl FnOnce() + Send + 'static) {
        *self.on_allocate.lock().unwrap() = Some(Box::new(hook));
    }

    /// Calls this once, before space is given back.
    pub fn on_discard(&self, hook: impl FnOnce() + Send + 'static) {
        *self.on_discard.lock().unwrap() = Some(Box::new(hook));
    }

    /// Calls this once, before the `nth` flush from now, counted from 1.
    pub fn on_flush(&self, nth: u64, hook: impl FnOnce() + Send + 'static) {
        *self.on_flush.lock().unwrap() = Some((nth, Box::new(hook)));
    }

    /// From now on there is no space for a write at this byte, as on a file system that writes elsewhere.
    pub fn full_at(&self, offset: u64) {
        *self.full_at.lock().unwrap() = Some(offset);
    }

    /// Whether nothing waits to be called.
    pub fn is_done(&self) -> bool {
        self.on_allocate.lock().unwrap().is_none() && self.on_discard.lock().unwrap().is_none()
    }
}

/// Not held while it runs: it may come here again.
fn call(hook: &Mutex<Option<Hook>>) {
    let hook = hook.lock().unwrap().take();
    if let Some(hook) = hook {
        hook();
    }
}

impl Storage for Hooked {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        self.disk.read_many(requests)
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        let full = *self.full_at.lock().unwrap();
        if requests.iter().any(|request| Some(request.offset) == full) {
            return Err(io::Error::from_raw_os_error(28));
        }
        self.disk.write_many(requests)
    }

    fn flush(&self) -> io::Result<()> {
        let due = {
            let mut waiting = self.on_flush.lock().unwrap();
            if let Some((left, _)) = &mut *waiting {
                *left -= 1;
            }
            waiting.take_if(|(left, _)| *left == 0)
        };
        due.into_iter().for_each(|(_, hook)| hook());
        self.disk.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        call(&self.on_discard);
        self.disk.discard(offset, len_bytes)
    }

    fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        call(&self.on_allocate);
        self.disk.allocate(offset, len_bytes)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.disk.set_size(size_bytes)
    }

    fn driver(&self) -> &'static str {
        "hooked"
    }
}
