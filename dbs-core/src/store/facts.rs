//! What is known of volumes and snapshots, from the metadata.

use super::identity::uuid_text;
use crate::format::labels;
use crate::format::slots::{
    SNAPSHOT_PROTECTED, SNAPSHOT_RETIRED, SNAPSHOT_USER_CREATED, VOLUME_REBUILDING,
};
use crate::info::{EncryptionInfo, SnapshotInfo, Usage, VolumeInfo};
use crate::meta::base::BASE_LABEL;
use crate::meta::{Meta, Snapshot};
use crate::units::{SnapshotId, VolumeId};

/// `volume`, `volume@snapshot`, or `(hidden)`.
pub(super) fn spec_of(meta: &Meta, snapshot: &Snapshot) -> String {
    if !snapshot.live() {
        return "(hidden)".to_owned();
    }
    let volume = &meta.volume(snapshot.volume).name;
    if snapshot.head() { volume.clone() } else { format!("{volume}@{}", snapshot.name) }
}

fn parent_of(meta: &Meta, snapshot: &Snapshot) -> Option<String> {
    let parent = meta.try_snapshot(snapshot.parent).filter(|parent| !parent.backed())?;
    Some(spec_of(meta, parent))
}

/// What is known of a volume, but for its usage.
pub(crate) fn volume_info(meta: &Meta, id: VolumeId) -> VolumeInfo {
    let volume = meta.volume(id);
    let (mut depth, mut foreign, mut base) = (0, None, None);
    // Once: many clones of what has many snapshots are many layers to ask.
    for at in meta.chain(volume.head) {
        let snapshot = meta.snapshot(at);
        depth += 1;
        if snapshot.backed() {
            base = Some(at);
        } else if snapshot.volume != id {
            foreign = foreign.or(Some(snapshot));
        }
    }
    VolumeInfo {
        name: volume.name.clone(),
        uuid: uuid_text(&volume.uuid),
        size: volume.size,
        created_ns: volume.created_ns,
        parent: parent_of(meta, meta.snapshot(volume.head)),
        origin: foreign.map(|foreign| spec_of(meta, foreign)),
        snapshots: volume.snapshots.len() as u64,
        depth,
        open: meta.is_open(id),
        rebuilding: volume.flags & VOLUME_REBUILDING != 0,
        revision: volume.revision,
        limits: volume.pace.limits(),
        backing: base.map(|base| identity_of(meta, base)),
        encryption: meta.is_encrypted(id).then(|| EncryptionInfo {
            secret: volume.key_slot.secret_kind().to_owned(),
            locked: volume.key.is_none(),
            family: uuid_text(&meta.snapshot(volume.head).family),
        }),
        usage: Usage::default(),
    }
}

/// What identifies the file that a base is.
pub(super) fn identity_of(meta: &Meta, base: SnapshotId) -> String {
    let mut labels = labels::decode(&meta.snapshot(base).labels).unwrap_or_default();
    labels.remove(BASE_LABEL).unwrap_or_else(|| "which file it was is lost".to_owned())
}

/// What is known of a snapshot, but for its usage.
pub(crate) fn snapshot_info(meta: &Meta, id: SnapshotId) -> SnapshotInfo {
    let snapshot = meta.snapshot(id);
    let children = snapshot.children.iter();
    SnapshotInfo {
        volume: meta.volume(snapshot.volume).name.clone(),
        name: snapshot.name.clone(),
        uuid: uuid_text(&snapshot.uuid),
        size: snapshot.size,
        created_ns: snapshot.created_ns,
        parent: parent_of(meta, snapshot),
        children: children.map(|child| spec_of(meta, meta.snapshot(SnapshotId(*child)))).collect(),
        protected: snapshot.flags & SNAPSHOT_PROTECTED != 0,
        user_created: snapshot.flags & SNAPSHOT_USER_CREATED != 0,
        retired: snapshot.flags & SNAPSHOT_RETIRED != 0,
        labels: labels::decode(&snapshot.labels).unwrap_or_default(),
        rebuilds: meta.volume(snapshot.volume).rebuilds,
        usage: Usage::default(),
    }
}
