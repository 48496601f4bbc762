//! The sending side.

mod link;
mod plan;

pub use link::Retry;

use crate::image::{Checksum, GRAIN, Interval, Record, Source};
use crate::ssync::buffers::{Buffer, Buffers};
use crate::ssync::{WORKERS, sha512};
use dbs_core::{Error, ErrorKind, Result};
use hyper::body::Bytes;
use hyper::{Method, StatusCode};
use link::{Address, Link};
use plan::Plan;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;

/// For the goodbye after a failure, when the receiver may be gone.
const LAST_WORD: Duration = Duration::from_secs(5);

/// How to send.
#[derive(Clone)]
pub struct SendOptions {
    /// What is sent, for error texts.
    pub name: String,
    /// Tells the receiver to write past the page cache; the size must be a multiple of [`GRAIN`].
    pub direct_io: bool,
    /// Send nothing if the receiver has the same checksum on record.
    pub fast_sync: bool,
    /// The image's checksum, if there is a current one on record; passed on to the receiver.
    pub checksum: Option<Checksum>,
    /// For one request; none is unlimited.
    pub timeout: Duration,
    /// How often to try.
    pub retry: Retry,
    /// Called with how many more bytes of the image, holes included, are at the receiver.
    pub progress: Arc<dyn Fn(u64) + Send + Sync>,
}

impl SendOptions {
    /// Upstream's ways, for a layer.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            direct_io: true,
            fast_sync: false,
            checksum: None,
            timeout: Duration::from_secs(30),
            retry: Retry::default(),
            progress: Arc::new(|_| {}),
        }
    }
}

/// What has been sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sent {
    /// Nothing had to be: the checksums on record were equal.
    pub skipped: bool,
    /// The receiver had an image of this name, which was changed where it differed.
    pub existed: bool,
    /// Bytes of data sent.
    pub written: u64,
    /// Bytes of data that the receiver had already.
    pub equal: u64,
    /// Bytes of holes.
    pub holes: u64,
}

/// Sends an image to the receiver at `host` and `port`, and says goodbye to it in any case.
///
/// # Errors
/// `Interrupted` when `stop` completed; `Io` with what the receiver said; of the source.
pub async fn send(
    source: Arc<dyn Source>,
    host: &str,
    port: u16,
    options: SendOptions,
    stop: impl Future<Output = ()> + Send,
) -> Result<Sent> {
    let address =
        Address { host: host.to_owned(), port, timeout: options.timeout, retry: options.retry };
    let size = source.size();
    let sender = Arc::new(Sender {
        plan: Plan::new(Arc::clone(&source), size),
        source,
        size,
        buffers: Buffers::new(WORKERS),
        address,
        options,
        tally: Tally::default(),
    });
    let outcome = tokio::select! {
        outcome = sender.transfer() => outcome,
        () = stop => Err(Error::new(ErrorKind::Interrupted, "sending was stopped")),
    };
    let what = format!("cannot send `{}`", sender.options.name);
    let outcome = match outcome {
        Ok(sent) => sender.close().await.map(|()| sent),
        Err(error) => {
            let link = Link::new(sender.address.clone());
            // Somebody may be waiting for the source, and the goodbye takes its time.
            drop(sender);
            give_up(link).await;
            Err(error)
        }
    };
    outcome.map_err(|error| error.context(what))
}

struct Sender {
    source: Arc<dyn Source>,
    size: u64,
    plan: Plan,
    buffers: Buffers,
    address: Address,
    options: SendOptions,
    tally: Tally,
}

#[derive(Default)]
struct Tally {
    written: AtomicU64,
    equal: AtomicU64,
    holes: AtomicU64,
}

impl Sender {
    async fn transfer(self: &Arc<Self>) -> Result<Sent> {
        if self.options.direct_io && !self.size.is_multiple_of(GRAIN) {
            return Err(Error::invalid(format!("{} bytes are no whole blocks", self.size)));
        }
        let mut link = Link::new(self.address.clone());
        if self.options.fast_sync && self.is_known(&mut link).await? {
            (self.options.progress)(self.size);
            return Ok(Sent { skipped: true, existed: true, ..Sent::default() });
        }
        let existed = self.open(&mut link).await?;
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            let (sender, link) = (Arc::clone(self), Link::new(self.address.clone()));
            workers.spawn(async move { sender.work(link, existed).await });
        }
        // Dropped at the first error, which ends the others.
        while let Some(outcome) = workers.join_next().await {
            outcome.map_err(|error| Error::new(ErrorKind::Io, error.to_string()))??;
        }
        let read = |tally: &AtomicU64| tally.load(Ordering::Relaxed);
        Ok(Sent {
            skipped: false,
            existed,
            written: read(&self.tally.written),
            equal: read(&self.tally.equal),
            holes: read(&self.tally.holes),
        })
    }

    /// Whether the receiver has an image with our checksum.
    async fn is_known(&self, link: &mut Link) -> Result<bool> {
        let Some(ours) = &self.options.checksum else { return Ok(false) };
        let (status, answer) = link.reach("getRecordedMetadata").await?;
        let theirs = serde_json::from_slice::<Record>(&answer);
        Ok(status == StatusCode::OK
            && !ours.value.is_empty()
            && theirs.is_ok_and(|theirs| {
                // Of an image that is known to be corrupt it is the checksum that it should have.
                theirs.checksum == ours.value && !theirs.silently_corrupted
            }))
    }

    /// Whether the image existed at the receiver.
    async fn open(&self, link: &mut Link) -> Result<bool> {
        let direct = self.options.direct_io;
        let target = format!("open?begin=0&directIO={direct}&end={}", self.size);
        let answer = link.reach(&target).await?;
        if answer.0 != StatusCode::OK {
            return Err(link.refused(&target, &answer));
        }
        parse(&target, &answer.1)
    }

    async fn work(&self, mut link: Link, existed: bool) -> Result<()> {
        while let Some(piece) = self.plan.next().await? {
            if !piece.data {
                // A new file is one hole to begin with.
                if existed {
                    link.ask(Method::POST, &target("sendHole", piece), Bytes::new()).await?;
                }
                self.tally.holes.fetch_add(piece.length, Ordering::Relaxed);
            } else if existed {
                self.compare(&mut link, piece).await?;
            } else {
                let (buffer, _) = self.read(piece, false).await?;
                self.write(&mut link, piece, buffer).await?;
            }
            (self.options.progress)(piece.length);
        }
        Ok(())
    }

    /// Sends a piece unless the receiver has it.
    async fn compare(&self, link: &mut Link, piece: Interval) -> Result<()> {
        let target = target("getChecksum", piece);
        let (theirs, ours) =
            tokio::join!(link.ask(Method::GET, &target, Bytes::new()), self.read(piece, true));
        let (buffer, ours) = ours?;
        let theirs: Option<String> = parse(&target, &theirs?)?;
        if ours.is_some() && theirs == ours {
            self.tally.equal.fetch_add(piece.length, Ordering::Relaxed);
            return Ok(());
        }
        self.write(link, piece, buffer).await
    }

    async fn write(&self, link: &mut Link, piece: Interval, buffer: Buffer) -> Result<()> {
        let body = Bytes::from_owner(buffer);
        link.ask(Method::POST, &target("writeData", piece), body).await?;
        self.tally.written.fetch_add(piece.length, Ordering::Relaxed);
        Ok(())
    }

    /// A piece's content and, if asked for, its checksum.
    async fn read(&self, piece: Interval, hash: bool) -> Result<(Buffer, Option<String>)> {
        let mut buffer = self.buffers.take(piece.length as usize).await;
        let source = Arc::clone(&self.source);
        let read = spawn_blocking(move || {
            source.read_at(piece.offset, &mut buffer)?;
            let checksum = hash.then(|| sha512(&buffer));
            Ok((buffer, checksum))
        });
        read.await.map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?
    }

    /// Ends the receiver. Upstream's may hang up before its answer is out.
    async fn close(&self) -> Result<()> {
        let none = Checksum { method: String::new(), value: String::new() };
        let Checksum { method, value } = self.options.checksum.as_ref().unwrap_or(&none);
        let target = format!("close?checksum={value}&checksumMethod={method}");
        let mut link = Link::new(self.address.clone());
        match link.once(Method::POST, &target, Bytes::new()).await {
            Ok(answer) if answer.0 != StatusCode::OK => Err(link.refused(&target, &answer)),
            _ => Ok(()),
        }
    }
}

/// Ends the receiver without a word on the checksum of what it has got.
async fn give_up(mut link: Link) {
    let target = "close?checksum=&checksumMethod=";
    let _ = timeout(LAST_WORD, link.once(Method::POST, target, Bytes::new())).await;
}

fn target(name: &str, piece: Interval) -> String {
    format!("{name}?begin={}&end={}", piece.offset, piece.end())
}

fn parse<'a, T: serde::Deserialize<'a>>(target: &str, answer: &'a [u8]) -> Result<T> {
    serde_json::from_slice(answer)
        .map_err(|error| Error::new(ErrorKind::Io, format!("strange answer to {target}: {error}")))
}
