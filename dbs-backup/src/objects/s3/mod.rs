//! Objects in S3, or in what speaks as S3 does.
//!
//! Source: AWS's S3 API; the variables are those of upstream's `s3/s3.go` and `s3/s3_service.go` (longhorn/backupstore,
//! commit `ab5179e`).

mod credentials;
mod sign;
mod xml;

use super::http::{Answer, Http, Variables, Verdict};
use super::remote::{self, Call, Page, Remote, Service, parse_date};
use crate::url::{Url, encode};
use credentials::Provider;
use dbs_core::{Error, Result};
use jiff::{SignedDuration, Timestamp};
use sign::Signed;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use ureq::http::Request;
use xml::Problem;

/// A clock that is so wrong is told from one that is not.
const SKEW: SignedDuration = SignedDuration::from_secs(60);

/// A bucket, and what all keys begin with.
pub(crate) struct S3 {
    http: Http,
    credentials: Provider,
    bucket: String,
    prefix: String,
    /// `https://` and the host, with the bucket before it or not.
    origin: String,
    host: String,
    /// The bucket, if it is in the path.
    root: String,
    region: Mutex<String>,
    /// How far the server's clock is ahead.
    ahead: Mutex<SignedDuration>,
}

/// Opens the bucket that a URL names, and tries whether it can be listed.
///
/// # Errors
/// `Invalid` for what is no such URL, and for wrong credentials; `NotFound` if there is no such bucket; `Io`.
pub(crate) fn open(
    url: &Url,
    variable: Variables<'_>,
    stop: &Arc<AtomicBool>,
) -> Result<Remote<S3>> {
    let mut remote = Remote::open(S3::new(url, variable, stop)?, stop)?;
    remote.service().http.be_patient();
    Ok(remote)
}

impl S3 {
    fn new(url: &Url, variable: Variables<'_>, stop: &Arc<AtomicBool>) -> Result<Self> {
        let (bucket, region) = remote::holder(url);
        if bucket.is_empty() || url.path.is_empty() {
            return Err(Error::invalid(
                "invalid URL. Must be either s3://bucket@region/path/, or s3://bucket/path",
            ));
        }
        let region =
            region.or_else(|| variable("AWS_REGION")).or_else(|| variable("AWS_DEFAULT_REGION"));
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        let in_path = match variable("VIRTUAL_HOSTED_STYLE").as_deref() {
            Some("true") => false,
            Some("false") => true,
            // A dot would not fit the certificate.
            _ => variable("AWS_ENDPOINTS").is_some() || bucket.contains('.'),
        };
        let (scheme, host) = remote::endpoint(variable, "AWS_ENDPOINTS", || {
            format!("https://s3.{region}.{}", domain(&region))
        })?;
        let usual = if scheme == "https" { ":443" } else { ":80" };
        let host = host.strip_suffix(usual).unwrap_or(&host);
        let host = if in_path { host.to_owned() } else { format!("{bucket}.{host}") };
        let http =
            Http::new(variable, &host, scheme == "https", variable("AWS_CERT").as_deref(), stop)?;
        Ok(Self {
            http,
            credentials: Provider::new(variable, &region, stop)?,
            prefix: remote::prefix(url),
            origin: format!("{scheme}://{host}"),
            root: if in_path { format!("/{}", encode(&bucket, "")) } else { String::new() },
            host,
            bucket,
            region: Mutex::new(region),
            ahead: Mutex::new(SignedDuration::ZERO),
        })
    }

    fn request(&self, call: &Call<'_>) -> Result<Request<Vec<u8>>> {
        let key = call.path.map_or_else(String::new, |path| format!("/{}{path}", self.prefix));
        let path = format!("{}{}", self.root, encode(&key, "/"));
        let path = if path.is_empty() { "/".to_owned() } else { path };
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ahead = *self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let query = call.query();
        // A clock at the end of time is no clock.
        let now = Timestamp::now();
        let signed = Signed {
            method: call.method,
            path: &path,
            query: &query,
            host: &self.host,
            // The server compares it with what it gets.
            body: &sign::sha256(call.body),
            region: &region,
            time: now.checked_add(ahead).unwrap_or(now),
        };
        let sign = if query.is_empty() { "" } else { "?" };
        let uri = format!("{}{path}{sign}{query}", self.origin);
        let mut request = Request::builder().method(call.method).uri(&uri);
        for (name, value) in sign::headers(&signed, &self.credentials.get()?) {
            request = request.header(name, value);
        }
        if let Some(range) = call.range() {
            request = request.header("Range", range);
        }
        request.body(call.body.to_vec()).map_err(|e| Error::invalid(format!("{uri}: {e}")))
    }

    fn judge(&self, call: &Call<'_>, answer: Answer) -> Result<Verdict<Option<Answer>>> {
        if matches!(answer.status, 200..=299) || (call.from.is_some() && answer.is_beyond()) {
            return Ok(Verdict::Done(Some(answer)));
        }
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        let problem: Problem = quick_xml::de::from_str(&text).unwrap_or_default();
        let said = if text.is_empty() { String::new() } else { xml::error_text(&text) };
        let message =
            format!("AWS Error: {} {} answers {} {said}", call.method, call.what(), answer.status);
        let io = |text: String| Error::io(std::io::Error::other(text), self.place());
        // The answer to a HEAD has no text that says it.
        let is_absent = problem.code == "NoSuchKey" || call.method == "HEAD";
        if answer.status == 404 && is_absent && call.path.is_some() {
            return Ok(Verdict::Done(None));
        }
        let wrong_region = matches!(
            problem.code.as_str(),
            "AuthorizationHeaderMalformed" | "PermanentRedirect" | "IncorrectEndpoint"
        ) || answer.status == 301;
        let told = answer.header("x-amz-bucket-region").map(str::to_owned).or(problem.region);
        if let Some(told) = told.filter(|_| wrong_region) {
            let mut region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
            let at_once = *region != told;
            let error = Error::invalid(format!(
                "bucket {} is in region {told}: write it as s3://{}@{told}/PATH",
                self.bucket, self.bucket
            ));
            *region = told;
            return Ok(Verdict::Again { error, at_once });
        }
        let again = match problem.code.as_str() {
            "RequestTimeTooSkewed" => self.follow_clock(&answer),
            "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" => {
                self.credentials.forget()
            }
            // A HEAD has no text that says it.
            "" if call.method == "HEAD" && answer.status == 403 => self.follow_clock(&answer),
            _ => false,
        };
        if again {
            return Ok(Verdict::Again { error: Error::invalid(message), at_once: true });
        }
        // A 404 that does not say what is not there comes from something between here and the server.
        let is_strange = answer.status == 404 && problem.code != "NoSuchBucket";
        let is_passing = matches!(problem.code.as_str(), "RequestTimeout" | "SlowDown");
        if answer.is_passing() || is_strange || is_passing {
            return Ok(Verdict::Again { error: io(message), at_once: false });
        }
        Err(match answer.status {
            404 => Error::not_found(format!("{message}: make the bucket {} first", self.bucket)),
            401 | 403 => {
                Error::invalid(format!("{message}: look at the credentials and their rights"))
            }
            _ => io(message),
        })
    }

    /// Signs by the server's clock from now on, if it is another than ours.
    fn follow_clock(&self, answer: &Answer) -> bool {
        let Some(theirs) = answer.header("date").and_then(parse_date) else { return false };
        let ahead = theirs.duration_since(Timestamp::now());
        let mut known = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = (ahead - *known).abs() > SKEW;
        *known = ahead;
        is_news
    }
}

impl Service for S3 {
    fn call(&self, call: &Call<'_>) -> Result<Option<Answer>> {
        // Credentials may have to be asked for, which can take minutes.
        let make = || self.request(call).and_then(|request| (call.allowed)().map(|()| request));
        self.http.call(call.limit, make, |answer| self.judge(call, answer))
    }

    fn page(&self, prefix: &str, delimited: bool, token: Option<&str>, most: u32) -> Result<Page> {
        let mut query = Vec::new();
        query.extend(token.map(|token| ("continuation-token", token.to_owned())));
        query.extend(delimited.then(|| ("delimiter", "/".to_owned())));
        query.push(("list-type", "2".to_owned()));
        query.push(("max-keys", most.to_string()));
        query.push(("prefix", prefix.to_owned()));
        let answer = self.call(&Call::list(query))?;
        let body = answer.map(|answer| answer.body).unwrap_or_default();
        xml::page(&String::from_utf8_lossy(&body))
    }

    fn prefix(&self) -> &str {
        &self.prefix
    }

    fn place(&self) -> String {
        format!("bucket {}", self.bucket)
    }
}

/// Reads an answer, for the fuzzer.
#[cfg(feature = "testing")]
pub(super) fn hostile_answer(text: &str) {
    let _ = (xml::page(text), xml::error_text(text), parse_date(text));
}

/// The domain of a region's services.
fn domain(region: &str) -> &'static str {
    if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server's clock may say anything.
    #[test]
    fn a_clock_at_the_end_of_time() {
        let url = Url::parse("s3://bucket@region/path").unwrap();
        let variable = |name: &str| name.contains("ACCESS_KEY").then(|| "key".to_owned());
        let s3 = S3::new(&url, &variable, &Arc::default()).unwrap();
        for ahead in [SignedDuration::MAX, SignedDuration::MIN] {
            *s3.ahead.lock().unwrap() = ahead;
            s3.request(&Call::list(Vec::new())).unwrap();
        }
    }

    /// Found by review: a removal was allowed, and then waited for credentials, however long these took.
    #[test]
    fn a_removal_is_allowed_when_there_are_credentials() {
        use std::io::{Read, Write};
        use std::sync::atomic::{AtomicUsize, Ordering};
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", server.local_addr().unwrap());
        let (asked, removed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counts = [Arc::clone(&asked), Arc::clone(&removed)];
        std::thread::spawn(move || {
            for stream in server.incoming() {
                let (mut stream, mut request) = (stream.unwrap(), [0; 4096]);
                let length = stream.read(&mut request).unwrap_or(0);
                let removal = request[..length].starts_with(b"DELETE");
                counts[usize::from(removal)].fetch_add(1, Ordering::SeqCst);
                let keys = r#"{"AccessKeyId":"a","SecretAccessKey":"s"}"#;
                let (length, close) = (keys.len(), "Connection: close");
                let answer =
                    format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n{close}\r\n\r\n{keys}");
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        let url = Url::parse("s3://bucket@region/path").unwrap();
        let variable = |name: &str| match name {
            "AWS_ENDPOINTS" => Some(address.clone()),
            "AWS_CONTAINER_CREDENTIALS_FULL_URI" => Some(format!("{address}/keys")),
            _ => None,
        };
        let s3 = S3::new(&url, &variable, &Arc::default()).unwrap();
        // The lock goes out of date while credentials are asked for.
        let allowed = || match asked.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err(Error::new(dbs_core::ErrorKind::Busy, "not any more")),
        };
        let call = Call { allowed: &allowed, ..Call::of("DELETE", "a/b", &[], 1 << 20) };
        assert!(s3.call(&call).is_err());
        assert_eq!((asked.load(Ordering::SeqCst), removed.load(Ordering::SeqCst)), (1, 0));
    }

    /// Found by review: a removal was tried for ten minutes, whatever had become of its lock.
    #[test]
    fn a_removal_is_allowed_at_each_try() {
        crate::objects::remote::test_removal(|origin| {
            let url = Url::parse("s3://bucket@region/path").unwrap();
            let variable = |name: &str| match name {
                "AWS_ENDPOINTS" => Some(origin.clone()),
                name => name.contains("ACCESS_KEY").then(|| "key".to_owned()),
            };
            S3::new(&url, &variable, &Arc::default()).unwrap()
        });
    }
}
