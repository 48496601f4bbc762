//! Volumes served by another process, through its NBD server.

use super::BlockAccess;
use dbs_core::info::{MapRange, RangeState};
use dbs_core::{Error, Result};
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::wire::{Errno, extent_flag};
use dbs_nbd::{Client, Extent, Failure};
use std::io::{self, Read, Write};
use std::sync::{Mutex, MutexGuard};

/// An export of an NBD server, over one connection: requests are made one after the other.
#[derive(Debug)]
pub struct NbdAccess<S> {
    client: Mutex<Client<S>>,
    size: u64,
    has_map: bool,
}

impl<S: Read + Write> NbdAccess<S> {
    /// The export a client is connected to. Without the context `base:allocation` all of it
    /// counts as data.
    pub fn new(client: Client<S>) -> Self {
        let has_map = client.contexts().any(|name| name == BASE_ALLOCATION);
        Self { size: client.size(), has_map, client: Mutex::new(client) }
    }

    /// What differs from a snapshot, by the context `dbs:diff:SNAPSHOT`, which the client must
    /// have selected.
    pub fn differences(&self, snapshot: &str, offset: u64, length: u64) -> Result<Vec<MapRange>> {
        let context = format!("dbs:diff:{snapshot}");
        let mut found = Vec::new();
        let mut at = offset;
        while at < offset + length {
            let left = offset + length - at;
            for extent in self.run(|client| client.block_status(&context, at, left))? {
                let state = match extent.flags {
                    0 => None,
                    flags if flags & extent_flag::DIFFERS_ZERO != 0 => Some(RangeState::Zero),
                    _ => Some(RangeState::Data),
                };
                let length = extent.length;
                found.extend(state.map(|state| MapRange { offset: at, length, state }));
                at += length;
            }
        }
        Ok(found)
    }

    fn run<T>(&self, request: impl FnOnce(&mut Client<S>) -> io::Result<T>) -> Result<T> {
        request(&mut *self.client()?).map_err(translate)
    }

    fn client(&self) -> Result<MutexGuard<'_, Client<S>>> {
        // A panic in the middle of a request leaves the connection out of step.
        let broken = |_| Error::busy("the connection was given up in the middle of a request");
        self.client.lock().map_err(broken)
    }
}

impl<S: Read + Write + Send> BlockAccess for NbdAccess<S> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.run(|client| client.read_at(offset, buf))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.run(|client| client.write_at(offset, buf, false))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        self.run(|client| client.write_zeroes(offset, length, 0))
    }

    fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.run(|client| client.trim(offset, length, false))
    }

    fn flush(&self) -> Result<()> {
        self.run(Client::flush)
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        if !self.has_map {
            return Ok(vec![MapRange { offset, length, state: RangeState::Data }]);
        }
        let extents = self.run(|client| client.block_status(BASE_ALLOCATION, offset, length))?;
        let mut at = offset;
        let ranges = extents.into_iter().take(limit).map(|Extent { length, flags }| {
            let range = MapRange { offset: at, length, state: allocation(flags) };
            at += length;
            range
        });
        Ok(ranges.collect())
    }
}

fn allocation(flags: u32) -> RangeState {
    let is = |flag| flags & flag != 0;
    match (is(extent_flag::ZERO), is(extent_flag::HOLE)) {
        (true, true) => RangeState::Hole,
        (true, false) => RangeState::Zero,
        // A hole that is not known to be zeros has to be read.
        (false, _) => RangeState::Data,
    }
}

/// An error of an NBD client as one of the store.
pub fn translate(error: io::Error) -> Error {
    let failure = error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>());
    match failure.map(|failure| (failure.errno, failure.message.clone())) {
        Some((Errno::NoSpace, message)) => Error::no_space(message),
        Some((Errno::Perm, message)) => Error::read_only(message),
        Some((Errno::Invalid | Errno::Overflow, message)) => Error::invalid(message),
        Some((Errno::NotSupported, message)) => Error::unsupported(message),
        Some((Errno::Shutdown, message)) => Error::busy(message),
        Some((Errno::Io, _)) | None => Error::io(error, "talking to the NBD server"),
    }
}
