//! Two machines that reach one disk, and whose locks do not see each other.

use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use dbs_core::store::{Env, InitOptions};
use dbs_core::{ErrorKind, Result, Store};
use dbs_sim::{CrashMode, Medium, SimDisk, TailPlace};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const BLOCK: usize = 4096;
const SIZE: u64 = 4 << 20;
const SECOND: u64 = 1_000_000_000;
/// The volume's blocks: each of them is written once, which makes a record.
const BLOCKS: u64 = 256;

type Hook = Box<dyn FnOnce() + Send>;

/// The disk as one machine reaches it, its clock, and what is done at a moment by another.
struct Machine {
    disk: Arc<SimDisk>,
    is_device: bool,
    boot: u128,
    /// All machines have the same time.
    clock: Arc<AtomicU64>,
    numbers: AtomicU64,
    calls: AtomicU64,
    looks: AtomicU64,
    /// Reads of the last one.
    reads: AtomicU64,
    /// How long a look takes, and whether the superblock cannot be read.
    takes: AtomicU64,
    is_bad: AtomicBool,
    /// Whether a block between those that a look asks for cannot be read.
    is_bad_between: AtomicBool,
    /// Whether there is no space for what is allocated, and how often it was to be.
    is_full: AtomicBool,
    allocations: AtomicU64,
    changes: AtomicU64,
    pauses: AtomicU64,
    /// Before the next write of a group.
    at_group: Mutex<Option<Hook>>,
    /// Before a call: how many are left.
    at_call: Mutex<Option<(u64, Hook)>>,
    /// Amid a pause: how many are left.
    in_pause: Mutex<Option<(u64, Hook)>>,
}

fn due(hook: &Mutex<Option<(u64, Hook)>>) {
    let due = {
        let mut waiting = hook.lock().unwrap();
        if let Some((left, _)) = &mut *waiting {
            *left -= 1;
        }
        waiting.take_if(|(left, _)| *left == 0)
    };
    due.into_iter().for_each(|(_, hook)| hook());
}

impl Machine {
    fn new(disk: &Arc<SimDisk>, clock: &Arc<AtomicU64>, boot: u128, is_device: bool) -> Arc<Self> {
        Arc::new(Self {
            disk: Arc::clone(disk),
            is_device,
            boot,
            clock: Arc::clone(clock),
            numbers: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            takes: AtomicU64::new(0),
            is_bad: AtomicBool::new(false),
            is_bad_between: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            allocations: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            pauses: AtomicU64::new(0),
            at_group: Mutex::default(),
            at_call: Mutex::default(),
            in_pause: Mutex::default(),
        })
    }

    fn open(self: &Arc<Self>) -> Result<Store> {
        let tail = TailPlace::default().attach(&self.disk);
        Store::open_on(Arc::clone(self) as _, Some(tail), Arc::clone(self) as _, false)
    }

    fn call(&self, changes: bool) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.changes.fetch_add(changes.into(), Ordering::Relaxed);
        due(&self.at_call);
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }
}

impl Storage for Machine {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        self.call(false);
        // Nothing else reads the superblock together with other places.
        if requests.len() > 1 && requests[0].offset == 0 {
            self.looks.fetch_add(1, Ordering::Relaxed);
            self.reads.store(requests.len() as u64, Ordering::Relaxed);
            self.clock.fetch_add(self.takes.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        if self.is_bad.load(Ordering::Relaxed) && requests.iter().any(|request| request.offset == 0)
        {
            return Err(io::Error::other("bad block"));
        }
        let is_between = || requests.iter().any(|request| request.buf.len() > BLOCK);
        if self.is_bad_between.load(Ordering::Relaxed) && is_between() {
            return Err(io::Error::other("bad block"));
        }
        self.disk.read_many(requests)
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        self.call(true);
        if requests.iter().any(|request| request.buf.starts_with(b"DBSj")) {
            let due = self.at_group.lock().unwrap().take();
            due.into_iter().for_each(|hook| hook());
        }
        self.disk.write_many(requests)
    }

    fn flush(&self) -> io::Result<()> {
        self.call(false);
        self.disk.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.call(true);
        self.disk.discard(offset, len_bytes)
    }

    fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.call(false);
        self.allocations.fetch_add(1, Ordering::Relaxed);
        if self.is_full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.disk.allocate(offset, len_bytes)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.call(true);
        self.disk.set_size(size_bytes)
    }

    fn resizable(&self) -> bool {
        !self.is_device
    }

    fn may_be_shared(&self) -> bool {
        true
    }

    fn driver(&self) -> &'static str {
        "shared"
    }
}

impl Env for Machine {
    fn now_ns(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    fn random(&self) -> [u8; 16] {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        fastrand::Rng::with_seed(number * 1000 + self.boot as u64).u128(..).to_le_bytes()
    }

    fn boot_id(&self) -> [u8; 16] {
        self.boot.to_be_bytes()
    }

    fn pause(&self, time: Duration) {
        self.pauses.fetch_add(1, Ordering::Relaxed);
        let half = (time / 2).as_nanos() as u64;
        self.clock.fetch_add(half, Ordering::Relaxed);
        due(&self.in_pause);
        self.clock.fetch_add(half, Ordering::Relaxed);
    }
}

/// A disk, two machines that reach it, and the store of the first, which was at work a second ago.
struct Pair {
    disk: Arc<SimDisk>,
    clock: Arc<AtomicU64>,
    one: Arc<Machine>,
    other: Arc<Machine>,
    first: Store,
}

impl Pair {
    fn new(is_device: bool) -> Self {
        let disk = Arc::new(SimDisk::new(Medium::file(SIZE), 1));
        let clock = Arc::new(AtomicU64::new(1_700_000_000 * SECOND));
        let [one, other] = [0x11, 0x22].map(|boot| Machine::new(&disk, &clock, boot, is_device));
        let options = InitOptions { max_size: Some(SIZE), ..dbs_sim::Config::small(1).init };
        Store::init_on(&*one, &options, &*one).unwrap();
        let first = one.open().unwrap();
        disk.set_atomic_from(first.info().metadata);
        first.create_volume("v", BLOCKS * BLOCK as u64).unwrap();
        put(&first, 0, 1).unwrap();
        let pair = Self { disk, clock, one, other, first };
        pair.wait(SECOND);
        pair
    }

    fn wait(&self, ns: u64) {
        self.clock.fetch_add(ns, Ordering::Relaxed);
    }

    /// What the disk holds when both machines have lost their power, as who comes then finds it.
    fn after_all(&self, what: &str) -> Vec<u8> {
        let lost = self.disk.crash_image(&mut fastrand::Rng::with_seed(1), CrashMode::Lost);
        let report = Store::check_on(&lost).unwrap();
        // That one of them has replaced a group of the other is no damage of the metadata, and is told.
        let is_told = |message: &str| message.contains("between groups of session");
        let sound = report.findings.iter().all(|finding| is_told(&finding.message));
        assert!(sound, "{what}: {:?}", report.findings);
        let third = Machine::new(&Arc::new(lost), &self.clock, 0x33, false);
        let store = third.open().unwrap_or_else(|error| panic!("{what}: {error}"));
        (0..BLOCKS).map(|block| get(&store, block)).collect()
    }
}

/// Writes a block of the volume for the first time, durably.
fn put(store: &Store, block: u64, byte: u8) -> Result<()> {
    store.volume("v")?.write_at(block * BLOCK as u64, &[byte; BLOCK], true)
}

fn get(store: &Store, block: u64) -> u8 {
    let mut found = [0; BLOCK];
    store.volume("v").unwrap().read_at(block * BLOCK as u64, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == found[0]), "a mix");
    found[0]
}

fn is_stopped(store: &Store) -> bool {
    // Also of commands that come later, which end with the exit code of it.
    store.flush().is_err_and(|error| error.kind() == ErrorKind::Elsewhere)
}

/// A machine that does nothing at the moment looks each second. Who takes the store over waits for that, so that nobody writes
/// beside it.
#[test]
fn who_takes_a_store_over_stops_the_machine_that_had_it() {
    let pair = Pair::new(true);
    while pair.first.settle().unwrap() {}
    pair.wait(SECOND);
    let (first, told) = (pair.first.clone(), Arc::new(Mutex::new(String::new())));
    let tell = Arc::clone(&told);
    let housekeeping = move || *tell.lock().unwrap() = first.settle().unwrap_err().to_string();
    *pair.other.in_pause.lock().unwrap() = Some((2, Box::new(housekeeping)));
    let second = pair.other.open().unwrap();
    let told = told.lock().unwrap().clone();
    for part in
        ["is of session", "This is session", "00000000-0000-0000-0000-000000000022", "dbs check"]
    {
        assert!(told.contains(part), "{part}: {told}");
    }
    // Nothing is acknowledged any more, nor written where the other one may have put something.
    let changes = pair.one.changes.load(Ordering::Relaxed);
    assert!(put(&pair.first, 0, 9).is_err() && put(&pair.first, 1, 9).is_err());
    assert!(is_stopped(&pair.first) && pair.first.clone().close().is_err());
    assert_eq!(pair.one.changes.load(Ordering::Relaxed), changes);
    put(&second, 2, 2).unwrap();
    assert_eq!(pair.after_all("taken over")[..4], [1, 0, 2, 0]);
}

#[test]
fn a_machine_that_is_at_work_keeps_its_store() {
    let pair = Pair::new(true);
    let first = pair.first.clone();
    let work = move || put(&first, 1, 1).unwrap();
    *pair.other.in_pause.lock().unwrap() = Some((1, Box::new(work)));
    let refused = pair.other.open().err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Elsewhere, "{refused}");
    assert!(refused.to_string().contains("00000000-0000-0000-0000-000000000011"), "{refused}");
    assert_eq!(pair.other.changes.load(Ordering::Relaxed), 0, "nothing was written");
    pair.wait(SECOND);
    put(&pair.first, 2, 1).unwrap();
    assert_eq!(pair.after_all("refused")[..4], [1, 1, 1, 0]);
}

/// Who finds a store as another machine's crash, or its life, has left it; longer if it is on a device.
#[test]
fn nobody_waits_without_need() {
    let cases = [
        (true, true, 0x22, 0),
        (true, false, 0x11, 0),
        (false, true, 0x22, 0),
        (false, false, 0x22, 1),
        (true, false, 0x22, 2),
    ];
    for (is_device, closes, boot, pauses) in cases {
        let pair = Pair::new(is_device);
        if closes {
            pair.first.close().unwrap();
        } else {
            drop(pair.first);
        }
        let next = Machine::new(&pair.disk, &pair.clock, boot, is_device);
        next.numbers.store(100, Ordering::Relaxed);
        put(&next.open().unwrap(), 1, 2).unwrap();
        assert_eq!(next.pauses.load(Ordering::Relaxed), pauses, "{is_device} {closes} {boot}");
    }
}

/// Found by review: each flush looked, as only a group says that it was done.
#[test]
fn a_flush_that_writes_no_metadata_looks_for_nobody() {
    let pair = Pair::new(false);
    put(&pair.first, 0, 2).unwrap();
    let looks = pair.one.looks();
    for byte in 3..13 {
        pair.wait(SECOND);
        put(&pair.first, 0, byte).unwrap();
    }
    assert_eq!(pair.one.looks(), looks);
    put(&pair.first, 1, 1).unwrap();
    assert_eq!(pair.one.looks(), looks + 1);
}

/// Found by review: without io_uring each read of a look is waited for by itself.
#[test]
fn what_a_look_reads_is_read_as_one_where_it_lies_together() {
    let pair = Pair::new(false);
    // Several groups since the last look, and not many since the first.
    for block in 1..5 {
        pair.wait(SECOND / 50);
        put(&pair.first, block, 1).unwrap();
    }
    let looks = pair.one.looks();
    pair.wait(SECOND);
    put(&pair.first, 10, 1).unwrap();
    assert_eq!((pair.one.looks(), pair.one.reads.load(Ordering::Relaxed)), (looks + 1, 2));
}

/// Found by review: a block that cannot be read, or only after the disk has tried for long, held up each commit.
#[test]
fn a_bad_block_does_not_hold_up_each_commit() {
    for (is_bad, takes) in [(true, 0), (false, 10 * SECOND), (true, 10 * SECOND)] {
        let pair = Pair::new(false);
        put(&pair.first, 1, 1).unwrap();
        pair.one.is_bad.store(is_bad, Ordering::Relaxed);
        pair.one.takes.store(takes, Ordering::Relaxed);
        let looks = pair.one.looks();
        let commits = |from| {
            for block in from..from + 20 {
                pair.wait(SECOND / 5);
                put(&pair.first, block, 1).unwrap();
            }
            pair.one.looks() - looks
        };
        assert_eq!(commits(10), 2, "{is_bad} {takes}");
        let warnings = pair.first.info().warnings;
        let told = warnings.iter().filter(|text| text.contains("another machine")).count();
        assert_eq!(told, usize::from(is_bad), "{warnings:?}");
        pair.wait(60 * SECOND);
        assert_eq!(commits(30), 3, "{is_bad} {takes}");
        pair.wait(60 * SECOND);
        // The other places say it, unless all of them take as long.
        let _second = pair.other.open().unwrap();
        assert_eq!(put(&pair.first, 100, 1).is_err(), !is_bad || takes == 0, "{is_bad} {takes}");
    }
}

/// Found by review: all that a look asks for could be read, and was; but it was called blind, and not done each time.
#[test]
fn a_bad_block_between_what_a_look_asks_for_blinds_nobody() {
    let pair = Pair::new(false);
    for block in 1..5 {
        pair.wait(SECOND / 50);
        put(&pair.first, block, 1).unwrap();
    }
    pair.one.is_bad_between.store(true, Ordering::Relaxed);
    let looks = pair.one.looks();
    for block in 10..15 {
        pair.wait(SECOND);
        put(&pair.first, block, 1).unwrap();
    }
    assert_eq!(pair.one.looks(), looks + 5);
    assert_eq!(pair.first.info().warnings, Vec::<String>::new());
    let _second = pair.other.open().unwrap();
    assert!(put(&pair.first, 20, 1).is_err());
}

/// A path to the disk may be lost for a while, and somebody take the store over meanwhile.
#[test]
fn a_look_that_fails_while_idle_is_not_what_a_commit_goes_by() {
    let pair = Pair::new(true);
    while pair.first.settle().unwrap() {}
    pair.one.is_bad.store(true, Ordering::Relaxed);
    let looks = pair.one.looks();
    for _ in 0..20 {
        pair.wait(SECOND);
        pair.first.settle().unwrap();
    }
    assert_eq!(pair.one.looks(), looks + 2);
    put(&pair.first, 1, 1).unwrap();
    assert_eq!(pair.one.looks(), looks + 3);
}

/// Found by review: who was refused, and told that nothing was changed, had reserved space; and a full file system was
/// asked for each region.
#[test]
fn space_is_reserved_by_who_has_the_store_and_not_insisted_on() {
    let pair = Pair::new(false);
    let first = pair.first.clone();
    let work = move || put(&first, 1, 1).unwrap();
    *pair.other.in_pause.lock().unwrap() = Some((1, Box::new(work)));
    assert!(pair.other.open().is_err());
    let allocations = || pair.other.allocations.load(Ordering::Relaxed);
    assert_eq!(allocations(), 0);
    pair.other.is_full.store(true, Ordering::Relaxed);
    pair.other.open().unwrap();
    assert_eq!(allocations(), 1);
}

/// As with one boot's two containers, if both could get at a file without each other's locks: nobody waits.
fn beside(pair: &Pair) -> Arc<Machine> {
    let machine = Machine::new(&pair.disk, &pair.clock, 0x11, false);
    machine.numbers.store(100, Ordering::Relaxed);
    machine
}

/// Found by review: who committed more often than it looked never looked.
#[test]
fn two_that_commit_all_the_time_find_each_other() {
    let pair = Pair::new(false);
    put(&pair.first, 1, 1).unwrap();
    pair.wait(SECOND / 100);
    let second = beside(&pair).open().unwrap();
    // So many that it no longer looks at its first one.
    (0..8).for_each(|block| put(&second, 20 + block, 2).unwrap());
    let mut alive = (true, true);
    for round in 0..6 {
        pair.wait(SECOND / 20);
        alive.0 = alive.0 && put(&pair.first, 10 + round, 1).is_ok();
        alive.1 = alive.1 && put(&second, 100 + round, 2).is_ok();
    }
    assert!(!(alive.0 && alive.1));
}

/// Found by review: where groups of the other are longer, what comes to lie where this session looks has a lower sequence than its next
/// group, and is of the other all the same.
#[test]
fn a_machine_that_stood_still_finds_groups_of_any_sequence() {
    let pair = Pair::new(false);
    for block in 1..8 {
        pair.wait(SECOND);
        put(&pair.first, block, 1).unwrap();
    }
    // Its clock stands still, too.
    let second = beside(&pair).open().unwrap();
    second.create_snapshot("v", "s", &Default::default()).unwrap();
    for text in ["x", "y"] {
        second.set_labels("v", "s", &[("key".to_owned(), text.repeat(7900))].into()).unwrap();
    }
    // It does not look for any of these.
    for block in 8..12 {
        put(&pair.first, block, 1).unwrap();
    }
    pair.wait(SECOND);
    assert!(put(&pair.first, 20, 1).is_err());
}

/// Found by review: a command that changes the superblock alone replaced that of the other machine.
#[test]
fn the_superblock_of_another_machine_is_not_replaced() {
    let pair = Pair::new(false);
    let second = pair.other.open().unwrap();
    for block in 0..40 {
        put(&second, 10 + block, 2).unwrap();
    }
    second.close().unwrap();
    let refused = pair.first.set_uuid(None).unwrap_err();
    assert!(refused.to_string().contains("changed the superblock"), "{refused}");
    assert!(is_stopped(&pair.first));
    assert_eq!(pair.after_all("closed")[10..50], [2; 40]);
}

/// Found by review: one that had left the superblock alone as yet was stopped by a command of the machine that had lost the store.
#[test]
fn a_command_that_changes_the_superblock_alone_looks_for_others() {
    let commands: [fn(&Store) -> Result<()>; 2] =
        [|store| store.set_uuid(None), |store| store.grow(store.info().size)];
    for command in commands {
        let pair = Pair::new(false);
        let second = pair.other.open().unwrap();
        put(&second, 10, 2).unwrap();
        let changes = pair.one.changes.load(Ordering::Relaxed);
        assert_eq!(command(&pair.first).unwrap_err().kind(), ErrorKind::Elsewhere);
        assert_eq!(pair.one.changes.load(Ordering::Relaxed), changes, "nothing was written");
        assert!(is_stopped(&pair.first));
        pair.wait(SECOND);
        put(&second, 11, 2).unwrap();
    }
    let pair = Pair::new(false);
    pair.first.set_uuid(None).unwrap();
    put(&pair.first, 1, 1).unwrap();
}

/// Found by review: a machine stood still between its look and its group, was taken for gone, and acknowledged what it had written
/// over the other's.
#[test]
fn a_commit_that_took_long_looks_again() {
    let pair = Pair::new(false);
    let (other, clock) = (Arc::clone(&pair.other), Arc::clone(&pair.clock));
    let second = Arc::new(Mutex::new(None));
    let opened = Arc::clone(&second);
    *pair.one.at_group.lock().unwrap() = Some(Box::new(move || {
        clock.fetch_add(5 * SECOND, Ordering::Relaxed);
        let store = other.open().unwrap();
        (10..13).for_each(|block| put(&store, block, 2).unwrap());
        *opened.lock().unwrap() = Some(store);
    }));
    assert_eq!(put(&pair.first, 1, 1).unwrap_err().kind(), ErrorKind::Elsewhere);
    assert!(is_stopped(&pair.first));
}

/// Found by review: of two that had each replaced a group of the other, one may end before it looks. Its records are gone, and
/// nobody said so.
#[test]
fn a_group_of_another_session_between_those_of_one_is_told() {
    let pair = Pair::new(false);
    let (first, other, clock) =
        (pair.first.clone(), Arc::clone(&pair.other), Arc::clone(&pair.clock));
    *pair.other.at_group.lock().unwrap() = Some(Box::new(move || {
        put(&first, 1, 1).unwrap();
        let again = first.clone();
        // Soon after, for which it does not look.
        let soon = move || {
            clock.fetch_add(SECOND / 50, Ordering::Relaxed);
            put(&again, 2, 1).unwrap();
        };
        *other.at_call.lock().unwrap() = Some((1, Box::new(soon)));
    }));
    assert_eq!(pair.other.open().err().unwrap().kind(), ErrorKind::Elsewhere);
    let warnings = |disk| {
        let third = Machine::new(&Arc::new(disk), &pair.clock, 0x33, false);
        third.open().unwrap().info().warnings
    };
    let lost = |seed| pair.disk.crash_image(&mut fastrand::Rng::with_seed(seed), CrashMode::Lost);
    let told = warnings(lost(1));
    assert!(told.iter().any(|text| text.contains("between groups of")), "{told:?}");
    // Not of sessions that came after one another.
    let alone = Pair::new(false);
    drop(alone.first);
    let next = alone.other.open().unwrap();
    put(&next, 1, 1).unwrap();
    drop(next);
    let third = Machine::new(&alone.disk, &alone.clock, 0x33, false);
    assert_eq!(third.open().unwrap().info().warnings, [""; 0]);
}

/// A crash amid a group leaves parts of it, where the next session writes its first: they are nobody's sign of life.
#[test]
fn what_a_crash_left_is_no_sign_of_another_machine() {
    let pair = Pair::new(true);
    let labels = [("key".to_owned(), "x".repeat(7900))].into();
    pair.first.create_snapshot("v", "s", &Default::default()).unwrap();
    // Each of its two blocks may be lost.
    pair.first.set_labels("v", "s", &labels).unwrap();
    let (disk, first) = (Arc::clone(&pair.disk), pair.first.clone());
    let images = Arc::new(Mutex::new(Vec::new()));
    let taken = Arc::clone(&images);
    pair.disk.after_write(move || {
        let mut rng = fastrand::Rng::with_seed(3);
        let image = |mode| Arc::new(disk.crash_image(&mut rng, mode));
        *taken.lock().unwrap() = [CrashMode::Torn; 200].map(image).into();
    });
    first.set_labels("v", "s", &[("key".to_owned(), "y".repeat(7900))].into()).unwrap();
    let images = std::mem::take(&mut *images.lock().unwrap());
    assert_eq!(images.len(), 200);
    for (number, image) in images.iter().enumerate() {
        let next = Machine::new(image, &pair.clock, 0x22, true);
        let store = next.open().unwrap_or_else(|error| panic!("image {number}: {error}"));
        pair.wait(SECOND);
        put(&store, 1, 2).unwrap();
        store.close().unwrap();
    }
}

/// Whatever the other machine has done since, and however often it went round the journal: the first commit finds it.
#[test]
fn a_commit_finds_that_another_machine_has_written() {
    for (groups, closes) in
        [(0, false), (0, true), (1, false), (5, true), (40, false), (41, true), (150, false)]
    {
        let pair = Pair::new(false);
        let second = pair.other.open().unwrap();
        for block in 0..groups {
            pair.wait(SECOND);
            put(&second, 10 + block, 2).unwrap();
        }
        if closes {
            second.close().unwrap();
        }
        let what = format!("{groups} groups, closed: {closes}");
        let refused = put(&pair.first, 1, 9).unwrap_err();
        assert!(refused.to_string().contains("from elsewhere"), "{what}: {refused}");
        assert!(is_stopped(&pair.first));
        let found = pair.after_all(&what);
        assert_eq!((found[0], found[1]), (1, 0), "{what}");
        assert!(found[10..][..groups as usize].iter().all(|byte| *byte == 2), "{what}");
    }
}

/// Wherever in the journal the next group comes to lie.
#[test]
fn the_first_group_of_another_machine_is_found_anywhere_in_the_journal() {
    for before in 0..40 {
        let pair = Pair::new(false);
        (0..before).for_each(|block| put(&pair.first, 10 + block, 1).unwrap());
        pair.wait(SECOND);
        let _second = pair.other.open().unwrap();
        assert!(put(&pair.first, 1, 9).is_err(), "{before}");
    }
}

#[test]
fn a_commit_finds_that_there_is_another_store() {
    let pair = Pair::new(false);
    Store::init_on(&*pair.other, &dbs_sim::Config::small(1).init, &*pair.other).unwrap();
    let refused = put(&pair.first, 1, 9).unwrap_err();
    assert!(refused.to_string().contains("another store"), "{refused}");
}

/// The first machine stands still between its look and the write of its group, and goes on before any call by which the second
/// opens the store. Never do both go on, and what the first has acknowledged is there if nobody has written since.
#[test]
fn two_whose_looks_have_crossed_do_not_both_go_on() {
    let (mut stopped, mut lost, mut refused) = ([0; 2], 0, 0);
    for at in 1.. {
        let pair = Pair::new(false);
        let (first, (stands, stood), (go, gone), (done, ended)) =
            (pair.first.clone(), mpsc::channel(), mpsc::channel(), mpsc::channel());
        *pair.one.at_group.lock().unwrap() = Some(Box::new(move || {
            stands.send(()).unwrap();
            gone.recv().unwrap();
        }));
        let work = std::thread::spawn(move || done.send(put(&first, 40, 1).is_ok()).unwrap());
        stood.recv().unwrap();
        let (acked, ack) = (Arc::new(Mutex::new(None)), go.clone());
        let tell = Arc::clone(&acked);
        *pair.other.at_call.lock().unwrap() = Some((
            at,
            Box::new(move || {
                ack.send(()).unwrap();
                *tell.lock().unwrap() = Some(ended.recv().unwrap());
            }),
        ));
        let second = pair.other.open();
        let was_last = pair.other.calls() < at;
        if was_last {
            go.send(()).unwrap();
        }
        work.join().unwrap();
        if was_last {
            break;
        }
        let acked = acked.lock().unwrap().unwrap();
        // Before it looks again.
        let early = second.as_ref().is_ok_and(|second| put(second, 99, 2).is_ok());
        let mut alive = (true, second.is_ok());
        for round in 0..6 {
            pair.wait(SECOND);
            if let Ok(second) = &second {
                alive.1 = alive.1 && put(second, 100 + round, 2).is_ok();
            }
            alive.0 = alive.0 && put(&pair.first, 10 + round, 1).is_ok();
        }
        let what = format!("call {at}: acknowledged {acked}, alive {alive:?}");
        assert!(!(alive.0 && alive.1), "{what}");
        let found = pair.after_all(&what);
        assert!(!alive.0 || found[10..][..6] == [1; 6], "{what}");
        assert!(!alive.1 || found[100..][..6] == [2; 6], "{what}");
        assert!(!early || found[99] == 2, "{what}");
        // The group of the first has replaced that of the second, whose records nobody has.
        assert!(lost == 0 || !alive.1, "{what}");
        refused += u32::from(lost > 0 && !early);
        lost += u32::from(acked && found[40] != 1);
        stopped[0] += u32::from(!alive.0);
        stopped[1] += u32::from(!alive.1);
    }
    // Between the second's look and the write of its first group.
    assert!(lost <= 1, "{lost}");
    assert!(refused > 0, "the second opens the store all the same");
    assert!(stopped[0] > 0 && stopped[1] > 0, "{stopped:?}");
}

/// The first machine commits before any call by which the second opens the store, and both go on. At most one of them does so
/// for longer than a second; what that one has acknowledged is there in the end, and nothing is damaged.
#[test]
fn of_two_that_open_a_store_at_the_same_moment_one_goes_on() {
    let (mut outcomes, mut lost) = ([0; 2], 0);
    for at in 1.. {
        let pair = Pair::new(false);
        let first = pair.first.clone();
        let acked = Arc::new(Mutex::new([false; 2]));
        let tell = Arc::clone(&acked);
        let clock = Arc::clone(&pair.clock);
        let work = move || {
            // The second one soon after, for which it does not look.
            let done = [1, 2].map(|block| {
                clock.fetch_add(SECOND / 50, Ordering::Relaxed);
                put(&first, block, 1).is_ok()
            });
            *tell.lock().unwrap() = done;
        };
        *pair.other.at_call.lock().unwrap() = Some((at, Box::new(work)));
        let second = pair.other.open();
        if pair.other.calls() < at {
            break;
        }
        // Nobody is to try that again.
        let refused = second.as_ref().err();
        assert!(refused.is_none_or(|error| error.kind() == ErrorKind::Elsewhere), "{refused:?}");
        let acked = *acked.lock().unwrap();
        let mut alive = (true, second.is_ok());
        for round in 0..6 {
            pair.wait(SECOND);
            alive.0 = alive.0 && put(&pair.first, 10 + round, 1).is_ok();
            if let Ok(second) = &second {
                alive.1 = alive.1 && put(second, 100 + round, 2).is_ok();
            }
        }
        let what = format!("call {at}: acknowledged {acked:?}, alive {alive:?}");
        assert!(!(alive.0 && alive.1), "{what}");
        let found = pair.after_all(&what);
        assert!(!alive.0 || found[10..][..6] == [1; 6], "{what}");
        assert!(!alive.1 || found[100..][..6] == [2; 6], "{what}");
        // Who goes on has lost nothing.
        assert!(!alive.0 || [1, 2].iter().all(|&at| !acked[at - 1] || found[at] == 1), "{what}");
        outcomes[0] += u32::from(alive.0);
        outcomes[1] += u32::from(alive.1);
        lost += u32::from(acked[0] && found[1] != 1 || acked[1] && found[2] != 1);
    }
    assert!(outcomes[0] > 0 && outcomes[1] > 0, "{outcomes:?}");
    // Between the last look and the write of the group that it is for.
    assert!(lost <= 1, "{lost}");
}
