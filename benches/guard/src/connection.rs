//! A connection without its socket: the bytes of a request in, the bytes of its reply out, by the
//! same steps as in `dbs_server::nbd`.

use dbs_core::Store;
use dbs_server::nbd::session::Session;
use dbs_server::nbd::wire::request::{Request, Style};
use dbs_server::nbd::{Exports, StoreExports};
use std::error::Error;

/// Bytes of a request's header.
pub const HEADER_BYTES: usize = Request::COMPACT_BYTES;
/// The headers that most clients ask for.
const STYLE: Style = Style::Structured;

/// A client's connection to one volume.
pub struct Connection {
    session: Session,
}

impl Connection {
    /// A connection to a volume of `store`.
    ///
    /// # Errors
    /// There is no such volume.
    pub fn new(store: &Store, volume: &str) -> Result<Self, Box<dyn Error>> {
        let export = StoreExports::new(store.clone(), false).open(volume)?;
        Ok(Self { session: Session::new(export, STYLE, vec!["base:allocation".to_owned()]) })
    }

    /// Answers a request; a write takes what it needs of `payload`. Returns the reply's length in
    /// bytes.
    ///
    /// # Errors
    /// Bytes that are no request.
    pub fn request(&self, header: &[u8], payload: &[u8]) -> Result<usize, Box<dyn Error>> {
        let request = Request::decode(STYLE, header)?;
        let admitted = self.session.admit(&request);
        let reply = self.session.run(&admitted, &payload[..admitted.payload_bytes]);
        Ok(reply.parts.iter().map(Vec::len).sum())
    }
}

/// The header of a request.
#[must_use]
pub fn header(command: u16, offset: u64, length: u64) -> [u8; HEADER_BYTES] {
    let request = Request { flags: 0, command, cookie: offset, offset, length };
    let mut bytes = [0; HEADER_BYTES];
    bytes.copy_from_slice(&request.encode(STYLE));
    bytes
}

/// Bytes of the reply to a request that succeeds, with so many bytes of data in one piece.
#[must_use]
pub fn reply_bytes(data: u64) -> u64 {
    const CHUNK_HEADER: u64 = 20;
    const OFFSET: u64 = 8;
    if data == 0 { CHUNK_HEADER } else { CHUNK_HEADER + OFFSET + data }
}
