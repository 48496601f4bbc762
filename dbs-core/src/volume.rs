//! A volume or snapshot opened for I/O.

use crate::error::Result;
use crate::info::MapRange;

/// An open volume or snapshot. Cloning the handle is cheap. Offsets and lengths are multiples of
/// 512 bytes inside the size. All calls block and may be made from many threads at once.
#[derive(Clone)]
pub struct Volume {}

#[allow(unused_variables)]
impl Volume {
    /// `volume` or `volume@snapshot`, as it was when opened.
    pub fn spec(&self) -> &str { todo!() }
    /// Current size in bytes.
    pub fn size(&self) -> u64 { todo!() }
    /// Whether writes are refused.
    pub fn read_only(&self) -> bool { todo!() }
    /// Fills `buf` from `offset`.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> { todo!() }
    /// Writes `buf` at `offset`; with `fua` it is durable on return, with all acknowledged before.
    pub fn write_at(&self, offset: u64, buf: &[u8], fua: bool) -> Result<()> { todo!() }
    /// Gives up the content of the whole blocks inside the range: they read as zeros afterwards,
    /// and space comes back. Partial blocks at the edges keep their content.
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> { todo!() }
    /// Makes the range read as zeros, to the byte.
    pub fn write_zeroes(&self, offset: u64, length: u64, fua: bool) -> Result<()> { todo!() }
    /// Makes everything acknowledged so far durable.
    pub fn flush(&self) -> Result<()> { todo!() }
    /// The map of the range, in order and without gaps, at most `limit` entries (the last one
    /// ends where a further call continues).
    pub fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> { todo!() }
}
