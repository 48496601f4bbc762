//! How a volume is attached, and what its block device tells its users of itself.

use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, Result};
use dbs_reactor::ublk::{DEPTH_MAX, Discard, Params, feature};

/// Most queues of a device.
pub const QUEUES_MAX: u16 = 64;
/// Bytes of one request at most: larger ones gain nothing, and all of a queue's must fit into memory.
pub(super) const MAX_IO_BYTES: u32 = 1 << 20;
/// Bytes given up with one request at most, so that it does not take long.
const MAX_DISCARD_BYTES: u64 = 1 << 30;
/// Bytes zeroed with one request at most: what the limits of a volume are charged with at once.
const MAX_ZEROES_BYTES: u64 = 32 << 20;
/// What every device is made with.
pub(super) const FLAGS: u64 = feature::USER_COPY
    | feature::USER_RECOVERY
    | feature::USER_RECOVERY_REISSUE
    | feature::IOCTL_ENCODE;

/// How to attach a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachOptions {
    /// Queues, each with a thread; the kernel makes no more of them than there are processors.
    pub queues: u16,
    /// Requests of a queue at a time.
    pub depth: u16,
    /// Whether the device refuses writes; a snapshot's always does.
    pub read_only: bool,
    /// Number of the device; the kernel chooses one otherwise.
    pub id: Option<u32>,
}

impl Default for AttachOptions {
    fn default() -> Self {
        Self { queues: 1, depth: 128, read_only: false, id: None }
    }
}

impl AttachOptions {
    /// # Errors
    /// `Invalid` with the bound that one of them passes.
    pub(super) fn check(&self) -> Result<()> {
        if !(1..=QUEUES_MAX).contains(&self.queues) {
            return Err(Error::invalid(format!("a device has 1 to {QUEUES_MAX} queues")));
        }
        if !(1..=DEPTH_MAX).contains(&self.depth) {
            return Err(Error::invalid(format!("a queue has a depth of 1 to {DEPTH_MAX}")));
        }
        Ok(())
    }
}

/// What a volume's block device tells its users.
///
/// Sectors have 512 bytes, as an image that was written anywhere else may have a partition table in
/// such sectors, and volumes are multiples of them; but blocks have 4096, so that file systems, which
/// look at the physical size, never write less.
pub(super) fn params(size: u64, read_only: bool) -> Params {
    let block = BLOCK_BYTES as u32;
    Params {
        size,
        logical_block: 512,
        physical_block: block,
        io_min: block,
        io_opt: block,
        max_io: MAX_IO_BYTES,
        read_only,
        volatile_cache: !read_only,
        discard: (!read_only).then_some(Discard {
            granularity: block,
            max_discard: MAX_DISCARD_BYTES,
            max_zeroes: MAX_ZEROES_BYTES,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_suit_file_systems_and_old_images() {
        let writable = params(10 << 20, false);
        assert_eq!((writable.logical_block, writable.physical_block), (512, 4096));
        assert!(writable.volatile_cache && !writable.read_only && writable.discard.is_some());
        let params = params(512, true);
        assert!(params.read_only && !params.volatile_cache && params.discard.is_none());
        assert_eq!(params.size, 512);
    }
}
