//! Checking all metadata, on the device and in memory, changing nothing.

use super::{Inner, IoDriver, Store, recover};
use crate::error::Result;
use crate::info::{CheckReport, Finding, Severity};
use crate::io::{Storage, open as drivers};
use crate::meta::entries::SPARE_BASE;
use crate::units::SnapshotId;
use std::path::Path;
use std::sync::PoisonError;

impl Store {
    /// Checks the store at `path` without opening it: works on one too damaged for that.
    ///
    /// # Errors
    /// `NotFound`, `Busy`, `Invalid` if it is no store, `Io`.
    pub fn check_path(path: &Path) -> Result<CheckReport> {
        let opened = drivers::open_storage(path, true, IoDriver::Auto)?;
        Self::check_on(&*opened.storage).map_err(|error| error.context(path.display()))
    }

    /// As [`Store::check_path`], on storage of the caller's.
    ///
    /// # Errors
    /// As [`Store::check_path`].
    pub fn check_on(storage: &dyn Storage) -> Result<CheckReport> {
        let (superblock, notes) = match recover::read_superblock(storage) {
            Ok(found) => found,
            Err(error) if error.kind() == crate::ErrorKind::Corrupt => {
                let finding = Finding {
                    severity: Severity::Corrupt,
                    region: "superblock".to_owned(),
                    index: None,
                    message: error.to_string(),
                };
                return Ok(CheckReport { findings: vec![finding], ..CheckReport::default() });
            }
            Err(error) => return Err(error),
        };
        let mut loader = recover::load(storage, &superblock)?;
        recover::load_labels(storage, &superblock.geometry, &mut loader)?;
        let mut report = loader.verify();
        report.findings.extend(notes);
        report.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(report)
    }

    /// Checks an open store: what is on the device, and that memory accounts for every extent.
    /// Commits wait meanwhile.
    ///
    /// # Errors
    /// `Io`.
    pub fn check(&self) -> Result<CheckReport> {
        let _work = self.inner.work.lock().unwrap_or_else(PoisonError::into_inner);
        let result = self.inner.without_commits(|| Self::check_on(&*self.inner.storage));
        let mut report = result?;
        report.findings.extend(self.inner.check_memory());
        Ok(report)
    }
}

impl Inner {
    /// Runs `task` while no commit does.
    fn without_commits<T>(&self, task: impl FnOnce() -> T) -> T {
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        while commits.begin().is_none() {
            commits = self.commit_done.wait(commits).unwrap_or_else(PoisonError::into_inner);
        }
        drop(commits);
        let value = task();
        self.commits.lock().unwrap_or_else(PoisonError::into_inner).end_without_commit();
        self.commit_done.notify_all();
        value
    }

    /// Every data extent is either used by a layer, free, or on its way to being free; the counts
    /// of data blocks are right.
    fn check_memory(&self) -> Vec<Finding> {
        let meta = self.meta();
        let mut findings = Vec::new();
        let mut find = |severity, index: Option<u64>, message: String| {
            findings.push(Finding { severity, region: "extent status".into(), index, message });
        };
        let mut used = 0;
        for id in meta.entries.used().take_while(|id| *id < SPARE_BASE) {
            used += 1;
            let Some((owner, logical)) = meta.entries.owner(id) else { continue };
            let owner = meta.try_snapshot(SnapshotId(owner));
            if owner.is_none_or(|snapshot| snapshot.layer.get(logical) != Some(id)) {
                find(Severity::Leak, Some(u64::from(id)), "in no layer: space is lost".to_owned());
            }
        }
        let known = used + meta.extents.available() + meta.extents.quarantined();
        let total = meta.geometry.data_extents();
        if known != total {
            let text = format!("{known} extents accounted for of {total}: space is lost");
            find(Severity::Leak, None, text);
        }
        if !meta.entries.counts_are_true() {
            let text = "the counts of data blocks by snapshot are wrong in memory: open again";
            find(Severity::Corrupt, None, text.to_owned());
        }
        findings
    }
}
