//! What the journal says before anything else is read: which groups are to be redone.

use super::{LastSession, Loader};
use crate::format::RegionKind;
use crate::format::journal::Scan;
use crate::format::record::Record;
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use std::collections::BTreeSet;

/// What a missing group means.
const LATER_LOST: &str = "this change and later ones are lost";

impl Loader {
    pub(super) fn take_journal(&mut self, mut scan: Scan) {
        let newest = scan.groups.keys().next_back().copied().unwrap_or(0);
        if let Some(group) = scan.groups.get(&newest) {
            self.head = group.position + group.blocks;
        }
        self.judge_damaged(&scan, newest.max(self.durable));
        self.judge_unreadable(&scan, newest.max(self.durable));
        if newest <= self.durable {
            // Closed in good order: nothing in the journal is needed.
            if scan.newest_seen > self.durable + 1 {
                let text = format!("commit group {} is missing: {LATER_LOST}", self.durable + 1);
                self.corrupt(RegionKind::Journal, None, &text);
                self.lose_groups(self.durable + 1, scan.newest_seen);
            }
            return;
        }
        if scan.newest_seen > newest + 1 {
            let text = format!("commit group {} is damaged: {LATER_LOST}", newest + 1);
            self.corrupt(RegionKind::Journal, None, &text);
            self.lose_groups(newest + 1, scan.newest_seen);
        }
        let header = scan.groups.get(&newest).and_then(|g| Record::decode(&mut &g.payload[..]));
        let Some(Record::Checkpoint { sequence, boot, tail, .. }) = header else {
            let text = format!("commit group {newest} has no header record: {LATER_LOST}");
            self.corrupt(RegionKind::Journal, None, &text);
            self.lose_groups(self.durable + 1, newest);
            return;
        };
        let id = scan.groups.get(&newest).map_or(0, |group| group.session);
        self.last_session = Some(LastSession { id, boot, tail });
        // The superblock may be newer than the checkpoint this group announced.
        let clean = self.durable;
        self.durable = newest;
        if sequence >= newest {
            let text = format!("commit group {newest} announces itself: {LATER_LOST}");
            self.corrupt(RegionKind::Journal, None, &text);
            self.lose_groups(clean + 1, newest);
            return;
        }
        if sequence > clean {
            self.checkpoint = sequence;
        }
        self.note_mixed_sessions(&scan, newest);
        for sequence in self.checkpoint + 1..=newest {
            match scan.groups.remove(&sequence) {
                Some(g) => self.groups.push((sequence, g.position, g.blocks, g.payload)),
                None => {
                    let text =
                        format!("commit group {sequence} is missing or damaged: {LATER_LOST}");
                    self.corrupt(RegionKind::Journal, None, &text);
                    self.lose_groups(sequence, newest);
                    break;
                }
            }
        }
        // The blocks valid without redo are those below the marks before the first group of it.
        let first = self.groups.first().and_then(|g| Record::decode(&mut &g.3[..]));
        if sequence > clean
            && let Some(Record::Checkpoint { marks, .. }) = first
        {
            self.base_marks = marks;
        }
    }

    /// Says that a session goes on behind another one's group: it was written over one of its own, whose records nobody has.
    /// A session begins behind all groups, and never comes again.
    fn note_mixed_sessions(&mut self, scan: &Scan, newest: u64) {
        let mut ended = BTreeSet::new();
        let (mut present, mut mixed) = (None, None);
        for (sequence, group) in scan.groups.range(self.checkpoint + 1..=newest) {
            if present != Some(group.session) {
                if !ended.insert(group.session) {
                    mixed = Some((*sequence, group.position, group.session));
                }
                present = Some(group.session);
            }
        }
        if let Some((sequence, position, session)) = mixed {
            let text = format!(
                "commit group {} is of another machine's session, between groups of session {session:016x}: what was \
                 acknowledged there may be lost. Run `dbs check` and `dbs scrub`, and compare with a backup",
                sequence - 1
            );
            self.note(RegionKind::Journal, position, &text);
        }
    }

    /// Tells damage of what may have been the last group from damage of what is not needed. A
    /// group that a crash kept from being complete has no broken sector.
    fn judge_damaged(&mut self, scan: &Scan, last: u64) {
        for damaged in &scan.damaged {
            if damaged.is_of(last + 1) {
                let text = format!(
                    "commit group {} is damaged and was the last one: what it made durable is lost",
                    last + 1
                );
                self.corrupt(RegionKind::Journal, Some(damaged.position), &text);
                self.lose_groups(last + 1, last + 1);
            } else {
                self.note(RegionKind::Journal, damaged.position, "damaged; it is not needed");
            }
        }
    }

    /// Tells blocks that may hold the group after the last one from those that cannot. All of a group
    /// is durable before it is acknowledged: so its first block is seen, or it is the one that cannot be
    /// read. Groups before the last one are missed by their numbers, if they are needed.
    fn judge_unreadable(&mut self, scan: &Scan, last: u64) {
        let ring = (self.geometry.region(RegionKind::Journal).length / BLOCK_BYTES) as u32;
        for position in &scan.unreadable {
            let careless = sabotage::is(Bug::PassOverUnreadable);
            if scan.may_hide(*position, last + 1, self.head, ring) && !careless {
                let text = format!(
                    "the device cannot read it, and it may hold commit group {}: what that made durable \
                     would be lost",
                    last + 1
                );
                self.corrupt(RegionKind::Journal, Some(*position), &text);
                self.lose_groups(last + 1, last + 1);
                self.unread.ring.push(*position);
            } else {
                let text = "the device cannot read it; it holds no later group";
                self.note(RegionKind::Journal, *position, text);
                self.unread.spare_ring.push(*position);
            }
        }
    }

    /// Groups from `first` to `last` at least are needed and cannot be read.
    pub(super) fn lose_groups(&mut self, first: u64, last: u64) {
        let (known_first, known_last) = self.unread.groups.unwrap_or((first, last));
        self.unread.groups = Some((first.min(known_first), last.max(known_last)));
    }
}
