//! The reactors that serve the queues of a frontend: threads of its own, or those of what carries its requests out.

use super::disks::DiskOptions;
use super::pool::{Pool, lock};
use super::requests::Requests;
use super::stored::Report;
use dbs_core::Store;
use dbs_reactor::{Handler, Io, Thread};
use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Sends a message to a reactor.
pub type Post<M> = Arc<dyn Fn(M) + Send + Sync>;

/// Hands a message to the part of a frontend on the reactor with this number, for [`Front::message`](super::Front::message).
pub type ToFront = Arc<dyn Fn(usize, Box<dyn Any + Send>) + Send + Sync>;

/// The reactors of a frontend.
pub struct Engine<M> {
    posts: Vec<Post<M>>,
    threads: Mutex<Vec<Thread<M>>>,
    pool: Option<Arc<Pool>>,
    next: AtomicU64,
}

impl<M: Send + 'static> Engine<M> {
    /// Starts threads for volumes of a store: `make` is called on each, and is told how to send messages there.
    ///
    /// # Errors
    /// Not all can be started; none runs then.
    pub fn start<T, H>(
        name: &str,
        store: &Store,
        serving: &DiskOptions,
        make: impl Fn(Requests<T>, Post<M>) -> H + Clone + Send + 'static,
        end: impl Fn() -> M,
    ) -> io::Result<Self>
    where
        T: Copy + Send + 'static,
        H: Handler<Message = M> + 'static,
        M: From<Report<T>>,
    {
        let pool = Arc::new(Pool::start(&format!("{name}-worker"), serving.workers.max(1))?);
        let mut engine = Self {
            posts: Vec::new(),
            threads: Mutex::default(),
            pool: Some(Arc::clone(&pool)),
            next: AtomicU64::new(0),
        };
        for index in 0..serving.reactors.max(1) {
            let (store, pool, make) = (store.clone(), Arc::clone(&pool), make.clone());
            let made = move |io: &mut Io, remote: dbs_reactor::Remote<M>| {
                let post: Post<M> = Arc::new(move |message| remote.send(message));
                let own = Arc::clone(&post);
                let deliver = Arc::new(move |report: Report<T>| own(report.into()));
                make(Requests::new(io, &store, pool, deliver), post)
            };
            match dbs_reactor::spawn(&format!("{name}-reactor-{index}"), &serving.reactor, made) {
                Ok(thread) => {
                    let remote = thread.remote();
                    engine.posts.push(Arc::new(move |message| remote.send(message)));
                    lock(&engine.threads).push(thread);
                }
                Err(error) => {
                    engine.stop(end);
                    return Err(error);
                }
            }
        }
        Ok(engine)
    }

    /// That of a frontend whose parts are on reactors of somebody else.
    #[must_use]
    pub fn hosted(reactors: usize, to: &ToFront) -> Self {
        let posts = (0..reactors.max(1)).map(|index| Self::post(index, to)).collect();
        Self { posts, threads: Mutex::default(), pool: None, next: AtomicU64::new(0) }
    }

    /// The way to its part on one of those.
    pub fn post(reactor: usize, to: &ToFront) -> Post<M> {
        let to = Arc::clone(to);
        Arc::new(move |message| to(reactor, Box::new(message)))
    }

    /// How many there are.
    #[must_use]
    pub fn reactors(&self) -> usize {
        self.posts.len()
    }

    /// A number for a queue, below 2^32, and the way to the reactor that is to serve it: each in turn.
    pub fn next(&self) -> (u64, Post<M>) {
        let number = self.next.fetch_add(1, Ordering::Relaxed) & u64::from(u32::MAX);
        (number, Arc::clone(&self.posts[number as usize % self.posts.len()]))
    }

    /// Sends a message to all.
    pub fn tell(&self, message: impl Fn() -> M) {
        self.posts.iter().for_each(|post| post(message()));
    }

    /// Ends the threads with this message, once nothing is served. Reactors of somebody else are left alone.
    pub fn stop(&self, end: impl Fn() -> M) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        threads.iter().for_each(|thread| thread.remote().send(end()));
        threads.into_iter().for_each(Thread::join);
        self.pool.iter().for_each(|pool| pool.stop());
    }
}
