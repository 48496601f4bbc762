//! Every call of the proxy that concerns the engine.

use crate::apart::apart;
use crate::lab::{BLOCK, Engine, SIZE, Side, Start, Whose, block, compare, eventually};
use serde_json::{Value, json};
use tonic::Code;

fn none() -> Value {
    json!({})
}

/// All values of the map `status`.
fn all(answer: &Value, over: impl Fn(&Value) -> bool) -> bool {
    answer["status"].as_object().unwrap().values().all(over)
}

/// A volume with two replicas and a frontend, and its replicas.
fn volume(side: &mut Side, name: &str, frontend: &str) -> (Engine, Vec<String>) {
    let replicas = ["a", "b"].map(|replica| side.replica(name, replica, SIZE));
    let engine = side.engine(name, &Start::new(frontend, &replicas));
    (engine, replicas.to_vec())
}

fn write(side: &Side, volume: &str, blocks: std::ops::Range<u64>, byte: u8) {
    let client = side.client(volume);
    for number in blocks {
        client.write(number * u64::from(BLOCK), &block(byte)).unwrap();
    }
}

fn first_byte(side: &Side, volume: &str) -> u8 {
    side.client(volume).read(0, BLOCK).unwrap()[0]
}

/// What the version says of the program is the program's.
fn version(side: &mut Side, engine: &Engine) {
    let mut answer = side.call(engine, "ServerVersionGet", &none()).unwrap();
    for name in ["version", "gitCommit", "buildDate"] {
        answer["version"][name] = json!(null);
    }
    side.note("ServerVersionGet", Ok(answer));
}

/// Each of the volume's settings.
fn settings(side: &mut Side, engine: &Engine) {
    let flag = "VolumeUnmapMarkSnapChainRemovedSet";
    for enabled in [true, false] {
        side.step(engine, flag, json!({ "unmap_mark_snap": { "enabled": enabled } }));
        side.step(engine, "VolumeGet", none());
    }
    for count in [100, 0, 1, 2, 249, 250, 251] {
        side.step(engine, "VolumeSnapshotMaxCountSet", json!({ "count": { "count": count } }));
        side.step(engine, "VolumeGet", none());
    }
    for size in [1 << 30, 4096, 0] {
        side.step(engine, "VolumeSnapshotMaxSizeSet", json!({ "size": { "size": size } }));
        side.step(engine, "VolumeGet", none());
    }
    // The text is another one.
    let negative =
        side.call(engine, "VolumeSnapshotMaxSizeSet", &json!({ "size": { "size": -1 } }));
    assert_eq!(negative.unwrap_err().code(), Code::Unknown);
}

/// Calls that mean another volume, another instance, or nobody.
fn identities(side: &mut Side, engine: &Engine) {
    let others = [
        Engine { volume: "another".into(), ..engine.clone() },
        Engine { name: "vol-1-e-1".into(), ..engine.clone() },
    ];
    for other in &others {
        for method in ["VolumeGet", "ReplicaList", "SnapshotList", "MetricsGet"] {
            side.step(other, method, none());
        }
    }
    let nobody = Engine { address: "127.0.0.1:1".into(), ..engine.clone() };
    for method in ["VolumeGet", "SnapshotPurgeStatus"] {
        assert_eq!(side.call(&nobody, method, &none()).unwrap_err().code(), Code::Unavailable);
    }
}

fn frontends(side: &mut Side, engine: &Engine) {
    write(side, "vol-1", 0..3, 7);
    for frontend in ["socket", "bogus", ""] {
        let fields = json!({ "frontend_start": { "frontend": frontend } });
        side.step(engine, "VolumeFrontendStart", fields);
    }
    side.step(engine, "VolumeFrontendShutdown", none());
    side.step(engine, "VolumeGet", none());
    side.step(engine, "VolumeFrontendShutdown", none());
    side.step(engine, "VolumeFrontendStart", json!({ "frontend_start": { "frontend": "socket" } }));
    side.step(engine, "VolumeGet", none());
    assert_eq!(first_byte(side, "vol-1"), 7);
}

fn volumes(side: &mut Side) {
    let (engine, replicas) = volume(side, "vol-1", "socket");
    version(side, &engine);
    for method in [
        "VolumeGet",
        "ReplicaList",
        "SnapshotList",
        "ReplicaRebuildingStatus",
        "SnapshotPurgeStatus",
        "SnapshotCloneStatus",
        "BackupRestoreStatus",
        "ReplicaRebuildConcurrentSyncLimitGet",
        "MetricsGet",
    ] {
        side.step(&engine, method, none());
    }
    settings(side, &engine);
    identities(side, &engine);
    frontends(side, &engine);
    // Growth, with the frontend that cannot grow, and without.
    side.step(&engine, "VolumeExpand", json!({ "expand": { "size": SIZE / 2 } }));
    side.step(&engine, "VolumeExpand", json!({ "expand": { "size": SIZE + 1 } }));
    side.step(&engine, "VolumeGet", none());
    side.delete(&engine.name);
    let engine = side.engine("vol-1", &Start::new("", &replicas));
    side.step(&engine, "VolumeGet", none());
    side.step(&engine, "VolumeExpand", json!({ "expand": { "size": 2 * SIZE } }));
    side.settle(&engine, "VolumeGet", none(), |answer| {
        answer["volume"]["size"] == 2 * SIZE && answer["volume"]["isExpanding"] == false
    });
    side.step(&engine, "SnapshotList", none());
    for method in ["BackupRestoreFinish", "ReplicaRebuildingQosSet"] {
        side.step(&engine, method, none());
    }
    let answer =
        side.manager.proxy.call("RemountReadOnlyVolume", &json!({ "volume_name": "vol-1" }));
    side.note("RemountReadOnlyVolume", answer);
    let answer = side.manager.proxy.call("CleanupBackupMountPoints", &none());
    side.note("CleanupBackupMountPoints", answer);
}

#[test]
fn volumes_are_handled_alike() {
    apart("proxy::volumes_are_handled_alike", |lab| compare(lab, volumes));
}

fn snapshot(side: &mut Side, engine: &Engine, name: &str) -> Value {
    let fields = json!({ "snapshot_volume": { "name": name, "labels": { "a/b": "c<&>" } } });
    side.step(engine, "VolumeSnapshot", fields)
}

fn purge(side: &mut Side, engine: &Engine) {
    side.step(engine, "SnapshotPurge", json!({ "skip_if_in_progress": true }));
    side.settle(engine, "SnapshotPurgeStatus", none(), |answer| {
        all(answer, |status| status["is_purging"] == false)
    });
    side.step(engine, "SnapshotList", none());
}

fn snapshots(side: &mut Side) {
    let (engine, _) = volume(side, "vol-1", "socket");
    write(side, "vol-1", 0..8, 1);
    for name in ["s1", "", "a.b_c"] {
        snapshot(side, &engine, name);
        write(side, "vol-1", 2..5, 2);
    }
    // Upstream's controller asks the replicas, ours sees it before: Longhorn's manager goes by these words.
    let again = json!({ "snapshot_volume": { "name": "s1" } });
    let again = side.call(&engine, "VolumeSnapshot", &again).unwrap_err();
    assert!(again.message().contains("snapshot volume-snap-s1.img is already existing"), "{again}");
    let fields = json!({ "snapshot_volume": { "name": "frozen", "freezeFilesystem": true } });
    side.step(&engine, "VolumeSnapshot", fields);
    side.step(&engine, "SnapshotList", none());
    let limit = |size: u64| json!({ "size": { "size": size } });
    side.step(&engine, "VolumeSnapshotMaxSizeSet", limit(4096));
    // No limit, which upstream takes for one that is too small.
    let none_set = side.call(&engine, "VolumeSnapshotMaxSizeSet", &limit(0));
    assert_eq!(none_set.is_ok(), side.whose == Whose::Ours, "{none_set:?}");
    // What an unknown one is called differs in one word.
    side.names.add("stat volume-snap-", "open volume-snap-");
    for name in ["s1", "nosuch", "volume-head", ""] {
        side.step(&engine, "SnapshotHash", json!({ "snapshot_name": name, "rehash": true }));
        let fields = json!({ "snapshot_name": name });
        let over = |answer: &Value| {
            all(answer, |status| status["state"] == "complete" || status["state"] == "error")
        };
        side.settle(&engine, "SnapshotHashStatus", fields, over);
    }
    for names in [json!(["nosuch"]), json!(["frozen"]), json!(["volume-head", "a.b_c"]), json!([])]
    {
        side.step(&engine, "SnapshotRemove", json!({ "names": names }));
    }
    side.step(&engine, "SnapshotList", none());
    purge(side, &engine);
    // With the frontend, then without.
    side.step(&engine, "SnapshotRevert", json!({ "name": "s1" }));
    side.step(&engine, "VolumeFrontendShutdown", none());
    for name in ["nosuch", "", "volume-head", "s1"] {
        side.step(&engine, "SnapshotRevert", json!({ "name": name }));
    }
    side.step(&engine, "SnapshotList", none());
    side.step(
        &engine,
        "VolumeFrontendStart",
        json!({ "frontend_start": { "frontend": "socket" } }),
    );
    assert_eq!(first_byte(side, "vol-1"), 1);
    side.step(&engine, "SnapshotPurge", json!({ "skip_if_in_progress": false }));
    side.settle(&engine, "SnapshotPurgeStatus", none(), |answer| {
        all(answer, |status| status["is_purging"] == false)
    });
    side.step(&engine, "SnapshotList", none());
}

#[test]
fn snapshots_are_handled_alike() {
    apart("proxy::snapshots_are_handled_alike", |lab| compare(lab, snapshots));
}

fn add(address: &str, name: &str) -> Value {
    json!({
        "replica_address": address, "replica_name": name, "size": SIZE, "current_size": SIZE,
        "fast_sync": true, "file_sync_http_client_timeout": 30, "grpc_timeout_seconds": 60,
    })
}

fn replicas(side: &mut Side) {
    let (engine, replicas) = volume(side, "vol-1", "socket");
    write(side, "vol-1", 0..16, 1);
    snapshot(side, &engine, "s1");
    write(side, "vol-1", 4..12, 2);
    for limit in [5, 0, -1, 1] {
        side.step(&engine, "ReplicaRebuildConcurrentSyncLimitSet", json!({ "limit": limit }));
        side.step(&engine, "ReplicaRebuildConcurrentSyncLimitGet", none());
    }
    let third = side.replica("vol-1", "c", SIZE);
    let large = side.replica("vol-1", "d", 2 * SIZE);
    side.step(&engine, "ReplicaAdd", add(&large, "vol-1-r-d"));
    side.step(&engine, "ReplicaAdd", add(&third, "vol-1-r-a"));
    side.step(&engine, "ReplicaAdd", add(&replicas[0], "vol-1-r-a"));
    side.step(&engine, "ReplicaAdd", add("tcp://127.0.0.1:1", ""));
    side.step(&engine, "ReplicaList", none());
    side.step(&engine, "ReplicaAdd", add(&third, "vol-1-r-c"));
    side.step(&engine, "ReplicaList", none());
    side.step(&engine, "ReplicaRebuildingStatus", none());
    side.step(&engine, "SnapshotList", none());
    let which = json!({ "replica_address": third, "replica_name": "vol-1-r-c" });
    side.step(&engine, "ReplicaVerifyRebuild", which.clone());
    side.step(&engine, "ReplicaVerifyRebuild", json!({ "replica_address": "tcp://127.0.0.1:1" }));
    for (replica, mode) in [(&third, 2), (&third, 1), (&third, 0), (&"tcp://x:1".to_owned(), 2)] {
        let fields = json!({ "replica_address": replica, "mode": mode });
        side.step(&engine, "ReplicaModeUpdate", fields);
        side.step(&engine, "ReplicaList", none());
    }
    // With a replica that is ERR.
    side.step(&engine, "SnapshotRemove", json!({ "names": ["s1"] }));
    side.step(&engine, "SnapshotHash", json!({ "snapshot_name": "s1" }));
    side.step(&engine, "SnapshotHashStatus", json!({ "snapshot_name": "s1" }));
    for method in ["SnapshotPurgeStatus", "SnapshotCloneStatus", "BackupRestoreStatus"] {
        side.step(&engine, method, none());
    }
    for _ in 0..2 {
        side.step(&engine, "ReplicaRemove", which.clone());
        side.step(&engine, "ReplicaList", none());
    }
    // For a volume that backups are restored to.
    let mut restored = add(&side.replica("vol-1", "e", SIZE), "vol-1-r-e");
    restored["restore"] = json!(true);
    side.step(&engine, "ReplicaAdd", restored);
    side.step(&engine, "ReplicaList", none());
    side.step(&engine, "ReplicaRebuildingStatus", none());
    // A process that the manager ends under the volume.
    side.delete("vol-1-r-b");
    eventually("the lost replica shows", || {
        let list = side.call(&engine, "ReplicaList", &none()).unwrap();
        list.to_string().contains("ERR")
    });
    side.step(&engine, "ReplicaList", none());
    side.step(&engine, "VolumeGet", none());
    side.step(&engine, "SnapshotList", none());
    assert_eq!(first_byte(side, "vol-1"), 1);
}

#[test]
fn replicas_are_handled_alike() {
    apart("proxy::replicas_are_handled_alike", |lab| compare(lab, replicas));
}

fn clones(side: &mut Side) {
    let (source, _) = volume(side, "vol-1", "socket");
    write(side, "vol-1", 0..16, 1);
    snapshot(side, &source, "s1");
    write(side, "vol-1", 0..16, 2);
    let (target, _) = volume(side, "vol-2", "");
    let clone = |snapshot: &str, volume: &str| {
        json!({
            "from_engine_address": source.address, "from_engine_name": source.name,
            "from_volume_name": volume, "snapshot_name": snapshot,
            "file_sync_http_client_timeout": 30, "grpc_timeout_seconds": 60,
        })
    };
    side.step(&target, "SnapshotClone", clone("s1", "another"));
    side.step(&target, "SnapshotClone", clone("nosuch", "vol-1"));
    side.step(&target, "SnapshotCloneStatus", none());
    side.step(&target, "SnapshotClone", clone("s1", "vol-1"));
    side.settle(&target, "SnapshotCloneStatus", none(), |answer| {
        all(answer, |status| status["state"] == "complete")
    });
    side.step(&target, "SnapshotList", none());
    side.step(
        &target,
        "VolumeFrontendStart",
        json!({ "frontend_start": { "frontend": "socket" } }),
    );
    assert_eq!(first_byte(side, "vol-2"), 1);
}

#[test]
fn clones_are_handled_alike() {
    apart("proxy::clones_are_handled_alike", |lab| compare(lab, clones));
}

fn back_up(side: &mut Side, engine: &Engine, target: &str, snapshot: &str) -> String {
    let name = format!("backup-{snapshot}");
    let fields = json!({
        "backup_name": name, "snapshot_name": snapshot, "backup_target": target,
        "labels": { "why": "test" }, "compression_method": "lz4", "concurrent_limit": 2,
        "storage_class_name": "longhorn",
    });
    let begun = side.step(engine, "SnapshotBackup", fields);
    let replica = begun["replica"].as_str().unwrap_or_default().to_owned();
    let fields = json!({ "backup_name": name, "replica_address": replica });
    let status = side
        .settle(engine, "SnapshotBackupStatus", fields, |answer| answer["state"] != "in_progress");
    side.step(engine, "SnapshotBackupStatus", json!({ "backup_name": name }));
    status["backup_url"].as_str().unwrap_or_default().to_owned()
}

fn backups(side: &mut Side) {
    let place = side.lab().join(format!("{:?}-backups", side.whose));
    std::fs::create_dir(&place).unwrap();
    side.names.add(&place.display().to_string(), "STORE");
    let target = format!("vfs://{}", place.display());
    let (source, _) = volume(side, "vol-1", "socket");
    write(side, "vol-1", 0..16, 1);
    snapshot(side, &source, "s1");
    let first = back_up(side, &source, &target, "s1");
    write(side, "vol-1", 0..4, 2);
    snapshot(side, &source, "s2");
    let second = back_up(side, &source, &target, "s2");
    let wrong = |snapshot: &str, target: &str, envs: Value| {
        json!({
            "backup_name": "wrong", "snapshot_name": snapshot, "backup_target": target,
            "compression_method": "lz4", "concurrent_limit": 1, "envs": envs,
        })
    };
    side.step(&source, "SnapshotBackup", wrong("nosuch", &target, json!([])));
    side.step(&source, "SnapshotBackup", wrong("volume-head", &target, json!([])));
    side.step(&source, "SnapshotBackup", wrong("s1", "bogus://x", json!([])));
    side.step(&source, "SnapshotBackup", wrong("s1", &target, json!(["LD_PRELOAD=x"])));
    side.step(&source, "SnapshotBackupStatus", json!({ "backup_name": "nosuch" }));

    let (restored, _) = volume(side, "vol-2", "");
    let restore = |url: &str| json!({ "url": url, "target": target, "volume_name": "vol-1", "concurrent_limit": 2 });
    side.step(&restored, "BackupRestore", restore(&format!("{first}x")));
    for url in [&first, &second] {
        side.step(&restored, "BackupRestore", restore(url));
        side.settle(&restored, "BackupRestoreStatus", none(), |answer| {
            all(answer, |status| {
                let last = status["last_restored"].as_str().unwrap();
                status["is_restoring"] == false && !last.is_empty() && url.contains(last)
            })
        });
        side.step(&restored, "BackupRestore", restore(url));
        // Upstream's replica allocates whole blocks of the backup, ours what is not zero.
        let mut list = side.call(&restored, "SnapshotList", &none()).unwrap();
        for disk in list["disks"].as_object_mut().unwrap().values_mut() {
            assert!(disk["size"].as_str().unwrap().parse::<u64>().unwrap() <= 2 << 20);
            disk["size"] = json!(null);
        }
        side.note("SnapshotList after the restore", Ok(list));
    }
    side.step(
        &restored,
        "VolumeFrontendStart",
        json!({ "frontend_start": { "frontend": "socket" } }),
    );
    assert_eq!(first_byte(side, "vol-2"), 2);
    side.step(&restored, "BackupRestore", restore(&first));
    let answer = side.manager.proxy.call("CleanupBackupMountPoints", &none());
    side.note("CleanupBackupMountPoints", answer);
}

#[test]
fn backups_are_handled_alike() {
    apart("proxy::backups_are_handled_alike", |lab| compare(lab, backups));
}

/// The calls of the proxy that these tests make, or that only the other data engine has.
#[test]
fn no_call_is_left_out() {
    apart("proxy::no_call_is_left_out", |lab| {
        let manager = crate::lab::Manager::start(lab);
        let source = include_str!("proxy.rs");
        let made = |method: &&str| source.contains(&format!("\"{method}\""));
        let left: Vec<_> = manager
            .proxy
            .methods()
            .filter(|method| !method.starts_with("SPDK"))
            .filter(|method| !made(method))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    });
}
