//! What the NBD tests share: a disk in memory, a server of such disks, and running programs.

#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use dbs_core::volume::Finish;
use dbs_nbd::export::{BASE_ALLOCATION, Result, push_extent};
use dbs_nbd::wire::Errno;
use dbs_nbd::{
    Export, Exports, Extent, Failure, Listen, Peer, ServerHandle, ServerOptions, ZeroOptions, start,
};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

pub const BLOCK: u64 = 4096;
pub const DIFF: &str = "dbs:diff:before";

/// A disk in memory with a map of its blocks and a baseline to compare with.
#[derive(Default)]
pub struct Disk {
    pub name: String,
    pub read_only: bool,
    pub data: RwLock<Vec<u8>>,
    pub allocated: Mutex<Vec<bool>>,
    pub baseline: Vec<u8>,
    pub flushes: AtomicU64,
    pub delay_ms: AtomicU64,
    pub panics: AtomicBool,
    pub active: AtomicU64,
    pub closed: Closed,
    /// Trims that were begun, and whether they wait.
    pub trims: AtomicU64,
    pub gate_shut: AtomicBool,
}

/// Says, not at once, that what it is part of was closed.
#[derive(Default)]
pub struct Closed(pub Option<Arc<AtomicBool>>);

impl Drop for Closed {
    fn drop(&mut self) {
        if let Some(told) = &self.0 {
            thread::sleep(Duration::from_millis(200));
            told.store(true, Ordering::SeqCst);
        }
    }
}

impl Disk {
    pub fn new(name: &str, size: u64) -> Self {
        Self {
            name: name.to_owned(),
            data: RwLock::new(vec![0; size as usize]),
            allocated: Mutex::new(vec![false; size.div_ceil(BLOCK) as usize]),
            baseline: vec![0; size as usize],
            ..Self::default()
        }
    }

    pub fn content(&self) -> Vec<u8> {
        self.data.read().unwrap().clone()
    }

    fn work(&self) {
        let delay = self.delay_ms.load(Ordering::SeqCst);
        if delay > 0 {
            self.active.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(delay));
            self.active.fetch_sub(1, Ordering::SeqCst);
        }
        assert!(!self.panics.load(Ordering::SeqCst), "a bug in the export, on purpose");
    }

    fn mark(&self, offset: u64, length: u64, value: bool) {
        let mut map = self.allocated.lock().unwrap();
        let (first, last) = if value {
            (offset / BLOCK, (offset + length).div_ceil(BLOCK))
        } else {
            (offset.div_ceil(BLOCK), (offset + length) / BLOCK)
        };
        if first < last {
            map[first as usize..last as usize].fill(value);
        }
    }

    fn status(&self, context: &str, block: u64) -> u32 {
        let range = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        if context == BASE_ALLOCATION {
            return if self.allocated.lock().unwrap()[block as usize] { 0 } else { 3 };
        }
        let data = self.data.read().unwrap();
        let now = &data[range.start..range.end.min(data.len())];
        match &self.baseline[range.start..range.end.min(data.len())] {
            same if same == now => 0,
            _ if now.iter().all(|byte| *byte == 0) => 2,
            _ => 1,
        }
    }
}

impl Export for Disk {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn description(&self) -> String {
        format!("disk {} in memory", self.name)
    }

    fn size(&self) -> u64 {
        self.data.read().unwrap().len() as u64
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.work();
        let start = offset as usize;
        buf.copy_from_slice(&self.data.read().unwrap()[start..start + buf.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> Result<Finish> {
        self.work();
        let start = offset as usize;
        self.data.write().unwrap()[start..start + buf.len()].copy_from_slice(buf);
        self.mark(offset, buf.len() as u64, true);
        Ok(Finish::Done)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<Finish> {
        self.trims.fetch_add(1, Ordering::SeqCst);
        while self.gate_shut.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        self.write_zeroes(offset, length, ZeroOptions::default())
    }

    fn check_zeroes(&self, _: u64, _: u64, options: ZeroOptions) -> Result<()> {
        if options.fast && options.no_hole {
            return Err(Failure::new(Errno::NotSupported, "allocating is not fast"));
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<Finish> {
        self.work();
        let range = offset as usize..(offset + length) as usize;
        self.data.write().unwrap()[range].fill(0);
        self.mark(offset, length, options.no_hole);
        Ok(Finish::Done)
    }

    fn flush(&self) -> Result<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn contexts(&self, prefix: &str) -> Vec<String> {
        let all = [BASE_ALLOCATION, DIFF, "dbs:diff:other"];
        all.into_iter().filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
    }

    fn block_status(
        &self,
        context: &str,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>> {
        let (mut at, end) = (offset, offset + length);
        let mut extents = Vec::new();
        while at < end && extents.len() <= limit {
            let next = end.min((at / BLOCK + 1) * BLOCK);
            push_extent(&mut extents, next - at, self.status(context, at / BLOCK));
            at = next;
        }
        extents.truncate(limit);
        Ok(extents)
    }
}

#[derive(Clone, Default)]
pub struct Disks(pub Arc<Mutex<BTreeMap<String, Arc<Disk>>>>);

impl Exports for Disks {
    fn open(&self, name: &str, _: &Peer) -> Result<Arc<dyn Export>> {
        let disks = self.0.lock().unwrap();
        let disk = match name {
            "" if disks.len() == 1 => disks.values().next(),
            name => disks.get(name),
        };
        let disk = disk.ok_or_else(|| Failure::invalid(format!("no export `{name}`")))?;
        Ok(disk.clone())
    }

    fn list(&self, _: &Peer) -> Vec<(String, String)> {
        let disks = self.0.lock().unwrap();
        disks.values().map(|disk| (disk.name.clone(), disk.description())).collect()
    }
}

/// A server on a Unix socket and on loopback TCP, with the given disks.
pub struct Server {
    pub handle: Option<ServerHandle>,
    pub dir: tempfile::TempDir,
    pub log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub fn new(disks: impl IntoIterator<Item = Arc<Disk>>, mut options: ServerOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let sink = log.clone();
        options.log = Some(Arc::new(move |line| sink.lock().unwrap().push(line.to_owned())));
        let map = disks.into_iter().map(|disk| (disk.name.clone(), disk)).collect();
        let disks = Disks(Arc::new(Mutex::new(map)));
        let listen = [Listen::Unix(dir.path().join("nbd")), Listen::Tcp("127.0.0.1".into(), 0)];
        let handle = Some(start(&listen, Arc::new(disks), options).unwrap());
        Self { handle, dir, log }
    }

    pub fn handle(&self) -> &ServerHandle {
        self.handle.as_ref().unwrap()
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    pub fn port(&self) -> u16 {
        let found = self.handle().addresses().iter().find_map(|address| match address {
            Listen::Tcp(_, port) => Some(*port),
            Listen::Unix(_) => None,
        });
        found.unwrap()
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.path().display())
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn stop(&mut self) -> Duration {
        let begin = Instant::now();
        self.handle.take().unwrap().stop();
        begin.elapsed()
    }
}

pub fn disk(size: u64) -> Arc<Disk> {
    Arc::new(Disk::new("disk", size))
}

/// Bytes that look random and repeat for the same seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Whether a program is installed; says so on the test's output if it is not.
pub fn have(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if !found {
        println!("SKIPPED: {program} is not installed");
    }
    found
}

/// Runs a program for at most ten minutes; returns whether it succeeded, its stdout and its stderr.
pub fn try_run(command: &mut Command) -> (bool, String, String) {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read_out = thread::spawn(move || {
        let mut text = Vec::new();
        out.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    let read_err = thread::spawn(move || {
        let mut text = Vec::new();
        err.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    let deadline = Instant::now() + Duration::from_secs(600);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    let (out, err) = (read_out.join().unwrap(), read_err.join().unwrap());
    let status = status.unwrap_or_else(|| panic!("{command:?} took too long\n{out}\n{err}"));
    (status.success(), out, err)
}

/// Runs a program that must succeed; returns its stdout.
pub fn run(command: &mut Command) -> String {
    let (success, out, err) = try_run(command);
    assert!(success, "{command:?} failed\n{out}\n{err}");
    out
}

/// A Python that has libnbd's module, to run as nbdsh does; says so if there is none.
pub fn nbd_python() -> Option<&'static str> {
    let found = ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let import = Command::new(python).args(["-c", "import nbd"]).stderr(Stdio::null()).status();
        import.is_ok_and(|status| status.success())
    });
    if found.is_none() {
        println!("SKIPPED: no Python with libnbd's module `nbd` (python3-libnbd)");
    }
    found
}

/// Runs a script as nbdsh does, with a handle `h` at hand.
pub fn nbdsh(python: &str, script: &str) {
    run(Command::new(python).args(["-m", "nbd", "-c", script]));
}

/// Waits until `condition` holds, for at most two minutes.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn write_file(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

/// Writes an authority and certificates signed by it: the server's, and a client's in the layout
/// that libnbd looks for.
pub fn make_certificates(dir: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key).unwrap();
    write_file(&dir.join("ca-cert.pem"), authority.pem().as_bytes());
    let issuer = Issuer::new(params, key);
    for (role, usage) in [
        ("server", rcgen::ExtendedKeyUsagePurpose::ServerAuth),
        ("client", rcgen::ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let key = KeyPair::generate().unwrap();
        let mut params =
            CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        params.extended_key_usages = vec![usage];
        let certificate = params.signed_by(&key, &issuer).unwrap();
        write_file(&dir.join(format!("{role}-cert.pem")), certificate.pem().as_bytes());
        write_file(&dir.join(format!("{role}-key.pem")), key.serialize_pem().as_bytes());
    }
}
