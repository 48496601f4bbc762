//! Who may call, health, reflection, profiler, and the server's end, over real sockets.

use crate::support::*;
use longhorn_wire::control::Identity;
use longhorn_wire::proto::health::HealthCheckRequest;
use longhorn_wire::proto::health::HealthListRequest;
use longhorn_wire::proto::health::health_client::HealthClient;
use longhorn_wire::proto::profilerrpc::profiler_client::ProfilerClient;
use longhorn_wire::proto::profilerrpc::{Op, ProfilerOpRequest};
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio_stream::StreamExt;
use tonic::{Code, Request, Status};

fn with<T>(body: T, metadata: &[(&'static str, &'static str)]) -> Request<T> {
    let mut request = Request::new(body);
    for (key, value) in metadata {
        request.metadata_mut().append(*key, value.parse().unwrap());
    }
    request
}

type Pairs = &'static [(&'static str, &'static str)];

/// Metadata, and the refusal it meets.
const CALLERS: [(Pairs, Option<&str>); 9] = [
    (&[], None),
    (&[("volume-name", "vol")], None),
    (&[("volume-name", "other")], Some("incorrect volume name other; check replica address")),
    (&[("volume-name", "")], None),
    (&[("volume-name", "other"), ("volume-name", "vol")], None),
    (&[("instance-name", "vol-r-1")], None),
    (&[("instance-name", "x")], Some("incorrect instance name x; check replica address")),
    (
        &[("volume-name", "other"), ("instance-name", "x")],
        Some("incorrect volume name other; check replica address"),
    ),
    (
        &[("volume-name", "vol"), ("instance-name", "x")],
        Some("incorrect instance name x; check replica address"),
    ),
];

fn check(metadata: &[(&str, &str)], outcome: Result<(), Status>, refusal: Option<&str>) {
    match (outcome, refusal) {
        (Ok(()), None) => {}
        (Err(status), Some(text)) => {
            assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, text));
        }
        (outcome, refusal) => panic!("{metadata:?}: {outcome:?} instead of {refusal:?}"),
    }
}

#[test]
fn callers_who_mean_another_replica_are_refused_by_every_service() {
    let bench = Bench::new();
    let channel = bench.channel();
    let mut replica = ReplicaServiceClient::new(channel.clone());
    let mut health = HealthClient::new(channel.clone());
    let mut profiler = ProfilerClient::new(channel);
    for (metadata, refusal) in CALLERS {
        bench.block_on(async {
            let got = replica.replica_get(with((), metadata)).await.map(|_| ());
            check(metadata, got, refusal);
            let request = HealthCheckRequest { service: String::new() };
            let got = health.check(with(request.clone(), metadata)).await.map(|_| ());
            check(metadata, got, refusal);
            let got = health.list(with(HealthListRequest {}, metadata)).await.map(|_| ());
            check(metadata, got, refusal);
            let show = ProfilerOpRequest { request_op: Op::Show.into(), port_number: 0 };
            let got = profiler.profiler_op(with(show, metadata)).await.map(|_| ());
            check(metadata, got, refusal);
            // Streams are not checked, as upstream's are not.
            health.watch(with(request, metadata)).await.unwrap();
        });
    }
    // A refused call does nothing.
    let create = longhorn_wire::proto::ptypes::ReplicaCreateRequest { size: SIZE.to_string() };
    let refused = bench
        .block_on(replica.replica_create(with(create, &[("volume-name", "other")])))
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(bench.get().state, "initial");
}

#[test]
fn who_does_not_know_its_name_asks_for_none() {
    let bench = Bench::new();
    let runtime = runtime();
    let server = serve(&runtime, &bench.replica, &Identity::replica("", ""));
    let mut client = ReplicaServiceClient::new(channel(&runtime, &server));
    let metadata: &[_] = &[("volume-name", "x"), ("instance-name", "y")];
    runtime.block_on(client.replica_get(with((), metadata))).unwrap();
}

#[test]
fn health_is_serving_under_all_its_names() {
    let bench = Bench::new();
    let mut health = HealthClient::new(bench.channel());
    bench.block_on(async {
        let request = HealthCheckRequest { service: String::new() };
        assert_eq!(health.check(request.clone()).await.unwrap().into_inner().status, 1);
        let list = health.list(HealthListRequest {}).await.unwrap().into_inner();
        let list: Vec<_> = list.statuses.into_iter().map(|(k, v)| (k, v.status)).collect();
        assert_eq!(list, [("grpc".to_owned(), 1)]);
        let mut watch = health.watch(request).await.unwrap().into_inner();
        assert_eq!(watch.next().await.unwrap().unwrap().status, 1);
    });
}

#[test]
fn the_profiler_says_that_it_is_off() {
    let bench = Bench::new();
    let mut profiler = ProfilerClient::new(bench.channel());
    let mut ask = |op: i32| {
        let request = ProfilerOpRequest { request_op: op, port_number: 0 };
        bench.block_on(profiler.profiler_op(request)).map(|reply| reply.into_inner().profiler_addr)
    };
    assert_eq!(ask(Op::Show.into()).unwrap(), "");
    assert_eq!(ask(Op::Disable.into()).unwrap(), "");
    assert_eq!(ask(Op::Enable.into()).unwrap_err().code(), Code::Unimplemented);
    assert_eq!(ask(77).unwrap_err().code(), Code::InvalidArgument);
}

/// Asks reflection in one of its versions.
macro_rules! reflect {
    ($bench:expr, $version:ident, $request:expr) => {{
        use tonic_reflection::pb::$version::ServerReflectionRequest;
        use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
        use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
        let mut client = ServerReflectionClient::new($bench.channel());
        let ask: fn(String) -> MessageRequest = $request;
        let list = $bench.block_on(async {
            let requests = ["", "ptypes.ReplicaService", "google.protobuf.Empty"].map(|symbol| {
                let message_request = Some(match symbol {
                    "" => ask(String::new()),
                    symbol => MessageRequest::FileContainingSymbol(symbol.to_owned()),
                });
                ServerReflectionRequest { host: String::new(), message_request }
            });
            let replies =
                client.server_reflection_info(tokio_stream::iter(requests)).await.unwrap();
            let replies: Vec<_> = replies.into_inner().collect().await;
            let mut replies = replies.into_iter().map(|r| r.unwrap().message_response.unwrap());
            let Some(MessageResponse::ListServicesResponse(list)) = replies.next() else {
                panic!("no list");
            };
            for reply in replies {
                let MessageResponse::FileDescriptorResponse(files) = reply else {
                    panic!("no file: {reply:?}");
                };
                assert!(!files.file_descriptor_proto.is_empty());
            }
            list.service.into_iter().map(|service| service.name).collect::<BTreeSet<_>>()
        });
        list
    }};
}

#[test]
fn reflection_lists_what_is_served_in_both_versions() {
    let bench = Bench::new();
    let expected: BTreeSet<_> = [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "profilerrpc.Profiler",
        "ptypes.ReplicaService",
    ]
    .map(str::to_owned)
    .into();
    assert_eq!(reflect!(bench, v1, MessageRequest::ListServices), expected);
    assert_eq!(reflect!(bench, v1alpha, MessageRequest::ListServices), expected);
}

#[test]
fn a_server_ends_gracefully_and_frees_its_port() {
    let bench = Bench::new();
    let runtime = runtime();
    let server = serve(&runtime, &bench.replica, &Identity::replica("vol", ""));
    let address = server.address();
    let mut client = ReplicaServiceClient::new(channel(&runtime, &server));
    runtime.block_on(client.replica_get(())).unwrap();
    assert!(server.is_running());
    assert!(server.stop(Duration::from_secs(120)), "an idle connection does not hold it up");
    runtime.block_on(client.replica_get(())).unwrap_err();
    let again = std::net::TcpListener::bind(address).unwrap();
    drop(again);

    // Dropped without a word, it ends as well.
    let server = serve(&runtime, &bench.replica, &Identity::replica("vol", ""));
    let address = server.address();
    drop(server);
    let until = std::time::Instant::now() + Duration::from_secs(120);
    while std::net::TcpListener::bind(address).is_err() {
        assert!(std::time::Instant::now() < until, "the port is still taken");
        std::thread::sleep(Duration::from_millis(5));
    }
}
