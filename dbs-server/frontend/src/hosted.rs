//! A frontend that is written for [`Requests`] as a [`Front`]: on reactors that have a [`Carrier`].

use super::carry::{Carrier, Front, Outcome};
use super::delayed::Fate;
use super::peers::Event;
use super::requests::Requests;
use dbs_reactor::{Handler, Io};
use std::any::Any;
use std::io;

/// A handler of queues or connections that has all its requests carried out by [`Requests`]: on a reactor of its own, or
/// through [`Hosted`] on one that carries them elsewhere. There, its operations have the tags that it was made with, and
/// it hears of them by the lower half of these.
pub trait Serves: Handler {
    /// By which it knows its requests again.
    type Ticket: Copy + Send + 'static;

    /// Its requests.
    fn requests(&self) -> &Requests<Self::Ticket>;

    /// Its requests.
    fn requests_mut(&mut self) -> &mut Requests<Self::Ticket>;

    /// Some of them have ended.
    fn answer(&mut self, io: &mut Io);

    /// See [`Front::stop`].
    fn leave(&mut self, io: &mut Io, at_once: bool);

    /// Whether it has nothing that it serves.
    fn is_idle(&self) -> bool;
}

/// Such a handler on one reactor of something else.
pub struct Hosted<H> {
    handler: H,
    stopping: bool,
}

impl<H: Serves> Hosted<H> {
    /// With this handler, whose requests are [carried](Requests::carried).
    pub fn new(handler: H) -> Self {
        Self { handler, stopping: false }
    }

    /// Hands on what is to be carried out. What ends at once may be followed by more.
    fn hand_on(&mut self, io: &mut Io, carrier: &mut dyn Carrier) {
        loop {
            while let Some((carry, payload, number)) = self.handler.requests_mut().next_carry(io) {
                carrier.carry(io, carry, payload, number);
            }
            // One that is dropped has ended in between.
            self.handler.answer(io);
            if !self.handler.requests().has_due() {
                break;
            }
        }
    }
}

impl<H: Serves> Front for Hosted<H> {
    fn message(&mut self, io: &mut Io, carrier: &mut dyn Carrier, message: Box<dyn Any + Send>) {
        if let Ok(message) = message.downcast::<H::Message>() {
            self.handler.message(io, *message);
            self.hand_on(io, carrier);
        }
    }

    fn input(&mut self, io: &mut Io, carrier: &mut dyn Carrier, number: u32, event: Event<'_>) {
        let tag = u64::from(number);
        match event {
            Event::Begun(_) => {}
            Event::Received(data) => self.handler.received(io, tag, data),
            Event::Filled(buf, result) => self.handler.filled(io, tag, buf, result),
            Event::Sent(batch, result) => self.handler.sent(io, tag, batch, result),
        }
        self.hand_on(io, carrier);
    }

    fn signalled(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        number: u32,
        result: io::Result<()>,
    ) {
        self.handler.signalled(io, number.into(), result);
        self.hand_on(io, carrier);
    }

    fn fate(&self, ticket: u64) -> Fate {
        self.handler.requests().fate(ticket)
    }

    fn answered(&mut self, io: &mut Io, ticket: u64, outcome: Outcome) {
        self.handler.requests_mut().carried_out(ticket, outcome);
        self.handler.answer(io);
    }

    fn turn(&mut self, io: &mut Io, carrier: &mut dyn Carrier) {
        self.hand_on(io, carrier);
        self.handler.turn(io);
    }

    fn tick(&mut self, io: &mut Io) {
        self.handler.tick(io);
    }

    fn stop(&mut self, io: &mut Io, at_once: bool) {
        self.stopping = true;
        self.handler.leave(io, at_once);
    }

    fn is_over(&self) -> bool {
        self.stopping && self.handler.is_idle()
    }
}
