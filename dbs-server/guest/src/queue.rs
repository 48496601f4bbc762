//! A queue, from the side of the driver.

use super::{EVENT_INDEX, INDIRECT, Options, other};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TABLE: u16 = 4;
const HEADER_BYTES: u32 = 16;
/// Pieces of a request: header, data, outcome.
const PIECES: u16 = 3;
/// `EFD_NONBLOCK`.
const NONBLOCK: i32 = 0o4000;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a request does, by the number that says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub enum Kind {
    In = 0,
    Out = 1,
    Flush = 4,
    GetId = 8,
    Discard = 11,
    WriteZeroes = 13,
}

/// A request.
#[derive(Debug, Clone)]
pub struct Request {
    /// What it does.
    pub kind: Kind,
    /// First sector.
    pub sector: u64,
    /// Of a read and of a name, what to expect.
    pub length: u32,
    /// Of others, what is sent.
    pub data: Vec<u8>,
}

impl Request {
    /// A read.
    #[must_use]
    pub fn read(offset: u64, length: u32) -> Self {
        Self { kind: Kind::In, sector: offset / 512, length, data: Vec::new() }
    }

    /// A write.
    #[must_use]
    pub fn write(offset: u64, data: Vec<u8>) -> Self {
        Self { kind: Kind::Out, sector: offset / 512, length: 0, data }
    }

    /// A flush.
    #[must_use]
    pub fn flush() -> Self {
        Self { kind: Kind::Flush, sector: 0, length: 0, data: Vec::new() }
    }

    /// A discard, or zeros of which the space may be given up.
    #[must_use]
    pub fn range(kind: Kind, offset: u64, length: u64, flags: u32) -> Self {
        let mut data = (offset / 512).to_le_bytes().to_vec();
        data.extend(((length / 512) as u32).to_le_bytes());
        data.extend(flags.to_le_bytes());
        Self { kind, sector: 0, length: 0, data }
    }
}

/// Where things are, from the start of a queue's memory on.
pub(crate) struct Layout {
    places: u64,
    data_bytes: u64,
    slots: u64,
}

impl Layout {
    pub fn new(options: &Options) -> Self {
        let places = u64::from(options.places);
        let pieces = if options.features & INDIRECT == 0 { u64::from(PIECES) } else { 1 };
        let data_bytes = u64::from(options.data_bytes).next_multiple_of(4096);
        Self { places, data_bytes, slots: places / pieces }
    }

    fn available(&self) -> u64 {
        16 * self.places
    }

    fn used(&self) -> u64 {
        (self.available() + 6 + 2 * self.places).next_multiple_of(64)
    }

    /// Of each slot: a table of three descriptors, a header, an outcome.
    fn small(&self) -> u64 {
        (self.used() + 6 + 8 * self.places).next_multiple_of(4096)
    }

    fn data(&self) -> u64 {
        (self.small() + 128 * self.slots).next_multiple_of(4096)
    }

    pub fn bytes(&self) -> u64 {
        self.data() + self.data_bytes * self.slots
    }
}

/// A queue.
pub struct Queue {
    memory: Arc<GuestMemoryMmap>,
    layout: Layout,
    start: u64,
    indirect: bool,
    event_index: bool,
    kick: EventFd,
    call: EventFd,
    epoll: Epoll,
    available: u16,
    kicked: u16,
    used: u16,
    free: Vec<u16>,
    /// What each slot waits for.
    lengths: Vec<u32>,
    /// It does.
    running: Vec<bool>,
}

impl Queue {
    pub(crate) fn new(
        memory: Arc<GuestMemoryMmap>,
        layout: &Layout,
        start: u64,
        options: &Options,
    ) -> io::Result<Self> {
        let Layout { places, data_bytes, slots } = *layout;
        let (kick, call) = (EventFd::new(NONBLOCK)?, EventFd::new(NONBLOCK)?);
        let epoll = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), event)?;
        Ok(Self {
            memory,
            layout: Layout { places, data_bytes, slots },
            start,
            indirect: options.features & INDIRECT != 0,
            event_index: options.features & EVENT_INDEX != 0,
            kick,
            call,
            epoll,
            available: 0,
            kicked: 0,
            used: 0,
            free: (0..slots as u16).rev().collect(),
            lengths: vec![0; slots as usize],
            running: vec![false; slots as usize],
        })
    }

    /// Where descriptors, available ring and used ring are.
    #[must_use]
    pub fn places(&self) -> (u64, u64, u64) {
        (self.start, self.start + self.layout.available(), self.start + self.layout.used())
    }

    /// Where the data of a slot is.
    #[must_use]
    pub fn data(&self, slot: u16) -> u64 {
        self.start + self.layout.data() + self.layout.data_bytes * u64::from(slot)
    }

    fn small(&self, slot: u16) -> u64 {
        self.start + self.layout.small() + 128 * u64::from(slot)
    }

    /// How far the used ring was when it was last looked at.
    #[must_use]
    pub fn used(&self) -> u16 {
        self.used
    }

    pub(crate) fn call(&self) -> &EventFd {
        &self.call
    }

    pub(crate) fn kick_event(&self) -> &EventFd {
        &self.kick
    }

    /// Slots that are free.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Writes a descriptor anywhere.
    pub fn descriptor(&self, at: u64, address: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(at)).expect("inside of the memory");
    }

    /// Makes a request available, without telling; its slot.
    ///
    /// # Panics
    /// No slot is free.
    pub fn add(&mut self, request: &Request) -> u16 {
        let slot = self.free.pop().expect("a free slot");
        let (small, data) = (self.small(slot), self.data(slot));
        let (header, outcome) = (small + 64, small + 96);
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[..4].copy_from_slice(&(request.kind as u32).to_le_bytes());
        bytes[8..].copy_from_slice(&request.sector.to_le_bytes());
        let memory = &self.memory;
        memory.write_slice(&bytes, GuestAddress(header)).expect("a header");
        memory.write_slice(&[0xff], GuestAddress(outcome)).expect("an outcome");
        memory.write_slice(&request.data, GuestAddress(data)).expect("the data");
        let sent = request.data.len() as u32;
        let length = if sent > 0 { sent } else { request.length };
        let first = if self.indirect { 0 } else { slot * PIECES };
        let table = if self.indirect { small } else { self.start + 16 * u64::from(first) };
        let mut pieces = vec![(header, HEADER_BYTES, 0)];
        if length > 0 {
            pieces.push((data, length, if sent > 0 { 0 } else { WRITE }));
        }
        pieces.push((outcome, 1, WRITE));
        let last = pieces.len() as u16 - 1;
        for (index, (address, length, flags)) in (0u16..).zip(pieces) {
            let (next, more) = (first + index + 1, if index < last { NEXT } else { 0 });
            self.descriptor(table + 16 * u64::from(index), address, length, flags | more, next);
        }
        if self.indirect {
            let at = self.start + 16 * u64::from(slot);
            self.descriptor(at, table, 16 * (u32::from(last) + 1), TABLE, 0);
        }
        self.lengths[usize::from(slot)] = request.length;
        self.running[usize::from(slot)] = true;
        self.offer(if self.indirect { slot } else { first });
        slot
    }

    /// Makes whatever begins at a descriptor available, without telling.
    pub fn offer(&mut self, head: u16) {
        let ring = self.start + self.layout.available();
        let at = ring + 4 + 2 * (u64::from(self.available) % self.layout.places);
        self.memory.store(head.to_le(), GuestAddress(at), Ordering::Relaxed).expect("the ring");
        self.available = self.available.wrapping_add(1);
        let available = self.available.to_le();
        self.memory.store(available, GuestAddress(ring + 2), Ordering::Release).expect("the ring");
    }

    /// Tells of what was made available, if the server wants to be told.
    pub fn tell(&mut self) {
        let before = std::mem::replace(&mut self.kicked, self.available);
        fence(Ordering::SeqCst);
        let used = self.start + self.layout.used();
        let load = |at: u64| -> u16 {
            u16::from_le(self.memory.load(GuestAddress(at), Ordering::Acquire).expect("the ring"))
        };
        let wanted = match self.event_index {
            true => {
                let event = load(used + 4 + 8 * self.layout.places);
                self.available.wrapping_sub(event).wrapping_sub(1)
                    < self.available.wrapping_sub(before)
            }
            false => load(used) & 1 == 0,
        };
        if wanted {
            self.kick.write(1).expect("an eventfd");
        }
    }

    /// Tells the server, whether it wants to be told or not.
    pub fn kick(&self) {
        self.kick.write(1).expect("an eventfd");
    }

    /// The next answer, if there is one: the number of its descriptor, and the bytes that the server has written.
    pub fn take(&mut self) -> Option<(u16, u32)> {
        let used = self.start + self.layout.used();
        let index: u16 =
            self.memory.load(GuestAddress(used + 2), Ordering::Acquire).expect("the ring");
        if u16::from_le(index) == self.used {
            return None;
        }
        let at = used + 4 + 8 * (u64::from(self.used) % self.layout.places);
        let mut element = [0; 8];
        self.memory.read_slice(&mut element, GuestAddress(at)).expect("the ring");
        let [h0, h1, h2, h3, l0, l1, l2, l3] = element;
        self.used = self.used.wrapping_add(1);
        let head = u32::from_le_bytes([h0, h1, h2, h3]) as u16;
        Some((head, u32::from_le_bytes([l0, l1, l2, l3])))
    }

    /// The slot of an answer, which is free then, and its outcome.
    pub fn end(&mut self, head: u16) -> (u16, u8) {
        let slot = if self.indirect { head } else { head / PIECES };
        let mut outcome = [0];
        let at = GuestAddress(self.small(slot) + 96);
        self.memory.read_slice(&mut outcome, at).expect("an outcome");
        let running = std::mem::take(&mut self.running[usize::from(slot)]);
        assert!(running, "answered twice");
        self.free.push(slot);
        (slot, outcome[0])
    }

    /// What the server has read into a slot.
    #[must_use]
    pub fn read(&self, slot: u16) -> Vec<u8> {
        let mut data = vec![0; self.lengths[usize::from(slot)] as usize];
        self.memory.read_slice(&mut data, GuestAddress(self.data(slot))).expect("the data");
        data
    }

    /// Waits for an answer as long as there is none; whether there is one.
    pub fn wait(&mut self, patience: Duration) -> bool {
        let begun = Instant::now();
        loop {
            if self.event_index {
                let at = self.start + self.layout.available() + 4 + 2 * self.layout.places;
                let used = self.used.to_le();
                self.memory.store(used, GuestAddress(at), Ordering::Relaxed).expect("the ring");
                fence(Ordering::SeqCst);
            }
            let at = self.start + self.layout.used() + 2;
            let index: u16 = self.memory.load(GuestAddress(at), Ordering::Acquire).expect("ring");
            if u16::from_le(index) != self.used {
                return true;
            }
            let Some(rest) = patience.checked_sub(begun.elapsed()) else { return false };
            let mut events = [EpollEvent::default()];
            let _ = self.epoll.wait(rest.as_millis() as i32, &mut events);
            // Fails if it was not that: the server has set it not to wait.
            let _ = self.call.read();
        }
    }

    /// Carries a request out: its outcome, and what was read.
    ///
    /// # Errors
    /// It takes too long.
    pub fn run(&mut self, request: &Request) -> io::Result<(u8, Vec<u8>)> {
        let slot = self.add(request);
        self.tell();
        loop {
            if !self.wait(PATIENCE) {
                return Err(other("no answer"));
            }
            while let Some((head, _)) = self.take() {
                let (ended, outcome) = self.end(head);
                if ended == slot {
                    return Ok((outcome, self.read(slot)));
                }
            }
        }
    }
}
