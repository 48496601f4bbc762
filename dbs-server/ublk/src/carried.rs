//! Queues of a block device on reactors where something else than a store carries requests out: the
//! [`Front`] of whatever does.
//!
//! The kernel's requests are carried as they come: reads and writes are bounded by what the device says
//! of itself, and so are discards. Zeros are not offered, so that the kernel writes them. What a queue
//! has not answered when its process dies, the next server is given again.

use super::device::{Health, QueueStart, Running};
use super::options::{self, FLAGS, MAX_IO_BYTES};
use super::queue::{Event, Queue};
use dbs_frontend::{
    Action, Carrier, Carry, DISCARD_MAX_BYTES, FailureKind, Front, Outcome, lock, wait_while,
};
use dbs_reactor::ublk::{
    Discard, NewDevice, Params, UblkOp, UblkQueue, UblkRequest, serve_io_for_others,
};
use dbs_reactor::{Buf, Io, Slab};
use dbs_service::log;
use nix::libc;
use std::any::Any;
use std::io;
use std::sync::{Arc, Condvar, Mutex};

/// Hands a message to the front on the reactor with this number, for [`Front::message`].
pub type Deliver = Arc<dyn Fn(usize, Box<dyn Any + Send>) + Send + Sync>;

/// What the device of such a volume is made of; `mark` is what the kernel knows it by.
#[must_use]
pub fn carried_device(queues: u16, depth: u16, mark: u64) -> NewDevice {
    NewDevice { id: None, queues, depth, max_io_bytes: MAX_IO_BYTES, flags: FLAGS, mark }
}

/// What the device tells its users of a volume of so many bytes.
#[must_use]
pub fn carried_params(size: u64) -> Params {
    let params = options::params(size, false);
    let discard = params.discard.map(|discard| Discard {
        max_discard: DISCARD_MAX_BYTES.into(),
        max_zeroes: 0,
        ..discard
    });
    Params { discard, ..params }
}

/// A device's part on one reactor, to be made on its thread; its operations have `tags`.
#[must_use]
pub fn carried_front(tags: u64) -> Box<dyn Front> {
    if let Err(error) = serve_io_for_others() {
        log::warn("ublk", &[("error", &error), ("what", &"PR_SET_IO_FLUSHER")]);
    }
    Box::new(Queues { tags, served: Vec::new(), tickets: Slab::default(), stopping: false })
}

/// Has the queues of a device served by its parts, which exist already: one on each reactor, in turn.
pub fn carried_spawner(
    reactors: usize,
    deliver: Deliver,
) -> impl FnMut(QueueStart) -> io::Result<Box<dyn Running>> {
    move |start| {
        let (reactor, queue) = (usize::from(start.queue) % reactors.max(1), start.queue);
        let (deliver, end) = (Arc::clone(&deliver), Arc::<End>::default());
        deliver(reactor, Box::new(Message::Serve(start, Arc::clone(&end))));
        Ok(Box::new(OnReactor { deliver, reactor, queue, end }))
    }
}

/// What a part is told.
enum Message {
    /// Serve this queue, and say when that has ended.
    Serve(QueueStart, Arc<End>),
    /// Answer what is under way on it, and take nothing more.
    Leave(u16),
}

/// Whether a queue is served no more.
#[derive(Default)]
struct End {
    over: Mutex<bool>,
    changed: Condvar,
}

impl End {
    fn come(&self) {
        *lock(&self.over) = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        drop(wait_while(&self.changed, lock(&self.over), |over| !*over));
    }
}

/// A queue, as its device has it.
struct OnReactor {
    deliver: Deliver,
    reactor: usize,
    queue: u16,
    end: Arc<End>,
}

impl Running for OnReactor {
    fn leave(&self) {
        (self.deliver)(self.reactor, Box::new(Message::Leave(self.queue)));
    }

    fn join(self: Box<Self>) {
        self.end.wait();
    }
}

/// The queues of a device on one reactor.
struct Queues {
    tags: u64,
    served: Vec<Option<Served>>,
    /// Requests that are being carried out: the place of their queue, and their tag.
    tickets: Slab<(usize, u16)>,
    stopping: bool,
}

/// A queue that is served.
struct Served {
    queue: Queue,
    number: u16,
    health: Arc<Health>,
    end: Arc<End>,
    /// Requests begun and not answered.
    running: usize,
    leaving: bool,
}

impl Served {
    fn leave_when_done(&self) {
        if self.leaving && self.running == 0 {
            self.end.come();
        }
    }
}

impl Queues {
    fn serve(&mut self, io: &mut Io, start: QueueStart, end: Arc<End>) {
        let QueueStart { device, queue: number, depth, health, .. } = start;
        match io.add_ublk_queue(device, number, depth) {
            Ok(queue) => {
                // Its place among those here, which its transfers have in their tags.
                let place = self.served.len() as u16;
                let queue = Queue::new(io, queue, place, depth, self.tags);
                let (running, leaving) = (0, false);
                self.served.push(Some(Served { queue, number, health, end, running, leaving }));
            }
            Err(error) => {
                health.fail(&error);
                end.come();
            }
        }
    }

    fn leave(&mut self, number: u16) {
        let served = self.served.iter_mut().flatten();
        for served in served.filter(|served| served.number == number) {
            served.leaving = true;
            served.leave_when_done();
        }
    }

    fn event(&mut self, io: &mut Io, carrier: &mut dyn Carrier, place: usize, event: Event) {
        let Some(Some(served)) = self.served.get_mut(place) else { return };
        match event {
            Event::Nothing => {}
            // What is left to the next server it is given again.
            Event::Request(..) if served.leaving => {}
            Event::Request(tag, request, payload) => match carried(&request, payload.as_ref()) {
                Some(carry) => {
                    served.running += 1;
                    let ticket = self.tickets.insert((place, tag));
                    carrier.carry(io, carry, payload, u64::from(ticket));
                }
                None => served.queue.answer(io, tag, Err(libc::EOPNOTSUPP)),
            },
            Event::Ended(failure) => {
                failure.iter().for_each(|error| served.health.fail(error));
                let handle = served.queue.handle();
                served.end.come();
                io.remove_ublk_queue(handle);
                if let Some(place) = self.served.get_mut(place) {
                    *place = None;
                }
            }
        }
    }
}

/// What carries a request of the kernel out.
fn carried(request: &UblkRequest, payload: Option<&Buf>) -> Option<Carry> {
    let UblkRequest { op, offset, length, fua, .. } = *request;
    let action = match op {
        UblkOp::Read => Action::Read,
        UblkOp::Write => Action::Write { durable: fua },
        UblkOp::Discard => Action::Discard,
        UblkOp::Flush => return Some(Carry { action: Action::Flush, offset: 0, length: 0 }),
        UblkOp::WriteZeroes | UblkOp::Other(_) => return None,
    };
    let length = u32::try_from(length).ok()?;
    let whole = op != UblkOp::Write || payload.is_some_and(|data| data.len() == length as usize);
    whole.then_some(Carry { action, offset, length })
}

impl Front for Queues {
    fn message(&mut self, io: &mut Io, _: &mut dyn Carrier, message: Box<dyn Any + Send>) {
        match message.downcast::<Message>().map(|message| *message) {
            Ok(Message::Serve(start, end)) => self.serve(io, start, end),
            Ok(Message::Leave(number)) => self.leave(number),
            Err(_) => {}
        }
    }

    fn has_queue(&self, queue: UblkQueue) -> bool {
        self.served.iter().flatten().any(|served| served.queue.handle() == queue)
    }

    fn fetched(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        queue: UblkQueue,
        tag: u16,
        request: io::Result<UblkRequest>,
    ) {
        let is_it = |served: &Option<Served>| {
            served.as_ref().is_some_and(|served| served.queue.handle() == queue)
        };
        let Some(place) = self.served.iter().position(is_it) else { return };
        let Some(Some(served)) = self.served.get_mut(place) else { return };
        let event = served.queue.fetched(io, tag, request);
        self.event(io, carrier, place, event);
    }

    fn moved(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        tag: u64,
        buf: Buf,
        result: io::Result<()>,
    ) {
        let Some(place) = Queue::of_transfer(tag).map(usize::from) else { return };
        let Some(Some(served)) = self.served.get_mut(place) else { return };
        let event = served.queue.copied(io, tag, buf, result);
        self.event(io, carrier, place, event);
    }

    fn answered(&mut self, io: &mut Io, ticket: u64, outcome: Outcome) {
        let Some((place, tag)) = self.tickets.remove(ticket as u32) else { return };
        let Some(Some(served)) = self.served.get_mut(place) else { return };
        match outcome {
            Outcome::Done(_) => served.queue.answer(io, tag, Ok(())),
            Outcome::Data(data) => served.queue.answer_read(io, tag, data),
            Outcome::Failed(failure) => served.queue.answer(io, tag, Err(errno(failure.kind))),
        }
        served.running -= 1;
        served.leave_when_done();
    }

    fn turn(&mut self, _: &mut Io, _: &mut dyn Carrier) {}

    /// Queues that have not ended are given up: their device is another server's once this process is
    /// gone.
    fn stop(&mut self, io: &mut Io, at_once: bool) {
        self.stopping = true;
        for served in self.served.iter_mut().flatten() {
            served.leaving = true;
            served.leave_when_done();
            if at_once {
                io.remove_ublk_queue(served.queue.handle());
            }
        }
    }

    fn is_over(&self) -> bool {
        self.stopping && self.served.iter().flatten().all(|served| served.running == 0)
    }
}

/// The error number a device's user sees.
fn errno(kind: FailureKind) -> i32 {
    match kind {
        FailureKind::NoSpace => libc::ENOSPC,
        FailureKind::Invalid | FailureKind::Io => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_left_to_the_kernel() {
        let params = carried_params(8 << 20);
        assert_eq!((params.size, params.read_only, params.volatile_cache), (8 << 20, false, true));
        let discard = params.discard.map(|discard| (discard.granularity, discard.max_zeroes));
        assert_eq!(discard, Some((4096, 0)));
    }

    #[test]
    fn requests_are_carried_as_they_are() {
        let request = UblkRequest {
            op: UblkOp::Read,
            offset: 512,
            length: 4096,
            fua: false,
            no_unmap: false,
        };
        let read = Carry { action: Action::Read, offset: 512, length: 4096 };
        assert_eq!(carried(&request, None), Some(read));
        let write = UblkRequest { op: UblkOp::Write, fua: true, ..request };
        assert_eq!(carried(&write, None), None, "without its data");
        let flush = UblkRequest { op: UblkOp::Flush, offset: u64::MAX, ..request };
        let carry = Carry { action: Action::Flush, offset: 0, length: 0 };
        assert_eq!(carried(&flush, None), Some(carry));
        let long = UblkRequest { op: UblkOp::Discard, length: 1 << 40, ..request };
        assert_eq!(carried(&long, None), None, "longer than the device says");
        assert_eq!(carried(&UblkRequest { op: UblkOp::WriteZeroes, ..request }, None), None);
    }
}
