//! A replica that is served from upstream's files while their content comes over. Module `upstream::serve` knows these
//! files; here is when it is asked, and by whom.
//!
//! Until it is over, the replica tells of upstream's snapshots from their files, and is [`Busy`](dbs_core::ErrorKind::Busy) for what needs
//! their content.

use super::{Replica, User};
use dbs_core::info::LayerInfo;
use dbs_core::{Backing, Error, ErrorKind, Result, Store};
use dbs_service::log;
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How the identity of upstream's files begins: that of no other file does.
pub const KIND: &str = "files of upstream's replica";
/// Bytes a second that come over unless something else is said.
pub const RATE: u64 = 100 << 20;
/// After an error.
const RETRY: Duration =
    if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(10) };
/// Of a wait: who ends the store waits no longer.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a thread whose store was closed is waited for.
const LET_GO: Duration = Duration::from_secs(2);
/// How often it is logged how far it is.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Bytes of content that were copied, by this process or before.
    pub bytes: u64,
    /// All of them.
    pub total: u64,
    /// Those that this process has copied.
    pub copied: u64,
}

/// Upstream's files that a volume rests on.
pub trait Taken: Send + Sync {
    /// What they show.
    fn file(&self) -> Arc<dyn Backing>;

    /// Nothing of them.
    fn progress(&self) -> Progress;

    /// Whether all that they hold is in the store.
    ///
    /// # Errors
    /// Those of the store.
    fn is_done(&self, store: &Store, volume: &str) -> Result<bool>;

    /// Brings their content over, or goes on with that: it is durable in the store on return, and the volume rests on them no
    /// more. An error of who is told ends it.
    ///
    /// # Errors
    /// `Invalid` if the files have changed; those of the files and the store. It can be called again.
    fn bring(
        &self,
        store: &Store,
        volume: &str,
        told: &dyn Fn(Progress) -> Result<()>,
    ) -> Result<()>;

    /// Adds upstream's snapshots to the layers of the volume, below them. `on_files`: it still rests on them.
    fn show(&self, layers: &mut Vec<LayerInfo>, on_files: bool);

    /// Removes them, as nothing of them is needed any more.
    ///
    /// # Errors
    /// `Io`.
    fn remove(&self) -> Result<()>;
}

impl fmt::Debug for dyn Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file().name())
    }
}

/// Files that are still needed, and how far it is with them.
pub(super) struct Taking {
    files: Arc<dyn Taken>,
    /// Bytes a second; 0 for no limit.
    rate: u64,
    /// What the store was given, which forgets it otherwise.
    attached: Mutex<Option<Arc<dyn Backing>>>,
    progress: Mutex<Progress>,
    run: Mutex<Option<Arc<Run>>>,
}

/// A thread that brings the content over.
struct Run {
    replica: Weak<Replica>,
    stopped: AtomicBool,
    ended: AtomicBool,
}

impl Run {
    fn check(&self) -> Result<()> {
        if self.stopped.load(Ordering::SeqCst) || self.replica.strong_count() == 0 {
            return Err(Error::busy("the store goes to another process"));
        }
        Ok(())
    }

    fn wait(&self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(PAUSE));
        }
    }
}

/// Held by the thread: it has ended, however it does, or was never begun.
struct Ended(Arc<Run>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::SeqCst);
    }
}

impl User for Run {
    fn let_go(&self, until: Instant) {
        self.stopped.store(true, Ordering::SeqCst);
        while !self.ended.load(Ordering::SeqCst) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Taking {
    pub fn new(files: &Arc<dyn Taken>, rate: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            progress: Mutex::new(files.progress()),
            files: Arc::clone(files),
            rate: rate.unwrap_or(RATE),
            attached: Mutex::default(),
            run: Mutex::default(),
        })
    }

    fn attach(&self, store: &Store) {
        *lock(&self.attached) = Some(store.attach_backing(self.files.file()));
    }

    /// Brings everything over, as fast as it may, and again after errors, until it is done or who has the store
    /// wants it back.
    fn bring(&self, store: &Store, volume: &str, run: &Run) -> Result<()> {
        loop {
            let begun = Instant::now();
            let told_at = Cell::new(begun);
            let result = self.files.bring(store, volume, &|progress| {
                if progress.total > 0 {
                    *lock(&self.progress) = progress;
                }
                if told_at.get().elapsed() >= LOG_INTERVAL {
                    told_at.set(Instant::now());
                    self.log("going on", volume);
                }
                run.wait(self.ahead(progress.copied, begun.elapsed()))
            });
            run.check()?;
            let Err(e) = result else { return Ok(()) };
            log::warn("upstream-files", &[("volume", &volume), ("error", &e)]);
            run.wait(RETRY)?;
        }
    }

    /// How long to wait after so much was copied in this time.
    fn ahead(&self, copied: u64, elapsed: Duration) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        Duration::from_secs_f64(copied as f64 / self.rate as f64).saturating_sub(elapsed)
    }

    fn log(&self, what: &str, volume: &str) {
        let Progress { bytes, total, .. } = *lock(&self.progress);
        let fields: [(&str, &dyn std::fmt::Display); 4] =
            [("volume", &volume), ("state", &what), ("bytes", &bytes), ("total", &total)];
        log::info("upstream-files", &fields);
    }
}

impl Replica {
    pub(super) fn taking(&self) -> Option<Arc<Taking>> {
        lock(&self.taking).clone()
    }

    /// How much of upstream's files has come over; nothing if the replica does not rest on them.
    #[must_use]
    pub fn taking_progress(&self) -> Option<Progress> {
        self.taking().map(|taking| *lock(&taking.progress))
    }

    /// Refuses what needs the content of upstream's snapshots.
    ///
    /// # Errors
    /// `Busy`.
    pub(super) fn check_taken(&self) -> Result<()> {
        let Some(Progress { bytes, total, .. }) = self.taking_progress() else { return Ok(()) };
        Err(Error::busy(format!(
            "the content of upstream's files is still coming into the replica's store ({bytes} of {total} bytes): try \
             again when all of it has"
        )))
    }

    /// Gives the store upstream's files. The volume may rest on `file`: whether these are it, or nothing if it is none of
    /// upstream's.
    pub(super) fn attach_taken(&self, store: &Store, file: Option<&str>) -> Option<Result<()>> {
        let taking = self.taking();
        if let Some(taking) = &taking {
            taking.attach(store);
        }
        let file = file.filter(|file| file.starts_with(KIND))?;
        let now = taking.map(|taking| taking.files.file());
        let now = now.as_ref().map_or("they are not there", |now| now.identity());
        Some(if now == file {
            Ok(())
        } else {
            Err(Error::invalid(format!(
                "the volume `{}` rests on upstream's files, which are not what they were in `{}`: that was {file}; now: \
                 {now}",
                self.options.volume,
                self.options.dir.display()
            )))
        })
    }

    /// Layers of the volume, with upstream's snapshots while it rests on their files; none if there is no volume.
    pub(super) fn layers(&self, store: &Store) -> Result<Vec<LayerInfo>> {
        loop {
            // Before the store is asked: what is not there yet then is in the files.
            let taking = self.taking();
            let mut layers = match store.layers(&self.options.volume) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
                layers => layers?,
            };
            let Some(taking) = taking else { return Ok(layers) };
            let on = store.backing(&self.options.volume).ok().flatten();
            let on_files = on.is_some_and(|on| on.identity.starts_with(KIND));
            taking.files.show(&mut layers, on_files);
            // The files may have gone meanwhile.
            if self.taking().is_some() {
                return Ok(layers);
            }
        }
    }

    /// Goes on bringing upstream's files over, or removes them if that is done.
    pub(super) fn begin_taking(&self, store: &Store) -> Result<()> {
        let Some(taking) = self.taking() else { return Ok(()) };
        if taking.files.is_done(store, &self.options.volume)? {
            self.end_taking(&taking);
            return Ok(());
        }
        let before = lock(&taking.run).take();
        if let Some(before) = before.filter(|before| !before.ended.load(Ordering::SeqCst)) {
            if !before.stopped.load(Ordering::SeqCst) {
                // The store has not been elsewhere since.
                *lock(&taking.run) = Some(before);
                return Ok(());
            }
            // What it still does fails, as its store was closed.
            before.let_go(Instant::now() + LET_GO);
        }
        let run = Arc::new(Run {
            replica: self.me.clone(),
            stopped: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        *lock(&taking.run) = Some(Arc::clone(&run));
        let user: Weak<Run> = Arc::downgrade(&run);
        self.used_by(user);
        let (store, volume) = (store.clone(), self.options.volume.clone());
        let ended = Ended(Arc::clone(&run));
        let work = move || {
            let _ended = ended;
            taking.log("begun", &volume);
            let brought = taking.bring(&store, &volume, &run);
            drop(store);
            if brought.is_ok()
                && let Some(replica) = run.replica.upgrade()
            {
                taking.log("done", &volume);
                replica.end_taking(&taking);
            }
        };
        let spawned = thread::Builder::new().name("upstream-files".to_owned()).spawn(work);
        spawned.map(drop).map_err(|e| Error::io(e, "starting a thread"))
    }

    /// All of it is in the store.
    fn end_taking(&self, taking: &Arc<Taking>) {
        {
            let mut now = lock(&self.taking);
            if now.as_ref().is_none_or(|now| !Arc::ptr_eq(now, taking)) {
                return;
            }
            *now = None;
        }
        if let Err(e) = taking.files.remove() {
            log::warn("upstream-files", &[("volume", &self.options.volume), ("error", &e)]);
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic leaves it inconsistent.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
