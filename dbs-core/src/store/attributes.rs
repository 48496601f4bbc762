//! Commands that say something of a volume or snapshot and leave its content alone. Each but
//! [`Store::stage_revision`] is durable when it returns.

use super::expected::Expected;
use super::{Store, still_named};
use crate::error::{Error, Result};
use crate::info::{Labels, VolumeLimits};
use crate::meta::locks::Space;
use crate::units::BLOCK_BYTES;

/// Longest burst of a volume's limits.
const BURST_SECONDS_MAX: u32 = 3600;

impl Store {
    /// Sets or clears the protection from deletion.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_protected(&self, volume: &str, snapshot: &str, protected: bool) -> Result<()> {
        self.inner.command(|meta| {
            let (_, id) = meta.find_snapshot(volume, snapshot)?;
            meta.set_protected(id, protected);
            Ok(())
        })
    }

    /// Sets a volume's revision counter, a number its owner keeps. It becomes part of the next
    /// commit, whoever asks for one, and costs nothing until then: after a crash there is this
    /// value or an older one. A commit that begins after this call makes it durable, or a later
    /// one, and nobody finds it without everything that was acknowledged before this call.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `Poisoned`.
    pub fn stage_revision(&self, volume: &str, revision: u64) -> Result<()> {
        self.inner.check_writable()?;
        let mut meta = self.inner.meta();
        let id = meta.find_volume(volume)?;
        meta.stage_revision(id, revision);
        Ok(())
    }

    /// Sets how fast the clients of a volume may use it. It holds at once, for all that have the volume open.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if the bandwidth is less than a block in a second, or the burst more than an hour.
    pub fn set_limits(&self, volume: &str, mut limits: VolumeLimits) -> Result<()> {
        if (1..BLOCK_BYTES).contains(&limits.bandwidth) {
            return Err(Error::invalid(format!(
                "a bandwidth of {} bytes in a second is less than {BLOCK_BYTES}, the least",
                limits.bandwidth
            )));
        }
        if limits.burst_seconds > BURST_SECONDS_MAX {
            return Err(Error::invalid(format!(
                "a burst of {} s is longer than {BURST_SECONDS_MAX} s, the longest",
                limits.burst_seconds
            )));
        }
        if limits.is_none() {
            limits = VolumeLimits::default();
        }
        self.inner.command(|meta| {
            let id = meta.find_volume(volume)?;
            meta.set_limits(id, limits);
            Ok(())
        })
    }

    /// Replaces all labels of a snapshot.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` if they do not fit.
    pub fn set_labels(&self, volume: &str, snapshot: &str, labels: &Labels) -> Result<()> {
        self.inner.command(|meta| {
            let (_, id) = meta.find_snapshot(volume, snapshot)?;
            meta.set_labels(id, labels)
        })
    }

    /// Says that a snapshot's owner has no more use for it, or that it has. A retired snapshot is
    /// listed and kept until it is deleted, but content of it that nothing else shows may be given
    /// up before: it is no base any more for a rollback or a clone.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_retired(&self, volume: &str, snapshot: &str, retired: bool) -> Result<()> {
        self.inner.command(|meta| {
            let (_, id) = meta.find_snapshot(volume, snapshot)?;
            meta.set_retired(id, retired);
            Ok(())
        })
    }

    /// Says that a volume's content is incomplete, or that it is complete. That it is remembered is
    /// all: whoever serves the volume decides what it means for readers.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_rebuilding(&self, volume: &str, rebuilding: bool) -> Result<()> {
        self.set_rebuilding_if(volume, rebuilding, &Expected::default())
    }

    /// As [`Store::set_rebuilding`], of a volume that is as expected.
    ///
    /// # Errors
    /// `NotFound`; `Exists` if it is not as expected.
    pub fn set_rebuilding_if(
        &self,
        volume: &str,
        rebuilding: bool,
        expected: &Expected,
    ) -> Result<()> {
        let id = self.inner.meta().find_volume(volume)?;
        // Layers being written are written before the volume counts as complete.
        let _layers =
            (!rebuilding).then(|| self.inner.hold_in(Space::Snapshots(id), 0..u64::MAX, true));
        self.inner.command(|meta| {
            still_named(meta, volume, id)?;
            expected.check_volume(meta, id)?;
            if rebuilding {
                meta.note_rebuild(id);
            }
            meta.set_rebuilding(id, rebuilding);
            Ok(())
        })
    }
}
