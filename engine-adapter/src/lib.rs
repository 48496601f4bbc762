//! A Longhorn replica on a DBS store, and the controller of a Longhorn volume.
pub mod agent;
pub mod cli;
pub mod control;
pub mod controller;
pub mod data;
pub mod host;
pub mod image;
pub mod metrics;
pub mod proto;
pub mod replica;
pub mod ssync;
pub mod wire;
