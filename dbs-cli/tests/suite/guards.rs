//! Which store a command acts on, who may reach its server, and what nobody is to overwrite.

use crate::support::{Place, Run, hangups_are_ignored, noise, run};
use dbs_core::{OpenOptions, Store};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// A user and group that own nothing.
const NOBODY: u32 = 65534;

/// `dbs` on another store than the place's own.
fn on(place: &Place, store: &str, args: &str) -> Run {
    run(place.bare().args(["--store", store]).args(args.split_whitespace()))
}

fn is_root(what: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIPPED {what}: needs root");
    }
    root
}

#[test]
fn a_copy_is_never_taken_for_its_original() {
    let place = Place::with_store();
    place.dbs("volume create v 8MiB").ok("create");
    fs::copy(place.store(), place.path("copy.dbs")).unwrap();
    let _original = place.serve("");
    // Somebody reads the copy, who is no server of it.
    let reader = File::open(place.path("copy.dbs")).unwrap();
    reader.lock_shared().unwrap();
    let refused = on(&place, "copy.dbs", "volume create w 8MiB").exits(11, "a reader has it");
    assert!(refused.stderr.contains("being read by process"), "{}", refused.stderr);
    on(&place, "copy.dbs", "--yes volume delete v").exits(11, "a reader has it");
    assert_eq!(place.json("volume list").as_array().unwrap().len(), 1);
    drop(reader);

    // Both are served beside each other, each asked for itself.
    let mut copy = place
        .bare()
        .args(["--store", "copy.dbs", "--quiet", "serve"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let socket = dbs_control::store_key(&place.path("copy.dbs")).unwrap() + ".sock";
    while !place.path("run").join(&socket).exists() {
        assert!(copy.try_wait().unwrap().is_none(), "the copy is not served");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    on(&place, "copy.dbs", "volume create w 8MiB").ok("create in the copy");
    on(&place, "copy.dbs", "--yes volume delete v").ok("delete in the copy");
    let names = |run: Run| {
        let all = run.ok("list").json();
        all.as_array().unwrap().iter().map(|v| v["name"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(place.dbs("--json volume list")), ["\"v\""]);
    assert_eq!(names(on(&place, "copy.dbs", "--json volume list")), ["\"w\""]);
    let refused = on(&place, "copy.dbs", "new-uuid").exits(11, "it is served");
    assert!(refused.stderr.contains("stop the server first"), "{}", refused.stderr);
    copy.kill().unwrap();
    copy.wait().unwrap();
}

#[test]
fn a_copy_gets_a_uuid_of_its_own() {
    let place = Place::with_store();
    place.dbs("volume create v 8MiB").ok("create");
    let data = noise(1, 1 << 20);
    fs::write(place.path("data"), &data).unwrap();
    place.dbs("volume import w data").ok("import");
    fs::copy(place.store(), place.path("copy.dbs")).unwrap();
    let info = |store: &str| on(&place, store, "--json info").ok("info").json();
    let uuid = |store: &str| info(store)["uuid"].as_str().unwrap().to_owned();
    let first = uuid("store.dbs");
    assert_eq!(uuid("copy.dbs"), first);
    let new = on(&place, "copy.dbs", "--json new-uuid").ok("new-uuid").json();
    assert_eq!(new["uuid"].as_str().unwrap(), uuid("copy.dbs"));
    assert!(uuid("copy.dbs") != first && uuid("store.dbs") == first);
    let chosen = "01234567-89ab-cdef-0123-456789abcdef";
    on(&place, "copy.dbs", &format!("reguid {chosen}")).ok("a given one");
    assert_eq!(uuid("copy.dbs"), chosen);
    on(&place, "copy.dbs", "check").ok("check");
    let exported = on(&place, "copy.dbs", "volume export w -").ok("export").stdout;
    assert_eq!(exported, data);
    // A dump goes back into the store it is of, and into no other.
    let dump = on(&place, "copy.dbs", "dump").ok("dump").stdout;
    fs::write(place.path("dump"), dump).unwrap();
    let refused = on(&place, "store.dbs", "--yes restore-metadata dump").exits(2, "another store");
    assert!(refused.stderr.contains("another store"), "{}", refused.stderr);
    on(&place, "copy.dbs", "--yes restore-metadata dump").ok("restore-metadata");
    assert_eq!(uuid("copy.dbs"), chosen);
    on(&place, "copy.dbs", "scrub").ok("its checksums are still known");
    // Back to the one it was made with.
    on(&place, "copy.dbs", &format!("new-uuid {first}")).ok("the old one");
    assert_eq!(uuid("copy.dbs"), first);
    for bad in ["1234", "00000000-0000-0000-0000-000000000000"] {
        on(&place, "copy.dbs", &format!("new-uuid {bad}")).exits(2, bad);
    }
}

#[test]
fn no_export_overwrites_an_open_store() {
    let place = Place::with_store();
    place.dbs("volume create v 1MiB").ok("create");
    place.dbs("init other.dbs --size 64MiB").ok("init");
    let before = fs::metadata(place.store()).unwrap().len();
    let itself = |why: &str| {
        let refused = place.dbs("volume export --force v store.dbs").exits(2, why);
        assert!(refused.stderr.contains("the store itself"), "{}", refused.stderr);
    };
    itself("idle");
    let served = place.serve("");
    itself("served");
    fs::hard_link(place.store(), place.path("link.dbs")).unwrap();
    place.dbs("volume export --force v link.dbs").exits(2, "by another name");
    // Another store, open and idle.
    on(&place, "other.dbs", "volume create w 1MiB").ok("create");
    let export = "volume export --force w store.dbs";
    let refused = on(&place, "other.dbs", export).exits(11, "a served store");
    assert!(refused.stderr.contains("open for writing by process"), "{}", refused.stderr);
    let refused = place.dbs("volume export --force v other.dbs").exits(2, "not confirmed");
    assert!(refused.stderr.contains("contains a DBS store"), "{}", refused.stderr);
    on(&place, "other.dbs", "check").ok("it is whole");
    let refused = place.dbs("--yes bench --device store.dbs --write").exits(11, "bench");
    assert!(refused.stderr.contains("open for writing by process"), "{}", refused.stderr);
    served.stop();
    assert_eq!(fs::metadata(place.store()).unwrap().len(), before);
    place.dbs("check").ok("it is whole");
    place.dbs("--yes volume export --force v other.dbs").ok("confirmed");
    assert_eq!(fs::metadata(place.path("other.dbs")).unwrap().len(), 1 << 20);
    place.dbs("volume export --force v other.dbs").ok("a raw image is overwritten unasked");
}

/// A loop device, detached when dropped.
struct Loop(String);

impl Loop {
    /// Over a file, or `None` where there is none.
    fn over(file: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        match made {
            Ok(made) if made.status.success() => {
                Some(Self(String::from_utf8(made.stdout).unwrap().trim_end().to_owned()))
            }
            _ => {
                println!("SKIPPED: no loop device with `losetup` (it needs root)");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").args(["--detach", &self.0]).status();
        assert!(detached.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
fn a_loop_device_is_the_store_behind_it() {
    let place = Place::with_store();
    place.dbs("volume create v 1MiB").ok("create");
    place.dbs("init other.dbs --size 64MiB").ok("init");
    on(&place, "other.dbs", "volume create w 1MiB").ok("create");
    let Some(device) = Loop::over(&place.store()) else { return };
    let device = &device.0;
    let itself = |why: &str| {
        let export = format!("--yes volume export --force v {device}");
        let refused = place.dbs(&export).exits(2, why);
        assert!(refused.stderr.contains("the store itself"), "{}", refused.stderr);
    };
    itself("idle");
    let served = place.serve("");
    itself("served");
    // By its device nobody else writes over it, or opens it for writing.
    let export = format!("--yes volume export --force w {device}");
    let init = format!("--yes init --force {device}");
    for refused in [on(&place, "other.dbs", &export), run(place.bare().args(init.split(' ')))] {
        let refused = refused.exits(11, "a served store");
        let text = refused.stderr;
        assert!(text.contains(device) && text.contains("open for writing by process"), "{text}");
    }
    let refused = on(&place, device, "volume create x 1MiB").exits(11, "it is open as a file");
    assert!(refused.stderr.contains("is a loop device"), "{}", refused.stderr);
    served.stop();
    on(&place, device, "volume create x 1MiB").ok("idle, by its device");
    place.dbs("check").ok("it is whole");
    assert_eq!(place.json("volume list").as_array().unwrap().len(), 2);
}

#[test]
fn init_spares_a_file_whose_data_comes_late() {
    let place = Place::new();
    for (name, at) in [("late", 3 << 20), ("sparse", 40 << 20)] {
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(place.path(name)).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"precious", at).unwrap();
        let refused = run(place.bare().args(["init", name])).exits(13, name);
        assert!(refused.stderr.contains("contains data"), "{}", refused.stderr);
        let mut found = [0; 8];
        file.read_exact_at(&mut found, at).unwrap();
        assert_eq!(&found, b"precious");
        run(place.bare().args(["init", name, "--force", "--yes"])).ok("with --force");
    }
    let file = File::create(place.path("zeros")).unwrap();
    file.write_all_at(&vec![0; 32 << 20], 0).unwrap();
    run(place.bare().args(["init", "zeros"])).ok("zeros are nothing");
}

#[test]
fn a_send_that_fails_leaves_no_file() {
    let place = Place::with_store();
    place.dbs("volume create v 1MiB").ok("create");
    place.dbs("snapshot create v@s").ok("snapshot");
    place.dbs("send v@typo stream").exits(10, "no such snapshot");
    assert!(!place.path("stream").exists());
    place.dbs("send v@s stream").ok("the next try");
    let sent = fs::read(place.path("stream")).unwrap();
    let refused = place.dbs("send v@typo stream").exits(13, "it exists");
    assert!(refused.stderr.contains("stream exists"), "{}", refused.stderr);
    assert_eq!(fs::read(place.path("stream")).unwrap(), sent);
}

#[test]
fn images_of_other_formats_are_recognised() {
    let place = Place::with_store();
    let heads: [(&str, usize, &[u8]); 4] = [
        ("qcow2", 0, b"QFI\xfb\0\0\0\x03"),
        ("VMDK", 0, b"KDMV\x01\0\0\0"),
        ("VDI", 64, b"\x7f\x10\xda\xbe"),
        ("VHDX", 0, b"vhdxfile"),
    ];
    for (name, at, magic) in heads {
        let mut image = vec![0; 64 << 10];
        image[at..at + magic.len()].copy_from_slice(magic);
        fs::write(place.path("image"), &image).unwrap();
        let refused = [place.dbs("volume import v image"), place.pipe("volume import v -", &image)];
        for refused in refused {
            let refused = refused.exits(2, name);
            let text = refused.stderr;
            assert!(text.contains(name) && text.contains("qemu-img convert"), "{text}");
        }
        assert_eq!(place.json("volume list").as_array().unwrap().len(), 0);
        place.dbs("volume import v image --format raw").ok("as it is");
        place.pipe("volume import w - --format raw", &image).ok("as it is");
        for volume in ["v", "w"] {
            let out = place.dbs(&format!("volume export {volume} -")).ok("export").stdout;
            assert_eq!(out, image, "{name} in {volume}");
            place.dbs(&format!("--yes volume delete {volume}")).ok("delete");
        }
    }
    let refused = place.dbs("volume import v store.dbs").exits(2, "a store").stderr;
    assert!(refused.contains("a DBS store") && refused.contains("send"), "{refused}");
    for (version, remedy) in [(1, "dbs upgrade IMAGE NEW"), (9, "the newer `dbs`")] {
        fs::write(place.path("image"), [&b"DBS@393!\0\0"[..], &[version, 0], &[0; 500]].concat())
            .unwrap();
        let refused = place.dbs("volume import v image").exits(2, "another version").stderr;
        assert!(refused.contains(remedy) && !refused.contains("send"), "{refused}");
    }
}

/// Lets user nobody into a place's directory, to run `dbs` there.
fn open_to_all(place: &Place) -> std::path::PathBuf {
    let open = |path: &Path| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(place.dir.path());
    let program = place.path("dbs");
    fs::copy(env!("CARGO_BIN_EXE_dbs"), &program).unwrap();
    open(&program);
    program
}

/// `dbs` as user nobody, with a runtime directory of its own.
fn as_nobody(place: &Place, program: &Path, args: &str) -> Run {
    run(Command::new(program)
        .env_clear()
        .env("DBS_STORE", place.store())
        .args(args.split_whitespace())
        .current_dir(place.dir.path())
        .stdin(Stdio::null())
        .uid(NOBODY)
        .gid(NOBODY))
}

#[test]
fn a_server_with_another_runtime_directory_is_found() {
    let place = Place::with_store();
    place.dbs("volume create v 1MiB").ok("create");
    let served = place.serve("");
    let elsewhere = |args: &str| {
        run(place
            .bare()
            .env("DBS_RUNTIME_DIR", place.path("elsewhere"))
            .env("DBS_STORE", place.store())
            .args(args.split_whitespace()))
    };
    elsewhere("volume show v").ok("by its socket");
    elsewhere("snapshot create v@s").ok("by its socket");
    // Who holds it without being a server is named with the socket that was looked for.
    served.stop();
    let holder = File::open(place.store()).unwrap();
    holder.lock().unwrap();
    let refused = elsewhere("volume show v").exits(11, "no server");
    assert!(
        refused.stderr.contains("no server listens on") && refused.stderr.contains("elsewhere/")
    );
}

#[test]
fn a_socket_in_a_directory_that_others_can_change_is_refused_for_that() {
    let place = Place::with_store();
    let open = place.path("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = place.dbs("serve --control open/x.sock").exits(2, "anybody can replace it");
    assert!(refused.stderr.contains("sticky bit"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("DBS_RUNTIME_DIR"), "{}", refused.stderr);
    fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
    let served = place.serve("--control open/x.sock --control-mode 0666");
    assert_eq!(fs::metadata(place.path("open/x.sock")).unwrap().mode() & 0o777, 0o666);
    served.stop();
    place.dbs("serve --control-mode 0777").exits(2, "no mode of a socket");
}

#[test]
fn a_server_in_a_default_directory_that_another_user_has_made_is_not_believed() {
    if !is_root("servers of several users") {
        return;
    }
    // Users that nobody is.
    let [victim, other] = [613_401, 613_402];
    let default = Path::new("/tmp").join(format!("dbs-{victim}"));
    let place = Place::with_store();
    place.dbs("volume create v 1MiB").ok("create");
    fs::set_permissions(place.store(), fs::Permissions::from_mode(0o666)).unwrap();
    let program = open_to_all(&place);
    let as_user = |user: u32, args: &str| {
        let mut command = Command::new(&program);
        command.env_clear().env("DBS_STORE", place.store()).args(args.split_whitespace());
        command.current_dir(place.dir.path()).stdin(Stdio::null()).uid(user).gid(user);
        command
    };
    let _left_by_an_earlier_run = fs::remove_dir_all(&default);
    fs::create_dir(&default).unwrap();
    chown(&default, Some(other), Some(other)).unwrap();
    let mut command = as_user(other, "--quiet serve --control-mode 0666");
    let mut server =
        command.env("DBS_RUNTIME_DIR", &default).stderr(Stdio::null()).spawn().unwrap();
    while fs::read_dir(&default).unwrap().count() == 0 {
        assert!(server.try_wait().unwrap().is_none(), "it is not served");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let shown = run(&mut as_user(victim, "volume show v"));
    std::os::unix::fs::symlink(&default, place.path("named")).unwrap();
    let named = run(as_user(victim, "volume show v").env("DBS_RUNTIME_DIR", place.path("named")));
    server.kill().unwrap();
    server.wait().unwrap();
    fs::remove_dir_all(&default).unwrap();
    let refused = shown.exits(11, "the server of another user").stderr;
    assert!(refused.contains("is not trusted") && refused.contains("DBS_RUNTIME_DIR"), "{refused}");
    named.ok("whoever names it trusts it");
}

#[test]
fn users_of_the_control_group_and_no_others_may_use_a_server() {
    if !is_root("a control group") {
        return;
    }
    let place = Place::with_store();
    place.dbs("volume create v 1MiB").ok("create");
    let program = open_to_all(&place);
    let served = place.serve("");
    let refused = as_nobody(&place, &program, "volume show v").exits(1, "not allowed");
    let text = refused.stderr;
    assert!(text.contains("may not use the control socket") && text.contains("run/"), "{text}");
    served.stop();
    let served = place.serve(&format!("--control-group {NOBODY}"));
    as_nobody(&place, &program, "volume show v").ok("of the group");
    as_nobody(&place, &program, "snapshot create v@s").ok("of the group");
    served.stop();
    // A server that gives up root's rights is reached by the user it becomes, and by root.
    let served = place.serve(&format!("--user {NOBODY}:{NOBODY}"));
    let key = dbs_control::store_key(&place.store()).unwrap();
    let socket = fs::metadata(place.path("run").join(key + ".sock")).unwrap();
    assert_eq!((socket.uid(), socket.mode() & 0o777), (NOBODY, 0o600));
    as_nobody(&place, &program, "volume show v").ok("the server's user");
    place.dbs("volume show v").ok("root");
    served.stop();
    // A server of nobody's, whose directory root does not know.
    chown(place.store(), Some(NOBODY), Some(NOBODY)).unwrap();
    fs::create_dir(place.path("nobody")).unwrap();
    chown(place.path("nobody"), Some(NOBODY), Some(NOBODY)).unwrap();
    let mut server = Command::new(&program)
        .env_clear()
        .env("DBS_RUNTIME_DIR", place.path("nobody"))
        .env("DBS_STORE", place.store())
        .args(["--quiet", "serve"])
        .current_dir(place.dir.path())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .uid(NOBODY)
        .gid(NOBODY)
        .spawn()
        .unwrap();
    while fs::read_dir(place.path("nobody")).unwrap().count() == 0 {
        assert!(server.try_wait().unwrap().is_none(), "it is not served");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    place.dbs("volume show v").ok("a server of another user");
    server.kill().unwrap();
    server.wait().unwrap();
}

/// Found by review: what was confirmed was deleted by its name, also if another one had got the name meanwhile.
#[test]
fn what_is_deleted_is_what_was_confirmed() {
    let place = Place::new();
    place.init();
    place.dbs("volume create v 4MiB").ok("create");
    place.dbs("snapshot create v@s").ok("snapshot");
    let _server = place.serve("");
    let pty = nix::pty::openpty(None, None).unwrap();
    let end = || pty.slave.try_clone().unwrap();
    let mut command = place.bare();
    command.env("DBS_STORE", place.store()).args(["snapshot", "delete", "v@s"]);
    let mut child = command.stdin(end()).stderr(end()).stdout(Stdio::null()).spawn().unwrap();
    let (mut master, mut asked) = (File::from(pty.master), String::new());
    while !asked.contains("[y/N]") {
        let mut piece = [0; 256];
        let count = master.read(&mut piece).unwrap();
        asked += &String::from_utf8_lossy(&piece[..count]);
    }
    let store = place.store().display().to_string();
    assert!(asked.contains(&store) && asked.contains("v@s"), "{asked}");
    place.dbs("--yes snapshot delete v@s").ok("delete");
    place.dbs("snapshot create v@s").ok("another one");
    master.write_all(b"y\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(10));
    place.dbs("snapshot show v@s").ok("it stays");
}

/// Found by review: a lost terminal ended a server as `kill -9` does.
#[test]
fn a_hangup_ends_a_server_in_good_order() {
    if hangups_are_ignored() {
        return;
    }
    let place = Place::new();
    place.init();
    let server = place.serve("");
    server.signal("HUP");
    // The kernel and the shell both tell.
    let _ended_already =
        Command::new("kill").args(["-s", "HUP", &server.pid().to_string()]).status();
    let (code, log) = server.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("stopped"), "{log}");
}

/// `dbs` with its standard output closed, or where `to` says; the exit code and errors.
fn with_output(place: &Place, args: &str, to: &str) -> (i32, String) {
    let mut command = Command::new("sh");
    let line = format!("exec \"$0\" {args} {to}");
    command.args(["-c", &line, env!("CARGO_BIN_EXE_dbs")]).env("DBS_STORE", place.store());
    let run = run(command.env("DBS_RUNTIME_DIR", place.path("run")).current_dir(place.dir.path()));
    (run.code, run.stderr)
}

/// Found by review: the output was lost, as the library opens /dev/null in its place, and nobody was told.
#[test]
fn a_result_that_goes_nowhere_is_an_error() {
    let place = Place::with_store();
    place.json("volume create v 1MiB");
    place.json("snapshot create v@s");
    for args in [
        "send v@s",
        "volume export v@s -",
        "dump",
        "info",
        "check",
        "volume list",
        "--json volume list",
        "--json snapshot list v",
        "--json info",
        "volume map v",
        "volume show v",
        "snapshot show v@s",
        "completions bash",
    ] {
        let (code, errors) = with_output(&place, args, ">&-");
        assert_eq!(code, 1, "{args}: {errors}");
        assert!(errors.contains("Bad file descriptor"), "{args}: {errors}");
        // Who wants it nowhere says so.
        let (code, errors) = with_output(&place, args, ">/dev/null");
        assert_eq!(code, 0, "{args}: {errors}");
    }
    // What was done is done, whoever hears of it.
    assert_eq!(with_output(&place, "snapshot create v@t", ">&-"), (0, String::new()));
    place.json("snapshot show v@t");
}

/// Found by review: of ten restarts beside something that asked for its clients, six failed.
#[test]
fn a_server_waits_for_commands_that_read_the_idle_store() {
    let place = Place::with_store();
    // It may have waited for too long, if this was held up meanwhile.
    let got_ready = (0..20).any(|_| {
        let reads = OpenOptions { read_only: true, ..OpenOptions::default() };
        let held = Store::open(&place.store(), &reads).unwrap();
        let mut command = place.bare();
        command.env("DBS_STORE", place.store()).arg("serve");
        let mut server = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(server.stderr.take().unwrap());
        let mut line = String::new();
        log.read_line(&mut line).unwrap();
        assert!(line.contains("event=waiting"), "it does not wait: {line}");
        held.close().unwrap();
        let lines: Vec<_> = log.lines().map_while(Result::ok).take(1).collect();
        let is_ready = lines.iter().any(|line| line.contains("event=ready"));
        kill(Pid::from_raw(server.id().cast_signed()), Signal::SIGTERM).unwrap();
        server.wait().unwrap();
        is_ready
    });
    assert!(got_ready);
    // Another server is not waited for.
    let served = place.serve("");
    let second = place.dbs("serve").exits(11, "second");
    assert!(!second.stderr.contains("event=waiting"), "{}", second.stderr);
    assert_eq!(served.stop().0, Some(0));
}
