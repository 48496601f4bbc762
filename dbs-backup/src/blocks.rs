//! What backups are made of, and what they are restored to.

use crate::config::BackupConfig;
use dbs_core::Result;
use std::ops::Range;

/// A snapshot to back up. Many threads read it at once.
#[allow(clippy::missing_errors_doc)]
pub trait Source: Sync {
    /// Bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset`, inside the size.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Calls `found` with ranges of bytes that hold all data, or that hold all differences to the snapshot of the
    /// backup `base`. What is outside of them reads as zeros, or is as it was there. `false`, before any range, says
    /// that this snapshot, the very same one, is not known here.
    fn ranges(
        &self,
        base: Option<&BackupConfig>,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<bool>;
    /// Checks, when all was read, that it was the same all the time.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// A volume that is filled from a backup. Many threads write it at once, each a range of its own.
#[allow(clippy::missing_errors_doc)]
pub trait Target: Sync {
    /// Bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset`, inside the size: only for [`crate::Onto::Anything`].
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Writes `buf` at `offset`, inside the size.
    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()>;
    /// Makes a range read as zeros: not for [`crate::Onto::Empty`].
    fn zero(&self, offset: u64, length: u64) -> Result<()>;
    /// Makes everything written durable.
    fn flush(&self) -> Result<()>;
}

/// Whether all bytes are 0.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
