//! The commands that steer a volume, on a controller and replicas that only pretend: what is asked of
//! whom and in which order, what is printed, and how it fails. What upstream's command line does in the
//! same places is compared in `tests/engine/cli.rs`.

use crate::support::*;
use longhorn::client::{Engine, RebuildOptions, SyncOptions};
use longhorn_wire::proto::controller::ReplicaMode;
use longhorn_wire::proto::ptypes::*;
use tonic::Code;

const SIZES: [&str; 4] = ["--size", "64mb", "--current-size", "67108864"];

fn file(name: &str) -> SyncFileInfo {
    SyncFileInfo { from_file_name: name.into(), to_file_name: name.into(), actual_size: 4096 }
}

fn add<'a>(stage: &'a Stage, index: usize, more: &[&'a str]) -> Vec<&'a str> {
    [&["add-replica", &stage.addresses[index]], &SIZES[..], more].concat()
}

#[test]
fn a_replica_is_added_in_upstream_s_order() {
    let stage = Stage::new(4, 3);
    stage.world().files = vec![file("volume-snap-a.img"), file("volume-snap-a.img.meta")];
    stage.world().limit = 2;
    // Smaller than the volume, and the process ended during an earlier rebuild.
    stage.with(3, |new| {
        new.replica.rebuilding = true;
        new.replica.size = (SIZE / 2).to_string();
    });
    let more = ["--replica-instance-name", "i", "--fast-sync", "--grpc-timeout-seconds", "60"];
    assert_eq!(stage.prints(&add(&stage, 3, &more)), "");
    assert_eq!(
        stage.asked(),
        [
            "ctl VolumeGet",
            "r3 ReplicaGet as i",
            "r3 ReplicaOpen as i",
            "r3 ReplicaExpand as i 67108864",
            "r3 ReplicaClose as i",
            "r3 ReplicaGet as i",
            "r3 ReplicaOpen as i",
            "r3 RebuildingSet as i false",
            "r3 ReplicaClose as i",
            "ctl ControllerReplicaCreate Wo snapshot=true",
            "ctl ReplicaList",
            "ctl VersionDetailGet",
            "ctl ReplicaRebuildConcurrentSyncLimitGet",
            "r2 ReplicaGet",
            "r1 ReplicaGet",
            "r3 RebuildingSet as i true",
            "ctl ReplicaPrepareRebuild",
            "r3 FilesSync as i from=r1,r2 files=2 fast=true http=5 grpc=60 to=127.0.0.1",
            "r3 ReplicaReload as i",
            "ctl ReplicaVerifyRebuild",
            "r3 RebuildingSet as i false",
        ]
    );
    assert_eq!(stage.world().listed[3].1, ReplicaMode::Rw);
}

/// Found by review: if it ended then, a replica that lacked most was taken for complete.
#[test]
fn a_replica_that_is_to_be_filled_again_stays_marked() {
    let stage = Stage::new(2, 1);
    stage.world().files = vec![file("volume-snap-a.img"), file("volume-snap-a.img.meta")];
    stage.with(1, |new| (new.replica.rebuilding, new.replica.dbs) = (true, Some(Facts::default())));
    stage.prints(&add(&stage, 1, &[]));
    let asked = stage.asked();
    let marks: Vec<_> = asked.iter().filter(|asked| asked.contains("RebuildingSet")).collect();
    assert_eq!(marks, ["r1 RebuildingSet true", "r1 RebuildingSet false"]);
    assert!(!asked.iter().any(|asked| asked.contains("ReplicaOpen")), "{asked:?}");
}

/// Found by review: the controller had said so before, which an older replica refuses to be told again.
#[test]
fn a_replica_that_is_known_to_be_complete_may_refuse_to_be_told() {
    for (dbs, fails) in [(Some(Facts::default()), false), (None, true)] {
        let stage = Stage::new(2, 1);
        stage.with(1, |new| new.replica.dbs = dbs);
        stage.refuse("r1 RebuildingSet false", Code::Unknown, "cannot set from state open");
        if fails {
            let text = stage.fails(&add(&stage, 1, &[]));
            assert!(text.contains("cannot set from state open"), "{text}");
        } else {
            stage.prints(&add(&stage, 1, &[]));
        }
    }
}

/// Found by review: where a purge had ended on one replica and not on another, a new one got layers of both.
#[test]
fn sources_whose_trees_differ_from_the_last_are_left_out() {
    let disk = |parent: &str| DiskInfo { parent: parent.to_owned(), ..DiskInfo::default() };
    let (a, b) = ("volume-snap-a.img", "volume-snap-b.img");
    let stage = Stage::new(5, 4);
    stage.world().limit = 4;
    for (index, below) in [(0, ""), (1, a), (2, ""), (3, "")] {
        stage.with(index, |source| {
            let head = (format!("volume-head-00{index}.img"), disk(b));
            source.replica.disks = [(b.to_owned(), disk(below)), head].into();
            if index == 1 {
                source.replica.disks.insert(a.to_owned(), disk(""));
            }
        });
    }
    stage.prints(&add(&stage, 4, &[]));
    let asked = stage.asked().join("\n");
    assert!(asked.contains("from=r0,r2,r3 "), "{asked}");
    // Nor are they asked where something is damaged.
    let stage = Stage::new(3, 2);
    stage.with(0, |source| source.replica.disks = [(a.to_owned(), disk(""))].into());
    stage.refuse("FilesSync", Code::DataLoss, "damaged");
    let text = stage.fails(&add(&stage, 2, &[]));
    assert!(text.contains("damaged"), "{text}");
    let asked = stage.asked();
    let syncs = asked.iter().filter(|asked| asked.contains("FilesSync"));
    assert!(syncs.map(|asked| asked.contains("from=r1 ")).eq([true]), "{asked:?}");
}

#[test]
fn older_controllers_have_no_limit() {
    let stage = Stage::new(3, 2);
    stage.world().controller_api = 5;
    stage.prints(&add(&stage, 2, &[]));
    let asked = stage.asked().join("\n");
    assert!(!asked.contains("LimitGet") && asked.contains("from=r0,r1"), "{asked}");
}

#[test]
fn the_first_replica_starts_the_volume() {
    let stage = Stage::new(2, 0);
    stage.prints(&add(&stage, 0, &[]));
    assert_eq!(stage.asked(), ["ctl VolumeGet", "ctl VolumeStart 1 67108864/67108864"]);
    let text = stage.fails(&[&["start", "tcp://a:1"], &SIZES[..]].concat());
    assert!(text.contains("cannot add multiple replicas if volume is already up"), "{text}");
}

/// Each step that fails ends it, and says what it was.
#[test]
fn a_rebuild_ends_at_the_step_that_fails() {
    for (method, said, last) in [
        ("ctl VolumeGet", "failed to get volume ctl", "ctl VolumeGet"),
        (
            "ControllerReplicaCreate",
            "failed to create replica r1 for volume ctl",
            "Wo snapshot=true",
        ),
        (
            "ReplicaPrepareRebuild",
            "failed to prepare rebuilding replica r1 for volume ctl",
            "Rebuild",
        ),
        ("FilesSync", "failed to sync files [{FromFileName:volume-snap-a.img", "to=127.0.0.1"),
        ("ReplicaReload", "failed to reload replica at-r1", "ReplicaReload"),
        ("ReplicaVerifyRebuild", "failed to verify rebuilt replica r1 for", "VerifyRebuild"),
    ] {
        let stage = Stage::new(2, 1);
        stage.world().files = vec![file("volume-snap-a.img")];
        stage.refuse(method, Code::Unknown, "not today");
        let text = stage.fails(&add(&stage, 1, &[]));
        let start = "msg=\"Error running add replica command\" error=\"";
        assert!(text.starts_with(&format!("{start}{said}")), "{method}: {text}");
        assert!(text.ends_with(": rpc error: code = Unknown desc = not today\""), "{text}");
        assert!(stage.asked().last().unwrap().ends_with(last), "{method}");
    }
    let stage = Stage::new(2, 1);
    stage.with(1, |new| new.replica.size = (SIZE * 2).to_string());
    let text = stage.fails(&add(&stage, 1, &[]));
    assert!(text.contains("cannot add new replica larger than size 67108864"), "{text}");
    // Found by review: it stayed open, and could not be added until its process was started again.
    let stage = Stage::new(2, 1);
    stage.with(1, |new| new.replica.size = (SIZE / 2).to_string());
    stage.refuse("ReplicaExpand", Code::Unknown, "not today");
    assert!(stage.fails(&add(&stage, 1, &[])).contains("not today"));
    assert_eq!(stage.asked().last().unwrap(), "r1 ReplicaClose");
    // A list with the head in it would overwrite what is being written.
    let stage = Stage::new(2, 1);
    stage.world().files = vec![file("volume-head-001.img")];
    let text = stage.fails(&add(&stage, 1, &[]));
    assert!(text.contains("sync file list shouldn't contain volume head"), "{text}");
    // Found by review: nor could any list with a snapshot whose name only looks like it.
    stage.world().files = vec![file("volume-snap-my-volume-head-001.img")];
    stage.world().listed.truncate(1);
    stage.prints(&add(&stage, 1, &[]));
    let stage = Stage::new(2, 1);
    stage.set_mode(0, ReplicaMode::Err);
    let text = stage.fails(&add(&stage, 1, &[]));
    assert!(text.contains("no available RW replica to rebuild from"), "{text}");
}

#[test]
fn an_expansion_that_fails_is_told_in_words() {
    let stage = Stage::new(2, 1);
    stage.with(1, |new| new.replica.size = (SIZE / 2).to_string());
    let json = r#"{"code":"FunctionFailedRollbackFailed","message":"m","rollbackMessage":"r"}"#;
    stage.refuse("ReplicaExpand", Code::Internal, json);
    let text = stage.fails(&add(&stage, 1, &[]));
    let said = "error: code = FunctionFailedRollbackFailed, message = failed to expand replica \
                at-r1: m, rollbackMessage: r";
    assert!(text.contains(said), "{text}");
}

#[test]
fn replicas_of_a_restored_volume_are_added_empty() {
    let stage = Stage::new(2, 1);
    stage.prints(&add(&stage, 1, &["--restore"]));
    assert_eq!(
        stage.asked(),
        [
            "ctl VolumeGet",
            "r1 ReplicaGet",
            "r1 ReplicaClose",
            "ctl ControllerReplicaCreate Wo snapshot=false"
        ]
    );
    let stage = Stage::new(2, 1);
    stage.with(1, |new| new.replica.size = "4096".to_owned());
    let text = stage.fails(&add(&stage, 1, &["--restore"]));
    assert!(text.contains("rebuilding replica size 4096 is not the same as volume size"), "{text}");
}

#[test]
fn replicas_are_listed_with_their_chains() {
    let stage = Stage::new(3, 3);
    stage.with(0, |one| one.replica.chain.push("volume-snap-a.img".to_owned()));
    stage.set_mode(1, ReplicaMode::Err);
    stage.set_mode(2, ReplicaMode::Wo);
    stage.refuse("r2 ReplicaGet", Code::Unavailable, "gone");
    let printed = stage.prints(&["ls"]);
    let words: Vec<Vec<_>> = printed.lines().map(|line| line.split(' ').collect()).collect();
    let words: Vec<Vec<_>> =
        words.iter().map(|line| line.iter().filter(|word| !word.is_empty()).collect()).collect();
    assert_eq!(words[0], [&"ADDRESS", &"MODE", &"CHAIN"]);
    assert_eq!(words[1], [&"r0", &"RW", &"[volume-head-000.img", &"volume-snap-a.img]"]);
    assert_eq!((&words[2][..], &words[3][..]), (&[&"r1", &"ERR"][..], &[&"r2", &"WO"][..]));
    assert!(printed.lines().nth(2).unwrap().ends_with("ERR  "), "{printed:?}");
}

#[test]
fn snapshots_are_those_that_all_have() {
    let stage = Stage::new(3, 3);
    let chain = |names: &[&str]| {
        let disks = names.iter().map(|name| format!("volume-snap-{name}.img"));
        ["volume-head-000.img".to_owned()].into_iter().chain(disks).collect::<Vec<_>>()
    };
    stage.with(0, |one| one.replica.chain = chain(&["c", "b", "a"]));
    stage.with(1, |one| one.replica.chain = chain(&["c", "a", "x"]));
    stage.with(2, |one| one.replica.chain = chain(&[]));
    stage.set_mode(2, ReplicaMode::Wo);
    assert_eq!(stage.prints(&["snapshot", "ls"]), "ID\nc\na\n");
    assert_eq!(stage.prints(&["snapshots"]), "ID\nc\na\n");
    // Those of a replica that does not answer are unknown, not missing.
    stage.refuse("r1 ReplicaGet", Code::Unavailable, "gone");
    let text = stage.fails(&["snapshot", "ls"]);
    assert!(
        text.starts_with("msg=\"Error running ls snapshot command\" error=\"failed to get"),
        "{text}"
    );
}

#[test]
fn all_layers_are_shown() {
    let stage = Stage::new(2, 2);
    assert_eq!(stage.prints(&["snapshot", "info"]), "null\n");
    let disk = |parent: &str, labels: &[(&str, &str)]| DiskInfo {
        parent: parent.to_owned(),
        created: "2026-08-21T10:00:00Z".to_owned(),
        size: "4096".to_owned(),
        labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        user_created: true,
        ..DiskInfo::default()
    };
    stage.with(1, |one| {
        one.replica.disks = [
            ("volume-snap-a.img".to_owned(), disk("", &[("k", "<v>")])),
            ("volume-head-001.img".to_owned(), disk("volume-snap-a.img", &[])),
        ]
        .into();
        let children = &mut one.replica.disks.get_mut("volume-snap-a.img").unwrap().children;
        children.insert("volume-head-001.img".to_owned(), true);
    });
    stage.with(0, |one| {
        one.replica.disks = [("volume-head-001.img".to_owned(), disk("", &[]))].into();
    });
    let expected = "{\n\t\"a\": {\n\t\t\"name\": \"a\",\n\t\t\"parent\": \"\",\n\t\t\"children\": \
                    {\n\t\t\t\"volume-head\": true\n\t\t},\n\t\t\"removed\": false,\n\t\t\
                    \"usercreated\": true,\n\t\t\"created\": \"2026-08-21T10:00:00Z\",\n\t\t\
                    \"size\": \"4096\",\n\t\t\"labels\": {\n\t\t\t\"k\": \"\\u003cv\\u003e\"\n\t\t}\
                    \n\t},\n";
    let printed = stage.prints(&["snapshot", "info"]);
    assert!(printed.starts_with(expected), "{printed}");
    assert!(printed.contains("\"parent\": \"a\",\n\t\t\"children\": {},"), "{printed}");
}

#[test]
fn snapshots_are_taken_and_removed() {
    let stage = Stage::new(2, 2);
    assert_eq!(
        stage.prints(&["snapshot", "create", "s", "--label", "b=2", "--label", "a=1"]),
        "s\n"
    );
    assert_eq!(stage.prints(&["snapshot", "create", "--freeze-fs"]), "made-up\n");
    assert_eq!(
        stage.asked(),
        [
            "ctl VolumeSnapshot \"s\" {\"a\": \"1\", \"b\": \"2\"} false",
            "ctl VolumeSnapshot \"\" {} true"
        ]
    );
    let text = stage.fails(&["snapshot", "create", "--label", "x"]);
    let reason = "cannot parse backup labels: invalid label not in <key>=<value> format x";
    assert_eq!(text, format!("msg=\"Error running create snapshot command\" error=\"{reason}\""));
    assert_eq!(stage.asked(), [""; 0]);

    assert_eq!(stage.prints(&["snapshot", "rm", "s"]), "");
    assert_eq!(
        stage.asked(),
        [
            "ctl ReplicaList",
            "r0 ReplicaGet",
            "r1 ReplicaGet",
            "r0 DiskMarkAsRemoved s",
            "r0 SnapshotHashCancel",
            "r1 DiskMarkAsRemoved s",
            "r1 SnapshotHashCancel",
        ]
    );
    // One that fails does not keep the others.
    stage.with(1, |one| one.replica.rebuilding = true);
    let output = stage.run(&["snapshot", "rm", "s", "t"]);
    let errors = stage.plain(String::from_utf8(output.stderr).unwrap());
    for name in ["s", "t"] {
        let line =
            format!("Failed to delete {name}: cannot remove a snapshot because r1 is rebuilding\n");
        assert!(errors.contains(&line), "{errors}");
    }
}

#[test]
fn a_purge_begins_everywhere_or_nowhere() {
    let stage = Stage::new(2, 2);
    assert_eq!(stage.prints(&["snapshot", "purge"]), "");
    let mut asked = stage.asked();
    // Both at once.
    asked[5..].sort();
    assert_eq!(asked[5..], ["r0 SnapshotPurge", "r1 SnapshotPurge"]);

    stage.with(0, |one| one.replica.rebuilding = true);
    stage.with(1, |one| one.purge.is_purging = true);
    let text = stage.fails(&["snapshot", "purge"]);
    assert_eq!(
        text,
        "msg=\"Error running purge snapshot command\" error=\"failed to purge snapshots: r0: cannot \
         purge snapshots because r0 is rebuilding; r1: cannot purge snapshots because r1 is already \
         purging snapshots\""
    );
    assert_eq!(stage.prints(&["snapshot", "purge", "--skip-if-in-progress"]), "");
    assert!(!stage.asked().iter().any(|asked| asked.ends_with("SnapshotPurge")));

    // One that begins in between.
    stage.with(0, |one| one.replica.rebuilding = false);
    stage.with(1, |one| one.purge.is_purging = false);
    stage.refuse("r1 SnapshotPurge", Code::Unknown, "replica is already purging snapshots");
    assert_eq!(stage.prints(&["snapshot", "purge", "--skip-if-in-progress"]), "");
    let text = stage.fails(&["snapshot", "purge"]);
    assert!(
        text.contains("r1: replica r1 failed to execute snapshot purge: failed to start"),
        "{text}"
    );

    stage.refuse("r0 SnapshotPurgeStatus", Code::Unknown, "lost");
    let status = stage.prints(&["snapshot", "purge-status"]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let text = status["r0"]["error"].as_str().unwrap();
    assert!(text.starts_with("failed to get snapshot purge status of r0: failed to get"), "{text}");
    assert_eq!(status["r1"]["error"], "");
}

#[test]
fn hashing_needs_replicas_that_are_alike() {
    let stage = Stage::new(2, 2);
    assert_eq!(stage.prints(&["snapshot", "hash", "s", "--rehash"]), "");
    let asked = stage.asked();
    assert!(asked.contains(&"r0 SnapshotHash s true".to_owned()), "{asked:?}");
    let prefix = "failed to hash snapshot s: cannot request hashing snapshot because r1";
    stage.with(1, |one| one.hashing = true);
    assert!(stage.fails(&["hash", "s"]).contains(&format!("{prefix} is hashing snapshot")));
    stage.with(1, |one| one.replica.rebuilding = true);
    assert!(stage.fails(&["hash", "s"]).contains(&format!("{prefix} is rebuilding")));

    stage.with(0, |one| {
        one.hash = SnapshotHashStatusResponse {
            state: "complete".to_owned(),
            checksum: "0c0c2183ae10027f".to_owned(),
            silently_corrupted: true,
            ..Default::default()
        };
    });
    let status = stage.prints(&["snapshot", "hash-status", "s"]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["r0"]["checksum"], "0c0c2183ae10027f");
    assert_eq!(status["r0"]["silentlyCorrupted"], true);
    assert_eq!(
        (&status["r1"]["state"], &status["r1"]["error"]),
        (&"error".into(), &"replica r1 is rebuilding".into())
    );
}

#[test]
fn a_clone_comes_from_a_usable_replica() {
    let (stage, source) = (Stage::new(2, 2), Stage::new(2, 2));
    source.set_mode(0, ReplicaMode::Err);
    let from = ["--from-controller-address", &source.url, "--from-volume-name", VOLUME];
    let args = [&["snapshot", "clone", "--snapshot-name", "s"], &from[..]].concat();
    assert_eq!(stage.prints(&args), "");
    let mut asked = stage.asked();
    asked.sort();
    let clone = format!("SnapshotClone s of vol from {}", source.addresses[1]);
    let own = ["ctl ReplicaList".to_owned(), "ctl VolumeGet".to_owned()];
    assert_eq!(asked, [&own[..], &[format!("r0 {clone}"), format!("r1 {clone}")]].concat());
    // Found by review: it was filled under a file system that was mounted.
    stage.world().volume.frontend_state = "up".to_owned();
    let text = stage.fails(&args);
    assert!(text.contains("volume frontend enabled, cannot perform snapshot clone"), "{text}");
    assert_eq!(stage.asked(), ["ctl VolumeGet"]);
    stage.world().volume.frontend_state.clear();

    stage.refuse("r1 SnapshotClone", Code::Unknown, "cannot find snapshot s");
    let text = stage.fails(&args);
    assert!(text.contains("error=\"r1: failed to clone snapshot s from replica "), "{text}");
    stage.set_mode(1, ReplicaMode::Wo);
    let text = stage.fails(&args);
    assert!(text.contains("cannot do snapshot clone because replica r1 in WO mode."), "{text}");
    source.set_mode(1, ReplicaMode::Wo);
    let text = stage.fails(&args);
    assert!(text.contains("cannot find a RW replica in the source volume"), "{text}");
}

#[test]
fn the_status_of_rebuilds_is_of_replicas_that_are_filled() {
    let stage = Stage::new(3, 3);
    assert_eq!(stage.prints(&["rebuild-status"]), "{}\n");
    stage.set_mode(1, ReplicaMode::Wo);
    stage.set_mode(2, ReplicaMode::Wo);
    stage.with(1, |one| {
        one.rebuild.is_rebuilding = true;
        one.rebuild.from_replica_address = "tcp://old:1".to_owned();
    });
    let printed = stage.prints(&["replica-rebuild-status"]);
    assert!(
        printed.contains("\"fromReplicaAddressList\": [\n\t\t\t\"tcp://old:1\"\n\t\t]"),
        "{printed}"
    );
    assert!(printed.contains("\"fromReplicaAddressList\": null"), "{printed}");
    stage.with(1, |one| one.restore.dest_file_name = "volume-snap-x.img".to_owned());
    assert_eq!(stage.prints(&["rebuild-status"]), "{}\n");
}

#[test]
fn the_volume_is_printed_with_upstream_s_keys() {
    let stage = Stage::new(1, 1);
    let printed = stage.prints(&["info"]);
    let keys: Vec<_> = printed.lines().filter_map(|line| line.trim().split('"').nth(1)).collect();
    assert_eq!(
        keys,
        [
            "name",
            "size",
            "replicaCount",
            "endpoint",
            "frontend",
            "frontendState",
            "isExpanding",
            "lastExpansionError",
            "lastExpansionFailedAt",
            "unmapMarkSnapChainRemoved",
            "snapshotMaxCount",
            "SnapshotMaxSize",
        ]
    );
    assert!(printed.starts_with("{\n\t\"name\": \"vol\",\n\t\"size\": 67108864,\n"), "{printed}");
    stage.refuse("VolumeGet", Code::Cancelled, "no");
    let text = stage.fails(&["info"]);
    let reason = "failed to get volume ctl: rpc error: code = Canceled desc = no";
    assert_eq!(text, format!("msg=\"Error running info command: {reason}\""));
}

#[test]
fn commands_without_what_they_need_say_so() {
    let stage = Stage::new(1, 1);
    for (args, reason) in [
        (&["add"][..], "replica address is required"),
        (&["rm"], "replica address is required"),
        (&["add", "a:1"], "size is required"),
        (&["add", "a:1", "--size", "1"], "current-size is required"),
        (&["add", "a:1", "--size", "1x", "--current-size", "1"], "invalid suffix: 'x'"),
        (&["update", "a:1", "--mode", "RO"], "unsupported replica mode: RO"),
        (&["snapshot", "revert"], "snapshot name is required"),
        (&["snapshot", "hash-status"], "snapshot name is required"),
        (&["snapshot", "clone"], "missing required parameter --snapshot-name"),
        (&["frontend", "start"], "missing required parameter frontendName"),
        (&["unmap-mark-snap"], "this option is not specified"),
        (&["profiler", "enable", "--port", "3"], "port number should be bigger than 30000"),
    ] {
        let text = stage.fails(args);
        assert!(text.contains(reason), "{args:?}: {text}");
    }
    assert_eq!(stage.asked(), [""; 0]);
    for args in [&["export", "x"][..], &["snapsots"]] {
        let output = stage.run(args);
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("not supported") || text.contains("unrecognized command"), "{text}");
    }
}

#[test]
fn an_address_where_nobody_is_is_said() {
    let stage = Stage::new(1, 1);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let add = RebuildOptions {
        address: format!("tcp://{nobody}"),
        instance: String::new(),
        size: SIZE,
        current_size: SIZE,
        fast_sync: false,
        sync: SyncOptions { http_timeout: 5, grpc_timeout: 0 },
    };
    let error = stage.runtime.block_on(async {
        Engine::new(&stage.url, VOLUME, "").unwrap().add_replica(&add).await.unwrap_err()
    });
    let text = error.to_string();
    let said = format!("failed to get replica {nobody}: rpc error: code = Unavailable desc = ");
    assert!(text.starts_with(&said), "{text}");
}
