//! S3: against a server of our own that behaves badly, and against a real one if there is one.
//!
//! `S3_URL=s3://BUCKET@REGION/PATH` with `AWS_ENDPOINTS`, `AWS_ACCESS_KEY_ID` and so on names the real one.

use crate::support::*;
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Onto, Work};
use dbs_core::ErrorKind;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// What the server does to each seventh request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
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
}

/// A bucket `bucket` with objects in memory.
struct Server {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    manner: Manner,
    requests: AtomicU64,
    connections: AtomicU64,
    /// Each request that came.
    log: Mutex<Vec<String>>,
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
    fn start(manner: Manner) -> (Arc<Self>, String) {
        let server = Arc::new(Self {
            objects: Mutex::default(),
            manner,
            requests: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            log: Mutex::default(),
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
            if manner == Manner::Hangup {
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
        if !request.headers["authorization"].starts_with("AWS4-HMAC-SHA256 Credential=key/") {
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
            _ => objects.get(&key).map_or(absent, |content| ("200 OK", content.clone())),
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
            format!("<Contents><Key>{name}</Key><Size>1</Size></Contents>")
        };
    }
    (text + "</ListBucketResult>").into_bytes()
}

fn open(endpoint: &str, url: &str) -> dbs_core::Result<BackupStore> {
    let variable = |name: &str| match name {
        "AWS_ENDPOINTS" => Some(endpoint.to_owned()),
        "AWS_ACCESS_KEY_ID" => Some("key".to_owned()),
        "AWS_SECRET_ACCESS_KEY" => Some("secret".to_owned()),
        _ => None,
    };
    BackupStore::open(&Url::parse(url)?, &variable).map(BackupStore::without_waiting)
}

/// All operations.
fn all_operations(store: &BackupStore, name: &str) {
    let mut volume = volume(20, 6);
    volume.push("two", 0, b"two");
    create(store, "backup-1", &volume.get("one")).expect(name);
    let created = create(store, "backup-2", &volume.get("two")).expect(name);
    assert_eq!(created.base.as_deref(), Some("backup-1"));
    for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
        let content = volume.get(snapshot).content();
        let disk = Disk::new(vec![0; content.len()]);
        restore(store, backup, &disk, Onto::Empty).expect(name);
        assert!(disk.content() == content, "{name}");
        let mut progress = |_, _| true;
        let found = store.verify(VOLUME, backup, true, &mut Work::new(&mut progress)).expect(name);
        assert_eq!(found.bad, [], "{name}");
    }
    assert_eq!(store.volumes().expect(name), [VOLUME]);
    assert_eq!(store.backups(VOLUME).expect(name), ["backup-1", "backup-2"]);
    assert_eq!(store.backup(VOLUME, "absent").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(remove(store, "backup-1").expect(name).blocks, 1);
    remove_volume(store, VOLUME).expect(name);
    assert!(store.volumes().expect(name).is_empty());
}

#[test]
fn a_server_that_behaves_badly() {
    use Manner as M;
    let manners = [M::Well, M::Busy, M::Hangup, M::Truncated, M::Elsewhere, M::Ahead, M::Strange];
    thread::scope(|scope| {
        for manner in manners {
            scope.spawn(move || {
                let (server, endpoint) = Server::start(manner);
                let store = open(&endpoint, "s3://bucket@region/some/path/").unwrap();
                all_operations(&store, &format!("{manner:?}"));
                assert!(server.objects.lock().unwrap().is_empty(), "{manner:?}");
                let connections = server.connections.load(Ordering::SeqCst);
                let requests = server.requests.load(Ordering::SeqCst);
                assert!(
                    manner != M::Well || connections * 4 < requests,
                    "{connections} connections for {requests} requests: they are not kept"
                );
                let log = server.log.lock().unwrap();
                let block = "/bucket/some/path/backupstore/volumes/5e/23/vol-1/blocks/";
                assert!(log.iter().any(|line| line.starts_with(&format!("PUT {block}"))));
            });
        }
    });
}

/// Whoever waits for a list that is long, or does not end, can stop it.
#[test]
fn a_list_is_stopped() {
    let (_server, endpoint) = Server::start(Manner::Endless);
    let store = open(&endpoint, "s3://bucket@region/").unwrap();
    let volume = volume(21, 2);
    let source = volume.get("one");
    let creation = store.create(&source, options("backup-1", "one")).unwrap();
    let error = creation.run(&mut Work::new(&mut |_, _| false)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    assert!(store.backups(VOLUME).unwrap().is_empty(), "what was begun is removed all the same");
}

#[test]
fn what_cannot_be_opened() {
    let (_server, endpoint) = Server::start(Manner::Well);
    for (url, kind) in [
        ("s3://bucket", ErrorKind::Invalid),
        ("s3:///path", ErrorKind::Invalid),
        ("s3://other@region/", ErrorKind::NotFound),
    ] {
        let error = open(&endpoint, url).map(drop).unwrap_err();
        assert_eq!(error.kind(), kind, "{url}: {error}");
    }
    assert!(open("ftp://x", "s3://bucket@region/").is_err());
    assert!(open("http://x/path", "s3://bucket@region/").is_err());
    let half = |name: &str| (name == "AWS_ACCESS_KEY_ID").then(|| "key".to_owned());
    let url = Url::parse("s3://bucket@region/").unwrap();
    let error = BackupStore::open(&url, &half).map(drop).unwrap_err();
    assert!(error.to_string().contains("s3 credential secret access key not found"));
}

#[test]
fn a_real_server() {
    let Ok(url) = std::env::var("S3_URL") else {
        println!("SKIPPED: no S3_URL");
        return;
    };
    let url = Url::parse(&url).unwrap();
    let variable = |name: &str| std::env::var(name).ok();
    all_operations(&BackupStore::open(&url, &variable).unwrap().without_waiting(), "a real server");
    let wrong = |name: &str| match name {
        "AWS_SECRET_ACCESS_KEY" => Some("wrong".to_owned()),
        other => std::env::var(other).ok(),
    };
    match BackupStore::open(&url, &wrong) {
        Ok(_) => println!("this server does not look at signatures"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{error}"),
    }
}
