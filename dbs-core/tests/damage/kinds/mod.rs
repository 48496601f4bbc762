//! The kinds of damage: how each is planted, and what `check` says of it.

mod entries;
mod outcomes;
mod slots;
mod superblocks;

use crate::common::BLOCK;
use crate::plant::{EXTENTS, LABELS, Plant, SNAPSHOTS, SPARES, VOLUMES};
use dbs_core::ErrorKind;
use dbs_core::format::{BlockKind, block};
use dbs_core::info::Severity;

/// What comes of a check.
pub enum Expect {
    /// This, in this region.
    Finding(Severity, &'static str),
    /// It is no store that can be checked.
    Error(ErrorKind),
}

/// One kind of damage.
pub struct Kind {
    pub name: &'static str,
    /// Planted into a store that was not closed.
    pub crashed: bool,
    /// Damages the store; returns the index that the finding names.
    pub plant: fn(&Plant<'_>) -> Option<u64>,
    pub expect: Expect,
    /// What the message contains: the thing, and the consequence.
    pub says: &'static [&'static str],
    /// What a repair makes of it: `whole`, `refused`, `journal` (to the state before), or what is not
    /// as before, `-` in front of what has no such name any more.
    pub repaired: &'static str,
}

type Planter = fn(&Plant<'_>) -> Option<u64>;
type Says = &'static [&'static str];

const SUPERBLOCK: &str = "superblock";
const VOLUME: &str = "volume table";
const SNAPSHOT: &str = "snapshot table";
const LABEL: &str = "labels";
const RING: &str = "journal";
const SPARE: &str = "spare entries";
const EXTENT: &str = "extent status";
const SUMS: &str = "checksums";

fn found(
    severity: Severity,
    region: &'static str,
    name: &'static str,
    says: Says,
    plant: Planter,
) -> Kind {
    let expect = Expect::Finding(severity, region);
    Kind { name, crashed: false, plant, expect, says, repaired: "whole" }
}

fn note(region: &'static str, name: &'static str, says: Says, plant: Planter) -> Kind {
    found(Severity::Note, region, name, says, plant)
}

fn leak(region: &'static str, name: &'static str, says: Says, plant: Planter) -> Kind {
    found(Severity::Leak, region, name, says, plant)
}

fn corrupt(region: &'static str, name: &'static str, says: Says, plant: Planter) -> Kind {
    found(Severity::Corrupt, region, name, says, plant)
}

fn error(kind: ErrorKind, name: &'static str, says: Says, plant: Planter) -> Kind {
    Kind { name, crashed: false, plant, expect: Expect::Error(kind), says, repaired: "refused" }
}

/// Of a store that was not closed.
fn crashed(kind: Kind) -> Kind {
    Kind { crashed: true, ..kind }
}

/// All of them.
pub fn kinds() -> Vec<Kind> {
    let mut kinds = superblocks::superblock_copies();
    kinds.extend(superblocks::superblocks());
    kinds.extend(superblocks::geometries());
    kinds.extend(blocks());
    kinds.extend(lost_blocks());
    kinds.extend(slots::volumes());
    kinds.extend(slots::snapshots());
    kinds.extend(slots::labels());
    kinds.extend(entries::extents());
    kinds.extend(entries::spares());
    kinds.extend(entries::groups());
    kinds.extend(entries::records());
    kinds.extend(pages());
    for (name, outcome) in outcomes::OUTCOMES {
        let kind = kinds.iter_mut().find(|kind| kind.name == *name);
        kind.unwrap_or_else(|| panic!("no kind {name}")).repaired = outcome;
    }
    kinds
}

/// Metadata blocks and their headers.
fn blocks() -> Vec<Kind> {
    vec![
        note(VOLUME, "copy A rotten", &["copy 0: checksum", "the other copy is good"], |p| {
            p.rot(VOLUMES, 0, 0);
            Some(0)
        }),
        note(SNAPSHOT, "copy B rotten", &["copy 1: checksum", "the other copy is good"], |p| {
            p.rot(SNAPSHOTS, 0, 1);
            Some(0)
        }),
        note(EXTENT, "copy A at the place of copy B", &["copy 1: written for another"], |p| {
            let bytes = p.get(p.address(EXTENTS, 0, 0), BLOCK);
            p.disk.put(p.address(EXTENTS, 0, 1), &bytes);
            Some(0)
        }),
        note(SPARE, "a block of another store", &["belongs to another store"], |p| {
            let at = p.address(SPARES, 0, 0);
            let mut bytes = p.get(at, BLOCK);
            block::seal(&mut bytes, BlockKind::Spares, &[9; 16], at, 1, [0; 24]);
            p.disk.put(at, &bytes);
            Some(0)
        }),
        note(EXTENT, "a block of another region", &["not a metadata block of this region"], |p| {
            let at = p.address(EXTENTS, 0, 1);
            let mut bytes = p.get(at, BLOCK);
            block::seal(&mut bytes, BlockKind::Spares, &p.uuid(), at, 1, [0; 24]);
            p.disk.put(at, &bytes);
            Some(0)
        }),
        note(SNAPSHOT, "a copy of zeros", &["copy 0: never written"], |p| {
            p.disk.put(p.address(SNAPSHOTS, 0, 0), &[0; BLOCK]);
            Some(0)
        }),
        note(VOLUME, "a stale copy", &["copy 1: as of commit group", "other copy is good"], |p| {
            p.seal_copy(VOLUMES, 0, 1, -1, |payload| payload[600..].fill(0));
            Some(0)
        }),
    ]
}

/// The page of checksums of a store that was closed: what it said is lost, and no data.
fn pages() -> Vec<Kind> {
    const NOT_COMPARED: &str = "the data of this group of pages is not compared";
    fn sealed(p: &Plant<'_>, away: u64, extra: u8) -> Option<u64> {
        let mut bytes = p.get(p.page(), BLOCK);
        block::seal(&mut bytes, BlockKind::Sums, &p.uuid(), p.page() + away, 0, [extra; 24]);
        p.disk.put(p.page(), &bytes);
        Some(0)
    }
    vec![
        note(SUMS, "a rotten page of checksums", &["checksum mismatch", NOT_COMPARED], |p| {
            p.disk.flip(p.page() + 777, 0x10);
            Some(0)
        }),
        note(SUMS, "a page of checksums of others", &["for another address", NOT_COMPARED], |p| {
            sealed(p, BLOCK as u64, 2)
        }),
        note(SUMS, "a page of no known state", &["no known state", NOT_COMPARED], |p| {
            sealed(p, 0, 9)
        }),
    ]
}

/// Blocks of which no copy is good, or both are too new.
fn lost_blocks() -> Vec<Kind> {
    vec![
        corrupt(
            VOLUME,
            "both copies of volume slots",
            &["both copies", "volumes of slots 0"],
            |p| {
                p.rot_both(VOLUMES, 0);
                Some(0)
            },
        ),
        corrupt(
            SNAPSHOT,
            "both copies of snapshot slots",
            &["both copies", "snapshots and heads of slots 0 to 7"],
            |p| {
                p.rot_both(SNAPSHOTS, 0);
                Some(0)
            },
        ),
        corrupt(LABEL, "both copies of labels", &["both copies", "labels of the snapshot"], |p| {
            let block = 2 * p.snapshot_slot("alpha@two");
            p.rot_both(LABELS, block);
            Some(block)
        }),
        corrupt(SPARE, "both copies of spare entries", &["both copies", "zeros in any"], |p| {
            p.rot_both(SPARES, 0);
            Some(0)
        }),
        corrupt(EXTENT, "both copies of extent entries", &["both copies", "any range"], |p| {
            p.rot_both(EXTENTS, 0);
            Some(0)
        }),
        corrupt(EXTENT, "newer than the journal", &["newer than the last", "missing"], |p| {
            p.seal(EXTENTS, 0, 5, |_| {});
            Some(0)
        }),
    ]
}
