//! The command `longhorn`: what Longhorn's manager and instance manager start.
//!
//! This crate owns the command line ([`cli`]), the process of a controller ([`process`]), and what is done with a
//! volume from outside ([`client`]). Everything else is in the crates beside it: `longhorn-replica`,
//! `longhorn-controller`, and below both `longhorn-data`, `longhorn-sync` and `longhorn-wire`.
//!
//! Main types: [`cli::Cli`], the arguments; [`process::Process`], how a controller is to run; [`client::Engine`], a
//! controller as its clients see it.
//!
//! Enter at [`cli::main`].

pub mod cli;
pub mod client;
pub mod process;
