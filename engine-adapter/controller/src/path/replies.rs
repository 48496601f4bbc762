//! One reactor's share of a path: what becomes of replies, and of replicas that give none.

use super::backend::{Backend, Way};
use super::latch::Latch;
use super::link::{Ask, Reply, damage};
use super::pending::Stage;
use super::replica::Replica;
use super::sabotage::{Bug, is};
use super::shard::Shard;
use crate::rules::heal::ROUNDS_MAX;
use crate::rules::io::NO_BACKEND;
use crate::rules::timeout::PING_INTERVAL;
use crate::rules::{Answer, FanOut, Outcome as Decided, Slot, Slots};
use dbs_frontend::{Action, Event, FailureKind, Outcome, Ready};
use dbs_reactor::{Buf, Io};
use longhorn_data::stats::add;
use longhorn_wire::frame::{NO_SPACE_TEXT, Type, is_handed_over};

impl Shard {
    /// Begins to receive on a connection.
    pub(super) fn begin_link(&mut self, io: &mut Io, number: u32, received: &[u8]) {
        self.input(io, number, Event::Begun(received));
    }

    /// Lets a connection to a replica take input.
    pub(super) fn input(&mut self, io: &mut Io, number: u32, event: Event<'_>) {
        let (mut ready, failure) = self.links.input(io, number, event);
        for Ready { request: reply, payload } in ready.drain(..) {
            self.links.forget(number, &reply);
            self.reply(io, number, &reply, payload);
        }
        self.links.receive(io, number, ready);
        if failure.is_some() || self.links.has_ended(number) {
            let why = failure.map(|error| error.to_string());
            self.link_ended(io, number, why.as_deref());
        }
    }

    /// A replica that is not lost.
    pub(super) fn connected(&mut self, slot: Slot, serial: u64) -> Option<&mut Backend> {
        let backend = self.backends.get_mut(slot.index())?.as_mut()?;
        (backend.replica.serial == serial && !backend.lost).then_some(backend)
    }

    fn reply(&mut self, io: &mut Io, number: u32, reply: &Reply, payload: Option<Buf>) {
        let Some(link) = self.links.get(number) else { return };
        let from = (link.slot, link.serial);
        self.replied(io, from, reply, payload);
    }

    /// A replica has answered, whichever way.
    pub(super) fn replied(
        &mut self,
        io: &mut Io,
        (slot, serial): (Slot, u64),
        reply: &Reply,
        payload: Option<Buf>,
    ) {
        let now = self.now;
        if self.connected(slot, serial).is_some() && reply.kind == Some(Type::Error) {
            self.hear_of_newer(slot, payload.as_deref().unwrap_or_default());
        }
        let Some(backend) = self.connected(slot, serial) else { return };
        backend.heard = true;
        if backend.pinged == Some(reply.sequence) {
            return self.ping_replied(io, (slot, serial), reply, payload);
        }
        // What nobody has asked for is ignored.
        let Some(place) = self.pending.find(reply.sequence) else { return };
        let Some(pending) = self.pending.get_mut(place).filter(|pending| pending.waits_for(slot))
        else {
            return;
        };
        let (stage, ask) = (pending.stage, pending.ask());
        self.note(place, slot, reply.kind == Some(Type::Response));
        if ask.is_urgent()
            && let Some(backend) = self.connected(slot, serial)
        {
            backend.silence.answered(now);
            if (ask.kind, reply.kind) == (Type::Read, Some(Type::Response)) {
                backend.trust.read();
            }
        }
        if let Err(what) = reply.check(&ask)
            && !is(Bug::TrustReplies)
        {
            return self.nonsense(io, slot, serial, &what);
        }
        if reply.kind == Some(Type::Damaged) {
            return match damage(&ask, payload.as_deref()) {
                Ok(damaged) => self.met_damage(io, place, (slot, serial), &damaged),
                Err(what) => self.nonsense(io, slot, serial, &what),
            };
        }
        match (stage, reply.kind) {
            (Stage::Free | Stage::Locking, _) => {}
            (Stage::Read | Stage::Edge(_) | Stage::Source, Some(Type::Response)) => {
                self.read_ended(io, place, payload.unwrap_or_else(Buf::empty));
            }
            (Stage::Read | Stage::Edge(_) | Stage::Source, Some(Type::Eof)) => {
                self.read_failed(io, place, longhorn_wire::frame::UNEXPECTED_EOF_TEXT);
            }
            (Stage::Read | Stage::Edge(_) | Stage::Source, _) => {
                self.read_failed(io, place, &text(payload));
            }
            (Stage::Heal, Some(Type::Response)) => self.healed(io, place, reply.size),
            (Stage::Heal, _) => self.not_healed(io, place, &text(payload)),
            (Stage::Change | Stage::Durable, Some(Type::Response)) => {
                if ask.kind == Type::Unmap
                    && let Some(pending) = self.pending.get_mut(place)
                {
                    pending.freed = pending.freed.max(reply.size.min(ask.length));
                }
                self.answered(io, place, slot, Answer::Done);
            }
            (Stage::Change | Stage::Durable, Some(Type::NoSpace)) => {
                self.failed(io, place, slot, NO_SPACE_TEXT.to_owned());
            }
            (Stage::Change | Stage::Durable, _) => self.failed(io, place, slot, text(payload)),
        }
    }

    fn ping_replied(
        &mut self,
        io: &mut Io,
        (slot, serial): (Slot, u64),
        reply: &Reply,
        payload: Option<Buf>,
    ) {
        let now = self.now;
        let Some(backend) = self.connected(slot, serial) else { return };
        backend.pinged = None;
        backend.ping_due = now + PING_INTERVAL;
        let (target, asked) = (backend.target, backend.ping_asked);
        self.note_ping(target, asked, reply);
        let ping = Ask { kind: Type::Ping, offset: 0, length: 0 };
        match (reply.kind, reply.check(&ping)) {
            (Some(Type::Error), Ok(())) => self.shared.fault(slot, &text(payload)),
            (_, Ok(())) => {}
            (_, Err(what)) => self.nonsense(io, slot, serial, &what),
        }
    }

    /// An error may say that a newer controller has the volume. Then this one ends before it acknowledges
    /// anything else.
    fn hear_of_newer(&self, slot: Slot, text: &[u8]) {
        let text = String::from_utf8_lossy(text);
        if is_handed_over(&text) && !is(Bug::OutliveHandOver) {
            self.shared.give_way(slot, &text);
        }
    }

    /// A replica that says what cannot be is not believed any more, nor is the rest of what has come
    /// from it.
    fn nonsense(&mut self, io: &mut Io, slot: Slot, serial: u64, what: &str) {
        let why = format!("the replica does not keep to the protocol: {what}");
        self.shared.fault(slot, &why);
        self.lose(io, slot, serial, &why);
    }

    /// A replica does not have a change.
    fn failed(&mut self, io: &mut Io, place: u32, slot: Slot, text: String) {
        let full = text.contains(NO_SPACE_TEXT);
        if let Some(pending) = self.pending.get_mut(place) {
            pending.errors.push((slot, text));
        }
        // No replica says how much of it was written.
        let answer = if full { Answer::NoSpace { written: 0 } } else { Answer::Failed };
        self.answered(io, place, slot, answer);
    }

    pub(super) fn answered(&mut self, io: &mut Io, place: u32, slot: Slot, answer: Answer) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        let Some(fan_out) = &mut pending.fan_out else { return };
        if fan_out.answer(slot, answer) {
            self.settle_change(io, place);
        }
    }

    /// Everybody has answered: who missed it becomes `ERR`, then the request goes on or ends.
    pub(super) fn settle_change(&mut self, io: &mut Io, place: u32) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        let Some(fan_out) = pending.fan_out.take() else { return };
        if fan_out.met_damage() && self.widen_for_damage(io, place, &fan_out) {
            return;
        }
        self.conclude(io, place, &fan_out);
    }

    /// What follows from all answers to a change.
    pub(super) fn conclude(&mut self, io: &mut Io, place: u32, fan_out: &FanOut) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        let outcome = if fan_out.is_clean() {
            Decided::Done
        } else if is(Bug::AcknowledgeFirst) {
            fan_out.decide(self.shared.modes.now()).outcome
        } else {
            self.shared.decide(fan_out, &pending.errors).outcome
        };
        match outcome {
            Decided::Done => {
                let action = pending.request.action;
                if pending.stage == Stage::Change && action != Action::Flush {
                    if is(Bug::SettleAtEnd) {
                        pending.losses = self.shared.losses();
                    }
                    if self.shared.must_flush(!fan_out.is_clean())
                        || action == (Action::Write { durable: true })
                    {
                        pending.errors.clear();
                        return self.begin_flush(io, place, Stage::Durable);
                    }
                }
                if pending.stage == Stage::Durable {
                    self.shared.settle(pending.losses);
                }
                let bytes = match action {
                    Action::Write { .. } => pending.request.length,
                    Action::Discard => pending.freed,
                    Action::Read | Action::Flush => 0,
                };
                self.end(place, Outcome::Done(bytes));
            }
            Decided::NoSpace => self.fail(place, FailureKind::NoSpace, NO_SPACE_TEXT),
            Decided::Failed => {
                let stage = pending.stage;
                // No pause waits for a flush: another replica may have become complete, and what came to it by its
                // rebuild is not durable for the flush that it was asked for before.
                if pending.ask().kind == Type::Flush
                    && !self.shared.modes.now().rw.without(fan_out.complete()).is_empty()
                    && !is(Bug::FlushOnce)
                {
                    return self.begin_flush(io, place, stage);
                }
                let text = self.texts(place);
                self.fail(place, FailureKind::Io, text);
            }
        }
    }

    /// What replicas said of a request that failed.
    pub(super) fn texts(&mut self, place: u32) -> String {
        let Some(pending) = self.pending.get_mut(place) else { return String::new() };
        let errors = std::mem::take(&mut pending.errors);
        let texts =
            errors.iter().map(|(slot, text)| format!("{}: {text}", self.shared.name(*slot)));
        let texts: Vec<String> = texts.collect();
        if texts.is_empty() { NO_BACKEND.to_owned() } else { texts.join("; ") }
    }

    /// What was read has come.
    pub(super) fn read_ended(&mut self, io: &mut Io, place: u32, data: Buf) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        let (stage, read) = (pending.stage, pending.read.take());
        let failed = read.map_or(Slots::EMPTY, |read| read.faulted());
        if !failed.is_empty() {
            self.blame(place, failed);
        }
        match (stage, self.pending.get_mut(place)) {
            (Stage::Edge(edge), Some(pending)) => {
                if let Some(place) = pending.edges.get_mut(edge) {
                    *place = Some(data);
                }
                self.next_edge(io, place, edge + 1);
            }
            (Stage::Source, Some(_)) => self.send_healing(io, place, data),
            (_, Some(pending)) if !pending.patients.is_empty() => {
                if !is(Bug::HealFirst) {
                    self.tell(place, Outcome::Data(data));
                }
                self.next_patient(io, place);
            }
            _ => self.end(place, Outcome::Data(data)),
        }
    }

    /// A replica could not read: the next one is asked.
    pub(super) fn read_failed(&mut self, io: &mut Io, place: u32, text: &str) {
        let (modes, near) = (self.shared.modes.now(), self.near());
        let Some(pending) = self.pending.get_mut(place) else { return };
        let Some(mut read) = pending.read else { return };
        pending.errors.push((read.current(), text.to_owned()));
        let again = is(Bug::RetrySame) && pending.errors.len() == 1;
        let next = if again { Some(read.current()) } else { read.retry(near) };
        let next = next.or_else(|| read.pass(modes));
        pending.read = Some(read);
        self.read_goes_on(io, place, next, read.faulted());
    }

    /// The next replica is asked for what one could not read, if there is one.
    pub(super) fn read_goes_on(
        &mut self,
        io: &mut Io,
        place: u32,
        next: Option<Slot>,
        failed: Slots,
    ) {
        if let Some(slot) = next {
            add(&self.counters().retries, 1);
            return self.ask_read(io, place, slot, self.now);
        }
        self.blame(place, failed);
        let Some(pending) = self.pending.get_mut(place) else { return };
        match (pending.stage, pending.fan_out.take()) {
            (Stage::Source, _) => self.patient_done(io, place),
            // The change itself has gone out before: some may have it.
            (Stage::Edge(_), Some(fan_out)) => {
                pending.stage = Stage::Change;
                self.conclude(io, place, &fan_out);
            }
            _ if !pending.patients.is_empty() && pending.rounds < ROUNDS_MAX => {
                self.next_patient(io, place);
            }
            _ => {
                let text = self.texts(place);
                self.fail(place, FailureKind::Io, text);
            }
        }
    }

    /// Replicas that could not read become `ERR`.
    fn blame(&mut self, place: u32, failed: Slots) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        for slot in failed.iter() {
            let said = pending.errors.iter().find(|(from, _)| *from == slot);
            self.shared.fault(slot, said.map_or("a read failed", |(_, text)| text));
        }
    }

    /// A replica is `ERR`: nothing more is heard of it, what waits for it fails.
    pub(super) fn lose(&mut self, io: &mut Io, slot: Slot, serial: u64, why: &str) {
        let Some(backend) = self.connected(slot, serial) else { return };
        backend.lost = true;
        backend.away = None;
        if let Way::Local(number) = backend.way {
            self.locals.let_go(io, number);
        }
        self.away = self.away.without(Slots::of(slot));
        self.links.end(io, true, |link| link.serial == serial);
        if is(Bug::KeepWaiting) {
            return;
        }
        for place in self.pending.waiting_for(slot) {
            let Some(pending) =
                self.pending.get_mut(place).filter(|pending| pending.waits_for(slot))
            else {
                continue;
            };
            let stage = pending.stage;
            self.note(place, slot, false);
            match stage {
                Stage::Free | Stage::Locking => {}
                Stage::Read | Stage::Edge(_) | Stage::Source => self.read_failed(io, place, why),
                Stage::Heal => self.patient_done(io, place),
                Stage::Change | Stage::Durable => self.failed_for_good(io, place, slot, why),
            }
        }
    }

    fn failed_for_good(&mut self, io: &mut Io, place: u32, slot: Slot, why: &str) {
        if let Some(pending) = self.pending.get_mut(place) {
            pending.errors.push((slot, why.to_owned()));
        }
        self.answered(io, place, slot, Answer::Failed);
    }

    /// A replica is forgotten.
    pub(super) fn remove(&mut self, io: &mut Io, replica: &Replica, latch: &Latch) {
        self.lose(io, replica.slot, replica.serial, "the replica is removed");
        if let Some(backend) = self.backends.get_mut(replica.slot.index())
            && backend.as_ref().is_some_and(|backend| backend.replica.serial == replica.serial)
        {
            *backend = None;
        }
        latch.count_down();
    }

    /// Closes all connections, and lets go of replicas in this process.
    pub(super) fn close(&mut self, io: &mut Io) {
        self.links.end(io, true, |_| true);
        for backend in self.backends.iter_mut().flatten() {
            // Neither is there another connection, nor one that is missed.
            let lost = std::mem::replace(&mut backend.lost, true);
            if let Way::Local(number) = backend.way
                && !lost
            {
                self.locals.let_go(io, number);
            }
        }
    }
}

/// The text of an error.
fn text(payload: Option<Buf>) -> String {
    let bytes = payload.as_deref().unwrap_or_default();
    if bytes.is_empty() {
        return "an error without a text".to_owned();
    }
    String::from_utf8_lossy(bytes).into_owned()
}
