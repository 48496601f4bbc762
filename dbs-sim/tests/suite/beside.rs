//! One call amid another, at a moment that histories do not reach: each fails under an edit of dbs-core
//! that all other tests let pass when a reviewer planted it.

use dbs_core::Store;
use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use dbs_core::volume::{Request, Start};
use dbs_sim::{CrashMode, Medium, SimDisk, SimEnv, TailPlace};
use std::io;
use std::sync::{Arc, Mutex};

const BLOCK: u64 = 4096;

type Hook = Box<dyn FnOnce() + Send>;

/// A disk that calls somebody before it reserves space.
struct Hooked {
    disk: Arc<SimDisk>,
    on_allocate: Mutex<Option<Hook>>,
}

impl Storage for Hooked {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        self.disk.read_many(requests)
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        self.disk.write_many(requests)
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.disk.discard(offset, len_bytes)
    }

    fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let hook = self.on_allocate.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        self.disk.allocate(offset, len_bytes)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.disk.set_size(size_bytes)
    }

    fn driver(&self) -> &'static str {
        "hooked"
    }
}

struct Bench {
    disk: Arc<SimDisk>,
    hooked: Arc<Hooked>,
    store: Store,
    // Keeps the tail.
    _place: TailPlace,
}

fn bench() -> Bench {
    let config = dbs_sim::Config::small(1);
    let disk = Arc::new(SimDisk::new(Medium::file(4 << 20), 1));
    let env = Arc::new(SimEnv::new(1));
    Store::init_on(&*disk, &config.init, &*env).unwrap();
    let hooked = Arc::new(Hooked { disk: Arc::clone(&disk), on_allocate: Mutex::new(None) });
    let place = TailPlace::default();
    let storage: Arc<dyn Storage> = Arc::clone(&hooked) as _;
    let store = Store::open_on(storage, Some(place.attach()), env, false).unwrap();
    disk.set_atomic_from(store.info().metadata);
    Bench { disk, hooked, store, _place: place }
}

/// What a power loss leaves, opened.
fn after_power_loss(disk: &SimDisk) -> Store {
    let image = disk.crash_image(&mut fastrand::Rng::with_seed(1), CrashMode::Kept);
    Store::open_on(Arc::new(image), None, Arc::new(SimEnv::new(2)), false).unwrap()
}

fn block(store: &Store, at: u64) -> u8 {
    let mut bytes = [9; BLOCK as usize];
    store.volume("v").unwrap().read_at(at * BLOCK, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mix");
    bytes[0]
}

/// A write on its way into a fresh extent, and zeroes beside it that are acknowledged as durable.
fn zeroes_beside_a_write(store: &Store) -> Request {
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; 128 << 10], true).unwrap();
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    volume.write_at(64 << 10, &[2; BLOCK as usize], true).unwrap();
    let mut request = Request::new();
    assert_eq!(volume.start_write(0, BLOCK, &mut request).unwrap(), Start::Io);
    volume.write_zeroes(2 * BLOCK, BLOCK, true).unwrap();
    assert_eq!(block(store, 2), 0);
    request
}

#[test]
fn zeroes_beside_a_write_on_its_way_survive_power_loss() {
    let bench = bench();
    let mut request = zeroes_beside_a_write(&bench.store);
    assert_eq!(block(&after_power_loss(&bench.disk), 2), 0, "the snapshot's data is back");
    request.cancel();
}

#[test]
fn zeroes_beside_a_write_that_fails_stay() {
    let bench = bench();
    let mut request = zeroes_beside_a_write(&bench.store);
    assert!(request.finish_write(Err(io::Error::from_raw_os_error(5))).is_err());
    assert_eq!(block(&bench.store, 2), 0, "undone by somebody else's failed write");
}

#[test]
fn a_write_amid_a_vacuum_that_cuts_the_end_off_stays() {
    let Bench { disk, hooked, store, _place } = bench();
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; 64 << 10], true).unwrap();
    let inside = (store.clone(), volume.clone());
    *hooked.on_allocate.lock().unwrap() = Some(Box::new(move || {
        inside.1.write_at(512 << 10, &[7; 256 << 10], false).unwrap();
        inside.0.flush().unwrap();
    }));
    store.vacuum(&mut |_, _| true).unwrap();
    assert!(hooked.on_allocate.lock().unwrap().is_none(), "nothing was reserved");
    let check = |store: &Store, when: &str| {
        (128..192).for_each(|at| assert_eq!(block(store, at), 7, "lost {when}"));
    };
    check(&store, "at once");
    drop((volume, store));
    check(&after_power_loss(&disk), "after a power loss");
}

#[test]
fn what_was_cut_off_while_a_volume_grows_stays_gone() {
    let Bench { disk, store, .. } = bench();
    let end = 3 * BLOCK + 512;
    store.create_volume("v", end).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &vec![1; end as usize], true).unwrap();
    let inside = (store.clone(), volume.clone());
    disk.after_read(1, move || {
        inside.0.resize_volume("v", 4 * BLOCK).unwrap();
        inside.1.write_at(end, &[7; 512], true).unwrap();
        inside.0.resize_volume("v", end).unwrap();
    });
    store.resize_volume("v", 8 * BLOCK).unwrap();
    assert!(!disk.awaits_read());
    let mut found = [9; 512];
    volume.read_at(end, &mut found).unwrap();
    assert_eq!(found, [0; 512], "bytes that a shrink had cut off are back");
}

/// Below that many layers there is a table by block.
#[test]
fn an_overwrite_above_ten_snapshots_is_read() {
    let bench = bench();
    let store = &bench.store;
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    for n in 0..10_u8 {
        volume.write_at(u64::from(n) * BLOCK, &[n + 1; BLOCK as usize], false).unwrap();
        store.create_snapshot("v", &format!("s{n}"), &Default::default()).unwrap();
    }
    volume.write_at(15 * BLOCK, &[99; BLOCK as usize], false).unwrap();
    (0..10).for_each(|n| assert_eq!(block(store, n), n as u8 + 1));
    volume.write_at(0, &[77; BLOCK as usize], false).unwrap();
    assert_eq!(block(store, 0), 77, "an acknowledged overwrite is not read back");
}
