//! A store's volumes and snapshots over NBD.

use crate::support::{eventually, pattern};
use dbs_core::info::VolumeLimits;
use dbs_core::io::queue::Action;
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, OpenOptions, Store, TailPlace};
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::wire::cmd_flag;
use dbs_nbd::{
    Buffered, Client, ClientOptions, Export, Exports, Extent, Listen, Peer, Pipeline, ServerHandle,
    ServerOptions, StoreExports, start,
};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn new_store(dir: &Path) -> Store {
    let path = dir.join("store");
    let options = InitOptions { size: Some(128 * MIB), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    Store::open(&path, &options).unwrap()
}

fn serve(store: &Store, dir: &Path, read_only: bool) -> ServerHandle {
    let exports = Arc::new(StoreExports::new(store.clone(), read_only));
    start(&[Listen::Unix(dir.join("nbd"))], exports, ServerOptions::default()).unwrap()
}

fn connect(dir: &Path, name: &str) -> Client<UnixStream> {
    let contexts = vec![BASE_ALLOCATION.into(), "dbs:diff:one".into(), "dbs:diff:none".into()];
    let options = ClientOptions { contexts, extended: true };
    Client::connect_unix(&dir.join("nbd"), name, &options).unwrap()
}

fn read(client: &mut Client<UnixStream>) -> Vec<u8> {
    let mut content = vec![0; client.size() as usize];
    client.read_at(0, &mut content).unwrap();
    content
}

fn extents<const N: usize>(list: [(u64, u32); N]) -> Vec<Extent> {
    list.into_iter().map(|(length, flags)| Extent { length, flags }).collect()
}

#[test]
fn volumes_and_snapshots_are_exports() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let store = new_store(dir);
    store.create_volume("vol", 16 * MIB).unwrap();
    let server = serve(&store, dir, false);

    let mut head = connect(dir, "");
    assert_eq!((head.size(), head.read_only()), (16 * MIB, false));
    assert_eq!(head.contexts().collect::<Vec<_>>(), [BASE_ALLOCATION]);
    head.write_at(MIB, &pattern(1, 2 * MIB as usize), false).unwrap();
    head.write_at(512, &pattern(2, 512), true).unwrap();
    head.write_zeroes(MIB, 4096, cmd_flag::FAST_ZERO).unwrap();
    head.flush().unwrap();
    let before = read(&mut head);
    let status = head.block_status(BASE_ALLOCATION, 0, 16 * MIB).unwrap();
    assert_eq!(status, extents([(4096, 0), (MIB, 3), (2 * MIB - 4096, 0), (13 * MIB, 3)]));

    store.create_snapshot("vol", "one", &SnapshotOptions::default()).unwrap();
    head.write_at(2 * MIB, &[9; 8192], false).unwrap();
    head.trim(0, 4096, true).unwrap();
    drop(head);

    let mut head = connect(dir, "vol");
    let diff = head.block_status("dbs:diff:one", 0, 16 * MIB).unwrap();
    let same = 2 * MIB - 4096;
    assert_eq!(diff, extents([(4096, 2), (same, 0), (8192, 1), (14 * MIB - 8192, 0)]));
    let mut snapshot = connect(dir, "vol@one");
    assert!(snapshot.read_only());
    assert!(read(&mut snapshot) == before);
    assert!(snapshot.write_at(0, &[0; 512], false).is_err());
    snapshot.flush().unwrap();
    let diff = snapshot.block_status("dbs:diff:one", 0, 16 * MIB).unwrap();
    assert_eq!(diff, extents([(16 * MIB, 0)]));

    let list = Client::list(UnixStream::connect(dir.join("nbd")).unwrap()).unwrap();
    let names: Vec<_> = list.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["vol", "vol@one"]);
    store.create_volume("second", MIB).unwrap();
    let options = ClientOptions::default();
    let error = Client::connect_unix(&dir.join("nbd"), "", &options).unwrap_err();
    assert!(error.to_string().contains("2 volumes"), "{error}");
    server.stop();
    store.close().unwrap();
}

#[test]
fn a_difference_stays_one_to_the_snapshot_that_was_selected() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let store = new_store(dir);
    let snapshot = |spec: &str| {
        let (volume, name) = spec.split_once('@').unwrap();
        store.create_snapshot(volume, name, &SnapshotOptions::default()).unwrap();
    };
    store.create_volume("vol", MIB).unwrap();
    let server = serve(&store, dir, false);
    let mut head = connect(dir, "vol");
    head.write_at(0, &[1; 4096], false).unwrap();
    drop(head);
    snapshot("vol@one");
    let mut head = connect(dir, "vol");
    head.write_at(8192, &[2; 4096], false).unwrap();
    let right = extents([(8192, 0), (4096, 1), (MIB - 12288, 0)]);
    let mut is_right = |what: &str| {
        assert_eq!(head.block_status("dbs:diff:one", 0, MIB).unwrap(), right, "{what}");
    };
    is_right("at first");
    store.rename_snapshot("vol", "one", "old").unwrap();
    is_right("renamed");
    snapshot("vol@one");
    is_right("another has the name");
    store.rename_volume("vol", "gone").unwrap();
    store.create_volume("vol", MIB).unwrap();
    snapshot("vol@one");
    is_right("the volume was renamed, and another has its name");
    store.delete_snapshot("gone", "old").unwrap();
    assert!(head.block_status("dbs:diff:one", 0, MIB).is_err(), "it was deleted");
    server.stop();
}

#[test]
fn a_read_only_server_refuses_writes_and_a_full_store_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let store = new_store(dir);
    store.create_volume("vol", 1024 * MIB).unwrap();
    let server = serve(&store, dir, false);
    let mut client = connect(dir, "vol");
    let full =
        (0..256).find_map(|index| client.write_at(index * MIB, &[1; MIB as usize], false).err());
    assert_eq!(full.unwrap().kind(), std::io::ErrorKind::StorageFull);
    client.trim(0, 512 * MIB, true).unwrap();
    drop(client);
    server.stop();

    let server = serve(&store, dir, true);
    let mut client = connect(dir, "vol");
    assert!(client.read_only());
    let refused = client.write_at(0, &[1; 512], false).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    server.stop();
    let exports = StoreExports::new(store, false);
    let export: Arc<dyn Export> = exports.open("vol", &Peer::default()).unwrap();
    assert_eq!(export.name(), "vol");
}

/// So much that a limit of 4 KiB/s needs more than an hour for it.
const DEBT_BYTES: usize = 16 << 20;
const LONG: Duration = Duration::from_secs(120);

/// A store with a volume whose limits are used up for long, and a volume without limits; and its server.
fn limited(dir: &Path) -> (Store, ServerHandle) {
    let store = new_store(dir);
    store.create_volume("slow", DEBT_BYTES as u64).unwrap();
    store.create_volume("free", MIB).unwrap();
    let limits = VolumeLimits { bandwidth: 4096, ..VolumeLimits::default() };
    store.set_limits("slow", limits).unwrap();
    let server = serve(&store, dir, false);
    connect(dir, "slow").write_at(0, &vec![7; DEBT_BYTES], false).unwrap();
    (store, server)
}

/// Runs a job on a thread; what it returns, or nothing if it takes too long.
fn in_time<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(job()));
    receiver
}

/// Waits until so many requests of `slow` have been taken and not answered.
fn wait_until_held(server: &ServerHandle, count: u64) {
    eventually("held", || {
        let clients = server.clients().into_iter();
        clients.filter(|c| c.export.as_deref() == Some("slow")).map(|c| c.in_flight).sum::<u64>()
            == count
    });
}

#[test]
fn a_limit_delays_one_volume_until_it_is_raised() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let (store, server) = limited(&path);
    let mut slow = connect(&path, "slow");
    slow.flush().unwrap();
    let answered = in_time(move || {
        slow.write_at(0, &[1; 4096], false).unwrap();
        slow.read_at(0, &mut [0; 4096]).unwrap();
        slow.trim(0, 4096, false).unwrap();
    });
    wait_until_held(&server, 1);
    let mut free = connect(&path, "free");
    free.write_at(0, &[2; 4096], true).unwrap();
    assert!(answered.try_recv().is_err(), "not delayed");
    store.set_limits("slow", VolumeLimits::default()).unwrap();
    answered.recv_timeout(LONG).unwrap();
    let io = store.volume_io().into_iter().find(|(info, _)| info.name == "slow").unwrap().1;
    assert_eq!(io.delayed, 1);
    assert!(io.delayed_ns > 0);
    drop(free);
    server.stop();
}

#[test]
fn requests_come_no_faster_than_their_limit() {
    let dir = tempfile::tempdir().unwrap();
    let store = new_store(dir.path());
    store.create_volume("slow", MIB).unwrap();
    store.set_limits("slow", VolumeLimits { iops: 50, ..VolumeLimits::default() }).unwrap();
    let server = serve(&store, dir.path(), false);
    let mut slow = connect(dir.path(), "slow");
    let begun = Instant::now();
    for round in 0..11 {
        if round % 2 == 0 {
            slow.read_at(0, &mut [0; 4096]).unwrap();
        } else {
            slow.write_at(0, &[1; 4096], false).unwrap();
        }
    }
    // 20 ms each, but for the first one, and 10 ms of credit.
    assert!(begun.elapsed() >= Duration::from_millis(190), "{:?}", begun.elapsed());
    drop(slow);
    server.stop();
}

#[test]
fn who_goes_and_who_stops_wait_for_no_limit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let (store, server) = limited(&path);
    let held = |count: usize| {
        let options = ClientOptions::default();
        let stream = Buffered::new(UnixStream::connect(path.join("nbd")).unwrap());
        let client = Client::over(stream, "slow", &options).unwrap();
        let mut pipeline = Pipeline::new(client, count, 4096).unwrap();
        for slot in 0..count {
            pipeline.start(slot, Action::Write, 4096 * slot as u64, 4096).unwrap();
        }
        let done = in_time(move || pipeline.finish(&mut Vec::new()).is_ok());
        wait_until_held(&server, count as u64);
        done
    };
    let done = held(8);
    let id = server.clients().into_iter().find(|client| client.in_flight == 8).unwrap().id;
    server.kick(id).unwrap();
    done.recv_timeout(LONG).unwrap();
    eventually("gone", || server.clients().is_empty());
    let mut block = [0; 4096];
    store.volume("slow").unwrap().read_at(0, &mut block).unwrap();
    assert!(block == [7; 4096], "a write that nobody waits for was carried out");
    let done = held(8);
    in_time(move || server.stop()).recv_timeout(LONG).unwrap();
    assert!(done.recv_timeout(LONG).unwrap(), "what the server had taken is answered");
    store.close().unwrap();
}
