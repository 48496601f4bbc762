//! What the tests of image transfers share.
#![allow(dead_code)]

use longhorn_sync::image::{Checksum, Interval, Record, Sink, Source, SparseFile};
use longhorn_sync::ssync::{ReceiveOptions, Received, Retry, SendOptions, Sent, receive, send};
use std::fs::File;
use std::future::pending;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;

pub const BLOCK: u64 = 4096;

/// Writes a sparse file with so many random runs of data, and returns its content.
pub fn random_file(path: &Path, seed: u64, size: u64, runs: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let file = File::create(path).unwrap();
    file.set_len(size).unwrap();
    change_file(path, &mut rng, runs);
    std::fs::read(path).unwrap()
}

/// Overwrites random runs of blocks.
pub fn change_file(path: &Path, rng: &mut fastrand::Rng, runs: usize) {
    let file = File::options().write(true).open(path).unwrap();
    let blocks = file.metadata().unwrap().len() / BLOCK;
    for _ in 0..runs {
        let start = rng.u64(..blocks);
        let longest = if rng.u8(..) < 32 { 1500 } else { 20 };
        let length = rng.u64(1..=longest).min(blocks - start) * BLOCK;
        let data: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(length as usize).collect();
        file.write_all_at(&data, start * BLOCK).unwrap();
    }
}

/// Data and holes of an image, neighbours joined.
pub fn layout(source: &dyn Source) -> Vec<Interval> {
    let mut all: Vec<Interval> = Vec::new();
    let mut at = 0;
    while at < source.size() {
        let some = source.intervals(at, 3).unwrap();
        assert!(!some.is_empty() && some.len() <= 3);
        for interval in some {
            assert_eq!(interval.offset, at);
            assert!(interval.length > 0);
            at = interval.end();
            match all.last_mut() {
                Some(last) if last.data == interval.data => last.length += interval.length,
                _ => all.push(interval),
            }
        }
    }
    assert_eq!(at, source.size());
    all
}

/// The image's whole content.
pub fn content(source: &dyn Source) -> Vec<u8> {
    let mut content = vec![0; source.size() as usize];
    source.read_at(0, &mut content).unwrap();
    content
}

/// Equal content, and data exactly where the other has it.
pub fn assert_same(ours: &dyn Source, theirs: &dyn Source) {
    assert_eq!(layout(ours), layout(theirs));
    assert!(content(ours) == content(theirs), "contents differ");
}

/// A receiver on a port of its own.
pub struct Receiver {
    pub port: u16,
    pub progress: Arc<AtomicU64>,
    pub task: JoinHandle<dbs_core::Result<Received>>,
}

impl Receiver {
    pub fn start(sink: Arc<dyn Sink>) -> Self {
        Self::with_idle(sink, Duration::from_secs(60))
    }

    pub fn with_idle(sink: Arc<dyn Sink>, idle: Duration) -> Self {
        Self::until(sink, idle, pending())
    }

    pub fn until(
        sink: Arc<dyn Sink>,
        idle: Duration,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let progress = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&progress);
        let options = ReceiveOptions {
            idle,
            progress: Arc::new(move |bytes| {
                count.fetch_add(bytes, Ordering::Relaxed);
            }),
        };
        Self { port, progress, task: tokio::spawn(receive(listener, sink, options, stop)) }
    }

    pub async fn ended(self) -> Received {
        self.task.await.unwrap().unwrap()
    }
}

/// Quick to give up, so that failures are quick as well.
pub fn options() -> SendOptions {
    SendOptions {
        retry: Retry {
            times: 2,
            first: Duration::from_millis(20),
            longest: Duration::from_millis(50),
            connect: Duration::from_secs(10),
        },
        ..SendOptions::new("volume-snap-a.img")
    }
}

pub async fn send_to(
    port: u16,
    source: Arc<dyn Source>,
    options: SendOptions,
) -> dbs_core::Result<Sent> {
    send(source, "127.0.0.1", port, options, pending()).await
}

/// Sends a file and checks that both sides have ended well.
pub async fn transfer(from: &Path, to: &Path, options: SendOptions) -> Sent {
    let receiver = Receiver::start(Arc::new(SparseFile::sink(to)));
    let source = Arc::new(SparseFile::source(from).unwrap());
    let sent = send_to(receiver.port, source, options).await.unwrap();
    assert_eq!(receiver.ended().await, Received::Closed { opened: !sent.skipped });
    sent
}

/// Puts a checksum on record beside a file, as after hashing it.
pub fn put_record(path: &Path, value: &str) -> Checksum {
    let record = Record {
        method: "crc64".into(),
        checksum: value.into(),
        change_time: SparseFile::source(path).unwrap().stamp().unwrap(),
        ..Record::default()
    };
    record.store(path).unwrap();
    record.to_checksum()
}
