//! The controller of a volume: what Longhorn calls its engine.
//!
//! [`rules`] decides and does nothing else; [`path`] moves data between
//! frontends ([`frontend`]) and replicas.

pub mod frontend;
pub mod path;
pub mod rules;
