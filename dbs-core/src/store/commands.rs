//! Commands on volumes and snapshots. Each is durable when it returns, and after a crash wholly
//! done or not at all.

use super::expected::Expected;
use super::facts::{snapshot_info, spec_of, volume_info};
use super::identity::{as_uuid, uuid_text};
use super::{Hold, Inner, SnapshotOptions, Store, still_named};
use crate::error::{Error, ErrorKind, Result};
use crate::info::{SnapshotInfo, StoreInfo, Usage, VolumeInfo, VolumeIo};
use crate::meta::locks::Space;
use crate::meta::tree::{Birth, check_size};
use crate::meta::{self, Meta};
use crate::units::{BLOCK_BYTES, SnapshotId};
use crate::volume::Volume;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Layers that are looked at for a list of volumes before others have their turn.
const LAYERS_AT_ONCE: u64 = 4096;
/// What a volume takes beside, counted in layers.
const LAYERS_PER_VOLUME: u64 = 16;

/// The longest time for which a walk over much metadata rests between two steps: as long as a step takes, but for what it
/// waits for the device.
const LONGEST_REST: Duration = Duration::from_millis(2);

/// Rests between two steps of a walk. Who asks again at once gets the metadata before those who wait for it: requests had
/// hardly a turn.
fn rest_since(begun: Instant) {
    std::thread::sleep(begun.elapsed().min(LONGEST_REST));
}

impl Store {
    /// Facts about the store.
    #[must_use]
    pub fn info(&self) -> StoreInfo {
        let mut meta = self.inner.meta();
        meta.release_freed();
        let geometry = meta.geometry;
        let total = u64::from(geometry.data_extents());
        let free = u64::from(meta.extents.available());
        let pending = u64::from(meta.extents.quarantined());
        let (compressed, stored) = meta.entries.compressed_counts();
        let warnings = self.inner.warnings.lock().unwrap_or_else(PoisonError::into_inner).clone();
        StoreInfo {
            format: "2.0.0".to_owned(),
            uuid: uuid_text(&meta.identity()),
            size: geometry.size,
            max_size: geometry.max_size(),
            extent_size: geometry.extent_bytes,
            extents_total: total,
            extents_free: free,
            extents_pending: pending,
            allocated: (total - free - pending) * geometry.extent_bytes,
            compressed: compressed * BLOCK_BYTES,
            compressed_stored: stored * BLOCK_BYTES,
            free: free * geometry.extent_bytes,
            metadata: geometry.region(crate::format::RegionKind::Data).offset,
            volumes: meta.volumes().count() as u64,
            volumes_max: u64::from(geometry.volumes),
            snapshots: meta.snapshots().count() as u64,
            snapshots_max: u64::from(geometry.snapshots),
            snapshots_deleting: meta.unneeded().count() as u64,
            snapshots_put_off: meta.snapshots_put_off(),
            work_remaining: meta.work_remaining(),
            sequence: meta.log.durable,
            read_only: self.inner.read_only,
            driver: self.inner.storage.driver().to_owned(),
            tail: meta.log.has_tail(),
            checksums: meta.sums.as_ref().map(|sums| sums.info()),
            lookups: meta.memory_info(),
            warnings,
        }
    }

    /// A number of this open store that no other has, if the process before it left no tail: then writes may be
    /// lost that were acknowledged after its last flush. What remembers them elsewhere is not to be believed.
    #[must_use]
    pub fn lost_tail(&self) -> Option<u64> {
        self.inner.lost_tail
    }

    /// Bounds the memory for bitmaps of extents and for look-ups as
    /// [`OpenOptions::metadata_memory`](super::OpenOptions::metadata_memory) does.
    /// What one step needs is kept in any case, and bitmaps that the device does not have yet.
    pub fn set_metadata_memory(&self, bytes: u64) {
        let times = self.inner.meta().set_metadata_memory(bytes);
        (0..times).for_each(|_| self.inner.meta().shrink_bitmaps());
    }

    /// All volumes by name: of many, or of many layers, at moments that lie a little apart. `usage` is filled only if
    /// `with_usage`, as it walks every layer.
    #[must_use]
    pub fn volumes(&self, with_usage: bool) -> Vec<VolumeInfo> {
        let mut all: Vec<_> =
            self.volumes_with(|_| ()).into_iter().map(|(info, ())| info).collect();
        if with_usage {
            // Those that go meanwhile are not there.
            all.retain_mut(|info| {
                self.usage(&info.name, None).map(|usage| info.usage = usage).is_ok()
            });
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// All volumes, with what was read and written of each since the store was opened: at moments that lie apart
    /// as those of [`Store::volumes`] do.
    #[must_use]
    pub fn volume_io(&self) -> Vec<(VolumeInfo, VolumeIo)> {
        self.volumes_with(|volume| {
            let (delayed, delayed_ns) = volume.pace.delays();
            let changes = volume.writes.load(Ordering::Relaxed);
            VolumeIo { delayed, delayed_ns, changes, ..volume.io.get() }
        })
    }

    /// All volumes, each with what `more` says of it. What is known of one asks all layers below it, so those who wait for
    /// the metadata have their turn in between.
    fn volumes_with<T>(&self, more: impl Fn(&meta::Volume) -> T) -> Vec<(VolumeInfo, T)> {
        let (mut all, mut next) = (Vec::new(), Some(0));
        while let Some(first) = next.take() {
            let begun = Instant::now();
            let meta = self.inner.meta();
            let mut looks = 0;
            for (id, volume) in meta.volumes_from(first) {
                if looks >= LAYERS_AT_ONCE {
                    next = Some(id.index() - 1);
                    break;
                }
                let info = volume_info(&meta, id);
                looks += LAYERS_PER_VOLUME + info.depth;
                all.push((info, more(volume)));
            }
            drop(meta);
            if next.is_some() {
                rest_since(begun);
            }
        }
        all
    }

    /// One volume with its usage.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn volume_info(&self, volume: &str) -> Result<VolumeInfo> {
        let usage = self.usage(volume, None)?;
        let meta = self.inner.meta();
        Ok(VolumeInfo { usage, ..volume_info(&meta, meta.find_volume(volume)?) })
    }

    /// Size of a volume in bytes, without what it takes to learn its usage.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn volume_size(&self, volume: &str) -> Result<u64> {
        let meta = self.inner.meta();
        Ok(meta.volume(meta.find_volume(volume)?).size)
    }

    /// Snapshots of a volume, oldest first.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshots(&self, volume: &str, with_usage: bool) -> Result<Vec<SnapshotInfo>> {
        let meta = self.inner.meta();
        let id = meta.find_volume(volume)?;
        let snapshots = meta.volume(id).snapshots.values();
        let mut all: Vec<_> = snapshots.map(|s| snapshot_info(&meta, *s)).collect();
        drop(meta);
        if with_usage {
            all.retain_mut(|info| {
                self.usage(volume, Some(&info.name)).map(|usage| info.usage = usage).is_ok()
            });
        }
        all.sort_by(|a, b| (a.created_ns, &a.name).cmp(&(b.created_ns, &b.name)));
        Ok(all)
    }

    /// One snapshot with its usage.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshot_info(&self, volume: &str, snapshot: &str) -> Result<SnapshotInfo> {
        let usage = self.usage(volume, Some(snapshot))?;
        let meta = self.inner.meta();
        Ok(SnapshotInfo { usage, ..snapshot_info(&meta, meta.find_snapshot(volume, snapshot)?.1) })
    }

    /// Clones: volumes and snapshots of other volumes built on this volume's snapshot (on any of
    /// its layers if `None`).
    ///
    /// # Errors
    /// `NotFound`.
    pub fn children(&self, volume: &str, snapshot: Option<&str>) -> Result<Vec<String>> {
        let meta = self.inner.meta();
        let id = meta.find_volume(volume)?;
        let layers: Vec<_> = match snapshot {
            Some(name) => vec![meta.find_snapshot(volume, name)?.1],
            None => meta.snapshots().filter(|(_, s)| s.volume == id).map(|(s, _)| s).collect(),
        };
        let mut names = Vec::new();
        for layer in layers {
            for child in &meta.snapshot(layer).children {
                let child = meta.snapshot(SnapshotId(*child));
                if child.volume != id && !child.volume.is_none() {
                    names.push(spec_of(&meta, child));
                }
            }
        }
        names.sort();
        Ok(names)
    }

    /// Space of a volume (head) or snapshot. Much is looked at step by step: of what changes meanwhile,
    /// at different moments.
    ///
    /// # Errors
    /// `NotFound`, also if it goes meanwhile.
    pub fn usage(&self, volume: &str, snapshot: Option<&str>) -> Result<Usage> {
        self.usage_while(volume, snapshot, &mut || true)
    }

    /// As [`Store::usage`], for as long as `go_on` says so, which is asked before each step.
    ///
    /// # Errors
    /// As [`Store::usage`]; `Interrupted` if it was not to go on.
    pub fn usage_while(
        &self,
        volume: &str,
        snapshot: Option<&str>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Usage> {
        let (mut usage, mut next, mut looked_at) = (Usage::default(), Some(0), None);
        while let Some(first) = next {
            if !go_on() {
                return Err(Error::new(
                    ErrorKind::Interrupted,
                    "looking at the space in use was stopped",
                ));
            }
            let begun = Instant::now();
            next = self.inner.look(|meta| {
                let id = find(meta, volume, snapshot)?;
                same(&mut looked_at, identity(meta, None, id), volume)?;
                meta.usage_step(id, first, &mut usage)
            })?;
            if next.is_some() {
                rest_since(begun);
            }
        }
        Ok(usage)
    }

    /// Creates an empty volume; `size` in bytes, a multiple of 512.
    ///
    /// # Errors
    /// `Exists`, `Invalid`, `NoSpace` when a table is full.
    pub fn create_volume(&self, name: &str, size: u64) -> Result<VolumeInfo> {
        self.create_volume_of(name, size, None, false)
    }

    /// As [`Store::create_volume`], of a volume that is to be filled: it is rebuilding from its first
    /// moment until [`Store::set_rebuilding`] says that it is complete.
    ///
    /// # Errors
    /// As [`Store::create_volume`].
    pub fn create_rebuilding(&self, name: &str, size: u64) -> Result<VolumeInfo> {
        self.create_volume_of(name, size, None, true)
    }

    /// As [`Store::create_volume`], of a time that is known from elsewhere, and perhaps to be filled.
    pub(crate) fn create_volume_of(
        &self,
        name: &str,
        size: u64,
        created_ns: Option<u64>,
        rebuilding: bool,
    ) -> Result<VolumeInfo> {
        let slots = self.make_slots(1)?;
        let births = self.inner.births(created_ns);
        self.inner.command(|meta| {
            let id = meta.create_volume(name, size, SnapshotId::NONE, births)?;
            slots.taken(meta);
            if rebuilding {
                meta.set_rebuilding(id, true);
            }
            // Not later: somebody may delete it while it is committed.
            Ok(volume_info(meta, id))
        })
    }

    /// Renames a volume.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `Invalid`; `Busy` if a virtual machine has it or a snapshot of it.
    pub fn rename_volume(&self, name: &str, new: &str) -> Result<()> {
        self.inner.command(|meta| {
            let id = meta.find_volume(name)?;
            meta.check_renamable(id, None)?;
            Ok(meta.rename_volume(id, new)?)
        })
    }

    /// A handle of a volume, which keeps it from being deleted. One of a snapshot would do to its volume
    /// what it is asked.
    ///
    /// # Errors
    /// `NotFound`, for a snapshot too.
    pub(super) fn head(&self, name: &str) -> Result<Volume> {
        self.inner.meta().find_volume(name)?;
        self.volume(name)
    }

    /// Changes the size; shrinking discards what is beyond (the caller has asked the user).
    ///
    /// # Errors
    /// `NotFound`, `Invalid`, `NoSpace` if the metadata that hides older content beyond the
    /// present end needs space there is none of; `Busy` if it shrinks and has a
    /// [holder](Store::volume_for).
    pub fn resize_volume(&self, name: &str, size: u64) -> Result<()> {
        self.resize_volume_if(name, size, true, &Expected::default())
    }

    /// As [`Store::resize_volume`], of a volume that is as expected, and to a smaller size only with `shrink`.
    ///
    /// # Errors
    /// As [`Store::resize_volume`]; `NotFound` and `Exists` if it is not as expected.
    pub fn resize_volume_if(
        &self,
        name: &str,
        size: u64,
        shrink: bool,
        expected: &Expected,
    ) -> Result<()> {
        self.inner.check_writable()?;
        let volume = self.head(name)?;
        let id = volume.ids().0;
        let check = |meta: &Meta| {
            expected.check_volume(meta, id)?;
            // Before anything is hidden up to there.
            check_size(size)?;
            let volume = meta.volume(id);
            if size < volume.size {
                let old = volume.size;
                if !shrink {
                    return Err(Error::invalid(format!(
                        "volume {name} has {old} bytes: a size of {size} destroys the content beyond it; \
                         allow that with `shrink`"
                    )));
                }
                meta.check_unheld(id, "shrinking")?;
                // What lies behind the new end is given up, which such a layer refuses.
                meta.check_not_lost(volume.head)?;
            }
            Ok(())
        };
        // Before anybody has to wait.
        check(&self.inner.meta())?;
        let (old, hold) = self.inner.hold_to_resize(&volume, size)?;
        let first = old.min(size).div_ceil(BLOCK_BYTES);
        let end = old.max(size).div_ceil(BLOCK_BYTES);
        if size > old {
            // What lies behind the end is nobody's content: it goes before it can be seen.
            let hidden = self.inner.meta().to_hide(id, first..end);
            if !hidden.is_empty() {
                self.inner.zero_behind(id, hidden)?;
            }
        }
        self.inner.command(|meta| {
            check(meta)?;
            if size < old {
                meta.mark_end(id, first..end)?;
            }
            Ok(meta.set_size(id, size)?)
        })?;
        if size < old {
            // Only gives space back; what stays is hidden when the volume grows again.
            match self.inner.zero_behind(id, first..end) {
                Err(error) if error.kind() != crate::ErrorKind::NoSpace => return Err(error),
                _ => self.inner.commit()?,
            }
        }
        drop(hold);
        Ok(())
    }

    /// Deletes a volume and its snapshots. Clones made from them live on.
    ///
    /// # Errors
    /// `NotFound`, `Busy` if it is open or a snapshot is protected.
    pub fn delete_volume(&self, name: &str) -> Result<()> {
        self.delete_volume_if(name, &Expected::default())
    }

    /// As [`Store::delete_volume`], of a volume that is as expected.
    ///
    /// # Errors
    /// As [`Store::delete_volume`]; `NotFound` and `Exists` if it is not as expected.
    pub fn delete_volume_if(&self, name: &str, expected: &Expected) -> Result<()> {
        self.inner.command(|meta| {
            let id = meta.find_volume(name)?;
            expected.check_volume(meta, id)?;
            Ok(meta.delete_volume(id)?)
        })
    }

    /// Creates a volume on a snapshot, in constant time.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `Invalid` (a retired snapshot among others), `Busy` if the volume is
    /// being rebuilt, `NoSpace` when a table is full.
    pub fn clone_volume(&self, volume: &str, snapshot: &str, new: &str) -> Result<VolumeInfo> {
        let info = self.clone_volume_of(volume, snapshot, new, None, false)?;
        self.inner.reserve_for_discards();
        Ok(info)
    }

    /// As [`Store::clone_volume`], of a volume that is to be filled: it is rebuilding from its first
    /// moment until [`Store::set_rebuilding`] says that it is complete.
    ///
    /// # Errors
    /// As [`Store::clone_volume`].
    pub fn clone_rebuilding(&self, volume: &str, snapshot: &str, new: &str) -> Result<VolumeInfo> {
        let info = self.clone_volume_of(volume, snapshot, new, None, true)?;
        self.inner.reserve_for_discards();
        Ok(info)
    }

    /// As [`Store::clone_volume`], of a time that is known from elsewhere, and perhaps to be filled.
    pub(crate) fn clone_volume_of(
        &self,
        volume: &str,
        snapshot: &str,
        new: &str,
        created_ns: Option<u64>,
        rebuilding: bool,
    ) -> Result<VolumeInfo> {
        let slots = self.make_slots(1)?;
        let births = self.inner.births(created_ns);
        self.inner.command(|meta| {
            let (origin, parent) = meta.find_base(volume, snapshot)?;
            meta.check_complete(origin)?;
            let size = meta.snapshot(parent).size;
            let id = meta.create_volume(new, size, parent, births)?;
            slots.taken(meta);
            self.inner.locked_as(meta.volume(origin).uuid, meta.volume(id).uuid);
            if rebuilding {
                meta.set_rebuilding(id, true);
            }
            Ok(volume_info(meta, id))
        })
    }

    /// Takes a snapshot of the head.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `Invalid`, `NoSpace` when a table is full; `Busy` if the volume is to
    /// be rebuilding and somebody has it open.
    pub fn create_snapshot(
        &self,
        volume: &str,
        name: &str,
        options: &SnapshotOptions,
    ) -> Result<SnapshotInfo> {
        self.inner.check_writable()?;
        let id = self.inner.meta().find_volume(volume)?;
        let slots = self.make_slots(1)?;
        let mut births = self.inner.births(options.created_ns);
        self.inner.step(|meta| {
            still_named(meta, volume, id)?;
            meta.prepare_snapshot(id, name, &options.labels)
        })?;
        // Only until writes in flight have ended: the commit goes on without stopping new ones.
        let hold = self.inner.hold_all(id);
        // Layers being written are written before the volume counts as complete.
        let layers = (options.rebuilding == Some(false))
            .then(|| self.inner.hold_in(Space::Snapshots(id), 0..u64::MAX, true));
        let created = self.inner.step_in_group(|meta| {
            still_named(meta, volume, id)?;
            if options.rebuilding == Some(true) {
                meta.check_closed(id)?;
            }
            if options.created_ns.is_none() {
                births[0].now_ns = births[0].now_ns.max(meta.behind_parent_ns(id));
            }
            let (system, labels) = (options.system, &options.labels);
            let created = meta.create_snapshot(id, name, !system, labels, births)?;
            slots.taken(meta);
            if let Some(rebuilding) = options.rebuilding {
                meta.set_rebuilding(id, rebuilding);
            }
            Ok(snapshot_info(meta, created))
        });
        drop((layers, hold));
        let info = created?;
        self.inner.commit()?;
        self.inner.reserve_for_discards();
        Ok(info)
    }

    /// Renames a snapshot.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `Invalid`; `Busy` if a virtual machine has it.
    pub fn rename_snapshot(&self, volume: &str, name: &str, new: &str) -> Result<()> {
        self.inner.command(|meta| {
            let (volume, id) = meta.find_snapshot(volume, name)?;
            meta.check_renamable(volume, Some(id))?;
            Ok(meta.rename_snapshot(volume, id, new)?)
        })
    }

    /// Deletes a snapshot. Its space comes back through [`Store::work`].
    ///
    /// # Errors
    /// `NotFound`, `Busy` if it is protected or open.
    pub fn delete_snapshot(&self, volume: &str, name: &str) -> Result<()> {
        self.delete_snapshot_if(volume, name, &Expected::default())
    }

    /// As [`Store::delete_snapshot`], of a snapshot that is as expected.
    ///
    /// # Errors
    /// As [`Store::delete_snapshot`]; `NotFound` if it is not as expected.
    pub fn delete_snapshot_if(&self, volume: &str, name: &str, expected: &Expected) -> Result<()> {
        self.inner.command(|meta| {
            let (volume, id) = meta.find_snapshot(volume, name)?;
            expected.check_snapshot(meta, volume, id)?;
            Ok(meta.delete_snapshot(volume, id)?)
        })
    }

    /// Makes everything acknowledged durable.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn flush(&self) -> Result<()> {
        if self.inner.read_only { Ok(()) } else { self.inner.commit() }
    }
}

impl Inner {
    /// Holds all of a volume that is to get this size, and says which one it has. Before it grows,
    /// what was left behind its end in its last block goes.
    fn hold_to_resize(&self, volume: &Volume, size: u64) -> Result<(u64, Hold<'_>)> {
        let id = volume.ids().0;
        let now = || {
            let meta = self.meta();
            (meta.volume(id).size, meta.volume(id).head)
        };
        loop {
            let before = now();
            if size > before.0 {
                volume.zero_last_block_behind(before.0)?;
            }
            let hold = self.hold_all(id);
            // While it waited others may have resized it, or rolled it back; or made it larger, written
            // there and made it what it was, so that only the block itself tells.
            if now() == before && (size <= before.0 || volume.last_block_cut(before.0)?.is_none()) {
                return Ok((before.0, hold));
            }
        }
    }

    /// Those of a volume or snapshot, which may be older, and of a head.
    pub(super) fn births(&self, created_ns: Option<u64>) -> [Birth; 2] {
        let (volume, head) = (self.birth(), self.birth());
        [Birth { now_ns: created_ns.unwrap_or(volume.now_ns), ..volume }, head]
    }

    pub(super) fn birth(&self) -> Birth {
        Birth { uuid: as_uuid(self.env.random()), now_ns: self.env.now_ns() }
    }

    /// The clock.
    pub(crate) fn now_ns(&self) -> u64 {
        self.env.now_ns()
    }
}

/// What two snapshots or heads are, whatever they are called.
pub(super) fn identity(meta: &Meta, from: Option<SnapshotId>, to: SnapshotId) -> [[u8; 16]; 2] {
    let uuid = |id| {
        let snapshot = meta.snapshot(id);
        // A snapshot gives its volume a new head.
        if snapshot.head() { meta.volume(snapshot.volume).uuid } else { snapshot.uuid }
    };
    [from.map(uuid).unwrap_or_default(), uuid(to)]
}

/// Refuses to go on with something else than what was begun with.
pub(super) fn same(
    begun: &mut Option<[[u8; 16]; 2]>,
    now: [[u8; 16]; 2],
    volume: &str,
) -> Result<()> {
    if *begun.get_or_insert(now) == now {
        return Ok(());
    }
    Err(Error::not_found(format!(
        "{volume} was deleted or renamed meanwhile, and something else has the name; try again"
    )))
}

pub(super) fn find(meta: &Meta, volume: &str, snapshot: Option<&str>) -> Result<SnapshotId> {
    match snapshot {
        Some(snapshot) => Ok(meta.find_snapshot(volume, snapshot)?.1),
        None => Ok(meta.volume(meta.find_volume(volume)?).head),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InitOptions, OpenOptions};
    use std::sync::atomic::Ordering;

    /// Found by review: a flatten has blocks of the head, and asks for those of the layers; the end of a `receive`
    /// had the layers, and asked for the head.
    #[test]
    fn who_ends_a_rebuild_has_no_layers_while_it_waits_for_the_head() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 8 << 20).unwrap();
        let inner = &*store.inner;
        let id = inner.meta().find_volume("v").unwrap();
        let head = inner.hold(id, 0..1, true);
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| {
                let options = SnapshotOptions { rebuilding: Some(false), ..Default::default() };
                store.create_snapshot("v", "s", &options).map(drop)
            });
            while inner.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let layers = inner.meta().locks.try_share(Space::Snapshots(id), 0..1);
            inner.meta().locks.release_shared(layers.unwrap());
            drop(head);
            ends.join().unwrap().unwrap();
        });
    }
}
