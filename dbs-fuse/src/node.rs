//! What the kernel knows of the tree: nodes, their numbers, and how often it has been told of them.

use dbs_core::Store;
use dbs_core::volume::Observer;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
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
    /// Data bytes of a snapshot that stays as it is.
    settled_bytes: OnceLock<u64>,
    /// Data bytes of what may change, as last counted.
    counted: Mutex<Option<Counted>>,
    /// The content may have changed since the kernel cached it.
    unsettled: AtomicBool,
    /// Bytes of the text that was made when it was last opened; 0 before.
    text_bytes: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    bytes: u64,
    requests: u64,
    at: Instant,
    took: Duration,
}

impl Node {
    /// A node of which nothing is known yet.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            settled_bytes: OnceLock::new(),
            counted: Mutex::new(None),
            unsettled: AtomicBool::new(false),
            text_bytes: AtomicU64::new(0),
        }
    }

    /// Notes that the content may change; whether it may have before.
    pub fn unsettle(&self) -> bool {
        self.unsettled.swap(true, Ordering::SeqCst)
    }

    /// The content stays as it is from now on; whether it may have changed before.
    pub fn settle(&self) -> bool {
        self.unsettled.swap(false, Ordering::SeqCst)
    }

    /// The size of a text that is only made to be read: as it was then, 0 if it never was.
    pub fn text_bytes(&self) -> u64 {
        self.text_bytes.load(Ordering::SeqCst)
    }

    /// Notes the size of a text that was made.
    pub fn note_text(&self, bytes: usize) {
        self.text_bytes.store(bytes as u64, Ordering::SeqCst);
    }

    /// Data bytes of an image as far as they are known without walking it.
    pub fn known_bytes(&self) -> Option<u64> {
        self.settled_bytes.get().copied()
    }

    /// Data bytes of an image. Of what stays as it is they are counted once; else again when
    /// something was read or written meanwhile, and not much of the time.
    pub fn data_bytes(
        &self,
        store: &Store,
        live: bool,
        observer: &Observer,
    ) -> dbs_core::Result<u64> {
        if let Some(bytes) = self.settled_bytes.get() {
            return Ok(*bytes);
        }
        if !live || observer.look()?.settled {
            let bytes = observer.data_bytes()?;
            return Ok(*self.settled_bytes.get_or_init(|| bytes));
        }
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = *counted
            && (last.requests == store.requests() || last.at.elapsed() < last.took * COUNT_SHARE)
        {
            return Ok(last.bytes);
        }
        let (requests, begun) = (store.requests(), Instant::now());
        let bytes = observer.data_bytes()?;
        *counted = Some(Counted { bytes, requests, at: Instant::now(), took: begun.elapsed() });
        Ok(bytes)
    }
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
