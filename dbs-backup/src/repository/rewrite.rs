//! Rewriting packs of which little is needed, and merging indexes: section 9 of `docs/repository.md`.

use super::format::{self, BlobKind, INDEX_PACKS};
use super::state::{Live, Location, State};
use super::{Id, Repository, Writer};
use crate::codec::Method;
use crate::names::{BlockName, hex};
use crate::objects::is_verdict;
use crate::pool::{self, Rate, Work};
use dbs_core::{ErrorKind, Result};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

/// Bytes that one run writes anew at most, if it has not removed more: what they replace stays beside them for a day.
const REWRITTEN_MAX: u64 = 1 << 30;
/// Small indexes that are left as they are.
const SMALL_INDEXES: usize = 8;

/// Some blobs of one kind; without a content, those that cannot be read.
type Read = (BlobKind, Vec<(BlockName, Option<Vec<u8>>)>);

/// A pack of which little is needed.
struct Sparse {
    id: Id,
    /// Bytes of blobs that are needed, and only here.
    kept: u64,
    /// Bytes of all blobs.
    blobs: u64,
}

impl Repository {
    /// Writes what is needed of packs that hold little that is, into new packs with an index; of all such packs so many that
    /// it takes not much more than was `removed`. Returns the packs that are not needed any more, and the bytes that were
    /// written. They are there until they were condemned and removed as all others are: so nothing here has to be right
    /// for that to be safe.
    ///
    /// # Errors
    /// `Interrupted`; those of the store.
    pub(super) fn rewrite(
        self: &Arc<Self>,
        now: SystemTime,
        live: &Live,
        removed: u64,
        work: &mut Work<'_>,
    ) -> Result<(HashSet<Id>, u64)> {
        let mut old = Vec::new();
        let sparse = self.state().sparse(live);
        for pack in sparse {
            let stat = self.objects.stat(&format::pack_path(pack.id))?;
            // What the others lack may be wanted by a backup that is being made.
            if stat.is_some_and(|stat| self.is_old(now, stat.modified)) {
                old.push(pack);
            }
        }
        let mut spent = within(removed.max(REWRITTEN_MAX), old);
        // What others keep is proven there first: else the pack in which it is good is given up for one in which it is not.
        let elsewhere = self.state().kept_elsewhere(live, &spent);
        let alone = self.unproven(&spent, &elsewhere, work)?;
        spent.retain(|pack| !alone.contains(pack));
        let writer = Writer::new(self);
        match self.copy_all(&writer, live, &mut spent, work) {
            Ok(()) => Ok((spent, writer.uploaded())),
            Err(error) => {
                // A run that was cut off goes on by what is there. But where there is no room for it, backups need what
                // there is.
                if error.kind() != ErrorKind::Interrupted {
                    writer.withdraw();
                }
                Err(error)
            }
        }
    }

    /// Copies what is needed of packs; those of which something cannot be read are taken out.
    fn copy_all(
        &self,
        writer: &Writer,
        live: &Live,
        spent: &mut HashSet<Id>,
        work: &mut Work<'_>,
    ) -> Result<()> {
        let needed = self.state().kept_by(live, spent);
        for kind in [BlobKind::List, BlobKind::Chunk] {
            let mut names: Vec<_> = needed.iter().filter(|((of, _), _)| *of == kind).collect();
            // Those beside each other are read together.
            names.sort_by_key(|(_, at)| **at);
            let names: Vec<_> = names.into_iter().map(|((_, name), _)| *name).collect();
            self.copy(writer, kind, &names, work, |name| {
                // One that cannot be read anywhere keeps its pack.
                if let Some((pack, _)) = needed.get(&(kind, name)) {
                    spent.remove(pack);
                }
            })?;
        }
        writer.flush()?;
        self.objects.settle()
    }

    fn copy(
        &self,
        writer: &Writer,
        kind: BlobKind,
        names: &[BlockName],
        work: &mut Work<'_>,
        mut unreadable: impl FnMut(BlockName),
    ) -> Result<()> {
        let rate = Rate::new(work.rate, &self.stop);
        let one = |name: &BlockName| match self.blob(kind, *name, &rate) {
            Ok((content, _)) => Ok((*name, Some(content))),
            Err(error) if is_verdict(error.kind()) => Ok((*name, None)),
            Err(error) => Err(error),
        };
        let read = |names: &[BlockName]| -> Result<Read> {
            let together = match kind {
                BlobKind::Chunk => self.fetch_some(names, &rate).map(|(found, _)| found),
                BlobKind::List => self.lists(names),
            };
            match together {
                Ok(found) => {
                    Ok((kind, found.into_iter().map(|(name, bytes)| (name, Some(bytes))).collect()))
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => Err(error),
                Err(_) => Ok((kind, names.iter().map(one).collect::<Result<_>>()?)),
            }
        };
        let mut done = 0;
        self.each(work.workers, names.chunks(self.run()), read, |found| {
            let (kind, found) = found.unwrap_or((kind, Vec::new()));
            done += found.len() as u64;
            for (name, content) in found {
                match content {
                    Some(content) if kind == BlobKind::Chunk => {
                        writer.add_chunk(name, &content, Method::Lz4, &rate)?;
                    }
                    Some(content) => writer.add_list(name, &content)?,
                    None => unreadable(name),
                }
            }
            let goes_on = (work.progress)(done, names.len() as u64);
            if goes_on { Ok(()) } else { Err(pool::interrupted()) }
        })
    }

    /// Has few indexes name what many small ones do: each backup leaves one. They are removed when the new ones are
    /// durable. Whoever has listed them before, and does not find them any more, finds their packs by the footers.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn merge_indexes(&self, now: SystemTime) -> Result<()> {
        let (small, named) = {
            let state = self.state();
            let (large, small) = state.indexes_by_size(INDEX_PACKS / 2);
            (small, state.packs_of(&large))
        };
        if small.len() <= SMALL_INDEXES {
            return Ok(());
        }
        let path = |id: Id| format::path(&format!("index/{}", hex(&id.0)));
        let mut merged = HashMap::new();
        let mut old = Vec::new();
        for id in small {
            let stat = self.objects.stat(&path(id))?;
            if stat.is_some_and(|stat| self.is_old(now, stat.modified)) {
                // Its packs once each, as far as they are there.
                let packs = self.index(id)?.into_iter();
                let state = self.state();
                let packs = packs
                    .filter(|p| state.listed.contains_key(&p.id) && !named.contains(&p.id))
                    .map(|pack| (pack.id, pack));
                merged.extend(packs);
                old.push(id);
            }
        }
        if old.len() <= SMALL_INDEXES {
            return Ok(());
        }
        let mut merged: Vec<_> = merged.into_values().collect();
        merged.sort_by_key(|pack| pack.id);
        if !merged.is_empty() {
            self.put_index(&merged)?;
        }
        self.objects.settle()?;
        old.iter().try_for_each(|id| self.objects.remove(&path(*id)))?;
        let mut state = self.state();
        old.iter().for_each(|id| drop(state.indexes.remove(id)));
        Ok(())
    }
}

/// Of these packs, the best, so that not much more than `bytes` are written for them; and one at least.
fn within(bytes: u64, mut packs: Vec<Sparse>) -> HashSet<Id> {
    packs.sort_by_key(|pack| (pack.kept.saturating_mul(1000) / pack.blobs.max(1), pack.id));
    let mut left = bytes;
    let fits = |pack: &Sparse| {
        let fits = left > 0;
        left = left.saturating_sub(pack.kept);
        fits
    };
    packs.into_iter().take_while(fits).map(|pack| pack.id).collect()
}

impl State {
    /// For each pack that stays, the bytes of live blobs in it.
    fn live_bytes(&self, live: &Live) -> HashMap<Id, u64> {
        let mut bytes = HashMap::new();
        for (kind, name) in live {
            for at in self.staying(*kind, *name) {
                *bytes.entry(at.pack).or_default() += u64::from(at.length);
            }
        }
        bytes
    }

    /// Of the copies of a blob, the one that is kept: in the pack with most that is live.
    fn keeper(
        &self,
        bytes: &HashMap<Id, u64>,
        (kind, name): (BlobKind, BlockName),
    ) -> Option<Location> {
        let rank = |at: &Location| (bytes.get(&at.pack).copied(), Reverse(at.pack));
        self.staying(kind, name).max_by_key(rank)
    }

    /// Packs that stay and hold something live, but at most in half of their bytes, not counting what other packs keep.
    fn sparse(&self, live: &Live) -> Vec<Sparse> {
        let bytes = self.live_bytes(live);
        let mut kept: HashMap<Id, u64> = bytes.keys().map(|id| (*id, 0)).collect();
        for at in live.iter().filter_map(|blob| self.keeper(&bytes, *blob)) {
            *kept.entry(at.pack).or_default() += u64::from(at.length);
        }
        // What is around the blobs is in any pack.
        let sparse = self.packs.iter().filter_map(|pack| {
            let kept = *kept.get(&pack.id)?;
            (kept * 2 <= pack.blobs).then_some(Sparse { id: pack.id, kept, blobs: pack.blobs })
        });
        sparse.collect()
    }

    /// What is live and kept in these packs, with its pack and its place there.
    fn kept_by(
        &self,
        live: &Live,
        packs: &HashSet<Id>,
    ) -> HashMap<(BlobKind, BlockName), (Id, u32)> {
        if packs.is_empty() {
            return HashMap::new();
        }
        let bytes = self.live_bytes(live);
        let kept = |blob: &(BlobKind, BlockName)| {
            let at = self.keeper(&bytes, *blob)?;
            packs.contains(&at.pack).then_some((*blob, (at.pack, at.offset)))
        };
        live.iter().filter_map(kept).collect()
    }

    /// What is live in these packs, and kept by others.
    fn kept_elsewhere(&self, live: &Live, packs: &HashSet<Id>) -> Live {
        let bytes = self.live_bytes(live);
        let is_elsewhere = |blob: &&(BlobKind, BlockName)| {
            let is_in = self.staying(blob.0, blob.1).any(|at| packs.contains(&at.pack));
            is_in && self.keeper(&bytes, **blob).is_some_and(|at| !packs.contains(&at.pack))
        };
        live.iter().filter(is_elsewhere).copied().collect()
    }

    /// Indexes that name at least so many packs that are there, and the others.
    fn indexes_by_size(&self, packs: usize) -> (Vec<Id>, Vec<Id>) {
        let mut all: Vec<_> = self.indexes.keys().copied().collect();
        all.sort();
        all.into_iter().partition(|id| self.packs_of(&[*id]).len() >= packs)
    }

    /// The packs that are there and that these indexes name.
    fn packs_of(&self, indexes: &[Id]) -> HashSet<Id> {
        let packs = indexes.iter().filter_map(|id| self.indexes.get(id)).flatten();
        let packs = packs.filter_map(|number| self.packs.get(*number as usize)).map(|p| p.id);
        packs.filter(|id| self.listed.contains_key(id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_takes_the_best_packs() {
        let pack = |id: u8, kept, blobs| Sparse { id: Id([id; 16]), kept, blobs };
        let all = || vec![pack(1, 40, 100), pack(2, 0, 100), pack(3, 30, 100), pack(4, 50, 100)];
        let taken = |bytes| {
            let mut taken: Vec<u8> = within(bytes, all()).into_iter().map(|id| id.0[0]).collect();
            taken.sort();
            taken
        };
        assert_eq!(taken(1), [2, 3]);
        assert_eq!(taken(30), [2, 3]);
        assert_eq!(taken(31), [1, 2, 3]);
        assert_eq!(taken(1000), [1, 2, 3, 4]);
    }
}
