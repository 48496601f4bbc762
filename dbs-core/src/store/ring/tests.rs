//! What is read of a ring, against the scan of all of it. Groups are written as a store writes them, and as
//! stores leave them that died at it: torn, and written again elsewhere under the same number.

use super::*;
use crate::format::journal;
use crate::format::{Geometry, superblock::INCOMPAT_GROUPS};
use crate::io::reading::ReadBy;
use crate::store::InitOptions;
use fastrand::Rng;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: usize = BLOCK_BYTES as usize;

/// A ring in memory, and what its writer knows.
struct Written {
    superblock: Superblock,
    bytes: Vec<u8>,
    /// The next group: its number, and where the one before it ended.
    next: u64,
    head: u32,
    /// Groups after the checkpoint: number, place, blocks.
    live: Vec<(u64, u32, u32)>,
    rng: Rng,
}

impl Written {
    fn new(seed: u64, journal_size: u64) -> Self {
        let options = InitOptions {
            journal_size: Some(journal_size),
            extent_size: 64 << 10,
            ..InitOptions::default()
        };
        let geometry = Geometry::plan(1 << 30, &options).unwrap();
        let superblock = Superblock {
            uuid: [7; 16],
            given: None,
            sequence: 1,
            geometry,
            created_ns: 0,
            clean_sequence: 0,
            clean_marks: [0; 4],
            compat: 0,
            unknown_ro: 0,
            incompat: INCOMPAT_GROUPS,
        };
        let bytes = vec![0; journal_size as usize];
        let rng = Rng::with_seed(seed);
        Self { superblock, bytes, next: 1, head: 0, live: Vec::new(), rng }
    }

    fn blocks(&self) -> u32 {
        (self.bytes.len() / BLOCK) as u32
    }

    fn address(&self) -> u64 {
        self.superblock.geometry.region(RegionKind::Journal).offset
    }

    /// Where the next group goes, if it is so long; the oldest ones are given up for it.
    fn place(&mut self, blocks: u32) -> u32 {
        let at = if self.head + blocks <= self.blocks() { self.head } else { 0 };
        let taken = |range: Range<u32>, (_, start, count): (u64, u32, u32)| {
            range.start < start + count && start < range.end
        };
        self.live.retain(|group| !taken(at..at + blocks + 1, *group));
        at
    }

    /// The bytes of the next group, of so many blocks.
    fn encode(&mut self, at: u32, blocks: u32) -> Vec<u8> {
        let checkpoint = self.live.first().map_or(self.next, |group| group.0) - 1;
        let header =
            Record::Checkpoint { sequence: checkpoint, marks: [0; 4], boot: [0; 16], tail: false };
        let mut payload = Vec::new();
        header.encode(&mut payload);
        let least = (blocks as usize - 1) * journal::GROUP_BLOCK_BYTES + 1;
        let content = self.rng.u8(1..);
        payload.resize(payload.len().max(least), content);
        assert_eq!(journal::blocks_for(payload.len()), blocks);
        let address = self.address() + u64::from(at) * BLOCK_BYTES;
        journal::encode(&payload, self.next, self.rng.u64(..), &[7; 16], address)
    }

    /// Writes the next group.
    fn group(&mut self, blocks: u32) {
        let at = self.place(blocks);
        let bytes = self.encode(at, blocks);
        self.bytes[at as usize * BLOCK..][..bytes.len()].copy_from_slice(&bytes);
        self.live.push((self.next, at, blocks));
        self.head = at + blocks;
        self.next += 1;
        if self.rng.u8(..4) == 0 {
            let keep = self.rng.usize(..=self.live.len());
            self.live.drain(..keep);
        }
    }

    /// Dies while it writes the next group: some sectors of it are there, not all.
    fn torn(&mut self, blocks: u32) {
        let at = self.place(blocks);
        let bytes = self.encode(at, blocks);
        let whole_blocks = self.rng.bool();
        for (index, sector) in bytes.chunks_exact(512).enumerate() {
            let unit = if whole_blocks { index / 8 } else { index };
            let missing = unit == 0 && self.rng.bool() || self.rng.bool();
            if !missing && index + 8 < bytes.len() / 512 {
                self.bytes[at as usize * BLOCK + index * 512..][..512].copy_from_slice(sector);
            }
        }
    }

    fn disk<'a>(&'a self, read: &'a AtomicU64) -> impl Storage + 'a {
        let start = self.address();
        let size = start + self.bytes.len() as u64;
        ReadBy::new(size, move |requests: &mut [ReadRequest<'_>]| {
            for request in requests {
                let at = (request.offset - start) as usize;
                request.buf.copy_from_slice(&self.bytes[at..at + request.buf.len()]);
                read.fetch_add(request.buf.len() as u64, Ordering::Relaxed);
            }
            Ok(())
        })
    }

    /// Compares what is read with the scan of all; the bytes read.
    fn compare(&self, what: &str) -> u64 {
        let read = AtomicU64::new(0);
        let found = read_needed(&self.disk(&read), &self.superblock).unwrap();
        let all = journal::scan(&self.bytes, &[7; 16], self.address());
        let newest = all.groups.keys().next_back().copied();
        assert_eq!(found.groups.keys().next_back().copied(), newest, "{what}");
        let first =
            newest.and_then(|newest| match Record::decode(&mut &all.groups[&newest].payload[..]) {
                Some(Record::Checkpoint { sequence, .. }) => Some(sequence + 1),
                _ => None,
            });
        let needed = all.groups.range(first.unwrap_or(0)..);
        assert!(needed.eq(found.groups.range(first.unwrap_or(0)..)), "{what}");
        let after = |scan: &Scan| scan.newest_seen.max(newest.unwrap_or(0));
        assert_eq!(after(&found), after(&all), "{what}");
        assert_eq!((found.damaged, found.incomplete), (all.damaged, all.incomplete), "{what}");
        read.into_inner()
    }
}

#[test]
fn what_is_read_of_a_ring_is_what_all_of_it_says() {
    for seed in 0..100 {
        let mut ring = Written::new(seed, [128 << 10, 512 << 10, 1 << 20][seed as usize % 3]);
        let longest = ring.blocks() / 8;
        for step in 0..ring.rng.u32(1..200) {
            let blocks = if ring.rng.u8(..4) == 0 { ring.rng.u32(1..=longest) } else { 1 };
            match ring.rng.u8(..12) {
                0 => ring.torn(blocks),
                _ => ring.group(blocks),
            }
            if step % 8 == 0 {
                ring.compare(&format!("seed {seed}, step {step}"));
            }
        }
        ring.compare(&format!("seed {seed}"));
    }
}

#[test]
fn what_is_wrong_in_a_ring_is_found_wherever_it_matters() {
    for seed in 0..200 {
        let mut ring = Written::new(seed, 512 << 10);
        (0..300).for_each(|_| {
            let blocks = 1 + ring.rng.u32(..20) / 19 * 9;
            ring.group(blocks);
        });
        // In front of the newest group's end, or behind it as far as the next group may reach.
        let at = (ring.head + ring.blocks() - 1 + ring.rng.u32(..15)) % ring.blocks();
        let byte = at as usize * BLOCK + ring.rng.usize(..BLOCK);
        ring.bytes[byte] ^= 0x20;
        ring.compare(&format!("seed {seed}: block {at} of {}, head {}", ring.blocks(), ring.head));
    }
}

/// A write of the device that never arrived: the groups behind it tell.
#[test]
fn a_group_that_was_lost_is_missed_for_those_behind_it() {
    for seed in 0..200 {
        let mut ring = Written::new(seed, 1 << 20);
        (0..ring.rng.u32(300..700)).for_each(|_| ring.group(1));
        let longest = ring.blocks() / 8;
        let blocks = if ring.rng.bool() { longest } else { ring.rng.u32(1..=longest) };
        let before = ring.bytes.clone();
        let at = ring.place(blocks) as usize * BLOCK;
        ring.group(blocks);
        let lost = at..at + blocks as usize * BLOCK;
        ring.bytes[lost.clone()].copy_from_slice(&before[lost]);
        (0..ring.rng.u32(1..5)).for_each(|_| ring.group(1));
        ring.compare(&format!("seed {seed}"));
    }
}

#[test]
fn opening_reads_a_part_of_a_long_journal_in_small_pieces() {
    let mut ring = Written::new(1, 64 << 20);
    for _ in 0..40_000 {
        ring.group(1);
        ring.live.clear();
    }
    for _ in 0..50 {
        ring.live.clear();
        let read = ring.compare("a long one");
        assert!(read < 24 << 20, "{} KiB of 64 MiB", read >> 10);
        let blocks = ring.rng.u32(1..300);
        ring.group(blocks);
    }
}
