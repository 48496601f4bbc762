//! Buffers for the pieces in flight: few, aligned for direct I/O, used again.

use crate::ssync::BATCH;
use dbs_core::io::buffer::AlignedBuf;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A bounded number of buffers; who finds none waits.
#[derive(Clone)]
pub(super) struct Buffers {
    free: Arc<Mutex<Vec<AlignedBuf>>>,
    permits: Arc<Semaphore>,
}

impl Buffers {
    pub fn new(count: usize) -> Self {
        Self { free: Arc::default(), permits: Arc::new(Semaphore::new(count)) }
    }

    /// A buffer of `length` bytes with arbitrary content. Those longer than [`BATCH`] are allocated
    /// and not kept.
    pub async fn take(&self, length: usize) -> Buffer {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        let kept = (length <= BATCH as usize).then(|| self.free().pop()).flatten();
        let buf = kept.unwrap_or_else(|| AlignedBuf::zeroed(length.max(BATCH as usize)));
        Buffer { buf: Some(buf), length, home: self.clone(), _permit: permit }
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<AlignedBuf>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer on loan.
pub(super) struct Buffer {
    /// `Some` until dropped.
    buf: Option<AlignedBuf>,
    length: usize,
    home: Buffers,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], |buf| &buf[..self.length])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buf.as_mut().map_or(&mut [], |buf| &mut buf[..self.length])
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take().filter(|buf| buf.len() == BATCH as usize) {
            self.home.free().push(buf);
        }
    }
}
