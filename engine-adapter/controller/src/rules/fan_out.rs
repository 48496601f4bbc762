//! A change on its way to all replicas: which it went to, what each said, what follows.
//!
//! **The rule.** A change is decided when every replica it went to has answered, or is known to be
//! lost. Those that failed become `ERR`; it succeeded if one complete replica has it. Each replica
//! answers for itself: none is blamed for another.
//!
//! **No space.** If some complete replicas have the change, the full ones become `ERR`. If none has it
//! because all that are left are full, the largest group that wrote the same number of bytes stays
//! (of equal groups the one that wrote more), so that the volume can still be read, and the caller is
//! told that there is no space. A full replica that is being rebuilt becomes `ERR` in any case; so does
//! one that has the change when no complete replica has it, since it would differ from them.
//! Neither upstream's replicas nor ours tell how much they wrote: that counts as nothing, so all full ones are one
//! group, and what is in the range of a write that failed is then not known.
//!
//! **Damage.** A replica of DBS that would have to complete a block which is not what was written changes
//! nothing and says so. Such a write is made one of whole blocks and goes to those replicas once more, not to
//! the others, as replicas count changes ([`FanOut::again`]); one that has not got it after that is `ERR` like
//! any other, but where no complete one has it those stay, as nothing in them has changed. That is not known of
//! a full one, even if it says that it wrote nothing: damaged ones are a group of their own.
//!
//! **How to use it.** [`FanOut::write`] (or its like) with the modes of the moment the requests are
//! sent; [`FanOut::answer`] for each reply, and [`FanOut::lost`] for each replica that will not answer;
//! when it says so, [`FanOut::decide`] with the modes of *that* moment; then fault those in
//! [`Verdict::faulted`]; then answer the caller. Where several threads decide, a verdict that faults
//! somebody is reached and carried out under one lock, or two of them could fault each other's last
//! replica; [`FanOut::is_clean`] says when that lock is not needed.

use super::mode::{Modes, Slot, Slots};
use super::sabotage::{Bug, is};

/// Different numbers of bytes that full replicas of one request are told apart by.
const GROUPS: usize = 4;

/// What one replica said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It has the change.
    Done,
    /// It is full.
    NoSpace {
        /// Bytes that it wrote before it was; 0 if it did not say.
        written: u32,
    },
    /// It holds damaged data where the change would have to leave some, and has changed nothing.
    Damaged,
    /// Anything else, a lost connection and a timeout included.
    Failed,
}

/// What the caller is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It happened.
    Done,
    /// There is no space.
    NoSpace,
    /// No replica is left that has it.
    Failed,
}

/// What follows from all answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// For the caller, after the faults.
    pub outcome: Outcome,
    /// Replicas that are to become `ERR`, first.
    pub faulted: Slots,
}

/// Full replicas that wrote equally much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Group {
    written: u32,
    members: Slots,
}

/// A change on its way.
#[derive(Debug, Clone, Copy)]
pub struct FanOut {
    /// Those it went to.
    sent: Slots,
    /// Those that were complete then.
    complete: Slots,
    /// Those that have not answered.
    waiting: Slots,
    done: Slots,
    failed: Slots,
    damaged: Slots,
    full: [Group; GROUPS],
}

impl FanOut {
    /// A change for all replicas that are complete or being rebuilt; `None` if none is complete.
    #[must_use]
    pub fn write(modes: Modes) -> Option<Self> {
        (!modes.rw.is_empty()).then(|| Self::to(modes.written(), modes.rw))
    }

    /// A flush, for those that know it. The others count as flushed: that is their promise.
    #[must_use]
    pub fn flush(modes: Modes, capable: Slots) -> Option<Self> {
        let mut fan_out = Self::write(modes)?;
        fan_out.waiting = fan_out.sent.and(capable);
        fan_out.done = fan_out.sent.without(capable);
        Some(fan_out)
    }

    const fn to(sent: Slots, complete: Slots) -> Self {
        let none = Group { written: 0, members: Slots::EMPTY };
        Self {
            sent,
            complete,
            waiting: sent,
            done: Slots::EMPTY,
            failed: Slots::EMPTY,
            damaged: Slots::EMPTY,
            full: [none; GROUPS],
        }
    }

    /// Those that have not answered; at first those to send it to.
    #[must_use]
    pub const fn waiting(&self) -> Slots {
        self.waiting
    }

    /// Those that were complete when it was sent.
    #[must_use]
    pub const fn complete(&self) -> Slots {
        self.complete
    }

    /// Whether everybody has answered.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.waiting.is_empty()
            || is(Bug::AcknowledgeEarly) && !self.done.and(self.complete).is_empty()
    }

    /// Whether somebody holds damaged data where the change ends.
    #[must_use]
    pub fn met_damage(&self) -> bool {
        !self.damaged.is_empty()
    }

    /// The same change, of whole blocks by now, for those that could not complete them.
    #[must_use]
    pub fn again(mut self) -> Self {
        self.waiting = if is(Bug::WidenForAll) { self.damaged.or(self.done) } else { self.damaged };
        self.damaged = Slots::EMPTY;
        self
    }

    /// Whether everybody has the change, so that nobody is faulted.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.done == self.sent
    }

    /// Notes what a replica said; says whether it was the last one. What a replica says twice, or one
    /// that was not asked, does not count.
    pub fn answer(&mut self, from: Slot, answer: Answer) -> bool {
        if self.waiting.contains(from) {
            self.waiting = self.waiting.without(Slots::of(from));
            match answer {
                Answer::Done => self.done = self.done.with(from),
                Answer::NoSpace { written } => self.add_full(from, written),
                Answer::Damaged => self.damaged = self.damaged.with(from),
                Answer::Failed => self.failed = self.failed.with(from),
            }
        }
        self.is_complete()
    }

    /// Notes that a replica will not answer; says whether it was the last one.
    pub fn lost(&mut self, slot: Slot) -> bool {
        self.answer(slot, Answer::Failed)
    }

    fn add_full(&mut self, slot: Slot, written: u32) {
        let place =
            self.full.iter_mut().find(|group| group.members.is_empty() || group.written == written);
        match place {
            Some(group) => *group = Group { written, members: group.members.with(slot) },
            // One more way to be full than are told apart: it could not have stayed but by luck.
            None => self.failed = self.failed.with(slot),
        }
    }

    /// What follows, given the modes now.
    #[must_use]
    pub fn decide(&self, now: Modes) -> Verdict {
        if self.is_clean() {
            return Verdict { outcome: Outcome::Done, faulted: Slots::EMPTY };
        }
        let failed = match (is(Bug::KeepFailed), is(Bug::BlameFirst)) {
            (true, _) => Slots::EMPTY,
            (_, true) if !self.failed.is_empty() => self.sent.first().into_iter().collect(),
            _ => self.failed,
        };
        let full = self.full.iter().fold(Slots::EMPTY, |all, group| all.or(group.members));
        let alive = self.complete.and(now.rw).without(self.failed);
        let rebuilding = self.sent.without(self.complete);
        if !alive.and(self.done).is_empty() {
            let full = if is(Bug::KeepFullBehindDone) { Slots::EMPTY } else { full };
            return Verdict { outcome: Outcome::Done, faulted: failed.or(full).or(self.damaged) };
        }
        if alive.is_empty() {
            return Verdict { outcome: Outcome::Failed, faulted: failed };
        }
        let ahead = match is(Bug::KeepWoAhead) {
            true => Slots::EMPTY,
            false => rebuilding,
        };
        let stay = self.largest_group(alive);
        let outcome = if stay.and(full).is_empty() { Outcome::Failed } else { Outcome::NoSpace };
        Verdict { outcome, faulted: failed.or(alive.without(stay)).or(ahead) }
    }

    /// Of these the largest group that did the same: full ones that wrote so much, or damaged ones. Of equal
    /// ones the damaged, which are as they were and may have space; else those that wrote more.
    fn largest_group(&self, among: Slots) -> Slots {
        let full = self.full.iter().map(|group| (group.members, false, group.written));
        let groups = full
            .chain([(self.damaged, true, 0)])
            .map(|(members, damaged, written)| (members.and(among), damaged, written))
            .filter(|(members, ..)| !members.is_empty());
        let best =
            groups.max_by_key(|(members, damaged, written)| (members.len(), *damaged, *written));
        best.map_or(Slots::EMPTY, |(members, ..)| members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(index: usize) -> Slot {
        Slot::new(index).unwrap()
    }

    fn slots(indexes: &[usize]) -> Slots {
        indexes.iter().map(|index| slot(*index)).collect()
    }

    fn modes(rw: &[usize], wo: &[usize]) -> Modes {
        Modes { rw: slots(rw), wo: slots(wo) }
    }

    /// The verdict on a write to complete replicas 0.. and replicas being rebuilt behind them.
    fn verdict(rw: &[Answer], wo: &[Answer]) -> (Outcome, Vec<usize>) {
        let all: Vec<_> = (0..rw.len() + wo.len()).collect();
        let modes = modes(&all[..rw.len()], &all[rw.len()..]);
        let mut fan_out = FanOut::write(modes).unwrap();
        assert_eq!(fan_out.waiting(), modes.written());
        for (index, answer) in rw.iter().chain(wo).enumerate() {
            assert_eq!(fan_out.answer(slot(index), *answer), index + 1 == all.len());
        }
        let verdict = fan_out.decide(modes);
        (verdict.outcome, verdict.faulted.iter().map(Slot::index).collect())
    }

    const D: Answer = Answer::Done;
    const F: Answer = Answer::Failed;

    const fn n(written: u32) -> Answer {
        Answer::NoSpace { written }
    }

    #[test]
    fn it_succeeds_while_one_complete_replica_has_it() {
        use Outcome::{Done, Failed};
        for (rw, wo, outcome, faulted) in [
            (&[D, D][..], &[][..], Done, &[][..]),
            (&[D, F], &[], Done, &[1]),
            (&[F, D], &[], Done, &[0]),
            (&[F, D, F], &[D], Done, &[0, 2]),
            (&[D, D], &[F], Done, &[2]),
            (&[F, F], &[], Failed, &[0, 1]),
            (&[F], &[D], Failed, &[0]),
            (&[F], &[], Failed, &[0]),
        ] {
            assert_eq!(verdict(rw, wo), (outcome, faulted.to_vec()), "{rw:?} {wo:?}");
        }
    }

    #[test]
    fn of_full_replicas_the_largest_equal_group_stays() {
        use Outcome::{Done, NoSpace};
        for (rw, wo, outcome, faulted) in [
            (&[n(0)][..], &[][..], NoSpace, &[][..]),
            (&[n(4096), n(4096)], &[], NoSpace, &[]),
            (&[n(1), n(2), n(2), n(0), n(0)], &[], NoSpace, &[0, 3, 4]),
            (&[n(1), n(2), n(1), n(2), n(0)], &[], NoSpace, &[0, 2, 4]),
            (&[n(9), n(0), n(0)], &[], NoSpace, &[0]),
            (&[n(4), n(8)], &[], NoSpace, &[0]),
            (&[D, n(4), n(4)], &[], Done, &[1, 2]),
            (&[D, D], &[n(0)], Done, &[2]),
            // What is left of the complete ones is full.
            (&[F, n(4)], &[], NoSpace, &[0]),
            (&[F, n(4), n(4), n(0)], &[], NoSpace, &[0, 3]),
            // One being rebuilt neither stays full nor ahead of the others.
            (&[n(4)], &[n(4)], NoSpace, &[1]),
            (&[n(4), n(4)], &[D], NoSpace, &[2]),
        ] {
            assert_eq!(verdict(rw, wo), (outcome, faulted.to_vec()), "{rw:?} {wo:?}");
        }
    }

    #[test]
    fn a_damaged_one_stays_where_nobody_has_the_change() {
        use Outcome::{Done, Failed, NoSpace};
        const X: Answer = Answer::Damaged;
        for (rw, wo, outcome, faulted) in [
            (&[X][..], &[][..], Failed, &[][..]),
            (&[X, X], &[], Failed, &[]),
            (&[F, X], &[], Failed, &[0]),
            (&[X, F, X], &[D], Failed, &[1, 3]),
            (&[D, X], &[], Done, &[1]),
            (&[F, D, X], &[X], Done, &[0, 2, 3]),
            // The full one may have written a part of it, and not have said so.
            (&[n(0), X], &[], Failed, &[0]),
            (&[n(0), n(0), X], &[], NoSpace, &[2]),
            (&[n(0), X, X], &[], Failed, &[0]),
            (&[n(4096), n(4096), X], &[], NoSpace, &[2]),
            (&[n(4096), X, X], &[], Failed, &[0]),
        ] {
            assert_eq!(verdict(rw, wo), (outcome, faulted.to_vec()), "{rw:?} {wo:?}");
        }
    }

    #[test]
    fn what_met_damage_goes_once_more_to_whom_it_concerns() {
        let mut fan_out = FanOut::write(modes(&[0, 1, 2, 3], &[])).unwrap();
        for (index, answer) in [(0, Answer::Damaged), (1, D), (2, F), (3, Answer::Damaged)] {
            fan_out.answer(slot(index), answer);
        }
        assert!(fan_out.is_complete() && fan_out.met_damage());
        let mut again = fan_out.again();
        assert_eq!(again.waiting(), slots(&[0, 3]));
        assert!(!again.answer(slot(3), D) && again.answer(slot(0), D));
        let verdict = again.decide(modes(&[0, 1, 2, 3], &[]));
        assert_eq!(verdict, Verdict { outcome: Outcome::Done, faulted: slots(&[2]) });
    }

    #[test]
    fn more_ways_to_be_full_than_are_told_apart_lose_their_replicas() {
        let many = [n(0), n(1), n(2), n(3), n(4)];
        assert_eq!(verdict(&many, &[]), (Outcome::NoSpace, vec![0, 1, 2, 4]));
    }

    #[test]
    fn what_was_faulted_meanwhile_does_not_count() {
        let mut fan_out = FanOut::write(modes(&[0, 1, 2], &[])).unwrap();
        for (index, answer) in [(0, D), (1, F), (2, n(8))] {
            fan_out.answer(slot(index), answer);
        }
        // Replica 0, the one that has it, failed another request.
        let verdict = fan_out.decide(modes(&[1, 2], &[]));
        assert_eq!(verdict, Verdict { outcome: Outcome::NoSpace, faulted: slots(&[1]) });
        let verdict = fan_out.decide(modes(&[], &[]));
        assert_eq!(verdict.outcome, Outcome::Failed);
    }

    #[test]
    fn answers_count_once_and_only_from_those_asked() {
        let mut fan_out = FanOut::write(modes(&[0, 1], &[])).unwrap();
        assert!(!fan_out.answer(slot(0), D));
        assert!(!fan_out.answer(slot(0), F));
        assert!(!fan_out.answer(slot(7), F));
        assert_eq!(fan_out.waiting(), slots(&[1]));
        assert!(fan_out.lost(slot(1)));
        assert!(!fan_out.is_clean());
        assert_eq!(fan_out.decide(modes(&[0, 1], &[])).faulted, slots(&[1]));
    }

    #[test]
    fn without_a_complete_replica_nothing_is_written() {
        assert!(FanOut::write(modes(&[], &[3])).is_none());
        assert!(FanOut::flush(modes(&[], &[]), slots(&[0])).is_none());
    }

    #[test]
    fn a_flush_is_for_those_that_know_it() {
        let modes = modes(&[0, 1], &[2]);
        let fan_out = FanOut::flush(modes, Slots::EMPTY).unwrap();
        assert!(fan_out.is_complete() && fan_out.is_clean());
        let mut fan_out = FanOut::flush(modes, slots(&[1, 2, 9])).unwrap();
        assert_eq!(fan_out.waiting(), slots(&[1, 2]));
        fan_out.answer(slot(2), D);
        assert!(fan_out.answer(slot(1), F));
        // The other one is upstream's, and did what it does for a flush.
        let verdict = fan_out.decide(modes);
        assert_eq!(verdict, Verdict { outcome: Outcome::Done, faulted: slots(&[1]) });
        let mut fan_out = FanOut::flush(modes, slots(&[0, 1, 2])).unwrap();
        for (index, answer) in [(0, F), (1, F), (2, D)] {
            fan_out.answer(slot(index), answer);
        }
        assert_eq!(fan_out.decide(modes).outcome, Outcome::Failed);
    }

    #[test]
    fn it_is_small() {
        assert!(size_of::<FanOut>() <= 112, "{}", size_of::<FanOut>());
    }
}
