//! Replicas that die, hang, are full, or talk nonsense.

use crate::data_support::{Replica, eventually, pattern};
use crate::fake::{Do, Fake, done, message};
use crate::sabotage::HANDED_OVER;
use crate::support::{
    Load, SHORT, SIZE, Volume, address, content, options, refused, replicas, short_timeouts,
};
use longhorn_controller::path::{BackendAddress, Mode, PathOptions};
use longhorn_testing::ClientError;
use longhorn_wire::frame::{Header, Type};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const FULL: &str = "write volume-head-000.img: no space left on device";

fn is(header: &Header, kind: Type) -> bool {
    header.kind() == Some(kind)
}

/// Found by review: of an idle replica nobody saw that it was gone.
#[test]
fn an_idle_replica_that_does_not_answer_pings_is_given_up() {
    let volume = Volume::new(PathOptions { flush_timeout: SHORT, ..options(1) });
    let (dead, good) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &dead.address(), Mode::Rw);
    volume.add(2, &good.address(), Mode::Rw);
    dead.behave(|header| if is(header, Type::Ping) { Do::Silence } else { Do::Serve });
    assert_eq!(volume.faulted(1), "ping timeout");
    assert_eq!(volume.mode(2), Mode::Rw);
}

/// Found by review: see `sabotage.rs`. Whatever is asked first finds it, and a ping does if nothing is.
#[test]
fn a_replica_that_a_newer_controller_has_is_the_end_of_all() {
    for kind in [Type::Read, Type::Write, Type::Unmap, Type::Ping] {
        let volume = Volume::new(options(2));
        let (gone, good) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
        volume.add(1, &gone.address(), Mode::Rw);
        volume.add(2, &good.address(), Mode::Rw);
        let client = volume.client(1);
        client.write(0, &[1; 4096]).unwrap();
        gone.behave(move |header| if is(header, kind) { Do::Fail(HANDED_OVER) } else { Do::Serve });
        match kind {
            // Every other one is asked of this replica.
            Type::Read => drop((0..4).map(|_| client.read(0, 4096)).find(Result::is_err).unwrap()),
            Type::Write => drop(refused(client.write(0, &[2; 4096]))),
            Type::Unmap => drop(refused(client.unmap(0, 4096))),
            _ => {}
        }
        for id in [1, 2] {
            assert_eq!(volume.faulted(id), HANDED_OVER, "{kind:?}");
        }
        assert_eq!(refused(client.write(0, &[3; 4096])), "no backend available");
    }
    // One that is being rebuilt is not what a newer controller begins with.
    let volume = Volume::new(options(1));
    let (good, rebuilt) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &good.address(), Mode::Rw);
    volume.add(2, &rebuilt.address(), Mode::Wo);
    rebuilt
        .behave(|header| if is(header, Type::Write) { Do::Fail(HANDED_OVER) } else { Do::Serve });
    volume.client(1).write(0, &[1; 4096]).unwrap();
    assert_eq!((volume.mode(1), volume.mode(2)), (Mode::Rw, Mode::Err));
}

#[test]
fn a_replica_that_dies_under_load_is_not_missed() {
    let volume = Volume::new(options(2));
    let mut replicas = replicas(3);
    for (replica, id) in replicas.iter().zip(0..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    let image = Load { flushes: true, ..Load::default() }.during(&volume, |load| {
        replicas[1].service = None;
        volume.faulted(1);
        load.some_more(300);
        replicas[0].service = None;
        volume.faulted(0);
        load.some_more(300);
    });
    assert_eq!((volume.mode(2), volume.faults().len()), (Mode::Rw, 2));
    assert!(content(&replicas[2]) == image);
    // The last one dies as well.
    replicas[2].service = None;
    let client = volume.client(1);
    volume.faulted(2);
    assert_eq!(refused(client.write(0, &[1; 4096])), "no backend available");
    assert_eq!(refused(client.read(0, 4096)), "no backend available");
    assert_eq!(refused(client.unmap(0, 4096)), "no backend available");
    assert_eq!(refused(client.flush()), "no backend available");
    drop(volume);
    replicas.into_iter().for_each(Replica::finish);
}

/// The list of complete replicas depends on it: as long as the owner has not seen to it, the replica is
/// not `ERR`, and what it missed is not acknowledged.
#[test]
fn the_owner_hears_of_a_replica_before_it_is_err() {
    let volume = Volume::new(options(1));
    let (one, two) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &one.address(), Mode::Rw);
    volume.add(2, &two.address(), Mode::Rw);
    let (asked, asks) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let before = move |replica| {
        asked.send(replica).unwrap();
        // At its end, no more is waited for.
        let _ = released.recv_timeout(Duration::from_secs(30));
    };
    *volume.told.before.lock().unwrap() = Some(Box::new(before));
    one.behave(|header| if is(header, Type::Write) { Do::Fail("no") } else { Do::Serve });
    let client = volume.client(1);
    let write = client.submit(Type::Write, 0, 4096, &[1; 4096]).unwrap();
    assert_eq!(asks.recv_timeout(Duration::from_secs(30)).unwrap(), 1);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(volume.mode(1), Mode::Rw);
    assert!(volume.faults().is_empty());
    assert_eq!(volume.path.stats().requests[1], 0, "acknowledged");
    drop(release);
    write.wait().unwrap();
    volume.faulted(1);
    // By hand, too.
    volume.path.set_mode(2, Mode::Err);
    assert!(asks.try_iter().any(|replica| replica == 2));
}

#[test]
fn a_replica_that_hangs_is_given_up_and_the_last_one_later() {
    for reactors in [1, 2] {
        let volume = Volume::new(short_timeouts(reactors));
        let (one, two) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
        volume.add(1, &one.address(), Mode::Rw);
        volume.add(2, &two.address(), Mode::Rw);
        let load = Load { unmaps: false, ..Load::default() };
        let image = load.during(&volume, |load| {
            one.behave(|_| Do::Silence);
            assert_eq!(volume.faulted(1), "r/w timeout");
            load.some_more(100);
        });
        assert!(two.content() == image);
        two.behave(|header| if is(header, Type::Ping) { Do::Serve } else { Do::Silence });
        let client = volume.client(1);
        let begun = Instant::now();
        assert_eq!(refused(client.write(0, &[1; 4096])), "tcp://r2: r/w timeout");
        assert!(begun.elapsed() > SHORT.mul_f32(1.8), "the last one gets twice as long");
        assert_eq!(refused(client.write(0, &[1; 4096])), "no backend available");
    }
}

/// Found by review: beside one that is being rebuilt, which serves nobody, the last complete one was given up as soon
/// as any other.
#[test]
fn the_last_complete_one_gets_longer_beside_one_that_is_rebuilt() {
    let volume = Volume::new(short_timeouts(1));
    let (complete, rebuilt) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &complete.address(), Mode::Rw);
    volume.add(2, &rebuilt.address(), Mode::Wo);
    complete.behave(|header| if is(header, Type::Ping) { Do::Serve } else { Do::Silence });
    let client = volume.client(1);
    let begun = Instant::now();
    refused(client.write(0, &[1; 4096]));
    assert!(begun.elapsed() > SHORT.mul_f32(1.8), "{:?}", begun.elapsed());
    assert_eq!(volume.faulted(1), "r/w timeout");
}

/// Others are answered all the time; this one never is.
#[test]
fn one_lost_request_gives_its_replica_away() {
    const LOST: i64 = 7 * 4096;
    let short = Duration::from_secs(4);
    let volume = Volume::new(PathOptions { short_timeout: short, ..options(1) });
    let (one, two) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &one.address(), Mode::Rw);
    volume.add(2, &two.address(), Mode::Rw);
    one.behave(|header| {
        let lost = is(header, Type::Write) && header.offset == LOST;
        if lost { Do::Silence } else { Do::Serve }
    });
    let (slow, quick) = (volume.client(1), volume.client(1));
    let begun = Instant::now();
    let pending = slow.submit(Type::Write, LOST, 4096, &[1; 4096]).unwrap();
    while volume.mode(1) == Mode::Rw {
        quick.write(0, &[2; 4096]).unwrap();
        assert!(begun.elapsed() < 15 * short, "the request is waited for still");
    }
    assert!(begun.elapsed() > short.mul_f32(1.8), "it has twice as long as silence");
    pending.wait().unwrap();
    assert_eq!(volume.faulted(1), "r/w timeout");
    assert_eq!((volume.mode(2), volume.faults().len()), (Mode::Rw, 1));
}

/// All that a disk has taken has to reach it: that may take long, and is no reason to lose a replica.
#[test]
fn a_slow_flush_is_not_a_dead_replica_but_has_a_limit() {
    let short_timeout = Duration::from_secs(3);
    for (flush_timeout, faulted) in [(60, false), (6, true)] {
        let flush_timeout = Duration::from_secs(flush_timeout);
        let volume = Volume::new(PathOptions { short_timeout, flush_timeout, ..options(1) });
        let replicas = replicas(2);
        for (replica, id) in replicas.iter().zip(0..) {
            volume.add(id, &address(replica), Mode::Rw);
        }
        let client = volume.client(1);
        client.write(0, &[1; 4096]).unwrap();
        let held = replicas[0].events.delay.lock().unwrap();
        let flush = client.submit(Type::Flush, 0, 0, &[]).unwrap();
        if faulted {
            assert_eq!(volume.faulted(0), "flush timeout");
            flush.wait().unwrap();
            drop(held);
        } else {
            std::thread::sleep(2 * short_timeout + short_timeout / 2);
            drop(held);
            flush.wait().unwrap();
        }
        assert_eq!(volume.mode(0), if faulted { Mode::Err } else { Mode::Rw });
        assert_eq!(volume.mode(1), Mode::Rw);
    }
}

#[test]
fn silence_without_requests_is_none() {
    let volume =
        Volume::new(PathOptions { short_timeout: Duration::from_millis(100), ..options(1) });
    let (one, two) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &one.address(), Mode::Rw);
    volume.add(2, &two.address(), Mode::Rw);
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!((volume.mode(1), volume.mode(2)), (Mode::Rw, Mode::Rw));
}

#[test]
fn a_ping_that_fails_tells_of_a_replica_in_trouble() {
    let volume = Volume::new(options(2));
    let (one, two) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &one.address(), Mode::Rw);
    volume.add(2, &two.address(), Mode::Rw);
    eventually("pings come", || one.seen(Type::Ping).len() > 2);
    one.behave(|header| {
        if is(header, Type::Ping) {
            Do::Fail("ping failure: replica state error")
        } else {
            Do::Serve
        }
    });
    assert_eq!(volume.faulted(1), "ping failure: replica state error");
    assert_eq!(volume.mode(2), Mode::Rw);
    assert_eq!(volume.client(1).write(0, &[1; 512]), Ok(()));
}

#[test]
fn a_failed_write_faults_before_it_is_acknowledged() {
    let volume = Volume::new(options(2));
    let (good, bad) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &good.address(), Mode::Rw);
    volume.add(2, &bad.address(), Mode::Rw);
    bad.behave(
        |header| if is(header, Type::Write) { Do::Fail("the disk is gone") } else { Do::Serve },
    );
    let client = volume.client(4);
    client.write(4096, &[7; 4096]).unwrap();
    assert_eq!(volume.mode(2), Mode::Err);
    for _ in 0..50 {
        assert_eq!(client.read(4096, 4096).unwrap(), [7; 4096]);
    }
    assert_eq!(volume.faulted(2), "the disk is gone");
    assert_eq!(bad.seen(Type::Read).len(), 0);
}

/// Found by review: a write that a removed replica had missed made its free slot `ERR`, and so the next
/// replica that got it.
#[test]
fn a_replica_does_not_inherit_what_one_before_it_missed() {
    let volume = Volume::new(options(1));
    let (one, removed) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &one.address(), Mode::Rw);
    volume.add(2, &removed.address(), Mode::Rw);
    for fake in [&one, &removed] {
        fake.behave(|header| if is(header, Type::Write) { Do::AtGate } else { Do::Serve });
    }
    let client = volume.client(1);
    let pending = client.submit(Type::Write, 0, 4096, &[1; 4096]).unwrap();
    eventually("it is on its way", || !removed.seen(Type::Write).is_empty());
    volume.path.remove(2);
    one.open_gate();
    pending.wait().unwrap();
    let last = 2 + longhorn_controller::rules::REPLICAS_MAX as u32;
    for id in 3..last {
        volume.add(id, &BackendAddress::Null, Mode::Wo);
        assert_eq!(volume.mode(id), Mode::Wo, "replica {id}");
        volume.path.remove(id);
    }
}

#[test]
fn a_failed_read_is_tried_elsewhere() {
    let volume = Volume::new(options(1));
    let fakes: Vec<Fake> = (0..3).map(|_| Fake::new(SIZE as usize)).collect();
    for (fake, id) in fakes.iter().zip(0..) {
        volume.add(id, &fake.address(), Mode::Rw);
    }
    let client = volume.client(1);
    client.write(0, &[5; 8192]).unwrap();
    for fake in &fakes[..2] {
        fake.behave(
            |header| if is(header, Type::Read) { Do::Fail("bad sector") } else { Do::Serve },
        );
    }
    for _ in 0..6 {
        assert_eq!(client.read(0, 8192).unwrap(), [5; 8192]);
    }
    assert_eq!((volume.faulted(0), volume.faulted(1)), ("bad sector".into(), "bad sector".into()));
    assert!(volume.path.stats().retries > 0);
    // And when there is no other.
    fakes[2].behave(|_| Do::Fail("bad sector"));
    assert_eq!(refused(client.read(0, 8192)), "tcp://r2: bad sector");
    assert_eq!(volume.mode(2), Mode::Err);
}

#[test]
fn a_full_replica_beside_one_that_is_not_is_faulted() {
    let volume = Volume::new(options(1));
    let (roomy, full, wo) =
        (Fake::new(SIZE as usize), Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &roomy.address(), Mode::Rw);
    volume.add(2, &full.address(), Mode::Rw);
    volume.add(3, &wo.address(), Mode::Wo);
    for fake in [&full, &wo] {
        fake.behave(|header| if is(header, Type::Write) { Do::Fail(FULL) } else { Do::Serve });
    }
    volume.client(1).write(0, &[1; 4096]).unwrap();
    assert_eq!([1, 2, 3].map(|id| volume.mode(id)), [Mode::Rw, Mode::Err, Mode::Err]);
}

#[test]
fn a_volume_that_is_full_everywhere_can_be_read_and_written_later() {
    let volume = Volume::new(options(2));
    let (one, two, wo) =
        (Fake::new(SIZE as usize), Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &one.address(), Mode::Rw);
    volume.add(2, &two.address(), Mode::Rw);
    volume.add(3, &wo.address(), Mode::Wo);
    let client = volume.client(2);
    client.write(0, &[1; 4096]).unwrap();
    for fake in [&one, &two] {
        fake.behave(|header| if is(header, Type::Write) { Do::Fail(FULL) } else { Do::Serve });
    }
    for _ in 0..3 {
        let Err(ClientError::Unexpected(header)) = client.write(0, &[2; 4096]) else { panic!() };
        assert_eq!(header.kind(), Some(Type::NoSpace));
        assert_eq!(header.size, "no space left on device".len() as u32);
    }
    // What is being rebuilt has what the others lack.
    assert_eq!([1, 2, 3].map(|id| volume.mode(id)), [Mode::Rw, Mode::Rw, Mode::Err]);
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096]);
    for fake in [&one, &two] {
        fake.behave(|_| Do::Serve);
    }
    client.write(0, &[3; 4096]).unwrap();
    assert!(one.content() == two.content());
}

#[test]
fn replicas_that_talk_nonsense_are_faulted_and_their_requests_go_elsewhere() {
    type Nonsense = fn(&Header) -> Vec<u8>;
    const fn at(to: &Header, offset: i64) -> Header {
        Header { offset, ..*to }
    }
    let cases: [(Type, Nonsense); 15] = [
        // Of other places than were asked for, as if the request or the reply had been damaged.
        (Type::Read, |to| message(Type::Response, &at(to, 0), &[6; 4096])),
        (Type::Read, |to| message(Type::Error, &at(to, -1), b"who knows")),
        (Type::Read, |to| {
            let mut bytes = message(Type::Response, to, &[6; 4096]);
            bytes[18] ^= 1;
            bytes
        }),
        (Type::Write, |to| done(&at(to, 8192), 4096)),
        (Type::Write, |to| message(Type::Response, to, &[6; 4096])),
        (Type::Unmap, |to| done(&at(to, 0), 4096)),
        (Type::Unmap, |to| message(Type::Response, to, &[6; 4096])),
        (Type::Read, |_| vec![0xee; 64]),
        (Type::Read, |to| message(Type::Response, to, &[1; 100])),
        (Type::Read, |to| done(to, 4096)),
        (Type::Read, |to| Header::new(Type::Close, to.sequence, 0, 0).encode().to_vec()),
        (Type::Read, |to| message(Type::Eof, to, &[1; 100])),
        (Type::Write, |to| done(to, 17)),
        (Type::Write, |to| message(Type::Write, to, &[1; 100])),
        (Type::Write, |to| {
            let mut bytes = done(to, 4096);
            bytes[22..26].fill(0xff);
            bytes
        }),
    ];
    for (index, (kind, nonsense)) in cases.into_iter().enumerate() {
        let volume = Volume::new(options(1));
        let (good, bad) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
        volume.add(1, &good.address(), Mode::Rw);
        volume.add(2, &bad.address(), Mode::Rw);
        let client = volume.client(1);
        client.write(4096, &[9; 4096]).unwrap();
        bad.behave(
            move |header| {
                if is(header, kind) { Do::Bytes(nonsense(header)) } else { Do::Serve }
            },
        );
        for _ in 0..4 {
            client.write(4096, &[9; 4096]).unwrap();
            assert_eq!(client.read(4096, 4096).unwrap(), [9; 4096], "case {index}");
            client.unmap(65536, 4096).unwrap();
        }
        volume.faulted(2);
        assert_eq!(volume.mode(1), Mode::Rw, "case {index}");
    }
}

#[test]
fn replies_nobody_asked_for_are_ignored() {
    let volume = Volume::new(options(1));
    let fake = Fake::new(SIZE as usize);
    volume.add(1, &fake.address(), Mode::Rw);
    fake.behave(|header| {
        let stray = |sequence| Header { sequence, ..*header };
        let mut bytes = done(&stray(header.sequence ^ 0x1000), 4096);
        bytes.extend(message(Type::Error, &stray(u32::MAX - 1), b"for nobody"));
        bytes.extend(message(Type::Response, &stray(77), &[3; 5000]));
        bytes.extend(message(Type::Response, header, &vec![4; header.size as usize]));
        // Twice: the second finds nobody.
        bytes.extend(message(Type::Response, header, &vec![5; header.size as usize]));
        if is(header, Type::Read) { Do::Bytes(bytes) } else { Do::Serve }
    });
    let client = volume.client(1);
    for _ in 0..200 {
        assert_eq!(client.read(0, 4096).unwrap(), [4; 4096]);
    }
    assert_eq!(volume.mode(1), Mode::Rw);
}

#[test]
fn a_connection_that_closes_takes_its_replica_along_and_nothing_else() {
    let volume = Volume::new(options(2));
    let replicas = replicas(1);
    let fake = Fake::new(SIZE as usize);
    volume.add(1, &address(&replicas[0]), Mode::Rw);
    volume.add(2, &fake.address(), Mode::Rw);
    let image =
        Load { unmaps: false, ..Load::default() }.during(&volume, |load| {
            let left = AtomicU32::new(40);
            fake.behave(move |_| {
                if left.fetch_sub(1, Ordering::SeqCst) == 1 { Do::Close } else { Do::Serve }
            });
            volume.faulted(2);
            load.some_more(200);
        });
    assert!(content(&replicas[0]) == image);
}

#[test]
fn nobody_who_cannot_be_reached_or_does_not_answer_is_added() {
    let volume =
        Volume::new(PathOptions { connect_timeout: Duration::from_millis(300), ..options(1) });
    let mute = Fake::with(SIZE as usize, |_| Do::Silence);
    let rude = Fake::with(SIZE as usize, |_| Do::Bytes(vec![0; 100]));
    let gone = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let gone = BackendAddress::Remote(dbs_frontend::Listen::Tcp("127.0.0.1".into(), gone));
    for address in [mute.address(), rude.address(), gone] {
        let error = volume.path.add(1, "tcp://r1", &address, Mode::Rw).unwrap_err();
        assert!(error.to_string().starts_with("cannot connect to the replica at tcp:127.0.0.1:"));
    }
    assert_eq!(volume.path.mode(1), None);
    // One that is not open answers with an error, and may be added.
    let volume = Volume::new(options(1));
    let closed = Fake::with(SIZE as usize, |_| Do::Fail("ping failure: replica state closed"));
    volume.add(1, &closed.address(), Mode::Rw);
    let again = volume.path.add(1, "tcp://r1", &BackendAddress::Null, Mode::Rw).unwrap_err();
    assert_eq!(again.kind(), std::io::ErrorKind::AlreadyExists);
}

/// Its requests wait in the path as long as they may, and are answered in the end.
#[test]
fn more_requests_than_fit_wait_for_their_turn() {
    let volume = Volume::new(PathOptions { queue_depth: 3, ..options(1) });
    let fake = Fake::new(SIZE as usize);
    volume.add(1, &fake.address(), Mode::Rw);
    fake.behave(|header| if is(header, Type::Ping) { Do::Serve } else { Do::AtGate });
    let client = volume.client(4);
    let sent: Vec<_> = (0..200)
        .map(|index| {
            let data = pattern(index, 4096);
            client.submit(Type::Write, index as i64 * 4096, 4096, &data).unwrap()
        })
        .collect();
    eventually("all have come", || volume.path.stats().in_flight == 200);
    std::thread::sleep(Duration::from_millis(50));
    assert!(fake.seen(Type::Write).len() <= 3);
    fake.open_gate();
    sent.into_iter().for_each(|pending| drop(pending.wait().unwrap()));
    for index in 0..200 {
        assert_eq!(client.read(index * 4096, 4096).unwrap(), pattern(index, 4096));
    }
}

#[test]
fn a_pause_waits_for_a_replica_that_hangs_no_longer_than_requests_do() {
    let volume = Volume::new(short_timeouts(1));
    let (one, two) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &one.address(), Mode::Rw);
    volume.add(2, &two.address(), Mode::Rw);
    one.behave(|_| Do::Silence);
    let client = volume.client(1);
    let pending = client.submit(Type::Write, 0, 4096, &[1; 4096]).unwrap();
    eventually("it is on its way", || !one.seen(Type::Write).is_empty());
    let pause = volume.path.pause(false);
    assert_eq!(volume.mode(1), Mode::Err);
    pending.wait().unwrap();
    drop(pause);
    client.write(0, &[2; 4096]).unwrap();
    assert_eq!(two.content()[..4096], [2; 4096]);
}

/// Found by review: after its process was stopped, or starved, for longer than its timeouts, a controller
/// made replicas `ERR` that it had not listened to.
#[test]
fn time_in_which_the_controller_did_not_run_is_no_replicas_fault() {
    let short = Duration::from_secs(1);
    let volume = Volume::new(PathOptions { short_timeout: short, ..options(1) });
    let fakes: Arc<Vec<_>> = Arc::new((0..3).map(|_| Fake::new(SIZE as usize)).collect());
    for (fake, id) in fakes.iter().zip(0..) {
        volume.add(id, &fake.address(), Mode::Rw);
    }
    fakes[0].behave(|header| if is(header, Type::Write) { Do::Fail("no") } else { Do::Serve });
    for fake in &fakes[1..] {
        fake.behave(|header| if is(header, Type::Read) { Do::AtGate } else { Do::Serve });
    }
    // On the one thread that listens to replicas.
    let late = Arc::clone(&fakes);
    *volume.told.before.lock().unwrap() = Some(Box::new(move |_| {
        std::thread::sleep(short * 5);
        let late = Arc::clone(&late);
        std::thread::spawn(move || {
            std::thread::sleep(short / 4);
            late.iter().for_each(Fake::open_gate);
        });
    }));
    std::thread::scope(|scope| {
        let reads: Vec<_> = (0..3)
            .map(|_| {
                let client = volume.client(1);
                scope.spawn(move || client.read(0, 4096).map(drop))
            })
            .collect();
        let seen = |fake: &Fake| !fake.seen(Type::Read).is_empty();
        eventually("all have something to read", || fakes.iter().all(seen));
        volume.client(1).write(0, &[1; 4096]).unwrap();
        reads.into_iter().for_each(|read| read.join().unwrap().unwrap());
    });
    assert_eq!([0, 1, 2].map(|id| volume.mode(id)), [Mode::Err, Mode::Rw, Mode::Rw]);
}

#[test]
fn a_flush_for_nobody_lets_io_go_on() {
    let volume = Volume::new(options(2));
    let replicas = replicas(2);
    for (replica, id) in replicas.iter().zip(1..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    let client = volume.client(1);
    client.write(0, &[1; 4096]).unwrap();
    let held = replicas[0].events.delay.lock().unwrap();
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| volume.path.flush());
        let commits = |index: usize| replicas[index].events.commits.load(Ordering::SeqCst);
        eventually("both are flushed", || commits(0) + commits(1) == 2);
        client.write(0, &[2; 4096]).unwrap();
        drop(volume.path.pause(true));
        assert!(!flush.is_finished());
        drop(held);
        flush.join().unwrap();
    });
    drop(client);
    let stats = volume.path.stats();
    assert_eq!((volume.faults(), stats.in_flight), (Vec::new(), 0));
}

/// Found by review: with all places taken nothing was flushed before a pause, and all of it in the pause.
#[test]
fn a_flush_waits_for_a_place_among_the_requests() {
    let volume = Volume::new(PathOptions { queue_depth: 1, ..options(1) });
    let replicas = replicas(1);
    volume.add(1, &address(&replicas[0]), Mode::Rw);
    volume.client(1).write(0, &[1; 4096]).unwrap();
    let held = replicas[0].events.delay.lock().unwrap();
    std::thread::scope(|scope| {
        let flushes = [(); 2].map(|()| scope.spawn(|| volume.path.flush()));
        let commits = || replicas[0].events.commits.load(Ordering::SeqCst);
        eventually("one of them is on its way", || commits() == 1);
        std::thread::sleep(Duration::from_millis(200));
        assert!(flushes.iter().all(|flush| !flush.is_finished()), "it did without");
        drop(held);
        flushes.into_iter().for_each(|flush| flush.join().unwrap());
        assert_eq!(commits(), 2);
    });
}
