//! The data connection of a replica: reads, writes, unmaps and flushes, on reactors.
//!
//! This crate owns what happens between a replica's volume and whoever sends it requests:
//!
//! - [`gate`]: what a replica lets its connections do, and what they tell it;
//! - [`server`]: threads and sockets. `reactor` serves connections; [`request`] are their messages (the
//!   controller's frontend has the same);
//! - `lanes`: connections that a client makes anew when they break;
//! - [`plain`]: a plain file that requests work on, in place of a volume;
//! - [`runner`] carries requests out, on any reactor: that of connections, or of a controller with a
//!   replica in its process. `slot` is what it knows of a replica, `later` what waits, [`work`] what
//!   workers do for it;
//! - [`stats`]: what is counted.
//!
//! Main types: [`Gate`], set by the replica; [`DataServer`], the server; [`runner::Runner`], the requests of one
//! reactor.
//!
//! Enter at [`DataServer`].

mod events;
pub mod gate;
mod lanes;
mod later;
pub mod plain;
mod reactor;
pub mod request;
pub mod runner;
pub mod server;
mod shared;
mod slot;
pub mod stats;
mod ticket;
pub mod work;

pub use events::ActiveEvents;
pub use gate::{Access, Active, COMMIT_BYTES, Durability, Gate, Revision, Target, Wake};
pub use server::{DataServer, DataService};
pub use shared::DataOptions;
pub use stats::{DataStats, Kind, LATENCY_BOUNDS};

/// Clients that are refused, or break off.
static STRANGERS: longhorn_wire::log_limit::LogLimit = longhorn_wire::log_limit::LogLimit::new();
