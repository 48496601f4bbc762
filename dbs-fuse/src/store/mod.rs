//! The tree of a store: what is in it, and what each part of it looks like.

mod kind;
mod text;
mod times;

use crate::names::{escape, unescape};
use crate::node::{Kind as _, Nodes};
use crate::tree::{
    Entry, Open, Owner, RAW, Result, STAT_BLOCK, Space, Tree, text_size, with_buffer,
};
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::volume::{Observed, Observer};
use dbs_core::{ErrorKind, Store};
use fuser::{Errno, FileAttr, FopenFlags, INodeNo, Notifier, ReplyData};
use kind::{Kind, look};
use std::convert::Infallible;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use times::Times;

/// How soon the watcher sees that it is to end.
const WATCH_PATIENCE: Duration = Duration::from_millis(200);

/// A node of this tree.
type Node = crate::node::Node<Kind>;

/// What is shown, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of the store, for people.
    pub store: PathBuf,
    /// Others work with the store meanwhile: nothing is remembered that may change.
    pub live: bool,
    /// Users other than the one who mounts may look at it.
    pub allow_other: bool,
}

/// A store as a tree.
pub struct View {
    /// The store.
    pub store: Store,
    /// How it is shown.
    pub options: Options,
    nodes: Nodes<Kind>,
    owner: Owner,
    times: Times,
}

impl View {
    /// A view of a store.
    pub fn new(store: Store, options: Options) -> Self {
        let written = std::fs::metadata(&options.store).and_then(|m| {
            use std::os::unix::fs::FileTypeExt;
            // Of a device it says when its node was made.
            if m.file_type().is_block_device() { Ok(SystemTime::now()) } else { m.modified() }
        });
        let owner = Owner::new(options.allow_other);
        let written = written.unwrap_or_else(|_| SystemTime::now());
        Self { store, options, nodes: Nodes::new(), owner, times: Times::new(written) }
    }
}

impl Tree for View {
    type Kind = Kind;
    type File = Infallible;

    fn nodes(&self) -> &Nodes<Kind> {
        &self.nodes
    }

    fn lifetime(&self) -> Duration {
        if self.options.live { Duration::ZERO } else { Duration::from_secs(3600) }
    }

    fn child(&self, directory: &Kind, name: &OsStr) -> Result<Kind> {
        let known = name.to_str().ok_or(Errno::ENOENT)?;
        match directory {
            Kind::Root => match known {
                "store.json" => Ok(Kind::StoreJson),
                "volumes" => Ok(Kind::Volumes),
                _ => Err(Errno::ENOENT),
            },
            Kind::Volumes => {
                let name = unescape(name).ok_or(Errno::ENOENT)?;
                // No volume has such a name, and it would mean a snapshot.
                let plain = !name.contains('@');
                let found = plain.then(|| self.store.observe(&name)).ok_or(Errno::ENOENT)?;
                found.map(Kind::Volume).map_err(|_| Errno::ENOENT)
            }
            Kind::Volume(volume) => {
                let volume = volume.clone();
                volume.size().map_err(gone)?;
                match known {
                    "head.raw" | "map.json" if is_incomplete(&volume)? => Err(Errno::ENOENT),
                    "head.raw" => Ok(Kind::Head(volume)),
                    "info.json" => Ok(Kind::Info(volume)),
                    "map.json" => Ok(Kind::Map(volume)),
                    "snapshots" => Ok(Kind::Snapshots(volume)),
                    "latest" => {
                        volume.newest().map_err(gone)?.ok_or(Errno::ENOENT)?;
                        Ok(Kind::Latest(volume))
                    }
                    _ => Err(Errno::ENOENT),
                }
            }
            Kind::Snapshots(volume) => {
                volume.size().map_err(gone)?;
                let name = known.strip_suffix(RAW).and_then(|name| unescape(OsStr::new(name)));
                let found = volume.snapshot(&name.ok_or(Errno::ENOENT)?);
                found.map(Kind::Snapshot).map_err(|_| Errno::ENOENT)
            }
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn entries(&self, directory: &Kind) -> Result<Vec<Entry<Kind>>> {
        let entry = Entry::new;
        let mut entries = vec![entry(".", directory.clone()), entry("..", directory.parent())];
        match directory {
            Kind::Root => {
                entries.push(entry("store.json", Kind::StoreJson));
                entries.push(entry("volumes", Kind::Volumes));
            }
            Kind::Volumes => {
                let volumes = self.store.observe_volumes().into_iter();
                entries.extend(volumes.map(|(name, v)| entry(&escape(&name), Kind::Volume(v))));
            }
            Kind::Volume(volume) => {
                let newest = volume.newest().map_err(gone)?;
                let whole = !is_incomplete(volume)?;
                if whole {
                    entries.push(entry("head.raw", Kind::Head(volume.clone())));
                }
                entries.push(entry("info.json", Kind::Info(volume.clone())));
                if newest.is_some() {
                    entries.push(entry("latest", Kind::Latest(volume.clone())));
                }
                if whole {
                    entries.push(entry("map.json", Kind::Map(volume.clone())));
                }
                entries.push(entry("snapshots", Kind::Snapshots(volume.clone())));
            }
            Kind::Snapshots(volume) => {
                let all = volume.snapshots().map_err(gone)?.into_iter();
                entries.extend(all.map(|(name, s)| entry(&file_name(&name), Kind::Snapshot(s))));
            }
            _ => return Err(Errno::ENOTDIR),
        }
        Ok(entries)
    }

    fn target(&self, link: &Kind) -> Result<String> {
        let Kind::Latest(volume) = link else { return Err(Errno::EINVAL) };
        let newest = volume.newest().map_err(gone)?.ok_or(Errno::ESTALE)?;
        Ok(format!("snapshots/{}", file_name(&newest)))
    }

    fn attributes(&self, number: u64, node: &Node) -> Result<(FileAttr, bool)> {
        let mut time = None;
        let (size, blocks) = match &node.kind {
            Kind::Head(image) | Kind::Snapshot(image) => {
                let bytes =
                    node.seen.data_bytes(&self.store, self.options.live, image).map_err(gone)?;
                (image.size().map_err(gone)?, bytes / STAT_BLOCK)
            }
            kind @ (Kind::StoreJson | Kind::Info(_)) => {
                let text = self.text(kind)?;
                time = Some(self.text_time(kind, &text));
                text_size(text.len() as u64)
            }
            Kind::Map(_) => text_size(node.seen.text_bytes()),
            kind @ Kind::Latest(_) => (self.target(kind)?.len() as u64, 0),
            _ => (0, 0),
        };
        let time = time.map_or_else(|| self.time(&node.kind), Ok)?;
        // The size of a map is known once one was opened.
        let unknown = matches!(node.kind, Kind::Map(_)) && size == 0;
        Ok((self.owner.shape(number, node.kind.file_type(), (size, blocks), time), !unknown))
    }

    /// As far as they are known without walking a volume.
    fn quick_attributes(&self, number: u64, node: &Node) -> Result<(FileAttr, bool)> {
        match &node.kind {
            Kind::Head(image) | Kind::Snapshot(image) => {
                let (size, known) = (image.size().map_err(gone)?, node.seen.known_bytes());
                let blocks = known.unwrap_or(size) / STAT_BLOCK;
                let time = self.time(&node.kind)?;
                let space = (size, blocks);
                let attributes = self.owner.shape(number, node.kind.file_type(), space, time);
                Ok((attributes, known.is_some()))
            }
            _ => self.attributes(number, node),
        }
    }

    fn extended(&self, kind: &Kind) -> Result<Vec<(String, String)>> {
        match kind {
            Kind::Volume(volume) | Kind::Head(volume) => text::volume_facts(volume).map_err(gone),
            Kind::Snapshot(snapshot) => text::snapshot_facts(snapshot).map_err(gone),
            _ => Ok(Vec::new()),
        }
    }

    fn open(&self, node: &Node) -> Result<Open<Infallible>> {
        match &node.kind {
            Kind::Snapshot(image) | Kind::Head(image) => {
                let (seen, mark) = look(&self.store, image).map_err(gone)?;
                if seen.incomplete {
                    return Err(Errno::ESTALE);
                }
                // The first one to open it after it may have changed lets the kernel drop what it has.
                Ok(Open::Image(match node.seen.keeps(mark) || !self.options.live {
                    true => FopenFlags::FOPEN_KEEP_CACHE,
                    false if seen.settled => FopenFlags::empty(),
                    false => FopenFlags::FOPEN_DIRECT_IO,
                }))
            }
            Kind::StoreJson | Kind::Info(_) | Kind::Map(_) => {
                let text = self.text(&node.kind)?;
                node.seen.note_text(text.len());
                Ok(Open::Text(text))
            }
            Kind::Latest(_) => Err(Errno::ELOOP),
            _ => Err(Errno::EISDIR),
        }
    }

    fn read(
        &self,
        image: &Kind,
        _: Option<&Infallible>,
        offset: u64,
        size: usize,
        reply: ReplyData,
    ) {
        let (Kind::Head(image) | Kind::Snapshot(image)) = image else {
            return reply.error(Errno::EISDIR);
        };
        with_buffer(|buffer| match read(image, offset, size, buffer) {
            Ok(bytes) => reply.data(bytes),
            Err(error) => reply.error(error),
        });
    }

    fn seek(&self, image: &Kind, _: Option<&Infallible>, offset: i64, whence: i32) -> Result<i64> {
        let (Kind::Head(image) | Kind::Snapshot(image)) = image else {
            return Err(Errno::EINVAL);
        };
        let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        if from >= image.size().map_err(gone)? {
            return Err(Errno::ENXIO);
        }
        let found = match whence {
            libc::SEEK_DATA => image.next_data(from).map_err(gone)?.ok_or(Errno::ENXIO)?,
            libc::SEEK_HOLE => image.next_hole(from).map_err(gone)?,
            _ => return Err(Errno::EINVAL),
        };
        i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    }

    fn space(&self) -> Space {
        let info = self.store.info();
        let blocks = info.extent_size / BLOCK_BYTES;
        Space {
            total: info.extents_total * blocks,
            free: info.extents_free * blocks,
            files: info.volumes + info.snapshots,
        }
    }

    fn is_watched(&self) -> bool {
        self.options.live
    }

    /// Lets the kernel drop what it keeps of snapshots that were deleted, or whose content may be another one: a
    /// file that is open for long has its cache for as long. All else it asks for each time.
    fn watch(&self, notifier: &Notifier, stop: &AtomicBool) {
        let mut seen = self.store.changes();
        while !stop.load(Ordering::SeqCst) {
            let changes = self.store.wait_for_change(seen, WATCH_PATIENCE);
            if changes == seen {
                continue;
            }
            seen = changes;
            for (number, node) in self.nodes.all() {
                let Kind::Snapshot(image) = &node.kind else { continue };
                let keeps = match look(&self.store, image) {
                    Ok((_, mark)) => node.seen.keeps(mark),
                    Err(_) => node.seen.lose(),
                };
                if keeps {
                    continue;
                }
                // Fails only if the kernel knows it no longer.
                let _ = notifier.inval_inode(INodeNo(number), 0, 0);
            }
        }
    }

    fn end(&self) {}
}

impl View {
    /// The text of a file that is made when it is read.
    fn text(&self, file: &Kind) -> Result<Vec<u8>> {
        match file {
            Kind::StoreJson => Ok(text::store(&self.store, &self.options.store, self.options.live)),
            Kind::Info(volume) => text::info(volume).map_err(gone),
            Kind::Map(volume) => text::map(volume).map_err(gone),
            _ => Err(Errno::EINVAL),
        }
    }

    /// When something changed last that is not made to be read.
    fn time(&self, kind: &Kind) -> Result<SystemTime> {
        match kind {
            Kind::Root | Kind::Volumes | Kind::StoreJson | Kind::Info(_) => Ok(self.times.written),
            Kind::Volume(observer) | Kind::Latest(observer) | Kind::Snapshots(observer) => {
                // When the last snapshot was taken.
                Ok(time_of(&observer.look().map_err(gone)?))
            }
            Kind::Map(head) => self.time(&Kind::Head(head.clone())),
            Kind::Head(image) | Kind::Snapshot(image) => {
                let seen = image.look().map_err(gone)?;
                let changed = match (self.options.live, seen.settled) {
                    (true, settled) => self.times.of(kind, seen.writes, settled),
                    (false, true) => None,
                    (false, false) => Some(self.times.written),
                };
                Ok(changed.unwrap_or_else(|| time_of(&seen)))
            }
        }
    }

    /// When a text became what it is.
    fn text_time(&self, kind: &Kind, text: &[u8]) -> SystemTime {
        if !self.options.live {
            return self.times.written;
        }
        let mut hasher = DefaultHasher::new();
        match kind {
            Kind::StoreJson => text::store_facts(&self.store).hash(&mut hasher),
            _ => text.hash(&mut hasher),
        }
        let changed = self.times.of(kind, hasher.finish(), false);
        changed.unwrap_or(self.times.written)
    }
}

/// Whether the head of a volume is nobody's but whose who fills it.
fn is_incomplete(volume: &Observer) -> Result<bool> {
    Ok(volume.look().map_err(gone)?.incomplete)
}

/// When a snapshot was taken, or a head begun.
fn time_of(seen: &Observed) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(seen.created_ns)
}

/// The file name of a snapshot.
fn file_name(snapshot: &str) -> String {
    escape(snapshot) + RAW
}

/// The error number of a failed look at something that the kernel knows.
fn gone(error: dbs_core::Error) -> Errno {
    match error.kind() {
        ErrorKind::NotFound => Errno::ESTALE,
        ErrorKind::Invalid => Errno::EINVAL,
        _ => Errno::EIO,
    }
}

/// The path of an image below the place where the store is mounted.
#[must_use]
pub fn image_path(volume: &str, snapshot: Option<&str>) -> PathBuf {
    let directory = PathBuf::from("volumes").join(escape(volume));
    match snapshot {
        None => directory.join("head.raw"),
        Some(name) => directory.join("snapshots").join(file_name(name)),
    }
}

/// Reads from an image, whole blocks into `buffer`; less than asked for at its end only.
fn read<'a>(
    image: &Observer,
    offset: u64,
    size: usize,
    buffer: &'a mut AlignedBuf,
) -> Result<&'a [u8]> {
    let size = size as u64;
    // A head that shrinks in between is looked at once more.
    for _ in 0..2 {
        let end = image.size().map_err(gone)?;
        let stop = offset.saturating_add(size).min(end);
        if offset >= stop {
            return Ok(&[]);
        }
        let first = offset - offset % BLOCK_BYTES;
        let whole = (stop.next_multiple_of(BLOCK_BYTES).min(end) - first) as usize;
        match image.read_at(first, &mut buffer[..whole]) {
            Ok(()) => {
                return Ok(&buffer[(offset - first) as usize..(stop - first) as usize]);
            }
            Err(error) if error.kind() == ErrorKind::Invalid => {}
            Err(error) => return Err(gone(error)),
        }
    }
    Err(Errno::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block whose backing file is missing is `Io`: no request was wrong, and no image has gone.
    #[test]
    fn errors_of_reading_become_eio() {
        for (kind, errno) in [
            (ErrorKind::Io, Errno::EIO),
            (ErrorKind::Corrupt, Errno::EIO),
            (ErrorKind::NotFound, Errno::ESTALE),
            (ErrorKind::Invalid, Errno::EINVAL),
        ] {
            let found = gone(dbs_core::Error::new(kind, "x"));
            assert_eq!(i32::from(found), i32::from(errno), "{kind:?}");
        }
    }
}
