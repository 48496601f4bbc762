//! How this process meets others over TCP: in plain text, as upstream does, or with TLS and certificates
//! on both sides.
//!
//! It is one choice for the whole process, made before it listens or connects anywhere: calls, data
//! connections and transfers of files all come by here, so that none can be forgotten. Unix sockets
//! are for this machine's owner and stay as they are.

mod handshakes;

use crate::log_limit::LogLimit;
use dbs_core::{Error, Result};
use dbs_frontend::Socket;
use dbs_frontend::tls::{
    CA_CERT, CLIENT, SERVER, TlsClient, TlsConfig, TlsSocket, TlsStream, server_name,
};
use dbs_service::log;
use handshakes::Handshakes;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Seconds of silence before probes find out whether a peer is dead.
const KEEPALIVE_S: u32 = 15;

/// Callers that are refused.
static REFUSALS: LogLimit = LogLimit::new();

/// The choice.
static CHOSEN: OnceLock<Transport> = OnceLock::new();

/// The certificates of this process and the authorities it trusts.
#[derive(Debug)]
pub struct Transport {
    /// None in a process that listens nowhere.
    server: Option<Server>,
    client: TlsClient,
    /// What certificates of servers are for, if not for the hosts of their addresses.
    name: Option<String>,
}

#[derive(Debug)]
struct Server {
    plain: TlsConfig,
    /// With what gRPC negotiates.
    grpc: Arc<ServerConfig>,
}

/// From now on TLS, with the certificates in this directory: `ca-cert.pem`, `client-cert.pem` and
/// `client-key.pem`, and if this process serves `server-cert.pem` and `server-key.pem`. Others must
/// have certificates of the same authority, the servers among them for `name`, or for the host of their
/// addresses.
///
/// # Errors
/// `Invalid`, with the file that cannot be used, or for a second choice.
pub fn choose_tls(dir: &Path, name: Option<&str>, serves: bool) -> Result<()> {
    let invalid = |e: io::Error| Error::invalid(e.to_string());
    let [ca, cert, key] = [CA_CERT, CLIENT.0, CLIENT.1].map(|file| dir.join(file));
    let client = TlsClient::load(&ca, Some((&cert, &key))).map_err(invalid)?;
    let server = if serves {
        let (cert, key) = (dir.join(SERVER.0), dir.join(SERVER.1));
        let plain = TlsConfig::load(&cert, &key, Some(&ca)).map_err(invalid)?;
        let mut grpc = ServerConfig::clone(plain.rustls());
        grpc.alpn_protocols = vec![b"h2".to_vec()];
        Some(Server { plain, grpc: Arc::new(grpc) })
    } else {
        None
    };
    let name = name.map(str::to_owned);
    let again = |_| Error::invalid("the certificates of this process have been chosen already");
    CHOSEN.set(Transport { server, client, name }).map_err(again)
}

/// Whether TLS was chosen.
#[must_use]
pub fn is_tls() -> bool {
    CHOSEN.get().is_some()
}

/// Sees that who hands sockets over to this process, and wants TLS on them, gets it.
///
/// # Errors
/// `Invalid` if this process was not told to.
pub fn check_wanted(tls: bool) -> Result<()> {
    if tls && !is_tls() {
        return Err(Error::invalid(
            "the server of the store speaks no TLS to replicas' peers: start `longhorn serve` with \
             --tls-dir",
        ));
    }
    Ok(())
}

impl Transport {
    fn server(&self) -> io::Result<&Server> {
        let missing = || io::Error::other("this process has no certificate of a server");
        self.server.as_ref().ok_or_else(missing)
    }

    /// The name that the certificate of a server there must be for.
    fn name_of<'a>(&'a self, host: &'a str) -> &'a str {
        self.name.as_deref().unwrap_or(host)
    }
}

/// What a reactor needs for a data connection that came over this socket: its end of TLS, if that was
/// chosen.
///
/// # Errors
/// This process has no certificate of a server.
pub fn data_server(socket: &Socket) -> io::Result<Option<TlsStream>> {
    match (CHOSEN.get(), socket) {
        (Some(chosen), Socket::Tcp(_)) => TlsStream::server(&chosen.server()?.plain).map(Some),
        _ => Ok(None),
    }
}

/// A data connection to others, before a reactor has it.
pub enum DataLink {
    /// As it is.
    Plain(Socket),
    /// With TLS, whose handshake is over.
    Secure(Box<TlsSocket>),
}

impl DataLink {
    /// Does the handshake with the server at `host`, if TLS was chosen. With TLS, nothing is received
    /// after the deadline.
    ///
    /// # Errors
    /// The socket's; the server is not who it should be.
    pub fn begin(socket: Socket, host: &str, deadline: Instant) -> io::Result<Self> {
        match (CHOSEN.get(), &socket) {
            (Some(chosen), Socket::Tcp(_)) => {
                let tls = TlsStream::client(&chosen.client, chosen.name_of(host))?;
                Ok(Self::Secure(Box::new(TlsSocket::handshake_by(socket, tls, deadline)?)))
            }
            _ => Ok(Self::Plain(socket)),
        }
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Secure(secure) => secure.socket(),
        }
    }

    /// What a reactor goes on with: the socket, TLS, and what was received already.
    #[must_use]
    pub fn into_parts(self) -> (Socket, Option<TlsStream>, Vec<u8>) {
        match self {
            Self::Plain(socket) => (socket, None, Vec::new()),
            Self::Secure(secure) => {
                let (socket, tls, received) = secure.into_parts();
                (socket, Some(tls), received)
            }
        }
    }
}

impl io::Read for DataLink {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => (&*socket).read(out),
            Self::Secure(secure) => secure.read(out),
        }
    }
}

impl io::Write for DataLink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.send_all(bytes).map(|()| bytes.len()),
            Self::Secure(secure) => secure.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Secure(secure) => secure.flush(),
        }
    }
}

/// A connection on the runtime.
pub enum Line {
    /// As it is.
    Plain(TcpStream),
    /// With TLS.
    Secure(Box<tokio_rustls::TlsStream<TcpStream>>),
}

/// Connects to the server at `host`.
///
/// # Errors
/// It cannot be reached, or is not who it should be.
pub async fn connect(host: &str, port: u16) -> io::Result<Line> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    let Some(chosen) = CHOSEN.get() else { return Ok(Line::Plain(stream)) };
    let connector = TlsConnector::from(Arc::clone(chosen.client.rustls()));
    let handshake = async {
        let name = server_name(chosen.name_of(host))?;
        timeout(HANDSHAKE, connector.connect(name, stream))
            .await
            .map_err(|_| io::ErrorKind::TimedOut)?
    };
    match handshake.await {
        Ok(secured) => Ok(Line::Secure(Box::new(secured.into()))),
        Err(error) => {
            // Callers tell no more than that a server is unavailable, as upstream's do.
            log::warn("tls", &[("server", &format!("{host}:{port}")), ("refused", &error)]);
            Err(error)
        }
    }
}

/// As [`connect`], and finds out when the other dies unseen.
pub async fn connect_to_stay(host: &str, port: u16) -> io::Result<Line> {
    use nix::sys::socket::{setsockopt, sockopt};
    let line = connect(host, port).await?;
    setsockopt(line.stream(), sockopt::KeepAlive, &true)?;
    setsockopt(line.stream(), sockopt::TcpKeepIdle, &KEEPALIVE_S)?;
    Ok(line)
}

/// Takes a connection for what is not gRPC; `None` if who came was refused, which is logged.
pub async fn accept(stream: TcpStream) -> Option<Line> {
    let Some(chosen) = CHOSEN.get() else { return Some(Line::Plain(stream)) };
    let config = chosen.server().map(|server| Arc::clone(server.plain.rustls()));
    secure(stream, config).await
}

async fn secure(stream: TcpStream, config: io::Result<Arc<ServerConfig>>) -> Option<Line> {
    let peer = stream.peer_addr().map_or_else(|e| e.to_string(), |peer| peer.to_string());
    let handshake = async {
        let accepting = TlsAcceptor::from(config?).accept(stream);
        timeout(HANDSHAKE, accepting).await.map_err(|_| io::ErrorKind::TimedOut)?
    };
    match handshake.await {
        Ok(secured) => Some(Line::Secure(Box::new(secured.into()))),
        Err(error) => {
            REFUSALS.warn("tls", &[("client", &peer), ("refused", &error)]);
            None
        }
    }
}

/// Connections as a gRPC server takes them.
pub type Incoming = Pin<Box<dyn Stream<Item = io::Result<Line>> + Send>>;

/// Makes gRPC's connections of those that come in. With TLS they are those whose handshake is over;
/// one that is slow holds up no other.
pub fn incoming(
    runtime: &Handle,
    accepted: impl Stream<Item = io::Result<TcpStream>> + Send + 'static,
) -> Incoming {
    let Some(chosen) = CHOSEN.get() else {
        return Box::pin(accepted.map(|stream| stream.map(Line::Plain)));
    };
    let (sender, secured) = mpsc::channel(1);
    let config = chosen.server().map(|server| Arc::clone(&server.grpc));
    runtime.spawn(async move {
        let mut accepted = std::pin::pin!(accepted);
        let handshakes = Arc::<Handshakes>::default();
        loop {
            let next = tokio::select! {
                next = accepted.next() => next,
                // The server ends: so does listening.
                () = sender.closed() => return,
            };
            let stream = match next {
                None => return,
                Some(Ok(stream)) => stream,
                Some(Err(error)) => {
                    // Who takes it is told; if nobody does, the next turn ends this.
                    let _gone = sender.send(Err(error)).await;
                    continue;
                }
            };
            let config = match &config {
                Ok(config) => Ok(Arc::clone(config)),
                Err(error) => Err(io::Error::other(error.to_string())),
            };
            let sender = sender.clone();
            let from = stream.peer_addr();
            let address = from.as_ref().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |from| from.ip());
            let mut place = handshakes.begin(address);
            tokio::spawn(async move {
                let line = tokio::select! {
                    line = secure(stream, config) => line,
                    () = place.displaced() => {
                        let peer = from.map_or_else(|e| e.to_string(), |from| from.to_string());
                        let why = "the client sent nothing, and its place was needed for others";
                        REFUSALS.warn("tls", &[("client", &peer), ("refused", &why)]);
                        None
                    }
                };
                drop(place);
                if let Some(line) = line {
                    let _gone = sender.send(Ok(line)).await;
                }
            });
        }
    });
    Box::pin(ReceiverStream::new(secured))
}

impl Line {
    fn stream(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Secure(secured) => secured.get_ref().0,
        }
    }
}

impl Connected for Line {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream().connect_info()
    }
}

impl AsyncRead for Line {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, out),
            Self::Secure(secured) => Pin::new(secured).poll_read(context, out),
        }
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Secure(secured) => Pin::new(secured).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(context, parts),
            Self::Secure(secured) => Pin::new(secured).poll_write_vectored(context, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Secure(secured) => secured.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Secure(secured) => Pin::new(secured).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Secure(secured) => Pin::new(secured).poll_shutdown(context),
        }
    }
}
