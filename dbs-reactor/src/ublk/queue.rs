//! One queue of a device: the requests its users make, as the kernel shows them.

use super::abi::{IoCommand, RawRequest, SECTOR_BYTES, io_command};
use crate::targets::File;
use io_uring::squeue::Entry;
use io_uring::{opcode, types};
use memmap2::{MmapOptions, MmapRaw};
use std::io;
use std::os::fd::BorrowedFd;

/// Where data of requests begins in the character device.
const DATA_OFFSET: u64 = 0x8000_0000;
/// Bits of a position that say where in a request.
const DATA_BITS: u32 = 25;
/// Bits of a position that say which tag.
const TAG_BITS: u32 = 16;

/// A queue of a reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UblkQueue {
    pub(crate) slot: u32,
    pub(crate) file: u32,
    pub(crate) queue: u16,
}

impl UblkQueue {
    /// The device's character device, which data of requests is read from and written to at
    /// [`UblkQueue::data_offset`].
    #[must_use]
    pub fn file(self) -> File {
        File(self.file)
    }

    /// Where the data of a tag's request begins.
    #[must_use]
    pub fn data_offset(self, tag: u16) -> u64 {
        let queue = u64::from(self.queue) << (DATA_BITS + TAG_BITS);
        DATA_OFFSET + (queue | u64::from(tag) << DATA_BITS)
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UblkOp {
    /// Data from the device.
    Read,
    /// Data to the device.
    Write,
    /// What was written is to be durable.
    Flush,
    /// The content may be given up.
    Discard,
    /// The content is to be zeros.
    WriteZeroes,
    /// Something this device did not offer.
    Other(u8),
}

/// A request of a device's user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UblkRequest {
    /// What it asks for.
    pub op: UblkOp,
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// It is to be durable before it is answered.
    pub fua: bool,
    /// Zeroed content keeps its space.
    pub no_unmap: bool,
}

const FLAG_FUA: u32 = 1 << 13;
const FLAG_NO_UNMAP: u32 = 1 << 15;

impl From<RawRequest> for UblkRequest {
    fn from(raw: RawRequest) -> Self {
        let op = match raw.op_flags as u8 {
            0 => UblkOp::Read,
            1 => UblkOp::Write,
            2 => UblkOp::Flush,
            3 => UblkOp::Discard,
            5 => UblkOp::WriteZeroes,
            other => UblkOp::Other(other),
        };
        Self {
            op,
            offset: raw.start_sector.saturating_mul(SECTOR_BYTES),
            length: u64::from(raw.sectors) * SECTOR_BYTES,
            fua: raw.op_flags & FLAG_FUA != 0,
            no_unmap: raw.op_flags & FLAG_NO_UNMAP != 0,
        }
    }
}

/// A queue's requests, which the kernel writes into memory that it shows the server.
pub(crate) struct Mapped {
    /// The character device among the driver's descriptors.
    pub file: u32,
    queue: u16,
    depth: u16,
    requests: MmapRaw,
}

impl Mapped {
    /// # Errors
    /// The kernel does not show them: another process has the device, or it is not of this depth.
    pub fn new(device: BorrowedFd<'_>, file: u32, queue: u16, depth: u16) -> io::Result<Self> {
        let page = page_bytes();
        let stride =
            (usize::from(super::DEPTH_MAX) * size_of::<RawRequest>()).next_multiple_of(page);
        let len = (usize::from(depth) * size_of::<RawRequest>()).next_multiple_of(page);
        let requests = MmapOptions::new()
            .offset((usize::from(queue) * stride) as u64)
            .len(len)
            .populate()
            .map_raw_read_only(&device)?;
        Ok(Self { file, queue, depth, requests })
    }

    /// The handle of the queue that has this number with the driver.
    pub fn handle(&self, slot: u32) -> UblkQueue {
        UblkQueue { slot, file: self.file, queue: self.queue }
    }

    /// The request that the kernel has put under a tag.
    pub fn request(&self, tag: u16) -> UblkRequest {
        assert!(tag < self.depth, "a tag of this queue");
        let requests: *const RawRequest = self.requests.as_ptr().cast();
        // SAFETY: inside the mapping, as `depth` of them are; aligned to a page and 8 bytes each.
        // The kernel wrote it before it said so, and leaves it alone until it is answered.
        unsafe { requests.add(usize::from(tag)).read_volatile() }.into()
    }

    /// Asks for the first request of a tag, or answers one and asks for the next.
    pub fn command(&self, device: types::Fd, tag: u16, answer: Option<i32>) -> Entry {
        let number = match answer {
            Some(_) => io_command::COMMIT_AND_FETCH,
            None => io_command::FETCH,
        };
        let result = answer.unwrap_or(0);
        let command = IoCommand { queue: self.queue, tag, result, addr: 0 }.bytes();
        opcode::UringCmd16::new(device, number).cmd(command).build()
    }
}

fn page_bytes() -> usize {
    // SAFETY: asks for a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_data() {
        let queue = UblkQueue { slot: 0, file: 3, queue: 0 };
        assert_eq!(queue.data_offset(0), 0x8000_0000);
        assert_eq!(queue.data_offset(2), 0x8000_0000 + (2 << 25));
        let queue = UblkQueue { queue: 3, ..queue };
        assert_eq!(queue.data_offset(4095), 0x8000_0000 + (3 << 41 | 4095 << 25));
        assert_eq!(queue.file(), File(3));
    }

    #[test]
    fn requests_as_the_kernel_writes_them() {
        let raw = RawRequest { op_flags: 1 | 1 << 13, sectors: 8, start_sector: 16, addr: 0 };
        let request = UblkRequest::from(raw);
        assert_eq!((request.op, request.fua, request.no_unmap), (UblkOp::Write, true, false));
        assert_eq!((request.offset, request.length), (8192, 4096));
        let request = UblkRequest::from(RawRequest { op_flags: 5 | 1 << 15, ..raw });
        assert_eq!((request.op, request.fua, request.no_unmap), (UblkOp::WriteZeroes, false, true));
        let raw = RawRequest { op_flags: 4, sectors: u32::MAX, start_sector: u64::MAX, addr: 0 };
        let request = UblkRequest::from(raw);
        assert_eq!((request.op, request.offset), (UblkOp::Other(4), u64::MAX));
        for (number, op) in [(0, UblkOp::Read), (2, UblkOp::Flush), (3, UblkOp::Discard)] {
            assert_eq!(UblkRequest::from(RawRequest { op_flags: number, ..raw }).op, op);
        }
    }
}
