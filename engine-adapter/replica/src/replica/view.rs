//! How a volume's layers look through Longhorn's eyes: disks, the live chain, counts and sizes.

use dbs_core::info::LayerInfo;
use longhorn_wire::proto::ptypes;
use longhorn_wire::{names, time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of a sector, as replicas report it.
pub const SECTOR_SIZE: u64 = 512;
/// Label that keeps a creation time which is no RFC 3339 text in whole seconds, as it was given;
/// not shown as a label.
pub const CREATED_LABEL: &str = "dbs/created";

/// What is known of a replica without asking its store: a process that has not taken the store
/// over yet answers from a copy of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaState {
    /// Number of the head.
    pub head: u64,
    /// Open, or not closed in good order.
    pub dirty: bool,
    /// Being rebuilt.
    pub rebuilding: bool,
    /// Revision counter; 0 if there is none.
    pub revision: u64,
    /// When the head was last changed.
    pub modified_ns: u64,
    /// All layers of the volume, the head among them; empty if there is no volume yet.
    pub layers: Vec<LayerInfo>,
}

/// A layer as a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disk {
    /// Snapshot, or `None` for the head.
    pub snapshot: Option<String>,
    /// Disk name of the parent, or nothing.
    pub parent: String,
    /// Disk names of the children.
    pub children: Vec<String>,
    /// Size of the layer in bytes: that of the volume when the snapshot was taken.
    pub size: u64,
    /// Marked as removed.
    pub removed: bool,
    /// Taken by a person.
    pub user_created: bool,
    /// Creation time as it was given.
    pub created: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Bytes that it holds itself.
    pub allocated: u64,
}

/// Limits and switches that a replica was started with or told since.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most snapshots.
    pub max_count: i32,
    /// Whether unmaps mark what is below the head as removed.
    pub unmap_mark: bool,
    /// Whether writes are counted.
    pub revision: bool,
}

impl ReplicaState {
    /// Disk name of the head.
    #[must_use]
    pub fn head_disk(&self) -> String {
        names::head_disk(self.head)
    }

    /// All disks by name, without what is only staged.
    #[must_use]
    pub fn disks(&self) -> BTreeMap<String, Disk> {
        let layers = self.layers.iter().filter(|layer| !is_staged(layer));
        let mut disks: BTreeMap<_, _> =
            layers.map(|layer| (self.disk_of(layer.name.as_deref()), self.disk(layer))).collect();
        let links: Vec<_> =
            disks.iter().map(|(name, disk)| (disk.parent.clone(), name.clone())).collect();
        for (parent, child) in links {
            if let Some(parent) = disks.get_mut(&parent) {
                parent.children.push(child);
            }
        }
        disks
    }

    /// The head's layer.
    #[must_use]
    pub fn head_layer(&self) -> Option<&LayerInfo> {
        self.layers.iter().find(|layer| layer.name.is_none())
    }

    /// Size of the volume in bytes, 0 if there is none.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.head_layer().map_or(0, |head| head.size)
    }

    /// Disk name of the head's parent, or nothing.
    #[must_use]
    pub fn parent_disk(&self) -> String {
        let parent = self.head_layer().and_then(|head| head.parent.as_deref());
        parent.map(names::snapshot_disk).unwrap_or_default()
    }

    fn disk_of(&self, layer: Option<&str>) -> String {
        layer.map_or_else(|| self.head_disk(), names::snapshot_disk)
    }

    fn disk(&self, layer: &LayerInfo) -> Disk {
        let mut labels = layer.labels.clone();
        let created = labels.remove(CREATED_LABEL).unwrap_or_else(|| time::text(layer.created_ns));
        Disk {
            snapshot: layer.name.clone(),
            parent: layer.parent.as_deref().map(names::snapshot_disk).unwrap_or_default(),
            children: Vec::new(),
            size: layer.size,
            removed: layer.retired,
            user_created: layer.user_created,
            created,
            labels,
            allocated: layer.data_bytes,
        }
    }

    /// The message for a replica that is not open. It has the revision counter, so that whoever asks why a
    /// controller has left the replica out is told.
    #[must_use]
    pub fn closed(&self, limits: Limits) -> ptypes::Replica {
        if self.layers.is_empty() {
            return ptypes::Replica {
                size: "0".to_owned(),
                state: "initial".to_owned(),
                ..Default::default()
            };
        }
        ptypes::Replica {
            dirty: self.dirty,
            rebuilding: self.rebuilding,
            head: self.head_disk(),
            parent: self.parent_disk(),
            size: self.size().to_string(),
            sector_size: SECTOR_SIZE as i64,
            state: "closed".to_owned(),
            revision_counter: if limits.revision { signed(self.revision) } else { 0 },
            ..Default::default()
        }
    }

    /// The message for an open replica whose state is called `state`.
    #[must_use]
    pub fn open(&self, state: &str, limits: Limits) -> ptypes::Replica {
        let disks = self.disks();
        let head = self.head_disk();
        let line = live_chain(&disks, &head);
        let live = || line.iter().filter(|name| disks.get(**name).is_some_and(|d| !d.removed));
        let snapshots = live().filter(|name| **name != head);
        let size_usage: u64 =
            snapshots.filter_map(|name| disks.get(*name)).map(|d| d.allocated).sum();
        let count_usage = count_usage(&disks);
        ptypes::Replica {
            state: state.to_owned(),
            chain: live().map(|name| (*name).to_owned()).collect(),
            remain_snapshots: limits.max_count.saturating_sub(count_usage),
            last_modify_time: signed(self.modified_ns),
            head_file_size: signed(self.head_layer().map_or(0, |head| head.data_bytes)),
            revision_counter_disabled: !limits.revision,
            unmap_mark_disk_chain_removed: limits.unmap_mark,
            snapshot_count_usage: count_usage,
            snapshot_size_usage: signed(size_usage),
            snapshot_count_total: i32::try_from(disks.len()).unwrap_or(i32::MAX),
            disks: disks.iter().map(|(name, disk)| (name.clone(), info(name, disk))).collect(),
            ..self.closed(limits)
        }
    }
}

/// Snapshots that are in use: neither the head nor marked as removed.
#[must_use]
pub fn count_usage(disks: &BTreeMap<String, Disk>) -> i32 {
    let used = disks.values().filter(|disk| disk.snapshot.is_some() && !disk.removed).count();
    i32::try_from(used).unwrap_or(i32::MAX)
}

/// Head and ancestors, the removed ones among them.
#[must_use]
pub fn live_chain<'a>(disks: &'a BTreeMap<String, Disk>, head: &str) -> Vec<&'a str> {
    let mut chain = Vec::new();
    let mut next = disks.get_key_value(head);
    // No longer than there are disks, whatever a foreign copy claims.
    while let Some((name, disk)) = next.filter(|_| chain.len() < disks.len()) {
        chain.push(name.as_str());
        next = disks.get_key_value(&disk.parent);
    }
    chain
}

fn info(name: &str, disk: &Disk) -> ptypes::DiskInfo {
    ptypes::DiskInfo {
        name: name.to_owned(),
        parent: disk.parent.clone(),
        children: disk.children.iter().map(|child| (child.clone(), true)).collect(),
        removed: disk.removed,
        user_created: disk.user_created,
        created: disk.created.clone(),
        size: disk.allocated.to_string(),
        labels: disk.labels.clone().into_iter().collect(),
    }
}

fn is_staged(layer: &LayerInfo) -> bool {
    layer.name.as_deref().is_some_and(names::is_staging)
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
