//! Requests in flight: a fixed array of them, and the sequence numbers they go under.
//!
//! A sequence number is a place in the array and how often that was used: a reply that comes late
//! finds its place used for something else, and is ignored. The place behind the last is that of pings.

use super::latch::Latch;
use super::link::Ask;
use super::sabotage::{Bug, is};
use crate::rules::timeout::{Silence, Waits};
use crate::rules::{FanOut, Read, Slot, Slots, Widened};
use dbs_frontend::{Action, Carry};
use dbs_reactor::{Buf, SharedBuf};
use longhorn_wire::frame::{PLACE_BITS, Type};
use std::sync::Arc;
use std::time::Duration;

const PLACE_MASK: u32 = (1 << PLACE_BITS) - 1;
/// The bits of a count of uses that a sequence number has.
const USES_MASK: u32 = u32::MAX >> PLACE_BITS;
/// Most requests in flight on one reactor.
pub const QUEUE_DEPTH_MAX: usize = PLACE_MASK as usize;

/// What a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing: the place is free.
    Free,
    /// Data from one replica.
    Read,
    /// A block around an unaligned write, of those that [`Widened::reads`] says this one.
    Edge(usize),
    /// All replicas to have a change, or to have flushed.
    Change,
    /// All replicas to make durable what they have changed.
    Durable,
    /// Others to be done with changing a damaged block.
    Locking,
    /// The content of a damaged block, from another replica.
    Source,
    /// The replica with a damaged block to have written it again.
    Heal,
}

/// A block that a replica says is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Patient {
    pub slot: Slot,
    /// Of the replica: a slot is used again.
    pub serial: u64,
    /// First byte of the block.
    pub offset: u64,
}

/// A request on its way.
pub(super) struct Pending {
    uses: u32,
    /// The uses that the last two changes in this place were sent under. One of them is the last that any
    /// replica has had there: the second may have gone to few, to be completed.
    changes: [u32; 2],
    pub stage: Stage,
    /// Who to answer, and the number it goes under there.
    pub front: u8,
    pub ticket: u64,
    pub request: Carry,
    /// What is being asked of replicas: the request's range, or that of a widened write or its edge.
    pub range: (u64, u32),
    pub read: Option<Read>,
    pub fan_out: Option<FanOut>,
    /// All replicas that were asked.
    pub sent: Slots,
    /// What is to be written, until it is sent.
    pub payload: Option<Buf>,
    pub widened: Option<Widened>,
    pub edges: [Option<Buf>; 2],
    /// Blocks that nobody else changes until the end.
    pub locked: Option<(u64, u64)>,
    /// What `Shared::losses` was when a change was sent.
    pub losses: u64,
    /// Most bytes that a replica said it freed.
    pub freed: u32,
    pub begun: Duration,
    /// When replicas were asked last.
    pub asked: Duration,
    /// What replicas said that failed.
    pub errors: Vec<(Slot, String)>,
    /// What was sent with a change: should a connection break, or replicas have to complete it.
    pub resend: Option<SharedBuf>,
    /// Damage that a read has met and that is to be healed; the last one is next.
    pub patients: Vec<Patient>,
    /// What is being healed.
    pub patient: Option<Patient>,
    /// It is asked of that replica once more: it may have been healed by then.
    pub heals_again: bool,
    /// Something was healed since replicas were asked.
    pub healed: bool,
    /// How often they were asked anew after that.
    pub rounds: u8,
    /// Who asked has its answer.
    pub told: bool,
    /// Who waits for a flush that no frontend asked for.
    pub latch: Option<Arc<Latch>>,
}

impl Pending {
    fn new() -> Self {
        let request = Carry { action: Action::Flush, offset: 0, length: 0 };
        Self {
            uses: 0,
            changes: [u32::MAX; 2],
            stage: Stage::Free,
            front: 0,
            ticket: 0,
            request,
            range: (0, 0),
            read: None,
            fan_out: None,
            sent: Slots::EMPTY,
            payload: None,
            widened: None,
            edges: [None, None],
            locked: None,
            losses: 0,
            freed: 0,
            begun: Duration::ZERO,
            asked: Duration::ZERO,
            errors: Vec::new(),
            resend: None,
            patients: Vec::new(),
            patient: None,
            heals_again: false,
            healed: false,
            rounds: 0,
            told: false,
            latch: None,
        }
    }

    /// What replicas are being asked, as they were.
    pub fn ask(&self) -> Ask {
        let (offset, length) = self.range;
        match (self.stage, self.request.action) {
            (Stage::Free | Stage::Read | Stage::Edge(_) | Stage::Locking | Stage::Source, _) => {
                Ask { kind: Type::Read, offset, length }
            }
            (Stage::Heal, _) => Ask { kind: Type::Heal, offset, length },
            (Stage::Change, Action::Discard) => Ask { kind: Type::Unmap, offset, length },
            (Stage::Change, Action::Read | Action::Write { .. }) => {
                Ask { kind: Type::Write, offset, length }
            }
            (Stage::Change, Action::Flush) | (Stage::Durable, _) => {
                Ask { kind: Type::Flush, offset: 0, length: 0 }
            }
        }
    }

    /// What goes with [`Self::ask`], if it is asked again.
    pub fn sent_payload(&self) -> Option<SharedBuf> {
        match self.ask().kind {
            Type::Write | Type::Heal => self.resend.clone(),
            _ => None,
        }
    }

    /// Whether a reply of this replica is still to come.
    pub fn waits_for(&self, slot: Slot) -> bool {
        match self.stage {
            Stage::Free | Stage::Locking => false,
            Stage::Read | Stage::Edge(_) | Stage::Source => {
                self.read.is_some_and(|read| read.current() == slot)
            }
            Stage::Heal => self.patient.is_some_and(|patient| patient.slot == slot),
            Stage::Change | Stage::Durable => {
                self.fan_out.is_some_and(|fan_out| fan_out.waiting().contains(slot))
            }
        }
    }
}

/// The array.
pub(super) struct PendingTable {
    all: Box<[Pending]>,
    free: Vec<u32>,
    pings: u32,
}

impl PendingTable {
    /// Room for so many, at most [`QUEUE_DEPTH_MAX`].
    pub fn new(depth: usize) -> Self {
        let depth = depth.clamp(1, QUEUE_DEPTH_MAX);
        Self {
            all: (0..depth).map(|_| Pending::new()).collect(),
            free: (0..depth as u32).rev().collect(),
            pings: 0,
        }
    }

    fn in_flight(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// Whether nothing is in flight but flushes, and what is being healed, unless `all` says otherwise:
    /// they may take long, and change nothing.
    pub fn is_quiet(&self, all: bool) -> bool {
        let changes_nothing = |pending: &Pending| match pending.stage {
            Stage::Free => true,
            Stage::Locking | Stage::Source | Stage::Heal => !all,
            _ => pending.ask().kind == Type::Flush && !is(Bug::PauseLong),
        };
        self.in_flight() == 0 || self.all.iter().all(changes_nothing)
    }

    /// Takes a free place.
    #[inline]
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    #[inline]
    pub fn get_mut(&mut self, place: u32) -> Option<&mut Pending> {
        self.all.get_mut(place as usize)
    }

    #[inline]
    pub fn get(&self, place: u32) -> Option<&Pending> {
        self.all.get(place as usize)
    }

    /// The sequence number that the request in a place goes under.
    #[inline]
    pub fn current(&self, place: u32) -> u32 {
        self.get(place).map_or(0, |pending| pending.uses << PLACE_BITS | place)
    }

    /// All that are in flight, with their sequence numbers.
    pub fn present(&self) -> impl Iterator<Item = (u32, &Pending)> {
        let all = self.all.iter().zip(0..).filter(|(pending, _)| pending.stage != Stage::Free);
        all.map(|(pending, place)| (pending.uses << PLACE_BITS | place, pending))
    }

    /// The places of requests that wait for a replica.
    pub fn waiting_for(&self, slot: Slot) -> Vec<u32> {
        let waiting = self.all.iter().zip(0..).filter(|(pending, _)| pending.waits_for(slot));
        waiting.map(|(_, place)| place).collect()
    }

    /// What is waited for of a replica that has been silent like this.
    pub fn waits(&self, slot: Slot, silence: Silence) -> Waits {
        let mut waits = Waits { silence, ..Waits::default() };
        for pending in self.all.iter().filter(|pending| pending.waits_for(slot)) {
            let oldest = match pending.ask().is_urgent() {
                true => &mut waits.oldest,
                false => &mut waits.oldest_flush,
            };
            *oldest = Some(oldest.map_or(pending.asked, |oldest| oldest.min(pending.asked)));
        }
        waits
    }

    /// So much time does not count for what is waited for.
    pub fn excuse(&mut self, lost: Duration) {
        self.all.iter_mut().for_each(|pending| pending.asked += lost);
    }

    /// A new sequence number for the request in a place; replies to the last one are ignored from now
    /// on.
    #[inline]
    pub fn sequence(&mut self, place: u32) -> u32 {
        let Some(pending) = self.all.get_mut(place as usize) else { return PLACE_MASK };
        pending.uses = pending.uses.wrapping_add(1);
        pending.uses << PLACE_BITS | place
    }

    /// The same for a change, which replicas tell by it from the last one in this place.
    #[inline]
    pub fn sequence_of_change(&mut self, place: u32) -> u32 {
        let Some(pending) = self.all.get_mut(place as usize) else { return PLACE_MASK };
        loop {
            pending.uses = pending.uses.wrapping_add(1);
            let uses = pending.uses & USES_MASK;
            if !pending.changes.contains(&uses) {
                pending.changes = [pending.changes[1], uses];
                return pending.uses << PLACE_BITS | place;
            }
        }
    }

    /// The place of a request by its sequence number, if that is its present one.
    #[inline]
    pub fn find(&self, sequence: u32) -> Option<u32> {
        let place = sequence & PLACE_MASK;
        let pending = self.all.get(place as usize)?;
        let its_use = pending.uses << PLACE_BITS | place == sequence || is(Bug::AnyUse);
        (pending.stage != Stage::Free && its_use).then_some(place)
    }

    /// A place is free again; what its request held must be taken out before.
    #[inline]
    pub fn give_back(&mut self, place: u32) {
        let Some(pending) = self.all.get_mut(place as usize) else { return };
        pending.stage = Stage::Free;
        pending.uses = pending.uses.wrapping_add(1);
        pending.read = None;
        pending.fan_out = None;
        pending.sent = Slots::EMPTY;
        pending.payload = None;
        if pending.widened.take().is_some() {
            pending.edges = [None, None];
        }
        pending.freed = 0;
        pending.resend = None;
        pending.patients.clear();
        pending.patient = None;
        (pending.healed, pending.rounds, pending.told) = (false, 0, false);
        pending.errors.clear();
        self.free.push(place);
    }

    /// The sequence number of a new ping.
    pub fn ping(&mut self) -> u32 {
        self.pings = self.pings.wrapping_add(1);
        self.pings << PLACE_BITS | PLACE_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_replies_find_nothing() {
        let mut pending = PendingTable::new(2);
        let place = pending.take().unwrap();
        pending.get_mut(place).unwrap().stage = Stage::Read;
        let first = pending.sequence(place);
        assert_eq!(pending.find(first), Some(place));
        let second = pending.sequence(place);
        assert_eq!((pending.find(first), pending.find(second)), (None, Some(place)));
        pending.give_back(place);
        assert_eq!(pending.find(second), None);
        assert_eq!(pending.take(), Some(place));
        pending.get_mut(place).unwrap().stage = Stage::Change;
        assert_eq!((pending.find(first), pending.find(second)), (None, None));
        assert_eq!((pending.take().is_some(), pending.take()), (true, None));
    }

    /// However many reads there were in between: uses have few bits.
    #[test]
    fn no_change_has_the_number_of_one_of_the_last_two() {
        let mut pending = PendingTable::new(1);
        let mut last = [u32::MAX; 2];
        for uses in [0, USES_MASK, USES_MASK - 1, USES_MASK, USES_MASK] {
            for _ in 0..uses {
                pending.sequence(0);
            }
            let next = pending.sequence_of_change(0);
            assert!(!last.contains(&next), "{next} after {last:?}");
            last = [last[1], next];
        }
    }

    #[test]
    fn pings_and_nonsense_are_nobodys() {
        let mut pending = PendingTable::new(QUEUE_DEPTH_MAX + 5);
        assert_eq!(pending.all.len(), QUEUE_DEPTH_MAX);
        let (one, two) = (pending.ping(), pending.ping());
        assert_ne!(one, two);
        for sequence in [one, two, 0, u32::MAX, 77] {
            assert_eq!(pending.find(sequence), None);
        }
    }
}
