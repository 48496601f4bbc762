//! The command `dbs`, and its server.

use crate::Outcome;
use crate::fio::{Figures, Job, Target};
use crate::process::{Process, output};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Something that fio can run against while this lives.
#[derive(Debug)]
pub struct Served {
    /// What it is.
    pub target: Target,
    process: Option<Process>,
}

impl Served {
    /// A file, without any server.
    #[must_use]
    pub fn file(path: &Path) -> Self {
        Self { target: Target::File(path.to_owned()), process: None }
    }

    /// Starts an NBD server that listens on `socket`, and waits until it does.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, command: Command, socket: &Path, export: &str) -> Outcome<Self> {
        let mut process = Process::start(name, command, &socket.with_extension("log"))?;
        process.wait_listening(socket)?;
        Ok(Self { target: Target::Nbd(uri(socket, export)), process: Some(process) })
    }

    /// Runs a load against it, with the CPU time that its server used for it.
    ///
    /// # Errors
    /// If that fails.
    pub fn measure(&self, job: &Job, dir: &Path) -> Outcome<Figures> {
        let before = self.cpu_seconds()?;
        let mut figures = job.run(&self.target, dir)?;
        figures.server_cpu = self.cpu_seconds()?.zip(before).map(|(after, before)| after - before);
        Ok(figures)
    }

    /// The server's CPU time so far, if there is one.
    ///
    /// # Errors
    /// If it ended.
    pub fn cpu_seconds(&self) -> Outcome<Option<f64>> {
        self.process.as_ref().map(Process::cpu_seconds).transpose()
    }

    /// Bytes of memory the server holds.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.process.as_ref().map_or(0, Process::resident)
    }
}

/// The URI of an export on a unix socket.
#[must_use]
pub fn uri(socket: &Path, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}

/// The command `dbs`.
#[derive(Debug, Clone)]
pub struct Dbs {
    binary: PathBuf,
}

impl Dbs {
    /// The binary given, or the one beside the running program.
    ///
    /// # Errors
    /// If it is not there.
    pub fn find(binary: Option<&Path>) -> Outcome<Self> {
        let binary = match binary {
            Some(binary) => binary.to_owned(),
            None => std::env::current_exe()?.with_file_name("dbs"),
        };
        if !binary.is_file() {
            return Err(format!(
                "no `dbs` at {}: build it with `cargo build --release -p dbs-cli`, or use --dbs",
                binary.display()
            )
            .into());
        }
        Ok(Self { binary })
    }

    /// The command, without arguments.
    #[must_use]
    pub fn command(&self) -> Command {
        Command::new(&self.binary)
    }

    /// Runs a command on a store, served or idle, and gives what it printed.
    ///
    /// # Errors
    /// If it fails.
    pub fn run(&self, store: &Path, arguments: &[&str]) -> Outcome<String> {
        let mut command = Command::new(&self.binary);
        output(command.args(["--yes", "--store"]).arg(store).args(arguments))
    }

    /// Runs `dbs --version`.
    ///
    /// # Errors
    /// If it fails.
    pub fn version(&self) -> Outcome<String> {
        Ok(output(Command::new(&self.binary).arg("--version"))?.trim().to_owned())
    }

    /// Serves a store; `export` is the volume that loads go to.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn serve(&self, store: &Path, export: &str, socket: &Path) -> Outcome<Served> {
        self.serve_with(store, export, socket, &[])
    }

    /// As [`Dbs::serve`], with more options.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn serve_with(
        &self,
        store: &Path,
        export: &str,
        socket: &Path,
        options: &[&str],
    ) -> Outcome<Served> {
        let mut command = Command::new(&self.binary);
        command.args([OsStr::new("--store"), store.as_os_str(), "serve".as_ref()]);
        command.arg("--nbd").arg(format!("unix:{}", socket.display())).args(options);
        Served::start("dbs serve", command, socket, export)
    }

    /// Snapshots deleted but not merged yet.
    ///
    /// # Errors
    /// If the store cannot be asked.
    pub fn snapshots_deleting(&self, store: &Path) -> Outcome<u64> {
        let info: serde_json::Value = serde_json::from_str(&self.run(store, &["--json", "info"])?)?;
        info["snapshots_deleting"].as_u64().ok_or_else(|| "no snapshots_deleting in info".into())
    }
}
