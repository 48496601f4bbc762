//! File systems inside snapshots, mounted through a loop device: the files of ten moments.

use crate::server::{Server, can_mount, noise};
use crate::tools::{has, must, run};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

const SNAPSHOTS: u64 = 10;
const IMAGE_BYTES: u64 = 64 << 20;

/// Something mounted, until it is dropped.
pub struct Mounted(pub PathBuf);

impl Mounted {
    pub fn new(image: &Path, point: PathBuf, options: &str) -> Result<Self, String> {
        fs::create_dir_all(&point).unwrap();
        let arguments = ["-o", options, image.to_str().unwrap(), point.to_str().unwrap()];
        run("mount", &arguments).map(|_| Self(point))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let point = self.0.to_str().unwrap();
        if run("umount", &[point]).is_err() {
            let _ = run("umount", &["-l", point]);
        }
    }
}

/// Checksums of all files by path.
fn sums(directory: &Path) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory_now) = open.pop() {
        for entry in fs::read_dir(directory_now).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                open.push(entry.path());
                continue;
            }
            let mut hasher = DefaultHasher::new();
            fs::read(entry.path()).unwrap().hash(&mut hasher);
            let name = entry.path().strip_prefix(directory).unwrap().display().to_string();
            found.insert(name, hasher.finish());
        }
    }
    found
}

/// Writes, replaces and removes files.
fn change(directory: &Path, round: u64) {
    let mut random = fastrand::Rng::with_seed(round);
    let part = directory.join(format!("d{}", round % 3));
    fs::create_dir_all(&part).unwrap();
    for _ in 0..12 {
        let name = part.join(format!("f{}", random.u8(..10)));
        if random.u8(..4) == 0 {
            let _ = fs::remove_file(name);
        } else {
            fs::write(name, noise(random.u64(..), random.usize(..200_000))).unwrap();
        }
    }
    fs::write(directory.join("round"), round.to_string()).unwrap();
}

fn ten_moments(make: &[&str], while_written: &str, options: &str) {
    if !can_mount() || !has(make[0]) {
        return;
    }
    let server = Server::new(512 << 20);
    let image = server.dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
    must(make[0], &[&make[1..], &[image.to_str().unwrap()]].concat());
    server.ask(&json!(["create", "v", IMAGE_BYTES]));
    let mut kept = Vec::new();
    for round in 0..SNAPSHOTS {
        match Mounted::new(&image, server.dir.path().join("work"), while_written) {
            Ok(mounted) => {
                change(&mounted.0, round);
                kept.push(sums(&mounted.0));
            }
            Err(error) => {
                println!("SKIPPED {}: needs loop devices and its driver: {error}", make[0]);
                return;
            }
        }
        server.ask(&json!(["load", "v", image]));
        server.ask(&json!(["snapshot", "v", format!("s{round}")]));
    }
    // All at once, and then the head beside them.
    let mounted: Vec<_> = (0..SNAPSHOTS)
        .map(|round| {
            let image = server.path(&format!("volumes/v/snapshots/s{round}.raw"));
            let point = server.dir.path().join(format!("s{round}"));
            Mounted::new(&image, point, options).unwrap()
        })
        .collect();
    for (round, (mounted, kept)) in mounted.iter().zip(&kept).enumerate() {
        assert!(kept.len() > 3 && sums(&mounted.0) == *kept, "snapshot {round}");
    }
    assert!(kept.windows(2).all(|pair| pair[0] != pair[1]));
}

#[test]
fn ten_snapshots_of_ext4_have_the_files_of_their_time() {
    ten_moments(&["mkfs.ext4", "-q", "-F"], "loop", "loop,ro,noload");
}

#[test]
fn ten_snapshots_of_xfs_have_the_files_of_their_time() {
    let options = "loop,ro,norecovery,nouuid";
    ten_moments(&["mkfs.xfs", "-q", "-f", "--unsupported"], "loop,nouuid", options);
}
