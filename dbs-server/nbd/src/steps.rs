//! What is done for a request where that may take long: step by step, none of them longer than some
//! milliseconds on a usual disk, so that others have their turn between any two.

use super::export::{BASE_ALLOCATION, Export, Extent, Failure, Result, ZeroOptions, push_extent};
use super::session::{Admitted, EXTENTS_MAX, Operation, Reply, SPARSE_READ_BYTES, Session};
use super::wire::reply::{FLAG_DONE, ReplyTo};
use super::wire::{Errno, extent_flag};
use dbs_core::volume::Finish;
use dbs_frontend::{DISCARD_MAX_BYTES, ZEROES_MAX_BYTES, piece};
use std::vec;

/// Bytes read or written in one step.
const TRANSFER_MAX_BYTES: u64 = 4 << 20;
/// Most extents of a read worth sending one by one.
const SPARSE_EXTENTS_MAX: usize = 16;

/// A request between two steps.
pub(super) struct Steps {
    to: ReplyTo,
    state: State,
    /// What is done takes a commit before it is acknowledged, or the client wants one.
    commit: bool,
}

/// What is left to do.
enum State {
    /// Nothing, as it is refused.
    Failed(Failure),
    Flush,
    Change(Change),
    Read(Reading),
    Cache {
        at: u64,
        end: u64,
    },
    Status(Status),
}

/// A write, or the like.
struct Change {
    kind: Kind,
    start: u64,
    at: u64,
    end: u64,
}

#[derive(Clone, Copy)]
enum Kind {
    Write,
    Trim,
    Zero(ZeroOptions),
}

/// A read, in chunks of data and of holes.
struct Reading {
    at: u64,
    chunks: vec::IntoIter<Extent>,
    /// The bytes of the chunk of data that is being read, and how many are there.
    data: Vec<u8>,
    filled: usize,
    parts: Vec<Vec<u8>>,
}

/// Block status, one context after the other.
struct Status {
    offset: u64,
    length: u64,
    limit: usize,
    wanted: vec::IntoIter<u32>,
    context: u32,
    /// What is known of it, and of how many bytes.
    extents: Vec<Extent>,
    known: u64,
    parts: Vec<Vec<u8>>,
}

/// How far a request is.
pub(super) enum Progress {
    /// Another step is to follow.
    More,
    /// It is over.
    Reply(Reply),
    /// It is done, and to be answered behind a commit.
    Commit,
}

impl Steps {
    /// A request at its beginning, with its payload.
    pub fn new(session: &Session, admitted: &Admitted, payload: &[u8]) -> Self {
        let to = admitted.to;
        let begun = match &admitted.operation {
            Ok(operation) => begin(session, &to, *operation, payload),
            Err(failure) => Err(failure.clone()),
        };
        let (state, commit) = begun.unwrap_or_else(|failure| (State::Failed(failure), false));
        Self { to, state, commit }
    }

    /// Whether it takes more than one step.
    pub fn is_long(&self) -> bool {
        match &self.state {
            State::Failed(_) | State::Flush => false,
            State::Change(change) => change.length() < change.end - change.start,
            State::Cache { at, end } => piece(*at, *end, TRANSFER_MAX_BYTES) < end - at,
            State::Read(reading) => !reading.parts.is_empty() || reading.filled > 0,
            State::Status(status) => !status.parts.is_empty() || status.known > 0,
        }
    }

    /// Takes a step; not after it has said that the request is over.
    pub fn step(&mut self, session: &Session, payload: &[u8]) -> Progress {
        self.try_step(session, payload)
            .unwrap_or_else(|failure| Progress::Reply(Reply::failed(&self.to, &failure)))
    }

    fn try_step(&mut self, session: &Session, payload: &[u8]) -> Result<Progress> {
        let export = &*session.export;
        let parts = match &mut self.state {
            State::Failed(failure) => return Err(failure.clone()),
            State::Flush => {
                export.flush()?;
                vec![self.to.done().to_vec()]
            }
            State::Change(change) => {
                self.commit |= change.step(export, payload)? == Finish::Commit;
                if change.at < change.end {
                    return Ok(Progress::More);
                }
                if self.commit {
                    return Ok(Progress::Commit);
                }
                vec![self.to.done().to_vec()]
            }
            State::Cache { at, end } => {
                let length = piece(*at, *end, TRANSFER_MAX_BYTES);
                export.cache(*at, length)?;
                *at += length;
                if *at < *end {
                    return Ok(Progress::More);
                }
                vec![self.to.done().to_vec()]
            }
            State::Read(reading) => match reading.step(&self.to, export)? {
                None => return Ok(Progress::More),
                Some(parts) => parts,
            },
            State::Status(status) => match status.step(&self.to, session)? {
                None => return Ok(Progress::More),
                Some(parts) => parts,
            },
        };
        Ok(Progress::Reply(Reply { parts }))
    }
}

impl Session {
    /// Does what an admitted request asks for, given its payload, and makes the reply.
    #[must_use]
    pub fn run(&self, admitted: &Admitted, payload: &[u8]) -> Reply {
        let mut steps = Steps::new(self, admitted, payload);
        loop {
            match steps.step(self, payload) {
                Progress::More => {}
                Progress::Reply(reply) => return reply,
                Progress::Commit => return self.commit(admitted),
            }
        }
    }
}

/// What an operation begins as, and whether it ends with a commit whatever comes.
fn begin(
    session: &Session,
    to: &ReplyTo,
    operation: Operation,
    payload: &[u8],
) -> Result<(State, bool)> {
    let change = |kind, start, length| Change { kind, start, at: start, end: start + length };
    let status = |offset, length, one, wanted: Vec<u32>| {
        let limit = if one { 1 } else { EXTENTS_MAX };
        State::Status(Status::new(offset, length, limit, wanted))
    };
    Ok(match operation {
        Operation::Read { offset, length, whole } => {
            let export = &*session.export;
            let reading = match to.style.chunked() {
                // It is answered by chunks without any.
                true if length == 0 => Reading::of(offset, Vec::new()),
                true if !whole => Reading::of(offset, chunks(export, offset, length)?),
                _ => Reading::of(offset, vec![Extent { length, flags: 0 }]),
            };
            (State::Read(reading), false)
        }
        Operation::Write { offset, fua } => {
            (State::Change(change(Kind::Write, offset, payload.len() as u64)), fua)
        }
        Operation::Trim { offset, length, fua } => {
            (State::Change(change(Kind::Trim, offset, length)), fua)
        }
        Operation::Zero { offset, length, options } => {
            session.export.check_zeroes(offset, length, options)?;
            (State::Change(change(Kind::Zero(options), offset, length)), options.fua)
        }
        Operation::Flush => (State::Flush, false),
        Operation::Cache { offset, length } => {
            (State::Cache { at: offset, end: offset + length }, false)
        }
        Operation::Status { offset, length, one } => {
            let wanted = (0..session.contexts.len() as u32).collect();
            (status(offset, length, one, wanted), false)
        }
        Operation::StatusOf { offset, one } => {
            let (length, wanted) = session.status_payload(offset, payload)?;
            (status(offset, length, one, wanted), false)
        }
    })
}

impl Change {
    /// Bytes of the next step.
    fn length(&self) -> u64 {
        let most = match self.kind {
            Kind::Write => TRANSFER_MAX_BYTES,
            Kind::Zero(ZeroOptions { no_hole: true, .. }) => ZEROES_MAX_BYTES.into(),
            Kind::Trim | Kind::Zero(_) => DISCARD_MAX_BYTES.into(),
        };
        piece(self.at, self.end, most)
    }

    fn step(&mut self, export: &dyn Export, payload: &[u8]) -> Result<Finish> {
        let (at, length) = (self.at, self.length());
        self.at += length;
        match self.kind {
            Kind::Write => {
                let first = (at - self.start) as usize;
                export.write(at, &payload[first..first + length as usize])
            }
            Kind::Trim => export.trim(at, length),
            Kind::Zero(options) => export.write_zeroes(at, length, options),
        }
    }
}

impl Reading {
    fn of(offset: u64, chunks: Vec<Extent>) -> Self {
        let parts = Vec::with_capacity(2 * chunks.len());
        Self { at: offset, chunks: chunks.into_iter(), data: Vec::new(), filled: 0, parts }
    }

    /// Reads some; the parts of the reply once all is read.
    fn step(&mut self, to: &ReplyTo, export: &dyn Export) -> Result<Option<Vec<Vec<u8>>>> {
        if self.filled < self.data.len() {
            return self.fill(to, export);
        }
        let Some(chunk) = self.chunks.next() else {
            return Ok(Some(vec![to.done().to_vec()]));
        };
        if chunk.flags & extent_flag::ZERO == 0 {
            (self.data, self.filled) = (vec![0; chunk.length as usize], 0);
            return self.fill(to, export);
        }
        self.parts.push(to.hole(self.flags(), self.at, chunk.length as u32).to_vec());
        self.at += chunk.length;
        Ok(self.over())
    }

    fn fill(&mut self, to: &ReplyTo, export: &dyn Export) -> Result<Option<Vec<Vec<u8>>>> {
        let (filled, length) = (self.filled as u64, self.data.len() as u64);
        let at = self.at + filled;
        let count = piece(at, self.at + length, TRANSFER_MAX_BYTES) as usize;
        export.read(at, &mut self.data[self.filled..self.filled + count])?;
        self.filled += count;
        if self.filled < self.data.len() {
            return Ok(None);
        }
        let data = std::mem::take(&mut self.data);
        self.filled = 0;
        self.parts.push(to.data_head(self.flags(), self.at, data.len()).to_vec());
        self.parts.push(data);
        self.at += length;
        Ok(self.over())
    }

    fn flags(&self) -> u16 {
        if self.chunks.len() == 0 { FLAG_DONE } else { 0 }
    }

    fn over(&mut self) -> Option<Vec<Vec<u8>>> {
        (self.chunks.len() == 0).then(|| std::mem::take(&mut self.parts))
    }
}

impl Status {
    fn new(offset: u64, length: u64, limit: usize, wanted: Vec<u32>) -> Self {
        let parts = Vec::with_capacity(wanted.len());
        let mut wanted = wanted.into_iter();
        // There is one: a request without any is not admitted.
        let context = wanted.next().unwrap_or_default();
        Self { offset, length, limit, wanted, context, extents: Vec::new(), known: 0, parts }
    }

    /// Looks at some; the parts of the reply once all is known.
    fn step(&mut self, to: &ReplyTo, session: &Session) -> Result<Option<Vec<Vec<u8>>>> {
        let name = session.contexts.get(self.context as usize);
        let name = name.ok_or_else(|| Failure::invalid("no such context"))?;
        let range = (self.offset + self.known, self.length - self.known);
        // One more than is told, so that the last of these is known to its end.
        let most = self.limit + 1 - self.extents.len();
        for extent in status(&*session.export, name, range, most)? {
            push_extent(&mut self.extents, extent.length, extent.flags);
            self.known += extent.length;
        }
        if self.known < self.length && self.extents.len() <= self.limit {
            return Ok(None);
        }
        self.extents.truncate(self.limit);
        self.known = 0;
        // None is longer than the request, so that compact ones fit their 32 bits.
        let descriptors: Vec<(u64, u32)> =
            self.extents.drain(..).map(|extent| (extent.length, extent.flags)).collect();
        let flags = if self.wanted.len() == 0 { FLAG_DONE } else { 0 };
        self.parts.push(to.block_status(flags, self.context, &descriptors));
        match self.wanted.next() {
            Some(next) => {
                self.context = next;
                Ok(None)
            }
            None => Ok(Some(std::mem::take(&mut self.parts))),
        }
    }
}

/// A range to read, cut into data and holes where that is worth it, else as one piece of data.
fn chunks(export: &dyn Export, offset: u64, length: u64) -> Result<Vec<Extent>> {
    let (mut found, mut known) = (Vec::new(), 0);
    while length >= SPARSE_READ_BYTES && known < length && found.len() <= SPARSE_EXTENTS_MAX {
        let range = (offset + known, length - known);
        for extent in status(export, BASE_ALLOCATION, range, SPARSE_EXTENTS_MAX + 1)? {
            push_extent(&mut found, extent.length, extent.flags);
            known += extent.length;
        }
    }
    if found.is_empty() || found.len() > SPARSE_EXTENTS_MAX {
        return Ok(vec![Extent { length, flags: 0 }]);
    }
    Ok(found)
}

/// The export's answer, held to its contract: a bug there must not break the protocol here.
fn status(
    export: &dyn Export,
    context: &str,
    (offset, length): (u64, u64),
    limit: usize,
) -> Result<Vec<Extent>> {
    let mut extents = export.block_status(context, offset, length, limit)?;
    let mut left = length;
    extents.truncate(limit);
    extents.retain_mut(|extent| {
        extent.length = extent.length.min(left);
        left -= extent.length;
        extent.length > 0
    });
    if extents.is_empty() {
        return Err(Failure::new(Errno::Io, format!("no status for {context} at {offset}")));
    }
    Ok(extents)
}
