//! Help, bad input and exit codes of every command. None of this needs a store.

use crate::support::{Place, listing, run};

/// Every command with arguments that are complete.
const COMMANDS: &[&str] = &[
    "info",
    "grow 1GiB",
    "vacuum",
    "volume create a 1GiB",
    "volume list",
    "volume show a",
    "volume rename a b",
    "volume resize a 1GiB",
    "volume set a --iops 100 --bandwidth 1MiB --burst 2",
    "volume delete a",
    "volume clone a@s b",
    "volume flatten a",
    "volume children a",
    "volume import a image",
    "volume export a out",
    "volume map a",
    "volume diff a@s a",
    "volume du a",
    "volume trim",
    "volume compress a@s",
    "snapshot create a@s",
    "snapshot list a",
    "snapshot show a@s",
    "snapshot rename a@s t",
    "snapshot delete a@s",
    "snapshot rollback a@s",
    "snapshot protect a@s",
    "snapshot unprotect a@s",
    "snapshot label a@s k=v",
    "check",
    "repair",
    "dump",
    "send a@s out",
    "receive a stream",
    "backup create a@s vfs:///",
    "backup restore vfs:///?backup=b1&volume=v1",
    "serve",
    "attach a",
    "mount .",
    "clients",
    "top --once",
    "doctor",
    "bench",
];

/// Those that take no store.
const STORELESS: &[&str] = &[
    "init x",
    "upgrade x y",
    "detach x",
    "umount x",
    "attached",
    "preflight",
    "backup list vfs:///",
    "backup show vfs:///?volume=v1",
    "backup verify vfs:///?volume=v1",
    "backup delete vfs:///?volume=v1",
    "backup mount vfs:/// x",
    "completions bash",
    "man x",
];

/// The words of a command before its arguments.
fn name(command: &str) -> String {
    let grouped =
        ["volume ", "snapshot ", "backup "].iter().any(|group| command.starts_with(group));
    let words = if grouped { 2 } else { 1 };
    command.split_whitespace().take(words).collect::<Vec<_>>().join(" ")
}

fn place() -> Place {
    let place = Place::new();
    std::fs::write(place.path("image"), vec![7; 4096]).unwrap();
    std::fs::write(place.path("stream"), b"DBS").unwrap();
    place
}

#[test]
fn help_of_every_command() {
    let place = place();
    for command in COMMANDS.iter().chain(STORELESS) {
        let name = name(command);
        for help in ["--help", "-h"] {
            let shown = place.dbs(&format!("{name} {help}")).ok(&name);
            assert!(shown.text().contains("Usage: dbs "), "{}", shown.text());
            assert!(shown.text().contains("--store"), "{}", shown.text());
        }
    }
    assert!(place.dbs("--help").ok("help").text().contains("130  interrupted"));
    // More than the line that the list of commands shows.
    for (command, part) in
        [("attach", "/dev/dbs/STORE"), ("clients kick", "To keep an NBD client away")]
    {
        let shown = place.dbs(&format!("{command} --help")).ok(command);
        assert!(shown.text().contains(part), "{}", shown.text());
    }
    assert!(place.dbs("--version").ok("version").text().starts_with("dbs 2."));
}

#[test]
fn unknown_options_and_missing_arguments() {
    let place = place();
    for command in COMMANDS.iter().chain(STORELESS) {
        place.dbs(&format!("{command} --no-such-option")).exits(2, command);
        place.dbs(&format!("{command} too many arguments here")).exits(2, command);
        let name = name(command);
        if name != *command {
            place.dbs(&name).exits(2, &name);
        }
    }
    for args in ["", "volume", "snapshot", "backup", "no-such-command", "volume no-such-command"] {
        place.dbs(args).exits(2, args);
    }
    assert_eq!(listing(place.dir.path()), ["image", "stream"], "nothing was made");
}

#[test]
fn no_store_named() {
    let place = place();
    for command in COMMANDS {
        let refused = run(place.bare().args(command.split_whitespace())).exits(2, command);
        assert!(refused.stderr.contains("DBS_STORE"), "{command}: {}", refused.stderr);
    }
}

#[test]
fn missing_store() {
    let place = place();
    for command in COMMANDS {
        let missing = place.dbs(&format!("--yes {command}")).exits(10, command);
        assert!(missing.stderr.contains("store.dbs"), "{command}: {}", missing.stderr);
        let missing = place.dbs(&format!("--yes --json {command}")).exits(10, command);
        let error: serde_json::Value = serde_json::from_str(&missing.stderr).unwrap();
        assert_eq!(error["error"]["kind"], "not_found", "{command}");
        assert!(error["error"]["message"].is_string(), "{command}");
        assert_eq!(missing.text(), "", "{command}");
    }
    assert_eq!(listing(place.dir.path()), ["image", "stream"], "nothing was made");
}

#[test]
fn not_a_store() {
    let place = place();
    let junk = crate::support::noise(1, 1 << 20);
    for content in [&junk[..], &junk[..100], &[0; 65536], &[]] {
        std::fs::write(place.store(), content).unwrap();
        for command in COMMANDS {
            // No store at all is the wrong argument, one cut short is damage.
            let refused = place.dbs(&format!("--yes {command}"));
            assert!([2, 4].contains(&refused.code), "{command}: {}", refused.stderr);
            assert!(refused.stderr.contains("store.dbs"), "{command}: {}", refused.stderr);
        }
        assert_eq!(std::fs::read(place.store()).unwrap(), content, "it was left alone");
    }
}

#[test]
fn bad_values() {
    let place = place();
    for args in [
        "grow 10XB",
        "grow -1",
        "grow 10GB",
        "init x --size ten",
        "init x --size 1GiB --extent-size 1.5.5",
        "init x --max-volumes -1",
        "volume create a 10XB",
        "volume create a",
        "volume clone a b",
        "volume clone a@ b",
        "volume clone a@b@c d",
        "volume resize a big",
        "volume set a",
        "volume set a --iops 0",
        "volume set a --bandwidth 0",
        "volume set a --burst 4000",
        "volume map a --offset x",
        "volume map a@",
        "volume diff a a",
        "volume diff a@s b",
        "snapshot create a",
        "snapshot create @s",
        "snapshot create a@s --label novalue",
        "snapshot create a@s --label dbs.received-uuid=x",
        "snapshot create a@dbs-receiving",
        "snapshot label a@s",
        "snapshot label a@s word",
        "send a",
        "send a -R --from r",
        "send a@s -R",
        "send a@s --resume token",
        "receive @",
        "serve --nbd nowhere",
        "serve --nbd tcp:host:port",
        "serve --tls-cert file",
        "serve --tls-ca file",
        "serve --workers 0",
        "serve --commit-interval 1",
        "bench --only unknown",
        "bench --depth 0",
        "bench --time 1",
        "bench nbd+unix:///a",
        "bench a --device b",
        "completions cmd.exe",
        "info --driver mmap",
    ] {
        place.dbs(args).exits(2, args);
    }
    assert_eq!(listing(place.dir.path()), ["image", "stream"], "nothing was made");
}

#[test]
fn usage_errors_as_json() {
    let place = place();
    for args in [
        "--json grow 10XB",
        "volume --json",
        "frobnicate --json",
        "--json serve --tls-dir d --tls-ca c",
        "--json serve --tls-dir d --tls-cert c --tls-key k",
    ] {
        let refused = place.dbs(args).exits(2, args);
        let error: serde_json::Value = serde_json::from_str(&refused.stderr).unwrap();
        assert_eq!(error["error"]["kind"], "usage", "{args}");
    }
}

#[test]
fn commands_of_longhorn_say_where_they_are() {
    let place = place();
    for (line, to) in [
        ("replica", "longhorn replica"),
        ("replica --volume-name v /x --size 1gb --listen :1", "longhorn replica"),
        ("controller v --frontend socket --help", "longhorn controller"),
        ("--store s engine --url http://localhost:1 snapshots ls", "longhorn"),
    ] {
        let refused = place.dbs(line).exits(2, line);
        assert!(refused.stderr.contains(&format!("use `{to}`")), "{line}: {}", refused.stderr);
        let refused = place.dbs(&format!("--json {line}")).exits(2, line);
        let error: serde_json::Value = serde_json::from_str(&refused.stderr).unwrap();
        assert_eq!(error["error"]["kind"], "usage");
    }
}

#[test]
fn aliases() {
    let place = place();
    for args in ["vol ls", "vol rm a", "snap ls a", "snap rm a@s", "volume mv a b"] {
        place.dbs(&format!("--yes {args}")).exits(10, args);
    }
}

#[test]
fn completions_of_every_shell() {
    let place = place();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = place.dbs(&format!("completions {shell}")).ok(shell).text();
        for word in ["snapshot", "rollback", "--commit-interval"] {
            assert!(script.contains(word.trim_start_matches('-')), "{shell}: {word}");
        }
    }
}

#[test]
fn a_manual_page_for_every_command() {
    let place = place();
    place.dbs("man pages").ok("man");
    let pages = listing(&place.path("pages"));
    assert!(pages.contains(&"dbs.1".to_owned()));
    for command in COMMANDS.iter().chain(STORELESS) {
        let page = format!("dbs-{}.1", name(command).replace(' ', "-"));
        assert!(pages.contains(&page), "{page} is not in {pages:?}");
    }
    let main = std::fs::read_to_string(place.path("pages/dbs.1")).unwrap();
    assert!(main.contains("no such store, volume or snapshot"), "exit codes are documented");
}

#[test]
fn import_looks_at_its_input_first() {
    let place = place();
    std::fs::write(place.path("empty"), b"").unwrap();
    place.dbs("volume import a missing").exits(10, "missing");
    place.dbs("volume import a empty").exits(2, "empty");
    place.dbs("volume import a .").exits(2, "directory");
}
