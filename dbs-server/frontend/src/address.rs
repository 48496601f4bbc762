//! Addresses as upstream's command line has them, and what is listened on for one of them.

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
    sockopt,
};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::str::FromStr;

/// `HOST:PORT`; without a host, all addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddress {
    /// Name or address; empty for all addresses.
    pub host: String,
    /// Port; 0 lets the system choose.
    pub port: u16,
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no address; write HOST:PORT or :PORT");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(wrong)?,
            None if host.contains(':') => return Err(wrong()),
            None => host,
        };
        Ok(Self { host: host.to_owned(), port: port.parse().map_err(|_| wrong())? })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl ListenAddress {
    /// The same host with a port so much higher.
    ///
    /// # Errors
    /// `InvalidInput` if there is no such port.
    pub fn plus(&self, count: u16) -> io::Result<Self> {
        let port = self.port.checked_add(count).ok_or_else(|| {
            let text = format!("port {} + {count} is beyond 65535", self.port);
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })?;
        Ok(Self { host: self.host.clone(), port })
    }

    /// Listens. All addresses means IPv6 and IPv4 where both are there.
    ///
    /// # Errors
    /// Names the address; `AddrInUse` if somebody listens there.
    pub fn bind(&self) -> io::Result<TcpListener> {
        self.reserve()?.listen()
    }

    /// Takes the address, and does not listen yet: who connects is refused.
    ///
    /// # Errors
    /// As [`ListenAddress::bind`].
    pub fn reserve(&self) -> io::Result<Reserved> {
        let addresses: io::Result<Vec<SocketAddr>> = if self.host.is_empty() {
            Ok(vec![
                (Ipv6Addr::UNSPECIFIED, self.port).into(),
                (Ipv4Addr::UNSPECIFIED, self.port).into(),
            ])
        } else {
            (self.host.as_str(), self.port).to_socket_addrs().map(|found| {
                let mut found: Vec<_> = found.collect();
                // A name such as localhost: the address most clients try first here.
                found.sort_by_key(SocketAddr::is_ipv6);
                found
            })
        };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in addresses.map_err(|e| self.named(&e))? {
            match bind_one(address) {
                Ok(fd) => return Ok(Reserved { fd, address: self.clone() }),
                // Somebody there is no reason to listen elsewhere.
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Err(self.named(&e)),
                Err(e) => last = e,
            }
        }
        Err(self.named(&last))
    }

    fn named(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("cannot listen on {self}: {error}"))
    }
}

/// An address that nobody else can listen on, and that is not listened on yet.
#[derive(Debug)]
pub struct Reserved {
    fd: OwnedFd,
    address: ListenAddress,
}

impl Reserved {
    /// Listens.
    ///
    /// # Errors
    /// Names the address; `AddrInUse` if somebody has reserved it at the same time.
    pub fn listen(self) -> io::Result<TcpListener> {
        // As many waiting connections as the kernel allows; musl thinks that is only 128.
        let listening = listen(&self.fd, Backlog::MAXALLOWABLE);
        listening.map_err(|e| self.address.named(&e.into()))?;
        Ok(TcpListener::from(self.fd))
    }
}

fn bind_one(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // The port is free at once for whoever comes after us.
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        match setsockopt(&fd, sockopt::Ipv6V6Only, &false) {
            // Then IPv4 stays without.
            Ok(()) | Err(Errno::ENOPROTOOPT | Errno::EINVAL) => {}
            Err(e) => return Err(e.into()),
        }
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn addresses_parse_and_print() {
        for text in [":9502", "localhost:1", "127.0.0.1:0", "[::1]:2"] {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), text);
        }
        for text in ["", "9502", "a:", "a:b", "::1:2", "[::1:2", "a:65536"] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text}");
        }
        let last: ListenAddress = ":65535".parse().unwrap();
        assert!(last.plus(1).is_err());
    }

    #[test]
    fn all_addresses_are_reached_and_taken_ports_are_said() {
        let all: ListenAddress = ":0".parse().unwrap();
        let listener = all.bind().unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
        let taken = ListenAddress { host: String::new(), port }.bind().unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        assert!(taken.to_string().contains(&port.to_string()));
    }

    #[test]
    fn a_reserved_address_is_not_listened_on_yet() {
        let any: ListenAddress = "127.0.0.1:0".parse().unwrap();
        let listener = any.bind().unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = ListenAddress { host: "127.0.0.1".to_owned(), port };
        assert_eq!(address.reserve().unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        let reserved = address.reserve().unwrap();
        TcpStream::connect(("127.0.0.1", port)).unwrap_err();
        let _listener = reserved.listen().unwrap();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
    }
}
