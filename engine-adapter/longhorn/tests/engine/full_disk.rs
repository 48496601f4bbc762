//! A replica whose disk is full.

use crate::each;
use crate::support::{
    EngineOptions, Image, Kind, Lab, Load, MIB, Mix, ReplicaOptions, check_each, eventually, skip,
};
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: usize = 64 * MIB;
const DISK: usize = 40 * MIB;

/// A small file system of its own.
struct Mount(PathBuf);

impl Mount {
    fn new(lab: &Lab) -> Result<Self, String> {
        let (image, dir) = (lab.path().join("disk.ext4"), lab.path().join("disk"));
        std::fs::File::create(&image).unwrap().set_len(DISK as u64).unwrap();
        std::fs::create_dir(&dir).unwrap();
        run("mkfs.ext4", &["-q", "-m", "0", "-O", "^has_journal"], &[&image])?;
        run("mount", &["-o", "loop"], &[&image, &dir])?;
        Ok(Self(dir))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = run("umount", &["-l"], &[&self.0]);
    }
}

fn run(program: &str, flags: &[&str], paths: &[&Path]) -> Result<(), String> {
    let output = Command::new(program)
        .args(flags)
        .args(paths)
        .output()
        .map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// The mount comes last, since it is to go first.
fn mounted(test: &str) -> Option<(Lab, Mount)> {
    let lab = Lab::new(test)?;
    match Mount::new(&lab) {
        Ok(mount) => Some((lab, mount)),
        Err(text) => skip(test, &format!("no small file system to fill: {text}")),
    }
}

#[test]
fn a_full_replica_is_given_up_and_the_other_goes_on() {
    let Some((lab, mount)) = mounted("a_full_replica_is_given_up_and_the_other_goes_on") else {
        return;
    };
    let options = ReplicaOptions::new(SIZE);
    let good = lab.replica(Kind::Ours, "", "good", &options);
    let full = lab.replica_in(Kind::Ours, "", "full", &mount.0.join("replica"), &options);
    let engine = lab.engine("", &EngineOptions::new(SIZE), &[&good, &full]);
    let mut image = Image::zero(SIZE);
    let mut client = engine.client();
    for offset in (0..SIZE).step_by(MIB) {
        image.write(&mut client, offset, &vec![(offset / MIB) as u8 + 1; MIB]);
    }
    engine.wait_for_mode(&full, "ERR");
    engine.exercise(&mut image, 200);
    assert_eq!(engine.mode(&good).as_deref(), Some("RW"));
    check_each("the good one", &mut image, &[&good]);
}

#[test]
fn a_volume_whose_only_disk_is_full_can_be_read() {
    let Some((lab, mount)) = mounted("a_volume_whose_only_disk_is_full_can_be_read") else {
        return;
    };
    let ballast = mount.0.join("ballast");
    std::fs::write(&ballast, vec![1; 12 * MIB]).unwrap();
    let options = ReplicaOptions::new(SIZE);
    let mut replica = lab.replica_in(Kind::Ours, "", "full", &mount.0.join("replica"), &options);
    let engine = lab.engine("", &EngineOptions::new(SIZE), &[&replica]);
    let image = Image::zero(SIZE);
    let load =
        Load::start(&engine.data(), image, Mix { may_fail: true, writes: 80, ..Mix::default() });
    eventually("the disk is full", || !load.errors().is_empty());
    load.go_on(20);
    let errors = load.errors();
    let mut image = load.stop();
    for error in &errors {
        assert!(error.contains("no space left on device") && error.contains("Some(8)"), "{error}");
    }
    assert_eq!(engine.mode(&replica).as_deref(), Some("RW"));
    image.check("when full", &engine.data());
    // Space comes back: so do writes, in the same process.
    std::fs::remove_file(&ballast).unwrap();
    let mut client = engine.client();
    eventually("writes succeed again", || client.write(0, &[9; 4096]).is_ok());
    image.wrote(0, &[9; 4096]);
    for offset in (0..4 * MIB).step_by(MIB) {
        image.write(&mut client, offset, &vec![3; MIB]);
    }
    image.check("with space again", &engine.data());
    engine.kill();
    replica.kill();
    replica.start();
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(std::slice::from_ref(&replica)));
    image.check("after a restart", &engine.data());
}
