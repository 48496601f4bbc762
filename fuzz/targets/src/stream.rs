//! Streams of `dbs send`, received into a store.

use crate::input::Input;
use crate::sample::{End, Sample, open};
use dbs_core::ErrorKind;
use dbs_core::format::crc::{crc32c, crc32c_append};
use dbs_core::info::Severity;
use dbs_transfer::{pending, receive};
use std::sync::Arc;

const PREFIX_BYTES: usize = 16;
const RECORD_BYTES: usize = 32;
/// Content compared with what this file makes of a stream.
const COMPARED_MAX_BYTES: u64 = 1 << 20;

/// A stream, its checksums made right first if bit 0 of the first byte is set.
///
/// The input: flags (bit 1: into a volume of another name), and the stream.
pub fn stream(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let mut bytes = input.rest().to_vec();
    if flags & 1 != 0 {
        mend(&mut bytes);
    }
    let disk = Arc::new(Sample::get(End::Closed).disk());
    let store = open(&disk, None, 5, false).unwrap();
    let name = (flags & 2 != 0).then_some("other");
    match receive(&store, name, &bytes[..], &mut |_, _| true) {
        Ok(received) => {
            let spec = format!("{}@{}", received.volume, received.snapshot);
            let snapshot = store.volume(&spec).expect("what was received is there");
            assert_eq!(snapshot.size(), received.size);
            assert_eq!(pending(&store, &received.volume).unwrap(), None, "and nothing is pending");
            if received.size <= COMPARED_MAX_BYTES {
                let mut content = vec![0; received.size as usize];
                snapshot.read_at(0, &mut content).unwrap();
                assert_shown(&bytes, &content);
            }
        }
        Err(error) => {
            let wrong = [ErrorKind::Io, ErrorKind::Poisoned];
            assert!(!wrong.contains(&error.kind()), "{error}");
            for volume in store.volumes(false) {
                // An unfinished stream can be resumed or given up: the token is one.
                let _ = pending(&store, &volume.name);
            }
        }
    }
    let report = store.check().unwrap();
    assert!(report.worst() != Some(Severity::Corrupt), "{report:?}");
}

/// What the records of an accepted stream say is what the snapshot shows.
fn assert_shown(bytes: &[u8], content: &[u8]) {
    let mut at = PREFIX_BYTES + description_bytes(bytes) + 4;
    while let Some(record) = bytes.get(at..at + RECORD_BYTES) {
        let (offset, length) = (u64_at(record, 16) as usize, u64_at(record, 24) as usize);
        at += RECORD_BYTES;
        match record[4] {
            1 => {
                let payload = &bytes[at..at + length];
                assert!(content[offset..offset + length] == *payload, "other data at {offset}");
                at += length;
            }
            2 => {
                let zeros = content[offset..offset + length].iter().all(|byte| *byte == 0);
                assert!(zeros, "no zeros at {offset}");
            }
            4 => return,
            _ => {}
        }
    }
}

fn description_bytes(bytes: &[u8]) -> usize {
    bytes.get(12..16).map_or(0, |b| u32::from_le_bytes(b.try_into().unwrap()) as usize)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Makes checksums, numbers and the sums at the end right, as far as there are whole records.
pub(crate) fn mend(bytes: &mut [u8]) {
    let head = PREFIX_BYTES.saturating_add(description_bytes(bytes));
    if head.saturating_add(4) > bytes.len() {
        return;
    }
    let seed = crc32c(&bytes[..head]);
    bytes[head..head + 4].copy_from_slice(&seed.to_le_bytes());
    let mut all = crc32c_append(seed, &seed.to_le_bytes());
    let (mut at, mut number, mut data, mut zero) = (head + 4, 0u64, 0u64, 0u64);
    while at + RECORD_BYTES <= bytes.len() {
        let length = u64_at(bytes, at + 24);
        let kind = bytes[at + 4];
        let payload = if kind == 1 || kind == 4 { length } else { 0 };
        let body = at + RECORD_BYTES;
        let end = match usize::try_from(payload).ok().and_then(|p| body.checked_add(p)) {
            Some(end) if end <= bytes.len() => end,
            _ => return,
        };
        if kind == 4 && payload == 32 {
            let sums = [data, zero, number].map(u64::to_le_bytes).concat();
            bytes[body..body + 24].copy_from_slice(&sums);
            bytes[body + 24..body + 28].copy_from_slice(&all.to_le_bytes());
            bytes[body + 28..end].fill(0);
        }
        bytes[at + 8..at + 16].copy_from_slice(&number.to_le_bytes());
        let crc = crc32c_append(seed, &bytes[at + 4..end]);
        bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
        all = crc32c_append(all, &bytes[at..end]);
        number += 1;
        data = data.wrapping_add(if kind == 1 { length } else { 0 });
        zero = zero.wrapping_add(if kind == 2 { length } else { 0 });
        at = end;
    }
}
