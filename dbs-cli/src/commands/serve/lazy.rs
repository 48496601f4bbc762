//! Bringing backups that volumes rest on into the store that is served.

use crate::backups::open;
use crate::context::Context;
use clap::Args;
use dbs_backup::url::Url;
use dbs_control::api::Request;
use dbs_core::{Backing, Error, ErrorKind, Result, Store};
use dbs_server::asked::Asked;
use dbs_server::jobs::Jobs;
use dbs_server::serve::Serving;
use dbs_service::log;
use dbs_transfer::StoreAccess;
use dbs_volume_backup::lazy::{self, BackupFile};
use dbs_volume_backup::{Host, Meter, Pace};
use serde_json::Value;
use std::cell::RefCell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a start waits for a backup store: volumes that do not rest on it are wanted, too.
const PATIENCE: Duration = Duration::from_secs(20);
/// Between the first try and the second, and between later ones at most.
const RETRY: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];
/// As the second one, if it is not the backup store that is away: somebody has to do something first.
const RETRY_LATE: Duration = Duration::from_secs(300);
/// The pause after a try that has failed and has brought nothing, as a multiple of how long that took, and at most: for a
/// store that is away, and for damage.
const SHARE: u32 = 4;
const SHARE_MAX: [Duration; 2] = [Duration::from_secs(600), Duration::from_secs(3600)];
/// Between two lines in the log.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// How long the end of the server waits for a request to a backup store that is on its way.
const END_PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(50);
/// Blocks of one backup on their way at once, and backups: clients' reads come beside them.
const WORKERS: usize = 2;
const AT_ONCE: usize = 2;
/// For so long nobody must have read a backup before it goes: who reads has looked where it is before.
const IDLE: Duration = Duration::from_secs(1);
/// Of the room of the store, a part of so many stays for what clients write.
const ROOM: u64 = 16;
/// Between two looks at the room, and whether it is still wanted.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// How fast.
#[derive(Debug, Args)]
pub struct Restoring {
    /// Bring backups of --backing-backup into the store with at most this many bytes a second; 0 means no limit. What
    /// clients read comes at once, and does not count
    #[arg(long, value_name = "SIZE", value_parser = crate::spec::size)]
    restore_rate: Option<u64>,
}

/// Backups that were given, with what of them could be opened at once.
pub struct Given(Vec<(Url, Option<Arc<BackupFile>>)>);

impl Given {
    /// Opens the backups that a server was given. What fails is tried again while the store is served.
    pub fn open(context: &Context) -> Self {
        let deadline = Instant::now() + PATIENCE;
        let among = context.backing_backups().len();
        let opening: Vec<_> = context
            .backing_backups()
            .iter()
            .map(|url| {
                let (sender, receiver) = channel();
                let place = url.clone();
                let opening = thread::Builder::new().name("backup-open".to_owned());
                // One that comes late is opened once more; so is one for which there is no thread.
                let _opens = opening
                    .spawn(move || sender.send(until(deadline, || open_file(&place, among))));
                (url.clone(), receiver)
            })
            .collect();
        let opened = opening.into_iter().map(|(url, receiver)| {
            let left = deadline.saturating_duration_since(Instant::now());
            let file = receiver.recv_timeout(left).ok().and_then(Result::ok);
            (url, file)
        });
        Self(opened.collect())
    }

    /// What the store is opened with: clients that come first find it.
    pub fn files(&self) -> impl Iterator<Item = Arc<dyn Backing>> + '_ {
        self.0.iter().filter_map(|(_, file)| file.clone().map(|file| file as Arc<dyn Backing>))
    }
}

/// Does something again while nobody answers, until a time: names and networks may come up in these seconds.
fn until<T>(deadline: Instant, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match work() {
            Err(error) if error.kind() == ErrorKind::Io && Instant::now() + RETRY[0] < deadline => {
                thread::sleep(RETRY[0]);
            }
            done => return done,
        }
    }
}

fn open_file(url: &Url, among: usize) -> Result<Arc<BackupFile>> {
    let backups = open(url).map_err(|error| error.context(url))?;
    BackupFile::open(url, backups, among).map(Arc::new)
}

/// Few backups are brought at once.
struct Turns(AtomicUsize);

/// One is brought as long as this is there.
struct Turn<'a>(&'a Turns);

impl Turns {
    fn take(&self) -> Option<Turn<'_>> {
        let fewer = |free: usize| free.checked_sub(1);
        let taken = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer);
        taken.is_ok().then(|| Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Whether nobody has begun a read for a time.
struct Quiet {
    reads: u64,
    since: Instant,
}

impl Quiet {
    /// `idle` is how many reads have begun, if none is under way.
    fn is_long(&mut self, idle: Option<u64>, now: Instant) -> bool {
        match idle {
            Some(reads) if reads == self.reads => now.duration_since(self.since) >= IDLE,
            idle => {
                (self.reads, self.since) = (idle.unwrap_or(self.reads), now);
                false
            }
        }
    }
}

/// Files that are open.
type Files = Arc<Mutex<Vec<Arc<BackupFile>>>>;

/// What brings backups into the store while it is served.
pub struct Bringing {
    stop: Arc<AtomicBool>,
    files: Files,
    threads: Vec<JoinHandle<()>>,
}

impl Bringing {
    /// Begins, with a thread for each backup.
    ///
    /// # Errors
    /// `Io` if there is no thread for it.
    pub fn start(
        serving: &Serving,
        given: Given,
        options: &Restoring,
        read_only: bool,
    ) -> Result<Self> {
        let mut bringing =
            Self { stop: Arc::default(), files: Arc::default(), threads: Vec::new() };
        let rate = options.restore_rate.and_then(NonZeroU64::new);
        let (turns, among) = (Arc::new(Turns(AtomicUsize::new(AT_ONCE))), given.0.len());
        for (url, file) in given.0 {
            let one = One {
                asked: Arc::downgrade(&serving.asked()),
                store: serving.store().clone(),
                jobs: serving.jobs(),
                url,
                pace: Pace { workers: WORKERS, rate },
                read_only,
                stop: Arc::clone(&bringing.stop),
                files: Arc::clone(&bringing.files),
                turns: Arc::clone(&turns),
                among,
                reached: AtomicU64::new(0),
                has_room: AtomicBool::new(true),
            };
            let thread = thread::Builder::new().name("restore".to_owned());
            match thread.spawn(move || one.run(file)) {
                Ok(thread) => bringing.threads.push(thread),
                Err(error) => {
                    bringing.stop();
                    return Err(Error::io(error, "starting a thread"));
                }
            }
        }
        Ok(bringing)
    }

    /// Ends it; the next server goes on. What waits for a backup store that does not answer fails with its present try, so
    /// that clients' reads do not keep the server from its end for longer.
    pub fn stop(self) {
        self.stop.store(true, Ordering::SeqCst);
        let files = std::mem::take(&mut *self.files.lock().unwrap_or_else(PoisonError::into_inner));
        files.iter().for_each(|file| file.end());
        let deadline = Instant::now() + END_PATIENCE;
        for thread in self.threads {
            while !thread.is_finished() && Instant::now() < deadline {
                thread::sleep(POLL);
            }
            if thread.is_finished() {
                let _ended = thread.join();
            }
        }
    }
}

/// One backup that is brought in.
struct One {
    /// Nothing that waits for a backup store keeps the server from its end.
    asked: Weak<dyn Asked>,
    store: Store,
    jobs: Arc<Jobs>,
    url: Url,
    pace: Pace,
    read_only: bool,
    stop: Arc<AtomicBool>,
    files: Files,
    turns: Arc<Turns>,
    /// Backups that were given.
    among: usize,
    /// Most bytes that a try has gone through.
    reached: AtomicU64,
    has_room: AtomicBool,
}

impl One {
    fn run(&self, file: Option<Arc<BackupFile>>) {
        if !self.is_needed() {
            // Its threads, and what it keeps in memory, are for nobody.
            return file.iter().for_each(|file| file.end());
        }
        // As long as it is not known that nobody needs it, the store has it.
        let Some(file) =
            self.again(|| file.clone().map_or_else(|| open_file(&self.url, self.among), Ok))
        else {
            return;
        };
        self.files.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&file));
        if self.is_over() {
            return file.end();
        }
        let _attached = self.store.attach_backing(Arc::clone(&file) as Arc<dyn Backing>);
        if self.read_only {
            return self.wait(|| false);
        }
        let Some(volume) = self.again(|| self.bring(&file)) else { return };
        log::info("restored", &[("volume", &volume.unwrap_or_default()), ("from", &self.url)]);
        // Reads that began before the volume stood alone.
        let quiet = RefCell::new(Quiet { reads: 0, since: Instant::now() });
        self.wait(|| quiet.borrow_mut().is_long(file.idle(), Instant::now()));
        self.again(|| lazy::let_go(&self.url, &open(&self.url)?));
        // Nobody reads it any more.
        file.end();
    }

    fn bring(&self, file: &BackupFile) -> Result<Option<String>> {
        let turn = RefCell::new(None);
        self.wait(|| {
            *turn.borrow_mut() = self.turns.take();
            turn.borrow().is_some()
        });
        // The server ends: nothing begins, and no lock is taken in the backup store.
        if turn.borrow().is_none() {
            return Err(Error::new(ErrorKind::Interrupted, "the server ends"));
        }
        let brought = lazy::bring(self, &self.store, file, &open(&self.url)?, self.pace);
        match self.has_room.swap(true, Ordering::SeqCst) {
            true => brought,
            false => brought.map_err(|_| {
                Error::new(
                    ErrorKind::NoSpace,
                    "what room is left in the store is kept for clients: `dbs grow` it, or delete something",
                )
            }),
        }
    }

    /// Whether there is anything to do with the backup. A server before this one may have been cut off right before the
    /// end.
    fn is_needed(&self) -> bool {
        let uuid = self.store.info().uuid;
        let is_own = || lazy::is_own(&uuid, &self.url, &open(&self.url)?);
        if !lazy::resting(&self.store, &self.url).is_empty() {
            return true;
        }
        let warning = "no volume rests on it: it is deleted if it is held for this store, else by `dbs backup delete --held`";
        log::warn("restore", &[("backup", &self.url), ("warning", &warning)]);
        self.again(is_own).unwrap_or_default()
    }

    /// Does something until it succeeds, or the server ends.
    fn again<T>(&self, mut work: impl FnMut() -> Result<T>) -> Option<T> {
        let mut pause = RETRY[0];
        let mut before = String::new();
        loop {
            if self.is_over() {
                return None;
            }
            let (begun, reached) = (Instant::now(), self.reached.load(Ordering::SeqCst));
            let failed = match work() {
                Ok(done) => return Some(done),
                Err(error) => error,
            };
            let has_brought = self.reached.load(Ordering::SeqCst) > reached;
            let next = pause_after(failed.kind(), pause, begun.elapsed(), has_brought);
            let error = failed.to_string();
            // Once, and not each time it fails in the same way.
            if error != before && !self.is_over() {
                let seconds = next.as_secs();
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("backup", &self.url), ("error", &error), ("next_try_in_s", &seconds)];
                log::warn("restore", &fields);
                before = error;
            }
            let then = Instant::now() + next;
            self.wait(|| Instant::now() >= then);
            pause = RETRY_LATE.min(pause * 2);
        }
    }

    /// Waits for something, or for the end of the server.
    fn wait(&self, is_there: impl Fn() -> bool) {
        while !self.is_over() && !is_there() {
            thread::sleep(POLL);
        }
    }

    fn asked(&self) -> Result<Arc<dyn Asked>> {
        self.asked
            .upgrade()
            .ok_or_else(|| Error::new(ErrorKind::Interrupted, "the server has ended"))
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

/// How long to wait after a try that took so long. The next one reads again what has come, which may be much: if nothing
/// is gained by that, it is not done all the time.
fn pause_after(kind: ErrorKind, pause: Duration, took: Duration, has_brought: bool) -> Duration {
    let [away, other] = SHARE_MAX;
    let (longest, share) = match kind {
        ErrorKind::Io | ErrorKind::NotFound => (RETRY[1], away),
        _ => (RETRY_LATE, other),
    };
    let pause = pause.min(longest);
    if has_brought { pause } else { pause.max(took.saturating_mul(SHARE).min(share)) }
}

impl Host for One {
    fn store(&self) -> Result<&(dyn StoreAccess + Sync)> {
        Ok(&self.store)
    }

    fn call(&self, request: &Request) -> Result<Value> {
        self.asked()?.command(request, &mut || !self.is_over())
    }

    fn clean_up(&self, request: &Request) -> Result<()> {
        self.asked()?.command(request, &mut || true).map(drop)
    }

    fn check_same(&self, spec: &str, uuid: &str) -> Result<()> {
        match self.store.volume_info(spec)?.uuid == uuid {
            true => Ok(()),
            false => Err(Error::not_found(format!("volume {spec} is another one by now"))),
        }
    }

    fn note(&self, text: &str) {
        log::info("restore", &[("backup", &self.url), ("note", &text)]);
    }

    fn warn(&self, text: &str) {
        log::warn("restore", &[("backup", &self.url), ("warning", &text)]);
    }

    fn meter(&self, _label: &str) -> Meter<'_> {
        let resting = lazy::resting(&self.store, &self.url);
        let volume = resting.into_iter().next().map_or_else(String::new, |volume| volume.name);
        let listed = self.jobs.begin("backup.restore", &volume);
        let (mut told, mut looked, mut is_wanted) = (Instant::now(), None::<Instant>, true);
        Box::new(move |done, total| {
            if looked.is_none_or(|looked| looked.elapsed() >= LOOK_INTERVAL) {
                looked = Some(Instant::now());
                let info = self.store.info();
                let has_room = info.extents_free >= info.extents_total / ROOM;
                self.has_room.store(has_room, Ordering::SeqCst);
                // If the volume was deleted, the next try cleans up.
                is_wanted = !lazy::resting(&self.store, &self.url).is_empty();
            }
            listed.update(done, total);
            self.reached.fetch_max(done, Ordering::SeqCst);
            if told.elapsed() >= LOG_INTERVAL {
                told = Instant::now();
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("volume", &volume), ("bytes", &done), ("total", &total)];
                log::info("restore", &fields);
            }
            is_wanted && !self.is_over() && self.has_room.load(Ordering::SeqCst)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_is_by_what_failed_and_what_was_gained() {
        let seconds = Duration::from_secs;
        let after = |kind, pause, took, has_brought| {
            pause_after(kind, seconds(pause), seconds(took), has_brought).as_secs()
        };
        // Ten hours of a restore, and then a connection that was dropped.
        assert_eq!(after(ErrorKind::Io, 300, 36000, true), 10);
        assert_eq!(after(ErrorKind::Io, 1, 1, true), 1);
        // Hours of comparing, and the backup store is still away.
        assert_eq!(after(ErrorKind::Io, 10, 36000, false), 600);
        assert_eq!(after(ErrorKind::NotFound, 300, 0, false), 10);
        // A damaged block behind much that has come, and behind little.
        assert_eq!(after(ErrorKind::Corrupt, 10, 36000, false), 3600);
        assert_eq!(after(ErrorKind::Corrupt, 10, 1, false), 10);
        assert_eq!(after(ErrorKind::Busy, 300, 0, false), 300);
    }

    #[test]
    fn few_are_brought_at_once() {
        let turns = Turns(AtomicUsize::new(2));
        let (first, second) = (turns.take(), turns.take());
        assert!(first.is_some() && second.is_some() && turns.take().is_none());
        drop(first);
        let third = turns.take();
        assert!(third.is_some() && turns.take().is_none());
    }

    #[test]
    fn a_backup_that_is_read_stays() {
        let begun = Instant::now();
        let mut quiet = Quiet { reads: 3, since: begun };
        let mut is_long = |idle, seconds| quiet.is_long(idle, begun + Duration::from_secs(seconds));
        assert!(!is_long(Some(3), 0));
        // One is under way, and one has come and gone between two looks.
        assert!(!is_long(None, 6) && !is_long(Some(4), 20) && !is_long(Some(4), 20));
        assert!(is_long(Some(4), 21));
    }

    #[test]
    fn a_backup_store_that_comes_up_late_is_opened() {
        let mut tries = 0;
        let mut work = || {
            tries += 1;
            if tries < 3 { Err(Error::new(ErrorKind::Io, "refused")) } else { Ok(tries) }
        };
        assert_eq!(until(Instant::now() + Duration::from_secs(3600), &mut work).unwrap(), 3);
        let mut tries = 0;
        let wrong = until(Instant::now() + Duration::from_secs(3600), || -> Result<()> {
            tries += 1;
            Err(Error::invalid("no such key"))
        });
        assert_eq!((wrong.unwrap_err().kind(), tries), (ErrorKind::Invalid, 1));
    }
}
