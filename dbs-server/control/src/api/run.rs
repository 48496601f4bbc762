//! Runs a request on an open store.

use super::usage;
use super::{
    CELLS, CELLS_MAX, Deleted, MARKER, OWN_LABELS, Progress, RANGES_MAX, Ranges, Request, Trimmed,
    Vacuumed,
};
use dbs_core::info::{Labels, MapRange, SnapshotInfo, VolumeInfo, VolumeLimits};
use dbs_core::store::{Expected, SnapshotOptions, parse_uuid};
use dbs_core::volume::Observer;
use dbs_core::{Error, ErrorKind, Result, Store};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Steps of background work between two calls of the progress function.
const WORK_STEPS: u64 = 64;
/// Bytes of a volume compared by one call: bounds the ranges one call can return.
const DIFF_WINDOW_BYTES: u64 = 1 << 30;

/// What a vacuum leaves free unless it is told: this part of what is in use.
const KEEP_PART: u64 = 16;
/// At least this much.
const KEEP_MIN_BYTES: u64 = 64 << 20;

/// The burst of a volume that gets its first limit.
const BURST_SECONDS: u32 = 1;

/// Longest rest of a scrub that is held back.
const SCRUB_REST: Duration = Duration::from_millis(100);

/// Rest of background work that waits for reads.
const WORK_REST: Duration = Duration::from_millis(10);

/// A change of labels or limits reads and replaces them all: two such changes must not interleave.
static ATTRIBUTES: Mutex<()> = Mutex::new(());

/// Runs `request` on `store` and returns its result as JSON.
///
/// `progress` is called now and then by long commands; when it returns `false` the command stops
/// at the next safe point.
///
/// # Errors
/// Those of the store; `Interrupted` if `progress` stopped it.
pub fn execute(
    store: &Store,
    request: &Request,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Value> {
    use Request as R;
    match request {
        R::Info => json(&store.info()),
        R::Grow { size } => store.grow(*size).and_then(|()| json(&store.info())),
        R::Vacuum { keep } => vacuum(store, *keep, progress),
        R::Check => json(&store.check()?),
        R::Scrub { rate, restart } => scrub(store, *rate, *restart, progress),
        R::Dump => dump(store),
        R::Flush => store.flush().map(|()| Value::Null),
        R::Work { steps } => json(&store.work(*steps)?),
        R::VolumeTrim => trim(store, progress),
        R::VolumeRelease { volume, dry_run } => release(store, volume, *dry_run, progress),
        R::VolumeCompress { volume, snapshot } => {
            compress(store, volume, snapshot.as_deref(), progress)
        }
        // For who wants a value, however long.
        R::VolumeList { .. } | R::SnapshotList { .. } => {
            let mut text = Vec::new();
            list(store, request, &mut text, progress)?;
            serde_json::from_slice(&text).map_err(not_encoded)
        }
        R::VolumeShow { volume, usage: true } => {
            let usage = usage::of(store, volume, None, progress)?;
            json(&VolumeInfo { usage, ..find_volume(store, volume)? })
        }
        R::VolumeShow { volume, usage: false } => without_usage(&find_volume(store, volume)?),
        R::VolumeCreate { volume, size, rebuilding: false } => {
            without_usage(&store.create_volume(volume, *size)?)
        }
        R::VolumeCreate { volume, size, rebuilding: true } => {
            without_usage(&store.create_rebuilding(volume, *size)?)
        }
        R::VolumeComplete { volume, uuid } => {
            store.set_rebuilding_if(volume, false, &expected(uuid.as_deref())?)?;
            without_usage(&find_volume(store, volume)?)
        }
        R::VolumeRename { volume, new } => {
            store.rename_volume(volume, new)?;
            without_usage(&find_volume(store, new)?)
        }
        R::VolumeResize { volume, size, shrink, uuid } => {
            resize(store, volume, *size, *shrink, &expected(uuid.as_deref())?)
        }
        R::VolumeSet { volume, iops, bandwidth, burst_seconds } => {
            set(store, volume, (*iops, *bandwidth, *burst_seconds))
        }
        R::VolumeDelete { volume, uuid, rebuilding } => {
            let expected = Expected { rebuilding: *rebuilding, ..expected(uuid.as_deref())? };
            store.delete_volume_if(volume, &expected)?;
            json(&Deleted { deleted: volume.clone() })
        }
        R::VolumeClone { volume, snapshot, new, rebuilding: false } => {
            without_usage(&store.clone_volume(volume, snapshot, new)?)
        }
        R::VolumeClone { volume, snapshot, new, rebuilding: true } => {
            without_usage(&store.clone_rebuilding(volume, snapshot, new)?)
        }
        R::VolumeFlatten { volume } => {
            store.flatten(volume, &mut |done, total| progress(Progress { done, total }))?;
            without_usage(&find_volume(store, volume)?)
        }
        R::VolumeChildren { volume, snapshot } => {
            json(&store.children(volume, snapshot.as_deref())?)
        }
        R::VolumeDu { volume, snapshot } => {
            json(&usage::of(store, volume, snapshot.as_deref(), progress)?)
        }
        other => match execute_encryption(store, other) {
            Some(done) => done,
            None => execute_snapshot(store, other, progress),
        },
    }
}

/// What a request about encryption comes to; none if it is about something else.
fn execute_encryption(store: &Store, request: &Request) -> Option<Result<Value>> {
    use Request as R;
    let (volume, done) = match request {
        R::VolumeCreateEncrypted { volume, size, secret, rebuilding: false } => {
            (volume, store.create_encrypted(volume, *size, &secret.0).map(drop))
        }
        R::VolumeCreateEncrypted { volume, size, secret, rebuilding: true } => {
            (volume, store.create_encrypted_rebuilding(volume, *size, &secret.0).map(drop))
        }
        R::VolumeCreateWrapped { volume, size, key } => {
            (volume, store.create_wrapped_rebuilding(volume, *size, key).map(drop))
        }
        R::VolumeWrappedKey { volume } => {
            return Some(store.wrapped_key(volume).and_then(|key| json(&key)));
        }
        R::VolumeUnlock { volume, secret } => (volume, store.unlock(volume, &secret.0)),
        R::VolumeLock { volume } => (volume, store.lock(volume)),
        R::VolumeRekey { volume, secret, new } => (volume, store.rekey(volume, &secret.0, &new.0)),
        _ => return None,
    };
    Some(done.and_then(|()| without_usage(&find_volume(store, volume)?)))
}

fn execute_snapshot(
    store: &Store,
    request: &Request,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Value> {
    use Request as R;
    match request {
        R::SnapshotCreate { volume, snapshot, labels, system, rebuilding } => {
            if rebuilding.is_none() {
                refuse_incomplete(store, volume, "its snapshot would be incomplete, too")?;
                // A receive always says whether the volume is being filled.
                refuse_marker(snapshot)?;
                refuse_own(labels)?;
            }
            let options = SnapshotOptions {
                labels: labels.clone(),
                system: *system,
                rebuilding: *rebuilding,
                ..Default::default()
            };
            without_usage(&store.create_snapshot(volume, snapshot, &options)?)
        }
        R::SnapshotShow { volume, snapshot, usage: true } => {
            let usage = usage::of(store, volume, Some(snapshot), progress)?;
            json(&SnapshotInfo { usage, ..find_snapshot(store, volume, snapshot)? })
        }
        R::SnapshotShow { volume, snapshot, usage: false } => {
            without_usage(&find_snapshot(store, volume, snapshot)?)
        }
        R::SnapshotRename { volume, snapshot, new } => {
            if snapshot == MARKER {
                refuse_incomplete(store, volume, "the snapshot tells how far it was received")?;
            }
            refuse_marker(new)?;
            store.rename_snapshot(volume, snapshot, new)?;
            without_usage(&find_snapshot(store, volume, new)?)
        }
        R::SnapshotDelete { volume, snapshot, uuid } => {
            if snapshot == MARKER {
                refuse_incomplete(store, volume, "the snapshot tells how far it was received")?;
            }
            store.delete_snapshot_if(volume, snapshot, &expected(uuid.as_deref())?)?;
            json(&Deleted { deleted: spec(volume, Some(snapshot)) })
        }
        R::SnapshotRollback { volume, snapshot, uuid } => {
            roll_back(store, volume, snapshot, &expected(uuid.as_deref())?)
        }
        R::SnapshotProtect { volume, snapshot } => protect(store, volume, snapshot, true),
        R::SnapshotUnprotect { volume, snapshot } => protect(store, volume, snapshot, false),
        R::SnapshotLabel { volume, snapshot, set, remove } => {
            label(store, volume, snapshot, set, remove)
        }
        // Nobody is connected to a store that is not served.
        R::ClientList { .. } => Ok(Value::Array(Vec::new())),
        R::ClientKick { client } => Err(Error::not_found(format!(
            "no NBD client has the number {client}: the store is not served"
        ))),
        R::Top => Err(Error::unsupported("the store is not served, so there is nothing to watch")),
        R::DeviceAttach { .. } | R::DeviceDetach { .. } | R::DeviceList => {
            Err(Error::unsupported("block devices are made by the server of a store: `dbs serve`"))
        }
        map => execute_map(store, map),
    }
}

fn execute_map(store: &Store, request: &Request) -> Result<Value> {
    use Request as R;
    match request {
        R::SpaceMap { offset, length, cells } => {
            let cells = cells.unwrap_or(CELLS).min(CELLS_MAX);
            json(&store.space_map(*offset, *length, cells)?)
        }
        R::SpaceOwners { offset, length } => json(&store.space_owners(*offset, *length)?),
        R::VolumeMap { volume, snapshot, offset, length } => {
            map(store, &spec(volume, snapshot.as_deref()), *offset, *length)
        }
        R::VolumeDiff { volume, from, to, offset, length } => {
            diff(store, volume, from.as_deref(), to.as_deref(), *offset, *length)
        }
        other => Err(Error::unsupported(format!("no command {other:?}"))),
    }
}

fn json(value: &impl Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(not_encoded)
}

fn not_encoded(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Io, format!("encoding a result as JSON: {error}"))
}

/// As [`execute`], of a [list](Request::is_list), written as text: as a value it would take many times the memory.
///
/// # Errors
/// As there, and those of `out`; `Unsupported` if it is no list.
pub fn list(
    store: &Store,
    request: &Request,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<()> {
    match request {
        Request::VolumeList { usage } => {
            Items(&usage::volumes(store, *usage, progress)?, *usage).write(out)
        }
        Request::SnapshotList { volume, usage } => {
            Items(&usage::snapshots(store, volume, *usage, progress)?, *usage).write(out)
        }
        other => Err(Error::unsupported(format!("{other:?} lists nothing"))),
    }
}

/// A list whose items have a `usage` only if it was asked for.
struct Items<'a, T>(&'a [T], bool);

impl<T: Serialize> Items<'_, T> {
    fn write(&self, out: &mut dyn Write) -> Result<()> {
        serde_json::to_writer(out, self).map_err(|e| Error::io(e.into(), "writing a list"))
    }
}

impl<T: Serialize> Serialize for Items<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let Self(items, usage) = self;
        let item = |item| if *usage { json(item) } else { without_usage(item) };
        // What has names and numbers alone can be encoded.
        serializer.collect_seq(items.iter().map(|it| item(it).unwrap_or_default()))
    }
}

/// A volume or snapshot whose usage was not computed.
fn without_usage(item: &impl Serialize) -> Result<Value> {
    let mut item = json(item)?;
    item.as_object_mut().map(|object| object.remove("usage"));
    Ok(item)
}

/// Looks at a volume. A name that is none, as `volume@snapshot`, is refused as such.
fn observe(store: &Store, volume: &str) -> Result<Observer> {
    store.volume_size(volume)?;
    store.observe(volume)
}

/// A volume without its usage, which takes a walk over every layer.
fn find_volume(store: &Store, name: &str) -> Result<VolumeInfo> {
    observe(store, name)?.volume_info()
}

/// A snapshot without its usage.
fn find_snapshot(store: &Store, volume: &str, name: &str) -> Result<SnapshotInfo> {
    let found = observe(store, volume)?.snapshot(name)?.snapshot_info()?;
    found.ok_or_else(|| Error::not_found(format!("no snapshot `{volume}@{name}` in this store")))
}

/// Refuses what makes no sense while a volume is being filled.
fn refuse_incomplete(store: &Store, volume: &str, why: &str) -> Result<()> {
    if !find_volume(store, volume)?.rebuilding {
        return Ok(());
    }
    Err(Error::busy(format!(
        "volume `{volume}` is incomplete, and {why}: finish the import or receive that fills it, or \
         give it up (delete the volume, or roll it back)"
    )))
}

/// What a request that says a uuid expects.
fn expected(uuid: Option<&str>) -> Result<Expected> {
    Ok(Expected { uuid: uuid.map(parse_uuid).transpose()?, rebuilding: false })
}

fn roll_back(store: &Store, volume: &str, snapshot: &str, to: &Expected) -> Result<Value> {
    let before = find_volume(store, volume)?;
    let received = before.rebuilding && store.snapshots(volume, false)?.iter().any(is_marker);
    if received && before.open {
        return Err(Error::busy(format!("volume `{volume}` is being received: stop that first")));
    }
    if received && snapshot == MARKER {
        // If this is cut off behind the rollback, nobody may take what is gone for received.
        let marker = find_snapshot(store, volume, MARKER)?;
        let (mut labels, uuid) = (marker.labels, parse_uuid(&marker.uuid)?);
        for value in labels.values_mut() {
            if let Some((stream, _)) = value.rsplit_once(':') {
                *value = format!("{stream}:0");
            }
        }
        // Another one than is meant keeps what it says, as it is not rolled back.
        if to.uuid.is_none_or(|meant| meant == uuid) {
            store.set_labels(volume, MARKER, &labels)?;
        }
    }
    store.rollback_if(volume, snapshot, to)?;
    if received {
        // What was received in part is gone, and the snapshot was complete. Of another volume, nobody knows.
        store.set_rebuilding_if(volume, false, &expected(Some(&before.uuid))?)?;
    }
    without_usage(&find_volume(store, volume)?)
}

/// Refuses a snapshot that would be taken for the marker of a volume that is being received.
fn refuse_marker(snapshot: &str) -> Result<()> {
    if snapshot != MARKER {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a snapshot `{MARKER}` marks a volume that is being received: choose another name"
    )))
}

/// Refuses labels that would be taken for those of a receive.
fn refuse_own(labels: &Labels) -> Result<()> {
    if !labels.keys().any(|key| key.starts_with(OWN_LABELS)) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "labels that begin with `{OWN_LABELS}` are those of `dbs` itself: choose another key"
    )))
}

fn is_marker(snapshot: &SnapshotInfo) -> bool {
    snapshot.name == MARKER
}

/// The marker of a volume of which something durable was received; of any other it may still get its size.
fn is_partly_received(snapshot: &SnapshotInfo) -> bool {
    is_marker(snapshot) && snapshot.labels.values().all(|token| !token.ends_with(":0"))
}

fn spec(volume: &str, snapshot: Option<&str>) -> String {
    snapshot.map_or_else(|| volume.to_owned(), |snapshot| format!("{volume}@{snapshot}"))
}

fn vacuum(
    store: &Store,
    keep: Option<u64>,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Value> {
    let before = store.info();
    // Nothing makes a store grow by itself: who writes to it next finds this.
    let keep = keep.unwrap_or((before.allocated / KEEP_PART).max(KEEP_MIN_BYTES));
    let after =
        store.vacuum_keeping(keep, &mut |done, total| progress(Progress { done, total }))?;
    let now = store.info();
    json(&Vacuumed { before: before.size, after, free: now.free })
}

fn scrub(
    store: &Store,
    rate: Option<u64>,
    restart: bool,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Value> {
    let begun = Instant::now();
    json(&store.scrub(restart, &mut |report| {
        let told = Progress { done: report.done, total: report.total };
        let mut go_on = progress(told);
        let due = rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(report.checked as f64 / rate.max(1) as f64)
        });
        // In short rests, so that it can be stopped in each.
        while let Some(rest) = due.checked_sub(begun.elapsed()).filter(|_| go_on) {
            thread::sleep(rest.min(SCRUB_REST));
            go_on = progress(told);
        }
        go_on
    })?)
}

fn dump(store: &Store) -> Result<Value> {
    let mut text = Vec::new();
    store.dump(&mut text)?;
    serde_json::from_slice(&text)
        .map_err(|e| Error::new(ErrorKind::Io, format!("reading the dump back: {e}")))
}

fn trim(store: &Store, progress: &mut dyn FnMut(Progress) -> bool) -> Result<Value> {
    let before = store.info().allocated;
    store.retry_put_off();
    let mut done = 0;
    loop {
        // None while a flatten or a vacuum runs.
        let report = store.try_work(WORK_STEPS)?;
        let remaining = report.map_or(1, |report| report.remaining);
        done += report.map_or(0, |report| report.done);
        if remaining == 0 {
            break;
        }
        if report.is_none_or(|report| report.waits) {
            // For its end or for reads, which it must not ask about all the time.
            thread::sleep(WORK_REST);
        }
        if !progress(Progress { done, total: done + remaining }) {
            return Err(Error::new(
                ErrorKind::Interrupted,
                format!("stopped after {done} steps; the rest is done next time"),
            ));
        }
    }
    let allocated = store.info().allocated;
    json(&Trimmed { done, freed: before.saturating_sub(allocated), allocated })
}

fn release(
    store: &Store,
    volume: &str,
    dry_run: bool,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Value> {
    // Not a snapshot.
    store.volume_size(volume)?;
    let volume = store.complete_volume(volume)?;
    json(&volume.trim(dry_run, &mut |report| {
        progress(Progress { done: report.done, total: report.total })
    })?)
}

fn compress(
    store: &Store,
    volume: &str,
    snapshot: Option<&str>,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Value> {
    // Not a snapshot.
    store.volume_size(volume)?;
    let spec = snapshot.map_or_else(|| volume.to_owned(), |name| format!("{volume}@{name}"));
    json(&store.compress(&spec, &mut |report| {
        progress(Progress { done: report.done, total: report.total })
    })?)
}

fn resize(
    store: &Store,
    volume: &str,
    size: u64,
    shrink: bool,
    expected: &Expected,
) -> Result<Value> {
    // Whoever goes on with the stream does so behind what was received, and takes that to be there.
    if store.snapshots(volume, false)?.iter().any(is_partly_received) {
        refuse_incomplete(store, volume, "a part of its content was received with this size")?;
    }
    store.resize_volume_if(volume, size, shrink, expected)?;
    without_usage(&find_volume(store, volume)?)
}

fn set(
    store: &Store,
    volume: &str,
    (iops, bandwidth, burst): (Option<u32>, Option<u64>, Option<u32>),
) -> Result<Value> {
    let _one_at_a_time = ATTRIBUTES.lock().unwrap_or_else(PoisonError::into_inner);
    let before = find_volume(store, volume)?.limits;
    let burst_before = if before.is_some() { before.burst_seconds } else { BURST_SECONDS };
    let limits = VolumeLimits {
        iops: iops.unwrap_or(before.iops),
        bandwidth: bandwidth.unwrap_or(before.bandwidth),
        burst_seconds: burst.unwrap_or(burst_before),
    };
    if burst.is_some() && limits.is_none() {
        return Err(Error::invalid(format!(
            "volume {volume} has no limit that a burst could be of: give one with it"
        )));
    }
    store.set_limits(volume, limits)?;
    without_usage(&find_volume(store, volume)?)
}

fn protect(store: &Store, volume: &str, snapshot: &str, protected: bool) -> Result<Value> {
    store.set_protected(volume, snapshot, protected)?;
    without_usage(&find_snapshot(store, volume, snapshot)?)
}

fn label(
    store: &Store,
    volume: &str,
    snapshot: &str,
    set: &Labels,
    remove: &[String],
) -> Result<Value> {
    if snapshot != MARKER {
        refuse_own(set)?;
    }
    let _one_at_a_time = ATTRIBUTES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut labels = find_snapshot(store, volume, snapshot)?.labels;
    labels.retain(|key, _| !remove.contains(key));
    labels.extend(set.clone());
    store.set_labels(volume, snapshot, &labels)?;
    without_usage(&find_snapshot(store, volume, snapshot)?)
}

/// Start and end of the part asked for, cut to the size.
fn bounds(size: u64, offset: u64, length: Option<u64>) -> (u64, u64) {
    let end = length.map_or(size, |length| offset.saturating_add(length).min(size));
    (offset.min(end), end)
}

fn map(store: &Store, spec: &str, offset: u64, length: Option<u64>) -> Result<Value> {
    let volume = store.volume(spec)?;
    let (start, end) = bounds(volume.size(), offset, length);
    let mut ranges = Vec::new();
    if start < end {
        ranges = volume.map(start, end - start, RANGES_MAX)?;
    }
    let reached = ranges.last().map_or(end, |last| last.offset + last.length);
    json(&Ranges { ranges, next: (reached < end).then_some(reached) })
}

fn diff(
    store: &Store,
    volume: &str,
    from: Option<&str>,
    to: Option<&str>,
    offset: u64,
    length: Option<u64>,
) -> Result<Value> {
    let size = match to {
        Some(snapshot) => find_snapshot(store, volume, snapshot)?.size,
        None => find_volume(store, volume)?.size,
    };
    let (mut start, end) = bounds(size, offset, length);
    let mut answer = Ranges::default();
    while start < end {
        let window = DIFF_WINDOW_BYTES.min(end - start);
        for range in store.diff(volume, from, to, start, window)? {
            if !append(&mut answer.ranges, range) {
                answer.next = Some(range.offset);
                return json(&answer);
            }
        }
        start += window;
    }
    json(&answer)
}

/// Appends a range, joined with the last one where they touch; `false` if the answer is full.
fn append(ranges: &mut Vec<MapRange>, range: MapRange) -> bool {
    if let Some(last) = ranges.last_mut()
        && last.offset + last.length == range.offset
        && last.state == range.state
    {
        last.length += range.length;
        return true;
    }
    if ranges.len() == RANGES_MAX {
        return false;
    }
    ranges.push(range);
    true
}
