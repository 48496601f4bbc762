//! What workers do for data connections: everything that may wait. What may take long is done step by
//! step, so that others have their turn in between.

use super::gate::{Active, Target};
use super::request::{Op, Request, beyond_end, error_text};
use dbs_core::{Damage, Error, Volume};
use dbs_frontend::{DISCARD_MAX_BYTES, piece};
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

/// How far an unmap is, which takes a step for each piece of it.
#[derive(Default)]
pub(super) struct Progress {
    /// Bytes of the request that are done.
    done: u64,
    freed: u64,
}

/// Carries a request out, or a step of it: `None` if another is to follow. A bug costs one reply, not a
/// worker.
pub(super) fn step(
    active: &Active,
    request: &Request,
    progress: &mut Progress,
    payload: &[u8],
    buffers: &Buffers,
) -> Option<Outcome> {
    let result =
        catch_unwind(AssertUnwindSafe(|| try_step(active, request, progress, payload, buffers)));
    Some(match result {
        Ok(Ok(None)) => return None,
        Ok(Ok(Some(outcome))) => outcome,
        Ok(Err(Fault::Text(text))) => Outcome::Failed(text),
        Ok(Err(Fault::Damaged(damaged))) => Outcome::Damaged(damaged),
        Err(_) => Outcome::Failed("internal error of the replica".to_owned()),
    })
}

fn try_step(
    active: &Active,
    request: &Request,
    progress: &mut Progress,
    payload: &[u8],
    buffers: &Buffers,
) -> Result<Option<Outcome>, Fault> {
    match request.op {
        Op::Ping => {
            let healthy = active.events().healthy();
            return healthy.map(|()| Some(Outcome::Done(0))).map_err(Fault::Text);
        }
        Op::Flush => {
            let flushed = active.commit();
            let done = |()| Some(Outcome::Done(0));
            return flushed.map(done).map_err(|e| Fault::Text(e.to_string()));
        }
        Op::Unknown => return Ok(Some(Outcome::Done(0))),
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
    let outcome = match request.op {
        _ if length == 0 => Ok(Outcome::Done(0)),
        Op::Read => read(active, offset, length, buffers),
        Op::Write => write(active, offset, payload),
        Op::Heal => heal(active, offset, payload),
        _ => return unmap(active, offset, length, progress).map_err(failed),
    };
    outcome.map(Some).map_err(failed)
}

/// Unmaps the whole blocks inside a range, or a piece of it; the last one of the volume may be shorter.
fn unmap(
    active: &Active,
    offset: u64,
    length: u64,
    progress: &mut Progress,
) -> Result<Option<Outcome>, Error> {
    let (start, end) = (offset.next_multiple_of(BLOCK_BYTES), offset + length);
    let end = if end == active.size() { end } else { end - end % BLOCK_BYTES };
    let at = start + progress.done;
    if at < end {
        let length = piece(at, end, DISCARD_MAX_BYTES.into());
        progress.freed += active.events().unmap(at, length)?;
        progress.done += length;
        if at + length < end {
            return Ok(None);
        }
    }
    // More than the range where snapshots are freed along: more than a reply can say.
    Ok(Some(Outcome::Done(u32::try_from(progress.freed).unwrap_or(u32::MAX))))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ActiveEvents;
    use std::sync::{Arc, Mutex};

    const GIB: u64 = 1 << 30;

    /// Ranges that were unmapped.
    #[derive(Default)]
    struct Unmapped(Mutex<Vec<(u64, u64)>>);

    impl ActiveEvents for Unmapped {
        fn first_change(&self) {}
        fn unmap(&self, offset: u64, length: u64) -> Result<u64, Error> {
            self.0.lock().unwrap().push((offset, length));
            Ok(length / 2)
        }
        fn commit(&self) -> Result<(), Error> {
            Ok(())
        }
        fn healthy(&self) -> Result<(), String> {
            Ok(())
        }
    }

    /// A worker is free for others after each piece.
    #[test]
    fn a_long_unmap_takes_many_steps() {
        let events = Arc::new(Unmapped::default());
        let told: Arc<dyn ActiveEvents> = events.clone();
        let active = Active::new(Target::Null { size: 5 * GIB }, told);
        let most = u64::from(DISCARD_MAX_BYTES);
        // From the middle of a block to the middle of another one.
        let (start, end) = (GIB + 100, 5 * GIB - 5000);
        let request = Request::local(Op::Unmap, 1, start, (end - start) as u32);
        let (buffers, mut progress) = (Buffers::new(4096).unwrap(), Progress::default());
        let mut steps = 0;
        let outcome = loop {
            steps += 1;
            match step(&active, &request, &mut progress, &[], &buffers) {
                Some(outcome) => break outcome,
                None => assert_eq!(events.0.lock().unwrap().len(), steps, "one piece in a step"),
            }
        };
        let pieces = events.0.lock().unwrap();
        assert_eq!(steps as u64, 4 * GIB / most);
        assert!(pieces.iter().all(|piece| piece.1 > 0 && piece.1 <= most));
        assert!(pieces.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0), "{pieces:?}");
        let whole = (GIB + 4096, 5 * GIB - 8192);
        assert_eq!((pieces[0].0, pieces.iter().map(|p| p.1).sum()), (whole.0, whole.1 - whole.0));
        let freed = (whole.1 - whole.0) / 2;
        assert!(matches!(outcome, Outcome::Done(bytes) if u64::from(bytes) == freed));
    }
}
