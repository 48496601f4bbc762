//! A store's volumes and snapshots as exports: `volume` (writable) and `volume@snapshot`.
//!
//! Contexts: `base:allocation`, and `dbs:diff:SNAPSHOT` for each snapshot of the volume, whose
//! flags are 0 (same as in that snapshot), 1 (may differ), 2 (may differ, reads as zeros).

use super::export::{
    BASE_ALLOCATION, Export, Exports, Extent, Failure, Result, ZeroOptions, push_extent,
};
use super::wire::{Errno, extent_flag};
use dbs_core::info::{MapRange, RangeState};
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{DirectIo, Error, ErrorKind, Store, Volume, format_size};
use std::sync::Arc;

/// Prefix of the contexts that compare with a snapshot.
pub const DIFF_PREFIX: &str = "dbs:diff:";
/// Bytes of zeros written at a time where a range must be allocated.
const ZEROES_BYTES: usize = 1 << 20;
/// Bytes compared at a time, at first; it grows while little is found.
const DIFF_WINDOW_BYTES: u64 = 64 << 20;

/// The exports of one store.
pub struct StoreExports {
    store: Store,
    read_only: bool,
    held: Option<Held>,
}

/// Says of a volume's name whether somebody else writes it.
pub type Held = Arc<dyn Fn(&str) -> bool + Send + Sync>;

impl StoreExports {
    /// Serves all of `store`; with `read_only`, volumes too refuse writes.
    #[must_use]
    pub fn new(store: Store, read_only: bool) -> Self {
        Self { store, read_only, held: None }
    }

    /// Exports the volumes that `held` names for reading only.
    #[must_use]
    pub fn with_held(self, held: Held) -> Self {
        Self { held: Some(held), ..self }
    }

    fn default_name(&self) -> Result<String> {
        match self.store.volumes(false).as_slice() {
            [volume] => Ok(volume.name.clone()),
            [] => Err(Failure::invalid("the store has no volume to serve by default")),
            many => Err(Failure::invalid(format!(
                "the store has {} volumes: name one of them",
                many.len()
            ))),
        }
    }
}

impl Exports for StoreExports {
    fn open(&self, name: &str) -> Result<Arc<dyn Export>> {
        let spec = if name.is_empty() { self.default_name()? } else { name.to_owned() };
        let volume = self.store.volume(&spec)?;
        let held = self.held.as_ref().is_some_and(|held| held(volume.spec()));
        let read_only = self.read_only || volume.read_only() || held;
        Ok(Arc::new(StoreExport { store: self.store.clone(), volume, read_only }))
    }

    fn direct_io(&self) -> Option<DirectIo> {
        // Without it, which takes a shortage of descriptors, the workers do all I/O.
        self.store.direct_io().ok().flatten()
    }

    fn list(&self) -> Vec<(String, String)> {
        let mut list = Vec::new();
        for volume in self.store.volumes(false) {
            let description = format!("volume of {}", format_size(volume.size));
            // A volume deleted since it was listed has no snapshots to show.
            let snapshots = self.store.snapshots(&volume.name, false).unwrap_or_default();
            list.push((volume.name, description));
            for snapshot in snapshots {
                let description = format!("snapshot of {}", format_size(snapshot.size));
                list.push((format!("{}@{}", snapshot.volume, snapshot.name), description));
            }
        }
        list
    }
}

struct StoreExport {
    store: Store,
    volume: Volume,
    read_only: bool,
}

impl StoreExport {
    /// Volume and, for a snapshot, its name.
    fn parts(&self) -> (&str, Option<&str>) {
        match self.volume.spec().split_once('@') {
            Some((volume, snapshot)) => (volume, Some(snapshot)),
            None => (self.volume.spec(), None),
        }
    }

    fn allocation(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        for range in self.volume.map(offset, length, limit)? {
            let flags = match range.state {
                RangeState::Data => 0,
                RangeState::Zero | RangeState::Hole => extent_flag::HOLE | extent_flag::ZERO,
            };
            push_extent(&mut extents, range.length, flags);
        }
        Ok(extents)
    }

    /// Compares window by window, so that neither a large volume that hardly differs nor a
    /// fragmented one costs more than the reply needs.
    fn diff(&self, from: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let (volume, to) = self.parts();
        let end = offset.saturating_add(length);
        let (mut at, mut window) = (offset, DIFF_WINDOW_BYTES);
        let mut extents = Vec::new();
        while at < end && extents.len() <= limit {
            let next = end.min(at.saturating_add(window));
            let ranges = self.store.diff(volume, Some(from), to, at, next - at)?;
            if ranges.len() < limit {
                window = window.saturating_mul(2);
            }
            push_diff(&mut extents, &ranges, at, next);
            at = next;
        }
        extents.truncate(limit);
        Ok(extents)
    }

    fn write_allocated_zeroes(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        let zeroes = vec![0; ZEROES_BYTES.min(usize::try_from(length).unwrap_or(usize::MAX))];
        let mut done = 0;
        while done < length {
            let count = (length - done).min(zeroes.len() as u64);
            let last = done + count == length;
            self.volume.write_at(offset + done, &zeroes[..count as usize], fua && last)?;
            done += count;
        }
        Ok(())
    }
}

impl Export for StoreExport {
    fn name(&self) -> String {
        self.volume.spec().to_owned()
    }

    fn description(&self) -> String {
        let (volume, snapshot) = self.parts();
        let size = format_size(self.volume.size());
        match snapshot {
            Some(snapshot) => format!("snapshot {snapshot} of volume {volume}, {size}"),
            None => format!("volume {volume}, {size}"),
        }
    }

    fn size(&self) -> u64 {
        self.volume.size()
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn volume(&self) -> Option<&Volume> {
        Some(&self.volume)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Ok(self.volume.read_at(offset, buf)?)
    }

    fn write(&self, offset: u64, buf: &[u8], fua: bool) -> Result<()> {
        Ok(self.volume.write_at(offset, buf, fua)?)
    }

    fn trim(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.volume.discard(offset, length)?;
        if fua {
            self.volume.flush()?;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let whole_blocks = offset.is_multiple_of(BLOCK_BYTES) && length.is_multiple_of(BLOCK_BYTES);
        if options.fast && (options.no_hole || !whole_blocks) {
            return Err(Failure::new(
                Errno::NotSupported,
                "zeroing this range would write data; only whole 4 KiB blocks are fast",
            ));
        }
        if options.no_hole {
            return self.write_allocated_zeroes(offset, length, options.fua);
        }
        Ok(self.volume.write_zeroes(offset, length, options.fua)?)
    }

    fn flush(&self) -> Result<()> {
        // Clients flush what they may only read, too: nothing was written through it.
        if !self.read_only {
            self.volume.flush()?;
        }
        Ok(())
    }

    fn contexts(&self, prefix: &str) -> Vec<String> {
        let mut contexts = vec![BASE_ALLOCATION.to_owned()];
        // The snapshots are looked up only for who may want them.
        if prefix.starts_with(DIFF_PREFIX) || DIFF_PREFIX.starts_with(prefix) {
            let snapshots = self.store.snapshots(self.parts().0, false).unwrap_or_default();
            contexts.extend(snapshots.into_iter().map(|s| format!("{DIFF_PREFIX}{}", s.name)));
        }
        contexts.retain(|name| name.starts_with(prefix));
        contexts
    }

    fn block_status(
        &self,
        context: &str,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>> {
        match context.strip_prefix(DIFF_PREFIX) {
            Some(from) => self.diff(from, offset, length, limit),
            None => self.allocation(offset, length, limit),
        }
    }
}

/// Appends the ranges that differ between `start` and `end`, and the gaps between them.
fn push_diff(extents: &mut Vec<Extent>, ranges: &[MapRange], start: u64, end: u64) {
    let mut at = start;
    for range in ranges {
        let from = range.offset.clamp(at, end);
        let to = range.offset.saturating_add(range.length).clamp(from, end);
        push_extent(extents, from - at, 0);
        let flags = match range.state {
            RangeState::Data => extent_flag::DIFFERS,
            RangeState::Zero | RangeState::Hole => extent_flag::DIFFERS_ZERO,
        };
        push_extent(extents, to - from, flags);
        at = to;
    }
    push_extent(extents, end - at, 0);
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let errno = match error.kind() {
            ErrorKind::NoSpace => Errno::NoSpace,
            ErrorKind::ReadOnly => Errno::Perm,
            ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Exists => Errno::Invalid,
            ErrorKind::Interrupted => Errno::Shutdown,
            _ => Errno::Io,
        };
        Self::new(errno, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, length: u64, state: RangeState) -> MapRange {
        MapRange { offset, length, state }
    }

    #[test]
    fn differences_fill_their_gaps() {
        let mut extents = Vec::new();
        let ranges = [
            range(4096, 4096, RangeState::Data),
            range(8192, 4096, RangeState::Zero),
            range(12288, 4096, RangeState::Hole),
        ];
        push_diff(&mut extents, &ranges, 0, 32768);
        push_diff(&mut extents, &[range(65536, 4096, RangeState::Data)], 32768, 69632);
        let got: Vec<_> = extents.iter().map(|e| (e.length, e.flags)).collect();
        assert_eq!(got, [(4096, 0), (4096, 1), (8192, 2), (49152, 0), (4096, 1)]);
    }

    #[test]
    fn differences_outside_the_window_are_clamped() {
        let mut extents = Vec::new();
        push_diff(&mut extents, &[range(0, u64::MAX, RangeState::Data)], 4096, 8192);
        assert_eq!(extents, [Extent { length: 4096, flags: 1 }]);
    }

    #[test]
    fn errors_become_errnos() {
        for (kind, errno) in [
            (ErrorKind::NoSpace, Errno::NoSpace),
            (ErrorKind::ReadOnly, Errno::Perm),
            (ErrorKind::Invalid, Errno::Invalid),
            (ErrorKind::Poisoned, Errno::Io),
            (ErrorKind::Corrupt, Errno::Io),
            (ErrorKind::Busy, Errno::Io),
            (ErrorKind::Interrupted, Errno::Shutdown),
        ] {
            assert_eq!(Failure::from(Error::new(kind, "x")).errno, errno);
        }
    }
}
