//! Work by several threads on one operation, with what bounds it: memory, rate, and an end when the caller wants it.

use dbs_core::{Error, ErrorKind, Result};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that a worker has in hand at most: two workers have these twice, and a replica is to stay below 128 MiB.
const RUN: u64 = 8 << 20;

/// Blocks of this size that a worker reads, and makes durable, together.
pub(crate) fn run(block_size: u64) -> usize {
    (RUN / block_size).clamp(1, 8) as usize
}

/// How often the caller is asked whether to go on.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// How an operation works.
pub struct Work<'a> {
    /// Blocks on their way at once: each takes memory for some twelve blocks, with what reads and compresses it.
    pub workers: usize,
    /// Bytes to or from the backup store in a second, at most.
    pub rate: Option<NonZeroU64>,
    /// Called with the bytes done and the bytes in all, also if nothing is new; returning false ends the operation
    /// with [`ErrorKind::Interrupted`].
    pub progress: &'a mut dyn FnMut(u64, u64) -> bool,
}

impl<'a> Work<'a> {
    /// Four blocks at once, no limit.
    pub fn new(progress: &'a mut dyn FnMut(u64, u64) -> bool) -> Self {
        Self { workers: 4, rate: None, progress }
    }
}

/// Spreads bytes over time.
pub(crate) struct Rate<'a> {
    rate: Option<NonZeroU64>,
    free: Mutex<Instant>,
    stop: &'a AtomicBool,
}

impl<'a> Rate<'a> {
    pub fn new(rate: Option<NonZeroU64>, stop: &'a AtomicBool) -> Self {
        Self { rate, free: Mutex::new(Instant::now()), stop }
    }

    /// Waits until bytes may be moved.
    pub fn wait(&self, bytes: u64) {
        let Some(rate) = self.rate else { return };
        let turn = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let turn = (*free).max(Instant::now());
            *free = turn + Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
            turn
        };
        pause(turn.saturating_duration_since(Instant::now()), self.stop);
    }
}

/// Sleeps, until `stop` is set.
pub(crate) fn pause(time: Duration, stop: &AtomicBool) {
    let end = Instant::now() + time;
    while !stop.load(Ordering::SeqCst) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        std::thread::sleep(left.min(TICK));
    }
}

/// The error of an operation that its caller ended.
pub(crate) fn interrupted() -> Error {
    Error::new(ErrorKind::Interrupted, "stopped before the end")
}

/// Does all `jobs` on `workers` threads. `done` gets each result on the thread of the caller, or nothing from time to
/// time; after its first error, or that of a job, no further job begins, and `stop` is set.
pub(crate) fn each<J: Send, R: Send>(
    workers: usize,
    stop: &AtomicBool,
    jobs: impl Iterator<Item = J> + Send,
    work: impl Fn(J) -> Result<R> + Sync,
    mut done: impl FnMut(Option<R>) -> Result<()>,
) -> Result<()> {
    let workers = workers.clamp(1, 64);
    let jobs = Mutex::new(jobs.fuse());
    let (send, results) = sync_channel(workers);
    let (jobs, work) = (&jobs, &work);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let send = send.clone();
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(job) = job else { break };
                    if send.send(work(job)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        let mut outcome = Ok(());
        loop {
            let news = match results.recv_timeout(TICK) {
                Ok(result) => result.map(Some),
                Err(RecvTimeoutError::Timeout) => Ok(None),
                // Whoever stopped it from outside has jobs left.
                Err(RecvTimeoutError::Disconnected) if stop.load(Ordering::SeqCst) => {
                    return outcome.and_then(|()| Err(interrupted()));
                }
                Err(RecvTimeoutError::Disconnected) => return outcome,
            };
            if outcome.is_ok() {
                outcome = news.and_then(&mut done);
                stop.fetch_or(outcome.is_err(), Ordering::SeqCst);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_jobs_are_done_once() {
        let (stop, mut sum) = (AtomicBool::new(false), 0);
        each(8, &stop, 0..1000_u64, Ok, |result| {
            sum += result.unwrap_or(0);
            Ok(())
        })
        .unwrap();
        assert_eq!(sum, 499_500);
    }

    #[test]
    fn the_first_error_ends_it() {
        let stop = AtomicBool::new(false);
        let work = |job: u64| if job == 7 { Err(Error::invalid("seven")) } else { Ok(job) };
        let error = each(3, &stop, 0.., work, |_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "seven");
        let stop = AtomicBool::new(false);
        let error = each(3, &stop, 0.., Ok, |_: Option<u64>| Err(interrupted())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
    }

    #[test]
    fn a_rate_spreads_bytes() {
        let stop = AtomicBool::new(false);
        let rate = Rate::new(NonZeroU64::new(1000), &stop);
        let begun = Instant::now();
        for _ in 0..3 {
            rate.wait(20);
        }
        assert!(begun.elapsed() >= Duration::from_millis(40));
        stop.store(true, Ordering::SeqCst);
        rate.wait(1 << 60);
        rate.wait(1);
    }
}
