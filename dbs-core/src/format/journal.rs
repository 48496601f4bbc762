//! Journal groups: the records of one commit, in consecutive sealed blocks of the ring. Each
//! sector of a block ends with a stamp of its own: a write torn by a crash leaves whole sectors,
//! old or new, while damage breaks a sector. So the last group, which nothing else vouches for,
//! is not given up as torn when it is damaged.

use super::block::{self, BLOCK, BlockFault, BlockHeader, BlockKind, HEADER_BYTES};
use super::crc::{crc32c, crc32c_append};
use crate::limits::SEQUENCE_MAX;
use crate::sabotage::{self, Bug};
use std::collections::BTreeMap;
use std::ops::Range;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector, the unit that is written whole or not at all.
const SECTOR: usize = 512;
/// Bytes of a sector in front of its stamp.
const CONTENT: usize = SECTOR - size_of::<Stamp>();
/// Bytes of records in a journal block.
pub const GROUP_BLOCK_BYTES: usize = BLOCK / SECTOR * CONTENT - HEADER_BYTES;

/// End of each sector of a journal block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Stamp {
    /// Low half of the group's sequence.
    pub sequence: U32,
    /// CRC32C of the sector up to here.
    pub crc: U32,
}

/// What each block of a group says of it, in its header's `extra`. The sequence is its LSN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct GroupExtra {
    /// This block's place in the group.
    pub index: U32,
    /// Blocks in the group.
    pub count: U32,
    /// CRC32C of the group's whole payload: parts of two groups never make one.
    pub crc: U32,
    /// Bytes of that payload.
    pub bytes: U32,
    /// Session that wrote it.
    pub session: U64,
}

const _: () = assert!(size_of::<GroupExtra>() == 24);
const _: () = assert!(size_of::<Stamp>() == 8);

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
    /// Blocks that are not intact for another reason than a torn write.
    pub damaged: Vec<Damaged>,
    /// Groups of which only some blocks are intact: sequence, and the blocks they lie in.
    pub incomplete: Vec<(u64, Range<u64>)>,
    /// Blocks that the device could not read: they were given as zeros.
    pub unreadable: Vec<u32>,
}

impl Scan {
    /// Whether a block that could not be read may be part of this group, which is no complete one:
    /// it would begin at `head`, or at the ring's start if there is too little room behind that.
    #[must_use]
    pub fn may_hide(&self, position: u32, sequence: u64, head: u32, ring_blocks: u32) -> bool {
        // No group is longer than an eighth of the ring.
        let wraps = head > ring_blocks / 2;
        let within = |(of, blocks): &(u64, Range<u64>)| {
            *of == sequence && blocks.contains(&u64::from(position))
        };
        position == head || (position == 0 && wraps) || self.incomplete.iter().any(within)
    }
}

/// A block of the ring with a broken sector, or one written for another place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damaged {
    /// Its place in the ring.
    pub position: u32,
    /// Low halves of the sequences that its intact sectors are stamped with.
    stamps: Vec<u32>,
}

impl Damaged {
    /// Whether part of it was written as part of this group.
    #[must_use]
    pub fn is_of(&self, sequence: u64) -> bool {
        self.stamps.contains(&(sequence as u32))
    }
}

/// Blocks a payload of this length needs.
#[must_use]
pub fn blocks_for(payload_bytes: usize) -> u32 {
    payload_bytes.div_ceil(GROUP_BLOCK_BYTES).max(1) as u32
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
    let mut out = vec![0; blocks_for(payload.len()) as usize * BLOCK];
    encode_to(&mut out, payload, sequence, session, store, address);
    out
}

/// As [`encode`], into memory of exactly that length.
pub fn encode_to(
    out: &mut [u8],
    payload: &[u8],
    sequence: u64,
    session: u64,
    store: &[u8; 16],
    address: u64,
) {
    let count = blocks_for(payload.len());
    debug_assert_eq!(out.len(), count as usize * BLOCK);
    let crc = crc32c(payload);
    for (index, block) in out.chunks_exact_mut(BLOCK).enumerate() {
        let start = index * GROUP_BLOCK_BYTES;
        let end = (start + GROUP_BLOCK_BYTES).min(payload.len());
        let extra = GroupExtra {
            index: (index as u32).into(),
            count: count.into(),
            crc: crc.into(),
            bytes: (payload.len() as u32).into(),
            session: session.into(),
        };
        let mut bytes = [0; 24];
        bytes.copy_from_slice(extra.as_bytes());
        spread(&payload[start.min(end)..end], block);
        let at = address + (index * BLOCK) as u64;
        block::seal(block, BlockKind::Journal, store, at, sequence, bytes);
        block.chunks_exact_mut(SECTOR).for_each(|sector| stamp(sector, sequence));
    }
}

/// Puts records into the sectors of a block of zeros, beside its header and stamps.
fn spread(records: &[u8], block: &mut [u8]) {
    let mut rest = records;
    let mut skip = HEADER_BYTES;
    for sector in block.chunks_exact_mut(SECTOR) {
        let (part, after) = rest.split_at(rest.len().min(CONTENT - skip));
        sector[skip..][..part.len()].copy_from_slice(part);
        (rest, skip) = (after, 0);
    }
}

/// The records of a block, as [`spread`] put them there.
fn gather(block: &[u8], payload: &mut Vec<u8>) {
    let mut header = HEADER_BYTES;
    for sector in block.chunks_exact(SECTOR) {
        payload.extend_from_slice(&sector[std::mem::take(&mut header)..CONTENT]);
    }
}

fn stamp(sector: &mut [u8], sequence: u64) {
    let (content, end) = sector.split_at_mut(CONTENT);
    let crc = crc32c_append(crc32c(content), &(sequence as u32).to_le_bytes());
    let stamp = Stamp { sequence: (sequence as u32).into(), crc: crc.into() };
    end.copy_from_slice(stamp.as_bytes());
}

/// The sequence a sector is stamped with; `None` if the sector is broken.
fn stamped(sector: &[u8]) -> Option<u32> {
    let (stamp, end) = Stamp::read_from_suffix(sector).map(|(rest, stamp)| (stamp, rest)).ok()?;
    let crc = crc32c_append(crc32c(end), stamp.sequence.as_bytes());
    (crc == stamp.crc.get()).then_some(stamp.sequence.get())
}

/// Checks a block as [`block::open`] does, its stamps aside.
fn open(block: &[u8], store: &[u8; 16], address: u64) -> Result<BlockHeader, BlockFault> {
    let mut bare = [0; BLOCK];
    bare.copy_from_slice(block);
    bare.chunks_exact_mut(SECTOR).for_each(|sector| sector[CONTENT..].fill(0));
    block::open(&bare, BlockKind::Journal, store, address)
}

/// What is wrong with a block that is not intact, if it is more than a torn write.
fn examine(block: &[u8], position: u32, fault: BlockFault) -> Option<Damaged> {
    let mut stamps = Vec::new();
    let mut broken = fault == BlockFault::Address;
    for sector in block.chunks_exact(SECTOR).filter(|sector| !block::is_blank(sector)) {
        match stamped(sector) {
            Some(sequence) => stamps.push(sequence),
            None => broken = true,
        }
    }
    broken.then_some(Damaged { position, stamps })
}

/// What the blocks of a ring say of their groups, as far as they were looked at.
#[derive(Debug)]
pub struct Survey {
    store: [u8; 16],
    address: u64,
    places: Vec<Place>,
    /// Highest sequence of any intact block; 0 if there is none.
    pub newest_seen: u64,
    /// Blocks that are neither blank nor intact: torn, or in `damaged` as well.
    broken: u32,
    damaged: Vec<Damaged>,
    /// Blocks that the device could not read: they were given as zeros.
    pub unreadable: Vec<u32>,
}

/// A block of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Unseen,
    /// Blank, or not intact.
    Nothing,
    Part(u64, GroupExtra),
}

/// Where a group is whose blocks are all intact. What it says of its payload is still to be proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Its sequence.
    pub sequence: u64,
    /// First block in the ring.
    pub position: u32,
    /// Blocks.
    pub blocks: u32,
}

impl Survey {
    /// Nothing seen yet of a ring of so many blocks that starts at `address`.
    #[must_use]
    pub fn new(blocks: u32, store: &[u8; 16], address: u64) -> Self {
        Self {
            store: *store,
            address,
            places: vec![Place::Unseen; blocks as usize],
            newest_seen: 0,
            broken: 0,
            damaged: Vec::new(),
            unreadable: Vec::new(),
        }
    }

    /// Blocks of the ring.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.places.len() as u32
    }

    /// Whether a block was looked at.
    #[must_use]
    pub fn has_seen(&self, position: u32) -> bool {
        self.places.get(position as usize).is_none_or(|place| *place != Place::Unseen)
    }

    /// The sequence of an intact block that was looked at.
    #[must_use]
    pub fn sequence_at(&self, position: u32) -> Option<u64> {
        self.part_at(position).map(|(sequence, _)| sequence)
    }

    /// What an intact block that was looked at says of its group, the group's sequence first.
    #[must_use]
    pub fn part_at(&self, position: u32) -> Option<(u64, GroupExtra)> {
        match self.places.get(position as usize)? {
            Place::Part(sequence, extra) => Some((*sequence, *extra)),
            _ => None,
        }
    }

    /// Looks at blocks from `first` on, those not seen yet.
    pub fn look(&mut self, first: u32, blocks: &[u8]) {
        for (position, block) in (first..).zip(blocks.chunks_exact(BLOCK)) {
            if !self.has_seen(position) {
                self.places[position as usize] = self.place(position, block);
            }
        }
    }

    fn place(&mut self, position: u32, block: &[u8]) -> Place {
        if block::is_blank(block) {
            return Place::Nothing;
        }
        let fault =
            match open(block, &self.store, self.address + u64::from(position) * BLOCK as u64) {
                Ok(header) if header.lsn.get() > SEQUENCE_MAX => {
                    self.broken += 1;
                    return Place::Nothing;
                }
                Ok(header) => {
                    let sequence = header.lsn.get();
                    self.newest_seen = self.newest_seen.max(sequence);
                    self.damaged.extend(examine(block, position, BlockFault::Checksum));
                    let extra = GroupExtra::read_from_bytes(&header.extra);
                    return extra.map_or(Place::Nothing, |extra| Place::Part(sequence, extra));
                }
                Err(fault) => fault,
            };
        self.broken += 1;
        self.damaged.extend(examine(block, position, fault));
        Place::Nothing
    }

    /// Whether nothing is wrong with any block that was looked at.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.broken == 0 && self.damaged.is_empty() && self.unreadable.is_empty()
    }

    /// The groups whose blocks were all seen intact, one behind the other.
    pub fn groups(&self) -> impl Iterator<Item = Found> {
        (0..self.blocks()).filter_map(|position| self.group_at(position))
    }

    fn group_at(&self, position: u32) -> Option<Found> {
        let Place::Part(sequence, first) = *self.places.get(position as usize)? else {
            return None;
        };
        let count = first.count.get();
        let bytes = first.bytes.get() as usize;
        if first.index.get() != 0
            || count == 0
            || bytes.div_ceil(GROUP_BLOCK_BYTES) > count as usize
        {
            return None;
        }
        for index in 0..count {
            let expected = GroupExtra { index: index.into(), ..first };
            let place = self.places.get((position as usize).checked_add(index as usize)?)?;
            if *place != Place::Part(sequence, expected) && !sabotage::is(Bug::IgnoreGroupChecksum)
            {
                return None;
            }
        }
        Some(Found { sequence, position, blocks: count })
    }

    /// The group, if its blocks have the payload that they announce.
    #[must_use]
    pub fn assemble(&self, found: &Found, blocks: &[u8]) -> Option<Group> {
        let Found { position, blocks: count, .. } = *found;
        let Place::Part(_, first) = *self.places.get(position as usize)? else { return None };
        let mut payload = Vec::with_capacity(blocks.len() / BLOCK * GROUP_BLOCK_BYTES);
        blocks.chunks_exact(BLOCK).for_each(|block| gather(block, &mut payload));
        payload.truncate(first.bytes.get() as usize);
        let right = crc32c(&payload) == first.crc.get();
        let session = first.session.get();
        (right || sabotage::is(Bug::IgnoreGroupChecksum)).then_some(Group {
            position,
            blocks: count,
            session,
            payload,
        })
    }

    /// What was found, with the groups that were read.
    #[must_use]
    pub fn into_scan(mut self, groups: BTreeMap<u64, Group>) -> Scan {
        self.damaged.sort_unstable_by_key(|damaged| damaged.position);
        self.unreadable.sort_unstable();
        let newest = groups.keys().next_back().copied().unwrap_or(0);
        let incomplete = self.incomplete(newest);
        Scan {
            groups,
            newest_seen: self.newest_seen,
            damaged: self.damaged,
            incomplete,
            unreadable: self.unreadable,
        }
    }

    /// The groups after the last one, of which there are blocks.
    fn incomplete(&self, last: u64) -> Vec<(u64, Range<u64>)> {
        let mut found = Vec::new();
        for (position, place) in (0u64..).zip(&self.places) {
            let Place::Part(sequence, extra) = place else { continue };
            if *sequence <= last {
                continue;
            }
            let start = position.saturating_sub(u64::from(extra.index.get()));
            let part = (*sequence, start..start + u64::from(extra.count.get()));
            if found.last() != Some(&part) {
                found.push(part);
            }
        }
        found
    }
}

/// Finds every complete group in the bytes of a ring that starts at `address`.
#[must_use]
pub fn scan(ring: &[u8], store: &[u8; 16], address: u64) -> Scan {
    let mut survey = Survey::new((ring.len() / BLOCK) as u32, store, address);
    survey.look(0, ring);
    let complete = |found: Found| {
        let blocks = &ring[found.position as usize * BLOCK..][..found.blocks as usize * BLOCK];
        Some((found.sequence, survey.assemble(&found, blocks)?))
    };
    let groups = survey.groups().filter_map(complete).collect();
    survey.into_scan(groups)
}

/// What stands for a block that could not be read and may have been part of this group, where its bytes
/// are asked for: damage that is known as such, and never room where nothing was written.
#[must_use]
pub fn stand_in(sequence: u64) -> Vec<u8> {
    let mut block = vec![0xff; BLOCK];
    stamp(&mut block[..SECTOR], sequence);
    block
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
        assert_eq!(found.damaged.iter().map(|d| d.position).collect::<Vec<_>>(), [1]);
        assert!(found.damaged[0].is_of(5) && !found.damaged[0].is_of(6));
    }

    #[test]
    fn torn_writes_and_damage_are_told_apart() {
        let store = [9; 16];
        let old = encode(&[1; 3000], 5, 1, &store, 0);
        let new = encode(&[2; 3000], 6, 1, &store, 0);
        for before in [vec![0; BLOCK], old] {
            for written in 0..256u32 {
                let mut torn = before.clone();
                for sector in (0..8).filter(|sector| written >> sector & 1 == 1) {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    torn[range.clone()].copy_from_slice(&new[range]);
                }
                assert!(scan(&torn, &store, 0).damaged.is_empty(), "sectors {written:#b}");
            }
        }
        for byte in 0..BLOCK {
            let mut rotten = new.clone();
            rotten[byte] ^= 0x10;
            let found = scan(&rotten, &store, 0);
            let detected = found.damaged.first().is_some_and(|damaged| damaged.is_of(6));
            assert!(detected || found.groups.contains_key(&6), "byte {byte}");
        }
    }

    #[test]
    fn what_stands_for_an_unreadable_block_is_damage_of_its_group() {
        let found = scan(&stand_in(7), &[9; 16], 0);
        assert!(found.damaged.len() == 1 && found.damaged[0].is_of(7));
        assert!(found.groups.is_empty() && found.newest_seen == 0);
    }

    #[test]
    fn where_the_next_group_may_be() {
        let store = [9; 16];
        let mut ring = vec![0; 16 * BLOCK];
        let long = encode(&[1; 9000], 5, 1, &store, 4 * BLOCK as u64);
        // Its last block is missing.
        ring[4 * BLOCK..][..2 * BLOCK].copy_from_slice(&long[..2 * BLOCK]);
        let found = scan(&ring, &store, 0);
        assert_eq!(found.incomplete, [(5, 4..7)]);
        let hides =
            |head| (0..16).filter(|at| found.may_hide(*at, 5, head, 16)).collect::<Vec<_>>();
        assert_eq!(hides(4), [4, 5, 6]);
        assert_eq!(hides(12), [0, 4, 5, 6, 12]);
        assert!(!found.may_hide(5, 6, 4, 16));
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
