//! Free entries: which can be handed out now, and which only after their freeing is durable and
//! no I/O that began before can still touch them.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A set of free ids, handed out lowest first so that the store stays dense.
#[derive(Debug, Default)]
pub struct FreeSet {
    words: Vec<u64>,
    count: u32,
    /// No word before this one has a free id.
    hint: usize,
}

impl FreeSet {
    /// Adds an id.
    pub fn insert(&mut self, id: u32) {
        let word = (id / 64) as usize;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        debug_assert!(self.words[word] >> (id % 64) & 1 == 0, "id {id} freed twice");
        self.words[word] |= 1 << (id % 64);
        self.count += 1;
        self.hint = self.hint.min(word);
    }

    /// Adds a range of ids, none of which is there.
    pub fn insert_range(&mut self, ids: Range<u32>) {
        let end = ids.end.div_ceil(64) as usize;
        for (word, mask) in masks(ids) {
            if self.words.len() <= word {
                self.words.resize(end, 0);
            }
            self.words[word] |= mask;
            self.count += mask.count_ones();
            self.hint = self.hint.min(word);
        }
    }

    /// Removes those of a range that are there.
    pub fn remove_range(&mut self, ids: Range<u32>) {
        for (word, mask) in masks(ids) {
            let Some(word) = self.words.get_mut(word) else { break };
            self.count -= (*word & mask).count_ones();
            *word &= !mask;
        }
    }

    /// Removes an id; whether it was there.
    pub fn remove(&mut self, id: u32) -> bool {
        let Some(word) = self.words.get_mut((id / 64) as usize) else { return false };
        let there = *word >> (id % 64) & 1 == 1;
        *word &= !(1 << (id % 64));
        self.count -= u32::from(there);
        there
    }

    /// Takes `preferred` if it is free, else the lowest free id.
    pub fn take(&mut self, preferred: u32) -> Option<u32> {
        if self.remove(preferred) {
            return Some(preferred);
        }
        while self.hint < self.words.len() {
            let word = self.words[self.hint];
            if word != 0 {
                let id = self.hint as u32 * 64 + word.trailing_zeros();
                self.remove(id);
                return Some(id);
            }
            self.hint += 1;
        }
        None
    }

    /// The lowest free id.
    pub fn lowest(&self) -> Option<u32> {
        let words = self.words.iter().enumerate().skip(self.hint);
        let (index, word) = words.into_iter().find(|(_, word)| **word != 0)?;
        Some(index as u32 * 64 + word.trailing_zeros())
    }

    /// Whether an id is in it.
    pub fn contains(&self, id: u32) -> bool {
        self.words.get((id / 64) as usize).is_some_and(|word| word >> (id % 64) & 1 == 1)
    }

    /// Number of free ids.
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// The words of a set in which a range of ids is, each with the bits of these ids.
fn masks(ids: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let words = if ids.is_empty() { 0..0 } else { ids.start / 64..ids.end.div_ceil(64) };
    words.map(move |word| {
        let (first, end) = (ids.start.max(word * 64) % 64, ids.end.min(word * 64 + 64) - word * 64);
        (word as usize, (u64::MAX >> (64 - end)) & (u64::MAX << first))
    })
}

/// A freed id that cannot be handed out yet.
#[derive(Debug, Clone, Copy)]
struct Quarantined {
    id: u32,
    /// Group that makes the freeing durable.
    group: u64,
    /// I/O numbered below this may still touch it.
    fence: u64,
}

/// Ids of one kind (data extents or spares).
#[derive(Debug, Default)]
pub struct Allocator {
    free: FreeSet,
    quarantine: VecDeque<Quarantined>,
    /// Durably free, to be given back to the device before they are handed out again; handed out
    /// all the same when nothing else is left.
    unpunched: Vec<u32>,
    /// Taken by [`Allocator::take_unpunched`] and not back yet.
    punching: u32,
    punch: bool,
    /// What is remembered of an id until it is freed. Behind a lock, as who only looks at the metadata marks it.
    marked: Mutex<BTreeSet<u32>>,
}

impl Allocator {
    /// An allocator whose freed ids are offered to [`Allocator::take_unpunched`] first.
    pub fn new(punch: bool) -> Self {
        Self { punch, ..Self::default() }
    }

    /// Ids that were never used or are known free.
    pub fn add_free(&mut self, ids: Range<u32>) {
        self.free.insert_range(ids);
    }

    /// Takes ids out of the free set for good (the store shrank).
    pub fn withdraw(&mut self, ids: Range<u32>) {
        self.free.remove_range(ids.clone());
        self.unpunched.retain(|id| !ids.contains(id));
    }

    /// Hands an id out, `preferred` if possible.
    pub fn take(&mut self, preferred: u32) -> Option<u32> {
        let taken = self.free.take(preferred).or_else(|| self.unpunched.pop());
        taken.inspect(|id| self.unmark(*id))
    }

    /// The id [`Allocator::take`] would hand out with no preference.
    pub fn lowest(&self) -> Option<u32> {
        self.free.lowest().or_else(|| self.unpunched.last().copied())
    }

    /// Returns an id that was handed out but never used, so that nothing refers to it.
    pub fn put_back(&mut self, id: u32) {
        self.free.insert(id);
    }

    /// Frees an id: reusable once `group` is durable and all I/O below `fence` is done.
    pub fn free(&mut self, id: u32, group: u64, fence: u64) {
        self.unmark(id);
        self.quarantine.push_back(Quarantined { id, group, fence });
    }

    /// Lets ids out of quarantine. `oldest` is the lowest number of I/O still running.
    pub fn release(&mut self, durable_group: u64, oldest: u64) {
        while let Some(first) = self.quarantine.front() {
            if first.group > durable_group || first.fence > oldest {
                break;
            }
            if self.punch {
                self.unpunched.push(first.id);
            } else {
                self.free.insert(first.id);
            }
            self.quarantine.pop_front();
        }
    }

    /// Takes up to `max` ids to give back to the device; they return by [`Allocator::punched`].
    pub fn take_unpunched(&mut self, max: usize) -> Vec<u32> {
        let count = self.unpunched.len().min(max);
        let mut ids = self.unpunched.split_off(self.unpunched.len() - count);
        self.punching += count as u32;
        ids.sort_unstable();
        ids
    }

    /// Ids given back to the device.
    pub fn punched(&mut self, ids: &[u32]) {
        ids.iter().for_each(|id| self.free.insert(*id));
        self.punching -= ids.len() as u32;
    }

    /// Marks an id that is in use, unless so many are.
    pub fn mark(&self, id: u32, most: usize) {
        let mut marked = self.all_marked();
        if marked.len() < most {
            marked.insert(id);
        }
    }

    /// Those of these ids that are marked.
    pub fn marked(&self, ids: Range<u32>) -> BTreeSet<u32> {
        self.all_marked().range(ids).copied().collect()
    }

    /// Marks none any more.
    pub fn unmark_all(&self) {
        self.all_marked().clear();
    }

    fn unmark(&mut self, id: u32) {
        self.marked.get_mut().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    fn all_marked(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.marked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an id is free, and waits for nothing.
    pub fn is_free(&self, id: u32) -> bool {
        self.free.contains(id)
    }

    /// Ids that can be handed out now.
    pub fn available(&self) -> u32 {
        self.free.count() + self.unpunched.len() as u32
    }

    /// The id behind the last one in quarantine; 0 if there is none.
    pub fn quarantine_end(&self) -> u32 {
        self.quarantine.iter().map(|item| item.id + 1).max().unwrap_or(0)
    }

    /// Ids in quarantine.
    pub fn quarantined(&self) -> u32 {
        self.quarantine.len() as u32
    }

    /// Whether there are ids that [`Allocator::release`] has left in quarantine for I/O alone.
    pub fn wait_for_io(&self, durable_group: u64) -> bool {
        self.quarantine.front().is_some_and(|first| first.group <= durable_group)
    }

    /// Ids being given back to the device: free, and not to be had now.
    pub fn punching(&self) -> u32 {
        self.punching
    }

    /// Ids waiting to be given back to the device.
    pub fn unpunched(&self) -> u32 {
        self.unpunched.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_the_ids_in_them() {
        for range in [0..0, 5..5, 0..1, 0..64, 63..65, 1..130, 64..128, 100..101] {
            let (mut by_range, mut one_by_one) = (FreeSet::default(), FreeSet::default());
            by_range.insert_range(range.clone());
            range.clone().for_each(|id| one_by_one.insert(id));
            assert_eq!(by_range.words, one_by_one.words, "{range:?}");
            assert_eq!(by_range.count(), range.len() as u32);
            let mut all = FreeSet::default();
            all.insert_range(0..150);
            assert!(!range.contains(&70) || all.remove(70));
            all.remove_range(range.clone());
            all.remove_range(140..1000);
            let left = (0..140).filter(|id| !range.contains(id));
            assert_eq!(all.count() as usize, left.clone().count(), "{range:?}");
            assert!(left.into_iter().all(|id| all.remove(id)), "{range:?}");
        }
    }

    /// Found by review: what was known of an extent was said of whoever got it next.
    #[test]
    fn a_mark_lasts_as_long_as_the_use_of_an_id() {
        let mut ids = Allocator::new(false);
        ids.add_free(0..2);
        let first = ids.take(0).unwrap();
        ids.mark(first, 1);
        ids.mark(7, 1);
        assert_eq!(Vec::from_iter(ids.marked(0..8)), [first], "one at most");
        ids.free(first, 1, 0);
        assert!(ids.marked(0..8).is_empty(), "it is freed");
        ids.release(1, 1);
        // Who has met damage may say so late.
        ids.mark(first, 1);
        while ids.take(first).is_some() {}
        assert!(ids.marked(0..8).is_empty(), "it is used anew");
    }

    #[test]
    fn freed_ids_come_back_only_when_durable_and_unused() {
        let mut allocator = Allocator::new(true);
        allocator.add_free(0..2);
        assert_eq!(allocator.take(1), Some(1));
        assert_eq!(allocator.take(1), Some(0));
        assert_eq!(allocator.take(1), None);
        allocator.free(0, 7, 100);
        allocator.release(6, 200);
        assert_eq!(allocator.take(0), None, "not durable");
        allocator.release(7, 99);
        assert_eq!(allocator.take(0), None, "I/O 99 still runs");
        allocator.release(7, 100);
        assert_eq!((allocator.available(), allocator.unpunched()), (1, 1));
        assert_eq!(allocator.take(5), Some(0));
    }
}
