//! A real file system on a served volume whose store records what it writes: at marks of that
//! record a power loss is made up, and the file system found then is whole, with every file that
//! had been synced.
//!
//! The kernel's file system is on a loop device over a file that `qemu-storage-daemon` makes of the
//! NBD export, through FUSE. `DBS_REPLAY_MARKS` (6) is how many marks of each kind of file system are
//! looked at, `DBS_REPLAY_SEED` chooses them and what is lost, `DBS_REPLAY_STEPS` (120) is how much
//! is done.

use super::{can_mount, wait, wait_for};
use crate::files::has;
use crate::record::{Entry, Record};
use crate::support::{Place, Served, noise};
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const VOLUME: &str = "320MiB";

/// Files that were synced: when, in bytes of the record, and what is in them.
struct Synced {
    at: u64,
    name: String,
    seed: u64,
    length: usize,
    /// When it was removed or renamed, if it was.
    gone: Option<u64>,
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Runs a program that may lie where users do not look, for ten minutes at most; what it printed.
#[track_caller]
fn tool(place: &Place, line: &str, codes: &[i32]) -> String {
    let log = place.path("tool.log");
    let out = File::create(&log).unwrap();
    let mut child = Command::new("timeout")
        .args(["-s", "KILL", "600", "sh", "-c"])
        .arg(format!("PATH=$PATH:/usr/sbin:/sbin exec {line}"))
        .current_dir(place.dir.path())
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out)
        .spawn()
        .unwrap();
    let code = child.wait().unwrap().code().unwrap_or(-1);
    let said = fs::read_to_string(&log).unwrap();
    assert!(codes.contains(&code), "{line}: {code}\n{said}");
    said
}

/// Everything between the kernel's file system and the store; taken down when dropped.
struct Stack {
    place: Place,
    server: Option<Served>,
    daemon: Option<Child>,
    device: Option<String>,
}

impl Stack {
    /// A device over a volume of a store that is recorded.
    fn new() -> Self {
        let place = Place::new();
        place.dbs("init store.dbs --size 1GiB").ok("init");
        place.json(&format!("volume create fs {VOLUME}"));
        tool(&place, "cp --sparse=always store.dbs image", &[0]);
        fs::create_dir(place.path("mnt")).unwrap();
        File::create(place.path("export")).unwrap();
        let mut stack = Self { place, server: None, daemon: None, device: None };
        let arguments = "--nbd unix:nbd.sock --commit-interval 100ms --record-writes record";
        stack.server = Some(stack.place.serve(arguments));
        let log = File::create(stack.place.path("daemon.log")).unwrap();
        let daemon = Command::new("qemu-storage-daemon")
            .args([
                "--blockdev",
                "driver=nbd,node-name=n,server.type=unix,server.path=nbd.sock,export=fs",
            ])
            .args(["--export", "type=fuse,id=e,node-name=n,mountpoint=export,writable=on"])
            .current_dir(stack.place.dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        stack.daemon = Some(daemon.unwrap());
        let export = stack.place.path("export");
        wait_for("the export", || export.metadata().is_ok_and(|file| file.len() > 0));
        // Not with --direct-io: ext4 on blocks of 1 KiB is damaged then by discards, whatever the
        // daemon exports.
        let device = tool(&stack.place, "losetup --find --show export", &[0]);
        stack.device = Some(device.trim().to_owned());
        stack
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path("mnt").join(name)
    }

    /// Bytes of the record so far.
    fn recorded(&self) -> u64 {
        fs::metadata(self.place.path("record")).unwrap().len()
    }

    /// Makes a file system and works on it for a while; where it was made in the record, and what was
    /// synced.
    fn work(&self, make: &str, steps: u64) -> (u64, Vec<Synced>) {
        let device = self.device.as_deref().unwrap();
        tool(&self.place, &format!("{make} {device}"), &[0]);
        let made = self.recorded();
        tool(&self.place, &format!("mount {device} mnt"), &[0]);
        let mut synced: Vec<Synced> = Vec::new();
        for step in 0..steps {
            let (name, length) =
                (format!("d{}/f{step}", step % 7), (step * 7919 % 90_000) as usize);
            fs::create_dir_all(self.path(&name).parent().unwrap()).unwrap();
            let mut file = File::create(self.path(&name)).unwrap();
            file.write_all(&noise(step, length)).unwrap();
            match step % 4 {
                0 => file.sync_all().unwrap(),
                1 => {
                    // As databases and editors do.
                    file.sync_data().unwrap();
                    fs::rename(self.path(&name), self.path(&format!("{name}.kept"))).unwrap();
                    let parent = self.path(&name).parent().unwrap().to_owned();
                    File::open(parent).unwrap().sync_all().unwrap();
                }
                _ => {}
            }
            if step % 4 < 2 {
                let name = if step % 4 == 1 { format!("{name}.kept") } else { name };
                synced.push(Synced { at: self.recorded(), name, seed: step, length, gone: None });
            }
            if step % 5 == 4 {
                let index = (step * 31) as usize % synced.len();
                let victim = &mut synced[index];
                if victim.gone.is_none() {
                    victim.gone = Some(self.recorded());
                    fs::remove_file(self.path(&victim.name)).unwrap();
                }
            }
        }
        tool(&self.place, "umount mnt", &[0]);
        (made, synced)
    }

    /// Takes everything down but the directory.
    fn end(mut self) -> Place {
        let device = self.device.take().unwrap();
        tool(&self.place, &format!("losetup --detach {device}"), &[0]);
        let mut daemon = self.daemon.take().unwrap();
        super::kill(u64::from(daemon.id()), "TERM");
        wait(&mut daemon, "qemu-storage-daemon");
        let (code, log) = self.server.take().unwrap().stop();
        assert_eq!(code, Some(0), "{log}");
        std::mem::replace(&mut self.place, Place::new())
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if self.device.is_none() && self.daemon.is_none() && self.server.is_none() {
            return;
        }
        let run = |program: &str, arguments: &[&str]| {
            let mut command = Command::new("timeout");
            command.args(["-s", "KILL", "10", program]).args(arguments).stdin(Stdio::null());
            let _ = command.stderr(Stdio::null()).current_dir(self.place.dir.path()).status();
        };
        // What is in flight fails once the daemon is gone.
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        run("umount", &["-l", "mnt"]);
        if let Some(device) = &self.device {
            run("losetup", &["--detach", device]);
        }
        run("umount", &["-l", "export"]);
    }
}

/// The volume as a power loss leaves it, in a file `fs.img`, mounted at `mnt` while it is looked at.
struct Found<'a> {
    place: &'a Place,
}

impl Drop for Found<'_> {
    fn drop(&mut self) {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "10", "umount", "-l", "mnt"]).stderr(Stdio::null());
        let _ = command.current_dir(self.place.dir.path()).stdin(Stdio::null()).status();
    }
}

/// Whether a loop device still has the file.
fn in_use(place: &Place) -> bool {
    let mut command = Command::new("losetup");
    command.args(["-j", "fs.img"]).current_dir(place.dir.path()).stdin(Stdio::null());
    !command.output().unwrap().stdout.is_empty()
}

/// Looks at the file system as a power loss left it that came after the flush at the start of
/// `time`, in bytes of the record, and before its end.
fn look(place: &Place, kind: &str, mark: &str, time: Range<u64>, (made, synced): (u64, &[Synced])) {
    let at = time.start;
    let store = |args: &str| place.dbs(&format!("--store crashed {args}")).ok(mark);
    store("volume export fs fs.img --force");
    store("check");
    if at < made {
        // The file system is not complete.
        return;
    }
    let found = Found { place };
    // The kernel's own recovery of its journal.
    let options = if kind == "xfs" { "loop,nouuid" } else { "loop" };
    tool(place, &format!("mount -t {kind} -o {options} fs.img mnt"), &[0]);
    for file in synced.iter().filter(|file| file.at <= at) {
        let content = fs::read(place.path("mnt").join(&file.name));
        match file.gone {
            Some(gone) if gone <= time.end && content.is_err() => {}
            _ => {
                let content =
                    content.unwrap_or_else(|error| panic!("{mark}: {}: {error}", file.name));
                assert!(content == noise(file.seed, file.length), "{mark}: {}", file.name);
            }
        }
    }
    tool(place, "umount mnt", &[0]);
    drop(found);
    // The kernel may let go of the loop device a little later.
    let end = Instant::now() + Duration::from_secs(300);
    while in_use(place) {
        assert!(Instant::now() < end, "{mark}: fs.img stays mounted");
        thread::sleep(Duration::from_millis(50));
    }
    let check = if kind == "xfs" { "xfs_repair -n fs.img" } else { "e2fsck -fn fs.img" };
    tool(place, check, &[0]);
}

fn replay(kind: &str, make: &str) {
    let needed = ["losetup", "qemu-storage-daemon", make.split(' ').next().unwrap()];
    if !can_mount() || needed.iter().any(|program| !has(program)) {
        return;
    }
    let stack = Stack::new();
    let (made, synced) = stack.work(make, setting("DBS_REPLAY_STEPS", 120));
    let place = stack.end();
    let record = Record::read(&place.path("record"));
    let marks = record.marks(setting("DBS_REPLAY_MARKS", 6) as usize);
    let seed = setting("DBS_REPLAY_SEED", 1);
    let mut durable = record.replay(place.path("image"), seed);
    for mark in &marks {
        let (lost, kept, until) = durable.crash_after(mark, &place.path("crashed"));
        let text = format!(
            "{kind}, seed {seed}, {} to {until} of the record: {lost} blocks lost, {kept} kept",
            mark.bytes
        );
        look(&place, kind, &text, mark.bytes..until, (made, &synced));
    }
    let flushes = record.entries.iter().filter_map(Entry::flush).count();
    println!(
        "{kind}: {} of {flushes} flush marks, {} files synced, {} blocks lost and {} kept of the \
         writes that no flush had covered",
        marks.len(),
        synced.len(),
        durable.lost,
        durable.kept
    );
}

#[test]
fn ext4_is_whole_at_every_flush() {
    replay("ext4", "mkfs.ext4 -q");
}

#[test]
fn xfs_is_whole_at_every_flush() {
    replay("xfs", "mkfs.xfs -q");
}
