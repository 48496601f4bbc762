//! Where two points of a volume differ.

use super::Store;
use super::commands::{find, identity, same};
use crate::error::{Error, Result};
use crate::info::MapRange;
use crate::meta::usage::Ranges;
use crate::meta::{Meta, Step};
use crate::units::{BLOCK_BYTES, SECTOR_BYTES};

/// What is compared with what: see [`Store::diff`].
struct Compared<'a> {
    volume: &'a str,
    from: Option<&'a str>,
    to: Option<&'a str>,
    offset: u64,
    length: u64,
}

impl Store {
    /// What differs between two points: ranges of `to` (the head if `None`) whose content may
    /// differ from `from` (an empty volume if `None`; a snapshot of another volume if it is
    /// `volume@snapshot`), in block borders cut to the range. Much is looked
    /// at step by step: what is written to a head meanwhile may be missing.
    ///
    /// # Errors
    /// `NotFound`, also if one of the two goes meanwhile; `Invalid` if the range is outside `to`.
    pub fn diff(
        &self,
        volume: &str,
        from: Option<&str>,
        to: Option<&str>,
        offset: u64,
        length: u64,
    ) -> Result<Vec<MapRange>> {
        let mut ranges = Ranges::new(usize::MAX);
        let compared = Compared { volume, from, to, offset, length };
        let (mut next, mut looked_at) = (offset / BLOCK_BYTES, None);
        loop {
            let end = self.diff_step(&compared, &mut next, &mut looked_at, &mut ranges)?;
            if next >= end {
                return Ok(ranges.into_clipped(offset, length));
            }
        }
    }

    /// As [`Store::diff`], but of no more than is looked at in a moment, however long the range is, and
    /// at most `limit` ranges: with them comes the offset up to which they tell everything.
    ///
    /// # Errors
    /// As [`Store::diff`].
    pub fn diff_part(
        &self,
        volume: &str,
        (from, to): (Option<&str>, Option<&str>),
        (offset, length): (u64, u64),
        limit: usize,
    ) -> Result<(Vec<MapRange>, u64)> {
        let mut ranges = Ranges::new(limit.max(1));
        let compared = Compared { volume, from, to, offset, length };
        let mut next = offset / BLOCK_BYTES;
        self.diff_step(&compared, &mut next, &mut None, &mut ranges)?;
        let told = ranges.told_to(next * BLOCK_BYTES).clamp(offset, offset + length);
        Ok((ranges.into_clipped(offset, told - offset), told))
    }

    /// Looks at a part of what is compared, from block `next` on, in one hold of the metadata; returns the
    /// block at which all of it ends.
    fn diff_step(
        &self,
        compared: &Compared<'_>,
        next: &mut u64,
        looked_at: &mut Option<[[u8; 16]; 2]>,
        ranges: &mut Ranges,
    ) -> Result<u64> {
        self.inner.look(|meta| compared.step(meta, next, looked_at, ranges))
    }
}

impl Compared<'_> {
    fn step(
        &self,
        meta: &Meta,
        next: &mut u64,
        looked_at: &mut Option<[[u8; 16]; 2]>,
        ranges: &mut Ranges,
    ) -> Step<u64> {
        let Compared { volume, from, to, offset, length } = *self;
        let to = find(meta, volume, to)?;
        let from = from.map(|name| match name.split_once('@') {
            Some((other, name)) => find(meta, other, Some(name)),
            None => find(meta, volume, Some(name)),
        });
        let from = from.transpose()?;
        same(looked_at, identity(meta, from, to), volume)?;
        let size = meta.snapshot(to).size;
        if !offset.is_multiple_of(SECTOR_BYTES) || !length.is_multiple_of(SECTOR_BYTES) {
            return Err(Error::invalid(format!(
                "offset {offset} and length {length} must be multiples of {SECTOR_BYTES}"
            ))
            .into());
        }
        if offset.checked_add(length).is_none_or(|end| end > size) {
            let text = format!("range {offset}+{length} is outside {size} bytes");
            return Err(Error::invalid(text).into());
        }
        let end = (offset + length).div_ceil(BLOCK_BYTES);
        *next = meta.diff_step(from, to, *next..end, ranges)?;
        Ok(end)
    }
}
