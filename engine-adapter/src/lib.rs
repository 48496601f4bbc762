//! A Longhorn replica on a DBS store.
pub mod data;
pub mod image;
pub mod proto;
pub mod ssync;
pub mod wire;
