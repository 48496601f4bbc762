//! Cost along the volumes, clients and snapshots of a served store.

use crate::cost::{COLUMNS, values};
use crate::probe::probe;
use dbs_benches::content::BLOCK;
use dbs_benches::curve::{Curve, Unit};
use dbs_benches::fio::{Figures, Job};
use dbs_benches::process::sleep;
use dbs_benches::report::Table;
use dbs_benches::server::Served;
use dbs_benches::{Bench, Outcome, open};
use dbs_core::Store;
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::store::SnapshotOptions;
use dbs_nbd::{Client, ClientOptions};
use fastrand::Rng;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of a volume that nothing is written to.
const EMPTY_BYTES: u64 = 16 << 20;
/// Between two snapshots: so many writes of so many bytes.
const WRITES: u64 = 16;
const WRITE_BYTES: u64 = 64 << 10;

/// More and more volumes, each with a client that does nothing.
pub fn volumes(bench: &Bench) -> Outcome<Table> {
    let title = "Volumes of a served store, each with an idle client";
    let columns = [
        COLUMNS.as_slice(),
        &[
            ("the server's memory", Unit::Memory),
            ("with a client of each volume", Unit::Memory),
            ("CPU in 10 s with all clients idle", Unit::Time),
            ("random reads of one, QD 32", Unit::Rate),
        ],
    ]
    .concat();
    let mut curve = Curve::new(title, "volumes", &columns);
    let path = bench.init("volumes.dbs", 64 << 30)?;
    let store = open(&path)?;
    fill(&store, "v", size(bench))?;
    store.close()?;
    let mut made = 1;
    for count in bench.pick([1, 10, 100, 1000], [1, 2, 5, 10]) {
        let store = open(&path)?;
        for number in made..count {
            store.create_volume(&format!("v{number}"), EMPTY_BYTES)?;
        }
        made = count;
        store.close()?;
        let probed = probe(&path)?;
        let store = open(&path)?;
        let mut row = values(&probed, &store, "v")?;
        store.close()?;
        let (socket, served) = serve(bench, &path, "v")?;
        row.push(served.resident() as f64);
        row.extend(idle(bench, &served, &socket, count)?);
        row.push(load(bench, &served, "randread", (1, 32))?.iops);
        curve.add(f64::from(count), row);
    }
    bench.finish("volumes", &curve)
}

/// Memory with a client of each volume, and CPU time in 10 s of doing nothing.
fn idle(bench: &Bench, served: &Served, socket: &Path, volumes: u32) -> Outcome<[f64; 2]> {
    let mut clients = Vec::new();
    for number in 0..volumes {
        let name = if number == 0 { "v".to_owned() } else { format!("v{number}") };
        let mut client = Client::connect_unix(socket, &name, &ClientOptions::default())?;
        client.read_at(0, &mut [0; BLOCK]).map_err(|e| format!("reading {name}: {e}"))?;
        clients.push(client);
    }
    sleep(Duration::from_secs(2))?;
    let before = served.cpu_seconds()?.unwrap_or_default();
    let seconds = bench.pick(10, 1);
    sleep(Duration::from_secs(seconds))?;
    let used = served.cpu_seconds()?.unwrap_or_default() - before;
    Ok([served.resident() as f64, used * 10.0 / seconds as f64])
}

/// More and more clients of one volume, each with one request in flight.
pub fn clients(bench: &Bench) -> Outcome<Table> {
    let title = "Clients of a volume, each with one request in flight";
    let columns = [
        ("random reads", Unit::Rate),
        ("overwrites", Unit::Rate),
        ("latency of reads, p50", Unit::Time),
        ("p99", Unit::Time),
        ("server, reads", Unit::Cpu),
        ("server, overwrites", Unit::Cpu),
        ("the server's memory", Unit::Memory),
    ];
    let mut curve = Curve::new(title, "clients", &columns);
    let path = bench.init("clients.dbs", 64 << 30)?;
    let store = open(&path)?;
    fill(&store, "v", size(bench))?;
    store.close()?;
    let (_, served) = serve(bench, &path, "v")?;
    for count in bench.pick(&[1, 4, 16, 64, 256][..], &[1, 4][..]) {
        let reads = load(bench, &served, "randread", (*count, 1))?;
        let writes = load(bench, &served, "randwrite", (*count, 1))?;
        let row = vec![
            reads.iops,
            writes.iops,
            reads.p50_us / 1e6,
            reads.p99_us / 1e6,
            reads.cpu_per_100k(),
            writes.cpu_per_100k(),
            served.resident() as f64,
        ];
        curve.add(f64::from(*count), row);
    }
    bench.finish("clients", &curve)
}

/// A longer and longer chain of snapshots below the volume that is read.
pub fn chain(bench: &Bench) -> Outcome<Table> {
    let title = "A chain of snapshots below a served volume";
    let columns = [COLUMNS.as_slice(), &[("random reads of its head, QD 32", Unit::Rate)]].concat();
    let mut curve = Curve::new(title, "snapshots", &columns);
    let path = bench.init("chain.dbs", 64 << 30)?;
    let store = open(&path)?;
    fill(&store, "v", size(bench))?;
    store.close()?;
    let mut made = 0;
    for depth in bench.pick([1, 10, 100, 1000], [1, 2, 5, 10]) {
        let store = open(&path)?;
        for number in made..depth {
            snapshot(&store, number, size(bench))?;
        }
        made = depth;
        store.close()?;
        let probed = probe(&path)?;
        let store = open(&path)?;
        let mut row = values(&probed, &store, "v")?;
        store.close()?;
        let (_, served) = serve(bench, &path, "v")?;
        row.push(load(bench, &served, "randread", (1, 32))?.iops);
        curve.add(depth as f64, row);
    }
    bench.finish("chain", &curve)
}

/// Takes a snapshot and writes something on top of it.
fn snapshot(store: &Store, number: u64, size: u64) -> Outcome<()> {
    store.create_snapshot("v", &format!("s{number}"), &SnapshotOptions::default())?;
    let volume = store.volume("v")?;
    let mut rng = Rng::with_seed(number);
    let bytes = AlignedBuf::copy_of(&[0xa5; WRITE_BYTES as usize]);
    for _ in 0..WRITES {
        volume.write_at(rng.u64(..size / WRITE_BYTES) * WRITE_BYTES, &bytes, false)?;
    }
    Ok(())
}

fn size(bench: &Bench) -> u64 {
    bench.pick(512 << 20, 8 << 20)
}

/// Creates a volume and writes all of it.
fn fill(store: &Store, name: &str, size: u64) -> Outcome<()> {
    store.create_volume(name, size)?;
    let volume = store.volume(name)?;
    let bytes = AlignedBuf::copy_of(&[0x5a; 256 * BLOCK]);
    for at in (0..size).step_by(bytes.len()) {
        volume.write_at(at, &bytes, false)?;
    }
    Ok(volume.flush()?)
}

/// Serves a store; the socket is beside it.
fn serve(bench: &Bench, store: &Path, volume: &str) -> Outcome<(PathBuf, Served)> {
    let socket = bench.dir.join("s.sock");
    let served = bench.dbs.serve(store, volume, &socket)?;
    Ok((socket, served))
}

/// Random requests of so many clients, with so many in flight each.
fn load(
    bench: &Bench,
    served: &Served,
    pattern: &'static str,
    (clients, depth): (u32, u32),
) -> Outcome<Figures> {
    let job = Job::random(pattern, depth, size(bench), bench.pick(4, 1));
    served.measure(&Job { clients, ..job }, &bench.dir)
}
