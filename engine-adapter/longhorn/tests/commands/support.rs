//! A controller and replicas that only pretend, behind real sockets: they keep a list of what they were
//! asked, in order, and can be told to refuse.

use crate::raw::Raw;
use longhorn_wire::control::ControlServer;
use longhorn_wire::proto::controller::*;
use longhorn_wire::proto::ptypes::*;
use prost::Message;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::TcpListener;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use tokio::runtime::Runtime;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};

pub const VOLUME: &str = "vol";
pub const SIZE: i64 = 64 << 20;

/// What the pretenders are and were asked.
#[derive(Default)]
pub struct World {
    pub volume: Volume,
    /// Addresses and modes, as the controller lists them.
    pub listed: Vec<(String, ReplicaMode)>,
    pub replicas: BTreeMap<String, Pretender>,
    /// Addresses of `r0`, `r1`...
    order: Vec<String>,
    pub controller_api: i64,
    pub limit: i32,
    pub files: Vec<SyncFileInfo>,
    /// Method, after which it is refused with a code and a text.
    pub refused: BTreeMap<String, (Code, String)>,
    pub asked: Vec<String>,
}

/// A replica that pretends.
#[derive(Default, Clone)]
pub struct Pretender {
    pub replica: Replica,
    pub purge: SnapshotPurgeStatusResponse,
    pub hash: SnapshotHashStatusResponse,
    pub rebuild: ReplicaRebuildStatusResponse,
    pub restore: RestoreStatusResponse,
    pub hashing: bool,
}

type Shared = Arc<Mutex<World>>;

/// A controller and its replicas `r0`, `r1`..., at real addresses.
pub struct Stage {
    pub runtime: Runtime,
    pub url: String,
    pub addresses: Vec<String>,
    world: Shared,
    _servers: Vec<ControlServer>,
}

impl Stage {
    /// With so many replicas, of which the first so many are the volume's.
    pub fn new(replicas: usize, used: usize) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        let world = Shared::default();
        let (mut servers, mut addresses) = (Vec::new(), Vec::new());
        let serve = |listener, who| {
            let mut routes = Routes::builder();
            let world = Arc::clone(&world);
            match who {
                Who::Controller => routes.add_service(Fake::<0> { world, who }),
                Who::Replica(_) => routes.add_service(Fake::<1> { world, who }),
                Who::Agent(_) => routes.add_service(Fake::<2> { world, who }),
            };
            ControlServer::start(runtime.handle(), listener, routes).unwrap()
        };
        for index in 0..replicas {
            let (control, agent) = port_pair();
            addresses.push(format!("tcp://{}", control.local_addr().unwrap()));
            servers.push(serve(control, Who::Replica(index)));
            servers.push(serve(agent, Who::Agent(index)));
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        servers.push(serve(listener, Who::Controller));
        let stage = Self { runtime, url, addresses, world, _servers: servers };
        stage.world().volume = Volume { name: VOLUME.to_owned(), size: SIZE, ..Volume::default() };
        stage.world().controller_api = 6;
        stage.world().limit = 1;
        stage.world().order = stage.addresses.clone();
        for address in &stage.addresses {
            let replica = Replica {
                size: SIZE.to_string(),
                state: "closed".to_owned(),
                head: "volume-head-000.img".to_owned(),
                chain: vec!["volume-head-000.img".to_owned()],
                ..Replica::default()
            };
            let pretender = Pretender { replica, ..Pretender::default() };
            stage.world().replicas.insert(address.clone(), pretender);
        }
        for address in stage.addresses.iter().take(used) {
            let mut world = stage.world();
            world.listed.push((address.clone(), ReplicaMode::Rw));
            world.replicas.get_mut(address).unwrap().replica.state = "open".to_owned();
        }
        stage
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// Changes replica `index`.
    pub fn with(&self, index: usize, change: impl FnOnce(&mut Pretender)) {
        change(self.world().replicas.get_mut(&self.addresses[index]).unwrap());
    }

    pub fn set_mode(&self, index: usize, mode: ReplicaMode) {
        self.world().listed[index].1 = mode;
    }

    /// Refuses a method from now on.
    pub fn refuse(&self, method: &str, code: Code, text: &str) {
        self.world().refused.insert(method.to_owned(), (code, text.to_owned()));
    }

    /// What was asked since the last time.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.world().asked)
    }

    /// Runs the command line on the volume.
    pub fn run(&self, args: &[&str]) -> Output {
        let globals = ["--url", &self.url, "--volume-name", VOLUME];
        Command::new(env!("CARGO_BIN_EXE_longhorn")).args(globals).args(args).output().unwrap()
    }

    /// Runs the command line, which must succeed; what it prints, with `rN` for addresses.
    pub fn prints(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {errors}");
        self.plain(String::from_utf8(output.stdout).unwrap())
    }

    /// Runs the command line, which must fail; its last line.
    pub fn fails(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let errors = String::from_utf8(output.stderr).unwrap();
        let line = errors.lines().last().unwrap();
        let (_, line) = line.split_once(" level=fatal ").expect(&errors);
        self.plain(line.to_owned())
    }

    pub fn plain(&self, mut text: String) -> String {
        for (index, address) in self.addresses.iter().enumerate() {
            text = text.replace(address.as_str(), &format!("r{index}"));
            text = text.replace(&address["tcp://".len()..], &format!("at-r{index}"));
        }
        text.replace(&self.url["http://".len()..], "ctl")
    }
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

#[derive(Clone, Copy)]
enum Who {
    Controller,
    Replica(usize),
    Agent(usize),
}

/// A service of any kind: messages are bytes.
#[derive(Clone)]
struct Fake<const KIND: u8> {
    world: Shared,
    who: Who,
}

impl<const KIND: u8> NamedService for Fake<KIND> {
    const NAME: &'static str = match KIND {
        0 => "ptypes.ControllerService",
        1 => "ptypes.ReplicaService",
        _ => "ptypes.SyncAgentService",
    };
}

impl<const KIND: u8> Service<http::Request<Body>> for Fake<KIND> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap().to_owned();
        let call = Method { world: Arc::clone(&self.world), who: self.who, method };
        Box::pin(async move { Ok(Grpc::new(Raw).unary(call, request).await) })
    }
}

struct Method {
    world: Shared,
    who: Who,
    method: String,
}

impl UnaryService<Vec<u8>> for Method {
    type Response = Vec<u8>;
    type Future = BoxFuture<Response<Vec<u8>>, Status>;

    fn call(&mut self, request: Request<Vec<u8>>) -> Self::Future {
        let name = |key| request.metadata().get(key).map(|name| name.to_str().unwrap().to_owned());
        assert_eq!(name("volume-name").as_deref(), Some(VOLUME));
        let instance = name("instance-name").map(|name| format!(" as {name}")).unwrap_or_default();
        let mut world = self.world.lock().unwrap();
        let reply = world.answer(self.who, &self.method, &instance, request.get_ref());
        Box::pin(async { reply.map(Response::new) })
    }
}

fn decode<M: Message + Default>(bytes: &[u8]) -> M {
    M::decode(bytes).unwrap()
}

impl World {
    fn answer(
        &mut self,
        who: Who,
        method: &str,
        instance: &str,
        body: &[u8],
    ) -> Result<Vec<u8>, Status> {
        let (name, index) = match who {
            Who::Controller => ("ctl".to_owned(), 0),
            Who::Replica(index) | Who::Agent(index) => (format!("r{index}"), index),
        };
        let details = self.details(method, body);
        self.asked.push(format!("{name} {method}{instance}{details}"));
        let names =
            [method.to_owned(), format!("{name} {method}"), format!("{name} {method}{details}")];
        if let Some((code, text)) = names.iter().find_map(|name| self.refused.get(name)) {
            return Err(Status::new(*code, text.clone()));
        }
        match who {
            Who::Controller => self.controller(method, body),
            Who::Replica(_) => Ok(self.at(index).replica(method, body)),
            Who::Agent(_) => Ok(self.at(index).agent(method)),
        }
    }

    /// What of a request the list tells.
    fn details(&self, method: &str, body: &[u8]) -> String {
        match method {
            "RebuildingSet" => format!(" {}", decode::<RebuildingSetRequest>(body).rebuilding),
            "ReplicaExpand" => format!(" {}", decode::<ReplicaExpandRequest>(body).size),
            "DiskMarkAsRemoved" => format!(" {}", decode::<DiskMarkAsRemovedRequest>(body).name),
            "ControllerReplicaCreate" => {
                let request: ControllerReplicaCreateRequest = decode(body);
                format!(" {:?} snapshot={}", request.mode(), request.snapshot_required)
            }
            "VolumeStart" => {
                let request: VolumeStartRequest = decode(body);
                let count = request.replica_addresses.len();
                format!(" {count} {}/{}", request.current_size, request.size)
            }
            "VolumeSnapshot" => {
                let request: VolumeSnapshotRequest = decode(body);
                let labels: BTreeMap<_, _> = request.labels.into_iter().collect();
                format!(" {:?} {labels:?} {}", request.name, request.freeze_filesystem)
            }
            "SnapshotHash" => {
                let request: SnapshotHashRequest = decode(body);
                format!(" {} {}", request.snapshot_name, request.rehash)
            }
            "FilesSync" => {
                let request: FilesSyncRequest = decode(body);
                let mut from: Vec<_> =
                    request.from_address_map.keys().map(|from| self.name_of(from)).collect();
                from.sort();
                assert!(request.from_address_map.contains_key(&request.from_address));
                format!(
                    " from={} files={} fast={} http={} grpc={} to={}",
                    from.join(","),
                    request.sync_file_info_list.len(),
                    request.fast_sync,
                    request.file_sync_http_client_timeout,
                    request.grpc_timeout_seconds,
                    request.to_host
                )
            }
            "SnapshotClone" => {
                let request: SnapshotCloneRequest = decode(body);
                let from = self.name_of(&request.from_address);
                format!(
                    " {} of {} from {from}",
                    request.snapshot_file_name, request.from_volume_name
                )
            }
            _ => String::new(),
        }
    }

    fn name_of(&self, address: &str) -> String {
        let index = self.order.iter().position(|known| known == address);
        index.map_or_else(|| address.to_owned(), |index| format!("r{index}"))
    }

    fn at(&mut self, index: usize) -> &mut Pretender {
        let address = self.order[index].clone();
        self.replicas.get_mut(&address).unwrap()
    }

    fn controller(&mut self, method: &str, body: &[u8]) -> Result<Vec<u8>, Status> {
        let listed = |(address, mode): &(String, ReplicaMode)| ControllerReplica {
            address: Some(ReplicaAddress { address: address.clone(), ..Default::default() }),
            mode: (*mode).into(),
        };
        let find = |world: &mut Self, address: &str, mode: Option<ReplicaMode>| {
            let found = world.listed.iter_mut().find(|(known, _)| known == address);
            let found = found.ok_or_else(|| Status::not_found(format!("no {address}")))?;
            found.1 = mode.unwrap_or(found.1);
            Ok::<_, Status>(listed(found))
        };
        let count = self.listed.len() as i32;
        let volume = Volume { replica_count: count, ..self.volume.clone() };
        Ok(match method {
            "VolumeStart" => {
                let request: VolumeStartRequest = decode(body);
                let new = request.replica_addresses.into_iter();
                self.listed.extend(new.map(|address| (address, ReplicaMode::Rw)));
                volume.encode_to_vec()
            }
            "VolumeSnapshot" => {
                let name = decode::<VolumeSnapshotRequest>(body).name;
                let name = if name.is_empty() { "made-up".to_owned() } else { name };
                VolumeSnapshotReply { name }.encode_to_vec()
            }
            "ReplicaList" => {
                let replicas = self.listed.iter().map(listed).collect();
                ReplicaListReply { replicas }.encode_to_vec()
            }
            "ControllerReplicaCreate" => {
                let request: ControllerReplicaCreateRequest = decode(body);
                let mode = request.mode();
                self.listed.push((request.address.clone(), mode));
                self.replicas.get_mut(&request.address).unwrap().replica.state = "open".to_owned();
                find(self, &request.address, None)?.encode_to_vec()
            }
            "ReplicaDelete" => {
                let address = decode::<ReplicaAddress>(body).address;
                self.listed.retain(|(known, _)| *known != address);
                Vec::new()
            }
            "ReplicaUpdate" => {
                let request: ControllerReplica = decode(body);
                let mode = request.mode();
                find(self, &request.address.unwrap().address, Some(mode))?.encode_to_vec()
            }
            "ReplicaPrepareRebuild" => {
                let sync_file_info_list = self.files.clone();
                ReplicaPrepareRebuildReply { replica: None, sync_file_info_list }.encode_to_vec()
            }
            "ReplicaVerifyRebuild" => {
                let address = decode::<ReplicaAddress>(body).address;
                if let Some(Pretender { replica, .. }) = self.replicas.get_mut(&address) {
                    // Of upstream's, whoever filled it says so.
                    replica.rebuilding &= replica.dbs.is_none();
                }
                find(self, &address, Some(ReplicaMode::Rw))?.encode_to_vec()
            }
            "ReplicaRebuildConcurrentSyncLimitGet" => {
                let limit = self.limit;
                ReplicaRebuildConcurrentSyncLimitGetReply { limit }.encode_to_vec()
            }
            "VersionDetailGet" => {
                let controller_api_version = self.controller_api;
                let version = VersionOutput { controller_api_version, ..Default::default() };
                VersionDetailGetReply { version: Some(version) }.encode_to_vec()
            }
            "JournalList" => Vec::new(),
            _ => volume.encode_to_vec(),
        })
    }
}

impl Pretender {
    fn replica(&mut self, method: &str, body: &[u8]) -> Vec<u8> {
        let replica = &mut self.replica;
        match method {
            "ReplicaOpen" => replica.state = "open".to_owned(),
            "ReplicaClose" => replica.state = "closed".to_owned(),
            "ReplicaExpand" => {
                replica.size = decode::<ReplicaExpandRequest>(body).size.to_string();
            }
            "RebuildingSet" => {
                replica.rebuilding = decode::<RebuildingSetRequest>(body).rebuilding;
            }
            _ => {}
        }
        // All replies have it in the same place.
        ReplicaGetResponse { replica: Some(replica.clone()) }.encode_to_vec()
    }

    fn agent(&self, method: &str) -> Vec<u8> {
        match method {
            "SnapshotPurgeStatus" => self.purge.encode_to_vec(),
            "SnapshotHashStatus" => self.hash.encode_to_vec(),
            "ReplicaRebuildStatus" => self.rebuild.encode_to_vec(),
            "RestoreStatus" => self.restore.encode_to_vec(),
            "SnapshotHashLockState" => {
                SnapshotHashLockStateResponse { is_locked: self.hashing }.encode_to_vec()
            }
            _ => Vec::new(),
        }
    }
}
