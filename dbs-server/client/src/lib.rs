//! A store wherever it is: opened in this process, or asked through the server that owns it.
//!
//! This crate owns that choice, so that commands, Python and transfers need not know of it.
//!
//! Main types: [`any_store::AnyStore`], a store wherever it is; [`remote::RemoteStore`], a store that a server owns;
//! `RemoteVolume`, one of its volumes.
//!
//! Enter at [`any_store::AnyStore::open`].

pub mod any_store;
pub mod remote;
