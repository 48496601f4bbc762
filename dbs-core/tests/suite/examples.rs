//! The programs of `examples/` do what they say.

use dbs_core::{InitOptions, OpenOptions, SnapshotOptions, Store};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

#[allow(dead_code, reason = "its main function")]
#[path = "../../examples/backup.rs"]
mod backup;
#[allow(dead_code, reason = "its main function")]
#[path = "../../examples/block_server.rs"]
mod block_server;
#[allow(dead_code, reason = "its main function")]
#[path = "../../examples/inspect.rs"]
mod inspect;

const SIZE: u64 = 8 << 20;

/// A store with a volume of two snapshots, of which the second has other data and zeros where the first has data.
fn store(path: &Path) -> Store {
    Store::init(path, &InitOptions { size: Some(64 << 20), ..InitOptions::default() }).unwrap();
    let store = Store::open(path, &OpenOptions::default()).unwrap();
    store.create_volume("v", SIZE).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &vec![1; 3 << 20], false).unwrap();
    store.create_snapshot("v", "monday", &SnapshotOptions::default()).unwrap();
    volume.write_at(1 << 20, &vec![2; 4096], false).unwrap();
    volume.discard(2 << 20, 8192).unwrap();
    volume.write_at(SIZE - 512, &[3; 512], false).unwrap();
    store.create_snapshot("v", "tuesday", &SnapshotOptions::default()).unwrap();
    store
}

fn content(store: &Store, spec: &str) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    store.volume(spec).unwrap().read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn the_backup_tool_copies_all_and_then_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    let file = dir.path().join("file");
    let all = backup::backup(&store, "v", None, "monday", &file).unwrap();
    assert_eq!(all, 3 << 20);
    assert!(std::fs::read(&file).unwrap() == content(&store, "v@monday"));
    let changed = backup::backup(&store, "v", Some("monday"), "tuesday", &file).unwrap();
    assert_eq!(changed, 4 * 4096);
    assert!(std::fs::read(&file).unwrap() == content(&store, "v@tuesday"));
}

#[test]
fn the_block_server_serves_nbd_clients() {
    if Command::new("nbdcopy").arg("--version").output().is_err() {
        println!("SKIPPED: needs nbdcopy (libnbd-bin)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let before = content(&store, "v");
    let [source, copy] = ["source", "copy"].map(|name| dir.path().join(name));
    std::fs::write(&source, vec![9; SIZE as usize]).unwrap();
    let copies = [(uri.as_ref(), copy.as_os_str()), (source.as_os_str(), uri.as_ref())];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let serve = |client| block_server::serve(&store.volume("v").unwrap(), client);
            // A client that leaves without a word is the last one.
            while serve(listener.accept().unwrap().0).is_ok() {}
        });
        let ended = copies
            .map(|(from, to)| Command::new("nbdcopy").arg("--flush").args([from, to]).status());
        drop(UnixStream::connect(&socket));
        for status in ended {
            assert!(status.unwrap().success());
        }
    });
    assert!(std::fs::read(&copy).unwrap() == before);
    assert!(content(&store, "v").iter().all(|byte| *byte == 9));
}

#[test]
fn the_inspector_tells_of_all_volumes_and_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    store.clone_volume("v", "monday", "other").unwrap();
    let text = inspect::inspect(&store).unwrap();
    for told in [
        "64.0 MiB free",
        "  v: 8.0 MiB, ",
        "on v@tuesday",
        "    @monday: ",
        "  other: ",
        "0 findings",
    ] {
        assert!(text.contains(told), "no `{told}` in:\n{text}");
    }
}
