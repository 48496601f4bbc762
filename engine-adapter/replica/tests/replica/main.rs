//! A replica without sockets: states, disks, data, hand-over, and a model that it is held against.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod control;
mod data;
mod disks;
mod handover;
mod incoming;
mod model;
mod restore;
mod states;
