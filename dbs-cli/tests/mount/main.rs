//! `dbs mount`, `dbs umount`, `dbs serve --mount` and `dbs backup mount`, with real mounts.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../disk/mod.rs"]
mod disk;
#[path = "../support/mod.rs"]
mod support;

mod backups;
mod files;
mod readers;
mod replay;
#[path = "../../../dbs-backup/tests/suite/s3_server.rs"]
mod s3_server;

use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Place, Run, can_mount, hangups_are_ignored, noise};

const PATIENCE: Duration = Duration::from_secs(120);

#[track_caller]
fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A store with volume `v` and snapshot `v@s`, and a directory to mount it at. What is left mounted
/// there goes with it, and with that its server.
struct Site {
    place: Place,
    /// Further variables for `dbs`.
    env: Vec<(&'static str, String)>,
}

impl Site {
    fn new() -> Self {
        let place = Place::with_store();
        fs::write(place.path("image"), noise(1, 1 << 20)).unwrap();
        place.dbs("volume import v image").ok("import");
        place.dbs("snapshot create v@s").ok("snapshot");
        fs::create_dir(place.path("mnt")).unwrap();
        Self { place, env: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path("mnt").join(name)
    }

    fn snapshot(&self) -> PathBuf {
        self.path("volumes/v/snapshots/s.raw")
    }

    fn is_mounted(&self) -> bool {
        let point = self.place.path("mnt").canonicalize();
        let point = point.unwrap_or_else(|_| self.place.path("mnt"));
        fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .any(|line| line.split(' ').nth(4) == point.to_str())
    }

    fn command(&self, args: &str) -> Command {
        let mut command = self.place.bare();
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        command.env("DBS_STORE", self.place.store()).env("PATH", path);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.args(args.split_whitespace());
        command
    }

    /// Runs `dbs`, its output in files: whoever it leaves behind can keep no pipe open. Nor can it
    /// take for ever.
    fn dbs(&self, args: &str) -> Run {
        let (out, err) = (self.place.path("stdout"), self.place.path("stderr"));
        let mut child = self
            .command(args)
            .stdout(File::create(&out).unwrap())
            .stderr(File::create(&err).unwrap())
            .spawn()
            .unwrap();
        let code = wait(&mut child, args);
        let stderr = fs::read_to_string(err).unwrap();
        Run { code, stdout: fs::read(out).unwrap(), stderr }
    }

    fn json(&self, args: &str) -> Value {
        self.dbs(&format!("--json {args}")).ok(args).json()
    }

    /// A process that serves in the foreground, once it is ready.
    fn foreground(&self, args: &str) -> Server {
        let child = self
            .command(args)
            .stdout(Stdio::null())
            .stderr(File::create(self.place.path("log")).unwrap())
            .spawn()
            .unwrap();
        let mut server = Server(child);
        wait_for(args, || {
            let ended = server.0.try_wait().unwrap();
            assert!(ended.is_none(), "{args}: {ended:?}\n{}", self.log());
            self.is_mounted() && self.path("store.json").exists()
        });
        server
    }

    /// What the last process in the foreground has said.
    fn log(&self) -> String {
        fs::read_to_string(self.place.path("log")).unwrap()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for _ in 0..4 {
            if self.is_mounted() {
                let _ = Command::new("umount").arg("-l").arg(self.place.path("mnt")).status();
            }
        }
    }
}

struct Server(Child);

impl Server {
    fn signal(&self, signal: &str) {
        kill(u64::from(self.0.id()), signal);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for a process to end; kills it if it does not.
#[track_caller]
fn wait(child: &mut Child, what: &str) -> i32 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap_or(-1);
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{what} did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kill(pid: u64, signal: &str) {
    let sent = Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
    assert!(sent.unwrap().success());
}

/// Whether a process runs; one that is dead and unburied does not.
fn runs(pid: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.rsplit_once(')').unwrap().1.starts_with(" Z"))
}

#[test]
fn in_the_background_until_it_is_unmounted() {
    let true = can_mount() else { return };
    let site = Site::new();
    let mounted = site.json("mount mnt");
    let pid = mounted["pid"].as_u64().unwrap();
    assert!(runs(pid) && mounted["mountpoint"].as_str().unwrap().ends_with("/mnt"));
    assert_eq!(fs::read(site.snapshot()).unwrap(), noise(1, 1 << 20));
    // It is a session of its own, and holds nothing of its caller's.
    let null = Path::new("/dev/null");
    for descriptor in 0..3 {
        let link = fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).unwrap();
        assert_eq!(link, null, "descriptor {descriptor}");
    }
    assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
    site.dbs("volume list").ok("others may read");
    site.dbs("volume create w 1MiB").exits(11, "but not write");
    let again = site.dbs("mount mnt").exits(11, "mounted already");
    assert!(again.stderr.contains("dbs umount"), "{}", again.stderr);
    let file = File::open(site.snapshot()).unwrap();
    let busy = site.dbs("umount mnt").exits(11, "in use");
    assert!(busy.stderr.contains("--lazy"), "{}", busy.stderr);
    drop(file);
    let unmounted = site.json("umount mnt");
    assert_eq!((&unmounted["was_dead"], &unmounted["pid"]), (&false.into(), &pid.into()));
    assert!(!site.is_mounted() && !runs(pid));
    site.dbs("volume create w 1MiB").ok("the store is free at once");
    site.dbs("umount mnt").exits(10, "nothing is mounted");
    // The store in front of the directory, and a plain umount.
    let store = site.place.store().display().to_string();
    let pid = site.json(&format!("mount {store} mnt"))["pid"].as_u64().unwrap();
    assert!(Command::new("umount").arg(site.place.path("mnt")).status().unwrap().success());
    wait_for("the end of its server", || !runs(pid));
}

#[test]
fn failures_are_told_by_who_was_asked() {
    let true = can_mount() else { return };
    let site = Site::new();
    for (args, code, word) in [
        ("mount nowhere", 10, "nowhere"),
        ("mount image", 2, "no directory"),
        ("mount nothing.dbs mnt", 10, "nothing.dbs"),
        ("mount -o no_such_option mnt", 2, "no_such_option"),
        ("mount --files v@nothing mnt", 10, "nothing"),
        ("mount --files v@s mnt", 2, "no known file system"),
        ("mount --files v mnt", 2, "VOLUME@SNAPSHOT"),
    ] {
        for args in [args.to_owned(), format!("{args} -f")] {
            let refused = site.dbs(&args).exits(code, &args);
            assert!(refused.stderr.contains(word), "{args}: {}", refused.stderr);
            assert!(!site.is_mounted(), "{args}");
        }
    }
}

#[test]
fn signals_unmount() {
    let true = can_mount() else { return };
    let site = Site::new();
    let ignored = hangups_are_ignored();
    for signal in ["TERM", "INT", "HUP"].into_iter().take(if ignored { 2 } else { 3 }) {
        let mut server = site.foreground("mount -f mnt");
        server.signal(signal);
        assert_eq!(wait(&mut server.0, signal), 0, "{}", site.log());
        assert!(!site.is_mounted());
    }
    // In use: out of sight, and served until its user has done.
    let mut server = site.foreground("mount --foreground mnt");
    let file = File::open(site.snapshot()).unwrap();
    server.signal("TERM");
    wait_for("out of sight", || !site.is_mounted());
    let mut bytes = vec![0; 4096];
    file.read_exact_at(&mut bytes, 512 << 10).unwrap();
    assert_eq!(bytes, noise(1, 1 << 20)[512 << 10..][..4096]);
    assert!(server.0.try_wait().unwrap().is_none());
    drop(file);
    assert_eq!(wait(&mut server.0, "its last user is gone"), 0, "{}", site.log());
    // A second signal does not wait.
    let mut server = site.foreground("mount -f mnt");
    let _file = File::open(site.snapshot()).unwrap();
    server.signal("INT");
    wait_for("out of sight", || !site.is_mounted());
    server.signal("INT");
    assert_eq!(wait(&mut server.0, "a second signal"), 130);
}

#[test]
fn a_dead_mount_is_taken_away() {
    let true = can_mount() else { return };
    let site = Site::new();
    for round in 0..2 {
        let pid = site.json("mount mnt")["pid"].as_u64().unwrap();
        kill(pid, "KILL");
        wait_for("its death", || !runs(pid));
        assert!(site.is_mounted());
        let dead = || {
            let error = fs::read_dir(site.path("")).map(drop).map_err(|e| e.raw_os_error());
            error == Err(Some(107))
        };
        wait_for("not connected", dead);
        if round == 0 {
            let pid = site.json("mount mnt")["pid"].as_u64().unwrap();
            assert_eq!(fs::read(site.snapshot()).unwrap(), noise(1, 1 << 20));
            site.dbs("umount mnt").ok("umount");
            assert!(!site.is_mounted() && !runs(pid));
        } else {
            let unmounted = site.dbs("umount mnt").ok("umount");
            assert!(unmounted.text().contains("dead"), "{}", unmounted.text());
            assert!(!site.is_mounted());
        }
    }
}

#[test]
fn beside_a_server_it_shows_what_is() {
    let true = can_mount() else { return };
    let site = Site::new();
    let mut server = site.foreground("--quiet serve --mount mnt");
    site.dbs("snapshot create v@t").ok("snapshot");
    assert_eq!(fs::read(site.path("volumes/v/latest")).unwrap(), noise(1, 1 << 20));
    let file = File::open(site.path("volumes/v/snapshots/t.raw")).unwrap();
    let mut bytes = vec![0; 4096];
    file.read_exact_at(&mut bytes, 0).unwrap();
    site.dbs("--yes snapshot delete v@t").ok("nobody is in its way");
    assert!(!site.path("volumes/v/snapshots/t.raw").exists());
    let stale = || file.read_at(&mut [0; 512], 0).is_err_and(|e| e.raw_os_error() == Some(116));
    wait_for("a stale file", stale);
    let refused = site.dbs("mount mnt").exits(11, "the store is served");
    assert!(refused.stderr.contains("dbs serve --mount"), "{}", refused.stderr);
    // Unmounted, the server goes on.
    drop(file);
    site.dbs("umount mnt").ok("umount");
    site.dbs("volume create w 1MiB").ok("still served");
    server.signal("TERM");
    assert_eq!(wait(&mut server.0, "serve"), 0);
    // It ends with the server, even if somebody uses it.
    let mut server = site.foreground("--quiet serve --mount mnt --mount-options allow_other");
    let file = File::open(site.snapshot()).unwrap();
    server.signal("TERM");
    assert_eq!(wait(&mut server.0, "serve"), 0);
    assert!(!site.is_mounted());
    assert_eq!(file.metadata().unwrap_err().raw_os_error(), Some(107));
    site.dbs("check").ok("check");
}
