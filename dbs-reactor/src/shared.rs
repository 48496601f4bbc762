//! A buffer with several owners, who only read it.
#![allow(unsafe_code)]

use super::buffer::{Buf, Home, Region};
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A handle of a buffer that can no longer be changed: one payload in many batches. The last handle
/// gives the memory back. Making and cloning handles of a buffer from a reactor's region allocates
/// nothing.
pub struct SharedBuf {
    ptr: NonNull<u8>,
    len: usize,
    home: SharedHome,
}

enum SharedHome {
    /// Its handles are counted in the region.
    Region { region: Arc<Region>, block: u32, order: usize },
    /// Any other, which knows how to free itself.
    Other(Arc<Buf>),
}

// SAFETY: handles only read the memory, and the count of them is atomic.
unsafe impl Send for SharedBuf {}
// SAFETY: as above.
unsafe impl Sync for SharedBuf {}

impl Buf {
    /// Gives up changing the buffer for having any number of handles of it.
    #[must_use]
    pub fn share(mut self) -> SharedBuf {
        let (ptr, len) = (self.ptr, self.len);
        // What is left of `self` owns nothing.
        let home = match std::mem::replace(&mut self.home, Home::Nowhere) {
            Home::Region { region, block, order } => {
                // The block is this buffer's alone: nobody else looks at its count.
                if let Some(users) = region.users.get(block as usize) {
                    users.store(1, Ordering::Relaxed);
                }
                SharedHome::Region { region, block, order }
            }
            home => SharedHome::Other(Arc::new(Self { ptr, len, home })),
        };
        SharedBuf { ptr, len, home }
    }
}

impl Clone for SharedBuf {
    fn clone(&self) -> Self {
        let home = match &self.home {
            SharedHome::Region { region, block, order } => {
                region.users[*block as usize].fetch_add(1, Ordering::Relaxed);
                SharedHome::Region { region: Arc::clone(region), block: *block, order: *order }
            }
            SharedHome::Other(buf) => SharedHome::Other(Arc::clone(buf)),
        };
        Self { ptr: self.ptr, len: self.len, home }
    }
}

impl Drop for SharedBuf {
    fn drop(&mut self) {
        if let SharedHome::Region { region, block, order } = &self.home
            && region.users[*block as usize].fetch_sub(1, Ordering::Release) == 1
        {
            // What others read of it lies before it is given to somebody who writes.
            fence(Ordering::Acquire);
            region.give_back(*block, *order);
        }
    }
}

impl Deref for SharedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory has `len` initialised bytes, as those of the buffer it was; while
        // there is a handle it is not given back, and nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

/// What is written, and not changed meanwhile: a buffer of the writer's own, or one that others send
/// or write as well.
#[derive(Debug)]
pub enum Payload {
    /// Comes back with the end of the operation.
    Own(Buf),
    /// The operation has a handle, which goes with its end.
    Shared(SharedBuf),
}

impl Payload {
    /// Start of the memory, for the kernel to use while the payload is owned by an operation; what is
    /// shared it may only read.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Own(buf) => buf.as_ptr(),
            Self::Shared(buf) => buf.ptr.as_ptr(),
        }
    }

    /// The buffer, if it was the writer's own; else one of no bytes.
    pub(crate) fn into_buf(self) -> Buf {
        match self {
            Self::Own(buf) => buf,
            Self::Shared(_) => Buf::empty(),
        }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(buf) => buf,
            Self::Shared(buf) => buf,
        }
    }
}

impl From<Buf> for Payload {
    fn from(buf: Buf) -> Self {
        Self::Own(buf)
    }
}

impl From<SharedBuf> for Payload {
    fn from(buf: SharedBuf) -> Self {
        Self::Shared(buf)
    }
}

impl fmt::Debug for SharedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::super::buffer::Buffers;
    use super::*;

    #[test]
    fn the_last_handle_gives_the_memory_back() -> std::io::Result<()> {
        let buffers = Buffers::new(8192)?;
        // From the region, from the heap, and of nothing.
        for len in [8192, 64 << 10, 0] {
            let mut buf = if len == 0 { Buf::empty() } else { buffers.take(len) };
            buf.fill(7);
            let first = buf.share();
            let handles: Vec<SharedBuf> = (0..3).map(|_| first.clone()).collect();
            drop(first);
            assert!(handles.iter().all(|handle| handle.len() == len));
            let other = buffers.take(8192);
            assert_eq!(matches!(other.home, Home::Region { .. }), len != 8192, "still in use");
            drop(other);
            assert!(handles.iter().all(|handle| handle.iter().all(|byte| *byte == 7)));
            drop(handles);
            assert!(matches!(buffers.take(8192).home, Home::Region { .. }), "given back");
        }
        Ok(())
    }

    #[test]
    fn handles_may_go_on_any_thread() -> std::io::Result<()> {
        let buffers = Buffers::new(4096)?;
        for _ in 0..100 {
            let buf = buffers.take(4096).share();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    let handle = buf.clone();
                    scope.spawn(move || drop(handle.clone()));
                }
                drop(buf);
            });
            assert!(matches!(buffers.take(4096).home, Home::Region { .. }));
        }
        Ok(())
    }
}
