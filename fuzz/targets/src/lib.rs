//! What the fuzzer calls: one function for each thing that reads bytes it cannot trust.
//!
//! Each takes any bytes and panics if something happens that must not; `fuzz/fuzz_targets` are shells
//! around them for libFuzzer, and `tests/corpus.rs` replays what is in `fuzz/corpus` and
//! `fuzz/regressions` within `cargo test`. `docs/testing.md` says how to run them.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a target fails by panicking")]

#[cfg(feature = "backup")]
mod backup;
#[cfg(feature = "server")]
mod control;
#[cfg(feature = "engine")]
mod dataconn;
mod disk;
mod exercise;
mod hostile;
mod image;
mod input;
mod journal;
#[cfg(feature = "server")]
mod nbd;
#[cfg(feature = "server")]
mod nbd_client;
#[cfg(feature = "server")]
mod nvme;
mod ops;
#[cfg(feature = "server")]
mod peers;
mod repair;
mod restore;
mod sample;
pub mod seeds;
#[cfg(feature = "engine")]
mod ssync;
#[cfg(feature = "server")]
mod stream;
mod v1;
#[cfg(feature = "server")]
mod vhost;

#[cfg(feature = "backup")]
pub use backup::backup;
#[cfg(feature = "server")]
pub use control::control;
#[cfg(feature = "engine")]
pub use dataconn::dataconn;
pub use image::image;
pub use journal::journal;
#[cfg(feature = "server")]
pub use nbd::nbd;
#[cfg(feature = "server")]
pub use nvme::nvme;
pub use ops::ops;
pub use repair::repair;
pub use restore::restore;
#[cfg(feature = "engine")]
pub use ssync::ssync;
#[cfg(feature = "server")]
pub use stream::stream;
pub use v1::v1;
#[cfg(feature = "server")]
pub use vhost::vhost;

/// A target.
pub type Target = fn(&[u8]);

/// All targets with their names, which are those of their corpora.
pub const TARGETS: &[(&str, Target)] = &[
    ("image", image),
    ("ops", ops),
    ("journal", journal),
    ("v1", v1),
    ("repair", repair),
    ("restore", restore),
    #[cfg(feature = "backup")]
    ("backup", backup),
    #[cfg(feature = "server")]
    ("nbd", nbd),
    #[cfg(feature = "server")]
    ("control", control),
    #[cfg(feature = "server")]
    ("stream", stream),
    #[cfg(feature = "server")]
    ("vhost", vhost),
    #[cfg(feature = "server")]
    ("nvme", nvme),
    #[cfg(feature = "engine")]
    ("dataconn", dataconn),
    #[cfg(feature = "engine")]
    ("ssync", ssync),
];
