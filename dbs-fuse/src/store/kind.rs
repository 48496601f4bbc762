//! What the nodes of a store's tree are, and what is remembered of them.

use crate::node::{self, ROOT};
use dbs_core::Store;
use dbs_core::volume::{Observed, Observer};
use fuser::FileType;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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

impl node::Kind for Kind {
    type Seen = Seen;

    fn root() -> Self {
        Self::Root
    }

    fn number(&self) -> u64 {
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
        node::number((uuid ^ (uuid >> 64)) as u64, kind)
    }

    fn is(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
            && self.observer().map(Observer::uuid) == other.observer().map(Observer::uuid)
    }

    fn file_type(&self) -> FileType {
        match self {
            Self::Root | Self::Volumes | Self::Volume(_) | Self::Snapshots(_) => {
                FileType::Directory
            }
            Self::Latest(_) => FileType::Symlink,
            _ => FileType::RegularFile,
        }
    }
}

impl Kind {
    /// The directory above; of a file, it itself.
    pub fn parent(&self) -> Self {
        match self {
            Self::Root | Self::Volumes => Self::Root,
            Self::Volume(_) => Self::Volumes,
            Self::Snapshots(observer) => Self::Volume(observer.clone()),
            file => file.clone(),
        }
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

/// What is remembered of a node.
#[derive(Debug, Default)]
pub struct Seen {
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

impl Seen {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by review: a rebuild that began and ended between two looks.
    #[test]
    fn the_kernel_keeps_only_what_cannot_be_other_than_before() {
        let node = Seen::default();
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
