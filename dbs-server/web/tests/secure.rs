//! The page over TLS.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_control::api::{self, Request};
use dbs_core::{InitOptions, OpenOptions, Result, Store};
use dbs_frontend::Socket;
use dbs_frontend::tls::{SERVER, TlsClient, TlsConfig, TlsSocket, TlsStream};
use dbs_server::asked::{Asked, Findings};
use dbs_server::top::{Started, Top};
use dbs_web::{Token, WebOptions, WebServer};
use rcgen::{CertificateParams, KeyPair};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A store that nobody else serves.
struct Alone(Store);

impl Asked for Alone {
    fn store(&self) -> &Store {
        &self.0
    }

    fn top(&self) -> Top {
        Top::now(&self.0, Started::now(), Vec::new(), Vec::new(), Vec::new())
    }

    fn findings(&self) -> Findings {
        Findings::default()
    }

    fn command(&self, request: &Request) -> Result<Value> {
        api::execute(&self.0, request, &mut |_| true)
    }
}

fn certificates(dir: &Path) -> (TlsConfig, TlsClient) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let (cert, key_file) = (dir.join(SERVER.0), dir.join(SERVER.1));
    fs::write(&cert, params.self_signed(&key).unwrap().pem()).unwrap();
    fs::write(&key_file, key.serialize_pem()).unwrap();
    let server = TlsConfig::load(&cert, &key_file, None).unwrap();
    (server, TlsClient::load(&cert, None).unwrap())
}

fn connect(url: &str) -> TcpStream {
    let address = url.strip_prefix("https://").unwrap().trim_end_matches('/');
    TcpStream::connect(address).unwrap()
}

/// The status of a request over TLS.
fn ask(url: &str, tls: &TlsClient, lines: &str) -> String {
    let client = TlsStream::client(tls, "localhost").unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut stream = TlsSocket::handshake_by(Socket::Tcp(connect(url)), client, deadline).unwrap();
    let request = format!("GET /api/live HTTP/1.1\r\n{lines}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap_or_default().to_owned()
}

#[test]
fn the_page_is_served_over_tls_and_not_without() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.dbs");
    Store::init(&path, &InitOptions { size: Some(64 << 20), ..InitOptions::default() }).unwrap();
    let store = Store::open(&path, &OpenOptions::default()).unwrap();
    let (tls, client) = certificates(dir.path());
    let token = Token::random().unwrap();
    let bearer = format!("Host: localhost\r\nAuthorization: Bearer {}", token.text());
    let options = WebOptions { tls: Some(tls), names: Vec::new(), token, admin: false };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let page = WebServer::start(Arc::new(Alone(store.clone())), listener, options).unwrap();

    // Some begin a handshake and say no more, others speak without TLS: nobody is kept waiting.
    let silent: Vec<_> = (0..8).map(|_| connect(page.url())).collect();
    let mut plain = connect(page.url());
    plain.write_all(format!("GET / HTTP/1.1\r\n{bearer}\r\n\r\n").as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _reset = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");

    assert_eq!(ask(page.url(), &client, &bearer), "200");
    assert_eq!(ask(page.url(), &client, "Host: localhost"), "401");
    assert_eq!(ask(page.url(), &client, &format!("{bearer}\r\nOrigin: https://localhost")), "200");
    assert_eq!(ask(page.url(), &client, &format!("{bearer}\r\nOrigin: http://localhost")), "403");
    drop(silent);
    // When it is gone, nothing of it has the store.
    drop(page);
    store.close().unwrap();
}
