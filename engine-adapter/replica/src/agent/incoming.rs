//! What comes in as a file: a layer, or the description of a disk.

use super::peer::client::Traffic;
use super::shelf::Shelf;
use crate::replica::Replica;
use crate::replica::meta::DiskMeta;
use dbs_core::{Error, Result};
use longhorn_sync::image::{Bytes, Checksum, Interval, LayerSink, Record, Sink, Source};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Receives the layer of one disk, to be seen when the replica is reloaded.
pub struct IncomingSink {
    replica: Arc<Replica>,
    shelf: Arc<Shelf>,
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
        shelf: Arc<Shelf>,
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
        // One that cannot be read is none.
        let record = Record::load(&self.shelf.image(&self.disk)).unwrap_or(None);
        Ok(record.filter(|record| record.tells(&stamp)))
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

/// Receives the description of one disk. It is the replica's before the sender's `close` is answered:
/// a controller has it sent between two snapshots, and takes the next one when it hears that it was.
pub struct MetaSink {
    replica: Arc<Replica>,
    disk: String,
    bytes: Bytes,
    taken: AtomicBool,
}

impl MetaSink {
    /// For the disk of this name.
    pub fn new(replica: Arc<Replica>, disk: String) -> Self {
        Self { replica, disk, bytes: Bytes::default(), taken: AtomicBool::new(false) }
    }

    /// Whether a description came, and is the replica's.
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::SeqCst)
    }
}

impl Source for MetaSink {
    fn size(&self) -> u64 {
        self.bytes.size()
    }

    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        self.bytes.intervals(offset, limit)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.bytes.read_at(offset, buf)
    }
}

impl Sink for MetaSink {
    fn existed(&self) -> bool {
        self.bytes.existed()
    }

    fn open(&self, size: u64) -> Result<()> {
        self.bytes.open(size)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.bytes.write_at(offset, data)
    }

    fn hole(&self, offset: u64, length: u64) -> Result<()> {
        self.bytes.hole(offset, length)
    }

    fn recorded(&self) -> Result<Option<Record>> {
        self.bytes.recorded()
    }

    fn finish(&self, checksum: Option<&Checksum>) -> Result<()> {
        self.bytes.finish(checksum)?;
        // A sender that has failed says `close` without having sent anything.
        let sent = self.bytes.finished().filter(|bytes| !bytes.is_empty());
        let Some(bytes) = sent else { return Ok(()) };
        let meta = DiskMeta::parse(&self.disk, &bytes)?;
        self.replica.incoming().put_meta(&self.disk, meta)?;
        self.taken.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn abandon(&self) {
        self.bytes.abandon();
    }
}
