//! How many layers were looked at in one hold of the metadata, in debug builds. All requests wait for who holds them, so
//! a test bounds it: by a count, as time says nothing on a busy machine.

#[cfg(debug_assertions)]
use std::cell::Cell;

#[cfg(debug_assertions)]
thread_local! {
    /// In this hold of this thread, and the most in one.
    static LOOKS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// This thread begins to hold the metadata.
#[inline]
pub(crate) fn begin() {
    #[cfg(debug_assertions)]
    LOOKS.set((0, LOOKS.get().1));
}

/// It looks at a layer.
#[inline]
pub(crate) fn one() {
    #[cfg(debug_assertions)]
    {
        let (now, most) = LOOKS.get();
        LOOKS.set((now + 1, most.max(now + 1)));
    }
}

/// The most layers that this thread has looked at in one hold since it was asked last.
#[cfg(debug_assertions)]
#[must_use]
pub fn take_most() -> u64 {
    LOOKS.take().1
}
