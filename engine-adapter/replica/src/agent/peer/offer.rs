//! The source's side of a fetch: what the other does not have of a layer.

use super::layer::{
    BLOCK, Content, Cursor, DIGEST, Layer, Part, Run, State, WINDOW, Window, blocks,
};
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::{Error, Result};
use longhorn_wire::proto::dbs::piece::State as WireState;
use longhorn_wire::proto::dbs::{FetchKnown, FetchResponse, Piece};
use prost::bytes::Bytes;
use std::ops::Range;

/// Answers what has become known, in order.
pub struct Offer<'a> {
    layer: &'a dyn Layer,
    /// Where the next piece of knowledge has to start; anywhere at first.
    next: Option<u64>,
}

impl<'a> Offer<'a> {
    /// Of a layer.
    #[must_use]
    pub fn new(layer: &'a dyn Layer) -> Self {
        Self { layer, next: None }
    }

    /// Answers for a range; `emit` gets one response for each window and says when to stop by an
    /// error.
    ///
    /// # Errors
    /// `Invalid` for what is no range of this layer, or not the next; of the layer, of `emit`.
    pub fn answer(
        &mut self,
        known: &FetchKnown,
        emit: &mut dyn FnMut(FetchResponse) -> Result<()>,
    ) -> Result<()> {
        let span = self.check(known)?;
        self.next = Some(span.end);
        if !known.digests.is_empty() {
            let end = span.end;
            let content = Window::at(self.layer, span)?.read(self.layer)?;
            let differs = differing(&content, &known.digests);
            return emit(FetchResponse { pieces: pieces(content, &differs), done: end });
        }
        let mut cursor = Cursor::new(self.layer, span);
        while let Some(part) = cursor.next_part()? {
            emit(match part {
                Part::Gap(span) => FetchResponse { pieces: Vec::new(), done: span.end },
                Part::Window(window) => {
                    let end = window.span.end;
                    let mut runs = window.runs.clone();
                    runs.retain(|run| run.state != State::Absent);
                    FetchResponse { pieces: pieces(window.read(self.layer)?, &runs), done: end }
                }
            })?;
        }
        Ok(())
    }

    fn check(&self, known: &FetchKnown) -> Result<Range<u64>> {
        let (start, size) = (known.offset, self.layer.size());
        let end = start.checked_add(known.length).filter(|end| *end <= size);
        let Some(end) = end.filter(|end| end.is_multiple_of(BLOCK) || *end == size) else {
            let text = format!("{start}+{} are no blocks of a layer of {size} bytes", known.length);
            return Err(Error::invalid(text));
        };
        if !start.is_multiple_of(BLOCK) || self.next.is_some_and(|next| next != start) {
            return Err(Error::invalid(format!("{start} is not where the next range starts")));
        }
        let digests = known.digests.len();
        let fits = known.length <= WINDOW && digests == blocks(&(start..end)) as usize * DIGEST;
        if digests > 0 && !fits {
            let text = format!("{digests} bytes of digests for {} bytes", known.length);
            return Err(Error::invalid(text));
        }
        Ok(start..end)
    }
}

/// The runs in which a window is not what these digests say.
fn differing(content: &Content, digests: &[u8]) -> Vec<Run> {
    let ours = content.digests();
    let mut blocks = ours.chunks(DIGEST).zip(digests.chunks(DIGEST)).map(|(a, b)| a != b);
    let mut differing: Vec<Run> = Vec::new();
    for run in &content.window.runs {
        let mut at = run.offset;
        while at < run.end() {
            let length = BLOCK.min(run.end() - at);
            if blocks.next().unwrap_or(true) {
                let joins = |last: &&mut Run| last.end() == at && last.state == run.state;
                match differing.last_mut().filter(joins) {
                    Some(last) => last.length += length,
                    None => differing.push(Run { offset: at, length, state: run.state }),
                }
            }
            at += length;
        }
    }
    differing
}

/// Runs of a window as they are sent.
fn pieces(content: Content, runs: &[Run]) -> Vec<Piece> {
    let Content { start, bytes, .. } = content;
    let bytes = Bytes::from_owner(Owned(bytes));
    let piece = |run: &Run| {
        let data = match run.state {
            State::Data => {
                let from = (run.offset - start) as usize;
                bytes.slice(from..from + run.length as usize)
            }
            State::Absent | State::Zero => Bytes::new(),
        };
        let state = WireState::from(run.state).into();
        Piece { offset: run.offset, length: run.length, state, data }
    };
    runs.iter().map(piece).collect()
}

/// What the bytes of several pieces are kept by.
struct Owned(AlignedBuf);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<State> for WireState {
    fn from(state: State) -> Self {
        match state {
            State::Absent => Self::Absent,
            State::Zero => Self::Zero,
            State::Data => Self::Data,
        }
    }
}
