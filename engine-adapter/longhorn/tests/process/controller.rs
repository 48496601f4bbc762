//! `longhorn controller` as a process over replicas that are processes.

use crate::PROGRAM;
use crate::support::*;
use dbs_frontend::Listen;
use longhorn_testing::DataClient;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};

/// Ports of a replica that are to be free: gRPC, data, sync agent, and two receivers.
const PORTS: u16 = 5;
pub const TEXT_SIZE: &str = "67108864";
const BLOCKS: u64 = 500;

/// The first of some ports in a row that are free now.
pub fn free_ports() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 10_000).unwrap();
    loop {
        let next = NEXT.fetch_add(PORTS, Ordering::Relaxed);
        let first = 20_000 + start.wrapping_add(next) % 10_000;
        let all = (first..first + PORTS).map(|port| TcpListener::bind(("127.0.0.1", port)));
        if all.collect::<Result<Vec<_>, _>>().is_ok() {
            return first;
        }
    }
}

/// A replica, and its address.
pub fn replica(place: &Place, name: &str) -> (Process, String) {
    replica_with(place, name, &[])
}

/// The same with further arguments.
pub fn replica_with(place: &Place, name: &str, further: &[&str]) -> (Process, String) {
    let port = free_ports();
    let listen = format!("127.0.0.1:{port}");
    let count = (PORTS - 3).to_string();
    let more = ["--size", TEXT_SIZE, "--disableRevCounter", "--listen", &listen];
    let more = [&more[..], &["--sync-agent-port-count", &count], further].concat();
    (place.start(name, &more), format!("tcp://{listen}"))
}

pub fn controller(place: &Place, replicas: &[&str], more: &[&str]) -> Process {
    controller_with(place, "socket", replicas, more)
}

pub fn controller_with(place: &Place, frontend: &str, replicas: &[&str], more: &[&str]) -> Process {
    Process::spawn(command_of(place, frontend, replicas, more))
}

/// The command that starts a controller.
pub fn command_of(place: &Place, frontend: &str, replicas: &[&str], more: &[&str]) -> Command {
    let mut command = place.program();
    command.args(["controller", "vol", "--frontend", frontend, "--disableRevCounter"]);
    command.args(["--size", TEXT_SIZE, "--current-size", TEXT_SIZE, "--listen", "127.0.0.1:0"]);
    // Nobody waits for one that is silent here, and a machine that stalls is no fault of a replica.
    command.args(["--replica-timeout-ms", "60000"]);
    command.arg("--socket-dir").arg(place.path());
    for replica in replicas {
        command.args(["--replica", replica]);
    }
    command.args(more);
    command
}

pub fn client(place: &Place) -> DataClient {
    let socket: PathBuf = place.path().join("longhorn-vol.sock");
    DataClient::connect(&Listen::Unix(socket), 1).unwrap()
}

/// Our command line against a controller.
pub fn run(controller: &Process, args: &[&str]) -> String {
    let url = format!("http://{}", controller.field("grpc"));
    let mut command = Command::new(PROGRAM);
    let output = command.args(["--url", &url, "--volume-name", "vol"]).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

pub fn write(client: &DataClient, version: u64) {
    for number in 0..BLOCKS {
        client.write(number * BLOCK as u64, &block(number, version)).unwrap();
    }
}

pub fn check(client: &DataClient, version: u64) {
    for number in 0..BLOCKS {
        let content = client.read(number * BLOCK as u64, BLOCK as u32).unwrap();
        assert_eq!(version_of(&content, number), Some(version), "block {number}");
    }
}

pub fn modes(controller: &Process) -> Vec<String> {
    modes_with(controller, &[])
}

/// The same with further arguments.
pub fn modes_with(controller: &Process, further: &[&str]) -> Vec<String> {
    let listed = run(controller, &[further, &["ls-replica"]].concat());
    let mode = |line: &str| line.split_whitespace().nth(1).map(str::to_owned);
    listed.lines().skip(1).filter_map(mode).collect()
}

/// A replica dies, another one takes its place, and in the end holds everything alone.
#[test]
fn a_volume_outlives_its_replicas() {
    let place = Place::new();
    let (mut a, a_address) = replica(&place, "a");
    let (mut b, b_address) = replica(&place, "b");
    let mut engine = controller(&place, &[&a_address, &b_address], &[]).ready();
    let data = client(&place);
    write(&data, 1);
    assert_eq!(run(&engine, &["snapshots", "create", "one"]).trim(), "one");
    a.kill();
    write(&data, 2);
    check(&data, 2);
    assert_eq!(modes(&engine), ["ERR", "RW"]);
    run(&engine, &["rm-replica", &a_address]);
    let (_c, c_address) = replica(&place, "c");
    run(&engine, &["add-replica", &c_address, "--size", TEXT_SIZE, "--current-size", TEXT_SIZE]);
    assert_eq!(modes(&engine), ["RW", "RW"]);
    write(&data, 3);
    b.kill();
    check(&data, 3);
    // What only a client's closed connection or a ping tells is told by now, or with the next one.
    eventually("the loss shows", || modes(&engine) == ["ERR", "RW"]);
    drop(data);
    engine.stop();
    let mut engine = controller(&place, &[&c_address], &[]).ready();
    check(&client(&place), 3);
    run(&engine, &["frontend", "shutdown"]);
    run(&engine, &["snapshots", "revert", "one"]);
    run(&engine, &["frontend", "start", "socket"]);
    check(&client(&place), 1);
    engine.stop();
}

/// By the exit code Longhorn tells whether another attempt may help.
#[test]
fn the_exit_code_says_why_it_does_not_start() {
    let place = Place::new();
    let nobody = format!("tcp://127.0.0.1:{}", free_ports());
    let mut engine = controller(&place, &[&nobody], &[]);
    assert_eq!(engine.wait().code(), Some(1));
    assert!(engine.log().contains("due to service unavailable"), "{}", engine.log());
    let (open, address) = replica(&place, "open");
    let _data = open.open();
    let mut engine = controller(&place, &[&address], &[]);
    assert_eq!(engine.wait().code(), Some(61));
    assert!(engine.log().contains("due to replica error"), "{}", engine.log());
    let mut engine = controller(&place, &[&nobody], &["--frontend", "tgt-blockdev"]);
    assert_eq!(engine.wait().code(), Some(1));
}

/// What is in front of the replicas alone: reads give zeros.
#[test]
fn a_null_backend_needs_no_replicas() {
    let place = Place::new();
    let mut engine = controller(&place, &[], &["--null-backend"]).ready();
    let data = client(&place);
    write(&data, 1);
    assert_eq!(data.read(0, BLOCK as u32).unwrap(), [0; BLOCK]);
    assert!(data.read(1 << 26, 1).is_err());
    engine.stop();
}
