//! `ControllerService` over a controller that only pretends: what it passes on and what it answers, who
//! may call, and what else is on the port. Steered with our own command line as well.

use dbs_core::{Error, Result};
use longhorn::client::Engine;
use longhorn_controller::service::{Control, Counters, DamageCount, metrics_text, serve};
use longhorn_wire::control::{ControlServer, Identity};
use longhorn_wire::proto::controller::controller_service_client::ControllerServiceClient;
use longhorn_wire::proto::controller::*;
use longhorn_wire::proto::health::health_check_response::ServingStatus;
use longhorn_wire::proto::health::health_client::HealthClient;
use longhorn_wire::proto::health::{HealthCheckRequest, HealthListRequest};
use longhorn_wire::proto::ptypes::SyncFileInfo;
use longhorn_wire::remote::{Address, calls_of};
use std::collections::HashMap;
use std::net::TcpListener;
use std::process::Command;
use std::sync::{Arc, Mutex};
use tokio::runtime::Runtime;
use tonic::Code;

#[derive(Default)]
struct Fake {
    asked: Mutex<Vec<String>>,
    replicas: Mutex<Vec<(String, ReplicaMode)>>,
    refuses: Mutex<Option<&'static str>>,
}

impl Fake {
    fn ask(&self, what: String) -> Result<()> {
        self.asked.lock().unwrap().push(what);
        match *self.refuses.lock().unwrap() {
            Some(text) => Err(Error::invalid(text)),
            None => Ok(()),
        }
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

impl Control for Fake {
    fn volume(&self) -> Volume {
        let replica_count = self.replicas.lock().unwrap().len() as i32;
        Volume {
            name: "vol".to_owned(),
            size: 8192,
            replica_count,
            frontend_state: "up".to_owned(),
            snapshot_max_count: 7,
            snapshot_max_size: 9,
            ..Volume::default()
        }
    }

    fn start(&self, replicas: &[String], size: i64, current_size: i64) -> Result<()> {
        let new = replicas.iter().map(|address| (address.clone(), ReplicaMode::Rw));
        self.replicas.lock().unwrap().extend(new);
        self.ask(format!("start {replicas:?} {size} {current_size}"))
    }

    fn shutdown(&self) -> Result<()> {
        self.ask("shutdown".to_owned())
    }

    fn snapshot(
        &self,
        name: &str,
        labels: HashMap<String, String>,
        freeze: bool,
    ) -> Result<String> {
        self.ask(format!("snapshot {name:?} {labels:?} {freeze}"))?;
        Ok(if name.is_empty() { "made-up".to_owned() } else { name.to_owned() })
    }

    fn revert(&self, snapshot: &str) -> Result<()> {
        self.ask(format!("revert {snapshot}"))
    }

    fn expand(&self, size: i64) -> Result<()> {
        self.ask(format!("expand {size}"))
    }

    fn start_frontend(&self, frontend: &str) -> Result<()> {
        self.ask(format!("start_frontend {frontend}"))
    }

    fn shutdown_frontend(&self) -> Result<()> {
        self.ask("shutdown_frontend".to_owned())
    }

    fn set_unmap_mark(&self, enabled: bool) -> Result<()> {
        self.ask(format!("set_unmap_mark {enabled}"))
    }

    fn set_snapshot_max_count(&self, count: i32) -> Result<()> {
        self.ask(format!("set_snapshot_max_count {count}"))
    }

    fn set_snapshot_max_size(&self, size: i64) -> Result<()> {
        self.ask(format!("set_snapshot_max_size {size}"))
    }

    fn replicas(&self) -> Vec<(String, ReplicaMode)> {
        self.replicas.lock().unwrap().clone()
    }

    fn create_replica(&self, address: &str, snapshot: bool, mode: ReplicaMode) -> Result<()> {
        self.ask(format!("create_replica {address} {snapshot} {mode:?}"))?;
        self.replicas.lock().unwrap().push((address.to_owned(), mode));
        Ok(())
    }

    fn delete_replica(&self, address: &str) -> Result<()> {
        self.replicas.lock().unwrap().retain(|(known, _)| known != address);
        self.ask(format!("delete_replica {address}"))
    }

    fn update_replica(&self, address: &str, mode: ReplicaMode) -> Result<()> {
        for (known, its) in &mut *self.replicas.lock().unwrap() {
            if known == address {
                *its = mode;
            }
        }
        self.ask(format!("update_replica {address} {mode:?}"))
    }

    fn prepare_rebuild(&self, address: &str, instance: &str) -> Result<Vec<SyncFileInfo>> {
        self.ask(format!("prepare_rebuild {address} {instance}"))?;
        let name = || "volume-snap-a.img".to_owned();
        Ok(vec![SyncFileInfo { from_file_name: name(), to_file_name: name(), actual_size: 4096 }])
    }

    fn verify_rebuild(&self, address: &str, instance: &str) -> Result<()> {
        self.ask(format!("verify_rebuild {address} {instance}"))
    }

    fn sync_limit(&self) -> i32 {
        3
    }

    fn set_sync_limit(&self, limit: i32) -> Result<()> {
        self.ask(format!("set_sync_limit {limit}"))
    }

    fn journal(&self, limit: i64) {
        self.ask(format!("journal {limit}")).unwrap();
    }

    fn metrics(&self) -> Metrics {
        Metrics { read_throughput: 1, write_iops: 6, ..Metrics::default() }
    }

    fn counters(&self) -> Counters {
        Counters {
            reads: 5,
            write_bytes: 4096,
            write_ns: 1_500_000_000,
            write_errors: 3,
            retries: 2,
            faults: vec![("data", 1), ("snapshot", 0)],
            damage: vec![DamageCount { replica: "tcp://a:1".to_owned(), mismatches: 3, healed: 2 }],
            ..Counters::default()
        }
    }
}

type Client = ControllerServiceClient<longhorn_wire::remote::Calls>;

struct Served {
    runtime: Runtime,
    fake: Arc<Fake>,
    address: String,
    _server: ControlServer,
}

impl Served {
    fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        let fake = Arc::new(Fake::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let identity = Identity::controller("vol", "e-1");
        let control = Arc::<Fake>::clone(&fake);
        let server = serve(runtime.handle(), listener, &identity, control).unwrap();
        let address = server.address().to_string();
        Self { runtime, fake, address, _server: server }
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
        assert_eq!(
            (volume.size, volume.snapshot_max_count, volume.snapshot_max_size),
            (8192, 7, 9)
        );
        let request = VolumeStartRequest {
            replica_addresses: vec!["tcp://a:1".to_owned()],
            size: 8192,
            current_size: 4096,
        };
        assert_eq!(client.volume_start(request).await.unwrap().into_inner().replica_count, 1);
        let request = VolumeSnapshotRequest { freeze_filesystem: true, ..Default::default() };
        let reply = client.volume_snapshot(request).await.unwrap().into_inner();
        assert_eq!(reply.name, "made-up");
        let set = VolumeSnapshotMaxCountSetRequest { count: 2 };
        client.volume_snapshot_max_count_set(set).await.unwrap();
        let set = VolumeSnapshotMaxSizeSetRequest { size: 3 };
        client.volume_snapshot_max_size_set(set).await.unwrap();
        let set = ReplicaRebuildConcurrentSyncLimitSetRequest { limit: 4 };
        client.replica_rebuild_concurrent_sync_limit_set(set).await.unwrap();
        let metrics = client.metrics_get(()).await.unwrap().into_inner().metrics.unwrap();
        assert_eq!((metrics.read_throughput, metrics.write_iops), (1, 6));
        client.volume_shutdown(()).await.unwrap();
        let io = client.volume_io(VolumeIoRequest::default()).await.unwrap_err();
        assert_eq!(io.code(), Code::Unimplemented);
    });
    assert_eq!(
        served.fake.asked(),
        [
            "start [\"tcp://a:1\"] 8192 4096",
            "snapshot \"\" {} true",
            "set_snapshot_max_count 2",
            "set_snapshot_max_size 3",
            "set_sync_limit 4",
            "shutdown",
        ]
    );
}

#[test]
fn replicas_are_answered_with_their_modes() {
    let served = Served::new();
    let mut client = served.client();
    let at = |address: &str| ReplicaAddress {
        address: address.to_owned(),
        instance_name: "r-1".to_owned(),
    };
    served.runtime.block_on(async {
        let request = ControllerReplicaCreateRequest {
            address: "tcp://a:1".to_owned(),
            snapshot_required: true,
            mode: ReplicaMode::Wo.into(),
        };
        let replica = client.controller_replica_create(request).await.unwrap().into_inner();
        assert_eq!(replica.mode(), ReplicaMode::Wo);
        let prepared = client.replica_prepare_rebuild(at("tcp://a:1")).await.unwrap().into_inner();
        assert_eq!(prepared.sync_file_info_list[0].actual_size, 4096);
        assert_eq!(prepared.replica.unwrap().address.unwrap().address, "tcp://a:1");
        client.replica_verify_rebuild(at("tcp://a:1")).await.unwrap();
        let update =
            ControllerReplica { address: Some(at("tcp://a:1")), mode: ReplicaMode::Err.into() };
        let replica = client.replica_update(update).await.unwrap().into_inner();
        assert_eq!(replica.mode(), ReplicaMode::Err);
        // Neither an unknown mode nor a missing address ends more than the call.
        let update = ControllerReplica { address: Some(at("tcp://a:1")), mode: 3 };
        assert_eq!(client.replica_update(update).await.unwrap_err().code(), Code::InvalidArgument);
        let update = ControllerReplica::default();
        assert_eq!(client.replica_update(update).await.unwrap_err().code(), Code::InvalidArgument);
        let missing = client.replica_get(at("tcp://b:1")).await.unwrap_err();
        assert_eq!(missing.code(), Code::NotFound);
        let text = "cannot find the replica with address tcp://b:1 in the controller server of";
        assert!(missing.message().starts_with(text), "{missing}");
        client.replica_delete(at("tcp://a:1")).await.unwrap();
        assert!(client.replica_list(()).await.unwrap().into_inner().replicas.is_empty());
    });
    assert_eq!(
        served.fake.asked(),
        [
            "create_replica tcp://a:1 true Wo",
            "prepare_rebuild tcp://a:1 r-1",
            "verify_rebuild tcp://a:1 r-1",
            "update_replica tcp://a:1 Err",
            "delete_replica tcp://a:1",
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
    let served = Served::new();
    *served.fake.refuses.lock().unwrap() =
        Some("volume frontend enabled, aborting snapshot revert");
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
    let served = Served::new();
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
    for args in [
        &["expand", "--size", "16384"][..],
        &["frontend", "start", "socket"],
        &["frontend", "shutdown"],
        &["unmap-mark-snap", "--enable"],
        &["journal", "--limit", "5"],
        &["snapshot", "create", "s", "--label", "a=b"],
    ] {
        run(args);
    }
    assert_eq!(
        served.fake.asked(),
        [
            "expand 16384",
            "start_frontend socket",
            "shutdown_frontend",
            "set_unmap_mark true",
            "journal 5",
            "snapshot \"s\" {\"a\": \"b\"} false",
        ]
    );
}

#[test]
fn metrics_name_the_volume_and_its_replicas() {
    let fake = Fake::default();
    fake.replicas.lock().unwrap().push(("tcp://a:1".to_owned(), ReplicaMode::Err));
    let text = metrics_text(&fake);
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
        "dbs_volume_replica_faults_total{volume=\"vol\",reason=\"data\"} 1",
        "dbs_volume_replica_faults_total{volume=\"vol\",reason=\"snapshot\"} 0",
        "dbs_volume_checksum_mismatches_total{volume=\"vol\",replica=\"tcp://a:1\"} 3",
        "dbs_volume_healed_total{volume=\"vol\",replica=\"tcp://a:1\"} 2",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
}
