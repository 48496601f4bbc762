//! Upstream's command line and ours: the same commands to the same volumes, each of them on a volume of
//! its own, have the same output, errors and exit codes, and leave the volumes alike.

use crate::support::{
    Engine, EngineOptions, Kind, Lab, MIB, Replica, ReplicaOptions, eventually, ours,
};
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

const SIZE: usize = 16 * MIB;
const SIZE_TEXT: &str = "16777216";
const SIZES: [&str; 4] = ["--size", SIZE_TEXT, "--current-size", "16mb"];

/// A volume steered by one of the command lines, and what that said.
struct Side {
    lab: Lab,
    program: PathBuf,
    engine: Engine,
    replicas: Vec<Replica>,
    said: Vec<String>,
    /// More that is told by other names.
    plainly: Vec<(String, String)>,
}

impl Side {
    /// The replicas `R0`, `R1`..., of which the engine starts with the first so many.
    fn new(test: &str, program: Option<PathBuf>, kinds: &[Kind], options: &Start) -> Option<Self> {
        let lab = Lab::new(test)?;
        let program = program.unwrap_or_else(|| lab.stock().to_owned());
        let start = |(index, kind): (usize, &Kind)| {
            let size = if Some(index) == options.larger { 2 * SIZE } else { SIZE };
            lab.replica(*kind, "", &format!("r{index}"), &ReplicaOptions::new(size))
        };
        let replicas: Vec<_> = kinds.iter().enumerate().map(start).collect();
        let used: Vec<_> = replicas.iter().take(options.used).collect();
        let engine = if options.frontend {
            EngineOptions::new(SIZE)
        } else {
            EngineOptions::without_frontend(SIZE)
        };
        let engine = lab.engine("", &engine, &used);
        Some(Self { lab, program, engine, replicas, said: Vec::new(), plainly: Vec::new() })
    }

    /// Runs a command, in which `R0` and so on stand for replicas, and keeps what it said.
    fn run(&mut self, args: &[&str]) -> String {
        let (url, volume) = (self.engine.url(), self.engine.volume().to_owned());
        self.run_with(&["--url", &url, "--volume-name", &volume], args)
    }

    fn run_with(&mut self, globals: &[&str], args: &[&str]) -> String {
        let args: Vec<_> = args.iter().map(|arg| self.named(arg)).collect();
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let (code, out, err) = self.engine.run_cli(&self.program, globals, &args);
        let (plain, command) = (self.plain(&out), self.plain(&args.join(" ")));
        let shown = match serde_json::from_str::<Value>(&plain) {
            // What is sorted by made-up names is sorted anew.
            Ok(value) if plain.contains("\"ID\"") => format!("{value:#}\n"),
            _ => without_connections(&plain),
        };
        let errors = self.plain(&reasons(&err));
        self.said.push(format!("$ longhorn {command}\n{shown}{errors}[exit code {code}]"));
        out
    }

    fn named(&self, arg: &str) -> String {
        let index = arg.strip_prefix('R').and_then(|index| index.parse::<usize>().ok());
        index.map_or_else(|| arg.to_owned(), |index| self.replicas[index].url())
    }

    /// Runs a command until all that it says of replicas is so, and keeps the last.
    fn settle(&mut self, args: &[&str], over: impl Fn(&Value) -> bool) {
        let before = self.said.len();
        for _ in 0..300 {
            self.said.truncate(before);
            let status: Value = serde_json::from_str(&self.run(args)).unwrap();
            if status.as_object().unwrap().values().all(&over) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("not in time: {}", self.said.join("\n"));
    }

    /// Without what differs between two volumes.
    fn plain(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, plain) in &self.plainly {
            text = text.replace(name, plain);
        }
        for (index, replica) in self.replicas.iter().enumerate() {
            text = text.replace(&bare(&replica.url()), &format!("R{index}"));
        }
        text = text.replace(&bare(&self.engine.url()), "ENGINE");
        text = text.replace(self.engine.volume(), "VOLUME");
        text = text.replace(&self.lab.path().display().to_string(), "LAB");
        without_times_and_ids(&text)
    }
}

fn bare(url: &str) -> String {
    url["tcp://".len()..].to_owned()
}

/// What a volume begins with.
struct Start {
    used: usize,
    frontend: bool,
    /// The replica that is twice as large.
    larger: Option<usize>,
}

/// The reasons of a failure: lines of other kinds are logs. What upstream adds about its source is dropped.
fn reasons(err: &str) -> String {
    let mut text = String::new();
    for line in err.lines() {
        if line.contains("level=fatal") {
            let message = field(line, " msg=").unwrap_or_default();
            text += &format!("fatal: {message}");
            if let Some(error) = field(line, " error=") {
                text += &format!(" | {error}");
            }
            text.push('\n');
        } else if line.starts_with("Failed to delete") {
            text += &format!("{line}\n");
        }
    }
    without_connections(&text)
}

/// Without what either says of a connection that does not come about, and with replicas in order: the engine itself
/// has them in none.
fn without_connections(text: &str) -> String {
    const UNAVAILABLE: &str = "code = Unavailable";
    let mut plain = String::new();
    for line in text.lines() {
        let line = line.find(UNAVAILABLE).map_or(line, |at| &line[..at + UNAVAILABLE.len()]);
        let start = line.find("tcp://").filter(|_| line.contains("; tcp://")).unwrap_or(line.len());
        let mut parts = line[start..].split("; ").collect::<Vec<_>>();
        parts.sort_unstable();
        plain += &format!("{}{}\n", &line[..start], parts.join("; "));
    }
    plain
}

/// The value of a field of a line of log, quoted or not.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let value = &line[line.find(name)? + name.len()..];
    let Some(quoted) = value.strip_prefix('"') else { return value.split(' ').next() };
    let mut escaped = false;
    let end = quoted.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    Some(&quoted[..end?])
}

fn without_times_and_ids(text: &str) -> String {
    const TIME: &str = "0000-00-00T00:00:00";
    const ID: &str = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
    let matches = |text: &[u8], pattern: &str| {
        text.len() >= pattern.len()
            && text.iter().zip(pattern.bytes()).all(|(byte, wanted)| match wanted {
                b'0' => byte.is_ascii_digit(),
                b'x' => byte.is_ascii_hexdigit(),
                other => *byte == other,
            })
    };
    let (mut plain, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, others)) = rest.split_first() {
        if matches(rest, TIME) {
            plain.extend(b"TIME");
            rest = &rest[TIME.len()..];
            // Of a second, upstream prints as many digits as there are.
            while rest.first().is_some_and(|byte| byte.is_ascii_digit() || *byte == b'.') {
                rest = &rest[1..];
            }
        } else if matches(rest, ID) {
            plain.extend(b"ID");
            rest = &rest[ID.len()..];
        } else {
            plain.push(*first);
            rest = others;
        }
    }
    String::from_utf8(plain).unwrap()
}

/// Does the same with both, and compares.
fn compare(test: &str, kinds: &[Kind], start: &Start, script: impl Fn(&mut Side)) {
    let said = [None, Some(ours())].map(|program| {
        let mut side = Side::new(test, program, kinds, start)?;
        script(&mut side);
        Some(side.said)
    });
    let [Some(stock), Some(ours)] = said else { return };
    for (stock, ours) in stock.iter().zip(&ours) {
        assert!(ours == stock, "\nours:\n{ours}\nupstream's:\n{stock}");
    }
    assert_eq!(ours.len(), stock.len());
}

fn is(key: &'static str, value: &'static str) -> impl Fn(&Value) -> bool {
    move |status| status[key] == value
}

fn snapshots(side: &mut Side) {
    for args in [
        &["info"][..],
        &["ls"],
        &["ls-replica", "ignored"],
        &["snapshots"],
        &["snapshot", "info"],
        &["snapshot", "create", "s1"],
        &["snapshot", "create", "s1"],
        &["snapshot", "create"],
        &["snapshots", "create", "s3", "--label", "a=<&>b", "--label", "x/y=\u{e4}\"\\", "more"],
        &["snapshot", "create", "s4", "--label", "novalue"],
        &["snapshot", "create", "s4", "--label", "empty="],
        &["snapshot", "ls"],
        &["snapshot", "info"],
        &["ls"],
        &["snapshot", "rm"],
        &["snapshot", "rm", "nosuch", "s1", "volume-head"],
        &["snapshot", "ls"],
        &["snapshot", "info"],
        &["snapshot", "purge"],
    ] {
        side.run(args);
    }
    side.settle(&["snapshot", "purge-status"], purged);
    for args in [
        &["snapshot", "ls"][..],
        &["snapshot", "info"],
        &["snapshot", "hash"],
        &["snapshot", "hash-status"],
        &["snapshot", "hash-cancel"],
        &["snapshot", "hash-cancel", "s3"],
        &["snapshot", "hash", "s3", "--rehash"],
    ] {
        side.run(args);
    }
    side.settle(&["hash-status", "s3"], is("state", "complete"));
    side.settle(&["snapshot", "hash-status", "s3"], is("state", "complete"));
    for args in [
        &["snapshot", "hash-status", "nosuch"][..],
        &["snapshot", "revert", "s3"],
        &["snapshot", "revert"],
        &["snapshot", "revert", ""],
        &["frontend", "start"],
        &["frontend", "start", "bogus"],
        &["frontend", "shutdown"],
        &["info"],
        &["snapshot", "revert", "nosuch"],
        &["snapshot", "revert", "s3"],
        &["frontend", "start", "socket"],
        &["snapshot", "info"],
        &["info"],
    ] {
        side.run(args);
    }
}

fn purged(status: &Value) -> bool {
    status["isPurging"] == false
}

fn volume(side: &mut Side) {
    for args in [
        &["expand", "--size", "4096"][..],
        &["expand", "--size=16777217"],
        &["expand"],
        &["info"],
        &["unmap-mark-snap-chain-removed"],
        &["unmap-mark-snap", "--enable", "--disable"],
        &["unmap-mark-snap", "--enable"],
        &["info"],
        &["unmap-mark-snap-chain-removed", "--enable=false", "--disable"],
        &["journal", "--limit", "3"],
        &["rebuild-status"],
        &["snapshot", "clone-status"],
        &["snapshot", "clone"],
        &["snapshot", "clone", "--snapshot-name", "s"],
        &["sync-agent-server-reset"],
        &["start", "R0"],
        &["start-with-replicas", "R0", "--size", "x", "--current-size", "1"],
        &["start-with-replicas", "R0", "--size", "16m", "--current-size", SIZE_TEXT],
        &["start"],
    ] {
        side.run(args);
    }
    let url = side.engine.url();
    for globals in [
        &["--url", &url, "--volume-name", "another"][..],
        &["--url", &url.replace("tcp://", "http://"), "--engine-instance-name", "any"],
        &["--debug", "--url", "http://127.0.0.1:1"],
    ] {
        side.run_with(globals, &["info"]);
        side.run_with(globals, &["ls"]);
        side.run_with(globals, &["snapshot", "purge"]);
        side.run_with(globals, &["snapshot", "rm", "x"]);
    }
}

fn replicas(side: &mut Side) {
    for args in [
        &["update", "R1"][..],
        &["update"],
        &["update-replica", "--mode", "RO", "R1"],
        &["update", "R1", "--mode", "ERR"],
        &["ls"],
        &["update", "R1", "--mode", "RW"],
        &["update", "tcp://127.0.0.1:1", "--mode", "RW"],
        &["ls"],
        &["snapshot", "ls"],
        &["snapshot", "rm", "s"],
        &["snapshot", "purge-status"],
        &["snapshot", "hash", "s"],
        &["snapshot", "hash-status", "s"],
        &["verify-rebuild", "R1"],
        &["verify-rebuild-replica"],
        &["rebuild-status"],
        &["add"],
        &["add", "R2"],
        &["add", "R2", "--size", "16m"],
        &["add", "R2", "--size", "16m", "--current-size", "1x"],
        &["add", "nonsense", SIZES[0], SIZES[1], SIZES[2], SIZES[3]],
        &["rm"],
        &["rm", "R1"],
        &["rm-replica", "R1"],
        &["rm", "R0"],
        &["ls"],
        &["snapshot", "create", "s1"],
        &["snapshot", "create", "s2"],
    ] {
        side.run(args);
    }
    let add = |replica: &'static str, more: &[&'static str]| {
        [&["add-replica", replica], &SIZES[..], more].concat()
    };
    // Too large, another instance, and then one that is empty.
    side.run(&add("R2", &[]));
    side.run(&add("R3", &["--replica-instance-name", "r1"]));
    side.run(&add("R3", &["--replica-instance-name", "r3", "--fast-sync"]));
    side.run(&["ls"]);
    side.run(&["rebuild-status"]);
    side.run(&["snapshot", "info"]);
    side.run(&add("R3", &[]));
    side.run(&add("R3", &["--restore"]));
    side.run(&["ls"]);
    // One that nobody reaches any more.
    side.replicas[3].kill();
    let lost = side.replicas[3].url();
    eventually("the replica is found to be lost", || {
        side.engine.ls().iter().any(|listed| listed.url == lost && listed.mode == "ERR")
    });
    for args in [
        &["ls"][..],
        &["snapshot", "rm", "s1"],
        &["snapshot", "purge"],
        &["snapshot", "purge-status"],
        &["snapshot", "clone-status"],
        &["snapshot", "info"],
        &["rm", "R3"],
        &["snapshot", "rm", "s1"],
        &["snapshot", "purge"],
    ] {
        side.run(args);
    }
    side.settle(&["snapshot", "purge-status"], purged);
    side.run(&["snapshot", "info"]);
}

/// A volume that begins without replicas, and has no frontend.
fn from_nothing(side: &mut Side) {
    for args in [
        &["info"][..],
        &["ls"],
        &["snapshot", "ls"],
        &["snapshot", "info"],
        &["snapshot", "create", "s"],
        &["snapshot", "purge-status"],
        &["snapshot", "hash-status", "s"],
        &["rebuild-status"],
        &["start", "R0", "R1", SIZES[0], SIZES[1], SIZES[2], SIZES[3]],
        &["info"],
        &["ls"],
        &["snapshot", "create", "s"],
        &["expand", "--size", "33554432"],
    ] {
        side.run(args);
    }
    eventually("the volume is larger", || side.engine.info()["size"] == 2 * SIZE);
    side.run(&["info"]);
    side.run(&["snapshot", "info"]);
    side.run(&["snapshot", "revert", "s"]);
    // Grown first, as the volume was.
    side.run(&["add", "R2", SIZES[0], SIZES[1], SIZES[2], SIZES[3]]);
    side.run(&["ls"]);
    side.run(&["snapshot", "info"]);
}

const ALL: Start = Start { used: 2, frontend: true, larger: Some(2) };

fn kinds() -> [(&'static str, Kind, Kind); 2] {
    [("upstream's", Kind::Stock, Kind::Stock), ("both kinds", Kind::Ours, Kind::Stock)]
}

#[test]
fn snapshots_are_handled_alike() {
    for (of, a, b) in kinds() {
        compare(&format!("snapshots_are_handled_alike, {of}"), &[a, b], &ALL, snapshots);
    }
}

#[test]
fn volumes_are_handled_alike() {
    compare("volumes_are_handled_alike", &[Kind::Ours, Kind::Stock], &ALL, volume);
}

#[test]
fn replicas_are_handled_alike() {
    for (of, a, b) in kinds() {
        let test = format!("replicas_are_handled_alike, {of}");
        compare(&test, &[a, b, a, b], &ALL, replicas);
    }
}

#[test]
fn volumes_begin_and_grow_alike() {
    let start = Start { used: 0, frontend: false, larger: None };
    for (of, a, b) in kinds() {
        let test = format!("volumes_begin_and_grow_alike, {of}");
        compare(&test, &[a, b, a], &start, from_nothing);
    }
}

/// The server's version is told; ours and upstream's differ in their names alone.
#[test]
fn versions_have_one_shape() {
    let Some(side) = Side::new("versions_have_one_shape", Some(ours()), &[Kind::Stock], &ALL)
    else {
        return;
    };
    let url = side.engine.url();
    let version = |program: &PathBuf, args: &[&str]| -> Value {
        let (code, out, err) = side.engine.run_cli(program, &["--url", &url], args);
        assert_eq!(code, 0, "{err}");
        serde_json::from_str(&out).unwrap()
    };
    let (stock, ours) = (side.lab.stock().to_owned(), ours());
    let [theirs, own] = [&stock, &ours].map(|program| version(program, &["version"]));
    assert_eq!(own["serverVersion"], theirs["serverVersion"]);
    let keys = |version: &Value| {
        version["clientVersion"].as_object().unwrap().keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(keys(&own), keys(&theirs));
    for key in keys(&own).iter().filter(|key| key.contains("API") || key.contains("Format")) {
        assert_eq!(own["clientVersion"][key], theirs["clientVersion"][key], "{key}");
    }
    assert!(version(&ours, &["version", "--client-only"])["serverVersion"].is_null());
}

#[test]
fn clones_are_made_alike() {
    let start = Start { used: 2, frontend: false, larger: None };
    compare("clones_are_made_alike", &[Kind::Ours, Kind::Stock], &start, |side| {
        let sources: Vec<_> = [Kind::Stock, Kind::Ours]
            .into_iter()
            .enumerate()
            .map(|(index, kind)| {
                side.lab.replica(kind, "from", &format!("f{index}"), &ReplicaOptions::new(SIZE))
            })
            .collect();
        let options = EngineOptions::without_frontend(SIZE);
        let source = side.lab.engine("from", &options, &sources.iter().collect::<Vec<_>>());
        let (url, volume) = (source.url(), source.volume().to_owned());
        for replica in &sources {
            side.plainly.push((bare(&replica.url()), replica.name().to_owned()));
        }
        side.plainly.push((bare(&url), "SOURCE".to_owned()));
        side.plainly.push((volume.clone(), "FROM".to_owned()));
        source.snapshot("s1");
        let clone = |from: &str, snapshot: &str| {
            let from = ["--from-controller-address", &url, "--from-volume-name", from];
            let args = [&["snapshot", "clone", "--snapshot-name", snapshot], &from[..]].concat();
            args.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let run = |side: &mut Side, args: Vec<String>| {
            side.run(&args.iter().map(String::as_str).collect::<Vec<_>>())
        };
        run(side, clone("another", "s1"));
        run(side, clone(&volume, "nosuch"));
        run(side, clone(&volume, "s1"));
        side.settle(&["snapshot", "clone-status"], is("state", "complete"));
        side.run(&["snapshot", "info"]);
        side.run(&["update", "R1", "--mode", "ERR"]);
        run(side, clone(&volume, "s1"));
    });
}
