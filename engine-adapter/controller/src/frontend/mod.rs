//! The frontends of a volume: where its requests come from.
//!
//! - [`socket`]: the data connection as a server, which `tgtd` and its like connect to;
//! - [`nbd`]: an export for any NBD client;
//! - [`ublk`]: a block device of this machine;
//! - [`vhost`]: the disk of a virtual machine of this machine;
//! - [`nvme`]: a disk for hosts of NVMe over TCP.
//!
//! Each is a [`Front`](dbs_frontend::Front) on every reactor of a
//! [`Path`].

pub mod nbd;
pub mod nvme;
pub mod socket;
pub mod ublk;
pub mod vhost;

pub use dbs_nvme::NvmeOptions;
pub use nbd::NbdFrontend;
pub use nvme::NvmeFrontend;
pub use socket::{SocketFrontend, SocketOptions};
pub use ublk::{UblkFrontend, UblkOptions};
pub use vhost::VhostFrontend;

use crate::path::Path;
use dbs_frontend::OneDisk;
use std::sync::{Arc, Weak};

/// The volume behind a path as a disk with a uuid.
fn disk(path: &Arc<Path>, name: &str, uuid: &str) -> OneDisk {
    let of: Weak<Path> = Arc::downgrade(path);
    OneDisk::new(name, uuid, move || of.upgrade().map_or(0, |path| path.size()))
}
