//! The server of the page: one thread with its connections, and a few that ask what the page is about.

use crate::address::Names;
use crate::answer::Page;
use crate::assets::Assets;
use crate::subject::Subject;
use crate::token::Token;
use dbs_core::{Error, Result};
use dbs_frontend::ListenAddress;
use dbs_frontend::tls::TlsConfig;
use dbs_service::log;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// Connections at once; further ones are closed. A browser makes six.
const CONNECTIONS_MAX: usize = 64;
/// Threads that ask what the page is about.
const ASKING_THREADS: usize = 4;
/// Longest head of a request, and most of its lines.
const HEAD_MAX_BYTES: usize = 16 << 10;
const HEAD_MAX_LINES: usize = 64;
/// How long a client may take to send one, and to begin the next.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a TLS handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Life of a connection, and what is left to it then for the request that runs: who reads slowly is not kept.
const LIFE: Duration = Duration::from_secs(120);
const LAST: Duration = Duration::from_secs(30);
/// The same when the server stops.
const LAST_AT_STOP: Duration = Duration::from_secs(1);
/// Between two attempts at an address that somebody else has.
const AGAIN: Duration = Duration::from_millis(100);
/// Between two looks at what the graphs show.
const TICK: Duration = Duration::from_secs(1);
/// Rest after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How to serve the page.
#[derive(Debug)]
pub struct WebOptions {
    /// Serve it over TLS.
    pub tls: Option<TlsConfig>,
    /// Names under which it may be asked for, beside addresses and `localhost`.
    pub names: Vec<String>,
    /// Who has it is let in.
    pub token: Token,
    /// Whether the page may change something.
    pub admin: bool,
    /// How long to wait for an address that somebody else has.
    pub patience: Duration,
}

/// Where a page listens; or is to, once another process has left: that of an older server, which ends.
#[derive(Debug)]
pub struct WebSocket(std::result::Result<TcpListener, ListenAddress>);

impl WebSocket {
    /// Listens, unless somebody else does.
    ///
    /// # Errors
    /// Those of the system, but that the address is in use.
    pub fn take(address: &ListenAddress) -> io::Result<Self> {
        match address.bind() {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => Ok(Self(Err(address.clone()))),
            bound => bound.map(|listener| Self(Ok(listener))),
        }
    }

    fn url(&self, scheme: &str) -> io::Result<String> {
        Ok(match &self.0 {
            Ok(listener) => format!("{scheme}://{}/", listener.local_addr()?),
            Err(address) => format!("{scheme}://{address}/"),
        })
    }

    /// The listener; of an address that is in use, when it is not any more, or has been for too long. `None` if the
    /// server is to stop before.
    async fn listener(
        self,
        patience: Duration,
        stopped: &mut watch::Receiver<bool>,
    ) -> io::Result<Option<TcpListener>> {
        let address = match self.0 {
            Ok(listener) => return Ok(Some(listener)),
            Err(address) => address,
        };
        let deadline = Instant::now() + patience;
        loop {
            match address.bind() {
                Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {}
                bound => return bound.map(Some),
            }
            tokio::select! {
                () = sleep(AGAIN) => {}
                () = until(stopped) => return Ok(None),
            }
        }
    }
}

/// A page that is being served. Dropping it ends that, and returns when nothing of it asks anything any more.
#[derive(Debug)]
pub struct WebServer {
    url: String,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl WebServer {
    /// Serves the page on this socket. Without TLS that must be loopback. [`Subject::not_served`] is told if it waits in
    /// vain.
    ///
    /// # Errors
    /// `Invalid` for another address without TLS; `Io` if the socket cannot be used, or there is no thread for it.
    pub fn start(
        subject: Arc<dyn Subject>,
        socket: WebSocket,
        options: WebOptions,
    ) -> Result<Self> {
        let failed = |e: io::Error| Error::io(e, "serving the web page");
        let is_secure = options.tls.is_some();
        if let Ok(listener) = &socket.0 {
            check(listener, is_secure)?;
        }
        let runtime = Builder::new_current_thread()
            .enable_all()
            .thread_name("web-ask")
            .max_blocking_threads(ASKING_THREADS)
            .build()
            .map_err(failed)?;
        let scheme = if is_secure { "https" } else { "http" };
        let acceptor = options.tls.map(|tls| TlsAcceptor::from(Arc::clone(tls.rustls())));
        let (stop, stopped) = watch::channel(false);
        let page = Arc::new(Page {
            assets: Assets::of(subject.view()),
            subject,
            token: options.token,
            names: Names::new(options.names),
            scheme,
            admin: options.admin,
            one_at_a_time: Arc::new(Semaphore::new(1)),
            changes: Arc::new(Semaphore::new(1)),
            stopped: stopped.clone(),
        });
        let url = socket.url(scheme).map_err(failed)?;
        let bound = (socket, options.patience);
        let serve = move || run(&runtime, bound, acceptor, &page, stopped);
        let thread = thread::Builder::new().name("web".to_owned()).spawn(serve);
        Ok(Self { url, stop, thread: Some(thread.map_err(failed)?) })
    }

    /// Where it is.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        let _ended_already = self.stop.send(true);
        let _panicked = self.thread.take().map(JoinHandle::join);
    }
}

/// Makes sure that the token cannot be read on the way.
fn check(listener: &TcpListener, is_secure: bool) -> Result<()> {
    let address = listener.local_addr().map_err(|e| Error::io(e, "serving the web page"))?;
    if is_secure || address.ip().is_loopback() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the web page on {address} needs TLS, as its token could be read on the way: give a directory with its certificate \
         (--tls-dir of `dbs serve`, --web-tls-dir of `longhorn controller`), or listen on loopback and come through `ssh -L`"
    )))
}

fn run(
    runtime: &Runtime,
    (socket, patience): (WebSocket, Duration),
    acceptor: Option<TlsAcceptor>,
    page: &Arc<Page>,
    mut stopped: watch::Receiver<bool>,
) {
    let served = runtime.block_on(async {
        let failed = |e: io::Error| Error::io(e, "serving the web page");
        tokio::spawn(watch(Arc::clone(page), stopped.clone()));
        let waited = socket.listener(patience, &mut stopped).await.map_err(failed)?;
        let Some(listener) = waited else { return Ok(()) };
        check(&listener, acceptor.is_some())?;
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        accept(&listener, acceptor, page, stopped).await;
        Ok::<_, Error>(())
    });
    if let Err(error) = served {
        page.subject.not_served(&error);
    }
}

/// Has the figures of the graphs kept, whether somebody looks or not.
async fn watch(page: Arc<Page>, mut stopped: watch::Receiver<bool>) {
    let mut seconds = interval(TICK);
    seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _now = seconds.tick() => {}
            () = until(&mut stopped) => return,
        }
        let subject = Arc::clone(&page.subject);
        // One that panics has said so, and the next may not.
        let _panicked = spawn_blocking(move || subject.tick()).await;
    }
}

async fn accept(
    listener: &tokio::net::TcpListener,
    acceptor: Option<TlsAcceptor>,
    page: &Arc<Page>,
    mut stopped: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = until(&mut stopped) => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
                let (acceptor, page, stopped) =
                    (acceptor.clone(), Arc::clone(page), stopped.clone());
                tokio::spawn(async move {
                    let _place = place;
                    // Small answers wait for nothing.
                    let _without = stream.set_nodelay(true);
                    match acceptor {
                        None => connection(stream, page, stopped).await,
                        Some(acceptor) => {
                            let secure = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await;
                            if let Ok(Ok(secure)) = secure {
                                connection(secure, page, stopped).await;
                            }
                        }
                    }
                });
            }
            Err(error) => {
                log::warn("web", &[("accept", &error)]);
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // All of them, but not for long.
    let all = places.acquire_many(CONNECTIONS_MAX as u32);
    let _some_are_left = timeout(LAST_AT_STOP, all).await;
}

async fn until(stopped: &mut watch::Receiver<bool>) {
    // An error means that whoever could say it is gone, which says it, too.
    let _said = stopped.wait_for(|stopped| *stopped).await;
}

/// Answers the requests of a connection.
async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    page: Arc<Page>,
    mut stopped: watch::Receiver<bool>,
) {
    let service = service_fn(move |request| {
        let page = Arc::clone(&page);
        async move { Ok::<_, Infallible>(page.answer(request).await) }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_headers(HEAD_MAX_LINES)
            .max_buf_size(HEAD_MAX_BYTES)
            .serve_connection(TokioIo::new(stream), service)
    );
    // Errors are a client's that went away or does not speak HTTP: nobody is left to tell.
    let last = tokio::select! {
        _ended = connection.as_mut() => return,
        () = sleep(LIFE) => LAST,
        () = until(&mut stopped) => LAST_AT_STOP,
    };
    connection.as_mut().graceful_shutdown();
    let _ended = timeout(last, connection).await;
}
