//! Replies on their way to a client: those that gather while the ones before are being sent.

use super::tls::TlsStream;
use dbs_reactor::Batch;
use std::io;

/// Batches kept for reuse by all connections of a reactor together.
const IDLE_BATCHES_MAX: usize = 256;

/// Empty batches, so that sending allocates nothing and an idle connection holds no memory.
#[derive(Default)]
pub(super) struct Batches {
    idle: Vec<Batch>,
}

impl Batches {
    #[inline]
    fn take(&mut self) -> Batch {
        self.idle.pop().unwrap_or_default()
    }

    #[inline]
    fn give_back(&mut self, mut batch: Batch) {
        batch.clear();
        if self.idle.len() < IDLE_BATCHES_MAX {
            self.idle.push(batch);
        }
    }
}

/// The sending side of a connection.
#[derive(Default)]
pub(super) struct Outgoing {
    gathering: Option<Batch>,
    /// What is free once those that gather, and those on their way, are sent.
    gathered: Cost,
    sending: Cost,
    /// Tick at which sending began, or was last seen to go on.
    since: Option<u32>,
    /// Bytes sent of the batch on its way, as seen then.
    sent: usize,
}

/// What replies free once sent.
#[derive(Default)]
struct Cost {
    requests: usize,
    bytes: u64,
}

impl Outgoing {
    /// Where to put the reply of a request that takes so many bytes of its connection's account.
    #[inline]
    pub fn reply(&mut self, cost_bytes: u64, batches: &mut Batches) -> &mut Batch {
        self.gathered.requests += 1;
        self.gathered.bytes += cost_bytes;
        self.gathering.get_or_insert_with(|| batches.take())
    }

    /// Where to put what answers no request.
    #[inline]
    pub fn message(&mut self, batches: &mut Batches) -> &mut Batch {
        self.gathering.get_or_insert_with(|| batches.take())
    }

    /// The next batch to send, encrypted if need be; `None` if there is nothing, or one is on its
    /// way.
    ///
    /// # Errors
    /// TLS is broken.
    #[inline]
    pub fn next(&mut self, tls: Option<&mut TlsStream>, tick: u32) -> io::Result<Option<Batch>> {
        let talkative = || tls.as_ref().is_some_and(|tls| tls.wants_write());
        if self.since.is_some() || (self.gathering.is_none() && !talkative()) {
            return Ok(None);
        }
        let mut batch = self.gathering.take().unwrap_or_default();
        if let Some(tls) = tls {
            let sealed = tls.seal(batch.slices())?;
            batch.clear();
            batch.push_vec(sealed);
        }
        self.sending = std::mem::take(&mut self.gathered);
        (self.since, self.sent) = (Some(tick), 0);
        Ok(Some(batch))
    }

    /// A batch has been sent, or cannot be: the requests and bytes it frees.
    #[inline]
    pub fn sent(&mut self, batch: Batch, batches: &mut Batches) -> (usize, u64) {
        self.since = None;
        batches.give_back(batch);
        let Cost { requests, bytes } = std::mem::take(&mut self.sending);
        (requests, bytes)
    }

    /// Drops what has not been sent: the requests and bytes that frees.
    pub fn abandon(&mut self) -> (usize, u64) {
        self.gathering = None;
        let Cost { requests, bytes } = std::mem::take(&mut self.gathered);
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
