//! `ControllerService` of a controller whose replicas, data path and frontend only pretend: what reaches
//! them and what is answered, who may call, and what else is on the port. Steered with our own command line
//! as well.

use dbs_core::{Error, Result};
use longhorn::client::Engine;
use longhorn_controller::path::{JournalEntry, PathStats, ReplicaStats};
use longhorn_controller::rules::call_timeout::CallTimeout;
use longhorn_controller::rules::limits::Limits;
use longhorn_controller::rules::start::Policy;
use longhorn_controller::rules::{Mode, ReplicaId};
use longhorn_controller::service::{metrics_text, serve};
use longhorn_controller::volume::{
    Call, CallError, Called, Controller, DataPath, Frontend, Frontends, Host, Offer, Options,
    Parts, Paused, RebuildStatus, Relay, Replicas, Target,
};
use longhorn_wire::control::{ControlServer, Identity};
use longhorn_wire::names::snapshot_disk;
use longhorn_wire::proto::controller::controller_service_client::ControllerServiceClient;
use longhorn_wire::proto::controller::*;
use longhorn_wire::proto::health::health_check_response::ServingStatus;
use longhorn_wire::proto::health::health_client::HealthClient;
use longhorn_wire::proto::health::{HealthCheckRequest, HealthListRequest};
use longhorn_wire::proto::ptypes::{DiskInfo, Replica};
use longhorn_wire::remote::{Address, calls_of};
use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::net::TcpListener;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tonic::Code;

const HEAD: &str = "volume-head-000.img";

/// Replicas by their addresses, a data path, a frontend and a machine. They do what they are told, and note it.
#[derive(Default)]
struct Fake {
    asked: Mutex<Vec<String>>,
    replicas: Mutex<HashMap<String, Replica>>,
    is_up: AtomicBool,
    /// Whether a file system that is mounted can be frozen.
    mounted: Mutex<Option<bool>>,
    /// It is thawed before it should be.
    thaws: AtomicBool,
    /// Since the last pause.
    flushed: AtomicBool,
}

impl Fake {
    fn note(&self, what: impl Into<String>) {
        self.asked.lock().unwrap().push(what.into());
    }

    /// What was noted since the last call.
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    /// What a replica does with a call.
    fn called(&self, target: &Target, call: Call) -> Replica {
        if call != Call::Get {
            self.note(format!("{} {call:?}", whom(target)));
        }
        let mut replicas = self.replicas.lock().unwrap();
        let replica = replicas.entry(target.address.clone()).or_insert_with(|| Replica {
            state: "closed".to_owned(),
            size: "8192".to_owned(),
            sector_size: 512,
            revision_counter_disabled: true,
            chain: vec![HEAD.to_owned()],
            ..Replica::default()
        });
        match call {
            Call::Open { .. } => replica.state = "open".to_owned(),
            Call::Close => replica.state = "closed".to_owned(),
            Call::Snapshot { name, .. } => {
                let disk = DiskInfo { size: "4096".to_owned(), ..DiskInfo::default() };
                replica.disks.insert(snapshot_disk(&name), disk);
            }
            Call::Expand(size) => replica.size = size.to_string(),
            _ => {}
        }
        replica.clone()
    }
}

/// A replica as it is called: by its address, and by who it is meant to be if that is said.
fn whom(target: &Target) -> String {
    match &target.instance[..] {
        "" => target.address.clone(),
        instance => format!("{} ({instance})", target.address),
    }
}

impl Replicas for Fake {
    fn call_all(&self, calls: Vec<(Target, Call)>, _: Option<CallTimeout>) -> Vec<Called> {
        calls.into_iter().map(|(target, call)| Ok(self.called(&target, call))).collect()
    }

    fn copy_file(
        &self,
        (from, _): (&Target, &str),
        (to, name): (&Target, &str),
    ) -> std::result::Result<(), CallError> {
        self.note(format!("{} to {}: {name}", whom(from), whom(to)));
        Ok(())
    }

    fn rebuild_status(&self, of: &Target) -> std::result::Result<RebuildStatus, CallError> {
        self.note(format!("status of {}", whom(of)));
        Ok(RebuildStatus::default())
    }

    fn close_soon(&self, target: &Target) {
        self.called(target, Call::Close);
    }
}

struct Still {
    holds: bool,
}

impl Paused for Still {
    fn holds(&self) -> bool {
        self.holds
    }
}

impl DataPath for Fake {
    fn connect(&self, _: ReplicaId, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn set_mode(&self, _: ReplicaId, _: Mode) -> bool {
        true
    }

    fn remove(&self, _: ReplicaId) {}

    fn flush(&self) {
        self.flushed.store(true, Ordering::SeqCst);
    }

    fn pause(&self, _: bool) -> Box<dyn Paused + '_> {
        assert!(
            self.flushed.swap(false, Ordering::SeqCst),
            "all that was written is flushed in the pause"
        );
        Box::new(Still { holds: true })
    }

    fn resize(&self, _: u64) {}

    fn set_expanding(&self, _: bool) {}

    fn stats(&self) -> PathStats {
        PathStats {
            requests: [5, 6, 0, 0],
            bytes: [1, 4096, 0, 0],
            errors: [0, 3, 0, 0],
            time: [0, 1500, 0, 0].map(Duration::from_millis),
            retries: 2,
            replicas: vec![ReplicaStats {
                id: 1,
                name: "tcp://a:1".to_owned(),
                mode: Mode::Rw,
                flushes: false,
                why: None,
                mismatches: 3,
                healed: 2,
                reconnected: 7,
            }],
            ..PathStats::default()
        }
    }

    fn journal(&self, limit: i64) -> Vec<JournalEntry> {
        self.note(format!("journal {limit}"));
        Vec::new()
    }
}

impl Host for Fake {
    fn now_ns(&self) -> u64 {
        1_000_000_000
    }

    fn unique_name(&self) -> String {
        "made-up".to_owned()
    }

    fn log(&self, _: bool, _: &str, _: &[(&str, &dyn Display)]) {}

    fn sync(&self) -> Result<()> {
        self.note("sync");
        Ok(())
    }

    fn freeze(&self, device: &str) -> Result<Option<Box<dyn Paused>>> {
        self.note(format!("freeze {device:?}"));
        match *self.mounted.lock().unwrap() {
            None => Ok(None),
            Some(true) => {
                let holds = !self.thaws.load(Ordering::SeqCst);
                Ok(Some(Box::new(Still { holds })))
            }
            Some(false) => Err(Error::busy("it hangs")),
        }
    }
}

struct FakeFrontend(Arc<Fake>);

impl Frontend for FakeFrontend {
    fn name(&self) -> &str {
        "socket"
    }

    fn endpoint(&self) -> String {
        "here".to_owned()
    }

    fn is_up(&self) -> bool {
        self.0.is_up.load(Ordering::SeqCst)
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        self.0.note(format!("start {} bytes", offer.size));
        self.0.is_up.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn expand(&self, size: u64) -> Result<()> {
        self.0.note(format!("show {size} bytes"));
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        self.0.note("stop");
        self.0.is_up.store(false, Ordering::SeqCst);
        Ok(())
    }
}

struct FakeFrontends(Arc<Fake>);

impl Frontends for FakeFrontends {
    fn create(&self, kind: &str) -> Result<Arc<dyn Frontend>> {
        match kind {
            "socket" => Ok(Arc::new(FakeFrontend(Arc::clone(&self.0)))),
            _ => Err(Error::invalid(format!("no frontend {kind}"))),
        }
    }
}

fn controller(fake: &Arc<Fake>) -> Arc<Controller> {
    let options = Options {
        volume: "vol".to_owned(),
        policy: Policy { upgrade: false, counter_disabled: true, salvage: false },
        unmap_mark: false,
        limits: Limits { count: 7, size: 9 },
        sync_limit: 3,
        frontend: None,
        sync_before_snapshot: true,
        short_timeout: Duration::from_secs(8),
    };
    let parts = Parts {
        replicas: Arc::clone(fake) as _,
        path: Arc::clone(fake) as _,
        frontends: Arc::new(FakeFrontends(Arc::clone(fake))),
        host: Arc::clone(fake) as _,
    };
    Controller::new(options, parts, &Relay::default())
}

type Client = ControllerServiceClient<longhorn_wire::remote::Calls>;

struct Served {
    runtime: Runtime,
    fake: Arc<Fake>,
    controller: Arc<Controller>,
    address: String,
    _server: ControlServer,
}

impl Served {
    fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        let fake = Arc::<Fake>::default();
        let controller = controller(&fake);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let identity = Identity::controller("vol", "e-1");
        let server = serve(runtime.handle(), listener, &identity, Arc::clone(&controller)).unwrap();
        let address = server.address().to_string();
        Self { runtime, fake, controller, address, _server: server }
    }

    /// With a replica.
    fn started() -> Self {
        let served = Self::new();
        served.controller.start(&["tcp://a:1".to_owned()], 8192, 8192).unwrap();
        served.fake.asked();
        served
    }

    fn calls(&self, volume: &str, instance: &str) -> longhorn_wire::remote::Calls {
        let _context = self.runtime.enter();
        calls_of(&Address::parse(&self.address).unwrap(), volume, instance).unwrap()
    }

    fn client(&self) -> Client {
        ControllerServiceClient::new(self.calls("vol", "e-1"))
    }
}

#[test]
fn all_calls_are_passed_on() {
    let served = Served::new();
    let mut client = served.client();
    served.runtime.block_on(async {
        let volume = client.volume_get(()).await.unwrap().into_inner();
        assert_eq!((volume.size, volume.snapshot_max_count, volume.snapshot_max_size), (0, 7, 9));
        let request = VolumeStartRequest {
            replica_addresses: vec!["tcp://a:1".to_owned()],
            size: 8192,
            current_size: 4096,
        };
        let started = client.volume_start(request).await.unwrap().into_inner();
        assert_eq!((started.replica_count, started.size), (1, 8192));
        let request = VolumeSnapshotRequest { freeze_filesystem: true, ..Default::default() };
        let reply = client.volume_snapshot(request).await.unwrap().into_inner();
        assert_eq!(reply.name, "made-up");
        let set = VolumeSnapshotMaxCountSetRequest { count: 2 };
        client.volume_snapshot_max_count_set(set).await.unwrap();
        let set = VolumeSnapshotMaxSizeSetRequest { size: 3 };
        let volume = client.volume_snapshot_max_size_set(set).await.unwrap().into_inner();
        assert_eq!((volume.snapshot_max_count, volume.snapshot_max_size), (2, 3));
        let set = ReplicaRebuildConcurrentSyncLimitSetRequest { limit: 4 };
        client.replica_rebuild_concurrent_sync_limit_set(set).await.unwrap();
        let limit = client.replica_rebuild_concurrent_sync_limit_get(()).await.unwrap();
        assert_eq!(limit.into_inner().limit, 4);
        served.controller.tick();
        let metrics = client.metrics_get(()).await.unwrap().into_inner().metrics.unwrap();
        assert_eq!((metrics.read_throughput, metrics.write_iops), (1, 6));
        client.volume_shutdown(()).await.unwrap();
        let io = client.volume_io(VolumeIoRequest::default()).await.unwrap_err();
        assert_eq!(io.code(), Code::Unimplemented);
    });
    assert_eq!(
        served.fake.asked(),
        [
            "tcp://a:1 Open { upgrade: false, expected_size: 4096 }",
            "freeze \"\"",
            "sync",
            "tcp://a:1 Snapshot { name: \"made-up\", user_created: true, \
             created: \"1970-01-01T00:00:01Z\", labels: {} }",
            "tcp://a:1 SetSnapshotMaxCount(2)",
            "tcp://a:1 SetSnapshotMaxSize(3)",
            "tcp://a:1 Close",
        ]
    );
}

/// A snapshot that was to be of frozen file systems is that, or is not taken.
#[test]
fn a_file_system_that_cannot_be_frozen_is_an_error_to_who_asked() {
    let served = Served::started();
    let mut client = served.client();
    let mut snapshot = |name: &str, freeze_filesystem| {
        served.fake.asked();
        let request = VolumeSnapshotRequest {
            name: name.to_owned(),
            freeze_filesystem,
            ..Default::default()
        };
        let taken = served.runtime.block_on(client.volume_snapshot(request));
        let asked = served.fake.asked();
        let what = |asked: &String| asked.split(' ').nth(1).unwrap_or(asked).to_owned();
        (taken.map(drop), asked.iter().map(what).collect::<Vec<_>>().join(" "))
    };
    *served.fake.mounted.lock().unwrap() = Some(false);
    let (taken, asked) = snapshot("a", true);
    let text = taken.unwrap_err().message().to_owned();
    assert!(text.contains("snapshot a is not taken") && text.contains("it hangs"), "{text}");
    assert_eq!(asked, "\"\"");
    assert_eq!(snapshot("b", false).1, "sync Snapshot");
    // Nothing of the machine that is not on the volume is written.
    *served.fake.mounted.lock().unwrap() = Some(true);
    let (taken, asked) = snapshot("c", true);
    taken.unwrap();
    assert_eq!(asked, "\"\" Snapshot");
    // It was frozen, and is not any more when I/O is paused.
    served.fake.thaws.store(true, Ordering::SeqCst);
    let (taken, asked) = snapshot("d", true);
    let text = taken.unwrap_err().message().to_owned();
    assert!(text.contains("snapshot d is not taken") && text.contains("thawed"), "{text}");
    assert_eq!(asked, "\"\"");
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    let served = Served::started();
    let mut client = served.client();
    served.runtime.block_on(async {
        let expand = client.volume_expand(VolumeExpandRequest { size: -1 }).await.unwrap_err();
        let set = VolumeSnapshotMaxSizeSetRequest { size: -1 };
        let size = client.volume_snapshot_max_size_set(set).await.unwrap_err();
        let set = VolumeSnapshotMaxCountSetRequest { count: -1 };
        let count = client.volume_snapshot_max_count_set(set).await.unwrap_err();
        let set = ReplicaRebuildConcurrentSyncLimitSetRequest { limit: 0 };
        let limit = client.replica_rebuild_concurrent_sync_limit_set(set).await.unwrap_err();
        for (refused, text) in [
            (expand, "a size of -1 bytes"),
            (size, "a size of -1 bytes"),
            (count, "a maximum of -1 snapshots"),
            (limit, "invalid concurrent sync limit 0"),
        ] {
            assert_eq!(refused.code(), Code::Unknown);
            assert!(refused.message().starts_with(text), "{refused}");
        }
    });
    assert!(served.fake.asked().is_empty());
}

#[test]
fn replicas_are_answered_with_their_modes() {
    let served = Served::started();
    let mut client = served.client();
    let called = |address: &str, instance: &str| ReplicaAddress {
        address: address.to_owned(),
        instance_name: instance.to_owned(),
    };
    let at = |address| called(address, "r-1");
    served.runtime.block_on(async {
        let request = ControllerReplicaCreateRequest {
            address: "tcp://b:1".to_owned(),
            snapshot_required: true,
            mode: ReplicaMode::Wo.into(),
        };
        let replica = client.controller_replica_create(request).await.unwrap().into_inner();
        assert_eq!(replica.mode(), ReplicaMode::Wo);
        let prepared = client.replica_prepare_rebuild(at("tcp://b:1")).await.unwrap().into_inner();
        let file = &prepared.sync_file_info_list[0];
        assert_eq!((&*file.to_file_name, file.actual_size), ("volume-snap-made-up.img", 4096));
        assert_eq!(prepared.replica.unwrap().address.unwrap().address, "tcp://b:1");
        let verified =
            client.replica_verify_rebuild(called("tcp://b:1", "r-2")).await.unwrap().into_inner();
        assert_eq!(verified.mode(), ReplicaMode::Rw);
        let update =
            ControllerReplica { address: Some(at("tcp://b:1")), mode: ReplicaMode::Err.into() };
        let replica = client.replica_update(update).await.unwrap().into_inner();
        assert_eq!(replica.mode(), ReplicaMode::Err);
        // Neither an unknown mode nor a missing address ends more than the call.
        let update = ControllerReplica { address: Some(at("tcp://b:1")), mode: 3 };
        assert_eq!(client.replica_update(update).await.unwrap_err().code(), Code::InvalidArgument);
        let update = ControllerReplica::default();
        assert_eq!(client.replica_update(update).await.unwrap_err().code(), Code::InvalidArgument);
        let text = "cannot find the replica with address tcp://c:1 in the controller server of";
        let update = ControllerReplica { address: Some(at("tcp://c:1")), mode: 2 };
        for missing in [
            client.replica_get(at("tcp://c:1")).await.unwrap_err(),
            client.replica_update(update).await.unwrap_err(),
        ] {
            assert_eq!(missing.code(), Code::NotFound);
            assert!(missing.message().starts_with(text), "{missing}");
        }
        client.replica_delete(at("tcp://b:1")).await.unwrap();
        let left = client.replica_list(()).await.unwrap().into_inner().replicas;
        assert_eq!((left.len(), left[0].mode()), (1, ReplicaMode::Rw));
    });
    assert_eq!(
        served.fake.asked(),
        [
            "tcp://b:1 Open { upgrade: false, expected_size: 8192 }",
            "tcp://a:1 Snapshot { name: \"made-up\", user_created: false, \
             created: \"1970-01-01T00:00:01Z\", labels: {} }",
            "tcp://b:1 Snapshot { name: \"made-up\", user_created: false, \
             created: \"1970-01-01T00:00:01Z\", labels: {} }",
            "tcp://a:1 to tcp://b:1 (r-1): volume-head-000.img.meta",
            "status of tcp://b:1 (r-2)",
            "tcp://b:1 (r-2) Close",
        ]
    );
}

#[test]
fn callers_that_mean_another_are_refused() {
    let served = Served::new();
    for (volume, instance, text) in [
        ("other", "", "incorrect volume name other; check controller address"),
        ("vol", "e-2", "incorrect instance name e-2; check controller address"),
    ] {
        let calls = served.calls(volume, instance);
        let mut client = ControllerServiceClient::new(calls.clone());
        let refused = served.runtime.block_on(client.volume_shutdown(())).unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, text));
        let mut health = HealthClient::new(calls);
        let check = health.check(HealthCheckRequest::default());
        let refused = served.runtime.block_on(check);
        assert_eq!(refused.unwrap_err().code(), Code::FailedPrecondition);
    }
    assert!(served.fake.asked().is_empty());
}

#[test]
fn health_and_reflection_are_on_the_port() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    let served = Served::new();
    let (mut health, calls) = (HealthClient::new(served.calls("", "")), served.calls("", ""));
    served.runtime.block_on(async {
        let status = health.check(HealthCheckRequest::default()).await.unwrap().into_inner();
        assert_eq!(status.status(), ServingStatus::Serving);
        let listed = health.list(HealthListRequest::default()).await.unwrap().into_inner();
        assert!(listed.statuses.contains_key("grpc"));
        let ask =
            |what| ServerReflectionRequest { host: String::new(), message_request: Some(what) };
        let asked = tokio_stream::iter([
            ask(MessageRequest::ListServices(String::new())),
            ask(MessageRequest::FileContainingSymbol("ptypes.ControllerService".to_owned())),
            // What only a replica offers.
            ask(MessageRequest::FileContainingSymbol("ptypes.ReplicaService".to_owned())),
        ]);
        let mut client = ServerReflectionClient::new(calls);
        let mut replies = client.server_reflection_info(asked).await.unwrap().into_inner();
        let mut next = async || replies.message().await;
        let Some(MessageResponse::ListServicesResponse(list)) =
            next().await.unwrap().unwrap().message_response
        else {
            panic!()
        };
        let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
        for name in ["ptypes.ControllerService", "grpc.health.v1.Health", "profilerrpc.Profiler"] {
            assert!(names.contains(&name), "{names:?}");
        }
        let found = next().await.unwrap().unwrap().message_response;
        assert!(matches!(found, Some(MessageResponse::FileDescriptorResponse(_))));
        assert_eq!(next().await.unwrap_err().code(), Code::NotFound);
    });
}

#[test]
fn errors_keep_their_texts() {
    let served = Served::started();
    served.controller.snapshot("s", HashMap::new(), false).unwrap();
    served.controller.start_frontend("socket").unwrap();
    let _context = served.runtime.enter();
    let engine = Engine::new(&served.address, "vol", "").unwrap();
    let text = served.runtime.block_on(engine.revert("s")).unwrap_err().to_string();
    assert!(
        text.ends_with("code = Unknown desc = volume frontend enabled, aborting snapshot revert"),
        "{text}"
    );
}

#[test]
fn our_command_line_steers_it() {
    let served = Served::started();
    let run = |args: &[&str]| {
        let globals = ["--url", &served.address, "--volume-name", "vol"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_longhorn"));
        let output = command.args(globals).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(run(&["info"]).contains("\"SnapshotMaxSize\": 9\n"));
    assert!(run(&["version"]).contains("\"serverVersion\": {"));
    assert_eq!(run(&["profiler", "show"]), "Profiler is not enabled\n");
    run(&["frontend", "start", "socket"]);
    run(&["expand", "--size", "16384"]);
    let begun = Instant::now();
    while served.controller.volume().is_expanding {
        assert!(begun.elapsed() < Duration::from_secs(120), "the expansion does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    for args in [
        &["frontend", "shutdown"][..],
        &["unmap-mark-snap", "--enable"],
        &["journal", "--limit", "5"],
        &["snapshot", "create", "s", "--label", "a=b"],
    ] {
        run(args);
    }
    assert_eq!(
        served.fake.asked(),
        [
            "start 8192 bytes",
            "sync",
            "tcp://a:1 Expand(16384)",
            "show 16384 bytes",
            "stop",
            "tcp://a:1 SetUnmapMark(true)",
            "journal 5",
            "sync",
            "tcp://a:1 Snapshot { name: \"s\", user_created: true, \
             created: \"1970-01-01T00:00:01Z\", labels: {\"a\": \"b\"} }",
        ]
    );
}

#[test]
fn metrics_name_the_volume_and_its_replicas() {
    let served = Served::started();
    served.controller.start_frontend("socket").unwrap();
    served.controller.update_replica("tcp://a:1", Mode::Err).unwrap();
    let text = metrics_text(&served.controller);
    for line in [
        "dbs_volume_size_bytes{volume=\"vol\"} 8192",
        "dbs_volume_frontend_up{volume=\"vol\"} 1",
        "dbs_volume_replica_mode{volume=\"vol\",replica=\"tcp://a:1\",mode=\"ERR\"} 1",
        "dbs_volume_replica_mode{volume=\"vol\",replica=\"tcp://a:1\",mode=\"RW\"} 0",
        "dbs_volume_requests_total{volume=\"vol\",type=\"read\"} 5",
        "dbs_volume_bytes_total{volume=\"vol\",type=\"write\"} 4096",
        "dbs_volume_request_seconds_total{volume=\"vol\",type=\"write\"} 1.5",
        "dbs_volume_request_errors_total{volume=\"vol\",type=\"write\"} 3",
        "dbs_volume_read_retries_total{volume=\"vol\"} 2",
        "dbs_volume_replica_faults_total{volume=\"vol\",reason=\"request\"} 1",
        "dbs_volume_replica_faults_total{volume=\"vol\",reason=\"snapshot\"} 0",
        "dbs_volume_checksum_mismatches_total{volume=\"vol\",replica=\"tcp://a:1\"} 3",
        "dbs_volume_healed_total{volume=\"vol\",replica=\"tcp://a:1\"} 2",
        "dbs_volume_reconnects_total{volume=\"vol\",replica=\"tcp://a:1\"} 7",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    let alerts = include_str!("../../../../contrib/prometheus-alerts.yaml");
    let (_, alerts) = alerts.split_once("name: longhorn").unwrap();
    let words = alerts.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    for name in words.filter(|word| word.starts_with("dbs_")) {
        assert!(text.contains(&format!("# TYPE {name} ")), "{name} is in contrib, and not served");
    }
}
