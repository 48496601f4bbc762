//! Processes that serve replicas.
//!
//! A replica on a store of its own ([`own`]) is one process: it opens `volume.dbs` in the replica's
//! directory, and gives it up when a newer process of the same directory asks for it. A replica in
//! a store that a `longhorn serve` owns is served there ([`hosting`]), and the process that was started
//! for it only keeps the sockets' place ([`shim`]). Both serve a replica as [`served::Served`].
//!
//! | part | does |
//! |---|---|
//! | [`sockets`], [`fds`] | listening sockets, bound and passed on |
//! | [`options`] | what a replica is started with |
//! | [`file`](mod@file) | the store in the replica's directory, which grows |
//! | [`served`] | the servers of one replica |
//! | [`own`], [`owner`], [`handover`], [`guest`] | the process with a store of its own |
//! | [`hosting`], [`shim`], [`protocol`], [`registry`] | replicas in a shared store |
//! | [`guard`] | commands that may not change a served volume |

pub mod fds;
pub mod file;
pub mod guard;
pub mod guest;
pub mod handover;
pub mod hosted;
pub mod hosting;
pub mod options;
pub mod own;
pub mod owner;
pub mod protocol;
pub mod registry;
pub mod served;
mod sessions;
pub mod shim;
pub mod signals;
pub mod sockets;
