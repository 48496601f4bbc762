//! Streams between stores in memory: whole, cut, damaged, resumed, and where they do not fit.

use super::header::PREFIX_BYTES;
use super::record::{Decoder, Encoder, Kind, Record};
use super::*;
use crate::memory::{MemoryStore, sent};
use dbs_core::format::crc::{crc32c, crc32c_append};
use dbs_core::info::Labels;
use dbs_core::store::{SnapshotOptions, WrappedKey};
use dbs_core::{Error, ErrorKind, Result};
use proptest::prelude::*;
use std::io::Cursor;

const BLOCK: u64 = 4096;

fn always(_: u64, _: u64) -> bool {
    true
}

fn snapshot(store: &MemoryStore, name: &str) {
    let labels = Labels::from([("purpose".into(), format!("test {name}"))]);
    store
        .create_snapshot(
            "v",
            name,
            &SnapshotOptions { labels, system: name == "b", ..Default::default() },
        )
        .unwrap();
}

/// A store with volume `v` of three blocks and a sector, and snapshots `a`, `b` and `c`.
fn small() -> MemoryStore {
    let store = MemoryStore::new(1);
    store.create_volume("v", 3 * BLOCK + 512).unwrap();
    let volume = store.open("v").unwrap();
    volume.write_at(0, &[0xa0; BLOCK as usize]).unwrap();
    volume.write_at(BLOCK, &[0; BLOCK as usize]).unwrap();
    volume.write_at(3 * BLOCK, &[0xa3; 512]).unwrap();
    snapshot(&store, "a");
    volume.discard(0, BLOCK).unwrap();
    volume.write_at(2 * BLOCK + 512, &[0xb2; 512]).unwrap();
    snapshot(&store, "b");
    store.resize_volume("v", 5 * BLOCK).unwrap();
    volume.write_at(4 * BLOCK, &[0xc4; BLOCK as usize]).unwrap();
    snapshot(&store, "c");
    store
}

fn take(store: &MemoryStore, bytes: &[u8]) -> Result<Received> {
    receive(store, None, bytes, &mut always)
}

/// Both stores have this snapshot of `v`, with the same content and labels.
fn assert_same(source: &MemoryStore, target: &MemoryStore, name: &str) {
    let spec = format!("v@{name}");
    assert!(source.memory(&spec).content().bytes == target.memory(&spec).content().bytes, "{name}");
    let [a, b] = [source, target]
        .map(|store| store.snapshots("v").unwrap().into_iter().find(|s| s.name == name).unwrap());
    assert_eq!(identity(&a), identity(&b));
    assert_eq!(a.user_created, b.user_created);
    assert_eq!(b.labels["purpose"], a.labels["purpose"]);
}

fn fails(result: Result<Received>, kind: ErrorKind, text: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn complete_streams_and_differences_round_trip() {
    let source = small();
    let target = MemoryStore::new(2);
    for (name, base) in [("a", None), ("b", Some("a")), ("c", Some("b"))] {
        let bytes = sent(&source, name, base, None);
        assert_eq!(bytes, sent(&source, name, base, None), "the same stream again");
        let received = take(&target, &bytes).unwrap();
        assert_eq!(received.snapshot, name);
        assert_same(&source, &target, name);
        assert_eq!(pending(&target, "v").unwrap(), None);
        fails(take(&target, &bytes), ErrorKind::Exists, "already has snapshot");
    }
    // A stream may carry several steps at once, and a complete one any snapshot.
    for (name, base) in [("a", None), ("c", Some("a"))] {
        target.delete_volume("v");
        if base.is_some() {
            take(&target, &sent(&source, "a", None, None)).unwrap();
        }
        take(&target, &sent(&source, name, base, None)).unwrap();
        assert_same(&source, &target, name);
    }
    // Zeros and holes of a complete stream take no space.
    assert_eq!(target.memory("v@a").allocated(), 2 * BLOCK);
}

#[test]
fn identity_survives_a_second_hop() {
    let source = small();
    let [second, third] = [MemoryStore::new(2), MemoryStore::new(3)];
    take(&second, &sent(&source, "a", None, None)).unwrap();
    take(&third, &sent(&second, "a", None, None)).unwrap();
    take(&third, &sent(&source, "b", Some("a"), None)).unwrap();
    assert_same(&source, &third, "b");
}

#[test]
fn streams_follow_each_other_in_one_input() {
    let source = small();
    let target = MemoryStore::new(2);
    let mut bytes = sent(&source, "a", None, None);
    bytes.extend(sent(&source, "b", Some("a"), None));
    let mut input = Cursor::new(bytes);
    for name in ["a", "b"] {
        receive(&target, None, &mut input, &mut always).unwrap();
        assert_same(&source, &target, name);
    }
}

/// Receives the rest of an interrupted stream.
fn resume(source: &MemoryStore, target: &MemoryStore, name: &str, base: Option<&str>) {
    let token = pending(target, "v").unwrap().map(|token| token.to_string());
    take(target, &sent(source, name, base, token.as_deref())).unwrap();
    assert_same(source, target, name);
    assert_eq!(pending(target, "v").unwrap(), None);
}

#[test]
fn streams_cut_at_every_byte_are_recognised_and_resumed() {
    let source = small();
    let whole = sent(&source, "a", None, None);
    for length in 0..whole.len() {
        let target = MemoryStore::new(2);
        fails(take(&target, &whole[..length]), ErrorKind::Corrupt, "ends early");
        // Nothing is made before the description is known to be whole.
        if target.volume_info("v").is_ok() {
            assert!(target.snapshots("v").unwrap().iter().all(|s| s.name != "a"));
            resume(&source, &target, "a", None);
        }
    }
    let change = sent(&source, "b", Some("a"), None);
    for length in 0..change.len() {
        let target = MemoryStore::new(2);
        take(&target, &whole).unwrap();
        fails(take(&target, &change[..length]), ErrorKind::Corrupt, "ends early");
        resume(&source, &target, "b", Some("a"));
    }
}

#[test]
fn every_flipped_byte_is_detected_before_it_is_applied() {
    let source = small();
    let before = source.memory("v@a").content().bytes.clone();
    let after = source.memory("v@b").content().bytes.clone();
    let whole = sent(&source, "a", None, None);
    let change = sent(&source, "b", Some("a"), None);
    for (bytes, base, old, new) in
        [(&whole, false, &vec![0; before.len()], &before), (&change, true, &before, &after)]
    {
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            let target = MemoryStore::new(2);
            if base {
                take(&target, &whole).unwrap();
            }
            assert!(take(&target, &damaged).is_err(), "byte {at}");
            if target.volume_info("v").is_err() {
                continue;
            }
            let name = if base { "b" } else { "a" };
            assert!(target.snapshots("v").unwrap().iter().all(|s| s.name != name), "byte {at}");
            let head = target.memory("v").content().bytes.clone();
            for sector in (0..head.len()).step_by(512) {
                let range = sector..sector + 512;
                let now = &head[range.clone()];
                assert!(now == &old[range.clone()] || now == &new[range], "byte {at}");
            }
        }
    }
}

/// Offsets in a stream where records end, with the position each leaves the receiver at.
fn boundaries(bytes: &[u8]) -> Vec<(usize, u64)> {
    let mut input = Cursor::new(bytes);
    let (mut decoder, header) = Decoder::new(&mut input).unwrap();
    let mut kinds = Vec::new();
    let mut record = Record::default();
    while record.kind != Kind::End {
        decoder.next(&mut record).unwrap();
        kinds.push((record.kind, record.offset + record.length, record.payload.len()));
    }
    let length = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    let mut at = PREFIX_BYTES + length + 4;
    let mut found = vec![(at, header.start)];
    for (kind, end, payload) in kinds {
        at += 32 + payload;
        if kind != Kind::End {
            found.push((at, end));
        }
    }
    assert_eq!(at, bytes.len());
    found
}

#[test]
fn receiving_resumes_after_each_record() {
    let source = MemoryStore::new(1);
    source.create_volume("v", 200 * BLOCK).unwrap();
    let volume = source.open("v").unwrap();
    for index in 0..60u64 {
        let data = vec![index as u8 + 1; (1 + index % 2) as usize * BLOCK as usize];
        volume.write_at(index * 3 * BLOCK, &data).unwrap();
    }
    snapshot(&source, "a");
    let whole = sent(&source, "a", None, None);
    let ends = boundaries(&whole);
    assert_eq!(ends.len(), 61);
    let header = ends[0].0;
    for (length, at) in ends {
        let target = MemoryStore::new(2);
        let error = take(&target, &whole[..length]).unwrap_err();
        let token = pending(&target, "v").unwrap().unwrap();
        assert_eq!(token.offset, at);
        assert!(error.to_string().contains(&token.to_string()), "{error}");
        let rest = sent(&source, "a", None, Some(&token.to_string()));
        // Only the digits of the start are more than what is left.
        assert!(rest.len() <= whole.len() - (length - header) + 6);
        take(&target, &rest).unwrap();
        assert_same(&source, &target, "a");
    }
}

#[test]
fn stops_and_second_interruptions_can_be_resumed() {
    let source = small();
    let target = MemoryStore::new(2);
    let whole = sent(&source, "a", None, None);
    let mut records = 0;
    let stopped = receive(&target, None, &whole[..], &mut |_, _| {
        records += 1;
        records < 1
    });
    fails(stopped, ErrorKind::Interrupted, "send --resume");
    let token = pending(&target, "v").unwrap().unwrap().to_string();
    let rest = sent(&source, "a", None, Some(&token));
    fails(take(&target, &rest[..rest.len() - 1]), ErrorKind::Corrupt, "ends early");
    // Sending all of it again is as good.
    take(&target, &whole).unwrap();
    assert_same(&source, &target, "a");
}

#[test]
fn checkpoints_are_kept_while_the_stream_runs() {
    let source = MemoryStore::new(1);
    source.create_volume("v", 130 << 20).unwrap();
    source.open("v").unwrap().write_at(0, &vec![5; 130 << 20]).unwrap();
    snapshot(&source, "a");
    let target = MemoryStore::new(2);
    let mut seen = std::collections::BTreeSet::new();
    receive(&target, None, &sent(&source, "a", None, None)[..], &mut |_, _| {
        seen.extend(pending(&target, "v").unwrap().map(|token| token.offset));
        true
    })
    .unwrap();
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 64 << 20, 128 << 20]);
    assert_same(&source, &target, "a");
}

#[test]
fn what_does_not_fit_is_refused_with_the_way_out() {
    let source = small();
    let [whole, change, last] =
        [("a", None), ("b", Some("a")), ("c", Some("b"))].map(|(n, b)| sent(&source, n, b, None));
    let target = MemoryStore::new(2);
    fails(take(&target, &change), ErrorKind::NotFound, "receive that snapshot completely first");
    target.create_volume("v", 512).unwrap();
    fails(take(&target, &whole), ErrorKind::Exists, "under another name");
    target.delete_volume("v");
    let uuid = source.snapshots("v").unwrap()[0].uuid.clone();
    let part = sent(&source, "a", None, Some(&format!("{uuid}:{BLOCK}")));
    fails(take(&target, &part), ErrorKind::Invalid, "received only 0 bytes");

    take(&target, &whole).unwrap();
    fails(take(&target, &last), ErrorKind::NotFound, "does not have snapshot");
    let volume = target.open("v").unwrap();
    volume.write_at(0, &[1; 512]).unwrap();
    fails(take(&target, &change), ErrorKind::Invalid, "dbs snapshot rollback v@a");
    target.rollback("v", "a").unwrap();
    snapshot(&target, "mine");
    fails(take(&target, &change), ErrorKind::Invalid, "dbs snapshot rollback v@a");
    target.rollback("v", "a").unwrap();
    snapshot(&target, "b");
    fails(take(&target, &change), ErrorKind::Exists, "rename it");
    target.delete_snapshot("v", "b").unwrap();
    target.rollback("v", "a").unwrap();

    fails(take(&target, &change[..change.len() - 1]), ErrorKind::Corrupt, "ends early");
    let other = sent(&source, "c", Some("a"), None);
    fails(take(&target, &other), ErrorKind::Busy, "finish it with `send --resume");
    target.rollback("v", "a").unwrap();
    fails(take(&target, &change), ErrorKind::Busy, "dbs snapshot rollback v@a");
    // As the command does.
    target.complete("v").unwrap();
    target.delete_snapshot("v", "dbs-receiving").unwrap();
    take(&target, &change).unwrap();
    assert_same(&source, &target, "b");
}

#[test]
fn what_the_header_makes_impossible_is_refused_at_the_start() {
    let source = small();
    // The receiver adds a label of its own.
    let labels = Labels::from([("k".into(), "x".repeat(7980))]);
    let long = SnapshotOptions { labels, ..Default::default() };
    long.check("long").unwrap();
    source.create_snapshot("v", "long", &long).unwrap();
    source.create_snapshot("v", "dbs-receiving", &SnapshotOptions::default()).unwrap();
    let target = MemoryStore::new(2);
    for (name, text) in [("long", "the labels need more"), ("dbs-receiving", "rename")] {
        let whole = sent(&source, name, None, None);
        fails(take(&target, &whole), ErrorKind::Invalid, text);
        assert!(target.volume_info("v").is_err(), "nothing was made");
    }
}

#[test]
fn force_rolls_back_what_is_in_the_way() {
    let source = small();
    let [whole, change] = [("a", None), ("b", Some("a"))].map(|(n, b)| sent(&source, n, b, None));
    let other = sent(&source, "c", Some("a"), None);
    let force = |target: &MemoryStore, bytes: &[u8]| {
        let options = ReceiveOptions { force: true, ..ReceiveOptions::default() };
        let received = receive_all(target, &options, bytes, &mut |_| {}, &mut always);
        received.map(|mut all| all.remove(0))
    };
    type Spoil<'a> = &'a dyn Fn(&MemoryStore);
    let spoils: [(&str, Spoil<'_>); 4] = [
        ("nothing", &|_| {}),
        ("written", &|target| target.open("v").unwrap().write_at(0, &[1; 512]).unwrap()),
        ("a newer snapshot", &|target| snapshot(target, "mine")),
        ("another stream", &|target| {
            fails(take(target, &other[..other.len() - 1]), ErrorKind::Corrupt, "ends early");
        }),
    ];
    for (what, spoil) in spoils {
        let target = MemoryStore::new(2);
        take(&target, &whole).unwrap();
        spoil(&target);
        assert_eq!(take(&target, &change).is_err(), what != "nothing", "{what}");
        if what == "nothing" {
            continue;
        }
        force(&target, &change).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_same(&source, &target, "b");
        assert!(!target.volume_info("v").unwrap().rebuilding, "{what}");
        fails(force(&target, &change), ErrorKind::Exists, "already has snapshot");
    }
    // It is no way to lose a volume that has nothing to do with it, nor what is to be resumed.
    let target = MemoryStore::new(2);
    target.create_volume("v", 512).unwrap();
    fails(force(&target, &change), ErrorKind::NotFound, "does not have snapshot");
    fails(force(&target, &whole), ErrorKind::Exists, "under another name");
    target.delete_volume("v");
    take(&target, &whole).unwrap();
    fails(take(&target, &change[..change.len() - 1]), ErrorKind::Corrupt, "ends early");
    let token = pending(&target, "v").unwrap().unwrap().to_string();
    force(&target, &sent(&source, "b", Some("a"), Some(&token))).unwrap();
    assert_same(&source, &target, "b");
}

#[test]
fn an_empty_volume_of_the_size_takes_a_complete_stream() {
    let source = small();
    let target = MemoryStore::new(2);
    target.create_volume("v", 3 * BLOCK + 512).unwrap();
    take(&target, &sent(&source, "a", None, None)).unwrap();
    assert_same(&source, &target, "a");
}

#[test]
fn a_crash_before_the_marker_is_deleted_is_cleaned_up() {
    let source = small();
    let target = MemoryStore::new(2);
    let whole = sent(&source, "a", None, None);
    take(&target, &whole[..whole.len() - 1]).unwrap_err();
    let uuid = source.snapshots("v").unwrap()[0].uuid.clone();
    let labels = Labels::from([(RECEIVED_LABEL.into(), uuid)]);
    target
        .create_snapshot("v", "a", &SnapshotOptions { labels, system: false, ..Default::default() })
        .unwrap();
    assert_eq!(take(&target, &whole).unwrap().data, 0);
    assert_eq!(target.snapshots("v").unwrap().len(), 1);
}

#[test]
fn other_versions_and_other_files_are_refused() {
    let source = small();
    let target = MemoryStore::new(2);
    let whole = sent(&source, "a", None, None);
    for (at, kind) in [
        (0, ErrorKind::Invalid),
        (8, ErrorKind::Unsupported),
        (10, ErrorKind::Unsupported),
        (15, ErrorKind::Corrupt),
    ] {
        let mut wrong = whole.clone();
        wrong[at] ^= 0x80;
        assert_eq!(take(&target, &wrong).unwrap_err().kind(), kind, "byte {at}");
    }
    let options = SendOptions {
        volume: "v".into(),
        snapshot: "b".into(),
        base: None,
        resume: Some(format!("{}:0", source.snapshots("v").unwrap()[0].uuid).parse().unwrap()),
        more: false,
    };
    let error = send(&source, &options, Vec::new(), &mut always).unwrap_err();
    assert!(error.to_string().contains("does not belong to v@b"), "{error}");
    let missing = SendOptions { resume: None, snapshot: "x".into(), ..options };
    let error: Error = send(&source, &missing, Vec::new(), &mut always).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

/// Numbers that are often sizes, often impossible.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0u64..40).prop_map(|sectors| sectors * 512),
        1 => (0u64..1 << 54).prop_map(|sectors| sectors * 512),
        1 => any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Damage that a checksum cannot see, because the record was made so.
    #[test]
    fn nonsense_with_a_right_checksum_never_panics(
        size in number(),
        start in number(),
        records in prop::collection::vec((0u16..6, number(), number()), 0..6),
    ) {
        let header = format!(
            r#"{{"volume":"v","snapshot":"s","uuid":"{0}","base":null,"size":{size},
               "created_ns":0,"user_created":true,"labels":{{}},"start":{start}}}"#,
            "00000000-0000-4000-8000-000000000000",
        );
        let mut bytes = b"DBS-SEND\x01\0\0\0".to_vec();
        bytes.extend((header.len() as u32).to_le_bytes());
        bytes.extend(header.as_bytes());
        let seed = crc32c(&bytes);
        bytes.extend(seed.to_le_bytes());
        for (number, (kind, offset, length)) in records.into_iter().enumerate() {
            let mut record = vec![0; 4];
            record.extend(u32::from(kind).to_le_bytes());
            record.extend((number as u64).to_le_bytes());
            record.extend(offset.to_le_bytes());
            record.extend(length.to_le_bytes());
            record.extend(vec![1; if kind == 1 { length.min(20_480) as usize } else { 0 }]);
            let crc = crc32c_append(seed, &record[4..]);
            record[..4].copy_from_slice(&crc.to_le_bytes());
            bytes.extend(record);
        }
        if let Ok((mut decoder, _)) = Decoder::new(&bytes[..]) {
            let mut record = Record::default();
            while decoder.next(&mut record).is_ok() {
                prop_assert!(record.offset + record.length <= size);
                prop_assert!(record.kind != Kind::End);
            }
        }
    }

    #[test]
    fn any_difference_round_trips(
        writes in prop::collection::vec((0u64..64, 1u64..8, 0u8..3), 0..12),
        more in prop::collection::vec((0u64..64, 1u64..8, 0u8..3), 0..12),
    ) {
        let source = MemoryStore::new(1);
        source.create_volume("v", 72 * 512).unwrap();
        let volume = source.open("v").unwrap();
        for (name, writes) in [("a", writes), ("b", more)] {
            for (sector, count, fill) in writes {
                let data = vec![fill; count as usize * 512];
                volume.write_at(sector * 512, &data).unwrap();
            }
            snapshot(&source, name);
        }
        let target = MemoryStore::new(2);
        take(&target, &sent(&source, "a", None, None)).unwrap();
        take(&target, &sent(&source, "b", Some("a"), None)).unwrap();
        assert_same(&source, &target, "a");
        assert_same(&source, &target, "b");
    }
}

#[test]
fn records_before_a_checkpoint_or_out_of_order_are_refused() {
    let source = small();
    let whole = sent(&source, "a", None, None);
    let (_, header) = Decoder::new(&whole[..]).unwrap();
    type Write = fn(&mut Encoder<&mut Vec<u8>>) -> Result<()>;
    let orders: [(Write, bool); 5] = [
        (|e| e.zero(0, 512).and_then(|()| e.zero(512, 512)), true),
        (|e| e.zero(0, 1024).and_then(|()| e.zero(512, 512)), false),
        (|e| e.checkpoint(1024).and_then(|()| e.zero(1024, 512)), true),
        (|e| e.checkpoint(1024).and_then(|()| e.zero(512, 512)), false),
        (|e| e.zero(0, 1024).and_then(|()| e.checkpoint(512)), false),
    ];
    for (index, (write, right)) in orders.into_iter().enumerate() {
        let mut bytes = Vec::new();
        write(&mut Encoder::new(&mut bytes, &header).unwrap()).unwrap();
        let (mut decoder, _) = Decoder::new(&bytes[..]).unwrap();
        let mut record = Record::default();
        decoder.next(&mut record).unwrap();
        assert_eq!(decoder.next(&mut record).is_ok(), right, "{index}");
    }
}

/// The header of the examples of the specification.
fn example() -> StreamHeader {
    StreamHeader {
        volume: "v".into(),
        snapshot: "s".into(),
        uuid: "00000000-0000-4000-8000-000000000001".into(),
        base: Some(BaseSnapshot {
            snapshot: "b".into(),
            uuid: "00000000-0000-4000-8000-000000000002".into(),
            volume: None,
        }),
        size: 8192,
        created_ns: 1_700_000_000_000_000_000,
        user_created: true,
        labels: Labels::from([("k".into(), "v".into())]),
        start: 0,
        encryption: None,
        more: false,
    }
}

/// The documented bytes behind a heading are those of a stream with this header.
fn is_documented(heading: &str, header: &StreamHeader) {
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, header).unwrap();
    encoder.zero(4096, 4096).unwrap();
    encoder.checkpoint(8192).unwrap();
    encoder.finish(8192).unwrap();
    let dump: String = bytes
        .chunks(32)
        .map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n")
        .collect();
    let specification = include_str!("../../../../docs/stream.md");
    let behind = specification.split_once(&format!("\n## {heading}\n")).unwrap().1;
    let example = behind.split("```\n").nth(1).unwrap();
    assert_eq!(dump, example, "expected:\n{dump}");
    let (_, found) = Decoder::new(&bytes[..]).unwrap();
    assert_eq!(found, *header);
}

#[test]
fn documented_examples_are_what_is_written() {
    is_documented("Example", &example());
    is_documented(
        "Example of an encrypted volume",
        &StreamHeader { encryption: Some(key()), ..example() },
    );
}

/// A key that nobody knows the secret of.
fn key() -> WrappedKey {
    serde_json::from_value(serde_json::json!({
        "family": "00000000-0000-4000-8000-00000000000f",
        "method": 1, "secret": 2, "lanes": 1, "memory_kib": 8, "passes": 1,
        "salt": "01".repeat(16), "wrapped": "02".repeat(72),
    }))
    .unwrap()
}

/// What the decoder says of a header whose checksum is right.
fn judged(header: &StreamHeader, alter: impl FnOnce(&mut u16, &mut serde_json::Value)) -> String {
    let encoded = header.encode().unwrap();
    let (prefix, description) = encoded.split_at(PREFIX_BYTES);
    let mut features = u16::from_le_bytes([prefix[10], prefix[11]]);
    let mut value = serde_json::from_slice(description).unwrap();
    alter(&mut features, &mut value);
    let description = value.to_string();
    let mut bytes = prefix[..10].to_vec();
    bytes.extend(features.to_le_bytes());
    bytes.extend((description.len() as u32).to_le_bytes());
    bytes.extend(description.bytes());
    bytes.extend(crc32c(&bytes).to_le_bytes());
    Decoder::new(&bytes[..]).map_or_else(|error| error.to_string(), |_| String::new())
}

#[test]
fn hostile_keys_are_refused() {
    let header = StreamHeader { encryption: Some(key()), ..example() };
    assert_eq!(judged(&header, |_, _| {}), "");
    // Ciphertext for content, and content for ciphertext.
    assert!(judged(&header, |features, _| *features = 0).contains("contradict each other"));
    assert!(judged(&example(), |features, _| *features = 2).contains("contradict each other"));
    assert!(judged(&header, |features, _| *features = 6).contains("features 0x6"));
    for (member, value) in [
        ("family", serde_json::json!("00000000-0000-0000-0000-000000000000")),
        ("family", serde_json::json!("ffffffff-ffff-ffff-ffff-ffffffffffff")),
        ("family", serde_json::json!("0000000000004000800000000000000f")),
        ("method", serde_json::json!(255)),
        ("method", serde_json::json!(0)),
        ("secret", serde_json::json!(3)),
        // What trying a secret would cost.
        ("memory_kib", serde_json::json!(1 << 30)),
        ("passes", serde_json::json!(1 << 20)),
        ("lanes", serde_json::json!(0)),
        ("salt", serde_json::json!("01")),
        ("wrapped", serde_json::json!("zz".repeat(72))),
    ] {
        let text = judged(&header, |_, description| description["encryption"][member] = value);
        assert!(text.contains("the stream's key"), "{member}: {text}");
    }
    let text = judged(&header, |_, description| description["start"] = 512.into());
    assert!(text.contains("impossible size 8192 or start 512"), "{text}");
}

#[test]
fn parts_of_encrypted_blocks_are_no_records() {
    let header = StreamHeader { size: 8192 + 512, encryption: Some(key()), ..example() };
    let plain = StreamHeader { encryption: None, ..header.clone() };
    for (offset, length, right) in [
        (0, 4096, true),
        (8192, 512, true),
        (4096, 4096 + 512, true),
        (0, 512, false),
        (512, 4096 - 512, false),
        (512, 4096, false),
    ] {
        for (header, right) in [(&header, right), (&plain, true)] {
            let mut bytes = Vec::new();
            let mut encoder = Encoder::new(&mut bytes, header).unwrap();
            encoder.data(offset, &vec![1; length]).unwrap();
            let (mut decoder, _) = Decoder::new(&bytes[..]).unwrap();
            let found = decoder.next(&mut Record::default());
            assert_eq!(found.is_ok(), right, "{offset}+{length}");
        }
    }
}

#[test]
fn a_base_that_is_replaced_ends_the_send() {
    let source = small();
    let mut done = false;
    source.meanwhile(move |store| {
        if !std::mem::replace(&mut done, true) {
            store.delete_snapshot("v", "a").unwrap();
            snapshot(store, "a");
        }
    });
    let options = SendOptions {
        volume: "v".into(),
        snapshot: "c".into(),
        base: Some("a".into()),
        ..SendOptions::default()
    };
    let mut bytes = Vec::new();
    let error = send(&source, &options, &mut bytes, &mut always).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("`v@a` was deleted or renamed"), "{error}");
    let (mut decoder, _) = Decoder::new(&bytes[..]).unwrap();
    assert!(decoder.next(&mut Record::default()).is_err(), "nothing of a wrong difference is sent");
}
