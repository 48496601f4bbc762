//! Which of its long jobs an agent is at, how far they are, and how the last ones ended.
//!
//! A purge and a rebuild exclude each other; of each kind of job there is one at a time.

use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::proto::ptypes::{
    ReplicaRebuildStatusResponse, SnapshotCloneStatusResponse, SnapshotPurgeStatusResponse,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// State of a job that is under way.
pub const IN_PROGRESS: &str = "in_progress";
/// State of a job that has ended well.
pub const COMPLETE: &str = "complete";
/// State of a job that has failed.
pub const ERROR: &str = "error";

/// The kinds of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Removing snapshots.
    Purge,
    /// Becoming a copy of other replicas.
    Rebuild,
    /// Becoming a clone of another volume's snapshot.
    Clone,
}

/// A job of one kind: the present or the last one.
#[derive(Debug, Clone, Default)]
struct Status {
    running: bool,
    /// Empty before the first.
    state: &'static str,
    error: String,
    /// Percent.
    progress: i32,
    /// Addresses of other replicas that take part.
    from: Vec<String>,
    snapshot: String,
}

#[derive(Debug, Default)]
struct All {
    purge: Status,
    rebuild: Status,
    clone: Status,
}

impl All {
    fn of(&mut self, kind: Kind) -> &mut Status {
        match kind {
            Kind::Purge => &mut self.purge,
            Kind::Rebuild => &mut self.rebuild,
            Kind::Clone => &mut self.clone,
        }
    }
}

/// All jobs of an agent.
#[derive(Debug, Clone, Default)]
pub struct Jobs {
    all: Arc<Mutex<All>>,
}

/// A job under way. Dropped without [`Job::end`], it has failed.
#[derive(Debug)]
pub struct Job {
    kind: Kind,
    jobs: Jobs,
    ended: bool,
}

impl Jobs {
    /// Begins a job; `from` names replicas that take part, `snapshot` what it is about.
    ///
    /// # Errors
    /// `Busy`, with texts that upstream's manager knows.
    pub fn begin(&self, kind: Kind, from: Vec<String>, snapshot: &str) -> Result<Job> {
        let mut all = self.all();
        let busy = |text: String| Err(Error::new(ErrorKind::Busy, text));
        match kind {
            Kind::Purge if all.purge.running => {
                return busy("replica is already purging snapshots".to_owned());
            }
            Kind::Purge if all.rebuild.running => {
                return busy("replica is rebuilding, snapshots cannot be purged".to_owned());
            }
            Kind::Rebuild if all.purge.running => {
                return busy("replica is purging snapshots".to_owned());
            }
            Kind::Rebuild if all.rebuild.running => {
                return busy("replica is already rebuilding".to_owned());
            }
            Kind::Clone if all.clone.running => {
                let Status { snapshot, from, .. } = &all.clone;
                return busy(format!(
                    "clone already in progress: replica is cloning snapshot {snapshot} from replica \
                     address {}",
                    from.join(", ")
                ));
            }
            Kind::Purge | Kind::Rebuild | Kind::Clone => {}
        }
        let snapshot = snapshot.to_owned();
        let begun =
            Status { running: true, state: IN_PROGRESS, from, snapshot, ..Status::default() };
        *all.of(kind) = begun;
        drop(all);
        Ok(Job { kind, jobs: self.clone(), ended: false })
    }

    /// Whether there is such a job at the moment.
    #[must_use]
    pub fn is_running(&self, kind: Kind) -> bool {
        self.all().of(kind).running
    }

    /// Forgets how jobs have ended.
    pub fn reset(&self) {
        let mut all = self.all();
        for kind in [Kind::Purge, Kind::Rebuild, Kind::Clone] {
            let status = all.of(kind);
            if !status.running {
                *status = Status::default();
            }
        }
    }

    /// As asked for by `SnapshotPurgeStatus`.
    #[must_use]
    pub fn purge(&self) -> SnapshotPurgeStatusResponse {
        let Status { running, state, error, progress, .. } = self.all().purge.clone();
        SnapshotPurgeStatusResponse { is_purging: running, error, progress, state: state.into() }
    }

    /// As asked for by `ReplicaRebuildStatus`.
    #[must_use]
    pub fn rebuild(&self) -> ReplicaRebuildStatusResponse {
        let Status { running, state, error, progress, from, .. } = self.all().rebuild.clone();
        ReplicaRebuildStatusResponse {
            is_rebuilding: running,
            error,
            progress,
            state: state.into(),
            from_replica_address: from.first().cloned().unwrap_or_default(),
            from_replica_address_list: from,
        }
    }

    /// As asked for by `SnapshotCloneStatus`.
    #[must_use]
    pub fn clone_status(&self) -> SnapshotCloneStatusResponse {
        let Status { running, state, error, progress, from, snapshot } = self.all().clone.clone();
        SnapshotCloneStatusResponse {
            is_cloning: running,
            error,
            progress,
            state: state.into(),
            from_replica_address: from.into_iter().next().unwrap_or_default(),
            snapshot_name: snapshot,
        }
    }

    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    /// Says how far it is. It never seems to go back, nor to be over before it is.
    pub fn progress(&self, done: u64, total: u64) {
        let percent =
            (u128::from(done) * 100).checked_div(total.into()).unwrap_or(0).min(99) as i32;
        let mut all = self.jobs.all();
        let status = all.of(self.kind);
        status.progress = status.progress.max(percent);
    }

    /// Ends it.
    pub fn end(mut self, outcome: &Result<()>) {
        self.ended = true;
        self.finish(outcome.as_ref().err().map(ToString::to_string));
    }

    fn finish(&self, error: Option<String>) {
        let mut all = self.jobs.all();
        let status = all.of(self.kind);
        status.running = false;
        match error {
            None => (status.state, status.progress) = (COMPLETE, 100),
            Some(error) => (status.state, status.error) = (ERROR, error),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.ended {
            self.finish(Some("the job ended abnormally".to_owned()));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn jobs_exclude_each_other_and_are_remembered() {
        let jobs = Jobs::default();
        assert_eq!(jobs.purge(), SnapshotPurgeStatusResponse::default());
        let purge = jobs.begin(Kind::Purge, vec![], "").unwrap();
        let refused = |kind| jobs.begin(kind, vec![], "").unwrap_err().to_string();
        assert_eq!(refused(Kind::Purge), "replica is already purging snapshots");
        assert_eq!(refused(Kind::Rebuild), "replica is purging snapshots");
        purge.progress(1, 3);
        purge.progress(1, 4);
        assert_eq!((jobs.purge().progress, jobs.purge().is_purging), (33, true));
        purge.progress(4, 4);
        assert_eq!(jobs.purge().progress, 99);
        purge.end(&Ok(()));
        assert_eq!((jobs.purge().progress, jobs.purge().state.as_str()), (100, COMPLETE));

        let rebuild = jobs.begin(Kind::Rebuild, vec!["a".into(), "b".into()], "").unwrap();
        assert_eq!(refused(Kind::Rebuild), "replica is already rebuilding");
        assert!(refused(Kind::Purge).contains("replica is rebuilding"));
        let clone = jobs.begin(Kind::Clone, vec!["tcp://a:1".into()], "s").unwrap();
        assert!(refused(Kind::Clone).contains("already in progress"));
        jobs.reset();
        assert!(jobs.rebuild().is_rebuilding && jobs.clone_status().is_cloning);
        assert_eq!(jobs.purge().state, "");
        drop(rebuild);
        let status = jobs.rebuild();
        assert_eq!((status.is_rebuilding, status.state.as_str()), (false, ERROR));
        assert_eq!(status.from_replica_address_list, ["a", "b"]);
        clone.end(&Err(Error::invalid("no")));
        let status = jobs.clone_status();
        assert_eq!((status.error.as_str(), status.snapshot_name.as_str()), ("no", "s"));
        jobs.reset();
        assert_eq!(jobs.clone_status(), SnapshotCloneStatusResponse::default());
    }
}
