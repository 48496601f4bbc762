//! Memory for receiving, which the kernel chooses from when data is there.

use super::{GROUP, RECEIVE_BYTES};
use crate::buffer::{BUFFER_ALIGN, Buf, Buffers};
use crate::done::Bytes;
use io_uring::IoUring;
use io_uring::types::BufRingEntry;
use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

/// Buffers for receiving; a power of two. Each takes up to [`RECEIVE_BYTES`].
const RECEIVE_BUFFERS: u16 = 32;

/// Memory that the kernel receives into, and the ring in which it finds free parts.
pub(super) struct ReceiveBuffers {
    memory: Buf,
    entries: Buf,
    tail: u16,
}

impl ReceiveBuffers {
    pub fn register(ring: &IoUring) -> io::Result<Self> {
        let entries_bytes = usize::from(RECEIVE_BUFFERS) * size_of::<BufRingEntry>();
        let entries =
            Buffers::new(entries_bytes)?.take(entries_bytes.next_multiple_of(BUFFER_ALIGN));
        let memory_bytes = usize::from(RECEIVE_BUFFERS) * RECEIVE_BYTES;
        let memory = Buffers::new(memory_bytes)?.take(memory_bytes);
        // SAFETY: `entries` is aligned, large enough, zeroed as fresh memory, and outlives the
        // ring's use of it: it is freed after the ring, which is declared before it.
        unsafe {
            ring.submitter().register_buf_ring_with_flags(
                entries.as_ptr().addr() as u64,
                RECEIVE_BUFFERS,
                GROUP,
                0,
            )?;
        }
        let mut receive = Self { memory, entries, tail: 0 };
        (0..RECEIVE_BUFFERS).for_each(|id| receive.give_back(id));
        Ok(receive)
    }

    /// What the kernel received into a buffer.
    pub fn bytes(&self, buffer: Option<u16>, len: usize) -> Bytes {
        // At the end of a stream the kernel may have taken none.
        let Some(id) = buffer else {
            return Bytes { ptr: self.memory.as_ptr(), len: 0, id: u16::MAX };
        };
        assert!(id < RECEIVE_BUFFERS && len <= RECEIVE_BYTES, "the kernel names a buffer it has");
        // SAFETY: inside the memory.
        let ptr = unsafe { self.memory.as_ptr().add(usize::from(id) * RECEIVE_BYTES) };
        Bytes { ptr, len, id }
    }

    pub fn give_back(&mut self, id: u16) {
        if id >= RECEIVE_BUFFERS {
            return;
        }
        let base: *mut BufRingEntry = self.entries.as_ptr().cast();
        // SAFETY: the index is inside the ring; the kernel does not read the entry before the
        // tail passes it. The tail shares memory with the first entry's reserved field only.
        unsafe {
            let entry = &mut *base.add(usize::from(self.tail % RECEIVE_BUFFERS));
            entry.set_addr(self.memory.as_ptr().add(usize::from(id) * RECEIVE_BYTES).addr() as u64);
            entry.set_len(RECEIVE_BYTES as u32);
            entry.set_bid(id);
            self.tail = self.tail.wrapping_add(1);
            let tail = BufRingEntry::tail(base).cast::<AtomicU16>();
            (*tail).store(self.tail, Ordering::Release);
        }
    }
}
