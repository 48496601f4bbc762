//! What every driver must do, on real sockets and files.
#![allow(clippy::unwrap_used)]

use dbs_reactor::{
    Batch, Buf, Driver, File, Handler, Io, Options, Segment, Socket, Thread, Watch, spawn,
};
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What a test asks its reactor to do.
enum Ask {
    Socket(OwnedFd),
    File(OwnedFd),
    Receive(u64),
    Fill(u64, usize, usize),
    Send(u64, Vec<Vec<u8>>),
    Read(u64, Vec<Segment>, usize),
    Write(u64, Vec<Segment>, Vec<u8>),
    Sync(u64),
    Watch(u64),
    Unwatch,
    Kick(OwnedFd),
    Shutdown,
    Remove,
    Wake(Duration),
    Stop,
}

/// What it reports.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Received(u64, Result<Vec<u8>, ErrorKind>),
    Filled(u64, Result<Vec<u8>, ErrorKind>),
    Sent(u64, Result<(), ErrorKind>),
    Moved(u64, Result<Vec<u8>, ErrorKind>),
    Synced(u64, Result<(), ErrorKind>),
    Signalled(u64, bool),
    Tick,
}

struct Puppet {
    told: Sender<Told>,
    socket: Option<Socket>,
    file: Option<File>,
    watches: Vec<(Watch, File)>,
}

impl Puppet {
    fn new(told: Sender<Told>) -> Self {
        Self { told, socket: None, file: None, watches: Vec::new() }
    }

    fn tell(&self, told: Told) {
        self.told.send(told).unwrap();
    }
}

impl Handler for Puppet {
    type Message = Ask;

    fn message(&mut self, io: &mut Io, ask: Ask) {
        match ask {
            Ask::Socket(fd) => self.socket = Some(io.add_socket(fd)),
            Ask::File(fd) => self.file = Some(io.add_file(fd)),
            Ask::Receive(tag) => io.receive(self.socket.unwrap(), tag),
            Ask::Fill(tag, start, len) => {
                let mut buf = io.buffers().take(len);
                buf.fill(0xee);
                io.fill(self.socket.unwrap(), buf, start, tag);
            }
            Ask::Send(tag, parts) => {
                let mut batch = Batch::default();
                for (index, part) in parts.into_iter().enumerate() {
                    match index % 3 {
                        0 => batch.push(&part),
                        1 => {
                            let mut buf = io.buffers().take(part.len());
                            buf.copy_from_slice(&part);
                            batch.push_buf(buf);
                        }
                        _ => batch.push_vec(part),
                    }
                }
                io.send(self.socket.unwrap(), batch, tag);
            }
            Ask::Read(tag, segments, len) => {
                let mut buf = io.buffers().take(len);
                buf.fill(0xee);
                io.read(self.file.unwrap(), &segments, buf, tag);
            }
            Ask::Write(tag, segments, bytes) => {
                let mut buf = io.buffers().take(bytes.len());
                buf.copy_from_slice(&bytes);
                io.write(self.file.unwrap(), &segments, buf, tag);
            }
            Ask::Sync(tag) => io.sync(self.file.unwrap(), tag),
            Ask::Watch(tag) => {
                let file = self.file.take().unwrap();
                self.watches.push((io.watch(file, tag), file));
            }
            Ask::Unwatch => {
                let (watch, file) = self.watches.remove(0);
                io.unwatch(watch);
                io.remove_file(file);
            }
            Ask::Kick(event) => {
                fs::File::from(event).write_all(b"x").unwrap();
                let (watch, file) = self.watches.remove(0);
                io.unwatch(watch);
                io.remove_file(file);
            }
            Ask::Shutdown => io.shutdown(self.socket.unwrap()),
            Ask::Remove => io.remove(self.socket.take().unwrap()),
            Ask::Wake(time) => io.wake_at(Some(Instant::now() + time)),
            Ask::Stop => io.stop(),
        }
    }

    fn received(&mut self, _: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        self.tell(Told::Received(tag, data.map(<[u8]>::to_vec).map_err(|e| e.kind())));
    }

    fn filled(&mut self, _: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.tell(Told::Filled(tag, result.map(|()| buf.to_vec()).map_err(|e| e.kind())));
    }

    fn sent(&mut self, _: &mut Io, tag: u64, _: Batch, result: io::Result<()>) {
        self.tell(Told::Sent(tag, result.map_err(|e| e.kind())));
    }

    fn moved(&mut self, _: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.tell(Told::Moved(tag, result.map(|()| buf.to_vec()).map_err(|e| e.kind())));
    }

    fn synced(&mut self, _: &mut Io, tag: u64, result: io::Result<()>) {
        self.tell(Told::Synced(tag, result.map_err(|e| e.kind())));
    }

    fn signalled(&mut self, _: &mut Io, tag: u64, result: io::Result<()>) {
        self.tell(Told::Signalled(tag, result.is_ok()));
    }

    fn tick(&mut self, _: &mut Io) {
        self.tell(Told::Tick);
    }
}

/// A reactor, a socket connected to it, and what it told.
struct Stage {
    thread: Option<Thread<Ask>>,
    peer: UnixStream,
    told: Receiver<Told>,
}

impl Stage {
    fn new(driver: Driver) -> Self {
        let (sender, told) = channel();
        let options = Options { driver, spin: Duration::from_micros(20), ..Options::default() };
        let make = move |_: &mut Io, _| Puppet::new(sender);
        let thread = spawn("test", &options, make).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let stage = Self { thread: Some(thread), peer: near, told };
        stage.ask(Ask::Socket(far.into()));
        stage
    }

    fn ask(&self, ask: Ask) {
        self.thread.as_ref().unwrap().remote().send(ask);
    }

    fn next(&self) -> Told {
        self.told.recv_timeout(Duration::from_secs(120)).unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.ask(Ask::Shutdown);
        self.ask(Ask::Stop);
        self.thread.take().unwrap().join();
    }
}

/// Runs a test on each driver this machine has.
fn on_each_driver(test: impl Fn(&mut Stage)) {
    for driver in [Driver::Uring, Driver::Epoll] {
        let options = Options { driver, ..Options::default() };
        let probe = spawn("probe", &options, |io: &mut Io, _| {
            io.stop();
            Puppet::new(channel().0)
        });
        match probe {
            Ok(thread) => thread.join(),
            Err(error) => {
                println!("skipped with {driver:?}: {error}");
                continue;
            }
        }
        test(&mut Stage::new(driver));
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 + index / 251) as u8).collect()
}

#[test]
fn bytes_come_and_the_stream_ends() {
    on_each_driver(|stage| {
        stage.ask(Ask::Receive(7));
        stage.peer.write_all(b"hello").unwrap();
        assert_eq!(stage.next(), Told::Received(7, Ok(b"hello".to_vec())));
        stage.ask(Ask::Receive(8));
        stage.peer.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stage.next(), Told::Received(8, Ok(Vec::new())));
    });
}

#[test]
fn receive_buffers_come_back() {
    on_each_driver(|stage| {
        for round in 0..200u64 {
            stage.ask(Ask::Receive(round));
            stage.peer.write_all(&round.to_be_bytes()).unwrap();
            let told = stage.next();
            assert_eq!(told, Told::Received(round, Ok(round.to_be_bytes().to_vec())));
        }
    });
}

#[test]
fn buffers_fill_whole_whatever_the_pieces() {
    on_each_driver(|stage| {
        let data = pattern(3 << 20);
        stage.ask(Ask::Fill(1, 4096, 4096 + data.len()));
        for piece in data.chunks(70_001) {
            stage.peer.write_all(piece).unwrap();
        }
        let Told::Filled(1, Ok(got)) = stage.next() else { panic!("not filled") };
        assert!(got[..4096].iter().all(|byte| *byte == 0xee));
        assert!(got[4096..] == data);
        stage.ask(Ask::Fill(2, 0, 100));
        stage.peer.write_all(b"half").unwrap();
        stage.peer.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stage.next(), Told::Filled(2, Err(ErrorKind::UnexpectedEof)));
    });
}

#[test]
fn batches_arrive_whole_in_order_though_the_socket_is_full() {
    on_each_driver(|stage| {
        let parts: Vec<Vec<u8>> = (0..2000).map(|index| pattern(1 + index * 7 % 5000)).collect();
        let whole = parts.concat();
        stage.ask(Ask::Send(3, parts));
        // Meanwhile the other direction works.
        stage.ask(Ask::Receive(4));
        stage.peer.write_all(b"x").unwrap();
        assert_eq!(stage.next(), Told::Received(4, Ok(b"x".to_vec())));
        let mut got = vec![0; whole.len()];
        stage.peer.read_exact(&mut got).unwrap();
        assert!(got == whole);
        assert_eq!(stage.next(), Told::Sent(3, Ok(())));
    });
}

#[test]
fn a_gone_peer_ends_everything() {
    on_each_driver(|stage| {
        stage.ask(Ask::Receive(1));
        stage.ask(Ask::Send(2, vec![pattern(16 << 20)]));
        stage.peer.shutdown(Shutdown::Both).unwrap();
        let mut told = [stage.next(), stage.next()];
        told.sort_by_key(|told| matches!(told, Told::Sent(..)));
        assert!(matches!(told[0], Told::Received(1, _)), "{told:?}");
        assert_eq!(told[1], Told::Sent(2, Err(ErrorKind::BrokenPipe)));
        stage.ask(Ask::Remove);
        let (near, far) = UnixStream::pair().unwrap();
        stage.peer = near;
        stage.ask(Ask::Socket(far.into()));
        stage.ask(Ask::Receive(3));
        stage.peer.write_all(b"new").unwrap();
        assert_eq!(stage.next(), Told::Received(3, Ok(b"new".to_vec())));
    });
}

#[test]
fn segments_go_where_they_belong() {
    on_each_driver(|stage| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), vec![0; 64 << 10]).unwrap();
        let open = fs::File::options().read(true).write(true).open(file.path()).unwrap();
        stage.ask(Ask::File(open.into()));
        let data = pattern(12288);
        let segments = vec![
            Segment { offset: 32768, start: 0, len: 4096 },
            Segment { offset: 4096, start: 4096, len: 8192 },
        ];
        stage.ask(Ask::Write(1, segments.clone(), data.clone()));
        assert!(matches!(stage.next(), Told::Moved(1, Ok(_))));
        let on_disk = fs::read(file.path()).unwrap();
        assert!(on_disk[32768..36864] == data[..4096] && on_disk[4096..12288] == data[4096..]);
        stage.ask(Ask::Read(2, segments, 12288));
        assert_eq!(stage.next(), Told::Moved(2, Ok(data)));
        let beyond = vec![Segment { offset: 60 << 10, start: 0, len: 8192 }];
        stage.ask(Ask::Read(3, beyond, 8192));
        assert_eq!(stage.next(), Told::Moved(3, Err(ErrorKind::UnexpectedEof)));
    });
}

#[test]
fn failures_of_a_file_are_told() {
    on_each_driver(|stage| {
        let file = tempfile::NamedTempFile::new().unwrap();
        stage.ask(Ask::File(fs::File::open(file.path()).unwrap().into()));
        let segment = Segment { offset: 0, start: 0, len: 512 };
        stage.ask(Ask::Write(1, vec![segment; 5], pattern(512)));
        assert!(matches!(stage.next(), Told::Moved(1, Err(_))));
    });
}

/// A pipe moves as much as there is, or as there is room for. The kernel goes on with files itself, mostly; and
/// the other driver cannot use a pipe.
#[test]
fn the_ring_goes_on_behind_what_was_moved() {
    if let Err(error) = dbs_reactor::uring_allowed() {
        println!("SKIPPED: needs io_uring: {error}");
        return;
    }
    let data = pattern(300 << 10);
    let whole = || vec![Segment { offset: 0, start: 0, len: 300 << 10 }];
    for writes in [true, false] {
        let stage = Stage::new(Driver::Uring);
        let (mut reader, mut writer) = io::pipe().unwrap();
        let found = if writes {
            stage.ask(Ask::File(writer.into()));
            stage.ask(Ask::Write(1, whole(), data.clone()));
            let reading = std::thread::spawn(move || {
                let mut found = Vec::new();
                reader.read_to_end(&mut found).map(|_| found)
            });
            assert!(matches!(stage.next(), Told::Moved(1, Ok(_))));
            drop(stage);
            reading.join().unwrap().unwrap()
        } else {
            stage.ask(Ask::File(reader.into()));
            stage.ask(Ask::Read(1, whole(), 300 << 10));
            let data = data.clone();
            // Nobody may read it all.
            std::thread::spawn(move || {
                data.chunks(77_000).try_for_each(|part| writer.write_all(part))
            });
            let Told::Moved(1, Ok(found)) = stage.next() else { panic!("reading failed") };
            found
        };
        assert!(found == data, "writes: {writes}");
    }
}

#[test]
fn a_sync_is_told_and_so_is_its_failure() {
    on_each_driver(|stage| {
        stage.ask(Ask::File(tempfile::tempfile().unwrap().into()));
        stage.ask(Ask::Sync(1));
        assert_eq!(stage.next(), Told::Synced(1, Ok(())));
        let (pipe, _other) = io::pipe().unwrap();
        stage.ask(Ask::File(pipe.into()));
        stage.ask(Ask::Sync(2));
        assert_eq!(stage.next(), Told::Synced(2, Err(ErrorKind::InvalidInput)));
    });
}

#[test]
fn events_are_told_each_time_until_nobody_watches() {
    use nix::sys::eventfd::EventFd;
    on_each_driver(|stage| {
        let event = EventFd::new().unwrap();
        let other = |event: &EventFd| std::os::fd::AsFd::as_fd(event).try_clone_to_owned().unwrap();
        // A count that it has is told; and each addition, though nobody reads it.
        event.write(1).unwrap();
        stage.ask(Ask::File(other(&event)));
        stage.ask(Ask::Watch(7));
        assert_eq!(stage.next(), Told::Signalled(7, true));
        for _ in 0..3 {
            event.write(1).unwrap();
            assert_eq!(stage.next(), Told::Signalled(7, true));
        }
        stage.ask(Ask::Unwatch);
        stage.ask(Ask::Wake(Duration::from_millis(1)));
        assert_eq!(stage.next(), Told::Tick);
        event.write(1).unwrap();
        // The next one has the same number, and hears nothing of the first.
        let second = EventFd::new().unwrap();
        stage.ask(Ask::File(other(&second)));
        stage.ask(Ask::Watch(8));
        second.write(1).unwrap();
        assert_eq!(stage.next(), Told::Signalled(8, true));
        assert_eq!(event.read().unwrap(), 5, "nothing was read");
        // What is watched does not keep the thread from ending.
    });
}

/// Found by review: its number was free, and went to the next event, which was watched no longer when the owner of the
/// first let go of that.
#[test]
fn an_event_that_cannot_be_watched_takes_no_other_with_it() {
    use nix::sys::eventfd::EventFd;
    use std::os::unix::fs::OpenOptionsExt;
    on_each_driver(|stage| {
        let path = nix::libc::O_PATH;
        let place = fs::OpenOptions::new().read(true).custom_flags(path).open("/").unwrap();
        stage.ask(Ask::File(place.into()));
        stage.ask(Ask::Watch(1));
        assert_eq!(stage.next(), Told::Signalled(1, false));
        let event = EventFd::new().unwrap();
        let other = std::os::fd::AsFd::as_fd(&event).try_clone_to_owned().unwrap();
        stage.ask(Ask::File(other));
        stage.ask(Ask::Watch(2));
        stage.ask(Ask::Unwatch);
        stage.ask(Ask::Wake(Duration::from_millis(1)));
        assert_eq!(stage.next(), Told::Tick);
        event.write(1).unwrap();
        assert_eq!(stage.next(), Told::Signalled(2, true));
    });
}

/// Found by review: what was about to be told of its event was watched for good.
#[test]
fn an_event_that_happens_while_it_is_let_go_is_let_go() {
    on_each_driver(|stage| {
        let (reader, writer) = std::io::pipe().unwrap();
        stage.ask(Ask::File(reader.into()));
        stage.ask(Ask::Watch(1));
        stage.ask(Ask::Wake(Duration::from_millis(1)));
        assert_eq!(stage.next(), Told::Tick);
        stage.ask(Ask::Kick(writer.try_clone().unwrap().into()));
        // Nobody has the other end any more.
        let begun = Instant::now();
        while (&writer).write_all(b"x").is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it is watched still");
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn the_clock_is_heard_between_other_things() {
    on_each_driver(|stage| {
        let begun = Instant::now();
        stage.ask(Ask::Wake(Duration::from_millis(30)));
        assert_eq!(stage.next(), Told::Tick);
        assert!(begun.elapsed() >= Duration::from_millis(30));
    });
}

#[test]
fn messages_of_many_threads_all_arrive() {
    on_each_driver(|stage| {
        stage.ask(Ask::File(tempfile::tempfile().unwrap().into()));
        let remote = stage.thread.as_ref().unwrap().remote();
        let senders: Vec<_> = (0..8)
            .map(|_| {
                let remote = remote.clone();
                std::thread::spawn(move || {
                    (0..500).for_each(|_| remote.send(Ask::Wake(Duration::ZERO)));
                    remote.send(Ask::Read(9, Vec::new(), 0));
                })
            })
            .collect();
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        let mut moved = 0;
        while moved < 8 {
            moved += usize::from(stage.next() == Told::Moved(9, Ok(Vec::new())));
        }
    });
}

/// Feeds itself: whatever it receives, it sends to itself again.
struct Ouroboros {
    socket: Option<Socket>,
    far: UnixStream,
}

impl Handler for Ouroboros {
    type Message = Option<OwnedFd>;

    fn message(&mut self, io: &mut Io, message: Option<OwnedFd>) {
        match message {
            Some(socket) => {
                let socket = io.add_socket(socket);
                self.socket = Some(socket);
                self.far.write_all(b"x").unwrap();
                io.receive(socket, 0);
            }
            None => self.socket.iter().for_each(|socket| io.shutdown(*socket)),
        }
    }

    fn received(&mut self, io: &mut Io, _: u64, data: io::Result<&[u8]>) {
        match (data, self.socket) {
            (Ok(data), Some(socket)) if !data.is_empty() && self.far.write_all(data).is_ok() => {
                io.receive(socket, 0);
            }
            _ => io.stop(),
        }
    }
}

#[test]
fn a_socket_that_always_has_more_does_not_keep_messages_out() {
    for driver in [Driver::Uring, Driver::Epoll] {
        let (near, far) = UnixStream::pair().unwrap();
        let options = Options { driver, ..Options::default() };
        let make = move |_: &mut Io, _| Ouroboros { socket: None, far };
        let thread = match spawn("test", &options, make) {
            Ok(thread) => thread,
            Err(error) => {
                println!("skipped with {driver:?}: {error}");
                continue;
            }
        };
        let remote = thread.remote();
        let (ended, end) = channel();
        remote.send(Some(near.into()));
        std::thread::sleep(Duration::from_millis(20));
        remote.send(None);
        std::thread::spawn(move || {
            thread.join();
            let _ = ended.send(());
        });
        end.recv_timeout(Duration::from_secs(120)).expect("the message was heard");
    }
}
