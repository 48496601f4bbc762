//! A real ext4 file system of thousands of files in a served volume: filled, changed and
//! snapshotted through NBD, every snapshot held byte by byte against a copy taken at the time.
//!
//! Beside the store lies a raw image that goes through the same changes: it is the reference.

use crate::support::{Place, noise};
use dbs_nbd::{Client, ClientOptions};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Bytes of the image.
const IMAGE: u64 = 64 << 20;
const BLOCK: u64 = 4096;
/// Directories of the tree, and files in each.
const DIRECTORIES: u64 = 32;
const FILES: u64 = 96;
/// Bytes of the file whose blocks are overwritten behind the file system's back: a program with a
/// database in one large file does no less.
const SCRATCH: usize = 8 << 20;

/// What to do to a volume and its reference.
#[derive(Clone, Copy)]
enum Change {
    /// Edit files, then copy the whole image over.
    EditAndCopyAll,
    /// Edit files, then write the blocks that differ.
    EditAndWriteChanged,
    /// Writes, trims and zeroes within the large file: the file system stays whole.
    WriteScratch,
    /// Writes, trims and zeroes anywhere: the file system does not.
    WriteAnywhere,
}

struct Stage {
    name: &'static str,
    change: Change,
    /// Reference to go on from, if not the last one.
    from: Option<&'static str>,
    whole: bool,
}

const STAGES: [Stage; 5] = [
    Stage { name: "s1", change: Change::EditAndCopyAll, from: None, whole: true },
    Stage { name: "s2", change: Change::WriteScratch, from: None, whole: true },
    Stage { name: "s3", change: Change::EditAndWriteChanged, from: None, whole: true },
    Stage { name: "s4", change: Change::WriteAnywhere, from: None, whole: false },
    Stage { name: "s5", change: Change::EditAndWriteChanged, from: Some("s3"), whole: true },
];

/// Something to compare: what to export, the reference, whether the file system in it is whole.
type Point = (String, PathBuf, bool);

#[test]
fn snapshots_of_a_file_system_are_what_they_were() {
    let tools = ["mke2fs", "e2fsck", "debugfs", "nbdcopy", "qemu-io"];
    let missing: Vec<_> = tools.into_iter().filter(|tool| !have(tool)).collect();
    if !missing.is_empty() {
        println!("skipped: {} not installed", missing.join(", "));
        return;
    }
    let disk = Disk::new();
    let place = &disk.place;
    let server = place.serve("--nbd unix:nbd.sock");
    place.json(&format!("volume create fs {IMAGE}"));
    disk.make_file_system();
    disk.copy_in("fs");
    let mut points = vec![disk.snapshot("s0", true)];
    for (seed, stage) in (1..).zip(&STAGES) {
        disk.change(stage, seed);
        points.push(disk.snapshot(stage.name, stage.whole));
    }
    disk.random_changes("fs", &disk.reference(), disk.scratch(), 99);
    points.push(("fs".to_owned(), disk.reference(), true));
    disk.compare(&points);

    for gone in ["s1", "s4"] {
        place.json(&format!("--yes snapshot delete fs@{gone}"));
        points.retain(|point| point.0 != format!("fs@{gone}"));
    }
    // Some of it while they are merged, and again when they are gone.
    disk.compare(&points);
    place.json("volume trim");
    disk.compare(&points);

    place.json("volume clone fs@s2 copy");
    let reference = disk.keep("copy", &place.path("fs@s2.ref"));
    disk.random_changes("copy", &reference, 0..IMAGE, 77);
    points.push(("copy".to_owned(), reference, false));
    disk.compare(&points);
    place.json("--yes snapshot delete fs@s2");
    points.retain(|point| point.0 != "fs@s2");
    disk.compare(&points);

    let (code, log) = server.stop();
    assert_eq!(code, Some(0), "{log}");
    place.dbs("check").ok("check");
    disk.compare(&points);
}

/// The store's directory, with the reference `now.ref` in it.
struct Disk {
    place: Place,
}

impl Disk {
    fn new() -> Self {
        let place = Place::new();
        place.dbs("init store.dbs --size 1GiB").ok("init");
        Self { place }
    }

    fn reference(&self) -> PathBuf {
        self.place.path("now.ref")
    }

    /// The reference starts as a file system made from a generated tree.
    fn make_file_system(&self) {
        let tree = self.place.path("tree");
        for directory in 0..DIRECTORIES {
            let path = tree.join(format!("d{directory}"));
            std::fs::create_dir_all(&path).unwrap();
            for file in 0..FILES {
                let seed = directory * FILES + file;
                // Mostly small, some empty, some of several extents' worth of blocks.
                let length = if seed.is_multiple_of(50) { 200_000 } else { seed * 97 % 9000 };
                std::fs::write(path.join(format!("f{file}")), noise(seed, length as usize))
                    .unwrap();
            }
        }
        std::fs::write(tree.join("scratch"), noise(4242, SCRATCH)).unwrap();
        File::create(self.reference()).unwrap().set_len(IMAGE).unwrap();
        succeed(
            tool("mke2fs")
                .args(["-q", "-F", "-t", "ext4", "-b", "4096"])
                .args(["-U", "6b1b4f3c-0d3e-4f0e-9a55-0c5b7f9d2a11"])
                .arg("-d")
                .args([&tree, &self.reference()]),
        );
        std::fs::remove_dir_all(tree).unwrap();
        assert_whole(&self.reference());
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.place.path("nbd.sock").display())
    }

    fn copy_in(&self, export: &str) {
        succeed(tool("nbdcopy").arg(self.reference()).arg(self.uri(export)));
    }

    fn change(&self, stage: &Stage, seed: u64) {
        let before = self.keep("before", &self.reference());
        if let Some(name) = stage.from {
            std::fs::copy(self.place.path(&format!("fs@{name}.ref")), self.reference()).unwrap();
        }
        match stage.change {
            Change::EditAndCopyAll => {
                self.edit_files(seed);
                self.copy_in("fs");
            }
            Change::EditAndWriteChanged => {
                self.edit_files(seed);
                self.write_changed("fs", &before);
            }
            Change::WriteScratch => {
                self.random_changes("fs", &self.reference(), self.scratch(), seed);
            }
            Change::WriteAnywhere => {
                self.random_changes("fs", &self.reference(), 0..IMAGE, seed);
            }
        }
    }

    /// Removes, adds and links files in the reference.
    fn edit_files(&self, seed: u64) {
        let mut script = String::new();
        for file in (0..FILES).filter(|file| file % 4 == seed % 4) {
            script += &format!("rm /d{seed}/f{file}\n");
        }
        script += &format!("mkdir /new{seed}\n");
        for file in 0..60 {
            let name = format!("new{seed}-{file}");
            std::fs::write(self.place.path(&name), noise(seed << 32 | file, 3000 * file as usize))
                .unwrap();
            script += &format!("write {name} /new{seed}/f{file}\n");
        }
        script += &format!("symlink /link{seed} /new{seed}/f1\nquit\n");
        let commands = self.place.path("commands");
        std::fs::write(&commands, script).unwrap();
        let mut debugfs = tool("debugfs");
        debugfs.args(["-w", "-f"]).args([&commands, &self.reference()]);
        succeed(debugfs.current_dir(self.place.dir.path()));
        (0..60).for_each(|file| {
            std::fs::remove_file(self.place.path(&format!("new{seed}-{file}"))).unwrap();
        });
        assert_whole(&self.reference());
    }

    /// Writes the blocks in which the reference differs from `before`.
    fn write_changed(&self, export: &str, before: &Path) {
        let (old, new) = (std::fs::read(before).unwrap(), std::fs::read(self.reference()).unwrap());
        let socket = self.place.path("nbd.sock");
        let mut client = Client::connect_unix(&socket, export, &ClientOptions::default()).unwrap();
        let blocks = old.chunks(BLOCK as usize).zip(new.chunks(BLOCK as usize));
        let mut written = 0;
        for (index, (_, new)) in blocks.enumerate().filter(|(_, (old, new))| old != new) {
            client.write_at(index as u64 * BLOCK, new, false).unwrap();
            written += 1;
        }
        client.flush().unwrap();
        client.disconnect().unwrap();
        assert!(written > 100, "only {written} blocks differ");
    }

    /// Where the large file's bytes lie in the reference: its longest run of blocks.
    fn scratch(&self) -> Range<u64> {
        let listed = succeed(tool("debugfs").args(["-R", "blocks /scratch"]).arg(self.reference()));
        let blocks: Vec<u64> =
            listed.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let runs = blocks.chunk_by(|a, b| a + 1 == *b);
        let longest = runs.max_by_key(|run| run.len()).unwrap();
        assert!(longest.len() > SCRATCH / BLOCK as usize / 4, "fragmented: {}", longest.len());
        longest[0] * BLOCK..(longest[0] + longest.len() as u64) * BLOCK
    }

    /// Hundreds of writes, trims and zeroes by qemu-io inside a range, and the same in a file.
    fn random_changes(&self, export: &str, reference: &Path, range: Range<u64>, seed: u64) {
        let file = File::options().write(true).open(reference).unwrap();
        let mut random = noise(seed, 8 * 4 * 400).into_iter().collect::<Vec<_>>();
        let mut below = |bound: u64| {
            let word = random.split_off(random.len() - 8);
            u64::from_le_bytes(word.try_into().unwrap()) % bound
        };
        let mut commands = String::new();
        for step in 0..400u64 {
            let kind = below(10);
            // Zeroes and some writes at sectors, the others and trims at blocks.
            let unit = if kind < 3 { 512 } else { BLOCK };
            let most = if kind == 9 { 512 } else { 24 };
            let length = (1 + below(most)) * unit;
            let offset = range.start + below((range.end - range.start - length) / unit + 1) * unit;
            let byte = step as u8 | 1;
            commands += &match kind {
                0..=1 => format!("write -z {offset} {length}\n"),
                8 => format!("discard {offset} {length}\n"),
                _ => format!("write -P {byte} {offset} {length}\n"),
            };
            let value = if matches!(kind, 0 | 1 | 8) { 0 } else { byte };
            file.write_all_at(&vec![value; length as usize], offset).unwrap();
        }
        commands += "flush\nquit\n";
        let mut child = tool("qemu-io")
            .args(["-d", "unmap", "-f", "raw", &self.uri(export)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let feeder = std::thread::spawn(move || stdin.write_all(commands.as_bytes()).unwrap());
        let output = child.wait_with_output().unwrap();
        feeder.join().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && !said.contains("failed"), "{said}");
    }

    /// Takes a snapshot and a copy of the reference.
    fn snapshot(&self, name: &str, whole: bool) -> Point {
        let spec = format!("fs@{name}");
        self.place.json(&format!("snapshot create {spec}"));
        let reference = self.keep(&spec, &self.reference());
        (spec, reference, whole)
    }

    fn keep(&self, name: &str, from: &Path) -> PathBuf {
        let to = self.place.path(&format!("{name}.ref"));
        std::fs::copy(from, &to).unwrap();
        to
    }

    /// Exports every point and compares it.
    fn compare(&self, points: &[Point]) {
        let out = self.place.path("out.img");
        for (spec, reference, whole) in points {
            self.place.dbs(&format!("volume export {spec} out.img")).ok(spec);
            same(spec, &out, reference);
            if *whole {
                assert_whole(&out);
            }
            std::fs::remove_file(&out).unwrap();
        }
    }
}

fn same(spec: &str, found: &Path, expected: &Path) {
    let (found, expected) = (std::fs::read(found).unwrap(), std::fs::read(expected).unwrap());
    assert_eq!(found.len(), expected.len(), "{spec}");
    let block = BLOCK as usize;
    let differs = |index: &usize| {
        let range = index * block..(index + 1) * block;
        found[range.clone()] != expected[range]
    };
    let wrong: Vec<_> = (0..found.len() / block).filter(differs).collect();
    let first = &wrong[..wrong.len().min(8)];
    assert!(wrong.is_empty(), "{spec}: {} blocks differ, the first are {first:?}", wrong.len());
}

/// `e2fsck` finds nothing to complain about.
fn assert_whole(image: &Path) {
    succeed(tool("e2fsck").arg("-fn").arg(image));
}

/// A program that may lie where users do not look.
fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", search_path()).env("LC_ALL", "C");
    command
}

fn search_path() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

fn have(name: &str) -> bool {
    search_path().split(':').any(|directory| Path::new(directory).join(name).is_file())
}

#[track_caller]
fn succeed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}\n{said}\n{complaint}");
    said
}
