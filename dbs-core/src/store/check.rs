//! Checking all metadata, on the device and in memory, changing nothing.

use super::pages::Pages;
use super::turns::Held;
use super::{Inner, IoDriver, Store, recover};
use crate::error::{Error, Result};
use crate::format::{RegionKind, Superblock};
use crate::info::{CheckReport, Finding, Severity};
use crate::io::reading::ReadBy;
use crate::io::{ReadRequest, Storage, open as drivers};
use crate::meta::load::Loader;
use crate::units::SnapshotId;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

/// Extents whose entries are compared under one hold of the metadata lock.
const EXTENTS_PER_LOOK: u32 = 1024;

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
    #[doc(hidden)]
    pub fn check_on(storage: &dyn Storage) -> Result<CheckReport> {
        let mut checked = Checked::of(storage)?;
        checked.check_sums(storage, true)?;
        Ok(checked.into_report())
    }

    /// Checks an open store: its metadata as it was on the device when that began, while commits go on;
    /// checksums of data as they are when they are read; and that memory accounts for every extent. A
    /// commit waits only if much metadata is written over before it was looked at. The counts of data blocks are compared
    /// only if none changes meanwhile, as writers, a flatten and a vacuum do.
    ///
    /// # Errors
    /// `Io`; `Poisoned` if the store is closed meanwhile.
    pub fn check(&self) -> Result<CheckReport> {
        let inner = &*self.inner;
        // Who closes the store gives it away, and does not wait for who looks at it.
        let end = || match inner.closing.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the store is being closed")),
            false => Ok(()),
        };
        let check = || {
            let metadata = inner.read_still(|still| {
                Metadata::read(&ReadBy::new(
                    still.size_bytes(),
                    |requests: &mut [ReadRequest<'_>]| {
                        end().and_then(|()| still.read_many(requests))
                    },
                ))
            })?;
            // Commits that waited for what was to be read need not wait for this.
            let mut checked = metadata.verify();
            let now = |requests: &mut [ReadRequest<'_>]| {
                end().and_then(|()| inner.storage.read_many(requests))
            };
            checked.check_sums(&ReadBy::new(inner.storage.size_bytes(), now), inner.read_only)?;
            Ok(checked.into_report())
        };
        let mut report = check().map_err(|error| match end() {
            Err(closing) => Error::new(crate::ErrorKind::Poisoned, closing.to_string()),
            Ok(()) => error,
        })?;
        report.findings.extend(inner.check_memory());
        Ok(report)
    }
}

/// A store whose metadata of volumes and snapshots was checked.
pub(super) struct Checked {
    report: CheckReport,
    /// Its superblock, and extents that have entries; `None` if there is no good one.
    rest: Option<(Superblock, u64)>,
}

/// What was read of a store's volumes and snapshots.
enum Metadata {
    Read {
        superblock: Box<Superblock>,
        loader: Box<Loader>,
        notes: Vec<Finding>,
    },
    /// There is no good superblock.
    Unreadable(Error),
}

fn damage(message: String) -> Finding {
    let (severity, region) = (Severity::Corrupt, "superblock".to_owned());
    Finding { severity, region, index: None, message }
}

impl Metadata {
    fn read(storage: &dyn Storage) -> Result<Self> {
        let (superblock, notes) = match recover::read_superblock(storage) {
            Ok(found) => found,
            Err(error) if error.kind() == crate::ErrorKind::Corrupt => {
                return Ok(Self::Unreadable(error));
            }
            Err(error) => return Err(error),
        };
        let mut loader = recover::load(storage, &superblock)?;
        recover::load_labels(storage, &superblock.geometry, &mut loader)?;
        let superblock = Box::new(superblock);
        Ok(Self::Read { superblock, loader: Box::new(loader), notes })
    }

    fn verify(self) -> Checked {
        let (superblock, loader, notes) = match self {
            Self::Read { superblock, loader, notes } => (superblock, loader, notes),
            Self::Unreadable(error) => {
                let findings = vec![damage(error.to_string())];
                let report = CheckReport { findings, ..CheckReport::default() };
                return Checked { report, rest: None };
            }
        };
        let entries = u64::from(loader.blocks_to_read(RegionKind::Extents))
            * u64::from(superblock.geometry.items_per_block(RegionKind::Extents));
        let used_up = recover::is_used_up(&superblock, loader.durable());
        let mut report = loader.verify();
        report.findings.extend(used_up.then(|| damage(recover::USED_UP.to_owned())));
        report.findings.extend(notes);
        Checked { report, rest: Some((*superblock, entries)) }
    }
}

impl Checked {
    /// Checks the metadata of volumes and snapshots.
    ///
    /// # Errors
    /// `Invalid` if it is no store, `Io`.
    pub(super) fn of(storage: &dyn Storage) -> Result<Self> {
        Ok(Metadata::read(storage)?.verify())
    }

    /// Worst first.
    pub(super) fn into_report(mut self) -> CheckReport {
        self.report.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        self.report
    }

    /// The pages of checksums that the store may use; none if it has no good superblock.
    pub(super) fn pages(&self) -> Option<Pages> {
        let (superblock, extents) = self.rest.as_ref()?;
        Some(Pages::new(superblock, *extents))
    }

    /// Checks pages of checksums; of an `idle` store, also what was left open.
    fn check_sums(&mut self, storage: &dyn Storage, idle: bool) -> Result<()> {
        let Some(pages) = self.pages() else { return Ok(()) };
        let damaged = pages.damaged(storage)?;
        self.report.findings.extend(damaged.findings());
        self.report.checksums_open = if idle { damaged.open_bytes() } else { 0 };
        self.report.blocks_checked += u64::from(pages.count());
        Ok(())
    }
}

impl Inner {
    /// Runs `task` while no commit does.
    pub(super) fn without_commits<T>(&self, task: impl FnOnce() -> T) -> T {
        self.commits.take_alone();
        let turn = Held::new(&self.commits, self);
        let value = task();
        turn.end(None);
        value
    }

    /// Every data extent is either used by a layer, free, or on its way to being free; the counts
    /// of data blocks are right. Extents are looked at some at a time, so that others get their turns.
    fn check_memory(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut find = |severity, index: Option<u64>, message: String| {
            findings.push(Finding { severity, region: "extent status".into(), index, message });
        };
        let mut counting = self.meta().entries.begin_count();
        let mut next = Some(0_u32);
        while let Some(first) = next {
            let meta = self.meta();
            let ids = first..first.saturating_add(EXTENTS_PER_LOOK);
            for (id, owner, logical) in meta.entries.extents_in(ids.clone()) {
                let owner = meta.try_snapshot(SnapshotId(owner));
                if owner.is_none_or(|snapshot| snapshot.layer.get(logical) != Some(id)) {
                    let text = "in no layer: space is lost".to_owned();
                    find(Severity::Leak, Some(u64::from(id)), text);
                }
            }
            meta.entries.count_some(&mut counting, ids.clone());
            next = meta.entries.last_extent().filter(|last| *last >= ids.end).map(|_| ids.end);
        }
        // Amid a step of background work an extent may be neither free nor any layer's.
        let _step = self.steps.take();
        let meta = self.meta();
        let (free, freed) = (meta.extents.available(), meta.extents.quarantined());
        let away = meta.extents.punching() + meta.moving();
        let known = meta.entries.extents_from(0) + free + freed + away;
        let total = meta.geometry.data_extents();
        if known != total {
            let text = format!("{known} extents accounted for of {total}: space is lost");
            find(Severity::Leak, None, text);
        }
        for entry in meta.wrong_unlogged() {
            let text = "it is in no record yet, and not as it was made: what it says may be lost"
                .to_owned();
            find(Severity::Corrupt, Some(u64::from(entry)), text);
        }
        if !meta.entries.counts_are(&counting) {
            let text = "the counts of data blocks of each snapshot are wrong in memory: open the \
                        store again";
            find(Severity::Corrupt, None, text.to_owned());
        }
        findings
    }
}
