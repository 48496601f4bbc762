//! Encrypted volumes: where commands and servers get the secret from.

use crate::support::{Place, Run, noise, run};
use dbs_core::{OpenOptions, Secret, Store, TailPlace};
use nix::poll::{PollFd, PollFlags, poll};
use nix::pty::openpty;
use nix::sys::signal::Signal;
use nix::sys::termios::{LocalFlags, tcgetattr};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

const SIZE: usize = 256 << 10;

/// As [`Place::dbs`], with variables.
fn with(place: &Place, variables: &[(&str, &str)], args: &str) -> Run {
    let mut command = place.bare();
    command.env("DBS_STORE", place.store()).args(args.split_whitespace());
    run(command.envs(variables.iter().copied()))
}

/// A store with an encrypted volume `v`, which the file `key` unlocks, and its snapshot `s`; what it shows.
fn sample(place: &Place) -> Vec<u8> {
    place.init();
    fs::write(place.path("key"), [5; 32]).unwrap();
    fs::write(place.path("other"), [6; 32]).unwrap();
    place.dbs("volume create v 256KiB --encrypt --key-file key").ok("create");
    let secret = Some(Secret::read_key_file(&place.path("key")).unwrap());
    let options = OpenOptions { tail: TailPlace::None, secret, ..OpenOptions::default() };
    let store = Store::open(&place.store(), &options).unwrap();
    let content = noise(1, SIZE);
    store.volume("v").unwrap().write_at(0, &content, true).unwrap();
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    store.close().unwrap();
    content
}

fn is_locked(run: &Run) {
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("unlock it with `dbs volume unlock v`"), "{}", run.stderr);
}

#[test]
fn commands_on_an_idle_store_take_the_secret_from_variables() {
    let place = Place::new();
    let content = sample(&place);
    is_locked(&place.dbs("volume export v a.raw"));
    is_locked(&with(&place, &[("DBS_VOLUME_KEY_FILE", "other")], "volume export v b.raw"));
    let key = [("DBS_VOLUME_KEY_FILE", "key")];
    with(&place, &key, "volume export v c.raw").ok("export");
    assert!(fs::read(place.path("c.raw")).unwrap() == content);
    let shown = place.json("volume show v");
    assert_eq!(shown["encryption"]["secret"], "key file");
    assert_eq!(shown["encryption"]["locked"], true);
    // What looks at no content needs none.
    place.dbs("check").ok("check");
    let cloned = place.dbs("volume clone v@s w").ok("clone").text();
    assert!(cloned.contains("encrypted: the key file of its origin unlocks it"), "{cloned}");
    place.dbs("--yes volume delete w").ok("delete");
    // Another secret, and whoever has none and no terminal is told what there is.
    let both = [key[0], ("DBS_VOLUME_NEW_PASSPHRASE", "a b")];
    with(&place, &both, "volume rekey v").ok("rekey");
    is_locked(&with(&place, &key, "volume export v d.raw"));
    with(&place, &[("DBS_VOLUME_PASSPHRASE", "a b")], "volume export v e.raw").ok("export");
    assert!(fs::read(place.path("e.raw")).unwrap() == content);
    let refused = place.dbs("volume create x 1MiB --encrypt").exits(2, "no secret");
    assert!(refused.stderr.contains("DBS_VOLUME_PASSPHRASE_FILE"), "{}", refused.stderr);
    let refused = place.dbs("volume unlock v --key-file key").exits(2, "nobody serves it");
    assert!(refused.stderr.contains("no server"), "{}", refused.stderr);
    assert!(!place.path("a.raw").exists());
}

#[test]
fn a_backup_that_is_not_encrypted_is_warned_of() {
    let place = Place::new();
    sample(&place);
    let keys = [("DBS_VOLUME_KEY_FILE", "key"), ("DBS_BACKUP_PASSPHRASE", "a word")];
    let [open, safe] = ["open", "safe"].map(|name| {
        fs::create_dir(place.path(name)).unwrap();
        format!("vfs://{}", place.path(name).display())
    });
    with(&place, &keys, &format!("backup init {safe} --encrypt")).ok("init");
    for (url, keys, warned) in [(open, &keys[..1], true), (safe, &keys, false)] {
        let made = with(&place, keys, &format!("backup create v@s {url} --to vol")).ok("backup");
        let told = made.stderr.contains("volume v is encrypted, and its backup is not");
        assert_eq!(told, warned, "{}", made.stderr);
    }
}

#[test]
fn a_server_unlocks_and_locks_volumes() {
    let place = Place::new();
    let content = sample(&place);
    let served = place.serve("--nbd unix:socket");
    is_locked(&place.dbs("volume export v a.raw"));
    let wrong = place.dbs("volume unlock v --key-file other").exits(2, "another key");
    assert!(wrong.stderr.contains("is not the one that unlocks"), "{}", wrong.stderr);
    place.dbs("volume unlock v --key-file key").ok("unlock");
    assert_eq!(place.json("volume show v")["encryption"]["locked"], false);
    place.dbs("volume export v b.raw").ok("export");
    assert!(fs::read(place.path("b.raw")).unwrap() == content);
    place.dbs("volume lock v").ok("lock");
    is_locked(&place.dbs("volume export v c.raw"));
    let table = place.dbs("volume list").ok("list").text();
    assert!(table.contains("locked"), "{table}");
    // What changes the store is logged, whether it comes to something or not; secrets are not.
    let words = [("DBS_VOLUME_PASSPHRASE", "not-for-logs"), ("DBS_VOLUME_NEW_KEY_FILE", "other")];
    with(&place, &words[..1], "volume create w 1MiB --encrypt").ok("create");
    with(&place, &words, "volume rekey w").ok("rekey");
    with(&place, &words, "volume rekey w").exits(2, "the secret is another one now");
    place.dbs("volume rekey v --key-file key --new-key-file other").ok("rekey");
    let (code, log) = served.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("volume.create_encrypted") && log.contains("volume.rekey"), "{log}");
    for secret in ["not-for-logs", "05050505", "06060606"] {
        assert!(!log.contains(secret), "{secret} is in the log: {log}");
    }
}

#[test]
fn streams_and_images_keep_what_they_carry_secret() {
    let place = Place::new();
    let content = sample(&place);
    place.dbs("init other.dbs --size 64MiB").ok("init");
    // Of a server and of an idle store, to either; nobody has a key.
    let served = place.serve("--nbd unix:socket");
    place.dbs("send v@s full").ok("send");
    let stream = fs::read(place.path("full")).unwrap();
    assert!(stream.len() > SIZE && !stream.windows(16).any(|part| *part == content[..16]));
    place.dbs("--store other.dbs receive v full").ok("receive");
    place.dbs("receive copy full").ok("receive");
    is_locked(&place.dbs("--store other.dbs volume export v a.raw"));
    let key = [("DBS_VOLUME_KEY_FILE", "key")];
    with(&place, &key, "--store other.dbs volume export v@s b.raw").ok("export");
    assert!(fs::read(place.path("b.raw")).unwrap() == content);
    // After a change of the secret copies are behind.
    place.dbs("snapshot create v@t").ok("snapshot");
    place.dbs("volume rekey v --key-file key --new-key-file other").ok("rekey");
    place.dbs("send v@t difference --from s").ok("send");
    let received = place.dbs("--store other.dbs receive v difference").ok("receive");
    let warned = "the secret of volume v was changed here or at the source";
    assert!(received.stderr.contains(warned), "{}", received.stderr);
    with(&place, &key, "--store other.dbs volume export v@t e.raw").ok("export");
    place.dbs("volume unlock copy --key-file key").ok("unlock");
    place.dbs("volume export copy@s c.raw").ok("export");
    assert!(fs::read(place.path("c.raw")).unwrap() == content);
    // An image becomes an encrypted volume.
    place.dbs("volume import i c.raw --encrypt --key-file other").ok("import");
    place.dbs("volume export i d.raw").ok("export");
    assert!(fs::read(place.path("d.raw")).unwrap() == content);
    let listed = place.json("volume show i");
    assert_eq!(listed["encryption"]["secret"], "key file");
    // A volume that exists is of another family.
    place.dbs("snapshot create i@t").ok("snapshot");
    let refused = place.dbs("receive i full").exits(2, "another key");
    assert!(refused.stderr.contains("encrypted with another key"), "{}", refused.stderr);
    assert_eq!(served.stop().0, Some(0));
    let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
    assert!(store.check().unwrap().worst().is_none());
}

#[test]
fn a_server_with_a_key_writes_no_core_dump() {
    let place = Place::new();
    sample(&place);
    let dumps = |key: Option<&str>, before: &dyn Fn()| {
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).envs(key.map(|key| ("DBS_VOLUME_KEY_FILE", key)));
        let served = place.served(command.args(["--json", "serve", "--nbd", "unix:socket"]));
        let pid = served.pid().to_string();
        let limit = Command::new("prlimit").args(["--core=unlimited:", "--pid", &pid]).status();
        before();
        limit.is_ok_and(|status| status.success()) && served.crash().core_dumped()
    };
    if !dumps(None, &|| {}) {
        return println!("SKIPPED core dumps: needs prlimit, and a system that writes them");
    }
    assert!(!dumps(Some("key"), &|| {}));
    assert!(!dumps(None, &|| drop(place.dbs("volume unlock v --key-file key").ok("unlock"))));
}

#[test]
fn a_secret_is_read_once_and_what_is_none_keeps_a_server_from_starting() {
    let place = Place::new();
    place.init();
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[7; 32]).unwrap();
    drop(writer);
    let mut command = place.bare();
    command.env("DBS_STORE", place.store()).env("DBS_VOLUME_KEY_FILE", "/dev/stdin").stdin(reader);
    let created = run(command.args(["volume", "create", "v", "1MiB", "--encrypt"])).ok("create");
    assert!(created.stderr.is_empty(), "{}", created.stderr);
    // Its volumes would be refused to all who come.
    let mut command = place.bare();
    command.env("DBS_STORE", place.store()).env("DBS_VOLUME_PASSPHRASE", "");
    let mut server = command.args(["serve", "--nbd", "unix:socket"]).spawn().unwrap();
    let mut asked = 0;
    let ended = loop {
        match server.try_wait().unwrap() {
            None if asked < 300 => std::thread::sleep(std::time::Duration::from_millis(100)),
            ended => break ended,
        }
        asked += 1;
    };
    if ended.is_none() {
        server.kill().unwrap();
        server.wait().unwrap();
    }
    assert_eq!(ended.and_then(|status| status.code()), Some(2));
}

/// Longer than a command takes, however busy the machine is.
const HANG_MS: u16 = 60_000;

/// Reads what a terminal shows until it has said this much.
fn until(master: &mut File, shown: &mut String, what: &str) {
    while !shown.contains(what) {
        let mut ready = [PollFd::new(master.as_fd(), PollFlags::POLLIN)];
        assert!(poll(&mut ready, HANG_MS).unwrap() > 0, "no `{what}` after: {shown}");
        let mut piece = [0; 256];
        let count = master.read(&mut piece).unwrap();
        *shown += &String::from_utf8_lossy(&piece[..count]);
    }
}

#[test]
fn a_passphrase_is_typed_unseen_and_ctrl_c_leaves_the_terminal_as_it_was() {
    let place = Place::new();
    place.init();
    let pty = openpty(None, None).unwrap();
    let before = tcgetattr(&pty.slave).unwrap();
    let mut master = File::from(pty.master);
    let start = || {
        let end = || pty.slave.try_clone().unwrap();
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).args([
            "volume",
            "create",
            "v",
            "1MiB",
            "--encrypt",
        ]);
        command.stdin(end()).stderr(end()).stdout(Stdio::null()).spawn().unwrap()
    };
    let (mut child, mut shown) = (start(), String::new());
    until(&mut master, &mut shown, "New passphrase of volume v: ");
    assert!(!tcgetattr(&pty.slave).unwrap().local_flags.contains(LocalFlags::ECHO));
    master.write_all(b"unseen\x03").unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGINT as i32));
    assert!(tcgetattr(&pty.slave).unwrap() == before, "the terminal is another one");
    // What would stop a program, or end it, is no part of a passphrase.
    let (mut child, mut none) = (start(), String::new());
    until(&mut master, &mut none, "New passphrase of volume v: ");
    master.write_all(b"\x1aunseen\n").unwrap();
    until(&mut master, &mut none, "a control character was typed");
    assert_eq!(child.wait().unwrap().code(), Some(2), "{none}");
    let (mut child, mut more) = (start(), String::new());
    until(&mut master, &mut more, "New passphrase of volume v: ");
    master.write_all(b"unseen words\n").unwrap();
    until(&mut master, &mut more, "The same again: ");
    master.write_all(b"unseen words\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{more}");
    assert!(tcgetattr(&pty.slave).unwrap() == before);
    assert!(!format!("{shown}{more}").contains("unseen"), "{shown}{more}");
    with(&place, &[("DBS_VOLUME_PASSPHRASE", "unseen words")], "volume export v a.raw")
        .ok("export");
}
