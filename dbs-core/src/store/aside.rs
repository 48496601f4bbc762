//! The metadata of a store, saved in a file before a repair writes over it, and put back.
//!
//! The file: a header of 4 KiB, then the bytes of each range, one range after the other. Zeros are
//! holes, and so are blocks that the device cannot read. The header, written last, has a checksum of
//! itself and one of each range.

use super::open::write_superblock;
use super::{recover, unreadable};
use crate::error::{Error, Result};
use crate::format::crc::{crc32c, crc32c_append};
use crate::format::superblock::{Claim, INCOMPAT_REPAIRING, Superblock};
use crate::format::{RegionKind, block};
use crate::io::Storage;
use crate::units::BLOCK_BYTES;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"DBSaside";
const VERSION: u32 = 2;
/// Without [`Header::after`]: what comes after the ranges is zeros.
const VERSION_1: u32 = 1;
/// Bytes of the header.
const HEADER_BYTES: u64 = BLOCK_BYTES;
/// Ranges there are at most: the metadata, and superblock copies at the end.
const RANGES: usize = 8;
/// Bytes copied at once.
const STEP: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Saved {
    offset: U64,
    length: U64,
    crc: U32,
    reserved: U32,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    crc: U32,
    store: [u8; 16],
    /// Bytes of the file or device.
    size: U64,
    count: U32,
    reserved: U32,
    ranges: [Saved; RANGES],
    /// The superblock that will be there when what this was saved for is done.
    after: After,
}

/// What of a superblock tells it from every other one of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct After {
    sequence: U64,
    clean_sequence: U64,
}

/// What is saved, besides the bytes.
pub(super) struct Origin<'a> {
    /// Uuid of the store.
    pub(super) store: [u8; 16],
    /// What is about to be written, as [`rewrite`](super::rewrite::rewrite) is told.
    pub(super) after: &'a Superblock,
    /// What is saved of blocks that the device cannot read, by their address; zeros of others.
    pub(super) stand_ins: &'a [(u64, Vec<u8>)],
}

impl Header {
    fn checksum(&self) -> u32 {
        let bare = Self { crc: 0.into(), ..*self };
        let length = match self.version.get() {
            VERSION_1 => size_of::<Self>() - size_of::<After>(),
            _ => size_of::<Self>(),
        };
        crc32c(&bare.as_bytes()[..length])
    }

    fn ranges(&self) -> &[Saved] {
        &self.ranges[..(self.count.get() as usize).min(RANGES)]
    }
}

/// Saves ranges of a store to an empty file, durably.
///
/// # Errors
/// `Io`, `NoSpace`.
pub(super) fn save(
    storage: &dyn Storage,
    origin: &Origin<'_>,
    ranges: &[Range<u64>],
    file: &File,
) -> Result<()> {
    assert!(ranges.len() <= RANGES, "there are few");
    let after = After {
        sequence: (origin.after.sequence + super::rewrite::CHANGES).into(),
        clean_sequence: origin.after.clean_sequence.into(),
    };
    let mut header = Header {
        magic: MAGIC,
        version: VERSION.into(),
        store: origin.store,
        after,
        size: storage.size_bytes().into(),
        count: (ranges.len() as u32).into(),
        ..Header::new_zeroed()
    };
    let mut at = HEADER_BYTES;
    for (range, saved) in ranges.iter().zip(&mut header.ranges) {
        let mut crc = 0;
        each_step(range, |part| {
            let mut bytes = vec![0; (part.end - part.start) as usize];
            for block in unreadable::read_blocks(storage, part.start, &mut bytes)? {
                let block = u64::from(block) * BLOCK_BYTES;
                let stand_in = origin.stand_ins.iter().find(|(at, _)| *at == part.start + block);
                if let Some((_, known)) = stand_in {
                    bytes[block as usize..][..known.len()].copy_from_slice(known);
                }
            }
            crc = crc32c_append(crc, &bytes);
            if bytes.iter().any(|byte| *byte != 0) {
                file.write_all_at(&bytes, at + (part.start - range.start))?;
            }
            Ok(())
        })
        .map_err(|error| Error::io(error, "saving the metadata aside failed"))?;
        let length = range.end - range.start;
        saved.offset = range.start.into();
        saved.length = length.into();
        saved.crc = crc.into();
        at += length;
    }
    header.crc = header.checksum().into();
    file.set_len(at)
        .and_then(|()| file.sync_all())
        .and_then(|()| file.write_all_at(header.as_bytes(), 0))
        .and_then(|()| file.sync_all())
        .map_err(|error| Error::io(error, "saving the metadata aside failed"))
}

/// Puts back what [`save`] saved. Until all of it is there, nobody opens the store. With `force` even
/// if the store may have been written since.
///
/// # Errors
/// `Invalid` if the file is none of these, is damaged or cut off, or is of another store than the
/// one that is there, or if that was written since; `Io`.
pub(super) fn put_back(storage: &dyn Storage, file: &File, force: bool) -> Result<()> {
    let header = read_header(file)?;
    if let Some(now) = recover::identity(storage)
        && now.uuid != header.store
    {
        return Err(Error::invalid(
            "the saved metadata belongs to another store: the uuids differ",
        ));
    }
    if header.size.get() != storage.size_bytes() {
        return Err(Error::invalid(format!(
            "the metadata was saved from a store of {} bytes, and this store has {}",
            header.size.get(),
            storage.size_bytes()
        )));
    }
    verify(&header, file)?;
    let failed = |error| Error::io(error, "putting the metadata back failed");
    if !force && !is_untouched(storage, &header, file).map_err(failed)? {
        return Err(Error::invalid(
            "the store was written since the metadata was saved, or differs from what was written \
             then. If the old metadata is put back, all later writes are lost, and volumes show \
             newer content where space was used again. Copy what you need first; `--force` puts \
             the metadata back all the same",
        ));
    }
    // A repaired store can be opened: not while it is half of one and half of the other.
    if let Ok((now, _)) = recover::read_superblock(storage) {
        let running = Superblock {
            sequence: now.sequence + 1,
            incompat: now.incompat | INCOMPAT_REPAIRING,
            ..now
        };
        write_superblock(storage, &running).map_err(failed)?;
    }
    let mut at = HEADER_BYTES;
    for saved in header.ranges() {
        let range = saved.offset.get()..saved.offset.get() + saved.length.get();
        // The first copy of the superblock comes last, the others when all else is durable.
        let skipped = if range.start == 0 { 2 * BLOCK_BYTES } else { 0 };
        let rest = range.start + skipped.min(saved.length.get())..range.end;
        if saved.length.get() > BLOCK_BYTES {
            copy_back(storage, file, at, &range, &rest).map_err(failed)?;
        }
        at += saved.length.get();
    }
    storage.flush().map_err(failed)?;
    let mut at = HEADER_BYTES;
    for saved in header.ranges() {
        let range = saved.offset.get()..saved.offset.get() + saved.length.get();
        if range.start == 0 {
            let second = BLOCK_BYTES..(2 * BLOCK_BYTES).min(range.end);
            copy_back(storage, file, at, &range, &second).map_err(failed)?;
        } else if saved.length.get() <= BLOCK_BYTES {
            copy_back(storage, file, at, &range, &range).map_err(failed)?;
        }
        at += saved.length.get();
    }
    storage.flush().map_err(failed)?;
    let first = 0..BLOCK_BYTES;
    copy_back(storage, file, HEADER_BYTES, &first, &first)
        .and_then(|()| storage.flush())
        .map_err(failed)
}

/// Whether the store is in a state that what this was saved for leaves, or leaves when it is cut off, or
/// that an undo leaves when it is. Whoever opens a store for writing changes its journal or superblock.
fn is_untouched(storage: &dyn Storage, header: &Header, file: &File) -> io::Result<bool> {
    let (sequence, clean) = (header.after.sequence.get(), header.after.clean_sequence.get());
    // One less is in the middle of writing, one more in the middle of an undo.
    let midway = |claim: &Claim| {
        let same = claim.clean_sequence == clean && claim.sequence.abs_diff(sequence) == 1;
        let known = same || header.version.get() == VERSION_1;
        claim.uuid == header.store && claim.repairing && known
    };
    if recover::claims(storage).iter().any(midway) {
        return Ok(true);
    }
    if let Ok((now, _)) = recover::read_superblock(storage)
        && (now.sequence, now.clean_sequence) == (sequence, clean)
    {
        // It was left empty.
        let ring = now.geometry.region(RegionKind::Journal);
        return each_until(&(ring.offset..ring.offset + ring.length), |part| {
            let mut bytes = vec![0; (part.end - part.start) as usize];
            storage.read_at(part.start, &mut bytes)?;
            Ok(block::is_blank(&bytes))
        });
    }
    // Nothing was written yet, or all was put back already.
    let mut at = HEADER_BYTES;
    for saved in header.ranges() {
        let from = saved.offset.get();
        let same = each_until(&(from..from + saved.length.get()), |part| {
            let mut bytes = [(); 2].map(|()| vec![0; (part.end - part.start) as usize]);
            unreadable::read_blocks(storage, part.start, &mut bytes[0])?;
            file.read_exact_at(&mut bytes[1], at + (part.start - from))?;
            Ok(bytes[0] == bytes[1])
        });
        if !same? {
            return Ok(false);
        }
        at += saved.length.get();
    }
    Ok(true)
}

/// The store that a file is of.
///
/// # Errors
/// `Invalid` if the file is none that [`save`] wrote.
pub(super) fn store_of(file: &File) -> Result<[u8; 16]> {
    Ok(read_header(file)?.store)
}

fn read_header(file: &File) -> Result<Header> {
    let mut header = Header::new_zeroed();
    file.read_exact_at(header.as_mut_bytes(), 0)
        .map_err(|_| Error::invalid("no saved metadata: the file is too short"))?;
    if header.magic != MAGIC {
        return Err(Error::invalid("no saved metadata: no magic `DBSaside`"));
    }
    let known = [VERSION, VERSION_1].contains(&header.version.get());
    if !known || header.crc.get() != header.checksum() {
        return Err(Error::invalid("the saved metadata is damaged, or of another version of dbs"));
    }
    let first = header.ranges().first();
    if first.is_none_or(|saved| saved.offset.get() != 0 || saved.length.get() < 2 * BLOCK_BYTES) {
        return Err(Error::invalid("the saved metadata does not begin with a superblock"));
    }
    let ends = header.ranges().iter().map(|s| s.offset.get().checked_add(s.length.get()));
    let fit = |end: Option<u64>| end.is_some_and(|end| end <= header.size.get());
    if !ends.clone().all(fit) {
        return Err(Error::invalid("the saved metadata does not fit the store it is of"));
    }
    Ok(header)
}

fn verify(header: &Header, file: &File) -> Result<()> {
    let mut at = HEADER_BYTES;
    for saved in header.ranges() {
        let mut crc = 0;
        each_step(&(at..at + saved.length.get()), |part| {
            let mut bytes = vec![0; (part.end - part.start) as usize];
            file.read_exact_at(&mut bytes, part.start)?;
            crc = crc32c_append(crc, &bytes);
            Ok(())
        })
        .map_err(|error| Error::io(error, "reading the saved metadata failed"))?;
        if crc != saved.crc.get() {
            return Err(Error::invalid("the saved metadata is damaged: checksum mismatch"));
        }
        at += saved.length.get();
    }
    Ok(())
}

/// Copies `part` of a saved `range`, whose bytes begin at `at` in the file.
fn copy_back(
    storage: &dyn Storage,
    file: &File,
    at: u64,
    range: &Range<u64>,
    part: &Range<u64>,
) -> io::Result<()> {
    each_step(part, |step| {
        let mut bytes = vec![0; (step.end - step.start) as usize];
        file.read_exact_at(&mut bytes, at + (step.start - range.start))?;
        storage.write_at(step.start, &bytes)
    })
}

/// Goes through a range for as long as it is told to; whether that was to the end.
fn each_until(
    range: &Range<u64>,
    mut go_on: impl FnMut(Range<u64>) -> io::Result<bool>,
) -> io::Result<bool> {
    let mut all = true;
    each_step(range, |part| {
        all = all && go_on(part)?;
        Ok(())
    })?;
    Ok(all)
}

fn each_step(
    range: &Range<u64>,
    mut act: impl FnMut(Range<u64>) -> io::Result<()>,
) -> io::Result<()> {
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + STEP);
        act(start..end)?;
        start = end;
    }
    Ok(())
}
