//! `longhorn replica --take-over`: a replica that is served from upstream's files while their content comes over.
//!
//! The volume rests on these files as on a backing file ([`super::chain`]), and takes writes at once. Meanwhile the import
//! fills a second volume of the store ([`SOURCE`]) with all layers, the head's content as the newest snapshot.
//! Then [`Store::adopt`] puts that in the place of the files. If they lie on a backing image, the second volume rests on it
//! from the first, and the replica's volume from then on.
//!
//! | in the replica's directory | a process that was killed has | the next one |
//! |---|---|---|
//! | `volume.taken/` without files of upstream's but `volume.meta`, no `volume.dbs` | moved nothing | begins anew |
//! | `volume.taken/` with the head's `.meta`, no `volume.dbs` | not begun to serve it | moves the other files there, and makes the store |
//! | `volume.taken/`, and `volume.dbs`, whose volume rests on them or which has [`SOURCE`] | served it | goes on filling it |
//! | `volume.taken/`, and `volume.dbs` otherwise | brought everything over | removes upstream's files |
//!
//! Upstream's files lie in a directory of their own, so that upstream's replica, should it be started here again, does not
//! serve what is outdated: as soon as the head's `.meta` is away, it opens nothing. (It makes an image that is missing, and
//! `revision.counter`.) A replica that was given up, or files that somebody has put here, may be mixed with this: what is
//! there decides, and nothing is overwritten.

use super::chain::Chain;
use super::files::{Files, META, REVISION_FILE, is_upstreams, revision};
use super::import::{Filling, open_below, put_counters};
use super::{
    Count, Held, NEW, Progress, TAKEN, Told, allocated, check_room, check_settled, exists,
    is_half_made, list, make_dir, remove, rename, spare, sync,
};
use crate::host::file::{Growth, STORE_FILE, StoreFile, StoreOptions, publish};
use crate::replica::incoming::{link, staged};
use crate::replica::meta::{VOLUME_META, VolumeMeta};
use crate::replica::{KIND, Taken};
use dbs_core::info::LayerInfo;
use dbs_core::store::SnapshotOptions;
use dbs_core::{Backing, Error, ErrorKind, Result, Store};
use longhorn_wire::names;
use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Volume of the store into which upstream's layers come.
pub const SOURCE: &str = "upstream's layers";
/// How many bytes are copied before it is looked for room again.
const LOOK: u64 = if cfg!(test) { 256 << 10 } else { 64 << 20 };
/// [`TAKEN`] once nothing in it is needed any more.
const GONE: &str = "volume.taken.gone";

/// Whether a replica is to be made of upstream's files here before it can be served.
///
/// # Errors
/// `Io`.
pub fn is_upstream(dir: &Path) -> Result<bool> {
    let has = |name| exists(&dir.join(name));
    Ok(!has(STORE_FILE)? && (has(TAKEN)? || has(VOLUME_META)?))
}

/// Makes a replica of upstream's files, and of the backing file below them, that can be served at once, or goes on with that.
/// Nothing is done if another process was first.
///
/// Upstream's replica may be started here until its head is away. So everything is tried before anything is moved,
/// and looked at again when nobody can open it any more.
///
/// # Errors
/// `Busy` while somebody uses the files; `Invalid`, `Exists` or `NotFound` with the reason if they cannot be taken
/// over; `NoSpace` if the store has no room for their content; those of the store. Nothing has been moved after these, unless it was before, or
/// the files or the room for them have changed meanwhile.
pub fn begin(
    dir: &Path,
    volume: &str,
    backing_file: Option<&Path>,
    options: &StoreOptions,
    told: Told<'_>,
) -> Result<()> {
    let _held = Held::alone(dir)?;
    if exists(&dir.join(STORE_FILE))? {
        return Ok(());
    }
    check_settled(dir)?;
    for name in list(dir)?.iter().filter(|name| is_half_made(name)) {
        remove(&dir.join(name))?;
    }
    let file = StoreFile { path: dir.join(NEW), options: options.clone() };
    let make = |place: &Path| {
        let files = look(place, volume)?;
        let below = open_below(backing_file, &files)?;
        make_store(&files, below, volume, &file, told).map(|()| files)
    };
    let taken = &dir.join(TAKEN);
    if moved(taken)?.is_empty() {
        told(Progress::default())?;
        let tried = make(dir);
        remove(&file.path)?;
        tried?;
        make_dir(taken)?;
        copy_meta(dir, taken)?;
    }
    told(Progress::default())?;
    move_files(dir, taken, told)?;
    let files = make(taken).map_err(|e| told_of_way_back(&e, dir))?;
    put_counters(&files, dir)?;
    publish(&file.path, &dir.join(STORE_FILE))?;
    told(Progress::default())?;
    remove(&file.path)
}

/// Files of upstream's that a volume can rest on. All of them are durable.
fn look(dir: &Path, volume: &str) -> Result<Files> {
    if volume == SOURCE {
        return Err(Error::invalid(format!(
            "a volume that is taken over cannot be called `{SOURCE}`"
        )));
    }
    let files = Files::read(dir)?;
    files.check_unused()?;
    check_room(dir, files.allocated() + spare(dir)?)?;
    files.names().iter().try_for_each(|name| sync(&dir.join(name)))?;
    Ok(files)
}

/// What to do if upstream's replica is to have its files again.
fn told_of_way_back(error: &Error, dir: &Path) -> Error {
    let text = format!(
        "{error}. Upstream's files are in `{}`: the next start goes on; to give up, move all of them back, and remove that \
         directory, while no process is started here",
        dir.join(TAKEN).display()
    );
    Error::new(error.kind(), text)
}

/// Upstream's files in a directory, without `volume.meta`, which is ours as well.
fn movable(dir: &Path) -> Result<Vec<String>> {
    let mut names = list(dir)?;
    names.retain(|name| name != VOLUME_META && is_upstreams(name));
    Ok(names)
}

/// Upstream's files that are where they are to be moved to.
fn moved(taken: &Path) -> Result<Vec<String>> {
    if exists(taken)? { movable(taken) } else { Ok(Vec::new()) }
}

/// Copies `volume.meta`, in place of a copy that was made before something else was there.
fn copy_meta(dir: &Path, taken: &Path) -> Result<()> {
    let (from, new) = (dir.join(VOLUME_META), dir.join(NEW));
    fs::copy(&from, &new).map_err(|e| Error::io(e, format!("copying `{}`", from.display())))?;
    sync(&new)?;
    rename(&new, &taken.join(VOLUME_META))?;
    sync(taken)
}

/// Moves the files, over no others. What describes the head goes first, and durably: without it upstream's replica opens nothing, and
/// with it alone it would make an empty head.
fn move_files(dir: &Path, taken: &Path, told: Told<'_>) -> Result<()> {
    let (mut names, moved) = (movable(dir)?, moved(taken)?);
    let meta = VolumeMeta::read(taken)?
        .ok_or_else(|| mixed(dir, &format!("`{VOLUME_META}` is missing in `{TAKEN}`")))?;
    let first = format!("{}{META}", meta.head);
    let begun = moved.contains(&first);
    if let Some(name) = moved.first().filter(|_| !begun) {
        return Err(mixed(dir, &format!("`{TAKEN}` has `{name}`, and not `{first}`")));
    }
    // A snapshot, a revert or a growth since then has given upstream's replica another head.
    if begun && VolumeMeta::read(dir)?.is_none_or(|now| now.head != meta.head) {
        return Err(mixed(dir, &format!("`{VOLUME_META}` names another head than in `{TAKEN}`")));
    }
    // Upstream's replica makes it before it misses the head, and may be killed before it has written to it.
    let counter = dir.join(REVISION_FILE);
    let is_new = || match revision(&counter) {
        Err(error) if error.kind() != ErrorKind::Invalid => Err(error),
        counted => Ok(counted.unwrap_or(0) == 0),
    };
    if begun && moved.iter().any(|name| name == REVISION_FILE) && is_new()? {
        remove(&counter)?;
        names.retain(|name| name != REVISION_FILE);
    }
    if let Some(name) = names.iter().find(|name| moved.contains(name)) {
        return Err(mixed(dir, &format!("`{name}` is in both")));
    }
    if !begun {
        rename(&dir.join(&first), &taken.join(&first))?;
        names.retain(|name| *name != first);
    }
    sync(taken)?;
    sync(dir)?;
    told(Progress::default())?;
    for name in names {
        rename(&dir.join(&name), &taken.join(&name))?;
        told(Progress::default())?;
    }
    sync(taken)?;
    sync(dir)
}

/// Nobody but who has moved them knows which files belong together.
fn mixed(dir: &Path, why: &str) -> Error {
    let text = format!(
        "files of upstream's replica are in `{}`, and in `{TAKEN}` there: {why}. Bring those that belong together into \
         the first, and move the others elsewhere: each may be the only copy of its content. Remove `{TAKEN}` when it is \
         empty",
        dir.display()
    );
    Error::new(ErrorKind::Exists, text)
}

/// Makes the store with a volume that shows what the files hold.
fn make_store(
    files: &Files,
    below: Option<Arc<dyn Backing>>,
    volume: &str,
    file: &StoreFile,
    told: Told<'_>,
) -> Result<()> {
    let chain: Arc<dyn Backing> = Arc::new(Chain::open(files, below)?);
    let store = file.open_or_create(Some(files.meta.size))?;
    let made = (|| {
        let _file = store.attach_backing(Arc::clone(&chain));
        store.create_backed(volume, files.meta.size, &chain)?;
        store.stage_revision(volume, files.revision)?;
        store.flush()
    })();
    // What has stopped it tells more than what closing says then.
    let closed = store.close();
    made.and(closed)?;
    told(Progress::default())
}

/// Upstream's files in a replica's directory that are served.
pub struct Served {
    /// The replica's directory.
    dir: PathBuf,
    files: Files,
    chain: Arc<dyn Backing>,
    /// The backing image below them.
    below: Option<Arc<dyn Backing>>,
    /// Refuses if there is no room for so many bytes.
    room: Box<dyn Fn(u64) -> Result<()> + Send + Sync>,
}

/// Upstream's files that the replica in this directory is served from, if it is, and the backing file below them.
///
/// # Errors
/// `Io`; `Invalid` if they are not all there, or the backing file is not what fits them; those of that file.
pub fn find(dir: &Path, backing_file: Option<&Path>) -> Result<Option<Arc<dyn Taken>>> {
    let taken = dir.join(TAKEN);
    if !exists(&taken)? {
        return Ok(None);
    }
    let read = || {
        let files = Files::read(&taken)?;
        let below = open_below(backing_file, &files)?;
        Ok((Arc::new(Chain::open(&files, below.clone())?), below, files))
    };
    match read() {
        // A process that has the store may have removed them just now.
        Err(_) if !exists(&taken)? => Ok(None),
        Err(error) => Err(error),
        Ok((chain, below, files)) => Ok(Some(Arc::new(Served::new(dir, files, chain, below)))),
    }
}

impl Served {
    fn new(
        dir: &Path,
        files: Files,
        chain: Arc<dyn Backing>,
        below: Option<Arc<dyn Backing>>,
    ) -> Self {
        let place = dir.to_owned();
        let room = Box::new(move |bytes| check_room(&place, bytes + spare(&place)?));
        Self { dir: dir.to_owned(), files, chain, below, room }
    }

    /// Fills the second volume, for as long as there is room: other replicas on the disk need it, too, and may fill one as this does.
    fn fill(&self, store: &Store, told: Told<'_>) -> Result<()> {
        let looked = Cell::new(None);
        fill(store, &self.files, self.below.as_ref(), &|progress: Progress| {
            // What is there from before is counted before anything is copied.
            let Progress { bytes, total, copied } = progress;
            if copied > 0 && looked.get().is_none_or(|at| copied >= at + LOOK) {
                looked.set(Some(copied));
                (self.room)(total.saturating_sub(bytes))?;
            }
            told(progress)
        })
    }
}

impl Taken for Served {
    fn file(&self) -> Arc<dyn Backing> {
        Arc::clone(&self.chain)
    }

    fn progress(&self) -> Progress {
        Progress::of(&self.files)
    }

    fn is_done(&self, store: &Store, volume: &str) -> Result<bool> {
        let on = store.backing(volume)?;
        Ok(on.is_none_or(|on| !on.identity.starts_with(KIND)) && !has_source(store))
    }

    fn bring(&self, store: &Store, volume: &str, told: Told<'_>) -> Result<()> {
        if self.is_done(store, volume)? {
            return Ok(());
        }
        let on = store.backing(volume)?.filter(|on| on.identity.starts_with(KIND));
        if let Some(on) = on {
            self.fill(store, told)?;
            // What was read is what the volume shows.
            let now = Chain::open(&Files::read(&self.files.dir)?, self.below.clone())?;
            if [self.chain.identity(), now.identity()] != [&*on.identity; 2] {
                return Err(Error::invalid(format!(
                    "files in `{}` have changed while the volume rested on them",
                    self.files.dir.display()
                )));
            }
            told(Progress::default())?;
        }
        store.adopt(volume, SOURCE)
    }

    fn show(&self, layers: &mut Vec<LayerInfo>, on_files: bool) {
        let parent_of = |disk: &str| {
            let meta = self.files.disks.get(disk)?;
            names::snapshot_name(&meta.parent).map(str::to_owned)
        };
        let head = &self.files.meta.head;
        for layer in layers.iter_mut() {
            let disk = layer.name.as_deref().map(names::snapshot_disk);
            if let Some(disk) = disk.filter(|disk| self.files.disks.contains_key(disk)) {
                layer.parent = parent_of(&disk);
            } else if layer.parent.is_none() {
                layer.parent = parent_of(head);
                if on_files {
                    layer.data_bytes += allocated(&self.files.image(head));
                }
            }
        }
        for (disk, meta) in self.files.disks.iter().filter(|(disk, _)| *disk != head) {
            let Some(name) = names::snapshot_name(disk) else { continue };
            if layers.iter().any(|layer| layer.name.as_deref() == Some(name)) {
                continue;
            }
            let (image, link) = (self.files.image(disk), link(name, meta));
            layers.push(LayerInfo {
                name: Some(link.snapshot),
                uuid: String::new(),
                parent: link.parent,
                origin: None,
                children: Vec::new(),
                size: fs::metadata(&image).map_or(0, |m| m.len()),
                created_ns: link.created_ns,
                user_created: link.user_created,
                retired: link.retired,
                labels: link.labels,
                data_bytes: allocated(&image),
            });
        }
    }

    fn remove(&self) -> Result<()> {
        remove_files(&self.dir)
    }
}

/// Fills the second volume.
fn fill(
    store: &Store,
    files: &Files,
    below: Option<&Arc<dyn Backing>>,
    told: Told<'_>,
) -> Result<()> {
    let _below = below.map(|below| store.attach_backing(Arc::clone(below)));
    let newest = staged(&files.meta.head);
    let size = files.meta.size;
    if !has_source(store) {
        match below {
            Some(below) => store.create_backed(SOURCE, size, below)?,
            None => store.create_volume(SOURCE, size)?,
        };
    }
    let is_whole = !store.volume_info(SOURCE)?.rebuilding;
    if is_whole && store.snapshots(SOURCE, false)?.iter().any(|snapshot| snapshot.name == newest) {
        return Ok(());
    }
    let mut count = Count { progress: Progress::of(files), told };
    Filling { store, volume: SOURCE, files, growth: Growth::default() }.take_layers(&mut count)?;
    store.set_rebuilding(SOURCE, false)?;
    count.add(0)?;
    let options = SnapshotOptions { system: true, ..SnapshotOptions::default() };
    store.create_snapshot(SOURCE, &newest, &options)?;
    store.flush()?;
    count.add(0)
}

fn has_source(store: &Store) -> bool {
    store.volumes(false).iter().any(|volume| volume.name == SOURCE)
}

/// Removes the files, of which nothing is needed any more.
///
/// # Errors
/// `Io`; what is left is removed with the next call.
pub fn remove_files(dir: &Path) -> Result<()> {
    let gone = dir.join(GONE);
    if exists(&dir.join(TAKEN))? {
        remove_all(&gone)?;
        rename(&dir.join(TAKEN), &gone)?;
        sync(dir)?;
    }
    remove_all(&gone)
}

/// Removes what a process that was killed has left of files of which nothing was needed any more, and of a store that has
/// its name.
///
/// # Errors
/// `Io`.
pub fn remove_gone(dir: &Path) -> Result<()> {
    if exists(&dir.join(STORE_FILE))? {
        remove(&dir.join(NEW))?;
    }
    remove_all(&dir.join(GONE))
}

fn remove_all(place: &Path) -> Result<()> {
    match fs::remove_dir_all(place) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(e, format!("removing `{}`", place.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests;
