//! Images that earlier versions made: they open, hold what they held, and can be written to.

use crate::common::{
    BLOCK, FixedEnv, Mem, SIZE, dump, fill, finish_work, init, open, pattern, specs,
};
use dbs_core::format::crc::crc32c;
use dbs_core::info::CheckReport;
use dbs_core::io::TailMemory;
use dbs_core::limits::TAIL_BYTES;
use dbs_core::store::SnapshotOptions;
use dbs_core::{Backing, ErrorKind, Result, Secret, Store};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
/// The version whose images [`make_golden_images`] makes.
const VERSION: &str = "v2.0-beta";
const IMAGES: [&str; 4] = ["empty", "clean", "dirty", "full"];
/// Those of alpha versions.
const OLDER: [&str; 3] = ["empty", "clean", "dirty"];
/// The version whose image rests on a file, and how the file is called that lies beside it.
const BACKED: &str = "v2.0-backed";
const FILE_ENDING: &str = ".file.gz";
/// What `docs/format.md` makes of that file. It is long enough to be sampled.
const IDENTITY: &str = "raw, 1200640 bytes, 1200640 of content, \
     sha256 of parts f456c5f7fb7b5eeb63eecf73836b48daa2f4efd699753eba7ed133eec9cc7a5d";
const FILE_SECTORS: usize = 2345;
/// The version whose image has encrypted volumes.
const ENCRYPTED: &str = "v2.0-encrypted";
/// The version whose image has compressed extents.
const COMPRESSED: &str = "v2.0-compressed";

fn images() -> Vec<PathBuf> {
    let versions = fs::read_dir(FIXTURES).unwrap().map(|entry| entry.unwrap().path());
    let files = versions
        .filter(|path| {
            path.is_dir()
                && path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("v2."))
        })
        .flat_map(|path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
    let mut images: Vec<_> =
        files.filter(|path| path.to_string_lossy().ends_with(".img.gz")).collect();
    images.sort();
    images
}

fn load(path: &Path) -> Arc<Mem> {
    Arc::new(Mem::from_bytes(unpacked(path)))
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    PathBuf::from(path.to_string_lossy().replace(".img.gz", ending))
}

/// A tail whose bytes stay when its store is gone, as those of a killed process do.
struct Kept {
    bytes: Vec<u8>,
    place: Arc<Mutex<Vec<u8>>>,
}

impl TailMemory for Kept {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn remove(&mut self) {}
}

impl Drop for Kept {
    fn drop(&mut self) {
        *self.place.lock().unwrap() = std::mem::take(&mut self.bytes);
    }
}

/// Opens an image, with the tail of the process that made it, if there is one.
fn open_with(
    disk: &Arc<Mem>,
    seed: u64,
    read_only: bool,
    tail: &Arc<Mutex<Vec<u8>>>,
) -> Result<Store> {
    let bytes = tail.lock().unwrap().clone();
    let kept = Kept { bytes, place: Arc::clone(tail) };
    let memory: Option<Box<dyn TailMemory>> =
        if kept.bytes.is_empty() { None } else { Some(Box::new(kept)) };
    Store::open_on(Arc::clone(disk) as _, memory, Arc::new(FixedEnv::new(seed)), read_only)
}

struct OnDisk(Vec<u8>);

impl Backing for OnDisk {
    fn identity(&self) -> &str {
        IDENTITY
    }

    fn name(&self) -> String {
        "the golden file".to_owned()
    }

    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.copy_from_slice(&self.0[offset as usize..][..buf.len()]);
        Ok(())
    }
}

/// What unlocks encrypted volumes: the first of those that does.
fn unlock(store: &Store) {
    let secrets = [Secret::KeyFile([7; 32].into()), Secret::passphrase("correct horse").unwrap()];
    for volume in store.volumes(false).into_iter().filter(|volume| volume.encryption.is_some()) {
        assert!(store.volume(&volume.name).unwrap().read_at(0, &mut [0; 512]).is_err(), "locked");
        assert!(secrets.iter().any(|secret| store.unlock(&volume.name, secret).is_ok()));
    }
}

/// The file that an image rests on, if it does.
fn file_of(image: &Path) -> Option<Arc<dyn Backing>> {
    let path = beside(image, FILE_ENDING);
    path.exists().then(|| Arc::new(OnDisk(unpacked(&path))) as _)
}

/// One line for each volume and snapshot: name, bytes, and CRC32C of all of them, or that some of them are lost.
fn summary(store: &Store) -> String {
    let line = |spec: String| {
        let open = store.volume(&spec).unwrap();
        let mut bytes = vec![0xaa; open.size() as usize];
        let content = match open.read_at(0, &mut bytes) {
            Ok(()) => format!("{:08x}", crc32c(&bytes)),
            Err(error) if error.kind() == ErrorKind::Corrupt => "lost".to_owned(),
            Err(error) => panic!("{spec}: {error}"),
        };
        format!("{spec} {} {content}\n", bytes.len())
    };
    let mut lines: Vec<_> = specs(store).into_iter().map(line).collect();
    lines.sort();
    lines.concat()
}

/// Whether `found` says all that `expected` does; later versions may say more.
fn assert_says(found: &Value, expected: &Value, at: &str) {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            for (key, value) in expected {
                let found = found.get(key).unwrap_or_else(|| panic!("{at}.{key} is missing"));
                assert_says(found, value, &format!("{at}.{key}"));
            }
        }
        (Value::Array(found), Value::Array(expected)) => {
            assert_eq!(found.len(), expected.len(), "{at}");
            for (index, (found, value)) in found.iter().zip(expected).enumerate() {
                assert_says(found, value, &format!("{at}[{index}]"));
            }
        }
        _ => assert_eq!(found, expected, "{at}"),
    }
}

#[test]
fn images_of_every_version_hold_what_they_held() {
    let images = images();
    assert_eq!(images.len(), IMAGES.len() + OLDER.len() + 3, "{images:?}");
    for path in images {
        let name = path.display().to_string();
        let expected_contents = fs::read_to_string(beside(&path, ".contents.txt")).unwrap();
        let expected: Value =
            serde_json::from_str(&fs::read_to_string(beside(&path, ".dump.json")).unwrap())
                .unwrap();

        let disk = load(&path);
        let tail = Arc::new(Mutex::new(unpacked(&beside(&path, ".tail.gz"))));
        let lost = expected_contents.contains(" lost\n");
        let file = file_of(&path);
        // A store has it as long as what it gives for it is kept.
        let give = |store: &Store| {
            unlock(store);
            file.clone().map(|file| store.attach_backing(file))
        };
        let store = open_with(&disk, 1, true, &tail).unwrap();
        let given = give(&store);
        assert_eq!(summary(&store), expected_contents, "{name}");
        assert_says(&serde_json::from_str(&dump(&store)).unwrap(), &expected, &name);
        assert_sound(&Store::check_on(&*disk).unwrap(), lost, &name);
        drop((store, given));

        let store = open_with(&disk, 2, false, &tail).unwrap();
        let _given = give(&store);
        assert_eq!(summary(&store), expected_contents, "{name}, opened for writing");
        if lost {
            store.delete_snapshot("gone", "before").unwrap();
            store.delete_volume("gone").unwrap();
        }
        finish_work(&store);
        store.create_volume("later", 1 << 20).unwrap();
        store.volume("later").unwrap().write_at(0, &pattern(8, 1 << 20), false).unwrap();
        store.close().unwrap();
        let store = open(&disk, 3, false).unwrap();
        let _given = give(&store);
        let mut lines: Vec<_> = summary(&store).lines().map(str::to_owned).collect();
        lines.retain(|line| !line.starts_with("later "));
        let kept = expected_contents.lines().filter(|line| !line.ends_with(" lost"));
        assert!(kept.eq(lines), "{name}, after writing");
        assert_sound(&store.check().unwrap(), false, &name);
    }
}

/// Nothing is wrong, but what a repair has marked as lost.
fn assert_sound(report: &CheckReport, lost: bool, name: &str) {
    assert!(report.is_clean(), "{name}: {:?}", report.findings);
    assert_eq!(report.findings.is_empty(), !lost, "{name}: {:?}", report.findings);
}

/// A volume whose metadata was damaged, and that a repair has marked as lost.
fn lose_a_volume(disk: &Arc<Mem>) {
    let store = open(disk, 5, false).unwrap();
    store.create_volume("gone", 256 << 10).unwrap();
    store.volume("gone").unwrap().write_at(0, &pattern(11, 100 << 10), false).unwrap();
    store.create_snapshot("gone", "before", &SnapshotOptions::default()).unwrap();
    store.volume("gone").unwrap().write_at(0, &pattern(12, 4 << 10), false).unwrap();
    store.close().unwrap();
    let dump: Value = serde_json::from_str(&dump(&open(disk, 6, true).unwrap())).unwrap();
    let regions = dump["regions"].as_array().unwrap();
    let extents = regions.iter().find(|region| region["name"] == "extent status").unwrap();
    let (offset, length) =
        (extents["offset"].as_u64().unwrap(), extents["length"].as_u64().unwrap());
    for copy in [offset, offset + length / 2] {
        disk.put(copy, &[0x55; BLOCK]);
    }
    let repair = Store::plan_repair_on(&**disk, None, &FixedEnv::new(7), false).unwrap();
    repair.carry_out(&**disk).unwrap();
}

/// Ends as a killed process does: with groups to redo, what is acknowledged in the tail, a group of checksums open.
fn leave_everything_open(disk: &Arc<Mem>) -> Arc<Mutex<Vec<u8>>> {
    let tail = Arc::new(Mutex::new(vec![0; TAIL_BYTES]));
    let store = open_with(disk, 3, false, &tail).unwrap();
    store.work(2).unwrap();
    let alpha = store.volume("alpha").unwrap();
    alpha.write_at(0, &pattern(13, 8 << 10), false).unwrap();
    alpha.discard(4096, 200 << 10).unwrap();
    store.create_snapshot("alpha", "late", &SnapshotOptions::default()).unwrap();
    alpha.write_at(4096, &pattern(14, 60 << 10), true).unwrap();
    // Acknowledged, and in no group of the journal.
    alpha.write_at(128 << 10, &pattern(15, 20 << 10), false).unwrap();
    drop(alpha);
    drop(store);
    tail
}

/// What a file compressed with gzip holds; nothing if there is no such file.
fn unpacked(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    if path.exists() {
        GzDecoder::new(File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    }
    bytes
}

fn pack(path: &Path, bytes: &[u8]) {
    let mut out = GzEncoder::new(File::create(path).unwrap(), Compression::best());
    out.write_all(bytes).unwrap();
    out.finish().unwrap();
    assert!(fs::metadata(path).unwrap().len() < 100 << 10, "{} is large", path.display());
}

/// Made once for each version of the format; see `fixtures/v2.0-beta/README.md`.
#[test]
#[ignore = "makes the images of a new version of the format; never again for one that has them"]
fn make_golden_images() {
    let folder = Path::new(FIXTURES).join(VERSION);
    fs::create_dir_all(&folder).unwrap();
    for name in IMAGES {
        let path = folder.join(format!("{name}.img.gz"));
        assert!(!path.exists(), "{} is there: golden images are never made again", path.display());
        let disk = init(1);
        let mut tail = Arc::default();
        if name == "full" {
            lose_a_volume(&disk);
        }
        if name != "empty" {
            let store = open(&disk, 2, false).unwrap();
            fill(&store);
            store.close().unwrap();
        }
        if name == "dirty" {
            // A second session that ends with everything still to be redone.
            let store = open(&disk, 3, false).unwrap();
            store.work(2).unwrap();
            let alpha = store.volume("alpha").unwrap();
            alpha.write_at(96 << 10, &pattern(9, 100 << 10), false).unwrap();
            alpha.discard(4096, 200 << 10).unwrap();
            store.create_snapshot("alpha", "late", &SnapshotOptions::default()).unwrap();
            store.rename_volume("beta", "gamma").unwrap();
            alpha.write_at(4096, &pattern(10, 4096), true).unwrap();
        }
        if name == "full" {
            tail = leave_everything_open(&disk);
            pack(&beside(&path, ".tail.gz"), &tail.lock().unwrap());
        }
        pack(&path, &disk.bytes());
        let store = open_with(&disk, 4, true, &tail).unwrap();
        fs::write(beside(&path, ".contents.txt"), summary(&store)).unwrap();
        fs::write(beside(&path, ".dump.json"), dump(&store)).unwrap();
    }
    // The same calls make the same bytes, so that what made an image can be told from its source.
    let (one, two) = (Mem::new(SIZE), Mem::new(SIZE));
    for disk in [&one, &two] {
        Store::init_on(disk, &crate::common::options(), &FixedEnv::new(1)).unwrap();
    }
    assert!(one.bytes() == two.bytes());
}

/// Volumes on a file: written to, with zeros over the file, snapshots and a clone; left open.
fn fill_on_a_file(store: &Store, file: &Arc<dyn Backing>) {
    store.create_backed("on", 2 << 20, file).unwrap();
    let on = store.volume("on").unwrap();
    on.write_at(8 << 10, &pattern(1, 20 << 10), false).unwrap();
    on.discard(128 << 10, 256 << 10).unwrap();
    on.write_zeroes(40 << 10, 12 << 10, false).unwrap();
    store.create_snapshot("on", "one", &SnapshotOptions::default()).unwrap();
    store.clone_volume("on", "one", "clone").unwrap();
    let clone = store.volume("clone").unwrap();
    clone.write_at(200 << 10, &pattern(2, 6 << 10), false).unwrap();
    clone.discard(600 << 10, 100 << 10).unwrap();
}

#[test]
#[ignore = "made once, as the others"]
fn make_a_golden_image_on_a_file() {
    let folder = Path::new(FIXTURES).join(BACKED);
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("backed.img.gz");
    assert!(!path.exists(), "{} is there: golden images are never made again", path.display());
    let sector = |at: usize| [(at * 37 + at / 256 * 11) as u8 | 1; 512];
    let file: Arc<dyn Backing> = Arc::new(OnDisk((0..FILE_SECTORS).flat_map(sector).collect()));
    let mut bytes = vec![0; file.size() as usize];
    file.read_at(0, &mut bytes).unwrap();
    pack(&beside(&path, FILE_ENDING), &bytes);

    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    let given = store.attach_backing(Arc::clone(&file));
    fill_on_a_file(&store, &given);
    store.close().unwrap();
    // A second session that ends with everything still to be redone.
    let store = open(&disk, 3, false).unwrap();
    let _given = store.attach_backing(Arc::clone(&file));
    let on = store.volume("on").unwrap();
    on.write_at(1 << 20, &pattern(4, 5000 / 512 * 512), false).unwrap();
    on.discard(1100 << 10, 100 << 10).unwrap();
    store.create_snapshot("on", "two", &SnapshotOptions::default()).unwrap();
    on.write_at(44 << 10, &pattern(5, 4096), true).unwrap();
    store.create_backed("late", 1536 << 10, &file).unwrap();
    store.volume("late").unwrap().write_at(512, &pattern(6, 512), true).unwrap();
    drop(on);
    drop(store);
    pack(&path, &disk.bytes());
    let store = open(&disk, 4, true).unwrap();
    let _given = store.attach_backing(file);
    fs::write(beside(&path, ".contents.txt"), summary(&store)).unwrap();
    fs::write(beside(&path, ".dump.json"), dump(&store)).unwrap();
}

#[test]
#[ignore = "made once, as the others"]
fn make_a_golden_image_with_encrypted_volumes() {
    let folder = Path::new(FIXTURES).join(ENCRYPTED);
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("encrypted.img.gz");
    assert!(!path.exists(), "{} is there: golden images are never made again", path.display());
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_encrypted("file", 1 << 20, &Secret::KeyFile([7; 32].into())).unwrap();
    let file = store.volume("file").unwrap();
    file.write_at(40 << 10, &pattern(1, 30 << 10), false).unwrap();
    file.write_at(5 * 512, &pattern(2, 3 * 512), false).unwrap();
    store.create_snapshot("file", "one", &SnapshotOptions::default()).unwrap();
    file.write_zeroes(40 << 10, 12 << 10, false).unwrap();
    file.write_at(60 << 10, &pattern(3, 9 * 512), false).unwrap();
    store.create_volume("plain", 512 << 10).unwrap();
    store.volume("plain").unwrap().write_at(0, &pattern(5, 4096), false).unwrap();
    drop(file);
    store.close().unwrap();
    // A second session that ends with everything still to be redone.
    let store = open(&disk, 3, false).unwrap();
    unlock(&store);
    store.clone_volume("file", "one", "clone").unwrap();
    store.volume("clone").unwrap().write_at(4096, &pattern(6, 5 * 512), true).unwrap();
    let word = Secret::passphrase("correct horse").unwrap();
    store.rekey("clone", &Secret::KeyFile([7; 32].into()), &word).unwrap();
    drop(store);
    pack(&path, &disk.bytes());
    let store = open(&disk, 4, true).unwrap();
    unlock(&store);
    fs::write(beside(&path, ".contents.txt"), summary(&store)).unwrap();
    fs::write(beside(&path, ".dump.json"), dump(&store)).unwrap();
}

#[test]
#[ignore = "made once, as the others"]
fn make_a_golden_image_with_compressed_extents() {
    let folder = Path::new(FIXTURES).join(COMPRESSED);
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("compressed.img.gz");
    assert!(!path.exists(), "{} is there: golden images are never made again", path.display());
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    finish_work(&store);
    // A frame that is kept as it is, and one of zeros.
    let noise: Vec<u8> = (0..5000_u64).flat_map(|i| (i * i * 0x9e37_79b9).to_le_bytes()).collect();
    let alpha = store.volume("alpha").unwrap();
    alpha.write_at(256 << 10, &noise[..16 << 10], false).unwrap();
    alpha.write_at(272 << 10, &[0; 16 << 10], false).unwrap();
    store.compress("alpha", &mut |_| true).unwrap();
    drop(alpha);
    store.close().unwrap();
    // A second session that ends with everything still to be redone.
    let store = open(&disk, 3, false).unwrap();
    store.compress("copy@x", &mut |_| true).unwrap();
    let alpha = store.volume("alpha").unwrap();
    alpha.write_at(12 << 10, &pattern(9, 5 * 512), false).unwrap();
    alpha.discard(144 << 10, 8 << 10).unwrap();
    alpha.write_zeroes(300 << 10, 4 << 10, true).unwrap();
    drop(alpha);
    drop(store);
    pack(&path, &disk.bytes());
    let store = open(&disk, 4, true).unwrap();
    fs::write(beside(&path, ".contents.txt"), summary(&store)).unwrap();
    fs::write(beside(&path, ".dump.json"), dump(&store)).unwrap();
}
