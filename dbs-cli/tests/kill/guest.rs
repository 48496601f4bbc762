//! `kill -9` of a server under a guest, which keeps its memory, and connects again: each request is answered, once, and
//! nothing that was answered is lost.

use crate::support::Place;
use crate::{BLOCK, Random, setting};
use dbs_core::io::tail::default_candidates;
use dbs_guest::{Guest, Options, Queue, Request};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Blocks of the volume, 16 MiB.
const BLOCKS: u64 = 4096;
const QUEUES: u16 = 2;
/// Requests of each queue at a time.
const DEPTH: usize = 48;
const LOAD_MS: std::ops::Range<u64> = 20..200;

/// A queue, and what its blocks hold: each queue has every other one.
struct Load {
    index: usize,
    versions: Vec<u64>,
    /// By slot: first block, how many, and the version written, if any.
    running: HashMap<u16, (usize, usize, Option<u64>)>,
    next: u64,
    answered: u64,
}

fn content(block: u64, version: u64) -> Vec<u8> {
    let text = format!("block {block} version {version}\n");
    let bytes = if version == 0 { &[0][..] } else { text.as_bytes() };
    bytes.iter().copied().cycle().take(BLOCK).collect()
}

impl Load {
    fn new(index: usize) -> Self {
        let versions = vec![0; (BLOCKS / u64::from(QUEUES)) as usize];
        Self { index, versions, running: HashMap::new(), next: 1, answered: 0 }
    }

    fn first(&self) -> u64 {
        self.index as u64 * BLOCKS / u64::from(QUEUES)
    }

    fn begin(&mut self, queue: &mut Queue, random: &mut Random) {
        let count = [1, 1, 1, 2, 7][random.below(5) as usize];
        let first = random.below((self.versions.len() - count) as u64) as usize;
        let overlaps =
            |(at, many, _): &(usize, usize, _)| *at < first + count && first < *at + *many;
        if self.running.values().any(overlaps) {
            return;
        }
        let offset = (self.first() + first as u64) * BLOCK as u64;
        let (request, version) = match random.below(8) {
            0 => (Request::flush(), None),
            1..=2 => (Request::read(offset, (count * BLOCK) as u32), None),
            _ => {
                self.next += 1;
                let blocks = (first..first + count).map(|block| self.first() + block as u64);
                let data: Vec<u8> = blocks.flat_map(|block| content(block, self.next)).collect();
                (Request::write(offset, data), Some(self.next))
            }
        };
        let count = if request.kind == dbs_guest::Kind::Flush { 0 } else { count };
        let slot = queue.add(&request);
        self.running.insert(slot, (first, count, version));
    }

    /// Takes the answers that there are.
    fn take(&mut self, queue: &mut Queue) {
        while let Some((head, _)) = queue.take() {
            let (slot, outcome) = queue.end(head);
            let (first, count, version) = self.running.remove(&slot).expect("answered once");
            assert_eq!(outcome, 0, "an error");
            match version {
                Some(version) => self.versions[first..first + count].fill(version),
                None if count > 0 => {
                    let read = queue.read(slot);
                    for (block, bytes) in (first..).zip(read.chunks(BLOCK)) {
                        let expected = content(self.first() + block as u64, self.versions[block]);
                        assert!(
                            bytes == expected,
                            "block {block}: not version {}",
                            self.versions[block]
                        );
                    }
                }
                None => {}
            }
            self.answered += 1;
        }
    }
}

#[test]
fn a_guest_goes_on_after_kills_of_its_server() {
    let rounds = setting("DBS_KILL_ROUNDS", 10);
    let place = Place::with_store();
    place.json("volume create v 16MiB");
    let socket = place.path("vm/v.sock");
    let mut random = Random(0x51_7cc1_b727_220a);
    let serve = |round: u64| {
        let interval = ["10ms", "10s"][round as usize % 2];
        place.serve(&format!("--vhost-user vm --commit-interval {interval}"))
    };
    let mut server = serve(0);
    let options = Options { queues: QUEUES, data_bytes: 8 * BLOCK as u32, ..Options::default() };
    let mut guest = Guest::connect(&socket, &options).unwrap();
    let mut loads: Vec<Load> = (0..usize::from(QUEUES)).map(Load::new).collect();
    let (mut under_way, mut left) = (0, 0);
    for round in 0..=rounds {
        let load = Duration::from_millis(LOAD_MS.start + random.below(LOAD_MS.end - LOAD_MS.start));
        let begun = Instant::now();
        while begun.elapsed() < load || loads.iter().any(|load| load.answered == 0) {
            for (load, queue) in loads.iter_mut().zip(&mut guest.queues) {
                for _ in 0..8 {
                    if load.running.len() < DEPTH {
                        load.begin(queue, &mut random);
                    }
                }
                queue.tell();
                load.take(queue);
            }
        }
        if round == rounds {
            break;
        }
        server.signal("KILL");
        drop(server);
        // What it had answered by then.
        loads.iter_mut().zip(&mut guest.queues).for_each(|(load, queue)| load.take(queue));
        let running: usize = loads.iter().map(|load| load.running.len()).sum();
        under_way += running;
        left += usize::from(running > 0);
        server = serve(round + 1);
        guest.reconnect(&socket).unwrap();
    }
    for (load, queue) in loads.iter_mut().zip(&mut guest.queues) {
        while !load.running.is_empty() {
            assert!(queue.wait(Duration::from_secs(60)), "no answer to {:?}", load.running);
            load.take(queue);
        }
        for block in 0..load.versions.len() {
            let number = load.first() + block as u64;
            let read = queue.run(&Request::read(number * BLOCK as u64, BLOCK as u32)).unwrap();
            assert!(read == (0, content(number, load.versions[block])), "block {number}");
        }
    }
    let answered: u64 = loads.iter().map(|load| load.answered).sum();
    println!(
        "{rounds} kills, {answered} answers; {under_way} requests were under way at {left} kills"
    );
    assert!(left > 0, "no kill has met a request");
    drop(guest);
    assert_eq!(server.stop().0, Some(0));
    place.dbs("check").ok("check after the last kill");
}

#[test]
fn a_guest_is_told_once_that_a_server_lost_what_it_had_acknowledged() {
    let place = Place::with_store();
    place.json("volume create v 16MiB");
    place.json("snapshot create v@s");
    let socket = place.path("vm/v.sock");
    let serve = || place.serve("--vhost-user vm --commit-interval 1h");
    let server = serve();
    let mut guest = Guest::connect(&socket, &Options::default()).unwrap();
    let flush = |guest: &mut Guest| guest.queues[0].run(&Request::flush()).unwrap().0;
    assert_eq!(guest.queues[0].run(&Request::write(0, vec![7; BLOCK])).unwrap().0, 0);
    let uuid = place.json("info")["uuid"].as_str().unwrap().to_owned();
    server.signal("KILL");
    drop(server);
    for directory in default_candidates() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&uuid) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }
    let _server = serve();
    // Found by review: who only reads took the word of the loss from who writes.
    let mut reader = Guest::connect(&place.path("vm/v@s.sock"), &Options::default()).unwrap();
    assert_eq!(flush(&mut reader), 0);
    guest.reconnect(&socket).unwrap();
    assert_eq!((flush(&mut guest), flush(&mut guest)), (1, 0));
    // One that begins has lost nothing.
    drop(guest);
    let mut guest = Guest::connect(&socket, &Options::default()).unwrap();
    assert_eq!(flush(&mut guest), 0);
}
