//! Which test runs on what, and what is made ready for it.

use super::catalog::{AFTER_SNAPSHOT, FIRST_WRITE, Group, Operation, Pattern, TESTS, Test};
use super::cpu::Cpu;
use super::load::{self, Load, Queue, Subject, interrupted, stamp};
use super::report::Measurement;
use dbs_core::io::queue::Action;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, Result, format_size};
use fastrand::Rng;
use std::time::Duration;

/// Shortest target: large requests in flight must not overlap.
pub const LENGTH_MIN_BYTES: u64 = 16 << 20;
/// Of a volume on which chains are built.
const CHAIN_LENGTH_BYTES: u64 = 64 << 20;
/// What each snapshot of a chain adds: so many ranges ...
const LAYER_RANGES: u64 = 2;
/// ... of the size of an extent ...
const LAYER_RANGE_BYTES: u64 = 1 << 20;
/// ... in each of which so many blocks are written.
const LAYER_BLOCKS: u64 = 32;
/// Requests in flight, and bytes of each, while a target is filled.
const FILL: (u32, u32) = (8, 1 << 20);

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// The tests.
    pub tests: Vec<&'static Test>,
    /// How long each takes.
    pub time: Duration,
    /// Requests in flight, where a test does not say otherwise.
    pub depth: u32,
    /// Of offsets and contents.
    pub seed: u64,
    /// Bytes of the target that requests go to.
    pub length: u64,
}

/// Where a store can make a volume for a while: the temporary one, of which there is one at a time.
pub trait Ground {
    /// Makes it, with so many bytes.
    ///
    /// # Errors
    /// Those of the store, here and below.
    fn create(&self, length: u64) -> Result<()>;

    /// Opens it.
    fn open(&self) -> Result<Box<dyn Subject + '_>>;

    /// Takes a snapshot of it.
    fn snapshot(&self, name: &str) -> Result<()>;

    /// Deletes it with its snapshots, and waits until their space is free again.
    ///
    /// # Errors
    /// As above; what remains then is named.
    fn delete(&self) -> Result<()>;

    /// What the store has room for.
    fn room(&self) -> Result<Room>;
}

/// What a store has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes in free extents.
    pub bytes: u64,
    /// Snapshots, heads included.
    pub snapshots: u64,
}

/// How far a run is.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// The test, or the one that is being prepared.
    pub test: &'static str,
    /// Which one it is, counted from 1.
    pub number: usize,
    /// How many there are.
    pub total: usize,
    /// How long it has run; `None` while it is prepared.
    pub elapsed: Option<Duration>,
}

/// Runs tests.
pub struct Runner<'a> {
    options: Options,
    cpu: Option<Cpu>,
    watch: &'a mut dyn FnMut(&Moment) -> bool,
    results: Vec<Measurement>,
}

impl<'a> Runner<'a> {
    /// A runner that takes the CPU time of a process, and asks `watch` now and then whether to go
    /// on.
    ///
    /// # Errors
    /// `Invalid` if there is nothing to run, or too little to run it on.
    pub fn new(
        options: Options,
        cpu: Option<Cpu>,
        watch: &'a mut dyn FnMut(&Moment) -> bool,
    ) -> Result<Self> {
        if options.tests.is_empty() {
            return Err(Error::invalid("no test was chosen"));
        }
        if options.length < LENGTH_MIN_BYTES {
            return Err(Error::invalid(format!(
                "the target is too small: {} where the tests need at least {}",
                format_size(options.length),
                format_size(LENGTH_MIN_BYTES)
            )));
        }
        Ok(Self { options, cpu, watch, results: Vec::new() })
    }

    /// The results, in the order of the catalog.
    #[must_use]
    pub fn finish(mut self) -> Vec<Measurement> {
        let place = |m: &Measurement| TESTS.iter().position(|test| test.name == m.name);
        self.results.sort_by_key(place);
        self.results
    }

    /// Runs what can run on something that is there already; it is written only if `write` says
    /// that its content may be lost.
    ///
    /// # Errors
    /// `Invalid` if nothing of what was chosen can run; those of the subject; `Interrupted`.
    pub fn on_existing(&mut self, subject: &dyn Subject, write: bool) -> Result<()> {
        let mut possible = Vec::new();
        for test in self.options.tests.clone() {
            match obstacle(test, subject, write) {
                None => possible.push(test),
                Some(why) => self.skip(test, why),
            }
        }
        let Some(first) = possible.first() else {
            let why = self.results.first().and_then(|result| result.skipped.clone());
            let why = why.unwrap_or_default();
            return Err(Error::invalid(format!("nothing of this can run here: {why}")));
        };
        if possible.iter().any(|test| test.writes()) {
            self.fill(first, subject, self.options.length)?;
        }
        possible.into_iter().try_for_each(|test| self.measure(test, subject, self.options.length))
    }

    /// Runs everything on temporary volumes of a store.
    ///
    /// # Errors
    /// `NoSpace` if there is no room for them; those of the store; `Interrupted`. The volume is
    /// deleted whatever happens.
    pub fn on_store(&mut self, ground: &dyn Ground) -> Result<()> {
        let of = |groups: &[Group]| -> Vec<&'static Test> {
            let chosen = self.options.tests.iter().copied();
            chosen.filter(|test| groups.contains(&test.group)).collect()
        };
        let matrix = of(&[Group::Iops, Group::Bandwidth, Group::Latency, Group::Flush]);
        let (space, chain) = (of(&[Group::Space]), of(&[Group::Chain]));
        self.check_room(ground, &matrix, &space)?;
        let length = self.options.length;
        if let Some(first) = matrix.first() {
            self.stage(ground, length, |this| {
                let subject = &*ground.open()?;
                this.fill(first, subject, length)?;
                matrix.iter().try_for_each(|test| this.measure(test, subject, length))
            })?;
        }
        if !space.is_empty() {
            self.stage(ground, length, |this| this.space(ground, &space))?;
        }
        if chain.is_empty() {
            return Ok(());
        }
        let length = length.min(CHAIN_LENGTH_BYTES);
        self.stage(ground, length, |this| this.chain(ground, &chain, length))
    }

    fn check_room(&self, ground: &dyn Ground, matrix: &[&Test], space: &[&Test]) -> Result<()> {
        let snapshot = space.iter().any(|test| test.name == AFTER_SNAPSHOT);
        let volumes = match (snapshot, matrix.is_empty() && space.is_empty()) {
            (true, _) => 2,
            (false, false) => 1,
            (false, true) => 0,
        };
        let length = self.options.length;
        let (needed, free) = (length.saturating_mul(volumes), ground.room()?.bytes);
        if needed <= free {
            return Ok(());
        }
        Err(Error::no_space(format!(
            "the tests need {} in the store, of which {} are free: choose a smaller --size (now \
             {}), or fewer tests with --only",
            format_size(needed),
            format_size(free),
            format_size(length)
        )))
    }

    /// Runs `body` with a temporary volume.
    fn stage(
        &mut self,
        ground: &dyn Ground,
        length: u64,
        body: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        ground.create(length)?;
        let result = body(self);
        match (result, ground.delete()) {
            (Err(error), Err(kept)) => Err(error.context(kept)),
            (result, deleted) => result.and(deleted),
        }
    }

    /// The same writes where nothing is, where the volume's own blocks are, and where those are a
    /// snapshot's.
    fn space(&mut self, ground: &dyn Ground, tests: &[&'static Test]) -> Result<()> {
        let length = self.options.length;
        let subject = &*ground.open()?;
        let mut filled = false;
        for test in tests {
            if test.name != FIRST_WRITE && !filled {
                self.fill(test, subject, length)?;
                filled = true;
            }
            if test.name == AFTER_SNAPSHOT {
                ground.snapshot("bench")?;
            }
            self.measure(test, subject, length)?;
        }
        Ok(())
    }

    /// Reads through more and more snapshots, each of which holds some blocks.
    fn chain(&mut self, ground: &dyn Ground, tests: &[&'static Test], length: u64) -> Result<()> {
        let subject = &*ground.open()?;
        let mut random = Rng::with_seed(self.options.seed);
        let (mut depth, mut filled) = (1, false);
        for test in tests {
            let wanted = test.chain_depth.unwrap_or(1);
            let more = u64::from(wanted - depth);
            let data = more * LAYER_RANGES * LAYER_RANGE_BYTES;
            let data = data + if filled { 0 } else { length };
            let room = ground.room()?;
            if room.snapshots < more {
                let text = format!("the store has room for {} more snapshots only", room.snapshots);
                self.skip(test, text);
                continue;
            }
            if room.bytes < data {
                let (data, free) = (format_size(data), format_size(room.bytes));
                self.skip(test, format!("it needs {data} in the store, of which {free} are free"));
                continue;
            }
            if !filled {
                self.fill(test, subject, length)?;
                filled = true;
            }
            while depth < wanted {
                self.tell(test, None)?;
                ground.snapshot(&format!("layer-{depth}"))?;
                write_layer(subject, length, &mut random)?;
                depth += 1;
            }
            self.measure(test, subject, length)?;
        }
        Ok(())
    }

    /// Writes everything once, so that reads find data and writes find blocks.
    fn fill(&mut self, test: &'static Test, subject: &dyn Subject, length: u64) -> Result<()> {
        let (depth, block) = FILL;
        let load = Load {
            pattern: Pattern::SequentialOnce,
            operation: Operation::Write,
            block,
            depth,
            // Whole requests: a shorter rest is not used either.
            length,
            time: None,
            most: None,
            seed: self.options.seed,
        };
        self.run(test, &load, subject, false)?;
        if subject.refuses_flushes().is_some() {
            return Ok(());
        }
        let mut queues = subject.queues(1, BLOCK_BYTES as u32)?;
        let Some(queue) = queues.first_mut() else { return Ok(()) };
        queue.start(0, Action::Flush, 0, 0)?;
        queue.finish(&mut Vec::new())
    }

    fn measure(&mut self, test: &'static Test, subject: &dyn Subject, length: u64) -> Result<()> {
        let depth = self.options.depth;
        let load = Load {
            pattern: test.pattern,
            operation: test.operation,
            block: test.block,
            depth: test.depth(depth),
            length,
            time: Some(self.options.time),
            most: None,
            seed: self.options.seed,
        };
        let before = self.cpu.and_then(|cpu| cpu.used());
        let outcome = self.run(test, &load, subject, true)?;
        let after = self.cpu.and_then(|cpu| cpu.used());
        let cpu = before.zip(after).map(|(before, after)| after.saturating_sub(before));
        self.results.push(Measurement::of(test, depth, &outcome, cpu));
        Ok(())
    }

    fn run(
        &mut self,
        test: &'static Test,
        load: &Load,
        subject: &dyn Subject,
        measured: bool,
    ) -> Result<load::Outcome> {
        self.tell(test, None)?;
        let mut moment = self.moment(test);
        load::run(load, subject, &mut |elapsed| {
            moment.elapsed = measured.then_some(elapsed);
            (self.watch)(&moment)
        })
    }

    /// Tells that a test is being prepared; an error if it shall not be.
    fn tell(&mut self, test: &'static Test, elapsed: Option<Duration>) -> Result<()> {
        let moment = Moment { elapsed, ..self.moment(test) };
        if (self.watch)(&moment) { Ok(()) } else { Err(interrupted()) }
    }

    fn moment(&self, test: &'static Test) -> Moment {
        let (number, total) = (self.results.len() + 1, self.options.tests.len());
        Moment { test: test.name, number, total, elapsed: None }
    }

    fn skip(&mut self, test: &Test, why: String) {
        self.results.push(Measurement::skipped(test, self.options.depth, why));
    }
}

/// Why a test cannot run on something that is there already, if so.
fn obstacle(test: &Test, subject: &dyn Subject, write: bool) -> Option<String> {
    if test.needs_store() {
        return Some(
            "not possible on this target: only on a store, which can make volumes and \
                     snapshots for it"
                .to_owned(),
        );
    }
    if !test.writes() {
        return None;
    }
    let text = |why| format!("not possible on this target: {why}");
    if let Some(why) = subject.refuses_writes() {
        return Some(text(why));
    }
    if !write {
        return Some("it would destroy what is there: allow that with --write".to_owned());
    }
    let flushes = test.operation == Operation::WriteFlush;
    subject.refuses_flushes().filter(|_| flushes).map(text)
}

/// Writes some blocks here and there, as an hour of use between two snapshots might.
fn write_layer(subject: &dyn Subject, length: u64, random: &mut Rng) -> Result<()> {
    let block = BLOCK_BYTES as u32;
    let mut queues = subject.queues(LAYER_BLOCKS as u32, block)?;
    let Some(queue) = queues.first_mut() else { return Ok(()) };
    let ranges = (length / LAYER_RANGE_BYTES).max(1);
    for _ in 0..LAYER_RANGES {
        let start = random.u64(..ranges) * LAYER_RANGE_BYTES;
        let mut blocks: Vec<u64> = (0..LAYER_RANGE_BYTES / BLOCK_BYTES).collect();
        random.shuffle(&mut blocks);
        blocks.truncate(LAYER_BLOCKS as usize);
        let offsets: Vec<_> = blocks.iter().map(|index| start + index * BLOCK_BYTES).collect();
        write_all(&mut **queue, &offsets, random)?;
    }
    Ok(())
}

/// Writes one block at each offset.
fn write_all(queue: &mut dyn Queue, offsets: &[u64], random: &mut Rng) -> Result<()> {
    let mut idle: Vec<usize> = (0..queue.slots()).collect();
    let mut waiting = offsets.iter();
    let mut left = offsets.len();
    while left > 0 {
        while let Some(slot) = idle.pop() {
            let Some(offset) = waiting.next() else { break };
            let buf = queue.buffer(slot)?;
            random.fill(buf);
            stamp(buf, random.u64(..));
            queue.start(slot, Action::Write, *offset, BLOCK_BYTES as u32)?;
        }
        let mut done = Vec::new();
        queue.finish(&mut done)?;
        left -= done.len().min(left);
        idle.append(&mut done);
    }
    Ok(())
}
