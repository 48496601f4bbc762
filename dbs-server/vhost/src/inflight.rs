//! Which requests of a queue are under way, in memory that outlives this process: whoever serves the queue next carries
//! them out, in the order in which they came.
//!
//! The layout is the protocol's, for split rings. A request is marked before it is begun. Its mark goes after it is in
//! the used ring; which one was put there last is noted before, so that a server that ends in between leaves no doubt.

use super::memory::Memory;
use super::ring::Broken;
use std::sync::Arc;

/// Bytes before the entries of a queue, and bytes of an entry.
const HEADER_BYTES: u64 = 16;
const ENTRY_BYTES: u64 = 16;
/// The parts of a queue begin at multiples of this.
const ALIGN: u64 = 64;
/// Where in the header.
const VERSION: u64 = 8;
const DESCRIPTORS: u64 = 10;
const LAST: u64 = 12;
const USED: u64 = 14;
/// Where in an entry.
const NEXT: u64 = 6;
const COUNTER: u64 = 8;
/// The last bytes of a region that was made here: whose requests are in it. It begins so, as no entry does.
const OWNER: &[u8] = b"DBS uuid";
const OWNER_BYTES: u64 = 64;
const UUID_BYTES: usize = 36;
/// The region is mapped, and so has whole pages.
const PAGE_BYTES: u64 = 4096;

/// Bytes for one queue of so many places.
pub fn bytes_of_queue(size: u16) -> u64 {
    (HEADER_BYTES + ENTRY_BYTES * u64::from(size)).next_multiple_of(ALIGN)
}

/// Bytes for so many queues, and for whose they are.
pub fn bytes_of_region(queues: u16, size: u16) -> u64 {
    (bytes_of_queue(size) * u64::from(queues) + OWNER_BYTES).next_multiple_of(PAGE_BYTES)
}

/// Notes of which volume or snapshot the requests in a region are that has so many bytes.
pub fn set_owner(memory: &Memory, bytes: u64, uuid: &str) -> Option<()> {
    memory.write(bytes.checked_sub(OWNER_BYTES)?, &[OWNER, uuid.as_bytes()].concat())
}

/// That volume's or snapshot's uuid; of a region that an older server has made, nobody knows it.
pub fn owner(memory: &Memory, bytes: u64) -> Option<String> {
    let mut noted = [0; OWNER.len() + UUID_BYTES];
    memory.read(bytes.checked_sub(OWNER_BYTES)?, &mut noted)?;
    let uuid = noted.strip_prefix(OWNER)?;
    Some(uuid.escape_ascii().to_string())
}

/// The notes of one queue.
pub struct Inflight {
    memory: Arc<Memory>,
    base: u64,
    size: u16,
    /// Of the next request.
    counter: u64,
}

impl Inflight {
    /// Takes over the notes of a queue, after a server that ended at any point: also says which requests are still to
    /// be done, in their order. `used` is how far the used ring is.
    ///
    /// # Errors
    /// What is noted cannot be.
    pub fn recover(
        memory: Arc<Memory>,
        queue: u16,
        size: u16,
        used: u16,
    ) -> Result<(Self, Vec<u16>), Broken> {
        let base = u64::from(queue) * bytes_of_queue(size);
        let mut this = Self { memory, base, size, counter: 0 };
        let (version, descriptors) = (this.load(base + VERSION)?, this.load(base + DESCRIPTORS)?);
        if version == 0 {
            // The version last: a server that ends before it leaves notes that are new.
            this.store(base + USED, used)?;
            this.store(base + DESCRIPTORS, size)?;
            this.store(base + VERSION, 1)?;
        } else if version != 1 || descriptors != size {
            return Err(Broken("the region of requests under way is of another version or size"));
        }
        // One that was put into the used ring, and is marked still.
        if this.load(base + USED)? != used {
            let last = this.load(base + LAST)?;
            if last >= size {
                return Err(Broken("the region of requests under way names one that cannot be"));
            }
            this.mark(last, 0)?;
            this.store(base + USED, used)?;
        }
        let mut found = Vec::new();
        for head in 0..size {
            let mut entry = [0; ENTRY_BYTES as usize];
            this.memory.read(this.entry(head), &mut entry).ok_or(GONE)?;
            let counter =
                u64::from_le_bytes(entry[COUNTER as usize..].try_into().unwrap_or([0; 8]));
            if entry[0] != 0 {
                found.push((counter, head));
                this.counter = this.counter.max(counter.wrapping_add(1));
            }
        }
        found.sort_unstable();
        Ok((this, found.into_iter().map(|(_, head)| head).collect()))
    }

    /// A request is about to be begun.
    pub fn begin(&mut self, head: u16) -> Result<(), Broken> {
        let at = self.entry(head);
        self.memory.write(at + COUNTER, &self.counter.to_le_bytes()).ok_or(GONE)?;
        self.counter = self.counter.wrapping_add(1);
        self.mark(head, 1)
    }

    /// A request is about to be put into the used ring.
    pub fn ends(&mut self, head: u16) -> Result<(), Broken> {
        let last = self.load(self.base + LAST)?;
        self.store(self.entry(head) + NEXT, last)?;
        self.store(self.base + LAST, head)
    }

    /// A request is in the used ring, which is now this far.
    pub fn ended(&mut self, head: u16, used: u16) -> Result<(), Broken> {
        self.mark(head, 0)?;
        self.store(self.base + USED, used)
    }

    fn entry(&self, head: u16) -> u64 {
        self.base + HEADER_BYTES + ENTRY_BYTES * u64::from(head % self.size)
    }

    /// The mark is a byte of its own; those behind it are not used.
    fn mark(&self, head: u16, mark: u16) -> Result<(), Broken> {
        self.store(self.entry(head), mark)
    }

    fn load(&self, at: u64) -> Result<u16, Broken> {
        self.memory.load(at).ok_or(GONE)
    }

    fn store(&self, at: u64, value: u16) -> Result<(), Broken> {
        self.memory.store(at, value).ok_or(GONE)
    }
}

const GONE: Broken = Broken("the region of requests under way is too short");

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::fs::File;

    const SIZE: u16 = 8;

    fn notes() -> Arc<Memory> {
        let file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(4096).unwrap();
        Arc::new(super::super::memory::map_shared(file.into(), 0, 4096).unwrap())
    }

    /// What the next server finds to do, as it finds the used ring there.
    fn left(memory: &Arc<Memory>, used: u16) -> Vec<u16> {
        Inflight::recover(Arc::clone(memory), 1, SIZE, used).unwrap().1
    }

    #[test]
    fn wherever_a_server_ends_what_was_not_answered_is_left_and_nothing_else() {
        // Places in the work on a request: noted, about to be answered, answered, without a mark, and all of it.
        for place in 0..5 {
            let memory = notes();
            let (mut inflight, found) =
                Inflight::recover(Arc::clone(&memory), 1, SIZE, 65535).unwrap();
            assert!(found.is_empty());
            // Out of order, over the end of the counter of the used ring.
            for head in [3, 7, 0, 5] {
                inflight.begin(head).unwrap();
            }
            inflight.ends(7).unwrap();
            inflight.ended(7, 0).unwrap();
            let mut used = 0;
            if place > 0 {
                inflight.ends(0).unwrap();
            }
            if place > 1 {
                used = 1;
            }
            if place > 2 {
                inflight.mark(0, 0).unwrap();
            }
            if place > 3 {
                inflight.ended(0, 1).unwrap();
            }
            let expected: &[u16] = if place > 1 { &[3, 5] } else { &[3, 0, 5] };
            assert_eq!(left(&memory, used), expected, "ended at place {place}");
            // The next one may end at once, and the one after it finds the same.
            assert_eq!(left(&memory, used), expected);
            assert!(Inflight::recover(Arc::clone(&memory), 0, SIZE, 0).unwrap().1.is_empty());
        }
    }

    #[test]
    fn notes_that_were_begun_and_have_no_version_yet_are_new() {
        let memory = notes();
        memory.store(DESCRIPTORS, SIZE).unwrap();
        assert!(Inflight::recover(Arc::clone(&memory), 0, SIZE, 7).unwrap().1.is_empty());
        assert_eq!(memory.load(VERSION), Some(1));
    }

    #[test]
    fn notes_that_cannot_be_are_refused() {
        let memory = notes();
        drop(Inflight::recover(Arc::clone(&memory), 0, SIZE, 0).unwrap());
        assert!(Inflight::recover(Arc::clone(&memory), 0, 4, 0).is_err());
        memory.store(LAST, SIZE).unwrap();
        assert!(Inflight::recover(Arc::clone(&memory), 0, SIZE, 1).is_err());
        assert!(Inflight::recover(Arc::clone(&memory), 63, SIZE, 0).is_err(), "behind their end");
        memory.store(VERSION, 2).unwrap();
        assert!(Inflight::recover(memory, 0, SIZE, 0).is_err());
    }
}
