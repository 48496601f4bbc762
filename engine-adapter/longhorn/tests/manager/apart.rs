//! A test in namespaces of its own.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Says to the second of both processes where its directory is.
const LAB: &str = "DBS_MANAGER_LAB";
/// Longer than any test takes.
const LIMIT: Duration = Duration::from_secs(900);
const PROBE: &str = "grpc_health_probe";
/// The manager finds engines and replicas below `/host`, the probe in `/usr/local/bin`, and debuggers at a fixed port.
const SET_UP: &str = r#"
set -e
ip link set lo up
mount -t tmpfs tmpfs /run
mount --bind "$0/host" /host
mkdir -p /host/dev/shm
mount -t tmpfs tmpfs /host/dev/shm
mount --bind "$0/bin" /usr/local/bin
exec "$@"
"#;

/// Runs a test of this name apart, where what it needs is there. It is given its directory.
pub fn apart(name: &str, test: impl FnOnce(&Path)) {
    if let Some(lab) = std::env::var_os(LAB) {
        return test(Path::new(&lab));
    }
    let (manager, probe) = match programs() {
        Ok(programs) => programs,
        Err(missing) => return skip(name, &missing),
    };
    let lab = tempfile::Builder::new().prefix("dbs-manager-").tempdir().unwrap();
    for dir in ["bin", "host", "logs"] {
        fs::create_dir(lab.path().join(dir)).unwrap();
    }
    symlink(manager, lab.path().join("manager")).unwrap();
    symlink(probe, lab.path().join("bin").join(PROBE)).unwrap();
    // What is mounted on a directory goes with it, so it must not be removed before its last user's end.
    let kept = Path::new("/host").join(lab.path().file_name().unwrap());
    fs::create_dir_all(&kept).unwrap();
    let failed = run(lab.path(), name);
    let _ = fs::remove_dir(kept).and_then(|()| fs::remove_dir("/host"));
    assert!(failed.is_none(), "{}", failed.unwrap_or_default());
}

pub fn skip(test: &str, missing: &str) {
    // Not with `println!`, which is kept from sight for a test that passes.
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {test}: {missing}");
}

/// The manager and the probe, or what is missing.
fn programs() -> Result<(PathBuf, PathBuf), String> {
    let Some(manager) = std::env::var_os("INSTANCE_MANAGER_BIN").map(PathBuf::from) else {
        return Err("no INSTANCE_MANAGER_BIN, the `longhorn-instance-manager` of upstream".into());
    };
    assert!(manager.is_file(), "INSTANCE_MANAGER_BIN={}: no such file", manager.display());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places =
        manager.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(&path));
    let probe = places.map(|place| place.join(PROBE)).find(|probe| probe.is_file());
    let probe = probe.ok_or(format!("no {PROBE} beside the manager or in PATH"))?;
    if !nix::unistd::geteuid().is_root() {
        return Err("not root, and the manager needs namespaces and fixed paths".into());
    }
    let canonical = |path: PathBuf| path.canonicalize().unwrap();
    Ok((canonical(manager), canonical(probe)))
}

/// What went wrong.
fn run(lab: &Path, name: &str) -> Option<String> {
    let output = lab.join("output");
    let file = fs::File::create(&output).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["--", "sh", "-c", SET_UP]).arg(lab).arg(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(LAB, lab);
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file).process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            skip(name, &format!("unshare: {error}"));
            return None;
        }
    };
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let said = String::from_utf8_lossy(&fs::read(&output).unwrap()).into_owned();
    if let Some(line) = said.lines().find(|line| line.contains("SKIPPED: ")) {
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
    if said.starts_with("unshare: ") {
        skip(name, said.trim_end());
        return None;
    }
    match status {
        Some(status) if status.success() && said.contains("1 passed") => None,
        Some(status) => Some(format!("{status}\n{said}")),
        None => Some(format!("not done after {LIMIT:?}\n{said}")),
    }
}
