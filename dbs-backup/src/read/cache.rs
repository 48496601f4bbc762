//! Blocks in memory: each is fetched by one thread at a time, and few at once.
//!
//! Whoever needs a block fetches it on the own thread, or waits for the one who does. Blocks that somebody may need soon
//! are fetched by others, when nobody waits for a turn.

use crate::names::BlockName;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Blocks that somebody may need soon: later ones push out earlier ones.
const QUEUE: usize = 64;

/// The content of a block.
pub(super) type Content = Arc<Vec<u8>>;

/// Blocks in memory, of which `J` says how to fetch one.
pub(super) struct Cache<J> {
    state: Mutex<State<J>>,
    /// A fetch has ended, something is to be fetched, or all ends.
    changed: Condvar,
    /// Bytes of blocks that are there or on their way. One that is needed comes in any case.
    limit: u64,
    /// Fetches at once.
    parallel: usize,
}

struct State<J> {
    blocks: HashMap<BlockName, Slot>,
    /// Those that are there, the one first that was needed least lately.
    ages: BTreeMap<u64, BlockName>,
    age: u64,
    bytes: u64,
    running: usize,
    /// Threads that need a block and wait for a turn.
    waiting: usize,
    queue: VecDeque<(BlockName, u64, J)>,
    ended: bool,
}

enum Slot {
    There { content: Content, age: u64 },
    Coming(Arc<Flight>),
}

/// A block on its way.
#[derive(Default)]
struct Flight {
    outcome: Mutex<Option<std::result::Result<Content, (ErrorKind, String)>>>,
    landed: Condvar,
}

impl<J> Cache<J> {
    /// One of `limit` bytes.
    pub fn new(limit: u64, parallel: usize) -> Self {
        let state = State {
            blocks: HashMap::new(),
            ages: BTreeMap::new(),
            age: 0,
            bytes: 0,
            running: 0,
            waiting: 0,
            queue: VecDeque::new(),
            ended: false,
        };
        let changed = Condvar::new();
        Self { state: Mutex::new(state), changed, limit, parallel: parallel.max(1) }
    }

    /// How many blocks of this size may be fetched before anybody needs them: they must not push each other out.
    pub fn depth(&self, size: u64) -> usize {
        (self.limit / 4 / size.max(1)).min(2 * self.parallel as u64) as usize
    }

    /// A block, if it is in memory.
    pub fn there(&self, name: BlockName) -> Option<Content> {
        self.state().find(name).and_then(std::result::Result::ok)
    }

    /// A block of `size` bytes, which `fetch` fetches if need be.
    ///
    /// # Errors
    /// Those of the fetch, here or of another thread.
    pub fn get(
        &self,
        name: BlockName,
        size: u64,
        fetch: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Content> {
        let mut state = self.state();
        match state.find(name) {
            Some(Ok(content)) => return Ok(content),
            Some(Err(flight)) => {
                drop(state);
                return flight.wait();
            }
            None => {}
        }
        let flight = state.announce(name);
        state.waiting += 1;
        while state.running >= self.parallel {
            state = self.wait(state);
        }
        state.waiting -= 1;
        self.fetch(state, name, size, &flight, fetch)
    }

    /// Has blocks fetched that somebody may need soon.
    pub fn ahead(&self, jobs: impl Iterator<Item = (BlockName, u64, J)>) {
        let mut state = self.state();
        for job in jobs {
            let is_known = state.blocks.contains_key(&job.0);
            if !is_known && !state.queue.iter().any(|(name, ..)| *name == job.0) {
                if state.queue.len() >= QUEUE {
                    state.queue.pop_front();
                }
                state.queue.push_back(job);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Fetches one block after the other that somebody may need soon, until all ends. An error is left to whoever needs
    /// the block.
    pub fn work(&self, fetch: impl Fn(&J) -> Result<Vec<u8>>) {
        let mut state = self.state();
        while !state.ended {
            let may = state.running < self.parallel && state.waiting == 0;
            let Some((name, size, job)) = may.then(|| state.queue.pop_front()).flatten() else {
                state = self.wait(state);
                continue;
            };
            if !state.blocks.contains_key(&name) {
                let flight = state.announce(name);
                let _ = self.fetch(state, name, size, &flight, || fetch(&job));
                state = self.state();
            }
        }
    }

    /// Ends the work, and lets go of all blocks.
    pub fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        // What the jobs hold is let go without the lock.
        let queue = std::mem::take(&mut state.queue);
        let there = state.make_room(0, 0);
        drop(state);
        drop((queue, there));
        self.changed.notify_all();
    }

    /// Fetches a block that was announced, with a turn for it.
    fn fetch(
        &self,
        mut state: MutexGuard<'_, State<J>>,
        name: BlockName,
        size: u64,
        flight: &Flight,
        fetch: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Content> {
        state.running += 1;
        let pushed_out = state.make_room(size, self.limit);
        drop(state);
        drop(pushed_out);
        let mut turn = Turn { cache: self, name, size, flight, content: None };
        let fetched = fetch().map(Arc::new);
        match &fetched {
            Ok(content) => turn.content = Some(Ok(Arc::clone(content))),
            Err(error) => turn.content = Some(Err((error.kind(), error.to_string()))),
        }
        drop(turn);
        fetched
    }

    fn state(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State<J>>) -> MutexGuard<'a, State<J>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl<J> State<J> {
    /// A block that is there, or who brings it.
    fn find(&mut self, name: BlockName) -> Option<std::result::Result<Content, Arc<Flight>>> {
        match self.blocks.get_mut(&name)? {
            Slot::Coming(flight) => Some(Err(Arc::clone(flight))),
            Slot::There { content, age } => {
                self.ages.remove(age);
                self.age += 1;
                *age = self.age;
                self.ages.insert(self.age, name);
                Some(Ok(Arc::clone(content)))
            }
        }
    }

    fn announce(&mut self, name: BlockName) -> Arc<Flight> {
        let flight = Arc::new(Flight::default());
        self.blocks.insert(name, Slot::Coming(Arc::clone(&flight)));
        flight
    }

    /// Takes room for a block that comes; returns what had to go for it.
    fn make_room(&mut self, size: u64, limit: u64) -> Vec<Slot> {
        let mut gone = Vec::new();
        while self.bytes.saturating_add(size) > limit {
            let Some((_, name)) = self.ages.pop_first() else { break };
            if let Some(Slot::There { content, age }) = self.blocks.remove(&name) {
                self.bytes -= content.len() as u64;
                gone.push(Slot::There { content, age });
            }
        }
        self.bytes += size;
        gone
    }

    /// A block has come, or will not.
    fn land(&mut self, name: BlockName, size: u64, content: Option<Content>) {
        self.running -= 1;
        self.bytes -= size;
        match content {
            None => {
                self.blocks.remove(&name);
            }
            Some(content) => {
                self.bytes += content.len() as u64;
                self.age += 1;
                self.ages.insert(self.age, name);
                self.blocks.insert(name, Slot::There { content, age: self.age });
            }
        }
    }
}

/// A fetch that runs. It ends when this is dropped, also if the thread panics: others wait for it.
struct Turn<'a, J> {
    cache: &'a Cache<J>,
    name: BlockName,
    size: u64,
    flight: &'a Flight,
    content: Option<std::result::Result<Content, (ErrorKind, String)>>,
}

impl<J> Drop for Turn<'_, J> {
    fn drop(&mut self) {
        let outcome = self.content.take().unwrap_or_else(|| {
            Err((ErrorKind::Io, "the thread that fetched the block has ended".to_owned()))
        });
        self.cache.state().land(self.name, self.size, outcome.as_ref().ok().cloned());
        *self.flight.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.flight.landed.notify_all();
        self.cache.changed.notify_all();
    }
}

impl Flight {
    fn wait(&self) -> Result<Content> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*outcome {
                Some(Ok(content)) => return Ok(Arc::clone(content)),
                Some(Err((kind, text))) => return Err(Error::new(*kind, text.clone())),
                None => {}
            }
            outcome = self.landed.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    fn name(number: u8) -> BlockName {
        BlockName::of(&[number])
    }

    fn block(number: u8) -> Result<Vec<u8>> {
        Ok(vec![number; 100])
    }

    fn failed() -> Result<Vec<u8>> {
        Err(Error::corrupt("damaged"))
    }

    #[test]
    fn what_was_needed_least_lately_goes() {
        let cache: Cache<()> = Cache::new(300, 1);
        let fetched = AtomicUsize::new(0);
        let get = |number| {
            let fetch = || {
                fetched.fetch_add(1, Ordering::SeqCst);
                block(number)
            };
            assert_eq!(*cache.get(name(number), 100, fetch).unwrap(), block(number).unwrap());
            fetched.load(Ordering::SeqCst)
        };
        assert_eq!([1, 2, 3, 1].map(get), [1, 2, 3, 3]);
        // The second one goes, then the fourth one.
        assert_eq!([4, 1, 3, 2, 1, 3, 4].map(get), [4, 4, 4, 5, 5, 5, 6]);
        assert_eq!(cache.state().bytes, 300);
        // Errors take no room, and are not kept.
        let error = cache.get(name(9), 100, failed).unwrap_err();
        assert_eq!((error.kind(), cache.state().bytes), (ErrorKind::Corrupt, 200));
        assert_eq!(get(9), 7);
        // A block that is larger than the cache comes all the same.
        assert_eq!(cache.get(name(8), 1000, || Ok(vec![8; 1000])).unwrap().len(), 1000);
        assert_eq!(cache.state().blocks.len(), 1);
    }

    /// Of several who need a block one fetches it, and all get what that one got.
    #[test]
    fn a_block_is_fetched_once() {
        for fails in [false, true] {
            let cache: Cache<()> = Cache::new(1 << 20, 4);
            let fetched = AtomicUsize::new(0);
            let begun = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        begun.wait();
                        let got = cache.get(name(1), 100, || {
                            fetched.fetch_add(1, Ordering::SeqCst);
                            // The map, the one who fetches it, and seven who wait.
                            let all = || {
                                matches!(&cache.state().blocks[&name(1)],
                                    Slot::Coming(flight) if Arc::strong_count(flight) == 9)
                            };
                            let late = Instant::now() + Duration::from_secs(20);
                            while !all() && Instant::now() < late {
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            if fails { failed() } else { block(1) }
                        });
                        let kind = got.map_err(|error| error.kind());
                        assert_eq!(kind.is_err(), fails, "{kind:?}");
                    });
                }
            });
            assert_eq!(fetched.load(Ordering::SeqCst), 1);
        }
    }

    #[test]
    fn a_panic_leaves_nobody_waiting() {
        let cache: Arc<Cache<()>> = Arc::new(Cache::new(1 << 20, 1));
        let other = Arc::clone(&cache);
        let thread = std::thread::spawn(move || other.get(name(1), 100, || panic!("a bug")));
        assert!(thread.join().is_err());
        assert_eq!(*cache.get(name(1), 100, || block(1)).unwrap(), block(1).unwrap());
    }

    #[test]
    fn few_at_once_and_what_is_needed_first() {
        let cache: Cache<u8> = Cache::new(1 << 20, 2);
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let begun = Mutex::new(Vec::new());
        let fetch = |number: u8| {
            begun.lock().unwrap().push(number);
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Both turns are taken until three wait for one.
            while cache.state().waiting < 3 && begun.lock().unwrap().len() < 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(20));
            running.fetch_sub(1, Ordering::SeqCst);
            block(number)
        };
        std::thread::scope(|scope| {
            cache.ahead((10..30).map(|number| (name(number), 100, number)));
            for _ in 0..4 {
                scope.spawn(|| cache.work(|number| fetch(*number)));
            }
            while begun.lock().unwrap().len() < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            for number in 0..3 {
                let (cache, fetch) = (&cache, &fetch);
                scope.spawn(move || cache.get(name(number), 100, || fetch(number)).unwrap());
            }
            while cache.state().ages.len() < 23 {
                std::thread::sleep(Duration::from_millis(1));
            }
            cache.end();
        });
        let (most, begun) = (most.into_inner(), begun.into_inner().unwrap());
        let last = begun.iter().rposition(|number| *number < 10).unwrap();
        assert!(last < 8, "blocks that nobody needed came first: {begun:?}");
        assert_eq!(most, 2);
    }
}
