//! The controller's real data path: its reactors take their turns here, by the simulated clock, and its frontend is the
//! user.

use crate::client::{Kind, Wish};
use crate::replica::SECTORS;
use crate::world::{Event, World};
use dbs_frontend::{Action, Carrier, Carry, Failure, FailureKind, Front, Outcome};
use dbs_reactor::{Clock, Io};
use longhorn_controller::path::sabotage::Bug;
use longhorn_controller::path::simulated::{Lane, Meanwhile, Redial, path};
use longhorn_controller::path::{Attached, Events, Path as Real, PathOptions};
use longhorn_controller::rules::{Mode, Outcome as Decided, ReplicaId};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a sector.
pub const SECTOR: usize = 512;
/// What a replica is blamed for that has what the complete ones have no room for.
const AHEAD: &str = "it has what the complete ones have no room for";
/// What one is blamed for that is damaged all over.
const WORN: &str = "too many of its blocks are damaged";
/// How long damage is remembered that a replica has told of.
const REMEMBERED: u64 = 300_000_000;

thread_local! {
    /// The reactors of this thread's paths.
    static LANES: RefCell<BTreeMap<u64, Vec<Lane>>> = const { RefCell::new(BTreeMap::new()) };
    static LAST: Cell<u64> = const { Cell::new(0) };
    /// The mistake that reactors make.
    pub static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the path says of replicas.
#[derive(Default)]
struct Faults(Mutex<Vec<(ReplicaId, String)>>);

impl Events for Faults {
    fn faulted(&self, replica: ReplicaId, why: &str) {
        lock(&self.0).push((replica, why.to_owned()));
    }
}

type Answers = Arc<Mutex<Vec<(u64, Outcome)>>>;

/// A request of the user.
struct Asked {
    ticket: u64,
    carry: Carry,
    value: u32,
}

/// The user's part on a reactor.
struct Desk {
    answers: Answers,
    stopping: bool,
}

impl Front for Desk {
    fn message(&mut self, io: &mut Io, carrier: &mut dyn Carrier, message: Box<dyn Any + Send>) {
        let Ok(asked) = message.downcast::<Asked>() else { return };
        let Asked { ticket, carry, value } = *asked;
        let payload = matches!(carry.action, Action::Write { .. }).then(|| {
            let mut payload = io.buffers().take(carry.length as usize);
            payload.chunks_exact_mut(SECTOR).for_each(|sector| fill(sector, value));
            payload
        });
        carrier.carry(io, carry, payload, ticket);
    }

    fn answered(&mut self, _: &mut Io, ticket: u64, outcome: Outcome) {
        lock(&self.answers).push((ticket, outcome));
    }

    fn turn(&mut self, _: &mut Io, _: &mut dyn Carrier) {}

    fn stop(&mut self, _: &mut Io, _: bool) {
        self.stopping = true;
    }

    fn is_over(&self) -> bool {
        self.stopping
    }
}

/// Makes a sector what a write of this number makes it.
pub fn fill(sector: &mut [u8], value: u32) {
    sector[..4].copy_from_slice(&value.to_le_bytes());
    sector[SECTOR - 4..].copy_from_slice(&value.to_le_bytes());
}

/// The write that a sector is of; none if it is of two.
pub fn value(sector: &[u8]) -> u32 {
    let at = |range: std::ops::Range<usize>| {
        sector[range].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
    };
    let (first, last) = (at(0..4), at(SECTOR - 4..SECTOR));
    if first == last { first } else { u32::MAX }
}

/// The path of a controller, or of none.
#[derive(Default)]
pub struct Path {
    number: u64,
    pub real: Option<Arc<Real>>,
    user: Option<Attached>,
    /// Whether it is waited for.
    alive: Arc<AtomicBool>,
    faults: Arc<Faults>,
    answers: Answers,
    /// Who wants connections in place of those that broke.
    pub redials: Arc<Mutex<Vec<(u64, Redial)>>>,
    /// When each reactor takes its next turn.
    turns: Vec<u64>,
    /// Until then its process does not run.
    pub stopped_until: u64,
    clock: Clock,
    pub peers: BTreeMap<ReplicaId, usize>,
    pub size: u64,
    pub paused: bool,
    /// When a replica last told of damage in a block.
    met: BTreeMap<(usize, usize), u64>,
}

impl Drop for Path {
    fn drop(&mut self) {
        self.alive.store(false, Ordering::SeqCst);
        self.user = None;
        self.real = None;
        LANES.with_borrow_mut(|all| all.remove(&self.number));
    }
}

impl Path {
    /// The complete replicas.
    pub fn complete(&self) -> impl Iterator<Item = usize> {
        let real = self.real.as_ref();
        let is = move |id| real.and_then(|real| real.mode(id)) == Some(Mode::Rw);
        self.peers.iter().filter(move |(id, _)| is(**id)).map(|(_, replica)| *replica)
    }

    /// Its reactors.
    pub fn lanes(&self) -> usize {
        self.turns.len()
    }

    /// Does something with a reactor.
    pub fn lane<T>(&self, lane: usize, with: impl FnOnce(&mut Lane) -> T) -> Option<T> {
        LANES.with_borrow_mut(|all| all.get_mut(&self.number)?.get_mut(lane).map(with))
    }
}

impl World {
    /// A new controller's path in place of the last one, whose process ends.
    pub fn new_path(&mut self, meanwhile: impl FnOnce(Arc<AtomicBool>) -> Meanwhile) {
        self.links.clear();
        let alive = Arc::new(AtomicBool::new(true));
        let number = LAST.get() + 1;
        LAST.set(number);
        let options = PathOptions {
            reactors: self.random.usize(1..4),
            reactor: dbs_reactor::Options { buffer_bytes: 256 << 10, ..Default::default() },
            connections_per_replica: self.random.usize(1..4),
            queue_depth: self.random.usize(2..20),
            bug: PLANTED.get(),
            ..PathOptions::default()
        };
        let (clock, faults, answers) =
            (Clock::default(), Arc::<Faults>::default(), Answers::default());
        clock.set(self.now);
        let hook = meanwhile(Arc::clone(&alive));
        let (real, lanes) = path(options, 0, Arc::clone(&faults) as _, &clock, hook).unwrap();
        let front = |_, _: &_| {
            let answers = Arc::clone(&answers);
            move |_: &mut Io, _| Box::new(Desk { answers, stopping: false }) as Box<dyn Front>
        };
        let user = Some(real.attach(front).unwrap());
        let turns = vec![u64::MAX; lanes.len()];
        LANES.with_borrow_mut(|all| all.insert(number, lanes));
        self.path = Path {
            number,
            real: Some(real),
            user,
            alive,
            faults,
            answers,
            redials: Arc::default(),
            turns,
            stopped_until: 0,
            clock,
            peers: BTreeMap::new(),
            size: 0,
            paused: false,
            met: BTreeMap::new(),
        };
    }

    /// Sees to it that reactors take a turn that have something to do.
    pub fn wake(&mut self) {
        for lane in 0..self.path.lanes() {
            let clock = self.path.clock.clone();
            let state = self.path.lane(lane, |lane| (lane.is_ready(), lane.due()));
            let Some((ready, due)) = state else { continue };
            let before = self.path.turns[lane];
            let at = match due.map(|due| clock.micros_at(due)) {
                _ if ready && before <= self.now + 20 => continue,
                _ if ready => self.now + self.random.u64(1..20),
                Some(due) => due.max(self.now + 1),
                None => continue,
            };
            let at = at.max(self.path.stopped_until);
            if at < before {
                self.path.turns[lane] = at;
                let path = self.path.number;
                self.after(at - self.now, Event::Turn { path, lane });
            }
        }
    }

    /// A reactor takes a turn.
    pub fn turn(&mut self, path: u64, lane: usize) {
        if path != self.path.number || self.path.turns[lane] != self.now {
            return;
        }
        self.path.turns[lane] = u64::MAX;
        if self.path.stopped_until > self.now {
            return;
        }
        self.path.clock.set(self.now);
        let left = self.path.lane(lane, Lane::turn).unwrap_or_default();
        self.sent(left);
        self.hear_redials();
        self.hear();
        let answers = std::mem::take(&mut *lock(&self.path.answers));
        answers.into_iter().for_each(|(id, outcome)| self.answered(id, outcome));
    }

    /// What the path says of replicas is to have a reason.
    fn hear(&mut self) {
        let faults = std::mem::take(&mut *lock(&self.path.faults.0));
        for (id, why) in faults {
            let Some(replica) = self.path.peers.get(&id).copied() else { continue };
            self.note(format!("r{replica} faulted: {why}"));
            if !self.replicas[replica].blemished && !self.is_excused(replica, &why) {
                self.violated(format!("r{replica} is blamed, which failed nothing: {why}"));
            }
            self.faulted.push((id, why));
        }
    }

    fn is_excused(&self, replica: usize, why: &str) -> bool {
        // It may have done what it was asked, and be ahead of those that stay.
        why == AHEAD && self.weather.full
            || why == WORN && self.replicas[replica].healed > 64
            || why.ends_with("is damaged") && self.others_lost_it(replica)
    }

    /// Whether another replica told of damage in a block that this one told of.
    fn others_lost_it(&self, replica: usize) -> bool {
        let recent = |at: u64| at + REMEMBERED > self.now;
        let met = &self.path.met;
        let own = met.iter().filter(|((its, _), at)| *its == replica && recent(**at));
        let blocks: Vec<_> = own.map(|((_, block), _)| *block).collect();
        let mut others = met.iter().filter(|((its, _), at)| *its != replica && recent(**at));
        others.any(|((_, block), _)| blocks.contains(block))
    }

    /// A replica has told of damage.
    pub fn met_damage(&mut self, replica: usize, block: usize) {
        self.path.met.insert((replica, block), self.now);
    }

    /// The user asks for something, perhaps.
    pub fn wish(&mut self) {
        if !self.busy || self.client.wishes.len() >= self.weather.depth || self.path.size == 0 {
            return;
        }
        for _ in 0..self.random.usize(1..4) {
            let sectors = self.path.size as usize / SECTOR;
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
            let kind = match self.random.u32(0..21) {
                0..=8 => Kind::Write,
                9 => Kind::Unmap,
                20 => Kind::Flush,
                _ => Kind::Read,
            };
            let lane = self.random.usize(0..self.path.lanes());
            self.ask(lane, kind, first, count);
        }
    }

    /// The user asks for something on a reactor.
    pub fn ask(&mut self, lane: usize, kind: Kind, first: usize, count: usize) {
        let (first, count) = if kind == Kind::Flush { (0, 0) } else { (first, count) };
        let ticket = self.client.begin(kind, first, count, self.now);
        let durable = self.random.u32(0..16) == 0;
        let action = match kind {
            Kind::Read => Action::Read,
            Kind::Write => Action::Write { durable },
            Kind::Unmap => Action::Discard,
            Kind::Flush => Action::Flush,
        };
        let (offset, length) = ((first * SECTOR) as u64, (count * SECTOR) as u32);
        let carry = Carry { action, offset, length };
        let value = self.client.wishes[&ticket].value;
        if let Some(user) = &self.path.user {
            user.send(lane, Box::new(Asked { ticket, carry, value }));
        }
    }

    /// A request of the user has an answer.
    fn answered(&mut self, id: u64, outcome: Outcome) {
        let Some(wish) = self.client.wishes.get(&id).cloned() else { return };
        let (decided, data, changed) = match outcome {
            // Replicas free something of each block: so nothing was asked of them.
            Outcome::Done(bytes) => {
                (Decided::Done, Vec::new(), wish.kind == Kind::Write || bytes > 0)
            }
            Outcome::Data(data) => (Decided::Done, sectors(&data), false),
            Outcome::Failed(failure) => (self.failed(&wish, &failure), Vec::new(), false),
        };
        if data.len() != wish.count && wish.kind == Kind::Read && decided == Decided::Done {
            self.violated(format!("{} sectors of {} are read", data.len(), wish.count));
        }
        if let Err(what) = self.client.end(id, decided, &data, changed) {
            self.violated(what);
        }
    }

    /// A request fails: I/O goes on while one good replica remains.
    fn failed(&mut self, wish: &Wish, Failure { kind, text }: &Failure) -> Decided {
        let kind_of = wish.kind;
        if kind_of == Kind::Unmap && text.contains("while expansion is in progress") {
            return Decided::Failed;
        }
        self.note(format!("a {kind_of:?} fails: {text}"));
        let complete: Vec<_> = self.path.complete().collect();
        if matches!(kind_of, Kind::Write | Kind::Unmap) {
            self.taint_lost(&complete);
        }
        if *kind == FailureKind::NoSpace {
            // How much each has written the controller does not know.
            let first = wish.full.values().next();
            if wish.full.values().any(|written| Some(written) != first) {
                self.client.content.distrust(wish);
            }
            let full = |replica: &usize| self.replicas[*replica].capacity < usize::MAX;
            if kind_of == Kind::Write && !complete.iter().all(full) {
                self.violated(format!("no space though some of {complete:?} have some"));
            }
            return Decided::NoSpace;
        }
        if !complete.is_empty() && !self.all_met_damage(wish, &complete) {
            self.violated(format!("a {kind_of:?} fails though {complete:?} are complete: {text}"));
        }
        Decided::Failed
    }

    /// A change that nobody has acknowledged may be in replicas that are lost, and not in those that are left: they count
    /// as much then as who has later ones. A count says how many changes there were, not which.
    fn taint_lost(&mut self, complete: &[usize]) {
        let lost = self.path.peers.values().filter(|replica| !complete.contains(replica));
        lost.for_each(|replica| self.replicas[*replica].tainted = true);
    }

    /// Whether no complete replica has one of the blocks of a request.
    fn all_met_damage(&self, wish: &Wish, complete: &[usize]) -> bool {
        let blocks = wish.first / SECTORS..(wish.first + wish.count).div_ceil(SECTORS);
        let met = |replica: &usize, block: usize| {
            self.path.met.get(&(*replica, block)).is_some_and(|at| *at >= wish.asked)
        };
        blocks.into_iter().any(|block| complete.iter().all(|replica| met(replica, block)))
    }
}

/// The data of a payload.
pub fn sectors(payload: &[u8]) -> Vec<u32> {
    payload.chunks_exact(SECTOR).map(value).collect()
}

/// A payload of these sectors.
pub fn bytes(sectors: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; sectors.len() * SECTOR];
    bytes.chunks_exact_mut(SECTOR).zip(sectors).for_each(|(sector, value)| fill(sector, *value));
    bytes
}
