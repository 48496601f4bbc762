//! Requests on a file or device that are in flight for as long as the caller wants, each with a
//! buffer of its own: what a load generator needs, and a batch (`super::Storage`) is not.
#![allow(unsafe_code)]

use super::buffer::AlignedBuf;
use super::file::{Target, TargetInfo};
use super::lock::StoreLock;
use super::uring::uring_available;
use crate::error::{Error, Result};
use crate::units::BLOCK_BYTES;
use io_uring::{IoUring, opcode, types};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

/// Most requests of one queue that can be in flight.
pub const DEPTH_MAX: usize = 1024;

/// A file or block device, open and locked for queues.
#[derive(Clone)]
pub struct QueueFile {
    target: Arc<Target>,
}

impl QueueFile {
    /// Opens what is at `path`, around the page cache where that is possible, and locks it: shared
    /// if `read_only`, else exclusively.
    ///
    /// # Errors
    /// As [`open_storage`](super::open::open_storage); `Unsupported` where io_uring cannot be used
    /// or the device's blocks are larger than 4 KiB.
    pub fn open(path: &Path, read_only: bool) -> Result<Self> {
        uring_available().map_err(|error| {
            Error::unsupported(format!("io_uring cannot be used here ({error}); use `pread`"))
        })?;
        let target = Target::open(StoreLock::acquire(path, read_only)?)?;
        let logical = target.info().logical_block_bytes;
        if u64::from(logical) > BLOCK_BYTES {
            return Err(Error::unsupported(format!(
                "`{}` has blocks of {logical} bytes; at most 4096 are supported",
                path.display()
            )));
        }
        Ok(Self { target: Arc::new(target) })
    }

    /// Facts about it.
    #[must_use]
    pub fn info(&self) -> TargetInfo {
        self.target.info()
    }

    /// A queue of `depth` requests (1 to [`DEPTH_MAX`]) of at most `length` bytes each.
    ///
    /// # Errors
    /// `Invalid` for another depth; `Io` if the kernel gives no ring.
    pub fn queue(&self, depth: usize, length: usize) -> Result<RequestQueue> {
        if !(1..=DEPTH_MAX).contains(&depth) {
            return Err(Error::invalid(format!("a queue holds 1 to {DEPTH_MAX} requests")));
        }
        let failed = |error| Error::io(error, "cannot set up io_uring");
        let (ring, enabled) = ring(depth as u32).map_err(failed)?;
        let fd = self.target.file().as_raw_fd();
        ring.submitter().register_files(&[fd]).map_err(failed)?;
        let slot = |_| Slot { buf: AlignedBuf::zeroed(length), expected: None };
        let slots = (0..depth).map(slot).collect();
        let target = Arc::clone(&self.target);
        Ok(RequestQueue { ring, enabled, slots, in_flight: 0, target })
    }
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Fills the start of the buffer.
    Read,
    /// Writes the start of the buffer.
    Write,
    /// Makes completed writes durable.
    Flush,
}

/// A ring with a fixed number of slots: each a buffer, and at most one request in flight. It
/// belongs to the thread that starts its first request.
pub struct RequestQueue {
    ring: IoUring,
    enabled: bool,
    slots: Vec<Slot>,
    in_flight: usize,
    target: Arc<Target>,
}

struct Slot {
    buf: AlignedBuf,
    /// Bytes the request in flight moves; `None` if there is none.
    expected: Option<u32>,
}

impl RequestQueue {
    /// The buffer of a slot that is idle.
    ///
    /// # Errors
    /// `Busy` while its request is in flight, `NotFound` for a slot that does not exist.
    pub fn buffer(&mut self, slot: usize) -> io::Result<&mut [u8]> {
        Ok(&mut idle(&mut self.slots, slot)?.buf)
    }

    /// Starts a request of an idle slot for the range of `length` bytes from `offset`, multiples
    /// of 4 KiB inside the file.
    ///
    /// # Errors
    /// `InvalidInput` for a range outside the file or buffer; as [`RequestQueue::buffer`]; the
    /// ring's.
    pub fn start(
        &mut self,
        slot: usize,
        action: Action,
        offset: u64,
        length: u32,
    ) -> io::Result<()> {
        let length = if action == Action::Flush { 0 } else { length };
        self.check(action, offset, length)?;
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        let place = idle(&mut self.slots, slot)?;
        let file = types::Fixed(0);
        let Some(part) = place.buf.get_mut(..length as usize) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "longer than the buffer"));
        };
        let entry = match action {
            Action::Read => {
                opcode::Read::new(file, part.as_mut_ptr(), length).offset(offset).build()
            }
            Action::Write => opcode::Write::new(file, part.as_ptr(), length).offset(offset).build(),
            Action::Flush => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // SAFETY: the memory is owned by the slot, which lends it to nobody while `expected` is
        // set, and is freed only when nothing is in flight (`drop`). The descriptor is registered
        // with the ring.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
        // Each slot has one request at most, and the ring has as many entries.
        pushed.map_err(|_| io::Error::other("the submission queue is full"))?;
        place.expected = Some(length);
        self.in_flight += 1;
        // One by one: in batches the device would wait for the last of each.
        match self.ring.submit() {
            // The next one, or `finish`, hands it over.
            Err(error) if !is_passing(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits for at least one completion if anything is in flight, and appends the slots that are idle again to `done`.
    ///
    /// # Errors
    /// The first failure of a request, a transfer cut short, or of the ring.
    pub fn finish(&mut self, done: &mut Vec<usize>) -> io::Result<()> {
        let mut failure = None;
        let before = self.in_flight;
        while self.in_flight > 0 && self.in_flight == before {
            match self.ring.submit_and_wait(1) {
                Err(error) if !is_passing(&error) => return Err(error),
                _ => {}
            }
            for entry in self.ring.completion() {
                let Ok(index) = usize::try_from(entry.user_data()) else { continue };
                let Some(slot) = self.slots.get_mut(index) else { continue };
                let Some(expected) = slot.expected.take() else { continue };
                self.in_flight -= 1;
                done.push(index);
                let result = match u32::try_from(entry.result()) {
                    Ok(count) if count == expected => Ok(()),
                    Ok(_) => Err(io::Error::other("the transfer was cut short")),
                    Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
                };
                if let Err(error) = result {
                    failure.get_or_insert(error);
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    fn check(&self, action: Action, offset: u64, length: u32) -> io::Result<()> {
        let end = offset.checked_add(u64::from(length));
        if end.is_none_or(|end| end > self.target.info().size_bytes)
            || !(offset | u64::from(length)).is_multiple_of(BLOCK_BYTES)
        {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no range of this file"));
        }
        if action != Action::Read { self.target.check_writable() } else { Ok(()) }
    }
}

impl Drop for RequestQueue {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            let before = self.in_flight;
            if self.finish(&mut done).is_err() && self.in_flight == before {
                // The kernel may still use the buffers: they are never freed.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
        }
        let _ = self.ring.submitter().unregister_files();
    }
}

/// A ring whose completions interrupt nobody, and whether it is enabled: the thread that does that
/// is the only one to use it. Older kernels only have rings for everybody.
fn ring(entries: u32) -> io::Result<(IoUring, bool)> {
    let mut builder = IoUring::builder();
    builder.setup_r_disabled().setup_single_issuer().setup_defer_taskrun();
    match builder.build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::new(entries).map(|ring| (ring, true))
        }
        other => other.map(|ring| (ring, false)),
    }
}

fn idle(slots: &mut [Slot], slot: usize) -> io::Result<&mut Slot> {
    match slots.get_mut(slot) {
        Some(slot) if slot.expected.is_none() => Ok(slot),
        Some(_) => Err(io::Error::new(io::ErrorKind::ResourceBusy, "the slot is in flight")),
        None => Err(io::Error::new(io::ErrorKind::NotFound, "no such slot")),
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use std::fs::File;

    fn open(path: &Path, read_only: bool) -> Option<QueueFile> {
        File::options().create(true).append(true).open(path).unwrap().set_len(1 << 20).unwrap();
        match QueueFile::open(path, read_only) {
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                println!("SKIPPED: {error}");
                None
            }
            other => Some(other.unwrap()),
        }
    }

    #[test]
    fn requests_overlap_and_bring_their_own_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let Some(file) = open(&directory.path().join("file"), false) else { return };
        let mut queue = file.queue(8, 4096).unwrap();
        let run = |queue: &mut RequestQueue, action| {
            for slot in 0..8 {
                queue.start(slot, action, slot as u64 * 8192, 4096).unwrap();
                assert!(queue.buffer(slot).is_err(), "in flight");
                assert!(queue.start(slot, action, 0, 4096).is_err(), "in flight");
            }
            let mut done = Vec::new();
            while done.len() < 8 {
                queue.finish(&mut done).unwrap();
            }
            done.sort_unstable();
            assert_eq!(done, [0, 1, 2, 3, 4, 5, 6, 7]);
        };
        (0..8).for_each(|slot| queue.buffer(slot).unwrap().fill(slot as u8 + 1));
        run(&mut queue, Action::Write);
        run(&mut queue, Action::Flush);
        (0..8).for_each(|slot| queue.buffer(slot).unwrap().fill(0));
        run(&mut queue, Action::Read);
        for slot in 0..8 {
            assert!(queue.buffer(slot).unwrap().iter().all(|byte| *byte == slot as u8 + 1));
        }
        // Dropped with requests in flight, it waits for them.
        queue.start(0, Action::Read, 0, 4096).unwrap();
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let Some(file) = open(&path, true) else { return };
        assert!(file.queue(0, 4096).is_err() && file.queue(DEPTH_MAX + 1, 4096).is_err());
        let mut queue = file.queue(1, 4096).unwrap();
        for (slot, action, offset, length) in [
            (1, Action::Read, 0, 4096),
            (0, Action::Read, 1 << 20, 4096),
            (0, Action::Read, u64::MAX - 4095, 4096),
            (0, Action::Read, 512, 4096),
            (0, Action::Read, 0, 8192),
            (0, Action::Write, 0, 4096),
            (0, Action::Flush, 0, 0),
        ] {
            queue.start(slot, action, offset, length).unwrap_err();
        }
        let mut done = Vec::new();
        queue.finish(&mut done).unwrap();
        assert!(done.is_empty(), "nothing to wait for");
        // The file has become shorter behind its back.
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        queue.start(0, Action::Read, 0, 4096).unwrap();
        queue.finish(&mut done).unwrap_err();
        assert!(queue.buffer(0).is_ok(), "the slot is idle again");
    }
}
