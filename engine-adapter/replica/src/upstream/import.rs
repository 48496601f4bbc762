//! `longhorn replica-import`: the files of a closed replica of upstream's become a store of ours.

use super::files::{CHECKSUM, Files, change_time, check_unused, state};
use super::{
    Count, EXPORT, Held, IMPORT, KEPT, Moved, PIECE_BYTES, Progress, Told, absolute, allocated,
    check_not, check_not_served, check_place, check_room, copy, exists, list, make_dir, put,
    remove, rename, sync, told_of_room, warn,
};
use crate::host::file::{Growth, STORE_FILE, StoreFile, StoreOptions};
use crate::replica::FILES;
use crate::replica::counters::{COUNTERS_FILE, Counters};
use crate::replica::incoming::{link, staged};
use crate::replica::meta::VOLUME_META;
use dbs_core::info::LayerState;
use dbs_core::volume::Layer;
use dbs_core::{Backing, Error, ErrorKind, Result, Store};
use longhorn_sync::image::{LayerSink, Record, Sink, Source, SparseFile, layer_stamp};
use longhorn_wire::names;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// In [`IMPORT`]: which files the store there is filled from.
pub(super) const SOURCE: &str = "source";
/// In [`IMPORT`]: upstream's files are to be kept.
pub(super) const KEEP: &str = "keep";
/// In [`IMPORT`]: the store is complete, and goes to its place next.
pub(super) const TAKEN: &str = "taken";
/// At the end of an image's name.
const IMAGE: &str = ".img";
/// Ranges of a map asked for at once.
const RANGES: usize = 256;

/// What is to be taken over.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The replica's directory.
    pub dir: PathBuf,
    /// Name of the volume in the store: the one that the replica will be started with.
    pub volume: String,
    /// The file that the volume rests on.
    pub backing_file: Option<PathBuf>,
    /// How the store is made.
    pub store: StoreOptions,
    /// Whether upstream's files are kept, in [`KEPT`].
    pub keep: bool,
}

/// Takes a replica over, or goes on with that. Nothing is told if only the last steps were left of it.
///
/// # Errors
/// `Busy` while somebody uses the replica; `Invalid`, `Exists` or `NotFound` with the reason if there is nothing that can
/// be taken over; those of the store.
pub fn import(options: &ImportOptions, told: Told<'_>) -> Result<Option<Moved>> {
    let dir = &absolute(&options.dir)?;
    let _held = Held::alone(dir)?;
    check_not(dir, EXPORT)?;
    check_not_served(dir)?;
    let place = dir.join(IMPORT);
    check_place(&place)?;
    if exists(&place)? && exists(&dir.join(STORE_FILE))? {
        // Its own has been moved out of there, and nothing else may make upstream's files go.
        // (Builds of November 2026 left no `TAKEN`; what is filled last is there.)
        let is_complete = exists(&place.join(TAKEN))? || exists(&place.join(COUNTERS_FILE))?;
        let may_go = is_complete || !exists(&place.join(SOURCE))?;
        if !may_go || exists(&place.join(STORE_FILE))? {
            return Err(Error::new(
                ErrorKind::Exists,
                format!(
                    "`{}` is not the store that the import makes in `{IMPORT}`: move it away",
                    dir.join(STORE_FILE).display()
                ),
            ));
        }
        return finish(dir, &place, told).map(|()| None);
    }
    let files = Files::read(dir)?;
    let moved = fill(options, &files, &place, told)?;
    finish(dir, &place, told)?;
    Ok(Some(moved))
}

/// Makes the store, and puts it in its place: all that upstream's files have is durable in it then. They stay as
/// they are.
fn fill(options: &ImportOptions, files: &Files, place: &Path, told: Told<'_>) -> Result<Moved> {
    files.check_unused()?;
    let below = open_below(options.backing_file.as_deref(), files)?;
    if options.keep && exists(&files.dir.join(KEPT))? {
        let text = format!("there is `{KEPT}` from before in the directory: move it away");
        return Err(Error::new(ErrorKind::Exists, text));
    }
    let identity = below.as_ref().map_or("", |file| file.identity());
    let stamp = format!("{}\n{identity}\n{}", options.volume, files.stamp()?);
    make_dir(place)?;
    let source = place.join(SOURCE);
    if fs::read_to_string(&source).ok().as_deref() != Some(&stamp) {
        // What there may be was filled from something else.
        for name in list(place)? {
            remove(&place.join(name))?;
        }
        put(&source, stamp.as_bytes())?;
        sync(place)?;
    }
    told(Progress::default())?;
    let file = StoreFile { path: place.join(STORE_FILE), options: options.store.clone() };
    if !exists(&file.path)? {
        // Of a store that somebody has removed since.
        remove(&place.join(TAKEN))?;
        remove(&place.join(COUNTERS_FILE))?;
        sync(place)?;
    }
    let full = |e| told_of_room(e, place);
    check_room(place, files.allocated().saturating_sub(allocated(&file.path))).map_err(full)?;
    let store = file.open_or_create(Some(files.meta.size)).map_err(full)?;
    warn(&store);
    let filling =
        Filling { store: &store, volume: &options.volume, files, growth: Growth::default() };
    let filled = filling.run(below, place, told);
    // What has stopped it tells more than what closing says then.
    let closed = store.close();
    let moved = filled.map_err(full)?;
    closed.map_err(full)?;
    told(Progress::default())?;
    // Nobody has changed them meanwhile: what was read belongs together.
    files.check_unused()?;
    if !stamp.ends_with(&format!("\n{}", files.stamp()?)) {
        let text = "upstream's files have changed while they were read: give the command again";
        return Err(Error::busy(text));
    }
    if options.keep {
        put(&place.join(KEEP), b"")?;
    }
    put(&place.join(TAKEN), b"")?;
    // The content of what is beside the store is durable, and the store is closed; now their names, and then that
    // of the store, which decides.
    sync(place)?;
    rename(&file.path, &files.dir.join(STORE_FILE))?;
    sync(&files.dir)?;
    sync(place)?;
    told(Progress::default())?;
    Ok(moved)
}

/// The file that the volume rests on, which upstream's files name.
///
/// # Errors
/// `Invalid` if `path` does not fit them; those of the file.
pub(super) fn open_below(path: Option<&Path>, files: &Files) -> Result<Option<Arc<dyn Backing>>> {
    let named = &*files.meta.backing_file_path;
    match path {
        None if named.is_empty() => Ok(None),
        None => Err(Error::invalid(format!(
            "the volume rests on the backing file `{named}`: name it with --backing-file"
        ))),
        Some(_) if named.is_empty() => {
            Err(Error::invalid("the volume rests on no backing file: leave --backing-file out"))
        }
        Some(path) => {
            let below = dbs_backing::open(&dbs_backing::file_at(path)?)?;
            files.check_above(below.size())?;
            Ok(Some(below))
        }
    }
}

/// A store that is filled.
pub(super) struct Filling<'a> {
    pub store: &'a Store,
    /// The volume there.
    pub volume: &'a str,
    pub files: &'a Files,
    pub growth: Growth,
}

impl Filling<'_> {
    /// Takes all layers over, one after the other, and then their tree. What was done before is not done again.
    fn run(&self, below: Option<Arc<dyn Backing>>, place: &Path, told: Told<'_>) -> Result<Moved> {
        let Self { store, volume, files, .. } = *self;
        let size = files.meta.size;
        let below = below.map(|file| store.attach_backing(file));
        if store.volumes(false).is_empty() {
            match &below {
                Some(file) => store.create_backed(volume, size, file)?,
                None => store.create_volume(volume, size)?,
            };
        }
        let mut count = Count { progress: Progress::of(files), told };
        self.take_layers(&mut count)?;
        store.stage_revision(volume, files.revision)?;
        store.set_rebuilding(volume, false)?;
        store.flush()?;
        let snapshots = files.snapshots();
        for disk in &snapshots {
            self.take_record(disk, place)?;
        }
        put_counters(files, place)?;
        count.add(0)?;
        Ok(Moved { size, snapshots: snapshots.len(), bytes: count.progress.bytes })
    }

    /// Takes all layers into the volume, which counts as being rebuilt from then on, and their tree.
    pub fn take_layers(&self, count: &mut Count<'_>) -> Result<()> {
        let Self { store, volume, files, .. } = *self;
        store.set_rebuilding(volume, true)?;
        let snapshots = files.snapshots();
        for disk in &snapshots {
            self.take_snapshot(disk, count)?;
        }
        let described = snapshots.iter().filter_map(|disk| files.disks.get_key_value(*disk));
        let links =
            described.filter_map(|(disk, meta)| Some(link(names::snapshot_name(disk)?, meta)));
        let head = files.disks.get(&files.meta.head);
        let parent = head.and_then(|head| names::snapshot_name(&head.parent));
        store.relink(volume, &links.collect::<Vec<_>>(), parent)?;
        count.add(0)?;
        self.take_head(count)
    }

    /// A layer that is being filled has another name. It is filled in order, so that its end tells how far that is.
    fn take_snapshot(&self, disk: &str, count: &mut Count<'_>) -> Result<()> {
        let (store, volume) = (self.store, self.volume);
        let name = names::snapshot_name(disk).unwrap_or_default();
        let image = self.files.image(disk);
        let layers = store.layers(volume)?;
        if layers.iter().any(|layer| layer.name.as_deref() == Some(name)) {
            return count.add(allocated(&image));
        }
        self.growth.look(store, self.files.meta.size);
        let (source, staged) = (SparseFile::source(image)?, staged(name));
        let sink = LayerSink::new(store, volume, &staged, None)?;
        sink.open(source.size())?;
        let from = filled(&store.layer(volume, Some(&staged))?)?;
        copy(&source, from, &|at, piece| sink.write_at(at, piece), count)?;
        store.flush()?;
        store.rename_snapshot(volume, &staged, name)?;
        count.add(0)
    }

    fn take_head(&self, count: &mut Count<'_>) -> Result<()> {
        let source = SparseFile::source(self.files.image(&self.files.meta.head))?;
        let from = filled(&self.store.layer(self.volume, None)?)?;
        let head = self.store.volume(self.volume)?;
        copy(&source, from, &|at, piece| head.write_at(at, piece, false), count)
    }

    /// A recorded hash that is current stays so.
    fn take_record(&self, disk: &str, place: &Path) -> Result<()> {
        let image = self.files.image(disk);
        // One that cannot be read is none.
        let record = Record::load(&image).unwrap_or(None);
        let Some(record) = record.filter(|record| record.tells(&change_time(&image))) else {
            return Ok(());
        };
        let name = names::snapshot_name(disk).unwrap_or_default();
        let stamp = layer_stamp(self.store, self.volume, name)?;
        Record { change_time: stamp, ..record }.store(&place.join(disk))
    }
}

/// The count of writes, and when the last one was.
pub(super) fn put_counters(files: &Files, place: &Path) -> Result<()> {
    let m = fs::metadata(files.image(&files.meta.head));
    let changed = m.map_or(0, |m| {
        let seconds = u64::try_from(m.mtime()).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(m.mtime_nsec().unsigned_abs())
    });
    Counters::new(place).start(files.revision, changed)?;
    sync(&place.join(COUNTERS_FILE))
}

/// Up to where a layer was surely filled.
fn filled(layer: &Layer) -> Result<u64> {
    let (mut at, mut end) = (0, 0);
    while at < layer.size() {
        let ranges = layer.map(at, layer.size() - at, RANGES)?;
        let Some(last) = ranges.last() else { break };
        at = last.offset + last.length;
        let held = ranges.iter().rev().find(|range| range.state != LayerState::Absent);
        end = held.map_or(end, |range| range.offset + range.length);
    }
    // The last piece may have come in part.
    Ok(end.saturating_sub(PIECE_BYTES as u64))
}

/// Takes the last steps, as everything is in the store.
fn finish(dir: &Path, place: &Path, told: Told<'_>) -> Result<()> {
    let source = place.join(SOURCE);
    if exists(&source)? {
        let text = fs::read_to_string(&source)
            .map_err(|e| Error::io(e, format!("reading `{}`", source.display())))?;
        let kept = exists(&place.join(KEEP))?.then(|| dir.join(KEPT));
        clear(&Taken { dir, lines: text.lines().skip(2).collect() }, kept.as_deref(), told)?;
        remove(&source)?;
        sync(place)?;
    }
    for name in list(place)? {
        let from = place.join(&name);
        if name == COUNTERS_FILE || name.ends_with(CHECKSUM) {
            rename(&from, &dir.join(&name))?;
        } else {
            // Of a process that was killed.
            remove(&from)?;
        }
        told(Progress::default())?;
    }
    sync(dir)?;
    fs::remove_dir(place).map_err(|e| Error::io(e, format!("removing `{}`", place.display())))?;
    sync(dir)
}

/// Removes upstream's files, or moves them. `volume.meta` is ours as well.
fn clear(taken: &Taken<'_>, kept: Option<&Path>, told: Told<'_>) -> Result<()> {
    taken.check(|_| true)?;
    kept.map_or(Ok(()), make_dir)?;
    for name in taken.names() {
        // Upstream's replica may be started at any time: nobody holds it back.
        taken.check(|other| other == name || other == VOLUME_META)?;
        let file = taken.dir.join(name);
        match kept {
            Some(kept) if name == VOLUME_META && exists(&file)? => {
                let bytes = fs::read(&file)
                    .map_err(|e| Error::io(e, format!("reading `{}`", file.display())))?;
                put(&kept.join(name), &bytes)?;
            }
            Some(kept) if exists(&file)? => rename(&file, &kept.join(name))?,
            None if name != VOLUME_META => remove(&file)?,
            _ => {}
        }
        told(Progress::default())?;
    }
    kept.map_or(Ok(()), sync)?;
    sync(taken.dir)
}

/// Upstream's files that were taken over: the lines of [`SOURCE`] about them.
struct Taken<'a> {
    dir: &'a Path,
    lines: Vec<&'a str>,
}

impl Taken<'_> {
    fn names(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().filter_map(|line| name_in(line))
    }

    /// Refuses if one of these files is not what was taken over, or is about to be another: then upstream's replica has been
    /// started since the store got its name. Some may be gone.
    fn check(&self, wanted: impl Fn(&str) -> bool) -> Result<()> {
        for line in &self.lines {
            let Some(name) = name_in(line).filter(|name| wanted(name)) else { continue };
            let path = self.dir.join(name);
            if !exists(&path)? {
                continue;
            }
            let m = fs::symlink_metadata(&path)
                .map_err(|e| Error::io(e, format!("looking at `{}`", path.display())))?;
            if !line.starts_with(&format!("{} ", state(&m))) {
                return Err(self.changed(name));
            }
            if m.is_file() {
                check_unused(&path)?;
            }
        }
        Ok(())
    }

    fn changed(&self, name: &str) -> Error {
        let is_gone = |name: &str| name.ends_with(IMAGE) && !self.dir.join(name).exists();
        let ways = if self.names().any(is_gone) {
            format!(
                "Others have gone already, and the volume as it was taken over is in `{STORE_FILE}`: to go on with that, \
                 move `{name}` away, and give the command again"
            )
        } else {
            format!(
                "To take them over anew, remove `{STORE_FILE}` and `{IMPORT}`; to give up what is newer in them, move \
                 `{name}` away. Then give the command again"
            )
        };
        let text = format!(
            "`{name}` has changed since it was taken over: upstream's replica was started in `{}`, and its files may be newer \
             than what was taken over. Nothing more is removed. {ways}",
            self.dir.display()
        );
        Error::new(ErrorKind::Exists, text)
    }
}

/// The name in a line of [`SOURCE`]; never one of ours, but that of what both have.
fn name_in(line: &str) -> Option<&str> {
    let name = line.splitn(5, ' ').nth(4)?;
    let ours = name != VOLUME_META && (FILES.contains(&name) || name == STORE_FILE);
    (!ours).then_some(name)
}
