//! A Longhorn replica on a DBS store.
pub mod proto;
