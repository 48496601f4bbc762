//! What all threads know of a client: the process of a virtual machine, connected to the socket of a volume.

use super::disk::QUEUES_MAX;
use super::message::config_changed;
use super::request::{Ask, ID_BYTES};
use dbs_frontend::{Counted, Counts, Opened, lock};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// A client.
pub struct Client {
    /// Its number, which no other client of the store's server has.
    pub id: u64,
    /// Who it is.
    pub who: String,
    /// What it uses.
    pub opened: Opened,
    /// Its connection is at an end: long requests end where they are.
    pub ended: Arc<AtomicBool>,
    /// What its guest is told that the disk is called.
    name: [u8; ID_BYTES],
    since_ns: u64,
    /// Of each queue.
    counts: Vec<Counts>,
    socket: UnixStream,
    /// Where it is told of changes, and the size that it knows of.
    channel: Mutex<Option<UnixStream>>,
    size: AtomicU64,
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

impl Client {
    /// One that has come through `socket`; its guest sees the first characters of the uuid as the name of the disk.
    pub fn new((id, who): (u64, String), opened: Opened, socket: UnixStream) -> Self {
        let mut name = [0; ID_BYTES];
        let digits = opened.uuid.bytes().filter(|byte| *byte != b'-');
        name.iter_mut().zip(digits).for_each(|(place, digit)| *place = digit);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let counts = (0..QUEUES_MAX).map(|_| Counts::default()).collect();
        let (channel, size) = (Mutex::default(), AtomicU64::new(opened.disk.size()));
        let ended = Arc::default();
        Self { id, who, opened, ended, name, since_ns, counts, socket, channel, size }
    }

    /// What its guest is told that the disk is called.
    pub fn name(&self) -> [u8; ID_BYTES] {
        self.name
    }

    /// Counts a request of one of its queues, on the thread that serves the queue.
    pub fn count(&self, queue: u16, ask: &Ask) {
        let Some(counts) = self.counts.get(usize::from(queue)) else { return };
        match *ask {
            Ask::Read(_, length) => counts.read(length),
            Ask::Write(_, length) | Ask::Zeroes(_, length, _) => counts.write(length),
            _ => counts.other(),
        }
    }

    /// What others are told of it.
    pub fn info(&self) -> ClientInfo {
        let mut counted = Counted::default();
        self.counts.iter().for_each(|counts| counted += counts.get());
        let Self { id, since_ns, .. } = *self;
        let read_only = self.opened.read_only;
        ClientInfo { id, who: self.who.clone(), read_only, since_ns, counted }
    }

    /// It is to be told of changes here.
    pub fn listens(&self, channel: Option<UnixStream>) {
        *lock(&self.channel) = channel;
        self.follow();
    }

    /// Its guest was there before this connection, and knows a size that is not known here.
    pub fn comes_again(&self) {
        self.size.store(u64::MAX, Ordering::Relaxed);
        self.follow();
    }

    /// Tells it of the size of its disk if that has changed.
    pub fn follow(&self) {
        let size = self.opened.disk.size();
        // Who does not listen yet is told when it does.
        if let Some(channel) = &*lock(&self.channel)
            && self.size.swap(size, Ordering::Relaxed) != size
        {
            // Who does not read it learns of it when it connects again.
            let _ = config_changed(channel);
        }
    }

    /// Ends its connection; what is under way ends first, but long requests, for which its queues may be waiting already.
    pub fn end(&self) {
        // Before requests are dropped: the peer is not to hear that they are done. Fails only where the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.ended.store(true, Ordering::Relaxed);
    }
}
