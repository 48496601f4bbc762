//! A queue: one connection, as the reactor sees it. Bytes become PDUs here, and commands wait for their data.

use super::command::{Ask, Command, ENTRY_BYTES, Status};
use super::controller::Controller;
use super::identify::{ADMIN_CAPSULE_MAX_BYTES, CAPSULE_MAX_BYTES};
use super::wire::{
    COMMON_BYTES, DIGEST_BYTES, Fatal, Framing, Head, Piece, fatal, is_intact, kind, put,
};
use dbs_frontend::{Charge, Protocol, User};
use dbs_reactor::{Buf, Buffers, Slab};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Bytes of data that a queue asks its host for at a time; commands beyond that wait for their turn.
pub const ASKED_MAX_BYTES: usize = 8 << 20;

/// A connection.
pub struct Queue {
    /// Its controller.
    pub controller: Arc<Controller>,
    /// As whom it does what it does; none for discovery.
    pub user: Option<Arc<User>>,
    /// Its number; 0 is the admin queue.
    pub number: u16,
    /// What was agreed on for its PDUs.
    pub framing: Framing,
    /// The host knows by our answers which entries are free.
    pub flow_control: bool,
    /// Entries that it has.
    pub entries: u16,
    /// The next entry.
    pub head: u16,
    /// Commands that are not answered.
    pub open: usize,
    /// It ends without others having to.
    pub closing: Cell<bool>,
    /// Commands that wait for their data, by the tag under which it is asked for.
    waiting: Slab<Waiting>,
    /// Those that it was not asked for yet.
    unasked: VecDeque<u32>,
    asked_bytes: usize,
    /// Commands that are carried out range by range: their number, and what is left.
    pub ranges: Slab<(u16, Vec<(u64, u64)>)>,
}

/// A command whose data is to come.
struct Waiting {
    command: u16,
    ask: Ask,
    asked: bool,
    needed: usize,
    /// Bytes that have come.
    at: usize,
    data: Buf,
    /// A digest was wrong.
    damaged: bool,
}

/// A command that has all its data.
pub struct Complete {
    /// Its number.
    pub command: u16,
    /// What it asks for.
    pub ask: Ask,
    /// The data, unless it was damaged.
    pub data: Option<Buf>,
    /// What it has been asked for, to be given back with [`Queue::free`].
    pub asked: usize,
}

/// A PDU of the host.
#[derive(Debug, Clone, Copy)]
pub enum Pdu {
    /// A command, with the memory that its answer takes.
    Command(Command, Head, u64),
    /// A piece of data.
    Data(Piece, Head),
}

impl Charge for Pdu {
    fn payload_bytes(&self) -> usize {
        let (Self::Command(_, head, _) | Self::Data(_, head)) = self;
        head.payload_bytes()
    }

    fn skip_bytes(&self) -> u64 {
        0
    }

    fn cost_bytes(&self) -> u64 {
        match self {
            Self::Command(_, head, answer) => head.data_bytes as u64 + answer,
            // It was asked for: it must never wait behind commands, as they may wait for it.
            Self::Data(..) => 0,
        }
    }
}

impl Queue {
    /// A queue of so many entries. With flow control, so many commands have come on it before, the first of which was
    /// that of connecting.
    pub fn new(
        controller: Arc<Controller>,
        user: Option<Arc<User>>,
        (number, entries): (u16, u16),
        framing: Framing,
        commands: Option<u16>,
    ) -> Self {
        Self {
            controller,
            user,
            number,
            framing,
            flow_control: commands.is_some(),
            entries,
            head: commands.unwrap_or(0) % entries.max(1),
            open: 0,
            closing: Cell::new(false),
            waiting: Slab::default(),
            unasked: VecDeque::new(),
            asked_bytes: 0,
            ranges: Slab::default(),
        }
    }

    fn capsule_max(&self) -> usize {
        if self.number == 0 { ADMIN_CAPSULE_MAX_BYTES } else { CAPSULE_MAX_BYTES }
    }

    fn decode(&self, header: &[u8]) -> Result<Pdu, Fatal> {
        let head = self.framing.head(header, self.capsule_max())?;
        head.check(header)?;
        match head.kind {
            kind::CAPSULE_CMD => {
                let mut entry = [0; ENTRY_BYTES];
                put(&mut entry, 0, &header[COMMON_BYTES..][..ENTRY_BYTES]);
                let command = Command(entry);
                Ok(Pdu::Command(command, head, command.answer_bytes(self.number == 0)))
            }
            kind::H2C_DATA => {
                let piece = Piece::decode(header);
                if piece.length as usize != head.data_bytes {
                    return Err(Fatal::field(16, "data of another length than its PDU", header));
                }
                Ok(Pdu::Data(piece, head))
            }
            // What is behind it is for people, in the host's log.
            _ => Err(Fatal::new(0, 0, "the host has ended the connection for an error", header)),
        }
    }

    /// A command has come: takes an entry.
    ///
    /// # Errors
    /// There are no more.
    pub fn take_entry(&mut self, command: &Command) -> Result<(), Fatal> {
        if self.open >= usize::from(self.entries) {
            let why = "more commands than the queue has entries";
            return Err(Fatal::new(fatal::SEQUENCE, 0, why, &command.0));
        }
        self.open += 1;
        self.head = if self.head + 1 >= self.entries { 0 } else { self.head + 1 };
        Ok(())
    }

    /// A command waits for so much data, which the host is to be asked for.
    pub fn wait(&mut self, command: u16, ask: Ask) {
        let needed = ask.host_bytes();
        let (asked, at, data, damaged) = (false, 0, Buf::empty(), false);
        let waiting = Waiting { command, ask, asked, needed, at, data, damaged };
        let tag = self.waiting.insert(waiting);
        self.unasked.push_back(tag);
    }

    /// The next command whose data there is room for: its number, the tag, and how much.
    pub fn ask(&mut self) -> Option<(u16, u16, usize)> {
        let tag = *self.unasked.front()?;
        let waiting = self.waiting.get_mut(tag)?;
        if self.asked_bytes + waiting.needed > ASKED_MAX_BYTES {
            return None;
        }
        self.unasked.pop_front();
        waiting.asked = true;
        self.asked_bytes += waiting.needed;
        // There are no more than entries.
        Some((waiting.command, tag as u16, waiting.needed))
    }

    /// What was asked for is used up.
    pub fn free(&mut self, bytes: usize) {
        self.asked_bytes -= bytes;
    }

    /// Takes a piece of data that was asked for; the command, if that was all.
    ///
    /// # Errors
    /// It was not, or not at this moment.
    pub fn piece(
        &mut self,
        (piece, head): (&Piece, &Head),
        mut payload: Buf,
        buffers: &Buffers,
    ) -> Result<Option<Complete>, Fatal> {
        let field = |offset, why| Err(Fatal::field(offset, why, &[]));
        let range = |offset, why| Err(Fatal::new(fatal::OUT_OF_RANGE, offset, why, &[]));
        let tag = u32::from(piece.tag);
        let waiting = self.waiting.get_mut(tag).filter(|waiting| waiting.asked);
        let Some(waiting) = waiting else { return field(10, "data that was not asked for") };
        if waiting.command != piece.command {
            return field(8, "data of another command than was asked for");
        }
        if piece.offset as usize != waiting.at {
            return range(12, "data out of order");
        }
        let end = waiting.at + head.data_bytes;
        if end > waiting.needed {
            return range(16, "more data than was asked for");
        }
        if piece.last != (end == waiting.needed) {
            return field(1, "data ends before all is there, or does not then");
        }
        waiting.damaged |= !is_whole(head, &mut payload);
        if waiting.at == 0 && end == waiting.needed {
            waiting.data = payload;
        } else {
            if waiting.at == 0 {
                waiting.data = buffers.take(waiting.needed);
            }
            put(&mut waiting.data, waiting.at, &payload);
        }
        waiting.at = end;
        if end < waiting.needed {
            return Ok(None);
        }
        Ok(self.waiting.remove(tag).map(|waiting| {
            let Waiting { command, ask, needed, data, damaged, .. } = waiting;
            Complete { command, ask, data: (!damaged).then_some(data), asked: needed }
        }))
    }

    /// The completion of a command, which gives its entry back.
    pub fn completion(&mut self, command: u16, status: Status, result: u64) -> [u8; 16] {
        self.open -= 1;
        // Some hosts take an answer for a sign of life of both sides, as Linux before 6.5.
        self.controller.heard();
        let head = if self.flow_control { self.head } else { u16::MAX };
        super::command::completion(result, head, command, status)
    }
}

/// Cuts the digest off, and compares the data with it.
pub fn is_whole(head: &Head, payload: &mut Buf) -> bool {
    if !head.data_digest {
        return true;
    }
    let (data, digest) = payload.split_at(head.data_bytes);
    let intact = digest.len() == DIGEST_BYTES && is_intact(data, digest);
    payload.truncate(head.data_bytes);
    intact
}

impl Protocol for Queue {
    type Request = Pdu;

    fn header_bytes(&self) -> usize {
        COMMON_BYTES
    }

    fn whole_header_bytes(&self, start: &[u8]) -> io::Result<usize> {
        let head = self.framing.head(start, self.capsule_max());
        Ok(head.inspect_err(|_| self.closing.set(true))?.header_bytes)
    }

    fn request(&self, header: &[u8]) -> io::Result<Option<Pdu>> {
        let decoded = self.decode(header).inspect_err(|_| self.closing.set(true));
        Ok(Some(decoded?))
    }

    /// What is not begun of it is not begun any more.
    fn ended(&self, _: bool) {
        if let Some(user) = &self.user {
            user.ends_delays(true);
            user.drop_long();
        }
        match self.number {
            _ if self.closing.get() => {}
            0 => self.controller.end(),
            _ => self.controller.lose_queues(),
        }
    }
}
