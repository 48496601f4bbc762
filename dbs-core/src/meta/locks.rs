//! Order among running operations: range locks for writers, and a fence for everything that may
//! still touch an extent.

use std::collections::VecDeque;
use std::ops::Range;

/// One operation's hold on blocks of a volume.
#[derive(Debug, Clone)]
struct Hold {
    id: u64,
    volume: u32,
    blocks: Range<u64>,
    exclusive: bool,
}

/// Range locks, first come first served. Whole-block writes share; everything whose outcome
/// depends on what is there (partial-block writes, discards, merges, snapshots) excludes.
#[derive(Debug, Default)]
pub struct RangeLocks {
    holds: Vec<Hold>,
    next: u64,
}

impl RangeLocks {
    /// Queues for blocks of a volume; granted when [`RangeLocks::granted`] says so.
    pub fn queue(&mut self, volume: u32, blocks: Range<u64>, exclusive: bool) -> u64 {
        self.next += 1;
        self.holds.push(Hold { id: self.next, volume, blocks, exclusive });
        self.next
    }

    /// Whether no older operation conflicts.
    pub fn granted(&self, id: u64) -> bool {
        let Some(index) = self.holds.iter().position(|hold| hold.id == id) else { return false };
        let (older, mine) = (&self.holds[..index], &self.holds[index]);
        !older.iter().any(|hold| {
            hold.volume == mine.volume
                && (hold.exclusive || mine.exclusive)
                && hold.blocks.start < mine.blocks.end
                && mine.blocks.start < hold.blocks.end
        })
    }

    /// Whether at most one operation holds or awaits any of these blocks.
    pub fn sole(&self, volume: u32, blocks: &Range<u64>) -> bool {
        let overlaps = |hold: &&Hold| {
            hold.volume == volume
                && hold.blocks.start < blocks.end
                && blocks.start < hold.blocks.end
        };
        self.holds.iter().filter(overlaps).count() <= 1
    }

    /// Gives a hold back, or leaves the queue.
    pub fn release(&mut self, id: u64) {
        self.holds.retain(|hold| hold.id != id);
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
        let first = locks.queue(1, 0..8, false);
        let second = locks.queue(1, 4..12, false);
        let exclusive = locks.queue(1, 7..9, true);
        let behind = locks.queue(1, 8..9, false);
        let elsewhere = locks.queue(2, 0..100, true);
        assert!(locks.granted(first) && locks.granted(second) && locks.granted(elsewhere));
        assert!(!locks.granted(exclusive) && !locks.granted(behind));
        locks.release(first);
        locks.release(second);
        assert!(locks.granted(exclusive) && !locks.granted(behind));
        locks.release(exclusive);
        assert!(locks.granted(behind));
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
