//! HTTP requests to object stores.

use super::tls::{self, TlsConnector};
use dbs_core::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use ureq::http::{HeaderMap, Request};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{ConnectProxyConnector, Connector, TcpConnector};
use ureq::{Agent, Proxy};

/// Gives the value of an environment variable.
pub(crate) type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Tries of one request.
const TRIES: u32 = 10;
/// The same while a store is opened: nothing is lost then, and a wrong name is told soon.
const FIRST_TRIES: u32 = 4;
/// The pause before the second try; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(50);
/// A server that says nothing for so long has gone.
const SILENCE: Duration = Duration::from_secs(60);
/// A connection is made in this time.
const CONNECT: Duration = Duration::from_secs(10);
/// A removal has its answer in this time, or is given up: see `Lock::check_fresh`.
const REMOVAL: Duration = Duration::from_secs(70);
/// Connections that are kept for the next request.
const IDLE: usize = 64;

/// Sends requests.
pub(crate) struct Http {
    agent: Agent,
    tries: u32,
    stop: Arc<AtomicBool>,
}

/// The answer to a request.
pub(crate) struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

/// What to do with an answer.
pub(crate) enum Verdict<T> {
    Done(T),
    /// Try once more, at once if it is the request that was wrong.
    Again {
        error: Error,
        at_once: bool,
    },
}

impl Http {
    /// For requests to `host`. `certificates` are trusted besides those of the system.
    ///
    /// # Errors
    /// `Invalid` for certificates or a proxy that make no sense.
    pub fn new(
        variable: Variables<'_>,
        host: &str,
        is_secure: bool,
        certificates: Option<&str>,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("dbs/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .timeout_per_write(Some(SILENCE))
            .max_idle_connections(IDLE)
            .max_idle_connections_per_host(IDLE)
            .proxy(proxy(variable, host, is_secure)?);
        let config = config.build();
        // Without TLS nothing asks for certificates.
        let agent = if is_secure {
            let tls = TlsConnector(Arc::new(tls::config(certificates)?));
            let connector =
                ().chain(ConnectProxyConnector::default())
                    .chain(TcpConnector::default())
                    .chain(tls);
            Agent::with_parts(config, connector, DefaultResolver::default())
        } else {
            Agent::new_with_config(config)
        };
        Ok(Self { agent, tries: FIRST_TRIES, stop: Arc::clone(stop) })
    }

    /// Is patient with a server that has answered once.
    pub fn be_patient(&mut self) {
        self.tries = TRIES;
    }

    /// Sends a request that `make` makes anew for each try, until `judge` has a result.
    ///
    /// # Errors
    /// The last error.
    pub fn call<T>(
        &self,
        limit: u64,
        make: impl Fn() -> Result<Request<Vec<u8>>>,
        judge: impl Fn(Answer) -> Result<Verdict<T>>,
    ) -> Result<T> {
        let (mut pause, mut corrected) = (PAUSE, false);
        for attempt in 1.. {
            let (error, at_once) = match self.send(make()?, limit) {
                Ok(answer) => match judge(answer)? {
                    Verdict::Done(result) => return Ok(result),
                    Verdict::Again { error, at_once } => (error, at_once),
                },
                Err(error) if error.kind() == ErrorKind::Io => (error, false),
                Err(error) => return Err(error),
            };
            if at_once && !corrected {
                corrected = true;
                continue;
            }
            if at_once || attempt >= self.tries || self.stop.load(Ordering::SeqCst) {
                return Err(error);
            }
            // Clients that were refused together do not come back together.
            let mut random = [0];
            let _ = getrandom::fill(&mut random);
            crate::pool::pause(pause + pause * u32::from(random[0]) / 256, &self.stop);
            pause *= 2;
        }
        unreachable!("the last try returns")
    }

    /// Sends one request; an answer that is longer than `limit` is `Corrupt`.
    pub fn send(&self, request: Request<Vec<u8>>, limit: u64) -> Result<Answer> {
        let what = format!("{} {}", request.method(), request.uri().path());
        let answer = match request.method().as_str() {
            "PUT" | "POST" => self.agent.run(request),
            "DELETE" => {
                let request = self.agent.configure_request(request.map(|_| ()));
                self.agent.run(request.timeout_global(Some(REMOVAL)).build())
            }
            _ => self.agent.run(request.map(|_| ())),
        };
        let answer = answer.map_err(|e| failed(&what, e))?;
        let (parts, mut body) = answer.into_parts();
        let read = body.with_config().limit(limit + 1).read_to_vec();
        let body = match read {
            Err(ureq::Error::BodyExceedsLimit(_)) => return Err(super::too_long(&what, limit)),
            read => read.map_err(|e| failed(&what, e))?,
        };
        if body.len() as u64 > limit {
            return Err(super::too_long(&what, limit));
        }
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body })
    }
}

impl Answer {
    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Whether the object ends before the range that was asked for: an empty one has no first byte.
    pub fn is_beyond(&self) -> bool {
        self.status == 416
    }

    /// Whether another try may be answered otherwise.
    pub fn is_passing(&self) -> bool {
        matches!(self.status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
    }
}

fn failed(what: &str, error: ureq::Error) -> Error {
    use ureq::Error as E;
    match error {
        // That is how TLS says that it does not trust the server.
        E::Io(error) if error.kind() == std::io::ErrorKind::InvalidData => Error::invalid(format!(
            "{what}: {error}. The variables with certificates (AWS_CERT, AZBLOB_CERT) name those that are trusted besides \
             the system's"
        )),
        E::Io(error) => Error::io(error, what),
        // What it says can have the whole URL, in which there can be a secret.
        E::BadUri(_) => Error::invalid(format!("{what}: its URL is none")),
        E::Http(_) | E::InvalidProxyUrl | E::TlsRequired => {
            Error::invalid(format!("{what}: {error}"))
        }
        other => Error::io(std::io::Error::other(other.to_string()), what),
    }
}

/// The proxy for requests to a host, as other programs understand the variables.
fn proxy(variable: Variables<'_>, host: &str, is_secure: bool) -> Result<Option<Proxy>> {
    let either = |upper: &str, lower: &str| variable(upper).or_else(|| variable(lower));
    let found = if is_secure {
        either("HTTPS_PROXY", "https_proxy")
    } else {
        either("HTTP_PROXY", "http_proxy")
    };
    let Some(proxy) = found else { return Ok(None) };
    let host = host.rsplit_once(':').map_or(host, |(name, _)| name).to_ascii_lowercase();
    for part in either("NO_PROXY", "no_proxy").unwrap_or_default().split(',') {
        let part =
            part.trim().trim_start_matches("*.").trim_start_matches('.').to_ascii_lowercase();
        let is_below =
            host.strip_suffix(&part).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        if part == "*" || (!part.is_empty() && is_below) {
            return Ok(None);
        }
    }
    let proxy = if proxy.contains("://") { proxy } else { format!("http://{proxy}") };
    // Before the `@` there can be a password.
    let place = proxy.rsplit(['@', '/']).next().unwrap_or_default();
    Proxy::new(&proxy).map(Some).map_err(|_| {
        Error::invalid(format!(
            "the proxy at `{place}` cannot be used: write it as http://HOST:PORT"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_asked_through_a_proxy() {
        let variable = |name: &str| match name {
            "HTTPS_PROXY" => Some("proxy:3128".to_owned()),
            "NO_PROXY" => Some("example.com, .local,10.0.0.1".to_owned()),
            _ => None,
        };
        for (host, through) in [
            ("s3.amazonaws.com", true),
            ("example.com:9000", false),
            ("minio.example.com", false),
            ("notexample.com", true),
            ("a.local", false),
            ("10.0.0.1:9000", false),
            ("10.0.0.11", true),
        ] {
            assert_eq!(proxy(&variable, host, true).unwrap().is_some(), through, "{host}");
        }
        assert!(proxy(&variable, "s3.amazonaws.com", false).unwrap().is_none());
    }

    #[test]
    fn the_password_of_a_proxy_is_not_told() {
        for bad in ["ftp://user:secret@host:1", "http://user:secret@ho st", "user:secret@ho st"] {
            let variable = |name: &str| (name == "HTTPS_PROXY").then(|| bad.to_owned());
            let error = proxy(&variable, "s3.amazonaws.com", true).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
