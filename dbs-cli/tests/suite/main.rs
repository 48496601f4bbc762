//! The `dbs` program, run as its users run it. Each file says what of it.
//!
//! One program, as each of its own is linked with all that `dbs` is made of; what runs for as long as
//! one lets it (`kill`, `mount`) is apart.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

/// The other side of NVMe over TCP, which the tests of `dbs-nvme` drive.
#[allow(dead_code, reason = "they use more of it")]
#[path = "../../../dbs-server/nvme/tests/nvme/host.rs"]
mod nvme_host;
#[path = "../support/mod.rs"]
mod support;

mod arguments;
mod attach;
mod backing;
mod backup;
mod bench;
mod browser;
mod clients;
mod doctor;
mod documents;
mod encryption;
mod end_to_end;
mod export;
mod far;
mod filesystem;
mod filling;
mod guards;
mod inherited;
mod lazy;
mod names;
mod readme;
mod space;
mod top;
mod upgrade;
mod web;
