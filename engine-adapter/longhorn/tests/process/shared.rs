//! `longhorn serve`: replicas in one store, each with a process of its own that keeps its sockets' place.

use crate::support::*;
use dbs_client::remote::RemoteStore;
use dbs_control::api::Request;
use dbs_control::{Client, socket_path, store_key};
use dbs_core::info::VolumeInfo;
use dbs_core::{ErrorKind, InitOptions, OpenOptions, Result, Store};
use dbs_frontend::Listen;
use dbs_server::serve::{ServeOptions, Serving};
use dbs_transfer::StoreAccess;
use longhorn_testing::DataClient;
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Output;
use std::time::Duration;

const BLOCKS: u64 = 64;

/// A store that many replicas share.
struct Shared {
    place: Place,
    store: PathBuf,
}

impl Shared {
    fn new() -> Self {
        let place = Place::new();
        let store = place.path().join("store.dbs");
        let options = InitOptions { size: Some(8 << 30), ..InitOptions::default() };
        Store::init(&store, &options).unwrap();
        Self { place, store }
    }

    fn serve(&self) -> Process {
        let mut command = self.place.program();
        command.arg("serve").arg("--store").arg(&self.store);
        command.args(["--replica-check", "200ms", "--metrics", "127.0.0.1:0"]);
        Process::spawn(command).ready()
    }

    fn start(&self, name: &str, more: &[&str]) -> Process {
        self.start_with(name, more).ready()
    }

    fn start_with(&self, name: &str, more: &[&str]) -> Process {
        let store = self.store.to_str().unwrap();
        self.place.start_with(name, &[&["--store", store], more].concat())
    }

    /// The name of the volume of a replica.
    fn volume(&self, name: &str) -> String {
        format!("longhorn:{}", self.place.replica(name).display())
    }

    /// Names of all volumes.
    fn volumes(&self) -> Vec<String> {
        let list =
            self.remote().call(&Request::VolumeList { usage: false }, &mut |_| true).unwrap();
        let names = list.as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap().to_owned());
        names.collect()
    }

    fn info(&self, volume: &str) -> Result<VolumeInfo> {
        self.remote().volume_info(volume)
    }

    fn socket(&self) -> PathBuf {
        socket_path(&self.place.runtime_dir(), &store_key(&self.store).unwrap())
    }

    /// The store, through its server.
    fn remote(&self) -> RemoteStore {
        RemoteStore::connect(&self.socket(), &store_key(&self.store).unwrap()).unwrap()
    }

    fn control(&self) -> Client {
        Client::connect(&self.socket()).unwrap()
    }
}

fn write(data: &DataClient, version: u64) {
    for number in 0..BLOCKS {
        data.write(number * BLOCK as u64, &block(number, version)).unwrap();
    }
}

fn check(data: &DataClient, version: u64) {
    for number in 0..BLOCKS {
        let content = data.read(number * BLOCK as u64, BLOCK as u32).unwrap();
        assert_eq!(version_of(&content, number), Some(version), "block {number}");
    }
}

#[test]
fn many_replicas_share_a_store_and_outlive_everybody() {
    let shared = Shared::new();
    let mut server = shared.serve();
    let names = ["a", "b", "c"];
    let mut replicas: Vec<_> =
        names.iter().map(|name| shared.start(name, &["--size", "64mb"])).collect();
    for (version, replica) in (1..).zip(&replicas) {
        let data = replica.open();
        write(&data, version);
        replica.rpc().snapshot("s1").unwrap();
    }
    let volume = shared.volume("a");
    assert!(shared.volumes().contains(&volume));
    let delete = Request::VolumeDelete { volume, uuid: None, rebuilding: false };
    let refused = shared.remote().call(&delete, &mut |_| true).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    assert!(refused.to_string().contains("through its engine"), "{refused}");

    // One ends in order, one is killed: theirs is over at once, the other's is not.
    let mut c = replicas.pop().unwrap();
    let mut b = replicas.pop().unwrap();
    let (b_address, c_address) = (b.field("grpc"), c.field("grpc"));
    b.stop();
    c.kill();
    assert!(TcpStream::connect(&b_address).is_err());
    eventually("the killed one's sockets close", || TcpStream::connect(&c_address).is_err());
    check(&replicas[0].data(), 1);
    for (name, version) in [("b", 2), ("c", 3)] {
        let replica = shared.start(name, &["--size", "64mb"]);
        check(&replica.open(), version);
    }

    // The server goes, and whoever was served by it says so and can be started again.
    server.stop();
    let mut a = replicas.pop().unwrap();
    assert!(!a.wait().success(), "{}", a.log());
    let mut early = shared.start_with("a", &[]);
    assert!(!early.wait().success());
    assert!(early.log().contains("longhorn serve"), "{}", early.log());
    let mut server = shared.serve();
    let mut a = shared.start("a", &[]);
    let data = a.open();
    check(&data, 1);
    write(&data, 7);
    // As does one that is killed.
    server.kill();
    assert!(!a.wait().success());
    let _server = shared.serve();
    let a = shared.start("a", &[]);
    check(&a.open(), 7);
}

/// `longhorn controller` over replicas that live in one store, steered by `longhorn`.
#[test]
fn a_controller_is_steered_over_replicas_of_one_store() {
    let shared = Shared::new();
    let mut server = shared.serve();
    let replicas: Vec<Process> = ["a", "b"]
        .iter()
        .map(|name| shared.start(name, &["--size", "64mb", "--disableRevCounter"]))
        .collect();
    let mut addresses = replicas.iter().map(|its| format!("tcp://{}", its.field("grpc")));
    let (a, b) = (addresses.next().unwrap(), addresses.next().unwrap());
    let controller = |replicas: &[&str]| {
        let mut command = shared.place.program();
        command.args(["controller", "vol", "--frontend", "socket", "--disableRevCounter"]);
        command.args(["--size", "64mb", "--current-size", "64mb", "--listen", "127.0.0.1:0"]);
        command.args(["--replica-timeout-ms", "60000", "--socket-dir"]).arg(shared.place.path());
        for replica in replicas {
            command.args(["--replica", replica]);
        }
        Process::spawn(command)
    };
    let mut engine = controller(&[&a]).ready();
    let url = format!("http://{}", engine.field("grpc"));
    let steer = |args: &[&str]| -> Output {
        let mut command = shared.place.program();
        command.args(["--url", &url, "--volume-name", "vol"]).args(args).output().unwrap()
    };
    let told = |args: &[&str]| {
        let output = steer(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    };
    let socket = shared.place.path().join("longhorn-vol.sock");
    let data = DataClient::connect(&Listen::Unix(socket), 1).unwrap();
    write(&data, 1);
    assert_eq!(told(&["snapshots", "create", "one"]).trim(), "one");
    told(&["add-replica", &b, "--size", "67108864", "--current-size", "67108864"]);
    write(&data, 2);
    let listed = told(&["ls-replica"]);
    let complete = |line: &&str| line.split_whitespace().nth(1) == Some("RW");
    assert_eq!(listed.lines().filter(complete).count(), 2, "{listed}");
    told(&["rm-replica", &a]);
    check(&data, 2);
    let refused = steer(&["snapshots", "revert", "none"]);
    assert_eq!(refused.status.code(), Some(1), "{}", String::from_utf8_lossy(&refused.stderr));
    drop(data);
    engine.stop();
    // Nobody is there.
    let mut engine = controller(&["tcp://127.0.0.1:1"]);
    assert_eq!(engine.wait().code(), Some(1), "{}", engine.log());
    assert!(engine.log().contains("event=replica-refused"), "{}", engine.log());
    // Somebody is who does not fit: no rebuild has filled it, or it counts its changes.
    let counting = shared.start("c", &["--size", "64mb"]);
    let mut engine = controller(&[&format!("tcp://{}", counting.field("grpc"))]);
    assert_eq!(engine.wait().code(), Some(61), "{}", engine.log());
    assert!(engine.log().contains("it counts revisions"), "{}", engine.log());
    server.stop();
}

#[test]
fn a_newer_process_of_a_replica_takes_its_volume_over() {
    let shared = Shared::new();
    let server = shared.serve();
    let mut old = shared.start("r", &["--size", "64mb"]);
    let mut old_data = old.open();
    for round in 1..4 {
        let new = shared.start("r", &["--size", "64mb"]);
        let new_data = new.data();
        new.rpc().open(true).unwrap();
        write(&old_data, round);
        check(&new_data, round);
        assert!(old_data.read(0, 4096).is_err() && old_data.ping().is_err());
        write(&new_data, round + 10);
        if round == 2 {
            old.kill()
        } else {
            old.stop()
        }
        check(&new_data, round + 10);
        (old, old_data) = (new, new_data);
    }
    assert_eq!(server.metric("dbs_handovers_total"), 3.0);
    old.stop();
    let last = shared.start("r", &[]);
    check(&last.open(), 13);
}

#[test]
fn removed_directories_free_their_volumes() {
    let shared = Shared::new();
    let _server = shared.serve();
    let create = Request::VolumeCreate { volume: "mine".to_owned(), size: SIZE, rebuilding: false };
    shared.remote().call(&create, &mut |_| true).unwrap();
    for name in ["gone", "kept"] {
        let mut replica = shared.start(name, &["--size", "64mb"]);
        write(&replica.open(), 1);
        replica.stop();
    }
    // Served: not even a removed directory costs the volume.
    let mut served = shared.start("served", &["--size", "64mb"]);
    write(&served.open(), 1);
    fs::remove_dir_all(shared.place.replica("gone")).unwrap();
    fs::remove_dir_all(shared.place.replica("served")).unwrap();
    let is = |name: &str| shared.volumes().contains(&shared.volume(name));
    eventually("the volume is deleted", || !is("gone"));
    assert!(is("kept") && is("served") && shared.volumes().contains(&"mine".to_owned()));
    served.signal(Signal::SIGTERM);
    served.wait();
    eventually("the volume is deleted", || !is("served"));
    // Made anew, it begins anew.
    let again = shared.start("gone", &["--size", "64mb"]);
    let data = again.open();
    assert!(data.read(0, 4096).unwrap().iter().all(|byte| *byte == 0));
    let mut kept = shared.start("kept", &[]);
    check(&kept.open(), 1);
    kept.stop();
}

/// Descriptors of a process that a shim may have caused: what else it opens comes and goes.
fn of_shims(process: &Process) -> usize {
    let open = fs::read_dir(format!("/proc/{}/fd", process.pid())).unwrap();
    let links = open.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let names = links.map(|link| link.to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("socket:") || name == "/dev/null").count()
}

#[test]
fn shims_that_lie_are_turned_away() {
    let shared = Shared::new();
    let server = shared.serve();
    let before = of_shims(&server);
    let dir = shared.place.replica("r");
    fs::create_dir_all(&dir).unwrap();
    let options = json!({
        "dir": dir, "volume_name": "vol", "instance_name": "", "size": 67_108_864,
        "revision_counter": true, "unmap_mark": false, "snapshot_max_count": 250,
        "snapshot_max_size": 0, "encrypted": false, "durable_writes": false, "commit_bytes": 0,
        "null_storage": false,
    });
    let request = json!({ "options": options, "unix": false, "agent": false, "receivers": 0 });
    // Bytes without files; nothing at all; another kind of request.
    let (answer, mut stream) = shared.control().into_session("replica", &request).unwrap();
    assert_eq!(answer["descriptors"], 3);
    stream.write_all(b"F").unwrap();
    let error = longhorn_replica::host::protocol::read_reply(&stream, Some(TIMEOUT)).unwrap_err();
    assert!(error.to_string().contains("expected 3 sockets"), "{error}");
    drop(shared.control().into_session("replica", &request).unwrap());
    for wrong in [json!(null), json!({}), json!({ "options": options })] {
        assert!(shared.control().into_session("replica", &wrong).is_err());
    }
    let mut many = request.clone();
    many["receivers"] = json!(100_000);
    assert!(shared.control().into_session("replica", &many).is_err());
    // Files that are something else.
    let (_, stream) = shared.control().into_session("replica", &request).unwrap();
    let null = fs::File::open("/dev/null").unwrap();
    let files = [&null, &null, &null].map(std::os::fd::AsFd::as_fd);
    longhorn_replica::host::fds::send(&stream, &files).unwrap();
    let error = longhorn_replica::host::protocol::read_reply(&stream, Some(TIMEOUT)).unwrap_err();
    assert!(error.to_string().contains("does not see the directory"), "{error}");
    drop(stream);
    eventually("nothing is left of them", || of_shims(&server) <= before);
    let replica = shared.start("r", &["--size", "64mb"]);
    write(&replica.open(), 1);
}

#[test]
fn a_volume_in_use_by_others_is_not_served_and_one_that_is_served_not_written() {
    let shared = Shared::new();
    let _server = shared.serve();
    let mut replica = shared.start("r", &["--size", "64mb"]);
    let data = replica.open();
    write(&data, 1);
    let volume = shared.volume("r");
    // NBD has it for reading only.
    let remote = shared.remote();
    let nbd = remote.open(&volume).unwrap();
    let mut content = vec![0; BLOCK];
    nbd.read_at(0, &mut content).unwrap();
    assert_eq!(version_of(&content, 0), Some(1));
    assert!(nbd.write_at(0, &block(0, 9)).is_err());
    drop(nbd);
    replica.stop();
    // Nobody serves it: then it is a volume like any other, and who writes it keeps replicas away.
    let nbd = remote.open(&volume).unwrap();
    let mut refused = shared.start_with("r", &[]);
    assert!(!refused.wait().success());
    assert!(refused.log().contains("in use by local program"), "{}", refused.log());
    drop(nbd);
    eventually("it is free again", || !shared.info(&volume).unwrap().open);
    let replica = shared.start("r", &[]);
    check(&replica.open(), 1);
}

#[test]
fn a_server_without_replicas_is_told_from_one_that_has_them() {
    let shared = Shared::new();
    let options = ServeOptions {
        store: shared.store.clone(),
        open: OpenOptions::default(),
        nbd: Vec::new(),
        inherited: Vec::new(),
        exports: dbs_nbd::ExportRules::default(),
        vhost_user: None,
        nvme: Default::default(),
        tls: None,
        reactors: Some(1),
        spin: Duration::ZERO,
        workers: 1,
        runtime_dir: shared.place.runtime_dir(),
        control: None,
        access: Default::default(),
        commit_interval: Duration::from_secs(1),
    };
    let serving = Serving::start(&options).unwrap();
    let mut refused = shared.start_with("r", &["--size", "64mb"]);
    assert_eq!(refused.wait().code(), Some(1), "{}", refused.log());
    assert!(refused.log().contains("stop that, and start `longhorn serve`"), "{}", refused.log());
    assert!(shared.volumes().is_empty());
    serving.stop().unwrap();
}

/// What only opening the store again mends is for whoever starts its server.
#[test]
fn a_store_that_cannot_be_written_ends_its_server_and_is_well_when_it_is_served_again() {
    let shared = Shared::new();
    // A write beyond the limit is an error, and no signal that ends the process.
    let mut command = shared.place.command("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", crate::PROGRAM, "serve", "--store"]);
    command.arg(&shared.store);
    let mut server = Process::spawn(command).ready();
    let mut a = shared.start("a", &["--size", "64mb"]);
    write(&a.open(), 1);
    a.rpc().snapshot("s1").unwrap();
    let pid = server.pid().to_string();
    let limited = std::process::Command::new("prlimit").args(["--pid", &pid, "--fsize=1"]).status();
    if !limited.is_ok_and(|status| status.success()) {
        println!("skipped: there is no prlimit");
        return;
    }
    a.rpc().snapshot("s2").unwrap_err();
    assert_eq!(server.wait().code(), Some(1), "{}", server.log());
    assert!(!a.wait().success());
    let _server = shared.serve();
    let a = shared.start("a", &[]);
    let data = a.open();
    check(&data, 1);
    write(&data, 2);
    a.rpc().snapshot("s3").unwrap();
}

/// As a dead mount does below one of them.
#[test]
fn a_directory_that_does_not_answer_holds_up_no_other_replica() {
    let shared = Shared::new();
    let _server = shared.serve();
    let mut a = shared.start("a", &["--size", "64mb"]);
    a.stop();
    // Whoever reads it waits.
    let meta = shared.place.replica("a").join("volume.meta");
    fs::remove_file(&meta).unwrap();
    nix::unistd::mkfifo(&meta, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let hanging = shared.start_with("a", &[]);
    std::thread::sleep(Duration::from_millis(500));
    let b = shared.start("b", &["--size", "64mb"]);
    write(&b.open(), 1);
    b.rpc().snapshot("s1").unwrap();
    assert!(!hanging.log().contains("event=ready"), "{}", hanging.log());
    // It answers again, with nothing in it, which costs a head number.
    drop(fs::File::options().write(true).open(&meta).unwrap());
    let hanging = hanging.ready();
    hanging.open();
}
