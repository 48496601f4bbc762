//! Replicas that are served from upstream's files while their content comes over, under our controller.

use crate::PROGRAM;
use crate::controller::{TEXT_SIZE, client, controller, modes, replica_with, run};
use crate::support::*;
use dbs_control::api::Request;
use longhorn_testing::DataClient;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Bytes written and read at once.
const STEP: usize = 1 << 20;
/// Bytes that the volume holds.
const HELD: usize = 24 << 20;

fn content(data: &DataClient) -> Vec<u8> {
    let parts = (0..SIZE).step_by(STEP).map(|at| data.read(at, STEP as u32).unwrap());
    parts.collect::<Vec<_>>().concat()
}

fn write(data: &DataClient, at: usize, bytes: &[u8], model: &mut [u8]) {
    data.write(at as u64, bytes).unwrap();
    model[at..][..bytes.len()].copy_from_slice(bytes);
}

/// What a command of ours says that is refused.
fn refused(engine: &Process, args: &[&str]) -> String {
    let url = format!("http://{}", engine.field("grpc"));
    let mut command = Command::new(PROGRAM);
    let output = command.args(["--url", &url, "--volume-name", "vol"]).args(args).output().unwrap();
    assert!(!output.status.success(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Two directories of upstream's replicas, as ours are exported; what the head shows, and the snapshot `old`.
fn upstream_replicas(place: &Place) -> (Vec<u8>, Vec<u8>) {
    let mut model = vec![0; SIZE as usize];
    let (mut a, a_address) = replica_with(place, "a", &[]);
    let (mut b, b_address) = replica_with(place, "b", &[]);
    let mut engine = controller(place, &[&a_address, &b_address], &[]).ready();
    let data = client(place);
    for at in (0..HELD).step_by(STEP) {
        let bytes: Vec<u8> = (0..STEP).map(|byte| ((at + byte) / 512 % 251) as u8).collect();
        write(&data, at, &bytes, &mut model);
    }
    run(&engine, &["snapshots", "create", "old"]);
    let old = model.clone();
    write(&data, STEP + 512, &[0xb0; 3 * BLOCK], &mut model);
    write(&data, 30 * STEP, &[0xb1; BLOCK], &mut model);
    data.unmap(5 * STEP as u64, STEP as u32).unwrap();
    model[5 * STEP..6 * STEP].fill(0);
    assert!(content(&data) == model);
    drop(data);
    [&mut engine, &mut a, &mut b].into_iter().for_each(Process::stop);
    for name in ["a", "b"] {
        let mut command = place.program();
        command.args(["--volume-name", "vol", "replica-export"]).arg(place.replica(name));
        assert!(command.output().unwrap().status.success());
        assert!(place.replica(name).join("volume-snap-old.img").exists());
    }
    (model, old)
}

fn is_served_from_files(dir: &Path) -> bool {
    dir.join("volume.taken").exists()
}

#[test]
fn a_volume_is_served_from_upstream_s_files_from_the_first_second() {
    let place = Place::new();
    let (mut model, old) = upstream_replicas(&place);
    let dirs = ["a", "b"].map(|name| place.replica(name));

    // A byte a second: nothing is over before they are killed.
    let slow = ["--take-over", "1", "--metrics", "127.0.0.1:0"];
    let (mut a, a_address) = replica_with(&place, "a", &slow);
    let (mut b, b_address) = replica_with(&place, "b", &slow);
    let mut engine = controller(&place, &[&a_address, &b_address], &[]).ready();
    let mut data = client(&place);
    assert!(content(&data) == model, "at once");
    write(&data, 2 * STEP + 100, &[0xc0; 50], &mut model);
    write(&data, 7 * STEP, &[0xc1; 2 * STEP], &mut model);
    run(&engine, &["snapshots", "create", "new"]);
    let new = model.clone();
    data.unmap(8 * STEP as u64, STEP as u32).unwrap();
    model[8 * STEP..9 * STEP].fill(0);
    write(&data, 40 * STEP, &[0xc2; BLOCK], &mut model);
    assert!(content(&data) == model, "written");
    let listed = run(&engine, &["snapshots", "ls"]);
    assert!(listed.contains("old") && listed.contains("new"), "{listed}");
    drop(data);
    run(&engine, &["frontend", "shutdown"]);
    let text = refused(&engine, &["snapshots", "revert", "old"]);
    assert!(text.contains("still coming into the replica's store"), "{text}");
    assert_eq!(modes(&engine), ["RW", "RW"], "nobody has changed anything");
    run(&engine, &["frontend", "start", "socket"]);
    data = client(&place);
    for volume in ["vol", "upstream's layers"] {
        let delete =
            Request::VolumeDelete { volume: volume.to_owned(), uuid: None, rebuilding: false };
        let refused = place.control("a").call(&delete, &mut |_| true).unwrap_err();
        assert!(refused.to_string().contains("through its engine"), "{refused}");
    }
    let percent = a.metric("dbs_replica_take_over_percent{");
    assert!((0.0..100.0).contains(&percent), "{percent}");
    // A new replica gets nothing from them yet.
    let (mut c, c_address) = replica_with(&place, "c", &[]);
    let add = ["add-replica", &c_address, "--size", TEXT_SIZE, "--current-size", TEXT_SIZE];
    let text = refused(&engine, &add);
    assert!(text.contains("still coming into the replica's store"), "{text}");
    c.kill();
    assert!(content(&data) == model);
    drop(data);
    engine.kill();
    [&mut a, &mut b].into_iter().for_each(Process::kill);
    assert!(dirs.iter().all(|dir| is_served_from_files(dir)));

    // One of them goes on without the option, as who has begun must.
    let (mut a, a_address) = replica_with(&place, "a", &["--take-over", "0"]);
    let (mut b, b_address) = replica_with(&place, "b", &[]);
    let engine = controller(&place, &[&a_address, &b_address], &[]).ready();
    let data = client(&place);
    assert!(content(&data) == model, "what was acknowledged before they were killed");
    write(&data, 50 * STEP, &[0xc3; BLOCK], &mut model);
    for (replica, dir) in [(&a, &dirs[0]), (&b, &dirs[1])] {
        replica.wait_for("state=done");
        eventually("upstream's files are gone", || !is_served_from_files(dir));
        let mut names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(!names.any(|name| name.to_string_lossy().ends_with(".img")));
    }
    assert!(content(&data) == model, "all of it has come over");
    let (mut c, c_address) = replica_with(&place, "d", &[]);
    run(&engine, &["add-replica", &c_address, "--size", TEXT_SIZE, "--current-size", TEXT_SIZE]);
    assert_eq!(modes(&engine), ["RW", "RW", "RW"]);
    drop(data);
    for (snapshot, shown) in [("new", &new), ("old", &old)] {
        run(&engine, &["frontend", "shutdown"]);
        run(&engine, &["snapshots", "revert", snapshot]);
        run(&engine, &["frontend", "start", "socket"]);
        assert!(content(&client(&place)) == *shown, "{snapshot}");
    }
    let data = client(&place);
    // By each of them alone.
    for (lost, address) in [(&mut a, &a_address), (&mut b, &b_address)] {
        lost.kill();
        assert!(content(&data) == old);
        run(&engine, &["rm-replica", address]);
    }
    assert!(content(&data) == old, "by the rebuilt one alone");
    c.kill();
}

#[test]
fn nothing_is_taken_over_unless_it_is_asked_for() {
    let place = Place::new();
    upstream_replicas(&place);
    let dir = place.replica("a");
    let names = || {
        let names = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let before = names();
    let not_started = |more: &[&str], text: &str| {
        let mut process = place.start_with("a", more);
        assert_eq!(process.wait().code(), Some(1));
        assert!(process.log().contains(text), "{}", process.log());
    };
    not_started(&[], "--take-over serves at once");
    let image = dir.join("volume-snap-old.img");
    let image = image.to_str().unwrap();
    not_started(&["--take-over", "0", "--backing-file", image], "leave --backing-file out");
    assert_eq!(names(), before);
    // Cut off before the store was there.
    fs::create_dir(dir.join("volume.taken")).unwrap();
    not_started(&[], "start it again, with --take-over");
    not_started(&["--store", "/no/store"], "start it again, with --take-over");
    let mut command = place.program();
    command.args(["--volume-name", "vol", "replica-import"]).arg(&dir);
    let text = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(text.contains("is served from upstream's files"), "{text}");
    let mut replica = place.start_with("a", &["--take-over", "0"]).ready();
    replica.wait_for("state=done");
    replica.stop();
}

/// A live upgrade between two processes of ours: the newer one goes on with it.
#[test]
fn a_newer_process_goes_on_bringing_the_content_over() {
    let place = Place::new();
    let (mut model, _) = upstream_replicas(&place);
    let dir = place.replica("a");
    let mut older = place.start("a", &["--take-over", "1"]);
    let data = older.open();
    write(&data, 3 * STEP, &[0xd0; BLOCK], &mut model);
    let mut newer = place.start("a", &["--take-over", "0"]);
    let newer_data = newer.data();
    newer.rpc().open(true).unwrap();
    let disks = newer.rpc().get().unwrap().disks;
    assert!(disks.contains_key("volume-snap-old.img"), "from the older one: {disks:?}");
    assert!(is_served_from_files(&dir));
    // The first request takes the store over.
    assert!(content(&newer_data) == model);
    write(&newer_data, 4 * STEP, &[0xd1; BLOCK], &mut model);
    newer.wait_for("state=done");
    eventually("upstream's files are gone", || !is_served_from_files(&dir));
    assert!(content(&newer_data) == model);
    assert!(older.rpc().get().is_ok());
    drop((data, newer_data));
    newer.stop();
    older.stop();
}
