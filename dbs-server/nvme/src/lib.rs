//! Volumes as NVMe namespaces: a target of NVMe over TCP, for the hosts of this machine, and those of
//! others that prove who they are.
//!
//! Each volume and each snapshot is a subsystem, called after its uuid, with one namespace. A host (Linux's `nvme-tcp`)
//! asks the discovery subsystem which there are, connects its admin queue, which makes a controller, and then each I/O
//! queue with a TCP connection of its own. The protocol is that of the NVM Express Base, NVM Command Set and TCP
//! Transport specifications.
//!
//! - `server.rs`, `shared.rs`: [`NvmeTcp`], where hosts connect, which subsystems there are, and who is connected;
//! - `connect.rs`, `auth.rs`, `keys.rs`: the beginning of a connection, on a thread of its own, where a host proves who it is;
//! - `controller.rs`, `registers.rs`: the state that the queues of a host share: properties, keep-alive, events;
//! - `target.rs`, `queue.rs`, `message.rs`: the queues of one reactor; [`dbs_frontend::Requests`] carries their requests out;
//! - `admin.rs`, `identify.rs`: what admin commands are answered with;
//! - `command.rs`, `wire.rs`: commands and PDUs: bytes to types and back, none of which is believed.
//!
//! Enter at [`NvmeTcp::start`].

mod admin;
mod auth;
mod command;
mod connect;
mod controller;
mod identify;
mod keys;
mod message;
mod queue;
mod registers;
mod server;
mod shared;
mod target;
mod wire;

pub use controller::ClientInfo;
pub use keys::{Keys, NvmeOptions};
pub use server::{HostedNvme, NvmeTcp};
