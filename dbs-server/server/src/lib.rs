//! The process of `dbs serve`: NBD, block devices and the control socket on one store.
//!
//! This crate owns how these are started and stopped together ([`serve`]), the commands that only a server can carry
//! out, who uses the store ([`clients`]), what runs ([`jobs`]), all of it at a moment ([`top`]), and what a page asks ([`asked`]).
//!
//! Main types: [`serve::Serving`], a store that is being served; [`serve::ServeOptions`], how;
//! [`clients::Client`], who uses it.
//!
//! Enter at [`serve::Serving::start`].

pub mod asked;
pub mod clients;
pub mod jobs;
mod machines;
pub mod serve;
pub mod top;
mod used;
