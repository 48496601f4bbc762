//! Who asks for what, whatever carries it out: [`User`], [`Demand`], [`Answer`].

use super::delayed::Fate;
use dbs_core::Volume;
use dbs_reactor::Buf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a client uses as a disk.
#[derive(Clone)]
pub enum Disk {
    /// A volume or snapshot of a store of this process.
    Stored(Volume),
    /// A volume whose requests a [`Carrier`](super::Carrier) carries out. Who has this has the volume to itself.
    Carried(Arc<CarriedDisk>),
}

/// Such a volume, as a client has it.
pub struct CarriedDisk {
    /// Its bytes at the moment.
    pub(super) size: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Who has it.
    pub(super) who: String,
}

impl Disk {
    /// Bytes of the disk, which may change.
    #[must_use]
    pub fn size(&self) -> u64 {
        match self {
            Self::Stored(volume) => volume.size(),
            Self::Carried(carried) => (carried.size)(),
        }
    }
}

/// Whose requests they are: one queue of a client, with the volume it uses.
pub struct User {
    disk: Disk,
    pub(super) read_only: bool,
    pub(super) client: u64,
    pub(super) dropping: Arc<AtomicBool>,
    pub(super) lost: Arc<AtomicBool>,
    /// What is to become of requests that the limits of the volume delay: one of `FATES`.
    fate: AtomicUsize,
}

const FATES: [Fate; 3] = [Fate::Wait, Fate::Go, Fate::Drop];

impl User {
    /// A user of a disk, whom the workers know as `client`. If `lost` is set, a server before lost what it
    /// had acknowledged to it: its next flush fails, and the flag is taken back. Long requests end where they are from
    /// when `dropping` is set, which [`User::drop_long`] does, too.
    #[must_use]
    pub fn new(
        disk: Disk,
        read_only: bool,
        client: u64,
        lost: Arc<AtomicBool>,
        dropping: Arc<AtomicBool>,
    ) -> Arc<Self> {
        Arc::new(Self { disk, read_only, client, dropping, lost, fate: AtomicUsize::new(0) })
    }

    /// From now on the limits of its volume delay it no more, as its end is waited for. With `drops` what they have
    /// delayed ends as [`Answer::Dropped`]: somebody else is given it again. [`Requests::let_go`](super::Requests::let_go) sees to that.
    pub fn ends_delays(&self, drops: bool) {
        self.fate.store(if drops { 2 } else { 1 }, Ordering::Relaxed);
    }

    /// The volume that it uses.
    ///
    /// # Panics
    /// What it uses is no volume of this process: its requests do not come to those who ask.
    pub(super) fn volume(&self) -> &Volume {
        match &self.disk {
            Disk::Stored(volume) => volume,
            Disk::Carried(_) => panic!("a request of what is carried, at a store"),
        }
    }

    /// Bytes of what it uses.
    pub(super) fn size(&self) -> u64 {
        self.disk.size()
    }

    pub(super) fn fate(&self) -> Fate {
        FATES.get(self.fate.load(Ordering::Relaxed)).copied().unwrap_or(Fate::Wait)
    }

    /// From now on long requests of it end where they are, as [`Answer::Dropped`].
    pub fn drop_long(&self) {
        self.dropping.store(true, Ordering::Relaxed);
    }
}

/// What a request does. Of a durable one, the answer means that it survives a loss of power.
pub enum Demand {
    /// Reads the range.
    Read,
    /// Writes this from the start of the range on.
    Write(Buf, bool),
    /// Makes everything answered so far durable.
    Flush,
    /// Gives up the content of whole blocks in the range.
    Discard(bool),
    /// Makes the range read as zeros, and gives up its space.
    Zeroes(bool),
    /// Writes zeros, which take space.
    KeepZeroes(bool),
}

/// How a request has ended.
#[derive(Debug)]
pub enum Answer {
    /// It is done; the buffer holds what was read, and is empty otherwise.
    Done(Buf),
    /// It failed, with this error number.
    Failed(i32),
    /// It ended before it was done, as its user had asked ([`User::drop_long`]).
    Dropped,
}
