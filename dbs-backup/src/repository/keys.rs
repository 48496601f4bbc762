//! Keys of a repository, and what they seal: sections 3 and 4 of `docs/repository.md`.

use super::Id;
use crate::names::{BlockName, hex};
use argon2::{Algorithm, Argon2, Params, Version};
pub use dbs_core::Secret;
use dbs_core::{Error, Result};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use serde::{Deserialize, Serialize};

/// What a sealed piece is longer than what is in it.
pub(super) const TAG: usize = 16;
/// Bytes of a header.
pub(super) const HEADER: usize = 48;
/// How every object begins.
const MAGIC: &[u8; 8] = b"dbs-repo";
/// The format.
pub(super) const VERSION: u16 = 1;
/// What each purpose's key is derived with.
const CONTEXT: &str = "dbs-repository v1 ";
/// RFC 9106, the choice for machines with little memory.
const MEMORY_KIB: u32 = 64 << 10;
const PASSES: u32 = 3;
const LANES: u32 = 4;
/// A hostile object must not take all memory.
const MEMORY_KIB_MAX: u32 = 1 << 20;
const PASSES_MAX: u32 = 16;
const LANES_MAX: u32 = 16;

/// 32 bytes that are a key.
pub(super) type Key = [u8; 32];

/// What kind of object it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Pack = 1,
    Index = 2,
    Manifest = 3,
    Condemned = 4,
    Clock = 5,
}

/// Random bytes.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::io(std::io::Error::other(e), "getting random bytes"))?;
    Ok(bytes)
}

/// The repository key and what follows from it.
pub(super) struct Keys {
    key: Key,
    repository: Id,
    pub is_encrypted: bool,
    chunk: Key,
    list: Key,
    name: Key,
}

impl Keys {
    pub fn new(key: Key, repository: Id, is_encrypted: bool) -> Self {
        let [chunk, list, name] = ["chunk", "list", "name"].map(|what| subkey(&key, what, &[]));
        Self { key, repository, is_encrypted, chunk, list, name }
    }

    /// The id of a chunk.
    pub fn chunk(&self, content: &[u8]) -> BlockName {
        BlockName::from_bytes(*blake3::keyed_hash(&self.chunk, content).as_bytes())
    }

    /// The id of a list.
    pub fn list(&self, content: &[u8]) -> BlockName {
        BlockName::from_bytes(*blake3::keyed_hash(&self.list, content).as_bytes())
    }

    /// What the name of a manifest has of these names.
    pub fn name(&self, parts: &[&str]) -> String {
        let digest = blake3::keyed_hash(&self.name, parts.join("\0").as_bytes());
        hex(&digest.as_bytes()[..16])
    }

    /// The check of a config.
    pub fn config_check(&self, line: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&subkey(&self.key, "config", &[]), line)
    }

    /// The repository key, wrapped with a further secret.
    ///
    /// # Errors
    /// `Io` without random bytes.
    pub fn wrap(&self, secret: &Secret) -> Result<Wrapped> {
        Wrapped::new(&self.key, self.repository, secret, false)
    }

    /// Whether a secret opens this wrapped key, and what is in it is the repository key.
    ///
    /// # Errors
    /// As [`Wrapped::unwrap_key`].
    pub fn are_in(&self, wrapped: &Wrapped, secret: &Secret) -> Result<bool> {
        if !wrapped.is_for(secret) {
            return Ok(false);
        }
        Ok(wrapped.unwrap_key(self.repository, secret)? == Some(self.key))
    }

    /// What seals the pieces of an object.
    pub fn object(&self, kind: Kind, id: Id) -> Sealer {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        header[8..10].copy_from_slice(&VERSION.to_le_bytes());
        header[10] = kind as u8;
        header[16..32].copy_from_slice(&self.repository.0);
        header[32..].copy_from_slice(&id.0);
        let extra = [&[kind as u8][..], &id.0].concat();
        let key = subkey(&self.key, "object", &extra);
        let key = match self.is_encrypted {
            true => SealKey::Cipher(Box::new(cipher(&key))),
            false => SealKey::Sum(key),
        };
        Sealer { header, key }
    }
}

fn subkey(key: &Key, purpose: &str, extra: &[u8]) -> Key {
    blake3::derive_key(&format!("{CONTEXT}{purpose}"), &[key, extra].concat())
}

fn cipher(key: &Key) -> LessSafeKey {
    #[allow(clippy::expect_used, reason = "a key of 32 bytes is what this cipher has")]
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("32 bytes"))
}

/// Seals the pieces of one object, and opens them.
pub(super) struct Sealer {
    pub header: [u8; HEADER],
    key: SealKey,
}

enum SealKey {
    Cipher(Box<LessSafeKey>),
    Sum(Key),
}

impl Sealer {
    /// Appends a piece.
    pub fn seal(&self, number: u64, plain: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(plain);
        let tag = match &self.key {
            SealKey::Sum(key) => self.sum(key, number, plain),
            SealKey::Cipher(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce(number));
                let sealed = key.seal_in_place_separate_tag(
                    nonce,
                    Aad::from(&self.header),
                    &mut out[start..],
                );
                #[allow(clippy::expect_used, reason = "it fails for more than 64 GiB")]
                let tag = sealed.expect("pieces are short");
                let mut bytes = [0; TAG];
                bytes.copy_from_slice(tag.as_ref());
                bytes
            }
        };
        out.extend_from_slice(&tag);
    }

    /// What is in a piece; none if it is not what was sealed.
    pub fn open(&self, number: u64, mut sealed: Vec<u8>) -> Option<Vec<u8>> {
        let length = sealed.len().checked_sub(TAG)?;
        match &self.key {
            SealKey::Sum(key) => {
                let (plain, tag) = sealed.split_at(length);
                let sum = self.sum(key, number, plain);
                // No secret: whoever reads the repository knows the key.
                if sum != *tag {
                    return None;
                }
            }
            SealKey::Cipher(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce(number));
                key.open_in_place(nonce, Aad::from(&self.header), &mut sealed).ok()?;
            }
        }
        sealed.truncate(length);
        Some(sealed)
    }

    fn sum(&self, key: &Key, number: u64, plain: &[u8]) -> [u8; TAG] {
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(&nonce(number)).update(&self.header).update(plain);
        let mut sum = [0; TAG];
        sum.copy_from_slice(&hasher.finalize().as_bytes()[..TAG]);
        sum
    }
}

fn nonce(number: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    nonce
}

/// `keys/ID`: the repository key, wrapped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wrapped {
    version: u16,
    kind: WrapKind,
    salt: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_kib: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    passes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lanes: Option<u32>,
    wrapped: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum WrapKind {
    Passphrase,
    KeyFile,
}

impl Wrapped {
    /// Wraps the repository key. `cheap` takes little time and guards nothing: for tests.
    pub fn new(key: &Key, repository: Id, secret: &Secret, cheap: bool) -> Result<Self> {
        let salt: [u8; 16] = random()?;
        let (kind, [memory_kib, passes, lanes]) = match secret {
            Secret::Passphrase(_) if cheap => (WrapKind::Passphrase, [Some(8), Some(1), Some(1)]),
            Secret::Passphrase(_) => {
                (WrapKind::Passphrase, [Some(MEMORY_KIB), Some(PASSES), Some(LANES)])
            }
            Secret::KeyFile(_) => (WrapKind::KeyFile, [None; 3]),
        };
        let salt = hex(&salt);
        let mut made = Self {
            version: VERSION,
            kind,
            salt,
            memory_kib,
            passes,
            lanes,
            wrapped: String::new(),
        };
        let mut sealed = key.to_vec();
        let wrapping = cipher(&made.wrapping_key(secret)?);
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        wrapping
            .seal_in_place_append_tag(nonce, Aad::from(wrap_data(repository)), &mut sealed)
            .map_err(|_| Error::invalid("the repository key cannot be wrapped"))?;
        made.wrapped = hex(&sealed);
        Ok(made)
    }

    /// What kind of secret it was made for, as the object says it.
    pub fn kind(&self) -> &'static str {
        match self.kind {
            WrapKind::Passphrase => "passphrase",
            WrapKind::KeyFile => "key-file",
        }
    }

    /// Whether it was made for a secret of this kind.
    pub fn is_for(&self, secret: &Secret) -> bool {
        let kind = match secret {
            Secret::Passphrase(_) => WrapKind::Passphrase,
            Secret::KeyFile(_) => WrapKind::KeyFile,
        };
        self.kind == kind
    }

    /// The repository key; none if the secret is another one.
    ///
    /// # Errors
    /// `Unsupported` if it asks for more than may be, or is of another format.
    pub fn unwrap_key(&self, repository: Id, secret: &Secret) -> Result<Option<Key>> {
        if self.version != VERSION {
            return Err(Error::unsupported("a key of the repository has another version"));
        }
        let Some(mut sealed) = unhex::<{ 32 + TAG }>(&self.wrapped) else { return Ok(None) };
        let wrapping = cipher(&self.wrapping_key(secret)?);
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        let opened = wrapping.open_in_place(nonce, Aad::from(wrap_data(repository)), &mut sealed);
        Ok(opened.ok().and_then(|key| <Key>::try_from(&*key).ok()))
    }

    fn wrapping_key(&self, secret: &Secret) -> Result<Key> {
        let wrong = |what: &str| Error::unsupported(format!("a key of the repository has {what}"));
        let salt: [u8; 16] = unhex(&self.salt).ok_or_else(|| wrong("no salt"))?;
        match secret {
            Secret::KeyFile(key) => {
                Ok(blake3::derive_key(&format!("{CONTEXT}key file"), &[&key[..], &salt].concat()))
            }
            Secret::Passphrase(text) => {
                let (Some(memory), Some(passes), Some(lanes)) =
                    (self.memory_kib, self.passes, self.lanes)
                else {
                    return Err(wrong("no cost"));
                };
                if memory > MEMORY_KIB_MAX || passes > PASSES_MAX || lanes > LANES_MAX {
                    return Err(wrong("a cost that is too high"));
                }
                let params = Params::new(memory, passes, lanes, Some(32))
                    .map_err(|e| wrong(&format!("a cost that cannot be: {e}")))?;
                let mut key = [0; 32];
                Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
                    .hash_password_into(text.as_bytes(), &salt, &mut key)
                    .map_err(|e| wrong(&format!("a cost that cannot be: {e}")))?;
                Ok(key)
            }
        }
    }
}

fn wrap_data(repository: Id) -> Vec<u8> {
    [format!("{CONTEXT}wrap").as_bytes(), &repository.0].concat()
}

/// Exactly `N` bytes from hexadecimal digits in lower case.
pub(super) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = crate::names::digit(pair[0])? << 4 | crate::names::digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = [7; 32];
    const REPOSITORY: Id = Id([1; 16]);

    #[test]
    fn a_piece_is_valid_only_in_its_place() {
        for is_encrypted in [false, true] {
            let keys = Keys::new(KEY, REPOSITORY, is_encrypted);
            let sealer = keys.object(Kind::Pack, Id([2; 16]));
            let mut sealed = Vec::new();
            sealer.seal(3, b"content", &mut sealed);
            assert_eq!(sealed.len(), 7 + TAG);
            assert_eq!(sealed.starts_with(b"content"), !is_encrypted);
            assert_eq!(sealer.open(3, sealed.clone()).unwrap(), b"content");
            for others in [
                keys.object(Kind::Index, Id([2; 16])),
                keys.object(Kind::Pack, Id([3; 16])),
                Keys::new([8; 32], REPOSITORY, is_encrypted).object(Kind::Pack, Id([2; 16])),
                Keys::new(KEY, Id([9; 16]), is_encrypted).object(Kind::Pack, Id([2; 16])),
            ] {
                assert_eq!(others.open(3, sealed.clone()), None);
            }
            assert_eq!(sealer.open(4, sealed.clone()), None);
            for at in 0..sealed.len() {
                let mut other = sealed.clone();
                other[at] ^= 1;
                assert_eq!(sealer.open(3, other), None, "byte {at}");
                assert_eq!(sealer.open(3, sealed[..at].to_vec()), None, "length {at}");
            }
        }
    }

    #[test]
    fn a_wrapped_key_opens_with_its_secret_alone() {
        let secrets = [
            Secret::Passphrase("one".to_owned().into()),
            Secret::Passphrase("two".to_owned().into()),
            Secret::KeyFile([1; 32].into()),
            Secret::KeyFile([2; 32].into()),
        ];
        for (index, secret) in secrets.iter().enumerate() {
            let wrapped = Wrapped::new(&KEY, REPOSITORY, secret, true).unwrap();
            for (other, with) in secrets.iter().enumerate() {
                if wrapped.is_for(with) {
                    let opened = wrapped.unwrap_key(REPOSITORY, with).unwrap();
                    assert_eq!(opened, (index == other).then_some(KEY));
                }
            }
            assert_eq!(wrapped.unwrap_key(Id([3; 16]), secret).unwrap(), None);
        }
        let mut hostile = Wrapped::new(&KEY, REPOSITORY, &secrets[0], true).unwrap();
        hostile.memory_kib = Some(u32::MAX);
        let error = hostile.unwrap_key(REPOSITORY, &secrets[0]).unwrap_err();
        assert!(error.to_string().contains("too high"), "{error}");
    }
}
