//! Keys of encrypted volumes: each has its own wrapping of the key that its family shares.

use super::Meta;
use super::holders::Target;
use crate::crypt::DataKey;
use crate::error::{Error, ErrorKind, Result};
use crate::format::slots::KeySlot;
use crate::units::{SnapshotId, VolumeId};
use std::sync::Arc;
use zerocopy::FromZeros;

/// How an encrypted volume begins.
pub struct NewKey {
    /// The key, wrapped.
    pub slot: KeySlot,
    /// The key, unless it begins locked.
    pub key: Option<Arc<DataKey>>,
}

impl Meta {
    /// The key that data of a snapshot or head is encrypted with; none if it is not encrypted.
    ///
    /// # Errors
    /// `Locked`; `Corrupt` if a repair found no key any more.
    #[inline]
    pub fn key_for(&self, id: SnapshotId) -> Result<Option<Arc<DataKey>>> {
        let snapshot = self.snapshot(id);
        if !snapshot.encrypted() {
            return Ok(None);
        }
        match self.volumes.get(snapshot.volume.index().wrapping_sub(1)) {
            Some(Some(volume)) => match &volume.key {
                Some(key) => Ok(Some(Arc::clone(key))),
                None => Err(self.is_locked(snapshot.volume)),
            },
            _ => Err(Error::not_found("its volume was deleted")),
        }
    }

    /// Refuses what needs the key of a volume that is locked.
    ///
    /// # Errors
    /// As [`Meta::key_for`].
    pub fn check_not_locked(&self, id: VolumeId) -> Result<()> {
        self.key_for(self.volume(id).head).map(drop)
    }

    /// Whether a volume's data is encrypted.
    pub fn is_encrypted(&self, id: VolumeId) -> bool {
        self.snapshot(self.volume(id).head).encrypted()
    }

    #[cold]
    fn is_locked(&self, id: VolumeId) -> Error {
        let volume = self.volume(id);
        let name = &volume.name;
        if volume.key_slot.is_lost() {
            return Error::corrupt(format!(
                "volume `{name}` is encrypted, and its key is lost; `dbs restore-metadata` with a dump of before \
                 brings it back"
            ));
        }
        let text = format!(
            "volume `{name}` is locked; unlock it with `dbs volume unlock {name}`, or, if no server has the store, set \
             DBS_VOLUME_PASSPHRASE, DBS_VOLUME_PASSPHRASE_FILE or DBS_VOLUME_KEY_FILE for the command"
        );
        Error::new(ErrorKind::Locked, text)
    }

    /// The key that a volume on a snapshot begins with: that of the snapshot's volume.
    ///
    /// # Errors
    /// `Corrupt` if a repair found no key any more.
    pub(super) fn key_of(&self, parent: SnapshotId) -> Result<(KeySlot, Option<Arc<DataKey>>)> {
        let none = (KeySlot::new_zeroed(), None);
        let Some(snapshot) = self.try_snapshot(parent).filter(|parent| parent.encrypted()) else {
            return Ok(none);
        };
        let volume = self.volume(snapshot.volume);
        if volume.key_slot.is_lost() {
            return Err(self.is_locked(snapshot.volume));
        }
        Ok((volume.key_slot, volume.key.clone()))
    }

    /// Encrypts a volume that was created in the same step, and holds nothing.
    pub fn encrypt(&mut self, id: VolumeId, new: &NewKey) {
        let head = self.volume(id).head;
        assert!(self.snapshot(head).parent.is_none() && self.snapshot(head).layer.is_empty());
        self.snapshot_mut(head).family = new.slot.family;
        let volume = self.volume_mut(id);
        volume.key_slot = new.slot;
        volume.key.clone_from(&new.key);
        self.append_snapshot(head);
        self.append_volume(id);
    }

    /// The wrapped key of a volume.
    ///
    /// # Errors
    /// `Invalid` if it is not encrypted; `Corrupt` if its key is lost.
    pub fn key_slot(&self, id: VolumeId) -> Result<KeySlot> {
        let volume = self.volume(id);
        if !self.is_encrypted(id) {
            return Err(Error::invalid(format!("volume `{}` is not encrypted", volume.name)));
        }
        if volume.key_slot.is_lost() {
            return Err(self.is_locked(id));
        }
        Ok(volume.key_slot)
    }

    /// Wraps the key of a volume for another secret.
    pub fn rewrap(&mut self, id: VolumeId, slot: KeySlot) {
        self.volume_mut(id).key_slot = slot;
        self.append_volume(id);
    }

    /// Has the key of a volume in memory, or forgets it.
    pub fn set_key(&mut self, id: VolumeId, key: Option<Arc<DataKey>>) {
        self.volume_mut(id).key = key;
    }

    /// Refuses to lock a volume that somebody uses.
    ///
    /// # Errors
    /// `Busy`.
    pub fn check_lockable(&self, id: VolumeId) -> Result<()> {
        self.check_closed(id)?;
        let name = &self.volume(id).name;
        for (snapshot, at) in &self.volume(id).snapshots {
            if self.open_snapshots.contains_key(&at.0) {
                let what = format!("snapshot `{name}@{snapshot}`");
                let target = Target::Snapshot(id, *at);
                return Err(self.open_error(&what, &target));
            }
        }
        Ok(())
    }
}
