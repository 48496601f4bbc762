//! The other side of a data connection, for the tests of the crates beside this one. No product uses it.
//!
//! Main types: [`DataClient`], the client; [`ClientError`], why a request of it failed.
//!
//! Enter at [`DataClient::connect`].

pub mod client;

pub use client::{ClientError, DataClient};
