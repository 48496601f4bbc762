//! `dbs top`: the live screen on a terminal, and what it prints for scripts, of a server that is really used.

use crate::support::{Place, Run, Served};
use dbs_nbd::{Client, ClientOptions};
use nix::pty::openpty;
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How the terminal is left.
const LEFT: &str = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l";
const PATIENCE: Duration = Duration::from_secs(60);

fn serve(place: &Place) -> Served {
    place.serve(&format!("--nbd unix:{}", place.path("nbd").display()))
}

/// A store with three volumes, of which one has a snapshot.
fn prepare(place: &Place) {
    place.init();
    for volume in ["idle", "busy", "another"] {
        place.json(&format!("volume create {volume} 8MiB"));
    }
    place.json("snapshot create idle@s");
}

/// A client that writes and reads the volume `busy` until it is dropped, also when the server is another one.
struct Load {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn start(place: &Place) -> Self {
        let (socket, over) = (place.path("nbd"), Arc::<AtomicBool>::default());
        let stop = Arc::clone(&over);
        let thread = thread::spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                let client = Client::connect_unix(&socket, "busy", &ClientOptions::default());
                let Ok(mut client) = client else {
                    thread::sleep(Duration::from_millis(20));
                    continue;
                };
                while !stop.load(Ordering::SeqCst)
                    && client.write_at(0, &[7; 4096], false).is_ok()
                    && client.read_at(0, &mut [0; 4096]).is_ok()
                {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// `dbs top` on a terminal of its own.
struct Screen {
    child: Child,
    keyboard: File,
    terminal: OwnedFd,
    modes: Termios,
    printed: Arc<Mutex<Vec<u8>>>,
}

impl Screen {
    fn start(command: &mut Command) -> Self {
        let pty = openpty(None, None).unwrap();
        let end = |fd: &OwnedFd| Stdio::from(fd.try_clone().unwrap());
        let (keyboard, printed) = (File::from(pty.master), Arc::<Mutex<Vec<u8>>>::default());
        let (mut master, bytes) = (keyboard.try_clone().unwrap(), Arc::clone(&printed));
        thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = master.read(&mut piece) {
                bytes.lock().unwrap().extend_from_slice(&piece[..count]);
            }
        });
        set_size(&keyboard, 80, 24);
        let modes = tcgetattr(&pty.slave).unwrap();
        let command =
            command.stdin(end(&pty.slave)).stdout(end(&pty.slave)).stderr(end(&pty.slave));
        let child = command.spawn().unwrap();
        Self { child, keyboard, terminal: pty.slave, modes, printed }
    }

    /// Of the store of a place, with arguments.
    fn top(place: &Place, args: &str) -> Self {
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).env("TERM", "xterm").arg("top");
        Self::start(command.args(args.split_whitespace()))
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn printed(&self) -> String {
        String::from_utf8_lossy(&self.printed.lock().unwrap()).into_owned()
    }

    /// The lines that were drawn last.
    fn lines(&self) -> Vec<String> {
        let printed = self.printed();
        let frame = printed.rsplit_once("\x1b[1;1H").map(|(drawn, _)| drawn).unwrap_or_default();
        let frame = frame.rsplit_once("\x1b[H").map(|(_, frame)| frame).unwrap_or_default();
        let mut text = String::new();
        for (at, part) in frame.split("\x1b[").enumerate() {
            // What follows the letter that ends a sequence.
            let end = part.find(|c: char| c.is_ascii_alphabetic()).map_or(0, |at| at + 1);
            text += if at == 0 { part } else { &part[end..] };
        }
        text.split("\r\n").map(|line| line.trim_end().to_owned()).collect()
    }

    /// Waits until the screen is as it should be.
    #[track_caller]
    fn shows(&self, what: &str, is_right: impl Fn(&[String]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_right(&self.lines()) {
            assert!(Instant::now() < deadline, "{what}:\n{}", self.lines().join("\n"));
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until it has ended and printed this; the terminal is as it was before.
    fn ended(mut self, last: &str) -> Run {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.lines().join("\n"));
            thread::sleep(Duration::from_millis(10));
        }
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        let now = tcgetattr(&self.terminal).unwrap();
        let modes = |modes: &Termios| (modes.input_modes, modes.output_modes, modes.local_modes);
        assert_eq!(modes(&now), modes(&self.modes), "the terminal is as it was");
        // What it printed last takes a moment.
        while !self.printed().contains(last) {
            assert!(Instant::now() < deadline, "no {last:?} in {:?}", self.printed());
            thread::sleep(Duration::from_millis(10));
        }
        Run { code, stdout: Vec::new(), stderr: self.printed() }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

fn set_size(terminal: &File, columns: u16, rows: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).unwrap();
}

/// The row of a table with this name.
fn row<'a>(lines: &'a [String], name: &str) -> Option<Vec<&'a str>> {
    let rows = lines.iter().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.skip(5).find(|row| row.first() == Some(&name))
}

/// Columns of the row of `busy`, by their headings.
fn busy(lines: &[String], title: &str) -> Option<String> {
    let at = row(lines, "NAME")?.iter().position(|found| *found == title)?;
    row(lines, "busy")?.get(at).map(|cell| (*cell).to_owned())
}

fn first(lines: &[String]) -> Option<&str> {
    lines.get(6)?.split_whitespace().next()
}

#[test]
fn the_screen_shows_what_happens_and_follows_keys() {
    let place = Place::new();
    prepare(&place);
    let served = serve(&place);
    let load = Load::start(&place);
    let mut screen = Screen::top(&place, "-d 200ms");
    screen.shows("rates and latency", |lines| {
        let number = |title| busy(lines, title).is_some_and(|cell| cell != "0" && cell != "-");
        first(lines) == Some("busy") && number("IOPS") && number("RB/s") && number("P99")
    });
    let pid = format!("served by process {}", served.pid());
    screen.shows("who serves", |lines| lines[0].ends_with(&pid) && lines.len() == 24);
    screen.press("<");
    screen.shows("sorted by name", |lines| first(lines) == Some("another"));
    screen.press("/bus\r");
    screen.shows("filtered", |lines| {
        first(lines) == Some("busy") && row(lines, "idle").is_none() && lines[4].contains("`bus`")
    });
    screen.press("\x1b");
    screen.shows("all again", |lines| row(lines, "idle").is_some());
    screen.press("2");
    screen
        .shows("clients", |lines| lines[6].starts_with("NBD client") && lines[6].contains("busy"));
    screen.press("?");
    screen.shows("help", |lines| lines.iter().any(|line| line.contains("this help")));
    screen.press("x1u");
    screen.shows("space", |lines| busy(lines, "ALLOC").is_some_and(|cell| cell != "-"));
    set_size(&screen.keyboard, 200, 50);
    screen.signal("WINCH");
    screen.shows("a wide screen", |lines| busy(lines, "DEPTH").is_some() && lines.len() == 50);
    screen.press("p");
    screen.shows("paused", |lines| lines[4].ends_with("PAUSED"));
    // It stops, unless nobody could continue it; then each key is read at once.
    screen.press("\x1a");
    thread::sleep(Duration::from_millis(300));
    screen.signal("CONT");
    thread::sleep(Duration::from_millis(300));
    screen.press("pq");
    screen.ended(LEFT).ok("q");
    drop(load);
}

#[test]
fn the_screen_outlives_the_server() {
    let place = Place::new();
    prepare(&place);
    let served = serve(&place);
    let load = Load::start(&place);
    let screen = Screen::top(&place, "-d 100ms");
    let moves =
        |lines: &[String]| busy(lines, "IOPS").is_some_and(|cell| cell != "0" && cell != "-");
    screen.shows("rates", moves);
    served.stop();
    screen.shows("no server", |lines| {
        lines[23].starts_with("nothing new from the server: nobody serves")
    });
    let served = serve(&place);
    screen
        .shows("another server", |lines| lines[23].starts_with("another server serves the store"));
    let pid = format!("served by process {}", served.pid());
    screen.shows("rates again", |lines| moves(lines) && lines[0].ends_with(&pid));
    drop(load);
    // A server that is silent keeps nobody from leaving.
    served.signal("STOP");
    screen.shows("silence", |lines| lines[23].contains("it has not answered for"));
    screen.signal("TERM");
    let ended = screen.ended("ended by a signal").exits(130, "SIGTERM");
    served.signal("CONT");
    assert!(ended.stderr.contains(LEFT), "the screen was left: {:?}", ended.stderr);
}

#[test]
fn scripts_get_a_document_and_a_table() {
    let place = Place::new();
    prepare(&place);
    let _served = serve(&place);
    let load = Load::start(&place);
    place.pipe("volume import data -", &crate::support::noise(1, 4 << 20)).ok("import");
    let mut scrub = place
        .bare()
        .env("DBS_STORE", place.store())
        .args(["scrub", "--rate", "4096"])
        .spawn()
        .unwrap();
    let deadline = Instant::now() + PATIENCE;
    let document = loop {
        let document = place.json("top --once -d 200ms --usage");
        let busy = document["volumes"].as_array().unwrap().iter().find(|v| v["name"] == "busy");
        let busy = busy.unwrap().clone();
        let moves =
            busy["rates"]["iops"].as_f64().unwrap() > 0.0 && busy["latency"]["writes"].is_object();
        if moves && !document["jobs"].as_array().unwrap().is_empty() {
            assert!(busy["latency"]["reads"]["p50_ns"].as_u64().unwrap() > 0, "{busy}");
            assert!(busy["in_flight"].as_u64().unwrap() <= 1, "{busy}");
            assert_eq!(
                (&busy["usage"]["allocated"], &busy["snapshots"]),
                (&(1 << 20).into(), &0.into())
            );
            break document;
        }
        assert!(Instant::now() < deadline, "{document:#}");
    };
    let job = &document["jobs"][0];
    assert_eq!(
        (&job["what"], &job["unit"], &job["volume"]),
        (&"scrub".into(), &"bytes".into(), &().into())
    );
    assert!(job["elapsed_ns"].as_u64() > Some(0) && job["total"].as_u64() > Some(0), "{job}");
    assert_eq!(document["clients"][0]["volume"], "busy");
    assert!(document["seconds"].as_f64().unwrap() >= 0.2 && document["store"]["size"].is_u64());
    scrub.kill().unwrap();
    scrub.wait().unwrap();
    // The server sees that its client is gone, and the job is over.
    while !place.json("top --once -d 100ms")["jobs"].as_array().unwrap().is_empty() {
        assert!(Instant::now() < deadline, "the job does not end");
    }
    let table = place.dbs("top --once -d 100ms --sort name --filter i").ok("a table").text();
    let lines: Vec<_> = table.lines().collect();
    assert!(lines[0].starts_with("NAME  IOPS") && !lines[0].contains("EXCL"), "{table}");
    assert!(lines.len() == 2 && lines[1].starts_with("idle"), "{table}");
    drop(load);
}

#[test]
fn what_cannot_be_watched_is_refused_with_the_way_out() {
    let place = Place::new();
    prepare(&place);
    for (args, code, part) in [
        ("top", 2, "--once"),
        ("--json top", 2, "--once"),
        ("top --once", 1, "dbs serve"),
        ("top --once --sort x", 2, "P99"),
        ("top --once -d 5ms", 2, "100ms"),
    ] {
        let refused = place.dbs(args).exits(code, args);
        assert!(refused.stderr.contains(part), "{args}: {}", refused.stderr);
    }
    for term in ["dumb", ""] {
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).env("TERM", term).arg("top");
        Screen::start(&mut command).ended("TERM").exits(2, term);
    }
    Screen::top(&place, "").ended("nobody serves").exits(1, "nobody serves it");
}
