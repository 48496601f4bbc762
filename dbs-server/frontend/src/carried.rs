//! Requests that a [`Carrier`](super::Carrier) on the same reactor carries out.
//!
//! Reads, writes and flushes go as they are. What has no bound, or no equal, is cut into [`Pieces`]: discards, and
//! zeros, which are written. A few of those are carried out at a time; nobody waits for what is left of them once
//! their user has gone.

use super::carry::{Action, Carry, FailureKind, Outcome};
use super::delayed::Fate;
use super::demand::{Answer, Demand, User};
use super::pieces::Pieces;
use dbs_reactor::{Buf, Buffers, Slab};
use nix::libc;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Requests that are cut into pieces, and carried out at a time.
const CUT_MAX: usize = 4;

/// The requests of a reactor, each under a ticket.
pub(super) struct Carried<T> {
    running: Slab<Running<T>>,
    /// Those of which something is to be handed to the carrier.
    due: VecDeque<u32>,
    /// How many are cut into pieces and have begun, and those that wait for one of these to end.
    cut: usize,
    waiting: VecDeque<u32>,
    ended: VecDeque<(T, Answer)>,
}

/// A request that has not ended.
struct Running<T> {
    user: Arc<User>,
    request: T,
    what: What,
}

/// What is left of it to be carried out.
enum What {
    Whole(Option<(Carry, Option<Buf>)>),
    Pieces(Pieces),
}

impl<T> Default for Carried<T> {
    fn default() -> Self {
        let (running, due, waiting) = (Slab::default(), VecDeque::new(), VecDeque::new());
        Self { running, due, cut: 0, waiting, ended: VecDeque::new() }
    }
}

impl<T: Copy> Carried<T> {
    /// Takes a request, whose parts [`Carried::next`] hands out.
    pub fn start(&mut self, user: &Arc<User>, request: T, demand: Demand, range: (u64, u64)) {
        let whole = |action, length, payload| {
            Some(What::Whole(Some((Carry { action, offset: range.0, length }, payload))))
        };
        let what = match demand {
            Demand::Flush => whole(Action::Flush, 0, None),
            Demand::Read => {
                u32::try_from(range.1).ok().and_then(|length| whole(Action::Read, length, None))
            }
            _ if user.read_only => return self.ended.push_back((request, failed(libc::EROFS))),
            Demand::Write(data, durable) => {
                let length = u32::try_from(data.len()).ok();
                length.and_then(|length| whole(Action::Write { durable }, length, Some(data)))
            }
            Demand::Discard(durable) => inside(user, range)
                .map(|()| What::Pieces(Pieces::discard(range.0, range.1, durable))),
            Demand::Zeroes(durable) | Demand::KeepZeroes(durable) => inside(user, range)
                .map(|()| What::Pieces(Pieces::zeroes(range.0, range.1, durable))),
        };
        match what {
            None => self.ended.push_back((request, failed(libc::EINVAL))),
            Some(What::Pieces(pieces)) if !pieces.has_more() => {
                self.ended.push_back((request, Answer::Done(Buf::empty())));
            }
            Some(what) => {
                let cut = matches!(what, What::Pieces(_));
                let number = self.running.insert(Running { user: Arc::clone(user), request, what });
                if cut && self.cut >= CUT_MAX {
                    return self.waiting.push_back(number);
                }
                self.cut += usize::from(cut);
                self.due.push_back(number);
            }
        }
    }

    /// What is to be carried out next, and its number.
    pub fn next(&mut self, buffers: &Buffers) -> Option<(Carry, Option<Buf>, u64)> {
        while let Some(number) = self.due.pop_front() {
            let Some(running) = self.running.get_mut(number) else { continue };
            match &mut running.what {
                What::Whole(whole) => {
                    let Some((carry, payload)) = whole.take() else { continue };
                    return Some((carry, payload, number.into()));
                }
                What::Pieces(_) if running.user.dropping.load(Ordering::Relaxed) => {
                    self.end(number, Answer::Dropped);
                }
                What::Pieces(pieces) => {
                    let Some(carry) = pieces.next() else { continue };
                    let payload = matches!(carry.action, Action::Write { .. }).then(|| {
                        let mut zeros = buffers.take(carry.length as usize);
                        zeros.fill(0);
                        zeros
                    });
                    return Some((carry, payload, number.into()));
                }
            }
        }
        None
    }

    /// Whether [`Carried::next`] has something to hand out, or to drop.
    pub fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// What was handed out under this number has ended.
    pub fn answered(&mut self, number: u64, outcome: Outcome) {
        let number = number as u32;
        let Some(running) = self.running.get(number) else { return };
        let answer = match (outcome, &running.what) {
            (Outcome::Failed(failure), _) => match (running.user.fate(), failure.kind) {
                // Whoever serves its user next is given it again, whether it was begun or not.
                (Fate::Drop, _) => Answer::Dropped,
                (_, FailureKind::NoSpace) => failed(libc::ENOSPC),
                (_, FailureKind::Invalid) => failed(libc::EINVAL),
                (_, FailureKind::Io) => failed(libc::EIO),
            },
            (_, What::Pieces(pieces)) if pieces.has_more() => return self.due.push_back(number),
            (Outcome::Data(data), _) => Answer::Done(data),
            (Outcome::Done(_), _) => Answer::Done(Buf::empty()),
        };
        self.end(number, answer);
    }

    /// What is to become of it while the limits of the volume delay it.
    pub fn fate(&self, number: u64) -> Fate {
        self.running.get(number as u32).map_or(Fate::Drop, |running| running.user.fate())
    }

    /// A request that has ended, as long as there is one.
    pub fn ended(&mut self) -> Option<(T, Answer)> {
        self.ended.pop_front()
    }

    fn end(&mut self, number: u32, answer: Answer) {
        let Some(Running { request, what, .. }) = self.running.remove(number) else { return };
        self.ended.push_back((request, answer));
        if matches!(what, What::Pieces(_)) {
            match self.waiting.pop_front() {
                Some(next) => self.due.push_back(next),
                None => self.cut -= 1,
            }
        }
    }
}

fn failed(errno: i32) -> Answer {
    Answer::Failed(errno)
}

/// Whether all of a range is in the disk: else nothing of it is done.
fn inside(user: &User, (offset, length): (u64, u64)) -> Option<()> {
    offset.checked_add(length).filter(|end| *end <= user.size()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::carry::Failure;
    use super::super::demand::{CarriedDisk, Disk};
    use super::*;
    use std::sync::atomic::AtomicBool;

    const SIZE: u64 = 8 << 20;

    struct Place {
        carried: Carried<u32>,
        user: Arc<User>,
        dropping: Arc<AtomicBool>,
        buffers: Buffers,
    }

    impl Place {
        fn new(read_only: bool) -> Self {
            let carried = CarriedDisk { size: Arc::new(|| SIZE), who: "a test".to_owned() };
            let (disk, dropping) = (Disk::Carried(Arc::new(carried)), Arc::<AtomicBool>::default());
            let user = User::new(disk, read_only, 1, Arc::default(), Arc::clone(&dropping));
            let buffers = Buffers::new(1 << 20).unwrap();
            Self { carried: Carried::default(), user, dropping, buffers }
        }

        fn start(&mut self, request: u32, demand: Demand, range: (u64, u64)) {
            self.carried.start(&Arc::clone(&self.user), request, demand, range);
        }

        fn next(&mut self) -> Option<(Carry, u64)> {
            let (carry, payload, number) = self.carried.next(&self.buffers)?;
            let zeros =
                |data: &Buf| data.len() == carry.length as usize && data.iter().all(|b| *b == 0);
            assert_eq!(payload.is_some(), matches!(carry.action, Action::Write { .. }));
            assert!(payload.as_ref().is_none_or(zeros));
            Some((carry, number))
        }

        fn done(&mut self, number: u64) {
            self.carried.answered(number, Outcome::Done(0));
        }

        /// The request that has ended, and its error number; -1 if it was dropped.
        fn ended(&mut self) -> Option<(u32, i32)> {
            self.carried.ended().map(|(request, answer)| match answer {
                Answer::Done(_) => (request, 0),
                Answer::Failed(errno) => (request, errno),
                Answer::Dropped => (request, -1),
            })
        }
    }

    #[test]
    fn what_is_long_goes_piece_by_piece_and_few_at_a_time() {
        let mut place = Place::new(false);
        for request in 0..6 {
            place.start(request, Demand::Zeroes(true), (u64::from(request) << 20, 2 << 20));
        }
        let mut numbers: Vec<u64> = (0..CUT_MAX).map(|_| place.next().unwrap().1).collect();
        assert!(place.next().is_none(), "the others wait");
        // A second piece and a flush, and then the next request.
        let first = numbers.remove(0);
        for action in [Action::Write { durable: false }, Action::Flush] {
            place.done(first);
            assert!(place.ended().is_none());
            assert_eq!(place.next().unwrap().0.action, action);
        }
        place.done(first);
        assert_eq!(place.ended(), Some((0, 0)));
        let (next, number) = place.next().unwrap();
        assert_eq!(next.offset, 4 << 20);
        // One that fails is over.
        let full = Failure::new(FailureKind::NoSpace, "full");
        place.carried.answered(number, Outcome::Failed(full));
        assert_eq!(place.ended(), Some((4, libc::ENOSPC)));
        assert_eq!(place.next().unwrap().0.offset, 5 << 20);
    }

    #[test]
    fn nothing_is_done_beyond_the_end_or_against_the_rights() {
        let mut place = Place::new(false);
        for (offset, length) in [(SIZE - 4096, 8192), (u64::MAX - 4095, 8192)] {
            place.start(1, Demand::Discard(false), (offset, length));
            assert_eq!(place.ended(), Some((1, libc::EINVAL)));
        }
        place.start(2, Demand::Discard(false), (SIZE, 0));
        assert_eq!((place.ended(), place.next()), (Some((2, 0)), None));
        let mut place = Place::new(true);
        place.start(3, Demand::Zeroes(false), (0, 4096));
        assert_eq!((place.ended(), place.next()), (Some((3, libc::EROFS)), None));
    }

    /// What is dropped is given to whoever serves the user next; it must not be answered as failed.
    #[test]
    fn what_a_user_leaves_is_dropped_and_not_failed() {
        let mut place = Place::new(false);
        place.start(1, Demand::Zeroes(false), (0, 4 << 20));
        place.start(2, Demand::Read, (0, 4096));
        let ((_, zeroes), (_, read)) = (place.next().unwrap(), place.next().unwrap());
        assert_eq!(place.carried.fate(read), Fate::Wait);
        place.dropping.store(true, Ordering::Relaxed);
        place.done(zeroes);
        assert!(place.next().is_none());
        assert_eq!(place.ended(), Some((1, -1)));
        place.user.ends_delays(true);
        assert_eq!(place.carried.fate(read), Fate::Drop);
        let gone = Failure::new(FailureKind::Io, "its client is gone");
        place.carried.answered(read, Outcome::Failed(gone));
        assert_eq!(place.ended(), Some((2, -1)));
    }
}
