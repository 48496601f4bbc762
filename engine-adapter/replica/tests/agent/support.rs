//! Replicas with their sync agents in this process, behind real sockets.
#![allow(dead_code, missing_docs)]

use dbs_core::volume::{Request, Start};
use dbs_core::{InitOptions, OpenOptions, Store, TailPlace};
use longhorn_data::Access;
use longhorn_replica::agent::{Agent, AgentOptions, ReceiverPorts, SERVICE_NAMES};
use longhorn_replica::replica::{
    Replica as Engine, ReplicaOptions, ReplicaRpc, SERVICE_NAME, StoreSource,
};
use longhorn_sync::image::{HashOptions, SparseFile, hash};
use longhorn_wire::control::{self, ControlServer, Identity};
use longhorn_wire::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use longhorn_wire::proto::ptypes::*;
use std::fs::File;
use std::future::Future;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Response, Status};

pub const MIB: u64 = 1 << 20;
pub const BLOCK: u64 = 4096;
pub const NOW: &str = "2026-08-21T10:00:00Z";
pub const VOLUME: &str = "vol";

pub type Outcome<T> = Result<T, Status>;
pub type Client = SyncAgentServiceClient<Channel>;

pub fn runtime() -> Arc<Runtime> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    Arc::new(runtime.unwrap())
}

pub fn tempdir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn open_store(dir: &Path, checksums: bool) -> Store {
    let file = dir.join("volume.dbs");
    if !file.exists() {
        let (size, extent_size) = (Some(1024 * MIB), 256 << 10);
        let options = InitOptions { size, extent_size, checksums, ..Default::default() };
        Store::init(&file, &options).unwrap();
    }
    let tail = if dir.starts_with("/dev/shm") {
        TailPlace::Directory(dir.to_owned())
    } else {
        TailPlace::None
    };
    Store::open(&file, &OpenOptions { tail, ..Default::default() }).unwrap()
}

/// Sockets for a replica and its agent, two ports apart.
fn port_pair() -> (TcpListener, TcpListener) {
    loop {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let Some(second) = port.checked_add(2) else { continue };
        if let Ok(second) = TcpListener::bind(("127.0.0.1", second)) {
            return (first, second);
        }
    }
}

/// Passes connections on to a replica and its agent, of which nothing comes any more after so many bytes. An
/// address to reach them by, and how much has come from the agent.
pub fn stalling(source: &Node, after: u64) -> (String, Arc<AtomicU64>) {
    let (replica, agent) = port_pair();
    let address = format!("tcp://{}", replica.local_addr().unwrap());
    let port: u16 = source.address.rsplit_once(':').unwrap().1.parse().unwrap();
    let passed = Arc::new(AtomicU64::new(0));
    relay(replica, port, u64::MAX, Arc::default());
    relay(agent, port + 2, after, Arc::clone(&passed));
    (address, passed)
}

fn relay(listener: TcpListener, to: u16, after: u64, passed: Arc<AtomicU64>) {
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) =
                (client.unwrap(), TcpStream::connect(("127.0.0.1", to)).unwrap());
            let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut into));
            let passed = Arc::clone(&passed);
            std::thread::spawn(move || {
                let mut buf = [0; 65536];
                while let Ok(count @ 1..) = server.read(&mut buf) {
                    if passed.fetch_add(count as u64, Ordering::SeqCst) > after {
                        std::thread::park();
                    }
                    if client.write_all(&buf[..count]).is_err() {
                        return;
                    }
                }
                let _gone = client.shutdown(std::net::Shutdown::Both);
            });
        }
    });
}

/// A replica with its agent, open, of a volume of its own size.
pub struct Node {
    pub runtime: Arc<Runtime>,
    pub dir: Arc<TempDir>,
    pub store: Store,
    pub replica: Arc<Engine>,
    pub agent: Arc<Agent>,
    pub client: Client,
    /// `tcp://host:port` of the replica.
    pub address: String,
    servers: Vec<ControlServer>,
}

/// What differs from the usual node.
#[derive(Clone)]
pub struct Setup {
    pub volume: &'static str,
    pub size: u64,
    pub receivers: usize,
    pub lock_dir: Option<PathBuf>,
    pub host: Option<PathBuf>,
    pub checksums: bool,
    pub backing_file: Option<PathBuf>,
    /// Its agent says nothing.
    pub silent: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            volume: VOLUME,
            size: 64 * MIB,
            receivers: 7,
            lock_dir: None,
            host: None,
            checksums: false,
            backing_file: None,
            silent: false,
        }
    }
}

impl Node {
    pub fn new(runtime: &Arc<Runtime>) -> Self {
        Self::with(runtime, Setup::default())
    }

    /// With checksums of data.
    pub fn checked(runtime: &Arc<Runtime>) -> Self {
        Self::with(runtime, Setup { checksums: true, ..Setup::default() })
    }

    pub fn with(runtime: &Arc<Runtime>, setup: Setup) -> Self {
        Self::on(runtime, Arc::new(tempdir()), setup)
    }

    pub fn on(runtime: &Arc<Runtime>, dir: Arc<TempDir>, setup: Setup) -> Self {
        let store = open_store(dir.path(), setup.checksums);
        let mut options = ReplicaOptions::new(dir.path(), setup.volume);
        options.store_file = Some(dir.path().join("volume.dbs"));
        options.backing_file = setup.backing_file;
        let replica = Engine::new(options, StoreSource::Own(store.clone())).unwrap();
        replica.create(setup.size).unwrap();
        replica.open(false, 0).unwrap();
        let receivers = (0..setup.receivers).map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let options = AgentOptions {
            volume: setup.volume.to_owned(),
            ports: ReceiverPorts::Bound(receivers.collect()),
            lock_dir: setup.lock_dir.unwrap_or_else(|| dir.path().join("lock")),
            host: setup.host.unwrap_or_else(|| dir.path().join("no-host")),
            rest: Duration::from_millis(100),
        };
        let agent = Agent::new(Arc::clone(&replica), options);
        let identity = Identity::replica(setup.volume, "r-1");
        let (first, second) = port_pair();
        let address = format!("tcp://{}", first.local_addr().unwrap());
        let mut routes = control::routes(&identity, &[SERVICE_NAME], true).unwrap();
        routes.add_service(ReplicaRpc::server(Arc::clone(&replica), identity.clone()));
        let mut agents = control::routes(&identity, &SERVICE_NAMES, false).unwrap();
        if !setup.silent {
            agent.add_to(&mut agents, &identity);
        }
        let servers = vec![
            ControlServer::start(runtime.handle(), first, routes).unwrap(),
            ControlServer::start(runtime.handle(), second, agents).unwrap(),
        ];
        let at = format!("http://{}", servers[1].address());
        let channel = runtime.block_on(Channel::from_shared(at).unwrap().connect()).unwrap();
        let client = Client::new(channel);
        Self { runtime: Arc::clone(runtime), dir, store, replica, agent, client, address, servers }
    }

    /// Calls the agent.
    pub fn call<T, F>(&self, call: impl FnOnce(Client) -> F) -> Outcome<T>
    where
        F: Future<Output = Outcome<Response<T>>>,
    {
        self.runtime.block_on(call(self.client.clone())).map(Response::into_inner)
    }

    /// Writes blocks, each filled with the seed and its own number.
    pub fn write(&self, blocks: impl IntoIterator<Item = u64>, seed: u64) {
        let Access::Open(active) = self.replica.gate().access() else { panic!("not open") };
        for block in blocks {
            let volume = active.volume().unwrap();
            volume.write_at(block * BLOCK, &content_of(block, seed), false).unwrap();
        }
        active.change();
    }

    /// Changes a bit of a block behind the store's back, as the volume or snapshot shows it.
    pub fn damage(&self, spec: &str, block: u64) {
        let volume = self.store.volume(spec).unwrap();
        let mut request = Request::new();
        assert_eq!(volume.start_read(block * BLOCK, BLOCK, &mut request).unwrap(), Start::Io);
        let at = request.segments()[0].device;
        request.cancel();
        let path = self.dir.path().join("volume.dbs");
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        // It may be read around the page cache.
        file.sync_all().unwrap();
    }

    pub fn discard(&self, block: u64, blocks: u64) {
        self.store.volume(VOLUME).unwrap().discard(block * BLOCK, blocks * BLOCK).unwrap();
    }

    pub fn snapshot(&self, name: &str) {
        self.replica.snapshot(name, true, NOW, Default::default()).unwrap();
    }

    pub fn system_snapshot(&self, name: &str) {
        self.replica.snapshot(name, false, NOW, Default::default()).unwrap();
    }

    /// All that one reads through the volume or one of its snapshots.
    pub fn content(&self, spec: &str) -> Vec<u8> {
        let volume = self.store.volume(spec).unwrap();
        let mut bytes = vec![0; volume.size() as usize];
        volume.read_at(0, &mut bytes).unwrap();
        bytes
    }

    /// Names of the snapshots.
    pub fn snapshots(&self) -> Vec<String> {
        let disks = self.replica.disks().unwrap();
        disks.into_values().filter_map(|disk| disk.snapshot).collect()
    }

    /// What a layer holds: runs with their states, and the bytes.
    pub fn layer(&self, snapshot: &str) -> (Vec<dbs_core::info::LayerRange>, Vec<u8>) {
        let layer = self.store.layer(VOLUME, Some(snapshot)).unwrap();
        let mut bytes = vec![0; layer.size() as usize];
        layer.read_at(0, &mut bytes).unwrap();
        (layer.map(0, layer.size(), usize::MAX).unwrap(), bytes)
    }

    pub fn purge(&self) -> Outcome<()> {
        self.call(|mut c| async move { c.snapshot_purge(()).await })
    }

    pub fn purge_status(&self) -> SnapshotPurgeStatusResponse {
        self.call(|mut c| async move { c.snapshot_purge_status(()).await }).unwrap()
    }

    /// Purges and waits for the end.
    pub fn purged(&self) -> SnapshotPurgeStatusResponse {
        self.purge().unwrap();
        wait(|| Some(self.purge_status()).filter(|status| !status.is_purging))
    }

    pub fn rebuild_status(&self) -> ReplicaRebuildStatusResponse {
        self.call(|mut c| async move { c.replica_rebuild_status(()).await }).unwrap()
    }

    pub fn hash(&self, name: &str, rehash: bool) -> Outcome<()> {
        let request = SnapshotHashRequest { snapshot_name: name.to_owned(), rehash };
        self.call(|mut c| async move { c.snapshot_hash(request).await })
    }

    pub fn hash_status(&self, name: &str) -> SnapshotHashStatusResponse {
        let request = SnapshotHashStatusRequest { snapshot_name: name.to_owned() };
        self.call(|mut c| async move { c.snapshot_hash_status(request).await }).unwrap()
    }

    /// Hashes a snapshot and waits for the end.
    pub fn hashed(&self, name: &str, rehash: bool) -> SnapshotHashStatusResponse {
        self.hash(name, rehash).unwrap();
        wait(|| Some(self.hash_status(name)).filter(|status| status.state != "in_progress"))
    }

    pub fn export(&self, snapshot: &str, port: u16) -> Outcome<()> {
        let request = VolumeExportRequest {
            snapshot_file_name: snapshot.to_owned(),
            host: "127.0.0.1".to_owned(),
            port: port.into(),
            file_sync_http_client_timeout: 30,
            ..Default::default()
        };
        self.call(|mut c| async move { c.volume_export(request).await })
    }

    pub fn send(&self, name: &str, port: u16, fast_sync: bool) -> Outcome<()> {
        let request = FileSendRequest {
            from_file_name: name.to_owned(),
            host: "127.0.0.1".to_owned(),
            port: port.into(),
            fast_sync,
            file_sync_http_client_timeout: 30,
        };
        self.call(|mut c| async move { c.file_send(request).await })
    }

    /// Ends the servers; the directory stays.
    pub fn end(self) -> Arc<TempDir> {
        let Self { dir, servers, client, agent, replica, store, .. } = self;
        drop(client);
        for server in servers {
            server.stop(Duration::from_secs(5));
        }
        drop((agent, replica, store));
        dir
    }
}

/// What [`Node::write`] fills a block with.
pub fn content_of(block: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![seed as u8; BLOCK as usize];
    bytes[..8].copy_from_slice(&block.to_le_bytes());
    bytes[8..16].copy_from_slice(&seed.to_le_bytes());
    bytes
}

/// Waits until there is an answer.
pub fn wait<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(180);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "nothing happened for long");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The hash of a file.
pub fn hash_of(path: &Path) -> String {
    let file = SparseFile::source(path).unwrap();
    hash(&file, &HashOptions { threads: 1, cancelled: &|| false, progress: &|_| {} }).unwrap()
}
