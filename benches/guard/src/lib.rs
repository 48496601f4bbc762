//! The hot path without a kernel under it: a device in memory, a connection without a socket, and
//! the requests that the guard counts.

pub mod cases;
pub mod connection;
pub mod memory;
