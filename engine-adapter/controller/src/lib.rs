//! The controller of a volume: what Longhorn calls its engine.
//!
//! This crate owns what is true of a volume over several replicas. [`rules`] decides and does nothing else;
//! [`volume`] owns the volume's state and drives its replicas; [`path`] moves data between frontends ([`frontend`])
//! and replicas; [`service`] is how a controller is talked to.
//!
//! Main types: [`volume::Controller`], the state of a volume; [`path::Path`], its data path;
//! [`rules::fan_out::FanOut`], one change on its way to all replicas.
//!
//! Enter at [`rules`] for what is promised, at [`path`] for a request's way, at [`volume`] for what a manager asks.

pub mod frontend;
pub mod path;
pub mod rules;
pub mod service;
pub mod volume;
