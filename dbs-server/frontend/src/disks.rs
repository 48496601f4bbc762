//! What a server shows as disks, and who may have them: volumes and snapshots of a store, or one volume whose requests a
//! [`Carrier`](super::Carrier) carries out. A disk that is written is written by one client.

use super::demand::{CarriedDisk, Disk};
use super::pool::lock;
use dbs_core::info::{Holder, HolderInfo, HolderKind};
use dbs_core::{Error, Result, Store};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How long who wants to write a volume waits for who writes it.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it looks for that.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What may be done with a volume by who comes from an address, or a socket as `unix:PATH`: nothing, or only reading
/// (`true`), or all.
pub type Access = Box<dyn Fn(&str, &str) -> Option<bool> + Send + Sync>;

/// How a store's volumes are served as disks.
pub struct DiskOptions {
    /// Threads that serve queues.
    pub reactors: usize,
    /// How they do I/O.
    pub reactor: dbs_reactor::Options,
    /// Threads for requests that have to wait.
    pub workers: usize,
    /// Which volumes there are for whom.
    pub access: Access,
    /// Numbers for clients.
    pub number: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Nothing is written to the store.
    pub read_only: bool,
}

/// A volume, or a snapshot of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The volume's name.
    pub volume: String,
    /// The snapshot's.
    pub snapshot: Option<String>,
    /// Its own uuid.
    pub uuid: String,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.snapshot {
            Some(snapshot) => write!(f, "{}@{snapshot}", self.volume),
            None => f.write_str(&self.volume),
        }
    }
}

/// Who wants a disk.
pub struct Applicant<'a> {
    /// Its number among clients.
    pub id: u64,
    /// Who it is, for people.
    pub who: &'a str,
    /// Where it comes from, as [`Access`] is asked.
    pub from: &'a str,
    /// What to do about it, for who is in its way.
    pub remedy: &'a str,
}

/// A disk that somebody has.
pub struct Opened {
    /// The disk.
    pub disk: Disk,
    /// Whether it may only be read.
    pub read_only: bool,
    /// Whether each 4 KiB are known to be written whole or not at all.
    pub whole_blocks: bool,
    /// Whether what was given up reads as zeros until it is written.
    pub zeroes_freed: bool,
    /// Its uuid.
    pub uuid: String,
    /// A server before lost what it had acknowledged, which its user is to be told.
    pub lost: Arc<AtomicBool>,
}

/// What there is to be used.
pub trait Disks: Send + Sync {
    /// All that there is.
    fn subjects(&self) -> Vec<Subject>;

    /// What has these names at the moment.
    ///
    /// # Errors
    /// Nothing has.
    fn subject(&self, volume: &str, snapshot: Option<&str>) -> Result<Subject>;

    /// What may be done with a volume by who comes from an address: see [`Access`].
    fn access(&self, volume: &str, from: &str) -> Option<bool>;

    /// A number that no other client has.
    fn number(&self) -> u64;

    /// Opens a disk for somebody, who has it until it is dropped. One that writes is waited for, unless `stopping`.
    ///
    /// # Errors
    /// `Busy`: somebody else writes it, or it has got another name. It may not be used, or cannot be opened.
    fn open(&self, subject: &Subject, by: &Applicant<'_>, stopping: &AtomicBool) -> Result<Opened>;
}

/// The volumes and snapshots of a store.
pub struct StoreDisks {
    store: Store,
    kind: HolderKind,
    options: Arc<DiskOptions>,
    /// Held from the last look for who writes a volume until it is held: two who wait for the same must not both have it,
    /// and so neither.
    opening: Mutex<()>,
    /// Whose users are to be told that a server before lost what it had acknowledged, by uuid.
    lost: Mutex<BTreeMap<String, Arc<AtomicBool>>>,
}

impl StoreDisks {
    /// Those of a store, for clients of this kind.
    #[must_use]
    pub fn new(store: Store, kind: HolderKind, options: Arc<DiskOptions>) -> Self {
        let (opening, lost) = Default::default();
        Self { store, kind, options, opening, lost }
    }

    fn is_of(&self, held: &HolderInfo, id: u64) -> bool {
        held.holder.kind == self.kind && held.holder.id == Some(id)
    }

    /// Who else writes a volume: what it writes could be undone, or undo.
    fn writer(&self, volume: &str, id: u64) -> Option<HolderInfo> {
        self.store.holders().into_iter().find(|held| {
            let same = held.snapshot.is_none() && held.volume == volume;
            same && (held.holder.alone || held.holder.writes) && !self.is_of(held, id)
        })
    }

    /// Holds what is to be only read, or is written by nobody else.
    fn hold(
        &self,
        subject: &Subject,
        by: &Applicant<'_>,
        writes: bool,
    ) -> Result<dbs_core::Volume> {
        let holder = Holder {
            kind: self.kind,
            who: by.who.to_owned(),
            id: Some(by.id),
            writes,
            alone: writes,
            remedy: by.remedy.to_owned(),
        };
        let volume = self.store.volume_for(&subject.to_string(), holder)?.complete()?;
        // It is held from here on, and may have another name than a moment ago: another may have that.
        let own = self.store.holders().into_iter().find(|held| self.is_of(held, by.id));
        let is_it = |own: &HolderInfo| {
            let found = self.subject(&own.volume, own.snapshot.as_deref());
            found.is_ok_and(|found| found.uuid == subject.uuid)
        };
        let Some(own) = own.filter(is_it) else {
            return Err(Error::busy(format!("`{subject}` has got another name meanwhile")));
        };
        // Whoever came at the same moment finds this one, or is found.
        match self.writer(&own.volume, by.id).filter(|_| writes) {
            Some(other) => Err(written(&other.holder.who, &other.holder.remedy)),
            None => Ok(volume),
        }
    }

    /// Waits before the volume is held: who goes has a moment for that, and who waits keeps nobody from writing.
    fn hold_alone(
        &self,
        subject: &Subject,
        by: &Applicant<'_>,
        stopping: &AtomicBool,
    ) -> Result<dbs_core::Volume> {
        wait_for(stopping, || {
            let _opening = lock(&self.opening);
            match self.writer(&subject.volume, by.id) {
                Some(other) => Err(written(&other.holder.who, &other.holder.remedy)),
                None => Ok(self.hold(subject, by, true)),
            }
        })?
    }
}

impl Disks for StoreDisks {
    fn subjects(&self) -> Vec<Subject> {
        let mut found = Vec::new();
        for volume in self.store.volumes(false) {
            // One that has gone since has no snapshots.
            for snapshot in self.store.snapshots(&volume.name, false).unwrap_or_default() {
                let (volume, name) = (volume.name.clone(), Some(snapshot.name));
                found.push(Subject { volume, snapshot: name, uuid: snapshot.uuid });
            }
            if !volume.rebuilding {
                found.push(Subject { volume: volume.name, snapshot: None, uuid: volume.uuid });
            }
        }
        found
    }

    fn subject(&self, volume: &str, snapshot: Option<&str>) -> Result<Subject> {
        let uuid = match snapshot {
            Some(snapshot) => self.store.snapshot_info(volume, snapshot)?.uuid,
            None => self.store.volume_info(volume)?.uuid,
        };
        let (volume, snapshot) = (volume.to_owned(), snapshot.map(str::to_owned));
        Ok(Subject { volume, snapshot, uuid })
    }

    fn access(&self, volume: &str, from: &str) -> Option<bool> {
        (self.options.access)(volume, from)
    }

    fn number(&self) -> u64 {
        (self.options.number)()
    }

    fn open(&self, subject: &Subject, by: &Applicant<'_>, stopping: &AtomicBool) -> Result<Opened> {
        let asked = self.access(&subject.volume, by.from);
        let asked =
            asked.ok_or_else(|| Error::not_found(format!("no volume `{}`", subject.volume)))?;
        let read_only = self.options.read_only || asked || subject.snapshot.is_some();
        let volume = if read_only {
            self.hold(subject, by, false)?
        } else {
            self.hold_alone(subject, by, stopping)?
        };
        let has_lost = || Arc::new(AtomicBool::new(self.store.lost_tail().is_some()));
        let uuid = subject.uuid.clone();
        Ok(Opened {
            lost: lock(&self.lost).entry(uuid.clone()).or_insert_with(has_lost).clone(),
            read_only: read_only || volume.read_only(),
            whole_blocks: self.store.writes_whole_blocks(),
            zeroes_freed: true,
            disk: Disk::Stored(volume),
            uuid,
        })
    }
}

/// One volume, whose requests a [`Carrier`](super::Carrier) carries out.
pub struct OneDisk {
    subject: Subject,
    size: Arc<dyn Fn() -> u64 + Send + Sync>,
    next: AtomicU64,
    held: Mutex<Weak<CarriedDisk>>,
}

impl OneDisk {
    /// A volume of this name and uuid, with `size` bytes at the moment.
    pub fn new(name: &str, uuid: &str, size: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        let subject = Subject { volume: name.to_owned(), snapshot: None, uuid: uuid.to_owned() };
        Self { subject, size: Arc::new(size), next: AtomicU64::new(1), held: Mutex::default() }
    }
}

impl Disks for OneDisk {
    fn subjects(&self) -> Vec<Subject> {
        vec![self.subject.clone()]
    }

    fn subject(&self, volume: &str, snapshot: Option<&str>) -> Result<Subject> {
        match snapshot {
            None if volume == self.subject.volume => Ok(self.subject.clone()),
            _ => Err(Error::not_found(format!("no volume `{volume}`"))),
        }
    }

    fn access(&self, volume: &str, _: &str) -> Option<bool> {
        (volume == self.subject.volume).then_some(false)
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn open(&self, _: &Subject, by: &Applicant<'_>, stopping: &AtomicBool) -> Result<Opened> {
        let carried = wait_for(stopping, || {
            let mut held = lock(&self.held);
            if let Some(other) = held.upgrade() {
                return Err(written(&other.who, "disconnect that first"));
            }
            let carried =
                Arc::new(CarriedDisk { size: Arc::clone(&self.size), who: by.who.to_owned() });
            *held = Arc::downgrade(&carried);
            Ok(carried)
        })?;
        let (disk, uuid) = (Disk::Carried(carried), self.subject.uuid.clone());
        // What a controller loses is in the list of complete replicas.
        let lost = Arc::default();
        // Upstream's replica may show what an older snapshot has there, once it was started again.
        let zeroes_freed = false;
        Ok(Opened { disk, read_only: false, whole_blocks: false, zeroes_freed, uuid, lost })
    }
}

/// Tries until it works, for a while.
fn wait_for<T>(stopping: &AtomicBool, mut what: impl FnMut() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match what() {
            Err(_) if begun.elapsed() <= PATIENCE && !stopping.load(Ordering::SeqCst) => {
                thread::sleep(LOOK_AGAIN);
            }
            outcome => return outcome,
        }
    }
}

fn written(who: &str, remedy: &str) -> Error {
    Error::busy(format!("it is written by the {who}; {remedy}"))
}
