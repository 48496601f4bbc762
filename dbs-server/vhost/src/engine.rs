//! The threads that serve queues, for all clients of a store.

use super::queue::{Message, Queues};
use dbs_core::Store;
use dbs_frontend::Pool;
use dbs_reactor::{Remote, Thread};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// The threads that serve queues.
pub struct Engine {
    threads: Vec<Thread<Message>>,
    pool: Arc<Pool>,
    next: AtomicU64,
}

impl Engine {
    /// Starts them.
    ///
    /// # Errors
    /// Not all can be started.
    pub fn start(
        store: &Store,
        reactors: usize,
        options: &dbs_reactor::Options,
        workers: usize,
    ) -> io::Result<Self> {
        let pool = Arc::new(Pool::start("vhost-worker", workers.max(1))?);
        let mut engine = Self { threads: Vec::new(), pool, next: AtomicU64::new(0) };
        for index in 0..reactors.max(1) {
            let (store, pool) = (store.clone(), Arc::clone(&engine.pool));
            let name = format!("vhost-reactor-{index}");
            let make =
                move |io: &mut dbs_reactor::Io, remote| Queues::new(io, &store, pool, remote);
            match dbs_reactor::spawn(&name, options, make) {
                Ok(thread) => engine.threads.push(thread),
                Err(error) => {
                    engine.stop();
                    return Err(error);
                }
            }
        }
        Ok(engine)
    }

    /// A number for a queue, and the thread that is to serve it.
    pub fn next(&self) -> (u64, Remote<Message>) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let index = number as usize % self.threads.len().max(1);
        (number, self.threads[index].remote())
    }

    /// Ends the threads, once nobody has queues.
    pub fn stop(self) {
        self.threads.iter().for_each(|thread| thread.remote().send(Message::End));
        self.threads.into_iter().for_each(Thread::join);
        self.pool.stop();
    }

    /// Waits until others have let go of it.
    pub fn alone(mut engine: Arc<Self>) -> Option<Self> {
        for _ in 0..1000 {
            match Arc::try_unwrap(engine) {
                Ok(engine) => return Some(engine),
                Err(shared) => engine = shared,
            }
            thread::sleep(Duration::from_millis(1));
        }
        None
    }
}
