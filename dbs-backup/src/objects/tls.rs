//! TLS to object stores, with the certificates that a user has given besides those of the system.

use dbs_core::{Error, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme,
    StreamOwned,
};
use std::io::{self, Read, Write};
use std::sync::Arc;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport,
    TransportAdapter,
};

const NOBODY: &str = "there is nobody whom this system trusts: it has no certificates of authorities, which are often in a \
                      package ca-certificates";

/// What a connection to a server must show. `certificates` are PEM.
///
/// # Errors
/// `Invalid` if there is no certificate in `certificates`.
pub fn config(certificates: Option<&str>) -> Result<ClientConfig> {
    let mut given = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(certificates.unwrap_or_default().as_bytes()) {
        given.push(
            certificate.map_err(|e| {
                Error::invalid(format!("the given certificates cannot be read: {e}"))
            })?,
        );
    }
    if certificates.is_some() && given.is_empty() {
        return Err(Error::invalid(
            "the given certificates have no certificate in them: PEM is needed",
        ));
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    for certificate in &given {
        roots.add(certificate.clone()).map_err(|e| {
            Error::invalid(format!("one of the given certificates cannot be used: {e}"))
        })?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let wrong = |e: &dyn std::fmt::Display| Error::invalid(format!("TLS cannot be used: {e}"));
    let verifier = Verifier::new(roots, given, &provider)?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong(&e))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    Ok(config)
}

/// The usual rules; and a server may show one of the given certificates itself, as Longhorn allows it. The usual rules
/// refuse that for a certificate of an authority, which `openssl req -x509` makes of every one.
#[derive(Debug)]
struct Verifier {
    usual: Option<Arc<WebPkiServerVerifier>>,
    given: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(
        roots: RootCertStore,
        given: Vec<CertificateDer<'static>>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self> {
        // A system may trust nobody.
        let usual = if roots.is_empty() {
            None
        } else {
            let built =
                WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
            Some(built.build().map_err(|e| Error::invalid(format!("TLS cannot be used: {e}")))?)
        };
        Ok(Self { usual, given, provider: Arc::clone(provider) })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        if self.given.iter().any(|given| given == end_entity) {
            verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            return Ok(ServerCertVerified::assertion());
        }
        let Some(usual) = &self.usual else {
            return Err(rustls::Error::General(NOBODY.to_owned()));
        };
        usual.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Puts TLS over a connection, where the address asks for it.
#[derive(Debug)]
pub struct TlsConnector(pub Arc<ClientConfig>);

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> std::result::Result<Option<Self::Out>, ureq::Error> {
        let Some(below) = chained else { return Ok(None) };
        if !details.needs_tls() || below.is_tls() {
            return Ok(Some(Either::A(below)));
        }
        let host = details.uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(|e| failed(&e.to_string()))?;
        let connection = ClientConnection::new(Arc::clone(&self.0), name);
        let mut connection = connection.map_err(|e| failed(&e.to_string()))?;
        let mut socket = TransportAdapter::new(below.boxed(), Arc::clone(&details.current_time));
        socket.set_timeout(details.timeout);
        connection.complete_io(&mut socket)?;
        let (input, output) =
            (details.config.input_buffer_size(), details.config.output_buffer_size());
        let stream = StreamOwned { conn: connection, sock: socket };
        Ok(Some(Either::B(TlsTransport { buffers: LazyBuffers::new(input, output), stream })))
    }
}

fn failed(what: &str) -> ureq::Error {
    io::Error::new(io::ErrorKind::InvalidData, what).into()
}

/// A connection with TLS.
pub struct TlsTransport {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter>,
}

impl std::fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsTransport")
    }
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(
        &mut self,
        amount: usize,
        timeout: NextTimeout,
    ) -> std::result::Result<(), ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        Ok(self.stream.write_all(&self.buffers.output()[..amount])?)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> std::result::Result<bool, ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let count = self.stream.read(self.buffers.input_append_buf())?;
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::ErrorKind;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

    fn authority(names: &[&str]) -> CertificateDer<'static> {
        let names = names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut params = CertificateParams::new(names).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    #[test]
    fn a_server_may_show_a_given_certificate_of_an_authority() {
        let (given, other) = (authority(&["store.example"]), authority(&["store.example"]));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(given.clone()).unwrap();
        let verifier = Verifier::new(roots, vec![given.clone()], &provider).unwrap();
        let verify = |certificate: &CertificateDer<'_>, name: &'static str| {
            let name = ServerName::try_from(name).unwrap();
            verifier.verify_server_cert(certificate, &[], &name, &[], UnixTime::now()).is_ok()
        };
        assert!(verify(&given, "store.example"));
        assert!(!verify(&given, "other.example"));
        assert!(!verify(&other, "store.example"), "it is not the one that was given");
        let nobody = Verifier::new(RootCertStore::empty(), Vec::new(), &provider).unwrap();
        let name = ServerName::try_from("store.example").unwrap();
        let refused = nobody.verify_server_cert(&given, &[], &name, &[], UnixTime::now());
        assert!(refused.unwrap_err().to_string().ends_with(NOBODY));
    }

    #[test]
    fn certificates_that_are_none() {
        assert!(config(None).is_ok());
        for text in ["x", "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n"] {
            assert_eq!(
                config(Some(text)).map(drop).unwrap_err().kind(),
                ErrorKind::Invalid,
                "{text}"
            );
        }
    }
}
