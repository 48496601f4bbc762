//! Backups in a repository: as `docs/repository.md` says.

mod cut;
mod golden;
mod hostile;
mod keys;
mod sweep;

use crate::support::*;
use dbs_backup::codec::Method;
use dbs_backup::objects::{Directory, Objects};
use dbs_backup::read::{Piece, Place, ReadOptions, Reader};
use dbs_backup::{
    BackupStore, Collected, CreateOptions, InitOptions, Onto, Retention, Secret, Source, Verified,
    Work,
};
use dbs_core::{ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// More than the grace time.
const LONG: Duration = Duration::from_secs(100_000);

/// A way to keep a repository.
fn ways() -> [Option<Secret>; 3] {
    [None, Some(passphrase()), Some(Secret::KeyFile([3; 32].into()))]
}

fn passphrase() -> Secret {
    Secret::Passphrase("correct horse".to_owned().into())
}

/// Makes a repository.
fn init(objects: &Arc<Memory>, secret: Option<&Secret>) {
    let options = InitOptions { secret: secret.cloned(), chunk_size: Some(BLOCK), cheap: true };
    store(objects).init(&options).unwrap();
}

fn try_open(objects: &Arc<Memory>, secret: Option<&Secret>) -> Result<BackupStore> {
    store(objects).with_repository(secret)
}

fn open(objects: &Arc<Memory>, secret: Option<&Secret>) -> BackupStore {
    let store = try_open(objects, secret).unwrap();
    assert!(store.is_repository());
    store
}

fn fresh(secret: Option<&Secret>) -> (Arc<Memory>, BackupStore) {
    let objects = Arc::new(Memory::default());
    init(&objects, secret);
    let store = open(&objects, secret);
    (objects, store)
}

fn collect(store: &BackupStore) -> Result<Collected> {
    store.collect(&mut Work::new(&mut |_, _| true)).map(Option::unwrap)
}

fn verify(store: &BackupStore, backup: &str, content: bool) -> Result<Verified> {
    store.verify(VOLUME, backup, content, &mut Work::new(&mut |_, _| true))
}

fn restored(store: &BackupStore, backup: &str, size: usize) -> Result<Vec<u8>> {
    let disk = Disk::new(vec![0; size]);
    restore(store, backup, &disk, Onto::Empty)?;
    Ok(disk.content())
}

fn check(store: &BackupStore, backup: &str, content: &[u8]) {
    assert!(restored(store, backup, content.len()).unwrap() == content, "{backup}");
    assert_eq!(verify(store, backup, true).unwrap().bad, []);
    assert_eq!(verify(store, backup, false).unwrap().bad, []);
}

fn packs(objects: &Memory) -> Vec<String> {
    let mut paths = objects.paths();
    paths.retain(|path| path.starts_with("dbs-repository/packs/"));
    paths
}

#[test]
fn full_and_incremental_in_every_way() {
    for secret in ways() {
        let (objects, store) = fresh(secret.as_ref());
        let mut volume = volume(1, 10);
        volume.push("two", 3 * BLOCK + 5, b"changed");
        volume.push("three", 4 * BLOCK, &[0; BLOCK as usize]);
        let names = [("backup-1", "one"), ("backup-2", "two"), ("backup-3", "three")];
        for (backup, snapshot) in names {
            let source = volume.get(snapshot);
            let created = create(&store, backup, &source).unwrap();
            let read = *source.read.lock().unwrap();
            if snapshot != "one" {
                assert!(created.base.is_some());
                assert_eq!(read, BLOCK + BLOCK / 2, "what changed, and the last block");
            }
            assert!(created.uploaded > 0, "{backup}");
        }
        // By another process, which knows nothing yet.
        let store = open(&objects, secret.as_ref());
        for (backup, snapshot) in names {
            check(&store, backup, volume.get(snapshot).content());
        }
        assert_eq!(store.volumes().unwrap(), [VOLUME]);
        assert_eq!(store.backups(VOLUME).unwrap(), ["backup-1", "backup-2", "backup-3"]);
        let config = store.volume(VOLUME).unwrap();
        let size = volume.get("one").content().len() as u64;
        assert_eq!((&*config.last_backup_name, config.size), ("backup-3", size));
        let third = store.backup(VOLUME, "backup-3").unwrap();
        assert_eq!(third.blocks.len(), 6, "a block that became zeros is left out");
        assert_eq!(third.volume_size(&config).unwrap(), size);
        // Onto something else, and on from one to another.
        let disk = Disk::new(vec![9; size as usize]);
        assert!(restore(&store, "backup-1", &disk, Onto::Anything).unwrap().downloaded > 0);
        assert_eq!(restore(&store, "backup-1", &disk, Onto::Anything).unwrap().downloaded, 0);
        restore(&store, "backup-3", &disk, Onto::Backup("backup-1")).unwrap();
        assert!(disk.content() == volume.get("three").content());

        let again = create(&store, "backup-3", &volume.get("three")).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Exists);
        assert!(remove(&store, "backup-1").unwrap().found);
        assert!(!remove(&store, "backup-1").unwrap().found);
        let gone = store.backup(VOLUME, "backup-1").unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::NotFound);
        check(&store, "backup-2", volume.get("two").content());
        remove_volume(&store, VOLUME).unwrap();
        assert_eq!(store.volumes().unwrap(), [""; 0]);
        assert_eq!(store.volume(VOLUME).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

/// Nothing of what a user has is in an encrypted repository, not even a name.
#[test]
fn what_is_encrypted_says_nothing() {
    let text = b"attack at dawn, and again at noon; attack at dawn, and again at noon";
    for secret in ways() {
        let (objects, store) = fresh(secret.as_ref());
        let mut volume = volume(2, 4);
        volume.push("two", 0, text);
        let options = CreateOptions { method: Method::None, ..options("backup-1", "two") };
        let source = volume.get("two");
        store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
        for words in [&text[..], VOLUME.as_bytes(), b"backup-1", b"\"two\""] {
            let shown = objects.paths().iter().any(|path| {
                let content = objects.content(path).unwrap();
                path.as_bytes().windows(words.len()).any(|part| part == words)
                    || content.windows(words.len()).any(|part| part == words)
            });
            assert_eq!(shown, secret.is_none(), "{}", String::from_utf8_lossy(words));
        }
        // Equal chunks of two repositories have nothing in common.
        let (others, other) = fresh(secret.as_ref());
        create(&other, "backup-1", &volume.get("two")).unwrap();
        assert!(packs(&objects).iter().all(|path| others.content(path).is_none()));
    }
}

#[test]
fn chunks_are_shared_by_volumes_and_stores() {
    let (objects, first) = fresh(None);
    let volume = volume(3, 6);
    create(&first, "backup-1", &volume.get("one")).unwrap();
    let before = packs(&objects).len();
    let again = open(&objects, None);
    let source = volume.get("one");
    let options = CreateOptions { volume: "other".to_owned(), ..options("backup-1", "one") };
    let created =
        again.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
    assert_eq!(
        (created.uploaded, packs(&objects).len()),
        (0, before),
        "a manifest, and nothing else"
    );
    assert_eq!(again.volumes().unwrap(), ["other", VOLUME]);
    // Each is whole without the other.
    remove_volume(&again, VOLUME).unwrap();
    objects.age_by(LONG);
    assert_eq!(collect(&again).unwrap().condemned, 0);
    let disk = Disk::new(vec![0; source.content().len()]);
    let restoration = again.restore("other", "backup-1").unwrap();
    restoration.run(&disk, Onto::Empty, &mut Work::new(&mut |_, _| true)).unwrap();
    assert!(disk.content() == source.content());
}

/// More chunks than one list has, and most of them zeros.
#[test]
fn long_volumes_have_several_lists() {
    let (objects, store) = fresh(None);
    let mut content = vec![0; 2500 * BLOCK as usize + 100];
    for index in [0, 1023, 1024, 2047, 2499, 2500] {
        content[index * BLOCK as usize + 7] = (index % 200) as u8 + 1;
    }
    let mut volume = Snapshots(vec![("one".to_owned(), content)]);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    volume.push("two", 2400 * BLOCK, b"x");
    let before = packs(&objects);
    create(&store, "backup-2", &volume.get("two")).unwrap();
    let new: Vec<_> = packs(&objects).into_iter().filter(|path| !before.contains(path)).collect();
    let lengths: Vec<_> = new.iter().map(|path| objects.content(path).unwrap().len()).collect();
    // One chunk, and of three lists the last one, which is the short one.
    assert_eq!(new.len(), 2);
    assert!(lengths.iter().all(|length| *length < (2501 - 2048) * 32 + 300), "{lengths:?}");
    let store = open(&objects, None);
    check(&store, "backup-1", volume.get("one").content());
    check(&store, "backup-2", volume.get("two").content());
}

#[test]
fn a_mount_reads_what_it_needs() {
    let secret = passphrase();
    let (objects, store) = fresh(Some(&secret));
    let volume = volume(5, 9);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let before = objects.paths();
    let reader = Reader::start(open(&objects, Some(&secret)), ReadOptions::default()).unwrap();
    let backup = reader.open(VOLUME, "backup-1").unwrap();
    let (content, place) = (volume.get("one").content(), Place::default());
    assert_eq!(backup.size(), content.len() as u64);
    let mut at = 0;
    while at < content.len() {
        let (piece, length) = match reader.read(&backup, &place, at as u64, 3000).unwrap() {
            Piece::Data(bytes, range) => (bytes[range.clone()].to_vec(), range.len()),
            Piece::Zeros(length) => (vec![0; length], length),
        };
        assert!(piece == content[at..at + length], "at {at}");
        at += length;
    }
    assert_eq!(objects.paths(), before, "nothing is written");
    // Deleted under the reader: what is gone is gone, and no damage.
    remove(&store, "backup-1").unwrap();
    packs(&objects).iter().for_each(|path| objects.set(path, None));
    let reader = Reader::start(open(&objects, Some(&secret)), ReadOptions::default()).unwrap();
    assert_eq!(reader.open(VOLUME, "backup-1").err().unwrap().kind(), ErrorKind::NotFound);
}

#[test]
fn a_retention_and_what_it_leaves() {
    let (objects, store) = fresh(None);
    let mut volume = volume(6, 5);
    volume.push("two", 0, &[7; 2 * BLOCK as usize]);
    for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two"), ("backup-3", "two")] {
        create(&store, backup, &volume.get(snapshot)).unwrap();
    }
    let retention = Retention { last: 1, ..Retention::default() };
    let mut judged = store.judge(VOLUME, &retention).unwrap();
    let kept = judged.iter().filter(|judged| !judged.kept_by.is_empty());
    assert_eq!(kept.map(|judged| &*judged.backup).collect::<Vec<_>>(), ["backup-3"]);
    let mut progress = |_, _| true;
    let removed =
        store.prune(VOLUME, &retention, &mut judged, &mut Work::new(&mut progress)).unwrap();
    assert!(removed.unwrap().found);
    assert_eq!(store.backups(VOLUME).unwrap(), ["backup-3"]);
    let before = packs(&objects).len() as u64;
    // Packs that were written lately may belong to a backup that is being made.
    let young = collect(&store).unwrap();
    assert_eq!((young.packs, young.condemned, young.removed), (before, 0, 0));
    objects.age_by(LONG);
    let first = collect(&store).unwrap();
    assert!(first.condemned > 0 && first.removed == 0 && first.next_seconds.is_some(), "{first:?}");
    let early = collect(&store).unwrap();
    assert_eq!((early.condemned, early.removed), (first.condemned, 0));
    objects.age_by(LONG);
    let second = collect(&store).unwrap();
    assert_eq!((second.removed, second.condemned, second.backups), (first.condemned, 0, 1));
    assert_eq!(second.removed_bytes, first.condemned_bytes);
    assert_eq!(packs(&objects).len() as u64, before - second.removed);
    check(&open(&objects, None), "backup-3", volume.get("two").content());
}

#[test]
fn what_is_refused() {
    let (objects, store) = fresh(None);
    let volume = volume(7, 2);
    let source = volume.get("one");
    let refused = |options: CreateOptions| {
        let error = store.create(&source, options).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    };
    refused(CreateOptions { method: Method::Gzip, ..options("backup-1", "one") });
    refused(CreateOptions { block_size: Some(2 * BLOCK), ..options("backup-1", "one") });
    refused(options(&format!("damaged-{}", "0".repeat(32)), "one"));
    let labels = [("k".to_owned(), "v".repeat(2 << 20))].into();
    refused(CreateOptions { labels, ..options("backup-1", "one") });
    assert_eq!(objects.paths(), ["dbs-repository/config"], "nothing was written");
    let again = store.init(&InitOptions::default()).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Exists);
    // Where there are backups in the other layout.
    let objects = Arc::new(Memory::default());
    let other = crate::support::store(&objects);
    create(&other, "backup-1", &source).unwrap();
    let hidden = other.init(&InitOptions::default()).unwrap_err();
    assert_eq!(hidden.kind(), ErrorKind::Exists);
    assert!(!try_open(&objects, None).unwrap().is_repository());
}

/// So much is written at once that packs are full.
struct Large {
    base: Vec<u8>,
    chunks: u64,
}

impl Source for Large {
    fn size(&self) -> u64 {
        self.chunks << 20
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        for (index, part) in buf.chunks_mut(1 << 20).enumerate() {
            part.copy_from_slice(&self.base[..part.len()]);
            let number = (offset >> 20) + index as u64;
            part[..8].copy_from_slice(&number.to_le_bytes());
        }
        Ok(())
    }

    fn ranges(
        &self,
        base: Option<&dbs_backup::config::BackupConfig>,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<bool> {
        found(0..self.size())?;
        Ok(base.is_none())
    }
}

/// Users pay for each request: a full backup of 128 MiB writes a tenth of the objects that Longhorn's layout has, and one
/// of 1 GiB a fourteenth.
#[test]
fn few_objects_are_written() {
    let mut base = vec![0; 1 << 20];
    fastrand::Rng::with_seed(9).fill(&mut base);
    let source = Large { base, chunks: 128 };
    let mut written = Vec::new();
    for is_repository in [false, true] {
        let objects = Arc::new(Memory::default());
        let puts: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
        let store = store(&objects);
        let store = if is_repository {
            store.init(&InitOptions::default()).unwrap();
            store.with_repository(None).unwrap()
        } else {
            store
        };
        let noted = Arc::clone(&puts);
        objects.at_put(move |path, _| noted.lock().unwrap().push(path.to_owned()));
        let options = CreateOptions { block_size: None, ..options("backup-1", "one") };
        let created = store.create(&source, options).unwrap();
        let created = created.run(&mut Work::new(&mut |_, _| true)).unwrap();
        assert_eq!((created.size, created.read), (128 << 20, 128 << 20));
        written.push(puts.lock().unwrap().clone());
    }
    let counts = |part: &str| written[1].iter().filter(|path| path.contains(part)).count();
    // Four packs of chunks, and one of lists.
    assert_eq!([counts("/packs/"), counts("/index/"), counts("/manifests/")], [5, 1, 1]);
    assert_eq!(written[1].len(), 7);
    assert_eq!(written[0].iter().filter(|path| path.ends_with(".blk")).count(), 64);
}

/// The same as files.
#[test]
fn in_a_directory() {
    let root = tempfile::tempdir().unwrap();
    let objects: Arc<dyn Objects> = Arc::new(Directory::open(root.path()).unwrap());
    let store = BackupStore::on(&url(), Arc::clone(&objects));
    let options = InitOptions { chunk_size: Some(BLOCK), cheap: true, secret: Some(passphrase()) };
    store.init(&options).unwrap();
    let store = store.with_repository(Some(&passphrase())).unwrap();
    let volume = volume(8, 7);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    check(&store, "backup-1", volume.get("one").content());
    remove(&store, "backup-1").unwrap();
    let old = std::time::SystemTime::now() - LONG;
    let age = || {
        objects
            .walk("dbs-repository", &mut |path, _| {
                let path = root.path().join("dbs-repository").join(path);
                let file = std::fs::File::options().write(true).open(path).unwrap();
                file.set_modified(old).unwrap();
                Ok(())
            })
            .unwrap();
    };
    // What a killed writer has left.
    std::fs::write(root.path().join("dbs-repository/packs/aa.tmp.1"), b"x").unwrap();
    age();
    assert!(collect(&store).unwrap().condemned > 0);
    age();
    assert!(collect(&store).unwrap().removed > 0);
    let mut left = Vec::new();
    objects
        .walk("dbs-repository", &mut |path, _| {
            left.push(path.split('/').next().unwrap().to_owned());
            Ok(())
        })
        .unwrap();
    left.sort();
    assert_eq!(left, ["config", "keys"]);
}

fn read_start(reader: &Reader, backup: &str) -> Result<Vec<u8>> {
    let backup = reader.open(VOLUME, backup)?;
    match reader.read(&backup, &Place::default(), 0, BLOCK as usize)? {
        Piece::Data(bytes, range) => Ok(bytes[range].to_vec()),
        Piece::Zeros(length) => Ok(vec![0; length]),
    }
}

/// Found by review: what a mount knows of a repository gets old.
#[test]
fn a_mount_sees_what_changes() {
    let mut volume = volume(25, 4);
    let (objects, store) = fresh(None);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let reader = Reader::start(open(&objects, None), ReadOptions::default()).unwrap();
    reader.open(VOLUME, "backup-1").unwrap();
    // A backup that is made right after.
    volume.push("two", 0, &[7; BLOCK as usize]);
    create(&open(&objects, None), "backup-2", &volume.get("two")).unwrap();
    assert_eq!(read_start(&reader, "backup-2").unwrap(), [7; BLOCK as usize]);
    // Packs whose content is in new ones, as after damage was mended.
    let old = packs(&objects);
    let source = volume.get("two");
    let reader = Reader::start(open(&objects, None), ReadOptions::default()).unwrap();
    let first = reader.open(VOLUME, "backup-1").unwrap();
    for snapshot in ["one", "two"] {
        let options =
            CreateOptions { full: true, ..options(&format!("full-{snapshot}"), snapshot) };
        let source = volume.get(snapshot);
        open(&objects, None)
            .create(&source, options)
            .unwrap()
            .run(&mut Work::new(&mut |_, _| true))
            .unwrap();
    }
    old.iter().for_each(|path| objects.set(path, None));
    let piece = reader.read(&first, &Place::default(), 2 * BLOCK, BLOCK as usize).unwrap();
    let Piece::Data(bytes, range) = piece else { panic!("zeros") };
    assert!(bytes[range] == source.content()[2 * BLOCK as usize..3 * BLOCK as usize]);
}

/// Found by review: an error of the store ends what it ended, and not all that comes after it.
#[test]
fn a_mount_survives_errors() {
    let volume = volume(26, 4);
    for call in 0.. {
        let (objects, store) = fresh(None);
        create(&store, "backup-1", &volume.get("one")).unwrap();
        let reader = Reader::start(open(&objects, None), ReadOptions::default()).unwrap();
        let before = objects.calls();
        objects.set_fault(Some((call, Fault::Fail)));
        let outcome = read_start(&reader, "backup-1");
        let calls = objects.calls() - before;
        objects.set_fault(None);
        let content = &volume.get("one").content()[..BLOCK as usize];
        assert!(read_start(&reader, "backup-1").unwrap() == content, "{call}");
        if calls <= call {
            assert!(outcome.unwrap() == content && call > 4);
            break;
        }
    }
}

/// Found by review: the second of two would have replaced the config of the first, and with it the key.
#[test]
fn one_of_two_makes_it() {
    for put in 0..2 {
        let objects = Arc::new(Memory::default());
        let made: Arc<std::sync::Mutex<Option<Vec<u8>>>> = Arc::default();
        let (count, other, noted) =
            (std::sync::Mutex::new(0), Arc::clone(&objects), Arc::clone(&made));
        objects.at_put(move |_, _| {
            let mut count = count.lock().unwrap();
            *count += 1;
            if *count == put + 1 && store(&other).init(&InitOptions::default()).is_ok() {
                *noted.lock().unwrap() = other.content("dbs-repository/config");
            }
        });
        let first = store(&objects).init(&InitOptions::default());
        objects.at_put(|_, _| {});
        let second = made.lock().unwrap().take();
        assert!(first.is_err() || second.is_none(), "put {put}");
        if let Some(second) = second {
            assert_eq!(objects.content("dbs-repository/config").unwrap(), second);
        }
        // A later one makes it, if none did.
        let is_there = objects.content("dbs-repository/config").is_some();
        let again = store(&objects).init(&InitOptions::default());
        assert_eq!(again.is_ok(), !is_there, "put {put}");
    }
}
