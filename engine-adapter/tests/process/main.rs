//! The command `longhorn` as processes: replicas, sync agents, the controller.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod agent;
mod controller;
mod handover;
mod life;
mod limits;
