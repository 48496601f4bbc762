//! Power cuts under the real server: `dbs serve` on a disk that remembers what was written and synced, NBD
//! clients and commands over its control socket, and then, at moments of the record, what a power cut
//! leaves, opened and compared with the model of `dbs-sim`. Some images lose power again while they recover.
//!
//! `DBS_POWERCUT_SECONDS` goes on for so long, `DBS_POWERCUT_SEED` begins there.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../disk/mod.rs"]
mod disk;
#[path = "../support/mod.rs"]
mod support;

use dbs_client::remote::RemoteStore;
use dbs_control::api::Request;
use dbs_control::{socket_path, store_key};
use dbs_core::io::Storage;
use dbs_core::io::tail::default_candidates;
use dbs_core::{Error, ErrorKind, Store};
use dbs_guest::Guest;
use dbs_nbd::client::{Client, ClientOptions};
use dbs_sim::content::fill;
use dbs_sim::generate::Generator;
use dbs_sim::op::{labels, snapshot_name, volume_name};
use dbs_sim::outcomes::{End, Outcomes};
use dbs_sim::{CrashMode, Faults, Medium, Model, Op, SimDisk, SimEnv, image, verify};
use disk::outage::Outages;
use disk::{Disk, Mounted};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{Place, can_mount};

const SECTOR: u64 = 512;
/// Command flag of NBD: force unit access.
const NBD_FUA: u16 = 1;

/// A step of a run, and the record's length before and after it.
struct Done {
    from: usize,
    to: usize,
    outcomes: Outcomes,
    /// Once it was acknowledged.
    settled: Outcomes,
}

/// The server, and ways to it.
struct Served {
    remote: RemoteStore,
    nbd: PathBuf,
}

/// A store of so many MiB on a disk of its own.
fn make(place: &Place, mib: usize) -> (Disk, Mounted) {
    let sizes = format!("--size {mib}MiB --extent-size 64KiB --journal-size 128KiB");
    let made = Disk::at(place.dir.path(), &place.store());
    place.dbs(&format!("init store.dbs {sizes}")).ok("init");
    made
}

/// A server that was killed leaves its tail for the next one. There is none, and the tail takes memory.
fn remove_tail(uuid: &str) {
    for directory in default_candidates() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(uuid) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }
}

impl Served {
    fn new(place: &Place) -> Self {
        let key = store_key(&place.store()).unwrap();
        let remote = RemoteStore::connect(&socket_path(&place.path("run"), &key), &key).unwrap();
        Self { remote, nbd: place.path("nbd.sock") }
    }

    fn client(&self, vol: u8) -> Result<Client<std::os::unix::net::UnixStream>, Error> {
        let options = ClientOptions::default();
        Client::connect_unix(&self.nbd, &volume_name(vol), &options).map_err(|error| {
            match error.to_string().contains("no volume") {
                true => Error::not_found(error.to_string()),
                false => Error::io(error, "connecting"),
            }
        })
    }

    fn call(&self, request: &Request) -> Result<(), Error> {
        self.remote.call(request, &mut |_| true).map(drop)
    }

    /// Does what the step says; `None` if it is none for a server.
    fn perform(&self, op: &Op, tag: dbs_sim::content::Tag) -> Option<Result<(), Error>> {
        let data = |vol, work: &mut dyn FnMut(&mut Client<_>) -> std::io::Result<()>| {
            let done = self.client(vol).and_then(|mut client| {
                work(&mut client).map_err(|error| match error.kind() {
                    std::io::ErrorKind::StorageFull => {
                        Error::new(ErrorKind::NoSpace, error.to_string())
                    }
                    _ => Error::io(error, "a request"),
                })
            });
            Some(done)
        };
        let bytes = |sectors: u16| u64::from(sectors) * SECTOR;
        match *op {
            Op::Write { vol, at, len, fua } => {
                let mut buf = vec![0; bytes(len) as usize];
                fill(&mut buf, u64::from(at), tag);
                data(vol, &mut |client| client.write_at(bytes(at), &buf, fua))
            }
            Op::Discard { vol, at, len } => {
                data(vol, &mut |client| client.trim(bytes(at), bytes(len), false))
            }
            Op::WriteZeroes { vol, at, len, fua } => {
                let flags = if fua { NBD_FUA } else { 0 };
                data(vol, &mut |client| client.write_zeroes(bytes(at), bytes(len), flags))
            }
            Op::FlushVolume { vol } => data(vol, &mut |client| client.flush()),
            _ => request(op).map(|request| self.call(&request)),
        }
    }
}

/// The request of a command.
fn request(op: &Op) -> Option<Request> {
    let (volume, snapshot) = (volume_name, snapshot_name);
    Some(match *op {
        // No server makes volumes on a file.
        Op::CreateVolume { sectors, .. } if image::is_below(sectors) => return None,
        Op::CreateVolume { vol, sectors } => Request::VolumeCreate {
            volume: volume(vol),
            size: u64::from(sectors) * SECTOR,
            rebuilding: false,
        },
        Op::RenameVolume { vol, new } => {
            Request::VolumeRename { volume: volume(vol), new: volume(new) }
        }
        Op::ResizeVolume { vol, sectors } => Request::VolumeResize {
            volume: volume(vol),
            size: u64::from(sectors) * SECTOR,
            shrink: true,
            uuid: None,
        },
        Op::DeleteVolume { vol } => {
            Request::VolumeDelete { volume: volume(vol), uuid: None, rebuilding: false }
        }
        Op::Clone { vol, snap, new } => Request::VolumeClone {
            volume: volume(vol),
            snapshot: snapshot(snap),
            new: volume(new),
            rebuilding: false,
        },
        Op::Flatten { vol, .. } => Request::VolumeFlatten { volume: volume(vol) },
        Op::CreateSnapshot { vol, snap, labels: number } => Request::SnapshotCreate {
            volume: volume(vol),
            snapshot: snapshot(snap),
            labels: labels(number),
            system: number % 2 == 1,
            rebuilding: None,
        },
        Op::RenameSnapshot { vol, snap, new } => Request::SnapshotRename {
            volume: volume(vol),
            snapshot: snapshot(snap),
            new: snapshot(new),
        },
        Op::DeleteSnapshot { vol, snap } => {
            Request::SnapshotDelete { volume: volume(vol), snapshot: snapshot(snap), uuid: None }
        }
        Op::Rollback { vol, snap, keep_size: false } => {
            Request::SnapshotRollback { volume: volume(vol), snapshot: snapshot(snap), uuid: None }
        }
        Op::Flush => Request::Flush,
        Op::Work { steps } => Request::Work { steps: u64::from(steps) },
        Op::Vacuum { .. } => Request::Vacuum { keep: Some(0) },
        _ => return None,
    })
}

/// What a run did.
#[derive(Debug, Default)]
struct Report {
    steps: usize,
    images: usize,
    full: bool,
}

/// One run: a server under a load of `steps` steps, then power cuts at `cuts` moments of it.
fn run(seed: u64, steps: usize, cuts: usize, lies: bool) -> Result<Report, String> {
    let place = Place::new();
    let mut rng = fastrand::Rng::with_seed(seed);
    // Small, so that it is full now and then.
    let (disk, mounted) = make(&place, rng.usize(6..10));
    let interval = if rng.bool() { "50ms" } else { "1s" };
    let io = if rng.u8(0..4) == 0 { "--driver pread" } else { "" };
    let server = place.serve(&format!("--nbd unix:nbd.sock --commit-interval {interval} {io}"));
    let served = Served::new(&place);
    let info = served.remote.call(&Request::Info, &mut |_| true).unwrap();
    let metadata = info["metadata"].as_u64().unwrap();
    if lies {
        disk.lie();
    }
    let mut report = Report::default();
    let done = load(&served, &disk, seed, steps, &mut report)?;
    drop(served);
    // As a power cut ends it, as far as it can tell.
    drop(server);
    drop(mounted);
    remove_tail(info["uuid"].as_str().unwrap());
    let all = done[0].from..=done.last().map_or(0, |last| last.to);
    let mut cuts: Vec<_> = (0..cuts).map(|_| rng.usize(all.clone())).collect();
    cuts.sort_unstable();
    let mut outages = Outages::new(&disk, metadata, place.path("durable"));
    for cut in cuts {
        let image = place.path("image");
        outages.image(cut, &mut rng, &image);
        look(&std::fs::read(image).unwrap(), cut, &done, metadata, &mut rng)
            .map_err(|e| format!("cut at {cut} of {}: {e}", disk.len()))?;
        report.images += 1;
    }
    Ok(report)
}

fn load(
    served: &Served,
    disk: &Disk,
    seed: u64,
    steps: usize,
    report: &mut Report,
) -> Result<Vec<Done>, String> {
    let mut generator = Generator::new(seed);
    let mut model = Model::default();
    let mut done = vec![];
    let mut number = 0;
    while report.steps < steps {
        let op = generator.step(&model).op;
        number += 1;
        let before = model.clone();
        let mut after = before.clone();
        let expected = after.apply(&op, number);
        let from = disk.len();
        let perform = || served.perform(&op, model.tag(&op, number));
        let Some(mut result) = perform() else { continue };
        // The server takes a moment to notice that a client is gone.
        let deadline = Instant::now() + Duration::from_secs(60);
        while expected.is_ok()
            && result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy)
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(5));
            result = perform().unwrap_or(result);
        }
        report.steps += 1;
        let outcomes = match &expected {
            Ok(()) => Outcomes::of(&op, &before, &after),
            Err(_) => Outcomes::settled(&before),
        };
        match (&result, &expected) {
            (Ok(()), Ok(())) => {
                after.acknowledge(&op);
                model = after;
            }
            // NBD has fewer kinds.
            (Err(_), Err(_)) => {}
            (Err(error), Ok(())) if error.kind() == ErrorKind::NoSpace => {
                report.full = true;
                // What of it was done only the server knows: the run ends here.
                let (to, settled) = (disk.len(), outcomes.clone());
                done.push(Done { from, to, outcomes, settled });
                return Ok(done);
            }
            (result, expected) => {
                return Err(format!("step {number}, {op:?}: {result:?}, expected {expected:?}"));
            }
        }
        let settled = Outcomes::settled(&model);
        done.push(Done { from, to: disk.len(), outcomes, settled });
    }
    Ok(done)
}

/// A simulated disk that holds these bytes durably.
fn simulated(image: &[u8], metadata: u64) -> Arc<SimDisk> {
    let disk = SimDisk::new(Medium::file(image.len() as u64), 1);
    for (part, at) in image.chunks(1 << 20).zip((0..).step_by(1 << 20)) {
        disk.write_at(at, part).unwrap();
    }
    disk.flush().unwrap();
    disk.set_atomic_from(metadata);
    Arc::new(disk)
}

fn open(disk: &Arc<SimDisk>) -> Result<Store, Error> {
    Store::open_on(Arc::clone(disk) as _, None, Arc::new(SimEnv::new(7)), false)
}

/// Opens what a power cut leaves at this moment, and compares.
fn look(
    image: &[u8],
    cut: usize,
    done: &[Done],
    metadata: u64,
    rng: &mut fastrand::Rng,
) -> Result<(), String> {
    // What was answered by then, and what was on its way.
    let answered = done.partition_point(|step| step.to <= cut);
    let nothing = Outcomes::settled(&Model::default());
    let outcomes = match done.get(answered) {
        Some(step) if step.from < cut => &step.outcomes,
        _ => answered.checked_sub(1).map_or(&nothing, |last| &done[last].settled),
    };
    let mut disk = simulated(image, metadata);
    if rng.u8(0..3) == 0 {
        // Power is lost again while it recovers.
        disk.arm(Faults { stop_at: Some(rng.u64(1..20)), ..Faults::default() });
        let opened = open(&disk);
        if !disk.stopped() {
            drop(opened.map_err(|e| format!("open: {e}"))?);
        }
        disk.arm(Faults::default());
        let mode = CrashMode::random(rng);
        disk = Arc::new(disk.crash_image(rng, mode));
    }
    let store = open(&disk).map_err(|e| format!("open: {e}"))?;
    outcomes.compare(&store, End::PowerLost)?;
    verify::check(&store)
}

fn seed() -> u64 {
    std::env::var("DBS_POWERCUT_SEED").map_or(1, |seed| seed.parse().unwrap())
}

/// With `DBS_POWERCUT_SECONDS`, for so long; else a few.
#[test]
fn what_a_power_cut_leaves_is_what_was_promised() {
    let true = can_mount() else { return };
    let seconds = std::env::var("DBS_POWERCUT_SECONDS").map(|text| text.parse().unwrap());
    let end = seconds.ok().map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut total = Report::default();
    let (mut runs, mut full) = (0, 0);
    for seed in seed().. {
        let report = run(seed, 120, 40, false);
        let report = report.unwrap_or_else(|e| panic!("DBS_POWERCUT_SEED={seed}: {e}"));
        total.steps += report.steps;
        total.images += report.images;
        full += usize::from(report.full);
        runs += 1;
        if end.map_or(runs >= 4, |end| Instant::now() >= end) {
            break;
        }
    }
    println!("{runs} runs, {full} until the store was full, {total:?}");
}

/// The test of the test: a disk that does not do what it says.
#[test]
fn a_disk_that_does_not_sync_is_found_out() {
    let true = can_mount() else { return };
    let found = (1..20).find_map(|seed| run(seed, 120, 40, true).err());
    println!("{}", found.expect("nobody noticed"));
}

/// A sync reaches the disk before each answer that promises that it did, with every driver.
#[test]
fn each_promise_rests_on_a_sync() {
    let true = can_mount() else { return };
    for io in ["--driver uring", "--driver pread"] {
        let place = Place::new();
        let (disk, _mounted) = make(&place, 16);
        let server =
            place.serve(&format!("--nbd unix:nbd.sock --vhost-user vm --commit-interval 1h {io}"));
        let served = Served::new(&place);
        let synced = |what: &str, work: &mut dyn FnMut()| {
            let before = disk.len();
            work();
            assert!(!disk.syncs_from(before).is_empty(), "{io}: {what}: no sync reached the disk");
        };
        let create =
            Request::VolumeCreate { volume: "v0".into(), size: 1 << 20, rebuilding: false };
        synced("a volume", &mut || served.call(&create).unwrap());
        let mut client = served.client(0).unwrap();
        synced("FUA, allocating", &mut || client.write_at(0, &[1; 4096], true).unwrap());
        synced("FUA, in place", &mut || client.write_at(0, &[2; 4096], true).unwrap());
        client.write_at(8192, &[3; 4096], false).unwrap();
        synced("a flush", &mut || client.flush().unwrap());
        client.write_at(8192, &[4; 4096], false).unwrap();
        synced("a flush of data alone", &mut || client.flush().unwrap());
        synced("zeroes, FUA", &mut || client.write_zeroes(0, 4096, NBD_FUA).unwrap());
        synced("a snapshot", &mut || {
            let (volume, snapshot) = ("v0".into(), "s".into());
            let (labels, system) = (Default::default(), false);
            let take =
                Request::SnapshotCreate { volume, snapshot, labels, system, rebuilding: None };
            served.call(&take).unwrap();
        });
        client.write_at(0, &[5; 4096], false).unwrap();
        drop(client);
        let guest = Guest::connect(&place.path("vm/v0.sock"), &dbs_guest::Options::default());
        let mut guest = guest.unwrap();
        let mut run = |request: dbs_guest::Request| {
            assert_eq!(guest.queues[0].run(&request).unwrap().0, 0);
        };
        run(dbs_guest::Request::write(16384, vec![6; 4096]));
        synced("a flush of a guest", &mut || run(dbs_guest::Request::flush()));
        run(dbs_guest::Request::write(16384, vec![7; 4096]));
        synced("a flush of a guest, data alone", &mut || run(dbs_guest::Request::flush()));
        drop(guest);
        // Found by review: a driver that does not use flushes takes for durable what is answered.
        let options = dbs_guest::Options { unused: dbs_guest::FLUSH, ..Default::default() };
        let mut guest = Guest::connect(&place.path("vm/v0.sock"), &options).unwrap();
        let range = |kind, flags| dbs_guest::Request::range(kind, 16384, 8192, flags);
        for request in [
            dbs_guest::Request::write(16384, vec![8; 4096]),
            dbs_guest::Request::write(16384 + 512, vec![9; 512]),
            range(dbs_guest::Kind::WriteZeroes, 0),
            range(dbs_guest::Kind::WriteZeroes, 1),
            dbs_guest::Request::write(16384, vec![10; 8192]),
            range(dbs_guest::Kind::Discard, 0),
        ] {
            let what = format!("{:?} of a guest that does not flush", request.kind);
            synced(&what, &mut || assert_eq!(guest.queues[0].run(&request).unwrap().0, 0));
        }
        drop(guest);
        let mut server = Some(server);
        synced("the end", &mut || {
            server.take().unwrap().stop();
        });
    }
}
