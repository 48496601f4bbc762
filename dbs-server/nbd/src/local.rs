//! A server of one connection that is driven step by step, for counting what that takes.

use super::export::Exports;
use super::options::ServerOptions;
use super::session::Session;
use super::shared::{Adopted, Message, Shared};
use super::transmission::Transmission;
use dbs_frontend::Pool;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// One connection on a reactor without a thread, and workers likewise: what it takes to serve it
/// can be counted, and is the same each time.
pub struct LocalServer {
    reactor: dbs_reactor::Local<Transmission>,
}

impl LocalServer {
    /// Serves a connection whose handshake has ended in `session`.
    ///
    /// # Errors
    /// The reactor cannot be had.
    pub fn new(
        exports: Arc<dyn Exports>,
        options: ServerOptions,
        session: Session,
        socket: UnixStream,
    ) -> io::Result<Self> {
        let shared = Shared::new(exports, options, Pool::start("nbd-worker", 0)?);
        let reactor = shared.options.reactor.clone();
        let mut reactor =
            dbs_reactor::Local::new(&reactor, |io, remote| Transmission::on(shared, io, remote))?;
        let (socket, received) = (socket.into(), Vec::new());
        let known = Arc::default();
        let adopted = Adopted { known, socket, session, tls: None, received };
        reactor.message(Message::Adopt(Box::new(adopted)));
        Ok(Self { reactor })
    }

    /// Waits until there is something to do, and does it.
    ///
    /// # Errors
    /// The reactor cannot wait.
    pub fn turn(&mut self) -> io::Result<()> {
        self.reactor.turn()
    }
}
