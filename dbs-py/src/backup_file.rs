//! The bytes of a backup.

use crate::buffer::BytesMut;
use crate::convert::Amount;
use crate::error::{closed, invalid, raise};
use crate::store::{check_process, without_interpreter};
use dbs_backup::read::{OpenBackup, Piece, Place, Reader};
use dbs_core::Result;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::mem;
use std::process;
use std::sync::{Arc, PoisonError, RwLock};

/// Most bytes that are read into new objects at once.
const NEW_BYTES_MAX: u64 = 1 << 30;

/// A backup that is open. What keeps it from being deleted goes first, and then what reads it.
pub struct Opened {
    backup: Arc<OpenBackup>,
    reader: Arc<Reader>,
    place: Place,
}

impl Opened {
    /// A backup and what reads it.
    pub fn new(backup: Arc<OpenBackup>, reader: Arc<Reader>) -> Self {
        Self { backup, reader, place: Place::default() }
    }

    /// Fills a buffer, as far as the backup goes.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < buf.len() {
            let (at, left) = (offset + filled as u64, buf.len() - filled);
            let part = &mut buf[filled..];
            let count = match self.reader.read(&self.backup, &self.place, at, left)? {
                Piece::Data(bytes, range) => {
                    let count = range.len();
                    part[..count].copy_from_slice(&bytes[range]);
                    count
                }
                Piece::Zeros(count) => {
                    part[..count].fill(0);
                    count
                }
            };
            if count == 0 {
                break;
            }
            filled += count;
        }
        Ok(filled)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.backup.release();
    }
}

/// The bytes of a backup: `dbs.BackupFile` is made of it.
#[pyclass(frozen, module = "dbs._dbs")]
pub struct RawBackup {
    process: u32,
    spec: String,
    opened: RwLock<Option<Arc<Opened>>>,
}

impl RawBackup {
    /// Of what this process has opened.
    pub fn new(spec: String, opened: Opened) -> Self {
        let opened = RwLock::new(Some(Arc::new(opened)));
        Self { process: process::id(), spec, opened }
    }

    fn opened(&self) -> PyResult<Arc<Opened>> {
        check_process(self.process)?;
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner).clone();
        opened.ok_or_else(closed)
    }

    fn take(&self) -> Option<Arc<Opened>> {
        self.opened.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for RawBackup {
    fn drop(&mut self) {
        let opened = self.take();
        if self.process == process::id() {
            without_interpreter(opened);
        } else {
            mem::forget(opened);
        }
    }
}

#[pymethods]
impl RawBackup {
    /// What names it.
    #[getter]
    fn spec(&self) -> &str {
        &self.spec
    }

    /// Size in bytes.
    #[getter]
    fn size(&self) -> PyResult<u64> {
        Ok(self.opened()?.backup.size())
    }

    /// Reads `length` bytes from `offset` on; fewer only at the end.
    fn pread<'py>(
        &self,
        py: Python<'py>,
        length: Amount,
        offset: Amount,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let opened = self.opened()?;
        let length = length.0.min(opened.backup.size().saturating_sub(offset.0));
        if length > NEW_BYTES_MAX {
            return Err(invalid(format!("{length} bytes are more than 1 GiB: use readinto")));
        }
        PyBytes::new_with(py, length as usize, |buf| {
            py.detach(|| opened.read(offset.0, buf)).map(drop).map_err(raise)
        })
    }

    /// Fills a writable buffer from `offset` on; returns the number of bytes.
    fn readinto(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offset: Amount,
    ) -> PyResult<usize> {
        let opened = self.opened()?;
        let mut bytes = BytesMut::of(buffer)?;
        let buf = bytes.as_mut_slice();
        py.detach(|| opened.read(offset.0, buf)).map_err(raise)
    }

    /// The first byte at or behind `offset` that is data, or else none; the size if there is none.
    fn _find(&self, offset: Amount, data: bool) -> PyResult<u64> {
        Ok(self.opened()?.backup.next(offset.0, data))
    }

    /// Lets go of it.
    fn close(&self, py: Python<'_>) {
        // Files are closed by whoever drops them, also a child made by fork.
        if self.process == process::id() {
            let opened = self.take();
            py.detach(|| drop(opened));
        }
    }
}
