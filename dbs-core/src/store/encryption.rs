//! Encrypted volumes: made, unlocked, locked, and given another secret.
//!
//! What a secret costs to try is paid with nothing locked.

use super::facts::volume_info;
use super::{Store, still_named};
use crate::crypt::{self, DataKey, RawKey, Secret};
use crate::error::{Error, Result};
use crate::format::slots::KeySlot;
use crate::format::superblock::INCOMPAT_ENCRYPTED;
use crate::info::VolumeInfo;
use crate::meta::encryption::NewKey;
use crate::units::{SnapshotId, VolumeId};
use std::collections::HashSet;
use std::sync::{Arc, MutexGuard, PoisonError};
use zeroize::Zeroizing;

/// A volume, its wrapped key, and the key.
type Unwrapped = (VolumeId, KeySlot, RawKey);

/// Volumes that the secret which the store was opened with does not unlock.
#[derive(Debug, Default)]
pub(crate) struct NotGiven {
    /// The uuids of those that somebody has locked.
    locked: HashSet<[u8; 16]>,
    /// Of those with another secret: their uuids and the salts of their keys.
    others: HashSet<([u8; 16], [u8; 16])>,
}

impl Store {
    /// Creates an empty volume whose data is encrypted with a new key, which `secret` unlocks. It is unlocked until
    /// [`Store::lock`], or until the store is closed. So are its clones, which share the key and begin with the same
    /// secret.
    ///
    /// # Errors
    /// As [`Store::create_volume`].
    pub fn create_encrypted(&self, name: &str, size: u64, secret: &Secret) -> Result<VolumeInfo> {
        self.create_encrypted_of(name, size, secret, false)
    }

    /// As [`Store::create_encrypted`], of a volume that is to be filled: it is rebuilding from its first moment until
    /// [`Store::set_rebuilding`] says that it is complete.
    ///
    /// # Errors
    /// As [`Store::create_volume`].
    pub fn create_encrypted_rebuilding(
        &self,
        name: &str,
        size: u64,
        secret: &Secret,
    ) -> Result<VolumeInfo> {
        self.create_encrypted_of(name, size, secret, true)
    }

    fn create_encrypted_of(
        &self,
        name: &str,
        size: u64,
        secret: &Secret,
        rebuilding: bool,
    ) -> Result<VolumeInfo> {
        self.inner.check_writable()?;
        // What is refused leaves the store to those who do not know encryption.
        self.inner.meta().check_new_volume(name, size)?;
        let _slots = self.make_slots(1)?;
        let mut raw: RawKey = Zeroizing::new([0; 64]);
        self.inner.env.secret(&mut raw[..])?;
        let new = NewKey {
            slot: crypt::wrap(&raw, secret, self.salt()?)?,
            key: Arc::new(DataKey::new(&raw)),
            family: super::identity::as_uuid(self.inner.env.random()),
        };
        drop(raw);
        self.inner.announce(INCOMPAT_ENCRYPTED)?;
        let births = self.inner.births(None);
        self.inner.command(|meta| {
            let id = meta.create_volume(name, size, SnapshotId::NONE, births)?;
            meta.encrypt(id, &new);
            if rebuilding {
                meta.set_rebuilding(id, true);
            }
            Ok(volume_info(meta, id))
        })
    }

    /// Unlocks an encrypted volume, so that it can be read and written, until it is locked or the store is closed. One
    /// that is unlocked stays so, and the secret is checked all the same.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is not encrypted, or the secret is another one; `Corrupt` if its key is lost.
    pub fn unlock(&self, volume: &str, secret: &Secret) -> Result<()> {
        let unwrapped = self.unwrap(volume, secret)?;
        self.take_key(volume, &unwrapped, true)
    }

    /// Has a key in memory from now on; unless the volume was locked meanwhile, if nobody has asked to unlock it.
    fn take_key(&self, volume: &str, unwrapped: &Unwrapped, asked: bool) -> Result<()> {
        let (id, slot, raw) = unwrapped;
        let key = Arc::new(DataKey::new(raw));
        let mut meta = self.inner.meta();
        // Meanwhile it may have been deleted, and the name be another's.
        still_named(&meta, volume, *id)?;
        if meta.key_slot(*id)? != *slot {
            return Err(changed(volume));
        }
        let uuid = meta.volume(*id).uuid;
        let mut not = self.not_with_given();
        if asked {
            not.locked.remove(&uuid);
            not.others.remove(&(uuid, slot.salt));
        }
        if meta.volume(*id).key.is_none() && !not.locked.contains(&uuid) {
            meta.set_key(*id, Some(key));
        }
        Ok(())
    }

    /// Forgets the key of an encrypted volume: nobody reads or writes it until it is unlocked, also if the store was opened
    /// with its secret. Nothing if that is so.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is not encrypted; `Busy` if it or a snapshot of it is open.
    pub fn lock(&self, volume: &str) -> Result<()> {
        let mut meta = self.inner.meta();
        let id = meta.find_volume(volume)?;
        meta.key_slot(id)?;
        meta.check_lockable(id)?;
        meta.set_key(id, None);
        // Who is about to unlock it with what the store was opened with looks there before it does.
        self.not_with_given().locked.insert(meta.volume(id).uuid);
        Ok(())
    }

    /// Gives an encrypted volume another secret. No data is written: its key stays, and so do the secrets of its
    /// clones. Durable on return; after a crash the old secret unlocks it, or the new one.
    ///
    /// # Errors
    /// As [`Store::unlock`]; `ReadOnly`.
    pub fn rekey(&self, volume: &str, old: &Secret, new: &Secret) -> Result<()> {
        self.inner.check_writable()?;
        let (id, slot, raw) = self.unwrap(volume, old)?;
        let wrapped = crypt::wrap(&raw, new, self.salt()?)?;
        self.inner.command(|meta| {
            still_named(meta, volume, id)?;
            if meta.key_slot(id)? != slot {
                return Err(changed(volume).into());
            }
            meta.rewrap(id, wrapped);
            Ok(())
        })
    }

    /// Unlocks a volume that somebody is about to open with the secret that the store was opened with, if that is the
    /// volume's.
    pub(crate) fn unlock_with_given(&self, spec: &str) {
        let Some(secret) = self.inner.secret.get() else { return };
        let name = spec.split_once('@').map_or(spec, |(name, _)| name);
        let (slot, uuid) = {
            let meta = self.inner.meta();
            let locked = meta.find_volume(name).ok().filter(|id| meta.volume(*id).key.is_none());
            match locked.map(|id| (meta.key_slot(id), meta.volume(id).uuid)) {
                Some((Ok(slot), uuid)) => (slot, uuid),
                _ => return,
            }
        };
        let not = self.not_with_given();
        let skip = not.locked.contains(&uuid) || not.others.contains(&(uuid, slot.salt));
        drop(not);
        if skip || !slot.is_for(secret) {
            return;
        }
        let unlocked = self.unwrap(name, secret).and_then(|key| self.take_key(name, &key, false));
        if unlocked.is_err() {
            self.not_with_given().others.insert((uuid, slot.salt));
        }
    }

    /// As [`Store::unlock_with_given`], for all volumes.
    pub(crate) fn unlock_all_with_given(&self) {
        if self.inner.secret.get().is_some() {
            let names: Vec<_> = self.inner.meta().volumes().map(|(_, v)| v.name.clone()).collect();
            names.iter().for_each(|name| self.unlock_with_given(name));
        }
    }

    /// Locked after the metadata, by who has both.
    fn not_with_given(&self) -> MutexGuard<'_, NotGiven> {
        self.inner.not_secret.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of a volume.
    fn unwrap(&self, volume: &str, secret: &Secret) -> Result<Unwrapped> {
        let (id, slot) = {
            let meta = self.inner.meta();
            let id = meta.find_volume(volume)?;
            (id, meta.key_slot(id)?)
        };
        let raw = crypt::unwrap(&slot, secret)
            .map_err(|error| error.context(format!("volume `{volume}`")))?;
        let wrong = || {
            Error::invalid(format!(
                "the {} is not the one that unlocks volume `{volume}`",
                secret.kind()
            ))
        };
        Ok((id, slot, raw.ok_or_else(wrong)?))
    }

    fn salt(&self) -> Result<[u8; 16]> {
        let mut salt = [0; 16];
        self.inner.env.secret(&mut salt)?;
        Ok(salt)
    }
}

fn changed(volume: &str) -> Error {
    Error::busy(format!("volume `{volume}` got another secret meanwhile"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::store::{InitOptions, OpenOptions};

    #[test]
    fn a_volume_that_is_locked_while_its_key_is_unwrapped_stays_locked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        Store::init(&path, &InitOptions { size: Some(64 << 20), ..InitOptions::default() })
            .unwrap();
        let secret = Secret::KeyFile([1; 32].into());
        let options = OpenOptions { secret: Some(secret.clone()), ..OpenOptions::default() };
        let store = Store::open(&path, &options).unwrap();
        store.create_encrypted("v", 1 << 20, &secret).unwrap();
        // Somebody opens it, and has its key, but not yet where it is kept.
        let key = store.unwrap("v", &secret).unwrap();
        store.lock("v").unwrap();
        store.take_key("v", &key, false).unwrap();
        let read = || store.volume("v").unwrap().read_at(0, &mut [0; 512]);
        assert_eq!(read().unwrap_err().kind(), ErrorKind::Locked);
        // The same secret, wrapped anew, is no reason either.
        let other = Secret::KeyFile([2; 32].into());
        store.rekey("v", &secret, &other).unwrap();
        store.rekey("v", &other, &secret).unwrap();
        assert_eq!(read().unwrap_err().kind(), ErrorKind::Locked);
        store.unlock("v", &secret).unwrap();
        read().unwrap();
    }
}
