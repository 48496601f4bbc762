//! The screens as text, and what keys and answers do to them.

use super::keys::{Key, keys};
use super::measure::Measured;
use super::screen::{Screen, Style, Todo};
use super::table::{Order, fit};
use super::{Usages, interval};
use dbs_core::info::Usage;
use dbs_frontend::Times;
use dbs_server::top::Top;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use unicode_width::UnicodeWidthStr;

fn volume(name: &str, requests: u64) -> Value {
    json!({
        "name": name, "uuid": format!("uuid of {name}"), "size": 10_u64 << 30, "snapshots": name.len(), "depth": 3,
        "open": requests > 0, "rebuilding": name.starts_with("new"),
        "reads": requests, "writes": 2 * requests,
        "read_bytes": 4096 * requests, "written_bytes": 65536 * requests,
    })
}

/// What a server answers so many seconds after it was started.
fn answer(seconds: u64) -> Top {
    let mut volumes = vec![
        volume("a", 0),
        volume("busy", 1000 * seconds),
        volume(
            "pvc-0f6d3c1e-9a51-4c07-8c1a-27b1d3c4e5f6-of-a-namespace-with-a-long-name",
            3 * seconds,
        ),
        volume("new", 100 * seconds),
        volume("evil\u{1b}[2J\u{202e}", seconds),
        volume("日本語", 0),
    ];
    volumes.extend((0..60).map(|number| volume(&format!("vm-{number:02}"), 0)));
    let client = |id: u64, volume: &str, snapshot: Option<&str>| {
        json!({
            "kind": "nbd", "id": id, "who": format!("NBD client tcp:10.0.0.{id}:5123"), "volume": volume,
            "snapshot": snapshot, "read_only": snapshot.is_some(), "since_ns": 5, "rates": null,
            "requests": {
                "reads": 500 * seconds, "read_bytes": 4096 * 500 * seconds, "writes": 1000 * seconds,
                "written_bytes": 65536 * 1000 * seconds, "others": 3,
            },
            "load": {
                "in_flight": 8 + id,
                "read_latency": [[106_496, 495 * seconds], [5_242_880, 5 * seconds]],
                "write_latency": [[851_968, 1000 * seconds]],
            },
        })
    };
    let store = json!({
        "format": "2.0.0", "uuid": "u", "size": 100_u64 << 30, "max_size": 1_u64 << 40, "extent_size": 1 << 20,
        "extents_total": 1000, "extents_free": 750, "extents_pending": 0, "allocated": 25_u64 << 30,
        "free": 75_u64 << 30, "metadata": 0, "volumes": 66, "volumes_max": 1024, "snapshots": 400,
        "snapshots_max": 65536, "snapshots_deleting": 2, "sequence": 9, "read_only": false, "driver": "io_uring",
        "tail": true, "warnings": [],
    });
    let device = json!({
        "kind": "device", "id": null, "who": "/dev/ublkb0", "volume": "vm-00", "snapshot": null,
        "read_only": false, "since_ns": 6, "requests": null, "rates": null,
    });
    let job = |what: &str, elapsed: u64, done: u64, total: u64, unit: &str| {
        json!({
            "what": what, "volume": null, "since_ns": 7, "elapsed_ns": elapsed, "done": done, "earlier": 0,
            "total": total, "unit": unit,
        })
    };
    serde_json::from_value(json!({
        "pid": 4321, "started_ns": 7, "clock_ns": seconds * 1_000_000_000, "store": store, "volumes": volumes,
        "clients": [client(1, "busy", None), client(2, "busy", Some("s")), device], "devices": [],
        "jobs": [
            job("scrub", 60_000_000_000, 10 << 30, 25 << 30, "bytes"),
            job("merge", 0, 0, 5000 - 100 * seconds, "steps"),
        ],
    }))
    .unwrap()
}

fn screen(width: usize, height: usize) -> Screen {
    let mut screen =
        Screen::new(Path::new("/dev/mapper/store"), Duration::from_secs(2), Order::default());
    screen.resize(width, height);
    screen.take(answer(10));
    screen.take(answer(12));
    screen
}

fn text(screen: &Screen) -> String {
    let lines = screen.lines();
    lines.iter().map(|(_, line)| format!("{}\n", line.trim_end())).collect()
}

fn press(screen: &mut Screen, bytes: &[u8]) -> Todo {
    keys(bytes).into_iter().map(|key| screen.key(key)).last().unwrap()
}

fn usages() -> Usages {
    let usage = Usage { allocated: 3 << 30, exclusive: 1 << 30, ..Usage::default() };
    Usages::from([("uuid of busy".to_owned(), usage)])
}

/// The names in the first column.
fn names(screen: &Screen) -> Vec<String> {
    let rows = screen.lines().into_iter().skip_while(|(style, _)| *style != Style::Heading).skip(1);
    let name = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let mut names: Vec<_> = rows.filter_map(|(_, line)| name(&line)).collect();
    // The last line is no row.
    names.pop();
    names
}

/// All screens, beside the recorded ones in the folder `screens`.
#[test]
fn screens_are_as_recorded() {
    let after = |keys: &[u8]| {
        let mut screen = screen(80, 24);
        press(&mut screen, keys);
        text(&screen)
    };
    let mut spaces = screen(80, 24);
    press(&mut spaces, b"u");
    spaces.take_usages(Ok(usages()));
    let small = [
        text(&screen(80, 24)),
        text(&spaces),
        after(b"2"),
        after(b"3"),
        after(b"?"),
        after(b"/VM-1\rr"),
    ];
    let bar = format!("{}\n", "=".repeat(80));
    for (name, found) in [("80x24", small.join(&bar)), ("200x50", text(&screen(200, 50)))] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("src/commands/top/screens/{name}.txt"));
        if std::env::var_os("RECORD_SCREENS").is_some() {
            std::fs::write(&path, &found).unwrap();
        }
        let recorded = std::fs::read_to_string(&path).unwrap();
        assert_eq!(found, recorded, "to record it: RECORD_SCREENS=1\n{found}");
    }
}

#[test]
fn every_terminal_gets_as_many_lines_and_columns_as_it_has() {
    for keys in ["1", "2", "3", "?", "u", "/日本", "p"] {
        for (width, height) in
            (1..220).step_by(7).flat_map(|width| [(width, 1), (width, 7), (width, 30)])
        {
            let mut screen = screen(width, height);
            press(&mut screen, keys.as_bytes());
            let lines = screen.lines();
            assert_eq!(lines.len(), height, "{width} x {height}");
            for (_, line) in lines {
                assert!(line.width() <= width, "{} in {width} columns: {line}", line.width());
                assert!(!line.chars().any(dbs_core::is_hidden), "{line:?}");
            }
        }
    }
}

#[test]
fn rates_are_differences_over_the_time_of_the_server() {
    let measured = Measured::new(Some(&answer(10)), answer(12));
    assert!((measured.seconds - 2.0).abs() < 1e-9);
    let busy = measured.volumes[1].rates.unwrap();
    assert_eq!((busy.reads, busy.writes, busy.iops), (1000.0, 2000.0, 3000.0));
    assert_eq!((busy.read_bytes, busy.written_bytes), (4_096_000.0, 65_536_000.0));
    // Both clients, one of them of a snapshot.
    assert_eq!(measured.volumes[1].in_flight, Some(19));
    assert_eq!(measured.volumes[0].in_flight, None);
    assert_eq!(measured.volumes[1].reads.percentile(99), Some(106_496));
    assert_eq!(measured.volumes[1].reads.percentile(100), Some(5_242_880));
    // 10 GiB took a minute, and 15 are left; of the merge 100 steps a second, and 3800.
    assert_eq!(measured.left, [Some(90_000_000_000), Some(38_000_000_000)]);
    // The first answer of a server says nothing of a second.
    let mut other = answer(12);
    other.started_ns = 1;
    for now in [answer(10), answer(9), other] {
        let measured = Measured::new(Some(&answer(10)), now);
        assert!(measured.volumes.iter().all(|flow| flow.rates.is_none()));
        assert!(measured.clients.iter().all(|flow| flow.times() == Times::default()));
    }
}

#[test]
fn a_volume_and_a_client_that_are_new_began_with_nothing() {
    let mut before = answer(10);
    before.volumes[1].uuid = "of one that was deleted".to_owned();
    before.clients.remove(0);
    let measured = Measured::new(Some(&before), answer(12));
    assert_eq!(measured.volumes[1].rates.unwrap().reads, 6000.0);
    assert_eq!(measured.clients[0].rates.unwrap().writes, 6000.0);
    assert_eq!(measured.clients[0].reads.percentile(50), Some(106_496));
}

/// A virtual machine: its requests are counted, and their times are not.
#[test]
fn a_client_without_times_has_rates() {
    let without = |seconds| {
        let mut answer = answer(seconds);
        answer.clients[0].load = None;
        answer
    };
    let measured = Measured::new(Some(&without(10)), without(12));
    let client = &measured.clients[0];
    assert_eq!((client.rates.unwrap().writes, client.in_flight), (1000.0, None));
}

#[test]
fn the_document_has_what_is_on_the_screens() {
    let measured = Measured::new(Some(&answer(10)), answer(12));
    let document = measured.document(&usages());
    let busy = &document["volumes"][1];
    assert_eq!(busy["rates"]["iops"], 3000.0);
    assert_eq!(busy["latency"]["reads"]["p99_ns"], 106_496);
    assert_eq!(busy["latency"]["writes"]["requests"], 4000);
    assert_eq!((&busy["in_flight"], &busy["usage"]["exclusive"]), (&json!(19), &json!(1 << 30)));
    assert_eq!(document["volumes"][0]["latency"], json!({ "reads": null, "writes": null }));
    assert_eq!(document["jobs"][0]["left_ns"], 90_000_000_000_u64);
    assert_eq!(document["clients"][0]["rates"]["writes"], 1000.0);
    assert_eq!(document["clients"][2]["rates"], Value::Null);
    assert!(document["clients"][0].get("load").is_none());
    assert_eq!(document["seconds"], 2.0);
}

#[test]
fn keys_sort_and_reverse_and_filter() {
    let mut screen = screen(80, 24);
    assert_eq!(names(&screen)[..2], ["busy", "new"], "the busiest first");
    press(&mut screen, b"<");
    assert_eq!(names(&screen)[..2], ["a", "busy"], "by name");
    press(&mut screen, b"r");
    assert_eq!(names(&screen)[..2], ["日本語", "vm-59"]);
    // Round the end, to the size, which is the same of all.
    press(&mut screen, b"\x1b[D");
    assert_eq!(names(&screen)[..1], ["a"]);
    press(&mut screen, b"/M-5");
    assert_eq!(names(&screen).len(), 10, "{:?}", names(&screen));
    press(&mut screen, b"9\r");
    assert_eq!(names(&screen), ["vm-59"]);
    press(&mut screen, b"/\x7f\r");
    assert_eq!(names(&screen).len(), 10);
    press(&mut screen, b"\x1b");
    assert_eq!(names(&screen).len(), 17);
    // The state is no name.
    press(&mut screen, b"/ope\r");
    assert!(names(&screen).is_empty());
    // Letters that are typed are no keys.
    press(&mut screen, b"/q");
    assert!(names(&screen).is_empty());
    assert_eq!(press(&mut screen, b"\x1b"), Todo::Nothing);
    assert_eq!(press(&mut screen, b"q"), Todo::Quit);
    assert_eq!(press(&mut screen, b"\x03"), Todo::Quit);
}

#[test]
fn rows_scroll_between_their_ends() {
    let mut screen = screen(80, 24);
    press(&mut screen, b"<");
    for (keys, first) in [
        ("\x1b[B", "busy"),
        ("\x1b[A\x1b[A", "a"),
        ("\x1b[6~", "vm-12"),
        ("\x1bOF", "vm-44"),
        ("\x1b[6~\x1b[B", "vm-44"),
        ("\x1b[A", "vm-43"),
        ("\x1b[1~", "a"),
    ] {
        press(&mut screen, keys.as_bytes());
        assert_eq!(names(&screen)[0], first, "{keys:?}");
    }
    // Fewer rows than before are shown from an end, too.
    press(&mut screen, b"\x1b[F");
    screen.resize(80, 100);
    assert_eq!(names(&screen)[0], "a");
}

#[test]
fn troubles_are_told_until_they_are_over() {
    let mut screen = screen(80, 24);
    let foot = |screen: &Screen| screen.lines().pop().unwrap();
    screen.away("no server listens on \u{1b}[2J");
    let (style, text) = foot(&screen);
    assert!(style == Style::Alert && text.contains("no server listens on \u{fffd}[2J"), "{text}");
    let mut other = answer(1);
    other.started_ns = 5;
    screen.take(other);
    assert!(
        foot(&screen).1.starts_with("another server serves the store now"),
        "{}",
        foot(&screen).1
    );
    press(&mut screen, b"x");
    assert!(foot(&screen).1.starts_with("? help"));
    screen.take_usages(Err("it was \u{1b} stopped".to_owned()));
    assert!(foot(&screen).1.contains("it was \u{fffd} stopped"));
}

#[test]
fn keys_are_read_from_what_terminals_send() {
    use Key::*;
    assert_eq!(keys(b"a\x1b[A\x1bOB\x1b[5~\x1b[H"), [Char('a'), Up, Down, PageUp, Home]);
    assert_eq!(keys(b"\x1b"), [Escape]);
    assert_eq!(keys(b"\x1b[99;1~x\x1b["), [Char('x')]);
    assert_eq!(
        keys("\x03\t\x1b[Z\r\x7f\0ä".as_bytes()),
        [Ctrl('c'), Tab, BackTab, Enter, Backspace, Char('ä')]
    );
    assert_eq!(keys(b"\xff"), [Char('\u{fffd}')]);
}

#[test]
fn names_are_cut_in_the_middle() {
    assert_eq!(fit("abc", 3), "abc");
    assert_eq!(fit("pvc-0123456789-data", 11), "pvc-0..data");
    assert_eq!(fit("日本語日本語", 8), "日..語");
    assert_eq!(fit("abc", 2), "");
    assert_eq!(fit("abc", 0), "");
}

#[test]
fn intervals() {
    assert_eq!(interval("100ms"), Ok(Duration::from_millis(100)));
    for text in ["0", "99ms", "61s", "x"] {
        assert!(interval(text).is_err(), "{text}");
    }
}
