//! Other replicas and their sync agents: where they are, and how they are called.

use crate::transport::{self, Line};
use dbs_core::{Error, ErrorKind, Result};
use dbs_frontend::Listen;
use hyper_util::rt::TokioIo;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, ConnectError, Request, Status};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a call may take that has nothing to move.
pub const SHORT_CALL: Duration = Duration::from_secs(3 * 60);
/// How long a call may take that moves data.
pub const LONG_CALL: Duration = Duration::from_secs(24 * 60 * 60);
/// After how long a silence during a call the server is asked whether it is there: upstream's hang up
/// on who asks more often than every five minutes.
const PING: Duration = Duration::from_secs(310);
/// How long it may take to answer that.
const PONG: Duration = Duration::from_secs(30);
/// From the port of a replica's control API to that of its sync agent.
const AGENT_PORT: u16 = 2;

/// Where a gRPC server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// Reads `tcp://host:port` or `host:port`.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn parse(text: &str) -> Result<Self> {
        let rest = text.strip_prefix("tcp://").unwrap_or(text);
        let parts = rest.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        match parts {
            Some((host, port)) if !host.is_empty() && port > 0 => {
                Ok(Self { host: bare_host(host).to_owned(), port })
            }
            _ => Err(Error::invalid(format!(
                "{text:?} is no address of a replica, `tcp://HOST:PORT`"
            ))),
        }
    }

    /// The name or address of the machine, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The sync agent of the replica that listens here.
    ///
    /// # Errors
    /// `Invalid` if there is no such port.
    pub fn agent(&self) -> Result<Self> {
        let port = self.port.checked_add(AGENT_PORT).ok_or_else(|| {
            Error::invalid(format!("{self} has no port for a sync agent {AGENT_PORT} above it"))
        })?;
        Ok(Self { host: self.host.clone(), port })
    }

    /// The data server of the replica that listens here, on the next port.
    ///
    /// # Errors
    /// `Invalid` if there is no such port.
    pub fn data(&self) -> Result<Listen> {
        let port = self.port.checked_add(1).ok_or_else(|| {
            Error::invalid(format!("{self} has no port for a data server above it"))
        })?;
        Ok(Listen::Tcp(self.host.clone(), port))
    }

    /// Begins a connection, which comes about with the first call.
    ///
    /// # Errors
    /// `Invalid` if the host is no host name.
    pub fn channel(&self) -> Result<Channel> {
        self.channel_with(PING, PONG)
    }

    fn channel_with(&self, ping: Duration, pong: Duration) -> Result<Channel> {
        let endpoint = Endpoint::from_shared(format!("http://{self}"))
            .map_err(|e| Error::invalid(format!("{self} cannot be connected to: {e}")))?;
        // The larger windows keep a long way full. The pings find what TCP's probes do not: a process
        // that hangs, and something else on its port, which says nothing.
        let endpoint = endpoint
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .tcp_keepalive(Some(Duration::from_secs(15)))
            .http2_keep_alive_interval(ping)
            .keep_alive_timeout(pong)
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(16 << 20);
        if transport::is_tls() {
            return Ok(endpoint.connect_with_connector_lazy(Dialler(self.clone())));
        }
        Ok(endpoint.connect_lazy())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Connects to an address with TLS, for a channel.
#[derive(Debug, Clone)]
struct Dialler(Address);

impl Service<Uri> for Dialler {
    type Response = TokioIo<Line>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Line>>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _uri: Uri) -> Self::Future {
        let Address { host, port } = self.0.clone();
        Box::pin(async move { transport::connect_to_stay(&host, port).await.map(TokioIo::new) })
    }
}

/// A host without scheme and brackets, as [`Address`] keeps it.
#[must_use]
pub fn bare_host(host: &str) -> &str {
    let host = host.strip_prefix("tcp://").unwrap_or(host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// A connection whose calls say which volume they mean.
pub type Calls = InterceptedService<Channel, Named>;

/// Connects to a server of a volume's replica.
///
/// # Errors
/// `Invalid` for an address or a name that cannot be used.
pub fn calls(address: &Address, volume: &str) -> Result<Calls> {
    calls_of(address, volume, "")
}

/// Connects to a server of this instance of a volume's replica or engine; an empty name is any.
///
/// # Errors
/// As [`calls`].
pub fn calls_of(address: &Address, volume: &str, instance: &str) -> Result<Calls> {
    let names = Named { volume: name(volume)?, instance: name(instance)? };
    Ok(InterceptedService::new(address.channel()?, names))
}

fn name(text: &str) -> Result<Option<MetadataValue<Ascii>>> {
    let unusable = |_| Error::invalid(format!("{text:?} cannot be sent as a name"));
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(unusable) }
}

/// Adds to each call whom it means.
#[derive(Debug, Clone)]
pub struct Named {
    volume: Option<MetadataValue<Ascii>>,
    instance: Option<MetadataValue<Ascii>>,
}

impl Interceptor for Named {
    fn call(&mut self, mut request: Request<()>) -> std::result::Result<Request<()>, Status> {
        for (key, name) in [("volume-name", &self.volume), ("instance-name", &self.instance)] {
            if let Some(name) = name {
                request.metadata_mut().insert(key, name.clone());
            }
        }
        Ok(request)
    }
}

/// A request that is given up after some time, also by the server.
pub fn within<T>(time: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(time);
    request
}

/// What a failed call means here, with what was being done.
#[must_use]
pub fn failed(status: &Status, what: &str) -> Error {
    Error::new(kind(status), format!("{what}: {}", text(status)))
}

/// The kind of a failed call.
#[must_use]
pub fn kind(status: &Status) -> ErrorKind {
    match status.code() {
        Code::NotFound => ErrorKind::NotFound,
        Code::InvalidArgument | Code::FailedPrecondition => ErrorKind::Invalid,
        Code::Aborted => ErrorKind::Busy,
        Code::ResourceExhausted => ErrorKind::NoSpace,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::DataLoss => ErrorKind::Damaged,
        _ => ErrorKind::Io,
    }
}

/// Whether a call failed because no connection came about: its server has not heard of it.
#[must_use]
pub fn was_never_sent(status: &Status) -> bool {
    let first = std::error::Error::source(status);
    std::iter::successors(first, |error| error.source()).any(|error| error.is::<ConnectError>())
}

/// What a status says, without its code; with what is below it where it says little itself.
#[must_use]
pub fn text(status: &Status) -> String {
    let mut text = status.message().to_owned();
    if text.is_empty() {
        text = status.code().description().to_owned();
    }
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::ptypes::replica_service_client::ReplicaServiceClient;

    #[test]
    fn addresses_come_with_or_without_a_scheme() {
        for (text, agent) in [
            ("tcp://10.1.2.3:10000", "10.1.2.3:10002"),
            ("localhost:1", "localhost:3"),
            ("tcp://[fd00::1]:9502", "[fd00::1]:9504"),
            ("[::1]:65533", "[::1]:65535"),
        ] {
            assert_eq!(Address::parse(text).unwrap().agent().unwrap().to_string(), agent);
        }
        for bad in ["", "host", "tcp://", "tcp://:1", "host:0", "host:99999", "host:x", "a:-1"] {
            assert_eq!(Address::parse(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad}");
        }
        assert!(Address::parse("h:65534").unwrap().agent().is_err());
        assert_eq!((bare_host("tcp://[::1]"), bare_host("10.0.0.1")), ("::1", "10.0.0.1"));
    }

    /// Something else has taken the port of a server: it accepts, and never says a word.
    #[tokio::test]
    async fn a_call_of_who_never_speaks_ends() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::parse(&silent.local_addr().unwrap().to_string()).unwrap();
        let soon = Duration::from_millis(50);
        let channel = address.channel_with(soon, soon).unwrap();
        let mut client = ReplicaServiceClient::new(channel);
        let call = client.replica_get(within(LONG_CALL, ()));
        let ended = tokio::time::timeout(SHORT_CALL, call).await;
        let status = ended.expect("it ends").unwrap_err();
        assert_eq!((kind(&status), was_never_sent(&status)), (ErrorKind::Io, false));
    }

    #[tokio::test]
    async fn a_call_that_finds_no_connection_was_never_sent() {
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let address = Address::parse(&gone.to_string()).unwrap();
        let mut client = ReplicaServiceClient::new(calls(&address, "v").unwrap());
        let status = client.replica_get(within(SHORT_CALL, ())).await.unwrap_err();
        assert!(was_never_sent(&status), "{status:?}");
    }
}
