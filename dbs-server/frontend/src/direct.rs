//! Reads and writes of volumes on a reactor's own ring: mapped, transferred, finished, without a
//! lock held in between and, in a steady state, without an allocation.

use dbs_core::volume::{Finish, Read, Request, Start};
use dbs_core::{Error, Volume};
use dbs_reactor::{Buf, File, Io, Payload, Segment};
use std::io;

/// Free requests that keep their memory.
const IDLE_REQUESTS_MAX: usize = 1024;

/// What a reactor does I/O with by itself, if the volumes lie in a file or device.
#[derive(Debug, Clone, Copy)]
pub struct Storage {
    /// The file.
    pub file: File,
    /// Offsets and lengths in it are multiples of this.
    pub offset_alignment: usize,
    /// Addresses of memory are multiples of this.
    pub memory_alignment: usize,
}

/// Reads and writes in flight, each with what `T` its server needs to answer it.
pub struct Direct<T> {
    /// In flight or free; a request stays where it is as long as it is used again and again.
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    segments: Vec<Segment>,
}

struct Slot<T> {
    /// Of a request in flight.
    ticket: Option<T>,
    request: Request,
    write: bool,
}

/// What is to be done for a read.
pub enum Plan {
    /// Transfers: [`Direct::read`].
    Io(Planned),
    /// Nothing: all of it is zeros.
    Zeros,
    /// Only a part of it is stored, and the caller wanted to know.
    Holes,
    /// Somebody who may wait is to do it.
    Blocked,
}

/// A request whose transfers are to be started before the next one is planned.
#[must_use]
pub struct Planned {
    slot: u32,
    file: File,
}

/// The outcome of a request.
pub enum Ended {
    /// The buffer holds what was read.
    Read(Buf),
    /// The read is in doubt: somebody who may wait is to do it again.
    Again,
    /// It is written; a commit may have to come before its reply.
    Write(Finish),
}

impl<T> Default for Direct<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), segments: Vec::new() }
    }
}

impl<T> Direct<T> {
    /// Plans a read; with `holes`, one that is stored in part only is [`Plan::Holes`].
    ///
    /// # Errors
    /// Those of [`Volume::start_read_beside`].
    pub fn plan_read(
        &mut self,
        volume: &Volume,
        storage: Option<&Storage>,
        (offset, length): (u64, usize),
        holes: bool,
    ) -> Result<Plan, Error> {
        let slot = self.take_slot();
        let request = &mut self.slots[slot as usize].request;
        let plan = match volume.start_read_beside(offset, length as u64, request) {
            Ok(Start::Io) if holes && !request.zeros().is_empty() => {
                request.cancel();
                Ok(Plan::Holes)
            }
            Ok(Start::Io) => match lay_out(&mut self.segments, request, storage) {
                Some(file) => return Ok(Plan::Io(Planned { slot, file })),
                None => {
                    request.cancel();
                    Ok(Plan::Blocked)
                }
            },
            Ok(Start::Blocked) => Ok(Plan::Blocked),
            Ok(Start::Done) => Ok(Plan::Zeros),
            Err(error) => Err(error),
        };
        self.give_back(slot);
        plan
    }

    /// Starts the transfers of a planned read of `length` bytes.
    pub fn read(&mut self, io: &mut Io, planned: Planned, length: usize, ticket: T) {
        let slot = &mut self.slots[planned.slot as usize];
        (slot.ticket, slot.write) = (Some(ticket), false);
        let mut buf = io.buffers().take(length + slot.request.extra_bytes());
        for zeros in slot.request.zeros() {
            buf[zeros.clone()].fill(0);
        }
        io.read(planned.file, &self.segments, buf, u64::from(planned.slot));
    }

    /// Plans a write; `None` if somebody who may wait is to do it.
    ///
    /// # Errors
    /// Those of [`Volume::start_write_own`].
    pub fn plan_write(
        &mut self,
        volume: &Volume,
        storage: Option<&Storage>,
        offset: u64,
        length: usize,
    ) -> Result<Option<Planned>, Error> {
        let slot = self.take_slot();
        let request = &mut self.slots[slot as usize].request;
        let plan = match volume.start_write_own(offset, length as u64, request) {
            Ok(Start::Io) => match lay_out(&mut self.segments, request, storage) {
                Some(file) => return Ok(Some(Planned { slot, file })),
                None => {
                    request.cancel();
                    Ok(None)
                }
            },
            Ok(Start::Blocked | Start::Done) => Ok(None),
            Err(error) => Err(error),
        };
        self.give_back(slot);
        plan
    }

    /// Starts the transfers of a planned write. A payload of the writer's own comes back encrypted if the volume is.
    pub fn write(&mut self, io: &mut Io, planned: Planned, payload: impl Into<Payload>, ticket: T) {
        let slot = &mut self.slots[planned.slot as usize];
        (slot.ticket, slot.write) = (Some(ticket), true);
        let mut payload = payload.into();
        match &mut payload {
            Payload::Own(buf) => slot.request.seal_own(buf),
            // Others send or write it as it is.
            Payload::Shared(shared) if slot.request.is_open() => {
                let mut buf = io.buffers().take(shared.len());
                buf.copy_from_slice(shared);
                slot.request.seal_own(&mut buf);
                payload = Payload::Own(buf);
            }
            Payload::Shared(shared) => slot.request.seal(shared),
        }
        io.write(planned.file, &self.segments, payload, u64::from(planned.slot));
    }

    /// Finishes a request whose transfers have ended, as told by [`dbs_reactor::Handler::moved`].
    pub fn moved(
        &mut self,
        tag: u64,
        mut buf: Buf,
        result: io::Result<()>,
    ) -> Option<(T, Result<Ended, Error>)> {
        let slot = self.slots.get_mut(tag as usize)?;
        let ticket = slot.ticket.take()?;
        let ended = if slot.write {
            // The memory is free before the reply makes room for the next request.
            drop(buf);
            slot.request.finish_write(result).map(Ended::Write)
        } else {
            let length = buf.len() - slot.request.extra_bytes();
            slot.request.finish_read_own(result, &mut buf).map(|read| match read {
                Read::Done => {
                    buf.truncate(length);
                    Ended::Read(buf)
                }
                Read::Again => Ended::Again,
            })
        };
        self.give_back(tag as u32);
        Some((ticket, ended))
    }

    #[inline]
    fn take_slot(&mut self) -> u32 {
        if let Some(slot) = self.free.pop() {
            return slot;
        }
        self.slots.push(Slot { ticket: None, request: Request::default(), write: false });
        self.slots.len() as u32 - 1
    }

    #[inline]
    fn give_back(&mut self, slot: u32) {
        if self.free.len() >= IDLE_REQUESTS_MAX {
            self.slots[slot as usize].request = Request::default();
        }
        self.free.push(slot);
    }
}

/// Turns a request's segments into the ring's; `None` if direct I/O does not take them as they are.
#[inline]
fn lay_out(
    segments: &mut Vec<Segment>,
    request: &Request,
    storage: Option<&Storage>,
) -> Option<File> {
    let storage = storage?;
    segments.clear();
    for segment in request.segments() {
        let (offset, start, len) = (segment.device, segment.start, segment.length);
        let on_device = (offset as usize | len) % storage.offset_alignment;
        if on_device != 0 || !start.is_multiple_of(storage.memory_alignment) {
            return None;
        }
        segments.push(Segment { offset, start, len });
    }
    Some(storage.file)
}
