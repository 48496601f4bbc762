//! The test of the tests: each planted bug must be found.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_core::sabotage::Bug;
use dbs_sim::bugs::{Way, find};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// A bug is planted in the thread that looks for it.
const THREADS: usize = 2;

#[test]
fn every_planted_bug_is_found() {
    std::panic::set_hook(Box::new(|_| {}));
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    let look = || {
        while let Some(&bug) = Bug::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            // The quickest first. What moved since planted.md was made takes long.
            match find(bug, &[Way::Known, Way::Calm, Way::Histories, Way::Thresholds]) {
                Some(found) => println!("{bug:?}: {}: {}", found.by, found.message),
                None => missed.lock().unwrap().push(bug),
            }
        }
    };
    thread::scope(|scope| {
        let looking: Vec<_> = (0..THREADS).map(|_| scope.spawn(look)).collect();
        for thread in looking {
            thread.join().unwrap();
        }
    });
    assert!(Bug::ALL.len() >= 10);
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
