//! `longhorn sync-agent` by itself: served by the process of its replica, or of its store.

use crate::support::*;
use dbs_core::{InitOptions, OpenOptions, Store};
use dbs_server::serve::{Extension, ServeOptions, Serving};
use longhorn_data::DataOptions;
use longhorn_replica::host::hosting::Hosting;
use longhorn_wire::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// An agent alone, in the replica's directory.
fn agent(place: &Place, name: &str) -> Process {
    let mut command = place.program();
    command.current_dir(place.replica(name));
    command.args(["--volume-name", "vol", "sync-agent", "--listen", "127.0.0.1:0"]);
    // Few of them are likely to be in use elsewhere.
    let first = 30_000 + fastrand::u16(0..2000);
    let range = format!("{first}-{}", first + 50);
    command.args(["--listen-port-range", &range, "--replica", "127.0.0.1:1"]);
    Process::spawn(command)
}

/// Whether the agent at this address does not purge, asked in the name of a volume.
fn ask(address: &str, volume: &str) -> Result<bool, Status> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap().timeout(TIMEOUT);
    runtime.block_on(async {
        let mut client = SyncAgentServiceClient::new(endpoint.connect_lazy());
        let mut request = Request::new(());
        request.metadata_mut().insert("volume-name", volume.parse().unwrap());
        client.snapshot_purge_status(request).await.map(|reply| !reply.into_inner().is_purging)
    })
}

/// What holds of an agent, whoever serves its replica.
fn check_agents(place: &Place) {
    let mut first = agent(place, "r").ready();
    let address = first.field("agent");
    assert!(ask(&address, "vol").unwrap());
    assert_eq!(ask(&address, "other").unwrap_err().code(), Code::FailedPrecondition);
    let mut second = agent(place, "r");
    assert_eq!(second.wait().code(), Some(1));
    assert!(second.log().contains("has a sync agent already"), "{}", second.log());
    first.stop();
    assert!(ask(&address, "vol").is_err());
}

#[test]
fn an_agent_of_a_replica_on_its_own_store() {
    let place = Place::new();
    std::fs::create_dir_all(place.replica("r")).unwrap();
    let mut early = agent(&place, "r");
    assert_eq!(early.wait().code(), Some(1));
    assert!(early.log().contains("no replica is served"), "{}", early.log());
    let mut replica = place.start("r", &["--size", "64mb", "--sync-agent=false"]);
    check_agents(&place);
    let mut killed = agent(&place, "r").ready();
    killed.kill();
    let mut last = loop {
        // It takes a moment until the end of the killed one is seen.
        let mut next = agent(&place, "r");
        if next.wait_for("event=").contains("event=ready") {
            break next;
        }
        next.wait();
    };
    assert!(ask(&last.field("agent"), "vol").unwrap());
    replica.stop();
    assert_eq!(last.wait().code(), Some(1), "it ends with its replica");
    // One that has an agent wants no other.
    let _replica = place.start("r", &["--size", "64mb"]);
    let mut other = agent(&place, "r");
    assert_eq!(other.wait().code(), Some(1));
}

/// A store and its server, in this process.
fn serve(place: &Place, store: &Path) -> Serving {
    Store::init(store, &InitOptions { size: Some(1 << 30), ..InitOptions::default() }).unwrap();
    let options = ServeOptions {
        store: store.to_owned(),
        open: OpenOptions::default(),
        nbd: Vec::new(),
        inherited: Vec::new(),
        exports: Default::default(),
        vhost_user: None,
        nvme: Default::default(),
        tls: None,
        reactors: Some(1),
        spin: Duration::ZERO,
        workers: 2,
        access: Default::default(),
        runtime_dir: place.runtime_dir(),
        control: None,
        commit_interval: Duration::from_secs(1),
    };
    let extend = |store: &Store| -> dbs_core::Result<Arc<dyn Extension>> {
        let data = DataOptions { reactors: 1, workers: 2, ..DataOptions::default() };
        Ok(Hosting::start(store.clone(), data, Duration::from_secs(60))?)
    };
    Serving::start_with(&options, Some(&extend)).unwrap()
}

#[test]
fn an_agent_of_a_replica_in_a_shared_store() {
    let place = Place::new();
    let store = place.path().join("store.dbs");
    let server = serve(&place, &store);
    let path = store.to_str().unwrap().to_owned();
    let flags = ["--size", "64mb", "--sync-agent=false", "--store", path.as_str()];
    let mut replica = place.start("r", &flags);
    check_agents(&place);
    let mut last = agent(&place, "r").ready();
    assert!(ask(&last.field("agent"), "vol").unwrap());
    // Both end with the server.
    server.stop().unwrap();
    assert_eq!((last.wait().code(), replica.wait().code()), (Some(1), Some(1)));
}
