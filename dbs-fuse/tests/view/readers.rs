//! Many readers of a volume that is written, trimmed, and whose snapshots come and go.

use crate::server::{Server, can_mount};
use dbs_core::Store;
use dbs_core::store::SnapshotOptions;
use serde_json::json;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const READERS: u64 = 16;
const BLOCK: usize = 4096;
const BLOCKS: u64 = 2048;
/// Snapshots there are at a time.
const KEPT: u64 = 6;
/// How much longer it may take to make as many.
const GRACE: Duration = Duration::from_secs(400);

fn mix(block: u64, round: u64) -> u64 {
    let mut state =
        block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round.wrapping_mul(0xd6e8_feb8_6659_fd93);
    state ^= state >> 32;
    state.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// What a round does to a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deed {
    Nothing,
    Write,
    Discard,
}

fn deed(block: u64, round: u64) -> Deed {
    match mix(block, round) % 8 {
        0 | 1 => Deed::Write,
        // Eight neighbours together, so that whole runs go.
        _ if mix(block / 8, round + 1_000_000).is_multiple_of(16) => Deed::Discard,
        _ => Deed::Nothing,
    }
}

fn stamp(block: u64, round: u64) -> Vec<u8> {
    let word = mix(block, round) ^ (block << 40) ^ (round << 20);
    word.to_le_bytes().repeat(BLOCK / 8)
}

/// A block as the snapshot of a round has it.
fn wanted(block: u64, round: u64) -> Vec<u8> {
    for round in (1..=round).rev() {
        match deed(block, round) {
            Deed::Write => return stamp(block, round),
            Deed::Discard => return vec![0; BLOCK],
            Deed::Nothing => {}
        }
    }
    vec![0; BLOCK]
}

/// In the server: rounds for so many milliseconds, a snapshot `rN` after each; returns their number.
pub fn stress(store: &Store, milliseconds: u64) -> dbs_core::Result<u64> {
    let end = Instant::now() + Duration::from_millis(milliseconds);
    let volume = store.volume("v")?;
    let done = AtomicBool::new(false);
    let rounds = thread::scope(|scope| {
        let merging = scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                store.work(16)?;
                thread::sleep(Duration::from_millis(2));
            }
            Ok::<_, dbs_core::Error>(())
        });
        let run = || {
            let mut round = 0;
            // On a busy machine longer, so that there is something to read and to delete.
            while Instant::now() < end || (round < KEPT + 2 && Instant::now() < end + GRACE) {
                round += 1;
                for block in 0..BLOCKS {
                    let at = block * BLOCK as u64;
                    match deed(block, round) {
                        Deed::Write => volume.write_at(at, &stamp(block, round), false)?,
                        Deed::Discard => volume.discard(at, BLOCK as u64)?,
                        Deed::Nothing => {}
                    }
                }
                let name = format!("r{round}");
                store.create_snapshot("v", &name, &SnapshotOptions::default())?;
                if round > KEPT {
                    store.delete_snapshot("v", &format!("r{}", round - KEPT))?;
                }
            }
            Ok(round)
        };
        let rounds: dbs_core::Result<u64> = run();
        done.store(true, Ordering::SeqCst);
        merging.join().unwrap()?;
        rounds
    })?;
    assert_eq!(store.check()?.worst(), None);
    Ok(rounds)
}

/// Reads some places of some snapshot; how many reads it did, and how many met a deleted one.
fn read_some(snapshots: &Path, random: &mut fastrand::Rng) -> (u64, u64) {
    let names: Vec<_> = match fs::read_dir(snapshots) {
        Ok(entries) => entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect(),
        Err(error) => panic!("listing: {error}"),
    };
    let Some(name) = random.choice(&names) else { return (0, 0) };
    let round: u64 = name.strip_prefix('r').unwrap().strip_suffix(".raw").unwrap().parse().unwrap();
    let expected = |error: std::io::Error| {
        let code = error.raw_os_error();
        assert!(matches!(code, Some(libc::ESTALE | libc::ENOENT)), "{name}: {error}");
        (0, 1)
    };
    let file = match File::open(snapshots.join(name)) {
        Ok(file) => file,
        Err(error) => return expected(error),
    };
    let mut buf = vec![0; 32 * BLOCK];
    let mut reads = 0;
    for _ in 0..16 {
        let blocks = if random.bool() { 1 } else { 32 };
        let first = random.u64(..BLOCKS - blocks);
        let buf = &mut buf[..blocks as usize * BLOCK];
        if let Err(error) = file.read_exact_at(buf, first * BLOCK as u64) {
            let (_, stale) = expected(error);
            return (reads, stale);
        }
        for (block, bytes) in (first..).zip(buf.chunks(BLOCK)) {
            assert!(bytes == wanted(block, round), "{name}: block {block} is another one's");
        }
        reads += 1;
    }
    (reads, 0)
}

/// Reads the head; each block must be one that some round wrote to just there.
fn read_head(file: &File, random: &mut fastrand::Rng) {
    let block = random.u64(..BLOCKS);
    let mut bytes = vec![0; BLOCK];
    file.read_exact_at(&mut bytes, block * BLOCK as u64).unwrap();
    // A write may pass while it is read: each word for itself.
    for word in [&bytes[..8], &bytes[BLOCK - 8..]] {
        let written = |r: &u64| deed(block, *r) == Deed::Write && word == &stamp(block, *r)[..8];
        let known = word.iter().all(|byte| *byte == 0) || (1..5000).any(|r| written(&r));
        assert!(known, "block {block} of the head is another one's");
    }
}

#[test]
fn sixteen_readers_see_nothing_but_what_was_there() {
    let true = can_mount() else { return };
    let seconds = std::env::var("DBS_FUSE_SECONDS").ok().and_then(|text| text.parse().ok());
    let seconds: u64 = seconds.unwrap_or(3);
    let server = Server::new(256 << 20);
    server.ask(&json!(["create", "v", BLOCKS * BLOCK as u64]));
    let done = AtomicBool::new(false);
    let (reads, stale) = (AtomicU64::new(0), AtomicU64::new(0));
    let snapshots = server.path("volumes/v/snapshots");
    let head = File::open(server.path("volumes/v/head.raw")).unwrap();
    let rounds = thread::scope(|scope| {
        for seed in 0..READERS {
            let (done, reads, stale, head) = (&done, &reads, &stale, &head);
            let snapshots = &snapshots;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                while !done.load(Ordering::SeqCst) {
                    let (some, late) = read_some(snapshots, &mut random);
                    reads.fetch_add(some, Ordering::Relaxed);
                    stale.fetch_add(late, Ordering::Relaxed);
                    read_head(head, &mut random);
                    // Who writes has its turn, too, where cores are few.
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        let asked = server.try_ask(&json!(["stress", seconds.min(60) * 1000]));
        done.store(true, Ordering::SeqCst);
        asked["ok"].as_u64().unwrap_or_else(|| panic!("{asked}"))
    });
    let (reads, stale) = (reads.into_inner(), stale.into_inner());
    println!("{rounds} rounds, {reads} reads, {stale} of something deleted");
    assert!(rounds > KEPT && reads > 0, "{rounds} rounds, {reads} reads");
}
