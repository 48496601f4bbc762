//! A controller with a replica in its own process.

use crate::controller::{
    TEXT_SIZE, check, client, controller, free_ports, modes, replica, run, write,
};
use crate::support::*;

/// The address of the replica in a directory, as the controller has logged it.
fn address(engine: &Process, name: &str) -> String {
    let line = engine.wait_for(&format!("{name} address="));
    let address = line.split(' ').find_map(|field| field.strip_prefix("address="));
    address.unwrap().to_owned()
}

fn directory(place: &Place, name: &str) -> String {
    format!("local:{}", place.replica(name).display())
}

const SIZES: [&str; 4] = ["--size", TEXT_SIZE, "--current-size", TEXT_SIZE];

/// It is the source of a rebuild, then the target of one, and in the end holds everything alone.
#[test]
fn a_local_replica_is_rebuilt_from_and_rebuilt() {
    let place = Place::new();
    let here = directory(&place, "here");
    let mut engine = controller(&place, &[&here], &[]).ready();
    let local = address(&engine, "here");
    let data = client(&place);
    write(&data, 1);
    assert_eq!(run(&engine, &["snapshots", "create", "one"]).trim(), "one");
    write(&data, 2);
    // The source, for a replica elsewhere.
    let (mut there, remote) = replica(&place, "there");
    run(&engine, &[&["add-replica", &remote], &SIZES[..]].concat());
    assert_eq!(modes(&engine), ["RW", "RW"]);
    let listed = run(&engine, &["ls"]);
    assert!(listed.contains(&local) && listed.contains(&remote), "{listed}");
    write(&data, 3);
    // The target.
    run(&engine, &["update-replica", &local, "--mode", "ERR"]);
    write(&data, 4);
    check(&data, 4);
    run(&engine, &["rm-replica", &local]);
    run(&engine, &[&["add-replica", &local], &SIZES[..]].concat());
    assert_eq!(modes(&engine), ["RW", "RW"]);
    write(&data, 5);
    there.kill();
    check(&data, 5);
    eventually("the loss shows", || modes(&engine) == ["ERR", "RW"]);
    assert!(run(&engine, &["snapshots", "ls"]).contains("one"));
    drop(data);
    engine.stop();
    // It is there after a restart, and after the process was killed.
    for version in 5..7 {
        let mut engine = controller(&place, &[&here], &[]).ready();
        let data = client(&place);
        check(&data, version);
        write(&data, version + 1);
        drop(data);
        engine.kill();
    }
    let mut engine = controller(&place, &[&here], &[]).ready();
    check(&client(&place), 7);
    run(&engine, &["frontend", "shutdown"]);
    run(&engine, &["snapshots", "revert", "one"]);
    run(&engine, &["frontend", "start", "socket"]);
    check(&client(&place), 1);
    engine.stop();
}

/// What is new is empty: it is not taken as complete beside others.
#[test]
fn a_new_local_replica_is_filled_before_it_counts() {
    let place = Place::new();
    let (_there, remote) = replica(&place, "there");
    let here = directory(&place, "here");
    let mut refused = controller(&place, &[&remote, &here], &[]);
    assert_eq!(refused.wait().code(), Some(1));
    assert!(refused.log().contains("nothing tells it from complete"), "{}", refused.log());
    let path = place.replica("here");
    let standby = ["--local", path.to_str().unwrap()];
    let listen = format!("127.0.0.1:{}", free_ports());
    let more = [&standby[..], &["--local-listen", &listen]].concat();
    let mut engine = controller(&place, &[&remote], &more).ready();
    let data = client(&place);
    write(&data, 1);
    let local = address(&engine, "here");
    assert_eq!(local, format!("tcp://{listen}"));
    // It says of itself that it lacks something, at any later start as well.
    drop(data);
    engine.stop();
    let mut engine = controller(&place, &[&remote, &here], &[]).ready();
    assert_eq!(modes(&engine), ["RW", "ERR"]);
    engine.stop();
    let mut engine = controller(&place, &[&remote], &more).ready();
    run(&engine, &[&["add-replica", &local], &SIZES[..]].concat());
    assert_eq!(modes(&engine), ["RW", "RW"]);
    let data = client(&place);
    check(&data, 1);
    run(&engine, &["rm-replica", &remote]);
    check(&data, 1);
    let expanded = (2 * SIZE).to_string();
    run(&engine, &["expand", "--size", &expanded]);
    eventually("it is larger", || {
        run(&engine, &["info"]).contains(&format!("\"size\": {expanded}"))
    });
    data.write(SIZE, &block(7, 7)).unwrap();
    assert_eq!(version_of(&data.read(SIZE, BLOCK as u32).unwrap(), 7), Some(7));
    drop(data);
    engine.stop();
}

#[test]
fn the_journal_says_who_was_asked_for_what() {
    let place = Place::new();
    let engine = controller(&place, &[&directory(&place, "here")], &[]).ready();
    let local = address(&engine, "here");
    let data = client(&place);
    data.write(8192, &block(2, 1)).unwrap();
    data.read(8192, BLOCK as u32).unwrap();
    run(&engine, &["journal"]);
    let has = |kind: &str| {
        let what = format!(" ->{local} {kind}[  4kB@8kB] ");
        engine.output().iter().any(|line| line.contains(": REQ ") && line.contains(&what))
    };
    eventually("a write and a read are printed", || has("W") && has("R"));
    run(&engine, &["journal", "--limit", "1"]);
}

/// Two stores are told apart, and no family is named twice.
#[test]
fn a_controller_measures_the_replicas_of_its_process() {
    let place = Place::new();
    let replicas = ["one", "two"].map(|name| directory(&place, name));
    let metrics = ["--metrics", "127.0.0.1:0"];
    let mut engine = controller(&place, &replicas.each_ref().map(String::as_str), &metrics).ready();
    let data = client(&place);
    write(&data, 1);
    check(&data, 1);
    let text = http_get(&engine.field("metrics"), "/metrics").1;
    for name in ["one", "two"] {
        let of = format!("{{replica=\"{name}\",volume=\"vol\"");
        for family in ["dbs_store_free_bytes", "dbs_store_checksums_verified_total"] {
            assert!(engine.metric(&format!("{family}{of}}}")) > 0.0, "{text}");
        }
        assert_eq!(engine.metric(&format!("dbs_replica_size_bytes{of}}}")), SIZE as f64);
    }
    let mut heads: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
    let all = heads.len();
    heads.sort_unstable();
    heads.dedup();
    assert_eq!(heads.len(), all, "{text}");
    drop(data);
    engine.stop();
}
