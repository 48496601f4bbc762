//! The data of a volume or snapshot of a served store, over NBD.

use super::vouch::{Vouch, Vouches};
use super::{MAP_CONTEXT, Place, RemoteStore, lock, replaced};
use dbs_control::Client;
use dbs_core::info::{MapRange, RangeState};
use dbs_core::units::SECTOR_BYTES;
use dbs_core::volume::ReadPart;
use dbs_core::{Error, ErrorKind, Result};
use dbs_nbd::wire;
use dbs_nbd::{Buffered, ClientOptions, Failure};
use dbs_transfer::{BlockAccess, write_around};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Its flag for ranges that are not stored.
const HOLE_FLAG: u32 = 1;
/// Its flag for ranges that read as zeros.
const ZERO_FLAG: u32 = 2;
/// Most connections kept for the next request.
const IDLE_MAX: usize = 8;
/// How long the end of connections waits for the server to let go of the volume, where nobody says how long.
const GOODBYE_TIME: Duration = Duration::from_secs(10);
/// How often somebody is asked who says so.
const GOODBYE_WATCH: Duration = Duration::from_millis(100);

type Connection = dbs_nbd::Client<Buffered<UnixStream>>;
/// How a control connection becomes one that speaks NBD.
type Speak = fn(Client) -> Result<UnixStream>;

/// A volume or snapshot of a served store. Each of the threads that use it at once has a
/// connection of its own; a server that was replaced meanwhile is connected to anew, if what has the
/// name there is still the same.
pub(super) struct RemoteVolume {
    server: Place,
    speak: Speak,
    spec: String,
    uuid: String,
    size: u64,
    idle: Mutex<Vec<Connection>>,
    /// Held by who changes sectors in part, against others of this process; shared by who changes
    /// whole ones.
    edges: RwLock<()>,
    /// Of this volume, whoever had it open.
    vouch: Arc<Vouch>,
    /// Of the store it is in.
    vouches: Arc<Vouches>,
}

impl RemoteVolume {
    pub(super) fn open(store: &RemoteStore, spec: &str, speak: Speak) -> Result<Self> {
        let stream = speak(store.server.connect_anew()?)?;
        let first = connect(stream, spec).map_err(|why| store.refused(spec, failed(why, spec)))?;
        // From here on the connection keeps it from being deleted.
        let uuid = store.uuid(spec)?;
        Ok(Self {
            vouch: store.vouches.volume(&uuid),
            vouches: Arc::clone(&store.vouches),
            uuid,
            server: store.server.clone(),
            speak,
            spec: spec.to_owned(),
            size: first.size(),
            idle: Mutex::new(vec![first]),
            edges: RwLock::new(()),
        })
    }

    fn with<T>(&self, call: impl FnOnce(&mut Connection) -> io::Result<T>) -> Result<T> {
        match self.idle() {
            Idle::Alive(connection) => self.over(connection, call),
            Idle::Dead | Idle::None => self.over(self.connect_again()?, call),
        }
    }

    /// As [`RemoteVolume::with`], for what changes the volume.
    fn write<T>(&self, call: impl FnOnce(&mut Connection) -> io::Result<T>) -> Result<T> {
        let connection = match self.idle() {
            Idle::Alive(connection) => connection,
            Idle::Dead => {
                // Who goes on writing is told early.
                self.vouch.look().map_err(|e| e.context(&self.spec))?;
                self.connect_again()?
            }
            Idle::None => self.connect_again()?,
        };
        let wrote = || [&*self.vouch, &self.vouches.all].map(Vouch::wrote);
        wrote();
        let result = self.over(connection, call);
        wrote();
        result
    }

    /// A connection that is idle.
    fn idle(&self) -> Idle {
        let idle = lock(&self.idle).pop();
        match idle {
            Some(connection) if is_alive(&connection) => Idle::Alive(connection),
            Some(_) => {
                self.broke();
                Idle::Dead
            }
            None => Idle::None,
        }
    }

    fn over<T>(
        &self,
        mut connection: Connection,
        call: impl FnOnce(&mut Connection) -> io::Result<T>,
    ) -> Result<T> {
        let result = call(&mut connection);
        if connection.is_broken() {
            self.broke();
        } else {
            let mut idle = lock(&self.idle);
            if idle.len() < IDLE_MAX {
                idle.push(connection);
            } else {
                drop(idle);
                part(vec![connection]);
            }
        }
        result.map_err(|e| failed(e, &self.spec))
    }

    /// A connection broke. The others are to the same server, which has gone.
    fn broke(&self) {
        self.vouches.broke();
        let others = std::mem::take(&mut *lock(&self.idle));
        drop(others);
    }

    /// One connection more. It is by name, and what had the name may have been replaced.
    fn connect_again(&self) -> Result<Connection> {
        let stream = (self.speak)(self.server.connect_anew()?)?;
        let connected = connect(stream, &self.spec);
        let store = RemoteStore::connect_as(self.server.clone())?;
        let connection =
            connected.map_err(|why| store.refused(&self.spec, failed(why, &self.spec)))?;
        let uuid = store.uuid(&self.spec)?;
        if uuid == self.uuid { Ok(connection) } else { Err(replaced(&self.spec)) }
    }
}

/// What was found for the next request.
enum Idle {
    Alive(Connection),
    /// The server has ended it.
    Dead,
    None,
}

/// Whether the server has neither ended it, nor said what nobody asked for.
fn is_alive(connection: &Connection) -> bool {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let stream = connection.stream().get_ref();
    recv(stream.as_raw_fd(), &mut [0], flags) == Err(Errno::EAGAIN)
}

impl Drop for RemoteVolume {
    fn drop(&mut self) {
        part(std::mem::take(&mut *lock(&self.idle)));
    }
}

fn connect(stream: UnixStream, spec: &str) -> io::Result<Connection> {
    let options = ClientOptions { contexts: vec![MAP_CONTEXT.to_owned()], extended: true };
    dbs_nbd::Client::over(Buffered::new(stream), spec, &options)
}

/// Ends connections, and waits for the server, but not for long.
fn part(connections: Vec<Connection>) {
    let deadline = Instant::now() + GOODBYE_TIME;
    goodbye(connections, &mut || Instant::now() < deadline);
}

/// Ends connections, and waits until the server has, as long as `go_on` says so; whether it has. A server
/// closes what a connection had open before it closes the connection: whoever asks it next finds that the
/// volume is not open because of this connection any more.
fn goodbye(connections: Vec<Connection>, go_on: &mut dyn FnMut() -> bool) -> bool {
    let ending: Vec<_> = connections.into_iter().filter_map(|c| c.disconnect().ok()).collect();
    ending.iter().all(|stream| {
        let mut stream = stream.get_ref();
        if stream.set_read_timeout(Some(GOODBYE_WATCH)).is_err() {
            return false;
        }
        loop {
            match stream.read(&mut [0; 16]) {
                Err(error) if is_early(&error) && go_on() => {}
                Err(error) if is_early(&error) => return false,
                // It ends one way or the other, and nobody is there to be told how.
                _ => return true,
            }
        }
    })
}

fn is_early(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

impl BlockAccess for RemoteVolume {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.with(|client| client.read_at(offset, buf))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let _edges = self.edges.read().unwrap_or_else(PoisonError::into_inner);
        self.write(|client| client.write_at(offset, buf, false))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        let _edges = self.edges.read().unwrap_or_else(PoisonError::into_inner);
        self.write(|client| client.write_zeroes(offset, length, 0))
    }

    fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let _edges = self.edges.read().unwrap_or_else(PoisonError::into_inner);
        self.write(|client| client.trim(offset, length, false))
    }

    fn flush(&self) -> Result<()> {
        // It makes all durable that the store has acknowledged.
        let covered = self.vouches.before_flush();
        let flushed = self.with(dbs_nbd::Client::flush);
        if flushed.is_err() {
            self.vouch.broke();
            self.vouches.all.broke();
            return flushed;
        }
        self.vouches.flushed(&covered, &self.vouch).map_err(|e| e.context(&self.spec))
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        let extents = self.with(|client| match limit {
            1 => client.first_status(MAP_CONTEXT, offset, length),
            _ => client.block_status(MAP_CONTEXT, offset, length),
        })?;
        let mut at = offset;
        let ranges = extents.into_iter().take(limit).map(|extent| {
            let range = MapRange { offset: at, length: extent.length, state: state(extent.flags) };
            at = at.saturating_add(extent.length);
            range
        });
        Ok(ranges.collect())
    }

    fn close(self: Box<Self>, go_on: &mut dyn FnMut() -> bool) -> Result<()> {
        let connections = std::mem::take(&mut *lock(&self.idle));
        if goodbye(connections, go_on) {
            return Ok(());
        }
        let text = format!("the server has not closed {} yet", self.spec);
        Err(Error::new(ErrorKind::Interrupted, text))
    }

    fn read_many(&self, reads: &mut [ReadPart<'_>]) -> Result<()> {
        self.with(|client| client.read_many(reads))
    }

    fn write_bytes_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        if offset.is_multiple_of(SECTOR_BYTES) && (buf.len() as u64).is_multiple_of(SECTOR_BYTES) {
            return self.write_at(offset, buf);
        }
        let _alone = self.edges.write().unwrap_or_else(PoisonError::into_inner);
        write_around(self.size, offset, buf, &|at, part| self.read_at(at, part), &|at, part| {
            self.write(|client| client.write_at(at, part, false))
        })
    }
}

fn state(flags: u32) -> RangeState {
    match (flags & HOLE_FLAG != 0, flags & ZERO_FLAG != 0) {
        (true, true) => RangeState::Hole,
        (false, true) => RangeState::Zero,
        (_, false) => RangeState::Data,
    }
}

fn failed(error: io::Error, spec: &str) -> Error {
    let failure = error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>());
    let kind = match failure.map(|failure| failure.errno) {
        Some(wire::Errno::NoSpace) => ErrorKind::NoSpace,
        Some(wire::Errno::Perm) => ErrorKind::ReadOnly,
        Some(wire::Errno::Invalid | wire::Errno::Overflow) => ErrorKind::Invalid,
        Some(wire::Errno::NotSupported) => ErrorKind::Unsupported,
        Some(wire::Errno::Shutdown) => ErrorKind::Interrupted,
        Some(wire::Errno::Io) => ErrorKind::Io,
        None => return Error::io(error, format!("{spec} on the server")),
    };
    Error::new(kind, failure.map(|failure| failure.message.clone()).unwrap_or_default())
        .context(spec)
}
