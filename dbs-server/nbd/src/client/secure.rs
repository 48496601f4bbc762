//! TLS under a client.

use super::Client;
use crate::wire::{GREETING_BYTES, greeting, opt};
use dbs_frontend::Socket;
use dbs_frontend::tls::{TlsClient, TlsSocket, TlsStream};
use std::io::{self, Read, Write};

/// Bytes with which a client answers the greeting.
const ANSWER_BYTES: usize = 4;

/// A stream inside TLS. The server greets before TLS and not again, but whoever negotiates on a stream
/// waits for that first: so it is repeated here, and the answer to it kept.
pub struct Secure {
    stream: TlsSocket,
    greeting: io::Cursor<[u8; GREETING_BYTES]>,
    answered: usize,
}

impl Secure {
    /// Has the server on a fresh connection start TLS; it must be the one of this name.
    ///
    /// # Errors
    /// It refuses, it is not who it should be, or it does not accept who this is.
    pub fn start(socket: Socket, tls: &TlsClient, name: &str) -> io::Result<Self> {
        let stream = TlsStream::client(tls, name)?;
        // Nothing is read ahead here: what somebody put behind the answer is taken for TLS, and is none.
        Client::greet(&socket)?.option(opt::STARTTLS, &[])??;
        let stream = TlsSocket::handshake(socket, stream)?;
        Ok(Self { stream, greeting: io::Cursor::new(greeting()), answered: 0 })
    }
}

impl Read for Secure {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.greeting.read(out)? {
            0 if !out.is_empty() => self.stream.read(out),
            count => Ok(count),
        }
    }
}

impl Write for Secure {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.answered < ANSWER_BYTES && !bytes.is_empty() {
            let count = bytes.len().min(ANSWER_BYTES - self.answered);
            self.answered += count;
            return Ok(count);
        }
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
