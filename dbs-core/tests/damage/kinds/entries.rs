//! Entries, and the journal.

use super::{EXTENT, Kind, RING, SPARE, VOLUME, corrupt, crashed, leak, note};
use crate::common::BLOCK;
use crate::plant::{COPIES, EXTENTS, JOURNAL, Plant, SPARES, VOLUMES, entry};
use dbs_core::format::{Record, record::FillState};

pub fn extents() -> Vec<Kind> {
    fn put(p: &Plant<'_>, index: u64, bytes: &[u8]) -> Option<u64> {
        p.entry(EXTENTS, index, |entry| entry.copy_from_slice(bytes))
    }
    fn first(p: &Plant<'_>) -> u64 {
        p.data_of("beta")[0]
    }
    vec![
        leak(EXTENT, "an extent of a free slot", &["which is free", "a writer frees it"], |p| {
            put(p, p.free(EXTENTS, 55)[0], &entry(16, 1, 0, 1, 0))
        }),
        leak(EXTENT, "an extent of no slot", &["which is free", "a writer frees it"], |p| {
            put(p, p.free(EXTENTS, 55)[0], &entry(99_999, 1, 0, 1, 0))
        }),
        corrupt(SPARE, "a hundred entries of free slots", &["too many"], |p| {
            let (extents, spares) = (p.free(EXTENTS, 55), p.free(SPARES, 64));
            for (region, free) in [(EXTENTS, &extents), (SPARES, &spares)] {
                p.seal(region, 0, 0, |payload| {
                    for index in free {
                        let bytes = entry(16, *index as u32, 0, 0, 1);
                        payload[*index as usize * 20..][..20].copy_from_slice(&bytes);
                    }
                });
            }
            Some(spares[99 - extents.len()])
        }),
        corrupt(EXTENT, "an extent claimed twice", &["another entry claims", "not known"], |p| {
            let bytes = p.get(p.address(EXTENTS, 0, 0) + 64 + 20 * first(p), 20);
            put(p, p.free(EXTENTS, 55)[0], &bytes).max(Some(first(p)))
        }),
        corrupt(EXTENT, "an extent behind the data region", &["behind the data region"], |p| {
            let owner = p.snapshot_slot("beta") + 1;
            put(p, 100, &entry(owner, 3, 0, 1, 0))
        }),
        corrupt(
            EXTENT,
            "an extent behind the data region and any volume's end",
            &["behind"],
            |p| {
                let owner = p.snapshot_slot("beta") + 1;
                put(p, 100, &entry(owner, 1 << 30, 0, 1, 0))
            },
        ),
        corrupt(EXTENT, "a part at any volume's end", &["behind the end of any"], |p| {
            let owner = p.snapshot_slot("beta") + 1;
            put(p, p.free(EXTENTS, 55)[0], &entry(owner, 1 << 30, 0, 1, 0))
        }),
        corrupt(EXTENT, "a part behind any volume's end", &["behind the end of any"], |p| {
            let owner = p.snapshot_slot("beta") + 1;
            put(p, p.free(EXTENTS, 55)[0], &entry(owner, u32::MAX, 0, 1, 0))
        }),
        corrupt(EXTENT, "blocks both data and zero", &["both data and zero", "not known"], |p| {
            p.entry(EXTENTS, first(p), |entry| entry[18] = entry[16])
        }),
        corrupt(EXTENT, "an entry's reserved bytes", &["in an unknown state"], |p| {
            p.entry(EXTENTS, first(p), |entry| entry[12] = 7)
        }),
        corrupt(EXTENT, "a run of data", &["a run of zeros with room for data"], |p| {
            p.entry(EXTENTS, first(p), |entry| entry[8] = 3)
        }),
        corrupt(EXTENT, "an owner of none, with a place", &["free and not empty"], |p| {
            p.entry(EXTENTS, first(p), |entry| entry[..4].fill(0))
        }),
        corrupt(EXTENT, "a free entry with blocks", &["free and not empty", "not known"], |p| {
            p.entry(EXTENTS, p.free(EXTENTS, 55)[0], |entry| entry[16] = 1)
        }),
        corrupt(EXTENT, "an entry behind the region's end", &["beyond the region's"], |p| {
            put(p, 150, &entry(1, 3, 0, 1, 0))
        }),
    ]
}

pub fn spares() -> Vec<Kind> {
    fn put(p: &Plant<'_>, index: u64, bytes: &[u8]) -> Option<u64> {
        p.entry(SPARES, index, |entry| entry.copy_from_slice(bytes))
    }
    vec![
        leak(SPARE, "a spare entry of a free slot", &["which is free", "frees it"], |p| {
            put(p, p.free(SPARES, 64)[0], &entry(15, 1, 4, 0, 0))
        }),
        corrupt(SPARE, "data in a spare entry", &["no room for any", "not known"], |p| {
            p.entry(SPARES, p.spares(false)[0], |entry| entry[17] = 2)
        }),
        corrupt(SPARE, "runs that overlap", &["another entry claims", "not known"], |p| {
            let run = p.spares(true)[0];
            let mut bytes = p.get(p.address(SPARES, 0, 0) + 64 + 20 * run, 20);
            bytes[8] += 1;
            put(p, p.free(SPARES, 64)[0], &bytes).max(Some(run))
        }),
        corrupt(SPARE, "a run behind any volume's end", &["behind the end of any"], |p| {
            p.entry(SPARES, p.spares(true)[0], |entry| entry[8..12].fill(0xff))
        }),
        corrupt(SPARE, "a run with single blocks", &["with single blocks", "not known"], |p| {
            p.entry(SPARES, p.spares(true)[0], |entry| entry[19] = 1)
        }),
        corrupt(SPARE, "zeros where there is data", &["another entry claims"], |p| {
            let owner = p.snapshot_slot("beta") + 1;
            put(p, p.free(SPARES, 64)[0], &entry(owner, 0, 0, 0, 1))
        }),
        corrupt(SPARE, "a spare entry's reserved bytes", &["in an unknown state"], |p| {
            p.entry(SPARES, p.spares(false)[0], |entry| entry[15] = 1)
        }),
        corrupt(SPARE, "a spare entry behind the end", &["beyond the region's"], |p| {
            put(p, 100, &entry(1, 3, 1, 0, 0))
        }),
    ]
}

/// Groups of the journal.
pub fn groups() -> Vec<Kind> {
    vec![
        crashed(corrupt(RING, "the last group damaged", &["was the last one", "lost"], |p| {
            let at = p.group_at(p.sequence()).0;
            p.disk.flip(at + 100, 1);
            Some((at - p.region(JOURNAL).0) / BLOCK as u64)
        })),
        crashed(corrupt(RING, "a group before the last missing", &["missing or damaged"], |p| {
            p.disk.put(p.group_at(p.sequence() - 1).0, &[0; BLOCK]);
            None
        })),
        crashed(corrupt(RING, "a group before the last rotten", &["later ones are lost"], |p| {
            p.disk.flip(p.group_at(p.sequence() - 1).0 + 200, 1);
            None
        })),
        crashed(corrupt(RING, "a group at the wrong place", &["missing or damaged"], |p| {
            let (at, _) = p.group_at(p.sequence() - 1);
            let other = p.get(p.group_at(p.sequence()).0, BLOCK);
            p.disk.put(at, &other);
            None
        })),
        corrupt(RING, "groups behind one that is missing", &["is missing", "are lost"], |p| {
            p.group(4, &p.payload(p.sequence(), &[]));
            None
        }),
        corrupt(RING, "a group of two attempts", &["is missing", "are lost"], |p| {
            // Its second block is of a later group, as if a session had been forgotten.
            p.group(3, &p.payload(p.sequence(), &[Record::Labels { index: 0, bytes: &[1; 4000] }]));
            let at = p.region(JOURNAL).0;
            p.disk.flip(at + 12, 1);
            None
        }),
        note(RING, "a block that is not needed", &["damaged", "not needed"], |p| {
            let at = p.group_at(1).0;
            p.disk.flip(at + 100, 1);
            Some((at - p.region(JOURNAL).0) / BLOCK as u64)
        }),
        corrupt(RING, "a group that needs itself", &["announces itself", "are lost"], |p| {
            p.group(1, &p.payload(p.sequence() + 1, &[]));
            None
        }),
        corrupt(RING, "a group without a header", &["no header record", "are lost"], |p| {
            let mut payload = Vec::new();
            Record::Free { entry: 1 }.encode(&mut payload);
            p.group(1, &payload);
            None
        }),
        corrupt(RING, "a checkpoint in the future of the ring", &["missing or damaged"], |p| {
            p.group(1, &p.payload(0, &[]));
            p.superblock(&COPIES, |bytes| bytes[120..128].fill(0));
            None
        }),
    ]
}

/// Records of the journal, in a group that is in order otherwise.
pub fn records() -> Vec<Kind> {
    vec![
        corrupt(RING, "an unknown record", &["impossible record", "lost"], |p| {
            let mut payload = p.payload(p.sequence(), &[]);
            payload.extend_from_slice(&[77, 0, 1, 0, 5]);
            p.group(1, &payload);
            None
        }),
        corrupt(RING, "a record cut off", &["impossible record", "lost"], |p| {
            let mut payload = p.payload(p.sequence(), &[Record::Free { entry: 1 }]);
            payload.pop();
            p.group(1, &payload);
            None
        }),
        corrupt(RING, "blocks of a free entry", &["impossible record", "lost"], |p| {
            let entry = p.free(EXTENTS, 55)[0] as u32;
            p.records(&[Record::Fill { entry, start: 0, count: 1, state: FillState::Data }]);
            None
        }),
        corrupt(RING, "blocks behind the entry's end", &["impossible record", "lost"], |p| {
            let entry = p.data_of("beta")[0] as u32;
            p.records(&[Record::Fill { entry, start: 9, count: 60, state: FillState::Zero }]);
            None
        }),
        corrupt(RING, "an entry behind the region", &["impossible record", "lost"], |p| {
            p.records(&[Record::Free { entry: 1 << 29 }]);
            None
        }),
        corrupt(RING, "an entry of another length", &["impossible record", "lost"], |p| {
            p.records(&[Record::Entry { entry: 1, bytes: &[0; 36] }]);
            None
        }),
        corrupt(RING, "a mark behind the region", &["impossible record", "lost"], |p| {
            p.records(&[Record::Mark { region: 3, blocks: 1000 }]);
            None
        }),
        corrupt(RING, "a mark of no region", &["impossible record", "lost"], |p| {
            p.records(&[Record::Mark { region: 9, blocks: 1 }]);
            None
        }),
        corrupt(RING, "a slot behind the mark", &["impossible record", "lost"], |p| {
            p.records(&[Record::Snapshot { index: 5000, slot: &[0; 504] }]);
            None
        }),
        corrupt(RING, "labels behind the region", &["impossible record", "lost"], |p| {
            p.records(&[Record::Labels { index: 5000, bytes: &[0; 9] }]);
            None
        }),
        corrupt(RING, "a deletion of no slot", &["impossible record", "lost"], |p| {
            p.records(&[Record::Drop { index: 5000, volume: 0 }]);
            None
        }),
        corrupt(VOLUME, "a record of an impossible volume", &["impossible size"], |p| {
            let mut slot = p.get(p.address(VOLUMES, 0, 0) + 64, 504);
            slot[16..24].fill(0xee);
            p.records(&[Record::Volume { index: 0, slot: &slot }]);
            Some(0)
        }),
        corrupt(EXTENT, "a record of an impossible entry", &["both data and zero"], |p| {
            let extent = p.data_of("beta")[0];
            let owner = p.snapshot_slot("beta") + 1;
            let bytes = entry(owner, 0, 0, 3, 1);
            p.records(&[Record::Entry { entry: extent as u32, bytes: &bytes }]);
            Some(extent)
        }),
    ]
}
