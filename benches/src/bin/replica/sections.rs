//! Loads on open replicas, taken in turn.

use crate::Bench;
use crate::subject::{Kind, Replica};
use dbs_benches::Outcome;
use dbs_benches::dataconn::{Load, Until};
use dbs_benches::samples::progress;
use std::path::PathBuf;

/// Data connections: upstream's number, and the papers' larger one.
pub const CONNECTIONS: [usize; 2] = [2, 6];
/// Requests in flight.
pub const DEPTHS: [usize; 3] = [1, 32, 128];
/// Snapshots below the head.
pub const CHAINS: [u32; 4] = [1, 16, 64, 250];
/// Blocks written between two snapshots of a chain.
const BETWEEN: u64 = 256;
const BLOCK: usize = 4096;
const LARGE: usize = 1 << 20;
const LARGE_DEPTH: usize = 16;

/// Name of a random load's cell.
pub fn random_cell(write: bool, connections: usize, depth: usize) -> String {
    let kind = if write { "write" } else { "read" };
    format!("random {kind}, {connections} connections, QD {depth}")
}

/// Name of a sequential load's cell.
pub fn sequential_cell(write: bool, connections: usize) -> String {
    let kind = if write { "write" } else { "read" };
    format!("1 MiB sequential {kind}, {connections} connections")
}

/// Name of a chain's cell.
pub fn chain_cell(snapshots: u32) -> String {
    format!("random read, {snapshots} snapshots")
}

/// The cells around a snapshot.
pub const OVERWRITE: &str = "random overwrite, QD 32";
pub const AFTER: &str = "random write after a snapshot, QD 32";

impl Bench<'_> {
    /// Random requests of 4 KiB.
    fn random(&self, write: bool, connections: usize, depth: usize) -> Load {
        let until = Until::Time(self.time);
        let span = self.size;
        Load { write, block: BLOCK, sequential: false, connections, depth, span, until }
    }

    fn sequential(&self, write: bool, connections: usize, until: Until) -> Load {
        let span = self.size;
        let depth = LARGE_DEPTH;
        Load { write, block: LARGE, sequential: true, connections, depth, span, until }
    }

    fn path(&self, kind: Kind, name: &str) -> PathBuf {
        let kind = kind.title().replace([' ', ','], "-");
        self.dir.join(format!("{kind}-{name}"))
    }

    /// A replica of each kind, with the whole volume written.
    fn filled(&self, name: &str) -> Outcome<[(Kind, Replica); 2]> {
        let open = |kind: Kind, port| -> Outcome<_> {
            let replica = self.binaries.open(kind, &self.path(kind, name), port, self.size)?;
            let all = Until::Count(self.size / LARGE as u64);
            self.sequential(true, 2, all).run(&replica.address, || replica.cpu())?;
            Ok((kind, replica))
        };
        Ok([open(Kind::Dbs, self.port)?, open(Kind::Upstream, self.port + 20)?])
    }

    fn measure(
        &mut self,
        cell: &str,
        (kind, replica): &(Kind, Replica),
        load: Load,
    ) -> Outcome<()> {
        let figures = load.run(&replica.address, || replica.cpu())?;
        self.results.add(cell, kind.title(), figures)
    }

    fn finish(&self, name: &str, replicas: [(Kind, Replica); 2]) -> Outcome<()> {
        for (kind, replica) in replicas {
            let resident = replica.resident() >> 20;
            progress(&format!("{}: {resident} MiB resident", kind.title()));
            replica.close()?;
            std::fs::remove_dir_all(self.path(kind, name))?;
        }
        Ok(())
    }
}

/// Random and sequential loads, and the protocol alone.
pub fn loads(bench: &mut Bench<'_>) -> Outcome<()> {
    let replicas = bench.filled("loads")?;
    let path = bench.path(Kind::Null, "loads");
    let null = bench.binaries.open(Kind::Null, &path, bench.port + 40, bench.size)?;
    let null = (Kind::Null, null);
    for _ in 0..bench.rounds {
        for connections in CONNECTIONS {
            for write in [false, true] {
                for depth in DEPTHS {
                    let cell = random_cell(write, connections, depth);
                    let load = bench.random(write, connections, depth);
                    for replica in replicas.iter().chain([&null]) {
                        bench.measure(&cell, replica, load)?;
                    }
                }
                let cell = sequential_cell(write, connections);
                let load = bench.sequential(write, connections, Until::Time(bench.time));
                for replica in &replicas {
                    bench.measure(&cell, replica, load)?;
                }
            }
        }
    }
    null.1.close()?;
    bench.finish("loads", replicas)
}

/// Writes right after a snapshot, beside overwrites.
pub fn after_snapshot(bench: &mut Bench<'_>) -> Outcome<()> {
    let replicas = bench.filled("snapshot")?;
    let load = bench.random(true, 2, 32);
    for round in 0..bench.rounds {
        for replica in &replicas {
            bench.measure(OVERWRITE, replica, load)?;
            replica.1.snapshot(&format!("s{round}"))?;
            bench.measure(AFTER, replica, load)?;
        }
    }
    bench.finish("snapshot", replicas)
}

/// Reads over chains of snapshots, each of which holds some blocks.
pub fn chains(bench: &mut Bench<'_>) -> Outcome<()> {
    let mut replicas = bench.filled("chains")?;
    let mut made = 0;
    for snapshots in CHAINS {
        let some = Load { until: Until::Count(BETWEEN), ..bench.random(true, 2, 32) };
        for number in made..snapshots {
            for (_, replica) in &mut replicas {
                // The last of 250 leaves no room for another: upstream's limit.
                replica.snapshot(&format!("c{number}"))?;
                some.run(&replica.address, || Ok(0.0))?;
            }
        }
        made = snapshots;
        let load = bench.random(false, 2, 32);
        for _ in 0..bench.rounds {
            for replica in &replicas {
                bench.measure(&chain_cell(snapshots), replica, load)?;
            }
        }
    }
    bench.finish("chains", replicas)
}
