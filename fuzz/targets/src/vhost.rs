//! vhost-user-blk: what the process of a virtual machine says, with its files, and what a guest has in its memory.
//!
//! Here the server has threads: its queues are served by a reactor. What is available when a queue is started is taken
//! before anything else is heard, so an input does the same each time.

use crate::input::Input;
use crate::sample::{empty, pattern};
use dbs_core::Store;
use dbs_frontend::DiskOptions;
use dbs_reactor::Driver;
use dbs_vhost::VhostUser;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Messages of one input.
const MESSAGES_MAX: usize = 64;
/// Memory of the guest.
const MEMORY_BYTES: u64 = 64 << 10;
const HEADER_BYTES: usize = 12;
/// Payload of a reply at most.
const REPLY_MAX_BYTES: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(10);
/// Steps that are no messages: a kick, and bytes as they are.
pub(crate) const KICK: u8 = 0xff;
pub(crate) const RAW: u8 = 0xfe;

/// A connection, and then its end.
///
/// The input: flags (bit 0: to a snapshot), what the guest's memory begins with (16 bits of length before it), and steps:
/// a request's number, which files come with it (a byte: how many in the upper half, the first of them in the lower), and its
/// payload (a byte of length before it); or 255, a kick; or 254 and bytes as they are (a byte of length before them).
pub fn vhost(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let (_disk, store) = empty();
    store.create_volume("v", 1 << 20).unwrap();
    let content = pattern(5, 256 << 10);
    store.volume("v").unwrap().write_at(0, &content, false).unwrap();
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    let place = Place::new();
    let server = VhostUser::start(store.clone(), place.0.clone(), options()).unwrap();
    let socket = place.0.join(if flags & 1 != 0 { "v@s.sock" } else { "v.sock" });
    talk(&UnixStream::connect(socket).unwrap(), &mut input);
    let begin = Instant::now();
    while !server.clients().is_empty() {
        if begin.elapsed() > PATIENCE {
            // Stopping it would wait for ever.
            std::mem::forget(server);
            panic!("the connection has not ended");
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    drop(server);
    check(&store, flags, &content);
}

fn check(store: &Store, flags: u8, content: &[u8]) {
    assert!(store.holders().is_empty(), "a volume stays open");
    for (spec, immutable) in [("v@s", true), ("v", flags & 1 != 0)] {
        let mut now = vec![0; content.len()];
        store.volume(spec).unwrap().read_at(0, &mut now).unwrap();
        assert!(!immutable || now == content, "{spec} was written");
    }
}

/// Says what the input has, and reads all replies.
fn talk(mut socket: &UnixStream, input: &mut Input<'_>) {
    let files = Files::new(input.run());
    for _ in 0..MESSAGES_MAX {
        if input.is_empty() {
            break;
        }
        // The server may have ended it.
        match input.u8() {
            KICK => {
                let _ = files.kick.write(1);
            }
            RAW => {
                let length = input.u8().into();
                let _ = send(socket, input.bytes(length), &[]);
            }
            request => {
                let with = files.some(input.u8());
                let length = input.u8().into();
                let payload = input.bytes(length);
                let mut message = u32::from(request).to_le_bytes().to_vec();
                // Version 1; each is to be answered.
                message.extend(9u32.to_le_bytes());
                message.extend((payload.len() as u32).to_le_bytes());
                message.extend(payload);
                let _ = send(socket, &message, &with);
            }
        }
    }
    let _ = socket.shutdown(Shutdown::Write);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut replies = Vec::new();
    // It is reset if the server has not read all.
    if let Err(error) = socket.read_to_end(&mut replies) {
        assert_ne!(
            error.kind(),
            std::io::ErrorKind::WouldBlock,
            "the server neither answers nor ends"
        );
    }
    let mut rest = &replies[..];
    while let Some((header, behind)) = rest.split_at_checked(HEADER_BYTES) {
        let field = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let length = field(8) as usize;
        assert_eq!(field(4), 5, "the flags of a reply");
        assert!(length <= REPLY_MAX_BYTES && length <= behind.len(), "the length of a reply");
        rest = &behind[length..];
    }
    assert!(rest.is_empty(), "a part of a reply");
}

fn send(socket: &UnixStream, bytes: &[u8], files: &[RawFd]) -> nix::Result<usize> {
    let with = [ControlMessage::ScmRights(files)];
    let with = &with[..usize::from(!files.is_empty())];
    let bytes = [IoSlice::new(bytes)];
    sendmsg::<()>(socket.as_raw_fd(), &bytes, with, MsgFlags::MSG_NOSIGNAL, None)
}

/// What a client has to share.
struct Files {
    memory: File,
    kick: EventFd,
    others: [OwnedFd; 3],
}

impl Files {
    fn new(image: &[u8]) -> Self {
        let mut memory = File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap());
        memory.write_all(image).unwrap();
        memory.set_len(MEMORY_BYTES).unwrap();
        let event = || EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap();
        let null = File::open("/dev/null").unwrap();
        let channel = UnixStream::pair().unwrap().0;
        Self { memory, kick: event(), others: [event().into(), channel.into(), null.into()] }
    }

    fn some(&self, choice: u8) -> Vec<RawFd> {
        let mut all = vec![self.memory.as_raw_fd(), self.kick.as_fd().as_raw_fd()];
        all.extend(self.others.iter().map(AsRawFd::as_raw_fd));
        let first = usize::from(choice & 0xf);
        (0..usize::from(choice >> 4)).map(|index| all[(first + index) % all.len()]).collect()
    }
}

/// A directory of this input's own.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dbs-fuzz-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn options() -> DiskOptions {
    let reactor = dbs_reactor::Options {
        driver: Driver::Epoll,
        buffer_bytes: 1 << 20,
        file_threads: 1,
        ..Default::default()
    };
    DiskOptions {
        reactors: 1,
        reactor,
        workers: 1,
        access: Box::new(|_, _| Some(false)),
        number: Box::new(|| 1),
        read_only: false,
    }
}
