//! A volume that rests on a file outside the store gets the same content from snapshots of another volume instead.

use super::holders::Target;
use super::{Meta, Step};
use crate::error::{Error, Result};
use crate::sabotage::Bug;
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};

impl Meta {
    /// Puts what rests on the base of a volume on the newest snapshot of `from`, which becomes a deleted one of the
    /// volume's: one group, as it is short. Nothing if that was done before.
    ///
    /// # Errors
    /// `Invalid`, `Busy`, `Exists`.
    pub fn rebase(&mut self, volume: VolumeId, from: VolumeId) -> Result<()> {
        self.check_source(from)?;
        if self.are_tied(volume, from) {
            return Ok(());
        }
        let (top, children) = self.plan_rebase(volume, from)?;
        for child in children {
            self.set_parent(child, top, Bug::RelinkKeepsViews);
        }
        let name = self.snapshot(top).name.clone();
        self.volume_mut(from).snapshots.remove(&name);
        self.drop_snapshot(top, volume);
        Ok(())
    }

    /// Makes the other snapshots of `from` the volume's, as many as groups of the journal take; the rest with the
    /// next call. Whatever a crash leaves, each of them is one volume's, as after a clone.
    ///
    /// # Errors
    /// As [`Meta::rebase`]: others had their turn since; [`Stop::Long`](super::Stop).
    pub fn adopt_some(&mut self, volume: VolumeId, from: VolumeId) -> Step<()> {
        self.check_source(from)?;
        self.check_names(volume, from)?;
        while let Some((name, id)) = self.volume(from).snapshots.first_key_value() {
            let (name, id) = (name.clone(), *id);
            self.check_log()?;
            self.volume_mut(from).snapshots.remove(&name);
            self.volume_mut(volume).snapshots.insert(name, id);
            self.snapshot_mut(id).volume = volume;
            self.append_snapshot(id);
        }
        Ok(())
    }

    /// Refuses to take snapshots from a volume that somebody uses, or whose head would be lost with it.
    fn check_source(&self, from: VolumeId) -> Result<()> {
        self.check_closed(from)?;
        let name = &self.volume(from).name;
        for (snapshot, id) in &self.volume(from).snapshots {
            if self.open_snapshots.contains_key(&id.0) {
                let what = format!("snapshot `{name}@{snapshot}`");
                return Err(self.open_error(&what, &Target::Snapshot(from, *id)));
            }
        }
        if self.is_rebuilding(from) {
            return Err(Error::busy(format!("volume `{name}` is being rebuilt")));
        }
        if self.snapshot(self.volume(from).head).encrypted() {
            // What rests on a file is not: one chain has one key, or none.
            return Err(Error::invalid(format!("volume `{name}` is encrypted")));
        }
        if !self.snapshot(self.volume(from).head).layer.is_empty() {
            return Err(Error::invalid(format!("the head of volume `{name}` holds something")));
        }
        Ok(())
    }

    /// Whether one volume already builds on a snapshot of the other.
    fn are_tied(&self, volume: VolumeId, from: VolumeId) -> bool {
        self.snapshots().any(|(_, snapshot)| {
            let parent = self.try_snapshot(snapshot.parent).map(|parent| parent.volume);
            parent.is_some_and(|parent| {
                (snapshot.volume, parent) == (volume, from)
                    || (snapshot.volume, parent) == (from, volume)
            })
        })
    }

    /// The snapshot to build on, and what is to build on it.
    fn plan_rebase(
        &self,
        volume: VolumeId,
        from: VolumeId,
    ) -> Result<(SnapshotId, Vec<SnapshotId>)> {
        let (name, other) = (&self.volume(volume).name, &self.volume(from).name);
        if self.is_rebuilding(volume) {
            return Err(Error::busy(format!("volume `{name}` is being rebuilt")));
        }
        let Some(base) = self.base_under(self.volume(volume).head) else {
            return Err(Error::invalid(format!("volume `{name}` rests on no file")));
        };
        self.check_alone(from)?;
        self.check_names(volume, from)?;
        let top = self.snapshot(self.volume(from).head).parent;
        if self.try_snapshot(top).is_none_or(|top| top.volume != from) {
            return Err(Error::invalid(format!("volume `{other}` has no snapshot below its head")));
        }
        let below = self.snapshot(top).size;
        let children: Vec<_> =
            self.snapshot(base).children.iter().copied().map(SnapshotId).collect();
        for child in &children {
            let child = self.snapshot(*child);
            if child.volume != volume {
                let text = format!("another volume rests on the same file as `{name}`");
                return Err(Error::busy(text));
            }
            if child.size < below || (child.size > below && !below.is_multiple_of(BLOCK_BYTES)) {
                return Err(Error::invalid(format!(
                    "what rests on the file has {} bytes, and cannot build on the {below} of `{other}`",
                    child.size
                )));
            }
        }
        Ok((top, children))
    }

    /// Each snapshot keeps its name, but for the newest, which loses it.
    fn check_names(&self, volume: VolumeId, from: VolumeId) -> Result<()> {
        let (volume, from) = (self.volume(volume), self.volume(from));
        let top = self.snapshot(from.head).parent;
        let twice = |(name, id): &(&String, &SnapshotId)| {
            **id != top && volume.snapshots.contains_key(*name)
        };
        match from.snapshots.iter().find(twice) {
            Some((name, _)) => {
                let text = format!(
                    "volumes `{}` and `{}` both have a snapshot `{name}`",
                    volume.name, from.name
                );
                Err(Error::exists(text))
            }
            None => Ok(()),
        }
    }
}
