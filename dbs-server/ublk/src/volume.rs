//! What carries out the requests of a device on a volume: one queue on one reactor.
//!
//! Reads and writes of whole blocks are mapped, transferred and answered here; what may have to wait
//! goes to the workers and comes back as a message.

use super::device::{Health, QueueStart, Running};
use super::queue::{Event, Queue};
use dbs_core::volume::Finish;
use dbs_core::{Error, ErrorKind, Store, Volume};
use dbs_frontend::{
    Commits, DISCARD_MAX_BYTES, Direct, Ended, Flushing, Going, Plan, Pool, Storage, Work,
    ZEROES_MAX_BYTES, piece,
};
use dbs_reactor::ublk::{CONTROL_PATH, UblkOp, UblkQueue, UblkRequest, serve_io_for_others};
use dbs_reactor::{Buf, Driver, Handler, Io, Remote, Thread};
use dbs_service::log;
use nix::libc;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// What the queues of a device have in common.
#[derive(Clone)]
pub(super) struct Target {
    pub store: Store,
    pub volume: Volume,
    pub read_only: bool,
    pub pool: Arc<Pool>,
    pub reactor: dbs_reactor::Options,
    /// The server before lost what it had acknowledged to the device's users: the next flush says so.
    pub lost: Arc<AtomicBool>,
}

/// What other threads tell a queue.
enum Message {
    /// A worker is done with a request.
    Done(u16, Result<(), i32>),
    /// A worker is done with all of a request but the commit behind it.
    Commit(u16),
    /// A worker has dropped a request, which the next server is given again.
    Dropped,
    /// A worker has read, or not.
    Read(u16, Buf, Result<(), i32>),
    /// A commit that requests waited for has ended.
    Committed(Result<(), i32>),
    /// Somebody has flushed the storage, whom the queue's commit may wait for.
    Flushed,
    /// Answer what is under way, take nothing more, end: another server goes on.
    Leave,
}

/// Starts the thread of a queue.
fn spawn(target: &Target, start: QueueStart) -> io::Result<Box<dyn Running>> {
    // Only a ring brings requests.
    let options = dbs_reactor::Options { driver: Driver::Uring, ..target.reactor.clone() };
    let name = format!("ublk-{}-{}", start.id, start.queue);
    let target = target.clone();
    let thread = dbs_reactor::spawn(&name, &options, move |io, remote| {
        VolumeQueue::new(io, target, start, remote)
    })?;
    Ok(Box::new(QueueThread(thread)))
}

/// What starts the threads of a device's queues.
pub(super) fn spawner(target: &Target) -> impl FnMut(QueueStart) -> io::Result<Box<dyn Running>> {
    |start| as_io_thread(|| spawn(target, start))
}

/// Threads for what may block.
pub(super) fn start_pool(workers: usize) -> io::Result<Pool> {
    as_io_thread(|| Pool::start("ublk-worker", workers))
}

/// Where there may be devices, marks the calling thread, and those it starts, as doing I/O for others.
/// All threads that use a store take its locks: one that is made to write pages out to a device, short
/// of memory, must not be one that the device's threads wait for.
pub fn serve_devices_from_here() {
    serve_from_here(Path::new(CONTROL_PATH));
}

fn serve_from_here(control: &Path) {
    if control.exists() {
        // Whoever may not is told so when a device is started, and only then.
        let _ = serve_io_for_others();
    }
}

/// Starts threads from one that does I/O for others, as they then do, too.
fn as_io_thread<T: Send>(start: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread =
            thread::Builder::new().name("ublk-start".to_owned()).spawn_scoped(scope, || {
                if let Err(error) = serve_io_for_others() {
                    log::warn("ublk", &[("error", &error), ("what", &"PR_SET_IO_FLUSHER")]);
                }
                start()
            })?;
        let gone = |_| Err(io::Error::other("the starting thread ended at once"));
        thread.join().unwrap_or_else(gone)
    })
}

struct QueueThread(Thread<Message>);

impl Running for QueueThread {
    fn leave(&self) {
        self.0.remote().send(Message::Leave);
    }

    fn join(self: Box<Self>) {
        self.0.join();
    }
}

/// One queue of a device on a volume.
struct VolumeQueue {
    /// Absent if the kernel did not give it.
    queue: Option<Queue>,
    volume: Volume,
    read_only: bool,
    lost: Arc<AtomicBool>,
    storage: Option<Storage>,
    direct: Direct<Ticket>,
    commits: Commits<u16>,
    flushing: Flushing,
    pool: Arc<Pool>,
    remote: Remote<Message>,
    health: Arc<Health>,
    /// Whom its workers know it as.
    client: u64,
    /// Requests begun and not answered.
    running: usize,
    leaving: bool,
    /// Long requests are to be left to the next server.
    dropping: Arc<AtomicBool>,
}

/// A request whose data is being transferred.
struct Ticket {
    tag: u16,
    /// Of a write.
    fua: bool,
    /// Offset and length in bytes.
    range: (u64, usize),
}

impl VolumeQueue {
    fn new(io: &mut Io, target: Target, start: QueueStart, remote: Remote<Message>) -> Self {
        // Without it, which takes a shortage of descriptors, the workers do all I/O.
        let direct_io = target.store.direct_io().ok().flatten();
        let storage = direct_io.map(|direct| Storage {
            file: io.add_file(direct.file),
            offset_alignment: direct.offset_alignment,
            memory_alignment: direct.memory_alignment,
        });
        let other = remote.clone();
        let wake = Arc::new(move || other.send(Message::Flushed));
        let queue = match io.add_ublk_queue(start.device, start.queue, start.depth) {
            Ok(queue) => Some(Queue::new(io, queue, 0, start.depth, 0)),
            Err(error) => {
                start.health.fail(&error);
                io.stop();
                None
            }
        };
        Self {
            queue,
            volume: target.volume,
            read_only: target.read_only,
            lost: target.lost,
            storage,
            direct: Direct::default(),
            commits: Commits::default(),
            flushing: Flushing::new(wake),
            pool: target.pool,
            remote,
            health: start.health,
            client: u64::from(start.id),
            running: 0,
            leaving: false,
            dropping: Arc::default(),
        }
    }

    fn event(&mut self, io: &mut Io, event: Event) {
        match event {
            // What is left to the next server it is given again.
            Event::Request(..) if self.leaving => {}
            Event::Request(tag, request, payload) => {
                self.running += 1;
                self.start(io, tag, &request, payload);
            }
            Event::Ended(failure) => {
                failure.iter().for_each(|error| self.health.fail(error));
                io.stop();
            }
            Event::Nothing => {}
        }
    }

    /// Starts a request in the best way there is for it.
    fn start(&mut self, io: &mut Io, tag: u16, request: &UblkRequest, payload: Option<Buf>) {
        let UblkRequest { op, offset, length, fua, no_unmap } = *request;
        match (op, payload) {
            (UblkOp::Read, _) => self.read(io, tag, offset, length),
            (UblkOp::Write, Some(payload)) => self.write(io, tag, offset, payload, fua),
            (UblkOp::Flush, _) if self.read_only => self.answer(io, tag, Ok(())),
            // Once, as Linux tells of pages that it could not write.
            (UblkOp::Flush, _) if self.lost.swap(false, Ordering::SeqCst) => {
                self.answer(io, tag, Err(libc::EIO));
            }
            (UblkOp::Flush, _) => self.commit(io, tag),
            (UblkOp::Discard, _) => self.work_long(tag, Long::Discard, (offset, length), fua),
            (UblkOp::WriteZeroes, _) => {
                let kind = if no_unmap { Long::KeepZeroes } else { Long::Zeroes };
                self.work_long(tag, kind, (offset, length), fua);
            }
            _ => self.answer(io, tag, Err(libc::EOPNOTSUPP)),
        }
    }

    fn read(&mut self, io: &mut Io, tag: u16, offset: u64, length: u64) {
        let length = length as usize;
        let Self { direct, volume, storage, .. } = self;
        match direct.plan_read(volume, storage.as_ref(), (offset, length), false) {
            Err(error) => self.answer(io, tag, Err(errno(&error))),
            Ok(Plan::Io(planned)) => {
                let ticket = Ticket { tag, fua: false, range: (offset, length) };
                direct.read(io, planned, length, ticket);
            }
            Ok(Plan::Zeros) => {
                let mut buf = io.buffers().take(length);
                buf.fill(0);
                self.answer_read(io, tag, buf);
            }
            Ok(Plan::Blocked | Plan::Holes) => self.work_read(io, tag, (offset, length)),
        }
    }

    /// Hands a read to the workers.
    fn work_read(&self, io: &mut Io, tag: u16, (offset, length): (u64, usize)) {
        let (volume, remote) = (self.volume.clone(), self.remote.clone());
        let mut buf = io.buffers().take(length);
        self.pool.submit_once(self.client, move || {
            let result = run(|| volume.read_at(offset, &mut buf));
            remote.send(Message::Read(tag, buf, result));
        });
    }

    fn write(&mut self, io: &mut Io, tag: u16, offset: u64, payload: Buf, fua: bool) {
        let Self { direct, volume, storage, .. } = self;
        match direct.plan_write(volume, storage.as_ref(), offset, payload.len()) {
            Err(error) => self.answer(io, tag, Err(errno(&error))),
            Ok(Some(planned)) => {
                let ticket = Ticket { tag, fua, range: (offset, payload.len()) };
                direct.write(io, planned, payload, ticket);
            }
            Ok(None) => self.work(tag, move |volume| volume.write_at(offset, &payload, fua)),
        }
    }

    /// Hands a request to the workers.
    fn work(&self, tag: u16, job: impl FnOnce(&Volume) -> dbs_core::Result<()> + Send + 'static) {
        let (volume, remote) = (self.volume.clone(), self.remote.clone());
        self.pool.submit_once(self.client, move || {
            let result = run(|| job(&volume));
            remote.send(Message::Done(tag, result));
        });
    }

    /// Hands a request to the workers that may take long.
    fn work_long(&self, tag: u16, kind: Long, (at, length): (u64, u64), fua: bool) {
        let (volume, remote) = (self.volume.clone(), self.remote.clone());
        let (end, leaving) = (at + length, Arc::clone(&self.dropping));
        let work =
            LongWork { tag, kind, at, end, commit: fua, volume: Some(volume), remote, leaving };
        self.pool.submit(self.client, work);
    }

    /// Answers a request once everything acknowledged so far is durable; all that ask while a
    /// commit runs share the next one.
    fn commit(&mut self, io: &mut Io, tag: u16) {
        if self.commits.add(tag) {
            self.start_commit(io);
        }
    }

    fn start_commit(&mut self, io: &mut Io) {
        if self.commits.begin().is_some() {
            self.go_on(io);
        }
    }

    fn go_on(&mut self, io: &mut Io) {
        match self.flushing.start(io, self.storage.as_ref(), &self.volume, 0) {
            Going::Ended(result) => return self.committed(io, of_store(result)),
            Going::Flushing => return,
            Going::Blocked => {}
        }
        let (volume, remote) = (self.volume.clone(), self.remote.clone());
        self.pool.submit_first(move || {
            let result = run(|| volume.flush());
            remote.send(Message::Committed(result));
        });
    }

    fn committed(&mut self, io: &mut Io, result: Result<(), i32>) {
        let mut committing = self.commits.take();
        for tag in committing.drain(..) {
            self.answer(io, tag, result);
        }
        if self.commits.ended(committing) {
            self.start_commit(io);
        }
    }

    fn answer(&mut self, io: &mut Io, tag: u16, result: Result<(), i32>) {
        if let Some(queue) = &mut self.queue {
            queue.answer(io, tag, result);
        }
        self.answered(io);
    }

    fn answer_read(&mut self, io: &mut Io, tag: u16, data: Buf) {
        if let Some(queue) = &mut self.queue {
            queue.answer_read(io, tag, data);
        }
        self.answered(io);
    }

    fn answered(&mut self, io: &mut Io) {
        self.running -= 1;
        self.leave_when_done(io);
    }

    fn leave_when_done(&self, io: &mut Io) {
        if self.leaving && self.running == 0 {
            io.stop();
        }
    }
}

impl Handler for VolumeQueue {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        match message {
            Message::Done(tag, result) => self.answer(io, tag, result),
            Message::Read(tag, data, Ok(())) => self.answer_read(io, tag, data),
            Message::Read(tag, _, Err(error)) => self.answer(io, tag, Err(error)),
            Message::Commit(tag) => self.commit(io, tag),
            Message::Dropped => self.answered(io),
            Message::Committed(result) => self.committed(io, result),
            Message::Flushed if self.flushing.is_waiting() => self.go_on(io),
            Message::Flushed => {}
            Message::Leave => {
                self.leaving = true;
                self.dropping.store(true, Ordering::Relaxed);
                self.leave_when_done(io);
            }
        }
    }

    fn fetched(&mut self, io: &mut Io, _: UblkQueue, tag: u16, request: io::Result<UblkRequest>) {
        let Some(queue) = &mut self.queue else { return };
        let event = queue.fetched(io, tag, request);
        self.event(io, event);
    }

    fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        if let (Some(_), Some(queue)) = (Queue::of_transfer(tag), &mut self.queue) {
            let event = queue.copied(io, tag, buf, result);
            return self.event(io, event);
        }
        let Some((Ticket { tag, fua, range }, ended)) = self.direct.moved(tag, buf, result) else {
            return;
        };
        match ended {
            Err(error) => self.answer(io, tag, Err(errno(&error))),
            Ok(Ended::Read(data)) => self.answer_read(io, tag, data),
            Ok(Ended::Again) => self.work_read(io, tag, range),
            Ok(Ended::Write(Finish::Done)) if !fua => self.answer(io, tag, Ok(())),
            Ok(Ended::Write(_)) => self.commit(io, tag),
        }
    }

    fn synced(&mut self, io: &mut Io, _: u64, result: io::Result<()>) {
        let result = self.flushing.synced(result);
        self.committed(io, of_store(result));
    }
}

/// What a request does that may take long.
#[derive(Clone, Copy)]
enum Long {
    Discard,
    Zeroes,
    /// Zeros that keep their space.
    KeepZeroes,
}

/// Such a request at the workers, who carry it out step by step.
struct LongWork {
    tag: u16,
    kind: Long,
    at: u64,
    end: u64,
    /// It ends with a commit.
    commit: bool,
    /// Until it is over.
    volume: Option<Volume>,
    remote: Remote<Message>,
    leaving: Arc<AtomicBool>,
}

impl LongWork {
    /// Takes a step; what the queue is told once it is over.
    fn next(&mut self) -> Option<Message> {
        let volume = self.volume.as_ref()?;
        if self.leaving.load(Ordering::Relaxed) {
            return Some(Message::Dropped);
        }
        let most = if matches!(self.kind, Long::KeepZeroes) {
            ZEROES_MAX_BYTES.into()
        } else {
            DISCARD_MAX_BYTES.into()
        };
        let (at, length) = (self.at, piece(self.at, self.end, most));
        let mut finish = Finish::Done;
        let result = run(|| {
            finish = match self.kind {
                Long::Discard => volume.discard_part(at, length)?,
                Long::Zeroes => volume.zero_part(at, length)?,
                Long::KeepZeroes => volume.write_part(at, &vec![0; length as usize])?,
            };
            Ok(())
        });
        self.at += length;
        self.commit |= finish == Finish::Commit;
        match result {
            Ok(()) if self.at < self.end => None,
            Ok(()) if self.commit => Some(Message::Commit(self.tag)),
            result => Some(Message::Done(self.tag, result)),
        }
    }
}

impl Work for LongWork {
    fn step(&mut self) -> bool {
        let Some(message) = self.next() else { return self.volume.is_some() };
        self.volume = None;
        self.remote.send(message);
        false
    }
}

/// Runs a job so that a bug in it costs one request, not a worker.
fn run(job: impl FnOnce() -> dbs_core::Result<()>) -> Result<(), i32> {
    catch_unwind(AssertUnwindSafe(job)).map_or(Err(libc::EIO), of_store)
}

/// What a device's user is told.
fn of_store(result: dbs_core::Result<()>) -> Result<(), i32> {
    result.map_err(|error| errno(&error))
}

/// The error number a device's user sees.
fn errno(error: &Error) -> i32 {
    match error.kind() {
        ErrorKind::NoSpace => libc::ENOSPC,
        ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `PF_MEMALLOC_NOIO` of the kernel, by which it remembers that.
    const NO_IO: u64 = 0x0008_0000;

    /// Whether the kernel takes the calling thread for one that does I/O for others.
    fn is_marked() -> bool {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // Behind the name, which may hold anything: state, five numbers, flags.
        let flags = stat.rsplit(')').next().unwrap().split_whitespace().nth(6).unwrap();
        flags.parse::<u64>().unwrap() & NO_IO != 0
    }

    /// Whether a thread is marked that was started by one which serves from there on.
    fn marked_below(control: &Path) -> bool {
        thread::scope(|scope| {
            let starter = scope.spawn(|| {
                serve_from_here(control);
                thread::spawn(is_marked).join().unwrap()
            });
            starter.join().unwrap()
        })
    }

    #[test]
    fn what_serves_a_store_that_may_have_devices_is_started_as_doing_io_for_others() {
        let allowed = thread::spawn(|| serve_io_for_others().is_ok()).join().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("ublk-control");
        assert!(!marked_below(&control), "there can be no device");
        std::fs::write(&control, "").unwrap();
        if allowed {
            assert!(marked_below(&control));
        } else {
            println!("SKIPPED the mark: needs CAP_SYS_RESOURCE");
        }
        assert!(!is_marked(), "the thread that runs the tests is not concerned");
    }
}
