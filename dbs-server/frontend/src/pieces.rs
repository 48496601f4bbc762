//! Requests that are carried out piece by piece, one after the other.

use super::carry::{Action, Carry};

/// Bytes given up at a time: far less than what would keep a replica from answering in time.
pub const DISCARD_MAX_BYTES: u32 = 256 << 20;
/// Bytes of zeros written at a time.
pub const ZEROES_MAX_BYTES: u32 = 1 << 20;

/// Bytes of the next piece of what is between two bytes: to a multiple of the largest length, so that
/// all pieces but the first begin at whole blocks.
#[must_use]
pub fn piece(at: u64, end: u64, most: u64) -> u64 {
    (most - at % most).min(end.saturating_sub(at))
}

/// What is left of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    action: Action,
    start: u64,
    at: u64,
    end: u64,
    most: u32,
    /// A flush is to follow.
    flush: bool,
}

impl Pieces {
    /// A discard, followed by a flush if it is to be durable.
    #[must_use]
    pub fn discard(offset: u64, length: u64, durable: bool) -> Self {
        Self::new(Action::Discard, (offset, length), DISCARD_MAX_BYTES, durable)
    }

    /// Zeros, each piece a write with a payload of as many, followed by a flush if they are to be
    /// durable.
    #[must_use]
    pub fn zeroes(offset: u64, length: u64, durable: bool) -> Self {
        Self::new(Action::Write { durable: false }, (offset, length), ZEROES_MAX_BYTES, durable)
    }

    fn new(action: Action, (offset, length): (u64, u64), most: u32, flush: bool) -> Self {
        let end = offset.saturating_add(length);
        Self { action, start: offset, at: offset, end, most, flush }
    }

    /// Whether there is more than one piece, not counting a flush.
    #[must_use]
    pub fn is_long(&self) -> bool {
        piece(self.at, self.end, self.most.into()) < self.end - self.start
    }

    /// Whether there is a next piece.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.at < self.end || self.flush
    }
}

impl Iterator for Pieces {
    type Item = Carry;

    /// The next piece, which is to begin when the one before has ended well.
    fn next(&mut self) -> Option<Carry> {
        if self.at < self.end {
            let count = piece(self.at, self.end, self.most.into());
            let piece = Carry { action: self.action, offset: self.at, length: count as u32 };
            self.at += count;
            return Some(piece);
        }
        let flush = Carry { action: Action::Flush, offset: 0, length: 0 };
        std::mem::take(&mut self.flush).then_some(flush)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_request_without_gaps_or_overlaps() {
        let most = u64::from(ZEROES_MAX_BYTES);
        for (offset, length) in [(0, most), (512, 3 * most), (most - 512, 1024), (7 * most, 5)] {
            let pieces: Vec<Carry> = Pieces::zeroes(offset, length, false).collect();
            let mut at = offset;
            for piece in &pieces {
                assert_eq!((piece.offset, piece.action), (at, Action::Write { durable: false }));
                assert!(piece.length > 0 && u64::from(piece.length) <= most);
                at += u64::from(piece.length);
            }
            assert_eq!(at, offset + length);
        }
    }

    #[test]
    fn a_durable_one_ends_with_a_flush() {
        let mut pieces = Pieces::discard(4096, 8192, true);
        let first = Carry { action: Action::Discard, offset: 4096, length: 8192 };
        assert_eq!(pieces.next(), Some(first));
        assert!(pieces.has_more());
        assert_eq!(pieces.next().map(|piece| piece.action), Some(Action::Flush));
        assert!(!pieces.has_more() && pieces.next().is_none());
        assert!(!Pieces::discard(0, 0, false).has_more());
    }
}
