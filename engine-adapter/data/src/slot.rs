//! One replica, as one reactor sees it: what holds for its requests now, and what held before and is
//! still in use.

use super::gate::{Access, Active, Durability, Gate, Target, View, Watch};
use super::request::Request;
use super::ticket::Ticket;
use dbs_frontend::{Commits, Pool, Storage};
use dbs_reactor::{Io, Payload, Slab};
use dbs_service::log;
use std::sync::Arc;

/// A replica that this reactor has requests for.
pub(super) struct Slot<T> {
    /// Its name in messages: numbers are used again.
    pub id: u64,
    pub gate: Arc<Gate>,
    /// Who carries out what may wait.
    pub pool: Arc<Pool>,
    pub watch: Watch,
    /// What holds now, if it has been looked at since it changed.
    seen: Option<Seen>,
    /// Of which generation that is.
    generation: u64,
    /// And of which session.
    session: u64,
    /// How many of those opened are of before and still in use.
    draining: usize,
    /// Requests that wait for the replica to wake up.
    pub parked: Vec<Parked<T>>,
    pub waking: bool,
    /// It is to be let go of, once nothing of it is in use.
    leaving: bool,
}

/// A request that waits, and whose it is.
pub(super) struct Parked<T> {
    pub whose: T,
    pub request: Request,
    pub payload: Option<Payload>,
    /// The session of the replica that it began to wait in.
    pub session: u64,
}

/// What holds for requests.
pub(super) enum Seen {
    /// They go to what was opened under this number.
    Open(u32),
    Refused(Arc<Texts>),
    Dormant,
}

/// See [`Access::Refused`].
pub(super) struct Texts {
    pub io: String,
    pub ping: String,
}

/// An open replica that requests use.
pub(super) struct Opened<T> {
    slot: u32,
    pub active: Arc<Active>,
    pub storage: Option<Storage>,
    pub in_flight: usize,
    /// Something else holds by now.
    former: bool,
    pub power: bool,
    pub commits: Commits<Ticket<T>>,
    /// Bytes written in this turn.
    pub wrote: u64,
}

/// The replicas of a reactor.
pub(super) struct Slots<T> {
    slots: Slab<Slot<T>>,
    opened: Slab<Opened<T>>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Slab::default(), opened: Slab::default() }
    }
}

impl<T> Slots<T> {
    pub fn find(&self, id: u64) -> Option<u32> {
        self.slots.iter().find(|(_, slot)| slot.id == id).map(|(number, _)| number)
    }

    pub fn insert(&mut self, id: u64, gate: Arc<Gate>, pool: Arc<Pool>, watch: Watch) -> u32 {
        self.slots.insert(Slot {
            id,
            gate,
            pool,
            watch,
            seen: None,
            generation: 0,
            session: 0,
            draining: 0,
            parked: Vec::new(),
            waking: false,
            leaving: false,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub fn get(&self, number: u32) -> Option<&Slot<T>> {
        self.slots.get(number)
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut Slot<T>> {
        self.slots.get_mut(number)
    }

    pub fn opened(&self, number: u32) -> Option<&Opened<T>> {
        self.opened.get(number)
    }

    pub fn opened_mut(&mut self, number: u32) -> Option<&mut Opened<T>> {
        self.opened.get_mut(number)
    }

    /// The numbers of all that is open.
    pub fn all_opened(&self) -> Vec<u32> {
        self.opened.iter().map(|(number, _)| number).collect()
    }

    /// The slot that something opened is of.
    pub fn slot_of(&self, opened: u32) -> Option<&Slot<T>> {
        self.slots.get(self.opened.get(opened)?.slot)
    }

    /// What holds for a replica's requests now.
    pub fn look(&mut self, io: &mut Io, number: u32) -> Option<&Seen> {
        let Self { slots, opened } = self;
        let slot = slots.get_mut(number)?;
        if slot.seen.is_none() {
            let View { generation, session, access } = slot.watch.look();
            (slot.generation, slot.session) = (generation, session);
            slot.seen = Some(match access {
                Access::Open(active) => Seen::Open(opened.insert(Opened::new(io, number, active))),
                Access::Refused { io, ping } => Seen::Refused(Arc::new(Texts { io, ping })),
                Access::Dormant(_) => Seen::Dormant,
            });
        }
        slot.seen.as_ref()
    }

    /// The session that a replica is open in, or asleep, as far as this reactor has seen: connections
    /// of earlier ones are over.
    pub fn open_session(&self, number: u32) -> Option<u64> {
        let slot = self.slots.get(number)?;
        let open = matches!(slot.seen, Some(Seen::Open(_) | Seen::Dormant));
        open.then_some(slot.session)
    }

    /// Something else may hold from now on. It is looked at when it is needed.
    pub fn changed(&mut self, io: &mut Io, number: u32) {
        let Some(slot) = self.slots.get_mut(number) else { return };
        match slot.seen.take() {
            Some(Seen::Open(open)) => {
                slot.draining += 1;
                if let Some(opened) = self.opened.get_mut(open) {
                    opened.former = true;
                }
                self.close_if_unused(io, open);
            }
            _ => self.release(number),
        }
    }

    /// A request has ended; the replica's slot, if that is to be let go of.
    pub fn ended(&mut self, io: &mut Io, number: u32) -> Option<u32> {
        let opened = self.opened.get_mut(number)?;
        opened.in_flight -= 1;
        let slot = opened.slot;
        if opened.former {
            self.close_if_unused(io, number);
        }
        self.slots.get(slot).is_some_and(|slot| slot.leaving).then_some(slot)
    }

    fn close_if_unused(&mut self, io: &mut Io, number: u32) {
        if self.opened.get(number).is_none_or(|opened| opened.in_flight > 0) {
            return;
        }
        let Some(opened) = self.opened.remove(number) else { return };
        if let Some(storage) = opened.storage {
            io.remove_file(storage.file);
        }
        let slot = opened.slot;
        // The handles are closed before anybody is told so.
        drop(opened);
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.draining -= 1;
        }
        self.release(slot);
    }

    fn release(&mut self, number: u32) {
        if let Some(slot) = self.slots.get(number)
            && slot.draining == 0
        {
            slot.watch.release(slot.seen.as_ref().map(|_| slot.generation));
        }
    }

    /// A replica is to be let go of.
    pub fn set_leaving(&mut self, number: u32) {
        if let Some(slot) = self.slots.get_mut(number) {
            slot.leaving = true;
        }
    }

    /// Lets go of a replica that is leaving, if nothing of it is in use any more; answers with its
    /// name if it is gone. Requests in flight and commits in the background come back here when they
    /// have ended.
    pub fn leave(&mut self, io: &mut Io, number: u32) -> Option<u64> {
        let over = |slot: &Slot<T>| slot.leaving && !slot.waking;
        if !self.slots.get(number).is_some_and(over) {
            return None;
        }
        self.changed(io, number);
        if self.slots.get(number).is_none_or(|slot| slot.draining > 0) {
            return None;
        }
        self.slots.remove(number).map(|slot| slot.id)
    }
}

impl<T> Opened<T> {
    fn new(io: &mut Io, slot: u32, active: Arc<Active>) -> Self {
        let direct = match active.target() {
            Target::Volume { store, .. } => store.direct_io(),
            Target::File(_) | Target::Null { .. } => Ok(None),
        };
        // Without it, which takes a shortage of descriptors, the workers do all I/O.
        let direct = direct.unwrap_or_else(|error| {
            log::warn("data", &[("error", &error)]);
            None
        });
        let storage = direct.map(|direct| Storage {
            file: io.add_file(direct.file),
            offset_alignment: direct.offset_alignment,
            memory_alignment: direct.memory_alignment,
        });
        let power = active.durability() == Durability::Power;
        let commits = Commits::default();
        Self { slot, active, storage, in_flight: 0, former: false, power, commits, wrote: 0 }
    }
}
