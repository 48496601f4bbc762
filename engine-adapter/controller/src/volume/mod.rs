//! The one owner of a volume's state: its replicas and their modes, its size, limits and frontend.
//!
//! [`Controller`]'s methods block; gRPC handlers call them where that is allowed. One change is made at a
//! time (`work`). What the volume *is* lies in `state`, a leaf lock held for moments, so that the data
//! path can say at any time that a replica failed. I/O is paused ([`DataPath::pause`]) only around calls
//! that must see no write in between: what can be asked, checked or copied before is.
//!
//! A replica becomes `ERR` in the data path first, then here, then in what callers are told.

mod expand;
pub mod file;
mod happened;
mod host;
mod members;
mod metrics;
pub mod parts;
mod rebuild;
pub mod remote;
mod settings;
mod snapshot;
mod start;

pub use happened::Event;
pub use host::{Machine, forget_frozen, thaw, thaw_left};
pub use metrics::Fault;
pub use parts::{
    Call, CallError, Called, DataPath, Events, Frontend, Frontends, Host, Offer, Paused,
    RebuildStatus, Replicas, Target,
};

use super::rules::call_timeout::CallTimeout;
use super::rules::limits::Limits;
use super::rules::start::Policy;
use super::rules::{Mode, Modes, ReplicaId, Slot, timeout};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::control::expansion::ExpandError;
use longhorn_wire::frame::is_handed_over;
use longhorn_wire::proto::controller::Volume;
use longhorn_wire::proto::ptypes;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// How a controller is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// Name of the volume.
    pub volume: String,
    /// Which replicas are taken at a start.
    pub policy: Policy,
    /// Whether a discard marks snapshots as removed.
    pub unmap_mark: bool,
    /// How many snapshots there may be.
    pub limits: Limits,
    /// From how many replicas at once a rebuild copies.
    pub sync_limit: u32,
    /// Frontend to be started with the volume.
    pub frontend: Option<String>,
    /// Whether a snapshot is preceded by a `sync` of this machine.
    pub sync_before_snapshot: bool,
    /// How long other replicas may take for a call when one has answered: as long as they may be silent
    /// on the data path, or twice as long while I/O is paused. See [`super::rules::timeout::short`].
    pub short_timeout: Duration,
}

/// What a controller works with.
#[derive(Clone)]
pub struct Parts {
    /// Control of replicas.
    pub replicas: Arc<dyn Replicas>,
    /// Their data.
    pub path: Arc<dyn DataPath>,
    /// Frontends there are.
    pub frontends: Arc<dyn Frontends>,
    /// The machine.
    pub host: Arc<dyn Host>,
}

/// A replica of the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its number in the data path.
    pub id: ReplicaId,
    /// Where it is, and who.
    pub target: Target,
    /// What it is used for.
    pub mode: Mode,
    /// This controller has marked it as one that lacks something.
    pub marked: bool,
}

struct State {
    members: Vec<Member>,
    next_id: ReplicaId,
    size: u64,
    sector_size: u64,
    expanding: bool,
    expansion_error: String,
    expansion_failed_at: String,
    unmap_mark: bool,
    limits: Limits,
    sync_limit: u32,
    frontend: Option<Arc<dyn Frontend>>,
}

/// Passes what the data path says on to the controller, which is made after it.
#[derive(Default)]
pub struct Relay(OnceLock<Weak<Controller>>);

impl Events for Relay {
    fn faulted(&self, replica: ReplicaId, why: &str) {
        if let Some(controller) = self.0.get().and_then(Weak::upgrade) {
            controller.faulted(replica, why);
        }
    }
}

/// A volume over its replicas.
pub struct Controller {
    options: Options,
    parts: Parts,
    /// Whether the next start takes the volume over from an older controller: the first one does it.
    takes_over: AtomicBool,
    work: Mutex<()>,
    state: Mutex<State>,
    metrics: Mutex<metrics::LastSecond>,
    faults: metrics::Faults,
    happened: happened::Happened,
}

impl Controller {
    /// A controller without replicas; `relay` is what the path in `parts` tells its events to.
    #[must_use]
    pub fn new(options: Options, parts: Parts, relay: &Relay) -> Arc<Self> {
        let state = State {
            members: Vec::new(),
            next_id: 0,
            size: 0,
            sector_size: 0,
            expanding: false,
            expansion_error: String::new(),
            expansion_failed_at: String::new(),
            unmap_mark: options.unmap_mark,
            limits: options.limits,
            sync_limit: options.sync_limit.max(1),
            frontend: None,
        };
        let controller = Arc::new(Self {
            takes_over: AtomicBool::new(options.policy.upgrade),
            options,
            parts,
            work: Mutex::new(()),
            state: Mutex::new(state),
            metrics: Mutex::default(),
            faults: metrics::Faults::default(),
            happened: happened::Happened::default(),
        });
        // A relay that has a controller keeps it.
        let _ = relay.0.set(Arc::downgrade(&controller));
        controller
    }

    /// The volume as it is now.
    #[must_use]
    pub fn volume(&self) -> Volume {
        let state = self.state();
        let frontend = state.frontend.as_ref();
        let frontend_state = match frontend.map(|frontend| frontend.is_up()) {
            Some(true) => "up",
            Some(false) => "down",
            None => "",
        };
        Volume {
            name: self.options.volume.clone(),
            size: signed(state.size),
            replica_count: i32::try_from(state.members.len()).unwrap_or(i32::MAX),
            endpoint: frontend.map_or_else(String::new, |frontend| frontend.endpoint()),
            frontend: frontend.map_or_else(String::new, |frontend| frontend.name().to_owned()),
            frontend_state: frontend_state.to_owned(),
            is_expanding: state.expanding,
            last_expansion_error: state.expansion_error.clone(),
            last_expansion_failed_at: state.expansion_failed_at.clone(),
            unmap_mark_snap_chain_removed: state.unmap_mark,
            snapshot_max_count: i32::try_from(state.limits.count).unwrap_or(i32::MAX),
            snapshot_max_size: signed(state.limits.size),
            block_device: frontend.map_or_else(String::new, |one| one.block_device().to_owned()),
        }
    }

    /// Its replicas, in the order they were added.
    #[must_use]
    pub fn replicas(&self) -> Vec<Member> {
        self.state().members.clone()
    }

    /// The replica with this address.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn replica(&self, address: &str) -> Result<Member> {
        let state = self.state();
        let member = state.members.iter().find(|member| member.target.address == address);
        member.cloned().ok_or_else(|| {
            Error::not_found(format!(
                "cannot find the replica with address {address} in the controller server of volume {}",
                self.options.volume
            ))
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other change is being made.
    fn work(&self) -> MutexGuard<'_, ()> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The replicas that are part of the volume still.
    fn active(&self) -> Vec<Member> {
        let state = self.state();
        state.members.iter().filter(|member| member.mode.is_written()).cloned().collect()
    }

    /// Makes a replica `ERR`.
    fn fault(&self, replica: ReplicaId, fault: Fault, why: &str) {
        self.parts.path.set_mode(replica, Mode::Err);
        self.note_fault(replica, fault, why);
    }

    /// Notes that a replica has become `ERR`: counted and told once, whoever sees it first.
    fn note_fault(&self, replica: ReplicaId, fault: Fault, why: &str) {
        let address = {
            let mut state = self.state();
            let member = state.members.iter_mut().find(|member| member.id == replica);
            member.filter(|member| member.mode != Mode::Err).map(|member| {
                member.mode = Mode::Err;
                member.target.address.clone()
            })
        };
        if let Some(address) = address {
            self.faults.count(fault);
            self.log(true, "replica-faulted", &[("replica", &address), ("why", &why)]);
        }
    }

    /// Gives a replica another mode, if it may have it.
    fn set_mode(&self, replica: ReplicaId, mode: Mode) {
        let may = {
            let mut state = self.state();
            let member = state.members.iter_mut().find(|member| member.id == replica);
            let member = member.filter(|member| member.mode.may_become(mode));
            member.map(|member| {
                member.mode = mode;
                member.target.address.clone()
            })
        };
        if let Some(address) = &may {
            self.happened("mode", &[("replica", address), ("mode", &mode)]);
        }
        // Where the data path has seen it fail, it may have said so before the mode was changed here.
        if may.is_some() && !self.parts.path.set_mode(replica, mode) {
            self.faulted(replica, "it failed before");
        }
    }

    /// One call to one replica.
    fn call(&self, target: &Target, call: Call) -> Called {
        self.call_within(target, call, None)
    }

    /// One call to one replica, with a timeout.
    fn call_within(&self, target: &Target, call: Call, timeout: Option<CallTimeout>) -> Called {
        let mut answers = self.parts.replicas.call_all(vec![(target.clone(), call)], timeout);
        answers.pop().unwrap_or_else(|| Err(CallError::unknown("the call was not made")))
    }

    /// The same call to several replicas.
    fn call_each(
        &self,
        members: &[Member],
        call: &Call,
        timeout: Option<CallTimeout>,
    ) -> Vec<Called> {
        let calls = members.iter().map(|member| (member.target.clone(), call.clone())).collect();
        let mut answers = self.parts.replicas.call_all(calls, timeout);
        self.give_way(members, &mut answers);
        answers
    }

    /// If a complete replica says that a newer process has its store, a newer controller has the volume, as the
    /// data path knows it (`path::shared::Shared::give_way`): all become `ERR`, and what some have done is not
    /// to be taken for done.
    fn give_way(&self, members: &[Member], answers: &mut [Called]) {
        let newer = members.iter().zip(&*answers).find_map(|(member, answer)| {
            let error = answer.as_ref().err()?;
            let is_complete = member.mode == Mode::Rw;
            // That of an expansion has a form of its own.
            let said = ExpandError::of_call(&error.text, error.refused).message;
            (is_complete && is_handed_over(&said)).then(|| (member.id, error.clone()))
        });
        let Some((first, error)) = newer else { return };
        // That one last: as long as it is asked, nothing is acknowledged that others alone have.
        let mut all = self.active();
        all.sort_by_key(|member| member.id == first);
        for member in all {
            self.fault(member.id, Fault::Data, &error.text);
        }
        answers.fill(Err(error));
    }

    /// Logs something of this volume.
    fn log(&self, error: bool, event: &str, fields: &[(&str, &dyn fmt::Display)]) {
        self.keep(error, event, fields);
        let mut all: Vec<(&str, &dyn fmt::Display)> = vec![("volume", &self.options.volume)];
        all.extend_from_slice(fields);
        self.parts.host.log(error, event, &all);
    }

    /// How long others are waited for once one has answered.
    fn timeout(&self) -> Option<CallTimeout> {
        Some(CallTimeout::among_equals(self.options.short_timeout))
    }

    /// Pauses I/O for calls to replicas that make something durable. What they have taken so far is made
    /// durable before, while I/O goes on, and a replica that hangs becomes `ERR` meanwhile.
    fn pause(&self) -> Box<dyn Paused + '_> {
        self.parts.path.flush();
        self.parts.path.pause(false)
    }

    /// How long these are waited for in what all are to do while I/O is paused.
    fn timeout_for_all(&self, members: &[Member]) -> CallTimeout {
        CallTimeout::for_all(modes(members).rw, self.options.short_timeout)
    }

    /// How long one replica is waited for while I/O is paused and others are well.
    fn timeout_for_one(&self, durable: bool) -> Option<CallTimeout> {
        let short = self.options.short_timeout;
        Some(CallTimeout::at_most(if durable { timeout::long(short) } else { short }))
    }

    /// The time as upstream's metadata has it.
    fn now(&self) -> String {
        longhorn_wire::time::text(self.parts.host.now_ns())
    }
}

impl Events for Controller {
    fn faulted(&self, replica: ReplicaId, why: &str) {
        self.note_fault(replica, Fault::Data, why);
    }
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller").field("volume", &self.options.volume).finish_non_exhaustive()
    }
}

/// Bytes as messages have them; what does not fit is as much as does.
pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The modes of these replicas, each in the slot of its place.
fn modes(members: &[Member]) -> Modes {
    let of = |mode: Mode| {
        let those = members.iter().enumerate().filter(|(_, member)| member.mode == mode);
        those.filter_map(|(index, _)| Slot::new(index)).collect()
    };
    Modes { rw: of(Mode::Rw), wo: of(Mode::Wo) }
}

/// A failed call, with who was called; `Busy` if that one has not heard of it.
fn failed(target: &Target, error: &CallError) -> Error {
    let kind = if error.was_never_sent() { ErrorKind::Busy } else { ErrorKind::Io };
    Error::new(kind, format!("{}: {error}", target.address))
}

/// Disks of a replica but head and backing file, with their sizes; and the head.
fn disks(target: &Target, replica: &ptypes::Replica) -> Result<(BTreeMap<String, u64>, String)> {
    let head = replica.chain.first().ok_or_else(|| {
        let address = &target.address;
        Error::invalid(format!("replica on {address} does not have any non-removed disks"))
    })?;
    let disks = replica
        .disks
        .iter()
        .filter(|(name, _)| *name != head && **name != replica.backing_file)
        .map(|(name, disk)| (name.clone(), disk.size.parse().unwrap_or(0)))
        .collect();
    Ok((disks, head.clone()))
}

/// The disk below another one of a replica, or nothing; `None` if that is not known.
fn parent<'a>(replica: &'a ptypes::Replica, disk: &str) -> Option<&'a str> {
    let parent = &replica.disks.get(disk)?.parent;
    Some(if *parent == replica.backing_file { "" } else { parent })
}
