//! `longhorn replica-export` and `longhorn replica-import`, beside processes that serve the same replica.

use crate::support::*;
use std::fs;
use std::path::Path;
use std::process::Command;

const NOT_MOVED: &str = "is being served, or another command moves it";

/// Its output, or what it says on the standard error output if it fails.
fn run(place: &Place, args: &[&str]) -> Result<String, String> {
    let mut command: Command = place.program();
    let output = command.args(["--volume-name", "vol"]).args(args).output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    if output.status.success() { Ok(out) } else { Err(err) }
}

fn refused(place: &Place, args: &[&str], text: &str) {
    let said = run(place, args).unwrap_err();
    assert!(said.contains(text), "{args:?}: {said}");
}

fn not_started(place: &Place, more: &[&str], text: &str) {
    let mut process = place.start_with("r", &[more, &["--size", "64mb"]].concat());
    assert_eq!(process.wait().code(), Some(1));
    assert!(process.log().contains(text), "{}", process.log());
}

fn images(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.ends_with(".img")).collect();
    names.sort();
    names
}

#[test]
fn a_replica_becomes_upstream_s_and_ours_again() {
    let place = Place::new();
    let dir = place.replica("r");
    let path = dir.to_str().unwrap();
    let mut replica = place.start("r", &["--size", "64mb"]);
    let data = replica.open();
    data.write(0, &block(0, 1)).unwrap();
    data.write(2 * BLOCK as u64, &block(2, 1)).unwrap();
    replica.rpc().snapshot("s").unwrap();
    data.write(0, &block(0, 2)).unwrap();
    data.unmap(2 * BLOCK as u64, BLOCK as u32).unwrap();
    for command in ["replica-export", "replica-import"] {
        refused(&place, &[command, path], NOT_MOVED);
    }
    let revision = replica.rpc().get().unwrap().revision_counter;
    drop(data);
    replica.stop();

    refused(&place, &["replica-import", path], "there is a replica of DBS");
    let told = run(&place, &["replica-export", "--json", path]).unwrap();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["size"], &told["snapshots"]), (&SIZE.into(), &1.into()), "{told}");
    assert_eq!(images(&dir), ["volume-head-001.img", "volume-snap-s.img"]);
    let head = fs::read(dir.join("volume-head-001.img")).unwrap();
    assert!(head[..BLOCK] == block(0, 2) && head.len() as u64 == SIZE);
    not_started(&place, &[], "`longhorn replica-import` takes over");
    refused(&place, &["replica-export", path], "there is no store");

    let told = run(&place, &["replica-import", path]).unwrap();
    assert!(told.contains("a volume of 64.0 MiB, 1 snapshots"), "{told}");
    assert!(images(&dir).is_empty());
    let mut replica = place.start("r", &["--size", "64mb"]);
    let told = replica.rpc().get().unwrap();
    assert_eq!((&*told.head, told.revision_counter), ("volume-head-001.img", revision));
    let data = replica.open();
    assert_eq!(data.read(0, BLOCK as u32).unwrap(), block(0, 2));
    assert!(data.read(2 * BLOCK as u64, BLOCK as u32).unwrap().iter().all(|byte| *byte == 0));
    drop(data);
    replica.stop();
}

/// What is in the tail is all that there is of some writes.
#[test]
fn an_export_of_a_killed_replica_takes_its_tail() {
    let Ok(tail) = tempfile::Builder::new().prefix("dbs-").tempdir_in("/dev/shm") else {
        println!("SKIPPED: /dev/shm cannot be written to");
        return;
    };
    let place = Place::new();
    let dir = place.replica("r");
    let [path, tail] = [&*dir, tail.path()].map(|path| path.to_str().unwrap());
    let mut replica =
        place.start("r", &["--size", "64mb", "--tail", tail, "--commit-interval", "10m"]);
    let data = replica.open();
    data.write(0, &block(0, 1)).unwrap();
    drop(data);
    replica.kill();
    let to = place.path().join("to");
    for more in [&[][..], &["--to", to.to_str().unwrap()]] {
        // Each time: the first one has not made it worth nothing.
        for _ in 0..2 {
            refused(
                &place,
                &[&["replica-export", path], more].concat(),
                "give --tail as to `replica`",
            );
        }
    }
    let mut command = place.program();
    command.env("DBS_TAIL", tail).args(["replica-export", path, "--to", to.to_str().unwrap()]);
    assert!(command.status().unwrap().success());
    run(&place, &["replica-export", path, "--tail", tail]).unwrap();
    for dir in [dir, to] {
        let head = fs::read(dir.join("volume-head-000.img")).unwrap();
        assert!(head[..BLOCK] == block(0, 1), "{}", dir.display());
    }
}

#[test]
fn a_replica_that_is_being_moved_is_not_started() {
    let place = Place::new();
    let dir = place.replica("r");
    place.start("r", &["--size", "64mb"]).stop();
    for (name, command) in
        [("volume.import", "replica-import"), ("volume.export", "replica-export")]
    {
        fs::create_dir(dir.join(name)).unwrap();
        not_started(&place, &[], &format!("give `longhorn {command} "));
        not_started(&place, &["--store", "/no/store"], &format!("give `longhorn {command} "));
        fs::remove_dir(dir.join(name)).unwrap();
    }
    // As a command that is at work has it.
    let directory = fs::File::open(&dir).unwrap();
    directory.lock().unwrap();
    not_started(&place, &[], "is being moved from or to upstream's files");
    not_started(&place, &["--store", "/no/store"], "is being moved from or to upstream's files");
    drop(directory);
    place.start("r", &["--size", "64mb"]).stop();
}

/// What the command does to files, in order: `fsync PATH`, `rename PATH PATH`, `unlink PATH`, paths below `dir`.
fn traced(place: &Place, dir: &Path, args: &[&str]) -> Option<Vec<String>> {
    let log = place.path().join("trace");
    let mut command = place.command("strace");
    command.args(["-f", "-qq", "-y", "-e", "trace=fsync,fdatasync,rename,unlink,rmdir", "-o"]);
    command.arg(&log).arg(crate::PROGRAM).args(["--volume-name", "vol"]).args(args);
    let Ok(output) = command.output() else {
        println!("SKIPPED: needs strace");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let log = fs::read_to_string(&log).unwrap();
    let steps = log.lines().filter_map(|line| {
        let (_, call) = line.split_once(' ')?;
        let (name, rest) = call.trim_start().split_once('(')?;
        let inside = format!("{}/", dir.display());
        let paths: Vec<_> =
            rest.split(['"', '<', '>']).filter(|part| part.starts_with('/')).collect();
        let paths: Vec<_> = paths
            .into_iter()
            .map(|path| {
                path.strip_prefix(&inside).unwrap_or(path).replace(dir.to_str().unwrap(), ".")
            })
            .collect();
        Some(format!("{name} {}", paths.join(" ")))
    });
    Some(steps.collect())
}

fn position(steps: &[String], step: &str) -> usize {
    let found = steps.iter().position(|other| other == step);
    found.unwrap_or_else(|| panic!("no {step} in {steps:#?}"))
}

/// A power loss keeps of renames and removals what it likes, unless their directory was made durable in between.
#[test]
fn nothing_goes_before_what_takes_its_place_is_durable() {
    let place = Place::new();
    let dir = place.replica("r");
    let path = dir.to_str().unwrap();
    let mut replica = place.start("r", &["--size", "64mb"]);
    let data = replica.open();
    data.write(0, &block(0, 1)).unwrap();
    replica.rpc().snapshot("s").unwrap();
    drop(data);
    replica.stop();

    let Some(steps) = traced(&place, &dir, &["replica-export", path]) else { return };
    let turn = position(&steps, "rename volume.dbs volume.export/volume.dbs");
    let complete = position(&steps, "fsync volume.export/complete");
    let named = steps[..complete].iter().rposition(|step| step == "fsync volume.export").unwrap();
    assert!(complete < turn && steps[complete..turn].contains(&"fsync volume.export".to_owned()));
    let images = ["volume-head-001.img", "volume-snap-s.img"];
    let metas = images.map(|image| format!("{image}.meta"));
    let others = ["revision.counter".to_owned(), "volume.meta.tmp".to_owned()];
    let files = images.map(str::to_owned).into_iter().chain(metas).chain(others);
    for file in files {
        let content = position(&steps, &format!("fsync volume.export/{file}"));
        assert!(content < named, "{file}: {steps:#?}");
    }
    let gone = position(&steps, "unlink volume.export/volume.dbs");
    let placed = steps.iter().rposition(|step| step.starts_with("rename volume.export/")).unwrap();
    assert!(turn < placed && placed < gone, "{steps:#?}");
    assert!(steps[turn..placed].contains(&"fsync .".to_owned()), "{steps:#?}");
    assert!(steps[placed..gone].contains(&"fsync .".to_owned()), "{steps:#?}");

    let steps = traced(&place, &dir, &["replica-import", path]).unwrap();
    let turn = position(&steps, "rename volume.import/volume.dbs volume.dbs");
    let gone = steps.iter().position(|step| step.starts_with("unlink volume-")).unwrap();
    assert_eq!(steps[turn - 1], "fsync volume.import", "{steps:#?}");
    assert!(steps[turn..gone].contains(&"fsync .".to_owned()), "{steps:#?}");
    let source = position(&steps, "unlink volume.import/source");
    let last = steps.iter().rposition(|step| step.starts_with("unlink volume-")).unwrap();
    assert!(last < source && steps[last..source].contains(&"fsync .".to_owned()), "{steps:#?}");

    traced(&place, &dir, &["replica-export", path]).unwrap();
    let steps = traced(&place, &dir, &["replica-import", "--keep", path]).unwrap();
    let source = position(&steps, "unlink volume.import/source");
    let copy = position(&steps, "fsync volume.upstream/volume.meta");
    let kept = position(&steps, "fsync volume.upstream");
    let last = steps.iter().rposition(|step| step.starts_with("rename volume-")).unwrap();
    assert!(copy < kept && last < kept && kept < source, "{steps:#?}");
}
