//! First writes: to blocks that nothing has been written to, and to blocks that a snapshot holds.

use crate::bench::Bench;
use crate::systems::System;
use dbs_benches::Outcome;
use dbs_benches::device::write_data;
use dbs_benches::fio::Job;
use dbs_benches::process::output;
use std::path::Path;
use std::process::Command;

/// Rows of the table. Overwrite is measured again beside them, to compare with.
pub const ROWS: [(&str, &str); 5] = [
    ("first/overwrite", "overwrite, to compare"),
    ("first/sparse", "first write, sparse file"),
    ("first/written", "first write, medium written before"),
    ("after/sparse", "write right after a snapshot, sparse file"),
    ("after/written", "write right after a snapshot, medium written before"),
];

/// Takes the measurement.
///
/// # Errors
/// If a server does not start, or an image cannot be made.
pub fn measure(bench: &mut Bench) -> Outcome<()> {
    let written = bench.dir.join("written.dbs");
    let size = u64::from(2 * bench.sizes.rounds()) * bench.sizes.image();
    // Metadata takes less than a 64th.
    bench.tools.create(System::Dbs, &written, 4096, size + size / 64 + (64 << 20))?;
    write_data(&written)?;
    let snapped = bench.dir.join("snapped.dbs");
    bench.tools.create(System::Dbs, &snapped, bench.sizes.image(), bench.sizes.store())?;
    let served = bench.tools.serve(System::Dbs, &snapped, "v")?;
    bench.fill(&served, bench.sizes.image())?;
    drop(served);
    for round in 0..bench.sizes.rounds() {
        for system in bench.systems(round) {
            overwrite(bench, system, round)?;
            sparse(bench, system, round)?;
            match system {
                System::Dbs => {
                    on_written(bench, &written, round)?;
                    after_snapshot(bench, "after/sparse", (&snapped, "v"), round)?;
                }
                System::Qcow2 => overlay(bench, round)?,
                _ => {}
            }
        }
    }
    Ok(())
}

/// Every block at most once.
fn writes(bench: &Bench) -> Job {
    let job = Job::random("randwrite", 32, bench.sizes.image(), bench.sizes.seconds());
    Job { once: true, ..job }
}

fn overwrite(bench: &mut Bench, system: System, round: u32) -> Outcome<()> {
    let (image, served) = bench.full(system)?;
    let job = writes(bench);
    bench.run("first/overwrite", (system, round), (&image, &served), &job)
}

/// On a new, empty image.
fn sparse(bench: &mut Bench, system: System, round: u32) -> Outcome<()> {
    let image = bench.dir.join(format!("sparse{round}-{}.img", system as u32));
    bench.tools.create(system, &image, bench.sizes.image(), bench.sizes.store())?;
    let served = bench.tools.serve(system, &image, "v")?;
    let job = writes(bench);
    bench.run("first/sparse", (system, round), (&image, &served), &job)
}

/// On a new volume of a store whose file has all its space already, as a block device has; then
/// after a snapshot of it.
fn on_written(bench: &mut Bench, store: &Path, round: u32) -> Outcome<()> {
    let (volume, size) = (format!("w{round}"), bench.sizes.image());
    bench.tools.dbs.run(store, &["volume", "create", &volume, &size.to_string()])?;
    let served = bench.tools.serve(System::Dbs, store, &volume)?;
    let job = writes(bench);
    bench.run("first/written", (System::Dbs, round), (store, &served), &job)?;
    bench.fill(&served, size)?;
    drop(served);
    after_snapshot(bench, "after/written", (store, &volume), round)
}

/// The head holds nothing when the load begins; the snapshot stays.
fn after_snapshot(
    bench: &mut Bench,
    cell: &str,
    (store, volume): (&Path, &str),
    round: u32,
) -> Outcome<()> {
    let served = bench.tools.serve(System::Dbs, store, volume)?;
    bench.tools.dbs.run(store, &["snapshot", "create", &format!("{volume}@s{round}")])?;
    let job = writes(bench);
    bench.run(cell, (System::Dbs, round), (store, &served), &job)
}

/// A new overlay on the full qcow2 image: what a snapshot is there.
fn overlay(bench: &mut Bench, round: u32) -> Outcome<()> {
    let (backing, served) = bench.full(System::Qcow2)?;
    drop(served);
    let image = bench.dir.join(format!("overlay{round}.qcow2"));
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(backing).arg(&image);
    output(&mut command)?;
    let served = bench.tools.serve(System::Qcow2, &image, "")?;
    let job = writes(bench);
    bench.run("after/sparse", (System::Qcow2, round), (&image, &served), &job)
}
