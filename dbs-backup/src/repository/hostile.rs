//! A repository of which somebody with the key has written parts as he likes, for the fuzzer.

use super::Id;
use super::format::{self, BlobKind, Config, Entry, Manifest, PackIndex, encode_index};
use super::keys::{Keys, Kind};
use crate::config::Map;
use crate::hostile::{Edits, Parts};
use crate::names::hex;

/// Bytes of a chunk.
pub(crate) const CHUNK: usize = 4096;
/// Packs, one of chunks and one of lists; and what else there is.
const PACKS: [Id; 2] = [Id([2; 16]), Id([3; 16])];
const INDEX: Id = Id([4; 16]);
const MANIFEST: Id = Id([5; 16]);
const CONDEMNED: Id = Id([6; 16]);
const VOLUME: &str = "v1";
const BACKUP: &str = "b1";

/// What is sealed is edited before it is: seals keep nobody off who has the key, which is in the config of a repository that is
/// not encrypted.
pub(crate) fn objects(edits: &Edits<'_>) -> Parts {
    let (id, key) = (Id([1; 16]), [7; 32]);
    let keys = Keys::new(key, id, false);
    let mut config = format::encode(&Config::new(id, CHUNK as u64, Some(&key))).unwrap_or_default();
    edits.apply(0, &mut config);
    let check = keys.config_check(&config);
    let config = [&config[..], b"\n", check.to_hex().as_bytes(), b"\n"].concat();

    let chunks = [vec![1; CHUNK], (0..CHUNK).map(|at| (at % 251) as u8).collect()];
    let [first, second] = [0, 1].map(|at| keys.chunk(&chunks[at]));
    let mut list = [first.bytes(), second.bytes(), [0; 32], first.bytes()].concat();
    edits.apply(1, &mut list);
    let list_name = keys.list(&list);
    let mut packed = lz4_flex::block::compress(&chunks[0]);
    edits.apply(2, &mut packed);
    let blobs = [
        vec![(first, packed, CHUNK, true), (second, chunks[1].clone(), CHUNK, false)],
        vec![(list_name, list.clone(), list.len(), false)],
    ];
    let mut parts = Parts::new();
    let mut indexed = Vec::new();
    for (number, (pack, blobs)) in PACKS.into_iter().zip(blobs).enumerate() {
        let sealer = keys.object(Kind::Pack, pack);
        let kind = if number == 0 { BlobKind::Chunk } else { BlobKind::List };
        let (mut bytes, mut entries) = (sealer.header.to_vec(), Vec::new());
        for (piece, (name, content, plain, is_lz4)) in blobs.into_iter().enumerate() {
            let offset = bytes.len();
            sealer.seal(piece as u64, &content, &mut bytes);
            let length = (bytes.len() - offset) as u32;
            let (offset, bytes) = (offset as u32, plain as u32);
            entries.push(Entry { name, offset, length, bytes, kind, is_lz4 });
        }
        let edit = |footer: &mut Vec<u8>| edits.apply(3 + number as u8, footer);
        format::end_pack_with(&sealer, &entries, &mut bytes, edit);
        edits.apply(5 + number as u8, &mut bytes);
        indexed.push(PackIndex { id: pack, length: bytes.len() as u64, entries });
        parts.push((format::pack_path(pack), bytes));
    }
    let manifest = Manifest {
        volume: VOLUME.to_owned(),
        backup: BACKUP.to_owned(),
        snapshot: "s1".to_owned(),
        asked_at: "2026-11-25T11:00:00Z".to_owned(),
        created: "2026-11-25T11:00:01Z".to_owned(),
        size: 4 * CHUNK as u64,
        chunks: 3,
        uploaded: 1,
        incremental: false,
        labels: Map::from([("dbs-volume-size".to_owned(), (4 * CHUNK).to_string())]),
        lists: vec![Some(format::ListName(list_name))],
    };
    let manifest = format::encode(&manifest).unwrap_or_default();
    let tags = (keys.name(&["volume", VOLUME]), keys.name(&["backup", VOLUME, BACKUP]));
    let place = format!("manifests/{}/{}-{}", tags.0, tags.1, hex(&MANIFEST.0));
    let sealed = [
        (7, Kind::Index, INDEX, format!("index/{}", hex(&INDEX.0)), encode_index(&indexed)),
        (8, Kind::Manifest, MANIFEST, place, manifest),
        (9, Kind::Condemned, CONDEMNED, format!("condemned/{}", hex(&CONDEMNED.0)), vec![9; 16]),
    ];
    for (part, kind, id, place, mut plain) in sealed {
        edits.apply(part, &mut plain);
        let mut object = format::seal_object(&keys, kind, id, &plain);
        edits.apply(part + 3, &mut object);
        parts.push((format::path(&place), object));
    }
    // Last: whether it is a repository at all.
    parts.push((format::path("config"), edits.applied(13, config)));
    parts
}
