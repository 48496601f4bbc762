//! Queues of ublk devices on the ring: each tag is with the kernel until it has a request for it.

use super::Uring;
use crate::done::Done;
use crate::ublk::{Mapped, UblkQueue};
use io_uring::types::Fd;
use io_uring::{cqueue, squeue};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Set in the `user_data` of a tag that is with the kernel; the others are numbers of 32 bits.
const FETCH: u64 = 1 << 62;
/// Where in it the queue is; the tag is below.
const SLOT_SHIFT: u32 = 16;

/// Whether something that ended is a tag's wait for a request.
pub(super) fn is_fetch(user_data: u64) -> bool {
    user_data & FETCH != 0
}

impl Uring {
    /// Takes over a queue of a device.
    ///
    /// # Errors
    /// As [`Mapped::new`].
    pub fn add_queue(&mut self, device: OwnedFd, queue: u16, depth: u16) -> io::Result<UblkQueue> {
        let file = self.add(device);
        let mapped = match self.targets.get(file) {
            Some(device) => Mapped::new(device.as_fd(), file, queue, depth),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        match mapped {
            Ok(mapped) => Ok(UblkQueue { slot: self.queues.insert(mapped), file, queue }),
            Err(error) => {
                self.remove(file);
                Err(error)
            }
        }
    }

    /// Gives a queue up. Its tags may be with the kernel still.
    pub fn remove_queue(&mut self, queue: UblkQueue) {
        if let Some(mapped) = self.queues.remove(queue.slot) {
            self.remove(mapped.file);
        }
    }

    /// Hands a tag to the kernel, with the outcome of its last request if there was one.
    pub fn fetch(&mut self, queue: UblkQueue, tag: u16, answer: Option<i32>) {
        let Some(mapped) = self.queues.get(queue.slot) else { return };
        let (device, flags) = match self.targets.get(mapped.file) {
            _ if mapped.file < self.registered => {
                (Fd(mapped.file as i32), squeue::Flags::FIXED_FILE)
            }
            Some(fd) => (Fd(fd.as_raw_fd()), squeue::Flags::empty()),
            None => return,
        };
        let user_data = FETCH | u64::from(queue.slot) << SLOT_SHIFT | u64::from(tag);
        let entry = mapped.command(device, tag, answer).flags(flags).user_data(user_data);
        self.push(&entry);
    }

    /// A tag is back: there is a request for it, or no more.
    pub(super) fn fetched(&mut self, entry: &cqueue::Entry) -> Option<Done> {
        let tag = entry.user_data() as u16;
        let slot = ((entry.user_data() & !FETCH) >> SLOT_SHIFT) as u32;
        // The tags of a queue that was given up are nobody's.
        let mapped = self.queues.get(slot)?;
        let queue = mapped.handle(slot);
        let result = match entry.result() {
            negative if negative < 0 => Err(io::Error::from_raw_os_error(-negative)),
            _ => Ok(mapped.request(tag)),
        };
        Some(Done::Fetched { queue, tag, result })
    }
}
