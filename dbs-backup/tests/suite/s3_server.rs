//! A server that speaks as S3 does, on a port of its own. Tests of other crates use this file, too.
#![allow(dead_code, reason = "each program that has this file needs another part of it")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// What the server does to each seventh request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    Well,
    /// Says that it is busy.
    Busy,
    /// Ends the connection before it reads the request's end.
    Hangup,
    /// Carries the request out, and ends the connection in the middle of the answer.
    Truncated,
    /// Is in another region, and takes no signature for ours.
    Elsewhere,
    /// Answers that there is no such page, as something between here and the server does.
    Strange,
    /// Has a list of blocks that goes on and on, and is busy when an object is to be removed for the first time.
    Endless,
    /// Has a clock that is a day ahead, and takes no signature of ours.
    Ahead,
    /// Lets nobody read below `dbs-repository`.
    Tight,
    /// Nor list what is there.
    Tighter,
}

/// A bucket `bucket` with objects in memory.
pub struct Server {
    pub objects: Mutex<BTreeMap<String, Vec<u8>>>,
    manner: Manner,
    pub requests: AtomicU64,
    pub connections: AtomicU64,
    /// Each request that came.
    pub log: Mutex<Vec<String>>,
    /// Ends each connection.
    pub away: AtomicBool,
    /// Requests that are still to be refused.
    pub refused: AtomicU64,
}

struct Request {
    method: String,
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Server {
    /// Serves on a port of its own, for as long as the test program runs.
    pub fn start(manner: Manner) -> (Arc<Self>, String) {
        let server = Arc::new(Self {
            objects: Mutex::default(),
            manner,
            requests: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            log: Mutex::default(),
            away: AtomicBool::new(false),
            refused: AtomicU64::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let own = Arc::clone(&server);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let own = Arc::clone(&own);
                thread::spawn(move || own.serve(stream.unwrap()));
            }
        });
        (server, endpoint)
    }

    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        self.connections.fetch_add(1, Ordering::SeqCst);
        let mut input = BufReader::new(stream.try_clone().ok()?);
        loop {
            let mut request = head(&mut input)?;
            let number = self.requests.fetch_add(1, Ordering::SeqCst);
            // The first ones are those of opening.
            let manner = if number % 7 == 2 { self.manner } else { Manner::Well };
            if manner == Manner::Hangup || self.away.load(Ordering::SeqCst) {
                return None;
            }
            let length = request.headers.get("content-length").map_or(0, |l| l.parse().unwrap());
            request.body = vec![0; length];
            input.read_exact(&mut request.body).ok()?;
            let line = format!("{} {}", request.method, request.path);
            let is_first = !self.log.lock().unwrap().contains(&line);
            self.log.lock().unwrap().push(line);
            let manner = match self.manner {
                Manner::Endless if is_first && request.method == "DELETE" => Manner::Busy,
                _ => manner,
            };
            let (status, body) = match manner {
                // A HEAD has no text that shows it.
                Manner::Strange if request.method != "HEAD" => {
                    ("404 Not Found", b"<html><body>no such page</body></html>".to_vec())
                }
                Manner::Busy => ("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>".to_vec()),
                _ => self.answer(&request),
            };
            let is_head = request.method == "HEAD";
            let time = now(self.manner);
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nDate: {time}\r\nLast-Modified: {time}\r\n\r\n",
                body.len()
            );
            let sent = if manner == Manner::Truncated { body.len() / 2 } else { body.len() };
            stream.write_all(head.as_bytes()).ok()?;
            stream.write_all(if is_head { &[] } else { &body[..sent] }).ok()?;
            if manner == Manner::Truncated {
                return None;
            }
        }
    }

    fn answer(&self, request: &Request) -> (&'static str, Vec<u8>) {
        let absent = ("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>".to_vec());
        let refuse = |left: u64| left.checked_sub(1);
        if self.refused.fetch_update(Ordering::SeqCst, Ordering::SeqCst, refuse).is_ok()
            || !request.headers["authorization"].starts_with("AWS4-HMAC-SHA256 Credential=key/")
        {
            return ("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>".to_vec());
        }
        let refused = |code: &str| {
            ("400 Bad Request", format!("<Error><Code>{code}</Code><Region>other</Region></Error>"))
        };
        let refused = match self.manner {
            Manner::Elsewhere if !request.headers["authorization"].contains("/other/s3/") => {
                Some(refused("AuthorizationHeaderMalformed"))
            }
            Manner::Ahead if !request.headers["x-amz-date"].starts_with("20400102T") => {
                Some(refused("RequestTimeTooSkewed"))
            }
            _ => None,
        };
        if let Some((status, text)) = refused {
            return (status, text.into_bytes());
        }
        let Some(key) = request.path.strip_prefix("/bucket") else {
            return ("404 Not Found", b"<Error><Code>NoSuchBucket</Code></Error>".to_vec());
        };
        let key = key.trim_start_matches('/').to_owned();
        let is_denied = match self.manner {
            Manner::Tight => key.contains("dbs-repository"),
            Manner::Tighter => format!("{key} {}", request.query).contains("dbs-repository"),
            _ => false,
        };
        if is_denied {
            return ("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>".to_vec());
        }
        let mut objects = self.objects.lock().unwrap();
        match request.method.as_str() {
            "PUT" => {
                objects.insert(key, request.body.clone());
                ("200 OK", Vec::new())
            }
            "DELETE" => {
                objects.remove(&key);
                ("204 No Content", Vec::new())
            }
            "GET"
                if key.is_empty()
                    && self.manner == Manner::Endless
                    && request.query.contains("blocks") =>
            {
                let token = self.requests.load(Ordering::SeqCst);
                let text = format!(
                    "<ListBucketResult><IsTruncated>true</IsTruncated>\
                     <NextContinuationToken>{token}</NextContinuationToken><Contents><Key>{}</Key></Contents></ListBucketResult>",
                    "backupstore/volumes/5e/23/vol-1/blocks/x"
                );
                ("200 OK", text.into_bytes())
            }
            "GET" if key.is_empty() => ("200 OK", page(&objects, &request.query)),
            _ => objects.get(&key).map_or(absent, |content| match request.headers.get("range") {
                Some(range) => {
                    let (first, last) =
                        range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                    let (first, last): (usize, usize) =
                        (first.parse().unwrap(), last.parse().unwrap());
                    if content.len() <= first {
                        let text = b"<Error><Code>InvalidRange</Code></Error>".to_vec();
                        return ("416 Range Not Satisfiable", text);
                    }
                    ("206 Partial Content", content[first..content.len().min(last + 1)].to_vec())
                }
                None => ("200 OK", content.clone()),
            }),
        }
    }
}

/// The server's clock.
fn now(manner: Manner) -> &'static str {
    match manner {
        Manner::Ahead => "Mon, 02 Jan 2040 12:00:00 GMT",
        _ => "Wed, 25 Nov 2026 12:00:00 GMT",
    }
}

fn head(input: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    input.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (path, query) = (path.to_owned(), query.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        input.read_line(&mut line).ok()?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.to_owned()),
            None => break,
        };
    }
    Some(Request { method, path, query, headers, body: Vec::new() })
}

/// Three entries of a list, and where the next ones are.
fn page(objects: &BTreeMap<String, Vec<u8>>, query: &str) -> Vec<u8> {
    let value = |name: &str| {
        let found = query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}=")));
        found.unwrap_or("").replace("%2F", "/")
    };
    let (prefix, delimited, token) =
        (value("prefix"), !value("delimiter").is_empty(), value("continuation-token"));
    let mut found: Vec<(String, bool)> = Vec::new();
    for key in objects.keys() {
        let Some(rest) = key.strip_prefix(&prefix) else { continue };
        let entry = match rest.split_once('/').filter(|_| delimited) {
            Some((folder, _)) => (format!("{prefix}{folder}/"), true),
            None => (key.clone(), false),
        };
        if found.last() != Some(&entry) && entry.0 > token {
            found.push(entry);
        }
    }
    let more = found.len() > 3;
    found.truncate(3);
    let mut text = format!("<ListBucketResult><IsTruncated>{more}</IsTruncated>");
    if more {
        text += &format!("<NextContinuationToken>{}</NextContinuationToken>", found[2].0);
    }
    for (name, is_folder) in found {
        text += &if is_folder {
            format!("<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>")
        } else {
            let size = objects[&name].len();
            format!("<Contents><Key>{name}</Key><Size>{size}</Size></Contents>")
        };
    }
    (text + "</ListBucketResult>").into_bytes()
}
