//! Giving up blocks of zeros: what is freed, what is left, and what writers meet meanwhile.

use crate::common::{BLOCK, init, init_unchecked, open};
use dbs_core::volume::{Request, Start, Volume};
use dbs_core::{ErrorKind, Store};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const EXTENT: u64 = 64 << 10;
const PER_EXTENT: usize = EXTENT as usize / BLOCK;

fn write(volume: &Volume, block: usize, bytes: &[u8]) {
    let data: Vec<u8> = bytes.iter().flat_map(|byte| [*byte; BLOCK]).collect();
    volume.write_at((block * BLOCK) as u64, &data, false).unwrap();
}

fn read(volume: &Volume) -> Vec<u8> {
    let mut all = vec![0xaa; volume.size() as usize];
    volume.read_at(0, &mut all).unwrap();
    all
}

fn free(store: &Store) -> u64 {
    store.flush().unwrap();
    store.info().free
}

#[test]
fn zeros_are_given_up_and_read_as_before() {
    for disk in [init(1), init_unchecked(1)] {
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("v", 4 * EXTENT - 512).unwrap();
        let v = store.volume("v").unwrap();
        write(&v, 0, &[b's'; PER_EXTENT]);
        write(&v, 3 * PER_EXTENT, &[0; 3]);
        store.create_snapshot("v", "s", &Default::default()).unwrap();
        // All zeros, over the snapshot; some zeros; none; all zeros, up to the end.
        write(&v, 0, &[0; PER_EXTENT]);
        write(&v, PER_EXTENT, &[0, b'a', 0, 0, b'b']);
        write(&v, 2 * PER_EXTENT, &[b'c'; PER_EXTENT]);
        let end = (4 * PER_EXTENT - 1) * BLOCK;
        v.write_at(end as u64, &[0; BLOCK - 512], false).unwrap();
        let (before, there) = (read(&v), free(&store));

        let found = v.trim(true, &mut |_| true).unwrap();
        let block = BLOCK as u64;
        assert_eq!(found.checked, (2 * PER_EXTENT as u64 + 6) * block);
        assert_eq!(found.zeros, (PER_EXTENT as u64 + 3 + 1) * block);
        assert_eq!((found.freed, found.unreadable), (2 * EXTENT, 0));
        assert_eq!((found.done, found.total), (v.size(), v.size()));
        assert_eq!(free(&store), there, "it only looked");
        assert_eq!(v.trim(false, &mut |_| true).unwrap(), found);
        assert_eq!(free(&store), there + 2 * EXTENT);
        assert!(read(&v) == before);
        let again = v.trim(false, &mut |_| true).unwrap();
        assert_eq!((again.zeros, again.freed), (0, 0));
        // What the snapshot shows is its own, its zeros too.
        let snapshot = store.volume("v@s").unwrap();
        assert!(read(&snapshot)[..EXTENT as usize].iter().all(|byte| *byte == b's'));
        for dry_run in [false, true] {
            let refused = snapshot.trim(dry_run, &mut |_| true).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ReadOnly);
        }
        let stopped = v.trim(false, &mut |_| false).unwrap_err();
        assert_eq!(stopped.kind(), ErrorKind::Interrupted);
        drop((v, snapshot));
        store.close().unwrap();
        let store = open(&disk, 3, false).unwrap();
        assert!(read(&store.volume("v").unwrap()) == before, "opened again");
        assert!(store.check().unwrap().findings.is_empty());
    }
}

/// Each block has one writer, who knows what it holds.
#[test]
fn writers_beside_a_trim_lose_nothing() {
    const WRITERS: usize = 3;
    const ROUNDS: usize = 400;
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4 * EXTENT).unwrap();
    let ended = AtomicBool::new(false);
    let blocks = 4 * PER_EXTENT;
    let expected = Mutex::new(vec![0; blocks]);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (volume, expected) = (store.volume("v").unwrap(), &expected);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(writer as u64);
                    for _ in 0..ROUNDS {
                        let block = random.usize(..blocks / WRITERS) * WRITERS + writer;
                        // Zeros half of the time, which a trim may be at when the others come.
                        let byte = if random.bool() { 0 } else { random.u8(1..) };
                        write(&volume, block, &[byte]);
                        expected.lock().unwrap()[block] = byte;
                    }
                })
            })
            .collect();
        let trimmer = scope.spawn(|| {
            let volume = store.volume("v").unwrap();
            let mut zeros = 0;
            while !ended.load(Ordering::Relaxed) || zeros == 0 {
                zeros += volume.trim(false, &mut |_| true).unwrap().zeros;
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        ended.store(true, Ordering::Relaxed);
        trimmer.join().unwrap();
    });
    let content = read(&store.volume("v").unwrap());
    for (block, byte) in expected.into_inner().unwrap().into_iter().enumerate() {
        assert!(content[block * BLOCK..][..BLOCK].iter().all(|found| *found == byte), "{block}");
    }
}

/// Found by review: a trim ended at a block that the device could not read, and nothing behind it was ever given up.
#[test]
fn a_trim_goes_on_behind_what_it_cannot_read() {
    for disk in [init(1), init_unchecked(1)] {
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("v", 3 * EXTENT).unwrap();
        let v = store.volume("v").unwrap();
        write(&v, 0, &[0; 3 * PER_EXTENT]);
        read(&v);
        let mut request = Request::new();
        let started = v.start_read(EXTENT, BLOCK as u64, &mut request).unwrap();
        assert_eq!(started, Start::Io);
        disk.spoil(request.segments()[0].device);
        drop(request);
        for dry_run in [true, false] {
            let report = v.trim(dry_run, &mut |_| true).unwrap();
            let found = (report.unreadable, report.zeros, report.freed, report.done);
            assert_eq!(found, (EXTENT, 2 * EXTENT, 2 * EXTENT, 3 * EXTENT));
        }
    }
}

/// Found by review: what a trim could not give up, as no storage could be reserved for saying so, it called unreadable.
#[test]
fn a_trim_that_cannot_reserve_what_it_needs_fails() {
    let disk = init_unchecked(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", EXTENT).unwrap();
    let v = store.volume("v").unwrap();
    write(&v, 0, &[1; PER_EXTENT]);
    disk.refuse_room();
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    write(&v, 0, &[0; PER_EXTENT]);
    assert_eq!(v.trim(false, &mut |_| true).unwrap_err().kind(), ErrorKind::Io);
    disk.recover();
    let report = v.trim(false, &mut |_| true).unwrap();
    assert_eq!((report.zeros, report.unreadable), (EXTENT, 0));
}
