//! Damaged blocks of a replica that are healed from another, as the real data path does it.

use crate::replica::{Reply, Request, SECTORS};
use crate::world::World;
use longhorn_controller::rules::sabotage::{Bug, is};
use longhorn_controller::rules::widen::BLOCK;
use longhorn_controller::rules::{Read, ReplicaId, Slot, Slots};
use std::collections::BTreeMap;
use std::time::Duration;

/// Numbers of healings, apart from those of the user's requests.
pub const HEALINGS: u64 = 1 << 40;

/// A damaged block: the slot and number of its replica, and which block.
pub type Patient = (Slot, ReplicaId, usize);

/// Where a healing is.
#[derive(Debug)]
enum Phase {
    Locking,
    Source(Read),
    Healing,
}

#[derive(Debug)]
pub struct Healing {
    patient: Patient,
    /// The request that waits for it.
    parent: Option<u64>,
    phase: Phase,
    locked: bool,
    /// Read before it was locked: only with a planted mistake.
    early: Option<Vec<u32>>,
}

#[derive(Debug, Default)]
pub struct Healings {
    pub all: BTreeMap<u64, Healing>,
    last: u64,
}

impl World {
    pub fn begin_healing(&mut self, patient: Patient, parent: Option<u64>) {
        if is(Bug::NeverHeal) {
            return;
        }
        self.path.healings.last += 1;
        let id = HEALINGS + self.path.healings.last;
        let healing =
            Healing { patient, parent, phase: Phase::Locking, locked: false, early: None };
        self.path.healings.all.insert(id, healing);
        match is(Bug::HealFromBefore) {
            true => self.read_source(id),
            false => self.lock_healing(id),
        }
    }

    /// Tries again what waits for the end of changes.
    pub fn lock_healings(&mut self) {
        let all = self.path.healings.all.iter();
        let waiting = all.filter(|(_, healing)| matches!(healing.phase, Phase::Locking));
        let waiting: Vec<_> = waiting.map(|(id, _)| *id).collect();
        waiting.into_iter().for_each(|id| self.lock_healing(id));
    }

    fn lock_healing(&mut self, id: u64) {
        let Some(healing) = self.path.healings.all.get_mut(&id) else { return };
        let (slot, peer, block) = healing.patient;
        let there = self.path.peers.get(&slot.index()).is_some_and(|its| its.id == peer);
        if !there || !self.path.modes.now().rw.contains(slot) {
            return self.end_healing(id, false);
        }
        if !is(Bug::HealUnlocked) {
            if !self.path.locks.try_lock(block as u64 * BLOCK, BLOCK) {
                return;
            }
            healing.locked = true;
        }
        match healing.early.take() {
            Some(data) => self.send_healing(id, data),
            None => self.read_source(id),
        }
    }

    fn read_source(&mut self, id: u64) {
        let modes = self.path.modes.now();
        let Some(healing) = self.path.healings.all.get_mut(&id) else { return };
        let (slot, _, block) = healing.patient;
        let Some(read) = Read::begin_for(slot, modes, &mut self.path.turn) else {
            return self.end_healing(id, false);
        };
        healing.phase = Phase::Source(read);
        self.ask_source(id, read.current(), block);
    }

    fn ask_source(&mut self, id: u64, from: Slot, block: usize) {
        self.send(id, from, Request::Read { first: block * SECTORS, count: SECTORS });
    }

    fn send_healing(&mut self, id: u64, data: Vec<u32>) {
        let Some(healing) = self.path.healings.all.get_mut(&id) else { return };
        let (slot, peer, block) = healing.patient;
        let there = self.path.peers.get(&slot.index()).is_some_and(|its| its.id == peer);
        if !there || !self.path.modes.now().rw.contains(slot) {
            return self.end_healing(id, false);
        }
        healing.phase = Phase::Healing;
        self.send(id, slot, Request::Heal { block, data });
    }

    pub fn answered_healing(&mut self, id: u64, from: Slot, reply: Reply) {
        let modes = self.path.modes.now();
        let Some(healing) = self.path.healings.all.get_mut(&id) else { return };
        let (slot, _, block) = healing.patient;
        match (&mut healing.phase, reply) {
            (Phase::Locking, _) => {}
            (Phase::Source(read), Reply::Data(data)) => {
                let faulted = read.faulted();
                self.fault(faulted, "a read failed");
                let Some(healing) = self.path.healings.all.get_mut(&id) else { return };
                if is(Bug::HealFromBefore) {
                    (healing.early, healing.phase) = (Some(data), Phase::Locking);
                    self.lock_healing(id);
                } else {
                    self.send_healing(id, data);
                }
            }
            (Phase::Source(read), reply) => {
                let next = match reply {
                    Reply::Damaged { .. } => read.retry_damaged(modes),
                    _ => read.retry(modes),
                };
                let faulted = read.faulted();
                match next {
                    Some(next) => self.ask_source(id, next, block),
                    None => {
                        self.fault(faulted, "a read failed");
                        self.end_healing(id, false);
                    }
                }
            }
            (Phase::Healing, Reply::Healed(had_to_be)) => {
                let now = Duration::from_micros(self.now);
                let peer = self.path.peers.get_mut(&from.index());
                if had_to_be && peer.is_some_and(|peer| !peer.trust.healed(now)) {
                    self.blemish(slot);
                    self.fault_unless_last(slot, "too many of its blocks are damaged");
                }
                self.end_healing(id, true);
            }
            (Phase::Healing, _) => {
                // Of what was on its way when a controller ended, replicas may hold different things.
                let sectors = block * SECTORS..(block + 1) * SECTORS;
                if sectors.into_iter().any(|sector| self.client.content.in_doubt(sector)) {
                    self.blemish(slot);
                }
                self.fault_unless_last(slot, "it refuses what others hold");
                self.end_healing(id, false);
            }
        }
    }

    fn blemish(&mut self, slot: Slot) {
        if let Some(peer) = self.path.peers.get(&slot.index()) {
            self.replicas[peer.replica].blemished = true;
        }
    }

    fn fault_unless_last(&mut self, slot: Slot, why: &str) {
        if !self.path.modes.now().rw.without(Slots::of(slot)).is_empty() {
            self.fault(Slots::of(slot), why);
        }
    }

    fn end_healing(&mut self, id: u64, well: bool) {
        let Some(healing) = self.path.healings.all.remove(&id) else { return };
        let (slot, _, block) = healing.patient;
        self.note(format!("block {block} in slot {} healed: {well}", slot.index()));
        if healing.locked {
            self.path.locks.unlock(block as u64 * BLOCK, BLOCK);
        }
        if let Some(parent) = healing.parent {
            self.mended(parent, well);
        }
        self.drain();
    }
}
