//! The controller of a volume: what Longhorn calls its engine.
//!
//! [`rules`] decides and does nothing else.

pub mod rules;
