//! Backing images below replicas of both kinds: upstream's engine, and what moves between the two.

use crate::backup::{back_up, restored};
use crate::support::exercise;
use crate::support::{EngineOptions, Image, Kind, Lab, MIB, Mix, ReplicaOptions, check_each};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const SIZE: usize = 16 * MIB;
/// The image is smaller than the volume.
const IMAGE: usize = 6 * MIB + 512;
const MIX: Mix = Mix {
    writes: 60,
    unmaps: 0,
    whole_blocks: false,
    unmapped_is_zero: false,
    largest: 64 << 10,
    pause: Duration::ZERO,
    may_fail: false,
};

/// An image, as a raw file or as a qcow2, and what it holds.
fn image(lab: &Lab, qcow2: bool) -> Option<(PathBuf, Vec<u8>)> {
    let bytes: Vec<u8> = (0..IMAGE).map(|at| (at / 512 % 251) as u8 | 1).collect();
    let raw = lab.path().join("image.raw");
    std::fs::write(&raw, &bytes).unwrap();
    if !qcow2 {
        return Some((raw, bytes));
    }
    let packed = lab.path().join("image.qcow2");
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-c", "-O", "qcow2"]).args([&raw, &packed]);
    let Ok(status) = command.status() else {
        println!("SKIPPED: needs qemu-img");
        return None;
    };
    assert!(status.success());
    Some((packed, bytes))
}

/// A volume of one kind is rebuilt to the other and cloned to it, with zeros over the image if the first one keeps
/// such.
fn across(test: &str, from: Kind, to: Kind, qcow2: bool) {
    let Some(lab) = Lab::new(test) else { return };
    let Some((path, bytes)) = image(&lab, qcow2) else { return };
    let mut options = ReplicaOptions::new(SIZE);
    options.flags = vec!["--backing-file".into(), path.display().to_string()];
    // A stock replica mixes up the ends of unaligned reads beyond what a layer has.
    let mix = Mix { whole_blocks: from.really() == Kind::Stock, ..MIX };
    let source = lab.replica(from, "", "source", &options);
    let engine = lab.engine("", &EngineOptions::new(SIZE), &[&source]);
    let mut image = Image::zero(SIZE);
    image.wrote(0, &bytes);
    image.check("the image", &engine.data());
    exercise(&engine.data(), &mut image, mix, 100);
    if from.really() == Kind::Ours {
        let (at, zeros) = (MIB, vec![0; 3 * 4096]);
        engine.client().unmap(at as u64, zeros.len()).unwrap();
        image.wrote(at, &zeros);
    }
    engine.snapshot("s1");
    let first = image.clone();
    exercise(&engine.data(), &mut image, mix, 100);
    engine.snapshot("s2");
    let mut second = image.clone();

    let target = lab.replica(to, "", "target", &options);
    engine.add_replica(&target, false);
    check_each("after the rebuild", &mut image, &[&source, &target]);
    for name in ["s1", "s2"] {
        engine.hash(name);
    }
    assert_eq!(engine.tree().keys().filter(|name| name.contains("image")).count(), 0);

    let clone = lab.replica(to, "t", "clone", &options);
    let cloned = lab.engine("t", &EngineOptions::without_frontend(SIZE), &[&clone]);
    cloned.clone_from(&engine, "s2");
    cloned.stop();
    let cloned = lab.engine("t", &EngineOptions::new(SIZE), &[&clone]);
    second.check("the clone", &cloned.data());

    engine.revert("s1");
    check_each("reverted", &mut first.clone(), &[&source, &target]);
    engine.all_rw(&[&source, &target]);
}

#[test]
fn an_image_below_ours_and_ours() {
    across("an_image_below_ours_and_ours", Kind::Ours, Kind::Ours, true);
}

#[test]
fn an_image_below_stock_and_ours() {
    across("an_image_below_stock_and_ours", Kind::Stock, Kind::Ours, true);
}

#[test]
fn an_image_below_ours_and_stock() {
    across("an_image_below_ours_and_stock", Kind::Ours, Kind::Stock, false);
}

/// Backups of a volume on an image, restored over the same image: whole, and then the differences.
fn restored_across(test: &str, from: Kind, to: Kind, qcow2: bool) {
    let Some(lab) = Lab::new(test) else { return };
    let Some((path, bytes)) = image(&lab, qcow2) else { return };
    let mut options = ReplicaOptions::new(SIZE);
    options.flags = vec!["--backing-file".into(), path.display().to_string()];
    let mix = Mix { whole_blocks: from.really() == Kind::Stock, ..MIX };
    let source = lab.replica(from, "", "source", &options);
    let engine = lab.engine("", &EngineOptions::new(SIZE), &[&source]);
    let (mut image, mut backups) = (Image::zero(SIZE), Vec::new());
    image.wrote(0, &bytes);
    let folder = tempfile::tempdir().unwrap();
    let place = format!("vfs://{}", folder.path().display());
    let named = ["--backing-image-name", "img", "--backing-image-checksum", "sum"];
    for (snapshot, requests) in [("s0", 0), ("s1", 20), ("s2", 50)] {
        if requests > 0 {
            exercise(&engine.data(), &mut image, mix, requests);
        }
        if snapshot == "s2" && from.really() == Kind::Ours {
            let (at, zeros) = (MIB, vec![0; 3 * 4096]);
            engine.client().unmap(at as u64, zeros.len()).unwrap();
            image.wrote(at, &zeros);
        }
        engine.snapshot(snapshot);
        let (_, url) = back_up(&engine, &place, snapshot, &named);
        backups.push((url, image.clone()));
    }
    engine.stop();
    let target = lab.replica(to, "t", "target", &options);
    let engine = lab.engine("t", &EngineOptions::without_frontend(SIZE), &[&target]);
    for (url, image) in &mut backups {
        engine.cli(&["backup", "restore", url]);
        restored(&engine, url);
        check_each("what was restored over the image", image, &[&target]);
    }
}

#[test]
fn backups_on_an_image_of_ours_are_restored_to_ours() {
    restored_across("backups_on_image_ours_ours", Kind::Ours, Kind::Ours, true);
}

#[test]
fn backups_on_an_image_of_stock_are_restored_to_ours() {
    restored_across("backups_on_image_stock_ours", Kind::Stock, Kind::Ours, true);
}

#[test]
fn backups_on_an_image_of_ours_are_restored_to_stock() {
    restored_across("backups_on_image_ours_stock", Kind::Ours, Kind::Stock, false);
}
