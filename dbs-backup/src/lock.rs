//! Locks of volumes: files that say who works on a volume, and that go out of date.
//!
//! Source: upstream's `lock.go` (longhorn/backupstore, commit `ab5179e`). Backups and restores share; a deletion excludes
//! both.
//!
//! Upstream, and a deletion here, writes a lock as one that waits, looks at the others 2 s later, and writes it as one that
//! is held. Backups and restores do without the wait if nobody deletes: see [`take_at_once`].

#[cfg(test)]
mod order;

use crate::config;
use crate::names;
use crate::objects::Objects;
use crate::pool;
use dbs_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering as Memory};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// A lock file is small.
const LIMIT: u64 = 64 << 10;

/// A lock that was not written for so long is that of a process that was killed: its file is removed.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// What a lock is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Creating and restoring, any number at once.
    Work = 1,
    /// Deleting, while nobody creates or restores.
    Deletion = 2,
}

/// How long things take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// From the writing of a lock to the look at the others: two who come at the same time both see both.
    pub wait: Duration,
    /// Between two writings of a lock that is held; half of it for a deletion's.
    pub refresh: Duration,
    /// When a lock that is not written any more means nothing.
    pub expiry: Duration,
}

impl Times {
    /// How old a lock may be when something is deleted by it: see [`Lock::check_fresh`]. 45 s.
    fn fresh(&self) -> Duration {
        self.expiry * 3 / 10
    }
}

impl Default for Times {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(2),
            refresh: Duration::from_secs(60),
            expiry: Duration::from_secs(150),
        }
    }
}

/// The content of a lock file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Content {
    name: String,
    r#type: i64,
    acquired: bool,
}

/// A lock that is held until it is dropped.
pub(crate) struct Lock {
    shared: Arc<Shared>,
    /// Dropping it ends the thread.
    end: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
    /// Ends the tries of a request.
    stop: Arc<AtomicBool>,
}

struct Shared {
    objects: Arc<dyn Objects>,
    path: String,
    content: Content,
    times: Times,
    kept: Mutex<Kept>,
}

/// When the lock was last written, by two clocks: one of them goes on while the machine sleeps.
struct Kept {
    at: (Instant, SystemTime),
    lapsed: bool,
}

impl Lock {
    /// Takes a lock, or fails at once if somebody has one that excludes it.
    ///
    /// # Errors
    /// `Busy` with upstream's words, old and new, which Longhorn's manager looks for.
    pub fn take(
        objects: &Arc<dyn Objects>,
        volume: &str,
        kind: Kind,
        times: Times,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let half = Times { refresh: times.refresh / 2, ..times };
        let times = if kind == Kind::Deletion { half } else { times };
        let name = names::random("lock")?;
        let path = names::lock(volume, &name);
        let mut content = Content { name, r#type: kind as i64, acquired: false };
        let begun = now();
        let taken = acquire(objects, volume, &path, &mut content, times);
        if let Err(error) = taken {
            // It goes out of date if it stays.
            let _ = objects.remove(&path);
            return Err(match (error.kind(), kind) {
                (ErrorKind::NoSpace, Kind::Deletion) => error.context(
                    "deleting needs room for a lock, some KiB: free some on the disk of the backup store first",
                ),
                _ => error,
            });
        }
        let kept = Mutex::new(Kept { at: begun, lapsed: false });
        let shared = Arc::new(Shared { objects: Arc::clone(objects), path, content, times, kept });
        let (end, ended) = channel::<()>();
        let other = Arc::clone(&shared);
        let keeper = std::thread::Builder::new().name("backup-lock".to_owned()).spawn(move || {
            // After a failure it is tried sooner.
            let mut wait = other.times.refresh;
            while ended.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                let refreshed = other.refresh();
                wait = other.times.refresh / if refreshed.is_ok() { 1 } else { 6 };
            }
        });
        let keeper = keeper.map_err(|e| Error::io(e, "starting a thread"));
        let mut lock = Self { shared, end: Some(end), keeper: None, stop: Arc::clone(stop) };
        lock.keeper = Some(keeper?);
        // The taking may have taken so long that others saw a lock out of date.
        lock.check()?;
        Ok(lock)
    }

    /// Makes it one that has not been written for a long time, when called: for tests.
    #[cfg(feature = "testing")]
    pub fn aging(&self) -> impl Fn() + Send + 'static {
        let shared = Arc::clone(&self.shared);
        move || shared.kept().at.1 -= shared.times.expiry * 2
    }

    /// Its file.
    pub fn path(&self) -> &str {
        &self.shared.path
    }

    /// As [`Lock::check`], and waits until the lock was written a short time ago: asked before each try of a removal.
    ///
    /// Others rely on what is there once the lock is out of date, so a removal must have ended by then, also one whose
    /// way to the server has broken: the try is given up after 70 s (`objects/http.rs`), and the kernel goes on sending
    /// what it has of a closed connection for about 100 s after it first did. A lock that is 45 s old is good for 105 s.
    ///
    /// # Errors
    /// `Busy`; `Interrupted`.
    pub fn check_fresh(&self) -> Result<()> {
        loop {
            self.check()?;
            {
                let kept = self.shared.kept();
                if !kept.lapsed && kept.age() <= self.shared.times.fresh() {
                    return Ok(());
                }
            }
            if self.stop.load(Memory::SeqCst) {
                return Err(pool::interrupted());
            }
            pool::pause(pool::TICK, &self.stop);
        }
    }

    /// Refuses to go on if the lock was out of date at any time: others may have taken it for gone.
    ///
    /// # Errors
    /// `Busy`.
    pub fn check(&self) -> Result<()> {
        if !self.shared.kept().is_lapsed(self.shared.times.expiry) {
            return Ok(());
        }
        Err(Error::busy(format!(
            "the lock {} was out of date for a while, so that somebody else may have deleted blocks. Try again: what \
             is in the backup store already is used again",
            self.shared.path
        )))
    }
}

impl Lock {
    /// Refuses to go on if somebody holds a lock that excludes this one. A slow store may show locks so late that each
    /// of two takes its own for the first.
    ///
    /// # Errors
    /// `Busy`; those of the store.
    pub fn check_others(&self, volume: &str) -> Result<()> {
        let Shared { objects, path, content, times, .. } = &*self.shared;
        let Some(own) = objects.stat(path)? else {
            return Err(refused(path, content, "somebody removed it"));
        };
        let since = self.shared.kept().at.0;
        match excluding(objects, volume, content, (own.modified, since), *times, Look::Held)? {
            None => Ok(()),
            Some(file) => Err(refused(path, content, &format!("{file} is there"))),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(keeper) = self.keeper.take() {
            // What the keeper tries to write goes anyway. A panic there says nothing of the work here.
            let before = self.stop.swap(true, Memory::SeqCst);
            let _ = keeper.join();
            self.stop.store(before, Memory::SeqCst);
        }
        // It goes out of date if it stays.
        let _ = self.shared.objects.remove(&self.shared.path);
    }
}

impl Shared {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refresh(&self) -> Result<()> {
        let at = now();
        self.objects.put(&self.path, &config::encode(&self.content)?)?;
        let mut kept = self.kept();
        kept.lapsed = kept.is_lapsed(self.times.expiry);
        kept.at = at;
        Ok(())
    }
}

impl Kept {
    fn age(&self) -> Duration {
        self.at.0.elapsed().max(self.at.1.elapsed().unwrap_or_default())
    }

    fn is_lapsed(&self, expiry: Duration) -> bool {
        self.lapsed || self.age() > expiry
    }
}

fn now() -> (Instant, SystemTime) {
    (Instant::now(), SystemTime::now())
}

fn acquire(
    objects: &Arc<dyn Objects>,
    volume: &str,
    path: &str,
    content: &mut Content,
    times: Times,
) -> Result<()> {
    if content.r#type == Kind::Work as i64 && take_at_once(objects, volume, path, content, times)? {
        return Ok(());
    }
    let own = write(objects, path, content, times.wait)?;
    if let Some(file) = excluding(objects, volume, content, own, times, Look::First)? {
        return Err(refused(path, content, &format!("{file} is there")));
    }
    content.acquired = true;
    objects.put(path, &config::encode(content)?)?;
    if content.r#type == Kind::Deletion as i64 {
        forget(objects, volume, &objects.list(&names::locks(volume))?, own.0);
    }
    Ok(())
}

/// Takes the lock of a backup or restore without a wait: writes it as one that is held, and looks whether there is the lock
/// of a deletion, in whatever state. If there is, nothing is taken, and the order of both decides as ever.
///
/// That is enough, as deletions do not come in this way. If a deletion's look at the others does not show this lock, as one
/// that is held, then it came before the writing of this lock; the deletion's lock was written yet earlier, and the look
/// here, which comes after both, shows it. A place that shows what was written late does no harm up to half the wait of
/// deletions: a deletion that misses this lock has written its own at least the wait minus that time before this one.
/// With upstream's deletions it is the same, which have the same wait.
fn take_at_once(
    objects: &Arc<dyn Objects>,
    volume: &str,
    path: &str,
    content: &mut Content,
    times: Times,
) -> Result<bool> {
    content.acquired = true;
    let own = write(objects, path, content, Duration::ZERO)?;
    content.acquired = excluding(objects, volume, content, own, times, Look::Any)?.is_none();
    Ok(content.acquired)
}

/// Writes the lock, and waits. Returns when it was written, by the clock of whoever keeps the objects and by ours: those may
/// differ.
fn write(
    objects: &Arc<dyn Objects>,
    path: &str,
    content: &Content,
    wait: Duration,
) -> Result<(SystemTime, Instant)> {
    objects.put(path, &config::encode(content)?)?;
    let written = Instant::now();
    std::thread::sleep(wait);
    match objects.stat(path)? {
        Some(own) => Ok((own.modified, written)),
        None => Err(refused(path, content, "somebody removed it")),
    }
}

/// Which locks of the other kind count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// Those that are held.
    Held,
    /// Those that are held, or that were there before this one.
    First,
    /// All.
    Any,
}

/// A lock that excludes this one and is not out of date. This one was written at `own`, by two clocks.
fn excluding(
    objects: &Arc<dyn Objects>,
    volume: &str,
    content: &Content,
    own: (SystemTime, Instant),
    times: Times,
    look: Look,
) -> Result<Option<String>> {
    for name in objects.list(&names::locks(volume))? {
        let Some(other) = names::lock_of(&name).filter(|other| *other != content.name) else {
            continue;
        };
        let file = names::lock(volume, other);
        let Some((found, modified)) = read(objects, &file)? else { continue };
        let age = own.0.duration_since(modified).unwrap_or_default() + own.1.elapsed();
        let is_first = (modified, found.name.as_str()) < (own.0, content.name.as_str());
        let counts = match look {
            Look::Held => found.acquired,
            Look::First => found.acquired || is_first,
            Look::Any => true,
        };
        if found.r#type != content.r#type && age <= times.expiry && counts {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Removes what processes that were killed have left. It means nothing, so that it does not matter if it stays.
fn forget(objects: &Arc<dyn Objects>, volume: &str, files: &[String], now: SystemTime) {
    for name in files {
        let file = format!("{}/{name}", names::locks(volume));
        let is_ours = names::lock_of(name).is_some() || name.contains(names::TEMPORARY);
        if let (true, Ok(Some(stat))) = (is_ours, objects.stat(&file))
            && now.duration_since(stat.modified).is_ok_and(|age| age > FORGOTTEN)
        {
            let _ = objects.remove(&file);
        }
    }
}

/// Another lock; none if it is gone or cannot be understood, as for upstream.
///
/// Its time is read before its content: a lock that is acquired between the two must not look like one that waits, and
/// came later.
fn read(objects: &Arc<dyn Objects>, file: &str) -> Result<Option<(Content, SystemTime)>> {
    let Some(stat) = objects.stat(file)? else { return Ok(None) };
    match objects.get(file, LIMIT).and_then(|bytes| config::parse::<Content>(file, &bytes)) {
        Ok(content) => Ok(Some((content, stat.modified))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => Ok(None),
        Err(error) => Err(error),
    }
}

fn refused(path: &str, content: &Content, why: &str) -> Error {
    let operation =
        if content.r#type == Kind::Deletion as i64 { "delete" } else { "create/restore" };
    Error::busy(format!(
        "failed to acquire lock {path} when performing backup {operation}, please try again later: {why}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Directory;
    use crate::objects::hooked::Hooked;

    const VOLUME: &str = "vol-1";

    fn quick() -> Times {
        Times { wait: Duration::ZERO, ..Times::default() }
    }

    fn store() -> (tempfile::TempDir, Arc<dyn Objects>) {
        let root = tempfile::tempdir().unwrap();
        let objects = Arc::new(Directory::open(root.path()).unwrap());
        (root, objects)
    }

    /// A lock of somebody else, `age` old.
    fn foreign(root: &tempfile::TempDir, objects: &Arc<dyn Objects>, text: &str, age: u64) {
        let path = names::lock(VOLUME, "lock_foreign");
        objects.put(&path, text.as_bytes()).unwrap();
        let file = std::fs::File::options().write(true).open(root.path().join(path)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }

    #[test]
    fn work_shares_and_deletion_excludes() {
        let (_root, objects) = store();
        let take = |kind| Lock::take(&objects, VOLUME, kind, quick(), &Arc::default());
        let work = take(Kind::Work).unwrap();
        drop(take(Kind::Work).unwrap());
        let error = take(Kind::Deletion).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("when performing backup delete, please try again"));
        work.check().unwrap();
        drop(work);
        let deletion = take(Kind::Deletion).unwrap();
        assert!(take(Kind::Work).is_err());
        drop(deletion);
        assert!(objects.list(&names::locks(VOLUME)).unwrap().is_empty(), "nothing stays");
    }

    #[test]
    fn locks_of_others() {
        let (root, objects) = store();
        let deletion = r#"{"Name":"lock_foreign","Type":2,"Acquired":true}"#;
        for (text, age, free) in [
            (deletion, 0, false),
            (deletion, 100, false),
            (deletion, 151, true),
            (r#"{"Name":"lock_foreign","Type":1,"Acquired":true}"#, 0, true),
            // It came first, and will be acquired.
            (r#"{"Name":"lock_foreign","Type":2,"Acquired":false}"#, 100, false),
            ("{corrupt", 0, true),
            ("", 0, true),
        ] {
            foreign(&root, &objects, text, age);
            let taken = Lock::take(&objects, VOLUME, Kind::Work, quick(), &Arc::default());
            assert_eq!(taken.is_ok(), free, "{text} {age}");
        }
    }

    /// Others saw a lock out of date before it was acquired.
    #[test]
    fn a_lock_that_took_too_long_is_none() {
        let (_root, objects) = store();
        let (wait, expiry) = (Duration::from_millis(20), Duration::from_millis(10));
        let times = Times { wait, expiry, ..Times::default() };
        let error = Lock::take(&objects, VOLUME, Kind::Deletion, times, &Arc::default())
            .map(drop)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(objects.list(&names::locks(VOLUME)).unwrap().is_empty(), "nothing stays");
    }

    #[test]
    fn a_lock_is_kept_and_notices_that_it_was_not() {
        let (root, objects) = store();
        let short = Duration::from_millis(10);
        let times =
            Times { wait: Duration::ZERO, refresh: short, expiry: Duration::from_secs(600) };
        let lock = Lock::take(&objects, VOLUME, Kind::Work, times, &Arc::default()).unwrap();
        let path = root.path().join(&lock.shared.path);
        let begun = Instant::now();
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(SystemTime::UNIX_EPOCH)
            .unwrap();
        while std::fs::metadata(&path).unwrap().modified().unwrap() == SystemTime::UNIX_EPOCH {
            assert!(begun.elapsed() < Duration::from_secs(120), "it is not written again");
            std::thread::sleep(short);
        }
        lock.check().unwrap();
        lock.shared.kept().at.1 -= Duration::from_secs(3600);
        let begun = Instant::now();
        while lock.check().is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(120), "a gap is forgotten");
            // Written again before anybody looked; then once more.
            lock.shared.kept().at.1 -= Duration::from_secs(3600);
        }
        std::thread::sleep(short * 3);
        assert_eq!(lock.check().unwrap_err().kind(), ErrorKind::Busy);
    }

    /// A server that has gone holds up the end of an operation only as long as one request takes.
    #[test]
    fn a_lock_is_dropped_while_it_is_written() {
        let (_root, inner) = store();
        let stop = Arc::new(AtomicBool::new(false));
        let tries = Arc::new(Mutex::new(0));
        let (tried, stopped) = (Arc::clone(&tries), Arc::clone(&stop));
        let put = move |_: &str| {
            *tried.lock().unwrap() += 1;
            if *tried.lock().unwrap() < 2 {
                return Ok(());
            }
            // Tries to write for ten minutes, or until it is to stop.
            crate::pool::pause(Duration::from_secs(600), &stopped);
            Err(Error::io(std::io::Error::other("gone"), "the server"))
        };
        let objects: Arc<dyn Objects> =
            Arc::new(Hooked { put: Box::new(put), ..Hooked::on(inner) });
        let times = Times { refresh: Duration::from_millis(1), ..quick() };
        let lock = Lock::take(&objects, VOLUME, Kind::Work, times, &stop).unwrap();
        let begun = Instant::now();
        // The one of the taking, and one of the keeper.
        while *tries.lock().unwrap() < 2 {
            assert!(begun.elapsed() < Duration::from_secs(120), "it is not written again");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(lock);
        assert!(!stop.load(Memory::SeqCst), "the store can be used further");
        assert!(begun.elapsed() < Duration::from_secs(500), "all tries were waited for");
    }

    /// Found by review: a deletion that acquired its lock between the two looks at it passed for one that waits, and came
    /// later, while it had passed this lock for one that came later.
    #[test]
    fn a_lock_is_not_passed_over_while_it_is_acquired() {
        let (root, inner) = store();
        let lock = |acquired| format!(r#"{{"Name":"foreign","Type":2,"Acquired":{acquired}}}"#);
        foreign(&root, &inner, &lock(false), 5);
        let (other, looks) = (Arc::clone(&inner), Mutex::new(0));
        let get = move |path: &str| {
            *looks.lock().unwrap() += usize::from(path.contains("foreign"));
            // The first look says only that nothing is taken at once.
            if *looks.lock().unwrap() == 2 {
                other.put(path, lock(true).as_bytes()).unwrap();
            }
        };
        let objects: Arc<dyn Objects> =
            Arc::new(Hooked { get: Box::new(get), ..Hooked::on(inner) });
        let taken = Lock::take(&objects, VOLUME, Kind::Work, quick(), &Arc::default());
        assert_eq!(taken.map(drop).unwrap_err().kind(), ErrorKind::Busy);
    }

    /// A removal waits while the lock was not written for a while, and is refused once it was out of date.
    #[test]
    fn a_removal_waits_for_a_fresh_lock() {
        let (_root, objects) = store();
        let stop = Arc::new(AtomicBool::new(true));
        let lock = Lock::take(&objects, VOLUME, Kind::Deletion, quick(), &stop).unwrap();
        lock.check_fresh().unwrap();
        lock.shared.kept().at.1 -= quick().expiry / 2;
        lock.check().unwrap();
        assert_eq!(lock.check_fresh().unwrap_err().kind(), ErrorKind::Interrupted, "it waits");
        stop.store(false, Memory::SeqCst);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| lock.check_fresh());
            lock.shared.refresh().unwrap();
            waits.join().unwrap().unwrap();
        });
        lock.shared.kept().at.1 -= quick().expiry * 2;
        lock.shared.refresh().unwrap();
        assert_eq!(lock.check_fresh().unwrap_err().kind(), ErrorKind::Busy);
    }
}
