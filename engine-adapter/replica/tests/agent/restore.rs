//! Restores of backups to replicas: what becomes of the volume, whenever they end.

use crate::backup::{Place, Small, alone, volume_path};
use crate::support::*;
use longhorn_replica::replica::Disk;
use longhorn_replica::replica::User;
use longhorn_wire::proto::ptypes::*;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};
use tonic::Code;

const DISK: &str = "volume-snap-restored.img";
/// Blocks of a volume in one of a backup.
const PER_PART: u64 = 2 * MIB / BLOCK;

impl Node {
    fn restore_to(&self, place: &Place, backup: &str, disk: &str) -> Outcome<()> {
        let request = BackupRestoreRequest {
            backup: place.backup_url(backup),
            snapshot_disk_name: disk.to_owned(),
            credential: alone(),
            concurrent_limit: 2,
        };
        self.call(|mut c| async move { c.backup_restore(request).await })
    }

    pub fn restore(&self, place: &Place, backup: &str) -> Outcome<()> {
        self.restore_to(place, backup, DISK)
    }

    fn restore_status(&self) -> RestoreStatusResponse {
        self.call(|mut c| async move { c.restore_status(()).await }).unwrap()
    }

    fn restore_end(&self) -> RestoreStatusResponse {
        wait(|| Some(self.restore_status()).filter(|status| !status.is_restoring))
    }

    /// Restores, to the end.
    pub fn restored(&self, place: &Place, backup: &str) {
        self.restore(place, backup).unwrap();
        let status = self.restore_end();
        let expected = RestoreStatusResponse {
            is_restoring: false,
            last_restored: backup.to_owned(),
            progress: 100,
            error: String::new(),
            dest_file_name: DISK.to_owned(),
            state: "complete".to_owned(),
            backup_url: place.backup_url(backup),
            current_restoring_backup: String::new(),
        };
        assert_eq!(status, expected);
        self.is_in_order();
    }

    /// The volume is a head on one restored snapshot, of which nothing else is known.
    fn is_in_order(&self) {
        let disks = self.replica.disks().unwrap();
        let head = self.replica.head_disk().unwrap();
        assert_eq!(disks.keys().map(String::as_str).collect::<Vec<_>>(), [&head, DISK]);
        assert_eq!(disks[&head].parent, DISK);
        let Disk { parent, removed, user_created, created, labels, .. } = &disks[DISK];
        assert_eq!((parent.as_str(), created.as_str()), ("", ""));
        assert!(!removed && !user_created && labels.is_empty());
        assert_eq!(self.markers(), [""; 0]);
        assert_eq!(self.store.check().unwrap().findings, []);
    }

    /// The files of restores in the directory.
    fn markers(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut found: Vec<_> = names
            .filter(|name| name.starts_with("volume-snap-") || name.starts_with("volume-delta-"))
            .collect();
        found.sort();
        found
    }

    fn reset(&self) -> Outcome<()> {
        self.call(|mut c| async move { c.reset(()).await })
    }
}

/// A volume with four backups, and what each holds.
fn backups(source: &Node, place: &Place) -> Vec<Vec<u8>> {
    let mut contents = Vec::new();
    let mut back_up = |number: usize| {
        source.snapshot(&format!("s{number}"));
        source.backed_up(place, &format!("s{number}"), &format!("backup-{number}"));
        contents.push(source.content(&format!("vol@s{number}")));
    };
    source.write(0..1000, 1);
    source.write([20 * PER_PART + 7], 1);
    back_up(0);
    source.write(500..600, 2);
    source.write([30 * PER_PART, 31 * PER_PART], 2);
    back_up(1);
    // A part that goes as a whole, and one that becomes partly zeros.
    source.discard(20 * PER_PART, PER_PART);
    source.discard(100, 100);
    back_up(2);
    source.write([5], 4);
    back_up(3);
    contents
}

#[test]
fn a_volume_becomes_what_backups_hold() {
    let runtime = runtime();
    let (source, node, place) = (Node::new(&runtime), Node::new(&runtime), Place::new());
    let contents = backups(&source, &place);
    assert_eq!(node.restore_status(), RestoreStatusResponse::default());
    for (number, content) in contents.iter().enumerate() {
        if let Some(before) = number.checked_sub(1) {
            // It is the differences that are to be restored.
            let delta = node.dir.path().join(format!("volume-delta-backup-{before}.img"));
            std::fs::create_dir(&delta).unwrap();
            let refused = node.restore(&place, &format!("backup-{number}")).unwrap_err();
            assert!(refused.message().contains("volume-delta-backup"), "{refused}");
            std::fs::remove_dir(&delta).unwrap();
        }
        node.restored(&place, &format!("backup-{number}"));
        assert!(node.content(VOLUME) == *content, "backup {number}");
        assert!(node.content("vol@restored") == *content, "backup {number}");
    }
    let again = node.restore(&place, "backup-3").unwrap_err();
    assert_eq!(
        (again.code(), again.message()),
        (Code::Unknown, "error starting backup restore: already restored backup backup-3")
    );
    assert_eq!(node.restore_status().last_restored, "backup-3");
    // Backwards, too.
    node.restored(&place, "backup-1");
    assert!(node.content(VOLUME) == contents[1]);
    // Nothing is left to be merged for long, and the replica goes on as any.
    node.write([77], 9);
    node.snapshot("user");
    assert_eq!(node.snapshots(), ["restored", "user"]);
}

/// What upstream does with a backup that is gone meanwhile: the next one is restored whole.
#[test]
fn without_the_last_backup_the_next_one_is_restored_whole() {
    let runtime = runtime();
    let (source, node, place) = (Node::new(&runtime), Node::new(&runtime), Place::new());
    let contents = backups(&source, &place);
    node.restored(&place, "backup-0");
    let mut progress = |_, _| true;
    let work = &mut dbs_backup::Work::new(&mut progress);
    place.store().remove(VOLUME, "backup-0", work).unwrap();
    node.restored(&place, "backup-2");
    assert!(node.content(VOLUME) == contents[2]);
    // The same if the head is on something else.
    node.snapshot("other");
    node.restore(&place, "backup-3").unwrap();
    let status = node.restore_end();
    assert_eq!((status.state.as_str(), status.error.as_str()), ("complete", ""));
    assert!(node.content(VOLUME) == contents[3]);
    assert!(node.content("vol@other") == contents[2]);
}

/// Differences are restored only to a volume that holds just what they are the differences to.
#[test]
fn a_volume_that_is_not_what_was_restored_last_is_restored_whole() {
    let runtime = runtime();
    let (source, place) = (Node::new(&runtime), Place::new());
    let contents = backups(&source, &place);
    // Backups of the same names, of something else: their differences are few.
    let (stranger, others) = (Node::new(&runtime), Place::new());
    stranger.write(0..2000, 5);
    stranger.snapshot("s0");
    stranger.backed_up(&others, "s0", "backup-0");
    stranger.write([7], 6);
    stranger.snapshot("s1");
    stranger.backed_up(&others, "s1", "backup-1");
    let strange = stranger.content("vol@s1");
    let whole = |what: &str, from: &Place, expected: &[u8], change: &dyn Fn(&Node)| {
        let node = Node::new(&runtime);
        node.restored(&place, "backup-0");
        change(&node);
        node.restore(from, "backup-1").unwrap();
        assert_eq!(node.restore_end().state, "complete", "{what}");
        assert!(node.content(VOLUME) == *expected, "{what}");
        assert!(node.content("vol@restored") == *expected, "{what}");
    };
    let same = |what: &str, change: &dyn Fn(&Node)| whole(what, &place, &contents[1], change);
    same("written", &|node| node.write([3], 9));
    same("discarded", &|node| node.discard(0, 50));
    same("zeroed above a part that stays", &|node| node.discard(20 * PER_PART + 7, 1));
    same("rebuilt", &|node| {
        node.replica.set_rebuilding(true).unwrap();
        let layer = node.replica.incoming().begin(DISK, 64 * MIB).unwrap();
        layer.write_at(20 * PER_PART * BLOCK, &[7; 4096]).unwrap();
        drop(layer);
        node.replica.set_rebuilding(false).unwrap();
    });
    same("another snapshot of that name", &|node| {
        node.snapshot("above");
        node.replica.remove(DISK, false).unwrap();
        node.write([20 * PER_PART], 4);
        node.snapshot("restored");
        node.replica.remove("volume-snap-above.img", false).unwrap();
    });
    whole("another backup store", &others, &strange, &|_| {});
    // A backup that has the name of one that was deleted.
    whole("made again", &place, &contents[1], &|_| {
        let mut progress = |_, _| true;
        let work = &mut dbs_backup::Work::new(&mut progress);
        place.store().remove(VOLUME, "backup-0", work).unwrap();
        stranger.backed_up(&place, "s1", "backup-0");
    });
}

/// A head with data is discarded, as by a revert.
#[test]
fn a_used_volume_becomes_what_a_backup_holds() {
    let runtime = runtime();
    let (source, place) = (Node::new(&runtime), Place::new());
    let contents = backups(&source, &place);
    let setup = Setup { size: 96 * MIB, ..Setup::default() };
    let node = Node::with(&runtime, setup);
    node.write((0..96 * MIB / BLOCK).step_by(50), 8);
    node.restored(&place, "backup-1");
    let content = node.content(VOLUME);
    assert!(content[..64 << 20] == contents[1] && content[64 << 20..].iter().all(|b| *b == 0));
    // After a restart nobody knows what was restored last: the next restore is a whole one, onto the same snapshot.
    node.reset().unwrap();
    assert_eq!(node.restore_status(), RestoreStatusResponse::default());
    node.write([9], 9);
    node.restored(&place, "backup-2");
    assert!(node.content(VOLUME)[..64 << 20] == contents[2]);
}

#[test]
fn what_cannot_be_restored_is_refused_and_changes_nothing() {
    let runtime = runtime();
    let (source, node, place) = (Node::new(&runtime), Node::new(&runtime), Place::new());
    let contents = backups(&source, &place);
    let refused = |request: BackupRestoreRequest| {
        let before = node.restore_status();
        let status = node.call(|mut c| async move { c.backup_restore(request).await }).unwrap_err();
        assert_eq!((status.code(), node.restore_status()), (Code::Unknown, before));
        status.message().to_owned()
    };
    let request = |backup: &str| BackupRestoreRequest {
        backup: place.backup_url(backup),
        snapshot_disk_name: DISK.to_owned(),
        credential: alone(),
        concurrent_limit: 1,
    };
    let text = refused(BackupRestoreRequest { backup: String::new(), ..request("x1") });
    assert_eq!(text, "empty backup URL for the restore");
    let text = refused(BackupRestoreRequest { snapshot_disk_name: String::new(), ..request("x1") });
    assert_eq!(text, "empty snapshot disk name for the restore");
    let full = "error starting backup restore: error initiating full backup restore: ";
    let text = refused(request("backup-9"));
    assert!(text.starts_with(full) && text.contains("cannot find"), "{text}");
    let url = format!("{}?backup=backup-0&volume=other", place.url());
    let text = refused(BackupRestoreRequest { backup: url, ..request("x1") });
    assert!(text.contains("Source volume doesn't exist in backupstore"), "{text}");
    // Nothing is removed by a name that is none: the store is in this directory.
    for disk in [
        "volume-head-000.img",
        "x",
        "..",
        "volume.dbs",
        "volume.meta",
        "volume-snap-../x.img",
        "volume-snap-.incoming-x.img",
    ] {
        let mut request = request("backup-0");
        request.snapshot_disk_name = disk.to_owned();
        assert!(refused(request).starts_with(full), "{disk}");
    }
    assert!(["volume.dbs", "volume.meta"].iter().all(|name| node.dir.path().join(name).is_file()));
    // Nor what is not ours.
    let other = node.dir.path().join(DISK);
    std::fs::write(&other, b"somebody's").unwrap();
    assert!(refused(request("backup-0")).ends_with("it is not an empty file: move it away"));
    assert_eq!(std::fs::read(&other).unwrap(), b"somebody's");
    std::fs::remove_file(&other).unwrap();
    std::os::unix::fs::symlink(node.dir.path().join("volume.meta"), &other).unwrap();
    assert!(refused(request("backup-0")).ends_with("it is not an empty file: move it away"));
    std::fs::remove_file(&other).unwrap();
    // Somebody deletes backups.
    let locks = place.path().join("backupstore/volumes").join(volume_path(&place)).join("locks");
    std::fs::create_dir_all(&locks).unwrap();
    let lock = r#"{"Name":"lock_delete","Type":2,"Acquired":true}"#;
    std::fs::write(locks.join("lock_delete.lck"), lock).unwrap();
    let text = refused(request("backup-0"));
    assert!(text.starts_with(&format!("{full}failed lock")), "{text}");
    assert!(
        text.contains("when performing backup create/restore, please try again later"),
        "{text}"
    );
    let locked = source.backup(place.request("s3", "backup-9")).unwrap_err();
    assert!(
        locked.message().starts_with("failed to acquire lock backupstore/volumes/"),
        "{locked}"
    );
    assert_eq!(source.backup_status("backup-9").unwrap().state, "error");
    std::fs::remove_dir_all(&locks).unwrap();
    // What refuses the file refuses the restore.
    let permissions = |mode| {
        std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let immutable = |set: &str| {
        let mut command = std::process::Command::new("chattr");
        command.arg(set).arg(node.dir.path()).output().is_ok_and(|output| output.status.success())
    };
    if immutable("+i") {
        let text = refused(request("backup-0"));
        immutable("-i");
        assert_eq!(text, format!("{full}open {DISK}: operation not permitted"));
    } else {
        println!("skipped: no file attributes for the test's directory");
    }
    permissions(0o700);
    assert_eq!(node.markers(), [""; 0]);
    node.restored(&place, "backup-0");
    let delta = node.dir.path().join("volume-delta-backup-0.img");
    std::fs::create_dir_all(delta.join("x")).unwrap();
    let text = refused(request("backup-1"));
    assert_eq!(
        text,
        "error starting backup restore: error initiating incremental backup restore: failed to clean up the existing \
         file volume-delta-backup-0.img before incremental restore: remove volume-delta-backup-0.img: it is not an empty \
         file: move it away"
    );
    std::fs::remove_dir_all(&delta).unwrap();
    assert!(node.content(VOLUME) == contents[0]);
    node.restored(&place, "backup-1");
    assert!(node.content(VOLUME) == contents[1]);

    let small = Node::with(&runtime, Setup { size: 32 * MIB, ..Setup::default() });
    let status = small.restore(&place, "backup-0").unwrap_err();
    assert!(status.message().contains("has 67108864 bytes, and this one 33554432"), "{status}");
    assert_eq!(small.markers(), [""; 0]);
    // Neither while it is rebuilt nor, by a purge, while it is restored.
    small.replica.set_rebuilding(true).unwrap();
    let status = small.restore(&place, "backup-0").unwrap_err();
    let text = "error starting backup restore: cannot do restore for normal rebuilding replica";
    assert_eq!(status.message(), text);
}

/// Until it is complete, the volume is what it was: a standby volume can be used whatever became of the last restore.
#[test]
fn a_restore_that_fails_leaves_what_was_there() {
    let runtime = runtime();
    let (source, node, place) = (Node::new(&runtime), Node::new(&runtime), Place::new());
    let contents = backups(&source, &place);
    node.restored(&place, "backup-0");
    let blocks = |from: &str, to: &str| {
        let rename =
            "find \"$0\" -name \"*.$1\" | while read f; do mv \"$f\" \"${f%.$1}.$2\"; done";
        let mut command = std::process::Command::new("sh");
        let path = place.path().to_owned();
        assert!(
            command.args(["-c", rename]).arg(path).args([from, to]).status().unwrap().success()
        );
    };
    blocks("blk", "gone");
    node.restore(&place, "backup-1").unwrap();
    let status = node.restore_end();
    assert_eq!((status.state.as_str(), status.progress), ("error", 0));
    assert!(status.error.contains("no such file or directory"), "{}", status.error);
    assert_eq!(status.last_restored, "backup-0");
    assert_eq!((status.current_restoring_backup.as_str(), status.is_restoring), ("", false));
    // As upstream's file, by which one sees what has failed.
    assert_eq!(node.markers(), ["volume-delta-backup-0.img"]);
    assert!(node.content(VOLUME) == contents[0]);
    assert_eq!(node.snapshots(), ["restored"]);
    let status = node.restore(&place, "backup-2").unwrap_err();
    let text =
        "error starting backup restore: cannot start backup restore of the previous restore fails";
    assert_eq!(status.message(), text);
    node.reset().unwrap();
    blocks("gone", "blk");
    node.restored(&place, "backup-2");
    assert!(node.content(VOLUME) == contents[2]);
}

#[test]
fn a_restore_without_room_leaves_what_was_there() {
    let Some(small) = Small::new(24 * MIB) else { return };
    let runtime = runtime();
    let (source, place) = (Node::new(&runtime), Place::new());
    source.write(0..8000, 1);
    source.snapshot("s0");
    source.backed_up(&place, "s0", "backup-0");
    let dir = tempfile::tempdir_in(small.path()).unwrap();
    let node = Node::on(&runtime, std::sync::Arc::new(dir), Setup::default());
    node.write([3], 7);
    let before = node.content(VOLUME);
    node.restore(&place, "backup-0").unwrap();
    let status = node.restore_end();
    assert_eq!(status.state, "error");
    assert!(status.error.to_lowercase().contains("no space left"), "{}", status.error);
    assert!(node.content(VOLUME) == before);
    assert_eq!(node.snapshots(), [""; 0]);
    drop(node.end());
}

/// The end of the process, or of its ownership of the store, ends a restore; a new process finds the volume as it was,
/// and restores it.
#[test]
fn a_restore_ends_with_the_replica_and_is_made_again() {
    let runtime = runtime();
    let setup = Setup { size: 512 * MIB, ..Setup::default() };
    let (source, place) = (Node::with(&runtime, setup.clone()), Place::new());
    source.write(0..100, 1);
    source.snapshot("s0");
    source.backed_up(&place, "s0", "backup-0");
    let first = source.content("vol@s0");
    source.write((0..384 * MIB / BLOCK).step_by(2), 2);
    source.snapshot("s1");
    source.backed_up(&place, "s1", "backup-1");
    let second = source.content("vol@s1");
    drop(source);
    let node = Node::with(&runtime, setup.clone());
    node.restored(&place, "backup-0");
    node.restore(&place, "backup-1").unwrap();
    let other = node.restore(&place, "backup-1").unwrap_err();
    let text = "error starting backup restore: cannot initiate backup restore as there is one already in progress";
    assert_eq!(other.message(), text);
    let reset = node.reset().unwrap_err();
    assert_eq!(reset.message(), "replica is currently restoring, cannot reset");
    let purge = node.purge().unwrap_err();
    assert!(purge.message().contains("restoring"), "{purge}");
    User::let_go(&*node.agent, Instant::now() + Duration::from_secs(2));
    let status = node.restore_status();
    assert_eq!(status.state, "error");
    assert_eq!(status.error, "the replica was stopped, or gave up its store");
    assert!(node.content(VOLUME) == first);
    // Cut off without a word: what the store has of it goes when the replica is started again.
    node.reset().unwrap();
    let incoming = node.replica.incoming();
    let layer = incoming.begin_restore(DISK).unwrap();
    layer.write_at(0, &[1; 4096]).unwrap();
    drop(layer);
    node.store.flush().unwrap();
    let node = Node::on(&runtime, node.end(), setup);
    assert!(node.content(VOLUME) == first);
    assert_eq!(node.snapshots(), ["restored"]);
    let layers = node.store.layers(VOLUME).unwrap();
    assert_eq!(layers.len(), 2, "{layers:?}");
    assert_eq!(node.restore_status(), RestoreStatusResponse::default());
    node.restored(&place, "backup-1");
    assert!(node.content(VOLUME) == second);
}

/// Cut off between the step that counts and the names that follow.
#[test]
fn a_restored_snapshot_gets_its_name_when_the_replica_starts_again() {
    let runtime = runtime();
    for (onto, marked) in [(true, true), (false, true), (true, false)] {
        let (source, node, place) = (Node::new(&runtime), Node::new(&runtime), Place::new());
        let contents = backups(&source, &place);
        node.restored(&place, "backup-0");
        let incoming = node.replica.incoming();
        let layer = incoming.begin_restore(DISK).unwrap();
        layer.write_at(0, &contents[1][..4096]).unwrap();
        drop(layer);
        // Somebody reads the old snapshot, which keeps it from being deleted, but not from losing its name.
        let reader = node.store.volume("vol@restored").unwrap();
        let ended = incoming.end_restore(DISK, onto);
        assert!(ended.is_err_and(|e| e.to_string().contains("open")), "nobody reads it");
        assert_eq!(node.snapshots(), ["restored"]);
        assert!(node.store.volume_info(VOLUME).unwrap().rebuilding, "it is not over");
        incoming.give_up_restore().unwrap();
        let shown = node.content(VOLUME);
        drop(reader);
        let node = Node::on(&runtime, node.end(), Setup::default());
        assert!(node.content(VOLUME) == shown);
        // As a process would have left it that was killed before.
        node.store.rename_snapshot(VOLUME, "restored", ".incoming-restored").unwrap();
        node.store.set_rebuilding(VOLUME, marked).unwrap();
        let node = Node::on(&runtime, node.end(), Setup::default());
        assert!(node.content(VOLUME) == shown);
        node.is_in_order();
        node.restored(&place, "backup-2");
        assert!(node.content(VOLUME) == contents[2]);
    }
}
