//! One replica, as one reactor sees it: what holds for its connections now, and what held before
//! and is still in use.

use super::gate::{Access, Active, Durability, Target, Watch};
use super::reactor::Held;
use super::request::Request;
use super::server::Service;
use dbs_reactor::{Io, Slab};
use dbs_server::frontend::{Commits, Ready, Storage};
use dbs_server::log;
use std::sync::Arc;

/// A replica whose connections this reactor has.
pub(super) struct Slot {
    pub service: Arc<Service>,
    pub watch: Watch,
    /// What holds now, if it has been looked at since it changed.
    seen: Option<Seen>,
    /// Of which generation that is.
    generation: u64,
    /// How many of those opened are of before and still in use.
    draining: usize,
    /// Requests that wait for the replica to wake up.
    pub parked: Vec<(u32, Ready<Request>)>,
    pub waking: bool,
    pub connections: usize,
    /// The service is to end, once its connections have.
    pub leaving: bool,
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
pub(super) struct Opened {
    slot: u32,
    pub active: Arc<Active>,
    pub storage: Option<Storage>,
    pub in_flight: usize,
    /// Something else holds by now.
    former: bool,
    pub power: bool,
    pub commits: Commits<Held>,
    /// Bytes written in this turn.
    pub wrote: u64,
}

/// The replicas of a reactor.
#[derive(Default)]
pub(super) struct Slots {
    slots: Slab<Slot>,
    opened: Slab<Opened>,
}

impl Slots {
    pub fn find(&self, service: u64) -> Option<u32> {
        self.slots.iter().find(|(_, slot)| slot.service.id == service).map(|(number, _)| number)
    }

    pub fn insert(&mut self, service: Arc<Service>, watch: Watch) -> u32 {
        self.slots.insert(Slot {
            service,
            watch,
            seen: None,
            generation: 0,
            draining: 0,
            parked: Vec::new(),
            waking: false,
            connections: 0,
            leaving: false,
        })
    }

    pub fn get(&self, number: u32) -> Option<&Slot> {
        self.slots.get(number)
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut Slot> {
        self.slots.get_mut(number)
    }

    pub fn opened(&self, number: u32) -> Option<&Opened> {
        self.opened.get(number)
    }

    pub fn opened_mut(&mut self, number: u32) -> Option<&mut Opened> {
        self.opened.get_mut(number)
    }

    /// The numbers of all that is open.
    pub fn all_opened(&self) -> Vec<u32> {
        self.opened.iter().map(|(number, _)| number).collect()
    }

    /// The slot that something opened is of.
    pub fn slot_of(&self, opened: u32) -> Option<&Slot> {
        self.slots.get(self.opened.get(opened)?.slot)
    }

    /// What holds for a replica's requests now.
    pub fn look(&mut self, io: &mut Io, number: u32) -> Option<&Seen> {
        let Self { slots, opened } = self;
        let slot = slots.get_mut(number)?;
        if slot.seen.is_none() {
            let (generation, access) = slot.watch.look();
            slot.generation = generation;
            slot.seen = Some(match access {
                Access::Open(active) => Seen::Open(opened.insert(Opened::new(io, number, active))),
                Access::Refused { io, ping } => Seen::Refused(Arc::new(Texts { io, ping })),
                Access::Dormant(_) => Seen::Dormant,
            });
        }
        slot.seen.as_ref()
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

    /// A request has ended.
    pub fn ended(&mut self, io: &mut Io, number: u32) {
        let Some(opened) = self.opened.get_mut(number) else { return };
        opened.in_flight -= 1;
        if opened.former {
            self.close_if_unused(io, number);
        }
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

    /// Lets go of a service that is leaving and has no connections any more.
    pub fn leave(&mut self, io: &mut Io, number: u32) {
        let over = |slot: &Slot| slot.leaving && slot.connections == 0 && !slot.waking;
        if !self.slots.get(number).is_some_and(over) {
            return;
        }
        self.changed(io, number);
        // A background commit may go on; it comes back here when it has ended.
        if self.slots.get(number).is_some_and(|slot| slot.draining == 0)
            && let Some(Slot { service, watch, .. }) = self.slots.remove(number)
        {
            drop(watch);
            service.left();
        }
    }

    /// The slot of something opened, which may be closed by now.
    pub fn slot_number(&self, opened: u32) -> Option<u32> {
        self.opened.get(opened).map(|opened| opened.slot)
    }
}

impl Opened {
    fn new(io: &mut Io, slot: u32, active: Arc<Active>) -> Self {
        let direct = match active.target() {
            Target::Volume { store, .. } => store.direct_io(),
            Target::Null { .. } => Ok(None),
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
