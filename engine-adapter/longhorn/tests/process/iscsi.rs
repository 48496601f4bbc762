//! Volumes over iSCSI with the real `tgtd` of Longhorn, and with a client in user space: qemu's. The kernel's
//! initiator is for the virtual machine (`scripts/vm/scenarios/controller-iscsi.sh`); here, programs that note
//! how they are called stand for those of the host.
//!
//! `TGTD_BIN` names the directory of `tgtd` and `tgtadm`.

use crate::controller::*;
use crate::support::*;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const TARGET: &str = "iqn.2019-10.io.longhorn:vol";

/// A `tgtd` of the test's own, on a port of its own, which a controller starts.
struct Tgt {
    bin: PathBuf,
    programs: PathBuf,
    port: u16,
}

impl Tgt {
    fn new(place: &Place) -> Option<Self> {
        let Some(bin) = std::env::var_os("TGTD_BIN").map(PathBuf::from) else {
            println!(
                "SKIPPED volumes over iSCSI: needs TGTD_BIN, the directory of Longhorn's tgtd and tgtadm"
            );
            return None;
        };
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let programs = place.path().join("programs");
        fs::create_dir(&programs).unwrap();
        let tgt = Self { bin, programs, port };
        let (pid, tgtd) = (tgt.pid_file(), tgt.bin.join("tgtd"));
        let start = format!("echo $$ >{}\nexec {}", pid.display(), tgtd.display());
        tgt.program("tgtd", &format!("{start} \"$@\" --iscsi portal=127.0.0.1:{port}"));
        tgt.program("tgtadm", &format!("exec {} \"$@\"", tgt.bin.join("tgtadm").display()));
        Some(tgt)
    }

    /// A program in front of those of the system.
    fn program(&self, name: &str, script: &str) {
        let file = self.programs.join(name);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn pid_file(&self) -> PathBuf {
        self.programs.join("tgtd.pid")
    }

    /// Has a command find these programs.
    fn given(&self, command: &mut Command) {
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.programs.display()));
        command.env("TGT_IPC_SOCKET", self.programs.join("socket"));
    }

    fn controller(
        &self,
        place: &Place,
        frontend: &str,
        replicas: &[&str],
        more: &[&str],
    ) -> Process {
        let mut command = command_of(place, frontend, replicas, more);
        command.args(["--block-device", "iscsi", "--device-dir"]).arg(self.programs.join("nodes"));
        self.given(&mut command);
        Process::spawn(command)
    }

    fn targets(&self) -> String {
        let mut command = Command::new("tgtadm");
        self.given(&mut command);
        let output =
            command.args(["--lld", "iscsi", "--op", "show", "--mode", "target"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn url(&self) -> String {
        format!("iscsi://127.0.0.1:{}/{TARGET}/1", self.port)
    }

    /// Kills `tgtd`, if it was started.
    fn kill(&self) {
        if let Ok(pid) = fs::read_to_string(self.pid_file()) {
            let _ended = Command::new("kill").args(["-9", pid.trim()]).status();
        }
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.programs.join("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

impl Drop for Tgt {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs a program of qemu, which must succeed; `None` if it knows no iSCSI.
fn qemu(program: &str, args: &[&str]) -> Option<String> {
    let mut command = Command::new("timeout");
    let output = command.args(["100", program]).args(args).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if text.contains("Unknown protocol 'iscsi'") || text.contains("No such file or directory") {
        println!(
            "SKIPPED a client of iSCSI: needs {program} with its block driver (qemu-block-extra)"
        );
        return None;
    }
    assert!(output.status.success() && !text.contains("error"), "{program} {args:?}: {text}");
    Some(text)
}

fn info(engine: &Process) -> serde_json::Value {
    serde_json::from_str(&run(engine, &["info"])).unwrap()
}

fn image(path: &Path) {
    let mut bytes = vec![0; SIZE as usize];
    fastrand::Rng::with_seed(9).fill(&mut bytes[..20 << 20]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_target_over_two_replicas_and_its_clients() {
    let place = Place::new();
    let Some(tgt) = Tgt::new(&place) else { return };
    let mut replicas: Vec<_> = ["a", "b"].map(|name| replica(&place, name)).into();
    let addresses: Vec<String> = replicas.iter().map(|(_, address)| address.clone()).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let mut engine = tgt.controller(&place, "tgt-iscsi", &addresses, &[]).ready();
    assert_eq!(info(&engine)["endpoint"], TARGET);
    assert!(info(&engine).get("blockDevice").is_none());
    assert!(tgt.targets().contains(&format!(": {TARGET}\n")));
    let (file, url) = (place.path().join("image"), tgt.url());
    image(&file);
    let file = file.to_str().unwrap();
    // Not `compare`, which asks for the status of blocks: that `tgtd` never answers anybody again.
    let compare = || {
        let (back, from) = (place.path().join("back"), format!("if={url}"));
        let to = format!("of={}", back.display());
        qemu("qemu-img", &["dd", "-f", "raw", "-O", "raw", "bs=1M", &from, &to]);
        assert!(
            fs::read(back).unwrap() == fs::read(file).unwrap(),
            "what is read is not what was written"
        );
    };
    if qemu("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", file, &url]).is_none() {
        return;
    }
    compare();
    replicas[1].0.kill();
    compare();
    assert_eq!(run(&engine, &["snapshots", "create", "one"]).trim(), "one");
    qemu("qemu-io", &["-f", "raw", "-c", "discard 8M 4M", "-c", "read -P 0 8M 4M", &url]);

    // Larger, and not smaller in the eyes of any client.
    let bigger = (SIZE * 2).to_string();
    run(&engine, &["expand", "--size", &bigger]);
    eventually("the volume grows", || info(&engine)["isExpanding"] == false);
    assert_eq!(info(&engine)["lastExpansionError"], "");
    let text = qemu("qemu-img", &["info", "-f", "raw", "--output=json", &url]).unwrap();
    assert!(text.contains(&format!("\"virtual-size\": {bigger}")), "{text}");
    qemu("qemu-io", &["-f", "raw", "-c", "write -P 7 100M 1M", "-c", "read -P 7 100M 1M", &url]);

    run(&engine, &["frontend", "shutdown"]);
    assert_eq!((tgt.targets().as_str(), info(&engine)["endpoint"].as_str()), ("", Some("")));
    run(&engine, &["frontend", "start", "tgt-iscsi"]);
    qemu("qemu-io", &["-f", "raw", "-c", "read -P 7 100M 1M", &url]);

    // `tgtd` dies: that is told, and a new start of the frontend is all that is needed.
    tgt.kill();
    engine.wait_for("event=ended program=tgtd");
    run(&engine, &["frontend", "shutdown"]);
    run(&engine, &["frontend", "start", "tgt-iscsi"]);
    qemu("qemu-io", &["-f", "raw", "-c", "read -P 7 100M 1M", &url]);

    // What a dead controller left: its clients have errors, and the next one begins anew.
    engine.kill();
    assert!(tgt.targets().contains(TARGET));
    replicas[0].0.kill();
    let port = addresses[0].strip_prefix("tcp://").unwrap();
    let _a = place
        .start("a", &["--disableRevCounter", "--listen", port, "--sync-agent-port-count", "2"]);
    let sizes = ["--size", &bigger, "--current-size", &bigger];
    let mut engine = tgt.controller(&place, "tgt-iscsi", &addresses[..1], &sizes).ready();
    qemu("qemu-io", &["-f", "raw", "-c", "read -P 7 100M 1M", "-c", "read -P 0 8M 4M", &url]);
    engine.stop();
    assert_eq!(tgt.targets(), "", "and its tgtd, which others may use, runs on");
}

#[test]
fn a_write_through_tgtd_waits_until_it_is_durable() {
    let place = Place::new();
    let Some(tgt) = Tgt::new(&place) else { return };
    let (_replica, address) = replica(&place, "a");
    // As it asks for no flush on behalf of those who do, it waits if nothing else is said.
    let cases: [(&[&str], bool); 3] =
        [(&["--durability", "interval"], false), (&["--durability", "power"], true), (&[], true)];
    for (durability, flushes) in cases {
        let mut engine = tgt.controller(&place, "tgt-iscsi", &[&address], durability).ready();
        let write =
            ["-f", "raw", "-t", "writeback", "-c", "write -P 1 1M 4k", "-c", "flush", &tgt.url()];
        if qemu("qemu-io", &write).is_none() {
            return;
        }
        run(&engine, &["journal"]);
        eventually("the journal", || engine.output().iter().any(|line| line.contains(" W[")));
        let flushed = engine.output().iter().any(|line| line.contains(" F["));
        assert_eq!(flushed, flushes, "{:?}", engine.output());
        engine.stop();
    }
}

/// A process of this name, in whose namespaces the host's initiator is looked for.
fn iscsid(tgt: &Tgt) -> Process {
    let program = tgt.programs.join("iscsid");
    fs::copy("/bin/sleep", &program).unwrap();
    let mut command = Command::new(program);
    command.arg("1000");
    Process::spawn(command)
}

/// The host's programs, which note how they are called; the disk is one that this machine has.
fn host(tgt: &Tgt, disk: &str) {
    let calls = tgt.programs.join("calls");
    let (calls, state) = (calls.display(), tgt.programs.join("session"));
    let state = state.display();
    tgt.program("nsenter", &format!("echo nsenter \"$1 $2\" >>{calls}\nshift 2\nexec \"$@\""));
    let portal = "ip=$(sed -n 's/.*-p \\([0-9.]*\\).*/\\1/p' {calls} | tail -1)"
        .replace("{calls}", &calls.to_string());
    tgt.program(
        "iscsiadm",
        &format!(
            "echo iscsiadm \"$@\" >>{calls}\n{portal}\ncase \"$*\" in\n*--login) touch {state} ;;\n*--logout) rm \
             {state} ;;\n'-m session') [ -e {state} ] || exit 21; echo \"tcp: [1] $ip:3260,1 {TARGET} \
             (non-flash)\" ;;\n'-m session -P 3') [ -e {state} ] || exit 21; echo \"Target: {TARGET} (non-flash)\"; echo \"Current Portal: \
             $ip:3260,1\"; echo 'scsi2 Channel 00 Id 0 Lun: 1'; echo \"Attached scsi disk {disk}  State: running\" \
             ;;\nesac"
        ),
    );
}

/// A block device of this machine without a setting that a controller would change.
fn a_disk() -> Option<(String, u64)> {
    for entry in fs::read_dir("/sys/class/block").ok()?.flatten() {
        if entry.path().join("device/timeout").exists() {
            continue;
        }
        let text = fs::read_to_string(entry.path().join("dev")).unwrap_or_default();
        if let Some((major, minor)) = text.trim().split_once(':') {
            let number = nix::sys::stat::makedev(major.parse().unwrap(), minor.parse().unwrap());
            return Some((entry.file_name().into_string().unwrap(), number));
        }
    }
    None
}

#[test]
fn a_block_device_by_programs_that_stand_for_the_hosts() {
    let place = Place::new();
    let Some(tgt) = Tgt::new(&place) else { return };
    let Some((disk, number)) = a_disk().filter(|_| nix::unistd::geteuid().is_root()) else {
        println!("SKIPPED a block device over iSCSI: needs root and a block device");
        return;
    };
    host(&tgt, &disk);
    let iscsid = iscsid(&tgt);
    let (_replica, address) = replica(&place, "a");
    let engine = tgt.controller(&place, "tgt-blockdev", &[&address], &[]).ready();
    let node = tgt.programs.join("nodes/vol");
    let shown = info(&engine);
    assert_eq!(shown["endpoint"], node.display().to_string());
    assert_eq!(
        (&shown["frontend"], &shown["blockDevice"]),
        (&"tgt-blockdev".into(), &"iscsi".into())
    );
    assert!(engine.log().contains("event=block-device volume=vol kind=iscsi"), "{}", engine.log());
    let metadata = fs::metadata(&node).unwrap();
    assert_eq!((metadata.rdev(), metadata.mode() & 0o777, metadata.gid()), (number, 0o660, 6));
    let calls = tgt.calls();
    let namespaces = format!("--mount=/proc/{0}/ns/mnt --net=/proc/{0}/ns/net", iscsid.pid());
    assert_eq!(calls[0], format!("nsenter {namespaces}"));
    let has = |calls: &[String], what: &str| calls.iter().any(|call| call.contains(what));
    for what in ["-m discovery -t sendtargets -p ", "abort_timeout -v 15", "--login"] {
        assert!(has(&calls, what), "{what}: {calls:?}");
    }

    // A newer controller leaves it alone, at once, and does not even ask replicas.
    let calls = tgt.calls();
    let more = ["--upgrade", "--listen", "127.0.0.1:0"];
    let mut newer = tgt.controller(&place, "tgt-blockdev", &["tcp://127.0.0.1:1"], &more);
    assert_eq!(newer.wait().code(), Some(1));
    let log = newer.log();
    assert!(log.contains("Detach the volume, upgrade its engine, attach it again"), "{log}");
    assert_eq!(tgt.calls(), calls);
    assert!(node.exists() && tgt.targets().contains(TARGET));
    assert_eq!(info(&engine)["frontendState"], "up");
    let mut engine = engine;
    engine.stop();
    assert!(!node.exists() && tgt.targets().is_empty());
    assert!(has(&tgt.calls(), &format!("iscsiadm -m node -T {TARGET} --logout")));
}

/// The replicas of a newer controller take the store from those of the older one: a refusal after that costs the
/// older one its users.
#[test]
fn an_upgrade_of_a_volume_that_others_reach_by_its_socket_is_refused_at_once() {
    let place = Place::new();
    // With a replica in the process, whose store the newer process would take when it opens it.
    let directory = format!("local:{}", place.path().join("here").display());
    let mut engine = controller(&place, &[&directory], &[]).ready();
    let data = client(&place);
    write(&data, 1);
    for frontend in ["tgt-blockdev", "ublk", "tgt-iscsi"] {
        let begun = std::time::Instant::now();
        let more = ["--upgrade", "--block-device", "iscsi"];
        let mut newer = controller_with(&place, frontend, &[&directory], &more);
        assert_eq!(newer.wait().code(), Some(1));
        let log = newer.log();
        assert!(log.contains("Detach the volume, upgrade its engine"), "{frontend}: {log}");
        let time = begun.elapsed();
        assert!(time < std::time::Duration::from_secs(5), "{frontend}: {time:?}");
        check(&data, 1);
        write(&data, 1);
    }
    engine.stop();
}

#[test]
fn without_tgtd_the_way_out_is_named() {
    let place = Place::new();
    for (frontend, device) in [("tgt-iscsi", "auto"), ("tgt-blockdev", "iscsi")] {
        let more = ["--null-backend", "--block-device", device];
        let mut command = command_of(&place, frontend, &[], &more);
        command.env("PATH", place.path());
        let mut engine = Process::spawn(command);
        assert_eq!(engine.wait().code(), Some(1));
        let log = engine.log();
        assert!(log.contains("tgtadm") && log.contains("nbd") && log.contains("modprobe"), "{log}");
    }
    assert!(!place.path().join("longhorn-vol.sock").exists());
}
