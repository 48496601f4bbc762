//! A real file system on a served volume whose store is on a disk that remembers: after some of its syncs a
//! power loss is made up, and the file system found then is whole, with every file that had been synced.
//!
//! The kernel's file system is on a loop device over a file, again of a FUSE file system of the test's, that is
//! the NBD export. `DBS_REPLAY_MARKS` (6) is how many syncs of each kind of file system are looked at,
//! `DBS_REPLAY_SEED` chooses what is lost, `DBS_REPLAY_STEPS` (120) is how much is done.

use super::can_mount;
use crate::disk::outage::Outages;
use crate::disk::rules::{Effect, Operation, Rule};
use crate::disk::{Content, Disk, Mounted};
use crate::files::has;
use crate::support::{Place, Served, noise};
use dbs_nbd::{Client, ClientOptions};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const VOLUME: &str = "320MiB";

/// Files that were synced: when, in things done to the disk, and what is in them.
struct Synced {
    at: usize,
    name: String,
    seed: u64,
    length: usize,
    /// When it was removed or renamed, if it was.
    gone: Option<usize>,
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

/// An NBD export.
struct Export(Client<UnixStream>);

impl Content for Export {
    fn size(&self) -> usize {
        self.0.size() as usize
    }

    fn set_size(&mut self, size: usize) {
        panic!("an export cannot have {size} bytes");
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) {
        self.0.read_at(offset, buf).unwrap();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.0.write_at(offset, data, false).unwrap();
    }

    fn zero(&mut self, offset: u64, length: usize) {
        self.0.write_zeroes(offset, length as u64, 0).unwrap();
    }

    fn sync(&mut self) {
        self.0.flush().unwrap();
    }
}

/// Everything between the kernel's file system and the store; taken down when dropped.
struct Stack {
    device: Option<String>,
    export: Option<Mounted>,
    server: Option<Served>,
    disk: Disk,
    mounted: Option<Mounted>,
    place: Place,
}

impl Stack {
    /// A device over a volume of a store whose disk remembers.
    fn new() -> Self {
        let place = Place::new();
        let (disk, mounted) = Disk::at(place.dir.path(), &place.store());
        place.dbs("init store.dbs --size 1GiB").ok("init");
        place.json(&format!("volume create fs {VOLUME}"));
        // So that writes are on their way when a sync begins.
        let late = |operation, millis| Rule {
            chance: 0.05,
            ..Rule::new(operation, Effect::Delay(Duration::from_millis(millis)))
        };
        disk.set_rules(&[late(&[Operation::Write], 3), late(&[Operation::Sync], 3)]);
        fs::create_dir(place.path("mnt")).unwrap();
        let (device, export, server) = (None, None, None);
        let mut stack = Self { device, export, server, disk, mounted: Some(mounted), place };
        stack.server = Some(stack.place.serve("--nbd unix:nbd.sock --commit-interval 100ms"));
        let socket = stack.place.path("nbd.sock");
        let client = Client::connect_unix(&socket, "fs", &ClientOptions::default()).unwrap();
        let (file, export) = Disk::mount(Box::new(Export(client)), stack.place.path("export"));
        file.forget();
        let losetup = format!("losetup --find --show {}", export.file().display());
        stack.export = Some(export);
        stack.device = Some(tool(&stack.place, &losetup, &[0]).trim().to_owned());
        stack
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path("mnt").join(name)
    }

    /// Makes a file system and works on it for a while; when it was made, and what was synced.
    fn work(&self, make: &str, steps: u64) -> (usize, Vec<Synced>) {
        let device = self.device.as_deref().unwrap();
        tool(&self.place, &format!("{make} {device}"), &[0]);
        let made = self.disk.len();
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
                synced.push(Synced { at: self.disk.len(), name, seed: step, length, gone: None });
            }
            if step % 5 == 4 {
                let index = (step * 31) as usize % synced.len();
                let victim = &mut synced[index];
                if victim.gone.is_none() {
                    victim.gone = Some(self.disk.len());
                    fs::remove_file(self.path(&victim.name)).unwrap();
                }
            }
        }
        tool(&self.place, "umount mnt", &[0]);
        (made, synced)
    }

    /// Takes everything down but the directory, and the record of the disk.
    fn end(mut self) -> (Place, Disk) {
        let device = self.device.take().unwrap();
        tool(&self.place, &format!("losetup --detach {device}"), &[0]);
        self.export = None;
        let (code, log) = self.server.take().unwrap().stop();
        assert_eq!(code, Some(0), "{log}");
        self.mounted = None;
        (std::mem::replace(&mut self.place, Place::new()), self.disk.clone())
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let Some(device) = self.device.take() else { return };
        let run = |program: &str, arguments: &[&str]| {
            let mut command = Command::new("timeout");
            command.args(["-s", "KILL", "10", program]).args(arguments).stdin(Stdio::null());
            let _ = command.stderr(Stdio::null()).current_dir(self.place.dir.path()).status();
        };
        run("umount", &["-l", "mnt"]);
        run("losetup", &["--detach", &device]);
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

/// Looks at the file system as a power loss left it that came when `cut` things had been done to the disk.
fn look(place: &Place, kind: &str, mark: &str, cut: usize, (made, synced): (usize, &[Synced])) {
    let store = |args: &str| place.dbs(&format!("--store crashed {args}")).ok(mark);
    store("volume export fs fs.img --force");
    store("check");
    if cut < made {
        // The file system is not complete.
        return;
    }
    let found = Found { place };
    // The kernel's own recovery of its journal.
    let options = if kind == "xfs" { "loop,nouuid" } else { "loop" };
    tool(place, &format!("mount -t {kind} -o {options} fs.img mnt"), &[0]);
    for file in synced.iter().filter(|file| file.at <= cut) {
        let content = fs::read(place.path("mnt").join(&file.name));
        match file.gone {
            Some(gone) if gone <= cut && content.is_err() => {}
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
    let needed = ["losetup", make.split(' ').next().unwrap()];
    if !can_mount() || needed.iter().any(|program| !has(program)) {
        return;
    }
    let stack = Stack::new();
    let begun = stack.disk.len();
    let (made, synced) = stack.work(make, setting("DBS_REPLAY_STEPS", 120));
    let metadata = stack.place.json("info")["metadata"].as_u64().unwrap();
    let (place, disk) = stack.end();
    let syncs = disk.syncs_from(begun);
    let count = syncs.len().min(setting("DBS_REPLAY_MARKS", 6) as usize);
    assert!(count > 0, "nothing was flushed");
    let seed = setting("DBS_REPLAY_SEED", 1);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut outages = Outages::new(&disk, metadata, place.path("durable"));
    // Evenly over the record, the last one among them.
    for mark in (1..=count).map(|n| n * syncs.len() / count - 1) {
        let at = syncs[mark] + 1;
        let cut = rng.usize(at..=syncs.get(mark + 1).copied().unwrap_or(disk.len()));
        let before = (outages.lost, outages.kept);
        outages.image(cut, &mut rng, &place.path("crashed"));
        let (lost, kept) = (outages.lost - before.0, outages.kept - before.1);
        let text =
            format!("{kind}, seed {seed}, {cut} things done: {lost} parts lost, {kept} kept");
        look(&place, kind, &text, cut, (made, &synced));
    }
    assert!(disk.hits() > 0, "no request was late");
    println!(
        "{kind}: after {count} of {} syncs, {} files synced, {} parts lost and {} kept of what no sync \
         had covered; {} requests late",
        syncs.len(),
        synced.len(),
        outages.lost,
        outages.kept,
        disk.hits()
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
