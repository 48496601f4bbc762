//! A connected socket of either family.

use nix::sys::socket::{MsgFlags, getsockopt, send, setsockopt, sockopt};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What the kernel may hold of replies: with its default of 208 KiB, a batch of replies or a reply
/// of 1 MiB stops and starts as the client reads.
const SEND_BUFFER_BYTES: usize = 1 << 20;
/// Seconds of silence, between probes, and the probes a dead TCP peer may miss.
const KEEPALIVE: (u32, u32, u32) = (60, 10, 6);

/// A connected socket. Reading, writing and shutting down may happen in different threads.
#[derive(Debug)]
pub enum Socket {
    /// On this machine.
    Unix(UnixStream),
    /// Over the network.
    Tcp(TcpStream),
}

impl Socket {
    /// Sets what a connection needs: room for replies, no delay, and probes that find dead peers.
    ///
    /// # Errors
    /// The connection is gone.
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

    /// The process at the other end, where that is on this machine and can be seen.
    #[must_use]
    pub fn peer_process(&self) -> Option<u32> {
        let Self::Unix(stream) = self else { return None };
        let peer = getsockopt(stream, sockopt::PeerCredentials).ok()?;
        u32::try_from(peer.pid()).ok().filter(|process| *process > 0)
    }

    /// Ends it in one or both directions.
    pub fn shutdown(&self, how: Shutdown) {
        // Fails only where the peer was faster.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(how),
            Self::Tcp(stream) => stream.shutdown(how),
        };
    }

    /// How long a blocking read waits.
    ///
    /// # Errors
    /// A timeout of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(timeout),
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
        }
    }

    /// How long a blocking read waits; nothing if for ever.
    ///
    /// # Errors
    /// The system's.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        match self {
            Self::Unix(stream) => stream.read_timeout(),
            Self::Tcp(stream) => stream.read_timeout(),
        }
    }

    /// How long a blocking write waits.
    ///
    /// # Errors
    /// A timeout of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_write_timeout(timeout),
            Self::Tcp(stream) => stream.set_write_timeout(timeout),
        }
    }

    /// Sends all of `bytes`, each piece within the write timeout.
    ///
    /// # Errors
    /// The peer is gone, or takes nothing.
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

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send_all(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
