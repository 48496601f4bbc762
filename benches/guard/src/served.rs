//! Requests sent to the NBD server over a socket: reactor, connection, session and store, all on
//! this thread, so that the same happens each time.

use crate::{Outcome, Path, Request, Unavailable};
use dbs_core::Store;
use dbs_nbd::session::Session;
use dbs_nbd::wire::request::{Request as Header, Style};
use dbs_nbd::wire::{REQUEST_MAGIC, cmd};
use dbs_nbd::{Exports, LocalServer, Peer, ServerOptions, StoreExports};
use dbs_reactor::Driver;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// The headers that most clients ask for.
const STYLE: Style = Style::Structured;
/// Bytes of the header of a reply in chunks, and of the offset in front of data.
const CHUNK_BYTES: usize = 20;
const OFFSET_BYTES: usize = 8;
/// Where a chunk's type is.
const CHUNK_TYPE: usize = 6;

/// A connection to one volume, and both its ends.
pub struct Served {
    server: LocalServer,
    client: UnixStream,
    /// A header and the payload of a write.
    message: Vec<u8>,
    reply: Vec<u8>,
    length: u64,
}

impl Served {
    /// Requests of `length` bytes to a volume of `store`.
    ///
    /// # Errors
    /// There is no such volume, or no such driver here.
    pub fn new(store: &Store, volume: &str, length: u64) -> Outcome<Self> {
        let exports = Arc::new(StoreExports::new(store.clone(), false));
        let session = Session::new(
            exports.open(volume, &Peer::default())?,
            STYLE,
            vec!["base:allocation".to_owned()],
        );
        let (driver, spin) = (Driver::Uring, Duration::ZERO);
        let reactor = dbs_reactor::Options { driver, spin, ..Default::default() };
        let options = ServerOptions { reactor, ..ServerOptions::default() };
        let (client, server) = UnixStream::pair()?;
        client.set_nonblocking(true)?;
        let (message, reply) = (vec![2; Header::COMPACT_BYTES + length as usize], Vec::new());
        let server = LocalServer::new(exports, options, session, server)
            .map_err(|error| Unavailable(format!("no io_uring: {error}")))?;
        Ok(Self { server, client, message, reply, length })
    }

    /// Does what the server has to do until the client has received so many bytes.
    fn receive(&mut self, length: usize) -> Outcome<()> {
        self.reply.resize(length, 0);
        let mut received = 0;
        while received < length {
            received += client_receive(&self.client, &mut self.reply[received..])?;
            if received < length {
                self.server.turn()?;
            }
        }
        Ok(())
    }

    fn send(&mut self, length: usize) -> Outcome<()> {
        let mut sent = 0;
        while sent < length {
            sent += client_send(&self.client, &self.message[sent..length])?;
            if sent < length {
                self.server.turn()?;
            }
        }
        Ok(())
    }
}

impl Path for Served {
    fn request(&mut self, request: Request) -> Outcome<()> {
        let (command, offset, length) = match request {
            Request::Read(offset) => (cmd::READ, offset, self.length),
            Request::Write(offset) => (cmd::WRITE, offset, self.length),
            Request::Flush => (cmd::FLUSH, 0, 0),
        };
        client_header(&mut self.message, command, offset, length);
        let payload = if command == cmd::WRITE { length as usize } else { 0 };
        self.send(Header::COMPACT_BYTES + payload)?;
        if command != cmd::READ {
            self.receive(CHUNK_BYTES)?;
            return if self.reply[CHUNK_TYPE..][..2] == [0, 0] { Ok(()) } else { failed() };
        }
        self.receive(CHUNK_BYTES + OFFSET_BYTES + length as usize)?;
        let data = self.reply[CHUNK_TYPE..][..2] == [0, 1];
        if data && self.reply[CHUNK_BYTES + OFFSET_BYTES] != 0 { Ok(()) } else { failed() }
    }
}

fn failed() -> Outcome<()> {
    Err("the server's reply is not the one expected".into())
}

/// The client's own work, under names by which it is not counted. It allocates nothing.
#[inline(never)]
fn client_header(message: &mut [u8], command: u16, offset: u64, length: u64) {
    let cookie = offset;
    message[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    message[4..6].copy_from_slice(&0u16.to_be_bytes());
    message[6..8].copy_from_slice(&command.to_be_bytes());
    message[8..16].copy_from_slice(&cookie.to_be_bytes());
    message[16..24].copy_from_slice(&offset.to_be_bytes());
    message[24..28].copy_from_slice(&(length as u32).to_be_bytes());
}

/// As [`client_header`].
#[inline(never)]
fn client_send(mut client: &UnixStream, bytes: &[u8]) -> Outcome<usize> {
    some(client.write(bytes))
}

/// As [`client_header`].
#[inline(never)]
fn client_receive(mut client: &UnixStream, bytes: &mut [u8]) -> Outcome<usize> {
    some(client.read(bytes))
}

fn some(result: std::io::Result<usize>) -> Outcome<usize> {
    match result {
        Ok(0) => Err("the server has closed the connection".into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => Ok(other?),
    }
}
