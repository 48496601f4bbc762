//! What sending and receiving need of a store.

use crate::BlockAccess;
use dbs_core::info::{Labels, MapRange, SnapshotInfo, VolumeInfo};
use dbs_core::store::{SnapshotOptions, WrappedKey};
use dbs_core::{Error, Result, Store};

/// A store, open in this process or served by another. Errors are those of the store or the
/// connection.
#[allow(clippy::missing_errors_doc)]
pub trait StoreAccess: Sync {
    /// As [`Store::volume_info`]; the usage is not looked at.
    fn volume_info(&self, volume: &str) -> Result<VolumeInfo>;
    /// As [`Store::volumes`]; the usage is not looked at.
    fn volumes(&self) -> Result<Vec<VolumeInfo>>;
    /// As [`Store::snapshots`]; the usage is not looked at.
    fn snapshots(&self, volume: &str) -> Result<Vec<SnapshotInfo>>;
    /// As [`Store::snapshot_info`]; the usage is not looked at.
    fn snapshot_info(&self, volume: &str, snapshot: &str) -> Result<SnapshotInfo>;
    /// As [`Store::children`].
    fn children(&self, volume: &str, snapshot: Option<&str>) -> Result<Vec<String>>;
    /// As [`Store::create_rebuilding`].
    fn create_rebuilding(&self, name: &str, size: u64) -> Result<()>;
    /// As [`Store::create_wrapped_rebuilding`].
    fn create_wrapped(&self, name: &str, size: u64, key: &WrappedKey) -> Result<()>;
    /// As [`Store::wrapped_key`].
    fn wrapped_key(&self, volume: &str) -> Result<WrappedKey>;
    /// As [`Store::clone_rebuilding`].
    fn clone_rebuilding(&self, volume: &str, snapshot: &str, new: &str) -> Result<()>;
    /// As [`Store::set_rebuilding`], that a volume is complete.
    fn complete(&self, volume: &str) -> Result<()>;
    /// As [`Store::resize_volume`].
    fn resize_volume(&self, name: &str, size: u64) -> Result<()>;
    /// As [`Store::create_snapshot`].
    fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<()>;
    /// As [`Store::delete_snapshot`].
    fn delete_snapshot(&self, volume: &str, name: &str) -> Result<()>;
    /// As [`Store::rollback`].
    fn rollback(&self, volume: &str, snapshot: &str) -> Result<()>;
    /// As [`Store::set_labels`]; durable on return.
    fn set_labels(&self, volume: &str, snapshot: &str, labels: &Labels) -> Result<()>;
    /// As [`Store::diff`].
    fn diff(
        &self,
        volume: &str,
        from: Option<&str>,
        to: Option<&str>,
        offset: u64,
        length: u64,
    ) -> Result<Vec<MapRange>>;
    /// As [`Store::complete_volume`].
    fn open(&self, spec: &str) -> Result<Box<dyn BlockAccess>>;
    /// As [`Store::snapshot_as_stored`].
    fn open_stored(&self, spec: &str) -> Result<Box<dyn BlockAccess>>;
    /// As [`Store::open_to_fill`], or [`Store::open_to_fill_as_stored`] if `stored`.
    fn open_to_fill(&self, volume: &str, stored: bool) -> Result<Box<dyn BlockAccess>>;
}

impl StoreAccess for Store {
    fn volume_info(&self, volume: &str) -> Result<VolumeInfo> {
        Store::volume_info(self, volume)
    }

    fn volumes(&self) -> Result<Vec<VolumeInfo>> {
        Ok(Store::volumes(self, false))
    }

    fn snapshots(&self, volume: &str) -> Result<Vec<SnapshotInfo>> {
        Store::snapshots(self, volume, false)
    }

    fn snapshot_info(&self, volume: &str, snapshot: &str) -> Result<SnapshotInfo> {
        let found = self.observe(volume)?.snapshot(snapshot)?.snapshot_info()?;
        found.ok_or_else(|| Error::not_found(format!("no snapshot `{volume}@{snapshot}`")))
    }

    fn children(&self, volume: &str, snapshot: Option<&str>) -> Result<Vec<String>> {
        Store::children(self, volume, snapshot)
    }

    fn create_rebuilding(&self, name: &str, size: u64) -> Result<()> {
        Store::create_rebuilding(self, name, size).map(drop)
    }

    fn create_wrapped(&self, name: &str, size: u64, key: &WrappedKey) -> Result<()> {
        self.create_wrapped_rebuilding(name, size, key).map(drop)
    }

    fn wrapped_key(&self, volume: &str) -> Result<WrappedKey> {
        Store::wrapped_key(self, volume)
    }

    fn clone_rebuilding(&self, volume: &str, snapshot: &str, new: &str) -> Result<()> {
        Store::clone_rebuilding(self, volume, snapshot, new).map(drop)
    }

    fn complete(&self, volume: &str) -> Result<()> {
        self.set_rebuilding(volume, false)
    }

    fn resize_volume(&self, name: &str, size: u64) -> Result<()> {
        Store::resize_volume(self, name, size)
    }

    fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<()> {
        Store::create_snapshot(self, volume, name, options).map(drop)
    }

    fn delete_snapshot(&self, volume: &str, name: &str) -> Result<()> {
        Store::delete_snapshot(self, volume, name)
    }

    fn rollback(&self, volume: &str, snapshot: &str) -> Result<()> {
        Store::rollback(self, volume, snapshot)
    }

    fn set_labels(&self, volume: &str, snapshot: &str, labels: &Labels) -> Result<()> {
        Store::set_labels(self, volume, snapshot, labels)?;
        self.flush()
    }

    fn diff(
        &self,
        volume: &str,
        from: Option<&str>,
        to: Option<&str>,
        offset: u64,
        length: u64,
    ) -> Result<Vec<MapRange>> {
        Store::diff(self, volume, from, to, offset, length)
    }

    fn open(&self, spec: &str) -> Result<Box<dyn BlockAccess>> {
        Ok(Box::new(self.complete_volume(spec)?))
    }

    fn open_stored(&self, spec: &str) -> Result<Box<dyn BlockAccess>> {
        Ok(Box::new(self.snapshot_as_stored(spec, None)?))
    }

    fn open_to_fill(&self, volume: &str, stored: bool) -> Result<Box<dyn BlockAccess>> {
        Ok(Box::new(match stored {
            true => self.open_to_fill_as_stored(volume, None)?,
            false => Store::open_to_fill(self, volume, None)?,
        }))
    }
}
