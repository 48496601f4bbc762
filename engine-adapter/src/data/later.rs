//! What a reactor has workers do besides requests: commits, and waking a replica; and the requests
//! that wait for it.

use super::reactor::{Held, Message, Reactor, Ticket};
use super::request::Request;
use super::slot::Seen;
use dbs_core::{Error, ErrorKind};
use dbs_reactor::Io;
use dbs_server::frontend::Ready;
use dbs_server::log;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Reactor {
    /// Answers a request once everything acknowledged so far is durable; all that ask while a
    /// commit runs share the next one.
    pub(super) fn commit(&mut self, ticket: Ticket) {
        let number = ticket.opened;
        let Some(opened) = self.slots.opened_mut(number) else { return };
        if opened.commits.add(Held { ticket }) {
            self.start_commit(number);
        }
    }

    fn start_commit(&mut self, number: u32) {
        let Some(opened) = self.slots.opened_mut(number) else { return };
        if opened.commits.begin().is_none() {
            return;
        }
        let (active, remote) = (Arc::clone(&opened.active), self.remote.clone());
        self.shared.pool.submit(move || {
            let result = catch_unwind(AssertUnwindSafe(|| active.commit()));
            drop(active);
            let result = result.unwrap_or_else(|_| Err(crashed()));
            remote.send(Message::Committed { opened: number, result });
        });
    }

    pub(super) fn committed(&mut self, io: &mut Io, number: u32, result: &Result<(), Error>) {
        let Some(opened) = self.slots.opened_mut(number) else { return };
        let mut held = opened.commits.take();
        // It stays open while its requests are answered one by one.
        opened.in_flight += 1;
        for Held { ticket } in held.drain(..) {
            match result {
                Ok(()) => {
                    let size = ticket.request.size;
                    self.answer_done(io, &ticket, size);
                }
                Err(error) => self.fail(io, &ticket, error),
            }
        }
        if self.slots.opened_mut(number).is_some_and(|opened| opened.commits.ended(held)) {
            self.start_commit(number);
        }
        self.slots.ended(io, number);
    }

    /// Commits in the background, if the caller has found that due.
    pub(super) fn settle_later(&mut self, number: u32) {
        let Some(opened) = self.slots.opened_mut(number) else { return };
        opened.in_flight += 1;
        let (active, remote) = (Arc::clone(&opened.active), self.remote.clone());
        self.shared.pool.submit(move || {
            let result = catch_unwind(AssertUnwindSafe(|| active.commit_in_background()));
            drop(active);
            let result = result.unwrap_or_else(|_| Err(crashed()));
            remote.send(Message::Settled { opened: number, result });
        });
    }

    pub(super) fn settled(&mut self, io: &mut Io, number: u32, result: &Result<(), Error>) {
        let slot = self.slots.slot_number(number);
        match result {
            // A commit that became due while this one ran was left to the next interval.
            Ok(()) => {
                let opened = self.slots.opened(number);
                if opened.is_some_and(|opened| opened.active.is_uncommitted()) {
                    self.shared.written.store(true, Ordering::SeqCst);
                }
            }
            Err(error) => log::error("data", &[("commit", error)]),
        }
        self.slots.ended(io, number);
        if let Some(slot) = slot {
            self.slots.leave(io, slot);
        }
    }

    pub(super) fn commit_due(&mut self) {
        for number in self.slots.all_opened() {
            if self.slots.opened(number).is_some_and(|opened| opened.active.is_due()) {
                self.settle_later(number);
            }
        }
    }

    /// Lets a request wait until its replica is awake.
    pub(super) fn park(&mut self, number: u32, peer: u32, ready: Ready<Request>) {
        let Some(slot) = self.slots.get_mut(number) else { return };
        slot.parked.push((peer, ready));
        if std::mem::replace(&mut slot.waking, true) {
            return;
        }
        let (service, remote) = (Arc::clone(&slot.service), self.remote.clone());
        self.shared.pool.submit(move || {
            let result = catch_unwind(AssertUnwindSafe(|| service.gate.wake()));
            let crashed = |_| Err("internal error while the replica was woken".to_owned());
            let result = result.unwrap_or_else(crashed);
            remote.send(Message::Woken { service: service.id, result });
        });
    }

    pub(super) fn woken(&mut self, io: &mut Io, service: u64, result: Result<(), String>) {
        let Some(number) = self.slots.find(service) else { return };
        let Some(slot) = self.slots.get_mut(number) else { return };
        let parked = std::mem::take(&mut slot.parked);
        slot.waking = false;
        let result = match result {
            Ok(()) if matches!(self.slots.look(io, number), Some(Seen::Dormant)) => {
                Err("the replica is still not open".to_owned())
            }
            result => result,
        };
        for (peer, ready) in parked {
            match &result {
                Ok(()) => self.start(io, peer, ready),
                Err(text) => self.refuse(peer, number, &ready.request, text),
            }
        }
        self.slots.leave(io, number);
    }
}

fn crashed() -> Error {
    Error::new(ErrorKind::Io, "internal error of the replica while committing")
}
