//! `longhorn replica-export`: a closed replica of ours becomes files of upstream's.

use super::files::{CHECKSUM, META, REVISION_BYTES, REVISION_FILE, change_time};
use super::{
    Count, EXPORT, Held, IMPORT, Moved, Progress, Told, absolute, allocated, check_not,
    check_not_served, check_place, check_room, copy, exists, list, make_dir, put, remove, rename,
    sync, told_of_room, warn,
};
use crate::agent::files::FileName;
use crate::agent::shelf::disk_meta;
use crate::host::file::{STORE_FILE, StoreFile, StoreOptions};
use crate::replica::counters::Counters;
use crate::replica::meta::{VOLUME_META, VolumeMeta};
use crate::replica::view::{Disk, ReplicaState, SECTOR_SIZE, live_chain};
use crate::replica::{FILES, GENERATION};
use dbs_core::{Error, ErrorKind, Result, Store};
use longhorn_sync::image::{LayerSource, Record, Sink, Source, SparseFile, layer_stamp};
use longhorn_wire::{names, time};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// In [`EXPORT`]: images that are complete, each with the state of the layer that it was made of.
pub(super) const DONE: &str = "done";
/// In [`EXPORT`], if they are to take the place of the store: all files are complete, and durable.
pub(super) const COMPLETE: &str = "complete";
/// Layers from the head down that upstream opens at most.
const CHAIN_MAX: usize = 250;

/// What is to become upstream's.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// The replica's directory.
    pub dir: PathBuf,
    /// Name of the volume in the store; empty for the only one there.
    pub volume: String,
    /// Where the files are to be: an empty directory, or none yet. Without it they take the place of the store.
    pub to: Option<PathBuf>,
    /// How the store is opened.
    pub store: StoreOptions,
}

/// Writes upstream's files, or goes on with that. Nothing is told if only the last steps were left of it.
///
/// # Errors
/// `Busy` while somebody uses the replica; `Invalid`, `Exists` or `NotFound` with the reason if it cannot become
/// upstream's; those of the store.
pub fn export(options: &ExportOptions, told: Told<'_>) -> Result<Option<Moved>> {
    let dir = &absolute(&options.dir)?;
    let _held = Held::alone(dir)?;
    check_not(dir, IMPORT)?;
    check_not_served(dir)?;
    let (target, _target_held) = match &options.to {
        None => (dir.clone(), None),
        Some(to) => {
            check_not(dir, EXPORT)?;
            let to = absolute(to)?;
            make_dir(&to)?;
            // The same directory is refused, too.
            let held = Held::alone(&to)?;
            (to, Some(held))
        }
    };
    let place = target.join(EXPORT);
    check_place(&place)?;
    if options.to.is_some() {
        check_empty(&target)?;
    } else if is_committed(&target)? {
        return finish(&target, &place, told).map(|()| None);
    }
    let moved = write(options, dir, &place, told)?;
    finish(&target, &place, told)?;
    Ok(Some(moved))
}

/// Refuses another directory with files in it. Even an export's that was cut off when it gave them their names: the replica
/// may have been used since, or be another.
fn check_empty(target: &Path) -> Result<()> {
    let Some(name) = list(target)?.into_iter().find(|name| name != EXPORT) else { return Ok(()) };
    let mut text = format!("`{}` is not empty: it holds `{name}`", target.display());
    if exists(&target.join(EXPORT))? {
        text += ". An export to there was cut off at its end: remove the directory, and give the command again";
    }
    Err(Error::new(ErrorKind::Exists, text))
}

/// Whether all files are written, and no store is where a replica would look for it.
fn is_committed(target: &Path) -> Result<bool> {
    let place = target.join(EXPORT);
    if !exists(&place)? || exists(&target.join(STORE_FILE))? {
        return Ok(false);
    }
    let ended = || Ok::<_, Error>(list(&place)?.is_empty() && exists(&target.join(VOLUME_META))?);
    Ok(exists(&place.join(COMPLETE))? || ended()?)
}

/// Writes all files. The store stays as it is, but gets out of the way at the end if they are to take its place.
fn write(options: &ExportOptions, dir: &Path, place: &Path, told: Told<'_>) -> Result<Moved> {
    let file = StoreFile::of(dir, options.store.clone());
    let in_place = options.to.is_none();
    // An export that was cut off has made durable what a tail had, and nobody has served the replica since.
    let goes_on = in_place && exists(place)?;
    check_tail(&file, goes_on).map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::not_found(format!(
            "there is no store in `{}`: it holds no replica of DBS, or one in a shared store, which is moved by \
             rebuilding an upstream replica from it",
            dir.display()
        )),
        _ => e,
    })?;
    if in_place {
        check_strays(dir)?;
    }
    let store = file.open()?;
    warn(&store);
    let written = write_from(&store, options, (dir, place), (goes_on, told));
    let moved = match written {
        Ok(moved) if in_place => {
            // While it is open: nobody else has it before it is out of the way, which decides.
            check_strays(dir)
                .and_then(|()| rename(&file.path, &place.join(STORE_FILE)))
                .and_then(|()| sync(place))
                .and_then(|()| sync(dir))
                .map(|()| moved)
        }
        other => other.map_err(|e| told_of_room(e, place)),
    };
    // What has stopped it tells more than what closing says then.
    let closed = store.close();
    let moved = moved?;
    closed?;
    told(Progress::default())?;
    Ok(moved)
}

/// Refuses files that upstream would take for its own: it lists all that have such a name.
fn check_strays(dir: &Path) -> Result<()> {
    for name in list(dir)? {
        if matches!(FileName::parse(&name), Err(_) | Ok(FileName::Checksum(_))) {
            continue;
        }
        let path = dir.join(&name);
        let m = fs::symlink_metadata(&path)
            .map_err(|e| Error::io(e, format!("looking at `{}`", path.display())))?;
        if m.len() > 0 {
            let text = format!("`{}` is no file of this replica: move it away", path.display());
            return Err(Error::new(ErrorKind::Exists, text));
        }
        // A restore that failed has left it.
        remove(&path)?;
    }
    Ok(())
}

/// Refuses a store whose last process was killed, and whose tail is not where it is looked for.
fn check_tail(file: &StoreFile, goes_on: bool) -> Result<()> {
    if file.look()?.lost_tail().is_none() || goes_on {
        return Ok(());
    }
    Err(Error::busy(
        "the replica was not stopped in good order, and its tail, with what it acknowledged last, is not here: give --tail as \
         to `replica`; or start the replica once where it ran, and stop it",
    ))
}

fn write_from(
    store: &Store,
    options: &ExportOptions,
    (dir, place): (&Path, &Path),
    (goes_on, told): (bool, Told<'_>),
) -> Result<Moved> {
    let volume = volume_of(store, &options.volume, options.to.is_none())?;
    let old = VolumeMeta::read(dir)?.unwrap_or_default();
    let below = store.backing(&volume)?.is_some();
    if below && old.backing_file_path.is_empty() {
        return Err(Error::invalid(format!(
            "the volume rests on a backing file, and {VOLUME_META} does not say on which: start the replica once with \
             --backing-file, and stop it"
        )));
    }
    let layers = store.layers(&volume)?;
    let state = ReplicaState {
        head: names::head_number(&old.head).unwrap_or(0),
        layers,
        ..ReplicaState::default()
    };
    let disks = state.disks();
    check(&state, &disks)?;
    clear(place, &disks)?;
    let total = state.layers.iter().map(|layer| layer.data_bytes).sum::<u64>();
    let there = disks.keys().map(|disk| allocated(&place.join(disk))).sum();
    check_room(place, total.saturating_sub(there))?;
    let mut count = Count { progress: Progress { total, ..Progress::default() }, told };
    count.add(0)?;
    let generation = fs::read_to_string(dir.join(GENERATION)).unwrap_or_default();
    for (name, disk) in &disks {
        let layer = Layer { store, volume: &volume, name, disk, generation: generation.trim() };
        layer.write_image(place, &mut count)?;
        put(&place.join(format!("{name}{META}")), &disk_meta(name, disk).to_bytes()?)?;
        layer.write_record(dir, place)?;
        count.add(0)?;
    }
    let counters = Counters::new(dir);
    if !goes_on {
        counters.distrust_before(store.lost_tail());
    }
    write_counters(&counters, store, &volume, &place.join(state.head_disk()))?;
    let meta = VolumeMeta {
        size: state.size(),
        head: state.head_disk(),
        parent: state.parent_disk(),
        sector_size: SECTOR_SIZE,
        backing_file_path: if below { old.backing_file_path } else { String::new() },
        encrypted: old.encrypted,
        ..VolumeMeta::default()
    };
    meta.write(place)?;
    count.add(0)?;
    // All of it is durable now, but for names, which are before the one that says so.
    sync(place)?;
    if options.to.is_none() {
        put(&place.join(COMPLETE), b"")?;
        sync(place)?;
    }
    count.add(0)?;
    Ok(Moved { size: state.size(), snapshots: disks.len() - 1, bytes: count.progress.bytes })
}

/// Makes the directory, without what is not to be in it: from here on it is not complete.
fn clear(place: &Path, disks: &BTreeMap<String, Disk>) -> Result<()> {
    make_dir(place)?;
    if exists(&place.join(STORE_FILE))? {
        let text = format!("there are two stores: `{}` holds one as well", place.display());
        return Err(Error::new(ErrorKind::Exists, text));
    }
    for name in list(place)?.iter().filter(|name| *name != DONE && !disks.contains_key(*name)) {
        remove(&place.join(name))?;
    }
    sync(place)
}

/// The volume that is meant. If the store is to go, it must be the only one in it.
fn volume_of(store: &Store, name: &str, alone: bool) -> Result<String> {
    let volumes = store.volumes(false);
    let found = volumes.iter().find(|volume| name.is_empty() || volume.name == name);
    let found = found.ok_or_else(|| {
        Error::not_found(format!("there is no volume `{name}` in the store of the directory"))
    })?;
    if volumes.len() > 1 && (alone || name.is_empty()) {
        let names: Vec<_> = volumes.iter().map(|volume| &*volume.name).collect();
        return Err(Error::invalid(format!(
            "the store has other volumes, too ({}), which would go with it: write the files to another directory \
             (--to), of one volume (--volume-name)",
            names.join(", ")
        )));
    }
    if found.rebuilding {
        return Err(Error::invalid(
            "a rebuild, clone or restore of the replica was cut off, and its content is incomplete: rebuild it anew, \
             or start and stop it once",
        ));
    }
    Ok(found.name.clone())
}

/// Refuses what upstream cannot have.
fn check(state: &ReplicaState, disks: &BTreeMap<String, Disk>) -> Result<()> {
    if let Some(origin) = state.layers.iter().find_map(|layer| layer.origin.as_ref()) {
        let text =
            format!("the volume is a clone of `{origin}`: detach it with `dbs volume flatten`");
        return Err(Error::invalid(text));
    }
    if disks.len() < state.layers.len() {
        return Err(Error::invalid(
            "something has come in only in part: start and stop the replica once",
        ));
    }
    for disk in disks.values() {
        if let Some(name) = &disk.snapshot {
            names::check_snapshot(name, disk.labels.clone())?;
        }
    }
    let chain = live_chain(disks, &state.head_disk()).len();
    if chain > CHAIN_MAX {
        return Err(Error::invalid(format!(
            "the head has {chain} layers with those below it, and upstream opens {CHAIN_MAX}: remove and purge snapshots"
        )));
    }
    Ok(())
}

/// A layer that becomes a file.
struct Layer<'a> {
    store: &'a Store,
    volume: &'a str,
    name: &'a str,
    disk: &'a Disk,
    /// A rebuild in between gives layers other content, and not always another stamp.
    generation: &'a str,
}

impl Layer<'_> {
    /// Writes the image, unless it is there.
    fn write_image(&self, place: &Path, count: &mut Count<'_>) -> Result<()> {
        let (path, done) = (place.join(self.name), place.join(DONE));
        // Only a snapshot's layer is surely what it was.
        let state = self.stamp()?.map(|stamp| {
            let Self { name, disk, generation, .. } = self;
            format!("{stamp} {generation} {} {name}", disk.parent)
        });
        if let Some(state) = &state
            && fs::read_to_string(&done).is_ok_and(|done| done.lines().any(|line| line == state))
            && exists(&path)?
        {
            return count.add(self.disk.allocated);
        }
        remove(&path)?;
        let source = LayerSource::to_send(self.store, self.volume, self.disk.snapshot.as_deref())?;
        let file = SparseFile::sink(&path);
        file.open(source.size())?;
        copy(&source, 0, &|at, piece| file.write_at(at, piece), count)?;
        file.finish(None)?;
        let Some(state) = state else { return Ok(()) };
        let note = || {
            let mut file = File::options().append(true).create(true).open(&done)?;
            file.write_all(format!("\n{state}\n").as_bytes())?;
            file.sync_all()
        };
        note().map_err(|e| Error::io(e, format!("writing `{}`", done.display())))
    }

    /// A recorded hash that is current goes along.
    fn write_record(&self, dir: &Path, place: &Path) -> Result<()> {
        let Some(stamp) = self.stamp()? else { return Ok(()) };
        let record = Record::load(&dir.join(self.name)).unwrap_or(None);
        let path = place.join(self.name);
        match record.filter(|record| record.tells(&stamp)) {
            Some(record) => record.store(&path).and_then(|()| sync(&Record::path(&path))),
            None => remove(&Record::path(&path)),
        }
    }

    /// The state of a snapshot's layer.
    fn stamp(&self) -> Result<Option<String>> {
        let snapshot = self.disk.snapshot.as_deref();
        snapshot.map(|snapshot| layer_stamp(self.store, self.volume, snapshot)).transpose()
    }
}

/// How many writes were counted; and when the last one was, by which a controller chooses among replicas that have all failed.
fn write_counters(counters: &Counters, store: &Store, volume: &str, head: &Path) -> Result<()> {
    counters.load(store.volume_info(volume)?.revision, time::now_ns())?;
    let mut text = counters.revision().to_string().into_bytes();
    text.resize(REVISION_BYTES, 0);
    put(&head.with_file_name(REVISION_FILE), &text)?;
    let modified = UNIX_EPOCH + Duration::from_nanos(counters.modified_ns());
    let date = || {
        let file = File::options().write(true).open(head)?;
        file.set_modified(modified)?;
        file.sync_all()
    };
    date().map_err(|e| Error::io(e, format!("setting the time of `{}`", head.display())))
}

/// Puts the files in their places, and removes what was ours, if it was to go.
fn finish(target: &Path, place: &Path, told: Told<'_>) -> Result<()> {
    let own = [DONE, COMPLETE, STORE_FILE];
    for name in list(place)?.iter().filter(|name| !own.contains(&name.as_str())) {
        let (from, to) = (place.join(name), target.join(name));
        if let Some(disk) = name.strip_suffix(CHECKSUM) {
            // Its image has got its name before, which is a change.
            if let Some(record) = Record::load(&place.join(disk)).unwrap_or(None) {
                let change_time = change_time(&target.join(disk));
                let record = Record { change_time, ..record };
                // Without room for it there is none, which only costs time: this must come to an end.
                if record.store(&target.join(disk)).and_then(|()| sync(&to)).is_err() {
                    remove(&to)?;
                }
            }
            remove(&from)?;
        } else {
            if !exists(&Record::path(&from))? {
                remove(&Record::path(&to))?;
            }
            rename(&from, &to)?;
        }
        told(Progress::default())?;
    }
    sync(target)?;
    // Now everything is upstream's, durably.
    let file = StoreFile { path: place.join(STORE_FILE), options: StoreOptions::default() };
    if exists(&file.path)? {
        // On a full disk nothing can be written to it.
        volume_of(&file.look()?, "", true)?;
        for name in FILES.iter().filter(|name| **name != VOLUME_META) {
            remove(&target.join(name))?;
        }
        sync(target)?;
        remove(&file.path)?;
        told(Progress::default())?;
    }
    for name in own {
        remove(&place.join(name))?;
        told(Progress::default())?;
    }
    fs::remove_dir(place).map_err(|e| Error::io(e, format!("removing `{}`", place.display())))?;
    sync(target)
}
