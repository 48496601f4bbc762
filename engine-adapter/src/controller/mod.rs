//! The controller of a volume: what Longhorn calls its engine.
//!
//! [`rules`] decides and does nothing else; [`volume`] owns a volume's state and drives its replicas;
//! [`path`] moves data between frontends ([`frontend`]) and replicas; [`service`] is how a controller is
//! talked to, and [`client`] what steers a controller and its replicas from outside; [`process`] is all of it
//! as a program.

pub mod client;
pub mod frontend;
pub mod path;
pub mod process;
pub mod rules;
pub mod service;
pub mod volume;

#[cfg(test)]
mod sim;
