//! What goes wrong with a disk on purpose.

use fuser::Errno;
use std::ops::Range;
use std::time::Duration;

/// What can be cut short is cut at a multiple of this, so that direct I/O can go on behind it.
const GRANULE: usize = 4096;

/// What the kernel asks of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    Sync,
    Punch,
    Allocate,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy)]
pub enum Effect {
    /// It fails, and is not done.
    Fail(Errno),
    /// Half of the bytes are moved.
    Short,
    /// It takes so long until it is done.
    Delay(Duration),
}

/// A rule: which requests, and what becomes of them. Of all rules that match each applies.
#[derive(Debug, Clone)]
pub struct Rule {
    pub operations: &'static [Operation],
    pub effect: Effect,
    /// Bytes that a request touches, anywhere by default. A sync touches all.
    pub within: Range<u64>,
    /// Of those that match, so many are hit.
    pub chance: f64,
    /// How many more it hits at most.
    pub left: u64,
}

/// A request, and what is decided about it.
pub struct Asked {
    /// Things that were done before it came.
    pub begun: usize,
    pub delay: Duration,
    pub error: Option<Errno>,
    /// Bytes that are moved at most.
    pub length: usize,
}

impl Rule {
    pub fn new(operations: &'static [Operation], effect: Effect) -> Self {
        Self { operations, effect, within: 0..u64::MAX, chance: 1.0, left: u64::MAX }
    }

    /// Adds its effect on such a request; whether it has one.
    pub fn apply(
        &mut self,
        (operation, offset): (Operation, u64),
        asked: &mut Asked,
        random: &mut fastrand::Rng,
    ) -> bool {
        let touches = operation == Operation::Sync
            || offset < self.within.end && self.within.start < offset + asked.length as u64;
        if !self.operations.contains(&operation) || !touches || self.left == 0 {
            return false;
        }
        if random.f64() >= self.chance {
            return false;
        }
        match self.effect {
            Effect::Fail(error) => asked.error = asked.error.or(Some(error)),
            Effect::Delay(time) => asked.delay += time,
            Effect::Short if asked.length <= GRANULE => return false,
            Effect::Short => {
                asked.length = (asked.length / 2 / GRANULE * GRANULE).max(GRANULE);
            }
        }
        self.left -= 1;
        true
    }
}
