//! What a receiver makes of requests no sender sends.

use crate::support::{Receiver, assert_same, options, random_file, send_to};
use longhorn_sync::image::{Bytes, Record, SparseFile};
use longhorn_sync::ssync::Received;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use tempfile::tempdir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const OPEN: &str = "GET /v1-ssync/open?begin=0&directIO=true&end=65536";

async fn connect(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).await.unwrap()
}

/// Sends bytes, and no more with `cut`; what comes back, if anything.
async fn raw(port: u16, bytes: &[u8], cut: bool) -> String {
    let mut stream = connect(port).await;
    // The other side may hang up before it has read all of it.
    let _ = stream.write_all(bytes).await;
    if cut {
        let _ = stream.shutdown().await;
    }
    let mut answer = Vec::new();
    let _ = timeout(Duration::from_secs(120), stream.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

async fn status(port: u16, head: &str, headers: &str, body: &[u8]) -> String {
    let head = format!("{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    let answer = raw(port, &[head.as_bytes(), body].concat(), false).await;
    answer.split_whitespace().nth(1).unwrap_or("nothing").to_owned()
}

async fn with_body(port: u16, head: &str, body: &[u8]) -> String {
    status(port, head, &format!("Content-Length: {}\r\n", body.len()), body).await
}

/// A receiver for a file in the directory.
fn start(directory: &std::path::Path) -> Receiver {
    Receiver::start(Arc::new(SparseFile::sink(directory.join("b.img"))))
}

#[tokio::test]
async fn garbage_is_refused_and_the_transfer_goes_on() {
    let dir = tempdir().unwrap();
    let receiver = start(dir.path());
    let port = receiver.port;
    let mut rng = fastrand::Rng::with_seed(1);
    for length in [1, 26, 4096, 300_000] {
        let garbage: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(length).collect();
        let answer = raw(port, &garbage, true).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let endless = format!("GET /v1-ssync/open?{} HTTP/1.1\r\n", "x".repeat(2 << 20));
    let answer = raw(port, endless.as_bytes(), true).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    assert!(raw(port, b"GET /v1-ssync/open?begin=0", true).await.len() < 200);
    let from = dir.path().join("a.img");
    random_file(&from, 2, 8 << 20, 10);
    let source = Arc::new(SparseFile::source(&from).unwrap());
    send_to(port, source.clone(), options()).await.unwrap();
    receiver.ended().await;
    assert_same(source.as_ref(), &SparseFile::source(dir.path().join("b.img")).unwrap());
}

#[tokio::test]
async fn nothing_is_done_before_open_or_outside_the_image() {
    let dir = tempdir().unwrap();
    let receiver = start(dir.path());
    let port = receiver.port;
    let write = |range: &str| format!("POST /v1-ssync/writeData?{range}");
    assert_eq!(with_body(port, &write("begin=0&end=4096"), &[1; 4096]).await, "400");
    assert_eq!(with_body(port, "POST /v1-ssync/sendHole?begin=0&end=4096", b"").await, "400");
    assert_eq!(with_body(port, "GET /v1-ssync/getChecksum?begin=0&end=4096", b"").await, "400");
    assert!(!dir.path().join("b.img").exists());
    assert_eq!(with_body(port, OPEN, b"").await, "200");
    for range in [
        "begin=65536&end=69632",
        "begin=61440&end=69632",
        "begin=1&end=4097",
        "begin=9223372036854771712&end=9223372036854775807",
        "begin=-4096&end=0",
        "end=4096",
    ] {
        assert_eq!(with_body(port, &write(range), &[1; 4096]).await, "400", "{range}");
    }
    let huge = "begin=0&end=1099511627776";
    assert_eq!(with_body(port, &write(huge), b"").await, "413");
    assert_eq!(with_body(port, &format!("GET /v1-ssync/getChecksum?{huge}"), b"").await, "413");
    assert_eq!(with_body(port, &format!("POST /v1-ssync/sendHole?{huge}"), b"").await, "400");
    assert_eq!(
        with_body(port, "POST /v1-ssync/open?begin=0&end=0&directIO=true", b"").await,
        "405"
    );
    assert_eq!(with_body(port, "GET /v1-ssync/../etc/passwd", b"").await, "404");
    assert_eq!(with_body(port, "GET /", b"").await, "404");
    let file = SparseFile::source(dir.path().join("b.img")).unwrap();
    assert!(crate::support::layout(&file).iter().all(|interval| !interval.data));
}

#[tokio::test]
async fn a_body_must_be_as_long_as_its_range() {
    let dir = tempdir().unwrap();
    let receiver = start(dir.path());
    let port = receiver.port;
    assert_eq!(with_body(port, OPEN, b"").await, "200");
    let write = "POST /v1-ssync/writeData?begin=0&end=8192";
    for length in [0, 1, 8191, 8193, 3 << 20] {
        let answer = with_body(port, write, &vec![1; length]).await;
        // With so much unread the connection may be reset before the answer is seen.
        assert!(answer == "400" || (length > 8192 && answer == "nothing"), "{length}: {answer}");
    }
    // Without a length, in chunks.
    let chunked = "Transfer-Encoding: chunked\r\n";
    let chunks = |sizes: &[usize]| {
        let chunk = |size: &usize| [format!("{size:x}\r\n").into_bytes(), vec![2; *size]].concat();
        let mut body: Vec<u8> =
            sizes.iter().flat_map(|size| [chunk(size), b"\r\n".to_vec()].concat()).collect();
        body.extend(b"0\r\n\r\n");
        body
    };
    assert_eq!(status(port, write, chunked, &chunks(&[4096, 100])).await, "400");
    assert_eq!(status(port, write, chunked, &chunks(&[4096, 4097])).await, "400");
    // Broken off in the middle: whoever sent it is gone.
    let head = format!("{write} HTTP/1.1\r\nHost: x\r\nContent-Length: 8192\r\n\r\n");
    let cut = raw(port, &[head.as_bytes(), &[3; 5000]].concat(), true).await;
    assert!(!cut.starts_with("HTTP/1.1 200"), "{cut}");
    let file = SparseFile::source(dir.path().join("b.img")).unwrap();
    assert!(crate::support::content(&file).iter().all(|byte| *byte == 0));
    assert_eq!(status(port, write, chunked, &chunks(&[4096, 4096])).await, "200");
    assert_eq!(crate::support::content(&file)[..8192], [2; 8192]);
}

#[tokio::test]
async fn checksums_and_records_are_as_upstream_tells_them() {
    let dir = tempdir().unwrap();
    let receiver = start(dir.path());
    let port = receiver.port;
    let ask = async |head: &str| {
        let text = format!("{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        raw(port, text.as_bytes(), false).await
    };
    assert!(ask("GET /v1-ssync/getRecordedMetadata").await.starts_with("HTTP/1.1 404"));
    let opened = ask(OPEN).await;
    assert!(opened.contains("application/json") && opened.ends_with("\r\n\r\nfalse"), "{opened}");
    let write = "POST /v1-ssync/writeData?begin=0&end=4096";
    assert_eq!(with_body(port, write, &[0; 4096]).await, "200");
    // SHA-512 of 4096 zero bytes, and nothing for what is a hole in part.
    let checksum = ask("GET /v1-ssync/getChecksum?begin=0&end=4096").await;
    let value = "LSORPTdZ7wFwSoa0vuOsiikAIxPsyYp0JEJaeBcPIZV3gi/XfkrpYxNUdpatfVlJtY4S1QY+8u4GO1lX\
                 QKOhLQ==";
    assert!(checksum.ends_with(&format!("\r\n\r\n\"{value}\"")), "{checksum}");
    assert!(ask("GET /v1-ssync/getChecksum?begin=0&end=8192").await.ends_with("\r\n\r\nnull"));
}

#[tokio::test]
async fn silent_connections_keep_nobody_out() {
    let dir = tempdir().unwrap();
    let receiver = start(dir.path());
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(connect(receiver.port).await);
    }
    let mut half = connect(receiver.port).await;
    half.write_all(b"POST /v1-ssync/writeData?begin=0&end=40").await.unwrap();
    let source = Arc::new(Bytes::new(vec![5; 8192]));
    timeout(Duration::from_secs(120), send_to(receiver.port, source, options()))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(receiver.ended().await, Received::Closed { opened: true });
}

#[tokio::test]
async fn after_close_nothing_is_left() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("b.img");
    let receiver = start(dir.path());
    let port = receiver.port;
    assert_eq!(with_body(port, OPEN, b"").await, "200");
    assert_eq!(with_body(port, "POST /v1-ssync/close?checksum=&checksumMethod=", b"").await, "200");
    assert_eq!(receiver.ended().await, Received::Closed { opened: true });
    assert!(TcpStream::connect(("127.0.0.1", port)).await.is_err());
    // The port is free for the next file.
    drop(TcpListener::bind(("127.0.0.1", port)).unwrap());
    assert_eq!(Record::load(&path).unwrap(), None);
}
