//! The web page of a controller: who is let in, what it says over two replicas, one of which is killed and another one
//! rebuilt, and the same in a real browser, which `dbs-cli/tests/web/volume.py` drives.

use crate::controller::{TEXT_SIZE, client, command_of, controller, modes, replica, run};
use crate::support::*;
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;

const BROWSER: &str = "chromium-headless-shell";
const MIB: u64 = 1 << 20;
/// Enough that a rebuild can be caught while it goes on.
const FILLED_MIB: u64 = 48;

/// A page, as its log and its token file say.
struct Page {
    address: String,
    token: String,
}

impl Page {
    fn of(engine: &Process, place: &Place) -> Self {
        let url = engine.field("web");
        let address = url.strip_prefix("http://").unwrap().trim_end_matches('/').to_owned();
        let token = fs::read_to_string(token_file(place)).unwrap().trim().to_owned();
        assert!(!engine.log().contains(&token), "the token is in the log");
        Self { address, token }
    }

    /// Status and body of a request.
    fn ask(&self, first: &str, token: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let request = format!(
            "{first} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn live(&self) -> Value {
        let (status, body) = self.ask("GET /api/live", &self.token, "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    fn command(&self, method: &str, params: Value) -> (u16, String) {
        let body = json!({ "method": method, "params": params }).to_string();
        self.ask("POST /api/command", &self.token, &body)
    }

    /// What is said of the replica with this address.
    fn replica(&self, address: &str) -> Value {
        let live = self.live();
        let replicas = live["replicas"].as_array().unwrap();
        replicas.iter().find(|of| of["address"] == address).cloned().unwrap_or_default()
    }
}

fn token_file(place: &Place) -> PathBuf {
    place.path().join("web-token")
}

fn engine(place: &Place, replicas: &[&str], more: &[&str]) -> Process {
    let token = token_file(place);
    let web = ["--web", "0", "--web-token", token.to_str().unwrap()];
    controller(place, replicas, &[&web[..], more].concat()).ready()
}

#[test]
fn a_page_without_leave_can_only_look() {
    let place = Place::new();
    let (_a, address) = replica(&place, "a");
    let mut engine = engine(&place, &[&address], &[]);
    let page = Page::of(&engine, &place);
    for (path, status) in [("/", 200), ("/view.js", 200), ("/api/live", 401), ("/nothing", 404)] {
        assert_eq!(page.ask(&format!("GET {path}"), "0123456789abcdef", "").0, status, "{path}");
    }
    assert!(page.ask("GET /", "", "").1.contains("panel-replicas"));
    assert_eq!(page.ask("GET /api/findings", &page.token, "").0, 404);
    run(&engine, &["snapshots", "create", "one"]);
    let live = page.live();
    assert_eq!((&live["admin"], &live["volume"]["name"]), (&json!(false), &json!("vol")));
    assert_eq!(live["volume"]["frontend_state"], "up");
    for (method, params) in [
        ("snapshot.create", json!({"snapshot": "two"})),
        ("snapshot.revert", json!({"snapshot": "one", "created": "x"})),
        ("snapshot.remove", json!({"snapshot": "one", "created": "x"})),
        ("snapshot.purge", json!({})),
    ] {
        assert_eq!(page.command(method, params).0, 403, "{method}");
    }
    // Not without what was confirmed, whoever asks; and nothing else at all.
    assert_eq!(page.command("snapshot.remove", json!({"snapshot": "one"})).0, 400);
    assert_eq!(page.command("frontend.shutdown", json!({})).0, 400);
    assert_eq!(run(&engine, &["snapshots", "ls"]).trim(), "ID\none");
    engine.stop();
}

/// Over TLS, and not at all where nobody would know the token.
#[test]
fn a_page_needs_a_token_and_may_have_a_certificate() {
    let place = Place::new();
    let (_a, address) = replica(&place, "a");
    let mut command = command_of(&place, "socket", &[&address], &[]);
    command.env("DBS_CONTROLLER_WEB", "0");
    let mut without = Process::spawn(command);
    assert_eq!(without.wait().code(), Some(1));
    assert!(without.log().contains("--web-token"), "{}", without.log());

    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    fs::write(place.path().join("server-cert.pem"), params.self_signed(&key).unwrap().pem())
        .unwrap();
    fs::write(place.path().join("server-key.pem"), key.serialize_pem()).unwrap();
    let dir = place.path().to_str().unwrap().to_owned();
    let mut engine = engine(&place, &[&address], &["--web-tls-dir", &dir]);
    let url = engine.field("web");
    let at = url.strip_prefix("https://").unwrap().trim_end_matches('/');
    // Who speaks no TLS hears nothing.
    let mut plain = TcpStream::connect(at).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _reset = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    engine.stop();
}

/// Whatever keeps the page from being served does not keep the volume from it.
#[test]
fn a_volume_is_served_without_its_page() {
    let place = Place::new();
    let (_a, address) = replica(&place, "a");
    let token = token_file(&place);
    fs::write(&token, "0123456789abcdef\n").unwrap();
    let others = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(&token, others).unwrap();
    let outside = format!(
        "0.0.0.0:{}",
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    );
    let good = place.path().join("good");
    for (at, token) in [("0", &token), (outside.as_str(), &good)] {
        let more = ["--web", at, "--web-token", token.to_str().unwrap()];
        let mut engine = controller(&place, &[&address], &more).ready();
        assert_eq!(engine.field("web"), "none", "{at}");
        assert!(engine.log().contains("event=web"), "{}", engine.log());
        write(&client(&place));
        engine.stop();
    }
}

fn write(data: &longhorn_testing::DataClient) {
    let content = vec![7; MIB as usize];
    (0..FILLED_MIB).for_each(|at| data.write(at * MIB, &content).unwrap());
}

fn program(name: &str) -> Option<PathBuf> {
    let found = std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|directory| directory.join(name))
        .find(|path| path.exists());
    if found.is_none() {
        println!("SKIPPED the web page of a controller in a browser: {name} is missing");
    }
    found
}

/// The browser, which waits after each step until it is told to go on.
struct Browser {
    child: Child,
    says: BufReader<ChildStdout>,
    told: ChildStdin,
}

impl Browser {
    fn start(page: &Page) -> Option<Self> {
        let (browser, python) = (program(BROWSER)?, program("python3")?);
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dbs-cli/tests/web/volume.py");
        let mut command = Command::new(python);
        command.arg(script).arg(browser).arg(format!("http://{}/#{}", page.address, page.token));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        let told = child.stdin.take().unwrap();
        Some(Self { child, says, told })
    }

    /// Waits until it has done the step of this name.
    fn done(&mut self, step: &str) {
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), step, "what the browser has met is above");
    }

    fn go_on(&mut self) {
        writeln!(self.told).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _status = self.child.wait();
    }
}

/// The step of this name, if there is a browser, which then waits to be told to go on.
fn step(browser: &mut Option<Browser>, name: &str) {
    if let Some(browser) = browser {
        browser.go_on();
        browser.done(name);
    }
}

/// A process that is stopped until this goes: what fails meanwhile must not leave a rebuild that waits for ever.
struct Stopped<'a>(&'a Process);

impl<'a> Stopped<'a> {
    fn new(process: &'a Process) -> Self {
        process.signal(Signal::SIGSTOP);
        Self(process)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::SIGCONT);
    }
}

/// Adds a replica, and holds it in the midst of its rebuild, by stopping the one that it is filled from, while
/// `meanwhile` looks at it. Says whether it was caught there.
fn rebuild(
    (engine, page): (&Process, &Page),
    source: &Process,
    address: &str,
    meanwhile: &mut dyn FnMut(),
) -> bool {
    // Nobody is to give up while the source is stopped.
    let args = ["add-replica", address, "--size", TEXT_SIZE, "--current-size", TEXT_SIZE];
    let args = [&args[..], &["--file-sync-http-client-timeout", "600"]].concat();
    thread::scope(|scope| {
        let added = scope.spawn(|| run(engine, &args));
        let of = |field: &str| page.replica(address)[field].clone();
        eventually("it takes part", || of("mode") == "WO" || added.is_finished());
        let mut caught = false;
        while !caught && !added.is_finished() {
            let stopped = Stopped::new(source);
            // What was asked before it was stopped says nothing.
            let turn = page.live()["cursor"].clone();
            eventually("the page looks again", || {
                page.live()["cursor"] != turn
                    && (of("age_ms").as_u64() < Some(500) || of("mode") != "WO")
            });
            // It is in progress some moments before anybody knows from where.
            caught = of("mode") == "WO"
                && of("rebuild")["state"] == "in_progress"
                && of("rebuild")["from"].is_array();
            if caught {
                meanwhile();
            }
            drop(stopped);
            thread::yield_now();
        }
        added.join().unwrap();
        caught
    })
}

#[test]
fn the_page_shows_a_replica_that_is_lost_and_one_that_is_rebuilt() {
    let place = Place::in_memory();
    let (a, a_address) = replica(&place, "a");
    let (mut b, b_address) = replica(&place, "b");
    let mut engine = engine(&place, &[&a_address, &b_address], &["--web-admin"]);
    let page = Page::of(&engine, &place);
    let data = client(&place);
    write(&data);
    run(&engine, &["snapshots", "create", "one"]);
    data.write(0, &block(0, 9)).unwrap();
    eventually("both have said how they are", || {
        let said = |of: &String| page.replica(of)["allocated"].as_u64() > Some(FILLED_MIB * MIB);
        [&a_address, &b_address].into_iter().all(said)
    });
    let live = page.live();
    assert_eq!((&live["admin"], &live["all"]), (&json!(true), &json!(true)));
    let names: Vec<_> =
        live["snapshots"].as_array().unwrap().iter().map(|disk| &disk["name"]).collect();
    assert_eq!(names, ["one", "volume-head"]);
    eventually("what was written is in the history", || {
        let samples = page.live()["samples"].as_array().unwrap().clone();
        let busy = samples.iter().find(|sample| sample[2].as_u64() > Some(0));
        // Writes by the second, bytes of them, and within what half and 99 of 100 were answered.
        busy.is_some_and(|s| {
            s[4].as_u64() > Some(0) && s[7].as_u64() > Some(0) && s[8].as_u64() >= s[7].as_u64()
        })
    });
    let mut browser = Browser::start(&page);
    if let Some(browser) = &mut browser {
        browser.done("healthy");
    }

    b.kill();
    write(&data);
    assert_eq!(page.replica(&b_address)["mode"], "ERR");
    step(&mut browser, "killed");
    run(&engine, &["rm-replica", &b_address]);
    let mut later = Vec::new();
    let mut caught = false;
    for number in 0..20 {
        let (process, address) = replica(&place, &format!("c{number}"));
        caught = rebuild((&engine, &page), &a, &address, &mut || step(&mut browser, "rebuilding"));
        later.push(process);
        if caught {
            break;
        }
        run(&engine, &["rm-replica", &address]);
    }
    assert!(caught, "no rebuild was seen while it went on");
    assert_eq!(modes(&engine), ["RW", "RW"]);
    step(&mut browser, "rebuilt");

    step(&mut browser, "purged");
    if browser.is_some() {
        eventually("the purge ends", || run(&engine, &["snapshots", "ls"]).trim() == "ID\ntwo");
    }
    drop(data);
    run(&engine, &["frontend", "shutdown"]);
    step(&mut browser, "reverted");
    confirmed(&engine, &page);
    engine.stop();
}

/// What a snapshot is called may be called so again: what was confirmed is what is removed.
fn confirmed(engine: &Process, page: &Page) {
    run(engine, &["snapshots", "create", "last"]);
    let wrong = json!({"snapshot": "last", "created": "2020-01-01T00:00:00Z"});
    for method in ["snapshot.remove", "snapshot.revert"] {
        assert_eq!(page.command(method, wrong.clone()).0, 404, "{method}");
    }
    assert_eq!(page.command("snapshot.revert", json!({"snapshot": "no", "created": "x"})).0, 404);
    let created = || {
        let live = page.live();
        let disks = live["snapshots"].as_array().cloned().unwrap_or_default();
        disks.iter().find(|disk| disk["name"] == "last").map(|disk| disk["created"].clone())
    };
    eventually("the page knows it", || created().is_some());
    let right = json!({"snapshot": "last", "created": created().unwrap()});
    assert_eq!(page.command("snapshot.revert", right.clone()).0, 200);
    assert_eq!(page.command("snapshot.remove", right).0, 200);
    assert_eq!(page.command("snapshot.create", json!({"snapshot": "more"})).0, 200);
    assert_eq!(page.command("snapshot.create", json!({"snapshot": "more"})).0, 409);
    let events = page.live()["events"].to_string();
    assert!(events.contains("replica-faulted") && events.contains("reverted"), "{events}");
}
