//! A fixed number of threads that execute what may block, for all connections, first come first
//! served.
//! The queue needs no limit of its own: connections limit what they have in flight.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// The workers of a server.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    inline: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    stopping: bool,
}

impl Pool {
    /// Threads called `name` and a number. With none, jobs run where they are submitted.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(name: &str, workers: usize) -> io::Result<Self> {
        let inline = workers == 0;
        let pool = Self { shared: Arc::default(), threads: Mutex::default(), inline };
        for index in 0..workers {
            let shared = pool.shared.clone();
            let thread =
                thread::Builder::new().name(format!("{name}-{index}")).spawn(move || shared.work());
            match thread {
                Ok(thread) => lock(&pool.threads).push(thread),
                Err(error) => {
                    pool.stop();
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    /// Queues a job, which must not panic.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if self.inline {
            return job();
        }
        lock(&self.shared.state).jobs.push_back(Box::new(job));
        self.shared.changed.notify_one();
    }

    /// Finishes what is queued and ends the threads.
    pub fn stop(&self) {
        lock(&self.shared.state).stopping = true;
        self.shared.changed.notify_all();
        for thread in lock(&self.threads).drain(..) {
            // Jobs do not panic, and if one did, the others are still to be waited for.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let idle = |state: &mut State| state.jobs.is_empty() && !state.stopping;
            let job = wait_while(&self.changed, lock(&self.state), idle).jobs.pop_front();
            match job {
                Some(job) => job(),
                None => return,
            }
        }
    }
}

/// Locks, also after a panic elsewhere: every critical section here leaves its state consistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condvar` as long as `condition` holds.
pub fn wait_while<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    condition: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    condvar.wait_while(guard, condition).unwrap_or_else(PoisonError::into_inner)
}
