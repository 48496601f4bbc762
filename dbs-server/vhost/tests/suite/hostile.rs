//! Guests and processes that do what no driver does.

use super::{Place, noise};
use dbs_guest::{Guest, INDIRECT, MEMORY_START, Options, Request};
use nix::sys::memfd::{MFdFlags, memfd_create};
use proptest::prelude::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress};

/// A request whose descriptors are a test's.
fn refused(descriptors: &[(u64, u32, u16, u16)]) {
    let place = Place::new();
    let mut guest = place.guest(&Options { features: INDIRECT, ..Options::default() });
    let queue = &mut guest.queues[0];
    let (table, ..) = queue.places();
    for (index, (address, length, flags, next)) in (0..).zip(descriptors) {
        queue.descriptor(table + 16 * index, *address, *length, *flags, *next);
    }
    queue.offer(0);
    queue.kick();
    assert!(queue.wait(Duration::from_secs(60)), "no answer");
    // Nothing was written for it.
    assert_eq!(queue.take().unwrap(), (0, 0));
    // The queue goes on.
    assert_eq!(queue.run(&Request::read(0, 512)).unwrap().0, 0);
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TABLE: u16 = 4;

#[test]
fn descriptors_outside_of_the_memory_are_refused() {
    refused(&[(0, 16, NEXT, 1), (MEMORY_START, 1, WRITE, 0)]);
    refused(&[(u64::MAX - 4, 16, NEXT, 1), (MEMORY_START, 1, WRITE, 0)]);
    refused(&[(MEMORY_START, u32::MAX, NEXT, 1), (MEMORY_START, 1, WRITE, 0)]);
    refused(&[(0, 64, TABLE, 0)]);
}

#[test]
fn descriptors_that_lead_nowhere_are_refused() {
    refused(&[(MEMORY_START, 16, NEXT, 0)]);
    refused(&[(MEMORY_START, 16, NEXT, 1), (MEMORY_START, 16, NEXT, 0)]);
    refused(&[(MEMORY_START, 16, NEXT, 9999), (MEMORY_START, 1, WRITE, 0)]);
}

#[test]
fn pieces_in_the_wrong_places_are_refused() {
    // A header where the device writes; no place for the outcome; no header.
    refused(&[(MEMORY_START, 16, NEXT | WRITE, 1), (MEMORY_START, 16, 0, 0)]);
    refused(&[(MEMORY_START, 16, 0, 0)]);
    refused(&[(MEMORY_START, 17, WRITE, 0)]);
    refused(&[(MEMORY_START, 15, NEXT, 1), (MEMORY_START, 1, WRITE, 0)]);
    refused(&[(MEMORY_START, 16, NEXT, 1), (MEMORY_START, 0, WRITE, 0)]);
}

#[test]
fn tables_that_no_driver_makes_are_refused() {
    // One in another, at where the descriptors themselves are; of no length; of half a descriptor; one of several pieces.
    refused(&[(MEMORY_START, 32, TABLE, 0)]);
    refused(&[(MEMORY_START, 0, TABLE, 0)]);
    refused(&[(MEMORY_START, 24, TABLE, 0)]);
    refused(&[(MEMORY_START, 32, TABLE | NEXT, 1), (MEMORY_START, 1, WRITE, 0)]);
    refused(&[(MEMORY_START, 16, NEXT, 1), (MEMORY_START, 32, TABLE, 0)]);
}

#[test]
fn a_ring_that_means_nothing_is_not_served_and_others_are() {
    let broken: [fn(&mut dbs_guest::Queue); 3] = [
        // More than there are places, a descriptor that is not there, one twice.
        |queue| (0..2000).for_each(|_| queue.offer(0)),
        |queue| queue.offer(128),
        |queue| {
            // It takes its time: the second comes meanwhile, or both are answered.
            queue.add(&Request::write(0, noise(1, 128 << 10)));
            queue.offer(0);
            queue.offer(0);
        },
    ];
    for spoil in broken {
        let place = Place::new();
        let mut guest =
            place.guest(&Options { queues: 2, features: INDIRECT, ..Options::default() });
        spoil(&mut guest.queues[0]);
        guest.queues[0].kick();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(guest.queues[1].run(&Request::read(0, 4096)).unwrap().0, 0);
        // It rests when it is told to, all the same.
        guest.stop(0).unwrap();
        guest.stop(1).unwrap();
    }
}

/// A message, as a client sends it.
fn say(socket: &UnixStream, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
    let mut bytes = Vec::new();
    for field in [request, 1, payload.len() as u32] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    // It may have gone already.
    let _ = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
}

/// Whether the server answers on a connection, or has ended it.
fn answers(socket: &UnixStream) -> bool {
    say(socket, 1, &[], &[]);
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut answer = [0; 20];
    match (&*socket).read_exact(&mut answer) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("neither"),
        Err(_) => false,
    }
}

#[test]
fn a_message_with_too_many_files_ends_the_connection_and_no_file_stays_open() {
    let place = Place::new();
    for count in [8, 9, 16] {
        let socket = UnixStream::connect(place.socket("v")).unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        // It wants none. More than any message has end the connection.
        say(&socket, 3, &[], &vec![theirs.as_fd(); count]);
        drop(theirs);
        assert_eq!(answers(&socket), count <= 8, "{count} files");
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(ours.read(&mut [0]).unwrap(), 0, "all are closed");
    }
}

#[test]
fn files_that_do_not_fit_their_message_end_the_connection() {
    let place = Place::new();
    let file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(8192).unwrap();
    let null = File::open("/dev/null").unwrap();
    let fields = |fields: &[u64]| -> Vec<u8> {
        fields.iter().flat_map(|field| field.to_le_bytes()).collect()
    };
    let (file, null) = (file.as_fd(), null.as_fd());
    for (request, payload, files) in [
        // Memory: a file too many, one too few, one too short, one twice in a place, a length beyond all.
        (5, fields(&[1, 0, 4096, 0, 0]), vec![file, file]),
        (5, fields(&[1, 0, 4096, 0, 0]), vec![]),
        (5, fields(&[1, 0, 16384, 0, 0]), vec![file]),
        (5, fields(&[2, 0, 4096, 0, 0, 0, 4096, 0, 4096]), vec![file, file]),
        (5, fields(&[1, 0, u64::MAX, 0, 8192]), vec![file]),
        (5, fields(&[9]), vec![file; 8]),
        // A kick and a call that are none; a kick without one.
        (12, fields(&[0]), vec![null]),
        (13, fields(&[0]), vec![null]),
        (12, fields(&[0]), vec![]),
        // Notes: without a file, beyond it, and of more queues than are in it.
        (32, fields(&[4096, 0, 1 | 8 << 16]), vec![]),
        (32, fields(&[16384, 0, 1 | 8 << 16]), vec![file]),
        (32, fields(&[4096, 0, 60 | 8 << 16]), vec![file]),
    ] {
        let socket = UnixStream::connect(place.socket("v")).unwrap();
        say(&socket, request, &payload, &files);
        assert!(!answers(&socket), "{request} {payload:?}");
    }
    let mut guest = place.guest(&Options::default());
    assert_eq!(guest.queues[0].run(&Request::read(0, 512)).unwrap().0, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is in the descriptors and the rings, other queues are served, and this one rests when told to.
    #[test]
    fn any_bytes_as_a_queue_do_no_harm(
        seed in any::<u64>(),
        heads in proptest::collection::vec(0u16..140, 1..200),
        flags in 0u16..8,
    ) {
        let place = place(0);
        let mut guest = Guest::connect(
            &place.socket("v"),
            &Options { queues: 2, features: INDIRECT, data_bytes: 8192, ..Options::default() },
        ).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let (table, ..) = guest.queues[0].places();
        for index in 0..128 {
            let address = match random.u8(0..8) {
                0 => random.u64(..),
                1 => table + 16 * random.u64(0..128),
                _ => MEMORY_START + random.u64(0..1 << 20),
            };
            let length = match random.u8(0..4) {
                0 => random.u32(..),
                1 => 16 * random.u32(0..200),
                _ => random.u32(0..5000),
            };
            let flags = if random.bool() { random.u16(0..8) } else { flags };
            guest.queues[0].descriptor(table + 16 * index, address, length, flags, random.u16(0..130));
        }
        // Headers that say something, here and there.
        for at in (0..1u64 << 16).step_by(16) {
            let kind = [0u32, 1, 4, 8, 11, 13, 99][random.usize(0..7)];
            let mut header = kind.to_le_bytes().to_vec();
            header.extend([0; 4]);
            header.extend(random.u64(0..70000).to_le_bytes());
            let at = GuestAddress(MEMORY_START + (2 << 16) + at);
            guest.memory().write_slice(&header, at).unwrap();
        }
        for head in heads {
            guest.queues[0].offer(head);
            if random.u8(0..4) == 0 {
                guest.queues[0].kick();
            }
        }
        guest.queues[0].kick();
        // Random descriptors may write to the second queue: it is set up after that.
        guest.stop(0).unwrap();
        drop(guest);
        let mut other = Guest::connect(&place.socket("w"), &Options::default()).unwrap();
        prop_assert_eq!(other.queues[0].run(&Request::read(0, 4096)).unwrap().0, 0);
        drop(other);
        while let Some(client) = place.vhost.clients().first() {
            let _ = place.vhost.kick(client.id);
        }
    }

    /// Whatever comes on a socket, the next client is served.
    #[test]
    fn any_bytes_as_messages_do_no_harm(
        request in 0u32..45,
        size in 0u32..5000,
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let place = place(1);
        let mut socket = UnixStream::connect(place.socket("v")).unwrap();
        let mut message = request.to_le_bytes().to_vec();
        message.extend(1u32.to_le_bytes());
        message.extend(if size % 2 == 0 { bytes.len() as u32 } else { size }.to_le_bytes());
        message.extend(&bytes);
        // It may have gone already.
        let _ = socket.write_all(&message);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        drop(socket);
        let mut guest = place.guest(&Options::default());
        prop_assert_eq!(guest.queues[0].run(&Request::read(0, 512)).unwrap().0, 0);
    }
}

/// A place for all cases of a test: they leave nothing behind but what is in the volume.
fn place(number: usize) -> &'static Place {
    static PLACES: [std::sync::OnceLock<Place>; 2] = [const { std::sync::OnceLock::new() }; 2];
    PLACES[number].get_or_init(|| {
        let place = Place::new();
        place.store.create_volume("w", 1 << 20).unwrap();
        place.vhost.follow();
        place
    })
}
