//! Whole backup stores of which parts are hostile, and everything that is done with one.

use super::{Edits, Parts};
use crate::blocks::Target;
use crate::codec::Method;
use crate::names::{self, BlockName};
use crate::objects::{Allowed, Found, Objects, Stat, missing, too_long};
use crate::pool::Work;
use crate::prune::Retention;
use crate::read::{Piece, Place, ReadOptions, Reader};
use crate::restore::Onto;
use crate::store::BackupStore;
use crate::url::Url;
use dbs_core::Result;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Bytes of a block in Longhorn's layout, and of what a backup is restored to.
const BLOCK: usize = 8192;
const DISK: u64 = 8 * BLOCK as u64;
/// What is looked at of what claims to be very much.
const MOST: usize = 4;

/// A store in Longhorn's layout: a volume with two backups, which share a block.
pub(super) fn longhorn(edits: &Edits<'_>) -> Parts {
    let blocks = [vec![1; BLOCK], (0..BLOCK).map(|at| (at % 251) as u8).collect::<Vec<_>>()];
    let [first, second] = [0, 1].map(|at| BlockName::of(&blocks[at]));
    let volume = format!(
        r#"{{"Name":"v1","Size":"{DISK}","CreatedTime":"2026-11-25T11:00:00Z","LastBackupName":"b2","BlockCount":"2","CompressionMethod":"\"lz4\""}}"#
    );
    let backup = |name: &str, listed: &[(usize, BlockName)]| {
        let size = listed.len() * BLOCK;
        let listed: Vec<_> = listed
            .iter()
            .map(|(at, name)| format!(r#"{{"Offset":{},"BlockChecksum":"{name}"}}"#, at * BLOCK))
            .collect();
        format!(
            r#"{{"Name":"{name}","VolumeName":"v1","SnapshotName":"s1","CreatedTime":"2026-11-25T11:00:01Z","Size":"{size}","Labels":{{"dbs-volume-size":"{DISK}"}},"Parameters":{{"backup-block-size":"{BLOCK}"}},"CompressionMethod":"lz4","Blocks":[{}]}}"#,
            listed.join(",")
        )
    };
    let packed = |method: Method, block: &[u8]| method.compress(block).map(|c| c.into_owned());
    let parts = [
        (names::volume_config("v1"), volume.into_bytes()),
        (names::backup_config("v1", "b1"), backup("b1", &[(0, first), (3, second)]).into_bytes()),
        (names::backup_config("v1", "b2"), backup("b2", &[(1, second)]).into_bytes()),
        (names::block("v1", first), packed(Method::Lz4, &blocks[0]).unwrap_or_default()),
        (names::block("v1", second), packed(Method::Gzip, &blocks[1]).unwrap_or_default()),
    ];
    let edit = |(number, (path, content))| (path, edits.applied(number as u8, content));
    parts.into_iter().enumerate().map(edit).collect()
}

/// Does everything with it. Whatever comes of it, what is restored or read is what its name says. Returns how many restores
/// succeeded.
pub(super) fn exercise(parts: Parts, is_repository: bool) -> usize {
    let objects: Arc<dyn Objects> = Arc::new(Memory::new(parts));
    let Ok(url) = Url::parse("vfs:///x") else { return 0 };
    let open = || {
        let store = BackupStore::on(&url, Arc::clone(&objects)).without_waiting();
        if is_repository { store.with_repository(None).ok() } else { Some(store) }
    };
    let (Some(store), Some(reading)) = (open(), open()) else { return 0 };
    let options = ReadOptions { cache: 1 << 20, parallel: 1, lock: false, patience: None };
    let Ok(reader) = Reader::start(reading, options) else { return 0 };
    let mut restored = 0;
    let volumes = store.volumes().unwrap_or_default();
    let _ = store.volume_infos();
    for volume in volumes.iter().take(MOST) {
        let _ = (store.volume(volume), store.volume_info(volume), store.backup_infos(volume));
        let _ = store.judge(volume, &Retention { last: 1, ..Retention::default() });
        let backups = store.backups(volume).unwrap_or_default();
        for backup in backups.iter().take(MOST) {
            let _ = store.backup_info(volume, backup);
            for content in [false, true] {
                let _ = store.verify(volume, backup, content, &mut work(&mut |_, _| true));
            }
            restored += restore(&store, volume, backup);
            read(&reader, volume, backup);
        }
        let held = backups.first().and_then(|one| store.hold(volume, one, "nobody").ok());
        let _ = store.collect(&mut work(&mut |_, _| true));
        if let Some(held) = held {
            let _ = store.let_go(volume, &held, &mut work(&mut |_, _| true));
        }
        if let Some(last) = backups.last() {
            let _ = store.remove(volume, last, &mut work(&mut |_, _| true));
        }
        let _ = store.remove_volume(volume, &mut work(&mut |_, _| true));
    }
    restored
}

fn work(progress: &mut dyn FnMut(u64, u64) -> bool) -> Work<'_> {
    Work { workers: 1, ..Work::new(progress) }
}

fn restore(store: &BackupStore, volume: &str, backup: &str) -> usize {
    let mut restored = 0;
    for onto in [Onto::Empty, Onto::Anything] {
        let Ok(restoration) = store.restore(volume, backup) else { break };
        let before = if onto == Onto::Empty { 0 } else { 5 };
        let disk = Disk(Mutex::new(vec![before; DISK as usize]));
        if restoration.run(&disk, onto, &mut work(&mut |_, _| true)).is_err() {
            continue;
        }
        let facts = restoration.backup();
        let size = facts.block_size().unwrap_or_default() as usize;
        let mut content = disk.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        content.resize(content.len() + size, 0);
        for block in &facts.blocks {
            let at = block.offset as usize;
            let name = store.name_of(&content[at..at + size]);
            assert_eq!(name, block.name, "{backup} of {volume} at {at}");
            content[at..at + size].fill(0);
        }
        assert!(content.iter().all(|byte| *byte == 0), "{backup} of {volume}: what no block has");
        restored += 1;
    }
    restored
}

fn read(reader: &Reader, volume: &str, backup: &str) {
    let Ok(open) = reader.open(volume, backup) else { return };
    let (place, mut at) = (Place::default(), 0);
    while at < open.size().min(DISK) {
        match reader.read(&open, &place, at, BLOCK) {
            Ok(Piece::Data(content, range)) => {
                assert!(!range.is_empty() && range.end <= content.len());
                at += range.len() as u64;
            }
            Ok(Piece::Zeros(count)) => {
                assert!(count > 0);
                at += count as u64;
            }
            Err(_) => at += BLOCK as u64,
        }
    }
}

/// A volume in memory.
struct Disk(Mutex<Vec<u8>>);

impl Disk {
    fn content(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target for Disk {
    fn size(&self) -> u64 {
        DISK
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.copy_from_slice(&self.content()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.content()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.content()[offset as usize..][..length as usize].fill(0);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

/// Objects in memory.
struct Memory(Mutex<BTreeMap<String, Vec<u8>>>);

impl Memory {
    fn new(parts: Parts) -> Self {
        Self(Mutex::new(parts.into_iter().collect()))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Objects for Memory {
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let found = self.all().get(path).cloned().ok_or_else(|| missing(path))?;
        if found.len() as u64 > limit { Err(too_long(path, limit)) } else { Ok(found) }
    }

    fn get_range(&self, path: &str, start: u64, most: u64) -> Result<Vec<u8>> {
        let content = self.get(path, u64::MAX)?;
        let start = start.min(content.len() as u64) as usize;
        let end = content.len().min(start.saturating_add(most as usize));
        Ok(content[start..end].to_vec())
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        self.all().insert(path.to_owned(), content.to_vec());
        Ok(())
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        let size = self.all().get(path).map(|content| content.len() as u64);
        Ok(size.map(|size| Stat { size, modified: SystemTime::now() }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let all = self.all();
        let below = all.keys().filter_map(|path| path.strip_prefix(folder)?.strip_prefix('/'));
        let mut names: Vec<String> =
            below.filter_map(|rest| rest.split('/').next().map(str::to_owned)).collect();
        names.dedup();
        Ok(names)
    }

    fn walk(&self, folder: &str, found: Found<'_>) -> Result<()> {
        let below: Vec<(String, u64)> = {
            let all = self.all();
            let below = |(path, content): (&String, &Vec<u8>)| {
                let rest = path.strip_prefix(folder)?.strip_prefix('/')?;
                Some((rest.to_owned(), content.len() as u64))
            };
            all.iter().filter_map(below).collect()
        };
        below.iter().try_for_each(|(path, size)| found(path, &|| Some(*size)))
    }

    fn remove_if(&self, path: &str, allowed: Allowed<'_>) -> Result<()> {
        allowed()?;
        self.all().remove(path);
        Ok(())
    }

    fn remove_all(&self, folder: &str) -> Result<()> {
        let prefix = format!("{folder}/");
        self.all().retain(|path, _| !path.starts_with(&prefix));
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}
