//! How far a long command is, on one line of the terminal, and the way to stop it.

use crate::output::printable;
use crate::signals::endings;
use dbs_core::{Error, ErrorKind, Result, format_size};
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two drawings.
const INTERVAL: Duration = Duration::from_millis(200);

/// What the numbers of a progress line count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown with a rate.
    Bytes,
    /// Extents or steps of work.
    Steps,
}

/// A stop asked for by the user; see [`Stop::on_signals`].
#[derive(Debug, Clone, Default)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    watching: Arc<AtomicBool>,
}

impl Stop {
    /// From the first SIGINT, SIGTERM or SIGHUP on, says so; the second ends the process, unless it is a SIGHUP: of a
    /// lost terminal both the kernel and the shell tell. Until this is called a signal ends it at once, which is right
    /// for commands that take no time.
    ///
    /// # Errors
    /// `Io`.
    pub fn on_signals(&self) -> Result<()> {
        use signal_hook::consts::SIGHUP;
        use signal_hook::flag;
        if self.watching.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let code = i32::from(crate::exit::INTERRUPTED);
        for signal in endings() {
            let failed = |e| Error::io(e, "watching for signals");
            if signal != SIGHUP {
                flag::register_conditional_shutdown(signal, code, Arc::clone(&self.asked))
                    .map_err(failed)?;
            }
            flag::register(signal, Arc::clone(&self.asked)).map_err(failed)?;
        }
        Ok(())
    }

    /// An error of a transfer: that of a pipe which failed since it was stopped says so.
    pub fn explain(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Io if self.asked() => Error::new(ErrorKind::Interrupted, error.to_string()),
            _ => error,
        }
    }

    /// Whether to stop.
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }
}

/// A progress line. Dropping it removes the line.
pub struct Meter {
    label: String,
    unit: Unit,
    shown: bool,
    stop: Stop,
    begun: Instant,
    drawn: Option<Instant>,
    /// Progress before this run, which does not count for the rate.
    first: Option<u64>,
}

impl Meter {
    /// A line that begins with `label`; nothing is drawn unless `wanted`, or undecided (`None`) on
    /// a terminal.
    pub fn new(label: &str, unit: Unit, wanted: Option<bool>, stop: &Stop) -> Self {
        Self {
            // Names in it may come from a file.
            label: printable(label),
            unit,
            shown: wanted.unwrap_or_else(|| io::stderr().is_terminal()),
            stop: stop.clone(),
            begun: Instant::now(),
            drawn: None,
            first: None,
        }
    }

    /// Takes the progress and says whether to go on: pass it to whatever reports progress.
    /// A total of 0 is unknown.
    pub fn update(&mut self, done: u64, total: u64) -> bool {
        let first = *self.first.get_or_insert(done);
        let begun = self.begun;
        let (label, unit) = (self.label.clone(), self.unit);
        self.say(|| line(&label, unit, done, total, first, begun.elapsed()))
    }

    /// As [`Meter::update`], with a line of the caller's own.
    pub fn say(&mut self, line: impl FnOnce() -> String) -> bool {
        let due = self.drawn.is_none_or(|drawn| drawn.elapsed() >= INTERVAL);
        if self.shown && due && self.begun.elapsed() >= INTERVAL {
            self.drawn = Some(Instant::now());
            // Progress nobody can see is no reason to stop.
            let _ = write!(io::stderr(), "\r\x1b[K{}", line());
        }
        !self.stop.asked()
    }

    /// Whether to go on, when there is no progress to tell.
    pub fn goes_on(&self) -> bool {
        !self.stop.asked()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if self.drawn.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(label: &str, unit: Unit, done: u64, total: u64, first: u64, took: Duration) -> String {
    let show = |n: u64| if unit == Unit::Bytes { format_size(n) } else { n.to_string() };
    let mut line = format!("{label}: {}", show(done));
    if total > 0 {
        let percent = (u128::from(done.min(total)) * 100 / u128::from(total)) as u64;
        line += &format!(" of {} ({percent} %)", show(total));
    }
    let rate = done.saturating_sub(first) as f64 / took.as_secs_f64().max(0.001);
    if rate >= 1.0 {
        line += &format!(", {}/s", show(rate as u64));
        if total > done {
            line += &format!(", {} left", left(((total - done) as f64 / rate) as u64));
        }
    }
    line
}

/// A time that something still takes.
pub fn left(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let second = Duration::from_secs(1);
        assert_eq!(
            line("importing", Unit::Bytes, 3 << 30, 4 << 30, 2 << 30, second),
            "importing: 3.0 GiB of 4.0 GiB (75 %), 1.0 GiB/s, 1 s left"
        );
        assert_eq!(line("freeing", Unit::Steps, 5, 0, 5, second), "freeing: 5");
    }

    #[test]
    fn names_in_it_do_not_move_the_cursor() {
        let meter = Meter::new("receiving v@\u{1b}[2J", Unit::Bytes, Some(false), &Stop::default());
        assert_eq!(meter.label, "receiving v@\u{fffd}[2J");
    }

    #[test]
    fn a_stop_ends_it() {
        let stop = Stop::default();
        let mut meter = Meter::new("x", Unit::Steps, Some(false), &stop);
        assert!(meter.update(1, 2) && meter.goes_on());
        stop.asked.store(true, Ordering::SeqCst);
        assert!(!meter.update(2, 2) && !meter.goes_on());
    }
}
