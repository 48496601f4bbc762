//! What goes into the journal of the last requests, and what is taken from it.

use super::super::backend::Backend;
use super::super::journal::{JournalEnd, JournalEntry, JournalKind, Kept};
use super::super::link::Reply;
use super::super::pending::{Pending, Stage};
use super::Shard;
use crate::rules::Slot;
use longhorn_wire::frame::Type;
use std::time::{Duration, SystemTime};

impl Shard {
    /// Keeps what became of a request to a replica.
    #[inline]
    pub(in super::super) fn note(&mut self, place: u32, slot: Slot, well: bool) {
        let Some(Some(backend)) = self.backends.get(slot.index()) else { return };
        let Some(pending) = self.pending.get(place) else { return };
        let mut kept = kept(pending, backend.target, self.pending.current(place));
        let took = self.now.saturating_sub(pending.asked);
        kept.end = if well { JournalEnd::Done(took) } else { JournalEnd::Failed(took) };
        self.journal.keep(kept);
    }

    /// The same of a ping.
    pub(in super::super) fn note_ping(&mut self, target: u16, asked: Duration, reply: &Reply) {
        let took = self.now.saturating_sub(asked);
        let well = reply.kind == Some(Type::Response);
        self.journal.keep(Kept {
            target,
            kind: JournalKind::Ping,
            sequence: reply.sequence,
            length: 0,
            offset: 0,
            asked,
            end: if well { JournalEnd::Done(took) } else { JournalEnd::Failed(took) },
        });
    }

    /// Takes what was kept, and adds what has not ended.
    pub(in super::super) fn take_journal(&mut self) -> Vec<JournalEntry> {
        let mut all = self.journal.take();
        for (sequence, pending) in self.pending.present() {
            let waits =
                |backend: &&Backend| !backend.lost && pending.waits_for(backend.replica.slot);
            let waiting = self.backends.iter().flatten().filter(waits);
            all.extend(waiting.map(|backend| kept(pending, backend.target, sequence)));
        }
        let epoch = SystemTime::now() - self.shared.epoch.elapsed();
        all.into_iter().map(|kept| self.journal.show(kept, epoch)).collect()
    }
}

/// A request to a replica that has not ended.
fn kept(pending: &Pending, target: u16, sequence: u32) -> Kept {
    let kind = match pending.stage {
        Stage::Edge(_) | Stage::Locking | Stage::Source => JournalKind::Read,
        Stage::Heal => JournalKind::Heal,
        Stage::Durable => JournalKind::Flush,
        Stage::Free | Stage::Read | Stage::Change => JournalKind::of(pending.request.action),
    };
    let (offset, length) = match kind {
        JournalKind::Flush => (0, 0),
        _ => pending.range,
    };
    let (asked, end) = (pending.asked, JournalEnd::Pending);
    Kept { target, kind, sequence, length, offset, asked, end }
}
