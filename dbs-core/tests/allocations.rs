//! What is taken from the heap: by requests nothing, once things are warm; by hostile images no more
//! than their tables are worth.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{FixedEnv, Mem, MemTail};
use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use dbs_core::store::SnapshotOptions;
use dbs_core::v1::{self, Image};
use dbs_core::volume::{Finish, Read, Request, Start};
use dbs_core::{ErrorKind, InitOptions, Store, Volume};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    /// Bytes held, and the most there were. What another thread took or freed is not known.
    static HELD: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
}

fn hold(bytes: i64) {
    HELD.set(HELD.get() + bytes);
    MOST.set(MOST.get().max(HELD.get()));
}

/// The system's allocator, counting calls and bytes by thread.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        hold(layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        hold(new_size as i64 - layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        hold(-(layout.size() as i64));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: u64 = 4096;
const EXTENT: u64 = 64 << 10;
const EXTENTS: u64 = 4096;
/// What all blocks are said to hold.
static CONTENT: [u8; BLOCK as usize] = [1; BLOCK as usize];

fn bench(checksums: bool) -> (Store, Volume) {
    let disk = Arc::new(Mem::new(2 * EXTENTS * EXTENT));
    let options = InitOptions { extent_size: EXTENT, checksums, ..InitOptions::default() };
    Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let env = Arc::new(FixedEnv::new(2));
    let store = Store::open_on(storage, Some(MemTail::boxed()), env, false).unwrap();
    store.create_volume("v", EXTENTS * EXTENT).unwrap();
    let volume = store.volume("v").unwrap();
    (store, volume)
}

/// Heap calls of a thousand requests; nothing is transferred.
fn count(request: &mut Request, mut one: impl FnMut(&mut Request, u64)) -> u64 {
    let before = COUNT.get();
    (0..1000).for_each(|i| one(request, i));
    COUNT.get() - before
}

fn write(volume: &Volume, request: &mut Request, offset: u64) {
    match volume.start_write(offset, BLOCK, request).unwrap() {
        Start::Io => {
            request.seal(&CONTENT);
            assert_eq!(request.finish_write(Ok(())).unwrap(), Finish::Done);
        }
        // Now and then metadata storage is reserved.
        Start::Blocked => volume.write_at(offset, &CONTENT, false).unwrap(),
        Start::Done => panic!("there is something to write"),
    }
}

fn read(volume: &Volume, request: &mut Request, offset: u64) {
    match volume.start_read(offset, BLOCK, request).unwrap() {
        Start::Io => assert_eq!(request.finish_read(Ok(()), &CONTENT).unwrap(), Read::Done),
        Start::Done => assert_eq!(request.zeros().len(), 1),
        Start::Blocked => panic!("blocked"),
    }
}

#[test]
fn requests_take_no_memory() {
    for checksums in [false, true] {
        take_no_memory(checksums);
    }
}

/// What checksums cost a request, transfers aside. No test: it prints figures.
#[test]
#[ignore = "measures; run with --nocapture on a quiet machine"]
fn cost_of_checksums() {
    const ROUNDS: u64 = 200;
    let cpu_ns = || -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    };
    for checksums in [false, true] {
        let (_store, volume) = bench(checksums);
        let request = &mut Request::new();
        let place = |i: u64| i % 1000 * EXTENT;
        (0..1000).for_each(|i| write(&volume, request, place(i)));
        let begun = cpu_ns();
        (0..1000 * ROUNDS).for_each(|i| write(&volume, request, place(i)));
        let written = cpu_ns();
        (0..1000 * ROUNDS).for_each(|i| read(&volume, request, place(i)));
        let (write, read) = (written - begun, cpu_ns() - written);
        let each = |ns: u64| ns / (1000 * ROUNDS);
        println!(
            "checksums {checksums}: overwrite of 4 KiB {} ns, read {} ns of processor time",
            each(write),
            each(read)
        );
    }
}

fn take_no_memory(checksums: bool) {
    let (store, volume) = bench(checksums);
    let request = &mut Request::new();
    let place = |i: u64| i * 7 % EXTENTS * EXTENT;
    let first = count(request, |request, i| write(&volume, request, place(i)));
    let fill = count(request, |request, i| write(&volume, request, place(i) + BLOCK));
    let overwrite = count(request, |request, i| write(&volume, request, place(i)));
    read(&volume, request, 0);
    let head = count(request, |request, i| read(&volume, request, place(i)));
    println!(
        "heap calls of 1000 first writes {first}, into extents {fill}, overwrites {overwrite}, reads {head}"
    );
    assert_eq!((overwrite, head), (0, 0));
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    let snapshot = store.volume("v@s").unwrap();
    let after = count(request, |request, i| write(&volume, request, place(i)));
    for volume in [&volume, &snapshot] {
        read(volume, request, 0);
        let cold = count(request, |request, i| read(volume, request, place(i) + BLOCK));
        let warm = count(request, |request, i| read(volume, request, place(i) + BLOCK));
        println!("after a snapshot: 1000 writes {after}, reads {cold}, again {warm}");
        assert_eq!(warm, 0);
    }
    assert!(first <= FIRST_MAX && fill <= FIRST_MAX && after <= FIRST_MAX);
}

/// Heap calls of a thousand writes that are recorded: tables that grow.
const FIRST_MAX: u64 = 4000;

/// Volumes of the image: enough to show it, in a quarter of the time that all 256 take.
const VOLUMES: usize = 64;

/// A 1.0.0 image with every snapshot there can be on one chain, and each volume's head on it.
fn hostile_image() -> tempfile::NamedTempFile {
    const SIZE: u64 = 100 << 20;
    const SNAPSHOTS: u16 = u16::MAX;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SIZE).unwrap();
    let put = |offset: u64, bytes: &[u8]| file.as_file().write_all_at(bytes, offset).unwrap();
    put(0, b"DBS@393!");
    put(8, &0x0001_0000u32.to_le_bytes());
    put(16, &SIZE.to_le_bytes());
    let mut volumes = vec![0; VOLUMES * 266];
    for (slot, number) in volumes.chunks_exact_mut(266).zip(0u16..) {
        slot[..2].copy_from_slice(&(SNAPSHOTS - number).to_le_bytes());
        slot[2..10].copy_from_slice(&(1u64 << 20).to_le_bytes());
        slot[10..14].copy_from_slice(format!("v{number:03}").as_bytes());
    }
    put(4096, &volumes);
    let slots = (0..SNAPSHOTS).flat_map(|parent| {
        let created = 1_700_000_000u64.to_le_bytes();
        parent.to_le_bytes().into_iter().chain(created)
    });
    put(72_192, &slots.collect::<Vec<u8>>());
    file
}

/// The chains of all volumes at once would be 4 million snapshots: 230 MB, and 900 MB with 256 volumes.
#[test]
fn an_upgrade_holds_one_chain_at_a_time() {
    let file = hostile_image();
    let disk = Arc::new(Mem::new(8 << 20));
    let options = InitOptions { extent_size: EXTENT, ..InitOptions::default() };
    Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let store = Store::open_on(storage, None, Arc::new(FixedEnv::new(2)), false).unwrap();
    MOST.set(HELD.get());
    let before = HELD.get();
    let image = Image::open(file.path(), None).unwrap();
    assert_eq!(image.volumes().len(), VOLUMES);
    // The store is too small for so many snapshots, which shows after all chains were looked at.
    let error = v1::upgrade(&image, &store, &mut |_, _| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    let most = MOST.get() - before;
    println!("{} MiB of heap at most", most >> 20);
    assert!(most < 96 << 20, "{most} bytes");
}

/// A device of any size that holds nothing.
struct Blank(u64);

impl Storage for Blank {
    fn size_bytes(&self) -> u64 {
        self.0
    }
    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        requests.iter_mut().for_each(|request| request.buf.fill(0));
        Ok(())
    }
    fn write_many(&self, _requests: &[WriteRequest<'_>]) -> io::Result<()> {
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn allocate(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, _size_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn driver(&self) -> &'static str {
        "blank"
    }
}

const HUGE: u64 = 64 << 40;

/// Marks at the ends of the largest tables, or ids there: each took some GiB. Then dumps with high ids were
/// refused, though a store may well have its last extents in use alone.
#[test]
fn a_dump_takes_no_more_memory_than_it_is_worth() {
    let options = InitOptions {
        extent_size: EXTENT,
        max_volumes: Some(1 << 20),
        max_snapshots: Some(1 << 22),
        ..InitOptions::default()
    };
    let geometry = dbs_core::format::Geometry::plan(HUGE, &options).unwrap();
    let regions: Vec<_> = dbs_core::format::RegionKind::ALL
        .into_iter()
        .map(|kind| (kind.name(), geometry.region(kind)))
        .filter(|(_, region)| region.length > 0)
        .map(|(name, region)| {
            serde_json::json!({"name": name, "offset": region.offset, "length": region.length})
        })
        .collect();
    let marks: Vec<u32> = dbs_core::format::RegionKind::MARKED
        .into_iter()
        .map(|kind| geometry.needed_blocks(kind))
        .collect();
    let dump = |volumes: serde_json::Value, snapshots: serde_json::Value, entries: &[u32]| {
        let entries: Vec<_> = entries
            .iter()
            .zip(0..)
            .map(|(entry, extent)| {
                serde_json::json!({
                    "entry": entry, "snapshot": 1, "extent": extent, "zero_run": 0, "data": [],
                    "zero": [[0, 1]],
                })
            })
            .collect();
        let dump = serde_json::json!({
            "format": "2.0.0", "uuid": "00000000-0000-4000-8000-000000000001", "created_ns": 1,
            "size": geometry.size, "extent_size": EXTENT, "volumes_max": geometry.volumes,
            "snapshots_max": geometry.snapshots, "spares_max": geometry.spares,
            "extents_max": geometry.extents_max, "sequence": 9, "marks": marks,
            "regions": regions, "volumes": volumes, "snapshots": snapshots, "entries": entries,
        });
        serde_json::to_vec(&dump).unwrap()
    };
    let slot = |id: u32| {
        serde_json::json!([{
            "id": id, "uuid": "00000000-0000-4000-8000-000000000002", "name": "v", "size": 1 << 20,
            "created_ns": 1, "revision": 0, "head": id, "volume": id, "parent": 0, "flags": 1,
            "labels": {},
        }])
    };
    let volume = |id: u32| {
        let mut slot = slot(id);
        slot[0]["flags"] = 0.into();
        slot
    };
    let head = |id: u32| {
        let mut slot = slot(id);
        slot[0]["name"] = "".into();
        slot
    };
    let spare = (1 << 30) + geometry.spares - 1;
    let none = || serde_json::json!([]);
    let last = geometry.data_extents() - 1;
    let scattered: Vec<u32> = (0..10_000).map(|at| at * (last / 10_000)).collect();
    let fine = |entries: &[u32]| dump(volume(1), head(1), entries);
    let cases = [
        ("marks alone", dump(none(), none(), &[]), true),
        ("a volume at the start", fine(&[0]), true),
        ("the last volume", dump(volume(geometry.volumes), none(), &[]), false),
        ("the last snapshot", dump(volume(1), head(geometry.snapshots), &[]), false),
        ("the last extent", fine(&[last]), true),
        ("an extent behind the device", fine(&[geometry.extents_max - 1]), false),
        ("the last spare entry", fine(&[spare]), true),
        ("extents far apart", fine(&scattered), true),
    ];
    for (name, dump, fine) in cases {
        MOST.set(HELD.get());
        let before = HELD.get();
        let result = Store::plan_restore_on(&Blank(HUGE), &dump);
        let most = MOST.get() - before;
        println!("{name}: {} MiB of heap at most, {:?}", most >> 20, result.as_ref().err());
        assert_eq!(result.is_ok(), fine, "{name}");
        assert!(most < 384 << 20, "{name}: {most} bytes");
    }
}

/// It was built as a tree of JSON, with the metadata locked: half a gigabyte for 262,144 extents.
#[test]
fn a_dump_is_written_as_it_is_read() {
    let (store, volume) = bench(false);
    for extent in 0..EXTENTS {
        for block in (0..EXTENT / BLOCK).step_by(2) {
            volume.write_at(extent * EXTENT + block * BLOCK, &CONTENT, false).unwrap();
        }
    }
    store.flush().unwrap();
    MOST.set(HELD.get());
    let before = HELD.get();
    let mut bytes = 0;
    store.dump(&mut Counted(&mut bytes)).unwrap();
    let (most, journal) = (MOST.get() - before, 1 << 20);
    println!("{bytes} bytes of JSON took {most} bytes of memory");
    assert!(bytes > 2 << 20, "too little to tell: {bytes}");
    assert!(most < journal + 512 * EXTENTS as i64, "{most}");
}

struct Counted<'a>(&'a mut u64);

impl io::Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        *self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
