//! The files of upstream's replica in its directory: what is there, and whether upstream would serve it.

use super::{IMPORT, KEPT, TAKEN, allocated, is_half_made};
use crate::agent::files::FileName;
use crate::host::file::STORE_FILE;
use crate::replica::incoming::link;
use crate::replica::meta::{DiskMeta, VOLUME_META, VolumeMeta};
use crate::replica::{FILES, view::SECTOR_SIZE};
use dbs_core::io::is_open_for_writing;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::{names, time};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file with the count of writes: decimal digits, and zero bytes up to its length.
pub const REVISION_FILE: &str = "revision.counter";
/// Bytes of it.
pub const REVISION_BYTES: usize = 4096;
/// Behind the name of an image.
pub const META: &str = ".meta";
/// Behind the name of an image.
pub const CHECKSUM: &str = ".checksum";
/// Most of a small file that is read.
const SMALL_MAX_BYTES: u64 = 1 << 20;
/// Others that may be there: sockets of ours, and what a file system has in its root.
const OTHERS: [&str; 2] = ["volume.sock", "lost+found"];

/// A closed replica of upstream's.
#[derive(Debug)]
pub struct Files {
    /// Where it is.
    pub dir: PathBuf,
    /// What it says of itself.
    pub meta: VolumeMeta,
    /// Its layers by their disk names, the head among them.
    pub disks: BTreeMap<String, DiskMeta>,
    /// Writes counted, if they are.
    pub revision: u64,
    /// All files of it, with what was left of things that upstream did not finish.
    names: Vec<String>,
}

/// What a name stands for.
enum Kind {
    Image,
    Meta(String),
    /// Of no other kind, or left over.
    Other,
}

impl Files {
    /// Looks at a directory.
    ///
    /// # Errors
    /// `NotFound` if it holds no replica of upstream's; `Exists` if it holds one of ours; `Invalid` with the reason if
    /// upstream would not serve it, or not all of it is known.
    pub fn read(dir: &Path) -> Result<Self> {
        let failed = |e| Error::io(e, format!("reading `{}`", dir.display()));
        let (mut names, mut images, mut metas) = (Vec::new(), Vec::new(), Vec::new());
        for entry in fs::read_dir(dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_str().ok_or_else(|| unknown(&name.to_string_lossy()))?;
            match kind_of(name)? {
                None => continue,
                Some(Kind::Image) => images.push(name.to_owned()),
                Some(Kind::Meta(disk)) => metas.push(disk),
                Some(Kind::Other) => {}
            }
            names.push(name.to_owned());
        }
        names.sort();
        let Some(meta) = VolumeMeta::read(dir)? else {
            let text = format!("`{}` holds no replica: {VOLUME_META} is missing", dir.display());
            let torn = names.iter().any(|name| name == VOLUME_META);
            return Err(if torn {
                bad("", "volume.meta is damaged")
            } else {
                Error::not_found(text)
            });
        };
        let mut disks = BTreeMap::new();
        for disk in metas {
            let path = dir.join(format!("{disk}{META}"));
            let described = DiskMeta::parse(&disk, &small(&path)?.unwrap_or_default())?;
            disks.insert(disk, described);
        }
        check_whole(&meta, &images, &disks)?;
        let revision = revision(&dir.join(REVISION_FILE))?;
        let mut files = Self { dir: dir.to_owned(), meta, disks, revision, names };
        files.drop_old_heads()?;
        files.check_tree()?;
        Ok(files)
    }

    /// Names of all files of it.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Path of a disk's image.
    #[must_use]
    pub fn image(&self, disk: &str) -> PathBuf {
        self.dir.join(disk)
    }

    /// Bytes that the images take.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.disks.keys().map(|disk| allocated(&self.image(disk))).sum()
    }

    /// Snapshots, each behind its parent.
    #[must_use]
    pub fn snapshots(&self) -> Vec<&str> {
        let mut ordered: Vec<&str> = Vec::new();
        for disk in self.disks.keys().filter(|disk| **disk != self.meta.head) {
            let (mut line, mut at) = (Vec::new(), disk.as_str());
            while let Some((name, meta)) = self.disks.get_key_value(at) {
                if ordered.contains(&name.as_str()) {
                    break;
                }
                line.push(name.as_str());
                at = &meta.parent;
            }
            ordered.extend(line.into_iter().rev());
        }
        ordered
    }

    /// Refuses while a process has one of the images open for writing.
    ///
    /// # Errors
    /// `Busy`, `Io`.
    pub fn check_unused(&self) -> Result<()> {
        self.disks.keys().try_for_each(|disk| check_unused(&self.image(disk)))
    }

    /// Refuses layers that are smaller than the file below.
    ///
    /// # Errors
    /// `Invalid`, `Io`.
    pub fn check_above(&self, below: u64) -> Result<()> {
        for disk in
            self.disks.iter().filter(|(_, meta)| meta.parent.is_empty()).map(|(disk, _)| disk)
        {
            let size = metadata(&self.image(disk))?.size();
            // A base ends with a block, in which a layer may end.
            let [room, end] = [size, below].map(|size| size.next_multiple_of(BLOCK_BYTES));
            if *disk != self.meta.head && room < end {
                let text = format!("it has {size} bytes, and the backing file below it {below}");
                return Err(bad(disk, &text));
            }
        }
        Ok(())
    }

    /// What changes when one of the files does: a line for each, with its name at the end.
    ///
    /// # Errors
    /// `Io`.
    pub fn stamp(&self) -> Result<String> {
        let mut stamp = String::new();
        for name in &self.names {
            let path = self.dir.join(name);
            let m = fs::symlink_metadata(&path)
                .map_err(|e| Error::io(e, format!("looking at `{}`", path.display())))?;
            stamp += &format!("{} {}.{:09} {name}\n", state(&m), m.ctime(), m.ctime_nsec());
        }
        Ok(stamp)
    }

    /// The head may be there twice when a snapshot was cut off, and so may the one before it: as an empty file, or as
    /// another name of a snapshot's. They belong to nobody.
    fn drop_old_heads(&mut self) -> Result<()> {
        let old = |disk: &&String| names::head_number(disk).is_some() && **disk != self.meta.head;
        let heads: Vec<_> = self.disks.keys().filter(old).cloned().collect();
        for head in heads {
            let m = metadata(&self.image(&head))?;
            let same = |other: &String| {
                *other != head
                    && metadata(&self.image(other)).is_ok_and(|other| other.ino() == m.ino())
            };
            if m.blocks() > 0 && !self.disks.keys().any(same) {
                let text = format!("it has content, and {} is the head", self.meta.head);
                return Err(bad(&head, &text));
            }
            self.disks.remove(&head);
        }
        let head = metadata(&self.image(&self.meta.head))?;
        let same = |disk: &String| {
            *disk != self.meta.head
                && metadata(&self.image(disk)).is_ok_and(|other| other.ino() == head.ino())
        };
        if let Some(disk) = self.disks.keys().find(|disk| same(disk)) {
            return Err(bad(
                disk,
                "it is the same file as the head: a snapshot that was cut off has left it. Move it away, with \
                 the file with .meta behind its name",
            ));
        }
        Ok(())
    }

    /// Each layer has its parents, and fits on them.
    fn check_tree(&self) -> Result<()> {
        for (disk, meta) in &self.disks {
            if let Some(name) = names::snapshot_name(disk) {
                // With what is added to them.
                names::check_snapshot(name, link(name, meta).labels)?;
            }
            let size = metadata(&self.image(disk))?.size();
            if !size.is_multiple_of(SECTOR_SIZE) || size > self.meta.size {
                let text = format!("it has {size} bytes, and the volume {}", self.meta.size);
                return Err(bad(disk, &text));
            }
            if *disk == self.meta.head && size < self.meta.size && !size.is_multiple_of(BLOCK_BYTES)
            {
                return Err(bad(disk, &format!("it ends within a block, at {size} bytes")));
            }
            let parent = self.disks.get(&meta.parent).map(|_| metadata(&self.image(&meta.parent)));
            let room = if *disk == self.meta.head { self.meta.size } else { size };
            let below = parent.transpose()?.map_or(room, |parent| parent.size());
            if below > room || (below < room && !below.is_multiple_of(BLOCK_BYTES)) {
                let text = format!("its parent {} is larger, or ends within a block", meta.parent);
                return Err(bad(disk, &text));
            }
            let (mut at, mut steps) = (meta, 0);
            while !at.parent.is_empty() {
                let parent = self.disks.get(&at.parent).filter(|_| at.parent != self.meta.head);
                at = parent
                    .ok_or_else(|| bad(disk, &format!("its parent {} is missing", at.parent)))?;
                steps += 1;
                if steps > self.disks.len() {
                    return Err(bad(disk, "its parents form a loop"));
                }
            }
        }
        Ok(())
    }
}

/// Refuses while a process has a file open for writing.
///
/// # Errors
/// `Busy`, `Io`.
pub fn check_unused(path: &Path) -> Result<()> {
    let open = File::open(path).and_then(|file| is_open_for_writing(&file));
    if open.map_err(|e| Error::io(e, format!("asking who uses `{}`", path.display())))? {
        let path = path.display();
        return Err(Error::busy(format!(
            "a process has `{path}` open for writing, or its file system (NFS) does not tell: stop the replica \
             first, or copy its files to a local file system"
        )));
    }
    Ok(())
}

/// What changes when a file is written or replaced. Its ctime also changes with the number of its names.
#[must_use]
pub fn state(m: &fs::Metadata) -> String {
    format!("{} {} {}.{:09}", m.size(), m.ino(), m.mtime(), m.mtime_nsec())
}

/// Whether a file of this name is one of upstream's replica.
#[must_use]
pub fn is_upstreams(name: &str) -> bool {
    matches!(kind_of(name), Ok(Some(_)))
}

/// What a name stands for; nothing if it is not upstream's and does no harm.
fn kind_of(name: &str) -> Result<Option<Kind>> {
    // Names are written one in a line, and read without spaces around them.
    if name.contains(char::is_control) || name.trim() != name {
        return Err(unknown(&name.escape_debug().to_string()));
    }
    if name == STORE_FILE {
        let text = format!("there is a replica of DBS in the directory ({STORE_FILE})");
        return Err(Error::new(ErrorKind::Exists, text));
    }
    if [VOLUME_META, REVISION_FILE].contains(&name) {
        return Ok(Some(Kind::Other));
    }
    if FILES.contains(&name)
        || OTHERS.contains(&name)
        || [IMPORT, KEPT, TAKEN].contains(&name)
        || is_half_made(name)
    {
        return Ok(None);
    }
    if name.ends_with(".snap_tmp") || name.starts_with("volume-delta-") {
        let text = "a restore that was cut off has left it: let upstream's replica end the restore, or remove it";
        return Err(bad(name, text));
    }
    // Each file is written under such a name first.
    let done = name.strip_suffix(".tmp").unwrap_or(name);
    let kind = match FileName::parse(done) {
        Ok(_) if done.len() < name.len() => Kind::Other,
        Ok(FileName::Snapshot(_) | FileName::Head(_)) => Kind::Image,
        Ok(FileName::SnapshotMeta(disk) | FileName::HeadMeta(disk)) => Kind::Meta(disk),
        Ok(FileName::Checksum(_)) => Kind::Other,
        Err(_) if done.len() < name.len() && [VOLUME_META, REVISION_FILE].contains(&done) => {
            Kind::Other
        }
        Err(_) => return Err(unknown(name)),
    };
    Ok(Some(kind))
}

/// Refuses what upstream would not serve, and what is not there as a whole.
fn check_whole(
    meta: &VolumeMeta,
    images: &[String],
    disks: &BTreeMap<String, DiskMeta>,
) -> Result<()> {
    if !meta.error.is_empty() {
        return Err(bad("", &format!("its {VOLUME_META} tells of an error: {}", meta.error)));
    }
    if meta.rebuilding {
        return Err(bad(
            "",
            "it was being rebuilt, and its content is incomplete: rebuild it anew. If it is the only replica of its \
             volume, start and stop that once with upstream's engine",
        ));
    }
    if meta.size == 0 || !meta.size.is_multiple_of(SECTOR_SIZE) {
        return Err(bad("", &format!("{} bytes are no size of a volume", meta.size)));
    }
    if !disks.contains_key(&meta.head) || names::head_number(&meta.head).is_none() {
        return Err(bad("", &format!("its head {:?} is missing", meta.head)));
    }
    let cut_off = "a purge, rebuild or clone that was cut off has left it so";
    if let Some(image) = images.iter().find(|image| !disks.contains_key(*image)) {
        let child = disks.iter().find(|(_, child)| child.parent == **image).map(|(disk, _)| disk);
        let child = child.or((meta.parent == **image).then_some(&meta.head));
        let text = match child {
            Some(child) => format!(
                "it has no {META}, and is the parent of {child}, which needs it. Take that file from another replica of \
                 the volume, or rebuild this one"
            ),
            None => format!("it has no {META}: {cut_off}. Move it away"),
        };
        return Err(bad(image, &text));
    }
    if let Some(disk) = disks.keys().find(|disk| !images.contains(disk)) {
        return Err(bad(
            disk,
            &format!("the file is missing: {cut_off}. Start and stop upstream's replica once"),
        ));
    }
    Ok(())
}

/// When a file was changed last, as upstream notes it beside a checksum: in UTC, which is what its containers have.
#[must_use]
pub fn change_time(image: &Path) -> String {
    let Ok(m) = fs::metadata(image) else { return String::new() };
    let second = time::text(m.ctime().unsigned_abs() * 1_000_000_000).replace('T', " ");
    let fraction = format!(".{:09}", m.ctime_nsec());
    let fraction = fraction.trim_end_matches('0').trim_end_matches('.');
    format!("{}{fraction} +0000 UTC", second.trim_end_matches('Z'))
}

/// The count of writes in a file; 0 if there is none.
///
/// # Errors
/// `Invalid`, `Io`.
pub fn revision(path: &Path) -> Result<u64> {
    let Some(bytes) = small(path)? else { return Ok(0) };
    let text = String::from_utf8_lossy(&bytes);
    text.trim_matches('\0').parse().map_err(|_| bad(REVISION_FILE, "it has no number"))
}

/// A small file; nothing if there is none.
fn small(path: &Path) -> Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(SMALL_MAX_BYTES).read_to_end(&mut bytes));
    match read {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read
            .map(|_| Some(bytes))
            .map_err(|e| Error::io(e, format!("reading `{}`", path.display()))),
    }
}

fn metadata(path: &Path) -> Result<fs::Metadata> {
    let metadata = fs::symlink_metadata(path);
    let metadata =
        metadata.map_err(|e| Error::io(e, format!("looking at `{}`", path.display())))?;
    if metadata.is_file() {
        Ok(metadata)
    } else {
        Err(bad(&path.display().to_string(), "it is no file"))
    }
}

fn unknown(name: &str) -> Error {
    bad(name, "it is no file of upstream's replica: move it away")
}

fn bad(what: &str, why: &str) -> Error {
    let what = if what.is_empty() { "the replica".to_owned() } else { format!("`{what}`") };
    Error::invalid(format!("{what} cannot be taken over: {why}"))
}
