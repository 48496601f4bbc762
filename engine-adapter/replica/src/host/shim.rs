//! The process that was started for a replica whose store another process owns: it keeps the
//! sockets' place in its network namespace and its own place under its supervisor.

use super::fds;
use super::handover::SocketPath;
use super::options::Options;
use super::protocol::{self, Expected, REPLICA, STEP_TIMEOUT, STOP, SYNC_AGENT};
use super::signals;
use super::sockets::{DataSocket, SocketFile, Wanted, bind_receivers};
use crate::upstream::{self, Held};
use dbs_control::{Client, socket_path, store_key};
use dbs_core::{Error, ErrorKind, Result};
use dbs_frontend::ListenAddress;
use dbs_service::log;
use longhorn_wire::transport;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// How long the server may take to open a replica.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A replica in a shared store.
#[derive(Debug, Clone)]
pub struct Shim {
    /// The replica.
    pub options: Options,
    /// Where it listens.
    pub wanted: Wanted,
    /// Ports for receiving files, behind the sync agent's.
    pub receivers: u16,
    /// The store, which a running `longhorn serve` owns.
    pub store: PathBuf,
    /// Directory of control sockets.
    pub runtime_dir: PathBuf,
}

/// A sync agent for a replica that another process serves.
#[derive(Debug, Clone)]
pub struct AgentShim {
    /// The replica's directory.
    pub dir: PathBuf,
    /// Longhorn's name of the volume.
    pub volume_name: String,
    /// Name of the instance.
    pub instance_name: String,
    /// Where it listens.
    pub listen: ListenAddress,
    /// Ports for receiving files, both ends included.
    pub receivers: (u16, u16),
    /// Directory of control sockets.
    pub runtime_dir: PathBuf,
}

/// Has a replica served by the owner of its store until a signal comes.
///
/// # Errors
/// Why it cannot be served; that the server has ended.
pub fn run(shim: &Shim) -> Result<()> {
    let signals = signals::watch()?;
    let dir = &shim.options.dir;
    fs::create_dir_all(dir).map_err(|e| Error::io(e, format!("making `{}`", dir.display())))?;
    let _held = Held::shared(dir)?;
    upstream::check_settled(dir)?;
    upstream::check_not_served(dir)?;
    if dir.join(super::file::STORE_FILE).exists() {
        return Err(Error::new(
            ErrorKind::Exists,
            format!("the replica in `{}` has a store of its own: leave --store out", dir.display()),
        ));
    }
    let key = store_key(&shim.store)?;
    let socket = socket_path(&shim.runtime_dir, &key);
    let client = Client::connect_to(&socket, &key).map_err(|e| {
        e.context(format!(
            "the store `{}` must be served by `longhorn serve`",
            shim.store.display()
        ))
    })?;

    let sockets = shim.wanted.bind()?;
    let _socket_file = match &sockets.data {
        DataSocket::Unix(_) => shim.wanted.unix.as_deref().and_then(SocketFile::of),
        DataSocket::Tcp(_) => None,
    };
    let receivers = match sockets.receivers(shim.receivers).filter(|_| shim.wanted.agent) {
        Some((first, last)) => bind_receivers(&shim.wanted.listen.host, first, last)?,
        None => Vec::new(),
    };
    let request = protocol::Replica {
        options: shim.options.clone(),
        unix: matches!(sockets.data, DataSocket::Unix(_)),
        agent: sockets.agent.is_some(),
        receivers: receivers.len(),
        tls: transport::is_tls(),
    };
    let directory = open(dir)?;
    let mut files = vec![directory.as_fd()];
    files.extend(sockets.files());
    files.extend(receivers.iter().map(AsFd::as_fd));
    let stream = hand_over(client, REPLICA, &json!(request), &files)?;
    let [grpc, data, agent] = sockets.describe();
    // Theirs alone from now on: if the server ends, nobody must find them listening.
    drop((sockets, receivers, directory));
    log::info(
        "ready",
        &[
            ("replica", &dir.display()),
            ("store", &shim.store.display()),
            ("grpc", &grpc),
            ("data", &data),
            ("agent", &agent),
            ("pid", &std::process::id()),
        ],
    );
    stay(signals, &stream)
}

/// Has a sync agent served by the process of its replica until a signal comes.
///
/// # Errors
/// As [`run`].
pub fn run_agent(shim: &AgentShim) -> Result<()> {
    let signals = signals::watch()?;
    let client = process_of(&shim.dir, &shim.runtime_dir)?;
    let listener = shim.listen.bind().map_err(|e| Error::io(e, "starting the sync agent"))?;
    let (first, last) = shim.receivers;
    let receivers = bind_receivers(&shim.listen.host, first, last)?;
    let request = protocol::SyncAgent {
        dir: shim.dir.clone(),
        volume_name: shim.volume_name.clone(),
        instance_name: shim.instance_name.clone(),
        receivers: receivers.len(),
        tls: transport::is_tls(),
    };
    let directory = open(&shim.dir)?;
    let mut files = vec![directory.as_fd(), listener.as_fd()];
    files.extend(receivers.iter().map(AsFd::as_fd));
    let stream = hand_over(client, SYNC_AGENT, &json!(request), &files)?;
    let address = listener.local_addr().map(|a| a.to_string()).unwrap_or_default();
    drop((listener, receivers, directory));
    log::info("ready", &[("replica", &shim.dir.display()), ("agent", &address)]);
    stay(signals, &stream)
}

/// The process that serves the replica in a directory: one of its own, or the server of a store.
fn process_of(dir: &Path, runtime_dir: &Path) -> Result<Client> {
    let own = SocketPath::of(dir).and_then(|socket| Client::connect(socket.as_path()));
    if own.is_ok() {
        return own;
    }
    match super::registry::store_of(dir) {
        Some(key) => Client::connect_to(&socket_path(runtime_dir, &key), &key),
        None => own.map_err(|e| e.context(format!("no replica is served in `{}`", dir.display()))),
    }
}

fn open(dir: &Path) -> Result<File> {
    File::open(dir).map_err(|e| Error::io(e, format!("opening `{}`", dir.display())))
}

/// Passes the sockets; returns the connection once they are served.
fn hand_over(
    client: Client,
    method: &str,
    params: &Value,
    files: &[BorrowedFd<'_>],
) -> Result<UnixStream> {
    let (answer, stream) = client.into_session(method, params).map_err(|e| explain(e, method))?;
    let expected: Expected = serde_json::from_value(answer).map_err(|e| {
        Error::new(ErrorKind::Io, format!("the server of the store answered something else: {e}"))
    })?;
    if expected.descriptors != files.len() {
        let text = format!(
            "the server of the store expects {} sockets instead of {}: it is of another version",
            expected.descriptors,
            files.len()
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    if let Err(e) = fds::send(&stream, files) {
        // It may have said why it does not want them.
        return match protocol::read_reply(&stream, Some(STEP_TIMEOUT)) {
            Err(told) if told.kind() != ErrorKind::Io => Err(told),
            _ => Err(e),
        };
    }
    match protocol::read_reply(&stream, Some(START_TIMEOUT))? {
        Some(_) => Ok(stream),
        None => Err(ended()),
    }
}

/// Tells who asked the server of a store without replicas for one which server it takes.
fn explain(error: Error, method: &str) -> Error {
    if !error.to_string().contains(&format!("unknown variant `{method}`")) {
        return error;
    }
    let text = "the store is served by `dbs serve`, which serves no replicas: stop that, and start \
                `longhorn serve` on the store";
    Error::new(ErrorKind::Unsupported, text)
}

/// What ends the process.
enum Event {
    Signal(i32),
    ServerEnded,
}

/// Stays until a signal comes, and then waits for the end of what is served.
fn stay(signals: mpsc::Receiver<i32>, stream: &UnixStream) -> Result<()> {
    let failed = |e| Error::io(e, "watching the connection to the server of the store");
    let watched = stream.try_clone().map_err(failed)?;
    let (tell, events) = mpsc::channel();
    let also = tell.clone();
    spawn("server", move || {
        // It says nothing before it ends.
        let _reply = protocol::read_reply(&watched, None);
        let _ended = tell.send(Event::ServerEnded);
    })?;
    spawn("forward", move || {
        if let Ok(signal) = signals.recv() {
            let _ended = also.send(Event::Signal(signal));
        }
    })?;
    let Ok(Event::Signal(signal)) = events.recv() else { return Err(ended()) };
    log::info("stopping", &[("signal", &signal)]);
    let mut writer = stream;
    if writer.write_all(STOP).is_ok() && events.recv_timeout(STEP_TIMEOUT).is_err() {
        log::warn("stopping", &[("error", &"the server of the store does not answer")]);
    }
    log::info("stopped", &[]);
    Ok(())
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|e| Error::io(e, "starting a thread"))
}

fn ended() -> Error {
    Error::new(ErrorKind::Io, "the server of the store has ended what it served")
}
