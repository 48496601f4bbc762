//! The frontend `nbd`: the volume as an export, on a unix socket or TCP, for any NBD client.

use crate::path::{Attached, Path};
use dbs_frontend::{Front, Listen};
use dbs_nbd::{Carried, OneExport, ServerHandle, ServerOptions, TlsConfig};
use dbs_reactor::Io;
use dbs_service::log;
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The frontend, running. Dropping it stops it.
pub struct NbdFrontend {
    server: Option<ServerHandle>,
    addresses: Vec<Listen>,
    attached: Option<Attached>,
    stop_grace: Duration,
}

impl NbdFrontend {
    /// Listens, and serves the volume behind a path as the export `name`. Each connection is on one
    /// reactor of the path. With TLS, for who comes over TCP.
    ///
    /// # Errors
    /// An address that cannot be listened on, or no thread.
    pub fn start(
        path: &Arc<Path>,
        name: &str,
        addresses: &[Listen],
        tls: Option<TlsConfig>,
    ) -> io::Result<Self> {
        let of: Weak<Path> = Arc::downgrade(path);
        let export = OneExport::new(name, move || of.upgrade().map_or(0, |path| path.size()));
        let log: dbs_nbd::Log = Arc::new(|line| log::warn("nbd", &[("what", &line)]));
        let tls = tls.map(TlsConfig::tcp_only);
        let options = ServerOptions { log: Some(log), tls, ..ServerOptions::default() };
        let stop_grace = options.stop_grace;
        let carried = Carried::new(Arc::new(export), options)?;
        let attached = path.attach(|_, _| {
            let front = carried.front();
            move |_: &mut Io, tags| -> Box<dyn Front> { front(tags) }
        })?;
        let to = Arc::clone(attached.to());
        let deliver = move |reactor: usize, message: Box<dyn Any + Send>| to(reactor, message);
        let server = carried.start(addresses, path.reactors(), deliver)?;
        let addresses = server.addresses().to_vec();
        Ok(Self { server: Some(server), addresses, attached: Some(attached), stop_grace })
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> &[Listen] {
        &self.addresses
    }

    /// Stops: no new connections and requests, those in flight are answered.
    pub fn stop(self) {}
}

impl fmt::Debug for NbdFrontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdFrontend").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Drop for NbdFrontend {
    fn drop(&mut self) {
        // The server waits for what its clients have under way.
        self.attached.iter().for_each(|attached| attached.ends_delays());
        if let Some(server) = self.server.take() {
            server.stop();
        }
        if let Some(attached) = self.attached.take() {
            attached.detach(self.stop_grace);
        }
    }
}
