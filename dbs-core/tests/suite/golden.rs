//! Images that earlier versions made: they open, hold what they held, and can be written to.

use crate::common::{FixedEnv, Mem, SIZE, contents, dump, fill, finish_work, init, open, pattern};
use dbs_core::Store;
use dbs_core::format::crc::crc32c;
use dbs_core::store::SnapshotOptions;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
/// The version whose images [`make_golden_images`] makes.
const VERSION: &str = "v2.0";
const IMAGES: [&str; 3] = ["empty", "clean", "dirty"];

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
    let mut bytes = Vec::new();
    GzDecoder::new(File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    Arc::new(Mem::from_bytes(bytes))
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    PathBuf::from(path.to_string_lossy().replace(".img.gz", ending))
}

/// One line for each volume and snapshot: name, bytes, CRC32C of all of them.
fn summary(store: &Store) -> String {
    let lines = contents(store);
    lines.iter().map(|(spec, b)| format!("{spec} {} {:08x}\n", b.len(), crc32c(b))).collect()
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
    assert!(images.len() >= IMAGES.len(), "{images:?}");
    for path in images {
        let name = path.display().to_string();
        let expected_contents = fs::read_to_string(beside(&path, ".contents.txt")).unwrap();
        let expected: Value =
            serde_json::from_str(&fs::read_to_string(beside(&path, ".dump.json")).unwrap())
                .unwrap();

        let disk = load(&path);
        let store = open(&disk, 1, true).unwrap();
        assert_eq!(summary(&store), expected_contents, "{name}");
        assert_says(&serde_json::from_str(&dump(&store)).unwrap(), &expected, &name);
        assert_eq!(Store::check_on(&*disk).unwrap().findings, [], "{name}");

        let store = open(&disk, 2, false).unwrap();
        assert_eq!(summary(&store), expected_contents, "{name}, opened for writing");
        finish_work(&store);
        store.create_volume("later", 1 << 20).unwrap();
        store.volume("later").unwrap().write_at(0, &pattern(8, 1 << 20), false).unwrap();
        store.close().unwrap();
        let store = open(&disk, 3, false).unwrap();
        let mut lines: Vec<_> = summary(&store).lines().map(str::to_owned).collect();
        lines.retain(|line| !line.starts_with("later "));
        assert!(expected_contents.lines().eq(lines), "{name}, after writing");
        assert_eq!(store.check().unwrap().findings, [], "{name}, after writing");
    }
}

/// Made once for each version of the format; see `fixtures/v2.0/README.md`.
#[test]
#[ignore = "makes the images of a new version of the format; never again for one that has them"]
fn make_golden_images() {
    let folder = Path::new(FIXTURES).join(VERSION);
    fs::create_dir_all(&folder).unwrap();
    for name in IMAGES {
        let path = folder.join(format!("{name}.img.gz"));
        assert!(!path.exists(), "{} is there: golden images are never made again", path.display());
        let disk = init(1);
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
        let mut out = GzEncoder::new(File::create(&path).unwrap(), Compression::best());
        out.write_all(&disk.bytes()).unwrap();
        out.finish().unwrap();
        assert!(fs::metadata(&path).unwrap().len() < 100 << 10, "{} is large", path.display());
        let store = open(&disk, 4, true).unwrap();
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
