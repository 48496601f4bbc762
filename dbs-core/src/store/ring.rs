//! Reading the journal's ring, a piece at a time: all of it, or what can hold groups that are needed.
//!
//! Groups lie one behind the other, and their sequences rise by one. So a block here and there shows where
//! the newest ones are. What was found there is believed only if nothing is wrong with any block seen, and
//! if the newest block is of a complete group: a later group would have been written behind that one, or at
//! the ring's start, and what is there is seen, and older. Else all of the ring decides.
//!
//! Who writes reads all of it: blocks that cannot be read are to be written again before a group comes to end
//! in front of one.

use super::unreadable::{READ_BYTES, read_blocks};
use crate::error::{Error, Result};
use crate::format::geometry::Region;
use crate::format::journal::{Found, Group, Scan, Survey};
use crate::format::record::Record;
use crate::format::{RegionKind, Superblock};
use crate::io::buffer::AlignedBuf;
use crate::io::{ReadRequest, Storage};
use crate::units::BLOCK_BYTES;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::ops::RangeInclusive;

/// Blocks read at once.
const PIECE_BLOCKS: u32 = (READ_BYTES / BLOCK_BYTES) as u32;
/// Blocks looked at first, spread over the ring.
const PROBES: u32 = 64;
/// A group is at most this part of the ring.
const GROUPS_MIN: u32 = 8;

/// Reads what opening the store for reading needs of its journal.
///
/// # Errors
/// `Io`.
pub(super) fn read_needed(storage: &dyn Storage, superblock: &Superblock) -> Result<Scan> {
    read(storage, superblock, Reader::look_around)
}

/// Reads all of the journal; only the groups that opening needs are kept.
///
/// # Errors
/// `Io`.
pub(super) fn read_all(storage: &dyn Storage, superblock: &Superblock) -> Result<Scan> {
    read(storage, superblock, |_| Ok(None))
}

type Look<'a> = fn(&mut Reader<'a>) -> io::Result<Option<Kept>>;

/// Groups that were read, by sequence.
type Kept = BTreeMap<u64, Group>;

fn read<'a>(storage: &'a dyn Storage, superblock: &'a Superblock, look: Look<'a>) -> Result<Scan> {
    let ring = superblock.geometry.region(RegionKind::Journal);
    let blocks = (ring.length / BLOCK_BYTES) as u32;
    let mut reader = Reader {
        storage,
        ring,
        clean: superblock.clean_sequence,
        survey: Survey::new(blocks, &superblock.uuid, ring.offset),
        piece: AlignedBuf::zeroed(blocks.min(PIECE_BLOCKS) as usize * BLOCK_BYTES as usize),
    };
    let groups = look(&mut reader).and_then(|groups| match groups {
        Some(groups) => Ok(groups),
        None => {
            reader.look(0, blocks)?;
            reader.needed_groups()
        }
    });
    let groups = groups.map_err(|error| Error::io(error, "reading the journal failed"))?;
    Ok(reader.survey.into_scan(groups))
}

/// What an intact block of the ring says of its group.
pub(super) struct Trace {
    /// Its place.
    pub(super) place: u32,
    pub(super) sequence: u64,
    pub(super) session: u64,
    /// Its place in the group, and how many the group has.
    pub(super) index: u32,
    count: u32,
}

impl Trace {
    /// What the block at one place of the ring says; `None` if it is no intact block of a group.
    pub(super) fn of(block: &[u8], ring: Region, store: &[u8; 16], place: u32) -> Option<Self> {
        let mut survey = Survey::new(1, store, ring.offset + u64::from(place) * BLOCK_BYTES);
        survey.look(0, block);
        let (sequence, part) = survey.part_at(0)?;
        let (index, count) = (part.index.get(), part.count.get());
        Some(Self { place, sequence, session: part.session.get(), index, count })
    }

    /// The group, if it begins here and all of it is there.
    pub(super) fn group(
        &self,
        storage: &dyn Storage,
        ring: Region,
        store: &[u8; 16],
    ) -> Option<Group> {
        let at = u64::from(self.place) * BLOCK_BYTES;
        let bytes = u64::from(self.count) * BLOCK_BYTES;
        if self.index > 0 || at + bytes > ring.length {
            return None;
        }
        let mut blocks = AlignedBuf::zeroed(bytes as usize);
        storage.read_at(ring.offset + at, &mut blocks).ok()?;
        let mut survey = Survey::new(self.count, store, ring.offset + at);
        survey.look(0, &blocks);
        let found = survey.groups().next()?;
        survey.assemble(&found, &blocks)
    }
}

struct Reader<'a> {
    storage: &'a dyn Storage,
    ring: Region,
    /// No group up to this one is needed.
    clean: u64,
    survey: Survey,
    piece: AlignedBuf,
}

impl Reader<'_> {
    /// Looks for the newest groups; `None` if only all of the ring can tell.
    fn look_around(&mut self) -> io::Result<Option<Kept>> {
        let ring = self.survey.blocks();
        let stride = (ring / PROBES).max(2);
        let longest = ring.div_ceil(GROUPS_MIN);
        let Some(first) = self.probe(stride)? else { return Ok(None) };
        // The first block met of this sequence: its group may begin before it.
        let mut start = (first + ring - stride) % ring;
        let mut seen = 2 * stride;
        self.look(start, seen)?;
        // Behind the newest one, and behind the longest group that may have followed it and been lost.
        while let Some(newest) = self.newest() {
            let behind = newest.position + newest.blocks;
            let end = (behind + ring - start) % ring;
            // Too little room for a group: it may have gone to the ring's start.
            let rest = Some(ring - behind).filter(|rest| *rest < longest).unwrap_or(0);
            let wanted = (end + rest + longest + 1).min(ring);
            if seen >= wanted {
                break;
            }
            self.look(start + seen, wanted - seen)?;
            seen = wanted;
        }
        let Some(newest) = self.newest() else { return Ok(None) };
        let Some(group) = self.read_group(&newest)? else { return Ok(None) };
        let oldest = self.first_needed(newest.sequence, &group);
        // Back to the first one that is needed.
        while !self.has_groups(oldest..=newest.sequence) {
            if seen >= ring {
                return Ok(None);
            }
            start = (start + ring - stride) % ring;
            self.look(start, stride)?;
            seen += stride;
        }
        let proven = newest.sequence == self.survey.newest_seen && self.survey.is_sound();
        if proven { self.needed_groups().map(Some) } else { Ok(None) }
    }

    /// Whether the blocks of all these groups were seen.
    fn has_groups(&self, mut sequences: RangeInclusive<u64>) -> bool {
        let seen: HashSet<u64> = self.survey.groups().map(|found| found.sequence).collect();
        (sequences.end() - sequences.start()) < seen.len() as u64
            && sequences.all(|sequence| seen.contains(&sequence))
    }

    /// Looks at every so manieth block; the first one of the highest sequence.
    fn probe(&mut self, stride: u32) -> io::Result<Option<u32>> {
        let places: Vec<u32> = (0..self.survey.blocks()).step_by(stride as usize).collect();
        let mut blocks = AlignedBuf::zeroed(places.len() * BLOCK_BYTES as usize);
        let parts = places.iter().zip(blocks.chunks_exact_mut(BLOCK_BYTES as usize));
        let offset = |place: &u32| self.ring.offset + u64::from(*place) * BLOCK_BYTES;
        let mut requests: Vec<_> =
            parts.map(|(place, buf)| ReadRequest { offset: offset(place), buf }).collect();
        if self.storage.read_many(&mut requests).is_err() {
            // Whatever it is, reading all of it meets it again.
            return Ok(None);
        }
        drop(requests);
        for (place, block) in places.iter().zip(blocks.chunks_exact(BLOCK_BYTES as usize)) {
            self.survey.look(*place, block);
        }
        let newest = self.survey.newest_seen;
        let is_newest = |place: u32| self.survey.sequence_at(place) == Some(newest);
        let before = |index: usize| places[(index + places.len() - 1) % places.len()];
        let mut first = places.iter().enumerate();
        let first = first.find(|(index, place)| is_newest(**place) && !is_newest(before(*index)));
        Ok(first.map(|(_, place)| *place))
    }

    /// Looks at so many blocks from `first` on, and on from the ring's start behind its end.
    fn look(&mut self, first: u32, count: u32) -> io::Result<()> {
        let ring = self.survey.blocks();
        let (mut first, mut left) = (first % ring, count.min(ring));
        while left > 0 {
            let count = left.min(PIECE_BLOCKS).min(ring - first);
            if (first..first + count).any(|position| !self.survey.has_seen(position)) {
                let piece = &mut self.piece[..count as usize * BLOCK_BYTES as usize];
                let offset = self.ring.offset + u64::from(first) * BLOCK_BYTES;
                let unreadable = read_blocks(self.storage, offset, piece)?;
                let new = unreadable.iter().map(|at| first + at);
                let new: Vec<_> = new.filter(|at| !self.survey.has_seen(*at)).collect();
                self.survey.unreadable.extend(new);
                self.survey.look(first, piece);
            }
            (first, left) = ((first + count) % ring, left - count);
        }
        Ok(())
    }

    /// Of the groups whose blocks are there, the newest.
    fn newest(&self) -> Option<Found> {
        self.survey.groups().max_by_key(|found| found.sequence)
    }

    /// Reads the newest complete group and those before it that it says are needed.
    fn needed_groups(&self) -> io::Result<Kept> {
        let mut found: Vec<_> = self.survey.groups().collect();
        found.sort_unstable_by_key(|found| found.sequence);
        let mut kept = Kept::new();
        let mut oldest = 0;
        for found in found.iter().rev() {
            if found.sequence < oldest {
                break;
            }
            let Some(group) = self.read_group(found)? else { continue };
            if kept.is_empty() {
                oldest = self.first_needed(found.sequence, &group);
            }
            kept.insert(found.sequence, group);
        }
        Ok(kept)
    }

    fn read_group(&self, found: &Found) -> io::Result<Option<Group>> {
        let mut blocks = AlignedBuf::zeroed(found.blocks as usize * BLOCK_BYTES as usize);
        let offset = self.ring.offset + u64::from(found.position) * BLOCK_BYTES;
        let unreadable = read_blocks(self.storage, offset, &mut blocks)?;
        Ok(self.survey.assemble(found, &blocks).filter(|_| unreadable.is_empty()))
    }

    /// The first group that is needed if this is the newest one: where the redo begins, or itself.
    fn first_needed(&self, newest: u64, group: &Group) -> u64 {
        match Record::decode(&mut &group.payload[..]) {
            Some(Record::Checkpoint { sequence, .. }) if newest > self.clean => {
                sequence.max(self.clean).saturating_add(1).min(newest)
            }
            _ => newest,
        }
    }
}

#[cfg(test)]
mod tests;
