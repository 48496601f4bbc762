//! Fetching layers from another DBS replica.

use super::layer::LayerMut;
use super::service::VERSION;
use super::take::{Taker, tell};
use crate::agent::uses::{Use, interrupted};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::proto::dbs::fetch_request::Request as Fetch;
use longhorn_wire::proto::dbs::peer_client::PeerClient;
use longhorn_wire::proto::dbs::{
    FetchRequest, FetchResponse, FetchStart, HelloRequest, LayerInfo, LayersRequest,
};
use longhorn_wire::remote::{self, Address, Calls};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

/// Parts of a layer under way at a time, each over a connection of its own.
const STREAMS: usize = 4;
/// A layer is cut into about so many parts...
const PARTS: u64 = 16;
/// ...of at least so many bytes.
const PART_MIN: u64 = 64 << 20;
/// What is known or received waits in queues as long as this.
const QUEUE: usize = 3;
/// A source that says nothing for so long is taken for dead.
const SILENCE: Duration = Duration::from_secs(60);
/// Lost connections in a row, without anything received in between, before giving up.
const LOSSES: u32 = 5;

/// What fetching has cost, in bytes.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Compared by digests.
    pub compared: AtomicU64,
    /// Received.
    pub received: AtomicU64,
    /// Connections that were lost and taken up again.
    pub lost: AtomicU64,
}

impl Traffic {
    /// Counts what somebody else has.
    pub fn add(&self, other: &Self) {
        for (to, from) in [
            (&self.compared, &other.compared),
            (&self.received, &other.received),
            (&self.lost, &other.lost),
        ] {
            to.fetch_add(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// Another DBS replica.
#[derive(Debug, Clone)]
pub struct Remote {
    address: Address,
    volume: String,
    calls: Calls,
    /// After the first connection lost in a row; it doubles.
    rest: Duration,
}

/// A layer there and the layer here that becomes it.
#[derive(Clone)]
pub struct Transfer {
    /// As the other described it.
    pub info: LayerInfo,
    /// What one reads through it, instead of itself.
    pub flattened: bool,
    /// Of the same size; it may hold an older version, or part of it.
    pub target: Arc<dyn LayerMut>,
    /// Counted here.
    pub traffic: Arc<Traffic>,
    /// Bytes of the layer dealt with so far.
    pub passed: Arc<AtomicU64>,
    /// The use of the store that the target is in.
    pub used: Use,
}

impl Remote {
    /// Calls on a replica's sync agent; `None` if it is not one of ours. `rest` is the pause after
    /// the first connection lost in a row.
    ///
    /// # Errors
    /// `Io` if it cannot be reached, `Invalid` if it is of another volume.
    pub async fn meet(agent: &Address, volume: &str, rest: Duration) -> Result<Option<Self>> {
        let calls = remote::calls(agent, volume)?;
        let hello = remote::within(remote::SHORT_CALL, HelloRequest { version: VERSION });
        match PeerClient::new(calls.clone()).hello(hello).await {
            Ok(answer) if answer.get_ref().version == VERSION => {
                let (address, volume) = (agent.clone(), volume.to_owned());
                Ok(Some(Self { address, volume, calls, rest }))
            }
            // One that speaks no version of ours can still send files.
            Ok(_) => Ok(None),
            Err(status) if status.code() == Code::Unimplemented => Ok(None),
            Err(status) => Err(remote::failed(&status, &format!("calling the sync agent {agent}"))),
        }
    }

    /// Describes layers.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub async fn layers(&self, request: LayersRequest) -> Result<Vec<LayerInfo>> {
        let asked = request.disks.len();
        let request = remote::within(remote::SHORT_CALL, request);
        let what = format!("asking {} for its layers", self.address);
        let mut client = PeerClient::new(self.calls.clone());
        let answer = client.layers(request).await;
        let layers = answer.map_err(|status| remote::failed(&status, &what))?.into_inner().layers;
        if layers.len() != asked {
            let text = format!("{what}: {} answers instead of {asked}", layers.len());
            return Err(Error::invalid(text));
        }
        Ok(layers)
    }

    /// Fetches what a layer lacks. What has been received stays, whatever happens: another call
    /// goes on from there.
    ///
    /// # Errors
    /// `Busy` if the layer changes there, `Io` if the other is lost for good, `Interrupted` if the store is to go;
    /// of the target.
    pub async fn fetch(&self, transfer: Transfer) -> Result<()> {
        let parts = Arc::new(Mutex::new(parts(transfer.info.size)));
        let count = parts.lock().unwrap_or_else(PoisonError::into_inner).len().min(STREAMS);
        let mut workers = JoinSet::<Result<()>>::new();
        let (stop, stopped) = watch::channel(false);
        for _ in 0..count {
            let (remote, transfer) = (self.clone(), transfer.clone());
            let (parts, stopped) = (Arc::clone(&parts), stopped.clone());
            workers.spawn(async move {
                let calls = remote::calls(&remote.address, &remote.volume)?;
                let line = Line { calls, stopped };
                loop {
                    let part = parts.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(part) = part.filter(|_| !*line.stopped.borrow()) else {
                        return Ok(());
                    };
                    remote.fetch_part(&line, &transfer, part).await?;
                }
            });
        }
        let (mut outcome, mut used) = (Ok(()), transfer.used);
        loop {
            let ended = tokio::select! {
                ended = workers.join_next() => ended,
                () = used.ended(), if outcome.is_ok() => Some(Ok(Err(interrupted()))),
            };
            let Some(ended) = ended else { break };
            let ended = ended.map_err(broken).and_then(|ended| ended);
            // Waits for the others: nobody may write into the layer after this.
            stop.send_replace(ended.is_err() || *stopped.borrow());
            outcome = outcome.and(ended);
        }
        outcome
    }

    /// Fetches a part, over as many connections as it takes.
    async fn fetch_part(
        &self,
        line: &Line,
        transfer: &Transfer,
        mut part: Range<u64>,
    ) -> Result<()> {
        let mut losses = 0;
        loop {
            let begin = part.start;
            let status = match stream(line, transfer, &mut part).await? {
                Ok(()) => return Ok(()),
                Err(status) => status,
            };
            let what = format!("fetching {} from {}", transfer.info.disk, self.address);
            let lost = matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
                || matches!(status.code(), Code::Internal | Code::DeadlineExceeded);
            losses = if part.start > begin { 1 } else { losses + 1 };
            if !lost || losses > LOSSES {
                return Err(remote::failed(&status, &what));
            }
            transfer.traffic.lost.fetch_add(1, Ordering::Relaxed);
            let error = remote::text(&status);
            dbs_service::log::warn(
                "fetch-resumed",
                &[("from", &self.address), ("disk", &transfer.info.disk), ("error", &error)],
            );
            let mut stopped = line.stopped.clone();
            tokio::select! {
                () = tokio::time::sleep(self.rest * 2_u32.pow(losses - 1)) => {}
                _ = stopped.wait_for(|stopped| *stopped) => return Ok(()),
            }
        }
    }
}

/// The parts in which a layer is fetched.
fn parts(size: u64) -> VecDeque<Range<u64>> {
    let length = (size / PARTS).max(PART_MIN).next_multiple_of(PART_MIN);
    let starts = (0..size).step_by(usize::try_from(length).unwrap_or(usize::MAX));
    starts.map(|start| start..size.min(start.saturating_add(length))).collect()
}

/// Fetches a part over one connection, as far as it gets: the start of `part` moves. The outer
/// error is ours, the inner one the other's.
async fn stream(
    line: &Line,
    transfer: &Transfer,
    part: &mut Range<u64>,
) -> Result<std::result::Result<(), Status>> {
    let info = &transfer.info;
    let start = FetchStart {
        disk: info.disk.clone(),
        flattened: transfer.flattened,
        stamp: info.stamp.clone(),
    };
    let (sender, requests) = mpsc::channel(QUEUE);
    let first = FetchRequest { request: Some(Fetch::Start(start)) };
    let queued = sender.send(first).await;
    let teller = tokio::task::spawn_blocking(teller(transfer, part.clone(), sender));
    let (queue, responses) = mpsc::channel(QUEUE);
    let taker = tokio::task::spawn_blocking(taker(transfer, part.clone(), responses));
    let outcome = match queued {
        Ok(()) => line.receive(requests, queue).await,
        Err(_) => Err(Status::cancelled("the request was dropped")),
    };
    // The stream is gone: both ends of the work here come to an end.
    let (done, taken) = taker.await.map_err(broken)?;
    let told = teller.await.map_err(broken)?;
    part.start = done;
    taken?;
    match told {
        Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
        _ => {}
    }
    if outcome.is_ok() && !part.is_empty() {
        return Ok(Err(Status::unavailable("the answer ended early")));
    }
    Ok(outcome)
}

/// A connection for parts of a layer, and whether to go on.
struct Line {
    calls: Calls,
    /// Another part of the layer has failed.
    stopped: watch::Receiver<bool>,
}

impl Line {
    /// Hands over what comes, until it ends or is not wanted any more.
    async fn receive(
        &self,
        requests: mpsc::Receiver<FetchRequest>,
        queue: mpsc::Sender<FetchResponse>,
    ) -> std::result::Result<(), Status> {
        let mut stopped = self.stopped.clone();
        tokio::select! {
            outcome = hand_over(&self.calls, requests, queue) => outcome,
            _ = stopped.wait_for(|stopped| *stopped) => {
                Err(Status::failed_precondition("another part of the layer has failed"))
            }
        }
    }
}

async fn hand_over(
    calls: &Calls,
    requests: mpsc::Receiver<FetchRequest>,
    queue: mpsc::Sender<FetchResponse>,
) -> std::result::Result<(), Status> {
    let silent = |_| Status::unavailable(format!("nothing was heard for {} s", SILENCE.as_secs()));
    let mut client = PeerClient::new(calls.clone());
    // The connection keeps its end of this until it is gone itself. So that who tells is not held
    // up by it, the end of `requests` is kept here.
    let (sender, body) = mpsc::channel(1);
    let told = pass_on(requests, sender);
    let heard = async {
        let call = client.fetch(ReceiverStream::new(body));
        let mut answers = tokio::time::timeout(SILENCE, call).await.map_err(silent)??.into_inner();
        loop {
            let answer =
                tokio::time::timeout(SILENCE, answers.message()).await.map_err(silent)??;
            let Some(answer) = answer else { return Ok(()) };
            if queue.send(answer).await.is_err() {
                return Err(Status::failed_precondition("what came could not be taken"));
            }
        }
    };
    let mut heard = std::pin::pin!(heard);
    tokio::select! {
        outcome = &mut heard => return outcome,
        () = told => {}
    }
    heard.await
}

async fn pass_on(mut from: mpsc::Receiver<FetchRequest>, to: mpsc::Sender<FetchRequest>) {
    while let Some(request) = from.recv().await {
        if to.send(request).await.is_err() {
            return;
        }
    }
}

fn teller(
    transfer: &Transfer,
    part: Range<u64>,
    sender: mpsc::Sender<FetchRequest>,
) -> impl FnOnce() -> Result<()> + use<> {
    let Transfer { target, traffic, .. } = transfer.clone();
    move || {
        tell(&*target, part, &mut |known| {
            if !known.digests.is_empty() {
                traffic.compared.fetch_add(known.length, Ordering::Relaxed);
            }
            let request = FetchRequest { request: Some(Fetch::Known(known)) };
            let gone = |_| Error::new(ErrorKind::Interrupted, "the other replica has gone");
            sender.blocking_send(request).map_err(gone)
        })
    }
}

fn taker(
    transfer: &Transfer,
    part: Range<u64>,
    mut responses: mpsc::Receiver<FetchResponse>,
) -> impl FnOnce() -> (u64, Result<()>) + use<> {
    let Transfer { target, traffic, passed, .. } = transfer.clone();
    move || {
        let mut taker = Taker::new(&*target, part);
        while let Some(response) = responses.blocking_recv() {
            let before = taker.done();
            match taker.take(&response) {
                Ok(bytes) => traffic.received.fetch_add(bytes, Ordering::Relaxed),
                Err(error) => return (taker.done(), Err(error)),
            };
            passed.fetch_add(taker.done() - before, Ordering::Relaxed);
        }
        (taker.done(), Ok(()))
    }
}

fn broken(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorKind::Io, format!("a transfer ended abnormally: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_layer() {
        for size in [0, 512, PART_MIN, PART_MIN + 4096, 40 * PART_MIN + 512, 64 << 40] {
            let parts = parts(size);
            assert!(parts.len() as u64 <= PARTS + 1, "{size}");
            let mut at = 0;
            for part in parts {
                assert_eq!(part.start, at);
                assert!(part.start.is_multiple_of(PART_MIN) && !part.is_empty());
                at = part.end;
            }
            assert_eq!(at, size);
        }
    }
}
