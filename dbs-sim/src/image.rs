//! The file outside the store that some volumes rest on. It has no part in any crash.

use crate::content::{SECTOR, Tag, fill};
use dbs_core::info::VolumeInfo;
use dbs_core::{Backing, Error, ErrorKind, Secret, Store};
use std::io;
use std::sync::{Arc, OnceLock};

/// Its sectors: more than an extent, and no whole blocks.
pub const SECTORS: u64 = 203;

/// Whose its content is: no operation's.
#[must_use]
pub fn tag() -> Tag {
    Tag::new(u32::MAX, u32::MAX)
}

/// Whether a volume that is created with so many sectors rests on it.
#[must_use]
pub fn is_below(sectors: u16) -> bool {
    u64::from(sectors) >= SECTORS && sectors % 5 == 2
}

/// Whether a volume that is created with so many sectors is encrypted, by a machine that encrypts some.
#[must_use]
pub fn is_encrypted(sectors: u16) -> bool {
    !is_below(sectors) && sectors % 3 < 2
}

/// What unlocks it: one of two.
#[must_use]
pub fn secret(second: bool) -> Secret {
    Secret::KeyFile([7 + u8::from(second); 32].into())
}

/// Gives a volume the other one of the two.
///
/// # Errors
/// Those of the store.
pub fn rekey(store: &Store, volume: &str) -> Result<(), Error> {
    let [first, second] = [false, true].map(secret);
    match store.rekey(volume, &first, &second) {
        Err(error) if error.kind() == ErrorKind::Invalid => store.rekey(volume, &second, &first),
        done => done,
    }
}

/// Unlocks a volume, if it is encrypted, and says whether the second secret does that.
///
/// # Panics
/// If none does.
#[must_use]
pub fn unlock(store: &Store, volume: &VolumeInfo) -> Option<bool> {
    volume.encryption.as_ref()?;
    let unlocks = |second: &bool| store.unlock(&volume.name, &secret(*second)).is_ok();
    Some([false, true].into_iter().find(unlocks).expect("its secret is one of the two"))
}

/// Locks all volumes that nobody has open.
pub fn lock_all(store: &Store) {
    // Those that are not encrypted say so.
    store.volumes(false).iter().for_each(|volume| drop(store.lock(&volume.name)));
}

/// Unlocks all volumes.
///
/// # Panics
/// As [`unlock`].
pub fn unlock_all(store: &Store) {
    for volume in store.volumes(false) {
        let _second = unlock(store, &volume);
    }
}

struct Image(Vec<u8>);

impl Backing for Image {
    fn identity(&self) -> &str {
        "the image of the simulation"
    }

    fn name(&self) -> String {
        "the image".to_owned()
    }

    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.copy_from_slice(&self.0[offset as usize..][..buf.len()]);
        Ok(())
    }
}

/// The file.
#[must_use]
pub fn file() -> &'static Arc<dyn Backing> {
    static FILE: OnceLock<Arc<dyn Backing>> = OnceLock::new();
    FILE.get_or_init(|| {
        let mut bytes = vec![0; SECTORS as usize * SECTOR];
        fill(&mut bytes, 0, tag());
        Arc::new(Image(bytes))
    })
}

/// The store, with the file, and with all its volumes unlocked.
///
/// # Panics
/// If a volume cannot be unlocked.
#[must_use]
pub fn given(store: Store) -> Store {
    unlock_all(&store);
    // There is one for all stores, and it stays.
    let _ = store.attach_backing(Arc::clone(file()));
    store
}
