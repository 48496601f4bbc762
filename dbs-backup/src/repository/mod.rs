//! Backups in a layout of our own, which `docs/repository.md` describes: chunks that all volumes share, in large
//! objects, perhaps encrypted.

mod format;
#[cfg(feature = "testing")]
pub(crate) mod hostile;
mod init;
mod keys;
mod manifests;
mod rewrite;
mod secrets;
mod state;
mod sweep;
mod writer;

pub(crate) use format::LABELS_MAX;
pub use init::InitOptions;
pub(crate) use init::init;
pub use keys::Secret;
pub use secrets::KeyInfo;
pub use sweep::Collected;
pub(crate) use writer::{Ended, Writer};

use crate::names::BlockName;
use crate::objects::{Objects, is_verdict};
use crate::pool::{self, Rate};
use dbs_core::{Error, ErrorKind, Result};
use format::{BlobKind, CONFIG_LIMIT, Config, Manifest};
use keys::{Keys, Wrapped};
use state::{Location, State};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Objects that are read at once, if nobody says how many.
const AT_ONCE: usize = 8;
/// Bytes that one request reads at most, of blobs that are beside each other.
const SPAN_MAX: u64 = 16 << 20;
/// Bytes between two blobs that are read for nothing, rather than with one more request.
const GAP_MAX: u64 = 128 << 10;
/// Bytes of chunks that a restore reads at once.
const RUN: u64 = 8 << 20;

/// A blob, and where it is.
type Blob = (Location, BlockName);

/// 16 random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id([u8; 16]);

impl Id {
    fn new() -> Result<Self> {
        keys::random().map(Self)
    }

    fn parse(text: &str) -> Option<Self> {
        keys::unhex(text).map(Self)
    }
}

/// A repository that is open. Many threads may use it at once.
pub(crate) struct Repository {
    objects: Arc<dyn Objects>,
    keys: Keys,
    /// The wrapped key that opened it; none if it is not encrypted.
    opened_by: Option<(Id, Wrapped)>,
    chunk_size: u64,
    grace: Duration,
    stop: Arc<AtomicBool>,
    state: Mutex<State>,
    /// Taken before `state`, by whoever loads it.
    loading: Mutex<()>,
    /// Manifests by their paths: they never change.
    manifests: Mutex<HashMap<String, Arc<Manifest>>>,
}

impl Repository {
    /// Opens the repository that is there; none if there is none.
    ///
    /// # Errors
    /// `Invalid` if the secret is wrong, or if one is given and nothing is encrypted; `Corrupt`; `Unsupported`; those of
    /// the store.
    pub fn open(
        objects: &Arc<dyn Objects>,
        secret: Option<&Secret>,
        stop: &Arc<AtomicBool>,
    ) -> Result<Option<Self>> {
        let bytes = match objects.get(&format::path("config"), CONFIG_LIMIT) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                init::check_bare(objects)?;
                return match secret {
                    None => Ok(None),
                    Some(_) => Err(Error::invalid(
                        "a key is given (DBS_BACKUP_...), and there is no repository: make one with `dbs backup init`. If \
                         there was one, look who removed it; nothing is written in the clear",
                    )),
                };
            }
            // Rights that end at Longhorn's layout, of somebody who has no repository.
            Err(error) if error.kind() == ErrorKind::Invalid && secret.is_none() => {
                if !init::is_hidden(objects) {
                    return Err(error);
                }
                // An error that passes is none of rights: it lasts where that layout may be read.
                objects.list(&crate::names::volumes())?;
                match objects.get(&format::path("config"), CONFIG_LIMIT) {
                    Err(error) if error.kind() == ErrorKind::Invalid => return Ok(None),
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        return init::check_bare(objects).map(|()| None);
                    }
                    bytes => bytes?,
                }
            }
            bytes => bytes?,
        };
        let (config, line, check) = Config::parse(&bytes)?;
        let id = config.id()?;
        let (key, opened_by) = match (config.key(), secret) {
            (Some(key), None) => (key, None),
            (Some(_), Some(_)) => {
                return Err(Error::invalid(
                    "a key is given (DBS_BACKUP_...), and the repository is not encrypted: do without the key. If it was \
                     encrypted, somebody has replaced it",
                ));
            }
            (None, None) if config.is_encrypted() => {
                return Err(Error::invalid(
                    "the repository is encrypted: set DBS_BACKUP_PASSPHRASE, DBS_BACKUP_PASSPHRASE_FILE or \
                     DBS_BACKUP_KEY_FILE",
                ));
            }
            (None, None) => {
                return Err(format::damaged(&format::path("config"), "its key is none"));
            }
            (None, Some(_)) if !config.is_encrypted() => {
                return Err(format::damaged(&format::path("config"), "its key is none"));
            }
            (None, Some(secret)) => {
                let (key, by) = secrets::unwrap_key(objects, id, secret)?;
                (key, Some(by))
            }
        };
        let keys = Keys::new(key, id, config.is_encrypted());
        if keys.config_check(line) != check {
            let what = "it is not what was written";
            return Err(format::damaged(&format::path("config"), what));
        }
        Ok(Some(Self {
            objects: Arc::clone(objects),
            keys,
            opened_by,
            chunk_size: config.chunk_size,
            grace: Duration::from_secs(config.grace_seconds),
            stop: Arc::clone(stop),
            state: Mutex::default(),
            loading: Mutex::default(),
            manifests: Mutex::default(),
        }))
    }

    /// Bytes of a chunk.
    pub fn chunk_size(&self) -> u64 {
        self.chunk_size
    }

    /// Chunks that a restore reads at once.
    pub fn run(&self) -> usize {
        (RUN / self.chunk_size).max(1) as usize
    }

    /// Bytes of the largest volume: so many lists a manifest has.
    pub fn largest_volume(&self) -> u64 {
        format::LISTS_MAX * format::LIST as u64 * self.chunk_size
    }

    /// Whether what is in it is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.keys.is_encrypted
    }

    /// The id of a chunk.
    pub fn name_of(&self, chunk: &[u8]) -> BlockName {
        self.keys.chunk(chunk)
    }

    /// Refuses to go on if it is not known what is going to be removed.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn check_clear(&self) -> Result<()> {
        self.state().check_clear()
    }

    /// Whether a chunk is there, and stays.
    pub fn is_there(&self, name: BlockName) -> bool {
        self.state().is_there(BlobKind::Chunk, name)
    }

    /// Whether a chunk can be read.
    pub fn is_readable(&self, name: BlockName) -> bool {
        !self.state().locations(BlobKind::Chunk, name).is_empty()
    }

    /// As [`pool::each`]; but an error ends only this, and not what else runs, or comes later, by the same object: a mount
    /// lives on. Only the end that the user wants is the end of all.
    fn each<J: Send, R: Send>(
        &self,
        workers: usize,
        jobs: impl Iterator<Item = J> + Send,
        work: impl Fn(J) -> Result<R> + Sync,
        mut done: impl FnMut(Option<R>) -> Result<()>,
    ) -> Result<()> {
        let (stop, all) = (AtomicBool::new(false), &self.stop);
        let work = |job| match all.load(Ordering::SeqCst) {
            true => Err(pool::interrupted()),
            false => work(job),
        };
        pool::each(workers, &stop, jobs, work, |result| {
            done(result).inspect_err(|error| {
                all.fetch_or(error.kind() == ErrorKind::Interrupted, Ordering::SeqCst);
            })
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A chunk, and the bytes that were read for it.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged wherever it is; `NotFound` if it is nowhere; those of the store.
    pub fn fetch(&self, name: BlockName, rate: &Rate<'_>) -> Result<(Vec<u8>, u64)> {
        self.blob(BlobKind::Chunk, name, rate)
    }

    fn blob(&self, kind: BlobKind, name: BlockName, rate: &Rate<'_>) -> Result<(Vec<u8>, u64)> {
        let mut downloaded = 0;
        // Once more if a pack has gone: what is in it may have been written anew before.
        for is_last in [false, true] {
            // It may have come since.
            self.load_for(kind, &[name])?;
            let locations = self.state().locations(kind, name);
            let (mut problem, mut has_gone) = (None, false);
            for location in &locations {
                let mut read = || self.blob_at(kind, name, location, rate, &mut downloaded);
                let read = match read() {
                    // What was damaged on its way may come through when it is sent again.
                    Err(error) if error.kind() == ErrorKind::Corrupt => read(),
                    read => read,
                };
                let error = match read {
                    Err(error) if is_verdict(error.kind()) => error,
                    read => return read.map(|content| (content, downloaded)),
                };
                if error.kind() == ErrorKind::NotFound {
                    self.state().outdated(location.pack);
                    has_gone = true;
                } else {
                    self.state().damaged.insert(location.pack);
                }
                problem.get_or_insert(error);
            }
            if is_last || !has_gone {
                return Err(problem.unwrap_or_else(|| self.state().missing(kind, name)));
            }
            self.load(AT_ONCE, &mut || true)?;
        }
        Err(self.state().missing(kind, name))
    }

    fn blob_at(
        &self,
        kind: BlobKind,
        name: BlockName,
        location: &Location,
        rate: &Rate<'_>,
        downloaded: &mut u64,
    ) -> Result<Vec<u8>> {
        let path = format::pack_path(location.pack);
        let piece =
            self.objects.get_range(&path, location.offset.into(), location.length.into())?;
        *downloaded += piece.len() as u64;
        rate.wait(piece.len() as u64);
        self.open_blob(kind, name, location, piece)
    }

    /// The content of a blob, which is proven.
    fn open_blob(
        &self,
        kind: BlobKind,
        name: BlockName,
        location: &Location,
        piece: Vec<u8>,
    ) -> Result<Vec<u8>> {
        let path = format::pack_path(location.pack);
        let wrong =
            |what: &str| format::damaged(&path, &format!("piece {} {what}", location.number));
        let sealer = self.keys.object(keys::Kind::Pack, location.pack);
        let opened = sealer.open(location.number.into(), piece);
        let opened = opened.ok_or_else(|| wrong("is not what was written"))?;
        let bytes = location.bytes as usize;
        let content = match location.is_lz4 {
            true => lz4_flex::block::decompress(&opened, bytes)
                .map_err(|e| wrong(&format!("cannot be decompressed: {e}")))?,
            false => opened,
        };
        let found = match kind {
            BlobKind::Chunk => self.keys.chunk(&content),
            BlobKind::List => self.keys.list(&content),
        };
        if content.len() != bytes || found != name {
            return Err(wrong("is another chunk than its index says"));
        }
        Ok(content)
    }

    /// Chunks by their names, and the bytes that were read: those beside each other in a pack come with one request.
    ///
    /// # Errors
    /// As [`Repository::fetch`].
    pub fn fetch_some(
        &self,
        names: &[BlockName],
        rate: &Rate<'_>,
    ) -> Result<(HashMap<BlockName, Vec<u8>>, u64)> {
        let (mut found, mut downloaded) = (HashMap::new(), 0);
        for span in self.spans(BlobKind::Chunk, names)? {
            let (chunks, bytes) = self.span(BlobKind::Chunk, &span, rate);
            found.extend(chunks);
            downloaded += bytes;
        }
        downloaded += self.fill(BlobKind::Chunk, names, &mut found, rate)?;
        Ok((found, downloaded))
    }

    /// Lists by their names, in the same way.
    fn lists(&self, names: &[BlockName]) -> Result<HashMap<BlockName, Vec<u8>>> {
        let (mut found, rate) = (HashMap::new(), Rate::new(None, &self.stop));
        self.each_list(names, &rate, |lists| found.extend(lists))?;
        self.fill(BlobKind::List, names, &mut found, &rate)?;
        Ok(found)
    }

    /// Those of these lists that can be read, as they should be, at the first place of each.
    fn proven_lists(&self, names: &[BlockName]) -> Result<HashSet<BlockName>> {
        let (mut found, rate) = (HashSet::new(), Rate::new(None, &self.stop));
        let take = |lists: Vec<_>| found.extend(lists.into_iter().map(|(name, _)| name));
        self.each_list(names, &rate, take)?;
        Ok(found)
    }

    fn each_list(
        &self,
        names: &[BlockName],
        rate: &Rate<'_>,
        mut found: impl FnMut(Vec<(BlockName, Vec<u8>)>),
    ) -> Result<()> {
        let spans = self.spans(BlobKind::List, names)?;
        let read = |span: Vec<_>| Ok(self.span(BlobKind::List, &span, rate).0);
        self.each(AT_ONCE, spans.into_iter(), read, |lists| {
            lists.into_iter().for_each(&mut found);
            Ok(())
        })
    }

    /// Adds what is missing of blobs: what is not there, or not as it should be, is looked for once more, and everywhere.
    fn fill(
        &self,
        kind: BlobKind,
        names: &[BlockName],
        found: &mut HashMap<BlockName, Vec<u8>>,
        rate: &Rate<'_>,
    ) -> Result<u64> {
        let mut downloaded = 0;
        for name in names {
            if !found.contains_key(name) {
                let (content, bytes) = self.blob(kind, *name, rate)?;
                found.insert(*name, content);
                downloaded += bytes;
            }
        }
        Ok(downloaded)
    }

    /// What one request each reads of these blobs.
    fn spans(&self, kind: BlobKind, names: &[BlockName]) -> Result<Vec<Vec<Blob>>> {
        self.load_for(kind, names)?;
        let mut seen = HashSet::new();
        let mut wanted: Vec<Blob> = {
            let state = self.state();
            let first = |name| Some((state.locations(kind, name).into_iter().next()?, name));
            names
                .iter()
                .filter(|name| seen.insert(**name))
                .filter_map(|name| first(*name))
                .collect()
        };
        wanted.sort_by_key(|(location, _)| (location.pack, location.offset));
        let mut spans: Vec<Vec<Blob>> = Vec::new();
        for blob in wanted {
            let is_beside = |span: &Vec<Blob>| {
                let (Some((first, _)), Some((last, _))) = (span.first(), span.last()) else {
                    return false;
                };
                first.pack == blob.0.pack
                    && u64::from(blob.0.offset) <= last.end() + GAP_MAX
                    && blob.0.end() - u64::from(first.offset) <= SPAN_MAX
            };
            match spans.last_mut() {
                Some(span) if is_beside(span) => span.push(blob),
                _ => spans.push(vec![blob]),
            }
        }
        Ok(spans)
    }

    /// The blobs of a span that are what they should be, and the bytes that were read.
    fn span(
        &self,
        kind: BlobKind,
        span: &[Blob],
        rate: &Rate<'_>,
    ) -> (Vec<(BlockName, Vec<u8>)>, u64) {
        let (Some((first, _)), Some((last, _))) = (span.first(), span.last()) else {
            return (Vec::new(), 0);
        };
        let start = u64::from(first.offset);
        let bytes =
            self.objects.get_range(&format::pack_path(first.pack), start, last.end() - start);
        let bytes = bytes.unwrap_or_default();
        rate.wait(bytes.len() as u64);
        let open = |(location, name): &Blob| {
            let at = (u64::from(location.offset) - start) as usize;
            let piece = bytes.get(at..at + location.length as usize)?.to_vec();
            let content = self.open_blob(kind, *name, location, piece).ok()?;
            Some((*name, content))
        };
        (span.iter().filter_map(open).collect(), bytes.len() as u64)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::codec::Method;
    use crate::objects::Directory;
    use std::time::{Instant, SystemTime};

    /// A writer with the key and a bug: what it has sealed is what it wrote, and not what it said.
    #[test]
    fn a_chunk_under_the_name_of_another_is_damage() {
        let root = tempfile::tempdir().unwrap();
        let objects: Arc<dyn Objects> = Arc::new(Directory::open(root.path()).unwrap());
        init(&objects, &InitOptions { chunk_size: Some(4096), ..InitOptions::default() }).unwrap();
        let stop = Arc::default();
        let repository = Repository::open(&objects, None, &stop).unwrap().unwrap();
        let (repository, rate) = (Arc::new(repository), Rate::new(None, &stop));
        let writer = Writer::new(&repository);
        let (right, wrong) = ([1; 4096], repository.name_of(&[2; 4096]));
        writer.add_chunk(wrong, &right, Method::Lz4, &rate).unwrap();
        writer.add_chunk(repository.name_of(&right), &right, Method::None, &rate).unwrap();
        writer.flush().unwrap();
        let error = repository.fetch(wrong, &rate).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("/packs/"), "{error}");
        assert_eq!(repository.fetch(repository.name_of(&right), &rate).unwrap().0, right);
        assert!(repository.fetch_some(&[wrong], &rate).is_err());
    }

    /// Found by review: while one thread reads the footers of packs that no index names, another one that looks for a chunk
    /// in such a pack took it for lost.
    #[test]
    fn threads_wait_for_who_looks_for_packs() {
        let root = tempfile::tempdir().unwrap();
        let objects: Arc<dyn Objects> = Arc::new(Directory::open(root.path()).unwrap());
        init(&objects, &InitOptions { chunk_size: Some(4096), ..InitOptions::default() }).unwrap();
        let stop = Arc::default();
        let repository = Arc::new(Repository::open(&objects, None, &stop).unwrap().unwrap());
        let writer = Writer::new(&repository);
        let names = [1, 2].map(|byte| repository.name_of(&[byte; 4096]));
        for (name, byte) in names.iter().zip([1, 2]) {
            writer.add_chunk(*name, &[byte; 4096], Method::None, &Rate::new(None, &stop)).unwrap();
        }
        writer.flush().unwrap();
        objects.remove_all(&format::path("index")).unwrap();

        // The other thread asks while the first one reads the first footer.
        let (other, results) = std::sync::mpsc::channel();
        let (reader, is_first) =
            (Arc::new(std::sync::OnceLock::<Arc<Repository>>::new()), AtomicBool::new(true));
        let (other_reader, second) = (Arc::clone(&reader), names[1]);
        let range = move |_: &str| {
            if !is_first.swap(false, std::sync::atomic::Ordering::SeqCst) {
                return;
            }
            let (repository, other) = (Arc::clone(other_reader.get().unwrap()), other.clone());
            std::thread::spawn(move || {
                let rate = AtomicBool::new(false);
                other
                    .send(repository.fetch(second, &Rate::new(None, &rate)).map(|(c, _)| c))
                    .unwrap();
            });
            // It waits; if it does not, it has had time enough.
            std::thread::sleep(Duration::from_millis(200));
        };
        let hooked = crate::objects::hooked::Hooked {
            range: Box::new(range),
            ..crate::objects::hooked::Hooked::on(objects)
        };
        let objects: Arc<dyn Objects> = Arc::new(hooked);
        let repository = Arc::new(Repository::open(&objects, None, &stop).unwrap().unwrap());
        assert!(reader.set(Arc::clone(&repository)).is_ok());
        let rate = Rate::new(None, &stop);
        assert_eq!(repository.fetch(names[0], &rate).unwrap().0, [1; 4096]);
        assert_eq!(results.recv().unwrap().unwrap(), [2; 4096]);
    }

    /// One second more than the grace time, as times may be whole seconds; and half of it between the last look and the
    /// manifest, by each of the two clocks.
    #[test]
    fn what_is_old_and_what_is_late() {
        let root = tempfile::tempdir().unwrap();
        let objects: Arc<dyn Objects> = Arc::new(Directory::open(root.path()).unwrap());
        init(&objects, &InitOptions::default()).unwrap();
        let repository = Repository::open(&objects, None, &Arc::default()).unwrap().unwrap();
        let (grace, now) = (repository.grace, SystemTime::now());
        let edge = grace + Duration::from_secs(1);
        for (age, is_old) in [(grace, false), (edge, false), (edge + Duration::from_nanos(1), true)]
        {
            assert_eq!(repository.is_old(now, now - age), is_old, "{age:?}");
        }
        assert!(!repository.is_old(now, now + edge));
        assert!(!repository.is_late((Instant::now(), now)));
        // A machine that slept, and a clock that was set back.
        assert!(repository.is_late((Instant::now(), now - grace)));
        assert!(repository.is_late((Instant::now(), now + grace)));
        // What is condemned counts only if it was written soon.
        let condemn = |begun| {
            let put = repository.put_condemned_since(std::iter::once(Id([7; 16])), begun);
            (put.map_err(|error| error.kind()), repository.ids("condemned").unwrap().len())
        };
        assert_eq!(condemn((Instant::now(), now)), (Ok(()), 1));
        let begun = (Instant::now(), now - grace / 4 - Duration::from_secs(1));
        assert_eq!(condemn(begun), (Err(ErrorKind::Busy), 1));
    }
}
