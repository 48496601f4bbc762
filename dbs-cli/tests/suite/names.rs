//! Names that are used again between what a command has looked at and what it then does: by another client, who comes
//! first. Nothing of another volume or snapshot is destroyed.

use crate::support::{Place, noise};
use dbs_control::api::{self, Progress, Request};
use dbs_control::{Server, Service, socket_path};
use dbs_core::{Error, OpenOptions, Result, Store, TailPlace};
use serde_json::Value;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

/// What another client does.
type Other = Box<dyn FnOnce(&Store) + Send>;

/// A server of a store that another client is quicker than.
struct Raced {
    store: Store,
    /// Done before the next command that takes content away.
    other: Mutex<Option<Other>>,
    /// Knows names alone, as servers of earlier versions.
    older: bool,
}

impl Service for Raced {
    fn key(&self) -> Result<String> {
        Ok(self.store.key().unwrap())
    }

    fn execute(
        &self,
        request: &Request,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Value> {
        let by_name = request.by_name().is_some();
        let means = by_name || matches!(request, Request::VolumeDelete { rebuilding: true, .. });
        if self.older && means {
            return Err(Error::invalid("no request: unknown field `uuid`, expected `volume`"));
        }
        if request.leaves_work()
            && let Some(other) = self.other.lock().unwrap().take()
        {
            other(&self.store);
        }
        api::execute(&self.store, request, progress)
    }

    fn dump(&self, out: &mut dyn Write) -> Result<()> {
        self.store.dump(out)
    }

    fn nbd(&self, _: UnixStream) {}
}

/// Runs a command while another client is quicker; how it ended, and what it told.
fn race(
    command: &str,
    older: bool,
    before: impl FnOnce(&Store),
    other: impl FnOnce(&Store) + Send + 'static,
    after: impl FnOnce(&Store),
) -> (i32, String) {
    let place = Place::with_store();
    std::fs::write(place.path("image"), noise(1, 1 << 20)).unwrap();
    let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    let store = Store::open(&place.store(), &options).unwrap();
    before(&store);
    let socket = socket_path(&place.path("run"), &store.key().unwrap());
    let other: Other = Box::new(other);
    let raced = Raced { store: store.clone(), other: Mutex::new(Some(other)), older };
    let server = Server::start(&socket, Arc::new(raced)).unwrap();
    let run = place.dbs(&format!("--yes {command}"));
    server.stop();
    after(&store);
    (run.code, run.stderr)
}

/// Makes the volume `v`, with content in its snapshot `s` and other content since.
fn make(store: &Store, byte: u8) {
    store.create_volume("v", 8 << 20).unwrap();
    let write = |byte| store.volume("v").unwrap().write_at(0, &[byte; 4096], false).unwrap();
    write(byte);
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    write(byte + 1);
}

/// Found by review: `delete` of a volume that was made anew in between deleted the new one, with exit code 0.
#[test]
fn nothing_is_destroyed_that_was_made_anew_under_the_name() {
    for command in
        ["volume delete v", "volume resize v 1MiB", "snapshot delete v@s", "snapshot rollback v@s"]
    {
        let again = |store: &Store| {
            store.delete_volume("v").unwrap();
            make(store, 3);
        };
        let untouched = |store: &Store| {
            assert_eq!(store.volume_size("v").unwrap(), 8 << 20, "{command}");
            let first = |spec| {
                let mut sector = [0; 512];
                store.volume(spec).unwrap().read_at(0, &mut sector).unwrap();
                sector[0]
            };
            assert_eq!((first("v@s"), first("v")), (3, 4), "{command}");
        };
        let (code, told) = race(command, false, |store| make(store, 1), again, untouched);
        assert!(code == 10 && told.contains("something else has the name now"), "{code} {told}");
    }
}

/// Found by review: it was done by name whatever the volume was by then, also a complete one.
#[test]
fn an_import_that_begins_again_replaces_no_volume_that_is_complete_by_now() {
    let begin = |store: &Store| drop(store.create_rebuilding("v", 4096).unwrap());
    let end = |store: &Store| store.set_rebuilding("v", false).unwrap();
    let there = |store: &Store| assert_eq!(store.volume_size("v").unwrap(), 4096);
    let (code, told) = race("volume import v image --restart", false, begin, end, there);
    assert!(code == 13 && told.contains("`v` is complete by now"), "{code} {told}");
    // Nor does an older server, which could not tell, do so.
    let (code, told) = race("volume import v image --restart", true, begin, end, there);
    assert!(code == 1 && told.contains("older than this program: restart it"), "{code} {told}");
}

#[test]
fn an_older_server_that_knows_names_alone_is_used_as_before() {
    for command in
        ["volume delete v", "volume resize v 1MiB", "snapshot delete v@s", "snapshot rollback v@s"]
    {
        let (code, told) = race(command, true, |store| make(store, 1), |_| (), |_| ());
        assert_eq!(code, 0, "{command}: {told}");
    }
    let gone = |store: &Store| assert!(store.volumes(false).is_empty());
    race("volume delete v", true, |store| make(store, 1), |_| (), gone);
}
