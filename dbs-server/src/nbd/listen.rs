//! Where the server listens.

use super::socket::Socket;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};
use nix::sys::stat::{Mode, fchmod};
use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Connections that may wait to be accepted: clients that come by the hundred at once are not refused.
const BACKLOG: i32 = 1024;

/// An address to listen on: `unix:PATH`, `tcp:HOST:PORT`, or `tcp:PORT` for loopback only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket, for the owner of the process only.
    Unix(PathBuf),
    /// A host name or address, and a port (0 lets the system choose one).
    Tcp(String, u16),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no address to listen on; write unix:PATH, tcp:HOST:PORT or tcp:PORT"
            )
        };
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", address)) => {
                let (host, port) = address.rsplit_once(':').unwrap_or(("127.0.0.1", address));
                let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
                let port = port.parse().map_err(|_| wrong())?;
                if host.is_empty() { Err(wrong()) } else { Ok(Self::Tcp(host.to_owned(), port)) }
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
        }
    }
}

/// A listening socket. Dropping it removes its socket file.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix { listener: UnixListener, path: PathBuf, identity: (u64, u64) },
    Tcp(TcpListener),
}

impl Listener {
    /// # Errors
    /// Names the address; `AddrInUse` if somebody listens there.
    pub fn bind(address: &Listen) -> io::Result<Self> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
        };
        match address {
            Listen::Unix(path) => Self::bind_unix(path),
            Listen::Tcp(host, port) => Self::bind_tcp(host, *port),
        }
        .map_err(named)
    }

    fn bind_tcp(host: &str, port: u16) -> io::Result<Self> {
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
        let listener = TcpListener::bind(addresses.as_slice())?;
        listener.set_nonblocking(true)?;
        Ok(Self::Tcp(listener))
    }

    fn bind_unix(path: &Path) -> io::Result<Self> {
        remove_stale(path)?;
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        // Before the bind, so that at no time anybody else can connect.
        fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        listen(&fd, Backlog::new(BACKLOG)?)?;
        let listener = UnixListener::from(fd);
        listener.set_nonblocking(true)?;
        let metadata = fs::symlink_metadata(path)?;
        let identity = (metadata.dev(), metadata.ino());
        Ok(Self::Unix { listener, path: path.to_owned(), identity })
    }

    /// The address in use, with the port the system chose.
    pub fn address(&self) -> io::Result<Listen> {
        Ok(match self {
            Self::Unix { path, .. } => Listen::Unix(path.clone()),
            Self::Tcp(listener) => {
                let address = listener.local_addr()?;
                Listen::Tcp(address.ip().to_string(), address.port())
            }
        })
    }

    /// Accepts one connection and says who it is.
    ///
    /// # Errors
    /// `WouldBlock` if there is none.
    pub fn accept(&self) -> io::Result<(Socket, String)> {
        match self {
            Self::Unix { listener, path, .. } => {
                let (stream, _) = listener.accept()?;
                Ok((Socket::Unix(stream), format!("unix:{}", path.display())))
            }
            Self::Tcp(listener) => {
                let (stream, peer): (TcpStream, SocketAddr) = listener.accept()?;
                Ok((Socket::Tcp(stream), format!("tcp:{peer}")))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix { listener, .. } => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, identity, .. } = self
            && fs::symlink_metadata(&*path).is_ok_and(|m| (m.dev(), m.ino()) == *identity)
        {
            // If it stays, the next server replaces it.
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes a socket file that nobody listens on any more.
fn remove_stale(path: &Path) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !metadata.file_type().is_socket() {
        let message = "the path exists and is no socket; choose another or remove it";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_print() {
        for (text, printed) in [
            ("unix:/run/dbs.sock", "unix:/run/dbs.sock"),
            ("unix:a:b", "unix:a:b"),
            ("tcp:10809", "tcp:127.0.0.1:10809"),
            ("tcp:0.0.0.0:1", "tcp:0.0.0.0:1"),
            ("tcp:[::1]:2", "tcp:[::1]:2"),
            ("tcp:localhost:3", "tcp:localhost:3"),
        ] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), printed);
        }
        for text in ["", "unix:", "tcp:", "tcp:host:", "tcp::1", "tcp:99999", "udp:1", "10809"] {
            assert!(text.parse::<Listen>().is_err(), "{text}");
        }
    }

    #[test]
    fn socket_files_are_private_replaced_when_stale_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&Listen::Unix(path.clone())).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let refused = Listener::bind(&Listen::Unix(path.clone())).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());

        fs::write(&path, "precious").unwrap();
        assert!(Listener::bind(&Listen::Unix(path.clone())).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
