//! Reading where the device cannot read all there is.

use crate::io::Storage;
use crate::units::BLOCK_BYTES;
use std::io;

/// Bytes read at once.
pub(super) const READ_BYTES: u64 = 1 << 20;

/// Whether the device says of some of the bytes that it cannot read them. Any other error is of the
/// whole device, or of the system.
pub(super) fn is_unreadable(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODATA | libc::EILSEQ))
}

/// Reads all that can be read. Blocks that cannot are zeros in `buf`, and their places in it are
/// returned, in order.
///
/// # Errors
/// Of the device as a whole.
pub(super) fn read_blocks(
    storage: &dyn Storage,
    offset: u64,
    buf: &mut [u8],
) -> io::Result<Vec<u32>> {
    match storage.read_at(offset, buf) {
        Err(error) if is_unreadable(&error) => {}
        read => return read.map(|()| Vec::new()),
    }
    if buf.len() <= BLOCK_BYTES as usize {
        buf.fill(0);
        return Ok(vec![0]);
    }
    // First in large parts: bad blocks are few, and an attempt to read one takes a device seconds.
    let step = if buf.len() > READ_BYTES as usize { READ_BYTES } else { BLOCK_BYTES } as usize;
    let mut unreadable = Vec::new();
    for (index, part) in buf.chunks_mut(step).enumerate() {
        let at = (index * step) as u64;
        let first = (at / BLOCK_BYTES) as u32;
        unreadable.extend(read_blocks(storage, offset + at, part)?.iter().map(|at| first + at));
    }
    Ok(unreadable)
}
