//! The simulated disk keeps, loses and tears what it should.

use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use dbs_sim::disk::{BLOCK, is_stop};
use dbs_sim::{CrashMode, Faults, Medium, SimDisk};
use std::collections::BTreeSet;

const SIZE: u64 = 1 << 20;

fn disk() -> SimDisk {
    SimDisk::new(Medium::file(SIZE), 1)
}

fn read(disk: &SimDisk, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0xee; len];
    disk.read_at(offset, &mut buf).unwrap();
    buf
}

fn image(disk: &SimDisk, seed: u64, mode: CrashMode) -> SimDisk {
    disk.crash_image(&mut fastrand::Rng::with_seed(seed), mode)
}

#[test]
fn conforms() {
    use dbs_core::io::conformance;
    let size = conformance::SIZE_BYTES;
    conformance::run(&SimDisk::new(Medium::file(size), 1), conformance::Resize::Possible);
    let device = Medium { garbage: true, ..Medium::file(size) };
    conformance::run(&SimDisk::new(device, 2), conformance::Resize::Possible);
}

#[test]
fn flushed_writes_survive_and_others_may_not() {
    let disk = disk();
    disk.write_at(4096, &[1; 8192]).unwrap();
    disk.flush().unwrap();
    disk.write_at(8192, &[2; 4096]).unwrap();
    assert_eq!(read(&disk, 4096, 4096), [1; 4096]);
    assert_eq!(read(&disk, 8192, 4096), [2; 4096]);
    for mode in CrashMode::ALL {
        assert_eq!(read(&image(&disk, 3, mode), 4096, 4096), [1; 4096], "{mode:?}");
    }
    assert_eq!(read(&image(&disk, 3, CrashMode::Lost), 8192, 4096), [1; 4096]);
    assert_eq!(read(&image(&disk, 3, CrashMode::Kept), 8192, 4096), [2; 4096]);
    assert!(!image(&disk, 3, CrashMode::Kept).dirty());
}

#[test]
fn sectors_tear_only_before_the_data_region() {
    let disk = disk();
    disk.set_atomic_from(SIZE / 2);
    for offset in [0, SIZE / 2] {
        disk.write_at(offset, &[1; BLOCK]).unwrap();
        disk.write_at(offset, &[2; BLOCK]).unwrap();
    }
    let mut torn = BTreeSet::new();
    let mut whole = BTreeSet::new();
    for seed in 0..200 {
        let image = image(&disk, seed, CrashMode::Torn);
        torn.insert(read(&image, 0, BLOCK).into_iter().step_by(512).collect::<Vec<_>>());
        whole.insert(read(&image, SIZE / 2, BLOCK));
    }
    assert!(torn.len() > 50, "{}", torn.len());
    assert_eq!(whole, [vec![0; BLOCK], vec![1; BLOCK], vec![2; BLOCK]].into());
}

#[test]
fn modes_keep_whole_writes() {
    let disk = disk();
    for i in 0..4u8 {
        disk.write_at(u64::from(i) * 65536, &[i + 1; 12288]).unwrap();
    }
    let kept = |image: &SimDisk| {
        (0..4u64)
            .map(|i| {
                let bytes = read(image, i * 65536, 12288);
                assert!(bytes.iter().all(|b| *b == bytes[0]), "a write was split");
                bytes[0] != 0
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(kept(&image(&disk, 1, CrashMode::OnlyLast)), [false, false, false, true]);
    assert_eq!(kept(&image(&disk, 1, CrashMode::AllButLast)), [true, true, true, false]);
    let mut prefixes = BTreeSet::new();
    let mut subsets = BTreeSet::new();
    for seed in 0..100 {
        prefixes.insert(kept(&image(&disk, seed, CrashMode::Prefix)));
        subsets.insert(kept(&image(&disk, seed, CrashMode::Writes)));
    }
    assert_eq!(prefixes.len(), 4);
    assert!(prefixes.iter().all(|kept| kept.is_sorted_by(|a, b| a >= b)));
    assert!(subsets.len() > 8, "{subsets:?}");
}

#[test]
fn stopped_disk_does_nothing_more() {
    let disk = disk();
    disk.arm(Faults { stop_at: Some(2), ..Faults::default() });
    disk.write_at(0, &[1; 512]).unwrap();
    let error = disk.flush().unwrap_err();
    assert!(is_stop(&error));
    assert!(disk.stopped());
    assert!(is_stop(&disk.write_at(0, &[2; 512]).unwrap_err()));
    assert!(is_stop(&disk.read_at(0, &mut [0; 512]).unwrap_err()));
    disk.revive();
    assert_eq!(read(&disk, 0, 512), [1; 512]);
    assert!(disk.dirty(), "the flush did not happen");
}

#[test]
fn planned_errors_hit_once_and_spare_the_rest() {
    let disk = disk();
    disk.arm(Faults { eio_at: Some(2), read_eio_at: Some(1), ..Faults::default() });
    disk.write_at(0, &[1; 512]).unwrap();
    assert_eq!(disk.write_at(4096, &[1; 512]).unwrap_err().raw_os_error(), Some(5));
    disk.write_at(8192, &[1; 512]).unwrap();
    assert!(disk.read_at(0, &mut [0; 512]).is_err());
    assert_eq!(read(&disk, 8192, 512), [1; 512]);
    disk.arm(Faults { read_eio_in: Some(8192..8704), ..Faults::default() });
    assert!(disk.read_at(8192, &mut [0; 512]).is_err());
    assert_eq!(read(&disk, 0, 512), [1; 512]);
}

#[test]
fn a_failed_flush_forgets() {
    let mut seen = BTreeSet::new();
    for seed in 0..20 {
        let disk = SimDisk::new(Medium::file(SIZE), seed);
        disk.write_at(0, &[1; BLOCK]).unwrap();
        disk.arm(Faults { eio_at: Some(1), ..Faults::default() });
        assert!(disk.flush().is_err());
        disk.flush().unwrap();
        assert_eq!(read(&disk, 0, BLOCK), [1; BLOCK], "the cache still has it");
        seen.insert(read(&image(&disk, 0, CrashMode::Kept), 0, 1 << 9)[0]);
    }
    assert_eq!(seen, [0, 1].into());
}

#[test]
fn lost_and_misdirected_writes() {
    let disk = disk();
    disk.arm(Faults { lose_at: Some(1), misdirect_at: Some(2), ..Faults::default() });
    disk.write_at(0, &[1; BLOCK]).unwrap();
    assert_eq!(read(&disk, 0, BLOCK), [0; BLOCK]);
    disk.write_at(0, &[2; BLOCK]).unwrap();
    assert_eq!(read(&disk, 0, BLOCK), [0; BLOCK]);
    assert_eq!(read(&disk, 0, SIZE as usize).iter().filter(|b| **b == 2).count(), BLOCK);
}

#[test]
fn full_disks_refuse_holes_and_keep_what_was_allocated() {
    let disk = SimDisk::new(Medium { room: Some(2), ..Medium::file(SIZE) }, 1);
    disk.allocate(0, 4096).unwrap();
    disk.write_at(8192, &[1; 512]).unwrap();
    assert_eq!(disk.write_at(16384, &[1; 512]).unwrap_err().raw_os_error(), Some(28));
    disk.write_at(0, &[1; 512]).unwrap();
    assert!(disk.allocate(0, 65536).is_err());
    disk.arm(Faults { enospc_from: Some(1), ..Faults::default() });
    assert!(disk.allocate(0, 4096).is_err());
}

#[test]
fn discarded_blocks_hold_anything_until_written() {
    let mut seen = BTreeSet::new();
    for seed in 0..30 {
        let disk = SimDisk::new(Medium::file(SIZE), seed);
        disk.write_at(0, &[1; 3 * BLOCK]).unwrap();
        disk.flush().unwrap();
        disk.discard(BLOCK as u64, BLOCK as u64).unwrap();
        assert_eq!(read(&disk, 0, BLOCK), [1; BLOCK]);
        assert_eq!(read(&disk, 2 * BLOCK as u64, BLOCK), [1; BLOCK]);
        assert_eq!(read(&image(&disk, 0, CrashMode::Lost), BLOCK as u64, BLOCK), [1; BLOCK]);
        seen.insert(read(&disk, BLOCK as u64, BLOCK));
        disk.write_at(BLOCK as u64, &[3; BLOCK]).unwrap();
        assert_eq!(read(&disk, BLOCK as u64, BLOCK), [3; BLOCK]);
    }
    assert!(seen.len() > 3, "{}", seen.len());
}

#[test]
fn sizes_change_and_are_lost() {
    let disk = disk();
    disk.set_size(2 * SIZE).unwrap();
    disk.write_at(SIZE, &[1; 512]).unwrap();
    let sizes = |disk: &SimDisk| {
        let sizes = (0..50).map(|s| image(disk, s, CrashMode::Writes).size_bytes());
        sizes.collect::<BTreeSet<_>>()
    };
    assert_eq!(sizes(&disk), [SIZE, 2 * SIZE].into());
    disk.flush().unwrap();
    assert_eq!(sizes(&disk), [2 * SIZE].into());
    disk.set_size(SIZE).unwrap();
    assert!(disk.read_at(SIZE, &mut [0; 512]).is_err());
    assert_eq!(sizes(&disk), [SIZE, 2 * SIZE].into());
    disk.set_size(2 * SIZE).unwrap();
    assert_eq!(read(&disk, SIZE, 512), [0; 512]);
}

#[test]
fn captures_show_the_moments_between() {
    let disk = disk();
    disk.arm(Faults { captures_at: vec![1, 2, 9], ..Faults::default() });
    let buf = [1; 4096];
    let requests = [0, 4096, 8192].map(|offset| WriteRequest { offset, buf: &buf });
    disk.write_many(&requests).unwrap();
    let captures = disk.take_captures();
    let written: Vec<usize> = captures
        .iter()
        .map(|capture| read(capture, 0, 12288).iter().filter(|b| **b == 1).count())
        .collect();
    assert_eq!(written, [0, 4096]);
    assert_eq!(disk.counts().changes, 3);
}

#[test]
fn the_same_seed_does_the_same() {
    let run = || {
        let disk = SimDisk::new(Medium { garbage: true, ..Medium::file(SIZE) }, 42);
        let mut rng = fastrand::Rng::with_seed(7);
        for i in 0..100u64 {
            let buf = vec![i as u8; 512 * rng.usize(1..20)];
            disk.write_at(rng.u64(0..1000) * 512, &buf).unwrap();
            if i.is_multiple_of(10) {
                disk.discard(rng.u64(0..100) * 4096, 65536).unwrap();
            }
            if i.is_multiple_of(33) {
                disk.flush().unwrap();
            }
        }
        let image = disk.crash_image(&mut rng, CrashMode::Torn);
        (read(&disk, 0, SIZE as usize), read(&image, 0, SIZE as usize))
    };
    assert!(run() == run());
}

#[test]
fn bad_ranges_are_refused() {
    let disk = disk();
    assert!(disk.write_at(1, &[0; 512]).is_err());
    assert!(disk.write_at(0, &[0; 100]).is_err());
    assert!(disk.write_at(SIZE, &[0; 512]).is_err());
    assert!(disk.read_at(u64::MAX - 511, &mut [0; 512]).is_err());
    let (mut a, mut b) = ([0; 512], [0; 512]);
    let mut requests =
        [ReadRequest { offset: 0, buf: &mut a }, ReadRequest { offset: SIZE, buf: &mut b }];
    assert!(disk.read_many(&mut requests).is_err());
}

#[test]
fn flipped_bits_are_durable() {
    let disk = disk();
    disk.flip_bit(5000, 3);
    assert_eq!(read(&image(&disk, 0, CrashMode::Lost), 4096, 4096)[904], 8);
}
