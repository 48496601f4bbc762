//! The answer to a request: who is let in, and to what.

use crate::address::Names;
use crate::assets::Assets;
use crate::subject::{Leave, Order, Subject, encode};
use crate::token::Token;
use dbs_control::Failure;
use dbs_core::{Error, ErrorKind};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Longest body of a request.
const BODY_MAX_BYTES: usize = 64 << 10;
/// How long a client may take to send one.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Of errors that are the page's, and not of a command.
const REFUSED: &str = "refused";

/// What a browser may do with the page: run and load what comes from here, and nothing else.
const POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// What all requests share.
pub(crate) struct Page {
    pub(crate) subject: Arc<dyn Subject>,
    pub(crate) assets: Assets,
    pub(crate) token: Token,
    pub(crate) names: Names,
    /// `http` or `https`.
    pub(crate) scheme: &'static str,
    pub(crate) admin: bool,
    /// For commands that look at every layer or extent.
    pub(crate) one_at_a_time: Arc<Semaphore>,
    /// For commands that change something.
    pub(crate) changes: Arc<Semaphore>,
    /// Says when the server stops.
    pub(crate) stopped: watch::Receiver<bool>,
}

/// Says to what works for a request that nobody waits for the answer any more, when it is dropped.
struct Waits(Arc<AtomicBool>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// An answer.
type Answer = Response<Full<Bytes>>;
type Answered = Result<Answer, Refusal>;

/// What is said in place of one.
struct Refusal {
    status: StatusCode,
    failure: Failure,
}

impl From<Refusal> for Answer {
    fn from(Refusal { status, failure }: Refusal) -> Self {
        let text = json!({ "error": failure }).to_string();
        let mut answer = respond(status, "application/json", text);
        if status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        answer
    }
}

impl Page {
    pub(crate) async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Answer {
        let head = request.method() == Method::HEAD;
        let mut answer = self.answered(request).await.unwrap_or_else(Answer::from);
        if head {
            *answer.body_mut() = Full::default();
        }
        let fixed = [
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::X_FRAME_OPTIONS, "DENY"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-store"),
        ];
        let more = [
            ("cross-origin-opener-policy", "same-origin"),
            ("cross-origin-resource-policy", "same-origin"),
        ];
        let headers = answer.headers_mut();
        for (name, value) in fixed {
            headers.insert(name, HeaderValue::from_static(value));
        }
        for (name, value) in more {
            headers.insert(name, HeaderValue::from_static(value));
        }
        answer
    }

    async fn answered(self: Arc<Self>, request: Request<Incoming>) -> Answered {
        let host = self.host(request.headers())?;
        let path = request.uri().path().to_owned();
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        if !path.starts_with("/api/") {
            let Some(file) = self.assets.find(&path) else {
                return Err(refusal(StatusCode::NOT_FOUND, "there is no such page"));
            };
            return match is_read {
                true => Ok(respond(StatusCode::OK, file.kind, file.text)),
                false => Err(refusal(StatusCode::METHOD_NOT_ALLOWED, "this can only be read")),
            };
        }
        self.let_in(request.headers(), &host, is_read)?;
        match (is_read, path.as_str()) {
            (true, "/api/live") => {
                let cursor = cursor(request.uri().query()).map(str::to_owned);
                self.ask(move |page, _| page.subject.live(cursor.as_deref(), page.admin)).await
            }
            (true, "/api/findings") => self.ask(|page, _| page.subject.findings()).await,
            (false, "/api/command") if request.method() == Method::POST => {
                self.command(request).await
            }
            (_, "/api/live" | "/api/findings" | "/api/command") => {
                Err(refusal(StatusCode::METHOD_NOT_ALLOWED, "not with this method"))
            }
            _ => Err(refusal(StatusCode::NOT_FOUND, "there is nothing of this name")),
        }
    }

    /// The host that the request is for, which must be a name of this page.
    fn host(&self, headers: &HeaderMap) -> Result<String, Refusal> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok());
        let known = host.filter(|host| self.names.have(host) && hosts.next().is_none());
        let text = "this page is not called so: ask for it by its address, or start the server with --web-name NAME";
        known.map(str::to_owned).ok_or_else(|| refusal(StatusCode::FORBIDDEN, text))
    }

    /// Lets in who has the token. A request that changes something must not come from another site either, though
    /// one that has the token cannot.
    fn let_in(&self, headers: &HeaderMap, host: &str, is_read: bool) -> Result<(), Refusal> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let origin = headers.get(header::ORIGIN).map(|origin| origin.as_bytes());
        let ours = format!("{}://{host}", self.scheme);
        let is_foreign = origin.is_some_and(|origin| origin != ours.as_bytes());
        let site = text("sec-fetch-site").unwrap_or("same-origin");
        if is_foreign || !["same-origin", "none"].contains(&site) {
            return Err(refusal(StatusCode::FORBIDDEN, "requests of other sites are refused"));
        }
        let token = text("authorization").and_then(|value| value.strip_prefix("Bearer "));
        if !token.is_some_and(|token| self.token.is(token.trim())) {
            return Err(refusal(StatusCode::UNAUTHORIZED, "the token is missing or wrong"));
        }
        let kind = text("content-type").unwrap_or_default();
        if !is_read && kind.split(';').next() != Some("application/json") {
            return Err(refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the body must be JSON"));
        }
        Ok(())
    }

    /// Runs a command that the page may send.
    async fn command(self: Arc<Self>, request: Request<Incoming>) -> Answered {
        let body = Limited::new(request.into_body(), BODY_MAX_BYTES).collect();
        let Ok(body) = timeout(BODY_TIMEOUT, body).await else {
            return Err(refusal(StatusCode::REQUEST_TIMEOUT, "the body did not come in time"));
        };
        let body = body.map_err(|error| {
            let long = error.is::<http_body_util::LengthLimitError>();
            let status = if long { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::BAD_REQUEST };
            refusal(status, "the body is too long, or was cut off")
        })?;
        let wire = serde_json::from_slice::<Value>(&body.to_bytes()).map_err(|e| e.to_string());
        let order = wire.and_then(|wire| self.subject.order(wire));
        let Order { leave, run } = order.map_err(|error| {
            refusal(StatusCode::BAD_REQUEST, &format!("this is no command: {error}"))
        })?;
        let turn = match leave {
            Leave::Look => None,
            Leave::LookAtAll => Arc::clone(&self.one_at_a_time).acquire_owned().await.ok(),
            // One that waits must not take the threads that others need to look.
            Leave::Change if self.admin => {
                let turn = Arc::clone(&self.changes).try_acquire_owned();
                let text = "another change that was asked for here is being made";
                Some(turn.map_err(|_| refusal(StatusCode::CONFLICT, text))?)
            }
            Leave::Change => {
                let text = "this page can only look: start the server with --web-admin to change something here";
                return Err(refusal(StatusCode::FORBIDDEN, text));
            }
            Leave::Lacks(name) => {
                let text =
                    format!("the command must have the {name} of what its user has confirmed");
                return Err(refusal(StatusCode::BAD_REQUEST, &text));
            }
            Leave::Never => {
                let text = "this command cannot be given here: use the command line on the machine of the server";
                return Err(refusal(StatusCode::FORBIDDEN, text));
            }
        };
        self.ask(move |_, go_on| {
            // Its turn lasts as long as the command does, and not only as its client does.
            let _turn = turn;
            encode(&run(go_on)?)
        })
        .await
    }

    /// Asks what the page is about, on another thread: it may have to wait. When the client has gone or the server
    /// stops, it is told not to go on, and does not begin.
    async fn ask(
        self: Arc<Self>,
        ask: impl FnOnce(&Self, &mut dyn FnMut() -> bool) -> dbs_core::Result<Vec<u8>> + Send + 'static,
    ) -> Answered {
        let gone = Arc::new(AtomicBool::new(false));
        let _waits = Waits(Arc::clone(&gone));
        let work = move || {
            let mut go_on = || !gone.load(Ordering::SeqCst) && !*self.stopped.borrow();
            if !go_on() {
                return Err(Error::new(ErrorKind::Interrupted, "nobody waits for the answer"));
            }
            ask(&self, &mut go_on)
        };
        match spawn_blocking(work).await {
            Ok(Ok(text)) => Ok(respond(StatusCode::OK, "application/json", text)),
            Ok(Err(error)) => {
                Err(Refusal { status: status(error.kind()), failure: Failure::from(&error) })
            }
            Err(_) => Err(refusal(StatusCode::INTERNAL_SERVER_ERROR, "the question has panicked")),
        }
    }
}

/// What a page was told the last time.
fn cursor(query: Option<&str>) -> Option<&str> {
    query?.split('&').find_map(|part| part.strip_prefix("since="))
}

fn status(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Exists | ErrorKind::Busy => StatusCode::CONFLICT,
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::ReadOnly => StatusCode::FORBIDDEN,
        ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn refusal(status: StatusCode, text: &str) -> Refusal {
    Refusal { status, failure: Failure { kind: REFUSED.to_owned(), message: text.to_owned() } }
}

fn respond(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
