//! What a driver of a disk asks for.

use super::{Place, SIZE, noise};
use dbs_guest::{EVENT_INDEX, INDIRECT, Kind, Options, Request};
use dbs_reactor::Driver;
use std::collections::HashMap;
use std::time::Duration;

const OK: u8 = 0;
const FAILED: u8 = 1;
const UNSUPPORTED: u8 = 2;

#[test]
fn each_kind_of_request_is_carried_out() {
    let place = Place::new();
    let mut guest = place.guest(&Options::default());
    assert_eq!(guest.size().unwrap(), SIZE);
    let queue = &mut guest.queues[0];
    let data = noise(1, 64 << 10);
    assert_eq!(queue.run(&Request::write(8192, data.clone())).unwrap().0, OK);
    assert_eq!(place.content(8192, data.len()), data);
    assert_eq!(queue.run(&Request::read(8192, 64 << 10)).unwrap(), (OK, data.clone()));
    // Parts of blocks, and what nobody wrote.
    assert_eq!(queue.run(&Request::write(8192 + 512, vec![7; 512])).unwrap().0, OK);
    let (outcome, read) = queue.run(&Request::read(4096, 8192)).unwrap();
    assert_eq!((outcome, &read[..4096]), (OK, &[0; 4096][..]));
    assert_eq!((&read[4096..4608], &read[4608..5120]), (&data[..512], &[7; 512][..]));
    assert_eq!(queue.run(&Request::flush()).unwrap().0, OK);
    let name = Request { kind: Kind::GetId, sector: 0, length: 20, data: Vec::new() };
    let (outcome, name) = queue.run(&name).unwrap();
    let uuid = place.store.volume_info("v").unwrap().uuid.replace('-', "");
    assert_eq!((outcome, std::str::from_utf8(&name).unwrap()), (OK, &uuid[..20]));
    // Zeros with their space and without it, and a discard.
    for (kind, flags) in [(Kind::WriteZeroes, 0), (Kind::WriteZeroes, 1), (Kind::Discard, 0)] {
        queue.run(&Request::write(1 << 20, data.clone())).unwrap();
        let range = Request::range(kind, (1 << 20) + 4096, 8192, flags);
        assert_eq!(queue.run(&range).unwrap().0, OK);
        let mut expected = data.clone();
        expected[4096..12288].fill(0);
        assert_eq!(place.content(1 << 20, data.len()), expected, "{kind:?} {flags}");
    }
    let counted = place.vhost.clients()[0].counted;
    assert_eq!((counted.reads, counted.read_bytes), (2, (64 << 10) + 8192));
    assert_eq!((counted.writes, counted.others), (7, 3));
}

#[test]
fn what_cannot_be_is_refused_and_the_queue_goes_on() {
    let place = Place::new();
    let mut guest = place.guest(&Options::default());
    let queue = &mut guest.queues[0];
    for (request, outcome) in [
        (Request::read(SIZE, 4096), FAILED),
        (Request::read(SIZE - 512, 1024), FAILED),
        (Request::read(u64::MAX / 512 * 512, 512), FAILED),
        (Request::write(SIZE, vec![0; 512]), FAILED),
        (Request::read(0, 511), FAILED),
        (Request::write(0, vec![0; 100]), FAILED),
        (Request::range(Kind::Discard, SIZE - 4096, 8192, 0), FAILED),
        (Request::range(Kind::Discard, u64::MAX / 512 * 512, 4096, 0), FAILED),
        (Request::range(Kind::Discard, 0, 4096, 1), UNSUPPORTED),
        (Request::range(Kind::WriteZeroes, 0, 4096, 2), UNSUPPORTED),
        (Request { kind: Kind::Discard, ..Request::write(0, vec![0; 32]) }, FAILED),
        (Request { kind: Kind::Flush, ..Request::read(0, 512) }, FAILED),
    ] {
        assert_eq!(queue.run(&request).unwrap().0, outcome, "{request:?}");
    }
    assert_eq!(queue.run(&Request::read(0, 512)).unwrap().0, OK);
}

/// It is worked off in pieces, of which all but the last are in the volume.
#[test]
fn a_range_that_leaves_the_volume_is_refused_as_a_whole() {
    let place = Place::new();
    place.store.create_volume("big", 600 << 20).unwrap();
    place.vhost.follow();
    let socket = place.socket("big");
    let mut guest = dbs_guest::Guest::connect(&socket, &Options::default()).unwrap();
    let queue = &mut guest.queues[0];
    assert_eq!(queue.run(&Request::write(0, vec![7; 4096])).unwrap().0, OK);
    for kind in [Kind::Discard, Kind::WriteZeroes] {
        let range = Request::range(kind, 0, (600 << 20) + 4096, 0);
        assert_eq!(queue.run(&range).unwrap().0, FAILED);
        assert_eq!(queue.run(&Request::read(0, 4096)).unwrap(), (OK, vec![7; 4096]));
    }
}

#[test]
fn many_requests_at_once_are_answered_each_once_and_with_its_own_data() {
    for driver in [Driver::Auto, Driver::Epoll] {
        for features in [INDIRECT | EVENT_INDEX, INDIRECT, EVENT_INDEX, 0] {
            let place = Place::with(driver);
            let queues = 2;
            let options = Options { queues, features, data_bytes: 16384, ..Options::default() };
            let mut guest = place.guest(&options);
            let part = SIZE / u64::from(queues);
            std::thread::scope(|scope| {
                for (index, queue) in guest.queues.iter_mut().enumerate() {
                    scope.spawn(move || random_load(queue, part * index as u64, part, 3000));
                }
            });
        }
    }
}

/// Writes and reads of random ranges of a part, which a request under way has to itself.
fn random_load(queue: &mut dbs_guest::Queue, start: u64, part: u64, requests: usize) {
    let mut random = fastrand::Rng::with_seed(start);
    let mut model = vec![0u8; part as usize];
    let mut running: HashMap<u16, (std::ops::Range<usize>, Option<Vec<u8>>)> = HashMap::new();
    let (mut begun, mut ended) = (0, 0);
    while ended < requests {
        while begun < requests && queue.free() > 0 && running.len() < 64 {
            let length = 512 * random.usize(1..=32);
            let at = 512 * random.usize(0..=(part as usize - length) / 512);
            let range = at..at + length;
            if running.values().any(|(r, _)| r.start < range.end && range.start < r.end) {
                continue;
            }
            let (slot, data) = if random.bool() {
                let data: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
                let request = Request::write(start + at as u64, data.clone());
                (queue.add(&request), Some(data))
            } else {
                (queue.add(&Request::read(start + at as u64, length as u32)), None)
            };
            running.insert(slot, (range, data));
            begun += 1;
        }
        queue.tell();
        assert!(queue.wait(Duration::from_secs(60)), "no answer");
        while let Some((head, written)) = queue.take() {
            let (slot, outcome) = queue.end(head);
            let (range, data) = running.remove(&slot).expect("answered once");
            assert_eq!(outcome, OK);
            match data {
                Some(data) => {
                    assert_eq!(written, 1);
                    model[range].copy_from_slice(&data);
                }
                None => {
                    assert_eq!(written as usize, range.len() + 1);
                    assert!(queue.read(slot) == model[range], "other data than was written");
                }
            }
            ended += 1;
        }
    }
}

#[test]
fn a_queue_rests_and_goes_on() {
    let place = Place::new();
    for inflight in [true, false] {
        let mut guest = place.guest(&Options { inflight, ..Options::default() });
        for round in 0u16..20 {
            let data = noise(round.into(), 4096);
            guest.queues[0].run(&Request::write(4096 * u64::from(round), data)).unwrap();
            assert_eq!(guest.stop(0).unwrap(), u32::from(round) + 1);
            // What is made available meanwhile waits.
            guest.start(0).unwrap();
        }
        assert_eq!(guest.queues[0].run(&Request::read(0, 512)).unwrap().0, OK);
        drop(guest);
        place.kick_all();
    }
}

impl Place {
    fn kick_all(&self) {
        while let Some(client) = self.vhost.clients().first() {
            let _ = self.vhost.kick(client.id);
        }
    }
}

#[test]
fn a_guest_sees_that_its_disk_has_grown() {
    let place = Place::new();
    let mut guest = place.guest(&Options::default());
    place.store.resize_volume("v", 2 * SIZE).unwrap();
    place.vhost.follow();
    assert_eq!(guest.change(Duration::from_secs(60)).unwrap(), 2);
    assert_eq!(guest.size().unwrap(), 2 * SIZE);
    let queue = &mut guest.queues[0];
    assert_eq!(queue.run(&Request::write(2 * SIZE - 4096, vec![1; 4096])).unwrap().0, OK);
}

#[test]
fn a_snapshot_is_read_and_not_written() {
    const RO: u64 = 1 << 5;
    let place = Place::new();
    let data = noise(5, 8192);
    place.store.volume("v").unwrap().write_at(0, &data, false).unwrap();
    place.store.create_snapshot("v", "s", &Default::default()).unwrap();
    place.store.volume("v").unwrap().write_at(0, &[0; 8192], false).unwrap();
    place.vhost.follow();
    // As many as want to.
    let mut guests: Vec<_> = (0..3)
        .map(|_| dbs_guest::Guest::connect(&place.socket("v@s"), &Options::default()).unwrap())
        .collect();
    for guest in &mut guests {
        assert_ne!(guest.features() & RO, 0);
        let queue = &mut guest.queues[0];
        assert_eq!(queue.run(&Request::read(0, 8192)).unwrap(), (OK, data.clone()));
        assert_eq!(queue.run(&Request::write(0, vec![1; 4096])).unwrap().0, FAILED);
        assert_eq!(queue.run(&Request::range(Kind::Discard, 0, 4096, 0)).unwrap().0, FAILED);
        assert_eq!(queue.run(&Request::flush()).unwrap().0, OK);
    }
    let writable = place.guest(&Options::default());
    assert_eq!(writable.features() & RO, 0);
}
