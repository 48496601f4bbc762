//! What workers do for data connections: everything that may wait.

use super::gate::{Active, Target};
use super::request::{Op, Request, beyond_end, error_text};
use dbs_core::Error;
use dbs_reactor::{Buf, Buffers};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What unmaps work on.
const BLOCK_BYTES: u64 = 4096;
/// Reads on a volume are of whole sectors of so many bytes.
const SECTOR_BYTES: u64 = 512;

/// How a request has ended.
pub(crate) enum Outcome {
    /// Done, about so many bytes.
    Done(u32),
    /// This part of the buffer is what was read.
    Data(Buf, Range<usize>),
    /// The text of the error.
    Failed(String),
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
        Ok(Err(text)) => Outcome::Failed(text),
        Err(_) => Outcome::Failed("internal error of the replica".to_owned()),
    }
}

fn try_execute(
    active: &Active,
    request: &Request,
    payload: &[u8],
    buffers: &Buffers,
) -> Result<Outcome, String> {
    match request.op {
        Op::Ping => return active.events().healthy().map(|()| Outcome::Done(0)),
        Op::Flush => {
            let flushed = active.commit();
            return flushed.map(|()| Outcome::Done(0)).map_err(|error| error.to_string());
        }
        Op::Unknown => return Ok(Outcome::Done(0)),
        Op::Read | Op::Write | Op::Unmap => {}
    }
    let (offset, length) = request.range()?;
    if length > 0
        && let Some(text) = beyond_end(request, active.size())
    {
        return Err(text);
    }
    if request.changes() {
        active.change();
    }
    let failed = |error: Error| error_text(request, active.size(), &error);
    match request.op {
        _ if length == 0 => Ok(Outcome::Done(0)),
        Op::Read => read(active, offset, length, buffers).map_err(failed),
        Op::Write => write(active, offset, payload).map_err(failed),
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
    let start = offset - offset % SECTOR_BYTES;
    // Sizes of volumes are of whole sectors: this stays inside.
    let end = (offset + length).next_multiple_of(SECTOR_BYTES);
    let mut buf = buffers.take((end - start) as usize);
    match active.target() {
        Target::Volume { volume, .. } => volume.read_at(start, &mut buf)?,
        Target::Null { .. } => buf.fill(0),
    }
    let skip = (offset - start) as usize;
    Ok(Outcome::Data(buf, skip..skip + length as usize))
}

fn write(active: &Active, offset: u64, payload: &[u8]) -> Result<Outcome, Error> {
    if let Target::Volume { volume, .. } = active.target() {
        volume.write_bytes_at(offset, payload)?;
    }
    Ok(Outcome::Done(payload.len() as u32))
}
