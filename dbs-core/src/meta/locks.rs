//! Order among running operations: range locks for writers, and a fence for everything that may
//! still touch an extent. Requests take both beside one another, in lanes.

use super::lanes::{self, Lane};
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

/// Range locks, first come first served. Whole-block writes share; everything whose outcome
/// depends on what is there (partial-block writes, discards, merges, snapshots) excludes.
///
/// Holds that exclude change only while somebody has the state alone. So they lie outside of the lanes, and
/// who shares the state looks at them without a lock. Each of them draws a number. A hold that shares lies
/// in the lane of its thread, and has the number that was drawn last when it was queued. So it was there before
/// those that exclude and have a higher number, and came after the others.
#[derive(Debug)]
pub struct RangeLocks {
    /// The number drawn last.
    drawn: u64,
    exclusive: Vec<Hold>,
    lanes: Box<[Lane<SharedHolds>]>,
}

/// The holds of a lane that share.
#[derive(Debug, Default)]
struct SharedHolds {
    holds: Vec<Option<Hold>>,
    /// Free places in `holds`.
    free: Vec<usize>,
    /// Requests that asked.
    requests: u64,
}

/// A place in the queue, until released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldId {
    /// Shares its blocks.
    Shared(SharedId),
    /// Excludes, and has this number.
    Exclusive(u64),
}

/// The place of a hold that shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedId {
    lane: usize,
    place: usize,
}

/// One operation's hold on blocks of a volume.
#[derive(Debug, Clone)]
struct Hold {
    number: u64,
    space: Space,
    blocks: Range<u64>,
}

impl Hold {
    fn overlaps(&self, space: Space, blocks: &Range<u64>) -> bool {
        self.space == space && self.blocks.start < blocks.end && blocks.start < self.blocks.end
    }
}

impl SharedHolds {
    fn put(&mut self, hold: Hold) -> usize {
        match self.free.pop() {
            Some(place) => {
                self.holds[place] = Some(hold);
                place
            }
            None => {
                self.holds.push(Some(hold));
                self.holds.len() - 1
            }
        }
    }
}

impl Default for RangeLocks {
    fn default() -> Self {
        Self { drawn: 0, exclusive: Vec::new(), lanes: Lane::all() }
    }
}

impl RangeLocks {
    /// Queues for blocks; granted when [`RangeLocks::granted`] says so.
    pub fn queue(&mut self, space: Space, blocks: Range<u64>, exclusive: bool) -> HoldId {
        if exclusive {
            self.drawn += 1;
            self.exclusive.push(Hold { number: self.drawn, space, blocks });
            return HoldId::Exclusive(self.drawn);
        }
        let hold = Hold { number: self.drawn, space, blocks };
        let lane = lanes::of_thread();
        HoldId::Shared(SharedId { lane, place: self.lanes[lane].get_mut().put(hold) })
    }

    /// Holds blocks for a request that shares them, if none holds them or waits for them that excludes.
    #[inline]
    pub fn try_share(&self, space: Space, blocks: Range<u64>) -> Option<SharedId> {
        let lane = lanes::of_thread();
        let mut shared = self.lanes[lane].lock();
        shared.requests += 1;
        let overlaps = |hold: &Hold| hold.overlaps(space, &blocks);
        if self.exclusive.iter().any(overlaps) && !sabotage::is(Bug::WriteBesideHolds) {
            return None;
        }
        let place = shared.put(Hold { number: self.drawn, space, blocks });
        Some(SharedId { lane, place })
    }

    /// Whether no older operation conflicts.
    pub fn granted(&mut self, id: HoldId) -> bool {
        let conflicts = |hold: &Hold, mine: &Hold| hold.overlaps(mine.space, &mine.blocks);
        match id {
            HoldId::Shared(id) => {
                let Some(mine) = &self.lanes[id.lane].get_mut().holds[id.place] else {
                    return false;
                };
                let older = |hold: &Hold| hold.number <= mine.number && conflicts(hold, mine);
                !self.exclusive.iter().any(older)
            }
            HoldId::Exclusive(number) => {
                let Some(mine) = self.exclusive.iter().find(|hold| hold.number == number) else {
                    return false;
                };
                let older = |hold: &Hold| hold.number < number && conflicts(hold, mine);
                !self.exclusive.iter().any(older) && !shared(&mut self.lanes).any(older)
            }
        }
    }

    /// Whether at most one operation holds or awaits any of these blocks.
    pub fn sole(&mut self, space: Space, blocks: &Range<u64>) -> bool {
        let all = self.exclusive.iter().chain(shared(&mut self.lanes));
        all.filter(|hold| hold.overlaps(space, blocks)).take(2).count() <= 1
    }

    /// Gives a hold back, or leaves the queue.
    pub fn release(&mut self, id: HoldId) {
        match id {
            HoldId::Shared(id) => self.release_shared(id),
            HoldId::Exclusive(number) => self.exclusive.retain(|hold| hold.number != number),
        }
    }

    /// As [`RangeLocks::release`], by who shares the state.
    #[inline]
    pub fn release_shared(&self, id: SharedId) {
        let mut shared = self.lanes[id.lane].lock();
        if shared.holds[id.place].take().is_some() {
            shared.free.push(id.place);
        }
    }

    /// Requests that asked for blocks to share.
    pub fn requests(&mut self) -> u64 {
        self.lanes.iter_mut().map(|lane| lane.get_mut().requests).sum()
    }
}

/// All holds that share.
fn shared(lanes: &mut [Lane<SharedHolds>]) -> impl Iterator<Item = &Hold> {
    let used = lanes.iter_mut().enumerate().take(lanes::used());
    let seen = |lane| !sabotage::is(Bug::ExcludeOwnLane) || lane == lanes::of_thread();
    let used = used.filter(move |(lane, _)| seen(*lane));
    used.flat_map(|(_, lane)| lane.get_mut().holds.iter().flatten())
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
        let mut locks = RangeLocks::default();
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
    fn a_shared_hold_is_before_or_after_one_that_excludes_whatever_its_lane() {
        let mut locks = RangeLocks::default();
        let (space, other) = (Space::Head(VolumeId(1)), Space::Head(VolumeId(2)));
        let elsewhere = |locks: &RangeLocks, blocks: Range<u64>| {
            let there = || locks.try_share(space, blocks).map(|id| (id, lanes::of_thread()));
            std::thread::scope(|scope| scope.spawn(there).join().unwrap())
        };
        let before = elsewhere(&locks, 0..8).unwrap();
        assert_ne!(before.1, lanes::of_thread());
        let exclusive = locks.queue(space, 4..5, true);
        assert!(!locks.granted(exclusive) && !locks.sole(space, &(4..5)));
        assert!(elsewhere(&locks, 3..5).is_none() && locks.try_share(space, 3..5).is_none());
        // Others go on beside it, and one that shares and waits is behind it.
        let beside = [locks.try_share(space, 5..9), locks.try_share(other, 0..9)];
        let behind = locks.queue(space, 4..9, false);
        locks.release_shared(before.0);
        assert!(beside.iter().all(Option::is_some));
        assert!(locks.granted(exclusive) && !locks.granted(behind));
        let second = locks.queue(space, 4..5, true);
        locks.release(exclusive);
        assert!(locks.granted(behind) && !locks.granted(second));
        locks.release(behind);
        assert!(locks.granted(second) && locks.sole(space, &(4..5)));
        locks.release(second);
        assert!(elsewhere(&locks, 3..5).is_some());
        assert_eq!(locks.requests(), 6);
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
        assert_eq!(fence.oldest(), change);
        let later = fence.next();
        assert_eq!((fence.oldest(), fence.begin_request(false)), (change, None));
        fence.end(b);
        assert_eq!(fence.oldest(), later);
        assert_eq!(fence.requests(), 3);
    }
}
