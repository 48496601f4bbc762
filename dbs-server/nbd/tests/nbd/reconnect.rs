//! Clients that lose their connection, and come back while what they had asked for is still under way.

use crate::support::{Disk, disk, eventually};
use dbs_core::volume::Finish;
use dbs_nbd::export::Result;
use dbs_nbd::wire::option::encode_option;
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{cmd, opt};
use dbs_nbd::{
    Client, ClientOptions, Export, Exports, Extent, Listen, Peer, ServerOptions, ZeroOptions, start,
};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// What the client writes anew.
const NEW: [u8; 4096] = [7; 4096];

/// A disk whose trims wait at a gate.
struct Gated {
    disk: Arc<Disk>,
    waiting: AtomicU64,
    open: AtomicBool,
}

impl Export for Gated {
    fn name(&self) -> String {
        self.disk.name()
    }

    fn description(&self) -> String {
        self.disk.description()
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.disk.read(offset, buf)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> Result<Finish> {
        self.disk.write(offset, buf)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<Finish> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while !self.open.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        self.disk.trim(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<Finish> {
        self.disk.write_zeroes(offset, length, options)
    }

    fn flush(&self) -> Result<()> {
        self.disk.flush()
    }

    fn contexts(&self, prefix: &str) -> Vec<String> {
        self.disk.contexts(prefix)
    }

    fn block_status(
        &self,
        context: &str,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>> {
        self.disk.block_status(context, offset, length, limit)
    }
}

struct Only(Arc<Gated>);

impl Exports for Only {
    fn open(&self, _: &str, _: &Peer) -> Result<Arc<dyn Export>> {
        Ok(self.0.clone())
    }

    fn list(&self, _: &Peer) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A connection with `count` trims under way, all of the first block, whose replies nobody reads.
fn trimming(path: &Path, count: u64) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(encode_option(opt::EXPORT_NAME, b"disk"));
    for cookie in 0..count {
        let request = Request { flags: 0, command: cmd::TRIM, cookie, offset: 0, length: 4096 };
        bytes.extend(request.encode(Style::Simple));
    }
    stream.write_all(&bytes).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

/// A client with more trims under way than there are threads (and, the second time, than the server reads) is gone.
/// It writes one of the blocks on another connection, and is told that this is done.
fn writes_on_another(trims: u64, connected_before: bool) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd");
    let (waiting, open) = (AtomicU64::new(0), AtomicBool::new(false));
    let gated = Arc::new(Gated { disk: disk(8 * MIB), waiting, open });
    let options = ServerOptions { workers: 4, requests_max: 64, ..ServerOptions::default() };
    let exports = Arc::new(Only(gated.clone()));
    let server = start(&[Listen::Unix(path.clone())], exports, options).unwrap();
    let connect = {
        let path = path.clone();
        move || Client::connect_unix(&path, "disk", &ClientOptions::default()).unwrap()
    };
    let before = connected_before.then(&connect);
    let lost = trimming(&path, trims);
    eventually("trims are under way", || gated.waiting.load(Ordering::SeqCst) > 0);
    drop(lost);
    let (tell, told) = mpsc::channel();
    let writer = thread::spawn(move || {
        let mut client = before.unwrap_or_else(connect);
        if connected_before {
            // Until the server has seen the end of the other connection.
            thread::sleep(Duration::from_millis(1500));
            // The trims that run already are done before it: it waits for them in the store, not in a disk like this.
            client.write_at(4096, &NEW, true).unwrap();
        } else {
            client.write_at(0, &NEW, true).unwrap();
        }
        tell.send(()).unwrap();
        client
    });
    // The gate is opened by the time that the write is done, or waits.
    let _ = told.recv_timeout(Duration::from_secs(3));
    let began = gated.waiting.load(Ordering::SeqCst);
    gated.open.store(true, Ordering::SeqCst);
    let mut client = writer.join().unwrap();
    eventually("the lost client is gone", || server.clients().len() == 1);
    if connected_before {
        assert_eq!(gated.waiting.load(Ordering::SeqCst), began, "trims of who is gone were begun");
    } else {
        let mut found = [0; 4096];
        client.read_at(0, &mut found).unwrap();
        assert!(found == NEW, "an old trim has undone the write");
    }
    client.disconnect().unwrap();
    server.stop();
}

/// Found by review: requests of a lost connection were carried out after what its successor was told is done.
#[test]
fn an_old_request_does_not_undo_what_a_new_connection_wrote() {
    for trims in [40, 100] {
        writes_on_another(trims, false);
    }
}

/// The same with several connections, of which one is lost: what nobody has begun is not done any more.
#[test]
fn what_a_lost_connection_asked_for_is_not_begun_any_more() {
    for trims in [40, 100] {
        writes_on_another(trims, true);
    }
}
