//! Which generation of its content a replica has. Each session, from one close of the replica to the next, gives
//! it a new one with its first change; so does the loss of changes that were acknowledged. A controller that
//! left a block device behind remembers the generations of its replicas: if a replica has another one now, somebody
//! else has changed it since.
//!
//! The number is in a file of the directory, beside the boot of the machine and the session of the store that it
//! was written in. The one that the present session will have is known before: controllers are told both.

use super::Replica;
use dbs_core::{Error, Result};
use dbs_service::log;
use longhorn_wire::frame::Generations;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The file.
pub(super) const FILE: &str = "volume.generation";
/// In place of the boot: the replica was closed in good order, so no end of a machine has cost it anything.
const CLOSED: &str = "00000000-0000-0000-0000-000000000000";
/// Longest file that is looked at.
const LINE_MAX_BYTES: u64 = 256;

/// What the file says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Line {
    number: u64,
    boot: String,
    /// The session of the store, if the tail from before it was gone; 0 if it was not.
    session: u64,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:016x} {} {:016x}", self.number, self.boot, self.session)
    }
}

/// The generation of one replica.
#[derive(Debug)]
pub(super) struct Generation {
    path: PathBuf,
    boot: String,
    /// The line as it is in the file, and the number that the next change gives.
    state: Mutex<(Line, u64)>,
}

impl Generation {
    /// That of a replica directory; nothing is read or made yet.
    pub fn new(dir: &Path) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { path: dir.join(FILE), boot: boot.trim().to_owned(), state: Mutex::default() }
    }

    /// Takes up what the file says. The generation is a new one if there is none, or if changes that were
    /// acknowledged may be lost: the replica was not closed in good order and the boot is another one, or the tail before
    /// this session of the store (`lost_tail`) is gone. That it was closed is not believed of `dirty` alone, which a full disk
    /// has no room for.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub fn load(&self, dirty: bool, lost_tail: Option<u64>) -> Result<()> {
        let mut state = self.state();
        let session = lost_tail.unwrap_or(0);
        let found = self.read().filter(|line| {
            let cut_off = line.boot != self.boot && (dirty || line.boot != CLOSED);
            !(cut_off || dirty && session != 0 && line.session != session)
        });
        let known = found.is_some();
        let line = found.map_or_else(random, |line| Ok(line.number));
        let number = line.map_err(|e| self.failed(e))?;
        state.0 = Line { number, boot: self.boot.clone(), session };
        if state.1 == 0 {
            state.1 = random().map_err(|e| self.failed(e))?;
        }
        if known { Ok(()) } else { self.write(&state.0) }
    }

    /// Says that it is this boot in which the replica is open.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn open(&self) -> Result<()> {
        let state = self.state();
        match self.read() {
            Some(line) if line == state.0 => Ok(()),
            _ => self.write(&state.0),
        }
    }

    /// Takes up what another process of the directory has made of the file.
    pub fn look_again(&self) {
        if let Some(line) = self.read() {
            self.state().0.number = line.number;
        }
    }

    /// The replica was closed, and all that it acknowledged is durable. Said in place, as a full disk has no room for more.
    ///
    /// # Errors
    /// `Io`; then more than was lost is taken for lost.
    pub fn close(&self) -> Result<()> {
        let line = Line { boot: CLOSED.to_owned(), ..self.state().0.clone() };
        self.overwrite(&line).map_err(|e| self.failed(e))
    }

    /// The replica was closed: the next change is of another session.
    ///
    /// # Errors
    /// `Io`.
    pub fn end_session(&self) -> Result<()> {
        self.state().1 = random().map_err(|e| self.failed(e))?;
        Ok(())
    }

    /// The replica is about to be changed. When this returns, the generation is that of this session, durably.
    ///
    /// # Errors
    /// `Io`, `NoSpace`; there is no file then, and so a new generation at the next start, unless the file
    /// cannot be removed either.
    pub fn change(&self) -> Result<()> {
        let mut state = self.state();
        if state.0.number == state.1 {
            return Ok(());
        }
        state.0.number = state.1;
        // A full disk has no room for another file: then the old one says it.
        let written =
            self.write(&state.0).or_else(|error| self.overwrite(&state.0).map_err(|_| error));
        if written.is_err() {
            match fs::remove_file(&self.path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(self.failed(e)),
                _ => {}
            }
        }
        written
    }

    /// What controllers are told; nothing before there is a file.
    pub fn told(&self) -> Option<Generations> {
        let state = self.state();
        (state.0.number != 0).then_some(Generations { now: state.0.number, changed: state.1 })
    }

    fn read(&self) -> Option<Line> {
        let mut text = String::new();
        let file = File::open(&self.path).ok()?;
        file.take(LINE_MAX_BYTES).read_to_string(&mut text).ok()?;
        let mut words = text.strip_suffix('\n')?.split(' ');
        let number = |word: &str| u64::from_str_radix(word, 16).ok();
        let (first, boot, session) = (words.next()?, words.next()?.to_owned(), words.next()?);
        Some(Line { number: number(first)?, boot, session: number(session)? })
    }

    /// Changes the file in place, durably: lines are equally long, and shorter than a sector.
    fn overwrite(&self, line: &Line) -> io::Result<()> {
        let file = File::options().write(true).open(&self.path)?;
        let line = line.to_string();
        if file.metadata()?.len() != line.len() as u64 {
            return Err(io::Error::other("the line has another length"));
        }
        file.write_all_at(line.as_bytes(), 0)?;
        file.sync_data()
    }

    /// Replaces the file in one step, durably.
    fn write(&self, line: &Line) -> Result<()> {
        let write = || {
            let next = self.path.with_extension("generation.new");
            let mut file = File::create(&next)?;
            file.write_all(line.to_string().as_bytes())?;
            file.sync_all()?;
            fs::rename(&next, &self.path)?;
            let dir = self.path.parent().map(File::open);
            dir.map_or(Ok(()), |dir| dir?.sync_all())
        };
        write().map_err(|e| self.failed(e))
    }

    fn failed(&self, e: io::Error) -> Error {
        Error::io(e, format!("writing `{}`", self.path.display()))
    }

    fn state(&self) -> MutexGuard<'_, (Line, u64)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Replica {
    /// Does something with the generation, and tells controllers that connect from now on. Without room for its
    /// file the replica goes on: the next start makes a new one, which only makes a controller end a device.
    pub(super) fn note_generation(&self, act: impl FnOnce(&Generation) -> Result<()>) {
        if let Err(e) = act(&self.generation) {
            log::warn("generation", &[("error", &e)]);
        }
        self.gate.set_generations(self.generation.told());
    }
}

/// A number that no other generation has.
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes).max(1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(dir: &Path, dirty: bool, lost_tail: Option<u64>) -> Generation {
        let generation = Generation::new(dir);
        generation.load(dirty, lost_tail).unwrap();
        generation
    }

    fn now(generation: &Generation) -> u64 {
        generation.told().unwrap().now
    }

    #[test]
    fn each_session_that_changes_something_gives_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Generation::new(dir.path()).told(), None);
        let first = of(dir.path(), true, None);
        let told = first.told().unwrap();
        assert_ne!(told.now, told.changed);
        first.open().unwrap();
        first.end_session().unwrap();
        // Nothing was changed.
        assert_eq!(now(&of(dir.path(), false, None)), told.now);
        let told = first.told().unwrap();
        first.change().unwrap();
        first.change().unwrap();
        assert_eq!(now(&first), told.changed);
        let other = of(dir.path(), true, None);
        assert_eq!(now(&other), told.changed, "it was killed");
        first.end_session().unwrap();
        first.change().unwrap();
        assert_ne!(now(&first), told.changed);
        other.look_again();
        assert_eq!(now(&other), now(&first));
    }

    #[test]
    fn what_loses_changes_has_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        let first = now(&of(dir.path(), true, None));
        let line = fs::read_to_string(&file).unwrap();
        let boot = line.split(' ').nth(1).unwrap().to_owned();
        let older = line.replace(&boot, "00000000-0000-0000-0000-000000000000");
        // It was closed before the machine ended.
        fs::write(&file, &older).unwrap();
        let closed = of(dir.path(), false, None);
        assert_eq!(now(&closed), first);
        closed.open().unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), line);
        fs::write(&file, &older).unwrap();
        let second = now(&of(dir.path(), true, None));
        assert_ne!(second, first);
        // Of what was closed in good order a tail had nothing.
        assert_eq!(now(&of(dir.path(), false, Some(6))), second);
        // A tail is lost once in a session of the store.
        let third = now(&of(dir.path(), true, Some(7)));
        assert_ne!(third, second);
        assert_eq!(now(&of(dir.path(), true, Some(7))), third);
        assert_ne!(now(&of(dir.path(), true, Some(8))), third);
        for damage in ["", "x", "1 2", "\n", "1 b 2"] {
            fs::write(&file, damage).unwrap();
            let anew = now(&of(dir.path(), false, None));
            assert!(anew > 2, "{damage:?}");
        }
    }

    #[test]
    fn without_room_for_another_file_the_old_one_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        let generation = of(dir.path(), false, None);
        // Where the new one would be written there is a directory.
        fs::create_dir(dir.path().join("volume.generation.new")).unwrap();
        generation.change().unwrap();
        let first = now(&generation);
        assert_eq!(now(&of(dir.path(), true, None)), first);
        // A file that somebody has cut off is of no use, and goes.
        generation.end_session().unwrap();
        fs::write(&file, "1").unwrap();
        generation.change().unwrap_err();
        assert!(!file.exists());
        fs::remove_dir(dir.path().join("volume.generation.new")).unwrap();
        assert_ne!(now(&of(dir.path(), false, None)), first);
    }

    /// Found by review: with a full disk the mark that a replica is open was not written; after a loss of power it passed for one
    /// that was closed, and a device was taken over on it though it lacked what was acknowledged.
    #[test]
    fn a_boot_that_ended_without_a_close_makes_a_new_one_whatever_the_mark_says() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        let power_is_lost = || {
            let line = fs::read_to_string(&file).unwrap();
            let boot = Generation::new(dir.path()).boot;
            fs::write(&file, line.replace(&boot, "11111111-1111-1111-1111-111111111111")).unwrap();
        };
        let generation = of(dir.path(), false, None);
        generation.open().unwrap();
        // The disk is full.
        fs::create_dir(dir.path().join("volume.generation.new")).unwrap();
        generation.change().unwrap();
        generation.end_session().unwrap();
        generation.close().unwrap();
        let closed = now(&generation);
        power_is_lost();
        let next = of(dir.path(), false, None);
        assert_eq!(now(&next), closed, "it was closed before");
        next.change().unwrap();
        let changed = now(&next);
        fs::remove_dir(dir.path().join("volume.generation.new")).unwrap();
        assert_eq!(now(&of(dir.path(), false, None)), changed, "killed in the same boot");
        power_is_lost();
        let lost = now(&of(dir.path(), false, None));
        assert!(lost != changed && lost != closed);
    }
}
