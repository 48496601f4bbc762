//! A small Longhorn cluster on one machine: replicas of both kinds, engines, clients.

pub mod engine;
pub mod image;
pub mod io;
pub mod process;
pub mod replica;
pub mod rpc;

pub use engine::{Engine, EngineOptions, Frontend};
pub use image::{Image, Load, Mix, exercise};
pub use io::Address;
pub use replica::{Kind, Replica, ReplicaOptions, ours};

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub const MIB: usize = 1 << 20;

/// One test's corner of the machine: directories, names and ports nobody else uses.
pub struct Lab {
    dir: tempfile::TempDir,
    /// Of the volumes, since an engine's socket has a place for the whole machine.
    prefix: String,
    stock: PathBuf,
}

impl Lab {
    /// Nothing, and a message, where something needed is missing.
    pub fn new(test: &str) -> Option<Self> {
        static LABS: AtomicU32 = AtomicU32::new(0);
        let Some(stock) = std::env::var_os("LONGHORN_BIN").map(PathBuf::from) else {
            return skip(test, "no LONGHORN_BIN, the `longhorn` of upstream's longhorn-engine");
        };
        assert!(stock.is_file(), "LONGHORN_BIN={}: no such file", stock.display());
        if !nix::unistd::geteuid().is_root() {
            return skip(test, "not root, and the engine's socket lies in /var/run");
        }
        let dir = tempfile::Builder::new().prefix("dbs-engine-").tempdir().unwrap();
        let lab = LABS.fetch_add(1, Ordering::Relaxed);
        Some(Self { dir, prefix: format!("et{}x{lab}", std::process::id()), stock })
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Upstream's binary.
    pub fn stock(&self) -> &Path {
        &self.stock
    }

    /// The name of this lab's volume `short`.
    pub fn volume(&self, short: &str) -> String {
        format!("{}{short}", self.prefix)
    }

    /// What Longhorn's programs call their control path. The stock ones look for it below `/host`.
    pub fn control_path(&self) -> PathBuf {
        self.path().join("control")
    }

    /// Where replicas put their sockets if told to, made if it can be.
    pub fn socket_dir(&self) -> Option<PathBuf> {
        let dir = self.host_path().join("unix-domain-socket");
        std::fs::create_dir_all(&dir).ok().map(|()| dir)
    }

    fn host_path(&self) -> PathBuf {
        Path::new("/host").join(self.control_path().strip_prefix("/").unwrap())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Locks of the hash jobs.
        let _ = std::fs::remove_dir_all(self.host_path());
        for dir in self.host_path().ancestors().skip(1).take_while(|dir| dir.starts_with("/host")) {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

/// Says that a test did not run. Not with `println!`, which is kept from sight for a test that passes.
pub fn skip<T>(test: &str, missing: &str) -> Option<T> {
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {test}: {missing}");
    None
}

/// The first of `count` ports in a row that nobody listens on.
pub fn free_ports(count: u16) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 400).unwrap() * 50;
    for _ in 0..1000 {
        let first = port(start, NEXT.fetch_add(count, Ordering::Relaxed));
        if (first..first + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}

/// Where the ports begin that are given out when so many have been. The range is the same whatever number is asked for:
/// otherwise those behind its end meet those before it.
fn port(start: u16, given: u16) -> u16 {
    const LOWEST: u16 = 12_000;
    // Below the ports the kernel gives out by itself, with room for those that are given out at once.
    const HIGHEST: u16 = 32_000 - 100;
    LOWEST + start.wrapping_add(given) % (HIGHEST - LOWEST)
}

#[test]
fn ports_are_given_out_once() {
    for start in (0..400).map(|process| process * 50) {
        let (mut given, mut taken) = (0, std::collections::BTreeSet::new());
        for count in [13, 1, 13, 13, 1].repeat(50) {
            let first = port(start, given);
            assert!((first..first + count).all(|port| taken.insert(port)), "{start}: {first}");
            given += count;
        }
    }
}

/// Waits until `condition` holds, for at most half a minute: the machine may be busy.
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    eventually_within(Duration::from_secs(30), what, condition);
}

pub fn eventually_within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Every replica must hold exactly this, asked one by one at its own data port.
pub fn check_each(what: &str, image: &mut Image, replicas: &[&Replica]) {
    for replica in replicas {
        let what = format!("{what}, replica {} ({:?})", replica.name(), replica.kind());
        image.check(&what, &replica.data());
    }
}
