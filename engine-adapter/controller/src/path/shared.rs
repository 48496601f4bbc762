//! What all reactors of a path share. None of it is locked while requests go well.

use super::PathOptions;
use super::latch::Latch;
use super::message::Message;
use super::replica::{Anew, Replica};
use super::sabotage::{Bug, is};
use super::stats::Counters;
use crate::rules::timeout::{Limits, Waits};
use crate::rules::{
    BlockLocks, FanOut, Mode, REPLICAS_MAX, ReplicaId, SharedModes, Slot, Slots, Verdict,
};
use dbs_core::volume::Pace;
use dbs_frontend::lock;
use dbs_reactor::Remote;
use dbs_service::log;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// What a path tells its owner.
pub trait Events: Send + Sync {
    /// A replica is about to become [`Mode::Err`]: it does when this returns, and nobody is told of what
    /// it missed before. May be called again for one that is so already. Called where requests are
    /// carried out, with a lock held: it may write a small file, and not call the path.
    fn faulting(&self, replica: ReplicaId) {
        let _ = replica;
    }

    /// A replica has become [`Mode::Err`], for this reason. Called on a reactor or on a thread that
    /// calls the path: it may not block, nor call the path.
    fn faulted(&self, replica: ReplicaId, why: &str);
}

/// Lets a simulation go on until something holds, or for as long as it likes.
#[cfg(feature = "sabotage")]
pub type Meanwhile = Box<dyn Fn(&dyn Fn() -> bool) + Send + Sync>;

/// The replicas by their slots.
#[derive(Default)]
struct Registry {
    replicas: Vec<Arc<Replica>>,
    last: usize,
    serial: u64,
}

/// What reactors share.
pub(super) struct Shared {
    pub options: PathOptions,
    pub epoch: Instant,
    /// What limits the frontends.
    pub pace: Arc<Pace>,
    pub size: AtomicU64,
    pub expanding: AtomicBool,
    pub modes: SharedModes,
    pub locks: BlockLocks,
    pub counters: Vec<Counters>,
    /// Slots of replicas that are told to flush.
    flushing: AtomicU64,
    /// Slots of replicas that are preferred for reading.
    preferred: AtomicU64,
    /// Bits of reactors with requests that wait for blocks which others have locked.
    blocked: AtomicU64,
    /// The reactor, plus 1, with a request that has waited too long for its blocks: until it has locked
    /// them, nobody begins a change.
    pub starving: AtomicU64,
    /// Counts replicas that become `ERR`: once before, and once when nothing is sent to it any more.
    losses: AtomicU64,
    /// The same, as far as a flush of the others has followed.
    settled: AtomicU64,
    /// Locked while it is decided which replicas become `ERR` and until they are, so that two reactors do
    /// not make each other's last replica `ERR`.
    deciding: Mutex<()>,
    registry: Mutex<Registry>,
    events: Arc<dyn Events>,
    reactors: OnceLock<Vec<Remote<Message>>>,
    /// What goes on while somebody waits for reactors that have no threads.
    #[cfg(feature = "sabotage")]
    pub meanwhile: OnceLock<Meanwhile>,
}

impl Shared {
    /// What reactors share whose clocks began at `epoch`.
    pub fn new(options: PathOptions, size: u64, events: Arc<dyn Events>, epoch: Instant) -> Self {
        let pace = Arc::<Pace>::default();
        pace.set(options.limits);
        Self {
            epoch,
            pace,
            size: AtomicU64::new(size),
            expanding: AtomicBool::new(false),
            modes: SharedModes::default(),
            locks: BlockLocks::default(),
            counters: (0..options.reactors).map(|_| Counters::default()).collect(),
            flushing: AtomicU64::new(0),
            preferred: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            starving: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            deciding: Mutex::default(),
            registry: Mutex::default(),
            events,
            reactors: OnceLock::new(),
            #[cfg(feature = "sabotage")]
            meanwhile: OnceLock::new(),
            options,
        }
    }

    pub fn connect(&self, reactors: Vec<Remote<Message>>) {
        self.reactors.get_or_init(|| reactors);
    }

    /// Waits for reactors.
    pub fn wait(&self, latch: &Latch) {
        #[cfg(feature = "sabotage")]
        if let Some(meanwhile) = self.meanwhile.get() {
            return meanwhile(&|| latch.is_open());
        }
        latch.wait();
    }

    /// Whether what goes wrong is logged: in a simulation it goes wrong ten thousand times a second.
    pub fn logs(&self) -> bool {
        #[cfg(feature = "sabotage")]
        return self.meanwhile.get().is_none();
        #[cfg(not(feature = "sabotage"))]
        true
    }

    /// Sends something to one reactor.
    pub fn send(&self, index: usize, message: Message) {
        if let Some(reactor) = self.reactors.get().and_then(|reactors| reactors.get(index)) {
            reactor.send(message);
        }
    }

    /// Sends something to all reactors.
    pub fn tell(&self, message: impl Fn(usize) -> Message) {
        let reactors = self.reactors.get().into_iter().flatten();
        reactors.enumerate().for_each(|(index, reactor)| reactor.send(message(index)));
    }

    /// Those of the replicas that are told to flush.
    pub fn flushing(&self) -> Slots {
        Slots::from_bits(self.flushing.load(Ordering::SeqCst))
    }

    /// The replica to read from, if one is preferred that is complete.
    #[inline]
    pub fn preferred(&self, complete: Slots) -> Option<Slot> {
        match self.preferred.load(Ordering::Relaxed) {
            0 => None,
            bits => Slots::from_bits(bits).and(complete).first(),
        }
    }

    /// Finds a slot for a new replica, the one longest unused; it has no mode yet. `None` if there
    /// are too many, or one with this number.
    pub fn register(
        &self,
        id: ReplicaId,
        name: &str,
        (flushes, preferred): (bool, bool),
        anew: Option<Anew>,
    ) -> Option<Arc<Replica>> {
        let mut registry = lock(&self.registry);
        if registry.replicas.iter().any(|replica| replica.id == id) {
            return None;
        }
        let is_free = |slot: &Slot| registry.replicas.iter().all(|other| other.slot != *slot);
        let from = registry.last;
        let slot = (1..=REPLICAS_MAX)
            .filter_map(|step| Slot::new((from + step) % REPLICAS_MAX))
            .find(is_free)?;
        registry.last = slot.index();
        registry.serial += 1;
        let replica = Arc::new(Replica {
            id,
            slot,
            serial: registry.serial,
            name: name.to_owned(),
            flushes,
            anew,
            reconnected: AtomicU64::new(0),
            why: OnceLock::new(),
            mismatches: AtomicU64::new(0),
            healed: AtomicU64::new(0),
        });
        registry.replicas.push(Arc::clone(&replica));
        let bit = Slots::of(slot).bits();
        if flushes {
            self.flushing.fetch_or(bit, Ordering::SeqCst);
        }
        if preferred {
            self.preferred.fetch_or(bit, Ordering::SeqCst);
        }
        Some(replica)
    }

    /// Forgets a replica that no reactor uses.
    pub fn unregister(&self, replica: &Replica) {
        let bit = Slots::of(replica.slot).bits();
        self.flushing.fetch_and(!bit, Ordering::SeqCst);
        self.preferred.fetch_and(!bit, Ordering::SeqCst);
        let mut registry = lock(&self.registry);
        self.modes.clear(replica.slot);
        registry.replicas.retain(|other| other.serial != replica.serial);
    }

    pub fn replica(&self, id: ReplicaId) -> Option<Arc<Replica>> {
        lock(&self.registry).replicas.iter().find(|replica| replica.id == id).cloned()
    }

    pub fn replicas(&self) -> Vec<Arc<Replica>> {
        lock(&self.registry).replicas.clone()
    }

    fn at(&self, slot: Slot) -> Option<Arc<Replica>> {
        lock(&self.registry).replicas.iter().find(|replica| replica.slot == slot).cloned()
    }

    /// The name of the replica in a slot.
    pub fn name(&self, slot: Slot) -> String {
        self.at(slot).map_or_else(String::new, |replica| replica.name.clone())
    }

    /// Decides on a change that everybody has answered. When this returns, who has missed it is
    /// `ERR`: then the change may be acknowledged.
    pub fn decide(&self, fan_out: &FanOut, errors: &[(Slot, String)]) -> Verdict {
        let deciding = lock(&self.deciding);
        let verdict = fan_out.decide(self.modes.now());
        let new: Vec<Slot> = verdict.faulted.iter().filter(|slot| self.make_err(*slot)).collect();
        drop(deciding);
        for slot in new {
            let said = errors.iter().find(|(from, _)| *from == slot);
            self.report_fault(
                slot,
                said.map_or("it has what the complete ones have no room for", |(_, text)| text),
            );
        }
        verdict
    }

    /// Makes a replica `ERR` once the owner has seen to it that nobody takes it for complete later; says
    /// whether it was not so before.
    fn make_err(&self, slot: Slot) -> bool {
        let Some(replica) = self.at(slot) else { return false };
        self.events.faulting(replica.id);
        // One that was removed has no mode, and its slot may be another's.
        let registry = lock(&self.registry);
        let is_there = registry.replicas.iter().any(|other| other.serial == replica.serial);
        let new = is_there && self.modes.of(slot) != Some(Mode::Err);
        if new {
            self.losses.fetch_add(1, Ordering::SeqCst);
            self.modes.fault(slot);
            self.losses.fetch_add(1, Ordering::SeqCst);
        }
        new
    }

    /// To be asked before a change is sent: nothing of it goes to those that were lost by then.
    #[inline]
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }

    /// Whether the replicas that are left are to flush before a change is answered that one may have `missed`.
    /// What they have more than the lost one must not be gone, nor their count of it, when they come back after
    /// a loss of power: nothing would tell it from them.
    #[inline]
    pub fn must_flush(&self, missed: bool) -> bool {
        let unsettled = self.losses() != self.settled.load(Ordering::Relaxed);
        (unsettled || missed && !is(Bug::TrustSettled)) && !is(Bug::AnswerBeforeFlush)
    }

    /// A change is durable on all replicas that are left which was sent after so many [`Shared::losses`]: who was
    /// lost by then lacks it, and is told by that.
    pub fn settle(&self, losses: u64) {
        self.settled.fetch_max(losses, Ordering::SeqCst);
    }

    /// Makes a replica `ERR`, whatever that means for the others.
    pub fn fault(&self, slot: Slot, why: &str) {
        let deciding = lock(&self.deciding);
        let new = self.make_err(slot);
        drop(deciding);
        if new {
            self.report_fault(slot, why);
        }
    }

    /// A newer process has the store of a replica. If that is complete, a newer controller has the volume, and takes
    /// all replicas for complete, whatever this one makes of them: all become `ERR`, so that nothing is
    /// acknowledged any more that one of them lacks. One that is being rebuilt says nothing of the others.
    pub fn give_way(&self, slot: Slot, why: &str) {
        let deciding = lock(&self.deciding);
        let modes = self.modes.now();
        let is_complete = modes.rw.contains(slot);
        let all = if is_complete { modes.written() } else { Slots::EMPTY };
        let new: Vec<Slot> = all.iter().filter(|slot| self.make_err(*slot)).collect();
        drop(deciding);
        for other in new {
            self.report_fault(other, why);
        }
    }

    /// Makes a replica `ERR` if another one is complete; else it is better than none.
    pub fn fault_unless_last(&self, slot: Slot, why: &str) {
        let deciding = lock(&self.deciding);
        let last = self.modes.now().rw.without(Slots::of(slot)).is_empty();
        let new = !last && self.make_err(slot);
        drop(deciding);
        if new {
            self.report_fault(slot, why);
        }
    }

    /// How long replicas may take.
    pub fn limits(&self) -> Limits {
        Limits { short: self.options.short_timeout, flush: self.options.flush_timeout }
    }

    /// Makes a replica `ERR` that takes too long; the last one may take longer.
    pub fn expire(&self, slot: Slot, waits: &Waits, now: Duration) {
        let deciding = lock(&self.deciding);
        let alone = self.modes.now().is_last(slot);
        let expired = self.limits().exceeded(waits, now, alone);
        let new = expired.filter(|_| self.make_err(slot));
        drop(deciding);
        if let Some(why) = new {
            self.report_fault(slot, why);
        }
    }

    /// Tells everybody who has to know that a replica has become `ERR`.
    fn report_fault(&self, slot: Slot, why: &str) {
        let Some(replica) = self.at(slot) else { return };
        if self.logs() {
            log::error("path", &[("replica", &replica.name), ("mode", &"ERR"), ("error", &why)]);
        }
        replica.why.get_or_init(|| why.to_owned());
        self.events.faulted(replica.id, why);
        let why: Arc<str> = why.into();
        self.tell(|_| Message::Lost { slot, serial: replica.serial, why: Arc::clone(&why) });
    }

    /// Sets a mode at the owner's wish, who needs not be told.
    pub fn set_mode(&self, replica: &Replica, mode: Mode) {
        if mode != Mode::Err {
            self.modes.set(replica.slot, mode);
        } else if self.make_err(replica.slot) {
            self.drop_connections(replica, "it was set to ERR");
        }
    }

    /// Makes the reactors end their connections to a replica.
    fn drop_connections(&self, replica: &Replica, why: &str) {
        replica.why.get_or_init(|| why.to_owned());
        let (slot, serial) = (replica.slot, replica.serial);
        let why: Arc<str> = why.into();
        self.tell(|_| Message::Lost { slot, serial, why: Arc::clone(&why) });
    }

    /// A reactor has requests that wait for blocks which others have locked.
    pub fn block(&self, index: usize) {
        self.blocked.fetch_or(1 << index, Ordering::SeqCst);
    }

    /// Something was given back: whoever waits for it tries again.
    #[inline]
    pub fn unblock(&self, own: usize) {
        if self.blocked.load(Ordering::SeqCst) & !(1 << own) == 0 {
            return;
        }
        let blocked = self.blocked.swap(0, Ordering::SeqCst);
        let reactors = self.reactors.get().map_or(&[][..], Vec::as_slice);
        for (index, reactor) in reactors.iter().enumerate() {
            if blocked & (1 << index) != 0 && index != own {
                reactor.send(Message::Retry);
            }
        }
    }
}
