//! The protocol of one queue of a block device: which tags the kernel has, and which requests are
//! under way. Data of a write is copied in before the request is handed out, that of a read is
//! copied out after it is answered; the copies are operations of the reactor, too.

use dbs_reactor::ublk::{UblkOp, UblkQueue, UblkRequest};
use dbs_reactor::{Buf, Io, Segment};
use std::io;

/// Set in the tags of a reactor's transfers that copy data for a queue.
const COPY: u64 = 1 << 63;
/// Where in them the queue's number is; the tag is below.
const NUMBER_SHIFT: u32 = 16;
/// Bits of them that are for the queue itself; its owner's are above.
const OWN_BITS: u32 = 32;

/// One queue of a device, on a reactor.
pub struct Queue {
    queue: UblkQueue,
    /// In the tags of its transfers.
    mark: u64,
    tags: Vec<Tag>,
    /// Tags that will not come again.
    gone: usize,
    /// Why the first of them does not.
    failure: Option<io::Error>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tag {
    Kernel,
    /// Here, until it is answered.
    Here(UblkRequest),
    Gone,
}

/// What comes of a tag or a copy.
#[derive(Debug)]
pub enum Event {
    /// Nothing yet.
    Nothing,
    /// A request, with the data of a write: [`Queue::answer`] or [`Queue::answer_read`] ends it.
    Request(u16, UblkRequest, Option<Buf>),
    /// All tags are gone: because the device was stopped, or why else.
    Ended(Option<io::Error>),
}

impl Queue {
    /// Starts serving: every tag goes to the kernel. `number` tells the queues of one owner apart, the
    /// bits of `owner`, above the lower 32 and below the highest, the owners of one reactor.
    pub fn new(io: &mut Io, queue: UblkQueue, number: u16, depth: u16, owner: u64) -> Self {
        for tag in 0..depth {
            io.fetch(queue, tag);
        }
        let tags = vec![Tag::Kernel; usize::from(depth)];
        let mark = COPY | owner | u64::from(number) << NUMBER_SHIFT;
        Self { queue, mark, tags, gone: 0, failure: None }
    }

    /// The queue, as its reactor knows it.
    #[must_use]
    pub fn handle(&self) -> UblkQueue {
        self.queue
    }

    /// The bits of the owner in the tag of a transfer, if it copies data for a queue.
    #[must_use]
    pub fn owner(tag: u64) -> Option<u64> {
        (tag & COPY != 0).then_some((tag & !COPY) >> OWN_BITS << OWN_BITS)
    }

    /// The number of the queue that a transfer is for, if it copies data for one.
    #[must_use]
    pub fn of_transfer(tag: u64) -> Option<u16> {
        (tag & COPY != 0).then_some((tag >> NUMBER_SHIFT) as u16)
    }

    /// Takes what [`Handler::fetched`](dbs_reactor::Handler::fetched) brings.
    pub fn fetched(&mut self, io: &mut Io, tag: u16, request: io::Result<UblkRequest>) -> Event {
        let Some(slot) = self.tags.get_mut(usize::from(tag)) else { return Event::Nothing };
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                self.gone += usize::from(*slot != Tag::Gone);
                *slot = Tag::Gone;
                if error.raw_os_error() != Some(nix::libc::ENODEV) && self.failure.is_none() {
                    self.failure = Some(error);
                }
                return self.ended();
            }
        };
        *slot = Tag::Here(request);
        if request.op != UblkOp::Write || request.length == 0 {
            return Event::Request(tag, request, None);
        }
        let buf = io.buffers().take(request.length as usize);
        let segment = self.segment(tag, buf.len());
        io.read(self.queue.file(), &[segment], buf, self.transfer(tag));
        Event::Nothing
    }

    /// Takes the end of a transfer that copied data: see [`Queue::of_transfer`].
    pub fn copied(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) -> Event {
        let tag = tag as u16;
        let Some(Tag::Here(request)) = self.tags.get(usize::from(tag)).copied() else {
            return Event::Nothing;
        };
        match result {
            // Only if the device goes away meanwhile.
            Err(_) => self.answer(io, tag, Err(nix::libc::EIO)),
            Ok(()) if request.op == UblkOp::Write => {
                return Event::Request(tag, request, Some(buf));
            }
            Ok(()) => self.answer(io, tag, Ok(())),
        }
        Event::Nothing
    }

    /// Ends a request: it is done, or failed with a (positive) error number. Not for a read that
    /// succeeded.
    pub fn answer(&mut self, io: &mut Io, tag: u16, result: Result<(), i32>) {
        let Some(slot) = self.tags.get_mut(usize::from(tag)) else { return };
        let Tag::Here(request) = *slot else { return };
        *slot = Tag::Kernel;
        io.commit(self.queue, tag, outcome(&request, result));
    }

    /// Ends a read: its data is copied to its user.
    pub fn answer_read(&mut self, io: &mut Io, tag: u16, data: Buf) {
        let segment = self.segment(tag, data.len());
        io.write(self.queue.file(), &[segment], data, self.transfer(tag));
    }

    fn ended(&mut self) -> Event {
        if self.gone < self.tags.len() {
            return Event::Nothing;
        }
        Event::Ended(self.failure.take())
    }

    fn segment(&self, tag: u16, len: usize) -> Segment {
        Segment { offset: self.queue.data_offset(tag), start: 0, len }
    }

    fn transfer(&self, tag: u16) -> u64 {
        self.mark | u64::from(tag)
    }
}

/// What the kernel is told: bytes transferred, 0 for what transfers none, or an error.
fn outcome(request: &UblkRequest, result: Result<(), i32>) -> i32 {
    match (result, request.op) {
        (Err(error), _) => -error.abs().max(1),
        (Ok(()), UblkOp::Read | UblkOp::Write) => i32::try_from(request.length).unwrap_or(i32::MAX),
        (Ok(()), _) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_told_bytes_or_an_error() {
        let request =
            UblkRequest { op: UblkOp::Write, offset: 0, length: 8192, fua: false, no_unmap: false };
        assert_eq!(outcome(&request, Ok(())), 8192);
        assert_eq!(outcome(&request, Err(nix::libc::ENOSPC)), -nix::libc::ENOSPC);
        for op in [UblkOp::Flush, UblkOp::Discard, UblkOp::WriteZeroes] {
            assert_eq!(outcome(&UblkRequest { op, ..request }, Ok(())), 0);
        }
        assert!(outcome(&request, Err(0)) < 0, "no failure is a success");
    }

    #[test]
    fn transfers_of_queues_are_told_from_others() {
        assert_eq!(Queue::of_transfer(5), None);
        assert_eq!(Queue::of_transfer(COPY | 3 << NUMBER_SHIFT | 77), Some(3));
        assert_eq!(Queue::of_transfer(COPY | 9 << OWN_BITS | 3 << NUMBER_SHIFT | 77), Some(3));
        assert_eq!(Queue::owner(9 << OWN_BITS | 3 << NUMBER_SHIFT), None);
        assert_eq!(Queue::owner(COPY | 9 << OWN_BITS | 3 << NUMBER_SHIFT), Some(9 << OWN_BITS));
    }
}
