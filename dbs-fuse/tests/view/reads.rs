//! Every way to read a file, at random places, against a plain file of the same bytes.

use crate::server::{Server, can_mount, noise};
use crate::tools::{has, run};
use dbs_core::io::buffer::AlignedBuf;
use rustix::fs::{self as sys, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use serde_json::json;
use std::fs::{self, File};
use std::io::{IoSliceMut, Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Not of whole blocks.
const SIZE: u64 = (3 << 20) + 512;
/// How much is read at once, at most.
const READ_MAX: usize = 300_000;
const ROUNDS: u64 = 1500;

/// Maps both files whole, and compares places of them, the border of the last block among them.
const MAPPED: &str = r"
import mmap, os, random, sys
a, b = (os.open(path, os.O_RDONLY) for path in sys.argv[1:3])
size = os.fstat(b).st_size
assert os.fstat(a).st_size == size
kind = getattr(mmap, sys.argv[3])
a, b = (mmap.mmap(file, size, kind, mmap.PROT_READ) for file in (a, b))
random.seed(7)
for _ in range(2000):
    at = random.randrange(size)
    length = random.choice([1, 100, 4096, 70000])
    assert a[at : at + length] == b[at : at + length], at
assert a[-600:] == b[-600:]
assert a[:] == b[:]
";

/// A volume of pieces, and the same as a file: written, discarded, never touched.
fn sample() -> (Server, std::path::PathBuf) {
    let server = Server::new(64 << 20);
    server.ask(&json!(["create", "v", SIZE]));
    let mut content = vec![0; SIZE as usize];
    let mut random = fastrand::Rng::with_seed(11);
    for seed in 0..40 {
        let (at, length) = (random.u64(..SIZE / 512) * 512, random.u64(1..200) * 512);
        let length = length.min(SIZE - at);
        server.ask(&json!(["write", "v", at, seed, length]));
        content[at as usize..][..length as usize].copy_from_slice(&noise(seed, length as usize));
        let (at, length) = (random.u64(..SIZE / 4096) * 4096, random.u64(1..10) * 4096);
        let length = length.min(SIZE / 4096 * 4096 - at);
        server.ask(&json!(["discard", "v", at, length]));
        content[at as usize..][..length as usize].fill(0);
    }
    server.ask(&json!(["write", "v", SIZE - 1024, 99, 1024]));
    content[SIZE as usize - 1024..].copy_from_slice(&noise(99, 1024));
    server.ask(&json!(["snapshot", "v", "s"]));
    let plain = server.dir.path().join("plain");
    fs::write(&plain, &content).unwrap();
    (server, plain)
}

/// Places that begin before the end, on it and behind it.
fn place(random: &mut fastrand::Rng) -> (u64, usize) {
    let most = [10, 5000, READ_MAX][random.usize(..3)];
    let length = random.usize(..most);
    let offset = match random.u8(..8) {
        0 => SIZE - random.u64(..10_000),
        1 => SIZE + random.u64(..3) * 4096,
        _ => random.u64(..SIZE),
    };
    (offset, length)
}

/// What one call reads with several buffers.
fn vectored(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let (first, rest) = bytes.split_at_mut(length / 3);
    let (second, third) = rest.split_at_mut(rest.len() / 2);
    let mut parts = [first, second, third].map(IoSliceMut::new);
    let count = rustix::io::preadv(file, &mut parts, offset).unwrap();
    bytes.truncate(count);
    bytes
}

/// What the kernel moves to another file by itself, in as many calls as it likes.
fn sent(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut out = tempfile::tempfile().unwrap();
    let (mut from, end) = (offset, offset + length as u64);
    while from < end {
        let left = (end - from) as usize;
        if sys::sendfile(&out, file, Some(&mut from), left).unwrap() == 0 {
            break;
        }
    }
    out.rewind().unwrap();
    let mut bytes = Vec::new();
    out.read_to_end(&mut bytes).unwrap();
    bytes
}

fn at_once(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let count = file.read_at(&mut bytes, offset).unwrap();
    bytes.truncate(count);
    bytes
}

/// Past the page cache: whole sectors into an aligned buffer.
fn direct(file: &File, buffer: &mut AlignedBuf, offset: u64, length: usize) -> Vec<u8> {
    let count = file.read_at(&mut buffer[..length], offset).unwrap();
    buffer[..count].to_vec()
}

fn compare(image: &Path, plain: &Path, seed: u64) {
    let name = image.display();
    let ours = File::open(image).unwrap();
    let content = fs::read(plain).unwrap();
    let uncached = sys::open(image, OFlags::RDONLY | OFlags::DIRECT, Mode::empty());
    let uncached = File::from(uncached.unwrap());
    let mut buffer = AlignedBuf::zeroed(READ_MAX.next_multiple_of(4096));
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..ROUNDS {
        let (offset, length) = place(&mut random);
        let start = content.len().min(offset as usize);
        let right = &content[start..content.len().min(start + length)];
        let (way, found) = match random.u8(..4) {
            0 => ("pread", at_once(&ours, offset, length)),
            1 => ("preadv", vectored(&ours, offset, length)),
            2 => ("sendfile", sent(&ours, offset, length)),
            _ => {
                let (offset, length) = (offset / 512 * 512, length.next_multiple_of(512));
                let found = direct(&uncached, &mut buffer, offset, length);
                let start = content.len().min(offset as usize);
                let right = &content[start..content.len().min(start + length)];
                assert!(found == right, "{name}: O_DIRECT at {offset}, {length}, round {round}");
                continue;
            }
        };
        assert!(found == right, "{name}: {way} at {offset}, {length}, round {round}");
    }
    holes(&ours, &content, &mut random);
    // What the kernel cannot copy itself says so as between any two file systems, for programs to
    // do it otherwise.
    let copy = tempfile::NamedTempFile::new_in(plain.parent().unwrap()).unwrap();
    let refused = sys::copy_file_range(&ours, Some(&mut 0), copy.as_file(), None, 4096);
    assert!(matches!(refused, Err(Errno::XDEV) | Ok(4096)), "{refused:?}");
    fs::copy(image, copy.path()).unwrap();
    assert!(fs::read(copy.path()).unwrap() == content, "{name}: copied");
    if has("python3") {
        for kind in ["MAP_PRIVATE", "MAP_SHARED"] {
            let arguments = ["-c", MAPPED, image.to_str().unwrap(), plain.to_str().unwrap(), kind];
            run("python3", &arguments).unwrap_or_else(|error| panic!("{name}: {kind}: {error}"));
        }
    }
}

/// Holes that are told of are zeros, and reach as far as is told.
fn holes(file: &File, content: &[u8], random: &mut fastrand::Rng) {
    let zeros = |from: u64, to: u64| content[from as usize..to as usize].iter().all(|b| *b == 0);
    for _ in 0..300 {
        let from = random.u64(..SIZE);
        let hole = sys::seek(file, SeekFrom::Hole(from)).unwrap();
        let data = match sys::seek(file, SeekFrom::Data(from)) {
            Ok(data) => data,
            Err(error) => {
                assert_eq!(error, Errno::NXIO);
                SIZE
            }
        };
        assert!(hole == from || data == from, "{from}: data at {data}, a hole at {hole}");
        assert!((from..=SIZE).contains(&hole) && zeros(from, data), "{from}: data at {data}");
        assert!(hole == SIZE || zeros(hole, (hole + 1).next_multiple_of(4096).min(SIZE)));
    }
}

#[test]
fn every_way_to_read_gives_the_same_bytes() {
    let true = can_mount() else { return };
    let (mut server, plain) = sample();
    for (round, live) in [true, false].into_iter().enumerate() {
        if !live {
            server = server.again(false);
        }
        let plain = server.dir.path().join(plain.file_name().unwrap());
        for (index, name) in ["volumes/v/head.raw", "volumes/v/snapshots/s.raw"].iter().enumerate()
        {
            compare(&server.path(name), &plain, (round * 2 + index) as u64);
        }
    }
}
