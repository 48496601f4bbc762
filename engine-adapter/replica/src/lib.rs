//! A Longhorn replica: one volume of a store, served as Longhorn expects it.
//!
//! This crate owns a replica's state ([`replica`]), what happens between replicas and in the background of one
//! ([`agent`]: rebuilds, clones, purges, hashes), the processes that serve replicas ([`host`]), their [`metrics`], and
//! how a closed one comes from [`upstream`]'s files or becomes such.
//!
//! Main types: [`replica::Replica`], which all changes go through; [`agent::Agent`], the sync agent of one;
//! [`host::own::Running`], a replica with all its servers.
//!
//! Enter at [`replica::Replica`]; a process begins at [`host::own::run`].

pub mod agent;
pub mod host;
pub mod metrics;
pub mod replica;
pub mod upstream;
