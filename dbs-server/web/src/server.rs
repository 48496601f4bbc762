//! The server of the page: one thread with its connections, and a few that ask what the page is about.

use crate::address::Names;
use crate::answer::Page;
use crate::assets::Assets;
use crate::subject::Subject;
use crate::token::Token;
use dbs_core::{Error, Result};
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
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};
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
}

/// A page that is being served. Dropping it ends that, and returns when nothing of it asks anything any more.
#[derive(Debug)]
pub struct WebServer {
    url: String,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl WebServer {
    /// Serves the page on this socket. Without TLS that must be loopback.
    ///
    /// # Errors
    /// `Invalid` for another address without TLS; `Io` if the socket cannot be used, or there is no thread for it.
    pub fn start(
        subject: Arc<dyn Subject>,
        listener: TcpListener,
        options: WebOptions,
    ) -> Result<Self> {
        let failed = |e: io::Error| Error::io(e, "serving the web page");
        let address = listener.local_addr().map_err(failed)?;
        if options.tls.is_none() && !address.ip().is_loopback() {
            return Err(Error::invalid(format!(
                "the web page on {address} needs TLS, as its token could be read on the way: give --tls-dir, or listen \
                 on loopback and come through `ssh -L`"
            )));
        }
        listener.set_nonblocking(true).map_err(failed)?;
        let runtime = Builder::new_current_thread()
            .enable_all()
            .thread_name("web-ask")
            .max_blocking_threads(ASKING_THREADS)
            .build()
            .map_err(failed)?;
        let scheme = if options.tls.is_some() { "https" } else { "http" };
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
            stopped: stopped.clone(),
        });
        let serve = move || run(&runtime, listener, acceptor, page, stopped);
        let thread = thread::Builder::new().name("web".to_owned()).spawn(serve);
        let url = format!("{scheme}://{address}/");
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

fn run(
    runtime: &Runtime,
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
    page: Arc<Page>,
    stopped: watch::Receiver<bool>,
) {
    let served = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        accept(&listener, acceptor, &page, stopped).await;
        Ok::<_, io::Error>(())
    });
    if let Err(error) = served {
        log::error("web", &[("error", &error)]);
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
