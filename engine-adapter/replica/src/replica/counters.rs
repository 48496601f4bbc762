//! What must outlive the process but is too much for a commit: the revision counter and when the
//! head was last written.
//!
//! They are a line in a small file of the replica's directory, rewritten in place for each write
//! that is counted: it survives `kill -9` in the page cache, and names the boot it belongs to. After
//! a power loss, when the writes themselves may be gone, the count that was committed with the
//! store's metadata holds instead. So it does if the tail of a store is gone: the line then names the
//! session of the store in which it was written.

use dbs_core::{Error, ErrorKind, Result};
use longhorn_data::Revision;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Name of the file.
pub const COUNTERS_FILE: &str = "volume.counters";

/// Digits of a number.
const DIGITS: usize = 20;
/// Longest file that is looked at.
const LINE_MAX_BYTES: u64 = 256;

/// The counters of one replica.
#[derive(Debug)]
pub struct Counters {
    path: PathBuf,
    boot: String,
    /// Absent until there is a volume to count for, and after it could not be written.
    file: Mutex<Option<File>>,
    revision: AtomicU64,
    /// The same, with the changes that have reached the store and are acknowledged after a commit.
    written: AtomicU64,
    modified_ns: AtomicU64,
    failed: AtomicBool,
    /// The session of the store, if its tail was gone at the beginning of that; 0 if it was not.
    session: AtomicU64,
    /// There was no room for the file: it is made once there is.
    missing: AtomicBool,
}

impl Counters {
    /// Counters of a replica directory; nothing is read or made yet.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self {
            path: dir.join(COUNTERS_FILE),
            boot: boot.trim().to_owned(),
            file: Mutex::default(),
            revision: AtomicU64::new(0),
            written: AtomicU64::new(0),
            modified_ns: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            missing: AtomicBool::new(false),
            session: AtomicU64::new(0),
        }
    }

    /// What was counted before this session of the store is not to be believed, if there is one.
    pub fn distrust_before(&self, session: Option<u64>) {
        self.session.store(session.unwrap_or(0), Ordering::SeqCst);
    }

    /// Goes on from the file if it is of this boot, and of the session that counts if there is one, else from
    /// what was `committed`; a missing file is made, its time of change being `now_ns`.
    ///
    /// Without room for it counting goes on: who cannot open the replica can delete nothing either. Until
    /// there is a file, a process that is killed takes along what was counted since the last commit; the
    /// replica is then taken for one that missed it, never for one that has what it lacks.
    ///
    /// # Errors
    /// `Io`.
    pub fn load(&self, committed: u64, now_ns: u64) -> Result<()> {
        let text = self.read().unwrap_or_default();
        let mut words = text.split_whitespace();
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let (revision, modified) = (number(), number());
        let ours = !self.boot.is_empty() && words.next() == Some(&self.boot);
        let session = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
        let ours = ours
            && matches!(self.session.load(Ordering::SeqCst), s if s == 0 || Some(s) == session);
        let revision = revision.filter(|_| ours).unwrap_or(committed);
        match self.start(revision, modified.unwrap_or(now_ns)) {
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                self.missing.store(true, Ordering::SeqCst);
                dbs_service::log::warn("counters", &[("error", &e)]);
                Ok(())
            }
            started => started,
        }
    }

    /// Begins anew with these values.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub fn start(&self, revision: u64, modified_ns: u64) -> Result<()> {
        self.put_all(revision);
        self.modified_ns.store(modified_ns, Ordering::SeqCst);
        let mut file = self.file();
        *file = None;
        let made = self.make();
        *file = Some(made.map_err(|e| Error::io(e, format!("writing `{}`", self.path.display())))?);
        self.missing.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Makes the file, or writes it whole. Nobody may be counting meanwhile.
    fn make(&self) -> io::Result<File> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&self.path)?;
        let (revision, modified) = (self.revision(), self.modified_ns());
        let session = match self.session.load(Ordering::SeqCst) {
            0 => String::new(),
            session => format!(" {session:016x}"),
        };
        let line = format!("{revision:0DIGITS$} {modified:0DIGITS$} {}{session}\n", self.boot);
        file.write_all_at(line.as_bytes(), 0)?;
        file.set_len(line.len() as u64)?;
        Ok(file)
    }

    /// Forgets the counters and removes the file.
    pub fn remove(&self) {
        *self.file() = None;
        self.missing.store(false, Ordering::SeqCst);
        // A file that stays is of no consequence: the next start overwrites it.
        let _ = fs::remove_file(&self.path);
    }

    /// Changes counted so far.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision.load(Ordering::SeqCst)
    }

    /// Changes that a commit which begins now makes durable. No more than that: a replica that claims a
    /// change which it may lack is taken for as good as those that have it.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// When the head was last changed.
    #[must_use]
    pub fn modified_ns(&self) -> u64 {
        self.modified_ns.load(Ordering::SeqCst)
    }

    /// Sets the count. Nobody may be counting meanwhile.
    pub fn set_revision(&self, revision: u64) {
        self.put_all(revision);
        self.put(&self.file(), 0, revision);
    }

    fn put_all(&self, revision: u64) {
        self.revision.store(revision, Ordering::SeqCst);
        self.written.store(revision, Ordering::SeqCst);
    }

    /// The head has been changed. Makes the file that there was no room for, if there is now.
    pub fn touch(&self, now_ns: u64) {
        self.modified_ns.store(now_ns, Ordering::SeqCst);
        let mut file = self.file();
        if !self.missing.load(Ordering::SeqCst) {
            return self.put(&file, DIGITS as u64 + 1, now_ns);
        }
        if let Ok(made) = self.make() {
            *file = Some(made);
            self.missing.store(false, Ordering::SeqCst);
        }
    }

    fn put(&self, file: &Option<File>, at: u64, number: u64) {
        let Some(file) = file else { return };
        if let Err(e) = file.write_all_at(&digits(number), at)
            && !self.failed.swap(true, Ordering::SeqCst)
        {
            let path = self.path.display();
            dbs_service::log::error("counters", &[("path", &path), ("error", &e)]);
        }
    }

    fn read(&self) -> Option<String> {
        let mut text = String::new();
        let file = File::open(&self.path).ok()?;
        let size = file.take(LINE_MAX_BYTES + 1).read_to_string(&mut text).ok()?;
        (size as u64 <= LINE_MAX_BYTES).then_some(text)
    }

    fn file(&self) -> std::sync::MutexGuard<'_, Option<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number in decimal, without an allocation.
fn digits(mut number: u64) -> [u8; DIGITS] {
    let mut digits = [b'0'; DIGITS];
    for digit in digits.iter_mut().rev() {
        *digit += (number % 10) as u8;
        number /= 10;
    }
    digits
}

impl Revision for Counters {
    fn note_written(&self) {
        self.written.fetch_add(1, Ordering::SeqCst);
    }

    fn count(&self) {
        // The lock keeps a later count from being overwritten by an earlier one.
        let file = self.file();
        let revision = self.revision.fetch_add(1, Ordering::SeqCst) + 1;
        self.put(&file, 0, revision);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn counts_survive_the_process_but_not_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let counters = Counters::new(dir.path());
        counters.load(5, 77).unwrap();
        assert_eq!((counters.revision(), counters.modified_ns()), (5, 77));
        (0..7).for_each(|_| counters.bump());
        counters.touch(1_787_306_400_250_000_000);
        let next = Counters::new(dir.path());
        next.load(9, 1).unwrap();
        assert_eq!((next.revision(), next.modified_ns()), (12, 1_787_306_400_250_000_000));
        next.set_revision(3);

        let mut other = Counters::new(dir.path());
        other.boot = "another".to_owned();
        other.load(9, 1).unwrap();
        assert_eq!((other.revision(), other.modified_ns()), (9, 1_787_306_400_250_000_000));
        for damage in ["", "x", "1 2", "\u{0}", &"1 ".repeat(200)] {
            fs::write(dir.path().join(COUNTERS_FILE), damage).unwrap();
            next.load(4, 6).unwrap();
            assert_eq!(next.revision(), 4, "{damage:?}");
        }
        next.remove();
        assert!(!dir.path().join(COUNTERS_FILE).exists());
        next.bump();
        assert_eq!(next.revision(), 5, "counting goes on without a file");
        assert!(Counters::new(&dir.path().join("gone")).load(0, 0).is_err());
    }

    #[test]
    fn what_was_counted_before_a_tail_was_lost_does_not_hold() {
        let dir = tempfile::tempdir().unwrap();
        let counters = Counters::new(dir.path());
        counters.load(0, 0).unwrap();
        (0..7).for_each(|_| counters.bump());
        let of = |session, committed| {
            let counters = Counters::new(dir.path());
            counters.distrust_before(session);
            counters.load(committed, 0).unwrap();
            counters
        };
        let next = of(Some(5), 4);
        assert_eq!(next.revision(), 4);
        next.bump();
        // In the same session of the store, and after one that left its tail.
        assert_eq!((of(Some(5), 4).revision(), of(None, 4).revision()), (5, 5));
        assert_eq!(of(Some(5), 4).revision(), 4, "the file says no session any more");
        assert_eq!(of(Some(6), 3).revision(), 3);
    }

    #[test]
    fn without_room_for_the_file_counting_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(COUNTERS_FILE);
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        let counters = Counters::new(dir.path());
        counters.load(5, 77).unwrap();
        counters.bump();
        counters.touch(78);
        assert_eq!((counters.revision(), counters.modified_ns()), (6, 78));
        fs::remove_file(&file).unwrap();
        counters.bump();
        assert!(!file.exists(), "not at each write");
        counters.touch(79);
        counters.bump();
        let next = Counters::new(dir.path());
        next.load(0, 0).unwrap();
        assert_eq!((next.revision(), next.modified_ns()), (8, 79));
        // A new volume is none without it: nothing is lost yet.
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        let error = Counters::new(dir.path()).start(0, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }

    #[test]
    fn digits_are_decimal() {
        for number in [0, 7, 10, 4711, u64::MAX] {
            assert_eq!(digits(number), *format!("{number:020}").as_bytes());
        }
    }

    #[test]
    fn counts_of_many_threads_add_up_in_the_file_too() {
        let dir = tempfile::tempdir().unwrap();
        let counters = Counters::new(dir.path());
        counters.load(0, 0).unwrap();
        std::thread::scope(|scope| {
            (0..4).for_each(|_| {
                scope.spawn(|| (0..500).for_each(|_| counters.bump()));
            });
        });
        let next = Counters::new(dir.path());
        next.load(0, 0).unwrap();
        assert_eq!((counters.revision(), next.revision()), (2000, 2000));
    }
}
