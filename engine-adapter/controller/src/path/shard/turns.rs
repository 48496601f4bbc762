//! What a shard does at the end of a turn, and by the clock.

use super::super::latch::Latch;
use super::super::pending::Stage;
use super::super::sabotage::{Bug, is};
use super::{Ask, Asker, Shard, Wait, Waiting, Way};
use crate::rules::{REPLICAS_MAX, Slot, timeout};
use dbs_frontend::{Action, Carry};
use dbs_reactor::Io;
use longhorn_wire::frame::Type;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A change that has waited for its blocks for so long comes before all others.
const STARVING: Duration = Duration::from_millis(10);

impl Shard {
    /// Begins requests that have waited, as far as that is possible now.
    fn pump(&mut self, io: &mut Io) {
        self.retry = false;
        self.blocked = false;
        for place in std::mem::take(&mut self.locking) {
            self.lock_patient(io, place);
        }
        let mut rounds = self.waiting.len();
        while rounds > 0 {
            rounds -= 1;
            let Some(waiting) = self.waiting.pop_front() else { break };
            match self.begin(io, waiting) {
                None => {}
                Some(Wait::Room(waiting)) => {
                    // Neither is there room for those behind it; they keep their order.
                    self.waiting.push_front(waiting);
                    self.waiting.rotate_left(rounds + 1);
                    self.blocked |= self.waiting.len() > rounds + 1;
                    return;
                }
                Some(Wait::Blocks(mut waiting)) => {
                    self.blocked = true;
                    self.starve(&mut waiting);
                    self.waiting.push_back(waiting);
                }
            }
        }
    }

    /// Lets a change that has waited for too long be the next one.
    fn starve(&self, waiting: &mut Waiting) {
        if is(Bug::Starve) || waiting.starving || self.now.saturating_sub(waiting.since) < STARVING
        {
            return;
        }
        let mine = self.index as u64 + 1;
        let starving = &self.shared.starving;
        let free = starving.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst);
        waiting.starving = free.is_ok();
    }

    /// The end of a turn: what has waited begins, who waits for the end of requests is told.
    pub fn turn(&mut self, io: &mut Io) {
        self.turns = self.turns.wrapping_add(1);
        self.local_replies(io);
        self.begin_flushes(io);
        if self.retry {
            self.pump(io);
        }
        if self.blocked {
            // Once more after others know of it: what they gave back in between is seen.
            self.shared.block(self.index);
            self.pump(io);
        }
        if !self.draining.is_empty() {
            let pending = &self.pending;
            self.draining.retain(|(all, latch)| {
                let quiet = pending.is_quiet(*all) || is(Bug::PauseEarly);
                if quiet {
                    latch.count_down();
                }
                !quiet
            });
        }
        self.locals.turn();
    }

    /// Whether there is something to be done at once, by another turn.
    pub fn has_more(&self) -> bool {
        self.retry || !self.ended.is_empty() || self.locals.has_replies()
    }

    /// Whether nothing runs any more on the way to replicas.
    pub fn is_closed(&self) -> bool {
        self.links.is_empty() && self.locals.is_empty()
    }

    /// Flushes all replicas for who waits at the latch, as soon as there is room for one more request.
    pub fn flush(&mut self, io: &mut Io, latch: Arc<Latch>) {
        self.flushes.push_back(latch);
        self.begin_flushes(io);
    }

    /// Before requests that wait: what was not flushed before a pause keeps I/O waiting in it.
    fn begin_flushes(&mut self, io: &mut Io) {
        while !self.flushes.is_empty() {
            let Some(place) = self.pending.take() else { return };
            let (latch, pending) = (self.flushes.pop_front(), self.pending.get_mut(place));
            let Some(pending) = pending else { return };
            pending.request = Carry { action: Action::Flush, offset: 0, length: 0 };
            pending.range = (0, 0);
            pending.latch = latch;
            self.begin_flush(io, place, Stage::Change);
        }
    }

    pub fn pause(&mut self, all: bool, latch: Arc<Latch>) {
        self.pauses += 1;
        self.draining.push((all, latch));
    }

    pub fn resume(&mut self) {
        self.pauses = self.pauses.saturating_sub(1);
        self.retry = true;
    }

    /// Looks at the clock: who has been silent for too long, who is to be pinged.
    pub fn tick(&mut self, io: &mut Io) {
        let limits = self.shared.limits();
        let interval = limits.short.min(limits.flush) / 8;
        let interval = interval.clamp(Duration::from_millis(5), Duration::from_secs(1));
        self.due = self.now + interval;
        // A request that waits for blocks is looked at again, whatever happened.
        self.retry |= self.blocked;
        self.locals.tick();
        for index in 0..REPLICAS_MAX {
            let Some(Some(backend)) = self.backends.get_mut(index) else { continue };
            if backend.lost {
                continue;
            }
            if backend.away.is_some_and(|until| until <= self.now) && !is(Bug::WaitForAway) {
                let slot = backend.replica.slot;
                self.away_for_too_long(slot);
                continue;
            }
            let mut waits = self.pending.waits(backend.replica.slot, backend.silence);
            waits.ping = backend.pinged.map(|_| backend.ping_asked);
            if is(Bug::IgnoreOldest) {
                waits.oldest = None;
            }
            if !is(Bug::IgnoreTimeout) && limits.exceeded(&waits, self.now, false).is_some() {
                self.shared.expire(backend.replica.slot, &waits, self.now);
            }
            if self.index == 0 && backend.pinged.is_none() && backend.ping_due <= self.now {
                let slot = backend.replica.slot;
                self.ping(io, slot);
            }
        }
    }

    /// Sends a ping to a replica.
    pub(in super::super) fn ping(&mut self, io: &mut Io, slot: Slot) {
        let Some(Some(backend)) = self.backends.get_mut(slot.index()) else { return };
        // Without a mode it may not be open yet.
        if self.shared.modes.of(slot).is_none() {
            return;
        }
        let sequence = self.pending.ping();
        backend.ping_asked = self.now;
        let ask = Ask { kind: Type::Ping, offset: 0, length: 0 };
        if let Some(link) = backend.link(self.turns) {
            backend.pinged = Some(sequence);
            self.links.tell(link, |batch| ask.append_to(batch, sequence, None));
        } else if let Way::Local(number) = backend.way {
            backend.pinged = Some(sequence);
            let asker = Asker { slot, serial: backend.replica.serial };
            self.locals.ask(io, (number, asker), ask, sequence, None);
        }
    }

    /// Makes [`Self::now`] that of this turn.
    #[inline]
    pub fn look_at_clock(&mut self, io: &Io) {
        if !self.looked {
            self.looked = true;
            self.now = io.now().saturating_duration_since(self.shared.epoch);
            let lost = timeout::lost(self.now, self.due);
            if !lost.is_zero() {
                self.excuse(lost);
            }
        }
    }

    /// This reactor has not run for so long: what has come meanwhile is not even read yet.
    #[cold]
    fn excuse(&mut self, lost: Duration) {
        self.pending.excuse(lost);
        for backend in self.backends.iter_mut().flatten() {
            backend.silence.excuse(lost);
            backend.ping_asked += lost;
            backend.away = backend.away.map(|until| until + lost);
            backend.away_until += lost;
            backend.since += lost;
        }
        self.due = self.now;
    }
}
