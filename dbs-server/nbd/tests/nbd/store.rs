//! A store's volumes and snapshots over NBD.

use crate::support::pattern;
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, OpenOptions, Store, TailPlace};
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::wire::cmd_flag;
use dbs_nbd::{
    Client, ClientOptions, Export, Exports, Extent, Listen, Peer, ServerHandle, ServerOptions,
    StoreExports, start,
};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

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
