//! The frontend `nbd`: any client's requests over real replicas, and what becomes of failures.

use crate::data_support::{MIB, pattern};
use crate::fake::{Do, Fake};
use crate::support::{SIZE, Volume, address, content, options, replicas};
use dbs_frontend::Listen;
use dbs_nbd::wire::cmd_flag;
use dbs_nbd::{Client, ClientOptions};
use longhorn_controller::frontend::NbdFrontend;
use longhorn_controller::path::{BackendAddress, Mode};
use longhorn_wire::frame::Type;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

struct Served {
    // Before its path.
    frontend: NbdFrontend,
    volume: Volume,
    socket: PathBuf,
}

fn serve(reactors: usize) -> Served {
    let volume = Volume::new(options(reactors));
    let socket = volume.dir.path().join("nbd.sock");
    let addresses = [Listen::Unix(socket.clone())];
    let frontend = NbdFrontend::start(&volume.path, "vol", &addresses, None).unwrap();
    Served { frontend, volume, socket }
}

impl Served {
    fn connect(&self, name: &str) -> io::Result<Client<UnixStream>> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        Client::over(stream, name, &ClientOptions::default())
    }

    fn client(&self) -> Client<UnixStream> {
        self.connect("vol").unwrap()
    }
}

#[test]
fn what_clients_write_is_on_all_replicas() {
    let served = serve(2);
    let replicas = replicas(2);
    for (replica, id) in replicas.iter().zip(1..) {
        served.volume.add(id, &address(replica), Mode::Rw);
    }
    assert!(served.connect("other").is_err());
    let (mut one, mut two) = (served.connect("").unwrap(), served.client());
    assert_eq!((one.size(), one.read_only()), (SIZE, false));
    let mut image = pattern(1, SIZE as usize);
    one.write_at(0, &image, false).unwrap();
    for (seed, (at, length)) in [(512, 512), (4095 * 512, 1024), (0, 4096)].into_iter().enumerate()
    {
        let data = pattern(seed as u64 + 2, length);
        two.write_at(at as u64, &data, seed % 2 == 0).unwrap();
        image[at..at + length].copy_from_slice(&data);
    }
    // Zeros over several pieces, from the middle of a block to the middle of another; and a trim, after
    // which what was in whole blocks may be anything.
    two.write_zeroes(MIB - 512, 2 * MIB, cmd_flag::FUA | cmd_flag::NO_HOLE).unwrap();
    image[MIB as usize - 512..3 * MIB as usize - 512].fill(0);
    one.trim(3 * MIB, 8192, true).unwrap();
    one.write_zeroes(3 * MIB, 8192, 0).unwrap();
    image[3 * MIB as usize..][..8192].fill(0);
    let fast = one.write_zeroes(0, 4096, cmd_flag::FAST_ZERO).unwrap_err();
    assert_eq!(fast.kind(), io::ErrorKind::Unsupported, "{fast}");
    let mut read = vec![0; SIZE as usize];
    two.read_at(0, &mut read).unwrap();
    assert!(read == image);
    for replica in &replicas {
        assert!(content(replica) == image);
    }
    // Durable is what replicas have committed.
    let commits = |index: usize| replicas[index].events.commits.load(Ordering::SeqCst);
    for durable in [
        |client: &mut Client<UnixStream>| client.flush(),
        |client: &mut Client<UnixStream>| client.write_at(0, &[1; 4096], true),
        |client: &mut Client<UnixStream>| client.trim(0, 4096, true),
        |client: &mut Client<UnixStream>| client.write_zeroes(0, 4096, cmd_flag::FUA),
    ] {
        let before = [commits(0), commits(1)];
        durable(&mut one).unwrap();
        assert!(commits(0) > before[0] && commits(1) > before[1]);
    }
    let beyond = one.write_at(SIZE, &[0; 512], false).unwrap_err();
    assert_eq!(beyond.kind(), io::ErrorKind::StorageFull, "{beyond}");
    one.disconnect().unwrap();
    served.frontend.stop();
    two.flush().unwrap_err();
}

#[test]
fn an_export_grows_for_who_connects_later() {
    let served = serve(1);
    served.volume.add(1, &BackendAddress::Null, Mode::Rw);
    let mut before = served.client();
    served.volume.path.resize(2 * SIZE);
    assert_eq!(served.client().size(), 2 * SIZE);
    before.read_at(SIZE, &mut [0; 512]).unwrap_err();
    before.read_at(0, &mut [0; 512]).unwrap();
}

#[test]
fn failures_have_their_own_errors() {
    let served = serve(1);
    let mut client = served.client();
    let none = client.read_at(0, &mut [0; 4096]).unwrap_err();
    assert!(none.to_string().contains("no backend available"), "{none}");
    let full = Fake::with(SIZE as usize, |header| match header.kind() {
        Some(Type::Write) => Do::Fail("write volume-head-000.img: no space left on device"),
        _ => Do::Serve,
    });
    served.volume.add(1, &full.address(), Mode::Rw);
    let refused = client.write_at(0, &[1; 4096], false).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::StorageFull, "{refused}");
    // The second of several pieces fails: so does the request, and the client goes on.
    client.write_zeroes(0, 3 * MIB, 0).unwrap_err();
    client.read_at(0, &mut [0; 4096]).unwrap();
}
