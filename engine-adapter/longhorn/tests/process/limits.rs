//! What a replica's process does when something runs out: space, descriptors, time.

use crate::controller::{command_of, modes, replica, run};
use crate::support::*;
use dbs_nbd::{Client, ClientOptions};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A small file system of its own.
pub struct Disk(PathBuf);

impl Disk {
    pub fn mount(path: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(path).unwrap();
        let options = format!("size={size}");
        let mounted =
            mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()));
        mounted.ok().map(|()| Self(path.to_owned()))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The kernel keeps files that were registered with io_uring for a moment longer than their
        // process: it goes with the last of them.
        let gone = umount2(&self.0, MntFlags::MNT_DETACH);
        assert!(gone.is_ok() || std::thread::panicking(), "{} stays: {gone:?}", self.0.display());
    }
}

#[test]
fn a_full_disk_is_an_error_to_writers_until_there_is_room_again() {
    let place = Place::new();
    let Some(_disk) = Disk::mount(&place.replica(""), "48m") else {
        eprintln!("SKIPPED a_full_disk_is_an_error...: a tmpfs cannot be mounted (not root)");
        return;
    };
    let filler = place.replica("filler");
    fs::write(&filler, vec![1; 24 << 20]).unwrap();
    let mut replica = place.start("r", &["--size", "1gb", "--metrics", "127.0.0.1:0"]);
    let data = replica.open();
    let chunk = |number: u64| block(number, 1).repeat(256);
    let mut written = 0;
    let full = loop {
        match data.write(written << 20, &chunk(written)) {
            Ok(()) => written += 1,
            Err(e) => break e,
        }
        assert!(written < 48, "more than there is room for");
    };
    assert!(full.to_string().contains("no space left on device"), "{full}");
    assert!(written > 4, "{written} MiB fit");
    // It stays, and says what it has.
    for number in 0..written {
        assert_eq!(data.read(number << 20, 1 << 20).unwrap(), chunk(number));
    }
    data.ping().unwrap();
    assert_eq!(replica.rpc().state(), "dirty");
    assert!(data.write(900 << 20, &chunk(0)).is_err());
    // Rewriting takes no space.
    data.write(0, &chunk(0)).unwrap();
    // Nor do closing and opening; snapshots can be deleted, which makes room.
    drop(data);
    replica.rpc().close().unwrap();
    assert_eq!(replica.rpc().state(), "closed");
    let data = replica.open();
    for number in 0..written {
        assert_eq!(data.read(number << 20, 1 << 20).unwrap(), chunk(number));
    }

    fs::remove_file(&filler).unwrap();
    eventually("writes go on", || data.write(written << 20, &chunk(written)).is_ok());
    assert!(
        replica.metric("dbs_data_errors_total{replica=\"r\",volume=\"vol\",type=\"write\"}") >= 2.0
    );
    drop(data);
    replica.stop();
    let mut replica = place.start("r", &[]);
    let data = replica.open();
    for number in 0..=written {
        assert_eq!(data.read(number << 20, 1 << 20).unwrap(), chunk(number));
    }
    replica.kill();
}

/// Found by review: NBD clients took all descriptors, and the controller answered no call any more.
#[test]
fn clients_leave_descriptors_for_calls() {
    let place = Place::new();
    let replicas = ["a", "b"].map(|name| replica(&place, name));
    let addresses = replicas.each_ref().map(|(_, address)| address.as_str());
    let controller = command_of(&place, "nbd", &addresses, &["--reactors", "1"]);
    let mut command = place.command("sh");
    command.args(["-c", "ulimit -n 256; exec \"$0\" \"$@\""]);
    command.arg(controller.get_program()).args(controller.get_args());
    let mut engine = Process::spawn(command).ready();
    let socket = place.path().join("longhorn/nbd-vol.sock");
    let connect = || {
        let stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Client::over(stream, "vol", &ClientOptions::default())
    };
    // Others are refused.
    let clients: Vec<_> = (0..300).map_while(|_| connect().ok()).collect();
    assert_eq!(clients.len(), 128);
    assert_eq!(run(&engine, &["snapshots", "create", "one"]).trim(), "one");
    assert_eq!(modes(&engine), ["RW", "RW"]);
    drop(clients);
    engine.stop();
}

#[test]
fn ten_thousand_connections_and_none_left_behind() {
    const CONNECTIONS: u64 = 10_000;
    let place = Place::new();
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if most < CONNECTIONS + 500 {
        eprintln!("SKIPPED ten_thousand_connections: at most {most} open files are allowed");
        return;
    }
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    let mut replica = place.start("r", &["--size", "64mb", "--metrics", "127.0.0.1:0"]);
    let data = replica.open();
    data.write(0, &block(0, 1)).unwrap();
    let before = replica.descriptors();
    let address = replica.field("data");
    let mut connections = Vec::new();
    for number in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(&address).unwrap();
        match number % 3 {
            // Half a header, after which nothing comes.
            0 => stream.write_all(&[1, 0x1b, 7, 0, 0]).unwrap(),
            1 => stream.write_all(&ping(9)).unwrap(),
            _ => {}
        }
        connections.push(stream);
    }
    eventually("all are there", || {
        let now = replica.metric("dbs_data_connections{");
        now == (CONNECTIONS + 2) as f64
    });
    for stream in connections.iter_mut().skip(1).step_by(3 * 97) {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut reply = [0; 26];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!((reply[2], reply[6]), (9, 2), "a response to our ping");
    }
    let content = data.read(0, BLOCK as u32).unwrap();
    assert_eq!(version_of(&content, 0), Some(1), "the others are served meanwhile");
    drop(connections);
    eventually("all are gone", || replica.metric("dbs_data_connections{") == 2.0);
    drop(data);
    eventually("no descriptor is left", || replica.descriptors() <= before + 4);
    replica.stop();
}

/// A ping's bytes.
fn ping(sequence: u8) -> [u8; 26] {
    let mut header = [0; 26];
    header[..3].copy_from_slice(&[0x01, 0x1b, sequence]);
    header[6] = 6;
    header
}

#[test]
fn clients_that_vanish_or_never_finish_hold_nobody_up() {
    let place = Place::new();
    let mut replica = place.start("r", &["--size", "64mb"]);
    let data = replica.open();
    let address = replica.field("data");
    // A write of 1 MiB that stops in the middle, and stays.
    let mut half = TcpStream::connect(&address).unwrap();
    let mut header = ping(1);
    header[6] = 1;
    header[18..22].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    header[22..26].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    half.write_all(&header).unwrap();
    half.write_all(&[1; 1000]).unwrap();
    // One that asks and does not read, one that asks and is gone.
    let mut deaf = TcpStream::connect(&address).unwrap();
    let mut gone = TcpStream::connect(&address).unwrap();
    let mut read = ping(2);
    read[6] = 0;
    read[18..22].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    for _ in 0..64 {
        deaf.write_all(&read).unwrap();
        gone.write_all(&read).unwrap();
    }
    drop(gone);
    for number in 0..64 {
        data.write(number * BLOCK as u64, &block(number, 1)).unwrap();
    }
    let zeros = data.read(1 << 20, 4096).unwrap();
    assert!(zeros.iter().all(|byte| *byte == 0), "half a write is none");
    // They do not hold up its end either.
    let begun = std::time::Instant::now();
    replica.stop();
    assert!(begun.elapsed() < Duration::from_secs(120), "took {:?}", begun.elapsed());
    drop((half, deaf));
    let data_again = place.start("r", &[]);
    let data = data_again.open();
    for number in 0..64 {
        let content = data.read(number * BLOCK as u64, BLOCK as u32).unwrap();
        assert_eq!(version_of(&content, number), Some(1));
    }
}

#[test]
fn metrics_are_served_to_whoever_asks_properly() {
    let place = Place::new();
    let replica = place.start("r", &["--size", "64mb", "--metrics", "127.0.0.1:0"]);
    let data = replica.open();
    for number in 0..10 {
        data.write(number * BLOCK as u64, &block(number, 1)).unwrap();
    }
    data.read(0, 8192).unwrap();
    assert!(data.read(SIZE, 4096).is_err());
    let labels = "{replica=\"r\",volume=\"vol\",type=";
    assert_eq!(replica.metric(&format!("dbs_data_requests_total{labels}\"write\"}}")), 10.0);
    assert_eq!(replica.metric(&format!("dbs_data_bytes_total{labels}\"write\"}}")), 40960.0);
    assert_eq!(replica.metric(&format!("dbs_data_bytes_total{labels}\"read\"}}")), 8192.0);
    assert_eq!(replica.metric(&format!("dbs_data_errors_total{labels}\"read\"}}")), 1.0);
    assert_eq!(
        replica.metric("dbs_replica_state{replica=\"r\",volume=\"vol\",state=\"dirty\"}"),
        1.0
    );
    assert_eq!(replica.metric("dbs_data_request_seconds_count"), 12.0);
    assert_eq!(replica.metric("dbs_store_volumes"), 1.0);
    let address = replica.field("metrics");
    assert!(http_get(&address, "/other").0.contains("404"));
    // Junk and silence do no harm.
    let mut junk = TcpStream::connect(&address).unwrap();
    junk.write_all(b"\x16\x03\x01 nonsense\r\n\r\n").unwrap();
    let _silent = TcpStream::connect(&address).unwrap();
    let (status, text) = http_get(&address, "/metrics");
    assert!(status.contains("200"));
    // Each series has a type before it, and each line is a name and a number.
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        let family = name.trim_end_matches("_bucket").trim_end_matches("_sum");
        let family = family.trim_end_matches("_count");
        assert!(text.contains(&format!("# TYPE {family} ")), "{line}");
        value.parse::<f64>().unwrap();
    }
}
