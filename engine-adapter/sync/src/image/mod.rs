//! A layer as others see it: a sparse file.
//!
//! Upstream keeps each layer of a volume in a sparse file of its own, copies such files between
//! replicas and compares them by a checksum over their bytes. Here a layer is a share of a store;
//! [`Source`] and [`Sink`] present it as that file. A **hole** of a layer means "look in the
//! parent": it is a fact of its own, not just zeros.
//!
//! All calls block and may be made from many threads at once.

use dbs_core::{Error, Result};

mod bytes;
mod crc;
mod file;
mod hash;
mod layer;
mod layer_sink;
mod record;

pub use bytes::Bytes;
pub use crc::Crc64;
pub use file::{SparseFile, open_to_map};
pub use hash::{HashOptions, Hashed, hash, hash_recorded};
pub use layer::{LayerSource, VolumeSource, layer_stamp};
pub use layer_sink::LayerSink;
pub use record::{Checksum, METHOD, Record};

/// The grain of holes and data in bytes: block size of a volume and of upstream's files.
pub const GRAIN: u64 = 4096;

/// A run of data or a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// First byte: a multiple of [`GRAIN`].
    pub offset: u64,
    /// Length in bytes: a multiple of [`GRAIN`], except at the end of an image of odd size.
    pub length: u64,
    /// Whether there is data; a hole otherwise.
    pub data: bool,
}

impl Interval {
    /// The first byte behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// A sparse image to read.
pub trait Source: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Data and holes from `offset` (a multiple of [`GRAIN`]) on: in order, without gaps or empty
    /// intervals, at most `limit` (at least 1) of them. The last one ends at the size, or where the
    /// next call should start. Nothing only when `offset` is not inside the size. Neighbours may be
    /// of one kind.
    ///
    /// # Errors
    /// Of the storage.
    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>>;

    /// Fills `buf` from `offset`; holes read as zeros. Offset and length are multiples of [`GRAIN`],
    /// except at the image's end.
    ///
    /// # Errors
    /// `Invalid` outside the image; of the storage.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
}

/// An image that is being received. It may hold an older version, to be changed into the new one;
/// what is neither written nor made a hole stays as it was.
pub trait Sink: Source {
    /// Whether there was an image of this name before: then a sender compares before it sends.
    fn existed(&self) -> bool;

    /// Makes the image `size` bytes long, creating it if need be. Called before the first change;
    /// never called when the image turns out to be equal already. May be called again.
    ///
    /// # Errors
    /// `Invalid` for a size it cannot have; of the storage.
    fn open(&self, size: u64) -> Result<()>;

    /// Writes data; `offset` and length are multiples of [`GRAIN`] except at the image's end.
    ///
    /// # Errors
    /// `Invalid` outside the image, `NoSpace`; of the storage.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;

    /// Makes a range a hole; `offset` and length as for [`Sink::write_at`].
    ///
    /// # Errors
    /// `Invalid` outside the image; of the storage.
    fn hole(&self, offset: u64, length: u64) -> Result<()>;

    /// The checksum on record, if the image has not changed since.
    ///
    /// # Errors
    /// Of the storage.
    fn recorded(&self) -> Result<Option<Record>>;

    /// The sender has said goodbye: makes what arrived durable and records the checksum, if there
    /// is a trustworthy one. Called at most once, also when [`Sink::open`] never was.
    ///
    /// # Errors
    /// Of the storage.
    fn finish(&self, checksum: Option<&Checksum>) -> Result<()>;

    /// The transfer ended without [`Sink::finish`]: what has arrived is of no use by itself.
    fn abandon(&self);
}

/// Refuses ranges that reach behind `size`.
fn check_inside(offset: u64, length: u64, size: u64) -> Result<()> {
    if offset.checked_add(length).is_none_or(|end| end > size) {
        let text = format!("range {offset}+{length} is outside the image of {size} bytes");
        return Err(Error::invalid(text));
    }
    Ok(())
}
