//! A path with a socket frontend, its replicas, and a load that knows what it must read.

use crate::data_support::{MIB, Replica, Setup, eventually, pattern};
use dbs_frontend::Listen;
use longhorn_controller::frontend::{SocketFrontend, SocketOptions};
use longhorn_controller::path::{BackendAddress, Events, Mode, Path, PathOptions, ReplicaId};
use longhorn_data::DataOptions;
use longhorn_testing::{ClientError, DataClient};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const SIZE: u64 = 4 * MIB;

/// What the owner does before a replica becomes `ERR`.
type Before = Box<dyn Fn(ReplicaId) + Send>;

/// What the owner was told.
#[derive(Default)]
pub struct Told {
    pub faults: Mutex<Vec<(ReplicaId, String)>>,
    pub before: Mutex<Option<Before>>,
}

impl Events for Told {
    fn faulting(&self, replica: ReplicaId) {
        if let Some(before) = &*self.before.lock().unwrap() {
            before(replica);
        }
    }

    fn faulted(&self, replica: ReplicaId, why: &str) {
        self.faults.lock().unwrap().push((replica, why.to_owned()));
    }
}

/// A volume: its path, and a socket to it.
pub struct Volume {
    // The frontend ends first.
    pub frontend: Option<SocketFrontend>,
    pub path: Arc<Path>,
    pub told: Arc<Told>,
    pub dir: tempfile::TempDir,
}

pub fn options(reactors: usize) -> PathOptions {
    // A machine that stalls is no fault of a replica.
    let minute = Duration::from_secs(60);
    let (short_timeout, connect_timeout) = (minute, minute);
    PathOptions {
        reactors,
        queue_depth: 64,
        short_timeout,
        connect_timeout,
        ..PathOptions::default()
    }
}

/// Timeouts for tests that wait for them: far above what a busy machine takes for a reply.
pub const SHORT: Duration = Duration::from_secs(5);

pub fn short_timeouts(reactors: usize) -> PathOptions {
    PathOptions { short_timeout: SHORT, ..options(reactors) }
}

impl Volume {
    pub fn new(options: PathOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let told = Arc::<Told>::default();
        let path = Path::new(options, SIZE, told.clone()).unwrap();
        let address = Listen::Unix(dir.path().join("longhorn-v.sock"));
        let frontend = SocketFrontend::start(&path, &SocketOptions::at(address)).unwrap();
        Self { frontend: Some(frontend), path, told, dir }
    }

    pub fn add(&self, id: ReplicaId, address: &BackendAddress, mode: Mode) {
        self.path.add(id, &format!("tcp://r{id}"), address, mode).unwrap();
    }

    pub fn client(&self, connections: usize) -> DataClient {
        let address = self.frontend.as_ref().unwrap().address();
        DataClient::connect(address, connections).unwrap()
    }

    pub fn mode(&self, id: ReplicaId) -> Mode {
        self.path.mode(id).unwrap()
    }

    pub fn faults(&self) -> Vec<(ReplicaId, String)> {
        self.told.faults.lock().unwrap().clone()
    }

    /// Waits until a replica is `ERR`.
    pub fn faulted(&self, id: ReplicaId) -> String {
        eventually("a replica becomes ERR", || self.mode(id) == Mode::Err);
        eventually("its owner is told", || self.faults().iter().any(|(of, _)| *of == id));
        self.faults().into_iter().find(|(of, _)| *of == id).unwrap().1
    }
}

/// Replicas on stores of their own.
pub fn replicas(count: usize) -> Vec<Replica> {
    let start = |_| {
        let options = DataOptions { reactors: 1, workers: 4, ..DataOptions::default() };
        Setup { volume_size: SIZE, options, ..Setup::default() }.start().unwrap()
    };
    (0..count).map(start).collect()
}

/// The same with checksums of data.
pub fn checked(count: usize) -> Vec<Replica> {
    let start = |_| {
        let options = DataOptions { reactors: 1, workers: 4, ..DataOptions::default() };
        let setup = Setup { volume_size: SIZE, options, checksums: true, ..Setup::default() };
        setup.start().unwrap()
    };
    (0..count).map(start).collect()
}

pub fn address(replica: &Replica) -> BackendAddress {
    BackendAddress::Remote(replica.tcp().clone())
}

pub fn content(replica: &Replica) -> Vec<u8> {
    let mut data = vec![0; SIZE as usize];
    replica.active.volume().unwrap().read_at(0, &mut data).unwrap();
    data
}

/// Verified random I/O of several clients, each on a part of the volume of its own.
pub struct Load {
    pub clients: u64,
    pub unmaps: bool,
    pub flushes: bool,
    /// Multiples of which offsets and lengths are.
    pub unit: u64,
    pub seed: u64,
}

impl Default for Load {
    fn default() -> Self {
        Self { clients: 4, unmaps: true, flushes: false, unit: 512, seed: 1 }
    }
}

/// What load does in the background.
pub struct Counted {
    pub clients: u64,
    pub requests: AtomicU64,
    pub stop: AtomicBool,
}

impl Load {
    /// Runs `during` while load goes on, after some of it and before some of it; returns what the
    /// volume holds at the end.
    pub fn during(&self, volume: &Volume, during: impl FnOnce(&Counted)) -> Vec<u8> {
        let counted = Counted {
            clients: self.clients,
            requests: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        };
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..self.clients)
                .map(|index| {
                    let (client, counted) = (volume.client(2), &counted);
                    scope.spawn(move || self.client(&client, index, counted))
                })
                .collect();
            counted.some_more(100);
            during(&counted);
            counted.some_more(100);
            counted.stop.store(true, Ordering::SeqCst);
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        })
    }

    fn client(&self, client: &DataClient, index: u64, counted: &Counted) -> Vec<u8> {
        struct Stop<'a>(&'a Counted);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.stop.store(true, Ordering::SeqCst);
                    // Lets those who wait for more requests find that there are enough.
                    self.0.requests.store(u64::MAX / 2, Ordering::SeqCst);
                }
            }
        }
        let _stop = Stop(counted);
        let part = SIZE / self.clients;
        let base = index * part;
        let mut model = client.read(base, part as u32).unwrap();
        let mut random = fastrand::Rng::with_seed(self.seed * 1000 + index);
        while !counted.stop.load(Ordering::SeqCst) {
            let units = if random.u8(..20) == 0 { 300 } else { 24 };
            let length = self.unit * random.u64(1..=units);
            let at = self.unit * random.u64(0..=(part - length) / self.unit);
            let range = at as usize..(at + length) as usize;
            match random.u8(..16) {
                0..7 => {
                    let data = pattern(random.u64(..), length as usize);
                    client.write(base + at, &data).unwrap();
                    model[range].copy_from_slice(&data);
                }
                7 if self.unmaps => {
                    let (start, end) = (at.next_multiple_of(4096), (at + length) / 4096 * 4096);
                    if start < end {
                        client.unmap(base + start, (end - start) as u32).unwrap();
                        // What it reads as now is not said: it is written again.
                        let data = pattern(random.u64(..), (end - start) as usize);
                        client.write(base + start, &data).unwrap();
                        model[start as usize..end as usize].copy_from_slice(&data);
                    }
                }
                8 if self.flushes => client.flush().unwrap(),
                _ => {
                    let data = client.read(base + at, length as u32).unwrap();
                    assert!(data == model[range], "client {index}, {length} bytes at {at}");
                }
            }
            counted.requests.fetch_add(1, Ordering::SeqCst);
        }
        assert!(client.read(base, part as u32).unwrap() == model, "client {index} at the end");
        model
    }
}

impl Counted {
    pub fn now(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// Waits for so many more requests.
    pub fn some_more(&self, count: u64) {
        let until = self.now() + count;
        eventually("load goes on", || self.now() >= until || self.stop.load(Ordering::SeqCst));
    }
}

/// The text of an error.
pub fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> String {
    match result.unwrap_err() {
        ClientError::Replica(text) => text,
        other => panic!("{other:?}"),
    }
}
