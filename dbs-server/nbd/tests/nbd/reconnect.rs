//! Clients that lose their connection, and come back while what they had asked for is still under way.

use crate::support::{Disk, Server, disk, eventually};
use dbs_nbd::wire::option::encode_option;
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{cmd, opt};
use dbs_nbd::{Client, ClientOptions, ServerOptions};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// What the client writes anew.
const NEW: [u8; 4096] = [7; 4096];
/// More trims than there are workers; and more than the server reads, so that it does not hear their client leave.
const MANY: [u64; 2] = [40, 100];

/// A server with few workers, and its disk, whose trims wait.
fn gated() -> (Server, Arc<Disk>) {
    let disk = disk(8 * MIB);
    disk.gate_shut.store(true, Ordering::SeqCst);
    let options = ServerOptions { workers: 4, requests_max: 64, ..ServerOptions::default() };
    (Server::new([disk.clone()], options), disk)
}

fn connect(path: &Path) -> std::io::Result<Client<UnixStream>> {
    Client::connect_unix(path, "disk", &ClientOptions::default())
}

/// A client has so many trims of the first block under way, and is gone.
fn lose_one(server: &Server, disk: &Disk, count: u64) {
    let mut stream = UnixStream::connect(server.path()).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(encode_option(opt::EXPORT_NAME, b"disk"));
    for cookie in 0..count {
        let request = Request { flags: 0, command: cmd::TRIM, cookie, offset: 0, length: 4096 };
        bytes.extend(request.encode(Style::Simple));
    }
    stream.write_all(&bytes).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    eventually("trims are under way", || disk.trims.load(Ordering::SeqCst) > 0);
}

/// Found by review: requests of a lost connection were carried out after what its successor was told is done.
#[test]
fn an_old_request_does_not_undo_what_a_new_connection_wrote() {
    for trims in MANY {
        let (server, disk) = gated();
        lose_one(&server, &disk, trims);
        let path = server.path();
        let (tell, told) = mpsc::channel();
        let writer = thread::spawn(move || {
            let mut client = connect(&path).unwrap();
            client.write_at(0, &NEW, true).unwrap();
            tell.send(()).unwrap();
            client
        });
        // By then it is done, or waits.
        let _ = told.recv_timeout(Duration::from_secs(2));
        disk.gate_shut.store(false, Ordering::SeqCst);
        let mut client = writer.join().unwrap();
        eventually("the lost client is gone", || server.handle().clients().len() == 1);
        let mut found = [0; 4096];
        client.read_at(0, &mut found).unwrap();
        assert!(found == NEW, "an old trim has undone the write");
        client.disconnect().unwrap();
    }
}

/// The same with several connections, of which one is lost: what nobody has begun is not done any more.
#[test]
fn what_a_lost_connection_asked_for_is_not_begun_any_more() {
    for trims in MANY {
        let (server, disk) = gated();
        let mut other = connect(&server.path()).unwrap();
        lose_one(&server, &disk, trims);
        // Until the server has seen that.
        thread::sleep(Duration::from_millis(1500));
        other.write_at(4096, &NEW, true).unwrap();
        let begun = disk.trims.load(Ordering::SeqCst);
        disk.gate_shut.store(false, Ordering::SeqCst);
        eventually("the lost client is gone", || server.handle().clients().len() == 1);
        assert_eq!(disk.trims.load(Ordering::SeqCst), begun, "trims of who is gone were begun");
        other.disconnect().unwrap();
    }
}

/// Found by review: whoever waited for what a lost connection had asked for could not be disconnected.
#[test]
fn who_waits_for_a_lost_connection_can_be_kicked() {
    let (server, disk) = gated();
    lose_one(&server, &disk, MANY[0]);
    let path = server.path();
    let waiting = thread::spawn(move || connect(&path)?.write_at(0, &NEW, true));
    let newest = || server.handle().clients().into_iter().max_by_key(|client| client.id).unwrap();
    eventually("the next one waits", || newest().id == 1 && newest().export.is_some());
    let kicked = server.handle().kick(1);
    let left = server.handle().clients();
    disk.gate_shut.store(false, Ordering::SeqCst);
    assert!(kicked.is_some() && left.iter().all(|client| client.id != 1), "it is still there");
    assert!(waiting.join().unwrap().is_err());
}
