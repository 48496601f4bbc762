//! Replicas of both kinds in one volume.

use crate::support::exercise;
use crate::support::{
    Engine, EngineOptions, Image, Kind, Lab, Load, MIB, Mix, Replica, ReplicaOptions, check_each,
};
use crate::{Snapshots, check_snapshots, each, volume};
use nix::sys::signal::Signal;
use std::time::Duration;

const SIZE: usize = 16 * MIB;
const LARGER: usize = 20 * MIB;
/// A stock replica mixes up the ends of an unaligned read beyond an old layer's end.
const BLOCKS: Mix = Mix {
    writes: 50,
    unmaps: 0,
    whole_blocks: true,
    unmapped_is_zero: false,
    largest: 128 << 10,
    pause: Duration::ZERO,
    may_fail: false,
};

#[test]
fn both_kinds_hold_the_same() {
    let Some(lab) = Lab::new("both_kinds_hold_the_same") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Stock, Kind::Ours]);
    let all = each(&replicas);
    let (mut image, mut snapshots) = (Image::zero(SIZE), Snapshots::new());
    for name in ["s1", "s2", "s3", "s4"] {
        engine.exercise(&mut image, 250);
        engine.snapshot(name);
        snapshots.push((name, image.clone()));
        engine.hash(name);
    }
    // Nothing written in between: an empty layer.
    engine.snapshot("empty");
    engine.hash("empty");
    same_chains(&engine);

    engine.remove_snapshot("s2");
    engine.remove_snapshot("empty");
    let load = Load::start(&engine.data(), image, Mix::gentle());
    load.go_on(50);
    engine.purge();
    load.go_on(50);
    let mut image = load.stop();
    check_each("after a purge", &mut image, &all);
    snapshots.retain(|(name, _)| *name != "s2");
    for (name, _) in &snapshots {
        engine.hash(name);
    }
    engine.snapshot("now");
    snapshots.push(("now", image));
    same_chains(&engine);
    check_snapshots(&engine, &all, &mut snapshots);
    // Merges of all there is.
    for name in ["s1", "s3", "s4"] {
        engine.remove_snapshot(name);
    }
    engine.purge();
    assert_eq!(engine.tree().keys().collect::<Vec<_>>(), ["now", "volume-head"]);
    engine.hash("now");
    check_snapshots(&engine, &all, &mut snapshots.split_off(3));
}

/// But for the head's number, which each counts by itself.
fn same_chains(engine: &Engine) {
    let listed = engine.ls();
    for each in &listed {
        assert_eq!(each.chain[1..], listed[0].chain[1..]);
    }
}

/// What a volume has that is rebuilt.
#[derive(Clone, Copy, PartialEq)]
enum Furniture {
    /// Few layers: upstream takes six seconds for each.
    Plain,
    /// All a rebuild may meet: a removed snapshot, a branch left by a revert, layers of two sizes.
    Full,
}

/// A volume on one replica, and its snapshots in an order that ends at what the volume holds.
fn furnished(lab: &Lab, kind: Kind, furniture: Furniture) -> (Engine, Replica, Snapshots) {
    let (engine, mut replicas) = volume(lab, SIZE, &[kind]);
    let replica = replicas.remove(0);
    let (mut image, mut snapshots) = (Image::zero(SIZE), Snapshots::new());
    let mut take = |engine: &Engine, image: &mut Image, name: &'static str| {
        exercise(&engine.data(), image, BLOCKS, 150);
        engine.snapshot(name);
        snapshots.push((name, image.clone()));
    };
    take(&engine, &mut image, "s1");
    if furniture == Furniture::Plain {
        take(&engine, &mut image, "s2");
        return (engine, replica, snapshots);
    }
    let mut branch = image.clone();
    take(&engine, &mut branch, "side");
    engine.revert("s1");
    engine.stop();
    let mut engine = lab.engine("", &EngineOptions::without_frontend(SIZE), &[&replica]);
    engine.expand(LARGER);
    engine.stop();
    let engine = lab.engine("", &EngineOptions::new(LARGER), &[&replica]);
    image.grow(LARGER);
    take(&engine, &mut image, "gone");
    take(&engine, &mut image, "s2");
    engine.remove_snapshot("gone");
    for (_, image) in &mut snapshots {
        image.grow(LARGER);
    }
    snapshots.retain(|(name, _)| *name != "gone");
    (engine, replica, snapshots)
}

/// Every layer that is there to stay is the same on both.
fn same_layers(engine: &Engine, furniture: Furniture, more: &[&str]) {
    let layers: &[&str] = match furniture {
        Furniture::Plain => &["s1", "s2"],
        Furniture::Full => &["s1", "s2", "side"],
    };
    for name in layers.iter().chain(more) {
        engine.hash(name);
    }
}

fn rebuild_across(test: &str, from: Kind, to: Kind, furniture: Furniture, fast_sync: bool) {
    let Some(lab) = Lab::new(test) else { return };
    let (engine, source, mut snapshots) = furnished(&lab, from, furniture);
    if fast_sync {
        same_layers(&engine, furniture, &[]);
    }
    let mut image = snapshots.last().unwrap().1.clone();
    let load = Load::start(&engine.data(), image, Mix { whole_blocks: true, ..Mix::gentle() });
    // Smaller than the volume has become: it is expanded before it is rebuilt.
    let mut target = lab.replica(to, "", "new", &ReplicaOptions::new(SIZE));
    engine.add_replica(&target, fast_sync);
    load.go_on(50);
    image = load.stop();
    check_each("after the rebuild", &mut image, &[&source, &target]);
    let expand = format!("expand-{LARGER}");
    let expand = if furniture == Furniture::Full { vec![expand.as_str()] } else { vec![] };
    same_layers(&engine, furniture, &expand);
    same_chains(&engine);

    // Away for a moment, then back with what it had. Too slow where upstream has many layers to fetch.
    if to.really() == Kind::Ours || furniture == Furniture::Plain {
        engine.remove_replica(&target);
        target.stop(Signal::SIGTERM);
        exercise(&engine.data(), &mut image, BLOCKS, 50);
        target.start();
        engine.add_replica(&target, fast_sync);
        check_each("after the second rebuild", &mut image, &[&source, &target]);
        same_layers(&engine, furniture, &expand);
    }
    engine.snapshot("now");
    snapshots.push(("now", image));
    check_snapshots(&engine, &[&source, &target], &mut snapshots);
    engine.purge();
    assert_eq!(engine.snapshots(), ["now", "s2", "s1"]);
    check_snapshots(&engine, &[&source, &target], &mut snapshots);
    same_layers(&engine, furniture, &["now"]);
}

#[test]
fn ours_is_rebuilt_from_stock() {
    rebuild_across("ours_is_rebuilt_from_stock", Kind::Stock, Kind::Ours, Furniture::Full, false);
}

#[test]
fn ours_is_rebuilt_from_stock_with_fast_sync() {
    rebuild_across(
        "ours_is_rebuilt_from_stock_with_fast_sync",
        Kind::Stock,
        Kind::Ours,
        Furniture::Plain,
        true,
    );
}

#[test]
fn stock_is_rebuilt_from_ours() {
    rebuild_across("stock_is_rebuilt_from_ours", Kind::Ours, Kind::Stock, Furniture::Full, false);
}

#[test]
fn stock_is_rebuilt_from_ours_with_fast_sync() {
    rebuild_across(
        "stock_is_rebuilt_from_ours_with_fast_sync",
        Kind::Ours,
        Kind::Stock,
        Furniture::Plain,
        true,
    );
}

#[test]
fn ours_is_rebuilt_from_ours() {
    rebuild_across("ours_is_rebuilt_from_ours", Kind::Ours, Kind::Ours, Furniture::Full, false);
}
