//! A head or snapshot that is looked at and not held: for views of a store that must not be in the
//! way of those who work with it.

use super::{blocks_of, outside, unaligned};
use crate::error::{Error, ErrorKind, Result};
use crate::format::slots::SNAPSHOT_RETIRED;
use crate::info::{MapRange, SnapshotInfo, VolumeInfo};
use crate::meta::usage::Ranges;
use crate::meta::{Meta, names};
use crate::store::facts::{snapshot_info, volume_info};
use crate::store::share::Alone;
use crate::store::{Inner, Store};
use crate::units::{BLOCK_BYTES, SECTOR_BYTES, SnapshotId, VolumeId};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Volume extents looked at under one hold of the metadata lock.
const EXTENTS_PER_LOOK: usize = 256;

/// A volume's head, or a snapshot, for looking at. Cloning it is cheap. All calls block and may be
/// made from many threads at once.
///
/// Unlike a [`Volume`](super::Volume) it keeps nothing from being deleted. After that every call
/// fails with `NotFound`, also when something else has got its name, and its place in the tables:
/// identity is what counts. A read that has begun before ends with the bytes as they were.
#[derive(Clone)]
pub struct Observer {
    watched: Arc<Watched>,
}

struct Watched {
    store: Arc<Inner>,
    volume: VolumeId,
    volume_uuid: [u8; 16],
    snapshot: Option<(SnapshotId, [u8; 16])>,
}

/// What an [`Observer`] sees at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// Name of the volume.
    pub volume: String,
    /// Name of the snapshot; none for a head.
    pub snapshot: Option<String>,
    /// Size in bytes.
    pub size: u64,
    /// When the snapshot was taken, or the head begun; nanoseconds since the Unix epoch.
    pub created_ns: u64,
    /// Whether the content stays what it is: that of a snapshot, unless its volume is being rebuilt
    /// or it is retired.
    pub settled: bool,
    /// A head whose content is incomplete: its volume is being rebuilt or filled, or that was stopped.
    pub incomplete: bool,
    /// Changes of the content of the head and of snapshots that are not settled, of the whole volume, since
    /// the store was opened. The same number, the same content; another one, maybe another.
    pub writes: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Another observer of the same finds its way again.
        let mut meta = self.store.meta();
        if let Some(id) = self.find(&meta) {
            meta.forget_watched(id);
        }
    }
}

impl Watched {
    fn find(&self, meta: &Meta) -> Option<SnapshotId> {
        match &self.snapshot {
            None => meta.watched_head(self.volume, &self.volume_uuid),
            Some((id, uuid)) => meta.watched_snapshot(*id, uuid).map(|_| *id),
        }
    }
}

impl Store {
    /// Looks at a volume (`name`) or a snapshot (`name@snapshot`).
    ///
    /// # Errors
    /// `NotFound`, `Invalid`.
    pub fn observe(&self, spec: &str) -> Result<Observer> {
        let meta = self.inner.meta();
        match names::split(spec)? {
            (name, None) => Ok(self.observe_head(&meta, meta.find_volume(name)?)),
            (name, Some(snapshot)) => {
                let (volume, id) = meta.find_snapshot(name, snapshot)?;
                Ok(self.observe_snapshot(&meta, volume, id))
            }
        }
    }

    /// Looks at all volumes, in the order of their names.
    #[must_use]
    pub fn observe_volumes(&self) -> Vec<(String, Observer)> {
        let meta = self.inner.meta();
        let all = meta.volumes();
        let mut found: Vec<_> =
            all.map(|(id, v)| (v.name.clone(), self.observe_head(&meta, id))).collect();
        drop(meta);
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found
    }

    fn observe_head(&self, meta: &Meta, volume: VolumeId) -> Observer {
        self.observer(volume, meta.volume(volume).uuid, None)
    }

    fn observe_snapshot(&self, meta: &Meta, volume: VolumeId, id: SnapshotId) -> Observer {
        self.observer(volume, meta.volume(volume).uuid, Some((id, meta.snapshot(id).uuid)))
    }

    fn observer(
        &self,
        volume: VolumeId,
        volume_uuid: [u8; 16],
        snapshot: Option<(SnapshotId, [u8; 16])>,
    ) -> Observer {
        let store = Arc::clone(&self.inner);
        Observer { watched: Arc::new(Watched { store, volume, volume_uuid, snapshot }) }
    }
}

impl Observer {
    /// Identity of what is looked at: the volume's for a head, else the snapshot's.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.watched.snapshot.map_or(self.watched.volume_uuid, |(_, uuid)| uuid)
    }

    /// What it is at the moment.
    ///
    /// # Errors
    /// `NotFound` if it was deleted.
    pub fn look(&self) -> Result<Observed> {
        let meta = self.meta();
        let snapshot = meta.snapshot(self.find(&meta)?);
        let still = !snapshot.head() && snapshot.flags & SNAPSHOT_RETIRED == 0;
        Ok(Observed {
            volume: meta.volume(snapshot.volume).name.clone(),
            snapshot: (!snapshot.head()).then(|| snapshot.name.clone()),
            size: snapshot.size,
            created_ns: snapshot.created_ns,
            settled: still && !meta.is_rebuilding(snapshot.volume),
            incomplete: snapshot.head() && meta.is_rebuilding(snapshot.volume),
            writes: meta.volume(snapshot.volume).writes.load(Ordering::Relaxed),
        })
    }

    /// Size in bytes.
    ///
    /// # Errors
    /// `NotFound` if it was deleted.
    pub fn size(&self) -> Result<u64> {
        let meta = self.meta();
        Ok(meta.snapshot(self.find(&meta)?).size)
    }

    /// What is known of the volume, but for its usage.
    ///
    /// # Errors
    /// `NotFound` if it, or the snapshot looked at, was deleted.
    pub fn volume_info(&self) -> Result<VolumeInfo> {
        let meta = self.meta();
        let volume = meta.snapshot(self.find(&meta)?).volume;
        Ok(volume_info(&meta, volume))
    }

    /// What is known of the snapshot, but for its usage; none for a head.
    ///
    /// # Errors
    /// `NotFound` if it was deleted.
    pub fn snapshot_info(&self) -> Result<Option<SnapshotInfo>> {
        let meta = self.meta();
        let id = self.find(&meta)?;
        Ok(self.watched.snapshot.map(|_| snapshot_info(&meta, id)))
    }

    /// The snapshots of the volume, oldest first.
    ///
    /// # Errors
    /// `NotFound` if it was deleted.
    pub fn snapshots(&self) -> Result<Vec<(String, Observer)>> {
        let meta = self.meta();
        let volume = meta.snapshot(self.find(&meta)?).volume;
        let store = Store { inner: Arc::clone(&self.watched.store) };
        let found = meta.volume(volume).snapshots.iter().map(|(name, id)| {
            let observer = store.observe_snapshot(&meta, volume, *id);
            (meta.snapshot(*id).created_ns, name.clone(), observer)
        });
        let mut found: Vec<_> = found.collect();
        drop(meta);
        found.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        Ok(found.into_iter().map(|(_, name, observer)| (name, observer)).collect())
    }

    /// The snapshot of this name of the volume.
    ///
    /// # Errors
    /// `NotFound` if there is none, or the volume was deleted.
    pub fn snapshot(&self, name: &str) -> Result<Observer> {
        let meta = self.meta();
        let volume = meta.snapshot(self.find(&meta)?).volume;
        let (_, id) = meta.find_snapshot(&meta.volume(volume).name, name)?;
        let store = Store { inner: Arc::clone(&self.watched.store) };
        Ok(store.observe_snapshot(&meta, volume, id))
    }

    /// The newest snapshot of the volume, if it has any.
    ///
    /// # Errors
    /// `NotFound` if the volume was deleted.
    pub fn newest(&self) -> Result<Option<String>> {
        let meta = self.meta();
        let volume = meta.snapshot(self.find(&meta)?).volume;
        let all = meta.volume(volume).snapshots.iter();
        let newest = all.max_by_key(|(name, id)| (meta.snapshot(**id).created_ns, *name));
        Ok(newest.map(|(name, _)| name.clone()))
    }

    /// Fills `buf` from `offset`, both in sectors.
    ///
    /// # Errors
    /// `NotFound` if it was deleted, `Invalid` outside its size or unaligned, `Locked`, `Io`.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match self.read(offset, buf) {
            Err(error) if error.kind() == ErrorKind::Locked => {
                let volume = |meta: &Meta| self.find(meta).ok().map(|id| meta.snapshot(id).volume);
                self.watched.store.unlock_with_given(volume);
                self.read(offset, buf)
            }
            done => done,
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let store = &self.watched.store;
        store.read_in_steps(
            offset,
            buf,
            &|| "what is looked at".to_owned(),
            |meta, at, length, out| {
                let id = self.find(meta)?;
                check_range(meta, id, at, length)?;
                meta.plan_read(id, blocks_of(at, length), out)?;
                Ok(meta.key_for(id)?)
            },
        )
    }

    /// The map of the range, as that of [`Volume::map`](super::Volume::map).
    ///
    /// # Errors
    /// `NotFound` if it was deleted, `Invalid` outside its size or unaligned.
    pub fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        let blocks = blocks_of(offset, length);
        let mut ranges = Ranges::new(limit.max(1));
        let mut next = blocks.start;
        loop {
            next = self.watched.store.look(|meta| {
                let id = self.find(meta)?;
                check_range(meta, id, offset, length)?;
                meta.map_step(id, next..blocks.end, &mut ranges)
            })?;
            if next >= blocks.end || ranges.full() {
                return Ok(ranges.into_clipped(offset, length));
            }
        }
    }

    /// Bytes of data it shows. All that it holds is walked, some extents at a time: of a head that
    /// is being written, blocks of different moments are counted.
    ///
    /// # Errors
    /// `NotFound` if it was deleted.
    pub fn data_bytes(&self) -> Result<u64> {
        let (mut next, mut blocks) = (Some(0), 0);
        while let Some(first) = next {
            let (shown, more) = self
                .watched
                .store
                .look(|meta| meta.shown_data(self.find(meta)?, first, EXTENTS_PER_LOOK))?;
            blocks += shown.iter().map(|(_, data)| u64::from(data.count())).sum::<u64>();
            next = more;
        }
        Ok(blocks * BLOCK_BYTES)
    }

    /// The first byte of data at or behind `offset`, in whole blocks; none if only zeros follow.
    ///
    /// # Errors
    /// `NotFound` if it was deleted.
    pub fn next_data(&self, offset: u64) -> Result<Option<u64>> {
        let extent = self.watched.store.extent_bytes as u64;
        let mut next = Some(extent_of(offset, extent));
        while let Some(first) = next {
            let (shown, more) = self
                .watched
                .store
                .look(|meta| meta.shown_data(self.find(meta)?, first, EXTENTS_PER_LOOK))?;
            for (logical, data) in shown {
                let base = u64::from(logical) * extent;
                for run in data.runs((extent / BLOCK_BYTES) as u32) {
                    if base + u64::from(run.end) * BLOCK_BYTES > offset {
                        return Ok(Some(offset.max(base + u64::from(run.start) * BLOCK_BYTES)));
                    }
                }
            }
            next = more;
        }
        Ok(None)
    }

    /// The first byte at or behind `offset` that is no data: a hole, zeros, or the end.
    ///
    /// # Errors
    /// `NotFound` if it was deleted.
    pub fn next_hole(&self, offset: u64) -> Result<u64> {
        let extent = self.watched.store.extent_bytes as u64;
        let mut at = offset;
        let mut next = Some(extent_of(offset, extent));
        while let Some(first) = next {
            let (size, (shown, more)) = self.watched.store.look(|meta| {
                let id = self.find(meta)?;
                Ok((meta.snapshot(id).size, meta.shown_data(id, first, EXTENTS_PER_LOOK)?))
            })?;
            let runs = shown.iter().flat_map(|(logical, data)| {
                let base = u64::from(*logical) * extent;
                data.runs((extent / BLOCK_BYTES) as u32).map(move |run| {
                    (base + u64::from(run.start) * BLOCK_BYTES)
                        ..(base + u64::from(run.end) * BLOCK_BYTES)
                })
            });
            for run in runs {
                if run.start > at {
                    return Ok(at);
                }
                at = at.max(run.end.min(size));
            }
            // What is known of ends at the next extent to look at; a hole before it is one.
            if more.is_some_and(|more| at < u64::from(more) * extent) {
                return Ok(at);
            }
            next = more;
        }
        Ok(at)
    }

    fn meta(&self) -> Alone<'_, Meta> {
        self.watched.store.meta()
    }

    fn find(&self, meta: &Meta) -> Result<SnapshotId> {
        self.watched.find(meta).ok_or_else(|| {
            let what = if self.watched.snapshot.is_some() { "snapshot" } else { "volume" };
            Error::not_found(format!("the {what} was deleted"))
        })
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer")
            .field("volume", &self.watched.volume)
            .field("snapshot", &self.watched.snapshot.map(|(id, _)| id))
            .finish_non_exhaustive()
    }
}

fn extent_of(offset: u64, extent_bytes: u64) -> u32 {
    u32::try_from(offset / extent_bytes).unwrap_or(u32::MAX)
}

fn check_range(meta: &Meta, id: SnapshotId, offset: u64, length: u64) -> Result<()> {
    if !offset.is_multiple_of(SECTOR_BYTES) || !length.is_multiple_of(SECTOR_BYTES) {
        return Err(unaligned(offset, length));
    }
    let size = meta.snapshot(id).size;
    if offset.checked_add(length).is_none_or(|end| end > size) {
        return Err(outside(offset, length, size, "what is looked at"));
    }
    Ok(())
}
