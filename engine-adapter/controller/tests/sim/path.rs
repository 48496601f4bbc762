//! A data path made of the rules: it does what the real one does, on the simulated network.

use crate::client::Kind;
use crate::heal::{HEALINGS, Healings};
use crate::replica::{Reply, Request, SECTORS};
use crate::world::{Event, MS, World};
use longhorn_controller::rules::heal::{ROUNDS_MAX, Trust};
use longhorn_controller::rules::sabotage::{Bug, is};
use longhorn_controller::rules::timeout::{DEFAULT, Silence};
use longhorn_controller::rules::{
    Answer, BlockLocks, FanOut, Modes, Outcome, Read, ReplicaId, SharedModes, Slot, Slots, Widened,
    io,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Bytes of a sector.
const SECTOR: u64 = 512;

/// A replica that is connected.
#[derive(Debug)]
pub struct Peer {
    pub id: ReplicaId,
    pub(super) replica: usize,
    session: u64,
    silence: Silence,
    pub(super) trust: Trust,
}

/// Where a request of the user is.
#[derive(Debug)]
enum Phase {
    /// Not sent.
    Waiting,
    /// Being read, for itself or for the edges of a write; `left` are the other pieces to read.
    Reading {
        read: Read,
        piece: (u64, u64),
        left: Vec<(u64, u64)>,
        data: BTreeMap<u64, u32>,
    },
    Changing(FanOut),
    /// None has all that is to be read: so many blocks are being healed, and some may have been.
    Mending {
        left: usize,
        healed: bool,
    },
}

/// A request of the user.
#[derive(Debug)]
struct Task {
    kind: Kind,
    offset: u64,
    length: u64,
    value: u32,
    phase: Phase,
    locked: bool,
    /// Damage that it met: in which replicas, and blocks.
    met: BTreeSet<(usize, usize)>,
    /// What of it is to be healed.
    patients: Vec<(Slot, ReplicaId, usize)>,
    rounds: u8,
    /// A write that met damage, with what came of it, once it is made one of whole blocks.
    first: Option<FanOut>,
    widened: bool,
}

#[derive(Debug, Default)]
pub struct Path {
    pub modes: SharedModes,
    pub peers: BTreeMap<usize, Peer>,
    pub size: u64,
    pub expanding: bool,
    pub paused: bool,
    pub(super) locks: BlockLocks,
    tasks: BTreeMap<u64, Task>,
    waiting: VecDeque<u64>,
    /// Messages on their way: the task and the slot.
    messages: BTreeMap<u64, (u64, Slot)>,
    last_message: u64,
    next_slot: usize,
    pub(super) turn: usize,
    /// Whom to read from while it is complete.
    pub preferred: Option<Slot>,
    pub(super) healings: Healings,
}

impl Path {
    /// One for a new controller. Numbers of messages go on, for those still on their way.
    pub fn after(old: &Self) -> Self {
        Self { last_message: old.last_message, ..Self::default() }
    }

    pub fn is_quiet(&self, all: bool) -> bool {
        let rests = |phase: &Phase| match phase {
            Phase::Waiting => true,
            Phase::Mending { .. } => !all,
            _ => false,
        };
        self.tasks.values().all(|task| rests(&task.phase)) && (self.healings.all.is_empty() || !all)
    }

    /// The complete replicas.
    pub fn complete(&self) -> impl Iterator<Item = usize> {
        let rw = self.modes.now().rw;
        rw.iter().filter_map(|slot| self.peers.get(&slot.index()).map(|peer| peer.replica))
    }

    pub fn slot_of(&self, id: ReplicaId) -> Option<Slot> {
        let found = self.peers.iter().find(|(_, peer)| peer.id == id);
        found.and_then(|(index, _)| Slot::new(*index))
    }
}

impl World {
    /// Connects a replica; it has no mode yet.
    pub fn connect(&mut self, id: ReplicaId, replica: usize) -> bool {
        let its = &mut self.replicas[replica];
        if !its.alive || its.stalled_until > self.now {
            return false;
        }
        its.blemished = false;
        its.tainted = false;
        let session = its.session;
        let slot = (0..64).map(|n| (self.path.next_slot + n) % 64);
        let Some(index) = slot.into_iter().find(|n| !self.path.peers.contains_key(n)) else {
            return false;
        };
        self.path.next_slot = index + 1;
        if let Some(slot) = Slot::new(index) {
            self.path.modes.clear(slot);
        }
        let (silence, trust) = (Silence::default(), Trust::default());
        self.path.peers.insert(index, Peer { id, replica, session, silence, trust });
        true
    }

    /// Disconnects a replica.
    pub fn disconnect(&mut self, id: ReplicaId) {
        if let Some(slot) = self.path.slot_of(id) {
            self.path.modes.fault(slot);
            self.path.peers.remove(&slot.index());
            self.give_up(slot);
        }
    }

    /// Everything in flight to this slot has failed.
    fn give_up(&mut self, slot: Slot) {
        let all = self.path.messages.iter();
        let lost: Vec<_> = all.filter(|(_, (_, its))| *its == slot).map(|(m, _)| *m).collect();
        for message in lost {
            self.answered(message, Reply::Failed);
        }
    }

    /// The connections to a replica are gone.
    pub fn broken(&mut self, replica: usize, session: u64) {
        let peers = self.path.peers.iter();
        let mut of_it = peers.filter(|(_, p)| p.replica == replica && p.session == session);
        if let Some(slot) = of_it.next().and_then(|(index, _)| Slot::new(*index)) {
            self.fault(Slots::of(slot), "connection lost");
            self.give_up(slot);
        }
    }

    /// Makes replicas `ERR`.
    pub(super) fn fault(&mut self, slots: Slots, why: &str) {
        for slot in slots.iter() {
            let Some(peer) = self.path.peers.get(&slot.index()) else { continue };
            let (id, replica) = (peer.id, peer.replica);
            if self.path.modes.fault(slot) {
                self.note(format!("r{replica} faulted: {why}"));
                if !self.replicas[replica].blemished {
                    self.violated(format!("r{replica} is blamed, which failed nothing: {why}"));
                }
                self.faulted.push((id, why.to_owned()));
            }
        }
    }

    pub fn late_fault(&mut self, slots: u64) {
        self.fault(Slots::from_bits(slots), "late");
    }

    pub fn tick(&mut self) {
        self.check_timeouts();
        if is(Bug::IgnoreTimeout) {
            return;
        }
        let modes = self.path.modes.now();
        let now = Duration::from_micros(self.now);
        let expired: Vec<_> = self
            .path
            .peers
            .iter()
            .filter_map(|(index, peer)| Some((Slot::new(*index)?, peer)))
            .filter(|(slot, peer)| peer.silence.expired(now, DEFAULT, modes.is_last(*slot)))
            .map(|(slot, _)| slot)
            .collect();
        for slot in expired {
            self.fault(Slots::of(slot), "r/w timeout");
            self.give_up(slot);
        }
    }

    /// The user asks for something, perhaps.
    pub fn wish(&mut self) {
        if !self.busy || self.client.wishes.len() >= self.weather.depth || self.path.size == 0 {
            return;
        }
        for _ in 0..self.random.usize(1..4) {
            let sectors = (self.path.size / SECTOR) as usize;
            // Some places are more popular, so that requests meet.
            let popular = self.random.bool();
            let first = self.random.usize(0..if popular { 3 * SECTORS } else { sectors });
            let count = match self.random.u32(0..8) {
                0..=2 => SECTORS,
                3 | 4 => 3 * SECTORS,
                _ => self.random.usize(1..2 * SECTORS),
            };
            let first = if self.random.bool() { first / SECTORS * SECTORS } else { first };
            let count = count.min(sectors - first);
            let kind = match self.random.u32(0..20) {
                0..=8 => Kind::Write,
                9 => Kind::Unmap,
                _ => Kind::Read,
            };
            self.ask(kind, first, count);
        }
    }

    pub fn ask(&mut self, kind: Kind, first: usize, count: usize) {
        let id = self.client.begin(kind, first, count, self.now);
        let task = Task {
            kind,
            offset: first as u64 * SECTOR,
            length: count as u64 * SECTOR,
            value: self.client.wishes[&id].value,
            phase: Phase::Waiting,
            locked: false,
            met: BTreeSet::new(),
            patients: Vec::new(),
            rounds: 0,
            first: None,
            widened: false,
        };
        self.path.tasks.insert(id, task);
        self.begin(id);
    }

    /// Sends what may be sent; what may not waits for its turn.
    fn begin(&mut self, id: u64) {
        let paused = self.path.paused;
        let Some(task) = self.path.tasks.get_mut(&id) else { return };
        let changes = task.kind != Kind::Read;
        if paused || changes && !self.path.locks.try_lock(task.offset, task.length) {
            self.path.waiting.push_back(id);
            return;
        }
        task.locked = changes;
        let (kind, offset, length) = (task.kind, task.offset, task.length);
        let range = match kind {
            Kind::Read => io::Kind::Read,
            Kind::Write => io::Kind::Write,
            Kind::Unmap => io::Kind::Unmap,
        };
        if io::check_range(range, offset as i64, length, self.path.size).is_err() {
            return self.end(id, Outcome::Failed, &[], false);
        }
        let modes = self.path.modes.now();
        match kind {
            Kind::Read => self.begin_read(id, modes, vec![(offset, length)], BTreeMap::new()),
            Kind::Write => {
                let wide = modes.is_rebuilding().then(|| Widened::new(offset, length, u64::MAX));
                match wide.flatten() {
                    Some(wide) => {
                        task.widened = true;
                        let pieces = wide.reads().into_iter().flatten().collect();
                        self.begin_read(id, modes, pieces, BTreeMap::new());
                    }
                    None => self.change(id, BTreeMap::new()),
                }
            }
            Kind::Unmap => match io::unmap(modes, self.path.expanding, offset, length) {
                io::Unmap::Send => self.change(id, BTreeMap::new()),
                io::Unmap::Skip => self.end(id, Outcome::Done, &[], false),
                io::Unmap::Refuse(_) => self.end(id, Outcome::NoSpace, &[], false),
            },
        }
    }

    fn begin_read(
        &mut self,
        id: u64,
        modes: Modes,
        mut left: Vec<(u64, u64)>,
        data: BTreeMap<u64, u32>,
    ) {
        let Some(piece) = left.pop() else { return };
        match Read::begin(modes, self.path.preferred, &mut self.path.turn) {
            None => self.end(id, Outcome::Failed, &[], false),
            Some(read) => {
                let slot = read.current();
                if let Some(task) = self.path.tasks.get_mut(&id) {
                    task.phase = Phase::Reading { read, piece, left, data };
                }
                self.send_read(id, slot, piece);
            }
        }
    }

    fn send_read(&mut self, id: u64, slot: Slot, (offset, length): (u64, u64)) {
        let (first, count) = ((offset / SECTOR) as usize, (length / SECTOR) as usize);
        self.send(id, slot, Request::Read { first, count });
    }

    /// Sends a change to everybody; `around` is what was read of the blocks at its edges.
    fn change(&mut self, id: u64, around: BTreeMap<u64, u32>) {
        let again = self.path.tasks.get_mut(&id).and_then(|task| task.first.take());
        let again = again.map(FanOut::again);
        let modes = self.path.modes.now();
        let Some(mut fan_out) = again.or_else(|| FanOut::write(modes)) else {
            return self.end(id, Outcome::Failed, &[], false);
        };
        for gone in fan_out.waiting().without(modes.written()).iter() {
            fan_out.lost(gone);
        }
        let Some(task) = self.path.tasks.get_mut(&id) else { return };
        let (first, count) = ((task.offset / SECTOR) as usize, (task.length / SECTOR) as usize);
        let request = match task.kind {
            Kind::Unmap => Request::Unmap { first, count },
            _ => {
                let own = (first as u64..(first + count) as u64).map(|s| (s, task.value));
                let mut all: BTreeMap<_, _> = own.collect();
                let (start, end) = match around.is_empty() {
                    true => (first as u64, (first + count) as u64),
                    false => {
                        let block = SECTORS as u64;
                        let end = ((first + count) as u64).next_multiple_of(block);
                        (first as u64 / block * block, end)
                    }
                };
                for (sector, value) in around {
                    all.entry(sector).or_insert(value);
                }
                let data = (start..end).filter_map(|s| all.get(&s).copied()).collect();
                Request::Write { first: start as usize, data }
            }
        };
        task.phase = Phase::Changing(fan_out);
        for slot in fan_out.waiting().iter() {
            self.send(id, slot, request.clone());
        }
        if fan_out.is_complete() {
            self.conclude(id, &fan_out, true);
        }
    }

    pub(super) fn send(&mut self, id: u64, slot: Slot, request: Request) {
        self.path.last_message += 1;
        let message = self.path.last_message;
        self.path.messages.insert(message, (id, slot));
        let now = Duration::from_micros(self.now);
        let Some(peer) = self.path.peers.get_mut(&slot.index()) else {
            return self.after(
                1,
                Event::Answer {
                    message,
                    replica: 0,
                    session: self.replicas[0].session,
                    reply: Reply::Failed,
                },
            );
        };
        peer.silence.sent(now);
        let (replica, session, peer) = (peer.replica, peer.session, peer.id);
        let delay = self.latency();
        self.after(delay, Event::Arrive { message, replica, session, peer, request });
    }

    /// An answer of a replica, or what stands for one that will not come.
    pub fn answered(&mut self, message: u64, reply: Reply) {
        let Some((id, slot)) = self.path.messages.remove(&message) else { return };
        let now = Duration::from_micros(self.now);
        if let Some(peer) = self.path.peers.get_mut(&slot.index()) {
            peer.silence.answered(now);
        }
        if id >= HEALINGS {
            return self.answered_healing(id, slot, reply);
        }
        let Some(task) = self.path.tasks.get_mut(&id) else { return };
        if let Reply::Damaged { block } = reply {
            task.met.insert((slot.index(), block));
        }
        match &mut task.phase {
            Phase::Waiting | Phase::Mending { .. } => {}
            Phase::Reading { .. } => self.answered_read(id, reply),
            Phase::Changing(fan_out) => {
                let answer = match reply {
                    Reply::Done | Reply::Data(_) | Reply::Healed(_) => Answer::Done,
                    Reply::NoSpace { written } => Answer::NoSpace { written },
                    Reply::Damaged { .. } => Answer::Damaged,
                    Reply::Failed => Answer::Failed,
                };
                if !fan_out.answer(slot, answer) {
                    return;
                }
                let fan_out = *fan_out;
                let wide = Widened::new(task.offset, task.length, u64::MAX);
                match wide.filter(|_| fan_out.met_damage() && !task.widened) {
                    Some(wide) if !is(Bug::NoWideningForDamage) => {
                        (task.widened, task.first) = (true, Some(fan_out));
                        let pieces = wide.reads().into_iter().flatten().collect();
                        let modes = self.path.modes.now();
                        self.begin_read(id, modes, pieces, BTreeMap::new());
                    }
                    _ => self.conclude(id, &fan_out, answer != Answer::Failed),
                }
            }
        }
    }

    /// Everybody has answered to a change; `part` says that somebody may have done a part of it.
    fn conclude(&mut self, id: u64, fan_out: &FanOut, part: bool) {
        let verdict = fan_out.decide(self.path.modes.now());
        let full = verdict.outcome == Outcome::NoSpace || part;
        if is(Bug::AcknowledgeFirst) && verdict.outcome == Outcome::Done {
            let slots = verdict.faulted.bits();
            self.after(20 * MS, Event::LateFault { slots });
        } else {
            self.taint(verdict.faulted, full);
            if verdict.outcome == Outcome::NoSpace {
                // One may have done what it was asked, and be ahead of those that stay.
                self.excuse(verdict.faulted);
            }
            self.fault(verdict.faulted, "a change failed");
        }
        if verdict.outcome != Outcome::Done {
            self.taint_lost();
        }
        self.end(id, verdict.outcome, &[], true);
    }

    /// It is no wonder if these are blamed.
    fn excuse(&mut self, slots: Slots) {
        for slot in slots.iter() {
            if let Some(peer) = self.path.peers.get(&slot.index()) {
                self.replicas[peer.replica].blemished = true;
            }
        }
    }

    /// A change that nobody has acknowledged may be in replicas that are lost, and not in those that are left: they count
    /// as much then as who has later ones. A count says how many changes there were, not which.
    fn taint_lost(&mut self) {
        let rw = self.path.modes.now().rw;
        for (index, peer) in &self.path.peers {
            if Slot::new(*index).is_some_and(|slot| !rw.contains(slot)) {
                self.replicas[peer.replica].tainted = true;
            }
        }
    }

    /// Full replicas may have written a part, which counters do not tell.
    fn taint(&mut self, slots: Slots, full: bool) {
        for slot in slots.iter().filter(|_| full) {
            if let Some(peer) = self.path.peers.get(&slot.index()) {
                self.replicas[peer.replica].tainted = true;
            }
        }
    }

    fn answered_read(&mut self, id: u64, reply: Reply) {
        let modes = self.path.modes.now();
        let Some(task) = self.path.tasks.get_mut(&id) else { return };
        let Phase::Reading { read, piece, left, data } = &mut task.phase else { return };
        let Reply::Data(values) = reply else {
            let (piece, from) = (*piece, read.current());
            let next = match reply {
                Reply::Damaged { block } => {
                    if let (Kind::Read, Some(peer)) =
                        (task.kind, self.path.peers.get(&from.index()))
                    {
                        task.patients.push((from, peer.id, block));
                    }
                    read.retry_damaged(modes)
                }
                _ => read.retry(modes),
            };
            let faulted = read.faulted();
            match next {
                Some(slot) => self.send_read(id, slot, piece),
                None => self.unread(id, faulted),
            }
            return;
        };
        if let Some(peer) = self.path.peers.get_mut(&read.current().index()) {
            peer.trust.read();
        }
        data.extend((piece.0 / SECTOR..).zip(values));
        let (faulted, left, data) = (read.faulted(), std::mem::take(left), std::mem::take(data));
        let kind = task.kind;
        self.fault(faulted, "a read failed");
        let modes = self.path.modes.now();
        if !left.is_empty() {
            self.begin_read(id, modes, left, data);
        } else if kind == Kind::Read {
            let values: Vec<_> = data.into_values().collect();
            self.end(id, Outcome::Done, &values, false);
        } else {
            self.change(id, data);
        }
    }

    /// No replica could read what was asked for.
    fn unread(&mut self, id: u64, faulted: Slots) {
        self.fault(faulted, "a read failed");
        let Some(task) = self.path.tasks.get_mut(&id) else { return };
        if let Some(fan_out) = task.first.take() {
            // The write itself has gone out before. Another one may have lost what they need only since.
            let met: Slots = task.met.iter().filter_map(|(slot, _)| Slot::new(*slot)).collect();
            self.excuse(met);
            return self.conclude(id, &fan_out, true);
        }
        let patients = std::mem::take(&mut task.patients);
        if patients.is_empty() || task.rounds == ROUNDS_MAX || is(Bug::NeverHeal) {
            return self.end(id, Outcome::Failed, &[], false);
        }
        task.rounds += 1;
        task.phase = Phase::Mending { left: patients.len(), healed: false };
        patients.into_iter().for_each(|patient| self.begin_healing(patient, Some(id)));
    }

    /// One of the blocks that a request waits for is healed, or cannot be.
    pub(super) fn mended(&mut self, id: u64, block_is_well: bool) {
        let Some(task) = self.path.tasks.get_mut(&id) else { return };
        let Phase::Mending { left, healed } = &mut task.phase else { return };
        *left -= 1;
        *healed |= block_is_well;
        if *left > 0 {
            return;
        }
        if !*healed {
            return self.end(id, Outcome::Failed, &[], false);
        }
        task.met.clear();
        let whole = (task.offset, task.length);
        let modes = self.path.modes.now();
        self.begin_read(id, modes, vec![whole], BTreeMap::new());
    }

    /// Answers the user, and lets those begin that waited.
    fn end(&mut self, id: u64, outcome: Outcome, data: &[u32], changed: bool) {
        let Some(task) = self.path.tasks.remove(&id) else { return };
        let excused = self.all_met_damage(&task);
        if task.locked {
            self.path.locks.unlock(task.offset, task.length);
        }
        if !(excused && outcome == Outcome::Failed) {
            self.check_outcome(task.kind, outcome);
        }
        if let Err(what) = self.client.end(id, outcome, data, changed) {
            self.violated(what);
        }
        task.patients.into_iter().for_each(|patient| self.begin_healing(patient, None));
        self.drain();
    }

    /// Whether no complete replica has one of the blocks of a request.
    fn all_met_damage(&self, task: &Task) -> bool {
        let rw = self.path.modes.now().rw;
        let mut blocks = task.met.iter().map(|(_, block)| block);
        blocks.any(|block| rw.iter().all(|slot| task.met.contains(&(slot.index(), *block))))
    }

    /// I/O goes on while one good replica remains.
    fn check_outcome(&mut self, kind: Kind, outcome: Outcome) {
        let rw = self.path.modes.now().rw;
        if outcome == Outcome::Failed && !rw.is_empty() {
            self.violated(format!("a {kind:?} fails though {rw:?} are complete"));
        }
        let full = |slot: Slot| {
            let peer = self.path.peers.get(&slot.index());
            peer.is_some_and(|peer| self.replicas[peer.replica].capacity < usize::MAX)
        };
        if outcome == Outcome::NoSpace && kind == Kind::Write && !rw.iter().all(full) {
            self.violated(format!("no space though some of {rw:?} have some"));
        }
    }

    pub fn drain(&mut self) {
        self.lock_healings();
        for id in std::mem::take(&mut self.path.waiting) {
            self.begin(id);
        }
    }
}
