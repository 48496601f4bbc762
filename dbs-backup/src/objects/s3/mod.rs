//! Objects in S3, or in what speaks as S3 does.
//!
//! Source: AWS's S3 API; the variables are those of upstream's `s3/s3.go` and `s3/s3_service.go` (longhorn/backupstore,
//! commit `ab5179e`).

mod credentials;
mod sign;
mod xml;

use super::http::{Answer, Http, Variables, Verdict};
use super::{Objects, Stat, missing};
use crate::pool;
use crate::url::{Url, encode};
use credentials::Provider;
use dbs_core::{Error, ErrorKind, Result};
use jiff::{SignedDuration, Timestamp};
use sign::Signed;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use ureq::http::Request;
use xml::{Page, Problem};

/// Bytes of an answer that is a list or an error.
const LIST_LIMIT: u64 = 16 << 20;
/// Objects that are removed at once.
const REMOVALS: usize = 16;
/// A clock that is so wrong is told from one that is not.
const SKEW: SignedDuration = SignedDuration::from_secs(60);

/// A bucket, and what all keys begin with.
pub struct S3 {
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
    stop: Arc<AtomicBool>,
}

/// What one request is about.
struct Call<'a> {
    method: &'static str,
    /// Without the prefix of all keys; none for the bucket.
    path: Option<&'a str>,
    query: String,
    body: &'a [u8],
    limit: u64,
}

impl S3 {
    /// Opens the bucket that a URL names, and tries whether it can be listed.
    ///
    /// # Errors
    /// `Invalid` for what is no such URL, and for wrong credentials; `NotFound` if there is no such bucket; `Io`.
    pub fn open(url: &Url, variable: Variables<'_>, stop: &Arc<AtomicBool>) -> Result<Self> {
        let (bucket, region) = match &url.user {
            Some(bucket) => (bucket.clone(), Some(url.host.clone())),
            None => (url.host.clone(), None),
        };
        if bucket.is_empty() || url.path.is_empty() {
            return Err(Error::invalid(
                "invalid URL. Must be either s3://bucket@region/path/, or s3://bucket/path",
            ));
        }
        let region = region.filter(|region| !region.is_empty());
        let region =
            region.or_else(|| variable("AWS_REGION")).or_else(|| variable("AWS_DEFAULT_REGION"));
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        let endpoint = variable("AWS_ENDPOINTS");
        let in_path = match variable("VIRTUAL_HOSTED_STYLE").as_deref() {
            Some("true") => false,
            Some("false") => true,
            // A dot would not fit the certificate.
            _ => endpoint.is_some() || bucket.contains('.'),
        };
        let endpoint =
            endpoint.unwrap_or_else(|| format!("https://s3.{region}.{}", domain(&region)));
        let (scheme, host) = match endpoint.trim_end_matches('/').split_once("://") {
            Some((scheme @ ("http" | "https"), host)) if !host.contains('/') => (scheme, host),
            _ => {
                return Err(Error::invalid(format!(
                    "AWS_ENDPOINTS is `{endpoint}`: write it as https://HOST or http://HOST:PORT"
                )));
            }
        };
        let usual = if scheme == "https" { ":443" } else { ":80" };
        let host = host.strip_suffix(usual).unwrap_or(host);
        let host = if in_path { host.to_owned() } else { format!("{bucket}.{host}") };
        let http =
            Http::new(variable, &host, scheme == "https", variable("AWS_CERT").as_deref(), stop)?;
        let parts: Vec<_> = url.path.split('/').filter(|part| !part.is_empty()).collect();
        let mut s3 = Self {
            http,
            credentials: Provider::new(variable, &region, stop)?,
            prefix: parts.iter().map(|part| format!("{part}/")).collect(),
            origin: format!("{scheme}://{host}"),
            root: if in_path { format!("/{}", encode(&bucket, "")) } else { String::new() },
            host,
            bucket,
            region: Mutex::new(region),
            ahead: Mutex::new(SignedDuration::ZERO),
            stop: Arc::clone(stop),
        };
        s3.page("", Some("/"), None, 1)?;
        s3.http.be_patient();
        Ok(s3)
    }

    /// Carries a request out; the answer is a success, or that the object is not there.
    fn call(&self, call: &Call<'_>) -> Result<Answer> {
        self.http.call(call.limit, || self.request(call), |answer| self.judge(call, answer))
    }

    fn request(&self, call: &Call<'_>) -> Result<Request<Vec<u8>>> {
        let key = call.path.map_or_else(String::new, |path| format!("/{}{path}", self.prefix));
        let path = format!("{}{}", self.root, encode(&key, "/"));
        let path = if path.is_empty() { "/".to_owned() } else { path };
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ahead = *self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let signed = Signed {
            method: call.method,
            path: &path,
            query: &call.query,
            host: &self.host,
            // The server compares it with what it gets.
            body: &sign::sha256(call.body),
            region: &region,
            time: Timestamp::now() + ahead,
        };
        let sign = if call.query.is_empty() { "" } else { "?" };
        let uri = format!("{}{path}{sign}{}", self.origin, call.query);
        let mut request = Request::builder().method(call.method).uri(&uri);
        for (name, value) in sign::headers(&signed, &self.credentials.get()?) {
            request = request.header(name, value);
        }
        request.body(call.body.to_vec()).map_err(|e| Error::invalid(format!("{uri}: {e}")))
    }

    fn judge(&self, call: &Call<'_>, answer: Answer) -> Result<Verdict<Answer>> {
        if matches!(answer.status, 200..=299) {
            return Ok(Verdict::Done(answer));
        }
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        let problem: Problem = quick_xml::de::from_str(&text).unwrap_or_default();
        let what = call.path.unwrap_or("a list");
        let said = if text.is_empty() { String::new() } else { xml::error_text(&text) };
        let message = format!("AWS Error: {} {what} answers {} {said}", call.method, answer.status);
        let io = |text: String| {
            Error::io(std::io::Error::other(text), format!("bucket {}", self.bucket))
        };
        if answer.status == 404 && problem.code != "NoSuchBucket" && call.path.is_some() {
            return Ok(Verdict::Done(answer));
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
        if answer.is_passing() || problem.code == "RequestTimeout" || problem.code == "SlowDown" {
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

    fn page(
        &self,
        folder: &str,
        delimiter: Option<&str>,
        token: Option<&str>,
        most: u32,
    ) -> Result<Page> {
        let folder = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        // In the order of their names.
        let mut query = Vec::new();
        query.extend(token.map(|token| format!("continuation-token={}", encode(token, ""))));
        query.extend(delimiter.map(|delimiter| format!("delimiter={}", encode(delimiter, ""))));
        query.push("list-type=2".to_owned());
        query.push(format!("max-keys={most}"));
        query.push(format!("prefix={}", encode(&format!("{}{folder}", self.prefix), "")));
        let call = Call {
            method: "GET",
            path: None,
            query: query.join("&"),
            body: &[],
            limit: LIST_LIMIT,
        };
        let answer = self.call(&call)?;
        xml::parse(&String::from_utf8_lossy(&answer.body), "a list of objects")
    }

    /// Calls `found` with what each key or prefix has after the folder.
    fn each(
        &self,
        folder: &str,
        delimiter: Option<&str>,
        found: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let before = format!("{}{folder}/", self.prefix);
        let mut token = None;
        loop {
            let page = self.page(folder, delimiter, token.as_deref(), 1000)?;
            let keys = page.contents.iter().map(|object| &object.key);
            for key in keys.chain(page.common_prefixes.iter().map(|prefix| &prefix.prefix)) {
                match key.strip_prefix(&before).map(|rest| rest.trim_end_matches('/')) {
                    None | Some("") => {}
                    Some(rest) => found(rest)?,
                }
            }
            match page.next_continuation_token.filter(|_| page.is_truncated) {
                None => return Ok(()),
                // A server that gives the same page again does not end.
                Some(next) if Some(&next) == token.as_ref() => {
                    return Err(Error::corrupt("the list of objects goes in a circle"));
                }
                next => token = next,
            }
        }
    }
}

impl Objects for S3 {
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let call = Call { method: "GET", path: Some(path), query: String::new(), body: &[], limit };
        let answer = self.call(&call)?;
        if answer.status == 404 {
            return Err(missing(path));
        }
        Ok(answer.body)
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        let call = Call {
            method: "PUT",
            path: Some(path),
            query: String::new(),
            body: content,
            limit: LIST_LIMIT,
        };
        match self.call(&call)?.status {
            404 => Err(Error::not_found(format!("bucket {} is not there", self.bucket))),
            _ => Ok(()),
        }
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        let call =
            Call { method: "HEAD", path: Some(path), query: String::new(), body: &[], limit: 0 };
        let answer = self.call(&call)?;
        if answer.status == 404 {
            return Ok(None);
        }
        let size = answer.header("content-length").and_then(|text| text.parse().ok());
        let modified = answer.header("last-modified").and_then(parse_date);
        match (size, modified) {
            (Some(size), Some(modified)) => {
                Ok(Some(Stat { size, modified: SystemTime::from(modified) }))
            }
            _ => Err(Error::new(
                ErrorKind::Io,
                format!("the server does not say how large {path} is, or when it was written"),
            )),
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let mut all = Vec::new();
        self.each(folder, Some("/"), &mut |name| {
            all.push(name.to_owned());
            Ok(())
        })?;
        all.sort();
        Ok(all)
    }

    fn walk(&self, folder: &str, found: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        self.each(folder, None, found)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let call = Call {
            method: "DELETE",
            path: Some(path),
            query: String::new(),
            body: &[],
            limit: LIST_LIMIT,
        };
        self.call(&call).map(drop)
    }

    fn remove_all(&self, folder: &str) -> Result<()> {
        let mut all = Vec::new();
        self.walk(folder, &mut |path| {
            all.push(format!("{folder}/{path}"));
            Ok(())
        })?;
        pool::each(REMOVALS, &self.stop, all.into_iter(), |path| self.remove(&path), |_| Ok(()))
    }

    /// An object is durable when its writing was acknowledged.
    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

/// Reads an answer, for the fuzzer.
#[cfg(feature = "testing")]
pub(super) fn hostile_answer(text: &str) {
    let _ = (xml::parse::<Page>(text, "a list"), xml::error_text(text), parse_date(text));
}

/// The domain of a region's services.
fn domain(region: &str) -> &'static str {
    if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" }
}

/// A time as HTTP has it.
fn parse_date(text: &str) -> Option<Timestamp> {
    jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()
}
