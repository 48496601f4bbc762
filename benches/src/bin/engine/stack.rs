//! What is compared: a controller, the replicas below it, and how they are started.

use dbs_benches::Outcome;
use dbs_benches::process::{Process, sleep};
use dbs_frontend::Listen;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Whose controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Dbs,
    /// Over replicas whose data has no checksums.
    Unchecked,
    Upstream,
}

/// All, in the order of the tables.
pub const SIDES: [Side; 3] = [Side::Dbs, Side::Unchecked, Side::Upstream];

impl Side {
    pub fn title(self) -> &'static str {
        match self {
            Self::Dbs => "DBS",
            Self::Unchecked => "DBS, no checksums",
            Self::Upstream => "upstream",
        }
    }

    /// In names of files and volumes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dbs => "dbs",
            Self::Unchecked => "unchecked",
            Self::Upstream => "upstream",
        }
    }
}

/// What is below a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Below {
    /// Replicas of its own kind.
    Replicas,
    /// Replicas of ours that touch no data: upstream has none such.
    NullStorage,
    /// Nothing: the controller answers by itself.
    NullBackend,
}

/// A row of the tables.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub name: &'static str,
    pub below: Below,
    pub replicas: u16,
}

const fn row(name: &'static str, below: Below, replicas: u16) -> Row {
    Row { name, below, replicas }
}

/// The rows, as the papers have them.
pub const ROWS: [Row; 5] = [
    row("full engine, 1 replica", Below::Replicas, 1),
    row("full engine, 3 replicas", Below::Replicas, 3),
    row("without storage, 1 replica", Below::NullStorage, 1),
    row("without storage, 3 replicas", Below::NullStorage, 3),
    row("frontend only", Below::NullBackend, 0),
];

/// The two binaries.
#[derive(Debug)]
pub struct Binaries {
    pub ours: PathBuf,
    pub upstream: PathBuf,
    /// For our controller alone.
    pub flags: Vec<String>,
}

/// A controller with its replicas, up.
pub struct Stack {
    /// Where its frontend listens.
    pub address: Listen,
    processes: Vec<Process>,
    socket: PathBuf,
}

/// How long a server may take to listen.
const START: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);
/// Ports of a replica, with those of its files.
const PORTS: u16 = 10;

impl Binaries {
    /// Starts the replicas and the controller of a row; `None` if that side has no such thing.
    ///
    /// # Errors
    /// If one of them does not start.
    pub fn start(
        &self,
        side: Side,
        row: &Row,
        dir: &Path,
        port: u16,
        size: u64,
    ) -> Outcome<Option<Stack>> {
        match (side, row.below) {
            (Side::Upstream, Below::NullBackend) => return Ok(None),
            // Without data there is nothing to check.
            (Side::Unchecked, Below::NullStorage | Below::NullBackend) => return Ok(None),
            _ => {}
        }
        std::fs::create_dir_all(dir)?;
        let ports: Vec<_> = (1..=row.replicas).map(|number| port + number * PORTS).collect();
        let mut processes = Vec::new();
        for port in &ports {
            processes.push(self.replica(side, row, &dir.join(port.to_string()), *port, size)?);
        }
        let volume = format!("bench-{}-{}", side.name(), std::process::id());
        let socket = PathBuf::from(format!("/var/run/longhorn-{volume}.sock"));
        let binary = if side == Side::Upstream { &self.upstream } else { &self.ours };
        let text = size.to_string();
        let mut command = Command::new(binary);
        command.args(["controller", &volume, "--frontend", "socket", "--disableRevCounter"]);
        command.args(["--size", &text, "--current-size", &text, "--engine-replica-timeout", "8"]);
        command.args(["--snapshot-max-count", "250", "--snapshot-max-size", "0"]);
        for port in &ports {
            command.args(["--replica", &format!("tcp://127.0.0.1:{port}")]);
        }
        if row.below == Below::NullBackend {
            command.arg("--null-backend");
        }
        if side != Side::Upstream {
            command.args(&self.flags);
        }
        command.args(["--listen", &format!("127.0.0.1:{port}")]);
        command.env("LONGHORN_CONTROL_PATH", dir);
        processes.push(Process::start(side.title(), command, &dir.join("controller.log"))?);
        listening(&Listen::Tcp("127.0.0.1".to_owned(), port))?;
        let address = Listen::Unix(socket.clone());
        listening(&address)?;
        Ok(Some(Stack { address, processes, socket }))
    }

    fn replica(&self, side: Side, row: &Row, dir: &Path, port: u16, size: u64) -> Outcome<Process> {
        let null = row.below == Below::NullStorage;
        let upstream = side == Side::Upstream && !null;
        let mut command = Command::new(if upstream { &self.upstream } else { &self.ours });
        command.arg("replica").arg(dir).args(["--size", &size.to_string()]);
        command.args(["--disableRevCounter", "--snapshot-max-count", "250"]);
        command.args(["--snapshot-max-size", "0", "--sync-agent-port-count", "7"]);
        if null {
            command.arg("--null-storage");
        }
        if side == Side::Unchecked {
            command.arg("--checksums=false");
        }
        command.args(["--listen", &format!("127.0.0.1:{port}")]);
        let process = Process::start("replica", command, &dir.with_extension("log"))?;
        for port in port..port + 3 {
            if TcpStream::connect(("127.0.0.1", port)).is_err() {
                listening(&Listen::Tcp("127.0.0.1".to_owned(), port))?;
            }
        }
        Ok(process)
    }
}

impl Stack {
    /// CPU seconds of all its processes so far.
    ///
    /// # Errors
    /// If one ended.
    pub fn cpu(&self) -> Outcome<f64> {
        self.processes.iter().map(Process::cpu_seconds).sum()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // The controller first, so that it does not see its replicas go.
        while self.processes.pop().is_some() {}
        // Upstream's leaves its socket.
        let _gone = std::fs::remove_file(&self.socket);
    }
}

fn listening(address: &Listen) -> Outcome<()> {
    let end = Instant::now() + START;
    while address.connect().is_err() {
        if Instant::now() > end {
            return Err(format!("nothing listens on {address}").into());
        }
        sleep(LOOK)?;
    }
    Ok(())
}
