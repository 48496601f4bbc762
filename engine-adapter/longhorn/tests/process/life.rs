//! `longhorn replica` from start to end: orderly, killed, restarted; its ports, its arguments.

use crate::support::*;
use dbs_client::remote::RemoteStore;
use dbs_control::api::Request;
use dbs_core::ErrorKind;
use dbs_transfer::StoreAccess;
use nix::sys::signal::Signal;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn it_serves_stops_in_order_and_goes_on_where_it_was() {
    let place = Place::new();
    let mut replica = place.start("r", &["--size", "64mb"]);
    let rpc = replica.rpc();
    assert_eq!(rpc.state(), "closed");
    let address: std::net::SocketAddr = replica.field("grpc").parse().unwrap();
    assert_eq!(replica.field("data"), format!("127.0.0.1:{}", address.port() + 1));
    assert_eq!(replica.field("agent"), format!("127.0.0.1:{}", address.port() + 2));
    let data = replica.open();
    for number in 0..100 {
        data.write(number * 3 * BLOCK as u64, &block(number * 3, 1)).unwrap();
    }
    assert_eq!(rpc.state(), "dirty");
    let begun = Instant::now();
    replica.stop();
    assert!(begun.elapsed() < Duration::from_secs(120), "took {:?}", begun.elapsed());
    // Free at once, although connections were open.
    for port in address.port()..address.port() + 3 {
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    }

    let listen = address.to_string();
    let mut replica = place.start("r", &["--size", "128mb", "--listen", &listen]);
    assert_eq!(replica.rpc().get().unwrap().size, SIZE.to_string(), "an existing size stays");
    let data = replica.open();
    for number in 0..300 {
        let content = data.read(number * BLOCK as u64, BLOCK as u32).unwrap();
        assert_eq!(version_of(&content, number), (number % 3 == 0).then_some(1));
    }
    replica.rpc().close().unwrap();
    assert!(data.read(0, 4096).is_err() && data.ping().is_err());
    // SIGINT, as instance managers send it.
    replica.signal(Signal::SIGINT);
    assert!(replica.wait().success());
    let left: Vec<_> = fs::read_dir(place.replica("r"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(
        left.iter().all(|name| !name.ends_with(".sock") && !name.ends_with(".new")),
        "{left:?}"
    );
    assert!(left.contains(&"volume.meta".to_owned()));
}

/// Writes with rising versions until the process is gone; returns, for each block, the last one that
/// was acknowledged and the last one sent, of which some are `known` from before.
fn write_until_killed(replica: &mut Process, known: &[u64]) -> Vec<(u64, u64)> {
    let blocks = known.len() as u64;
    let from = known.iter().copied().max().unwrap();
    let acknowledged: Vec<_> = known.iter().map(|version| AtomicU64::new(*version)).collect();
    let sent: Vec<_> = known.iter().map(|version| AtomicU64::new(*version)).collect();
    let data = replica.open();
    std::thread::scope(|scope| {
        for part in 0..4 {
            let (data, acknowledged, sent) = (&data, &acknowledged, &sent);
            scope.spawn(move || {
                for version in from + 1.. {
                    for number in (0..blocks).filter(|number| number % 4 == part) {
                        sent[number as usize].store(version, Ordering::SeqCst);
                        let content = block(number, version);
                        if data.write(number * BLOCK as u64, &content).is_err() {
                            return;
                        }
                        acknowledged[number as usize].store(version, Ordering::SeqCst);
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(400));
        replica.kill();
    });
    let pairs = acknowledged.iter().zip(&sent);
    pairs.map(|(a, s)| (a.load(Ordering::SeqCst), s.load(Ordering::SeqCst))).collect()
}

#[test]
fn what_was_acknowledged_survives_kill_9() {
    let place = Place::new();
    let mut known = vec![0; 512];
    for round in 0..4 {
        let mut replica = place.start("r", &["--size", "64mb"]);
        let versions = write_until_killed(&mut replica, &known);
        assert!(versions.iter().any(|(_, sent)| sent > &0), "nothing was written");
        let mut replica = place.start("r", &[]);
        let data = replica.open();
        for (number, (acknowledged, sent)) in (0..).zip(&versions) {
            let content = data.read(number * BLOCK as u64, BLOCK as u32).unwrap();
            let version = version_of(&content, number).unwrap_or(0);
            assert!(
                (*acknowledged..=*sent).contains(&version),
                "round {round}, block {number}: {version} instead of {acknowledged} to {sent}"
            );
            known[number as usize] = version;
        }
        drop(data);
        if round % 2 == 0 { replica.stop() } else { replica.kill() }
    }
}

#[test]
fn arguments_as_upstream_takes_them() {
    let place = Place::new();
    fs::create_dir_all(place.replica("")).unwrap();
    // A relative directory, flags behind it, one dash, `=`, and global flags in front.
    let mut command = place.program();
    command.current_dir(place.replica("")).args([
        "--volume-name=vol",
        "replica",
        "r",
        "-size",
        "67108864",
        "--sync-agent=false",
        "--disableRevCounter",
        "--replica-instance-name",
        "vol-r-1",
        "--sync-agent-port-count",
        "7",
        "--listen",
        "127.0.0.1:0",
    ]);
    let mut replica = Process::spawn(command).ready();
    assert_eq!(replica.field("agent"), "none");
    let info = replica.rpc().get().unwrap();
    assert_eq!(info.size, SIZE.to_string());
    replica.rpc().open(false).unwrap();
    assert!(replica.rpc().get().unwrap().revision_counter_disabled);
    assert!(place.replica("r").join("volume.dbs").exists());
    replica.stop();

    for (args, text) in [
        (&["replica"][..], "DIRECTORY"),
        (&["replica", "x", "--size", "1zb"], "no size"),
        (&["replica", "x", "--backing-file", "b.qcow2"], "there is no backing file"),
        (&["replica", "x", "--listen", "127.0.0.1"], "no address"),
        (&["replica", "x", "--data-server-protocol", "unix"], "--volume-name"),
        (&["controller", "v", "--replica", "tcp://127.0.0.1:1"], "no name of a volume"),
        (&["--url", "127.0.0.1:1", "snapshots", "ls"], "127.0.0.1:1"),
        (&["backup", "ls"], "dest URL"),
        (&["frobnicate"], "unrecognized command"),
    ] {
        let output = place.program().args(args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {error}");
        // Longhorn's manager reads the reasons of the commands for backups there.
        let beside = args[0] == "backup";
        assert!(output.stdout.is_empty() != beside && error.contains(text), "{args:?}: {error}");
        assert!(!Path::new("x").exists(), "{args:?} makes a directory");
    }
}

#[test]
fn versions_are_json_alone() {
    let place = Place::new();
    let output = place.program().args(["version", "--client-only"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["clientVersion"]["cliAPIVersion"], 12);
    assert!(value["serverVersion"].is_null());

    // Nobody listens there: the error goes elsewhere.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let output = place.program().args(["--url", &url, "version"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert!(String::from_utf8(output.stderr).unwrap().contains(&free.to_string()));
}

#[test]
fn taken_ports_and_other_replicas_directories_are_refused() {
    let place = Place::new();
    let replica = place.start("r", &["--size", "64mb"]);
    let mut second = place.start_with("other", &["--listen", &replica.field("grpc")]);
    assert_eq!(second.wait().code(), Some(1));
    assert!(second.log().contains(&replica.field("grpc")), "{}", second.log());

    // One of upstream's: neither its data is to be served as zeros, nor is it touched.
    let upstream = place.replica("upstream");
    fs::create_dir_all(&upstream).unwrap();
    fs::write(upstream.join("volume.meta"), "{\"Size\":67108864}").unwrap();
    let mut refused = place.start_with("upstream", &["--size", "64mb"]);
    assert_eq!(refused.wait().code(), Some(1));
    assert!(refused.log().contains("`longhorn replica-import` takes over"), "{}", refused.log());
    assert_eq!(fs::read_dir(&upstream).unwrap().count(), 1);
}

#[test]
fn a_stale_unix_socket_is_no_obstacle() {
    // Its place is below /host, whatever the environment says.
    let place = Place::new();
    let inside = place.path().strip_prefix("/").unwrap();
    let had_host = Path::new("/host").exists();
    let directory = Path::new("/host").join(inside).join("unix-domain-socket");
    if fs::create_dir_all(&directory).is_err() {
        eprintln!("SKIPPED a_stale_unix_socket_is_no_obstacle: /host cannot be written");
        return;
    }
    let path = directory.join("vol.sock");
    drop(UnixListener::bind(&path).unwrap());
    let run = || {
        let mut command = place.program();
        command.env("LONGHORN_CONTROL_PATH", place.path());
        command.args(["--volume-name", "vol", "replica"]).arg(place.replica("r"));
        command.args(["--size", "64mb", "--data-server-protocol", "unix"]);
        command.args(["--listen", "127.0.0.1:0"]);
        Process::spawn(command).ready()
    };
    let mut replica = run();
    assert_eq!(replica.field("data"), format!("unix:{}", path.display()));
    let data = replica.open();
    data.write(0, &block(0, 1)).unwrap();
    replica.kill();
    assert!(path.exists(), "that is what is stale");
    let mut replica = run();
    let data = replica.open();
    assert_eq!(version_of(&data.read(0, 4096).unwrap(), 0), Some(1));
    replica.stop();
    assert!(!path.exists());
    let remove = if had_host { Path::new("/host").join(inside) } else { "/host".into() };
    fs::remove_dir_all(remove).unwrap();
}

#[test]
fn commands_see_the_store_and_cannot_change_it_behind_the_engine_s_back() {
    let place = Place::new();
    let mut replica = place.start("r", &["--size", "64mb"]);
    let data = replica.open();
    data.write(0, &block(0, 1)).unwrap();
    replica.rpc().snapshot("s1").unwrap();
    let mut control = place.control("r");
    let mut call = |request: &Request| control.call(request, &mut |_| true);
    let name = || "vol".to_owned();
    let list = Request::SnapshotList { volume: name(), usage: false };
    assert_eq!(call(&list).unwrap()[0]["name"], "s1");
    for request in [
        Request::SnapshotDelete { volume: name(), snapshot: "s1".to_owned(), uuid: None },
        Request::VolumeDelete { volume: name(), uuid: None, rebuilding: false },
        Request::VolumeRename { volume: name(), new: "x".to_owned() },
        Request::VolumeResize { volume: name(), size: 1 << 20, shrink: true, uuid: None },
    ] {
        let refused = call(&request).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
        assert!(refused.to_string().contains("through its engine"), "{refused}");
    }
    assert_eq!(call(&Request::Vacuum { keep: None }).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(call(&Request::Check).unwrap()["findings"].as_array().unwrap().is_empty());
    assert_eq!(call(&list).unwrap().as_array().unwrap().len(), 1);

    // Data, over NBD: to be read only.
    let key = dbs_control::store_key(&place.replica("r").join("volume.dbs")).unwrap();
    let socket = dbs_control::socket_path(&place.runtime_dir(), &key);
    let remote = RemoteStore::connect(&socket, &key).unwrap();
    let volume = StoreAccess::open(&remote, "vol").unwrap();
    let mut content = vec![0; BLOCK];
    volume.read_at(0, &mut content).unwrap();
    assert_eq!(version_of(&content, 0), Some(1));
    assert!(volume.write_at(0, &block(0, 9)).is_err());
    drop(volume);
    let content = data.read(0, BLOCK as u32).unwrap();
    assert_eq!(version_of(&content, 0), Some(1));
    replica.stop();
}

/// An empty volume beside the replica's was made, and served.
#[test]
fn a_replica_is_not_started_as_another_volume_s() {
    let place = Place::new();
    place.start("r", &["--size", "64mb"]).stop();
    let mut command = place.program();
    command.args(["--volume-name", "other", "replica"]).arg(place.replica("r"));
    let mut process = Process::spawn({
        command.args(["--size", "64mb", "--listen", "127.0.0.1:0"]);
        command
    });
    assert_eq!(process.wait().code(), Some(1));
    assert!(
        process.log().contains("is one of the volume `vol`, not of `other`"),
        "{}",
        process.log()
    );
}
