//! Who has volumes and snapshots open, as far as they have said who they are: so that others can be told, and
//! nothing takes content from under them.

use super::Meta;
use crate::error::{Error, Result};
use crate::info::{Holder, HolderInfo, HolderKind};
use crate::units::{SnapshotId, VolumeId, format_time};
use std::collections::BTreeMap;

/// Most holders that an error names.
const NAMED_MAX: usize = 3;

/// All holders, by number.
#[derive(Default)]
pub struct Holders {
    next: u64,
    all: BTreeMap<u64, Held>,
}

struct Held {
    what: Target,
    holder: Holder,
    since_ns: u64,
}

/// What is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The head of a volume.
    Volume(VolumeId),
    /// A snapshot of a volume.
    Snapshot(VolumeId, SnapshotId),
    /// Whatever volume has this name, now or later.
    Name(String),
}

impl Meta {
    /// Adds a holder; its number.
    pub fn add_holder(&mut self, what: Target, holder: Holder, since_ns: u64) -> u64 {
        let number = self.holders.next;
        self.holders.next += 1;
        self.holders.all.insert(number, Held { what, holder, since_ns });
        number
    }

    /// Takes a holder out.
    pub fn remove_holder(&mut self, number: u64) {
        self.holders.all.remove(&number);
    }

    /// All holders, by the names that volumes and snapshots have now.
    pub fn list_holders(&self) -> Vec<HolderInfo> {
        let info = |held: &Held| {
            let (volume, snapshot) = match &held.what {
                Target::Volume(id) => (self.volume(*id).name.clone(), None),
                Target::Snapshot(id, snapshot) => {
                    let snapshot = self.snapshot(*snapshot).name.clone();
                    (self.volume(*id).name.clone(), Some(snapshot))
                }
                Target::Name(name) => (name.clone(), None),
            };
            HolderInfo { volume, snapshot, since_ns: held.since_ns, holder: held.holder.clone() }
        };
        self.holders.all.values().map(info).collect()
    }

    /// Refuses what takes content from the users of a volume, called so, while it has some.
    ///
    /// # Errors
    /// `Busy`, which names them.
    pub fn check_unheld(&self, id: VolumeId, doing: &str) -> Result<()> {
        let name = &self.volume(id).name;
        match self.who_holds(&Target::Volume(id)) {
            None => Ok(()),
            Some(who) => Err(Error::busy(format!(
                "{doing} volume `{name}` would take content from its users: it is open by {who}"
            ))),
        }
    }

    /// Refuses another name for a volume, or for one of its snapshots, while a virtual machine has it. When the server
    /// is started anew, the machine comes again by the name: its guest would wait for ever, or would go on with what it
    /// knows of this volume on the next one of that name.
    ///
    /// # Errors
    /// `Busy`, which names the machine.
    pub fn check_renamable(&self, id: VolumeId, snapshot: Option<SnapshotId>) -> Result<()> {
        let concerned = |what: &Target| match what {
            Target::Volume(held) => snapshot.is_none() && *held == id,
            Target::Snapshot(held, of) => *held == id && snapshot.is_none_or(|only| only == *of),
            Target::Name(_) => false,
        };
        let mut held = self.holders.all.values();
        let machine = held.find(|h| h.holder.kind == HolderKind::VhostUser && concerned(&h.what));
        match machine {
            None => Ok(()),
            Some(Held { holder, .. }) => Err(Error::busy(format!(
                "a virtual machine finds its disk by the name, and would not find it again after a restart of the \
                 server: it is open by the {}; {}",
                holder.who, holder.remedy
            ))),
        }
    }

    /// Why what is open cannot be deleted.
    pub(super) fn open_error(&self, what: &str, target: &Target) -> Error {
        Error::busy(match self.who_holds(target) {
            Some(who) => format!("{what} is open by {who}"),
            None => format!("{what} is open or exported; close it first"),
        })
    }

    /// Who holds something, since when, and what to do about it.
    fn who_holds(&self, target: &Target) -> Option<String> {
        let name = match target {
            Target::Volume(id) => Some(&self.volume(*id).name),
            _ => None,
        };
        let holds = |held: &&Held| match &held.what {
            Target::Name(held) => Some(held) == name,
            what => what == target,
        };
        let found: Vec<_> = self.holders.all.values().filter(holds).collect();
        let remedy = &found.first()?.holder.remedy;
        let named = found.iter().take(NAMED_MAX);
        let named = named.map(|h| format!("{} since {}", h.holder.who, format_time(h.since_ns)));
        let named = named.collect::<Vec<_>>().join(", ");
        let more = match found.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(format!("{named}{more}; {remedy}"))
    }
}
