//! Rebuilds by upstream's engine and command line, among replicas of one kind.

use crate::Bench;
use crate::subject::Kind;
use dbs_benches::dataconn::{Load, Until};
use dbs_benches::{Outcome, timed};

/// The cells.
pub const FULL: &str = "rebuild of an empty replica";
pub const DELTA: &str = "rebuild of one that missed 1 % of the blocks";
const LARGE: usize = 1 << 20;
const BLOCK: usize = 4096;

/// Rebuilds an empty replica, then the same one after it was away while 1 % changed.
pub fn measure(bench: &mut Bench<'_>) -> Outcome<()> {
    for kind in [Kind::Dbs, Kind::Upstream] {
        one(bench, kind)?;
    }
    Ok(())
}

fn one(bench: &mut Bench<'_>, kind: Kind) -> Outcome<()> {
    let (size, [engine, first, second]) =
        (bench.rebuild_size, [bench.port, bench.port + 20, bench.port + 40]);
    let dirs = ["source", "target"].map(|name| bench.dir.join(name));
    let fill = Load {
        write: true,
        block: LARGE,
        sequential: true,
        connections: 2,
        depth: 16,
        span: size,
        until: Until::Count(size / LARGE as u64),
    };
    write(bench, kind, &dirs[0], first, fill)?;
    add(bench, kind, &dirs, [engine, first, second], FULL)?;
    let blocks = size / BLOCK as u64 / 100;
    let change =
        Load { block: BLOCK, sequential: false, until: Until::Count(blocks), depth: 32, ..fill };
    write(bench, kind, &dirs[0], first, change)?;
    add(bench, kind, &dirs, [engine, first, second], DELTA)?;
    for dir in dirs {
        std::fs::remove_dir_all(dir)?;
    }
    Ok(())
}

fn write(
    bench: &Bench<'_>,
    kind: Kind,
    dir: &std::path::Path,
    port: u16,
    load: Load,
) -> Outcome<()> {
    let replica = bench.binaries.open(kind, dir, port, bench.rebuild_size)?;
    load.run(&replica.address, || Ok(0.0))?;
    replica.close()
}

/// Adds the second replica to an engine over the first.
fn add(
    bench: &mut Bench<'_>,
    kind: Kind,
    dirs: &[std::path::PathBuf; 2],
    [engine, first, second]: [u16; 3],
    cell: &str,
) -> Outcome<()> {
    let size = bench.rebuild_size;
    let _source = bench.binaries.start(kind, &dirs[0], first, size)?;
    let _target = bench.binaries.start(kind, &dirs[1], second, size)?;
    let _engine = bench.binaries.engine(bench.dir, engine, size, &[first])?;
    let address = format!("tcp://127.0.0.1:{second}");
    let text = size.to_string();
    let arguments = ["add-replica", &address, "--size", &text, "--current-size", &text];
    let (_, took) = timed(|| bench.binaries.command(engine, &arguments))?;
    bench.results.time(cell, kind.title(), took.as_secs_f64());
    let listed = bench.binaries.command(engine, &["ls-replica"])?;
    if listed.matches(" RW ").count() != 2 {
        return Err(format!("not both replicas are RW: {listed}").into());
    }
    Ok(())
}
