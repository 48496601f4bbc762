//! One image being received: what each request does to it.

use crate::image::{Checksum, Sink};
use crate::ssync::buffers::{Buffer, Buffers};
use crate::ssync::receive::command::{Command, Piece, Refusal};
use crate::ssync::receive::coverage::Coverage;
use crate::ssync::sha512;
use dbs_core::Result;
use hyper::StatusCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock, watch};
use tokio::task::spawn_blocking;

/// Pieces in memory at a time; a sender has [`crate::ssync::WORKERS`] of them under way.
const BUFFERS: usize = 8;

/// Called with how many more bytes of data have arrived or been compared.
pub type Progress = Arc<dyn Fn(u64) + Send + Sync>;

/// An image being received.
pub struct Transfer {
    sink: Arc<dyn Sink>,
    progress: Progress,
    buffers: Buffers,
    /// Changes hold it for reading for as long as they touch the image, even if their connection is
    /// gone; opening and ending hold it alone.
    phase: Arc<RwLock<Phase>>,
    coverage: Arc<Mutex<Coverage>>,
    opened: AtomicBool,
    /// How the transfer ended.
    ended: watch::Sender<Option<std::result::Result<(), String>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing has happened to the image yet.
    New,
    /// Open with this size.
    Open(u64),
    /// Nothing happens to it any more.
    Ended,
}

/// A successful answer: nothing, or JSON.
pub type Answer = Option<String>;

impl Transfer {
    pub fn new(sink: Arc<dyn Sink>, progress: Progress) -> Self {
        Self {
            sink,
            progress,
            buffers: Buffers::new(BUFFERS),
            phase: Arc::new(RwLock::new(Phase::New)),
            coverage: Arc::default(),
            opened: AtomicBool::new(false),
            ended: watch::Sender::new(None),
        }
    }

    /// Becomes `Some` when the sender has said `close` and the image is finished, or could not be.
    pub fn ended(&self) -> watch::Receiver<Option<std::result::Result<(), String>>> {
        self.ended.subscribe()
    }

    /// Whether the sender ever opened the image.
    pub fn was_opened(&self) -> bool {
        self.opened.load(Ordering::Relaxed)
    }

    /// A buffer for the body of a request that writes `piece`.
    pub async fn body(&self, piece: Piece) -> std::result::Result<Buffer, Refusal> {
        let (_, length) = piece.inside(self.while_open().await?.1)?;
        Ok(self.buffers.take(length as usize).await)
    }

    /// Performs any request but a write.
    pub async fn perform(&self, command: Command) -> std::result::Result<Answer, Refusal> {
        match command {
            Command::Open { size } => self.open(size).await,
            Command::Recorded => self.recorded().await,
            Command::Checksum(piece) => self.checksum(piece).await,
            Command::Hole(piece) => self.hole(piece).await,
            Command::Close(checksum) => self.close(checksum).await,
            Command::Write(_) => Err(Refusal::bad("a write without a body")),
        }
    }

    /// Writes the body of a request.
    pub async fn write(&self, piece: Piece, body: Buffer) -> std::result::Result<Answer, Refusal> {
        let (guard, size) = self.while_open().await?;
        let (offset, length) = piece.inside(size)?;
        let (sink, coverage) = (Arc::clone(&self.sink), Arc::clone(&self.coverage));
        blocking(move || {
            let _guard = guard;
            sink.write_at(offset, &body)?;
            lock(&coverage).add(offset, length);
            Ok(())
        })
        .await?;
        if !self.sink.existed() {
            (self.progress)(length);
        }
        Ok(None)
    }

    /// Gives the image up, unless it is finished; returns whether it was given up.
    pub async fn abandon(&self) -> bool {
        let mut phase = self.alone().await;
        if *phase == Phase::Ended {
            return false;
        }
        *phase = Phase::Ended;
        let sink = Arc::clone(&self.sink);
        let outcome = spawn_blocking(move || {
            let _phase = phase;
            sink.abandon();
        });
        outcome.await.is_ok()
    }

    async fn open(&self, size: u64) -> std::result::Result<Answer, Refusal> {
        let mut phase = self.alone().await;
        if *phase == Phase::Ended {
            return Err(over());
        }
        let sink = Arc::clone(&self.sink);
        let coverage = Arc::clone(&self.coverage);
        blocking(move || {
            sink.open(size)?;
            *phase = Phase::Open(size);
            *lock(&coverage) = Coverage::default();
            Ok(())
        })
        .await?;
        self.opened.store(true, Ordering::Relaxed);
        Ok(Some(self.sink.existed().to_string()))
    }

    async fn recorded(&self) -> std::result::Result<Answer, Refusal> {
        let sink = Arc::clone(&self.sink);
        let record = blocking(move || sink.recorded()).await?;
        // Not 500, which a sender would repeat for a minute.
        let none = || Refusal::new(StatusCode::NOT_FOUND, "no current checksum is on record");
        let json = serde_json::to_string(&record.ok_or_else(none)?);
        json.map(Some).map_err(|error| internal(&error))
    }

    async fn checksum(&self, piece: Piece) -> std::result::Result<Answer, Refusal> {
        let (guard, size) = self.while_open().await?;
        let (offset, length) = piece.inside(size)?;
        let mut buf = self.buffers.take(length as usize).await;
        let sink = Arc::clone(&self.sink);
        let checksum = blocking(move || {
            let _guard = guard;
            if !is_all_data(sink.as_ref(), offset, length)? {
                return Ok(None);
            }
            sink.read_at(offset, &mut buf)?;
            Ok(Some(sha512(&buf)))
        })
        .await?;
        if self.sink.existed() {
            (self.progress)(length);
        }
        Ok(Some(checksum.map_or_else(|| "null".to_owned(), |text| format!("\"{text}\""))))
    }

    async fn hole(&self, piece: Piece) -> std::result::Result<Answer, Refusal> {
        let (guard, size) = self.while_open().await?;
        let (offset, length) = piece.inside(size)?;
        let (sink, coverage) = (Arc::clone(&self.sink), Arc::clone(&self.coverage));
        blocking(move || {
            let _guard = guard;
            sink.hole(offset, length)?;
            lock(&coverage).add(offset, length);
            Ok(())
        })
        .await?;
        Ok(None)
    }

    async fn close(&self, checksum: Option<Checksum>) -> std::result::Result<Answer, Refusal> {
        let mut phase = self.alone().await;
        let deserved = match *phase {
            Phase::Ended => return Err(over()),
            // Without `open` the images were equal: what is on record is no news.
            Phase::New => false,
            Phase::Open(size) => lock(&self.coverage).is_complete(size),
        };
        *phase = Phase::Ended;
        let checksum = checksum.filter(|_| deserved);
        let (sink, ended) = (Arc::clone(&self.sink), self.ended.clone());
        blocking(move || {
            let _phase = phase;
            let outcome = sink.finish(checksum.as_ref());
            ended.send_replace(Some(outcome.as_ref().map_err(ToString::to_string).copied()));
            outcome
        })
        .await?;
        Ok(None)
    }

    async fn alone(&self) -> OwnedRwLockWriteGuard<Phase> {
        Arc::clone(&self.phase).write_owned().await
    }

    /// Holds off the end and returns the image's size.
    async fn while_open(&self) -> std::result::Result<(OwnedRwLockReadGuard<Phase>, u64), Refusal> {
        let phase = Arc::clone(&self.phase).read_owned().await;
        match *phase {
            Phase::Open(size) => Ok((phase, size)),
            Phase::New => Err(Refusal::bad("the image has not been opened")),
            Phase::Ended => Err(over()),
        }
    }
}

/// Whether a range is data throughout.
fn is_all_data(sink: &dyn Sink, offset: u64, length: u64) -> Result<bool> {
    let (mut at, end) = (offset, offset + length);
    while at < end {
        let intervals = sink.intervals(at, 16)?;
        let Some(last) = intervals.last() else { return Ok(false) };
        if intervals.iter().any(|interval| interval.offset < end && !interval.data) {
            return Ok(false);
        }
        at = last.end();
    }
    Ok(true)
}

fn over() -> Refusal {
    Refusal::bad("the transfer is over")
}

fn internal(error: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

fn lock(coverage: &Mutex<Coverage>) -> MutexGuard<'_, Coverage> {
    coverage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs what may wait for storage off the runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> std::result::Result<T, Refusal> {
    match spawn_blocking(work).await {
        Ok(outcome) => Ok(outcome?),
        Err(error) => Err(internal(&error)),
    }
}
