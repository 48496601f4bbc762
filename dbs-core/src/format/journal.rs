//! Journal groups: the records of one commit, in consecutive sealed blocks of the ring.

use super::block::{self, BLOCK, BlockKind, PAYLOAD_BYTES};
use crate::sabotage::{self, Bug};
use std::collections::BTreeMap;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What each block of a group says of it, in its header's `extra`. The sequence is its LSN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct GroupExtra {
    /// This block's place in the group.
    index: U32,
    /// Blocks in the group.
    count: U32,
    /// CRC32C of the group's whole payload: parts of two groups never make one.
    crc: U32,
    /// Bytes of that payload.
    bytes: U32,
    /// Session that wrote it.
    session: U64,
}

/// A complete group found in the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// First block in the ring.
    pub position: u32,
    /// Blocks.
    pub blocks: u32,
    /// Session that wrote it.
    pub session: u64,
    /// Records.
    pub payload: Vec<u8>,
}

/// What a ring holds.
#[derive(Debug, Default)]
pub struct Scan {
    /// Complete groups by sequence.
    pub groups: BTreeMap<u64, Group>,
    /// Highest sequence of any intact block, complete or not; 0 if there is none.
    pub newest_seen: u64,
    /// Blocks that are neither intact nor blank nor another store's.
    pub damaged: Vec<u32>,
}

/// Blocks a payload of this length needs.
#[must_use]
pub fn blocks_for(payload_bytes: usize) -> u32 {
    payload_bytes.div_ceil(PAYLOAD_BYTES).max(1) as u32
}

/// The sealed blocks of a group, to be written at `address` in one write.
#[must_use]
pub fn encode(
    payload: &[u8],
    sequence: u64,
    session: u64,
    store: &[u8; 16],
    address: u64,
) -> Vec<u8> {
    let count = blocks_for(payload.len());
    let crc = crc32c::crc32c(payload);
    let mut out = vec![0; count as usize * BLOCK];
    for (index, block) in out.chunks_exact_mut(BLOCK).enumerate() {
        let start = index * PAYLOAD_BYTES;
        let part = &payload[start.min(payload.len())..(start + PAYLOAD_BYTES).min(payload.len())];
        block[BLOCK - PAYLOAD_BYTES..][..part.len()].copy_from_slice(part);
        let extra = GroupExtra {
            index: (index as u32).into(),
            count: count.into(),
            crc: crc.into(),
            bytes: (payload.len() as u32).into(),
            session: session.into(),
        };
        let mut bytes = [0; 24];
        bytes.copy_from_slice(extra.as_bytes());
        let at = address + (index * BLOCK) as u64;
        block::seal(block, BlockKind::Journal, store, at, sequence, bytes);
    }
    out
}

/// Finds every complete group in the bytes of a ring that starts at `address`.
#[must_use]
pub fn scan(ring: &[u8], store: &[u8; 16], address: u64) -> Scan {
    let mut scan = Scan::default();
    let mut headers = Vec::new();
    for (position, block) in ring.chunks_exact(BLOCK).enumerate() {
        let at = address + (position * BLOCK) as u64;
        let header = match block::open(block, BlockKind::Journal, store, at) {
            Ok(header) => {
                scan.newest_seen = scan.newest_seen.max(header.lsn.get());
                GroupExtra::read_from_bytes(&header.extra).ok().map(|e| (header.lsn.get(), e))
            }
            Err(fault) => {
                if matches!(fault, block::BlockFault::Checksum | block::BlockFault::Address) {
                    scan.damaged.push(position as u32);
                }
                None
            }
        };
        headers.push(header);
    }
    for position in 0..headers.len() {
        if let Some((sequence, group)) = assemble(ring, &headers, position) {
            scan.groups.insert(sequence, group);
        }
    }
    scan
}

fn assemble(
    ring: &[u8],
    headers: &[Option<(u64, GroupExtra)>],
    position: usize,
) -> Option<(u64, Group)> {
    let (sequence, first) = (*headers.get(position)?)?;
    let count = first.count.get() as usize;
    let bytes = first.bytes.get() as usize;
    if first.index.get() != 0 || count == 0 || bytes > count * PAYLOAD_BYTES {
        return None;
    }
    let mut payload = Vec::new();
    let careless = sabotage::is(Bug::IgnoreGroupChecksum);
    for index in 0..count {
        let expected = GroupExtra { index: (index as u32).into(), ..first };
        if *headers.get(position + index)? != Some((sequence, expected)) && !careless {
            return None;
        }
        payload.extend_from_slice(block::payload(&ring[(position + index) * BLOCK..][..BLOCK]));
    }
    payload.truncate(bytes);
    if crc32c::crc32c(&payload) != first.crc.get() && !careless {
        return None;
    }
    let session = first.session.get();
    Some((sequence, Group { position: position as u32, blocks: count as u32, session, payload }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_and_torn_ones_are_not() {
        let store = [9; 16];
        let mut ring = vec![0; 16 * BLOCK];
        let long: Vec<u8> = (0..9000u32).map(|i| i as u8).collect();
        let first = encode(&long, 5, 1, &store, 4096);
        ring[..first.len()].copy_from_slice(&first);
        let second = encode(b"short", 6, 1, &store, 4096 + first.len() as u64);
        ring[first.len()..][..BLOCK].copy_from_slice(&second);
        let found = scan(&ring, &store, 4096);
        assert_eq!(found.groups.len(), 2);
        assert_eq!(found.groups[&5].payload, long);
        assert_eq!((found.groups[&6].position, found.newest_seen), (3, 6));
        assert!(scan(&ring, &[8; 16], 4096).groups.is_empty());

        ring[BLOCK + 100] ^= 1;
        let found = scan(&ring, &store, 4096);
        assert_eq!(found.groups.keys().copied().collect::<Vec<_>>(), [6]);
        assert_eq!(found.damaged, [1]);
    }

    #[test]
    fn parts_of_two_groups_of_one_sequence_do_not_mix() {
        let store = [9; 16];
        let old = encode(&[1; 9000], 5, 1, &store, 0);
        let new = encode(&[2; 9000], 5, 1, &store, 0);
        let mut ring = old;
        ring[..BLOCK].copy_from_slice(&new[..BLOCK]);
        assert!(scan(&ring, &store, 0).groups.is_empty());
    }
}
