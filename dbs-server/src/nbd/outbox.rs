//! The sending side of a connection: replies from many workers, one after the other, and the
//! account of what is in flight.
//!
//! A worker sends its reply itself while the socket takes it without waiting. When the socket is
//! full, the connection's own writer thread takes over: a client that does not read its replies
//! holds that thread, never a worker. Since a request counts as in flight until its reply is
//! sent, and the reader waits for room, such a client is not read from either.

use super::session::Reply;
use super::socket::Socket;
use super::tls::TlsStream;
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Most replies sent together.
const BATCH_MAX: usize = 16;

/// What one connection may have in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub requests: usize,
    pub bytes: u64,
}

/// The sending side of a connection.
pub(crate) struct Outbox {
    socket: Arc<Socket>,
    tls: Option<Arc<TlsStream>>,
    limits: Limits,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Reply, u64)>,
    /// Somebody is sending: replies are queued for them.
    sending: bool,
    /// Left over by a worker for the writer thread.
    stuck: Option<Batch>,
    writer: Option<JoinHandle<()>>,
    in_flight: usize,
    in_flight_bytes: u64,
    broken: bool,
    closed: bool,
}

/// Replies being sent.
struct Batch {
    parts: Vec<Vec<u8>>,
    length: usize,
    sent: usize,
    requests: usize,
    bytes: u64,
}

impl Outbox {
    pub fn new(socket: Arc<Socket>, tls: Option<Arc<TlsStream>>, limits: Limits) -> Self {
        Self { socket, tls, limits, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits for room for a request of `bytes`; `false` if the connection is broken. One request
    /// is always let in, however large.
    pub fn reserve(&self, bytes: u64) -> bool {
        let full = |state: &mut State| {
            !state.broken
                && state.in_flight > 0
                && (state.in_flight >= self.limits.requests
                    || state.in_flight_bytes + bytes > self.limits.bytes)
        };
        let mut state = wait_while(&self.changed, lock(&self.state), full);
        if state.broken {
            return false;
        }
        state.in_flight += 1;
        state.in_flight_bytes += bytes;
        true
    }

    /// Ends a request that gets no reply.
    pub fn cancel(&self, bytes: u64) {
        self.release(&mut lock(&self.state), 1, bytes);
    }

    /// Sends the reply of a request reserved with `bytes`.
    pub fn send(self: &Arc<Self>, reply: Reply, bytes: u64) {
        let mut state = lock(&self.state);
        if state.broken {
            return self.release(&mut state, 1, bytes);
        }
        state.queue.push_back((reply, bytes));
        if !state.sending {
            state.sending = true;
            drop(state);
            self.pump(None, false);
        }
    }

    /// Sends what TLS itself has to say.
    pub fn kick(self: &Arc<Self>) {
        if self.tls.as_ref().is_some_and(|tls| tls.wants_write()) && self.reserve(0) {
            self.send(Reply::default(), 0);
        }
    }

    /// Waits until every request has been answered, or the connection is broken and every worker
    /// is done with it; then ends the stream.
    pub fn finish(&self) {
        let busy = |state: &mut State| state.in_flight > 0 || state.sending;
        let mut state = wait_while(&self.changed, lock(&self.state), busy);
        state.closed = true;
        let (broken, writer) = (state.broken, state.writer.take());
        drop(state);
        self.changed.notify_all();
        if let Some(writer) = writer {
            // A panic there has been reported already; there is nothing left to do for it.
            let _ = writer.join();
        }
        if let Some(tls) = self.tls.as_ref().filter(|_| !broken)
            && let Ok(end) = tls.seal_end()
        {
            // The peer may be gone already.
            let _ = self.socket.send_all(end);
        }
        self.socket.shutdown(Shutdown::Both);
    }

    /// Sends `batch`, then batches from the queue until it is empty. Without `blocking`, leaves
    /// the rest to the writer thread when the socket is full. The caller owns `State::sending`.
    fn pump(self: &Arc<Self>, mut batch: Option<Batch>, blocking: bool) {
        loop {
            let mut current = match batch.take() {
                Some(batch) => batch,
                None => match self.next_batch() {
                    Ok(Some(batch)) => batch,
                    Ok(None) => return,
                    Err(_) => return self.fail(None),
                },
            };
            while current.sent < current.length {
                match self.socket.send(&current.parts, current.sent, blocking) {
                    Ok(count) => current.sent += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock && !blocking => {
                        return self.hand_over(current);
                    }
                    Err(_) => return self.fail(Some(current)),
                }
            }
            self.release(&mut lock(&self.state), current.requests, current.bytes);
        }
    }

    /// The next replies, encrypted if need be; gives `sending` back when there are none. If TLS
    /// fails, so does the connection.
    fn next_batch(&self) -> io::Result<Option<Batch>> {
        let mut state = lock(&self.state);
        let count = state.queue.len().min(BATCH_MAX);
        if count == 0 {
            state.sending = false;
            self.changed.notify_all();
            return Ok(None);
        }
        let mut batch = Batch { parts: Vec::new(), length: 0, sent: 0, requests: count, bytes: 0 };
        for (reply, bytes) in state.queue.drain(..count) {
            batch.parts.extend(reply.parts);
            batch.bytes += bytes;
        }
        drop(state);
        if let Some(tls) = &self.tls {
            match tls.seal(&batch.parts) {
                Ok(sealed) => batch.parts = vec![sealed],
                Err(error) => {
                    self.release(&mut lock(&self.state), batch.requests, batch.bytes);
                    return Err(error);
                }
            }
        }
        batch.length = batch.parts.iter().map(Vec::len).sum();
        Ok(Some(batch))
    }

    fn hand_over(self: &Arc<Self>, batch: Batch) {
        let mut state = lock(&self.state);
        if state.writer.is_none() {
            let outbox = self.clone();
            let spawned = thread::Builder::new()
                .name("nbd-writer".into())
                .spawn(move || outbox.write_stuck());
            let Ok(writer) = spawned else {
                drop(state);
                return self.fail(Some(batch));
            };
            state.writer = Some(writer);
        }
        state.stuck = Some(batch);
        self.changed.notify_all();
    }

    /// The writer thread.
    fn write_stuck(self: Arc<Self>) {
        loop {
            let idle = |state: &mut State| state.stuck.is_none() && !state.closed;
            let batch = wait_while(&self.changed, lock(&self.state), idle).stuck.take();
            match batch {
                Some(batch) => self.pump(Some(batch), true),
                None => return,
            }
        }
    }

    /// Gives the connection up: the peer is gone, or too slow.
    fn fail(&self, batch: Option<Batch>) {
        self.socket.shutdown(Shutdown::Both);
        let mut state = lock(&self.state);
        state.broken = true;
        state.sending = false;
        let queued: Vec<u64> = state.queue.drain(..).map(|(_, bytes)| bytes).collect();
        let (requests, bytes) = batch.map_or((0, 0), |batch| (batch.requests, batch.bytes));
        let queued_bytes: u64 = queued.iter().sum();
        self.release(&mut state, requests + queued.len(), bytes + queued_bytes);
    }

    fn release(&self, state: &mut State, requests: usize, bytes: u64) {
        state.in_flight -= requests;
        state.in_flight_bytes -= bytes;
        self.changed.notify_all();
    }
}

/// Locks, also after a panic elsewhere: every critical section here leaves its state consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condvar` as long as `condition` holds.
pub(crate) fn wait_while<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    condition: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    condvar.wait_while(guard, condition).unwrap_or_else(PoisonError::into_inner)
}
