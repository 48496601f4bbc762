//! The tree: what is in it, and what each part of it looks like.

use crate::names::{escape, unescape};
use crate::node::{Kind, Node, Nodes};
use crate::text;
use crate::times::Times;
use dbs_core::volume::{Observed, Observer};
use dbs_core::{ErrorKind, Store};
use fuser::{Errno, FileAttr, FileType, INodeNo};
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What images end in.
const RAW: &str = ".raw";
/// Unit of `st_blocks` in bytes.
const STAT_BLOCK: u64 = 512;

/// Result of an operation of the kernel.
pub type Result<T> = std::result::Result<T, Errno>;

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
    /// What the kernel knows of it.
    pub nodes: Nodes,
    owner: (u32, u32),
    times: Times,
}

/// An entry of a directory.
#[derive(Debug, Clone)]
pub struct Entry {
    /// File name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

impl Entry {
    fn new(name: &str, kind: Kind) -> Self {
        Self { name: name.to_owned(), kind }
    }

    /// Whether it is the directory itself or the one above. Nothing else is called so: names are
    /// escaped.
    pub fn is_dots(&self) -> bool {
        matches!(self.name.as_str(), "." | "..")
    }
}

impl View {
    /// A view of a store.
    pub fn new(store: Store, options: Options) -> Self {
        let written = std::fs::metadata(&options.store).and_then(|m| {
            use std::os::unix::fs::FileTypeExt;
            // Of a device it says when its node was made.
            if m.file_type().is_block_device() { Ok(SystemTime::now()) } else { m.modified() }
        });
        let owner = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        let written = written.unwrap_or_else(|_| SystemTime::now());
        Self { store, options, nodes: Nodes::new(), owner, times: Times::new(written) }
    }

    /// How long the kernel may believe what it was told of names and attributes.
    pub fn lifetime(&self) -> Duration {
        if self.options.live { Duration::ZERO } else { Duration::from_secs(3600) }
    }

    /// The node of a number.
    pub fn node(&self, number: INodeNo) -> Result<Arc<Node>> {
        self.nodes.get(number.0).ok_or(Errno::ESTALE)
    }

    /// What has a name in a directory.
    pub fn child(&self, directory: &Kind, name: &OsStr) -> Result<Kind> {
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

    /// What is in a directory.
    pub fn entries(&self, directory: &Kind) -> Result<Vec<Entry>> {
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

    /// Where a link leads.
    pub fn target(&self, link: &Kind) -> Result<String> {
        let Kind::Latest(volume) = link else { return Err(Errno::EINVAL) };
        let newest = volume.newest().map_err(gone)?.ok_or(Errno::ESTALE)?;
        Ok(format!("snapshots/{}", file_name(&newest)))
    }

    /// The text of a file that is made when it is read.
    pub fn text(&self, file: &Kind) -> Result<Vec<u8>> {
        match file {
            Kind::StoreJson => Ok(text::store(&self.store, &self.options.store, self.options.live)),
            Kind::Info(volume) => text::info(volume).map_err(gone),
            Kind::Map(volume) => text::map(volume).map_err(gone),
            _ => Err(Errno::EINVAL),
        }
    }

    /// All attributes, but for the size of a map, which is known once one was opened.
    pub fn attributes(&self, number: u64, node: &Node) -> Result<FileAttr> {
        let mut time = None;
        let (size, blocks) = match &node.kind {
            Kind::Head(image) | Kind::Snapshot(image) => {
                let bytes = node.data_bytes(&self.store, self.options.live, image).map_err(gone)?;
                (image.size().map_err(gone)?, bytes / STAT_BLOCK)
            }
            kind @ (Kind::StoreJson | Kind::Info(_)) => {
                let text = self.text(kind)?;
                time = Some(self.text_time(kind, &text));
                text_size(text.len() as u64)
            }
            Kind::Map(_) => text_size(node.text_bytes()),
            kind @ Kind::Latest(_) => (self.target(kind)?.len() as u64, 0),
            _ => (0, 0),
        };
        let time = time.map_or_else(|| self.time(&node.kind), Ok)?;
        Ok(self.shape(number, &node.kind, (size, blocks), time))
    }

    /// Attributes as far as they are known without walking a volume, and whether that is all: else
    /// they are not to be believed.
    pub fn quick_attributes(&self, number: u64, node: &Node) -> Result<(FileAttr, bool)> {
        match &node.kind {
            Kind::Head(image) | Kind::Snapshot(image) => {
                let (size, known) = (image.size().map_err(gone)?, node.known_bytes());
                let blocks = known.unwrap_or(size) / STAT_BLOCK;
                let time = self.time(&node.kind)?;
                Ok((self.shape(number, &node.kind, (size, blocks), time), known.is_some()))
            }
            Kind::Map(_) => Ok((self.attributes(number, node)?, node.text_bytes() > 0)),
            _ => Ok((self.attributes(number, node)?, true)),
        }
    }

    fn shape(&self, number: u64, kind: &Kind, space: (u64, u64), time: SystemTime) -> FileAttr {
        let file_type = file_type(kind);
        let (size, blocks) = space;
        let others = self.options.allow_other;
        let (perm, nlink) = match file_type {
            FileType::Directory => (if others { 0o555 } else { 0o500 }, 2),
            FileType::Symlink => (0o777, 1),
            _ => (if others { 0o444 } else { 0o400 }, 1),
        };
        FileAttr {
            ino: INodeNo(number),
            size,
            blocks,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: file_type,
            perm,
            nlink,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: 4096,
            flags: 0,
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

/// Bytes and blocks of a text.
fn text_size(bytes: u64) -> (u64, u64) {
    (bytes, bytes.div_ceil(STAT_BLOCK))
}

/// The type of a node.
pub fn file_type(kind: &Kind) -> FileType {
    match kind {
        Kind::Root | Kind::Volumes | Kind::Volume(_) | Kind::Snapshots(_) => FileType::Directory,
        Kind::Latest(_) => FileType::Symlink,
        _ => FileType::RegularFile,
    }
}

/// The file name of a snapshot.
pub fn file_name(snapshot: &str) -> String {
    escape(snapshot) + RAW
}

/// The error number of a failed look at something that the kernel knows.
pub fn gone(error: dbs_core::Error) -> Errno {
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

/// Extended attributes of a node: names without `user.dbs.`, and values.
pub fn extended(kind: &Kind) -> Result<Vec<(String, String)>> {
    match kind {
        Kind::Volume(volume) | Kind::Head(volume) => text::volume_facts(volume).map_err(gone),
        Kind::Snapshot(snapshot) => text::snapshot_facts(snapshot).map_err(gone),
        _ => Ok(Vec::new()),
    }
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
