//! The checksum of a whole image, as upstream computes it of a file of equal size and content.

use crate::image::crc::Crc64;
use crate::image::{Interval, METHOD, Record, Source};
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// What one thread hashes at a time; the parts' checksums are joined in the end.
const PART_BYTES: u64 = 64 * 1024 * 1024;

/// The largest single read.
const READ_BYTES: u64 = 1024 * 1024;

/// Holes up to this are read with the data around them: cheaper than a read of its own for each.
const SMALL_HOLE: u64 = 64 * 1024;

/// How many intervals are asked for at a time.
const INTERVALS: usize = 256;

/// How to hash.
pub struct HashOptions<'a> {
    /// Threads to read and compute with, at least one.
    pub threads: usize,
    /// Asked now and then: whether to give up.
    pub cancelled: &'a (dyn Fn() -> bool + Sync),
    /// Told now and then how many more bytes of the image are done, holes included.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// Hashes an image: 16 lower-case hexadecimal digits.
///
/// # Errors
/// `Interrupted` when cancelled; of the storage.
pub fn hash(source: &dyn Source, options: &HashOptions<'_>) -> Result<String> {
    let size = source.size();
    let parts: Vec<Mutex<Crc64>> =
        (0..size.div_ceil(PART_BYTES)).map(|_| Mutex::default()).collect();
    let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let work = || -> Result<()> {
        let mut buf = AlignedBuf::zeroed(READ_BYTES as usize);
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(part) = parts.get(index as usize) else { break };
            let start = index * PART_BYTES;
            let range = (start, size.min(start + PART_BYTES));
            let crc = hash_part(source, range, &mut buf, options)
                .inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            *part.lock().unwrap_or_else(PoisonError::into_inner) = crc;
            (options.progress)(range.1 - range.0);
        }
        Ok(())
    };
    let threads = options.threads.clamp(1, parts.len().max(1));
    thread::scope(|scope| -> Result<()> {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut outcome = work();
        for other in others {
            outcome = outcome.and(other.join().unwrap_or_else(|_| Err(panicked())));
        }
        outcome
    })?;
    let whole = parts.iter().fold(Crc64::default(), |whole, part| {
        whole.then(*part.lock().unwrap_or_else(PoisonError::into_inner))
    });
    Ok(format!("{:016x}", whole.value()))
}

fn panicked() -> Error {
    Error::new(ErrorKind::Io, "a thread that was hashing has panicked")
}

/// Hashes `range.0 .. range.1`.
fn hash_part(
    source: &dyn Source,
    range: (u64, u64),
    buf: &mut [u8],
    options: &HashOptions<'_>,
) -> Result<Crc64> {
    let (mut crc, end) = (Crc64::default(), range.1);
    // What is hashed so far, and the end of the data behind it that waits to be read.
    let (mut done, mut pending) = (range.0, range.0);
    let mut at = range.0;
    while at < end {
        let intervals = source.intervals(at, INTERVALS)?;
        if intervals.is_empty() {
            return Err(Error::invalid(format!("the image ends at {at}, before {end}")));
        }
        for interval in intervals.iter().take_while(|interval| interval.offset < end) {
            let Interval { offset, data, .. } = *interval;
            let stop = interval.end().min(end);
            at = stop;
            if data && (offset == pending || offset - pending <= SMALL_HOLE && pending > done) {
                pending = stop;
            } else if data {
                crc = read(source, crc, (done, pending), buf, options)?;
                crc = crc.then(Crc64::zeros(offset - pending));
                (done, pending) = (offset, stop);
            }
        }
    }
    crc = read(source, crc, (done, pending), buf, options)?;
    Ok(crc.then(Crc64::zeros(end - pending)))
}

fn read(
    source: &dyn Source,
    mut crc: Crc64,
    range: (u64, u64),
    buf: &mut [u8],
    options: &HashOptions<'_>,
) -> Result<Crc64> {
    let mut at = range.0;
    while at < range.1 {
        if (options.cancelled)() {
            return Err(Error::new(ErrorKind::Interrupted, "hashing was cancelled"));
        }
        let length = (range.1 - at).min(READ_BYTES);
        let buf = &mut buf[..length as usize];
        source.read_at(at, buf)?;
        crc = crc.then(Crc64::of(buf));
        at += length;
    }
    Ok(crc)
}

/// What [`hash_recorded`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hashed {
    /// The checksum; empty when an earlier run has already found the image corrupted.
    pub checksum: String,
    /// The content has changed although nobody changed it.
    pub silently_corrupted: bool,
}

/// Hashes an image unless its checksum is on record, and records it, by upstream's rules: a record
/// holds while the image's stamp stays; with `rehash` it is put to the test, and an image found to
/// differ is reported as silently corrupted from then on, its record kept as evidence.
///
/// `image` is the path the record belongs to (see [`Record::path`]), whether or not there is a file.
///
/// # Errors
/// As [`hash()`]; also when the image changed meanwhile.
pub fn hash_recorded(
    source: &dyn Source,
    image: &Path,
    stamp: &dyn Fn() -> Result<String>,
    rehash: bool,
    options: &HashOptions<'_>,
) -> Result<Hashed> {
    let before = stamp()?;
    let record = Record::load(image).unwrap_or_else(|error| {
        log::warn("checksum-record-ignored", &[("image", &image.display()), ("error", &error)]);
        None
    });
    let record = record.filter(|record| record.change_time == before);
    if record.as_ref().is_some_and(|record| record.silently_corrupted) {
        return Ok(Hashed { checksum: String::new(), silently_corrupted: true });
    }
    let record = record.filter(|record| !record.checksum.is_empty());
    if let (false, Some(record)) = (rehash, &record) {
        return Ok(Hashed { checksum: record.checksum.clone(), silently_corrupted: false });
    }
    let started = jiff::Timestamp::now().as_second();
    let checksum = hash(source, options)?;
    if stamp()? != before {
        if let Err(error) = Record::remove(image) {
            log::warn("checksum-record-stays", &[("error", &error)]);
        }
        let text = format!("`{}` has changed while it was hashed", image.display());
        return Err(Error::new(ErrorKind::Busy, text));
    }
    let new = match record {
        Some(old) if old.checksum != checksum => Record { silently_corrupted: true, ..old },
        _ => Record {
            method: METHOD.to_owned(),
            checksum,
            change_time: before,
            last_hashed_at: jiff::Timestamp::from_second(started)
                .map_or_else(|_| String::new(), |time| time.to_string()),
            silently_corrupted: false,
        },
    };
    if let Err(error) = new.store(image) {
        // The answer is right all the same; it will be computed again.
        log::warn("checksum-not-recorded", &[("error", &error)]);
    }
    Ok(Hashed { checksum: new.checksum, silently_corrupted: new.silently_corrupted })
}

#[cfg(test)]
mod tests;
