//! A layer that comes in as a sparse file.

use super::peer::client::Traffic;
use super::shelf::ReplicaShelf;
use crate::image::{Checksum, Interval, LayerSink, Record, Sink, Source};
use crate::replica::Replica;
use dbs_core::{Error, Result};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

/// Receives the layer of one disk, to be seen when the replica is reloaded.
pub struct IncomingSink {
    replica: Arc<Replica>,
    shelf: Arc<ReplicaShelf>,
    disk: String,
    /// Size of what was here before: an older version, or what had come in of this one.
    before: Option<u64>,
    layer: OnceLock<LayerSink>,
    traffic: Arc<Traffic>,
}

impl IncomingSink {
    /// For the disk of this name; nothing happens before the sender begins.
    ///
    /// # Errors
    /// `Invalid` for what is no disk of a snapshot; of the store.
    pub fn new(
        replica: Arc<Replica>,
        shelf: Arc<ReplicaShelf>,
        disk: &str,
        traffic: Arc<Traffic>,
    ) -> Result<Self> {
        let before = replica.incoming().existing(disk)?;
        let disk = disk.to_owned();
        Ok(Self { replica, shelf, disk, before, layer: OnceLock::new(), traffic })
    }

    fn layer(&self) -> Result<&LayerSink> {
        self.layer.get().ok_or_else(|| {
            Error::invalid(format!("`{}` has not been opened for receiving", self.disk))
        })
    }
}

impl Source for IncomingSink {
    fn size(&self) -> u64 {
        self.layer.get().map_or(self.before.unwrap_or(0), Source::size)
    }

    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        self.layer()?.intervals(offset, limit)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.layer()?.read_at(offset, buf)?;
        self.traffic.compared.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl Sink for IncomingSink {
    fn existed(&self) -> bool {
        self.before.is_some()
    }

    fn open(&self, size: u64) -> Result<()> {
        if let Some(layer) = self.layer.get() {
            return layer.open(size);
        }
        if !size.is_multiple_of(512) {
            return Err(Error::invalid(format!("{size} bytes are no whole sectors")));
        }
        self.replica.incoming().begin(&self.disk, size)?;
        let name = self.shelf.layer_name(&self.disk)?;
        let image = Some(self.shelf.image(&self.disk));
        let volume = self.replica.volume_name();
        let layer = LayerSink::new(&self.replica.store()?, volume, &name, image)?;
        layer.open(size)?;
        // Of two that open at once one wins, and the other's is the same layer.
        let _ = self.layer.set(layer);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.layer()?.write_at(offset, data)?;
        self.traffic.received.fetch_add(data.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn hole(&self, offset: u64, length: u64) -> Result<()> {
        self.layer()?.hole(offset, length)
    }

    fn recorded(&self) -> Result<Option<Record>> {
        if self.before.is_none() {
            return Ok(None);
        }
        let Ok(stamp) = self.shelf.layer_stamp(&self.disk) else {
            // What has not come in wholly has no checksum.
            return Ok(None);
        };
        Ok(Record::load(&self.shelf.image(&self.disk))?.filter(|record| record.is_current(&stamp)))
    }

    fn finish(&self, checksum: Option<&Checksum>) -> Result<()> {
        match self.layer.get() {
            Some(layer) => layer.finish(checksum),
            // The sender found both to be equal.
            None => Ok(()),
        }
    }

    fn abandon(&self) {}
}
