//! Running `dbs` in a directory of its own.
#![allow(dead_code, clippy::unwrap_used)]

use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A directory with a store (once made) and a runtime directory.
pub struct Place {
    pub dir: tempfile::TempDir,
}

/// How a run ended.
pub struct Run {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Place {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn store(&self) -> PathBuf {
        self.path("store.dbs")
    }

    /// `dbs` without a store named.
    pub fn bare(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dbs"));
        command
            .env_clear()
            .env("DBS_RUNTIME_DIR", self.path("run"))
            .env("TZ", "UTC")
            .stdin(Stdio::null())
            .current_dir(self.dir.path());
        command
    }

    /// Runs `dbs` on the store, with arguments separated by blanks.
    pub fn dbs(&self, args: &str) -> Run {
        run(self.bare().env("DBS_STORE", self.store()).args(args.split_whitespace()))
    }

    /// As [`Place::dbs`], which must succeed; the JSON it prints.
    pub fn json(&self, args: &str) -> Value {
        self.dbs(&format!("--json {args}")).ok(args).json()
    }

    /// As [`Place::dbs`], with input.
    pub fn pipe(&self, args: &str, input: &[u8]) -> Run {
        let mut child = self
            .bare()
            .env("DBS_STORE", self.store())
            .args(args.split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        // A command that takes nothing closes its end early.
        let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        Run::new(output)
    }

    pub fn init(&self) {
        self.dbs("init store.dbs --size 256MiB").ok("init");
    }

    /// A place with a store.
    pub fn with_store() -> Self {
        let place = Self::new();
        place.init();
        place
    }

    /// Serves the store until the result is stopped or dropped.
    pub fn serve(&self, args: &str) -> Served {
        let mut command = self.bare();
        command.env("DBS_STORE", self.store()).args(["--json", "serve"]);
        self.served(command.args(args.split_whitespace()))
    }

    /// As [`Place::serve`], by a command of the caller's.
    pub fn served(&self, command: &mut Command) -> Served {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = child.stderr.take().unwrap();
        let log = std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).collect::<Vec<_>>().join("\n")
        });
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        // A pretty-printed object: up to the brace that closes it.
        while stdout.read_line(&mut text).unwrap() > 0 && !text.ends_with("\n}\n") {}
        let ready = serde_json::from_str(&text).unwrap_or(Value::Null);
        let mut served = Served { child: Some(child), log: Some(log), ready };
        if served.ready.is_null() {
            let (code, log) = served.end();
            panic!("dbs serve did not get ready: {code:?}\n{log}");
        }
        served
    }
}

/// A running `dbs serve`.
pub struct Served {
    child: Option<Child>,
    log: Option<std::thread::JoinHandle<String>>,
    /// What it printed when it was ready.
    pub ready: Value,
}

impl Served {
    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// SIGTERM; its exit code and log.
    pub fn stop(mut self) -> (Option<i32>, String) {
        self.signal("TERM");
        self.end()
    }

    /// SIGABRT, as if it had crashed; how it ended.
    pub fn crash(mut self) -> ExitStatus {
        self.signal("ABRT");
        self.end_status().0
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ended_already = child.kill();
            let _ended = child.wait();
        }
    }

    /// Waits until it ends by itself; its exit code and log.
    pub fn ended(mut self) -> (Option<i32>, String) {
        self.end()
    }

    fn end(&mut self) -> (Option<i32>, String) {
        let (status, log) = self.end_status();
        (status.code(), log)
    }

    fn end_status(&mut self) -> (ExitStatus, String) {
        let mut child = self.child.take().unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if Instant::now() > deadline => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let log = self.log.take().unwrap().join().unwrap();
        (status.expect("dbs serve did not end in time"), log)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether views can be mounted here; says what is missing.
pub fn can_mount() -> bool {
    let missing = if !Path::new("/dev/fuse").exists() {
        "/dev/fuse"
    } else if !nix::unistd::geteuid().is_root() {
        "root"
    } else {
        return true;
    };
    println!("SKIPPED dbs mount: needs {missing}");
    false
}

/// Whether what is started here ignores SIGHUP; says so.
pub fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let is_ignored = u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 1;
    if is_ignored {
        println!("SKIPPED a hangup: SIGHUP is ignored here, as below nohup");
    }
    is_ignored
}

pub fn run(command: &mut Command) -> Run {
    Run::new(command.output().unwrap())
}

impl Run {
    pub fn new(output: std::process::Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.stdout)
            .unwrap_or_else(|e| panic!("{e} in {}\n{}", self.text(), self.stderr))
    }

    #[track_caller]
    pub fn ok(self, what: &str) -> Self {
        self.exits(0, what)
    }

    #[track_caller]
    pub fn exits(self, code: i32, what: &str) -> Self {
        assert_eq!(self.code, code, "{what}\n{}\n{}", self.text(), self.stderr);
        assert!(!self.stderr.contains("panicked"), "{what}\n{}", self.stderr);
        self
    }
}

/// Bytes that differ from each other, and by seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..length.div_ceil(8)).flat_map(|_| step().to_le_bytes()).take(length).collect()
}

/// All files of a directory by name.
pub fn listing(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
