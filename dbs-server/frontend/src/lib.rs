//! What servers of block protocols on a reactor have in common, whatever their messages look like.
//!
//! This crate owns the way of a request from a socket to a volume, and of the reply back:
//!
//! - [`Listener`], [`Acceptor`] and [`Socket`]: where clients come in, and what their connections are
//!   set to;
//! - [`Peers`]: the connections of one reactor. Bytes become requests as their [`Protocol`] says,
//!   within the limits of what may be in flight; replies gather and go out together;
//! - [`Direct`]: reads and writes of volumes that the reactor does by itself;
//! - [`Requests`]: all that a client may ask of a volume, carried out by the reactor and its workers, or by a [`Carrier`]
//!   beside it: for block devices, virtual machines and hosts of NVMe;
//! - [`Disks`]: what there is to be used, and who may have it: one writer of each; [`Engine`]: the reactors of a frontend;
//! - [`Hosted`]: a frontend on [`Requests`] as a [`Front`];
//! - [`Front`] and [`Carrier`]: the seam between a protocol and what carries its requests out where
//!   that is no volume of this process; [`Pieces`] of what is too long to be carried at once;
//! - [`Commits`]: requests that wait for a commit, and share it; [`Flushing`]: commits that are a flush alone;
//! - [`Delayed`]: requests that wait, as the limits of their volume are used up;
//! - [`Pool`]: threads for what may block, which clients share step by step.
//!
//! Main types: [`Peers`], the connections of a reactor; [`Direct`], their reads and writes; [`Pool`], the workers.
//!
//! Enter at [`Peers`] for a server of volumes over sockets, at [`Requests`] for one over queues, at [`Front`] for a
//! protocol whose requests something else carries out.

mod accept;
mod address;
mod carried;
mod carry;
mod commits;
mod counts;
mod delayed;
mod demand;
mod direct;
mod disks;
mod engine;
mod flushing;
mod hosted;
mod latency;
mod listen;
#[cfg(feature = "testing")]
mod offline;
mod outgoing;
mod peer;
mod peers;
mod pieces;
mod pool;
mod requests;
mod socket;
mod stored;
pub mod tls;

pub use accept::{Acceptor, half_of_descriptors, raise_descriptors};
pub use address::{ListenAddress, Reserved};
pub use carry::{Action, Carrier, Carry, Failure, FailureKind, Front, Outcome};
pub use commits::Commits;
pub use counts::{Counted, Counts};
pub use dbs_reactor::{inherited_sockets, output_was_closed};
pub use delayed::{Delayed, Fate};
pub use demand::{Answer, CarriedDisk, Demand, Disk, User};
pub use direct::{Direct, Ended, Plan, Planned, Storage};
pub use disks::{Access, Applicant, DiskOptions, Disks, OneDisk, Opened, StoreDisks, Subject};
pub use engine::{Engine, Post, ToFront};
pub use flushing::{Flushing, Going};
pub use hosted::{Hosted, Serves};
pub use latency::{Latency, Times};
pub use listen::{Listen, Listener};
#[cfg(feature = "testing")]
pub use offline::Offline;
pub use peer::{Charge, HEADER_MAX_BYTES, Limits, Protocol, Ready};
pub use peers::{Event, Peers};
pub use pieces::{DISCARD_MAX_BYTES, Pieces, ZEROES_MAX_BYTES, piece};
pub use pool::{Pool, Work, lock, turns_of, wait_while};
pub use requests::Requests;
pub use socket::Socket;
pub use stored::{Deliver, Report};
