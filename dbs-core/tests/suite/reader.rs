//! `contrib/dbs-reader.py`, written from `docs/format.md` alone, reads what the store shows: golden images, and
//! stores as a killed process leaves them.

use crate::common::contents;
use dbs_core::format::crc::crc32c;
use dbs_core::{InitOptions, OpenOptions, Store, TailPlace};
use fastrand::Rng;
use flate2::read::GzDecoder;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Output};

const READER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/dbs-reader.py");
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
/// The only tmpfs that every Linux has.
const TMPFS: &str = "/dev/shm";
const HISTORIES: u64 = 4;
const STEPS: u64 = 90;
/// Steps between two comparisons.
const LOOK: u64 = 30;

fn run(image: &Path, more: &[&str]) -> Output {
    Command::new("python3").arg(READER).arg(image).args(more).output().unwrap()
}

/// What the reader exports of all volumes and snapshots.
fn exported(image: &Path, tail: Option<&Path>) -> BTreeMap<String, Vec<u8>> {
    let out = tempfile::tempdir().unwrap();
    let mut more = vec!["--export", out.path().to_str().unwrap()];
    if let Some(tail) = tail {
        more.extend(["--tail", tail.to_str().unwrap()]);
    }
    let output = run(image, &more);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files = fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().path());
    files
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(path).unwrap())
        })
        .collect()
}

fn there_is_python() -> bool {
    let there = Command::new("python3").arg("--version").output().is_ok();
    if !there {
        println!("SKIPPED: needs python3");
    }
    there
}

#[test]
fn it_reads_golden_images() {
    if !there_is_python() {
        return;
    }
    for name in [
        "v2.0/empty",
        "v2.0/clean",
        "v2.0/dirty",
        "v2.0-beta/empty",
        "v2.0-beta/clean",
        "v2.0-beta/dirty",
        "v2.0-compressed/compressed",
    ] {
        let (_dir, image) = golden(name);
        let lines: String = exported(&image, None)
            .iter()
            .map(|(spec, bytes)| format!("{spec} {} {:08x}\n", bytes.len(), crc32c(bytes)))
            .collect();
        let expected = fs::read_to_string(format!("{FIXTURES}/{name}.contents.txt")).unwrap();
        let sorted =
            |text: &str| text.lines().map(str::to_owned).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(sorted(&lines), sorted(&expected), "{name}");
    }
}

/// What a repair marked as lost is an error, not zeros, and keeps nobody from all else.
#[test]
fn it_says_what_is_lost() {
    if !there_is_python() {
        return;
    }
    let (dir, image) = golden("v2.0-beta/full");
    let export = |spec: &str| {
        let out = dir.path().join(format!("{spec}.out"));
        fs::create_dir(&out).unwrap();
        run(&image, &[spec, "--export", out.to_str().unwrap()])
    };
    let gone = export("gone");
    assert_eq!(gone.status.code(), Some(1));
    let said = String::from_utf8_lossy(&gone.stderr).into_owned();
    assert!(said.contains("what volume extent 0 held is lost"), "{said}");
    assert!(export("beta").status.success());
}

#[test]
fn it_expands_what_is_compressed() {
    if !there_is_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("store");
    let options =
        InitOptions { size: Some(8 << 20), extent_size: 64 << 10, ..InitOptions::default() };
    Store::init(&image, &options).unwrap();
    let store = Store::open(&image, &OpenOptions::default()).unwrap();
    crate::common::fill(&store);
    let noise: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(24 << 10).collect();
    store.volume("alpha").unwrap().write_at(192 << 10, &noise, false).unwrap();
    let wanted = contents(&store);
    for volume in ["alpha", "copy", "beta"] {
        assert!(store.compress(volume, &mut |_| true).unwrap().compressed > 0, "{volume}");
    }
    store.close().unwrap();
    assert!(exported(&image, None) == wanted);
    let mut bytes = fs::read(&image).unwrap();
    let index = bytes.chunks(4096).position(|block| block.starts_with(b"DBSi")).unwrap();
    bytes[4096 * index + 4096 + 7] ^= 1;
    fs::write(&image, bytes).unwrap();
    let output = run(&image, &["--export", dir.path().to_str().unwrap(), "--no-verify"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("is damaged"), "{said}");
}

/// What is in a file outside the store is read from that file and from no other, and is no zeros without it.
#[test]
fn it_reads_a_file_that_volumes_rest_on() {
    if !there_is_python() {
        return;
    }
    let (dir, image) = golden("v2.0-backed/backed");
    let mut file = Vec::new();
    let packed = File::open(format!("{FIXTURES}/v2.0-backed/backed.file.gz")).unwrap();
    GzDecoder::new(packed).read_to_end(&mut file).unwrap();
    let [raw, out] = ["raw", "out"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
    fs::create_dir(&out).unwrap();
    let export = |more: &[&str]| run(&image, &[&["--export", &out], more].concat());
    let refused = |more: &[&str], says: &str| {
        let output = export(more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(says), "{says}: {said}");
        assert!(!said.contains("Traceback"), "{said}");
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0, "{says}: nothing is left");
    };
    refused(&[], "is in a backing file, give it with --backing: raw, 1200640 bytes");
    refused(&["--backing", &raw], &raw);
    for at in [0, 70_000, file.len() - 1] {
        let mut other = file.clone();
        other[at] ^= 1;
        fs::write(&raw, other).unwrap();
        refused(&["--backing", &raw], &format!("{raw}: no volume rests on this file"));
    }
    fs::write(&raw, &file[..file.len() - 512]).unwrap();
    refused(&["--backing", &raw], &format!("{raw}: no volume rests on this file"));
    fs::write(&raw, [b"QFI\xfb", &file[4..]].concat()).unwrap();
    refused(&["--backing", &raw], &format!("{raw}: this is a qcow2 file"));
    fs::write(&raw, file).unwrap();
    let read = export(&["--backing", &raw]);
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let expected =
        fs::read_to_string(format!("{FIXTURES}/v2.0-backed/backed.contents.txt")).unwrap();
    for line in expected.lines() {
        let spec = line.split(' ').next().unwrap();
        let bytes = fs::read(format!("{out}/{spec}.raw")).unwrap();
        assert_eq!(format!("{spec} {} {:08x}", bytes.len(), crc32c(&bytes)), line);
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), expected.lines().count());
}

/// An unpacked golden image, and the directory it is in.
fn golden(name: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let packed = File::open(format!("{FIXTURES}/{name}.img.gz")).unwrap();
    io::copy(&mut GzDecoder::new(packed), &mut File::create(&image).unwrap()).unwrap();
    (dir, image)
}

/// Whatever is acknowledged is in the file, its journal and the tail: the reader looks at a store that is open.
#[test]
fn it_reads_what_a_killed_process_leaves() {
    if !is_tmpfs(TMPFS) {
        println!("SKIPPED: needs a tmpfs at {TMPFS}");
        return;
    }
    if !there_is_python() {
        return;
    }
    for seed in 1..=HISTORIES {
        let dir = tempfile::tempdir().unwrap();
        let tails = tempfile::tempdir_in(TMPFS).unwrap();
        let image = dir.path().join("image");
        let options = InitOptions {
            size: Some(32 << 20),
            extent_size: 64 << 10,
            checksums: seed % 4 != 0,
            ..InitOptions::default()
        };
        Store::init(&image, &options).unwrap();
        let open = || {
            let tail = TailPlace::Directory(tails.path().to_owned());
            Store::open(&image, &OpenOptions { tail, ..OpenOptions::default() }).unwrap()
        };
        let mut rng = Rng::with_seed(seed);
        let mut store = open();
        for step in 1..=STEPS {
            change(&store, &mut rng, step);
            if step % LOOK == 0 {
                let mut found =
                    fs::read_dir(tails.path()).unwrap().map(|tail| tail.unwrap().path());
                let tail = found.find(|path| path.extension().is_some_and(|e| e == "tail"));
                assert!(tail.is_some(), "the store has no tail");
                let seen = exported(&image, tail.as_deref());
                assert!(seen == contents(&store), "seed {seed}, step {step}");
            }
            if step % (2 * LOOK) == 0 {
                let before = contents(&store);
                store.close().unwrap();
                assert!(exported(&image, None) == before, "seed {seed}, step {step}, closed");
                store = open();
            }
        }
    }
}

fn is_tmpfs(path: &str) -> bool {
    fs::read_to_string("/proc/mounts")
        .is_ok_and(|mounts| mounts.lines().any(|line| line.contains(&format!(" {path} tmpfs "))))
}

/// One change; what is refused (a name that is taken, a volume that is not there) changes nothing.
fn change(store: &Store, rng: &mut Rng, step: u64) {
    let volumes = store.volumes(false);
    if volumes.len() < 2 {
        store.create_volume(&format!("v{step}"), rng.u64(200..800) * 512).unwrap();
        return;
    }
    let name = volumes[rng.usize(..volumes.len())].name.clone();
    let snapshots = store.snapshots(&name, false).unwrap();
    let snapshot = snapshots.get(rng.usize(..snapshots.len().max(1))).map(|s| s.name.clone());
    let snapshot = snapshot.unwrap_or_default();
    match rng.u32(..24) {
        0..10 => {
            let volume = store.volume(&name).unwrap();
            let first = rng.u64(..volume.size() / 512);
            let sectors = rng.u64(1..=(volume.size() / 512 - first).min(180));
            let bytes = vec![rng.u8(1..); sectors as usize * 512];
            volume.write_at(first * 512, &bytes, rng.bool()).unwrap();
        }
        10..14 => {
            let volume = store.volume(&name).unwrap();
            let first = rng.u64(..volume.size() / 512);
            let sectors = rng.u64(1..=volume.size() / 512 - first);
            match rng.bool() {
                true => volume.discard(first * 512, sectors * 512).unwrap(),
                false => volume.write_zeroes(first * 512, sectors * 512, false).unwrap(),
            }
        }
        14..17 => {
            store.create_snapshot(&name, &format!("s{step}"), &Default::default()).unwrap();
        }
        17 => drop(store.clone_volume(&name, &snapshot, &format!("c{step}"))),
        18 => drop(store.delete_snapshot(&name, &snapshot)),
        19 => drop(store.rollback(&name, &snapshot)),
        20 => drop(store.flatten(&name, &mut |_, _| true)),
        21 if volumes.len() > 5 => drop(store.delete_volume(&name)),
        22 => store.flush().unwrap(),
        _ => {
            store.work(rng.u64(1..20)).unwrap();
            store.settle_checksums().unwrap();
        }
    }
}

/// Damage ends with a message, never with an image that is wrong.
#[test]
fn it_says_what_is_damaged() {
    if !there_is_python() {
        return;
    }
    let (_dir, image) = golden("v2.0/dirty");
    let bytes = fs::read(&image).unwrap();
    let damaged = |what: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        fs::write(&image, bytes).unwrap();
        let output = run(&image, &[]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(what), "{what}: {error}");
        assert!(!error.contains("Traceback"), "{error}");
    };
    damaged("no magic", &|bytes| bytes.fill(0));
    damaged("cut off", &|bytes| bytes.truncate(1 << 20));
    damaged("both copies", &|bytes| bytes[64 << 10..256 << 10].fill(1));
}
