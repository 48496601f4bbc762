//! One thread that serves sockets and files without ever waiting for one of them.
//!
//! A server implements [`Handler`]: methods that are called, one at a time and always on the same
//! thread, when something has happened. They start operations through [`Io`] and return; each
//! operation has a tag of the caller's choice and ends in exactly one call with that tag. Memory
//! is handed over when an operation starts and comes back when it ends, so none of it needs
//! `unsafe` outside this crate. [`spawn`] starts the thread; other threads talk to it through its
//! [`Remote`].
//!
//! ```
//! use dbs_reactor::{Batch, Handler, Io, Options, Socket};
//! use std::io::{Read, Write};
//! use std::os::unix::net::UnixStream;
//!
//! /// Answers whatever arrives with the same bytes.
//! #[derive(Default)]
//! struct Echo {
//!     socket: Option<Socket>,
//! }
//!
//! impl Handler for Echo {
//!     type Message = UnixStream;
//!
//!     fn message(&mut self, io: &mut Io, stream: UnixStream) {
//!         let socket = io.add_socket(stream.into());
//!         io.receive(socket, 1);
//!         self.socket = Some(socket);
//!     }
//!
//!     fn received(&mut self, io: &mut Io, tag: u64, data: std::io::Result<&[u8]>) {
//!         match (self.socket, data) {
//!             (Some(socket), Ok(data)) if !data.is_empty() => {
//!                 let mut batch = Batch::default();
//!                 batch.push(data);
//!                 io.send(socket, batch, tag);
//!             }
//!             _ => io.stop(),
//!         }
//!     }
//!
//!     fn sent(&mut self, io: &mut Io, tag: u64, _: Batch, result: std::io::Result<()>) {
//!         match (self.socket, result) {
//!             (Some(socket), Ok(())) => io.receive(socket, tag),
//!             _ => io.stop(),
//!         }
//!     }
//! }
//!
//! let (mut near, far) = UnixStream::pair()?;
//! let thread = dbs_reactor::spawn("echo", &Options::default(), |_, _| Echo::default())?;
//! thread.remote().send(far);
//! near.write_all(b"hello")?;
//! let mut answer = [0; 5];
//! near.read_exact(&mut answer)?;
//! assert_eq!(&answer, b"hello");
//! drop(near);
//! thread.join();
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! A reactor also serves the queues of block devices that the kernel makes for it: [`ublk`].
//!
//! The thread uses `io_uring` where the kernel allows it, else `epoll` and a few threads that
//! read and write files ([`Driver`]). What was measured to choose this shape, and these flags, is
//! in `docs/decisions/0007-reactor.md`.

mod batch;
mod buffer;
mod done;
mod epoll;
mod handler;
mod inherited;
mod memory;
mod shared;
#[cfg(feature = "simulated")]
mod simulated;
mod slab;
mod targets;
mod thread;
pub mod ublk;
mod uring;

pub use batch::Batch;
pub use buffer::{BUFFER_ALIGN, Buf, Buffers};
pub use handler::{Driver, Handler, Io, Options, has_hung_up};
pub use inherited::{inherited_sockets, output_was_closed};
pub use memory::give_memory_back;
pub use shared::{Payload, SharedBuf};
#[cfg(feature = "simulated")]
pub use simulated::{Clock, Left};
pub use slab::Slab;
pub use targets::{File, Segment, Socket, Watch};
#[cfg(feature = "testing")]
pub use thread::Local;
#[cfg(feature = "simulated")]
pub use thread::Simulation;
pub use thread::{Remote, Thread, spawn};
pub use uring::allowed as uring_allowed;
