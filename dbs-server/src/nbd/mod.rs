//! NBD: volumes and snapshots served to any NBD client, over Unix sockets and TCP, with TLS.
//!
//! Three layers, of which only the last knows threads and sockets:
//! - [`wire`]: bytes to messages and back;
//! - [`handshake`] and [`session`]: what the server answers, for any [`Exports`];
//! - [`server`] accepts, `connection` is a handshake on its own thread, `transmission` and `peer`
//!   are many connections on a reactor, `pool` are the workers for what may block.
//!
//! [`client`] is the other side: a small blocking client.

pub mod client;
mod connection;
pub mod export;
pub mod handshake;
pub mod listen;
mod outgoing;
mod peer;
mod pool;
pub mod server;
pub mod session;
mod socket;
pub mod store_exports;
pub mod tls;
mod transmission;
pub mod uri;
pub mod wire;

pub use client::{Buffered, Client, ClientOptions, Pipeline};
pub use export::{BlockSizes, Export, Exports, Extent, Failure, ZeroOptions};
pub use listen::Listen;
#[doc(hidden)]
pub use server::LocalServer;
pub use server::{ClientInfo, ServerHandle, ServerOptions, start};
pub use store_exports::StoreExports;
pub use tls::TlsConfig;
pub use uri::NbdUri;
