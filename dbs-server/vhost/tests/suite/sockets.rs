//! Sockets, and who may connect to them.

use super::{Place, options};
use dbs_core::info::{Holder, HolderKind};
use dbs_frontend::DiskOptions;
use dbs_guest::{Guest, Options, Request};
use dbs_reactor::Driver;
use dbs_vhost::VhostUser;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn sockets_come_and_go_with_what_they_serve() {
    let place = Place::new();
    let directory = place.dir.path().join("vm");
    assert_eq!(names(&directory), ["v.sock"]);
    assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(place.socket("v")).unwrap().mode() & 0o777, 0o600);
    for name in ["a/b", "hidden", &"long".repeat(60)] {
        place.store.create_volume(name, 4096).unwrap();
    }
    for name in ["s", "hidden"] {
        place.store.create_snapshot("v", name, &Default::default()).unwrap();
    }
    place.vhost.follow();
    assert_eq!(names(&directory), ["a%2Fb.sock", "v.sock", "v@s.sock"]);
    place.store.rename_volume("v", "w").unwrap();
    place.store.delete_volume("a/b").unwrap();
    place.vhost.follow();
    assert_eq!(names(&directory), ["w.sock", "w@s.sock"]);
    place.vhost.stop();
    assert!(names(&directory).is_empty());
}

#[test]
fn a_directory_of_others_is_refused_and_so_is_a_live_socket() {
    let place = Place::new();
    let other = place.dir.path().join("other");
    let start = || VhostUser::start(place.store.clone(), other.clone(), options(Driver::Auto));
    fs::create_dir(&other).unwrap();
    fs::set_permissions(&other, PermissionsExt::from_mode(0o750)).unwrap();
    let refused = start().err().unwrap().to_string();
    assert!(refused.contains("not private") && refused.contains("chmod 700"), "{refused}");
    fs::set_permissions(&other, PermissionsExt::from_mode(0o700)).unwrap();
    let live = UnixListener::bind(other.join("v.sock")).unwrap();
    let refused = start().err().unwrap().to_string();
    assert!(refused.contains("another process listens on it"), "{refused}");
    assert!(other.join("v.sock").exists());
    drop(live);
    // Left by servers that were killed: of this volume, and of one that is gone.
    drop(UnixListener::bind(other.join("gone.sock")).unwrap());
    fs::write(other.join("precious.sock"), "").unwrap();
    let server = start().unwrap();
    assert_eq!(names(&other), ["precious.sock", "v.sock"]);
    drop(server);
}

#[test]
fn a_volume_has_one_writer_who_holds_it() {
    let place = Place::new();
    let first = place.guest(&Options::default());
    let holder = &place.store.holders()[0];
    assert!(holder.holder.who.contains("v.sock (process"), "{}", holder.holder.who);
    assert!(place.store.delete_volume("v").is_err());
    let begun = Instant::now();
    assert!(Guest::connect(&place.socket("v"), &Options::default()).is_err());
    assert!(begun.elapsed() > Duration::from_secs(4), "the first has its time to go");
    // One that goes makes room for one that waits.
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| place.guest(&Options::default()));
        std::thread::sleep(Duration::from_millis(200));
        drop(first);
        waits.join().unwrap()
    });
    assert_eq!(place.vhost.clients().len(), 1);
    let id = place.vhost.clients()[0].id;
    assert!(place.vhost.kick(id) && !place.vhost.kick(id));
    assert!(place.store.holders().is_empty());
    drop(waits);
    place.store.delete_volume("v").unwrap();
}

/// Found by review: an NBD client that had come for writing before the machine went on beside it.
#[test]
fn a_machine_does_not_write_beside_who_writes_already() {
    let place = Place::new();
    let nbd = || Holder {
        kind: HolderKind::Nbd,
        who: "NBD client".to_owned(),
        id: Some(7),
        writes: true,
        alone: false,
        remedy: "disconnect it".to_owned(),
    };
    let writer = place.store.volume_for("v", nbd()).unwrap();
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| Guest::connect(&place.socket("v"), &Options::default()));
        std::thread::sleep(Duration::from_millis(200));
        // Who waits keeps nobody from writing.
        assert!(place.store.holders().iter().all(|held| !held.holder.alone));
        assert!(refused.join().unwrap().is_err());
    });
    // One that is just going is waited for.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| place.guest(&Options::default()));
        std::thread::sleep(Duration::from_millis(200));
        drop(writer);
        waits.join().unwrap()
    });
    // Nor is one overlooked whose volume gets another name meanwhile.
    let writer = place.store.volume_for("v", nbd()).unwrap();
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| Guest::connect(&place.socket("v"), &Options::default()));
        std::thread::sleep(Duration::from_millis(200));
        place.store.rename_volume("v", "w").unwrap();
        assert!(refused.join().unwrap().is_err());
    });
    drop(writer);
}

/// Found by review: it is by the name that a machine comes again when the server is started anew.
#[test]
fn what_a_machine_has_keeps_its_name() {
    let place = Place::new();
    for name in ["s", "t"] {
        place.store.create_snapshot("v", name, &Default::default()).unwrap();
    }
    place.vhost.follow();
    let refused = |result: dbs_core::Result<()>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), dbs_core::ErrorKind::Busy);
        let text = error.to_string();
        assert!(text.contains(".sock (process") && text.contains("shut it down first"), "{text}");
    };
    let writes = place.guest(&Options::default());
    refused(place.store.rename_volume("v", "w"));
    // What has a socket of its own is not concerned.
    place.store.rename_snapshot("v", "t", "u").unwrap();
    drop(writes);
    let reads = Guest::connect(&place.socket("v@s"), &Options::default()).unwrap();
    refused(place.store.rename_volume("v", "w"));
    refused(place.store.rename_snapshot("v", "s", "w"));
    place.store.rename_snapshot("v", "u", "t").unwrap();
    assert!(place.vhost.kick(place.vhost.clients()[0].id));
    drop(reads);
    place.store.rename_snapshot("v", "s", "w").unwrap();
    place.store.rename_volume("v", "w").unwrap();
}

/// Found by review: a machine got the volume that had the name by the time it was opened.
#[test]
fn a_machine_does_not_get_another_volume_that_takes_the_name() {
    let place = Place::new();
    place.store.create_volume("w", 4096).unwrap();
    let (store, directory) = (place.store.clone(), place.dir.path().join("other"));
    let armed = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&armed);
    let serving = DiskOptions {
        // It is asked when a machine comes.
        access: Box::new(move |_, _| {
            if now.swap(false, Ordering::SeqCst) {
                store.rename_volume("v", "x").unwrap();
                store.rename_volume("w", "v").unwrap();
            }
            Some(false)
        }),
        ..options(Driver::Auto)
    };
    let _server = VhostUser::start(place.store.clone(), directory.clone(), serving).unwrap();
    armed.store(true, Ordering::SeqCst);
    assert!(Guest::connect(&directory.join("v.sock"), &Options::default()).is_err());
    assert!(!armed.load(Ordering::SeqCst));
    // What has the name now may be had by it.
    Guest::connect(&directory.join("v.sock"), &Options::default()).unwrap();
}

#[test]
fn what_may_only_be_read_is_not_written() {
    let place = Place::new();
    place.store.create_volume("read", 1 << 20).unwrap();
    place.vhost.follow();
    let mut guest = Guest::connect(&place.socket("read"), &Options::default()).unwrap();
    let queue = &mut guest.queues[0];
    assert_eq!(queue.run(&Request::write(0, vec![1; 4096])).unwrap().0, 1);
    assert_eq!(queue.run(&Request::read(0, 4096)).unwrap(), (0, vec![0; 4096]));
}

/// Each queue takes six descriptors, each volume and snapshot one.
#[test]
fn the_server_opens_as_many_files_as_it_may() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most - 1, most).unwrap();
    let _place = Place::new();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    assert_eq!(soft, hard);
}

#[test]
fn a_server_that_stops_answers_what_is_under_way() {
    let place = Place::new();
    let mut guest = place.guest(&Options::default());
    let queue = &mut guest.queues[0];
    for index in 0..64 {
        queue.add(&Request::write(index * 4096, vec![index as u8; 4096]));
    }
    queue.tell();
    assert!(queue.wait(Duration::from_secs(60)));
    place.vhost.stop();
    let mut answered = 0;
    while let Some((head, _)) = queue.take() {
        assert_eq!(queue.end(head).1, 0);
        answered += 1;
    }
    assert!(answered > 0);
    assert!(place.store.holders().is_empty());
}
