//! Copying an image into a store: every volume, its snapshots oldest first, its head last.
//!
//! The prototype copied a whole extent on the first write after a snapshot, so most blocks of a
//! snapshot's extents equal their parent's. Only those that differ are written: the copy takes the
//! space that the changes are worth.
//!
//! Volumes that share a part of their chain become clones. The one exception is a volume on top
//! of a snapshot that is only known as another's writable head: it is copied whole.

use super::layout::{BLOCK, EXTENT};
use super::tables::Extent;
use super::{Image, Snapshot, Volume};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::NAME_MAX_BYTES;
use crate::meta::names;
use crate::store::{SnapshotOptions, Store};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use unicode_normalization::UnicodeNormalization;

/// Label that keeps a snapshot's id in the image.
const ID_LABEL: &str = "v1.id";
/// Label that keeps its creation time, in seconds since the Unix epoch.
const CREATED_LABEL: &str = "v1.created";

/// What an upgrade made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeReport {
    /// Volumes in the order they were made.
    pub volumes: Vec<UpgradedVolume>,
    /// Damage of the image that was passed over.
    pub warnings: Vec<String>,
}

/// A volume made by an upgrade.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradedVolume {
    /// Its name in the image.
    pub old_name: String,
    /// Its name in the store; another where the old one is taken or not allowed.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Snapshots made, oldest first.
    pub snapshots: Vec<String>,
    /// The snapshot it was cloned from, as `volume@snapshot`: what it shares is not copied.
    pub cloned_from: Option<String>,
    /// It shares a part of its chain with another volume in the image, but no longer does: that
    /// part was copied.
    pub flat_copy: bool,
    /// Bytes of data written.
    pub written: u64,
}

/// Copies all volumes of `image` into `store`. `progress(done, total)`, in bytes looked at, is
/// called after each extent and stops the upgrade by returning false.
///
/// A volume is rebuilding until all of it is there. What went wrong half way leaves the volumes made so far
/// in the store: begin again with a new one.
///
/// # Errors
/// `Corrupt` if a chain or an extent of the image is damaged (chains are checked before anything
/// is written); `Exists` if the store has a volume of that name; `Interrupted`; those of the store.
pub fn upgrade(
    image: &Image,
    store: &Store,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<UpgradeReport> {
    run(image, store, progress)
}

/// A volume to be made.
pub(super) struct NewVolume<'a> {
    pub name: &'a str,
    pub size: u64,
    /// If it is known.
    pub created_ns: Option<u64>,
}

/// What an upgrade needs of a store.
pub(super) trait Target {
    /// Makes it incomplete.
    fn create_volume(&self, new: &NewVolume<'_>) -> Result<()>;
    /// Clones and, where the sizes differ, resizes; incomplete as well.
    fn clone_volume(&self, volume: &str, snapshot: &str, new: &NewVolume<'_>) -> Result<()>;
    fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<()>;
    fn open(&self, volume: &str) -> Result<Box<dyn TargetVolume>>;
    /// Says that a volume is complete, and makes it durable.
    fn complete(&self, volume: &str) -> Result<()>;
}

/// A volume being filled.
pub(super) trait TargetVolume {
    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()>;
    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()>;
}

impl Target for Store {
    fn create_volume(&self, new: &NewVolume<'_>) -> Result<()> {
        self.create_volume_of(new.name, new.size, new.created_ns, true).map(drop)
    }

    fn clone_volume(&self, volume: &str, snapshot: &str, new: &NewVolume<'_>) -> Result<()> {
        let made = self.clone_volume_of(volume, snapshot, new.name, new.created_ns, true)?;
        if made.size == new.size { Ok(()) } else { self.resize_volume(new.name, new.size) }
    }

    fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<()> {
        Store::create_snapshot(self, volume, name, options).map(drop)
    }

    fn open(&self, volume: &str) -> Result<Box<dyn TargetVolume>> {
        Ok(Box::new(self.volume(volume)?))
    }

    fn complete(&self, volume: &str) -> Result<()> {
        self.flush()?;
        self.set_rebuilding(volume, false)
    }
}

impl TargetVolume for crate::Volume {
    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        crate::Volume::write_at(self, offset, buf, false)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        crate::Volume::write_zeroes(self, offset, length, false)
    }
}

pub(super) fn run(
    image: &Image,
    target: &dyn Target,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<UpgradeReport> {
    let plans = plan(image)?;
    let total = plans.iter().flat_map(|plan| &plan.points);
    let total = total.map(|point| image.tables.extents(point.id).len() as u64 * EXTENT).sum();
    let mut copy = Copy {
        image,
        target,
        progress,
        done: 0,
        total,
        old: vec![0; EXTENT as usize],
        new: vec![0; EXTENT as usize],
    };
    let mut report = UpgradeReport { volumes: Vec::new(), warnings: image.warnings().to_vec() };
    for plan in &plans {
        let old_name = &plan.report.old_name;
        let made = copy.volume(plan).map_err(|e| e.context(format!("volume `{old_name}`")))?;
        report.volumes.push(made);
    }
    Ok(report)
}

/// How one volume will be made.
struct Plan {
    /// The report so far: nothing is written yet.
    report: UpgradedVolume,
    /// When the volume was made, if that is known.
    created_ns: Option<u64>,
    /// What it is cloned from.
    base: Option<Made>,
    /// What is copied on top, oldest first: snapshots, and last the head.
    points: Vec<Point>,
}

/// A snapshot of the image that is one of the store.
#[derive(Clone)]
struct Made {
    id: u16,
    volume: String,
    snapshot: String,
}

/// One state of a volume to copy.
struct Point {
    id: u16,
    /// Name and options of the snapshot to take of it; none for the head.
    snapshot: Option<(String, SnapshotOptions)>,
}

/// Decides what becomes of each volume. Longest chains come first, so that a head on which
/// another volume was built is a snapshot of that one by the time its own volume is made.
fn plan(image: &Image) -> Result<Vec<Plan>> {
    let mut volumes = Vec::new();
    for volume in image.volumes() {
        let context = format!("volume `{}`", volume.name);
        // The view is made only to find damage before anything is written.
        image.view(volume.head).map_err(|e| e.context(&context))?;
        // Its length alone: of many volumes on one long chain, all chains would take a gigabyte.
        let length = image.chain(volume.head).map_err(|e| e.context(&context))?.len();
        volumes.push((volume, length));
    }
    volumes.sort_by_key(|(_, length)| usize::MAX - length);
    let mut names = BTreeSet::new();
    let mut made = BTreeMap::new();
    let mut seen = BTreeSet::new();
    volumes
        .into_iter()
        .map(|(volume, _)| {
            let mut chain = image.chain(volume.head)?;
            chain.reverse();
            let mut plan = plan_volume(&volume, &chain, &mut names, &mut made, &mut seen);
            plan.created_ns = Some(image.created_ns(&volume)).filter(|created| *created > 0);
            Ok(plan)
        })
        .collect()
}

fn plan_volume(
    volume: &Volume,
    chain: &[Snapshot],
    names: &mut BTreeSet<String>,
    made: &mut BTreeMap<u16, Made>,
    seen: &mut BTreeSet<u16>,
) -> Plan {
    let name = unique(&allowed_name(volume), names);
    let shared = chain.iter().take_while(|s| made.contains_key(&s.id)).count();
    let base = shared.checked_sub(1).and_then(|last| made.get(&chain[last].id)).cloned();
    let flat_copy = chain[shared..].iter().any(|s| seen.contains(&s.id));
    let mut taken = BTreeSet::new();
    let mut points = Vec::new();
    let mut last_ns = 0;
    for snapshot in &chain[shared..] {
        seen.insert(snapshot.id);
        if snapshot.id == volume.head {
            points.push(Point { id: snapshot.id, snapshot: None });
            continue;
        }
        let mut snapshot_name = snapshot.name();
        if !taken.insert(snapshot_name.clone()) {
            snapshot_name = unique(&format!("v1-{}", snapshot.id), &mut taken);
        }
        let here = Made { id: snapshot.id, volume: name.clone(), snapshot: snapshot_name.clone() };
        made.entry(snapshot.id).or_insert(here);
        points.push(Point {
            id: snapshot.id,
            snapshot: Some((snapshot_name, snapshot_options(snapshot, &mut last_ns))),
        });
    }
    let report = UpgradedVolume {
        old_name: volume.name.clone(),
        name,
        size: volume.size,
        cloned_from: base.as_ref().map(|made| format!("{}@{}", made.volume, made.snapshot)),
        flat_copy,
        ..UpgradedVolume::default()
    };
    Plan { report, created_ns: None, base, points }
}

/// Times of the image are of seconds; those of a chain ascend, so that it is listed in its order.
fn snapshot_options(snapshot: &Snapshot, last_ns: &mut u64) -> SnapshotOptions {
    let created_ns = Some(snapshot.created_ns()).filter(|created| *created > 0);
    let created_ns = created_ns.map(|created| created.max(*last_ns + 1));
    *last_ns = created_ns.unwrap_or(*last_ns);
    let mut labels = snapshot.labels.clone();
    labels.insert(ID_LABEL.into(), snapshot.id.to_string());
    labels.insert(CREATED_LABEL.into(), snapshot.created.to_string());
    SnapshotOptions { labels, system: !snapshot.user_created, created_ns, ..Default::default() }
}

/// The name, if a store allows it.
pub(super) fn usable_name(name: &str) -> Option<String> {
    names::check("a", name).is_ok().then(|| name.to_owned())
}

/// The volume's name, or the closest to it that a store allows.
fn allowed_name(volume: &Volume) -> String {
    let forbidden = |c: char| names::is_hidden(c) || c == '@';
    let name: String = volume.name.trim().replace(forbidden, "_").nfc().collect();
    usable_name(&name).unwrap_or_else(|| format!("volume-{}", volume.slot))
}

/// `name`, or `name-2`, `name-3`, ... if it is taken.
fn unique(name: &str, taken: &mut BTreeSet<String>) -> String {
    let stem: String = name.chars().take(NAME_MAX_BYTES / 8).collect();
    let mut candidate = name.to_owned();
    let mut number = 2;
    while !taken.insert(candidate.clone()) {
        candidate = format!("{stem}-{number}");
        number += 1;
    }
    candidate
}

/// The copy under way.
struct Copy<'a> {
    image: &'a Image,
    target: &'a dyn Target,
    progress: &'a mut dyn FnMut(u64, u64) -> bool,
    done: u64,
    total: u64,
    /// An extent before, and after, the snapshot being copied.
    old: Vec<u8>,
    new: Vec<u8>,
}

impl Copy<'_> {
    fn volume(&mut self, plan: &Plan) -> Result<UpgradedVolume> {
        let mut report = plan.report.clone();
        let mut current = BTreeMap::new();
        let created_ns = plan.created_ns;
        let new = NewVolume { name: &report.name, size: report.size, created_ns };
        match &plan.base {
            None => self.target.create_volume(&new)?,
            Some(Made { id, volume, snapshot }) => {
                self.target.clone_volume(volume, snapshot, &new)?;
                let view = self.image.view(*id)?;
                current.extend(view.extents().iter().map(|e| (e.logical, *e)));
            }
        }
        let volume = self.target.open(&report.name)?;
        for point in &plan.points {
            for &extent in self.image.tables.extents(point.id) {
                let before = current.insert(extent.logical, extent);
                report.written += self.extent(&*volume, before, extent)?;
                self.done += EXTENT;
                if !(self.progress)(self.done, self.total) {
                    return Err(Error::new(ErrorKind::Interrupted, "the upgrade was stopped"));
                }
            }
            if let Some((name, options)) = &point.snapshot {
                self.target.create_snapshot(&report.name, name, options)?;
                report.snapshots.push(name.clone());
            }
        }
        self.target.complete(&report.name)?;
        Ok(report)
    }

    /// Writes what differs between two states of an extent; returns the bytes of data written.
    fn extent(
        &mut self,
        volume: &dyn TargetVolume,
        before: Option<Extent>,
        after: Extent,
    ) -> Result<u64> {
        match before {
            None => self.old.fill(0),
            Some(extent) => self.image.read_extent(extent, 0, &mut self.old)?,
        }
        self.image.read_extent(after, 0, &mut self.new)?;
        let start = u64::from(after.logical) * EXTENT;
        let mut written = 0;
        for (change, range) in changes(&self.old, &self.new) {
            let offset = start + range.start as u64;
            let data = &self.new[range];
            match change {
                Change::None => {}
                Change::Zero => volume.write_zeroes(offset, data.len() as u64)?,
                Change::Data => {
                    volume.write_at(offset, data)?;
                    written += data.len() as u64;
                }
            }
        }
        Ok(written)
    }
}

/// What became of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Zero,
    Data,
}

/// Runs of blocks that changed alike.
fn changes(old: &[u8], new: &[u8]) -> Vec<(Change, std::ops::Range<usize>)> {
    const ZERO: [u8; BLOCK as usize] = [0; BLOCK as usize];
    let mut runs: Vec<(Change, std::ops::Range<usize>)> = Vec::new();
    let blocks = old.chunks(BLOCK as usize).zip(new.chunks(BLOCK as usize));
    for (index, (old, new)) in blocks.enumerate() {
        let change = if old == new {
            Change::None
        } else if new == ZERO {
            Change::Zero
        } else {
            Change::Data
        };
        let start = index * BLOCK as usize;
        match runs.last_mut() {
            Some((last, range)) if *last == change => range.end += new.len(),
            _ => runs.push((change, start..start + new.len())),
        }
    }
    runs
}
