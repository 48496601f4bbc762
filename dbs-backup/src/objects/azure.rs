//! Objects in Azure's blob storage.
//!
//! Source: Azure's REST API of the Blob service, and *Authorize with Shared Key*; the variables are those of upstream's
//! `azblob/azblob_service.go` (longhorn/backupstore, commit `ab5179e`).

use super::http::{Answer, Http, Variables, Verdict};
use super::{Objects, Stat, missing};
use crate::pool;
use crate::url::{Url, encode};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use dbs_core::{Error, ErrorKind, Result};
use jiff::Timestamp;
use jiff::fmt::rfc2822::{DateTimeParser, DateTimePrinter};
use ring::hmac;
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;
use ureq::http::Request;

/// The version of the API whose requests these are.
const VERSION: &str = "2021-08-06";
/// The domain if neither the URL nor the environment names another.
const DOMAIN: &str = "core.windows.net";
/// Bytes of an answer that is a list or an error.
const LIST_LIMIT: u64 = 16 << 20;
/// Objects that are removed at once.
const REMOVALS: usize = 16;

/// A container, and what all names begin with.
pub struct Azure {
    http: Http,
    account: String,
    key: hmac::Key,
    container: String,
    prefix: String,
    /// Scheme and host.
    origin: String,
    /// The path of the container.
    root: String,
    stop: Arc<AtomicBool>,
}

/// What one request is about.
struct Call<'a> {
    method: &'static str,
    /// Without the prefix of all names; none for the container.
    path: Option<&'a str>,
    /// Names and values, in the order of the names.
    query: Vec<(&'static str, String)>,
    body: &'a [u8],
    limit: u64,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Page {
    blobs: Blobs,
    next_marker: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Blobs {
    blob: Vec<Named>,
    blob_prefix: Vec<Named>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Named {
    name: String,
}

impl Azure {
    /// Opens the container that a URL names, and tries whether it can be listed.
    ///
    /// # Errors
    /// `Invalid` for what is no such URL, and for wrong credentials; `NotFound` if there is no such container; `Io`.
    pub fn open(url: &Url, variable: Variables<'_>, stop: &Arc<AtomicBool>) -> Result<Self> {
        let (container, domain) = match &url.user {
            Some(container) => (container.clone(), Some(url.host.as_str())),
            None => (url.host.clone(), None),
        };
        if container.is_empty() || url.path.is_empty() {
            return Err(Error::invalid(
                "invalid URL. Must be either azblob://container@serviceurl/path/, or azblob://container/path",
            ));
        }
        let (Some(account), Some(key)) =
            (variable("AZBLOB_ACCOUNT_NAME"), variable("AZBLOB_ACCOUNT_KEY"))
        else {
            return Err(Error::invalid("set AZBLOB_ACCOUNT_NAME and AZBLOB_ACCOUNT_KEY"));
        };
        let key = STANDARD
            .decode(key.trim())
            .map_err(|_| Error::invalid("AZBLOB_ACCOUNT_KEY is no key: it is not in base64"))?;
        let domain = domain.filter(|domain| !domain.is_empty()).unwrap_or(DOMAIN);
        let (endpoint, root) = match variable("AZBLOB_ENDPOINT") {
            Some(endpoint) => (endpoint, format!("/{account}/{container}")),
            None => (format!("https://{account}.blob.{domain}"), format!("/{container}")),
        };
        let (scheme, host) = match endpoint.trim_end_matches('/').split_once("://") {
            Some((scheme @ ("http" | "https"), host)) if !host.contains('/') => (scheme, host),
            _ => {
                return Err(Error::invalid(format!(
                    "AZBLOB_ENDPOINT is `{endpoint}`: write it as https://HOST or http://HOST:PORT"
                )));
            }
        };
        let certificates = variable("AZBLOB_CERT");
        let http = Http::new(variable, host, scheme == "https", certificates.as_deref(), stop)?;
        let parts = url.path.split('/').filter(|part| !part.is_empty());
        let mut azure = Self {
            http,
            account,
            key: hmac::Key::new(hmac::HMAC_SHA256, &key),
            container,
            prefix: parts.map(|part| format!("{part}/")).collect(),
            origin: format!("{scheme}://{host}"),
            root,
            stop: Arc::clone(stop),
        };
        azure.page("", true, None, 1)?;
        azure.http.be_patient();
        Ok(azure)
    }

    fn call(&self, call: &Call<'_>) -> Result<Answer> {
        self.http.call(call.limit, || self.request(call), |answer| self.judge(call, answer))
    }

    fn request(&self, call: &Call<'_>) -> Result<Request<Vec<u8>>> {
        let name = call.path.map_or_else(String::new, |path| format!("/{}{path}", self.prefix));
        let path = encode(&format!("{}{name}", self.root), "/");
        let query: Vec<_> = call
            .query
            .iter()
            .map(|(name, value)| format!("{name}={}", encode(value, "")))
            .collect();
        let sign = if query.is_empty() { "" } else { "?" };
        let uri = format!("{}{path}{sign}{}", self.origin, query.join("&"));
        let date = DateTimePrinter::new().timestamp_to_rfc9110_string(&Timestamp::now());
        let date = date.map_err(|e| Error::invalid(format!("the clock is wrong: {e}")))?;
        // In the order of their names.
        let mut headers = vec![("x-ms-date", date), ("x-ms-version", VERSION.to_owned())];
        if call.method == "PUT" {
            headers.insert(0, ("x-ms-blob-type", "BlockBlob".to_owned()));
        }
        let signature = self.signature(call, &path, &headers);
        headers.push(("authorization", format!("SharedKey {}:{signature}", self.account)));
        let mut request = Request::builder().method(call.method).uri(&uri);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.body(call.body.to_vec()).map_err(|e| Error::invalid(format!("{uri}: {e}")))
    }

    fn signature(&self, call: &Call<'_>, path: &str, headers: &[(&str, String)]) -> String {
        let length = Some(call.body.len()).filter(|length| *length > 0);
        let length = length.map_or_else(String::new, |length| length.to_string());
        let headers: String =
            headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
        let query: String =
            call.query.iter().map(|(name, value)| format!("\n{name}:{value}")).collect();
        let Self { account, key, .. } = self;
        let text = format!(
            "{}\n\n\n{length}\n\n\n\n\n\n\n\n\n{headers}/{account}{path}{query}",
            call.method
        );
        STANDARD.encode(hmac::sign(key, text.as_bytes()))
    }

    fn judge(&self, call: &Call<'_>, answer: Answer) -> Result<Verdict<Answer>> {
        if matches!(answer.status, 200..=299) {
            return Ok(Verdict::Done(answer));
        }
        let code = answer.header("x-ms-error-code").unwrap_or_default().to_owned();
        let is_container = code == "ContainerNotFound";
        if answer.status == 404 && call.path.is_some() && !is_container {
            return Ok(Verdict::Done(answer));
        }
        let what = call.path.unwrap_or("a list");
        let message = format!("{} {what} answers {} {code}", call.method, answer.status);
        let io = Error::io(
            std::io::Error::other(message.clone()),
            format!("container {}", self.container),
        );
        if answer.is_passing() {
            return Ok(Verdict::Again { error: io, at_once: false });
        }
        Err(match answer.status {
            404 => {
                Error::not_found(format!("{message}: make the container {} first", self.container))
            }
            401 | 403 => {
                Error::invalid(format!("{message}: look at the account, its key and the clock"))
            }
            _ => io,
        })
    }

    fn page(&self, folder: &str, delimited: bool, marker: Option<&str>, most: u32) -> Result<Page> {
        let folder = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut query = vec![("comp", "list".to_owned())];
        query.extend(delimited.then(|| ("delimiter", "/".to_owned())));
        query.extend(marker.map(|marker| ("marker", marker.to_owned())));
        query.push(("maxresults", most.to_string()));
        query.push(("prefix", format!("{}{folder}", self.prefix)));
        query.push(("restype", "container".to_owned()));
        let call = Call { method: "GET", path: None, query, body: &[], limit: LIST_LIMIT };
        let answer = self.call(&call)?;
        let text = String::from_utf8_lossy(&answer.body);
        quick_xml::de::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|e| Error::io(std::io::Error::other(e.to_string()), "reading a list of blobs"))
    }

    /// Calls `found` with what each name or prefix has after the folder.
    fn each(
        &self,
        folder: &str,
        delimited: bool,
        found: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let before = format!("{}{folder}/", self.prefix);
        let mut marker = None;
        loop {
            let page = self.page(folder, delimited, marker.as_deref(), 5000)?;
            for named in page.blobs.blob.iter().chain(&page.blobs.blob_prefix) {
                match named.name.strip_prefix(&before).map(|rest| rest.trim_end_matches('/')) {
                    None | Some("") => {}
                    Some(rest) => found(rest)?,
                }
            }
            match page.next_marker.filter(|marker| !marker.is_empty()) {
                None => return Ok(()),
                // A server that gives the same page again does not end.
                Some(next) if Some(&next) == marker.as_ref() => {
                    return Err(Error::corrupt("the list of blobs goes in a circle"));
                }
                next => marker = next,
            }
        }
    }

    fn simple<'a>(method: &'static str, path: &'a str, body: &'a [u8], limit: u64) -> Call<'a> {
        Call { method, path: Some(path), query: Vec::new(), body, limit }
    }
}

impl Objects for Azure {
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let answer = self.call(&Self::simple("GET", path, &[], limit))?;
        if answer.status == 404 { Err(missing(path)) } else { Ok(answer.body) }
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        let answer = self.call(&Self::simple("PUT", path, content, LIST_LIMIT))?;
        if answer.status == 404 {
            return Err(Error::not_found(format!("container {} is not there", self.container)));
        }
        Ok(())
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        let answer = self.call(&Self::simple("HEAD", path, &[], 0))?;
        if answer.status == 404 {
            return Ok(None);
        }
        let size = answer.header("content-length").and_then(|text| text.parse().ok());
        let modified = answer.header("last-modified");
        let modified = modified.and_then(|text| DateTimeParser::new().parse_timestamp(text).ok());
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
        self.each(folder, true, &mut |name| {
            all.push(name.to_owned());
            Ok(())
        })?;
        all.sort();
        Ok(all)
    }

    fn walk(&self, folder: &str, found: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        self.each(folder, false, found)
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.call(&Self::simple("DELETE", path, &[], LIST_LIMIT)).map(drop)
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
    let _ = quick_xml::de::from_str::<Page>(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The signature was made by other code, of which Azurite takes such ones.
    #[test]
    fn signatures() {
        let stop = Arc::new(AtomicBool::new(false));
        let azure = Azure {
            http: Http::new(&|_| None, "localhost", false, None, &stop).unwrap(),
            account: "devstoreaccount1".into(),
            key: hmac::Key::new(hmac::HMAC_SHA256, b"secret"),
            container: "cont".into(),
            prefix: "p/".into(),
            origin: "http://localhost".into(),
            root: "/devstoreaccount1/cont".into(),
            stop,
        };
        let query = vec![("comp", "x".to_owned()), ("prefix", "a/b".to_owned())];
        let call = Call { method: "PUT", path: Some("a b"), query, body: b"abc", limit: 0 };
        let headers = [
            ("x-ms-blob-type", "BlockBlob".to_owned()),
            ("x-ms-date", "Wed, 25 Nov 2026 12:00:00 GMT".to_owned()),
            ("x-ms-version", VERSION.to_owned()),
        ];
        let signature = azure.signature(&call, "/devstoreaccount1/cont/p/a%20b", &headers);
        assert_eq!(signature, "OcP8FXxD8JbDdQWd0Xv9QIQ9ZjjtoAZ8HoeHCPUVkxY=");
    }
}
