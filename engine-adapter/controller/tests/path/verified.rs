//! I/O whose every read is checked, over one to three replicas that do what they should.

use crate::data_support::{DRIVERS, eventually, pattern};
use crate::support::{Load, SIZE, Volume, address, content, options, replicas};
use longhorn_controller::path::{Mode, PathKind, PathOptions};
use longhorn_wire::frame::Type;
use std::sync::atomic::Ordering;

#[test]
fn replicas_hold_what_was_written() {
    for (driver, reactors, count) in [(DRIVERS[0], 1, 1), (DRIVERS[0], 2, 3), (DRIVERS[1], 2, 2)] {
        let reactor = dbs_reactor::Options { driver, ..Default::default() };
        let volume = Volume::new(PathOptions { reactor, ..options(reactors) });
        let replicas = replicas(count);
        for (replica, id) in replicas.iter().zip(0..) {
            volume.add(id, &address(replica), Mode::Rw);
        }
        let load = Load { flushes: true, seed: count as u64, ..Load::default() };
        let image = load.during(&volume, |load| load.some_more(1500));
        for replica in &replicas {
            assert!(content(replica) == image);
            assert!(replica.events.commits.load(Ordering::SeqCst) > 0, "flushes came");
        }
        let stats = volume.path.stats();
        for kind in PathKind::ALL {
            assert!(stats.requests[kind as usize] > 0, "{}", kind.name());
            assert_eq!(stats.errors[kind as usize], 0, "{}", kind.name());
        }
        assert_eq!((stats.retries, stats.widened, stats.in_flight), (0, 0, 0));
        assert!(stats.replicas.iter().all(|replica| replica.flushes && replica.why.is_none()));
        drop(volume);
        replicas.into_iter().for_each(crate::data_support::Replica::finish);
    }
}

/// Reactors, connections and replicas take requests in any order: what overlaps must be in the same
/// order everywhere.
#[test]
fn overlapping_writes_leave_the_same_on_all_replicas() {
    let volume = Volume::new(options(2));
    let replicas = replicas(3);
    for (replica, id) in replicas.iter().zip(0..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    let clients: Vec<_> = (0..4).map(|_| volume.client(2)).collect();
    let mut random = fastrand::Rng::with_seed(1);
    for round in 0..60 {
        let sent: Vec<_> = (0..32)
            .map(|index| {
                // Few blocks, so that the last writes to each are on their way together.
                let length = 4096 * random.u64(1..4);
                let offset = 4096 * random.u64(0..3) as i64;
                let client = &clients[index % clients.len()];
                if random.u8(..16) == 0 {
                    return client.submit(Type::Unmap, offset, length as u32, &[]).unwrap();
                }
                let data = pattern(random.u64(..), length as usize);
                client.submit(Type::Write, offset, length as u32, &data).unwrap()
            })
            .collect();
        sent.into_iter().for_each(|pending| drop(pending.wait().unwrap()));
        let first = content(&replicas[0]);
        assert!(replicas.iter().all(|replica| content(replica) == first), "round {round}");
    }
    assert!(content(&replicas[0]).iter().any(|byte| *byte != 0));
}

#[test]
fn a_pause_lets_nothing_through_and_loses_nothing() {
    let volume = Volume::new(options(2));
    let replicas = replicas(2);
    for (replica, id) in replicas.iter().zip(0..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    let load = Load { flushes: true, ..Load::default() };
    let image = load.during(&volume, |load| {
        for _ in 0..5 {
            let pause = volume.path.pause(false);
            let (before, first) = (content(&replicas[0]), content(&replicas[1]));
            assert!(before == first, "nothing is on its way to only one of them");
            let requests = load.now();
            eventually("all clients wait", || volume.path.stats().in_flight >= 4);
            std::thread::sleep(std::time::Duration::from_millis(50));
            // A pause does not wait for flushes: each client's may end yet, and then it waits.
            assert!(load.now() <= requests + load.clients);
            assert!(content(&replicas[0]) == before && content(&replicas[1]) == before);
            drop(pause);
            load.some_more(100);
        }
    });
    assert!(replicas.iter().all(|replica| content(replica) == image));
}

#[test]
fn pauses_come_one_after_the_other() {
    let volume = Volume::new(options(2));
    volume.add(1, &longhorn_controller::path::BackendAddress::Null, Mode::Rw);
    let inside = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let _pause = volume.path.pause(false);
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(volume.client(1).write(0, &[1; 512]), Ok(()));
}

#[test]
fn replicas_come_and_go_under_load() {
    let volume = Volume::new(options(2));
    let replicas = replicas(3);
    for (replica, id) in replicas.iter().zip(0..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    let image = Load::default().during(&volume, |load| {
        volume.path.set_mode(0, Mode::Err);
        assert_eq!(volume.mode(0), Mode::Err);
        // ERR is final.
        volume.path.set_mode(0, Mode::Rw);
        assert_eq!(volume.mode(0), Mode::Err);
        load.some_more(200);
        volume.path.remove(0);
        assert_eq!(volume.path.mode(0), None);
        load.some_more(200);
        // It comes back as one that is rebuilt: under a pause, its content copied.
        let pause = volume.path.pause(false);
        let now = content(&replicas[1]);
        replicas[0].active.volume().unwrap().write_at(0, &now, false).unwrap();
        volume.add(7, &address(&replicas[0]), Mode::Wo);
        drop(pause);
        load.some_more(200);
        volume.path.set_mode(7, Mode::Rw);
        load.some_more(200);
        volume.path.remove(2);
        volume.path.remove(2);
        load.some_more(200);
    });
    assert!(content(&replicas[0]) == image);
    assert!(content(&replicas[1]) == image);
    assert_eq!(volume.faults(), [], "its owner did all of it");
}

#[test]
fn the_size_counts() {
    let volume = Volume::new(options(1));
    let replicas = replicas(1);
    volume.add(1, &address(&replicas[0]), Mode::Rw);
    let client = volume.client(1);
    volume.path.resize(SIZE / 2);
    for (result, what) in [
        (client.write(SIZE / 2 - 512, &[1; 1024]).map(drop), "Write of 1024 bytes"),
        (client.read(SIZE / 2, 512).map(drop), "Read of 512 bytes"),
        (client.unmap(SIZE / 2, 4096).map(drop), "unmap of 4096 bytes"),
    ] {
        let text = crate::support::refused(result);
        assert!(text.starts_with("EOF: ") && text.contains(what), "{text}");
    }
    volume.path.resize(SIZE);
    client.write(SIZE / 2 - 512, &[1; 1024]).unwrap();
    assert_eq!(client.read(SIZE / 2 - 512, 1024).unwrap(), [1; 1024]);
    // Of nothing.
    assert!(client.read(0, 0).unwrap().is_empty());
    assert_eq!((client.write(0, &[]), client.unmap(0, 0)), (Ok(()), Ok(0)));
    assert_eq!(volume.mode(1), Mode::Rw);
}

/// It would be more than replicas take once it is made one of whole blocks for one that is rebuilt.
#[test]
fn a_write_that_cannot_be_widened_is_refused() {
    let volume = Volume::new(options(1));
    let replicas = replicas(1);
    volume.add(1, &address(&replicas[0]), Mode::Rw);
    let client = volume.client(1);
    volume.path.resize(64 << 20);
    let most = vec![7; 32 << 20];
    let text = crate::support::refused(client.write(512, &most));
    assert!(text.contains("at most 33554432, of whole blocks"), "{text}");
    assert_eq!(client.write(512, &most[..4096]), Ok(()));
    assert_eq!(volume.mode(1), Mode::Rw);
}
