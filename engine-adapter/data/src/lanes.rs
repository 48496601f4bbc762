//! Connections that a client makes anew when they break, and what was done on those that broke.
//!
//! A controller sends again what it has no answer to. So nothing of the former connections may run any more, or
//! come from them later: an old write would undo a newer one. And what was done is not done again: a change is
//! counted once. Both hold within one session of one process; after it, nothing is known of its lanes.

use longhorn_wire::frame::{Lane as Name, PLACE_BITS, Standing};
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Most lanes that are remembered: four clients with as many reactors as there may be.
const LANES_MAX: usize = 256;
/// How long one is kept without a connection, at least: no controller waits longer for a replica that is away.
const KEPT: Duration = Duration::from_secs(30);
/// Most places of a lane.
const PLACES_MAX: u16 = 1 << PLACE_BITS;
/// In what is noted of a change: there is one.
const DONE: u64 = 1 << 63;
/// And it was an unmap.
const UNMAP: u64 = 1 << 62;

/// The lanes of a replica's session, the oldest first.
#[derive(Default)]
pub(crate) struct Lanes(Mutex<Vec<Arc<Lane>>>);

/// One of them.
struct Lane {
    name: Name,
    /// The session of the replica that it is of.
    session: u64,
    state: Mutex<State>,
    /// By their places, from the first change on: anybody may say hello.
    done: OnceLock<Box<[Done]>>,
}

#[derive(Default)]
struct State {
    epoch: u32,
    /// Connections of this epoch.
    connections: usize,
    /// Those of earlier ones that are not over: requests of them may run.
    former: usize,
    /// Since when there are none of either.
    idle_since: Option<Instant>,
    /// What came on one of them was not what a client sends: nothing that the client believes to have asked
    /// for is certain.
    distrusted: bool,
}

/// The last change that was done in a place.
#[derive(Default)]
struct Done {
    sequence: AtomicU32,
    size: AtomicU32,
    /// Where, and what.
    range: AtomicU64,
}

/// A change, as a client says it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub sequence: u32,
    /// An unmap, or a write.
    pub unmap: bool,
    pub offset: i64,
    pub size: u32,
}

/// What is known of a change that is sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It was done, about so many bytes.
    Done(u32),
    /// Another one was done under its number.
    Otherwise,
    /// It was not done.
    Never,
}

/// A connection's part in a lane, until nothing of the connection runs any more.
pub struct Ticket {
    lane: Arc<Lane>,
    epoch: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic leaves it inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Change {
    /// Its place among those that are noted.
    fn place<'a>(&self, done: &'a [Done]) -> Option<&'a Done> {
        done.get((self.sequence & ((1 << PLACE_BITS) - 1)) as usize)
    }

    /// What is noted of its range: another one if its offset is another, or its length.
    fn range(&self) -> u64 {
        let unmap = if self.unmap { UNMAP } else { 0 };
        let range = self.offset.cast_unsigned() ^ u64::from(self.size) << 30;
        range & (UNMAP - 1) | DONE | unmap
    }
}

impl Lanes {
    /// Lets a connection, accepted in this session, into a lane; `None` if there are too many lanes.
    pub fn enter(&self, name: Name, session: u64) -> (Option<Standing>, Option<Ticket>) {
        self.enter_at(Instant::now(), name, session)
    }

    fn enter_at(
        &self,
        now: Instant,
        name: Name,
        session: u64,
    ) -> (Option<Standing>, Option<Ticket>) {
        let mut all = lock(&self.0);
        let same =
            |lane: &&Arc<Lane>| (lane.name.client, lane.name.number) == (name.client, name.number);
        let known = all.iter().find(same).cloned();
        let lane = match known {
            Some(lane) => lane,
            None if name.epoch > 0 => return (Some(Standing::Unknown), None),
            None => {
                if all.len() >= LANES_MAX {
                    let is_old = |lane: &Arc<Lane>| lock(&lane.state).is_old(now);
                    let Some(idle) = all.iter().position(is_old) else { return (None, None) };
                    all.remove(idle);
                }
                all.push(Arc::new(Lane::new(name, session)));
                match all.last() {
                    Some(lane) => Arc::clone(lane),
                    None => return (None, None),
                }
            }
        };
        if lane.session != session {
            return (Some(Standing::Unknown), None);
        }
        let mut state = lock(&lane.state);
        if name.epoch < state.epoch || state.distrusted {
            return (Some(Standing::Unknown), None);
        }
        if name.epoch > state.epoch {
            state.epoch = name.epoch;
            state.former += std::mem::take(&mut state.connections);
        }
        state.connections += 1;
        state.idle_since = None;
        drop(state);
        let ticket = Ticket { lane, epoch: name.epoch };
        (Some(ticket.standing(name)), Some(ticket))
    }

    /// The session is over.
    pub fn forget(&self) {
        lock(&self.0).clear();
    }
}

impl State {
    /// Whether nobody who knows it may still come back.
    fn is_old(&self, now: Instant) -> bool {
        self.idle_since.is_some_and(|since| now.saturating_duration_since(since) > KEPT)
    }
}

impl Lane {
    fn new(name: Name, session: u64) -> Self {
        Self { name, session, state: Mutex::default(), done: OnceLock::new() }
    }

    fn places(&self) -> Box<[Done]> {
        (0..self.name.places.min(PLACES_MAX)).map(|_| Done::default()).collect()
    }
}

impl Ticket {
    /// What a hello is answered that names this lane once more.
    pub(crate) fn standing(&self, name: Name) -> Standing {
        let Lane { name: Name { client, number, .. }, .. } = *self.lane;
        let state = lock(&self.lane.state);
        let own = (name.client, name.number, name.epoch) == (client, number, self.epoch);
        match state.former {
            _ if !own || state.epoch != self.epoch || state.distrusted => Standing::Unknown,
            0 => Standing::Ready,
            _ => Standing::Busy,
        }
    }

    /// Whether there is a newer connection, for which this one is to end.
    pub(crate) fn is_former(&self) -> bool {
        lock(&self.lane.state).epoch != self.epoch
    }

    /// What has come on the connection cannot be what was sent.
    pub(crate) fn distrust(&self) {
        lock(&self.lane.state).distrusted = true;
    }

    /// A change is about to be answered: it is done, about so many bytes, or not done. Who reads that has locked
    /// since: the connections of the last epoch are over then.
    #[inline]
    pub(crate) fn note(&self, change: &Change, size: Option<u32>) {
        let all = self.lane.done.get_or_init(|| self.lane.places());
        let Some(done) = change.place(all) else { return };
        done.sequence.store(change.sequence, Ordering::Relaxed);
        done.size.store(size.unwrap_or(0), Ordering::Relaxed);
        let range = if size.is_some() { change.range() } else { 0 };
        done.range.store(range, Ordering::Relaxed);
    }

    /// What became of a change that is sent again.
    pub(crate) fn look_up(&self, change: &Change) -> Sent {
        let all = self.lane.done.get().map_or(&[][..], |all| all);
        let Some(done) = change.place(all) else { return Sent::Never };
        let (noted, size) = (done.range.load(Ordering::Relaxed), done.size.load(Ordering::Relaxed));
        if noted & DONE == 0 || done.sequence.load(Ordering::Relaxed) != change.sequence {
            return Sent::Never;
        }
        if noted == change.range() { Sent::Done(size) } else { Sent::Otherwise }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lane { name: Name { number, .. }, .. } = *self.lane;
        f.debug_struct("Ticket").field("lane", &number).field("epoch", &self.epoch).finish()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = lock(&self.lane.state);
        let State { epoch, connections, former, idle_since, .. } = &mut *state;
        let count = if *epoch == self.epoch { &mut *connections } else { &mut *former };
        *count -= 1;
        if *connections + *former == 0 {
            *idle_since = Some(Instant::now());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn name(client: u64, epoch: u32) -> Name {
        Name { client, epoch, number: 3, places: 8 }
    }

    fn enter(lanes: &Lanes, client: u64, epoch: u32) -> (Standing, Option<Ticket>) {
        let (standing, ticket) = lanes.enter(name(client, epoch), 1);
        (standing.unwrap(), ticket)
    }

    #[test]
    fn a_newer_connection_waits_for_the_end_of_the_older_ones() {
        let lanes = Lanes::default();
        let (standing, one) = enter(&lanes, 7, 0);
        let (_, two) = enter(&lanes, 7, 0);
        assert_eq!(standing, Standing::Ready);
        let (standing, newer) = enter(&lanes, 7, 1);
        let (one, two, newer) = (one.unwrap(), two.unwrap(), newer.unwrap());
        assert_eq!(standing, Standing::Busy);
        assert!(one.is_former() && two.is_former() && !newer.is_former());
        drop(one);
        assert_eq!(newer.standing(name(7, 1)), Standing::Busy);
        drop(two);
        assert_eq!(newer.standing(name(7, 1)), Standing::Ready);
        // Of another client, of a lane that nobody knows, and one that comes too late.
        assert_eq!(newer.standing(name(8, 1)), Standing::Unknown);
        assert_eq!(enter(&lanes, 8, 1).0, Standing::Unknown);
        assert_eq!(enter(&lanes, 7, 0).0, Standing::Unknown);
        // It outlives its connections, but not what cannot have been sent.
        drop(newer);
        let (standing, again) = enter(&lanes, 7, 2);
        assert_eq!(standing, Standing::Ready);
        again.unwrap().distrust();
        assert_eq!(enter(&lanes, 7, 3).0, Standing::Unknown);
    }

    #[test]
    fn a_lane_ends_with_its_session() {
        let lanes = Lanes::default();
        let (_, _ticket) = enter(&lanes, 7, 0);
        // Closed since, whether that has been seen to or not.
        assert_eq!(lanes.enter(name(7, 1), 2).0, Some(Standing::Unknown));
        lanes.forget();
        assert_eq!(enter(&lanes, 7, 1).0, Standing::Unknown);
    }

    #[test]
    fn the_last_change_of_each_place_is_known() {
        let lanes = Lanes::default();
        let (_, ticket) = enter(&lanes, 7, 0);
        let ticket = ticket.unwrap();
        let write = |uses: u32, offset, size| Change {
            sequence: uses << PLACE_BITS | 5,
            unmap: false,
            offset,
            size,
        };
        assert_eq!(ticket.look_up(&write(1, 0, 512)), Sent::Never);
        ticket.note(&write(1, 0, 512), Some(512));
        assert_eq!(ticket.look_up(&write(1, 0, 512)), Sent::Done(512));
        assert_eq!(ticket.look_up(&write(2, 0, 512)), Sent::Never);
        for other in [write(1, 512, 512), write(1, 0, 1024)] {
            assert_eq!(ticket.look_up(&other), Sent::Otherwise);
        }
        let unmap = Change { unmap: true, ..write(1, 0, 512) };
        assert_eq!(ticket.look_up(&unmap), Sent::Otherwise);
        ticket.note(&unmap, Some(9));
        assert_eq!(ticket.look_up(&unmap), Sent::Done(9));
        // What is noted beside the range is what was freed.
        for other in [Change { size: 9, ..unmap }, Change { offset: 512, ..unmap }] {
            assert_eq!(ticket.look_up(&other), Sent::Otherwise);
        }
        ticket.note(&write(2, 0, 512), None);
        assert_eq!(ticket.look_up(&write(2, 0, 512)), Sent::Never);
        assert_eq!(ticket.look_up(&unmap), Sent::Never);
        // A place that it was not said to have.
        let beyond = Change { sequence: 1 << PLACE_BITS | 8, ..write(1, 0, 512) };
        ticket.note(&beyond, Some(512));
        assert_eq!(ticket.look_up(&beyond), Sent::Never);
    }

    #[test]
    fn there_are_only_so_many() {
        let lanes = Lanes::default();
        let tickets: Vec<_> =
            (1..=LANES_MAX as u64).map(|client| enter(&lanes, client, 0).1.unwrap()).collect();
        let later = Instant::now() + 1000 * KEPT;
        assert!(lanes.enter_at(later, name(1000, 0), 1).0.is_none());
        drop(tickets);
        let later = Instant::now() + 2 * KEPT;
        assert_eq!(lanes.enter_at(later, name(1000, 0), 1).0, Some(Standing::Ready));
        assert_eq!(enter(&lanes, 1, 1).0, Standing::Unknown);
        assert_eq!(enter(&lanes, 2, 1).0, Standing::Ready);
    }

    /// Found by review: whoever reached the port pushed out the lane of a controller that was about to come back.
    #[test]
    fn hellos_of_others_push_nobody_out_who_may_come_back() {
        let lanes = Lanes::default();
        drop(enter(&lanes, 1, 0));
        let since = lock(&lock(&lanes.0)[0].state).idle_since.unwrap();
        for client in 2..3 * LANES_MAX as u64 {
            let (standing, _) = lanes.enter_at(since + KEPT, name(client, 0), 1);
            assert_eq!(standing.is_some(), client <= LANES_MAX as u64, "{client}");
        }
        assert!(lock(&lanes.0).iter().all(|lane| lane.done.get().is_none()));
        let (standing, ticket) = enter(&lanes, 1, 1);
        assert_eq!(standing, Standing::Ready);
        // It is not old again at once.
        drop(ticket);
        assert!(lock(&lock(&lanes.0)[0].state).idle_since.unwrap() >= since);
    }
}
