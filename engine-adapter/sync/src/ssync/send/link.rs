//! A connection to a receiver: one request at a time, repeated when that helps.

use crate::ssync::ROOT;
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use longhorn_wire::transport;
use std::fmt::Display;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Answers are a checksum, a record or an error text.
const MAX_ANSWER: usize = 64 * 1024;

/// How often and for how long requests are repeated.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// After the first attempt.
    pub times: u32,
    /// Pause before the second attempt; doubles with each.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// How long to try to reach a receiver that may not listen yet.
    pub connect: Duration,
}

impl Default for Retry {
    /// As upstream's.
    fn default() -> Self {
        Self {
            times: 5,
            first: Duration::from_secs(2),
            longest: Duration::from_secs(30),
            connect: Duration::from_secs(120),
        }
    }
}

/// Where a receiver is and how to talk to it.
#[derive(Clone)]
pub struct Address {
    pub host: String,
    pub port: u16,
    /// For one request, from connecting to the last byte of the answer.
    pub timeout: Duration,
    pub retry: Retry,
}

impl Address {
    /// Host and port as in a URL.
    fn authority(&self) -> String {
        match self.host.contains(':') && !self.host.starts_with('[') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    fn bare_host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// An answer: its status and body.
pub type Answer = (StatusCode, Bytes);

/// A connection, made when needed.
pub struct Link {
    address: Address,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Link {
    pub fn new(address: Address) -> Self {
        Self { address, sender: None }
    }

    /// Sends a request until it succeeds, or will not: 3xx and 4xx are final, except 429.
    pub async fn ask(&mut self, method: Method, target: &str, body: Bytes) -> Result<Bytes> {
        let retry = self.address.retry;
        let (mut left, mut pause) = (retry.times, retry.first);
        loop {
            let error = match self.once(method.clone(), target, body.clone()).await {
                Ok((StatusCode::OK, answer)) => return Ok(answer),
                Ok(answer) if is_final(answer.0) => return Err(self.refused(target, &answer)),
                Ok(answer) => self.refused(target, &answer),
                Err(error) => error,
            };
            if left == 0 {
                return Err(error);
            }
            log::warn("ssync-retry", &[("error", &error), ("left", &left)]);
            left -= 1;
            sleep(pause).await;
            pause = retry.longest.min(pause * 2);
        }
    }

    /// Sends the first request to a receiver, waiting for it to listen; returns any answer.
    pub async fn reach(&mut self, target: &str) -> Result<Answer> {
        let until = Instant::now() + self.address.retry.connect;
        loop {
            match self.once(Method::GET, target, Bytes::new()).await {
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => sleep(Duration::from_secs(1).min(self.address.retry.first)).await,
                answer => return answer,
            }
        }
    }

    /// Sends a request once. A connection that was kept may have been closed by the other side
    /// meanwhile: then a new one is tried, all requests being repeatable.
    pub async fn once(&mut self, method: Method, target: &str, body: Bytes) -> Result<Answer> {
        let kept = self.sender.is_some();
        match self.attempt(method.clone(), target, body.clone()).await {
            Err(Trouble::Broken(_)) if kept => self.attempt(method, target, body).await,
            other => other,
        }
        .map_err(|trouble| self.trouble(target, &trouble))
    }

    /// What a refusal means to the caller.
    pub fn refused(&self, target: &str, answer: &Answer) -> Error {
        let text = String::from_utf8_lossy(&answer.1);
        let text = text.trim_end();
        Error::new(ErrorKind::Io, format!("{}: {} {text}", self.what(target), answer.0))
    }

    fn trouble(&self, target: &str, trouble: &Trouble) -> Error {
        let text = match trouble {
            Trouble::Broken(error) => error.clone(),
            Trouble::Late => format!("no answer within {:?}", self.address.timeout),
        };
        Error::new(ErrorKind::Io, format!("{}: {text}", self.what(target)))
    }

    fn what(&self, target: &str) -> String {
        format!("receiver {}: {target}", self.address.authority())
    }

    async fn attempt(
        &mut self,
        method: Method,
        target: &str,
        body: Bytes,
    ) -> std::result::Result<Answer, Trouble> {
        // Taken, so that a connection with a request half done is never used again.
        let sender = self.sender.take();
        let exchange = async {
            let mut sender = match sender.filter(|sender| !sender.is_closed()) {
                Some(sender) => sender,
                None => connect(&self.address).await?,
            };
            sender.ready().await?;
            let request = Request::builder()
                .method(method)
                .uri(format!("{ROOT}{target}"))
                .header(HOST, self.address.authority())
                .header(ACCEPT, "application/json")
                .body(Full::new(body))?;
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|error| Trouble::Broken(error.to_string()))?;
            Ok((sender, (status, body.to_bytes())))
        };
        let limit = self.address.timeout;
        let (sender, answer) = timeout(limit, exchange).await.unwrap_or(Err(Trouble::Late))?;
        self.sender = Some(sender);
        Ok(answer)
    }
}

async fn connect(address: &Address) -> std::result::Result<SendRequest<Full<Bytes>>, Trouble> {
    let line = transport::connect(address.bare_host(), address.port).await?;
    let (sender, connection) = http1::handshake(TokioIo::new(line)).await?;
    // Ends with the sender, or when the other side hangs up.
    tokio::spawn(connection);
    Ok(sender)
}

/// Repeating the request will not help.
fn is_final(status: StatusCode) -> bool {
    (300..500).contains(&status.as_u16()) && status != StatusCode::TOO_MANY_REQUESTS
}

enum Trouble {
    Broken(String),
    Late,
}

impl<E: Display> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Broken(error.to_string())
    }
}
