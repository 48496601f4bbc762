//! The store through its public interface, on storage in memory. Each file says what of it.
//!
//! One program, as each of its own is linked with all of the store: what measures the process
//! (`allocations.rs`) or takes long (`damage`) is apart.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod adopt;
mod attributes;
mod backing;
mod checksum_faults;
mod checksums;
mod compress;
mod durability;
mod encryption;
mod examples;
mod extents;
mod full;
mod golden;
mod held;
mod layers;
// What it asserts is counted in debug builds alone.
#[cfg(debug_assertions)]
mod looks;
mod observer;
mod paging;
mod prune;
mod reader;
mod rebuild;
mod request;
mod rollback;
mod store;
mod trim;
