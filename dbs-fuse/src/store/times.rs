//! When things changed, for programs that compare times: a time is another one whenever the content may
//! be, and else the same.

use super::kind::Kind;
use std::collections::HashMap;
use std::mem::Discriminant;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// How many are remembered before those of deleted volumes are looked for.
const KNOWN_MIN: usize = 64;

/// The times of what changes.
#[derive(Debug)]
pub struct Times {
    /// When the store was last written before all this.
    pub written: SystemTime,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    times: HashMap<Key, Seen>,
    /// How many there are when those are forgotten that are gone.
    limit: usize,
}

type Key = (Discriminant<Kind>, Option<[u8; 16]>);

#[derive(Debug)]
struct Seen {
    kind: Kind,
    version: u64,
    settled: bool,
    time: SystemTime,
}

impl Times {
    /// Of a store that was last written then.
    pub fn new(written: SystemTime) -> Self {
        Self { written, known: Mutex::default() }
    }

    /// When something became what it is: the moment at which it was first seen to be other than before.
    /// `version` tells its contents apart, and is 0 until it changes. None for what is settled and was
    /// never seen otherwise.
    pub fn of(&self, kind: &Kind, version: u64, settled: bool) -> Option<SystemTime> {
        let key = (std::mem::discriminant(kind), kind.observer().map(|image| image.uuid()));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = known.times.get_mut(&key) {
            // What is settled stays, whatever else of its volume changes.
            if seen.version != version && !(seen.settled && settled) {
                let later = seen.time + Duration::from_nanos(1);
                (seen.version, seen.time) = (version, SystemTime::now().max(later));
            }
            seen.settled = settled;
            return Some(seen.time);
        }
        if settled {
            return None;
        }
        let time = if version == 0 { self.written } else { SystemTime::now() };
        known.make_room();
        known.times.insert(key, Seen { kind: kind.clone(), version, settled, time });
        Some(time)
    }
}

impl Known {
    /// Forgets what was deleted, now and then: each time there are twice as many.
    fn make_room(&mut self) {
        if self.times.len() >= self.limit.max(KNOWN_MIN) {
            self.times.retain(|_, seen| seen.kind.observer().is_none_or(|o| o.size().is_ok()));
            self.limit = 2 * self.times.len();
        }
    }
}
