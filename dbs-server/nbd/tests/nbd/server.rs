//! The NBD server with its own client: every style of headers, many requests at once, and the ways
//! to stop.

use crate::support::{Closed, DIFF, Disk, Server, disk, eventually, pattern};
use dbs_frontend::Listener;
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::wire::option::{InfoRequest, MetaRequest, encode_option};
use dbs_nbd::wire::reply::{ReplyHeader, chunk, decode_block_status, decode_error};
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{Errno, cmd, cmd_flag, flag, opt};
use dbs_nbd::{
    Client, ClientOptions, Export, Exports, Extent, Failure, Listen, Peer, ServerOptions, start,
};
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(120);

fn options(extended: bool) -> ClientOptions {
    ClientOptions {
        contexts: vec![BASE_ALLOCATION.into(), "no:such".into(), DIFF.into()],
        extended,
    }
}

fn connect(server: &Server) -> Client<UnixStream> {
    let stream = UnixStream::connect(server.path()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Client::over(stream, "disk", &options(false)).unwrap()
}

fn errno(result: io::Result<()>) -> Errno {
    let error = result.unwrap_err();
    error.get_ref().unwrap().downcast_ref::<Failure>().unwrap().errno
}

/// A disk for each client.
struct Own(Arc<AtomicBool>);

impl Exports for Own {
    fn open(&self, name: &str, _: &Peer) -> dbs_nbd::export::Result<Arc<dyn Export>> {
        Ok(Arc::new(Disk { closed: Closed(Some(self.0.clone())), ..Disk::new(name, MIB) }))
    }

    fn list(&self, _: &Peer) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// Found by an import from a pipe: it ended its connections, and found its volume still open.
#[test]
fn what_a_connection_has_open_is_closed_before_the_connection() {
    let (dir, closed) = (tempfile::tempdir().unwrap(), Arc::<AtomicBool>::default());
    let path = dir.path().join("nbd");
    let options = ServerOptions::default();
    let server = start(&[Listen::Unix(path.clone())], Arc::new(Own(closed.clone())), options);
    let stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut client = Client::over(stream, "disk", &ClientOptions::default()).unwrap();
    // By a worker.
    client.write_at(512, &[1; 512], true).unwrap();
    client.flush().unwrap();
    let mut stream = client.disconnect().unwrap();
    assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0);
    assert!(closed.load(Ordering::SeqCst), "it is still open");
    server.unwrap().stop();
}

fn exercise<S: Read + Write>(mut client: Client<S>, disk: &Disk) {
    let data = pattern(7, 3 * MIB as usize);
    assert_eq!(client.size(), disk.content().len() as u64);
    assert_eq!(client.contexts().collect::<Vec<_>>(), [BASE_ALLOCATION, DIFF]);
    client.write_at(MIB, &data, false).unwrap();
    client.write_at(512, &data[..512], true).unwrap();
    client.flush().unwrap();
    let mut back = vec![1; 8 * MIB as usize];
    client.read_at(0, &mut back).unwrap();
    assert!(back == disk.content());
    assert!(back[MIB as usize..4 * MIB as usize] == data);

    let status = client.block_status(BASE_ALLOCATION, 0, 8 * MIB).unwrap();
    let expected = [(4096, 0), (MIB - 4096, 3), (3 * MIB, 0), (4 * MIB, 3)];
    assert_eq!(status, expected.map(|(length, flags)| Extent { length, flags }));
    let status = client.block_status(DIFF, MIB, 4096).unwrap();
    assert_eq!(status, [Extent { length: 4096, flags: 1 }]);
    assert!(client.block_status("no:such", 0, 4096).is_err());

    client.write_zeroes(0, 8 * MIB, cmd_flag::FAST_ZERO).unwrap();
    client.read_at(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0));
    client.trim(0, 8 * MIB, true).unwrap();
    assert_eq!(errno(client.read_at(8 * MIB, &mut [0; 512])), Errno::Invalid);
    assert_eq!(errno(client.write_at(8 * MIB, &[0; 512], false)), Errno::NoSpace);
    assert_eq!(errno(client.write_at(1, &[0; 512], false)), Errno::Invalid);
    let both = cmd_flag::FAST_ZERO | cmd_flag::NO_HOLE;
    assert_eq!(errno(client.write_zeroes(0, 4096, both)), Errno::NotSupported);
    client.disconnect().unwrap();
}

#[test]
fn every_transport_and_style() {
    let disk = disk(8 * MIB);
    let server = Server::new([disk.clone()], ServerOptions::default());
    for extended in [false, true] {
        let options = options(extended);
        exercise(Client::connect_unix(&server.path(), "disk", &options).unwrap(), &disk);
        exercise(Client::connect_tcp(("127.0.0.1", server.port()), "", &options).unwrap(), &disk);
        let (ours, theirs) = UnixStream::pair().unwrap();
        server.handle().adopt(theirs).unwrap();
        let client = Client::over(ours, "disk", &options).unwrap();
        eventually("the handed over client is listed with its export", || {
            let mut clients = server.handle().clients().into_iter();
            clients.any(|c| c.peer == "unix:handed over" && c.export.as_deref() == Some("disk"))
        });
        exercise(client, &disk);
    }
    let list = Client::list(UnixStream::connect(server.path()).unwrap()).unwrap();
    assert_eq!(list, [("disk".to_owned(), "disk disk in memory".to_owned())]);
    let absent = Client::connect_unix(&server.path(), "absent", &options(false)).unwrap_err();
    assert!(absent.to_string().contains("no export `absent`"), "{absent}");
    eventually("all clients gone", || server.handle().clients().is_empty());
    assert!(server.log.lock().unwrap().is_empty(), "{:?}", server.log);
}

/// A connection without a client's good manners.
struct Raw {
    stream: UnixStream,
    style: Style,
}

impl Raw {
    fn new(server: &Server, style: Style) -> Self {
        let stream = UnixStream::connect(server.path()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut raw = Self { stream, style: Style::Simple };
        assert_eq!(&raw.bytes(8), b"NBDMAGIC");
        raw.bytes(10);
        raw.stream.write_all(&3u32.to_be_bytes()).unwrap();
        match style {
            Style::Simple => {}
            Style::Structured => raw.option(opt::STRUCTURED_REPLY, &[]),
            Style::Extended => raw.option(opt::EXTENDED_HEADERS, &[]),
        }
        if style != Style::Simple {
            let queries = vec![BASE_ALLOCATION.into(), DIFF.into()];
            raw.option(
                opt::SET_META_CONTEXT,
                &MetaRequest { name: "disk".into(), queries }.encode(),
            );
        }
        raw.option(opt::GO, &InfoRequest { name: "disk".into(), wanted: vec![] }.encode());
        raw.style = style;
        raw
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Sends an option and reads up to the reply that acknowledges it.
    fn option(&mut self, option: u32, data: &[u8]) {
        self.stream.write_all(&encode_option(option, data)).unwrap();
        loop {
            let header = self.bytes(20);
            let kind = u32::from_be_bytes(header[12..16].try_into().unwrap());
            let length = u32::from_be_bytes(header[16..].try_into().unwrap());
            self.bytes(length as usize);
            assert_eq!(kind >> 31, 0, "option {option} refused");
            if kind == 1 {
                return;
            }
        }
    }

    fn send(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, length: u64) {
        let request = Request { flags, command, cookie, offset, length };
        self.stream.write_all(&request.encode(self.style)).unwrap();
    }

    /// The next chunk: last, type, cookie, payload.
    fn chunk(&mut self) -> (bool, u16, u64, Vec<u8>) {
        let mut header = self.bytes(16);
        let total = ReplyHeader::bytes(self.style, &header).unwrap();
        header.extend(self.bytes(total - 16));
        match ReplyHeader::decode(self.style, &header).unwrap() {
            ReplyHeader::Chunk { done, kind, cookie, length } => {
                (done, kind, cookie, self.bytes(length as usize))
            }
            simple => panic!("{simple:?}"),
        }
    }

    fn error(&mut self) -> Errno {
        let (done, kind, _, payload) = self.chunk();
        assert!(done && kind == chunk::ERROR, "{done} {kind}");
        decode_error(&payload).unwrap().0
    }
}

#[test]
fn extended_headers_in_detail() {
    let disk = disk(8 * MIB);
    let server = Server::new([disk], ServerOptions::default());
    let client = Client::connect_unix(&server.path(), "disk", &options(true)).unwrap();
    assert_ne!(client.flags() & flag::BLOCK_STATUS_PAYLOAD, 0);
    let mut raw = Raw::new(&server, Style::Extended);
    // The payload picks the second of two contexts.
    raw.send(cmd_flag::PAYLOAD_LEN, cmd::BLOCK_STATUS, 1, 4096, 12);
    raw.stream.write_all(&8192u64.to_be_bytes()).unwrap();
    raw.stream.write_all(&1u32.to_be_bytes()).unwrap();
    let (done, kind, cookie, payload) = raw.chunk();
    assert!(done);
    assert_eq!((kind, cookie), (chunk::BLOCK_STATUS_EXT, 1));
    assert_eq!(decode_block_status(kind, &payload).unwrap(), (1, vec![(8192, 0)]));
    // Unknown context, named twice, cut short: refused, and the connection goes on.
    for ids in [&[2u32][..], &[0, 0], &[]] {
        raw.send(cmd_flag::PAYLOAD_LEN, cmd::BLOCK_STATUS, 2, 0, 8 + 4 * ids.len() as u64);
        raw.stream.write_all(&4096u64.to_be_bytes()).unwrap();
        for id in ids {
            raw.stream.write_all(&id.to_be_bytes()).unwrap();
        }
        assert_eq!(raw.error(), Errno::Invalid);
    }
    // A payload where none belongs is skipped; a write without one is refused.
    raw.send(cmd_flag::PAYLOAD_LEN, cmd::TRIM, 3, 0, 1000);
    raw.stream.write_all(&[7; 1000]).unwrap();
    assert_eq!(raw.error(), Errno::Invalid);
    raw.send(0, cmd::WRITE, 4, 0, 4096);
    assert_eq!(raw.error(), Errno::Invalid);
    raw.send(0, cmd::TRIM, 5, 0, u64::MAX);
    assert_eq!(raw.error(), Errno::Invalid);
    raw.send(0, cmd::TRIM, 6, 0, 8 * MIB);
    assert_eq!(raw.chunk(), (true, chunk::NONE, 6, vec![]));
}

#[test]
fn sparse_reads_send_holes_unless_told_not_to() {
    let disk = disk(8 * MIB);
    let server = Server::new([disk.clone()], ServerOptions::default());
    connect(&server).write_at(MIB, &pattern(1, 65536), false).unwrap();
    let mut raw = Raw::new(&server, Style::Structured);
    raw.send(0, cmd::READ, 1, 0, 2 * MIB);
    let chunks: Vec<_> = (0..3).map(|_| raw.chunk()).collect();
    let kinds: Vec<_> = chunks.iter().map(|c| (c.0, c.1, c.3.len())).collect();
    assert_eq!(
        kinds,
        [
            (false, chunk::OFFSET_HOLE, 12),
            (false, chunk::OFFSET_DATA, 8 + 65536),
            (true, chunk::OFFSET_HOLE, 12)
        ]
    );
    raw.send(cmd_flag::DF, cmd::READ, 2, 0, 2 * MIB);
    let whole = raw.chunk();
    assert_eq!((whole.0, whole.1, whole.3.len() as u64), (true, chunk::OFFSET_DATA, 8 + 2 * MIB));
    raw.send(0, cmd::READ, 3, 0, 64 * MIB);
    assert_eq!(raw.error(), Errno::Invalid);
    raw.send(0, 99, 4, 0, 0);
    assert_eq!(raw.error(), Errno::Invalid);
    // Too much to write, but little enough to skip.
    raw.send(0, cmd::WRITE, 5, 0, 33 * MIB);
    raw.stream.write_all(&vec![0; 33 * MIB as usize]).unwrap();
    assert_eq!(raw.error(), Errno::NoSpace);
    raw.send(0, cmd::FLUSH, 6, 0, 0);
    assert!(raw.chunk().0);
}

#[test]
fn pipelined_requests_are_all_answered() {
    let disk = disk(8 * MIB);
    let server = Server::new([disk.clone()], ServerOptions::default());
    disk.delay_ms.store(2, Ordering::SeqCst);
    let mut raw = Raw::new(&server, Style::Extended);
    let mut writer = Raw { stream: raw.stream.try_clone().unwrap(), style: raw.style };
    let sending = thread::spawn(move || {
        for cookie in 0..1000 {
            writer.send(0, cmd::READ, cookie, cookie * 512, 512);
        }
        writer.send(0, cmd::DISC, 0, 0, 0);
    });
    let answered: BTreeSet<u64> = (0..1000).map(|_| raw.chunk().2).collect();
    assert_eq!(answered.len(), 1000);
    sending.join().unwrap();
    assert_eq!(raw.stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn clients_that_read_no_replies_hold_up_nobody() {
    let disk = disk(8 * MIB);
    let options = ServerOptions {
        workers: 4,
        write_timeout: 10 * PATIENCE,
        stop_grace: Duration::from_millis(300),
        ..ServerOptions::default()
    };
    let mut server = Server::new([disk.clone()], options);
    connect(&server).write_at(0, &pattern(1, 8 << 20), false).unwrap();
    let mut stalled = Vec::new();
    for _ in 0..8 {
        let mut raw = Raw::new(&server, Style::Structured);
        for cookie in 0..100 {
            raw.send(cmd_flag::DF, cmd::READ, cookie, 0, MIB);
        }
        stalled.push(raw);
    }
    thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    let mut client = connect(&server);
    for index in 0..50 {
        client.write_at(index * 4096, &[1; 4096], true).unwrap();
    }
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    // One of them wakes up and gets everything.
    let mut awake = stalled.pop().unwrap();
    let answered: BTreeSet<u64> = (0..100).map(|_| awake.chunk().2).collect();
    assert_eq!(answered.len(), 100);
    assert!(server.stop() < PATIENCE);
}

#[test]
fn a_client_too_slow_for_the_write_timeout_is_disconnected() {
    let disk = disk(8 * MIB);
    let write_timeout = Duration::from_millis(200);
    let server = Server::new([disk], ServerOptions { write_timeout, ..ServerOptions::default() });
    let mut raw = Raw::new(&server, Style::Structured);
    for cookie in 0..20 {
        raw.send(cmd_flag::DF, cmd::READ, cookie, 0, MIB);
    }
    eventually("the slow client is gone", || server.handle().clients().is_empty());
}

#[test]
fn a_slow_client_that_keeps_reading_is_served() {
    for driver in [dbs_reactor::Driver::Auto, dbs_reactor::Driver::Epoll] {
        // Who pauses for too long, as on a machine that stalls, is too slow indeed: that proves nothing.
        let served = (0..10).any(|_| is_served(driver, Duration::from_secs(5)));
        assert!(served, "{driver:?}: this machine stalls for seconds at a time, always");
    }
}

/// Reads slowly, and in all for longer than the server waits for a client that takes nothing. False if the
/// client has paused for so long that it may have been given up.
fn is_served(driver: dbs_reactor::Driver, write_timeout: Duration) -> bool {
    let mut options = ServerOptions { write_timeout, ..ServerOptions::default() };
    options.reactor.driver = driver;
    let server = Server::new([disk(8 * MIB)], options);
    let mut raw = Raw::new(&server, Style::Simple);
    // Most of them are one batch, which takes longer than the timeout.
    let count = 50;
    for cookie in 0..count {
        raw.send(0, cmd::READ, cookie, 0, MIB);
    }
    let mut left = count * (MIB + 16);
    let mut piece = vec![0; 256 << 10];
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    while left > 0 {
        thread::sleep(Duration::from_millis(50));
        let want = piece.len().min(left as usize);
        let read = raw.stream.read_exact(&mut piece[..want]);
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if let Err(error) = read {
            assert!(longest > write_timeout / 2, "given up after {longest:?}: {error}");
            println!("{driver:?}: the client paused for {longest:?}");
            return false;
        }
        left -= want as u64;
    }
    true
}

#[test]
fn stopping_answers_what_is_in_flight() {
    let disk = disk(MIB);
    // Nobody takes all of it.
    let options = ServerOptions { stop_grace: 10 * PATIENCE, ..ServerOptions::default() };
    let mut server = Server::new([disk.clone()], options);
    let mut client = connect(&server);
    let _idle = connect(&server);
    let mut half = Raw::new(&server, Style::Simple);
    half.send(0, cmd::WRITE, 1, 4096, 4096);
    half.stream.write_all(&[9; 100]).unwrap();
    let _silent = UnixStream::connect(server.path()).unwrap();
    disk.delay_ms.store(3000, Ordering::SeqCst);
    let writer = thread::spawn(move || client.write_at(0, &[5; 4096], true));
    eventually("the write is in flight", || {
        disk.active.load(Ordering::SeqCst) == 1 || writer.is_finished()
    });
    let path = server.path();
    assert!(server.stop() < PATIENCE);
    writer.join().unwrap().unwrap();
    assert_eq!(&disk.content()[4090..4100], [5, 5, 5, 5, 5, 5, 0, 0, 0, 0]);
    assert!(!path.exists());
}

#[test]
fn a_panic_in_an_export_is_an_error_of_that_request() {
    let disk = disk(MIB);
    let server =
        Server::new([disk.clone()], ServerOptions { workers: 1, ..ServerOptions::default() });
    let mut client = connect(&server);
    disk.panics.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        assert_eq!(errno(client.read_at(0, &mut [0; 512])), Errno::Io);
    }
    disk.panics.store(false, Ordering::SeqCst);
    // The lock of this disk was not held during the panic.
    client.read_at(0, &mut [0; 512]).unwrap();
}

#[test]
fn too_many_connections_are_refused_with_the_reason() {
    let server =
        Server::new([disk(MIB)], ServerOptions { max_connections: 3, ..ServerOptions::default() });
    let mut clients: Vec<_> = (0..3).map(|_| connect(&server)).collect();
    // On a busy machine a refused client may be too slow to hear why.
    let mut refusals = (0..10).map(|_| {
        let options = ClientOptions::default();
        Client::connect_unix(&server.path(), "disk", &options).unwrap_err().to_string()
    });
    assert!(refusals.any(|refusal| refusal.contains("all 3 connections")), "it is not said");
    clients.pop().unwrap().disconnect().unwrap();
    eventually("there is room again", || {
        Client::connect_unix(&server.path(), "disk", &ClientOptions::default()).is_ok()
    });
}

/// Found by review: it was said ten times a second for as long as no descriptor was left.
#[test]
fn connections_that_cannot_be_accepted_are_told_of_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let broken = TcpStream::from(OwnedFd::from(listener.try_clone().unwrap()));
    let lines = Arc::<Mutex<Vec<String>>>::default();
    let kept = Arc::clone(&lines);
    let log = move |line: &str| kept.lock().unwrap().push(line.to_owned());
    let options = ServerOptions { log: Some(Arc::new(log)), ..ServerOptions::default() };
    let listener = Listener::from_tcp(listener).unwrap();
    // From now on each accept fails.
    broken.shutdown(Shutdown::Both).unwrap();
    let exports = Arc::new(crate::support::Disks::default());
    let server = dbs_nbd::start_listening(vec![listener], exports, options).unwrap();
    eventually("it is said", || !lines.lock().unwrap().is_empty());
    thread::sleep(Duration::from_millis(500));
    drop(server);
    let lines = lines.lock().unwrap();
    assert!(lines.len() == 1 && lines[0].contains("cannot accept"), "{lines:?}");
}

#[test]
fn a_second_server_on_the_socket_is_refused() {
    let server = Server::new([disk(MIB)], ServerOptions::default());
    let listen = [Listen::Unix(server.path())];
    let exports = Arc::new(crate::support::Disks::default());
    let error = dbs_nbd::start(&listen, exports, ServerOptions::default()).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains(&server.path().display().to_string()), "{error}");
    connect(&server).flush().unwrap();
}
