//! Opening volumes in somebody's name.

use super::{Handle, Volume};
use crate::error::{Error, Result};
use crate::info::{Holder, HolderInfo};
use crate::meta::holders::Target;
use crate::meta::names;
use crate::store::{Inner, Store};
use std::sync::Arc;

/// Name of the snapshot that marks a volume as being received from a stream: as long as the volume is
/// rebuilding, its head is filled, and what its snapshots show does not change.
pub const RECEIVING: &str = "dbs-receiving";

/// Somebody's claim to the volume of a name, until it is dropped.
pub struct Claim {
    store: Arc<Inner>,
    number: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.store.meta().remove_holder(self.number);
    }
}

impl Store {
    /// Opens a volume (`name`) for reading and writing, or a snapshot (`name@snapshot`) for
    /// reading. The handle keeps it from being deleted.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`.
    pub fn volume(&self, spec: &str) -> Result<Volume> {
        self.open_volume(spec, None, false)
    }

    /// As [`Store::volume`], in the name of a holder, of whom others are told: as long as the handle
    /// lives, its volume is neither rolled back nor shrunk.
    ///
    /// # Errors
    /// As [`Store::volume`].
    pub fn volume_for(&self, spec: &str, holder: Holder) -> Result<Volume> {
        self.open_volume(spec, Some(holder), false)
    }

    /// Opens a snapshot (`name@snapshot`) for who takes its blocks elsewhere as they are stored: what is encrypted is not
    /// decrypted, and needs no key. Blocks are told apart, and checked, as ever.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for a volume; `Busy` for a snapshot of one that is rebuilding.
    pub fn snapshot_as_stored(&self, spec: &str, holder: Option<Holder>) -> Result<Volume> {
        if !spec.contains('@') {
            return Err(Error::invalid(format!(
                "`{spec}` is a volume: only a snapshot is read as it is stored"
            )));
        }
        self.open_volume(spec, holder, true)?.whole()
    }

    /// Opens a volume or snapshot for its users: as [`Store::volume`], but nothing whose content is
    /// incomplete: see [`Volume::complete`].
    ///
    /// # Errors
    /// `NotFound`, `Invalid`; `Busy` for a volume that is rebuilding, and for its snapshots.
    pub fn complete_volume(&self, spec: &str) -> Result<Volume> {
        self.volume(spec)?.complete()
    }

    /// Opens a volume that is rebuilding, for the only one who fills it.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is not rebuilding; `Busy` if somebody has it open.
    pub fn open_to_fill(&self, name: &str, holder: Option<Holder>) -> Result<Volume> {
        self.inner.unlock_with_given(|meta| meta.find_volume(name).ok());
        self.open_filling(name, holder, false)
    }

    /// As [`Store::open_to_fill`], for who has blocks as [`Store::snapshot_as_stored`] shows them, of a volume of the same
    /// family: what is written is encrypted already, and needs no key. Only whole blocks mean something.
    ///
    /// # Errors
    /// As there.
    pub fn open_to_fill_as_stored(&self, name: &str, holder: Option<Holder>) -> Result<Volume> {
        self.open_filling(name, holder, true)
    }

    fn open_filling(&self, name: &str, holder: Option<Holder>, as_stored: bool) -> Result<Volume> {
        let since_ns = self.inner.now_ns();
        let mut meta = self.inner.meta();
        let volume = meta.find_volume(name)?;
        if !meta.is_rebuilding(volume) {
            return Err(Error::invalid(format!("volume `{name}` is complete: nobody may fill it")));
        }
        meta.check_closed(volume)?;
        if !as_stored {
            meta.check_not_locked(volume)?;
        }
        meta.opened(volume, None);
        let pace = Arc::clone(&meta.volume(volume).pace);
        let encrypted = meta.is_encrypted(volume) && !as_stored;
        let holder = holder.map(|holder| meta.add_holder(Target::Volume(volume), holder, since_ns));
        drop(meta);
        let (store, spec) = (Arc::clone(&self.inner), name.to_owned());
        let snapshot = None;
        let handle = Handle { store, volume, snapshot, spec, pace, encrypted, as_stored, holder };
        Ok(Volume { handle: Arc::new(handle) })
    }

    /// Claims the volume of this name, now and should there be one later, for a holder who opens it
    /// by itself.
    #[must_use]
    pub fn claim(&self, name: &str, holder: Holder) -> Claim {
        let since_ns = self.inner.now_ns();
        let number = self.inner.meta().add_holder(Target::Name(name.to_owned()), holder, since_ns);
        Claim { store: Arc::clone(&self.inner), number }
    }

    /// Everybody who has something of the store open and has said who it is.
    #[must_use]
    pub fn holders(&self) -> Vec<HolderInfo> {
        self.inner.meta().list_holders()
    }

    fn open_volume(&self, spec: &str, holder: Option<Holder>, as_stored: bool) -> Result<Volume> {
        if !as_stored {
            let name = spec.split_once('@').map_or(spec, |(name, _)| name);
            self.inner.unlock_with_given(|meta| meta.find_volume(name).ok());
        }
        let since_ns = holder.as_ref().map_or(0, |_| self.inner.now_ns());
        let mut meta = self.inner.meta();
        let (volume, snapshot) = match names::split(spec)? {
            (name, None) => (meta.find_volume(name)?, None),
            (name, Some(snapshot)) => {
                let (volume, snapshot) = meta.find_snapshot(name, snapshot)?;
                (volume, Some(snapshot))
            }
        };
        meta.opened(volume, snapshot);
        let pace = Arc::clone(&meta.volume(volume).pace);
        let encrypted = meta.is_encrypted(volume) && !as_stored;
        let target = snapshot.map_or(Target::Volume(volume), |id| Target::Snapshot(volume, id));
        let holder = holder.map(|holder| meta.add_holder(target, holder, since_ns));
        drop(meta);
        let (store, spec) = (Arc::clone(&self.inner), spec.to_owned());
        let handle = Handle { store, volume, snapshot, spec, pace, encrypted, as_stored, holder };
        Ok(Volume { handle: Arc::new(handle) })
    }
}

impl Volume {
    /// The same, unless it is locked, or a volume whose content is incomplete, or a snapshot of one. Of a volume that is
    /// received, which has a snapshot with the name [`RECEIVING`], the snapshots are complete. Nobody begins to
    /// fill the volume as long as a handle of the volume itself lives.
    ///
    /// # Errors
    /// `Busy` for a volume that is rebuilding, and for its snapshots; `Locked`.
    pub fn complete(self) -> Result<Self> {
        self.check_not_locked()?;
        self.whole()
    }

    /// Refuses a volume that is locked, or a snapshot of one.
    ///
    /// # Errors
    /// `Locked`; `Corrupt` if its key is lost.
    pub fn check_not_locked(&self) -> Result<()> {
        self.store().meta().check_not_locked(self.ids().0)
    }

    /// As [`Volume::complete`], also of one that is locked: for who holds it, and reads and writes nothing yet.
    ///
    /// # Errors
    /// `Busy`, as there.
    pub fn whole(self) -> Result<Self> {
        let (id, snapshot) = self.ids();
        let meta = self.store().meta();
        let volume = meta.volume(id);
        let whole = snapshot.is_some() && volume.snapshots.contains_key(RECEIVING);
        if whole || !meta.is_rebuilding(id) {
            drop(meta);
            return Ok(self);
        }
        let name = volume.name.clone();
        drop(meta);
        Err(Error::busy(format!(
            "volume `{name}` is incomplete: an import, a receive or a rebuild fills it, or was \
             stopped half way; finish that, or delete the volume"
        )))
    }
}

#[cfg(test)]
mod tests {
    use crate::info::{Holder, HolderKind};
    use crate::store::{InitOptions, OpenOptions, Store};
    use crate::{ErrorKind, Result};

    fn holder(who: &str) -> Holder {
        Holder {
            kind: HolderKind::Nbd,
            who: who.to_owned(),
            id: Some(7),
            writes: true,
            alone: false,
            remedy: "disconnect it".to_owned(),
        }
    }

    fn store(dir: &std::path::Path) -> Store {
        let path = dir.join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 8 << 20).unwrap();
        store.create_snapshot("v", "s", &Default::default()).unwrap();
        store
    }

    fn refused(result: Result<()>, by: &[&str]) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        for text in by {
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn nothing_is_taken_from_under_a_holder_whom_errors_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let open = store.volume_for("v", holder("NBD client a")).unwrap();
        let second = store.volume_for("v", holder("NBD client b")).unwrap();
        let names = ["NBD client a since 20", "Z, NBD client b", "disconnect it"];
        refused(store.rollback("v", "s"), &names);
        refused(store.resize_volume("v", 4096), &names);
        refused(store.delete_volume("v"), &names);
        store.resize_volume("v", 16 << 20).unwrap();
        // It is the same volume, whatever it is called.
        store.rename_volume("v", "w").unwrap();
        let found: Vec<_> = store.holders().into_iter().map(|held| held.volume).collect();
        assert_eq!(found, ["w", "w"]);
        drop(second);
        refused(store.resize_volume("w", 4096), &["`w`", "NBD client a since"]);
        drop(open);
        store.rollback("w", "s").unwrap();
        store.resize_volume("w", 4096).unwrap();
        assert!(store.holders().is_empty());
    }

    #[test]
    fn a_holder_of_a_snapshot_keeps_it_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let open = store.volume_for("v@s", holder("NBD client a")).unwrap();
        refused(store.delete_snapshot("v", "s"), &["`v@s`", "NBD client a since"]);
        store.rollback("v", "s").unwrap();
        store.resize_volume("v", 4096).unwrap();
        drop(open);
        store.delete_snapshot("v", "s").unwrap();
    }

    #[test]
    fn a_claim_is_to_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let claim = store.claim("later", holder("replica"));
        store.create_volume("later", 8 << 20).unwrap();
        refused(store.resize_volume("later", 4096), &["open by replica since"]);
        store.resize_volume("v", 4096).unwrap();
        drop(claim);
        store.resize_volume("later", 4096).unwrap();
    }
}
