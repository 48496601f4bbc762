//! A fixed number of threads that do what may block, for all clients of a server.
//!
//! Nobody holds a thread: work is done in short steps ([`Work`]), and between two of them others have their
//! turn. Clients take turns, whatever each of them has queued, and none has more than its share of the threads
//! at a time. What all clients wait for, such as commits, comes first, and some threads do nothing else.
//! The queue needs no limit of its own: connections limit what they have in flight.

use dbs_core::Volume;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Of so many workers, one does only what comes first.
const WORKERS_PER_RESERVED: usize = 4;
/// Of so many workers, a client has one at a time.
const WORKERS_PER_SHARE: usize = 2;

/// What a client is to whoever gives out turns. All who wait for a file that is far ([`Volume::rests_far`]) are one: with
/// many connections, too, they have one share of the workers.
#[must_use]
pub fn turns_of(volume: &Volume, client: u64) -> u64 {
    if volume.rests_far() { u64::MAX } else { client }
}

/// What a worker does for a client.
pub trait Work: Send {
    /// Does as much as takes some milliseconds, and does not panic; whether anything is left to do.
    fn step(&mut self) -> bool;
}

type Job = Box<dyn Work>;

/// Work that is done in one step.
struct Once<F>(Option<F>);

impl<F: FnOnce() + Send> Work for Once<F> {
    fn step(&mut self) -> bool {
        if let Some(job) = self.0.take() {
            job();
        }
        false
    }
}

/// The workers of a server.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    inline: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What does not wait for any client's turn.
    first: VecDeque<Job>,
    clients: HashMap<u64, Client>,
    /// Clients of which a job may begin, each once, in the order of their turns.
    turns: VecDeque<u64>,
    /// Jobs of clients that run.
    running: usize,
    /// Most of them, and most of one client's.
    running_max: usize,
    share: usize,
    stopping: bool,
}

/// What a client has.
#[derive(Default)]
struct Client {
    waiting: VecDeque<Job>,
    running: usize,
    has_turn: bool,
}

impl Pool {
    /// Threads called `name` and a number. With none, jobs run where they are submitted.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(name: &str, workers: usize) -> io::Result<Self> {
        let inline = workers == 0;
        let shared = Shared { state: Mutex::new(State::new(workers)), changed: Condvar::new() };
        let pool = Self { shared: Arc::new(shared), threads: Mutex::default(), inline };
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

    /// Queues work of a client, whom this number stands for.
    pub fn submit(&self, client: u64, mut work: impl Work + 'static) {
        if self.inline {
            while work.step() {}
            return;
        }
        lock(&self.shared.state).add(client, Box::new(work));
        self.shared.changed.notify_one();
    }

    /// Queues a client's job that is short and does not panic.
    pub fn submit_once(&self, client: u64, job: impl FnOnce() + Send + 'static) {
        self.submit(client, Once(Some(job)));
    }

    /// Queues a job that others wait for, before those of all clients. It must not panic.
    pub fn submit_first(&self, job: impl FnOnce() + Send + 'static) {
        if self.inline {
            return job();
        }
        lock(&self.shared.state).first.push_back(Box::new(Once(Some(job))));
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
        let mut state = lock(&self.state);
        loop {
            let idle = |state: &mut State| !state.has_next() && !state.is_over();
            state = wait_while(&self.changed, state, idle);
            let Some((client, mut job)) = state.next() else { return };
            if state.has_next() {
                // Who was woken for that may have found nothing that it might begin.
                self.changed.notify_one();
            }
            drop(state);
            let left = job.step().then_some(job);
            state = lock(&self.state);
            match (client, left) {
                (Some(client), left) => state.ended(client, left),
                (None, Some(job)) => state.first.push_back(job),
                (None, None) => {}
            }
            if state.is_over() {
                self.changed.notify_all();
            }
        }
    }
}

impl State {
    fn new(workers: usize) -> Self {
        let reserved = workers.div_ceil(WORKERS_PER_RESERVED);
        Self {
            first: VecDeque::new(),
            clients: HashMap::new(),
            turns: VecDeque::new(),
            running: 0,
            running_max: (workers - reserved).max(1),
            share: (workers / WORKERS_PER_SHARE).max(1),
            stopping: false,
        }
    }

    fn add(&mut self, client: u64, job: Job) {
        self.clients.entry(client).or_default().waiting.push_back(job);
        self.give_turn(client);
    }

    fn has_next(&self) -> bool {
        !self.first.is_empty() || (self.running < self.running_max && !self.turns.is_empty())
    }

    /// Nothing is left, and nothing is to come.
    fn is_over(&self) -> bool {
        self.stopping && self.first.is_empty() && self.clients.is_empty()
    }

    /// The next job, and the client whose turn it is.
    fn next(&mut self) -> Option<(Option<u64>, Job)> {
        if let Some(job) = self.first.pop_front() {
            return Some((None, job));
        }
        if self.running >= self.running_max {
            return None;
        }
        let number = self.turns.pop_front()?;
        let client = self.clients.get_mut(&number)?;
        client.has_turn = false;
        let job = client.waiting.pop_front()?;
        client.running += 1;
        self.running += 1;
        self.give_turn(number);
        Some((Some(number), job))
    }

    /// A step of a client's job has ended; what is left of it waits behind the client's others.
    fn ended(&mut self, number: u64, left: Option<Job>) {
        self.running -= 1;
        let Some(client) = self.clients.get_mut(&number) else { return };
        client.running -= 1;
        client.waiting.extend(left);
        if client.waiting.is_empty() && client.running == 0 {
            self.clients.remove(&number);
        } else {
            self.give_turn(number);
        }
    }

    /// Gives a client its next turn, if it has use for one, and not yet its share.
    fn give_turn(&mut self, number: u64) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        if !client.has_turn && !client.waiting.is_empty() && client.running < self.share {
            client.has_turn = true;
            self.turns.push_back(number);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Work of so many steps.
    struct Steps(u32);

    impl Work for Steps {
        fn step(&mut self) -> bool {
            self.0 -= 1;
            self.0 > 0
        }
    }

    fn queue(workers: usize, jobs: &[(u64, u32)]) -> State {
        let mut state = State::new(workers);
        jobs.iter().for_each(|(client, steps)| {
            state.add(*client, Box::new(Steps(*steps)));
        });
        state
    }

    /// Runs everything with one worker; the clients in the order of their steps.
    fn order(mut state: State) -> Vec<u64> {
        let mut order = Vec::new();
        while let Some((Some(client), mut job)) = state.next() {
            order.push(client);
            let left = job.step().then_some(job);
            state.ended(client, left);
        }
        assert!(state.clients.is_empty() && state.turns.is_empty() && state.running == 0);
        order
    }

    #[test]
    fn clients_take_turns_whatever_each_has_queued() {
        let order = order(queue(1, &[(1, 100), (1, 100), (1, 1), (2, 2), (3, 1)]));
        assert_eq!(order[..6], [1, 2, 3, 1, 2, 1]);
        assert_eq!(order.len(), 204);
    }

    #[test]
    fn short_work_of_a_client_passes_its_long_work() {
        let mut state = queue(1, &[(1, 100), (1, 1)]);
        let (_, mut long) = state.next().unwrap();
        assert!(long.step());
        state.ended(1, Some(long));
        assert!(!state.next().unwrap().1.step());
    }

    #[test]
    fn nobody_has_more_than_its_share_and_some_threads_are_kept_for_what_comes_first() {
        let jobs: Vec<_> =
            (0..50).map(|_| (1, 9)).chain([(2, 9), (3, 9), (3, 9), (3, 9)]).collect();
        let mut state = queue(8, &jobs);
        let running: Vec<_> =
            std::iter::from_fn(|| state.next()).map(|(client, _)| client).collect();
        assert_eq!(running.len(), 6, "two of eight are kept");
        assert_eq!(running.iter().filter(|client| **client == Some(1)).count(), 3);
        assert!(!state.has_next());
        state.first.push_back(Box::new(Steps(1)));
        assert!(state.has_next() && state.next().unwrap().0.is_none());
        let mut alone = queue(8, &jobs[..50]);
        assert_eq!(std::iter::from_fn(|| alone.next()).count(), 4, "half of them");
    }

    #[test]
    fn stopping_finishes_what_is_queued() {
        let pool = Pool::start("test", 3).unwrap();
        let (done, finished) = std::sync::mpsc::channel();
        for client in 0..100 {
            let done = done.clone();
            pool.submit_once(client % 7, move || done.send(()).unwrap());
        }
        pool.submit_first(move || done.send(()).unwrap());
        pool.stop();
        assert_eq!(finished.iter().count(), 101);
    }
}
