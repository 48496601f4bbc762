//! The page over TLS, and what becomes of requests that nobody waits for.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_control::api::{self, Request};
use dbs_core::{Error, ErrorKind, InitOptions, OpenOptions, Result, Store};
use dbs_frontend::Socket;
use dbs_frontend::tls::{SERVER, TlsClient, TlsConfig, TlsSocket, TlsStream};
use dbs_server::asked::{Asked, Findings};
use dbs_server::top::{Started, Top};
use dbs_web::{StorePage, Token, WebOptions, WebServer, WebSocket};
use rcgen::{CertificateParams, KeyPair};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
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

    fn notice(&self, text: String) {
        panic!("{text}");
    }

    fn findings(&self) -> Findings {
        Findings::default()
    }

    fn command(&self, request: &Request, go_on: &mut dyn FnMut() -> bool) -> Result<Value> {
        api::execute(&self.0, request, &mut |_| go_on())
    }
}

fn page_of(asked: impl Asked) -> Arc<StorePage> {
    Arc::new(StorePage::new(Arc::new(asked), "store.dbs".to_owned()))
}

const PATIENCE: Duration = Duration::from_secs(120);

fn any_port() -> WebSocket {
    WebSocket::take(&"127.0.0.1:0".parse().unwrap()).unwrap()
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

fn small_store(dir: &Path) -> Store {
    let path = dir.join("store.dbs");
    Store::init(&path, &InitOptions { size: Some(64 << 20), ..InitOptions::default() }).unwrap();
    Store::open(&path, &OpenOptions::default()).unwrap()
}

/// Its commands go on until they are told not to, and some time longer.
struct Endless {
    store: Store,
    inside: AtomicU32,
    /// Told how many are inside when one comes, and 0 when one has gone.
    tells: mpsc::Sender<u32>,
}

impl Asked for Endless {
    fn store(&self) -> &Store {
        &self.store
    }

    fn top(&self) -> Top {
        Top::now(&self.store, Started::now(), Vec::new(), Vec::new(), Vec::new())
    }

    fn notice(&self, text: String) {
        panic!("{text}");
    }

    fn findings(&self) -> Findings {
        Findings::default()
    }

    fn command(&self, _: &Request, go_on: &mut dyn FnMut() -> bool) -> Result<Value> {
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.tells.send(inside).unwrap();
        while go_on() {
            thread::sleep(Duration::from_millis(2));
        }
        // One that comes too early finds it here.
        thread::sleep(Duration::from_millis(200));
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.tells.send(0).unwrap();
        Err(Error::new(ErrorKind::Interrupted, "it was stopped"))
    }
}

/// A command, as a browser sends it.
fn post(token: &Token, body: &str) -> String {
    format!(
        "POST /api/command HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        token.text(),
        body.len()
    )
}

/// Found by review: as many as there are threads kept everybody from looking.
#[test]
fn a_change_is_refused_while_another_one_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_store(dir.path());
    let (tells, told) = mpsc::channel();
    let asked = Endless { store: store.clone(), inside: AtomicU32::new(0), tells };
    let token = Token::random().unwrap();
    let request =
        post(&token, r#"{"method":"snapshot.create","params":{"volume":"v","snapshot":"s"}}"#);
    let options =
        WebOptions { tls: None, names: Vec::new(), token, admin: true, patience: PATIENCE };
    let page = WebServer::start(page_of(asked), any_port(), options).unwrap();
    let address = page.url().strip_prefix("http://").unwrap().trim_end_matches('/').to_owned();
    let send = || {
        let mut client = TcpStream::connect(&address).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        client
    };
    let next = || told.recv_timeout(PATIENCE).expect("nothing came or went");
    let first = send();
    assert_eq!(next(), 1);
    for _ in 0..8 {
        let mut answer = String::new();
        send().read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 409 "), "{answer}");
    }
    // The next one has its turn when the first has ended, and not only its client.
    drop(first);
    assert_eq!(next(), 0);
    drop(page);
    store.close().unwrap();
}

/// Found by review: what a client had asked for went on for minutes when it was gone, any number at once, and
/// the server could not be stopped.
#[test]
fn what_nobody_waits_for_ends_and_so_does_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_store(dir.path());
    let (tells, told) = mpsc::channel();
    let asked = Endless { store: store.clone(), inside: AtomicU32::new(0), tells };
    let token = Token::random().unwrap();
    let body = r#"{"method":"snapshot.list","params":{"volume":"v","usage":true}}"#;
    let request = post(&token, body);
    let options =
        WebOptions { tls: None, names: Vec::new(), token, admin: false, patience: PATIENCE };
    let page = WebServer::start(page_of(asked), any_port(), options).unwrap();
    let address = page.url().strip_prefix("http://").unwrap().trim_end_matches('/').to_owned();
    let send = || {
        let mut client = TcpStream::connect(&address).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        client
    };
    let next = || told.recv_timeout(Duration::from_secs(120)).expect("nothing came or went");
    let first = send();
    assert_eq!(next(), 1);
    let second = send();
    // It is told that nobody waits, and the second has its turn when it has gone.
    drop(first);
    assert_eq!(next(), 0, "the second came before the first had gone");
    assert_eq!(next(), 1);
    let (ended, end) = mpsc::channel();
    let stop = thread::spawn(move || {
        drop(page);
        ended.send(()).unwrap();
    });
    end.recv_timeout(Duration::from_secs(120)).expect("the server does not stop");
    stop.join().unwrap();
    assert_eq!(next(), 0);
    drop(second);
    store.close().unwrap();
}

#[test]
fn the_page_is_served_over_tls_and_not_without() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_store(dir.path());
    let (tls, client) = certificates(dir.path());
    let token = Token::random().unwrap();
    let bearer = format!("Host: localhost\r\nAuthorization: Bearer {}", token.text());
    let options =
        WebOptions { tls: Some(tls), names: Vec::new(), token, admin: false, patience: PATIENCE };
    let page = WebServer::start(page_of(Alone(store.clone())), any_port(), options).unwrap();

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

/// Says that it was looked at, and what it was told.
struct Told(Store, mpsc::Sender<String>);

impl Asked for Told {
    fn store(&self) -> &Store {
        &self.0
    }

    fn top(&self) -> Top {
        self.1.send(LOOKED.to_owned()).unwrap();
        Top::now(&self.0, Started::now(), Vec::new(), Vec::new(), Vec::new())
    }

    fn notice(&self, text: String) {
        self.1.send(text).unwrap();
    }

    fn findings(&self) -> Findings {
        Findings::default()
    }

    fn command(&self, request: &Request, go_on: &mut dyn FnMut() -> bool) -> Result<Value> {
        api::execute(&self.0, request, &mut |_| go_on())
    }
}

const LOOKED: &str = "looked at";

/// An older server may have it still for a moment, as in an upgrade.
#[test]
fn a_port_that_is_taken_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_store(dir.path());
    let (tells, told) = mpsc::channel();
    let older = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = older.local_addr().unwrap();
    let start = |patience: Duration| {
        let token = Token::random().unwrap();
        let options = WebOptions { tls: None, names: Vec::new(), token, admin: false, patience };
        let socket = WebSocket::take(&address.to_string().parse().unwrap()).unwrap();
        let page = page_of(Told(store.clone(), tells.clone()));
        WebServer::start(page, socket, options).unwrap()
    };
    let page = start(PATIENCE);
    assert_eq!(page.url(), format!("http://{address}/"));
    // The figures of its graphs are taken first when it has tried for the first time, and waits.
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), LOOKED);
    drop(older);
    let end = Instant::now() + PATIENCE;
    let mut client = loop {
        assert!(Instant::now() < end, "nobody listens");
        match TcpStream::connect(address) {
            Ok(client) => break client,
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // Not for ever, and one that waits can be stopped.
    let in_vain = start(Duration::ZERO);
    let mut next = || told.recv_timeout(PATIENCE).expect("nobody was told");
    let text = std::iter::repeat_with(&mut next).find(|text| text != LOOKED).unwrap();
    assert!(text.starts_with("the web page is not served: "), "{text}");
    let waits = start(Duration::from_secs(3600));
    drop((waits, in_vain, page));
    store.close().unwrap();
}
