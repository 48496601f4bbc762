//! A replica behind a real socket, and a client for it.
#![allow(dead_code, missing_docs)]

use dbs_core::{Error, ErrorKind, InitOptions, OpenOptions, Store, TailPlace};
use dbs_sim::{Medium, SimDisk, SimEnv};
use longhorn_data::{Access, Active};
use longhorn_replica::replica::{
    OpenStore, Predecessor, Replica as Engine, ReplicaOptions, ReplicaRpc, ReplicaState,
    SERVICE_NAME, StoreSource,
};
use longhorn_wire::control::{self, ControlServer, Identity};
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use longhorn_wire::proto::ptypes::*;
use std::collections::HashMap;
use std::future::Future;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Response, Status};

pub const MIB: u64 = 1 << 20;
pub const SIZE: u64 = 4 * MIB;
pub const BLOCK: usize = 4096;
pub const NOW: &str = "2026-08-21T10:00:00Z";

/// A directory in memory where there is one.
pub fn tempdir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

pub fn store_file(dir: &Path) -> PathBuf {
    dir.join("volume.dbs")
}

/// The store of a replica directory, made if need be; with a tail where there is a tmpfs.
pub fn open_store(dir: &Path) -> Store {
    let file = store_file(dir);
    if !file.exists() {
        let options =
            InitOptions { size: Some(96 * MIB), extent_size: 64 << 10, ..Default::default() };
        Store::init(&file, &options).unwrap();
    }
    try_store(dir).unwrap()
}

pub fn try_store(dir: &Path) -> dbs_core::Result<Store> {
    let tail = if dir.starts_with("/dev/shm") {
        TailPlace::Directory(dir.to_owned())
    } else {
        TailPlace::None
    };
    Store::open(&store_file(dir), &OpenOptions { tail, ..Default::default() })
}

/// What a loss of power takes of a directory in which no process is: another boot begins, without tails.
pub fn lose_power(dir: &Path) {
    let file = dir.join("volume.counters");
    let text = std::fs::read_to_string(&file).unwrap();
    let boot = text.split_whitespace().nth(2).unwrap();
    std::fs::write(&file, text.replace(boot, "00000000-0000-0000-0000-000000000000")).unwrap();
    for file in std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_some_and(|extension| extension == "tail") {
            std::fs::remove_file(file).unwrap();
        }
    }
}

pub fn options(dir: &Path) -> ReplicaOptions {
    let mut options = ReplicaOptions::new(dir, "vol");
    options.store_file = Some(store_file(dir));
    options
}

/// What a call came to.
pub type Outcome<T> = Result<T, Status>;

/// A replica being served.
pub struct Bench {
    pub dir: Arc<TempDir>,
    pub store: Option<Store>,
    pub replica: Arc<Engine>,
    server: ControlServer,
    client: ReplicaServiceClient<Channel>,
    runtime: Runtime,
}

impl Bench {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    /// One of [`SIZE`], open.
    pub fn opened() -> Self {
        let bench = Self::new();
        bench.create(&SIZE.to_string()).unwrap();
        bench.open();
        bench
    }

    pub fn with(change: impl FnOnce(&mut ReplicaOptions)) -> Self {
        Self::on(Arc::new(tempdir()), change)
    }

    /// On a directory that may have been used before.
    pub fn on(dir: Arc<TempDir>, change: impl FnOnce(&mut ReplicaOptions)) -> Self {
        let store = open_store(dir.path());
        let mut bench = Self::from_source(dir, change, StoreSource::Own(store.clone()));
        bench.store = Some(store);
        bench
    }

    /// On a store on a simulated disk, which can be made to fail.
    pub fn simulated() -> (Self, Arc<SimDisk>) {
        let disk = Arc::new(SimDisk::new(Medium::file(96 * MIB), 1));
        let options = InitOptions { extent_size: 64 << 10, ..Default::default() };
        Store::init_on(&*disk, &options, &SimEnv::new(1)).unwrap();
        let dir = Arc::new(tempdir());
        // Looked at when the replica is opened, to know the file again.
        std::fs::File::create(dir.path().join("volume.dbs")).unwrap();
        (Self::on_disk(dir, &disk), disk)
    }

    /// On a simulated disk with a store, and a directory of its replica.
    pub fn on_disk(dir: Arc<TempDir>, disk: &Arc<SimDisk>) -> Self {
        let env = Arc::new(SimEnv::new(1));
        let store = Store::open_on(Arc::clone(disk) as _, None, env, false).unwrap();
        let mut bench = Self::from_source(dir, |_| {}, StoreSource::Own(store.clone()));
        bench.store = Some(store);
        bench
    }

    pub fn from_source(
        dir: Arc<TempDir>,
        change: impl FnOnce(&mut ReplicaOptions),
        source: StoreSource,
    ) -> Self {
        let mut options = options(dir.path());
        change(&mut options);
        let replica = Engine::new(options, source).unwrap();
        let runtime = runtime();
        let server = serve(&runtime, &replica, &Identity::replica("vol", "vol-r-1"));
        let client = ReplicaServiceClient::new(channel(&runtime, &server));
        Self { dir, store: None, replica, server, client, runtime }
    }

    pub fn channel(&self) -> Channel {
        channel(&self.runtime, &self.server)
    }

    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    fn call<T, F>(&self, call: impl FnOnce(ReplicaServiceClient<Channel>) -> F) -> Outcome<T>
    where
        F: Future<Output = Outcome<Response<T>>>,
    {
        self.block_on(call(self.client.clone())).map(Response::into_inner)
    }

    pub fn try_get(&self) -> Outcome<Replica> {
        self.call(|mut c| async move { c.replica_get(()).await }).map(|r| r.replica.unwrap())
    }

    pub fn get(&self) -> Replica {
        self.try_get().unwrap()
    }

    pub fn create(&self, size: &str) -> Outcome<Replica> {
        let request = ReplicaCreateRequest { size: size.to_owned() };
        self.call(|mut c| async move { c.replica_create(request).await })
            .map(|r| r.replica.unwrap())
    }

    pub fn open_as(&self, is_upgrade: bool, expected_backend_size: i64) -> Outcome<Replica> {
        let request = ReplicaOpenRequest { is_upgrade, expected_backend_size };
        self.call(|mut c| async move { c.replica_open(request).await }).map(|r| r.replica.unwrap())
    }

    pub fn open(&self) -> Replica {
        self.open_as(false, 0).unwrap()
    }

    pub fn try_close(&self) -> Outcome<Replica> {
        self.call(|mut c| async move { c.replica_close(()).await }).map(|r| r.replica.unwrap())
    }

    pub fn close(&self) -> Replica {
        self.try_close().unwrap()
    }

    pub fn reload(&self) -> Outcome<Replica> {
        self.call(|mut c| async move { c.replica_reload(()).await }).map(|r| r.replica.unwrap())
    }

    pub fn delete(&self) -> Outcome<()> {
        self.call(|mut c| async move { c.replica_delete(()).await })
    }

    pub fn snapshot_as(
        &self,
        name: &str,
        user_created: bool,
        created: &str,
        labels: &[(&str, &str)],
    ) -> Outcome<Replica> {
        let labels: HashMap<_, _> =
            labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let (name, created) = (name.to_owned(), created.to_owned());
        let request = ReplicaSnapshotRequest { name, user_created, created, labels };
        self.call(|mut c| async move { c.replica_snapshot(request).await })
            .map(|r| r.replica.unwrap())
    }

    pub fn snapshot(&self, name: &str) -> Replica {
        self.snapshot_as(name, true, NOW, &[]).unwrap()
    }

    pub fn revert_to(&self, name: &str, created: &str) -> Outcome<Replica> {
        let (name, created) = (name.to_owned(), created.to_owned());
        self.call_revert(ReplicaRevertRequest { name, created, ..Default::default() })
    }

    pub fn call_revert(&self, request: ReplicaRevertRequest) -> Outcome<Replica> {
        self.call(|mut c| async move { c.replica_revert(request).await })
            .map(|r| r.replica.unwrap())
    }

    pub fn revert(&self, snapshot: &str) -> Replica {
        self.revert_to(&disk(snapshot), NOW).unwrap()
    }

    pub fn expand(&self, size: i64) -> Outcome<Replica> {
        let request = ReplicaExpandRequest { size };
        self.call(|mut c| async move { c.replica_expand(request).await })
            .map(|r| r.replica.unwrap())
    }

    pub fn mark(&self, name: &str) -> Outcome<Replica> {
        let request = DiskMarkAsRemovedRequest { name: name.to_owned() };
        self.call(|mut c| async move { c.disk_mark_as_removed(request).await })
            .map(|r| r.replica.unwrap())
    }

    /// Actions as `(action, source, target)`.
    pub fn prepare(&self, name: &str) -> Outcome<Vec<(String, String, String)>> {
        let request = DiskPrepareRemoveRequest { name: name.to_owned() };
        let done = self.call(|mut c| async move { c.disk_prepare_remove(request).await })?;
        Ok(done.operations.into_iter().map(|o| (o.action, o.source, o.target)).collect())
    }

    pub fn remove(&self, name: &str, force: bool) -> Outcome<Replica> {
        let request = DiskRemoveRequest { name: name.to_owned(), force };
        self.call(|mut c| async move { c.disk_remove(request).await }).map(|r| r.replica.unwrap())
    }

    pub fn replace(&self, target: &str, source: &str) -> Outcome<Replica> {
        let request = DiskReplaceRequest { target: target.to_owned(), source: source.to_owned() };
        self.call(|mut c| async move { c.disk_replace(request).await }).map(|r| r.replica.unwrap())
    }

    pub fn rebuilding(&self, rebuilding: bool) -> Outcome<Replica> {
        let request = RebuildingSetRequest { rebuilding };
        self.call(|mut c| async move { c.rebuilding_set(request).await })
            .map(|r| r.replica.unwrap())
    }

    pub fn revision(&self, counter: i64) -> Outcome<Replica> {
        let request = RevisionCounterSetRequest { counter };
        self.call(|mut c| async move { c.revision_counter_set(request).await })
            .map(|r| r.replica.unwrap())
    }

    pub fn unmap_mark(&self, enabled: bool) -> Replica {
        let request = UnmapMarkDiskChainRemovedSetRequest { enabled };
        self.call(|mut c| async move { c.unmap_mark_disk_chain_removed_set(request).await })
            .unwrap()
            .replica
            .unwrap()
    }

    pub fn max_count(&self, count: i32) -> Replica {
        let request = SnapshotMaxCountSetRequest { count };
        self.call(|mut c| async move { c.snapshot_max_count_set(request).await })
            .unwrap()
            .replica
            .unwrap()
    }

    pub fn max_size(&self, size: i64) -> Replica {
        let request = SnapshotMaxSizeSetRequest { size };
        self.call(|mut c| async move { c.snapshot_max_size_set(request).await })
            .unwrap()
            .replica
            .unwrap()
    }

    /// What data connections would work on.
    pub fn active(&self) -> Arc<Active> {
        match self.replica.gate().access() {
            Access::Open(active) => active,
            other => panic!("not open: {other:?}"),
        }
    }

    /// Writes a block full of one byte, as a data connection does.
    pub fn write(&self, block: u64, byte: u8) {
        let active = self.active();
        active.volume().unwrap().write_at(block * BLOCK as u64, &[byte; BLOCK], false).unwrap();
        active.change();
    }

    /// The byte a block is full of.
    pub fn read(&self, block: u64) -> u8 {
        let mut buf = [0; BLOCK];
        self.active().volume().unwrap().read_at(block * BLOCK as u64, &mut buf).unwrap();
        assert!(buf.iter().all(|byte| *byte == buf[0]), "block {block} is mixed");
        buf[0]
    }

    /// Makes the next write of `volume.meta` find the file system full.
    pub fn no_room_for_meta(&self) {
        let temporary = self.dir.path().join("volume.meta.tmp");
        std::os::unix::fs::symlink("/dev/full", temporary).unwrap();
    }

    /// Lets background work come to its end.
    pub fn work(&self) {
        let store = self.store.as_ref().unwrap();
        while store.work(64).unwrap().remaining > 0 {}
    }

    /// Ends as after `kill -9`; the directory stays.
    pub fn kill(self) -> Arc<TempDir> {
        let dir = Arc::clone(&self.dir);
        let Self { store, replica, server, client, runtime, .. } = self;
        drop(client);
        server.stop(Duration::from_secs(10));
        runtime.shutdown_timeout(Duration::from_secs(10));
        drop((store, replica));
        dir
    }

    /// Ends in good order, but without closing the replica: the store is closed.
    pub fn end(self) -> Arc<TempDir> {
        let store = self.store.clone();
        let dir = self.kill();
        if let Some(store) = store {
            store.close().unwrap();
        }
        dir
    }
}

pub fn disk(snapshot: &str) -> String {
    format!("volume-snap-{snapshot}.img")
}

pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

pub fn serve(runtime: &Runtime, replica: &Arc<Engine>, identity: &Identity) -> ControlServer {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut routes = control::routes(identity, &[SERVICE_NAME], true).unwrap();
    routes.add_service(ReplicaRpc::server(Arc::clone(replica), identity.clone()));
    ControlServer::start(runtime.handle(), listener, routes).unwrap()
}

pub fn channel(runtime: &Runtime, server: &ControlServer) -> Channel {
    let address = format!("http://{}", server.address());
    runtime.block_on(Channel::from_shared(address).unwrap().connect()).unwrap()
}

/// The older replica as the newer process reaches it, with its store closed on release.
#[derive(Default)]
pub struct Older {
    pub replica: Mutex<Option<Arc<Engine>>>,
    pub releases: AtomicUsize,
    /// How the older replica is given its store back, if it is.
    pub newer: Mutex<Option<Arc<Older>>>,
    pub dir: Mutex<Option<Arc<TempDir>>>,
}

pub struct Line(pub Arc<Older>);

impl Line {
    fn replica(&self) -> dbs_core::Result<Arc<Engine>> {
        let replica = self.0.replica.lock().unwrap().clone();
        replica.ok_or_else(|| Error::new(ErrorKind::Io, "nobody answers"))
    }
}

impl Predecessor for Line {
    fn state(&self) -> dbs_core::Result<ReplicaState> {
        let state = self.replica()?.export_state()?;
        // Over the wire and back.
        Ok(serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap())
    }

    fn release(&self) -> dbs_core::Result<()> {
        self.0.releases.fetch_add(1, Ordering::SeqCst);
        let newer = self.0.newer.lock().unwrap().clone();
        let back = newer.map(|newer| {
            let dir = self.0.dir.lock().unwrap().clone().unwrap();
            let open: OpenStore = Box::new(move || try_store(dir.path()));
            (Box::new(Line(newer)) as Box<dyn Predecessor>, open)
        });
        self.replica()?.surrender(back)?.close()
    }
}

/// An old bench with some history and a newer one beside it.
pub fn pair() -> (Bench, Bench, Arc<Older>) {
    pair_on(None, None)
}

/// As [`pair`], with the backing files that the two are given.
pub fn pair_on(first: Option<&Path>, second: Option<&Path>) -> (Bench, Bench, Arc<Older>) {
    let mut old = Bench::with(|options| options.backing_file = first.map(Path::to_owned));
    old.create(&SIZE.to_string()).unwrap();
    old.open();
    old.write(0, 1);
    old.snapshot_as("a", true, NOW, &[("k", "v")]).unwrap();
    old.write(0, 2);
    old.revision(41).unwrap();
    old.store = None;
    let older = Arc::new(Older::default());
    *older.replica.lock().unwrap() = Some(Arc::clone(&old.replica));
    let new = newer_with(&old, &older, |options| options.backing_file = second.map(Path::to_owned));
    (old, new, older)
}

pub fn newer(old: &Bench, older: &Arc<Older>) -> Bench {
    newer_with(old, older, |_| {})
}

fn newer_with(old: &Bench, older: &Arc<Older>, change: impl FnOnce(&mut ReplicaOptions)) -> Bench {
    let dir = Arc::clone(&old.dir);
    let open = {
        let dir = Arc::clone(&dir);
        move || -> dbs_core::Result<Store> { try_store(dir.path()) }
    };
    let predecessor = Box::new(Line(Arc::clone(older)));
    Bench::from_source(dir, change, StoreSource::HandOver { predecessor, open: Box::new(open) })
}
