//! What a driver says of operations that have ended.

use super::batch::Batch;
use super::buffer::Buf;
use super::ublk::{UblkQueue, UblkRequest};
use std::io;

/// An operation that has ended.
pub(crate) enum Done {
    Received {
        tag: u64,
        result: io::Result<Bytes>,
    },
    Filled {
        tag: u64,
        buf: Buf,
        result: io::Result<()>,
    },
    Sent {
        tag: u64,
        batch: Batch,
        result: io::Result<()>,
    },
    Moved {
        tag: u64,
        buf: Buf,
        result: io::Result<()>,
    },
    Synced {
        tag: u64,
        result: io::Result<()>,
    },
    Fetched {
        queue: UblkQueue,
        tag: u16,
        result: io::Result<UblkRequest>,
    },
    Signalled {
        tag: u64,
        result: io::Result<()>,
    },
    /// Only the end of a wait.
    Woken,
}

/// Bytes received, in memory of the driver until they are given back.
pub(crate) struct Bytes {
    pub ptr: *const u8,
    pub len: usize,
    /// For the driver.
    pub id: u16,
}
