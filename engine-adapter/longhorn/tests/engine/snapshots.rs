//! Snapshots: how they are listed, reverted to, removed and purged, and that each keeps what it held.

use crate::support::{Engine, Image, Kind, Lab, Load, MIB, Mix, Replica, check_each, eventually};
use crate::{Snapshots, check_snapshots, each, volume};
use serde_json::json;

const SIZE: usize = 16 * MIB;

fn take(engine: &Engine, image: &mut Image, name: &'static str, snapshots: &mut Snapshots) {
    engine.exercise(image, 200);
    engine.snapshot(name);
    snapshots.push((name, image.clone()));
}

/// Removed for good, or only marked, as `tree` shows it.
fn removed(engine: &Engine, name: &str) -> Option<bool> {
    engine.tree().get(name).map(|disk| disk["removed"] == true)
}

#[test]
fn snapshots_are_listed_and_reverted_to() {
    let Some(lab) = Lab::new("snapshots_are_listed_and_reverted_to") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let replicas = each(&replicas);
    let (mut image, mut snapshots) = (Image::zero(SIZE), Snapshots::new());
    take(&engine, &mut image, "s1", &mut snapshots);
    take(&engine, &mut image, "s2", &mut snapshots);
    engine.exercise(&mut image, 100);
    engine.cli(&["snapshot", "create", "s3", "--label", "a=b", "--label", "c=d"]);
    snapshots.push(("s3", image.clone()));
    listings_are_right(&engine);

    let text = engine.try_cli(&["snapshot", "create", "s2"]).unwrap_err();
    assert!(text.contains("snapshot volume-snap-s2.img is already existing"), "{text}");
    let text = engine.try_cli(&["snapshot", "revert", "s1"]).unwrap_err();
    assert!(text.contains("volume frontend enabled"), "{text}");
    engine.all_rw(&replicas);

    engine.exercise(&mut image, 100);
    engine.revert("s1");
    let mut branch = snapshots[0].1.clone();
    check_each("after the revert", &mut branch, &replicas);
    assert_eq!(engine.snapshots(), ["s1"]);
    take(&engine, &mut branch, "b1", &mut snapshots);
    assert_eq!(engine.snapshots(), ["b1", "s1"]);
    let tree = engine.tree();
    assert_eq!(tree["s1"]["children"], json!({"s2": true, "b1": true}));
    assert_eq!(tree["b1"]["children"], json!({"volume-head": true}));
    check_snapshots(&engine, &replicas, &mut snapshots);
    engine.revert("s3");
    assert_eq!(engine.snapshots(), ["s3", "s2", "s1"]);
    snapshots[2].1.check("s3 again", &engine.data());
}

fn listings_are_right(engine: &Engine) {
    let chain =
        ["volume-head-003.img", "volume-snap-s3.img", "volume-snap-s2.img", "volume-snap-s1.img"];
    for listed in engine.ls() {
        assert_eq!(listed.chain, chain);
    }
    assert_eq!(engine.snapshots(), ["s3", "s2", "s1"]);
    let tree = engine.tree();
    assert_eq!(tree.keys().collect::<Vec<_>>(), ["s1", "s2", "s3", "volume-head"]);
    for (name, parent, child) in [("s1", "", "s2"), ("s2", "s1", "s3"), ("s3", "s2", "volume-head")]
    {
        let disk = &tree[name];
        assert_eq!(disk["name"], name);
        assert_eq!(disk["parent"], parent);
        assert_eq!(disk["children"], json!({child: true}));
        assert_eq!((&disk["removed"], &disk["usercreated"]), (&json!(false), &json!(true)));
        let created = disk["created"].as_str().unwrap();
        assert!(
            created.len() == 20 && created.ends_with('Z') && created.starts_with("20"),
            "{created}"
        );
        let size: usize = disk["size"].as_str().unwrap().parse().unwrap();
        assert!(size > 0 && size <= SIZE && size.is_multiple_of(512), "{size}");
    }
    assert_eq!(tree["s3"]["labels"], json!({"a": "b", "c": "d"}));
    assert_eq!(tree["s1"]["labels"], json!({}));
    let head = &tree["volume-head"];
    assert_eq!((&head["parent"], &head["children"]), (&json!("s3"), &json!({})));
    assert_eq!((&head["usercreated"], &head["removed"]), (&json!(false), &json!(false)));
    let info = engine.info();
    assert_eq!((&info["size"], &info["snapshotMaxCount"]), (&json!(SIZE), &json!(250)));
}

#[test]
fn removed_snapshots_are_merged_by_a_purge() {
    let Some(lab) = Lab::new("removed_snapshots_are_merged_by_a_purge") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let replicas = each(&replicas);
    let (mut image, mut snapshots) = (Image::zero(SIZE), Snapshots::new());
    for name in ["s1", "s2", "s3", "s4"] {
        take(&engine, &mut image, name, &mut snapshots);
    }

    // In the middle: gone from the list at once, merged into its child by the purge.
    engine.remove_snapshot("s2");
    assert_eq!(engine.snapshots(), ["s4", "s3", "s1"]);
    assert_eq!(removed(&engine, "s2"), Some(true));
    let text = engine.try_cli(&["snapshot", "create", "s2"]).unwrap_err();
    assert!(text.contains("is already existing"), "{text}");
    image.check("with a removed snapshot", &engine.data());
    engine.purge();
    assert_eq!(removed(&engine, "s2"), None);
    assert_eq!(engine.tree()["s3"]["parent"], "s1");
    snapshots.retain(|(name, _)| *name != "s2");
    image.check("after a purge", &engine.data());
    check_snapshots(&engine, &replicas, &mut snapshots);

    // Right under the head: stays, without what the head overrides, until there is another child.
    engine.exercise(&mut image, 200);
    engine.remove_snapshot("s4");
    engine.purge();
    assert_eq!(removed(&engine, "s4"), Some(true));
    assert_eq!(engine.snapshots(), ["s3", "s1"]);
    engine.exercise(&mut image, 200);
    engine.purge();
    check_each("with a pruned snapshot", &mut image, &replicas);
    snapshots.retain(|(name, _)| *name != "s4");
    take(&engine, &mut image, "s5", &mut snapshots);
    engine.purge();
    assert_eq!(removed(&engine, "s4"), None);
    check_snapshots(&engine, &replicas, &mut snapshots);

    purge_of_branches(&engine, &replicas, image, snapshots);
}

/// Goes on from the chain s1, s3, s5, head.
fn purge_of_branches(
    engine: &Engine,
    replicas: &[&Replica],
    image: Image,
    mut snapshots: Snapshots,
) {
    engine.revert("s3");
    let mut branch = snapshots[1].1.clone();
    take(engine, &mut branch, "b3", &mut snapshots);
    engine.revert("s5");
    // Two children: neither is merged into it, nor is it dropped.
    engine.remove_snapshot("s3");
    engine.purge();
    assert_eq!(removed(engine, "s3"), Some(true));
    let text = engine
        .try_cli(&["frontend", "shutdown"])
        .and_then(|_| engine.try_cli(&["snapshot", "revert", "s3"]));
    assert!(text.unwrap_err().contains("removed"));
    engine.cli(&["frontend", "start", "socket"]);
    snapshots.retain(|(name, _)| *name != "s3");
    check_snapshots(engine, replicas, &mut snapshots);
    // A leaf goes with all it holds, then its parent has one child left.
    engine.revert("s5");
    engine.remove_snapshot("b3");
    engine.purge();
    engine.purge();
    assert_eq!((removed(engine, "b3"), removed(engine, "s3")), (None, None));
    snapshots.retain(|(name, _)| *name != "b3");
    check_snapshots(engine, replicas, &mut snapshots);
    // The root: what it held is now the child's.
    engine.remove_snapshot("s1");
    engine.purge();
    assert_eq!(engine.tree().keys().collect::<Vec<_>>(), ["s5", "volume-head"]);
    assert_eq!(engine.tree()["s5"]["parent"], "");
    let mut image = image;
    check_each("after the last purge", &mut image, replicas);
    engine.hash("s5");
}

#[test]
fn snapshots_are_purged_under_load() {
    let Some(lab) = Lab::new("snapshots_are_purged_under_load") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let replicas = each(&replicas);
    let mut snapshots = Snapshots::new();
    let load = Load::start(&engine.data(), Image::zero(SIZE), Mix::gentle());
    for name in ["s1", "s2", "s3", "s4", "s5"] {
        load.go_on(100);
        load.held(|image| {
            engine.snapshot(name);
            snapshots.push((name, image));
        });
    }
    for name in ["s2", "s3", "s5"] {
        engine.remove_snapshot(name);
    }
    // One more while nothing stands still: all replicas must have frozen the same.
    engine.snapshot("live");
    engine.purge();
    load.go_on(100);
    engine.purge();
    load.go_on(50);
    let mut image = load.stop();
    eventually("s2 and s3 are gone", || {
        removed(&engine, "s2").is_none() && removed(&engine, "s3").is_none()
    });
    check_each("after purges under load", &mut image, &replicas);
    for name in ["s1", "s4", "live"] {
        engine.hash(name);
    }
    engine.snapshot("now");
    snapshots.retain(|(name, _)| ["s1", "s4"].contains(name));
    snapshots.push(("now", image));
    check_snapshots(&engine, &replicas, &mut snapshots);
}
