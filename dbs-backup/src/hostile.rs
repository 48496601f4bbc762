//! Everything that reads bytes from outside, for the fuzzer.

mod store;

use crate::codec::{self, Method};
use crate::config::{self, BackupConfig, VolumeConfig};
use crate::names::{self, BlockName};
use crate::objects::hostile_answer;
use crate::repository;
use crate::url::Url;

/// The size of a block that may come out of some bytes.
const BLOCK: u64 = 64 << 10;

/// Objects with their paths.
pub(crate) type Parts = Vec<(String, Vec<u8>)>;

/// What becomes of a few parts of a backup store: which part (one byte), what is done to it (one), where (two), to how many
/// bytes (one), and these bytes, if any are put there.
pub(crate) struct Edits<'a>(Vec<Edit<'a>>);

struct Edit<'a> {
    part: u8,
    action: u8,
    at: usize,
    length: usize,
    bytes: &'a [u8],
}

impl<'a> Edits<'a> {
    pub fn new(mut data: &'a [u8]) -> Self {
        let mut edits = Vec::new();
        while let [part, action, low, high, length, rest @ ..] = data {
            let (at, length) = (usize::from(u16::from_le_bytes([*low, *high])), *length as usize);
            let takes = if matches!(action % 4, 0 | 1) { length.min(rest.len()) } else { 0 };
            let (bytes, rest) = rest.split_at(takes);
            edits.push(Edit { part: *part, action: *action, at, length, bytes });
            data = rest;
        }
        Self(edits)
    }

    /// Carries out what is to be done to this part.
    pub fn apply(&self, part: u8, content: &mut Vec<u8>) {
        for Edit { action, at, length, bytes, .. } in self.0.iter().filter(|e| e.part == part) {
            let at = at % (content.len() + 1);
            let end = (at + length).min(content.len());
            match action % 4 {
                0 => drop(content.splice(at..end, bytes.iter().copied())),
                1 => drop(content.splice(at..at, bytes.iter().copied())),
                2 => drop(content.drain(at..end)),
                _ => content.truncate(at),
            }
        }
    }

    /// As [`Edits::apply`], to what is returned.
    pub fn applied(&self, part: u8, mut content: Vec<u8>) -> Vec<u8> {
        self.apply(part, &mut content);
        content
    }
}

/// Reads `data` as one of the things that there are.
///
/// # Panics
/// If what was read is not read again from what is written.
pub fn read(kind: u8, data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match kind % 8 {
        0 => {
            if let Ok(volume) = VolumeConfig::parse("volume.cfg", data) {
                let again =
                    config::encode(&volume).map(|bytes| VolumeConfig::parse("again", &bytes));
                assert!(matches!(again, Ok(Ok(again)) if again == volume), "{volume:?}");
            }
        }
        1 => {
            if let Ok(backup) = BackupConfig::parse("backup.cfg", data) {
                let again =
                    config::encode(&backup).map(|bytes| BackupConfig::parse("again", &bytes));
                assert!(matches!(again, Ok(Ok(again)) if again == backup), "{backup:?}");
            }
        }
        2 => {
            if let Ok(url) = Url::parse(&text) {
                // A key is printed as it is.
                let plain = url
                    .options
                    .iter()
                    .all(|(key, _)| key.bytes().all(|b| b.is_ascii_alphanumeric()));
                let sorted = |mut url: Url| {
                    url.options.sort();
                    url
                };
                let again = Url::parse(&url.to_string()).map(sorted);
                let same = again.is_ok_and(|again| again == sorted(url.clone()));
                assert!(same || !plain, "{url:?}");
            }
        }
        3 => {
            let name = BlockName::of(data);
            for method in [Method::None, Method::Lz4, Method::Gzip] {
                if let Ok(content) = codec::open(data, method, name, BLOCK) {
                    assert!(BlockName::of(&content) == name && content.len() as u64 == BLOCK);
                }
            }
        }
        4 => hostile_answer(&text),
        6 => {
            let restored = store::exercise(store::longhorn(&Edits::new(data)), false);
            assert!(restored == 4 || !data.is_empty(), "as it is, it can be restored");
        }
        7 => {
            let restored = store::exercise(repository::hostile::objects(&Edits::new(data)), true);
            assert!(restored == 2 || !data.is_empty(), "as it is, it can be restored");
        }
        _ => {
            let valid = names::is_valid(&text);
            assert!(!valid || !(text.contains('/') || text.starts_with('.')));
            if let Some(name) = names::block_of(&text) {
                assert!(text.ends_with(&format!("{name}.blk")));
            }
            let _ = names::backup_of(&text);
        }
    }
}
