//! Connecting to a replica.

use super::local::LocalReplica;
use crate::wire::{HEADER_BYTES, Header, Hello, Type, feature};
use dbs_server::frontend::{Listen, Socket};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Longest answer to a greeting.
const ANSWER_MAX_BYTES: u32 = 4096;

/// Where the data of a replica is.
#[derive(Debug, Clone)]
pub enum BackendAddress {
    /// A data server, of ours or upstream's.
    Remote(Listen),
    /// In this process.
    Local(LocalReplica),
    /// Nowhere: writes are forgotten, reads give zeros. It measures everything else.
    Null,
}

/// Connections to a replica, and what is known of it.
pub(super) struct Dialled {
    pub sockets: Vec<Socket>,
    /// It is of DBS and can flush.
    pub flushes: bool,
    /// It runs on this machine.
    pub local: bool,
}

/// Connects so many times, and asks who that is. Each step has `timeout` at most.
///
/// # Errors
/// Names the address.
pub(super) fn dial(address: &Listen, connections: usize, timeout: Duration) -> io::Result<Dialled> {
    let connect = |_| {
        let socket = connect(address, timeout)?;
        socket.tune()?;
        Ok(socket)
    };
    let attempt = || {
        let sockets = (0..connections).map(connect).collect::<io::Result<Vec<_>>>()?;
        let first = sockets.first().ok_or(io::ErrorKind::InvalidInput)?;
        let flushes = greet(first, timeout)?;
        let local = is_local(first);
        Ok(Dialled { sockets, flushes, local })
    };
    attempt().map_err(|error: io::Error| {
        io::Error::new(error.kind(), format!("cannot connect to the replica at {address}: {error}"))
    })
}

fn connect(address: &Listen, timeout: Duration) -> io::Result<Socket> {
    let Listen::Tcp(host, port) = address else { return address.connect() };
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host.as_str(), *port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(Socket::Tcp(stream)),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Says hello: whether a replica of DBS answers that can flush. Upstream's sends the payload of a ping
/// back as it is, or an error if it is not open.
fn greet(socket: &Socket, timeout: Duration) -> io::Result<bool> {
    socket.set_read_timeout(Some(timeout))?;
    let hello = Hello::of_client().encode();
    let header = Header::with_payload(Type::Ping, 0, 0, hello.len() as u32);
    socket.send_all(&[header.encode().as_slice(), &hello].concat())?;
    let mut input = socket;
    let mut bytes = [0; HEADER_BYTES];
    let answered = input.read_exact(&mut bytes).and_then(|()| {
        let header = Header::decode(&bytes)?;
        if header.length > ANSWER_MAX_BYTES || header.sequence != 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no answer to a ping"));
        }
        let mut payload = vec![0; header.length as usize];
        input.read_exact(&mut payload)?;
        Ok((header, payload))
    });
    let (header, payload) = answered.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "it does not answer a ping")
        }
        _ => error,
    })?;
    socket.set_read_timeout(None)?;
    let hello = Hello::decode(&payload).filter(|hello| hello.server);
    let response = header.kind() == Some(Type::Response);
    Ok(response && hello.is_some_and(|hello| hello.features & feature::FLUSH != 0))
}

/// Whether the other end is on this machine: it has the address that this end has.
fn is_local(socket: &Socket) -> bool {
    let Socket::Tcp(stream) = socket else { return true };
    let address = |end: io::Result<SocketAddr>| end.ok().map(|address| address.ip());
    let ends: (Option<IpAddr>, _) = (address(stream.local_addr()), address(stream.peer_addr()));
    ends.0.is_some() && ends.0 == ends.1
}
