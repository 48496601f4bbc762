//! The keys of hosts: who may connect, and what proves who it is.
//!
//! A key is written as `nvme gen-dhchap-key` does, after "DH-HMAC-CHAP Security Requirements" of the NVM Express Base
//! Specification: `DHHC-1:HH:BASE64:`, where HH says with which hash function the name of its owner is mixed in, and the last four bytes
//! are a CRC-32 of those before.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use dbs_core::{Error, Result};
use dbs_frontend::Listen;
use dbs_service::privileges::read_secret;
use ring::hmac;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Bytes of a file of keys at most: some thousands of hosts.
const FILE_MAX_BYTES: u64 = 1 << 20;
const CRC_BYTES: usize = 4;

/// A hash function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hash {
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl Hash {
    /// By its number, in messages and in keys.
    pub fn of(number: u8) -> Option<Self> {
        [Self::Sha256, Self::Sha384, Self::Sha512].into_iter().find(|hash| hash.number() == number)
    }

    /// Its number.
    pub fn number(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha384 => 2,
            Self::Sha512 => 3,
        }
    }

    /// Bytes of what it makes.
    pub fn bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    fn algorithm(self) -> hmac::Algorithm {
        match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        }
    }
}

/// A key.
pub struct Key {
    secret: Zeroizing<Vec<u8>>,
    mixed: Option<Hash>,
}

impl Key {
    fn parse(text: &str) -> std::result::Result<Self, &'static str> {
        let none = "no key: a key is DHHC-1:HH:BASE64:, as `nvme gen-dhchap-key` prints it";
        let rest = text.strip_prefix("DHHC-1:").and_then(|rest| rest.strip_suffix(':'));
        let (kind, digits) = rest.and_then(|rest| rest.split_once(':')).ok_or(none)?;
        let mixed = match kind {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err("a key of an unknown kind: known are 00 to 03"),
        };
        let mut secret = Zeroizing::new(STANDARD.decode(digits).map_err(|_| none)?);
        let length =
            secret.len().checked_sub(CRC_BYTES).filter(|length| matches!(length, 32 | 48 | 64));
        let length = length.ok_or("a key of another length than 32, 48 or 64 bytes")?;
        if mixed.is_some_and(|hash| hash.bytes() != length) {
            return Err("a key of another length than its hash function makes");
        }
        let crc = crc_fast::crc32_iso_hdlc(&secret[..length]).to_le_bytes();
        if secret[length..] != crc {
            return Err("a key with a wrong checksum: a character is missing or wrong");
        }
        secret.truncate(length);
        Ok(Self { secret, mixed })
    }

    /// The hash function that suits it.
    pub fn hash(&self) -> Hash {
        match self.secret.len() {
            48 => Hash::Sha384,
            64 => Hash::Sha512,
            _ => Hash::Sha256,
        }
    }

    /// What its owner, who has this name, authenticates messages with.
    pub fn of(&self, name: &str, hash: Hash) -> hmac::Key {
        let Some(mixed) = self.mixed else { return hmac::Key::new(hash.algorithm(), &self.secret) };
        let mut context = hmac::Context::with_key(&hmac::Key::new(mixed.algorithm(), &self.secret));
        context.update(name.as_bytes());
        context.update(b"NVMe-over-Fabrics");
        hmac::Key::new(hash.algorithm(), context.sign().as_ref())
    }
}

/// The keys of a host.
pub struct HostKeys {
    /// With which it proves who it is.
    pub host: Key,
    /// With which the controller does, if it is to.
    pub controller: Option<Key>,
}

/// The hosts that may connect.
pub struct Keys(BTreeMap<String, HostKeys>);

impl Keys {
    /// Those of a file: for each host a line with its name, its key, and maybe that of the controller. Lines that begin with
    /// `#` say nothing.
    ///
    /// # Errors
    /// `Invalid` if others than its owner may read the file, if it belongs to somebody else than the process's user and
    /// root, or if a line is wrong; `Io`.
    pub fn load(path: &Path) -> Result<Self> {
        let failed = |e| Error::io(e, format!("the file of keys {}", path.display()));
        // What is no file must not keep the server waiting for somebody who writes it.
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(nix::libc::O_NONBLOCK).open(path);
        let text = read_secret(&file.map_err(failed)?, path, "file of keys", FILE_MAX_BYTES + 1)?;
        let text = Zeroizing::new(text);
        let wrong =
            |what: String| Error::invalid(format!("the file of keys {}: {what}", path.display()));
        if text.len() as u64 > FILE_MAX_BYTES {
            return Err(wrong("it is too long".to_owned()));
        }
        Self::parse(&text).map_err(wrong)
    }

    /// As [`Keys::load`], of the text of such a file.
    ///
    /// # Errors
    /// What is wrong, said without what is written there.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let mut hosts = BTreeMap::new();
        for (line, number) in text.lines().zip(1..) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let at = |what: &str| format!("line {number}: {what}");
            let mut words = line.split_ascii_whitespace();
            let (Some(name), Some(key), controller, None) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                return Err(at("neither `HOSTNQN KEY` nor `HOSTNQN KEY CONTROLLERKEY`"));
            };
            if !name.starts_with("nqn.") {
                return Err(at("the name of a host begins with `nqn.`"));
            }
            let host = Key::parse(key).map_err(at)?;
            let controller = controller.map(Key::parse).transpose().map_err(at)?;
            if controller.as_ref().is_some_and(|controller| controller.secret == host.secret) {
                return Err(at("host and controller have the same key"));
            }
            if hosts.insert(name.to_owned(), HostKeys { host, controller }).is_some() {
                return Err(at("a host that has a line already"));
            }
        }
        if hosts.is_empty() {
            return Err("there is no host in it".to_owned());
        }
        Ok(Self(hosts))
    }

    /// Those of a host.
    pub(crate) fn of(&self, host: &str) -> Option<&HostKeys> {
        self.0.get(host)
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Where hosts come in, and which.
#[derive(Debug, Clone, Default)]
pub struct NvmeOptions {
    /// The addresses.
    pub listen: Vec<Listen>,
    /// The keys by which hosts prove who they are; without them, each host of this machine is let in.
    pub keys: Option<Arc<Keys>>,
    /// Hosts of other machines are let in, too: what they send can be read and changed on its way.
    pub insecure_data: bool,
}

impl NvmeOptions {
    /// Those of this machine, at these addresses.
    #[must_use]
    pub fn at(listen: &[Listen]) -> Self {
        Self { listen: listen.to_vec(), ..Self::default() }
    }

    /// With keys from a file, if there is one.
    ///
    /// # Errors
    /// Those of [`Keys::load`].
    pub fn load(listen: Vec<Listen>, keys: Option<&Path>, insecure_data: bool) -> Result<Self> {
        let keys = keys.map(Keys::load).transpose()?.map(Arc::new);
        Ok(Self { listen, keys, insecure_data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(kind: u8, length: usize) -> String {
        let mut bytes: Vec<u8> = (0..length as u8).collect();
        bytes.extend(crc_fast::crc32_iso_hdlc(&bytes).to_le_bytes());
        format!("DHHC-1:{kind:02}:{}:", STANDARD.encode(bytes))
    }

    #[test]
    fn keys_are_those_of_the_specification_and_no_others() {
        for (kind, length) in [(0, 32), (0, 48), (0, 64), (1, 32), (2, 48), (3, 64)] {
            let key =
                Key::parse(&text(kind, length)).unwrap_or_else(|e| panic!("{kind} {length}: {e}"));
            assert_eq!((key.secret.len(), key.hash().bytes()), (length, length));
        }
        let good = text(1, 32);
        let at = good.find("AwQF").unwrap();
        let mut damaged = good.clone();
        damaged.replace_range(at..=at, "B");
        for wrong in [
            "",
            "DHHC-1:",
            "DHHC-1:00::",
            "key",
            &damaged,
            &good[..good.len() - 1],
            &good[1..],
            &text(0, 31),
            &text(0, 33),
            &text(1, 48),
            &text(3, 32),
            &text(4, 32),
            &good.replace("DHHC-1:01", "DHHC-1:1"),
        ] {
            assert!(Key::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_names_each_host_once_and_what_is_wrong_is_said_without_secrets() {
        let (one, two) = (text(0, 32), text(2, 48));
        let keys = Keys::parse(&format!("# hosts\n\nnqn.a {one}\n  nqn.b\t{one} {two}\n")).unwrap();
        assert!(keys.of("nqn.a").unwrap().controller.is_none());
        assert!(keys.of("nqn.b").unwrap().controller.is_some());
        assert!(keys.of("nqn.c").is_none());
        assert_eq!(format!("{keys:?}"), r#"{"nqn.a", "nqn.b"}"#);
        for (wrong, said) in [
            (String::new(), "no host"),
            ("nqn.a".to_owned(), "line 1"),
            (format!("nqn.a {one} {two} x"), "line 1"),
            (format!("#\na {one}"), "line 2: the name"),
            (format!("nqn.a {one}\nnqn.a {two}"), "line 2: a host that has"),
            (format!("nqn.a {one} {one}"), "the same key"),
            (format!("nqn.a x{one}"), "no key"),
        ] {
            let error = Keys::parse(&wrong).unwrap_err();
            assert!(error.contains(said) && !error.contains(&one[10..]), "{error}");
        }
    }

    /// The key as the host mixes it, computed step by step: HMAC is two hashes of the key, padded, and the text.
    #[test]
    fn the_name_is_mixed_into_the_key() {
        let key = Key::parse(&text(1, 32)).unwrap();
        let secret: Vec<u8> = (0..32).collect();
        let hash = |parts: &[&[u8]]| {
            ring::digest::digest(&ring::digest::SHA256, &parts.concat()).as_ref().to_vec()
        };
        let hmac = |secret: &[u8], text: &[u8]| {
            let pad = |with: u8| -> Vec<u8> {
                (0..64).map(|at| secret.get(at).copied().unwrap_or(0) ^ with).collect()
            };
            hash(&[&pad(0x5c), &hash(&[&pad(0x36), text])])
        };
        let mixed = hmac(&secret, b"nqn.aNVMe-over-Fabrics");
        let tag = hmac::sign(&key.of("nqn.a", Hash::Sha256), b"text");
        assert_eq!(tag.as_ref(), hmac(&mixed, b"text"));
        assert_ne!(hmac::sign(&key.of("nqn.b", Hash::Sha256), b"text").as_ref(), tag.as_ref());
        let plain = Key::parse(&text(0, 32)).unwrap().of("nqn.a", Hash::Sha256);
        assert_eq!(hmac::sign(&plain, b"text").as_ref(), hmac(&secret, b"text"));
    }
}
