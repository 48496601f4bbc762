//! A small image in memory, such as the description beside a layer.

use crate::image::{Checksum, Interval, Record, Sink, Source, check_inside};
use dbs_core::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Nothing that is sent as a small file is longer: descriptions have some hundred bytes, labels
/// perhaps some thousand.
const MAX_BYTES: u64 = 1024 * 1024;

/// An image in memory, all of it data, of at most 1 MiB. Its owner keeps another handle on it and
/// looks at [`Bytes::finished`] when the transfer is over.
#[derive(Debug, Default)]
pub struct Bytes {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    content: Vec<u8>,
    finished: bool,
}

impl Bytes {
    /// An image to send.
    #[must_use]
    pub fn new(content: impl Into<Vec<u8>>) -> Self {
        Self { state: Mutex::new(State { content: content.into(), finished: false }) }
    }

    /// What has been received, once all of it has.
    #[must_use]
    pub fn finished(&self) -> Option<Vec<u8>> {
        let state = self.state();
        state.finished.then(|| state.content.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, offset: u64, length: u64, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut state = self.state();
        check_inside(offset, length, state.content.len() as u64)?;
        change(&mut state.content[offset as usize..(offset + length) as usize]);
        Ok(())
    }
}

impl Source for Bytes {
    fn size(&self) -> u64 {
        self.state().content.len() as u64
    }

    fn intervals(&self, offset: u64, _limit: usize) -> Result<Vec<Interval>> {
        let size = self.size();
        let rest = Interval { offset, length: size.saturating_sub(offset), data: true };
        Ok(if rest.length == 0 { Vec::new() } else { vec![rest] })
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.change(offset, buf.len() as u64, |content| buf.copy_from_slice(content))
    }
}

impl Sink for Bytes {
    fn existed(&self) -> bool {
        false
    }

    fn open(&self, size: u64) -> Result<()> {
        if size > MAX_BYTES {
            let text = format!("{size} bytes are too many for a description (at most {MAX_BYTES})");
            return Err(Error::invalid(text));
        }
        self.state().content.resize(size as usize, 0);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.change(offset, data.len() as u64, |content| content.copy_from_slice(data))
    }

    fn hole(&self, offset: u64, length: u64) -> Result<()> {
        self.change(offset, length, |content| content.fill(0))
    }

    fn recorded(&self) -> Result<Option<Record>> {
        Ok(None)
    }

    fn finish(&self, _checksum: Option<&Checksum>) -> Result<()> {
        self.state().finished = true;
        Ok(())
    }

    fn abandon(&self) {
        *self.state() = State::default();
    }
}
