//! Reading from a socket through an optional layer of TLS, with a time limit.

use dbs_frontend::Socket;
use dbs_frontend::tls::TlsStream;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::Instant;

/// Bytes read from a socket at once, so that pipelined options take one system call.
const INPUT_BYTES: usize = 16 << 10;

/// The receiving side of a connection in its handshake.
pub(crate) struct Input {
    socket: Arc<Socket>,
    /// Set when everything received is TLS.
    pub tls: Option<TlsStream>,
    /// Bytes from the socket not yet used: ciphertext if there is TLS.
    buffer: Vec<u8>,
    used: usize,
    filled: usize,
    deadline: Option<Instant>,
}

impl Input {
    pub fn new(socket: Arc<Socket>) -> Self {
        Self { socket, tls: None, buffer: vec![0; INPUT_BYTES], used: 0, filled: 0, deadline: None }
    }

    /// Reads fail with `TimedOut` after `deadline`; without one they wait for ever.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.deadline = deadline;
        if deadline.is_none() { self.socket.set_read_timeout(None) } else { Ok(()) }
    }

    /// Whether bytes are waiting that have not been asked for.
    pub fn has_buffered(&self) -> bool {
        self.used < self.filled
    }

    /// TLS, and the bytes from the socket that nobody has used.
    pub fn into_parts(mut self) -> (Option<TlsStream>, Vec<u8>) {
        self.buffer.truncate(self.filled);
        (self.tls, self.buffer.split_off(self.used))
    }

    /// Feeds TLS once more from the socket, without waiting for plaintext.
    pub fn feed_tls(&mut self) -> io::Result<()> {
        if self.used == self.filled && self.fill()? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(tls) = &mut self.tls {
            self.used += tls.open(&self.buffer[self.used..self.filled])?;
        }
        Ok(())
    }

    /// Reads and drops `count` bytes.
    pub fn skip(&mut self, count: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.take(count), &mut io::sink())?;
        if skipped == count { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn fill(&mut self) -> io::Result<usize> {
        let Self { socket, buffer, deadline, .. } = self;
        let count = read_socket(socket, *deadline, buffer)?;
        (self.used, self.filled) = (0, count);
        Ok(count)
    }
}

impl Read for Input {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(tls) = &mut self.tls {
            if let Some(count) = tls.read(out)? {
                return Ok(count);
            }
            if self.used == self.filled && self.fill()? == 0 {
                return Ok(0);
            }
            self.feed_tls()?;
        }
        if self.used == self.filled {
            if out.len() >= INPUT_BYTES {
                return read_socket(&self.socket, self.deadline, out);
            }
            self.fill()?;
        }
        let count = out.len().min(self.filled - self.used);
        out[..count].copy_from_slice(&self.buffer[self.used..self.used + count]);
        self.used += count;
        Ok(count)
    }
}

fn read_socket(socket: &Socket, deadline: Option<Instant>, out: &mut [u8]) -> io::Result<usize> {
    if let Some(deadline) = deadline {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
    }
    loop {
        let mut reader = socket;
        match reader.read(out) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            other => return other,
        }
    }
}
