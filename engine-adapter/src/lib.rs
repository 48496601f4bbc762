//! A Longhorn replica on a DBS store.
pub mod data;
pub mod proto;
pub mod wire;
