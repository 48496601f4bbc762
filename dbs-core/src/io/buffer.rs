//! Memory that direct I/O accepts.

use std::fmt;
use std::ops::{Deref, DerefMut};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Alignment of an [`AlignedBuf`] in bytes: no device asks for more.
pub const BUFFER_ALIGN: usize = 4096;

/// A heap buffer of a fixed length that starts at a multiple of [`BUFFER_ALIGN`].
pub struct AlignedBuf {
    blocks: Box<[Block]>,
    len: usize,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Block([u8; BUFFER_ALIGN]);

impl AlignedBuf {
    /// A buffer of `len` zero bytes.
    ///
    /// # Panics
    /// If the memory cannot be had, as any other allocation.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let blocks = len.div_ceil(BUFFER_ALIGN);
        match <[Block]>::new_box_zeroed_with_elems(blocks) {
            Ok(blocks) => Self { blocks, len },
            Err(_) => panic!("out of memory for a buffer of {len} bytes"),
        }
    }

    /// A buffer with a copy of `bytes`.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buf = Self::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.blocks.as_bytes()[..self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.blocks.as_mut_bytes()[..self.len]
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_zeroed_and_as_long_as_asked() {
        for len in [0, 1, 512, 4096, 4097, 1 << 20] {
            let mut buf = AlignedBuf::zeroed(len);
            assert_eq!(buf.len(), len);
            assert_eq!(buf.as_ptr() as usize % BUFFER_ALIGN, 0);
            assert!(buf.iter().all(|&byte| byte == 0));
            buf.fill(7);
        }
        assert_eq!(&*AlignedBuf::copy_of(b"abc"), b"abc");
    }
}
