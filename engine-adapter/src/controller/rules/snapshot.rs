//! What follows from a snapshot that was asked of all replicas.
//!
//! A replica that failed lacks a layer that others have and becomes `ERR`. There is one exception:
//! where *every* replica says that the name is taken, nothing happened anywhere, and nobody is to blame.
//! (Upstream spares them even if others took the snapshot; a name that means different contents on two
//! complete replicas is what must never be.) If all complete ones are full, nothing happened either.

use super::fan_out::{Answer, FanOut, Outcome};
use super::mode::{Modes, Slot, Slots};
use super::sabotage::{Bug, is};
use crate::wire::NO_SPACE_TEXT;

/// What one replica said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// It has the snapshot.
    Done,
    /// It had one of this name before.
    Exists,
    /// It is full.
    NoSpace,
    /// Anything else.
    Failed,
}

impl Said {
    /// What the text of an error says.
    #[must_use]
    pub fn of_error(text: &str) -> Self {
        let exists = text
            .find("snapshot ")
            .and_then(|at| text.get(at..))
            .is_some_and(|rest| rest.contains(" is already existing"));
        if exists {
            Self::Exists
        } else if text.contains(NO_SPACE_TEXT) {
            Self::NoSpace
        } else {
            Self::Failed
        }
    }
}

/// What the caller is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// The snapshot is taken.
    Done,
    /// The name is taken; nothing happened.
    Exists,
    /// All complete replicas are full; nothing happened.
    NoSpace,
    /// No replica is left.
    Failed,
}

/// What follows from what all replicas in these modes said, and who becomes `ERR`.
#[must_use]
pub fn decide(modes: Modes, said: &[(Slot, Said)]) -> (Decision, Slots) {
    let exist: Slots =
        said.iter().filter(|(_, said)| *said == Said::Exists).map(|(slot, _)| *slot).collect();
    if !exist.is_empty() && exist == modes.written() {
        return (Decision::Exists, Slots::EMPTY);
    }
    let Some(mut fan_out) = FanOut::write(modes) else {
        return (Decision::Failed, Slots::EMPTY);
    };
    for (slot, said) in said {
        let answer = match said {
            Said::Done => Answer::Done,
            Said::NoSpace => Answer::NoSpace { written: 0 },
            Said::Exists | Said::Failed => Answer::Failed,
        };
        fan_out.answer(*slot, answer);
    }
    for slot in fan_out.waiting().iter() {
        fan_out.lost(slot);
    }
    let verdict = fan_out.decide(modes);
    let result = match verdict.outcome {
        Outcome::Done => Decision::Done,
        Outcome::NoSpace => Decision::NoSpace,
        Outcome::Failed => Decision::Failed,
    };
    if is(Bug::KeepWithoutSnapshot) {
        return (result, Slots::EMPTY);
    }
    (result, verdict.faulted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modes(rw: usize, wo: usize) -> Modes {
        let slots = |range: std::ops::Range<usize>| range.filter_map(Slot::new).collect();
        Modes { rw: slots(0..rw), wo: slots(rw..rw + wo) }
    }

    fn of(rw: usize, said: &[Said]) -> (Decision, Vec<usize>) {
        let said: Vec<_> =
            said.iter().enumerate().map(|(i, said)| (Slot::new(i).unwrap(), *said)).collect();
        let (result, faulted) = decide(modes(rw, said.len() - rw), &said);
        (result, faulted.iter().map(Slot::index).collect())
    }

    #[test]
    fn who_lacks_the_layer_is_faulted() {
        use Said::{Done, Exists, Failed, NoSpace};
        for (rw, said, result, faulted) in [
            (2, &[Done, Done, Done][..], Decision::Done, &[][..]),
            (2, &[Done, Failed], Decision::Done, &[1]),
            (2, &[Done, NoSpace], Decision::Done, &[1]),
            (1, &[Done, Failed], Decision::Done, &[1]),
            (2, &[Failed, Failed], Decision::Failed, &[0, 1]),
            (2, &[Exists, Exists], Decision::Exists, &[]),
            (2, &[Exists, Done], Decision::Done, &[0]),
            (2, &[NoSpace, NoSpace], Decision::NoSpace, &[]),
            // It took a snapshot that no complete one has.
            (2, &[NoSpace, NoSpace, Done], Decision::NoSpace, &[2]),
        ] {
            assert_eq!(of(rw, said), (result, faulted.to_vec()), "{rw} {said:?}");
        }
        assert_eq!(decide(modes(0, 1), &[]).0, Decision::Failed);
    }

    #[test]
    fn who_said_nothing_failed() {
        let first = Slot::new(0).unwrap();
        let (result, faulted) = decide(modes(2, 0), &[(first, Said::Done)]);
        assert_eq!((result, faulted.len()), (Decision::Done, 1));
    }

    #[test]
    fn texts_are_upstreams() {
        for (text, said) in [
            ("snapshot volume-snap-a.img is already existing", Said::Exists),
            (
                "failed to snapshot replica x from remote: snapshot a b is already existing",
                Said::Exists,
            ),
            ("write volume-head-000.img: no space left on device", Said::NoSpace),
            ("is already existing", Said::Failed),
            ("too many active disks: 250", Said::Failed),
        ] {
            assert_eq!(Said::of_error(text), said, "{text}");
        }
    }
}
