//! Nobody holds the threads of a server: requests that would take for ever, beside clients who want
//! to be served meanwhile.

use crate::support::{Disk, disk, eventually};
use dbs_core::volume::Finish;
use dbs_frontend::{Action, Carrier, Carry, Event, Front, Outcome};
use dbs_nbd::export::Result;
use dbs_nbd::wire::option::encode_option;
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{Errno, cmd, cmd_flag, opt};
use dbs_nbd::{
    Carried, Client, ClientOptions, Export, Exports, Extent, Failure, Listen, OneExport, Peer,
    ServerHandle, ServerOptions, ZeroOptions, start,
};
use dbs_reactor::{Batch, Buf, Handler, Io, Remote};
use std::any::Any;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(120);
/// So large that to zero it takes years.
const ENDLESS_BYTES: u64 = 64 << 40;
/// Requests of a connection that are carried out; what comes then is not read.
const REQUESTS_MAX: u64 = 1024;

/// A disk of which a MiB takes a millisecond, whatever is done to it.
#[derive(Default)]
struct Endless {
    /// Calls of each kind of work so far.
    calls: AtomicU64,
    /// The test is over, however it went: the server is to end.
    over: AtomicBool,
}

impl Endless {
    fn work(&self, length: u64) -> Result<()> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        for _ in 0..length.div_ceil(MIB) {
            if self.over.load(Ordering::SeqCst) {
                return Err(Failure::new(Errno::Io, "the test is over"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Export for Endless {
    fn name(&self) -> String {
        "endless".to_owned()
    }

    fn description(&self) -> String {
        String::new()
    }

    fn size(&self) -> u64 {
        ENDLESS_BYTES
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> Result<()> {
        self.work(buf.len() as u64)
    }

    fn write(&self, _: u64, buf: &[u8]) -> Result<Finish> {
        self.work(buf.len() as u64).map(|()| Finish::Done)
    }

    /// As a discard, which is a little work for much.
    fn trim(&self, _: u64, length: u64) -> Result<Finish> {
        self.work(length / 64).map(|()| Finish::Done)
    }

    fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<Finish> {
        if options.no_hole {
            return self.work(length).map(|()| Finish::Done);
        }
        self.trim(offset, length)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn cache(&self, _: u64, length: u64) -> Result<()> {
        self.work(length)
    }

    fn contexts(&self, _: &str) -> Vec<String> {
        Vec::new()
    }

    fn block_status(&self, _: &str, _: u64, length: u64, _: usize) -> Result<Vec<Extent>> {
        Ok(vec![Extent { length, flags: 0 }])
    }
}

struct Both(Arc<Endless>, Arc<Disk>);

impl Exports for Both {
    fn open(&self, name: &str, _: &Peer) -> Result<Arc<dyn Export>> {
        Ok(if name == "endless" { self.0.clone() } else { self.1.clone() })
    }

    fn list(&self, _: &Peer) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A server of both disks with few workers.
struct Place {
    endless: Arc<Endless>,
    dir: tempfile::TempDir,
    handle: Option<ServerHandle>,
}

impl Place {
    fn new() -> Self {
        let (endless, dir) = (Arc::<Endless>::default(), tempfile::tempdir().unwrap());
        let options = ServerOptions {
            workers: 4,
            requests_max: REQUESTS_MAX as usize,
            ..ServerOptions::default()
        };
        let exports = Arc::new(Both(endless.clone(), disk(8 * MIB)));
        let handle = start(&[Listen::Unix(dir.path().join("nbd"))], exports, options).unwrap();
        Self { endless, dir, handle: Some(handle) }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    fn handle(&self) -> &ServerHandle {
        self.handle.as_ref().unwrap()
    }

    /// All that a client of good manners does is answered.
    fn serves(&self) {
        let stream = UnixStream::connect(self.path()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Client::over(stream, "disk", &ClientOptions::default()).unwrap();
        client.write_at(0, &[1; 4096], true).unwrap();
        client.read_at(0, &mut [0; 4096]).unwrap();
        client.trim(0, MIB, true).unwrap();
        client.flush().unwrap();
        client.disconnect().unwrap();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.endless.over.store(true, Ordering::SeqCst);
    }
}

/// A client that sends `count` requests for all of the endless disk, and reads no answer.
fn hostile(path: &Path, (command, flags): (u16, u16), count: u64) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(encode_option(opt::EXPORT_NAME, b"endless"));
    for cookie in 0..count {
        // As much as a simple request can say.
        let (offset, length) = (cookie << 32, u64::from(u32::MAX - 511));
        bytes.extend(Request { flags, command, cookie, offset, length }.encode(Style::Simple));
    }
    stream.write_all(&bytes).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

const LONG: [(u16, u16); 4] = [
    (cmd::WRITE_ZEROES, cmd_flag::NO_HOLE),
    (cmd::WRITE_ZEROES, 0),
    (cmd::TRIM, cmd_flag::FUA),
    (cmd::CACHE, 0),
];

#[test]
fn requests_without_end_keep_nobody_waiting() {
    let place = Place::new();
    let held: Vec<_> = LONG.iter().map(|kind| hostile(&place.path(), *kind, 500)).collect();
    let workers = 3;
    eventually("all threads are at work", || {
        place.endless.calls.load(Ordering::SeqCst) > 4 * workers
    });
    for _ in 0..3 {
        place.serves();
    }
    drop(held);
    eventually("the clients are gone", || place.handle().clients().is_empty());
}

#[test]
fn what_a_client_asked_for_is_dropped_when_it_is_gone() {
    for kind in LONG {
        let place = Place::new();
        // More than is read before something is answered: nobody hears it leave.
        let stream = hostile(&place.path(), kind, REQUESTS_MAX + 10);
        eventually("it is served", || place.endless.calls.load(Ordering::SeqCst) > 0);
        drop(stream);
        eventually("it is gone", || place.handle().clients().is_empty());
        place.serves();
    }
}

#[test]
fn stopping_does_not_wait_for_what_takes_long() {
    for kind in LONG {
        let mut place = Place::new();
        let mut stream = hostile(&place.path(), kind, 100);
        eventually("it is served", || place.endless.calls.load(Ordering::SeqCst) > 0);
        let endless = place.endless.clone();
        let watch = thread::spawn(move || {
            let begun = Instant::now();
            while begun.elapsed() < PATIENCE && !endless.over.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(5));
            }
            // If it has not stopped by now, let it.
            !endless.over.swap(true, Ordering::SeqCst)
        });
        place.handle.take().unwrap().stop();
        place.endless.over.store(true, Ordering::SeqCst);
        assert!(!watch.join().unwrap(), "it did not stop by itself");
        let mut answers = Vec::new();
        stream.read_to_end(&mut answers).unwrap();
        // Each is answered: the server shuts down.
        assert_eq!(answers.len(), 100 * 16);
        for answer in answers.chunks(16) {
            assert_eq!(answer[4..8], 108u32.to_be_bytes());
        }
    }
}

#[test]
fn long_requests_are_done_to_their_end() {
    let place = Place::new();
    let mut client =
        Client::connect_unix(&place.path(), "disk", &ClientOptions::default()).unwrap();
    let content: Vec<u8> = (0..8 * MIB).map(|at| (at / 4096) as u8 | 1).collect();
    // Both in more than one step, and not along the borders of steps.
    client.write_at(512, &content[512..], true).unwrap();
    let mut found = vec![0; 8 * MIB as usize];
    client.read_at(0, &mut found).unwrap();
    assert!(found[..512].iter().all(|byte| *byte == 0) && found[512..] == content[512..]);
    client.write_zeroes(512, 5 * MIB, cmd_flag::NO_HOLE).unwrap();
    client.read_at(0, &mut found).unwrap();
    let end = 512 + 5 * MIB as usize;
    assert!(found[..end].iter().all(|byte| *byte == 0) && found[end..] == content[end..]);
}

/// What a reactor is told on which requests are carried out elsewhere.
enum Tell {
    Front(Box<dyn Any + Send>),
    /// Something is due to be answered.
    Answer,
    End,
}

/// Where everything is done a moment after it was asked for.
struct Elsewhere {
    remote: Remote<Tell>,
    begun: Vec<(u64, Carry)>,
    calls: Arc<AtomicU64>,
    /// Most that were begun at a time.
    most: Arc<AtomicU64>,
    /// The test is over, however it went: nothing more is done.
    over: Arc<AtomicBool>,
}

/// Says so when it is dropped.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Carrier for Elsewhere {
    fn size(&self) -> u64 {
        ENDLESS_BYTES
    }

    fn carry(&mut self, _: &mut Io, request: Carry, _: Option<Buf>, ticket: u64) {
        self.begun.push((ticket, request));
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.most.fetch_max(self.begun.len() as u64, Ordering::SeqCst);
        self.remote.send(Tell::Answer);
    }
}

struct Lane {
    front: Box<dyn Front>,
    elsewhere: Elsewhere,
}

impl Handler for Lane {
    type Message = Tell;

    fn message(&mut self, io: &mut Io, message: Tell) {
        match message {
            Tell::Front(message) => self.front.message(io, &mut self.elsewhere, message),
            Tell::Answer => {}
            Tell::End => io.stop(),
        }
    }

    fn received(&mut self, io: &mut Io, tag: u64, data: std::io::Result<&[u8]>) {
        self.front.input(io, &mut self.elsewhere, tag as u32, Event::Received(data));
    }

    fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: std::io::Result<()>) {
        self.front.input(io, &mut self.elsewhere, tag as u32, Event::Filled(buf, result));
    }

    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: std::io::Result<()>) {
        self.front.input(io, &mut self.elsewhere, tag as u32, Event::Sent(batch, result));
    }

    fn turn(&mut self, io: &mut Io) {
        for (ticket, request) in std::mem::take(&mut self.elsewhere.begun) {
            thread::sleep(Duration::from_micros(200));
            let over = self.elsewhere.over.load(Ordering::SeqCst);
            let outcome = match request.action {
                _ if over => {
                    let kind = dbs_frontend::FailureKind::Io;
                    Outcome::Failed(dbs_frontend::Failure::new(kind, "the test is over"))
                }
                Action::Read => Outcome::Data(io.buffers().take(request.length as usize)),
                _ => Outcome::Done(request.length),
            };
            self.front.answered(io, ticket, outcome);
        }
        self.front.turn(io, &mut self.elsewhere);
    }
}

#[test]
fn requests_carried_out_elsewhere_are_limited_and_dropped_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd");
    let exports = Arc::new(OneExport::new("endless", || ENDLESS_BYTES));
    let carried = Carried::new(exports, ServerOptions::default()).unwrap();
    let front = carried.front();
    let (calls, most) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
    let (counts, over) = ((calls.clone(), most.clone()), Arc::<AtomicBool>::default());
    let ends = over.clone();
    let reactor = dbs_reactor::spawn("lane", &dbs_reactor::Options::default(), |_, remote| {
        let (calls, most) = counts;
        let elsewhere = Elsewhere { remote, begun: Vec::new(), calls, most, over: ends };
        Lane { front: front(0), elsewhere }
    })
    .unwrap();
    let remote = reactor.remote();
    let deliver = move |_: usize, message| remote.send(Tell::Front(message));
    let handle = carried.start(&[Listen::Unix(path.clone())], 1, deliver).unwrap();
    let _over = Over(over);

    let count = 500;
    let zeroes = (cmd::WRITE_ZEROES, cmd_flag::NO_HOLE);
    let stream = hostile(&path, zeroes, count);
    eventually("it is served", || calls.load(Ordering::SeqCst) > 20);
    assert!(most.load(Ordering::SeqCst) <= 4, "{most:?} at a time");
    let stream_of_other = UnixStream::connect(&path).unwrap();
    stream_of_other.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut other = Client::over(stream_of_other, "endless", &ClientOptions::default()).unwrap();
    other.read_at(0, &mut [0; 4096]).unwrap();
    other.trim(0, MIB, true).unwrap();
    other.disconnect().unwrap();
    drop(stream);
    eventually("the clients are gone", || handle.clients().is_empty());
    let all = count * (u64::from(u32::MAX) / MIB);
    assert!(calls.load(Ordering::SeqCst) < all / 2, "the rest is dropped");
    handle.stop();
    reactor.remote().send(Tell::End);
    reactor.join();
}
