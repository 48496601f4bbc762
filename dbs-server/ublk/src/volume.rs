//! What carries out the requests of a device on a volume: one queue on one reactor.
//!
//! [`Requests`] carries them out; here they are translated, and counted until the device is left.

use super::device::{Health, QueueStart, Running};
use super::queue::{Event, Queue};
use dbs_core::{Store, Volume};
use dbs_frontend::{Answer, Demand, Disk, Pool, Report, Requests, User};
use dbs_reactor::ublk::{CONTROL_PATH, UblkOp, UblkQueue, UblkRequest, serve_io_for_others};
use dbs_reactor::{Buf, Driver, Handler, Io, Remote, Thread};
use dbs_service::log;
use nix::libc;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
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
    /// What a worker has done.
    Report(Report<u16>),
    /// The limits of the volume delay nothing any more.
    EndDelays,
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
    fn ends_delays(&self) {
        self.0.remote().send(Message::EndDelays);
    }

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
    user: Arc<User>,
    requests: Requests<u16>,
    health: Arc<Health>,
    /// Requests begun and not answered.
    running: usize,
    leaving: bool,
}

impl VolumeQueue {
    fn new(io: &mut Io, target: Target, start: QueueStart, remote: Remote<Message>) -> Self {
        let deliver = Arc::new(move |report| remote.send(Message::Report(report)));
        let requests = Requests::new(io, &target.store, target.pool, deliver);
        let queue = match io.add_ublk_queue(start.device, start.queue, start.depth) {
            Ok(queue) => Some(Queue::new(io, queue, 0, start.depth, 0)),
            Err(error) => {
                start.health.fail(&error);
                io.stop();
                None
            }
        };
        let (client, dropping) = (start.id.into(), Arc::default());
        let user =
            User::new(Disk::Stored(target.volume), target.read_only, client, target.lost, dropping);
        Self { queue, user, requests, health: start.health, running: 0, leaving: false }
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

    fn start(&mut self, io: &mut Io, tag: u16, request: &UblkRequest, payload: Option<Buf>) {
        let UblkRequest { op, offset, length, fua, no_unmap } = *request;
        let demand = match (op, payload) {
            (UblkOp::Read, _) => Demand::Read,
            (UblkOp::Write, Some(payload)) => Demand::Write(payload, fua),
            (UblkOp::Flush, _) => Demand::Flush,
            (UblkOp::Discard, _) => Demand::Discard(fua),
            (UblkOp::WriteZeroes, _) if no_unmap => Demand::KeepZeroes(fua),
            (UblkOp::WriteZeroes, _) => Demand::Zeroes(fua),
            _ => return self.answered(io, tag, Answer::Failed(libc::EOPNOTSUPP)),
        };
        self.requests.start(io, &self.user, tag, demand, (offset, length));
        self.answer(io);
    }

    /// Answers what has ended.
    fn answer(&mut self, io: &mut Io) {
        while let Some((tag, answer)) = self.requests.ended() {
            self.answered(io, tag, answer);
        }
    }

    fn answered(&mut self, io: &mut Io, tag: u16, answer: Answer) {
        if let Some(queue) = &mut self.queue {
            match answer {
                Answer::Done(data) if data.is_empty() => queue.answer(io, tag, Ok(())),
                Answer::Done(data) => queue.answer_read(io, tag, data),
                Answer::Failed(error) => queue.answer(io, tag, Err(error)),
                // The next server is given it again.
                Answer::Dropped => {}
            }
        }
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
            Message::Report(report) => {
                self.requests.report(io, report);
                self.answer(io);
            }
            Message::EndDelays => {
                self.user.ends_delays(false);
                self.requests.let_go(io);
                self.answer(io);
            }
            Message::Leave => {
                self.leaving = true;
                self.user.drop_long();
                self.user.ends_delays(true);
                self.requests.let_go(io);
                self.answer(io);
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
        self.requests.moved(io, tag, buf, result);
        self.answer(io);
    }

    fn synced(&mut self, io: &mut Io, _: u64, result: io::Result<()>) {
        self.requests.synced(io, result);
        self.answer(io);
    }

    fn reminded(&mut self, io: &mut Io) {
        self.requests.reminded(io);
        self.answer(io);
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
