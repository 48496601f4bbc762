//! What takes seconds: single commands, single bugs, damage without a crash. Each file says what.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod beside;
mod bit_rot;
mod crowded;
mod directed;
mod disk;
mod hooked;
mod intent;
mod machines;
mod ops;
mod paging;
mod regressions;
mod reopen;
mod requests;
mod revision;
mod ringed;
mod still;
