//! Clock, network, faults, and the machines on it: one thread, everything follows from the seed.

use crate::client::{Client, Content};
use crate::network::Link;
use crate::parts::unreachable;
use crate::path::Path;
use crate::replica::{FULL_TABLE, Replica};
use longhorn_controller::path::simulated::Redial;
use longhorn_controller::rules::ReplicaId;
use longhorn_controller::volume::parts::done;
use longhorn_controller::volume::{Call, CallError, Called, Target};
use longhorn_wire::frame::Header;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A millisecond; times are in microseconds.
pub const MS: u64 = 1000;
/// How long a call may take.
const CALL_LIMIT: u64 = 180_000 * MS;
/// How long a request of the user may take: two replicas that hang one after the other, the second in a flush, a change
/// that waits for one more, and some.
const TIMEOUT: u64 = 200_000 * MS;
/// What others may take for a call that a complete replica has done.
pub const OTHERS: u64 = 16_000 * MS;
/// How long I/O may be paused if a replica answers: the timeout of others, twice.
const HELD: u64 = 2 * OTHERS + 1000 * MS;

/// What happens at a moment.
#[derive(Debug)]
pub enum Event {
    /// What was sent on a connection reaches a replica.
    Up { link: u64 },
    /// A replica carries a request out.
    Serve { link: u64, header: Header, payload: Vec<u8> },
    /// What was sent on a connection reaches the data path.
    Down { link: u64 },
    /// The data path sees that a connection is gone.
    Broken { link: u64 },
    /// The network has taken what was being sent on a connection.
    Taken { link: u64 },
    /// A replica is connected to anew.
    Redial { client: u64, redial: Redial },
    /// A reactor takes a turn.
    Turn { path: u64, lane: usize },
    /// A call reaches a replica.
    Called { number: u64, replica: usize, session: u64, pauses: u64, call: Call },
    /// The answer to a call is there.
    Returned { number: u64, answer: Called },
    /// The user looks at the clock.
    Tick,
    /// The user asks for something.
    Wish,
    /// Something goes wrong.
    Fault,
    /// A replica that ended is started again.
    Restart { replica: usize },
}

/// How much goes wrong, and what.
#[derive(Debug, Clone)]
pub struct Weather {
    /// Milliseconds between faults, on average; none if 0.
    pub faults_ms: u64,
    /// Milliseconds between requests, on average.
    pub wishes_ms: u64,
    /// Most requests at once.
    pub depth: usize,
    /// Whether replicas may be full.
    pub full: bool,
    /// One in so many requests finds that a replica's medium has lost something; none if 0.
    pub rot: u32,
}

pub struct World {
    pub now: u64,
    pub random: fastrand::Rng,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    last_event: u64,
    pub replicas: Vec<Replica>,
    pub path: Path,
    pub links: BTreeMap<u64, Link>,
    pub last_link: u64,
    /// How often replicas were connected to anew.
    pub reconnects: u64,
    /// One replica in so many is older and cannot be; none if 0.
    pub old: u32,
    /// Nobody can be.
    pub dark: bool,
    /// They can be, but connections break again after so long; without having carried anything if that is 0.
    pub frail: Option<u64>,
    /// How long a flush takes.
    pub flushing: u64,
    /// A connection breaks when a replica is to read.
    pub poison: bool,
    pub client: Client,
    pub weather: Weather,
    /// Whether nothing goes wrong for a while.
    pub calm: bool,
    /// Whether the user asks for anything.
    pub busy: bool,
    /// What the volume contained when I/O was paused, and what snapshots therefore contain.
    pub at_pause: Content,
    pub snapshots: BTreeMap<String, (u64, Content)>,
    /// How often I/O was paused.
    pub pauses: u64,
    /// A replica that hangs from the next pause on, until then.
    pub slow_when_paused: Option<(usize, u64)>,
    /// A replica that somebody closes at the next pause.
    pub close_when_paused: Option<usize>,
    /// A replica whose data connections break at the next flush.
    pub cut_when_flushed: Option<usize>,
    pub calls: BTreeMap<u64, Option<Called>>,
    last_call: u64,
    pub names: u64,
    /// Replicas that the data path made `ERR`, to be told.
    pub faulted: Vec<(ReplicaId, String)>,
    /// The first thing that must not be.
    pub violation: Option<String>,
    pub log: Vec<String>,
}

impl World {
    pub fn new(seed: u64, replicas: Vec<Replica>, weather: Weather) -> Self {
        let mut world = Self {
            now: 0,
            random: fastrand::Rng::with_seed(seed),
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            last_event: 0,
            replicas,
            path: Path::default(),
            links: BTreeMap::new(),
            last_link: 0,
            reconnects: 0,
            old: 5,
            dark: false,
            frail: None,
            flushing: 0,
            poison: false,
            client: Client::default(),
            weather,
            calm: false,
            busy: false,
            at_pause: Content::default(),
            snapshots: BTreeMap::new(),
            pauses: 0,
            slow_when_paused: None,
            close_when_paused: None,
            cut_when_flushed: None,
            calls: BTreeMap::new(),
            last_call: 0,
            names: 0,
            faulted: Vec::new(),
            violation: None,
            log: Vec::new(),
        };
        world.after(1, Event::Tick);
        world.after(1, Event::Wish);
        if world.weather.faults_ms > 0 {
            world.after(MS, Event::Fault);
        }
        world
    }

    /// Something that must not be.
    pub fn violated(&mut self, what: String) {
        self.note(format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    pub fn note(&mut self, what: String) {
        // The last of it is enough to see what led to a failure.
        if self.log.len() > 4000 {
            self.log.drain(..2000);
        }
        self.log.push(format!("{:>9.3} {what}", self.now as f64 / 1000.0));
    }

    pub fn after(&mut self, delay: u64, event: Event) {
        self.last_event += 1;
        self.queue.push(Reverse((self.now + delay, self.last_event)));
        self.events.insert(self.last_event, event);
    }

    /// A way through the network.
    pub fn latency(&mut self) -> u64 {
        match self.random.u32(0..40) {
            0 => self.random.u64(5 * MS..60 * MS),
            1..=5 => self.random.u64(MS..6 * MS),
            _ => self.random.u64(50..900),
        }
    }

    /// Lets the next thing happen that does before `limit`; without one it becomes `limit`.
    pub fn step(&mut self, limit: u64) -> bool {
        match self.queue.peek() {
            Some(Reverse((at, _))) if *at <= limit => {}
            _ => {
                self.now = self.now.max(limit);
                return false;
            }
        }
        let Some(Reverse((at, number))) = self.queue.pop() else { return false };
        self.now = self.now.max(at);
        if let Some(event) = self.events.remove(&number) {
            self.happen(event);
        }
        true
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Up { link } => self.up(link),
            Event::Serve { link, header, payload } => self.serve(link, header, payload),
            Event::Down { link } => self.down(link),
            Event::Broken { link } => self.broken(link),
            Event::Taken { link } => self.taken(link),
            Event::Redial { client, redial } => self.redial(client, redial),
            Event::Turn { path, lane } => self.turn(path, lane),
            Event::Called { number, replica, session, pauses, call } => {
                self.called(number, replica, session, pauses, &call);
            }
            Event::Returned { number, answer } => {
                if let Some(place) = self.calls.get_mut(&number) {
                    place.get_or_insert(answer);
                }
            }
            Event::Tick => {
                self.check_timeouts();
                self.after(1000 * MS, Event::Tick);
            }
            Event::Wish => {
                self.rot_somewhere();
                self.wish();
                let mean = self.weather.wishes_ms * MS;
                let pause = self.random.u64(0..2 * mean + 1);
                self.after(pause, Event::Wish);
            }
            Event::Fault => {
                if !self.calm {
                    self.fault_somewhere();
                }
                let pause = self.random.u64(MS..2 * self.weather.faults_ms * MS);
                self.after(pause, Event::Fault);
            }
            Event::Restart { replica } => {
                self.replicas[replica].alive = true;
                self.note(format!("r{replica} restarted"));
            }
        }
    }

    /// A block of a replica rots, or all of them.
    fn rot_somewhere(&mut self) {
        if self.calm || self.weather.rot == 0 || self.random.u32(0..self.weather.rot) > 0 {
            return;
        }
        let replica = self.random.usize(0..self.replicas.len());
        let its = &mut self.replicas[replica];
        let first = self.random.usize(0..its.size.max(1));
        let count = if self.random.u32(0..12) == 0 { its.size } else { 1 };
        (first..(first + count).min(its.size)).for_each(|block| its.rot(block));
        self.note(format!("r{replica}: {count} blocks from {first} on rot"));
    }

    /// How long a replica hangs.
    fn stall(&mut self) -> u64 {
        match self.random.u32(0..20) {
            // Longer than anybody may wait for it.
            0 => self.random.u64(210_000 * MS..400_000 * MS),
            1..=6 => self.random.u64(10 * MS..4000 * MS),
            _ => self.random.u64(4000 * MS..40_000 * MS),
        }
    }

    /// Now and then a replica hangs while nothing is in flight that would tell.
    pub fn hang_somewhere(&mut self) {
        if let Some((replica, until)) = self.slow_when_paused.take() {
            self.replicas[replica].stalled_until = until;
            self.replicas[replica].blemished = true;
        }
        if let Some(replica) = self.close_when_paused.take() {
            self.replicas[replica].open = false;
            self.replicas[replica].blemished = true;
        }
        if self.weather.faults_ms == 0 || self.calm || self.random.u32(0..8) > 0 {
            return;
        }
        let replica = self.random.usize(0..self.replicas.len());
        let stall = self.stall();
        let its = &mut self.replicas[replica];
        its.stalled_until = its.stalled_until.max(self.now + stall);
        its.blemished = true;
        self.note(format!("r{replica} hangs amid a pause, stall {stall}"));
    }

    fn fault_somewhere(&mut self) {
        let replica = self.random.usize(0..self.replicas.len());
        let kind = self.random.u32(0..19);
        let stall = self.stall();
        let room = self.random.usize(0..4);
        let count = self.random.u32(1..3);
        let now = self.now;
        let its = &mut self.replicas[replica];
        match kind {
            0 | 1 => {
                if its.alive {
                    self.crash(replica);
                }
                return;
            }
            2 | 3 => {
                its.stalled_until = its.stalled_until.max(now + stall);
                its.blemished = true;
            }
            4..=6 => its.failing += count,
            7 | 8 => its.failing_calls += 1,
            12 | 13 | 15..=18 => return self.cut(replica),
            14 => return self.stop_controller(),
            _ if self.weather.full => {
                let everybody = self.random.bool();
                for (index, its) in self.replicas.iter_mut().enumerate() {
                    if everybody || index == replica {
                        its.capacity = its.used() + room + self.random.usize(0..2);
                    }
                }
            }
            _ => return,
        }
        self.note(format!("fault {kind} at r{replica}, stall {stall}, room {room}"));
    }

    /// One connection to a replica breaks, or all do.
    fn cut(&mut self, replica: usize) {
        let count = self.replicas.len();
        let mut others = (0..count).map(|step| (replica + step) % count);
        let connected = others.find(|replica| !self.links_to(*replica).is_empty());
        let Some(replica) = connected else { return };
        let mut links = self.links_to(replica);
        if self.random.bool() {
            links.truncate(1);
        }
        // The loss of a connection alone costs no replica that can be connected to anew.
        self.replicas[replica].blemished |= !links.iter().all(|link| self.is_renewed(*link));
        self.note(format!("connections {links:?} to r{replica} break"));
        let delay = if self.random.bool() { 50 * MS } else { 500 };
        let delay = self.random.u64(1..delay);
        links.into_iter().for_each(|link| self.break_link(link, delay));
    }

    /// The controller's reactors do not run for a while, for which no replica is to blame, nor is the path.
    fn stop_controller(&mut self) {
        let long = self.random.u32(0..4) == 0;
        let time = self.random.u64(MS..if long { 60_000 * MS } else { 1500 * MS });
        let last = self.path.stopped_until;
        if last > 0 && last + 60_000 * MS > self.now {
            return;
        }
        self.note(format!("the controller stops for {time}"));
        self.path.stopped_until = self.now + time;
        let until = self.path.stopped_until;
        self.client.wishes.values_mut().for_each(|wish| wish.since = wish.since.max(until));
    }

    /// A replica's process ends; it is started again some time later.
    pub fn crash(&mut self, replica: usize) {
        let links = self.links_to(replica);
        let its = &mut self.replicas[replica];
        its.stop();
        its.blemished = true;
        let cut_off = its.stalled_until.saturating_sub(self.now);
        self.note(format!("r{replica} crashed"));
        links.into_iter().for_each(|link| self.break_link(link, MS + cut_off));
        let pause = self.random.u64(10 * MS..3000 * MS);
        self.after(pause, Event::Restart { replica });
    }

    /// Puts a call on its way; answers with its number.
    pub fn send_call(&mut self, address: &str, call: Call) -> u64 {
        self.last_call += 1;
        let number = self.last_call;
        self.calls.insert(number, None);
        let delay = self.latency();
        match self.replica_at(address) {
            Some(replica) => {
                let session = self.replicas[replica].session;
                let pauses = self.pauses;
                self.after(delay, Event::Called { number, replica, session, pauses, call });
            }
            None => {
                let answer = Err(unreachable("unknown"));
                self.after(delay, Event::Returned { number, answer });
            }
        }
        let answer = Err(CallError::unknown("Timeout expired"));
        self.after(CALL_LIMIT, Event::Returned { number, answer });
        number
    }

    fn called(&mut self, number: u64, replica: usize, session: u64, pauses: u64, call: &Call) {
        let its = &mut self.replicas[replica];
        let there = its.alive && its.session == session;
        if let Some(wait) = its.stalled_until.checked_sub(self.now + 1)
            && there
        {
            let call = call.clone();
            self.after(wait + 1, Event::Called { number, replica, session, pauses, call });
            return;
        }
        let answer = match there {
            false if !its.alive => Err(CallError::never_sent("connection refused")),
            false => Err(unreachable("connection reset")),
            true if its.unsent.is_some_and(|name| format!("{call:?}").starts_with(name)) => {
                its.unsent = None;
                Err(CallError::never_sent("no descriptor is left"))
            }
            true => {
                let answer = its.call(call, self.now).and_then(|replica| {
                    done(call.needs_open(), replica).map_err(|error| error.text)
                });
                let expanded = format!("volume-snap-expand-{}.img", its.sectors() * 512);
                let taken = match (call, &answer) {
                    (Call::Snapshot { name, .. }, Ok(_)) => Some(format!("volume-snap-{name}.img")),
                    (Call::Expand(_), Ok(_)) => Some(expanded),
                    _ => None,
                };
                // A name may have meant another snapshot, which only replicas had that are gone.
                if let Some(disk) = taken
                    && pauses == self.pauses
                    && self.snapshots.get(&disk).is_none_or(|(before, _)| *before < pauses)
                {
                    self.snapshots.insert(disk, (pauses, self.at_pause.clone()));
                }
                answer.map_err(|text| {
                    let refused = text.ends_with(FULL_TABLE);
                    CallError { refused, ..CallError::unknown(text) }
                })
            }
        };
        if !matches!(call, Call::Get) {
            let result = answer.as_ref().map(|_| ()).map_err(|error| &error.text);
            let text = format!("r{replica} {call:?}: {result:?}");
            self.note(text);
        }
        let opening =
            if matches!(call, Call::Open { .. }) { self.replicas[replica].opening } else { 0 };
        let delay = self.latency() + opening;
        self.after(delay, Event::Returned { number, answer });
    }

    /// The replica with this address.
    pub fn replica_at(&self, address: &str) -> Option<usize> {
        let number = address.strip_prefix("tcp://r")?.split(':').next()?.parse().ok()?;
        (number < self.replicas.len()).then_some(number)
    }

    /// A complete replica is given up for its silence only if another one has done what all were asked,
    /// or others have failed and it had long enough to be the last good one.
    pub fn check_given_up(
        &mut self,
        calls: &[(Target, Call)],
        answers: &[Option<Called>],
        begun: u64,
        before: &[usize],
    ) {
        let together = matches!(
            calls.first(),
            Some((_, Call::Snapshot { .. } | Call::Expand(_) | Call::Revert { .. }))
        );
        let of = |target: &Target, those: &[usize]| {
            self.replica_at(&target.address).filter(|replica| those.contains(replica))
        };
        let said = |what: fn(&Called) -> bool| {
            calls.iter().zip(answers).any(|((target, _), answer)| {
                of(target, before).is_some() && answer.as_ref().is_some_and(what)
            })
        };
        let long = self.now - begun >= 2 * OTHERS;
        if !together || said(Called::is_ok) || said(Called::is_err) && long {
            return;
        }
        let now: Vec<_> = self.path.complete().collect();
        let mut silent = calls.iter().zip(answers).filter(|(_, answer)| answer.is_none());
        let lost = silent.find_map(|((target, _), _)| of(target, &now));
        if let Some(lost) = lost {
            self.violated(format!("r{lost} is given up, and no complete replica has done it"));
        }
    }

    /// Whether a request of the user waits for longer than it may; not while I/O is paused, which may
    /// take as long as nobody answers.
    pub fn check_timeouts(&mut self) {
        if self.path.paused {
            return;
        }
        let late = self.client.wishes.iter().find(|(_, wish)| self.now > wish.since + TIMEOUT);
        if let Some((id, wish)) = late {
            let text = format!("request {id} {:?} is not answered since {}", wish.kind, wish.since);
            self.violated(text);
        }
    }
}

impl World {
    /// I/O goes on. It was not kept long if a replica was well all the time.
    pub fn release(&mut self, since: u64) {
        self.path.paused = false;
        let well = self.path.complete().find(|replica| !self.replicas[*replica].blemished);
        if let Some(well) = well
            && self.now - since > HELD
        {
            self.violated(format!("I/O was paused since {since}, though r{well} was well"));
        }
        let now = self.now;
        self.client.wishes.values_mut().for_each(|wish| wish.since = wish.since.max(now));
    }
}

/// The address of a replica.
pub fn address(replica: usize) -> String {
    format!("tcp://r{replica}:9502")
}
