//! Reading a store's metadata off the device, for [`crate::meta::load::Loader`] to make sense of.

use crate::error::{Error, Result};
use crate::format::geometry::SUPERBLOCK_SECOND;
use crate::format::{Geometry, RegionKind, Superblock, journal};
use crate::info::{Finding, Severity};
use crate::io::{ReadRequest, Storage, buffer::AlignedBuf};
use crate::meta::load::Loader;
use crate::units::BLOCK_BYTES;

/// Bytes of each copy read at once.
const READ_BYTES: u64 = 1 << 20;

/// The current superblock, and what is wrong with its copies.
///
/// # Errors
/// `Invalid` if this is no store, `Unsupported`, `Corrupt`.
pub(super) fn read_superblock(storage: &dyn Storage) -> Result<(Superblock, Vec<Finding>)> {
    let size = storage.size_bytes();
    if size < 4 * BLOCK_BYTES {
        return Err(Error::invalid(format!("not a DBS store: only {size} bytes")));
    }
    let end = size / BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES;
    let mut found: Vec<(u64, Result<Superblock>)> = Vec::new();
    for address in [0, SUPERBLOCK_SECOND, end] {
        found.push((address, read_copy(storage, address)?));
    }
    // The first good copy says which store this is: the last block of a device that grew may hold
    // a copy that an earlier store left there.
    let good = || found.iter().filter_map(|(_, copy)| copy.as_ref().ok());
    let identity = good().next().map(|first| first.uuid);
    let best = good().filter(|s| Some(s.uuid) == identity).max_by_key(|s| s.sequence);
    let Some(best) = best.copied() else {
        return Err(found.swap_remove(0).1.err().unwrap_or_else(|| Error::corrupt("superblock")));
    };
    if best.geometry.size > size {
        return Err(Error::corrupt(format!(
            "the store was made with {} bytes but only {size} are here: the file or device is \
             truncated and what was behind is lost",
            best.geometry.size
        )));
    }
    let last = best.geometry.superblock_last();
    if last != end {
        found.pop();
        found.push((last, read_copy(storage, last)?));
    }
    let notes = found
        .into_iter()
        .filter_map(|(address, copy)| match copy {
            Ok(copy) if copy == best => None,
            Ok(copy) if copy.uuid != best.uuid => Some((address, "of another store".to_owned())),
            Ok(_) => Some((address, "older than the others".to_owned())),
            Err(error) => Some((address, error.to_string())),
        })
        .map(|(address, text)| Finding {
            severity: Severity::Note,
            region: "superblock".to_owned(),
            index: Some(address / BLOCK_BYTES),
            message: format!("copy at {address}: {text}; another copy is good"),
        });
    Ok((best, notes.collect()))
}

fn read_copy(storage: &dyn Storage, address: u64) -> Result<Result<Superblock>> {
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
    storage
        .read_at(address, &mut block)
        .map_err(|error| Error::io(error, format!("reading the superblock at {address} failed")))?;
    Ok(Superblock::decode(&block, address))
}

/// Reads journal, tables and extent status, and redoes the journal.
pub(super) fn load(storage: &dyn Storage, superblock: &Superblock) -> Result<Loader> {
    let ring = superblock.geometry.region(RegionKind::Journal);
    let mut bytes = AlignedBuf::zeroed(ring.length as usize);
    storage
        .read_at(ring.offset, &mut bytes)
        .map_err(|error| Error::io(error, "reading the journal failed"))?;
    let scan = journal::scan(&bytes, &superblock.uuid, ring.offset);
    drop(bytes);
    let mut loader = Loader::new(superblock, scan);
    for region in RegionKind::MARKED {
        load_region(storage, &superblock.geometry, region, &mut loader)?;
    }
    loader.redo();
    Ok(loader)
}

/// Reads the label blocks that are needed.
pub(super) fn load_labels(
    storage: &dyn Storage,
    geometry: &Geometry,
    loader: &mut Loader,
) -> Result<()> {
    let mut buffers = [(); 2].map(|()| AlignedBuf::zeroed(BLOCK_BYTES as usize));
    for index in loader.labels_to_read() {
        read_copies(storage, geometry, RegionKind::Labels, index, &mut buffers)?;
        loader.label_block(index, [&buffers[0], &buffers[1]]);
    }
    Ok(())
}

fn load_region(
    storage: &dyn Storage,
    geometry: &Geometry,
    region: RegionKind,
    loader: &mut Loader,
) -> Result<()> {
    let total = loader.blocks_to_read(region);
    let step = (READ_BYTES / BLOCK_BYTES) as u32;
    let most = u64::from(total.min(step)) * BLOCK_BYTES;
    let mut buffers = [(); 2].map(|()| AlignedBuf::zeroed(most as usize));
    let mut first = 0;
    while first < total && !loader.is_hopeless() {
        let count = step.min(total - first);
        let length = count as usize * BLOCK_BYTES as usize;
        let [a, b] = &mut buffers;
        let mut parts = [&mut a[..length], &mut b[..length]];
        read_copies(storage, geometry, region, first, &mut parts)?;
        for index in 0..count {
            let at = index as usize * BLOCK_BYTES as usize;
            let copy = |part: usize| &buffers[part][at..at + BLOCK_BYTES as usize];
            loader.block(region, first + index, [copy(0), copy(1)]);
        }
        first += count;
    }
    Ok(())
}

fn read_copies<B: std::ops::DerefMut<Target = [u8]>>(
    storage: &dyn Storage,
    geometry: &Geometry,
    region: RegionKind,
    first: u32,
    buffers: &mut [B; 2],
) -> Result<()> {
    let [a, b] = buffers;
    let mut requests = [
        ReadRequest { offset: geometry.block_address(region, first, 0), buf: a },
        ReadRequest { offset: geometry.block_address(region, first, 1), buf: b },
    ];
    storage.read_many(&mut requests).map_err(|error| {
        Error::io(error, format!("reading the {} from block {first} on failed", region.name()))
    })
}
