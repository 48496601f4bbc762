//! What becomes of requests under way while something of their queue changes.

use super::{Place, noise};
use dbs_core::info::VolumeLimits;
use dbs_guest::{EVENT_INDEX, Guest, Kind, Options, Queue, Request};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for so many answers, all of them good.
fn answers(queue: &mut Queue, count: usize) {
    for _ in 0..count {
        assert!(queue.wait(PATIENCE), "no answer");
        let (head, _) = queue.take().unwrap();
        assert_eq!(queue.end(head).1, 0);
    }
}

/// As a server leaves them that was killed: noted, and not answered.
fn leave(guest: &mut Guest, index: usize, requests: &[Request]) {
    guest.stop(index).unwrap();
    let heads: Vec<u16> = requests.iter().map(|r| guest.queues[index].add(r)).collect();
    guest.note(index as u64, &heads).unwrap();
}

/// Found by review: a driver may take fewer places than it is offered, and its queues were not served.
#[test]
fn a_ring_smaller_than_the_notes_is_served_and_what_is_left_is_found() {
    let place = Place::new();
    let options = Options { queues: 2, places: 64, spare: 64, ..Options::default() };
    let mut guest = place.guest(&options);
    for queue in &mut guest.queues {
        assert_eq!(queue.run(&Request::write(0, vec![1; 512])).unwrap().0, 0);
    }
    let writes: Vec<_> = (0..8).map(|n| Request::write(4096 * n, noise(n, 4096))).collect();
    leave(&mut guest, 1, &writes);
    guest.reconnect(&place.socket("v")).unwrap();
    answers(&mut guest.queues[1], 8);
    for number in 0..8 {
        assert_eq!(place.content(4096 * number, 4096), noise(number, 4096));
    }
    assert_eq!(guest.stop(1).unwrap(), 9);
    assert!(guest.noted(1).unwrap().is_empty());
}

/// Found by review: what comes next, as the client was told, was behind requests that nobody had begun.
#[test]
fn a_queue_that_rests_has_carried_out_what_was_left() {
    let place = Place::new();
    let mut guest = place.guest(&Options { places: 512, ..Options::default() });
    let bytes = 128 << 10;
    guest.queues[0].run(&Request::write(0, noise(1, bytes))).unwrap();
    // More than may be under way at a time.
    leave(&mut guest, 0, &vec![Request::read(0, bytes as u32); 512]);
    guest.reconnect(&place.socket("v")).unwrap();
    assert_eq!(guest.stop(0).unwrap(), 513);
    let queue = &mut guest.queues[0];
    let mut answered = 0;
    while let Some((head, _)) = queue.take() {
        assert_eq!(queue.end(head).1, 0);
        answered += 1;
    }
    assert_eq!(answered, 512);
}

/// Found by review: a machine that came again after a rename had its requests carried out on the next volume of that
/// name, and went on there with its file system of the other.
#[test]
fn requests_of_another_volume_are_not_carried_out_on_the_one_that_has_its_name_now() {
    let place = Place::new();
    let mut guest = place.guest(&Options::default());
    leave(&mut guest, 0, &[Request::write(0, noise(1, 4096))]);
    assert!(place.vhost.kick(place.vhost.clients()[0].id));
    place.store.rename_volume("v", "old").unwrap();
    place.store.create_volume("v", super::SIZE).unwrap();
    place.vhost.follow();
    assert!(guest.reconnect(&place.socket("v")).is_err());
    assert!(guest.queues[0].take().is_none());
    assert_eq!(place.content(0, 4096), [0; 4096]);
    // It goes on where its disk is.
    guest.reconnect(&place.socket("old")).unwrap();
    answers(&mut guest.queues[0], 1);
    guest.queues[0].run(&Request::flush()).unwrap();
    assert_eq!(place.content(0, 4096), [0; 4096]);
    place.vhost.stop();
    let mut content = vec![0; 4096];
    place.store.volume("old").unwrap().read_at(0, &mut content).unwrap();
    assert_eq!(content, noise(1, 4096));
}

#[test]
fn memory_is_added_while_requests_are_under_way() {
    let place = Place::new();
    // Its descriptors are in the ring.
    let mut guest = place.guest(&Options { features: EVENT_INDEX, ..Options::default() });
    for round in 0..4 {
        let queue = &mut guest.queues[0];
        for number in 0..32 {
            queue.add(&Request::write(number * (128 << 10), noise(number + round, 128 << 10)));
        }
        queue.tell();
        let start = guest.grow(1 << 20).unwrap();
        let queue = &mut guest.queues[0];
        answers(queue, 32);
        for number in 0..32 {
            assert!(
                place.content(number * (128 << 10), 128 << 10) == noise(number + round, 128 << 10)
            );
        }
        // Data in the new memory, where the ring is not.
        let slot = queue.add(&Request::write(0, vec![1; 4096]));
        let (table, ..) = queue.places();
        let first = 3 * slot;
        queue.descriptor(table + 16 * u64::from(first + 1), start, 4096, 1, first + 2);
        queue.tell();
        answers(queue, 1);
        assert_eq!(place.content(0, 4096), [0; 4096]);
    }
}

#[test]
fn who_connects_again_finds_each_request_answered_once() {
    let place = Place::new();
    let mut guest = place.guest(&Options::default());
    let mut random = fastrand::Rng::with_seed(1);
    let mut left = 0;
    for round in 0..12 {
        let queue = &mut guest.queues[0];
        // Long ones, which are dropped and stay noted, in the other half.
        for number in 0..4 {
            let at = (8 << 20) + number * (2 << 20);
            queue.add(&Request::range(Kind::WriteZeroes, at, 2 << 20, 0));
        }
        for number in 0..64 {
            queue
                .add(&Request::write(number * (128 << 10), noise(100 * round + number, 128 << 10)));
        }
        queue.tell();
        std::thread::sleep(Duration::from_micros(random.u64(0..4000)));
        guest.reconnect(&place.socket("v")).unwrap();
        let queue = &mut guest.queues[0];
        let mut answered = 0;
        while let Some((head, _)) = queue.take() {
            assert_eq!(queue.end(head).1, 0);
            answered += 1;
        }
        left += 68 - answered;
        answers(queue, 68 - answered);
        assert_eq!(guest.stop(0).unwrap(), 68 * (round as u32 + 1));
        assert!(guest.queues[0].take().is_none(), "an answer that nobody waits for");
        assert!(guest.noted(0).unwrap().is_empty());
        guest.start(0).unwrap();
        for number in 0..64 {
            let content = place.content(number * (128 << 10), 128 << 10);
            assert!(content == noise(100 * round + number, 128 << 10), "round {round}, {number}");
        }
    }
    println!("{left} answers came after a connection was lost");
    assert!(left > 0);
}

/// Found by review: a server that was to stop waited until a guest's own wait for its requests was over.
#[test]
fn a_server_that_stops_does_not_wait_for_long_requests_that_a_queue_waits_for() {
    let place = Place::new();
    let mut guest = place.guest(&Options::default());
    let queue = &mut guest.queues[0];
    for _ in 0..100 {
        queue.add(&Request::range(Kind::WriteZeroes, 0, 16 << 20, 0));
    }
    queue.tell();
    std::thread::scope(|scope| {
        scope.spawn(|| guest.stop(0));
        std::thread::sleep(Duration::from_millis(50));
        place.vhost.stop();
    });
    let queue = &mut guest.queues[0];
    let mut answered = 0;
    while let Some((head, _)) = queue.take() {
        queue.end(head);
        answered += 1;
    }
    assert!(answered < 100, "all were carried out");
}

/// A machine that is reset, and a server that stops, wait for no limit of the volume.
#[test]
fn what_a_limit_delays_holds_up_neither_the_guest_nor_the_server() {
    let place = Place::new();
    let limits = VolumeLimits { bandwidth: 4096, ..VolumeLimits::default() };
    place.store.set_limits("v", limits).unwrap();
    let mut guest = place.guest(&Options::default());
    // More than an hour's worth.
    guest.queues[0].run(&Request::write(0, vec![1; 16 << 20])).unwrap();
    let add = |guest: &mut Guest| {
        let queue = &mut guest.queues[0];
        for block in 0..8 {
            queue.add(&Request::write(4096 * block, vec![2; 4096]));
        }
        queue.tell();
        assert!(!queue.wait(Duration::from_millis(100)), "not delayed");
    };
    add(&mut guest);
    guest.stop(0).unwrap();
    answers(&mut guest.queues[0], 8);
    guest.start(0).unwrap();
    add(&mut guest);
    place.vhost.stop();
}
