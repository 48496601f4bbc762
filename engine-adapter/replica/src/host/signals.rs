//! SIGINT, SIGTERM and SIGHUP end a process in good order; a second one ends it at once, which
//! loses nothing either.

use dbs_core::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::mpsc;
use std::thread;

/// Exit code of a process that a second signal ended.
const INTERRUPTED: i32 = 130;

/// Tells of the first signal on a channel. To be called before anything is opened.
///
/// # Errors
/// `Io` if signals cannot be watched.
pub fn watch() -> Result<mpsc::Receiver<i32>> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|e| Error::io(e, "watching for signals"))?;
    let (first, told) = mpsc::channel();
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let mut signals = signals.forever();
            if let Some(signal) = signals.next() {
                // An error: the process is about to end.
                let _ended = first.send(signal);
            }
            if signals.next().is_some() {
                std::process::exit(INTERRUPTED);
            }
        })
        .map_err(|e| Error::io(e, "starting the signal thread"))?;
    Ok(told)
}
