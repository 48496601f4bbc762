//! One reactor's share of a path: damage that replicas of DBS tell of.
//!
//! The request that met it goes on: with another replica, and when that has answered, or if none has all
//! that is asked for, with healing. A damaged block is locked as by a change, so that nobody changes it from
//! the moment it is read from another replica until the damaged one has written it; who asked was told
//! before. If none could answer, those that have something to give to each other do, and are asked again.

use super::link::Ask;
use super::pending::{Patient, Stage};
use super::sabotage::{Bug, is};
use super::shard::{Asked, Shard};
use crate::rules::sabotage as rules;
use crate::rules::widen::BLOCK;
use crate::rules::{Answer, Read, Slot};
use dbs_frontend::{FailureKind, Outcome};
use dbs_reactor::{Buf, Io};
use dbs_service::log;
use longhorn_wire::frame::{Damaged, Type};
use std::sync::atomic::Ordering;

/// Blocks that one request has healed after it was answered; those behind them are met again.
const PATIENTS_MAX: usize = 8;

impl Shard {
    /// A replica could not read, or could not complete a block, for what it holds is not what was
    /// written.
    pub(super) fn met_damage(
        &mut self,
        io: &mut Io,
        place: u32,
        (slot, serial): (Slot, u64),
        damaged: &Damaged,
    ) {
        let logs = self.shared.logs();
        let Some(backend) = self.connected(slot, serial) else { return };
        backend.replica.mismatches.fetch_add(1, Ordering::Relaxed);
        let fields: [(&str, &dyn std::fmt::Display); 4] = [
            ("replica", &backend.replica.name),
            ("damaged", &damaged.offset),
            ("snapshot", &damaged.in_snapshot),
            ("error", &damaged.text),
        ];
        if logs {
            log::warn("path", &fields);
        }
        let (modes, near) = (self.shared.modes.now(), self.near());
        let Some(pending) = self.pending.get_mut(place) else { return };
        pending.errors.push((slot, damaged.text.clone()));
        if pending.stage == Stage::Change {
            return self.answered(io, place, slot, Answer::Damaged);
        }
        let Some(mut read) = pending.read else { return };
        // What is read around a write is written with it, and what a block is healed from is met again.
        let patient = Patient { slot, serial, offset: damaged.offset };
        let room = pending.patients.len() < PATIENTS_MAX && !rules::is(rules::Bug::NeverHeal);
        if pending.stage == Stage::Read && room {
            pending.patients.push(patient);
        }
        let next = read.retry_damaged(near).or_else(|| read.pass(modes));
        pending.read = Some(read);
        self.read_goes_on(io, place, next, read.faulted());
    }

    /// Goes on with the next block to be healed, or ends.
    pub(super) fn next_patient(&mut self, io: &mut Io, place: u32) {
        let size = self.size();
        loop {
            let Some(pending) = self.pending.get_mut(place) else { return };
            let Some(patient) = pending.patients.pop() else {
                pending.patient = None;
                return self.all_done(io, place);
            };
            pending.patient = Some(patient);
            pending.read = None;
            pending.stage = Stage::Locking;
            let length = size.saturating_sub(patient.offset).min(BLOCK);
            pending.range = (patient.offset, length as u32);
            if length > 0 && self.is_complete(patient) {
                return self.lock_patient(io, place);
            }
        }
    }

    /// Whether the replica of a damaged block is there still, and complete.
    fn is_complete(&mut self, patient: Patient) -> bool {
        let complete = self.shared.modes.now().rw.contains(patient.slot);
        complete && self.connected(patient.slot, patient.serial).is_some()
    }

    /// Locks a damaged block, now or later, and reads it from another replica.
    pub(super) fn lock_patient(&mut self, io: &mut Io, place: u32) {
        let (modes, near) = (self.shared.modes.now(), self.near());
        let Some(pending) = self.pending.get_mut(place) else { return };
        let (Stage::Locking, Some(patient)) = (pending.stage, pending.patient) else { return };
        let range = (pending.range.0, u64::from(pending.range.1));
        // Not even a starving request comes first: it may wait for the end of a pause, which may wait for
        // this heal.
        if !is(Bug::HealUnlocked) {
            if !self.shared.locks.try_lock(range.0, range.1) {
                self.blocked = true;
                self.locking.push(place);
                return;
            }
            pending.locked = Some(range);
        }
        let source = Read::begin_for(patient.slot, near, &mut self.turn)
            .or_else(|| Read::begin_for(patient.slot, modes, &mut self.turn));
        let Some(source) = source else { return self.patient_done(io, place) };
        pending.stage = Stage::Source;
        pending.read = Some(source);
        self.ask_read(io, place, source.current(), self.now);
    }

    /// Sends what a damaged block should hold to the replica that has it.
    pub(super) fn send_healing(&mut self, io: &mut Io, place: u32, data: Buf) {
        let now = self.now;
        let sequence = self.pending.sequence(place);
        let Some(pending) = self.pending.get_mut(place) else { return };
        let Some(patient) = pending.patient else { return };
        (pending.stage, pending.heals_again) = (Stage::Heal, false);
        pending.asked = now;
        let ask = Ask { kind: Type::Heal, offset: patient.offset, length: pending.range.1 };
        let data = Some(data.share());
        pending.resend.clone_from(&data);
        if !self.is_complete(patient)
            || !matches!(self.ask(io, patient.slot, ask, sequence, data), Asked::Sent)
        {
            self.patient_done(io, place);
        }
    }

    /// A replica has written a damaged block again, or found that it is well.
    pub(super) fn healed(&mut self, io: &mut Io, place: u32, bytes: u32) {
        let now = self.now;
        let Some(pending) = self.pending.get_mut(place) else { return };
        pending.healed = true;
        let (begun, again) = (pending.begun, pending.heals_again);
        let Some(Patient { slot, serial, offset }) = pending.patient else { return };
        let logs = self.shared.logs();
        if let Some(backend) = self.connected(slot, serial) {
            let worth_it = if bytes > 0 {
                backend.replica.healed.fetch_add(1, Ordering::Relaxed);
                if logs {
                    log::info("path", &[("replica", &backend.replica.name), ("healed", &offset)]);
                }
                backend.trust.healed(now)
            } else {
                again || backend.trust.found_well(begun, now) || is(Bug::BelieveDamage)
            };
            if !worth_it {
                self.shared.fault_unless_last(slot, "too many of its blocks are damaged");
            }
        }
        self.patient_done(io, place);
    }

    /// A replica refuses what others hold.
    pub(super) fn not_healed(&mut self, io: &mut Io, place: u32, text: &str) {
        let patient = self.pending.get(place).and_then(|pending| pending.patient);
        if let Some(Patient { slot, serial, .. }) = patient
            && self.connected(slot, serial).is_some()
            && !is(Bug::KeepUnhealed)
        {
            self.shared.fault_unless_last(slot, text);
        }
        self.patient_done(io, place);
    }

    /// A damaged block is healed, or cannot be now.
    pub(super) fn patient_done(&mut self, io: &mut Io, place: u32) {
        self.give_blocks_back(place);
        self.next_patient(io, place);
    }

    /// All has been tried: who waits for it has replicas asked again, if that may help.
    fn all_done(&mut self, io: &mut Io, place: u32) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        if pending.told {
            return self.end(place, Outcome::Done(0));
        }
        if !std::mem::take(&mut pending.healed) {
            let text = self.texts(place);
            return self.fail(place, FailureKind::Io, text);
        }
        pending.rounds += 1;
        pending.errors.clear();
        let range = (pending.request.offset, pending.request.length);
        self.begin_read(io, place, Stage::Read, range);
    }
}
