//! What is said of volumes and snapshots without touching the tree or their content.

use super::tree::encode_labels;
use super::{Meta, Step};
use crate::error::{Error, Result};
use crate::format::slots::{SNAPSHOT_PROTECTED, SNAPSHOT_RETIRED, VOLUME_REBUILDING};
use crate::info::{Labels, VolumeLimits};
use crate::units::{SnapshotId, VolumeId};

impl Meta {
    /// A snapshot that a head may be put on: not a retired one, of whose content parts may be gone.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is retired.
    pub fn find_base(&self, volume: &str, name: &str) -> Result<(VolumeId, SnapshotId)> {
        let (volume_id, id) = self.find_snapshot(volume, name)?;
        if self.snapshot(id).flags & SNAPSHOT_RETIRED != 0 {
            return Err(Error::invalid(format!(
                "snapshot `{volume}@{name}` is retired: parts of its content may be gone; choose \
                 another one"
            )));
        }
        Ok((volume_id, id))
    }

    /// Sets or clears the protection from deletion.
    pub fn set_protected(&mut self, id: SnapshotId, protected: bool) {
        set(&mut self.snapshot_mut(id).flags, SNAPSHOT_PROTECTED, protected);
        self.append_snapshot(id);
    }

    /// Says whether a snapshot's owner has no more use for it.
    pub fn set_retired(&mut self, id: SnapshotId, retired: bool) {
        set(&mut self.snapshot_mut(id).flags, SNAPSHOT_RETIRED, retired);
        self.append_snapshot(id);
    }

    /// Whether a volume's content is incomplete: its layers may be written and linked anew.
    pub fn is_rebuilding(&self, id: VolumeId) -> bool {
        let volume = self.volumes.get(id.index().wrapping_sub(1)).and_then(Option::as_ref);
        volume.is_some_and(|volume| volume.flags & VOLUME_REBUILDING != 0)
    }

    /// Refuses to base anything on snapshots that may still change.
    ///
    /// # Errors
    /// `Busy`.
    pub fn check_complete(&self, id: VolumeId) -> Result<()> {
        if self.is_rebuilding(id) {
            return Err(Error::busy(format!(
                "volume `{}` is being rebuilt: its snapshots may still change",
                self.volume(id).name
            )));
        }
        Ok(())
    }

    /// Says whether a volume's content is incomplete.
    pub fn set_rebuilding(&mut self, id: VolumeId, rebuilding: bool) {
        set(&mut self.volume_mut(id).flags, VOLUME_REBUILDING, rebuilding);
        self.append_volume(id);
    }

    /// How fast a volume may be used.
    pub fn set_limits(&mut self, id: VolumeId, limits: VolumeLimits) {
        self.volume(id).pace.set(limits);
        self.append_volume(id);
    }

    /// The layers of a volume are about to be written anew.
    pub fn note_rebuild(&mut self, id: VolumeId) {
        self.volume_mut(id).rebuilds += 1;
    }

    /// Sets a volume's revision counter; it goes into the next group.
    pub fn stage_revision(&mut self, id: VolumeId, revision: u64) {
        let volume = self.volume_mut(id);
        if volume.revision != revision {
            volume.revision = revision;
            self.staged.insert(id.0);
        }
    }

    /// Whether a revision counter waits for a group to go with.
    pub(super) fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Whether a revision counter waits that the last group had no room for.
    pub fn staged_left(&self) -> bool {
        self.staged_left
    }

    /// Records the revision counters that changed, so many that the group stays of a length it may
    /// have; the rest goes with the next one.
    pub(super) fn append_staged(&mut self) {
        while !self.log.is_long()
            && let Some(id) = self.staged.pop_first()
        {
            self.append_volume(VolumeId(id));
        }
        self.staged_left = self.has_staged();
    }

    /// Replaces all labels of a snapshot.
    ///
    /// # Errors
    /// `Invalid` if they do not fit; [`super::Stop::Room`].
    pub fn set_labels(&mut self, id: SnapshotId, with: &Labels) -> Step<()> {
        let encoded = encode_labels(with)?;
        self.require_labels(id, &encoded)?;
        self.put_labels(id, encoded);
        self.append_snapshot(id);
        Ok(())
    }
}

fn set(flags: &mut u32, flag: u32, on: bool) {
    *flags = if on { *flags | flag } else { *flags & !flag };
}
