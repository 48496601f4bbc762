//! The machine a controller really runs on.

use super::Host;
use dbs_core::{Error, Result};
use dbs_server::log;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::sync::mpsc;
use std::time::Duration;

/// How long a `sync` may take; one that hangs on another volume does not keep this one from anything.
const SYNC_LIMIT: Duration = Duration::from_secs(30);

/// Clock, randomness and file systems of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Machine;

impl Host for Machine {
    fn now_ns(&self) -> u64 {
        crate::replica::time::now_ns()
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
    fn names_are_uuids_and_differ() {
        assert_eq!(uuid([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        let (a, b) = (Machine.unique_name(), Machine.unique_name());
        assert_eq!(a.len(), 36);
        assert_ne!(a, b);
        assert_eq!(a.as_bytes()[14], b'4');
    }
}
