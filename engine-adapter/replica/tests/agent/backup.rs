//! Backups of a replica's snapshots, to a directory.

use crate::support::*;
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Onto, Target, Work};
use dbs_core::Result;
use longhorn_replica::replica::User;
use longhorn_wire::proto::ptypes::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tonic::Code;

/// The size of a backup's blocks.
const PART: u64 = 2 * MIB;
/// Such blocks in blocks of a volume.
const PER_PART: u64 = PART / BLOCK;

/// A directory with backups.
pub struct Place {
    dir: TempDir,
}

/// A volume in memory.
struct Memory(Mutex<Vec<u8>>);

impl Target for Memory {
    fn size(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.0.lock().unwrap()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.0.lock().unwrap()[offset as usize..][..length as usize].fill(0);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

/// Tests are alone, and do not wait for others.
pub fn alone() -> HashMap<String, String> {
    [("DBS_TEST_ALONE".to_owned(), "1".to_owned())].into()
}

impl Place {
    pub fn new() -> Self {
        Self { dir: tempdir() }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn url(&self) -> String {
        format!("vfs://{}", self.path().display())
    }

    pub fn store(&self) -> BackupStore {
        let variable = |name: &str| alone().get(name).cloned();
        BackupStore::open(&Url::parse(&self.url()).unwrap(), &variable).unwrap()
    }

    pub fn backup_url(&self, backup: &str) -> String {
        format!("{}?backup={backup}&volume={VOLUME}", self.url())
    }

    /// What a backup holds.
    pub fn content(&self, backup: &str, size: u64) -> Vec<u8> {
        let memory = Memory(Mutex::new(vec![0; size as usize]));
        let store = self.store();
        let mut progress = |_, _| true;
        let restoration = store.restore(VOLUME, backup).unwrap();
        restoration.run(&memory, Onto::Empty, &mut Work::new(&mut progress)).unwrap();
        memory.0.into_inner().unwrap()
    }

    pub fn blocks(&self) -> usize {
        fn count(path: &Path) -> usize {
            let Ok(entries) = std::fs::read_dir(path) else { return 0 };
            let one = |entry: std::fs::DirEntry| match entry.path() {
                path if path.is_dir() => count(&path),
                path => usize::from(path.extension().is_some_and(|kind| kind == "blk")),
            };
            entries.map(|entry| one(entry.unwrap())).sum()
        }
        count(self.path())
    }

    pub fn request(&self, snapshot: &str, backup: &str) -> BackupCreateRequest {
        BackupCreateRequest {
            snapshot_file_name: snapshot.to_owned(),
            backup_target: self.url(),
            volume_name: VOLUME.to_owned(),
            labels: vec!["RecurringJob=c-1".to_owned()],
            credential: alone(),
            backup_name: backup.to_owned(),
            compression_method: "lz4".to_owned(),
            concurrent_limit: 2,
            parameters: [("backup-mode".to_owned(), "incremental".to_owned())].into(),
            ..Default::default()
        }
    }
}

impl Node {
    pub fn backup(&self, request: BackupCreateRequest) -> Outcome<BackupCreateResponse> {
        self.call(|mut c| async move { c.backup_create(request).await })
    }

    pub fn backup_status(&self, backup: &str) -> Outcome<BackupStatusResponse> {
        let request = BackupStatusRequest { backup: backup.to_owned() };
        self.call(|mut c| async move { c.backup_status(request).await })
    }

    /// Waits for the end of a backup.
    pub fn backup_end(&self, backup: &str) -> BackupStatusResponse {
        wait(|| {
            let status = self.backup_status(backup).unwrap();
            assert!((0..=100).contains(&status.progress));
            Some(status).filter(|status| status.state != "in_progress")
        })
    }

    /// Backs a snapshot up, to the end; whether it was incremental.
    pub fn backed_up(&self, place: &Place, snapshot: &str, backup: &str) -> bool {
        let created = self.backup(place.request(snapshot, backup)).unwrap();
        assert_eq!(created.backup, backup);
        let status = self.backup_end(backup);
        let expected = BackupStatusResponse {
            progress: 100,
            backup_url: place.backup_url(backup),
            error: String::new(),
            snapshot_name: snapshot.to_owned(),
            state: "complete".to_owned(),
        };
        assert_eq!(status, expected);
        created.is_incremental
    }

    /// As [`Node::snapshot`], at another time.
    pub fn snapshot_at(&self, name: &str, created: &str) {
        self.replica.snapshot(name, true, created, Default::default()).unwrap();
    }
}

#[test]
fn a_backup_is_whole_and_the_next_one_reads_what_changed() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    node.write(0..1000, 1);
    node.write([10 * PER_PART, 31 * PER_PART + 511], 1);
    node.snapshot("one");
    assert!(!node.backed_up(&place, "one", "backup-1"));
    assert!(place.content("backup-1", 64 * MIB) == node.content("vol@one"));
    let store = place.store();
    let facts = store.backup(VOLUME, "backup-1").unwrap();
    assert_eq!((facts.size, facts.snapshot_name.as_str()), (4 * PART, "one"));
    assert_eq!(facts.labels.unwrap()["RecurringJob"], "c-1");
    assert_eq!(store.volume(VOLUME).unwrap().size, 64 * MIB);

    node.write([0, 20 * PER_PART], 2);
    node.discard(10 * PER_PART, PER_PART);
    node.snapshot("two");
    node.write(0..100, 3);
    let before = place.blocks();
    assert!(node.backed_up(&place, "two", "backup-2"));
    assert_eq!(place.blocks(), before + 2);
    assert!(place.content("backup-2", 64 * MIB) == node.content("vol@two"));
    let facts = store.backup(VOLUME, "backup-2").unwrap();
    assert!(facts.is_incremental);
    // What was given up is not in the backup any more.
    assert_eq!(facts.size, 4 * PART);
    // The same snapshot again is a full backup, and so is one that is asked for.
    assert!(!node.backed_up(&place, "two", "backup-3"));
    node.snapshot("three");
    let mut full = place.request("three", "backup-4");
    full.parameters.insert("backup-mode".to_owned(), "full".to_owned());
    assert!(!node.backup(full).unwrap().is_incremental);
    assert_eq!(node.backup_end("backup-4").state, "complete");
    assert!(place.content("backup-4", 64 * MIB) == node.content("vol@three"));
    // A base that no snapshot can be is none.
    let path = volume_path(&place);
    let path =
        place.path().join("backupstore/volumes").join(path).join("backups/backup_backup-4.cfg");
    let facts = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, facts.replace("\"three\"", "\"a@b\"")).unwrap();
    node.snapshot("four");
    assert!(!node.backed_up(&place, "four", "backup-5"));
}

/// Each replica has its own store, in which the same snapshots have other identities.
#[test]
fn another_replica_goes_on_where_the_first_one_was() {
    let runtime = runtime();
    let (a, b, place) = (Node::new(&runtime), Node::new(&runtime), Place::new());
    for node in [&a, &b] {
        node.write(0..2000, 1);
        node.snapshot("one");
        node.write(700..800, 2);
        node.snapshot_at("two", "2026-08-21T10:00:05Z");
    }
    assert!(!a.backed_up(&place, "one", "backup-1"));
    let before = place.blocks();
    assert!(b.backed_up(&place, "two", "backup-2"));
    assert_eq!(place.blocks(), before + 1);
    assert!(place.content("backup-2", 64 * MIB) == a.content("vol@two"));
}

/// Upstream's users count the labels of a backup. Earlier versions had the time of the snapshot among them.
#[test]
fn labels_are_those_of_the_user_alone_and_the_time_in_one_counts() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    let (time, label) = ("2026-08-21T10:00:00Z", r#""Labels":{"#);
    node.write(0..10, 1);
    node.snapshot_at("one", time);
    assert!(!node.backed_up(&place, "one", "backup-1"));
    let facts = place.store().backup(VOLUME, "backup-1").unwrap();
    assert_eq!(facts.labels.unwrap(), [("RecurringJob".to_owned(), "c-1".to_owned())].into());
    assert_eq!(facts.parameters.unwrap()["dbs-snapshot-created"], time);
    let file = format!("backupstore/volumes/{}/backups/backup_backup-1.cfg", volume_path(&place));
    let file = place.path().join(file);
    let text = std::fs::read_to_string(&file).unwrap();
    node.snapshot("two");
    for (told, is_base) in [(time, true), ("2026-08-21T10:00:01Z", false)] {
        let old = text.replace("dbs-snapshot-created", "other");
        let old = old.replace(label, &format!(r#"{label}"dbs-snapshot-created":"{told}","#));
        assert!(old.contains(told), "{old}");
        std::fs::write(&file, old).unwrap();
        let config = file.parent().unwrap().with_file_name("volume.cfg");
        let before = std::fs::read(&config).unwrap();
        assert_eq!(node.backed_up(&place, "two", &format!("backup-{is_base}")), is_base);
        // The next one builds on the first again.
        std::fs::write(&config, before).unwrap();
    }
}

/// What upstream does not see: the difference to a snapshot that has the name of the one that was backed up is not the
/// difference to the backup.
#[test]
fn a_snapshot_that_has_a_name_again_is_no_base() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    node.write(0..10, 1);
    node.snapshot("daily");
    assert!(!node.backed_up(&place, "daily", "backup-1"));
    node.replica.mark_removed("daily").unwrap();
    node.snapshot("other");
    assert_eq!(node.purged().state, "complete");
    node.write(5 * PER_PART..5 * PER_PART + 10, 2);
    node.snapshot_at("daily", "2026-08-21T10:00:01Z");
    node.write(9 * PER_PART..9 * PER_PART + 10, 3);
    node.snapshot_at("weekly", "2026-08-21T10:00:02Z");
    assert!(!node.backed_up(&place, "weekly", "backup-2"));
    assert!(place.content("backup-2", 64 * MIB) == node.content("vol@weekly"));
    // The same with a base that upstream has made, which has no such time: one that was taken later is no base.
    let config = place
        .path()
        .join(format!("backupstore/volumes/{}/backups/backup_backup-2.cfg", volume_path(&place)));
    let text = std::fs::read_to_string(&config).unwrap();
    let text = text.replace("dbs-snapshot-created", "other");
    std::fs::write(&config, text).unwrap();
    node.replica.snapshot("soon", true, "2099-01-01T00:00:00Z", Default::default()).unwrap();
    assert!(node.backed_up(&place, "soon", "backup-3"));
    node.snapshot("later");
    let path = config.with_file_name("backup_backup-3.cfg");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("dbs-snapshot-created", "other")).unwrap();
    assert!(!node.backed_up(&place, "later", "backup-4"));
}

/// What was discarded above a snapshot that is marked as removed may have been taken from it, too.
#[test]
fn a_snapshot_that_is_marked_as_removed_is_no_base() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    node.write(0..100, 1);
    node.snapshot("one");
    assert!(!node.backed_up(&place, "one", "backup-1"));
    node.replica.mark_removed("one").unwrap();
    node.discard(0, 50);
    node.snapshot("two");
    assert!(!node.backed_up(&place, "two", "backup-2"));
    assert!(place.content("backup-2", 64 * MIB) == node.content("vol@two"));
    node.write([5], 1);
    node.snapshot("three");
    assert!(node.backed_up(&place, "three", "backup-3"), "a snapshot that stays is one");
    // Found by review: what it has lost would be missing in a backup that is complete.
    let refused = node.backup(place.request("one", "backup-4")).unwrap_err();
    assert!(refused.message().contains("parts of its content may be gone"), "{refused}");
}

/// As those that were restored are: only the name tells them apart.
#[test]
fn a_snapshot_without_a_time_is_no_base() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    let incoming = node.replica.incoming();
    incoming.begin_restore("volume-snap-restored.img").unwrap().write_at(0, &[1; 4096]).unwrap();
    incoming.end_restore("volume-snap-restored.img", false).unwrap();
    assert!(!node.backed_up(&place, "restored", "backup-1"));
    node.write([5], 1);
    node.snapshot("two");
    assert!(!node.backed_up(&place, "two", "backup-2"));
    assert!(place.content("backup-2", 64 * MIB) == node.content("vol@two"));
}

/// The folders of the volume, below that of all volumes.
pub fn volume_path(place: &Place) -> String {
    let mut path = place.path().join("backupstore/volumes");
    for _ in 0..3 {
        path = std::fs::read_dir(&path).unwrap().next().unwrap().unwrap().path();
    }
    let base = place.path().join("backupstore/volumes");
    path.strip_prefix(base).unwrap().to_str().unwrap().to_owned()
}

#[test]
fn a_side_branch_and_a_grown_volume_are_backed_up_whole() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    node.write(0..10, 1);
    node.snapshot("root");
    node.write(PER_PART..PER_PART + 10, 2);
    node.snapshot("side");
    assert!(!node.backed_up(&place, "side", "backup-1"));
    node.replica.revert("volume-snap-root.img", NOW).unwrap();
    node.write(2 * PER_PART..2 * PER_PART + 10, 3);
    node.snapshot("main");
    // As upstream: the last backup is not of this chain.
    assert!(!node.backed_up(&place, "main", "backup-2"));
    assert!(place.content("backup-2", 64 * MIB) == node.content("vol@main"));
    node.replica.expand(96 << 20).unwrap();
    node.write([40 * PER_PART], 4);
    node.snapshot("grown");
    assert!(node.backed_up(&place, "grown", "backup-3"));
    assert!(place.content("backup-3", 96 * MIB) == node.content("vol@grown"));
    // An older, smaller one: as large as the volume is now.
    assert!(!node.backed_up(&place, "root", "backup-4"));
    assert_eq!(place.store().volume(VOLUME).unwrap().size, 96 * MIB);
    assert!(place.content("backup-4", 64 * MIB) == node.content("vol@root"));
}

#[test]
fn methods_and_sizes_of_blocks_are_as_asked_for() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..3000, 1);
    node.snapshot("one");
    for (method, parameter, size) in
        [("none", "2097152", PART), ("gzip", "16777216", 16 * MIB), ("lz4", "2Mi", PART)]
    {
        let place = Place::new();
        let mut request = place.request("one", "");
        request.compression_method = method.to_owned();
        request.parameters.insert("backup-block-size".to_owned(), parameter.to_owned());
        let backup = node.backup(request).unwrap().backup;
        assert!(backup.starts_with("backup-"), "{backup}");
        assert_eq!(node.backup_end(&backup).state, "complete");
        let facts = place.store().backup(VOLUME, &backup).unwrap();
        assert_eq!(facts.block_size().unwrap(), size);
        assert_eq!(facts.compression_method, method);
        assert!(place.content(&backup, 64 * MIB) == node.content("vol@one"));
    }
}

#[test]
fn what_cannot_be_backed_up_is_refused() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    node.write(0..10, 1);
    node.snapshot("one");
    let refused = |change: &dyn Fn(&mut BackupCreateRequest)| {
        let mut request = place.request("one", "backup-1");
        change(&mut request);
        let status = node.backup(request).unwrap_err();
        assert_eq!(status.code(), Code::Unknown);
        status.message().to_owned()
    };
    assert_eq!(refused(&|r| r.volume_name.clear()), "missing input parameter");
    assert_eq!(refused(&|r| r.snapshot_file_name.clear()), "missing input parameter");
    assert_eq!(refused(&|r| r.backup_target.clear()), "missing input parameter");
    let text = "invalid volume name a/b for backup backup-1";
    assert_eq!(refused(&|r| r.volume_name = "a/b".to_owned()), text);
    let text = refused(&|r| r.labels.push("x".to_owned()));
    assert!(text.starts_with("cannot parse backup labels for backup backup-1: invalid"), "{text}");
    let text = "open volume-snap-two.img: no such file or directory";
    assert_eq!(refused(&|r| r.snapshot_file_name = "two".to_owned()), text);
    let text = refused(&|r| r.backup_target = "bad://x/y".to_owned());
    assert_eq!(text, "driver bad is not supported");
    let text = refused(&|r| r.compression_method = "zstd".to_owned());
    assert_eq!(text, "unsupported compression method: zstd");
    let gone = place.path().join("gone");
    let text = refused(&|r| r.backup_target = format!("vfs://{}", gone.display()));
    assert!(text.contains("doesn't exist or is not a directory"), "{text}");
    assert!(refused(&|r| r.backup_name = "../x".to_owned()).contains("cannot be the name"));
    // What failed after it had begun has a status.
    assert_eq!(node.backup_status("../x").unwrap().state, "error");
    let unknown = node.backup_status("backup-x").unwrap_err();
    assert_eq!(unknown.message(), "backup not found backup-x");
    let nameless = node.backup_status("").unwrap_err();
    assert_eq!(nameless.message(), "bad request: empty backup name");
    assert!(!node.backed_up(&place, "one", "backup-1"));
    assert!(refused(&|_| ()).contains("has a backup backup-1 already"));

    let request = BackupRemoveRequest { backup: place.backup_url("backup-1") };
    node.call(|mut c| async move { c.backup_remove(request).await }).unwrap();
    assert_eq!((place.blocks(), place.store().backups(VOLUME).unwrap().len()), (0, 0));
    node.call(|mut c| async move { c.reset(()).await }).unwrap();
    assert!(node.backup_status("backup-1").is_err());
}

/// Of each request, none of which stays for the next one.
#[test]
fn credentials_come_with_the_request() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    node.snapshot("one");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (send, heads) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let head: Vec<_> = lines
                .by_ref()
                .map(|line| line.unwrap())
                .take_while(|line| !line.is_empty())
                .collect();
            send.send(head.join("\n").to_lowercase()).unwrap();
            let answer = "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    for key in ["first", "second"] {
        let credential = [
            ("AWS_ACCESS_KEY_ID", key),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_ENDPOINTS", &endpoint),
        ];
        let request = BackupCreateRequest {
            backup_target: "s3://bucket@us-east-1/path".to_owned(),
            credential: credential.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            ..place.request("one", "backup-1")
        };
        node.backup(request).unwrap_err();
        let head = heads.recv().unwrap();
        assert!(head.contains("/bucket"), "{head}");
        assert!(head.contains(&format!("credential={key}/")), "{head}");
        while heads.try_recv().is_ok() {}
    }
}

#[test]
fn the_last_backups_are_remembered() {
    let runtime = runtime();
    let (node, place) = (Node::new(&runtime), Place::new());
    node.write(0..10, 1);
    node.snapshot("one");
    for number in 0..8 {
        node.backed_up(&place, "one", &format!("backup-{number}"));
    }
    // Those before the last five are forgotten when another begins.
    let known = |number| node.backup_status(&format!("backup-{number}")).is_ok();
    let known: Vec<_> = (0..8).filter(|number| known(*number)).collect();
    assert_eq!(known, [2, 3, 4, 5, 6, 7]);
}

/// Locks of backups share: two replicas may be asked for the same backup at once.
#[test]
fn a_backup_that_two_create_at_once_is_one_backup() {
    let runtime = runtime();
    let (a, b, place) = (Node::new(&runtime), Node::new(&runtime), Place::new());
    for node in [&a, &b] {
        node.write(0..8000, 1);
        node.snapshot("one");
    }
    for round in 0..4 {
        let name = format!("backup-{round}");
        let both = std::thread::scope(|scope| {
            let begun = [&a, &b].map(|node| {
                let request = place.request("one", &name);
                scope.spawn(move || node.backup(request))
            });
            begun.map(|begun| begun.join().unwrap())
        });
        let ends: Vec<_> = [&a, &b]
            .into_iter()
            .zip(&both)
            .map(|(node, begun)| match begun {
                Ok(_) => node.backup_end(&name),
                Err(status) => {
                    assert!(status.message().contains("already"), "{status}");
                    BackupStatusResponse { state: "error".to_owned(), ..Default::default() }
                }
            })
            .collect();
        assert!(ends.iter().any(|end| end.state == "complete"), "{ends:?}");
        assert!(place.content(&name, 64 * MIB) == a.content("vol@one"));
        assert!(!place.store().backup(VOLUME, &name).unwrap().is_in_progress());
    }
}

#[test]
fn a_backup_ends_with_the_replica_and_is_made_again() {
    let runtime = runtime();
    let setup = Setup { size: 512 * MIB, ..Setup::default() };
    let (node, place) = (Node::with(&runtime, setup), Place::new());
    node.write((0..256 * MIB / BLOCK).step_by(3), 1);
    node.snapshot("one");
    let request = BackupCreateRequest {
        compression_method: "gzip".to_owned(),
        concurrent_limit: 1,
        ..place.request("one", "backup-1")
    };
    node.backup(request.clone()).unwrap();
    wait(|| (place.blocks() > 2).then_some(()));
    User::let_go(&*node.agent, Instant::now() + Duration::from_secs(2));
    let status = node.backup_status("backup-1").unwrap();
    assert_eq!(status.state, "error");
    assert_eq!(status.error, "the replica was stopped, or gave up its store");
    assert_eq!(status.backup_url, "");
    // It keeps nobody from deleting blocks, nor from closing the store.
    assert_eq!(place.store().backups(VOLUME).unwrap(), [""; 0]);
    let before = place.blocks();
    assert!(before < 128, "it was through already");
    node.backup(request).unwrap();
    assert_eq!(node.backup_end("backup-1").state, "complete");
    let facts = place.store().backup(VOLUME, "backup-1").unwrap();
    assert_eq!(facts.size, 128 * PART);
    assert!(place.blocks() > before);
    assert!(place.content("backup-1", 512 * MIB) == node.content("vol@one"));
}

/// Found by review: a rebuild writes the layers anew. A backup that one began and ended beside held a mixture, and counted
/// as complete.
#[test]
fn a_backup_that_a_rebuild_came_by_is_none() {
    let runtime = runtime();
    let setup = Setup { size: 512 * MIB, ..Setup::default() };
    let (node, place) = (Node::with(&runtime, setup), Place::new());
    node.write((0..256 * MIB / BLOCK).step_by(3), 1);
    node.snapshot("one");
    let request = BackupCreateRequest { concurrent_limit: 1, ..place.request("one", "backup-1") };
    node.store.set_rebuilding(VOLUME, true).unwrap();
    let refused = node.backup(request.clone()).unwrap_err();
    assert!(refused.message().contains("the replica is rebuilding"), "{refused}");
    node.store.set_rebuilding(VOLUME, false).unwrap();
    node.backup(request.clone()).unwrap();
    wait(|| (place.blocks() > 2).then_some(()));
    node.store.set_rebuilding(VOLUME, true).unwrap();
    node.store.set_rebuilding(VOLUME, false).unwrap();
    assert!(place.blocks() < 128, "it was through already");
    let status = node.backup_end("backup-1");
    assert_eq!(status.state, "error");
    assert!(status.error.contains("was rebuilt"), "{}", status.error);
    assert_eq!(place.store().backups(VOLUME).unwrap(), [""; 0]);
    node.backup(request).unwrap();
    assert_eq!(node.backup_end("backup-1").state, "complete");
}

/// A small file system, unmounted at the end; none without the right to mount.
pub struct Small(TempDir);

impl Small {
    pub fn new(size: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        match mount(Some("none"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(&*options)) {
            Ok(()) => Some(Self(dir)),
            Err(error) => {
                println!("skipped: no file system of its own for the test: {error}");
                None
            }
        }
    }
}

impl Small {
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        umount2(self.0.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn a_full_target_is_an_error_and_costs_no_other_backup() {
    let Some(small) = Small::new(12 * MIB) else { return };
    let runtime = runtime();
    let (node, other) = (Node::new(&runtime), Place::new());
    let url = format!("vfs://{}", small.path().display());
    let request = |snapshot: &str, backup: &str| BackupCreateRequest {
        backup_target: url.clone(),
        compression_method: "none".to_owned(),
        ..other.request(snapshot, backup)
    };
    node.write(0..100, 1);
    node.snapshot("one");
    node.backup(request("one", "backup-1")).unwrap();
    assert_eq!(node.backup_end("backup-1").state, "complete");
    node.write(0..8000, 2);
    node.snapshot("two");
    node.backup(request("two", "backup-2")).unwrap();
    let status = node.backup_end("backup-2");
    assert_eq!(status.state, "error");
    assert!(status.error.to_lowercase().contains("no space left on device"), "{}", status.error);
    assert!(status.progress < 100);
    let variable = |name: &str| alone().get(name).cloned();
    let store = BackupStore::open(&Url::parse(&url).unwrap(), &variable).unwrap();
    assert_eq!(store.backups(VOLUME).unwrap(), ["backup-1"]);
    let mut progress = |_, _| true;
    let work = &mut Work::new(&mut progress);
    assert_eq!(store.verify(VOLUME, "backup-1", true, work).unwrap().bad, []);
    // What it has written goes with the next deletion.
    assert!(store.remove(VOLUME, "backup-1", work).unwrap().blocks > 1);
}
