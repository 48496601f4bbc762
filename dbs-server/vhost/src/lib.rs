//! Volumes as disks of virtual machines on this machine: vhost-user-blk.
//!
//! The process of a virtual machine (QEMU, cloud-hypervisor, crosvm) connects to the socket of a volume, shares the
//! memory of its guest, and says where in it the guest's queues are. From then on the guest's requests are taken right
//! out of that memory by a reactor of ours, carried out on its ring, and answered there: no kernel, no message and no
//! other process is between.
//!
//! - `server.rs`: [`VhostUser`], the sockets of a store, and its clients;
//! - `session.rs`, `message.rs`: what a client says, on a thread of its own that sleeps while the guest works;
//! - `queue.rs`: the queues of one reactor; [`dbs_frontend::Requests`] carries their requests out;
//! - `ring.rs`, `request.rs`, `memory.rs`: what is in guest memory, none of which is believed;
//! - `inflight.rs`: which requests are under way, for whoever serves the queue after this process.
//!
//! Enter at [`VhostUser::start`] for a store, at [`VhostUser::hosted`] for a volume that something else carries the requests
//! of out.

mod client;
mod disk;
mod inflight;
mod memory;
mod message;
mod queue;
mod request;
mod ring;
mod server;
mod session;

pub use client::ClientInfo;
pub use server::VhostUser;

use dbs_frontend::{Engine, Front, Hosted, Requests, ToFront};

/// The part of [`VhostUser::hosted`] on the reactor with this number, to be made there; its operations have `tags`.
#[must_use]
pub fn front(reactor: usize, tags: u64, to: &ToFront) -> Box<dyn Front> {
    Box::new(Hosted::new(queue::Queues::new(Requests::carried(), Engine::post(reactor, to), tags)))
}
