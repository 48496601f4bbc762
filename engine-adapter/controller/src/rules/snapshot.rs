//! What follows from a snapshot that was asked of all replicas.
//!
//! A replica that lacks a layer that others have becomes `ERR`, and so does one of which that is not
//! known. Where every complete replica says that it did nothing, because the name is taken, it is full, or
//! it cannot do what it is asked, nothing happened: nobody is to blame, but a replica being rebuilt that
//! did it. (Upstream spares those that had the name even if others took the snapshot; a name that means
//! different contents on two complete replicas is what must never be.)

use super::mode::{Modes, Slot, Slots};
use super::sabotage::{Bug, is};
use longhorn_wire::frame::NO_SPACE_TEXT;

/// How upstream's replicas refuse more snapshots than they may have.
const TOO_MANY: &str = "too many active disks";

/// What one replica said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// It has the snapshot.
    Done,
    /// It had one of this name before.
    Exists,
    /// It is full.
    NoSpace,
    /// It cannot do that, and did nothing.
    Refused,
    /// Anything else.
    Failed,
}

impl Said {
    /// What the text of an error says; `refused` if the status does that it is a refusal.
    #[must_use]
    pub fn of_error(text: &str, refused: bool) -> Self {
        let exists = text
            .find("snapshot ")
            .and_then(|at| text.get(at..))
            .is_some_and(|rest| rest.contains(" is already existing"));
        if exists {
            Self::Exists
        } else if text.contains(NO_SPACE_TEXT) {
            Self::NoSpace
        } else if refused || text.contains(TOO_MANY) {
            Self::Refused
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
    /// The complete replicas cannot do that; nothing happened.
    Refused,
    /// No replica is left.
    Failed,
}

/// What follows from what all replicas in these modes said, and who becomes `ERR`.
#[must_use]
pub fn decide(modes: Modes, said: &[(Slot, Said)]) -> (Decision, Slots) {
    if modes.rw.is_empty() {
        return (Decision::Failed, Slots::EMPTY);
    }
    let who = |what: Said| -> Slots {
        said.iter().filter(|(_, said)| *said == what).map(|(slot, _)| *slot).collect()
    };
    let (done, exists) = (who(Said::Done), who(Said::Exists));
    let (full, refused) = (who(Said::NoSpace), who(Said::Refused));
    let complete = |those: Slots| !those.and(modes.rw).is_empty();
    let (decision, well) = if complete(done) {
        (Decision::Done, done)
    } else if complete(full.or(refused)) {
        let decision = if complete(refused) { Decision::Refused } else { Decision::NoSpace };
        // Complete replicas of which only some had the name differ in a layer.
        (decision, full.or(refused).or(exists.without(modes.rw)))
    } else if complete(exists) {
        (Decision::Exists, exists.or(full).or(refused))
    } else {
        (Decision::Failed, done.or(full).or(refused))
    };
    if is(Bug::KeepWithoutSnapshot) {
        return (decision, Slots::EMPTY);
    }
    let well = if is(Bug::FaultRefusals) { well.without(refused) } else { well };
    (decision, modes.written().without(well))
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
        use Said::{Done, Exists, Failed, NoSpace, Refused};
        for (rw, said, result, faulted) in [
            (2, &[Done, Done, Done][..], Decision::Done, &[][..]),
            (2, &[Done, Failed], Decision::Done, &[1]),
            (2, &[Done, NoSpace], Decision::Done, &[1]),
            (2, &[Done, Refused, Refused], Decision::Done, &[1, 2]),
            (1, &[Done, Failed], Decision::Done, &[1]),
            (2, &[Failed, Failed], Decision::Failed, &[0, 1]),
            (2, &[Exists, Exists], Decision::Exists, &[]),
            (2, &[Exists, Done], Decision::Done, &[0]),
            (2, &[Exists, NoSpace], Decision::NoSpace, &[0]),
            (1, &[Exists, Refused], Decision::Exists, &[]),
            (2, &[NoSpace, NoSpace], Decision::NoSpace, &[]),
            // It took a snapshot that no complete one has.
            (2, &[NoSpace, NoSpace, Done], Decision::NoSpace, &[2]),
            (1, &[Exists, Done], Decision::Exists, &[1]),
        ] {
            assert_eq!(of(rw, said), (result, faulted.to_vec()), "{rw} {said:?}");
        }
        assert_eq!(decide(modes(0, 1), &[]).0, Decision::Failed);
    }

    #[test]
    fn nobody_is_to_blame_for_what_all_refuse() {
        use Said::{Done, Failed, NoSpace, Refused};
        for (rw, said, result, faulted) in [
            (1, &[Refused][..], Decision::Refused, &[][..]),
            (2, &[Refused, Refused], Decision::Refused, &[]),
            (2, &[Refused, NoSpace], Decision::Refused, &[]),
            (1, &[Refused, Refused], Decision::Refused, &[]),
            (1, &[NoSpace, NoSpace], Decision::NoSpace, &[]),
            // What has become of it, nobody knows.
            (2, &[Refused, Failed], Decision::Refused, &[1]),
            (1, &[Refused, Failed], Decision::Refused, &[1]),
            (1, &[Refused, Done], Decision::Refused, &[1]),
        ] {
            assert_eq!(of(rw, said), (result, faulted.to_vec()), "{rw} {said:?}");
        }
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
            ("too many active disks: 250", Said::Refused),
            ("No space left on device (os error 28)", Said::Failed),
        ] {
            assert_eq!(Said::of_error(text, false), said, "{text}");
            let refused = if said == Said::Failed { Said::Refused } else { said };
            assert_eq!(Said::of_error(text, true), refused, "{text}");
        }
    }
}
