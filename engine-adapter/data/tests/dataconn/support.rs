//! What the tests of data connections share: a replica of nothing but a volume, its server, and
//! connections to it.

#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use dbs_core::volume::{Request, Start};
use dbs_core::{Error, InitOptions, OpenOptions, Store, Volume};
use dbs_frontend::{Listen, Listener};
use dbs_reactor::Driver;
use longhorn_data::{
    Access, Active, ActiveEvents, DataOptions, DataServer, DataService, Durability, Gate, Revision,
    Target,
};
use longhorn_testing::DataClient;
use longhorn_wire::frame::{HEADER_BYTES, Header, Type};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
pub const BLOCK: u64 = 4096;
pub const DRIVERS: [Driver; 2] = [Driver::Uring, Driver::Epoll];

/// What the replica is told, and how it answers.
pub struct Events {
    pub store: Store,
    pub volume: Volume,
    pub first_changes: AtomicU64,
    pub commits: AtomicU64,
    pub revision: AtomicU64,
    /// How long each of these takes.
    pub delay: Mutex<Duration>,
    pub unmapping: AtomicU64,
    pub trouble: Mutex<Option<String>>,
    pub panics: AtomicBool,
}

impl ActiveEvents for Events {
    fn first_change(&self) {
        thread::sleep(*self.delay.lock().unwrap());
        self.first_changes.fetch_add(1, Ordering::SeqCst);
    }

    fn unmap(&self, offset: u64, length: u64) -> Result<u64, Error> {
        assert!(!self.panics.load(Ordering::SeqCst), "a bug in the replica, on purpose");
        self.unmapping.fetch_add(1, Ordering::SeqCst);
        thread::sleep(*self.delay.lock().unwrap());
        self.volume.discard(offset, length).map(|()| length)
    }

    fn commit(&self) -> Result<(), Error> {
        self.commits.fetch_add(1, Ordering::SeqCst);
        thread::sleep(*self.delay.lock().unwrap());
        self.store.flush()
    }

    fn healthy(&self) -> Result<(), String> {
        self.trouble.lock().unwrap().clone().map_or(Ok(()), Err)
    }
}

impl Revision for Events {
    fn note_written(&self) {}

    fn count(&self) {
        self.revision.fetch_add(1, Ordering::SeqCst);
    }
}

#[derive(Clone)]
pub struct Setup {
    pub driver: Driver,
    pub store_size: u64,
    pub volume_size: u64,
    pub durability: Durability,
    pub commit_bytes: u64,
    pub open: OpenOptions,
    pub options: DataOptions,
    pub null: bool,
    pub checksums: bool,
    pub extent_size: u64,
    /// The file of the store, if it is to be in no file of its own.
    pub file: Option<PathBuf>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            driver: Driver::Auto,
            store_size: 128 * MIB,
            volume_size: 16 * MIB,
            durability: Durability::Interval,
            commit_bytes: 64 * MIB,
            open: OpenOptions::default(),
            options: DataOptions { reactors: 2, workers: 4, ..DataOptions::default() },
            null: false,
            checksums: false,
            extent_size: MIB,
            file: None,
        }
    }
}

/// A replica being served.
pub struct Replica {
    pub dir: TempDir,
    pub path: PathBuf,
    pub store: Store,
    pub events: Arc<Events>,
    pub active: Arc<Active>,
    pub gate: Arc<Gate>,
    pub service: Option<DataService>,
    pub server: DataServer,
}

impl Setup {
    pub fn with_driver(driver: Driver) -> Self {
        Self { driver, ..Self::default() }
    }

    /// `None`, said so, where the driver cannot be had.
    pub fn start(self) -> Option<Replica> {
        let dir = tempfile::tempdir().unwrap();
        let path = self.file.unwrap_or_else(|| dir.path().join("store.dbs"));
        let options = InitOptions {
            size: Some(self.store_size),
            checksums: self.checksums,
            extent_size: self.extent_size,
            ..InitOptions::default()
        };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &self.open).unwrap();
        store.create_volume("v", self.volume_size).unwrap();
        let volume = store.volume("v").unwrap();
        let events = Arc::new(Events {
            store: store.clone(),
            volume: volume.clone(),
            first_changes: AtomicU64::new(0),
            commits: AtomicU64::new(0),
            revision: AtomicU64::new(0),
            delay: Mutex::default(),
            unmapping: AtomicU64::new(0),
            trouble: Mutex::default(),
            panics: AtomicBool::new(false),
        });
        let target = match self.null {
            false => Target::Volume { store: store.clone(), volume },
            true => Target::Null { size: self.volume_size },
        };
        let active = Active::new(target, events.clone())
            .with_revision(events.clone())
            .with_durability(self.durability)
            .with_commit_bytes(self.commit_bytes);
        let active = Arc::new(active);
        let gate = Gate::new(Access::Open(active.clone()));
        let mut reactor = self.options.reactor.clone();
        reactor.driver = self.driver;
        let server = match DataServer::start(DataOptions { reactor, ..self.options }) {
            Ok(server) => server,
            Err(error) => {
                println!("SKIPPED with {:?}: {error}", self.driver);
                return None;
            }
        };
        let tcp = Listener::from_tcp(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        let unix = Listener::bind(&Listen::Unix(dir.path().join("data.sock"))).unwrap();
        let service = Some(server.serve(gate.clone(), vec![tcp, unix]).unwrap());
        Some(Replica { dir, path, store, events, active, gate, service, server })
    }
}

impl Replica {
    pub fn tcp(&self) -> &Listen {
        &self.service.as_ref().unwrap().addresses()[0]
    }

    pub fn unix(&self) -> &Listen {
        &self.service.as_ref().unwrap().addresses()[1]
    }

    pub fn client(&self, connections: usize) -> DataClient {
        DataClient::connect(self.tcp(), connections).unwrap()
    }

    pub fn raw(&self) -> Raw {
        let Listen::Tcp(host, port) = self.tcp() else { panic!("no port") };
        let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.set_nodelay(true).unwrap();
        Raw { stream }
    }

    /// Where a byte of the volume is on the device.
    pub fn place(&self, offset: u64) -> u64 {
        let volume = self.active.volume().unwrap();
        let mut request = Request::new();
        let block = offset - offset % BLOCK;
        assert_eq!(volume.start_read(block, BLOCK, &mut request).unwrap(), Start::Io);
        let at = request.segments()[0].device + offset % BLOCK;
        request.cancel();
        at
    }

    /// Changes a bit of what the volume holds at this byte, behind the store's back.
    pub fn damage(&self, offset: u64) {
        let at = self.place(offset);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&self.path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        // It may be read around the page cache.
        file.sync_all().unwrap();
    }

    /// Ends the service and closes the store, which must not be in use then; looks it over.
    pub fn finish(mut self) {
        self.service = None;
        let Self { events, active, gate, store, server, path, .. } = self;
        drop(server);
        assert!(gate.set(Access::not_open("closed")));
        assert!(Arc::into_inner(active).is_some(), "nobody holds the volume any more");
        drop(events);
        store.close().unwrap();
        let report = Store::check_path(&path).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }
}

/// A connection on which any bytes can be sent.
pub struct Raw {
    pub stream: TcpStream,
}

impl Raw {
    pub fn send(&mut self, header: Header, payload: &[u8]) {
        let mut bytes = header.encode().to_vec();
        bytes.extend_from_slice(payload);
        self.stream.write_all(&bytes).unwrap();
    }

    pub fn receive(&mut self) -> (Header, Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).unwrap();
        let header = Header::decode(&header).unwrap();
        let mut payload = vec![0; header.length as usize];
        self.stream.read_exact(&mut payload).unwrap();
        (header, payload)
    }

    pub fn ask(&mut self, header: Header, payload: &[u8]) -> (Header, Vec<u8>) {
        self.send(header, payload);
        self.receive()
    }

    /// The text of the error that a request is answered with.
    pub fn error(&mut self, header: Header, payload: &[u8]) -> String {
        let (reply, text) = self.ask(header, payload);
        assert_eq!(reply.kind(), Some(Type::Error), "{reply:?}");
        assert_eq!((reply.sequence, reply.offset), (header.sequence, header.offset));
        assert_eq!((reply.size, reply.length), (text.len() as u32, text.len() as u32));
        String::from_utf8(text).unwrap()
    }

    /// Whether the server closes the connection, whatever it says before.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Waits until something holds, for minutes on a machine that is very busy.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(180);
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Resident memory of this process in bytes.
pub fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Sockets of this process; threads have further descriptors of their own.
pub fn sockets() -> usize {
    let all = std::fs::read_dir(Path::new("/proc/self/fd")).unwrap();
    let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}
