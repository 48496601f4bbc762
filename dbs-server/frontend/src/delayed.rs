//! Requests that wait until the limits of their volume let them in.

use dbs_core::volume::Pace;
use dbs_reactor::Io;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long to wait at most before asking again: limits change, others use them up, clients go.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Requests that one reactor delays, those of a volume in the order in which they came.
pub struct Delayed<T> {
    queues: Vec<Queue<T>>,
    /// Those that wait for nothing any more.
    free: VecDeque<T>,
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
        Self { queues: Vec::new(), free: VecDeque::new() }
    }
}

impl<T> Delayed<T> {
    /// Hands a request back that may start now; otherwise keeps it until [`Delayed::next`] hands it out. It transfers so
    /// many bytes.
    #[inline]
    pub fn admit(&mut self, io: &mut Io, pace: &Arc<Pace>, bytes: u64, request: T) -> Option<T> {
        if self.queues.is_empty() && !pace.is_limited() {
            return Some(request);
        }
        self.admit_limited(io, pace, bytes, request)
    }

    fn admit_limited(
        &mut self,
        io: &mut Io,
        pace: &Arc<Pace>,
        bytes: u64,
        request: T,
    ) -> Option<T> {
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

    /// The next request that may start now. To be asked in [`dbs_reactor::Handler::reminded`], and after
    /// [`Delayed::free`], as long as there is one.
    pub fn next(&mut self, io: &mut Io) -> Option<T> {
        if let Some(request) = self.free.pop_front() {
            return Some(request);
        }
        let (now, mut first) = (now(), None::<Duration>);
        for index in 0..self.queues.len() {
            let queue = &mut self.queues[index];
            let Some(front) = queue.waiting.front() else { continue };
            match queue.pace.admit(now, front.bytes) {
                Err(wait) => first = Some(first.map_or(wait, |first| first.min(wait))),
                Ok(()) => {
                    let front = queue.waiting.pop_front();
                    queue.pace.has_delayed(now.saturating_sub(front.as_ref()?.since));
                    // So that no volume waits for the whole burst of another.
                    self.queues.rotate_left(index + 1);
                    self.queues.retain(|queue| !queue.waiting.is_empty());
                    return front.map(|front| front.request);
                }
            }
        }
        if let Some(wait) = first {
            io.remind_in(wait.min(LOOK_AGAIN));
        }
        None
    }

    /// Lets those go for which `which` holds, whatever the limits are: the reactor is to be done with them.
    pub fn free(&mut self, which: impl Fn(&T) -> bool) {
        for queue in &mut self.queues {
            for _ in 0..queue.waiting.len() {
                match queue.waiting.pop_front() {
                    Some(waiting) if which(&waiting.request) => {
                        self.free.push_back(waiting.request)
                    }
                    waiting => queue.waiting.extend(waiting),
                }
            }
        }
        self.queues.retain(|queue| !queue.waiting.is_empty());
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.free.is_empty()
    }
}

/// The time of this process, by which the limits go.
fn now() -> Duration {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed()
}
