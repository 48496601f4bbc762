//! Mounting as a user other than root, through `fusermount3`. A program of its own: its mount namespace
//! begins with a copy of every mount there is, which keeps servers and devices of other tests from ending.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/mod.rs"]
mod support;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use support::{Place, can_mount, noise};

/// In a mount namespace of its own, where `/dev/fuse` is open to all, as it usually is; else the
/// machine's might not be. The namespace, and what is mounted in it, goes with the processes in it.
const SCRIPT: &str = r#"
set -e
cd "$1"
mount --make-rprivate /
mknod -m 666 fuse c 10 229
mount --bind fuse /dev/fuse
as_user() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
as_user true
echo ready
as_user "$DBS" mount mine.dbs mnt >mounted 2>&1
as_user cat mnt/volumes/v/snapshots/s.raw >copy
if cat mnt/store.json >/dev/null 2>&1; then echo root may look; exit 1; fi
as_user "$DBS" umount mnt >>mounted 2>&1
! grep -q " $PWD/mnt " /proc/self/mountinfo
echo done
"#;

#[test]
fn as_a_user_through_fusermount3() {
    let true = can_mount() else { return };
    for program in ["fusermount3", "setpriv", "unshare"] {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
        if !found.unwrap().status.success() {
            println!("SKIPPED mounting as a user: needs {program}");
            return;
        }
    }
    let place = Place::with_store();
    let dir = place.dir.path();
    fs::write(dir.join("image"), noise(1, 1 << 20)).unwrap();
    place.dbs("volume import v image").ok("import");
    place.dbs("snapshot create v@s").ok("snapshot");
    fs::copy(place.store(), dir.join("mine.dbs")).unwrap();
    for name in ["mnt", "run-of-user"] {
        fs::create_dir(dir.join(name)).unwrap();
    }
    for name in ["mine.dbs", "mnt", "run-of-user"] {
        std::os::unix::fs::chown(dir.join(name), Some(65534), Some(65534)).unwrap();
    }
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    // Where the user can reach it.
    let program = dir.join("dbs");
    fs::copy(env!("CARGO_BIN_EXE_dbs"), &program).unwrap();
    let (out, err) = (dir.join("out"), dir.join("err"));
    let status = Command::new("timeout")
        .args(["-k", "5", "600", "unshare", "-m", "sh", "-c", SCRIPT, "sh"])
        .arg(dir)
        .env("DBS", program)
        .env("DBS_RUNTIME_DIR", dir.join("run-of-user"))
        .stdin(Stdio::null())
        .stdout(File::create(&out).unwrap())
        .stderr(File::create(&err).unwrap())
        .status()
        .unwrap();
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
    let (said, errors, mounted) = (read("out"), read("err"), read("mounted"));
    if !said.contains("ready") {
        println!("SKIPPED mounting as a user: needs namespaces and device nodes: {errors}");
        return;
    }
    assert!(status.success() && said.contains("done"), "{said}{errors}{mounted}");
    assert_eq!(fs::read(dir.join("copy")).unwrap(), fs::read(dir.join("image")).unwrap());
}
