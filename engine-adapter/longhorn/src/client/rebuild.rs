//! Adding replicas to a volume.

use super::{ByReplica, Engine, Listed, RebuildStatus, ReplicaLink, SyncOptions};
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_wire::names;
use longhorn_wire::proto::controller::ReplicaMode;
use longhorn_wire::proto::ptypes::{Replica, SyncFileInfo};
use std::collections::BTreeMap;

/// From this version on a controller says from how many replicas one may be filled at once.
const LIMIT_API: i64 = 6;

/// A replica to be added.
#[derive(Debug, Clone)]
pub struct RebuildOptions {
    /// `tcp://host:port`.
    pub address: String,
    /// If not empty, it refuses when it is another instance.
    pub instance: String,
    /// Bytes the volume is to have if this is its first replica.
    pub size: i64,
    /// Bytes it has.
    pub current_size: i64,
    /// Whether files of equal checksum are left as they are.
    pub fast_sync: bool,
    /// How files are transferred.
    pub sync: SyncOptions,
}

impl Engine {
    /// Adds a replica and fills it; the first one of a volume starts it instead. Returns when the
    /// replica is like the others.
    ///
    /// A replica that could not be filled stays in mode WO, and what it was given stays as well: it is
    /// to be removed, and may be added again.
    ///
    /// # Errors
    /// What went wrong at which step.
    pub async fn add_replica(&self, options: &RebuildOptions) -> Result<()> {
        let RebuildOptions { address, instance, .. } = options;
        let volume = self.volume_get().await?;
        if volume.replica_count == 0 {
            let replicas = std::slice::from_ref(address);
            return self.volume_start(options.size, options.current_size, replicas).await;
        }
        let replica = ReplicaLink::new(address, self.volume(), instance)?;
        grow(&replica, volume.size).await?;
        end_failed_rebuild(&replica).await?;
        log::info("add-replica", &[("replica", address), ("mode", &"WO")]);
        self.replica_create(address, true, ReplicaMode::Wo).await?;
        let sources = self.sources(address).await?;
        log::info("rebuild", &[("replica", address), ("from", &sources.chosen.join(","))]);
        replica.set_rebuilding(true).await?;
        let files = self.prepare_rebuild(address, instance).await?;
        // That a controller copies itself.
        let is_head = |name: &str| names::head_number(name.trim_end_matches(".meta")).is_some();
        if files.iter().any(|file| is_head(&file.from_file_name)) {
            return Err(Error::invalid("sync file list shouldn't contain volume head"));
        }
        sources.fill(self, &replica, files, options).await?;
        replica.reload().await?;
        self.verify_rebuild(address, instance).await?;
        let Err(error) = replica.set_rebuilding(false).await else { return Ok(()) };
        // A controller of DBS has said so already, which older replicas refuse to be told again.
        let is_known = replica.get().await.is_ok_and(|replica| !replica.rebuilding);
        if is_known { Ok(()) } else { Err(error) }
    }

    /// Adds a replica to a volume that a backup is restored to, which fills it; the first one starts
    /// the volume instead.
    ///
    /// # Errors
    /// What went wrong at which step.
    pub async fn add_restore_replica(&self, options: &RebuildOptions) -> Result<()> {
        let RebuildOptions { address, instance, size, current_size, .. } = options;
        let volume = self.volume_get().await?;
        if volume.replica_count == 0 {
            let replicas = std::slice::from_ref(address);
            return self.volume_start(*size, *current_size, replicas).await;
        }
        let replica = ReplicaLink::new(address, self.volume(), instance)?;
        let checked = check_size(&replica, volume.size).await;
        match (checked, replica.close().await) {
            (Ok(()), closed) => closed?,
            (Err(e), Ok(())) => return Err(e),
            (Err(e), Err(close)) => {
                let text = format!("original error: {e}, close error: {close}");
                return Err(Error::new(e.kind(), text));
            }
        }
        log::info("add-restore-replica", &[("replica", address), ("mode", &"WO")]);
        self.replica_create(address, false, ReplicaMode::Wo).await.map(drop)
    }

    /// Starts a volume that has no replicas with these.
    ///
    /// # Errors
    /// That it has some; those of the calls.
    pub async fn start_with_replicas(
        &self,
        size: i64,
        current_size: i64,
        replicas: &[String],
    ) -> Result<()> {
        if self.volume_get().await?.replica_count != 0 {
            return Err(Error::new(
                ErrorKind::Busy,
                "cannot add multiple replicas if volume is already up",
            ));
        }
        self.volume_start(size, current_size, replicas).await
    }

    /// How far replicas in mode WO are; nothing while a backup is being restored.
    ///
    /// # Errors
    /// Those of the controller; a replica's are in its status.
    pub async fn rebuild_status(&self) -> Result<ByReplica<RebuildStatus>> {
        let mut statuses = ByReplica::new();
        for replica in self.replicas().await? {
            if replica.mode != ReplicaMode::Wo {
                continue;
            }
            let link = replica.link(self)?;
            let restore = link.restore_status().await.map_err(|e| {
                e.context("failed to check the restore status before fetching the rebuild status")
            })?;
            if !restore.dest_file_name.is_empty() {
                return Ok(statuses);
            }
            let at = &replica.address;
            let status = link.rebuild_status().await.unwrap_or_else(|e| RebuildStatus {
                error: format!("failed to get replica rebuild status of {at}: {e}"),
                ..Default::default()
            });
            statuses.insert(replica.address, status);
        }
        Ok(statuses)
    }

    /// Has all sync agents forget the restoration of a backup.
    ///
    /// # Errors
    /// That a replica is rebuilding; those of the calls.
    pub async fn reset_agents(&self) -> Result<()> {
        let replicas = self.replicas().await?;
        for replica in &replicas {
            if replica.link(self)?.get().await?.rebuilding {
                let at = &replica.address;
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("cannot reset Restore info as replica({at}) is rebuilding"),
                ));
            }
        }
        for replica in &replicas {
            log::info("sync-agent-server-reset", &[("replica", &replica.address)]);
            replica.link(self)?.reset().await?;
        }
        Ok(())
    }

    /// From which replicas the new one at `address` is filled.
    async fn sources(&self, address: &str) -> Result<Sources> {
        let replicas = self.replicas().await?;
        let new = replicas.iter().find(|replica| replica.address == address);
        let new = new.ok_or_else(|| {
            let text = format!("cannot find the WO replica client from address {address}");
            Error::not_found(text)
        })?;
        if new.mode != ReplicaMode::Wo {
            let mode = new.mode.as_str_name();
            let text = format!("replica {address} is not in mode WO: {mode}");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let usable = |replica: &&Listed| replica.mode == ReplicaMode::Rw;
        let mut chosen: Vec<_> =
            replicas.iter().filter(usable).map(|replica| replica.address.clone()).collect();
        if chosen.is_empty() {
            return Err(Error::not_found("no available RW replica to rebuild from"));
        }
        let mut others = Vec::new();
        if self.version().await?.controller_api_version >= LIMIT_API {
            // No limit leaves none: that is for the sync agent to refuse.
            let limit = usize::try_from(self.rebuild_sync_limit().await?).unwrap_or(0);
            // The last ones: a controller takes its own part from the very last.
            let surplus = chosen.len().saturating_sub(limit);
            others.extend(chosen.drain(..surplus));
        }
        Ok(Sources { chosen: self.alike(chosen).await?, others })
    }

    /// Those replicas whose tree is that of the last one, from which a controller takes the list of files. Where a purge
    /// has ended on one and not on another, layers of one name hold different things.
    async fn alike(&self, addresses: Vec<String>) -> Result<Vec<String>> {
        if addresses.len() < 2 {
            return Ok(addresses);
        }
        let (mut alike, mut wanted) = (Vec::new(), None);
        for (nth, address) in addresses.into_iter().rev().enumerate() {
            let answer = ReplicaLink::new(&address, self.volume(), "")?.get().await;
            let tree = answer.map(|replica| tree(&replica));
            match tree {
                // It shows when it is asked for its layers.
                Err(_) if nth == 0 => return Ok(vec![address]),
                Err(e) => log::warn("no-source", &[("replica", &address), ("error", &e)]),
                Ok(tree) if *wanted.get_or_insert_with(|| tree.clone()) == tree => {
                    alike.push(address)
                }
                Ok(_) => {
                    let why = "its snapshots are not those of the others";
                    log::warn("no-source", &[("replica", &address), ("why", &why)]);
                }
            }
        }
        alike.reverse();
        Ok(alike)
    }
}

/// Complete replicas that another one is filled from.
struct Sources {
    /// No more than may be asked at once.
    chosen: Vec<String>,
    others: Vec<String>,
}

impl Sources {
    /// Has the replica fetch these files. If one is damaged where it comes from, all replicas are asked
    /// at once: each is right where another one is not.
    async fn fill(
        self,
        engine: &Engine,
        replica: &ReplicaLink,
        files: Vec<SyncFileInfo>,
        options: &RebuildOptions,
    ) -> Result<()> {
        let RebuildOptions { address, fast_sync, sync, .. } = options;
        let error = match replica.sync_files(&self.chosen, files.clone(), *fast_sync, sync).await {
            Err(e) if e.kind() == ErrorKind::Damaged && !self.others.is_empty() => e,
            filled => return filled,
        };
        let few = self.chosen.len();
        let all = engine.alike([self.others, self.chosen].concat()).await?;
        if all.len() <= few {
            return Err(error);
        }
        log::warn("rebuild", &[("replica", address), ("from", &all.join(",")), ("error", &error)]);
        replica.sync_files(&all, files, *fast_sync, sync).await
    }
}

/// The disks of a replica but the head: what each lies on, and whether it is marked as removed.
fn tree(replica: &Replica) -> BTreeMap<String, (String, bool)> {
    let file = &replica.backing_file;
    let disks = replica.disks.iter();
    let disks = disks.filter(|(name, _)| names::head_number(name).is_none() && *name != file);
    let parent = |parent: &String| if parent == file { String::new() } else { parent.clone() };
    disks.map(|(name, disk)| (name.clone(), (parent(&disk.parent), disk.removed))).collect()
}

fn size_of(replica: &Replica) -> Result<i64> {
    let size = &replica.size;
    size.parse().map_err(|e| Error::invalid(format!("the replica's size is {size:?}: {e}")))
}

/// Makes a replica as large as the volume.
async fn grow(link: &ReplicaLink, size: i64) -> Result<()> {
    let replica = link.get().await?;
    let has = size_of(&replica)?;
    if has > size {
        return Err(Error::invalid(format!("cannot add new replica larger than size {size}")));
    }
    if has == size {
        return Ok(());
    }
    log::info("expand-replica", &[("from", &has), ("to", &size)]);
    let closed = replica.state == "closed";
    if closed {
        link.open().await?;
    }
    let grown = link.expand(size).await;
    // Open, it could not be added later.
    let ended = if closed { link.close().await } else { Ok(()) };
    grown.and(ended)
}

/// A replica that was being filled when its process ended may be filled again. Upstream's must first be told
/// that it lacks nothing; of ours nobody is to think so.
async fn end_failed_rebuild(link: &ReplicaLink) -> Result<()> {
    let replica = link.get().await?;
    if replica.state != "closed" || !replica.rebuilding || replica.dbs.is_some() {
        return Ok(());
    }
    link.open().await?;
    link.set_rebuilding(false).await?;
    link.close().await
}

async fn check_size(link: &ReplicaLink, size: i64) -> Result<()> {
    let has = size_of(&link.get().await?)?;
    if has == size {
        return Ok(());
    }
    let text = format!("rebuilding replica size {has} is not the same as volume size {size}");
    Err(Error::invalid(text))
}
