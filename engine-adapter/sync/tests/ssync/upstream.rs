//! Our sender and receiver with upstream's own, both ways. Needs `LONGHORN_BIN`, a stock `longhorn`
//! binary: run as `ssync` it is upstream's transfer tool, as `sync-agent` the service a replica uses.

use crate::support::{
    Receiver, assert_same, change_file, options, put_record, random_file, send_to,
};
use longhorn_sync::image::{HashOptions, Record, Source, SparseFile, hash};
use longhorn_sync::ssync::{Received, SendOptions};
use longhorn_wire::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use longhorn_wire::proto::ptypes::{
    FileSendRequest, ReceiverLaunchRequest, SnapshotHashRequest, SnapshotHashStatusRequest,
};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::tempdir;
use tonic::transport::Channel;

const MIB: u64 = 1024 * 1024;

/// The stock binary, or a word why the test is skipped.
fn stock() -> Option<PathBuf> {
    let path = std::env::var_os("LONGHORN_BIN").map(PathBuf::from);
    if path.is_none() {
        println!("skipped: LONGHORN_BIN names no stock longhorn binary");
    }
    path
}

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Upstream's receiver for a file.
fn stock_receiver(bin: &Path, file: &Path) -> (Process, u16) {
    let port = free_port();
    let mut command = Command::new(bin);
    command.arg0("ssync").args(["-daemon", "-port"]).arg(port.to_string()).arg(file);
    (Process(command.stderr(Stdio::null()).spawn().unwrap()), port)
}

/// Runs upstream's sender.
async fn stock_send(bin: &Path, port: u16, file: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(bin);
    command.arg0("ssync").args(["-host", "127.0.0.1", "-port"]).arg(port.to_string());
    command.args(flags).arg(file);
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn file(path: &Path) -> SparseFile {
    SparseFile::source(path).unwrap()
}

fn wait_for_end(process: &mut Process) {
    let until = Instant::now() + Duration::from_secs(20);
    while process.0.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "the stock receiver stays");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn we_send_and_upstream_receives() {
    let Some(bin) = stock() else { return };
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a.img"), dir.path().join("b.img"));
    random_file(&from, 31, 64 * MIB, 80);
    // New, unchanged, and changed in places and in size.
    for round in 0..3 {
        if round == 2 {
            random_file(&from, 31, 80 * MIB, 78);
            change_file(&from, &mut fastrand::Rng::with_seed(32), 3);
        }
        let (mut receiver, port) = stock_receiver(&bin, &to);
        let sent = send_to(port, Arc::new(file(&from)), options()).await.unwrap();
        wait_for_end(&mut receiver);
        assert_same(&file(&from), &file(&to));
        assert_eq!((sent.existed, sent.written == 0), (round > 0, round == 1), "{sent:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upstream_sends_and_we_receive() {
    let Some(bin) = stock() else { return };
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a.img"), dir.path().join("b.img"));
    random_file(&from, 33, 64 * MIB, 80);
    for round in 0..3 {
        if round == 2 {
            random_file(&from, 33, 48 * MIB, 78);
            change_file(&from, &mut fastrand::Rng::with_seed(34), 3);
        }
        let receiver = Receiver::start(Arc::new(SparseFile::sink(&to)));
        let progress = Arc::clone(&receiver.progress);
        let output = stock_send(&bin, receiver.port, &from, &["-httpRetry"]).await;
        assert!(output.status.success(), "{output:?}");
        assert_eq!(receiver.ended().await, Received::Closed { opened: true });
        assert_same(&file(&from), &file(&to));
        assert!(progress.load(std::sync::atomic::Ordering::Relaxed) > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checksum_travels_both_ways_and_spares_the_next_transfer() {
    let Some(bin) = stock() else { return };
    let dir = tempdir().unwrap();
    let (from, to) = (dir.path().join("a.img"), dir.path().join("b.img"));
    random_file(&from, 35, 16 * MIB, 20);
    let value = hash(&file(&from), &QUIET).unwrap();
    // Upstream compares its file's change time with the text it wrote itself, so that a record made
    // by us is not current for it: let it make one by receiving a file with a checksum.
    let checksum = put_record(&from, &value);
    let ours = SendOptions { checksum: Some(checksum.clone()), fast_sync: true, ..options() };
    for round in 0..2 {
        let (mut receiver, port) = stock_receiver(&bin, &to);
        let sent = send_to(port, Arc::new(file(&from)), ours.clone()).await.unwrap();
        wait_for_end(&mut receiver);
        assert_eq!(sent.skipped, round == 1);
    }
    assert_eq!(Record::load(&to).unwrap().unwrap().checksum, value);
    // Back again: upstream knows its checksum, we record it and are not sent anything twice.
    let third = dir.path().join("c.img");
    for round in 0..2 {
        let receiver = Receiver::start(Arc::new(SparseFile::sink(&third)));
        let output = stock_send(&bin, receiver.port, &to, &[]).await;
        assert!(output.status.success(), "{output:?}");
        assert_eq!(receiver.ended().await, Received::Closed { opened: round == 0 });
    }
    assert_eq!(Record::load(&third).unwrap().unwrap().to_checksum(), checksum);
    assert_same(&file(&from), &file(&third));
}

const QUIET: HashOptions<'static> =
    HashOptions { threads: 2, cancelled: &|| false, progress: &|_| {} };

/// A stock sync agent working in `dir`.
async fn stock_agent(bin: &Path, dir: &Path) -> (Process, SyncAgentServiceClient<Channel>) {
    let (port, receivers) = (free_port(), free_port());
    let mut command = Command::new(bin);
    command.args(["--volume-name", "v", "sync-agent", "--listen"]);
    command.arg(format!("127.0.0.1:{port}"));
    command.args(["--replica", "127.0.0.1:1", "--listen-port-range"]);
    command.arg(format!("{receivers}-{}", receivers + 7)).current_dir(dir).stderr(Stdio::null());
    // Where it keeps its locks, seen through `/host`.
    command.env("LONGHORN_CONTROL_PATH", dir);
    let process = Process(command.spawn().unwrap());
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match SyncAgentServiceClient::connect(format!("http://127.0.0.1:{port}")).await {
            Ok(client) => return (process, client),
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_and_descriptions_travel_through_a_stock_agent() {
    let Some(bin) = stock() else { return };
    let dir = tempdir().unwrap();
    let (_process, mut agent) = stock_agent(&bin, dir.path()).await;
    let from = dir.path().join("volume-snap-a.img");
    random_file(&from, 37, 32 * MIB, 40);
    let text = "{\"Name\":\"volume-head-000.img\",\"Parent\":\"\",\"Labels\":null}\n";
    std::fs::write(dir.path().join("volume-snap-a.img.meta"), text).unwrap();
    // From the agent to us.
    let ours = dir.path().join("ours.img");
    let meta = Arc::new(longhorn_sync::image::Bytes::default());
    for (name, sink) in [
        (
            "volume-snap-a.img",
            Arc::new(SparseFile::sink(&ours)) as Arc<dyn longhorn_sync::image::Sink>,
        ),
        ("volume-snap-a.img.meta", Arc::clone(&meta) as _),
    ] {
        let receiver = Receiver::start(sink);
        let request = FileSendRequest {
            from_file_name: name.into(),
            host: "127.0.0.1".into(),
            port: receiver.port.into(),
            fast_sync: true,
            file_sync_http_client_timeout: 5,
        };
        agent.file_send(request).await.unwrap();
        assert_eq!(receiver.ended().await, Received::Closed { opened: true });
    }
    assert_same(&file(&from), &file(&ours));
    assert_eq!(meta.finished().unwrap(), text.as_bytes());
    // From us to the agent.
    for (name, source, direct_io) in [
        ("volume-snap-b.img", Arc::new(file(&ours)) as Arc<dyn Source>, true),
        ("volume-snap-b.img.meta", meta as _, false),
    ] {
        let request = ReceiverLaunchRequest { to_file_name: name.into() };
        let port = agent.receiver_launch(request).await.unwrap().into_inner().port;
        let options = SendOptions { direct_io, ..options() };
        send_to(port.try_into().unwrap(), source, options).await.unwrap();
    }
    assert_same(&file(&from), &file(&dir.path().join("volume-snap-b.img")));
    let copy = std::fs::read(dir.path().join("volume-snap-b.img.meta")).unwrap();
    assert_eq!(copy, text.as_bytes());
}

/// Removes what a stock agent with this control path leaves under `/host`.
struct HostDirectory(PathBuf);

impl Drop for HostDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        // Then what is empty above it.
        let mut above = self.0.parent();
        while let Some(path) = above.filter(|path| std::fs::remove_dir(path).is_ok()) {
            above = path.parent();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_hash_is_upstreams() {
    let Some(bin) = stock() else { return };
    let dir = tempdir().unwrap();
    let host = PathBuf::from(format!("/host{}", dir.path().display()));
    if std::fs::create_dir_all(&host).is_err() {
        println!("skipped: a stock agent keeps its locks under /host, which cannot be made");
        return;
    }
    let _host = HostDirectory(host);
    let (_process, mut agent) = stock_agent(&bin, dir.path()).await;
    for (name, size, runs) in [("a", 70 * MIB, 60), ("b", 9 * MIB, 0)] {
        let path = dir.path().join(format!("volume-snap-{name}.img"));
        random_file(&path, 39, size, runs);
        let request = SnapshotHashRequest { snapshot_name: name.into(), rehash: false };
        agent.snapshot_hash(request).await.unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let theirs = loop {
            let request = SnapshotHashStatusRequest { snapshot_name: name.into() };
            let status = agent.snapshot_hash_status(request).await.unwrap().into_inner();
            if status.state == "complete" {
                break status.checksum;
            }
            assert!(Instant::now() < until, "{status:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        assert_eq!(hash(&file(&path), &QUIET).unwrap(), theirs);
        // Its record is one for us, and ours has the fields of its.
        assert_eq!(Record::load(&path).unwrap().unwrap().checksum, theirs);
    }
}
