//! Storage that is only read, by whatever says what is there.

use super::{ReadRequest, Storage, WriteRequest};
use std::io;

/// What `read` says is there; every change is refused.
pub struct ReadBy<F> {
    size_bytes: u64,
    read: F,
}

impl<F> ReadBy<F>
where
    F: Fn(&mut [ReadRequest<'_>]) -> io::Result<()> + Send + Sync,
{
    /// Storage of so many bytes.
    pub fn new(size_bytes: u64, read: F) -> Self {
        Self { size_bytes, read }
    }
}

impl<F> Storage for ReadBy<F>
where
    F: Fn(&mut [ReadRequest<'_>]) -> io::Result<()> + Send + Sync,
{
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        (self.read)(requests)
    }

    fn write_many(&self, _requests: &[WriteRequest<'_>]) -> io::Result<()> {
        refused()
    }

    fn flush(&self) -> io::Result<()> {
        refused()
    }

    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        refused()
    }

    fn allocate(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        refused()
    }

    fn set_size(&self, _size_bytes: u64) -> io::Result<()> {
        refused()
    }

    fn resizable(&self) -> bool {
        false
    }

    fn driver(&self) -> &'static str {
        "read-only"
    }
}

fn refused() -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "it can only be read"))
}
