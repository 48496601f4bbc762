//! What every [`Storage`] must do, as a suite to run on any of them.
#![allow(clippy::unwrap_used, reason = "a suite fails by panicking")]

use super::buffer::AlignedBuf;
use super::{ReadRequest, Storage, WriteRequest};
use std::io;
use std::ops::Range;

/// Bytes a storage must have for [`run`], all of which are written over.
pub const SIZE_BYTES: u64 = 8 << 20;

const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const THREADS: usize = 8;

/// Whether the storage is one that can change its size, as a file, or cannot, as a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resize {
    /// `set_size` works, and new bytes read as zeros.
    Possible,
    /// `set_size` to another size is refused.
    Refused,
}

/// Runs the whole suite on storage of at least [`SIZE_BYTES`]; its content is lost, its size is
/// [`SIZE_BYTES`] afterwards if it can be changed.
///
/// # Panics
/// If the storage does not conform.
pub fn run(storage: &dyn Storage, resize: Resize) {
    assert!(storage.size_bytes() >= SIZE_BYTES);
    assert!(!storage.driver().is_empty());
    if resize == Resize::Possible {
        holes_read_as_zeros(storage);
    }
    round_trip(storage);
    batches(storage);
    memory_of_any_alignment(storage);
    reads_of_sectors(storage);
    nothing_to_do(storage);
    past_the_end(storage);
    discard_keeps_neighbours(storage);
    allocate_keeps_content(storage);
    many_threads(storage);
    match resize {
        Resize::Possible => size_changes(storage),
        Resize::Refused => size_is_fixed(storage),
    }
    storage.flush().unwrap();
}

fn holes_read_as_zeros(storage: &dyn Storage) {
    storage.set_size(0).unwrap();
    storage.set_size(SIZE_BYTES).unwrap();
    write(storage, 1 << 20, &pattern(1, BLOCK));
    assert_eq!(read(storage, 0, 1 << 20), vec![0; 1 << 20]);
    assert_eq!(read(storage, (1 << 20) + BLOCK as u64, 1 << 20), vec![0; 1 << 20]);
    assert_eq!(read(storage, SIZE_BYTES - BLOCK as u64, BLOCK), [0; BLOCK]);
}

fn round_trip(storage: &dyn Storage) {
    let last = storage.size_bytes() / BLOCK as u64 * BLOCK as u64 - BLOCK as u64;
    for (offset, len) in [(0, BLOCK), (BLOCK as u64, 3 * BLOCK), (1 << 20, 2 << 20), (last, BLOCK)]
    {
        let data = pattern(offset + 1, len);
        write(storage, offset, &data);
        assert!(read(storage, offset, len) == data, "{len} bytes at {offset}");
        storage.flush().unwrap();
        assert!(read(storage, offset, len) == data, "{len} bytes at {offset}, flushed");
    }
}

/// More requests than any queue is deep, of several lengths, out of order.
fn batches(storage: &dyn Storage) {
    const COUNT: usize = 300;
    let slot = |index: usize| (index * 7 % COUNT * 4 * BLOCK) as u64;
    let len = |index: usize| (index % 4 + 1) * BLOCK;
    write(storage, 0, &pattern(2, COUNT * 4 * BLOCK));
    let data: Vec<_> = (0..COUNT).map(|index| pattern(index as u64 + 99, len(index))).collect();
    let writes: Vec<_> = data
        .iter()
        .enumerate()
        .map(|(index, buf)| WriteRequest { offset: slot(index), buf })
        .collect();
    storage.write_many(&writes).unwrap();

    let mut found: Vec<_> = (0..COUNT).map(|index| AlignedBuf::zeroed(len(index))).collect();
    let mut reads: Vec<_> = found
        .iter_mut()
        .enumerate()
        .map(|(index, buf)| ReadRequest { offset: slot(index), buf })
        .collect();
    storage.read_many(&mut reads).unwrap();
    for (index, (found, data)) in found.iter().zip(&data).enumerate() {
        assert!(found[..] == data[..], "request {index}");
    }
    let background = pattern(2, COUNT * 4 * BLOCK);
    for index in 0..COUNT {
        let rest = slot(index) as usize + len(index)..slot(index) as usize + 4 * BLOCK;
        if !rest.is_empty() {
            let kept = read(storage, rest.start as u64, rest.len());
            assert!(kept == background[rest], "the blocks after request {index}");
        }
    }
}

fn memory_of_any_alignment(storage: &dyn Storage) {
    for shift in [1, 8, 511, 512, 2048] {
        let mut memory = AlignedBuf::zeroed(1 << 20);
        let range: Range<usize> = shift..shift + 200 * BLOCK;
        let data = pattern(shift as u64, range.len());
        memory[range.clone()].copy_from_slice(&data);
        write(storage, BLOCK as u64, &memory[range.clone()]);
        memory.fill(0xee);
        storage.read_at(BLOCK as u64, &mut memory[range.clone()]).unwrap();
        assert!(memory[range.clone()] == data[..], "memory {shift} bytes off");
        assert!(memory[..range.start].iter().all(|&byte| byte == 0xee), "bytes before");
        assert!(memory[range.end..].iter().all(|&byte| byte == 0xee), "bytes after");
    }
}

fn reads_of_sectors(storage: &dyn Storage) {
    let data = pattern(5, 600 << 10);
    write(storage, 0, &data);
    for (start, len) in [
        (SECTOR, SECTOR),
        (7 * SECTOR, SECTOR),
        (7 * SECTOR, 2 * SECTOR),
        (SECTOR, BLOCK),
        (3 * SECTOR, 5 * BLOCK),
        (5 * SECTOR, 500 << 10),
    ] {
        let found = read(storage, start as u64, len);
        assert!(found == data[start..start + len], "{len} bytes at {start}");
    }
    let end = storage.size_bytes() / SECTOR as u64 * SECTOR as u64;
    assert_eq!(read(storage, end - SECTOR as u64, SECTOR).len(), SECTOR);
}

fn nothing_to_do(storage: &dyn Storage) {
    storage.read_many(&mut []).unwrap();
    storage.write_many(&[]).unwrap();
    storage.read_at(0, &mut []).unwrap();
    storage.write_at(0, &[]).unwrap();
    storage.discard(0, 0).unwrap();
    storage.allocate(0, 0).unwrap();
}

fn past_the_end(storage: &dyn Storage) {
    let size = storage.size_bytes();
    let end = size / BLOCK as u64 * BLOCK as u64;
    let farthest = u64::MAX / BLOCK as u64 * BLOCK as u64;
    let kept = read(storage, end - BLOCK as u64, BLOCK);
    for offset in [end - BLOCK as u64, end + BLOCK as u64, 1 << 62, farthest] {
        let mut buf = vec![0; 4 * BLOCK];
        let error = storage.read_at(offset, &mut buf).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "read at {offset}");
        assert!(storage.write_at(offset, &buf).is_err(), "write at {offset}");
        assert!(storage.discard(offset, 4 * BLOCK as u64).is_err(), "discard at {offset}");
        assert!(storage.allocate(offset, 4 * BLOCK as u64).is_err(), "allocate at {offset}");
    }
    assert_eq!(storage.size_bytes(), size);
    assert_eq!(read(storage, end - BLOCK as u64, BLOCK), kept);
    // One bad request fails the batch, whatever its place in it.
    let mut bufs = vec![[0; BLOCK]; 100];
    let mut reads: Vec<_> = bufs
        .iter_mut()
        .enumerate()
        .map(|(index, buf)| ReadRequest { offset: if index == 90 { end } else { 0 }, buf })
        .collect();
    assert!(storage.read_many(&mut reads).is_err());
    assert_eq!(read(storage, end - BLOCK as u64, BLOCK), kept);
}

fn discard_keeps_neighbours(storage: &dyn Storage) {
    let data = pattern(6, 1 << 20);
    for (start, len) in [(BLOCK, BLOCK), (256 << 10, 256 << 10), (0, 64 << 10)] {
        write(storage, 0, &data);
        storage.discard(start as u64, len as u64).unwrap();
        assert!(read(storage, 0, start) == data[..start], "before");
        let end = start + len;
        assert!(read(storage, end as u64, data.len() - end) == data[end..], "after");
        // The range reads as anything, but it reads, and takes new content.
        read(storage, start as u64, len);
        write(storage, start as u64, &data[start..end]);
        assert!(read(storage, 0, data.len()) == data, "written again");
    }
}

fn allocate_keeps_content(storage: &dyn Storage) {
    let size = storage.size_bytes();
    let data = pattern(7, 64 << 10);
    write(storage, 1 << 20, &data);
    storage.discard((1 << 20) + (32 << 10), 16 << 10).unwrap();
    storage.allocate(0, SIZE_BYTES).unwrap();
    storage.allocate(0, SIZE_BYTES).unwrap();
    assert_eq!(storage.size_bytes(), size);
    assert!(read(storage, 1 << 20, 32 << 10) == data[..32 << 10]);
    assert!(read(storage, (1 << 20) + (48 << 10), 16 << 10) == data[48 << 10..]);
}

/// Each thread in its own range, all at once, with batches of its own.
fn many_threads(storage: &dyn Storage) {
    const ROUNDS: u64 = 40;
    const LEN: usize = 16 * BLOCK;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let base = (thread * LEN) as u64;
                for round in 0..ROUNDS {
                    let data = pattern(base + round, LEN);
                    let writes: Vec<_> = data
                        .chunks(BLOCK)
                        .enumerate()
                        .map(|(index, buf)| WriteRequest {
                            offset: base + (index * BLOCK) as u64,
                            buf,
                        })
                        .collect();
                    storage.write_many(&writes).unwrap();
                    if round % 10 == thread as u64 {
                        storage.flush().unwrap();
                    }
                    assert!(read(storage, base, LEN) == data, "thread {thread}, round {round}");
                }
            });
        }
    });
    for thread in 0..THREADS {
        let base = (thread * LEN) as u64;
        assert!(read(storage, base, LEN) == pattern(base + ROUNDS - 1, LEN), "thread {thread}");
    }
}

fn size_changes(storage: &dyn Storage) {
    let data = pattern(8, BLOCK);
    let last = SIZE_BYTES - BLOCK as u64;
    storage.set_size(SIZE_BYTES).unwrap();
    write(storage, last, &data);
    storage.set_size(2 * SIZE_BYTES).unwrap();
    assert_eq!(storage.size_bytes(), 2 * SIZE_BYTES);
    assert_eq!(read(storage, last, BLOCK), data);
    assert_eq!(read(storage, SIZE_BYTES, BLOCK), [0; BLOCK]);
    write(storage, 2 * SIZE_BYTES - BLOCK as u64, &data);

    storage.set_size(last).unwrap();
    assert_eq!(storage.size_bytes(), last);
    assert!(storage.read_at(last, &mut [0; BLOCK]).is_err());
    assert!(storage.write_at(last, &data).is_err());
    storage.set_size(2 * SIZE_BYTES).unwrap();
    assert_eq!(read(storage, last, BLOCK), [0; BLOCK], "what was cut off is gone");
    assert_eq!(read(storage, 2 * SIZE_BYTES - BLOCK as u64, BLOCK), [0; BLOCK]);
    storage.set_size(SIZE_BYTES).unwrap();
}

fn size_is_fixed(storage: &dyn Storage) {
    let size = storage.size_bytes();
    storage.set_size(size).unwrap();
    for other in [0, size - BLOCK as u64, size + BLOCK as u64] {
        let error = storage.set_size(other).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{other}");
    }
    assert_eq!(storage.size_bytes(), size);
}

fn read(storage: &dyn Storage, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0xa5; len];
    storage.read_at(offset, &mut buf).unwrap();
    buf
}

fn write(storage: &dyn Storage, offset: u64, data: &[u8]) {
    storage.write_at(offset, data).unwrap();
}

/// Bytes that no other seed and no other place gives (xorshift).
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
