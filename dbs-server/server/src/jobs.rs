//! Long commands that a server runs: which, and how far they are.

use dbs_control::api::{Progress, Request};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A long command that runs, or the background work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The method of the command; `merge` for the background work, which merges and frees what was deleted.
    pub what: String,
    /// The volume that it works on, if it is one.
    pub volume: Option<String>,
    /// When it began; 0 where that is not known.
    pub since_ns: u64,
    /// How long ago that was.
    pub elapsed_ns: u64,
    /// Done so far.
    pub done: u64,
    /// Of that, done by earlier runs.
    pub earlier: u64,
    /// Known in all; may still grow.
    pub total: u64,
    /// What is counted: `bytes` or `steps`.
    pub unit: String,
}

impl Job {
    /// What is left of the background work.
    #[must_use]
    pub fn background(remaining: u64) -> Self {
        Self {
            what: "merge".to_owned(),
            volume: None,
            since_ns: 0,
            elapsed_ns: 0,
            done: 0,
            earlier: 0,
            total: remaining,
            unit: "steps".to_owned(),
        }
    }
}

/// The long commands that run now.
#[derive(Debug, Default)]
pub struct Jobs(Mutex<Running>);

#[derive(Debug, Default)]
struct Running {
    next: u64,
    jobs: BTreeMap<u64, (Instant, Job)>,
}

impl Jobs {
    /// Runs a command, which is listed from when it first tells of progress until it ends.
    pub fn watched<T>(
        &self,
        request: &Request,
        progress: &mut dyn FnMut(Progress) -> bool,
        run: impl FnOnce(&mut dyn FnMut(Progress) -> bool) -> T,
    ) -> T {
        // It waits, and does nothing.
        if matches!(request, Request::ClientList { .. }) {
            return run(progress);
        }
        let begun = Instant::now();
        let mut listed: Option<Listed<'_>> = None;
        run(&mut |now| {
            let listed = listed.get_or_insert_with(|| self.list_new(request, begun, now));
            listed.update(now.done, now.total);
            progress(now)
        })
    }

    /// Lists something long that is no command, and works on a volume, until what is returned is dropped. It counts bytes.
    #[must_use]
    pub fn begin(&self, what: &str, volume: &str) -> Listed<'_> {
        self.insert(Instant::now(), what.to_owned(), Some(volume.to_owned()), "bytes")
    }

    /// Those that run.
    #[must_use]
    pub fn list(&self) -> Vec<Job> {
        let elapsed = |begun: &Instant| u64::try_from(begun.elapsed().as_nanos());
        let now = |(begun, job): &(Instant, Job)| Job {
            elapsed_ns: elapsed(begun).unwrap_or(u64::MAX),
            ..job.clone()
        };
        self.running().jobs.values().map(now).collect()
    }

    fn list_new(&self, request: &Request, begun: Instant, progress: Progress) -> Listed<'_> {
        // As it is on the wire, whose names are stable.
        let wire = serde_json::to_value(request).unwrap_or_default();
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        let bytes = matches!(request, Request::Scrub { .. } | Request::VolumeRelease { .. });
        let unit = if bytes { "bytes" } else { "steps" };
        let what = text(&wire["method"]).unwrap_or_default();
        let listed = self.insert(begun, what, text(&wire["params"]["volume"]), unit);
        if let Some((_, job)) = self.running().jobs.get_mut(&listed.number) {
            job.earlier = progress.done;
        }
        listed
    }

    fn insert(
        &self,
        begun: Instant,
        what: String,
        volume: Option<String>,
        unit: &str,
    ) -> Listed<'_> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since = now.saturating_sub(begun.elapsed());
        let since_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let unit = unit.to_owned();
        let job =
            Job { what, volume, since_ns, elapsed_ns: 0, done: 0, earlier: 0, total: 0, unit };
        let mut running = self.running();
        running.next += 1;
        let number = running.next;
        running.jobs.insert(number, (begun, job));
        Listed { jobs: self, number }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes what runs off the list when it ends, in whatever way.
pub struct Listed<'a> {
    jobs: &'a Jobs,
    number: u64,
}

impl Listed<'_> {
    /// Says how far it is.
    pub fn update(&self, done: u64, total: u64) {
        if let Some((_, job)) = self.jobs.running().jobs.get_mut(&self.number) {
            (job.done, job.total) = (done, total);
        }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.jobs.running().jobs.remove(&self.number);
    }
}
