//! The loads, on both sides in turn.

use crate::bare::{BARE, Bare};
use crate::stack::{Below, Binaries, Row, SIDES, Side, Stack};
use dbs_benches::Outcome;
use dbs_benches::dataconn::{Load, Until};
use dbs_benches::samples::Results;
use std::path::Path;
use std::time::Duration;

/// Data connections of the client: the target daemon has one.
pub const CONNECTIONS: [usize; 2] = [1, 4];
/// Requests of 4 KiB in flight.
pub const DEPTHS: [usize; 3] = [1, 32, 128];
/// The one at which the full engine is held against its target.
pub const DEPTH: usize = 128;
const BLOCK: usize = 4096;
const LARGE: usize = 1 << 20;
/// Requests of that size in flight, in no order.
pub const LARGE_DEPTHS: [usize; 2] = [1, 128];
const LARGE_DEPTH: usize = 16;
/// Room for the ports of one side.
const PORTS: u16 = 100;

/// What all rows need.
pub struct Bench<'a> {
    pub binaries: &'a Binaries,
    pub dir: &'a Path,
    pub size: u64,
    pub time: Duration,
    pub rounds: u32,
    pub port: u16,
    pub results: Results,
}

/// Name of a random load's cell.
pub fn random_cell(row: &Row, write: bool, connections: usize, depth: usize) -> String {
    let kind = if write { "write" } else { "read" };
    format!("{}: random {kind}, {connections} connections, QD {depth}", row.name)
}

/// Name of a load of large random requests' cell.
pub fn large_cell(row: &Row, write: bool, depth: usize) -> String {
    let kind = if write { "write" } else { "read" };
    format!("{}: 1 MiB random {kind}, QD {depth}", row.name)
}

/// Name of what the medium does with random requests at [`DEPTH`].
pub fn bare_cell(row: &Row, write: bool) -> String {
    let kind = if write { "write" } else { "read" };
    format!("{}: random {kind}, QD {DEPTH}", row.name)
}

/// Name of a sequential load's cell.
pub fn sequential_cell(row: &Row, write: bool) -> String {
    let kind = if write { "write" } else { "read" };
    format!("{}: 1 MiB sequential {kind}", row.name)
}

impl Bench<'_> {
    /// Measures a row.
    ///
    /// # Errors
    /// If a process does not start or a load fails.
    pub fn row(&mut self, row: &Row) -> Outcome<()> {
        let mut stacks = Vec::new();
        for (side, port) in SIDES.into_iter().zip((self.port..).step_by(PORTS.into())) {
            let dir = self.dir.join(side.name());
            if let Some(stack) = self.binaries.start(side, row, &dir, port, self.size)? {
                if row.below == Below::Replicas {
                    let all = Until::Count(self.size / LARGE as u64);
                    self.sequential(true, all).run(&stack.address, || Ok(0.0))?;
                }
                stacks.push((side, stack));
            }
        }
        let bare = match row.below {
            Below::Replicas => {
                Some(Bare::make(self.dir.join("bare"), row.replicas, self.size, self.time)?)
            }
            _ => None,
        };
        for _ in 0..self.rounds {
            // Who comes first has an advantage, or not.
            stacks.reverse();
            for write in [false, true] {
                for connections in CONNECTIONS {
                    for depth in DEPTHS {
                        let load = self.random(write, BLOCK, connections, depth);
                        for (side, stack) in &stacks {
                            let figures = load.run(&stack.address, || stack.cpu())?;
                            let cell = random_cell(row, write, connections, depth);
                            self.results.add(&cell, side.title(), figures)?;
                        }
                    }
                }
                // With and without checksums alone.
                let compared = |(side, _): &&(Side, Stack)| *side != Side::Upstream;
                let large = if row.below == Below::Replicas { &LARGE_DEPTHS[..] } else { &[] };
                for &depth in large {
                    let load = self.random(write, LARGE, CONNECTIONS[1], depth);
                    for (side, stack) in stacks.iter().filter(compared) {
                        let figures = load.run(&stack.address, || stack.cpu())?;
                        self.results.add(&large_cell(row, write, depth), side.title(), figures)?;
                    }
                }
                if let Some(bare) = &bare {
                    let figures = bare.measure(write, BLOCK as u64, DEPTH as u32)?;
                    self.results.add(&bare_cell(row, write), BARE, figures)?;
                    let figures = bare.measure(write, LARGE as u64, LARGE_DEPTH as u32)?;
                    self.results.add(&sequential_cell(row, write), BARE, figures)?;
                }
                for (side, stack) in &stacks {
                    let load = self.sequential(write, Until::Time(self.time));
                    let figures = load.run(&stack.address, || stack.cpu())?;
                    self.results.add(&sequential_cell(row, write), side.title(), figures)?;
                }
            }
        }
        drop(stacks);
        for side in SIDES {
            // What a row did not have is not there.
            let _none = std::fs::remove_dir_all(self.dir.join(side.name()));
        }
        Ok(())
    }

    fn random(&self, write: bool, block: usize, connections: usize, depth: usize) -> Load {
        let (span, until) = (self.size, Until::Time(self.time));
        Load { write, block, sequential: false, connections, depth, span, until }
    }

    fn sequential(&self, write: bool, until: Until) -> Load {
        let (block, span) = (LARGE, self.size);
        Load { write, block, sequential: true, connections: 1, depth: LARGE_DEPTH, span, until }
    }
}
