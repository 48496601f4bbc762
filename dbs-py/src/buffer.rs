//! The memory of Python objects, without a copy. All `unsafe` of this crate is here.
#![allow(unsafe_code, reason = "memory that Python owns")]

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use std::slice;

/// The bytes of an object with the buffer protocol, whatever its items are. While this lives the
/// object may neither move nor resize them: a `bytearray` that tries raises `BufferError`.
pub struct Bytes {
    buffer: PyUntypedBuffer,
}

/// Bytes that may be changed.
pub struct BytesMut(Bytes);

impl Bytes {
    /// The bytes of `object`.
    ///
    /// # Errors
    /// `TypeError` if it has none, `BufferError` if they are not one piece.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err(
                "the bytes of the buffer are not one contiguous piece; copy it first",
            ));
        }
        Ok(Self { buffer })
    }

    /// Them.
    pub fn as_slice(&self) -> &[u8] {
        let length = self.buffer.len_bytes();
        if length == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps `length` contiguous bytes at this address, neither moved nor
        // freed until the buffer is released, which is when `self` is dropped. Another thread of
        // the program may change them meanwhile, as with `os.pwrite`: they are only copied, or are
        // `bytes`, which nobody changes, and whichever values are seen, each is a valid `u8`.
        unsafe { slice::from_raw_parts(self.buffer.buf_ptr().cast(), length) }
    }
}

impl BytesMut {
    /// The bytes of `object`, which must be writable.
    ///
    /// # Errors
    /// As [`Bytes::of`], and `BufferError` if they are read-only.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let bytes = Bytes::of(object)?;
        if bytes.buffer.readonly() {
            return Err(PyBufferError::new_err(
                "the buffer is read-only; give a bytearray, a writable memoryview or array",
            ));
        }
        Ok(Self(bytes))
    }

    /// Them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let length = self.0.buffer.len_bytes();
        if length == 0 {
            return &mut [];
        }
        // SAFETY: as in `Bytes::as_slice`; the exporter said that they may be written. Who reads
        // or writes the same object on another thread meanwhile sees any mix of old and new bytes,
        // as with `os.preadv`.
        unsafe { slice::from_raw_parts_mut(self.0.buffer.buf_ptr().cast(), length) }
    }
}
