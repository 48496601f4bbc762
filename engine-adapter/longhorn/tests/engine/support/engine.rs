//! An engine's process, and upstream's command line to steer it.

use super::image::{Image, Mix};
use super::io::{Address, Client};
use super::process::{Process, dying_with_us, output_within, run_within};
use super::replica::{Replica, ours};
use super::{Lab, eventually, eventually_within, free_ports};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// Longest time a command may take. A rebuild handles a file in three seconds, but who sends a description to a
/// receiver that was killed tries again for minutes, upstream's as ours.
const COMMAND: Duration = Duration::from_secs(400);

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Frontend {
    Socket,
    /// Volumes are expanded and engines upgraded without it: the socket frontend supports neither.
    None,
}

#[derive(Clone)]
pub struct EngineOptions {
    pub size: usize,
    pub frontend: Frontend,
    pub revision_counter: bool,
    pub flags: Vec<String>,
}

impl EngineOptions {
    pub fn new(size: usize) -> Self {
        Self { size, frontend: Frontend::Socket, revision_counter: false, flags: Vec::new() }
    }

    pub fn without_frontend(size: usize) -> Self {
        Self { frontend: Frontend::None, ..Self::new(size) }
    }
}

/// A line of `longhorn ls`.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    pub url: String,
    pub mode: String,
    pub chain: Vec<String>,
}

pub struct Engine {
    volume: String,
    port: u16,
    size: usize,
    /// The command line that steers it.
    cli: PathBuf,
    control_path: PathBuf,
    scratch: PathBuf,
    frontend: Frontend,
    process: Process,
}

impl Lab {
    /// Starts the engine of a volume on these replicas; all its ports answer when it returns.
    pub fn engine(&self, volume: &str, options: &EngineOptions, replicas: &[&Replica]) -> Engine {
        self.try_engine(volume, options, replicas)
            .unwrap_or_else(|(status, log)| panic!("no engine: {status}\n{log}"))
    }

    /// The same; how the engine ended and what it said last where it does not start.
    pub fn try_engine(
        &self,
        volume: &str,
        options: &EngineOptions,
        replicas: &[&Replica],
    ) -> Result<Engine, (ExitStatus, String)> {
        let port = free_ports(1);
        let volume = self.volume(volume);
        let socket = socket_of(&volume);
        if options.frontend == Frontend::Socket {
            let _ = std::fs::remove_file(&socket);
        }
        let size = options.size.to_string();
        let mut command = dying_with_us(&whose("ENGINE", self.stock()));
        command.env("LONGHORN_CONTROL_PATH", self.control_path());
        command.args(["controller", &volume, "--size", &size, "--current-size", &size]);
        command.args(["--engine-replica-timeout", "8", "--file-sync-http-client-timeout", "30"]);
        command.args(["--snapshot-max-count", "250", "--snapshot-max-size", "0"]);
        command.args(["--rebuild-sync-concurrent-limit", "1"]);
        if options.frontend == Frontend::Socket {
            command.args(["--frontend", "socket"]);
        }
        if !options.revision_counter {
            command.arg("--disableRevCounter");
        }
        for replica in replicas {
            command.args(["--replica", &replica.url()]);
        }
        command.args(&options.flags).args(["--listen", &format!("127.0.0.1:{port}")]);
        let log = self.path().join(format!("engine-{volume}.log"));
        let mut process = Process::start(&format!("the engine of {volume}"), command, &log);
        let mut ended = None;
        eventually_within(Duration::from_secs(60), "the engine starts", || {
            ended = process.ended();
            let ready = TcpStream::connect(("127.0.0.1", port)).is_ok()
                && (options.frontend == Frontend::None
                    || Client::connect(&Address::Socket(socket.clone())).is_ok());
            ended.is_some() || ready
        });
        if let Some(status) = ended {
            return Err((status, process.tail(10)));
        }
        Ok(Engine {
            volume,
            port,
            size: options.size,
            cli: self.command_line(),
            control_path: self.control_path(),
            scratch: self.path().to_owned(),
            frontend: options.frontend,
            process,
        })
    }
}

impl Lab {
    /// Which `longhorn` steers engines: `CLI` says whose.
    fn command_line(&self) -> PathBuf {
        whose("CLI", self.stock())
    }
}

/// Upstream's `longhorn`, or ours if this variable says so.
fn whose(variable: &str, stock: &Path) -> PathBuf {
    match std::env::var(variable).as_deref() {
        Ok("ours") => ours(),
        Ok("stock") | Err(_) => stock.to_owned(),
        Ok(other) => panic!("{variable}={other}: neither stock nor ours"),
    }
}

fn socket_of(volume: &str) -> PathBuf {
    PathBuf::from(format!("/var/run/longhorn-{volume}.sock"))
}

impl Engine {
    /// The frontend.
    pub fn data(&self) -> Address {
        Address::Socket(socket_of(&self.volume))
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.data()).unwrap()
    }

    pub fn url(&self) -> String {
        format!("tcp://127.0.0.1:{}", self.port)
    }

    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// Some verified requests, then all is read.
    pub fn exercise(&self, image: &mut Image, requests: u64) {
        super::exercise(&self.data(), image, Mix::default(), requests);
    }

    /// Runs a command line, with options in front of the command; its exit code, output and errors.
    pub fn run_cli(
        &self,
        program: &Path,
        globals: &[&str],
        args: &[&str],
    ) -> (i32, String, String) {
        let mut command = Command::new(program);
        command.env("LONGHORN_CONTROL_PATH", &self.control_path).args(globals).args(args);
        let (status, out, err) = run_within(COMMAND, command, &self.scratch);
        (status.code().expect("an exit code"), out, err)
    }

    /// Runs the command line; its output, or what it said of its failure.
    pub fn try_cli(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.cli);
        command.env("LONGHORN_CONTROL_PATH", &self.control_path);
        command
            .args([
                "--url",
                &format!("http://127.0.0.1:{}", self.port),
                "--volume-name",
                &self.volume,
            ])
            .args(args);
        match output_within(COMMAND, command, &self.scratch) {
            (true, out, _) => Ok(out),
            (false, out, err) => Err(format!("{out}{err}")),
        }
    }

    pub fn cli(&self, args: &[&str]) -> String {
        self.try_cli(args).unwrap_or_else(|text| panic!("longhorn {}: {text}", args.join(" ")))
    }

    fn json(&self, args: &[&str]) -> Value {
        let out = self.cli(args);
        serde_json::from_str(&out)
            .unwrap_or_else(|error| panic!("longhorn {}: {error}: {out}", args.join(" ")))
    }

    pub fn info(&self) -> Value {
        self.json(&["info"])
    }

    pub fn ls(&self) -> Vec<Listed> {
        let out = self.cli(&["ls"]);
        out.lines()
            .skip(1)
            .map(|line| {
                let mut words = line.split_whitespace();
                let (url, mode) = (words.next().unwrap().into(), words.next().unwrap().into());
                let chain = words
                    .map(|word| word.trim_matches(['[', ']']).to_owned())
                    .filter(|word| !word.is_empty());
                Listed { url, mode, chain: chain.collect() }
            })
            .collect()
    }

    /// The mode of a replica, nothing if it is not in the list.
    pub fn mode(&self, replica: &Replica) -> Option<String> {
        self.ls().into_iter().find(|listed| listed.url == replica.url()).map(|listed| listed.mode)
    }

    /// All replicas of the list are in mode RW, and these are they.
    pub fn all_rw(&self, replicas: &[&Replica]) {
        let listed = self.ls();
        assert!(listed.iter().all(|replica| replica.mode == "RW"), "{listed:?}");
        let mut urls = listed.iter().map(|replica| replica.url.clone()).collect::<Vec<_>>();
        let mut expected = replicas.iter().map(|replica| replica.url()).collect::<Vec<_>>();
        urls.sort();
        expected.sort();
        assert_eq!(urls, expected);
    }

    pub fn wait_for_mode(&self, replica: &Replica, mode: &str) {
        eventually(&format!("{} is {mode}", replica.name()), || {
            self.mode(replica).as_deref() == Some(mode)
        });
    }

    pub fn snapshot(&self, name: &str) {
        assert_eq!(self.cli(&["snapshot", "create", name]).trim(), name);
    }

    /// `snapshot ls`, newest first.
    pub fn snapshots(&self) -> Vec<String> {
        self.cli(&["snapshot", "ls"]).lines().skip(1).map(|line| line.trim().to_owned()).collect()
    }

    /// `snapshot info`.
    pub fn tree(&self) -> BTreeMap<String, Value> {
        serde_json::from_value(self.json(&["snapshot", "info"])).unwrap()
    }

    pub fn remove_snapshot(&self, name: &str) {
        self.cli(&["snapshot", "rm", name]);
    }

    /// Purges, and waits for the end of it on every replica.
    pub fn purge(&self) {
        self.cli(&["snapshot", "purge"]);
        self.settled("purge", &["snapshot", "purge-status"], |status| status["isPurging"] == false);
    }

    /// Polls a status by replica until each is over, which must be without an error.
    fn settled(&self, what: &str, command: &[&str], over: impl Fn(&Value) -> bool) {
        eventually_within(Duration::from_secs(60), what, || {
            let status = self.json(command);
            let all = status.as_object().unwrap().values();
            for each in all.clone() {
                assert_eq!(each["error"], "", "{what}: {status}");
            }
            all.clone().all(&over)
        });
    }

    /// Rolls the volume back, which the frontend must not see.
    pub fn revert(&self, snapshot: &str) {
        self.cli(&["frontend", "shutdown"]);
        self.cli(&["snapshot", "revert", snapshot]);
        self.cli(&["frontend", "start", "socket"]);
    }

    /// The checksum of a snapshot's layer on each replica, which must be one.
    pub fn hash(&self, snapshot: &str) -> String {
        self.cli(&["snapshot", "hash", "--rehash", snapshot]);
        let command = ["snapshot", "hash-status", snapshot];
        let mut sums = Vec::new();
        eventually_within(Duration::from_secs(60), "the hash job", || {
            let status = self.json(&command);
            // Right after the start a stock replica may not know its own job.
            let complete =
                status.as_object().unwrap().values().all(|each| each["state"] == "complete");
            sums = status
                .as_object()
                .unwrap()
                .values()
                .map(|each| each["checksum"].to_string())
                .collect();
            complete
        });
        let first = sums.first().expect("a replica").clone();
        assert_eq!(first.len(), 18, "sixteen digits and the quotes: {first}");
        assert!(
            sums.iter().all(|sum| *sum == first),
            "snapshot {snapshot} differs: {sums:?}\n{:?}",
            self.ls()
        );
        first
    }

    /// Rebuilds a replica; it is RW afterwards.
    pub fn add_replica(&self, replica: &Replica, fast_sync: bool) {
        self.try_add_replica(replica, fast_sync)
            .unwrap_or_else(|text| panic!("rebuild of {}: {text}", replica.name()));
        assert_eq!(self.mode(replica).as_deref(), Some("RW"), "{:?}", self.ls());
        let get = replica.rpc().get();
        assert!(!get.rebuilding, "{get:?}");
    }

    pub fn try_add_replica(&self, replica: &Replica, fast_sync: bool) -> Result<String, String> {
        let (url, size) = (replica.url(), self.size.to_string());
        let mut args = vec!["add-replica", &url, "--size", &size, "--current-size", &size];
        args.extend([
            "--file-sync-http-client-timeout",
            "30",
            "--replica-instance-name",
            replica.name(),
        ]);
        if fast_sync {
            args.push("--fast-sync");
        }
        self.try_cli(&args)
    }

    pub fn remove_replica(&self, replica: &Replica) {
        self.cli(&["rm-replica", &replica.url()]);
        assert_eq!(self.mode(replica), None);
    }

    /// Makes the volume larger; it must have no frontend.
    pub fn expand(&mut self, size: usize) {
        self.cli(&["expand", "--size", &size.to_string()]);
        eventually("the expansion is over", || {
            let info = self.info();
            assert_eq!(info["lastExpansionError"], "", "{info}");
            info["isExpanding"] == false && info["size"] == size
        });
        self.size = size;
    }

    /// Fills this volume, which must have no frontend, with another's snapshot.
    pub fn clone_from(&self, source: &Engine, snapshot: &str) {
        let (url, name) = (source.url(), source.volume());
        let from = ["--from-controller-address", &url, "--from-volume-name", name];
        let args = [&["snapshot", "clone", "--snapshot-name", snapshot], &from[..]].concat();
        self.cli(&args);
        self.settled("clone", &["snapshot", "clone-status"], |status| {
            status["state"] == "complete"
        });
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Orderly: it closes its replicas.
    pub fn stop(mut self) {
        self.process.stop(Signal::SIGINT);
    }

    /// Without a word to its replicas.
    pub fn kill(mut self) {
        self.process.stop(Signal::SIGKILL);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.frontend == Frontend::Socket {
            let _ = std::fs::remove_file(socket_of(&self.volume));
        }
    }
}
