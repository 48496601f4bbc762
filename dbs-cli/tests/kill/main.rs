//! `kill -9` of a loaded `dbs serve`, again and again: every acknowledged write is there
//! afterwards, and every snapshot is what it was.
//!
//! `DBS_KILL_ROUNDS` (10) and `DBS_KILL_SECONDS` (0) say how many rounds and for how long, each at
//! least. Timing decides what is hit, so a failure need not come again.
#![allow(clippy::unwrap_used)]

#[path = "../disk/mod.rs"]
mod disk;
#[path = "../support/mod.rs"]
mod support;

mod faults;
mod guest;

use dbs_nbd::{Client, ClientOptions};
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use support::Place;

const BLOCK: usize = 4096;
/// Clients at once; neighbouring blocks belong to different ones.
const WRITERS: usize = 4;
/// Blocks of the volume, 32 MiB.
const BLOCKS: usize = 8192;
/// Snapshots kept at once: older ones are deleted, and merge while writes go on.
const KEPT: usize = 3;
/// Shortest and longest load before a kill.
const LOAD_MS: std::ops::Range<u64> = 30..600;

/// What a block may hold: its last acknowledged version, or one that was on its way. Version 0 is
/// zeros.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    acknowledged: u64,
    in_flight: Option<u64>,
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn acknowledged_writes_survive_kills() {
    let rounds = setting("DBS_KILL_ROUNDS", 10);
    let time = Duration::from_secs(setting("DBS_KILL_SECONDS", 0));
    let place = Place::with_store();
    place.json("volume create v 32MiB");
    let socket = place.path("nbd.sock");
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut slots = vec![Slot::default(); BLOCKS];
    let mut snapshots: VecDeque<(String, Vec<u64>)> = VecDeque::new();
    let (begun, mut round, mut writes) = (Instant::now(), 0, 0);
    while round < rounds || begun.elapsed() < time {
        // Some rounds commit often, others keep all they did in the tail.
        let interval = ["10ms", "100ms", "10s"][round as usize % 3];
        let server = place.serve(&format!("--nbd unix:nbd.sock --commit-interval {interval}"));
        let current = read_all(&socket, "v");
        settle(&current, &mut slots, round);
        for (name, content) in &snapshots {
            assert!(read_all(&socket, &format!("v@{name}")) == *content, "snapshot {name} changed");
        }
        let name = format!("r{round}");
        place.json(&format!("snapshot create v@{name}"));
        snapshots.push_back((name, current));
        if snapshots.len() > KEPT {
            let index = random.below(snapshots.len() as u64) as usize;
            let (name, _) = snapshots.remove(index).unwrap();
            place.json(&format!("--yes snapshot delete v@{name}"));
        }
        let load = LOAD_MS.start + random.below(LOAD_MS.end - LOAD_MS.start);
        writes += thread::scope(|scope| {
            let parts: Vec<_> = slots.chunks_mut(BLOCKS / WRITERS).enumerate().collect();
            let writers: Vec<_> = parts
                .into_iter()
                .map(|(writer, part)| {
                    // Here: a slow machine may take longer than the load lasts.
                    let client = connect(&socket, "v");
                    let seed = random.below(u64::MAX) | 1;
                    scope.spawn(move || write_until_killed(client, writer, part, seed, round))
                })
                .collect();
            thread::sleep(Duration::from_millis(load));
            server.signal("KILL");
            drop(server);
            writers.into_iter().map(|writer| writer.join().unwrap()).sum::<u64>()
        });
        round += 1;
        if round % 100 == 0 {
            println!("{round} kills, {writes} acknowledged writes so far");
        }
    }
    let server = place.serve("--nbd unix:nbd.sock");
    settle(&read_all(&socket, "v"), &mut slots, round);
    assert_eq!(server.stop().0, Some(0));
    place.dbs("check").ok("check after the last kill");
    println!("{round} kills, {writes} acknowledged writes, none lost");
    assert!(writes > rounds, "hardly anything was written: {writes}");
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn connect(socket: &Path, export: &str) -> Client<UnixStream> {
    Client::connect_unix(socket, export, &ClientOptions::default()).unwrap()
}

/// The block that slot `index` of a writer's part is: the writers' blocks alternate.
fn block_of(writer: usize, index: usize) -> usize {
    index * WRITERS + writer
}

/// Writes until the server is gone; the number of acknowledged writes.
fn write_until_killed(
    mut client: Client<UnixStream>,
    writer: usize,
    part: &mut [Slot],
    seed: u64,
    round: u64,
) -> u64 {
    let mut random = Random(seed);
    let mut done = 0;
    loop {
        // A run of neighbours now and then, so that extents also fill up.
        let first = random.below(part.len() as u64) as usize;
        let count = if random.below(8) == 0 { 32 } else { 1 };
        for index in (first..part.len()).take(count) {
            let block = block_of(writer, index);
            let offset = (block * BLOCK) as u64;
            let zero = random.below(10) == 0;
            let version = if zero { 0 } else { ((round + 1) << 32) + done + 1 };
            part[index].in_flight = Some(version);
            let written = if zero {
                client.write_zeroes(offset, BLOCK as u64, 0)
            } else {
                client.write_at(offset, &content(block, version), random.below(50) == 0)
            };
            if written.is_err() {
                return done;
            }
            part[index] = Slot { acknowledged: version, in_flight: None };
            done += 1;
        }
        if random.below(100) == 0 && client.flush().is_err() {
            return done;
        }
    }
}

fn content(block: usize, version: u64) -> Vec<u8> {
    let mut word = (block as u64).to_le_bytes().to_vec();
    word.extend(version.to_le_bytes());
    word.repeat(BLOCK / word.len())
}

/// The version of every block of an export.
fn read_all(socket: &Path, export: &str) -> Vec<u64> {
    let mut client = connect(socket, export);
    let mut buffer = vec![0; 256 * BLOCK];
    let mut versions = Vec::with_capacity(BLOCKS);
    for first in (0..BLOCKS).step_by(256) {
        client.read_at((first * BLOCK) as u64, &mut buffer).unwrap();
        let blocks = buffer.chunks_exact(BLOCK).enumerate();
        versions.extend(blocks.map(|(index, bytes)| version_of(export, first + index, bytes)));
    }
    client.disconnect().unwrap();
    versions
}

fn version_of(export: &str, block: usize, bytes: &[u8]) -> u64 {
    let version = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    let expected = if version == 0 { vec![0; BLOCK] } else { content(block, version) };
    assert!(bytes == expected, "block {block} of {export} is torn or not its own");
    version
}

/// Holds what was found against what may be there, and goes on from it.
fn settle(found: &[u64], slots: &mut [Slot], round: u64) {
    for (writer, part) in slots.chunks_mut(BLOCKS / WRITERS).enumerate() {
        for (index, slot) in part.iter_mut().enumerate() {
            let block = block_of(writer, index);
            let version = found[block];
            assert!(
                version == slot.acknowledged || Some(version) == slot.in_flight,
                "round {round}, block {block}: found version {version:#x}, not of {slot:x?}"
            );
            *slot = Slot { acknowledged: version, in_flight: None };
        }
    }
}
