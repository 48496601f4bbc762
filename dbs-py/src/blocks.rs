//! The bytes of a volume or snapshot. Every call runs without the interpreter's lock.

use crate::buffer::{Bytes, BytesMut};
use crate::convert::Amount;
use crate::error::{closed, invalid, raise};
use crate::slot::{Access, Opened, Slot};
use crate::store::{RawStore, Shared, without_interpreter};
use dbs_client::any_store::AnyStore;
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::volume::ReadPart;
use dbs_transfer::{BlockAccess, discard_bytes_at, find_bytes, read_bytes_at, zero_bytes_at};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::mem::ManuallyDrop;
use std::sync::{Arc, PoisonError, RwLock};

/// Most bytes that are read into new objects at once: a mistake must not take all memory.
const NEW_BYTES_MAX: u64 = 1 << 30;
/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;

/// A call's use of an open volume.
struct Using<'py> {
    py: Python<'py>,
    access: Option<Access>,
}

impl<'py> Using<'py> {
    fn new(py: Python<'py>, access: Access) -> Self {
        Self { py, access: Some(access) }
    }

    fn blocks(&self) -> &dyn BlockAccess {
        &*self.opened().blocks
    }

    fn opened(&self) -> &Opened {
        self.access.as_ref().expect("it is there until the end")
    }

    /// Reads ranges of any bytes into memory of the caller.
    fn read_into(&self, reads: Vec<ReadPart<'_>>) -> PyResult<()> {
        let (opened, mut reads) = (self.opened(), reads);
        let read = || match opened.has_sums {
            true => read_copied(&*opened.blocks, reads),
            false => read_many_bytes(&*opened.blocks, &mut reads),
        };
        self.py.detach(read).map_err(raise)
    }
}

impl Drop for Using<'_> {
    fn drop(&mut self) {
        // Closed meanwhile, it ends here.
        if let Some(last) = self.access.take().and_then(Arc::into_inner) {
            self.py.detach(|| drop(last));
        }
    }
}

/// The bytes of a volume or snapshot, for reading: `dbs.Snapshot` is made of it. It is opened by
/// its first use.
#[pyclass(frozen, subclass, module = "dbs._dbs")]
pub struct Blocks {
    shared: Arc<Shared>,
    spec: RwLock<String>,
    uuid: String,
    slot: Arc<Slot>,
}

impl Drop for Blocks {
    fn drop(&mut self) {
        if self.shared.is_ours() {
            without_interpreter(self.slot.take());
        } else {
            // The connection is the parent's, too: it must not hear a goodbye.
            let _leaked = ManuallyDrop::new(self.slot.get());
        }
    }
}

impl Blocks {
    fn access<'py>(&self, py: Python<'py>) -> PyResult<Using<'py>> {
        self.shared.check_process()?;
        if let Some(access) = self.slot.get() {
            return Ok(Using::new(py, access));
        }
        match py.detach(|| self.open()) {
            Ok(Some(access)) => Ok(Using::new(py, access)),
            Ok(None) => Err(closed()),
            Err(error) => Err(raise(error)),
        }
    }

    /// Opens it, without the interpreter; none if the store was closed.
    fn open(&self) -> dbs_core::Result<Option<Access>> {
        let _opening = self.slot.opening.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been first.
        if let Some(access) = self.slot.get() {
            return Ok(Some(access));
        }
        let Some(store) = self.shared.open_store() else { return Ok(None) };
        let spec = self.spec();
        let has_sums = matches!(&*store, AnyStore::Idle(store, _) if store.checksums().is_some());
        let opened = Arc::new(Opened { blocks: store.access().open(&spec)?, has_sums });
        // Open, it cannot be deleted: what has the name now is what was opened.
        store.check_same(&spec, &self.uuid)?;
        Ok(self.shared.keep(&self.slot, &opened).then_some(opened))
    }

    /// For changes.
    fn writable<'py>(&self, py: Python<'py>) -> PyResult<Using<'py>> {
        self.shared.check_writable()?;
        self.shared.store()?.check_unwritten(&self.spec()).map_err(raise)?;
        self.access(py)
    }
}

#[pymethods]
impl Blocks {
    #[new]
    fn new(store: &RawStore, spec: String, uuid: String) -> Self {
        let shared = Arc::clone(&store.shared);
        Self { shared, spec: RwLock::new(spec), uuid, slot: Arc::default() }
    }

    /// ``"volume"`` or ``"volume@snapshot"``.
    #[getter]
    fn spec(&self) -> String {
        self.spec.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its identity, which no other volume or snapshot ever has.
    #[getter]
    fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Takes another name, after a rename. What is open has the old one, for the next connection that it needs.
    fn _renamed(&self, py: Python<'_>, spec: String) {
        *self.spec.write().unwrap_or_else(PoisonError::into_inner) = spec;
        py.detach(|| self.slot.clear());
    }

    /// Size in bytes.
    ///
    /// On a served store this is the size when the volume was opened here: after somebody else has
    /// resized it, ``close()`` it, and the next use sees the new one.
    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.access(py)?.blocks().size())
    }

    /// Lets go of the volume, so that it can be deleted; the next use opens it again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.check_process()?;
        py.detach(|| self.slot.clear());
        Ok(())
    }

    /// Reads `length` bytes from `offset` on, any bytes; fewer only at the end of the volume.
    ///
    /// Raises `ValueError` for more than 1 GiB: use `readinto` for that.
    fn pread<'py>(
        &self,
        py: Python<'py>,
        length: Amount,
        offset: Amount,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let access = self.access(py)?;
        let blocks = access.blocks();
        let length = length.0.min(blocks.size().saturating_sub(offset.0));
        check_new(length)?;
        if length == 0 {
            return Ok(PyBytes::new(py, &[]));
        }
        PyBytes::new_with(py, length as usize, |buf| {
            py.detach(|| read_bytes_at(blocks, offset.0, buf)).map_err(raise)
        })
    }

    /// Fills a writable buffer from `offset` on; returns the number of bytes read, fewer than the
    /// buffer has only at the end of the volume. A served store, or one without checksums, fills it
    /// without a copy.
    fn readinto(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offset: Amount,
    ) -> PyResult<usize> {
        let access = self.access(py)?;
        let blocks = access.blocks();
        let mut bytes = BytesMut::of(buffer)?;
        let buf = bytes.as_mut_slice();
        let length = (buf.len() as u64).min(blocks.size().saturating_sub(offset.0)) as usize;
        if length == 0 {
            return Ok(0);
        }
        access.read_into(vec![ReadPart { offset: offset.0, buf: &mut buf[..length] }])?;
        Ok(length)
    }

    /// Reads many ranges at once: pairs of length and offset, as `pread` takes them. All must be
    /// inside the volume.
    ///
    /// One call for many small blocks is many times faster than a loop.
    fn read_many<'py>(
        &self,
        py: Python<'py>,
        ranges: Vec<(Amount, Amount)>,
    ) -> PyResult<Bound<'py, PyList>> {
        let access = self.access(py)?;
        let blocks = access.blocks();
        let total = ranges.iter().try_fold(0_u64, |sum, (length, _)| sum.checked_add(length.0));
        check_new(total.unwrap_or(u64::MAX))?;
        let mut rest = &mut vec![0; total.unwrap_or_default() as usize][..];
        let mut reads = Vec::with_capacity(ranges.len());
        for (length, offset) in &ranges {
            let (buf, after) = rest.split_at_mut(length.0 as usize);
            reads.push(ReadPart { offset: offset.0, buf });
            rest = after;
        }
        py.detach(|| read_many_bytes(blocks, &mut reads)).map_err(raise)?;
        PyList::new(py, reads.iter().map(|read| PyBytes::new(py, read.buf)))
    }

    /// Fills a writable buffer with blocks of `length` bytes from each of `offsets`, one behind the
    /// other, as `readinto` does; returns the number of bytes read. All must be inside the volume.
    fn readinto_many(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offsets: Vec<Amount>,
        length: Amount,
    ) -> PyResult<usize> {
        let access = self.access(py)?;
        let mut bytes = BytesMut::of(buffer)?;
        let buf = bytes.as_mut_slice();
        let needed = length.0.checked_mul(offsets.len() as u64);
        let total = needed.and_then(|total| usize::try_from(total).ok());
        let Some(total) = total.filter(|total| *total <= buf.len()) else {
            return Err(invalid(format!(
                "{} blocks of {} bytes do not fit a buffer of {} bytes",
                offsets.len(),
                length.0,
                buf.len()
            )));
        };
        if total == 0 {
            return Ok(0);
        }
        let reads = offsets
            .iter()
            .zip(buf[..total].chunks_mut(length.0 as usize))
            .map(|(offset, buf)| ReadPart { offset: offset.0, buf });
        access.read_into(reads.collect())?;
        Ok(total)
    }

    /// The first byte at or behind `offset` that is data, or else none; the size if there is none.
    fn _find(&self, py: Python<'_>, offset: Amount, data: bool) -> PyResult<u64> {
        let access = self.access(py)?;
        let blocks = access.blocks();
        py.detach(|| find_bytes(blocks, offset.0, data)).map_err(raise)
    }
}

/// The bytes of a volume: `dbs.Volume` is made of it.
#[pyclass(frozen, subclass, extends = Blocks, module = "dbs._dbs")]
pub struct WritableBlocks;

#[pymethods]
impl WritableBlocks {
    #[new]
    fn new(store: &RawStore, spec: String, uuid: String) -> PyClassInitializer<Self> {
        PyClassInitializer::from(Blocks::new(store, spec, uuid)).add_subclass(Self)
    }

    /// Writes the bytes of a buffer at `offset`, any bytes; returns their number. `bytes` are written without a copy. Of
    /// other buffers, which may change meanwhile, 1 MiB at a time is copied. What was written survives the end of this process, and a power loss after `flush`.
    ///
    /// Raises `ValueError` beyond the end of the volume.
    fn pwrite(this: &Bound<'_, Self>, data: &Bound<'_, PyAny>, offset: Amount) -> PyResult<usize> {
        let access = this.as_super().get().writable(this.py())?;
        let blocks = access.blocks();
        let bytes = Bytes::of(data)?;
        let buf = bytes.as_slice();
        // A class made from it may give other memory.
        let stays = data.is_exact_instance_of::<PyBytes>();
        let write = || match stays {
            true => blocks.write_bytes_at(offset.0, buf),
            false => write_copied(blocks, offset.0, buf),
        };
        this.py().detach(write).map_err(raise)?;
        Ok(buf.len())
    }

    /// Gives up the content of the whole 4 KiB blocks inside the range, which then read as zeros;
    /// their space comes back.
    fn discard(this: &Bound<'_, Self>, offset: Amount, length: Amount) -> PyResult<()> {
        let access = this.as_super().get().writable(this.py())?;
        let blocks = access.blocks();
        this.py().detach(|| discard_bytes_at(blocks, offset.0, length.0)).map_err(raise)
    }

    /// Makes the range read as zeros, to the byte; whole blocks take no space then.
    fn write_zeroes(this: &Bound<'_, Self>, offset: Amount, length: Amount) -> PyResult<()> {
        let access = this.as_super().get().writable(this.py())?;
        let blocks = access.blocks();
        this.py().detach(|| zero_bytes_at(blocks, offset.0, length.0)).map_err(raise)
    }

    /// Makes everything written so far durable: it survives a power loss from then on.
    fn flush(this: &Bound<'_, Self>) -> PyResult<()> {
        let access = this.as_super().get().access(this.py())?;
        let blocks = access.blocks();
        this.py().detach(|| blocks.flush()).map_err(raise)
    }
}

/// Writes bytes that another thread may change meanwhile. The checksum of a block is computed before the device takes
/// the block: both must be of the same bytes.
fn write_copied(blocks: &dyn BlockAccess, offset: u64, buf: &[u8]) -> dbs_core::Result<()> {
    let fits = offset.checked_add(buf.len() as u64).is_some_and(|end| end <= blocks.size());
    if buf.is_empty() || !fits {
        // Nothing is written, and what is wrong is said.
        return blocks.write_bytes_at(offset, buf);
    }
    let (mut at, mut left) = (offset, buf);
    while !left.is_empty() {
        let (piece, rest) = left.split_at(left.len().min(PIECE - (at % PIECE as u64) as usize));
        blocks.write_bytes_at(at, &AlignedBuf::copy_of(piece))?;
        at += piece.len() as u64;
        left = rest;
    }
    Ok(())
}

fn check_new(length: u64) -> PyResult<()> {
    if length > NEW_BYTES_MAX {
        return Err(invalid(format!(
            "{length} bytes are more than the 1 GiB that is read into new objects at once; read \
             less, or into a buffer with readinto"
        )));
    }
    Ok(())
}

/// Reads ranges into memory that another thread may change meanwhile. Where no checksum of a block is known, the one of
/// the bytes that were read is kept for it: they must still be what the device gave.
fn read_copied(blocks: &dyn BlockAccess, reads: Vec<ReadPart<'_>>) -> dbs_core::Result<()> {
    let pieces = reads.into_iter().flat_map(|read| {
        let (mut at, mut left) = (read.offset, read.buf);
        std::iter::from_fn(move || {
            let length = left.len().min(PIECE - (at % PIECE as u64) as usize);
            let (buf, rest) = std::mem::take(&mut left).split_at_mut(length);
            let piece = ReadPart { offset: at, buf };
            (at, left) = (at.saturating_add(length as u64), rest);
            (length > 0).then_some(piece)
        })
    });
    let mut pieces: Vec<_> = pieces.collect();
    let total = pieces.iter().map(|piece| piece.buf.len()).sum::<usize>();
    let mut copy = AlignedBuf::zeroed(total.min(PIECE));
    let mut left = &mut pieces[..];
    while !left.is_empty() {
        let mut free = copy.len();
        let fits = left.iter().take_while(|piece| {
            let room = free.checked_sub(piece.buf.len());
            free = room.unwrap_or(free);
            room.is_some()
        });
        let (now, later) = left.split_at_mut(fits.count());
        let mut rest = &mut copy[..];
        let mut private = Vec::with_capacity(now.len());
        for piece in &*now {
            let (buf, after) = std::mem::take(&mut rest).split_at_mut(piece.buf.len());
            private.push(ReadPart { offset: piece.offset, buf });
            rest = after;
        }
        read_many_bytes(blocks, &mut private)?;
        now.iter_mut().zip(private).for_each(|(piece, read)| piece.buf.copy_from_slice(read.buf));
        left = later;
    }
    Ok(())
}

/// Reads ranges of any bytes, at once if all are of whole sectors.
fn read_many_bytes(access: &dyn BlockAccess, reads: &mut [ReadPart<'_>]) -> dbs_core::Result<()> {
    let whole = |bytes: u64| bytes.is_multiple_of(dbs_core::units::SECTOR_BYTES);
    if reads.iter().all(|read| whole(read.offset) && whole(read.buf.len() as u64)) {
        return access.read_many(reads);
    }
    reads.iter_mut().try_for_each(|read| read_bytes_at(access, read.offset, read.buf))
}
