//! Which tail a store is opened with, and what of the last session is in it.

use super::{Env, TailPlace, recover};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Superblock;
use crate::io::open::OpenedStorage;
use crate::io::{Storage, TailMemory, tail as tails};
use crate::meta::load::{LastSession, Loader};
use crate::meta::tail::{self, TailKey};
use crate::sabotage::{self, Bug};
use std::path::{Path, PathBuf};

/// Replays the tail of the last session; a warning if there was one and it is gone.
pub(super) fn take_tail(
    storage: &dyn Storage,
    superblock: &Superblock,
    loader: &mut Loader,
    tail: &mut OpenedTail,
    env: &dyn Env,
) -> Result<Option<String>> {
    let Some(last) = loader.last_session else { return Ok(None) };
    let key = TailKey { store: superblock.uuid, boot: env.boot_id(), session: last.id };
    let memory = tail.memory.as_deref_mut();
    if let Some(batches) = memory.and_then(|memory| tail::replay(memory, &key, loader.durable())) {
        let away = loader.changed_away(&batches);
        recover::load_again(storage, &superblock.geometry, &away, loader)?;
        loader.replay_tail(batches);
        return Ok(None);
    }
    check_unneeded(tail.refused.take(), &last, env.boot_id())?;
    if !last.tail || last.boot != env.boot_id() {
        return Ok(None);
    }
    match tail.places.find_moved(&key, loader.durable()) {
        None => Ok(Some(TAIL_GONE.to_owned())),
        Some(text) if tail.places.read_only => Ok(Some(text)),
        Some(text) => {
            // The one that was made is of no session, and would hide the other where that is in another directory.
            if let Some(memory) = &mut tail.memory {
                memory.remove();
            }
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

/// Where tails are, and how that of a store is called there.
#[derive(Default)]
pub(super) struct TailPlaces {
    directories: Vec<PathBuf>,
    /// Which file or device the store is.
    store: String,
    read_only: bool,
}

impl TailPlaces {
    /// What to say of a tail that is surely the last session's and has something for the store, but is that of another
    /// place.
    pub(super) fn find_moved(&self, key: &TailKey, durable: u64) -> Option<String> {
        let names = |at: &PathBuf| tails::find_of_other_places(at, key.store, &self.store);
        let (at, place) = self.directories.iter().find_map(|at| {
            let is_it = |place: &String| {
                let copy = tails::TailCopy::read(at, key.store, place);
                let has = |mut copy| tail::replay(&mut copy, key, durable);
                copy.is_ok_and(|copy| has(copy).is_some_and(|batches| !batches.is_empty()))
                    && tails::is_free(&tails::path_of(at, key.store, place))
            };
            Some((at, names(at).into_iter().find(is_it)?))
        })?;
        let [found, own] = [&place, &self.store].map(|place| tails::path_of(at, key.store, place));
        Some(format!(
            "the last process to write the store ended without closing it, and its tail `{}`, with writes that were \
             acknowledged, is that of another file or device. If the store was moved, or its device has another number \
             now, rename the tail to `{}`. If this is a copy, it lacks these writes: open the original, end that, and copy \
             it again. Or remove the tail, and the store opens without these writes",
            found.display(),
            own.display()
        ))
    }
}

/// Makes durable what a killed process wrote, before anything is written that says so. If that fails, what the tail's
/// records point to may be what was not stored, and the next process is not told: then `forget` makes the tail worth
/// nothing.
///
/// # Errors
/// `Io`.
pub(super) fn flush_first(storage: &dyn Storage, forget: impl FnOnce()) -> Result<()> {
    storage.flush().map_err(|error| {
        if !sabotage::is(Bug::KeepTailAfterFailure) {
            forget();
        }
        Error::io(error, "flush failed")
    })
}

/// Makes durable what a killed process wrote to a store that is repaired. If that fails, nothing is done, and its tail is
/// given up: an undo would bring back the state that the tail builds on.
///
/// # Errors
/// `Io`.
pub(super) fn flush_opened(
    opened: &OpenedStorage,
    place: &TailPlace,
    uuid: [u8; 16],
) -> Result<()> {
    let store = &*opened.place;
    let tail = WantedTail { place, uuid, store, knows_boot: true, read_only: false };
    flush_first(&*opened.storage, || tail.forget())
}

/// What is said of a tail that is not there, or is none of the session that needs it.
pub(super) const TAIL_GONE: &str = "the last process to write the store ended without closing it and its tail is gone: writes it \
     acknowledged after its last flush may be lost";

/// What there is of a tail.
#[derive(Default)]
pub(super) struct OpenedTail {
    pub(super) memory: Option<Box<dyn TailMemory>>,
    /// Why there is none, for who writes.
    pub(super) warning: Option<String>,
    /// Why the one that is there cannot be used.
    pub(super) refused: Option<Error>,
    /// Where it was looked for.
    pub(super) places: TailPlaces,
}

/// Refuses to go on without a tail that is there, in which a session of this boot has kept what it
/// acknowledged: the first group of another session would make it worth nothing.
///
/// # Errors
/// Why it cannot be used.
pub(super) fn check_unneeded(
    refused: Option<Error>,
    last: &LastSession,
    boot: [u8; 16],
) -> Result<()> {
    match refused {
        Some(error) if last.tail && last.boot == boot => Err(error),
        _ => Ok(()),
    }
}

pub(super) struct WantedTail<'a> {
    pub(super) place: &'a TailPlace,
    pub(super) uuid: [u8; 16],
    /// Which file or device the store is.
    pub(super) store: &'a str,
    pub(super) knows_boot: bool,
    pub(super) read_only: bool,
}

impl WantedTail<'_> {
    /// The tail, or why there is none.
    pub(super) fn open(&self) -> Result<OpenedTail> {
        let candidates = match self.place {
            TailPlace::None => return Ok(OpenedTail::default()),
            TailPlace::Directory(directory) => vec![directory.clone()],
            TailPlace::Auto => tails::default_candidates(),
        };
        let opened = self.open_among(&candidates)?;
        let others = || tails::find_of_others(self.uuid, self.store);
        let refused = match self.place {
            TailPlace::Auto => opened.refused.or_else(|| others().as_deref().map(of_another_user)),
            _ => opened.refused,
        };
        let (store, read_only) = (self.store.to_owned(), self.read_only);
        let places = TailPlaces { directories: candidates, store, read_only };
        Ok(OpenedTail { refused, places, ..opened })
    }

    /// Makes a tail that is there worth nothing.
    pub(super) fn forget(&self) {
        let candidates = match self.place {
            TailPlace::None => Vec::new(),
            TailPlace::Directory(directory) => vec![directory.clone()],
            TailPlace::Auto => tails::default_candidates(),
        };
        let there = |at: &&PathBuf| tails::find_file(at, self.uuid, self.store).is_some();
        for directory in candidates.iter().filter(there) {
            // One that cannot be used is refused when the store is opened.
            if let Ok(mut memory) = tails::FileTail::open(directory, self.uuid, self.store) {
                tail::forget(&mut memory);
            }
        }
    }

    fn open_among(&self, candidates: &[PathBuf]) -> Result<OpenedTail> {
        let directory = match self.place {
            TailPlace::Auto => tails::find_directory(candidates, self.uuid, self.store),
            _ => candidates.first().cloned(),
        };
        // Before one is made.
        let find = |at: &PathBuf| tails::find_file(at, self.uuid, self.store);
        let there = candidates.iter().find_map(find);
        let elsewhere = there.is_some() && directory.as_ref().and_then(find).is_none();
        let refused = |why: &Error| {
            let path = there.as_ref()?.display();
            let text = format!(
                "the tail `{path}` has writes that were acknowledged, and cannot be used: {why}. Nothing was \
                 changed: put that right and try again; or remove the file, and the store opens without those \
                 writes"
            );
            Some(Error::new(why.kind(), text))
        };
        let opened = if elsewhere {
            // A new one elsewhere would be taken for it the next time.
            let text =
                "the directory of the tail is not one on tmpfs that only this user can change";
            Err(Error::invalid(text))
        } else {
            self.open_in(directory)
        };
        match opened {
            Ok(memory) => Ok(OpenedTail { memory: Some(memory), ..OpenedTail::default() }),
            Err(error) if !self.read_only && *self.place != TailPlace::Auto => Err(error),
            Err(error) => {
                let effect = "writes to new space are committed before they are acknowledged, which is \
                              slower";
                let warning = (!self.read_only).then(|| format!("{error}: {effect}"));
                let refused = refused(&error);
                Ok(OpenedTail { warning, refused, ..OpenedTail::default() })
            }
        }
    }

    fn open_in(&self, directory: Option<PathBuf>) -> Result<Box<dyn TailMemory>> {
        let Some(directory) = directory else {
            return Err(Error::unsupported("no directory on tmpfs for a tail"));
        };
        if self.read_only {
            let copy = tails::TailCopy::read(&directory, self.uuid, self.store)?;
            return Ok(Box::new(copy));
        }
        if !self.knows_boot {
            return Err(Error::unsupported("the system does not say which boot this is"));
        }
        Ok(Box::new(tails::FileTail::open(&directory, self.uuid, self.store)?))
    }
}

/// Why a store is not opened whose last process was another user's, if that one's own tail is needed.
fn of_another_user(path: &Path) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!(
            "the tail `{}` of another user may have writes that were acknowledged. Nothing was changed: start `dbs \
             serve` on the store once as that user, and end it; or remove the file, and the store opens without those \
             writes",
            path.display()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Found by trying: root opened the store of a user's server that was killed, and what the server had acknowledged
    /// was gone.
    #[test]
    fn a_tail_of_another_user_is_not_passed_over() {
        let place = tempfile::Builder::new().prefix("dbs-").tempdir_in("/dev/shm");
        let Ok(place) = place.and_then(|place| {
            std::os::unix::fs::chown(place.path(), Some(65534), None).map(|()| place)
        }) else {
            println!("SKIPPED: giving a directory in /dev/shm to another user needs root");
            return;
        };
        let (uuid, store) = (*b"another user's!!", "1-2");
        let wanted =
            WantedTail { place: &TailPlace::Auto, uuid, store, knows_boot: true, read_only: true };
        assert!(wanted.open().unwrap().refused.is_none());
        drop(tails::FileTail::open(place.path(), uuid, store).unwrap());
        let refused = wanted.open().unwrap().refused.unwrap();
        let last = LastSession { tail: true, boot: [1; 16], ..LastSession::default() };
        check_unneeded(Some(refused), &last, [2; 16]).unwrap();
        let refused = wanted.open().unwrap().refused;
        let refused = check_unneeded(refused, &last, [1; 16]).unwrap_err();
        assert!(refused.to_string().contains("once as that user"), "{refused}");
    }

    /// A tail in a directory that will not do any more: no other one is made, which the next process would find.
    #[test]
    fn a_tail_in_a_directory_that_will_not_do_is_refused_each_time() {
        let Ok(tmpfs) = tempfile::tempdir_in("/dev/shm") else {
            println!("SKIPPED: /dev/shm cannot be written to");
            return;
        };
        let places = ["first", "second"].map(|name| tmpfs.path().join(name));
        let set_mode = |mode| {
            std::fs::set_permissions(&places[1], std::fs::Permissions::from_mode(mode)).unwrap();
        };
        std::fs::create_dir(&places[1]).unwrap();
        set_mode(0o700);
        let (place, uuid, store) = (&TailPlace::Auto, [3; 16], "1-2");
        drop(tails::FileTail::open(&places[1], uuid, store).unwrap());
        for (mode, read_only) in [(0o770, false), (0o770, false), (0o770, true), (0o700, false)] {
            set_mode(mode);
            let wanted = WantedTail { place, uuid, store, knows_boot: true, read_only };
            let opened = wanted.open_among(&places).unwrap();
            let usable = mode == 0o700;
            assert_eq!((opened.memory.is_some(), opened.refused.is_none()), (usable, usable));
            assert_eq!(tails::find_file(&places[0], uuid, store), None);
        }
    }
}
