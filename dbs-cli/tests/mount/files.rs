//! `dbs mount --files`.

use super::{Site, can_mount, kill, runs, wait_for};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

pub fn has(program: &str) -> bool {
    let script = format!("PATH=$PATH:/usr/sbin:/sbin command -v {program}");
    let found = Command::new("sh").args(["-c", &script]).stdout(Stdio::null()).status();
    let found = found.unwrap().success();
    if !found {
        println!("SKIPPED file systems: needs {program}");
    }
    found
}

/// Loop devices over files below a directory.
fn loops(directory: &Path) -> usize {
    let devices = fs::read_dir("/sys/block").unwrap();
    let backing = devices.filter_map(|device| {
        fs::read_to_string(device.ok()?.path().join("loop/backing_file")).ok()
    });
    backing.filter(|path| path.starts_with(directory.to_str().unwrap())).count()
}

/// An image with two partitions: ext4 with a file in the second.
fn partitioned(site: &Site) {
    let content = site.place.path("content");
    fs::create_dir(&content).unwrap();
    fs::write(content.join("file"), b"what it holds").unwrap();
    let path = site.place.path("partition");
    File::create(&path).unwrap().set_len(32 << 20).unwrap();
    let made = Command::new("sh")
        .args(["-c", "PATH=$PATH:/usr/sbin:/sbin exec mke2fs -q -t ext4 -d \"$0\" \"$1\""])
        .args([&content, &path])
        .stdin(Stdio::null())
        .status();
    assert!(made.unwrap().success());
    let image = File::create(site.place.path("disk")).unwrap();
    image.set_len(64 << 20).unwrap();
    let mut record = [0; 512];
    for (index, (first, sectors)) in [(2048_u32, 2048_u32), (8192, 65536)].into_iter().enumerate() {
        let entry = &mut record[446 + 16 * index..][..16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&sectors.to_le_bytes());
    }
    record[510..].copy_from_slice(&[0x55, 0xaa]);
    image.write_all_at(&record, 0).unwrap();
    image.write_all_at(&fs::read(path).unwrap(), 8192 * 512).unwrap();
    site.place.dbs("volume import d disk").ok("import");
    site.place.dbs("snapshot create d@s").ok("snapshot");
}

#[test]
fn the_files_inside_a_snapshot() {
    if !can_mount() || !has("mke2fs") || !has("mount") {
        return;
    }
    if !Path::new("/dev/loop-control").exists() {
        println!("SKIPPED file systems: needs loop devices");
        return;
    }
    let site = Site::new();
    partitioned(&site);
    let run = site.place.path("run").display().to_string();
    let clean = || {
        let left = fs::read_dir(&run).map_or(0, |entries| {
            entries.filter(|e| e.as_ref().unwrap().file_name() != "log").count()
        });
        left == 0 && loops(site.place.dir.path()) == 0 && !site.is_mounted()
    };
    let mounted = site.json("mount --files d@s mnt");
    assert_eq!((&mounted["partition"], &mounted["file_system"]), (&2.into(), &"ext4".into()));
    assert_eq!(fs::read(site.path("file")).unwrap(), b"what it holds");
    let error = fs::write(site.path("other"), b"x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let pid = mounted["pid"].as_u64().unwrap();
    site.dbs("umount mnt").ok("umount");
    assert!(!runs(pid));
    // The kernel may let go of a loop device a little later.
    wait_for("nothing is left", clean);
    // By its number, and unmounted by others.
    let pid = site.json("mount --files d@s --partition 2 mnt")["pid"].as_u64().unwrap();
    assert!(Command::new("umount").arg(site.place.path("mnt")).status().unwrap().success());
    wait_for("the end of its server", || !runs(pid));
    wait_for("nothing is left", clean);
    let refused = site.dbs("mount --files d@s --partition 3 mnt").exits(2, "no such partition");
    assert!(refused.stderr.contains("2 (ext4, 32.0 MiB)"), "{}", refused.stderr);
    let refused = site.dbs("mount --files d@s --partition 1 mnt").exits(2, "nothing in it");
    assert!(refused.stderr.contains("no known file system"), "{}", refused.stderr);
    wait_for("nothing is left", clean);
    // By a signal; and when its server was killed.
    let pid = site.json("mount --files d@s mnt")["pid"].as_u64().unwrap();
    kill(pid, "TERM");
    wait_for("the end of its server", || !runs(pid));
    wait_for("nothing is left", clean);
    let pid = site.json("mount --files d@s mnt")["pid"].as_u64().unwrap();
    kill(pid, "KILL");
    wait_for("its death", || !runs(pid));
    site.dbs("umount mnt").ok("umount");
    wait_for("nothing is left", clean);
}
