//! The frontends `vhost-user` and `nvme-tcp`: what machines and hosts ask for, over real replicas.

use crate::data_support::{MIB, Replica, eventually, pattern};
use crate::fake::{Do, Fake};
use crate::host::{Command, DISCOVERY, EVENT, FLUSH, HOST, Host, Options as HostOptions, SET};
use crate::support::{SIZE, Volume, address, content, options, replicas};
use dbs_core::info::VolumeLimits;
use dbs_frontend::Listen;
use dbs_guest::{FLUSH as FLUSH_FEATURE, Guest, Kind, Options, Queue, Request};
use longhorn_controller::frontend::{NvmeFrontend, NvmeOptions, VhostFrontend};
use longhorn_controller::path::{Mode, PathOptions};
use longhorn_wire::frame::Type;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

const UUID: &str = "01234567-89ab-4def-8000-000000000001";
const OTHER: &str = "01234567-89ab-4def-8000-000000000002";
const PATIENCE: Duration = Duration::from_secs(300);
/// The status of a command on a disk that another host has.
const BUSY: u16 = 0x181;

/// A volume over so many replicas.
fn volume(options: PathOptions, count: usize) -> (Volume, Vec<Replica>) {
    let volume = Volume::new(options);
    let replicas = replicas(count);
    for (replica, id) in replicas.iter().zip(1..) {
        volume.add(id, &address(replica), Mode::Rw);
    }
    (volume, replicas)
}

fn socket(volume: &Volume) -> PathBuf {
    volume.dir.path().join("vhost.sock")
}

fn serve(volume: &Volume, uuid: &str) -> VhostFrontend {
    VhostFrontend::start(&volume.path, "vol", uuid, socket(volume)).unwrap()
}

fn ok(queue: &mut Queue, request: &Request) -> Vec<u8> {
    let (status, data) = queue.run(request).unwrap();
    assert_eq!(status, 0, "{:?}", request.kind);
    data
}

/// Waits for so many answers, all of them good.
fn answers(queue: &mut Queue, count: usize) {
    for _ in 0..count {
        assert!(queue.wait(PATIENCE), "no answer");
        let (head, _) = queue.take().unwrap();
        assert_eq!(queue.end(head).1, 0);
    }
}

#[test]
fn what_a_machine_writes_is_on_all_replicas() {
    let (volume, replicas) = volume(options(2), 3);
    let frontend = serve(&volume, UUID);
    let mut guest = Guest::connect(
        &socket(&volume),
        &Options { queues: 3, data_bytes: 4 << 20, places: 16, ..Options::default() },
    )
    .unwrap();
    assert_eq!(guest.size().unwrap(), SIZE);
    let mut image = pattern(1, SIZE as usize);
    ok(&mut guest.queues[0], &Request::write(0, image.clone()));
    for (seed, (at, length)) in
        [(512, 512), (4095 * 512, 1024), (0, 4096), (MIB - 512, 65536)].into_iter().enumerate()
    {
        let data = pattern(seed as u64 + 2, length);
        ok(&mut guest.queues[seed % 3], &Request::write(at, data.clone()));
        image[at as usize..][..length].copy_from_slice(&data);
    }
    // Zeros over several pieces, from the middle of a block to the middle of another; and a discard, after which what was
    // in whole blocks may be anything.
    for (flags, at) in [(0, MIB - 512), (1, MIB + 512)] {
        let zeroes = Request::range(Kind::WriteZeroes, at, 2 * MIB, flags);
        ok(&mut guest.queues[1], &zeroes);
        image[at as usize..][..2 * MIB as usize].fill(0);
    }
    ok(&mut guest.queues[2], &Request::range(Kind::Discard, 3 * MIB + 8192, 8192, 0));
    ok(&mut guest.queues[2], &Request::write(3 * MIB + 8192, vec![7; 8192]));
    image[3 * MIB as usize + 8192..][..8192].fill(7);
    let beyond = Request::range(Kind::WriteZeroes, SIZE - 4096, 8192, 0);
    assert_eq!(guest.queues[0].run(&beyond).unwrap().0, 1, "nothing of it is done");
    assert_eq!(guest.queues[0].run(&Request::read(SIZE, 512)).unwrap().0, 1);
    assert!(ok(&mut guest.queues[2], &Request::read(0, SIZE as u32)) == image);
    for replica in &replicas {
        assert!(content(replica) == image);
    }
    let commits = || replicas.iter().map(|r| r.events.commits.load(Ordering::SeqCst));
    let before: Vec<_> = commits().collect();
    ok(&mut guest.queues[0], &Request::flush());
    assert!(commits().zip(before).all(|(now, before)| now > before), "a flush reaches all");
    frontend.stop();
    assert!(!socket(&volume).exists());
}

/// A guest that knows no flush takes each write for durable.
#[test]
fn a_guest_without_flushes_has_its_writes_durable() {
    let (volume, replicas) = volume(options(1), 2);
    let _frontend = serve(&volume, UUID);
    let unused = Options { unused: FLUSH_FEATURE, ..Options::default() };
    let mut guest = Guest::connect(&socket(&volume), &unused).unwrap();
    let commits = |index: usize| replicas[index].events.commits.load(Ordering::SeqCst);
    for request in [
        Request::write(0, vec![1; 4096]),
        Request::range(Kind::WriteZeroes, 0, 4096, 0),
        Request::range(Kind::Discard, 0, 4096, 0),
    ] {
        // Changes something to be committed.
        let before = [commits(0), commits(1)];
        ok(&mut guest.queues[0], &Request::write(8192, vec![2; 4096]));
        ok(&mut guest.queues[0], &request);
        assert!(commits(0) > before[0] && commits(1) > before[1], "{:?}", request.kind);
    }
}

#[test]
fn a_machine_sees_a_new_size_and_has_the_volume_alone() {
    let (volume, _replicas) = volume(options(1), 1);
    let frontend = serve(&volume, UUID);
    let mut guest = Guest::connect(&socket(&volume), &Options::default()).unwrap();
    assert!(Guest::connect(&socket(&volume), &Options::default()).is_err(), "it has the volume");
    volume.path.resize(SIZE / 2);
    frontend.follow();
    assert_eq!(guest.change(PATIENCE).unwrap(), 2, "the configuration has changed");
    assert_eq!(guest.size().unwrap(), SIZE / 2);
    drop(guest);
    let mut next = Guest::connect(&socket(&volume), &Options::default()).unwrap();
    ok(&mut next.queues[0], &Request::write(0, vec![1; 4096]));
}

#[test]
fn a_machine_that_comes_again_is_told_of_the_size() {
    let (volume, _replicas) = volume(options(1), 1);
    let first = serve(&volume, UUID);
    let mut guest = Guest::connect(&socket(&volume), &Options::default()).unwrap();
    assert_eq!(guest.size().unwrap(), SIZE);
    drop(first);
    // Before anybody could tell it.
    volume.path.resize(SIZE / 2);
    let _next = serve(&volume, UUID);
    guest.reconnect(&socket(&volume)).unwrap();
    assert_eq!(guest.change(PATIENCE).unwrap(), 2, "the configuration has changed");
    assert_eq!(guest.size().unwrap(), SIZE / 2);
}

#[test]
fn notes_of_an_unknown_disk_are_refused() {
    let (volume, _replicas) = volume(options(1), 1);
    let _frontend = serve(&volume, UUID);
    let mut guest = Guest::connect(&socket(&volume), &Options::default()).unwrap();
    guest.reconnect(&socket(&volume)).unwrap();
    guest.forget_disk().unwrap();
    assert!(guest.reconnect(&socket(&volume)).is_err());
}

/// As a controller leaves them that was killed: noted, and not answered.
#[test]
fn what_was_under_way_is_carried_out_on_the_same_disk_alone() {
    let (volume, replicas) = volume(options(2), 2);
    let first = serve(&volume, UUID);
    let mut guest = Guest::connect(&socket(&volume), &Options::default()).unwrap();
    guest.stop(0).unwrap();
    let left: Vec<_> = (0..4).map(|n| Request::write(4096 * n, vec![1 + n as u8; 4096])).collect();
    let heads: Vec<u16> = left.iter().map(|request| guest.queues[0].add(request)).collect();
    guest.note(0, &heads).unwrap();
    drop(first);
    let other = serve(&volume, OTHER);
    assert!(guest.reconnect(&socket(&volume)).is_err());
    assert!(guest.queues[0].take().is_none());
    assert!(content(&replicas[0])[..16384].iter().all(|byte| *byte == 0));
    drop(other);
    let _same = serve(&volume, UUID);
    guest.reconnect(&socket(&volume)).unwrap();
    answers(&mut guest.queues[0], 4);
    for replica in &replicas {
        let content = content(replica);
        assert!((0..4).all(|n| content[4096 * n..][..4096] == [1 + n as u8; 4096]));
    }
}

/// What the limits delay is not waited for when a machine goes: it is noted, and done when it comes again.
#[test]
fn what_limits_delay_is_left_to_the_next_connection() {
    let limits = VolumeLimits { iops: 20, burst_seconds: 1, ..VolumeLimits::default() };
    let (volume, replicas) = volume(PathOptions { limits, ..options(1) }, 1);
    let frontend = serve(&volume, UUID);
    let mut guest = Guest::connect(&socket(&volume), &Options::default()).unwrap();
    for n in 0..60 {
        guest.queues[0].add(&Request::write(4096 * n, vec![1 + n as u8; 4096]));
    }
    guest.queues[0].tell();
    answers(&mut guest.queues[0], 1);
    guest.reconnect(&socket(&volume)).unwrap();
    answers(&mut guest.queues[0], 1);
    // The end of the frontend waits for nothing that the limits delay.
    frontend.stop();
    let mut answered = 2;
    while let Some((head, _)) = guest.queues[0].take() {
        assert_eq!(guest.queues[0].end(head).1, 0);
        answered += 1;
    }
    let _next = serve(&volume, UUID);
    guest.reconnect(&socket(&volume)).unwrap();
    answers(&mut guest.queues[0], 60 - answered);
    assert!(guest.noted(0).unwrap().is_empty());
    let content = content(&replicas[0]);
    assert!((0..60).all(|n| content[4096 * n..][..4096] == [1 + n as u8; 4096]));
}

#[test]
fn a_machine_is_told_of_failures() {
    let volume = Volume::new(options(1));
    let replica = Fake::new(SIZE as usize);
    volume.add(1, &replica.address(), Mode::Rw);
    let _frontend = serve(&volume, UUID);
    let mut guest = Guest::connect(&socket(&volume), &Options::default()).unwrap();
    replica.behave(|header| match header.kind() {
        Some(Type::Write) => Do::Fail("no space left on device"),
        _ => Do::Serve,
    });
    assert_eq!(guest.queues[0].run(&Request::write(0, vec![1; 4096])).unwrap().0, 1);
    assert_eq!(volume.mode(1), Mode::Rw, "it is full");
    let zeroes = Request::range(Kind::WriteZeroes, 0, 3 * MIB, 0);
    assert_eq!(guest.queues[0].run(&zeroes).unwrap().0, 1);
    ok(&mut guest.queues[0], &Request::read(0, 4096));
}

fn at(frontend: &NvmeFrontend) -> SocketAddr {
    let Listen::Tcp(host, port) = &frontend.addresses()[0] else { panic!("no TCP") };
    SocketAddr::new(host.parse().unwrap(), *port)
}

fn serve_nvme(volume: &Volume, uuid: &str) -> NvmeFrontend {
    let options = NvmeOptions::at(&["tcp:0".parse().unwrap()]);
    NvmeFrontend::start(&volume.path, "vol", uuid, &options).unwrap()
}

#[test]
fn what_a_host_writes_is_on_all_replicas() {
    let (volume, replicas) = volume(options(2), 3);
    let frontend = serve_nvme(&volume, UUID);
    assert_eq!(frontend.subsystem(), format!("nqn.2014-08.org.nvmexpress:uuid:{UUID}"));
    for digest in [false, true] {
        let asked =
            HostOptions { header_digest: digest, data_digest: digest, ..HostOptions::default() };
        let mut host = Host::with(at(&frontend), asked, &frontend.subsystem(), 2);
        let mut image = pattern(7, SIZE as usize);
        for (index, part) in image.chunks(MIB as usize).enumerate() {
            let write = Command::write(index as u64 * MIB, part.to_vec());
            host.queues[index % 2].run(&write).ok();
        }
        for (seed, (at, length)) in [(512, 512), (4095 * 512, 1024), (0, 16384)].iter().enumerate()
        {
            let data = pattern(seed as u64, *length);
            host.queues[seed % 2].run(&Command::write(*at, data.clone()).durable()).ok();
            image[*at as usize..][..*length].copy_from_slice(&data);
        }
        for frees in [false, true] {
            let at = if frees { MIB + 512 } else { MIB - 512 };
            host.queues[0].run(&Command::zeroes(at, MIB, frees)).ok();
            image[at as usize..][..MIB as usize].fill(0);
        }
        // More ranges than are given up at a time.
        let ranges: Vec<_> = (0..9).map(|n| (3 * MIB + 8192 * n, 4096)).collect();
        host.queues[1].run(&Command::deallocate(&ranges)).ok();
        for (at, length) in ranges {
            host.queues[1].run(&Command::write(at, vec![7; length as usize])).ok();
            image[at as usize..][..length as usize].fill(7);
        }
        let commits = || replicas.iter().map(|r| r.events.commits.load(Ordering::SeqCst));
        let before: Vec<_> = commits().collect();
        host.queues[0].run(&Command::new(FLUSH, 1)).ok();
        assert!(commits().zip(before).all(|(now, before)| now > before), "a flush reaches all");
        for (index, part) in image.chunks(MIB as usize).enumerate() {
            let read = host.queues[index % 2].run(&Command::read(index as u64 * MIB, MIB)).ok();
            assert!(read.data == part);
        }
        for replica in &replicas {
            assert!(content(replica) == image);
        }
        let data = host.admin.run(&Command::identify(0, 1)).ok().data;
        assert_eq!(data[33], 1 << 3, "nothing is said of blocks that were given up");
        // It leaves in good order.
        host.admin.run(&Command::property_set(0x14, 0x0046_4001)).ok();
    }
    let address = at(&frontend);
    frontend.stop();
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn a_host_has_the_volume_alone_under_the_name_of_this_disk() {
    let (volume, _replicas) = volume(options(1), 1);
    let frontend = serve_nvme(&volume, UUID);
    let (address, subsystem) = (at(&frontend), frontend.subsystem());
    let host = Host::with(address, HostOptions::default(), &subsystem, 1);
    let refused = Host::admin(address, HostOptions::default(), &subsystem).err().unwrap();
    assert_eq!((refused.status, refused.no_retry), (BUSY, false));
    drop(host);
    let mut host = Host::with(address, HostOptions::default(), &subsystem, 1);
    let size = |host: &mut Host| {
        let data = host.admin.run(&Command::identify(0, 1)).ok().data;
        u64::from_le_bytes(data[..8].try_into().unwrap()) * 512
    };
    assert_eq!(size(&mut host), SIZE);
    volume.path.resize(SIZE / 2);
    frontend.follow();
    assert_eq!(size(&mut host), SIZE / 2);
    drop((host, frontend));
    let other = serve_nvme(&volume, OTHER);
    let refused = Host::admin(at(&other), HostOptions::default(), &subsystem).err().unwrap();
    assert_eq!(refused.status, 0x182, "there is no such subsystem");
    eventually("the socket is free", || {
        Host::admin(at(&other), HostOptions::default(), &other.subsystem()).is_ok()
    });
}

/// Whether a host may use the volume on a path: how often that has changed, and what it is (1 optimized, 3 inaccessible).
fn access(host: &mut Host) -> (u64, u8) {
    let log = host.admin.run(&Command::log(0x0c, 0, 52)).ok().data;
    assert_eq!((log[8], log[16], log[20], log[48]), (1, 1, 1, 1), "one group, of one namespace");
    (u64::from_le_bytes(log[..8].try_into().unwrap()), log[32])
}

fn is_refused(host: &mut Host) {
    let done = host.queues[0].run(&Command::write(0, vec![9; 4096]));
    // Related to the path: the host tries another.
    assert_eq!((done.status, done.no_retry), (0x302, false));
}

/// As with two addresses of a controller, which a host knows as two paths.
#[test]
fn a_second_path_takes_over_when_nothing_is_left_of_the_first() {
    let volume = Volume::new(options(2));
    let replica = Fake::new(SIZE as usize);
    volume.add(1, &replica.address(), Mode::Rw);
    let listen = ["tcp:127.0.0.1:0", "tcp:127.0.0.2:0"].map(|address| address.parse().unwrap());
    let nvme = NvmeOptions::at(&listen);
    let frontend = NvmeFrontend::start(&volume.path, "vol", UUID, &nvme).unwrap();
    let ats = frontend.addresses().iter().map(|listen| match listen {
        Listen::Tcp(host, port) => SocketAddr::new(host.parse().unwrap(), *port),
        other => panic!("{other}"),
    });
    let ats: Vec<_> = ats.collect();
    let host = |at| Host::with(at, HostOptions::default(), &frontend.subsystem(), 1);
    let mut first = host(ats[0]);
    // As `nvme connect-all` has it: it looks what there is at an address as long as it connects there.
    let _looks = Host::admin(ats[1], HostOptions::default(), DISCOVERY).unwrap();
    let mut second = host(ats[1]);
    assert_ne!(first.controller, second.controller);
    let [one, other] = [&mut first, &mut second].map(|path| {
        let controller = path.admin.run(&Command::identify(1, 0)).ok().data;
        let namespace = path.admin.run(&Command::identify(0, 1)).ok().data;
        assert_eq!((controller[76], controller[93] & 1 << 3), (0x0b, 1 << 3));
        assert_eq!((namespace[30], namespace[92]), (1, 1));
        let names = path.admin.run(&Command::identify(3, 1)).ok().data;
        (controller[4..72].to_vec(), namespace, names)
    });
    assert!(one == other, "both are the same disk");
    assert_eq!((access(&mut first), access(&mut second)), ((0, 1), (0, 3)));
    is_refused(&mut second);
    second.admin.run(&Command::new(SET, 0).dword(10, 0x0b).dword(11, 1 << 11)).ok();
    let event = second.admin.submit(&Command::new(EVENT, 0));
    first.queues[0].run(&Command::write(0, vec![1; 4096])).ok();
    // It goes with a write under way.
    replica.behave(|header| match header.kind() {
        Some(Type::Write) => Do::AtGate,
        _ => Do::Serve,
    });
    let before = replica.seen(Type::Write).len();
    first.queues[0].submit(&Command::write(0, vec![2; 4096]));
    eventually("the write is under way", || replica.seen(Type::Write).len() > before);
    drop(first);
    for _ in 0..200 {
        assert_eq!(access(&mut second), (0, 3));
        is_refused(&mut second);
    }
    replica.behave(|_| Do::Serve);
    replica.open_gate();
    assert_eq!(second.admin.wait(event).ok().result, 0x0c_03_02);
    assert_eq!(access(&mut second), (1, 1));
    second.queues[0].run(&Command::write(0, vec![3; 4096])).ok();
    assert!(replica.content()[..4096] == [3; 4096]);
    // The first comes again, as the one that is not used.
    let mut first = host(ats[0]);
    assert_eq!(access(&mut first), (0, 3));
    is_refused(&mut first);
    drop(first);
    // To come again on the path that is used is to wait for its end, and another host is let in on no path.
    let subsystem = &frontend.subsystem();
    std::thread::scope(|scope| {
        for (at, name) in [(ats[1], HOST), (ats[0], "nqn.other")] {
            scope.spawn(move || {
                let refused = Host::named(at, HostOptions::default(), (name, subsystem));
                let refused = refused.err().unwrap();
                assert_eq!((refused.status, refused.no_retry), (BUSY, false), "{name}");
            });
        }
    });
    second.queues[0].run(&Command::write(0, vec![4; 4096])).ok();
}
