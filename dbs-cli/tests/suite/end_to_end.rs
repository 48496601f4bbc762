//! One script of commands, on an idle and on a served store: both must answer the same.

use crate::support::{Place, Run, noise, run};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Members whose values depend on time, chance or how far background work is.
const VOLATILE: &[&str] = &[
    "uuid",
    "dbs.received-uuid",
    "created_ns",
    // Another number each time that the store is opened.
    "rebuilds",
    "sequence",
    "read_only",
    "driver",
    // A server takes more than a command does.
    "memory_max",
    // Where bitmaps lie depends on the order in which they came.
    "bitmap_memory",
    "tail",
    "open",
    "extents_free",
    "extents_pending",
    "work_remaining",
    "snapshots_deleting",
    "allocated",
    "done",
    "freed",
    "blocks_checked",
    "free",
];

/// Runs commands and remembers what they answered.
struct Script<'a> {
    place: &'a Place,
    answers: Vec<String>,
}

impl Script<'_> {
    /// Runs a command for people and for programs to see; `code` is expected of both.
    fn run(&mut self, args: &str, code: i32) -> Value {
        let run = self.place.dbs(&format!("--json {args}")).exits(code, args);
        let text = if code == 0 || code == 3 { &run.stdout[..] } else { run.stderr.as_bytes() };
        let mut value: Value =
            serde_json::from_slice(text).unwrap_or_else(|e| panic!("{args}: {e}\n{}", run.stderr));
        let answer = value.clone();
        blank(&mut value);
        // Questions name the store.
        let place = self.place.path("").display().to_string();
        self.answers.push(format!("{args} -> {code} {value}").replace(&place, ""));
        answer
    }

    /// Runs a command that moves bytes.
    fn bytes(&mut self, args: &str, input: &[u8]) -> Vec<u8> {
        let run = self.place.pipe(args, input).exits(0, args);
        self.answers.push(format!("{args} -> {} bytes", run.stdout.len()));
        run.stdout
    }
}

fn blank(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(blank),
        Value::Object(members) => {
            // Of a whole store, those still being merged away count.
            if members.contains_key("snapshots_max") {
                members.remove("snapshots");
            }
            for (key, member) in members {
                if VOLATILE.contains(&key.as_str()) {
                    *member = Value::Null;
                }
                blank(member);
            }
        }
        _ => {}
    }
}

fn image(seed: u64) -> Vec<u8> {
    let mut image = noise(seed, 3 << 20);
    image.resize(8 << 20, 0);
    image
}

/// The script; returns all answers.
fn script(place: &Place) -> Vec<String> {
    let mut s = Script { place, answers: Vec::new() };
    volumes(&mut s);
    snapshots(&mut s);
    clones(&mut s);
    data(&mut s);
    refusals(&mut s);
    assert_eq!(s.run("check", 0)["findings"], Value::Array(Vec::new()));
    s.answers
}

fn volumes(s: &mut Script<'_>) {
    s.run("info", 0);
    assert_eq!(s.run("volume list", 0), Value::Array(Vec::new()));
    assert_eq!(s.run("volume create a 64MiB", 0)["size"], 64 << 20);
    s.run("volume create b 1GiB", 0);
    assert_eq!(s.run("volume rename b c", 0)["name"], "c");
    assert_eq!(s.run("volume resize c 2GiB", 0)["size"], 2u64 << 30);
    assert_eq!(s.run("volume resize c 1MiB --yes", 0)["size"], 1 << 20);
    let limits = s.run("volume set c --iops 100 --bandwidth 1MiB", 0);
    assert_eq!(limits["limits"], json!({"iops": 100, "bandwidth": 1 << 20, "burst_seconds": 1}));
    s.run("volume set c --iops none --burst 5", 0);
    let limits = &s.run("volume show c", 0)["limits"];
    assert_eq!(limits, &json!({"iops": 0, "bandwidth": 1 << 20, "burst_seconds": 5}));
    assert!(s.run("volume set c --bandwidth none", 0).get("limits").is_none());
    s.run("volume set c --bandwidth 4095", 2);
    let list = s.run("volume list", 0);
    assert_eq!(list.as_array().unwrap().len(), 2);
    assert!(list[0].get("usage").is_none());
    assert_eq!(s.run("volume list --usage", 0)[0]["usage"]["referenced"], 0);
    s.run("volume show a", 0);
    assert_eq!(s.run("volume delete c --yes", 0)["deleted"], "c");
    assert_eq!(s.run("grow 512MiB", 0)["size"], 512 << 20);
}

fn snapshots(s: &mut Script<'_>) {
    s.bytes("volume import v -", &image(1));
    assert_eq!(s.run("volume show v", 0)["size"], 8 << 20);
    let made = s.run("snapshot create v@one --label app=db --label x=", 0);
    assert_eq!(made["labels"]["app"], "db");
    assert!(made.get("usage").is_none());
    assert_eq!(s.run("snapshot show v@one", 0)["usage"]["referenced"], 3 << 20);
    s.run("snapshot create v@two", 0);
    s.run("snapshot create v@three", 0);
    let list = s.run("snapshot list v", 0);
    let names: Vec<_> = list.as_array().unwrap().iter().map(|i| i["name"].clone()).collect();
    assert_eq!(names, ["one", "two", "three"]);
    s.run("snapshot list v --usage", 0);
    assert_eq!(s.run("snapshot label v@one app- tier=gold", 0)["labels"]["tier"], "gold");
    assert!(s.run("snapshot show v@one", 0)["labels"].get("app").is_none());
    assert_eq!(s.run("snapshot rename v@two zwei", 0)["name"], "zwei");
    assert_eq!(s.run("snapshot protect v@zwei", 0)["protected"], true);
    s.run("snapshot delete v@zwei --yes", 11);
    s.run("volume delete v --yes", 11);
    assert_eq!(s.run("snapshot unprotect v@zwei", 0)["protected"], false);
    s.run("snapshot delete v@zwei --yes", 0);
    s.run("volume trim", 0);
    s.run("snapshot rollback v@one --yes", 0);
    s.run("snapshot delete v@three --yes", 0);
    // A server merges in its own time: until then hidden snapshots show in parents and children.
    s.run("volume trim", 0);
    assert_eq!(s.run("snapshot list v", 0).as_array().unwrap().len(), 1);
}

fn clones(s: &mut Script<'_>) {
    assert_eq!(s.run("volume clone v@one k", 0)["origin"], "v@one");
    assert_eq!(s.run("volume children v", 0), serde_json::json!(["k"]));
    assert_eq!(s.run("volume children v@one", 0), serde_json::json!(["k"]));
    assert_eq!(s.run("volume du k", 0)["referenced"], 3 << 20);
    assert_eq!(s.run("volume flatten k", 0)["origin"], Value::Null);
    assert_eq!(s.run("volume children v", 0), serde_json::json!([]));
    assert_eq!(s.bytes("volume export k -", b""), image(1));
    s.run("volume delete k --yes", 0);
    s.run("volume trim", 0);
}

fn data(s: &mut Script<'_>) {
    assert_eq!(s.bytes("volume export v@one -", b""), image(1));
    std::fs::write(s.place.path("image"), image(2)).unwrap();
    s.run("volume import w image --size 9MiB", 0);
    s.run("volume export w out", 0);
    let out = std::fs::read(s.place.path("out")).unwrap();
    assert_eq!(out.len(), 9 << 20);
    assert!(out.starts_with(&image(2)));
    s.run("volume export w out", 13);
    s.run("volume export w out --force", 0);
    std::fs::remove_file(s.place.path("out")).unwrap();
    let map = s.run("volume map w", 0);
    assert_eq!(map[0], serde_json::json!({ "offset": 0, "length": 3 << 20, "state": "data" }));
    assert_eq!(s.run("volume map w --offset 3MiB --length 1MiB", 0)[0]["offset"], 3 << 20);
    s.run("snapshot create w@s", 0);
    assert_eq!(s.run("volume diff w@s w", 0), serde_json::json!([]));
    let stream = s.bytes("send w@s", b"");
    s.bytes("receive copy", &stream);
    let copy = s.bytes("volume export copy@s -", b"");
    assert_eq!(copy, out);
    s.bytes("receive other@renamed", &stream);
    s.run("volume trim", 0);
    assert_eq!(s.run("snapshot list other", 0)[0]["name"], "renamed");
}

fn refusals(s: &mut Script<'_>) {
    for args in ["volume show no", "volume delete no --yes", "volume du no", "volume map no"] {
        s.run(args, 10);
    }
    for args in ["snapshot show v@no", "snapshot delete v@no", "volume clone v@no n"] {
        s.run(args, 10);
    }
    s.run("volume export no -", 10);
    s.run("send v@no", 10);
    s.run("volume create v 1MiB", 13);
    s.run("volume create o\u{308} 1MiB", 2);
    s.run("volume create bad/\u{7}name 1MiB", 2);
    s.run("volume create odd 1000", 2);
    s.run("volume resize v 1MiB", 2);
    s.run("volume delete v", 2);
    s.run("snapshot delete v@one", 2);
    s.run("snapshot rollback v@one", 2);
    s.bytes("volume export v@one -", b"");
}

#[test]
fn idle_and_served_answer_alike() {
    let idle = Place::new();
    idle.init();
    let from_idle = script(&idle);

    let served = Place::new();
    served.init();
    let server = served.serve("");
    let from_served = script(&served);
    let (code, log) = server.stop();
    assert_eq!(code, Some(0), "{log}");
    for (idle, served) in from_idle.iter().zip(&from_served) {
        assert_eq!(idle, served);
    }
    assert_eq!(from_idle.len(), from_served.len());
    // And what the server left is a store like the other.
    let list = |place: &Place| {
        let mut list = place.json("volume list");
        blank(&mut list);
        list
    };
    assert_eq!(list(&idle), list(&served));
    let slots = |place: &Place| {
        place.json("volume trim");
        place.json("info")["snapshots"].clone()
    };
    assert_eq!(slots(&idle), slots(&served), "everything deleted is gone");
    served.dbs("check").ok("check");
}

/// Damage is found by a scrub of an idle and of a served store, and by an export; it names the place.
#[test]
fn a_scrub_says_what_is_damaged() {
    let docs =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md")).unwrap();
    let place = Place::new();
    place.dbs("init store.dbs --size 64MiB --no-checksums").ok("init");
    assert!(place.json("info")["checksums"].is_null());
    let refused = place.dbs("scrub");
    assert!(refused.code != 0 && refused.stderr.contains("checksums"), "{}", refused.stderr);
    std::fs::remove_file(place.store()).unwrap();
    place.dbs("init store.dbs --size 64MiB").ok("init");
    let mut bytes = image(1);
    bytes[8192..8208].copy_from_slice(b"to be damaged: 7");
    place.pipe("volume import w -", &bytes).ok("import");
    place.json("snapshot create w@s");
    documented(&docs, "info", &place.json("info"));
    documented(&docs, "scrub", &place.json("scrub --restart --rate 1GiB"));
    let mut store = std::fs::read(place.store()).unwrap();
    let at = store.windows(16).position(|bytes| bytes == b"to be damaged: 7").unwrap();
    store[at] ^= 1;
    std::fs::write(place.store(), store).unwrap();
    let check = || {
        let run = place.dbs("--json scrub");
        assert_eq!(run.code, 4, "{}", run.stderr);
        let report = run.json();
        assert_eq!(report["damaged"], 4096);
        let range = &report["ranges"][0];
        assert_eq!((&range["volume"], &range["snapshot"]), (&"w".into(), &"s".into()));
        assert_eq!((&range["offset"], &range["length"]), (&8192.into(), &4096.into()));
        documented(&docs, "scrub", &report);
        assert_ne!(place.dbs("volume export w file").code, 0, "damage was exported");
    };
    check();
    let served = place.serve("");
    check();
    assert!(place.json("info")["checksums"]["mismatches"].as_u64().unwrap() > 1);
    served.stop();
}

#[test]
fn the_cache_of_checksums_has_the_size_it_was_given() {
    let place = Place::new();
    place.dbs("init store.dbs --size 1GiB --extent-size 4MiB").ok("init");
    // A block in each of 100 extents, whose checksums are on about as many pages.
    let image = File::create(place.path("image")).unwrap();
    image.set_len(400 << 20).unwrap();
    for extent in 0..100 {
        image.write_all_at(&noise(extent, 4096), extent << 22).unwrap();
    }
    let memory = |place: &Place| place.json("info")["checksums"]["memory"].as_u64().unwrap();
    place.dbs("volume import v image").ok("import");
    let served = place.serve("");
    assert_eq!(place.json("scrub --restart")["damaged"], 0);
    assert!(memory(&place) > 320 << 10);
    served.stop();
    let served = place.serve("--checksum-cache 256KiB");
    assert_eq!(place.json("scrub --restart")["damaged"], 0);
    assert!((1..320 << 10).contains(&memory(&place)));
    served.stop();
    for command in ["serve --checksum-cache 255KiB", "attach v --checksum-cache 4096"] {
        let refused = place.dbs(command).exits(2, command);
        assert!(refused.stderr.contains("must be at least 256.0 KiB"), "{}", refused.stderr);
    }
}

#[test]
fn every_key_is_documented() {
    let docs =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md")).unwrap();
    let place = Place::with_store();
    place.json("volume create v 16MiB");
    place.pipe("volume import w -", &image(1)).ok("import");
    place.json("snapshot create w@s --label k=v");
    for args in [
        "info",
        "grow 512MiB",
        "check",
        "volume list --usage",
        "volume show v",
        "volume map w",
        "volume du w",
        "volume trim",
        "volume trim w",
        "volume compress w@s",
        "info",
        "volume export w file",
        "snapshot list w --usage",
        "snapshot show w@s",
        "send w@s stream",
        "receive x stream",
        "receive x --token",
        "bench --time 10ms --size 16MiB --only first-write,read-chain-256",
        "volume delete v --yes",
        "vacuum",
    ] {
        documented(&docs, args, &place.json(args));
    }
    // Where the tests run may have something wrong.
    documented(&docs, "doctor", &place.dbs("--json doctor").json());
}

fn documented(docs: &str, args: &str, value: &Value) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| documented(docs, args, item)),
        Value::Object(members) => {
            for (key, member) in members {
                assert!(docs.contains(&format!("`{key}`")), "{args}: {key} is not in docs/json.md");
                if key != "labels" {
                    documented(docs, args, member);
                }
            }
        }
        _ => {}
    }
}

#[test]
fn a_dump_is_json_either_way() {
    let place = Place::with_store();
    place.json("volume create v 16MiB");
    let idle = place.dbs("dump").ok("dump").json();
    assert!(idle.is_object());
    let server = place.serve("");
    let served = place.dbs("dump --json").ok("dump").json();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&idle), keys(&served));
    assert_eq!(server.stop().0, Some(0));
}

/// They say nothing, and nothing else is wrong: no metadata is written over, and none saved.
#[test]
fn damaged_checksums_are_begun_anew() {
    let place = Place::with_store();
    place.pipe("volume import w -", &image(1)).ok("import");
    let mut store = std::fs::read(place.store()).unwrap();
    let page = store.chunks(4096).position(|block| block.starts_with(b"DBSc")).unwrap();
    store[page * 4096 + 777] ^= 0x10;
    std::fs::write(place.store(), store).unwrap();
    let files = || std::fs::read_dir(place.path("")).unwrap().count();
    let before = files();
    assert_eq!(place.json("check")["findings"][0]["region"], "checksums");
    let report = place.json("repair --yes");
    assert!(report["done"] == true && report["saved"].is_null(), "{report}");
    assert_eq!(report["steps"][0]["region"], "checksums");
    assert_eq!((files(), &place.json("check")["findings"]), (before, &serde_json::json!([])));
    assert_eq!(place.json("scrub --restart")["damaged"], 0);
}

#[test]
fn a_damaged_store_is_checked_repaired_and_put_back() {
    let place = Place::with_store();
    place.json("volume create v 16MiB");
    let whole = place.dbs("check").ok("check").text();
    let dumped = place.dbs("dump").ok("dump");
    let dump = dumped.json();
    let table = &dump["regions"][0];
    let (offset, length) = (table["offset"].as_u64().unwrap(), table["length"].as_u64().unwrap());
    let file = std::fs::File::options().write(true).open(place.store()).unwrap();
    for at in [offset, offset + length / 2] {
        file.write_all_at(b"rot", at + 1000).unwrap();
    }
    let found = place.dbs("check").exits(4, "check").text();
    assert!(found.contains("corrupt: volume table 0: both copies are damaged"), "{found}");
    assert!(found.lines().count() > 2, "all findings: {found}");
    let plan = place.dbs("repair --dry-run --json").exits(4, "dry run").json();
    assert!(!plan["done"].as_bool().unwrap() && plan["saved"].is_null(), "{plan}");
    place.dbs("repair").exits(2, "nobody confirmed");
    let done = place.json("repair --yes");
    documented(include_str!("../../../docs/json.md"), "repair", &done);
    let text = place.dbs("volume show repaired-1").ok("show").text();
    assert!(text.contains("16.0 MiB"), "{text}");
    place.dbs("check").ok("check after the repair");
    let again = place.dbs("repair").ok("again").text();
    assert_eq!(again, "nothing to repair\n");
    let saved = done["saved"].as_str().unwrap();
    // Nobody is asked about a file that is not there.
    let missing = place.dbs("repair --undo missing").exits(10, "undo without its file").stderr;
    assert!(missing.contains("no file `missing`"), "{missing}");
    place.dbs(&format!("repair --yes --undo {saved}")).ok("undo");
    assert_eq!(place.dbs("check").exits(4, "check after the undo").text(), found);
    let later = place.path("later").display().to_string();
    place.dbs(&format!("repair --yes --save {later}")).ok("repair again");
    place.dbs("volume create later 1MiB").ok("a change");
    place.dbs(&format!("repair --yes --undo {later}")).exits(2, "undo after a change");
    place.dbs("volume show later").ok("show what was not undone");
    place.dbs(&format!("repair --yes --undo {later} --force")).ok("undo by force");
    assert_eq!(place.dbs("check").exits(4, "check after the forced undo").text(), found);
    assert!(whole.contains("no findings"), "{whole}");
    let path = place.path("dump.json");
    std::fs::write(&path, dumped.stdout).unwrap();
    let save = place.path("before");
    let (path, save) = (path.display(), save.display());
    place.dbs(&format!("restore-metadata {path}")).exits(2, "nobody confirmed");
    place.dbs(&format!("restore-metadata --yes --save {save} {path}")).ok("restore");
    assert_eq!(place.dbs("check").ok("check after restoring").text(), whole);
    assert_eq!(place.json("dump"), dump);
}

#[test]
fn people_get_tables() {
    let place = Place::with_store();
    let made = place.dbs("volume create demo 10GiB").ok("create").text();
    assert_eq!(made, "created volume demo, 10.0 GiB\n");
    let list = place.dbs("volume ls").ok("ls").text();
    assert!(list.starts_with("NAME      SIZE  SNAPSHOTS  ORIGIN  CREATED\n"), "{list}");
    assert!(list.contains("demo  10.0 GiB          0          20"), "{list}");
    assert!(list.contains("+00:00"), "{list}");
    assert_eq!(place.dbs("--quiet volume create more 1GiB").ok("quiet").text(), "");
    assert!(
        place.dbs("info").ok("info").text().contains("size         256.0 MiB (268435456 bytes)")
    );
    let refused = place.dbs("volume rm demo").exits(2, "no terminal");
    assert!(refused.stderr.contains("--yes"), "{}", refused.stderr);
}

#[test]
fn init_refuses_what_is_there() {
    let place = Place::with_store();
    place.dbs("init store.dbs --size 256MiB").exits(13, "a store");
    place.dbs("init store.dbs --size 256MiB --force").exits(2, "not confirmed");
    place.json("volume create v 1MiB");
    place.dbs("init store.dbs --size 256MiB --force --yes").ok("forced");
    assert_eq!(place.json("volume list"), serde_json::json!([]));
    place.dbs("init new.dbs").exits(2, "no size");
    let server = place.serve("");
    place.dbs("init store.dbs --force --yes").exits(11, "served");
    assert_eq!(server.stop().0, Some(0));
}

#[test]
fn a_second_writer_is_refused_and_told_of_the_owner() {
    let place = Place::with_store();
    let server = place.serve("");
    let pid = server.pid().to_string();
    let second = place.dbs("serve").exits(11, "second server");
    assert!(second.stderr.contains(&pid), "{}", second.stderr);
    // Without its socket the server is just somebody who holds the store.
    let socket = dbs_control::store_key(&place.store()).unwrap() + ".sock";
    std::fs::remove_file(place.path("run").join(&socket)).unwrap();
    let run = place.dbs("volume list").exits(11, "no socket");
    assert!(run.stderr.contains(&socket), "{}", run.stderr);
    assert!(run.stderr.contains(&pid), "{}", run.stderr);
    assert_eq!(server.stop().0, Some(0));
}

/// Found by a tester: of several commands at once, all but one were refused.
#[test]
fn commands_at_once_wait_for_one_another() {
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    std::thread::scope(|threads| {
        for n in 0..6 {
            let place = &place;
            threads.spawn(move || place.dbs(&format!("snapshot create v@{n}")).ok("snapshot"));
            threads.spawn(move || place.dbs("info").ok("info"));
        }
    });
    assert_eq!(place.json("snapshot list v").as_array().unwrap().len(), 6);
}

/// Found by review: a server whose standard output nobody read ended without closing the store. Found by testing from
/// outside: one whose standard output had no room ended at no signal.
#[test]
fn a_server_needs_nobody_who_reads_its_output() {
    let place = Place::with_store();
    for gone in [true, false] {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let _stays = (!gone).then_some(reader);
        let output = writer.try_clone().unwrap();
        // Full, until the reader goes.
        std::thread::spawn(move || writer.write_all(&[0; 8 << 20]));
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).args(["serve", "--nbd", "unix:nbd"]);
        let mut server = command.stdout(output).stderr(Stdio::null()).spawn().unwrap();
        drop(command);
        let deadline = Instant::now() + Duration::from_secs(60);
        // No command before it has the store: it would be in the way.
        while !place.path("nbd").exists() {
            assert!(Instant::now() < deadline, "{:?}", server.try_wait());
            std::thread::sleep(Duration::from_millis(20));
        }
        place.dbs("clients").ok("it serves");
        assert_eq!(server.try_wait().unwrap(), None);
        let ended = std::process::Command::new("kill").arg(server.id().to_string()).status();
        assert!(ended.unwrap().success());
        while server.try_wait().unwrap().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let status = server.try_wait().unwrap();
        server.kill().unwrap();
        assert_eq!(status.expect("it has ended").code(), Some(0), "the reader is gone: {gone}");
    }
}

#[test]
fn a_read_only_server_refuses_changes() {
    let place = Place::with_store();
    place.json("volume create v 1MiB");
    let server = place.serve("--read-only");
    place.dbs("volume list").ok("list");
    place.dbs("volume create w 1MiB").exits(1, "read-only");
    assert_eq!(server.stop().0, Some(0));
}

#[test]
fn metrics_of_the_store_are_served() {
    let place = Place::with_store();
    place.dbs("volume create v 1GiB").ok("create");
    for mode in ["", "--read-only"] {
        let server = place.serve(&format!("{mode} --metrics 127.0.0.1:0"));
        let address = server.ready["metrics"].as_str().unwrap().to_owned();
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        assert!(text.contains("\ndbs_store_volumes 1\n"), "{text}");
        // Somebody listens there: the store is not even opened.
        let other = Place::new();
        other.init();
        let mut taken = other.bare();
        taken.arg("--store").arg(other.store()).args(["serve", "--metrics", &address]);
        let taken = run(&mut taken).exits(1, "taken");
        assert!(taken.stderr.contains("serving metrics"), "{}", taken.stderr);
        drop(stream);
        assert_eq!(server.stop().0, Some(0));
    }
}

#[test]
fn a_server_survives_being_killed() {
    let place = Place::with_store();
    let server = place.serve("--nbd unix:nbd.sock --control other.sock");
    assert_eq!(server.ready["nbd"], serde_json::json!(["unix:nbd.sock"]));
    assert_eq!(server.ready["control"].as_array().unwrap().len(), 2);
    place.json("volume create v 16MiB");
    place.pipe("volume import w -", &image(3)).ok("import");
    server.signal("KILL");
    drop(server);
    assert_eq!(place.pipe("volume export w -", b"").ok("export").stdout, image(3));
    let again = place.serve("--nbd unix:nbd.sock --control other.sock");
    assert_eq!(place.json("volume list").as_array().unwrap().len(), 2);
    let (code, log) = again.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("event=ready") && log.contains("event=stopped"), "{log}");
    assert!(!place.path("nbd.sock").exists() && !place.path("other.sock").exists());
}

/// What a thread of a process has that user 65534 has not, if there is one.
fn privileged(pid: u32) -> Option<String> {
    let ids = "65534\t65534\t65534\t65534";
    let mut tasks = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        // The kernel's own threads for a ring come and go, and are no threads of the program.
        let status = std::fs::read_to_string(task.unwrap().path().join("status"));
        let Some(status) = status.ok().filter(|text| !text.starts_with("Name:\tiou-")) else {
            continue;
        };
        for line in [
            &format!("Uid:\t{ids}"),
            &format!("Gid:\t{ids}"),
            "Groups:\t65534 ",
            "CapInh:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "CapEff:\t0000000000000000",
            "CapAmb:\t0000000000000000",
            "NoNewPrivs:\t1",
        ] {
            if !status.lines().any(|found| found == line) {
                return Some(format!("no {line} in\n{status}"));
            }
        }
        tasks += 1;
    }
    (tasks <= 5).then(|| format!("{tasks} threads"))
}

#[test]
fn privileges_are_dropped_for_good() {
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("SKIPPED privileges: needs root");
        return;
    }
    let place = Place::with_store();
    place.dbs("serve --user root").exits(2, "root gives up nothing");
    place.dbs("serve --user no-such-user").exits(2, "nobody to be");
    place.dbs("serve --user 65534:65534 --mount mnt").exits(2, "it could not be unmounted");
    let serve = || place.serve("--nbd unix:nbd.sock --user 65534:65534");
    let server = serve();
    let deadline = Instant::now() + Duration::from_secs(120);
    // A thread that was about to end has root's, for as long as it takes the kernel; it runs nothing any more.
    while let Some(wrong) = privileged(server.pid()) {
        assert!(Instant::now() < deadline, "{wrong}");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Everything goes on as before for root and on open files.
    place.pipe("volume import v -", &image(3)).ok("import");
    place.dbs("snapshot create v@s").ok("snapshot");
    place.dbs("volume clone v@s w").ok("clone");
    place.dbs("volume delete v --yes").ok("delete");
    place.dbs("grow 300MiB").ok("grow");
    assert_eq!(place.pipe("volume export w -", b"").ok("export").stdout, image(3));
    place.pipe("volume import x -", &image(4)).ok("import");
    server.signal("KILL");
    drop(server);
    // What it leaves is taken over, after a kill as after a clean end.
    let server = serve();
    assert_eq!(place.pipe("volume export x -", b"").ok("export").stdout, image(4));
    let (code, log) = server.stop();
    assert_eq!(code, Some(0), "{log}");
    let server = serve();
    assert_eq!(server.stop().0, Some(0));
    place.dbs("check").ok("check");
}

/// Found by testing from outside: a flush failed, as the kernel could make no thread for it, so that the server took no more
/// writes; and a signal ended it without closing the store.
#[test]
fn a_server_that_gets_no_more_threads_goes_on_and_closes_the_store() {
    const NOBODY: u32 = 65534;
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("SKIPPED a server without threads: needs root");
        return;
    }
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    // Of root the kernel limits nothing.
    let server = place.serve(&format!("--nbd unix:nbd.sock --user {NOBODY}:{NOBODY}"));
    let options = dbs_nbd::ClientOptions::default();
    let mut client = dbs_nbd::Client::connect_unix(&place.path("nbd.sock"), "v", &options).unwrap();
    let mut limit = std::process::Command::new("prlimit");
    limit.args(["--nproc=1", "--pid", &server.pid().to_string()]).uid(NOBODY).gid(NOBODY);
    match limit.status() {
        Ok(limited) => assert!(limited.success()),
        Err(error) => return println!("SKIPPED a server without threads: prlimit: {error}"),
    }
    for round in 1..=3 {
        for (at, fua) in [(round << 20, false), (round << 21, true)] {
            client.write_at(at, &[round as u8; 8192], fua).unwrap();
            client.flush().unwrap();
            let mut read = [0; 8192];
            client.read_at(at, &mut read).unwrap();
            assert_eq!(read, [round as u8; 8192]);
        }
    }
    client.disconnect().unwrap();
    let (code, log) = server.stop();
    assert!(log.contains("starting the signal thread"), "{log}");
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn an_interrupted_import_leaves_nothing() {
    const PATIENCE: Duration = Duration::from_secs(120);
    const FED: usize = 3;
    let place = Place::with_store();
    let mut child = place
        .bare()
        .env("DBS_STORE", place.store())
        .args(["volume", "import", "v", "-"])
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let (fed, feeding) = mpsc::channel();
    let (interrupt, interrupted) = mpsc::channel();
    let feeder = std::thread::spawn(move || {
        let piece = noise(5, 1 << 20);
        let mut feed = || std::io::Write::write_all(&mut stdin, &piece).is_ok();
        for _ in 0..FED {
            assert!(feed() && fed.send(()).is_ok(), "nobody reads it");
        }
        interrupted.recv().unwrap();
        // Ends when the command does.
        while feed() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    // More than a pipe holds: it is being imported.
    for _ in 0..FED {
        feeding.recv_timeout(PATIENCE).unwrap();
    }
    let kill =
        std::process::Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    interrupt.send(()).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it did not stop");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    feeder.join().unwrap();
    assert_eq!(status.code(), Some(130));
    assert_eq!(place.json("volume list"), serde_json::json!([]));
    place.dbs("check").ok("check");
}

/// Found by a tester: with a reader that died, a part of an image was taken for the whole.
#[test]
fn data_that_nobody_reads_to_its_end_is_a_failure() {
    let place = Place::with_store();
    place.pipe("volume import v -", &noise(7, 8 << 20)).ok("import");
    // A label for each of many snapshots: more than a pipe holds.
    let label = "x".repeat(4000);
    for n in 0..40 {
        place.dbs(&format!("snapshot create v@{n} --label long={label}")).ok("snapshot");
    }
    for (args, code) in [("volume export v -", 1), ("dump", 1), ("snapshot list v", 0)] {
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).args(args.split_whitespace());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut reader = child.stdout.take().unwrap();
        reader.read_exact(&mut [0; 10]).unwrap();
        drop(reader);
        assert_eq!(child.wait().unwrap().code(), Some(code), "{args}");
    }
}

#[test]
fn a_full_store_says_so() {
    let place = Place::new();
    place.dbs("init store.dbs --size 64MiB").ok("init");
    let full: Run = place.pipe("volume import v -", &noise(9, 100 << 20));
    full.exits(12, "no space");
    assert_eq!(place.json("volume list"), serde_json::json!([]));
    place.pipe("volume import v -", &noise(9, 8 << 20)).ok("space is back");
}

/// It counted heads, and deleted ones that were still being merged.
#[test]
fn a_check_counts_the_snapshots_that_are_listed() {
    let place = Place::with_store();
    for volume in ["v", "w"] {
        place.dbs(&format!("volume create {volume} 8MiB")).ok("create");
    }
    let checked = || place.json("check")["snapshots_checked"].clone();
    assert_eq!(checked(), 0);
    let server = place.serve("");
    for name in ["v@a", "v@b", "w@a"] {
        place.dbs(&format!("snapshot create {name}")).ok(name);
    }
    place.dbs("snapshot delete v@a --yes").ok("delete");
    place.dbs("vacuum").ok("vacuum");
    assert_eq!(checked(), 2);
    assert_eq!(server.stop().0, Some(0));
    assert_eq!(checked(), 2);
}

/// It cut off all free space, under clients that write.
#[test]
fn a_vacuum_leaves_room_for_new_data() {
    let place = Place::with_store();
    place.pipe("volume import v -", &noise(3, 16 << 20)).ok("import");
    let server = place.serve("--nbd unix:nbd.sock");
    let vacuumed = place.json("vacuum");
    assert_eq!(vacuumed["free"], 64 << 20, "{vacuumed}");
    assert_eq!(place.json("info")["free"], 64 << 20);
    assert!(vacuumed["after"].as_u64() < vacuumed["before"].as_u64());
    place.pipe("volume import w -", &noise(4, 32 << 20)).ok("there is room");
    assert_eq!(place.json("vacuum --keep 8MiB")["free"], 8 << 20);
    let asks = place.dbs("vacuum --keep 0").exits(2, "asks").stderr;
    assert!(asks.contains("dbs grow"), "{asks}");
    assert_eq!(place.json("vacuum --keep 0 --yes")["free"], 0);
    place.pipe("volume import x -", &noise(4, 4 << 20)).exits(12, "no room is left");
    assert_eq!(server.stop().0, Some(0));
    place.dbs("check").ok("check");
}

/// The metrics that a text names.
fn metric_names(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("dbs_"))
}

#[test]
fn metrics_tell_of_every_volume() {
    let place = Place::with_store();
    place.pipe("volume import v -", &noise(4, 8 << 20)).ok("import");
    for read_only in ["", " --read-only"] {
        let server = place.serve(&format!("--metrics 127.0.0.1:0{read_only}"));
        // Beside a server that reads, a command opens the store itself.
        place.dbs("volume export v -").ok("export");
        let read = if read_only.is_empty() { 8 << 20 } else { 0 };
        let address = server.ready["metrics"].as_str().expect("its address").to_owned();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let get = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        std::io::Write::write_all(&mut stream, get).unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
        let value = |name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name} in {text}")).trim().parse().unwrap()
        };
        let alerts = include_str!("../../../contrib/prometheus-alerts.yaml");
        let (alerts, _) = alerts.split_once("name: longhorn").unwrap();
        let dashboard = include_str!("../../../contrib/grafana-dashboard.json");
        serde_json::from_str::<Value>(dashboard).unwrap();
        for name in metric_names(alerts).chain(metric_names(dashboard)) {
            assert!(
                text.contains(&format!("# TYPE {name} ")),
                "{name} is in contrib, and not served"
            );
        }
        assert_eq!(value("dbs_store_snapshots "), 0);
        assert_eq!(value("dbs_store_snapshot_slots "), 1);
        assert_eq!(value("dbs_volume_size_bytes{volume=\"v\"} "), 8 << 20);
        assert_eq!(value("dbs_volume_read_bytes_total{volume=\"v\"} "), read);
        assert_eq!(value("dbs_volume_reads_total{volume=\"v\"} ") > 0, read > 0);
        assert_eq!(value("dbs_volume_writes_total{volume=\"v\"} "), 0);
        assert_eq!(server.stop().0, Some(0));
    }
}

#[test]
fn errors_blame_what_is_wrong() {
    let place = Place::with_store();
    place.dbs("volume create v 1MiB").ok("create");
    place.dbs("snapshot create v@s").ok("snapshot");
    let odd = place.dbs("volume diff v@s v --offset 3").exits(2, "odd").stderr;
    assert!(odd.contains("multiples of 512"), "{odd}");
    for args in ["volume create v 1MiB", "snapshot create v@s", "volume clone v@s v"] {
        place.dbs(args).exits(13, args);
    }
    for name in ["a\u{202e}b", "e\u{301}"] {
        place.dbs(&format!("volume create {name} 1MiB")).exits(2, name);
        place.dbs(&format!("volume rename v {name}")).exits(2, name);
        place.dbs(&format!("snapshot create v@{name}")).exits(2, name);
    }
}
