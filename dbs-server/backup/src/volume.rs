//! Snapshots and volumes of a store, as backups need them.

use dbs_backup::config::{BackupConfig, CREATED, LABEL_SIZE, Map};
use dbs_backup::{Source, Target};
use dbs_core::info::{MapRange, RangeState, SnapshotInfo};
use dbs_core::{Error, ErrorKind, Result};
use dbs_transfer::{BlockAccess, StoreAccess, check_same, check_whole};
use jiff::Timestamp;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The label with the identity of the snapshot: names are used again.
const LABEL_UUID: &str = "dbs-snapshot-uuid";
/// Bytes whose differences are asked for at once, which bounds the answer.
const DIFF_BYTES: u64 = 256 << 20;
/// Entries of a map asked for at once.
const MAP_LIMIT: usize = 4096;

/// A snapshot that is backed up.
pub struct SnapshotSource<'a> {
    store: &'a (dyn StoreAccess + Sync),
    snapshot: SnapshotInfo,
    access: Box<dyn BlockAccess>,
    /// What it is compared with: while it is open it is not deleted.
    base: Mutex<Option<(SnapshotInfo, Box<dyn BlockAccess>)>>,
}

impl<'a> SnapshotSource<'a> {
    /// Opens it.
    ///
    /// # Errors
    /// `NotFound`; those of the store.
    pub fn open(store: &'a (dyn StoreAccess + Sync), volume: &str, snapshot: &str) -> Result<Self> {
        let info = store.snapshot_info(volume, snapshot)?;
        let access = store.open(&format!("{volume}@{snapshot}"))?;
        let source = Self { store, snapshot: info, access, base: Mutex::new(None) };
        check_whole(store, [&source.snapshot])?;
        Ok(source)
    }

    /// What the backup says of it for the next one, and for a restore.
    pub fn labels(&self) -> Map {
        let mut labels = Map::from([
            (LABEL_UUID.to_owned(), self.snapshot.uuid.clone()),
            (LABEL_SIZE.to_owned(), self.access.size().to_string()),
        ]);
        let created = Timestamp::from_nanosecond(self.snapshot.created_ns.into());
        // 0 says that it is not known.
        if let (Ok(created), 1..) = (created, self.snapshot.created_ns) {
            let text = created.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            labels.insert(CREATED.to_owned(), text);
        }
        labels
    }

    /// Opens the snapshot of an earlier backup, if it is the very same one.
    fn open_base(&self, base: &BackupConfig) -> Result<bool> {
        let (volume, name) = (&self.snapshot.volume, &base.snapshot_name);
        let uuid = base.labels.as_ref().and_then(|labels| labels.get(LABEL_UUID));
        let mut snapshots = self.store.snapshots(volume)?.into_iter();
        let found = snapshots.find(|s| s.name == *name && Some(&s.uuid) == uuid);
        let Some(found) = found else { return Ok(false) };
        let access = match self.store.open(&format!("{volume}@{name}")) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            access => access?,
        };
        match check_whole(self.store, [&found]) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
                return Ok(false);
            }
            checked => checked?,
        }
        *self.base.lock().unwrap_or_else(PoisonError::into_inner) = Some((found, access));
        Ok(true)
    }

    /// Where the base ends.
    fn base_size(&self) -> u64 {
        let base = self.base.lock().unwrap_or_else(PoisonError::into_inner);
        base.as_ref().map_or(0, |(_, access)| access.size())
    }

    fn differences(
        &self,
        base: &str,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let (size, mut at) = (self.access.size(), 0);
        let end = self.base_size();
        if end < size {
            // Zeros behind it are no difference, and earlier versions had other bytes there in its last block.
            found(end..end + 1)?;
        }
        while at < size {
            let length = DIFF_BYTES.min(size - at);
            let (volume, name) = (&self.snapshot.volume, Some(&*self.snapshot.name));
            for range in self.store.diff(volume, Some(base), name, at, length)? {
                found(range.offset..range.offset.saturating_add(range.length))?;
            }
            at += length;
        }
        self.check()
    }
}

impl Source for SnapshotSource<'_> {
    fn size(&self) -> u64 {
        self.access.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.access.read_at(offset, buf)
    }

    fn check(&self) -> Result<()> {
        let base = self.base.lock().unwrap_or_else(PoisonError::into_inner);
        let base = base.iter().map(|(base, _)| base);
        check_same(self.store, std::iter::once(&self.snapshot).chain(base))
    }

    fn ranges(
        &self,
        base: Option<&BackupConfig>,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<bool> {
        match base {
            Some(base) if !self.open_base(base)? => return Ok(false),
            Some(base) => self.differences(&base.snapshot_name, found)?,
            None => each_data(&*self.access, 0, self.access.size(), &mut |range| {
                found(range.offset..range.offset + range.length)
            })?,
        }
        Ok(true)
    }
}

/// A new volume that is filled from a backup, by one thread at a time: a server lets only one connection fill a volume.
pub struct Filled {
    size: u64,
    access: Mutex<Box<dyn BlockAccess>>,
}

impl Filled {
    /// Opens it.
    ///
    /// # Errors
    /// Those of the store.
    pub fn open(store: &dyn StoreAccess, volume: &str) -> Result<Self> {
        let access = store.open_to_fill(volume, false)?;
        Ok(Self { size: access.size(), access: Mutex::new(access) })
    }

    fn access(&self) -> MutexGuard<'_, Box<dyn BlockAccess>> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target for Filled {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.access().read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.access().write_at(offset, buf)
    }

    /// What holds no data reads as zeros already.
    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        let access = self.access();
        each_data(&**access, offset, length, &mut |range| {
            access.write_zeroes(range.offset, range.length)
        })
    }

    fn flush(&self) -> Result<()> {
        self.access().flush()
    }
}

/// Calls `found` for ranges with data. A server is not trusted to give a map that is complete and in order.
fn each_data(
    access: &dyn BlockAccess,
    offset: u64,
    length: u64,
    found: &mut dyn FnMut(&MapRange) -> Result<()>,
) -> Result<()> {
    let (mut at, end) = (offset, offset + length);
    while at < end {
        let before = at;
        for range in access.map(at, end - at, MAP_LIMIT)? {
            if range.offset != at || !(1..=end - at).contains(&range.length) {
                break;
            }
            at += range.length;
            if range.state == RangeState::Data {
                found(&range)?;
            }
        }
        if at == before {
            return Err(Error::corrupt(format!("the map of the volume breaks off at {at}")));
        }
    }
    Ok(())
}
