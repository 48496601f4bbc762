//! A Longhorn replica on a DBS store, and the controller of a Longhorn volume.

// Unit tests share fake replicas with the tests outside, which know the crate by this name.
#[cfg(test)]
extern crate self as engine_adapter;

pub mod agent;
pub mod cli;
pub mod control;
pub mod controller;
pub mod data;
pub mod host;
pub mod image;
mod log_limit;
pub mod metrics;
pub mod proto;
pub mod replica;
pub mod ssync;
pub mod transport;
pub mod wire;
