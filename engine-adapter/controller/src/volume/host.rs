//! The machine a controller really runs on.

use super::{Host, Paused};
use dbs_core::{Error, Result};
use dbs_service::log;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How long a `sync` may take; one that hangs on another volume does not keep this one from anything.
const SYNC_LIMIT: Duration = Duration::from_secs(30);

/// How long freezing may take: what is in memory is to be written.
const FREEZE_LIMIT: Duration = Duration::from_secs(20);
/// How long file systems stay frozen at most; a snapshot takes less, or has gone wrong.
const FREEZE_MAX: Duration = Duration::from_secs(30);
/// How long thawing is waited for.
const THAW_LIMIT: Duration = Duration::from_secs(5);

/// Clock, randomness and file systems of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Machine;

impl Host for Machine {
    fn now_ns(&self) -> u64 {
        longhorn_wire::time::now_ns()
    }

    fn unique_name(&self) -> String {
        let mut bytes = [0; 16];
        if SystemRandom::new().fill(&mut bytes).is_err() {
            // No randomness: the time is unique as long as nobody asks twice within a nanosecond.
            bytes[8..].copy_from_slice(&self.now_ns().to_be_bytes());
        }
        uuid(bytes)
    }

    fn log(&self, error: bool, event: &str, fields: &[(&str, &dyn fmt::Display)]) {
        match error {
            true => log::error(event, fields),
            false => log::warn(event, fields),
        }
    }

    /// `sync(2)` reaches the file systems of all mount namespaces.
    fn sync(&self) -> Result<()> {
        let (done, wait) = mpsc::channel();
        let thread = std::thread::Builder::new().name("controller-sync".to_owned());
        let spawned = thread.spawn(move || {
            nix::unistd::sync();
            // Nobody may be waiting any more.
            let _ = done.send(());
        });
        spawned.map_err(|error| Error::io(error, "starting a thread"))?;
        wait.recv_timeout(SYNC_LIMIT)
            .map_err(|_| Error::busy(format!("sync took longer than {SYNC_LIMIT:?}")))
    }

    fn freeze(&self, device: &str) -> Result<Option<Box<dyn Paused>>> {
        if !std::fs::metadata(device).is_ok_and(|at| at.file_type().is_block_device()) {
            return Ok(None);
        }
        freeze(device)
    }
}

/// File systems that a thread of their own keeps frozen, and thaws in any case.
struct Freeze {
    /// Dropped to have them thawed.
    end: Option<mpsc::Sender<()>>,
    thawed: mpsc::Receiver<()>,
}

impl Paused for Freeze {
    fn holds(&self) -> bool {
        self.thawed.try_recv() == Err(mpsc::TryRecvError::Empty)
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        self.end = None;
        // Its end comes as the end of the channel.
        let _ = self.thawed.recv_timeout(THAW_LIMIT);
    }
}

/// Freezes what is on a device on a thread that thaws it when it is told to, when whoever should tell is
/// gone, and when it has been frozen for too long: writing what a file system has in memory may take as
/// long as it likes, and whoever waits for this may be hung up on that very file system.
fn freeze(device: &str) -> Result<Option<Box<dyn Paused>>> {
    let (said, frozen) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let (thaw, thawed) = mpsc::channel::<()>();
    let path = Path::new(device).to_owned();
    let keep = move || {
        let (all, outcome) = match dbs_core::io::freeze::freeze(&path) {
            Ok(all) => {
                let some = !all.is_empty();
                (all, Ok(some))
            }
            Err(error) => (Vec::new(), Err(error)),
        };
        if said.send(outcome).is_ok()
            && ended.recv_timeout(FREEZE_MAX) == Err(RecvTimeoutError::Timeout)
        {
            // Before they are: nobody is to take them for frozen.
            drop(thaw);
            drop(all);
            let seconds = FREEZE_MAX.as_secs();
            log::warn("thawed", &[("device", &path.display()), ("seconds", &seconds)]);
            return;
        }
        drop(all);
        drop(thaw);
    };
    let thread = std::thread::Builder::new().name("controller-freeze".to_owned());
    thread.spawn(keep).map_err(|error| Error::io(error, "starting a thread"))?;
    match frozen.recv_timeout(FREEZE_LIMIT) {
        Ok(Ok(true)) => Ok(Some(Box::new(Freeze { end: Some(end), thawed }))),
        Ok(Ok(false)) => Ok(None),
        Ok(Err(error)) => Err(error),
        // Once they are frozen, they are thawed at once: nobody listens any more.
        Err(_) => Err(Error::busy(format!("freezing takes longer than {FREEZE_LIMIT:?}"))),
    }
}

/// These bytes as a version 4 UUID (RFC 9562).
fn uuid(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_block_device_has_nothing_to_freeze() {
        for endpoint in ["", "/dev/null", "/dev/longhorn/none", "/"] {
            assert!(Machine.freeze(endpoint).unwrap().is_none(), "{endpoint}");
        }
        // There is one, but the guard's thread says what is wrong with it, and is gone.
        let error = freeze("/dev/null").err().unwrap();
        assert!(error.to_string().contains("no block device"), "{error}");
    }

    #[test]
    fn names_are_uuids_and_differ() {
        assert_eq!(uuid([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        let (a, b) = (Machine.unique_name(), Machine.unique_name());
        assert_eq!(a.len(), 36);
        assert_ne!(a, b);
        assert_eq!(a.as_bytes()[14], b'4');
    }
}
