//! Purge: removing, for good, the snapshots that are marked as removed.
//!
//! | a removed snapshot with | |
//! |---|---|
//! | no child | is deleted |
//! | one child, a snapshot | is merged into it, which keeps its name |
//! | one child, the head | gives up what the head hides, and stays |
//! | more children | stays |
//!
//! First all snapshots that the system took are marked. It goes from the leaves to the root, so that
//! what is deleted need not be merged before.

use super::hash::Hashes;
use super::jobs::Job;
use crate::replica::{Disk, Replica};
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_service::log;
use longhorn_sync::image::Record;
use longhorn_wire::names;
use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Steps of background work at a time: a small part of a second.
const STEPS: u64 = 16;
/// While others use the store, this much rest for each measure of work.
const REST: u32 = 3;
/// Longest rest.
const REST_MAX: Duration = Duration::from_millis(250);
/// How often a read is looked at that must end before the work goes on.
const READ_PAUSE: Duration = Duration::from_millis(5);

/// What a purge is done with.
pub struct Purge<'a> {
    /// Of this replica.
    pub replica: &'a Replica,
    /// Given up for snapshots that change.
    pub hashes: &'a Hashes,
    /// To tell how far it is.
    pub job: &'a Job,
    /// How long somebody may go on reading a snapshot that is to be deleted.
    pub readers: Duration,
}

type Disks = BTreeMap<String, Disk>;

impl Purge<'_> {
    /// Does it, until space has come back.
    ///
    /// # Errors
    /// `Busy` if somebody goes on reading what is to be deleted: all others are gone then; of the store.
    pub fn run(&self) -> Result<()> {
        if !self.replica.is_open() {
            return Ok(());
        }
        let begun = Instant::now();
        for disk in self.replica.disks()?.values() {
            if let Disk { snapshot: Some(name), user_created: false, removed: false, .. } = disk {
                self.replica.mark_removed(name)?;
            }
        }
        let store = self.replica.store()?;
        let total = self.replica.disks()?.values().filter(|disk| disk.removed).count() as u64;
        let mut deleted = 0;
        // What somebody goes on reading, and the error that tells.
        let (mut read, mut outcome) = (BTreeSet::new(), Ok(()));
        while let Some(disk) = removable(&self.replica.disks()?, &read) {
            match self.delete(&disk) {
                Err(e) if e.kind() == ErrorKind::Busy => {
                    read.insert(disk);
                    outcome = outcome.and(Err(e));
                    self.check_open()?;
                    continue;
                }
                deleted => deleted?,
            }
            // Of a replica that is closed nothing is deleted, and the disk would come again.
            self.check_open()?;
            deleted += 1;
            // Half of the way: the other half is the merging of what has been deleted.
            self.job.progress(deleted, total * 2);
        }
        self.merge(&store)?;
        let freed = self.prune(&store)?;
        self.forget_records();
        if total > 0 {
            let volume = self.replica.volume_name();
            let millis = begun.elapsed().as_millis();
            log::info(
                "purge",
                &[
                    ("volume", &volume),
                    ("marked", &total),
                    ("deleted", &deleted),
                    ("pruned_bytes", &freed),
                    ("ms", &millis),
                ],
            );
        }
        outcome
    }

    /// Deletes a disk, together with what depends on its present content.
    fn delete(&self, disk: &str) -> Result<()> {
        let disks = self.replica.disks()?;
        let child = disks.get(disk).and_then(|found| found.children.first());
        for changing in [Some(disk), child.map(String::as_str)].into_iter().flatten() {
            self.changes(changing)?;
        }
        let begun = Instant::now();
        loop {
            match self.replica.remove(disk, false) {
                Err(e) if e.kind() == ErrorKind::Busy && begun.elapsed() < self.readers => {
                    sleep(Duration::from_millis(100));
                }
                Err(e) => return Err(e.context(format!("failed to remove {disk}"))),
                Ok(()) => return Ok(()),
            }
        }
    }

    /// A layer is about to change: nobody hashes it, and its checksum does not hold any more.
    fn changes(&self, disk: &str) -> Result<()> {
        if let Some(name) = names::snapshot_name(disk) {
            self.hashes.cancel_and_wait(name);
        }
        Record::remove(&self.replica.dir().join(disk))
    }

    fn check_open(&self) -> Result<()> {
        if self.replica.is_open() {
            return Ok(());
        }
        let text = "the replica was closed; what is deleted is merged in the background";
        Err(Error::new(ErrorKind::Interrupted, text))
    }

    /// Merges what has been deleted, beside I/O.
    fn merge(&self, store: &Store) -> Result<()> {
        let volume = self.replica.volume_name();
        let left = || store.merging_remaining(volume);
        let all = left()?;
        let mut requests = store.requests();
        let mut left_now = all;
        while left_now > 0 {
            let begun = Instant::now();
            let waits = store.work(STEPS)?.waits;
            left_now = left()?;
            self.job.progress(all + all.saturating_sub(left_now), all * 2);
            let before = std::mem::replace(&mut requests, store.requests());
            if waits {
                sleep(READ_PAUSE);
            } else if requests != before {
                sleep((begun.elapsed() * REST).min(REST_MAX));
            }
            self.check_open()?;
        }
        Ok(())
    }

    /// Gives up what the head hides of a removed snapshot below it; returns the bytes.
    fn prune(&self, store: &Store) -> Result<u64> {
        let disks = self.replica.disks()?;
        let head = self.replica.head_disk()?;
        let Some(parent) = disks.get(&head).map(|head| head.parent.as_str()) else { return Ok(0) };
        let only = |disk: &&Disk| disk.removed && disk.children == [head.as_str()];
        if disks.get(parent).filter(only).is_none() {
            return Ok(0);
        }
        self.changes(parent)?;
        let volume = self.replica.volume_name();
        let size = store.volume_size(volume)?;
        let freed = store.prune(volume, 0, size)?;
        store.flush()?;
        Ok(freed)
    }

    /// Removes checksums on record for disks that are gone. Best effort: they are in nobody's way.
    fn forget_records(&self) {
        let (Ok(disks), Ok(files)) = (self.replica.disks(), std::fs::read_dir(self.replica.dir()))
        else {
            return;
        };
        for file in files.flatten() {
            let name = file.file_name();
            let disk = name.to_str().and_then(|name| name.strip_suffix(".checksum"));
            let gone =
                |disk: &&str| names::snapshot_name(disk).is_some() && !disks.contains_key(*disk);
            if disk.filter(gone).is_some() {
                // See above.
                let _ = std::fs::remove_file(file.path());
            }
        }
    }
}

/// A disk to delete next, but none of `kept`: leaves before what is to be merged.
fn removable(disks: &Disks, kept: &BTreeSet<String>) -> Option<String> {
    let may = |name: &String, disk: &Disk| {
        disk.removed && disk.snapshot.is_some() && !kept.contains(name)
    };
    let removed = || disks.iter().filter(|(name, disk)| may(name, disk));
    let leaf = removed().find(|(_, disk)| disk.children.is_empty());
    let merged = || {
        removed().find(|(_, disk)| match disk.children.as_slice() {
            [child] => disks.get(child).is_some_and(|child| child.snapshot.is_some()),
            _ => false,
        })
    };
    leaf.or_else(merged).map(|(name, _)| name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(links: &[(&str, &str, bool)]) -> Disks {
        let mut disks = Disks::new();
        for (name, parent, removed) in links {
            let snapshot = (*name != "head").then(|| (*name).to_owned());
            let parent = (*parent).to_owned();
            let disk = Disk { snapshot, parent, removed: *removed, ..Disk::default() };
            disks.insert((*name).to_owned(), disk);
        }
        for (name, parent, _) in links {
            if let Some(parent) = disks.get_mut(*parent) {
                parent.children.push((*name).to_owned());
            }
        }
        disks
    }

    #[test]
    fn leaves_go_first_and_what_others_need_stays() {
        let next = |links: &[_]| removable(&tree(links), &BTreeSet::new());
        // a - b - head, c and d on a side branch of a.
        let chain = [("a", "", true), ("b", "a", true), ("head", "b", false)];
        assert_eq!(next(&chain).as_deref(), Some("a"));
        assert_eq!(next(&[("b", "", true), ("head", "b", false)]), None);
        let branch = [&chain[..], &[("c", "a", true), ("d", "c", true)]].concat();
        assert_eq!(next(&branch).as_deref(), Some("d"));
        let branch = [&chain[..], &[("c", "a", true), ("d", "c", false)]].concat();
        assert_eq!(next(&branch).as_deref(), Some("c"));
        let branch = [&chain[..], &[("d", "a", false)]].concat();
        assert_eq!(next(&branch), None);
        assert_eq!(next(&[("a", "", false), ("head", "a", false)]), None);
        let read = BTreeSet::from(["a".to_owned()]);
        assert_eq!(removable(&tree(&chain), &read), None);
    }
}
