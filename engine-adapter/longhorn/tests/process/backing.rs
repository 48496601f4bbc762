//! Volumes on a backing image, raw and qcow2, with a file system in it.

use crate::controller::{TEXT_SIZE, client, controller, modes, replica_with, run};
use crate::support::*;
use longhorn_testing::DataClient;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the image: less than the volume.
const IMAGE: usize = 40 << 20;
/// Bytes read at once.
const STEP: usize = 1 << 20;

fn run_tool(program: &str, args: &[&str], dir: &Path) -> String {
    let output = Command::new(program).args(args).current_dir(dir).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {text}{errors}");
    text
}

fn there_are(programs: &[&str]) -> bool {
    let missing = |program: &&&str| Command::new(program).arg("-V").output().is_err();
    let missing = programs.iter().find(missing);
    if let Some(program) = missing {
        println!("SKIPPED: needs {program}");
    }
    missing.is_none()
}

/// An ext4 file system with a file in it, as a raw image and as a packed qcow2; and the volume that shows it, by
/// what qemu-img says of the latter.
fn images(dir: &Path) -> ([PathBuf; 2], Vec<u8>) {
    fs::create_dir(dir.join("tree")).unwrap();
    let text: String = (0..200_000).map(|line| format!("line {line}\n")).collect();
    fs::write(dir.join("tree/lines"), text).unwrap();
    fs::File::create(dir.join("raw")).unwrap().set_len(IMAGE as u64).unwrap();
    run_tool("mkfs.ext4", &["-q", "-F", "-d", "tree", "raw"], dir);
    run_tool("qemu-img", &["convert", "-c", "-O", "qcow2", "raw", "qcow2"], dir);
    run_tool("qemu-img", &["convert", "-O", "raw", "qcow2", "seen"], dir);
    let mut seen = fs::read(dir.join("seen")).unwrap();
    seen.resize(SIZE as usize, 0);
    (["raw", "qcow2"].map(|name| dir.join(name)), seen)
}

fn content(data: &DataClient) -> Vec<u8> {
    let parts = (0..SIZE).step_by(STEP).map(|at| data.read(at, STEP as u32).unwrap());
    parts.collect::<Vec<_>>().concat()
}

/// The file system in a volume is whole, and its file is what it was.
fn check_file_system(bytes: &[u8], dir: &Path) {
    fs::write(dir.join("dump"), &bytes[..IMAGE]).unwrap();
    run_tool("e2fsck", &["-fn", "dump"], dir);
    run_tool("debugfs", &["-R", "dump /lines found", "dump"], dir);
    assert!(fs::read(dir.join("found")).unwrap() == fs::read(dir.join("tree/lines")).unwrap());
}

fn write(data: &DataClient, at: usize, bytes: &[u8], model: &mut [u8]) {
    data.write(at as u64, bytes).unwrap();
    model[at..][..bytes.len()].copy_from_slice(bytes);
}

/// Two replicas, one is lost and rebuilt on its own copy of the image, the other one is lost; a revert shows what
/// was, and nothing starts with another image.
fn volume_on(image: &Path, seen: &[u8], place: &Place) {
    let image = image.to_str().unwrap();
    let mut model = seen.to_vec();
    let (mut a, a_address) = replica_with(place, "a", &["--backing-file", image]);
    let (mut b, b_address) = replica_with(place, "b", &["--backing-file", image]);
    let mut engine = controller(place, &[&a_address, &b_address], &[]).ready();
    let data = client(place);
    let first = content(&data);
    assert!(first == model, "as qemu-img reads it");
    check_file_system(&first, place.path());

    // Behind the file system's superblock nothing of this matters to it: it is undone by the revert.
    let at = |block: usize| (8 << 20) + block * BLOCK;
    write(&data, at(0), &[1; 8 * BLOCK], &mut model);
    write(&data, at(20) + 512, &[2; 1024], &mut model);
    write(&data, IMAGE - 512, &[3; 1024], &mut model);
    run(&engine, &["snapshots", "create", "one"]);
    write(&data, at(2) + 100, &[4; 50], &mut model);
    data.unmap(at(4) as u64, (20 * BLOCK) as u32).unwrap();
    model[at(4)..at(24)].fill(0);
    let snapshot = model.clone();
    run(&engine, &["snapshots", "create", "two"]);
    write(&data, at(40), &[5; 512], &mut model);
    assert!(content(&data) == model, "written");

    let rpc = a.rpc();
    let told = rpc.get().unwrap();
    assert_eq!((told.backing_file.as_str(), &told.disks[image].name[..]), (image, image));
    assert!(!told.chain.contains(&image.to_owned()), "{:?}", told.chain);
    let meta = fs::read_to_string(place.replica("a").join("volume.meta")).unwrap();
    assert!(meta.contains(&format!("\"BackingFilePath\":\"{image}\"")), "{meta}");
    let listed = run(&engine, &["snapshots", "ls"]);
    assert!(!listed.contains("image") && listed.contains("two"), "{listed}");

    b.kill();
    write(&data, at(60), &[6; BLOCK], &mut model);
    run(&engine, &["rm-replica", &b_address]);
    let own =
        place.path().join(format!("copy of {}", Path::new(image).file_name().unwrap().display()));
    fs::copy(image, &own).unwrap();
    let (_c, c_address) = replica_with(place, "c", &["--backing-file", own.to_str().unwrap()]);
    run(&engine, &["add-replica", &c_address, "--size", TEXT_SIZE, "--current-size", TEXT_SIZE]);
    assert_eq!(modes(&engine), ["RW", "RW"]);
    let moved = fs::metadata(place.replica("c").join("volume.dbs")).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&moved) * 512 < 8 << 20, "nothing of the image");
    a.kill();
    assert!(content(&data) == model, "by the rebuilt replica alone");
    eventually("the loss shows", || modes(&engine) == ["ERR", "RW"]);
    run(&engine, &["rm-replica", &a_address]);
    run(&engine, &["snapshots", "rm", "one"]);
    run(&engine, &["snapshots", "purge"]);
    eventually("it is purged", || !run(&engine, &["snapshots", "ls"]).contains("one"));
    assert!(content(&data) == model, "purged");
    drop(data);
    run(&engine, &["frontend", "shutdown"]);
    run(&engine, &["snapshots", "revert", "two"]);
    run(&engine, &["frontend", "start", "socket"]);
    assert!(content(&client(place)) == snapshot, "reverted");
    engine.stop();
    refused(place, image);
}

/// The replica in `a`, which was killed, starts with the file it was made on, wherever that is, and else not.
fn refused(place: &Place, image: &str) {
    let other = place.path().join("other");
    let mut bytes = fs::read(image).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&other, bytes).unwrap();
    let other = other.to_str().unwrap();
    for (args, text) in [
        (&["--backing-file", other][..], "is not the file that the volume"),
        (&[], "start the replica with --backing-file"),
    ] {
        let more = [args, &["--size", TEXT_SIZE]].concat();
        let mut refused = place.start_with("a", &more);
        assert_eq!(refused.wait().code(), Some(1));
        assert!(refused.log().contains(text), "{}", refused.log());
    }
    let moved = format!("{image} moved");
    fs::rename(image, &moved).unwrap();
    let mut again = place.start("a", &["--size", TEXT_SIZE, "--backing-file", &moved]);
    assert_eq!(again.rpc().get().unwrap().backing_file, moved);
    again.stop();
}

#[test]
fn a_volume_rests_on_a_raw_image() {
    if !there_are(&["mkfs.ext4", "qemu-img", "e2fsck", "debugfs"]) {
        return;
    }
    let place = Place::new();
    let ([raw, _], seen) = images(place.path());
    volume_on(&raw, &seen, &place);
}

#[test]
fn a_volume_rests_on_a_qcow2_image() {
    if !there_are(&["mkfs.ext4", "qemu-img", "e2fsck", "debugfs"]) {
        return;
    }
    let place = Place::new();
    let ([_, qcow2], seen) = images(place.path());
    volume_on(&qcow2, &seen, &place);
}

#[test]
fn an_image_that_does_not_fit_is_refused() {
    let place = Place::new();
    let image = place.path().join("image");
    let start = |name: &str, file: &Path, bytes: usize| {
        fs::write(&image, vec![1; bytes]).unwrap();
        let args = ["--size", "1mb", "--backing-file", file.to_str().unwrap()];
        let mut process = place.start_with(name, &args);
        assert_eq!(process.wait().code(), Some(1));
        process.log()
    };
    let log = start("large", &image, 2 << 20);
    assert!(log.contains("replica size 1048576 < backing image virtual size 2097152"), "{log}");
    let log = start("odd", &image, 1000);
    assert!(log.contains("should be a multiple of 512 bytes"), "{log}");
    let log = start("none", &place.path().join("no"), 512);
    assert!(log.contains("there is no backing file"), "{log}");
    // A volume that was made without one does not get one.
    place.start("plain", &["--size", "1mb"]).stop();
    let log = start("plain", &image, 512);
    assert!(log.contains("was made without a backing file"), "{log}");
}
