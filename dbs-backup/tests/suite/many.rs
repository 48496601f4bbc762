//! Very many backups of one volume: how long it takes to list, verify and prune them (docs/performance.md).

use crate::support::VOLUME;
use dbs_backup::config::BackupConfig;
use dbs_backup::objects::{Directory, Objects};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, CreateOptions, InitOptions, Retention, Source, Work};
use dbs_core::Result;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

const BACKUPS: usize = 500;
/// What is written anew at once, and such parts of the volume, and of them those that change between two backups.
const PART: u64 = 2 << 20;
const PARTS: usize = 512;
const CHANGES: usize = 5;

/// A volume by the versions of its parts.
#[derive(Clone)]
struct Versions(Vec<Vec<u32>>);

impl Versions {
    fn snapshot(&self) -> String {
        format!("s{}", self.0.len())
    }

    fn change(&mut self, rng: &mut fastrand::Rng) {
        let mut next = self.0[self.0.len() - 1].clone();
        for _ in 0..CHANGES {
            next[rng.usize(..PARTS)] = self.0.len() as u32;
        }
        self.0.push(next);
    }
}

impl Source for Versions {
    fn size(&self) -> u64 {
        PART * PARTS as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        for (at, word) in (offset..).step_by(8).zip(buf.chunks_mut(8)) {
            let part = (at / PART) as usize;
            let version = self.0[self.0.len() - 1][part];
            // It compresses well: it is the number of blocks that counts.
            let value = u64::from(version) << 32 | (part as u64) << 16 | at >> 16 & 0xff | 1;
            word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
        }
        Ok(())
    }

    fn ranges(
        &self,
        base: Option<&BackupConfig>,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<bool> {
        let newest = &self.0[self.0.len() - 1];
        let before: usize = match base {
            Some(base) => base.snapshot_name[1..].parse().unwrap(),
            None => 0,
        };
        for (part, version) in newest.iter().enumerate() {
            if before == 0 || self.0[before - 1][part] != *version {
                found(part as u64 * PART..(part as u64 + 1) * PART)?;
            }
        }
        Ok(true)
    }
}

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = work();
    println!("{what}: {:.2} s", begun.elapsed().as_secs_f64());
    done
}

/// By hand, as it takes minutes: with `--ignored --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn five_hundred_backups_of_one_volume() {
    for repository in [false, true] {
        let place = tempfile::tempdir().unwrap();
        let objects: Arc<dyn Objects> = Arc::new(Directory::open(place.path()).unwrap());
        let url = Url::parse("vfs:///x").unwrap();
        let open = || {
            let store = BackupStore::on(&url, Arc::clone(&objects)).without_waiting();
            store.with_repository(None).unwrap()
        };
        if repository {
            open().init(&InitOptions::default()).unwrap();
        }
        println!("repository: {repository}");
        let mut versions = Versions(vec![vec![1; PARTS]]);
        let mut rng = fastrand::Rng::with_seed(1);
        timed("500 backups", || {
            for number in 0..BACKUPS {
                let options = CreateOptions {
                    volume: VOLUME.to_owned(),
                    snapshot: versions.snapshot(),
                    backup: Some(format!("backup-{number}")),
                    ..CreateOptions::default()
                };
                // Each by a process of its own.
                let store = open();
                let creation = store.create(&versions, options).unwrap();
                assert_eq!(creation.is_incremental(), number > 0);
                creation.run(&mut Work::new(&mut |_, _| true)).unwrap();
                versions.change(&mut rng);
            }
        });
        let store = open();
        let listed = timed("list", || store.backup_infos(VOLUME).unwrap());
        assert_eq!(listed.len(), BACKUPS);
        timed("verify of one", || {
            let last = format!("backup-{}", BACKUPS - 1);
            let verified = store.verify(VOLUME, &last, false, &mut Work::new(&mut |_, _| true));
            assert!(verified.unwrap().bad.is_empty());
        });
        timed("verify of all", || {
            let store = open();
            for number in 0..BACKUPS {
                let backup = format!("backup-{number}");
                let verified =
                    store.verify(VOLUME, &backup, false, &mut Work::new(&mut |_, _| true));
                assert!(verified.unwrap().bad.is_empty());
            }
        });
        let retention = Retention { last: 10, ..Retention::default() };
        let (store, mut progress) = (open(), |_, _| true);
        let mut judged = timed("prune --dry-run", || store.judge(VOLUME, &retention).unwrap());
        timed("prune to 10", || {
            store.prune(VOLUME, &retention, &mut judged, &mut Work::new(&mut progress)).unwrap();
            store.collect(&mut Work::new(&mut progress)).unwrap();
        });
        let left = store.backups(VOLUME).unwrap();
        assert_eq!(left.len(), 10);
        for backup in &left {
            let verified = store.verify(VOLUME, backup, true, &mut Work::new(&mut progress));
            assert!(verified.unwrap().bad.is_empty());
        }
        store.remove_volume(VOLUME, &mut Work::new(&mut progress)).unwrap();
        if !repository {
            assert!(store.volumes().unwrap().is_empty());
            let mut blocks = 0;
            objects
                .walk("backupstore", &mut |_, _| {
                    blocks += 1;
                    Ok(())
                })
                .unwrap();
            assert_eq!(blocks, 0, "nothing is left");
        }
    }
}
