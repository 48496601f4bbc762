//! The frontends of a volume: where its requests come from.
//!
//! - [`socket`]: the data connection as a server, which `tgtd` and its like connect to;
//! - [`null`]: a load generator on the reactors themselves, to measure everything behind it.
//!
//! Each is a [`Front`](dbs_server::frontend::Front) on every reactor of a
//! [`Path`](crate::controller::path::Path).

pub mod null;
pub mod socket;

pub use null::NullLoad;
pub use socket::{SocketFrontend, SocketOptions};
