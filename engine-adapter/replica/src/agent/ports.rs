//! The ports on which files are received: few, known to a firewall, one for each file under way.

use dbs_core::{Error, ErrorKind, Result};
use dbs_frontend::ListenAddress;
use std::collections::HashSet;
use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where receivers may listen.
#[derive(Debug)]
pub enum ReceiverPorts {
    /// On this host, where the replica itself listens (all addresses if empty), ports of this range
    /// (both ends included), bound when they are needed.
    Range(String, u16, u16),
    /// On sockets that somebody else has bound, perhaps where this process cannot.
    Bound(Vec<TcpListener>),
}

/// The ports that are free.
#[derive(Debug)]
pub struct Ports {
    source: ReceiverPorts,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Index of the port to try first: a port rests after its use, so that who comes late for a
    /// file meets nobody instead of another file's receiver.
    next: usize,
    taken: HashSet<usize>,
}

/// A port in use, until it is dropped.
#[derive(Debug)]
pub struct Port {
    listener: TcpListener,
    number: u16,
    index: usize,
    owner: Arc<Ports>,
}

impl Ports {
    /// All free.
    #[must_use]
    pub fn new(source: ReceiverPorts) -> Arc<Self> {
        Arc::new(Self { source, state: Mutex::default() })
    }

    /// Takes a port and listens on it.
    ///
    /// # Errors
    /// `Busy` if all are taken, by files under way or by other processes.
    pub fn take(self: &Arc<Self>) -> Result<Port> {
        let count = match &self.source {
            ReceiverPorts::Range(_, first, last) => usize::from(last.saturating_sub(*first)) + 1,
            ReceiverPorts::Bound(listeners) => listeners.len(),
        };
        let mut state = self.state();
        let mut last = None;
        for step in 0..count {
            let index = (state.next + step) % count;
            if state.taken.contains(&index) {
                continue;
            }
            match self.listen(index) {
                Ok((listener, number)) => {
                    state.taken.insert(index);
                    state.next = (index + 1) % count;
                    drop(state);
                    return Ok(Port { listener, number, index, owner: Arc::clone(self) });
                }
                Err(error) => last = Some(error),
            }
        }
        let text = format!("out of ports: all {count} for receiving files are taken");
        Err(match last {
            Some(error) => Error::io(error, text),
            None => Error::new(ErrorKind::Busy, text),
        })
    }

    fn listen(&self, index: usize) -> io::Result<(TcpListener, u16)> {
        let listener = match &self.source {
            ReceiverPorts::Range(host, first, _) => {
                ListenAddress { host: host.clone(), port: *first + index as u16 }.bind()?
            }
            ReceiverPorts::Bound(listeners) => {
                let listener = listeners[index].try_clone()?;
                hang_up(&listener)?;
                listener
            }
        };
        let number = listener.local_addr()?.port();
        Ok((listener, number))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Turns away who came for what was received here before.
fn hang_up(listener: &TcpListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

impl Port {
    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// A socket that listens on it.
    ///
    /// # Errors
    /// `Io` if the process may open no more descriptors.
    pub fn listener(&self) -> Result<TcpListener> {
        let listener = self.listener.try_clone();
        listener.map_err(|e| Error::io(e, format!("listening on port {}", self.number)))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.owner.state().taken.remove(&self.index);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpStream;

    #[test]
    fn a_port_is_taken_once_and_rests_after_its_use() {
        let bound = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let numbers = bound.each_ref().map(|listener| listener.local_addr().unwrap().port());
        let ports = Ports::new(ReceiverPorts::Bound(bound.into()));
        let first = ports.take().unwrap();
        assert_eq!(first.number(), numbers[0]);
        drop(first);
        let taken = [(); 3].map(|()| ports.take().unwrap());
        assert_eq!(taken.each_ref().map(Port::number), [numbers[1], numbers[2], numbers[0]]);
        let error = ports.take().unwrap_err();
        assert!(error.to_string().contains("out of ports"), "{error}");
        let [_, _, last] = taken;
        drop(last);
        assert_eq!(ports.take().unwrap().number(), numbers[0]);
    }

    #[test]
    fn who_comes_late_is_turned_away() {
        let bound = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = bound.local_addr().unwrap();
        let ports = Ports::new(ReceiverPorts::Bound(vec![bound]));
        let mut late = TcpStream::connect(address).unwrap();
        let port = ports.take().unwrap();
        assert_eq!(late.read(&mut [0]).unwrap_or(0), 0);
        let _welcome = TcpStream::connect(address).unwrap();
        let listener = port.listener().unwrap();
        listener.set_nonblocking(false).unwrap();
        listener.accept().unwrap();
    }

    #[test]
    fn ports_of_others_are_passed_over() {
        // The range may be in use by others: any free one of it will do.
        let range = |first, last| Ports::new(ReceiverPorts::Range("localhost".into(), first, last));
        let other = range(41_000, 41_050).take().unwrap();
        let again = range(41_000, 41_050).take().unwrap();
        assert_ne!(again.number(), other.number());
        let taken = other.number();
        assert!(range(taken, taken).take().is_err());
        drop(other);
        assert_eq!(range(taken, taken).take().unwrap().number(), taken);
    }

    #[test]
    fn receivers_listen_where_the_replica_does_and_nowhere_else() {
        let port = Ports::new(ReceiverPorts::Range("127.0.0.1".into(), 41_051, 41_099)).take();
        let address = port.unwrap().listener().unwrap().local_addr().unwrap();
        assert!(address.ip().is_loopback(), "{address}");
    }
}
