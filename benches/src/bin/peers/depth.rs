//! Reads through chains of snapshots.

use crate::bench::Bench;
use crate::results::progress;
use crate::systems::System;
use dbs_benches::content::BLOCK;
use dbs_benches::fio::Job;
use dbs_benches::process::{check_interrupted, output};
use dbs_benches::server::Served;
use dbs_benches::{Outcome, open};
use dbs_core::Store;
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::store::SnapshotOptions;
use fastrand::Rng;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Snapshots below the volume that is read.
pub const DEPTHS: [u32; 4] = [1, 16, 64, 256];
/// What is written between two snapshots: so often so many bytes, a cluster of qcow2.
const WRITES: u64 = 16;
const WRITE_BYTES: u64 = 64 << 10;

/// The name of a row's figures.
pub fn cell(depth: u32) -> String {
    format!("depth/{depth}")
}

/// Takes the measurement.
///
/// # Errors
/// If an image cannot be made or served.
pub fn measure(bench: &mut Bench) -> Outcome<()> {
    let store = bench.dir.join("chains.dbs");
    bench.tools.create(System::Dbs, &store, 4096, bench.sizes.store())?;
    chains(&store, bench.sizes.chain())?;
    let mut images = Vec::new();
    if bench.tools.has(System::Qcow2) {
        images = overlays(bench)?;
    }
    for round in 0..bench.sizes.rounds() {
        for depth in DEPTHS {
            let served = bench.tools.serve(System::Dbs, &store, &format!("d{depth}"))?;
            read(bench, depth, (System::Dbs, round), (&store, &served))?;
            drop(served);
            if let Some(image) = images.get(depth as usize) {
                let served = bench.tools.serve_chain(image)?;
                read(bench, depth, (System::Qcow2, round), (image, &served))?;
            }
        }
    }
    Ok(())
}

fn read(bench: &mut Bench, depth: u32, of: (System, u32), on: (&Path, &Served)) -> Outcome<()> {
    let job = Job::random("randread", 32, bench.sizes.chain(), bench.sizes.seconds());
    bench.run(&cell(depth), of, on, &job)
}

/// Volumes `d1`, `d16`... of a closed store, each with so many snapshots.
fn chains(path: &Path, size: u64) -> Outcome<()> {
    let store = open(path)?;
    for depth in DEPTHS {
        progress(&format!("making a volume with {depth} snapshots"));
        chain(&store, &format!("d{depth}"), depth, size)?;
    }
    Ok(store.close()?)
}

fn chain(store: &Store, name: &str, depth: u32, size: u64) -> Outcome<()> {
    store.create_volume(name, size)?;
    let volume = store.volume(name)?;
    let bytes = AlignedBuf::copy_of(&[0x5a; 256 * BLOCK]);
    for at in (0..size).step_by(bytes.len()) {
        check_interrupted()?;
        let count = (size - at).min(bytes.len() as u64);
        volume.write_at(at, &bytes[..count as usize], false)?;
    }
    for number in 0..depth {
        check_interrupted()?;
        store.create_snapshot(name, &format!("s{number}"), &SnapshotOptions::default())?;
        for at in places(number, size) {
            volume.write_at(at, &bytes[..WRITE_BYTES as usize], false)?;
        }
    }
    Ok(volume.flush()?)
}

/// Where the writes on top of one snapshot go; in every chain the same.
fn places(number: u32, size: u64) -> Vec<u64> {
    let mut rng = Rng::with_seed(number.into());
    (0..WRITES).map(|_| rng.u64(..size / WRITE_BYTES) * WRITE_BYTES).collect()
}

/// A chain of qcow2 files; the one with index `n` has `n` below it.
fn overlays(bench: &Bench) -> Outcome<Vec<PathBuf>> {
    let deepest = DEPTHS[DEPTHS.len() - 1];
    progress(&format!("making {deepest} qcow2 overlays"));
    let size = bench.sizes.chain();
    let base = bench.dir.join("chain0.qcow2");
    bench.tools.create(System::Qcow2, &base, size, 0)?;
    let served = bench.tools.serve(System::Qcow2, &base, "")?;
    bench.fill(&served, size)?;
    drop(served);
    let mut images = vec![base];
    for number in 0..deepest {
        check_interrupted()?;
        let image = bench.dir.join(format!("chain{}.qcow2", number + 1));
        let mut command = Command::new("qemu-img");
        // Without a look at the file below, which would open all of the chain.
        command.args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b"]);
        output(command.arg(&images[number as usize]).arg(&image).arg(size.to_string()))?;
        let mut command = Command::new("qemu-io");
        // No flush in between: the files are synced below.
        command.args(["-f", "qcow2", "-t", "unsafe"]);
        for at in places(number, size) {
            command.arg("-c").arg(format!("write -q -P 90 {at} {WRITE_BYTES}"));
        }
        output(command.arg(&image))?;
        images.push(image);
    }
    nix::unistd::sync();
    Ok(images)
}
