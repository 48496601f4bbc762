//! A store's volumes and snapshots as exports: `volume` (writable) and `volume@snapshot`.
//!
//! Contexts: `base:allocation`, and `dbs:diff:SNAPSHOT` for each snapshot of the volume, whose
//! flags are 0 (same as in that snapshot), 1 (may differ), 2 (may differ, reads as zeros). What a client has
//! selected is that snapshot, whatever it and its volume are called later.

use super::export::{
    BASE_ALLOCATION, Export, Exports, Extent, Failure, Peer, Result, ZeroOptions, push_extent,
};
use super::rules::{Access, ExportRules};
use super::wire::{Errno, extent_flag};
use dbs_core::info::{Holder, HolderKind, MapRange, RangeState};
use dbs_core::store::uuid_text;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::volume::{Finish, Observed, Observer};
use dbs_core::{DirectIo, Error, ErrorKind, Store, Volume, format_size};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Prefix of the contexts that compare with a snapshot.
pub const DIFF_PREFIX: &str = "dbs:diff:";

/// The exports of one store.
pub struct StoreExports {
    store: Store,
    read_only: bool,
    rules: ExportRules,
    /// Only volumes that are rebuilding, each for the only one who fills it.
    filling: bool,
    /// Blocks are shown, and taken, as they are stored.
    stored: bool,
}

impl StoreExports {
    /// Serves all of `store`; with `read_only`, volumes too refuse writes.
    #[must_use]
    pub fn new(store: Store, read_only: bool) -> Self {
        Self { store, read_only, rules: ExportRules::default(), filling: false, stored: false }
    }

    /// Exports only what the rules allow.
    #[must_use]
    pub fn with_rules(self, rules: ExportRules) -> Self {
        Self { rules, ..self }
    }

    /// The exports of who fills a volume that is rebuilding, which is none for anybody else.
    #[must_use]
    pub fn to_fill(&self) -> Self {
        Self { store: self.store.clone(), rules: ExportRules::default(), filling: true, ..*self }
    }

    /// The exports of who moves blocks as they are stored, encrypted or not: snapshots, or what is to be filled.
    #[must_use]
    pub fn as_stored(&self, filling: bool) -> Self {
        let (store, rules) = (self.store.clone(), ExportRules::default());
        Self { store, rules, filling, stored: true, ..*self }
    }

    /// What a client may do with a volume or with a snapshot of it.
    fn access(&self, spec: &str, peer: &Peer) -> Access {
        self.rules.access(spec.split('@').next().unwrap_or(spec), peer)
    }

    /// Whether somebody has a volume open who writes it alone.
    fn is_written(&self, volume: &str) -> bool {
        let holders = self.store.holders();
        holders.iter().any(|h| h.holder.alone && h.snapshot.is_none() && h.volume == volume)
    }

    fn default_name(&self, peer: &Peer) -> Result<String> {
        let mut volumes = self.store.volumes(false);
        volumes.retain(|volume| self.access(&volume.name, peer) != Access::None);
        match volumes.as_slice() {
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
    fn open(&self, name: &str, peer: &Peer) -> Result<Arc<dyn Export>> {
        let spec = if name.is_empty() { self.default_name(peer)? } else { name.to_owned() };
        let access = self.access(&spec, peer);
        if access == Access::None {
            // As if it did not exist: it is none of this client's business.
            let volume = spec.split('@').next().unwrap_or(&spec);
            return Err(Error::not_found(format!("no volume `{volume}` in this store")).into());
        }
        let read_only = self.read_only
            || access == Access::Read
            || spec.contains('@')
            || self.is_written(&spec);
        let holder = Holder {
            kind: HolderKind::Nbd,
            who: peer.to_string(),
            id: Some(peer.id),
            writes: !read_only,
            alone: false,
            remedy: format!("disconnect it first, for example with `dbs clients kick {}`", peer.id),
        };
        let seen = self.store.observe(&spec);
        let volume = match (self.filling, self.stored) {
            (true, true) => self.store.open_to_fill_as_stored(&spec, Some(holder))?,
            (true, false) => self.store.open_to_fill(&spec, Some(holder))?,
            (false, true) => self.store.snapshot_as_stored(&spec, Some(holder))?,
            (false, false) => self.store.volume_for(&spec, holder)?.complete()?,
        };
        // Open, it is not deleted: if that is what has the name, that was opened.
        let seen = seen?;
        if spec_of(&seen.look()?) != spec {
            return Err(Error::not_found(format!("`{spec}` was renamed meanwhile")).into());
        }
        let read_only = read_only || volume.read_only() || self.is_written(&spec);
        let (store, compared) = (self.store.clone(), Mutex::default());
        Ok(Arc::new(StoreExport { store, volume, seen, compared, read_only }))
    }

    fn direct_io(&self) -> Option<DirectIo> {
        // Without it, which takes a shortage of descriptors, the workers do all I/O.
        self.store.direct_io().ok().flatten()
    }

    fn list(&self, peer: &Peer) -> Vec<(String, String)> {
        let mut list = Vec::new();
        for volume in self.store.volumes(false) {
            if self.access(&volume.name, peer) == Access::None {
                continue;
            }
            let description = format!("volume of {}", format_size(volume.size));
            // A volume deleted since it was listed has no snapshots to show.
            let snapshots = self.store.snapshots(&volume.name, false).unwrap_or_default();
            if !volume.rebuilding {
                list.push((volume.name, description));
            }
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
    /// What is open, whatever it is called now.
    seen: Observer,
    /// Snapshots that it was compared with, by identity.
    compared: Mutex<HashMap<String, Observer>>,
    read_only: bool,
}

/// How often what is compared may be renamed while it is.
const RENAMED_MAX: usize = 8;

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
        for range in self.volume.map_part(offset, length, limit)? {
            let flags = match range.state {
                RangeState::Data => 0,
                RangeState::Zero | RangeState::Hole => extent_flag::HOLE | extent_flag::ZERO,
            };
            push_extent(&mut extents, range.length, flags);
        }
        Ok(extents)
    }

    /// Compares with the snapshot of this identity.
    fn diff(&self, from: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let from = self.compared_with(from)?;
        let names = || Ok::<_, Error>((from.look()?, self.seen.look()?));
        for _ in 0..RENAMED_MAX {
            let now = names()?;
            let (base, volume) = (spec_of(&now.0), &now.1.volume);
            let points = (Some(&*base), now.1.snapshot.as_deref());
            let found = self.store.diff_part(volume, points, (offset, length), limit);
            let after = names()?;
            if spec_of(&now.0) == spec_of(&after.0) && spec_of(&now.1) == spec_of(&after.1) {
                let (ranges, told) = found?;
                let mut extents = Vec::new();
                push_diff(&mut extents, &ranges, offset, told);
                extents.truncate(limit);
                return Ok(extents);
            }
        }
        Err(Error::busy("what is compared is renamed all the time").into())
    }

    fn compared_with(&self, uuid: &str) -> Result<Observer> {
        let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = compared.get(uuid) {
            return Ok(known.clone());
        }
        let all = self.seen.snapshots()?.into_iter();
        let found = all.map(|(_, snapshot)| snapshot).find(|s| uuid_text(&s.uuid()) == uuid);
        let found = found.ok_or_else(|| {
            Error::not_found("the snapshot to compare with was deleted since it was selected")
        })?;
        compared.insert(uuid.to_owned(), found.clone());
        Ok(found)
    }
}

/// What something is called now.
fn spec_of(seen: &Observed) -> String {
    match &seen.snapshot {
        Some(snapshot) => format!("{}@{snapshot}", seen.volume),
        None => seen.volume.clone(),
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

    fn write(&self, offset: u64, buf: &[u8]) -> Result<Finish> {
        Ok(self.volume.write_part(offset, buf)?)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<Finish> {
        Ok(self.volume.discard_part(offset, length)?)
    }

    fn check_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let whole_blocks = offset.is_multiple_of(BLOCK_BYTES) && length.is_multiple_of(BLOCK_BYTES);
        if options.fast && (options.no_hole || !whole_blocks) {
            return Err(Failure::new(
                Errno::NotSupported,
                "zeroing this range would write data; only whole 4 KiB blocks are fast",
            ));
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<Finish> {
        if options.no_hole {
            return Ok(self.volume.write_part(offset, &vec![0; length as usize])?);
        }
        Ok(self.volume.zero_part(offset, length)?)
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
            let snapshots = self.seen.snapshots().unwrap_or_default();
            contexts.extend(snapshots.into_iter().map(|(name, _)| format!("{DIFF_PREFIX}{name}")));
        }
        contexts.retain(|name| name.starts_with(prefix));
        contexts
    }

    fn select(&self, context: &str) -> Option<String> {
        let Some(snapshot) = context.strip_prefix(DIFF_PREFIX) else {
            return (context == BASE_ALLOCATION).then(|| context.to_owned());
        };
        let found = self.seen.snapshot(snapshot).ok()?;
        Some(format!("{DIFF_PREFIX}{}", uuid_text(&found.uuid())))
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
            // A block whose backing file is missing, too.
            (ErrorKind::Io, Errno::Io),
            (ErrorKind::Poisoned, Errno::Io),
            (ErrorKind::Corrupt, Errno::Io),
            (ErrorKind::Busy, Errno::Io),
            (ErrorKind::Interrupted, Errno::Shutdown),
        ] {
            assert_eq!(Failure::from(Error::new(kind, "x")).errno, errno);
        }
    }
}
