//! Serves a volume over NBD on a unix socket, one client at a time: the smallest server that `nbdinfo`, `nbdcopy` and
//! `qemu-img` can use. `dbs serve` is the one for real use.
//!
//! `cargo run -p dbs-core --example block_server -- STORE VOLUME SOCKET`, then `nbdinfo nbd+unix:///?socket=SOCKET`
//!
//! Source of the protocol: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

use dbs_core::{Error, ErrorKind, OpenOptions, Result, Store, Volume};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const UNSUPPORTED: u32 = 0x8000_0001;
const EXPORT_NAME: u32 = 1;
/// Newstyle as it is today, and no zeros behind the answer to `EXPORT_NAME`.
const HANDSHAKE_FLAGS: u16 = 3;
/// Has flags, takes flushes, FUA, and discards.
const EXPORT_FLAGS: u16 = 1 | 4 | 8 | 32;
const FUA: u16 = 1;
const LARGEST: u32 = 32 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [store, volume, socket] = &arguments[..] else {
        return Err(Error::invalid("usage: block_server STORE VOLUME SOCKET"));
    };
    let store = Store::open(Path::new(store), &OpenOptions::default())?;
    let volume = store.volume(volume)?;
    let listener = UnixListener::bind(socket).map_err(|error| Error::io(error, "no socket"))?;
    // Ended by a signal: what was acknowledged is in the store, as after `kill -9`.
    std::thread::spawn(move || {
        while let Ok(more) = store.housekeep(Duration::from_millis(20)) {
            std::thread::sleep(Duration::from_millis(if more { 1 } else { 100 }));
        }
    });
    for client in listener.incoming().flatten() {
        if let Err(error) = serve(&volume, client) {
            eprintln!("a client left: {error}");
        }
    }
    Ok(())
}

/// Serves one client until it leaves.
///
/// # Errors
/// Those of the socket, and of a client that does not speak NBD. Errors of the store are answers.
pub fn serve(volume: &Volume, mut client: UnixStream) -> io::Result<()> {
    client.write_all(b"NBDMAGICIHAVEOPT")?;
    client.write_all(&HANDSHAKE_FLAGS.to_be_bytes())?;
    let _client_flags: [u8; 4] = take(&mut client)?;
    loop {
        let magic = u64::from_be_bytes(take(&mut client)?);
        let option = u32::from_be_bytes(take(&mut client)?);
        let length = u32::from_be_bytes(take(&mut client)?);
        if magic != OPTION || length > LARGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        io::copy(&mut (&mut client).take(length.into()), &mut io::sink())?;
        if option == EXPORT_NAME {
            break;
        }
        client.write_all(&OPTION_REPLY.to_be_bytes())?;
        client.write_all(&[option.to_be_bytes(), UNSUPPORTED.to_be_bytes(), [0; 4]].concat())?;
    }
    client.write_all(&volume.size().to_be_bytes())?;
    client.write_all(&EXPORT_FLAGS.to_be_bytes())?;
    while request(volume, &mut client)? {}
    Ok(())
}

/// Carries out one request; false if it was the last.
fn request(volume: &Volume, client: &mut UnixStream) -> io::Result<bool> {
    let magic: [u8; 4] = take(client)?;
    let flags = u16::from_be_bytes(take(client)?);
    let command = u16::from_be_bytes(take(client)?);
    let cookie: [u8; 8] = take(client)?;
    let offset = u64::from_be_bytes(take(client)?);
    let length = u32::from_be_bytes(take(client)?);
    if magic != [0x25, 0x60, 0x95, 0x13] || (command < 2 && length > LARGEST) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut data = vec![0; if command < 2 { length as usize } else { 0 }];
    if command == 1 {
        client.read_exact(&mut data)?;
    }
    let done = match command {
        0 => volume.read_at(offset, &mut data),
        1 => volume.write_at(offset, &data, flags & FUA != 0),
        2 => return Ok(false),
        3 => volume.flush(),
        4 => volume.discard(offset, length.into()),
        _ => Err(Error::new(ErrorKind::Unsupported, "no such command")),
    };
    let errno: u32 = match done.as_ref().map_err(Error::kind) {
        Ok(()) => 0,
        Err(ErrorKind::NoSpace) => 28,
        Err(ErrorKind::Invalid | ErrorKind::Unsupported) => 22,
        Err(_) => 5,
    };
    client.write_all(&[0x67, 0x44, 0x66, 0x98])?;
    client.write_all(&errno.to_be_bytes())?;
    client.write_all(&cookie)?;
    if command == 0 && errno == 0 {
        client.write_all(&data)?;
    }
    Ok(true)
}

fn take<const N: usize>(client: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    client.read_exact(&mut bytes)?;
    Ok(bytes)
}
