//! Which replica a read goes to, and who is blamed when one cannot answer.
//!
//! Reads go round the complete replicas, or to a preferred one while it is complete. When one fails,
//! the next one is tried, until all have been; those that failed become `ERR`, before the caller is
//! answered, whether another had the data or not. One that says that what it holds is damaged is tried no
//! further, and not blamed: it is healed ([`super::heal`]), or is the only one and better than none.

use super::mode::{Modes, Slot, Slots};
use super::sabotage::{Bug, is};

/// A read on its way.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    current: Slot,
    failed: Slots,
    damaged: Slots,
}

impl Read {
    /// Chooses a replica: the preferred one, or that behind the one chosen last (`turn`, which is
    /// kept by the caller, one for each thread). `None` if none is complete.
    #[must_use]
    pub fn begin(modes: Modes, preferred: Option<Slot>, turn: &mut usize) -> Option<Self> {
        let all = modes.read();
        let current = match preferred {
            Some(slot) if all.contains(slot) => slot,
            _ => {
                let next = all.next_after(*turn)?;
                *turn = next.index();
                next
            }
        };
        Some(Self { current, failed: Slots::EMPTY, damaged: Slots::EMPTY })
    }

    /// Chooses a replica to heal `damaged` from: any complete one but that.
    #[must_use]
    pub fn begin_for(damaged: Slot, modes: Modes, turn: &mut usize) -> Option<Self> {
        let except = Slots::of(damaged);
        let others = Modes { rw: modes.rw.without(except), wo: modes.wo.without(except) };
        Some(Self { damaged: except, ..Self::begin(others, None, turn)? })
    }

    /// The replica to ask.
    #[must_use]
    pub const fn current(&self) -> Slot {
        self.current
    }

    /// Notes that the current replica failed; the next one to ask, if there is one that is complete
    /// and was not asked yet.
    pub fn retry(&mut self, now: Modes) -> Option<Slot> {
        self.failed = self.failed.with(self.current);
        self.next(now)
    }

    /// The same if the current replica says that what it holds is damaged.
    pub fn retry_damaged(&mut self, now: Modes) -> Option<Slot> {
        if is(Bug::BlameDamaged) {
            return self.retry(now);
        }
        self.damaged = self.damaged.with(self.current);
        self.next(now)
    }

    /// The next one to ask in place of the current one, which is not to blame; it may be asked later.
    pub fn pass(&mut self, now: Modes) -> Option<Slot> {
        let rw = now.rw.without(Slots::of(self.current));
        self.next(Modes { rw, ..now })
    }

    fn next(&mut self, now: Modes) -> Option<Slot> {
        let left = now.read().without(self.failed).without(self.damaged);
        self.current = left.next_after(self.current.index())?;
        Some(self.current)
    }

    /// Those that failed, to become `ERR` before the caller is answered.
    #[must_use]
    pub const fn faulted(&self) -> Slots {
        self.failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(index: usize) -> Slot {
        Slot::new(index).unwrap()
    }

    fn modes(rw: &[usize], wo: &[usize]) -> Modes {
        let slots = |list: &[usize]| list.iter().map(|index| slot(*index)).collect();
        Modes { rw: slots(rw), wo: slots(wo) }
    }

    #[test]
    fn reads_go_round_the_complete_replicas() {
        let modes = modes(&[1, 4, 9], &[5]);
        let mut turn = 0;
        let chosen: Vec<_> = (0..7)
            .map(|_| Read::begin(modes, None, &mut turn).unwrap().current().index())
            .collect();
        assert_eq!(chosen, [1, 4, 9, 1, 4, 9, 1]);
    }

    #[test]
    fn the_preferred_one_is_asked_while_it_is_complete() {
        let mut turn = 0;
        for _ in 0..3 {
            let read = Read::begin(modes(&[1, 4], &[]), Some(slot(4)), &mut turn).unwrap();
            assert_eq!(read.current(), slot(4));
        }
        let read = Read::begin(modes(&[1], &[4]), Some(slot(4)), &mut turn).unwrap();
        assert_eq!(read.current(), slot(1));
    }

    #[test]
    fn each_is_tried_once_and_all_that_failed_are_blamed() {
        let all = modes(&[1, 4, 9], &[5]);
        let mut turn = 1;
        let mut read = Read::begin(all, None, &mut turn).unwrap();
        assert_eq!(read.current(), slot(4));
        assert!(read.faulted().is_empty());
        assert_eq!(read.retry(all), Some(slot(9)));
        assert_eq!(read.retry(all), Some(slot(1)));
        assert_eq!(read.faulted().len(), 2);
        assert_eq!(read.retry(all), None);
        assert_eq!(read.faulted(), all.rw);
    }

    #[test]
    fn one_that_is_damaged_is_neither_asked_again_nor_blamed() {
        let all = modes(&[1, 4, 9], &[5]);
        let mut read = Read::begin(all, Some(slot(4)), &mut 0).unwrap();
        assert_eq!(read.retry_damaged(all), Some(slot(9)));
        assert_eq!(read.retry(all), Some(slot(1)));
        assert_eq!(read.retry_damaged(all), None);
        assert_eq!(read.faulted().iter().collect::<Vec<_>>(), [slot(9)]);
        // It is healed from any other.
        let mut turn = 1;
        let mut read = Read::begin_for(slot(4), all, &mut turn).unwrap();
        assert_eq!(read.current(), slot(9));
        assert_eq!((read.retry_damaged(all), read.retry(all)), (Some(slot(1)), None));
        assert!(Read::begin_for(slot(1), modes(&[1], &[5]), &mut turn).is_none());
    }

    #[test]
    fn one_that_cannot_be_reached_is_not_blamed() {
        let all = modes(&[1, 4], &[5]);
        let mut read = Read::begin(all, Some(slot(4)), &mut 0).unwrap();
        assert_eq!(read.pass(all), Some(slot(1)));
        assert_eq!(read.retry(modes(&[1], &[])), None);
        assert_eq!((read.pass(all), read.pass(all)), (Some(slot(4)), None));
        assert_eq!(read.faulted().iter().collect::<Vec<_>>(), [slot(1)]);
    }

    #[test]
    fn one_that_was_faulted_meanwhile_is_not_asked() {
        let mut turn = 0;
        let mut read = Read::begin(modes(&[1, 4, 9], &[]), None, &mut turn).unwrap();
        assert_eq!(read.retry(modes(&[1, 9], &[])), Some(slot(9)));
        assert_eq!(read.retry(modes(&[], &[])), None);
    }

    #[test]
    fn nothing_is_read_from_one_being_rebuilt() {
        assert!(Read::begin(modes(&[], &[1]), Some(slot(1)), &mut 0).is_none());
    }
}
