//! Backup: copying a snapshot to a backup store.

pub mod place;
pub mod source;

use super::Agent;
use super::jobs::{COMPLETE, ERROR, IN_PROGRESS};
use super::send::blocking;
use super::uses::interrupted;
use dbs_backup::codec::Method;
use dbs_backup::url::Url;
use dbs_backup::{CreateOptions, Work, config};
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_wire::labels;
use longhorn_wire::proto::ptypes::{
    BackupCreateRequest, BackupCreateResponse, BackupRemoveRequest, BackupStatusResponse,
};
use place::Credential;
use source::SnapshotSource;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;
use tokio::sync::oneshot;

/// Backups remembered that have ended well.
const REMEMBERED: usize = 5;
/// Backups remembered that have failed.
const REMEMBERED_FAILED: usize = 10;
/// What the blocks are of the whole: the rest is the writing of the facts.
const BLOCKS_PERCENT: u64 = 95;

/// The backups of an agent, in the order in which they began.
#[derive(Default)]
pub struct Backups {
    all: Mutex<Vec<Arc<Backup>>>,
}

struct Backup {
    name: String,
    snapshot: String,
    source: SnapshotSource,
    cancelled: AtomicBool,
    status: Mutex<Status>,
    ended: Condvar,
}

#[derive(Debug, Clone)]
struct Status {
    state: &'static str,
    progress: i32,
    url: String,
    error: String,
}

/// Told once it is known whether a backup is incremental, or why there is none.
struct Begun(Option<oneshot::Sender<Result<BackupCreateResponse>>>);

impl Begun {
    fn tell(&mut self, outcome: Result<BackupCreateResponse>) {
        if let Some(sender) = self.0.take() {
            // Who asked may be gone.
            let _ = sender.send(outcome);
        }
    }
}

/// What a request asks for.
struct Plan {
    url: Url,
    credential: Credential,
    options: CreateOptions,
    workers: usize,
}

impl Plan {
    fn new(request: BackupCreateRequest) -> Result<Self> {
        let name = request.backup_name;
        if [&request.volume_name, &request.snapshot_file_name, &request.backup_target]
            .iter()
            .any(|text| text.is_empty())
        {
            return Err(Error::invalid("missing input parameter"));
        }
        if !dbs_backup::names::is_valid(&request.volume_name) {
            let text = format!("invalid volume name {} for backup {name}", request.volume_name);
            return Err(Error::invalid(text));
        }
        let labels = labels::parse(&request.labels).map_err(|why| {
            Error::invalid(format!("cannot parse backup labels for backup {name}: {why}"))
        })?;
        let parameters = request.parameters.into_iter().collect();
        let options = CreateOptions {
            volume: request.volume_name,
            snapshot: request.snapshot_file_name,
            backup: Some(if name.is_empty() { dbs_backup::names::random("backup")? } else { name }),
            method: Method::parse(&request.compression_method)?,
            block_size: Some(config::block_size(Some(&parameters))?),
            full: parameters.get(config::PARAMETER_MODE).is_some_and(|mode| mode == "full"),
            keep_zeros: false,
            labels: labels.into_iter().collect(),
            parameters: config::Map::new(),
            backing_image_name: request.backing_image_name,
            backing_image_checksum: request.backing_image_checksum,
            storage_class_name: request.storage_class_name,
        };
        Ok(Self {
            url: Url::parse(&request.backup_target)?,
            credential: request.credential,
            options,
            workers: usize::try_from(request.concurrent_limit).unwrap_or(1).max(1),
        })
    }
}

impl Plan {
    /// The volume is based on a backing image. Who names none, as by hand, means the one that the volume's backups name, as upstream's
    /// engine does; if they name none, the backup holds what the image has, too, and can be restored without it.
    fn on_image(&mut self) {
        let options = &mut self.options;
        if options.backing_image_name.is_empty()
            // What is wrong there, `create` says.
            && let Ok(store) = place::open(&self.url, &self.credential)
            && let Ok(volume) = store.volume(&options.volume)
        {
            options.backing_image_name = volume.backing_image_name;
            options.backing_image_checksum = volume.backing_image_checksum;
        }
        // What is zeros in the volume may be something else in the image.
        options.keep_zeros = !options.backing_image_name.is_empty();
    }
}

impl Agent {
    /// Begins a backup, which goes on in the background.
    ///
    /// # Errors
    /// `Invalid` for what cannot be asked for; `NotFound` without that snapshot; `Busy` if there is such a backup under
    /// way, or somebody deletes backups of the volume; those of both sides.
    pub(super) async fn backup_create(
        self: &Arc<Self>,
        request: BackupCreateRequest,
    ) -> Result<BackupCreateResponse> {
        let me = Arc::clone(self);
        let (begun, told) = oneshot::channel();
        // No task of the runtime, which would wait for it at its end.
        let started = thread::Builder::new().name("backup".to_owned()).spawn(move || {
            let mut begun = Begun(Some(begun));
            if let Err(error) = me.backup(request, &mut begun) {
                begun.tell(Err(error));
            }
        });
        started.map_err(|e| Error::io(e, "starting a thread"))?;
        told.await.map_err(|_| Error::new(ErrorKind::Io, "the backup ended abnormally"))?
    }

    /// Backs up, to the end.
    fn backup(&self, request: BackupCreateRequest, begun: &mut Begun) -> Result<()> {
        let mut plan = Plan::new(request)?;
        if !self.replica.backing_identity()?.is_empty() {
            plan.on_image();
        } else if !plan.options.backing_image_name.is_empty() {
            return Err(Error::invalid(format!(
                "volume {} is based on no backing image, and its backup is to name {}",
                plan.options.volume, plan.options.backing_image_name
            )));
        }
        if self.replica.is_rebuilding() {
            return Err(Error::busy("the replica is rebuilding, and its snapshots are incomplete"));
        }
        let (name, snapshot) =
            (plan.options.backup.clone().unwrap_or_default(), plan.options.snapshot.clone());
        let source = SnapshotSource::open(
            self.replica.store()?,
            self.replica.volume_name(),
            &snapshot,
            plan.options.backing_image_name.is_empty(),
        )?;
        let backup = Turn(self.backups.begin(&name, &snapshot, source)?);
        let backup = &backup.0;
        let outcome = backup.carry_out(plan, begun);
        backup.source.release();
        let volume = self.replica.volume_name();
        match &outcome {
            Ok(url) => log::info("backup", &[("volume", &volume), ("url", url)]),
            Err(error) => {
                let fields: [(&str, &dyn std::fmt::Display); 4] = [
                    ("volume", &volume),
                    ("backup", &name),
                    ("snapshot", &snapshot),
                    ("error", error),
                ];
                log::error("backup", &fields);
            }
        }
        backup.end(&outcome);
        outcome.map(drop)
    }

    /// Deletes a backup.
    ///
    /// # Errors
    /// Those of the backup store.
    pub(super) async fn backup_remove(&self, request: BackupRemoveRequest) -> Result<()> {
        blocking(move || {
            let url = Url::parse(&request.backup)?;
            let (volume, backup) = url.need_backup()?;
            let store = place::open(&url, &Credential::new())?;
            store.remove(volume, backup, &mut Work::new(&mut |_, _| true)).map(drop)
        })
        .await
    }
}

impl Backups {
    fn begin(&self, name: &str, snapshot: &str, source: SnapshotSource) -> Result<Arc<Backup>> {
        let mut all = self.all();
        if all.iter().any(|backup| backup.name == name && backup.is_running()) {
            return Err(Error::busy(format!("backup {name} is already in progress")));
        }
        let backup = Arc::new(Backup {
            name: name.to_owned(),
            snapshot: snapshot.to_owned(),
            source,
            cancelled: AtomicBool::new(false),
            status: Mutex::new(Status {
                state: IN_PROGRESS,
                progress: 0,
                url: String::new(),
                error: String::new(),
            }),
            ended: Condvar::new(),
        });
        all.retain(|backup| backup.name != name);
        all.push(Arc::clone(&backup));
        for (state, most) in [(COMPLETE, REMEMBERED), (ERROR, REMEMBERED_FAILED)] {
            let ended = all.iter().filter(|backup| backup.status().state == state).count();
            let mut surplus = ended.saturating_sub(most);
            all.retain(|backup| {
                let goes = surplus > 0 && backup.status().state == state;
                surplus -= usize::from(goes);
                !goes
            });
        }
        Ok(backup)
    }

    /// How a backup is.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` without a name.
    pub fn status(&self, name: &str) -> Result<BackupStatusResponse> {
        if name.is_empty() {
            return Err(Error::invalid("bad request: empty backup name"));
        }
        let found = self.all().iter().find(|backup| backup.name == name).cloned();
        let backup = found.ok_or_else(|| Error::not_found(format!("backup not found {name}")))?;
        let Status { state, progress, url, error } = backup.status().clone();
        Ok(BackupStatusResponse {
            progress,
            backup_url: url,
            error,
            snapshot_name: backup.snapshot.clone(),
            state: state.into(),
        })
    }

    /// Gives up all backups, and waits a moment until they have removed what they have begun. The store is free at once.
    pub fn cancel_all(&self, until: Instant) {
        let running: Vec<_> =
            self.all().iter().filter(|backup| backup.is_running()).cloned().collect();
        for backup in &running {
            backup.cancelled.store(true, Ordering::SeqCst);
            backup.source.release();
        }
        for backup in running {
            let running = |status: &mut Status| status.state == IN_PROGRESS;
            // Who takes longer ends with the process, or by itself.
            let patience = until.saturating_duration_since(Instant::now());
            let _ = backup.ended.wait_timeout_while(backup.status(), patience, running);
        }
    }

    /// Forgets the backups that have ended.
    pub fn reset(&self) {
        self.all().retain(|backup| backup.is_running());
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<Backup>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A backup is under way as long as this is there.
struct Turn(Arc<Backup>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.source.release();
        if self.0.is_running() {
            self.0.end(&Err(Error::new(ErrorKind::Io, "the backup ended abnormally")));
        }
    }
}

impl Backup {
    /// Returns the backup's URL.
    fn carry_out(&self, plan: Plan, begun: &mut Begun) -> Result<String> {
        let store = place::open(&plan.url, &plan.credential)?;
        let mut options = plan.options;
        options.parameters = self.source.parameters();
        let creation = store.create(&self.source, options)?;
        begun.tell(Ok(BackupCreateResponse {
            backup: self.name.clone(),
            is_incremental: creation.is_incremental(),
        }));
        let mut progress = |done, total| {
            self.tell(done, total);
            !self.cancelled.load(Ordering::SeqCst)
        };
        let mut work = Work { workers: plan.workers, ..Work::new(&mut progress) };
        let created = creation.run(&mut work).map_err(|error| match error.kind() {
            ErrorKind::Interrupted => interrupted(),
            _ => error,
        })?;
        Ok(created.url)
    }

    fn tell(&self, done: u64, total: u64) {
        let percent =
            (u128::from(done) * u128::from(BLOCKS_PERCENT)).checked_div(total.into()).unwrap_or(0);
        let mut status = self.status();
        status.progress = status.progress.max(i32::try_from(percent).unwrap_or(0));
    }

    fn is_running(&self) -> bool {
        self.status().state == IN_PROGRESS
    }

    fn end(&self, outcome: &Result<String>) {
        let mut status = self.status();
        match outcome {
            Ok(url) => {
                (status.state, status.progress, status.url) = (COMPLETE, 100, url.clone());
            }
            Err(error) => (status.state, status.error) = (ERROR, error.to_string()),
        }
        self.ended.notify_all();
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
