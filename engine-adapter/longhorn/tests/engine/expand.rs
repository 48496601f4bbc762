//! Expansion: old layers keep their size, what is new reads zero.

use crate::support::{Engine, EngineOptions, Image, Kind, Lab, MIB, Mix, check_each, exercise};
use crate::{Snapshots, check_snapshots, each, volume};
use serde_json::json;

const SIZE: usize = 16 * MIB;
const LARGER: usize = 24 * MIB;
/// Not a multiple of any extent.
const LARGEST: usize = 30 * MIB + 4096;

#[test]
fn a_volume_grows_with_its_snapshots() {
    let Some(lab) = Lab::new("a_volume_grows_with_its_snapshots") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let all = each(&replicas);
    // A stock replica mixes up the ends of an unaligned read beyond an old layer's end.
    let stock = all.iter().any(|replica| replica.kind() == Kind::Stock);
    let mix = Mix { whole_blocks: stock, ..Mix::default() };
    let (mut image, mut snapshots) = (Image::zero(SIZE), Snapshots::new());
    let work = |engine: &Engine, image: &mut Image| exercise(&engine.data(), image, mix, 300);
    let grow = |engine: Engine, from: usize, to: usize| {
        engine.stop();
        let mut engine = lab.engine("", &EngineOptions::without_frontend(from), &all);
        engine.expand(to);
        engine.all_rw(&all);
        engine.stop();
        lab.engine("", &EngineOptions::new(to), &all)
    };

    work(&engine, &mut image);
    engine.snapshot("s1");
    snapshots.push(("s1", image.clone()));
    work(&engine, &mut image);
    let text = engine.try_cli(&["expand", "--size", "4096"]).unwrap_err();
    assert!(text.contains("cannot be expanded to a smaller size 4096"), "{text}");

    let engine = grow(engine, SIZE, LARGER);
    let system = format!("expand-{LARGER}");
    let disk = &engine.tree()[&system];
    assert_eq!((&disk["usercreated"], &disk["parent"]), (&json!(false), &json!("s1")));
    assert_eq!(disk["labels"], json!({"replica-expansion": LARGER.to_string()}));
    image.grow(LARGER);
    check_each("after the expansion", &mut image, &all);
    assert_eq!(all[0].rpc().get().size, LARGER.to_string());
    work(&engine, &mut image);
    engine.snapshot("s2");
    snapshots.push(("s2", image.clone()));

    let engine = grow(engine, LARGER, LARGEST);
    image.grow(LARGEST);
    work(&engine, &mut image);
    engine.snapshot("s3");
    snapshots.push(("s3", image.clone()));
    for (_, image) in &mut snapshots {
        image.grow(LARGEST);
    }
    check_snapshots(&engine, &all, &mut snapshots);
    for name in ["s1", "s2", "s3", &system] {
        engine.hash(name);
    }

    // A smaller layer is merged into a larger one.
    engine.remove_snapshot("s1");
    engine.purge();
    engine.purge();
    assert_eq!(engine.snapshots(), ["s3", "s2"]);
    snapshots.retain(|(name, _)| *name != "s1");
    check_snapshots(&engine, &all, &mut snapshots);
    engine.hash("s2");
    let mut image = snapshots.pop().unwrap().1;
    work(&engine, &mut image);
    check_each("at the end", &mut image, &all);
}
