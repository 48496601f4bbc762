//! What upstream's replicas have written is served from their files while it comes over, under upstream's engine and under
//! load, with processes killed meanwhile; and goes back to upstream's replicas.

use crate::support::{
    Engine, EngineOptions, Image, Kind, Lab, Load, MIB, Mix, Replica, ReplicaOptions, check_each,
    eventually_within, exercise, free_ports, ours,
};
use crate::{Snapshots, check_snapshots, each};
use nix::sys::signal::Signal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const SIZE: usize = 48 * MIB;
/// Bytes that come over until the processes are killed: some of all that there is.
const FIRST_RATE: &str = "256kb";
const IMAGE: usize = 20 * MIB + 512;
const SNAPSHOTS: [&str; 5] = ["s1", "s2", "s3", "s4", "s5"];
/// Upstream's replica mixes up the ends of unaligned reads beyond what a layer has.
const MIX: Mix = Mix {
    writes: 60,
    unmaps: 0,
    whole_blocks: true,
    unmapped_is_zero: false,
    largest: 256 << 10,
    pause: Duration::ZERO,
    may_fail: false,
};

fn engine_options() -> EngineOptions {
    EngineOptions { revision_counter: true, ..EngineOptions::new(SIZE) }
}

/// The image that the volume rests on, and what it has.
fn base(lab: &Lab) -> (PathBuf, Vec<u8>) {
    let bytes: Vec<u8> = (0..IMAGE).map(|at| (at / 512 % 251) as u8 | 1).collect();
    let path = lab.path().join("image");
    std::fs::write(&path, &bytes).unwrap();
    (path, bytes)
}

/// Starts replicas of a kind in the directories of those that have ended.
fn again(lab: &Lab, ended: Vec<Replica>, kind: Kind, flags: &[&str]) -> Vec<Replica> {
    let start = |mut replica: Replica| {
        let (name, dir) = (replica.name().to_owned(), replica.dir().to_owned());
        let mut options = replica.options().clone();
        if let Some(at) = options.flags.iter().position(|flag| flag == "--take-over") {
            options.flags.truncate(at);
        }
        options.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
        lab.replica_in(kind, "", &name, &dir, &options)
    };
    ended.into_iter().map(start).collect()
}

/// Ours is started where upstream's serves the volume, as when an engine is upgraded: it is told why that cannot be.
fn refused_beside(lab: &Lab, replica: &mut Replica) {
    let listen = format!("127.0.0.1:{}", free_ports(13));
    let mut command = Command::new(ours());
    command.env("LONGHORN_CONTROL_PATH", lab.control_path());
    command.args(["--volume-name", &lab.volume(""), "replica"]).arg(replica.dir());
    command.args(["--size", &SIZE.to_string(), "--sync-agent-port-count", "7"]);
    command.args(&replica.options().flags).args(["--take-over", "0", "--listen", &listen]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("open for writing"), "{text}");
    assert!(!replica.dir().join("volume.taken").exists());
}

/// A volume of upstream's with five snapshots, one of which a revert has left aside, and a head.
fn written(lab: &Lab, on: Option<&Path>, image: &mut Image) -> (Vec<Replica>, Engine, Snapshots) {
    let mut options = ReplicaOptions { revision_counter: true, ..ReplicaOptions::new(SIZE) };
    options.flags.extend(on.map(|path| format!("--backing-file={}", path.display())));
    let replicas = vec![
        lab.replica(Kind::Stock, "", "r0", &options),
        lab.replica(Kind::Stock, "", "r1", &options),
    ];
    let engine = lab.engine("", &engine_options(), &each(&replicas));
    let mut snapshots = Snapshots::new();
    for name in SNAPSHOTS {
        exercise(&engine.data(), image, MIX, 80);
        engine.snapshot(name);
        snapshots.push((name, image.clone()));
        if name == "s3" {
            engine.revert("s2");
            *image = snapshots[1].1.clone();
        }
    }
    (replicas, engine, snapshots)
}

fn has_come_over(replica: &Replica) -> bool {
    !replica.dir().join("volume.taken").exists()
}

/// The directory becomes upstream's again, by a command that is killed in the middle of it, if it is slow enough, and given
/// again.
fn export(lab: &Lab, replica: &Replica) {
    let run = || {
        let mut command = Command::new(ours());
        command.args(["--volume-name", &lab.volume(""), "replica-export"]).arg(replica.dir());
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut killed = run();
    let place = replica.dir().join("volume.export");
    eventually_within(Duration::from_secs(30), "the export begins", || {
        place.exists() || killed.try_wait().unwrap().is_some()
    });
    killed.kill().unwrap();
    killed.wait().unwrap();
    if replica.dir().join("volume.dbs").exists() || place.exists() {
        let output = run().wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

fn there_and_back(test: &str, on_image: bool) {
    let Some(lab) = Lab::new(test) else { return };
    if Kind::Ours.really() != Kind::Ours {
        return;
    }
    let on = on_image.then(|| base(&lab));
    let mut image = Image::zero(SIZE);
    if let Some((_, bytes)) = &on {
        image.wrote(0, bytes);
    }
    let path = on.as_ref().map(|(path, _)| &**path);
    let (mut replicas, engine, mut snapshots) = written(&lab, path, &mut image);
    let load = Load::start(&engine.data(), image, MIX);
    load.go_on(40);
    refused_beside(&lab, &mut replicas[0]);
    load.go_on(40);
    engine.all_rw(&each(&replicas));
    let mut image = load.stop();
    engine.stop();
    // One is left as it was when it was killed.
    replicas[0].kill();
    replicas[1].stop(Signal::SIGTERM);

    let mut replicas = again(&lab, replicas, Kind::Ours, &["--take-over", FIRST_RATE]);
    let engine = lab.engine("", &engine_options(), &each(&replicas));
    engine.all_rw(&each(&replicas));
    check_each("at once", &mut image, &each(&replicas));
    assert_eq!(engine.snapshots(), ["s5", "s4", "s2", "s1"]);
    let load = Load::start(&engine.data(), image, Mix { may_fail: true, ..MIX });
    load.go_on(60);
    engine.snapshot("amid");
    load.go_on(60);
    // What nobody has acknowledged would be another thing on each of them, as upstream's engine does not make them equal.
    let mut image = load.held(|image| {
        replicas.iter_mut().for_each(Replica::kill);
        engine.kill();
        image
    });
    drop(load);
    assert!(!replicas.iter().any(has_come_over), "they were killed in the middle of it");

    let mut replicas = again(&lab, replicas, Kind::Ours, &["--take-over", "0"]);
    let engine = lab.engine("", &engine_options(), &each(&replicas));
    engine.all_rw(&each(&replicas));
    check_each("after they were killed", &mut image, &each(&replicas));
    let load = Load::start(&engine.data(), image, MIX);
    eventually_within(Duration::from_secs(120), "all of it comes over", || {
        replicas.iter().all(has_come_over)
    });
    load.go_on(60);
    let mut image = load.stop();
    check_each("all has come over", &mut image, &each(&replicas));
    engine.snapshot("later");
    snapshots.push(("later", image.clone()));
    check_snapshots(&engine, &each(&replicas), &mut snapshots);
    exercise(&engine.data(), &mut image, MIX, 80);
    engine.stop();
    for replica in &mut replicas {
        replica.stop(Signal::SIGTERM);
        export(&lab, replica);
    }

    let replicas = again(&lab, replicas, Kind::Stock, &[]);
    let engine = lab.engine("", &engine_options(), &each(&replicas));
    engine.all_rw(&each(&replicas));
    check_each("given back", &mut image, &each(&replicas));
    exercise(&engine.data(), &mut image, MIX, 80);
    check_snapshots(&engine, &each(&replicas), &mut snapshots);
}

#[test]
fn upstream_s_volume_is_served_from_its_files_and_given_back() {
    there_and_back("upstream_s_volume_is_served_from_its_files_and_given_back", false);
}

#[test]
fn upstream_s_volume_on_an_image_is_served_from_its_files_and_given_back() {
    there_and_back("upstream_s_volume_on_an_image_is_served_from_its_files_and_given_back", true);
}
