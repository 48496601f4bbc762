//! Clones between volumes.

use crate::support::{EngineOptions, Image, Kind, Lab, Load, MIB, Mix, check_each};
use crate::{each, replicas, volume};
use serde_json::json;

const SIZE: usize = 16 * MIB;

fn clone_across(test: &str, from: Kind, to: Kind) {
    let Some(lab) = Lab::new(test) else { return };
    let (source, _sources) = volume(&lab, SIZE, &[from, from]);
    let mut image = Image::zero(SIZE);
    source.exercise(&mut image, 300);
    source.snapshot("s1");
    source.exercise(&mut image, 200);
    source.snapshot("s2");
    let mut cloned = image.clone();
    source.exercise(&mut image, 200);
    source.snapshot("s3");
    let load = Load::start(&source.data(), image, Mix::gentle());

    let targets = replicas(&lab, "t", SIZE, &[to, to]);
    let engine = lab.engine("t", &EngineOptions::without_frontend(SIZE), &each(&targets));
    let text = engine.try_cli(&[
        "snapshot",
        "clone",
        "--snapshot-name",
        "nosuch",
        "--from-controller-address",
        &source.url(),
        "--from-volume-name",
        source.volume(),
    ]);
    assert!(text.unwrap_err().contains("cannot find snapshot nosuch in the source replica"));
    engine.clone_from(&source, "s2");
    load.go_on(20);
    let tree = engine.tree();
    assert_eq!(tree.keys().collect::<Vec<_>>(), ["s2", "volume-head"]);
    assert_eq!((&tree["s2"]["parent"], &tree["s2"]["usercreated"]), (&json!(""), &json!(false)));
    check_each("the clone", &mut cloned, &each(&targets));
    engine.stop();
    let engine = lab.engine("t", &EngineOptions::new(SIZE), &each(&targets));
    engine.all_rw(&each(&targets));
    engine.hash("s2");
    engine.exercise(&mut cloned, 300);
    engine.snapshot("own");
    engine.purge();
    check_each("the clone after a purge", &mut cloned, &each(&targets));
    let mut image = load.stop();
    image.check("the source", &source.data());
}

#[test]
fn ours_is_cloned_to_ours() {
    clone_across("ours_is_cloned_to_ours", Kind::Ours, Kind::Ours);
}

#[test]
fn stock_is_cloned_to_ours() {
    clone_across("stock_is_cloned_to_ours", Kind::Stock, Kind::Ours);
}

#[test]
fn ours_is_cloned_to_stock() {
    clone_across("ours_is_cloned_to_stock", Kind::Ours, Kind::Stock);
}
