//! What happens to a volume when something happens to its replicas: real processes, killed, stopped, full,
//! slow, cut off or talking nonsense, under I/O of which every read is checked.
//!
//! `REPLICA=stock LONGHORN_BIN=…` has upstream's replicas in place of ours where a scenario needs nothing that
//! only ours have.
#![allow(clippy::unwrap_used, missing_docs)]

/// For the support of processes.
const PROGRAM: &str = env!("CARGO_BIN_EXE_longhorn");
const REPLICA: [&str; 3] = ["--volume-name", "vol", "replica"];

#[path = "../process/support.rs"]
mod support;

mod lab;
mod load;
mod network;
mod proxy;

mod amid;
mod death;
mod hang;
mod links;
mod stream;
