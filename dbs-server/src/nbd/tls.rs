//! TLS of connections: rustls with certificates from PEM files.
//!
//! A TLS connection is one state machine used by two sides: the reader thread decrypts, whoever
//! sends encrypts. `TlsStream` holds its lock while bytes in memory are transformed and never
//! while a socket is waited for, so neither side can block the other.

use super::outbox::lock;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The server's certificate and whom it trusts.
#[derive(Debug, Clone)]
pub struct TlsConfig(Arc<ServerConfig>);

impl TlsConfig {
    /// Loads PEM files: the server's certificate chain, its private key and, if clients must show
    /// a certificate, the authorities that sign theirs.
    ///
    /// # Errors
    /// Names the file that cannot be read or used.
    pub fn load(cert: &Path, key: &Path, ca: Option<&Path>) -> io::Result<Self> {
        let chain = certificates(cert)?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|error| invalid(key, &error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let builder = match ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(ca)? {
                    roots.add(authority).map_err(|error| invalid(ca, &error))?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                        .build()
                        .map_err(|error| invalid(ca, &error))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config =
            builder.with_single_cert(chain, private).map_err(|error| invalid(cert, &error))?;
        Ok(Self(Arc::new(config)))
    }
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
pub(crate) struct TlsStream {
    state: Mutex<ServerConnection>,
}

impl TlsStream {
    pub fn new(config: &TlsConfig) -> io::Result<Self> {
        let mut connection = ServerConnection::new(config.0.clone()).map_err(io::Error::other)?;
        // What is sent is bounded already, by the limits on requests in flight.
        connection.set_buffer_limit(None);
        Ok(Self { state: Mutex::new(connection) })
    }

    pub fn is_handshaking(&self) -> bool {
        lock(&self.state).is_handshaking()
    }

    /// Whether TLS itself has something to send.
    pub fn wants_write(&self) -> bool {
        lock(&self.state).wants_write()
    }

    /// Takes ciphertext; returns how many bytes of it were used. On an error there may be an alert
    /// to send: see [`TlsStream::seal`].
    pub fn open(&self, ciphertext: &[u8]) -> io::Result<usize> {
        let mut state = lock(&self.state);
        let used = state.read_tls(&mut &*ciphertext)?;
        state
            .process_new_packets()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(used)
    }

    /// Takes plaintext out; `None` if more ciphertext is needed first, 0 at the end.
    pub fn read(&self, out: &mut [u8]) -> io::Result<Option<usize>> {
        match lock(&self.state).reader().read(out) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Encrypts `parts`; the result includes what TLS itself has to say and must be sent in order.
    pub fn seal(&self, parts: &[Vec<u8>]) -> io::Result<Vec<u8>> {
        let mut state = lock(&self.state);
        for part in parts {
            state.writer().write_all(part)?;
        }
        drain(&mut state)
    }

    /// The end of the stream, to be sent last.
    pub fn seal_end(&self) -> io::Result<Vec<u8>> {
        let mut state = lock(&self.state);
        state.send_close_notify();
        drain(&mut state)
    }
}

fn drain(state: &mut ServerConnection) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    while state.wants_write() {
        state.write_tls(&mut out)?;
    }
    Ok(out)
}
