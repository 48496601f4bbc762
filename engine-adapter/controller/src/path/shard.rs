//! One reactor's share of a path: from a request to what replicas are asked.

mod journal;
mod local;
mod turns;
mod widened;

use super::backend::{Access, Backend, Way};
use super::journal::Journal;
use super::latch::Latch;
use super::link::{Ask, Link};
use super::local::{Asker, Locals};
use super::message::Message;
use super::pending::{PendingTable, Stage};
use super::replica::Replica;
use super::sabotage::{Bug, is};
use super::shared::Shared;
use crate::rules::io::{self as rule, NO_BACKEND, Unmap};
use crate::rules::{FanOut, REPLICAS_MAX, Read, Slot, Slots, Widened};
use dbs_frontend::{Action, Carry, Failure, FailureKind, Limits, Outcome, Peers};
use dbs_reactor::{Buf, Io, Remote, SharedBuf};
use longhorn_data::stats::add;
use longhorn_wire::frame::{PAYLOAD_MAX_BYTES, Type};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// In the tags of operations on connections to replicas.
pub(super) const LINK_TAG: u64 = 1 << 32;
/// A connection to a replica ends by the rules' timeout, not because it is slow to take requests.
const NO_LIMIT: Duration = Duration::from_secs(1 << 30);

/// A request that cannot begin yet.
pub(super) struct Waiting {
    front: u8,
    ticket: u64,
    request: Carry,
    payload: Option<Buf>,
    since: Duration,
    /// It has waited too long for its blocks.
    starving: bool,
}

/// A request that has ended.
pub(super) struct Ended {
    pub front: u8,
    pub ticket: u64,
    pub outcome: Outcome,
}

/// Why a request waits.
enum Wait {
    /// For a place, or the end of a pause.
    Room(Waiting),
    /// For blocks that others are changing.
    Blocks(Waiting),
}

/// One reactor's share.
pub(super) struct Shard {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) links: Peers<Link>,
    /// Requests of replicas in this process.
    pub(super) locals: Locals,
    pub(super) backends: [Option<Backend>; REPLICAS_MAX],
    pub(super) pending: PendingTable,
    pub(super) journal: Journal,
    waiting: VecDeque<Waiting>,
    /// For the handler to answer.
    pub(super) ended: Vec<Ended>,
    /// Who pauses all I/O.
    pauses: usize,
    /// Who waits for the end of what is in flight, and whether for what is being healed as well.
    draining: Vec<(bool, Arc<Latch>)>,
    /// Who waits for a flush that has no place among the requests yet.
    flushes: VecDeque<Arc<Latch>>,
    /// Something was given back that a waiting request may want.
    pub(super) retry: bool,
    /// A request waits for blocks.
    pub(super) blocked: bool,
    /// Places of those that wait for the blocks that they are to heal.
    pub(super) locking: Vec<u32>,
    /// Replicas whose connections here broke, and may be made anew.
    pub(super) away: Slots,
    /// The replica read from last.
    pub(super) turn: usize,
    /// Turns of the reactor so far.
    pub(super) turns: u64,
    /// Time of this turn.
    pub(super) now: Duration,
    /// That is of this turn.
    pub(super) looked: bool,
    /// When to look at the clock.
    pub(super) due: Duration,
}

impl Shard {
    pub fn new(shared: Arc<Shared>, index: usize, remote: Remote<Message>) -> Self {
        let limits = Limits { requests: usize::MAX, bytes: u64::MAX };
        let depth = shared.options.queue_depth;
        Self {
            links: Peers::new(limits, NO_LIMIT).tagged(LINK_TAG),
            locals: Locals::new(Arc::new(move |told| remote.send(Message::Local(told)))),
            backends: [const { None }; REPLICAS_MAX],
            pending: PendingTable::new(depth),
            journal: Journal::new(shared.options.reactors),
            waiting: VecDeque::with_capacity(depth),
            ended: Vec::with_capacity(depth),
            pauses: 0,
            draining: Vec::new(),
            flushes: VecDeque::new(),
            retry: false,
            blocked: false,
            locking: Vec::new(),
            away: Slots::EMPTY,
            turn: 0,
            turns: 0,
            now: Duration::ZERO,
            looked: false,
            due: Duration::ZERO,
            shared,
            index,
        }
    }

    pub fn size(&self) -> u64 {
        self.shared.size.load(Ordering::Relaxed)
    }

    /// Takes a replica in.
    pub fn add(&mut self, io: &mut Io, replica: Arc<Replica>, access: Access) {
        let slot = replica.slot;
        let mut begun = Vec::new();
        let way = match access {
            Access::Null => Way::Null,
            Access::Local(local) => Way::Local(self.locals.take(replica.serial, &local)),
            links => {
                begun = self.take_links(io, links, (&replica, 0));
                Way::over(&begun)
            }
        };
        if let Some(backend) = self.backends.get_mut(slot.index()) {
            let target = self.journal.target(&replica.name);
            *backend = Some(Backend::new(replica, way, self.now, target));
        }
        // With nothing received as well: it arms the first reception.
        for (number, received) in begun {
            self.begin_link(io, number, &received);
        }
    }

    /// Takes a request: begins it, or keeps it until it can begin.
    pub fn carry(
        &mut self,
        io: &mut Io,
        front: u8,
        request: Carry,
        payload: Option<Buf>,
        ticket: u64,
    ) {
        add(&self.counters().in_flight, 1);
        let since = self.now;
        let waiting = Waiting { front, ticket, request, payload, since, starving: false };
        match self.begin(io, waiting) {
            None => {}
            Some(Wait::Room(waiting)) => self.waiting.push_back(waiting),
            Some(Wait::Blocks(waiting)) => {
                self.blocked = true;
                self.waiting.push_back(waiting);
            }
        }
    }

    pub(super) fn counters(&self) -> &super::stats::Counters {
        // There is one for each reactor.
        &self.shared.counters[self.index]
    }

    /// Begins a request; gives it back if it has to wait.
    fn begin(&mut self, io: &mut Io, waiting: Waiting) -> Option<Wait> {
        let Carry { action, offset, length } = waiting.request;
        if let Some(outcome) = self.refuse(&waiting) {
            if waiting.starving {
                self.starved();
            }
            self.answer(&waiting, outcome);
            return None;
        }
        let changes = matches!(action, Action::Write { .. } | Action::Discard);
        if self.pauses > 0 {
            return Some(Wait::Room(waiting));
        }
        if changes && self.shared.starving.load(Ordering::SeqCst) != 0 && !waiting.starving {
            return Some(Wait::Blocks(waiting));
        }
        let Some(place) = self.pending.take() else { return Some(Wait::Room(waiting)) };
        let range = (offset, u64::from(length));
        if changes && !self.shared.locks.try_lock(range.0, range.1) {
            self.pending.give_back(place);
            return Some(Wait::Blocks(waiting));
        }
        if waiting.starving {
            self.starved();
        }
        let pending = self.pending.get_mut(place)?;
        pending.front = waiting.front;
        pending.ticket = waiting.ticket;
        pending.request = waiting.request;
        pending.range = (offset, length);
        pending.payload = waiting.payload;
        pending.locked = changes.then_some(range);
        pending.begun = waiting.since;
        match action {
            Action::Read => self.begin_read(io, place, Stage::Read, (offset, length)),
            Action::Write { .. } => self.begin_write(io, place),
            Action::Discard => self.begin_discard(io, place),
            Action::Flush => self.begin_flush(io, place, Stage::Change),
        }
        None
    }

    /// The outcome of a request that no replica has to be asked for.
    fn refuse(&self, waiting: &Waiting) -> Option<Outcome> {
        let Carry { action, offset, length } = waiting.request;
        let kind = match action {
            Action::Flush => return None,
            Action::Read => rule::Kind::Read,
            Action::Write { .. } => rule::Kind::Write,
            Action::Discard => rule::Kind::Unmap,
        };
        let invalid = |text| Some(Outcome::Failed(Failure::new(FailureKind::Invalid, text)));
        let signed = i64::try_from(offset).unwrap_or(i64::MAX);
        if let Err(text) = rule::check_range(kind, signed, u64::from(length), self.size()) {
            return invalid(text);
        }
        let bytes = u64::from(length);
        let carried = match kind {
            rule::Kind::Unmap => 0,
            rule::Kind::Read => bytes,
            // What it becomes while a replica is rebuilt must find its way, too.
            rule::Kind::Write => {
                Widened::new(offset, bytes, self.size()).map_or(bytes, |widened| widened.length)
            }
        };
        if carried > u64::from(PAYLOAD_MAX_BYTES) {
            return invalid(format!(
                "a request of {length} bytes; at most {PAYLOAD_MAX_BYTES}, of whole blocks, are \
                 carried at once"
            ));
        }
        match (length, kind) {
            (0, rule::Kind::Read) => Some(Outcome::Data(Buf::empty())),
            (0, _) => Some(Outcome::Done(0)),
            _ => None,
        }
    }

    /// Answers a request that has no place.
    fn answer(&mut self, waiting: &Waiting, outcome: Outcome) {
        let Waiting { front, ticket, request, since, .. } = waiting;
        self.count(request.action, &outcome, *since);
        self.ended.push(Ended { front: *front, ticket: *ticket, outcome });
    }

    fn count(&self, action: Action, outcome: &Outcome, since: Duration) {
        let bytes = match outcome {
            Outcome::Done(bytes) => Some(*bytes),
            Outcome::Data(data) => Some(data.len() as u32),
            Outcome::Failed(_) => None,
        };
        let counters = self.counters();
        counters.answered(action, bytes, self.now.saturating_sub(since));
        add(&counters.in_flight, u64::MAX);
    }

    /// Ends a request and frees its place.
    pub(super) fn end(&mut self, place: u32, outcome: Outcome) {
        self.give_blocks_back(place);
        self.tell(place, outcome);
        self.pending.give_back(place);
        self.retry = true;
    }

    /// Gives back what a request has locked.
    pub(super) fn give_blocks_back(&mut self, place: u32) {
        let locked = self.pending.get_mut(place).and_then(|pending| pending.locked.take());
        if let Some((offset, length)) = locked {
            self.shared.locks.unlock(offset, length);
            self.shared.unblock(self.index);
            self.retry = true;
        }
    }

    /// Answers a request that may go on, once.
    pub(super) fn tell(&mut self, place: u32, outcome: Outcome) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        if std::mem::replace(&mut pending.told, true) {
            return;
        }
        if let Some(latch) = pending.latch.take() {
            return latch.count_down();
        }
        let (front, ticket, action) = (pending.front, pending.ticket, pending.request.action);
        let begun = pending.begun;
        self.count(action, &outcome, begun);
        self.ended.push(Ended { front, ticket, outcome });
    }

    pub(super) fn fail(&mut self, place: u32, kind: FailureKind, text: impl Into<String>) {
        self.end(place, Outcome::Failed(Failure::new(kind, text)));
    }

    /// What has waited for so long has begun: others may.
    fn starved(&mut self) {
        self.shared.starving.store(0, Ordering::SeqCst);
        self.retry = true;
        self.shared.unblock(self.index);
    }

    /// Reads a range, for the request or for a part of it.
    pub(super) fn begin_read(&mut self, io: &mut Io, place: u32, stage: Stage, range: (u64, u32)) {
        let mut modes = self.near();
        if is(Bug::ReadFromWo) {
            modes.rw = modes.written();
        }
        let preferred = self.shared.preferred(modes.rw);
        let Some(read) = Read::begin(modes, preferred, &mut self.turn) else {
            return self.fail(place, FailureKind::Io, NO_BACKEND);
        };
        if let Some(pending) = self.pending.get_mut(place) {
            (pending.stage, pending.range, pending.read) = (stage, range, Some(read));
        }
        self.ask_read(io, place, read.current(), self.now);
    }

    /// Asks a replica for what a request reads, which may have been asked for before.
    pub(super) fn ask_read(&mut self, io: &mut Io, place: u32, slot: Slot, asked: Duration) {
        let sequence = self.pending.sequence(place);
        let Some(pending) = self.pending.get_mut(place) else { return };
        pending.asked = asked;
        let (offset, length) = pending.range;
        match self.ask(io, slot, Ask { kind: Type::Read, offset, length }, sequence, None) {
            Asked::Sent => {}
            Asked::Null => {
                let mut data = io.buffers().take(length as usize);
                data.fill(0);
                self.read_ended(io, place, data);
            }
            Asked::Lost => self.read_failed(io, place, "the replica is gone"),
        }
    }

    fn begin_write(&mut self, io: &mut Io, place: u32) {
        let rebuilding = self.shared.modes.now().is_rebuilding();
        let size = self.size();
        let Some(pending) = self.pending.get_mut(place) else { return };
        let Carry { offset, length, .. } = pending.request;
        let widened = rebuilding.then(|| Widened::new(offset, u64::from(length), size)).flatten();
        match widened {
            None => self.send_write(io, place),
            Some(_) => {
                pending.widened = widened;
                add(&self.counters().widened, 1);
                self.next_edge(io, place, 0);
            }
        }
    }

    /// Sends a write to all replicas that are to have it.
    pub(super) fn send_write(&mut self, io: &mut Io, place: u32) {
        let losses = self.shared.losses();
        let Some(pending) = self.pending.get_mut(place) else { return };
        let again = pending.fan_out.take().map(FanOut::again);
        if again.is_none() {
            pending.losses = losses;
        }
        let Some(fan_out) = again.or_else(|| FanOut::write(self.shared.modes.now())) else {
            return self.fail(place, FailureKind::Io, NO_BACKEND);
        };
        let Some(pending) = self.pending.get_mut(place) else { return };
        if is(Bug::ReleaseEarly)
            && let Some((offset, length)) = pending.locked.take()
        {
            self.shared.locks.unlock(offset, length);
            self.retry = true;
        }
        let payload = pending.payload.take().map(Buf::share);
        let (offset, length) = pending.range;
        self.keep(place, fan_out.waiting(), payload.as_ref());
        self.fan_out(io, place, Stage::Change, fan_out, (Type::Write, offset, length), payload);
    }

    fn begin_discard(&mut self, io: &mut Io, place: u32) {
        let (losses, modes) = (self.shared.losses(), self.shared.modes.now());
        let Some(pending) = self.pending.get_mut(place) else { return };
        pending.losses = losses;
        let (offset, length) = pending.range;
        let expanding = self.shared.expanding.load(Ordering::SeqCst);
        match (rule::unmap(modes, expanding, offset, u64::from(length)), FanOut::write(modes)) {
            (_, None) => self.fail(place, FailureKind::Io, NO_BACKEND),
            (Unmap::Skip, _) => self.end(place, Outcome::Done(0)),
            (Unmap::Refuse(text), _) => self.fail(place, FailureKind::Io, text),
            (Unmap::Send, Some(fan_out)) => {
                let ask = (Type::Unmap, offset, length);
                self.fan_out(io, place, Stage::Change, fan_out, ask, None);
            }
        }
    }

    /// Flushes all replicas that know how to.
    pub(super) fn begin_flush(&mut self, io: &mut Io, place: u32, stage: Stage) {
        let modes = self.shared.modes.now();
        match FanOut::flush(modes, self.shared.flushing()) {
            None => self.fail(place, FailureKind::Io, NO_BACKEND),
            Some(fan_out) => self.fan_out(io, place, stage, fan_out, (Type::Flush, 0, 0), None),
        }
    }

    /// Asks all replicas that a change is for.
    fn fan_out(
        &mut self,
        io: &mut Io,
        place: u32,
        stage: Stage,
        mut fan_out: FanOut,
        (kind, offset, length): (Type, u64, u32),
        payload: Option<SharedBuf>,
    ) {
        use crate::rules::Answer;
        let sequence = match kind {
            Type::Flush => self.pending.sequence(place),
            _ => self.pending.sequence_of_change(place),
        };
        let asked = fan_out.waiting();
        let mut gone = None;
        for slot in asked.iter() {
            match self.ask(io, slot, Ask { kind, offset, length }, sequence, payload.clone()) {
                Asked::Sent => {}
                Asked::Null => drop(fan_out.answer(slot, Answer::Done)),
                Asked::Lost => {
                    fan_out.lost(slot);
                    gone = Some(slot);
                }
            }
        }
        let Some(pending) = self.pending.get_mut(place) else { return };
        (pending.stage, pending.asked) = (stage, self.now);
        pending.sent = pending.sent.or(asked);
        pending.fan_out = Some(fan_out);
        if let Some(slot) = gone {
            pending.errors.push((slot, "the replica is gone".to_owned()));
        }
        if fan_out.is_complete() {
            self.settle_change(io, place);
        }
    }

    /// Asks one replica.
    pub(super) fn ask(
        &mut self,
        io: &mut Io,
        slot: Slot,
        ask: Ask,
        sequence: u32,
        payload: Option<SharedBuf>,
    ) -> Asked {
        let Self { backends, links, locals, now, turns, .. } = self;
        let backend = backends.get_mut(slot.index()).and_then(Option::as_mut);
        let Some(backend) = backend.filter(|backend| !backend.lost) else { return Asked::Lost };
        match backend.way {
            Way::Null => return Asked::Null,
            Way::Local(number) => {
                let asker = Asker { slot, serial: backend.replica.serial };
                locals.ask(io, (number, asker), ask, sequence, payload);
            }
            // It goes there when that is back.
            Way::Links { .. } if backend.away.is_some() => {}
            Way::Links { .. } => {
                let Some(link) = backend.link(*turns) else { return Asked::Lost };
                links.tell(link, |batch| ask.append_to(batch, sequence, payload));
            }
        }
        if ask.is_urgent() {
            backend.silence.sent(*now);
        }
        Asked::Sent
    }
}

/// What became of asking a replica.
pub(super) enum Asked {
    /// It will reply.
    Sent,
    /// It has nothing to say, and does not fail.
    Null,
    /// It cannot be asked.
    Lost,
}
