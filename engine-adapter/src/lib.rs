//! A Longhorn replica on a DBS store.
pub mod agent;
pub mod cli;
pub mod control;
pub mod data;
pub mod host;
pub mod image;
pub mod metrics;
pub mod proto;
pub mod replica;
pub mod ssync;
pub mod wire;
