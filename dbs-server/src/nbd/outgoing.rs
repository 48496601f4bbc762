//! Replies on their way to a client: those that gather while the ones before are being sent.

use super::tls::TlsStream;
use dbs_reactor::Batch;
use std::io;

/// The sending side of a connection.
#[derive(Default)]
pub(super) struct Outgoing {
    gathering: Replies,
    sending: Replies,
    /// Tick at which sending began, or was last seen to go on.
    since: Option<u32>,
    /// Bytes sent of the batch on its way, as seen then.
    sent: usize,
}

/// A batch of replies and what they free once sent.
#[derive(Default)]
struct Replies {
    batch: Batch,
    requests: usize,
    bytes: u64,
}

impl Outgoing {
    /// Where to put the reply of a request that takes so many bytes of its connection's account.
    pub fn reply(&mut self, cost_bytes: u64) -> &mut Batch {
        self.gathering.requests += 1;
        self.gathering.bytes += cost_bytes;
        &mut self.gathering.batch
    }

    /// The next batch to send, encrypted if need be; `None` if there is nothing, or one is on its
    /// way.
    ///
    /// # Errors
    /// TLS is broken.
    pub fn next(&mut self, tls: Option<&mut TlsStream>, tick: u32) -> io::Result<Option<Batch>> {
        let talkative = tls.as_ref().is_some_and(|tls| tls.wants_write());
        if self.since.is_some() || (self.gathering.batch.is_empty() && !talkative) {
            return Ok(None);
        }
        std::mem::swap(&mut self.gathering, &mut self.sending);
        let mut batch = std::mem::take(&mut self.sending.batch);
        if let Some(tls) = tls {
            let sealed = tls.seal(batch.slices()).inspect_err(|_| {
                // `abandon` has to find what will not be sent.
                std::mem::swap(&mut self.gathering, &mut self.sending);
            })?;
            batch.clear();
            batch.push_vec(sealed);
        }
        (self.since, self.sent) = (Some(tick), 0);
        Ok(Some(batch))
    }

    /// A batch has been sent, or cannot be: the requests and bytes it frees.
    pub fn sent(&mut self, mut batch: Batch) -> (usize, u64) {
        self.since = None;
        batch.clear();
        self.sending.batch = batch;
        (std::mem::take(&mut self.sending.requests), std::mem::take(&mut self.sending.bytes))
    }

    /// Drops what has not been sent: the requests and bytes that frees.
    pub fn abandon(&mut self) -> (usize, u64) {
        let Replies { requests, bytes, .. } = std::mem::take(&mut self.gathering);
        (requests, bytes)
    }

    /// Whether a batch is on its way.
    pub fn is_busy(&self) -> bool {
        self.since.is_some()
    }

    /// So much of the batch on its way has been sent by now.
    pub fn progress(&mut self, sent: usize, tick: u32) {
        if self.since.is_some() && sent != self.sent {
            (self.since, self.sent) = (Some(tick), sent);
        }
    }

    /// Tick at which the batch on its way was started or last seen to go on.
    pub fn since(&self) -> Option<u32> {
        self.since
    }
}
