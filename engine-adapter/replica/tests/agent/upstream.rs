//! Rebuild, clone and hashes between a replica of ours and one of upstream's, both ways. Needs
//! `LONGHORN_BIN`, a stock `longhorn` binary.

use crate::support::*;
use dbs_frontend::Listen;
use longhorn_testing::DataClient;
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use longhorn_wire::proto::ptypes::*;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

const SIZE: u64 = 64 * MIB;

fn stock() -> Option<PathBuf> {
    let path = std::env::var_os("LONGHORN_BIN").map(PathBuf::from);
    if path.is_none() {
        println!("skipped: LONGHORN_BIN names no stock longhorn binary");
    }
    path
}

/// A stock replica with its agent, open, as a process of its own.
struct Stock {
    runtime: Arc<Runtime>,
    dir: TempDir,
    process: Child,
    replica: ReplicaServiceClient<Channel>,
    agent: Client,
    data: DataClient,
    address: String,
}

impl Drop for Stock {
    fn drop(&mut self) {
        // It takes its agent along.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The first of ten free ports in a row.
fn ten_ports() -> u16 {
    loop {
        let first = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if first < 60_000 && (first..first + 10).all(free) {
            return first;
        }
    }
}

impl Stock {
    fn start(runtime: &Arc<Runtime>, bin: &PathBuf, volume: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = ten_ports();
        let mut command = Command::new(bin);
        command.args(["--volume-name", volume, "replica"]).arg(dir.path().join("replica"));
        command.args(["--size", &SIZE.to_string(), "--snapshot-max-count", "250"]);
        command.args(["--snapshot-max-size", "0", "--sync-agent-port-count", "7"]);
        command.args(["--listen", &format!("127.0.0.1:{port}")]);
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut replica = ReplicaServiceClient::new(channel(runtime, port));
        let agent = Client::new(channel(runtime, port + 2));
        let open = ReplicaOpenRequest::default();
        wait(|| runtime.block_on(replica.replica_get(())).ok());
        wait(|| runtime.block_on(agent.clone().replica_rebuild_status(())).ok());
        let data = Listen::Tcp("127.0.0.1".to_owned(), port + 1);
        let data = wait(|| DataClient::connect(&data, 2).ok());
        runtime.block_on(replica.replica_open(open)).unwrap();
        let address = format!("tcp://127.0.0.1:{port}");
        let runtime = Arc::clone(runtime);
        Self { runtime, dir, process, replica, agent, data, address }
    }

    fn write(&self, blocks: impl IntoIterator<Item = u64>, seed: u64) {
        for block in blocks {
            self.data.write(block * BLOCK, &content_of(block, seed)).unwrap();
        }
    }

    fn content(&self) -> Vec<u8> {
        let reads = (0..SIZE / MIB).map(|at| self.data.read(at * MIB, MIB as u32).unwrap());
        reads.collect::<Vec<_>>().concat()
    }

    fn snapshot(&self, name: &str, user_created: bool) {
        let (name, created) = (name.to_owned(), NOW.to_owned());
        let request = ReplicaSnapshotRequest { name, user_created, created, ..Default::default() };
        self.runtime.block_on(self.replica.clone().replica_snapshot(request)).unwrap();
    }

    fn mark(&self, name: &str) {
        let request = DiskMarkAsRemovedRequest { name: name.to_owned() };
        self.runtime.block_on(self.replica.clone().disk_mark_as_removed(request)).unwrap();
    }

    fn revert(&self, name: &str) {
        let name = format!("volume-snap-{name}.img");
        let request = ReplicaRevertRequest { name, created: NOW.to_owned(), ..Default::default() };
        self.runtime.block_on(self.replica.clone().replica_revert(request)).unwrap();
    }

    fn get(&self) -> Replica {
        let answer = self.runtime.block_on(self.replica.clone().replica_get(())).unwrap();
        answer.into_inner().replica.unwrap()
    }

    fn rebuilding(&self, rebuilding: bool) {
        let request = RebuildingSetRequest { rebuilding };
        self.runtime.block_on(self.replica.clone().rebuilding_set(request)).unwrap();
    }

    fn reload(&self) {
        self.runtime.block_on(self.replica.clone().replica_reload(())).unwrap();
    }

    fn hashed(&self, name: &str) -> String {
        let snapshot_name = name.to_owned();
        let request = SnapshotHashRequest { snapshot_name: snapshot_name.clone(), rehash: false };
        let mut agent = self.agent.clone();
        self.runtime.block_on(agent.snapshot_hash(request)).unwrap();
        let status = wait(|| {
            let request = SnapshotHashStatusRequest { snapshot_name: snapshot_name.clone() };
            let status = self.runtime.block_on(agent.snapshot_hash_status(request)).unwrap();
            // It does not know the job at once.
            Some(status.into_inner()).filter(|status| status.state == "complete")
        });
        status.checksum
    }
}

fn channel(runtime: &Runtime, port: u16) -> Channel {
    let endpoint = Channel::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        match runtime.block_on(endpoint.connect()) {
            Ok(channel) => return channel,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// As the engine asks for it.
fn request(from: &str, disks: &std::collections::HashMap<String, DiskInfo>) -> FilesSyncRequest {
    let snapshots = disks.values().filter(|disk| disk.name.starts_with("volume-snap-"));
    let files = snapshots.flat_map(|disk| {
        let size = disk.size.parse().unwrap();
        [(disk.name.clone(), size), (format!("{}.meta", disk.name), 0)]
    });
    FilesSyncRequest {
        from_address_map: [(from.to_owned(), true)].into(),
        to_host: "127.0.0.1".to_owned(),
        sync_file_info_list: files
            .map(|(name, actual_size)| SyncFileInfo {
                from_file_name: name.clone(),
                to_file_name: name,
                actual_size,
            })
            .collect(),
        fast_sync: true,
        file_sync_http_client_timeout: 30,
        ..Default::default()
    }
}

/// Copies the description of a head from one agent to the other.
fn copy_head(runtime: &Runtime, from: (&Client, &str), to: (&Client, &str)) {
    let to_file_name = format!("{}.meta", to.1);
    let launched = to.0.clone();
    let port = runtime
        .block_on(async move {
            launched.clone().receiver_launch(ReceiverLaunchRequest { to_file_name }).await
        })
        .unwrap()
        .into_inner()
        .port;
    let send = FileSendRequest {
        from_file_name: format!("{}.meta", from.1),
        host: "127.0.0.1".to_owned(),
        port,
        fast_sync: false,
        file_sync_http_client_timeout: 30,
    };
    let mut client = from.0.clone();
    runtime.block_on(async move { client.file_send(send).await }).unwrap();
}

/// Presence, parents, marks: what both must agree in.
fn tree(replica: &Replica) -> Vec<(String, String, bool, bool)> {
    let named = |name: &str| {
        if *name == replica.head { "head".to_owned() } else { name.to_owned() }
    };
    let mut tree: Vec<_> = replica
        .disks
        .values()
        .map(|disk| (named(&disk.name), disk.parent.clone(), disk.removed, disk.user_created))
        .collect();
    tree.sort();
    tree
}

/// Layers that are worth a test: holes, overwrites, a mark, a side branch.
fn sample(write: &dyn Fn(Vec<u64>, u64), snapshot: &dyn Fn(&str), revert: &dyn Fn(&str)) {
    write((0..3000).step_by(3).collect(), 1);
    snapshot("a");
    write((500..900).collect(), 2);
    snapshot("side");
    revert("a");
    write((10_000..10_200).collect(), 3);
    snapshot("b");
    write((0..100).collect(), 4);
}

#[test]
fn ours_is_rebuilt_from_upstreams() {
    let Some(bin) = stock() else { return };
    let runtime = runtime();
    let source = Stock::start(&runtime, &bin, VOLUME);
    let target = Node::new(&runtime);
    sample(
        &|blocks, seed| source.write(blocks, seed),
        &|name| source.snapshot(name, true),
        &|name| source.revert(name),
    );
    source.mark("side");
    for round in ["now", "again"] {
        source.snapshot(round, false);
        target.system_snapshot(round);
        target.replica.set_rebuilding(true).unwrap();
        let head = target.replica.head_disk().unwrap();
        copy_head(&runtime, (&source.agent, &source.get().head), (&target.client, &head));
        let received = target.agent.traffic().received.load(Ordering::Relaxed);
        let request = request(&source.address, &source.get().disks);
        target.call(|mut c| async move { c.files_sync(request).await }).unwrap();
        target.replica.reload().unwrap();
        target.replica.set_rebuilding(false).unwrap();
        assert_eq!(tree(&target.replica.get().unwrap()), tree(&source.get()));
        assert!(target.content(VOLUME) == source.content());
        for name in target.snapshots() {
            assert_eq!(target.hashed(&name, false).checksum, source.hashed(&name), "{name}");
        }
        let received = target.agent.traffic().received.load(Ordering::Relaxed) - received;
        let most = if round == "now" { 2000 } else { 110 };
        assert!(received > 0 && received <= most * BLOCK, "{round}: {received}");
        assert_eq!(target.rebuild_status().progress, 100);
        // Away for a while.
        source.write(4000..4100, 5);
    }
    assert_eq!(target.store.check().unwrap().findings, []);
}

#[test]
fn upstreams_is_rebuilt_from_ours() {
    let Some(bin) = stock() else { return };
    let runtime = runtime();
    let source = Node::new(&runtime);
    let target = Stock::start(&runtime, &bin, VOLUME);
    sample(&|blocks, seed| source.write(blocks, seed), &|name| source.snapshot(name), &|name| {
        source.replica.revert(&format!("volume-snap-{name}.img"), NOW).unwrap()
    });
    // Zeros that a file can only say as data.
    source.discard(0, 50);
    source.replica.mark_removed("side").unwrap();
    for round in ["now", "again"] {
        source.system_snapshot(round);
        target.snapshot(round, false);
        target.rebuilding(true);
        let head = source.replica.head_disk().unwrap();
        copy_head(&runtime, (&source.client, &head), (&target.agent, &target.get().head));
        let request = request(&source.address, &source.replica.get().unwrap().disks);
        let mut agent = target.agent.clone();
        runtime.block_on(async move { agent.files_sync(request).await }).unwrap();
        target.reload();
        target.rebuilding(false);
        assert_eq!(tree(&target.get()), tree(&source.replica.get().unwrap()));
        assert!(target.content() == source.content(VOLUME));
        for name in source.snapshots() {
            assert_eq!(source.hashed(&name, false).checksum, target.hashed(&name), "{name}");
        }
        source.write(4000..4100, 5);
    }
    assert!(target.dir.path().join("replica/volume-snap-a.img").exists());
}

#[test]
fn clones_go_both_ways() {
    let Some(bin) = stock() else { return };
    let runtime = runtime();
    let (ours, theirs) = (
        Node::with(&runtime, Setup { volume: "one", ..Setup::default() }),
        Stock::start(&runtime, &bin, "two"),
    );
    ours.write((0..500).step_by(2), 1);
    ours.snapshot("x");
    ours.write(100..200, 2);
    ours.snapshot("y");
    theirs.write((1000..1500).step_by(2), 3);
    theirs.snapshot("p", true);
    theirs.write(1100..1200, 4);
    theirs.snapshot("q", true);
    let clone = |from: &str, volume: &str, snapshot: &str| SnapshotCloneRequest {
        from_address: from.to_owned(),
        to_host: "127.0.0.1".to_owned(),
        snapshot_file_name: snapshot.to_owned(),
        file_sync_http_client_timeout: 30,
        from_volume_name: volume.to_owned(),
        ..Default::default()
    };
    let wanted = theirs.content();
    let target = Node::with(&runtime, Setup { volume: "three", ..Setup::default() });
    let request = clone(&theirs.address, "two", "q");
    target.call(|mut c| async move { c.snapshot_clone(request).await }).unwrap();
    assert!(target.content("three") == wanted);
    assert_eq!(target.snapshots(), ["q"]);

    let target = Stock::start(&runtime, &bin, "four");
    let request = clone(&ours.address, "one", "y");
    let mut agent = target.agent.clone();
    runtime.block_on(async move { agent.snapshot_clone(request).await }).unwrap();
    assert!(target.content() == ours.content("one@y"));
}

#[test]
fn a_replica_on_the_same_node_is_copied_from_its_files() {
    let Some(bin) = stock() else { return };
    let runtime = runtime();
    let source = Stock::start(&runtime, &bin, VOLUME);
    // What the target sees under "/host" is the root of this machine.
    let setup = Setup { host: Some(PathBuf::from("/")), ..Setup::default() };
    let target = Node::with(&runtime, setup);
    source.write((0..2000).step_by(3), 1);
    source.snapshot("a", true);
    source.write(100..200, 2);
    source.snapshot("now", false);
    target.system_snapshot("now");
    target.replica.set_rebuilding(true).unwrap();
    let head = target.replica.head_disk().unwrap();
    copy_head(&runtime, (&source.agent, &source.get().head), (&target.client, &head));
    let mut request = request("tcp://127.0.0.1:1", &source.get().disks);
    request.local_sync = Some(FileLocalSync {
        source_path: source.dir.path().join("replica").to_str().unwrap().to_owned(),
        target_path: "/unused".to_owned(),
    });
    target.call(|mut c| async move { c.files_sync(request).await }).unwrap();
    target.replica.reload().unwrap();
    target.replica.set_rebuilding(false).unwrap();
    assert!(target.content(VOLUME) == source.content());
    assert_eq!(target.hashed("a", false).checksum, source.hashed("a"));
}
