//! How often a request takes memory from the heap: never, once things are warm.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{FixedEnv, Mem, MemTail};
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Finish, Request, Start};
use dbs_core::{InitOptions, Store, Volume};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting calls by thread.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: u64 = 4096;
const EXTENT: u64 = 64 << 10;
const EXTENTS: u64 = 4096;

fn bench() -> (Store, Volume) {
    let disk = Arc::new(Mem::new(2 * EXTENTS * EXTENT));
    let options = InitOptions { extent_size: EXTENT, ..InitOptions::default() };
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
        Start::Io => assert_eq!(request.finish_write(Ok(())).unwrap(), Finish::Done),
        // Now and then metadata storage is reserved.
        Start::Blocked => volume.write_at(offset, &[1; BLOCK as usize], false).unwrap(),
        Start::Done => panic!("there is something to write"),
    }
}

fn read(volume: &Volume, request: &mut Request, offset: u64) {
    match volume.start_read(offset, BLOCK, request).unwrap() {
        Start::Io => request.finish_read(Ok(())).unwrap(),
        Start::Done => assert_eq!(request.zeros().len(), 1),
        Start::Blocked => panic!("blocked"),
    }
}

#[test]
fn requests_take_no_memory() {
    let (store, volume) = bench();
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
