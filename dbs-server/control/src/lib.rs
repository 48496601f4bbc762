//! The commands of a store, and the control socket over which they reach a store that a server owns.
//!
//! This crate owns the commands ([`api`]), what each of them does to a store, and both sides of the socket.
//!
//! Main types: [`api::Request`], a command; [`Client`], who sends it; [`Service`], who carries it out.
//!
//! Enter at [`api::execute`] for what a command does, at [`Server`] for the socket.
//!
//! # The socket
//!
//! A unix stream socket (mode 0600, so that only the server's user and root may talk, unless [`Access`]
//! says otherwise). Each side sends
//! JSON objects, one a line, no line longer than [`LINE_MAX_BYTES`]. For each
//! [`Request`](crate::api::Request) the server answers zero or more `progress` and `part` lines,
//! then one `result` or `error`:
//!
//! ```text
//! > {"method":"volume.flatten","params":{"volume":"demo"}}
//! < {"progress":{"done":3,"total":20}}
//! < {"result":{"name":"demo",...}}
//! > {"method":"volume.delete","params":{"volume":"other"}}
//! < {"error":{"kind":"not_found","message":"no volume other"}}
//! ```
//!
//! A result too long for a line comes as `part` lines, whose texts together are its JSON; the
//! `result` after them is null. A client that closes its connection, or its sending side, stops the
//! command that runs for it at the next safe point. The request `{"method":"nbd"}` is answered by
//! `{"result":null}`, and what follows that line is NBD, which the server begins; `nbd.fill` is the same for
//! who fills a volume that is rebuilding, which nobody else can open. `nbd.stored` and `nbd.fill_stored` show, and take,
//! the blocks of encrypted volumes as they are stored: for `dbs send` and `dbs receive`, which need no key. The request
//! `{"method":"store"}` is answered by `{"result":{"key":KEY}}`, which tells the store from every other
//! on the machine, copies of it included: clients ask before anything else. A program that serves a store
//! may offer further methods ([`Service::extra`]), which may take the connection
//! over in the same way.

pub mod api;
mod client;
mod line;
mod place;
mod server;
#[cfg(test)]
mod tests;

pub use client::{Client, Watch};
#[cfg(feature = "testing")]
pub use line::{read_line, send_result};
pub use place::{is_trusted, listening, runtime_dir, socket_path, store_key, store_place};
#[cfg(feature = "testing")]
pub use server::decode_request;
pub use server::{Access, Extra, Server, Service, Session};

use crate::api::Progress;
use dbs_core::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longest line either side sends or accepts, the newline included.
pub const LINE_MAX_BYTES: usize = 1 << 20;
/// Bytes of a result sent as one part; its text is quoted and escaped again, which may not bring it
/// over [`LINE_MAX_BYTES`].
const PART_BYTES: usize = 128 << 10;
/// The method that asks which store is served.
const STORE_METHOD: &str = "store";
/// The method that turns a connection into an NBD session.
const NBD_METHOD: &str = "nbd";
/// The same, to fill volumes that are incomplete.
const FILL_METHOD: &str = "nbd.fill";
/// The method for snapshots whose blocks are to be shown as they are stored.
const STORED_METHOD: &str = "nbd.stored";
/// The same as [`FILL_METHOD`], by who has blocks as they are stored.
const FILL_STORED_METHOD: &str = "nbd.fill_stored";

/// One line of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// How far the command is; more lines follow.
    Progress(Progress),
    /// A piece of a long result's JSON; more lines follow.
    Part(String),
    /// The command succeeded.
    Result(Value),
    /// The command failed.
    Error(Failure),
}

/// An error as it travels: on the control socket and, with `--json`, on the standard error output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// [`ErrorKind::name`].
    pub kind: String,
    /// For people.
    pub message: String,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        Self { kind: error.kind().name().to_owned(), message: error.to_string() }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::new(ErrorKind::from_name(&failure.kind), failure.message)
    }
}
