//! The HTTP server of metrics. One request a connection; no more of HTTP than `GET` needs.

use crate::log;
use dbs_core::{Error, Result};
use nix::sys::socket::{self, Shutdown};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The type of Prometheus' text format.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The type of everything else.
const PLAIN: &str = "text/plain; charset=utf-8";
/// Clients at once; further connections are closed.
const CLIENTS_MAX: usize = 16;
/// Longest request, without a body.
const REQUEST_MAX_BYTES: usize = 16 << 10;
/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take to receive its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Rest after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Makes the text when it is asked for; it may block.
pub type Collect = Arc<dyn Fn() -> String + Send + Sync>;

/// A server of metrics. Dropping it closes its socket; answers that are on their way still go out.
#[derive(Debug)]
pub struct MetricsServer {
    address: String,
    listener: Arc<TcpListener>,
    ended: Arc<AtomicBool>,
}

impl MetricsServer {
    /// Serves `/metrics` on this socket.
    ///
    /// # Errors
    /// `Io` if the socket cannot be used, or there is no thread for it.
    pub fn start(listener: TcpListener, collect: Collect) -> Result<Self> {
        let failed = |e| Error::io(e, "serving metrics");
        let address = listener.local_addr().map_err(failed)?.to_string();
        let (listener, ended) = (Arc::new(listener), Arc::<AtomicBool>::default());
        let (accepted, stopped) = (Arc::clone(&listener), Arc::clone(&ended));
        thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || accept(&accepted, &stopped, &collect))
            .map_err(failed)?;
        Ok(Self { address, listener, ended })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.clone()
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ends_accept = socket::shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }
}

fn accept(listener: &TcpListener, ended: &AtomicBool, collect: &Collect) {
    // Shared with the thread of each client.
    let clients = Arc::new(());
    loop {
        let accepted = listener.accept();
        if ended.load(Ordering::SeqCst) {
            return;
        }
        let started = accepted.and_then(|(stream, _)| {
            if Arc::strong_count(&clients) > CLIENTS_MAX {
                return Ok(());
            }
            let (client, collect) = (Arc::clone(&clients), Arc::clone(collect));
            let thread = thread::Builder::new().name("metrics-client".to_owned());
            let serve = move || {
                // Whatever goes wrong is the client's to notice.
                let _ended = serve(&stream, &collect);
                drop(client);
            };
            thread.spawn(serve).map(drop)
        });
        match started {
            Err(e) if e.kind() != io::ErrorKind::ConnectionAborted => {
                log::warn("metrics", &[("accept", &e)]);
                thread::sleep(ACCEPT_PAUSE);
            }
            _ => {}
        }
    }
}

/// Answers the one request of a connection.
fn serve(stream: &TcpStream, collect: &Collect) -> io::Result<()> {
    let request = read_request(stream)?;
    let answer = answer(&request, collect);
    let head = format!(
        "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        answer.status,
        answer.kind,
        answer.body.len()
    );
    let body = if answer.headers_only { "" } else { &answer.body };
    send(stream, &[head.as_bytes(), body.as_bytes()].concat())
}

/// A request up to the end of its headers, or as much of one as is too long.
fn read_request(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let end = Instant::now() + REQUEST_TIMEOUT;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while request.len() < REQUEST_MAX_BYTES && !is_whole(&request) {
        stream.set_read_timeout(Some(left(end)?))?;
        match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => request.extend_from_slice(&piece[..count]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(request)
}

fn is_whole(request: &[u8]) -> bool {
    request.windows(4).any(|end| end == b"\r\n\r\n")
}

fn send(mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let end = Instant::now() + ANSWER_TIMEOUT;
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(end)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The time until then.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// What a client is told.
struct Answer {
    status: &'static str,
    kind: &'static str,
    body: String,
    /// The length of the body in place of the body.
    headers_only: bool,
}

impl Answer {
    fn plain(status: &'static str, text: &str) -> Self {
        Self { status, kind: PLAIN, body: text.to_owned(), headers_only: false }
    }
}

fn answer(request: &[u8], collect: &Collect) -> Answer {
    if !is_whole(request) {
        return Answer::plain("431 Request Header Fields Too Large", "the request is too long\n");
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let (method, target) = match line.split(' ').collect::<Vec<_>>()[..] {
        [method, target, version] if version.starts_with("HTTP/1.") => (method, target),
        _ => return Answer::plain("400 Bad Request", "HTTP/1 only\n"),
    };
    let headers_only = method == "HEAD";
    if method != "GET" && !headers_only {
        return Answer::plain("405 Method Not Allowed", "GET only\n");
    }
    let path = target.split('?').next().unwrap_or_default();
    let answer = if !matches!(path, "/metrics" | "/") {
        Answer::plain("404 Not Found", "see /metrics\n")
    } else if let Ok(body) = catch_unwind(AssertUnwindSafe(|| collect())) {
        Answer { status: "200 OK", kind: METRICS, body, headers_only }
    } else {
        Answer::plain("500 Internal Server Error", "collecting failed\n")
    };
    Answer { headers_only, ..answer }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(collect: impl Fn() -> String + Send + Sync + 'static) -> MetricsServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        MetricsServer::start(listener, Arc::new(collect)).unwrap()
    }

    /// Everything that is answered to these bytes.
    fn ask(server: &MetricsServer, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(request).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn requests_are_answered_by_what_they_ask_for() {
        let server = server(|| "a 1\n".to_owned());
        for (request, status, end) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 200 OK\r\n", "\r\n\r\na 1\n"),
            ("GET /?x=y HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK\r\n", "\r\n\r\na 1\n"),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n", "\r\n\r\n"),
            ("GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 ", "see /metrics\n"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 ", "GET only\n"),
            ("GET /metrics\r\n\r\n", "HTTP/1.1 400 ", "HTTP/1 only\n"),
            ("PRI * HTTP/2.0\r\n\r\n", "HTTP/1.1 400 ", "HTTP/1 only\n"),
            ("\r\n\r\n", "HTTP/1.1 400 ", "HTTP/1 only\n"),
        ] {
            let text = ask(&server, request.as_bytes());
            assert!(text.starts_with(status) && text.ends_with(end), "{request:?}: {text:?}");
            let length = if text.contains(" 200 OK") { 4 } else { end.len() };
            assert!(text.contains(&format!("\r\nContent-Length: {length}\r\n")), "{text:?}");
        }
        assert!(ask(&server, b"\xff\x00 \x80\r\n\r\n").starts_with("HTTP/1.1 400 "));
        assert!(ask(&server, &vec![b'x'; REQUEST_MAX_BYTES]).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn a_failed_collection_ends_nothing_else() {
        let server = server(|| panic!("for the test"));
        for _ in 0..2 {
            let text = ask(&server, b"GET / HTTP/1.1\r\n\r\n");
            assert!(text.starts_with("HTTP/1.1 500 "), "{text}");
        }
    }

    #[test]
    fn too_many_clients_are_closed_and_places_come_back() {
        let server = server(String::new);
        let connect = || TcpStream::connect(server.address()).unwrap();
        let mut silent: Vec<_> = (0..CLIENTS_MAX).map(|_| connect()).collect();
        let mut beyond = connect();
        assert_eq!(beyond.read(&mut [0]).unwrap(), 0);
        // The one that leaves is noticed in its time.
        silent.pop();
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            let mut stream = connect();
            let mut text = String::new();
            let _closed = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
            if stream.read_to_string(&mut text).is_ok() && text.contains("200 OK") {
                break;
            }
            assert!(Instant::now() < end, "no place became free");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_server_that_is_dropped_listens_no_longer() {
        let server = server(String::new);
        let address = server.address();
        ask(&server, b"GET / HTTP/1.1\r\n\r\n");
        drop(server);
        let end = Instant::now() + Duration::from_secs(120);
        while TcpStream::connect(&address).is_ok() {
            assert!(Instant::now() < end, "it still listens");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
