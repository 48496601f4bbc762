//! `dbs bench` on everything it can measure. How fast that is does not matter here.

use crate::support::{Place, Run, noise};
use serde_json::Value;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Tests of each group that take no time.
const SHORT: &str = "--time 20ms --size 16MiB";
const TESTS: usize = 21;

fn results(report: &Value) -> &Vec<Value> {
    report["results"].as_array().unwrap()
}

fn result<'a>(report: &'a Value, name: &str) -> &'a Value {
    results(report).iter().find(|result| result["name"] == name).unwrap()
}

/// Names of the tests that ran.
fn measured(report: &Value) -> Vec<&str> {
    let ran = results(report).iter().filter(|result| result["skipped"].is_null());
    ran.map(|result| result["name"].as_str().unwrap()).collect()
}

/// Checks that the figures of a test that ran fit each other.
#[track_caller]
fn plausible(report: &Value, name: &str) {
    let result = result(report, name);
    let number = |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("{key} in {result}"));
    assert!(number("requests") >= 1.0 && number("seconds") > 0.0, "{result}");
    assert!((number("iops") - number("requests") / number("seconds")).abs() < 1.0, "{result}");
    assert!(
        (number("bandwidth") - number("iops") * number("block_size")).abs() < 4096.0,
        "{result}"
    );
    let latency = |key: &str| result["latency"][key].as_u64().unwrap();
    let order = ["min_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"].map(latency);
    assert!(order[0] > 0 && order.is_sorted(), "{result}");
    assert!((order[0]..=order[5]).contains(&latency("mean_ns")), "{result}");
}

#[test]
fn an_idle_and_a_served_store() {
    for served in [false, true] {
        let place = Place::new();
        place.dbs("init store.dbs --size 1GiB").ok("init");
        let server = served.then(|| place.serve(""));
        // Hundreds of snapshots take a while, and are the same either way.
        let short = "--only iops,bandwidth,latency,space,flush,read-chain-1,read-chain-16";
        let (only, tests) = if served { (short, TESTS - 2) } else { ("", TESTS) };
        let report = place.json(&format!("bench {SHORT} --plot plot.svg {only}"));
        assert_eq!(results(&report).len(), tests);
        let ran = measured(&report);
        assert_eq!(ran.len(), tests, "{ran:?}");
        ran.iter().for_each(|name| plausible(&report, name));
        let target = &report["target"];
        assert_eq!((&target["kind"], &target["length"]), (&"store".into(), &(16 << 20).into()));
        let cpu_of = if served { "server" } else { "process" };
        assert_eq!(target["cpu_of"], cpu_of);
        assert!(results(&report).iter().all(|result| result["cpu_seconds"].is_f64()));
        assert_eq!(place.json("volume list"), serde_json::json!([]), "nothing is left");
        assert_eq!(place.json("info")["allocated"], 0);
        let plot = std::fs::read_to_string(place.path("plot.svg")).unwrap();
        assert!(plot.starts_with("<svg ") && plot.ends_with("</svg>\n"));
        for part in ["sequential write", "15 snapshots", "after snapshot", "IOPS", "MB/s", "us"] {
            assert!(plot.contains(part), "{part} is not in the plot");
        }
        if let Some(server) = server {
            assert_eq!(server.stop().0, Some(0));
        }
        place.dbs("check").ok("check");
    }
}

#[test]
fn people_get_a_table() {
    let place = Place::with_store();
    let only = "--only rand-read-lat,first-write,overwrite,read-chain-1,read-chain-256";
    let text = place.dbs(&format!("bench {SHORT} {only}")).ok("bench").text();
    let row = text.lines().find(|line| line.starts_with("rand-read-lat")).unwrap();
    assert!(row.contains("4 KiB") && row.split_whitespace().count() == 11, "{row}");
    assert!(text.contains("first write: ") && text.contains(" of overwrite"), "{text}");
    // 255 snapshots take more than the store has.
    assert!(text.contains("not measured: read-chain-256: it needs 510"), "{text}");
    assert!(!text.contains("\nread-chain-256 "), "{text}");
}

#[test]
fn a_volume_that_is_there() {
    let place = Place::with_store();
    let image = noise(1, 32 << 20);
    place.pipe("volume import v -", &image).ok("import");
    place.json("snapshot create v@s");
    let content = || place.pipe("volume export v -", b"").ok("export").stdout;
    for served in [false, true] {
        let server = served.then(|| place.serve(""));
        for spec in ["v", "v@s"] {
            let report = place.json(&format!("bench {spec} --time 20ms"));
            assert_eq!(measured(&report).len(), 6, "the reads of the matrix");
            measured(&report).iter().for_each(|name| plausible(&report, name));
            assert_eq!(report["target"]["length"], 32 << 20, "all of it");
            assert_eq!(report["notes"], serde_json::json!([]));
        }
        assert!(content() == image, "it was only read");
        refused_unless_confirmed(&place);
        assert!(content() == image, "it was not written");
        place.dbs("bench v@s --only rand-write-lat --write --yes").exits(2, "a snapshot");
        place.dbs("bench w --time 20ms").exits(10, "no such volume");
        if let Some(server) = server {
            assert_eq!(server.stop().0, Some(0));
        }
    }
    let report = place.json("bench v --time 20ms --write --yes --size 16MiB");
    assert_eq!(measured(&report).len(), 15, "the matrix, overwrite and flushes");
    plausible(&report, "write-flush-16");
    let now = content();
    assert!(now[..16 << 20] != image[..16 << 20] && now[16 << 20..] == image[16 << 20..]);
    let snapshot = place.pipe("volume export v@s -", b"").ok("export").stdout;
    assert!(snapshot == image, "snapshots stay");
}

fn refused_unless_confirmed(place: &Place) {
    let refused = place.dbs("bench v --time 20ms --write").exits(2, "not confirmed");
    assert!(refused.stderr.contains("--yes"), "{}", refused.stderr);
    let refused = place.dbs("bench v --only rand-write-iops").exits(2, "not allowed");
    assert!(refused.stderr.contains("--write"), "{}", refused.stderr);
    place.dbs("bench v --only first-write").exits(2, "not possible");
    place.dbs("bench v --size 33MiB").exits(2, "larger than it is");
    place.dbs("bench v --size 8MiB").exits(2, "too small");
}

#[test]
fn an_nbd_export() {
    let place = Place::with_store();
    let image = noise(2, 16 << 20);
    place.pipe("volume import v -", &image).ok("import");
    let server = place.serve("--nbd unix:nbd.sock --nbd tcp:0");
    let uri = "nbd+unix:///v?socket=nbd.sock";
    let report = place.json(&format!("bench {uri} --time 20ms"));
    assert_eq!(measured(&report).len(), 6);
    measured(&report).iter().for_each(|name| plausible(&report, name));
    assert_eq!(report["target"]["kind"], "nbd");
    assert!(result(&report, "first-write")["skipped"].as_str().unwrap().contains("not possible"));
    let tcp = server.ready["nbd"][1].as_str().unwrap().replace("tcp:", "nbd://");
    let report = place.json(&format!("bench {tcp}/v --time 20ms --only latency"));
    assert_eq!(measured(&report), ["rand-read-lat", "seq-read-lat"]);
    place.dbs(&format!("bench {uri} --write --time 20ms")).exits(2, "not confirmed");
    assert!(place.pipe("volume export v -", b"").ok("export").stdout == image, "only read");
    let report = place.json(&format!("bench {uri} --write --yes --time 20ms"));
    assert_eq!(measured(&report).len(), 15);
    place.dbs("bench nbd+unix:///x?socket=nbd.sock").exits(2, "no such export");
    place.dbs("bench nbd+unix:///v?socket=none.sock").exits(1, "no such server");
    place.dbs("bench nbds://localhost/v").exits(2, "TLS");
    place.dbs("bench nbd:v").exits(10, "no URI but a volume's name");
    assert_eq!(server.stop().0, Some(0));
}

#[test]
fn a_file() {
    let place = Place::new();
    let image = noise(3, 20 << 20);
    std::fs::write(place.path("file"), &image).unwrap();
    for driver in ["auto", "pread"] {
        let report = place.json(&format!("bench --device file --time 20ms --driver {driver}"));
        assert_eq!(measured(&report).len(), 6);
        measured(&report).iter().for_each(|name| plausible(&report, name));
        assert_eq!(report["target"]["length"], 20 << 20);
    }
    place.dbs("bench --device file --write").exits(2, "not confirmed");
    assert!(std::fs::read(place.path("file")).unwrap() == image, "only read");
    let report = place.json(&format!("bench --device file {SHORT} --write --yes"));
    assert_eq!(measured(&report).len(), 15);
    let now = std::fs::read(place.path("file")).unwrap();
    assert!(now.len() == image.len() && now[16 << 20..] == image[16 << 20..]);
    assert!(now[..1 << 20] != image[..1 << 20], "the rest was written");

    std::fs::write(place.path("small"), vec![0; 1 << 20]).unwrap();
    let refused = place.dbs("bench --device small").exits(2, "small");
    assert!(refused.stderr.contains("too small"), "{}", refused.stderr);
    place.dbs("bench --device absent").exits(10, "absent");
    place.dbs("bench --device absent --write --yes").exits(10, "absent");
    place.dbs("bench --device .").exits(2, "a directory");
    place.dbs("bench v --device file").exits(2, "two targets");
}

#[test]
fn a_store_is_no_plain_file() {
    let place = Place::with_store();
    let refused = place.dbs("bench --device store.dbs --write").exits(2, "not confirmed");
    assert!(refused.stderr.contains("holds"), "it says what is there: {}", refused.stderr);
    let server = place.serve("");
    place.dbs("bench --device store.dbs --write --yes").exits(11, "served");
    place.dbs("bench --device store.dbs").exits(11, "served");
    assert_eq!(server.stop().0, Some(0));
    place.dbs("check").ok("check");
}

#[test]
fn refusals() {
    let place = Place::with_store();
    let full = place.dbs("bench --size 300MiB --time 20ms").exits(12, "no room");
    assert!(full.stderr.contains("--size"), "{}", full.stderr);
    for args in [
        "--only nothing",
        "--only rand-read",
        "--depth 0",
        "--depth 257",
        "--time 0s",
        "--size 15MiB",
        "--plot picture.png",
        "--plot no/such/directory/a.svg",
    ] {
        let refused = place.dbs(&format!("bench --time 20ms {args}"));
        assert!([1, 2].contains(&refused.code), "{args}: {}", refused.stderr);
    }
    assert_eq!(place.json("volume list"), serde_json::json!([]));
    let server = place.serve("--read-only");
    place.dbs(&format!("bench {SHORT}")).exits(1, "read-only");
    assert_eq!(server.stop().0, Some(0));
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    for served in [false, true] {
        let place = Place::with_store();
        let server = served.then(|| place.serve(""));
        for args in ["--time 1h --only rand-read-lat", "--time 1h --only read-chain-16"] {
            let run = interrupted(&place, args);
            assert_eq!(run.code, 130, "{}", run.stderr);
            assert_eq!(place.json("volume list"), serde_json::json!([]), "{args}");
        }
        if let Some(server) = server {
            assert_eq!(server.stop().0, Some(0));
        }
        place.dbs("check").ok("check");
    }
}

/// Runs a measurement and stops it in the middle of a test.
fn interrupted(place: &Place, args: &str) -> Run {
    let mut child = place
        .bare()
        .env("DBS_STORE", place.store())
        .args(["--progress", "bench", "--size", "16MiB"])
        .args(args.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let (mut progress, mut part) = (String::new(), [0; 256]);
    while !progress.contains(" left") {
        let count = stderr.read(&mut part).unwrap();
        assert!(count > 0, "it ended by itself: {progress}");
        progress += &String::from_utf8_lossy(&part[..count]);
    }
    let sent = Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it did not stop");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    stderr.read_to_string(&mut progress).unwrap();
    Run { stderr: progress, ..Run::new(child.wait_with_output().unwrap()) }
}
