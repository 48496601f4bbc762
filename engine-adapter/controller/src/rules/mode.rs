//! Modes of replicas, and sets of replicas that fit a register.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most replicas a volume has.
pub const REPLICAS_MAX: usize = 64;

/// A replica as long as the volume knows it: never given to another.
pub type ReplicaId = u32;

/// What a replica is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It is being rebuilt: changes go to it, nothing is read from it.
    Wo,
    /// It is complete.
    Rw,
    /// It missed something. It stays so until it is removed.
    Err,
}

impl Mode {
    /// As upstream spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Wo => "WO",
            Self::Rw => "RW",
            Self::Err => "ERR",
        }
    }

    /// The number in `ptypes.ReplicaMode`.
    #[must_use]
    pub const fn number(self) -> i32 {
        match self {
            Self::Wo => 0,
            Self::Rw => 1,
            Self::Err => 2,
        }
    }

    /// The mode with this number in `ptypes.ReplicaMode`.
    #[must_use]
    pub const fn from_number(number: i32) -> Option<Self> {
        match number {
            0 => Some(Self::Wo),
            1 => Some(Self::Rw),
            2 => Some(Self::Err),
            _ => None,
        }
    }

    /// Whether changes of the volume go to it.
    #[must_use]
    pub const fn is_written(self) -> bool {
        matches!(self, Self::Wo | Self::Rw)
    }

    /// Whether a replica may go from this mode to that one. Nothing leads out of `ERR`, and a complete
    /// replica does not become one that is rebuilt.
    #[must_use]
    pub const fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Err, _) | (Self::Rw, Self::Wo) => false,
            (Self::Rw, Self::Rw | Self::Err) | (Self::Wo, _) => true,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The place of a replica in a [`Slots`], below [`REPLICAS_MAX`]. It may be given to another replica
/// when no request that went to the first is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u8);

impl Slot {
    /// The slot with this index.
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        u8::try_from(index).ok().filter(|index| usize::from(*index) < REPLICAS_MAX).map(Self)
    }

    /// Its index, below [`REPLICAS_MAX`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of replicas.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Slots(u64);

impl Slots {
    /// None.
    pub const EMPTY: Self = Self(0);

    /// The set of this one.
    #[must_use]
    pub const fn of(slot: Slot) -> Self {
        Self(1 << slot.0)
    }

    /// The set with these bits.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// A bit for each member.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether it is a member.
    #[must_use]
    pub const fn contains(self, slot: Slot) -> bool {
        self.0 & (1 << slot.0) != 0
    }

    /// Whether there is no member.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of members.
    #[must_use]
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// With this one.
    #[must_use]
    pub const fn with(self, slot: Slot) -> Self {
        Self(self.0 | 1 << slot.0)
    }

    /// Members of either.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Members of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Members that are not of the other.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The first member.
    #[must_use]
    pub fn first(self) -> Option<Slot> {
        (self.0 != 0).then(|| Slot(self.0.trailing_zeros() as u8))
    }

    /// The first member behind the slot with this index, from the beginning again at the end.
    #[must_use]
    pub fn next_after(self, index: usize) -> Option<Slot> {
        let behind = match u32::try_from(index + 1) {
            Ok(shift) if shift < u64::BITS => Self(self.0 & (u64::MAX << shift)),
            _ => Self::EMPTY,
        };
        behind.first().or_else(|| self.first())
    }

    /// Its members, in order.
    pub fn iter(self) -> impl Iterator<Item = Slot> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let first = Self(rest).first()?;
            rest &= rest - 1;
            Some(first)
        })
    }
}

impl FromIterator<Slot> for Slots {
    fn from_iter<T: IntoIterator<Item = Slot>>(slots: T) -> Self {
        slots.into_iter().fold(Self::EMPTY, Self::with)
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Slot::index)).finish()
    }
}

/// Which replicas are in which mode at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Modes {
    /// Those in [`Mode::Rw`].
    pub rw: Slots,
    /// Those in [`Mode::Wo`].
    pub wo: Slots,
}

impl Modes {
    /// Those that changes go to.
    #[must_use]
    pub const fn written(self) -> Slots {
        self.rw.or(self.wo)
    }

    /// Whether without this one there is nothing to go on with: one that is being rebuilt serves nobody.
    #[must_use]
    pub fn is_last(self, slot: Slot) -> bool {
        let others = if self.rw.is_empty() { self.wo } else { self.rw };
        others.without(Slots::of(slot)).is_empty()
    }

    /// Those that reads go to.
    #[must_use]
    pub fn read(self) -> Slots {
        if super::sabotage::is(super::sabotage::Bug::ReadFromWo) {
            return self.written();
        }
        self.rw
    }

    /// Whether one is being rebuilt.
    #[must_use]
    pub const fn is_rebuilding(self) -> bool {
        !self.wo.is_empty()
    }
}

/// The modes as all threads of a data path see them.
///
/// A replica that became `ERR` is in no [`Modes`] taken afterwards, on any thread. So whoever sees it
/// fail calls [`Self::fault`], and then acknowledges.
#[derive(Debug, Default)]
pub struct SharedModes {
    rw: AtomicU64,
    wo: AtomicU64,
    err: AtomicU64,
}

impl SharedModes {
    /// The modes now.
    #[must_use]
    pub fn now(&self) -> Modes {
        self.now_amid(|| {})
    }

    /// The modes now; `between` is what may happen between one look and the next.
    ///
    /// A replica goes from `WO` to `RW`, never back, and [`Self::set`] gives it the new mode before it
    /// takes the old one. Seen in this order it is in one of both at any time.
    fn now_amid(&self, mut between: impl FnMut()) -> Modes {
        let wo = self.wo.load(Ordering::SeqCst);
        between();
        let rw = self.rw.load(Ordering::SeqCst);
        between();
        let err = self.err.load(Ordering::SeqCst);
        Modes { rw: Slots::from_bits(rw & !err), wo: Slots::from_bits(wo & !rw & !err) }
    }

    /// Makes it `ERR`; says whether it was not before.
    pub fn fault(&self, slot: Slot) -> bool {
        let bit = Slots::of(slot).bits();
        let before = self.err.fetch_or(bit, Ordering::SeqCst);
        self.rw.fetch_and(!bit, Ordering::SeqCst);
        self.wo.fetch_and(!bit, Ordering::SeqCst);
        before & bit == 0
    }

    /// Sets the mode if it is not `ERR`; says whether the replica now has it.
    pub fn set(&self, slot: Slot, mode: Mode) -> bool {
        let bit = Slots::of(slot).bits();
        let (to, from) = match mode {
            Mode::Rw => (&self.rw, &self.wo),
            Mode::Wo => (&self.wo, &self.rw),
            Mode::Err => {
                self.fault(slot);
                return true;
            }
        };
        to.fetch_or(bit, Ordering::SeqCst);
        from.fetch_and(!bit, Ordering::SeqCst);
        // `now` leaves it out by its `err`; this only tidies up behind a fault in between.
        if self.err.load(Ordering::SeqCst) & bit != 0 {
            to.fetch_and(!bit, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Forgets the replica; nothing that went to it may be in flight.
    pub fn clear(&self, slot: Slot) {
        let bit = Slots::of(slot).bits();
        self.rw.fetch_and(!bit, Ordering::SeqCst);
        self.wo.fetch_and(!bit, Ordering::SeqCst);
        self.err.fetch_and(!bit, Ordering::SeqCst);
    }

    /// The replica's mode; `None` as long as it has none.
    #[must_use]
    pub fn of(&self, slot: Slot) -> Option<Mode> {
        let modes = self.now();
        let err = Slots::from_bits(self.err.load(Ordering::SeqCst));
        if err.contains(slot) {
            Some(Mode::Err)
        } else if modes.rw.contains(slot) {
            Some(Mode::Rw)
        } else {
            modes.wo.contains(slot).then_some(Mode::Wo)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(index: usize) -> Slot {
        Slot::new(index).unwrap()
    }

    #[test]
    fn err_is_final_and_a_complete_replica_is_not_rebuilt_in_place() {
        use Mode::{Err, Rw, Wo};
        let all = [Wo, Rw, Err];
        let allowed: Vec<_> = all
            .iter()
            .flat_map(|from| all.iter().map(move |to| (*from, *to)))
            .filter(|(from, to)| from.may_become(*to))
            .collect();
        assert_eq!(allowed, [(Wo, Wo), (Wo, Rw), (Wo, Err), (Rw, Rw), (Rw, Err)]);
        for mode in all {
            assert_eq!(Mode::from_number(mode.number()), Some(mode));
        }
        assert_eq!(Mode::from_number(3), None);
        assert_eq!(all.map(Mode::name), ["WO", "RW", "ERR"]);
    }

    #[test]
    fn slots_are_sets_up_to_the_last_one() {
        assert!(Slot::new(REPLICAS_MAX).is_none());
        let set: Slots = [slot(0), slot(5), slot(63)].into_iter().collect();
        assert_eq!(set.len(), 3);
        assert_eq!(set.iter().map(Slot::index).collect::<Vec<_>>(), [0, 5, 63]);
        for (after, next) in [(0, 5), (4, 5), (5, 63), (62, 63), (63, 0), (200, 0)] {
            assert_eq!(set.next_after(after), Some(slot(next)), "{after}");
        }
        assert_eq!(Slots::EMPTY.next_after(3), None);
        assert_eq!(set.without(Slots::of(slot(5))).or(Slots::of(slot(1))).len(), 3);
    }

    #[test]
    fn a_fault_is_told_once_and_stays() {
        let modes = SharedModes::default();
        assert_eq!(modes.of(slot(3)), None);
        assert!(modes.set(slot(3), Mode::Wo) && modes.set(slot(4), Mode::Rw));
        assert_eq!(modes.now(), Modes { rw: Slots::of(slot(4)), wo: Slots::of(slot(3)) });
        assert!(modes.set(slot(3), Mode::Rw));
        assert_eq!(modes.of(slot(3)), Some(Mode::Rw));
        assert!(modes.fault(slot(3)));
        assert!(!modes.fault(slot(3)));
        assert!(!modes.set(slot(3), Mode::Rw));
        assert_eq!(modes.of(slot(3)), Some(Mode::Err));
        assert_eq!(modes.now().written(), Slots::of(slot(4)));
        modes.clear(slot(3));
        assert!(modes.set(slot(3), Mode::Wo));
    }

    /// A write that begins meanwhile would pass it by, and it would stay complete.
    #[test]
    fn a_replica_that_becomes_complete_is_in_a_mode_at_any_time() {
        for gap in 0..2 {
            let modes = SharedModes::default();
            modes.set(slot(1), Mode::Wo);
            let mut gaps = 0;
            let seen = modes.now_amid(|| {
                if gaps == gap {
                    modes.set(slot(1), Mode::Rw);
                }
                gaps += 1;
            });
            assert_eq!(gaps, 2);
            assert!(seen.written().contains(slot(1)), "promoted in gap {gap}: {seen:?}");
            assert_eq!(modes.now(), Modes { rw: Slots::of(slot(1)), wo: Slots::EMPTY });
        }
    }
}
