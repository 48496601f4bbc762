//! Our sender and our receiver over real sockets.

use crate::support::{
    BLOCK, Receiver, assert_same, change_file, options, put_record, random_file, send_to, transfer,
};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_sync::image::{Bytes, Checksum, Interval, METHOD, Record, Sink, Source, SparseFile};
use longhorn_sync::ssync::{Received, SendOptions, send};
use std::future::{pending, ready};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::tempdir;
use tokio::sync::Notify;

const MIB: u64 = 1024 * 1024;

fn file(path: &std::path::Path) -> SparseFile {
    SparseFile::source(path).unwrap()
}

#[tokio::test]
async fn files_arrive_with_their_holes() {
    let dir = tempdir().unwrap();
    for (seed, size) in [(1, 48 * MIB), (2, 7 * MIB + 4096), (3, 4096)] {
        let (from, to) = (dir.path().join(format!("a{seed}")), dir.path().join(format!("b{seed}")));
        random_file(&from, seed, size, 60);
        let sent = transfer(&from, &to, options()).await;
        assert!(!sent.existed && !sent.skipped);
        assert_eq!(sent.written + sent.holes, size);
        assert_same(&file(&from), &file(&to));
    }
}

#[tokio::test]
async fn an_empty_file_and_one_without_data_arrive() {
    let dir = tempdir().unwrap();
    for size in [0, 9 * MIB] {
        let (from, to) = (dir.path().join(format!("a{size}")), dir.path().join(format!("b{size}")));
        random_file(&from, 1, size, 0);
        let sent = transfer(&from, &to, options()).await;
        assert_eq!((sent.written, sent.holes), (0, size));
        assert_same(&file(&from), &file(&to));
    }
}

#[tokio::test]
async fn only_what_differs_is_sent_again() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 5, 64 * MIB, 80);
    let first = transfer(&from, &to, options()).await;
    let again = transfer(&from, &to, options()).await;
    assert!(again.existed);
    assert_eq!((again.written, again.equal, again.holes), (0, first.written, first.holes));
    change_file(&from, &mut fastrand::Rng::with_seed(6), 3);
    let delta = transfer(&from, &to, options()).await;
    assert!(delta.written > 0 && delta.equal > delta.written, "{delta:?}");
    assert_same(&file(&from), &file(&to));
    // What became a hole at the sender becomes one at the receiver, and the size follows.
    random_file(&from, 7, 32 * MIB, 10);
    transfer(&from, &to, options()).await;
    assert_same(&file(&from), &file(&to));
}

#[tokio::test]
async fn a_description_of_odd_length_arrives() {
    let text = "{\"Name\":\"volume-head-000.img\",\"Parent\":\"\"}";
    let sink = Arc::new(Bytes::default());
    let receiver = Receiver::start(Arc::clone(&sink) as Arc<dyn Sink>);
    let options = SendOptions { direct_io: false, ..options() };
    send_to(receiver.port, Arc::new(Bytes::new(text)), options).await.unwrap();
    assert_eq!(receiver.ended().await, Received::Closed { opened: true });
    assert_eq!(sink.finished().unwrap(), text.as_bytes());
}

#[tokio::test]
async fn progress_adds_up_on_both_sides() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 9, 20 * MIB, 20);
    for round in 0..2 {
        let receiver = Receiver::start(Arc::new(SparseFile::sink(&to)));
        let told = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&told);
        let progress = Arc::new(move |bytes| {
            count.fetch_add(bytes, Ordering::Relaxed);
        });
        let options = SendOptions { progress, ..options() };
        let sent = send_to(receiver.port, Arc::new(file(&from)), options).await.unwrap();
        assert_eq!(told.load(Ordering::Relaxed), 20 * MIB);
        let data = receiver.progress.load(Ordering::Relaxed);
        assert_eq!(data, sent.written + sent.equal, "round {round}");
    }
}

#[tokio::test]
async fn equal_checksums_on_record_spare_the_transfer() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 11, 4 * MIB, 4);
    transfer(&from, &to, options()).await;
    let checksum = put_record(&from, "0123456789abcdef");
    put_record(&to, "0123456789abcdef");
    let fast = SendOptions { fast_sync: true, checksum: Some(checksum), ..options() };
    assert!(transfer(&from, &to, fast.clone()).await.skipped);
    // Not when the receiver's file has changed since, nor when the checksums differ.
    change_file(&to, &mut fastrand::Rng::with_seed(1), 1);
    assert!(!transfer(&from, &to, fast.clone()).await.skipped);
    put_record(&to, "ffffffffffffffff");
    assert!(!transfer(&from, &to, fast).await.skipped);
    assert_same(&file(&from), &file(&to));
}

/// Its record keeps the checksum that it should have.
#[tokio::test]
async fn an_image_that_is_known_to_be_corrupt_is_sent_whatever_its_checksum() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 12, 4 * MIB, 4);
    transfer(&from, &to, options()).await;
    let checksum = put_record(&from, "0123456789abcdef");
    change_file(&to, &mut fastrand::Rng::with_seed(1), 1);
    put_record(&to, "0123456789abcdef");
    let record = Record { silently_corrupted: true, ..Record::load(&to).unwrap().unwrap() };
    record.store(&to).unwrap();
    let fast = SendOptions { fast_sync: true, checksum: Some(checksum), ..options() };
    assert!(!transfer(&from, &to, fast).await.skipped);
    assert_same(&file(&from), &file(&to));
}

/// A stock sender passes its checksum on with `close` whether or not it has succeeded.
#[tokio::test]
async fn a_checksum_is_recorded_only_for_what_has_arrived() {
    let dir = tempdir().unwrap();
    let to = dir.path().join("b");
    let checksum = Checksum { method: METHOD.into(), value: "0123456789abcdef".into() };
    let close = "POST /v1-ssync/close?checksum=0123456789abcdef&checksumMethod=crc64 HTTP/1.1";
    let open = "GET /v1-ssync/open?begin=0&directIO=true&end=8192 HTTP/1.1";
    let hole = "POST /v1-ssync/sendHole?begin=4096&end=8192 HTTP/1.1";
    let write = "POST /v1-ssync/writeData?begin=0&end=4096 HTTP/1.1";
    let body = vec![7; 4096];
    for (complete, requests) in [
        (true, vec![(open, &b""[..]), (hole, b""), (write, &body), (close, b"")]),
        (false, vec![(open, b""), (hole, b""), (close, b"")]),
        (false, vec![(close, b"")]),
    ] {
        let _ = Record::remove(&to);
        let receiver = Receiver::start(Arc::new(SparseFile::sink(&to)));
        for (head, body) in requests {
            let answer = ask(receiver.port, head, body).await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{head}: {answer}");
        }
        receiver.ended().await;
        let record = Record::load(&to).unwrap().map(|record| record.to_checksum());
        assert_eq!(record, complete.then(|| checksum.clone()));
    }
}

/// One request on a connection of its own.
async fn ask(port: u16, head: &str, body: &[u8]) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let length = body.len();
    let head =
        format!("{head}\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn a_receiver_that_comes_late_is_waited_for() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 13, MIB, 4);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let source = Arc::new(file(&from));
    let sending = tokio::spawn(async move { send_to(port, source, options()).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let sink = Arc::new(SparseFile::sink(&to));
    let receiver = longhorn_sync::ssync::receive(listener, sink, Default::default(), pending());
    assert_eq!(receiver.await.unwrap(), Received::Closed { opened: true });
    sending.await.unwrap().unwrap();
    assert_same(&file(&from), &file(&to));
}

/// A file that fails or stalls on demand, and tells how it ended.
struct Moody {
    file: SparseFile,
    /// Writes that fail before one succeeds.
    failures: AtomicUsize,
    /// Called in each write.
    writing: Notify,
    abandoned: AtomicBool,
    finished: AtomicBool,
}

impl Moody {
    fn new(path: &std::path::Path, failures: usize) -> Arc<Self> {
        Arc::new(Self {
            file: SparseFile::sink(path),
            failures: AtomicUsize::new(failures),
            writing: Notify::new(),
            abandoned: AtomicBool::new(false),
            finished: AtomicBool::new(false),
        })
    }

    fn was_abandoned(&self) -> bool {
        assert!(!self.finished.load(Ordering::SeqCst));
        self.abandoned.load(Ordering::SeqCst)
    }
}

impl Source for Moody {
    fn size(&self) -> u64 {
        self.file.size()
    }

    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        self.file.intervals(offset, limit)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.file.read_at(offset, buf)
    }
}

impl Sink for Moody {
    fn existed(&self) -> bool {
        self.file.existed()
    }

    fn open(&self, size: u64) -> Result<()> {
        self.file.open(size)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.writing.notify_waiters();
        let left = self
            .failures
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        match left {
            Ok(_) => Err(Error::new(ErrorKind::NoSpace, "no space left on device")),
            Err(_) => self.file.write_at(offset, data),
        }
    }

    fn hole(&self, offset: u64, length: u64) -> Result<()> {
        self.file.hole(offset, length)
    }

    fn recorded(&self) -> Result<Option<Record>> {
        self.file.recorded()
    }

    fn finish(&self, checksum: Option<&Checksum>) -> Result<()> {
        self.finished.store(true, Ordering::SeqCst);
        self.file.finish(checksum)
    }

    fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn failed_writes_are_repeated() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 15, 16 * MIB, 10);
    let receiver = Receiver::start(Moody::new(&to, 2));
    send_to(receiver.port, Arc::new(file(&from)), options()).await.unwrap();
    receiver.ended().await;
    assert_same(&file(&from), &file(&to));
}

#[tokio::test]
async fn a_full_receiver_ends_the_transfer_with_its_words() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 17, 16 * MIB, 10);
    let checksum = Some(put_record(&from, "0123456789abcdef"));
    let receiver = Receiver::start(Moody::new(&to, usize::MAX));
    let options = SendOptions { checksum, ..options() };
    let error = send_to(receiver.port, Arc::new(file(&from)), options).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("volume-snap-a.img") && text.contains("no space left"), "{text}");
    // The sender says goodbye all the same, so that the receiver is gone at once.
    assert_eq!(receiver.ended().await, Received::Closed { opened: true });
    assert_eq!(Record::load(&to).unwrap(), None);
}

#[tokio::test]
async fn a_sender_that_dies_leaves_an_abandoned_image() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 19, 16 * MIB, 10);
    let sink = Moody::new(&to, usize::MAX);
    let idle = Duration::from_secs(5);
    let receiver = Receiver::with_idle(Arc::clone(&sink) as Arc<dyn Sink>, idle);
    let (port, source) = (receiver.port, Arc::new(file(&from)));
    let writing = sink.writing.notified();
    let sending = tokio::spawn(async move { send_to(port, source, options()).await });
    tokio::time::timeout(Duration::from_secs(60), writing).await.unwrap();
    // As killed: no goodbye.
    sending.abort();
    assert_eq!(receiver.ended().await, Received::Idle);
    assert!(sink.was_abandoned());
}

#[tokio::test]
async fn a_receiver_that_dies_ends_the_sender() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 21, 16 * MIB, 10);
    let sink = Moody::new(&to, usize::MAX);
    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let receiver =
        Receiver::until(Arc::clone(&sink) as Arc<dyn Sink>, Duration::from_secs(60), async move {
            stopped.notified().await
        });
    let (port, source) = (receiver.port, Arc::new(file(&from)));
    let writing = sink.writing.notified();
    let sending = tokio::spawn(async move { send_to(port, source, options()).await });
    tokio::time::timeout(Duration::from_secs(60), writing).await.unwrap();
    stop.notify_one();
    assert_eq!(receiver.ended().await, Received::Stopped);
    assert!(sink.was_abandoned());
    assert!(sending.await.unwrap().is_err());
}

#[tokio::test]
async fn a_sender_can_be_stopped() {
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    random_file(&from, 23, 16 * MIB, 10);
    let receiver = Receiver::start(Arc::new(SparseFile::sink(&to)));
    let source = Arc::new(file(&from));
    let sent = send(source, "127.0.0.1", receiver.port, options(), ready(())).await;
    assert_eq!(sent.unwrap_err().kind(), ErrorKind::Interrupted);
    assert!(matches!(receiver.ended().await, Received::Closed { .. }));
}

#[tokio::test]
async fn nobody_there_is_an_error_that_names_the_place() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let mut options = options();
    options.retry.connect = Duration::from_millis(100);
    let error = send_to(port, Arc::new(Bytes::new(vec![1; 4096])), options).await.unwrap_err();
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
}

#[tokio::test]
async fn a_receiver_nobody_talks_to_ends() {
    let dir = tempdir().unwrap();
    let sink = Moody::new(&dir.path().join("b"), 0);
    let receiver =
        Receiver::with_idle(Arc::clone(&sink) as Arc<dyn Sink>, Duration::from_millis(50));
    // A connection without a request counts for nothing.
    let silent = tokio::net::TcpStream::connect(("127.0.0.1", receiver.port)).await.unwrap();
    assert_eq!(receiver.ended().await, Received::Idle);
    assert!(sink.was_abandoned());
    assert!(!dir.path().join("b").exists());
    drop(silent);
    assert_eq!(BLOCK, longhorn_sync::image::GRAIN);
}
