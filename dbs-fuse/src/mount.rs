//! Mounting a tree, and ending it.

use crate::backups::Backups;
use crate::fs::Served;
use crate::mounts::{self, FILE_SYSTEM};
use crate::store::{Options, View};
use crate::tree::Tree;
use dbs_core::{Error, ErrorKind, Result, Store};
use fuser::{BackgroundSession, Config, MountOption, Notifier, Session, SessionACL};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Threads that answer the kernel, each with a buffer of the largest read: readers that wait for the
/// device, which does many reads at once. An idle one costs its stack.
pub const THREADS: usize = 16;
/// How long the threads may take to end once the kernel has let go.
const END_PATIENCE: Duration = Duration::from_secs(3);
/// What read-ahead is set to, where we may: the kernel offers 128 KiB.
const READAHEAD_KIB: u32 = 2048;

/// A store, or a backup store, that is mounted.
pub struct Mount {
    session: BackgroundSession,
    watcher: Option<Watcher>,
    point: PathBuf,
}

struct Watcher {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    /// Tells the tree that it is the end.
    tell: Box<dyn FnOnce() + Send>,
}

impl Mount {
    /// Mounts a store; when this returns it can be used. A dead mount that is in its place is taken
    /// away first.
    ///
    /// # Errors
    /// `NotFound` if there is no such directory, `Busy` if a view is mounted there, `Unsupported`
    /// where there is no FUSE, `Io`.
    pub fn start(store: &Store, directory: &Path, options: Options) -> Result<Self> {
        let (source, allow_other) = (options.store.display().to_string(), options.allow_other);
        let view = View::new(store.clone(), options);
        Self::start_tree(view, directory, &source, allow_other)
    }

    /// The same with the backups of a backup store.
    ///
    /// # Errors
    /// As [`Mount::start`].
    pub fn start_backups(backups: Backups, directory: &Path) -> Result<Self> {
        let (source, allow_other) = (backups.source(), backups.allow_other());
        Self::start_tree(backups, directory, &source, allow_other)
    }

    fn start_tree<T: Tree>(
        tree: T,
        directory: &Path,
        source: &str,
        allow_other: bool,
    ) -> Result<Self> {
        let point = prepare(directory)?;
        let tree = Arc::new(tree);
        let config = config(source, allow_other);
        let session = Session::new(Served::new(Arc::clone(&tree)), &point, &config);
        let session = session.and_then(Session::spawn).map_err(|e| failed(&point, e))?;
        let watcher = match tree.is_watched() {
            true => Some(Watcher::start(tree, session.notifier())?),
            false => None,
        };
        read_ahead(&point);
        Ok(Self { session, watcher, point })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Whether somebody has unmounted it, and its last user is gone.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.session.guard.is_finished()
    }

    /// Whether it is mounted there, as far as anybody can see.
    #[must_use]
    pub fn is_seen(&self) -> bool {
        let at = mounts::at(&self.point);
        !self.is_over() && at.is_ok_and(|at| at.is_some_and(|m| m.file_system == FILE_SYSTEM))
    }

    /// Unmounts it, if nobody has; it must be over for [`Mount::close`].
    ///
    /// # Errors
    /// `Busy` if it is in use and this is not to be done `lazily`, `Io`.
    pub fn unmount(&self, lazily: bool) -> Result<()> {
        if self.is_seen() { mounts::unmount(&self.point, lazily) } else { Ok(()) }
    }

    /// Ends what served it, which was unmounted; waits a little for that.
    ///
    /// # Errors
    /// `Busy` if it is in use still: it is served until the process ends.
    pub fn close(self) -> Result<()> {
        let deadline = Instant::now() + END_PATIENCE;
        while !self.is_over() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        if let Some(watcher) = self.watcher {
            watcher.end();
        }
        if !self.session.guard.is_finished() {
            // Its end would unmount what somebody has mounted there since.
            std::mem::forget(self.session);
            return Err(Error::busy(format!("{} is in use still", self.point.display())));
        }
        match self.session.join() {
            // The kernel ended the mount while a thread took the last request from it.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            ended => ended.map_err(|e| Error::io(e, "serving the kernel")),
        }
    }
}

impl Watcher {
    fn start<T: Tree>(tree: Arc<T>, notifier: Notifier) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let other = Arc::clone(&tree);
        let tell = Box::new(move || other.end());
        let thread = thread::Builder::new()
            .name("fuse-watcher".to_owned())
            .spawn(move || tree.watch(&notifier, &asked))
            .map_err(|e| Error::io(e, "starting the thread that watches for changes"))?;
        Ok(Self { stop, thread, tell })
    }

    fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        (self.tell)();
        // Nothing is told to anybody who could listen.
        let _ = self.thread.join();
    }
}

/// Finds the place, and takes a dead mount away from it.
fn prepare(directory: &Path) -> Result<PathBuf> {
    let point = mounts::place(directory)?;
    while let Some(mounted) = mounts::at(&point)? {
        if mounts::is_dead(&point) {
            mounts::unmount(&point, true)
                .map_err(|e| e.context("a mount whose server is gone is in the way"))?;
        } else if mounted.file_system == FILE_SYSTEM {
            return Err(Error::busy(format!(
                "a store is mounted at {} already; `dbs umount` unmounts it",
                point.display()
            )));
        } else {
            break;
        }
    }
    if !point.is_dir() {
        return Err(Error::invalid(format!("{} is no directory", point.display())));
    }
    Ok(point)
}

fn config(source: &str, allow_other: bool) -> Config {
    // A comma would end the option.
    let source = if source.contains([',', '\\']) { "dbs" } else { source };
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::RO,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoExec,
        MountOption::NoAtime,
        MountOption::DefaultPermissions,
        MountOption::FSName(source.to_owned()),
        // As the kernel's own option: it makes the type `fuse.dbs`, with and without fusermount3.
        MountOption::CUSTOM("subtype=dbs".to_owned()),
    ];
    config.acl = if allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(THREADS);
    config
}

fn failed(point: &Path, error: io::Error) -> Error {
    let text = error.to_string();
    match error.kind() {
        io::ErrorKind::NotFound if !Path::new("/dev/fuse").exists() => Error::unsupported(
            "there is no /dev/fuse: the kernel's module is missing (`modprobe fuse`), or this \
             container was not given the device",
        ),
        io::ErrorKind::NotFound => mounts::no_fusermount(),
        io::ErrorKind::PermissionDenied if text.contains("user_allow_other") => Error::new(
            ErrorKind::Unsupported,
            "`allow_other` is for root, or where /etc/fuse.conf has `user_allow_other`",
        ),
        io::ErrorKind::PermissionDenied => {
            Error::unsupported("this user may not open /dev/fuse; it is usually for all (mode 666)")
        }
        _ => Error::io(error, format!("mounting at {}", point.display())),
    }
}

/// Makes the kernel read ahead as far as one request goes. Only root may; without, large sequential
/// reads are slower.
fn read_ahead(point: &Path) {
    if let Ok(Some(mounted)) = mounts::at(point) {
        let path = format!("/sys/class/bdi/{}/read_ahead_kb", mounted.device);
        let _ = std::fs::write(path, READAHEAD_KIB.to_string());
    }
}
