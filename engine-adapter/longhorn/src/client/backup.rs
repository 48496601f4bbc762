//! Backing a volume up, and restoring it.

use super::{BackupStatus, ByReplica, DiskInfo, Engine, Listed, ReplicaLink, RestoreStatus, each};
use dbs_backup::BackupStore;
use dbs_backup::url::Url;
use dbs_core::{Error, ErrorKind, Result};
use longhorn_controller::volume::{Host as _, Machine};
use longhorn_wire::names;
use longhorn_wire::proto::controller::ReplicaMode;
use longhorn_wire::proto::ptypes::{BackupCreateRequest, BackupStatusResponse};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// The bare name of a head.
const HEAD: &str = "volume-head";
/// What an encrypted volume has beyond the volume that was backed up.
const LUKS2_HEADER_BYTES: u64 = 16 << 20;
/// Variables of the environment that go to a replica with a request, by the scheme of the URL.
const VARIABLES: [(&str, &[&str]); 3] = [
    (
        "s3",
        &[
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ENDPOINTS",
            "AWS_CERT",
            "HTTPS_PROXY",
            "HTTP_PROXY",
            "NO_PROXY",
            "VIRTUAL_HOSTED_STYLE",
            "AWS_SIGN_ACCEPT_ENCODING",
        ],
    ),
    ("cifs", &["CIFS_USERNAME", "CIFS_PASSWORD"]),
    (
        "azblob",
        &[
            "AZBLOB_ACCOUNT_NAME",
            "AZBLOB_ACCOUNT_KEY",
            "AZBLOB_ENDPOINT",
            "AZBLOB_CERT",
            "HTTPS_PROXY",
            "HTTP_PROXY",
            "NO_PROXY",
        ],
    ),
];

/// A backup that has begun: `longhorn backup create`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupBegun {
    /// Its name.
    #[serde(rename = "backupID")]
    pub backup: String,
    /// Whether it is made from the differences to the last one.
    pub is_incremental: bool,
    /// The replica that makes it, and knows how it is.
    pub replica_address: String,
}

/// Why a restore has not begun.
#[derive(Debug)]
pub enum RestoreError {
    /// On all replicas, for one reason.
    Volume(Error),
    /// On these, with their reasons.
    Replicas(Vec<ReplicaError>),
}

/// Why a restore has not begun on a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ReplicaError {
    /// Which one.
    pub address: String,
    /// Why.
    pub message: String,
}

impl From<Error> for RestoreError {
    fn from(error: Error) -> Self {
        Self::Volume(error)
    }
}

/// The credentials that the environment has for a backup store.
#[must_use]
pub fn credential(url: &Url) -> HashMap<String, String> {
    let names = VARIABLES.iter().find(|(scheme, _)| *scheme == url.scheme);
    let names = names.map_or(&[][..], |(_, names)| names);
    let value = |name: &&str| Some(((*name).to_owned(), std::env::var(name).ok()?));
    names.iter().filter_map(value).collect()
}

/// Opens a backup store with the credentials of the environment.
pub fn open_store(url: &Url) -> Result<BackupStore> {
    BackupStore::open(url, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

impl Engine {
    /// Begins a backup on a replica; `request` says of what and where to, but not of which volume.
    ///
    /// # Errors
    /// In upstream's words; those of the calls.
    pub async fn backup_create(&self, request: BackupCreateRequest) -> Result<BackupBegun> {
        let snapshot = &request.snapshot_file_name;
        if snapshot == HEAD {
            return Err(Error::invalid("cannot backup the head disk in the chain"));
        }
        let volume = self.volume_get().await?.name;
        let replicas = self.replicas().await;
        let replicas = replicas.map_err(|e| e.context("failed to list replicas for backup"))?;
        let usable = replicas.into_iter().find(|replica| replica.mode == ReplicaMode::Rw);
        let replica = usable
            .ok_or_else(|| Error::not_found("cannot find an available replica for backup"))?;
        let (link, at) = (replica.link(self)?, replica.address);
        let disk = names::snapshot_disk(snapshot);
        if !link.get().await?.disks.contains_key(&disk) {
            let text = format!("snapshot disk {disk} not found on replica {at}");
            return Err(Error::not_found(text));
        }
        let reply = link.backup_create(BackupCreateRequest { volume_name: volume, ..request });
        let reply = reply.await?;
        Ok(BackupBegun {
            backup: reply.backup,
            is_incremental: reply.is_incremental,
            replica_address: at,
        })
    }

    /// How a backup is. Without an address, the first usable replica that knows it is asked.
    ///
    /// # Errors
    /// That there is no such replica; those of the controller. What the replica says is in the status.
    pub async fn backup_status(
        &self,
        backup: &str,
        address: &str,
        instance: &str,
    ) -> Result<BackupStatus> {
        let replicas = self.replicas().await;
        let replicas = replicas.map_err(|e| e.context("failed to get replica list"))?;
        let mut usable = replicas.iter().filter(|replica| replica.mode == ReplicaMode::Rw);
        if address.is_empty() {
            let mut last = None;
            for replica in usable {
                let status = replica.link(self)?.backup_status(backup).await;
                let found = status.is_ok();
                last = Some(shown(backup, &replica.address, status));
                if found {
                    break;
                }
            }
            return last.ok_or_else(|| {
                Error::not_found(format!(
                    "cannot find a replica which has the corresponding backup {backup}"
                ))
            });
        }
        if !usable.any(|replica| replica.address == address) {
            return Err(Error::not_found(format!(
                "failed to get backup status on {address} for {backup}: unknown replica"
            )));
        }
        let link = ReplicaLink::new(address, self.volume(), instance)?;
        Ok(shown(backup, address, link.backup_status(backup).await))
    }

    /// Begins to restore a backup on all replicas. `encrypted` says that the volume has room for a header more than the
    /// one that was backed up.
    ///
    /// # Errors
    /// In upstream's words.
    pub async fn restore(
        &self,
        backup: &Url,
        credential: &HashMap<String, String>,
        concurrent_limit: i32,
        encrypted: bool,
    ) -> std::result::Result<(), RestoreError> {
        let volume = self.volume_get().await.map_err(|e| e.context("failed to get volume"))?;
        if volume.frontend_state == "up" {
            return Err(Error::busy("volume frontend enabled, cannot perform restore").into());
        }
        let replicas = self.replicas().await;
        let replicas =
            replicas.map_err(|e| e.context("failed to list replicas before the restore"))?;
        self.refuse_rebuilding(&replicas).await?;
        if self.purge_status().await?.values().any(|status| status.is_purging) {
            let text = "cannot do restore now since replicas are purging snapshots";
            return Err(Error::busy(text).into());
        }
        let statuses = self.restore_status().await?;
        let incremental = statuses.values().any(|status| !status.last_restored.is_empty());
        let disk = self.disk_to_restore(&statuses, incremental).await?;
        let (name, size) = backed_up(backup.clone()).await.map_err(|error| {
            let message = format!("failed to get the current restoring backup info: {error}");
            let at = |replica: &Listed| failed(replica, message.clone());
            RestoreError::Replicas(replicas.iter().map(at).collect())
        })?;
        let size = if encrypted { size + LUKS2_HEADER_BYTES } else { size };
        let ours = u64::try_from(volume.size).unwrap_or(0);
        let volume = &volume.name;
        if size < ours {
            return Err(Error::invalid(format!(
                "BUG: The backup volume {name} size {size} cannot be smaller than the DR volume {volume} size {ours}"
            ))
            .into());
        }
        if size > ours && incremental {
            return Err(Error::invalid(format!(
                "need to expand the DR volume {volume} to size {size} before incremental restoration"
            ))
            .into());
        }
        if size > ours {
            return Err(Error::invalid(format!(
                "BUG: The backup volume {name} size {size} cannot be larger than normal restore volume {volume} size \
                 {ours}"
            ))
            .into());
        }
        self.restore_all(&replicas, backup, &disk, credential, concurrent_limit).await
    }

    async fn refuse_rebuilding(
        &self,
        replicas: &[Listed],
    ) -> std::result::Result<(), RestoreError> {
        let mut errors = Vec::new();
        for replica in replicas {
            match replica.link(self)?.get().await {
                Ok(state) if state.rebuilding => {
                    let text = "cannot do restore for normal rebuilding replica";
                    errors.push(failed(replica, text.to_owned()));
                }
                Ok(_) => {}
                Err(error) => errors.push(failed(replica, error.to_string())),
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(RestoreError::Replicas(errors)) }
    }

    /// The snapshot that holds what was restored; a new one if there is none.
    async fn disk_to_restore(
        &self,
        statuses: &ByReplica<RestoreStatus>,
        incremental: bool,
    ) -> Result<String> {
        let snapshots = self.snapshot_info().await;
        let snapshots = snapshots
            .map_err(|e| e.context("failed to get snapshot info before the incremental restore"))?;
        let snapshots: BTreeMap<String, DiskInfo> = snapshots.unwrap_or_default();
        match snapshots.len() {
            0 => Err(Error::invalid("BUG: replicas do not contain any snapshots and volume head")),
            1 if incremental => Err(Error::invalid(
                "BUG: replicas of DR volume should contains at least 2 disk files: the volume head and a snapshot \
                 storing restore data",
            )),
            1 => {
                let under_way = statuses
                    .values()
                    .find(|status| status.is_restoring && !status.dest_file_name.is_empty());
                match under_way {
                    Some(status) => Ok(status.dest_file_name.clone()),
                    None => Ok(names::snapshot_disk(&Machine::default().unique_name())),
                }
            }
            2 => {
                let parent = snapshots.get(HEAD).map_or("", |head| &head.parent);
                Ok(names::snapshot_disk(parent))
            }
            _ => {
                self.purge(true).await?;
                Err(Error::busy(
                    "found more than 1 snapshot in the replicas, hence started to purge snapshots before the restore",
                ))
            }
        }
    }

    async fn restore_all(
        &self,
        replicas: &[Listed],
        backup: &Url,
        disk: &str,
        credential: &HashMap<String, String>,
        concurrent_limit: i32,
    ) -> std::result::Result<(), RestoreError> {
        let act = |replica: Listed, link: ReplicaLink| {
            let (backup, disk, credential) =
                (backup.to_string(), disk.to_owned(), credential.clone());
            async move {
                if replica.mode == ReplicaMode::Err {
                    return Err(Error::invalid("cannot restore backup from replica in mode ERR"));
                }
                link.backup_restore(&backup, &disk, credential, concurrent_limit).await
            }
        };
        let results = each(&self.volume, replicas, act).await;
        let errors: Vec<_> = replicas
            .iter()
            .zip(results)
            .filter_map(|(replica, result)| Some(failed(replica, result.err()?.to_string())))
            .collect();
        if errors.is_empty() { Ok(()) } else { Err(RestoreError::Replicas(errors)) }
    }

    /// How far replicas are with restores.
    ///
    /// # Errors
    /// Those of the controller; a replica's are in its status.
    pub async fn restore_status(&self) -> Result<ByReplica<RestoreStatus>> {
        let mut statuses = ByReplica::new();
        for replica in self.replicas().await? {
            if replica.mode == ReplicaMode::Err {
                continue;
            }
            let at = &replica.address;
            let status = match replica.link(self)?.restore_status().await {
                Ok(status) => status,
                Err(error) => RestoreStatus {
                    error: format!("Failed to get restoring status on {at}: {error}"),
                    ..RestoreStatus::default()
                },
            };
            statuses.insert(replica.address, status);
        }
        Ok(statuses)
    }
}

/// The name and size of the volume of a backup.
async fn backed_up(url: Url) -> Result<(String, u64)> {
    let look = move || {
        let (volume, backup) = url.need_backup()?;
        let store = open_store(&url)?;
        let facts = store.volume(volume)?;
        store.complete_backup(volume, backup)?;
        Ok((facts.name, facts.size))
    };
    let looked = tokio::task::spawn_blocking(look).await;
    looked.map_err(|e| Error::new(ErrorKind::Io, format!("a task ended abnormally: {e}")))?
}

fn failed(replica: &Listed, message: String) -> ReplicaError {
    ReplicaError { address: replica.address.clone(), message }
}

fn shown(backup: &str, address: &str, status: Result<BackupStatusResponse>) -> BackupStatus {
    match status {
        Ok(status) => BackupStatus { status, replica_address: address.to_owned() },
        Err(error) => {
            let mut shown = BackupStatus::default();
            shown.status.error =
                format!("Failed to get backup status on {address} for {backup}: {error}");
            shown
        }
    }
}
