//! The frontends `vhost-user` and `nvme-tcp` of a controller that is killed, replaced, or started with other replicas.

use crate::controller::*;
use crate::host::{Command as Ask, Host, Options as HostOptions};
use crate::support::*;
use dbs_guest::{Guest, Options, Request};
use nix::sys::signal::Signal;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

const QUEUES: u16 = 2;
/// Requests under way of each queue, each of a block of its own.
const DEPTH: u64 = 48;
const NAMES: [&str; 3] = ["a", "b", "c"];

fn info(engine: &Process, field: &str) -> String {
    let info: serde_json::Value = serde_json::from_str(&run(engine, &["info"])).unwrap();
    info[field].as_str().unwrap().to_owned()
}

/// Replicas with these names, and a controller over them.
struct Volume {
    place: Place,
    frontend: &'static str,
    more: &'static [&'static str],
    replicas: Vec<(Process, String)>,
    engine: Process,
}

impl Volume {
    fn new(frontend: &'static str) -> Self {
        Self::with(frontend, &["--reactors", "2"])
    }

    fn with(frontend: &'static str, more: &'static [&'static str]) -> Self {
        let place = Place::new();
        let (replicas, engine) = Self::start(&place, frontend, more, &NAMES);
        Self { place, frontend, more, replicas, engine: engine.ready() }
    }

    fn start(
        place: &Place,
        frontend: &str,
        more: &[&str],
        names: &[&str],
    ) -> (Vec<(Process, String)>, Process) {
        let replicas: Vec<_> = names.iter().map(|name| replica(place, name)).collect();
        let addresses: Vec<&str> = replicas.iter().map(|(_, address)| address.as_str()).collect();
        let engine = controller_with(place, frontend, &addresses, more);
        (replicas, engine)
    }

    /// All processes are killed, and those of these replicas and a controller started.
    fn again(&mut self, names: &[&str]) {
        self.kill();
        self.start_again(names);
        self.engine.wait_for("event=ready");
    }

    fn kill(&mut self) {
        self.engine.kill();
        self.replicas.iter_mut().for_each(|(replica, _)| replica.kill());
    }

    fn start_again(&mut self, names: &[&str]) {
        (self.replicas, self.engine) = Self::start(&self.place, self.frontend, self.more, names);
    }

    fn socket(&self) -> PathBuf {
        info(&self.engine, "endpoint").into()
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.place.path().join("longhorn")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Stops a process, all threads of it: until one of them has seen the signal, the others go on.
fn halt(process: &Process) {
    process.signal(Signal::SIGSTOP);
    let tasks = format!("/proc/{}/task", process.pid());
    let is_stopped = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // Behind the name, which may hold anything.
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    };
    eventually("it is stopped", || {
        fs::read_dir(&tasks).unwrap().all(|task| is_stopped(task.unwrap()))
    });
}

/// The blocks of a queue.
fn blocks(queue: u64) -> std::ops::Range<u64> {
    queue * DEPTH..(queue + 1) * DEPTH
}

/// Begins a write of each block.
fn begin(guest: &mut Guest, version: u64) {
    for (queue, index) in guest.queues.iter_mut().zip(0..) {
        for number in blocks(index) {
            queue.add(&Request::write(number * BLOCK as u64, block(number, version)));
        }
        queue.tell();
    }
}

/// Waits for the answers to all that is under way, which must be good.
fn finish(guest: &mut Guest) {
    for queue in &mut guest.queues {
        for _ in 0..DEPTH {
            assert!(queue.wait(TIMEOUT), "no answer");
            let (head, _) = queue.take().unwrap();
            assert_eq!(queue.end(head).1, 0);
        }
    }
}

fn check(guest: &mut Guest, version: u64) {
    // Each replica is read from.
    for number in (0..NAMES.len() as u64).flat_map(|_| 0..DEPTH * u64::from(QUEUES)) {
        let queue = &mut guest.queues[(number % u64::from(QUEUES)) as usize];
        let (status, data) =
            queue.run(&Request::read(number * BLOCK as u64, BLOCK as u32)).unwrap();
        assert_eq!((status, version_of(&data, number)), (0, Some(version)), "block {number}");
    }
}

fn guest(socket: &std::path::Path) -> Guest {
    let options = Options { queues: QUEUES, data_bytes: BLOCK as u32, ..Options::default() };
    Guest::connect(socket, &options).unwrap()
}

#[test]
fn a_machine_goes_on_after_its_controller_was_killed() {
    let mut volume = Volume::new("vhost-user");
    let socket = volume.socket();
    assert_eq!(socket, volume.place.path().join("longhorn/vhost-vol.sock"));
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    assert_eq!(info(&volume.engine, "frontend"), "vhost-user");
    let mut guest = guest(&socket);
    for version in 1..4 {
        begin(&mut guest, 10 * version);
        finish(&mut guest);
        // With a replica that does nothing, no write is answered: all are under way when the controller ends.
        halt(&volume.replicas[2].0);
        begin(&mut guest, 10 * version + 1);
        for queue in 0..u64::from(QUEUES) {
            eventually("all are taken", || guest.noted(queue).unwrap().len() == DEPTH as usize);
        }
        volume.again(&NAMES);
        assert!(volume.engine.log().contains("event=taken_over"), "{}", volume.engine.log());
        guest.reconnect(&socket).unwrap();
        assert_eq!(guest.change(TIMEOUT).unwrap(), 2, "it may have another size by now");
        finish(&mut guest);
        check(&mut guest, 10 * version + 1);
        assert_eq!(modes(&volume.engine), ["RW"; 3]);
    }
    run(&volume.engine, &["expand", "--size", &(2 * SIZE).to_string()]);
    assert_eq!(guest.change(TIMEOUT).unwrap(), 2, "the configuration has changed");
    assert_eq!(guest.size().unwrap(), 2 * SIZE);
    volume.engine.stop();
}

/// Killed amid writes that are being answered: whatever was, is there.
#[test]
fn no_answered_write_is_lost_with_the_controller() {
    let mut volume = Volume::new("vhost-user");
    let socket = volume.socket();
    let mut guest = guest(&socket);
    for version in 1..4 {
        begin(&mut guest, version);
        let mut answered = 0;
        for queue in &mut guest.queues {
            assert!(queue.wait(TIMEOUT), "no answer");
        }
        volume.again(&NAMES);
        for queue in &mut guest.queues {
            while let Some((head, _)) = queue.take() {
                assert_eq!(queue.end(head).1, 0);
                answered += 1;
            }
        }
        guest.reconnect(&socket).unwrap();
        for queue in &mut guest.queues {
            while queue.free() < Options::default().places.into() {
                assert!(queue.wait(TIMEOUT), "no answer, after {answered}");
                let (head, _) = queue.take().unwrap();
                assert_eq!(queue.end(head).1, 0);
                answered += 1;
            }
        }
        assert_eq!(answered, DEPTH * u64::from(QUEUES), "each once");
        check(&mut guest, version);
    }
    volume.engine.stop();
}

#[test]
fn a_machine_is_refused_by_replicas_that_may_lack_what_it_wrote() {
    let mut volume = Volume::new("vhost-user");
    let socket = volume.socket();
    let mut known = guest(&socket);
    begin(&mut known, 1);
    finish(&mut known);
    volume.replicas[2].0.kill();
    begin(&mut known, 2);
    finish(&mut known);
    assert_eq!(modes(&volume.engine), ["RW", "RW", "ERR"]);
    volume.again(&["c"]);
    let told = volume.engine.wait_for("event=not-taken-over");
    assert!(told.contains("may have missed the last writes"), "{told}");
    assert!(known.reconnect(&socket).is_err());
    // To who knows nothing of it, it is a disk as any other.
    let mut new = guest(&socket);
    check(&mut new, 1);
    drop(new);
    // The others do not have what was done since.
    volume.again(&["a", "b"]);
    volume.engine.wait_for("event=not-taken-over");
    assert!(known.reconnect(&socket).is_err());
    volume.engine.stop();
}

#[test]
fn a_disk_ends_with_its_frontend() {
    let mut volume = Volume::new("vhost-user");
    let socket = volume.socket();
    let mut known = guest(&socket);
    begin(&mut known, 1);
    finish(&mut known);
    assert_eq!(volume.files(), ["ublk-vol.replicas", "vhost-user-vol.json", "vhost-vol.sock"]);
    run(&volume.engine, &["frontend", "shutdown"]);
    assert!(volume.files().is_empty(), "{:?}", volume.files());
    assert!(known.reconnect(&socket).is_err());
    run(&volume.engine, &["frontend", "start", "vhost-user"]);
    assert!(known.reconnect(&socket).is_err(), "it may have been reverted meanwhile");
    check(&mut guest(&socket), 1);
    volume.engine.stop();
    assert!(volume.files().is_empty(), "{:?}", volume.files());
}

/// Controllers of both: the newer one has the older one end, which leaves what is under way.
#[test]
fn a_newer_controller_takes_over_what_is_used() {
    for frontend in ["vhost-user", "nvme-tcp"] {
        let mut volume = Volume::new(frontend);
        let endpoint = info(&volume.engine, "endpoint");
        let mut guest = (frontend == "vhost-user").then(|| guest(&volume.socket()));
        if let Some(guest) = &mut guest {
            begin(guest, 1);
        }
        let newer: Vec<_> = NAMES
            .iter()
            .map(|name| volume.place.start(name, &["--disableRevCounter"]))
            .map(|process| (format!("tcp://{}", process.field("grpc")), process))
            .collect();
        let addresses: Vec<&str> = newer.iter().map(|(address, _)| address.as_str()).collect();
        let upgrade = ["--upgrade", "--reactors", "2"];
        let mut engine = controller_with(&volume.place, frontend, &addresses, &upgrade).ready();
        assert!(volume.engine.wait().success());
        assert!(engine.log().contains("event=taken_over"), "{}", engine.log());
        assert_eq!(info(&engine, "endpoint"), endpoint);
        if let Some(guest) = &mut guest {
            guest.reconnect(endpoint.as_ref()).unwrap();
            finish(guest);
            check(guest, 1);
        }
        engine.stop();
    }
}

/// The address and the subsystem of an endpoint.
fn parts(endpoint: &str) -> (SocketAddr, &str) {
    let (address, subsystem) = endpoint.strip_prefix("nvmf://").unwrap().split_once('/').unwrap();
    (address.parse().unwrap(), subsystem)
}

fn host(endpoint: &str) -> Host {
    let (address, subsystem) = parts(endpoint);
    Host::with(address, HostOptions::default(), subsystem, 1)
}

/// Who listens on its port is the disk for a host, which tries for long: a disk on another port would leave it to that.
#[test]
fn a_disk_does_not_move_to_another_port_than_its_hosts_know() {
    let mut volume = Volume::with("nvme-tcp", &["--nvme-listen", "tcp:0"]);
    let endpoint = info(&volume.engine, "endpoint");
    let files = volume.files();
    volume.kill();
    let mut taken = None;
    eventually("the port is taken", || {
        taken = TcpListener::bind(parts(&endpoint).0).ok();
        taken.is_some()
    });
    volume.start_again(&NAMES);
    assert_eq!(volume.engine.wait().code(), Some(1), "{}", volume.engine.log());
    assert!(volume.engine.log().contains("Address already in use"), "{}", volume.engine.log());
    assert_eq!(volume.files(), files, "its hosts wait on");
    drop(taken);
    volume.replicas.iter_mut().for_each(|(replica, _)| replica.kill());
    volume.start_again(&NAMES);
    volume.engine.wait_for("event=ready");
    assert!(volume.engine.log().contains("event=taken_over"), "{}", volume.engine.log());
    assert_eq!(info(&volume.engine, "endpoint"), endpoint);
    volume.engine.stop();
}

#[test]
fn a_host_goes_on_after_its_controller_was_killed() {
    let mut volume = Volume::new("nvme-tcp");
    let endpoint = info(&volume.engine, "endpoint");
    let write = |number: u64, version| Ask::write(number * BLOCK as u64, block(number, version));
    for version in 1..3 {
        let mut host = host(&endpoint);
        for number in 0..DEPTH {
            host.queues[0].run(&write(number, 10 * version)).ok();
        }
        halt(&volume.replicas[2].0);
        for number in 0..DEPTH / 2 {
            host.queues[0].submit(&write(number, 10 * version + 1));
        }
        volume.again(&NAMES);
        assert!(volume.engine.log().contains("event=taken_over"), "{}", volume.engine.log());
        assert_eq!(info(&volume.engine, "endpoint"), endpoint, "the port, too");
        // It asks for the same again.
        let mut host = self::host(&endpoint);
        for number in 0..DEPTH / 2 {
            host.queues[0].run(&write(number, 10 * version + 1)).ok();
        }
        for number in (0..3).flat_map(|_| 0..DEPTH) {
            let read = Ask::read(number * BLOCK as u64, BLOCK as u64);
            let data = host.queues[0].run(&read).ok().data;
            let expected = 10 * version + u64::from(number < DEPTH / 2);
            assert_eq!(version_of(&data, number), Some(expected), "block {number}");
        }
    }
    volume.replicas[2].0.kill();
    host(&endpoint).queues[0].run(&write(0, 99)).ok();
    volume.again(&["c"]);
    volume.engine.wait_for("event=not-taken-over");
    let other = info(&volume.engine, "endpoint");
    let ((address, subsystem), (port, other)) = (parts(&endpoint), parts(&other));
    assert!(other != subsystem && port == address, "{other} on {port}");
    // So it is told, and asks for it no more.
    let refused = Host::admin(address, HostOptions::default(), subsystem).err().unwrap();
    assert_eq!((refused.status, refused.no_retry), (0x182, true));
    volume.engine.stop();
}

/// A host has two paths, and the next controller listens where one of them leads.
#[test]
fn a_host_goes_on_where_the_next_controller_listens() {
    let free = TcpListener::bind("127.0.0.3:0").unwrap().local_addr().unwrap();
    let listen = format!("tcp:{free}").leak();
    let more = vec!["--nvme-listen", "tcp:127.0.0.2:0", "--nvme-listen", listen].leak();
    let mut volume = Volume::with("nvme-tcp", more);
    let endpoint = info(&volume.engine, "endpoint");
    let (_, subsystem) = parts(&endpoint);
    let mut first = host(&endpoint);
    let mut second = Host::with(free, HostOptions::default(), subsystem, 1);
    let write = |number: u64, version| Ask::write(number * BLOCK as u64, block(number, version));
    for number in 0..DEPTH {
        first.queues[0].run(&write(number, 10)).ok();
    }
    assert_eq!(second.queues[0].run(&write(0, 99)).status, 0x302, "the path is not used");
    halt(&volume.replicas[2].0);
    for number in 0..DEPTH / 2 {
        first.queues[0].submit(&write(number, 11));
    }
    volume.more = &more[2..];
    volume.again(&NAMES);
    assert!(volume.engine.log().contains("event=taken_over"), "{}", volume.engine.log());
    assert_eq!(info(&volume.engine, "endpoint"), format!("nvmf://{free}/{subsystem}"));
    let mut host = Host::with(free, HostOptions::default(), subsystem, 1);
    for number in 0..DEPTH / 2 {
        host.queues[0].run(&write(number, 11)).ok();
    }
    for number in (0..3).flat_map(|_| 0..DEPTH) {
        let read = Ask::read(number * BLOCK as u64, BLOCK as u64);
        let data = host.queues[0].run(&read).ok().data;
        let expected = 10 + u64::from(number < DEPTH / 2);
        assert_eq!(version_of(&data, number), Some(expected), "block {number}");
    }
    volume.engine.stop();
}

#[test]
fn a_host_of_another_machine_is_not_listened_for() {
    let place = Place::new();
    let more = ["--null-backend", "--nvme-listen", "tcp:0.0.0.0:0"];
    let mut engine = controller_with(&place, "nvme-tcp", &[], &more);
    assert_eq!(engine.wait().code(), Some(1));
    assert!(engine.log().contains("does not listen on tcp:0.0.0.0:0"), "{}", engine.log());
}
