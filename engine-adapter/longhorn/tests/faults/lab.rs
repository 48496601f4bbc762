//! Replicas and controllers of one volume, each a process.

use crate::load::{Load, Report};
use crate::support::{Place, Process, Rpc, eventually};
use dbs_frontend::Listen;
use longhorn_testing::DataClient;
use nix::sys::signal::Signal;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the volume.
pub const SIZE: u64 = 16 << 20;
const SIZE_TEXT: &str = "16777216";
/// Silence after which a replica is given up here: a busy machine is not silent for so long.
pub const SHORT: Duration = Duration::from_secs(6);
const SHORT_TEXT: &str = "6000";
/// The longest that a request may take here while a good replica is left: what one that is silent for the
/// other's sake may, and then one that is lost in between; and the machine may be busy.
pub const LONGEST: Duration = Duration::from_secs(2 * 2 * 6 + 20);
/// Ports of a replica that are to be free: gRPC, data, sync agent, and two receivers.
const PORTS: u16 = 5;
/// Longer than any command takes.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A directory with room for replicas, in memory where that can be: a disk that others keep busy is one more
/// reason for a replica to be slow.
pub struct Lab {
    pub place: Place,
}

pub struct Replica {
    pub process: Process,
    pub name: String,
    /// As a controller calls it.
    pub address: String,
    /// Where it listens.
    pub host: String,
    pub port: u16,
    more: Vec<String>,
}

pub struct Engine {
    pub process: Process,
    dir: PathBuf,
}

/// Upstream's binary if all replicas are to be upstream's.
pub fn stock() -> Option<PathBuf> {
    match std::env::var("REPLICA").as_deref() {
        Ok("stock") => Some(std::env::var_os("LONGHORN_BIN").expect("LONGHORN_BIN").into()),
        _ => None,
    }
}

/// Says that a test did not run. Not with `println!`, which is kept from sight for a test that passes.
pub fn skip(test: &str, missing: &str) {
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED {test}: needs {missing}");
}

/// The first of some ports in a row that are free, and that no other test here is given.
pub fn free_ports() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 300).unwrap() * 40;
    for _ in 0..1000 {
        let first = 18_000 + start.wrapping_add(NEXT.fetch_add(PORTS, Ordering::Relaxed)) % 12_000;
        let mut all = first..first + PORTS;
        if all.all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return first;
        }
    }
    panic!("no {PORTS} free ports in a row");
}

/// Runs a command to its end, which must come: its output, or what went wrong.
pub fn output(mut command: Command, dir: &Path) -> Result<String, String> {
    let (out, err) = (
        tempfile::NamedTempFile::new_in(dir).unwrap(),
        tempfile::NamedTempFile::new_in(dir).unwrap(),
    );
    command.stdin(Stdio::null()).stdout(out.reopen().unwrap()).stderr(err.reopen().unwrap());
    let mut child = command.spawn().map_err(|error| format!("{command:?}: {error}"))?;
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{command:?} does not end");
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    if status.success() { Ok(text(out.path())) } else { Err(text(err.path())) }
}

impl Lab {
    pub fn new() -> Self {
        // Upstream's replicas need a file system that tells where a file has holes.
        Self { place: if stock().is_some() { Place::new() } else { Place::in_memory() } }
    }

    /// A replica that does not count changes.
    pub fn replica(&self, name: &str) -> Replica {
        self.replica_with(name, &["--disableRevCounter"])
    }

    pub fn replica_with(&self, name: &str, more: &[&str]) -> Replica {
        let program = stock().unwrap_or_else(|| crate::PROGRAM.into());
        let command = self.place.command(&program.to_string_lossy());
        self.replica_of(command, "127.0.0.1", name, more)
    }

    /// A replica that this command runs, listening on this host.
    pub fn replica_of(&self, command: Command, host: &str, name: &str, more: &[&str]) -> Replica {
        let port = free_ports();
        let more: Vec<String> = more.iter().map(|&arg| arg.to_owned()).collect();
        let process = self.run(command, name, &format!("{host}:{port}"), &more);
        let address = format!("tcp://{host}:{port}");
        Replica { process, name: name.to_owned(), address, host: host.to_owned(), port, more }
    }

    fn run(&self, mut command: Command, name: &str, listen: &str, more: &[String]) -> Process {
        command.args(crate::REPLICA).arg(self.place.replica(name)).args(more);
        command.args(["--size", SIZE_TEXT, "--sync-agent-port-count", "2", "--listen", listen]);
        std::fs::create_dir_all(self.place.replica(name)).unwrap();
        let process = Process::spawn(command);
        match stock() {
            None => process.ready(),
            Some(_) => {
                eventually("a replica listens", || TcpStream::connect(listen).is_ok());
                process
            }
        }
    }

    /// Starts a replica that was killed again, on its ports.
    pub fn restart(&self, replica: &mut Replica) {
        let Replica { name, host, port, more, .. } = &*replica;
        let free = |port: u16| TcpListener::bind((host.as_str(), port)).is_ok();
        eventually("the ports are free", || (*port..port + PORTS).all(free));
        let program = stock().unwrap_or_else(|| crate::PROGRAM.into());
        let command = self.place.command(&program.to_string_lossy());
        let process = self.run(command, name, &format!("{host}:{port}"), more);
        replica.process = process;
    }

    /// A controller over these replicas, ready, which does not count changes.
    pub fn engine(&self, replicas: &[&str]) -> Engine {
        self.engine_with(replicas, &["--disableRevCounter"])
    }

    pub fn engine_with(&self, replicas: &[&str], more: &[&str]) -> Engine {
        let mut command = self.place.program();
        command.args(["controller", "vol", "--frontend", "socket", "--listen", "127.0.0.1:0"]);
        command.args(["--size", SIZE_TEXT, "--current-size", SIZE_TEXT]);
        command.args(["--replica-timeout-ms", SHORT_TEXT, "--metrics", "127.0.0.1:0"]);
        // A replica may be stopped while nothing but a flush is asked of it.
        command.args(["--flush-timeout", "20"]);
        command.arg("--socket-dir").arg(self.place.path()).args(more);
        for replica in replicas {
            command.args(["--replica", replica]);
        }
        let process = Process::spawn(command).ready();
        Engine { process, dir: self.place.path().to_owned() }
    }

    /// Where the volume is.
    pub fn socket(&self) -> Listen {
        Listen::Unix(self.place.path().join("longhorn-vol.sock"))
    }

    pub fn client(&self) -> DataClient {
        DataClient::connect(&self.socket(), 1).unwrap().with_timeout(TIMEOUT)
    }

    /// Begins verified I/O.
    pub fn load(&self) -> Load {
        Load::start(self.socket())
    }

    /// The volume and each of these replicas hold what they may, and these replicas the same. What was not
    /// acknowledged is written again first.
    pub fn check(&self, report: &mut Report, replicas: &[&Replica]) {
        let client = self.client();
        report.settle(&client);
        report.check("the volume", &client);
        let contents: Vec<_> =
            replicas.iter().map(|replica| report.check(&replica.name, &replica.data())).collect();
        for (content, replica) in contents.iter().zip(replicas) {
            assert!(*content == contents[0], "{} and {} differ", replica.name, replicas[0].name);
        }
    }
}

impl Replica {
    pub fn data(&self) -> DataClient {
        let listen = Listen::Tcp(self.host.clone(), self.port + 1);
        DataClient::connect(&listen, 1).unwrap().with_timeout(TIMEOUT)
    }

    pub fn rpc(&self) -> Rpc {
        Rpc::new(&format!("{}:{}", self.host, self.port))
    }

    pub fn kill(&mut self) {
        self.process.kill();
    }

    pub fn stop(&self) {
        self.process.signal(Signal::SIGSTOP);
    }

    pub fn go_on(&self) {
        self.process.signal(Signal::SIGCONT);
    }
}

impl Engine {
    /// Our command line.
    pub fn run(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(crate::PROGRAM);
        let url = format!("http://{}", self.process.field("grpc"));
        command.args(["--url", &url, "--volume-name", "vol"]).args(args);
        output(command, &self.dir)
    }

    pub fn add(&self, address: &str) -> Result<String, String> {
        self.run(&["add-replica", address, "--size", SIZE_TEXT, "--current-size", SIZE_TEXT])
    }

    /// The mode of a replica as the metrics say it, if it is known.
    pub fn mode(&self, address: &str) -> Option<&'static str> {
        let (_, text) = crate::support::http_get(&self.process.field("metrics"), "/metrics");
        ["RW", "WO", "ERR"].into_iter().find(|mode| {
            let labels = format!("{{volume=\"vol\",replica=\"{address}\",mode=\"{mode}\"}}");
            let line = format!("dbs_volume_replica_mode{labels} 1");
            text.lines().any(|found| found == line)
        })
    }

    /// How often connections to a replica were made anew.
    pub fn reconnected(&self, address: &str) -> f64 {
        let labels = format!("{{volume=\"vol\",replica=\"{address}\"}}");
        self.process.metric(&format!("dbs_volume_reconnects_total{labels}"))
    }

    /// Waits until a replica is `ERR`, in metrics and log; what the log says of why.
    pub fn faulted(&self, address: &str) -> String {
        eventually(&format!("{address} becomes ERR"), || self.mode(address) == Some("ERR"));
        let event = format!("event=replica-faulted volume=vol replica={address} why=");
        let line = self.process.wait_for(&event);
        let what = if line.contains("why=\"snapshot: ") { "snapshot" } else { "data" };
        let labels = format!("{{volume=\"vol\",reason=\"{what}\"}}");
        assert!(self.process.metric(&format!("dbs_volume_replica_faults_total{labels}")) >= 1.0);
        line
    }
}
