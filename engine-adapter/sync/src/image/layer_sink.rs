//! A layer of a store as an image to receive.

use crate::image::{Checksum, GRAIN, Interval, Record, Sink, Source, check_inside, layer_stamp};
use dbs_core::info::LayerState;
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::volume::Layer;
use dbs_core::{Error, ErrorKind, Result, Store};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

/// Zeros of at least so many bytes are kept as zeros, not as data: an upstream replica says with
/// data what a store says without.
const ZERO_RUN: usize = 64 * 1024;

/// Steps of background work at a time, while waiting for a merge.
const STEPS: u64 = 64;
/// Before the next attempt at a merge that could not go on.
const PAUSE: Duration = Duration::from_millis(5);

/// The layer of a snapshot of a volume that is being rebuilt ([`Store::set_rebuilding`]): a new one,
/// or one that is changed in place. A new one has no parent until [`Store::relink`]. What has
/// arrived of an abandoned transfer stays, and the next one only has to change it.
///
/// [`Store::set_rebuilding`]: dbs_core::Store::set_rebuilding
/// [`Store::relink`]: dbs_core::Store::relink
pub struct LayerSink {
    store: Store,
    volume: String,
    snapshot: String,
    existed: bool,
    /// The path that the checksum's record belongs to.
    image: Option<PathBuf>,
    /// The layer, once there is one.
    layer: Mutex<Option<Layer>>,
}

impl LayerSink {
    /// A layer to receive; nothing happens to the store before [`Sink::open`]. With `image` the
    /// layer's checksum is kept beside that path (see [`Record::path`]).
    ///
    /// # Errors
    /// `NotFound` if there is no such volume.
    pub fn new(
        store: &Store,
        volume: &str,
        snapshot: &str,
        image: Option<PathBuf>,
    ) -> Result<Self> {
        store.volume_info(volume)?;
        let layer = match store.layer(volume, Some(snapshot)) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            other => Some(other?),
        };
        Ok(Self {
            store: store.clone(),
            volume: volume.to_owned(),
            snapshot: snapshot.to_owned(),
            existed: layer.is_some(),
            image,
            layer: Mutex::new(layer),
        })
    }

    fn slot(&self) -> MutexGuard<'_, Option<Layer>> {
        self.layer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn layer(&self) -> Result<Layer> {
        let none = || Error::invalid(format!("snapshot `{}` has not been opened", self.snapshot));
        self.slot().clone().ok_or_else(none)
    }

    /// Gives an existing layer another size.
    fn resize(&self, size: u64) -> Result<()> {
        let layers = self.store.layers(&self.volume)?;
        let head = layers.iter().find(|layer| layer.name.is_none());
        let info = layers.iter().find(|layer| layer.name.as_ref() == Some(&self.snapshot));
        let info = info.ok_or_else(|| {
            Error::not_found(format!("snapshot `{}@{}` is gone", self.volume, self.snapshot))
        })?;
        let link = Link {
            snapshot: self.snapshot.clone(),
            parent: info.parent.clone(),
            size: Some(size),
            user_created: info.user_created,
            retired: info.retired,
            created_ns: info.created_ns,
            labels: info.labels.clone(),
        };
        let head_parent = head.and_then(|head| head.parent.as_deref());
        self.store.relink(&self.volume, &[link], head_parent)
    }

    /// Does what has to wait until deleted snapshots below are merged: helps with that, and tries
    /// again until it works, or nothing is left to merge.
    fn when_merged(&self, work: impl Fn() -> Result<()>) -> Result<()> {
        loop {
            match work() {
                Err(error) if error.kind() == ErrorKind::Busy => {
                    let report = self.store.work(STEPS)?;
                    if report.remaining == 0 {
                        return work();
                    }
                    if report.done == 0 {
                        // A read that has begun is to end first.
                        sleep(PAUSE);
                    }
                }
                other => return other,
            }
        }
    }
}

impl Source for LayerSink {
    fn size(&self) -> u64 {
        self.slot().as_ref().map_or(0, Layer::size)
    }

    /// Zeros count as data: a sender says them so, and may compare them with what it has.
    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        let layer = self.layer()?;
        let size = layer.size();
        if offset >= size {
            return Ok(Vec::new());
        }
        let ranges = layer.map(offset, size - offset, limit)?;
        let interval = |range: dbs_core::info::LayerRange| Interval {
            offset: range.offset,
            length: range.length,
            data: range.state != LayerState::Absent,
        };
        Ok(ranges.into_iter().map(interval).collect())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.layer()?.read_at(offset, buf)
    }
}

impl Sink for LayerSink {
    fn existed(&self) -> bool {
        self.existed
    }

    fn open(&self, size: u64) -> Result<()> {
        // For good, before anything changes: content may change without the stamp.
        self.image.as_deref().map_or(Ok(()), Record::remove)?;
        let mut slot = self.slot();
        match slot.as_ref().map(Layer::size) {
            None => {
                let options = SnapshotOptions::default();
                self.store.insert_snapshot(&self.volume, &self.snapshot, size, &options)?;
                *slot = Some(self.store.layer(&self.volume, Some(&self.snapshot))?);
            }
            Some(old) if old != size => self.when_merged(|| self.resize(size))?,
            Some(_) => {}
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let layer = self.layer()?;
        check_inside(offset, data.len() as u64, layer.size())?;
        for (start, part) in runs(data) {
            let at = offset + start as u64;
            if !is_zero(part) || part.len() < ZERO_RUN {
                layer.write_at(at, part)?;
                continue;
            }
            match layer.zero(at, part.len() as u64) {
                // Zeros take a place of their own, of which there may be none left.
                Err(error) if error.kind() == ErrorKind::NoSpace => layer.write_at(at, part)?,
                other => other?,
            }
        }
        Ok(())
    }

    fn hole(&self, offset: u64, length: u64) -> Result<()> {
        let layer = self.layer()?;
        check_inside(offset, length, layer.size())?;
        self.when_merged(|| layer.clear(offset, length))
    }

    fn recorded(&self) -> Result<Option<Record>> {
        let Some(image) = self.image.as_deref().filter(|_| self.existed) else { return Ok(None) };
        let stamp = layer_stamp(&self.store, &self.volume, &self.snapshot)?;
        // One that cannot be read is none.
        Ok(Record::load(image).unwrap_or(None).filter(|record| record.tells(&stamp)))
    }

    /// Makes the layer durable. The sender's checksum is not recorded: upstream sends what it has on
    /// record, which a purge leaves as it was when it changes the file, and a wrong one here would
    /// make the next hash find silent corruption. Only hashing what has come could tell, for which a
    /// sender does not wait.
    fn finish(&self, _checksum: Option<&Checksum>) -> Result<()> {
        self.store.flush()
    }

    fn abandon(&self) {}
}

/// Splits data where zeros of at least [`ZERO_RUN`] begin or end, at multiples of [`GRAIN`].
fn runs(data: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let rest = data.get(start..).filter(|rest| !rest.is_empty())?;
        let zeros = zeros_ahead(rest);
        let length = if zeros >= ZERO_RUN.min(rest.len()) && zeros > 0 {
            zeros
        } else {
            // Up to the next long run of zeros.
            let mut at = zeros;
            loop {
                let Some(behind) = rest.get(at..).filter(|behind| !behind.is_empty()) else {
                    break rest.len();
                };
                match zeros_ahead(behind) {
                    0 => at += (GRAIN as usize).min(behind.len()),
                    zeros if zeros >= ZERO_RUN => break at,
                    zeros => at += zeros,
                }
            }
        };
        let run = (start, &rest[..length]);
        start += length;
        Some(run)
    })
}

/// How many bytes from the start on are blocks of zeros.
fn zeros_ahead(data: &[u8]) -> usize {
    let blocks = data.chunks(GRAIN as usize).take_while(|block| is_zero(block));
    blocks.map(<[u8]>::len).sum()
}

fn is_zero(data: &[u8]) -> bool {
    // The first bytes say no of nearly all data there is.
    let (head, tail) = data.split_at(data.len().min(16));
    head.iter().all(|byte| *byte == 0) && tail.iter().fold(0, |or, byte| or | byte) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(pattern: &[(usize, u8)]) -> Vec<u8> {
        pattern.iter().flat_map(|(count, byte)| vec![*byte; count * GRAIN as usize]).collect()
    }

    fn lengths(data: &[u8]) -> Vec<(usize, bool)> {
        let mut at = 0;
        runs(data)
            .map(|(start, part)| {
                assert_eq!(start, at);
                at += part.len();
                (part.len() / GRAIN as usize, is_zero(part))
            })
            .collect()
    }

    #[test]
    fn only_long_zeros_are_split_off() {
        assert_eq!(lengths(&blocks(&[(3, 1)])), [(3, false)]);
        assert_eq!(lengths(&blocks(&[(2, 1), (15, 0), (1, 1)])), [(18, false)]);
        assert_eq!(
            lengths(&blocks(&[(2, 1), (16, 0), (1, 1)])),
            [(2, false), (16, true), (1, false)]
        );
        assert_eq!(lengths(&blocks(&[(40, 0), (2, 1), (3, 0)])), [(40, true), (5, false)]);
        assert_eq!(lengths(&blocks(&[(3, 0)])), [(3, true)]);
        assert_eq!(lengths(&blocks(&[(3, 0), (2, 1)])), [(5, false)]);
        assert_eq!(lengths(&[]), []);
        let mut odd = blocks(&[(1, 0)]);
        odd[4095] = 1;
        assert_eq!(lengths(&odd), [(1, false)]);
    }
}
