//! Whether the store is written by another machine. Locks are those of one kernel, and several may reach a disk.
//!
//! Who takes a store over writes a group of its own session behind the last one that it found, which is where this
//! session would write its next. So before a session writes a group, it looks there and at the ring's start, where a
//! longer group may have gone, at its own groups since the last look, and at the superblock. It need not look again for
//! [`TRUST_NS`] after a group: who opens what another boot left open watches the place for longer, and a group is
//! what it watches for. On a device a session looks as well when it has nothing to commit.
//!
//! What cannot be read says nothing: looking fails no store that could go on, nor holds it up each time ([`REST_NS`]).

use super::Inner;
use super::identity::uuid_text;
use super::ring::Trace;
use crate::error::{Error, ErrorKind, Result};
use crate::format::geometry::Region;
use crate::format::record::Record;
use crate::format::{RegionKind, Superblock};
use crate::io::ReadRequest;
use crate::io::buffer::AlignedBuf;
use crate::meta::commit::Group;
use crate::meta::load::LastSession;
use crate::units::BLOCK_BYTES;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// So long after a group before which a session has looked, it does not look again: at most ten times a second.
const TRUST_NS: u64 = 100_000_000;
/// How long who opens a file that another boot left open watches for a sign of life: longer than anybody trusts.
const FILE_PATIENCE: Duration = Duration::from_nanos(2 * TRUST_NS);
/// The same of a device, and then again until the other must have noticed: longer than a second, after which a
/// server has committed what it has, and has looked.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long opening a device that another boot left open takes at least: the store is held meanwhile, and nobody serves it yet.
pub const TAKE_OVER_TIME: Duration = Duration::from_secs(2 * PATIENCE.as_secs());
/// How often a store on a device is looked at while there is nothing to commit: each time that a server does its
/// housekeeping, which is once a second.
const IDLE_NS: u64 = 900_000_000;
/// A look that takes longer does not go well: a disk tries for many seconds to read a bad block.
const SLOW_NS: u64 = 1_000_000_000;
/// So long nobody looks after two looks in a row that did not go well. One alone may be of a moment, or of a machine
/// that stood still: then a look is needed most.
const REST_NS: u64 = 60_000_000_000;
/// Places that are nearer to each other are read as one.
const NEAR_BYTES: u64 = 64 << 10;
/// Groups of a session after which its first one may have been written over: a ring is at least eight groups long.
const FIRST_GROUPS: u64 = 6;

/// How each text begins that says so.
const TOLD: &str = "the store is written from elsewhere, too";
/// What to do about it.
const WAY_OUT: &str = "What both have written may have destroyed blocks of either. End one of them, and see that the disk \
                       cannot be reached from there; do not start this one again before. Then run `dbs check` and \
                       `dbs scrub`; `dbs repair` mends metadata that is damaged";
/// The same for who opens the store and has written nothing.
const WAY_OUT_OPENING: &str =
    "Nothing was changed here. End the process there, or let it close the store";
/// What is said of it once if a place cannot be read.
const BLIND: &str = "whether another machine writes the store can be looked for only in part, and once a minute, as a \
                     block of the superblock or of the journal cannot be read";

/// What is remembered of the last look.
pub(super) struct Looks(Mutex<Seen>);

/// A group's first block in the ring, and its sequence.
type Place = (u32, u64);

#[derive(Default)]
struct Seen {
    /// The last group of the session before.
    before: u64,
    /// This session's last group.
    own: Option<Place>,
    /// Its first one, while no later one can have been written over it.
    first: Option<Place>,
    /// The first one since the last look.
    unproven: Option<Place>,
    /// The block behind the last group of all.
    behind: u32,
    /// When a group was begun, before which this had looked.
    begun_ns: Option<u64>,
    looked_ns: u64,
    at_commits: Trouble,
    /// A path to the disk may be lost for a while. Commits do not go by that.
    while_idle: Trouble,
    has_warned: bool,
}

/// Looks that did not go well.
#[derive(Clone, Copy, Default)]
struct Trouble {
    /// The last one.
    last: bool,
    /// When the last of two in a row ended.
    rests_ns: Option<u64>,
}

impl Trouble {
    fn rests(self, now: u64) -> bool {
        let since = self.rests_ns.and_then(|rests| now.checked_sub(rests));
        since.is_some_and(|since| since < REST_NS)
    }

    fn note(&mut self, well: bool, now: u64) {
        *self = Self { last: !well, rests_ns: (!well && self.last).then_some(now) };
    }
}

/// What a look has found.
struct Found {
    sign: Option<Sign>,
    /// Why a place could not be read.
    failed: Option<io::Error>,
}

impl Looks {
    /// Of a session that has not begun: its first group comes after group `before`, at `behind` or at the ring's start.
    pub(super) fn new(before: u64, behind: u32) -> Self {
        Self(Mutex::new(Seen { before, behind, ..Seen::default() }))
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A sign of another writer.
struct Sign {
    what: String,
    boot: Option<[u8; 16]>,
}

/// What is looked for in the journal.
struct Wanted {
    ring: Region,
    store: [u8; 16],
    session: u64,
    /// Places, the lowest sequence that is a sign there, and whether a part of a group is one.
    places: Vec<(u32, u64, bool)>,
}

impl Inner {
    /// Before a group is written: makes sure that nobody else has written one. The caller has the turn at commits. When
    /// this has looked, for [`Inner::note_group`].
    ///
    /// # Errors
    /// `Elsewhere`.
    pub(super) fn look_elsewhere(&self) -> Result<Option<u64>> {
        if !self.storage.may_be_shared() {
            return Ok(None);
        }
        let now = self.env.now_ns();
        let seen = self.looks.seen();
        // A clock that was put back says nothing.
        let since = seen.begun_ns.map(|begun| now.checked_sub(begun));
        if matches!(since, Some(Some(0..TRUST_NS))) || seen.at_commits.rests(now) {
            return Ok(None);
        }
        drop(seen);
        let looked = self.look_now(now, |seen| &mut seen.at_commits);
        looked.map_err(|sign| self.stopped(&sign))?;
        Ok(Some(now))
    }

    /// This group is durable. It was begun after a look, if there was one for it.
    pub(super) fn note_group(&self, group: &Group, looked: Option<u64>) {
        let (place, blocks) = group.place();
        let own = (place, group.sequence());
        let mut seen = self.looks.seen();
        if seen.own.is_none() {
            seen.first = Some(own);
        }
        seen.first = seen.first.filter(|(_, first)| group.sequence() - first < FIRST_GROUPS);
        seen.unproven.get_or_insert(own);
        seen.own = Some(own);
        seen.behind = place + blocks;
        seen.begun_ns = looked.or(seen.begun_ns);
    }

    /// Looks while there is nothing to commit, if that was not just done.
    ///
    /// # Errors
    /// `Elsewhere`.
    pub(super) fn look_while_idle(&self) -> Result<()> {
        // A file is reached by one kernel, but for shared file systems: there it costs requests.
        if !self.storage.may_be_shared() || self.storage.resizable() {
            return Ok(());
        }
        let now = self.env.now_ns();
        let seen = self.looks.seen();
        let since = now.checked_sub(seen.looked_ns);
        if since.is_some_and(|since| since < IDLE_NS) || seen.while_idle.rests(now) {
            return Ok(());
        }
        drop(seen);
        // Who has closed the store meanwhile has given it away.
        let look = || match self.poison.get() {
            Some(_) => Ok(()),
            None => self.look_now(now, |seen| &mut seen.while_idle),
        };
        self.without_commits(look).map_err(|sign| self.poison_by(self.stopped(&sign)))
    }

    /// Whoever wrote the store last may still do so, on another machine: waits for a sign of it. Nothing was written yet.
    /// Whether that one is to be given time to notice this session ([`Inner::let_notice`]).
    ///
    /// # Errors
    /// `Elsewhere`.
    pub(super) fn watch_elsewhere(&self, last: Option<&LastSession>) -> Result<bool> {
        if !self.storage.may_be_shared() {
            return Ok(false);
        }
        // Of this boot, the locks have told. A store that was closed has nobody who writes it.
        let boot = self.meta().boot;
        let unknown = [0; 16];
        let elsewhere = last.is_some_and(|last| last.boot != boot || boot == unknown);
        let is_device = !self.storage.resizable();
        if elsewhere {
            self.env.pause(if is_device { PATIENCE } else { FILE_PATIENCE });
        }
        let looked = self.look_now(self.env.now_ns(), |seen| &mut seen.at_commits);
        looked.map_err(|sign| {
            let text = format!("{}. {WAY_OUT_OPENING}", self.tell(&sign));
            Error::new(ErrorKind::Elsewhere, text)
        })?;
        Ok(elsewhere && is_device)
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
    /// `Elsewhere`.
    pub(super) fn look_begun(&self) -> Result<()> {
        if !self.storage.may_be_shared() {
            return Ok(());
        }
        self.looks.seen().begun_ns = None;
        let looked = self.look_now(self.env.now_ns(), |seen| &mut seen.at_commits);
        looked.map_err(|sign| self.stopped(&sign))
    }

    /// Before a command changes no more than the superblock: makes sure that nobody else writes the store. Who does may
    /// have left the superblock alone, and would stop for the change.
    ///
    /// # Errors
    /// `Elsewhere`, which stops all writing.
    pub(super) fn look_for_command(&self) -> Result<()> {
        let now = self.env.now_ns();
        if !self.storage.may_be_shared() || self.looks.seen().at_commits.rests(now) {
            return Ok(());
        }
        let look = || match self.check_sound() {
            Ok(()) => self.look_now(now, |seen| &mut seen.at_commits),
            Err(_) => Ok(()),
        };
        self.without_commits(look).map_err(|sign| self.poison_by(self.stopped(&sign)))?;
        self.check_sound()
    }

    /// Once a group is durable whose writing began at this time: a machine or a path that stood still meanwhile may have been
    /// taken for one that is gone.
    ///
    /// # Errors
    /// `Elsewhere`.
    pub(super) fn look_after(&self, begun: Option<u64>) -> Result<()> {
        let took = begun.and_then(|begun| self.env.now_ns().checked_sub(begun));
        if took.is_some_and(|took| took > SLOW_NS) { self.look_begun() } else { Ok(()) }
    }

    /// Before the superblock is changed from what is known of it: makes sure that it is what is there.
    ///
    /// # Errors
    /// `Elsewhere`, which stops all writing.
    pub(super) fn check_superblock(&self, known: &Superblock) -> Result<()> {
        if !self.storage.may_be_shared() {
            return Ok(());
        }
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        if self.storage.read_at(0, &mut block).is_err() {
            return Ok(());
        }
        sign_in_superblock(&block, known)
            .map_or(Ok(()), |sign| Err(self.poison_by(self.stopped(&sign))))
    }

    /// `of`: whose looks this is one of.
    fn look_now(
        &self,
        now: u64,
        of: impl Fn(&mut Seen) -> &mut Trouble,
    ) -> std::result::Result<(), Sign> {
        let Found { sign, failed } = self.find_sign();
        let ended = self.env.now_ns();
        let in_time = ended.checked_sub(now).is_none_or(|took| took <= SLOW_NS);
        let mut seen = self.looks.seen();
        seen.looked_ns = now;
        of(&mut seen).note(failed.is_none() && in_time, ended);
        match failed {
            None => seen.unproven = None,
            Some(why) if !std::mem::replace(&mut seen.has_warned, true) => {
                drop(seen);
                self.warn(format!("{BLIND}: {why}"));
            }
            Some(_) => {}
        }
        sign.map_or(Ok(()), Err)
    }

    fn tell(&self, sign: &Sign) -> String {
        let here = self.meta().boot;
        let whose = match sign.boot {
            // Not known.
            Some(boot) if boot == [0; 16] => String::new(),
            Some(boot) if boot == here => " of this machine, perhaps in a container".to_owned(),
            Some(boot) => format!(" of the machine whose boot id is {}", uuid_text(&boot)),
            None => String::new(),
        };
        format!("{TOLD}: {}{whose}", sign.what)
    }

    fn stopped(&self, sign: &Sign) -> Error {
        let (told, own) = (self.tell(sign), self.meta().log.session);
        let here = uuid_text(&self.meta().boot);
        let text = format!("{told}. This is session {own:016x}, boot id {here}. {WAY_OUT}");
        Error::new(ErrorKind::Elsewhere, text)
    }

    fn find_sign(&self) -> Found {
        let wanted = self.wanted();
        let addresses = wanted.places.iter().map(|(place, ..)| address(wanted.ring, *place));
        let addresses: Vec<u64> = std::iter::once(0).chain(addresses).collect();
        // Nobody here changes it meanwhile.
        let known = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        let (blocks, failed) = self.read_each(&addresses);
        let Some((superblock, blocks)) = blocks.split_first() else {
            return Found { sign: None, failed };
        };
        let sign = superblock.as_ref().and_then(|block| sign_in_superblock(block, &known));
        drop(known);
        let mut found = wanted.places.iter().zip(blocks);
        let sign = sign
            .or_else(|| found.find_map(|(at, block)| self.sign_at(&wanted, *at, block.as_ref()?)));
        Found { sign, failed }
    }

    /// Reads these blocks at once; those that can be read, and why others cannot. None of them if that has taken long:
    /// one by one it would take as long again.
    fn read_each(&self, addresses: &[u64]) -> (Vec<Option<AlignedBuf>>, Option<io::Error>) {
        let parts = parts(addresses);
        let buf = |part: &Range<u64>| AlignedBuf::zeroed((part.end - part.start) as usize);
        let mut bufs: Vec<AlignedBuf> = parts.iter().map(buf).collect();
        let all = parts.iter().zip(&mut bufs);
        let mut requests: Vec<_> =
            all.map(|(part, buf)| ReadRequest { offset: part.start, buf: &mut buf[..] }).collect();
        let begun = self.env.now_ns();
        let read = self.storage.read_many(&mut requests);
        if read.is_err() && self.env.now_ns().saturating_sub(begun) > SLOW_NS {
            return (Vec::new(), read.err());
        }
        let block = |at: &u64| {
            let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
            if read.is_err() {
                return self.storage.read_at(*at, &mut block).is_ok().then_some(block);
            }
            let (part, buf) = parts.iter().zip(&bufs).find(|(part, _)| part.contains(at))?;
            let from = (at - part.start) as usize;
            block.copy_from_slice(buf.get(from..from + BLOCK_BYTES as usize)?);
            Some(block)
        };
        let blocks: Vec<_> = addresses.iter().map(block).collect();
        // What cannot be read may lie between them.
        let all_there = blocks.iter().all(Option::is_some);
        (blocks, read.err().filter(|_| !all_there))
    }

    /// Where a group of another session would show.
    fn wanted(&self) -> Wanted {
        let meta = self.meta();
        let (ring, store) = (meta.geometry.region(RegionKind::Journal), meta.uuid);
        let seen = self.looks.seen();
        // A crash may have left parts of the group that the session's first one has replaced, and of none later: who opens
        // a store refuses a journal with any block of a sequence two above the newest group (`meta/load/journal.rs`).
        let least = seen.before + if seen.own.is_some() { 2 } else { 1 };
        // Over an own group it has left nothing.
        let own = [seen.own, seen.first, seen.unproven].into_iter().flatten();
        let mut places: Vec<_> = own.map(|(place, sequence)| (place, sequence, true)).collect();
        places.extend([0, seen.behind].map(|place| (place, least, false)));
        places.retain(|(place, ..)| u64::from(*place) * BLOCK_BYTES < ring.length);
        places.dedup();
        Wanted { ring, store, session: meta.log.session, places }
    }

    fn sign_at(
        &self,
        wanted: &Wanted,
        (place, least, parts): (u32, u64, bool),
        block: &AlignedBuf,
    ) -> Option<Sign> {
        let Wanted { ring, store, session, .. } = wanted;
        let found = Trace::of(block, *ring, store, place)?;
        if found.session == *session || found.sequence < least {
            return None;
        }
        let group = found.group(&*self.storage, *ring, store);
        if group.is_none() && found.index == 0 && !parts {
            return None;
        }
        let boot = group.and_then(|group| match Record::decode(&mut &group.payload[..]) {
            Some(Record::Checkpoint { boot, .. }) => Some(boot),
            _ => None,
        });
        let Trace { sequence, session, .. } = found;
        let what = format!("group {sequence} of the journal is of session {session:016x}");
        Some(Sign { what, boot })
    }
}

/// What to read for these blocks: the first one, which is the superblock's, and those in the journal, neighbours as one.
/// Without io_uring each read is waited for before the next.
fn parts(addresses: &[u64]) -> Vec<Range<u64>> {
    let mut sorted = addresses.to_vec();
    sorted.sort_unstable();
    let mut parts: Vec<Range<u64>> = Vec::new();
    for at in sorted {
        match parts.get_mut(1..).and_then(<[_]>::last_mut) {
            Some(part) if at < part.end + NEAR_BYTES => part.end = part.end.max(at + BLOCK_BYTES),
            _ => parts.push(at..at + BLOCK_BYTES),
        }
    }
    parts
}

fn address(ring: Region, place: u32) -> u64 {
    ring.offset + u64::from(place) * BLOCK_BYTES
}

/// A change of the superblock that is not of this process.
fn sign_in_superblock(block: &[u8], known: &Superblock) -> Option<Sign> {
    let found = Superblock::decode(block, 0).ok()?;
    if found.uuid != known.uuid {
        let what = format!("there is another store now, {}", uuid_text(&found.uuid));
        return Some(Sign { what, boot: None });
    }
    let is_newer = found.sequence > known.sequence;
    let differs = found.sequence == known.sequence && found != *known;
    let what = "another process has changed the superblock".to_owned();
    (is_newer || differs).then_some(Sign { what, boot: None })
}

/// What is said of it to who opens the store.
pub(super) fn opening(error: Error) -> Error {
    let text = error.to_string();
    if is_written_elsewhere(&text) { Error::new(ErrorKind::Elsewhere, text) } else { error }
}

/// Whether this is why a store takes no more writes: then opening it again is no way out.
#[must_use]
pub fn is_written_elsewhere(why: &str) -> bool {
    why.starts_with(TOLD)
}
