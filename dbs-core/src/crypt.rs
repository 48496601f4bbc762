//! Encryption of volumes: the key that their blocks are encrypted with, and how it is wrapped for the secret of a
//! user. `docs/format.md`, section 23, has the bytes; decision 33 the reasons.
//!
//! A data unit of AES-256-XTS is a block, and its number is that of the block in the volume: so a block reads the same
//! wherever the store moves it, and through every snapshot and clone that shares it.

use crate::error::{Error, Result};
use crate::format::slots::KeySlot;
use crate::limits::{ENCRYPTED_START_MAX, ENCRYPTED_START_MAX_SLOW};
use crate::units::BLOCK_BYTES;
use aes::Aes256;
use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes_kw::KwAes256;
use argon2::{Algorithm, Argon2, Params, Version};
use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use zerocopy::FromZeros;
use zeroize::Zeroizing;

/// How data is encrypted: the only way there is.
pub(crate) const METHOD_XTS: u8 = 1;
/// There was a key, and a repair did not find it.
const METHOD_LOST: u8 = 255;
/// Stands for the key, which nobody has, of what a repair made and may be encrypted.
pub(crate) const FAMILY_UNKNOWN: [u8; 16] = [0xff; 16];
/// The secret is a passphrase.
pub(crate) const SECRET_PASSPHRASE: u8 = 1;
/// The secret is what is in a key file.
pub(crate) const SECRET_KEY_FILE: u8 = 2;

/// The longest file with a secret.
const SECRET_FILE_MAX: usize = 4096;
/// Bytes of a data key: one half for the data, one for the tweaks.
const KEY_BYTES: usize = 64;
/// Bytes of a block of the cipher.
const CIPHER_BYTES: usize = 16;
/// Blocks of the cipher in a data unit.
const CIPHER_BLOCKS: usize = BLOCK_BYTES as usize / CIPHER_BYTES;

/// What wrapping for a passphrase costs: RFC 9106, the choice for machines with little memory.
const PASSPHRASE_COST: Cost = Cost { memory_kib: 64 << 10, passes: 3, lanes: 4 };
/// Nobody can guess a random key: so it need cost nothing to try one.
const KEY_FILE_COST: Cost = Cost { memory_kib: 8, passes: 1, lanes: 1 };
/// A hostile store must not take all memory.
const COST_MAX: Cost = Cost { memory_kib: 256 << 10, passes: 8, lanes: 16 };

/// One secret is tried at a time: as many at once would take as much memory as all of them, when a server starts and all
/// clients come back.
static TRIED: Mutex<()> = Mutex::new(());
#[cfg(test)]
static TRYING: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

type CipherBlock = aes::Block;

/// A data key in the open, for the moment in which it is made or unwrapped.
pub(crate) type RawKey = Zeroizing<[u8; KEY_BYTES]>;

/// What a user unlocks a volume with. It is never shown, and overwritten when it goes.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// A passphrase.
    Passphrase(Zeroizing<String>),
    /// The 32 bytes of a key file.
    KeyFile(Zeroizing<[u8; 32]>),
}

impl Secret {
    /// From variables: `PREFIX_PASSPHRASE`, or the files that `PREFIX_PASSPHRASE_FILE` (its first line) and
    /// `PREFIX_KEY_FILE` name. The environment is the caller's to ask.
    ///
    /// # Errors
    /// `Invalid` if there are two, or if one is empty or a file holds no key; those of reading it.
    pub fn from_variables(
        prefix: &str,
        variable: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Self>> {
        let names = ["PASSPHRASE", "PASSPHRASE_FILE", "KEY_FILE"];
        let names = names.map(|name| format!("{prefix}_{name}"));
        // Whoever sets one wants a key, also if a command that was to give it has failed.
        let value = |name: &String| match variable(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) if !value.is_empty() => Ok(Some(Zeroizing::new(value))),
            Some(_) => Err(Error::invalid(format!("{name} is set, and is empty or no UTF-8"))),
        };
        let [first, second, third] = &names;
        match [value(first)?, value(second)?, value(third)?] {
            [None, None, None] => Ok(None),
            [Some(text), None, None] => Self::passphrase(&text).map(Some),
            [None, Some(file), None] => Self::read_passphrase_file(Path::new(&*file)).map(Some),
            [None, None, Some(file)] => Self::read_key_file(Path::new(&*file)).map(Some),
            _ => Err(Error::invalid(format!("set one of {}, not several", names.join(", ")))),
        }
    }

    /// The first line of a file, which is a passphrase.
    ///
    /// # Errors
    /// As [`Secret::passphrase`]; those of reading it.
    pub fn read_passphrase_file(path: &Path) -> Result<Self> {
        let content = read(path)?;
        let text = std::str::from_utf8(&content)
            .map_err(|_| Error::invalid(format!("{} is no text", path.display())))?;
        Self::passphrase(text.lines().next().unwrap_or_default())
    }

    /// What the key file at a path holds.
    ///
    /// # Errors
    /// As [`Secret::key_file`]; those of reading it.
    pub fn read_key_file(path: &Path) -> Result<Self> {
        Self::key_file(&read(path)?, &path.display().to_string())
    }

    /// A passphrase.
    ///
    /// # Errors
    /// `Invalid` if it is empty.
    pub fn passphrase(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::invalid("the passphrase is empty"));
        }
        Ok(Self::Passphrase(Zeroizing::new(text.to_owned())))
    }

    /// What a key file holds: 32 bytes, or 64 hexadecimal digits. `name` is what errors call the file.
    ///
    /// # Errors
    /// `Invalid` if it holds something else.
    pub fn key_file(content: &[u8], name: &str) -> Result<Self> {
        let key = match <[u8; 32]>::try_from(content) {
            Ok(key) => Some(Zeroizing::new(key)),
            Err(_) => from_digits(content.trim_ascii_end()),
        };
        key.map(Self::KeyFile).ok_or_else(|| {
            Error::invalid(format!(
                "{name} is no key file: it holds 32 random bytes, or 64 hexadecimal digits. `head -c 32 /dev/urandom` makes one"
            ))
        })
    }

    /// What it is, in words.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        kind_name(self.code())
    }

    fn code(&self) -> u8 {
        match self {
            Self::Passphrase(_) => SECRET_PASSPHRASE,
            Self::KeyFile(_) => SECRET_KEY_FILE,
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Passphrase(text) => text.as_bytes(),
            Self::KeyFile(key) => &key[..],
        }
    }
}

/// Never shown.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A file with a secret: no device that never ends.
fn read(file: &Path) -> Result<Zeroizing<Vec<u8>>> {
    use std::io::Read;
    let name = file.display();
    let mut content = Zeroizing::new(Vec::with_capacity(SECRET_FILE_MAX + 1));
    std::fs::File::open(file)
        .and_then(|opened| opened.take(SECRET_FILE_MAX as u64 + 1).read_to_end(&mut content))
        .map_err(|e| Error::io(e, format!("reading {name}")))?;
    if content.len() > SECRET_FILE_MAX {
        let text =
            format!("{name} has more than {SECRET_FILE_MAX} bytes: it is no file with a secret");
        return Err(Error::invalid(text));
    }
    Ok(content)
}

fn kind_name(code: u8) -> &'static str {
    if code == SECRET_KEY_FILE { "key file" } else { "passphrase" }
}

fn from_digits(text: &[u8]) -> Option<Zeroizing<[u8; 32]>> {
    let mut key = Zeroizing::new([0; 32]);
    if text.len() != 2 * key.len() {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    for (byte, pair) in key.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(key)
}

/// The key that the blocks of a family of volumes are encrypted with, ready for use.
pub(crate) struct DataKey {
    data: Aes256,
    tweak: Aes256,
}

/// Never shown.
impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey")
    }
}

impl DataKey {
    pub fn new(raw: &RawKey) -> Self {
        let cipher = |half: &[u8]| {
            #[allow(clippy::expect_used, reason = "a key of 32 bytes is what this cipher has")]
            Aes256::new_from_slice(half).expect("32 bytes")
        };
        let (data, tweak) = raw.split_at(KEY_BYTES / 2);
        Self { data: cipher(data), tweak: cipher(tweak) }
    }

    /// Encrypts what is to be written at `offset` of a volume. Both are multiples of 16 bytes.
    pub fn encrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.units(offset, bytes, |blocks| self.data.encrypt_blocks(blocks));
    }

    /// Decrypts what was read at `offset` of a volume. Both are multiples of 16 bytes.
    pub fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.units(offset, bytes, |blocks| self.data.decrypt_blocks(blocks));
    }

    fn units(&self, offset: u64, bytes: &mut [u8], crypt: impl Fn(&mut [CipherBlock])) {
        let whole = |bytes: u64| bytes.is_multiple_of(CIPHER_BYTES as u64);
        assert!(whole(offset) && whole(bytes.len() as u64), "parts of a block of the cipher");
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let inside = (at % BLOCK_BYTES) as usize;
            let length = rest.len().min(BLOCK_BYTES as usize - inside);
            let (unit, after) = rest.split_at_mut(length);
            self.unit(at / BLOCK_BYTES, inside / CIPHER_BYTES, unit, &crypt);
            (at, rest) = (at + length as u64, after);
        }
    }

    /// A part of a data unit, from its block `skip` of the cipher on.
    fn unit(&self, number: u64, skip: usize, unit: &mut [u8], crypt: impl Fn(&mut [CipherBlock])) {
        let mut first = CipherBlock::default();
        first[..8].copy_from_slice(&number.to_le_bytes());
        self.tweak.encrypt_block(&mut first);
        let mut next = u128::from_le_bytes(first.0);
        (0..skip).for_each(|_| next = double(next));
        let mut tweaks = [0; CIPHER_BLOCKS];
        let blocks = CipherBlock::slice_as_chunks_mut(unit).0;
        for (block, tweak) in blocks.iter_mut().zip(&mut tweaks) {
            *tweak = next;
            next = double(next);
            mix(block, *tweak);
        }
        // All at once: processors work at several blocks together.
        crypt(blocks);
        blocks.iter_mut().zip(&tweaks).for_each(|(block, tweak)| mix(block, *tweak));
    }
}

/// Times the generator, in the field of the tweaks.
#[inline]
fn double(tweak: u128) -> u128 {
    (tweak << 1) ^ ((tweak >> 127) * 0x87)
}

#[inline]
fn mix(block: &mut CipherBlock, tweak: u128) {
    block.0 = (u128::from_le_bytes(block.0) ^ tweak).to_le_bytes();
}

/// What it costs to try a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cost {
    memory_kib: u32,
    passes: u32,
    lanes: u16,
}

/// Longest request that a reactor encrypts or decrypts itself.
pub(crate) fn start_max() -> u64 {
    #[cfg(target_arch = "x86_64")]
    let fast = is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    let fast = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let fast = false;
    if fast { ENCRYPTED_START_MAX } else { ENCRYPTED_START_MAX_SLOW }
}

/// Wraps the data key of a family for a secret, with a salt that no other wrapping has.
///
/// # Errors
/// `Invalid` if that cannot be.
pub(crate) fn wrap(
    raw: &RawKey,
    family: [u8; 16],
    secret: &Secret,
    salt: [u8; 16],
) -> Result<KeySlot> {
    let cost = match secret {
        Secret::Passphrase(_) => PASSPHRASE_COST,
        Secret::KeyFile(_) => KEY_FILE_COST,
    };
    let mut slot = KeySlot {
        method: METHOD_XTS,
        secret: secret.code(),
        lanes: cost.lanes.into(),
        memory_kib: cost.memory_kib.into(),
        passes: cost.passes.into(),
        salt,
        wrapped: [0; KEY_BYTES + 8],
        family,
    };
    let wrapping = wrapping_key(&slot, secret)?;
    wrapping
        .wrap_key(&raw[..], &mut slot.wrapped)
        .map_err(|error| Error::invalid(format!("the key cannot be wrapped: {error}")))?;
    Ok(slot)
}

/// The data key in a slot; none if the secret is another one.
///
/// # Errors
/// `Invalid` if the slot asks for a secret of another kind.
pub(crate) fn unwrap(slot: &KeySlot, secret: &Secret) -> Result<Option<RawKey>> {
    if !slot.is_for(secret) {
        return Err(Error::invalid(format!(
            "a {} unlocks it, not a {}",
            kind_name(slot.secret),
            secret.kind()
        )));
    }
    let mut raw = Zeroizing::new([0; KEY_BYTES]);
    let wrapping = wrapping_key(slot, secret)?;
    Ok(wrapping.unwrap_key(&slot.wrapped, &mut raw[..]).is_ok().then_some(raw))
}

fn wrapping_key(slot: &KeySlot, secret: &Secret) -> Result<KwAes256> {
    let wrong = |error| Error::invalid(format!("the key has a cost that cannot be: {error}"));
    let (memory, passes) = (slot.memory_kib.get(), slot.passes.get());
    let params =
        Params::new(memory, passes, u32::from(slot.lanes.get()), Some(32)).map_err(wrong)?;
    let mut key = Zeroizing::new([0; 32]);
    let _alone = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    #[cfg(test)]
    let _counted = tests::Counted::new();
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(secret.bytes(), &slot.salt, &mut key[..])
        .map_err(wrong)?;
    #[allow(clippy::expect_used, reason = "a key of 32 bytes is what this cipher has")]
    Ok(KwAes256::new_from_slice(&key[..]).expect("32 bytes"))
}

impl KeySlot {
    /// What a repair gives a volume whose key is gone.
    pub(crate) fn lost() -> Self {
        Self { method: METHOD_LOST, ..Self::new_zeroed() }
    }

    /// Whether there is a key, or was.
    pub(crate) fn is_some(&self) -> bool {
        self.method != 0
    }

    /// Whether there was a key, and it is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.method == METHOD_LOST
    }

    /// Whether it is what a volume has whose data is encrypted with the key of `family`, zeros being none: that key, or the
    /// mark that it is lost.
    pub(crate) fn fits(&self, family: &[u8; 16]) -> bool {
        if self.is_lost() { *family != [0; 16] } else { self.family == *family }
    }

    /// The kind of secret that it is wrapped for, in words.
    pub(crate) fn secret_kind(&self) -> &'static str {
        if self.is_lost() { "lost" } else { kind_name(self.secret) }
    }

    /// Whether it is wrapped for a secret of this kind.
    pub(crate) fn is_for(&self, secret: &Secret) -> bool {
        self.secret == secret.code()
    }

    /// Whether this version could have written it.
    pub(crate) fn is_possible(&self) -> bool {
        if self.method == 0 || self.is_lost() {
            return *self == Self { method: self.method, ..Self::new_zeroed() };
        }
        let (memory, passes, lanes) =
            (self.memory_kib.get(), self.passes.get(), u32::from(self.lanes.get()));
        let most = COST_MAX;
        self.method == METHOD_XTS
            && [SECRET_PASSPHRASE, SECRET_KEY_FILE].contains(&self.secret)
            && ![[0; 16], FAMILY_UNKNOWN].contains(&self.family)
            && memory <= most.memory_kib
            && passes <= most.passes
            && lanes <= u32::from(most.lanes)
            && Params::new(memory, passes, lanes, Some(32)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    /// Fails if somebody else tries a secret at this moment.
    pub(super) struct Counted;

    impl Counted {
        pub fn new() -> Self {
            assert_eq!(TRYING.fetch_add(1, Ordering::SeqCst), 0, "several at once");
            Self
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            TRYING.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn one_secret_is_tried_at_a_time() {
        let word = Secret::passphrase("a word").unwrap();
        let slot = wrap(&Zeroizing::new([7; 64]), [5; 16], &word, [3; 16]).unwrap();
        std::thread::scope(|scope| {
            let tried = [(); 4].map(|()| scope.spawn(|| unwrap(&slot, &word).unwrap().is_some()));
            assert!(tried.into_iter().all(|one| one.join().unwrap()));
        });
    }

    fn digits<const N: usize>(text: &str) -> [u8; N] {
        let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
        assert_eq!(text.len(), 2 * N);
        std::array::from_fn(byte)
    }

    fn key(text: &str) -> DataKey {
        DataKey::new(&Zeroizing::new(digits(text)))
    }

    /// IEEE 1619, vector 10: a data unit of 512 bytes, as the first part of one of ours.
    #[test]
    fn it_is_xts_as_the_standard_has_it() {
        let key = key("2718281828459045235360287471352662497757247093699959574966967627\
             3141592653589793238462643383279502884197169399375105820974944592");
        let plain: [u8; 512] = std::array::from_fn(|at| at as u8);
        let mut bytes = plain;
        key.encrypt(0xff * BLOCK_BYTES, &mut bytes);
        let first = "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b";
        let last = "773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151";
        assert_eq!(bytes[..32], digits::<32>(first));
        assert_eq!(bytes[480..], digits::<32>(last));
        key.decrypt(0xff * BLOCK_BYTES, &mut bytes);
        assert_eq!(bytes, plain);
    }

    /// The figures are another implementation's.
    #[test]
    fn a_block_is_one_data_unit_of_its_number() {
        let all: [u8; 64] = std::array::from_fn(|at| at as u8);
        let key = DataKey::new(&Zeroizing::new(all));
        let plain: Vec<_> = (0..2 * BLOCK_BYTES).map(|at| (at * 7) as u8).collect();
        let at = 0x0001_2345_6789 * BLOCK_BYTES;
        let mut bytes = plain.clone();
        key.encrypt(at, &mut bytes);
        let first = "d062ca9a096f8f99d68e26a89e905c136e5550e8aee063d2dec94e51a164e8af";
        let last = "2008c4d912fe82119396093a46bd0f1bfdfb608716cb4403ad30ca2e83549438";
        assert_eq!(bytes[..32], digits::<32>(first));
        assert_eq!(bytes[4064..4096], digits::<32>(last));
        // The same content in the next block is something else.
        assert_eq!(plain[..4096], plain[4096..]);
        assert_ne!(bytes[..4096], bytes[4096..]);
        // Any sectors of it can be read by themselves.
        for (start, end) in [(0, 512), (512, 1024), (3584, 4608), (512, 8192)] {
            let mut part = bytes[start..end].to_vec();
            key.decrypt(at + start as u64, &mut part);
            assert_eq!(part, plain[start..end], "{start} to {end}");
        }
    }

    #[test]
    fn only_the_secret_it_was_wrapped_for_unwraps_a_key() {
        let raw: RawKey = Zeroizing::new([7; 64]);
        let [one, other] = [1, 2].map(|byte| Secret::key_file(&[byte; 32], "f").unwrap());
        let word = Secret::passphrase("a word").unwrap();
        for secret in [&one, &word] {
            let slot = wrap(&raw, [5; 16], secret, [3; 16]).unwrap();
            assert!(slot.is_possible());
            assert_eq!(unwrap(&slot, secret).unwrap().unwrap(), raw);
            assert!(!slot.wrapped.windows(8).any(|bytes| bytes == [7; 8]), "in the open");
            assert_ne!(wrap(&raw, [5; 16], secret, [4; 16]).unwrap().wrapped, slot.wrapped);
            let mut changed = slot;
            changed.wrapped[9] ^= 1;
            assert!(unwrap(&changed, secret).unwrap().is_none());
        }
        let slot = wrap(&raw, [5; 16], &one, [3; 16]).unwrap();
        assert!(unwrap(&slot, &other).unwrap().is_none());
        let error = unwrap(&slot, &word).unwrap_err();
        assert!(error.to_string().contains("a key file unlocks it"), "{error}");
    }

    #[test]
    fn a_hostile_slot_takes_neither_memory_nor_time() {
        let slot =
            wrap(&Zeroizing::new([7; 64]), [5; 16], &Secret::KeyFile([1; 32].into()), [3; 16]);
        let slot = slot.unwrap();
        let changes: [fn(&mut KeySlot); 8] = [
            |slot| slot.method = 2,
            |slot| slot.secret = 3,
            |slot| slot.memory_kib = ((256 << 10) + 1).into(),
            |slot| slot.passes = 9.into(),
            |slot| slot.lanes = 17.into(),
            |slot| slot.method = METHOD_LOST,
            |slot| slot.family = [0; 16],
            |slot| slot.family = FAMILY_UNKNOWN,
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut changed = slot;
            change(&mut changed);
            assert!(!changed.is_possible(), "{index}");
        }
        assert!(KeySlot::new_zeroed().is_possible() && KeySlot::lost().is_possible());
    }

    #[test]
    fn a_key_file_has_bytes_or_digits() {
        let text: String = [0xab; 32].iter().map(|byte| format!("{byte:02x}")).collect();
        let read = |bytes: &[u8]| Secret::key_file(bytes, "file");
        assert_eq!(read(&[0xab; 32]).unwrap(), read(format!("{text}\n").as_bytes()).unwrap());
        for wrong in [&b""[..], &[1; 31], &[1; 33], &text.as_bytes()[1..]] {
            assert!(read(wrong).is_err());
        }
        assert!(Secret::passphrase("").is_err());
        assert_eq!(format!("{:?}", read(&[0xab; 32]).unwrap()), "Secret");
    }

    #[test]
    fn where_secrets_come_from() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let from = |name: &str, value: String| {
            Secret::from_variables("DBS_BACKUP", &|asked: &str| {
                (asked == name).then(|| value.clone().into())
            })
        };
        let raw = from("DBS_BACKUP_KEY_FILE", write("raw", &[10; 32])).unwrap();
        assert_eq!(raw, Some(Secret::KeyFile([10; 32].into())));
        let digits = from("DBS_BACKUP_KEY_FILE", write("hex", "0a".repeat(32).as_bytes()));
        assert_eq!(digits.unwrap(), raw);
        let line =
            from("DBS_BACKUP_KEY_FILE", write("line", format!("{}\n", "0a".repeat(32)).as_bytes()));
        assert_eq!(line.unwrap(), raw);
        for wrong in [&b""[..], &[1; 31], &[1; 33], b"a passphrase"] {
            assert!(from("DBS_BACKUP_KEY_FILE", write("wrong", wrong)).is_err());
        }
        let text = from("DBS_BACKUP_PASSPHRASE_FILE", write("text", b"one two\nmore")).unwrap();
        assert_eq!(text, Some(Secret::Passphrase("one two".to_owned().into())));
        assert!(from("DBS_BACKUP_PASSPHRASE_FILE", write("empty", b"\n")).is_err());
        // A file is never cut to what would be another secret.
        for (length, fits) in [(4095, true), (4096, false)] {
            let content = [&vec![b'a'; length][..], b"\n"].concat();
            let path = write("long", &content);
            match from("DBS_BACKUP_PASSPHRASE_FILE", path.clone()) {
                Ok(_) => assert!(fits, "{length}"),
                Err(error) => {
                    assert!(!fits, "{error}");
                    let text = error.to_string();
                    assert!(
                        text.contains(&path) && text.contains("more than 4096 bytes"),
                        "{text}"
                    );
                }
            }
        }
        assert!(Secret::from_variables("DBS_BACKUP", &|_| Some("x".into())).is_err());
        assert_eq!(Secret::from_variables("DBS_BACKUP", &|_| None).unwrap(), None);
        // As `DBS_BACKUP_PASSPHRASE=$(a command that fails)` leaves it.
        assert!(from("DBS_BACKUP_PASSPHRASE", String::new()).is_err());
        assert_eq!(format!("{text:?}"), "Some(Secret)");
    }
}
