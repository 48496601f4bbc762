//! `dbs backup` on idle and served stores, to a directory.

use crate::support::{Place, Run, hangups_are_ignored, run};
use dbs_core::{OpenOptions, Store};
use serde_json::Value;
use std::process::{Command, Stdio};

fn backup(place: &Place, args: &str) -> Run {
    let mut command = place.bare();
    command.env("DBS_STORE", place.store()).env("DBS_TEST_ALONE", "1");
    run(command.args(["--json", "--yes", "backup"]).args(args.split_whitespace()))
}

fn json(place: &Place, args: &str) -> Value {
    backup(place, args).ok(args).json()
}

fn write(place: &Place, offset: u64, bytes: &[u8]) {
    let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
    store.volume("vol").unwrap().write_at(offset, bytes, false).unwrap();
    store.close().unwrap();
}

fn exported(place: &Place, spec: &str) -> Vec<u8> {
    let file = place.path("exported");
    place.dbs(&format!("volume export {spec} exported --force")).ok(spec);
    std::fs::read(file).unwrap()
}

#[test]
fn backups_of_idle_and_served_stores() {
    let place = Place::with_store();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    // No multiple of the size of blocks.
    place.dbs("volume create vol 9000KiB").ok("create");
    write(&place, 0, &[1; 8192]);
    write(&place, 5 << 20, &[2; 3 << 20]);
    place.dbs("snapshot create vol@one").ok("snapshot");
    let first = json(&place, &format!("create vol@one {url} --name backup-1"));
    assert_eq!((&first["base"], first["size"].as_u64()), (&Value::Null, Some(6 << 20)));
    write(&place, 4096, &[3; 4096]);
    write(&place, 5 << 20, &[0; 3 << 20]);
    place.dbs("snapshot create vol@two").ok("snapshot");
    place.dbs("snapshot create vol@three").ok("snapshot");

    let served = place.serve("");
    let second = json(&place, &format!("create vol@two {url} --name backup-2"));
    assert_eq!((&second["base"], second["read"].as_u64()), (&"backup-1".into(), Some(8 << 20)));
    assert_eq!(second["size"].as_u64(), Some(2 << 20), "zeros are left out");
    let restored = json(&place, &format!("restore {url}?backup=backup-1&volume=vol back1"));
    assert_eq!((&restored["size"], &restored["rebuilding"]), (&9_216_000.into(), &false.into()));
    let taken = backup(&place, &format!("restore {url}?backup=backup-1&volume=vol back1"));
    assert!(taken.exits(13, "taken").stderr.contains("--resume"));
    served.stop();

    json(&place, &format!("restore {url}?backup=backup-2&volume=vol back2"));
    for (volume, snapshot) in [("back1", "vol@one"), ("back2", "vol@two")] {
        assert!(exported(&place, volume) == exported(&place, snapshot), "{volume}");
    }
    // Another snapshot of the name is another one: what differs from it is not what is to be backed up.
    place.dbs("--yes snapshot delete vol@two").ok("delete");
    write(&place, 0, &[9; 512]);
    place.dbs("snapshot create vol@two").ok("snapshot");
    let third = json(&place, &format!("create vol@three {url} --name backup-3"));
    assert_eq!(third["base"], Value::Null);
    json(&place, &format!("restore {url}?backup=backup-3&volume=vol back3"));
    assert!(exported(&place, "back3") == exported(&place, "vol@three"));

    let list = json(&place, &format!("list {url}"));
    assert_eq!((&list[0]["volume"], &list[0]["backups"]), (&"vol".into(), &3.into()));
    let list = json(&place, &format!("list {url}?volume=vol"));
    let names: Vec<_> = list.as_array().unwrap().iter().map(|b| b["backup"].clone()).collect();
    assert_eq!(names, ["backup-1", "backup-2", "backup-3"]);
    assert_eq!(list[1]["state"], "complete");
    let shown = json(&place, &format!("show {}", first["url"].as_str().unwrap()));
    assert_eq!(
        (&shown["snapshot"], &shown["labels"]["dbs-volume-size"]),
        (&"one".into(), &"9216000".into())
    );
    json(&place, &format!("show {url}?volume=vol"));
    damage(&place, &url);
}

/// Found by review: what a larger volume had in the last block was carried over, and showed up when it grew again.
#[test]
fn a_volume_that_shrinks_within_a_block_and_grows_is_backed_up_as_it_is() {
    let place = Place::with_store();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    place.dbs("volume create vol 9000KiB").ok("create");
    write(&place, 0, &[1; 9000 << 10]);
    json(&place, &format!("create vol {url} --name backup-1"));
    for (size, number) in [("5000KiB", 2), ("9000KiB", 3)] {
        place.dbs(&format!("--yes volume resize vol {size}")).ok("resize");
        let backup = json(&place, &format!("create vol {url} --name backup-{number}"));
        assert_eq!(backup["base"], format!("backup-{}", number - 1));
        json(&place, &format!("restore {url}?backup=backup-{number}&volume=vol back{number}"));
        assert!(exported(&place, &format!("back{number}")) == exported(&place, "vol"), "{size}");
    }
}

/// Found by review: what was given up of a snapshot is backed up by nobody as if it were there.
#[test]
fn a_retired_snapshot_is_not_backed_up() {
    let place = Place::with_store();
    place.dbs("volume create vol 4MiB").ok("create");
    place.dbs("snapshot create vol@one").ok("snapshot");
    let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
    store.set_retired("vol", "one", true).unwrap();
    store.close().unwrap();
    let url = format!("vfs://{}", place.path("").display());
    let refused = backup(&place, &format!("create vol@one {url}")).exits(2, "retired");
    assert!(refused.stderr.contains("parts of its content may be gone"), "{}", refused.stderr);
    place.dbs("snapshot create vol@two").ok("snapshot");
    for send in ["send vol@one one", "send vol@two two --from one", "volume export vol@one one"] {
        let refused = place.dbs(send).exits(2, send);
        assert!(refused.stderr.contains("`vol@one` is retired"), "{}", refused.stderr);
    }
    assert!(!place.path("one").exists() && !place.path("two").exists());
}

/// Found by review: each failure left the snapshot that was taken for it.
#[test]
fn a_name_that_no_backup_store_can_have_leaves_no_snapshot() {
    let place = Place::with_store();
    let url = format!("vfs://{}", place.path("").display());
    for name in ["a", "my+vol", "pvc%2F1"] {
        place.dbs(&format!("volume create {name} 4MiB")).ok("create");
        let refused = backup(&place, &format!("create {name} {url}")).exits(2, name);
        assert!(refused.stderr.contains("--to"), "{}", refused.stderr);
        assert_eq!(snapshots(&place, name), [""; 0]);
        json(&place, &format!("create {name} {url} --to other"));
    }
}

/// Found by review: what a replica's rebuild had not brought yet was backed up as a hole, and later backups
/// built on that.
#[test]
fn snapshots_of_a_volume_that_is_rebuilt_are_not_backed_up() {
    let place = Place::with_store();
    place.dbs("volume create vol 4MiB").ok("create");
    place.dbs("snapshot create vol@one").ok("snapshot");
    let rebuilding = |on: bool| {
        let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
        store.set_rebuilding("vol", on).unwrap();
        store.close().unwrap();
    };
    rebuilding(true);
    let url = format!("vfs://{}", place.path("").display());
    backup(&place, &format!("create vol@one {url}")).exits(11, "backup");
    for command in ["send vol@one stream", "volume export vol@one file"] {
        let refused = place.dbs(command).exits(11, command).stderr;
        assert!(refused.contains("`vol` is incomplete"), "{refused}");
    }
    // Of one that is received, what has come is whole.
    let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
    store.create_snapshot("vol", dbs_core::volume::RECEIVING, &Default::default()).unwrap();
    store.close().unwrap();
    place.dbs("send vol@one stream").ok("send");
    place.dbs("volume export vol@one file").ok("export");
    backup(&place, &format!("create vol@one {url}")).ok("backup");
    rebuilding(false);
}

/// Snapshots of a volume, as they are listed.
fn snapshots(place: &Place, volume: &str) -> Vec<String> {
    let list = place.dbs(&format!("--json snapshot list {volume}")).ok("list").json();
    list.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn nightly_backups_keep_one_snapshot_and_what_a_retention_says() {
    let place = Place::with_store();
    let root = place.path("backups");
    let url = format!("vfs://{}", root.display());
    for volume in ["vol", "second"] {
        place.dbs(&format!("volume create {volume} 8MiB")).ok("create");
    }
    write(&place, 0, &[1; 4 << 20]);
    place.dbs("snapshot create vol@mine").ok("snapshot");

    // Where nothing can be backed up to, nothing stays; the other volume is tried all the same.
    let failed = backup(&place, &format!("create vol second {url}")).exits(10, "no place");
    assert!(failed.stderr.contains("2 of 2 backups failed"), "{}", failed.stderr);
    assert!(failed.stderr.contains("backing up vol:"), "{}", failed.stderr);
    assert_eq!(snapshots(&place, "vol"), ["mine"]);
    std::fs::create_dir(&root).unwrap();
    backup(&place, &format!("create vol second {url} --name one")).exits(2, "one name");

    let first = json(&place, &format!("create vol second {url}"));
    assert_eq!((&first[0]["base"], &first[1]["volume"]), (&Value::Null, &"second".into()));
    let served = place.serve("");
    // Times in a backup store are whole seconds.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let before = snapshots(&place, "vol");
    assert_eq!(before.len(), 2);
    let second = json(&place, &format!("create vol {url}"));
    assert_eq!((&second["base"], &second["read"]), (&first[0]["backup"], &0.into()));
    let after = snapshots(&place, "vol");
    assert!(after.len() == 2 && after[0] == "mine" && after[1] != before[1], "{after:?}");
    // One volume of several fails: the others are backed up.
    let part = backup(&place, &format!("create vol nowhere {url}")).exits(10, "one of two");
    assert!(part.stderr.contains("1 of 2 backups failed"), "{}", part.stderr);
    assert_eq!(part.json()[0]["volume"], "vol");
    served.stop();

    // A backup that a killed process has begun.
    let last = part.json()[0]["backup"].as_str().unwrap().to_owned();
    let facts = files(&root, ".cfg")
        .into_iter()
        .find(|path| path.to_str().unwrap().ends_with(&format!("backup_{last}.cfg")));
    let text = std::fs::read_to_string(facts.as_ref().unwrap()).unwrap();
    std::fs::write(facts.unwrap(), in_progress(&text)).unwrap();

    let dry = json(&place, &format!("prune {url} --keep-last 1 --dry-run"));
    let kept_by = |dry: &Value, volume: usize, backup: usize| {
        dry[volume]["backups"][backup]["kept_by"].as_array().unwrap().clone()
    };
    let vol = usize::from(dry[0]["volume"] != "vol");
    assert_eq!(kept_by(&dry, vol, 0), ["in progress"]);
    assert_eq!(kept_by(&dry, vol, 1), [""; 0]);
    assert_eq!(kept_by(&dry, vol, 2), ["last"]);
    assert_eq!(kept_by(&dry, 1 - vol, 0), ["last"]);
    assert_eq!(dry[vol]["removed"], Value::Null);
    let all = json(&place, &format!("list {url}?volume=vol"));
    assert_eq!(all.as_array().unwrap().len(), 3, "nothing is deleted");
    backup(&place, &format!("prune {url}")).exits(2, "no rule");
    let pruned = json(&place, &format!("prune {url} --keep-last 1 --keep-daily 7 --in-progress"));
    assert_eq!(kept_by(&pruned, vol, 2), ["last", "daily"]);
    assert_eq!(pruned[vol]["removed"]["kept"], Value::Null);
    let left = json(&place, &format!("list {url}?volume=vol"));
    assert_eq!((left.as_array().unwrap().len(), &left[0]["backup"]), (1, &second["backup"]));
    json(&place, &format!("restore {} back", left[0]["url"].as_str().unwrap()));
    assert!(exported(&place, "back") == exported(&place, "vol@mine"));
    let again = json(&place, &format!("prune {url}?volume=vol --keep-last 1"));
    assert_eq!((again[0]["removed"].clone(), again.as_array().unwrap().len()), (Value::Null, 1));
    backup(&place, &format!("prune {url}?volume=none --keep-last 1")).exits(10, "no such volume");
}

/// Found by review: the unit that prunes each night deleted what other machines had backed up to the same place.
#[test]
fn only_what_this_store_backs_up_is_pruned() {
    let place = Place::new();
    place.init();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    for volume in ["mine", "theirs"] {
        place.dbs(&format!("volume create {volume} 4MiB")).ok("create");
    }
    place.dbs("snapshot create theirs@s").ok("snapshot");
    let prune = |args: &str| backup(&place, &format!("prune {url} --keep-last 1 {args}"));
    json(&place, &format!("create theirs@s {url} --name one"));
    json(&place, &format!("create theirs@s {url} --name two"));
    let nothing = prune("--own").exits(10, "this store backs up nothing there");
    assert!(nothing.stderr.contains("backs up from this store"), "{}", nothing.stderr);
    // The place in another spelling is the same place: the snapshot of the last backup there is used, and deleted.
    let first = json(&place, &format!("create mine {url}"));
    let second = json(&place, &format!("create mine {url}//"));
    assert_eq!(second["base"], first["backup"]);
    let taken = snapshots(&place, "mine");
    assert_eq!(taken.len(), 1);
    // Found by review: one that its user had given another name was deleted.
    place.dbs(&format!("snapshot rename mine@{} kept", taken[0])).ok("rename");
    json(&place, &format!("create mine {url}"));
    assert!(snapshots(&place, "mine").contains(&"kept".to_owned()));
    place.dbs("--yes snapshot delete mine@kept").ok("delete");
    let mut unasked = place.bare();
    unasked.env("DBS_TEST_ALONE", "1").args(["backup", "prune", &url, "--keep-last", "1"]);
    let asked = run(&mut unasked).exits(2, "nobody to ask").stderr;
    assert!(asked.contains(&format!("Delete 3 backups of mine, theirs at {url}?")), "{asked}");
    let left = |volume| json(&place, &format!("list {url}?volume={volume}"));
    prune("--own").ok("own");
    for (volume, backups) in [("mine", 1), ("theirs", 2)] {
        assert_eq!(left(volume).as_array().unwrap().len(), backups, "{volume}");
    }
    // Of snapshots for another place one is told when they are left behind.
    let other = place.path("other");
    let create = || {
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).env("DBS_TEST_ALONE", "1");
        run(command.args(["backup", "create", "mine"]).arg(format!("vfs://{}", other.display())))
    };
    let failed = create().stderr;
    assert!(failed.contains("backing up mine") && !failed.contains("taken for"), "{failed}");
    std::fs::create_dir(&other).unwrap();
    let told = || create().ok("another place").stderr;
    let note = told();
    assert!(note.contains(&format!("taken for backups to {url}")), "{note}");
    assert_eq!(told(), "", "once");
}

/// Found by review: a replica of the store, with which the snapshots for backups come, pruned the other's backups.
#[test]
fn what_is_received_makes_no_backups_own() {
    let [place, replica] = [Place::new(), Place::new()];
    place.init();
    replica.init();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    place.dbs("volume create db 4MiB").ok("create");
    for _ in 0..2 {
        json(&place, &format!("create db {url}"));
    }
    let stream = place.path("stream");
    place.dbs(&format!("send -R db {}", stream.display())).ok("send");
    replica.dbs(&format!("receive db {}", stream.display())).ok("receive");
    let received = snapshots(&replica, "db");
    assert_eq!(received, snapshots(&place, "db"));
    let prune = format!("prune {url} --keep-last 1 --own");
    backup(&replica, &prune).exits(10, "they are another store's");
    // A backup of its own is, and leaves what was received.
    json(&replica, &format!("create db {url}"));
    let left = snapshots(&replica, "db");
    assert!(left.len() == 2 && left.contains(&received[0]), "{left:?}");
    backup(&replica, &prune).ok("own");
}

/// Found by a tester: the first volume that was locked ended `prune` of all, without a word of what was deleted.
#[test]
fn a_volume_that_cannot_be_pruned_stops_no_other() {
    let place = Place::with_store();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    for volume in ["one", "two", "three"] {
        place.dbs(&format!("volume create {volume} 4MiB")).ok("create");
    }
    for _ in 0..2 {
        json(&place, &format!("create one two three {url}"));
    }
    let facts = files(&root, "volume.cfg");
    let facts = facts.iter().find(|path| path.to_str().unwrap().contains("/two/")).unwrap();
    let locks = facts.parent().unwrap().join("locks");
    std::fs::create_dir_all(&locks).unwrap();
    let lock = r#"{"Name":"lock-0123456789abcdef","Type":1,"Acquired":true}"#;
    std::fs::write(locks.join("lock-0123456789abcdef.lck"), lock).unwrap();
    let pruned = backup(&place, &format!("prune {url} --keep-last 1"));
    let pruned = pruned.exits(11, "one of three");
    assert!(pruned.stderr.contains("1 of 3 volumes could not be pruned"), "{}", pruned.stderr);
    for volume in pruned.json().as_array().unwrap() {
        let locked = volume["volume"] == "two";
        assert_eq!(volume["removed"].is_null(), locked, "{volume}");
        assert_eq!(volume["problem"].is_null(), !locked, "{volume}");
    }
    let left = |volume| json(&place, &format!("list {url}?volume={volume}"));
    for (volume, backups) in [("one", 1), ("two", 2), ("three", 1)] {
        assert_eq!(left(volume).as_array().unwrap().len(), backups, "{volume}");
    }
}

#[test]
fn an_interrupted_backup_says_nothing_of_snapshots_that_it_deletes() {
    let place = Place::new();
    // Many extents: giving back the space of a snapshot takes more than one look at whether to go on.
    place.dbs("init store.dbs --size 1GiB --extent-size 64KiB").ok("init");
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    place.dbs("volume create vol 512MiB").ok("create");
    let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
    let volume = store.volume("vol").unwrap();
    for extent in 0..8192 {
        volume.write_at(extent << 16, &[1; 4096], false).unwrap();
    }
    drop(volume);
    store.close().unwrap();
    for (served, signal) in [(false, "INT"), (true, "INT"), (false, "HUP"), (true, "HUP")] {
        if signal == "HUP" && hangups_are_ignored() {
            continue;
        }
        let _server = served.then(|| place.serve(""));
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).env("DBS_TEST_ALONE", "1");
        command.args(["backup", "create", "vol", &url, "--rate", "1MiB", "--compression", "none"]);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        let has_begun = || files(&root, ".cfg").iter().any(|file| !file.ends_with("volume.cfg"));
        while !has_begun() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        // Of a lost terminal, the kernel and the shell both tell.
        for _ in 0..if signal == "HUP" { 2 } else { 1 } {
            let child = child.id().to_string();
            let killed = Command::new("kill").args(["-s", signal, &child]).status();
            assert!(killed.unwrap().success());
        }
        let run = Run::new(child.wait_with_output().unwrap());
        assert!(run.code != 0 && !run.stderr.contains("is kept"), "{}", run.stderr);
        assert!(run.stderr.contains("stopped before the end"), "{}", run.stderr);
        assert_eq!(snapshots(&place, "vol"), [""; 0], "served: {served}, {signal}");
        assert!(!has_begun(), "facts in progress stay after {signal}");
        std::fs::remove_dir_all(root.join("backupstore")).unwrap();
    }
}

/// The facts of a backup as those of one that was cut off.
fn in_progress(facts: &str) -> String {
    let (head, tail) = facts.split_once("\"CreatedTime\":\"").unwrap();
    let tail = tail.split_once('"').unwrap().1;
    format!("{head}\"CreatedTime\":\"\"{tail}")
}

/// What is wrong is found, and what can be deleted is.
fn damage(place: &Place, url: &str) {
    let verified = json(place, &format!("verify {url}?volume=vol --data"));
    assert_eq!(verified[0]["verified"]["bad"], Value::Array(vec![]));
    let facts = json(place, &format!("show {url}?volume=vol&backup=backup-1"));
    assert_eq!(facts["state"], "complete");
    // What Longhorn has backed up above an image is not all there is.
    let config = files(&place.path("backups"), "volume.cfg").pop().unwrap();
    let good = std::fs::read_to_string(&config).unwrap();
    let (none, image) = (r#""BackingImageName":"\"\"""#, r#""BackingImageName":"\"img\"""#);
    assert!(good.contains(none), "{good}");
    std::fs::write(&config, good.replace(none, image)).unwrap();
    let refused = backup(place, &format!("restore {url}?volume=vol&backup=backup-1 image"));
    assert!(refused.exits(1, "image").stderr.contains("backing image `img`"));
    // No backup can be restored without the facts of the volume.
    for (bad, code) in [("{", 4), (r#"{"Name":"vol","Size":"0"}"#, 4)] {
        std::fs::write(&config, bad).unwrap();
        backup(place, &format!("verify {url}?volume=vol&backup=backup-1")).exits(code, bad);
    }
    // Found by review: without it, a verification of all backups found nothing wrong.
    std::fs::remove_file(&config).unwrap();
    for args in ["", " --data"] {
        let found = backup(place, &format!("verify {url}?volume=vol{args}")).exits(10, "none");
        assert!(found.stderr.contains("/volume.cfg"), "{}", found.stderr);
    }
    std::fs::write(&config, good).unwrap();
    let facts = files(&place.path("backups"), ".cfg");
    let facts: Vec<_> = facts.into_iter().filter(|file| !file.ends_with("volume.cfg")).collect();
    let complete: Vec<_> =
        facts.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    for (file, text) in facts.iter().zip(&complete) {
        std::fs::write(file, in_progress(text)).unwrap();
    }
    let found = backup(place, &format!("verify {url}?volume=vol")).exits(10, "all cut off");
    assert!(found.stderr.contains("has no complete backup"), "{}", found.stderr);
    for (file, text) in facts.iter().zip(complete) {
        std::fs::write(file, text).unwrap();
    }
    let block = files(&place.path("backups"), ".blk").pop().unwrap();
    std::fs::write(&block, b"torn").unwrap();
    backup(place, &format!("verify {url}?volume=vol")).ok("structure");
    let found = backup(place, &format!("verify {url}?volume=vol --data")).exits(4, "damage");
    assert!(String::from_utf8_lossy(&found.stdout).contains("checksum verification failed"));
    std::fs::remove_file(&block).unwrap();
    backup(place, &format!("verify {url}?volume=vol")).exits(4, "missing");
    let mut codes = ["backup-1", "backup-2", "backup-3"].map(|name| {
        backup(place, &format!("restore {url}?volume=vol&backup={name} hole-{name}")).code
    });
    codes.sort_unstable();
    assert_eq!((codes[2], codes.iter().all(|code| [0, 4].contains(code))), (4, true), "{codes:?}");

    json(place, &format!("delete {url}?volume=vol&backup=backup-1"));
    backup(place, &format!("delete {url}?volume=vol&backup=backup-1")).exits(10, "again");
    json(place, &format!("delete {url}?volume=vol"));
    backup(place, &format!("delete {url}?volume=vol")).exits(10, "again");
    assert_eq!(json(place, &format!("list {url}")), Value::Array(vec![]));
    assert!(files(&place.path("backups"), "").is_empty());
    for (args, code) in [
        (format!("list {url}/absent"), 10),
        ("list ftp://x/y".to_owned(), 1),
        ("list x".to_owned(), 2),
        (format!("show {url}?volume=vol&backup=absent"), 10),
        (format!("create vol@absent {url}"), 10),
        (format!("create vol@three {url} --block-size 1MiB"), 2),
        (format!("create vol@three {url} --label dbs-volume-size=1"), 2),
        (format!("verify {url}?volume=absent"), 10),
        (format!("restore {url}?volume=vol"), 2),
    ] {
        backup(place, &args).exits(code, &args);
    }
}

/// A volume that was made smaller: the size in `volume.cfg` is that of the last backup.
#[test]
fn the_larger_of_two_backups_is_restored() {
    let place = Place::with_store();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    place.dbs("volume create vol 9000KiB").ok("create");
    write(&place, 0, &[1; 4096]);
    place.dbs("snapshot create vol@one").ok("snapshot");
    json(&place, &format!("create vol@one {url} --name backup-1"));
    place.dbs("--yes volume resize vol 1000KiB").ok("resize");
    place.dbs("snapshot create vol@two").ok("snapshot");
    json(&place, &format!("create vol@two {url} --name backup-2"));
    for (backup, size) in [("backup-1", 9_216_000), ("backup-2", 1_024_000)] {
        let restored = json(&place, &format!("restore {url}?backup={backup}&volume=vol {backup}"));
        assert_eq!(restored["size"], size, "{backup}");
    }
    // What cannot be read is a finding; what Longhorn's first versions have made is none.
    let facts = files(&root, "backup_backup-2.cfg").pop().unwrap();
    let good = std::fs::read_to_string(&facts).unwrap();
    for (from, to, code) in [
        (r#""CompressionMethod":"lz4""#, r#""CompressionMethod":"zzz""#, 4),
        (r#""FilePath":"""#, r#""FilePath":"x""#, 0),
    ] {
        assert!(good.contains(from));
        std::fs::write(&facts, good.replace(from, to)).unwrap();
        let found = backup(&place, &format!("verify {url}?volume=vol"));
        assert_eq!(found.code, code, "{to}: {}", found.stderr);
    }
}

/// A restore that fails half way goes on where it was, and nobody takes what it has left for a volume.
#[test]
fn a_restore_that_was_cut_off_goes_on() {
    let place = Place::with_store();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    place.dbs("volume create vol 8MiB").ok("create");
    for block in 0..4 {
        write(&place, block << 21, &[block as u8 + 1; 4096]);
    }
    place.dbs("snapshot create vol@one").ok("snapshot");
    let created = json(&place, &format!("create vol@one {url}"));
    let from = created["url"].as_str().unwrap();
    let block = files(&root, ".blk").pop().unwrap();
    let aside = place.path("aside");
    std::fs::rename(&block, &aside).unwrap();
    let failed = backup(&place, &format!("restore {from} back")).exits(4, "a block is missing");
    assert!(failed.stderr.contains("--resume"), "{}", failed.stderr);
    place.dbs("volume export back exported").exits(11, "incomplete");
    std::fs::rename(&aside, &block).unwrap();
    backup(&place, &format!("restore {from} other --resume")).exits(10, "no such volume");
    backup(&place, &format!("restore {from} vol --resume")).exits(2, "a volume of its own");
    json(&place, &format!("restore {from} back --resume"));
    assert!(exported(&place, "back") == exported(&place, "vol@one"));
}

fn files(folder: &std::path::Path, end: &str) -> Vec<std::path::PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path, end));
        } else if path.to_str().unwrap().ends_with(end) {
            all.push(path);
        }
    }
    all
}

/// All commands on a repository, which nobody reads without its passphrase.
#[test]
fn backups_in_a_repository() {
    let place = Place::with_store();
    let root = place.path("backups");
    std::fs::create_dir(&root).unwrap();
    let url = format!("vfs://{}", root.display());
    let keyed = |args: &str| {
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).env("DBS_BACKUP_PASSPHRASE", "a secret");
        run(command.args(["--json", "--yes", "backup"]).args(args.split_whitespace()))
    };
    backup(&place, &format!("init {url} --encrypt")).exits(2, "no key");
    for empty in ["list", "init"] {
        let mut command = place.bare();
        command.env("DBS_BACKUP_PASSPHRASE", "").args(["backup", empty, &url]);
        let refused = run(&mut command).exits(2, "empty").stderr;
        assert!(refused.contains("DBS_BACKUP_PASSPHRASE"), "{refused}");
    }
    keyed(&format!("init {url}")).exits(2, "not to be encrypted");
    keyed(&format!("list {url}")).exits(2, "nothing is written in the clear");
    let made = keyed(&format!("init {url} --encrypt")).ok("init").json();
    assert_eq!((&made["url"], &made["encrypted"]), (&url.as_str().into(), &true.into()));
    keyed(&format!("init {url} --encrypt")).exits(13, "there is one");
    let without = backup(&place, &format!("list {url}"));
    assert!(without.exits(2, "without the key").stderr.contains("DBS_BACKUP_PASSPHRASE"));

    // A second key, and no way to remove the last one.
    let key = place.path("backup.key");
    std::fs::write(&key, [9; 32]).unwrap();
    let add = format!("key add {url} --key-file {}", key.display());
    keyed(&format!("key add {url}")).exits(2, "no new key");
    let added = keyed(&add).ok("add").json()["id"].as_str().unwrap().to_owned();
    keyed(&add).exits(13, "it is there");
    let keys = keyed(&format!("key list {url}")).ok("list").json();
    let used = keys.as_array().unwrap().iter().find(|key| key["used"] == true).unwrap();
    assert_eq!(used["kind"], "passphrase");
    keyed(&format!("key remove {url} {}", used["id"].as_str().unwrap())).exits(2, "the own one");
    let mut other = place.bare();
    other.env("DBS_BACKUP_KEY_FILE", &key).args(["backup", "key", "list", &url]);
    let shown = run(&mut other).ok("by the other key");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let line = shown.lines().find(|line| line.starts_with(&added)).unwrap();
    assert!(line.contains("key-file") && line.ends_with("in use"), "{shown}");
    keyed(&format!("key remove {url} {added}")).ok("remove");
    run(&mut other).exits(2, "its key is gone");
    keyed(&format!("key remove {url} {added}")).exits(10, "it is gone");

    place.dbs("volume create vol 9000KiB").ok("create");
    write(&place, 0, &[1; 8192]);
    write(&place, 5 << 20, &[2; 3 << 20]);
    place.dbs("snapshot create vol@one").ok("snapshot");
    let first = keyed(&format!("create vol@one {url} --name backup-1")).ok("first").json();
    assert_eq!((&first["base"], first["size"].as_u64()), (&Value::Null, Some(4 << 20)));
    write(&place, 4096, &[3; 4096]);
    place.dbs("snapshot create vol@two").ok("snapshot");
    let served = place.serve("");
    let second = keyed(&format!("create vol@two {url} --name backup-2")).ok("second").json();
    assert_eq!(second["base"], "backup-1");
    served.stop();
    // The chunk that changed, and the last one, which is no whole one.
    assert_eq!(second["read"].as_u64(), Some(2 << 20));
    keyed(&format!("create vol@two {url} --block-size 16MiB")).exits(2, "it has its own size");
    for (name, snapshot) in [("backup-1", "vol@one"), ("backup-2", "vol@two")] {
        let there = format!("{url}?backup={name}&volume=vol");
        keyed(&format!("restore {there} {name}")).ok("restore");
        assert!(exported(&place, name) == exported(&place, snapshot), "{name}");
        let verified = keyed(&format!("verify {there} --data")).ok("verify").json();
        assert_eq!(verified[0]["verified"]["bad"], serde_json::json!([]));
    }
    let list = keyed(&format!("list {url}")).ok("list").json();
    assert_eq!((&list[0]["volume"], &list[0]["backups"]), (&"vol".into(), &2.into()));
    let list = keyed(&format!("list {url}?volume=vol")).ok("list").json();
    assert_eq!((&list[1]["backup"], &list[1]["snapshot"]), (&"backup-2".into(), &"two".into()));
    let shown = keyed(&format!("show {}", second["url"].as_str().unwrap())).ok("show").json();
    assert_eq!((&shown["state"], &shown["block_size"]), (&"complete".into(), &(1 << 20).into()));

    // Damage is found, named, and mended by the next backup.
    let folder = root.join("dbs-repository/packs");
    let mut packs: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap())
        .map(|file| file.unwrap().path())
        .collect();
    packs.sort_by_key(|path| std::fs::metadata(path).unwrap().len());
    let mut content = std::fs::read(packs.last().unwrap()).unwrap();
    content[60] ^= 1;
    std::fs::write(packs.last().unwrap(), content).unwrap();
    let bad = keyed(&format!("verify {url}?volume=vol --data --mend")).exits(4, "damage");
    let name = packs.last().unwrap().file_name().unwrap().to_str().unwrap();
    assert!(bad.json().to_string().contains(name), "{name}");
    keyed(&format!("create vol {url} --name backup-3")).ok("third");
    keyed(&format!("verify {url}?backup=backup-3&volume=vol --data")).ok("mended");
    let condemned = || std::fs::read_dir(root.join("dbs-repository/condemned")).unwrap().count();
    assert_eq!(condemned(), 1);
    // What cannot be read at all is mended, too.
    for lists in &packs[..2] {
        let mut content = std::fs::read(lists).unwrap();
        content[60] ^= 1;
        std::fs::write(lists, content).unwrap();
    }
    for (name, count) in [("backup-1", 2), ("backup-2", 3)] {
        keyed(&format!("verify {url}?backup={name}&volume=vol --data --mend")).exits(4, name);
        assert_eq!(condemned(), count);
    }
    keyed(&format!("create vol {url} --name backup-4")).ok("fourth");
    keyed(&format!("verify {url}?backup=backup-3&volume=vol --data")).ok("mended");

    keyed(&format!("delete {url}?backup=backup-1&volume=vol")).ok("delete");
    let pruned = keyed(&format!("prune {url} --keep-last 1")).ok("prune").json();
    assert_eq!(pruned[0]["removed"]["found"], true);
    let collected = keyed(&format!("collect {url}")).ok("collect").json();
    assert_eq!((&collected["backups"], &collected["removed"]), (&1.into(), &0.into()));
    let shown =
        String::from_utf8_lossy(&std::fs::read(root.join("dbs-repository/config")).unwrap())
            .into_owned();
    assert!(shown.contains("aes-256-gcm") && !shown.contains("\"key\""), "{shown}");
    let other = place.path("longhorn");
    std::fs::create_dir(&other).unwrap();
    let refused = backup(&place, &format!("collect vfs://{}", other.display()));
    assert!(refused.exits(2, "no repository").stderr.contains("no repository"));
}
