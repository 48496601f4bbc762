//! The tests there are.

use serde::Serialize;
use std::ops::RangeInclusive;

/// Chain depths, in layers with the head, at which reading is measured.
pub const CHAIN_DEPTHS: [u32; 4] = [1, 16, 64, 256];
/// Requests in flight that can be asked for.
pub const DEPTHS: RangeInclusive<u32> = 1..=256;
/// Requests in flight by default.
pub const DEPTH: u32 = 32;

const KIB: u32 = 1 << 10;

/// What a test is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// Small requests, many at once.
    Iops,
    /// Large requests.
    Bandwidth,
    /// Small requests, one at a time.
    Latency,
    /// Writes by what is below them: nothing, own blocks, a snapshot's.
    Space,
    /// Writes with a flush each.
    Flush,
    /// Reads below a chain of snapshots.
    Chain,
}

impl Group {
    /// All, in the order of a report.
    pub const ALL: [Self; 6] =
        [Self::Iops, Self::Bandwidth, Self::Latency, Self::Space, Self::Flush, Self::Chain];

    /// Its name on the command line and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iops => "iops",
            Self::Bandwidth => "bandwidth",
            Self::Latency => "latency",
            Self::Space => "space",
            Self::Flush => "flush",
            Self::Chain => "chain",
        }
    }
}

/// Where requests go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Anywhere.
    Random,
    /// One after the other, from the start again at the end.
    Sequential,
    /// Anywhere, each place once.
    RandomOnce,
    /// One after the other, each place once.
    SequentialOnce,
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Write, then flush.
    WriteFlush,
}

/// Requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InFlight {
    /// As many as asked for.
    All,
    /// Half of that, for large requests.
    Half,
    /// So many, whatever was asked for.
    Fixed(u32),
}

/// A kind of load, and where it is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// Its name on the command line and in JSON.
    pub name: &'static str,
    /// What it is about.
    pub group: Group,
    /// Where requests go.
    pub pattern: Pattern,
    /// What they do.
    pub operation: Operation,
    /// Bytes of each.
    pub block: u32,
    in_flight: InFlight,
    /// Layers that are read through.
    pub chain_depth: Option<u32>,
}

impl Test {
    /// Requests in flight if `depth` were asked for.
    #[must_use]
    pub fn depth(&self, depth: u32) -> u32 {
        match self.in_flight {
            InFlight::All => depth,
            InFlight::Half => depth.div_ceil(2),
            InFlight::Fixed(count) => count,
        }
    }

    /// Whether it changes what it runs on.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.operation != Operation::Read
    }

    /// Whether it needs volumes and snapshots of its own to make.
    #[must_use]
    pub fn needs_store(&self) -> bool {
        matches!(self.group, Group::Space | Group::Chain) && self.name != OVERWRITE
    }
}

/// Writes to space that was never written.
pub const FIRST_WRITE: &str = "first-write";
/// Writes to blocks the volume has already.
pub const OVERWRITE: &str = "overwrite";
/// Writes to blocks that a snapshot has just taken over.
pub const AFTER_SNAPSHOT: &str = "after-snapshot";

/// All tests, in the order of a report.
pub const TESTS: [Test; 21] = {
    use InFlight::{All, Fixed, Half};
    use Operation::{Read, Write, WriteFlush};
    use Pattern::{Random, RandomOnce, Sequential};
    [
        test("rand-read-iops", Group::Iops, Random, Read, 4 * KIB, All),
        test("rand-write-iops", Group::Iops, Random, Write, 4 * KIB, All),
        test("seq-read-iops", Group::Iops, Sequential, Read, 4 * KIB, All),
        test("seq-write-iops", Group::Iops, Sequential, Write, 4 * KIB, All),
        test("rand-read-bw", Group::Bandwidth, Random, Read, 128 * KIB, Half),
        test("rand-write-bw", Group::Bandwidth, Random, Write, 128 * KIB, Half),
        test("seq-read-bw", Group::Bandwidth, Sequential, Read, 1024 * KIB, Half),
        test("seq-write-bw", Group::Bandwidth, Sequential, Write, 1024 * KIB, Half),
        test("rand-read-lat", Group::Latency, Random, Read, 4 * KIB, Fixed(1)),
        test("rand-write-lat", Group::Latency, Random, Write, 4 * KIB, Fixed(1)),
        test("seq-read-lat", Group::Latency, Sequential, Read, 4 * KIB, Fixed(1)),
        test("seq-write-lat", Group::Latency, Sequential, Write, 4 * KIB, Fixed(1)),
        test(FIRST_WRITE, Group::Space, RandomOnce, Write, 4 * KIB, All),
        test(OVERWRITE, Group::Space, RandomOnce, Write, 4 * KIB, All),
        test(AFTER_SNAPSHOT, Group::Space, RandomOnce, Write, 4 * KIB, All),
        test("write-flush-1", Group::Flush, Random, WriteFlush, 4 * KIB, Fixed(1)),
        test("write-flush-16", Group::Flush, Random, WriteFlush, 4 * KIB, Fixed(16)),
        chain("read-chain-1", CHAIN_DEPTHS[0]),
        chain("read-chain-16", CHAIN_DEPTHS[1]),
        chain("read-chain-64", CHAIN_DEPTHS[2]),
        chain("read-chain-256", CHAIN_DEPTHS[3]),
    ]
};

const fn test(
    name: &'static str,
    group: Group,
    pattern: Pattern,
    operation: Operation,
    block: u32,
    in_flight: InFlight,
) -> Test {
    Test { name, group, pattern, operation, block, in_flight, chain_depth: None }
}

const fn chain(name: &'static str, depth: u32) -> Test {
    let chain_depth = Some(depth);
    let (pattern, operation) = (Pattern::Random, Operation::Read);
    let (group, block, in_flight) = (Group::Chain, 4 * KIB, InFlight::All);
    Test { name, group, pattern, operation, block, in_flight, chain_depth }
}
