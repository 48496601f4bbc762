//! What the kernel knows of the tree: nodes, their numbers, and how often it has been told of them.

use dbs_core::Store;
use dbs_core::volume::{Observed, Observer};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of the root.
pub const ROOT: u64 = 1;
/// Numbers up to this one are given here.
const FIXED: u64 = 63;
/// Numbers of nodes of the same thing are next to one another.
const KINDS: u64 = 8;
/// Counting the data of a head may take this part of the time at most.
const COUNT_SHARE: u32 = 20;

/// What a node is. All that depends on a volume or snapshot has its observer: nodes are in nobody's
/// way.
#[derive(Debug, Clone)]
pub enum Kind {
    /// `/`
    Root,
    /// `/store.json`
    StoreJson,
    /// `/volumes`
    Volumes,
    /// `/volumes/NAME`
    Volume(Observer),
    /// `/volumes/NAME/head.raw`
    Head(Observer),
    /// `/volumes/NAME/info.json`
    Info(Observer),
    /// `/volumes/NAME/map.json`
    Map(Observer),
    /// `/volumes/NAME/latest`
    Latest(Observer),
    /// `/volumes/NAME/snapshots`
    Snapshots(Observer),
    /// `/volumes/NAME/snapshots/NAME.raw`
    Snapshot(Observer),
}

impl Kind {
    /// A number for it, the same at each mount: backup programs remember them.
    pub fn number(&self) -> u64 {
        let (kind, observer) = match self {
            Self::Root => return ROOT,
            Self::StoreJson => return ROOT + 1,
            Self::Volumes => return ROOT + 2,
            Self::Volume(observer) => (0, observer),
            Self::Head(observer) => (1, observer),
            Self::Info(observer) => (2, observer),
            Self::Map(observer) => (3, observer),
            Self::Latest(observer) => (4, observer),
            Self::Snapshots(observer) => (5, observer),
            Self::Snapshot(observer) => (6, observer),
        };
        let uuid = u128::from_le_bytes(observer.uuid());
        let folded = (uuid ^ (uuid >> 64)) as u64;
        // Programs that keep numbers as signed ones get no negative ones.
        let number = ((folded >> 1) & !(KINDS - 1)) | kind;
        if number > FIXED { number } else { number + FIXED + 1 }
    }

    /// The directory above; of a file, it itself.
    pub fn parent(&self) -> Self {
        match self {
            Self::Root | Self::Volumes => Self::Root,
            Self::Volume(_) => Self::Volumes,
            Self::Snapshots(observer) => Self::Volume(observer.clone()),
            file => file.clone(),
        }
    }

    /// Whether both are the same thing.
    fn is(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
            && self.observer().map(Observer::uuid) == other.observer().map(Observer::uuid)
    }

    /// What it looks at.
    pub fn observer(&self) -> Option<&Observer> {
        match self {
            Self::Root | Self::StoreJson | Self::Volumes => None,
            Self::Volume(observer)
            | Self::Head(observer)
            | Self::Info(observer)
            | Self::Map(observer)
            | Self::Latest(observer)
            | Self::Snapshots(observer)
            | Self::Snapshot(observer) => Some(observer),
        }
    }
}

/// A node, with what is remembered of it as long as the kernel knows it.
#[derive(Debug)]
pub struct Node {
    /// What it is.
    pub kind: Kind,
    /// Data bytes, as last counted.
    counted: Mutex<Option<Counted>>,
    /// The content when it was last looked at, if it was to stay as it was: the kernel's cache has no other.
    cached: Mutex<Option<Mark>>,
    /// It was deleted, and the kernel was told.
    lost: AtomicBool,
    /// Bytes of the text that was made when it was last opened; 0 before.
    text_bytes: AtomicU64,
}

/// A content that stays as it is, unless there was both a change of the store (of what volumes are: that one is
/// rebuilt among others) and one of the volume's content. Of either alone nothing follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// [`Store::changes`], asked for before the look.
    pub changes: u64,
    /// `Observed::writes`.
    pub writes: u64,
}

impl Mark {
    fn is_of(self, other: Self) -> bool {
        self.changes == other.changes || self.writes == other.writes
    }
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    bytes: u64,
    /// Of a content that stays.
    mark: Option<Mark>,
    requests: u64,
    at: Instant,
    took: Duration,
}

impl Node {
    /// A node of which nothing is known yet.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            counted: Mutex::new(None),
            cached: Mutex::new(None),
            lost: AtomicBool::new(false),
            text_bytes: AtomicU64::new(0),
        }
    }

    /// Whether the content is sure to be what it was at the last look, and the kernel may keep what it has
    /// cached since; notes what it is now: none for a content that does not stay.
    pub fn keeps(&self, now: Option<Mark>) -> bool {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *cached, now);
        matches!((before, now), (Some(before), Some(now)) if before.is_of(now))
    }

    /// Notes that it was deleted; whether that was noted before.
    pub fn lose(&self) -> bool {
        self.lost.swap(true, Ordering::SeqCst)
    }

    /// The size of a text that is only made to be read: as it was then, 0 if it never was.
    pub fn text_bytes(&self) -> u64 {
        self.text_bytes.load(Ordering::SeqCst)
    }

    /// Notes the size of a text that was made.
    pub fn note_text(&self, bytes: usize) {
        self.text_bytes.store(bytes as u64, Ordering::SeqCst);
    }

    /// Data bytes of an image as they were last counted, unless they are being counted.
    pub fn known_bytes(&self) -> Option<u64> {
        let counted = self.counted.try_lock().ok()?;
        counted.map(|counted| counted.bytes)
    }

    /// Data bytes of an image. Of what stays as it is they are counted once; else again when
    /// something was read or written meanwhile, and not much of the time.
    pub fn data_bytes(
        &self,
        store: &Store,
        live: bool,
        observer: &Observer,
    ) -> dbs_core::Result<u64> {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, mark) = look(store, observer)?;
        if let Some(last) = *counted {
            let same = matches!((last.mark, mark), (Some(last), Some(now)) if last.is_of(now));
            let recent = last.at.elapsed() < last.took * COUNT_SHARE;
            if !live || same || last.requests == store.requests() || recent {
                return Ok(last.bytes);
            }
        }
        let (requests, begun) = (store.requests(), Instant::now());
        let bytes = observer.data_bytes()?;
        *counted =
            Some(Counted { bytes, mark, requests, at: Instant::now(), took: begun.elapsed() });
        Ok(bytes)
    }
}

/// Looks at an image, with the mark of its content if that stays as it is.
pub fn look(store: &Store, image: &Observer) -> dbs_core::Result<(Observed, Option<Mark>)> {
    // Before the look: what changes in between has another mark the next time.
    let changes = store.changes();
    let seen = image.look()?;
    let mark = seen.settled.then_some(Mark { changes, writes: seen.writes });
    Ok((seen, mark))
}

/// The nodes that the kernel knows.
#[derive(Debug, Default)]
pub struct Nodes {
    known: Mutex<HashMap<u64, Known>>,
}

#[derive(Debug)]
struct Known {
    node: Arc<Node>,
    lookups: u64,
}

impl Nodes {
    /// A table with the root.
    pub fn new() -> Self {
        let root = Known { node: Arc::new(Node::new(Kind::Root)), lookups: 1 };
        Self { known: Mutex::new([(ROOT, root)].into()) }
    }

    /// The node of a number.
    pub fn get(&self, number: u64) -> Option<Arc<Node>> {
        self.known().get(&number).map(|known| Arc::clone(&known.node))
    }

    /// The node of something and its number, whether the kernel knows it or not.
    pub fn find(&self, kind: Kind) -> (u64, Arc<Node>) {
        let known = self.known();
        let number = place(&known, &kind);
        let found = known.get(&number).map(|known| Arc::clone(&known.node));
        drop(known);
        (number, found.unwrap_or_else(|| Arc::new(Node::new(kind))))
    }

    /// The kernel is told of a node once more; returns its number.
    pub fn tell(&self, node: &Arc<Node>) -> u64 {
        let mut known = self.known();
        let number = place(&known, &node.kind);
        let entry = known.entry(number);
        entry.or_insert_with(|| Known { node: Arc::clone(node), lookups: 0 }).lookups += 1;
        number
    }

    /// The kernel forgets what it was told so many times.
    pub fn forget(&self, number: u64, lookups: u64) {
        let mut known = self.known();
        let gone = match known.get_mut(&number) {
            Some(entry) => {
                entry.lookups = entry.lookups.saturating_sub(lookups);
                entry.lookups == 0 && number != ROOT
            }
            None => false,
        };
        let gone = gone.then(|| known.remove(&number)).flatten();
        // What it looked at is let go without the lock.
        drop(known);
        drop(gone);
    }

    /// All of them.
    pub fn all(&self) -> Vec<(u64, Arc<Node>)> {
        self.known().iter().map(|(number, known)| (*number, Arc::clone(&known.node))).collect()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<u64, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of something among what is known: its own, or the next one that nothing else has.
fn place(known: &HashMap<u64, Known>, kind: &Kind) -> u64 {
    let mut number = kind.number();
    while known.get(&number).is_some_and(|other| !other.node.kind.is(kind)) {
        number = number.wrapping_add(KINDS).max(FIXED + 1);
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by review: a rebuild that began and ended between two looks.
    #[test]
    fn the_kernel_keeps_only_what_cannot_be_other_than_before() {
        let node = Node::new(Kind::Root);
        let mark = |changes, writes| Some(Mark { changes, writes });
        assert!(!node.keeps(mark(1, 1)), "nothing is known of what was before");
        assert!(node.keeps(mark(1, 1)));
        assert!(node.keeps(mark(1, 9)), "the head was written");
        assert!(node.keeps(mark(5, 9)), "something was renamed");
        assert!(!node.keeps(mark(6, 12)), "it may have been rebuilt");
        assert!(node.keeps(mark(6, 12)));
        assert!(!node.keeps(None) && !node.keeps(None), "it is being rebuilt");
        assert!(!node.keeps(mark(8, 12)), "it was read while it was");
        assert!(node.keeps(mark(9, 12)));
    }
}
