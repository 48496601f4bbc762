//! What data connections tell and ask a replica. Nothing here waits for `work`.

use super::generation::Generation;
use super::{FileId, Place, Replica, view};
use dbs_core::info::LayerState;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, Result, Store, Volume};
use longhorn_data::ActiveEvents;
use longhorn_wire::time;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::{Duration, Instant};

/// How long a replica found healthy is taken for it.
const HEALTH_AGE: Duration = Duration::from_secs(1);

/// Most runs of data that are counted to say how much an unmap has freed.
const MAP_ENTRIES: usize = 1024;

/// A replica as its data connections know it.
pub(super) struct Events(pub Weak<Replica>);

impl Events {
    fn replica(&self) -> Result<std::sync::Arc<Replica>> {
        self.0.upgrade().ok_or_else(|| Error::busy("the replica has ended"))
    }
}

impl ActiveEvents for Events {
    fn first_change(&self) {
        if let Ok(replica) = self.replica() {
            replica.set_dirty();
        }
    }

    fn unmap(&self, offset: u64, length: u64) -> Result<u64> {
        self.replica()?.unmap(offset, length)
    }

    fn commit(&self) -> Result<()> {
        let replica = self.replica()?;
        let Some(store) = replica.owned() else { return Err(replica.surrendered()) };
        replica.counters.touch(time::now_ns());
        replica.commit_to(&store)
    }

    fn healthy(&self) -> std::result::Result<(), String> {
        let replica = self.replica().map_err(|e| e.to_string())?;
        replica.check_health().map_err(|e| format!("ping failure due to {e}"))
    }
}

impl Replica {
    /// The head differs from what was opened.
    pub(super) fn set_dirty(&self) {
        self.note_generation(Generation::change);
        if let Some(opened) = &mut self.state().opened {
            opened.dirty = true;
        }
        self.counters.touch(time::now_ns());
    }

    /// Looks whether the replica can still do its work; the answer is kept for a second, a bad one
    /// until it is opened or reloaded.
    pub(super) fn check_health(&self) -> std::result::Result<(), String> {
        let volume = {
            let mut state = self.state();
            let recent = state.checked.is_some_and(|checked| checked.elapsed() < HEALTH_AGE);
            let Some(opened) = &state.opened else { return Ok(()) };
            if !opened.error.is_empty() {
                return Err(opened.error.clone());
            }
            if recent {
                return Ok(());
            }
            let (volume, files) = (opened.volume.clone(), opened.files.clone());
            state.checked = Some(Instant::now());
            volume.map(|volume| (volume, files))
        };
        let Some((volume, files)) = volume else { return Ok(()) };
        let result = self.look(&volume, &files);
        if let (Err(error), Some(opened)) = (&result, &mut self.state().opened) {
            dbs_service::log::error("unhealthy", &[("volume", &volume.spec()), ("error", error)]);
            opened.error.clone_from(error);
        }
        result
    }

    fn look(
        &self,
        volume: &Volume,
        files: &[(PathBuf, FileId)],
    ) -> std::result::Result<(), String> {
        // Nothing is written; it says whether something could be.
        volume.write_at(0, &[], false).map_err(|e| e.to_string())?;
        // It is pinned, but may have been renamed.
        let store = self.owned().ok_or_else(|| self.surrendered().to_string())?;
        store.layer(&self.options.volume, None).map_err(|e| e.to_string())?;
        for (path, before) in files {
            let now = file_id(path).map_err(|e| format!("`{}` is gone: {e}", path.display()))?;
            if now != *before {
                return Err(format!("`{}` is gone: there is another one now", path.display()));
            }
        }
        Ok(())
    }

    /// The files that the replica depends on, as they are.
    pub(super) fn files(&self) -> Result<Vec<(PathBuf, FileId)>> {
        let paths = [Some(&self.options.dir), self.options.store_file.as_ref()];
        let identified = paths.into_iter().flatten().map(|path| {
            let id = file_id(path).map_err(|e| Error::io(e, path.display().to_string()))?;
            Ok((path.clone(), id))
        });
        identified.collect()
    }

    /// Discards the whole blocks inside the range in the head, and in the run of removed snapshots
    /// below it; with the flag for it set, the snapshots below are marked as removed first.
    fn unmap(&self, offset: u64, length: u64) -> Result<u64> {
        // Snapshots that are not in the store are marked with an unmap after they are.
        let taking = self.taking().is_some();
        let (store, volume, mark) = {
            let state = self.state();
            let volume = state.opened.as_ref().and_then(|opened| opened.volume.clone());
            let (Place::Own(store), Some(volume)) = (&state.store, volume) else {
                return Err(Error::invalid("replica no longer exist"));
            };
            let mark = state.limits.unmap_mark && state.marked != Some(state.head) && !taking;
            (store.clone(), volume, mark.then_some(state.head))
        };
        let size = volume.size();
        let end = offset.saturating_add(length).min(size);
        let start = offset.next_multiple_of(BLOCK_BYTES);
        let end = if end == size { end } else { end - end % BLOCK_BYTES };
        if start >= end {
            return Ok(0);
        }
        if let Some(head) = mark {
            self.mark_below_head(&store)?;
            self.state().marked = Some(head);
        }
        let freed = held(&store, &self.options.volume, start..end)?;
        volume.discard(start, end - start)?;
        Ok(freed + store.prune(&self.options.volume, start, end - start)?)
    }

    /// Marks the run of snapshots right under the head that have one child each as removed.
    fn mark_below_head(&self, store: &Store) -> Result<()> {
        let facts = self.facts()?;
        let disks = facts.disks();
        for name in view::live_chain(&disks, &facts.head_disk()).into_iter().skip(1) {
            let Some(disk) = disks.get(name).filter(|disk| disk.children.len() == 1) else { break };
            if let (Some(snapshot), false) = (&disk.snapshot, disk.removed) {
                store.set_retired(&self.options.volume, snapshot, true)?;
            }
        }
        Ok(())
    }
}

fn file_id(path: &Path) -> std::io::Result<FileId> {
    std::fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Bytes of data that the head holds in a range, as far as that can be said in short.
fn held(store: &Store, volume: &str, range: Range<u64>) -> Result<u64> {
    let map = store.layer(volume, None)?.map(range.start, range.end - range.start, MAP_ENTRIES)?;
    Ok(map.iter().filter(|part| part.state == LayerState::Data).map(|part| part.length).sum())
}
