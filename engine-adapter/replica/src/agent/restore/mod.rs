//! Restore: becoming what a backup holds.
//!
//! A backup is restored to a layer of its own, which nobody sees (`Incoming::begin_restore`), and which takes the place
//! of the snapshot in one step when it is complete: on an empty ground, or on the snapshot that holds the backup restored
//! last, with the differences to it. Whenever it is cut off, the volume is what it was, or what the backup holds.

mod marker;
mod target;

use super::Agent;
use super::backup::place;
use super::jobs::{COMPLETE, ERROR, IN_PROGRESS, Kind};
use super::uses::interrupted;
use dbs_backup::config::{BackupConfig, VolumeConfig};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Onto, Restoration, Target, Work};
use dbs_core::info::Labels;
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_wire::names;
use longhorn_wire::proto::ptypes::{BackupRestoreRequest, RestoreStatusResponse};
use marker::Marker;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;
use target::Staged;
use tokio::sync::oneshot;

/// What the blocks are of the whole.
const BLOCKS_PERCENT: u64 = 95;
/// How the error begins of a backup store in which somebody deletes.
const LOCKED: &str = "failed to acquire lock";

/// The restore of an agent: the present or the last one.
#[derive(Default)]
pub struct Restores {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    status: Status,
    /// One is beginning or under way.
    running: bool,
    /// It has begun: `status` is of it.
    begun: bool,
    target: Option<Arc<Staged>>,
}

/// As upstream's agent keeps it, in memory: the first restore of a process is a full one.
#[derive(Debug, Clone, Default)]
struct Status {
    /// Empty before the first.
    state: &'static str,
    progress: i32,
    error: String,
    url: String,
    /// The disk that is restored.
    disk: String,
    last_restored: String,
    current: String,
    /// The backup that the volume holds, or is to hold.
    origin: Option<Origin>,
}

/// What tells a backup from another one of its name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Origin {
    /// The backup store, with the volume and the backup.
    url: Url,
    created: String,
    digest: u64,
    /// The backing image that is where the backup has nothing. If none is named, there are zeros.
    image: String,
}

impl Origin {
    fn new(url: &Url, volume: &VolumeConfig, backup: &BackupConfig) -> Self {
        let url = Url { backup: Some(backup.name.clone()), ..url.clone() };
        let (created, image) = (backup.created_time.clone(), volume.backing_image_name.clone());
        Self { url, created, digest: backup.digest(), image }
    }
}

/// A restore that is known to be possible.
struct Plan<'a> {
    restoration: Restoration<'a>,
    origin: Origin,
    /// The backup to which only the differences are restored.
    base: Option<String>,
    /// The replica has a backing file.
    on_file: bool,
    marker: Marker,
}

impl Agent {
    /// Begins a restore, which goes on in the background.
    ///
    /// # Errors
    /// With upstream's texts, which its manager knows. Nothing has changed then, and the status is that of before.
    pub(super) async fn backup_restore(
        self: &Arc<Self>,
        request: BackupRestoreRequest,
    ) -> Result<()> {
        if request.snapshot_disk_name.is_empty() {
            return Err(Error::invalid("empty snapshot disk name for the restore"));
        }
        if request.backup.is_empty() {
            return Err(Error::invalid("empty backup URL for the restore"));
        }
        let (me, (begun, told)) = (Arc::clone(self), oneshot::channel());
        // No task of the runtime, which would wait for it at its end.
        let started = thread::Builder::new().name("restore".to_owned()).spawn(move || {
            let mut begun = Some(begun);
            let outcome = me.restore(&request, &mut || {
                // Who asked may be gone.
                begun.take().map(|begun| begun.send(Ok(())));
            });
            if let (Some(begun), Err(error)) = (begun, outcome) {
                let _ = begun.send(Err(error));
            }
        });
        started.map_err(|e| Error::io(e, "starting a thread"))?;
        told.await.map_err(|_| Error::new(ErrorKind::Io, "the restore ended abnormally"))?
    }

    /// Restores, to the end.
    fn restore(&self, request: &BackupRestoreRequest, begun: &mut dyn FnMut()) -> Result<()> {
        let url = Url::parse(&request.backup)?;
        let backup = url.need_backup()?.1;
        let starting = |error: Error| error.context("error starting backup restore");
        let before = self.restores.start(backup).map_err(starting)?;
        let turn = Turn { agent: self, ended: false };
        let started = self.check_idle().and_then(|()| place::open(&url, &request.credential));
        let store = started.map_err(starting)?;
        let disk = &request.snapshot_disk_name;
        let initiated = self.plan(&store, &url, disk, &before).and_then(|plan| {
            let target = Arc::new(Staged::new(&self.replica, disk).inspect_err(|_| {
                plan.marker.remove();
            })?);
            Ok((plan, target))
        });
        let (plan, target) = initiated.map_err(|error| {
            let kind = if before.last_restored.is_empty() { "full" } else { "incremental" };
            starting(error.context(format!("error initiating {kind} backup restore")))
        })?;
        self.restores.begin(request, backup, &plan, Arc::clone(&target));
        begun();
        let workers = usize::try_from(request.concurrent_limit).unwrap_or(1).max(1);
        let outcome = self.carry_out(&plan, &target, workers, disk);
        drop(target);
        self.finish(&url, plan, outcome.map_err(|error| told(error, &url)), turn);
        Ok(())
    }

    /// Whether nothing else changes the replica's snapshots.
    fn check_idle(&self) -> Result<()> {
        if self.replica.get()?.rebuilding {
            return Err(Error::busy("cannot do restore for normal rebuilding replica"));
        }
        for (kind, what) in [
            (Kind::Purge, "purging snapshots"),
            (Kind::Rebuild, "rebuilding"),
            (Kind::Clone, "cloning"),
        ] {
            if self.jobs.is_running(kind) {
                return Err(Error::busy(format!(
                    "cannot do restore now since the replica is {what}"
                )));
            }
        }
        Ok(())
    }

    /// Looks whether the backup can be restored, and how.
    fn plan<'a>(
        &self,
        store: &'a BackupStore,
        url: &Url,
        disk: &str,
        before: &Status,
    ) -> Result<Plan<'a>> {
        let (volume, backup) = url.need_backup()?;
        // Files are made and removed by this name.
        let snapshot = names::snapshot_name(disk)
            .ok_or_else(|| Error::invalid(format!("{disk:?} is not the disk of a snapshot")))?;
        names::check_snapshot(snapshot, Labels::new())?;
        let restoration = store.restore(volume, backup).map_err(|error| {
            // Longhorn's manager waits and tries again if it reads upstream's old words, before its new ones.
            let locked = error.to_string().starts_with(LOCKED);
            if locked { error.context("failed lock") } else { error }
        })?;
        let on_file = !self.replica.backing_identity()?.is_empty();
        check_image(&restoration, on_file)?;
        self.check_size(&restoration)?;
        let origin = Origin::new(url, restoration.volume(), restoration.backup());
        let base = self.base(store, url, &restoration, disk, before);
        let marker = match &base {
            Some(base) => Marker::delta(self.replica.dir(), base)?,
            None if before.state.is_empty() => Marker::snapshot(self.replica.dir(), disk)?,
            None => Marker::temporary(self.replica.dir(), disk)?,
        };
        Ok(Plan { restoration, origin, base, on_file, marker })
    }

    /// Whether the volume can hold the backup.
    fn check_size(&self, restoration: &Restoration<'_>) -> Result<()> {
        let facts = restoration.volume();
        let block_size = restoration.backup().block_size()?;
        let (size, ours) =
            (facts.size, self.replica.store()?.volume_size(self.replica.volume_name())?);
        if !size.is_multiple_of(block_size) {
            return Err(Error::invalid(format!(
                "volume size {size} is not a multiple of block size {block_size}"
            )));
        }
        if restoration.size() > ours.next_multiple_of(block_size) {
            return Err(Error::invalid(format!(
                "the volume of the backup has {} bytes, and this one {ours}: expand it first",
                restoration.size()
            )));
        }
        Ok(())
    }

    /// The backup restored last, if the differences to it can be restored: it is there, the very same, the volume holds
    /// just that, and nothing is to be shown again of a backing image that it hides.
    fn base(
        &self,
        store: &BackupStore,
        url: &Url,
        restoration: &Restoration<'_>,
        disk: &str,
        before: &Status,
    ) -> Option<String> {
        let last = &before.last_restored;
        if last.is_empty() {
            return None;
        }
        let volume = restoration.volume();
        let is_same = before.origin.as_ref().is_some_and(|origin| {
            let facts = store.complete_backup(&volume.name, last);
            facts.is_ok_and(|facts| {
                facts.block_size().ok() == restoration.backup().block_size().ok()
                    && Origin::new(url, volume, &facts) == *origin
                    && (volume.backing_image_name.is_empty() || !restoration.lacks(&facts))
            })
        });
        let is_held =
            before.disk == disk && self.replica.incoming().is_as_restored(disk).unwrap_or(false);
        if is_same && is_held {
            return Some(last.clone());
        }
        let volume = self.replica.volume_name();
        let fields: [(&str, &dyn std::fmt::Display); 4] =
            [("volume", &volume), ("last", last), ("same", &is_same), ("held", &is_held)];
        log::warn("restore-whole", &fields);
        None
    }

    fn carry_out(
        &self,
        plan: &Plan<'_>,
        target: &Arc<Staged>,
        workers: usize,
        disk: &str,
    ) -> Result<()> {
        let mut progress = |done: u64, total: u64| {
            let percent = (u128::from(done) * u128::from(BLOCKS_PERCENT))
                .checked_div(total.into())
                .unwrap_or(0);
            self.restores.tell(i32::try_from(percent).unwrap_or(0));
            !target.is_released()
        };
        let mut work = Work { workers, ..Work::new(&mut progress) };
        let onto = match &plan.base {
            Some(base) => Onto::Backup(base),
            None if !plan.restoration.volume().backing_image_name.is_empty() => Onto::Image,
            None => Onto::Empty,
        };
        if plan.on_file && onto == Onto::Empty {
            // The file must not be seen where the backup has nothing.
            target.zero(0, target.size())?;
        }
        plan.restoration.run(&**target, onto, &mut work)?;
        if target.is_released() {
            return Err(interrupted());
        }
        target.release();
        // The snapshot is about to go or to change.
        if let Some(snapshot) = names::snapshot_name(disk) {
            self.hashes.cancel_and_wait(snapshot);
        }
        longhorn_sync::image::Record::remove(&self.shelf.image(disk))?;
        self.replica.incoming().end_restore(disk, plan.base.is_some())
    }

    /// Ends it, whatever came of it.
    fn finish(&self, url: &Url, plan: Plan<'_>, outcome: Result<()>, turn: Turn<'_>) {
        let volume = self.replica.volume_name();
        let incremental = plan.base.is_some();
        // Who sees that it has ended may delete backups at once: the lock goes first.
        drop(plan.restoration);
        match &outcome {
            Ok(()) => {
                plan.marker.remove();
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("volume", &volume), ("url", url), ("incremental", &incremental)];
                log::info("restore", &fields);
            }
            Err(error) => {
                self.restores.release();
                // What stays goes with the next restore, or when the replica is started again.
                let given_up = self.replica.incoming().give_up_restore();
                log::error("restore", &[("volume", &volume), ("url", url), ("error", error)]);
                if let Err(error) = given_up {
                    log::warn("restore", &[("volume", &volume), ("giving-up", &error)]);
                }
            }
        }
        turn.end(outcome);
    }
}

/// A backup that is based on an image needs one below it, which is the same, as Longhorn's manager sees to. Upstream's engine would
/// show zeros in place of it.
fn check_image(restoration: &Restoration<'_>, on_file: bool) -> Result<()> {
    let image = &restoration.volume().backing_image_name;
    if image.is_empty() || on_file {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "the volume of the backup is based on the backing image {image}, and this replica has no backing file: restore it to one \
         that was started with that image"
    )))
}

/// The text of an error of a restore: upstream names a missing file of a directory as its system does.
fn told(error: Error, url: &Url) -> Error {
    let in_files = matches!(url.scheme.as_str(), "vfs" | "nfs" | "cifs");
    match error.kind() {
        ErrorKind::Interrupted => interrupted(),
        ErrorKind::NotFound if in_files => {
            Error::not_found(format!("{error}: no such file or directory"))
        }
        _ => error,
    }
}

/// A restore is beginning or under way as long as this is there.
struct Turn<'a> {
    agent: &'a Agent,
    ended: bool,
}

impl Turn<'_> {
    fn end(mut self, outcome: Result<()>) {
        self.ended = true;
        self.agent.restores.end(Some(outcome));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.agent.restores.release();
            // Nothing is there to be given up if it has not begun.
            let _ = self.agent.replica.incoming().give_up_restore();
            self.agent.restores.end(None);
        }
    }
}

impl Status {
    fn fail(&mut self, error: String) {
        (self.state, self.progress, self.error) = (ERROR, 0, error);
        self.current.clear();
        self.origin = None;
    }
}

impl Restores {
    /// Lets a restore of this backup begin, if it may; the status that it begins with.
    fn start(&self, backup: &str) -> Result<Status> {
        let mut state = self.state();
        if state.running {
            let text = "cannot initiate backup restore as there is one already in progress";
            return Err(Error::busy(text));
        }
        if state.status.state == ERROR {
            return Err(Error::invalid(
                "cannot start backup restore of the previous restore fails",
            ));
        }
        if state.status.last_restored == backup {
            return Err(Error::new(ErrorKind::Exists, format!("already restored backup {backup}")));
        }
        state.running = true;
        Ok(state.status.clone())
    }

    /// It has begun, and is to be seen.
    fn begin(
        &self,
        request: &BackupRestoreRequest,
        backup: &str,
        plan: &Plan<'_>,
        target: Arc<Staged>,
    ) {
        let mut state = self.state();
        let last_restored = plan.base.clone().unwrap_or_default();
        state.status = Status {
            state: IN_PROGRESS,
            url: request.backup.clone(),
            disk: request.snapshot_disk_name.clone(),
            last_restored,
            current: backup.to_owned(),
            origin: Some(plan.origin.clone()),
            ..Status::default()
        };
        (state.begun, state.target) = (true, Some(target));
    }

    fn tell(&self, percent: i32) {
        let mut state = self.state();
        state.status.progress = state.status.progress.max(percent);
    }

    /// One has come to its end; or to none, if there is no outcome.
    fn end(&self, outcome: Option<Result<()>>) {
        let mut state = self.state();
        let mut status = std::mem::take(&mut state.status);
        match outcome {
            Some(Ok(())) => {
                (status.state, status.progress) = (COMPLETE, 100);
                status.last_restored = std::mem::take(&mut status.current);
            }
            Some(Err(error)) => status.fail(error.to_string()),
            None if state.begun => status.fail("the restore ended abnormally".to_owned()),
            None => {}
        }
        *state = State { status, ..State::default() };
        self.ended.notify_all();
    }

    /// Lets go of the store.
    fn release(&self) {
        let target = self.state().target.take();
        target.iter().for_each(|target| target.release());
    }

    /// Gives up a restore that is under way, and waits a moment until it has ended. The store is free at once.
    pub fn cancel(&self, until: Instant) {
        self.release();
        let patience = until.saturating_duration_since(Instant::now());
        let running = |state: &mut State| state.begun;
        // One that takes longer ends with the process, or by itself.
        let _ = self.ended.wait_timeout_while(self.state(), patience, running);
    }

    /// Whether one is beginning or under way.
    pub fn is_running(&self) -> bool {
        self.state().running
    }

    /// Forgets what was restored, and how it ended.
    ///
    /// # Errors
    /// `Busy` while one is under way.
    pub fn reset(&self) -> Result<()> {
        let mut state = self.state();
        if state.running {
            return Err(Error::busy("replica is currently restoring, cannot reset"));
        }
        state.status = Status::default();
        Ok(())
    }

    /// As asked for by `RestoreStatus`.
    pub fn status(&self) -> RestoreStatusResponse {
        let state = self.state();
        let status = state.status.clone();
        RestoreStatusResponse {
            is_restoring: state.begun,
            last_restored: status.last_restored,
            progress: status.progress,
            error: status.error,
            dest_file_name: status.disk,
            state: status.state.into(),
            backup_url: status.url,
            current_restoring_backup: status.current,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
