//! Replicas' processes, and what talks to them. The test that includes this names the program: its
//! path in `PROGRAM`, and the arguments in front of a replica's directory in `REPLICA`.
#![allow(dead_code, clippy::missing_panics_doc)]

use dbs_control::{Client, socket_path, store_key};
use dbs_frontend::Listen;
use longhorn_testing::DataClient;
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use longhorn_wire::proto::ptypes::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tonic::Status;
use tonic::transport::Channel;

/// Long enough for anything on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(180);
/// Size of most volumes.
pub const SIZE: u64 = 64 << 20;
pub const BLOCK: usize = 4096;

/// A directory with room for replicas and control sockets, gone at the end.
pub struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o700)).unwrap();
        Self { directory }
    }

    /// One in memory, if there is such a file system with room.
    pub fn in_memory() -> Self {
        let room = nix::sys::statvfs::statvfs("/dev/shm")
            .is_ok_and(|shm| shm.blocks_available() * shm.fragment_size() > 1 << 30);
        if !room {
            return Self::new();
        }
        let Ok(directory) = tempfile::tempdir_in("/dev/shm") else { return Self::new() };
        Self { directory }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn replica(&self, name: &str) -> PathBuf {
        self.path().join("replicas").join(name)
    }

    pub fn runtime_dir(&self) -> PathBuf {
        self.path().join("run")
    }

    /// The command, with its control sockets here.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("DBS_RUNTIME_DIR", self.runtime_dir()).env_remove("DBS_STORE");
        command
    }

    pub fn program(&self) -> Command {
        self.command(super::PROGRAM)
    }

    /// A replica on ports of its own, ready.
    pub fn start(&self, name: &str, more: &[&str]) -> Process {
        self.start_with(name, more).ready()
    }

    pub fn start_with(&self, name: &str, more: &[&str]) -> Process {
        let mut command = self.program();
        command.args(super::REPLICA).arg(self.replica(name)).args(more);
        if !more.contains(&"--listen") {
            command.args(["--listen", &free_ports()]);
        }
        Process::spawn(command)
    }

    /// A control connection to the store in a replica's directory.
    pub fn control(&self, name: &str) -> Client {
        let key = store_key(&self.replica(name).join("volume.dbs")).unwrap();
        Client::connect(&socket_path(&self.runtime_dir(), &key)).unwrap()
    }
}

/// An address with all the ports that a replica takes. The system gives none of them to those who ask for any port, as
/// other programs of tests do meanwhile.
fn free_ports() -> String {
    const PORTS: u16 = 16;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = number.wrapping_add(std::process::id().wrapping_mul(37)) % 1250;
        let first = 12_000 + number as u16 * PORTS;
        let mut ports = first..first + PORTS;
        if ports.all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return format!("127.0.0.1:{first}");
        }
    }
}

/// A running process, killed at the end.
pub struct Process {
    child: Child,
    log: Arc<Log>,
    output: Arc<Mutex<Vec<String>>>,
}

#[derive(Default)]
struct Log {
    lines: Mutex<(Vec<String>, bool)>,
    more: Condvar,
}

impl Process {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::<Log>::default();
        let (stderr, kept) = (child.stderr.take().unwrap(), Arc::clone(&log));
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                let Ok(line) = line else { break };
                kept.lines.lock().unwrap_or_else(PoisonError::into_inner).0.push(line);
                kept.more.notify_all();
            }
            kept.lines.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
            kept.more.notify_all();
        });
        let (stdout, output) = (child.stdout.take().unwrap(), Arc::<Mutex<Vec<String>>>::default());
        let kept = Arc::clone(&output);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        Self { child, log, output }
    }

    /// What it has printed on its standard output so far.
    pub fn output(&self) -> Vec<String> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process once it has said that it is ready.
    pub fn ready(self) -> Self {
        self.wait_for("event=ready");
        self
    }

    /// The first line with this text, which must come.
    pub fn wait_for(&self, text: &str) -> String {
        let lines = self.log.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let found = |lines: &(Vec<String>, bool)| lines.0.iter().any(|line| line.contains(text));
        let (lines, _) = self
            .log
            .more
            .wait_timeout_while(lines, TIMEOUT, |lines| !found(lines) && !lines.1)
            .unwrap();
        match lines.0.iter().find(|line| line.contains(text)) {
            Some(line) => line.clone(),
            None => panic!("no `{text}` in the log:\n{}", lines.0.join("\n")),
        }
    }

    pub fn log(&self) -> String {
        self.log.lines.lock().unwrap_or_else(PoisonError::into_inner).0.join("\n")
    }

    /// A field of the ready line.
    pub fn field(&self, key: &str) -> String {
        let line = self.wait_for("event=ready");
        let fields: BTreeMap<_, _> =
            line.split(' ').filter_map(|pair| pair.split_once('=')).collect();
        fields.get(key).unwrap_or_else(|| panic!("no {key} in {line}")).to_string()
    }

    pub fn rpc(&self) -> Rpc {
        Rpc::new(&self.field("grpc"))
    }

    pub fn data(&self) -> DataClient {
        DataClient::connect(&self.data_address(), 2).unwrap().with_timeout(TIMEOUT)
    }

    pub fn data_address(&self) -> Listen {
        let address = self.field("data");
        match address.strip_prefix("unix:") {
            Some(path) => Listen::Unix(path.into()),
            None => format!("tcp:{address}").parse().unwrap(),
        }
    }

    /// The replica opened for data.
    pub fn open(&self) -> DataClient {
        let data = self.data();
        self.rpc().open(false).unwrap();
        data
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // What it said last may still be on its way.
                let lines = self.log.lines.lock().unwrap_or_else(PoisonError::into_inner);
                let read = self.log.more.wait_timeout_while(lines, TIMEOUT, |lines| !lines.1);
                assert!(read.unwrap().0.1, "somebody else has the log open");
                return status;
            }
            assert!(Instant::now() < deadline, "the process does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it in good order.
    pub fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        let status = self.wait();
        assert!(status.success(), "{status}:\n{}", self.log());
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// A metric's value.
    pub fn metric(&self, start: &str) -> f64 {
        let text = http_get(&self.field("metrics"), "/metrics").1;
        let line = text.lines().find(|line| line.starts_with(start));
        let line = line.unwrap_or_else(|| panic!("no {start} in\n{text}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
        if std::thread::panicking() {
            eprintln!("log of process {}:\n{}", self.pid(), self.log());
        }
    }
}

/// Status line and body.
pub fn http_get(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// gRPC calls that block.
pub struct Rpc {
    runtime: tokio::runtime::Runtime,
    client: ReplicaServiceClient<Channel>,
}

pub type Outcome<T> = Result<T, Status>;

impl Rpc {
    pub fn new(address: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
        let client = runtime.block_on(async {
            ReplicaServiceClient::new(endpoint.timeout(TIMEOUT).connect_lazy())
        });
        Self { runtime, client }
    }

    pub fn get(&self) -> Outcome<Replica> {
        let mut client = self.client.clone();
        let reply = self.runtime.block_on(client.replica_get(()))?;
        Ok(reply.into_inner().replica.unwrap())
    }

    pub fn state(&self) -> String {
        self.get().unwrap().state
    }

    pub fn open(&self, is_upgrade: bool) -> Outcome<()> {
        let mut client = self.client.clone();
        let request = ReplicaOpenRequest { is_upgrade, ..Default::default() };
        self.runtime.block_on(client.replica_open(request)).map(drop)
    }

    pub fn close(&self) -> Outcome<()> {
        let mut client = self.client.clone();
        self.runtime.block_on(client.replica_close(())).map(drop)
    }

    pub fn snapshot(&self, name: &str) -> Outcome<()> {
        let mut client = self.client.clone();
        let request = ReplicaSnapshotRequest {
            name: name.to_owned(),
            user_created: true,
            created: "2026-01-01T00:00:00Z".to_owned(),
            ..Default::default()
        };
        self.runtime.block_on(client.replica_snapshot(request)).map(drop)
    }

    pub fn expand(&self, size: i64) -> Outcome<()> {
        let mut client = self.client.clone();
        self.runtime.block_on(client.replica_expand(ReplicaExpandRequest { size })).map(drop)
    }
}

/// A block's content that tells its number and version.
pub fn block(number: u64, version: u64) -> Vec<u8> {
    let mut content = vec![0; BLOCK];
    let words = content.chunks_exact_mut(16);
    for word in words {
        word[..8].copy_from_slice(&number.to_le_bytes());
        word[8..].copy_from_slice(&version.to_le_bytes());
    }
    content
}

/// Number and version of a block, all of which must agree; `None` for zeros.
pub fn version_of(content: &[u8], number: u64) -> Option<u64> {
    if content.iter().all(|byte| *byte == 0) {
        return None;
    }
    let version = u64::from_le_bytes(content[8..16].try_into().unwrap());
    assert_eq!(content, block(number, version), "a mix in block {number}");
    Some(version)
}

/// Whether a condition comes true in time.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
