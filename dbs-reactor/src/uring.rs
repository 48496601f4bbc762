//! The `io_uring` driver.
//!
//! One ring for sockets and files, used by one thread. Receiving takes its memory from a group of
//! buffers shared by all sockets at the moment data is there, so that a thousand idle connections
//! hold none. Every request in the kernel has a slot in `ops` that owns the memory it uses.
#![allow(unsafe_code)]

use super::batch::{Batch, Sending};
use super::buffer::Buf;
use super::done::{Bytes, Done};
use super::shared::Payload;
use super::slab::Slab;
use super::targets::{Segment, Targets};
use super::ublk::Mapped;
use io_uring::types::{Fd, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use nix::sys::eventfd::EventFd;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

mod here;
mod receive;
mod ublk;
mod watch;

use here::again;
use receive::ReceiveBuffers;

/// Requests handed over with one system call at most.
const SUBMISSIONS: u32 = 256;
/// Completions the kernel keeps without extra memory.
const COMPLETIONS: u32 = 4096;
/// Descriptors registered with the ring at most; more work too, a little slower.
const REGISTERED_MAX: u32 = 4096;
/// Bytes received at once.
const RECEIVE_BYTES: usize = 64 << 10;
const GROUP: u16 = 0;
/// `user_data` of the wake-up call.
const WAKE: u64 = u64::MAX;

/// The driver.
pub(crate) struct Uring {
    ring: IoUring,
    ops: Slab<Op>,
    transfers: Slab<Transfer>,
    targets: Targets,
    registered: u32,
    receive: ReceiveBuffers,
    /// Queues of ublk devices. What waits for their requests uses no memory of this process.
    queues: Slab<Mapped>,
    watches: Slab<watch::Watched>,
    /// Reused for batches on their way.
    #[allow(clippy::vec_box, reason = "the kernel is given addresses inside them")]
    idle_sendings: Vec<Box<Sending>>,
    /// Ended without the kernel.
    done: VecDeque<Done>,
    waker: Arc<EventFd>,
}

/// A request in the kernel.
enum Op {
    Receive { target: u32, tag: u64 },
    Fill { target: u32, tag: u64, buf: Buf, at: usize },
    Send { target: u32, tag: u64, sending: Box<Sending> },
    Part { transfer: u32, segment: Segment },
    Sync { target: u32, tag: u64 },
}

/// A transfer whose parts are in the kernel.
struct Transfer {
    target: u32,
    tag: u64,
    memory: Payload,
    write: bool,
    left: usize,
    result: io::Result<()>,
}

impl Uring {
    /// # Errors
    /// Why this kernel, or what confines the process, does not allow it.
    pub fn new(waker: Arc<EventFd>) -> io::Result<Self> {
        let ring: IoUring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(SUBMISSIONS)?;
        let mut registered = REGISTERED_MAX.min(descriptors_max());
        if ring.submitter().register_files_sparse(registered).is_err() {
            registered = 0;
        }
        let receive = ReceiveBuffers::register(&ring)?;
        let mut uring = Self {
            ring,
            ops: Slab::default(),
            transfers: Slab::default(),
            targets: Targets::default(),
            registered,
            receive,
            queues: Slab::default(),
            watches: Slab::default(),
            idle_sendings: Vec::new(),
            done: VecDeque::new(),
            waker,
        };
        uring.listen_to_waker();
        Ok(uring)
    }

    pub fn targets(&self) -> &Targets {
        &self.targets
    }

    pub fn add(&mut self, fd: OwnedFd) -> u32 {
        let raw = fd.as_raw_fd();
        let index = self.targets.insert(fd);
        if index < self.registered
            && self.ring.submitter().register_files_update(index, &[raw]).is_err()
        {
            // From here on plain descriptors; those registered so far stay what they are.
            self.registered = index;
        }
        index
    }

    pub fn remove(&mut self, target: u32) {
        if target < self.registered {
            // What cannot be taken out of the table is replaced by the next user of the number.
            let _ = self.ring.submitter().register_files_update(target, &[-1]);
        }
        self.targets.remove(target);
    }

    pub fn receive(&mut self, target: u32, tag: u64) {
        let op = self.ops.insert(Op::Receive { target, tag });
        self.push_receive(op, target);
    }

    pub fn fill(&mut self, target: u32, buf: Buf, start: usize, tag: u64) {
        if start >= buf.len() {
            return self.done.push_back(Done::Filled { tag, buf, result: Ok(()) });
        }
        let op = self.ops.insert(Op::Fill { target, tag, buf, at: start });
        self.push_op(op);
    }

    pub fn send(&mut self, target: u32, batch: Batch, tag: u64) {
        if batch.is_empty() {
            return self.done.push_back(Done::Sent { tag, batch, result: Ok(()) });
        }
        let mut sending = self.idle_sendings.pop().unwrap_or_else(|| Box::new(Sending::new()));
        sending.start(batch);
        let op = self.ops.insert(Op::Send { target, tag, sending });
        self.push_op(op);
    }

    pub fn read(&mut self, target: u32, segments: &[Segment], buf: Buf, tag: u64) {
        let (memory, write, left, result) = (Payload::Own(buf), false, segments.len(), Ok(()));
        self.transfer(segments, Transfer { target, tag, memory, write, left, result });
    }

    pub fn write(&mut self, target: u32, segments: &[Segment], memory: Payload, tag: u64) {
        let (write, left, result) = (true, segments.len(), Ok(()));
        self.transfer(segments, Transfer { target, tag, memory, write, left, result });
    }

    pub fn sync(&mut self, target: u32, tag: u64) {
        let op = self.ops.insert(Op::Sync { target, tag });
        self.push_op(op);
    }

    /// Reads only into memory that is the operation's alone.
    fn transfer(&mut self, segments: &[Segment], transfer: Transfer) {
        let len = transfer.memory.len();
        let inside = |s: &Segment| s.start.checked_add(s.len).is_some_and(|end| end <= len);
        assert!(segments.iter().all(inside), "a segment lies outside its buffer");
        if segments.is_empty() {
            let Transfer { tag, memory, .. } = transfer;
            let buf = memory.into_buf();
            return self.done.push_back(Done::Moved { tag, buf, result: Ok(()) });
        }
        let transfer = self.transfers.insert(transfer);
        for segment in segments {
            let op = self.ops.insert(Op::Part { transfer, segment: *segment });
            self.push_op(op);
        }
    }

    /// Bytes of the batch on its way that are sent.
    pub fn sent(&self, target: u32) -> usize {
        let sent = |(_, op): (u32, &Op)| match op {
            Op::Send { target: its, sending, .. } if *its == target => Some(sending.sent()),
            _ => None,
        };
        self.ops.iter().find_map(sent).unwrap_or(0)
    }

    /// Gives received bytes back.
    pub fn release(&mut self, bytes: &Bytes) {
        self.receive.give_back(bytes.id);
    }

    /// Operations that have not ended.
    pub fn in_flight(&self) -> usize {
        self.ops.len() + self.done.len()
    }

    /// Whether something has ended.
    pub fn is_ready(&mut self) -> bool {
        !self.done.is_empty() || !self.ring.completion().is_empty()
    }

    /// What has ended, one by one.
    pub fn next(&mut self) -> Option<Done> {
        if let Some(done) = self.done.pop_front() {
            return Some(done);
        }
        loop {
            let entry = self.ring.completion().next()?;
            if let Some(done) = self.complete(&entry) {
                return Some(done);
            }
        }
    }

    /// Hands over what was started and collects what has ended, without waiting.
    pub fn poll(&mut self) -> io::Result<()> {
        self.enter(0, 1)
    }

    /// Hands over what was started, and nothing else.
    pub fn hand_over(&mut self) {
        if !self.ring.submission().is_empty() {
            // What could not be taken now is taken at the end of the turn, which tells of errors.
            let _ = self.enter(0, 0);
        }
    }

    /// As [`Uring::poll`], but waits until something has ended or the time is over.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if !self.done.is_empty() {
            return self.poll();
        }
        let Some(timeout) = timeout else { return self.enter(1, 1) };
        let time = Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&time);
        match self.ring.submitter().submit_with_args(1, &args) {
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            result => retryable(result.map(drop)),
        }
    }

    fn enter(&mut self, want: u32, flags: u32) -> io::Result<()> {
        let submit = self.ring.submission().len() as u32;
        // SAFETY: everything queued uses memory owned by its slot in `ops`; no signal mask.
        let result =
            unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, want, flags, None) };
        retryable(result.map(drop))
    }

    fn complete(&mut self, entry: &cqueue::Entry) -> Option<Done> {
        if entry.user_data() == WAKE {
            // Only a count of zero fails, which somebody else has read then.
            let _ = self.waker.read();
            self.listen_to_waker();
            return Some(Done::Woken);
        }
        if ublk::is_fetch(entry.user_data()) {
            return self.fetched(entry);
        }
        if watch::is_watch(entry.user_data()) {
            return self.signalled(entry);
        }
        let index = entry.user_data() as u32;
        let result = match entry.result() {
            negative if negative < 0 => {
                // Where the kernel had committed itself to a buffer before it failed.
                let taken = cqueue::buffer_select(entry.flags());
                taken.into_iter().for_each(|id| self.receive.give_back(id));
                Err(io::Error::from_raw_os_error(-negative))
            }
            count => Ok(count as usize),
        };
        let result = self.or_here(index, result);
        // A sync that failed is not repeated: what it should have kept may be gone.
        if again(&result) && !matches!(self.ops.get_mut(index), Some(Op::Sync { .. })) {
            self.push_op(index);
            return None;
        }
        match self.ops.get_mut(index)? {
            Op::Sync { tag, .. } => {
                let tag = *tag;
                self.ops.remove(index);
                Some(Done::Synced { tag, result: result.map(drop) })
            }
            Op::Receive { tag, .. } => {
                let tag = *tag;
                let buffer = cqueue::buffer_select(entry.flags());
                self.ops.remove(index);
                let result = result.map(|len| self.receive.bytes(buffer, len));
                Some(Done::Received { tag, result })
            }
            Op::Fill { buf, at, .. } => {
                let result = match result {
                    Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(count) => {
                        *at += count;
                        if *at < buf.len() {
                            self.push_op(index);
                            return None;
                        }
                        Ok(())
                    }
                    Err(error) => Err(error),
                };
                let Some(Op::Fill { tag, buf, .. }) = self.ops.remove(index) else { return None };
                Some(Done::Filled { tag, buf, result })
            }
            Op::Send { sending, .. } => {
                let result = match result {
                    Ok(count) => {
                        if !sending.advance(count) {
                            self.push_op(index);
                            return None;
                        }
                        Ok(())
                    }
                    Err(error) => Err(error),
                };
                let Some(Op::Send { tag, mut sending, .. }) = self.ops.remove(index) else {
                    return None;
                };
                let batch = std::mem::take(&mut sending.batch);
                self.idle_sendings.push(sending);
                Some(Done::Sent { tag, batch, result })
            }
            Op::Part { .. } => self.complete_part(index, result),
        }
    }

    fn complete_part(&mut self, index: u32, result: io::Result<usize>) -> Option<Done> {
        let Some(Op::Part { transfer: number, segment }) = self.ops.get_mut(index) else {
            return None;
        };
        let number = *number;
        let transfer = self.transfers.get_mut(number)?;
        let result = match result {
            Ok(0) if transfer.write => Err(io::ErrorKind::WriteZero.into()),
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                segment.offset += count as u64;
                segment.start += count;
                segment.len -= count.min(segment.len);
                if segment.len > 0 {
                    self.push_op(index);
                    return None;
                }
                Ok(())
            }
            Err(error) => Err(error),
        };
        self.ops.remove(index);
        transfer.left -= 1;
        if transfer.result.is_ok() {
            transfer.result = result;
        }
        if transfer.left > 0 {
            return None;
        }
        let Transfer { tag, memory, result, .. } = self.transfers.remove(number)?;
        Some(Done::Moved { tag, buf: memory.into_buf(), result })
    }

    fn listen_to_waker(&mut self) {
        let entry = opcode::PollAdd::new(Fd(self.waker.as_fd().as_raw_fd()), libc::POLLIN as u32);
        self.push(&entry.build().user_data(WAKE));
    }

    /// Queues the request of a slot, or what is still to do of it.
    fn push_op(&mut self, index: u32) {
        let registered = self.registered;
        let fixed = |target: u32| target < registered;
        let raw = |targets: &Targets, target: u32| match targets.get(target) {
            _ if target < registered => Fd(target as RawFd),
            Some(fd) => Fd(fd.as_raw_fd()),
            None => Fd(-1),
        };
        let (entry, target) = match self.ops.get_mut(index) {
            None => return,
            Some(Op::Receive { target, .. }) => {
                let target = *target;
                return self.push_receive(index, target);
            }
            Some(Op::Fill { target, buf, at, .. }) => {
                let len = (buf.len() - *at) as u32;
                // SAFETY: `at` lies inside the buffer.
                let ptr = unsafe { buf.as_ptr().add(*at) };
                let entry = opcode::Recv::new(raw(&self.targets, *target), ptr, len)
                    .flags(libc::MSG_WAITALL)
                    .build();
                (entry, *target)
            }
            Some(Op::Send { target, sending, .. }) => {
                let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
                let header = sending.prepare();
                let entry =
                    opcode::SendMsg::new(raw(&self.targets, *target), header).flags(flags).build();
                (entry, *target)
            }
            Some(Op::Sync { target, .. }) => {
                let (fd, target) = (raw(&self.targets, *target), *target);
                let sync = opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC);
                (sync.build(), target)
            }
            Some(Op::Part { transfer, segment }) => {
                let Some(transfer) = self.transfers.get(*transfer) else { return };
                let fd = raw(&self.targets, transfer.target);
                // SAFETY: `transfer` checked that the segment lies inside the buffer.
                let ptr = unsafe { transfer.memory.as_ptr().add(segment.start) };
                let len = u32::try_from(segment.len).unwrap_or(1 << 30);
                let entry = if transfer.write {
                    opcode::Write::new(fd, ptr, len).offset(segment.offset).build()
                } else {
                    opcode::Read::new(fd, ptr, len).offset(segment.offset).build()
                };
                (entry, transfer.target)
            }
        };
        let flags = if fixed(target) { squeue::Flags::FIXED_FILE } else { squeue::Flags::empty() };
        self.push(&entry.flags(flags).user_data(u64::from(index)));
    }

    fn push_receive(&mut self, index: u32, target: u32) {
        let (fd, mut flags) = match self.targets.get(target) {
            _ if target < self.registered => (target as RawFd, squeue::Flags::FIXED_FILE),
            Some(fd) => (fd.as_raw_fd(), squeue::Flags::empty()),
            None => (-1, squeue::Flags::empty()),
        };
        flags |= squeue::Flags::BUFFER_SELECT;
        let entry = opcode::Recv::new(Fd(fd), std::ptr::null_mut(), RECEIVE_BYTES as u32)
            .buf_group(GROUP)
            .build()
            .flags(flags)
            .user_data(u64::from(index));
        self.push(&entry);
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory the request uses is owned by its slot in `ops`, which is kept until
        // its completion is taken, or is of the receive buffers, which the kernel lets go with
        // the ring.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            if self.ring.submit().is_err() {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if self.ops.is_empty() {
            return;
        }
        // Only a panic, reported already, comes here. The kernel may still write to the memory of
        // what is in flight: nothing may be freed, and nobody waits for it.
        std::process::abort();
    }
}

fn retryable(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// Whether this process may use `io_uring`.
///
/// # Errors
/// Why not: the kernel is too old, or forbids it.
pub fn allowed() -> io::Result<()> {
    IoUring::new(2).map(drop)
}

fn descriptors_max() -> u32 {
    let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE);
    limit.map_or(0, |(soft, _)| u32::try_from(soft).unwrap_or(u32::MAX))
}
