//! What is left to send, handed out to the workers piece by piece.

use crate::image::{Interval, Source};
use crate::ssync::BATCH;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

/// How many intervals are asked for at a time.
const INTERVALS: usize = 1024;

/// The pieces of an image, in order: holes as large as they are, data in batches that end at
/// multiples of [`BATCH`].
pub struct Plan {
    source: Arc<dyn Source>,
    size: u64,
    state: Mutex<State>,
}

struct State {
    /// Everything before it has been asked for.
    at: u64,
    waiting: VecDeque<Interval>,
}

impl Plan {
    pub fn new(source: Arc<dyn Source>, size: u64) -> Self {
        let state = State { at: 0, waiting: VecDeque::new() };
        Self { source, size, state: Mutex::new(state) }
    }

    /// The next piece.
    pub async fn next(&self) -> Result<Option<Interval>> {
        let mut state = self.state.lock().await;
        // Until the next piece is known to its end.
        while state.at < self.size
            && state.waiting.len() <= 1
            && !state.waiting.front().is_some_and(is_batch)
        {
            self.refill(&mut state).await?;
        }
        let Some(mut next) = state.waiting.pop_front() else { return Ok(None) };
        let stop = (next.offset / BATCH + 1) * BATCH;
        if next.data && next.end() > stop {
            let rest = Interval { offset: stop, length: next.end() - stop, data: true };
            state.waiting.push_front(rest);
            next.length = stop - next.offset;
        }
        Ok(Some(next))
    }

    /// Asks for more intervals and joins neighbours of one kind, also with the last one waiting.
    async fn refill(&self, state: &mut State) -> Result<()> {
        let (source, at) = (Arc::clone(&self.source), state.at);
        let intervals = spawn_blocking(move || source.intervals(at, INTERVALS)).await;
        let intervals = intervals
            .map_err(|error| Error::new(ErrorKind::Io, format!("mapping an image: {error}")))??;
        for interval in intervals {
            state.at = interval.end();
            match state.waiting.back_mut() {
                Some(last) if last.data == interval.data => last.length += interval.length,
                _ => state.waiting.push_back(interval),
            }
        }
        if state.at <= at {
            return Err(Error::invalid(format!("the image ends at {at}, before {}", self.size)));
        }
        Ok(())
    }
}

/// Whether it is data that reaches to the end of a batch.
fn is_batch(next: &Interval) -> bool {
    next.data && next.end() >= (next.offset / BATCH + 1) * BATCH
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Three blocks of data, then a hole as large as they, and so on; told three blocks at a time.
    struct Stripes(u64);

    impl Source for Stripes {
        fn size(&self) -> u64 {
            self.0
        }

        fn intervals(&self, offset: u64, _limit: usize) -> Result<Vec<Interval>> {
            let one = |i: u64| {
                let offset = offset + i * 4096;
                let data = (offset / 12_288).is_multiple_of(2) || offset < 3 * BATCH;
                Interval { offset, length: 4096, data }
            };
            Ok((0..3).map(one).filter(|interval| interval.end() <= self.0).collect())
        }

        fn read_at(&self, _offset: u64, _buf: &mut [u8]) -> Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn pieces_are_joined_and_cut() {
        let size = 3 * BATCH + 300 * 4096;
        let plan = Plan::new(Arc::new(Stripes(size)), size);
        let mut pieces = Vec::new();
        while let Some(piece) = plan.next().await.unwrap() {
            pieces.push(piece);
        }
        let mut at = 0;
        for piece in &pieces {
            assert_eq!(piece.offset, at);
            at = piece.end();
        }
        assert_eq!(at, size);
        assert!(pieces[..3].iter().all(|piece| piece.length == BATCH && piece.data));
        assert!(pieces[4..pieces.len() - 1].iter().all(|piece| piece.length == 12_288));
    }
}
