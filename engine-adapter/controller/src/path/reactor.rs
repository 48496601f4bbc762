//! A reactor of a path: passes what happens to whom it concerns, by the bits of its tag.

use super::latch::Latch;
use super::message::{Make, Message};
use super::shard::{Ended, LINK_TAG, Shard};
use super::shared::Shared;
use dbs_core::volume::Pace;
use dbs_frontend::{
    Action, Carrier, Carry, Delayed, Event, Failure, FailureKind, Fate, Front, Outcome,
};
use dbs_reactor::ublk::{UblkQueue, UblkRequest};
use dbs_reactor::{Batch, Buf, Handler, Io, Remote};
use dbs_ublk::Queue;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Bits of a tag below those that say whose it is.
const NUMBER_BITS: u32 = 32;
/// Whose tags those of the first frontend are.
const FIRST_FRONT: u64 = (LINK_TAG >> NUMBER_BITS) + 1;
/// How often frontends look at the clock.
const FRONT_TICK: Duration = Duration::from_secs(1);

/// The number of the frontend that a transfer copies data of a block device for.
fn copies_for(tag: u64) -> Option<usize> {
    let whose = Queue::owner(tag)? >> NUMBER_BITS;
    usize::try_from(whose.checked_sub(FIRST_FRONT)?).ok()
}

/// A frontend's part here.
struct Attached {
    front: Box<dyn Front>,
    /// Who waits for its end.
    leaving: Vec<Arc<Latch>>,
    /// The limits of the volume delay nothing of it any more.
    hurried: bool,
}

/// A request of a frontend: of which, what, with what, and its ticket.
type Asked = (u8, Carry, Option<Buf>, u64);

/// A reactor.
pub(super) struct Reactor {
    shard: Shard,
    pace: Arc<Pace>,
    /// Requests that the volume's limits delay.
    delayed: Delayed<Asked>,
    fronts: Vec<Option<Attached>>,
    /// Reused.
    ended: Vec<Ended>,
    front_tick: Duration,
    ending: bool,
    stopped: bool,
}

/// The shard, as a frontend sees it.
struct Way<'a> {
    shard: &'a mut Shard,
    pace: &'a Arc<Pace>,
    delayed: &'a mut Delayed<Asked>,
    hurried: bool,
    front: u8,
}

impl Carrier for Way<'_> {
    fn size(&self) -> u64 {
        self.shard.size()
    }

    fn carry(&mut self, io: &mut Io, request: Carry, payload: Option<Buf>, ticket: u64) {
        let bytes = match request.action {
            Action::Read | Action::Write { .. } => request.length.into(),
            Action::Discard | Action::Flush => 0,
        };
        let free =
            self.hurried || request.action == Action::Flush || self.delayed.is_free(self.pace);
        if free {
            return self.shard.carry(io, self.front, request, payload, ticket);
        }
        let asked = (self.front, request, payload, ticket);
        if let Some((front, request, payload, ticket)) =
            self.delayed.admit(io, self.pace, bytes, asked)
        {
            self.shard.carry(io, front, request, payload, ticket);
        }
    }
}

impl Reactor {
    pub fn new(shared: Arc<Shared>, index: usize, remote: Remote<Message>) -> Self {
        #[cfg(feature = "sabotage")]
        super::sabotage::set(shared.options.bug);
        Self {
            pace: Arc::clone(&shared.pace),
            delayed: Delayed::default(),
            shard: Shard::new(shared, index, remote),
            fronts: Vec::new(),
            ended: Vec::new(),
            front_tick: Duration::ZERO,
            ending: false,
            stopped: false,
        }
    }

    /// Calls a frontend, if there is one with this number.
    fn front(&mut self, number: usize, call: impl FnOnce(&mut dyn Front, &mut Way<'_>)) {
        let Self { shard, fronts, pace, delayed, .. } = self;
        if let Some(Some(attached)) = fronts.get_mut(number) {
            let (front, hurried) = (number as u8, attached.hurried);
            call(&mut *attached.front, &mut Way { shard, pace, delayed, hurried, front });
        }
    }

    /// Hands something that happened to a socket to whom it belongs to.
    fn socket(&mut self, io: &mut Io, tag: u64, event: Event<'_>) {
        self.shard.look_at_clock(io);
        let whose = tag >> NUMBER_BITS;
        if whose == LINK_TAG >> NUMBER_BITS {
            self.shard.input(io, tag as u32, event);
        } else if let Some(number) = whose.checked_sub(FIRST_FRONT) {
            self.front(number as usize, |front, way| front.input(io, way, tag as u32, event));
        }
        self.answer(io);
    }

    /// Tells frontends what has ended.
    fn answer(&mut self, io: &mut Io) {
        if self.shard.ended.is_empty() {
            return;
        }
        let mut ended = std::mem::replace(&mut self.shard.ended, std::mem::take(&mut self.ended));
        for Ended { front, ticket, outcome } in ended.drain(..) {
            self.front(usize::from(front), |front, _| front.answered(io, ticket, outcome));
        }
        self.ended = ended;
    }

    fn attach(&mut self, io: &mut Io, number: usize, make: Make) {
        let tags = (FIRST_FRONT + number as u64) << NUMBER_BITS;
        let front = make(io, tags);
        while self.fronts.len() <= number {
            self.fronts.push(None);
        }
        if let Some(place) = self.fronts.get_mut(number) {
            *place = Some(Attached { front, leaving: Vec::new(), hurried: false });
        }
    }

    fn detach(&mut self, io: &mut Io, number: usize, at_once: bool, latch: Arc<Latch>) {
        match self.fronts.get_mut(number) {
            Some(Some(attached)) => {
                attached.front.stop(io, at_once);
                attached.leaving.push(latch);
            }
            _ => latch.count_down(),
        }
        self.hurry(io, number);
    }

    /// The limits of the volume delay nothing of a frontend any more: its end is waited for.
    fn hurry(&mut self, io: &mut Io, number: usize) {
        if let Some(Some(attached)) = self.fronts.get_mut(number) {
            attached.hurried = true;
        }
        self.delayed.look();
        self.carry_delayed(io);
    }

    /// Carries out what the volume's limits have delayed and now let in.
    fn carry_delayed(&mut self, io: &mut Io) {
        let Self { shard, fronts, delayed, .. } = self;
        let fate = |(front, .., ticket): &Asked| match fronts.get(usize::from(*front)) {
            Some(Some(attached)) => match attached.front.fate(*ticket) {
                Fate::Wait if attached.hurried => Fate::Go,
                fate => fate,
            },
            _ => Fate::Drop,
        };
        while let Some(((front, request, payload, ticket), begins)) = delayed.next(io, fate) {
            if begins {
                shard.carry(io, front, request, payload, ticket);
            } else {
                let failure = Failure::new(FailureKind::Io, "its client is gone");
                shard.ended.push(Ended { front, ticket, outcome: Outcome::Failed(failure) });
            }
        }
    }

    /// Lets frontends end their turns, and forgets those that are over.
    fn front_turns(&mut self, io: &mut Io) {
        for number in 0..self.fronts.len() {
            self.front(number, |front, way| front.turn(io, way));
            let over =
                |attached: &mut Attached| !attached.leaving.is_empty() && attached.front.is_over();
            if let Some(attached) = self.fronts.get_mut(number).and_then(|f| f.take_if(over)) {
                drop(attached.front);
                attached.leaving.iter().for_each(|latch| latch.count_down());
            }
        }
    }
}

impl Handler for Reactor {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        self.shard.look_at_clock(io);
        match message {
            Message::Add { replica, access, latch } => {
                self.shard.add(io, replica, access);
                latch.count_down();
            }
            Message::Local(told) => self.shard.told(io, told),
            Message::Lost { slot, serial, why } => self.shard.lose(io, slot, serial, &why),
            Message::Back { slot, serial, epoch, access } => {
                self.shard.back(io, (slot, serial, epoch), access);
            }
            Message::Remove { replica, latch } => self.shard.remove(io, &replica, &latch),
            Message::Flush { latch } => self.shard.flush(io, latch),
            Message::Pause { all, latch } => self.shard.pause(all, latch),
            Message::Resume => self.shard.resume(),
            Message::Retry => self.shard.retry = true,
            // Whoever asked may have given up.
            Message::Journal(to) => drop(to.send(self.shard.take_journal())),
            Message::Attach { number, make } => self.attach(io, number, make),
            Message::Front { number, message } => {
                self.front(number, |front, way| front.message(io, way, message));
            }
            Message::Hurry { number } => self.hurry(io, number),
            Message::Detach { number, at_once, latch } => self.detach(io, number, at_once, latch),
            Message::End => {
                self.shard.close(io);
                self.ending = true;
            }
        }
        self.answer(io);
    }

    fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        self.socket(io, tag, Event::Received(data));
    }

    fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.socket(io, tag, Event::Filled(buf, result));
    }

    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: io::Result<()>) {
        self.socket(io, tag, Event::Sent(batch, result));
    }

    /// A copy for a block device, or a transfer of a replica in this process.
    fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.shard.look_at_clock(io);
        if let Some(number) = copies_for(tag) {
            self.front(number, |front, way| front.moved(io, way, tag, buf, result));
        } else {
            self.shard.moved(io, tag, buf, result);
        }
        self.answer(io);
    }

    fn fetched(
        &mut self,
        io: &mut Io,
        queue: UblkQueue,
        tag: u16,
        request: io::Result<UblkRequest>,
    ) {
        self.shard.look_at_clock(io);
        let has = |attached: &Option<Attached>| {
            attached.as_ref().is_some_and(|a| a.front.has_queue(queue))
        };
        if let Some(number) = self.fronts.iter().position(has) {
            self.front(number, |front, way| front.fetched(io, way, queue, tag, request));
        }
        self.answer(io);
    }

    fn signalled(&mut self, io: &mut Io, tag: u64, result: io::Result<()>) {
        self.shard.look_at_clock(io);
        if let Some(number) = (tag >> NUMBER_BITS).checked_sub(FIRST_FRONT) {
            self.front(number as usize, |front, way| front.signalled(io, way, tag as u32, result));
        }
        self.answer(io);
    }

    fn turn(&mut self, io: &mut Io) {
        self.shard.look_at_clock(io);
        self.shard.turn(io);
        self.answer(io);
        self.front_turns(io);
        self.shard.links.settle(io, |_| {});
        if self.ending && self.shard.is_closed() && !self.stopped {
            self.stopped = true;
            io.wake_at(None);
            return io.stop();
        }
        self.shard.looked = false;
        let more = self.shard.has_more();
        let wait =
            if more { Duration::ZERO } else { self.shard.due.saturating_sub(self.shard.now) };
        io.wake_at(Some(io.now() + wait));
    }

    fn reminded(&mut self, io: &mut Io) {
        self.shard.look_at_clock(io);
        self.carry_delayed(io);
        self.answer(io);
    }

    fn tick(&mut self, io: &mut Io) {
        self.shard.look_at_clock(io);
        if self.shard.due <= self.shard.now {
            self.shard.tick(io);
        }
        if self.front_tick <= self.shard.now {
            self.front_tick = self.shard.now + FRONT_TICK;
            for number in 0..self.fronts.len() {
                self.front(number, |front, _| front.tick(io));
            }
        }
        self.answer(io);
    }
}
