//! The web page of `dbs serve`, over a real socket: who is let in, to what, and what hostile clients can do.

use crate::support::{Place, Served, run};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(120);

/// A server with a page.
struct Page {
    served: Served,
    address: String,
    token: String,
}

/// An answer.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e} in {self:?}"))
    }

    #[track_caller]
    fn is(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }
}

impl Page {
    fn start(place: &Place, args: &str) -> Self {
        let served = place.serve(&format!("--web 0 {args}"));
        let url = served.ready["web"].as_str().expect("its address").to_owned();
        let (address, token) = url.strip_prefix("http://").unwrap().split_once("/#").unwrap();
        Self { address: address.to_owned(), token: token.to_owned(), served }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends bytes, and reads until the server has closed the connection.
    fn send(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect();
        // A server that has answered already may have closed its end.
        let _refused = stream.write_all(bytes);
        let mut all = Vec::new();
        let _reset = stream.read_to_end(&mut all);
        let text = String::from_utf8_lossy(&all).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Answer { status: status.unwrap_or(0), head: head.to_owned(), body: body.to_owned() }
    }

    /// A request with these lines beside `Host` and `Connection`.
    fn request(&self, first: &str, lines: &[String], body: &str) -> Answer {
        let host = lines.iter().any(|line| line.starts_with("Host:"));
        let host = if host { String::new() } else { format!("Host: {}\r\n", self.address) };
        let lines: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
        let length = format!("Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        self.send(format!("{first} HTTP/1.1\r\n{host}{lines}{length}{body}").as_bytes())
    }

    fn bearer(&self) -> String {
        format!("Authorization: Bearer {}", self.token)
    }

    fn get(&self, path: &str) -> Answer {
        self.request(&format!("GET {path}"), &[self.bearer()], "")
    }

    fn command(&self, method: &str, params: Value) -> Answer {
        let body = json!({ "method": method, "params": params }).to_string();
        self.post(&[self.bearer()], &body)
    }

    fn post(&self, lines: &[String], body: &str) -> Answer {
        let kind = ["Content-Type: application/json".to_owned()];
        self.request("POST /api/command", &[lines, &kind].concat(), body)
    }
}

/// A store with a volume, a snapshot of it and a clone of that.
fn prepare() -> Place {
    let place = Place::with_store();
    place.json("volume create v 8MiB");
    place.json("snapshot create v@s");
    place.json("volume clone v@s c");
    place
}

fn uuid_of(place: &Place, what: &str, name: &str) -> String {
    place.json(&format!("{what} show {name}"))["uuid"].as_str().unwrap().to_owned()
}

#[test]
fn the_page_is_shown_to_all_and_the_store_to_who_has_the_token() {
    let place = prepare();
    let page = Page::start(&place, "");
    for path in ["/", "/main.js", "/style.css", "/icon.svg"] {
        let file = page.request(&format!("GET {path}"), &[], "").is(200);
        for line in [
            "content-security-policy: default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
             object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'\r\n",
            "x-content-type-options: nosniff",
            "x-frame-options: DENY",
            "referrer-policy: no-referrer",
        ] {
            assert!(file.head.contains(line), "{path} lacks {line}: {}", file.head);
        }
        assert!(!file.body.contains(&page.token) && file.body.len() > 100, "{path}");
        let head = page.request(&format!("HEAD {path}"), &[], "").is(200);
        assert_eq!(head.body, "");
    }
    for path in ["/..", "/../Cargo.toml", "/%2e%2e/x", "//etc/passwd", "/main.js/", "/api", "/x"] {
        page.request(&format!("GET {path}"), &[], "").is(404);
    }
    page.request("POST /", &[], "").is(405);

    let basic = format!("Authorization: Basic {}", page.token);
    let short = format!("Authorization: Bearer {}", &page.token[1..]);
    let long = format!("Authorization: Bearer {}0", page.token);
    let in_url = format!("GET /api/live?token={}", page.token);
    for path in ["/api/live", "/api/findings", "/api/command", "/api/none"] {
        for lines in [vec![], vec![basic.clone()], vec![short.clone()], vec![long.clone()]] {
            let answer = page.request(&format!("GET {path}"), &lines, "").is(401);
            assert_eq!(answer.json()["error"]["kind"], "refused");
            page.post(&lines, r#"{"method":"info"}"#).is(401);
        }
    }
    page.request(&in_url, &[], "").is(401);
    assert_eq!(page.get("/api/live").is(200).json()["store"]["volumes"], 2);
    assert_eq!(page.get("/api/findings").is(200).json(), json!({ "check": null, "scrub": null }));
    page.get("/api/none").is(404);
    page.get("/api/command").is(405);
    page.request("DELETE /api/command", &[page.bearer()], "").is(415);

    let Page { served, token, .. } = page;
    let (code, log) = served.stop();
    assert_eq!(code, Some(0));
    assert!(log.contains("web=http://127.0.0.1:") && !log.contains(&token), "{log}");
}

#[test]
fn other_names_and_other_sites_are_refused() {
    let place = prepare();
    let page = Page::start(&place, "--web-name storage.example");
    let port = page.address.rsplit_once(':').unwrap().1.to_owned();
    let at = |host: &str, more: &str, status: u16| {
        let mut lines = vec![page.bearer(), format!("Host: {host}")];
        lines.extend((!more.is_empty()).then(|| more.to_owned()));
        page.request("GET /api/live", &lines, "").is(status);
        page.post(&lines, r#"{"method":"info"}"#).is(status);
    };
    for host in ["localhost:1", "[::1]", "storage.example", &format!("127.0.0.1:{port}")] {
        at(host, "", 200);
        at(host, &format!("Origin: http://{host}"), 200);
    }
    for host in ["evil.example", "storage.example.evil.example:80", "", "localhost.evil.example"] {
        at(host, "", 403);
        // Not even the files of the page.
        page.request("GET /", &[format!("Host: {host}")], "").is(403);
    }
    let two = ["Host: localhost".to_owned(), "Host: evil.example".to_owned()];
    let twice = page.request("GET /", &two, "");
    assert!([400, 403].contains(&twice.status), "{twice:?}");
    page.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").is(403);
    for line in [
        "Origin: http://evil.example",
        "Origin: https://localhost",
        "Origin: http://localhost:8",
        "Origin: null",
        "Origin:",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
    ] {
        at("localhost", line, 403);
    }
    // No page of another site learns that it might ask.
    let asked = ["Origin: http://evil.example", "Access-Control-Request-Method: POST"];
    let preflight = page.request("OPTIONS /api/command", &asked.map(str::to_owned), "").is(403);
    assert!(!preflight.head.to_lowercase().contains("access-control"), "{}", preflight.head);
    // What a form or a page without leave could send is not JSON.
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let lines = [page.bearer(), format!("Content-Type: {kind}")];
        page.request("POST /api/command", &lines, r#"{"method":"info"}"#).is(415);
    }
}

#[test]
fn a_page_is_told_what_has_changed() {
    let place = prepare();
    let page = Page::start(&place, "");
    let first = page.get("/api/live").is(200).json();
    assert_eq!((&first["all"], &first["admin"]), (&json!(true), &json!(false)));
    assert_eq!(first["volumes"].as_array().unwrap().len(), 2);
    place.json("volume create new 1MiB");
    place.json("volume delete c --yes");
    let cursor = first["cursor"].as_str().unwrap();
    let end = Instant::now() + PATIENCE;
    let next = loop {
        assert!(Instant::now() < end, "it was never told");
        let next = page.get(&format!("/api/live?since={cursor}")).is(200).json();
        assert_eq!(next["all"], false);
        // It asks the server once a second, and a hundredth of the time at most.
        if next["removed"] != json!([]) && next["store"]["volumes"] == 2 {
            break next;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(next["removed"].as_array().unwrap().len(), 1);
    let names: Vec<_> = next["volumes"].as_array().unwrap().iter().map(|v| &v["name"]).collect();
    assert!(names.contains(&&json!("new")) && !names.contains(&&json!("c")), "{names:?}");
    assert!(page.get("/api/live?since=nonsense").is(200).json()["all"].as_bool().unwrap());

    place.json("check");
    place.json("scrub");
    let found = page.get("/api/findings").is(200).json();
    assert_eq!(found["check"]["report"]["findings"], json!([]));
    assert_eq!(found["scrub"]["report"]["damaged"], 0);
    assert!(found["scrub"]["at_ns"].as_u64() > found["check"]["at_ns"].as_u64());
}

#[test]
fn what_the_page_shows_is_what_commands_print() {
    let place = prepare();
    place.pipe("volume import filled -", &[7; 1 << 20]).ok("import");
    let page = Page::start(&place, "");
    for (method, params, command) in [
        ("volume.show", json!({"volume": "v"}), "volume show v"),
        ("snapshot.list", json!({"volume": "v", "usage": true}), "snapshot list v --usage"),
        ("volume.children", json!({"volume": "v"}), "volume children v"),
    ] {
        assert_eq!(page.command(method, params).is(200).json(), place.json(command), "{method}");
    }
    let map = page.command("space.map", json!({"cells": 7})).is(200).json();
    let runs = map["runs"].as_array().unwrap();
    let sum = |kind: &str| -> u64 {
        runs.iter().map(|r| r["cells"].as_u64().unwrap() * r[kind].as_u64().unwrap()).sum()
    };
    let info = place.json("info");
    let used = (sum("data") + sum("dirty")) * info["extent_size"].as_u64().unwrap();
    assert_eq!(used, info["allocated"].as_u64().unwrap(), "{map}");
    assert!(runs.iter().map(|run| run["cells"].as_u64().unwrap()).sum::<u64>() <= 7);
    let many = page.command("space.map", json!({"cells": u32::MAX})).is(200).json();
    let runs = many["runs"].as_array().unwrap();
    assert!(runs.iter().map(|run| run["cells"].as_u64().unwrap()).sum::<u64>() <= 4096);
    let owners = page.command("space.owners", json!({"offset": 0, "length": 1})).is(200).json();
    assert_eq!(owners["owners"][0]["volume"], "filled", "{owners}");
    page.command("space.map", json!({"offset": u64::MAX})).is(400);
    let none = page.command("volume.show", json!({"volume": "nobody"})).is(404).json();
    assert_eq!(none["error"]["kind"], "not_found");
}

#[test]
fn a_page_that_can_only_look_changes_nothing() {
    let place = prepare();
    let page = Page::start(&place, "");
    let before = place.json("dump");
    let uuid = uuid_of(&place, "volume", "v");
    for (method, params) in [
        ("snapshot.create", json!({"volume": "v", "snapshot": "t"})),
        ("volume.clone", json!({"volume": "v", "snapshot": "s", "new": "d"})),
        ("snapshot.rollback", json!({"volume": "v", "snapshot": "s", "uuid": uuid})),
        ("snapshot.delete", json!({"volume": "v", "snapshot": "s", "uuid": uuid})),
        ("volume.delete", json!({"volume": "v", "uuid": uuid})),
        ("volume.create", json!({"volume": "w", "size": 512})),
        ("grow", json!({"size": 1_u64 << 40})),
        ("scrub", json!({})),
        ("client.kick", json!({"client": 1})),
    ] {
        let answer = page.command(method, params).is(403).json();
        assert_eq!(answer["error"]["kind"], "refused", "{method}");
    }
    assert_eq!(place.json("dump"), before);
}

#[test]
fn what_was_confirmed_is_what_is_deleted() {
    let place = prepare();
    let page = Page::start(&place, "--web-admin");
    assert_eq!(page.get("/api/live").json()["admin"], true);
    let made = page.command("snapshot.create", json!({"volume": "v", "snapshot": "t"})).is(200);
    assert_eq!(made.json()["name"], "t");
    page.command("snapshot.create", json!({"volume": "v", "snapshot": "t"})).is(409);
    let clone = json!({"volume": "v", "snapshot": "t", "new": "d"});
    assert_eq!(page.command("volume.clone", clone).is(200).json()["origin"], "v@t");

    // Each of them without a uuid, with that of something else, and with one that is none.
    let (volume, other) = (uuid_of(&place, "volume", "d"), uuid_of(&place, "volume", "c"));
    let snapshot = uuid_of(&place, "snapshot", "v@s");
    let before = place.json("dump");
    for (method, mut params) in [
        ("volume.delete", json!({"volume": "d"})),
        ("snapshot.delete", json!({"volume": "v", "snapshot": "s"})),
        ("snapshot.rollback", json!({"volume": "v", "snapshot": "s"})),
    ] {
        page.command(method, params.clone()).is(400);
        params["uuid"] = other.clone().into();
        page.command(method, params.clone()).is(404);
        params["uuid"] = "no uuid".into();
        page.command(method, params).is(400);
    }
    assert_eq!(place.json("dump")["volumes"], before["volumes"]);
    assert_eq!(place.json("dump")["snapshots"], before["snapshots"]);

    // The name goes to another volume between the question and the answer.
    place.json("volume rename d old");
    place.json("volume create d 1MiB");
    page.command("volume.delete", json!({"volume": "d", "uuid": volume})).is(404);
    place.json("volume show d");
    page.command("volume.delete", json!({"volume": "old", "uuid": volume})).is(200);
    place.dbs("volume show old").exits(10, "it is deleted");
    let roll = json!({"volume": "v", "snapshot": "s", "uuid": snapshot});
    assert_eq!(page.command("snapshot.rollback", roll.clone()).is(200).json()["parent"], "v@s");
    // Its clone still rests on it, so that the CLI says the same of it.
    page.command("snapshot.delete", roll).is(200);
    for (method, params) in [
        ("volume.create", json!({"volume": "w", "size": 512})),
        ("volume.resize", json!({"volume": "v", "size": 1 << 20, "shrink": true})),
        ("snapshot.create", json!({"volume": "v", "snapshot": "u", "system": true})),
        ("vacuum", json!({})),
    ] {
        page.command(method, params).is(403);
    }
    assert_eq!(page.served.stop().0, Some(0));
}

#[test]
fn hostile_requests_get_an_end_and_disturb_nobody() {
    let place = prepare();
    let page = Page::start(&place, "--web-admin");
    // One that never says all of its head, and one that never reads, as long as the test lasts.
    let mut slow = page.connect();
    slow.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-").unwrap();
    let mut deaf = page.connect();
    let again = format!("GET /main.js HTTP/1.1\r\nHost: {}\r\n\r\n", page.address);
    deaf.write_all(again.repeat(50).as_bytes()).unwrap();

    let line = format!("X: {}", "a".repeat(1 << 20));
    let long = page.request("GET /", &[line], "");
    assert!([0, 431].contains(&long.status), "{long:?}");
    let lines: Vec<_> = (0..1000).map(|at| format!("X-{at}: a")).collect();
    let many = page.request("GET /", &lines, "");
    assert!([0, 431].contains(&many.status), "{many:?}");
    let path = page.request(&format!("GET /{}", "a".repeat(1 << 20)), &[], "");
    assert!([0, 414, 431].contains(&path.status), "{path:?}");
    page.post(&[page.bearer()], &format!("\"{}\"", "a".repeat(70 << 10))).is(413);
    let endless = format!(
        "POST /api/command HTTP/1.1\r\nHost: localhost\r\n{}\r\nContent-Type: application/json\r\nTransfer-Encoding: \
         chunked\r\n\r\n{}",
        page.bearer(),
        format!("1000\r\n{}\r\n", " ".repeat(0x1000)).repeat(20)
    );
    page.send(endless.as_bytes()).is(413);
    for body in
        ["", "{", "null", "[]", "\"\"", "{}", r#"{"method":1}"#, r#"{"method":"info","x":1}"#]
    {
        page.post(&[page.bearer()], body).is(400);
    }
    page.post(&[page.bearer()], &"[".repeat(60_000)).is(400);
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"\0\0\0\0\0\0\0\0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ] {
        let mut stream = page.connect();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        let _reset = stream.read_to_string(&mut answer);
        assert!(!answer.starts_with("HTTP/1.1 2"), "{bytes:?}: {answer}");
    }
    // More than there are places for: the last ones are closed, and when they are gone there is room again.
    let crowd: Vec<_> = (0..100).map(|_| page.connect()).collect();
    let mut last = crowd.last().unwrap();
    let _closed_already = last.write_all(again.as_bytes());
    assert_eq!(last.read(&mut [0]).unwrap_or(0), 0, "it was let in");
    drop(crowd);
    let end = Instant::now() + PATIENCE;
    while page.get("/api/live").status != 200 {
        assert!(Instant::now() < end, "there is no room again");
        std::thread::sleep(Duration::from_millis(20));
    }
    // It ends all the same.
    assert_eq!(page.served.stop().0, Some(0));
    drop((slow, deaf));
}

/// Found by review: whoever had the port kept the volumes from all who use them.
#[test]
fn a_page_that_cannot_be_served_does_not_keep_the_store_from_it() {
    let place = prepare();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    // No token can be made there.
    let nowhere = place.path("nothing/token");
    for args in [format!("--web {port}"), format!("--web 0 --web-token {}", nowhere.display())] {
        let served = place.serve(&args);
        // A port may become free yet, as an older server ends.
        assert_eq!(served.ready["web"].is_null(), args.contains("--web-token"), "{args}");
        place.json("volume show v");
        let end = Instant::now() + PATIENCE;
        loop {
            let warnings = place.json("info")["warnings"].to_string();
            if warnings.contains("the web page is not served: ") {
                break;
            }
            assert!(Instant::now() < end, "{args}: {warnings}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let doctor = place.dbs("doctor").text();
        assert!(doctor.contains("the web page is not served: "), "{args}: {doctor}");
        let (code, log) = served.stop();
        assert_eq!(code, Some(0));
        assert!(log.contains("the web page is not served: "), "{args}: {log}");
    }
}

#[test]
fn addresses_and_tokens_that_are_not_safe_are_refused() {
    let place = prepare();
    let serve = |args: &str| {
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).arg("serve");
        run(command.args(args.split_whitespace()))
    };
    let all = serve("--web 0.0.0.0:0").exits(2, "without TLS");
    assert!(all.stderr.contains("needs TLS"), "{}", all.stderr);
    let token = place.path("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    let readable = serve(&format!("--web 0 --web-token {}", token.display()));
    assert!(readable.exits(2, "mode").stderr.contains("chmod 0600"));
    fs::remove_file(&token).unwrap();

    let served = place.serve(&format!("--web 0 --web-token {}", token.display()));
    let url = served.ready["web"].as_str().unwrap();
    assert!(!url.contains('#'), "{url}");
    assert_eq!(fs::metadata(&token).unwrap().mode() & 0o777, 0o600);
    let address = url.strip_prefix("http://").unwrap().trim_end_matches('/').to_owned();
    let token = fs::read_to_string(&token).unwrap().trim().to_owned();
    let page = Page { served, address, token };
    page.get("/api/live").is(200);
    assert_eq!(page.served.stop().0, Some(0));
}
