//! How the manager starts, lists, replaces and ends processes.

use crate::apart::apart;
use crate::lab::{BLOCK, Manager, SIZE, Side, Start, Whose, block, compare, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::path::Path;

fn listed(side: &Side) -> Vec<String> {
    let list = side.manager.processes.call("ProcessList", &json!({})).unwrap();
    let list = list["processes"].as_object().unwrap();
    list.iter().map(|(name, process)| format!("{name}: {}", process["status"]["state"])).collect()
}

fn process(side: &Side, name: &str) -> Value {
    side.manager.processes.call("ProcessGet", &json!({ "name": name })).unwrap()
}

/// Notes the end of a process that does not start, and forgets it.
fn fails(side: &mut Side, what: &str, start: &Start) {
    let spec = side.engine_spec("vol-1", start);
    side.manager.processes.call("ProcessCreate", &json!({ "spec": spec })).unwrap();
    let process = side.settled("vol-1-e-0");
    side.note(what, Ok(json!([process["status"]["state"], process["status"]["error_msg"]])));
    side.delete("vol-1-e-0");
}

fn life(side: &mut Side) {
    let a = side.replica("vol-1", "a", SIZE);
    let b = side.replica("vol-1", "b", SIZE);
    let nobody = ["tcp://127.0.0.1:1".to_owned()];
    fails(side, "nobody is there", &Start::new("socket", &nobody));
    fails(side, "a bogus frontend", &Start::new("bogus", std::slice::from_ref(&a)));
    let twice = [a.clone(), a.clone()];
    fails(side, "a replica named twice", &Start::new("socket", &twice));
    let replicas = [a, b];
    let engine = side.engine("vol-1", &Start::new("socket", &replicas));
    // Nobody else may have it now.
    side.client("vol-1").write(0, &block(1)).unwrap();
    let spec = side.engine_spec("vol-1", &Start::new("socket", &replicas));
    let again = side.manager.processes.call("ProcessCreate", &json!({ "spec": spec }));
    side.note("ProcessCreate again", again);
    side.note("ProcessList", Ok(json!(listed(side))));
    let status = process(side, "vol-1-r-a");
    side.note("a replica", Ok(json!([status["spec"], status["status"]["state"]])));
    let instance = json!({ "name": "vol-1-e-0", "type": "engine", "data_engine": 0 });
    let mut answer = side.manager.instances.call("InstanceGet", &instance).unwrap();
    answer["spec"]["process_instance_spec"]["args"] = json!(null);
    answer["status"]["uuid"] = json!(null);
    side.note("InstanceGet", Ok(answer));
    assert!(!side.log("vol-1-e-0").is_empty());
    let answer = side.manager.processes.call("VersionGet", &json!({}));
    assert!(answer.unwrap()["instanceManagerProxyAPIVersion"].as_i64().unwrap() > 0);
    // Ended in good order, and again with the same directories.
    let over = |seen: &[Value]| seen.last().is_some_and(|process| process["deleted"] == true);
    let seen = std::thread::scope(|scope| {
        let watch = || side.manager.processes.stream("ProcessWatch", &json!({}), over);
        let watch = scope.spawn(watch);
        eventually("somebody watches", || side.manager.log().contains("update watch"));
        assert_eq!(side.delete(&engine.name)["deleted"], true);
        watch.join().unwrap()
    });
    // What came before it depends on when the watching began.
    let last = seen.last().map(|seen| &seen["status"]["state"]);
    side.note("the end as who watches sees it", Ok(json!(last)));
    for name in ["vol-1-r-a", "vol-1-r-b"] {
        side.delete(name);
    }
    side.note("all deleted", Ok(json!(listed(side))));
    let replicas = ["a", "b"].map(|name| side.replica("vol-1", name, SIZE));
    side.engine("vol-1", &Start::new("socket", &replicas));
    assert_eq!(side.client("vol-1").read(0, BLOCK).unwrap(), block(1));
}

#[test]
fn processes_live_alike() {
    apart("processes::processes_live_alike", |lab| compare(lab, life));
}

/// The newer process of a volume in use takes over: of another image, as the manager leaves one of the same image alone.
fn replaced(side: &mut Side) {
    let old = ["a", "b"].map(|name| side.replica("vol-1", name, SIZE));
    let engine = side.engine("vol-1", &Start::new("", &old));
    let fields = json!({ "snapshot_volume": { "name": "s1" } });
    side.step(&engine, "VolumeSnapshot", fields);
    let replace = |side: &mut Side, start: &Start, signal: &str| {
        let spec = side.engine_spec("vol-1", start);
        let request = json!({ "spec": spec, "terminate_signal": signal });
        side.manager.processes.call("ProcessReplace", &request)
    };
    let same = Start { more: &["--upgrade"], ..Start::new("", &old) };
    let answer = replace(side, &same, "SIGHUP").unwrap();
    assert_eq!(answer["status"]["port_start"], process(side, "vol-1-e-0")["status"]["port_start"]);
    let answer = replace(side, &same, "SIGTERM");
    side.note("ProcessReplace by SIGTERM", answer);
    // Replicas that nobody can take over.
    let nobody = ["tcp://127.0.0.1:1".to_owned()];
    let bad = Start { more: &["--upgrade"], image: 2, ..Start::new("", &nobody) };
    let answer = replace(side, &bad, "SIGHUP");
    side.note("ProcessReplace without replicas", answer);
    side.step(&engine, "VolumeGet", json!({}));

    let new = ["a", "b"].map(|name| side.replica_of("vol-1", name, SIZE, 2, &[]));
    let start = Start { more: &["--upgrade"], image: 2, ..Start::new("", &new) };
    let answer = replace(side, &start, "SIGHUP").unwrap();
    side.note("ProcessReplace", Ok(answer["status"]["state"].clone()));
    let process = side.settled("vol-1-e-0");
    let engine = side.engine_at("vol-1", &process);
    for name in ["vol-1-r-a", "vol-1-r-b"] {
        side.delete(name);
    }
    for method in ["VolumeGet", "ReplicaList", "SnapshotList"] {
        side.step(&engine, method, json!({}));
    }
    // Upstream's controller has no socket any more once it was an upgrade.
    let fields = json!({ "frontend_start": { "frontend": "socket" } });
    let started = side.call(&engine, "VolumeFrontendStart", &fields);
    assert_eq!(started.is_ok(), side.whose == Whose::Ours, "{started:?}");
    if started.is_ok() {
        side.client("vol-1").write(0, &block(3)).unwrap();
        side.call(&engine, "VolumeFrontendShutdown", &json!({})).unwrap();
    }
    let fields = json!({ "snapshot_volume": { "name": "s2" } });
    side.step(&engine, "VolumeSnapshot", fields);
    side.step(&engine, "ReplicaList", json!({}));
    side.note("ProcessList", Ok(json!(listed(side))));
}

#[test]
fn processes_are_replaced_alike() {
    apart("processes::processes_are_replaced_alike", |lab| compare(lab, replaced));
}

fn running(program: &Path) -> usize {
    let program = program.canonicalize().unwrap();
    let processes = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path().join("exe")).ok());
    processes.filter(|exe| *exe == program).count()
}

/// A manager ends its processes in good order; if it is killed, they end with it. The next one starts all of them again.
#[test]
fn processes_end_with_the_manager() {
    apart("processes::processes_end_with_the_manager", |lab| {
        let program = Path::new(env!("CARGO_BIN_EXE_longhorn"));
        let mut side = Side::new(lab, Whose::Ours);
        for (round, signal) in
            [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGINT].into_iter().enumerate()
        {
            let byte = u8::try_from(round).unwrap() + 1;
            let replicas = ["a", "b"].map(|name| side.replica("vol-1", name, SIZE));
            side.engine("vol-1", &Start::new("socket", &replicas));
            let client = side.client("vol-1");
            if round > 0 {
                assert_eq!(client.read(0, BLOCK).unwrap(), block(byte - 1), "{signal}");
            }
            client.write(0, &block(byte)).unwrap();
            assert_eq!(running(program), 3);
            side.manager.stop(signal);
            eventually("all processes end", || running(program) == 0);
            side.manager = Manager::start(lab);
        }
    });
}

/// A volume with its one replica on the same node: the data goes through a socket below `/host`.
fn strictly_local(side: &mut Side) {
    let unix: &[&str] = &["--data-server-protocol", "unix"];
    for round in [1, 2] {
        let replica = [side.replica_of("vol-1", "a", SIZE, 1, unix)];
        let start = Start { more: unix, ..Start::new("socket", &replica) };
        let engine = side.engine("vol-1", &start);
        side.step(&engine, "ReplicaList", json!({}));
        let client = side.client("vol-1");
        assert_eq!(client.read(0, BLOCK).unwrap(), block(round - 1));
        client.write(0, &block(round)).unwrap();
        let socket = Path::new("/host/var/lib/longhorn/unix-domain-socket/vol-1.sock");
        side.note("the socket", Ok(json!(socket.exists())));
        side.delete(&engine.name);
        side.delete("vol-1-r-a");
        if side.whose == Whose::Upstreams {
            // Its replica does not start where one is left, ours does.
            std::fs::remove_file(socket).unwrap();
        }
    }
}

#[test]
fn data_goes_through_unix_sockets_alike() {
    apart("processes::data_goes_through_unix_sockets_alike", |lab| compare(lab, strictly_local));
}

/// The arguments are fixed, so options come from the environment of the manager's pod.
#[test]
fn options_come_from_the_manager_s_environment() {
    apart("processes::options_come_from_the_manager_s_environment", |lab| {
        let variables = [("DBS_REPLICA_METRICS", ":0"), ("DBS_QUEUE_DEPTH", "none")];
        let mut side = Side::with(lab, Whose::Ours, &variables);
        let replica = [side.replica("vol-1", "a", SIZE)];
        let log = side.log("vol-1-r-a");
        assert!(log.contains("event=environment DBS_REPLICA_METRICS=:0"), "{log}");
        let spec = side.engine_spec("vol-1", &Start::new("socket", &replica));
        side.manager.processes.call("ProcessCreate", &json!({ "spec": spec })).unwrap();
        let process = side.settled("vol-1-e-0");
        assert_eq!(process["status"]["state"], "error");
        assert_eq!(process["status"]["error_msg"], "exit status 1");
        let log = side.log("vol-1-e-0");
        assert!(
            log.contains("'--queue-depth <N> (environment variable DBS_QUEUE_DEPTH)'"),
            "{log}"
        );
    });
}
