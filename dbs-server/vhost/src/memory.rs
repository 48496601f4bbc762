//! Memory of a virtual machine, as its process shares it: mapped, and read and written by copying alone.
//!
//! The guest may change any of it at any time. So no reference to it is ever made, nothing in it is looked at twice, and
//! what is checked is a copy.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};

/// Parts of memory at most: what the protocol allows in one table.
pub const REGIONS_MAX: usize = 8;

/// A part of the memory, as the machine's process describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Where the guest has it.
    pub guest: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Where the process has it.
    pub user: u64,
    /// Where it begins in its file.
    pub offset: u64,
}

/// Memory of a guest. What is outside of it gives `None`.
pub struct Memory {
    map: GuestMemoryMmap,
    regions: Vec<Region>,
}

impl Memory {
    /// Maps the parts, each out of its file.
    ///
    /// # Errors
    /// They overlap, are longer than their files, or cannot be mapped.
    pub fn map(parts: Vec<(Region, OwnedFd)>) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        let regions = parts.iter().map(|(region, _)| *region).collect();
        let mut mapped = Vec::new();
        for (region, file) in parts {
            let Region { guest, size, offset, user } = region;
            let file = File::from(file);
            let end = offset.checked_add(size).filter(|_| user.checked_add(size).is_some());
            // Beyond the end of the file, an access would end this process.
            let inside = |end| file.metadata().is_ok_and(|m| m.len() >= end);
            if size == 0 || !end.is_some_and(inside) {
                return Err(invalid(format!("memory of {size} bytes is not in its file")));
            }
            let part = MmapRegion::from_file(FileOffset::new(file, offset), size as usize);
            let part = part.map_err(|error| invalid(error.to_string()))?;
            let part = GuestRegionMmap::new(part, GuestAddress(guest));
            mapped.push(part.ok_or_else(|| invalid("memory ends beyond 2^64".to_owned()))?);
        }
        mapped.sort_by_key(GuestMemoryRegion::start_addr);
        let map = GuestMemoryMmap::from_regions(mapped).map_err(|e| invalid(e.to_string()))?;
        Ok(Self { map, regions })
    }

    /// Where the guest has what the machine's process has at this address.
    pub fn guest_address(&self, user: u64) -> Option<u64> {
        let inside = |region: &&Region| user >= region.user && user - region.user < region.size;
        let region = self.regions.iter().find(inside)?;
        Some(region.guest + (user - region.user))
    }

    /// Whether all of a range is there.
    pub fn has(&self, address: u64, length: usize) -> bool {
        GuestMemoryBackend::check_range(&self.map, GuestAddress(address), length)
    }

    /// Copies out of it.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        self.map.read_slice(bytes, GuestAddress(address)).ok()
    }

    /// Copies into it.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        self.map.write_slice(bytes, GuestAddress(address)).ok()
    }

    /// A number that the guest's processors change; what they wrote before it is seen after.
    pub fn load(&self, address: u64) -> Option<u16> {
        self.map.load(GuestAddress(address), Ordering::Acquire).ok().map(u16::from_le)
    }

    /// Sets such a number, after all that was written before.
    pub fn store(&self, address: u64, value: u16) -> Option<()> {
        self.map.store(value.to_le(), GuestAddress(address), Ordering::Release).ok()
    }
}

/// Memory shared with whoever keeps it for the next server: see [`super::inflight`].
pub fn map_shared(file: OwnedFd, offset: u64, size: u64) -> io::Result<Memory> {
    Memory::map(vec![(Region { guest: 0, size, user: 0, offset }, file)])
}
