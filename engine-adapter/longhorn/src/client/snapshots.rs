//! Listing, removing and purging snapshots.

use super::{ByReplica, DiskInfo, Engine, Failures, Listed, PurgeStatus, ReplicaLink, each};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::names;
use longhorn_wire::proto::controller::ReplicaMode;
use longhorn_wire::proto::ptypes;
use std::collections::BTreeMap;

/// What a sync agent says that is purging already.
const ALREADY_PURGING: &str = "already purging";
/// The bare name of a head.
const HEAD: &str = "volume-head";

impl Engine {
    /// The chain of one replica: head first, disk names.
    pub async fn chain(&self, replica: &Listed) -> Result<Vec<String>> {
        Ok(replica.link(self)?.get().await?.chain)
    }

    /// Bare names of the snapshots under the head that all usable replicas have, newest first.
    pub async fn snapshots(&self) -> Result<Vec<String>> {
        let mut common: Option<Vec<String>> = None;
        for replica in self.replicas().await? {
            if replica.mode != ReplicaMode::Rw {
                continue;
            }
            let chain = self.chain(&replica).await?;
            match &mut common {
                // A replica that has just been started has no head yet.
                None if chain.is_empty() => break,
                None => common = Some(chain.into_iter().skip(1).collect()),
                Some(common) => common.retain(|disk| chain.contains(disk)),
            }
        }
        let bare = |disk: String| {
            let rest = disk.strip_prefix("volume-snap-").unwrap_or(&disk);
            rest.strip_suffix(".img").unwrap_or(rest).to_owned()
        };
        Ok(common.unwrap_or_default().into_iter().map(bare).collect())
    }

    /// All layers with what is known of them, as the usable replica with the most of them has them;
    /// `None` if no replica is usable.
    ///
    /// # Errors
    /// Those of the calls; a disk with a name that is none.
    pub async fn snapshot_info(&self) -> Result<Option<BTreeMap<String, DiskInfo>>> {
        let mut most: Option<BTreeMap<String, DiskInfo>> = None;
        for replica in self.replicas().await? {
            if replica.mode != ReplicaMode::Rw {
                continue;
            }
            let wrong = |e: Error| e.context("BUG: cannot get snapshot info");
            let state = replica.link(self)?.get().await.map_err(wrong)?;
            let disks = disks(state).map_err(wrong)?;
            if disks.len() > most.as_ref().map_or(0, BTreeMap::len) {
                most = Some(disks);
            }
        }
        Ok(most)
    }

    /// Marks a snapshot as removed everywhere; a purge then does remove it. One that is not there counts as removed.
    ///
    /// # Errors
    /// That a replica is rebuilding or not usable; those of the calls.
    pub async fn remove_snapshot(&self, snapshot: &str) -> Result<()> {
        remove_snapshot(&self.volume, &self.replicas().await?, snapshot).await
    }

    /// Begins to remove what is marked as removed, on all replicas. With `skip`, a purge that goes on already is no error.
    ///
    /// # Errors
    /// That a replica is rebuilding, purging or does not answer, for each of them.
    pub async fn purge(&self, skip: bool) -> Result<()> {
        let listed = self.replicas().await;
        let replicas = listed.map_err(|e| e.context("failed to list replicas before purging"))?;
        purge(&self.volume, &replicas, skip).await
    }

    /// How far purges are, of replicas in use.
    ///
    /// # Errors
    /// Those of the controller; a replica's are in its status.
    pub async fn purge_status(&self) -> Result<ByReplica<PurgeStatus>> {
        let mut statuses = ByReplica::new();
        for replica in self.replicas().await? {
            if replica.mode == ReplicaMode::Err {
                continue;
            }
            let at = &replica.address;
            let status = replica.link(self)?.purge_status().await;
            let status = status.unwrap_or_else(|e| PurgeStatus {
                error: format!("failed to get snapshot purge status of {at}: {e}"),
                ..Default::default()
            });
            statuses.insert(replica.address, status);
        }
        Ok(statuses)
    }
}

/// Marks a snapshot as removed everywhere; a purge then does remove it. One that is not there
/// counts as removed.
///
/// # Errors
/// That a replica is rebuilding or not usable; those of the calls.
pub(crate) async fn remove_snapshot(
    volume: &str,
    replicas: &[Listed],
    snapshot: &str,
) -> Result<()> {
    for replica in replicas {
        if replica.link_in(volume)?.get().await?.rebuilding {
            let at = &replica.address;
            let text = format!("cannot remove a snapshot because {at} is rebuilding");
            return Err(Error::new(ErrorKind::Busy, text));
        }
    }
    for replica in replicas {
        if replica.mode != ReplicaMode::Rw {
            let mode = replica.mode.as_str_name();
            let text = "can only mark snapshot as removed from replica in mode RW, got";
            return Err(Error::new(ErrorKind::Busy, format!("{text} {mode}")));
        }
        let link = replica.link_in(volume)?;
        link.mark_as_removed(snapshot).await?;
        let canceled = link.hash_cancel(snapshot).await;
        canceled.map_err(|e| e.context(format!("failed to stop snapshot {snapshot} hash")))?;
    }
    Ok(())
}

/// Begins to remove what is marked as removed, on all replicas. With `skip`, a purge that goes on
/// already is no error.
///
/// # Errors
/// That a replica is rebuilding, purging or does not answer, for each of them.
pub(crate) async fn purge(volume: &str, replicas: &[Listed], skip: bool) -> Result<()> {
    let mut failures = Failures::default();
    for replica in replicas {
        let at = &replica.address;
        let link = replica.link_in(volume)?;
        let refuse = |text: String| Error::new(ErrorKind::Busy, text);
        match link.get().await {
            Ok(state) if state.rebuilding => {
                let text = format!("cannot purge snapshots because {at} is rebuilding");
                failures.add(replica, refuse(text));
            }
            Ok(_) => {}
            Err(e) => {
                let what = "is rebuilding before purging";
                failures.add(replica, e.context(format!("failed to check if replica {at} {what}")));
            }
        }
        match link.purge_status().await {
            Ok(status) if status.is_purging && skip => return Ok(()),
            Ok(status) if status.is_purging => {
                let what = "is already purging snapshots";
                failures
                    .add(replica, refuse(format!("cannot purge snapshots because {at} {what}")));
            }
            Ok(_) => {}
            Err(e) => {
                let what = "is purging before purging";
                failures.add(replica, e.context(format!("failed to check if replica {at} {what}")));
            }
        }
    }
    failures.check()?;
    start_purge(volume, replicas, skip).await
}

async fn start_purge(volume: &str, replicas: &[Listed], skip: bool) -> Result<()> {
    let act = |_, link: ReplicaLink| async move { link.purge().await };
    let mut failures = Failures::default();
    for (replica, result) in replicas.iter().zip(each(volume, replicas, act).await) {
        let Err(e) = result else { continue };
        if skip && e.to_string().contains(ALREADY_PURGING) {
            continue;
        }
        let at = &replica.address;
        let what = format!("replica {at} failed to execute snapshot purge");
        failures.add(replica, e.context(what));
    }
    failures.check()
}

/// The layers of a replica by their bare names, without a backing image.
pub(crate) fn disks(replica: ptypes::Replica) -> Result<BTreeMap<String, DiskInfo>> {
    let mut disks = BTreeMap::new();
    for (name, disk) in replica.disks {
        if name == replica.backing_file {
            continue;
        }
        let name = bare(&name)?;
        let children = disk.children.keys().map(|child| Ok((bare(child)?, true)));
        let info = DiskInfo {
            name: name.clone(),
            parent: if disk.parent.is_empty() { String::new() } else { snapshot(&disk.parent)? },
            children: children.collect::<Result<_>>()?,
            removed: disk.removed,
            user_created: disk.user_created,
            created: disk.created,
            size: disk.size,
            labels: disk.labels.into_iter().collect(),
        };
        disks.insert(name, info);
    }
    Ok(disks)
}

fn bare(disk: &str) -> Result<String> {
    if disk.starts_with("volume-head-") && disk.ends_with(".img") {
        return Ok(HEAD.to_owned());
    }
    snapshot(disk)
}

fn snapshot(disk: &str) -> Result<String> {
    let name = names::snapshot_name(disk).map(str::to_owned);
    name.ok_or_else(|| Error::invalid(format!("invalid snapshot disk name {disk}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ptypes::{DiskInfo as Disk, Replica};

    fn replica(disks: &[(&str, &str, &[&str])]) -> Replica {
        let disk = |(name, parent, children): &(&str, &str, &[&str])| {
            let children = children.iter().map(|child| ((*child).to_owned(), true)).collect();
            let parent = (*parent).to_owned();
            (
                (*name).to_owned(),
                Disk { name: (*name).to_owned(), parent, children, ..Disk::default() },
            )
        };
        let backing_file = "/images/base".to_owned();
        Replica { disks: disks.iter().map(disk).collect(), backing_file, ..Replica::default() }
    }

    #[test]
    fn layers_are_shown_with_bare_names() {
        let a = "volume-snap-a.img";
        let head = "volume-head-003.img";
        let replica = replica(&[
            (a, "", &[head, "volume-snap-b.img"]),
            (head, a, &[]),
            ("/images/base", "", &[a]),
        ]);
        let disks = disks(replica).unwrap();
        assert_eq!(disks.keys().collect::<Vec<_>>(), ["a", "volume-head"]);
        assert_eq!(disks["volume-head"].parent, "a");
        let children: Vec<_> = disks["a"].children.keys().collect();
        assert_eq!(children, ["b", "volume-head"]);
    }

    #[test]
    fn other_names_are_refused() {
        for (name, parent) in [("volume-delta-x.img", ""), ("volume-snap-a.img", "base")] {
            let text = disks(replica(&[(name, parent, &[])])).unwrap_err().to_string();
            assert!(text.starts_with("invalid snapshot disk name"), "{text}");
        }
    }
}
