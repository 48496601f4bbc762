//! A layer by blocks, as two DBS replicas compare and copy it: what each block is, and its bytes.

use dbs_core::io::buffer::AlignedBuf;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::ops::Range;

/// Bytes in a block.
pub const BLOCK: u64 = 4096;
/// Longest window: what is read, compared and sent at once.
pub const WINDOW: u64 = 1 << 20;
/// Bytes of a digest.
pub const DIGEST: usize = 16;
/// What stands for the digest of a damaged block: no block's has come to this.
const DAMAGED: [u8; DIGEST] = [0xff; DIGEST];
/// Ranges of a map asked for at once.
const MAP_RANGES: usize = 1024;

/// What blocks of a layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The layer below shows through.
    Absent,
    /// Zeros, stored as such: they hide the layer below.
    Zero,
    /// Stored bytes.
    Data,
}

/// Some blocks of one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First byte, a multiple of [`BLOCK`].
    pub offset: u64,
    /// Bytes: whole blocks, except at the layer's end.
    pub length: u64,
    /// What they are.
    pub state: State,
}

impl Run {
    /// The first byte behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// A layer to read. All calls block.
pub trait Layer: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// What the blocks are: runs in order, without gaps, from `offset` on, at most `limit` of them.
    /// The last one ends with the range, or where the next call should start.
    ///
    /// # Errors
    /// `Invalid` outside the layer.
    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Run>>;

    /// The bytes of this layer alone; what is no data reads as zeros.
    ///
    /// # Errors
    /// `Invalid` outside the layer, `Io`.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
}

/// A layer being received, into an older version of it or into nothing.
pub trait LayerMut: Layer {
    /// Makes whole blocks data (at the layer's end a shorter one).
    ///
    /// # Errors
    /// `NoSpace`, `Io`, `Invalid` when the layer may no longer be written.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;

    /// Makes whole blocks zeros.
    ///
    /// # Errors
    /// As [`LayerMut::write_at`].
    fn zero(&self, offset: u64, length: u64) -> Result<()>;

    /// Makes whole blocks absent.
    ///
    /// # Errors
    /// As [`LayerMut::write_at`].
    fn clear(&self, offset: u64, length: u64) -> Result<()>;
}

/// A part of a layer.
#[derive(Debug, PartialEq, Eq)]
pub enum Part {
    /// Nothing but absent blocks.
    Gap(Range<u64>),
    /// Something, of at most [`WINDOW`] bytes and inside one aligned window.
    Window(Window),
}

/// A piece of a layer small enough to be held in memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Window {
    /// Where.
    pub span: Range<u64>,
    /// What, in order and without gaps.
    pub runs: Vec<Run>,
}

impl Window {
    /// What the layer holds at `span`, which is at most [`WINDOW`] long.
    ///
    /// # Errors
    /// Of the layer.
    pub fn at(layer: &dyn Layer, span: Range<u64>) -> Result<Self> {
        let mut cursor = Cursor::new(layer, span.clone());
        let mut runs = Vec::new();
        while let Some(run) = cursor.take(span.end)? {
            runs.push(run);
        }
        Ok(Self { span, runs })
    }

    /// The digests of its blocks in `layer`, one after the other. That of a damaged one is nobody's.
    ///
    /// # Errors
    /// Of the layer.
    pub fn digests(self, layer: &dyn Layer) -> Result<Vec<u8>> {
        let runs = self.runs.clone();
        match self.read(layer) {
            Ok(content) => return Ok(content.digests()),
            Err(error) if is_damage(&error) => {}
            Err(error) => return Err(error),
        }
        let mut digests = Vec::new();
        for run in runs {
            for at in (run.offset..run.end()).step_by(BLOCK as usize) {
                let length = BLOCK.min(run.end() - at);
                let block = Run { offset: at, length, state: run.state };
                match (Self { span: at..at + length, runs: vec![block] }).read(layer) {
                    Ok(content) => digests.extend(content.digests()),
                    Err(error) if is_damage(&error) => digests.extend(DAMAGED),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(digests)
    }

    /// Reads its data.
    ///
    /// # Errors
    /// Of the layer.
    pub fn read(self, layer: &dyn Layer) -> Result<Content> {
        let mut data = self.runs.iter().filter(|run| run.state == State::Data);
        let start = data.next().map_or(self.span.start, |run| run.offset);
        let mut ends = self.runs.iter().rev().filter(|run| run.state == State::Data);
        let end = ends.next().map_or(start, Run::end);
        let mut bytes = AlignedBuf::zeroed((end - start) as usize);
        if end > start {
            layer.read_at(start, &mut bytes)?;
        }
        Ok(Content { window: self, start, bytes })
    }
}

/// A window with its bytes.
#[derive(Debug)]
pub struct Content {
    /// Which.
    pub window: Window,
    /// Offset in the layer of the first of `bytes`.
    pub start: u64,
    /// From the first data block to the last.
    pub bytes: AlignedBuf,
}

impl Content {
    /// The bytes of a part of one of its data runs.
    #[must_use]
    pub fn slice(&self, offset: u64, length: u64) -> &[u8] {
        let from = (offset - self.start) as usize;
        &self.bytes[from..from + length as usize]
    }

    /// The digests of its blocks, one after the other.
    #[must_use]
    pub fn digests(&self) -> Vec<u8> {
        let span = &self.window.span;
        let mut digests = Vec::with_capacity((blocks(span) as usize) * DIGEST);
        for run in &self.window.runs {
            let mut at = run.offset;
            while at < run.end() {
                let length = BLOCK.min(run.end() - at);
                digests.extend_from_slice(&match run.state {
                    State::Data => digest(self.slice(at, length)),
                    other => marker(other),
                });
                at += length;
            }
        }
        digests
    }
}

/// Blocks in a range that begins with one.
#[must_use]
pub fn blocks(span: &Range<u64>) -> u64 {
    (span.end - span.start).div_ceil(BLOCK)
}

/// The digest of a data block.
fn digest(block: &[u8]) -> [u8; DIGEST] {
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&blake3::hash(block).as_bytes()[..DIGEST]);
    digest
}

/// What stands for the digest of a block without data.
fn marker(state: State) -> [u8; DIGEST] {
    u128::from(state == State::Zero).to_le_bytes()
}

/// The digest of a layer's map.
///
/// # Errors
/// Of the layer.
pub fn map_digest(layer: &dyn Layer) -> Result<[u8; DIGEST]> {
    let mut hasher = blake3::Hasher::new();
    let size = layer.size();
    let mut add = |run: Run| {
        hasher.update(&run.offset.to_le_bytes());
        hasher.update(&run.end().to_le_bytes());
        hasher.update(&[run.state as u8]);
    };
    let mut cursor = Cursor::new(layer, 0..size);
    let mut last: Option<Run> = None;
    while let Some(run) = cursor.take(size)? {
        match &mut last {
            Some(last) if last.state == run.state => last.length += run.length,
            last => last.replace(run).into_iter().for_each(&mut add),
        }
    }
    last.into_iter().for_each(add);
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&hasher.finalize().as_bytes()[..DIGEST]);
    Ok(digest)
}

/// Walks over a range of a layer, part by part.
pub struct Cursor<'a> {
    layer: &'a dyn Layer,
    at: u64,
    end: u64,
    known: VecDeque<Run>,
}

impl<'a> Cursor<'a> {
    /// At the start of a range inside the layer.
    #[must_use]
    pub fn new(layer: &'a dyn Layer, range: Range<u64>) -> Self {
        Self { layer, at: range.start, end: range.end, known: VecDeque::new() }
    }

    /// The next part; `None` at the end. Neighbouring gaps may come apart.
    ///
    /// # Errors
    /// Of the layer.
    pub fn next_part(&mut self) -> Result<Option<Part>> {
        let start = self.at;
        let Some(first) = self.peek()? else { return Ok(None) };
        if first.state == State::Absent {
            let end = first.end();
            self.take(end)?;
            return Ok(Some(Part::Gap(start..end)));
        }
        let border = (start / WINDOW + 1) * WINDOW;
        let mut runs = Vec::new();
        while let Some(run) = self.take(border)? {
            runs.push(run);
        }
        // What is absent at its end may be the start of a gap.
        if let Some(last) = runs.last().copied().filter(|last| last.state == State::Absent) {
            runs.pop();
            self.at = last.offset;
            self.known.push_front(last);
        }
        Ok(Some(Part::Window(Window { span: start..self.at, runs })))
    }

    /// The next run, cut off at `border`; `None` there and at the end.
    fn take(&mut self, border: u64) -> Result<Option<Run>> {
        if self.at >= border {
            return Ok(None);
        }
        let Some(run) = self.peek()? else { return Ok(None) };
        let length = run.length.min(border - run.offset);
        self.at += length;
        self.known.pop_front();
        if length < run.length {
            let rest = Run { offset: self.at, length: run.length - length, state: run.state };
            self.known.push_front(rest);
        }
        Ok(Some(Run { length, ..run }))
    }

    fn peek(&mut self) -> Result<Option<Run>> {
        if self.at >= self.end {
            return Ok(None);
        }
        if self.known.is_empty() {
            let runs = self.layer.map(self.at, self.end - self.at, MAP_RANGES)?;
            self.known.extend(runs.into_iter().filter(|run| run.length > 0));
        }
        match self.known.front() {
            Some(run) if run.offset == self.at => Ok(Some(*run)),
            _ => {
                let text = format!("the map of a layer does not go on at {}", self.at);
                Err(Error::new(ErrorKind::Corrupt, text))
            }
        }
    }
}

/// Whether some block is not what was written, or cannot be read: another replica may have it.
pub fn is_damage(error: &Error) -> bool {
    error.kind() == ErrorKind::Damaged || error.damage().is_some()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests;
