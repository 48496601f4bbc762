//! Seeds of virtual machines.

use super::Seed;
use crate::vhost::{KICK, RAW};

/// Which files come with a message: how many in the upper half, the first in the lower.
const NONE: u8 = 0;
const MEMORY: u8 = 0x10;
const EVENT: u8 = 0x11;
const OTHER_EVENT: u8 = 0x12;
const CHANNEL: u8 = 0x13;
const NULL: u8 = 0x14;
/// Where things are in the guest's memory: the ring at its beginning, of so many places.
const PLACES: u16 = 16;
const AVAILABLE: u64 = 256;
const USED: u64 = 320;
const HEADERS: u64 = 512;
const OUTCOMES: u64 = 768;
const TABLE: u64 = 1024;
const NOTES: u64 = 4096;
const DATA: u64 = 8192;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

pub(super) fn seeds(seeds: &mut Vec<Seed>) {
    let mut seed = |name: &str, flags: u8, image: &[u8], messages: &[Vec<u8>]| {
        let length = (image.len() as u16).to_le_bytes().to_vec();
        let bytes = [vec![flags], length, image.to_vec(), messages.concat()].concat();
        seeds.push(("vhost", name.to_owned(), bytes));
    };
    let disk = 1 << 1 | 1 << 2 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 12;
    let changes = 1 << 13 | 1 << 14;
    let queues = 1 << 28 | 1 << 29 | 1 << 30 | 1 << 32;
    let (image, base) = (image(), message(11, NONE, &[0]));
    let writes = begin(disk | changes | queues);
    let whole = [writes.clone(), queue(0), vec![KICK], base.clone(), queue(6)];
    seed("volume", 0, &image, &whole);
    // Neither flushes nor event indices.
    let plain = begin(1 << 5 | 1 << 28 | 1 << 30 | 1 << 32);
    seed("snapshot", 1, &image, &[plain, queue(0), base.clone()]);
    let mut noted = image;
    noted.resize(NOTES as usize, 0);
    noted.extend([0; 8]);
    for field in [1, PLACES, 0, 0] {
        noted.extend(field.to_le_bytes());
    }
    for head in 0..PLACES {
        noted.extend([u8::from([0, 3, 6].contains(&head)), 0, 0, 0, 0, 0, 0, 0]);
        noted.extend(u64::from(PLACES - head).to_le_bytes());
    }
    let notes = message(32, MEMORY, &[4096, NOTES, 1 | u64::from(PLACES) << 16]);
    seed("left", 0, &noted, &[writes.clone(), notes, queue(0), base]);
    let others = [
        writes,
        message(4, NONE, &[]),
        message(31, NONE, &[0, 0, 2 | 16 << 16]),
        message(25, NONE, &[0, 1 << 32]),
        message(14, EVENT, &[1]),
        message(13, NONE, &[1 << 8]),
        vec![RAW, 12, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        message(5, 0x20, &[2, 0, 4096, 0, 0, 8192, 4096, 8192, 4096]),
        message(12, NULL, &[0]),
    ];
    seed("others", 0, &[], &others);
}

/// A request, and which files come with it.
fn message(request: u8, files: u8, fields: &[u64]) -> Vec<u8> {
    let payload: Vec<u8> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
    [vec![request, files, payload.len() as u8], payload].concat()
}

/// All before the queues.
fn begin(features: u64) -> Vec<u8> {
    let protocol = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12;
    [
        message(1, NONE, &[]),
        message(2, NONE, &[features]),
        message(15, NONE, &[]),
        message(16, NONE, &[protocol]),
        message(3, NONE, &[]),
        message(17, NONE, &[]),
        message(24, NONE, &[60 << 32, 0]),
        message(21, CHANNEL, &[]),
        message(5, MEMORY, &[1, 0, 64 << 10, 0, 0]),
    ]
    .concat()
}

/// The first queue, from a request on.
fn queue(next: u64) -> Vec<u8> {
    [
        message(8, NONE, &[u64::from(PLACES) << 32]),
        message(10, NONE, &[next << 32]),
        message(9, NONE, &[0, 0, USED, AVAILABLE, 0]),
        message(13, OTHER_EVENT, &[0]),
        message(12, EVENT, &[0]),
        message(18, NONE, &[1 << 32]),
    ]
    .concat()
}

/// Memory with a request of each kind: read, write, flush, discard, name, and a read with a table.
fn image() -> Vec<u8> {
    let mut image = vec![0; TABLE as usize + 48];
    let mut set = |at: u64, bytes: &[u8]| {
        image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    };
    let kinds = [(0u32, 8u64, 4096, WRITE), (1, 16, 512, 0), (4, 0, 0, 0), (11, 0, 16, 0)];
    let kinds = kinds.into_iter().chain([(8, 0, 20, WRITE), (0, 24, 8192, WRITE)]);
    let mut descriptor = 0u16;
    for (number, (kind, sector, length, flags)) in (0..).zip(kinds) {
        let header = HEADERS + 32 * number;
        set(header, &kind.to_le_bytes());
        set(header + 8, &sector.to_le_bytes());
        // A range: some blocks at 64 KiB.
        set(header + 16, &[128, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0]);
        let data = if kind == 11 { header + 16 } else { DATA };
        let mut pieces =
            vec![(header, 16, 0), (data, length, flags), (OUTCOMES + number, 1, WRITE)];
        pieces.retain(|(_, length, _)| *length > 0);
        set(AVAILABLE + 4 + 2 * number, &descriptor.to_le_bytes());
        let (mut at, mut next) = (16 * u64::from(descriptor), descriptor);
        if number == 5 {
            set(at, &TABLE.to_le_bytes());
            set(at + 8, &48u32.to_le_bytes());
            set(at + 12, &INDIRECT.to_le_bytes());
            (at, next) = (TABLE, 0);
        }
        for (index, (address, length, flags)) in (1..).zip(&pieces) {
            next += 1;
            let more = if index < pieces.len() { NEXT } else { 0 };
            set(at, &address.to_le_bytes());
            set(at + 8, &u32::to_le_bytes(*length));
            set(at + 12, &(flags | more).to_le_bytes());
            set(at + 14, &next.to_le_bytes());
            at += 16;
        }
        descriptor = next;
    }
    set(AVAILABLE + 2, &6u16.to_le_bytes());
    image
}
