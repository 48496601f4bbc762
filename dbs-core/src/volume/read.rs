//! Blocking reads, of whatever is opened: one plan under one look at the metadata, one batch of device
//! reads, and the fence around both. Every blocking read of data goes this way, and what is encrypted is decrypted
//! here, after its checksums were compared.

use super::{ReadPart, blocks_of};
use crate::crypt::DataKey;
use crate::error::Result;
use crate::io::ReadRequest;
use crate::limits::EXTENTS_PER_WRITE;
use crate::meta::pieces::{Far, ReadPiece};
use crate::meta::{Meta, Step};
use crate::sabotage::{self, Bug};
use crate::store::backing::read_file;
use crate::store::{Backing, Inner};
use crate::units::{BLOCK_BYTES, VolumeId};
use std::sync::Arc;

impl Inner {
    /// Fills `buf` from `offset`, some extents at a time, each from where `plan` finds it (its offset and
    /// length are given). At least one step is taken, so that `plan` may refuse an empty range.
    pub(super) fn read_in_steps(
        &self,
        offset: u64,
        buf: &mut [u8],
        name: &dyn Fn() -> String,
        mut plan: impl FnMut(&mut Meta, u64, u64, &mut Vec<ReadPiece>) -> Step<MaybeKey>,
    ) -> Result<()> {
        let step = EXTENTS_PER_WRITE * self.extent_bytes;
        let (mut at, mut rest) = (offset, buf);
        loop {
            let count = rest.len().min(step - (at % step as u64) as usize);
            let (buf, after) = rest.split_at_mut(count);
            let mut part = [ReadPart { offset: at, buf }];
            self.read_parts(&mut part, name, None, |meta, part, pieces| {
                plan(meta, part.offset, part.buf.len() as u64, pieces)
            })?;
            (at, rest) = (at + count as u64, after);
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Fills the buffers of `parts` from where `plan` finds their blocks, all planned at one moment.
    /// It says what decrypts them, too. `name` is what errors call the source; the reads of `volume` are counted.
    ///
    /// # Errors
    /// Those of `plan`; `Io`, `Damaged`.
    pub(super) fn read_parts(
        &self,
        parts: &mut [ReadPart<'_>],
        name: &dyn Fn() -> String,
        volume: Option<VolumeId>,
        mut plan: impl FnMut(&mut Meta, &ReadPart<'_>, &mut Vec<ReadPiece>) -> Step<MaybeKey>,
    ) -> Result<()> {
        // Pieces of all parts one after the other, and where those of each end.
        let (mut pieces, mut ends) = (Vec::new(), Vec::with_capacity(parts.len()));
        let (fenced, files, key) = self.look(|meta| {
            let (mut found, mut key) = (Vec::new(), None);
            pieces.clear();
            ends.clear();
            for part in &*parts {
                found.clear();
                key = plan(meta, part, &mut found)?;
                pieces.append(&mut found);
                ends.push(pieces.len());
            }
            meta.requests += parts.len() as u64;
            for part in &*parts {
                let blocks = blocks_of(part.offset, part.buf.len() as u64);
                let bytes = (blocks.end - blocks.start) * BLOCK_BYTES;
                volume.iter().for_each(|volume| meta.count_read(*volume, bytes));
            }
            let any = pieces.iter().any(ReadPiece::is_on_device);
            let files = self.files_of(meta, &pieces)?;
            Ok((any.then(|| self.fence(meta)), files, key))
        })?;
        let mut files = files.iter();
        let mut reads = Vec::with_capacity(pieces.len());
        let (mut in_files, mut compressed) = (Vec::new(), Vec::new());
        let mut first = 0;
        for (part, end) in parts.iter_mut().zip(&ends) {
            let far = (&mut in_files, &mut compressed);
            lay_out(part, &pieces[first..*end], &mut files, &mut reads, far);
            first = *end;
        }
        let outcome = match &fenced {
            None => Ok(()),
            Some(fenced) => {
                let outcome = self.read_data(&mut reads, fenced.number());
                let outcome = outcome.map_err(|fault| self.find_unreadable(fault, &reads));
                outcome.and_then(|()| {
                    compressed.into_iter().try_for_each(|(extent, offset, buf)| {
                        self.read_compressed(extent, offset, buf, fenced.number())
                    })
                })
            }
        };
        // A file may be slow, and nothing in the store has to wait for it.
        drop((reads, fenced));
        let in_files =
            in_files.into_iter().try_for_each(|(file, at, buf)| read_file(file, at, buf));
        outcome.map_err(|fault| {
            let place = |address| place_of(parts, &ends, &pieces, address);
            self.read_error_at(fault, place, || format!("reading {} failed", name()))
        })?;
        if let Some(key) = key {
            decrypt(&key, parts, &ends, &pieces);
        }
        in_files
    }
}

/// What decrypts data, if it is encrypted.
pub(super) type MaybeKey = Option<Arc<DataKey>>;

/// Decrypts what was read from the device.
fn decrypt(key: &DataKey, parts: &mut [ReadPart<'_>], ends: &[usize], pieces: &[ReadPiece]) {
    let mut first = 0;
    for (part, end) in parts.iter_mut().zip(ends) {
        let (mut at, mut rest) = (part.offset, &mut *part.buf);
        for piece in &pieces[first..*end] {
            let length = (piece.blocks * BLOCK_BYTES - at % BLOCK_BYTES).min(rest.len() as u64);
            let (buf, after) = rest.split_at_mut(length as usize);
            if let Some(place) = piece.address {
                let number =
                    if sabotage::is(Bug::TweakByPlace) { place + at % BLOCK_BYTES } else { at };
                key.decrypt(number, buf);
            }
            (at, rest) = (at + length, after);
        }
        first = *end;
    }
}

/// A part of a read in a file: which, where, and into what.
type InFile<'a> = (&'a dyn Backing, u64, &'a mut [u8]);
/// A part of a read in a compressed extent: which, from which byte on, and into what.
type InExtent<'a> = (u32, usize, &'a mut [u8]);

/// Turns the pieces of a read into reads of the device, of files and of compressed extents; what is a hole is zeroed here.
/// `files` are those of all pieces that are in one.
fn lay_out<'a>(
    part: &'a mut ReadPart<'_>,
    pieces: &[ReadPiece],
    files: &mut std::slice::Iter<'a, Arc<dyn Backing>>,
    reads: &mut Vec<ReadRequest<'a>>,
    (in_files, compressed): (&mut Vec<InFile<'a>>, &mut Vec<InExtent<'a>>),
) {
    let mut at = part.offset;
    // The first block may begin before the range, the last one end behind it.
    let mut skip = part.offset % BLOCK_BYTES;
    let mut rest = &mut *part.buf;
    for piece in pieces {
        let length = (piece.blocks * BLOCK_BYTES - skip).min(rest.len() as u64) as usize;
        let (buf, after) = rest.split_at_mut(length);
        let file = piece.base().and_then(|_| files.next());
        match (piece.address, piece.far, file) {
            (None, _, Some(file)) => in_files.push((&**file, at, buf)),
            _ if buf.is_empty() => {}
            (Some(address), ..) => reads.push(ReadRequest { offset: address + skip, buf }),
            (None, Some(Far::Compressed { extent, block }), _) => {
                compressed.push((extent, (u64::from(block) * BLOCK_BYTES + skip) as usize, buf));
            }
            (None, ..) => buf.fill(0),
        }
        (rest, skip) = (after, 0);
        at += length as u64;
    }
}

/// Where in what is read the block at a byte of the device is.
fn place_of(
    parts: &[ReadPart<'_>],
    ends: &[usize],
    pieces: &[ReadPiece],
    address: u64,
) -> Option<u64> {
    let mut first = 0;
    for (part, end) in parts.iter().zip(ends) {
        let mut at = blocks_of(part.offset, 0).start * BLOCK_BYTES;
        for piece in &pieces[first..*end] {
            let length = piece.blocks * BLOCK_BYTES;
            if let Some(start) =
                piece.address.filter(|start| (*start..*start + length).contains(&address))
            {
                return Some(at + (address - start));
            }
            at += length;
        }
        first = *end;
    }
    None
}
