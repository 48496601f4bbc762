//! I/O on the volume that knows what it may read: every block says which one it is and which version, and a
//! read may show the last version that was acknowledged, or one of those that failed since.

use crate::lab::SIZE;
use crate::support::{BLOCK, block, eventually, version_of};
use dbs_frontend::Listen;
use longhorn_testing::{ClientError, DataClient};
use longhorn_wire::frame::Type;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const CLIENTS: u64 = 3;
/// Requests of each client in flight, all of different blocks.
const DEPTH: usize = 8;
const BLOCKS: u64 = SIZE / BLOCK as u64;
/// Bytes that a check reads at once.
const PIECE: u32 = 1 << 20;

/// What a block may hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Block {
    /// The last version that was acknowledged; 0 if it was never written.
    acknowledged: u64,
    /// Versions that failed since, or were on their way.
    maybe: Vec<u64>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    done: AtomicU64,
    failed: AtomicU64,
    longest_us: AtomicU64,
    texts: Mutex<BTreeSet<String>>,
}

/// I/O that goes on in the background.
pub struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<Vec<Block>>>,
}

/// What came of it.
pub struct Report {
    blocks: Vec<Block>,
    /// Requests that failed.
    pub failed: u64,
    /// The longest of all.
    pub longest: Duration,
    /// What was said of those that failed.
    pub texts: BTreeSet<String>,
}

impl Load {
    pub fn start(socket: Listen) -> Self {
        let shared = Arc::<Shared>::default();
        let clients = (0..CLIENTS)
            .map(|index| {
                let (first, end) = (index * BLOCKS / CLIENTS, (index + 1) * BLOCKS / CLIENTS);
                let mut client = Client {
                    shared: Arc::clone(&shared),
                    socket: socket.clone(),
                    data: connect(&socket).expect("the volume is there"),
                    first,
                    blocks: vec![Block::default(); (end - first) as usize],
                    version: 0,
                    random: fastrand::Rng::with_seed(index),
                };
                std::thread::spawn(move || client.run())
            })
            .collect();
        let load = Self { shared, clients };
        load.some_more(200);
        load
    }

    /// Waits for so many more requests that succeed.
    pub fn some_more(&self, count: u64) {
        let until = self.shared.done.load(Ordering::SeqCst) + count;
        eventually("I/O goes on", || {
            assert!(!self.clients.iter().any(JoinHandle::is_finished), "a client failed");
            self.shared.done.load(Ordering::SeqCst) >= until
        });
    }

    /// Waits for requests that fail.
    pub fn fails(&self) {
        let until = self.shared.failed.load(Ordering::SeqCst) + 10;
        eventually("I/O fails", || {
            assert!(!self.clients.iter().any(JoinHandle::is_finished), "a client failed");
            self.shared.failed.load(Ordering::SeqCst) >= until
        });
    }

    /// Ends it.
    pub fn finish(mut self) -> Report {
        self.shared.stop.store(true, Ordering::SeqCst);
        let blocks = self.clients.drain(..).flat_map(|client| client.join().unwrap()).collect();
        Report {
            blocks,
            failed: self.shared.failed.load(Ordering::SeqCst),
            longest: Duration::from_micros(self.shared.longest_us.load(Ordering::SeqCst)),
            texts: self.shared.texts.lock().unwrap().clone(),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for client in self.clients.drain(..) {
            // It has said what went wrong.
            let _ = client.join();
        }
    }
}

fn connect(socket: &Listen) -> std::io::Result<DataClient> {
    Ok(DataClient::connect(socket, 2)?.with_timeout(Duration::from_secs(90)))
}

struct Client {
    shared: Arc<Shared>,
    socket: Listen,
    data: DataClient,
    first: u64,
    blocks: Vec<Block>,
    version: u64,
    random: fastrand::Rng,
}

impl Client {
    fn run(&mut self) -> Vec<Block> {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let before = self.shared.failed.load(Ordering::SeqCst);
            self.round();
            if self.random.u8(..10) == 0 {
                let (begun, flushed) = (Instant::now(), self.data.flush());
                self.ended(begun, flushed.as_ref().err());
            }
            if self.shared.failed.load(Ordering::SeqCst) > before {
                std::thread::sleep(Duration::from_millis(2));
                self.reconnect();
            }
        }
        std::mem::take(&mut self.blocks)
    }

    /// Waits for the next controller if this one is gone.
    fn reconnect(&mut self) {
        while matches!(self.data.ping(), Err(ClientError::Lost(_)))
            && !self.shared.stop.load(Ordering::SeqCst)
        {
            match connect(&self.socket) {
                Ok(data) => self.data = data,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Some requests at once.
    fn round(&mut self) {
        let mut places = BTreeSet::new();
        while places.len() < DEPTH {
            places.insert(self.random.usize(..self.blocks.len()));
        }
        let mut sent = Vec::new();
        for place in places {
            let (number, begun) = (self.first + place as u64, Instant::now());
            let offset = (number * BLOCK as u64) as i64;
            let write = self.random.bool();
            let pending = if write {
                self.version += 1;
                self.blocks[place].maybe.push(self.version);
                self.data.submit(Type::Write, offset, BLOCK as u32, &block(number, self.version))
            } else {
                self.data.submit(Type::Read, offset, BLOCK as u32, &[])
            };
            sent.push((place, begun, write.then_some(self.version), pending));
        }
        for (place, begun, written, pending) in sent {
            let result = match pending {
                Ok(pending) => pending.wait(),
                Err(error) => Err(error),
            };
            self.ended(begun, result.as_ref().err());
            let (Ok(reply), number) = (result, self.first + place as u64) else { continue };
            match written {
                Some(version) => {
                    assert_eq!(reply.header.size, BLOCK as u32);
                    self.blocks[place] = Block { acknowledged: version, maybe: Vec::new() };
                }
                None => self.blocks[place].check("the volume", number, &reply.payload),
            }
        }
    }

    fn ended(&self, begun: Instant, error: Option<&ClientError>) {
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap();
        self.shared.longest_us.fetch_max(took, Ordering::SeqCst);
        let count = match error {
            None => &self.shared.done,
            Some(error) => {
                self.shared.texts.lock().unwrap().insert(error.to_string());
                &self.shared.failed
            }
        };
        count.fetch_add(1, Ordering::SeqCst);
    }
}

impl Block {
    fn check(&self, what: &str, number: u64, content: &[u8]) {
        let found = version_of(content, number).unwrap_or(0);
        assert!(
            found == self.acknowledged || self.maybe.contains(&found),
            "{what}: block {number} shows version {found}, {self:?}"
        );
    }
}

impl Report {
    /// Writes anew what was not acknowledged: replicas may differ there.
    fn rewrite(&mut self, number: u64, client: &DataClient) {
        let place = &mut self.blocks[number as usize];
        let version = place.maybe.iter().max().copied().unwrap_or(0) + 1_000_000;
        client.write(number * BLOCK as u64, &block(number, version)).unwrap();
        *place = Block { acknowledged: version, maybe: Vec::new() };
    }

    pub fn settle(&mut self, client: &DataClient) {
        for number in 0..BLOCKS {
            if !self.blocks[number as usize].maybe.is_empty() {
                self.rewrite(number, client);
            }
        }
    }

    /// All that can be read there is what may be; what that is.
    pub fn check(&self, what: &str, client: &DataClient) -> Vec<u8> {
        let mut content = Vec::with_capacity(SIZE as usize);
        for offset in (0..SIZE).step_by(PIECE as usize) {
            content.extend(client.read(offset, PIECE).unwrap());
        }
        for (number, bytes) in (0..).zip(content.chunks(BLOCK)) {
            self.blocks[number as usize].check(what, number, bytes);
        }
        content
    }
}
