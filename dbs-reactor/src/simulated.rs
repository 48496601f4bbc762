//! A driver without a kernel: its connections are what a simulation makes of them, and so is its time.
//! There are no files, events and devices.

use super::batch::Batch;
use super::buffer::Buf;
use super::done::{Bytes, Done};
use super::shared::Payload;
use super::slab::Slab;
use super::targets::{Segment, Targets};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes received at once.
const RECEIVE_BYTES: usize = 64 << 10;

/// A clock that goes on when it is told to.
#[derive(Debug, Clone)]
pub struct Clock {
    epoch: Instant,
    micros: Arc<AtomicU64>,
}

impl Default for Clock {
    fn default() -> Self {
        Self { epoch: Instant::now(), micros: Arc::default() }
    }
}

impl Clock {
    /// So many microseconds have gone by since it began.
    pub fn set(&self, micros: u64) {
        self.micros.store(micros, Ordering::SeqCst);
    }

    /// What it says.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.epoch + Duration::from_micros(self.micros.load(Ordering::SeqCst))
    }

    /// The microseconds from its beginning to a time, rounded up.
    #[must_use]
    pub fn micros_at(&self, time: Instant) -> u64 {
        let nanos = time.saturating_duration_since(self.epoch).as_nanos();
        u64::try_from(nanos.div_ceil(1000)).unwrap_or(u64::MAX)
    }
}

/// What a reactor has done to one of its connections, which has this name.
#[derive(Debug)]
pub enum Left {
    /// It has sent this.
    Sent(u64, Vec<u8>),
    /// It has ended it.
    Ended(u64),
}

/// The driver.
pub(crate) struct Simulated {
    clock: Clock,
    links: Slab<Link>,
    /// How connections have ended that the reactor did not have then.
    ended: BTreeMap<u64, Option<io::ErrorKind>>,
    /// Bytes that were received and not given back.
    held: Slab<Vec<u8>>,
    done: VecDeque<Done>,
    left: Vec<Left>,
    in_flight: usize,
    no_targets: Targets,
}

/// A connection.
struct Link {
    name: u64,
    /// What has come and was not received.
    come: Vec<u8>,
    /// How it has ended, behind what has come: in good order if there is no error.
    end: Option<Option<io::ErrorKind>>,
    input: Option<Input>,
    /// What is being sent, until the network has taken it.
    sending: Option<(Batch, u64)>,
    /// This side has ended it.
    shut: bool,
}

enum Input {
    Receive { tag: u64 },
    Fill { tag: u64, buf: Buf, at: usize },
}

impl Simulated {
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            links: Slab::default(),
            ended: BTreeMap::new(),
            held: Slab::default(),
            done: VecDeque::new(),
            left: Vec::new(),
            in_flight: 0,
            no_targets: Targets::default(),
        }
    }

    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    pub fn targets(&self) -> &Targets {
        &self.no_targets
    }

    /// A connection of the simulation.
    pub fn link(&mut self, name: u64) -> u32 {
        let end = self.ended.remove(&name);
        let (come, input, sending) = (Vec::new(), None, None);
        self.links.insert(Link { name, come, end, input, sending, shut: false })
    }

    /// Descriptors lead nowhere.
    pub fn add(&mut self, fd: OwnedFd) -> u32 {
        drop(fd);
        let (come, end, input, sending) = (Vec::new(), Some(None), None, None);
        self.links.insert(Link { name: u64::MAX, come, end, input, sending, shut: true })
    }

    pub fn remove(&mut self, target: u32) {
        self.links.remove(target);
    }

    pub fn receive(&mut self, target: u32, tag: u64) {
        self.input(target, Input::Receive { tag });
    }

    pub fn fill(&mut self, target: u32, buf: Buf, start: usize, tag: u64) {
        self.input(target, Input::Fill { tag, buf, at: start });
    }

    fn input(&mut self, target: u32, input: Input) {
        self.in_flight += 1;
        if let Some(link) = self.links.get_mut(target) {
            link.input = Some(input);
        }
        self.try_input(target);
    }

    /// Ends what is being received, if there is enough for that.
    fn try_input(&mut self, target: u32) {
        let Some(link) = self.links.get_mut(target) else { return };
        let ended = || match link.end {
            Some(Some(kind)) => Some(Err(kind.into())),
            Some(None) => Some(Ok(())),
            None => link.shut.then_some(Ok(())),
        };
        match link.input.take() {
            None => {}
            Some(Input::Receive { tag }) if !link.come.is_empty() && !link.shut => {
                let count = link.come.len().min(RECEIVE_BYTES);
                let bytes: Vec<u8> = link.come.drain(..count).collect();
                let (ptr, len) = (bytes.as_ptr(), bytes.len());
                let id = self.held.insert(bytes) as u16;
                self.done.push_back(Done::Received { tag, result: Ok(Bytes { ptr, len, id }) });
            }
            Some(Input::Receive { tag }) => match ended() {
                None => link.input = Some(Input::Receive { tag }),
                Some(result) => {
                    let nothing: Vec<u8> = Vec::new();
                    let (ptr, len) = (nothing.as_ptr(), 0);
                    let id = self.held.insert(nothing) as u16;
                    let result = result.map(|()| Bytes { ptr, len, id });
                    self.done.push_back(Done::Received { tag, result });
                }
            },
            Some(Input::Fill { tag, mut buf, mut at }) => {
                let count = if link.shut { 0 } else { link.come.len().min(buf.len() - at) };
                buf[at..at + count].copy_from_slice(&link.come[..count]);
                link.come.drain(..count);
                at += count;
                let result = match ended() {
                    _ if at == buf.len() => Ok(()),
                    None => {
                        link.input = Some(Input::Fill { tag, buf, at });
                        return;
                    }
                    Some(Ok(())) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Some(Err(error)) => Err(error),
                };
                self.done.push_back(Done::Filled { tag, buf, result });
            }
        }
    }

    pub fn send(&mut self, target: u32, batch: Batch, tag: u64) {
        self.in_flight += 1;
        match self.links.get_mut(target) {
            Some(Link { end: None, shut: false, name, sending, .. }) => {
                let mut bytes = Vec::with_capacity(batch.len());
                batch.slices().for_each(|slice| bytes.extend_from_slice(slice));
                self.left.push(Left::Sent(*name, bytes));
                *sending = Some((batch, tag));
            }
            _ => {
                let result = Err(io::ErrorKind::BrokenPipe.into());
                self.done.push_back(Done::Sent { tag, batch, result });
            }
        }
    }

    /// Ends what is being sent.
    fn end_send(&mut self, target: u32, result: io::Result<()>) {
        let sending = self.links.get_mut(target).and_then(|link| link.sending.take());
        if let Some((batch, tag)) = sending {
            self.done.push_back(Done::Sent { tag, batch, result });
        }
    }

    /// The network has taken what was being sent on a connection.
    pub fn taken(&mut self, name: u64) {
        if let Some(target) = self.named(name) {
            self.end_send(target, Ok(()));
        }
    }

    pub fn shutdown(&mut self, target: u32) {
        let Some(link) = self.links.get_mut(target) else { return };
        if !std::mem::replace(&mut link.shut, true) {
            self.left.push(Left::Ended(link.name));
        }
        self.end_send(target, Err(io::ErrorKind::BrokenPipe.into()));
        self.try_input(target);
    }

    pub fn has_ended(&self, target: u32) -> bool {
        self.links.get(target).is_none_or(|link| link.end.is_some())
    }

    fn named(&self, name: u64) -> Option<u32> {
        self.links.iter().find(|(_, link)| link.name == name).map(|(target, _)| target)
    }

    /// These bytes have come on a connection.
    pub fn come(&mut self, name: u64, bytes: &[u8]) {
        let Some(target) = self.named(name) else { return };
        if let Some(link) = self.links.get_mut(target).filter(|link| link.end.is_none()) {
            link.come.extend_from_slice(bytes);
        }
        self.try_input(target);
    }

    /// The other side has ended a connection, or it broke: perhaps before the reactor has it.
    pub fn end(&mut self, name: u64, error: Option<io::ErrorKind>) {
        let Some(target) = self.named(name) else {
            self.ended.insert(name, error);
            return;
        };
        if let Some(link) = self.links.get_mut(target) {
            link.end.get_or_insert(error);
        }
        self.end_send(target, Err(io::ErrorKind::BrokenPipe.into()));
        self.try_input(target);
    }

    pub fn take_left(&mut self) -> Vec<Left> {
        std::mem::take(&mut self.left)
    }

    pub fn sent(&self, _: u32) -> usize {
        0
    }

    pub fn read(&mut self, _: u32, _: &[Segment], buf: Buf, tag: u64) {
        self.in_flight += 1;
        let result = Err(io::ErrorKind::Unsupported.into());
        self.done.push_back(Done::Moved { tag, buf, result });
    }

    pub fn write(&mut self, target: u32, segments: &[Segment], payload: Payload, tag: u64) {
        self.read(target, segments, payload.into_buf(), tag);
    }

    pub fn sync(&mut self, _: u32, tag: u64) {
        self.in_flight += 1;
        let result = Err(io::ErrorKind::Unsupported.into());
        self.done.push_back(Done::Synced { tag, result });
    }

    pub fn watch(&mut self, target: u32, tag: u64) -> u32 {
        self.in_flight += 1;
        let result = Err(io::ErrorKind::Unsupported.into());
        self.done.push_back(Done::Signalled { tag, result });
        target
    }

    pub fn unwatch(&mut self, _: u32) {}

    pub fn release(&mut self, bytes: &Bytes) {
        self.held.remove(u32::from(bytes.id));
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub fn is_ready(&self) -> bool {
        !self.done.is_empty()
    }

    pub fn next(&mut self) -> Option<Done> {
        let done = self.done.pop_front()?;
        self.in_flight -= 1;
        Some(done)
    }

    /// Nothing is waited for here.
    pub fn poll(&mut self) -> io::Result<()> {
        Ok(())
    }

    pub fn wait(&mut self, _: Option<Duration>) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::handler::{Handler, Io, Options};
    use super::super::targets::Socket;
    use super::super::thread::Simulation;
    use super::*;

    /// Sends back what comes, the first four bytes together; ends the connection a second after its end.
    #[derive(Default)]
    struct Echo {
        socket: Option<Socket>,
        seen: Vec<String>,
    }

    impl Handler for Echo {
        type Message = u64;

        fn message(&mut self, io: &mut Io, name: u64) {
            let socket = io.add_simulated(name);
            let buf = io.buffers().take(4);
            io.fill(socket, buf, 0, 7);
            self.socket = Some(socket);
        }

        fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
            self.seen.push(format!("{tag} filled {:?} {result:?}", &buf[..]));
            if let (Some(socket), Ok(())) = (self.socket, result) {
                io.receive(socket, tag);
            }
        }

        fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
            let Some(socket) = self.socket else { return };
            match data {
                Ok(data) if !data.is_empty() => {
                    let mut batch = Batch::default();
                    batch.push(data);
                    io.send(socket, batch, tag);
                    io.receive(socket, tag);
                }
                end => {
                    self.seen.push(format!("end {:?}", end.map_err(|error| error.kind())));
                    io.wake_at(Some(io.now() + Duration::from_secs(1)));
                }
            }
        }

        fn tick(&mut self, io: &mut Io) {
            self.socket.into_iter().for_each(|socket| io.shutdown(socket));
        }
    }

    #[test]
    fn connections_and_time_are_those_of_the_simulation() -> io::Result<()> {
        let clock = Clock::default();
        let mut echo = Simulation::new(&Options::default(), &clock, |_, _| Echo::default())?;
        echo.remote().send(3);
        assert!(echo.is_ready() && echo.turn().is_empty());
        echo.come(3, b"ab");
        echo.come(4, b"nobody's");
        assert!(!echo.is_ready() && echo.due().is_none());
        echo.come(3, b"cdef");
        let left = echo.turn();
        assert!(matches!(&left[..], [Left::Sent(3, bytes)] if bytes == b"ef"), "{left:?}");
        // It is under way until the network has taken it.
        assert!(!echo.is_ready());
        echo.taken(3);
        assert!(echo.is_ready() && echo.turn().is_empty());
        echo.come(3, b"g");
        echo.end(3, Some(io::ErrorKind::ConnectionReset));
        echo.come(3, b"late");
        let mut left = Vec::new();
        while echo.is_ready() {
            left.extend(echo.turn());
        }
        // It has ended: nothing can be sent any more.
        assert!(left.is_empty(), "{left:?}");
        let due = echo.due().map(|due| clock.micros_at(due));
        assert_eq!(due, Some(1_000_000));
        clock.set(999_999);
        assert!(echo.turn().is_empty());
        clock.set(1_000_000);
        assert!(matches!(&echo.turn()[..], [Left::Ended(3)]));
        Ok(())
    }
}
