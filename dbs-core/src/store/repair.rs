//! Repairing a damaged store: what is wrong, what is done about it, and what is lost.
//!
//! A plan is made in memory and proven there by the code that opens stores. Only then, and when the
//! metadata that is there has been saved aside, is anything written (`rewrite`).

use super::aside;
use super::check::Checked;
use super::last_tail::{TAIL_GONE, TailPlaces, WantedTail, check_unneeded, flush_opened};
use super::pages::Pages;
use super::recover;
use super::rewrite::rewrite;
use super::{Env, Store, TailPlace};
use crate::error::{Error, Result};
use crate::format::superblock::{
    INCOMPAT_BACKED, INCOMPAT_COMPRESSED, INCOMPAT_ENCRYPTED, INCOMPAT_GROUPS, INCOMPAT_LOST,
    INTERRUPTED, Superblock,
};
use crate::format::{Geometry, RegionKind, journal};
use crate::info::{CheckReport, LostRange, RepairKind, RepairReport, RepairStep, Severity};
use crate::io::env::SystemEnv;
use crate::io::{Storage, TailMemory, open as drivers};
use crate::meta::Meta;
use crate::meta::load::Loader;
use crate::meta::load::mend::Permit;
use crate::meta::tail::{self, TailKey};
use crate::store::IoDriver;
use crate::units::BLOCK_BYTES;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Lost ranges reported one by one: of a hostile image every snapshot may show any number.
const LOST_MAX: usize = if cfg!(test) { 12 } else { 10_000 };

/// How to repair.
#[derive(Debug, Clone, Default)]
pub struct RepairOptions {
    /// Go back to the state before the first commit group that cannot be read: what was written
    /// since is lost.
    pub lose_journal: bool,
    /// Where to look for the tail of a process that was killed.
    pub tail: TailPlace,
    /// How to reach the store.
    pub driver: IoDriver,
}

/// A repair that was planned, and not carried out.
pub struct Repair {
    pub(super) report: RepairReport,
    /// What is to be there: none if nothing is to be done, or nothing can be.
    pub(super) plan: Option<(Box<Meta>, Superblock)>,
    /// The pages of checksums, if some of them are damaged and are to be emptied.
    pub(super) pages: Option<Pages>,
    /// What of the store it writes over.
    pub(super) ranges: Vec<Range<u64>>,
    /// What is saved of blocks that cannot be read and must not be taken for blank, by address.
    pub(super) stand_ins: Vec<(u64, Vec<u8>)>,
    pub(super) store: [u8; 16],
}

impl std::fmt::Debug for Repair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Repair").field("report", &self.report).finish_non_exhaustive()
    }
}

/// A store that is locked or is to be made, and what a repair of it would do.
#[derive(Debug)]
pub struct OpenRepair {
    pub(super) target: RepairTarget,
    pub(super) repair: Repair,
    /// Where the tail of a killed process is.
    pub(super) tail: TailPlace,
}

/// What is repaired.
#[derive(Debug)]
pub(super) enum RepairTarget {
    Opened(drivers::OpenedStorage),
    /// A file that nobody has made yet.
    New {
        path: PathBuf,
        size: u64,
        driver: IoDriver,
    },
}

impl OpenRepair {
    /// The plan.
    #[must_use]
    pub fn report(&self) -> &RepairReport {
        self.repair.report()
    }

    /// Whether metadata is written over, and saved before: not where there is none yet, nor where only
    /// damaged pages of checksums are emptied.
    #[must_use]
    pub fn saves(&self) -> bool {
        self.repair.plan.is_some() && matches!(self.target, RepairTarget::Opened(_))
    }

    /// Saves the metadata to the new file `save`, then repairs. Of a store that is to be made there is
    /// none to save; if that fails nothing of it is left. Nor is there where only damaged pages of
    /// checksums are emptied.
    ///
    /// # Errors
    /// `Exists` if the file is there, `Invalid` if the plan is refused, `Io`, `NoSpace`.
    pub fn carry_out(self, save: &Path) -> Result<RepairReport> {
        let opened = match self.target {
            RepairTarget::Opened(opened) => opened,
            RepairTarget::New { path, size, driver } => {
                let opened = drivers::create_storage(&path, Some(size), false, driver)?;
                return self.repair.carry_out(&*opened.storage).inspect_err(|_| {
                    if opened.created {
                        // Best effort: the error at hand is the one to report.
                        let _ = std::fs::remove_file(&path);
                    }
                });
            }
        };
        flush_opened(&opened, &self.tail, self.repair.store)?;
        if self.repair.plan.is_none() {
            return self.repair.carry_out(&*opened.storage);
        }
        let file = new_file(save)?;
        let saved = self.repair.save(&*opened.storage, &file);
        if saved.is_err() {
            // Best effort: it is incomplete and no use.
            let _ = std::fs::remove_file(save);
        }
        saved?;
        let report = self.repair.carry_out(&*opened.storage).map_err(|error| {
            let save = save.display();
            error.context(format!("put the metadata back with `dbs repair --undo {save}`"))
        })?;
        Ok(RepairReport { saved: Some(save.display().to_string()), ..report })
    }
}

impl Repair {
    /// What is wrong, what is done about it, what is lost.
    #[must_use]
    pub fn report(&self) -> &RepairReport {
        &self.report
    }

    /// Saves the metadata that the repair writes over to an empty file; nothing if it does not.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub fn save(&self, storage: &dyn Storage, file: &File) -> Result<()> {
        let Some((_, after)) = &self.plan else { return Ok(()) };
        let origin = aside::Origin { store: self.store, after, stand_ins: &self.stand_ins };
        aside::save(storage, &origin, &self.ranges, file)
    }

    /// Writes. If that fails, what [`Repair::save`] saved must be put back; nobody opens the store
    /// before.
    ///
    /// # Errors
    /// `Invalid` if the plan is refused; `Io`, `NoSpace`.
    pub fn carry_out(self, storage: &dyn Storage) -> Result<RepairReport> {
        let refused = self.report.steps.iter().find(|step| step.kind == RepairKind::Refused);
        if let Some(step) = refused {
            return Err(Error::invalid(format!("the store cannot be repaired: {}", step.message)));
        }
        if let Some((meta, superblock)) = &self.plan {
            rewrite(storage, meta, superblock)?;
        }
        if let Some(pages) = &self.pages {
            pages.silence_damaged(storage)?;
        }
        let done = self.plan.is_some() || self.pages.is_some();
        Ok(RepairReport { done, ..self.report })
    }
}

impl Store {
    /// Locks the store at `path` and plans its repair, changing nothing.
    ///
    /// # Errors
    /// `NotFound`, `Busy`, `Invalid` if it is no store, `Unsupported` if it has features that this
    /// version does not know, `Corrupt` if there is no way to repair it, `Io`.
    pub fn plan_repair(path: &Path, options: &RepairOptions) -> Result<OpenRepair> {
        let opened = drivers::open_storage(path, false, options.driver)?;
        let named = |error: Error| error.context(path.display());
        let env = SystemEnv::new()?;
        let uuid = mend_superblock(&*opened.storage).map_err(named)?.0.uuid;
        let wanted = WantedTail {
            place: &options.tail,
            uuid,
            store: &opened.place,
            knows_boot: env.knows_boot(),
            read_only: true,
        };
        let mut tail = wanted.open()?;
        let memory = tail.memory.as_deref_mut();
        let refused = tail.refused.take();
        let found = (memory, refused, &tail.places);
        let repair = plan_with(&*opened.storage, found, &env, options.lose_journal);
        let repair = repair.map_err(named)?;
        let tail = options.tail.clone();
        Ok(OpenRepair { repair, target: RepairTarget::Opened(opened), tail })
    }

    /// As [`Store::plan_repair`], on storage of the caller's.
    ///
    /// # Errors
    /// As [`Store::plan_repair`].
    #[doc(hidden)]
    pub fn plan_repair_on(
        storage: &dyn Storage,
        tail: Option<&mut (dyn TailMemory + 'static)>,
        env: &dyn Env,
        lose_journal: bool,
    ) -> Result<Repair> {
        plan_with(storage, (tail, None, &TailPlaces::default()), env, lose_journal)
    }

    /// Puts back the metadata that a repair of the store at `path` saved in the file `saved`. What was
    /// written since would be lost, and where it used space again volumes would show what is there now:
    /// such an undo is refused unless `force`.
    ///
    /// # Errors
    /// `NotFound`, `Busy`, `Invalid` if the file is none of these, is damaged, or is of another
    /// store, or if the store was written since; `Io`.
    pub fn undo_repair(path: &Path, saved: &Path, driver: IoDriver, force: bool) -> Result<()> {
        let file = File::open(saved).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                Error::not_found(format!("no file `{}`", saved.display()))
            }
            _ => Error::io(error, format!("cannot read `{}`", saved.display())),
        })?;
        let opened = drivers::open_storage(path, false, driver)?;
        undo_opened(&opened, &TailPlace::Auto, &file, force)
            .map_err(|error| error.context(saved.display()))
    }

    /// As [`Store::undo_repair`], on storage of the caller's.
    ///
    /// # Errors
    /// As [`Store::undo_repair`].
    #[doc(hidden)]
    pub fn undo_repair_on(storage: &dyn Storage, saved: &File, force: bool) -> Result<()> {
        aside::put_back(storage, saved, force)
    }
}

fn undo_opened(
    opened: &drivers::OpenedStorage,
    place: &TailPlace,
    saved: &File,
    force: bool,
) -> Result<()> {
    flush_opened(opened, place, aside::store_of(saved)?)?;
    Store::undo_repair_on(&*opened.storage, saved, force)
}

/// A tail, or why the one that is there cannot be used; and where else one may be.
type FoundTail<'a> = (Option<&'a mut (dyn TailMemory + 'static)>, Option<Error>, &'a TailPlaces);

/// As [`Store::plan_repair_on`].
fn plan_with(
    storage: &dyn Storage,
    found: FoundTail<'_>,
    env: &dyn Env,
    lose_journal: bool,
) -> Result<Repair> {
    let (superblock, mut steps) = mend_superblock(storage)?;
    knows_all_features(&superblock)?;
    let checked = Checked::of(storage)?;
    let mut pages = checked.pages();
    let findings = checked.into_report().findings;
    let mut report = RepairReport { findings, ..RepairReport::default() };
    let old = superblock.geometry.metadata_end();
    let behind = superblocks_behind(storage, &superblock.geometry);
    let ranges = std::iter::once(0..old).chain(behind).collect();
    let nothing = report.findings.iter().all(|finding| finding.is_lost_mark());
    let mut plan = None;
    let mut stand_ins = Vec::new();
    if !nothing {
        let mut loader = recover::load(storage, &superblock)?;
        if recover::is_used_up(&superblock, loader.durable()) {
            return Err(Error::corrupt(recover::USED_UP));
        }
        steps.extend(replay_tail(&mut loader, superblock.uuid, found, env)?);
        stand_ins = stand_ins_for(&loader, &superblock.geometry);
        recover::load_labels(storage, &superblock.geometry, &mut loader)?;
        if loader.is_hopeless() {
            return Err(Error::corrupt(
                "too much metadata is damaged to be repaired; `dbs restore-metadata` makes it anew from a \
                 dump",
            ));
        }
        let sequence = loader.next_sequence();
        steps.extend(loader.mend(Permit { lose_journal }, env.random()));
        if steps.iter().all(|step| step.kind != RepairKind::Refused) {
            match loader.finish(0, env.boot_id()) {
                Ok((meta, _)) => {
                    list_lost(&meta, &mut report);
                    let new = superblock_of(&meta, sequence, superblock);
                    pages = Some(Pages::below_marks(&new));
                    plan = Some((Box::new(meta), new));
                    if steps.is_empty() {
                        let text = "all metadata is written again".to_owned();
                        steps.push(step_of_store(RepairKind::Mended, text));
                    }
                }
                Err(error) => {
                    let text = format!("what can be mended is not enough: {error}");
                    steps.push(step_of_store(RepairKind::Refused, text));
                }
            }
        }
    }
    report.steps = steps;
    let pages = damaged_pages(storage, pages, &mut report)?;
    Ok(Repair { report, plan, pages, ranges, stand_ins, store: superblock.uuid })
}

/// The superblock of a store whose metadata is written again, as of the group `sequence`.
fn superblock_of(meta: &Meta, sequence: u64, before: Superblock) -> Superblock {
    let lost = meta.snapshots().any(|(_, snapshot)| !snapshot.layer.lost.is_empty());
    let kept = before.incompat
        & (INCOMPAT_GROUPS | INCOMPAT_BACKED | INCOMPAT_ENCRYPTED | INCOMPAT_COMPRESSED);
    let compressed = if meta.entries.any_compressed() { INCOMPAT_COMPRESSED } else { 0 };
    Superblock {
        // As after a crash, if it was one: the journal no longer says so.
        compat: 0,
        incompat: kept | compressed | if lost { INCOMPAT_LOST } else { 0 },
        clean_sequence: sequence,
        clean_marks: meta.marks(),
        ..before
    }
}

fn step_of_store(kind: RepairKind, message: String) -> RepairStep {
    RepairStep { kind, region: "store".to_owned(), index: None, message }
}

/// Reports the damaged pages of checksums among `pages`. Returns `pages` if the repair is to empty damaged
/// ones, `None` if none is damaged.
///
/// # Errors
/// `Io`.
pub(super) fn damaged_pages(
    storage: &dyn Storage,
    pages: Option<Pages>,
    report: &mut RepairReport,
) -> Result<Option<Pages>> {
    let Some(pages) = pages else { return Ok(None) };
    let damaged = pages.damaged(storage)?;
    report.findings.extend(damaged.findings());
    report.steps.extend(damaged.steps());
    Ok((!damaged.is_empty()).then_some(pages))
}

/// A new file for what is saved, whose name survives a power loss.
pub(super) fn new_file(path: &Path) -> Result<File> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            Error::exists(format!("`{}` exists already; name another file", path.display()))
        }
        _ => Error::io(error, format!("cannot make `{}`", path.display())),
    };
    let file =
        File::options().read(true).write(true).create_new(true).open(path).map_err(failed)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))
        .and_then(|directory| directory.sync_all())
        .map_err(failed)?;
    Ok(file)
}

/// Metadata is not written anew by who does not know all it says.
///
/// # Errors
/// `Unsupported`.
pub(super) fn knows_all_features(superblock: &Superblock) -> Result<()> {
    if superblock.unknown_ro == 0 {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "the store uses features this version can only read (mask {:#x}); repair it with a newer dbs",
        superblock.unknown_ro
    )))
}

/// Where superblock copies are, or may be, at the end.
pub(super) fn superblocks_behind(storage: &dyn Storage, geometry: &Geometry) -> Vec<Range<u64>> {
    let end = storage.size_bytes() / BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES;
    let mut at = vec![geometry.superblock_last(), end];
    at.dedup();
    at.into_iter().map(|at| at..at + BLOCK_BYTES).collect()
}

/// The superblock to go on from, and what was done to get it.
fn mend_superblock(storage: &dyn Storage) -> Result<(Superblock, Vec<RepairStep>)> {
    let step =
        |kind, index, message| RepairStep { kind, region: "superblock".to_owned(), index, message };
    let error = match recover::read_superblock(storage) {
        Ok((superblock, notes)) => {
            let again = |note: crate::info::Finding| {
                step(RepairKind::Mended, note.index, "this copy is written again".to_owned())
            };
            return Ok((superblock, notes.into_iter().map(again).collect()));
        }
        Err(error) => error,
    };
    let size = storage.size_bytes();
    if let Ok((newest, _)) = recover::newest(storage)
        && newest.geometry.size > size
    {
        let geometry = newest.geometry.resized(size).map_err(|_| {
            Error::corrupt("the store is cut off before its data: restore its metadata and data")
        })?;
        let message = format!(
            "the store had {} bytes and {size} are here: it ends there, and what was behind is lost",
            newest.geometry.size
        );
        let lost = step(RepairKind::Lost, None, message);
        return Ok((Superblock { geometry, ..newest }, vec![lost]));
    }
    if error.kind() != crate::ErrorKind::Corrupt || error.to_string() == INTERRUPTED {
        return Err(error);
    }
    match recover::vote(storage) {
        Some(superblock) => {
            let message = "no copy is good, and what they have in common proves itself by its \
                           checksum: all are written again"
                .to_owned();
            Ok((superblock, vec![step(RepairKind::Mended, None, message)]))
        }
        None => Err(error.context(
            "nothing is left to repair the superblock from; `dbs restore-metadata` puts a dump back",
        )),
    }
}

/// Replays the tail of the last session; a step says so if there was one and it is of no use.
fn replay_tail(
    loader: &mut Loader,
    store: [u8; 16],
    (tail, refused, places): FoundTail<'_>,
    env: &dyn Env,
) -> Result<Option<RepairStep>> {
    let Some(last) = loader.last_session else { return Ok(None) };
    let key = TailKey { store, boot: env.boot_id(), session: last.id };
    let lost = |message: &str| RepairStep {
        kind: RepairKind::Lost,
        region: "tail".to_owned(),
        index: None,
        message: message.to_owned(),
    };
    if let Some(batches) = tail.and_then(|memory| tail::replay(memory, &key, loader.durable())) {
        if batches.is_empty() || loader.is_complete() {
            loader.replay_tail(batches);
            return Ok(None);
        }
        let text = "the tail is left out, as it builds on commit groups that cannot be read: writes that \
                    were acknowledged after the last flush are lost";
        return Ok(Some(lost(text)));
    }
    check_unneeded(refused, &last, env.boot_id())?;
    if !last.tail || last.boot != env.boot_id() {
        return Ok(None);
    }
    match places.find_moved(&key, loader.durable()) {
        None => Ok(Some(lost(TAIL_GONE))),
        Some(text) => Err(Error::invalid(text)),
    }
}

/// Blocks of the journal that cannot be read, as they are saved: put back, they must not look as if
/// nothing had been written there.
fn stand_ins_for(loader: &Loader, geometry: &Geometry) -> Vec<(u64, Vec<u8>)> {
    let ring = geometry.region(RegionKind::Journal).offset;
    let address = |position: &u32| ring + u64::from(*position) * BLOCK_BYTES;
    let next = loader.durable() + 1;
    loader.unreadable_ring().iter().map(|at| (address(at), journal::stand_in(next))).collect()
}

/// What every volume and snapshot shows of what is lost: all of it, where the key is.
fn list_lost(meta: &Meta, report: &mut RepairReport) {
    for (id, snapshot) in meta.snapshots().filter(|(_, s)| s.live()) {
        let volume = meta.volume(snapshot.volume);
        let mut tell = |blocks: Range<u64>| {
            let offset = blocks.start * BLOCK_BYTES;
            let end = blocks.end.saturating_mul(BLOCK_BYTES).min(snapshot.size);
            if offset >= end {
                return;
            }
            if report.lost.len() == LOST_MAX {
                report.lost_more += 1;
                return;
            }
            report.lost.push(LostRange {
                volume: volume.name.clone(),
                snapshot: (!snapshot.head()).then(|| snapshot.name.clone()),
                offset,
                length: end - offset,
            });
        };
        if volume.key_slot.is_lost() {
            tell(0..u64::MAX);
            continue;
        }
        let told = meta.each_lost(id, 0, tell);
        assert!(matches!(told, Ok(None)), "all is in memory");
    }
}

impl CheckReport {
    /// Whether nothing is wrong but what a repair marked as lost.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.findings.iter().all(crate::info::Finding::is_lost_mark)
    }
}

impl crate::info::Finding {
    /// Whether it tells of a mark that a repair left, and of nothing to be mended.
    #[must_use]
    pub fn is_lost_mark(&self) -> bool {
        self.severity == Severity::Note && self.message.contains("lost since a repair")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{ReadRequest, WriteRequest};
    use crate::meta::entries::SPARE_BASE;
    use crate::meta::usage::Ranges;
    use crate::store::{InitOptions, OpenOptions};
    use crate::volume::{Read, Request, Start};
    use serde_json::{Value, json};
    use std::io;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    const SIZE: u64 = 64 << 20;
    const EXTENT: u64 = 64 << 10;

    /// A store with a volume and so many snapshots of it, with these entries: layers are 1 and up, the
    /// oldest snapshot first. It cannot grow, so that it has few spare entries.
    fn make(path: &Path, size: u64, snapshots: u32, entries: Vec<Value>) -> Geometry {
        make_with(path, size, SIZE, snapshots, entries)
    }

    /// The same with a volume of another size.
    fn make_with(
        path: &Path,
        size: u64,
        volume: u64,
        snapshots: u32,
        entries: Vec<Value>,
    ) -> Geometry {
        let options = InitOptions {
            size: Some(size),
            max_size: Some(size),
            extent_size: EXTENT,
            ..InitOptions::default()
        };
        Store::init(path, &options).unwrap();
        let store = Store::open(path, &OpenOptions::default()).unwrap();
        store.create_volume("v", volume).unwrap();
        for number in 1..=snapshots {
            store.create_snapshot("v", &format!("s{number}"), &Default::default()).unwrap();
        }
        let geometry = store.inner.meta().geometry;
        let mut dump = Vec::new();
        store.dump(&mut dump).unwrap();
        store.close().unwrap();
        let mut dump: Value = serde_json::from_slice(&dump).unwrap();
        dump.as_object_mut().unwrap().remove("crc32c");
        dump["entries"] = entries.into();
        dump["marks"] = RegionKind::MARKED.map(|kind| geometry.needed_blocks(kind)).to_vec().into();
        let dump = serde_json::to_vec(&dump).unwrap();
        let plan = Store::plan_restore(path, &dump, IoDriver::Auto).unwrap();
        plan.carry_out(&path.with_extension("saved")).unwrap();
        geometry
    }

    /// A device that loses what it was given, and says so once.
    struct Loses {
        under: Arc<dyn Storage>,
        /// Where there is something else then.
        at: u64,
        told: AtomicBool,
    }

    impl Storage for Loses {
        fn size_bytes(&self) -> u64 {
            self.under.size_bytes()
        }

        fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
            self.under.read_many(requests)
        }

        fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
            self.under.write_many(requests)
        }

        fn flush(&self) -> io::Result<()> {
            if self.told.swap(true, Ordering::SeqCst) {
                return self.under.flush();
            }
            self.under.write_at(self.at, &[7; BLOCK_BYTES as usize])?;
            Err(io::Error::from_raw_os_error(libc::EIO))
        }

        fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
            self.under.discard(offset, length)
        }

        fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
            self.under.allocate(offset, length)
        }

        fn set_size(&self, size: u64) -> io::Result<()> {
            self.under.set_size(size)
        }

        fn driver(&self) -> &'static str {
            self.under.driver()
        }
    }

    /// Found by review: the device lost what a killed process had written, and told the repair, or the undo of one. Undone
    /// then, and opened, the store replayed the tail and showed what had been there before.
    #[test]
    fn a_tail_does_not_outlive_a_flush_of_a_repair_that_failed() {
        const BLOCK: usize = BLOCK_BYTES as usize;
        let Ok(tmpfs) = tempfile::tempdir_in("/dev/shm") else {
            println!("SKIPPED: /dev/shm cannot be written to");
            return;
        };
        let tail = TailPlace::Directory(tmpfs.path().to_path_buf());
        for undoes in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let (path, save) = (directory.path().join("store"), directory.path().join("saved"));
            let init = InitOptions { size: Some(SIZE), checksums: false, ..InitOptions::default() };
            Store::init(&path, &init).unwrap();
            let options = OpenOptions { tail: tail.clone(), ..OpenOptions::default() };
            let store = Store::open(&path, &options).unwrap();
            store.create_volume("v", EXTENT).unwrap();
            let volume = store.volume("v").unwrap();
            volume.write_at(0, &[1; BLOCK], false).unwrap();
            let mut read = Request::new();
            assert_eq!(volume.start_read(0, BLOCK_BYTES, &mut read).unwrap(), Start::Io);
            let at = read.segments()[0].device;
            assert_eq!(read.finish_read(Ok(()), &[1; BLOCK]).unwrap(), Read::Done);
            // As if it was killed.
            drop((read, volume, store));
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[1; 100], BLOCK_BYTES + 2000).unwrap();
            let wanted = RepairOptions { tail: tail.clone(), ..RepairOptions::default() };
            let mut plan = Store::plan_repair(&path, &wanted).unwrap();
            assert!(plan.saves());
            let RepairTarget::Opened(opened) = &mut plan.target else { panic!("it is there") };
            let under = Arc::clone(&opened.storage);
            opened.storage = Arc::new(Loses { under, at, told: false.into() });
            let failed = if undoes {
                // The repair was killed before it wrote anything.
                plan.repair.save(&*opened.storage, &new_file(&save).unwrap()).unwrap();
                let undone = undo_opened(opened, &tail, &File::open(&save).unwrap(), false);
                drop(plan);
                undone
            } else {
                plan.carry_out(&save).map(drop)
            };
            assert_eq!(failed.unwrap_err().kind(), crate::ErrorKind::Io);
            if save.exists() {
                Store::undo_repair(&path, &save, IoDriver::Auto, false).unwrap();
            }
            let store = Store::open(&path, &options).unwrap();
            let mut found = [9; BLOCK];
            store.volume("v").unwrap().read_at(0, &mut found).unwrap();
            assert!(found == [0; BLOCK], "{undoes}: {} is what nobody wrote", found[0]);
            let warnings = store.info().warnings;
            assert!(warnings.iter().any(|text| text.contains(TAIL_GONE)), "{warnings:?}");
        }
    }

    fn data(entry: u32, snapshot: u32, extent: u32) -> Value {
        json!({
            "entry": entry, "snapshot": snapshot, "extent": extent, "zero_run": 0, "data": [[0, 16]],
            "zero": [],
        })
    }

    fn plan(path: &Path) -> OpenRepair {
        Store::plan_repair(path, &RepairOptions::default()).unwrap()
    }

    /// Every snapshot of a hostile image may show any number.
    #[test]
    fn of_many_lost_ranges_some_are_listed_and_the_others_counted() {
        const MANY: u32 = 40;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let lost = |at: u32| {
            json!({
                "entry": SPARE_BASE + at, "snapshot": 1, "extent": 2 * at, "zero_run": 1,
                "lost": true, "data": [], "zero": [],
            })
        };
        let geometry = make(&path, SIZE, 1, (0..MANY).map(lost).collect());
        let file = File::options().write(true).open(&path).unwrap();
        let at = geometry.block_address(RegionKind::Volumes, 0, 0) + 2000;
        file.write_all_at(&[1; 100], at).unwrap();
        let plan = plan(&path);
        let report = plan.report();
        assert_eq!(report.lost.len(), LOST_MAX);
        assert_eq!(report.lost.len() as u64 + report.lost_more, 2 * u64::from(MANY), "{report:?}");
        assert!(report.lost.iter().all(|range| range.length == EXTENT), "{:?}", report.lost);
    }

    /// Each extent of a run was looked at, and each of its blocks: the map of a large volume of which all
    /// is lost took minutes, and differences hours. Found by the fuzz target repair.
    #[test]
    fn long_runs_are_looked_at_as_one() {
        const LARGE: u64 = 64 << 40;
        const EXTENTS: u32 = (LARGE / EXTENT) as u32;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let run = |at: u32, snapshot: u32, extent: u32, count: u32, lost: bool| {
            json!({
                "entry": SPARE_BASE + at, "snapshot": snapshot, "extent": extent, "zero_run": count,
                "lost": lost, "data": [], "zero": [],
            })
        };
        // The older snapshot has lost all but an extent, the newer one is zeros but for its beginning.
        let lost = [(0, 5), (6, EXTENTS - 6)];
        let lost = (0..).zip(lost).map(|(at, (from, count))| run(at, 1, from, count, true));
        let zeros = run(2, 2, 8, EXTENTS - 8, false);
        let entries = lost.chain([data(3, 1, 5), zeros]).collect();
        make_with(&path, SIZE, LARGE, 2, entries);
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        let meta = store.inner.meta();
        let [older, newer] = [1, 2].map(crate::units::SnapshotId);
        let all = 0..LARGE / BLOCK_BYTES;
        let shown = |ranges: Ranges| -> Vec<_> {
            let ranges = ranges.into_clipped(0, LARGE).into_iter();
            ranges.map(|range| (range.offset / EXTENT, range.state)).collect()
        };
        use crate::info::RangeState::{Data, Zero};
        for (id, wanted) in [(older, vec![(0, Data)]), (newer, vec![(0, Data), (8, Zero)])] {
            let mut ranges = Ranges::new(9);
            assert_eq!(meta.map_step(id, all.clone(), &mut ranges).unwrap(), all.end);
            assert_eq!(shown(ranges), wanted);
        }
        for (from, to, wanted) in [
            // What is lost is not known to be the same; the one block that is not lost is.
            (Some(older), newer, vec![(0, Data), (6, Data), (8, Zero)]),
            (Some(newer), older, vec![(0, Data), (6, Data)]),
            (None, newer, vec![(0, Data)]),
        ] {
            let mut ranges = Ranges::new(9);
            assert_eq!(meta.diff_step(from, to, all.clone(), &mut ranges).unwrap(), all.end);
            assert_eq!(shown(ranges), wanted, "{from:?} {to:?}");
        }
    }

    /// What was behind the end was all over the volume: more ranges than there are spare entries to mark
    /// them, and the repair was refused.
    #[test]
    fn a_store_cut_off_is_repaired_with_few_spare_entries() {
        const LOST: u32 = 200;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        // Between those of the first half there is something that stays.
        let entries = (0..LOST).map(|at| data(600 + at, 1, 2 * at));
        let between = (0..LOST / 2).map(|at| data(at, 1, 2 * at + 1));
        let geometry = make(&path, SIZE, 1, entries.chain(between).collect());
        assert!(geometry.spares < LOST);
        File::options().write(true).open(&path).unwrap().set_len(SIZE / 2).unwrap();
        let plan = plan(&path);
        let steps = plan.report().steps.clone();
        assert!(steps.iter().all(|step| step.kind != RepairKind::Refused), "{steps:?}");
        plan.carry_out(&directory.path().join("repair")).unwrap();
        assert!(Store::check_path(&path).unwrap().is_clean());
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        for spec in ["v@s1", "v"] {
            let volume = store.volume(spec).unwrap();
            for extent in 0..2 * LOST {
                let read = volume.read_at(u64::from(extent) * EXTENT, &mut [0; 4096]);
                let is_lost = extent % 2 == 0;
                assert_eq!(read.is_err(), is_lost, "extent {extent} of {spec}: {read:?}");
            }
        }
    }

    /// A refusal after thousands of other steps was not told, and what could not be marked as lost was
    /// not: it would have read as what is below.
    #[test]
    fn a_refusal_is_told_after_however_many_steps() {
        const LAYERS: u32 = 70;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let entries = (0..LAYERS).map(|at| data(300 + at, 1 + at, at)).collect();
        let geometry = make(&path, SIZE / 2, LAYERS, entries);
        assert!(geometry.spares < LAYERS);
        File::options().write(true).open(&path).unwrap().set_len(SIZE / 4).unwrap();
        let plan = plan(&path);
        let steps = &plan.report().steps;
        let refused = |step: &&RepairStep| step.kind == RepairKind::Refused;
        let refused: Vec<_> = steps.iter().filter(refused).collect();
        assert!(refused.len() == 1 && refused[0].message.contains("no spare entry"), "{steps:?}");
        let error = plan.carry_out(&directory.path().join("repair")).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{error}");
    }
}
