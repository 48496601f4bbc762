//! Collecting what no backup needs: section 9 of `docs/repository.md`, which argues why no backup loses a chunk.

use super::format::{self, BlobKind, CONDEMNED_MAX, LIST};
use super::keys::Kind;
use super::state::{Copies, Live};
use super::{AT_ONCE, Id, Repository};
use crate::names::{BlockName, TEMPORARY, hex};
use crate::objects::is_verdict;
use crate::pool::{self, Rate, Work};
use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// What a collection has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Collected {
    /// Backups that are there.
    pub backups: u64,
    /// Packs that are kept.
    pub packs: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Packs that were removed.
    pub removed: u64,
    /// Bytes of these.
    pub removed_bytes: u64,
    /// Packs that nobody needs, and that a later run may remove.
    pub condemned: u64,
    /// Bytes of these.
    pub condemned_bytes: u64,
    /// Packs of which little was needed, which was written into others, or was there already. They count as condemned.
    pub rewritten: u64,
    /// Bytes that were written for that.
    pub rewritten_bytes: u64,
    /// Seconds after which a run removes something that is condemned; none if nothing is.
    pub next_seconds: Option<u64>,
}

impl Repository {
    /// Collects.
    ///
    /// # Errors
    /// `Corrupt` if a backup, an index or what is condemned cannot be read: nothing is removed then; `Interrupted`; those of
    /// the store.
    pub fn collect(self: &Arc<Self>, work: &mut Work<'_>) -> Result<Collected> {
        // First: whoever writes a manifest later has looked at what is condemned later.
        let now = self.now()?;
        self.load(work.workers, &mut || (work.progress)(0, 0))?;
        self.check_indexes()?;
        self.adopt()?;
        let mut collected = Collected::default();
        let live = self.live(&mut collected, work)?;
        self.check_whole(&live, work)?;
        self.index_orphans(now)?;
        self.remove_condemned(now, &live, &mut collected, work)?;
        // Where there is no room to rewrite packs, all else is done before that is an error.
        let (spent, problem) = match self.rewrite(now, &live, collected.removed_bytes, work) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
            Err(error) => (HashSet::new(), Some(error)),
            Ok((spent, written)) => {
                (collected.rewritten, collected.rewritten_bytes) = (spent.len() as u64, written);
                (spent, None)
            }
        };
        self.condemn(now, &live, &spent, &mut collected)?;
        self.merge_indexes(now)?;
        self.tidy(now)?;
        match problem {
            None => Ok(collected),
            Some(error) => Err(error.context("rewriting packs of which little is needed")),
        }
    }

    /// The time, by the clock of whoever keeps the objects.
    fn now(&self) -> Result<SystemTime> {
        let id = Id::new()?;
        let path = format::path(&format!("clock/{}", hex(&id.0)));
        self.objects.put(&path, &self.keys.object(Kind::Clock, id).header)?;
        let stat = self.objects.stat(&path)?;
        self.objects.remove(&path)?;
        stat.map(|stat| stat.modified).ok_or_else(|| {
            Error::io(std::io::Error::other("it is gone"), format!("looking at {path}"))
        })
    }

    fn check_indexes(&self) -> Result<()> {
        let state = self.state();
        state.check_clear()?;
        state.problems.values().next().map_or(Ok(()), |problem| {
            Err(Error::corrupt(format!(
                "{problem}. Nothing is collected until you have removed it: what it says is in its packs, too, and is found \
                 there"
            )))
        })
    }

    /// Refuses to go on if something that a backup needs is nowhere: it may be in a pack whose index and footer are lost.
    fn check_whole(&self, live: &Live, work: &mut Work<'_>) -> Result<()> {
        let lost = || {
            let state = self.state();
            live.iter().find(|(kind, name)| state.locations(*kind, *name).is_empty()).copied()
        };
        if lost().is_some() {
            // A backup that was made since it was looked may have written it anew.
            self.load(work.workers, &mut || (work.progress)(0, 0))?;
            self.adopt()?;
        }
        lost().map_or(Ok(()), |(_, name)| {
            Err(Error::corrupt(format!(
                "chunk {name} is in no pack of the repository, and a backup needs it. Nothing is collected: `dbs backup verify` \
                 tells which one. Mend it with `dbs backup create --full`, or delete it"
            )))
        })
    }

    /// Writes an index of packs that no index names, unless somebody who makes a backup may be about to.
    fn index_orphans(&self, now: SystemTime) -> Result<()> {
        let orphans = std::mem::take(&mut self.state().orphans);
        let mut old = Vec::new();
        for pack in orphans {
            let stat = self.objects.stat(&format::pack_path(pack.id))?;
            if stat.is_some_and(|stat| self.is_old(now, stat.modified)) {
                old.push(pack);
            }
        }
        match old.is_empty() {
            true => Ok(()),
            false => self.put_index(&old).map(drop),
        }
    }

    /// Whether something was written the grace time ago. Times may be whole seconds.
    pub(super) fn is_old(&self, now: SystemTime, modified: SystemTime) -> bool {
        now.duration_since(modified).is_ok_and(|age| age > self.grace + Duration::from_secs(1))
    }

    /// Marks what the backups need.
    fn live(&self, collected: &mut Collected, work: &mut Work<'_>) -> Result<Live> {
        let (mut live, mut names) = (Live::new(), HashSet::new());
        for (place, manifest) in self.manifests(self.all_places()?)? {
            let manifest = manifest.map_err(|error| {
                let path = place.path();
                Error::corrupt(format!(
                    "{error}. Nothing is collected until {path} is removed, with `dbs backup delete` or by hand"
                ))
            })?;
            collected.backups += 1;
            names.extend(manifest.lists());
        }
        let names: Vec<_> = names.into_iter().collect();
        for (done, part) in names.chunks(LIST).enumerate() {
            let lists = self.lists(part).map_err(|error| match error.kind() {
                ErrorKind::NotFound | ErrorKind::Corrupt => Error::corrupt(format!(
                    "{error}. Nothing is collected: `dbs backup verify` tells which backup needs it"
                )),
                _ => error,
            })?;
            for (name, bytes) in lists {
                live.insert((BlobKind::List, name));
                let (ids, _) = bytes.as_chunks::<32>();
                let used = ids.iter().filter(|id| **id != [0; 32]);
                live.extend(used.map(|id| (BlobKind::Chunk, BlockName::from_bytes(*id))));
            }
            if !(work.progress)((done * LIST) as u64, names.len() as u64) {
                return Err(pool::interrupted());
            }
        }
        Ok(live)
    }

    /// Removes packs that were condemned long ago, but for those that a backup needs all the same.
    fn remove_condemned(
        &self,
        now: SystemTime,
        live: &Live,
        collected: &mut Collected,
        work: &mut Work<'_>,
    ) -> Result<()> {
        let (condemned, needed, used) = {
            let state = self.state();
            (state.condemned.clone(), state.needed(live, true), state.needed(live, false))
        };
        for (id, packs) in condemned {
            let path = format::path(&format!("condemned/{}", hex(&id.0)));
            let Some(stat) = self.objects.stat(&path)? else { continue };
            let there: Vec<(Id, u64)> = {
                let state = self.state();
                packs.iter().filter_map(|pack| Some((*pack, *state.listed.get(pack)?))).collect()
            };
            if !self.is_old(now, stat.modified) {
                let age = now.duration_since(stat.modified).unwrap_or_default();
                collected.wait(&there, self.grace.saturating_sub(age));
                continue;
            }
            let mut going: HashSet<Id> = there.iter().map(|(pack, _)| *pack).collect();
            going.retain(|pack| !needed.contains(pack));
            let alone = self.unproven(&going.intersection(&used).copied().collect(), live, work)?;
            let (gone, kept): (Vec<_>, Vec<_>) = there
                .into_iter()
                .partition(|(pack, _)| going.contains(pack) && !alone.contains(pack));
            self.remove_packs(&gone, collected, work)?;
            if kept.is_empty() {
                // Durably, before it is forgotten that nobody may rely on them.
                self.objects.settle()?;
                self.objects.remove(&path)?;
            }
        }
        Ok(())
    }

    /// Of packs that are condemned, or are about to be, those that hold something live of which no other pack, that stays, has
    /// a copy that can be read: that copy may have been damaged since.
    pub(super) fn unproven(
        &self,
        packs: &HashSet<Id>,
        live: &Live,
        work: &mut Work<'_>,
    ) -> Result<HashSet<Id>> {
        if packs.is_empty() {
            return Ok(HashSet::new());
        }
        let (all, rate) = (self.state().copies(packs, live), Rate::new(work.rate, &self.stop));
        let prove = |copies: Copies| {
            for location in &copies.others {
                match self.blob_at(copies.kind, copies.name, location, &rate, &mut 0) {
                    Err(error) if !is_verdict(error.kind()) => return Err(error),
                    Err(_) => {}
                    Ok(_) => return Ok(Vec::new()),
                }
            }
            Ok(copies.packs)
        };
        let mut unproven = HashSet::new();
        self.each(work.workers, all.into_iter(), prove, |packs| {
            unproven.extend(packs.into_iter().flatten());
            if (work.progress)(0, 0) { Ok(()) } else { Err(pool::interrupted()) }
        })?;
        Ok(unproven)
    }

    fn remove_packs(
        &self,
        packs: &[(Id, u64)],
        collected: &mut Collected,
        work: &mut Work<'_>,
    ) -> Result<()> {
        let remove = |(id, bytes): &(Id, u64)| {
            self.objects.remove(&format::pack_path(*id))?;
            self.state().removed(*id);
            Ok(*bytes)
        };
        pool::each(work.workers, &self.stop, packs.iter(), remove, |removed| {
            if let Some(bytes) = removed {
                collected.removed += 1;
                collected.removed_bytes += bytes;
            }
            if (work.progress)(collected.removed, collected.removed) {
                Ok(())
            } else {
                Err(pool::interrupted())
            }
        })
    }

    /// Condemns packs that nobody needs, and those that were rewritten.
    fn condemn(
        &self,
        now: SystemTime,
        live: &Live,
        spent: &HashSet<Id>,
        collected: &mut Collected,
    ) -> Result<()> {
        let (unneeded, kept) = self.unneeded(live, spent);
        collected.packs = kept.0;
        collected.bytes = kept.1;
        let mut old = Vec::new();
        for (id, bytes) in unneeded {
            let stat = self.objects.stat(&format::pack_path(id))?;
            // One that was written lately belongs to a backup that is being made, or to one that was cut off and is
            // continued.
            match stat.map(|stat| self.is_old(now, stat.modified)) {
                Some(true) => old.push((id, bytes)),
                Some(false) => {
                    collected.packs += 1;
                    collected.bytes += bytes;
                }
                None => {}
            }
        }
        for packs in old.chunks(CONDEMNED_MAX) {
            self.put_condemned(packs.iter().map(|(pack, _)| *pack))?;
            collected.wait(packs, self.grace);
        }
        Ok(())
    }

    fn put_condemned(&self, packs: impl Iterator<Item = Id>) -> Result<()> {
        self.put_condemned_since(packs, (Instant::now(), SystemTime::now()))
    }

    /// Condemns packs, which was begun at that time. Its time may be that at which it began, and nobody knew of it before
    /// it ended: if that took long, it does not count.
    pub(super) fn put_condemned_since(
        &self,
        packs: impl Iterator<Item = Id>,
        begun: (Instant, SystemTime),
    ) -> Result<()> {
        let id = Id::new()?;
        let plain: Vec<u8> = packs.flat_map(|pack| pack.0).collect();
        let object = format::seal_object(&self.keys, Kind::Condemned, id, &plain);
        let path = format::path(&format!("condemned/{}", hex(&id.0)));
        let put = self.objects.put(&path, &object);
        if !self.took_longer(begun, self.grace / 4) {
            return put;
        }
        self.objects.remove(&path)?;
        self.objects.settle()?;
        put.and(Err(Error::busy(
            "the writing of what is condemned took so long that it does not count",
        )))
    }

    /// Condemns the packs that were found damaged: the next backups write their chunks anew, and when no backup relies on
    /// them any more, they go. Returns how many.
    ///
    /// # Errors
    /// Those of the store.
    pub fn condemn_damaged(&self) -> Result<u64> {
        self.load(AT_ONCE, &mut || true)?;
        let damaged = self.damaged();
        for packs in damaged.chunks(CONDEMNED_MAX) {
            self.put_condemned(packs.iter().copied())?;
        }
        Ok(damaged.len() as u64)
    }

    /// Packs that were found damaged, and that nothing condemns.
    fn damaged(&self) -> Vec<Id> {
        let state = self.state();
        let known: HashSet<&Id> = state.condemned.values().flatten().collect();
        let damaged = state.damaged.iter().filter(|id| state.listed.contains_key(id));
        let mut damaged: Vec<Id> = damaged.filter(|id| !known.contains(id)).copied().collect();
        damaged.sort();
        damaged
    }

    /// The paths of these.
    pub fn damaged_packs(&self) -> Vec<String> {
        self.damaged().into_iter().map(format::pack_path).collect()
    }

    /// The packs that hold nothing live, or were rewritten; and how many others there are, and their bytes.
    fn unneeded(&self, live: &Live, spent: &HashSet<Id>) -> (Vec<(Id, u64)>, (u64, u64)) {
        let state = self.state();
        let mut needed = state.needed(live, false);
        needed.retain(|pack| !spent.contains(pack));
        let condemned: HashSet<Id> = state.condemned.values().flatten().copied().collect();
        let (mut unneeded, mut kept) = (Vec::new(), (0, 0));
        for (id, bytes) in &state.listed {
            if condemned.contains(id) && !needed.contains(id) {
                continue;
            }
            if needed.contains(id) {
                kept = (kept.0 + 1, kept.1 + bytes);
            } else {
                unneeded.push((*id, *bytes));
            }
        }
        (unneeded, kept)
    }

    /// Removes indexes of packs that are gone, and files whose writers were killed.
    fn tidy(&self, now: SystemTime) -> Result<()> {
        let gone: Vec<Id> = {
            let state = self.state();
            let is_there = |pack: &u32| {
                state
                    .packs
                    .get(*pack as usize)
                    .is_some_and(|pack| state.listed.contains_key(&pack.id))
            };
            let gone = state.indexes.iter().filter(|(_, packs)| !packs.iter().any(is_there));
            gone.map(|(id, _)| *id).collect()
        };
        let mut paths: Vec<String> =
            gone.iter().map(|id| format::path(&format!("index/{}", hex(&id.0)))).collect();
        self.objects.walk(format::BASE, &mut |path, _| {
            // A clock that nobody removed, as its process was killed.
            if path.contains(TEMPORARY) || path.starts_with("clock/") {
                paths.push(format::path(path));
            }
            Ok(())
        })?;
        let remove = |path: String| match self.objects.stat(&path)? {
            Some(stat) if self.is_old(now, stat.modified) => self.objects.remove(&path),
            _ => Ok(()),
        };
        pool::each(AT_ONCE, &self.stop, paths.into_iter(), remove, |_| Ok(()))?;
        self.objects.settle()
    }
}

impl Collected {
    /// Packs that are removed after a time.
    fn wait(&mut self, packs: &[(Id, u64)], time: Duration) {
        if packs.is_empty() {
            return;
        }
        self.condemned += packs.len() as u64;
        self.condemned_bytes += packs.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let seconds = time.as_secs() + 2;
        self.next_seconds = Some(self.next_seconds.map_or(seconds, |next| next.min(seconds)));
    }
}
