//! The frontends of a volume: where its requests come from.
//!
//! - [`socket`]: the data connection as a server, which `tgtd` and its like connect to;
//! - [`nbd`]: an export for any NBD client;
//! - [`ublk`]: a block device of this machine.
//!
//! Each is a [`Front`](dbs_frontend::Front) on every reactor of a
//! [`Path`](crate::path::Path).

pub mod nbd;
pub mod socket;
pub mod ublk;

pub use nbd::NbdFrontend;
pub use socket::{SocketFrontend, SocketOptions};
pub use ublk::{UblkFrontend, UblkOptions};
