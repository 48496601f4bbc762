//! What workers do for data connections: everything that may wait.

use super::gate::{Active, Target};
use super::request::{Op, Request, beyond_end, error_text};
use dbs_core::{Damage, Error, Volume};
use dbs_reactor::{Buf, Buffers};
use longhorn_wire::frame::Damaged;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What unmaps work on.
const BLOCK_BYTES: u64 = 4096;
/// Writes up to this are carried out in one step: it is half of what the smallest extents make it.
const STEP_BYTES: u64 = 1 << 20;
/// Reads on a volume are of whole sectors of so many bytes.
const SECTOR_BYTES: u64 = 512;

/// How a request has ended.
pub enum Outcome {
    /// Done, about so many bytes.
    Done(u32),
    /// This part of the buffer is what was read.
    Data(Buf, Range<usize>),
    /// Data is not what was written; nothing was changed.
    Damaged(Damaged),
    /// The text of the error.
    Failed(String),
}

/// Why a request failed.
enum Fault {
    Damaged(Damaged),
    Text(String),
}

impl From<String> for Fault {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// Carries a request out. A bug costs one reply, not a worker.
pub(super) fn execute(
    active: &Active,
    request: &Request,
    payload: &[u8],
    buffers: &Buffers,
) -> Outcome {
    let result = catch_unwind(AssertUnwindSafe(|| try_execute(active, request, payload, buffers)));
    match result {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(Fault::Text(text))) => Outcome::Failed(text),
        Ok(Err(Fault::Damaged(damaged))) => Outcome::Damaged(damaged),
        Err(_) => Outcome::Failed("internal error of the replica".to_owned()),
    }
}

fn try_execute(
    active: &Active,
    request: &Request,
    payload: &[u8],
    buffers: &Buffers,
) -> Result<Outcome, Fault> {
    match request.op {
        Op::Ping => {
            let healthy = active.events().healthy();
            return healthy.map(|()| Outcome::Done(0)).map_err(Fault::Text);
        }
        Op::Flush => {
            let flushed = active.commit();
            return flushed.map(|()| Outcome::Done(0)).map_err(|e| Fault::Text(e.to_string()));
        }
        Op::Unknown => return Ok(Outcome::Done(0)),
        Op::Read | Op::Write | Op::Unmap | Op::Heal => {}
    }
    let (offset, length) = request.range()?;
    if length > 0
        && let Some(text) = beyond_end(request, active.size())
    {
        return Err(Fault::Text(text));
    }
    if request.changes() {
        active.change();
    }
    let failed = |error: Error| {
        let text = error_text(request, active.size(), &error);
        match error.damage() {
            Some(Damage { offset, in_snapshot }) => {
                Fault::Damaged(Damaged { offset, in_snapshot, text })
            }
            None => Fault::Text(text),
        }
    };
    match request.op {
        _ if length == 0 => Ok(Outcome::Done(0)),
        Op::Read => read(active, offset, length, buffers).map_err(failed),
        Op::Write => write(active, offset, payload).map_err(failed),
        Op::Heal => heal(active, offset, payload).map_err(failed),
        _ => unmap(active, offset, length).map_err(failed),
    }
}

/// Unmaps the whole blocks inside a range; the last one of the volume may be shorter.
fn unmap(active: &Active, offset: u64, length: u64) -> Result<Outcome, Error> {
    let (start, end) = (offset.next_multiple_of(BLOCK_BYTES), offset + length);
    let end = if end == active.size() { end } else { end - end % BLOCK_BYTES };
    if start >= end {
        return Ok(Outcome::Done(0));
    }
    let freed = active.events().unmap(start, end - start)?;
    // More than the range where snapshots are freed along: more than a reply can say.
    Ok(Outcome::Done(u32::try_from(freed).unwrap_or(u32::MAX)))
}

fn read(active: &Active, offset: u64, length: u64, buffers: &Buffers) -> Result<Outcome, Error> {
    if let Target::File(file) = active.target() {
        let mut buf = buffers.take(length as usize);
        file.read_at(offset, &mut buf)?;
        return Ok(Outcome::Data(buf, 0..length as usize));
    }
    let start = offset - offset % SECTOR_BYTES;
    // Sizes of volumes are of whole sectors: this stays inside.
    let end = (offset + length).next_multiple_of(SECTOR_BYTES);
    let mut buf = buffers.take((end - start) as usize);
    match active.target() {
        Target::Volume { volume, .. } => volume.read_at(start, &mut buf)?,
        Target::File(_) | Target::Null { .. } => buf.fill(0),
    }
    let skip = (offset - start) as usize;
    Ok(Outcome::Data(buf, skip..skip + length as usize))
}

fn write(active: &Active, offset: u64, payload: &[u8]) -> Result<Outcome, Error> {
    match active.target() {
        Target::Volume { volume, .. } => {
            try_edges(volume, offset, payload.len() as u64)?;
            volume.write_bytes_at(offset, payload)?;
        }
        Target::File(file) => file.write_at(offset, payload)?,
        Target::Null { .. } => {}
    }
    Ok(Outcome::Done(payload.len() as u32))
}

/// Reads the blocks at the edges of a write that is carried out in several steps: if one is damaged,
/// that must be said before anything is written.
fn try_edges(volume: &Volume, offset: u64, length: u64) -> Result<(), Error> {
    if length <= STEP_BYTES {
        return Ok(());
    }
    let end = offset + length;
    let mut block = [0; BLOCK_BYTES as usize];
    for edge in [offset, end].into_iter().filter(|edge| !edge.is_multiple_of(BLOCK_BYTES)) {
        let start = edge - edge % BLOCK_BYTES;
        let length = BLOCK_BYTES.min(volume.size() - start) as usize;
        volume.read_at(start, &mut block[..length])?;
    }
    Ok(())
}

/// Writes damaged blocks again. What is not of whole blocks, but for the volume's last one, is refused.
fn heal(active: &Active, offset: u64, payload: &[u8]) -> Result<Outcome, Error> {
    let Target::Volume { volume, .. } = active.target() else { return Ok(Outcome::Done(0)) };
    let (length, size) = (payload.len() as u64, active.size());
    if offset + length < size || length.is_multiple_of(BLOCK_BYTES) {
        return volume.heal(offset, payload).map(|bytes| Outcome::Done(bytes as u32));
    }
    // Behind the end of the volume its last block is zeros.
    let mut whole = vec![0; length.next_multiple_of(BLOCK_BYTES) as usize];
    whole[..payload.len()].copy_from_slice(payload);
    volume.heal(offset, &whole).map(|bytes| Outcome::Done(bytes as u32))
}
