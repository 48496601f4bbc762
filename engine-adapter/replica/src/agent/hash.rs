//! Hashing snapshots in the background, one at a time on a node.

use super::jobs::{COMPLETE, ERROR, IN_PROGRESS};
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_sync::image::{HashOptions, Hashed, Record, Source, hash_recorded};
use longhorn_wire::names;
use longhorn_wire::proto::ptypes::SnapshotHashStatusResponse;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

/// Jobs remembered that have ended well, and as many that have not.
const REMEMBERED: usize = 10;
/// How often a job that waits for other processes of the node looks whether its turn has come.
const LOOK: Duration = Duration::from_millis(200);
/// Held by the job of this process that hashes, or looks.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
/// Threads of a job: hashing shares the node with everything else.
const THREADS: usize = 2;
/// Name of the file that is locked.
const LOCK_FILE: &str = "hash";
/// Directory that it lies in.
const LOCK_DIR: &str = ".lock";

/// Where the lock of all replicas of this node is, for Longhorn's files under `control_path` (by
/// default `/var/lib/longhorn`), which containers see under `/host`.
#[must_use]
pub fn lock_dir(control_path: Option<&str>) -> PathBuf {
    let usual = "/var/lib/longhorn";
    let path = control_path.filter(|path| {
        let path = Path::new(path);
        path.is_absolute() && path != Path::new("/") && !path.starts_with("/dev")
    });
    let inside = path.unwrap_or(usual).trim_start_matches('/');
    Path::new("/host").join(inside).join(LOCK_DIR)
}

/// A layer to hash.
pub struct Subject {
    /// What it looks like as a file.
    pub source: Arc<dyn Source>,
    /// Names the state it is in.
    pub stamp: Box<dyn Fn() -> Result<String> + Send>,
}

/// The jobs of an agent.
#[derive(Debug)]
pub struct Hashes {
    /// The replica's directory, where records lie.
    dir: PathBuf,
    lock_dir: PathBuf,
    /// In the order in which they began.
    jobs: Mutex<Vec<Arc<Job>>>,
}

#[derive(Debug)]
struct Job {
    snapshot: String,
    cancelled: watch::Sender<bool>,
    status: Mutex<Status>,
    ended: Condvar,
}

#[derive(Debug, Clone)]
struct Status {
    state: &'static str,
    hashed: Hashed,
    error: String,
}

/// The rest of a job. While it waits for its turn it takes no thread.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Hashes {
    /// None yet. Records lie in `dir`, the lock of the node in `lock_dir`.
    #[must_use]
    pub fn new(dir: &Path, lock_dir: &Path) -> Arc<Self> {
        let (dir, lock_dir) = (dir.to_owned(), lock_dir.to_owned());
        Arc::new(Self { dir, lock_dir, jobs: Mutex::default() })
    }

    /// Begins to hash a snapshot. `subject` is called when its turn on the node has come.
    ///
    /// # Errors
    /// `Busy` if it is being hashed.
    pub fn begin(
        self: &Arc<Self>,
        snapshot: &str,
        rehash: bool,
        subject: impl FnOnce() -> Result<Subject> + Send + 'static,
    ) -> Result<Task> {
        let mut jobs = self.jobs();
        if jobs.iter().any(|job| job.snapshot == snapshot && job.is_running()) {
            let text = format!("hashing snapshot {snapshot} is in progress");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let job = Arc::new(Job::new(snapshot));
        jobs.retain(|job| job.snapshot != snapshot);
        jobs.push(Arc::clone(&job));
        forget_old(&mut jobs);
        drop(jobs);
        let me = Arc::clone(self);
        Ok(Box::pin(async move {
            let outcome = me.hash(&job, rehash, subject).await;
            if let Err(error) = &outcome {
                log::warn("hash", &[("snapshot", &job.snapshot), ("error", error)]);
            }
            job.end(outcome);
        }))
    }

    /// How the hashing of a snapshot is, or what is on record for it. `stamp` names the state the
    /// layer is in.
    #[must_use]
    pub fn status(
        &self,
        snapshot: &str,
        stamp: impl FnOnce() -> Result<String>,
    ) -> SnapshotHashStatusResponse {
        let found = self.find(snapshot).map(|job| job.status().clone());
        if let Some(Status { state, hashed, error }) = found {
            let Hashed { checksum, silently_corrupted } = hashed;
            return SnapshotHashStatusResponse {
                state: state.into(),
                checksum,
                error,
                silently_corrupted,
            };
        }
        match self.recorded(snapshot, stamp) {
            Ok(checksum) => SnapshotHashStatusResponse {
                state: COMPLETE.into(),
                checksum,
                ..Default::default()
            },
            Err(error) => SnapshotHashStatusResponse {
                state: ERROR.into(),
                error: error.to_string(),
                ..Default::default()
            },
        }
    }

    /// Gives up hashing a snapshot, if it is being hashed.
    pub fn cancel(&self, snapshot: &str) {
        if let Some(job) = self.find(snapshot) {
            job.cancelled.send_replace(true);
        }
    }

    /// Gives up all hashing.
    pub fn cancel_all(&self) {
        self.jobs().iter().for_each(|job| {
            job.cancelled.send_replace(true);
        });
    }

    /// Gives up hashing a snapshot and waits until nothing of it is read any more.
    pub fn cancel_and_wait(&self, snapshot: &str) {
        let Some(job) = self.find(snapshot) else { return };
        job.cancelled.send_replace(true);
        let status = job.status();
        let running = |status: &mut Status| status.state == IN_PROGRESS;
        drop(job.ended.wait_while(status, running).unwrap_or_else(PoisonError::into_inner));
    }

    /// Forgets the jobs that have ended.
    pub fn reset(&self) {
        self.jobs().retain(|job| job.is_running());
    }

    /// Whether somebody on this node is hashing.
    ///
    /// # Errors
    /// `Io` if there is no place for the lock.
    pub fn is_locked(&self) -> Result<bool> {
        match Flock::lock(self.lock_file()?, FlockArg::LockExclusiveNonblock) {
            Ok(_unlocked_again) => Ok(false),
            Err((_, Errno::EWOULDBLOCK)) => Ok(true),
            Err((_, error)) => Err(self.lock_failed(error.into())),
        }
    }

    async fn hash(
        self: &Arc<Self>,
        job: &Arc<Job>,
        rehash: bool,
        subject: impl FnOnce() -> Result<Subject> + Send + 'static,
    ) -> Result<Hashed> {
        let mut cancelled = job.cancelled.subscribe();
        let turn = tokio::select! {
            turn = self.wait_for_turn() => turn?,
            _ = cancelled.wait_for(|cancelled| *cancelled) => {
                return Err(Error::new(ErrorKind::Interrupted, "hashing was cancelled"));
            }
        };
        let (me, job) = (Arc::clone(self), Arc::clone(job));
        let work = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let Subject { source, stamp } = subject()?;
            let cancelled = || *job.cancelled.borrow();
            let options =
                HashOptions { threads: THREADS, cancelled: &cancelled, progress: &|_| {} };
            hash_recorded(&*source, &me.image(&job.snapshot), &*stamp, rehash, &options)
        });
        work.await.unwrap_or_else(|e| Err(Error::new(ErrorKind::Io, format!("hashing: {e}"))))
    }

    /// Waits for the lock of the node, and holds it as long as what is returned.
    async fn wait_for_turn(&self) -> Result<Turn> {
        let here = TURN.lock().await;
        let mut file = self.lock_file()?;
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Turn { _lock: lock, _here: here }),
                Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
                Err((_, error)) => return Err(self.lock_failed(error.into())),
            };
            sleep(LOOK).await;
        }
    }

    fn lock_file(&self) -> Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let opened = fs::create_dir_all(&self.lock_dir)
            .and_then(|()| options.open(self.lock_dir.join(LOCK_FILE)));
        opened.map_err(|error| self.lock_failed(error))
    }

    fn lock_failed(&self, error: std::io::Error) -> Error {
        let path = self.lock_dir.join(LOCK_FILE);
        Error::io(error, format!("taking the lock for hashing, `{}`", path.display()))
    }

    fn recorded(&self, snapshot: &str, stamp: impl FnOnce() -> Result<String>) -> Result<String> {
        let image = self.image(snapshot);
        let Some(record) = Record::load(&image)? else {
            let path = Record::path(&image);
            return Err(Error::not_found(format!(
                "open {}: no such file or directory",
                path.display()
            )));
        };
        if record.change_time != stamp()? {
            return Err(Error::new(ErrorKind::Busy, format!("snapshot {snapshot} is changed")));
        }
        Ok(record.checksum)
    }

    /// The path of the snapshot's image, had it a file of its own.
    fn image(&self, snapshot: &str) -> PathBuf {
        self.dir.join(names::snapshot_disk(snapshot))
    }

    fn find(&self, snapshot: &str) -> Option<Arc<Job>> {
        self.jobs().iter().find(|job| job.snapshot == snapshot).cloned()
    }

    fn jobs(&self) -> MutexGuard<'_, Vec<Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to hash.
struct Turn {
    _lock: Flock<File>,
    _here: tokio::sync::MutexGuard<'static, ()>,
}

impl Job {
    fn new(snapshot: &str) -> Self {
        let hashed = Hashed { checksum: String::new(), silently_corrupted: false };
        Self {
            snapshot: snapshot.to_owned(),
            cancelled: watch::Sender::new(false),
            status: Mutex::new(Status { state: IN_PROGRESS, hashed, error: String::new() }),
            ended: Condvar::new(),
        }
    }

    fn is_running(&self) -> bool {
        self.status().state == IN_PROGRESS
    }

    fn end(&self, outcome: Result<Hashed>) {
        let mut status = self.status();
        match outcome {
            Ok(hashed) => (status.state, status.hashed) = (COMPLETE, hashed),
            Err(error) => (status.state, status.error) = (ERROR, error.to_string()),
        }
        self.ended.notify_all();
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps, of the jobs that have ended well and of the others, some each.
fn forget_old(jobs: &mut Vec<Arc<Job>>) {
    for state in [COMPLETE, ERROR] {
        let ended = jobs.iter().filter(|job| job.status().state == state).count();
        let mut surplus = ended.saturating_sub(REMEMBERED);
        jobs.retain(|job| {
            let goes = surplus > 0 && job.status().state == state;
            surplus -= usize::from(goes);
            !goes
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use longhorn_sync::image::Bytes;

    fn subject(content: &'static [u8], stamp: &'static str) -> Result<Subject> {
        let source = Arc::new(Bytes::new(content));
        Ok(Subject { source, stamp: Box::new(move || Ok(stamp.to_owned())) })
    }

    fn hashes() -> (tempfile::TempDir, Arc<Hashes>) {
        let dir = tempfile::tempdir().unwrap();
        let hashes = Hashes::new(dir.path(), &dir.path().join("control/.lock"));
        (dir, hashes)
    }

    #[test]
    fn the_lock_is_where_upstream_looks() {
        let dir = |path| lock_dir(path).to_str().unwrap().to_owned();
        assert_eq!(dir(None), "/host/var/lib/longhorn/.lock");
        assert_eq!(dir(Some("/data/lh")), "/host/data/lh/.lock");
        for odd in ["", "relative", "/", "/dev", "/dev/x"] {
            assert_eq!(dir(Some(odd)), "/host/var/lib/longhorn/.lock", "{odd}");
        }
    }

    fn run(task: Task) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(task);
    }

    #[test]
    fn a_hash_is_recorded_and_found_without_its_job() {
        let (_dir, hashes) = hashes();
        let stamp = || Ok("1".to_owned());
        let before = hashes.status("a", stamp);
        assert_eq!(before.state, ERROR);
        assert!(before.error.contains("no such file"), "{}", before.error);
        run(hashes.begin("a", false, || subject(b"123456789", "1")).unwrap());
        let status = hashes.status("a", stamp);
        // CRC-64/GO-ISO of the usual test text.
        assert_eq!(
            (status.state.as_str(), status.checksum.as_str()),
            (COMPLETE, "b90956c775a41001")
        );
        hashes.reset();
        assert_eq!(hashes.status("a", stamp), status);
        assert_eq!(hashes.status("a", || Ok("2".to_owned())).error, "snapshot a is changed");
    }

    #[test]
    fn one_at_a_time_on_a_node_and_cancelled_while_it_waits() {
        let (_dir, hashes) = hashes();
        assert!(!hashes.is_locked().unwrap());
        // Somebody else's.
        let file = hashes.lock_file().unwrap();
        let theirs = Flock::lock(file, FlockArg::LockExclusive).unwrap();
        assert!(hashes.is_locked().unwrap());
        let task = hashes.begin("a", false, || panic!("not its turn")).unwrap();
        assert!(hashes.begin("a", false, || subject(b"", "1")).is_err());
        let running = std::thread::spawn(|| run(task));
        assert_eq!(hashes.status("a", || Ok(String::new())).state, IN_PROGRESS);
        hashes.cancel_and_wait("a");
        running.join().unwrap();
        assert!(hashes.status("a", || Ok(String::new())).error.contains("cancelled"));
        let task = hashes.begin("a", false, || subject(b"", "1")).unwrap();
        let running = std::thread::spawn(|| run(task));
        drop(theirs);
        running.join().unwrap();
        assert_eq!(hashes.status("a", || Ok(String::new())).state, COMPLETE);
        hashes.cancel("unknown");
        hashes.cancel_and_wait("a");
    }

    #[test]
    fn only_some_jobs_are_remembered() {
        let (_dir, hashes) = hashes();
        for n in 0..15 {
            run(hashes.begin(&format!("good{n}"), false, || subject(b"", "1")).unwrap());
            let failing = || Err(Error::invalid("no such layer"));
            run(hashes.begin(&format!("bad{n}"), false, failing).unwrap());
        }
        assert!((20..=22).contains(&hashes.jobs().len()));
        assert!(hashes.find("good0").is_none() && hashes.find("good14").is_some());
        assert_eq!(hashes.status("bad14", || Ok(String::new())).error, "no such layer");
    }
}
