//! Limits and surroundings of a server.

use dbs_frontend::tls::TlsConfig;
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Reactors by default at most: more cores are the clients' and the device's.
const REACTORS_MAX: usize = 4;

/// Where the server tells what an operator may want to know.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// Limits and surroundings of a server.
#[derive(Clone)]
pub struct ServerOptions {
    /// Threads that serve connections, each its share of them.
    pub reactors: usize,
    /// How they do I/O.
    pub reactor: dbs_reactor::Options,
    /// Threads that execute what may block, for all connections together.
    pub workers: usize,
    /// Connections at once; more are refused.
    pub max_connections: usize,
    /// Time for each step of a handshake; where TLS must be, for all up to its start.
    pub handshake_timeout: Duration,
    /// How long a client may leave its replies unread before it is disconnected.
    pub write_timeout: Duration,
    /// How long clients may take to receive their last replies when the server stops.
    pub stop_grace: Duration,
    /// Requests of one connection in flight; beyond that it is not read from.
    pub requests_max: usize,
    /// Bytes of one connection in flight, likewise.
    pub bytes_max: u64,
    /// With it, clients must use TLS (handed-over connections need not).
    pub tls: Option<TlsConfig>,
    /// Receives one line for each thing that went wrong.
    pub log: Option<Log>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            reactors: thread::available_parallelism().map_or(1, |n| n.get().min(REACTORS_MAX)),
            reactor: dbs_reactor::Options::default(),
            workers: 16,
            max_connections: 1024,
            handshake_timeout: Duration::from_secs(10),
            write_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(5),
            requests_max: 1024,
            bytes_max: 64 << 20,
            tls: None,
            log: None,
        }
    }
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerOptions")
            .field("reactors", &self.reactors)
            .field("workers", &self.workers)
            .field("max_connections", &self.max_connections)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}
