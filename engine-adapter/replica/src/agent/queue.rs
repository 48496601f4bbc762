//! The files of a rebuild: who fetches which next, and how often one is tried.

use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_wire::remote::Address;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// How often a file is tried.
const TRIES: u32 = 3;
/// The rest between two tries at most, as a multiple of the first.
const REST_MAX: u32 = 6;

/// A file to fetch.
#[derive(Debug, Clone)]
pub struct Item {
    /// Its name at the source.
    pub from: String,
    /// Its name here.
    pub to: String,
    /// Its part of the whole: bytes, 0 for descriptions.
    pub weight: u64,
    /// How far it is.
    pub progress: Progress,
    tries: u32,
    due: Instant,
    /// Sources at which its data is damaged, and what the last of them said.
    damaged: Vec<Address>,
    damage: Option<String>,
}

/// How far a file is.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    /// Bytes in all, once known.
    pub whole: Arc<AtomicU64>,
    /// Bytes dealt with.
    pub passed: Arc<AtomicU64>,
}

impl Item {
    /// A file that has not been tried.
    #[must_use]
    pub fn new(from: &str, to: &str, weight: u64) -> Self {
        Self {
            from: from.to_owned(),
            to: to.to_owned(),
            weight,
            progress: Progress::default(),
            tries: 0,
            due: Instant::now(),
            damaged: Vec::new(),
            damage: None,
        }
    }

    /// How much of its weight is done.
    #[must_use]
    pub fn done(&self) -> u64 {
        let whole = self.progress.whole.load(Ordering::Relaxed);
        let passed = self.progress.passed.load(Ordering::Relaxed).min(whole);
        let done = u128::from(self.weight) * u128::from(passed);
        done.checked_div(whole.into()).unwrap_or(0) as u64
    }
}

/// The files that are still to be fetched, from any of several sources.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    changed: Notify,
    rest: Duration,
}

#[derive(Debug)]
struct State {
    waiting: Vec<Item>,
    running: usize,
    failed: Option<Error>,
    /// Those that are still at it.
    sources: Vec<Address>,
}

impl State {
    /// Gives up if there is a file that is damaged wherever it could still come from.
    fn look_for_sources(&mut self) {
        let Self { waiting, failed, sources, .. } = self;
        let lost = |item: &&Item| sources.iter().all(|source| item.damaged.contains(source));
        let lost = waiting.iter().filter(|item| item.damage.is_some()).find(lost);
        if let Some(Item { to, damage: Some(damage), .. }) = lost {
            let text =
                format!("file {to} failed to sync, as it is damaged at its source: {damage}");
            failed.get_or_insert(Error::damaged(text));
        }
    }
}

impl Queue {
    /// Of these files, from these sources; `rest` is the pause before a second try.
    #[must_use]
    pub fn new(items: Vec<Item>, sources: Vec<Address>, rest: Duration) -> Self {
        let state = State { waiting: items, running: 0, failed: None, sources };
        Self { state: Mutex::new(state), changed: Notify::new(), rest }
    }

    /// Whether there are several sources still.
    #[must_use]
    pub fn has_several_sources(&self) -> bool {
        self.state().sources.len() > 1
    }

    /// A source is not at it any more.
    pub fn leave(&self, source: &Address) {
        let mut state = self.state();
        state.sources.retain(|left| left != source);
        if !state.sources.is_empty() {
            state.look_for_sources();
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// The next file for this source, when there is one; `None` when all are done or one has failed for
    /// good.
    pub async fn next(&self, source: &Address) -> Option<Item> {
        loop {
            let changed = self.changed.notified();
            let due = {
                let mut state = self.state();
                if state.failed.is_some() || (state.waiting.is_empty() && state.running == 0) {
                    return None;
                }
                let may = |at: &usize| !state.waiting[*at].damaged.contains(source);
                let all = (0..state.waiting.len()).filter(may);
                let first = all.min_by_key(|at| state.waiting[*at].due);
                match first.map(|at| (at, state.waiting[at].due)) {
                    Some((at, due)) if due <= Instant::now() => {
                        state.running += 1;
                        return Some(state.waiting.remove(at));
                    }
                    other => other.map(|(_, due)| due),
                }
            };
            match due {
                Some(due) => tokio::select! {
                    () = sleep_until(due) => {}
                    () = changed => {}
                },
                // Somebody else is at the last one, and may fail; or it is for others alone.
                None => changed.await,
            }
        }
    }

    /// Takes note of how fetching a file went.
    pub fn ended(&self, mut item: Item, from: &Address, outcome: Result<()>) {
        let mut state = self.state();
        state.running -= 1;
        if let Err(error) = outcome {
            let damaged = error.kind() == ErrorKind::Damaged;
            item.tries += u32::from(!damaged);
            let Item { to, tries, .. } = &item;
            log::warn(
                "file-failed",
                &[("file", to), ("from", from), ("try", tries), ("error", &error)],
            );
            item.progress.passed.store(0, Ordering::Relaxed);
            if damaged {
                // Another time it is no better there, but it may be elsewhere.
                item.damaged.push(from.clone());
                item.damage = Some(error.to_string());
                state.waiting.push(item);
                state.look_for_sources();
            } else if *tries >= TRIES {
                let text = format!("file {to} failed to sync {TRIES} times, the last from {from}");
                state.failed.get_or_insert(error.context(text));
            } else {
                item.due = Instant::now() + self.rest * 2_u32.pow(tries - 1).min(REST_MAX);
                state.waiting.push(item);
            }
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// How it all went, when nobody is at it any more.
    ///
    /// # Errors
    /// Of the file that failed; if files are left because all sources have gone.
    pub fn outcome(&self) -> Result<()> {
        let mut state = self.state();
        state.look_for_sources();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        if state.waiting.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = state.waiting.iter().map(|item| item.to.as_str()).take(5).collect();
        Err(Error::new(
            ErrorKind::Io,
            format!("{} files were not synced: {} ...", state.waiting.len(), names.join(", ")),
        ))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn source() -> Address {
        Address::parse("h:1").unwrap()
    }

    #[test]
    fn each_file_is_tried_three_times_and_then_all_ends() {
        runtime().block_on(async {
            let queue =
                Queue::new(vec![Item::new("a", "a", 9)], vec![source()], Duration::from_millis(5));
            for attempt in 1..=3 {
                let item = queue.next(&source()).await.unwrap();
                item.progress.whole.store(10, Ordering::Relaxed);
                item.progress.passed.store(5, Ordering::Relaxed);
                assert_eq!(item.done(), 4);
                let text = format!("trouble {attempt}");
                queue.ended(item, &source(), Err(Error::invalid(text)));
            }
            assert!(queue.next(&source()).await.is_none());
            let error = queue.outcome().unwrap_err().to_string();
            assert!(error.contains("file a failed") && error.contains("trouble 3"), "{error}");
        });
    }

    #[test]
    fn who_is_idle_takes_over_what_another_failed_at() {
        runtime().block_on(async {
            let items = vec![Item::new("a", "a", 1)];
            let queue = Arc::new(Queue::new(items, vec![source()], Duration::from_millis(20)));
            let first = queue.next(&source()).await.unwrap();
            let other = tokio::spawn({
                let queue = Arc::clone(&queue);
                async move {
                    let item = queue.next(&source()).await.unwrap();
                    queue.ended(item, &source(), Ok(()));
                    assert!(queue.next(&source()).await.is_none());
                }
            });
            tokio::task::yield_now().await;
            queue.ended(first, &source(), Err(Error::invalid("no")));
            other.await.unwrap();
            queue.outcome().unwrap();
            assert!(queue.next(&source()).await.is_none());
        });
    }

    #[test]
    fn what_is_damaged_at_one_source_is_left_to_the_others() {
        runtime().block_on(async {
            let other = Address::parse("other:1").unwrap();
            let sources = vec![source(), other.clone()];
            let items = vec![Item::new("a", "a", 1), Item::new("b", "b", 1)];
            let queue = Queue::new(items, sources, Duration::from_secs(3600));
            let damaged = |text: &str| Err(Error::damaged(text));
            let first = queue.next(&source()).await.unwrap();
            queue.ended(first, &source(), damaged("byte 1"));
            let second = queue.next(&source()).await.unwrap();
            assert_eq!(second.to, "b", "not once more what is damaged there");
            queue.ended(second, &source(), Ok(()));
            let again = queue.next(&other).await.unwrap();
            assert_eq!(again.to, "a");
            queue.ended(again, &other, damaged("byte 2"));
            assert!(queue.next(&source()).await.is_none() && queue.next(&other).await.is_none());
            let error = queue.outcome().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged);
            assert!(error.to_string().contains("byte 2"), "{error}");
        });
    }

    #[test]
    fn who_has_a_file_damaged_does_not_wait_for_those_who_left() {
        runtime().block_on(async {
            let other = Address::parse("other:1").unwrap();
            let sources = vec![source(), other.clone()];
            let items = vec![Item::new("a", "a", 1)];
            let queue = Arc::new(Queue::new(items, sources, Duration::from_millis(1)));
            let first = queue.next(&source()).await.unwrap();
            queue.ended(first, &source(), Err(Error::damaged("byte 1")));
            let waiting = tokio::spawn({
                let queue = Arc::clone(&queue);
                async move { queue.next(&source()).await.is_none() }
            });
            tokio::task::yield_now().await;
            queue.leave(&other);
            assert!(waiting.await.unwrap());
            assert_eq!(queue.outcome().unwrap_err().kind(), ErrorKind::Damaged);
        });
    }

    #[test]
    fn files_that_nobody_fetched_are_named() {
        let queue = Queue::new(vec![Item::new("a", "b", 1)], vec![], Duration::ZERO);
        assert!(queue.outcome().unwrap_err().to_string().contains("1 files were not synced: b"));
    }
}
