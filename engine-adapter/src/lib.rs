//! A Longhorn replica on a DBS store.
pub mod agent;
pub mod control;
pub mod data;
pub mod image;
pub mod proto;
pub mod replica;
pub mod ssync;
pub mod wire;
