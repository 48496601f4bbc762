//! A split virtqueue, from the side of the device: what the guest makes available is taken, what is done goes into the
//! used ring. All of it is in memory that the guest may change at any time, and nothing in it is believed.

use super::memory::Memory;
use std::sync::atomic::{Ordering, fence};

/// Places of a ring at most.
pub const SIZE_MAX: u16 = 1024;
/// Pieces of memory of one request at most, beside those of the ring itself.
const INDIRECT_MAX: usize = 1024;
const DESCRIPTOR_BYTES: u64 = 16;
const FLAG_NEXT: u16 = 1;
const FLAG_WRITE: u16 = 2;
const FLAG_INDIRECT: u16 = 4;
/// In the flags of the available ring: the guest polls.
const NO_INTERRUPT: u16 = 1;

/// Why a queue is not served any more: no driver does that, so nothing in it means anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken(pub &'static str);

/// Why a request is not carried out: what its descriptors say cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// A piece of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub length: u32,
}

/// The memory of a request: what the device reads, then what it writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// Read by the device.
    pub readable: Vec<Segment>,
    /// Written by it.
    pub writable: Vec<Segment>,
}

/// Where the parts of a ring are in the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Descriptors.
    pub descriptors: u64,
    /// The ring of what is available.
    pub available: u64,
    /// The ring of what is used.
    pub used: u64,
}

/// A ring.
pub struct Ring {
    places: Places,
    size: u16,
    /// What to take next.
    next: u16,
    /// Requests put into the used ring, as far as the guest is told.
    used: u16,
    /// Up to where the guest has been signalled; unknown for a ring that a server before has served.
    signalled: Option<u16>,
    event_index: bool,
}

impl Ring {
    /// A ring of `size` places, with `next` to be taken next.
    ///
    /// # Errors
    /// It is not in the guest's memory, or no such ring can be.
    pub fn new(
        memory: &Memory,
        places: Places,
        size: u16,
        next: u16,
        event_index: bool,
    ) -> Result<Self, Broken> {
        let Places { descriptors, available, used } = places;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(Broken("the size of the ring is no power of two up to 1024"));
        }
        let aligned = descriptors % 16 == 0 && available % 2 == 0 && used % 4 == 0;
        let length = usize::from(size);
        let there = memory.has(descriptors, 16 * length)
            && memory.has(available, 6 + 2 * length)
            && memory.has(used, 6 + 8 * length);
        if !aligned || !there {
            return Err(Broken("the ring is not in the guest's memory, or not aligned"));
        }
        let used = memory.load(used + 2).ok_or(GONE)?;
        Ok(Self { places, size, next, used, signalled: None, event_index })
    }

    /// How many places it has.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// What is to be taken next.
    pub fn next(&self) -> u16 {
        self.next
    }

    /// Goes on from another place.
    pub fn go_to(&mut self, next: u16) {
        self.next = next;
    }

    /// How far the used ring is.
    pub fn used(&self) -> u16 {
        self.used
    }

    /// Takes the next request: the number of its first descriptor.
    ///
    /// # Errors
    /// The guest claims more than the ring has places, or a descriptor that is not there.
    pub fn pop(&mut self, memory: &Memory) -> Result<Option<u16>, Broken> {
        let ready = memory.load(self.places.available + 2).ok_or(GONE)?.wrapping_sub(self.next);
        if ready == 0 {
            return Ok(None);
        }
        if ready > self.size {
            return Err(Broken("more requests are available than the ring has places"));
        }
        let at = self.places.available + 4 + 2 * u64::from(self.next % self.size);
        let head = memory.load(at).ok_or(GONE)?;
        if head >= self.size {
            return Err(Broken("a request begins at a descriptor that is not there"));
        }
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    /// Asks the guest to tell of the next request; whether there is one already.
    ///
    /// # Errors
    /// The ring is not there any more.
    pub fn ask(&self, memory: &Memory) -> Result<bool, Broken> {
        if self.event_index {
            let at = self.places.used + 4 + 8 * u64::from(self.size);
            memory.store(at, self.next).ok_or(GONE)?;
            // What is asked is seen before what is available is looked at.
            fence(Ordering::SeqCst);
        }
        Ok(memory.load(self.places.available + 2).ok_or(GONE)? != self.next)
    }

    /// Puts a request into the used ring, with the bytes written for it; the guest sees it at once.
    ///
    /// # Errors
    /// The ring is not there any more.
    pub fn push(&mut self, memory: &Memory, head: u16, written: u32) -> Result<(), Broken> {
        let at = self.places.used + 4 + 8 * u64::from(self.used % self.size);
        let mut element = [0; 8];
        element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        element[4..].copy_from_slice(&written.to_le_bytes());
        memory.write(at, &element).ok_or(GONE)?;
        self.used = self.used.wrapping_add(1);
        memory.store(self.places.used + 2, self.used).ok_or(GONE)
    }

    /// Whether the guest wants to be told of what was put into the used ring since it was asked last.
    ///
    /// # Errors
    /// The ring is not there any more.
    pub fn wants_signal(&mut self, memory: &Memory) -> Result<bool, Broken> {
        // A server that was killed between an answer and its signal has left a guest that waits, and perhaps for an
        // answer that has been there for long: it is signalled in any case.
        let Some(before) = self.signalled.replace(self.used) else { return Ok(true) };
        if before == self.used {
            return Ok(false);
        }
        // The used ring is seen before what the guest wants is looked at.
        fence(Ordering::SeqCst);
        if !self.event_index {
            return Ok(memory.load(self.places.available).ok_or(GONE)? & NO_INTERRUPT == 0);
        }
        let at = self.places.available + 4 + 2 * u64::from(self.size);
        let wanted = memory.load(at).ok_or(GONE)?;
        let new = self.used.wrapping_sub(wanted).wrapping_sub(1);
        Ok(new < self.used.wrapping_sub(before))
    }

    /// Follows the descriptors of a request.
    ///
    /// # Errors
    /// They are not such as a driver makes.
    pub fn follow(&self, memory: &Memory, head: u16, chain: &mut Chain) -> Result<(), Malformed> {
        chain.readable.clear();
        chain.writable.clear();
        let mut index = head;
        for _ in 0..self.size {
            let at = self.places.descriptors + DESCRIPTOR_BYTES * u64::from(index);
            let descriptor = Descriptor::load(memory, at)?;
            if descriptor.flags & FLAG_INDIRECT != 0 {
                return follow_indirect(memory, &descriptor, chain);
            }
            chain.add(memory, &descriptor)?;
            if descriptor.flags & FLAG_NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
            if index >= self.size {
                return Err(Malformed("a descriptor leads to one that is not there"));
            }
        }
        Err(Malformed("its descriptors lead in a circle"))
    }
}

const GONE: Broken = Broken("the ring is not in the guest's memory");

fn follow_indirect(
    memory: &Memory,
    table: &Descriptor,
    chain: &mut Chain,
) -> Result<(), Malformed> {
    let count = u64::from(table.length) / DESCRIPTOR_BYTES;
    if table.flags & FLAG_NEXT != 0 || !chain.readable.is_empty() || !chain.writable.is_empty() {
        return Err(Malformed("a table of descriptors is not alone in its request"));
    }
    if count == 0 || !u64::from(table.length).is_multiple_of(DESCRIPTOR_BYTES) {
        return Err(Malformed("the length of a table of descriptors is none"));
    }
    if !memory.has(table.address, table.length as usize) {
        return Err(Malformed("a table of descriptors is not in the guest's memory"));
    }
    let mut index = 0;
    for _ in 0..count.min(INDIRECT_MAX as u64) {
        let descriptor = Descriptor::load(memory, table.address + DESCRIPTOR_BYTES * index)?;
        if descriptor.flags & FLAG_INDIRECT != 0 {
            return Err(Malformed("a table of descriptors has another one in it"));
        }
        chain.add(memory, &descriptor)?;
        if descriptor.flags & FLAG_NEXT == 0 {
            return Ok(());
        }
        index = u64::from(descriptor.next);
        if index >= count {
            return Err(Malformed("a descriptor leads to one that is not there"));
        }
    }
    Err(Malformed("its descriptors lead in a circle, or are more than 1024"))
}

/// A copy of a descriptor.
struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn load(memory: &Memory, at: u64) -> Result<Self, Malformed> {
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        memory.read(at, &mut bytes).ok_or(Malformed("a descriptor is not in the memory"))?;
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = bytes;
        Ok(Self {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            length: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        })
    }
}

impl Chain {
    fn add(&mut self, memory: &Memory, descriptor: &Descriptor) -> Result<(), Malformed> {
        let Descriptor { address, length, flags, .. } = *descriptor;
        if !memory.has(address, length as usize) {
            return Err(Malformed("a piece is not in the guest's memory"));
        }
        let segment = Segment { address, length };
        if flags & FLAG_WRITE != 0 {
            self.writable.push(segment);
        } else if self.writable.is_empty() {
            self.readable.push(segment);
        } else {
            return Err(Malformed("a piece to read is behind one to write"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::map_shared;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::fs::File;

    /// Found by review: a server that was killed between an answer and its signal left a guest that waited for ever, as
    /// what it wants to be told of lay behind what the next server took for told.
    #[test]
    fn who_serves_a_ring_anew_signals_it_whatever_the_guest_was_told() {
        let file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(4096).unwrap();
        let memory = map_shared(file.into(), 0, 4096).unwrap();
        let places = Places { descriptors: 0, available: 1024, used: 2048 };
        let ring = || Ring::new(&memory, places, 8, 0, true).unwrap();
        let mut before = ring();
        assert!(before.wants_signal(&memory).unwrap(), "nobody knows what was before");
        before.push(&memory, 3, 1).unwrap();
        // It ends here. The guest waits for the answer that it has: its event index is 0.
        let mut now = ring();
        assert!(now.wants_signal(&memory).unwrap());
        assert!(!now.wants_signal(&memory).unwrap(), "once");
        memory.store(1024 + 4 + 2 * 8, 1).unwrap();
        now.push(&memory, 4, 1).unwrap();
        assert!(now.wants_signal(&memory).unwrap());
    }
}
