//! The journal and the tail: records that a writer never made, under good checksums.

use crate::disk::Disk;
use crate::exercise::survive;
use crate::input::Input;
use crate::sample::{End, Sample, TAIL, attach};
use dbs_core::format::crc::crc32c;
use dbs_core::format::{Record, RegionKind, journal as groups};
use std::sync::Arc;

/// Groups and batches that one input makes, each.
const GROUPS_MAX: usize = 4;
const TAIL_HEADER: usize = 4096;
const HALF_HEADER: usize = 64;
/// Bit of the flags: the records get the header that a group starts with.
const WITH_HEADER: u8 = 1;

/// Groups behind the last of a store, and a tail, with these records; then as [`crate::image()`].
///
/// The input: flags (bit 0: the sample was killed, bit 1: data has checksums); how many groups, and each with flags, position and
/// records; how many batches of the tail, and each with its records; the rest says how it is used.
pub fn journal(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let end = if flags & 1 == 0 { End::Closed } else { End::Killed };
    let sample = Sample::of(end, flags & 2 != 0);
    let disk = Arc::new(sample.disk());
    let mut sequence = sample.sequence;
    for _ in 0..usize::from(input.u8()).min(GROUPS_MAX) {
        sequence = group(sample, &disk, sequence, &mut input);
    }
    let tail = tail(sample, &mut input);
    survive(&disk, || tail.clone().map(attach), &mut input);
}

/// Writes a group into the ring; returns its sequence.
fn group(sample: &Sample, disk: &Disk, last: u64, input: &mut Input<'_>) -> u64 {
    let ring = sample.geometry.region(RegionKind::Journal);
    let blocks = ring.length / 4096;
    let flags = input.u8();
    let position = match input.u8() {
        // Behind the newest, as far as the sample is concerned.
        0 => sample.newest_end(),
        other => u64::from(other) % blocks,
    };
    let sequence = match flags >> 1 & 3 {
        0 | 1 => last.wrapping_add(1),
        2 => last.wrapping_add(u64::from(input.u8())),
        _ => input.u64(),
    };
    let session = if flags & 8 == 0 { sample.session } else { input.u64() };
    let mut payload = Vec::new();
    if flags & WITH_HEADER != 0 {
        let boot = [7; 16];
        let (marks, tail) = (sample.marks(), flags & 16 != 0);
        let header = Record::Checkpoint { sequence: sample.checkpoint(), marks, boot, tail };
        header.encode(&mut payload);
    }
    payload.extend_from_slice(input.run());
    let address = ring.offset + position * 4096;
    let bytes = groups::encode(&payload, sequence, session, &sample.uuid, address);
    let room = (ring.length - position * 4096) as usize;
    disk.put(address, &bytes[..bytes.len().min(room)]);
    sequence
}

/// The tail of the sample's last process, with other batches.
fn tail(sample: &Sample, input: &mut Input<'_>) -> Option<Vec<u8>> {
    let count = usize::from(input.u8()).min(GROUPS_MAX);
    if count == 0 {
        return None;
    }
    let mut bytes = sample.tail.clone();
    bytes.resize(TAIL, 0);
    let group = sample.sequence + 1 + input.below(2);
    let half = (TAIL - TAIL_HEADER) / 2;
    let start = TAIL_HEADER + (group % 2) as usize * half;
    let mut at = start + HALF_HEADER;
    for _ in 0..count {
        let records = input.bounded(TAIL / 16);
        bytes[at..at + 4].copy_from_slice(&(records.len() as u32).to_le_bytes());
        bytes[at + 4..at + 8].copy_from_slice(&crc32c(records).to_le_bytes());
        bytes[at + 8..at + 8 + records.len()].copy_from_slice(records);
        at += 8 + records.len();
    }
    bytes[start..start + 8].copy_from_slice(&group.to_le_bytes());
    // Now and then a length that is not that of the batches.
    let used = (at - start - HALF_HEADER) as u64 ^ u64::from(input.u8() >> 6);
    bytes[start + 8..start + 16].copy_from_slice(&used.to_le_bytes());
    Some(bytes)
}
