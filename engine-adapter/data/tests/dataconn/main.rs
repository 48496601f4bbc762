//! Data connections: the protocol, I/O, and what a replica's state lets through.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod gate;
mod io;
mod lanes;
mod protocol;
