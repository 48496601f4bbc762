//! A commit in steps: take the records, and when the data under them is durable write the group;
//! then write metadata blocks back, one copy after the other.
//!
//! The order, which `Store::commit` follows, is the argument of `docs/format.md` section "Commit".

use super::Meta;
use super::log::{BlockKey, Image, TakenGroup};
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::Record;
use crate::format::{BlockKind, PAYLOAD_BYTES, RegionKind, block, journal};
use crate::io::buffer::AlignedBuf;
use crate::limits::{WRITEBACK_BLOCKS, WRITEBACK_BLOCKS_FORCED};
use crate::units::BLOCK_BYTES;
use std::ops::Range;
use std::sync::Arc;

/// A group taken out of the log, on its way to the journal.
#[derive(Debug)]
pub struct Group {
    /// Byte offset to write it at.
    pub address: u64,
    taken: TakenGroup,
    session: u64,
    store: [u8; 16],
    checkpoint: u64,
}

impl Group {
    /// Its sequence.
    pub fn sequence(&self) -> u64 {
        self.taken.sequence
    }

    /// Its first block in the ring, and how many it has.
    pub fn place(&self) -> (u32, u32) {
        (self.taken.position, self.taken.blocks)
    }

    /// Its sealed blocks. Needs no lock.
    pub fn seal(&self) -> AlignedBuf {
        let payload = self.taken.payload();
        let blocks = journal::blocks_for(payload.len()) as usize;
        let mut out = AlignedBuf::zeroed(blocks * BLOCK_BYTES as usize);
        let sequence = self.taken.sequence;
        journal::encode_to(&mut out, &payload, sequence, self.session, &self.store, self.address);
        out
    }
}

/// Copies of metadata blocks to write.
#[derive(Debug)]
pub struct Copies {
    due: Vec<Due>,
    store: [u8; 16],
}

#[derive(Debug)]
struct Due {
    address: u64,
    kind: BlockKind,
    lsn: u64,
    image: Image,
    /// Place in the pipeline.
    index: usize,
}

/// Copies sealed for their places.
#[derive(Debug)]
pub struct SealedCopies {
    bytes: AlignedBuf,
    /// Byte offset, and which of the bytes go there.
    parts: Vec<(u64, Range<usize>)>,
}

impl Copies {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    /// Seals each for its place, those that are neighbours on the device together. Needs no lock.
    pub fn seal(&self) -> SealedCopies {
        let mut order: Vec<_> = self.due.iter().collect();
        order.sort_unstable_by_key(|due| due.address);
        let size = BLOCK_BYTES as usize;
        let mut bytes = AlignedBuf::zeroed(order.len() * size);
        let mut parts: Vec<(u64, Range<usize>)> = Vec::new();
        for (index, (out, due)) in bytes.chunks_exact_mut(size).zip(order).enumerate() {
            out[block::HEADER_BYTES..].copy_from_slice(due.image.bytes());
            block::seal(out, due.kind, &self.store, due.address, due.lsn, [0; 24]);
            match parts.last_mut() {
                Some((at, range)) if *at + range.len() as u64 == due.address => range.end += size,
                _ => parts.push((due.address, index * size..(index + 1) * size)),
            }
        }
        SealedCopies { bytes, parts }
    }
}

impl SealedCopies {
    /// What to write: byte offset and bytes.
    pub fn writes(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.parts.iter().map(|(at, range)| (*at, &self.bytes[range.clone()]))
    }
}

/// Memory for images of metadata blocks, taken before the lock is.
#[derive(Debug, Default)]
pub struct Room(Vec<u8>);

impl Room {
    /// Room for so many blocks.
    #[expect(clippy::slow_vector_initialization, reason = "the kernel is to give the pages now")]
    pub fn new(blocks: usize) -> Self {
        let bytes = blocks * PAYLOAD_BYTES;
        let mut room = Vec::with_capacity(bytes);
        room.resize(bytes, 0);
        Self(room)
    }

    fn blocks(&self) -> usize {
        self.0.len() / PAYLOAD_BYTES
    }
}

/// How much to write back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteBack {
    /// As the journal's fill asks for.
    Needed,
    /// As much as one commit may.
    All,
    /// As needed, and a group even if it has nothing to say: it opens a session.
    Session,
}

impl Meta {
    /// Metadata blocks that [`Meta::begin_commit`] would capture now.
    pub fn blocks_to_capture(&self, amount: WriteBack) -> usize {
        let (used, blocks) = self.log.ring_usage();
        // What cannot be written back holds the journal: the rest need not be for its sake.
        let used = if self.log.is_held() { 0 } else { used };
        let most = match amount {
            WriteBack::All => WRITEBACK_BLOCKS_FORCED,
            WriteBack::Needed if used > blocks / 2 => WRITEBACK_BLOCKS_FORCED,
            WriteBack::Needed if used > blocks / 4 || self.are_bitmaps_swollen() => {
                WRITEBACK_BLOCKS
            }
            WriteBack::Needed | WriteBack::Session => 0,
        };
        most.min(self.log.dirty_blocks())
    }

    /// Takes what has been recorded so far as a group; `None` if there is nothing to write.
    /// `room` is memory for the blocks captured with it.
    ///
    /// # Errors
    /// The group does not fit in the ring. That cannot be, as the soft limit on pending records
    /// and [`Meta::journal_short`] keep half of it free; nothing may be written after it.
    pub fn begin_commit(&mut self, amount: WriteBack, room: Room) -> Result<Option<Group>> {
        let (used, blocks) = self.log.ring_usage();
        self.append_staged();
        self.log.publish();
        let picked = self.pick_dirty(room.blocks());
        let announce = used > 1 && (used > blocks / 4 || amount == WriteBack::All);
        // A group that says nothing new would take room itself.
        let announce = announce && (!self.log.is_held() || self.log.makes_room());
        let wanted = announce || amount == WriteBack::Session;
        if self.log.pending_bytes() == 0 && picked.is_empty() && !wanted {
            return Ok(None);
        }
        self.capture(picked, room, self.log.next);
        let checkpoint = self.log.checkpoint();
        let marks = std::mem::replace(&mut self.group_marks, self.marks);
        let header = Record::Checkpoint {
            sequence: checkpoint,
            marks,
            boot: self.boot,
            tail: self.log.has_tail(),
        };
        let taken = self.log.take_group(&header).ok_or_else(|| {
            let text = "the journal has no room for the next group; open the store again, which \
                        makes room";
            Error::new(ErrorKind::Io, text)
        })?;
        let journal = self.geometry.region(RegionKind::Journal).offset;
        let address = journal + u64::from(taken.position) * BLOCK_BYTES;
        Ok(Some(Group { address, taken, session: self.log.session, store: self.uuid, checkpoint }))
    }

    /// Up to `most` dirty blocks to write back, of those that are in memory.
    fn pick_dirty(&mut self, most: usize) -> Vec<(BlockKey, u64)> {
        let (paging, entries) = (&self.paging, &self.entries);
        self.log.pick_dirty(most, |key| paging.is_away(entries, *key))
    }

    /// Captures every dirty block that is in memory as of the last group, with no group of its own:
    /// the copies to write.
    ///
    /// # Panics
    /// If records are pending: the blocks would include what is not durable.
    pub fn capture_durable(&mut self) -> Copies {
        assert_eq!(self.log.pending_bytes(), 0, "nothing is pending");
        let picked = self.pick_dirty(usize::MAX);
        let room = Room::new(picked.len());
        self.capture(picked, room, self.log.durable);
        self.copies_due()
    }

    /// The device was flushed after everything written so far: the copies due next.
    pub fn flushed(&mut self) -> Copies {
        let written = self.log.write_backs_flushed();
        self.note_written_back(&written);
        self.copies_due()
    }

    /// The group is durable: the first copies of the blocks captured with it.
    pub fn group_durable(&mut self, group: Group) -> Copies {
        self.log.group_durable(group.taken.sequence, group.checkpoint);
        self.log.recycle(group.taken);
        self.release_freed();
        self.copies_due()
    }

    /// The copies have been written.
    pub fn copies_written(&mut self, copies: &Copies) {
        copies.due.iter().for_each(|due| self.log.copy_written(due.index));
    }

    /// Whether nothing has still to be written.
    pub fn is_idle(&self) -> bool {
        self.log.is_idle() && !self.has_staged()
    }

    /// Whether all that was recorded is in groups that are durable: a commit would flush the device, and
    /// might write metadata back.
    pub fn is_committed(&self) -> bool {
        let taken = self.log.next - 1;
        self.log.pending_bytes() == 0 && !self.has_staged() && self.log.durable == taken
    }

    /// Whether more than half of the journal is in use.
    pub fn journal_short(&self) -> bool {
        let (used, blocks) = self.log.ring_usage();
        used > blocks / 2
    }

    /// Starts the write-back of blocks picked with [`Log::pick_dirty`](super::log::Log::pick_dirty)
    /// as of group `lsn`.
    fn capture(&mut self, picked: Vec<(BlockKey, u64)>, mut room: Room, lsn: u64) {
        for ((key, _), payload) in picked.iter().zip(room.0.chunks_exact_mut(PAYLOAD_BYTES)) {
            self.image(key.0, key.1, payload);
        }
        let all = Arc::new(room.0);
        for (index, (key, first)) in picked.into_iter().enumerate() {
            self.log.start_write_back(key, first, Image::new(&all, index), lsn);
        }
    }

    fn copies_due(&self) -> Copies {
        let due = self.log.copies_due().into_iter().map(|((region, index), copy, at)| {
            let item = &self.log.pipeline[at];
            Due {
                address: self.geometry.block_address(region, index, copy),
                kind: region.block_kind(),
                lsn: item.lsn,
                image: item.image.clone(),
                index: at,
            }
        });
        Copies { due: due.collect(), store: self.uuid }
    }
}
