//! Bringing bitmaps of extents back into memory that are on the device alone ([`crate::meta::paging`]).

use super::Inner;
use super::recover::read_copies;
use super::unreadable::is_unreadable;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{RegionKind, block};
use crate::io::ReadRequest;
use crate::io::buffer::AlignedBuf;
use crate::meta::{Meta, Step, Stop};
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use std::collections::BTreeSet;
use std::sync::PoisonError;

/// What is brought.
const REGION: RegionKind = RegionKind::Extents;
/// Metadata blocks that are read together.
const TOGETHER: usize = 64;
/// Metadata blocks that a look through the layers of one volume extent is given at once: few at first, as it may
/// not get to those of the layers below.
const DEEPER: [usize; 3] = [1, 8, TOGETHER];
/// Warnings that are kept in memory: a device may have any number of bad blocks.
const WARNINGS_MAX: usize = 100;
const MORE_WARNINGS: &str = "more metadata is damaged; `dbs check` lists all damage";
/// What could not be read is tried again after so long, then after twice as long each time.
const PAUSE_NS: u64 = 1_000_000_000;
const PAUSE_MAX_NS: u64 = 3600 * PAUSE_NS;

/// Bitmaps that a step needs: they stay in memory until it is over, however many they are.
pub(crate) struct Brought<'a> {
    inner: &'a Inner,
    blocks: BTreeSet<u32>,
    /// The volume extent that was looked at last, and how often bitmaps were brought for it.
    last: (Option<u32>, usize),
}

/// When what could not be read is tried again, and the pause before that; zeros if nothing waits.
#[derive(Debug, Default)]
pub(super) struct Again {
    at_ns: u64,
    pause_ns: u64,
}

impl Again {
    /// Whether it is time, for who asks again and again.
    fn is_due(&mut self, now_ns: u64) -> bool {
        // A clock may be set back.
        let waits = self.at_ns.checked_sub(now_ns).is_some_and(|left| left <= self.pause_ns);
        if self.pause_ns > 0 && waits {
            return false;
        }
        let is_due = self.pause_ns > 0;
        self.pause_ns = (self.pause_ns * 2).clamp(PAUSE_NS, PAUSE_MAX_NS);
        self.at_ns = now_ns + self.pause_ns;
        is_due
    }
}

impl Inner {
    /// Nothing yet, for a step that begins.
    pub(crate) fn bring(&self) -> Brought<'_> {
        Brought { inner: self, blocks: BTreeSet::new(), last: (None, 0) }
    }

    /// Looks at the state, as often as it takes until all bitmaps that are needed are in memory.
    pub(crate) fn look<T>(&self, look: impl FnMut(&mut Meta) -> Step<T>) -> Result<T> {
        self.look_with(self.bring(), look)
    }

    /// As [`Inner::look`], with what was brought for that before.
    pub(super) fn look_with<T>(
        &self,
        mut brought: Brought<'_>,
        mut look: impl FnMut(&mut Meta) -> Step<T>,
    ) -> Result<T> {
        loop {
            let stop = match look(&mut self.meta()) {
                Ok(value) => return Ok(value),
                Err(stop) => stop,
            };
            match stop {
                Stop::Error(error) => return Err(error),
                Stop::Away { extent, ahead } => brought.of(extent, ahead)?,
                Stop::Expand { extent, owner } => self.expand(extent, owner)?,
                Stop::Room(..) | Stop::Long | Stop::Space => unreachable!("it changes nothing"),
            }
        }
    }
}

impl Inner {
    /// Brings what is written back next, `most` blocks at most, as [`Inner::bring_all`].
    pub(super) fn bring_dirty(&self, most: usize) -> Brought<'_> {
        let away = self.meta().dirty_away(most);
        self.bring_all(&away)
    }

    /// Brings dirty blocks. What cannot be brought is left out, and stays in the journal.
    pub(super) fn bring_all(&self, away: &[u32]) -> Brought<'_> {
        let mut brought = self.bring();
        for (block, error) in brought.blocks(away) {
            self.warn_once(format!(
                "{error}; what changes there stays in the journal, which may fill up"
            ));
            self.meta().park(block);
        }
        brought
    }

    /// Tries again what could not be brought.
    pub(super) fn bring_parked(&self) -> Brought<'_> {
        let mut brought = self.bring();
        let parked = self.meta().parked();
        let _told_before = brought.blocks(&parked);
        brought
    }

    /// Now and then, while something waits for metadata that is damaged: tries it again.
    pub(super) fn try_again(&self) {
        let waits = self.meta().waits_for_damaged();
        let mut again = self.again.lock().unwrap_or_else(PoisonError::into_inner);
        if !waits {
            *again = Again::default();
            return;
        }
        let is_due = again.is_due(self.env.now_ns());
        drop(again);
        if is_due {
            drop(self.bring_parked());
            self.meta().end_put_off();
        }
    }
}

impl Brought<'_> {
    /// Brings the bitmaps of the metadata block of a data extent, and of others that the same step needs: of a chain
    /// of layers, or of volume extents `ahead` in the same layer.
    ///
    /// # Errors
    /// `Io`; `Corrupt` if the device does not hold any more what was written there.
    pub(crate) fn of(&mut self, extent: u32, ahead: u32) -> Result<()> {
        let (needed, wanted) = {
            let meta = self.inner.meta();
            let logical = meta.entries.owner(extent).map(|(_, logical)| logical);
            let times = if self.last.0 == logical { self.last.1 } else { 0 };
            self.last = (logical, times + 1);
            let most = DEEPER[times.min(DEEPER.len() - 1)];
            let mut wanted = meta.away_below(extent, most);
            if ahead > 1 {
                let more = meta.away_ahead(extent, ahead, TOGETHER);
                wanted.extend(more.difference(&wanted.iter().copied().collect()));
            }
            (meta.block_of(extent), wanted)
        };
        // Of the others nobody knows whether they are needed.
        let failed = self.blocks(&wanted);
        failed
            .into_iter()
            .find(|(block, _)| *block == needed)
            .map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Brings the bitmaps of metadata blocks; those that cannot be brought.
    pub(super) fn blocks(&mut self, blocks: &[u32]) -> Vec<(u32, Error)> {
        blocks.chunks(TOGETHER).flat_map(|some| self.some_blocks(some)).collect()
    }

    fn some_blocks(&mut self, blocks: &[u32]) -> Vec<(u32, Error)> {
        let (geometry, away) = {
            let mut meta = self.inner.meta();
            for block in blocks {
                // From here on nobody lets it go.
                if self.blocks.insert(*block) {
                    meta.pin_block(*block);
                }
            }
            let away = blocks.iter().filter_map(|block| Some((*block, meta.expected(*block)?)));
            (meta.geometry, away.collect::<Vec<_>>())
        };
        let (storage, size) = (&*self.inner.storage, BLOCK_BYTES as usize);
        let mut buf = AlignedBuf::zeroed(away.len() * 2 * size);
        let mut requests = Vec::with_capacity(away.len() * 2);
        for ((block, _), both) in away.iter().zip(buf.chunks_exact_mut(2 * size)) {
            let places = [0, 1].map(|copy| geometry.block_address(REGION, *block, copy));
            let parts = places.into_iter().zip(both.chunks_exact_mut(size));
            requests.extend(parts.map(|(offset, buf)| ReadRequest { offset, buf }));
        }
        let are_read = requests.is_empty() || storage.read_many(&mut requests).is_ok();
        drop(requests);
        let mut failed = Vec::new();
        for ((block, expected), both) in away.into_iter().zip(buf.chunks_exact_mut(2 * size)) {
            let mut copies: [&mut [u8]; 2] = both.split_at_mut(size).into();
            let bad = match are_read {
                true => Ok(Default::default()),
                false => read_copies(storage, &geometry, REGION, block, &mut copies),
            };
            let taken = bad.and_then(|bad| {
                let is_read = |copy: usize| bad[copy].is_empty();
                self.inner.take_back(
                    block,
                    expected,
                    [0, 1].map(|c| is_read(c).then_some(&*copies[c])),
                )
            });
            if let Err(error) = taken {
                if is_damage(&error) {
                    self.inner.meta().note_damaged(block);
                }
                failed.push((block, error));
            }
        }
        failed
    }
}

impl Inner {
    /// As [`Inner::warn`], unless that was said before, or much else was.
    pub(super) fn warn_once(&self, text: String) {
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        if warnings.len() > WARNINGS_MAX || warnings.contains(&text) {
            return;
        }
        let is_last = warnings.len() == WARNINGS_MAX;
        warnings.push(if is_last { MORE_WARNINGS.to_owned() } else { text });
    }

    /// Takes the bitmaps of a metadata block back from the copy that is the expected one. None is a copy that the
    /// device cannot read.
    fn take_back(&self, index: u32, expected: u64, copies: [Option<&[u8]>; 2]) -> Result<()> {
        let mut meta = self.meta();
        // Others may have brought it, or be writing it, while it was read.
        if meta.expected(index) != Some(expected) {
            return Ok(());
        }
        let lsn = |copy: u32| {
            let address = meta.geometry.block_address(REGION, index, copy);
            let header =
                block::open(copies[copy as usize]?, REGION.block_kind(), &meta.uuid, address);
            header.ok().map(|header| header.lsn.get())
        };
        let lsns = [0, 1].map(lsn);
        let is_good = |lsn: &Option<u64>| {
            *lsn == Some(expected) || (sabotage::is(Bug::OlderBitmapsCome) && lsn.is_some())
        };
        let good = lsns.iter().position(is_good);
        let Some((copy, bytes)) = good.and_then(|copy| Some((copy, copies[copy]?))) else {
            return Err(lost(index, copies.iter().any(Option::is_none)));
        };
        meta.take_back(index, block::payload(bytes))?;
        if lsns[1 - copy] != Some(expected) && !self.read_only {
            let is_read = copies[1 - copy].is_some();
            meta.heal_block(index, copy as u32, is_read);
            let bad = 1 - copy;
            self.warn_once(match is_read {
                true => format!(
                    "extent status {index}: copy {bad} is not what was written there; it is written again"
                ),
                false => format!(
                    "extent status {index}: the device cannot read copy {bad}; it is written again when \
                     something changes there"
                ),
            });
        }
        meta.shrink_bitmaps();
        Ok(())
    }
}

impl Drop for Brought<'_> {
    fn drop(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let mut meta = self.inner.meta();
        self.blocks.iter().for_each(|block| meta.unpin_block(*block));
        meta.shrink_bitmaps();
    }
}

/// Whether what was needed is damaged on the device; another error may be over the next time.
pub(crate) fn is_damage(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    error.kind() == ErrorKind::Corrupt || source.is_some_and(is_unreadable)
}

fn lost(index: u32, unreadable: bool) -> Error {
    if unreadable {
        let text =
            format!("extent status {index}: the device cannot read it, or holds something else");
        return Error::io(std::io::Error::from_raw_os_error(libc::EIO), text);
    }
    Error::corrupt(format!(
        "extent status {index}: neither copy is what was written there; `dbs check` lists all damage"
    ))
}

#[cfg(test)]
mod tests {
    use crate::store::{InitOptions, OpenOptions, Store};

    const EXTENT: u64 = 4 << 20;
    /// Extents of a metadata block.
    const ITEMS: u64 = 14;
    const BLOCKS: u64 = 600;

    /// Among many blocks whose bitmaps are away, those that came back are found again at once.
    #[test]
    fn few_bitmaps_among_many_that_are_away_leave_memory() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let size = BLOCKS * ITEMS * EXTENT;
        let options = InitOptions {
            size: Some(size + (1 << 30)),
            extent_size: EXTENT,
            checksums: false,
            ..InitOptions::default()
        };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", size).unwrap();
        let volume = store.volume("v").unwrap();
        for extent in 0..BLOCKS * ITEMS {
            for block in [0, 2] {
                volume.write_at(extent * EXTENT + block * 4096, &[1; 4096], false).unwrap();
            }
        }
        while store.settle().unwrap() {}
        store.set_metadata_memory(0);
        let bitmaps = || store.inner.meta().entries.bitmap_bytes();
        assert_eq!(bitmaps(), 0);
        for block in (0..BLOCKS).step_by(100) {
            store.inner.meta().set_metadata_memory(1 << 20);
            volume.read_at(block * ITEMS * EXTENT, &mut [0; 4096]).unwrap();
            assert!(bitmaps() > 0);
            let mut meta = store.inner.meta();
            meta.set_metadata_memory(0);
            meta.shrink_bitmaps();
            assert_eq!(meta.entries.bitmap_bytes(), 0, "of block {block}");
        }
    }

    /// A device may have any number of bad blocks, of which each is told.
    #[test]
    fn what_is_told_of_bad_blocks_has_a_bound() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        for block in (0..1000).chain(0..1000) {
            store.inner.warn_once(format!("block {block}"));
        }
        let warnings = store.info().warnings;
        assert_eq!(warnings.len(), super::WARNINGS_MAX + 1);
        assert_eq!(warnings.last().unwrap(), super::MORE_WARNINGS);
    }
}
