//! TLS of connections: rustls with certificates from PEM files.
//!
//! `TlsStream` transforms bytes in memory and knows no socket.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

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
pub struct TlsStream {
    state: ServerConnection,
    ended: bool,
}

impl TlsStream {
    pub(crate) fn new(config: &TlsConfig) -> io::Result<Self> {
        let mut connection = ServerConnection::new(config.0.clone()).map_err(io::Error::other)?;
        // What is sent is bounded already, by the limits on requests in flight.
        connection.set_buffer_limit(None);
        Ok(Self { state: connection, ended: false })
    }

    pub(crate) fn is_handshaking(&self) -> bool {
        self.state.is_handshaking()
    }

    /// Whether TLS itself has something to send.
    pub(crate) fn wants_write(&self) -> bool {
        self.state.wants_write()
    }

    /// Takes ciphertext; returns how many bytes of it were used. On an error there may be an alert
    /// to send: see [`TlsStream::seal`].
    pub(crate) fn open(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
        let used = self.state.read_tls(&mut &*ciphertext)?;
        self.state
            .process_new_packets()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(used)
    }

    /// Takes plaintext out; `None` if more ciphertext is needed first, 0 at the end.
    pub(crate) fn read(&mut self, out: &mut [u8]) -> io::Result<Option<usize>> {
        match self.state.reader().read(out) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Encrypts `parts`; the result includes what TLS itself has to say and must be sent in order.
    pub(crate) fn seal<'a>(
        &mut self,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<Vec<u8>> {
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
    pub(crate) fn end(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.state.send_close_notify();
        }
    }
}
