//! One reactor's share of a path: a replica whose connections broke, until there are others.
//!
//! It is *away* for a short window, on this reactor alone. What is asked of it meanwhile waits, as does what was
//! on its way; reads go to others. When it is back, all of that is sent once more, under the numbers that it
//! had: the replica has seen to it that nothing of the former connections runs any more, and does not do again
//! what it has done. It is back only if it is the same process, which nobody has closed since
//! ([`longhorn_wire::frame`]). In all other cases it becomes `ERR`, as one that cannot connect anew.

use super::backend::{Access, RESPITE, Way};
use super::dial;
use super::link::Link;
use super::message::Message;
use super::pending::Stage;
use super::replica::{Anew, Replica};
use super::sabotage::{Bug, is};
use super::shard::Shard;
use super::shared::Shared;
#[cfg(feature = "sabotage")]
use super::simulated_links::Redial;
use crate::rules::timeout::PING_INTERVAL;
use crate::rules::{Answer, Modes, Slot, Slots, Widened};
use dbs_reactor::{Io, SharedBuf};
use dbs_service::log;
use longhorn_data::stats::add;
use longhorn_wire::frame::Lane;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

/// Why a replica becomes `ERR` whose connections broke.
const LOST: &str = "the connection is lost";
/// Connections that carry answers and break are made anew after twice the time each time, up to this part of the window.
const RESPITE_PART: u32 = 4;
/// Connections that lasted for so long were well.
const HEALTHY: Duration = Duration::from_secs(10);

impl Shard {
    /// A connection is gone. If all that is known is that it broke, there may be another one.
    pub(super) fn link_ended(&mut self, io: &mut Io, number: u32, why: Option<&str>) {
        let Some(link) = self.links.get(number) else { return };
        let (slot, serial, epoch) = (link.slot, link.serial, link.epoch);
        let broke = why.is_none() && self.links.is_lost(number);
        let Some(backend) = self.connected(slot, serial) else { return };
        // The others of before end with the first one.
        if backend.epoch != epoch || backend.away.is_some() {
            return;
        }
        if broke && backend.replica.anew.is_some() {
            return self.go_away(io, slot, serial);
        }
        self.shared.fault(slot, why.unwrap_or(LOST));
    }

    /// Lets a replica be away until there are other connections, or for too long.
    fn go_away(&mut self, io: &mut Io, slot: Slot, serial: u64) {
        let (now, window, index) = (self.now, self.shared.window(), self.index);
        let Some(backend) = self.connected(slot, serial) else { return };
        let Way::Links { numbers, .. } = &mut backend.way else { return };
        let count = std::mem::take(numbers).len();
        let lasted = now.saturating_sub(backend.since);
        // Connections that carried no answer do not end the time: each costs a part of it, so that there are only so many.
        backend.away_until = match backend.heard || is(Bug::FlapForEver) {
            true => now + window,
            false => backend.away_until + lasted.saturating_sub(RESPITE),
        };
        if lasted >= HEALTHY {
            backend.respite = RESPITE;
        } else if backend.heard {
            backend.respite = (2 * backend.respite).min(window / RESPITE_PART).max(RESPITE);
        }
        // Those that carried nothing have little time.
        let respite = if backend.heard { backend.respite } else { RESPITE };
        let respite = respite.saturating_sub(lasted);
        let over = backend.away_until <= now;
        backend.epoch += 1;
        backend.away = Some(backend.away_until);
        backend.pinged = None;
        let (replica, epoch) = (Arc::clone(&backend.replica), backend.epoch);
        self.away = self.away.with(slot);
        self.links.end(io, true, |link| link.serial == serial);
        self.read_elsewhere(io, slot);
        if is(Bug::BelieveAway) {
            for place in self.pending.waiting_for(slot) {
                self.answered(io, place, slot, Answer::Done);
            }
        }
        if self.shared.logs() {
            log::warn("path", &[("replica", &replica.name), ("reactor", &index), ("error", &LOST)]);
        }
        if over {
            return self.away_for_too_long(slot);
        }
        if let Err(error) = connect_anew(&self.shared, &replica, (index, epoch), count, respite) {
            self.shared
                .fault(slot, &format!("{LOST}, and there is no thread for another: {error}"));
        }
    }

    /// A replica is lost that was not back in time.
    pub(super) fn away_for_too_long(&self, slot: Slot) {
        let window = self.shared.window();
        self.shared.fault(slot, &format!("{LOST}, and there was no other within {window:?}"));
    }

    /// Reads that wait for a replica which is away are asked of others, if there are any. They have waited since they were
    /// asked first. One that has waited for long stays: the other is not to be blamed for that, and no read goes
    /// to and fro for ever.
    fn read_elsewhere(&mut self, io: &mut Io, slot: Slot) {
        let modes = self.near();
        let (now, short) = (self.now, self.shared.options.short_timeout);
        for place in self.pending.waiting_for(slot) {
            let Some(pending) = self.pending.get_mut(place) else { continue };
            let asked = if is(Bug::BounceForEver) { now } else { pending.asked };
            let reads = matches!(pending.stage, Stage::Read | Stage::Edge(_) | Stage::Source);
            let may = reads && now.saturating_sub(asked) < short;
            let Some(mut read) = pending.read.filter(|_| may) else { continue };
            // Not one of those that are away as well.
            let Some(next) = read.pass(modes).filter(|next| !self.away.contains(*next)) else {
                continue;
            };
            self.note(place, slot, false);
            if let Some(pending) = self.pending.get_mut(place) {
                pending.read = Some(read);
            }
            if let Some(Some(backend)) = self.backends.get_mut(slot.index()) {
                backend.silence.withdrawn();
            }
            add(&self.counters().retries, 1);
            self.ask_read(io, place, next, asked);
        }
    }

    /// The modes, without the complete replicas that are away if others are there.
    pub(super) fn near(&self) -> Modes {
        let modes = self.shared.modes.now();
        let rw = modes.rw.without(self.away);
        if rw.is_empty() { modes } else { Modes { rw, ..modes } }
    }

    /// Takes connections that belong to a replica; their numbers, and what was received on each.
    pub(super) fn take_links(
        &mut self,
        io: &mut Io,
        access: Access,
        (replica, epoch): (&Replica, u32),
    ) -> Vec<(u32, Vec<u8>)> {
        let link = || Link { slot: replica.slot, serial: replica.serial, epoch };
        match access {
            Access::Links(links) => {
                let mut add = |taken: longhorn_wire::transport::DataLink| {
                    let (socket, tls, received) = taken.into_parts();
                    (self.links.add(io, socket.into(), link(), tls), received)
                };
                links.into_iter().map(&mut add).collect()
            }
            #[cfg(feature = "sabotage")]
            Access::Simulated(names) => {
                let mut add = |name| {
                    let socket = io.add_simulated(name);
                    (self.links.adopt(io, socket, link(), None), Vec::new())
                };
                names.into_iter().map(&mut add).collect()
            }
            Access::Local(_) | Access::Null => Vec::new(),
        }
    }

    /// There are other connections to a replica, or will not be.
    pub(super) fn back(
        &mut self,
        io: &mut Io,
        (slot, serial, epoch): (Slot, u64, u32),
        access: Result<Access, String>,
    ) {
        let now = self.now;
        let Some(backend) = self.connected(slot, serial) else { return };
        if backend.epoch != epoch || backend.away.is_none() {
            return;
        }
        let replica = Arc::clone(&backend.replica);
        let access = match access {
            Ok(access) => access,
            Err(why) => return self.shared.fault(slot, &format!("{LOST}, {why}")),
        };
        let begun = self.take_links(io, access, (&replica, epoch));
        let Some(backend) = self.connected(slot, serial) else { return };
        backend.way = Way::over(&begun);
        backend.away = None;
        (backend.since, backend.heard) = (now, false);
        backend.ping_due = now + PING_INTERVAL;
        self.away = self.away.without(Slots::of(slot));
        let sent = self.send_again(slot);
        replica.reconnected.fetch_add(1, Ordering::Relaxed);
        if self.shared.logs() {
            let (name, reactor) = (&replica.name, self.index);
            let fields: [(&str, &dyn std::fmt::Display); 3] =
                [("replica", name), ("reactor", &reactor), ("sent_again", &sent)];
            log::info("reconnected", &fields);
        }
        for (number, received) in begun {
            self.begin_link(io, number, &received);
        }
        // So it has something to answer, on every reactor.
        if self.connected(slot, serial).is_some_and(|backend| backend.away.is_none()) {
            self.ping(io, slot);
        }
    }

    /// Keeps what is sent with a write, if it may have to be sent again: to a replica that can be connected to anew, or
    /// as a part of whole blocks, when one has met damage.
    pub(super) fn keep(&mut self, place: u32, asked: Slots, payload: Option<&SharedBuf>) {
        let Self { backends, pending, .. } = self;
        let Some(pending) = pending.get_mut(place) else { return };
        let (offset, length) = pending.range;
        let part = || Widened::new(offset, u64::from(length), u64::MAX).is_some();
        let anew = |slot: Slot| {
            let backend = backends.get(slot.index()).and_then(Option::as_ref);
            backend.is_some_and(|backend| backend.replica.anew.is_some())
        };
        if asked.iter().any(anew) || pending.widened.is_none() && part() {
            pending.resend = payload.cloned();
        }
    }

    /// Sends all that waits for a replica which is back; how much that is.
    fn send_again(&mut self, slot: Slot) -> usize {
        let Self { backends, links, pending, turns, .. } = self;
        let Some(Some(backend)) = backends.get_mut(slot.index()) else { return 0 };
        if is(Bug::ForgetAway) {
            return 0;
        }
        let places = pending.waiting_for(slot);
        for place in &places {
            let sequence = pending.current(*place);
            let (Some(pending), Some(link)) = (pending.get_mut(*place), backend.link(*turns))
            else {
                continue;
            };
            pending.heals_again = pending.stage == Stage::Heal;
            // It may have been done: what waited is not, nor is it known to be that.
            let ask = if is(Bug::SendAsNew) { pending.ask() } else { pending.ask().again() };
            let payload = pending.sent_payload();
            links.tell(link, |batch| ask.append_to(batch, sequence, payload));
        }
        places.len()
    }
}

/// Sees to it that a reactor is told of other connections, or that there are none.
fn connect_anew(
    shared: &Arc<Shared>,
    replica: &Replica,
    (index, epoch): (usize, u32),
    count: usize,
    respite: Duration,
) -> io::Result<()> {
    let Replica { slot, serial, .. } = *replica;
    let weak = Arc::downgrade(shared);
    let tell = move |access| {
        if let Some(shared) = weak.upgrade() {
            shared.send(index, Message::Back { slot, serial, epoch, access });
        }
    };
    match &replica.anew {
        None => Ok(()),
        #[cfg(feature = "sabotage")]
        Some(Anew::Simulated(anew)) => {
            let answer = move |links: Result<_, _>| tell(links.map(Access::Simulated));
            let answer = Box::new(answer);
            (anew.0)(Redial { replica: replica.id, lane: index, epoch, count, respite, answer });
            Ok(())
        }
        Some(Anew::Remote { address, client }) => {
            let lane = shared.lane(*client, index, epoch);
            let (address, window) = (address.clone(), shared.window());
            let dial = move || {
                thread::sleep(respite);
                tell(dial::again(&address, count, window, lane).map(Access::Links));
            };
            thread::Builder::new().name(format!("path-{index}-dial")).spawn(dial).map(drop)
        }
    }
}

impl Shared {
    /// How long a replica may be away.
    pub fn window(&self) -> Duration {
        self.options.short_timeout / 2
    }

    /// The lane of a reactor's connections.
    pub fn lane(&self, client: u64, index: usize, epoch: u32) -> Lane {
        let places = self.options.queue_depth.clamp(1, super::QUEUE_DEPTH_MAX) as u16;
        Lane { client, epoch, number: index as u16, places }
    }
}
