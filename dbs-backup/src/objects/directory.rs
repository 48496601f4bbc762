//! Objects as files in a directory: `vfs://`, and what is mounted for `nfs://` and `cifs://`.

use super::{Allowed, Found, Objects, Prepared, Stat, missing, too_long};
use crate::names::{BASE, TEMPORARY};
use dbs_core::{Error, Result};
use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Parents that are removed with their last child: more than any path has.
const DEPTH: usize = 10;
/// Times that a file is made again whose folder somebody removed meanwhile.
const TRIES: usize = 10;

/// A directory.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    /// While it is open, what is mounted there stays.
    open: File,
    /// Makes the names of temporary files different.
    count: AtomicU64,
}

/// A file that has its content, and not yet its name.
#[derive(Debug)]
pub struct Fresh {
    file: File,
    /// None once it has its name.
    path: Option<PathBuf>,
    target: PathBuf,
    /// Folders in which there is something new.
    changed: Vec<PathBuf>,
}

impl Fresh {
    fn sync(&self) -> io::Result<()> {
        sync_file(&self.file, &self.target)
    }

    fn name(&mut self) -> io::Result<()> {
        if let Some(path) = &self.path {
            rename(path, &self.target)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // It may be there or not; garbage is collected later.
            let _ = fs::remove_file(path);
        }
    }
}

impl Directory {
    /// The directory at `root`, which is there.
    ///
    /// # Errors
    /// `NotFound` if it is not, or is no directory.
    pub fn open(root: &Path) -> Result<Self> {
        match fs::metadata(root) {
            Ok(metadata) if metadata.is_dir() => {
                let open = File::open(root).map_err(|e| failed(e, "opening", root))?;
                Ok(Self { root: root.to_owned(), open, count: AtomicU64::new(0) })
            }
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(failed(error, "opening", root))
            }
            _ => Err(Error::not_found(format!(
                "VFS path {} doesn't exist or is not a directory: make it first",
                root.display()
            ))),
        }
    }

    fn at(&self, path: &str) -> PathBuf {
        debug_assert!(
            Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
        );
        self.root.join(path)
    }

    /// Makes a folder and its parents. What holds them is added to `changed`: it has yet to be made durable.
    fn make(&self, folder: &Path, changed: &mut Vec<PathBuf>) -> io::Result<()> {
        let parent = folder.parent().unwrap_or(&self.root);
        match DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound && folder != self.root => {
                self.make(parent, changed)?;
                match DirBuilder::new().mode(0o700).create(folder) {
                    Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                    _ => {}
                }
            }
            Err(error) => return Err(error),
        }
        changed.push(parent.to_owned());
        Ok(())
    }

    /// A new file beside `target`, as upstream names it.
    fn temporary(&self, target: &Path) -> io::Result<Fresh> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let folder = target.parent().unwrap_or(&self.root);
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let mut name = target.as_os_str().to_owned();
        name.push(format!("{TEMPORARY}{}", now + u128::from(count)));
        let (path, mut changed) = (PathBuf::from(name), vec![folder.to_owned()]);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        for _ in 0..TRIES {
            match options.open(&path) {
                // Somebody removed the last file in the folder, and with it the folder.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    self.make(folder, &mut changed)?;
                }
                opened => {
                    let (path, target) = (Some(path), target.to_owned());
                    return opened.map(|file| Fresh { file, path, target, changed });
                }
            }
        }
        Err(io::Error::other("its folder disappears again and again"))
    }

    fn write(&self, target: &Path, content: &[u8]) -> io::Result<Fresh> {
        let mut fresh = self.temporary(target)?;
        fresh.file.write_all(content)?;
        // The disk begins with it, so that it has less to do when it is waited for. If it does not, nothing is lost.
        let _ = posix_fadvise(&fresh.file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        Ok(fresh)
    }

    /// Removes folders that have become empty, up to the base.
    fn prune(&self, path: &Path) {
        let base = self.root.join(BASE);
        for folder in path.ancestors().skip(1).take(DEPTH) {
            if folder == base || !folder.starts_with(&base) || fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }

    fn walk_folder(&self, folder: &Path, prefix: &str, found: Found<'_>) -> Result<()> {
        for (name, is_folder) in entries(folder)? {
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
            // Three levels are the deepest that there are; what is deeper is none of ours.
            if !is_folder {
                found(&path, &|| length(&folder.join(&name)))?;
            } else if path.matches('/').count() < DEPTH {
                self.walk_folder(&folder.join(&name), &path, found)?;
            }
        }
        Ok(())
    }
}

impl Objects for Directory {
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let content = self.get_start(path, limit + 1)?;
        if content.len() as u64 > limit {
            return Err(too_long(path, limit));
        }
        Ok(content)
    }

    fn get_range(&self, path: &str, start: u64, most: u64) -> Result<Vec<u8>> {
        // What is no file is not waited for.
        let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(self.at(path));
        let mut file = match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(missing(path)),
            opened => opened.map_err(|e| failed(e, "opening", &self.at(path)))?,
        };
        let metadata = file.metadata().map_err(|e| failed(e, "looking at", &self.at(path)))?;
        if !metadata.is_file() {
            // As `stat` has it.
            return Err(missing(path).context("what is there is no file"));
        }
        let mut content = Vec::new();
        if start > 0 {
            file.seek(SeekFrom::Start(start)).map_err(|e| failed(e, "reading", &self.at(path)))?;
        }
        let read = file.take(most).read_to_end(&mut content);
        read.map_err(|e| failed(e, "reading", &self.at(path)))?;
        Ok(content)
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        self.complete(vec![self.prepare(path, content)?])
    }

    fn prepare(&self, path: &str, content: &[u8]) -> Result<Prepared> {
        let target = self.at(path);
        let fresh = self.write(&target, content).map_err(|e| failed(e, "writing", &target))?;
        Ok(Prepared(Some(fresh)))
    }

    /// The content is durable before it has its name: a file with the name is complete. The name is durable when this
    /// returns, so that what is written next may rely on it. File systems do for many what they would do for each.
    fn complete(&self, prepared: Vec<Prepared>) -> Result<()> {
        let mut all: Vec<Fresh> = prepared.into_iter().filter_map(|prepared| prepared.0).collect();
        let written = |e, fresh: &Fresh| failed(e, "writing", &fresh.target);
        all.iter().try_for_each(|fresh| fresh.sync().map_err(|e| written(e, fresh)))?;
        all.iter_mut().try_for_each(|fresh| fresh.name().map_err(|e| written(e, fresh)))?;
        let folders: BTreeSet<&PathBuf> = all.iter().flat_map(|fresh| &fresh.changed).collect();
        folders
            .into_iter()
            .try_for_each(|folder| sync_folder(folder).map_err(|e| failed(e, "writing", folder)))
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        let file = self.at(path);
        match fs::metadata(&file) {
            Ok(metadata) if metadata.is_file() => {
                let modified = metadata.modified().map_err(|e| failed(e, "looking at", &file))?;
                Ok(Some(Stat { size: metadata.len(), modified }))
            }
            Ok(_) => Ok(None),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(failed(error, "looking at", &file)),
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        Ok(entries(&self.at(folder))?.into_iter().map(|(name, _)| name).collect())
    }

    fn walk(&self, folder: &str, found: Found<'_>) -> Result<()> {
        self.walk_folder(&self.at(folder), "", found)
    }

    fn remove_if(&self, path: &str, allowed: Allowed<'_>) -> Result<()> {
        let file = self.at(path);
        allowed()?;
        match fs::remove_file(&file) {
            Err(error) if !is_absent(&error) => return Err(failed(error, "removing", &file)),
            _ => self.prune(&file),
        }
        Ok(())
    }

    fn remove_all(&self, folder: &str) -> Result<()> {
        let path = self.at(folder);
        match fs::remove_dir_all(&path) {
            Err(error) if !is_absent(&error) => return Err(failed(error, "removing", &path)),
            _ => self.prune(&path),
        }
        Ok(())
    }

    fn remove_empty(&self, folder: &str) -> Result<()> {
        let path = self.at(folder);
        remove_empty(&path, DEPTH);
        self.prune(&path);
        Ok(())
    }

    /// Upstream does not sync its files, and a program that was killed may not have come to it.
    fn settle(&self) -> Result<()> {
        // The folder can be on another file system than the one it is in.
        let base = self.root.join(BASE);
        let opened = match File::open(&base) {
            Err(error) if is_absent(&error) => self.open.try_clone(),
            opened => opened,
        };
        let folder = opened.map_err(|e| failed(e, "opening", &base))?;
        sync_all(&folder, &base).map_err(|e| failed(e, "syncing", &base))
    }
}

/// Removes folders in which nothing is; that one stays is no harm.
fn remove_empty(folder: &Path, depth: usize) {
    for (name, is_folder) in entries(folder).unwrap_or_default() {
        if is_folder && depth > 0 {
            remove_empty(&folder.join(name), depth - 1);
        }
    }
    let _ = fs::remove_dir(folder);
}

/// Names below a folder, and whether each is a folder. Names that are no UTF-8 are none of ours.
fn entries(folder: &Path) -> Result<Vec<(String, bool)>> {
    let read = match fs::read_dir(folder) {
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        read => read.map_err(|e| failed(e, "listing", folder))?,
    };
    let mut all = Vec::new();
    for entry in read {
        let entry = entry.map_err(|e| failed(e, "listing", folder))?;
        let kind = match entry.file_type() {
            Err(error) if is_absent(&error) => continue,
            kind => kind.map_err(|e| failed(e, "listing", folder))?,
        };
        all.extend(entry.file_name().to_str().map(|name| (name.to_owned(), kind.is_dir())));
    }
    all.sort();
    Ok(all)
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

#[cfg(test)]
thread_local! {
    /// What was made durable, got its name or was asked for its length, in order: nothing else shows it without a power
    /// loss, or a network.
    static ORDER: std::cell::RefCell<Vec<String>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[cfg(test)]
fn note(what: &str, path: &Path) {
    ORDER.with_borrow_mut(|order| order.push(format!("{what} {}", path.display())));
}

#[cfg(not(test))]
fn note(_: &str, _: &Path) {}

fn sync_file(file: &File, path: &Path) -> io::Result<()> {
    note("file", path);
    file.sync_all()
}

/// The whole file system.
fn sync_all(file: &File, path: &Path) -> io::Result<()> {
    note("all", path);
    nix::unistd::syncfs(file).map_err(io::Error::from)
}

/// Bytes of a file.
fn length(path: &Path) -> Option<u64> {
    note("length", path);
    fs::symlink_metadata(path).ok().map(|metadata| metadata.len())
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    note("name", to);
    fs::rename(from, to)
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    note("folder", folder);
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    match synced {
        // Some network file systems have nothing to sync there.
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

fn failed(error: io::Error, what: &str, path: &Path) -> Error {
    Error::io(error, format!("{what} {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn objects_in_a_directory() {
        let root = tempfile::tempdir().unwrap();
        let objects = Directory::open(root.path()).unwrap();
        assert!(Directory::open(&root.path().join("absent")).is_err());
        objects.put("backupstore/a/b/one", b"1").unwrap();
        objects.put("backupstore/a/b/one", b"one").unwrap();
        objects.put("backupstore/a/two", b"two").unwrap();
        assert_eq!(objects.get("backupstore/a/b/one", 3).unwrap(), b"one");
        assert_eq!(
            objects.get("backupstore/a/b/one", 2).unwrap_err().kind(),
            dbs_core::ErrorKind::Corrupt
        );
        assert_eq!(objects.list("backupstore/a").unwrap(), ["b", "two"]);
        assert!(objects.list("backupstore/x").unwrap().is_empty());
        let mut all = Vec::new();
        objects
            .walk("backupstore", &mut |path, size| {
                all.push((path.to_owned(), size().unwrap()));
                Ok(())
            })
            .unwrap();
        assert_eq!(all, [("a/b/one".to_owned(), 3), ("a/two".to_owned(), 3)]);
        assert_eq!(objects.stat("backupstore/a/two").unwrap().unwrap().size, 3);
        assert_eq!(objects.stat("backupstore/a").unwrap(), None);
        objects.remove("backupstore/a/b/one").unwrap();
        objects.remove("backupstore/a/b/one").unwrap();
        assert!(!root.path().join("backupstore/a/b").exists(), "empty folders go");
        std::fs::create_dir_all(root.path().join("backupstore/a/x/y")).unwrap();
        objects.remove_empty("backupstore/a").unwrap();
        assert_eq!(objects.list("backupstore/a").unwrap(), ["two"]);
        objects.remove_all("backupstore/a").unwrap();
        objects.settle().unwrap();
        assert!(root.path().join("backupstore").exists());
        let absent = objects.get("backupstore/a/two", 3).unwrap_err();
        assert_eq!(absent.to_string(), "cannot find backupstore/a/two in backupstore");
    }

    /// Content before its name, and the name, with the folders above, before the return.
    #[test]
    fn what_is_durable_when() {
        let root = tempfile::tempdir().unwrap();
        let objects = Directory::open(root.path()).unwrap();
        let order = || {
            let order = ORDER.take();
            let root = format!("{}/", root.path().display());
            // The number of a temporary file is none of it.
            let plain = |line: &String| {
                let line = format!("{line}/").replace(&root, "/");
                line.split(TEMPORARY).next().unwrap().trim_end_matches('/').to_owned()
            };
            order.iter().map(plain).collect::<Vec<_>>()
        };
        order();
        objects.put("backupstore/a/one", b"1").unwrap();
        let file = ["file /backupstore/a/one", "name /backupstore/a/one"];
        let folders = ["folder ", "folder /backupstore", "folder /backupstore/a"];
        assert_eq!(order(), [&file[..], &folders].concat());
        objects.put("backupstore/a/one", b"2").unwrap();
        assert_eq!(order(), [&file[..], &folders[2..]].concat());
        objects.settle().unwrap();
        assert_eq!(order(), ["all /backupstore"]);
    }

    /// All content before the first name, each folder once, and nothing stays of what is given up.
    #[test]
    fn what_is_durable_of_several() {
        let root = tempfile::tempdir().unwrap();
        let objects = Directory::open(root.path()).unwrap();
        let one = objects.prepare("backupstore/a/one", b"1").unwrap();
        let two = objects.prepare("backupstore/b/two", b"2").unwrap();
        let three = objects.prepare("backupstore/a/three", b"3").unwrap();
        assert!(objects.stat("backupstore/a/one").unwrap().is_none(), "it has no name yet");
        drop(objects.prepare("backupstore/a/four", b"4").unwrap());
        ORDER.take();
        objects.complete(vec![one, two, three]).unwrap();
        let order = ORDER.take();
        let kinds: Vec<_> = order.iter().map(|line| line.split(' ').next().unwrap()).collect();
        let names = ["name"; 3];
        assert_eq!(kinds, [&["file"; 3][..], &names, &["folder"; 4]].concat(), "{order:?}");
        assert_eq!(objects.list("backupstore/a").unwrap(), ["one", "three"]);
        assert_eq!(objects.get("backupstore/b/two", 1).unwrap(), b"2");
    }

    /// What has no name when something fails never gets it.
    #[test]
    fn what_fails_with_others() {
        let root = tempfile::tempdir().unwrap();
        let objects = Directory::open(root.path()).unwrap();
        objects.put("backupstore/a/two/three", b"3").unwrap();
        let one = objects.prepare("backupstore/a/one", b"1").unwrap();
        let two = objects.prepare("backupstore/a/two", b"2").unwrap();
        assert!(objects.complete(vec![two, one]).is_err(), "there is a folder of that name");
        assert_eq!(objects.list("backupstore/a").unwrap(), ["two"]);
    }

    /// On a network file system each look at a file is a request.
    #[test]
    fn a_walk_looks_only_at_files_whose_length_is_asked_for() {
        let root = tempfile::tempdir().unwrap();
        let objects = Directory::open(root.path()).unwrap();
        objects.put("backupstore/a/one", b"1").unwrap();
        objects.put("backupstore/a/two", b"2").unwrap();
        ORDER.take();
        let walk = |wanted: &str| {
            let mut found = Vec::new();
            let mut look = |path: &str, bytes: super::super::Bytes<'_>| {
                found.extend(path.ends_with(wanted).then(bytes));
                Ok(())
            };
            objects.walk("backupstore", &mut look).unwrap();
            (found, ORDER.take().len())
        };
        assert_eq!(walk("two"), (vec![Some(1)], 1));
        assert_eq!(walk("none"), (vec![], 0));
    }

    /// What was opened stays mounted, and is not taken for what comes after it.
    #[test]
    fn the_directory_stays_open() {
        let root = tempfile::tempdir().unwrap();
        let objects = Directory::open(root.path()).unwrap();
        let open =
            std::fs::read_link(format!("/proc/self/fd/{}", objects.open.as_raw_fd())).unwrap();
        assert_eq!(open, root.path().canonicalize().unwrap());
        objects.settle().unwrap();
    }
}
