//! Upstream's own Longhorn engine, unmodified, over our replicas, and over sets of ours and upstream's.
//!
//! Nothing of Longhorn is part of this repository. The environment names the `longhorn` program to drive:
//!
//! - `LONGHORN_BIN`: upstream's binary. To get one: `git clone https://github.com/longhorn/longhorn-engine`, then
//!   `CGO_ENABLED=1 go build -tags netgo,osusergo -o longhorn .` in it (it wants libqcow's header and library; the
//!   tests open no qcow image). Without it every test says that it is skipped.
//! - `REPLICA`: `ours` (default), or `stock` to run every scenario on upstream's replicas alone, which shows whether
//!   a failure is the scenario's or ours.
//! - `CLI`: `stock` (default), or `ours` to steer the engine in every scenario with our command line.
//! - `ENGINE_SEED`, `ENGINE_SECONDS`: of the random histories; a failing one prints its seed. The same seed takes the
//!   same steps, but the bytes and times differ.
//!
//! Root is needed: the engine listens in `/var/run` (names of the test's own), takes the locks of hash jobs below
//! `/host`, and one test mounts a small file system. Run with `LONGHORN_BIN=... cargo test -p longhorn --test engine`.
//! A failing test prints the ends of all logs.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod backing;
mod backup;
mod cli;
mod clone;
mod counters;
mod expand;
mod failures;
mod full_disk;
mod history;
mod io;
mod migration;
mod mixed;
mod moving;
mod path;
mod process;
mod snapshots;
mod taking;
mod unmap;
mod upgrade;

use support::{Engine, EngineOptions, Image, Kind, Lab, Replica, ReplicaOptions, check_each};

/// A volume with replicas of these kinds, and its engine with a socket frontend.
fn volume(lab: &Lab, size: usize, kinds: &[Kind]) -> (Engine, Vec<Replica>) {
    let replicas = replicas(lab, "", size, kinds);
    let engine = lab.engine("", &EngineOptions::new(size), &each(&replicas));
    (engine, replicas)
}

/// Replicas `<volume>r0`, `<volume>r1`...
fn replicas(lab: &Lab, volume: &str, size: usize, kinds: &[Kind]) -> Vec<Replica> {
    let options = ReplicaOptions::new(size);
    let start = |(index, kind): (usize, &Kind)| {
        lab.replica(*kind, volume, &format!("{volume}r{index}"), &options)
    };
    kinds.iter().enumerate().map(start).collect()
}

fn each(replicas: &[Replica]) -> Vec<&Replica> {
    replicas.iter().collect()
}

/// Named snapshots and what they hold.
type Snapshots = Vec<(&'static str, Image)>;

/// Rolls the volume back to each snapshot, and compares what all its replicas hold. The last one is what it holds
/// at the end.
fn check_snapshots(engine: &Engine, replicas: &[&Replica], snapshots: &mut Snapshots) {
    for (name, image) in snapshots {
        engine.revert(name);
        check_each(&format!("snapshot {name}"), image, replicas);
    }
    engine.all_rw(replicas);
}
