//! The bytes of a repository's objects: sections 2 and 5 to 7 of `docs/repository.md`.

use super::Id;
use super::keys::{HEADER, Key, Keys, Kind, Sealer, TAG, VERSION, unhex};
use crate::config::{self, LARGEST_VOLUME, Map};
use crate::names::{BlockName, hex, plain};
use dbs_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Where everything is.
pub(super) const BASE: &str = "dbs-repository";
/// Bytes of `config`, and of a wrapped key.
pub(super) const CONFIG_LIMIT: u64 = 64 << 10;
/// Bytes of a manifest: one of the largest volume has 4.5 MiB.
pub(super) const MANIFEST_LIMIT: u64 = 16 << 20;
/// Bytes of an index.
pub(super) const INDEX_LIMIT: u64 = 64 << 20;
/// Bytes of a pack.
pub(super) const PACK_LIMIT: u64 = 64 << 20;
/// Blobs of a pack.
pub(super) const BLOBS_MAX: usize = 65_535;
/// Ids in a list.
pub(super) const LIST: usize = 1024;
/// Packs that one index names.
pub(super) const INDEX_PACKS: usize = 32;
/// Packs that one object condemns.
pub(super) const CONDEMNED_MAX: usize = 65_536;
/// The number of a pack's footer.
const FOOTER: u64 = u64::MAX;
/// How a pack ends.
const PACK_END: &[u8; 8] = b"dbs-pack";
/// Bytes of an entry, and of what an index says of a pack before its entries.
const ENTRY: usize = 48;
const PACK_HEAD: usize = 32;
/// Bytes behind the footer of a pack, and those of the longest footer.
pub(super) const PACK_TAIL: usize = 16;
const FOOTER_MAX: u64 = (BLOBS_MAX * ENTRY + TAG) as u64;
/// Lists in a manifest: each takes 67 bytes of it.
pub(super) const LISTS_MAX: u64 = 200_000;
/// Bytes of labels.
pub(crate) const LABELS_MAX: usize = 1 << 20;
/// What `dbs` makes.
pub(super) const CHUNK_SIZE: u64 = 1 << 20;
const GRACE_SECONDS: u64 = 86_400;

/// What a blob is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(super) enum BlobKind {
    Chunk = 1,
    List = 2,
}

/// A blob in a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub name: BlockName,
    pub offset: u32,
    pub length: u32,
    pub bytes: u32,
    pub kind: BlobKind,
    pub is_lz4: bool,
}

/// What an index says of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PackIndex {
    pub id: Id,
    pub length: u64,
    pub entries: Vec<Entry>,
}

/// `config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    format: String,
    version: u16,
    stage: String,
    id: String,
    pub chunk_size: u64,
    pub grace_seconds: u64,
    encryption: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

/// What is read of a config before all of it is.
#[derive(Deserialize)]
struct Stage {
    format: String,
    version: u64,
    stage: String,
}

/// A manifest: what a backup is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub volume: String,
    pub backup: String,
    pub snapshot: String,
    pub asked_at: String,
    pub created: String,
    pub size: u64,
    pub chunks: u64,
    pub uploaded: u64,
    pub incremental: bool,
    pub labels: Map,
    pub lists: Vec<Option<ListName>>,
}

/// The id of a list, in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct ListName(#[serde(with = "config::block_name")] pub BlockName);

impl Config {
    /// A new one.
    pub fn new(id: Id, chunk_size: u64, key: Option<&Key>) -> Self {
        Self {
            format: BASE.to_owned(),
            version: VERSION,
            stage: "beta".to_owned(),
            id: hex(&id.0),
            chunk_size,
            grace_seconds: GRACE_SECONDS,
            encryption: if key.is_some() { "none" } else { "aes-256-gcm" }.to_owned(),
            key: key.map(|key| hex(key)),
        }
    }

    pub fn encode(&self, keys: &Keys) -> Result<Vec<u8>> {
        let line = encode(self)?;
        let check = keys.config_check(&line).to_hex();
        Ok([&line[..], b"\n", check.as_bytes(), b"\n"].concat())
    }

    /// What is in it, with the line that it is and the check of that, which is to be compared once there is a key.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8], blake3::Hash)> {
        let wrong = |what: &str| damaged(&path("config"), what);
        let end =
            bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| wrong("it is cut off"))?;
        let (line, check) = (&bytes[..end], &bytes[end + 1..]);
        let check = std::str::from_utf8(check).ok().and_then(|text| text.strip_suffix('\n'));
        let check = check.and_then(unhex::<32>).ok_or_else(|| wrong("it has no check"))?.into();
        let stage: Stage = serde_json::from_slice(line).map_err(|e| wrong(&e.to_string()))?;
        if stage.format != BASE {
            return Err(wrong("it is no repository"));
        }
        if (stage.version, &*stage.stage) != (u64::from(VERSION), "beta") {
            return Err(Error::unsupported(format!(
                "the repository has format {} ({}), and this version of dbs knows format {VERSION} (beta) alone",
                stage.version,
                plain(&stage.stage)
            )));
        }
        let config: Self = serde_json::from_slice(line)
            .map_err(|e| Error::unsupported(wrong(&e.to_string()).to_string()))?;
        let is_size =
            config.chunk_size.is_power_of_two() && (4096..=16 << 20).contains(&config.chunk_size);
        if !is_size || !(3600..=31_536_000).contains(&config.grace_seconds) {
            return Err(wrong("it has a size of chunks or a grace time that cannot be"));
        }
        match (&*config.encryption, &config.key) {
            ("none", Some(_)) | ("aes-256-gcm", None) => Ok((config, line, check)),
            ("none" | "aes-256-gcm", _) => Err(wrong("it has no key, or one too many")),
            (other, _) => Err(Error::unsupported(format!(
                "the repository is encrypted by `{}`, which this version of dbs does not know",
                plain(other)
            ))),
        }
    }

    pub fn is_encrypted(&self) -> bool {
        self.encryption != "none"
    }

    pub fn id(&self) -> Result<Id> {
        unhex(&self.id).map(Id).ok_or_else(|| damaged(&path("config"), "its id is none"))
    }

    /// The key of a repository that is not encrypted.
    pub fn key(&self) -> Option<Key> {
        self.key.as_deref().and_then(unhex)
    }
}

/// Compact JSON.
pub(super) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| Error::io(std::io::Error::other(e), "encoding JSON"))
}

/// The path of something in the repository.
pub(super) fn path(below: &str) -> String {
    format!("{BASE}/{below}")
}

/// The path of a pack.
pub(super) fn pack_path(id: Id) -> String {
    let name = hex(&id.0);
    format!("{BASE}/packs/{}/{name}", &name[..2])
}

/// An object is not what was written.
pub(super) fn damaged(path: &str, what: &str) -> Error {
    Error::corrupt(format!("{path} in the backup store is damaged: {}", plain(what)))
}

impl Entry {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.name.bytes());
        for number in [self.offset, self.length, self.bytes] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&[self.kind as u8, u8::from(self.is_lz4), 0, 0]);
    }

    fn decode(bytes: &[u8; ENTRY]) -> Option<Self> {
        let mut name = [0; 32];
        name.copy_from_slice(&bytes[..32]);
        let (kind, is_lz4) = match bytes[44..] {
            [kind @ 1..=2, method @ 0..=1, 0, 0] => {
                (if kind == 1 { BlobKind::Chunk } else { BlobKind::List }, method == 1)
            }
            _ => return None,
        };
        let [offset, length, bytes] = [32, 36, 40].map(|at| number(bytes, at));
        Some(Self { name: BlockName::from_bytes(name), offset, length, bytes, kind, is_lz4 })
    }

    /// Whether it can be in a pack of this length.
    fn fits(&self, length: u64, chunk_size: u64) -> bool {
        let most = match self.kind {
            BlobKind::Chunk => chunk_size,
            BlobKind::List => LIST as u64 * 32,
        };
        let end = u64::from(self.offset) + u64::from(self.length);
        self.offset as usize >= HEADER
            && self.length as usize > TAG
            && end <= length
            && (1..=most).contains(&u64::from(self.bytes))
            && (self.is_lz4 || self.length as usize == self.bytes as usize + TAG)
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

/// A pack: the blobs behind its header, and what is behind them.
pub(super) fn end_pack(sealer: &Sealer, entries: &[Entry], pack: &mut Vec<u8>) {
    end_pack_with(sealer, entries, pack, |_| ());
}

/// As [`end_pack`], with something done to the footer before it is sealed: for the fuzzer.
pub(super) fn end_pack_with(
    sealer: &Sealer,
    entries: &[Entry],
    pack: &mut Vec<u8>,
    edit: impl FnOnce(&mut Vec<u8>),
) {
    let mut footer = Vec::with_capacity(entries.len() * ENTRY);
    entries.iter().for_each(|entry| entry.encode(&mut footer));
    edit(&mut footer);
    sealer.seal(FOOTER, &footer, pack);
    pack.extend_from_slice(&((footer.len() + TAG) as u32).to_le_bytes());
    pack.extend_from_slice(&[0; 4]);
    pack.extend_from_slice(PACK_END);
}

/// What is in piece 0 of an index.
pub(super) fn encode_index(packs: &[PackIndex]) -> Vec<u8> {
    let mut out = Vec::new();
    for pack in packs {
        out.extend_from_slice(&pack.id.0);
        out.extend_from_slice(&pack.length.to_le_bytes());
        out.extend_from_slice(&(pack.entries.len() as u32).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        pack.entries.iter().for_each(|entry| entry.encode(&mut out));
    }
    out
}

/// The packs of an index; none if they cannot be.
pub(super) fn decode_index(mut bytes: &[u8], chunk_size: u64) -> Option<Vec<PackIndex>> {
    let mut packs = Vec::new();
    while !bytes.is_empty() {
        let (head, rest) = bytes.split_at_checked(PACK_HEAD)?;
        let mut id = [0; 16];
        id.copy_from_slice(&head[..16]);
        let mut length = [0; 8];
        length.copy_from_slice(&head[16..24]);
        let (length, count) = (u64::from_le_bytes(length), number(head, 24) as usize);
        let (entries, rest) = rest.split_at_checked(count.checked_mul(ENTRY)?)?;
        if number(head, 28) != 0 || length > PACK_LIMIT || count > BLOBS_MAX {
            return None;
        }
        let entries = decode_entries(entries, length, chunk_size)?;
        packs.push(PackIndex { id: Id(id), length, entries });
        bytes = rest;
    }
    Some(packs)
}

fn decode_entries(bytes: &[u8], length: u64, chunk_size: u64) -> Option<Vec<Entry>> {
    let (entries, _) = bytes.as_chunks::<ENTRY>();
    let entries: Vec<_> = entries.iter().map(Entry::decode).collect::<Option<_>>()?;
    entries.iter().all(|entry| entry.fits(length, chunk_size)).then_some(entries)
}

/// Where the footer of a pack begins, from the 16 bytes at its end.
pub(super) fn footer_start(end: &[u8], length: u64) -> Option<u64> {
    let end: &[u8; PACK_TAIL] = end.try_into().ok()?;
    let is_pack = end[4..8] == [0; 4] && end[8..] == *PACK_END;
    let footer = u64::from(number(end, 0));
    let is_whole = (footer.checked_sub(TAG as u64)?).is_multiple_of(ENTRY as u64);
    let start = length.checked_sub(PACK_TAIL as u64)?.checked_sub(footer)?;
    (is_pack && is_whole && footer <= FOOTER_MAX).then_some(start)
}

/// What a footer says of its pack.
pub(super) fn decode_footer(
    keys: &Keys,
    id: Id,
    footer: Vec<u8>,
    length: u64,
    chunk_size: u64,
) -> Option<PackIndex> {
    let plain = keys.object(Kind::Pack, id).open(FOOTER, footer)?;
    let entries = decode_entries(&plain, length, chunk_size)?;
    Some(PackIndex { id, length, entries })
}

/// An object of one piece.
pub(super) fn seal_object(keys: &Keys, kind: Kind, id: Id, plain: &[u8]) -> Vec<u8> {
    let sealer = keys.object(kind, id);
    let mut object = sealer.header.to_vec();
    sealer.seal(0, plain, &mut object);
    object
}

/// What is in an object of one piece.
pub(super) fn open_object(
    keys: &Keys,
    kind: Kind,
    id: Id,
    path: &str,
    object: &[u8],
) -> Result<Vec<u8>> {
    let sealer = keys.object(kind, id);
    let Some((header, piece)) = object.split_at_checked(HEADER) else {
        return Err(damaged(path, "it is cut off"));
    };
    if header != sealer.header {
        return Err(damaged(path, "its header is that of another object"));
    }
    sealer
        .open(0, piece.to_vec())
        .ok_or_else(|| damaged(path, "its content is not what was written"))
}

impl Manifest {
    /// From the JSON of a manifest, which its seal has proven to be what somebody with the key wrote.
    pub fn parse(path: &str, bytes: &[u8], chunk_size: u64) -> Result<Self> {
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|e| damaged(path, &e.to_string()))?;
        let slots = manifest.size.div_ceil(chunk_size);
        let lists = slots.div_ceil(LIST as u64);
        let names = [&manifest.volume, &manifest.backup];
        if manifest.size > LARGEST_VOLUME
            || lists > LISTS_MAX
            || lists != manifest.lists.len() as u64
            || manifest.chunks > slots
            || !names.iter().all(|name| crate::names::is_name(name))
        {
            return Err(damaged(path, "what it says cannot be"));
        }
        Ok(manifest)
    }

    /// The ids of the lists.
    pub fn lists(&self) -> impl Iterator<Item = BlockName> {
        self.lists.iter().flatten().map(|list| list.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(offset: u32, kind: BlobKind) -> Entry {
        let name = BlockName::from_bytes([offset as u8; 32]);
        Entry { name, offset, length: 116, bytes: 100, kind, is_lz4: false }
    }

    #[test]
    fn indexes_as_they_are_and_hostile_ones() {
        let pack = PackIndex {
            id: Id([5; 16]),
            length: 400,
            entries: vec![entry(48, BlobKind::Chunk), entry(164, BlobKind::List)],
        };
        let packs = vec![pack.clone(), PackIndex { id: Id([6; 16]), ..pack.clone() }];
        let bytes = encode_index(&packs);
        assert_eq!(decode_index(&bytes, 4096), Some(packs));
        assert_eq!(decode_index(&[], 4096), Some(vec![]));
        for length in 1..bytes.len() {
            let is_whole = length == bytes.len() / 2;
            assert_eq!(decode_index(&bytes[..length], 4096).is_some(), is_whole, "{length}");
        }
        type Edit = fn(&mut Entry);
        let edits: [Edit; 7] = [
            |e| e.offset = 47,
            |e| e.offset = 285,
            |e| e.offset = u32::MAX,
            |e| e.length = 16,
            |e| e.bytes = 0,
            |e| e.bytes = 101,
            |e| (e.is_lz4, e.bytes) = (true, 4097),
        ];
        for (number, edit) in edits.iter().enumerate() {
            let mut pack = pack.clone();
            edit(&mut pack.entries[0]);
            assert_eq!(decode_index(&encode_index(&[pack]), 4096), None, "edit {number}");
        }
        // Kinds, methods and reserved bytes that nobody knows.
        for (at, value) in [
            (PACK_HEAD + 44, 0),
            (PACK_HEAD + 44, 3),
            (PACK_HEAD + 45, 2),
            (PACK_HEAD + 46, 1),
            (28, 1),
        ] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            assert_eq!(decode_index(&bytes, 4096), None, "byte {at}");
        }
    }

    #[test]
    fn a_config_of_another_format_is_refused() {
        let (id, key) = (Id([1; 16]), [2; 32]);
        let keys = Keys::new(key, id, false);
        let bytes = Config::new(id, CHUNK_SIZE, Some(&key)).encode(&keys).unwrap();
        let (config, line, check) = Config::parse(&bytes).unwrap();
        assert_eq!(check, keys.config_check(line));
        assert_eq!(
            (config.id().unwrap(), config.key(), config.is_encrypted()),
            (id, Some(key), false)
        );
        let text = String::from_utf8(bytes).unwrap();
        use dbs_core::ErrorKind::{Corrupt, Unsupported};
        for (from, to, kind) in [
            ("\"version\":1", "\"version\":2", Unsupported),
            ("\"beta\"", "\"final\"", Unsupported),
            ("\"version\":1", "\"version\":1,\"new\":1", Unsupported),
            ("\"none\"", "\"rot13\"", Unsupported),
            ("\"none\"", "\"aes-256-gcm\"", Corrupt),
            ("1048576", "1048577", Corrupt),
            ("86400", "1", Corrupt),
            ("dbs-repository", "other", Corrupt),
            ("\n", "", Corrupt),
        ] {
            let changed = text.replace(from, to);
            assert_ne!(changed, text);
            let error = Config::parse(changed.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), kind, "{from} {to}: {error}");
        }
    }
}
