//! The target's side of a fetch: telling what is here, and taking what is not.

use super::layer::{BLOCK, Cursor, Layer, LayerMut, Part, State, WINDOW};
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::proto::dbs::piece::State as WireState;
use longhorn_wire::proto::dbs::{FetchKnown, FetchResponse, Piece};
use prost::bytes::Bytes;
use std::ops::Range;

/// Tells what a layer holds in a range; `emit` says when to stop by an error.
///
/// # Errors
/// Of the layer, of `emit`.
pub fn tell(
    layer: &dyn Layer,
    span: Range<u64>,
    emit: &mut dyn FnMut(FetchKnown) -> Result<()>,
) -> Result<()> {
    let mut cursor = Cursor::new(layer, span.clone());
    let nothing = |gap: Range<u64>| FetchKnown {
        offset: gap.start,
        length: gap.end - gap.start,
        digests: Bytes::new(),
    };
    let mut gap = span.start..span.start;
    while let Some(part) = cursor.next_part()? {
        match part {
            Part::Gap(more) => gap.end = more.end,
            Part::Window(window) => {
                if !gap.is_empty() {
                    emit(nothing(gap))?;
                }
                let (offset, end) = (window.span.start, window.span.end);
                let digests = window.digests(layer)?.into();
                emit(FetchKnown { offset, length: end - offset, digests })?;
                gap = end..end;
            }
        }
    }
    if gap.is_empty() { Ok(()) } else { emit(nothing(gap)) }
}

/// Takes the answers for one range of a layer.
pub struct Taker<'a> {
    layer: &'a dyn LayerMut,
    /// Dealt with so far, and the end of it all.
    span: Range<u64>,
    /// Direct I/O wants aligned memory; messages come anywhere.
    buf: AlignedBuf,
}

impl<'a> Taker<'a> {
    /// For a range of a layer.
    #[must_use]
    pub fn new(layer: &'a dyn LayerMut, span: Range<u64>) -> Self {
        Self { layer, span, buf: AlignedBuf::zeroed(WINDOW as usize) }
    }

    /// Where the part begins that has not been dealt with.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.span.start
    }

    /// Whether all has been dealt with.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.span.is_empty()
    }

    /// Takes one answer; returns the bytes of data in it.
    ///
    /// # Errors
    /// `Invalid` for what does not belong into the range; of the layer.
    pub fn take(&mut self, response: &FetchResponse) -> Result<u64> {
        let done = response.done;
        if !(self.span.start..=self.span.end).contains(&done) {
            return Err(odd(format!("{done} is outside the range asked for")));
        }
        let (mut at, mut bytes) = (self.span.start, 0);
        for piece in &response.pieces {
            at = self.check(piece, at..done)?;
            match piece.state() {
                WireState::Absent => self.layer.clear(piece.offset, piece.length)?,
                WireState::Zero => self.layer.zero(piece.offset, piece.length)?,
                WireState::Data => {
                    self.buf[..piece.data.len()].copy_from_slice(&piece.data);
                    self.layer.write_at(piece.offset, &self.buf[..piece.data.len()])?;
                    bytes += piece.length;
                }
            }
        }
        self.span.start = done;
        Ok(bytes)
    }

    /// Whether a piece is made of whole blocks inside `space`; returns its end.
    fn check(&self, piece: &Piece, space: Range<u64>) -> Result<u64> {
        let end = piece.offset.checked_add(piece.length).filter(|end| *end <= space.end);
        let size = self.layer.size();
        let whole = |end: &u64| end.is_multiple_of(BLOCK) || *end == size;
        let Some(end) = end.filter(whole) else {
            return Err(odd(format!("a piece of {} bytes at {}", piece.length, piece.offset)));
        };
        let state = State::try_from(piece.state)?;
        let expected = if state == State::Data { piece.length } else { 0 };
        let fits = piece.data.len() as u64 == expected && expected <= WINDOW && piece.length > 0;
        if piece.offset < space.start || !piece.offset.is_multiple_of(BLOCK) || !fits {
            let text = format!("a piece of {} bytes at {}", piece.data.len(), piece.offset);
            return Err(odd(text));
        }
        Ok(end)
    }
}

impl TryFrom<i32> for State {
    type Error = Error;

    fn try_from(state: i32) -> Result<Self> {
        match WireState::try_from(state) {
            Ok(WireState::Absent) => Ok(Self::Absent),
            Ok(WireState::Zero) => Ok(Self::Zero),
            Ok(WireState::Data) => Ok(Self::Data),
            Err(_) => Err(odd(format!("blocks of state {state}"))),
        }
    }
}

fn odd(what: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("the other replica sent what was not asked for: {what}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::layer::tests::Memory;
    use super::super::offer::Offer;
    use super::*;

    /// Fetches a range without a network; returns how many bytes of data came.
    fn fetch(source: &Memory, target: &Memory, span: Range<u64>) -> u64 {
        let mut offer = Offer::new(source);
        let mut taker = Taker::new(target, span.clone());
        let mut bytes = 0;
        let mut known = Vec::new();
        tell(target, span, &mut |part| {
            known.push(part);
            Ok(())
        })
        .unwrap();
        for known in known {
            offer
                .answer(&known, &mut |response| {
                    bytes += taker.take(&response)?;
                    Ok(())
                })
                .unwrap();
        }
        assert!(taker.is_complete());
        bytes
    }

    fn equal(a: &Memory, b: &Memory) -> bool {
        *a.blocks.lock().unwrap() == *b.blocks.lock().unwrap()
    }

    fn scatter(layer: &Memory, seed: u64) {
        let mut random = seed;
        for block in 0..layer.size.div_ceil(BLOCK) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            let length = BLOCK.min(layer.size - block * BLOCK);
            match random >> 60 {
                0..5 => layer.write_at(block * BLOCK, &vec![(random >> 50) as u8; length as usize]),
                5..7 => layer.zero(block * BLOCK, length),
                _ => layer.clear(block * BLOCK, length),
            }
            .unwrap();
        }
    }

    #[test]
    fn whatever_the_target_had_it_becomes_the_source() {
        let size = 3 * WINDOW + 5 * BLOCK + 1024;
        for seed in 0..20 {
            let (source, target) = (Memory::new(size), Memory::new(size));
            scatter(&source, seed);
            if seed > 0 {
                scatter(&target, seed * 77);
            }
            fetch(&source, &target, 0..size);
            assert!(equal(&source, &target), "seed {seed}");
            assert_eq!(fetch(&source, &target, 0..size), 0);
        }
    }

    #[test]
    fn only_what_differs_is_sent() {
        let size = 8 * WINDOW;
        let (source, target) = (Memory::new(size), Memory::new(size));
        source.write_at(WINDOW, &vec![7; 2 * WINDOW as usize]).unwrap();
        assert_eq!(fetch(&source, &target, 0..size), 2 * WINDOW);
        source.write_at(2 * WINDOW, &[8; BLOCK as usize]).unwrap();
        source.write_at(7 * WINDOW, &[9; 3 * BLOCK as usize]).unwrap();
        source.clear(WINDOW, BLOCK).unwrap();
        assert_eq!(fetch(&source, &target, 0..size), 4 * BLOCK);
        assert!(equal(&source, &target));
        // A part only.
        source.write_at(0, &[1; BLOCK as usize]).unwrap();
        source.write_at(WINDOW, &[2; BLOCK as usize]).unwrap();
        assert_eq!(fetch(&source, &target, 0..WINDOW), BLOCK);
        assert!(!equal(&source, &target));
    }

    #[test]
    fn a_source_gets_no_writes_outside_the_range_accepted() {
        let target = Memory::new(4 * BLOCK + 512);
        let data = |length: usize| Bytes::from(vec![1; length]);
        let piece = |offset, length, state: WireState, data| Piece {
            offset,
            length,
            state: state.into(),
            data,
        };
        let mut states = piece(BLOCK, BLOCK, WireState::Zero, Bytes::new());
        states.state = 9;
        let bad = [
            piece(0, BLOCK, WireState::Data, data(4096)),
            piece(BLOCK, BLOCK, WireState::Data, data(4095)),
            piece(BLOCK, BLOCK, WireState::Zero, data(4096)),
            piece(BLOCK + 512, BLOCK, WireState::Data, data(4096)),
            piece(BLOCK, BLOCK - 512, WireState::Data, data(4096 - 512)),
            piece(3 * BLOCK, BLOCK, WireState::Data, data(4096)),
            piece(u64::MAX - 4095, BLOCK, WireState::Data, data(4096)),
            piece(BLOCK, 0, WireState::Zero, Bytes::new()),
            states,
        ];
        for piece in bad {
            let mut taker = Taker::new(&target, BLOCK..4 * BLOCK + 512);
            let response = FetchResponse { pieces: vec![piece.clone()], done: 3 * BLOCK };
            assert_eq!(taker.take(&response).unwrap_err().kind(), ErrorKind::Invalid, "{piece:?}");
        }
        let mut taker = Taker::new(&target, BLOCK..4 * BLOCK);
        for done in [0, 4 * BLOCK + 512] {
            assert!(taker.take(&FetchResponse { pieces: vec![], done }).is_err());
        }
        assert!(equal(&target, &Memory::new(4 * BLOCK + 512)));
    }

    #[test]
    fn a_target_cannot_ask_for_more_than_the_layer() {
        let source = Memory::new(2 * WINDOW + 512);
        let known = |offset, length, digests: usize| FetchKnown {
            offset,
            length,
            digests: vec![0; digests].into(),
        };
        let refused = |known: FetchKnown| {
            let mut none = |_| panic!("answered");
            Offer::new(&source).answer(&known, &mut none).unwrap_err().kind()
        };
        for bad in [
            known(0, 2 * WINDOW + 1024, 0),
            known(u64::MAX - 100, 4096, 0),
            known(100, 4096, 0),
            known(0, 100, 0),
            known(0, 8192, 16),
            known(0, 8192, 33),
            known(0, WINDOW + BLOCK, 257 * 16),
        ] {
            assert_eq!(refused(bad), ErrorKind::Invalid);
        }
        let mut offer = Offer::new(&source);
        offer.answer(&known(0, 4096, 0), &mut |_| Ok(())).unwrap();
        assert!(offer.answer(&known(8192, 4096, 0), &mut |_| Ok(())).is_err());
        offer.answer(&known(4096, 4096, 16), &mut |_| Ok(())).unwrap();
    }
}
