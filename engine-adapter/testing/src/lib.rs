//! The other side of a data connection, for the tests of the crates beside this one. No product uses it.
//!
//! This crate owns a client that asks for one thing at a time ([`client`]), and a load of many requests in flight
//! ([`load`]).
//!
//! Main types: [`DataClient`], the client; [`ClientError`], why a request of it failed; [`load::Load`], what to ask.
//!
//! Enter at [`DataClient::connect`].

pub mod client;
pub mod load;

pub use client::{ClientError, DataClient};
