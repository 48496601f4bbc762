//! Encrypted volumes: made, unlocked, locked, and given another secret.
//!
//! What a secret costs to try is paid with nothing locked.

use super::dump::KeyParts;
use super::facts::volume_info;
use super::identity::{parse_uuid, uuid_text};
use super::{Inner, Store, still_named};
use crate::crypt::{self, DataKey, RawKey, Secret};
use crate::error::{Error, Result};
use crate::format::slots::KeySlot;
use crate::format::superblock::INCOMPAT_ENCRYPTED;
use crate::info::VolumeInfo;
use crate::meta::Meta;
use crate::meta::encryption::NewKey;
use crate::units::{SnapshotId, VolumeId};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::sync::{Arc, MutexGuard, PoisonError};
use zeroize::Zeroizing;

/// A volume, its wrapped key, and the key.
type Unwrapped = (VolumeId, KeySlot, RawKey);

/// The key of an encrypted volume as its store keeps it, for a copy of the volume in another store: wrapped, so that only a
/// secret opens it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrappedKey {
    /// Which key it is, in the text form of a uuid: as in [`EncryptionInfo`](crate::info::EncryptionInfo).
    pub family: String,
    #[serde(flatten)]
    slot: KeyParts,
}

impl WrappedKey {
    /// Checks that it is one.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check(&self) -> Result<()> {
        self.parts().map(drop)
    }

    fn parts(&self) -> Result<KeySlot> {
        let family = parse_uuid(&self.family)?;
        let slot = self.slot.slot(family)?;
        // All zeros is none, and all ones one that nobody has.
        let is_one = slot.is_some() && !slot.is_lost() && slot.is_possible();
        if !is_one || family == [0; 16] || family == [0xff; 16] || uuid_text(&family) != self.family
        {
            return Err(Error::invalid("there is a key that is none"));
        }
        Ok(slot)
    }
}

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
        self.create_with_key(name, size, rebuilding, || self.new_key(secret))
    }

    /// Creates a volume as [`Store::create_encrypted_rebuilding`] does, of a key that another store has wrapped. It is
    /// locked, and the secret that unlocks it is the one that it has there.
    ///
    /// # Errors
    /// `Invalid` if it is no key; as [`Store::create_volume`].
    pub fn create_wrapped_rebuilding(
        &self,
        name: &str,
        size: u64,
        key: &WrappedKey,
    ) -> Result<VolumeInfo> {
        let slot = key.parts()?;
        self.create_with_key(name, size, true, || Ok(NewKey { slot, key: None }))
    }

    /// The key of an encrypted volume, wrapped, for a copy of the volume elsewhere.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is not encrypted; `Corrupt` if its key is lost.
    pub fn wrapped_key(&self, volume: &str) -> Result<WrappedKey> {
        let meta = self.inner.meta();
        let id = meta.find_volume(volume)?;
        let slot = KeyParts::of(&meta.key_slot(id)?);
        let family = uuid_text(&meta.snapshot(meta.volume(id).head).family);
        let none = || Error::corrupt(format!("volume `{volume}` has no key"));
        Ok(WrappedKey { family, slot: slot.ok_or_else(none)? })
    }

    fn new_key(&self, secret: &Secret) -> Result<NewKey> {
        let mut raw: RawKey = Zeroizing::new([0; 64]);
        self.inner.env.secret(&mut raw[..])?;
        let family = super::identity::as_uuid(self.inner.env.random());
        Ok(NewKey {
            slot: crypt::wrap(&raw, family, secret, self.salt()?)?,
            key: Some(Arc::new(DataKey::new(&raw))),
        })
    }

    fn create_with_key(
        &self,
        name: &str,
        size: u64,
        rebuilding: bool,
        key: impl FnOnce() -> Result<NewKey>,
    ) -> Result<VolumeInfo> {
        self.inner.check_writable()?;
        let slots = self.make_slots(1)?;
        // What is refused leaves the store to those who do not know encryption.
        self.inner.meta().check_new_volume(name, size)?;
        let new = key()?;
        self.inner.announce(INCOMPAT_ENCRYPTED)?;
        let births = self.inner.births(None);
        self.inner.command(|meta| {
            let id = meta.create_volume(name, size, SnapshotId::NONE, births)?;
            slots.taken(meta);
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
        let unwrapped = self.inner.unwrap(volume, secret)?;
        self.inner.take_key(volume, &unwrapped, true)
    }

    /// Forgets the key of an encrypted volume: nobody reads or writes it until it is unlocked, also if the store was opened
    /// with its secret. So it is with each clone that is made of it until then. Nothing if that is so.
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
        self.inner.not_with_given().locked.insert(meta.volume(id).uuid);
        Ok(())
    }

    /// Gives an encrypted volume another secret. No data is written: its key stays, and so do the secrets of its
    /// clones. Durable on return; after a crash the old secret unlocks it, or the new one.
    ///
    /// # Errors
    /// As [`Store::unlock`]; `ReadOnly`.
    pub fn rekey(&self, volume: &str, old: &Secret, new: &Secret) -> Result<()> {
        self.inner.check_writable()?;
        let (id, slot, raw) = self.inner.unwrap(volume, old)?;
        let wrapped = crypt::wrap(&raw, slot.family, new, self.salt()?)?;
        self.inner.command(|meta| {
            still_named(meta, volume, id)?;
            if meta.key_slot(id)? != slot {
                return Err(changed(volume).into());
            }
            meta.rewrap(id, wrapped);
            Ok(())
        })
    }

    fn salt(&self) -> Result<[u8; 16]> {
        let mut salt = [0; 16];
        self.inner.env.secret(&mut salt)?;
        Ok(salt)
    }
}

impl Inner {
    /// Unlocks a volume whose content somebody is about to use with the secret that the store was opened with, if that
    /// is the volume's.
    pub(crate) fn unlock_with_given(&self, find: impl Fn(&Meta) -> Option<VolumeId>) {
        let Some(secret) = self.secret.get() else { return };
        let (name, id, slot, uuid) = {
            let meta = self.meta();
            let found = find(&meta).map(|id| (id, meta.volume(id)));
            match found.filter(|(_, volume)| volume.key.is_none()) {
                Some((id, volume)) => match meta.key_slot(id) {
                    Ok(slot) => (volume.name.clone(), id, slot, volume.uuid),
                    Err(_) => return,
                },
                None => return,
            }
        };
        let not = self.not_with_given();
        let skip = not.locked.contains(&uuid) || not.others.contains(&(uuid, slot.salt));
        drop(not);
        if skip || !slot.is_for(secret) {
            return;
        }
        match crypt::unwrap(&slot, secret) {
            // Who else has changed it meanwhile is to be believed.
            Ok(Some(raw)) => drop(self.take_key(&name, &(id, slot, raw), false)),
            Ok(None) => drop(self.not_with_given().others.insert((uuid, slot.salt))),
            // There was no memory, for example: the next one tries again.
            Err(_) => {}
        }
    }

    /// Has a key in memory from now on; unless the volume was locked meanwhile, if nobody has asked to unlock it.
    fn take_key(&self, volume: &str, unwrapped: &Unwrapped, asked: bool) -> Result<()> {
        let (id, slot, raw) = unwrapped;
        let key = Arc::new(DataKey::new(raw));
        let mut meta = self.meta();
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

    /// A clone of a volume that somebody has locked is as locked as that one.
    pub(super) fn locked_as(&self, origin: [u8; 16], clone: [u8; 16]) {
        let mut not = self.not_with_given();
        if not.locked.contains(&origin) {
            not.locked.insert(clone);
        }
    }

    /// Locked after the metadata, by who has both.
    fn not_with_given(&self) -> MutexGuard<'_, NotGiven> {
        self.not_secret.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of a volume.
    fn unwrap(&self, volume: &str, secret: &Secret) -> Result<Unwrapped> {
        let (id, slot) = {
            let meta = self.meta();
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
        let key = store.inner.unwrap("v", &secret).unwrap();
        store.lock("v").unwrap();
        store.inner.take_key("v", &key, false).unwrap();
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
