//! Checking all metadata, on the device and in memory, changing nothing.

use super::{Inner, IoDriver, Store, recover};
use crate::error::{Error, Result};
use crate::format::sums::{self, SUMS_PER_PAGE, Stored};
use crate::format::{BlockFault, RegionKind, Superblock};
use crate::info::{CheckReport, Finding, Severity};
use crate::io::buffer::AlignedBuf;
use crate::io::reading::ReadBy;
use crate::io::{ReadRequest, Storage, open as drivers};
use crate::meta::entries::SPARE_BASE;
use crate::meta::load::Loader;
use crate::units::{BLOCK_BYTES, SnapshotId};
use std::io;
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Pages of checksums read at once.
const PAGES_AT_ONCE: u32 = 256;
/// Damaged ones told of one by one.
const PAGES_LISTED: usize = if cfg!(test) { 12 } else { 1000 };

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
        let mut checked = Metadata::read(storage)?.verify();
        checked.check_sums(storage)?;
        Ok(checked.into_report())
    }

    /// Checks an open store: its metadata as it was on the device when that began, while commits go on;
    /// checksums of data as they are when they are read; and that memory accounts for every extent. A
    /// commit waits only if much metadata is written over before it was looked at.
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
            checked.check_sums(&ReadBy::new(inner.storage.size_bytes(), now))?;
            Ok(checked.into_report())
        };
        let mut report = check().map_err(|error| match end() {
            Err(closing) => Error::new(crate::ErrorKind::Poisoned, closing.to_string()),
            Ok(()) => error,
        })?;
        let _work = inner.work.lock().unwrap_or_else(PoisonError::into_inner);
        report.findings.extend(inner.check_memory());
        Ok(report)
    }
}

/// A store whose metadata of volumes and snapshots was checked.
struct Checked {
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
    /// Worst first.
    fn into_report(mut self) -> CheckReport {
        self.report.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        self.report
    }

    /// Looks at the pages of checksums of the extents that have entries. A damaged one costs checksums,
    /// and no data; what is no page at all was never written.
    fn check_sums(&mut self, storage: &dyn Storage) -> Result<()> {
        let Some((superblock, extents)) = &self.rest else { return Ok(()) };
        let geometry = &superblock.geometry;
        if !geometry.has_sums() {
            return Ok(());
        }
        let block = BLOCK_BYTES as usize;
        let blocks = u64::from(geometry.data_extents()).min(*extents)
            * u64::from(geometry.blocks_per_extent());
        let pages = blocks.div_ceil(SUMS_PER_PAGE as u64) as u32;
        let mut buf = AlignedBuf::zeroed(PAGES_AT_ONCE as usize * block);
        let failed = |error| Error::io(error, "reading the checksums failed");
        let mut notes = PageNotes::default();
        let fault = |page: u32, bytes: &[u8]| match sums::decode(
            &superblock.uuid,
            geometry.sums_address(page),
            bytes,
        ) {
            Stored::Damaged(fault @ (BlockFault::Checksum | BlockFault::Address)) => Some(fault),
            _ => None,
        };
        for first in (0..pages).step_by(PAGES_AT_ONCE as usize) {
            let count = PAGES_AT_ONCE.min(pages - first);
            let part = &mut buf[..count as usize * block];
            let unreadable = recover::read_blocks(storage, geometry.sums_address(first), part)
                .map_err(failed)?;
            unreadable.iter().for_each(|page| notes.add(first + page, BlockFault::Unreadable));
            self.report.blocks_checked += u64::from(count);
            for (page, bytes) in (first..).zip(part.chunks_exact_mut(block)) {
                if fault(page, bytes).is_none() {
                    continue;
                }
                // In a store that is open it may have been written just now.
                storage.read_at(geometry.sums_address(page), bytes).map_err(failed)?;
                if let Some(fault) = fault(page, bytes) {
                    notes.add(page, fault);
                }
            }
        }
        self.report.findings.extend(notes.into_findings());
        Ok(())
    }
}

/// Pages of checksums that say nothing. A hostile image has any number.
#[derive(Default)]
struct PageNotes {
    listed: Vec<(u32, BlockFault)>,
    more: u64,
}

impl PageNotes {
    fn add(&mut self, page: u32, fault: BlockFault) {
        if self.listed.len() < PAGES_LISTED {
            self.listed.push((page, fault));
        } else {
            self.more += 1;
        }
    }

    fn into_findings(self) -> impl Iterator<Item = Finding> {
        let note = |index: Option<u64>, what: &str| Finding {
            severity: Severity::Note,
            region: RegionKind::Sums.name().to_owned(),
            index,
            message: format!("{what}: what it is about is checked no more"),
        };
        let more = (self.more > 0).then(|| note(None, &format!("{} more such pages", self.more)));
        let listed = self.listed.into_iter();
        listed.map(move |(page, fault)| note(Some(u64::from(page)), fault.text())).chain(more)
    }
}

impl Inner {
    /// Runs `task` while no commit does.
    pub(super) fn without_commits<T>(&self, task: impl FnOnce() -> T) -> T {
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
