//! `docs/format.md` says what the types say, and a change of either shows in review.

use super::block::{BlockHeader, BlockKind, PAYLOAD_BYTES};
use super::compressed::{IndexFrame, IndexHeader};
use super::entry::EntryHeader;
use super::geometry::{LABEL_BLOCKS, RegionKind, SLOTS_PER_BLOCK, SUPERBLOCK_REGION_BYTES};
use super::journal::{GROUP_BLOCK_BYTES, GroupExtra, Stamp};
use super::record::{FillState, Record};
use super::slots::{self, KeySlot, SnapshotSlot, VolumeSlot};
use super::sums::{PAGES_PER_GROUP, SUMS_PER_PAGE, SumsExtra};
use super::superblock::{self, RegionEntry, SuperblockBytes};
use crate::limits;
use std::fmt::Write;
use std::mem::offset_of;

const DOC: &str = include_str!("../../../docs/format.md");
const SNAPSHOT: &str = include_str!("../../tests/fixtures/layout.txt");

struct Layout {
    name: &'static str,
    size: usize,
    /// Offset, size and name of each field.
    fields: Vec<(usize, usize, &'static str)>,
}

const fn field_size<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! layout {
    ($type:ident: $($field:ident)*) => {
        Layout {
            name: stringify!($type),
            size: size_of::<$type>(),
            fields: vec![$((
                offset_of!($type, $field),
                field_size(|value: &$type| &value.$field),
                stringify!($field),
            )),*],
        }
    };
}

fn layouts() -> Vec<Layout> {
    vec![
        layout!(SuperblockBytes: magic version crc uuid sequence address compat ro_compat incompat
            created_ns size extent_bytes block_bytes volumes snapshots spares extents_max reserved0
            clean_sequence clean_marks regions given_uuid reserved1),
        layout!(RegionEntry: kind reserved offset length),
        layout!(BlockHeader: kind crc address lsn store extra),
        layout!(VolumeSlot: uuid size created_ns revision head flags name_bytes reserved0 name
            limit_iops limit_burst_seconds limit_bandwidth key reserved1),
        layout!(KeySlot: method secret lanes memory_kib passes salt wrapped family),
        layout!(SnapshotSlot: uuid size created_ns revision volume parent flags name_bytes used
            reserved0 name family reserved1),
        layout!(EntryHeader: snapshot logical run state),
        layout!(GroupExtra: index count crc bytes session),
        layout!(Stamp: sequence crc),
        layout!(SumsExtra: state group reserved),
        layout!(IndexHeader: magic crc frames reserved),
        layout!(IndexFrame: crc length reserved),
    ]
}

/// One record of each kind, with its name.
fn records() -> Vec<(&'static str, Record<'static>)> {
    let boot = [0xbb; 16];
    vec![
        ("Checkpoint", Record::Checkpoint { sequence: 7, marks: [1, 2, 3, 4], boot, tail: true }),
        ("Volume", Record::Volume { index: 1, slot: &[0xaa; 504] }),
        ("Snapshot", Record::Snapshot { index: 2, slot: &[0xaa; 504] }),
        ("Labels", Record::Labels { index: 3, bytes: b"abc" }),
        ("Entry", Record::Entry { entry: 4, bytes: &[0xcc; 20] }),
        ("Fill", Record::Fill { entry: 5, start: 6, count: 7, state: FillState::Zero }),
        ("Free", Record::Free { entry: 8 }),
        ("Mark", Record::Mark { region: 3, blocks: 9 }),
        ("Drop", Record::Drop { index: 10, volume: 11 }),
    ]
}

const KINDS: [BlockKind; 7] = [
    BlockKind::Volumes,
    BlockKind::Snapshots,
    BlockKind::Labels,
    BlockKind::Journal,
    BlockKind::Spares,
    BlockKind::Extents,
    BlockKind::Sums,
];

const VOLUME_FLAGS: [(u32, &str); 1] = [(slots::VOLUME_REBUILDING, "REBUILDING")];

const FLAGS: [(u32, &str); 7] = [
    (slots::SNAPSHOT_HEAD, "HEAD"),
    (slots::SNAPSHOT_USER_CREATED, "USER_CREATED"),
    (slots::SNAPSHOT_PROTECTED, "PROTECTED"),
    (slots::SNAPSHOT_DELETED, "DELETED"),
    (slots::SNAPSHOT_LABELLED, "LABELLED"),
    (slots::SNAPSHOT_RETIRED, "RETIRED"),
    (slots::SNAPSHOT_BACKED, "BACKED"),
];

/// Cells of the rows of the table behind a marker.
fn table(marker: &str) -> Vec<Vec<String>> {
    let marker = format!("<!-- {marker} -->\n");
    let (_, rest) = DOC.split_once(&marker).unwrap_or_else(|| panic!("no {marker}"));
    let rows = rest.lines().take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| {
        let row = row.trim_matches('|').replace("\\|", "or");
        row.split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    })
    .collect()
}

fn kind_text(kind: BlockKind) -> String {
    String::from_utf8((kind as u32).to_le_bytes().to_vec()).unwrap()
}

#[test]
fn byte_tables_are_those_of_the_types() {
    for layout in layouts() {
        let mut end = 0;
        for (offset, size, name) in &layout.fields {
            assert_eq!(*offset, end, "{}.{name}: a field is missing here", layout.name);
            end += size;
        }
        assert_eq!(end, layout.size, "{}", layout.name);
        let rows: Vec<_> = table(&format!("layout: {}", layout.name))
            .iter()
            .map(|row| (row[0].parse().unwrap(), row[1].parse().unwrap(), row[2].clone()))
            .collect();
        let fields: Vec<_> = layout.fields.iter().map(|f| (f.0, f.1, f.2.to_owned())).collect();
        assert_eq!(rows, fields, "{}", layout.name);
    }
}

#[test]
fn kinds_and_flags_are_those_of_the_types() {
    let regions: Vec<_> =
        table("values: RegionKind").iter().map(|r| (r[0].clone(), r[1].clone())).collect();
    let known = RegionKind::ALL.map(|kind| ((kind as u32).to_string(), kind.name().to_owned()));
    assert_eq!(regions, known);
    let kinds: Vec<_> = table("values: BlockKind").iter().map(|row| row[0].clone()).collect();
    assert_eq!(kinds, KINDS.map(kind_text));
    flags_are_those_of("values: VOLUME", &VOLUME_FLAGS, slots::VOLUME_FLAGS);
    flags_are_those_of("values: SNAPSHOT", &FLAGS, slots::SNAPSHOT_FLAGS);
}

fn flags_are_those_of(marker: &str, known: &[(u32, &str)], all: u32) {
    let flags: Vec<_> = table(marker).iter().map(|r| (r[0].clone(), r[1].clone())).collect();
    let known_texts = known.iter().map(|(flag, name)| (format!("{flag:#x}"), (*name).to_owned()));
    assert!(flags.into_iter().eq(known_texts), "{marker}");
    assert_eq!(known.iter().fold(0, |all, (flag, _)| all | flag), all, "{marker}");
}

/// Bytes of a body as the table has it, such as `entry u32, start u16, slot u8 x504`; variable
/// parts as in the samples.
fn body_bytes(text: &str) -> usize {
    let field = |field: &str| {
        let mut words = field.split_whitespace().skip(1);
        let bits: usize = words.next().unwrap().trim_start_matches('u').parse().unwrap();
        let count = match words.next().map(|count| count.trim_start_matches('x')) {
            None => 1,
            Some("0..4032") => 3,
            Some(text) if text.starts_with("(16") => 20,
            Some(count) => count.parse().unwrap(),
        };
        bits / 8 * count
    };
    text.split(", ").map(field).sum()
}

#[test]
fn the_record_table_is_that_of_the_type() {
    let rows = table("records");
    let records = records();
    assert_eq!(rows.len(), records.len());
    for (row, (name, record)) in rows.iter().zip(&records) {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        assert_eq!((row[0].parse(), row[1].as_str()), (Ok(bytes[0]), *name));
        assert_eq!(bytes[0], record.tag());
        assert_eq!(bytes.len() - 4, body_bytes(&row[2]), "{name}");
    }
    for tag in 0..=255 {
        let known = records.iter().any(|(_, record)| record.tag() == tag);
        let mut bytes = vec![tag, 0, 0, 0];
        let decodes = (0..600u16).any(|length| {
            bytes.resize(4 + length as usize, 0);
            bytes[2..4].copy_from_slice(&length.to_le_bytes());
            Record::decode(&mut bytes.as_slice()).is_some()
        });
        assert_eq!(decodes, known, "tag {tag}");
    }
}

/// Everything that a change of the format changes, as text.
fn printed() -> String {
    let mut out = String::new();
    for layout in layouts() {
        writeln!(out, "{} {}", layout.name, layout.size).unwrap();
        for (offset, size, name) in layout.fields {
            writeln!(out, "  {offset:4} {size:4} {name}").unwrap();
        }
    }
    let magic = String::from_utf8_lossy(&superblock::MAGIC);
    writeln!(out, "superblock {magic} {:#010x}", superblock::VERSION).unwrap();
    let (compat, ro, incompat) =
        (superblock::COMPAT_KNOWN, superblock::RO_COMPAT_KNOWN, superblock::INCOMPAT_KNOWN);
    writeln!(out, "features compat {compat:#x} ro_compat {ro:#x} incompat {incompat:#x}").unwrap();
    for kind in RegionKind::ALL {
        writeln!(out, "region {} {}", kind as u32, kind.name()).unwrap();
    }
    KINDS.iter().for_each(|kind| writeln!(out, "kind {}", kind_text(*kind)).unwrap());
    FLAGS.iter().for_each(|(flag, name)| writeln!(out, "flag {flag:#x} {name}").unwrap());
    for (flag, name) in VOLUME_FLAGS {
        writeln!(out, "volume flag {flag:#x} {name}").unwrap();
    }
    for (name, record) in records() {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        bytes.truncate(64);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(out, "record {name} {hex}").unwrap();
    }
    for (name, value) in [
        ("payload", PAYLOAD_BYTES as u64),
        ("group payload", GROUP_BLOCK_BYTES as u64),
        ("slots per block", SLOTS_PER_BLOCK.into()),
        ("label blocks", LABEL_BLOCKS.into()),
        ("sums per page", SUMS_PER_PAGE as u64),
        ("pages per group", PAGES_PER_GROUP.into()),
        ("first region", SUPERBLOCK_REGION_BYTES),
        ("labels", limits::LABELS_MAX_BYTES as u64),
        ("name", limits::NAME_MAX_BYTES as u64),
        ("sequence", limits::SEQUENCE_MAX),
    ] {
        writeln!(out, "{name} {value}").unwrap();
    }
    out
}

#[test]
fn the_layout_is_the_one_that_was_reviewed() {
    let printed = printed();
    assert!(
        printed == SNAPSHOT,
        "the format changed: if it is meant to, change docs/format.md and the version, and make \
         tests/fixtures/layout.txt this:\n{printed}"
    );
}
