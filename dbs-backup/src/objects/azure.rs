//! Objects in Azure's blob storage.
//!
//! Source: Azure's REST API of the Blob service, and *Authorize with Shared Key*; the variables are those of upstream's
//! `azblob/azblob_service.go` (longhorn/backupstore, commit `ab5179e`).

use super::http::{Answer, Http, Variables, Verdict};
use super::remote::{self, Call, Page, Remote, Service};
use crate::names::plain;
use crate::url::{Url, encode};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use dbs_core::{Error, Result};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use ring::hmac;
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use ureq::http::Request;

/// The version of the API whose requests these are.
const VERSION: &str = "2021-08-06";
/// The domain if neither the URL nor the environment names another.
const DOMAIN: &str = "core.windows.net";
/// A container, and what all names begin with.
pub(crate) struct Azure {
    http: Http,
    account: String,
    key: hmac::Key,
    container: String,
    prefix: String,
    /// Scheme and host.
    origin: String,
    /// The path of the container.
    root: String,
}

/// An answer that is a page of a list, by the name of its element: anything else is none, an empty one least of all.
#[derive(Deserialize)]
enum List {
    EnumerationResults(Listed),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
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
    properties: Option<Properties>,
}

#[derive(Deserialize)]
struct Properties {
    #[serde(rename = "Content-Length")]
    length: Option<String>,
}

impl Named {
    fn size(&self) -> Option<u64> {
        self.properties.as_ref()?.length.as_ref()?.trim().parse().ok()
    }
}

/// Opens the container that a URL names, and tries whether it can be listed.
///
/// # Errors
/// `Invalid` for what is no such URL, and for wrong credentials; `NotFound` if there is no such container; `Io`.
pub(crate) fn open(
    url: &Url,
    variable: Variables<'_>,
    stop: &Arc<AtomicBool>,
) -> Result<Remote<Azure>> {
    let mut remote = Remote::open(Azure::new(url, variable, stop)?, stop)?;
    remote.service().http.be_patient();
    Ok(remote)
}

impl Azure {
    fn new(url: &Url, variable: Variables<'_>, stop: &Arc<AtomicBool>) -> Result<Self> {
        let (container, domain) = remote::holder(url);
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
        let domain = domain.unwrap_or_else(|| DOMAIN.to_owned());
        let root = match variable("AZBLOB_ENDPOINT") {
            Some(_) => format!("/{account}/{container}"),
            None => format!("/{container}"),
        };
        let usual = || format!("https://{account}.blob.{domain}");
        let (scheme, host) = remote::endpoint(variable, "AZBLOB_ENDPOINT", usual)?;
        let certificates = variable("AZBLOB_CERT");
        let http = Http::new(variable, &host, scheme == "https", certificates.as_deref(), stop)?;
        Ok(Self {
            http,
            account,
            key: hmac::Key::new(hmac::HMAC_SHA256, &key),
            container,
            prefix: remote::prefix(url),
            origin: format!("{scheme}://{host}"),
            root,
        })
    }

    fn request(&self, call: &Call<'_>) -> Result<Request<Vec<u8>>> {
        let name = call.path.map_or_else(String::new, |path| format!("/{}{path}", self.prefix));
        let path = encode(&format!("{}{name}", self.root), "/");
        let query = call.query();
        let sign = if query.is_empty() { "" } else { "?" };
        let uri = format!("{}{path}{sign}{query}", self.origin);
        let date = DateTimePrinter::new().timestamp_to_rfc9110_string(&Timestamp::now());
        let date = date.map_err(|e| Error::invalid(format!("the clock is wrong: {e}")))?;
        // In the order of their names.
        let mut headers = vec![("x-ms-date", date), ("x-ms-version", VERSION.to_owned())];
        if call.method == "PUT" {
            headers.insert(0, ("x-ms-blob-type", "BlockBlob".to_owned()));
        }
        if let Some(range) = call.range() {
            headers.insert(1, ("x-ms-range", range));
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

    fn judge(&self, call: &Call<'_>, answer: Answer) -> Result<Verdict<Option<Answer>>> {
        if matches!(answer.status, 200..=299) || (call.from.is_some() && answer.is_beyond()) {
            return Ok(Verdict::Done(Some(answer)));
        }
        let code = answer.header("x-ms-error-code").unwrap_or_default().to_owned();
        if answer.status == 404 && code == "BlobNotFound" && call.path.is_some() {
            return Ok(Verdict::Done(None));
        }
        let what = call.what();
        let message = format!("{} {what} answers {} {}", call.method, answer.status, plain(&code));
        let io = Error::io(std::io::Error::other(message.clone()), self.place());
        // A 404 that does not say what is not there comes from something between here and the server.
        let is_strange = answer.status == 404 && code != "ContainerNotFound";
        if answer.is_passing() || is_strange {
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
}

impl Service for Azure {
    fn call(&self, call: &Call<'_>) -> Result<Option<Answer>> {
        let make = || self.request(call).and_then(|request| (call.allowed)().map(|()| request));
        self.http.call(call.limit, make, |answer| self.judge(call, answer))
    }

    fn page(&self, prefix: &str, delimited: bool, token: Option<&str>, most: u32) -> Result<Page> {
        let mut query = vec![("comp", "list".to_owned())];
        query.extend(delimited.then(|| ("delimiter", "/".to_owned())));
        query.extend(token.map(|token| ("marker", token.to_owned())));
        query.push(("maxresults", most.to_string()));
        query.push(("prefix", prefix.to_owned()));
        query.push(("restype", "container".to_owned()));
        let answer = self.call(&Call::list(query))?;
        let body = answer.map(|answer| answer.body).unwrap_or_default();
        listed(&String::from_utf8_lossy(&body))
    }

    fn prefix(&self) -> &str {
        &self.prefix
    }

    fn place(&self) -> String {
        format!("container {}", self.container)
    }
}

fn listed(text: &str) -> Result<Page> {
    let List::EnumerationResults(Listed { blobs, next_marker }) =
        quick_xml::de::from_str(text.trim_start_matches('\u{feff}')).map_err(|e| {
            Error::io(std::io::Error::other(e.to_string()), "reading a list of blobs")
        })?;
    let names = blobs.blob.into_iter().chain(blobs.blob_prefix).map(|named| {
        let size = named.size();
        (named.name, size)
    });
    Ok(Page { names: names.collect(), next: next_marker.filter(|marker| !marker.is_empty()) })
}

/// Reads an answer, for the fuzzer.
#[cfg(feature = "testing")]
pub(super) fn hostile_answer(text: &str) {
    let _ = listed(text);
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
        };
        let query = vec![("comp", "x".to_owned()), ("prefix", "a/b".to_owned())];
        let call = Call { query, ..Call::of("PUT", "a b", b"abc", 0) };
        let headers = [
            ("x-ms-blob-type", "BlockBlob".to_owned()),
            ("x-ms-date", "Wed, 25 Nov 2026 12:00:00 GMT".to_owned()),
            ("x-ms-version", VERSION.to_owned()),
        ];
        let signature = azure.signature(&call, "/devstoreaccount1/cont/p/a%20b", &headers);
        assert_eq!(signature, "OcP8FXxD8JbDdQWd0Xv9QIQ9ZjjtoAZ8HoeHCPUVkxY=");
    }

    /// Found by review: a removal was tried for ten minutes, whatever had become of its lock.
    #[test]
    fn a_removal_is_allowed_at_each_try() {
        let stop = Arc::new(AtomicBool::new(false));
        crate::objects::remote::test_removal(|origin| Azure {
            http: Http::new(&|_| None, "localhost", false, None, &stop).unwrap(),
            account: "devstoreaccount1".into(),
            key: hmac::Key::new(hmac::HMAC_SHA256, b"secret"),
            container: "cont".into(),
            prefix: "p/".into(),
            origin,
            root: "/devstoreaccount1/cont".into(),
        });
    }

    #[test]
    fn what_is_no_whole_list() {
        let page = listed(
            "\u{feff}<?xml version=\"1.0\"?><EnumerationResults ContainerName=\"c\"><Prefix>p/</Prefix><Blobs>\
             <Blob><Name>p/a</Name><Properties><Etag>x</Etag><Content-Length>7</Content-Length></Properties></Blob><BlobPrefix><Name>p/x/</Name></BlobPrefix></Blobs>\
             <NextMarker>m</NextMarker></EnumerationResults>",
        );
        let names = vec![("p/a".to_owned(), Some(7)), ("p/x/".to_owned(), None)];
        let next = Some("m".to_owned());
        assert_eq!(page.unwrap(), Page { names, next });
        let empty = "<EnumerationResults><Blobs/><NextMarker/></EnumerationResults>";
        assert_eq!(listed(empty).unwrap(), Page { names: Vec::new(), next: None });
        for text in [
            "",
            "<html><body>Sign in</body></html>",
            "<html><Blobs/></html>",
            "<EnumerationResults><NextMarker/></EnumerationResults>",
        ] {
            assert!(listed(text).is_err(), "{text}");
        }
    }
}
