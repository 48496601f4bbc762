//! The server's side of the control socket.

use super::line::{PartWriter, read_line, send, send_result};
use super::{
    FILL_METHOD, FILL_STORED_METHOD, Failure, NBD_METHOD, Reply, STORE_METHOD, STORED_METHOD, place,
};
use crate::api::{Progress, Request};
use dbs_core::{Error, ErrorKind, Result};
use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr};
use nix::unistd::{Gid, Uid, chown};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Connections served at once; more are told that the server is busy.
pub(super) const CONNECTIONS_MAX: usize = 256;
/// Between two progress lines, and between two looks whether the client is still there.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// A client that takes nothing for this long is given up.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// What running commands and sessions get to finish when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// What a control socket serves.
pub trait Service: Send + Sync + 'static {
    /// The key of the store ([`dbs_core::Store::key`]).
    ///
    /// # Errors
    /// Sent to the client.
    fn key(&self) -> Result<String>;

    /// Runs one command; stops when `progress` returns `false`.
    ///
    /// # Errors
    /// Sent to the client.
    fn execute(
        &self,
        request: &Request,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Value>;

    /// As [`Service::execute`], of a [list](Request::is_list): writes its JSON, which may be long.
    ///
    /// # Errors
    /// Sent to the client.
    fn list(
        &self,
        request: &Request,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<()> {
        let result = self.execute(request, progress)?;
        serde_json::to_writer(out, &result).map_err(|e| Error::io(e.into(), "sending a list"))
    }

    /// Writes the metadata as JSON, which may be long.
    ///
    /// # Errors
    /// Sent to the client.
    fn dump(&self, out: &mut dyn Write) -> Result<()>;

    /// Speaks NBD on the connection until it ends.
    fn nbd(&self, stream: UnixStream);

    /// What speaks NBD on a connection whose client fills a volume that is rebuilding.
    ///
    /// # Errors
    /// Sent to the client.
    fn fill(&self) -> Result<Session> {
        Err(Error::unsupported("this server does not support filling volumes"))
    }

    /// As [`Service::nbd`] for snapshots, and as [`Service::fill`] if `fill`, of blocks as they are stored.
    ///
    /// # Errors
    /// Sent to the client.
    fn stored(&self, fill: bool) -> Result<Session> {
        let _ = fill;
        Err(Error::unsupported("this server does not show blocks as they are stored"))
    }

    /// Answers a method that is no [`Request`]; `None` if there is no such method here either.
    ///
    /// # Errors
    /// Sent to the client.
    fn extra(&self, method: &str, params: &Value) -> Result<Option<Extra>> {
        let _none = (method, params);
        Ok(None)
    }
}

/// How a method beyond [`Request`] goes on.
pub enum Extra {
    /// It is done, with this result.
    Answer(Value),
    /// It is answered by this result, and the connection belongs to the session from there on.
    /// Sessions are ended by whoever offers them: [`Server::stop`] only closes the receiving side
    /// of those whose function has not returned.
    Session(Value, Session),
}

/// What takes a connection over.
pub type Session = Box<dyn FnOnce(UnixStream) + Send>;

/// Who may use a control socket besides root and the server's user: by default nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// The user the process will become, who the socket belongs to.
    pub user: Option<Uid>,
    /// The group of the socket; unless there is a mode, its members may use it.
    pub group: Option<Gid>,
    /// The permission bits of the socket, in place of 0600.
    pub mode: Option<u32>,
}

impl Access {
    fn mode(&self) -> u32 {
        self.mode.unwrap_or(if self.group.is_some() { 0o660 } else { 0o600 })
    }

    /// Whether others than root and the server's user may; who, the kernel decides.
    fn is_shared(&self) -> bool {
        self.mode() & 0o022 != 0
    }
}

/// A control socket being served. Dropping it without [`Server::stop`] leaves its threads running.
pub struct Server {
    path: PathBuf,
    /// Device and inode of the socket we made: another server may have taken its place.
    identity: Option<(u64, u64)>,
    listener: Arc<UnixListener>,
    shared: Arc<Shared>,
    acceptor: JoinHandle<()>,
}

struct Shared {
    service: Arc<dyn Service>,
    /// Whoever could connect may control the store.
    shared: bool,
    /// No more clients.
    retired: AtomicBool,
    stop: AtomicBool,
    connections: Mutex<HashMap<u64, Connection>>,
}

struct Connection {
    stream: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Binds `path`, whose directory is made if absent, and serves it from threads of its own.
    ///
    /// # Errors
    /// `Busy` if another server listens there, `Exists` if something else is there, `Invalid` if
    /// the directory is not ours alone, `Io`.
    pub fn start(path: &Path, service: Arc<dyn Service>) -> Result<Self> {
        Self::start_for(path, service, &Access::default())
    }

    /// As [`Server::start`], for more users.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_for(path: &Path, service: Arc<dyn Service>, access: &Access) -> Result<Self> {
        if let Some(directory) = directory_of(path) {
            place::prepare(directory, access.is_shared() || access.user.is_some())?;
        }
        Self::listen(path, service, access)
    }

    /// As [`Server::start_for`], where a user wants the socket: the directory may be shared as `/tmp` is.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_named(path: &Path, service: Arc<dyn Service>, access: &Access) -> Result<Self> {
        place::check_named(directory_of(path).unwrap_or(Path::new(".")))?;
        Self::listen(path, service, access)
    }

    /// As [`Server::start`] in a directory that is the caller's concern.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_at(path: &Path, service: Arc<dyn Service>) -> Result<Self> {
        Self::listen(path, service, &Access::default())
    }

    fn listen(path: &Path, service: Arc<dyn Service>, access: &Access) -> Result<Self> {
        let listener = Arc::new(bind(path, access)?);
        let identity = identity(path);
        let shared = Arc::new(Shared {
            service,
            shared: access.is_shared(),
            retired: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            connections: Mutex::new(HashMap::new()),
        });
        let acceptor = {
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            spawn("dbs-control", move || accept(&listener, &shared))?
        };
        Ok(Self { path: path.to_owned(), identity, listener, shared, acceptor })
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether nobody is connected.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.shared.connections().is_empty()
    }

    /// Removes the socket and accepts nobody more, so that another server can take its place.
    /// What runs goes on.
    pub fn retire(&self) {
        // The socket goes first: a new client must find nobody rather than a deaf server.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _gone_already = fs::remove_file(&self.path);
        }
        self.shared.retired.store(true, Ordering::SeqCst);
        let _ends_accept = socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both);
    }

    /// Stops listening, lets running requests finish or stop, ends all sessions and removes the
    /// socket.
    pub fn stop(self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.retire();
        let _panicked = self.acceptor.join();
        // Only the receiving side: what runs sees the end, and can still answer.
        self.shared.shutdown_all(Shutdown::Read);
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while self.shared.running() > 0 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        self.shared.shutdown_all(Shutdown::Both);
        let threads: Vec<_> =
            self.shared.connections().values_mut().filter_map(|c| c.thread.take()).collect();
        for thread in threads {
            let _panicked = thread.join();
        }
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> usize {
        self.connections().values().filter(|c| c.runs()).count()
    }

    fn shutdown_all(&self, how: Shutdown) {
        for connection in self.connections().values() {
            let _closed_already = connection.stream.shutdown(how);
        }
    }

    fn retired(&self) -> bool {
        self.retired.load(Ordering::SeqCst)
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

impl Connection {
    fn runs(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|e| Error::io(e, format!("starting the thread {name}")))
}

fn directory_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|directory| !directory.as_os_str().is_empty())
}

/// Binds with the right mode from the first moment: nobody can connect before `listen`.
fn bind(path: &Path, access: &Access) -> Result<UnixListener> {
    let name = path.display();
    remove_stale(path)?;
    let failed = |e: Errno| Error::io(e.into(), format!("listening on {name}"));
    let address = UnixAddr::new(path).map_err(failed)?;
    let socket =
        socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
            .map_err(failed)?;
    socket::bind(socket.as_raw_fd(), &address).map_err(failed)?;
    if let Err(e) = chown(path, access.user, None) {
        // Not worth to end for: root can still use it, as whoever started the server.
        dbs_service::log::warn("control_owner", &[("socket", &name), ("error", &e)]);
    }
    chown(path, None, access.group)
        .map_err(io::Error::from)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(access.mode())))
        .map_err(|e| Error::io(e, format!("protecting {name}")))?;
    socket::listen(&socket, Backlog::MAXCONN).map_err(failed)?;
    Ok(UnixListener::from(socket))
}

/// Device and inode of what is at `path`.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Removes the socket of a server that is gone.
fn remove_stale(path: &Path) -> Result<()> {
    let name = path.display();
    let Ok(meta) = fs::symlink_metadata(path) else { return Ok(()) };
    if !meta.file_type().is_socket() {
        return Err(Error::exists(format!("{name} exists and is no socket")));
    }
    if UnixStream::connect(path).is_ok() {
        return Err(Error::busy(format!("another server listens on {name}")));
    }
    fs::remove_file(path).map_err(|e| Error::io(e, format!("removing the old socket {name}")))
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    let mut next = 0;
    // The last one failed, which has been said.
    let mut failing = false;
    // Clients that wait when the listener is shut down are still served: they found a server.
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                failing = false;
                next += 1;
                if let Err(e) = admit(stream, next, shared) {
                    dbs_service::log::warn("control_refused", &[("reason", &e)]);
                }
            }
            Err(_) if shared.retired() => return,
            // Out of descriptors, or the peer went away: neither is a reason to stop, both would
            // make a busy loop.
            Err(e) => {
                if !std::mem::replace(&mut failing, true) {
                    dbs_service::log::warn("control_accept", &[("error", &e)]);
                }
                thread::sleep(PROGRESS_INTERVAL);
            }
        }
    }
}

fn admit(mut stream: UnixStream, id: u64, shared: &Arc<Shared>) -> Result<()> {
    let refuse = |stream: &mut UnixStream, error: Error| {
        let _gone_already = send(stream, &Reply::Error(Failure::from(&error)));
        Err(error)
    };
    let failed = |e| Error::io(e, "setting up a control connection");
    stream.set_write_timeout(Some(WRITE_TIMEOUT)).map_err(failed)?;
    let peer = socket::getsockopt(&stream, socket::sockopt::PeerCredentials)
        .map_err(|e| failed(e.into()))?;
    if !shared.shared && peer.uid() != 0 && peer.uid() != Uid::effective().as_raw() {
        let text = format!("user {} may not control this store", peer.uid());
        return refuse(&mut stream, Error::new(ErrorKind::ReadOnly, text));
    }
    let mut connections = shared.connections();
    if connections.len() >= CONNECTIONS_MAX {
        return refuse(&mut stream, Error::busy("the server has too many control connections"));
    }
    let ours = stream.try_clone().map_err(failed)?;
    let thread = {
        let shared = Arc::clone(shared);
        spawn("dbs-control", move || {
            // Our duplicate of the socket would keep it open, and the client of a command that panicked waiting. The
            // lock is held below until the connection is in the table, so this never comes too early.
            let _ends = Ends(&shared, id);
            serve(stream, &shared);
        })?
    };
    connections.insert(id, Connection { stream: ours, thread: Some(thread) });
    Ok(())
}

/// Takes a connection out of the table when dropped.
struct Ends<'a>(&'a Shared, u64);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.connections().remove(&self.1);
    }
}

/// Answers the requests of one connection until it ends.
fn serve(stream: UnixStream, shared: &Shared) {
    let Ok(reader) = stream.try_clone() else { return };
    let mut reader = BufReader::new(reader);
    let mut stream = stream;
    let mut line = Vec::new();
    loop {
        line.clear();
        match read_line(&mut reader, &mut line) {
            Ok(true) if shared.stopping() => return,
            Ok(true) => {}
            Ok(false) => return,
            Err(e) => {
                let _gone_already = send(&mut stream, &Reply::Error(Failure::from(&e)));
                return;
            }
        }
        match answer(&line, &mut stream, shared) {
            Ok(Next::Request) => {}
            Ok(Next::Session(session)) if reader.buffer().is_empty() => return session(stream),
            Ok(Next::Session(_)) | Err(_) => return,
        }
    }
}

enum Next {
    Request,
    Session(Session),
}

/// What a line asks for.
enum Asked {
    Command(Request),
    Extra(Extra),
}

/// Answers one line. An error is one of the connection, which is then closed.
fn answer(line: &[u8], stream: &mut UnixStream, shared: &Shared) -> Result<Next> {
    let result = match parse(line, shared) {
        Ok(Asked::Command(request)) => run(&request, stream, shared),
        Ok(Asked::Extra(Extra::Answer(result))) => Ok(result),
        Ok(Asked::Extra(Extra::Session(result, session))) => {
            send(stream, &Reply::Result(result))?;
            // A session has its own idea of how long a client may take.
            stream.set_write_timeout(None).map_err(|e| Error::io(e, "control connection"))?;
            return Ok(Next::Session(session));
        }
        Err(e) => Err(e),
    };
    match result {
        Ok(result) => send_result(stream, result)?,
        Err(e) => send(stream, &Reply::Error(Failure::from(&e)))?,
    }
    Ok(Next::Request)
}

fn parse(line: &[u8], shared: &Shared) -> Result<Asked> {
    let value: Value = serde_json::from_slice(line).map_err(no_request)?;
    if let Some(method) = value.get("method").and_then(Value::as_str) {
        if method == NBD_METHOD {
            let service = Arc::clone(&shared.service);
            let session = Box::new(move |stream| service.nbd(stream));
            return Ok(Asked::Extra(Extra::Session(Value::Null, session)));
        }
        if method == FILL_METHOD {
            return Ok(Asked::Extra(Extra::Session(Value::Null, shared.service.fill()?)));
        }
        if method == STORED_METHOD || method == FILL_STORED_METHOD {
            let session = shared.service.stored(method == FILL_STORED_METHOD)?;
            return Ok(Asked::Extra(Extra::Session(Value::Null, session)));
        }
        if method == STORE_METHOD {
            return Ok(Asked::Extra(Extra::Answer(json!({ "key": shared.service.key()? }))));
        }
        let params = value.get("params").unwrap_or(&Value::Null);
        if let Some(extra) = shared.service.extra(method, params)? {
            return Ok(Asked::Extra(extra));
        }
    }
    Request::from_wire(value).map(Asked::Command).map_err(no_request)
}

fn no_request(error: serde_json::Error) -> Error {
    Error::invalid(format!("no request: {error}"))
}

/// The command that a line asks for, if it is one of a store. For fuzzing.
#[cfg(feature = "testing")]
pub fn decode_request(line: &[u8]) -> Result<Request> {
    let value: Value = serde_json::from_slice(line).map_err(no_request)?;
    Request::from_wire(value).map_err(no_request)
}

fn run(request: &Request, stream: &mut UnixStream, shared: &Shared) -> Result<Value> {
    if *request == Request::Dump {
        let mut parts = PartWriter::new(&mut *stream);
        shared.service.dump(&mut parts)?;
        return parts.finish().map(|()| Value::Null);
    }
    let stream = &*stream;
    let mut last = Instant::now();
    let mut tell = |progress| {
        if shared.stopping() {
            return false;
        }
        if last.elapsed() < PROGRESS_INTERVAL {
            return true;
        }
        last = Instant::now();
        !hung_up(stream) && send(&mut &*stream, &Reply::Progress(progress)).is_ok()
    };
    if request.is_list() {
        let mut parts = PartWriter::new(stream);
        shared.service.list(request, &mut parts, &mut tell)?;
        return parts.finish_result();
    }
    shared.service.execute(request, &mut tell)
}

/// Whether the client has closed its side.
fn hung_up(stream: &UnixStream) -> bool {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    match socket::recv(stream.as_raw_fd(), &mut [0], flags) {
        Ok(received) => received == 0,
        Err(Errno::EAGAIN | Errno::EINTR) => false,
        Err(_) => true,
    }
}
