//! Compares a store with the models of what it may hold.

use crate::content::{SECTOR, SECTORS, Tag, Tags, identify};
use crate::image;
use crate::layers;
use crate::model::{Content, Model};
use dbs_core::Store;
use dbs_core::info::{Labels, MapRange, RangeState, Severity, StoreInfo};
use dbs_core::store::uuid_text;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Names, sizes, flags, secrets and labels: what has to match as a whole.
type Shape = BTreeMap<String, (u64, bool, Option<bool>, BTreeMap<String, SnapshotShape>)>;

/// Size, protected, retired, labels.
type SnapshotShape = (u64, bool, bool, Labels);

/// Contents by volume and snapshot.
type Contents = BTreeMap<(String, Option<String>), Vec<Tags>>;

thread_local! {
    /// Blocks that were found to be a mix.
    static TORN: Cell<u64> = const { Cell::new(0) };
}

/// Blocks that the calling thread has found to be a mix, as the medium may leave them, since the last call.
#[must_use]
pub fn torn_seen() -> u64 {
    TORN.take()
}

/// How far content may lag behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allow {
    /// Not at all.
    Newest,
    /// Blocks may hold what was not yet flushed over.
    Older,
}

/// Reads the whole store and finds the model it agrees with. Returns its index and what was
/// read, for [`adopt`].
///
/// # Errors
/// How it differs from each of the `candidates`.
pub fn compare(
    store: &Store,
    candidates: &[&Model],
    allow: Allow,
) -> Result<(usize, Found), String> {
    let shape = store_shape(store)?;
    let mut report = String::new();
    let mut contents = None;
    let mut fitting = Vec::new();
    let uuid = store.info().uuid;
    for (index, model) in candidates.iter().enumerate() {
        // One that nobody gave it is random.
        let given = model.given.map(|byte| uuid_text(&[byte; 16]));
        if given.as_ref().is_some_and(|given| *given != uuid) || given.is_none() && is_given(&uuid)
        {
            let _ = write!(report, "\n  against candidate {index}: the uuid is {uuid}");
            continue;
        }
        let wanted = model_shape(model);
        if wanted != shape {
            let _ = write!(report, "\n  against candidate {index}: {}", differ(&shape, &wanted));
            continue;
        }
        if contents.is_none() {
            contents = Some(read_all(store, &shape)?);
        }
        let Some(found) = &contents else { continue };
        match compare_contents(model, found, allow) {
            Ok(()) => fitting.push(index),
            Err(message) => {
                let _ = write!(report, "\n  against candidate {index}: {message}");
            }
        }
    }
    // The same bytes may be shown by different layers, from which different things follow later.
    let index = match fitting[..] {
        [] => return Err(format!("the store holds none of what it may hold:{report}")),
        [one] => one,
        [first, ..] => {
            let found = layers::observe(store, candidates[first])?;
            let known = fitting.iter().find(|index| candidates[**index].built_of(&found));
            known.copied().unwrap_or(first)
        }
    };
    Ok((index, Found(contents.unwrap_or_default())))
}

/// What a store was found to hold.
#[derive(Debug, PartialEq, Eq)]
pub struct Found(Contents);

/// Makes `model`, which has the found shape, hold the found contents. It is `exact` if it could be
/// nothing else.
pub fn adopt(model: &mut Model, found: &Found, durable: bool, exact: bool) {
    for (name, volume) in &mut model.volumes {
        if volume.tree.is_some() {
            let of = |snap: Option<&str>| {
                let content = found.0.get(&(name.clone(), snap.map(str::to_owned)));
                content.map(Vec::as_slice)
            };
            if !exact {
                volume.fit_layers(of, durable);
            }
            continue;
        }
        if let Some(tags) = found.0.get(&(name.clone(), None)) {
            volume.head.adopt(tags, durable);
        }
    }
}

/// Runs the store's own checker and holds the figures of `info` against each other.
///
/// # Errors
/// The findings that say leak or corruption, or the figures that do not add up.
pub fn check(store: &Store) -> Result<(), String> {
    let report = store.check().map_err(|e| format!("check failed: {e}"))?;
    let bad: Vec<_> = report.findings.iter().filter(|f| f.severity >= Severity::Leak).collect();
    if !bad.is_empty() {
        return Err(format!("check found {bad:#?}"));
    }
    accounts(&store.info())
}

fn accounts(info: &StoreInfo) -> Result<(), String> {
    let used = info.allocated / info.extent_size;
    if used + info.extents_free + info.extents_pending != info.extents_total {
        return Err(format!("extents do not add up: {info:?}"));
    }
    Ok(())
}

/// Holds the map of each volume and snapshot, and the usage figures, against what is read there.
///
/// # Errors
/// The first range that says hole or zero over other bytes, or does not fit.
pub fn check_maps(store: &Store, model: &Model) -> Result<(), String> {
    for (name, volume) in &model.volumes {
        check_map(store, name, &volume.head)?;
        for (snap, snapshot) in &volume.snapshots {
            check_map(store, &format!("{name}@{snap}"), &snapshot.content)?;
            check_diff(store, name, snap, &snapshot.content, &volume.head)?;
        }
    }
    for volume in store.volumes(true) {
        let usage = volume.usage;
        if usage.exclusive + usage.shared != usage.referenced {
            return Err(format!("usage of {}: {usage:?}", volume.name));
        }
    }
    Ok(())
}

fn check_map(store: &Store, spec: &str, content: &Content) -> Result<(), String> {
    let size = content.sectors * SECTOR as u64;
    let failed = |e| format!("map of {spec}: {e}");
    let volume = store.volume(spec).map_err(failed)?;
    let mut next = 0;
    while next < size {
        let ranges = volume.map(next, size - next, 7).map_err(failed)?;
        if ranges.is_empty() {
            return Err(format!("map of {spec} stops at {next} of {size}"));
        }
        for range in ranges {
            if range.offset != next || range.length == 0 || range.offset + range.length > size {
                return Err(format!("map of {spec}: {range:?} does not follow {next}"));
            }
            if range.state != RangeState::Data && !all_zero(content, &range) {
                return Err(format!("map of {spec}: {range:?} reads as other than zeros"));
            }
            next = range.offset + range.length;
        }
    }
    Ok(())
}

/// What is written there; `None` where it may be anything.
fn sectors_of<'a>(
    content: &'a Content,
    range: &MapRange,
) -> impl Iterator<Item = Option<Tag>> + 'a {
    let first = (range.offset / SECTOR as u64) as usize;
    let end = ((range.offset + range.length) / SECTOR as u64) as usize;
    (first..end).map(|s| match content.blocks().get(s / SECTORS) {
        Some(block) => (!block.any).then_some(block.now[s % SECTORS]),
        None => Some(Tag::ZERO),
    })
}

fn all_zero(content: &Content, range: &MapRange) -> bool {
    sectors_of(content, range).flatten().all(|tag| tag == Tag::ZERO)
}

/// Whatever the difference leaves out is equal in both.
fn check_diff(
    store: &Store,
    name: &str,
    snap: &str,
    from: &Content,
    to: &Content,
) -> Result<(), String> {
    let size = to.sectors * SECTOR as u64;
    let ranges = match store.diff(name, Some(snap), None, 0, size) {
        Ok(ranges) => ranges,
        // A rollback or clone may have put them into different trees.
        Err(error) if error.kind() == dbs_core::ErrorKind::Invalid => return Ok(()),
        Err(error) => return Err(format!("diff of {name} against {snap}: {error}")),
    };
    let mut next = 0;
    let end = MapRange { offset: size, length: 0, state: RangeState::Hole };
    for range in ranges.iter().chain([&end]) {
        if range.offset < next {
            return Err(format!("diff of {name} against {snap}: {range:?} overlaps"));
        }
        let gap = MapRange { offset: next, length: range.offset - next, state: RangeState::Data };
        let mut both = sectors_of(from, &gap).zip(sectors_of(to, &gap));
        if !both.all(|(from, to)| from.is_none() || to.is_none() || from == to) {
            return Err(format!("diff of {name} against {snap} misses a change in {gap:?}"));
        }
        next = range.offset + range.length;
    }
    Ok(())
}

fn model_shape(model: &Model) -> Shape {
    let snapshots = |volume: &crate::model::Volume| {
        let shape = |s: &crate::model::Snapshot| {
            (s.content.sectors * SECTOR as u64, s.protected, s.retired, s.labels.clone())
        };
        volume.snapshots.iter().map(|(name, s)| (name.clone(), shape(s))).collect()
    };
    model
        .volumes
        .iter()
        .map(|(name, v)| {
            (name.clone(), (v.head.sectors * SECTOR as u64, v.rebuilding, v.secret, snapshots(v)))
        })
        .collect()
}

/// Whether [`Op::NewUuid`](crate::op::Op::NewUuid) gave the store this uuid.
fn is_given(uuid: &str) -> bool {
    let digits = uuid.replace('-', "");
    digits.as_bytes().chunks(2).all(|byte| Some(byte) == digits.as_bytes().get(..2))
}

fn store_shape(store: &Store) -> Result<Shape, String> {
    let mut shape = Shape::new();
    for volume in store.volumes(false) {
        let listed = store
            .snapshots(&volume.name, false)
            .map_err(|e| format!("listing the snapshots of {}: {e}", volume.name))?;
        let snapshots =
            listed.into_iter().map(|s| (s.name, (s.size, s.protected, s.retired, s.labels)));
        let secret = image::unlock(store, &volume);
        let about = (volume.size, volume.rebuilding, secret, snapshots.collect());
        if shape.insert(volume.name.clone(), about).is_some() {
            return Err(format!("volume {} is listed twice", volume.name));
        }
    }
    Ok(shape)
}

fn differ(found: &Shape, wanted: &Shape) -> String {
    for (name, volume) in found {
        match wanted.get(name) {
            None => return format!("volume {name} should not exist"),
            Some(expected) if expected != volume => {
                return format!("volume {name} is {volume:?}, not {expected:?}");
            }
            Some(_) => {}
        }
    }
    let missing = wanted.keys().find(|name| !found.contains_key(*name));
    missing.map_or_else(String::new, |name| format!("volume {name} is missing"))
}

fn read_all(store: &Store, shape: &Shape) -> Result<Contents, String> {
    let mut contents = Contents::new();
    let mut buf = Vec::new();
    for (name, (size, _, _, snapshots)) in shape {
        contents.insert((name.clone(), None), read(store, name, *size, &mut buf)?);
        for (snap, (size, ..)) in snapshots {
            let tags = read(store, &format!("{name}@{snap}"), *size, &mut buf)?;
            contents.insert((name.clone(), Some(snap.clone())), tags);
        }
    }
    Ok(contents)
}

fn read(store: &Store, spec: &str, size: u64, buf: &mut Vec<u8>) -> Result<Vec<Tags>, String> {
    let failed = |e| format!("reading {spec}: {e}");
    let volume = store.volume(spec).map_err(failed)?;
    if volume.size() != size {
        return Err(format!("{spec} opens with {} bytes, listed with {size}", volume.size()));
    }
    // What is not filled must not look like an answer: no sector begins like this.
    buf.resize(size as usize, 0);
    buf.chunks_exact_mut(SECTOR).for_each(|sector| sector[..8].fill(0xa5));
    volume.read_at(0, buf).map_err(failed)?;
    let mut tags = vec![Tags::default(); (size as usize).div_ceil(SECTOR * SECTORS)];
    for (i, sector) in buf.chunks_exact(SECTOR).enumerate() {
        let tag = identify(sector, i as u64).map_err(|e| format!("{spec} sector {i} holds {e}"))?;
        tags[i / SECTORS][i % SECTORS] = tag;
    }
    Ok(tags)
}

fn compare_contents(model: &Model, found: &Contents, allow: Allow) -> Result<(), String> {
    for ((name, snap), tags) in found {
        let Some(content) = model.content(name, snap.as_deref()) else {
            return Err(format!("{name} {snap:?} is not in the model"));
        };
        let older = allow == Allow::Older;
        for (i, (block, tags)) in content.blocks().iter().zip(tags).enumerate() {
            if block.allows(tags, older) {
                continue;
            }
            if older && model.tears && block.allows_sectors(tags) {
                TORN.set(TORN.get() + 1);
            } else {
                let snap = snap.as_deref().map_or(String::new(), |s| format!("@{s}"));
                let or = match older && !block.older.is_empty() {
                    true => format!(" or one of {:?}", block.older),
                    false => String::new(),
                };
                return Err(format!(
                    "block {i} of {name}{snap} holds {tags:?}, not {:?}{or}",
                    block.now
                ));
            }
        }
    }
    Ok(())
}
