//! Volumes as block devices of this machine, through the kernel's `ublk` driver.
//!
//! This crate owns the devices of a store, from the first request of a queue to what a restarted server must know:
//!
//! - [`Queue`]: the protocol of one queue of a device: tags, requests, copying of data. It knows
//!   nothing of what carries requests out, so that any [`Handler`](dbs_reactor::Handler) can have
//!   some beside its sockets and files;
//! - [`Device`]: a device from its beginning to its end, or taken over from a server that died, with
//!   queues that whoever starts it supplies;
//! - `volume`: what carries out requests on a [`Volume`](dbs_core::Volume); `carried`: queues on reactors
//!   where something else does, as a [`Front`](dbs_frontend::Front);
//! - [`Devices`]: those of one store, with what the next server must know of them (`record`) and what keeps
//!   content from being taken from their users (`held`);
//! - [`preflight`]: what a machine lacks for all this.
//!
//! The kernel keeps a device whose server is gone: its users wait. The next server of the store
//! takes it over and is given again what the old one had not answered. So neither the death of a
//! server nor its replacement by a newer one is seen by a mounted file system, except as a pause.
//! A server never opens a block device itself, and so holds nothing that a user could wait for.
//!
//! Main types: [`Devices`], all devices of a store; [`Device`], one of them; [`Queue`], one of its queues.
//!
//! Enter at [`Devices`].

mod carried;
mod device;
mod devices;
mod held;
mod options;
pub mod preflight;
mod queue;
mod record;
mod volume;

pub use carried::{Deliver, carried_device, carried_front, carried_params, carried_spawner};
pub use device::{Device, Health, QueueStart, Running, Spawn, explain};
pub use devices::{Devices, remove_unserved};
pub use held::{check_unwritten, first_left, hold_waiting};
pub use options::{AttachOptions, QUEUES_MAX};
pub use queue::{Event, Queue};
pub use record::{Attached, LINKS, State, find, list};
pub use volume::serve_devices_from_here;
