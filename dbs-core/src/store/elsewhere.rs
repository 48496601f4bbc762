//! Whether the store is written by another machine. Locks are those of one kernel, and several may reach a disk.
//!
//! Who takes a store over writes a group of its own session behind the last one that it found, which is where this
//! session would write its next. So before a session writes a group, it looks there and at the ring's start, where a
//! longer group may have gone, at its own last group, and at the superblock. It does not look while its last group is
//! younger than [`TRUST_NS`]: who takes a store over from another machine watches the place for longer ([`PATIENCE`]),
//! and a group is what it watches for. On a device it looks as well when it has nothing to commit.
//!
//! What cannot be read says nothing: looking fails no store that could go on.

use super::Inner;
use super::identity::uuid_text;
use super::ring::Trace;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{RegionKind, Superblock};
use crate::io::buffer::AlignedBuf;
use crate::meta::commit::Group;
use crate::meta::load::LastSession;
use crate::units::BLOCK_BYTES;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// So long after a group was written nobody else can have begun: well below [`PATIENCE`].
const TRUST_NS: u64 = 100_000_000;
/// How often a store on a device is looked at while there is nothing to commit: each time that a server does its
/// housekeeping, which is once a second.
const IDLE_NS: u64 = 900_000_000;
/// How long who takes a store over from another machine watches for a sign of it, and then again until that one must have
/// noticed: longer than a second, after which a server has committed what it has, and has looked.
const PATIENCE: Duration = Duration::from_secs(2);

/// Groups of a session after which its first one may have been written over: a ring is at least eight groups long.
const FIRST_GROUPS: u64 = 6;

/// What to do about it.
const WAY_OUT: &str = "What both have written since may have destroyed blocks of either. Stop one of them, and see that the \
                       disk cannot be reached from there any more. Then run `dbs check` and `dbs scrub` here; `dbs repair` \
                       mends metadata that is damaged";

/// What is remembered of the last look.
#[derive(Default)]
pub(super) struct Looks(Mutex<Seen>);

#[derive(Default)]
struct Seen {
    /// The first block of this session's last group, by its place in the ring, and the group's sequence.
    own: Option<(u32, u64)>,
    /// As `own`, of the session's first group, while no later one can have been written over it.
    first: Option<(u32, u64)>,
    /// The block behind it, or behind the last group of the session before.
    behind: u32,
    /// When that group was begun.
    begun_ns: Option<u64>,
    looked_ns: u64,
}

impl Looks {
    /// Of a session that has not begun: its first group comes to lie at `behind`, or at the ring's start.
    pub(super) fn new(behind: u32) -> Self {
        Self(Mutex::new(Seen { behind, ..Seen::default() }))
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A sign of another writer.
struct Sign {
    what: String,
    boot: Option<[u8; 16]>,
}

impl Inner {
    /// Before a group is written: makes sure that nobody else has written one since. The caller has the turn at commits.
    /// When this was, for [`Inner::note_group`].
    ///
    /// # Errors
    /// `Poisoned`.
    pub(super) fn look_elsewhere(&self) -> Result<u64> {
        if !self.storage.may_be_shared() {
            return Ok(0);
        }
        let now = self.env.now_ns();
        // A clock that was put back says nothing.
        let since = self.looks.seen().begun_ns.map(|begun| now.checked_sub(begun));
        if !matches!(since, Some(Some(0..TRUST_NS))) {
            self.look_now(now)?;
        }
        Ok(now)
    }

    /// This group is durable; it was begun after the look at `now`.
    pub(super) fn note_group(&self, group: &Group, now: u64) {
        let (first, blocks) = group.place();
        let mut seen = self.looks.seen();
        let own = (first, group.sequence());
        let begun = seen.own.is_none();
        seen.own = Some(own);
        seen.first = if begun { Some(own) } else { seen.first };
        seen.first = seen.first.filter(|(_, first)| group.sequence() - first < FIRST_GROUPS);
        seen.behind = first + blocks;
        seen.begun_ns = Some(now);
    }

    /// Looks while there is nothing to commit, if that was not just done.
    ///
    /// # Errors
    /// `Poisoned`.
    pub(super) fn look_while_idle(&self) -> Result<()> {
        // A file is reached by one kernel, but for network file systems: there it costs requests.
        if !self.storage.may_be_shared() || self.storage.resizable() {
            return Ok(());
        }
        let now = self.env.now_ns();
        let looked = self.looks.seen().looked_ns;
        if now.checked_sub(looked).is_some_and(|since| since < IDLE_NS)
            || self.poison.get().is_some()
        {
            return Ok(());
        }
        self.without_commits(|| self.look_now(now)).map_err(|error| self.poison_by(error))
    }

    /// Whoever wrote the store last may still do so, on another machine: waits for a sign of it. Nothing was written yet.
    /// Whether it was waited.
    ///
    /// # Errors
    /// `Poisoned`.
    pub(super) fn watch_elsewhere(&self, last: Option<&LastSession>) -> Result<bool> {
        if !self.storage.may_be_shared() {
            return Ok(false);
        }
        // Of this boot, the locks have told. A store that was closed has nobody who writes it.
        let boot = self.meta().boot;
        let unknown = [0; 16];
        let elsewhere = last.is_some_and(|last| last.boot != boot || boot == unknown);
        let waits = elsewhere && !self.storage.resizable();
        if waits {
            self.env.pause(PATIENCE);
        }
        self.look_now(self.env.now_ns())?;
        Ok(waits)
    }

    /// The session's first group is durable. Who wrote the store before finds it while this waits, and stops before
    /// anything else is written here.
    pub(super) fn let_notice(&self) {
        self.env.pause(PATIENCE);
    }

    /// The session has begun: its groups must still be there. Of two that open the store at the same moment, or one of which
    /// was writing a group, one finds that of the other.
    ///
    /// # Errors
    /// `Poisoned`.
    pub(super) fn look_begun(&self) -> Result<()> {
        if !self.storage.may_be_shared() {
            return Ok(());
        }
        self.look_now(self.env.now_ns())
    }

    fn look_now(&self, now: u64) -> Result<()> {
        let sign = self.find_sign();
        self.looks.seen().looked_ns = now;
        let Some(Sign { what, boot }) = sign else { return Ok(()) };
        let (own, here) = {
            let meta = self.meta();
            (meta.log.session, meta.boot)
        };
        let whose = match boot {
            Some(boot) if boot == here => {
                " of this machine (of another container, perhaps)".to_owned()
            }
            Some(boot) => format!(" of the machine whose boot id is {}", uuid_text(&boot)),
            None => String::new(),
        };
        let here = uuid_text(&here);
        let text = format!(
            "the store is written from elsewhere, too: {what}{whose}. This is session {own:016x}, boot id {here}. {WAY_OUT}"
        );
        Err(Error::new(ErrorKind::Poisoned, text))
    }

    fn find_sign(&self) -> Option<Sign> {
        self.sign_in_superblock().or_else(|| self.sign_in_journal())
    }

    /// A group of another session where the next one of this session would come, or over its last one.
    fn sign_in_journal(&self) -> Option<Sign> {
        let (own, first, behind) = {
            let seen = self.looks.seen();
            (seen.own, seen.first, seen.behind)
        };
        let (session, last, ring, store) = {
            let meta = self.meta();
            // What was taken out for a group and is not written yet does not count.
            let last = own.map_or(meta.log.durable, |(_, sequence)| sequence);
            (meta.log.session, last, meta.geometry.region(RegionKind::Journal), meta.uuid)
        };
        // A crash may have left a part of the next group, if it began at these places; over an own group it has not.
        let next = [0, behind].map(|place| (place, last + 1, false));
        let over = own.into_iter().chain(first).map(|(place, sequence)| (place, sequence, true));
        // Where the group is written comes last: what is written there from then on nobody sees.
        for (place, least, parts) in over.chain(next) {
            let Some(found) = Trace::read(&*self.storage, ring, &store, place) else { continue };
            if found.session == session || found.sequence < least || found.maybe_torn && !parts {
                continue;
            }
            let Trace { sequence, session, boot, .. } = found;
            return Some(Sign {
                what: format!("group {sequence} of the journal is of session {session:016x}"),
                boot,
            });
        }
        None
    }

    /// A change of the superblock that is not of this process.
    fn sign_in_superblock(&self) -> Option<Sign> {
        // Nobody here changes it meanwhile.
        let known = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        self.storage.read_at(0, &mut block).ok()?;
        let found = Superblock::decode(&block, 0).ok()?;
        if found.uuid != known.uuid {
            let what = format!("there is another store now, {}", uuid_text(&found.uuid));
            return Some(Sign { what, boot: None });
        }
        let is_newer = found.sequence > known.sequence;
        let differs = found.sequence == known.sequence && found != *known;
        (is_newer || differs).then(|| Sign {
            what: "another process has changed the superblock".to_owned(),
            boot: None,
        })
    }
}

/// What is said of it to who opens the store.
pub(super) fn opening(error: Error) -> Error {
    if error.kind() == ErrorKind::Poisoned { Error::busy(error.to_string()) } else { error }
}
