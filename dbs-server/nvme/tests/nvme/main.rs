//! Volumes as a host of NVMe over TCP sees them.
#![allow(clippy::unwrap_used)]

mod auth;
mod chap;
mod commands;
mod durable;
mod host;
mod hostile;
mod life;

use dbs_core::{InitOptions, OpenOptions, Store, TailPlace};
use dbs_frontend::DiskOptions;
use dbs_nvme::{NvmeOptions, NvmeTcp};
use dbs_reactor::Driver;
use host::{Host, Options};
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;

/// Bytes of the volume `v`.
const SIZE: u64 = 16 << 20;

/// A store with a volume `v`, served.
struct Place {
    dir: TempDir,
    store: Store,
    nvme: NvmeTcp,
}

fn loopback() -> NvmeOptions {
    NvmeOptions::at(&["tcp:0".parse().unwrap()])
}

fn options(driver: Driver) -> DiskOptions {
    let next = AtomicU64::new(1);
    DiskOptions {
        reactors: 2,
        reactor: dbs_reactor::Options { driver, ..Default::default() },
        workers: 4,
        access: Box::new(|volume, address| {
            assert!(address.starts_with("tcp:127.0.0.1:"), "{address}");
            (!volume.starts_with("hidden")).then(|| volume == "read")
        }),
        number: Box::new(move || next.fetch_add(1, Ordering::Relaxed)),
        read_only: false,
    }
}

impl Place {
    fn new() -> Self {
        Self::with(Driver::Auto)
    }

    fn with(driver: Driver) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let init = InitOptions { size: Some(256 << 20), ..InitOptions::default() };
        Store::init(&path, &init).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", SIZE).unwrap();
        Self::serving(dir, store, driver)
    }

    /// Only hosts with these keys are let in.
    fn keyed(lines: &str) -> Self {
        let mut place = Self::new();
        let file = place.dir.path().join("keys");
        std::fs::write(&file, lines).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let nvme = NvmeOptions::load(loopback().listen, Some(&file), false).unwrap();
        place.nvme = NvmeTcp::start(place.store.clone(), &nvme, options(Driver::Auto)).unwrap();
        place
    }

    fn serving(dir: TempDir, store: Store, driver: Driver) -> Self {
        let nvme = NvmeTcp::start(store.clone(), &loopback(), options(driver)).unwrap();
        Self { dir, store, nvme }
    }

    /// What a loss of power would leave of the store at this moment: its file, without its tail.
    fn after_power_loss(&self) -> Store {
        let path = self.dir.path().join("left");
        std::fs::copy(self.dir.path().join("store"), &path).unwrap();
        let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
        Store::open(&path, &options).unwrap()
    }

    fn address(&self) -> SocketAddr {
        let dbs_frontend::Listen::Tcp(host, port) = &self.nvme.addresses()[0] else {
            panic!("no TCP");
        };
        SocketAddr::new(host.parse().unwrap(), *port)
    }

    fn subsystem(&self, volume: &str) -> String {
        let uuid = match volume.split_once('@') {
            Some((name, snapshot)) => self.store.snapshot_info(name, snapshot).unwrap().uuid,
            None => self.store.volume_info(volume).unwrap().uuid,
        };
        format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")
    }

    fn host(&self, options: Options) -> Host {
        Host::with(self.address(), options, &self.subsystem("v"), 1)
    }

    fn content(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut content = vec![0; length];
        self.store.volume("v").unwrap().read_at(offset, &mut content).unwrap();
        content
    }
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut noise = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut noise);
    noise
}

/// Each agreement on PDUs that a host may want.
fn agreements() -> Vec<Options> {
    let all = |bits: u8| Options {
        header_digest: bits & 1 != 0,
        data_digest: bits & 2 != 0,
        flow_control: bits & 4 != 0,
        alignment: if bits & 1 != 0 { 31 } else { 0 },
        piece_bytes: if bits & 2 != 0 { 20480 } else { usize::MAX },
        capsule_bytes: if bits & 4 != 0 { 16384 } else { 0 },
        ..Options::default()
    };
    (0..8).map(all).collect()
}
