//! Many clients at once on a store that is worked on meanwhile, over each way the reactors have of
//! doing I/O.

use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, OpenOptions, Store, TailPlace};
use dbs_nbd::{Client, ClientOptions, Listen, ServerOptions, StoreExports, start};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const MIB: u64 = 1 << 20;
const CLIENTS: u64 = 8;
/// Each client has so much of the volume for itself; not whole extents, so that they meet in some.
const SHARE: u64 = MIB + MIB / 2 + 4096;
const OPERATIONS: u64 = 400;

/// Random reads, writes, trims and flushes of one client in its share, held to a copy in memory.
fn client(socket: &Path, number: u64, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed + number);
    let options = ClientOptions { contexts: Vec::new(), extended: number.is_multiple_of(2) };
    let mut client = Client::connect_unix(socket, "vol", &options).unwrap();
    let base = number * SHARE;
    let mut copy = vec![0; SHARE as usize];
    for operation in 0..OPERATIONS {
        let grain = if random.u8(..) < 60 { 512 } else { 4096 };
        let longest = if random.u8(..) < 20 { SHARE } else { 32 << 10 };
        let start = random.u64(..SHARE / grain) * grain;
        let length = (1 + random.u64(..longest / grain)) * grain;
        let end = (start + length).min(SHARE);
        let part = &mut copy[start as usize..end as usize];
        let offset = base + start;
        match random.u8(..10) {
            0..=3 => {
                part.fill_with(|| random.u8(..));
                client.write_at(offset, part, random.u8(..) < 20).unwrap();
            }
            4..=6 => {
                let mut got = vec![0; part.len()];
                client.read_at(offset, &mut got).unwrap();
                assert!(got == part, "client {number}, operation {operation}, seed {seed}");
            }
            7 => {
                part.fill(0);
                client.write_zeroes(offset, part.len() as u64, 0).unwrap();
            }
            8 => {
                let (from, to) = (start.div_ceil(4096) * 4096, end / 4096 * 4096);
                if from < to {
                    copy[from as usize..to as usize].fill(0);
                    client.trim(base + from, to - from, false).unwrap();
                }
            }
            _ => client.flush().unwrap(),
        }
    }
    copy
}

/// Snapshots, their deletion and background work for as long as clients run, and some in any case.
fn disturb(store: &Store, done: &AtomicBool) -> u64 {
    let mut round = 0;
    while round < 3 || !done.load(Ordering::SeqCst) {
        store.create_snapshot("vol", &format!("s{round}"), &SnapshotOptions::default()).unwrap();
        if round >= 2 {
            store.delete_snapshot("vol", &format!("s{}", round - 2)).unwrap();
        }
        while store.work(4).unwrap().remaining > 0 && !done.load(Ordering::SeqCst) {}
        round += 1;
    }
    round
}

fn run(driver: dbs_reactor::Driver, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let options = InitOptions { size: Some(256 * MIB), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    let store = Store::open(&path, &options).unwrap();
    store.create_volume("vol", CLIENTS * SHARE).unwrap();
    let exports = Arc::new(StoreExports::new(store.clone(), false));
    let reactor = dbs_reactor::Options { driver, ..dbs_reactor::Options::default() };
    let options = ServerOptions { reactor, reactors: 2, ..ServerOptions::default() };
    let socket = dir.path().join("nbd");
    let server = match start(&[Listen::Unix(socket.clone())], exports, options) {
        Ok(server) => server,
        Err(error) => return println!("skipped with {driver:?}: {error}"),
    };
    let done = AtomicBool::new(false);
    let (contents, rounds) = thread::scope(|scope| {
        let disturbing = scope.spawn(|| disturb(&store, &done));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn({
                    let socket = &socket;
                    move || client(socket, number, seed)
                })
            })
            .collect();
        let contents: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        done.store(true, Ordering::SeqCst);
        (contents, disturbing.join().unwrap())
    });
    assert!(rounds > 2, "snapshots were taken meanwhile");
    server.stop();
    let expected: Vec<u8> = contents.into_iter().flat_map(Result::unwrap).collect();
    let mut got = vec![0; expected.len()];
    store.volume("vol").unwrap().read_at(0, &mut got).unwrap();
    assert!(got == expected, "what is in the store is what clients wrote; seed {seed}");
    store.close().unwrap();
    let findings = Store::check_path(&path).unwrap().findings;
    assert!(findings.is_empty(), "{findings:?}");
}

/// What a copy of the store shows of the volume's first block, without the tail: whether a commit was written.
/// That it was synced, too, is looked at by `dbs-cli/tests/powercut`, whose disk is told.
fn as_committed(path: &Path) -> Vec<u8> {
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).unwrap();
    let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    let store = Store::open(&copy, &options).unwrap();
    let mut block = vec![0; 4096];
    store.volume("vol").unwrap().read_at(0, &mut block).unwrap();
    store.close().unwrap();
    block
}

/// Writes the first block, does what is to make it durable, and compares with what is.
fn first_block_lasts(driver: dbs_reactor::Driver, lasts: bool, fua: bool, flush: bool, tail: bool) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let options = InitOptions { size: Some(16 * MIB), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let tail = if tail { TailPlace::Auto } else { TailPlace::None };
    let store = Store::open(&path, &OpenOptions { tail, ..OpenOptions::default() }).unwrap();
    let has_tail = store.info().tail;
    store.create_volume("vol", MIB).unwrap();
    let exports = Arc::new(StoreExports::new(store.clone(), false));
    let reactor = dbs_reactor::Options { driver, ..dbs_reactor::Options::default() };
    let options = ServerOptions { reactor, ..ServerOptions::default() };
    let socket = dir.path().join("nbd");
    let server = match start(&[Listen::Unix(socket.clone())], exports, options) {
        Ok(server) => server,
        Err(error) => return println!("skipped with {driver:?}: {error}"),
    };
    let mut client = Client::connect_unix(&socket, "vol", &ClientOptions::default()).unwrap();
    // The extent's metadata has its place then, so that no worker is needed for what follows.
    client.write_at(8192, &[1; 4096], true).unwrap();
    client.write_at(0, &[7; 4096], fua).unwrap();
    if flush {
        client.flush().unwrap();
    }
    let expected = if lasts || !has_tail { 7 } else { 0 };
    assert_eq!(as_committed(&path), [expected; 4096], "{driver:?} {fua} {flush} {has_tail}");
    drop(client);
    server.stop();
    store.close().unwrap();
}

#[test]
fn what_was_flushed_is_committed_when_the_reply_comes() {
    for driver in [dbs_reactor::Driver::Uring, dbs_reactor::Driver::Epoll] {
        first_block_lasts(driver, true, true, false, true);
        first_block_lasts(driver, true, false, true, true);
        // Where no tail keeps the record, a write waits for its commit, too.
        first_block_lasts(driver, true, false, false, false);
        // Else it does not: what the others see is no accident.
        first_block_lasts(driver, false, false, false, true);
    }
}

#[test]
fn clients_see_what_they_wrote_over_io_uring() {
    run(dbs_reactor::Driver::Uring, 0x5eed);
}

#[test]
fn clients_see_what_they_wrote_over_epoll() {
    run(dbs_reactor::Driver::Epoll, 0x5eed);
}
