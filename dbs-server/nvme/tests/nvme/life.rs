//! How hosts come, go, and learn of changes.

use super::host::{Command, DISCOVERY, EVENT, HOST, Host, Options, Queue, SET};
use super::{Place, SIZE, options};
use dbs_core::SnapshotOptions;
use dbs_core::info::{HolderKind, VolumeLimits};
use dbs_frontend::DiskOptions;
use dbs_nvme::{NvmeOptions, NvmeTcp};
use dbs_reactor::Driver;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const BUSY: u16 = 0x181;
const PARAMETERS: u16 = 0x182;

fn refused(place: &Place, command: &Command) -> (u16, u64) {
    let mut queue = Queue::raw(super::host::Wire::new(place.address(), Options::default()), 0);
    let done = queue.run(command);
    assert!(queue.wire.next().is_none(), "the connection ends");
    (done.status, done.result)
}

#[test]
fn what_a_host_may_not_connect_to_is_told_by_the_field_that_is_wrong() {
    let place = Place::new();
    place.store.create_volume("hidden", SIZE).unwrap();
    place.nvme.follow();
    let (v, o) = (place.subsystem("v"), Options::default());
    let mut host = Host::admin(place.address(), o, &v).unwrap();
    let number = host.controller;
    let connect = |host: &str, subsystem: &str, queue: u16, controller: u16| {
        Command::connect(host, subsystem, queue, controller, o)
    };
    let unknown = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000000";
    let edit = |at: usize, byte: u8| {
        let mut command = connect(HOST, &v, 0, 0xffff);
        command.entry[at] = byte;
        command
    };
    let (data, long) = (1 << 16, format!("nqn.{}", "x".repeat(220)));
    for (command, status, result) in [
        (connect(HOST, unknown, 0, 0xffff), PARAMETERS, data | 256),
        (connect(HOST, "nqn.v", 0, 0xffff), PARAMETERS, data | 256),
        (connect(HOST, &place.subsystem("hidden"), 0, 0xffff), PARAMETERS, data | 256),
        (connect(HOST, "", 0, 0xffff), PARAMETERS, data | 256),
        (connect("", &v, 0, 0xffff), PARAMETERS, data | 512),
        (connect("host", &v, 0, 0xffff), PARAMETERS, data | 512),
        (connect("nqn.a\nb", &v, 0, 0xffff), PARAMETERS, data | 512),
        (connect(&long, &v, 0, 0xffff), PARAMETERS, data | 512),
        (connect(HOST, &v, 0, 1), PARAMETERS, data | 16),
        (connect(HOST, &v, 1, 0xffff), PARAMETERS, data | 16),
        (connect(HOST, &v, 1, 0), PARAMETERS, data | 16),
        (connect(HOST, &v, 1, 0xfff0), PARAMETERS, data | 16),
        (connect(HOST, DISCOVERY, 1, number), PARAMETERS, data | 256),
        (connect("nqn.other", &v, 1, number), 0x184, 0),
        (connect(HOST, &v, 5, number), PARAMETERS, 42),
        (connect(HOST, &v, 65, number), PARAMETERS, 42),
        (edit(40, 1), 0x180, 0),
        (edit(44, 0), PARAMETERS, 44),
        (edit(44, 128), PARAMETERS, 44),
        (edit(4, 4), 0x0c, 0),
        (Command { out: vec![0; 512], ..connect(HOST, &v, 0, 0xffff) }, 0x0f, 0),
    ] {
        assert_eq!(refused(&place, &command), (status, result), "{command:?}");
    }
    // A queue that is connected, and one of a controller that is not enabled.
    let queue = |place: &Place, number| {
        Queue::connect(place.address(), o, (HOST, &v), (1, number)).map_err(|done| done.status)
    };
    let first = queue(&place, number);
    assert_eq!(queue(&place, number).err(), Some(0x0c));
    host.admin.run(&Command::property_set(0x14, 0x0046_0000)).ok();
    assert!(first.unwrap().0.wire.next().is_none(), "it ends with a reset");
    assert_eq!(queue(&place, number).err(), Some(0x0c));
    // The admin queue is still there, and may begin anew.
    assert_eq!(host.admin.run(&Command::property_get(0x1c, false)).ok().result, 0);
    assert_eq!(host.admin.run(&Command::identify(1, 0)).status, 0x0c);
    host.admin.run(&Command::property_set(0x14, 0x0046_0001)).ok();
    loop {
        // Its place is free once the reactor has seen it go.
        match queue(&place, number) {
            Ok((mut queue, _)) => break drop(queue.run(&Command::read(0, 4096)).ok()),
            Err(status) => assert_eq!(status, BUSY),
        }
    }
}

#[test]
fn a_queue_that_comes_too_late_may_try_again() {
    let place = Place::new();
    let (v, o) = (place.subsystem("v"), Options::default());
    let mut numbers = Vec::new();
    for _ in 0..3 {
        let host = Host::admin(place.address(), o, &v).unwrap();
        let id = place.nvme.clients()[0].id;
        assert!(place.nvme.kick(id));
        // Linux gives the disk up where it is told not to retry.
        let late = Queue::connect(place.address(), o, (HOST, &v), (1, host.controller));
        let late = late.err().unwrap();
        assert_eq!((late.status, late.no_retry), (BUSY, false));
        numbers.push(host.controller);
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 3, "each has a number of its own");
}

#[test]
fn a_volume_has_one_host_and_is_held_for_it() {
    let place = Place::new();
    place.store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    place.nvme.follow();
    let mut host = Host::with(place.address(), Options::default(), &place.subsystem("v"), 3);
    let holders = place.store.holders();
    assert_eq!((holders.len(), holders[0].holder.kind), (1, HolderKind::NvmeTcp));
    assert!(holders[0].holder.alone && holders[0].holder.writes);
    assert!(holders[0].holder.who.contains(HOST), "{:?}", holders[0]);
    assert!(place.store.rollback("v", "s").is_err());
    let second = Host::admin(place.address(), Options::default(), &place.subsystem("v"));
    let second = second.err().unwrap();
    assert_eq!((second.status, second.no_retry), (BUSY, false));
    // Others may read the snapshot.
    let mut reader = Host::with(place.address(), Options::default(), &place.subsystem("v@s"), 1);
    reader.queues[0].run(&Command::read(0, 4096)).ok();
    assert_ne!(reader.controller, host.controller);
    host.queues[0].run(&Command::write(0, vec![1; 4096])).ok();
    // Who loses an I/O queue loses all, but may say goodbye.
    drop(host.queues.pop());
    for queue in &mut host.queues {
        assert!(queue.wire.next().is_none());
    }
    host.admin.run(&Command::property_set(0x14, 0x0046_4001)).ok();
    assert_eq!(host.admin.run(&Command::property_get(0x1c, false)).ok().result, 1 | 2 << 2);
    // And may come again at once.
    drop(host);
    let mut again = place.host(Options::default());
    again.queues[0].run(&Command::read(0, 4096)).ok();
    let id = place.nvme.clients().into_iter().find(|client| !client.read_only).unwrap().id;
    assert!(place.nvme.kick(id));
    assert!(!place.nvme.kick(id));
    assert!(again.queues[0].wire.next().is_none() && again.admin.wire.next().is_none());
    drop(reader);
    while !place.nvme.clients().is_empty() {
        std::thread::yield_now();
    }
}

#[test]
fn a_host_gets_no_other_volume_that_takes_the_name() {
    let place = Place::new();
    place.store.create_volume("w", SIZE).unwrap();
    let (store, armed) = (place.store.clone(), Arc::new(AtomicBool::new(true)));
    let options = DiskOptions {
        // It is asked when a host comes.
        access: Box::new(move |_, _| {
            if armed.swap(false, Ordering::SeqCst) {
                store.rename_volume("v", "x").unwrap();
                store.rename_volume("w", "v").unwrap();
            }
            Some(false)
        }),
        ..options(Driver::Auto)
    };
    let subsystem = place.subsystem("v");
    let nvme = NvmeTcp::start(place.store.clone(), &super::loopback(), options).unwrap();
    let dbs_frontend::Listen::Tcp(host, port) = &nvme.addresses()[0] else { panic!("no TCP") };
    let address = SocketAddr::new(host.parse().unwrap(), *port);
    let refused = Host::admin(address, Options::default(), &subsystem).err().unwrap();
    assert_eq!((refused.status, refused.no_retry), (BUSY, false));
    // It comes again, and gets its own by the new name.
    nvme.follow();
    let host = Host::admin(address, Options::default(), &subsystem).unwrap();
    assert_eq!(place.store.holders()[0].volume, "x");
    drop(host);
}

#[test]
fn a_host_is_told_of_a_new_size_once() {
    let place = Place::new();
    let mut host = place.host(Options::default());
    let event = host.admin.submit(&Command::new(EVENT, 0));
    let waits: Vec<u16> = (0..3).map(|_| host.admin.submit(&Command::new(EVENT, 0))).collect();
    assert_eq!(host.admin.run(&Command::new(EVENT, 0)).status, 0x105);
    host.admin.run(&Command::new(SET, 0).dword(10, 0x0b).dword(11, 1 << 8)).ok();
    place.nvme.follow();
    place.store.resize_volume("v", 2 * SIZE).unwrap();
    place.nvme.follow();
    assert_eq!(host.admin.wait(event).ok().result, 0x04_00_02);
    let size = |host: &mut Host| {
        let data = host.admin.run(&Command::identify(0, 1)).ok().data;
        u64::from_le_bytes(data[..8].try_into().unwrap()) * 512
    };
    assert_eq!(size(&mut host), 2 * SIZE);
    host.queues[0].run(&Command::write(SIZE, vec![1; 4096])).ok();
    // Not again before it has looked.
    place.store.resize_volume("v", 3 * SIZE).unwrap();
    place.nvme.follow();
    let log = host.admin.run(&Command::log(4, 0, 4096)).ok().data;
    assert_eq!(log[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(host.admin.wait(waits[0]).ok().result, 0x04_00_02);
    assert_eq!(size(&mut host), 3 * SIZE);
    host.admin.run(&Command::log(4, 0, 4096)).ok();
    assert_eq!(host.admin.run(&Command::log(4, 0, 4096)).ok().data, vec![0; 4096]);
}

#[test]
fn discovery_tells_of_volumes_that_come_and_go() {
    let place = Place::new();
    let mut host = Host::admin(place.address(), Options::default(), DISCOVERY).unwrap();
    host.admin.run(&Command::new(SET, 0).dword(10, 0x0b).dword(11, 1 << 31)).ok();
    let records = |host: &mut Host| {
        let log = host.admin.run(&Command::log(0x70, 0, 1024)).ok().data;
        u64::from_le_bytes(log[8..16].try_into().unwrap())
    };
    assert_eq!(records(&mut host), 1);
    for expected in [2, 1] {
        let event = host.admin.submit(&Command::new(EVENT, 0));
        if expected == 2 {
            place.store.create_volume("w", SIZE).unwrap();
        } else {
            place.store.delete_volume("w").unwrap();
        }
        place.nvme.follow();
        assert_eq!(host.admin.wait(event).ok().result, 0x70_f0_02);
        assert_eq!(records(&mut host), expected);
    }
}

#[test]
fn a_silent_host_is_let_go() {
    let place = Place::new();
    let options = Options { keep_alive_ms: 1, ..Options::default() };
    let mut host = place.host(options);
    assert!(host.queues[0].wire.next().is_none());
    assert!(host.admin.wire.next().is_none());
}

#[test]
fn what_a_limit_delays_holds_up_neither_the_next_host_nor_the_server() {
    let place = Place::new();
    let limits = VolumeLimits { bandwidth: 4096, ..VolumeLimits::default() };
    place.store.set_limits("v", limits).unwrap();
    let mut host = place.host(Options::default());
    // More than a quarter of an hour's worth.
    host.queues[0].run(&Command::write(0, vec![1; 1 << 20])).ok();
    for block in 0..8 {
        host.queues[0].submit(&Command::write(4096 * block, vec![2; 4096]));
    }
    drop(host);
    while !place.nvme.clients().is_empty() {
        std::thread::yield_now();
    }
    // What was delayed is not done any more.
    place.store.set_limits("v", VolumeLimits::default()).unwrap();
    let mut host = place.host(Options::default());
    assert!(host.queues[0].run(&Command::read(0, 32768)).ok().data == vec![1; 32768]);
    place.store.set_limits("v", limits).unwrap();
    host.queues[0].run(&Command::write(0, vec![1; 1 << 20])).ok();
    host.queues[0].submit(&Command::write(0, vec![2; 4096]));
    place.nvme.stop();
    assert!(place.store.holders().is_empty());
}

#[test]
fn a_server_that_stops_answers_what_is_under_way_and_lets_go() {
    let place = Place::new();
    let mut host = place.host(Options::default());
    host.admin.submit(&Command::new(EVENT, 0));
    // Of these some are answered, and the last waits for its data for ever.
    let writes: Vec<u16> = (0..50)
        .map(|at| host.queues[0].submit(&Command::write(at * 4096, vec![1; 4096])))
        .collect();
    let answered = host.queues[0].wait(writes[0]).ok();
    assert_eq!(answered.result, 0);
    let asked = host.queues[0].submit(&Command::write(0, vec![2; 65536]));
    place.nvme.stop();
    assert!(place.store.holders().is_empty());
    while let Some(pdu) = host.queues[0].wire.next() {
        assert!(pdu.kind != 5 || pdu.u16(20) != asked);
    }
    assert_eq!(place.content(0, 4096), vec![1; 4096]);
    let refused = std::net::TcpStream::connect(place.address());
    assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn it_listens_on_loopback_alone() {
    let place = Place::new();
    for listen in ["tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:192.0.2.1:0", "unix:/nowhere"] {
        let address = NvmeOptions::at(&[listen.parse().unwrap()]);
        let started = NvmeTcp::start(place.store.clone(), &address, options(Driver::Auto));
        let error = started.err().unwrap().to_string();
        let reason = if listen.starts_with("unix") { "loopback" } else { "authentication" };
        assert!(error.contains(reason) && error.contains(listen), "{error}");
    }
}
