//! Which replicas hold everything that was ever acknowledged, kept where the next controller finds it.
//!
//! A block device outlives its controller. The kernel gives the requests that a dead controller had not
//! answered to the next controller. But the next controller does not know which requests *were* answered,
//! and a replica that missed some of them looks like any other. So it takes a device over only if all its
//! replicas are in this list. Otherwise it removes the device: the device's users see an error, and nobody
//! reads stale data.
//!
//! The order that makes the list true: a replica is removed from the list, in the file, *before* it becomes
//! `ERR` ([`Ledger::remove_replica`]), and it is `ERR` before a change that it missed is acknowledged. A
//! replica that becomes complete is added at any time after. If the list can be neither changed nor removed,
//! the process ends: nothing that the replica missed was acknowledged, and a dead process acknowledges
//! nothing.
//!
//! The list says nothing of who uses the replicas later, on other machines. So it has the generations of those
//! replicas that tell them: the one that each had, and the one that each has once this controller has changed
//! it. A replica of any other generation was changed by somebody else, or has lost changes with its machine's power.

use dbs_core::{Error, Result};
use dbs_frontend::lock;
use dbs_service::log;
use longhorn_controller::rules::ReplicaId;
use longhorn_wire::frame::{Generations, Hello};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The list as it is in its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Listed {
    /// The mark of the device.
    mark: u64,
    /// The replicas that are complete: by their identities, or by the addresses of those that have none.
    complete: BTreeSet<String>,
    /// Those that failed while the device was there, likewise, and were not rebuilt since.
    failed: BTreeSet<String>,
    /// Generations that complete replicas may have, as far as they say. An older version had none.
    #[serde(default)]
    generations: BTreeMap<String, BTreeSet<u64>>,
}

/// What a replica is called.
struct Name {
    address: String,
    /// With [`IDENTITY`] in front.
    identity: Option<String>,
    /// The generation that it had when it was connected to.
    generation: Option<u64>,
    /// Those that it may have later, if nobody but this controller changes it.
    later: BTreeSet<u64>,
}

impl Name {
    fn in_list(&self) -> &str {
        self.identity.as_ref().unwrap_or(&self.address)
    }
}

/// In front of an identity. It stays the same when a replica comes back on other ports, as after an upgrade.
const IDENTITY: &str = "id:";

#[derive(Default)]
struct State {
    names: BTreeMap<ReplicaId, Name>,
    complete: BTreeSet<ReplicaId>,
    /// Removed for good: numbers are not used again.
    removed: BTreeSet<ReplicaId>,
    failed: BTreeSet<String>,
    /// The mark of the device that it is kept for.
    mark: Option<u64>,
    /// That of the last device that this process has ended: the file may have outlived that, but not the device.
    ended: Option<u64>,
}

/// The list of one volume.
pub(super) struct Ledger {
    file: PathBuf,
    state: Mutex<State>,
    /// Ends the process.
    last_resort: fn(&str) -> !,
}

/// Ends the process where going on could lose what was acknowledged.
fn abort(why: &str) -> ! {
    log::error("stopping", &[("error", &why)]);
    std::process::abort();
}

impl Ledger {
    /// An empty list that is not kept yet; its file is to be this one.
    pub fn new(file: PathBuf) -> Self {
        Self { file, state: Mutex::default(), last_resort: abort }
    }

    /// The address of a replica, and what it says of itself.
    pub fn name(&self, replica: ReplicaId, address: &str, hello: Option<Hello>) {
        let generations = hello.and_then(|hello| hello.generations);
        let (generation, later) = match generations {
            Some(Generations { now, changed }) => (Some(now), [now, changed].into()),
            None => (None, BTreeSet::new()),
        };
        let number = hello.and_then(|hello| hello.identity).map(u128::from_be_bytes);
        let identity = number.map(|number| format!("{IDENTITY}{number:032x}"));
        let mut state = lock(&self.state);
        // A directory that was copied: its identity tells nobody which of the two missed something.
        let is_twice = state.names.iter().any(|(other, name)| {
            *other != replica && !state.removed.contains(other) && name.identity == identity
        });
        let identity = identity.filter(|_| !is_twice);
        let address = address.to_owned();
        state.names.insert(replica, Name { address, identity, generation, later });
    }

    /// The address of a complete replica whose directory a newer process has that says this: to open the newer one
    /// would take the store from it, as a newer controller does, and end this one. A copy of a directory is told from it
    /// by its generation, once one of both has changed.
    pub fn newer_of(&self, hello: Option<Hello>) -> Option<String> {
        let Hello { identity, generations, .. } = hello?;
        let number = u128::from_be_bytes(identity?);
        let (identity, now) = (format!("{IDENTITY}{number:032x}"), generations?.now);
        let state = lock(&self.state);
        let same =
            |name: &&Name| name.identity.as_ref() == Some(&identity) && name.later.contains(&now);
        self.complete_in(&state).find(same).map(|name| name.address.clone())
    }

    /// A replica holds everything, unless the replica was removed from the list.
    pub fn complete(&self, replica: ReplicaId) {
        let mut state = lock(&self.state);
        if state.removed.contains(&replica) || !state.complete.insert(replica) {
            return;
        }
        if let Some(name) = state.names.get(&replica).map(|name| name.in_list().to_owned()) {
            // It was rebuilt.
            state.failed.remove(&name);
        }
        if let Err(error) = self.save(&state) {
            // A list that lacks one only makes the next controller end the device.
            log::warn("ledger", &[("error", &error)]);
        }
    }

    /// Takes a replica off the list: when this returns, no later process believes that it is complete.
    /// Called before it becomes `ERR`.
    pub fn remove_replica(&self, replica: ReplicaId) {
        let mut state = lock(&self.state);
        state.removed.insert(replica);
        if !state.complete.remove(&replica) {
            return;
        }
        if let Some(name) = state.names.get(&replica).map(|name| name.in_list().to_owned()) {
            state.failed.insert(name);
        }
        let Err(error) = self.save(&state) else { return };
        log::error(
            "ledger",
            &[("error", &error), ("what", &"the list of complete replicas is removed")],
        );
        if let Err(also) = self.remove() {
            (self.last_resort)(&format!(
                "a replica failed, and the list of complete replicas can be neither changed \
                 ({error}) nor removed ({also}): the writes that the replica missed are not \
                 acknowledged"
            ));
        }
    }

    /// Keeps the list from now on, for a new device with this mark.
    ///
    /// # Errors
    /// `Io`: it cannot be written, and is not kept.
    pub fn begin(&self, mark: u64) -> Result<()> {
        let mut state = lock(&self.state);
        state.failed.clear();
        self.keep(&mut state, mark)
    }

    /// Whether a device with this mark may be taken over with the replicas that are complete now: they
    /// were complete to the end. With `moved`, replicas may have other ports than they had, as after an
    /// upgrade.
    ///
    /// # Errors
    /// `Busy` with the reason why not.
    pub fn check(&self, mark: u64, moved: bool) -> Result<()> {
        self.compare(&lock(&self.state), mark, moved).map(drop)
    }

    /// Keeps the list of a device with this mark that is taken over.
    ///
    /// # Errors
    /// Those of [`Ledger::check`]; `Io`.
    pub fn take_over(&self, mark: u64, moved: bool) -> Result<()> {
        let mut state = lock(&self.state);
        let listed = self.compare(&state, mark, moved)?;
        state.failed.extend(listed.failed);
        // An older process of a replica's directory may have changed it after this one has looked.
        for name in state.names.values_mut().filter(|name| moved && name.generation.is_some()) {
            let before = listed.generations.get(name.in_list()).into_iter().flatten();
            name.later.extend(before);
        }
        self.keep(&mut state, mark)
    }

    /// Keeps the list no more, and leaves it as it is to the next controller.
    pub fn leave(&self) {
        lock(&self.state).mark = None;
    }

    /// There is nothing to be taken over, or may not be: the device is gone, or the volume is used in
    /// another way from now on.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = state.mark.take().or(state.ended);
        drop(state);
        if let Err(error) = self.remove() {
            // Its mark is no other device's.
            log::warn("ledger", &[("error", &error)]);
        }
    }

    /// Removes a list that another controller has kept, if this one keeps none.
    pub fn end_of_others(&self) {
        let is_kept = lock(&self.state).mark.is_some();
        if !is_kept {
            self.end();
        }
    }

    fn keep(&self, state: &mut State, mark: u64) -> Result<()> {
        let before = state.mark.replace(mark);
        let saved = self.save(state);
        if saved.is_err() {
            state.mark = before;
        }
        let named = |e| Error::io(e, format!("writing {}", self.file.display()));
        saved.map_err(named)
    }

    fn compare(&self, state: &State, mark: u64, moved: bool) -> Result<Listed> {
        let refused = |why: String| Error::busy(format!("{}: {why}", self.file.display()));
        let text = fs::read(&self.file).map_err(|e| refused(e.to_string()))?;
        let listed: Listed = serde_json::from_slice(&text).map_err(|e| refused(e.to_string()))?;
        if listed.mark != mark {
            return Err(refused("it belongs to another device".to_owned()));
        }
        if state.ended == Some(mark) {
            return Err(refused("the device has ended".to_owned()));
        }
        // An older version knew no identities.
        let by_identity = listed.complete.iter().any(|name| name.starts_with(IDENTITY));
        let names: Vec<&str> = self
            .complete_in(state)
            .map(|name| if by_identity { name.in_list() } else { &name.address })
            .collect();
        let unknown: Vec<&str> = names.iter().copied().filter(|name| !listed.has(name)).collect();
        let known = unknown.is_empty() || moved && listed.has_hosts(names.into_iter());
        if !known {
            return Err(refused(format!(
                "these replicas may have missed the last writes: {}",
                unknown.join(" ")
            )));
        }
        let changed = self.complete_in(state).filter(|name| listed.is_another(name));
        let changed: Vec<&str> = changed.map(|name| name.address.as_str()).collect();
        match changed.is_empty() {
            true => Ok(listed),
            false => Err(refused(format!(
                "these replicas were changed by another controller, or have lost writes: {}",
                changed.join(" ")
            ))),
        }
    }

    /// Those of the replicas that are complete.
    fn complete_in<'a>(&self, state: &'a State) -> impl Iterator<Item = &'a Name> {
        state.complete.iter().filter_map(|replica| state.names.get(replica))
    }

    /// Has the file say what `state` does, durably, if it is kept.
    fn save(&self, state: &State) -> io::Result<()> {
        let Some(mark) = state.mark else { return Ok(()) };
        let complete = self.complete_in(state).map(|name| name.in_list().to_owned()).collect();
        let told = self.complete_in(state).filter(|name| !name.later.is_empty());
        let generations =
            told.map(|name| (name.in_list().to_owned(), name.later.clone())).collect();
        let listed = Listed { mark, complete, failed: state.failed.clone(), generations };
        write_durably(&self.file, &serde_json::to_vec(&listed)?)
    }

    fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => sync_directory(&self.file),
        }
    }
}

impl Listed {
    fn has(&self, address: &str) -> bool {
        self.complete.contains(address)
    }

    /// Whether a replica has another generation than one that this list allows. Where one of both sides
    /// knows of none, that is not known.
    fn is_another(&self, name: &Name) -> bool {
        let allowed = self.generations.get(name.in_list());
        allowed.zip(name.generation).is_some_and(|(allowed, now)| !allowed.contains(&now))
    }

    /// Whether there is a complete replica for each of these on its host, and none that failed there.
    fn has_hosts<'a>(&self, addresses: impl Iterator<Item = &'a str>) -> bool {
        let mut left: Vec<&str> = self.complete.iter().map(|address| host(address)).collect();
        let failed: BTreeSet<&str> = self.failed.iter().map(|address| host(address)).collect();
        addresses.map(host).all(|host| {
            let found = left.iter().position(|other| *other == host);
            found.map(|place| left.swap_remove(place)).is_some() && !failed.contains(host)
        })
    }
}

/// The host of `tcp://HOST:PORT`. A replica in this process has no other ports than its directory, and one
/// with an identity is known by that alone.
fn host(address: &str) -> &str {
    if address.starts_with(super::LOCAL_PREFIX) || address.starts_with(IDENTITY) {
        return address;
    }
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// Replaces a file in one step, durably.
pub(super) fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut next = path.as_os_str().to_owned();
    next.push(".new");
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let mut file = File::create(&next)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&next, path)?;
    sync_directory(path)
}

fn sync_directory(path: &Path) -> io::Result<()> {
    match path.parent().map(File::open) {
        Some(Ok(directory)) => directory.sync_all(),
        // Nothing in it is there either.
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Some(Err(error)) => Err(error),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
