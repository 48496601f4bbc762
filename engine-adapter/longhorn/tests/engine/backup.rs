//! Backups by replicas of one kind, restored to replicas of the other.

use crate::support::{
    Engine, EngineOptions, Image, Kind, Lab, MIB, ReplicaOptions, check_each, eventually_within,
};
use crate::{each, replicas, volume};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

const SIZE: usize = 16 * MIB;
const LONG: Duration = Duration::from_secs(120);

fn json(engine: &Engine, args: &[&str]) -> Value {
    let out = engine.cli(args);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args:?}: {error}: {out}"))
}

/// Backs a snapshot up; whether that was incremental, and the backup's URL.
pub fn back_up(engine: &Engine, target: &str, snapshot: &str, more: &[&str]) -> (bool, String) {
    let backup = format!("backup-{snapshot}");
    let args = ["backup", "create", snapshot, "--dest", target, "--backup-name", &backup];
    let begun = json(engine, &[&args[..], &["--concurrent-limit", "2"], more].concat());
    let replica = begun["replicaAddress"].as_str().unwrap();
    let mut status = Value::Null;
    eventually_within(LONG, "the backup", || {
        status = json(engine, &["backup", "status", &backup, "--replica", replica]);
        status["state"] != "in_progress"
    });
    assert_eq!(status["state"], "complete", "{status}");
    let url = status["backupURL"].as_str().unwrap().to_owned();
    let shown = json(engine, &["backup", "inspect", &url]);
    assert_eq!((&shown["URL"], &shown["SnapshotName"]), (&url.clone().into(), &snapshot.into()));
    (begun["isIncremental"].as_bool().unwrap(), url)
}

/// Waits until all replicas have restored this backup.
pub fn restored(engine: &Engine, url: &str) {
    eventually_within(LONG, "the restore", || {
        let status = json(engine, &["backup", "restore-status"]);
        let all: BTreeMap<String, Value> = serde_json::from_value(status).unwrap();
        assert!(all.values().all(|status| status.get("error").is_none()), "{all:?}");
        all.values().all(|status| {
            let last = status["lastRestored"].as_str().unwrap();
            status["isRestoring"] == false && !last.is_empty() && url.contains(&format!("={last}&"))
        })
    });
}

fn across(test: &str, from: Kind, to: Kind) {
    let Some(lab) = Lab::new(test) else { return };
    let place = tempfile::tempdir().unwrap();
    let target = format!("vfs://{}", place.path().display());
    let (source, _sources) = volume(&lab, SIZE, &[from, from]);
    let mut image = Image::zero(SIZE);
    let mut backups = Vec::new();
    for (snapshot, requests) in [("s1", 300), ("s2", 100), ("s3", 30)] {
        source.exercise(&mut image, requests);
        source.snapshot(snapshot);
        let (incremental, url) = back_up(&source, &target, snapshot, &[]);
        assert_eq!(incremental, snapshot != "s1");
        backups.push((url, image.clone()));
    }
    let targets = replicas(&lab, "t", SIZE, &[to, to]);
    let engine = lab.engine("t", &EngineOptions::without_frontend(SIZE), &each(&targets));
    for (url, image) in &mut backups[..2] {
        engine.cli(&["backup", "restore", url]);
        restored(&engine, url);
        check_each("what was restored", image, &each(&targets));
    }
    let again = engine.try_cli(&["backup", "restore", &backups[1].0]).unwrap_err();
    assert!(again.contains("already restored backup backup-s2"), "{again}");
    // A replica that comes later is filled by the next restore.
    let late = lab.replica(to, "t", "late", &ReplicaOptions::new(SIZE));
    let (url, size) = (late.url(), SIZE.to_string());
    engine.cli(&["add-replica", &url, "--restore", "--size", &size, "--current-size", &size]);
    let (backup, image) = &mut backups[2];
    engine.cli(&["backup", "restore", backup]);
    restored(&engine, backup);
    engine.cli(&["verify-rebuild-replica", &url]);
    let mut all = each(&targets);
    all.push(&late);
    engine.all_rw(&all);
    check_each("what was restored with a late replica", image, &all);
    engine.stop();
    let engine = lab.engine("t", &EngineOptions::new(SIZE), &all);
    engine.all_rw(&all);
    engine.exercise(image, 100);
    check_each("the volume afterwards", image, &all);
}

#[test]
fn ours_is_restored_to_ours() {
    across("ours_is_restored_to_ours", Kind::Ours, Kind::Ours);
}

#[test]
fn stock_is_restored_to_ours() {
    across("stock_is_restored_to_ours", Kind::Stock, Kind::Ours);
}

#[test]
fn ours_is_restored_to_stock() {
    across("ours_is_restored_to_stock", Kind::Ours, Kind::Stock);
}
