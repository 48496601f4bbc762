//! The content of one head or snapshot of an image.

use super::Image;
use super::layout::{BITMAP_BYTES, BLOCK, EXTENT, RECORD_BYTES};
use super::tables::{Extent, read_exact};
use crate::error::{Error, Result};
use crate::info::{MapRange, RangeState};

/// Blocks of an extent.
const BLOCKS: u64 = EXTENT / BLOCK;

/// A head or snapshot, its chain flattened. It borrows the image and holds 8 bytes for each
/// stored extent it sees.
pub struct View<'a> {
    image: &'a Image,
    id: u16,
    size: u64,
    /// What is visible, ascending: of each logical extent the newest in the chain.
    extents: Vec<Extent>,
}

impl<'a> View<'a> {
    pub(super) fn new(image: &'a Image, id: u16, size: u64) -> Result<Self> {
        let mut found = Vec::new();
        for (age, snapshot) in image.chain(id)?.iter().enumerate() {
            found.extend(image.tables.extents(snapshot.id).iter().map(|&extent| (extent, age)));
        }
        found.sort_unstable_by_key(|(extent, age)| (extent.logical, *age));
        found.dedup_by_key(|(extent, _)| extent.logical);
        let extents: Vec<_> = found.into_iter().map(|(extent, _)| extent).collect();
        if let Some(last) = extents.last()
            && u64::from(last.logical) >= size / EXTENT
        {
            return Err(Error::corrupt(format!(
                "snapshot {id} holds extent {} of a volume of {} extents",
                last.logical,
                size / EXTENT
            )));
        }
        Ok(Self { image, id, size, extents })
    }

    /// Snapshot id.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// The stored extents it sees, ascending.
    pub(super) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Fills `buf` from `offset`, at any alignment.
    ///
    /// # Errors
    /// `Invalid` past the end; `Corrupt` where the image has lost the data; `Io`.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.check_range(offset, buf.len() as u64)?;
        let mut at = offset;
        let mut rest = buf;
        while !rest.is_empty() {
            let length = (EXTENT - at % EXTENT).min(rest.len() as u64);
            let (piece, tail) = rest.split_at_mut(length as usize);
            match self.extent_at(at / EXTENT) {
                None => piece.fill(0),
                Some(extent) => self.image.read_extent(extent, at % EXTENT, piece)?,
            }
            at += length;
            rest = tail;
        }
        Ok(())
    }

    /// The map of the range, in order and without gaps, at most `limit` entries (the last one
    /// ends where a further call continues).
    ///
    /// # Errors
    /// `Invalid` past the end; `Io`.
    pub fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        self.check_range(offset, length)?;
        let end = offset + length;
        let mut ranges = Vec::new();
        let mut at = offset;
        while at < end && ranges.len() <= limit {
            let next = self.extents.partition_point(|e| u64::from(e.logical) < at / EXTENT);
            let next = self.extents.get(next);
            match next.filter(|e| u64::from(e.logical) == at / EXTENT) {
                None => {
                    let hole_end = next.map_or(end, |e| u64::from(e.logical) * EXTENT).min(end);
                    push(&mut ranges, at, hole_end, RangeState::Hole);
                    at = hole_end;
                }
                Some(&extent) => {
                    let bitmap = self.image.bitmap(extent)?;
                    let extent_end = (at / EXTENT + 1) * EXTENT;
                    while at < extent_end.min(end) {
                        let block_end = ((at / BLOCK + 1) * BLOCK).min(end);
                        let stored = is_set(&bitmap, at / BLOCK % BLOCKS);
                        let state = if stored { RangeState::Data } else { RangeState::Hole };
                        push(&mut ranges, at, block_end, state);
                        at = block_end;
                    }
                }
            }
        }
        ranges.truncate(limit);
        Ok(ranges)
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(Error::invalid(format!(
                "{length} bytes at {offset} lie past the end of snapshot {}, {} bytes",
                self.id, self.size
            ))),
        }
    }

    fn extent_at(&self, logical: u64) -> Option<Extent> {
        let index = self.extents.binary_search_by_key(&logical, |e| u64::from(e.logical)).ok()?;
        self.extents.get(index).copied()
    }
}

impl Image {
    fn bitmap(&self, extent: Extent) -> Result<[u8; BITMAP_BYTES]> {
        let mut bitmap = [0; BITMAP_BYTES];
        let record = u64::from(extent.physical) * RECORD_BYTES as u64;
        let offset = self.tables.geometry.table + record + (RECORD_BYTES - BITMAP_BYTES) as u64;
        read_exact(&self.file, offset, &mut bitmap, "the extent table")?;
        Ok(bitmap)
    }

    /// Reads inside one extent, each run of stored blocks at once.
    pub(super) fn read_extent(&self, extent: Extent, within: u64, buf: &mut [u8]) -> Result<()> {
        let bitmap = self.bitmap(extent)?;
        let end = within + buf.len() as u64;
        let mut at = within;
        while at < end {
            let stored = is_set(&bitmap, at / BLOCK);
            let mut run_end = at;
            while run_end < end && is_set(&bitmap, run_end / BLOCK) == stored {
                run_end = (run_end / BLOCK + 1) * BLOCK;
            }
            let run_end = run_end.min(end);
            let piece = &mut buf[(at - within) as usize..(run_end - within) as usize];
            if stored {
                self.read_data(extent, at, piece)?;
            } else {
                piece.fill(0);
            }
            at = run_end;
        }
        Ok(())
    }

    fn read_data(&self, extent: Extent, within: u64, buf: &mut [u8]) -> Result<()> {
        let offset = self.tables.geometry.data + u64::from(extent.physical) * EXTENT + within;
        let end = offset + buf.len() as u64;
        let device_end = self.device_size.min(self.file_size);
        if end > device_end {
            return Err(Error::corrupt(format!(
                "extent {} of a volume is lost: its data, device extent {} at byte {offset}, lies \
                 past the end of the image at {device_end}",
                extent.logical, extent.physical
            )));
        }
        read_exact(&self.file, offset, buf, "data")
    }
}

fn is_set(bitmap: &[u8; BITMAP_BYTES], block: u64) -> bool {
    bitmap[(block / 8) as usize] & 1 << (block % 8) != 0
}

/// Appends a range, joining it to the last one where both hold the same.
fn push(ranges: &mut Vec<MapRange>, start: u64, end: u64, state: RangeState) {
    match ranges.last_mut() {
        Some(last) if last.state == state => last.length = end - last.offset,
        _ => ranges.push(MapRange { offset: start, length: end - start, state }),
    }
}
