//! What a host is told of the controller and of its namespace: data structures of Identify, and log pages.
//!
//! After the figures "Identify Controller", "Identify Namespace" and "Discovery Log Page" of the NVM Express Base, NVM
//! Command Set and Fabrics specifications; offsets are those of the figures.

use super::command::{BLOCK_BYTES, NAMESPACE, RANGES_MAX, TRANSFER_MAX_LOG, opcode};
use super::registers::{ENTRIES_MAX, VERSION};
use super::wire::put;
use std::net::SocketAddr;

/// Bytes of each data structure of Identify.
pub const IDENTIFY_BYTES: usize = 4096;
/// Bytes of data in a capsule for an I/O queue: a write of so much needs no round trip more.
pub const CAPSULE_MAX_BYTES: usize = 16 << 10;
/// The same for an admin queue, as the specification has it.
pub const ADMIN_CAPSULE_MAX_BYTES: usize = 8 << 10;
/// Requests for events that wait.
pub const EVENTS_MAX: usize = 4;
/// The subsystem that tells of all others.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// What the names of other subsystems begin with.
pub const UUID_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:";
/// Bytes of an entry of the discovery log, and of its header.
pub const RECORD_BYTES: usize = 1024;

/// Blocks of 512 bytes in one of 4 KiB, which are written as a whole; as numbers that begin with 0.
const WHOLE_BLOCKS: u16 = 7;
/// Zeros written with one command at most: 32 MiB, as a power of two of 4 KiB.
const ZEROES_MAX_LOG: u8 = 13;
/// Blocks of one range to be given up.
const DEALLOCATE_MAX_BLOCKS: u32 = (1 << 30) / BLOCK_BYTES as u32;
/// Events that a host can be told of: an attribute of a namespace has changed.
pub const NAMESPACE_EVENTS: u32 = 1 << 8;
/// Which path to a namespace may be used has changed.
pub const ACCESS_EVENTS: u32 = 1 << 11;
/// The discovery log has changed.
pub const DISCOVERY_EVENTS: u32 = 1 << 31;

/// The only group of namespaces, which become accessible on a path together.
const ACCESS_GROUP: u32 = 1;
/// Seconds that becoming accessible takes at most, as far as the host is to care.
const ACCESS_SECONDS: u8 = 10;

/// A controller, as the data structure for it is made.
pub struct Described<'a> {
    /// Its number.
    pub number: u16,
    /// Its subsystem.
    pub subsystem: &'a str,
    /// The uuid of what it shows; none for discovery.
    pub uuid: Option<&'a str>,
    /// A host may have several controllers of it, as paths.
    pub paths: bool,
}

/// The data structure of a controller.
pub fn controller(described: &Described<'_>) -> Vec<u8> {
    let mut data = vec![0; IDENTIFY_BYTES];
    let discovery = described.uuid.is_none();
    let digits = described.uuid.unwrap_or_default().bytes().filter(|byte| *byte != b'-');
    let serial: Vec<u8> = digits.take(20).collect();
    text(&mut data[4..24], &serial);
    text(&mut data[24..64], b"DBS volume");
    text(&mut data[64..72], env!("CARGO_PKG_VERSION").as_bytes());
    data[77] = TRANSFER_MAX_LOG;
    put(&mut data, 78, &described.number.to_le_bytes());
    put(&mut data, 80, &VERSION.to_le_bytes());
    let mut events = if discovery { DISCOVERY_EVENTS } else { NAMESPACE_EVENTS };
    if described.paths {
        events |= ACCESS_EVENTS;
        several_paths(&mut data);
    }
    put(&mut data, 92, &events.to_le_bytes());
    // Any command keeps the controller alive.
    put(&mut data, 96, &(1u32 << 6).to_le_bytes());
    data[111] = if discovery { 2 } else { 1 };
    data[258] = 3;
    data[259] = EVENTS_MAX as u8 - 1;
    // One slot for firmware, which is read-only.
    data[260] = 0x03;
    // The log of effects, and parts of logs.
    data[261] = 0x06;
    // Keep alive in seconds.
    put(&mut data, 320, &10u16.to_le_bytes());
    put(&mut data, 514, &ENTRIES_MAX.to_le_bytes());
    // One descriptor, which may be an offset into the capsule, or the transport's.
    put(&mut data, 536, &(1u32 | 1 << 20).to_le_bytes());
    put(&mut data, 768, described.subsystem.as_bytes());
    let capsule = if discovery { 0 } else { CAPSULE_MAX_BYTES };
    put(&mut data, 1792, &(((64 + capsule) / 16) as u32).to_le_bytes());
    put(&mut data, 1796, &1u32.to_le_bytes());
    data[1803] = 1;
    if !discovery {
        data[512] = 0x66;
        data[513] = 0x44;
        put(&mut data, 516, &NAMESPACE.to_le_bytes());
        // Dataset management and zeros.
        put(&mut data, 520, &(1u16 << 2 | 1 << 3).to_le_bytes());
        // A cache that a flush makes durable, of one namespace or of all.
        data[525] = 0x07;
        // Nothing longer than a block is atomic at any offset (AWUN, AWUPF: 0); the namespace may know more.
    }
    data
}

/// That there may be several ports and controllers, and that a namespace is optimized on one of them, and inaccessible on
/// the others.
fn several_paths(data: &mut [u8]) {
    data[76] = 1 << 3 | 1 << 1 | 1;
    // Those two states; the group of a namespace does not change.
    (data[342], data[343]) = (ACCESS_SECONDS, 1 << 6 | 1 << 2 | 1);
    put(data, 344, &ACCESS_GROUP.to_le_bytes());
    put(data, 348, &1u32.to_le_bytes());
    put(data, 540, &NAMESPACE.to_le_bytes());
}

/// The log of what may be used on a path, which has changed so many times; without its namespace if only `groups` are asked for.
pub fn access(changes: u64, accessible: bool, groups: bool) -> Vec<u8> {
    let mut log = vec![0; 16 + 32 + 4];
    put(&mut log, 0, &changes.to_le_bytes());
    log[8] = 1;
    put(&mut log, 16, &ACCESS_GROUP.to_le_bytes());
    put(&mut log, 24, &changes.to_le_bytes());
    // Optimized, or inaccessible.
    log[32] = if accessible { 1 } else { 3 };
    if groups {
        log.truncate(16 + 32);
    } else {
        log[20] = 1;
        put(&mut log, 48, &NAMESPACE.to_le_bytes());
    }
    log
}

/// A namespace, as the data structure for it is made.
pub struct Shape {
    /// Its bytes.
    pub size: u64,
    /// Whether it is only read.
    pub read_only: bool,
    /// Whether it is promised that each 4 KiB are written whole or not at all, also when the power fails: databases rely on it.
    pub whole: bool,
    /// Whether blocks that were given up are said to be zeros: some hosts clear a disk by that.
    pub zeroes_freed: bool,
    /// Whether several controllers have it.
    pub paths: bool,
}

/// The data structure of a namespace.
pub fn namespace(shape: &Shape) -> Vec<u8> {
    let Shape { size, read_only, whole, zeroes_freed, paths } = *shape;
    let mut data = vec![0; IDENTIFY_BYTES];
    let blocks = (size / BLOCK_BYTES).to_le_bytes();
    put(&mut data, 0, &blocks);
    put(&mut data, 8, &blocks);
    put(&mut data, 16, &blocks);
    // What is best to write is told, and maybe what is atomic.
    data[24] = 1 << 4 | u8::from(whole) << 1;
    // What blocks read as that are given up, if that is known; zeros can be written by giving blocks up.
    data[33] = u8::from(zeroes_freed) | 1 << 3;
    // The best to write and to give up, and where those begin: a block of 4 KiB.
    for at in [64, 66, 68, 70, 72] {
        put(&mut data, at, &WHOLE_BLOCKS.to_le_bytes());
    }
    // Atomic, in use and after a loss of power, and the boundaries of that: the same.
    for at in [34, 36, 40, 44].into_iter().filter(|_| whole) {
        put(&mut data, at, &WHOLE_BLOCKS.to_le_bytes());
    }
    if paths {
        data[30] = 1;
        put(&mut data, 92, &ACCESS_GROUP.to_le_bytes());
    }
    data[99] = u8::from(read_only);
    // The only format: no metadata, and blocks of so many bytes.
    data[130] = BLOCK_BYTES.ilog2() as u8;
    data
}

/// By what a namespace is known everywhere: a list of one descriptor, its uuid.
pub fn descriptors(uuid: &str) -> Vec<u8> {
    let mut data = vec![0; IDENTIFY_BYTES];
    data[0] = 3;
    data[1] = 16;
    let digits = uuid.bytes().filter_map(|digit| (digit as char).to_digit(16));
    let digits: Vec<u8> = digits.map(|digit| digit as u8).collect();
    for (byte, pair) in data[4..20].iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    data
}

/// The namespaces behind this number.
pub fn namespaces(behind: u32) -> Vec<u8> {
    let mut data = vec![0; IDENTIFY_BYTES];
    if behind < NAMESPACE {
        put(&mut data, 0, &NAMESPACE.to_le_bytes());
    }
    data
}

/// Limits of commands that the limit of transfers is not for.
pub fn limits() -> Vec<u8> {
    let mut data = vec![0; IDENTIFY_BYTES];
    data[1] = ZEROES_MAX_LOG;
    data[3] = (RANGES_MAX - 1) as u8;
    put(&mut data, 4, &DEALLOCATE_MAX_BLOCKS.to_le_bytes());
    data
}

/// The log of a healthy device: nothing used up.
pub fn health() -> Vec<u8> {
    let mut data = vec![0; 512];
    // 27 °C, in kelvins: there is nothing to measure.
    put(&mut data, 1, &300u16.to_le_bytes());
    (data[3], data[4]) = (100, 10);
    data
}

/// The log of the commands that there are.
pub fn effects() -> Vec<u8> {
    let mut data = vec![0; 4096];
    let admin = [
        opcode::GET_LOG_PAGE,
        opcode::IDENTIFY,
        opcode::ABORT,
        opcode::SET_FEATURES,
        opcode::GET_FEATURES,
        opcode::ASYNC_EVENT_REQUEST,
        opcode::KEEP_ALIVE,
    ];
    for code in admin {
        data[usize::from(code) * 4] = 1;
    }
    let writes = [opcode::WRITE, opcode::WRITE_ZEROES, opcode::DATASET_MANAGEMENT];
    for code in [opcode::FLUSH, opcode::READ].into_iter().chain(writes) {
        // Supported, and whether it changes the content of blocks.
        data[1024 + usize::from(code) * 4] = 1 | u8::from(writes.contains(&code)) << 1;
    }
    data
}

/// A part of the discovery log: of these subsystems, all at one address.
pub fn discovery(
    generation: u64,
    subsystems: &[String],
    address: SocketAddr,
    (offset, length): (u64, usize),
) -> Vec<u8> {
    let mut data = Vec::with_capacity(length + 2 * RECORD_BYTES);
    let first = offset / RECORD_BYTES as u64;
    let skip = (offset % RECORD_BYTES as u64) as usize;
    let mut number = first;
    while data.len() < skip + length {
        let subsystem = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
        match subsystem.map(|index| subsystems.get(index)) {
            None => data.extend(discovery_header(generation, subsystems.len() as u64)),
            Some(Some(subsystem)) => data.extend(record(subsystem, address)),
            Some(None) => data.resize(skip + length, 0),
        }
        number += 1;
    }
    data.truncate(skip + length);
    data.split_off(skip)
}

fn discovery_header(generation: u64, records: u64) -> [u8; RECORD_BYTES] {
    let mut header = [0; RECORD_BYTES];
    put(&mut header, 0, &generation.to_le_bytes());
    put(&mut header, 8, &records.to_le_bytes());
    header
}

fn record(subsystem: &str, address: SocketAddr) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[0] = 3;
    record[1] = if address.is_ipv4() { 1 } else { 2 };
    // An NVM subsystem, without a secure channel, which can do without flow control of submission queues.
    (record[2], record[3]) = (2, 1 << 2);
    put(&mut record, 4, &1u16.to_le_bytes());
    // Controllers are made as hosts connect.
    put(&mut record, 6, &0xffffu16.to_le_bytes());
    put(&mut record, 8, &ENTRIES_MAX.to_le_bytes());
    text(&mut record[32..64], address.port().to_string().as_bytes());
    put(&mut record, 256, subsystem.as_bytes());
    text(&mut record[512..768], address.ip().to_string().as_bytes());
    record
}

/// Text, with spaces behind it.
fn text(place: &mut [u8], text: &[u8]) {
    place.fill(b' ');
    place.iter_mut().zip(text).for_each(|(place, byte)| *place = *byte);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_device_does_is_promised_to_be_atomic() {
        let u16_at = |data: &[u8], at: usize| u16::from_le_bytes([data[at], data[at + 1]]);
        for (whole, features, blocks) in [(true, 0x12, 7), (false, 0x10, 0)] {
            let (size, read_only, zeroes_freed, paths) = (1 << 20, false, true, false);
            let data = namespace(&Shape { size, read_only, whole, zeroes_freed, paths });
            assert_eq!(data[24], features);
            for at in [34, 36, 38, 40, 42, 44] {
                let expected = if matches!(at, 38 | 42) { 0 } else { blocks };
                assert_eq!(u16_at(&data, at), expected, "{whole} {at}");
            }
            assert_eq!(u16_at(&data, 64), 7, "the best to write");
        }
        let described = Described { number: 1, subsystem: "nqn.x", uuid: Some(""), paths: false };
        let data = controller(&described);
        assert_eq!((u16_at(&data, 526), u16_at(&data, 528)), (0, 0));
    }
}
