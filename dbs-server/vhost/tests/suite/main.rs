//! Volumes as a guest sees them, over sockets, with queues in shared memory.
#![allow(clippy::unwrap_used)]

mod hostile;
mod requests;
mod sockets;
mod under_way;

use dbs_core::{InitOptions, OpenOptions, Store};
use dbs_frontend::DiskOptions;
use dbs_guest::{Guest, Options};
use dbs_vhost::VhostUser;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the volume `v`.
const SIZE: u64 = 16 << 20;

/// A store with a volume `v`, served.
struct Place {
    dir: tempfile::TempDir,
    store: Store,
    vhost: VhostUser,
}

fn options(driver: dbs_reactor::Driver) -> DiskOptions {
    let next = AtomicU64::new(1);
    let hidden = |volume: &str, socket: &str| {
        assert!(socket.starts_with("unix:/"), "{socket}");
        volume.starts_with("hidden") || socket.contains("@hidden")
    };
    DiskOptions {
        reactors: 2,
        reactor: dbs_reactor::Options { driver, ..Default::default() },
        workers: 4,
        access: Box::new(move |volume, socket| (!hidden(volume, socket)).then(|| volume == "read")),
        number: Box::new(move || next.fetch_add(1, Ordering::Relaxed)),
        read_only: false,
    }
}

impl Place {
    fn new() -> Self {
        Self::with(dbs_reactor::Driver::Auto)
    }

    fn with(driver: dbs_reactor::Driver) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let init = InitOptions { size: Some(256 << 20), ..InitOptions::default() };
        Store::init(&path, &init).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", SIZE).unwrap();
        let vhost = VhostUser::start(store.clone(), dir.path().join("vm"), options(driver));
        let vhost = vhost.unwrap();
        Self { dir, store, vhost }
    }

    fn socket(&self, spec: &str) -> PathBuf {
        self.dir.path().join("vm").join(format!("{spec}.sock"))
    }

    fn guest(&self, options: &Options) -> Guest {
        Guest::connect(&self.socket("v"), options).unwrap()
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
