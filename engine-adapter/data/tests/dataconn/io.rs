//! Data over the data connection: against a model, by many at once, under pressure, out of space.

use crate::support::{BLOCK, DRIVERS, MIB, Setup, eventually, pattern};
use longhorn_data::DataOptions;
use longhorn_testing::ClientError;
use longhorn_wire::frame::{Header, Type};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Random numbers that a seed repeats.
struct Random(fastrand::Rng);

impl Random {
    fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    /// A range of bytes: often of blocks, sometimes of sectors, sometimes of anything.
    fn range(&mut self, size: u64, max: u64) -> (u64, u64) {
        let unit = [BLOCK, BLOCK, 512, 1][self.below(4) as usize];
        let length = match self.below(8) {
            0 => self.below(max),
            1..4 => unit,
            _ => self.below(16 * unit) + 1,
        };
        let length = (length / unit * unit).clamp(1, size);
        (self.below((size - length) / unit + 1) * unit, length)
    }
}

#[test]
fn any_bytes_anywhere_against_a_model() {
    for (driver, seed) in DRIVERS.into_iter().zip([0xda7a, 0xc0bb]) {
        let size = 4 * MIB;
        let setup = Setup { volume_size: size, ..Setup::with_driver(driver) };
        let Some(replica) = setup.start() else { continue };
        let client = replica.client(2);
        let mut model = vec![0; size as usize];
        let mut random = Random::new(seed);
        for step in 0..3000_u64 {
            let (offset, length) = random.range(size, 300_000);
            let range = offset as usize..(offset + length) as usize;
            match random.below(10) {
                0 => {
                    client.unmap(offset, length as u32).unwrap();
                    let (start, end) =
                        (offset.next_multiple_of(BLOCK), (offset + length) / BLOCK * BLOCK);
                    if start < end {
                        model[start as usize..end as usize].fill(0);
                    }
                }
                1..6 => {
                    let data = pattern(seed ^ step, length as usize);
                    client.write(offset, &data).unwrap();
                    model[range].copy_from_slice(&data);
                }
                _ => {
                    let data = client.read(offset, length as u32).unwrap();
                    assert!(data == model[range], "step {step}: {offset}+{length}, {driver:?}");
                }
            }
        }
        assert!(client.read(0, size as u32).unwrap() == model);
        drop(client);
        replica.finish();
    }
}

/// Each thread has the bytes that are its own by an odd stride: neighbours in the same blocks and
/// sectors at the same time lose nothing.
#[test]
fn neighbours_in_a_block_do_not_lose_each_others_bytes() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let client = replica.client(3);
        thread::scope(|scope| {
            for mine in 0..4_u64 {
                let client = &client;
                scope.spawn(move || {
                    for round in 1..=60_u8 {
                        for piece in 0..8 {
                            let offset = 1000 + (piece * 4 + mine) * 333;
                            client.write(offset, &[round ^ (mine as u8) << 6; 333]).unwrap();
                        }
                    }
                });
            }
        });
        for (piece, mine) in (0..8).flat_map(|piece| (0..4).map(move |mine| (piece, mine))) {
            let data = client.read(1000 + (piece * 4 + mine) * 333, 333).unwrap();
            assert_eq!(data, [60 ^ (mine as u8) << 6; 333], "{piece} {mine} {driver:?}");
        }
        drop(client);
        replica.finish();
    }
}

/// Everything is sent before anything is received, some of it overlapping: each block ends as one
/// of those that were written to it, whole, and all replies come, in whatever order.
#[test]
fn a_pipeline_with_overlaps_is_answered_completely() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let mut raw = replica.raw();
        let mut random = Random::new(7);
        let mut candidates: HashMap<u64, Vec<u8>> = HashMap::new();
        let count = 1500_u32;
        let mut reads = 0;
        let mut sent = Vec::new();
        for sequence in 0..count {
            let (block, blocks) = (random.below(64), random.below(4) + 1);
            let offset = (block * BLOCK) as i64;
            if sequence % 5 == 4 {
                reads += 1;
                let read = Header::new(Type::Read, sequence, offset, (blocks * BLOCK) as u32);
                sent.extend_from_slice(&read.encode());
                continue;
            }
            let byte = (sequence % 250) as u8 + 1;
            let length = (blocks * BLOCK) as u32;
            let write = Header::with_payload(Type::Write, sequence, offset, length);
            sent.extend_from_slice(&write.encode());
            sent.resize(sent.len() + length as usize, byte);
            for block in block..block + blocks {
                candidates.entry(block).or_default().push(byte);
            }
        }
        let mut writer = raw.stream.try_clone().unwrap();
        let sending = thread::spawn(move || writer.write_all(&sent).unwrap());
        let mut seen = vec![false; count as usize];
        let mut with_data = 0;
        for _ in 0..count {
            let (reply, payload) = raw.receive();
            assert_eq!(reply.kind(), Some(Type::Response));
            assert!(!std::mem::replace(&mut seen[reply.sequence as usize], true), "twice");
            with_data += u32::from(!payload.is_empty());
            for block in payload.chunks(BLOCK as usize) {
                assert!(block.iter().all(|byte| *byte == block[0]), "a torn block");
            }
        }
        sending.join().unwrap();
        assert_eq!(with_data, reads);
        for (block, bytes) in candidates {
            let read = Header::new(Type::Read, 1, (block * BLOCK) as i64, BLOCK as u32);
            let data = raw.ask(read, &[]).1;
            assert!(bytes.contains(&data[0]) && data.iter().all(|byte| *byte == data[0]));
        }
        let stats = replica.gate.stats();
        assert_eq!(stats.requests[1], u64::from(count - reads));
        assert_eq!(replica.events.revision.load(Ordering::SeqCst), u64::from(count - reads));
        drop(raw);
        replica.finish();
    }
}

/// What is slow does not keep back what is not, on the same connection.
#[test]
fn replies_come_as_they_are_ready() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let mut raw = replica.raw();
        let write = Header::with_payload(Type::Write, 1, 0, 4096);
        raw.ask(write, &[1; 4096]);
        let held = replica.events.delay.lock().unwrap();
        raw.send(Header::new(Type::Unmap, 10, 0, 4096), &[]);
        raw.send(Header::new(Type::Read, 11, 8192, 4096), &[]);
        assert_eq!(raw.receive().0.sequence, 11);
        drop(held);
        assert_eq!(raw.receive().0.sequence, 10);
        drop(raw);
        replica.finish();
    }
}

#[test]
fn large_requests_are_whole() {
    for driver in DRIVERS {
        let (store_size, volume_size) = (256 * MIB, 64 * MIB);
        let setup = Setup { store_size, volume_size, ..Setup::with_driver(driver) };
        let Some(replica) = setup.start() else { continue };
        let client = replica.client(2);
        for (offset, length) in [(0, 32 * MIB), (1, 9 * MIB + 3), (40 * MIB - 512, 20 * MIB)] {
            let data = pattern(offset, length as usize);
            client.write(offset, &data).unwrap();
            assert!(client.read(offset, length as u32).unwrap() == data, "{offset}+{length}");
        }
        assert_eq!(client.unmap(0, 64 * MIB as u32), Ok(64 * MIB as u32));
        assert!(client.read(0, 32 * MIB as u32).unwrap().iter().all(|byte| *byte == 0));
        drop(client);
        replica.finish();
    }
}

/// Whoever is slow but reads gets everything.
#[test]
fn a_client_that_reads_slowly_gets_everything() {
    let options = DataOptions { bytes_max: 2 * MIB, ..DataOptions::default() };
    let replica = Setup { options, ..Setup::default() }.start().unwrap();
    let mut raw = replica.raw();
    let data = pattern(3, MIB as usize);
    replica.client(1).write(0, &data).unwrap();
    for sequence in 0..12 {
        raw.send(Header::new(Type::Read, sequence, 0, MIB as u32), &[]);
    }
    for _ in 0..12 {
        let mut header = [0; 26];
        raw.stream.read_exact(&mut header).unwrap();
        let mut payload = vec![0; MIB as usize];
        for part in payload.chunks_mut(200_000) {
            raw.stream.read_exact(part).unwrap();
            thread::sleep(Duration::from_millis(3));
        }
        assert!(payload == data);
    }
    drop(raw);
    replica.finish();
}

/// One client stops reading and writing for good, in the middle of a message.
#[test]
fn a_half_open_peer_holds_nothing_but_its_socket() {
    let replica = Setup::default().start().unwrap();
    let mut half = replica.raw();
    let write = Header::with_payload(Type::Write, 1, 0, 1 << 20);
    half.stream.write_all(&write.encode()).unwrap();
    half.stream.write_all(&[1; 1000]).unwrap();
    let client = replica.client(1);
    for _ in 0..20 {
        client.write(0, &[2; 4096]).unwrap();
    }
    assert_eq!(client.read(0, 4096).unwrap(), [2; 4096]);
    drop(client);
    // The service ends although that one is still there.
    replica.finish();
    assert!(half.is_closed());
}

/// A full store is an error that controllers know; reads go on, and after an unmap writes do.
#[test]
fn a_full_store_says_so_and_recovers() {
    for driver in DRIVERS {
        let (store_size, volume_size) = (16 * MIB, 64 * MIB);
        let setup = Setup { store_size, volume_size, ..Setup::with_driver(driver) };
        let Some(replica) = setup.start() else { continue };
        let client = replica.client(2);
        let full = (0..64).find_map(|mib| {
            let failed = client.write(mib * MIB, &pattern(mib, MIB as usize)).err()?;
            Some((mib, failed))
        });
        let (mib, error) = full.unwrap();
        let ClientError::Replica(text) = &error else { panic!("{error}") };
        assert!(text.contains("no space left on device"), "{text}");
        let mut raw = replica.raw();
        let write = Header::with_payload(Type::Write, 5, (mib * MIB) as i64, 4096);
        assert!(raw.error(write, &[1; 4096]).contains("no space left on device"), "again");
        assert!(client.read(0, MIB as u32).unwrap() == pattern(0, MIB as usize));
        client.write(0, &[8; 4096]).unwrap();
        client.unmap(0, 4 * MIB as u32).unwrap();
        client.write(mib * MIB, &pattern(mib, MIB as usize)).unwrap();
        assert!(client.read(mib * MIB, MIB as u32).unwrap() == pattern(mib, MIB as usize));
        drop((client, raw));
        replica.finish();
    }
}

/// Snapshots are taken meanwhile: reads and writes that they hold up go to workers, and lose
/// nothing.
#[test]
fn snapshots_under_load() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let client = Arc::new(replica.client(2));
        let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for mine in 0..3_u64 {
                let (client, stop, writes) = (&client, &stop, &writes);
                scope.spawn(move || {
                    let mut round = 0_u64;
                    while !stop.load(Ordering::SeqCst) {
                        round += 1;
                        let offset = mine * MIB + round % 32 * 5000;
                        let data = pattern(round ^ mine << 32, 5000);
                        client.write(offset, &data).unwrap();
                        assert!(client.read(offset, 5000).unwrap() == data, "{mine} {round}");
                        writes.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for number in 0..12 {
                let target = writes.load(Ordering::SeqCst) + 20;
                eventually("writes go on", || writes.load(Ordering::SeqCst) >= target);
                replica
                    .store
                    .create_snapshot("v", &format!("s{number}"), &Default::default())
                    .unwrap();
                if number % 3 == 2 {
                    replica.store.delete_snapshot("v", &format!("s{}", number - 1)).unwrap();
                    while replica.store.work(16).unwrap().remaining > 0 {}
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
        drop(client);
        replica.finish();
    }
}
