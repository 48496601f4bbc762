//! What connections cost, and what they leave behind: measured for the whole process, so that only
//! one test runs at a time, and none of others: this is a program of its own.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "dataconn/support.rs"]
mod support;

use dbs_reactor::Driver;
use longhorn_data::DataOptions;
use longhorn_wire::frame::{Header, Type};
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use support::{BLOCK, DRIVERS, MIB, Replica, Setup, eventually, pattern, resident, sockets};

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Uses every reactor once, so that it has what it keeps.
fn warm_up(replica: &Replica) {
    let client = replica.client(8);
    for block in 0..32 {
        client.write(block * BLOCK, &[3; 4096]).unwrap();
        assert_eq!(client.read(block * BLOCK, 4096).unwrap(), [3; 4096]);
    }
    drop(client);
    eventually("they are gone", || replica.gate.stats().connected == 0);
}

/// A client that asks for much and takes nothing holds no more memory than its limit, and nobody
/// else back; when it is given up, everything is free again.
#[test]
fn a_client_that_does_not_read_harms_nobody() {
    let _alone = alone();
    for driver in DRIVERS {
        let options = DataOptions {
            reactors: 1,
            workers: 2,
            bytes_max: 8 * MIB,
            write_timeout: Duration::from_secs(2),
            ..DataOptions::default()
        };
        let Some(replica) = (Setup { options, ..Setup::with_driver(driver) }).start() else {
            continue;
        };
        let client = replica.client(1);
        client.write(0, &pattern(1, MIB as usize)).unwrap();
        let before = resident();
        let slow: Vec<_> = (0..4)
            .map(|_| {
                let mut raw = replica.raw();
                raw.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
                // 2 GiB asked for by each, as far as it is taken.
                for sequence in 0..2048 {
                    let read = Header::new(Type::Read, sequence, 0, MIB as u32).encode();
                    if raw.stream.write_all(&read).is_err() {
                        break;
                    }
                }
                raw
            })
            .collect();
        for _ in 0..50 {
            client.write(0, &[9; 4096]).unwrap();
            client.read(0, 4096).unwrap();
        }
        let grown = resident().saturating_sub(before);
        assert!(grown < 160 * MIB, "{grown} bytes for clients that do not read");
        eventually("they are given up", || replica.gate.stats().connected == 1);
        drop(slow);
        drop(client);
        replica.finish();
    }
}

fn many(count: usize, driver: Driver) {
    let options = DataOptions { max_connections: count + 8, ..DataOptions::default() };
    let Some(replica) = (Setup { options, ..Setup::with_driver(driver) }).start() else { return };
    warm_up(&replica);
    let (before, files) = (resident(), sockets());
    let mut all: Vec<_> = (0..count).map(|_| replica.raw()).collect();
    eventually("all are there", || replica.gate.stats().connected == count as u64);
    // Each has been used once, then idles.
    for (sequence, raw) in all.iter_mut().enumerate() {
        raw.send(Header::new(Type::Read, sequence as u32, 0, 4096), &[]);
        let (reply, payload) = raw.receive();
        assert_eq!((reply.sequence, payload), (sequence as u32, vec![3; 4096]));
    }
    let each = resident().saturating_sub(before) / count as u64;
    println!("{count} connections, {driver:?}: {each} bytes each");
    assert!(each < 6000, "{each} bytes for an idle connection");
    replica.client(1).ping().unwrap();
    drop(all);
    eventually("all are gone", || replica.gate.stats().connected == 0);
    eventually("nothing leaks", || sockets() <= files);
    replica.finish();
}

#[test]
fn two_thousand_idle_connections() {
    let _alone = alone();
    DRIVERS.into_iter().for_each(|driver| many(2000, driver));
}

/// Clients that come and go in the middle of everything leave nothing behind.
#[test]
fn connections_cut_under_load_leave_nothing() {
    let _alone = alone();
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        warm_up(&replica);
        let files = sockets();
        thread::scope(|scope| {
            for thread in 0..3_u64 {
                let replica = &replica;
                scope.spawn(move || {
                    for round in 0..25 {
                        let mut raw = replica.raw();
                        let mut bytes = Vec::new();
                        for sequence in 0..20 {
                            let offset = ((thread * 100 + sequence) * BLOCK) as i64;
                            let length = [4096, 512, 70_000][sequence as usize % 3];
                            let write = Header::with_payload(Type::Write, 1, offset, length);
                            bytes.extend_from_slice(&write.encode());
                            bytes.resize(bytes.len() + length as usize, 7);
                            bytes.extend_from_slice(
                                &Header::new(Type::Read, 2, offset, length).encode(),
                            );
                        }
                        let cut = bytes.len() * (round + 1) / 26;
                        raw.stream.write_all(&bytes[..cut]).unwrap();
                        if round % 2 == 0 {
                            raw.receive();
                        }
                    }
                });
            }
        });
        eventually("all are gone", || {
            let stats = replica.gate.stats();
            stats.connected == 0 && stats.in_flight == 0
        });
        eventually("nothing leaks", || sockets() <= files);
        replica.finish();
    }
}
