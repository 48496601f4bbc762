//! The driver for where `io_uring` is forbidden: `epoll` tells which sockets are ready, and a
//! bounded number of threads read and write files.

use super::batch::Batch;
use super::buffer::Buf;
use super::done::{Bytes, Done};
use super::shared::Payload;
use super::targets::{Segment, Targets};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll as Instance, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{MsgFlags, recv, sendmsg};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Bytes received at once.
const RECEIVE_BYTES: usize = 64 << 10;
/// Pieces sent with one system call.
const SLICES_MAX: usize = 64;
/// Events taken with one system call.
const EVENTS: usize = 64;
/// Number of the waker among the events.
const WAKE: u64 = u64::MAX;
/// Set in the numbers of events that are watched; their targets are below.
const WATCH: u64 = 1 << 32;

/// The driver.
pub(crate) struct Epoll {
    instance: Instance,
    targets: Targets,
    sockets: HashMap<u32, Pending>,
    /// The tags of events that are watched.
    watches: HashMap<u32, u64>,
    /// Sockets on which something may be possible.
    ready: VecDeque<u32>,
    done: VecDeque<Done>,
    received: Box<[u8]>,
    files: Files,
    waker: Arc<EventFd>,
    in_flight: usize,
}

/// What waits for a socket.
#[derive(Default)]
struct Pending {
    input: Option<Input>,
    output: Option<Output>,
}

enum Input {
    Receive { tag: u64 },
    Fill { tag: u64, buf: Buf, at: usize },
}

struct Output {
    tag: u64,
    batch: Batch,
    sent: usize,
}

impl Epoll {
    pub fn new(waker: Arc<EventFd>, file_threads: usize) -> io::Result<Self> {
        let instance = Instance::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        instance.add(&*waker, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        Ok(Self {
            instance,
            targets: Targets::default(),
            sockets: HashMap::new(),
            watches: HashMap::new(),
            ready: VecDeque::new(),
            done: VecDeque::new(),
            received: vec![0; RECEIVE_BYTES].into_boxed_slice(),
            files: Files::start(file_threads, Arc::clone(&waker))?,
            waker,
            in_flight: 0,
        })
    }

    pub fn targets(&self) -> &Targets {
        &self.targets
    }

    pub fn add(&mut self, fd: OwnedFd) -> u32 {
        self.targets.insert(fd)
    }

    pub fn remove(&mut self, target: u32) {
        if let Some(fd) = self.targets.remove(target)
            && self.sockets.remove(&target).is_some()
        {
            // Gone from the instance with its descriptor anyway, unless that has a duplicate.
            let _ = self.instance.delete(&fd);
        }
        self.files.forget(target);
    }

    pub fn receive(&mut self, target: u32, tag: u64) {
        self.input(target, Input::Receive { tag });
    }

    pub fn fill(&mut self, target: u32, buf: Buf, start: usize, tag: u64) {
        self.input(target, Input::Fill { tag, buf, at: start });
    }

    pub fn send(&mut self, target: u32, batch: Batch, tag: u64) {
        self.in_flight += 1;
        self.pending(target).output = Some(Output { tag, batch, sent: 0 });
        self.ready.push_back(target);
    }

    pub fn read(&mut self, target: u32, segments: &[Segment], buf: Buf, tag: u64) {
        self.transfer(target, segments, Move::Read(buf), tag);
    }

    pub fn write(&mut self, target: u32, segments: &[Segment], payload: Payload, tag: u64) {
        self.transfer(target, segments, Move::Write(payload), tag);
    }

    pub fn sync(&mut self, target: u32, tag: u64) {
        self.transfer(target, &[], Move::Sync, tag);
    }

    pub fn watch(&mut self, target: u32, tag: u64) -> u32 {
        self.watches.insert(target, tag);
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        let watched = self.targets.get(target).ok_or(Errno::EBADF).and_then(|fd| {
            self.instance.add(fd, EpollEvent::new(flags, WATCH | u64::from(target)))
        });
        if let Err(error) = watched {
            self.done.push_back(Done::Signalled { tag, result: Err(error.into()) });
        }
        target
    }

    pub fn unwatch(&mut self, target: u32) {
        if let (Some(_), Some(fd)) = (self.watches.remove(&target), self.targets.get(target)) {
            // Its peer has the event, too: closing it alone would not do.
            let _ = self.instance.delete(fd);
        }
    }

    fn transfer(&mut self, target: u32, segments: &[Segment], what: Move, tag: u64) {
        let len = what.len();
        let inside = |s: &Segment| s.start.checked_add(s.len).is_some_and(|end| end <= len);
        assert!(segments.iter().all(inside), "a segment lies outside its buffer");
        self.in_flight += 1;
        match self.files.open(target, &self.targets) {
            Ok(file) => self.files.submit(Job { file, segments: segments.to_vec(), what, tag }),
            Err(error) => {
                let ended = Finished { tag, buf: what.into_buf(), result: Err(error) };
                self.done.push_back(ended.into());
            }
        }
    }

    /// Bytes of the batch on its way that are sent.
    pub fn sent(&self, target: u32) -> usize {
        let output = self.sockets.get(&target).and_then(|pending| pending.output.as_ref());
        output.map_or(0, |output| output.sent)
    }

    /// Nothing to do: there is one buffer, and its bytes are used before the next call.
    pub fn release(&mut self, _: &Bytes) {}

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub fn is_ready(&self) -> bool {
        !self.done.is_empty() || !self.ready.is_empty()
    }

    pub fn next(&mut self) -> Option<Done> {
        loop {
            if let Some(done) = self.done.pop_front() {
                if !matches!(done, Done::Woken | Done::Signalled { .. }) {
                    self.in_flight -= 1;
                }
                return Some(done);
            }
            let target = self.ready.pop_front()?;
            self.try_output(target);
            self.try_input(target);
            self.arm(target);
        }
    }

    pub fn poll(&mut self) -> io::Result<()> {
        self.wait_for(EpollTimeout::ZERO)
    }

    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.is_ready() {
            return self.poll();
        }
        // Rounded up, so that the time has come when the wait ends.
        let timeout = timeout.map_or(EpollTimeout::NONE, |time| {
            let millis = time.as_nanos().div_ceil(1_000_000);
            EpollTimeout::try_from(millis.min(1 << 30) as i32).unwrap_or(EpollTimeout::MAX)
        });
        self.wait_for(timeout)
    }

    fn wait_for(&mut self, timeout: EpollTimeout) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS];
        let count = match self.instance.wait(&mut events, timeout) {
            Err(Errno::EINTR) => 0,
            other => other?,
        };
        for event in events.iter().take(count) {
            if event.data() == WAKE {
                // Only a count of zero fails, which somebody else has read then.
                let _ = self.waker.read();
                self.done.push_back(Done::Woken);
            } else if event.data() & WATCH != 0 {
                let tag = self.watches.get(&(event.data() as u32));
                let signalled = |tag: &u64| Done::Signalled { tag: *tag, result: Ok(()) };
                self.done.extend(tag.map(signalled));
            } else {
                self.ready.push_back(event.data() as u32);
            }
        }
        self.done.extend(self.files.finished().into_iter().map(Done::from));
        Ok(())
    }

    fn pending(&mut self, target: u32) -> &mut Pending {
        let Self { sockets, targets, instance, .. } = self;
        sockets.entry(target).or_insert_with(|| {
            if let Some(fd) = targets.get(target) {
                // Hang-ups are told even of what nothing waits for; once is enough.
                let event = EpollEvent::new(EpollFlags::EPOLLONESHOT, u64::from(target));
                // What cannot be watched fails when it is armed.
                let _ = instance.add(fd, event);
            }
            Pending::default()
        })
    }

    fn input(&mut self, target: u32, input: Input) {
        self.in_flight += 1;
        self.pending(target).input = Some(input);
        self.ready.push_back(target);
    }

    fn try_input(&mut self, target: u32) {
        let Some(fd) = self.targets.get(target).map(AsRawFd::as_raw_fd) else { return };
        let Some(pending) = self.sockets.get_mut(&target) else { return };
        match pending.input.take() {
            None => {}
            Some(Input::Receive { tag }) => {
                let result = match recv(fd, &mut self.received, MsgFlags::MSG_DONTWAIT) {
                    Err(Errno::EAGAIN | Errno::EINTR) => {
                        pending.input = Some(Input::Receive { tag });
                        return;
                    }
                    Ok(len) => Ok(Bytes { ptr: self.received.as_ptr(), len, id: 0 }),
                    Err(error) => Err(error.into()),
                };
                self.done.push_back(Done::Received { tag, result });
            }
            Some(Input::Fill { tag, mut buf, mut at }) => {
                let result = loop {
                    if at >= buf.len() {
                        break Ok(());
                    }
                    match recv(fd, &mut buf[at..], MsgFlags::MSG_DONTWAIT) {
                        Err(Errno::EAGAIN | Errno::EINTR) => {
                            pending.input = Some(Input::Fill { tag, buf, at });
                            return;
                        }
                        Ok(0) => break Err(io::ErrorKind::UnexpectedEof.into()),
                        Ok(count) => at += count,
                        Err(error) => break Err(error.into()),
                    }
                };
                self.done.push_back(Done::Filled { tag, buf, result });
            }
        }
    }

    fn try_output(&mut self, target: u32) {
        let Some(fd) = self.targets.get(target).map(AsRawFd::as_raw_fd) else { return };
        let Some(pending) = self.sockets.get_mut(&target) else { return };
        let Some(mut output) = pending.output.take() else { return };
        let result = loop {
            if output.sent >= output.batch.len() {
                break Ok(());
            }
            let mut skip = output.sent;
            let slices = output.batch.slices().filter_map(|slice| {
                let skipped = skip.min(slice.len());
                skip -= skipped;
                (skipped < slice.len()).then(|| IoSlice::new(&slice[skipped..]))
            });
            let slices: Vec<IoSlice<'_>> = slices.take(SLICES_MAX).collect();
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match sendmsg::<()>(fd, &slices, &[], flags, None) {
                Err(Errno::EAGAIN | Errno::EINTR) => {
                    pending.output = Some(output);
                    return;
                }
                Ok(count) => output.sent += count,
                Err(error) => break Err(error.into()),
            }
        };
        let Output { tag, batch, .. } = output;
        self.done.push_back(Done::Sent { tag, batch, result });
    }

    /// Asks to be told when a socket is ready for what waits for it.
    fn arm(&mut self, target: u32) {
        let (Some(fd), Some(pending)) = (self.targets.get(target), self.sockets.get(&target))
        else {
            return;
        };
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, pending.input.is_some());
        flags.set(EpollFlags::EPOLLOUT, pending.output.is_some());
        if flags.is_empty() {
            return;
        }
        let mut event = EpollEvent::new(flags | EpollFlags::EPOLLONESHOT, u64::from(target));
        if let Err(error) = self.instance.modify(fd, &mut event) {
            self.fail(target, error);
        }
    }

    fn fail(&mut self, target: u32, error: Errno) {
        let Some(pending) = self.sockets.get_mut(&target) else { return };
        match pending.input.take() {
            Some(Input::Receive { tag }) => {
                self.done.push_back(Done::Received { tag, result: Err(error.into()) });
            }
            Some(Input::Fill { tag, buf, .. }) => {
                self.done.push_back(Done::Filled { tag, buf, result: Err(error.into()) });
            }
            None => {}
        }
        if let Some(Output { tag, batch, .. }) = pending.output.take() {
            self.done.push_back(Done::Sent { tag, batch, result: Err(error.into()) });
        }
    }
}

/// The threads that read, write and sync files.
struct Files {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    open: HashMap<u32, Arc<File>>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    finished: Mutex<Vec<Finished>>,
    waker: Arc<EventFd>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    stopping: bool,
}

/// A transfer that has ended, with its memory; or a sync.
struct Finished {
    tag: u64,
    buf: Option<Buf>,
    result: io::Result<()>,
}

impl From<Finished> for Done {
    fn from(Finished { tag, buf, result }: Finished) -> Self {
        match buf {
            Some(buf) => Self::Moved { tag, buf, result },
            None => Self::Synced { tag, result },
        }
    }
}

struct Job {
    file: Arc<File>,
    segments: Vec<Segment>,
    what: Move,
    tag: u64,
}

/// Which way, with the memory; or a sync.
enum Move {
    Read(Buf),
    Write(Payload),
    Sync,
}

impl Move {
    fn len(&self) -> usize {
        match self {
            Self::Read(buf) => buf.len(),
            Self::Write(payload) => payload.len(),
            Self::Sync => 0,
        }
    }

    fn into_buf(self) -> Option<Buf> {
        match self {
            Self::Read(buf) => Some(buf),
            Self::Write(payload) => Some(payload.into_buf()),
            Self::Sync => None,
        }
    }
}

impl Files {
    fn start(threads: usize, waker: Arc<EventFd>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            finished: Mutex::default(),
            waker,
        });
        let mut files = Self { shared, threads: Vec::new(), open: HashMap::new() };
        for index in 0..threads.max(1) {
            let shared = Arc::clone(&files.shared);
            let builder = thread::Builder::new().name(format!("file-io-{index}"));
            files.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(files)
    }

    fn open(&mut self, target: u32, targets: &Targets) -> io::Result<Arc<File>> {
        if let Some(file) = self.open.get(&target) {
            return Ok(Arc::clone(file));
        }
        let fd = targets.get(target).ok_or(io::ErrorKind::NotFound)?;
        let file = Arc::new(File::from(fd.try_clone()?));
        self.open.insert(target, Arc::clone(&file));
        Ok(file)
    }

    fn forget(&mut self, target: u32) {
        self.open.remove(&target);
    }

    fn submit(&self, job: Job) {
        lock(&self.shared.queue).jobs.push_back(job);
        self.shared.changed.notify_one();
    }

    fn finished(&self) -> Vec<Finished> {
        std::mem::take(&mut *lock(&self.shared.finished))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        lock(&self.shared.queue).stopping = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic there has been reported already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let idle = |queue: &mut Queue| queue.jobs.is_empty() && !queue.stopping;
            let waited = self.changed.wait_while(lock(&self.queue), idle);
            let job = waited.unwrap_or_else(PoisonError::into_inner).jobs.pop_front();
            let Some(mut job) = job else { return };
            let result = job.run();
            let (tag, buf) = (job.tag, job.what.into_buf());
            lock(&self.finished).push(Finished { tag, buf, result });
            // Full only if the reactor is woken already.
            let _ = self.waker.write(1);
        }
    }
}

impl Job {
    fn run(&mut self) -> io::Result<()> {
        if let Move::Sync = self.what {
            return self.file.sync_data();
        }
        for Segment { offset, start, len } in &self.segments {
            let part = *start..start + len;
            match &mut self.what {
                Move::Read(buf) => self.file.read_exact_at(&mut buf[part], *offset)?,
                Move::Write(payload) => self.file.write_all_at(&payload[part], *offset)?,
                Move::Sync => {}
            }
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No critical section here can panic half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
