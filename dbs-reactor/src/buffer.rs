//! Memory for I/O: blocks of one region, so that a steady state allocates nothing and direct I/O
//! finds its alignment.
#![allow(unsafe_code)]

use memmap2::{Advice, MmapMut, MmapOptions};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of every [`Buf`] in bytes: no device asks for more.
pub const BUFFER_ALIGN: usize = 4096;
/// Orders of blocks: from [`BUFFER_ALIGN`] to 8 MiB.
const ORDERS: usize = 12;
/// From which size a buffer outside of the region is a mapping of its own. No byte of it is touched before it is used: a
/// client that announces much and sends nothing costs an address range, not memory and the time to clear it.
const MAPPED_MIN: usize = 64 << 10;
/// From which size a region is worth large pages.
const HUGE_PAGE: usize = 2 << 20;
const NONE: u32 = u32::MAX;
/// Freed blocks of the smallest size that are kept apart at most: most requests are of that size,
/// and splitting and joining for each would cost more than the rest of taking a buffer.
const SINGLES_MAX: usize = 256;

/// A region that buffers are taken from; what it cannot hold comes from elsewhere. Cloning gives
/// another handle of the same region.
#[derive(Clone)]
pub struct Buffers {
    region: Arc<Region>,
}

pub(crate) struct Region {
    // Never read or written through: buffers hold pointers into it, kept apart by `free`.
    _map: MmapMut,
    base: NonNull<u8>,
    free: Mutex<Buddies>,
    /// For each smallest block: handles of the shared buffer that starts there.
    pub(crate) users: Box<[AtomicU32]>,
}

// SAFETY: `base` points into the mapping that the region owns; the region itself never touches
// that memory, and each block of it is used by at most one `Buf`.
unsafe impl Send for Region {}
// SAFETY: as above; the list of free blocks is behind a lock.
unsafe impl Sync for Region {}

impl Buffers {
    /// A region of `len` bytes, rounded up; memory is used when it is first touched.
    ///
    /// # Errors
    /// No address space.
    pub fn new(len: usize) -> io::Result<Self> {
        let blocks = len.div_ceil(BUFFER_ALIGN).max(1);
        let mut map = MmapOptions::new().len(blocks * BUFFER_ALIGN).map_anon()?;
        // A device takes only so many pieces of memory at once (virtio: 254), and 1 MiB of small pages
        // that do not adjoin are 256 of them: it would be two requests. Where huge pages cannot be had
        // all works without.
        if map.len() >= HUGE_PAGE {
            let _ = map.advise(Advice::HugePage);
        }
        let Some(base) = NonNull::new(map.as_mut_ptr()) else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let free = Mutex::new(Buddies::new(blocks as u32));
        let users = (0..blocks).map(|_| AtomicU32::new(0)).collect();
        Ok(Self { region: Arc::new(Region { _map: map, base, free, users }) })
    }

    /// A buffer of `len` bytes whose content is left over from earlier uses.
    ///
    /// # Panics
    /// If memory outside of the region cannot be had, as any other allocation.
    #[must_use]
    pub fn take(&self, len: usize) -> Buf {
        let order = order_of(len);
        let block = if order < ORDERS { self.region.free().take(order) } else { None };
        match block {
            Some(block) => {
                // SAFETY: the block lies inside the mapping.
                let ptr = unsafe { self.region.base.add(block as usize * BUFFER_ALIGN) };
                let home = Home::Region { region: self.region.clone(), block, order };
                Buf { ptr, len, home }
            }
            None if len >= MAPPED_MIN => Buf::mapped(len),
            None => Buf::on_heap(len),
        }
    }
}

impl Region {
    fn free(&self) -> std::sync::MutexGuard<'_, Buddies> {
        // No code that can panic leaves the lists inconsistent.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block that was taken is free again.
    pub(crate) fn give_back(&self, block: u32, order: usize) {
        self.free().give_back(block, order);
    }
}

/// A buffer of a fixed length, aligned to [`BUFFER_ALIGN`], given back when dropped.
pub struct Buf {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) home: Home,
}

pub(crate) enum Home {
    Region { region: Arc<Region>, block: u32, order: usize },
    Heap(Layout),
    Mapped { _map: MmapMut },
    Nowhere,
}

// SAFETY: a buffer is the only user of its memory, as a `Box<[u8]>` is.
unsafe impl Send for Buf {}
// SAFETY: shared references only read.
unsafe impl Sync for Buf {}

impl Buf {
    /// A buffer of no bytes, which takes no memory.
    #[must_use]
    pub fn empty() -> Self {
        Self { ptr: NonNull::dangling(), len: 0, home: Home::Nowhere }
    }

    /// Gives up all bytes behind the first `len`; their memory stays with the buffer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn on_heap(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), BUFFER_ALIGN);
        let Ok(layout) = layout else { panic!("a buffer of {len} bytes is out of range") };
        // SAFETY: the layout's size is not 0.
        let Some(ptr) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        Self { ptr, len, home: Home::Heap(layout) }
    }

    fn mapped(len: usize) -> Self {
        let map = MmapOptions::new().len(len).map_anon();
        // A process may have so many mappings and no more.
        let Ok(mut map) = map else { return Self::on_heap(len) };
        let Some(ptr) = NonNull::new(map.as_mut_ptr()) else { return Self::on_heap(len) };
        // Never read or written through: only by the pointer.
        Self { ptr, len, home: Home::Mapped { _map: map } }
    }

    /// Start of the memory, for the kernel to use while the buffer is owned by an operation.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        match &self.home {
            Home::Region { region, block, order } => region.give_back(*block, *order),
            // SAFETY: allocated with this layout, and nobody else has the pointer.
            Home::Heap(layout) => unsafe { dealloc(self.ptr.as_ptr(), *layout) },
            Home::Mapped { .. } | Home::Nowhere => {}
        }
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block has at least `len` bytes, initialised by a mapping or the
        // allocator, and is this buffer's alone.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

fn order_of(len: usize) -> usize {
    let blocks = len.div_ceil(BUFFER_ALIGN).max(1);
    blocks.next_power_of_two().trailing_zeros() as usize
}

/// Free blocks of a region in powers of two; a freed block joins its buddy.
struct Buddies {
    /// Free smallest blocks not joined with their buddies.
    singles: Vec<u32>,
    /// First free block of each order.
    heads: [u32; ORDERS],
    /// For each smallest block: its neighbours in the list of its order, if it starts a free one.
    links: Vec<Link>,
}

#[derive(Clone, Copy)]
struct Link {
    next: u32,
    previous: u32,
    /// Order of the free block that starts here; `ORDERS` if none does.
    order: u8,
}

impl Buddies {
    fn new(blocks: u32) -> Self {
        let unused = Link { next: NONE, previous: NONE, order: ORDERS as u8 };
        let mut buddies = Self {
            singles: Vec::with_capacity(SINGLES_MAX),
            heads: [NONE; ORDERS],
            links: vec![unused; blocks as usize],
        };
        let mut block = 0;
        while block < blocks {
            let mut order = (block.trailing_zeros() as usize).min(ORDERS - 1);
            while block + (1 << order) > blocks {
                order -= 1;
            }
            buddies.push(block, order);
            block += 1 << order;
        }
        buddies
    }

    fn take(&mut self, order: usize) -> Option<u32> {
        if order == 0
            && let Some(block) = self.singles.pop()
        {
            return Some(block);
        }
        if let Some(block) = self.split(order) {
            return Some(block);
        }
        // Joined, the single ones may be enough.
        while let Some(block) = self.singles.pop() {
            self.join(block, 0);
        }
        self.split(order)
    }

    fn give_back(&mut self, block: u32, order: usize) {
        if order == 0 && self.singles.len() < SINGLES_MAX {
            self.singles.push(block);
        } else {
            self.join(block, order);
        }
    }

    fn split(&mut self, order: usize) -> Option<u32> {
        let mut found = (order..ORDERS).find(|order| self.heads[*order] != NONE)?;
        let block = self.heads[found];
        self.unlink(block);
        while found > order {
            found -= 1;
            self.push(block + (1 << found), found);
        }
        Some(block)
    }

    fn join(&mut self, mut block: u32, mut order: usize) {
        while order + 1 < ORDERS {
            let buddy = block ^ (1 << order);
            let free =
                self.links.get(buddy as usize).is_some_and(|l| usize::from(l.order) == order);
            if !free {
                break;
            }
            self.unlink(buddy);
            block &= !(1 << order);
            order += 1;
        }
        self.push(block, order);
    }

    fn push(&mut self, block: u32, order: usize) {
        let next = std::mem::replace(&mut self.heads[order], block);
        self.links[block as usize] = Link { next, previous: NONE, order: order as u8 };
        if next != NONE {
            self.links[next as usize].previous = block;
        }
    }

    fn unlink(&mut self, block: u32) {
        let link = self.links[block as usize];
        match link.previous {
            NONE => self.heads[usize::from(link.order)] = link.next,
            previous => self.links[previous as usize].next = link.next,
        }
        if link.next != NONE {
            self.links[link.next as usize].previous = link.previous;
        }
        self.links[block as usize].order = ORDERS as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_split_and_join() {
        let mut buddies = Buddies::new(11);
        let one = buddies.take(0);
        let four = buddies.take(2);
        let eight = buddies.take(3);
        assert_eq!((one, four.is_some(), eight), (Some(10), true, None));
        buddies.give_back(four.unwrap_or_default(), 2);
        buddies.give_back(10, 0);
        assert_eq!(buddies.take(3), Some(0));
        assert_eq!(buddies.take(1), Some(8));
        assert_eq!((buddies.take(0), buddies.take(0)), (Some(10), None));
    }

    #[test]
    fn buffers_are_apart_and_aligned() -> io::Result<()> {
        let buffers = Buffers::new(64 << 10)?;
        let sizes = [1, 4096, 5000, 16384, 1 << 20, 0];
        let mut taken: Vec<Buf> = sizes.iter().map(|len| buffers.take(*len)).collect();
        for (index, buf) in taken.iter_mut().enumerate() {
            assert!(buf.as_ptr().addr().is_multiple_of(BUFFER_ALIGN));
            buf.fill(index as u8 + 1);
        }
        for (index, (buf, len)) in taken.iter().zip(sizes).enumerate() {
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|byte| *byte == index as u8 + 1));
        }
        drop(taken);
        assert!(matches!(buffers.take(64 << 10).home, Home::Region { .. }), "all joined again");
        Ok(())
    }

    /// Found by review: 300 clients that announced 32 MiB each and sent nothing took 9.6 GiB, and others waited meanwhile.
    #[test]
    fn a_large_buffer_takes_no_memory_before_it_is_used() -> io::Result<()> {
        let len = 32 << 20;
        let mut buf = Buffers::new(BUFFER_ALIGN)?.take(len);
        let resident = |buf: &Buf| {
            let mut pages = vec![0_u8; len / BUFFER_ALIGN];
            // SAFETY: the range is the buffer's, and there is a byte for each of its pages.
            let result = unsafe { libc::mincore(buf.as_ptr().cast(), len, pages.as_mut_ptr()) };
            assert_eq!(result, 0);
            pages.iter().filter(|page| **page & 1 != 0).count()
        };
        assert_eq!(resident(&buf), 0);
        buf[len - 1] = 1;
        let used = resident(&buf);
        assert!((1..=HUGE_PAGE / BUFFER_ALIGN).contains(&used), "{used}");
        assert!(buf[..len - 1].iter().all(|byte| *byte == 0));
        Ok(())
    }
}
