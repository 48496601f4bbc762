//! Parts of transfers, and syncs, that somebody in between delays, shortens or lets fail.

use super::{Op, Uring};
use crate::interpose::{Interpose, Part};
use io_uring::types::{TimeoutFlags, Timespec};
use io_uring::{opcode, squeue};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// `user_data` of the time that a part waits before it begins.
pub(super) const PAUSE: u64 = u64::MAX - 1;

/// Who is in between, and what was decided about parts that have not ended.
pub(super) struct Interposed {
    by: Arc<dyn Interpose>,
    parts: HashMap<u32, Decided>,
}

struct Decided {
    ticket: u64,
    errno: Option<i32>,
    /// The kernel reads it when the part is handed over.
    _pause: Option<Box<Timespec>>,
}

/// How a part may go on its way.
pub(super) struct Passage {
    /// Bytes at most.
    pub len: usize,
    /// It fails; something else goes in its place.
    pub barred: bool,
}

impl Passage {
    pub const FREE: Self = Self { len: usize::MAX, barred: false };
}

impl Interposed {
    pub fn new(by: Arc<dyn Interpose>) -> Box<Self> {
        Box::new(Self { by, parts: HashMap::new() })
    }

    /// What has ended, and how it is to look.
    pub fn ended(&mut self, index: u32, result: io::Result<usize>) -> io::Result<usize> {
        let Some(decided) = self.parts.remove(&index) else { return result };
        if let Some(errno) = decided.errno {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.by.end(decided.ticket, result.is_ok());
        result
    }
}

impl Uring {
    /// Asks about a part of a transfer, or a sync, that is to be queued next, and queues the time it waits for.
    pub(super) fn ask(&mut self, index: u32) -> Passage {
        let Some(interposed) = &mut self.interposed else { return Passage::FREE };
        let (offset, part) = match self.ops.get_mut(index) {
            Some(Op::Sync { .. }) => (0, Part::Sync),
            Some(Op::Part { transfer, segment }) => {
                let Some(transfer) = self.transfers.get(*transfer) else { return Passage::FREE };
                let bytes = segment.start..segment.start + segment.len;
                let write = transfer.write.then(|| Part::Write(&transfer.memory[bytes]));
                (segment.offset, write.unwrap_or(Part::Read(segment.len)))
            }
            _ => return Passage::FREE,
        };
        let fate = interposed.by.begin(offset, part);
        let pause = (!fate.delay.is_zero()).then(|| Box::new(Timespec::from(fate.delay)));
        let time = pause.as_deref().map(std::ptr::from_ref);
        let decided = Decided { ticket: fate.ticket, errno: fate.errno, _pause: pause };
        interposed.parts.insert(index, decided);
        if let Some(time) = time {
            // What follows begins when the time is over, if both are handed over together.
            loop {
                let submission = self.ring.submission();
                if submission.capacity() - submission.len() >= 2 {
                    break;
                }
                drop(submission);
                if self.ring.submit().is_err() {
                    std::thread::yield_now();
                }
            }
            let entry = opcode::Timeout::new(time).flags(TimeoutFlags::empty()).build();
            self.push(&entry.flags(squeue::Flags::IO_HARDLINK).user_data(PAUSE));
        }
        Passage { len: fate.len, barred: fate.errno.is_some() }
    }
}
