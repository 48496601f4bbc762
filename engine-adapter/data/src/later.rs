//! What a runner has others do besides requests: commits, by workers, and waking a replica; and the
//! requests that wait for it.

use super::runner::{Runner, Told};
use super::slot::{Parked, Seen};
use super::ticket::Ticket;
use dbs_core::{Error, ErrorKind};
use dbs_reactor::Io;
use dbs_service::log;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

impl<T: Send + 'static> Runner<T> {
    /// Ends a request once everything acknowledged so far is durable; all that ask while a commit
    /// runs share the next one.
    pub(super) fn commit(&mut self, mut ticket: Ticket<T>) {
        let number = ticket.opened();
        let Some(opened) = self.slots.opened_mut(number) else { return };
        if ticket.request.changes() {
            // Before the commit begins that it waits for.
            opened.active.note_change();
            ticket.noted = true;
        }
        if opened.commits.add(ticket) {
            self.start_commit(number);
        }
    }

    fn start_commit(&mut self, number: u32) {
        let Some(opened) = self.slots.opened_mut(number) else { return };
        if opened.commits.begin().is_none() {
            return;
        }
        let (active, tell) = (Arc::clone(&opened.active), Arc::clone(&self.tell));
        let Some(slot) = self.slots.slot_of(number) else { return };
        slot.pool.submit_first(move || {
            let result = catch_unwind(AssertUnwindSafe(|| active.commit()));
            drop(active);
            let result = result.unwrap_or_else(|_| Err(crashed()));
            tell(Told::Committed(number, result));
        });
    }

    pub(super) fn committed(&mut self, io: &mut Io, number: u32, result: &Result<(), Error>) {
        let Some(opened) = self.slots.opened_mut(number) else { return };
        let mut held = opened.commits.take();
        // It stays open while its requests are ended one by one.
        opened.in_flight += 1;
        for ticket in held.drain(..) {
            match result {
                Ok(()) => {
                    let size = ticket.request.size;
                    self.end_done(io, ticket, size);
                }
                Err(error) => self.fail(io, ticket, error),
            }
        }
        if self.slots.opened_mut(number).is_some_and(|opened| opened.commits.ended(held)) {
            self.start_commit(number);
        }
        self.release(io, number);
    }

    /// Commits in the background, if the caller has found that due.
    pub(super) fn settle_later(&mut self, number: u32) {
        let Some(opened) = self.slots.opened_mut(number) else { return };
        opened.in_flight += 1;
        let (active, tell) = (Arc::clone(&opened.active), Arc::clone(&self.tell));
        let Some(slot) = self.slots.slot_of(number) else { return };
        slot.pool.submit_first(move || {
            let result = catch_unwind(AssertUnwindSafe(|| active.commit_in_background()));
            drop(active);
            let result = result.unwrap_or_else(|_| Err(crashed()));
            tell(Told::Settled(number, result));
        });
    }

    pub(super) fn settled(&mut self, io: &mut Io, number: u32, result: &Result<(), Error>) {
        match result {
            // A commit that became due while this one ran was left to the next interval.
            Ok(()) => {
                let opened = self.slots.opened(number);
                self.written |= opened.is_some_and(|opened| opened.active.is_uncommitted());
            }
            Err(error) => log::error("data", &[("commit", error)]),
        }
        self.release(io, number);
    }

    /// Commits what has been written, where that is due.
    pub fn commit_due(&mut self) {
        for number in self.slots.all_opened() {
            if self.slots.opened(number).is_some_and(|opened| opened.active.is_due()) {
                self.settle_later(number);
            }
        }
    }

    /// Lets a request wait until its replica is awake.
    pub(super) fn park(&mut self, number: u32, parked: Parked<T>) {
        let Some(slot) = self.slots.get_mut(number) else { return };
        slot.parked.push(parked);
        if std::mem::replace(&mut slot.waking, true) {
            return;
        }
        let (id, gate, tell) = (slot.id, Arc::clone(&slot.gate), Arc::clone(&self.tell));
        // On a thread of its own. It waits for requests of the older replica, which may be one of this
        // process: workers that wait would be those that are to carry these out.
        let woken = thread::Builder::new().name("data-wake".to_owned()).spawn(move || {
            let result = catch_unwind(AssertUnwindSafe(|| gate.wake()));
            let crashed = |_| Err("internal error while the replica was woken".to_owned());
            let result = result.unwrap_or_else(crashed);
            tell(Told::Woken(id, result));
        });
        if let Err(error) = woken {
            let text = format!("no thread to wake the replica: {error}");
            (self.tell)(Told::Woken(id, Err(text)));
        }
    }

    pub(super) fn woken(&mut self, io: &mut Io, id: u64, result: Result<(), String>) {
        let Some(number) = self.slots.find(id) else { return };
        let Some(slot) = self.slots.get_mut(number) else { return };
        let parked = std::mem::take(&mut slot.parked);
        slot.waking = false;
        let result = match result {
            Ok(()) if matches!(self.slots.look(io, number), Some(Seen::Dormant)) => {
                Err("the replica is still not open".to_owned())
            }
            result => result,
        };
        let now = self.open_session(io, number);
        for Parked { whose, request, payload, session } in parked {
            match &result {
                Ok(()) if now.is_some_and(|now| session < now) => {
                    self.refuse(number, whose, request, "the replica was closed since");
                }
                Ok(()) => self.start(io, number, request, payload, whose),
                Err(text) => self.refuse(number, whose, request, text),
            }
        }
        self.leave(io, number);
    }
}

fn crashed() -> Error {
    Error::new(ErrorKind::Io, "internal error of the replica while committing")
}
