//! What is sent together.
#![allow(unsafe_code)]

use super::buffer::Buf;
use super::shared::SharedBuf;
use std::ops::Range;

/// Pieces in one system call at most: what the kernel takes.
const SLICES_MAX: usize = 1024;
/// Bytes in one system call at most, so that a slow peer's progress is seen.
const CALL_BYTES: usize = 1 << 20;

/// Bytes to send, in order: short ones copied, buffers as they are. It keeps its memory, so that
/// a batch used again allocates nothing.
#[derive(Debug, Default)]
pub struct Batch {
    copied: Vec<u8>,
    parts: Vec<Part>,
    len: usize,
}

#[derive(Debug)]
enum Part {
    Copied(Range<usize>),
    Buf(Buf),
    Shared(SharedBuf),
    Vec(Vec<u8>),
}

impl Batch {
    /// Appends a copy of `bytes`.
    pub fn push(&mut self, bytes: &[u8]) {
        let start = self.copied.len();
        self.copied.extend_from_slice(bytes);
        self.len += bytes.len();
        match self.parts.last_mut() {
            Some(Part::Copied(range)) if range.end == start => range.end += bytes.len(),
            _ => self.parts.push(Part::Copied(start..start + bytes.len())),
        }
    }

    /// Appends a whole buffer; it is given back when the batch is cleared.
    pub fn push_buf(&mut self, buf: Buf) {
        self.len += buf.len();
        self.parts.push(Part::Buf(buf));
    }

    /// Appends a whole buffer that others send or keep as well; its handle goes when the batch is
    /// cleared.
    pub fn push_shared(&mut self, buf: SharedBuf) {
        self.len += buf.len();
        self.parts.push(Part::Shared(buf));
    }

    /// Appends bytes of any other origin.
    pub fn push_vec(&mut self, bytes: Vec<u8>) {
        self.len += bytes.len();
        self.parts.push(Part::Vec(bytes));
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Empties it and keeps its memory.
    pub fn clear(&mut self) {
        self.copied.clear();
        self.parts.clear();
        self.len = 0;
    }

    /// The pieces, in order.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().map(|part| match part {
            Part::Copied(range) => &self.copied[range.clone()],
            Part::Buf(buf) => buf,
            Part::Shared(buf) => buf,
            Part::Vec(bytes) => bytes,
        })
    }
}

/// A batch on its way, with what the kernel needs to see of it.
pub(crate) struct Sending {
    pub batch: Batch,
    sent: usize,
    iovecs: Vec<libc::iovec>,
    header: libc::msghdr,
}

// SAFETY: the pointers in `iovecs` and `header` are used between `prepare` and the end of the
// system call only, and point into the batch that is sent along.
unsafe impl Send for Sending {}

impl Sending {
    /// For a batch that is handed over with [`Sending::start`].
    pub fn new() -> Self {
        // SAFETY: a header of zeros is one without address, pieces and control data.
        let header = unsafe { std::mem::zeroed() };
        Self { batch: Batch::default(), sent: 0, iovecs: Vec::new(), header }
    }

    /// Takes over a batch to send from its beginning.
    pub fn start(&mut self, batch: Batch) {
        self.batch = batch;
        self.sent = 0;
    }

    /// Whether everything is sent, after another `count` bytes have been.
    pub fn advance(&mut self, count: usize) -> bool {
        self.sent += count;
        self.sent >= self.batch.len
    }

    /// Bytes known to be sent.
    pub fn sent(&self) -> usize {
        self.sent
    }

    /// The header for what is still to send. It holds as long as `self` is neither moved nor
    /// changed.
    pub fn prepare(&mut self) -> *const libc::msghdr {
        self.iovecs.clear();
        let (mut skip, mut room) = (self.sent, CALL_BYTES);
        for slice in self.batch.slices() {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            let rest = &slice[skipped..][..room.min(slice.len() - skipped)];
            room -= rest.len();
            if !rest.is_empty() && self.iovecs.len() < SLICES_MAX {
                let base = rest.as_ptr().cast_mut().cast();
                self.iovecs.push(libc::iovec { iov_base: base, iov_len: rest.len() });
            }
        }
        self.header.msg_iov = self.iovecs.as_mut_ptr();
        self.header.msg_iovlen = self.iovecs.len() as _;
        &raw const self.header
    }
}

#[cfg(test)]
mod tests {
    use super::super::buffer::Buffers;
    use super::*;

    #[test]
    fn pieces_keep_their_order_and_skip_what_is_sent() -> std::io::Result<()> {
        let mut buf = Buffers::new(4096)?.take(3);
        buf.copy_from_slice(b"fgh");
        let mut batch = Batch::default();
        batch.push(b"ab");
        batch.push(b"cde");
        batch.push_buf(buf);
        batch.push(b"ij");
        batch.push_vec(b"k".to_vec());
        let slices: Vec<&[u8]> = batch.slices().collect();
        assert_eq!((slices, batch.len()), (vec![&b"abcde"[..], b"fgh", b"ij", b"k"], 11));
        let mut sending = Sending::new();
        sending.start(batch);
        assert!(!sending.advance(6));
        sending.prepare();
        assert_eq!((sending.iovecs.len(), sending.iovecs[0].iov_len), (3, 2));
        assert!(sending.advance(5));
        Ok(())
    }
}
