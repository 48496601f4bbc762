//! Every system call that changes something, on every kind of node: refused with what the kernel
//! answers for an ext4 that is mounted read-only and has the same tree.

use crate::images::Mounted;
use crate::server::{Server, can_mount};
use crate::tools::{has, must};
use nix::mount::MsFlags;
use rustix::fs::{
    self as sys, Access, AtFlags, CWD, FallocateFlags, FileType, IFlags, Mode, OFlags, RenameFlags,
    Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;
use serde_json::json;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

/// One of each kind: directories, files of text, images, a link.
const NODES: [&str; 10] = [
    ".",
    "volumes",
    "volumes/v",
    "volumes/v/snapshots",
    "store.json",
    "volumes/v/info.json",
    "volumes/v/map.json",
    "volumes/v/head.raw",
    "volumes/v/snapshots/s.raw",
    "volumes/v/latest",
];
const MODE: Mode = Mode::from_raw_mode(0o777);
const NOW: Timestamps = Timestamps {
    last_access: Timespec { tv_sec: 0, tv_nsec: 0 },
    last_modification: Timespec { tv_sec: 0, tv_nsec: 0 },
};

type Outcome = Result<(), Errno>;
type Call = (&'static str, fn(&Path, &Path) -> Outcome);

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    sys::open(path, flags | OFlags::NONBLOCK | OFlags::CLOEXEC, MODE)
}

/// Something done to a descriptor that may only read.
fn held(path: &Path, change: impl Fn(&OwnedFd) -> Outcome) -> Outcome {
    change(&open(path, OFlags::RDONLY)?)
}

/// Calls on a node and a name beside it that nothing has.
const CALLS: &[Call] = &[
    ("open to write", |node, _| open(node, OFlags::WRONLY).map(drop)),
    ("open to read and write", |node, _| open(node, OFlags::RDWR).map(drop)),
    ("open to append", |node, _| open(node, OFlags::WRONLY | OFlags::APPEND).map(drop)),
    ("open to empty it", |node, _| open(node, OFlags::RDONLY | OFlags::TRUNC).map(drop)),
    ("open to make it", |node, _| open(node, OFlags::RDWR | OFlags::CREATE).map(drop)),
    ("open to make it anew", |node, _| {
        open(node, OFlags::RDONLY | OFlags::CREATE | OFlags::EXCL).map(drop)
    }),
    ("open a new one", |_, other| open(other, OFlags::RDONLY | OFlags::CREATE).map(drop)),
    ("open one without a name", |node, _| open(node, OFlags::RDWR | OFlags::TMPFILE).map(drop)),
    ("access to write", |node, _| sys::access(node, Access::WRITE_OK)),
    ("truncate", |node, _| {
        nix::unistd::truncate(node, 0).map_err(|error| Errno::from_raw_os_error(error as i32))
    }),
    ("ftruncate", |node, _| held(node, |file| sys::ftruncate(file, 0))),
    ("write", |node, _| held(node, |file| rustix::io::write(file, b"x").map(drop))),
    ("pwrite", |node, _| held(node, |file| rustix::io::pwrite(file, b"x", 0).map(drop))),
    ("fallocate", |node, _| {
        held(node, |file| sys::fallocate(file, FallocateFlags::empty(), 0, 4096))
    }),
    ("punch a hole", |node, _| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        held(node, |file| sys::fallocate(file, flags, 0, 4096))
    }),
    ("clone into it", |node, _| {
        held(node, |file| sys::ioctl_ficlone(file, open(node, OFlags::RDONLY)?))
    }),
    ("copy into it", |node, _| {
        held(node, |file| sys::copy_file_range(file, None, file, Some(&mut 8192), 1).map(drop))
    }),
    ("chmod", |node, _| sys::chmod(node, MODE)),
    ("fchmod", |node, _| held(node, |file| sys::fchmod(file, MODE))),
    ("chown", |node, _| sys::chown(node, Some(sys::Uid::from_raw(1)), None)),
    ("fchown", |node, _| held(node, |file| sys::fchown(file, Some(sys::Uid::from_raw(1)), None))),
    ("lchown", |node, _| {
        let owner = Some(sys::Uid::from_raw(1));
        sys::chownat(CWD, node, owner, None, AtFlags::SYMLINK_NOFOLLOW)
    }),
    ("utimes", |node, _| sys::utimensat(CWD, node, &NOW, AtFlags::empty())),
    ("lutimes", |node, _| sys::utimensat(CWD, node, &NOW, AtFlags::SYMLINK_NOFOLLOW)),
    ("futimes", |node, _| held(node, |file| sys::futimens(file, &NOW))),
    ("set flags", |node, _| held(node, |file| sys::ioctl_setflags(file, IFlags::IMMUTABLE))),
    ("mkdir", |_, other| sys::mkdir(other, MODE)),
    ("mkdir what is there", |node, _| sys::mkdir(node, MODE)),
    ("mknod a file", |_, other| sys::mknodat(CWD, other, FileType::RegularFile, MODE, 0)),
    ("mknod what is there", |node, _| sys::mknodat(CWD, node, FileType::RegularFile, MODE, 0)),
    ("mknod a device", |_, other| {
        sys::mknodat(CWD, other, FileType::CharacterDevice, MODE, sys::makedev(1, 3))
    }),
    ("mkfifo", |_, other| sys::mknodat(CWD, other, FileType::Fifo, MODE, 0)),
    ("a socket", |_, other| sys::mknodat(CWD, other, FileType::Socket, MODE, 0)),
    ("symlink", |_, other| sys::symlink("target", other)),
    ("symlink what is there", |node, _| sys::symlink("target", node)),
    ("link", |node, other| sys::link(node, other)),
    ("rename", |node, other| sys::rename(node, other)),
    ("rename to itself", |node, _| sys::rename(node, node)),
    ("rename what is not there", |node, other| sys::rename(other, node)),
    ("rename unless there", |node, other| {
        sys::renameat_with(CWD, node, CWD, other, RenameFlags::NOREPLACE)
    }),
    ("exchange", |node, other| {
        let beside = other.with_file_name("volumes");
        sys::renameat_with(CWD, node, CWD, beside, RenameFlags::EXCHANGE)
    }),
    ("unlink", |node, _| sys::unlink(node)),
    ("unlink what is not there", |_, other| sys::unlink(other)),
    ("rmdir", |node, _| sys::rmdir(node)),
    ("set an attribute", |node, _| sys::setxattr(node, "user.other", b"x", XattrFlags::empty())),
    ("set an attribute of ours", |node, _| {
        sys::setxattr(node, "user.dbs.name", b"x", XattrFlags::empty())
    }),
    ("set a trusted attribute", |node, _| {
        sys::setxattr(node, "trusted.other", b"x", XattrFlags::CREATE)
    }),
    ("set a capability", |node, _| {
        sys::setxattr(node, "security.capability", b"x", XattrFlags::empty())
    }),
    ("set an attribute of a link", |node, _| {
        sys::lsetxattr(node, "user.other", b"x", XattrFlags::empty())
    }),
    ("remove an attribute", |node, _| sys::removexattr(node, "user.dbs.name")),
    ("remove an attribute of a link", |node, _| sys::lremovexattr(node, "trusted.other")),
    ("remove an attribute of an open one", |node, _| {
        held(node, |file| sys::fremovexattr(file, "user.other"))
    }),
];

/// What each call says to each node.
fn outcomes(root: &Path) -> Vec<(String, Outcome)> {
    let mut all = Vec::new();
    for node in NODES {
        let path = root.join(node);
        let other = path.parent().filter(|_| node != ".").unwrap_or(root).join("other");
        for (name, call) in CALLS {
            all.push((format!("{name}: {node}"), call(&path, &other)));
        }
    }
    all
}

/// Attributes of everything, which nothing may have changed.
fn look(root: &Path) -> Vec<String> {
    // The size of a map is known once it was read.
    fs::read(root.join("volumes/v/map.json")).unwrap();
    let listing = must("find", &[root.to_str().unwrap(), "-printf", "%P %m %U %s %l\n"]);
    let mut lines: Vec<_> = listing.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn sample() -> Server {
    let server = Server::new(64 << 20);
    server.ask(&json!(["create", "v", 64 << 10]));
    server.ask(&json!(["write", "v", 8192, 1, 8192]));
    server.ask(&json!(["snapshot", "v", "s"]));
    server
}

#[test]
fn changes_are_refused_as_by_a_read_only_ext4() {
    if !can_mount() || !has("mkfs.ext4") {
        return;
    }
    let server = sample();
    let root = server.path("");
    let image = server.dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    must("mkfs.ext4", &["-q", "-F", "-d", &path(&root), &path(&image)]);
    let ext4 = match Mounted::new(&image, server.dir.path().join("ext4"), "loop,ro") {
        Ok(mounted) => mounted,
        Err(error) => {
            println!("SKIPPED comparing with ext4: needs loop devices: {error}");
            return;
        }
    };
    let before = look(&root);
    let (ours, theirs) = (outcomes(&root), outcomes(&ext4.0));
    assert_eq!(look(&root), before);
    let mut differ = Vec::new();
    let mut refused = 0;
    for ((call, ours), (_, theirs)) in ours.iter().zip(&theirs) {
        if ours != theirs {
            differ.push(format!("{call}: {ours:?}, of ext4 {theirs:?}"));
        }
        refused += usize::from(*ours == Err(Errno::ROFS));
    }
    println!("{} calls, {refused} refused with EROFS", ours.len());
    assert!(differ.is_empty(), "{}", differ.join("\n"));
    assert!(refused > 300, "only {refused} of {} calls refused with EROFS", ours.len());
}

/// Root can tell the kernel that a mount may be written. The view refuses then by itself.
#[test]
fn mounted_anew_for_writing_it_refuses_all_the_same() {
    let true = can_mount() else { return };
    let server = sample();
    let root = server.path("");
    let before = (look(&root), fs::read(server.path("volumes/v/head.raw")).unwrap());
    let nothing = None::<&str>;
    nix::mount::mount(nothing, &root, nothing, MsFlags::MS_REMOUNT, nothing).unwrap();
    for (call, outcome) in outcomes(&root) {
        // What has two names that are the same one stays as it is.
        let same = ["rename to itself", "exchange: volumes"].iter().any(|c| call.starts_with(c));
        let harmless = same || call.starts_with("access");
        assert!(harmless || outcome.is_err(), "{call}");
        if call.starts_with("open to write") && call.ends_with("raw") {
            assert_eq!(outcome, Err(Errno::ROFS), "{call}");
        }
    }
    let after = (look(&root), fs::read(server.path("volumes/v/head.raw")).unwrap());
    assert!(before == after);
}
