//! TLS of connections: rustls with certificates from PEM files.
//!
//! `TlsStream` transforms bytes in memory and knows no socket; `TlsSocket` is both, for who may block.

use super::socket::Socket;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whom to trust, in a directory of certificates.
pub const CA_CERT: &str = "ca-cert.pem";
/// A server's certificate chain and private key.
pub const SERVER: (&str, &str) = ("server-cert.pem", "server-key.pem");
/// A client's.
pub const CLIENT: (&str, &str) = ("client-cert.pem", "client-key.pem");
/// Ciphertext received at once by [`TlsSocket`].
const RECEIVE_BYTES: usize = 16 << 10;
/// How long all of a handshake of [`TlsSocket`] may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The server's certificate and whom it trusts.
#[derive(Debug, Clone)]
pub struct TlsConfig {
    config: Arc<ServerConfig>,
    tcp_only: bool,
}

impl TlsConfig {
    /// Loads PEM files: the server's certificate chain, its private key and, if clients must show
    /// a certificate, the authorities that sign theirs.
    ///
    /// # Errors
    /// Names the file that cannot be read or used.
    pub fn load(cert: &Path, key: &Path, ca: Option<&Path>) -> io::Result<Self> {
        let (chain, private) = identity(cert, key)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let builder = match ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider)
                        .build()
                        .map_err(|error| invalid(ca, &error))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config =
            builder.with_single_cert(chain, private).map_err(|error| invalid(cert, &error))?;
        Ok(Self { config: Arc::new(config), tcp_only: false })
    }

    /// Spares clients on unix sockets, which only the server's user can reach.
    #[must_use]
    pub fn tcp_only(self) -> Self {
        Self { tcp_only: true, ..self }
    }

    /// Whether who comes over this socket must use it.
    pub fn covers(&self, socket: &Socket) -> bool {
        !self.tcp_only || matches!(socket, Socket::Tcp(_))
    }

    /// Loads [`SERVER`] from a directory; with [`CA_CERT`] there, clients must show a certificate.
    ///
    /// # Errors
    /// As [`TlsConfig::load`]; also where a [`CA_CERT`] may be there and cannot be read.
    pub fn load_dir(dir: &Path) -> io::Result<Self> {
        let ca = dir.join(CA_CERT);
        // Nobody is let in because a link leads nowhere: only if there is nothing of this name, no
        // certificate is wanted.
        let ca = match std::fs::symlink_metadata(&ca) {
            Ok(_) => Some(ca),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(invalid(&ca, &error)),
        };
        Self::load(&dir.join(SERVER.0), &dir.join(SERVER.1), ca.as_deref())
    }

    /// As rustls has it.
    #[must_use]
    pub fn rustls(&self) -> &Arc<ServerConfig> {
        &self.config
    }
}

/// Whom a client trusts, and its certificate if it has one.
#[derive(Debug, Clone)]
pub struct TlsClient(Arc<ClientConfig>);

impl TlsClient {
    /// Loads PEM files: the authorities that sign servers' certificates and, for servers that want to
    /// know who comes, the client's certificate chain and private key.
    ///
    /// # Errors
    /// Names the file that cannot be read or used.
    pub fn load(ca: &Path, own: Option<(&Path, &Path)>) -> io::Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots(ca)?);
        let config = match own {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let (chain, private) = identity(cert, key)?;
                builder
                    .with_client_auth_cert(chain, private)
                    .map_err(|error| invalid(cert, &error))?
            }
        };
        Ok(Self(Arc::new(config)))
    }

    /// Loads [`CA_CERT`] from a directory, and [`CLIENT`] if it is there.
    ///
    /// # Errors
    /// As [`TlsClient::load`].
    pub fn load_dir(dir: &Path) -> io::Result<Self> {
        let (cert, key) = (dir.join(CLIENT.0), dir.join(CLIENT.1));
        let own = (cert.exists() || key.exists()).then_some((cert.as_path(), key.as_path()));
        Self::load(&dir.join(CA_CERT), own)
    }

    /// As rustls has it.
    #[must_use]
    pub fn rustls(&self) -> &Arc<ClientConfig> {
        &self.0
    }
}

/// The name or address that a server's certificate must be for.
///
/// # Errors
/// `InvalidInput` for text that is neither.
pub fn server_name(text: &str) -> io::Result<ServerName<'static>> {
    ServerName::try_from(text.to_owned()).map_err(|_| {
        let text = format!("`{text}` is no name that a certificate can be for");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

/// A certificate chain and its key.
fn identity(
    cert: &Path,
    key: &Path,
) -> io::Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| invalid(key, &error));
    Ok((certificates(cert)?, private?))
}

fn roots(ca: &Path) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(ca)? {
        roots.add(authority).map_err(|error| invalid(ca, &error))?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| invalid(path, &error))?;
    if certificates.is_empty() {
        return Err(invalid(path, &"no certificate in it"));
    }
    Ok(certificates)
}

fn invalid(path: &Path, error: &dyn std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("TLS file {}: {error}", path.display()))
}

/// One connection's TLS.
pub struct TlsStream {
    state: Connection,
    ended: bool,
}

impl TlsStream {
    /// The server's side, at its start.
    ///
    /// # Errors
    /// The configuration cannot be used.
    pub fn server(config: &TlsConfig) -> io::Result<Self> {
        ServerConnection::new(config.config.clone()).map(Self::new).map_err(io::Error::other)
    }

    /// The client's side, at its start; the server must be the one of this name.
    ///
    /// # Errors
    /// As [`server_name`].
    pub fn client(config: &TlsClient, name: &str) -> io::Result<Self> {
        let connection = ClientConnection::new(config.0.clone(), server_name(name)?);
        connection.map(Self::new).map_err(io::Error::other)
    }

    fn new(state: impl Into<Connection>) -> Self {
        let mut state = state.into();
        // What is sent is bounded already, by the limits on requests in flight.
        state.set_buffer_limit(None);
        Self { state, ended: false }
    }

    /// Whether nobody knows yet who the other is.
    pub fn is_handshaking(&self) -> bool {
        self.state.is_handshaking()
    }

    /// Whether TLS itself has something to send.
    pub fn wants_write(&self) -> bool {
        self.state.wants_write()
    }

    /// Takes ciphertext; returns how many bytes of it were used. On an error there may be an alert
    /// to send: see [`TlsStream::seal`].
    pub fn open(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
        let used = self.state.read_tls(&mut &*ciphertext)?;
        self.state
            .process_new_packets()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(used)
    }

    /// Takes plaintext out; `None` if more ciphertext is needed first, 0 at the end.
    pub fn read(&mut self, out: &mut [u8]) -> io::Result<Option<usize>> {
        match self.state.reader().read(out) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Encrypts `parts`; the result includes what TLS itself has to say and must be sent in order.
    pub fn seal<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> io::Result<Vec<u8>> {
        for part in parts {
            self.state.writer().write_all(part)?;
        }
        let mut out = Vec::new();
        while self.state.wants_write() {
            self.state.write_tls(&mut out)?;
        }
        Ok(out)
    }

    /// Nothing is to be sent after what has been so far: says so once.
    pub fn end(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.state.send_close_notify();
        }
    }
}

/// A connection with TLS for a thread that may block: all of it, or until its handshake is over.
pub struct TlsSocket {
    socket: Socket,
    tls: TlsStream,
    /// Ciphertext received, and how much of it is used.
    received: Vec<u8>,
    used: usize,
    /// The socket's own read timeout, and when receiving has to have ended.
    patience: Option<Duration>,
    deadline: Option<Instant>,
}

impl TlsSocket {
    /// Does the handshake; each step takes as long as the socket's timeouts say, and all of it 10 s at
    /// most.
    ///
    /// # Errors
    /// The socket's; the other is not who it should be, or does not accept who this is.
    pub fn handshake(socket: Socket, tls: TlsStream) -> io::Result<Self> {
        let mut this = Self::handshake_by(socket, tls, Instant::now() + HANDSHAKE)?;
        this.set_deadline(None)?;
        Ok(this)
    }

    /// The same with another end, which is then the [deadline](Self::set_deadline).
    ///
    /// # Errors
    /// As [`TlsSocket::handshake`].
    pub fn handshake_by(socket: Socket, tls: TlsStream, deadline: Instant) -> io::Result<Self> {
        let patience = socket.read_timeout()?;
        let (received, used, deadline) = (Vec::new(), 0, Some(deadline));
        let mut this = Self { socket, tls, received, used, patience, deadline };
        while this.tls.is_handshaking() {
            this.flush()?;
            if !this.tls.is_handshaking() {
                break;
            }
            if !this.feed()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        this.flush()?;
        Ok(this)
    }

    /// Until when anything is received, however much of it comes in between; without a deadline, as long
    /// as each piece comes within the socket's read timeout.
    ///
    /// # Errors
    /// The socket's.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.deadline = deadline;
        self.socket.set_read_timeout(self.patience)
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// What a reactor goes on with: the socket, TLS, and ciphertext that it has not seen yet.
    #[must_use]
    pub fn into_parts(mut self) -> (Socket, TlsStream, Vec<u8>) {
        let rest = self.received.split_off(self.used);
        (self.socket, self.tls, rest)
    }

    /// Gives TLS more ciphertext; `false` if there is none any more.
    fn feed(&mut self) -> io::Result<bool> {
        if self.used == self.received.len() {
            if let Some(deadline) = self.deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                let step = self.patience.map_or(left, |patience| patience.min(left));
                self.socket.set_read_timeout(Some(step))?;
            }
            self.received.resize(RECEIVE_BYTES, 0);
            self.used = 0;
            let mut socket = &self.socket;
            let count = loop {
                match socket.read(&mut self.received) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    count => break count,
                }
            };
            self.received.truncate(*count.as_ref().unwrap_or(&0));
            if count? == 0 {
                return Ok(false);
            }
        }
        match self.tls.open(&self.received[self.used..]) {
            Ok(used) => self.used += used,
            Err(error) => {
                // The other is told why, if it still listens.
                let _told = self.flush();
                return Err(error);
            }
        }
        Ok(true)
    }
}

impl Read for TlsSocket {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(count) = self.tls.read(out)? {
                return Ok(count);
            }
            if !self.feed()? {
                // Without a goodbye: somebody may have cut it short.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if self.tls.wants_write() {
                self.flush()?;
            }
        }
    }
}

impl Write for TlsSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.send_all(&self.tls.seal(std::iter::once(bytes))?)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.send_all(&self.tls.seal(std::iter::empty())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};
    use std::fs;

    #[test]
    fn authorities_that_cannot_be_read_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap();
        fs::write(dir.path().join(SERVER.0), certificate.pem()).unwrap();
        fs::write(dir.path().join(SERVER.1), key.serialize_pem()).unwrap();
        TlsConfig::load_dir(dir.path()).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join(CA_CERT)).unwrap();
        let error = TlsConfig::load_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains(CA_CERT), "{error}");
    }

    /// Each byte comes in time, and none of the record that they are of does.
    #[test]
    fn a_deadline_holds_for_one_who_drips() {
        const LENGTH: usize = 10_000;
        let dir = tempfile::tempdir().unwrap();
        let (cert, key_file) = (dir.path().join(SERVER.0), dir.path().join(SERVER.1));
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        fs::write(&cert, params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(&key_file, key.serialize_pem()).unwrap();
        let server = TlsStream::server(&TlsConfig::load(&cert, &key_file, None).unwrap()).unwrap();
        let client =
            TlsStream::client(&TlsClient::load(&cert, None).unwrap(), "localhost").unwrap();
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let (go, gone) = std::sync::mpsc::channel();
        let (flow, flows) = std::sync::mpsc::channel();
        let dripping = std::thread::spawn(move || {
            let mut server = TlsSocket::handshake(Socket::Unix(there), server).unwrap();
            let record = server.tls.seal(std::iter::once(&[7; LENGTH][..])).unwrap();
            gone.recv().unwrap();
            let mut bytes = record.iter();
            // Not all of it before the other one's time is over.
            while flows.recv_timeout(Duration::from_millis(5)).is_err() {
                server.socket.send_all(&[*bytes.next().unwrap()]).unwrap();
            }
            server.socket.send_all(bytes.as_slice()).unwrap();
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut client = TlsSocket::handshake_by(Socket::Unix(here), client, deadline).unwrap();
        client.set_deadline(Some(Instant::now() + Duration::from_millis(100))).unwrap();
        go.send(()).unwrap();
        let error = client.read(&mut [0; LENGTH]).unwrap_err();
        let late = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
        assert!(late.contains(&error.kind()), "{error}");
        // Nothing of it is lost.
        flow.send(()).unwrap();
        client.set_deadline(None).unwrap();
        let mut all = [0; LENGTH];
        client.read_exact(&mut all).unwrap();
        assert_eq!(all, [7; LENGTH]);
        dripping.join().unwrap();
    }
}
