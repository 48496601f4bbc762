//! Two calls at once, the first held at each of its operations of the disk in turn while the second
//! runs: the result must be that of the one after the other, in either order.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_core::Store;
use dbs_core::io::Storage;
use dbs_core::volume::{Finish, Request, Start};
use dbs_sim::model::Refusal;
use dbs_sim::pause::{At, Gate};
use dbs_sim::perform::perform;
use dbs_sim::verify::{Allow, check, compare};
use dbs_sim::{CrashMode, Medium, Model, Op, SimDisk, SimEnv, TailPlace, image, threshold};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Interleavings at once: most of the time they wait.
const THREADS: usize = 8;
/// How long the second call may run while the first is held; it may well have to wait for it.
const HEAD_START: Duration = Duration::from_millis(20);
/// How long anything may take before it counts as a deadlock.
const HANG: Duration = Duration::from_secs(300);

fn firsts() -> Vec<Op> {
    vec![
        Op::Write { vol: 0, at: 0, len: 100, fua: false },
        Op::Write { vol: 0, at: 137, len: 3, fua: true },
        Op::Write { vol: 2, at: 0, len: 64, fua: false },
        Op::Discard { vol: 0, at: 0, len: 512 },
        Op::WriteZeroes { vol: 0, at: 3, len: 100, fua: false },
        // Into an extent that holds nothing yet.
        Op::Write { vol: 0, at: 400, len: 8, fua: false },
        Op::Flush,
        Op::CreateSnapshot { vol: 0, snap: 5, labels: 1 },
        Op::DeleteSnapshot { vol: 0, snap: 1 },
        Op::Rollback { vol: 0, snap: 1, keep_size: false },
        Op::Rollback { vol: 0, snap: 2, keep_size: true },
        Op::Flatten { vol: 1, limit: u8::MAX },
        Op::Work { steps: 100 },
        Op::ResizeVolume { vol: 0, sectors: 130 },
        Op::Vacuum { limit: u8::MAX },
        Op::Trim { vol: 0, limit: u8::MAX },
    ]
}

fn seconds() -> Vec<Op> {
    vec![
        Op::Write { vol: 0, at: 8, len: 50, fua: false },
        Op::Write { vol: 1, at: 8, len: 8, fua: true },
        Op::Discard { vol: 0, at: 0, len: 256 },
        Op::Discard { vol: 0, at: 440, len: 16 },
        Op::WriteZeroes { vol: 0, at: 440, len: 72, fua: false },
        // In the extent of the first write, beside it.
        Op::WriteZeroes { vol: 0, at: 112, len: 8, fua: true },
        Op::Write { vol: 0, at: 408, len: 8, fua: false },
        Op::CreateSnapshot { vol: 0, snap: 4, labels: 0 },
        Op::DeleteSnapshot { vol: 0, snap: 2 },
        Op::DeleteSnapshot { vol: 1, snap: 3 },
        Op::Rollback { vol: 0, snap: 0, keep_size: false },
        Op::Clone { vol: 0, snap: 2, new: 4 },
        Op::Flush,
        Op::Work { steps: 100 },
        Op::DeleteVolume { vol: 2 },
    ]
}

/// Whether it needs a snapshot of volume 3.
fn touches(op: &Op, snap: u8) -> bool {
    matches!(op, Op::Relink { links, .. } if links.iter().any(|link| link.0 == snap))
}

/// On the volume that is being rebuilt: each with each, itself included.
fn rebuilding() -> Vec<Op> {
    let vol = 3;
    let links = vec![(2, None), (1, Some(2)), (0, Some(1))];
    vec![
        Op::WriteLayer { vol, snap: 1, start: 10, count: 30 },
        Op::WriteLayer { vol, snap: 2, start: 0, count: 40 },
        Op::ZeroLayer { vol, snap: 1, start: 5, count: 27 },
        Op::ClearLayer { vol, snap: 2, start: 5, count: 40 },
        Op::Write { vol, at: 60, len: 200, fua: false },
        Op::Discard { vol, at: 0, len: 300 },
        Op::CreateSnapshot { vol, snap: 5, labels: 0 },
        Op::InsertSnapshot { vol, snap: 4, sectors: 80 },
        Op::Relink { vol, links, head: Some(0), marks: 0 },
        Op::Flatten { vol: 1, limit: u8::MAX },
        Op::NewUuid { byte: 3 },
        Op::Vacuum { limit: u8::MAX },
        Op::Work { steps: 100 },
        Op::Flush,
    ]
}

/// On a clone with retired snapshots, and on what it was cloned from: each with each, itself included.
fn cloned() -> Vec<Op> {
    vec![
        Op::Write { vol: 1, at: 0, len: 24, fua: true },
        Op::Write { vol: 1, at: 130, len: 40, fua: false },
        Op::Discard { vol: 1, at: 0, len: 256 },
        Op::CreateSnapshot { vol: 1, snap: 5, labels: 0 },
        Op::DeleteSnapshot { vol: 1, snap: 4 },
        Op::DeleteSnapshot { vol: 0, snap: 1 },
        Op::Rollback { vol: 1, snap: 0, keep_size: false },
        Op::Rollback { vol: 0, snap: 0, keep_size: true },
        Op::Prune { vol: 1, at: 0, len: 512 },
        Op::Flatten { vol: 1, limit: u8::MAX },
        Op::ResizeVolume { vol: 1, sectors: 133 },
        Op::Work { steps: 100 },
        Op::Vacuum { limit: u8::MAX },
        Op::NewUuid { byte: 3 },
        Op::Grow { extents: 2 },
    ]
}

/// Times that power was lost while a call was held and another was durable.
static POWER_LOSSES: AtomicU64 = AtomicU64::new(0);
/// Times that the process was killed while a call was held.
static KILLS: AtomicU64 = AtomicU64::new(0);

struct Bench {
    disk: Arc<SimDisk>,
    store: Store,
    model: Model,
    place: TailPlace,
    how: How,
}

/// How the store is opened.
#[derive(Debug, Clone, Copy)]
struct How {
    /// Without a tail, what allocates commits first.
    tail: bool,
    /// There is no memory for bitmaps of extents: they come for each step.
    is_short: bool,
}

impl How {
    const AMPLE: [Self; 2] =
        [Self { tail: true, is_short: false }, Self { tail: false, is_short: false }];
    const SHORT: [Self; 2] =
        [Self { tail: true, is_short: true }, Self { tail: false, is_short: true }];

    fn open(self, disk: &Arc<SimDisk>, place: &TailPlace) -> Store {
        let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
        let tail = self.tail.then(|| place.attach(disk));
        let (env, memory) = (Arc::new(SimEnv::new(1)), self.is_short.then_some(0));
        image::given(Store::open_within(storage, tail, env, false, memory).unwrap())
    }
}

/// What there is besides the threshold cases' state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum With {
    Nothing,
    /// Retired snapshots of volume 0.
    Retired,
    /// Of its clone, volume 1.
    RetiredInClone,
    /// Volume 3, which is being rebuilt.
    Rebuilding,
    /// The same, with a deleted snapshot below those that are left.
    Merging,
}

fn bench(with: With, how: How) -> Bench {
    let config = dbs_sim::Config::small(1);
    assert!(
        config.init.checksums,
        "of the blocks of calls that are cut off they say nothing wrong"
    );
    let disk = Arc::new(SimDisk::new(Medium::file(4 << 20), 1));
    Store::init_on(&*disk, &config.init, &SimEnv::new(1)).unwrap();
    let place = TailPlace::default();
    let store = how.open(&disk, &place);
    disk.set_atomic_from(store.info().metadata);
    let mut model = Model::default();
    let more = [
        Op::CreateSnapshot { vol: 1, snap: 3, labels: 0 },
        Op::Write { vol: 1, at: 0, len: 20, fua: false },
        Op::CreateSnapshot { vol: 0, snap: 3, labels: 0 },
        Op::Blank { vol: 0, at: 8, len: 40 },
        Op::DeleteSnapshot { vol: 0, snap: 3 },
    ];
    let with = match with {
        With::Nothing => Vec::new(),
        With::Retired => vec![Op::Retire { vol: 0, snap: 2, on: true }],
        With::RetiredInClone => vec![
            Op::CreateSnapshot { vol: 1, snap: 4, labels: 0 },
            Op::Write { vol: 1, at: 8, len: 20, fua: false },
            Op::Retire { vol: 1, snap: 3, on: true },
            Op::Retire { vol: 1, snap: 4, on: true },
        ],
        With::Rebuilding => threshold::rebuilt().into_iter().chain([threshold::linked()]).collect(),
        With::Merging => {
            let gone = Op::DeleteSnapshot { vol: 3, snap: 0 };
            threshold::rebuilt().into_iter().chain([threshold::linked(), gone]).collect()
        }
    };
    for (op, number) in threshold::base().iter().chain(&more).chain(&with).zip(1..) {
        model.apply(op, number).unwrap();
        perform(&store, op, model.tag(op, number)).unwrap();
    }
    if how.is_short {
        while store.settle().unwrap() {}
        store.set_metadata_memory(0);
    }
    Bench { disk, store, model, place, how }
}

type Answer = Result<(), dbs_core::Error>;

/// Whether the model expects this answer.
fn fits(expected: &Result<(), Refusal>, answer: &Answer) -> bool {
    match (expected, answer) {
        (Ok(()), Ok(())) => true,
        (Err(kinds), Err(error)) => kinds.contains(&error.kind()),
        _ => false,
    }
}

/// The model after both in this order, if the answers fit.
fn after(model: &Model, ops: [(&Op, u32, &Answer); 2]) -> Option<Model> {
    let mut model = model.clone();
    for (op, number, answer) in ops {
        let busy = matches!(answer, Err(error) if error.kind() == dbs_core::ErrorKind::Busy);
        if busy && matches!(op, Op::DeleteVolume { .. } | Op::DeleteSnapshot { .. }) {
            // The other call has it open.
            continue;
        }
        if busy
            && matches!(op, Op::Grow { .. })
            && ops.iter().any(|(op, ..)| matches!(op, Op::Vacuum { .. }))
        {
            continue;
        }
        let full = matches!(answer, Err(error) if error.kind() == dbs_core::ErrorKind::NoSpace);
        if full && ops.iter().any(|(op, ..)| matches!(op, Op::Vacuum { .. })) {
            // The other call has cut the store's free end off.
            continue;
        }
        let expected = model.apply(op, number);
        if !fits(&expected, answer) {
            return None;
        }
    }
    model.settle();
    Some(model)
}

/// Two calls beside one another.
struct Pair {
    with: With,
    how: How,
    first: Op,
    second: Op,
}

/// Both on their way, the first held.
struct Held {
    bench: Bench,
    gate: Arc<Gate>,
    /// The first made as many operations.
    held: bool,
    answers: [Receiver<Answer>; 2],
    /// What the second was answered while the first was held.
    early: Option<Answer>,
    what: String,
}

impl Held {
    fn new(pair: &Pair, at: At) -> Self {
        let bench = bench(pair.with, pair.how);
        let (first, second) = (&pair.first, &pair.second);
        let what = format!("{:?}, {first:?} held at {at:?}, {second:?}", pair.how);
        let gate = Arc::new(Gate::new(at));
        bench.disk.set_gate(Some(Arc::clone(&gate)));
        let spawn = |op: &Op, number| {
            let tag = bench.model.tag(op, number);
            let (store, op, gate) = (bench.store.clone(), op.clone(), Arc::clone(&gate));
            let (send, receive) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let answer = perform(&store, &op, tag);
                drop(store);
                gate.arrived();
                let _ = send.send(answer);
            });
            receive
        };
        let a = spawn(first, 100);
        let held = gate.wait_held(HANG);
        let b = spawn(second, 101);
        let early = b.recv_timeout(HEAD_START).ok();
        Self { bench, gate, held, answers: [a, b], early, what }
    }

    /// Lets the first go on; both answers.
    fn end(&mut self) -> [Answer; 2] {
        self.gate.open();
        let [a, b] = &self.answers;
        let what = &self.what;
        let a = a.recv_timeout(HANG).unwrap_or_else(|_| panic!("{what}: the first hangs"));
        let b = self.early.take().unwrap_or_else(|| {
            b.recv_timeout(HANG).unwrap_or_else(|_| panic!("{what}: the second hangs"))
        });
        self.bench.disk.set_gate(None);
        [a, b]
    }
}

/// Runs both with the first held at this operation; false if it made fewer.
fn interleave(pair: &Pair, at: At) -> bool {
    let (first, second) = (&pair.first, &pair.second);
    let mut running = Held::new(pair, at);
    let is_early = running.early.is_some();
    if let (true, Some(answer)) = (running.held, &running.early) {
        lose_power_amid(&running.bench, first, (second, answer), &running.what);
    }
    let [answer_a, answer_b] = running.end();
    let Held { bench: Bench { disk, store, model, .. }, held, what, .. } = &running;
    if *held && !is_early {
        lose_power_amid(&running.bench, first, (second, &answer_b), what);
    }
    store.flush().unwrap_or_else(|e| panic!("{what}: flush: {e}"));
    let (a, b) = ((first, 100, &answer_a), (second, 101, &answer_b));
    let orders = [after(model, [a, b]), after(model, [b, a])];
    let models: Vec<Model> = match &orders {
        // Where both write, each block is for itself.
        [Some(ab), Some(ba)] => vec![ab.clone(), ba.clone(), ab.clone().in_flight_of(ba)],
        orders => orders.iter().flatten().cloned().collect(),
    };
    assert!(!models.is_empty(), "{what}: {answer_a:?} and {answer_b:?} fit no order");
    verify(store, &models, what);
    // All of it was flushed: a power loss changes nothing.
    let (At::Change(nth) | At::Read(nth)) = at;
    let mut rng = fastrand::Rng::with_seed(nth);
    let image: Arc<dyn Storage> = Arc::new(disk.crash_image(&mut rng, CrashMode::Torn));
    let again = Store::open_on(image, None, Arc::new(SimEnv::new(2)), false);
    let again = image::given(again.unwrap());
    verify(&again, &models, &format!("{what}, power loss"));
    *held
}

/// Kills the process while the first is held: the second is there if it was answered, and of what was not
/// answered each block or nothing. False if the first made fewer operations.
fn kill_amid(pair: &Pair, at: At) -> bool {
    let (first, second) = ((&pair.first, 100), (&pair.second, 101));
    let mut running = Held::new(pair, at);
    if !running.held {
        let _both = running.end();
        return false;
    }
    let answer = running.early.as_ref().map(Result::is_ok);
    running.bench.disk.stop();
    running.bench.place.kill();
    // Whatever they are told, nobody is there to hear it.
    let _unheard = running.end();
    let Held { bench, what, .. } = running;
    let model = &bench.model;
    let one = [run(model, &[first]), run(model, &[])];
    let with = [run(model, &[second]), run(model, &[first, second]), run(model, &[second, first])];
    let states: Vec<_> = match answer {
        Some(true) => with.into_iter().flatten().collect(),
        Some(false) => one.into_iter().flatten().collect(),
        None => one.into_iter().chain(with).flatten().collect(),
    };
    let each = |state: &Model| states.iter().fold(state.clone(), Model::or_blocks_of);
    let models: Vec<_> = states.iter().map(each).collect();
    KILLS.fetch_add(1, Ordering::Relaxed);
    let Bench { disk, store, place, how, .. } = bench;
    drop(store);
    assert!(!place.attached() && Arc::strong_count(&disk) == 1, "{what}: the store lives on");
    disk.revive();
    let again = how.open(&disk, &place);
    verify(&again, &models, &format!("{what}, killed"));
    true
}

/// The model after these calls, if it allows them.
fn run(model: &Model, ops: &[(&Op, u32)]) -> Option<Model> {
    let mut model = model.clone();
    ops.iter().try_for_each(|(op, number)| model.apply(op, *number)).ok()?;
    model.settle();
    Some(model)
}

/// A power loss while the first call is held or has just ended: the second, if it was answered and is
/// durable by that, is there, and of the first each block or nothing.
fn lose_power_amid(bench: &Bench, first: &Op, (second, answer): (&Op, &Answer), what: &str) {
    let durable = second.is_command()
        || matches!(
            second,
            Op::Flush | Op::Write { fua: true, .. } | Op::WriteZeroes { fua: true, .. }
        );
    if !durable || answer.is_err() {
        return;
    }
    let (a, b) = ((first, 100), (second, 101));
    let Some(alone) = run(&bench.model, &[b]) else { return };
    let both = [run(&bench.model, &[a, b]), run(&bench.model, &[b, a])];
    let both: Vec<_> = both.into_iter().flatten().collect();
    let mixed = both.iter().map(|both| both.clone().in_flight_of(&alone));
    let models: Vec<_> = mixed.chain(both.iter().cloned()).chain([alone.clone()]).collect();
    POWER_LOSSES.fetch_add(1, Ordering::Relaxed);
    for (seed, mode) in [(1, CrashMode::Torn), (2, CrashMode::Kept), (3, CrashMode::Lost)] {
        let image = bench.disk.crash_image(&mut fastrand::Rng::with_seed(seed), mode);
        let again = Store::open_on(Arc::new(image), None, Arc::new(SimEnv::new(2)), false);
        let again = image::given(again.unwrap());
        verify(&again, &models, &format!("{what}, power loss ({mode:?}) before the flush"));
    }
}

fn verify(store: &Store, models: &[Model], what: &str) {
    let models: Vec<&Model> = models.iter().collect();
    compare(store, &models, Allow::Older).unwrap_or_else(|e| panic!("{what}: {e}"));
    check(store).unwrap_or_else(|e| panic!("{what}: {e}"));
}

/// Every two calls that are tried beside one another.
fn pairs(hows: &[How]) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for first in firsts() {
        pairs.extend(seconds().into_iter().map(|op| (With::Nothing, first.clone(), op)));
        pairs.push((With::Retired, first, Op::Prune { vol: 0, at: 0, len: 512 }));
    }
    for first in cloned() {
        pairs.extend(cloned().into_iter().map(|op| (With::RetiredInClone, first.clone(), op)));
    }
    for first in rebuilding() {
        let seconds = rebuilding().into_iter();
        pairs.extend(seconds.map(|op| (With::Rebuilding, first.clone(), op)));
        let work = Op::Work { steps: 100 };
        if first.volume().is_some_and(|_| !touches(&first, 0)) {
            pairs.push((With::Merging, first.clone(), work.clone()));
            pairs.push((With::Merging, work, first));
        }
    }
    let each = |(with, first, second): (With, Op, Op)| {
        let pair =
            move |how: &How| Pair { with, how: *how, first: first.clone(), second: second.clone() };
        hows.iter().map(pair)
    };
    pairs.into_iter().flat_map(each).collect()
}

/// Does this for each pair, with the first call held at each of its operations, until it makes no more. How
/// often.
fn each_moment(hows: &[How], hold: impl Fn(&Pair, At) -> bool + Sync) -> usize {
    let pairs = pairs(hows);
    let [next, done] = [const { AtomicUsize::new(0) }; 2];
    let run = || {
        while let Some(pair) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
            for at in [At::Change, At::Read] {
                let held = |nth: &u64| hold(pair, at(*nth));
                done.fetch_add((1..).take_while(held).count(), Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(run))));
    done.into_inner()
}

#[test]
fn two_calls_at_once_are_one_after_the_other() {
    let done = each_moment(&How::AMPLE, interleave);
    let losses = POWER_LOSSES.load(Ordering::Relaxed);
    println!("{done} interleavings, {losses} power losses amid them");
    assert!(done > 2000 && losses > 0);
}

#[test]
fn a_process_killed_amid_two_calls_leaves_what_it_acknowledged() {
    each_moment(&How::AMPLE, kill_amid);
    let kills = KILLS.load(Ordering::Relaxed);
    println!("{kills} kills amid two calls");
    assert!(kills > 2000);
}

/// Bitmaps of extents leave memory whenever they can, and come back while the first call is held, or between its steps.
#[test]
fn two_calls_at_once_without_memory_for_bitmaps() {
    let done = each_moment(&How::SHORT, interleave);
    println!("{done} interleavings");
    assert!(done > 2000);
}

#[test]
fn a_process_killed_amid_two_calls_without_memory_for_bitmaps() {
    each_moment(&How::SHORT, kill_amid);
}

/// A check while a piece of background work is held at each of its operations: what is neither free nor anybody's amid
/// a step is not lost. False if it made fewer.
fn check_beside(work: &Op, at: At) -> bool {
    let Bench { disk, store, model, .. } = bench(With::RetiredInClone, How::AMPLE[0]);
    let what = format!("{work:?} held at {at:?}");
    let gate = Arc::new(Gate::new(at));
    disk.set_gate(Some(Arc::clone(&gate)));
    std::thread::scope(|scope| {
        let working = scope.spawn(|| {
            let answer = perform(&store, work, model.tag(work, 100));
            gate.arrived();
            answer
        });
        let held = gate.wait_held(HANG);
        let (send, receive) = std::sync::mpsc::channel();
        let checked = &store;
        scope.spawn(move || send.send(checked.check()));
        let early = receive.recv_timeout(HEAD_START).ok();
        gate.open();
        let report = early.unwrap_or_else(|| {
            receive.recv_timeout(HANG).unwrap_or_else(|_| panic!("{what}: the check hangs"))
        });
        let findings = report.unwrap_or_else(|e| panic!("{what}: {e}")).findings;
        assert!(findings.is_empty(), "{what}: {findings:?}");
        working.join().unwrap().unwrap_or_else(|e| panic!("{what}: {e}"));
        held
    })
}

#[test]
fn a_check_takes_nothing_for_lost_that_a_step_of_background_work_has() {
    let mut done = 0;
    let flatten = Op::Flatten { vol: 1, limit: u8::MAX };
    for work in [Op::Vacuum { limit: u8::MAX }, flatten, Op::Work { steps: 100 }] {
        for at in [At::Change, At::Read] {
            done += (1..).take_while(|nth| check_beside(&work, at(*nth))).count();
        }
    }
    println!("{done} interleavings");
    assert!(done > 20);
}

/// A call on one handle while another closes the store, held at its `nth` change; false if it made fewer.
/// Then the process is killed: what was acknowledged is there.
fn close_beside(how: How, second: &Op, nth: u64) -> bool {
    let Bench { disk, store, model, place, .. } = bench(With::Nothing, how);
    let what = format!("{how:?}, closing held at change {nth}, {second:?}");
    let gate = Arc::new(Gate::new(At::Change(nth)));
    disk.set_gate(Some(Arc::clone(&gate)));
    let (closing, at_gate) = (store.clone(), Arc::clone(&gate));
    let close = std::thread::spawn(move || {
        let closed = closing.close();
        at_gate.arrived();
        closed
    });
    let held = gate.wait_held(HANG);
    let (send, receive) = std::sync::mpsc::channel();
    let (op, tag) = (second.clone(), model.tag(second, 101));
    std::thread::spawn(move || {
        let answer = perform(&store, &op, tag);
        drop(store);
        let _ = send.send(answer);
    });
    let early = receive.recv_timeout(HEAD_START).ok();
    gate.open();
    close.join().unwrap().unwrap_or_else(|e| panic!("{what}: close: {e}"));
    let answer = early.unwrap_or_else(|| {
        receive.recv_timeout(HANG).unwrap_or_else(|_| panic!("{what}: the second hangs"))
    });
    disk.set_gate(None);
    place.kill();
    let mut before = model.clone();
    before.settle();
    let mut after = model.clone();
    let expected = after.apply(second, 101);
    after.settle();
    let refused = answer.as_ref().is_err_and(|e| e.kind() == dbs_core::ErrorKind::Poisoned);
    assert!(held || refused, "{what}: {answer:?} of a store that is closed");
    let models = match &answer {
        Ok(()) => vec![after],
        Err(_) if refused => vec![before.clone(), after.clone(), after.in_flight_of(&before)],
        Err(_) => vec![before],
    };
    assert!(refused || fits(&expected, &answer), "{what}: {answer:?}");
    verify(&how.open(&disk, &place), &models, &what);
    held
}

#[test]
fn what_is_acknowledged_beside_closing_is_there() {
    let mut done = 0;
    let hows = [How::AMPLE[0], How::SHORT[0]];
    let all = || seconds().into_iter().chain(firsts());
    for (how, second) in hows.iter().flat_map(|how| all().map(move |op| (*how, op))) {
        let mut nth = 1;
        while nth < 40 && close_beside(how, &second, nth) {
            nth += 1;
            done += 1;
        }
        assert!(nth < 40, "closing makes more changes");
    }
    println!("{done} interleavings");
    assert!(done > 100);
}

/// Found by review: what was acknowledged while closing wrote the superblock was lost.
#[test]
fn a_write_that_ends_at_any_moment_of_a_close_is_kept_if_it_is_acknowledged() {
    let mut nth = 1;
    while end_a_write_in_a_close(nth) {
        nth += 1;
    }
    assert!(nth > 5, "closing made {nth} changes");
}

/// Ends a write, begun before, at the `nth` change that closing makes; false if it makes fewer.
fn end_a_write_in_a_close(nth: u64) -> bool {
    const BLOCK: usize = 4096;
    let Bench { disk, store, .. } = bench(With::Nothing, How::AMPLE[0]);
    store.create_volume("new", 1 << 20).unwrap();
    let volume = store.volume("new").unwrap();
    let mut request = Request::new();
    assert_eq!(volume.start_write(0, BLOCK as u64, &mut request).unwrap(), Start::Io);
    disk.write_at(request.segments()[0].device, &[7; BLOCK]).unwrap();
    let gate = Arc::new(Gate::new(At::Change(nth)));
    disk.set_gate(Some(Arc::clone(&gate)));
    let (held, flushed) = std::thread::scope(|scope| {
        let closing = scope.spawn(|| {
            let closed = store.close();
            gate.arrived();
            closed
        });
        let held = gate.wait_held(HANG);
        let finish = request.finish_write(Ok(())).unwrap();
        let flush = (finish == Finish::Commit).then(|| scope.spawn(|| volume.flush()));
        gate.open();
        closing.join().unwrap().unwrap();
        (held, flush.map(|flush| flush.join().unwrap()))
    });
    drop((request, volume));
    let read = |disk: SimDisk| {
        let store = Store::open_on(Arc::new(disk), None, Arc::new(SimEnv::new(2)), false);
        let store = image::given(store.unwrap());
        check(&store).unwrap_or_else(|e| panic!("held at change {nth}: {e}"));
        let mut bytes = [0; BLOCK];
        store.volume("new").unwrap().read_at(0, &mut bytes).unwrap();
        bytes == [7; BLOCK]
    };
    if flushed.as_ref().is_none_or(Result::is_ok) {
        assert!(read(disk.fork()), "held at change {nth}: it is lost");
    }
    let lost_power = disk.crash_image(&mut fastrand::Rng::with_seed(nth), CrashMode::Torn);
    let there = read(lost_power);
    assert!(there || !matches!(flushed, Some(Ok(()))), "held at change {nth}: flushed and lost");
    held
}
