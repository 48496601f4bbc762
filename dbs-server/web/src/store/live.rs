//! What changes all the time: the counts of `dbs top`, of which a page is told what is new.
//!
//! They are taken also while nobody looks, for the graphs. However many pages ask, and however many volumes there are,
//! the server is asked for at most a hundredth of the time of one core.

use crate::history::{History, Sample, rate};
use dbs_core::info::{StoreInfo, VolumeIo};
use dbs_server::asked::Asked;
use dbs_server::clients::Client;
use dbs_server::jobs::Job;
use dbs_server::top::{Top, VolumeLoad};
use dbs_ublk::Attached;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What was asked less long ago is not asked again.
const REST_MIN: Duration = Duration::from_millis(900);
/// So many times what it took to ask is the least rest before the next time.
const REST_TIMES: u32 = 100;
/// Volumes that are gone, and of which pages are told: a page that missed one is told everything.
const REMOVED_MAX: usize = 10_000;

/// What a page is told.
#[derive(Debug, Serialize)]
pub struct Update {
    /// What the page says the next time.
    pub cursor: String,
    /// `volumes` are all there are, and not only those that have changed.
    pub all: bool,
    /// Whether the page may change something.
    pub admin: bool,
    /// The server's process.
    pub pid: u32,
    /// When the server started.
    pub started_ns: u64,
    /// Nanoseconds since then, when this was counted.
    pub clock_ns: u64,
    /// The store.
    pub store: StoreInfo,
    /// Volumes of which something has changed, as in a `Top`.
    pub volumes: Vec<VolumeLoad>,
    /// The uuids of volumes that are gone.
    pub removed: Vec<String>,
    /// Who uses the store.
    pub clients: Vec<Client>,
    /// The block devices among these.
    pub devices: Vec<Attached>,
    /// What runs.
    pub jobs: Vec<Job>,
    /// What all volumes together did in each second: bytes read and written, and requests for that.
    pub samples: Vec<Sample<4>>,
}

/// What was counted last, and when each volume changed.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<Past>);

#[derive(Debug, Default)]
struct Past {
    /// Goes up each time that the server is asked.
    turn: u64,
    asked: Option<(Instant, Duration)>,
    last: Option<Top>,
    volumes: HashMap<String, (u64, VolumeLoad)>,
    /// Volumes that are gone, and in which turn they were missed.
    removed: VecDeque<(u64, String)>,
    /// What was missed before, or in this turn, may not be in `removed`.
    forgotten: u64,
    history: History<4>,
}

impl Live {
    /// What is new to a page that was told this `cursor`, or everything.
    pub(super) fn update(
        &self,
        asked: &dyn Asked,
        cursor: Option<&str>,
        admin: bool,
    ) -> Option<Update> {
        self.taken(asked).since(cursor, admin)
    }

    /// Takes the counts, if it is time to.
    pub(super) fn tick(&self, asked: &dyn Asked) {
        drop(self.taken(asked));
    }

    fn taken(&self, asked: &dyn Asked) -> MutexGuard<'_, Past> {
        let mut past = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if past.is_due() {
            let begun = Instant::now();
            past.take(asked.top());
            past.asked = Some((Instant::now(), begun.elapsed()));
        }
        past
    }
}

/// What was done between two counts of a volume.
fn between(before: &VolumeIo, now: &VolumeIo) -> [u64; 4] {
    [
        now.read_bytes.saturating_sub(before.read_bytes),
        now.written_bytes.saturating_sub(before.written_bytes),
        now.reads.saturating_sub(before.reads),
        now.writes.saturating_sub(before.writes),
    ]
}

impl Past {
    fn is_due(&self) -> bool {
        self.asked.is_none_or(|(at, took)| at.elapsed() >= REST_MIN.max(took * REST_TIMES))
    }

    fn take(&mut self, mut top: Top) {
        self.turn += 1;
        let turn = self.turn;
        let volumes = std::mem::take(&mut top.volumes);
        let mut before = std::mem::take(&mut self.volumes);
        let mut done = [0_u64; 4];
        for load in volumes {
            let known = before.remove(&load.uuid);
            if let Some((_, known)) = &known {
                let more = between(&known.io, &load.io);
                done.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
            }
            let known = known.filter(|(_, known)| *known == load);
            let at = known.map_or(turn, |(at, _)| at);
            self.volumes.insert(load.uuid.clone(), (at, load));
        }
        if let Some(last) = &self.last {
            let over = Duration::from_nanos(top.clock_ns.saturating_sub(last.clock_ns));
            let at = Duration::from_nanos(top.clock_ns);
            self.history.push(turn, at, done.map(|count| rate(count, over)));
        }
        self.removed.extend(before.into_keys().map(|uuid| (turn, uuid)));
        while self.removed.len() > REMOVED_MAX {
            self.forgotten = self.removed.pop_front().map_or(turn, |(turn, _)| turn);
        }
        for load in top.clients.iter_mut().filter_map(|client| client.load.as_mut()) {
            // Long, and no page shows them.
            (load.read_latency, load.write_latency) = (Vec::new(), Vec::new());
        }
        self.last = Some(top);
    }

    fn since(&self, cursor: Option<&str>, admin: bool) -> Option<Update> {
        let last = self.last.as_ref()?;
        // Of this server: another one has other turns.
        let server = format!("{}-{}-", last.started_ns, last.pid);
        let told = cursor.and_then(|cursor| cursor.strip_prefix(&server)?.parse::<u64>().ok());
        let told = told.filter(|told| (self.forgotten..=self.turn).contains(told));
        let after = told.unwrap_or(0);
        let changed = self.volumes.values().filter(|(at, _)| *at > after);
        let removed = self.removed.iter().filter(|(at, _)| told.is_some() && *at > after);
        Some(Update {
            cursor: format!("{server}{}", self.turn),
            all: told.is_none(),
            admin,
            pid: last.pid,
            started_ns: last.started_ns,
            clock_ns: last.clock_ns,
            store: last.store.clone(),
            volumes: changed.map(|(_, load)| load.clone()).collect(),
            removed: removed.map(|(_, uuid)| uuid.clone()).collect(),
            clients: last.clients.clone(),
            devices: last.devices.clone(),
            jobs: last.jobs.clone(),
            samples: self.history.since(after),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::info::VolumeIo;
    use serde_json::json;

    fn load(uuid: &str, snapshots: u64) -> VolumeLoad {
        VolumeLoad {
            name: format!("name of {uuid}"),
            uuid: uuid.to_owned(),
            size: 1,
            snapshots,
            depth: 1,
            open: false,
            rebuilding: false,
            encryption: None,
            io: VolumeIo::default(),
        }
    }

    fn top(volumes: Vec<VolumeLoad>) -> Top {
        let store = json!({
            "format": "2.0.0", "uuid": "u", "size": 0, "max_size": 0, "extent_size": 0, "extents_total": 0,
            "extents_free": 0, "extents_pending": 0, "allocated": 0, "metadata": 0, "volumes": 0, "volumes_max": 0,
            "snapshots": 0, "snapshots_max": 0, "snapshots_deleting": 0, "sequence": 0, "read_only": false,
            "driver": "sim", "tail": false, "warnings": [],
        });
        Top {
            pid: 7,
            started_ns: 8,
            clock_ns: 9,
            store: serde_json::from_value(store).unwrap(),
            volumes,
            clients: Vec::new(),
            devices: Vec::new(),
            jobs: Vec::new(),
        }
    }

    fn names(update: &Update) -> Vec<&str> {
        let mut names: Vec<_> = update.volumes.iter().map(|load| load.uuid.as_str()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn a_page_is_told_what_is_new_to_it() {
        let mut past = Past::default();
        assert!(past.since(None, false).is_none());
        past.take(top(vec![load("a", 0), load("b", 0), load("c", 0)]));
        let first = past.since(None, true).unwrap();
        assert!(first.all && first.admin);
        assert_eq!(names(&first), ["a", "b", "c"]);
        assert!(past.since(Some(&first.cursor), false).unwrap().volumes.is_empty());

        past.take(top(vec![load("a", 0), load("b", 1), load("d", 0)]));
        let second = past.since(Some(&first.cursor), false).unwrap();
        assert!(!second.all && !second.admin);
        assert_eq!(names(&second), ["b", "d"]);
        assert_eq!(second.removed, ["c"]);
        past.take(top(vec![load("b", 1), load("d", 0)]));
        let third = past.since(Some(&second.cursor), false).unwrap();
        assert_eq!(
            (names(&third), third.removed.as_slice()),
            (vec![], ["a".to_owned()].as_slice())
        );
        // Who missed a turn is told of both.
        let late = past.since(Some(&first.cursor), false).unwrap();
        assert_eq!((names(&late), late.removed.len()), (vec!["b", "d"], 2));
    }

    #[test]
    fn a_cursor_of_another_server_or_of_long_ago_gets_everything() {
        let mut past = Past::default();
        past.take(top(vec![load("a", 0)]));
        for cursor in ["", "1-7-1", "8-7-2", "8-7-x", "8-7-", "8-7--1", "x"] {
            assert!(past.since(Some(cursor), false).unwrap().all, "{cursor}");
        }
        assert!(!past.since(Some("8-7-1"), false).unwrap().all);
        past.take(top((0..=REMOVED_MAX).map(|at| load(&at.to_string(), 0)).collect()));
        past.take(top(vec![load("a", 0)]));
        assert!(past.since(Some("8-7-2"), false).unwrap().all, "some that went are forgotten");
        assert!(!past.since(Some("8-7-3"), false).unwrap().all);
    }

    /// Also of what was done before a page was opened, and nothing that a volume did before it was seen first.
    #[test]
    fn the_history_is_what_all_volumes_did_in_each_second() {
        let at = |seconds: u64, writes: &[(&str, u64)]| {
            let volumes = writes.iter().map(|(uuid, writes)| {
                let mut load = load(uuid, 0);
                (load.io.writes, load.io.written_bytes) = (*writes, 4096 * writes);
                load
            });
            Top { clock_ns: seconds * 1_000_000_000, ..top(volumes.collect()) }
        };
        let mut past = Past::default();
        past.take(at(1, &[("a", 100), ("b", 7)]));
        past.take(at(3, &[("a", 120), ("b", 9), ("new", 1000)]));
        past.take(at(4, &[("a", 120), ("new", 1003)]));
        let all = past.since(None, false).unwrap();
        let rows = json!([[3000, 0, 45_056, 0, 11], [4000, 0, 12_288, 0, 3]]);
        assert_eq!(serde_json::to_value(&all.samples).unwrap(), rows);
        let last = past.since(Some("8-7-2"), false).unwrap();
        assert_eq!(serde_json::to_value(&last.samples).unwrap(), json!([rows[1]]));
    }

    #[test]
    fn the_server_is_asked_for_a_hundredth_of_the_time() {
        let mut past = Past::default();
        assert!(past.is_due());
        past.asked = Some((Instant::now(), Duration::from_secs(100)));
        assert!(!past.is_due());
        let then = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
        past.asked = Some((then, Duration::from_millis(99)));
        assert!(past.is_due());
        past.asked = Some((then, Duration::from_secs(1)));
        assert!(!past.is_due());
    }
}
