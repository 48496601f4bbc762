//! A replica's process and directory.

use super::image::read_all;
use super::io::{Address, Client};
use super::process::{Process, dying_with_us};
use super::{Lab, eventually, free_ports, rpc};
use nix::sys::signal::Signal;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// Replica, data, sync agent, and the receivers of a rebuild.
const PORTS: u16 = 13;

/// Whose replica it is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    Stock,
    Ours,
}

impl Kind {
    /// With `REPLICA=stock` all are upstream's: shows that a scenario itself is right.
    pub fn really(self) -> Self {
        match std::env::var("REPLICA").as_deref() {
            Ok("stock") => Self::Stock,
            Ok("ours") | Err(_) => self,
            Ok(other) => panic!("REPLICA={other}: neither stock nor ours"),
        }
    }
}

#[derive(Clone)]
pub struct ReplicaOptions {
    pub size: usize,
    pub revision_counter: bool,
    pub flags: Vec<String>,
}

impl ReplicaOptions {
    pub fn new(size: usize) -> Self {
        Self { size, revision_counter: false, flags: Vec::new() }
    }
}

pub struct Replica {
    kind: Kind,
    name: String,
    volume: String,
    dir: PathBuf,
    port: u16,
    program: PathBuf,
    control_path: PathBuf,
    options: ReplicaOptions,
    log: PathBuf,
    process: Option<Process>,
}

impl Lab {
    /// Starts a replica of volume `volume` in a directory of its own, called `name`.
    pub fn replica(
        &self,
        kind: Kind,
        volume: &str,
        name: &str,
        options: &ReplicaOptions,
    ) -> Replica {
        let dir = self.path().join(name);
        self.replica_in(kind, volume, name, &dir, options)
    }

    /// The same in a given directory, which may be in use.
    pub fn replica_in(
        &self,
        kind: Kind,
        volume: &str,
        name: &str,
        dir: &Path,
        options: &ReplicaOptions,
    ) -> Replica {
        let kind = kind.really();
        let program = match kind {
            Kind::Stock => self.stock().to_owned(),
            Kind::Ours => ours(),
        };
        let mut replica = Replica {
            kind,
            name: name.into(),
            volume: self.volume(volume),
            dir: dir.into(),
            port: free_ports(PORTS),
            program,
            control_path: self.control_path(),
            options: options.clone(),
            log: self.path().join(format!("{name}.log")),
            process: None,
        };
        replica.start();
        replica
    }
}

/// The binary under test.
pub fn ours() -> PathBuf {
    let program = option_env!("CARGO_BIN_EXE_longhorn").map(PathBuf::from);
    program.expect("no binary of ours was built")
}

impl Replica {
    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn options(&mut self) -> &mut ReplicaOptions {
        &mut self.options
    }

    /// As an engine calls it.
    pub fn url(&self) -> String {
        format!("tcp://127.0.0.1:{}", self.port)
    }

    /// Its data connection.
    pub fn data(&self) -> Address {
        Address::Port(self.port + 1)
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.data()).unwrap()
    }

    /// All it holds.
    pub fn contents(&self, size: usize) -> Vec<u8> {
        read_all(&self.data(), size)
    }

    pub fn rpc(&self) -> rpc::ReplicaRpc {
        rpc::ReplicaRpc::connect(self.port)
    }

    /// Starts the process, on ports that must all be free; ready when it returns.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "{} runs already", self.name);
        self.ports_are_free();
        let mut command = dying_with_us(&self.program);
        command.env("LONGHORN_CONTROL_PATH", &self.control_path);
        command.args(["--volume-name", &self.volume, "replica"]).arg(&self.dir);
        command.args([
            "--size",
            &self.options.size.to_string(),
            "--replica-instance-name",
            &self.name,
        ]);
        command.args([
            "--snapshot-max-count",
            "250",
            "--snapshot-max-size",
            "0",
            "--sync-agent-port-count",
            "7",
        ]);
        if !self.options.revision_counter {
            command.arg("--disableRevCounter");
        }
        // As instance-manager does, after the positional argument and last.
        command.args(&self.options.flags).args(["--listen", &format!("127.0.0.1:{}", self.port)]);
        let mut process = Process::start(&self.name, command, &self.log);
        let ports = [self.port, self.port + 2];
        eventually(&format!("{} listens", self.name), || {
            assert!(
                process.ended().is_none(),
                "{} did not start:\n{}",
                self.name,
                process.tail(10)
            );
            ports.iter().all(|port| TcpStream::connect(("127.0.0.1", *port)).is_ok())
        });
        self.process = Some(process);
    }

    /// After the end of a process nothing of it may listen any more, so that it can be started again.
    fn ports_are_free(&self) {
        let free = || {
            (self.port..self.port + PORTS)
                .all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        };
        eventually(&format!("the ports of {} are free", self.name), free);
    }

    pub fn signal(&self, signal: Signal) {
        self.process.as_ref().unwrap().signal(signal);
    }

    /// Ends the process with a signal.
    pub fn stop(&mut self, signal: Signal) -> ExitStatus {
        let status = self.process.take().expect("it runs").stop(signal);
        self.ports_are_free();
        status
    }

    pub fn kill(&mut self) {
        self.stop(Signal::SIGKILL);
    }

    /// Waits for the end of a process that was signalled.
    pub fn wait(&mut self) {
        let mut process = self.process.take().expect("it was started");
        eventually(&format!("the end of {}", self.name), || process.ended().is_some());
        self.ports_are_free();
    }

    /// The binary it runs.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Removes what it stored, as Longhorn's manager deletes a replica.
    pub fn wipe(&mut self) {
        assert!(self.process.is_none());
        std::fs::remove_dir_all(&self.dir).unwrap();
    }
}
