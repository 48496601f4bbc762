//! Damaged blocks of replicas: healed from others, or reported.

use crate::data_support::{Replica, Setup, eventually, pattern};
use crate::disk::rules::{Effect, Operation, Rule};
use crate::disk::{Disk, Mounted};
use crate::fake::{Do, Fake, done, message};
use crate::local::local;
use crate::support::{Load, SHORT, SIZE, Volume, address, checked, content, options, refused};
use dbs_core::store::SnapshotOptions;
use fuser::Errno;
use longhorn_controller::path::{Mode, PathOptions, ReplicaId};
use longhorn_data::DataOptions;
use longhorn_wire::frame::{Damaged, Header, Type};
use std::sync::atomic::Ordering;

/// Of a replica: what it met, and what was healed.
fn counted(volume: &Volume, id: ReplicaId) -> (u64, u64) {
    let stats = volume.path.stats();
    let replica = stats.replicas.iter().find(|replica| replica.id == id).unwrap();
    (replica.mismatches, replica.healed)
}

/// In the head and in a snapshot, over a socket and in the controller's process: who reads gets what was
/// written, and the replica has it again, on its own.
#[test]
fn a_damaged_block_is_healed_from_another_replica() {
    for in_process in [false, true] {
        let volume = Volume::new(options(2));
        let replicas = checked(2);
        let way = if in_process { local(&replicas[0]) } else { address(&replicas[0]) };
        volume.add(1, &way, Mode::Rw);
        volume.add(2, &address(&replicas[1]), Mode::Rw);
        let client = volume.client(2);
        let mut image = pattern(1, 64 << 10);
        client.write(0, &image).unwrap();
        let pause = volume.path.pause(false);
        for replica in &replicas {
            replica.store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
        }
        drop(pause);
        let frozen = image.clone();
        image[..8192].copy_from_slice(&pattern(2, 8192));
        client.write(0, &image[..8192]).unwrap();
        // One of the head, one of the snapshot.
        for (block, healed) in [(1, 1), (9, 2)] {
            replicas[0].damage(block * 4096 + 1234);
            let mut buf = [0; 4096];
            let own = replicas[0].active.volume().unwrap();
            own.read_at(block * 4096, &mut buf).unwrap_err();
            while counted(&volume, 1).1 < healed {
                assert!(client.read(0, 64 << 10).unwrap() == image);
            }
            own.read_at(block * 4096, &mut buf).unwrap();
            assert!(buf == image[block as usize * 4096..][..4096]);
        }
        let mut buf = vec![0; 64 << 10];
        replicas[0].store.volume("v@s").unwrap().read_at(0, &mut buf).unwrap();
        assert!(buf == frozen);
        assert!(content(&replicas[0]) == content(&replicas[1]));
        assert_eq!(replicas[0].store.scrub(true, &mut |_| true).unwrap().damaged, 0);
        assert_eq!(replicas[0].store.checksums().unwrap().healed, 2);
        assert_eq!((volume.faults(), counted(&volume, 2)), (Vec::new(), (0, 0)));
        let revision = |index: usize| replicas[index].events.revision.load(Ordering::SeqCst);
        assert_eq!(revision(0), revision(1), "healing is no change");
        drop((client, volume));
        replicas.into_iter().for_each(Replica::finish);
    }
}

/// Each has what the other lacks, and neither has all that one request wants.
#[test]
fn replicas_that_are_damaged_in_different_places_heal_each_other() {
    let volume = Volume::new(options(1));
    let replicas = checked(2);
    for (replica, id) in replicas.iter().zip(1..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    let client = volume.client(1);
    let image = pattern(1, 64 << 10);
    client.write(0, &image).unwrap();
    for block in 0..16 {
        replicas[usize::from(block % 3 == 0)].damage(block * 4096);
    }
    assert!(client.read(0, 64 << 10).unwrap() == image);
    for (replica, id) in replicas.iter().zip(1..) {
        eventually("all is healed", || {
            // What one request does not need healed is met by the next one.
            assert!(client.read(0, 64 << 10).unwrap() == image);
            counted(&volume, id).1 == if id == 1 { 10 } else { 6 }
        });
        assert!(content(replica)[..64 << 10] == image);
    }
    assert_eq!(volume.faults(), []);
    // In the same place neither helps the other: better both than none.
    replicas.iter().for_each(|replica| replica.damage(8192));
    let text = refused(client.read(0, 64 << 10));
    assert!(text.contains("checksum") && text.contains("byte 8192 of `v`"), "{text}");
    assert_eq!((volume.mode(1), volume.mode(2)), (Mode::Rw, Mode::Rw));
    client.write(8192, &image[..4096]).unwrap();
    assert!(client.read(8192, 4096).unwrap() == image[..4096]);
}

/// A replica, and the disk that its store is on.
struct Failing {
    replica: Replica,
    disk: Disk,
    // Behind what uses them.
    _mounted: Mounted,
    _dir: tempfile::TempDir,
}

impl Failing {
    fn new(checksums: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("store.dbs");
        let (disk, mounted) = Disk::at(dir.path(), &file);
        disk.forget();
        let options = DataOptions { reactors: 1, workers: 4, ..DataOptions::default() };
        let file = Some(file);
        let setup = Setup { volume_size: SIZE, options, checksums, file, ..Setup::default() };
        Self { replica: setup.start().unwrap(), disk, _mounted: mounted, _dir: dir }
    }

    /// The disk fails to do this with a block of the volume, so many times.
    fn fail(&self, operations: &'static [Operation], block: u64, left: u64) {
        let place = self.replica.place(block * 4096);
        let within = place..place + 4096;
        let rule = Rule { within, left, ..Rule::new(operations, Effect::Fail(Errno::EIO)) };
        self.disk.set_rules(&[rule]);
    }
}

/// Until it is written, and found to be well after that: the read and that of a thread that may wait,
/// which looks for the block; and the heal.
const UNTIL_HEALED: u64 = 4;

/// Found by review: two replicas with one bad sector each, at different places, lost the volume.
#[test]
fn a_block_that_a_device_cannot_read_is_healed_from_another_replica() {
    if !nix::unistd::geteuid().is_root() || !std::path::Path::new("/dev/fuse").exists() {
        println!("SKIPPED: needs root and /dev/fuse");
        return;
    }
    for checksums in [true, false] {
        let volume = Volume::new(options(1));
        let replicas = [Failing::new(checksums), Failing::new(checksums)];
        for (Failing { replica, .. }, id) in replicas.iter().zip(1..) {
            volume.add(id, &address(replica), Mode::Rw);
        }
        let client = volume.client(1);
        let image = pattern(1, 64 << 10);
        client.write(0, &image).unwrap();
        for (replica, block) in replicas.iter().zip([3, 9]) {
            replica.fail(&[Operation::Read], block, UNTIL_HEALED);
        }
        assert!(client.read(0, 64 << 10).unwrap() == image);
        for (Failing { replica, .. }, id) in replicas.iter().zip(1..) {
            eventually("the block is healed", || {
                assert!(client.read(0, 64 << 10).unwrap() == image);
                counted(&volume, id).1 == 1
            });
            assert!(content(replica)[..64 << 10] == image);
        }
        // A write of a part of the block needs the rest of it.
        replicas[0].fail(&[Operation::Read], 5, UNTIL_HEALED);
        let mut image = image;
        image[5 * 4096 + 512..][..512].fill(7);
        let before = replicas[0].disk.hits();
        client.write(5 * 4096 + 512, &[7; 512]).unwrap();
        assert!(replicas[0].disk.hits() > before, "the block was not read");
        replicas[0].disk.set_rules(&[]);
        replicas.iter().for_each(|one| assert!(content(&one.replica)[..64 << 10] == image));
        assert_eq!(volume.faults(), []);
        // One that does not even take what it should hold is given up, unless it is the last.
        for (one, id) in replicas.iter().zip(1..) {
            one.fail(&[Operation::Read, Operation::Write], 0, u64::MAX);
            if id == 1 {
                eventually("it becomes ERR", || {
                    assert!(client.read(0, 64 << 10).unwrap() == image);
                    volume.mode(1) == Mode::Err
                });
            }
        }
        let text = refused(client.read(0, 64 << 10));
        assert!(text.contains("byte 0 of `v` cannot be read"), "{text}");
        assert!(client.read(4096, 4096).unwrap() == image[4096..8192]);
        assert_eq!(volume.mode(2), Mode::Rw);
        replicas[1].disk.set_rules(&[]);
        client.write(0, &image[..4096]).unwrap();
        assert!(client.read(0, 64 << 10).unwrap() == image);
    }
}

/// A write that leaves a part of a damaged block cannot be carried out there by itself, and is.
#[test]
fn a_write_into_a_damaged_block_is_completed_from_another_replica() {
    let volume = Volume::new(options(1));
    let replicas = checked(3);
    for (replica, id) in replicas.iter().zip(1..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    let client = volume.client(1);
    let mut image = pattern(1, 64 << 10);
    client.write(0, &image).unwrap();
    // The first block of one write in one replica, its last in another; one that is both in the third.
    replicas[0].damage(4096);
    replicas[1].damage(3 * 4096 + 100);
    replicas[2].damage(7 * 4096);
    for (offset, length) in [(4096 + 512, 8192 + 512), (7 * 4096 + 1024, 512)] {
        let data = pattern(offset as u64, length);
        client.write(offset as u64, &data).unwrap();
        image[offset..offset + length].copy_from_slice(&data);
    }
    assert!(client.read(0, 64 << 10).unwrap() == image);
    for replica in &replicas {
        assert!(content(replica)[..64 << 10] == image);
    }
    let revisions = replicas.iter().map(|r| r.events.revision.load(Ordering::SeqCst));
    assert_eq!(revisions.collect::<Vec<_>>(), [3, 3, 3]);
    replicas.iter().for_each(|replica| replica.damage(5 * 4096));
    let text = refused(client.write(5 * 4096, &[1; 512]));
    assert!(text.contains("checksum"), "{text}");
    client.read(4 * 4096, 4096).unwrap();
    client.write(5 * 4096, &[1; 4096]).unwrap();
    assert_eq!(volume.faults(), []);
    for replica in &replicas {
        assert_eq!(content(replica)[5 * 4096..6 * 4096], [1; 4096]);
    }
}

#[test]
fn the_only_copy_stays_with_its_damage() {
    let volume = Volume::new(options(1));
    let replicas = checked(1);
    volume.add(1, &address(&replicas[0]), Mode::Rw);
    let client = volume.client(1);
    client.write(0, &pattern(1, 16384)).unwrap();
    replicas[0].damage(4096);
    assert!(refused(client.read(0, 16384)).contains("byte 4096 of `v`"));
    assert!(refused(client.write(4608, &[1; 512])).contains("byte 4096 of `v`"));
    assert_eq!((volume.mode(1), volume.faults()), (Mode::Rw, Vec::new()));
    assert_eq!(counted(&volume, 1), (3, 0));
    assert!(client.read(8192, 4096).is_ok());
}

#[test]
fn damage_under_load_is_healed() {
    let volume = Volume::new(options(2));
    let replicas = checked(3);
    volume.add(0, &local(&replicas[0]), Mode::Rw);
    volume.add(1, &address(&replicas[1]), Mode::Rw);
    volume.add(2, &address(&replicas[2]), Mode::Rw);
    let client = volume.client(1);
    client.write(0, &pattern(7, SIZE as usize)).unwrap();
    let load = Load { unmaps: false, flushes: true, ..Load::default() };
    let image = load.during(&volume, |load| {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..30 {
            // Not while the block is written: that would be damage that nobody can know of.
            let pause = volume.path.pause(false);
            replicas[random.usize(0..2)].damage(random.u64(0..SIZE));
            drop(pause);
            load.some_more(40);
        }
    });
    for _ in 0..3 {
        assert!(client.read(0, SIZE as u32).unwrap() == image);
    }
    for replica in &replicas {
        eventually("all is healed or written", || {
            // What one request does not heal, the next one does.
            client.read(0, SIZE as u32).unwrap();
            replica.store.scrub(true, &mut |_| true).unwrap().damaged == 0
        });
        assert!(content(replica) == image);
    }
    assert_eq!(volume.faults(), []);
    let healed: u64 = volume.path.stats().replicas.iter().map(|replica| replica.healed).sum();
    assert!(healed > 0, "{healed}");
}

fn damaged(header: &Header, offset: u64) -> Do {
    let damaged = Damaged { offset, in_snapshot: false, text: "rotten".to_owned() };
    Do::Bytes(message(Type::Damaged, header, &damaged.encode()))
}

#[test]
fn a_replica_with_too_much_damage_is_given_up() {
    let volume = Volume::new(options(1));
    let (rotten, good) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &rotten.address(), Mode::Rw);
    volume.add(2, &good.address(), Mode::Rw);
    rotten.behave(|header| match header.kind() {
        Some(Type::Read) => damaged(header, header.offset as u64),
        Some(Type::Heal) => Do::Bytes(done(header, 4096)),
        _ => Do::Serve,
    });
    let client = volume.client(1);
    for _ in 0..200 {
        client.read(0, 4096).unwrap();
    }
    assert_eq!(volume.faulted(1), "too many of its blocks are damaged");
    assert_eq!((rotten.seen(Type::Heal).len(), volume.mode(2)), (33, Mode::Rw));
}

#[test]
fn damage_that_cannot_be_is_nonsense() {
    for place in [8192, 4097, u64::MAX - 4095] {
        let volume = Volume::new(options(1));
        let (bad, good) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
        volume.add(1, &bad.address(), Mode::Rw);
        volume.add(2, &good.address(), Mode::Rw);
        bad.behave(move |header| match header.kind() {
            Some(Type::Read) => damaged(header, place),
            _ => Do::Serve,
        });
        let client = volume.client(1);
        for _ in 0..2 {
            client.read(4608, 512).unwrap();
        }
        let why = volume.faulted(1);
        assert!(why.contains(&format!("damage at {place} in a Read of 512 at 4608")), "{why}");
        assert_eq!(volume.mode(2), Mode::Rw);
    }
}

/// Found by review: I/O stood still around a snapshot for as long as a replica hung that was to heal a block.
#[test]
fn a_pause_does_not_wait_for_a_block_that_is_being_healed() {
    let volume = Volume::new(PathOptions { flush_timeout: SHORT, ..options(1) });
    let (rotten, good) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &rotten.address(), Mode::Rw);
    volume.add(2, &good.address(), Mode::Rw);
    rotten.behave(|header| match header.kind() {
        Some(Type::Read) => damaged(header, header.offset as u64),
        Some(Type::Heal) => Do::Silence,
        _ => Do::Serve,
    });
    let client = volume.client(1);
    for _ in 0..2 {
        client.read(0, 4096).unwrap();
    }
    eventually("it is to heal the block", || !rotten.seen(Type::Heal).is_empty());
    drop(volume.path.pause(false));
    assert_eq!(volume.mode(1), Mode::Rw, "the pause began before the flush timeout");
    // Content is about to change under the block: then it is waited for.
    drop(volume.path.pause(true));
    assert_eq!(volume.faulted(1), "flush timeout");
}
