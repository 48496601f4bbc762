//! Objects of a server: what S3 and Azure have in common.

use super::http::{Answer, Variables};
use super::{Allowed, Found, Objects, Stat, missing, too_long};
use crate::names::BlockName;
use crate::pool;
use crate::url::{Url, encode};
use dbs_core::{Error, ErrorKind, Result};
use jiff::Timestamp;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Bytes of an answer that is a list or an error.
const LIST_LIMIT: u64 = 16 << 20;
/// The status of an answer with a part of an object.
const PARTIAL: u16 = 206;
/// Objects that are removed at once.
const REMOVALS: usize = 16;
/// Names on a page: as many as S3 and Azure both give.
const PAGE: u32 = 1000;
/// Pages of a list: names of more blocks than 1 PiB has.
const PAGES: usize = 1 << 20;
/// Pages without a name in the folder that come one after the other.
const EMPTY_PAGES: usize = 1000;

/// A server of one kind, with the bucket or container in it.
pub(crate) trait Service: Send + Sync {
    /// Carries a request out. There is no answer if the object is not there.
    fn call(&self, call: &Call<'_>) -> Result<Option<Answer>>;
    /// A page of the names that begin with `prefix`; `delimited` by the next `/`.
    fn page(&self, prefix: &str, delimited: bool, token: Option<&str>, most: u32) -> Result<Page>;
    /// What all names of objects begin with.
    fn prefix(&self) -> &str;
    /// What holds the objects, for errors.
    fn place(&self) -> String;
}

/// What one request is about.
pub(crate) struct Call<'a> {
    pub method: &'static str,
    /// Without the prefix of all names; none for what holds the objects.
    pub path: Option<&'a str>,
    /// Names and values, in the order of the names.
    pub query: Vec<(&'static str, String)>,
    pub body: &'a [u8],
    pub limit: u64,
    /// From here no more than `limit` bytes are asked for, of what may have more.
    pub from: Option<u64>,
    /// Asked before each try.
    pub allowed: Allowed<'a>,
}

/// A part of a list.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// Names, with the prefix of all names; and bytes, where the server says them.
    pub names: Vec<(String, Option<u64>)>,
    /// Where the next one begins; none is the end.
    pub next: Option<String>,
}

/// Objects of a server.
pub(crate) struct Remote<S> {
    service: S,
    stop: Arc<AtomicBool>,
}

impl<'a> Call<'a> {
    /// Of an object.
    pub fn of(method: &'static str, path: &'a str, body: &'a [u8], limit: u64) -> Self {
        let (path, query) = (Some(path), Vec::new());
        Self { method, path, query, body, limit, from: None, allowed: &|| Ok(()) }
    }

    /// Of a page of a list.
    pub fn list(query: Vec<(&'static str, String)>) -> Self {
        Self { path: None, query, ..Self::of("GET", "", &[], LIST_LIMIT) }
    }

    /// The range of bytes that is asked for.
    pub fn range(&self) -> Option<String> {
        let last = |from: u64| from.saturating_add(self.limit.saturating_sub(1));
        self.from.map(|from| format!("bytes={from}-{}", last(from)))
    }

    /// The query as it is in a URL.
    pub fn query(&self) -> String {
        let pairs: Vec<_> = self
            .query
            .iter()
            .map(|(name, value)| format!("{name}={}", encode(value, "")))
            .collect();
        pairs.join("&")
    }

    /// What is asked for, for errors.
    pub fn what(&self) -> &str {
        self.path.unwrap_or("a list")
    }
}

impl<S: Service> Remote<S> {
    /// Tries whether the objects can be listed.
    pub fn open(service: S, stop: &Arc<AtomicBool>) -> Result<Self> {
        service.page(service.prefix(), true, None, 1)?;
        Ok(Self { service, stop: Arc::clone(stop) })
    }

    /// For what follows on the opening.
    pub fn service(&mut self) -> &mut S {
        &mut self.service
    }

    /// Calls `found` with what each name has after the folder.
    fn each(&self, folder: &str, delimited: bool, found: Found<'_>) -> Result<()> {
        let before = format!("{}{folder}/", self.service.prefix());
        let (mut token, mut empty) = (None, 0);
        // A server that gives pages again does not end. Tokens can be long: hashes of them are enough.
        let mut seen = HashSet::new();
        loop {
            let page = self.service.page(&before, delimited, token.as_deref(), PAGE)?;
            empty += 1;
            for (name, size) in &page.names {
                match name.strip_prefix(&before).map(|rest| rest.trim_end_matches('/')) {
                    None | Some("") => {}
                    Some(rest) => {
                        empty = 0;
                        found(rest, &|| *size)?;
                    }
                }
            }
            // A page may have nothing at which the caller could end it.
            if !delimited && self.stop.load(Ordering::SeqCst) {
                return Err(pool::interrupted());
            }
            let Some(next) = page.next else { return Ok(()) };
            let is_new = seen.insert(BlockName::of(next.as_bytes()));
            if !is_new || seen.len() > PAGES || empty > EMPTY_PAGES {
                return Err(self.failed("the list of objects does not end".to_owned()));
            }
            token = Some(next);
        }
    }

    fn failed(&self, what: String) -> Error {
        Error::io(std::io::Error::other(what), self.service.place())
    }
}

impl<S: Service> Objects for Remote<S> {
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let answer = self.service.call(&Call::of("GET", path, &[], limit))?;
        answer.map(|answer| answer.body).ok_or_else(|| missing(path))
    }

    fn get_range(&self, path: &str, start: u64, most: u64) -> Result<Vec<u8>> {
        let call = Call { from: Some(start), ..Call::of("GET", path, &[], most) };
        let answer = self.service.call(&call)?.ok_or_else(|| missing(path))?;
        if answer.is_beyond() {
            return Ok(Vec::new());
        }
        // A server that knows no ranges gives the object from its beginning.
        if start > 0 && answer.status != PARTIAL {
            return Err(too_long(path, most));
        }
        Ok(answer.body)
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        match self.service.call(&Call::of("PUT", path, content, LIST_LIMIT))? {
            None => Err(Error::not_found(format!("{} is not there", self.service.place()))),
            Some(_) => Ok(()),
        }
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        let call = Call::of("HEAD", path, &[], 0);
        let Some(answer) = self.service.call(&call)? else { return Ok(None) };
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
        self.each(folder, true, &mut |name, _| {
            all.push(name.to_owned());
            Ok(())
        })?;
        all.sort();
        Ok(all)
    }

    fn walk(&self, folder: &str, found: Found<'_>) -> Result<()> {
        self.each(folder, false, found)
    }

    fn remove_if(&self, path: &str, allowed: Allowed<'_>) -> Result<()> {
        let call = Call { allowed, ..Call::of("DELETE", path, &[], LIST_LIMIT) };
        self.service.call(&call).map(drop)
    }

    fn remove_all(&self, folder: &str) -> Result<()> {
        let mut all = Vec::new();
        self.walk(folder, &mut |path, _| {
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

/// Where a server is: scheme and host, from the value of the variable `name` or from `usual`.
pub(super) fn endpoint(
    variable: Variables<'_>,
    name: &str,
    usual: impl FnOnce() -> String,
) -> Result<(String, String)> {
    let endpoint = variable(name).unwrap_or_else(usual);
    match endpoint.trim_end_matches('/').split_once("://") {
        Some((scheme @ ("http" | "https"), host)) if !host.contains('/') => {
            Ok((scheme.to_owned(), host.to_owned()))
        }
        _ => Err(Error::invalid(format!(
            "{name} is `{endpoint}`: write it as https://HOST or http://HOST:PORT"
        ))),
    }
}

/// What holds the objects, and what is behind the `@` if there is something.
pub(super) fn holder(url: &Url) -> (String, Option<String>) {
    match &url.user {
        Some(user) => (user.clone(), Some(url.host.clone()).filter(|host| !host.is_empty())),
        None => (url.host.clone(), None),
    }
}

/// What all names of objects begin with.
pub(super) fn prefix(url: &Url) -> String {
    url.path.split('/').filter(|part| !part.is_empty()).map(|part| format!("{part}/")).collect()
}

/// A time as HTTP has it.
pub(super) fn parse_date(text: &str) -> Option<Timestamp> {
    jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()
}

/// A removal by a service whose server refuses every request as busy ends when it is not allowed any more.
#[cfg(test)]
pub(super) fn test_removal<S: Service>(make: impl FnOnce(String) -> S) {
    use std::io::{Read, Write};
    use std::sync::atomic::AtomicUsize;
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", server.local_addr().unwrap());
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    std::thread::spawn(move || {
        for stream in server.incoming() {
            let (mut stream, mut request) = (stream.unwrap(), [0; 4096]);
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read(&mut request);
            let answer = b"HTTP/1.1 503 busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(answer);
        }
    });
    let remote = Remote { service: make(address), stop: Arc::default() };
    let allowed = || match tries.load(Ordering::SeqCst) {
        0 | 1 => Ok(()),
        _ => Err(Error::busy("not any more")),
    };
    let error = remote.remove_if("a/b", &allowed).unwrap_err();
    assert_eq!((error.kind(), tries.load(Ordering::SeqCst)), (ErrorKind::Busy, 2), "{error}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives pages one after the other, and the last one again and again.
    struct Pages(Vec<Page>, std::sync::atomic::AtomicUsize);

    impl Service for Pages {
        fn call(&self, _: &Call<'_>) -> Result<Option<Answer>> {
            Ok(None)
        }

        fn page(&self, _: &str, _: bool, token: Option<&str>, _: u32) -> Result<Page> {
            let count = self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let Page { names, next } = &self.0[count % self.0.len()];
            // A star makes each one new.
            let next = next.as_ref().map(|next| next.replace('*', &count.to_string()));
            assert!(count < 5000, "it does not end: {token:?}");
            Ok(Page { names: names.clone(), next })
        }

        fn prefix(&self) -> &str {
            "p/"
        }

        fn place(&self) -> String {
            "bucket b".to_owned()
        }
    }

    fn walk(pages: &[(&[&str], Option<&str>)]) -> Result<Vec<String>> {
        let page = |(names, next): &(&[&str], Option<&str>)| Page {
            names: names.iter().map(|name| ((*name).to_owned(), None)).collect(),
            next: next.map(str::to_owned),
        };
        let pages = Pages(pages.iter().map(page).collect(), 0.into());
        let remote = Remote { service: pages, stop: Arc::default() };
        let mut all = Vec::new();
        remote.walk("f", &mut |name, _| {
            all.push(name.to_owned());
            Ok(())
        })?;
        Ok(all)
    }

    #[test]
    fn lists_have_an_end() {
        let all = walk(&[(&["p/f/a", "p/f/", "q"], Some("1")), (&["p/f/b/c"], None)]).unwrap();
        assert_eq!(all, ["a", "b/c"]);
        // In a circle, and without anything.
        for pages in [
            [(&["p/f/a"][..], Some("a")), (&["p/f/b"][..], Some("b"))],
            [(&["p/f/a"][..], Some("a")), (&["p/f/b"][..], Some("a"))],
            [(&[][..], Some("*")), (&["q"][..], Some("*"))],
        ] {
            let error = walk(&pages).unwrap_err();
            assert!(error.to_string().contains("does not end"), "{error}");
        }
    }
}
