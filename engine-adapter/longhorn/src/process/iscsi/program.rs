//! Running programs of the system, each for a limited time.

use dbs_core::{Error, ErrorKind};
use dbs_service::log;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How much of a program's output is read.
const OUTPUT_MAX: u64 = 4 << 20;
const POLL: Duration = Duration::from_millis(10);
/// How long the end of a program that was killed is waited for.
const KILLED: Duration = Duration::from_secs(2);

/// Why a program did not do what it should.
#[derive(Debug)]
pub(super) enum Why {
    /// There is none of this name.
    Missing,
    /// It was not done in its time, and was killed; without any, it was not begun.
    Slow(Duration),
    /// It ended with this code; `None` if a signal ended it.
    Exited(Option<i32>),
    /// It could not be started.
    NotStarted(io::Error),
}

/// A program that failed.
#[derive(Debug)]
pub(super) struct Failure {
    /// With its arguments.
    pub command: String,
    pub why: Why,
    /// What it printed.
    pub said: String,
}

impl Failure {
    /// Whether it printed this.
    pub fn said(&self, text: &str) -> bool {
        self.said.contains(text)
    }

    /// Whether it ended with this code.
    pub fn exited(&self, code: i32) -> bool {
        matches!(self.why, Why::Exited(Some(other)) if other == code)
    }

    /// One that there is too little time for.
    pub fn not_begun(program: &str, args: &[&str]) -> Self {
        let said = "there is no time left to begin it".to_owned();
        Self { command: named(program, args), why: Why::Slow(Duration::ZERO), said }
    }

    /// Whether it was not done in its time.
    pub fn is_slow(&self) -> bool {
        matches!(self.why, Why::Slow(_))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ", self.command)?;
        match &self.why {
            Why::Missing => f.write_str("was not run: there is no such program in PATH")?,
            Why::Slow(limit) if limit.is_zero() => f.write_str("was not run")?,
            Why::Slow(limit) => write!(f, "was not done in {} s and was killed", limit.as_secs())?,
            Why::Exited(Some(code)) => write!(f, "failed with exit code {code}")?,
            Why::Exited(None) => f.write_str("was killed")?,
            Why::NotStarted(error) => write!(f, "was not run: {error}")?,
        }
        let said = self.said.lines().map(str::trim).filter(|line| !line.is_empty());
        let said: Vec<_> = said.collect();
        if said.is_empty() { Ok(()) } else { write!(f, ": {}", said.join("; ")) }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let kind = match failure.why {
            Why::Missing => ErrorKind::Unsupported,
            Why::Slow(_) => ErrorKind::Busy,
            _ => ErrorKind::Io,
        };
        Self::new(kind, failure.to_string())
    }
}

/// Runs programs; tests have another one.
pub(super) trait Run: Send + Sync {
    /// Runs a program, for so long at most; answers with what it printed.
    ///
    /// # Errors
    /// It did not end with exit code 0, or not in time.
    fn run(&self, program: &str, args: &[&str], limit: Duration) -> Result<String, Failure>;

    /// Starts a program that goes on, also when this process ends. What it prints goes to a file.
    ///
    /// # Errors
    /// There is no such program.
    fn start(&self, program: &str, args: &[&str], output: &Path) -> Result<(), Failure>;

    /// What time it is.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Waits.
    fn sleep(&self, time: Duration) {
        thread::sleep(time);
    }
}

/// The programs of this machine.
pub(super) struct System;

impl Run for System {
    fn run(&self, program: &str, args: &[&str], limit: Duration) -> Result<String, Failure> {
        let failure = |why, said| Failure { command: named(program, args), why, said };
        // A file and no pipe: a program that leaves another one running keeps nobody waiting.
        let output = memfd_create(c"output", MFdFlags::MFD_CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|fd| Ok((fd.try_clone()?, fd.try_clone()?, File::from(fd))));
        let (out, err, mut output) =
            output.map_err(|e| failure(Why::NotStarted(e), String::new()))?;
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        let mut child = command.spawn().map_err(|e| failure(not_started(e), String::new()))?;
        let ended = wait(&mut child, limit);
        if !matches!(ended, Ok(Some(_))) {
            kill(&mut child);
        }
        let mut said = Vec::new();
        // What cannot be read was not said.
        let _ =
            output.rewind().and_then(|()| (&mut output).take(OUTPUT_MAX).read_to_end(&mut said));
        let said = String::from_utf8_lossy(&said).into_owned();
        match ended {
            Ok(Some(status)) if status.success() => Ok(said),
            Ok(Some(status)) => Err(failure(Why::Exited(status.code()), said)),
            Ok(None) => Err(failure(Why::Slow(limit), said)),
            Err(error) => Err(failure(Why::NotStarted(error), said)),
        }
    }

    fn start(&self, program: &str, args: &[&str], output: &Path) -> Result<(), Failure> {
        let failure = |why| Failure { command: named(program, args), why, said: String::new() };
        let opened = fs::OpenOptions::new().append(true).create(true).open(output);
        let output = opened.and_then(|out| Ok((out.try_clone()?, out)));
        let (out, err) = match output {
            Ok((out, err)) => (out.into(), err.into()),
            Err(_) => (Stdio::null(), Stdio::null()),
        };
        let mut command = Command::new(program);
        // What ends this process is not to end that one.
        command.args(args).stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        let mut child = command.spawn().map_err(|e| failure(not_started(e)))?;
        let name = program.to_owned();
        let reaper = move || {
            let ended = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
            log::warn("ended", &[("program", &name), ("how", &ended)]);
        };
        // Without it, it stays as a zombie until this process ends.
        let _ = thread::Builder::new().name("reaper".to_owned()).spawn(reaper);
        Ok(())
    }
}

fn named(program: &str, args: &[&str]) -> String {
    [&[program], args].concat().join(" ")
}

fn not_started(error: io::Error) -> Why {
    match error.kind() {
        io::ErrorKind::NotFound => Why::Missing,
        _ => Why::NotStarted(error),
    }
}

fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => thread::sleep(POLL),
            ended => return Ok(ended),
        }
    }
}

/// Kills a program with all that it started. One that hangs in the kernel is left to itself.
fn kill(child: &mut Child) {
    if let Ok(group) = i32::try_from(child.id()) {
        // It may have ended by itself.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    let _ = wait(child, KILLED);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_a_program_prints_and_how_it_ends() {
        let sh = |script: &str, limit| System.run("sh", &["-c", script], limit);
        assert_eq!(sh("echo a; echo b >&2", LONG).unwrap(), "a\nb\n");
        let failed = sh("echo 'no such target' >&2; exit 21", LONG).unwrap_err();
        assert!(failed.exited(21) && failed.said("such"), "{failed}");
        assert!(
            failed.to_string().ends_with("failed with exit code 21: no such target"),
            "{failed}"
        );
        let missing = System.run("no-such-program", &["x"], LONG).unwrap_err();
        assert!(matches!(missing.why, Why::Missing), "{missing}");
        let missing = Error::from(missing);
        assert_eq!(missing.kind(), ErrorKind::Unsupported);
        assert!(missing.to_string().contains("`no-such-program x`"), "{missing}");
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_what_it_started() {
        let begun = Instant::now();
        let script = "echo $$; sleep 1000 & echo begun; wait";
        let limit = Duration::from_millis(300);
        let failed = System.run("sh", &["-c", script], limit).unwrap_err();
        assert!(failed.is_slow() && failed.said("begun"), "{failed}");
        assert!(begun.elapsed() < LONG);
        let group = failed.said.lines().next().unwrap().parse().unwrap();
        let deadline = Instant::now() + LONG;
        // Its child has no parent but init, which may take its time.
        while killpg(Pid::from_raw(group), None).is_ok() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        // A process that is left running keeps nobody waiting, as nobody waits for the end of the output.
        assert_eq!(System.run("sh", &["-c", "sleep 2 & echo x"], LONG).unwrap(), "x\n");
        assert!(begun.elapsed() < LONG);
    }
}
