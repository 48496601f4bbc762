//! `dbs backup mount`.

use super::files::has;
use super::s3_server::{Manner, Server};
use super::{Site, can_mount, kill, noise, runs, wait_for};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 2 * MIB;
const EIO: i32 = 5;
const ESTALE: i32 = 116;

/// A store with volume `vol` of 25 MiB, with holes, and snapshot `vol@one`; and a directory for backups.
fn site() -> (Site, String) {
    let mut site = Site::new();
    site.env = vec![("DBS_TEST_ALONE", "1".to_owned())];
    let image = File::create(site.place.path("disk")).unwrap();
    image.set_len(25 * MIB).unwrap();
    for (offset, seed) in [(0, 2), (7 * MIB, 3), (11 * MIB, 4), (24 * MIB, 5)] {
        image.write_all_at(&noise(seed, MIB as usize), offset).unwrap();
    }
    site.dbs("volume import vol disk").ok("import");
    site.dbs("snapshot create vol@one").ok("snapshot");
    let root = site.place.path("backups");
    fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    (site, url)
}

/// What a snapshot holds.
fn exported(site: &Site, spec: &str) -> Vec<u8> {
    site.dbs(&format!("volume export {spec} exported --force")).ok(spec);
    fs::read(site.place.path("exported")).unwrap()
}

/// The file of a backup, by its name without its time.
fn file(site: &Site, backup: &str) -> PathBuf {
    let folder = fs::read_dir(site.path("volumes/vol")).unwrap();
    let names = folder.map(|entry| entry.unwrap().path());
    let end = format!("_{backup}.raw");
    let found: Vec<_> = names.filter(|path| path.to_str().unwrap().ends_with(&end)).collect();
    assert_eq!(found.len(), 1, "{backup}: {found:?}");
    found[0].clone()
}

fn errors(site: &Site) -> String {
    fs::read_to_string(site.path("errors.log")).unwrap()
}

/// Files of a kind in a backup store.
fn stored(root: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(stored(&entry.path(), end)),
            false if entry.path().to_str().unwrap().ends_with(end) => found.push(entry.path()),
            false => {}
        }
    }
    found
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// Has the next reads ask the process, not the kernel's cache.
fn forget() {
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
}

fn show_backups(site: &Site, url: &str) {
    site.dbs(&format!("backup create vol@one {url} --name backup-1 --label a=b")).ok("create");
    let mounted = site.json(&format!("backup mount {url} mnt"));
    let pid = mounted["pid"].as_u64().unwrap();
    let wanted = exported(site, "vol@one");

    // A name by which a person finds it, and the facts of the snapshot.
    let path = file(site, "backup-1");
    let snapshot = site.json("snapshot show vol@one")["created_ns"].as_u64().unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.mode() & 0o7777), (25 * MIB, 0o400));
    assert_eq!(metadata.mtime() as u64, snapshot / 1_000_000_000);
    assert_eq!(metadata.blocks() * 512, 4 * BLOCK, "holes are holes");
    let date = date(metadata.mtime()) + "_backup-1.raw";
    assert_eq!(path.file_name().unwrap().to_str().unwrap(), date);
    assert_eq!(fs::read_link(site.path("volumes/vol/latest")).unwrap(), Path::new(&date));

    // The content, as a whole, and here and there.
    assert!(fs::read(&path).unwrap() == wanted);
    let copy = site.place.path("copy");
    let copied = Command::new("cp").arg("--sparse=auto").args([&path, &copy]).status();
    assert!(copied.unwrap().success());
    assert!(fs::read(&copy).unwrap() == wanted);
    assert!(fs::metadata(&copy).unwrap().blocks() * 512 <= 4 * BLOCK, "what are holes is skipped");
    forget();
    let open = File::open(&path).unwrap();
    for at in [0, 4095, BLOCK - 100, 7 * MIB - 5, 12 * MIB - 1, 25 * MIB - 3] {
        let mut bytes = vec![1; 9000];
        let count = open.read_at(&mut bytes, at).unwrap();
        assert!(bytes[..count] == wanted[at as usize..][..count] && count > 0, "{at}");
    }
    drop(open);
    assert_eq!(errno(fs::write(&path, b"x")), Some(30), "read-only");
    assert_eq!(errors(site), "");

    // What comes later shows up; several at once.
    site.dbs("snapshot create vol@two").ok("snapshot");
    site.dbs(&format!("backup create vol@two {url} --name backup-2")).ok("create");
    let second = file(site, "backup-2");
    std::thread::scope(|scope| {
        for path in [&path, &second, &path, &second] {
            let wanted = &wanted;
            scope.spawn(move || assert!(fs::read(path).unwrap() == *wanted));
        }
    });
    site.json("umount mnt");
    assert!(!runs(pid) && !site.is_mounted());

    // One volume or backup alone.
    site.json(&format!("backup mount {url}?backup=backup-1&volume=vol mnt"));
    let names = fs::read_dir(site.path("volumes/vol")).unwrap();
    let mut names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [date.as_str(), "latest"]);
    assert!(fs::metadata(site.path("volumes/vol").join(second.file_name().unwrap())).is_err());
    site.json("umount mnt");
    for (args, code) in [
        (format!("backup mount {url}?volume=none mnt"), 10),
        (format!("backup mount {url}?volume=vol&backup=none mnt"), 10),
        (format!("backup mount --files {url}?volume=vol mnt"), 2),
        (format!("backup mount {url} nowhere"), 10),
    ] {
        site.dbs(&args).exits(code, &args);
        assert!(!site.is_mounted(), "{args}");
    }
}

fn date(seconds: i64) -> String {
    let mut command = Command::new("date");
    command.args(["-u", "+%Y-%m-%dT%H-%M-%SZ", "-d", &format!("@{seconds}")]);
    let output = command.output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn backups_in_a_directory_as_files() {
    let true = can_mount() else { return };
    let (site, url) = site();
    show_backups(&site, &url);
    let left = stored(&site.place.path("backups"), ".lck");
    assert!(left.is_empty(), "locks stay: {left:?}");
}

fn s3_site() -> (Site, Arc<Server>, &'static str) {
    let (mut site, _) = site();
    let (server, endpoint) = Server::start(Manner::Well);
    site.env.extend([
        ("AWS_ENDPOINTS", endpoint),
        ("AWS_ACCESS_KEY_ID", "key".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
    ]);
    (site, server, "s3://bucket@region/some/path/")
}

#[test]
fn backups_on_s3_as_files() {
    let true = can_mount() else { return };
    let (site, server, url) = s3_site();
    show_backups(&site, url);
    let left = server.objects.lock().unwrap().keys().any(|key| key.ends_with(".lck"));
    assert!(!left, "a lock stays");
}

/// Reads wait for a server that is away, and go on when it is back.
#[test]
fn a_server_that_goes_away_and_comes_back() {
    let true = can_mount() else { return };
    let (site, server, url) = s3_site();
    site.dbs(&format!("backup create vol@one {url} --name backup-1")).ok("create");
    site.json(&format!("backup mount {url} mnt"));
    let wanted = exported(&site, "vol@one");
    let path = file(&site, "backup-1");
    let open = File::open(&path).unwrap();
    let mut bytes = vec![0; 4096];
    open.read_exact_at(&mut bytes, 0).unwrap();
    server.away.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut bytes = vec![0; MIB as usize];
            // No block before it brings this one.
            open.read_exact_at(&mut bytes, 24 * MIB).map(|()| bytes)
        });
        std::thread::sleep(Duration::from_millis(700));
        assert!(!reader.is_finished(), "it does not wait");
        server.away.store(false, Ordering::SeqCst);
        assert!(reader.join().unwrap().unwrap() == wanted[24 * MIB as usize..]);
    });
    drop(open);
    site.json("umount mnt");
}

#[test]
fn damage_is_an_error_with_its_reason_in_the_log() {
    let true = can_mount() else { return };
    let (site, url) = site();
    site.dbs(&format!("backup create vol@one {url} --name backup-1")).ok("create");
    let wanted = exported(&site, "vol@one");
    let root = site.place.path("backups");
    let mut server = site.foreground(&format!("backup mount -f {url} mnt"));
    let path = file(&site, "backup-1");
    // The block at 6 MiB, by the facts of the backup.
    let facts = fs::read_to_string(&stored(&root, "backup_backup-1.cfg")[0]).unwrap();
    let name =
        facts.split(r#""Offset":6291456,"BlockChecksum":""#).nth(1).unwrap()[..64].to_owned();
    let block = stored(&root, &format!("{name}.blk"))[0].clone();
    let before = fs::read(&block).unwrap();
    let mut damaged = before.clone();
    damaged[before.len() / 2] ^= 1;
    fs::write(&block, &damaged).unwrap();
    let open = File::open(&path).unwrap();
    let mut bytes = vec![0; 4096];
    // Next to it and in it, and never a zero in its place.
    assert_eq!(errno(open.read_at(&mut bytes, 7 * MIB)), Some(EIO));
    assert_eq!(errno(fs::read(&path)), Some(EIO));
    open.read_exact_at(&mut bytes, 11 * MIB).unwrap();
    assert!(bytes == wanted[11 * MIB as usize..][..4096]);
    let reason = format!("block {name} at 6291456 of backup backup-1 of volume vol: checksum");
    assert!(errors(&site).contains(&reason), "{}", errors(&site));
    assert!(site.log().contains(&reason), "{}", site.log());
    // Away, and as it was.
    fs::remove_file(&block).unwrap();
    assert_eq!(errno(open.read_at(&mut bytes, 7 * MIB)), Some(EIO));
    fs::create_dir_all(block.parent().unwrap()).unwrap();
    fs::write(&block, &before).unwrap();
    assert!(fs::read(&path).unwrap() == wanted);
    // The whole store goes away and comes back.
    forget();
    let elsewhere = site.place.path("elsewhere");
    fs::rename(&root, &elsewhere).unwrap();
    // The cache has all of it.
    open.read_exact_at(&mut bytes, 7 * MIB).unwrap();
    drop(open);
    server.signal("TERM");
    super::wait(&mut server.0, "it is unmounted without its store");
    fs::rename(&elsewhere, &root).unwrap();
    let mut server = site.foreground(&format!("backup mount -f --cache 0 {url} mnt"));
    let open = File::open(&path).unwrap();
    open.read_exact_at(&mut bytes, 0).unwrap();
    forget();
    fs::rename(&root, &elsewhere).unwrap();
    let away = errno(open.read_at(&mut bytes, 7 * MIB));
    assert!(matches!(away, Some(EIO | ESTALE)), "{away:?}");
    fs::rename(&elsewhere, &root).unwrap();
    open.read_exact_at(&mut bytes, 7 * MIB).unwrap();
    assert!(bytes == wanted[7 * MIB as usize..][..4096]);
    drop(open);
    server.signal("TERM");
    assert_eq!(super::wait(&mut server.0, "TERM"), 0, "{}", site.log());
    assert!(!site.is_mounted());
}

#[test]
fn what_is_open_is_not_pruned() {
    let true = can_mount() else { return };
    let (site, url) = site();
    for backup in ["backup-1", "backup-2"] {
        site.dbs(&format!("backup create vol@one {url} --name {backup}")).ok("create");
        std::thread::sleep(Duration::from_millis(1100));
    }
    let prune = format!("--yes backup prune {url} --keep-last 1");
    site.json(&format!("backup mount {url} mnt"));
    // Nobody is kept from anything by a look.
    let path = file(&site, "backup-1");
    assert!(stored(&site.place.path("backups"), ".lck").is_empty());
    let open = File::open(&path).unwrap();
    let refused = site.dbs(&prune).exits(11, "somebody reads");
    assert!(refused.stderr.contains("failed to acquire lock"), "{}", refused.stderr);
    drop(open);
    let begun = Instant::now();
    wait_for("the lock to go", || stored(&site.place.path("backups"), ".lck").is_empty());
    assert!(begun.elapsed() > Duration::from_secs(5), "the next one to open it would wait");
    site.dbs(&prune).ok("nobody reads");
    wait_for("its name to go", || !path.exists());
    assert_eq!(errno(File::open(&path)), Some(2));
    site.json("umount mnt");

    // Without a lock: deleted under whoever reads, who is told.
    site.json(&format!("backup mount --no-lock --cache 0 {url} mnt"));
    let open = File::open(file(&site, "backup-2")).unwrap();
    let mut bytes = vec![0; 4096];
    open.read_exact_at(&mut bytes, 0).unwrap();
    site.dbs(&format!("--yes backup delete {url}?backup=backup-2&volume=vol")).ok("delete");
    assert_eq!(errno(open.read_at(&mut bytes, 11 * MIB)), Some(ESTALE));
    assert!(errors(&site).contains("backup backup-2 of volume vol is not there any more"));
    drop(open);
    site.json("umount mnt");
}

#[test]
fn many_backups_are_listed_quickly() {
    let true = can_mount() else { return };
    let (site, url) = site();
    site.dbs(&format!("backup create vol@one {url} --name backup-1")).ok("create");
    let root = site.place.path("backups");
    let config = stored(&root, "backup_backup-1.cfg")[0].clone();
    let text = fs::read_to_string(&config).unwrap();
    for number in 0..500 {
        let text = text.replace("backup-1", &format!("night-{number}"));
        let name = format!("backup_night-{number}.cfg");
        fs::write(config.with_file_name(name), text).unwrap();
    }
    // Whoever read a block would find none.
    for block in stored(&root, ".blk") {
        fs::remove_file(block).unwrap();
    }
    site.json(&format!("backup mount {url} mnt"));
    let list = || {
        let begun = Instant::now();
        let output = Command::new("ls").arg("-l").arg(site.path("volumes/vol")).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 503);
        begun.elapsed()
    };
    let times = [list(), list()];
    println!("500 backups listed in {times:?}");
    assert!(times.iter().all(|time| *time < Duration::from_secs(20)), "{times:?}");
    assert_eq!(errors(&site), "");
    site.json("umount mnt");
}

#[test]
fn the_file_system_inside_a_backup() {
    if !can_mount() || !has("mke2fs") || !has("mount") || !has("losetup") {
        return;
    }
    if !Path::new("/dev/loop-control").exists() {
        println!("SKIPPED file systems: needs loop devices");
        return;
    }
    let (site, url) = site();
    let content = site.place.path("content");
    fs::create_dir(&content).unwrap();
    fs::write(content.join("file"), b"what it holds").unwrap();
    fs::write(content.join("large"), noise(9, 9 << 20)).unwrap();
    let image = site.place.path("fs");
    File::create(&image).unwrap().set_len(64 * MIB).unwrap();
    let shell = |script: &str, first: &Path, second: &Path| {
        let script = format!("PATH=$PATH:/usr/sbin:/sbin; {script}");
        let done = Command::new("sh").args(["-ec", &script]).args([first, second]).output();
        let done = done.unwrap();
        assert!(done.status.success(), "{script}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    shell("mke2fs -q -t ext4 -d \"$0\" \"$1\" </dev/null", &content, &image);
    site.dbs("volume import data fs").ok("import");
    site.dbs("snapshot create data@s").ok("snapshot");
    site.dbs(&format!("backup create data@s {url} --name backup-1")).ok("create");
    let check = |point: &Path| {
        assert_eq!(fs::read(point.join("file")).unwrap(), b"what it holds");
        assert!(fs::read(point.join("large")).unwrap() == noise(9, 9 << 20));
    };
    // By hand.
    site.json(&format!("backup mount {url} mnt"));
    let inside = site.place.path("inside");
    fs::create_dir(&inside).unwrap();
    let device = shell(
        "losetup --read-only --find --show \"$0\"",
        &site.path("volumes/data/latest"),
        &inside,
    );
    let device = PathBuf::from(device.trim());
    shell("mount -t ext4 -o ro,noload \"$0\" \"$1\"", &device, &inside);
    check(&inside);
    shell("umount \"$1\"; losetup -d \"$0\"", &device, &inside);
    wait_for("the loop device lets go", || site.dbs("umount mnt").code == 0);
    // In one.
    let backup = format!("{url}?backup=backup-1&volume=data");
    let mounted = site.json(&format!("backup mount --files {backup} mnt"));
    assert_eq!((&mounted["file_system"], &mounted["backup"]), (&"ext4".into(), &backup.into()));
    check(&site.path(""));
    let pid = mounted["pid"].as_u64().unwrap();
    site.dbs("umount mnt").ok("umount");
    assert!(!runs(pid));
}

#[test]
fn a_process_that_was_killed() {
    let true = can_mount() else { return };
    let (site, url) = site();
    site.dbs(&format!("backup create vol@one {url} --name backup-1")).ok("create");
    let pid = site.json(&format!("backup mount {url} mnt"))["pid"].as_u64().unwrap();
    kill(pid, "KILL");
    wait_for("its death", || !runs(pid));
    site.json(&format!("backup mount {url} mnt"));
    assert!(fs::read(file(&site, "backup-1")).unwrap() == exported(&site, "vol@one"));
    site.json("umount mnt");
}
