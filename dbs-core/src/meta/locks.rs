//! Order among running operations: range locks for writers, and a fence for everything that may
//! still touch an extent. Requests take both beside one another, in lanes.

use super::lanes::{self, LANES, Lane};
use crate::sabotage::{self, Bug};
use crate::units::VolumeId;
use std::collections::VecDeque;
use std::ops::Range;

/// What blocks are held of. A volume's head and its snapshots are apart, so that work on the layers
/// of snapshots keeps no writer waiting. Whoever needs both takes the head's first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// The head of a volume.
    Head(VolumeId),
    /// All its snapshots.
    Snapshots(VolumeId),
}

impl Space {
    fn lane(self) -> usize {
        let (Self::Head(volume) | Self::Snapshots(volume)) = self;
        volume.index() % LANES
    }
}

/// Range locks, first come first served. Whole-block writes share; everything whose outcome
/// depends on what is there (partial-block writes, discards, merges, snapshots) excludes.
///
/// All those of a volume are in one lane.
#[derive(Debug)]
pub struct RangeLocks {
    lanes: Box<[Lane<Holds>]>,
}

/// The holds of a lane. Thousands of writes may be in flight, of which few exclude: one that shares
/// looks at those only.
#[derive(Debug, Default)]
struct Holds {
    holds: Vec<Option<Hold>>,
    /// Free places in `holds`.
    free: Vec<usize>,
    /// Places of the holds that exclude.
    exclusive: Vec<usize>,
    /// Order of the next hold.
    next: u64,
    /// Requests that asked.
    requests: u64,
}

/// A place in the queue, until released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldId {
    lane: usize,
    place: usize,
}

/// One operation's hold on blocks of a volume.
#[derive(Debug, Clone)]
struct Hold {
    order: u64,
    space: Space,
    blocks: Range<u64>,
    exclusive: bool,
}

impl Hold {
    fn overlaps(&self, space: Space, blocks: &Range<u64>) -> bool {
        self.space == space && self.blocks.start < blocks.end && blocks.start < self.blocks.end
    }
}

impl Holds {
    fn queue(&mut self, space: Space, blocks: Range<u64>, exclusive: bool) -> usize {
        let hold = Some(Hold { order: self.next, space, blocks, exclusive });
        self.next += 1;
        let place = match self.free.pop() {
            Some(place) => {
                self.holds[place] = hold;
                place
            }
            None => {
                self.holds.push(hold);
                self.holds.len() - 1
            }
        };
        if exclusive {
            self.exclusive.push(place);
        }
        place
    }

    fn granted(&self, place: usize) -> bool {
        let Some(mine) = &self.holds[place] else { return false };
        let conflicts =
            |hold: &Hold| hold.order < mine.order && hold.overlaps(mine.space, &mine.blocks);
        if mine.exclusive {
            !self.holds.iter().flatten().any(conflicts)
        } else {
            !self.exclusive.iter().filter_map(|place| self.holds[*place].as_ref()).any(conflicts)
        }
    }
}

impl Default for RangeLocks {
    fn default() -> Self {
        Self { lanes: Lane::all() }
    }
}

impl RangeLocks {
    /// Queues for blocks; granted when [`RangeLocks::granted`] says so.
    pub fn queue(&self, space: Space, blocks: Range<u64>, exclusive: bool) -> HoldId {
        let lane = space.lane();
        HoldId { lane, place: self.lanes[lane].lock().queue(space, blocks, exclusive) }
    }

    /// Holds blocks for a request that shares them, if none holds them or waits for them that excludes.
    #[inline]
    pub fn try_share(&self, space: Space, blocks: Range<u64>) -> Option<HoldId> {
        let lane = space.lane();
        let mut holds = self.lanes[lane].lock();
        holds.requests += 1;
        let overlaps = |place: &usize| {
            holds.holds[*place].as_ref().is_some_and(|hold| hold.overlaps(space, &blocks))
        };
        if holds.exclusive.iter().any(overlaps) && !sabotage::is(Bug::WriteBesideHolds) {
            return None;
        }
        Some(HoldId { lane, place: holds.queue(space, blocks, false) })
    }

    /// Whether no older operation conflicts.
    pub fn granted(&self, id: HoldId) -> bool {
        self.lanes[id.lane].lock().granted(id.place)
    }

    /// Whether at most one operation holds or awaits any of these blocks.
    pub fn sole(&self, space: Space, blocks: &Range<u64>) -> bool {
        let holds = self.lanes[space.lane()].lock();
        let overlapping = holds.holds.iter().flatten().filter(|hold| hold.overlaps(space, blocks));
        overlapping.take(2).count() <= 1
    }

    /// Gives a hold back, or leaves the queue.
    pub fn release(&self, id: HoldId) {
        let mut holds = self.lanes[id.lane].lock();
        let Some(hold) = holds.holds[id.place].take() else { return };
        holds.free.push(id.place);
        if hold.exclusive {
            holds.exclusive.retain(|place| *place != id.place);
        }
    }

    /// Requests that asked for blocks to share.
    pub fn requests(&mut self) -> u64 {
        self.lanes.iter_mut().map(|lane| lane.get_mut().requests).sum()
    }
}

/// Knows which reads still run that began before something changed.
///
/// A change draws a number, and a read has the number that was drawn last when it was planned. A change
/// is made by whoever has the state alone, a read planned by whoever shares it. So a read with a lower
/// number was planned before the change, and one with the same or a higher number after it.
#[derive(Debug)]
pub struct Fence {
    /// The number drawn last.
    drawn: u64,
    lanes: Box<[Lane<Running>]>,
}

/// Reads of a lane that run: their number, ascending, and how many they are.
#[derive(Debug, Default)]
struct Running {
    reads: VecDeque<(u64, u32)>,
    /// Requests that asked.
    requests: u64,
}

/// A read that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FenceId {
    /// The fence's number when it was planned.
    pub number: u64,
    lane: usize,
}

impl Running {
    fn begin(&mut self, number: u64) {
        match self.reads.back_mut() {
            Some((last, count)) if *last == number => *count += 1,
            _ => self.reads.push_back((number, 1)),
        }
    }
}

impl Default for Fence {
    fn default() -> Self {
        Self { drawn: 0, lanes: Lane::all() }
    }
}

impl Fence {
    /// Begins a read.
    pub fn begin(&self) -> FenceId {
        self.lanes[0].lock().begin(self.drawn);
        FenceId { number: self.drawn, lane: 0 }
    }

    /// Counts a request to read, and begins the read if `any` of it is on the device.
    #[inline]
    pub fn begin_request(&self, any: bool) -> Option<FenceId> {
        let lane = lanes::of_thread();
        let mut running = self.lanes[lane].lock();
        running.requests += 1;
        if any && !sabotage::is(Bug::ReadOutsideFence) {
            running.begin(self.drawn);
        }
        any.then_some(FenceId { number: self.drawn, lane })
    }

    /// Ends one.
    #[inline]
    pub fn end(&self, id: FenceId) {
        let mut running = self.lanes[id.lane].lock();
        // While one read takes long, there may be as many numbers behind its own as changes were made.
        if let Ok(at) = running.reads.binary_search_by_key(&id.number, |read| read.0) {
            running.reads[at].1 -= 1;
        }
        while running.reads.front().is_some_and(|read| read.1 == 0) {
            running.reads.pop_front();
        }
    }

    /// Draws a number: reads that have a lower one were planned before.
    pub fn next(&mut self) -> u64 {
        self.drawn += 1;
        self.drawn
    }

    /// The lowest number of those that run; if there are none, the one that the next has.
    pub fn oldest(&mut self) -> u64 {
        let drawn = self.drawn;
        let first = |lane: &mut Lane<Running>| lane.get_mut().reads.front().map(|read| read.0);
        self.lanes.iter_mut().filter_map(first).min().unwrap_or(drawn)
    }

    /// Whether none runs.
    pub fn is_idle(&mut self) -> bool {
        self.lanes.iter_mut().all(|lane| lane.get_mut().reads.is_empty())
    }

    /// Requests that asked.
    pub fn requests(&mut self) -> u64 {
        self.lanes.iter_mut().map(|lane| lane.get_mut().requests).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_share_and_others_wait_in_order() {
        let locks = RangeLocks::default();
        let (one, two) = (Space::Head(VolumeId(1)), Space::Head(VolumeId(2)));
        let first = locks.queue(one, 0..8, false);
        let second = locks.queue(one, 4..12, false);
        let exclusive = locks.queue(one, 7..9, true);
        let behind = locks.queue(one, 8..9, false);
        let elsewhere = locks.queue(two, 0..100, true);
        assert!(locks.granted(first) && locks.granted(second) && locks.granted(elsewhere));
        assert!(!locks.granted(exclusive) && !locks.granted(behind));
        locks.release(first);
        locks.release(second);
        assert!(locks.granted(exclusive) && !locks.granted(behind));
        locks.release(exclusive);
        assert!(locks.granted(behind));
        // A place that was given back says nothing of the order.
        let late = locks.queue(one, 0..9, true);
        assert!(!locks.granted(late) && !locks.sole(one, &(8..9)));
        locks.release(behind);
        assert!(locks.granted(late) && locks.sole(one, &(8..9)));
        let below = locks.queue(Space::Snapshots(VolumeId(1)), 0..9, true);
        assert!(locks.granted(below), "snapshots are apart from their head");
    }

    #[test]
    fn a_shared_hold_waits_for_none_and_takes_no_place_that_excludes() {
        let mut locks = RangeLocks::default();
        let space = Space::Head(VolumeId(1));
        let shared = locks.try_share(space, 0..8).unwrap();
        let exclusive = locks.queue(space, 4..5, true);
        assert!(!locks.granted(exclusive) && locks.try_share(space, 3..5).is_none());
        // In the same lane, but another volume.
        let other = Space::Head(VolumeId(1 + LANES as u32));
        let beside = [locks.try_share(space, 5..9), locks.try_share(other, 0..9)];
        locks.release(shared);
        assert!(locks.granted(exclusive) && beside.iter().all(Option::is_some));
        locks.release(exclusive);
        assert!(locks.try_share(space, 3..5).is_some());
        assert_eq!(locks.requests(), 5);
    }

    #[test]
    fn the_fence_is_the_oldest_running() {
        let mut fence = Fence::default();
        let a = fence.begin_request(true).unwrap();
        let change = fence.next();
        let (b, c) = (fence.begin(), fence.begin_request(true).unwrap());
        assert!(a.number < change && b.number == change && c.number == change);
        assert!(fence.oldest() < change);
        fence.end(c);
        fence.end(a);
        assert!(fence.oldest() == change && !fence.is_idle());
        let later = fence.next();
        assert_eq!((fence.oldest(), fence.begin_request(false)), (change, None));
        fence.end(b);
        assert!(fence.oldest() == later && fence.is_idle());
        assert_eq!(fence.requests(), 3);
    }
}
