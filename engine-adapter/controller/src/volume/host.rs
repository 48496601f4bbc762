//! The machine a controller really runs on.

use super::{Host, Paused};
use dbs_core::{Error, Result};
use dbs_frontend::lock;
use dbs_service::log;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a `sync` may take; one that hangs on another volume does not keep this one from anything.
const SYNC_LIMIT: Duration = Duration::from_secs(30);

/// How long freezing may take: what is in memory is to be written.
const FREEZE_LIMIT: Duration = Duration::from_secs(20);
/// How long file systems stay frozen at most; a snapshot takes less, or has gone wrong.
const FREEZE_MAX: Duration = Duration::from_secs(30);
/// How long thawing is waited for.
const THAW_LIMIT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);

/// Clock, randomness and file systems of this machine.
#[derive(Debug, Default)]
pub struct Machine {
    /// The file that says which device has frozen file systems, for whoever comes after this process.
    note: Option<PathBuf>,
    /// Who keeps them frozen, or did last.
    keeper: Mutex<Option<Keeper>>,
    /// A thread whose `sync` takes too long.
    syncing: Mutex<Option<JoinHandle<()>>>,
}

impl Machine {
    /// This machine; `note` is to say which device is frozen, while one is.
    #[must_use]
    pub fn noting(note: PathBuf) -> Self {
        Self { note: Some(note), ..Self::default() }
    }

    /// Calls `sync`, which may hang: then it is not called again before it has returned, and nobody waits for it.
    fn sync_by(&self, sync: impl FnOnce() + Send + 'static, limit: Duration) -> Result<()> {
        if lock(&self.syncing).as_ref().is_some_and(|thread| !thread.is_finished()) {
            return Err(Error::busy("an earlier sync has not returned yet"));
        }
        let (done, wait) = mpsc::channel();
        let thread = std::thread::Builder::new().name("controller-sync".to_owned());
        let spawned = thread.spawn(move || {
            sync();
            // Nobody may be waiting any more.
            let _ = done.send(());
        });
        let thread = spawned.map_err(|error| Error::io(error, "starting a thread"))?;
        wait.recv_timeout(limit).map_err(|_| {
            *lock(&self.syncing) = Some(thread);
            Error::busy(format!("sync took longer than {limit:?}"))
        })
    }
}

impl Host for Machine {
    fn now_ns(&self) -> u64 {
        longhorn_wire::time::now_ns()
    }

    fn unique_name(&self) -> String {
        let mut bytes = [0; 16];
        if SystemRandom::new().fill(&mut bytes).is_err() {
            // No randomness: the time is unique as long as nobody asks twice within a nanosecond.
            bytes[8..].copy_from_slice(&self.now_ns().to_be_bytes());
        }
        uuid(bytes)
    }

    fn log(&self, error: bool, event: &str, fields: &[(&str, &dyn fmt::Display)]) {
        match error {
            true => log::error(event, fields),
            false => log::warn(event, fields),
        }
    }

    /// `sync(2)` reaches the file systems of all mount namespaces.
    fn sync(&self) -> Result<()> {
        self.sync_by(nix::unistd::sync, SYNC_LIMIT)
    }

    fn freeze(&self, device: &str) -> Result<Option<Box<dyn Paused>>> {
        match fs::metadata(device) {
            Ok(at) if at.file_type().is_block_device() => {
                let path = PathBuf::from(device);
                self.keep(device, at.rdev(), move || dbs_core::io::freeze::freeze(&path))
            }
            _ => Ok(None),
        }
    }

    fn thaw(&self) {
        let mut keeper = lock(&self.keeper);
        let Some(keeper) = keeper.take().filter(|keeper| !keeper.thread.is_finished()) else {
            return;
        };
        // If it is freezing still, it thaws as soon as it has frozen.
        let _ = keeper.end.send(());
        match keeper.has_ended(FREEZE_LIMIT + THAW_LIMIT) {
            true => log::warn("thawed", &[("why", &"the process ends")]),
            false => log::error("not-thawed", &[("error", &"freezing or thawing hangs")]),
        }
    }
}

/// The thread that keeps file systems frozen.
#[derive(Debug)]
struct Keeper {
    end: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Whether it ends within this time.
    fn has_ended(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        self.thread.is_finished()
    }
}

/// File systems that a thread of their own keeps frozen, and thaws in any case.
struct Freeze {
    end: mpsc::Sender<()>,
    thawed: mpsc::Receiver<()>,
}

impl Paused for Freeze {
    fn holds(&self) -> bool {
        self.thawed.try_recv() == Err(mpsc::TryRecvError::Empty)
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        let _ = self.end.send(());
        // Their end comes as the end of the channel.
        let _ = self.thawed.recv_timeout(THAW_LIMIT);
    }
}

impl Machine {
    /// Freezes what is on a device on a thread that thaws it when it is told to, and when it has been frozen
    /// for too long: writing what a file system has in memory may take as long as it likes, and whoever waits
    /// for this may be hung up on that very file system. The device's number is noted meanwhile: if this
    /// process is killed, the next one thaws it.
    fn keep<T: Send + 'static>(
        &self,
        device: &str,
        number: u64,
        freeze: impl FnOnce() -> Result<Vec<T>> + Send + 'static,
    ) -> Result<Option<Box<dyn Paused>>> {
        let mut keeper = lock(&self.keeper);
        if keeper.as_ref().is_some_and(|before| !before.has_ended(THAW_LIMIT)) {
            return Err(Error::busy("freezing for an earlier snapshot hangs, or thawing after it"));
        }
        let (said, frozen) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let (thaw, thawed) = mpsc::channel::<()>();
        let (note, device) = (self.note.clone(), device.to_owned());
        let keep = move || {
            let outcome = write_note(note.as_deref(), number).and_then(|()| freeze());
            let (all, outcome) = match outcome {
                Ok(all) => {
                    let some = !all.is_empty();
                    (all, Ok(some))
                }
                Err(error) => (Vec::new(), Err(error)),
            };
            let late = said.send(outcome).is_ok()
                && ended.recv_timeout(FREEZE_MAX) == Err(RecvTimeoutError::Timeout);
            if late {
                let seconds = FREEZE_MAX.as_secs();
                log::warn("thawed", &[("device", &device), ("seconds", &seconds)]);
            }
            // Before they are, if nobody has asked for it: nobody is to take them for frozen.
            let thaw = (!late).then_some(thaw);
            drop(all);
            if let Some(note) = &note {
                forget_frozen(note);
            }
            drop(thaw);
        };
        let thread = std::thread::Builder::new().name("controller-freeze".to_owned());
        let thread = thread.spawn(keep).map_err(|error| Error::io(error, "starting a thread"))?;
        *keeper = Some(Keeper { end: end.clone(), thread });
        drop(keeper);
        let answer = frozen.recv_timeout(FREEZE_LIMIT);
        if !matches!(answer, Ok(Ok(true))) {
            let _ = end.send(());
        }
        match answer {
            Ok(Ok(true)) => Ok(Some(Box::new(Freeze { end, thawed }))),
            Ok(Ok(false)) => Ok(None),
            Ok(Err(error)) => Err(error),
            // Once they are frozen, they are thawed at once: nobody listens any more.
            Err(_) => Err(Error::busy(format!("freezing takes longer than {FREEZE_LIMIT:?}"))),
        }
    }
}

fn write_note(note: Option<&Path>, number: u64) -> Result<()> {
    let Some(note) = note else { return Ok(()) };
    let written = note.parent().map_or(Ok(()), fs::create_dir_all);
    let written = written.and_then(|()| fs::write(note, number.to_string()));
    written.map_err(|e| Error::io(e, format!("noting in {} what is frozen", note.display())))
}

/// Thaws the file systems on the block device with this number if a process that was killed has frozen them, as
/// its note says ([`Machine::noting`]). What others have frozen stays frozen.
pub fn thaw_left(note: &Path, number: u64) {
    if was_left(note, number) {
        thaw(number);
    }
    forget_frozen(note);
}

fn was_left(note: &Path, number: u64) -> bool {
    fs::read_to_string(note).is_ok_and(|text| text.parse() == Ok(number))
}

/// Removes such a note: what it names is thawed, or gone.
pub fn forget_frozen(note: &Path) {
    match fs::remove_file(note) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            log::warn("note", &[("file", &note.display()), ("error", &error)]);
        }
        _ => {}
    }
}

/// Thaws the file systems on the block device with this number, which whoever froze them may have left so. One
/// whose device does not answer is left to itself.
pub fn thaw(number: u64) {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::Builder::new().name("controller-thaw".to_owned());
    let spawned = thread.spawn(move || {
        match dbs_core::io::freeze::thaw(number) {
            Ok(points) => {
                for point in points {
                    log::warn("thawed", &[("mount", &point.display()), ("why", &"it was frozen")]);
                }
            }
            Err(error) => log::warn("not-thawed", &[("error", &error)]),
        }
        // Nobody may be waiting any more.
        let _ = done.send(());
    });
    if spawned.is_err() || wait.recv_timeout(THAW_LIMIT).is_err() {
        log::warn("not-thawed", &[("error", &format!("it takes longer than {THAW_LIMIT:?}"))]);
    }
}

/// These bytes as a version 4 UUID (RFC 9562).
fn uuid(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    #[test]
    fn what_is_no_block_device_has_nothing_to_freeze() {
        for endpoint in ["", "/dev/null", "/dev/longhorn/none", "/"] {
            assert!(Machine::default().freeze(endpoint).unwrap().is_none(), "{endpoint}");
        }
        // There is one, but the guard's thread says what is wrong with it, and is gone.
        let freeze = || dbs_core::io::freeze::freeze(Path::new("/dev/null"));
        let error = Machine::default().keep("/dev/null", 1, freeze).err().unwrap();
        assert!(error.to_string().contains("no block device"), "{error}");
    }

    /// Found by review: each snapshot left a thread where a network file system hangs, and waited for it.
    #[test]
    fn a_sync_that_hangs_is_waited_for_once() {
        let machine = Machine::default();
        let (end, ended) = mpsc::channel::<()>();
        // It ends as an error.
        let hangs = move || assert!(ended.recv().is_err());
        let error = machine.sync_by(hangs, Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("took longer"), "{error}");
        let error = machine.sync_by(|| unreachable!(), SYNC_LIMIT).unwrap_err();
        assert!(error.to_string().contains("has not returned"), "{error}");
        drop(end);
        let begun = Instant::now();
        while machine.sync_by(|| {}, SYNC_LIMIT).is_err() {
            assert!(begun.elapsed() < SYNC_LIMIT, "it has returned");
            std::thread::sleep(POLL);
        }
        machine.sync_by(|| {}, SYNC_LIMIT).unwrap();
    }

    /// A file system that is frozen as long as this is there.
    struct IsFrozen(Arc<AtomicBool>);

    impl IsFrozen {
        fn new(state: &Arc<AtomicBool>) -> Self {
            state.store(true, SeqCst);
            Self(Arc::clone(state))
        }
    }

    impl Drop for IsFrozen {
        fn drop(&mut self) {
            self.0.store(false, SeqCst);
        }
    }

    #[test]
    fn a_process_that_ends_leaves_nothing_frozen() {
        let directory = tempfile::tempdir().unwrap();
        let note = directory.path().join("run/v.frozen");
        let machine = Machine::noting(note.clone());
        let state = Arc::new(AtomicBool::new(false));
        let frozen = || {
            let state = Arc::clone(&state);
            move || Ok(vec![IsFrozen::new(&state)])
        };
        // While it is frozen, the next process can see that.
        let hold = machine.keep("disk", 77, frozen()).unwrap().unwrap();
        assert!(hold.holds() && state.load(SeqCst) && was_left(&note, 77) && !was_left(&note, 7));
        drop(hold);
        assert!(!state.load(SeqCst) && !note.exists());
        // The process ends amid a snapshot.
        let hold = machine.keep("disk", 77, frozen()).unwrap().unwrap();
        machine.thaw();
        assert!(!state.load(SeqCst) && !note.exists() && !hold.holds());
        drop(hold);
        machine.thaw();
        // Or while it freezes, which takes its time.
        let (begun, wait) = mpsc::channel();
        let (its, freeze) = (Arc::clone(&state), frozen());
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let slow = move || {
                    begun.send(()).unwrap();
                    std::thread::sleep(Duration::from_millis(300));
                    freeze()
                };
                machine.keep("disk", 77, slow).map(drop)
            });
            wait.recv().unwrap();
            machine.thaw();
            assert!(!its.load(SeqCst) && !note.exists());
            let _ = asking.join().unwrap();
        });
    }

    #[test]
    fn only_what_a_killed_process_froze_is_thawed_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let note = directory.path().join("v.frozen");
        for (text, left) in
            [(None, false), (Some("77"), true), (Some("7"), false), (Some(""), false)]
        {
            if let Some(text) = text {
                fs::write(&note, text).unwrap();
            }
            assert_eq!(was_left(&note, 77), left, "{text:?}");
            thaw_left(&note, 77);
            assert!(!note.exists());
        }
        // Where that cannot be noted, nothing is frozen.
        let machine = Machine::noting("/dev/null/v.frozen".into());
        let freeze = || -> Result<Vec<()>> { unreachable!() };
        let error = machine.keep("disk", 77, freeze).err().unwrap();
        assert!(error.to_string().contains("/dev/null/v.frozen"), "{error}");
    }

    #[test]
    fn names_are_uuids_and_differ() {
        assert_eq!(uuid([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        let machine = Machine::default();
        let (a, b) = (machine.unique_name(), machine.unique_name());
        assert_eq!(a.len(), 36);
        assert_ne!(a, b);
        assert_eq!(a.as_bytes()[14], b'4');
    }
}
