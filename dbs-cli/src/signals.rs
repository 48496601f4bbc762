//! The signals that end a command in good order.

use dbs_core::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::sync::Arc;

/// What a user, a service manager and a terminal that was lost send: SIGINT, SIGTERM and SIGHUP. Without SIGHUP where
/// it is ignored, as below `nohup`.
pub fn endings() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let hangup = (!is_ignored(&status, SIGHUP)).then_some(SIGHUP);
    [SIGINT, SIGTERM].into_iter().chain(hangup).collect()
}

/// A write beyond the limit for the size of a file (`ulimit -f`, `LimitFSIZE=`) is an error like that of a full disk. Its signal
/// would end a server, with all its clients, at each try of one of them.
pub fn outlive_file_limit() {
    // Without it the signal ends the process, as it does by default.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// Watches for them.
///
/// # Errors
/// `Io`.
pub fn watch() -> Result<Signals> {
    Signals::new(endings()).map_err(|e| Error::io(e, "watching for signals"))
}

/// A signal that has come. A hangup is none if one was seen before: of a lost terminal both the kernel and the shell
/// tell, and a second signal ends a command at once.
pub fn pending(signals: &mut Signals, seen: bool) -> Option<i32> {
    signals.pending().find(|signal| !(seen && *signal == SIGHUP))
}

/// Whether a process with this `/proc/PID/status` ignores a signal.
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_ignores() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, SIGHUP) && !is_ignored(status, SIGINT));
        assert!(!is_ignored("", SIGHUP));
    }
}
