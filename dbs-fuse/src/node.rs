//! What the kernel knows of a tree: nodes, their numbers, and how often it has been told of them.

use fuser::FileType;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of the root.
pub const ROOT: u64 = 1;
/// Numbers up to this one are those of nodes that each tree has once.
const FIXED: u64 = 63;
/// Numbers of nodes of the same thing are next to one another.
const KINDS: u64 = 8;

/// What a node is.
pub trait Kind: Clone + fmt::Debug + Send + Sync + 'static {
    /// What is remembered of a node as long as the kernel knows it.
    type Seen: Default + Send + Sync;

    /// The root.
    fn root() -> Self;

    /// A number for it, the same at each mount: backup programs remember them.
    fn number(&self) -> u64;

    /// Whether both are the same thing.
    fn is(&self, other: &Self) -> bool;

    /// Directory, link or file.
    fn file_type(&self) -> FileType;
}

/// The number of one of several nodes, up to [`KINDS`], of a thing with this number.
pub fn number(thing: u64, kind: u64) -> u64 {
    // Programs that keep numbers as signed ones get no negative ones.
    let number = ((thing >> 1) & !(KINDS - 1)) | kind;
    if number > FIXED { number } else { number + FIXED + 1 }
}

/// A node, with what is remembered of it as long as the kernel knows it.
#[derive(Debug)]
pub struct Node<K: Kind> {
    /// What it is.
    pub kind: K,
    /// What is remembered.
    pub seen: K::Seen,
}

impl<K: Kind> Node<K> {
    /// A node of which nothing is known yet.
    pub fn new(kind: K) -> Self {
        Self { kind, seen: K::Seen::default() }
    }
}

/// The nodes that the kernel knows.
pub struct Nodes<K: Kind> {
    known: Mutex<HashMap<u64, Known<K>>>,
}

struct Known<K: Kind> {
    node: Arc<Node<K>>,
    lookups: u64,
}

impl<K: Kind> Nodes<K> {
    /// A table with the root.
    pub fn new() -> Self {
        let root = Known { node: Arc::new(Node::new(K::root())), lookups: 1 };
        Self { known: Mutex::new([(ROOT, root)].into()) }
    }

    /// The node of a number.
    pub fn get(&self, number: u64) -> Option<Arc<Node<K>>> {
        self.known().get(&number).map(|known| Arc::clone(&known.node))
    }

    /// The node of something and its number, whether the kernel knows it or not.
    pub fn find(&self, kind: K) -> (u64, Arc<Node<K>>) {
        let known = self.known();
        let number = place(&known, &kind);
        let found = known.get(&number).map(|known| Arc::clone(&known.node));
        drop(known);
        (number, found.unwrap_or_else(|| Arc::new(Node::new(kind))))
    }

    /// The kernel is told of a node once more; returns its number.
    pub fn tell(&self, node: &Arc<Node<K>>) -> u64 {
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
    pub fn all(&self) -> Vec<(u64, Arc<Node<K>>)> {
        self.known().iter().map(|(number, known)| (*number, Arc::clone(&known.node))).collect()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<u64, Known<K>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of something among what is known: its own, or the next one that nothing else has.
fn place<K: Kind>(known: &HashMap<u64, Known<K>>, kind: &K) -> u64 {
    let mut number = kind.number();
    while known.get(&number).is_some_and(|other| !other.node.kind.is(kind)) {
        number = number.wrapping_add(KINDS).max(FIXED + 1);
    }
    number
}
