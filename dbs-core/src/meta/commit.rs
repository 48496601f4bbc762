//! A commit in steps: take the records, and when the data under them is durable write the group;
//! then write metadata blocks back, one copy after the other.
//!
//! The order, which `Store::commit` follows, is the argument of `docs/format.md` section "Commit".

use super::Meta;
use crate::format::record::Record;
use crate::format::{RegionKind, block, journal};
use crate::limits::{WRITEBACK_BLOCKS, WRITEBACK_BLOCKS_FORCED};
use crate::units::BLOCK_BYTES;

/// A group taken out of the log, on its way to the journal.
#[derive(Debug)]
pub struct Group {
    /// Its sequence.
    pub sequence: u64,
    /// Byte offset to write it at.
    pub address: u64,
    /// Its sealed blocks.
    pub bytes: Vec<u8>,
    checkpoint: u64,
}

/// Sealed copies of metadata blocks to write.
#[derive(Debug, Default)]
pub struct Copies {
    /// Byte offset and bytes of each.
    pub writes: Vec<(u64, Vec<u8>)>,
    indices: Vec<usize>,
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
    /// Takes what has been recorded so far as a group; `None` if there is nothing to write.
    ///
    /// # Panics
    /// If the group does not fit in the ring: the soft limit on pending records and
    /// [`Meta::journal_short`] keep half of it free.
    pub fn begin_commit(&mut self, amount: WriteBack) -> Option<Group> {
        let (used, blocks) = self.log.ring_usage();
        let capture = match amount {
            WriteBack::All => WRITEBACK_BLOCKS_FORCED,
            WriteBack::Needed if used > blocks / 2 => WRITEBACK_BLOCKS_FORCED,
            WriteBack::Needed if used > blocks / 4 => WRITEBACK_BLOCKS,
            WriteBack::Needed | WriteBack::Session => 0,
        };
        self.log.publish();
        let picked = self.log.pick_dirty(capture);
        let announce = used > 1 && (used > blocks / 4 || amount == WriteBack::All);
        let wanted = announce || amount == WriteBack::Session;
        if self.log.pending_bytes() == 0 && picked.is_empty() && !wanted {
            return None;
        }
        let lsn = self.log.next;
        for (key, first) in picked {
            let image = self.image(key.0, key.1);
            self.log.start_write_back(key, first, image, lsn);
        }
        let checkpoint = self.log.checkpoint();
        let marks = std::mem::replace(&mut self.group_marks, self.marks);
        let header = Record::Checkpoint {
            sequence: checkpoint,
            marks,
            boot: self.boot,
            tail: self.log.has_tail(),
        };
        let (sequence, payload) = self.log.take_group(&header);
        let position = self
            .log
            .place(sequence, journal::blocks_for(payload.len()))
            .expect("half of the journal is kept free");
        let address =
            self.geometry.region(RegionKind::Journal).offset + u64::from(position) * BLOCK_BYTES;
        let bytes = journal::encode(&payload, sequence, self.log.session, &self.uuid, address);
        Some(Group { sequence, address, bytes, checkpoint })
    }

    /// Captures every dirty block as of the last group, with no group of its own, and seals the
    /// copies to write.
    ///
    /// # Panics
    /// If records are pending: the blocks would include what is not durable.
    pub fn capture_durable(&mut self) -> Copies {
        assert_eq!(self.log.pending_bytes(), 0, "nothing is pending");
        let lsn = self.log.durable;
        for (key, first) in self.log.pick_dirty(usize::MAX) {
            let image = self.image(key.0, key.1);
            self.log.start_write_back(key, first, image, lsn);
        }
        self.copies_due()
    }

    /// The device was flushed after everything written so far: seals the copies due next.
    pub fn flushed(&mut self) -> Copies {
        self.log.write_backs_flushed();
        self.copies_due()
    }

    /// The group is durable: seals the first copies of the blocks captured with it.
    pub fn group_durable(&mut self, group: &Group) -> Copies {
        self.log.group_durable(group.sequence, group.checkpoint);
        self.release_freed();
        self.copies_due()
    }

    /// The copies have been written.
    pub fn copies_written(&mut self, copies: &Copies) {
        copies.indices.iter().for_each(|index| self.log.copy_written(*index));
    }

    /// Whether more than half of the journal is in use.
    pub fn journal_short(&self) -> bool {
        let (used, blocks) = self.log.ring_usage();
        used > blocks / 2
    }

    fn copies_due(&self) -> Copies {
        let mut copies = Copies::default();
        for ((region, index), copy, at) in self.log.copies_due() {
            let item = &self.log.pipeline[at];
            let address = self.geometry.block_address(region, index, copy);
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            bytes[block::HEADER_BYTES..].copy_from_slice(&item.image);
            block::seal(&mut bytes, region.block_kind(), &self.uuid, address, item.lsn, [0; 24]);
            copies.writes.push((address, bytes));
            copies.indices.push(at);
        }
        copies.writes.sort_by_key(|write| write.0);
        copies
    }
}
