//! Order among running operations: range locks for writers, and a fence for everything that may
//! still touch an extent.

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
/// Thousands of writes may be in flight, of which few exclude: one that shares looks at those
/// only.
#[derive(Debug, Default)]
pub struct RangeLocks {
    holds: Vec<Option<Hold>>,
    /// Free places in `holds`.
    free: Vec<usize>,
    /// Places of the holds that exclude.
    exclusive: Vec<usize>,
    /// Order of the next hold.
    next: u64,
}

/// A place in the queue, until released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldId(usize);

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

impl RangeLocks {
    /// Queues for blocks; granted when [`RangeLocks::granted`] says so.
    pub fn queue(&mut self, space: Space, blocks: Range<u64>, exclusive: bool) -> HoldId {
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
        HoldId(place)
    }

    /// Whether no older operation conflicts.
    pub fn granted(&self, id: HoldId) -> bool {
        let Some(mine) = &self.holds[id.0] else { return false };
        let conflicts =
            |hold: &Hold| hold.order < mine.order && hold.overlaps(mine.space, &mine.blocks);
        if mine.exclusive {
            !self.holds.iter().flatten().any(conflicts)
        } else {
            !self.exclusive.iter().filter_map(|place| self.holds[*place].as_ref()).any(conflicts)
        }
    }

    /// Whether at most one operation holds or awaits any of these blocks.
    pub fn sole(&self, space: Space, blocks: &Range<u64>) -> bool {
        let overlapping = self.holds.iter().flatten().filter(|hold| hold.overlaps(space, blocks));
        overlapping.take(2).count() <= 1
    }

    /// Gives a hold back, or leaves the queue.
    pub fn release(&mut self, id: HoldId) {
        let Some(hold) = self.holds[id.0].take() else { return };
        self.free.push(id.0);
        if hold.exclusive {
            self.exclusive.retain(|place| *place != id.0);
        }
    }
}

/// Numbers running I/O, to know the oldest that still runs.
#[derive(Debug, Default)]
pub struct Fence {
    /// Number of the first element of `done`.
    base: u64,
    done: VecDeque<bool>,
}

impl Fence {
    /// Begins an I/O.
    pub fn begin(&mut self) -> u64 {
        self.done.push_back(false);
        self.base + self.done.len() as u64 - 1
    }

    /// Ends one.
    pub fn end(&mut self, id: u64) {
        self.done[(id - self.base) as usize] = true;
        while self.done.front() == Some(&true) {
            self.done.pop_front();
            self.base += 1;
        }
    }

    /// Number the next I/O gets.
    pub fn next(&self) -> u64 {
        self.base + self.done.len() as u64
    }

    /// The oldest that still runs, or the next one.
    pub fn oldest(&self) -> u64 {
        self.base
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
    fn the_fence_is_the_oldest_running() {
        let mut fence = Fence::default();
        let (a, b) = (fence.begin(), fence.begin());
        fence.end(b);
        assert_eq!(fence.oldest(), a);
        fence.end(a);
        assert_eq!(fence.oldest(), fence.next());
    }
}
