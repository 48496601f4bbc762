//! The receiving side: an HTTP server for one image on one port, gone when the image is there.

mod command;
mod coverage;
mod transfer;

use crate::image::Sink;
use command::{Command, Refusal, parse};
use dbs_core::{Error, Result};
use dbs_service::log;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use longhorn_wire::transport;
use std::convert::Infallible;
use std::future::Future;
use std::net::TcpListener;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use transfer::{Answer, Progress, Transfer};

/// Connections at a time: a sender has four, and some more after trouble.
const MAX_CONNECTIONS: usize = 256;

/// How long a connection may be without a request before it is closed; senders make a new one.
const CONNECTION_IDLE: Duration = Duration::from_secs(60);

/// How long the answer to `close` may take to leave.
const GOODBYE: Duration = Duration::from_secs(5);

/// Bytes a connection reads at once, and the longest head of a request.
const READ_BUFFER: usize = 512 * 1024;

/// How to receive.
#[derive(Clone)]
pub struct ReceiveOptions {
    /// Given up after so long without a request (upstream: 300 s).
    pub idle: Duration,
    /// Called with how many more bytes of data have arrived, or have been compared if there was an
    /// image before: adds up to the data of the image.
    pub progress: Progress,
}

impl Default for ReceiveOptions {
    fn default() -> Self {
        Self { idle: Duration::from_secs(300), progress: Arc::new(|_| {}) }
    }
}

/// How receiving ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// The sender said `close`, and the image is finished. Upstream's senders say so also when they
    /// have failed: whoever told them to send knows.
    Closed {
        /// Whether anything was sent; if not, the sender found both images equal by their records.
        opened: bool,
    },
    /// No request came for too long; the image is abandoned.
    Idle,
    /// Asked to stop; the image is abandoned.
    Stopped,
}

/// Receives one image on a bound listener. Ends with the sender's `close`, after too long a silence,
/// or when `stop` completes. The image is finished or abandoned on return; do not drop the future
/// before (use `stop`).
///
/// # Errors
/// `Io` when the listener fails; of [`Sink::finish`].
pub async fn receive(
    listener: TcpListener,
    sink: Arc<dyn Sink>,
    options: ReceiveOptions,
    stop: impl Future<Output = ()> + Send,
) -> Result<Received> {
    let server = Arc::new(Server {
        transfer: Transfer::new(sink, options.progress),
        activity: Activity::new(),
        idle: options.idle,
        leave: watch::Sender::new(false),
    });
    let mut connections = JoinSet::new();
    let outcome = server.accept(listener, &mut connections, stop).await;
    server.leave.send_replace(true);
    // Who has it stopped may be waiting for the image, and no answer matters.
    let stopped = matches!(outcome, Ok(Some(Received::Stopped)));
    let patience = if stopped { Duration::ZERO } else { GOODBYE };
    if timeout(patience, drain(&mut connections)).await.is_err() {
        connections.shutdown().await;
    }
    let abandoned = server.transfer.abandon().await;
    match outcome {
        Ok(None) => server.finished(),
        // The end came between two requests and `close` overtook it.
        Ok(Some(_)) if !abandoned => server.finished(),
        Ok(Some(reason)) => Ok(reason),
        Err(error) => Err(error),
    }
}

/// One connection of a receiver, whatever it is made of. For fuzzing.
#[cfg(feature = "testing")]
pub async fn serve_one(
    sink: Arc<dyn Sink>,
    stream: impl hyper::rt::Read + hyper::rt::Write + Unpin,
) {
    let server = Server {
        transfer: Transfer::new(sink, Arc::new(|_| {})),
        activity: Activity::new(),
        idle: CONNECTION_IDLE,
        leave: watch::Sender::new(false),
    };
    server.serve(stream).await;
    server.transfer.abandon().await;
}

async fn drain(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

struct Server {
    transfer: Transfer,
    activity: Activity,
    idle: Duration,
    /// Set when connections should end with the request they are at.
    leave: watch::Sender<bool>,
}

impl Server {
    /// Serves connections until the transfer ends (`None`) or is given up.
    async fn accept(
        self: &Arc<Self>,
        listener: TcpListener,
        connections: &mut JoinSet<()>,
        stop: impl Future<Output = ()>,
    ) -> Result<Option<Received>> {
        let listener = listener
            .set_nonblocking(true)
            .and_then(|()| tokio::net::TcpListener::from_std(listener))
            .map_err(|error| Error::io(error, "cannot listen for an image"))?;
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut ended = self.transfer.ended();
        let (mut stop, mut silence) = (pin!(stop), pin!(self.activity.silence(self.idle)));
        loop {
            let accepted = async {
                let place = Arc::clone(&places).acquire_owned().await;
                (place, listener.accept().await)
            };
            tokio::select! {
                biased;
                () = until(&mut ended, Option::is_some) => return Ok(None),
                () = &mut stop => return Ok(Some(Received::Stopped)),
                () = &mut silence => return Ok(Some(Received::Idle)),
                (place, accepted) = accepted => match accepted {
                    Ok((stream, _)) => {
                        let server = Arc::clone(self);
                        connections.spawn(async move {
                            let _place = place;
                            let _ = stream.set_nodelay(true);
                            let mut leave = server.leave.subscribe();
                            let line = tokio::select! {
                                biased;
                                line = transport::accept(stream) => line,
                                () = until(&mut leave, |leave| *leave) => None,
                            };
                            if let Some(line) = line {
                                server.serve(TokioIo::new(line)).await;
                            }
                        });
                    }
                    Err(error) => {
                        // Out of descriptors, most likely: wait for some to come back.
                        log::warn("ssync-accept-failed", &[("error", &error)]);
                        sleep(Duration::from_millis(100)).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }

    fn finished(&self) -> Result<Received> {
        match self.transfer.ended().borrow().as_ref() {
            Some(Err(text)) => Err(Error::new(dbs_core::ErrorKind::Io, text.clone())),
            _ => Ok(Received::Closed { opened: self.transfer.was_opened() }),
        }
    }

    async fn serve(&self, stream: impl hyper::rt::Read + hyper::rt::Write + Unpin) {
        let service = service_fn(|request| self.answer(request));
        let mut leave = self.leave.subscribe();
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(self.idle.min(CONNECTION_IDLE))
                .max_buf_size(READ_BUFFER)
                .serve_connection(stream, service)
        );
        // Errors are a peer's that went away or does not speak HTTP: nobody is left to tell.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = until(&mut leave, |leave| *leave) => {}
        }
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> std::result::Result<Response<Full<Bytes>>, Infallible> {
        let _busy = self.activity.busy();
        let head = format!("{} {}", request.method(), request.uri());
        Ok(match self.perform(request).await {
            Ok(answer) => respond(answer),
            Err(refusal) => {
                if refusal.status != StatusCode::NOT_FOUND {
                    let fields: [(&str, &dyn std::fmt::Display); 2] =
                        [("request", &head), ("error", &refusal.text)];
                    log::warn("ssync-refused", &fields);
                }
                refuse(&refusal)
            }
        })
    }

    async fn perform(&self, request: Request<Incoming>) -> std::result::Result<Answer, Refusal> {
        let command = parse(request.method(), request.uri());
        let Ok(Command::Write(piece)) = command else {
            return self.transfer.perform(command?).await;
        };
        let mut buffer = self.transfer.body(piece).await?;
        self.fill(request.into_body(), &mut buffer).await?;
        self.transfer.write(piece, buffer).await
    }

    /// Reads a body, which must be as long as the buffer.
    async fn fill(
        &self,
        mut body: Incoming,
        buffer: &mut [u8],
    ) -> std::result::Result<(), Refusal> {
        let wrong = |text: String| Err(Refusal::bad(text));
        let mut at = 0;
        if body.size_hint().exact().is_some_and(|length| length != buffer.len() as u64) {
            return wrong(format!("a body of {:?} for {}", body.size_hint(), buffer.len()));
        }
        loop {
            let frame = match timeout(self.idle, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => break,
                Ok(Some(Err(error))) => return wrong(format!("the body broke off: {error}")),
                Err(_) => return wrong("the body does not come".to_owned()),
            };
            let Some(data) = frame.data_ref() else { continue };
            let Some(place) = buffer.get_mut(at..at + data.len()) else {
                return wrong(format!("the body is longer than {} bytes", buffer.len()));
            };
            place.copy_from_slice(data);
            at += data.len();
        }
        if at == buffer.len() {
            return Ok(());
        }
        wrong(format!("the body has {at} bytes instead of {}", buffer.len()))
    }
}

/// Waits for a value; also ends when the other side is gone.
async fn until<T>(watched: &mut watch::Receiver<T>, wanted: impl FnMut(&T) -> bool) {
    let _ = watched.wait_for(wanted).await;
}

fn respond(answer: Answer) -> Response<Full<Bytes>> {
    let json = answer.is_some();
    let mut response = Response::new(Full::new(Bytes::from(answer.unwrap_or_default())));
    if json {
        let value = HeaderValue::from_static("application/json");
        response.headers_mut().insert(CONTENT_TYPE, value);
    }
    response
}

fn refuse(refusal: &Refusal) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(format!("{}\n", refusal.text))));
    *response.status_mut() = refusal.status;
    let value = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, value);
    response
}

/// Requests under way and when the last one ended. Connections without a request do not count:
/// an attached sender that says nothing is as good as none.
struct Activity {
    requests: AtomicUsize,
    last: Mutex<Instant>,
}

struct Busy<'a>(&'a Activity);

impl Activity {
    fn new() -> Self {
        Self { requests: AtomicUsize::new(0), last: Mutex::new(Instant::now()) }
    }

    fn busy(&self) -> Busy<'_> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Busy(self)
    }

    /// Completes after `idle` without a request.
    async fn silence(&self, idle: Duration) {
        loop {
            let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
            let mut until = last + idle;
            if self.requests.load(Ordering::Relaxed) > 0 {
                until = until.max(Instant::now() + idle);
            } else if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}
