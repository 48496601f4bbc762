//! Everything that reads bytes from outside, for the fuzzer.

use crate::codec::{self, Method};
use crate::config::{self, BackupConfig, VolumeConfig};
use crate::names::{self, BlockName};
use crate::objects::hostile_answer;
use crate::url::Url;

/// The size of a block that may come out of some bytes.
const BLOCK: u64 = 64 << 10;

/// Reads `data` as one of the things that there are.
///
/// # Panics
/// If what was read is not read again from what is written.
pub fn read(kind: u8, data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match kind % 6 {
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
