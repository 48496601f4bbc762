//! Child processes that end with their owner, and an interruption that ends everything.

use crate::Outcome;
use dbs_bench::Cpu;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs::{File, read_to_string};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at a process.
const LOOK: Duration = Duration::from_millis(10);
/// How long a process may take to begin to listen, and to end when asked to.
const START: Duration = Duration::from_secs(300);
const END: Duration = Duration::from_secs(120);
/// Lines of a log that an error shows.
const LOG_LINES: usize = 5;

static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// From now on Ctrl-C and termination make [`check_interrupted`] fail instead of ending the
/// process, so that owners of processes and files can clean up.
///
/// # Errors
/// If signals cannot be watched.
pub fn catch_interrupts() -> Outcome<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // The second one ends the process where it is.
        let ended = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, ended, Arc::clone(&INTERRUPTED))?;
        signal_hook::flag::register(signal, Arc::clone(&INTERRUPTED))?;
    }
    Ok(())
}

/// How a measurement of this name ends its process, with a word about why it failed.
#[must_use]
pub fn exit(name: &str, outcome: Outcome<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Fails once the user has asked for the end.
///
/// # Errors
/// If so.
pub fn check_interrupted() -> Outcome<()> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err("interrupted".into()) } else { Ok(()) }
}

/// Sleeps, unless the user asks for the end.
///
/// # Errors
/// As [`check_interrupted`].
pub fn sleep(duration: Duration) -> Outcome<()> {
    let end = Instant::now() + duration;
    loop {
        check_interrupted()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(LOOK));
    }
}

/// Runs a command to its end and gives its standard output.
///
/// # Errors
/// If it cannot be started or fails; with what it said.
pub fn output(command: &mut Command) -> Outcome<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|e| format!("{name}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} failed ({}): {}", output.status, said.trim()).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A running process of ours. Dropped, it is asked to end, then killed.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Process {
    /// Starts a command; all it says goes to the file `log`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, mut command: Command, log: &Path) -> Outcome<Self> {
        let out = File::create(log)?;
        // A group of its own: Ctrl-C is for us, and we end it.
        command.process_group(0).stdin(Stdio::null()).stderr(out.try_clone()?).stdout(out);
        let child = command.spawn().map_err(|e| format!("{name}: cannot start: {e}"))?;
        Ok(Self { child, name: name.to_owned(), log: log.to_owned() })
    }

    /// Waits until it accepts connections.
    ///
    /// # Errors
    /// If it ends before, takes too long, or the user asks for the end.
    pub fn wait_listening(&mut self, socket: &Path) -> Outcome<()> {
        let end = Instant::now() + START;
        while UnixStream::connect(socket).is_err() {
            if let Some(status) = self.child.try_wait()? {
                return Err(self.failed(status));
            }
            if Instant::now() > end {
                return Err(format!("{} does not listen: {}", self.name, self.said()).into());
            }
            sleep(LOOK)?;
        }
        Ok(())
    }

    /// Waits for its end, at most until `deadline`.
    ///
    /// # Errors
    /// If it fails, takes longer, or the user asks for the end.
    pub fn wait(&mut self, deadline: Instant) -> Outcome<()> {
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.failed(status)),
                None if Instant::now() > deadline => {
                    return Err(format!("{} does not end", self.name).into());
                }
                None => sleep(LOOK)?,
            }
        }
    }

    /// Interrupts it, as Ctrl-C would, and waits for its end, however it ends.
    ///
    /// # Errors
    /// If it ended before and failed, or does not end.
    pub fn interrupt(&mut self) -> Outcome<()> {
        if let Some(status) = self.child.try_wait()? {
            return if status.success() { Ok(()) } else { Err(self.failed(status)) };
        }
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGINT)?;
        let end = Instant::now() + END;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > end {
                return Err(format!("{} does not end", self.name).into());
            }
            sleep(LOOK)?;
        }
        Ok(())
    }

    /// Seconds of CPU it used so far, all threads together.
    ///
    /// # Errors
    /// If it is gone.
    pub fn cpu_seconds(&self) -> Outcome<f64> {
        let used = Cpu::of(self.child.id()).and_then(|cpu| cpu.used());
        let used = used.ok_or_else(|| format!("no CPU time of {}", self.name))?;
        Ok(used.as_secs_f64())
    }

    /// Bytes of memory it holds now.
    #[must_use]
    pub fn resident(&self) -> u64 {
        crate::machine::resident_of(&self.child.id().to_string())[0]
    }

    fn failed(&self, status: ExitStatus) -> Box<dyn std::error::Error + Send + Sync> {
        format!("{} failed ({status}): {}", self.name, self.said()).into()
    }

    fn said(&self) -> String {
        let log = read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join(" / ")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Not reaped yet, so the id is still this process's.
        if let (Ok(None), Ok(id)) = (self.child.try_wait(), i32::try_from(self.child.id())) {
            let end = Instant::now() + END;
            let _ = kill(Pid::from_raw(id), Signal::SIGTERM);
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
                thread::sleep(LOOK);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
