//! A disk in memory with a volatile cache, faults on request, and crash images.
//!
//! Everything it does follows from its seed and the calls made, so a single-threaded history
//! repeats itself exactly. Content is kept in 4 KiB blocks behind `Arc`s: cloning a disk of
//! megabytes copies a few pointers, and a crash image shares all but the blocks it changes.

mod blocks;
mod contents;
mod crash;
mod fault;

pub use crash::CrashMode;
pub use fault::{Counts, Faults, is_stop};

use crate::lock;
use blocks::{Blocks, garbage};
use contents::Contents;
use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use fault::{Verdict, stop_error};
use std::cell::RefCell;
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

struct State {
    contents: Contents,
    counts: Counts,
    faults: Faults,
    stopped: bool,
    captures: Vec<Contents>,
    rng: fastrand::Rng,
    pause: Option<Arc<crate::pause::Gate>>,
    after_write: Option<Hook>,
    in_flush: Option<Hook>,
    after_read: Option<(u64, Hook)>,
    wronged: Option<Wronged>,
}

/// A write that was lost, or done elsewhere: where it was to go, and where it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wronged {
    /// Byte that it was to begin at.
    pub at: u64,
    /// Byte that it began at; none if it was lost.
    pub instead: Option<u64>,
}

/// What is done in the middle of something else.
type Hook = Box<dyn FnOnce() + Send>;

/// What is done about a read, before it and after it.
type AboutRead = Box<dyn FnMut()>;

thread_local! {
    /// What the calling thread does about its next read, and from which byte on it must be.
    static AT_READ: RefCell<Option<(u64, AboutRead)>> = const { RefCell::new(None) };
}

/// Calls this before and after the next batch of reads of the calling thread that all begin at this byte or
/// behind it, on any disk.
pub fn at_next_read(from: u64, hook: impl FnMut() + 'static) {
    AT_READ.set(Some((from, Box::new(hook))));
}

/// What is to be done about this batch of reads.
fn due_at_read(requests: &[ReadRequest<'_>]) -> Option<AboutRead> {
    let first = requests.iter().map(|request| request.offset).min()?;
    let due = AT_READ.with_borrow_mut(|at| at.take_if(|(from, _)| *from <= first));
    due.map(|(_, hook)| hook)
}

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
                in_flush: None,
                after_read: None,
                wronged: None,
            }),
        }
    }

    /// Where the blocks that do not tear begin: the start of the data region, known after init.
    pub fn set_atomic_from(&self, offset: u64) {
        lock(&self.state).contents.medium.atomic_from = offset;
    }

    /// From now on what failed flushes have lost reads as what is stored.
    pub fn forget_lost(&self) {
        lock(&self.state).contents.forget_lost();
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

    /// The write that the plan made go wrong.
    #[must_use]
    pub fn wronged(&self) -> Option<Wronged> {
        lock(&self.state).wronged
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

    /// As [`SimDisk::after_write`], amid the next flush: what the hook writes is not part of that.
    pub fn in_flush(&self, hook: impl FnOnce() + Send + 'static) {
        lock(&self.state).in_flush = Some(Box::new(hook));
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

    /// Which write comes next: a flush that begins now does not cover it.
    #[must_use]
    pub fn mark(&self) -> u64 {
        lock(&self.state).contents.next_write
    }

    /// A flush that began at this mark ends.
    ///
    /// # Errors
    /// As of any flush.
    pub fn flush_from(&self, mark: u64) -> io::Result<()> {
        let mut state = lock(&self.state);
        state.counts.flushes += 1;
        let verdict = state.before_change();
        state.end_flush(verdict, mark)
    }

    fn wait_at_gate(&self) {
        let gate = lock(&self.state).pause.clone();
        if let Some(gate) = gate {
            gate.pass_change();
        }
    }
}

impl Storage for SimDisk {
    fn size_bytes(&self) -> u64 {
        lock(&self.state).contents.size
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        let mut about = due_at_read(requests);
        if let Some(before) = &mut about {
            before();
        }
        let mut state = lock(&self.state);
        for request in requests {
            state.check_range(request.offset, request.buf.len() as u64)?;
            state.before_read(request.offset, request.buf.len() as u64)?;
            state.contents.read(request.offset, request.buf);
        }
        let hook = state.due_after_read();
        let gate = state.pause.clone();
        drop(state);
        if let Some(hook) = hook {
            hook();
        }
        if let Some(gate) = gate {
            gate.pass_read();
        }
        if let Some(after) = &mut about {
            after();
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
        let verdict = state.before_change();
        // It promises nothing of what is written from here on, while it runs.
        let asked = state.contents.next_write;
        if let Some(hook) = state.in_flush.take() {
            drop(state);
            hook();
            state = lock(&self.state);
        }
        state.end_flush(verdict, asked)
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
        self.wait_at_gate();
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
        self.wait_at_gate();
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

    /// A flush of what was written before the write of this number ends.
    fn end_flush(&mut self, verdict: Verdict, until: u64) -> io::Result<()> {
        match verdict {
            Verdict::Go if self.faults.forget_flush_at == Some(self.counts.flushes) => Ok(()),
            Verdict::Go => {
                self.contents.flush(until);
                Ok(())
            }
            Verdict::Stop => Err(stop_error()),
            Verdict::Fail(error) => {
                let mut rng = self.rng.fork();
                self.contents.fail_flush(&mut rng);
                Err(error)
            }
        }
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
            self.wronged = Some(Wronged { at: offset, instead: None });
            return Ok(());
        }
        let mut place = offset;
        if self.faults.misdirect_at == Some(self.counts.writes) {
            let last = (self.contents.size - buf.len() as u64) / BLOCK as u64;
            place = self.rng.u64(0..=last) * BLOCK as u64 + offset % BLOCK as u64;
            if place + buf.len() as u64 > self.contents.size {
                place = offset % BLOCK as u64;
            }
            self.wronged = Some(Wronged { at: offset, instead: Some(place) });
        }
        self.contents.write(place, buf);
        Ok(())
    }
}
