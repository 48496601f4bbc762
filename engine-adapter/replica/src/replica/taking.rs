//! A replica that is served from upstream's files while their content comes over: [`crate::upstream::serve`] says how.
//!
//! Until it is over, the replica tells of upstream's snapshots from their files, and is [`Busy`](dbs_core::ErrorKind::Busy) for what needs
//! their content.

use super::{Replica, User};
use crate::replica::change::created;
use crate::upstream::chain::{Chain, KIND};
use crate::upstream::files::Files;
use crate::upstream::{Progress, TAKEN, allocated, serve};
use dbs_core::info::LayerInfo;
use dbs_core::{Backing, Error, Result, Store};
use dbs_service::log;
use longhorn_wire::names;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes a second that come over unless something else is said.
pub const RATE: u64 = 100 << 20;
/// After an error.
const RETRY: Duration =
    if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(10) };
/// Of a wait: who ends the store waits no longer.
const PAUSE: Duration = Duration::from_millis(20);
/// How often it is logged how far it is.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Upstream's files, which the volume rests on.
pub(super) struct Taking {
    files: Files,
    chain: Arc<dyn Backing>,
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

impl User for Run {
    fn let_go(&self, until: Instant) {
        self.stopped.store(true, Ordering::SeqCst);
        while !self.ended.load(Ordering::SeqCst) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Taking {
    /// The files in a replica's directory, if they are still needed there.
    pub fn find(dir: &Path, rate: Option<u64>) -> Result<Option<Arc<Self>>> {
        let taken = dir.join(TAKEN);
        if !taken.is_dir() {
            return Ok(None);
        }
        let files = Files::read(&taken)?;
        let chain = Arc::new(Chain::open(&files)?);
        Ok(Some(Arc::new(Self {
            progress: Mutex::new(Progress { total: files.allocated(), ..Progress::default() }),
            files,
            chain,
            rate: rate.unwrap_or(RATE),
            attached: Mutex::default(),
            run: Mutex::default(),
        })))
    }

    fn attach(&self, store: &Store) {
        *lock(&self.attached) = Some(store.attach_backing(Arc::clone(&self.chain)));
    }

    /// Brings everything over, as fast as it may, and again after errors, until it is done or who has the store
    /// wants it back.
    fn bring(&self, store: &Store, volume: &str, run: &Run) -> Result<()> {
        loop {
            let (begun, mut told_at) = (Instant::now(), Instant::now());
            let told = Mutex::new(&mut told_at);
            let result = serve::bring(store, volume, &self.files, &*self.chain, &|progress| {
                *lock(&self.progress) = progress;
                let mut told_at = lock(&told);
                if told_at.elapsed() >= LOG_INTERVAL {
                    **told_at = Instant::now();
                    self.log("going on", volume);
                }
                drop(told_at);
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

    /// Adds upstream's snapshots to the layers of the volume, below them.
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
            let mut labels = meta.labels.clone();
            let image = self.files.image(disk);
            layers.push(LayerInfo {
                name: Some(name.to_owned()),
                uuid: String::new(),
                parent: parent_of(disk),
                origin: None,
                children: Vec::new(),
                size: std::fs::metadata(&image).map_or(0, |m| m.len()),
                created_ns: created(&meta.created, &mut labels),
                user_created: meta.user_created,
                retired: meta.removed,
                labels,
                data_bytes: allocated(&image),
            });
        }
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
        let now = taking.as_ref().map_or("they are not there", |taking| taking.chain.identity());
        Some(if now == file {
            Ok(())
        } else {
            Err(Error::invalid(format!(
                "the volume `{}` rests on upstream's files in `{}`, which are not what they were: that was {file}; now: {now}",
                self.options.volume,
                self.options.dir.join(TAKEN).display()
            )))
        })
    }

    /// Tells of upstream's snapshots, too, while the volume rests on their files.
    pub(super) fn show_taken(&self, store: &Store, layers: &mut Vec<LayerInfo>) {
        if let Some(taking) = self.taking()
            && !layers.is_empty()
        {
            let on_files = store.backing(&self.options.volume).is_ok_and(|on| on.is_some());
            taking.show(layers, on_files);
        }
    }

    /// Goes on bringing upstream's files over, or removes them if that is done.
    pub(super) fn begin_taking(&self, store: &Store) -> Result<()> {
        let Some(taking) = self.taking() else { return Ok(()) };
        if serve::is_done(store, &self.options.volume, &*taking.chain)? {
            self.end_taking(&taking);
            return Ok(());
        }
        let run = Arc::new(Run {
            replica: self.me.clone(),
            stopped: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        if let Some(before) = lock(&taking.run).replace(Arc::clone(&run)) {
            before.stopped.store(true, Ordering::SeqCst);
        }
        let user: Weak<Run> = Arc::downgrade(&run);
        self.used_by(user);
        let (store, volume) = (store.clone(), self.options.volume.clone());
        let work = move || {
            taking.log("begun", &volume);
            let brought = taking.bring(&store, &volume, &run);
            drop(store);
            if brought.is_ok()
                && let Some(replica) = run.replica.upgrade()
            {
                taking.log("done", &volume);
                replica.end_taking(&taking);
            }
            run.ended.store(true, Ordering::SeqCst);
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
        if let Err(e) = serve::remove_files(&self.options.dir) {
            log::warn("upstream-files", &[("volume", &self.options.volume), ("error", &e)]);
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic leaves it inconsistent.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
