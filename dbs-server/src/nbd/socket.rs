//! A connected socket, and reading from it through an optional layer of TLS.

use super::tls::TlsStream;
use nix::sys::socket::{MsgFlags, send, setsockopt, sockopt};
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes read from a socket at once, so that pipelined options take one system call.
const INPUT_BYTES: usize = 16 << 10;
/// What the kernel may hold of replies: with its default of 208 KiB, a batch of replies or a reply
/// of 1 MiB stops and starts as the client reads.
const SEND_BUFFER_BYTES: usize = 1 << 20;
/// Seconds of silence, between probes, and the probes a dead TCP peer may miss.
const KEEPALIVE: (u32, u32, u32) = (60, 10, 6);

/// A connected socket. Reading, writing and shutting down may happen in different threads.
#[derive(Debug)]
pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    /// Sets what a connection needs: room for replies, no delay, and probes that find dead peers.
    pub fn tune(&self) -> io::Result<()> {
        // As much as the system lets this process have, beyond its usual limit where it may.
        let size = SEND_BUFFER_BYTES;
        if setsockopt(&self.as_fd(), sockopt::SndBufForce, &size).is_err() {
            setsockopt(&self.as_fd(), sockopt::SndBuf, &size)?;
        }
        if let Self::Tcp(stream) = self {
            let (idle, interval, count) = KEEPALIVE;
            stream.set_nodelay(true)?;
            setsockopt(stream, sockopt::KeepAlive, &true)?;
            setsockopt(stream, sockopt::TcpKeepIdle, &idle)?;
            setsockopt(stream, sockopt::TcpKeepInterval, &interval)?;
            setsockopt(stream, sockopt::TcpKeepCount, &count)?;
        }
        Ok(())
    }

    pub fn shutdown(&self, how: Shutdown) {
        // Fails only where the peer was faster.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(how),
            Self::Tcp(stream) => stream.shutdown(how),
        };
    }

    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(timeout),
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
        }
    }

    pub fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_write_timeout(Some(timeout)),
            Self::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
        }
    }

    /// Sends all of `bytes`, each piece within the write timeout.
    pub fn send_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match send(self.as_fd().as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL) {
                Err(nix::errno::Errno::EINTR) => {}
                sent => bytes = &bytes[sent?..],
            }
        }
        Ok(())
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        match socket {
            Socket::Unix(stream) => stream.into(),
            Socket::Tcp(stream) => stream.into(),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => (&*stream).read(buf),
            Socket::Tcp(stream) => (&*stream).read(buf),
        }
    }
}

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
