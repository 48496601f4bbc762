//! The replicas that are compared, and the engine that rebuilds them.

use dbs_benches::Outcome;
use dbs_benches::process::{Process, output, sleep};
use dbs_frontend::Listen;
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use longhorn_wire::proto::ptypes::{
    ReplicaCreateRequest, ReplicaOpenRequest, ReplicaSnapshotRequest,
};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tonic::transport::{Channel, Endpoint};

/// Whose replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Dbs,
    Upstream,
    /// Ours with `--null-storage`: the protocol alone.
    Null,
}

impl Kind {
    pub fn title(self) -> &'static str {
        match self {
            Self::Dbs => "DBS",
            Self::Upstream => "upstream",
            Self::Null => "DBS, null storage",
        }
    }
}

/// The two binaries.
#[derive(Debug)]
pub struct Binaries {
    pub ours: PathBuf,
    pub upstream: PathBuf,
}

/// A replica process, open for I/O.
pub struct Replica {
    /// Of data connections.
    pub address: Listen,
    process: Process,
    runtime: Runtime,
    endpoint: Endpoint,
}

/// How long a server may take to listen.
const START: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);

impl Binaries {
    /// The process of a replica on `dir`, listening but closed.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(&self, kind: Kind, dir: &Path, port: u16, size: u64) -> Outcome<Process> {
        let binary = if kind == Kind::Upstream { &self.upstream } else { &self.ours };
        let mut command = Command::new(binary);
        command.args(["--volume-name", "bench", "replica"]).arg(dir);
        command.args(["--size", &size.to_string(), "--disableRevCounter"]);
        command.args(["--replica-instance-name", "bench-r", "--snapshot-max-count", "250"]);
        command.args(["--snapshot-max-size", "0", "--sync-agent-port-count", "7"]);
        if kind == Kind::Null {
            command.arg("--null-storage");
        }
        command.args(["--listen", &format!("127.0.0.1:{port}")]);
        let process = Process::start(kind.title(), command, &dir.with_extension("log"))?;
        for port in [port, port + 1, port + 2] {
            listening(port)?;
        }
        Ok(process)
    }

    /// A replica on `dir`, made if it is not there, and opened.
    ///
    /// # Errors
    /// If it does not start or open.
    pub fn open(&self, kind: Kind, dir: &Path, port: u16, size: u64) -> Outcome<Replica> {
        let process = self.start(kind, dir, port, size)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}"))?;
        runtime.block_on(async {
            let mut client = client(&endpoint).await?;
            client.replica_create(ReplicaCreateRequest { size: size.to_string() }).await?;
            client.replica_open(ReplicaOpenRequest::default()).await?;
            Outcome::Ok(())
        })?;
        let address = Listen::Tcp("127.0.0.1".to_owned(), port + 1);
        Ok(Replica { address, process, runtime, endpoint })
    }

    /// An engine with the socket frontend over replicas that are closed.
    ///
    /// # Errors
    /// If it does not start.
    pub fn engine(&self, dir: &Path, port: u16, size: u64, replicas: &[u16]) -> Outcome<Process> {
        let mut command = Command::new(&self.upstream);
        let size = size.to_string();
        command.args(["controller", "bench", "--disableRevCounter", "--size", &size]);
        command.args(["--current-size", &size, "--engine-replica-timeout", "8"]);
        command.args(["--snapshot-max-count", "250", "--snapshot-max-size", "0"]);
        for replica in replicas {
            command.args(["--replica", &format!("tcp://127.0.0.1:{replica}")]);
        }
        command.args(["--listen", &format!("127.0.0.1:{port}")]);
        command.env("LONGHORN_CONTROL_PATH", dir);
        let process = Process::start("engine", command, &dir.join("engine.log"))?;
        listening(port)?;
        Ok(process)
    }

    /// Runs upstream's command line against an engine.
    ///
    /// # Errors
    /// If it fails.
    pub fn command(&self, engine: u16, arguments: &[&str]) -> Outcome<String> {
        let mut command = Command::new(&self.upstream);
        command.args(["--url", &format!("http://127.0.0.1:{engine}")]).args(arguments);
        output(&mut command)
    }
}

impl Replica {
    /// CPU seconds of the server so far.
    ///
    /// # Errors
    /// If it ended.
    pub fn cpu(&self) -> Outcome<f64> {
        self.process.cpu_seconds()
    }

    /// Bytes of memory the server holds.
    pub fn resident(&self) -> u64 {
        self.process.resident()
    }

    /// Takes a snapshot.
    ///
    /// # Errors
    /// If it is refused.
    pub fn snapshot(&self, name: &str) -> Outcome<()> {
        let request = ReplicaSnapshotRequest {
            name: name.to_owned(),
            user_created: true,
            created: "2026-01-01T00:00:00Z".to_owned(),
            ..Default::default()
        };
        self.runtime.block_on(async {
            client(&self.endpoint).await?.replica_snapshot(request).await?;
            Ok(())
        })
    }

    /// Closes it and ends its process.
    ///
    /// # Errors
    /// If it cannot be closed.
    pub fn close(self) -> Outcome<()> {
        self.runtime.block_on(async {
            client(&self.endpoint).await?.replica_close(()).await?;
            Ok(())
        })
    }
}

/// A connection for the next calls: nobody is there to answer a server's pings on it between them,
/// while a load runs.
async fn client(endpoint: &Endpoint) -> Outcome<ReplicaServiceClient<Channel>> {
    Ok(ReplicaServiceClient::new(endpoint.connect().await?))
}

fn listening(port: u16) -> Outcome<()> {
    let end = Instant::now() + START;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if Instant::now() > end {
            return Err(format!("nothing listens on port {port}").into());
        }
        sleep(LOOK)?;
    }
    Ok(())
}
