//! Restores on a disk that loses power: the volume is what it was, or what was restored.

use crate::support::*;
use dbs_core::Result;
use dbs_sim::{CrashMode, Faults, SimDisk};
use std::fs;
use std::sync::Arc;

const DISK: &str = "volume-snap-restored.img";
/// Crash images of each moment.
const IMAGES: u64 = 4;

/// Restores something: all of it, or the differences to what was restored before.
fn restore(bench: &Bench, onto: bool) -> Result<()> {
    let incoming = bench.replica.incoming();
    let layer = incoming.begin_restore(DISK)?;
    let block = BLOCK as u64;
    if onto {
        layer.write_at(5 * block, &[2; 8 * BLOCK])?;
        layer.zero(20 * block, 3 * block)?;
        layer.write_at(300 * block, &[2; BLOCK])?;
    } else {
        layer.write_at(7 * block, &[3; 20 * BLOCK])?;
        layer.write_at(500 * block, &[3; BLOCK])?;
    }
    drop(layer);
    incoming.end_restore(DISK, onto)
}

/// A replica that was restored before.
fn prepared() -> (Bench, Arc<SimDisk>) {
    let (bench, disk) = Bench::simulated();
    bench.create(&SIZE.to_string()).unwrap();
    bench.open();
    let incoming = bench.replica.incoming();
    let layer = incoming.begin_restore(DISK).unwrap();
    layer.write_at(0, &[1; 40 * BLOCK]).unwrap();
    drop(layer);
    incoming.end_restore(DISK, false).unwrap();
    (bench, disk)
}

fn content(bench: &Bench, spec: &str) -> Vec<u8> {
    let volume = bench.store.as_ref().unwrap().volume(spec).unwrap();
    let mut bytes = vec![0; volume.size() as usize];
    volume.read_at(0, &mut bytes).unwrap();
    bytes
}

/// A replica on what a power loss leaves of another one.
fn after(bench: &Bench, disk: &SimDisk, seed: u64) -> Bench {
    let dir = tempdir();
    for entry in fs::read_dir(bench.dir.path()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let mut rng = fastrand::Rng::with_seed(seed);
    let mode = CrashMode::random(&mut rng);
    let image = Arc::new(disk.crash_image(&mut rng, mode));
    let bench = Bench::on_disk(Arc::new(dir), &image);
    bench.open();
    bench
}

#[test]
fn a_restore_is_done_or_not_after_a_power_loss() {
    for onto in [true, false] {
        let (bench, disk) = prepared();
        let before = content(&bench, "vol");
        disk.arm(Faults::default());
        restore(&bench, onto).unwrap();
        let restored = content(&bench, "vol");
        assert!(before != restored);
        let mut seen = [0, 0];
        for nth in 1.. {
            let (bench, disk) = prepared();
            disk.arm(Faults { stop_at: Some(nth), ..Faults::default() });
            let outcome = restore(&bench, onto);
            for seed in 0..IMAGES {
                let after = after(&bench, &disk, nth * IMAGES + seed);
                let now = content(&after, "vol");
                assert!(now == before || now == restored, "{onto} {nth} {seed}: a mix");
                assert!(outcome.is_err() || now == restored, "{onto} {nth} {seed}: lost");
                seen[usize::from(now == restored)] += 1;
                // The snapshot is what the volume shows, and nothing else is there.
                let disks = after.get().disks;
                assert_eq!(disks.len(), 2, "{onto} {nth} {seed}: {disks:?}");
                assert!(content(&after, "vol@restored") == now, "{onto} {nth} {seed}");
                assert!(!after.get().rebuilding);
                restore(&after, onto).unwrap();
                assert!(content(&after, "vol") == restored, "{onto} {nth} {seed}: not again");
            }
            if !disk.stopped() {
                assert!(outcome.is_ok());
                break;
            }
        }
        assert!(seen.iter().all(|count| *count > IMAGES), "{seen:?}");
    }
}

/// What somebody has written meanwhile is neither lost nor mixed with what was restored.
#[test]
fn a_volume_that_is_used_meanwhile_is_not_restored() {
    for onto in [true, false] {
        type Change = fn(&Bench);
        let changes: [(&str, Change); 6] = [
            ("written", |bench| bench.write(2, 9)),
            ("discarded", |bench| {
                let volume = bench.store.as_ref().unwrap().volume("vol").unwrap();
                volume.discard(0, BLOCK as u64).unwrap();
            }),
            ("a snapshot", |bench| drop(bench.snapshot("s"))),
            ("opened again", |bench| {
                bench.close();
                bench.open();
            }),
            ("closed", |bench| drop(bench.close())),
            ("reverted", |bench| drop(bench.revert("restored"))),
        ];
        for (what, change) in changes {
            if what == "discarded" && !onto {
                // Not seen: the head goes, as it was to.
                continue;
            }
            let (bench, _disk) = prepared();
            let incoming = bench.replica.incoming();
            let layer = incoming.begin_restore(DISK).unwrap();
            layer.write_at(0, &[2; BLOCK]).unwrap();
            drop(layer);
            change(&bench);
            let before = content(&bench, "vol");
            let refused = incoming.end_restore(DISK, onto).unwrap_err().to_string();
            assert!(refused.contains("while a backup was restored"), "{what}: {refused}");
            incoming.give_up_restore().unwrap();
            assert!(content(&bench, "vol") == before, "{what}");
            let info = bench.store.as_ref().unwrap().volume_info("vol").unwrap();
            assert!(!info.rebuilding, "{what}");
            bench.close();
            bench.open();
            restore(&bench, false).unwrap();
        }
    }
}

/// Nothing else comes in, not even after the replica was closed: the restore may still write.
#[test]
fn neither_a_clone_nor_a_rebuild_begins_during_a_restore() {
    let (bench, _disk) = prepared();
    let incoming = bench.replica.incoming();
    let layer = incoming.begin_restore(DISK).unwrap();
    for _ in 0..2 {
        let refused = [
            incoming.begin_clone().unwrap_err().to_string(),
            incoming.begin_restore(DISK).map(drop).unwrap_err().to_string(),
            bench.replica.set_rebuilding(true).unwrap_err().to_string(),
        ];
        let text = "a backup is being restored to the replica";
        assert!(refused.iter().all(|refused| refused == text), "{refused:?}");
        bench.close();
        bench.open();
    }
    drop(layer);
    incoming.give_up_restore().unwrap();
    bench.rebuilding(true).unwrap();
    assert!(incoming.begin_restore(DISK).map(drop).unwrap_err().to_string().contains("rebuilding"));
}
