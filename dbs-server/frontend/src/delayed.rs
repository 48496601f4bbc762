//! Requests that wait until the limits of their volume let them in.

use dbs_core::volume::Pace;
use dbs_reactor::Io;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long to wait at most before asking again: limits change, others use them up, clients go.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What is to become of a request that is delayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It waits for the limits.
    Wait,
    /// It is begun whatever the limits are, as its end is waited for. It uses them up all the same.
    Go,
    /// It is not begun any more: its client is gone, or leaves it to another server.
    Drop,
}

/// Requests that one reactor delays, those of a volume in the order in which they came.
pub struct Delayed<T> {
    queues: Vec<Queue<T>>,
    /// Those that wait for nothing any more, and whether they are to be begun.
    freed: VecDeque<(T, bool)>,
    /// When all were last asked for their fate.
    looked: Duration,
}

struct Queue<T> {
    pace: Arc<Pace>,
    waiting: VecDeque<Waiting<T>>,
}

struct Waiting<T> {
    request: T,
    bytes: u64,
    since: Duration,
}

impl<T> Default for Delayed<T> {
    fn default() -> Self {
        Self { queues: Vec::new(), freed: VecDeque::new(), looked: Duration::ZERO }
    }
}

impl<T> Delayed<T> {
    /// Hands a request back that may start now; otherwise keeps it until [`Delayed::next`] hands it out. It
    /// transfers so many bytes.
    #[inline]
    pub fn admit(&mut self, io: &mut Io, pace: &Arc<Pace>, bytes: u64, request: T) -> Option<T> {
        if self.is_free(pace) {
            return Some(request);
        }
        let since = now();
        let waiting = Waiting { request, bytes, since };
        if let Some(queue) = self.queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.pace, pace)) {
            queue.waiting.push_back(waiting);
            return None;
        }
        let Err(wait) = pace.admit(since, bytes) else { return Some(waiting.request) };
        self.queues.push(Queue { pace: Arc::clone(pace), waiting: VecDeque::from([waiting]) });
        io.remind_in(wait.min(LOOK_AGAIN));
        None
    }

    /// Whether a request may start without a look at the limits.
    #[inline]
    #[must_use]
    pub fn is_free(&self, pace: &Arc<Pace>) -> bool {
        // One whose limits were just removed is behind those that came before.
        !pace.is_limited()
            && (self.queues.is_empty()
                || !self.queues.iter().any(|queue| Arc::ptr_eq(&queue.pace, pace)))
    }

    /// The next request that waits no longer, and whether it is to be begun: one that is not was dropped, and is
    /// only answered. To be asked in [`dbs_reactor::Handler::reminded`], and after [`Delayed::look`], as long as
    /// there is one.
    pub fn next(&mut self, io: &mut Io, fate: impl Fn(&T) -> Fate) -> Option<(T, bool)> {
        let now = now();
        if !self.queues.is_empty() && now >= self.looked + LOOK_AGAIN {
            self.looked = now;
            self.free(now, &fate);
        }
        if let Some(freed) = self.freed.pop_front() {
            return Some(freed);
        }
        let mut first = None::<Duration>;
        for index in 0..self.queues.len() {
            let queue = &mut self.queues[index];
            let Some(front) = queue.waiting.front() else { continue };
            let dropped = fate(&front.request) == Fate::Drop;
            match if dropped { Ok(()) } else { queue.pace.admit(now, front.bytes) } {
                Err(wait) => first = Some(first.map_or(wait, |first| first.min(wait))),
                Ok(()) => {
                    let front = queue.waiting.pop_front()?;
                    queue.pace.has_delayed(now.saturating_sub(front.since));
                    // So that no volume waits for the whole burst of another.
                    self.queues.rotate_left(index + 1);
                    self.queues.retain(|queue| !queue.waiting.is_empty());
                    return Some((front.request, !dropped));
                }
            }
        }
        if let Some(wait) = first {
            io.remind_in(wait.min(LOOK_AGAIN));
        }
        None
    }

    /// Asks all for their fate with the next [`Delayed::next`]: somebody has gone, or is to go.
    pub fn look(&mut self) {
        self.looked = Duration::ZERO;
    }

    fn free(&mut self, now: Duration, fate: &impl Fn(&T) -> Fate) {
        let waits = |waiting: &Waiting<T>| fate(&waiting.request) == Fate::Wait;
        for Queue { pace, waiting } in &mut self.queues {
            if waiting.iter().all(waits) {
                continue;
            }
            for one in std::mem::take(waiting) {
                match fate(&one.request) {
                    Fate::Wait => waiting.push_back(one),
                    Fate::Drop => self.freed.push_back((one.request, false)),
                    Fate::Go => {
                        pace.charge(now, one.bytes);
                        pace.has_delayed(now.saturating_sub(one.since));
                        self.freed.push_back((one.request, true));
                    }
                }
            }
        }
        self.queues.retain(|queue| !queue.waiting.is_empty());
    }
}

/// The time of this process, by which the limits go.
fn now() -> Duration {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed()
}
