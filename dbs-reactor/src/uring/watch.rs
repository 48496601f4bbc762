//! Events that are watched: one request in the kernel for each, which completes again and again.

use super::Uring;
use crate::done::Done;
use io_uring::types::Fd;
use io_uring::{cqueue, opcode, squeue};
use std::io;
use std::os::fd::AsRawFd;

/// Set in the `user_data` of such a request; its number is below.
const WATCH: u64 = 1 << 61;
/// Set besides in that of the request that ends it.
const END: u64 = 1 << 60;

/// An event; its number is used again when the kernel has let go of the request.
pub(super) struct Watched {
    target: u32,
    tag: u64,
    /// Nobody watches any more.
    ended: bool,
    /// The kernel has let go of it, as it cannot be watched: its number waits for who watches.
    failed: bool,
}

/// Whether something that ended is an event, or the end of watching it.
pub(super) fn is_watch(user_data: u64) -> bool {
    user_data & WATCH != 0
}

impl Uring {
    pub fn watch(&mut self, target: u32, tag: u64) -> u32 {
        let number = self.watches.insert(Watched { target, tag, ended: false, failed: false });
        self.push_watch(number);
        number
    }

    pub fn unwatch(&mut self, number: u32) {
        let Some(watched) = self.watches.get_mut(number) else { return };
        if watched.failed {
            self.watches.remove(number);
            return;
        }
        watched.ended = true;
        let user_data = WATCH | u64::from(number);
        // Not what takes polls back: that leaves one alone that is just about to tell of its event.
        self.push(&opcode::AsyncCancel::new(user_data).build().user_data(user_data | END));
    }

    fn push_watch(&mut self, number: u32) {
        let Some(Watched { target, .. }) = self.watches.get(number) else { return };
        let (fd, flags) = match self.targets.get(*target) {
            _ if *target < self.registered => (Fd(*target as i32), squeue::Flags::FIXED_FILE),
            Some(fd) => (Fd(fd.as_raw_fd()), squeue::Flags::empty()),
            None => (Fd(-1), squeue::Flags::empty()),
        };
        let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build();
        self.push(&poll.flags(flags).user_data(WATCH | u64::from(number)));
    }

    /// An event has happened, or is no longer watched.
    pub(super) fn signalled(&mut self, entry: &cqueue::Entry) -> Option<Done> {
        if entry.user_data() & END != 0 {
            return None;
        }
        let (number, again) = (entry.user_data() as u32, cqueue::more(entry.flags()));
        let watched = self.watches.get_mut(number)?;
        let (tag, ended) = (watched.tag, watched.ended);
        let result = match entry.result() {
            negative if negative < 0 => Err(io::Error::from_raw_os_error(-negative)),
            _ => Ok(()),
        };
        if !again && ended {
            self.watches.remove(number);
        } else if !again && result.is_err() {
            watched.failed = true;
        } else if !again {
            // The kernel had no room to tell of it.
            self.push_watch(number);
        }
        (!ended).then_some(Done::Signalled { tag, result })
    }
}
