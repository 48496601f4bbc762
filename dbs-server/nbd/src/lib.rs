//! NBD: volumes and snapshots served to any NBD client, over Unix sockets and TCP, with TLS.
//!
//! This crate owns the protocol, both sides of it. Three layers, of which only the last knows threads and sockets:
//!
//! - [`wire`]: bytes to messages and back;
//! - [`handshake`] and [`session`]: what the server answers, for any [`Exports`];
//! - [`server`] accepts, `connection` is a handshake on its own thread, `transmission` are many
//!   connections on a reactor, made of the parts in [`dbs_frontend`]; [`Carried`] are connections on
//!   a reactor where something else than a store carries requests out.
//!
//! [`client`] is the other side: a small blocking client.
//!
//! Main types: [`session::Session`], what a client may ask for; [`ServerHandle`], a server that runs; [`Client`], the
//! other side.
//!
//! Enter at [`start`].

mod carried;
pub mod client;
mod connection;
pub mod export;
pub mod handshake;
mod input;
mod known;
#[cfg(feature = "testing")]
mod local;
mod options;
mod rules;
pub mod server;
pub mod session;
mod shared;
mod steps;
pub mod store_exports;
mod transmission;
pub mod uri;
pub mod wire;

pub use carried::{Carried, OneExport};
pub use client::{Buffered, Client, ClientOptions, Pipeline};
pub use dbs_frontend::tls::TlsConfig;
pub use dbs_frontend::{Listen, Listener};
pub use export::{BlockSizes, Export, Exports, Extent, Failure, Peer, ZeroOptions};
pub use known::ClientInfo;
#[cfg(feature = "testing")]
pub use local::LocalServer;
pub use options::{Log, ServerOptions};
pub use rules::{Access, ExportRule, ExportRules};
pub use server::{ServerHandle, start, start_listening};
pub use store_exports::StoreExports;
#[cfg(feature = "testing")]
pub use transmission::Client as OfflineClient;
pub use uri::NbdUri;
