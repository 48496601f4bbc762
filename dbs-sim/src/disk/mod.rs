//! A disk in memory with a volatile cache, faults on request, and crash images.
//!
//! Everything it does follows from its seed and the calls made, so a single-threaded history
//! repeats itself exactly. Content is kept in 4 KiB blocks behind `Arc`s: cloning a disk of
//! megabytes copies a few pointers, and a crash image shares all but the blocks it changes.

mod blocks;
mod crash;
mod fault;

pub use crash::CrashMode;
pub use fault::{Counts, Faults, is_stop};

use crate::lock;
use blocks::{Block, Blocks, SECTORS, garbage};
use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use fault::{Verdict, enospc, stop_error};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

/// Bytes in a block of the disk.
pub const BLOCK: usize = blocks::BLOCK;

/// What the medium is like.
#[derive(Debug, Clone)]
pub struct Medium {
    /// Size in bytes.
    pub size: u64,
    /// Filled with garbage at first, as a used device is; else a sparse file that reads as zeros.
    pub garbage: bool,
    /// From this offset on, the part of a write that falls into one aligned 4 KiB block is kept
    /// or lost as a whole. Before it, every 512-byte sector is on its own.
    pub atomic_from: u64,
    /// Blocks the file system below can still give to holes; `None` for no limit.
    pub room: Option<u64>,
}

impl Medium {
    /// A sparse file of `size` bytes whose blocks may all tear.
    #[must_use]
    pub fn file(size: u64) -> Self {
        Self { size, garbage: false, atomic_from: u64::MAX, room: None }
    }
}

/// The simulated disk.
pub struct SimDisk {
    state: Mutex<State>,
}

/// A part of a write, or of a discard, that falls into one block, not yet flushed.
#[derive(Clone)]
struct Piece {
    /// Number of the write it is part of; later writes have higher ones.
    write: u64,
    /// Sectors it covers, one bit each.
    sectors: u8,
    /// The new bytes of those sectors.
    bytes: Arc<Block>,
}

/// A block as the cache has it.
#[derive(Clone)]
struct Cached {
    newest: Arc<Block>,
    /// What a flush makes durable; empty after a failed flush lost it.
    pieces: Vec<Piece>,
}

/// What is on the disk and in its cache: all that a crash needs.
#[derive(Clone)]
struct Contents {
    durable: Blocks,
    cache: BTreeMap<u64, Cached>,
    size: u64,
    durable_size: u64,
    medium: Medium,
    next_write: u64,
}

struct State {
    contents: Contents,
    counts: Counts,
    faults: Faults,
    stopped: bool,
    captures: Vec<Contents>,
    rng: fastrand::Rng,
    pause: Option<Arc<crate::pause::Gate>>,
    after_write: Option<Hook>,
    after_read: Option<(u64, Hook)>,
}

/// What is done in the middle of something else.
type Hook = Box<dyn FnOnce() + Send>;

impl SimDisk {
    /// An empty disk.
    #[must_use]
    pub fn new(medium: Medium, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let blocks = medium.size.div_ceil(BLOCK as u64);
        let durable = Blocks::new(blocks, || medium.garbage.then(|| garbage(&mut rng)));
        let size = medium.size;
        let contents = Contents {
            durable,
            cache: BTreeMap::new(),
            size,
            durable_size: size,
            medium,
            next_write: 0,
        };
        Self::from_contents(contents, rng.u64(..))
    }

    fn from_contents(contents: Contents, seed: u64) -> Self {
        Self {
            state: Mutex::new(State {
                contents,
                counts: Counts::default(),
                faults: Faults::default(),
                stopped: false,
                captures: Vec::new(),
                rng: fastrand::Rng::with_seed(seed),
                pause: None,
                after_write: None,
                after_read: None,
            }),
        }
    }

    /// Where the blocks that do not tear begin: the start of the data region, known after init.
    pub fn set_atomic_from(&self, offset: u64) {
        lock(&self.state).contents.medium.atomic_from = offset;
    }

    /// Plans faults, counted from now; replaces an earlier plan and its captures.
    pub fn arm(&self, faults: Faults) {
        let mut state = lock(&self.state);
        state.faults = faults;
        state.counts = Counts::default();
        state.captures.clear();
    }

    /// Operations since [`SimDisk::arm`].
    #[must_use]
    pub fn counts(&self) -> Counts {
        lock(&self.state).counts
    }

    /// From now on every operation fails: the process that issued them is dead.
    pub fn stop(&self) {
        lock(&self.state).stopped = true;
    }

    /// Whether the plan has stopped the disk.
    #[must_use]
    pub fn stopped(&self) -> bool {
        lock(&self.state).stopped
    }

    /// Works again after a stop, with all that was issued: only the process had died. Plans are
    /// gone.
    pub fn revive(&self) {
        let mut state = lock(&self.state);
        state.stopped = false;
        state.faults = Faults::default();
    }

    /// A disk of its own with the same content, cache included.
    #[must_use]
    pub fn fork(&self) -> Self {
        let mut state = lock(&self.state);
        let seed = state.rng.u64(..);
        Self::from_contents(state.contents.clone(), seed)
    }

    /// What a power loss now could leave.
    #[must_use]
    pub fn crash_image(&self, rng: &mut fastrand::Rng, mode: CrashMode) -> Self {
        let image = lock(&self.state).contents.crash(rng, mode);
        Self::from_contents(image, rng.u64(..))
    }

    /// The moments that the plan asked to capture, as disks before a power loss.
    #[must_use]
    pub fn take_captures(&self) -> Vec<Self> {
        let captures = std::mem::take(&mut lock(&self.state).captures);
        captures.into_iter().map(|contents| Self::from_contents(contents, 0)).collect()
    }

    /// Changes one bit of the durable content, as a medium going bad does.
    pub fn flip_bit(&self, offset: u64, bit: u8) {
        let mut state = lock(&self.state);
        let index = offset / BLOCK as u64;
        let at = (offset % BLOCK as u64) as usize;
        let mut block = *state.contents.durable.read(index);
        block[at] ^= 1 << (bit & 7);
        state.contents.durable.set(index, Arc::new(block));
    }

    /// Whether anything waits for a flush.
    #[must_use]
    pub fn dirty(&self) -> bool {
        !lock(&self.state).contents.cache.is_empty()
    }

    /// Holds operations at a gate, for tests of interleaving threads.
    pub fn set_gate(&self, gate: Option<Arc<crate::pause::Gate>>) {
        lock(&self.state).pause = gate;
    }

    /// Calls this once, when the next batch of writes has reached the cache and before whoever issued
    /// it knows: another call can be put exactly there, on the same thread.
    pub fn after_write(&self, hook: impl FnOnce() + Send + 'static) {
        lock(&self.state).after_write = Some(Box::new(hook));
    }

    /// As [`SimDisk::after_write`], when the `nth` batch of reads from now has been answered, counted from
    /// 1.
    pub fn after_read(&self, nth: u64, hook: impl FnOnce() + Send + 'static) {
        lock(&self.state).after_read = Some((nth, Box::new(hook)));
    }

    /// Whether what [`SimDisk::after_read`] was given has still to be called.
    #[must_use]
    pub fn awaits_read(&self) -> bool {
        lock(&self.state).after_read.is_some()
    }

    fn wait_at_gate(&self) {
        let gate = lock(&self.state).pause.clone();
        if let Some(gate) = gate {
            gate.pass();
        }
    }
}

impl Storage for SimDisk {
    fn size_bytes(&self) -> u64 {
        lock(&self.state).contents.size
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        let mut state = lock(&self.state);
        for request in requests {
            state.check_range(request.offset, request.buf.len() as u64)?;
            state.before_read(request.offset, request.buf.len() as u64)?;
            state.contents.read(request.offset, request.buf);
        }
        let hook = state.due_after_read();
        drop(state);
        if let Some(hook) = hook {
            hook();
        }
        Ok(())
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        self.wait_at_gate();
        let mut state = lock(&self.state);
        for request in requests {
            state.check_range(request.offset, request.buf.len() as u64)?;
        }
        let mut order: Vec<&WriteRequest<'_>> = requests.iter().collect();
        if requests.len() > 1 && state.faults.planned() {
            state.rng.shuffle(&mut order);
        }
        let written = order.into_iter().try_for_each(|r| state.write(r.offset, r.buf));
        let hook = state.after_write.take();
        drop(state);
        if let Some(hook) = hook {
            hook();
        }
        written
    }

    fn flush(&self) -> io::Result<()> {
        self.wait_at_gate();
        let mut state = lock(&self.state);
        state.counts.flushes += 1;
        match state.before_change() {
            Verdict::Go => {
                state.contents.flush();
                Ok(())
            }
            Verdict::Stop => Err(stop_error()),
            Verdict::Fail(error) => {
                let mut rng = state.rng.fork();
                state.contents.fail_flush(&mut rng);
                Err(error)
            }
        }
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.wait_at_gate();
        let mut state = lock(&self.state);
        state.check_range(offset, len_bytes)?;
        state.counts.discards += 1;
        state.before_change().into_result()?;
        let mut rng = state.rng.fork();
        state.contents.discard(offset, len_bytes, &mut rng);
        Ok(())
    }

    fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let mut state = lock(&self.state);
        state.check_range(offset, len_bytes)?;
        state.counts.allocates += 1;
        state.before_change().into_result()?;
        state.needs_space()?;
        for index in offset / BLOCK as u64..(offset + len_bytes).div_ceil(BLOCK as u64) {
            if state.contents.is_hole(index) {
                state.contents.take_room()?;
                state.contents.durable.set(index, blocks::zero());
            }
        }
        Ok(())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        let mut state = lock(&self.state);
        state.counts.resizes += 1;
        state.before_change().into_result()?;
        state.contents.set_size(size_bytes);
        Ok(())
    }

    fn driver(&self) -> &'static str {
        "sim"
    }
}

impl State {
    fn check_range(&self, offset: u64, len: u64) -> io::Result<()> {
        if !offset.is_multiple_of(512) || !len.is_multiple_of(512) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at {offset} are not aligned to 512 bytes"),
            ));
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.contents.size => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{len} bytes at {offset} end beyond {}", self.contents.size),
            )),
        }
    }

    fn before_read(&mut self, offset: u64, len: u64) -> io::Result<()> {
        if self.stopped {
            return Err(stop_error());
        }
        self.counts.reads += 1;
        self.faults.check_read(self.counts.reads, offset, len)
    }

    /// What is to be done now that a batch of reads was answered.
    fn due_after_read(&mut self) -> Option<Hook> {
        let (left, _) = self.after_read.as_mut()?;
        *left = left.saturating_sub(1);
        if *left > 0 { None } else { self.after_read.take().map(|(_, hook)| hook) }
    }

    /// Counts a change, captures the moment before it if planned, and says whether it happens.
    fn before_change(&mut self) -> Verdict {
        if self.stopped {
            return Verdict::Stop;
        }
        self.counts.changes += 1;
        if self.faults.captures_at.contains(&self.counts.changes) {
            self.captures.push(self.contents.clone());
        }
        let verdict = self.faults.check_change(self.counts.changes);
        self.stopped = matches!(verdict, Verdict::Stop);
        verdict
    }

    fn needs_space(&mut self) -> io::Result<()> {
        self.counts.space_requests += 1;
        self.faults.check_space(self.counts.space_requests)
    }

    fn write(&mut self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.counts.writes += 1;
        let verdict = self.before_change();
        match verdict {
            Verdict::Go => {}
            Verdict::Stop | Verdict::Fail(_) => {
                // A part of it may have reached the cache: whole blocks, in order.
                let blocks = buf.len().div_ceil(BLOCK);
                let part = (self.rng.usize(0..=blocks) * BLOCK).min(buf.len());
                if self.counts.changes > 0 && part > 0 && !self.contents.any_hole(offset, part) {
                    self.contents.write(offset, &buf[..part]);
                }
                return verdict.into_result();
            }
        }
        if self.contents.any_hole(offset, buf.len()) {
            self.needs_space()?;
            self.contents.fill_holes(offset, buf.len())?;
        }
        if self.faults.lose_at == Some(self.counts.writes) {
            return Ok(());
        }
        let mut place = offset;
        if self.faults.misdirect_at == Some(self.counts.writes) {
            let last = (self.contents.size - buf.len() as u64) / BLOCK as u64;
            place = self.rng.u64(0..=last) * BLOCK as u64 + offset % BLOCK as u64;
            if place + buf.len() as u64 > self.contents.size {
                place = offset % BLOCK as u64;
            }
        }
        self.contents.write(place, buf);
        Ok(())
    }
}

impl Contents {
    fn newest(&self, index: u64) -> &Block {
        match self.cache.get(&index) {
            Some(cached) => &cached.newest,
            None => self.durable.read(index),
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) {
        for part in parts(offset, buf.len()) {
            buf[part.buf].copy_from_slice(&self.newest(part.index)[part.block]);
        }
    }

    fn write(&mut self, offset: u64, buf: &[u8]) {
        let write = self.next_write;
        self.next_write += 1;
        for part in parts(offset, buf.len()) {
            let first = part.block.start / 512;
            let count = part.block.len() / 512;
            let sectors = (((1u16 << count) - 1) << first) as u8;
            let mut bytes = if count == SECTORS { [0; BLOCK] } else { *self.newest(part.index) };
            bytes[part.block].copy_from_slice(&buf[part.buf]);
            self.cache_piece(part.index, Piece { write, sectors, bytes: Arc::new(bytes) });
        }
    }

    /// Adds a piece whose bytes outside its sectors are those of the newest content.
    fn cache_piece(&mut self, index: u64, piece: Piece) {
        let newest = Arc::clone(&piece.bytes);
        let cached = self
            .cache
            .entry(index)
            .or_insert_with(|| Cached { newest: Arc::clone(&newest), pieces: Vec::new() });
        cached.newest = newest;
        cached.pieces.push(piece);
    }

    fn discard(&mut self, offset: u64, len: u64, rng: &mut fastrand::Rng) {
        let write = self.next_write;
        self.next_write += 1;
        let first = offset.div_ceil(BLOCK as u64);
        let end = (offset + len) / BLOCK as u64;
        for index in first..end {
            let bytes = match rng.u8(0..3) {
                0 => continue,
                1 => blocks::zero(),
                _ => garbage(rng),
            };
            self.cache_piece(index, Piece { write, sectors: u8::MAX, bytes });
        }
    }

    fn flush(&mut self) {
        for (index, cached) in std::mem::take(&mut self.cache) {
            if cached.pieces.is_empty() {
                self.cache.insert(index, cached);
            } else {
                self.durable.set(index, cached.newest);
            }
        }
        self.durable_size = self.size;
    }

    /// A flush that failed: some blocks are durable, the others stay readable but are forgotten,
    /// so that no later flush writes them. That is what kernels do.
    fn fail_flush(&mut self, rng: &mut fastrand::Rng) {
        for (index, cached) in &mut self.cache {
            if rng.bool() && !cached.pieces.is_empty() {
                self.durable.set(*index, Arc::clone(&cached.newest));
            }
            cached.pieces.clear();
        }
    }

    fn is_hole(&self, index: u64) -> bool {
        !self.cache.contains_key(&index) && self.durable.is_hole(index)
    }

    fn any_hole(&self, offset: u64, len: usize) -> bool {
        parts(offset, len).any(|part| self.is_hole(part.index))
    }

    fn fill_holes(&mut self, offset: u64, len: usize) -> io::Result<()> {
        if self.medium.room.is_some() {
            for part in parts(offset, len) {
                if self.is_hole(part.index) {
                    self.take_room()?;
                }
            }
        }
        Ok(())
    }

    fn take_room(&mut self) -> io::Result<()> {
        match &mut self.medium.room {
            Some(0) => Err(enospc()),
            Some(room) => {
                *room -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn set_size(&mut self, size: u64) {
        let end = size.div_ceil(BLOCK as u64);
        if size < self.size {
            self.cache.retain(|index, _| *index < end);
        }
        // Blocks beyond a smaller size are cut at the next flush or crash at the latest; nothing
        // reads there meanwhile, and growing again gives zeros.
        self.durable.resize(end, size < self.size);
        self.size = size;
    }
}

/// Where a range falls into one block.
struct Part {
    index: u64,
    block: std::ops::Range<usize>,
    buf: std::ops::Range<usize>,
}

fn parts(offset: u64, len: usize) -> impl Iterator<Item = Part> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let start = (at % BLOCK as u64) as usize;
        let take = (BLOCK - start).min(len - done);
        let part =
            Part { index: at / BLOCK as u64, block: start..start + take, buf: done..done + take };
        done += take;
        Some(part)
    })
}
