//! What is there: section 6 of `docs/repository.md`.

use super::format::{self, BlobKind, INDEX_LIMIT, PACK_TAIL, PackIndex};
use super::keys::Kind;
use super::{AT_ONCE, Id, Repository};
use crate::names::{BlockName, hex};
use crate::pool;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of an object that condemns packs.
const CONDEMNED_LIMIT: u64 = 2 << 20;
/// Bytes that are read at the end of a pack: the footer of most packs, and all behind it.
const TAIL: u64 = 16 << 10;
/// For so long it is not looked again for what is nowhere.
const FRESH: Duration = Duration::from_secs(10);

/// What backups need.
pub(super) type Live = HashSet<(BlobKind, BlockName)>;

/// Where a blob is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Location {
    pub pack: Id,
    /// Of the piece.
    pub number: u16,
    pub offset: u32,
    pub length: u32,
    pub bytes: u32,
    pub is_lz4: bool,
}

impl Location {
    /// Where it ends in the pack.
    pub fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.length)
    }
}

/// The same, in less memory.
#[derive(Debug, Clone, Copy)]
struct Place {
    pack: u32,
    offset: u32,
    length: u32,
    bytes: u32,
    number: u16,
    is_lz4: bool,
}

impl Place {
    fn location(&self, pack: &Pack) -> Location {
        let Self { number, offset, length, bytes, is_lz4, .. } = *self;
        Location { pack: pack.id, number, offset, length, bytes, is_lz4 }
    }
}

/// A pack that an index names.
#[derive(Debug)]
pub(super) struct Pack {
    pub id: Id,
    length: u64,
    /// Bytes of its blobs.
    pub blobs: u64,
    /// It is in the list of packs, with its length.
    is_there: bool,
    pub is_condemned: bool,
}

/// A blob in condemned packs.
pub(super) struct Copies {
    pub kind: BlobKind,
    pub name: BlockName,
    /// The condemned packs that have it.
    pub packs: Vec<Id>,
    /// Where else it is.
    pub others: Vec<Location>,
}

/// What was found in the indexes, and what of it is there.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Indexes that were read, and the packs that they name.
    pub indexes: HashMap<Id, Vec<u32>>,
    /// Indexes that cannot be read, and why.
    pub problems: HashMap<Id, String>,
    pub packs: Vec<Pack>,
    numbers: HashMap<Id, u32>,
    blobs: HashMap<(BlobKind, BlockName), Place>,
    /// Further places of blobs that are in several packs.
    more: HashMap<(BlobKind, BlockName), Vec<Place>>,
    /// Packs in the list of packs, and their bytes.
    pub listed: HashMap<Id, u64>,
    /// What each object condemns.
    pub condemned: HashMap<Id, Vec<Id>>,
    /// All packs that were condemned: once condemned, always condemned, for as long as this process knows of it, and also
    /// those that it comes to know later.
    pub doomed: HashSet<Id>,
    /// Packs in which something was found damaged.
    pub damaged: HashSet<Id>,
    /// Packs that no index names, and whose footers were read.
    pub orphans: Vec<PackIndex>,
    /// Footers were read since it was looked what is there.
    has_adopted: bool,
    /// When it was looked what is there.
    loaded: Option<Instant>,
    /// Lists that were nowhere then.
    missed: HashSet<BlockName>,
    /// Why it is not known what all of them condemn.
    pub unclear: Option<String>,
}

impl State {
    /// Adds what an index says. A pack that is known already is not added twice.
    pub fn add(&mut self, index: Option<Id>, packs: Vec<PackIndex>) {
        let mut numbers = Vec::new();
        for pack in packs {
            if let Some(number) = self.numbers.get(&pack.id) {
                numbers.push(*number);
                continue;
            }
            let number = self.packs.len() as u32;
            numbers.push(number);
            self.numbers.insert(pack.id, number);
            self.packs.push(Pack {
                id: pack.id,
                length: pack.length,
                blobs: pack.entries.iter().map(|entry| u64::from(entry.length)).sum(),
                is_there: self.listed.get(&pack.id) == Some(&pack.length),
                is_condemned: self.doomed.contains(&pack.id),
            });
            for (piece, entry) in pack.entries.iter().enumerate() {
                let place = Place {
                    pack: number,
                    offset: entry.offset,
                    length: entry.length,
                    bytes: entry.bytes,
                    number: piece as u16,
                    is_lz4: entry.is_lz4,
                };
                let key = (entry.kind, entry.name);
                // The last that was added is tried first; the others are kept.
                if let Some(before) = self.blobs.insert(key, place) {
                    self.more.entry(key).or_default().push(before);
                }
            }
        }
        if let Some(index) = index {
            self.indexes.insert(index, numbers);
        }
    }

    fn places(&self, kind: BlobKind, name: BlockName) -> impl Iterator<Item = (&Place, &Pack)> {
        let key = (kind, name);
        let all = self.blobs.get(&key).into_iter().chain(self.more.get(&key).into_iter().flatten());
        all.map(|place| (place, &self.packs[place.pack as usize])).filter(|(_, pack)| pack.is_there)
    }

    /// Where a blob can be read: first where it stays.
    pub fn locations(&self, kind: BlobKind, name: BlockName) -> Vec<Location> {
        let mut places: Vec<_> = self.places(kind, name).collect();
        places.sort_by_key(|(_, pack)| pack.is_condemned);
        places.into_iter().map(|(place, pack)| place.location(pack)).collect()
    }

    /// Whether a blob is there, as the document has it: in a pack that stays, and in which nothing was found damaged.
    pub fn is_there(&self, kind: BlobKind, name: BlockName) -> bool {
        self.staying(kind, name).next().is_some()
    }

    /// Of condemned packs, the live blobs in them, with where else each can be read: in packs that nothing condemns.
    pub fn copies(&self, packs: &HashSet<Id>, live: &Live) -> Vec<Copies> {
        let copies = |(kind, name): &(BlobKind, BlockName)| {
            let (inside, others): (Vec<_>, Vec<_>) =
                self.locations(*kind, *name).into_iter().partition(|at| packs.contains(&at.pack));
            let others = others.into_iter().filter(|at| !self.doomed.contains(&at.pack)).collect();
            let packs: Vec<_> = inside.into_iter().map(|at| at.pack).collect();
            (!packs.is_empty()).then_some(Copies { kind: *kind, name: *name, packs, others })
        };
        live.iter().filter_map(copies).collect()
    }

    /// The packs of those that are there which hold a blob for which `live` says yes; with `alone` only if it is in no
    /// other pack that stays.
    pub fn needed(&self, live: &Live, alone: bool) -> HashSet<Id> {
        let mut needed = HashSet::new();
        for (kind, name) in live {
            if !alone || !self.is_there(*kind, *name) {
                needed.extend(self.places(*kind, *name).map(|(_, pack)| pack.id));
            }
        }
        needed
    }

    /// Where a blob is in packs that stay, and in which nothing was found damaged.
    pub fn staying(&self, kind: BlobKind, name: BlockName) -> impl Iterator<Item = Location> {
        self.places(kind, name)
            .filter(|(_, pack)| !pack.is_condemned && !self.damaged.contains(&pack.id))
            .map(|(place, pack)| place.location(pack))
    }

    /// Whether it is known of a list where it is, or that it is nowhere.
    fn knows(&self, list: BlockName) -> bool {
        self.missed.contains(&list) || self.places(BlobKind::List, list).next().is_some()
    }

    /// Notes that it is not known any more what is there: a pack has gone.
    pub fn outdated(&mut self, pack: Id) {
        self.removed(pack);
        self.loaded = None;
    }

    /// Whether an index names a pack.
    pub fn is_indexed(&self, pack: Id) -> bool {
        self.numbers.contains_key(&pack)
    }

    /// Refuses to go on if it is not known which packs are condemned: whoever relies on what is there would rely on
    /// packs that go.
    pub fn check_clear(&self) -> Result<()> {
        self.unclear.as_ref().map_or(Ok(()), |problem| {
            Err(Error::corrupt(format!(
                "{problem}. It says what is going to be removed: nothing is written until you have removed it by hand, while \
                 nobody runs `dbs backup prune`"
            )))
        })
    }

    /// A blob that cannot be read anywhere.
    pub fn missing(&self, kind: BlobKind, name: BlockName) -> Error {
        let what = if kind == BlobKind::Chunk { "chunk" } else { "list" };
        let place = self.blobs.get(&(kind, name)).and_then(|p| self.packs.get(p.pack as usize));
        let why = match (place, self.problems.values().next()) {
            (Some(pack), _) => format!(
                "{what} {name} was in {}, which is not there or has another length",
                format::pack_path(pack.id)
            ),
            (None, Some(problem)) => {
                format!("{what} {name} is in no pack of the repository. Perhaps because {problem}")
            }
            (None, None) => format!("{what} {name} is in no pack of the repository"),
        };
        Error::not_found(why)
    }

    /// Takes over new lists of what is there.
    fn settle(&mut self, condemned: HashMap<Id, Vec<Id>>, listed: HashMap<Id, u64>) {
        self.doomed.extend(condemned.values().flatten());
        for pack in &mut self.packs {
            pack.is_condemned = self.doomed.contains(&pack.id);
            pack.is_there = listed.get(&pack.id) == Some(&pack.length);
        }
        self.condemned = condemned;
        self.listed = listed;
        (self.loaded, self.has_adopted) = (Some(Instant::now()), false);
    }

    /// Notes that a pack was removed.
    pub fn removed(&mut self, id: Id) {
        self.listed.remove(&id);
        let number = self.numbers.get(&id).copied();
        if let Some(pack) = number.and_then(|number| self.packs.get_mut(number as usize)) {
            pack.is_there = false;
        }
    }

    /// Notes a pack that was written, which no index names yet.
    pub fn wrote(&mut self, pack: PackIndex) {
        self.listed.insert(pack.id, pack.length);
        self.add(None, vec![pack]);
    }
}

impl Repository {
    /// Looks what is there: condemned packs, new indexes, and the list of packs, in this order. `go_on` is asked from time to
    /// time.
    ///
    /// # Errors
    /// Those of the store; `Interrupted`. An index that is damaged is no error here: see `State::problems`.
    pub fn load(&self, workers: usize, go_on: &mut dyn FnMut() -> bool) -> Result<()> {
        let alone = self.alone();
        self.load_alone(&alone, workers, go_on)
    }

    /// One loads, and others wait until it is known what is there.
    fn alone(&self) -> MutexGuard<'_, ()> {
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load_alone(
        &self,
        _alone: &MutexGuard<'_, ()>,
        workers: usize,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let condemned = self.list_condemned()?;
        let indexes = self.ids("index")?;
        let new: Vec<Id> = {
            let mut state = self.state();
            state.problems.clear();
            indexes.into_iter().filter(|id| !state.indexes.contains_key(id)).collect()
        };
        let read = |id: Id| match self.index(id) {
            Ok(packs) => Ok(Some((id, Ok(packs)))),
            // Removed meanwhile, as its packs are.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                Ok(Some((id, Err(error.to_string()))))
            }
            Err(error) => Err(error),
        };
        self.each(workers, new.into_iter(), read, |found| {
            match found.flatten() {
                Some((id, Ok(packs))) => self.state().add(Some(id), packs),
                Some((id, Err(problem))) => drop(self.state().problems.insert(id, problem)),
                None => {}
            }
            if go_on() { Ok(()) } else { Err(pool::interrupted()) }
        })?;
        let listed = self.list_packs()?;
        self.state().settle(condemned, listed);
        Ok(())
    }

    /// Looks what is there if that is not known, or has been for a while. Then blobs that are still nowhere are looked for
    /// in packs that no index names.
    pub(super) fn load_for(&self, kind: BlobKind, names: &[BlockName]) -> Result<()> {
        let is_nowhere = || {
            let state = self.state();
            names.iter().any(|name| state.places(kind, *name).next().is_none())
        };
        // That of a manifest that was read since may have come since.
        let is_known = || {
            let state = self.state();
            let is_fresh = state.loaded.is_some_and(|loaded| loaded.elapsed() < FRESH);
            is_fresh && (kind == BlobKind::Chunk || names.iter().all(|n| state.knows(*n)))
        };
        if !is_nowhere() {
            return Ok(());
        }
        // Another thread may just be looking for the same.
        let alone = self.alone();
        if is_nowhere() && !is_known() {
            self.load_alone(&alone, AT_ONCE, &mut || true)?;
        }
        if is_nowhere() && !self.state().has_adopted {
            self.adopt_alone(&alone)?;
        }
        if kind == BlobKind::List && is_nowhere() {
            self.state().missed.extend(names);
        }
        Ok(())
    }

    /// Looks again at what may have gone: condemned packs, then the list of packs.
    ///
    /// # Errors
    /// Those of the store.
    pub fn look_again(&self) -> Result<()> {
        let _alone = self.alone();
        let condemned = self.list_condemned()?;
        let listed = self.list_packs()?;
        self.state().settle(condemned, listed);
        Ok(())
    }

    /// The ids of the objects right below a folder.
    pub fn ids(&self, folder: &str) -> Result<Vec<Id>> {
        let names = self.objects.list(&format::path(folder))?;
        Ok(names.iter().filter_map(|name| Id::parse(name)).collect())
    }

    /// Reads the footers of packs that no index names: of a backup that was cut off or is being made, or of an index that is
    /// lost. Those that can be read are orphans from then on.
    ///
    /// # Errors
    /// Those of the store.
    pub fn adopt(&self) -> Result<()> {
        let alone = self.alone();
        self.adopt_alone(&alone)
    }

    fn adopt_alone(&self, _alone: &MutexGuard<'_, ()>) -> Result<()> {
        let orphans: Vec<(Id, u64)> = {
            let state = self.state();
            let listed = state.listed.iter().map(|(id, length)| (*id, *length));
            listed.filter(|(id, _)| !state.is_indexed(*id)).collect()
        };
        let mut found = Vec::new();
        let read = |(id, length): (Id, u64)| match self.footer(id, length) {
            // Removed meanwhile; or no pack.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                Ok(None)
            }
            footer => footer,
        };
        self.each(AT_ONCE, orphans.into_iter(), read, |pack| {
            found.extend(pack.flatten());
            Ok(())
        })?;
        let mut state = self.state();
        state.add(None, found.clone());
        state.orphans.extend(found);
        state.has_adopted = true;
        Ok(())
    }

    /// What a pack says of itself; none if it is damaged.
    fn footer(&self, id: Id, length: u64) -> Result<Option<PackIndex>> {
        let path = format::pack_path(id);
        let start = length.saturating_sub(TAIL);
        let tail = self.objects.get_range(&path, start, TAIL)?;
        let Some(at) = tail.len().checked_sub(PACK_TAIL) else { return Ok(None) };
        let Some(begin) = format::footer_start(&tail[at..], length) else { return Ok(None) };
        let end = length - PACK_TAIL as u64;
        let footer = match begin.checked_sub(start) {
            Some(before) if (before as usize) <= at => tail[before as usize..at].to_vec(),
            _ => self.objects.get_range(&path, begin, end - begin)?,
        };
        Ok(format::decode_footer(&self.keys, id, footer, length, self.chunk_size))
    }

    pub(super) fn index(&self, id: Id) -> Result<Vec<PackIndex>> {
        let path = format::path(&format!("index/{}", hex(&id.0)));
        let object = self.objects.get(&path, INDEX_LIMIT)?;
        let bytes = format::open_object(&self.keys, Kind::Index, id, &path, &object)?;
        format::decode_index(&bytes, self.chunk_size)
            .ok_or_else(|| format::damaged(&path, "what it says of packs cannot be"))
    }

    /// What is condemned.
    fn list_condemned(&self) -> Result<HashMap<Id, Vec<Id>>> {
        let (mut condemned, mut unclear) = (HashMap::new(), None);
        for id in self.ids("condemned")? {
            if let Some(known) = self.state().condemned.get(&id) {
                condemned.insert(id, known.clone());
                continue;
            }
            match self.condemned(id) {
                Ok(packs) => drop(condemned.insert(id, packs)),
                // Removed meanwhile, as its packs are.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                // Readers can do without.
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    unclear = Some(error.to_string())
                }
                Err(error) => return Err(error),
            }
        }
        self.state().unclear = unclear;
        Ok(condemned)
    }

    fn condemned(&self, id: Id) -> Result<Vec<Id>> {
        let path = format::path(&format!("condemned/{}", hex(&id.0)));
        let object = self.objects.get(&path, CONDEMNED_LIMIT)?;
        let bytes = format::open_object(&self.keys, Kind::Condemned, id, &path, &object)?;
        match bytes.as_chunks::<16>() {
            (ids, []) => Ok(ids.iter().copied().map(Id).collect()),
            _ => Err(format::damaged(&path, "it is no list of packs")),
        }
    }

    fn list_packs(&self) -> Result<HashMap<Id, u64>> {
        let mut listed = HashMap::new();
        self.objects.walk(&format::path("packs"), &mut |path, bytes| {
            let id = path.rsplit('/').next().and_then(Id::parse);
            let id = id.filter(|id| format::pack_path(*id).ends_with(&format!("packs/{path}")));
            if let (Some(id), Some(bytes)) = (id, bytes()) {
                listed.insert(id, bytes);
            }
            Ok(())
        })?;
        Ok(listed)
    }
}
