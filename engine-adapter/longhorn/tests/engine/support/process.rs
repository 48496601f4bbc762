//! Programs run for a test: output to a log, ended with it however it ends.

use super::eventually_within;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// A running program, in a process group of its own.
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts `program`; what it prints is added to `log`.
    pub fn start(name: &str, mut command: Command, log: &Path) -> Self {
        let file = File::options().create(true).append(true).open(log).unwrap();
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .process_group(0);
        let child =
            command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        Self { child, name: name.into(), log: log.into(), ended: None }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    /// How it ended, or nothing as long as it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() && self.is_over() {
            // As long as the zombie is there, the group's id is nobody else's: children end with it.
            let _ = killpg(self.pid(), Signal::SIGKILL);
            self.ended = Some(self.child.wait().unwrap());
        }
        self.ended
    }

    fn is_over(&self) -> bool {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        stat.rsplit(')')
            .next()
            .is_none_or(|rest| rest.trim_start().starts_with(['Z', 'X']) || rest.is_empty())
    }

    /// Sends a signal to the program alone, not to its children.
    pub fn signal(&self, signal: Signal) {
        assert!(self.ended.is_none(), "{} has ended already", self.name);
        kill(self.pid(), signal).unwrap();
    }

    /// Sends a signal and waits for the end.
    pub fn stop(&mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        let name = format!("{} ends after {signal}", self.name);
        eventually_within(Duration::from_secs(20), &name, || self.is_over());
        self.ended().unwrap()
    }

    /// The end of what it printed.
    pub fn tail(&self, lines: usize) -> String {
        let log =
            String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned();
        let all = log.lines().collect::<Vec<_>>();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended.is_none() {
            let _ = killpg(self.pid(), Signal::SIGKILL);
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("---- the end of {}'s log\n{}", self.name, self.tail(25));
        }
    }
}

/// A command that the kernel ends when the thread that started it ends, where `setpriv` is there to ask for it.
pub fn dying_with_us(program: &Path) -> Command {
    let setpriv = Path::new("/usr/bin/setpriv");
    if setpriv.exists() {
        let mut command = Command::new(setpriv);
        command.args(["--pdeathsig", "KILL", "--"]).arg(program);
        command
    } else {
        Command::new(program)
    }
}

/// Runs a command to its end, which must come within `limit`: whether it succeeded, its output, its errors.
pub fn output_within(limit: Duration, command: Command, scratch: &Path) -> (bool, String, String) {
    let (status, out, err) = run_within(limit, command, scratch);
    (status.success(), out, err)
}

/// The same with how it ended.
pub fn run_within(
    limit: Duration,
    mut command: Command,
    scratch: &Path,
) -> (ExitStatus, String, String) {
    let out = tempfile::NamedTempFile::new_in(scratch).unwrap();
    let err = tempfile::NamedTempFile::new_in(scratch).unwrap();
    command
        .stdin(Stdio::null())
        .stdout(out.reopen().unwrap())
        .stderr(err.reopen().unwrap())
        .process_group(0);
    let mut child = command.spawn().unwrap();
    let deadline = std::time::Instant::now() + limit;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if std::time::Instant::now() > deadline => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    let (out, err) = (text(out.path()), text(err.path()));
    let status =
        status.unwrap_or_else(|| panic!("{command:?} took longer than {limit:?}\n{out}\n{err}"));
    (status, out, err)
}
