//! The clock, the randomness and the boot of the running system.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

const BOOT_ID_PATH: &str = "/proc/sys/kernel/random/boot_id";

/// Source of time and identity, so that a simulation can repeat itself.
#[doc(hidden)]
pub trait Env: Send + Sync {
    /// Nanoseconds since the Unix epoch.
    fn now_ns(&self) -> u64;
    /// 16 random bytes.
    fn random(&self) -> [u8; 16];
    /// Random bytes that nobody can guess.
    ///
    /// # Errors
    /// `Io`, if there are none.
    fn secret(&self, bytes: &mut [u8]) -> Result<()> {
        getrandom::fill(bytes).map_err(|error| {
            Error::io(error.into(), "the kernel gives no random bytes (`getrandom`)")
        })
    }
    /// Identity of this boot.
    fn boot_id(&self) -> [u8; 16];
    /// Lets time go by.
    fn pause(&self, _time: Duration) {}
}

/// The real [`Env`].
#[derive(Debug)]
pub struct SystemEnv {
    boot_id: Option<[u8; 16]>,
    /// For the case that the kernel stops giving random bytes.
    seed: [u8; 16],
    count: AtomicU64,
}

impl SystemEnv {
    /// Asks the system for what does not change.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn new() -> Result<Self> {
        let mut seed = [0; 16];
        getrandom::fill(&mut seed).map_err(|error| {
            Error::io(error.into(), "the kernel gives no random bytes (`getrandom`)")
        })?;
        let boot_id = std::fs::read_to_string(BOOT_ID_PATH).ok();
        Ok(Self {
            boot_id: boot_id.and_then(|text| parse_uuid(text.trim())),
            seed,
            count: AtomicU64::new(0),
        })
    }

    /// Whether the system says which boot this is. Where it does not (some sandboxes hide it) a
    /// tail cannot be used: nobody could tell whether it is still valid.
    #[must_use]
    pub fn knows_boot(&self) -> bool {
        self.boot_id.is_some()
    }
}

impl Env for SystemEnv {
    fn now_ns(&self) -> u64 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    fn random(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        if getrandom::fill(&mut bytes).is_err() {
            // It worked before; what identity needs most is never to repeat.
            let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
            let unique = u128::from(self.now_ns()) << 64 | u128::from(count);
            bytes = (u128::from_le_bytes(self.seed) ^ unique).to_le_bytes();
        }
        bytes
    }

    /// All zeros where [`SystemEnv::knows_boot`] is false.
    fn boot_id(&self) -> [u8; 16] {
        self.boot_id.unwrap_or_default()
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// 16 bytes from 32 hexadecimal digits, with or without dashes.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|&c| c != '-').collect();
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_parse() {
        let bytes = parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!(bytes[..3], [0x00, 0x11, 0x22]);
        assert_eq!(bytes[15], 0xff);
        for text in
            ["", "0011", "+0112233-4455-6677-8899-aabbccddeeff", "zz112233445566778899aabbccddeeff"]
        {
            assert_eq!(parse_uuid(text), None, "{text}");
        }
    }

    #[test]
    fn the_system_has_time_identity_and_a_boot() {
        let env = SystemEnv::new().unwrap();
        assert!(env.now_ns() > 1_700_000_000_000_000_000);
        assert_ne!(env.random(), env.random());
        assert!(env.knows_boot());
        assert_ne!(env.boot_id(), [0; 16]);
        assert_eq!(env.boot_id(), SystemEnv::new().unwrap().boot_id());
    }
}
