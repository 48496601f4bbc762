//! Each planted mistake is found by the test for it, and nothing is found without one.

use crate::fake::{Do, Fake, done, message};
use dbs_frontend::Listen;
use longhorn_controller::frontend::{SocketFrontend, SocketOptions};
use longhorn_controller::path::sabotage::Bug;
use longhorn_controller::path::{Events, Mode, Path, PathOptions, ReplicaId};
use longhorn_testing::DataClient;
use longhorn_wire::frame::{Damaged, Header, Hello, Type};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const SIZE: usize = 1 << 20;
const BLOCK: u32 = 4096;
const LAST: u64 = SIZE as u64 - 4096;
/// What a replica says whose store is with a newer process.
pub const HANDED_OVER: &str = "the replica `/data/v` was handed over to a newer process";
/// Silence after which replicas are given up here.
const SHORT: Duration = Duration::from_secs(1);
/// What has not happened after this does not happen.
const DEADLINE: Duration = Duration::from_secs(6);
/// What would happen at once has happened after this.
const MOMENT: Duration = Duration::from_millis(300);

struct Nobody;

impl Events for Nobody {
    fn faulted(&self, _: ReplicaId, _: &str) {}
}

struct Volume {
    path: Arc<Path>,
    frontend: SocketFrontend,
    bug: Option<Bug>,
}

/// Runs a test on a volume over these replicas, the last of which is being rebuilt if it is to be.
fn on(
    bug: Option<Bug>,
    replicas: &[&Fake],
    depth: usize,
    test: impl FnOnce(&Volume) -> bool,
) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let options =
        PathOptions { bug, queue_depth: depth, short_timeout: SHORT, ..PathOptions::default() };
    let path = Path::new(options, SIZE as u64, Arc::new(Nobody)).unwrap();
    for (id, replica) in (1..).zip(replicas) {
        path.add(id, &format!("r{id}"), &replica.address(), Mode::Rw).unwrap();
    }
    let socket = Listen::Unix(dir.path().join("socket"));
    let frontend = SocketFrontend::start(&path, &SocketOptions::at(socket)).unwrap();
    let volume = Volume { path, frontend, bug };
    let right = test(&volume);
    if volume.bug.is_some() {
        // Some of its requests may wait for ever.
        std::mem::forget(volume);
    }
    right
}

impl Volume {
    fn client(&self) -> DataClient {
        DataClient::connect(self.frontend.address(), 1).unwrap().with_timeout(DEADLINE)
    }

    /// Whether this does not happen. With the mistake it does, and is waited for, however busy the machine is.
    fn never(&self, happens: impl Fn() -> bool) -> bool {
        let (begun, most) = (Instant::now(), if self.bug.is_some() { DEADLINE } else { MOMENT });
        while !happens() && begun.elapsed() < most {
            thread::sleep(Duration::from_millis(1));
        }
        !happens()
    }
}

fn is(header: &Header, kind: Type) -> bool {
    header.kind() == Some(kind)
}

fn replica() -> Fake {
    Fake::new(SIZE)
}

/// One that does this with all requests of this type.
fn that(kind: Type, what: impl Fn(&Header) -> Do + Send + Sync + 'static) -> Fake {
    Fake::with(SIZE, move |header| if is(header, kind) { what(header) } else { Do::Serve })
}

fn data(byte: u8) -> impl Fn(&Header) -> Do + Send + Sync {
    move |header| Do::Bytes(message(Type::Response, header, &vec![byte; header.size as usize]))
}

/// Waits for the first write.
fn come(replica: &Fake) {
    first(replica, Type::Write);
}

fn first(replica: &Fake, kind: Type) {
    let begun = Instant::now();
    while replica.seen(kind).is_empty() && begun.elapsed() < DEADLINE {
        thread::sleep(Duration::from_millis(1));
    }
}

fn who_missed_a_write_is_out_when_it_is_acknowledged(bug: Option<Bug>) -> bool {
    let (good, bad) = (replica(), that(Type::Write, |_| Do::Fail("no")));
    on(bug, &[&good, &bad], 64, |volume| {
        volume.client().write(0, &[1; 4096]).is_ok() && volume.path.mode(2) == Some(Mode::Err)
    })
}

/// Found by review: the older controller went on with the replicas that the newer one had not used yet, which
/// reads from the other ones.
fn what_a_newer_controller_has_is_acknowledged_by_nobody_else(bug: Option<Bug>) -> bool {
    let (good, gone) = (replica(), that(Type::Write, |_| Do::Fail(HANDED_OVER)));
    on(bug, &[&good, &gone], 64, |volume| {
        let client = volume.client();
        let refused = client.write(0, &[1; 4096]).is_err() && client.read(0, BLOCK).is_err();
        refused && [1, 2].iter().all(|id| volume.path.mode(*id) == Some(Mode::Err))
    })
}

fn a_late_reply_is_nobodys(bug: Option<Bug>) -> bool {
    let last = Mutex::new(None::<Header>);
    let late = that(Type::Read, move |header| {
        let before = last.lock().unwrap().replace(*header);
        let mut bytes = before.map_or(Vec::new(), |to| message(Type::Response, &to, &[5; 4096]));
        bytes.extend(message(Type::Response, header, &[4; 4096]));
        Do::Bytes(bytes)
    });
    on(bug, &[&late], 1, |volume| {
        let client = volume.client();
        (0..3).all(|_| client.read(0, BLOCK) == Ok(vec![4; 4096]))
    })
}

fn a_reply_is_about_what_was_asked(bug: Option<Bug>) -> bool {
    let good = replica();
    let bad = that(Type::Read, |to| {
        Do::Bytes(message(Type::Response, &Header { offset: 8192, ..*to }, &[6; 4096]))
    });
    on(bug, &[&good, &bad], 64, |volume| {
        let client = volume.client();
        (0..2).all(|_| client.read(4096, BLOCK) == Ok(vec![0; 4096]))
            && volume.path.mode(2) == Some(Mode::Err)
    })
}

fn nothing_is_read_from_one_being_rebuilt(bug: Option<Bug>) -> bool {
    let (complete, rebuilt) = (replica(), that(Type::Read, data(6)));
    on(bug, &[&complete], 64, |volume| {
        volume.path.add(2, "r2", &rebuilt.address(), Mode::Wo).unwrap();
        let client = volume.client();
        (0..4).all(|_| client.read(0, BLOCK) == Ok(vec![0; 4096]))
    })
}

fn changes_of_one_block_go_one_by_one(bug: Option<Bug>) -> bool {
    let slow = that(Type::Write, |_| Do::AtGate);
    on(bug, &[&slow], 64, |volume| {
        let client = volume.client();
        let write = |byte: u8| client.submit(Type::Write, 0, BLOCK, &[byte; 4096]).unwrap();
        let first = write(1);
        come(&slow);
        // In another turn, so that it goes over the other connection.
        let pending = [first, write(2)];
        let alone = volume.never(|| slow.seen(Type::Write).len() > 1);
        slow.open_gate();
        pending.into_iter().all(|pending| pending.wait().is_ok()) && alone
    })
}

fn a_pause_begins_when_nothing_is_in_flight(bug: Option<Bug>) -> bool {
    let slow = that(Type::Write, |_| Do::AtGate);
    on(bug, &[&slow], 64, |volume| {
        let pending = volume.client().submit(Type::Write, 0, BLOCK, &[1; 4096]).unwrap();
        come(&slow);
        thread::scope(|scope| {
            let pausing = scope.spawn(|| drop(volume.path.pause(false)));
            let in_time = volume.never(|| pausing.is_finished());
            slow.open_gate();
            pausing.join().unwrap();
            drop(pending);
            in_time
        })
    })
}

fn a_failed_read_goes_elsewhere(bug: Option<Bug>) -> bool {
    let (bad, good) = (that(Type::Read, |_| Do::Fail("bad sector")), replica());
    on(bug, &[&bad, &good], 64, |volume| {
        let client = volume.client();
        (0..4).all(|_| client.read(0, BLOCK).is_ok()) && bad.seen(Type::Read).len() == 1
    })
}

fn silence_ends(bug: Option<Bug>) -> bool {
    let (silent, good) = (that(Type::Write, |_| Do::Silence), replica());
    on(bug, &[&silent, &good], 64, |volume| volume.client().write(0, &[1; 4096]).is_ok())
}

fn a_lost_request_is_noticed(bug: Option<Bug>) -> bool {
    let (good, ended) = (replica(), AtomicBool::new(false));
    let lossy =
        that(Type::Write, |header| if header.offset == 0 { Do::Silence } else { Do::Serve });
    on(bug, &[&lossy, &good], 64, |volume| {
        thread::scope(|scope| {
            scope.spawn(|| {
                let client = volume.client();
                while !ended.load(Ordering::SeqCst) {
                    let _ = client.write(8192, &[2; 4096]);
                }
            });
            let noticed = volume.client().write(0, &[1; 4096]).is_ok();
            ended.store(true, Ordering::SeqCst);
            noticed
        })
    })
}

/// One that knows flushes, which take so long.
fn flushing(takes: Duration) -> Fake {
    Fake::with(SIZE, move |header| flushes(header, takes))
}

fn flushes(header: &Header, takes: Duration) -> Do {
    match header.kind() {
        Some(Type::Ping) if header.length > 0 => {
            Do::Bytes(message(Type::Response, header, &Hello::of_server(None).encode()))
        }
        Some(Type::Flush) => {
            thread::sleep(takes);
            Do::Bytes(done(header, 0))
        }
        _ => Do::Serve,
    }
}

/// One that knows flushes, and answers the first write of the first block when it is asked for the last one.
fn holding() -> Fake {
    let held = Mutex::new((false, None::<Header>));
    Fake::with(SIZE, move |header| {
        let (held_one, held) = &mut *held.lock().unwrap();
        if is(header, Type::Write) && header.offset == 0 && !std::mem::replace(held_one, true) {
            *held = Some(*header);
            return Do::Silence;
        }
        if is(header, Type::Read) && header.offset.cast_unsigned() == LAST {
            let mut bytes = held.take().map_or(Vec::new(), |to| done(&to, BLOCK));
            bytes.extend(message(Type::Response, header, &[0; 4096]));
            return Do::Bytes(bytes);
        }
        flushes(header, Duration::ZERO)
    })
}

fn a_pause_does_not_wait_for_a_flush(bug: Option<Bug>) -> bool {
    let slow = flushing(SHORT * 3);
    on(bug, &[&slow], 64, |volume| {
        thread::scope(|scope| {
            let client = volume.client();
            let flush = scope.spawn(move || client.flush().is_ok());
            first(&slow, Type::Flush);
            let begun = Instant::now();
            drop(volume.path.pause(false));
            let paused = begun.elapsed();
            flush.join().unwrap() && paused < SHORT * 2
        })
    })
}

/// Found by review: it could be gone from those that had it, after a loss of power, or not be counted there, and
/// nothing told them from the one that lacked it.
fn what_one_replica_lacks_is_durable_on_the_others(bug: Option<Bug>) -> bool {
    let (good, bad) = (flushing(Duration::ZERO), that(Type::Write, |_| Do::Fail("no")));
    on(bug, &[&good, &bad], 64, |volume| {
        let client = volume.client();
        let flushes = |after: usize| good.seen(Type::Flush).len() == after;
        client.write(0, &[1; 4096]).is_ok()
            && flushes(1)
            // The first one that was sent after the loss, and not each time.
            && client.write(0, &[2; 4096]).is_ok()
            && flushes(2)
            && client.write(0, &[3; 4096]).is_ok()
            && flushes(2)
            // Whatever it was lost for.
            && volume.path.add(3, "r3", &bad.address(), Mode::Wo).is_ok()
            && {
                volume.path.set_mode(3, Mode::Err);
                client.unmap(0, BLOCK).is_ok() && flushes(3)
            }
    })
}

/// Found by review: a change that the lost replica has, too, ended the flushing. The next one was flushed by nobody, and
/// is counted as the former is where power is lost.
fn what_the_lost_one_has_does_not_end_the_flushing(bug: Option<Bug>) -> bool {
    let (good, bad) = (holding(), that(Type::Read, |_| Do::Fail("bad sector")));
    on(bug, &[&good, &bad], 64, |volume| {
        let client = volume.client();
        let flushes = |after: usize| good.seen(Type::Flush).len() == after;
        let first = client.submit(Type::Write, 0, BLOCK, &[1; 4096]).unwrap();
        come(&good);
        come(&bad);
        let lost =
            (0..4).all(|_| client.read(0, BLOCK).is_ok()) && volume.path.mode(2) == Some(Mode::Err);
        lost && client.read(LAST, BLOCK).is_ok()
            && first.wait().is_ok()
            && flushes(1)
            && client.write(0, &[2; 4096]).is_ok()
            && flushes(2)
            && client.write(0, &[3; 4096]).is_ok()
            && flushes(2)
    })
}

/// Found by review: what was on its way when a replica was lost was answered without a flush if it came back later.
fn what_was_on_its_way_at_a_loss_is_flushed(bug: Option<Bug>) -> bool {
    let good = holding();
    let bad = that(Type::Write, |header| match header.offset {
        0 => Do::Silence,
        _ => Do::Fail("no"),
    });
    on(bug, &[&good, &bad], 64, |volume| {
        let client = volume.client();
        let flushes = |after: usize| good.seen(Type::Flush).len() == after;
        let write = |at: u64| client.write(at, &[2; 4096]).is_ok();
        let first = client.submit(Type::Write, 0, BLOCK, &[1; 4096]).unwrap();
        come(&good);
        // The first one that is lost, and the first one that was sent after that.
        write(8192)
            && flushes(1)
            && write(8192)
            && flushes(2)
            && write(8192)
            && flushes(2)
            && client.read(LAST, BLOCK).is_ok()
            && first.wait().is_ok()
            && flushes(3)
    })
}

fn a_slow_flush_is_no_fault(bug: Option<Bug>) -> bool {
    let (slow, quick) = (flushing(SHORT * 3), flushing(Duration::ZERO));
    on(bug, &[&slow, &quick], 64, |volume| {
        volume.client().flush().is_ok() && volume.path.mode(1) == Some(Mode::Rw)
    })
}

fn what_waits_for_one_that_is_gone_goes_on(bug: Option<Bug>) -> bool {
    let (gone, good) = (that(Type::Write, |_| Do::Close), replica());
    on(bug, &[&gone, &good], 64, |volume| volume.client().write(0, &[1; 4096]).is_ok())
}

/// It waits for a block that is held, and others change another one of its blocks meanwhile: not for ever.
fn a_large_change_has_its_turn(bug: Option<Bug>) -> bool {
    let held = holding();
    on(bug, &[&held], 64, |volume| {
        let client = volume.client();
        let write = |block: u64, blocks: u32| {
            let (at, size) = (block * u64::from(BLOCK), blocks * BLOCK);
            client.submit(Type::Write, at.cast_signed(), size, &vec![1; size as usize]).unwrap()
        };
        let first = write(0, 1);
        come(&held);
        let (begun, mut pending) = (Instant::now(), vec![first, write(0, 8)]);
        loop {
            let before = held.seen(Type::Write).len();
            pending.push(write(1, 1));
            if volume.never(|| held.seen(Type::Write).len() > before) {
                break;
            }
            if bug.is_some() && begun.elapsed() > SHORT / 2 {
                return false;
            }
        }
        let released = client.read(LAST, BLOCK).is_ok();
        released && pending.into_iter().all(|pending| pending.wait().is_ok())
    })
}

/// Found by review: each read that reached it was two more requests, for ever.
fn who_says_damaged_to_everything_is_out(bug: Option<Bug>) -> bool {
    let liar = that(Type::Read, |header| {
        let text = "rotten".to_owned();
        let offset = header.offset.cast_unsigned();
        let damaged = Damaged { offset, in_snapshot: false, text };
        Do::Bytes(message(Type::Damaged, header, &damaged.encode()))
    });
    let good = replica();
    on(bug, &[&liar, &good], 64, |volume| {
        let client = volume.client();
        let read = || client.read(0, BLOCK).is_ok();
        (0..400).all(|_| read()) && volume.path.mode(1) == Some(Mode::Err)
    })
}

/// One whose first block is damaged until it is healed, as this says.
fn damaged(heal: impl Fn(&Header) -> Do + Send + Sync + 'static) -> Fake {
    let well = AtomicBool::new(false);
    Fake::with(SIZE, move |header| match header.kind() {
        Some(Type::Read) if header.offset == 0 && !well.load(Ordering::SeqCst) => {
            let damaged = Damaged { offset: 0, in_snapshot: false, text: "rotten".to_owned() };
            Do::Bytes(message(Type::Damaged, header, &damaged.encode()))
        }
        Some(Type::Heal) => {
            well.store(true, Ordering::SeqCst);
            heal(header)
        }
        _ => Do::Serve,
    })
}

/// The content to heal with is on its way while somebody writes the block.
fn nobody_changes_what_is_being_healed(bug: Option<Bug>) -> bool {
    let reads = AtomicU32::new(0);
    // The first read is the client's.
    let slow = that(Type::Read, move |_| match reads.fetch_add(1, Ordering::SeqCst) {
        0 => Do::Serve,
        _ => Do::AtGate,
    });
    let rotten = damaged(|header| Do::Bytes(done(header, BLOCK)));
    // The first one is read from first.
    on(bug, &[&rotten, &slow], 64, |volume| {
        let client = volume.client();
        let read = client.read(0, BLOCK).is_ok();
        while slow.seen(Type::Read).len() < 2 {
            thread::sleep(Duration::from_millis(1));
        }
        let write = client.submit(Type::Write, 0, BLOCK, &[1; 4096]).unwrap();
        let waits = volume.never(|| !rotten.seen(Type::Write).is_empty());
        slow.open_gate();
        read && write.wait().is_ok() && waits && rotten.seen(Type::Heal).len() == 1
    })
}

fn who_refuses_to_be_healed_is_out(bug: Option<Bug>) -> bool {
    let (good, rotten) = (replica(), damaged(|_| Do::Fail("not what it held")));
    on(bug, &[&rotten, &good], 64, |volume| {
        let read = volume.client().read(0, BLOCK).is_ok();
        let begun = Instant::now();
        while volume.path.mode(1) != Some(Mode::Err) && begun.elapsed() < DEADLINE {
            thread::sleep(Duration::from_millis(1));
        }
        read && volume.path.mode(1) == Some(Mode::Err)
    })
}

/// A block is durable when it is healed.
fn a_slow_healing_is_no_fault(bug: Option<Bug>) -> bool {
    let rotten = damaged(|header| {
        thread::sleep(SHORT * 3);
        Do::Bytes(done(header, BLOCK))
    });
    let good = replica();
    on(bug, &[&rotten, &good], 64, |volume| {
        let read = volume.client().read(0, BLOCK).is_ok();
        let of_rotten = || volume.path.stats().replicas.remove(0);
        while of_rotten().mode == Mode::Rw && of_rotten().healed == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        read && of_rotten().mode == Mode::Rw
    })
}

fn who_reads_does_not_wait_for_healing(bug: Option<Bug>) -> bool {
    let (good, rotten) = (replica(), damaged(|_| Do::Silence));
    on(bug, &[&rotten, &good], 64, |volume| {
        let begun = Instant::now();
        volume.client().read(0, BLOCK).is_ok() && begun.elapsed() < SHORT
    })
}

type Check = fn(Option<Bug>) -> bool;

const CHECKS: [(Bug, Check); 22] = [
    (Bug::AcknowledgeFirst, who_missed_a_write_is_out_when_it_is_acknowledged),
    (Bug::OutliveHandOver, what_a_newer_controller_has_is_acknowledged_by_nobody_else),
    (Bug::AnswerBeforeFlush, what_one_replica_lacks_is_durable_on_the_others),
    (Bug::SettleAtEnd, what_the_lost_one_has_does_not_end_the_flushing),
    (Bug::TrustSettled, what_was_on_its_way_at_a_loss_is_flushed),
    (Bug::AnyUse, a_late_reply_is_nobodys),
    (Bug::TrustReplies, a_reply_is_about_what_was_asked),
    (Bug::ReadFromWo, nothing_is_read_from_one_being_rebuilt),
    (Bug::ReleaseEarly, changes_of_one_block_go_one_by_one),
    (Bug::PauseEarly, a_pause_begins_when_nothing_is_in_flight),
    (Bug::PauseLong, a_pause_does_not_wait_for_a_flush),
    (Bug::RetrySame, a_failed_read_goes_elsewhere),
    (Bug::IgnoreTimeout, silence_ends),
    (Bug::IgnoreOldest, a_lost_request_is_noticed),
    (Bug::HurryFlush, a_slow_flush_is_no_fault),
    (Bug::HurryHealing, a_slow_healing_is_no_fault),
    (Bug::KeepWaiting, what_waits_for_one_that_is_gone_goes_on),
    (Bug::Starve, a_large_change_has_its_turn),
    (Bug::HealUnlocked, nobody_changes_what_is_being_healed),
    (Bug::KeepUnhealed, who_refuses_to_be_healed_is_out),
    (Bug::BelieveDamage, who_says_damaged_to_everything_is_out),
    (Bug::HealFirst, who_reads_does_not_wait_for_healing),
];

/// Those of the tests that found something: a mistake may escape once, and a stall of the machine may look like one.
fn found(planted: bool) -> Vec<Bug> {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let right = move |bug, check: Check| match planted {
        true => (0..3).all(|_| check(Some(bug))),
        false => (0..3).any(|_| check(None)),
    };
    thread::scope(|scope| {
        let running: Vec<_> = CHECKS
            .map(|(bug, check)| (bug, scope.spawn(move || right(bug, check))))
            .into_iter()
            .collect();
        let ended = running.into_iter().map(|(bug, check)| (bug, check.join().unwrap()));
        ended.filter(|(_, right)| !right).map(|(bug, _)| bug).collect()
    })
}

#[test]
fn every_planted_mistake_is_found() {
    assert_eq!(found(true), CHECKS.map(|(bug, _)| bug));
}

#[test]
fn nothing_is_found_without_a_mistake() {
    assert_eq!(found(false), []);
}
