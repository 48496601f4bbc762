//! The NBD server: the protocol, its drivers, hostile clients, the store behind it, and real clients.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod drivers;
mod hostile;
mod pure;
mod reconnect;
mod server;
mod store;
mod tools;
mod turns;
