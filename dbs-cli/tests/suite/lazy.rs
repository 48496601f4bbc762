//! Volumes that are used while they are restored: `dbs backup restore --lazy`, and what ends it.

use crate::support::{Place, Run, noise, run};
use dbs_core::{OpenOptions, Store};
use dbs_nbd::{Client, ClientOptions};
use serde_json::Value;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Six blocks of Longhorn's layout, of which one is zeros; no multiple of their size.
const SIZE: usize = 11 << 20;
/// A server that brings one block for each of its threads, and then waits.
const SLOW: &str = "--restore-rate 1KiB";

/// A store with the volume `vol`, a backup of it, and a volume `v` that rests on that.
struct Sample {
    place: Place,
    url: String,
    repository: bool,
    /// What `v` rests on.
    held: String,
    content: Vec<u8>,
}

impl Sample {
    fn new(repository: bool) -> Self {
        let place = Place::with_store();
        fs::create_dir(place.path("backups")).unwrap();
        let url = format!("vfs://{}", place.path("backups").display());
        let mut content = noise(1, SIZE);
        content[2 << 20..4 << 20].fill(0);
        place.dbs(&format!("volume create vol {SIZE}")).ok("create");
        let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
        store.volume("vol").unwrap().write_at(0, &content, false).unwrap();
        store.close().unwrap();
        let mut sample = Self { place, url, repository, held: String::new(), content };
        fs::write(sample.place.path("key"), [5; 32]).unwrap();
        if repository {
            sample.backup("init URL --encrypt").ok("init");
        }
        sample.backup("create vol URL --name backup-1").ok("backup");
        sample.place.dbs("--yes volume delete vol").ok("delete");
        let made = sample.backup("restore --lazy URL?volume=vol&backup=backup-1 v").ok("lazy");
        let made = made.json();
        assert_eq!((&made["name"], made["size"].as_u64()), (&"v".into(), Some(SIZE as u64)));
        made["backing_backup"].as_str().unwrap().clone_into(&mut sample.held);
        sample
    }

    /// Runs `dbs`, with the key of the repository; `URL` and `HELD` stand for what they name.
    fn dbs(&self, args: &str) -> Run {
        let mut command = self.command();
        let named = |arg: &str| arg.replace("URL", &self.url).replace("HELD", &self.held);
        run(command.args(["--json", "--yes"]).args(args.split_whitespace().map(named)))
    }

    fn backup(&self, args: &str) -> Run {
        self.dbs(&format!("backup {args}"))
    }

    fn command(&self) -> std::process::Command {
        let mut command = self.place.bare();
        command.env("DBS_STORE", self.place.store()).env("DBS_TEST_ALONE", "1");
        if self.repository {
            command.env("DBS_BACKUP_KEY_FILE", self.place.path("key"));
        }
        command
    }

    fn socket(&self) -> PathBuf {
        self.place.path("nbd")
    }

    fn serve(&self, args: &str) -> crate::support::Served {
        self.serve_with(&self.held, args)
    }

    /// A server that brings this backup.
    fn serve_with(&self, held: &str, args: &str) -> crate::support::Served {
        let mut command = self.command();
        command.env("DBS_BACKING_BACKUP", held);
        let nbd = format!("unix:{}", self.socket().display());
        command.args(["--json", "serve", "--nbd", &nbd]).args(args.split_whitespace());
        self.place.served(&mut command)
    }

    fn connect(&self) -> Client<UnixStream> {
        Client::connect_unix(&self.socket(), "v", &ClientOptions::default()).unwrap()
    }

    /// All of `v` by a client.
    fn shown(&self) -> Vec<u8> {
        let mut all = vec![0; SIZE];
        self.connect().read_at(0, &mut all).unwrap();
        all
    }

    /// All of `v`, with what `options` give.
    fn exported(&self, options: &str) -> Vec<u8> {
        self.dbs(&format!("{options} volume export v out --force")).ok("export");
        fs::read(self.place.path("out")).unwrap()
    }

    fn wait(&self, what: &str, is_there: impl Fn(&Self) -> bool) {
        let late = Instant::now() + Duration::from_secs(100);
        while !is_there(self) {
            assert!(Instant::now() < late, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether `v` rests on nothing and nothing of the restore is left, in the store or beside it.
    fn stands_alone(&self) -> bool {
        let volumes = self.dbs("volume list").ok("list").json();
        let volumes = volumes.as_array().unwrap();
        let is_alone = volumes.len() == 1 && volumes[0]["backing"].is_null();
        is_alone && self.held_backups().is_empty()
    }

    fn held_backups(&self) -> Vec<Value> {
        let all = self.backup("list URL?volume=vol");
        if all.code == 10 {
            // A repository knows no volume without backups.
            return Vec::new();
        }
        let all = all.ok("list").json();
        let all = all.as_array().unwrap().iter();
        all.filter(|backup| !backup["labels"]["dbs-held-for"].is_null()).cloned().collect()
    }
}

/// The whole way by a server: read, written, killed in the middle, complete; to the byte as after a plain restore.
#[test]
fn a_volume_is_used_while_a_server_restores_it() {
    for repository in [false, true] {
        let sample = Sample::new(repository);
        let mut expected = sample.content.clone();
        // The backup goes; what is held of it does not.
        sample.backup("delete URL?volume=vol&backup=backup-1").ok("delete");
        let mut served = sample.serve(SLOW);
        assert!(sample.shown() == expected, "repository: {repository}");
        let mut client = sample.connect();
        // A part of a block, whole blocks, and what is zeros in the backup.
        for (at, byte, length) in [(5120, 1, 512), (3 << 20, 2, 1 << 20), (SIZE - 4096, 3, 4096)] {
            expected[at..at + length].fill(byte);
            client.write_at(at as u64, &expected[at..at + length], true).unwrap();
        }
        sample.dbs("snapshot create v@early").ok("snapshot");
        let early = expected.clone();
        client.write_zeroes(6 << 20, 1 << 20, 0).unwrap();
        expected[6 << 20..7 << 20].fill(0);
        assert!(sample.shown() == expected, "repository: {repository}");
        if !repository {
            // It has not come, and what has is in the second volume.
            let second =
                |s: &Sample| s.dbs("volume list").ok("list").json().as_array().unwrap().len() == 2;
            sample.wait("no second volume", second);
            let job = |s: &Sample| s.dbs("top --once -d 100ms").ok("top").json()["jobs"][0].clone();
            // As many bytes as the blocks have that are not zeros.
            sample.wait("no job", |s| job(s)["total"].as_u64() == Some(10 << 20));
            let job = job(&sample);
            assert_eq!((&job["what"], &job["volume"]), (&"backup.restore".into(), &"v".into()));
            assert!(!sample.dbs("volume show v").ok("show").json()["backing"].is_null());
            let refused = sample.backup("restore --resume HELD").exits(11, "served").stderr;
            assert!(refused.contains("the server of the store"), "{refused}");
        }
        drop(client);
        served.kill();
        // A lock goes out of date, and this is no test of that.
        files(&sample.place.path("backups"), "lck")
            .iter()
            .for_each(|lock| fs::remove_file(lock).unwrap());
        let served = sample.serve("");
        assert!(sample.shown() == expected, "repository: {repository}");
        sample.wait("it does not stand alone", Sample::stands_alone);
        assert!(sample.shown() == expected, "repository: {repository}");
        assert_eq!(served.stop().0, Some(0));
        fs::remove_dir_all(sample.place.path("backups")).unwrap();
        assert!(sample.exported("") == expected, "repository: {repository}");
        sample.dbs("volume export v@early early").ok("export");
        assert!(fs::read(sample.place.path("early")).unwrap() == early);
        sample.dbs("check").ok("check");
    }
}

/// Without a server; and what is refused meanwhile.
#[test]
fn an_idle_store_ends_a_restore_by_a_command() {
    let sample = Sample::new(true);
    let refused = sample.dbs("volume export v out");
    assert_ne!(refused.code, 0, "without the backup");
    for part in ["--backing-backup", "backup held-", "of volume vol"] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
    assert!(sample.exported("--backing-backup HELD") == sample.content);
    let other = sample.dbs("--backing-backup URL?volume=vol&backup=backup-1 volume export v out");
    assert_ne!(other.code, 0, "another backup");
    let held = sample.held_backups();
    assert!(held[0]["labels"]["dbs-held-for"].as_str().unwrap().starts_with("volume v of store "));

    for refused in ["delete HELD", "delete URL?volume=vol"] {
        let refused = sample.backup(refused).exits(11, refused).stderr;
        assert!(refused.contains("--held"), "{refused}");
    }
    sample.backup("delete --held URL?volume=vol&backup=backup-1").exits(2, "not held");
    sample.backup("restore --lazy URL?volume=vol&backup=backup-1 v").exits(13, "there is one");
    sample.backup("restore --lazy URL?volume=vol&backup=absent w").exits(10, "no such backup");
    sample.backup("restore --lazy URL?volume=vol&backup=backup-1 w@x").exits(2, "no such name");
    assert_eq!(sample.held_backups().len(), 1, "what failed has left nothing");
    let served = sample.place.serve("");
    sample.backup("restore --lazy URL?volume=vol&backup=backup-1 w").exits(1, "served");
    served.stop();

    sample.dbs("snapshot create v@one").ok("snapshot");
    sample.dbs("volume clone v@one w").ok("clone");
    let done = sample.backup("restore --resume HELD").ok("resume").json();
    assert_eq!((&done["name"], &done["backing"]), (&"v".into(), &Value::Null));
    assert!(sample.exported("") == sample.content);
    assert!(sample.held_backups().is_empty());
    sample.dbs("volume export w out --force").ok("the clone");
    assert!(fs::read(sample.place.path("out")).unwrap() == sample.content);
    sample.backup("restore --resume HELD").exits(10, "it is gone");
}

/// Killed when all had come, and right before the end.
#[test]
fn a_restore_that_was_cut_off_late_ends_with_what_has_come() {
    let sample = Sample::new(true);
    let second = sample.held.split("backup=").nth(1).unwrap().split('&').next().unwrap();
    sample.backup(&format!("restore HELD {second}")).ok("all has come");
    sample.dbs(&format!("snapshot create {second}@whole")).ok("snapshot");
    // What somebody has written to it is none of the backup's.
    let store = Store::open(&sample.place.store(), &OpenOptions::default()).unwrap();
    store.volume(second).unwrap().write_at(0, &[9; 4096], false).unwrap();
    store.close().unwrap();
    let refused = sample.backup("restore --resume HELD").exits(2, "it was written").stderr;
    assert!(refused.contains("holds something"), "{refused}");
    // Nor is it when all snapshots were made at night.
    sample.dbs(&format!("snapshot create {second}@night")).ok("snapshot");
    let refused = sample.backup("restore --resume HELD").exits(2, "it was written").stderr;
    assert!(refused.contains("other snapshots"), "{refused}");
    sample.dbs(&format!("snapshot delete {second}@night")).ok("delete");
    sample.dbs(&format!("snapshot rollback {second}@whole")).ok("rollback");
    sample.backup("restore --resume HELD").ok("resume");
    assert!(sample.exported("") == sample.content);
    assert!(sample.stands_alone());
}

/// The volume was deleted when all had come, or its restore was cut off between its last steps.
#[test]
fn what_is_left_behind_the_end_is_cleaned_up() {
    let sample = Sample::new(false);
    let second = sample.held.split("backup=").nth(1).unwrap().split('&').next().unwrap();
    sample.backup(&format!("restore HELD {second}")).ok("all has come");
    sample.dbs("volume delete v").ok("delete");
    sample.backup("restore --resume HELD").ok("nothing rests on it");
    assert_eq!(sample.dbs("volume list").ok("list").json(), serde_json::json!([]));
    assert!(sample.held_backups().is_empty());

    // Only the held backup is left: by a command, and by a server.
    for by_server in [false, true] {
        let made = sample.backup("restore --lazy URL?volume=vol&backup=backup-1 v").ok("lazy");
        let held = made.json()["backing_backup"].as_str().unwrap().to_owned();
        let sample = &sample;
        sample.dbs("volume delete v").ok("delete");
        assert_eq!(sample.held_backups().len(), 1);
        if by_server {
            let served = sample.serve_with(&held, "");
            sample.wait("it is kept", |s| s.held_backups().is_empty());
            served.stop();
        } else {
            sample.backup(&format!("restore --resume {held}")).ok("resume");
            assert!(sample.held_backups().is_empty());
        }
    }
}

/// A volume that has the name of its backup is none that a lazy restore has made.
#[test]
fn a_plain_restore_goes_on_whatever_its_volume_is_called() {
    let sample = Sample::new(true);
    sample.backup("restore URL?volume=vol&backup=backup-1 backup-1").ok("restore");
    let url = "restore --resume URL?volume=vol&backup=backup-1 backup-1";
    let refused = sample.backup(url);
    assert!(!refused.stderr.contains("none that a volume rests on"), "{}", refused.stderr);
    // Nor is another volume than that which rests on it.
    sample.backup("restore --resume HELD w").exits(10, "there is no volume `w`");
    assert_eq!(sample.held_backups().len(), 1);
}

/// Whoever deletes the volume leaves nothing to do but to clean up.
#[test]
fn a_volume_that_is_deleted_meanwhile_leaves_nothing() {
    let sample = Sample::new(false);
    let volumes = |s: &Sample| s.dbs("volume list").ok("list").json().as_array().unwrap().len();
    let served = sample.serve(SLOW);
    sample.wait("no second volume", |s| volumes(s) == 2);
    sample.dbs("volume delete v").ok("delete");
    // At its rate it would take hours to bring the rest.
    sample.wait("something is left", |s| volumes(s) == 0 && s.held_backups().is_empty());
    assert_eq!(served.stop().0, Some(0));
    // Whoever goes on naming the backup is told, and served.
    let (_, log) = sample.serve("").stop();
    assert!(log.contains("no volume rests on it"), "{log}");
}

/// What cannot be read is an error, never zeros; what is in the store can be used; and when the backup store is back, all goes on.
#[test]
fn a_backup_store_that_is_away_or_damaged_costs_errors_and_nothing_else() {
    let sample = Sample::new(false);
    let (there, away) = (sample.place.path("backups"), sample.place.path("away"));
    fs::rename(&there, &away).unwrap();
    let served = sample.serve("");
    let mut client = sample.connect();
    let mut found = vec![0; 4096];
    let error = client.read_at(0, &mut found).unwrap_err();
    assert!(error.to_string().contains("(Io)"), "{error}");
    let mut client = sample.connect();
    client.write_at(0, &[9; 4096], true).unwrap();
    client.read_at(0, &mut found).unwrap();
    assert_eq!(found, [9; 4096]);
    // It comes back with a block that is damaged.
    let block = files(&away, "blk").into_iter().next().unwrap();
    let good = fs::read(&block).unwrap();
    fs::write(&block, &good[..good.len() / 2]).unwrap();
    fs::rename(&away, &there).unwrap();
    let block = there.join(block.strip_prefix(&away).unwrap());
    let reads = |sample: &Sample, at: u64| {
        let mut part = vec![0; 4096];
        sample.connect().read_at(at, &mut part).map(|()| part)
    };
    // One of the blocks cannot be read, the others can.
    let at = |block: u64| (block << 21) + 8192;
    sample.wait("it is not attached", |s| [0, 2].iter().any(|block| reads(s, at(*block)).is_ok()));
    let bad: Vec<_> = (0..6).filter(|block| reads(&sample, at(*block)).is_err()).collect();
    assert_eq!(bad.len(), 1, "{bad:?}");
    assert!(!sample.stands_alone());
    fs::write(&block, good).unwrap();
    sample.wait("it does not stand alone", Sample::stands_alone);
    let mut expected = sample.content.clone();
    expected[..4096].fill(9);
    assert!(sample.shown() == expected);
    let (_, log) = served.stop();
    let told = log.lines().any(|line| line.contains("restore") && line.contains("held-"));
    assert!(told, "{log}");
}

/// Who reads nothing of the backup does not ask its store.
#[test]
fn commands_on_the_idle_store_open_the_backup_when_they_read_it() {
    let sample = Sample::new(false);
    let (there, away) = (sample.place.path("backups"), sample.place.path("away"));
    fs::rename(&there, &away).unwrap();
    for command in ["volume list", "snapshot create v@one", "volume clone v@one w", "check"] {
        let done = sample.dbs(&format!("--backing-backup HELD {command}"));
        assert_eq!((done.code, &*done.stderr), (0, ""), "{command}");
    }
    let refused = sample.dbs("--backing-backup HELD volume export v out");
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("reading the backing file"), "{}", refused.stderr);
    fs::rename(&away, &there).unwrap();
    assert!(sample.exported("--backing-backup HELD") == sample.content);
    // A damaged block holds up no others.
    let block = files(&there, "blk").into_iter().next().unwrap();
    let good = fs::read(&block).unwrap();
    fs::write(&block, &good[..good.len() / 2]).unwrap();
    let damaged = sample.backup("restore --resume HELD");
    assert_eq!(damaged.code, 4, "{}", damaged.stderr);
    assert!(damaged.stderr.contains("all but one block"), "{}", damaged.stderr);
    fs::write(&block, good).unwrap();
    // Another one of that name, which somebody has put there: two of its blocks have changed places.
    let held = sample.held.split("backup=").nth(1).unwrap().split('&').next().unwrap();
    let facts = files(&there, "cfg").into_iter().find(|path| path.to_string_lossy().contains(held));
    let facts = facts.unwrap();
    let text = fs::read_to_string(&facts).unwrap();
    let names: Vec<_> =
        text.split("\"BlockChecksum\":\"").skip(1).map(|name| name[..64].to_owned()).collect();
    let [one, other, ..] = &names[..] else { panic!("{text}") };
    fs::write(&facts, text.replace(one, "X").replace(other, one).replace('X', other)).unwrap();
    let refused = sample.dbs("--backing-backup HELD volume export v out --force");
    assert_ne!(refused.code, 0);
    assert!(
        refused.stderr.contains("not the backup that the volume rests on"),
        "{}",
        refused.stderr
    );
    assert_ne!(sample.backup("restore --resume HELD").code, 0, "nor is it brought");
}

/// What room is left is for clients.
#[test]
fn a_store_without_room_is_not_filled() {
    let sample = Sample::new(true);
    let store = Store::open(&sample.place.store(), &OpenOptions::default()).unwrap();
    store.create_volume("filler", store.info().free).unwrap();
    let volume = store.volume("filler").unwrap();
    let kept = store.info().extents_total / 16 * store.info().extent_size;
    let filling = noise(2, 1 << 20);
    for at in (0..).step_by(filling.len()) {
        if store.info().free < kept {
            break;
        }
        volume.write_at(at, &filling, false).unwrap();
    }
    drop(volume);
    let free = store.info().free;
    store.close().unwrap();
    // Its chunks but for the two that are zeros.
    let made = sample.backup("restore --lazy URL?volume=vol&backup=backup-1 w").ok("lazy");
    assert_eq!(made.stderr.contains("will not stand alone"), free < 9 << 20, "{}", made.stderr);
    let served = sample.serve("");
    assert!(sample.shown() == sample.content);
    let told = |s: &Sample| {
        let volumes = s.dbs("volume list").ok("list").json();
        volumes.as_array().unwrap().iter().any(|v| v["name"].as_str().unwrap().starts_with("held"))
    };
    sample.wait("nothing was tried", told);
    assert!(!sample.dbs("volume show v").ok("show").json()["backing"].is_null());
    sample.dbs("volume delete filler").ok("delete");
    let is_alone = |s: &Sample| s.dbs("volume show v").ok("show").json()["backing"].is_null();
    sample.wait("it does not stand alone", is_alone);
    let (_, log) = served.stop();
    assert!(log.contains("is kept for clients"), "{log}");
}

/// All files in a folder, and below, whose names end like this.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, end));
        } else if path.extension().is_some_and(|extension| extension == end) {
            found.push(path);
        }
    }
    found
}
