//! Volumes that an import or a receive fills: nobody else sees or writes them before they are complete,
//! and what is left of one that was killed can be told, taken up and removed.

use crate::support::{Place, Run, Served, noise};
use dbs_client::any_store::AnyStore;
use dbs_control::api::Request;
use dbs_core::format::crc::crc32c;
use dbs_core::{OpenOptions, Store, TailPlace};
use dbs_nbd::{Buffered, Client, ClientOptions};
use serde_json::json;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(240);

/// `dbs` with an input that stays open after what it was given.
struct Fed {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Fed {
    fn new(place: &Place, store: &str, args: &str, input: &[u8]) -> Self {
        let mut child = place
            .bare()
            .env("DBS_STORE", place.path(store))
            .args(args.split_whitespace())
            .stdin(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // More than a pipe holds: most of it is taken when this returns.
        stdin.write_all(input).unwrap();
        Self { child, stdin: Some(stdin) }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn finish(mut self, rest: &[u8]) -> Option<i32> {
        // One that has failed takes nothing.
        drop(self.stdin.take().unwrap().write_all(rest));
        self.child.wait().unwrap().code()
    }
}

impl Drop for Fed {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// A store `from.dbs` with a volume `v` and its snapshots `a` and `b`; the streams of both.
fn source(place: &Place) -> [Vec<u8>; 2] {
    let dbs = |args: &str| place.dbs(&format!("-s from.dbs {args}")).ok(args).stdout;
    dbs("init from.dbs --size 256MiB");
    place.pipe("-s from.dbs volume import v -", &noise(1, 8 * MIB)).ok("import");
    dbs("snapshot create v@a");
    std::fs::write(place.path("more"), noise(2, 4 * MIB)).unwrap();
    let server = place.serve("-s from.dbs --nbd unix:from.sock");
    let mut client = client(place, "from.sock", "v").unwrap();
    client.write_at(0, &noise(2, 4 * MIB), true).unwrap();
    drop(client);
    server.stop();
    dbs("snapshot create v@b");
    [dbs("send v@a"), dbs("send v@b --from a")]
}

fn client(
    place: &Place,
    socket: &str,
    export: &str,
) -> std::io::Result<Client<Buffered<UnixStream>>> {
    let stream = UnixStream::connect(place.path(socket))?;
    Client::over(Buffered::new(stream), export, &ClientOptions::default())
}

fn exports(place: &Place, socket: &str) -> Vec<String> {
    let stream = UnixStream::connect(place.path(socket)).unwrap();
    let list = Client::list(Buffered::new(stream)).unwrap();
    list.into_iter().map(|(name, _)| name).collect()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn state(place: &Place, volume: &str) -> (bool, bool) {
    let run = place.dbs(&format!("--json volume show {volume}"));
    if run.code != 0 {
        return (false, false);
    }
    let shown = run.json();
    (shown["rebuilding"] == json!(true), shown["open"] == json!(true))
}

/// What others may not do to the head of a volume that is being filled.
fn nobody_uses(place: &Place, volume: &str) {
    let Err(refused) = client(place, "nbd.sock", volume) else { panic!("it is exported") };
    let refused = refused.to_string();
    assert!(refused.contains("is incomplete"), "{refused}");
    assert!(!exports(place, "nbd.sock").contains(&volume.to_owned()));
    for command in [
        format!("volume export {volume} -"),
        format!("snapshot create {volume}@partial"),
        format!("bench {volume} --time 20ms"),
    ] {
        let run = place.dbs(&format!("--yes {command}"));
        assert!(run.code != 0 && run.stderr.contains("incomplete"), "{command}: {}", run.stderr);
    }
}

/// Ends a server by `kill -9`, and takes its tail away: what was not flushed is lost.
fn lose(place: &Place, mut server: Served) {
    let uuid = place.json("info")["uuid"].as_str().unwrap().to_owned();
    server.kill();
    let tails = format!("/dev/shm/dbs-{}", nix::unistd::Uid::effective());
    let tails = std::fs::read_dir(tails).unwrap().map(|entry| entry.unwrap().path());
    let ours = tails.filter(|path| path.to_str().unwrap().contains(&uuid));
    assert!(ours.map(|path| std::fs::remove_file(path).unwrap()).count() > 0, "no tail");
}

/// Found by review: a flush by the next server was taken for one of what the server before it had acknowledged. The
/// stream was continued behind that, and the snapshot had holes.
#[test]
fn what_a_former_server_has_lost_is_received_again() {
    let place = Place::new();
    let [whole, _] = source(&place);
    place.init();
    let server = place.serve("--commit-interval 1h");
    let receive = Fed::new(&place, "store.dbs", "receive v", &whole[..6 * MIB]);
    let allocated = || place.json("volume show v")["usage"]["allocated"].as_u64();
    until("most is there", || state(&place, "v").0 && allocated() > Some(4 << 20));
    lose(&place, server);
    let server = place.serve("");
    assert_ne!(receive.finish(&whole[6 * MIB..]), Some(0));
    let token = place.json("receive v --token")["token"].as_str().map(str::to_owned);
    let rest = match &token {
        Some(token) => {
            place.dbs(&format!("-s from.dbs send v@a --resume {token}")).ok("send").stdout
        }
        None => whole,
    };
    place.pipe("receive v", &rest).ok("the rest");
    let sent = place.dbs("-s from.dbs volume export v@a -").ok("export").stdout;
    assert!(place.dbs("volume export v@a -").ok("export").stdout == sent, "continued at {token:?}");
    server.stop();
}

/// As above, seen from a program that writes a volume of a served store.
#[test]
fn a_flush_does_not_vouch_for_a_former_server() {
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    let options = dbs_core::OpenOptions::default();
    for (lost, by_store) in [(false, false), (true, false), (false, true), (true, true)] {
        let server = place.serve("");
        let store = AnyStore::open(&place.store(), &options, &place.path("run")).unwrap();
        let volume = store.access().open("v").unwrap();
        volume.write_at(0, &[7; 4096]).unwrap();
        volume.flush().unwrap();
        if lost {
            volume.write_at(4096, &[7; 4096]).unwrap();
        }
        server.stop();
        let server = place.serve("");
        let flush = || match by_store {
            true => store.call(&Request::Flush, &mut |_| true).map(drop),
            false => volume.flush(),
        };
        if !by_store {
            // Found by review: the first read of each volume failed.
            volume.read_at(0, &mut [0; 4096]).unwrap();
        }
        match lost {
            true => assert!(flush().unwrap_err().to_string().contains("may be lost")),
            false => flush().unwrap(),
        }
        flush().unwrap();
        drop((volume, store));
        server.stop();
    }
    // Nor does a snapshot.
    let server = place.serve("");
    let store = AnyStore::open(&place.store(), &options, &place.path("run")).unwrap();
    store.access().open("v").unwrap().write_at(0, &[8; 4096]).unwrap();
    server.stop();
    let server = place.serve("");
    let snapshot = |name: &str| store.access().create_snapshot("v", name, &Default::default());
    assert!(snapshot("s").unwrap_err().to_string().contains("may be lost"));
    snapshot("t").unwrap();
    assert_eq!(place.json("snapshot list v").as_array().unwrap().len(), 1);
    drop(store);
    server.stop();
}

/// Who goes on writing is told before much is written, and again by a flush; who had flushed goes on.
#[test]
fn a_write_goes_to_the_next_server_if_nothing_is_lost() {
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    let options = dbs_core::OpenOptions::default();
    for lost in [false, true] {
        let server = place.serve("");
        let store = AnyStore::open(&place.store(), &options, &place.path("run")).unwrap();
        let volume = store.access().open("v").unwrap();
        volume.write_at(0, &[7; 4096]).unwrap();
        if !lost {
            volume.flush().unwrap();
        }
        server.stop();
        let server = place.serve("");
        let told = volume.write_at(4096, &[7; 4096]).and_then(|()| volume.flush());
        assert_eq!(told.is_err(), lost, "{told:?}");
        assert_eq!(volume.flush().is_err(), lost);
        volume.write_at(4096, &[7; 4096]).unwrap();
        volume.flush().unwrap();
        drop((volume, store));
        server.stop();
    }
}

/// Found by review: an object that had the volume open later knew nothing of what an earlier one had written, and its
/// flush succeeded.
#[test]
fn a_flush_is_of_what_other_objects_of_the_volume_wrote_too() {
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    place.dbs("volume create w 16MiB").ok("create");
    let options = dbs_core::OpenOptions::default();
    for flushed in [None, Some("v"), Some("w"), Some("store")] {
        let server = place.serve("--commit-interval 1h");
        let store = AnyStore::open(&place.store(), &options, &place.path("run")).unwrap();
        let open = |volume| store.access().open(volume).unwrap();
        open("v").write_at(0, &[7; 4096]).unwrap();
        match flushed {
            None => {}
            Some("store") => drop(store.call(&Request::Flush, &mut |_| true).unwrap()),
            Some(volume) => open(volume).flush().unwrap(),
        }
        lose(&place, server);
        let server = place.serve("");
        open("w").flush().unwrap();
        match flushed {
            None => {
                let error = open("v").flush().unwrap_err().to_string();
                assert!(error.contains("may be lost"), "{error}");
            }
            Some(_) => open("v").flush().unwrap(),
        }
        open("v").flush().unwrap();
        drop(store);
        server.stop();
    }
}

#[test]
fn nobody_else_writes_a_volume_that_is_being_received() {
    let place = Place::new();
    let [whole, difference] = source(&place);
    place.init();
    let server = place.serve("--nbd unix:nbd.sock");
    for (stream, snapshot) in [(&whole, "a"), (&difference, "b")] {
        let half = stream.len() / 2;
        let receive = Fed::new(&place, "store.dbs", "receive v", &stream[..half]);
        until("it is received", || state(&place, "v") == (true, true));
        nobody_uses(&place, "v");
        place.dbs("--yes snapshot delete v@dbs-receiving").exits(11, "the marker");
        place.dbs("--yes snapshot rollback v@dbs-receiving").exits(11, "while it is received");
        receive.kill();
        until("its server knows", || state(&place, "v") == (true, false));
        nobody_uses(&place, "v");
        // It is taken up where it was.
        let token = place.json("receive --token v")["token"].as_str().unwrap().to_owned();
        let from = if snapshot == "b" { " --from a" } else { "" };
        let resume = format!("-s from.dbs send v@{snapshot}{from} --resume {token}");
        let rest = place.dbs(&resume).ok("send").stdout;
        let half = rest.len() / 2;
        let receive = Fed::new(&place, "store.dbs", "receive v", &rest[..half]);
        assert_eq!(receive.finish(&rest[half..]), Some(0));
        let name = format!("v@{snapshot}");
        let sent = place.dbs(&format!("-s from.dbs volume export {name} -")).ok("sent").stdout;
        let received = place.dbs(&format!("volume export {name} -")).ok("received").stdout;
        assert!(sent == received, "{name} is not the sender's");
        assert!(!state(&place, "v").0);
        let mut writer = client(&place, "nbd.sock", "v").unwrap();
        // Who has it open keeps it from being received into.
        if snapshot == "a" {
            place.pipe("receive v", &difference).exits(11, "open");
        }
        writer.read_at(0, &mut [0; 4096]).unwrap();
        drop(writer);
        until("it is closed", || state(&place, "v") == (false, false));
    }
    assert_eq!(server.stop().0, Some(0));
    place.dbs("check").ok("check");
}

#[test]
fn a_received_difference_can_be_given_up() {
    let place = Place::new();
    let [whole, difference] = source(&place);
    place.init();
    place.pipe("receive v", &whole).ok("the base");
    let half = &difference[..difference.len() / 2];
    place.pipe("receive v", half).exits(4, "cut off");
    assert!(state(&place, "v").0);
    place.dbs("volume clone v@a c").exits(11, "its snapshots are part of it");
    // Even to the marker: what was received is gone, so that it cannot be taken up.
    place.dbs("--yes snapshot rollback v@dbs-receiving").ok("rollback");
    assert!(!state(&place, "v").0);
    let refused = place.pipe("receive v", &difference).exits(11, "given up").stderr;
    assert!(refused.contains("with `dbs snapshot delete v@dbs-receiving`"), "{refused}");
    place.dbs("--yes snapshot delete v@dbs-receiving").ok("delete");
    place.pipe("receive v", half).exits(4, "cut off again");
    // As a process leaves it that is killed between rolling back and what comes then.
    place.dbs("--yes snapshot rollback v@a").ok("to the base");
    place.pipe("receive v", &difference).exits(11, "given up");
    place.pipe("--yes receive v --force", &difference).ok("forced");
    assert!(!state(&place, "v").0);
    assert_eq!(place.json("snapshot list v").as_array().unwrap().len(), 2, "the marker is gone");
}

/// Found by review: a volume that was shrunk while it was received in part was continued behind what that had cost, and
/// without its marker it was no longer known that it is received.
#[test]
fn what_is_received_in_part_keeps_its_size_and_its_marker() {
    let place = Place::new();
    let [whole, _] = source(&place);
    place.init();
    place.pipe("receive v", &whole[..5 * MIB]).exits(4, "cut off");
    for (command, code) in [
        ("volume resize v 1MiB", 11),
        ("volume resize v 1GiB", 11),
        ("snapshot rename v@dbs-receiving x", 11),
        ("snapshot rename v@a dbs-receiving", 2),
    ] {
        place.dbs(&format!("--yes {command}")).exits(code, command);
    }
    // As one that knows no better has done it.
    let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    let store = Store::open(&place.store(), &options).unwrap();
    store.resize_volume("v", 1 << 20).unwrap();
    store.close().unwrap();
    let token = place.json("receive v --token")["token"].as_str().unwrap().to_owned();
    let rest = place.dbs(&format!("-s from.dbs send v@a --resume {token}")).ok("send").stdout;
    let refused = place.pipe("receive v", &rest).exits(11, "it was shrunk").stderr;
    assert!(refused.contains("delete volume `v`"), "{refused}");
    place.dbs("--yes volume delete v").ok("given up");
    place.pipe("receive v", &whole).ok("again");
}

#[test]
fn what_somebody_has_open_is_not_rolled_back_to_receive_into_it() {
    let place = Place::new();
    let [whole, difference] = source(&place);
    place.init();
    let server = place.serve("--nbd unix:nbd.sock");
    place.pipe("receive v", &whole).ok("the base");
    let mut writer = client(&place, "nbd.sock", "v").unwrap();
    writer.write_at(0, &noise(5, MIB), true).unwrap();
    let refused = place.pipe("--yes receive v --force", &difference).exits(11, "open").stderr;
    assert!(refused.contains("open by NBD client"), "{refused}");
    let mut found = vec![0; MIB];
    writer.read_at(0, &mut found).unwrap();
    assert!(found == noise(5, MIB), "it was rolled back");
    drop(writer);
    until("it is closed", || !state(&place, "v").1);
    place.pipe("--yes receive v --force", &difference).ok("closed");
    server.stop();
}

/// Found by review: a name that the snapshot cannot get was refused when everything had been received.
#[test]
fn a_name_that_is_taken_is_refused_before_anything_is_received() {
    let place = Place::new();
    let [whole, difference] = source(&place);
    place.init();
    place.pipe("receive v", &whole).ok("the base");
    place.dbs("snapshot create v@taken").ok("snapshot");
    for (name, code) in [("taken", 13), ("dbs-receiving", 2)] {
        place.pipe(&format!("--yes receive v@{name} --force"), &difference).exits(code, name);
        assert_eq!(place.json("snapshot list v").as_array().unwrap().len(), 2, "{name}");
    }
    place.pipe("--yes receive v@free --force", &difference).ok("free");
}

/// Found by review: a signal was looked at when something came, and handlers restart what waits.
#[test]
fn a_signal_ends_what_waits_for_its_input() {
    let place = Place::new();
    let [whole, _] = source(&place);
    place.init();
    let signalled = |args: &str, input: &[u8], begun: &dyn Fn() -> bool| {
        let mut fed = Fed::new(&place, "store.dbs", args, input);
        // Nearly all has been taken: it waits for more, or will soon.
        until("it fills", begun);
        let sent = Command::new("kill").args(["-s", "TERM", &fed.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
        let mut code = None;
        until("it ends", || {
            code = fed.child.try_wait().unwrap().map(|status| status.code());
            code.is_some()
        });
        assert_eq!(code, Some(Some(130)), "{args}");
    };
    let server = place.serve("");
    let allocated = |volume: &str| {
        let run = place.dbs(&format!("--json volume show {volume}"));
        run.code == 0 && run.json()["usage"]["allocated"].as_u64() > Some(5 << 20)
    };
    signalled("receive v", &whole[..7 * MIB], &|| allocated("v"));
    assert!(place.json("receive v --token")["token"].is_string());
    signalled("volume import w -", &whole[..7 * MIB], &|| allocated("w"));
    place.dbs("volume show w").exits(10, "what was imported in part is deleted");
    server.stop();
}

#[test]
fn names_of_a_stream_do_not_move_the_cursor_in_an_error() {
    let place = Place::with_store();
    let uuid = "00000000-0000-4000-8000-000000000001";
    let description = json!({
        "volume": "v", "snapshot": "s", "uuid": uuid, "size": 512, "created_ns": 1,
        "base": { "snapshot": "\u{1b}[2Jb\u{202e}", "uuid": uuid }, "user_created": true,
        "labels": {}, "start": 0,
    })
    .to_string();
    let mut stream = b"DBS-SEND\x01\0\0\0".to_vec();
    stream.extend((description.len() as u32).to_le_bytes());
    stream.extend(description.as_bytes());
    stream.extend(crc32c(&stream).to_le_bytes());
    let refused = place.pipe("receive v", &stream).exits(10, "no base").stderr;
    assert!(refused.contains("to snapshot `\u{fffd}[2Jb\u{fffd}`"), "{refused:?}");
}

#[test]
fn a_killed_import_is_told_hidden_and_begun_again() {
    let image = noise(3, 8 * MIB);
    for served in [false, true] {
        let place = Place::with_store();
        let server = served.then(|| place.serve("--nbd unix:nbd.sock"));
        let import = Fed::new(&place, "store.dbs", "volume import v -", &image[..4 * MIB]);
        if served {
            until("it is imported", || state(&place, "v") == (true, true));
            place.pipe("volume import v - --restart", &image).exits(11, "it still runs");
        }
        import.kill();
        until("it is told", || state(&place, "v") == (true, false));
        let listed = place.dbs("volume list").ok("list").text();
        assert!(listed.contains("rebuilding"), "{listed}");
        if served {
            nobody_uses(&place, "v");
        }
        place.dbs("volume export v -").exits(11, "incomplete");
        // The next writer waits for what the dead one had given to the kernel, but not for ever.
        until("its I/O has ended", || {
            !place.pipe("volume import v -", &image).stderr.contains("still under way")
        });
        let again = place.pipe("volume import v -", &image);
        assert!(again.code != 0 && again.stderr.contains("--restart"), "{}", again.stderr);
        place.pipe("volume import v - --restart", &image).ok("again");
        assert_eq!(state(&place, "v"), (false, false));
        assert!(place.dbs("volume export v -").ok("export").stdout == image);
        // What is complete is never replaced.
        let complete = place.pipe("volume import v - --restart", &image);
        assert!(complete.code != 0 && complete.stderr.contains("exists already"));
        assert!(server.is_none_or(|server| server.stop().0 == Some(0)));
        place.dbs("check").ok("check");
    }
}

#[test]
fn an_import_ends_and_cleans_up_its_own_volume_alone() {
    let place = Place::with_store();
    let server = place.serve("");
    let image = noise(5, 8 * MIB);
    // What is left of the input makes it succeed, or fail.
    for (size, code) in [("", 10), (" --size 9MiB", 10), (" --size 4MiB", 2)] {
        let import = format!("volume import v -{size}");
        let end = if code == 2 { 4 * MIB + 4096 } else { 8 * MIB };
        let import = Fed::new(&place, "store.dbs", &import, &image[..3 * MIB]);
        until("it is imported", || state(&place, "v") == (true, true));
        place.dbs("volume rename v w").ok("rename");
        place.dbs("volume create v 1MiB").ok("another of the name");
        assert_eq!(import.finish(&image[3 * MIB..end]), Some(code), "{size}");
        assert_eq!(place.json("volume show v")["size"], MIB, "the other one is as it was");
        until("the server knows", || state(&place, "w") == (true, false));
        for volume in ["v", "w"] {
            place.dbs(&format!("--yes volume delete {volume}")).ok("delete");
        }
    }
    assert_eq!(server.stop().0, Some(0));
}

/// As for a backup: what stopped the import also stopped the reclaiming of space behind the deletion.
#[test]
fn an_interrupted_import_does_not_say_that_it_keeps_the_volume() {
    let place = Place::new();
    place.dbs("init store.dbs --size 2GiB --extent-size 64KiB").ok("init");
    let mut command = place.bare();
    command.env("DBS_STORE", place.store()).args(["volume", "import", "v", "-"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let (sent, came) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        let part = noise(1, MIB);
        while stdin.write_all(&part).is_ok() {
            let _over = sent.send(());
        }
    });
    for _ in 0..512 {
        came.recv().unwrap();
    }
    let id = child.id().to_string();
    let killed = std::process::Command::new("kill").args(["-s", "INT", &id]).status();
    assert!(killed.unwrap().success());
    let run = Run::new(child.wait_with_output().unwrap());
    writer.join().unwrap();
    assert!(run.code != 0 && run.stderr.contains("stopped"), "{}", run.stderr);
    assert!(!run.stderr.contains("could not be deleted"), "{}", run.stderr);
    assert_eq!(place.json("volume list").as_array().unwrap().len(), 0);
}

#[test]
fn a_volume_with_its_clones_is_sent_and_received() {
    let place = Place::new();
    source(&place);
    let from = |args: &str| place.dbs(&format!("-s from.dbs {args}"));
    from("volume clone v@a k").ok("clone");
    let server = place.serve("-s from.dbs --nbd unix:from.sock");
    client(&place, "from.sock", "k").unwrap().write_at(0, &noise(9, MIB), true).unwrap();
    let refused = from("send -R v stream").exits(2, "a clone without snapshots").stderr;
    assert!(refused.contains("dbs snapshot create k@NAME"), "{refused}");
    from("snapshot create k@x").ok("snapshot");
    let sent = from("send -R v all").ok("send, served").text();
    assert!(sent.starts_with("sent volume v and a clone, 3 snapshots, 13.0 MiB"), "{sent}");
    let alone = from("send k@x --from v@a").ok("send a clone").stdout;
    assert!(alone.len() < 2 * MIB, "only what differs");
    from("snapshot delete v@a --yes").ok("delete the origin, served");
    let refused = from("send -R v none").exits(2, "a clone of what was deleted").stderr;
    assert!(refused.contains("dbs volume flatten k"), "{refused}");
    server.stop();

    place.init();
    place.dbs("receive w@new all").exits(2, "several have their names");
    // A clone has the name that was chosen for the volume: its content does not land there.
    let refused = place.dbs("receive k all").exits(13, "two volumes by one name").stderr;
    assert!(refused.contains("another volume `k`"), "{refused}");
    place.dbs("--yes volume delete k").ok("delete");
    let received = place.dbs("receive w all").ok("receive, idle").text();
    assert!(received.starts_with("received w@a, w@b, k@x, 13.0 MiB"), "{received}");
    let again = place.json("receive w all --prefix copy-");
    assert_eq!(again["data"], MIB, "all is there but the copy's clone: {again}");
    let _server = place.serve("");
    // The origin is called otherwise here.
    assert_eq!(
        place.pipe("--json receive alone", &alone).ok("receive, served").json()["data"],
        MIB
    );
    for (volume, there) in [("v@b", "w@b"), ("k@x", "k@x"), ("k@x", "copy-k@x"), ("k@x", "alone@x")]
    {
        let content = from(&format!("volume export {volume} -")).ok("export").stdout;
        let copy = place.dbs(&format!("volume export {there} -")).ok("export").stdout;
        assert!(content == copy, "{volume} as {there}");
    }
    for clone in ["k", "copy-k", "alone"] {
        assert_eq!(place.json(&format!("volume show {clone}"))["origin"], "w@a", "{clone}");
    }
}

/// Found by review: the snapshot of a copy of the store had the same identity, and was taken for the base.
#[test]
fn a_difference_is_not_put_on_the_snapshot_of_a_copy() {
    let place = Place::with_store();
    place.dbs("volume create v 4MiB").ok("create");
    std::fs::copy(place.store(), place.path("copy.dbs")).unwrap();
    place.dbs("-s copy.dbs new-uuid").ok("new-uuid");
    for taken in [
        "store.dbs snapshot create v@s1",
        "store.dbs snapshot create v@s2",
        "copy.dbs snapshot create v@s3",
    ] {
        place.dbs(&format!("-s {taken}")).ok("snapshot");
    }
    let stream = place.dbs("send v@s2 --from s1").ok("send").stdout;
    let refused = place.pipe("-s copy.dbs receive v", &stream).exits(10, "no base").stderr;
    assert!(refused.contains("does not have snapshot"), "{refused}");
}

#[test]
fn an_import_of_nothing_is_refused() {
    let place = Place::with_store();
    let refused = place.pipe("volume import v -", b"").exits(2, "an empty pipe").stderr;
    assert!(refused.contains("before the pipe"), "{refused}");
    assert_eq!(place.json("volume list").as_array().unwrap().len(), 0);
}
