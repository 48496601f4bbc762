//! A controller: the association of a host with one subsystem, which its queues share on all reactors.

use super::command::Status;
use super::identify::{
    ACCESS_EVENTS, DISCOVERY_EVENTS, DISCOVERY_NQN, EVENTS_MAX, NAMESPACE_EVENTS, UUID_NQN,
};
use super::registers::{Begins, Registers};
use dbs_frontend::{Counted, Counts, Opened, lock};
use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// I/O queues of a controller at most, however many reactors there are.
pub const QUEUES_MAX: u16 = 64;
/// Seconds that a host may be late with keeping its controller alive.
const LATE_MAX: u32 = 2;

/// How long who only looks what there is may be silent: there is no disk that would have to last longer.
const DISCOVERY_SILENT_MS: u32 = 120_000;

/// What the reactors are to do for a controller, by its number among clients.
#[derive(Debug, Clone, Copy)]
pub enum Notice {
    /// All its queues end at once.
    End(u64),
    /// Its I/O queues do.
    EndQueues(u64),
    /// Something has changed that its host may want to know.
    Changed(u64),
}

/// Tells all reactors.
pub type Tell = Arc<dyn Fn(Notice) + Send + Sync>;

/// A host, as it says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: [u8; 16],
}

/// A volume or snapshot that a host uses.
pub struct Disk {
    /// What it uses, after whose uuid the subsystem is called.
    pub opened: Arc<Opened>,
    /// The host may have several controllers of it, each a path, of which it may use one at a time.
    pub paths: bool,
    /// I/O queues that the host may have: more than there are reactors to serve them are of no use.
    pub queues_max: u16,
}

/// What a controller shows.
pub enum Shows {
    /// A volume or snapshot, as a namespace.
    Disk(Disk),
    /// Which subsystems there are, and at which address.
    Discovery(SocketAddr),
}

/// What has changed that a host may want to know.
#[derive(Debug, Clone, Copy)]
pub enum Changed {
    /// What it is shown: the size of its disk, or for discovery which subsystems there are.
    Shown = 0,
    /// Whether it may use its disk on this path.
    Access = 1,
}

/// A controller.
pub struct Controller {
    /// Its number among all clients of the store.
    pub id: u64,
    /// Its number among controllers, which no other has at a time.
    pub number: u16,
    /// Its host.
    pub host: Host,
    /// Who that is, for people.
    pub who: String,
    /// Where the host connects from.
    pub address: String,
    /// Where it has connected to.
    pub at: SocketAddr,
    /// What it shows.
    pub shows: Shows,
    since_ns: u64,
    state: Mutex<State>,
    ended: AtomicBool,
    /// A command has come or was answered since the clock looked last.
    heard: AtomicBool,
    /// Seconds of silence that are allowed; 0 if all are.
    keep_alive: AtomicU32,
    silent: AtomicU32,
    /// The size that the host was told of last.
    size: AtomicU64,
    /// Its host may use the disk: of several paths, one is so at a time.
    accessible: AtomicBool,
    counts: Vec<Counts>,
    tell: Tell,
}

#[derive(Default)]
struct State {
    registers: Registers,
    /// Queues that are connected; 0 is the admin queue.
    queues: BTreeSet<u16>,
    /// An I/O queue was lost: the others end, and none is connected before that.
    lost: bool,
    events: Events,
    /// What discovery shows, since its beginning was read last.
    found: (u64, Arc<Vec<String>>),
}

/// Events that the host is to be told of.
#[derive(Default)]
struct Events {
    /// Commands that wait for one.
    waiting: VecDeque<u16>,
    /// Which the host wants.
    wanted: u32,
    /// By [`Changed`].
    news: [News; 2],
}

/// Changes of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct News {
    /// Something has changed that the host was not told of.
    changed: bool,
    /// The host was told, and has not looked yet.
    told: bool,
    /// What the log of changes is to show.
    logged: bool,
    /// How often something has changed.
    count: u64,
}

/// A client, and what it has asked for since it connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientInfo {
    /// Its number.
    pub id: u64,
    /// Who it is, for people.
    pub who: String,
    /// Whether it may only read.
    pub read_only: bool,
    /// When it connected, nanoseconds since the Unix epoch.
    pub since_ns: u64,
    /// What it has asked for.
    pub counted: Counted,
}

impl Controller {
    /// One with its admin queue connected, to be kept alive once in so many milliseconds.
    pub fn new(
        (id, number): (u64, u16),
        host: Host,
        (who, address, at): (String, String, SocketAddr),
        (shows, accessible): (Shows, bool),
        keep_alive_ms: u32,
        tell: Tell,
    ) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let size = match &shows {
            Shows::Disk(disk) => disk.opened.disk.size(),
            Shows::Discovery(_) => 0,
        };
        let state = State { queues: BTreeSet::from([0]), ..State::default() };
        let this = Self {
            id,
            number,
            host,
            who,
            address,
            at,
            shows,
            since_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
            state: Mutex::new(state),
            ended: AtomicBool::new(false),
            heard: AtomicBool::new(true),
            keep_alive: AtomicU32::new(0),
            silent: AtomicU32::new(0),
            size: AtomicU64::new(size),
            accessible: AtomicBool::new(accessible),
            counts: (0..=QUEUES_MAX).map(|_| Counts::default()).collect(),
            tell,
        };
        this.set_keep_alive(keep_alive_ms);
        this
    }

    /// The disk that it shows.
    pub fn disk(&self) -> Option<&Disk> {
        match &self.shows {
            Shows::Disk(disk) => Some(disk),
            Shows::Discovery(_) => None,
        }
    }

    /// The name of its subsystem.
    pub fn subsystem(&self) -> String {
        let named = |disk: &Disk| format!("{UUID_NQN}{}", disk.opened.uuid);
        self.disk().map_or_else(|| DISCOVERY_NQN.to_owned(), named)
    }

    /// Whether nothing of it is begun any more.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Ends all its connections; what is under way ends first.
    pub fn end(&self) {
        if !self.ended.swap(true, Ordering::SeqCst) {
            (self.tell)(Notice::End(self.id));
        }
    }

    /// Ends it if it is silent for too long: to be called once a second.
    pub fn strike(&self) -> bool {
        let allowed = self.keep_alive.load(Ordering::Relaxed);
        if self.heard.swap(false, Ordering::Relaxed) || allowed == 0 {
            self.silent.store(0, Ordering::Relaxed);
            return false;
        }
        // Counted, not measured: a server that was stopped for a while has not listened.
        let dead = self.silent.fetch_add(1, Ordering::Relaxed) >= allowed.saturating_add(LATE_MAX);
        dead && !self.has_ended()
    }

    /// A command has come, or is answered.
    pub fn heard(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// How many milliseconds the host may be silent.
    pub fn keep_alive_ms(&self) -> u32 {
        self.keep_alive.load(Ordering::Relaxed).saturating_mul(1000)
    }

    /// The host may be silent for so many milliseconds; with 0 for ever, if it has a disk.
    pub fn set_keep_alive(&self, milliseconds: u32) {
        let ever = milliseconds == 0 && self.disk().is_none();
        let milliseconds = if ever { DISCOVERY_SILENT_MS } else { milliseconds };
        self.keep_alive.store(milliseconds.div_ceil(1000), Ordering::Relaxed);
    }

    /// An I/O queue is lost: all end. The host may ask for the same again, and then for newer things, but not before
    /// nothing is left of them. The admin queue stays: a host that disconnects ends its I/O queues first.
    pub fn lose_queues(&self) {
        if !std::mem::replace(&mut lock(&self.state).lost, true) {
            (self.tell)(Notice::EndQueues(self.id));
        }
    }

    /// Whether its I/O queues end.
    pub fn has_lost(&self) -> bool {
        lock(&self.state).lost
    }

    /// An I/O queue is connected.
    ///
    /// # Errors
    /// It cannot be.
    pub fn join(&self, queue: u16) -> Result<(), Status> {
        let state = &mut *lock(&self.state);
        // A host that is told not to retry gives its disk up: what passes must not say so.
        if self.has_ended() || !state.queues.contains(&0) {
            return Err(Status::CONNECT_BUSY);
        }
        if !state.registers.is_ready() {
            return Err(Status::SEQUENCE);
        }
        if state.lost && state.queues.len() > 1 {
            return Err(Status::CONNECT_BUSY);
        }
        if !state.queues.insert(queue) {
            return Err(Status::SEQUENCE);
        }
        state.lost = false;
        Ok(())
    }

    /// A queue is gone; whether it was the last.
    pub fn leave(&self, queue: u16) -> bool {
        let mut state = lock(&self.state);
        state.queues.remove(&queue);
        state.queues.is_empty()
    }

    /// A property, if there is one.
    pub fn property(&self, offset: u32, bytes: u8) -> Option<u64> {
        lock(&self.state).registers.get(offset, bytes)
    }

    /// Sets a property, if there is one that can be set.
    pub fn set_property(&self, offset: u32, bytes: u8, value: u64) -> Option<Begins> {
        let mut state = lock(&self.state);
        let begins = state.registers.set(offset, bytes, value)?;
        if begins == Begins::Reset {
            let news =
                state.events.news.map(|News { count, .. }| News { count, ..News::default() });
            state.events = Events { news, ..Events::default() };
        }
        Some(begins)
    }

    /// What it has done is durable; or cannot be made so.
    pub fn shut_down(&self, durable: bool) {
        lock(&self.state).registers.shut_down(durable);
    }

    /// Whether the host has enabled it.
    pub fn is_ready(&self) -> bool {
        lock(&self.state).registers.is_ready()
    }

    /// Something has changed.
    pub fn changed(&self, what: Changed) {
        let mut state = lock(&self.state);
        let news = &mut state.events.news[what as usize];
        (news.changed, news.logged, news.count) = (true, true, news.count + 1);
        drop(state);
        (self.tell)(Notice::Changed(self.id));
    }

    /// Whether the host may use the disk on this path.
    pub fn is_accessible(&self) -> bool {
        self.accessible.load(Ordering::SeqCst)
    }

    /// The host may use the disk on this path from now on, as nothing is left of the one that it had.
    pub fn take_over(&self) {
        self.accessible.store(true, Ordering::SeqCst);
        self.changed(Changed::Access);
    }

    /// How often it has changed whether the host may use the disk on this path, and whether it may.
    pub fn access(&self) -> (u64, bool) {
        // The count first: a change in between is told of again.
        let count = lock(&self.state).events.news[Changed::Access as usize].count;
        (count, self.is_accessible())
    }

    /// Tells the host of the size of its disk if that has changed.
    pub fn follow(&self) {
        if let Some(disk) = self.disk() {
            let size = disk.opened.disk.size();
            if self.size.swap(size, Ordering::Relaxed) != size {
                self.changed(Changed::Shown);
            }
        }
    }

    /// A command waits for an event.
    ///
    /// # Errors
    /// As many wait as may.
    pub fn wait_for_event(&self, command: u16) -> Result<(), Status> {
        let waiting = &mut lock(&self.state).events.waiting;
        if waiting.len() >= EVENTS_MAX {
            return Err(Status::EVENTS_EXCEEDED);
        }
        waiting.push_back(command);
        Ok(())
    }

    /// The command that is to tell of an event now, and what it says.
    pub fn event(&self) -> Option<(u16, u32)> {
        // A notice: what has changed, and the log that tells more.
        let shown = match self.shows {
            Shows::Disk(_) => (NAMESPACE_EVENTS, 0x04_00_02),
            Shows::Discovery(_) => (DISCOVERY_EVENTS, 0x70_f0_02),
        };
        let Events { waiting, wanted, news } = &mut lock(&self.state).events;
        let mut all = news.iter_mut().zip([shown, (ACCESS_EVENTS, 0x0c_03_02)]);
        let (news, (_, event)) =
            all.find(|(news, (mask, _))| news.changed && !news.told && *wanted & mask != 0)?;
        let command = waiting.pop_front()?;
        (news.changed, news.told) = (false, true);
        Some((command, event))
    }

    /// Which events the host wants.
    pub fn wanted(&self) -> u32 {
        lock(&self.state).events.wanted
    }

    /// The host wants these events.
    pub fn want(&self, events: u32) {
        lock(&self.state).events.wanted = events;
    }

    /// What the log of changes shows; if `seen`, the host has looked, and may be told again.
    pub fn changes(&self, what: Changed, seen: bool) -> bool {
        let news = &mut lock(&self.state).events.news[what as usize];
        let logged = news.logged;
        if seen {
            (news.logged, news.told) = (false, false);
        }
        logged
    }

    /// What discovery shows: as it is now where its beginning is read, else as it was then.
    pub fn found(&self, now: Option<(u64, Vec<String>)>) -> (u64, Arc<Vec<String>>) {
        let found = &mut lock(&self.state).found;
        if let Some((generation, subsystems)) = now {
            *found = (generation, Arc::new(subsystems));
        }
        found.clone()
    }

    /// The counts of one of its queues, for the thread that serves it.
    pub fn counts(&self, queue: u16) -> Option<&Counts> {
        self.counts.get(usize::from(queue))
    }

    /// What others are told of it, if it uses a disk.
    pub fn info(&self) -> Option<ClientInfo> {
        let read_only = self.disk()?.opened.read_only;
        let mut counted = Counted::default();
        self.counts.iter().for_each(|counts| counted += counts.get());
        let Self { id, since_ns, .. } = *self;
        Some(ClientInfo { id, who: self.who.clone(), read_only, since_ns, counted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn discovery(keep_alive_ms: u32) -> Controller {
        let host = Host { name: "nqn.2014-08.org.nvmexpress:uuid:x".to_owned(), id: [1; 16] };
        let at = ([127, 0, 0, 1], 4420).into();
        let names = ("host".to_owned(), "tcp:127.0.0.1:1".to_owned(), at);
        let shows = (Shows::Discovery(at), true);
        Controller::new((1, 1), host, names, shows, keep_alive_ms, Arc::new(|_| {}))
    }

    #[test]
    fn a_silent_host_is_given_up_after_its_time_and_a_little_more() {
        let controller = discovery(2500);
        // The first was heard when it connected.
        assert!((0..6).all(|_| !controller.strike()));
        controller.heard();
        assert!((0..6).all(|_| !controller.strike()));
        assert!(controller.strike());
        // Who only looks has not for ever.
        let silent = discovery(0);
        assert!((0..123).all(|_| !silent.strike()));
        assert!(silent.strike());
    }

    #[test]
    fn a_queue_that_may_not_join_may_retry_if_that_passes() {
        let controller = discovery(0);
        assert_eq!(controller.join(1), Err(Status::SEQUENCE), "it is not enabled");
        controller.set_property(0x14, 4, 0x0046_0001).unwrap();
        assert_eq!(controller.join(1), Ok(()));
        assert_eq!(controller.join(1), Err(Status::SEQUENCE), "it is connected");
        controller.lose_queues();
        assert_eq!(controller.join(2), Err(Status::CONNECT_BUSY), "one is lost and still there");
        assert!(!controller.leave(1));
        assert_eq!(controller.join(2), Ok(()));
        controller.end();
        assert_eq!(controller.join(3), Err(Status::CONNECT_BUSY), "it has ended");
    }

    #[test]
    fn an_event_is_told_once_until_the_host_looks() {
        let controller = discovery(0);
        for command in 0..EVENTS_MAX as u16 {
            controller.wait_for_event(command).unwrap();
        }
        assert_eq!(controller.wait_for_event(9), Err(Status::EVENTS_EXCEEDED));
        controller.changed(Changed::Shown);
        assert_eq!(controller.event(), None, "it is not wanted");
        controller.want(DISCOVERY_EVENTS);
        assert_eq!(controller.event(), Some((0, 0x70_f0_02)));
        controller.changed(Changed::Shown);
        assert_eq!(controller.event(), None, "it was told");
        assert!(controller.changes(Changed::Shown, true));
        assert_eq!(controller.event(), Some((1, 0x70_f0_02)));
    }
}
