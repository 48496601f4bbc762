//! Runs histories from seeds, repeats them, and makes the failing ones short.

use crate::generate::Generator;
use crate::machine::{Config, Machine};
use crate::op::Op;
use crate::step::{Fate, Stats, Step};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Steps of an ordinary history.
pub const STEPS: usize = 60;
/// Steps of a history of trees.
pub const TREE_STEPS: usize = 200;
/// Replays that shortening a failure may take.
const SHRINK_RUNS: usize = 2000;

/// A history that ended in something that must not be.
pub struct Failure {
    /// Seed it came from.
    pub seed: u64,
    /// The machine it ran on.
    pub config: Config,
    /// It came from a history of trees.
    pub trees: bool,
    /// Steps up to and with the failing one.
    pub steps: Vec<Step>,
    /// What was wrong.
    pub message: String,
    /// What had been done.
    pub stats: Stats,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} failed at step {}: {}", self.seed, self.steps.len(), self.message)?;
        for (i, step) in self.steps.iter().enumerate() {
            writeln!(f, "{:4} {:?} {:?} seed {:#x}", i + 1, step.op, step.fate, step.seed)?;
        }
        if self.config.tears {
            // The command has no option for such a medium.
            return write!(f, "replay: run the test again");
        }
        let trees = if self.trees { " --trees" } else { "" };
        write!(f, "replay: cargo run --release -p dbs-sim -- run --seed {}{trees}", self.seed)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Runs the history of `seed`, `steps` steps long.
///
/// # Errors
/// The failure, with the steps that led to it.
pub fn run(seed: u64, steps: usize) -> Result<Stats, Box<Failure>> {
    run_on(&Generator::config(seed), steps)
}

/// Runs the history of the seed in `config` on a machine built from it.
///
/// # Errors
/// The failure, with the steps that led to it.
pub fn run_on(config: &Config, steps: usize) -> Result<Stats, Box<Failure>> {
    let seed = config.seed;
    let mut generator = Generator::new(seed);
    let mut done = Vec::with_capacity(steps);
    let next = |machine: &Machine, done: usize| {
        let step = (done < steps).then(|| generator.step(&machine.model))?;
        // What a layer holds is known by whole blocks.
        let layers = config.tears && matches!(step.op, Op::Rebuilding { .. });
        Some(if layers { Step { op: Op::Flush, ..step } } else { step })
    };
    drive(config, next, &mut done).map_err(|(message, stats)| {
        let config = config.clone();
        Box::new(Failure { seed, config, trees: false, steps: done, message, stats })
    })
}

/// Runs a history without crashes, `steps` steps long, about trees that change under handles and reads.
///
/// # Errors
/// The failure, with the steps that led to it.
pub fn run_trees(seed: u64, steps: usize) -> Result<Stats, Box<Failure>> {
    let mut generator = Generator::trees(seed);
    let mut config = Generator::config(seed);
    // What is freed is soon used again.
    config.init.size = Some(24 * config.init.extent_size + (1 << 20));
    let mut done = Vec::with_capacity(steps);
    let next =
        |machine: &Machine, done: usize| (done < steps).then(|| generator.step(&machine.model));
    drive(&config, next, &mut done).map_err(|(message, stats)| {
        Box::new(Failure { seed, config, trees: true, steps: done, message, stats })
    })
}

/// Runs the given steps on the machine of `seed`.
///
/// # Errors
/// The failure, with the steps that led to it.
pub fn replay(seed: u64, steps: &[Step]) -> Result<Stats, Box<Failure>> {
    replay_on(&Generator::config(seed), steps)
}

/// Runs the given steps on a machine built from `config`.
///
/// # Errors
/// The failure, with the steps that led to it.
pub fn replay_on(config: &Config, steps: &[Step]) -> Result<Stats, Box<Failure>> {
    let mut done = Vec::with_capacity(steps.len());
    drive(config, |_, i| steps.get(i).cloned(), &mut done).map_err(|(message, stats)| {
        let (seed, config) = (config.seed, config.clone());
        Box::new(Failure { seed, config, trees: false, steps: done, message, stats })
    })
}

fn drive(
    config: &Config,
    mut next: impl FnMut(&Machine, usize) -> Option<Step>,
    done: &mut Vec<Step>,
) -> Result<Stats, (String, Stats)> {
    let mut stats = Stats::default();
    let history = AssertUnwindSafe(|| -> Result<(), String> {
        let mut machine = Machine::new(config)?;
        while let Some(step) = next(&machine, done.len()) {
            done.push(step.clone());
            let result = machine.step(&step);
            stats = machine.stats;
            result?;
        }
        machine.end_poisoned(&mut fastrand::Rng::with_seed(config.seed))?;
        machine.verify()?;
        machine.drain()
    });
    match catch_unwind(history) {
        Ok(Ok(())) => Ok(stats),
        Ok(Err(message)) => Err((message, stats)),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            Err((format!("panic: {}", text.unwrap_or("without a text")), stats))
        }
    }
}

/// Leaves out what the failure does not need: steps, and what happened during them.
#[must_use]
pub fn shrink(failure: Box<Failure>) -> Box<Failure> {
    let trees = failure.trees;
    let mut best = failure;
    let mut runs = 0;
    let mut size = best.steps.len().div_ceil(2);
    while size > 0 && runs < SHRINK_RUNS {
        let mut shorter = false;
        let mut start = 0;
        while start < best.steps.len() && runs < SHRINK_RUNS {
            let mut steps = best.steps.clone();
            steps.drain(start..(start + size).min(steps.len()));
            runs += 1;
            match replay_on(&best.config, &steps) {
                Err(failure) if failure.steps.len() < best.steps.len() => {
                    best = failure;
                    shorter = true;
                }
                _ => start += size,
            }
        }
        if !shorter || size > 1 {
            size /= 2;
        }
    }
    best = calm(best);
    // The seed is still that of the whole history.
    best.trees = trees;
    best
}

fn calm(mut best: Box<Failure>) -> Box<Failure> {
    for i in (0..best.steps.len()).rev() {
        let mut steps = best.steps.clone();
        if let Some(step) = steps.get_mut(i) {
            step.fate = Fate::Calm;
        }
        if let Err(failure) = replay_on(&best.config, &steps) {
            best = failure;
        }
    }
    best
}

impl Machine {
    /// Deletes everything and works until nothing remains: all space must come back.
    ///
    /// # Errors
    /// What remains.
    pub fn drain(&mut self) -> Result<(), String> {
        let mut ops = vec![Op::ReadEnd, Op::Stop];
        for vol in 0..crate::op::VOLUMES {
            let Ok(volume) = self.model.volume_mut(vol) else { continue };
            if volume.held {
                ops.push(Op::Hold { vol });
            }
            for snap in 0..crate::op::SNAPSHOTS {
                let name = crate::op::snapshot_name(snap);
                if volume.snapshots.get(&name).is_some_and(|s| s.protected) {
                    ops.push(Op::Protect { vol, snap, on: false });
                }
            }
            ops.push(Op::DeleteVolume { vol });
        }
        for op in ops {
            self.step(&Step { op, fate: Fate::Calm, seed: 0 })?;
        }
        for _ in 0..10_000 {
            let report = self.store().work(64).map_err(|e| format!("work: {e}"))?;
            if report.remaining == 0 {
                break;
            }
        }
        self.store().flush().map_err(|e| format!("flush: {e}"))?;
        let info = self.store().info();
        if info.allocated != 0 || info.snapshots != 0 || info.extents_free != info.extents_total {
            return Err(format!("an empty store still holds space: {info:?}"));
        }
        self.verify()
    }
}
