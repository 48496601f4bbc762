//! Reading a store's metadata off the device, for [`crate::meta::load::Loader`] to make sense of.

use super::ring;
use super::unreadable::{READ_BYTES, is_unreadable, read_blocks};
use crate::error::{Error, Result};
use crate::format::geometry::SUPERBLOCK_SECOND;
use crate::format::journal::Scan;
use crate::format::superblock::Claim;
use crate::format::{Geometry, RegionKind, Superblock};
use crate::info::{Finding, Severity};
use crate::io::{ReadRequest, Storage, buffer::AlignedBuf};
use crate::limits::SEQUENCE_START_MAX;
use crate::meta::load::Loader;
use crate::units::BLOCK_BYTES;

/// A copy of the superblock.
pub(super) struct Seen {
    address: u64,
    /// What is there, unless the device cannot read it.
    bytes: Option<AlignedBuf>,
    copy: Result<Superblock>,
}

impl Seen {
    fn claim(&self) -> Option<Claim> {
        self.bytes.as_ref().and_then(|bytes| Superblock::claim(bytes))
    }
}

/// The current superblock, and what is wrong with its copies.
///
/// # Errors
/// `Invalid` if this is no store, `Unsupported`, `Corrupt`, `Io`.
pub(super) fn read_superblock(storage: &dyn Storage) -> Result<(Superblock, Vec<Finding>)> {
    let size = storage.size_bytes();
    let (best, mut seen) = newest(storage)?;
    if best.geometry.size > size {
        return Err(Error::corrupt(format!(
            "the store has {} bytes, but the file or device has only {size}: it is truncated, and \
             the content behind its end is lost",
            best.geometry.size
        )));
    }
    let last = best.geometry.superblock_last();
    if seen.last().is_some_and(|seen| seen.address != last) {
        seen.pop();
        seen.push(see(storage, last)?);
    }
    let notes = seen
        .into_iter()
        .filter_map(|Seen { address, copy, .. }| match copy {
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

/// The current superblock, whether or not all of the store is there.
///
/// # Errors
/// As [`read_superblock`].
pub(super) fn newest(storage: &dyn Storage) -> Result<(Superblock, Vec<Seen>)> {
    let size = storage.size_bytes();
    if size < 4 * BLOCK_BYTES {
        return Err(Error::invalid(format!("not a DBS store: only {size} bytes")));
    }
    let end = size / BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES;
    let mut seen = Vec::new();
    for address in [0, SUPERBLOCK_SECOND, end] {
        seen.push(see(storage, address)?);
    }
    // The first good copy says which store this is: the last block of a device that grew may hold
    // a copy that an earlier store left there.
    let good = || seen.iter().filter_map(|seen| seen.copy.as_ref().ok());
    let identity = good().next().map(|first| first.uuid);
    let best = good().filter(|s| Some(s.uuid) == identity).max_by_key(|s| s.sequence);
    let Some(best) = best.copied() else {
        let repairing = |seen: &Seen| seen.claim().is_some_and(|claim| claim.repairing);
        let told = seen.iter().position(repairing).unwrap_or(0);
        let fault = seen.swap_remove(told).copy.err();
        return Err(fault.unwrap_or_else(|| Error::corrupt("superblock")));
    };
    outdated(&mut seen, &best)?;
    Ok((best, seen))
}

/// Refuses to go by a copy that may be older than what was acknowledged. By the order of writing
/// (`write_superblock`) any copy that was last written with the others is right, and the first copy
/// always is one. Without that one, some other copy may say that there was a newer superblock, and the
/// device's last block may hold what is left of another store, or of this one when it was larger.
fn outdated(seen: &mut [Seen], best: &Superblock) -> Result<()> {
    let Some((first, others)) = seen.split_first_mut() else { return Ok(()) };
    if first.copy.is_ok() {
        return Ok(());
    }
    let newer = |seen: &&mut Seen| {
        let claim = seen.claim().filter(|claim| claim.uuid == best.uuid);
        seen.copy.is_err() && claim.is_some_and(|claim| claim.sequence > best.sequence)
    };
    let told = std::iter::once(&mut *first).chain(others.iter_mut()).find(newer);
    if let Some(seen) = told {
        return Err(take_error(seen));
    }
    let Some(second) = others.first_mut() else { return Ok(()) };
    if second.copy.is_err() && (first.bytes.is_none() || second.bytes.is_none()) {
        let unreadable = if first.bytes.is_none() { first } else { second };
        return Err(take_error(unreadable).context(
            "neither copy of the superblock at the start is good, and the one at the end alone may be \
             an old one; try again, or copy what can be read to another device and open that",
        ));
    }
    Ok(())
}

fn take_error(seen: &mut Seen) -> Error {
    let taken = std::mem::replace(&mut seen.copy, Err(Error::corrupt("superblock")));
    taken.err().unwrap_or_else(|| Error::corrupt("superblock"))
}

/// What the copies claim, good or not.
pub(super) fn claims(storage: &dyn Storage) -> Vec<Claim> {
    copies(storage).iter().filter_map(|(_, block)| Superblock::claim(block)).collect()
}

/// What a copy of the superblock proves of who the store is, whatever else is wrong.
pub(super) fn identity(storage: &dyn Storage) -> Option<Claim> {
    claims(storage).into_iter().next()
}

/// The superblock that copies which are all damaged have in common, if it proves itself: where two
/// of three agree, that is taken, and the checksum of one of them must be the outcome's.
pub(super) fn vote(storage: &dyn Storage) -> Option<Superblock> {
    let copies = copies(storage);
    let [(_, a), (_, b), (_, c)] = copies.as_slice() else { return None };
    let both = |a: u8, b: u8, c: u8| if b == c { b } else { a };
    let common: Vec<u8> =
        a.iter().zip(b.iter()).zip(c.iter()).map(|((a, b), c)| both(*a, *b, *c)).collect();
    copies.iter().find_map(|(address, block)| {
        let mut candidate = common.clone();
        candidate[12..16].copy_from_slice(&block[12..16]);
        candidate[40..48].copy_from_slice(&address.to_le_bytes());
        Superblock::decode(&candidate, *address).ok()
    })
}

/// The copies that can be read, with their addresses.
fn copies(storage: &dyn Storage) -> Vec<(u64, AlignedBuf)> {
    let size = storage.size_bytes();
    if size < 4 * BLOCK_BYTES {
        return Vec::new();
    }
    let end = size / BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES;
    let read = |address| {
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        storage.read_at(address, &mut block).ok().map(|()| (address, block))
    };
    [0, SUPERBLOCK_SECOND, end].into_iter().filter_map(read).collect()
}

/// One copy, proven or not.
fn see(storage: &dyn Storage, address: u64) -> Result<Seen> {
    let mut bytes = AlignedBuf::zeroed(BLOCK_BYTES as usize);
    match storage.read_at(address, &mut bytes) {
        Ok(()) => {
            let copy = Superblock::decode(&bytes, address);
            Ok(Seen { address, bytes: Some(bytes), copy })
        }
        Err(error) => {
            let unreadable = is_unreadable(&error);
            let error = Error::io(error, format!("reading the superblock at {address} failed"));
            if unreadable {
                Ok(Seen { address, bytes: None, copy: Err(error) })
            } else {
                Err(error)
            }
        }
    }
}

/// Reads all of journal, tables and extent status, and redoes the journal.
pub(super) fn load(storage: &dyn Storage, superblock: &Superblock) -> Result<Loader> {
    load_within(storage, superblock, None)
}

/// As [`load`], with so many bytes of memory for bitmaps of extents, if they have a bound: some may be away then.
pub(super) fn load_within(
    storage: &dyn Storage,
    superblock: &Superblock,
    memory: Option<u64>,
) -> Result<Loader> {
    load_with(storage, superblock, ring::read_all(storage, superblock)?, memory)
}

/// As [`load`] for who only reads: of the journal what is needed, if nothing is wrong with that.
pub(super) fn load_to_read(
    storage: &dyn Storage,
    superblock: &Superblock,
    memory: Option<u64>,
) -> Result<Loader> {
    load_with(storage, superblock, ring::read_needed(storage, superblock)?, memory)
}

fn load_with(
    storage: &dyn Storage,
    superblock: &Superblock,
    scan: Scan,
    memory: Option<u64>,
) -> Result<Loader> {
    let mut loader = Loader::new(superblock, scan);
    memory.into_iter().for_each(|bytes| loader.bound_bitmaps(bytes));
    for region in RegionKind::MARKED {
        load_region(storage, &superblock.geometry, region, &mut loader)?;
    }
    loader.redo();
    Ok(loader)
}

/// What a store says that has hardly a sequence left: it can be read, and not written.
pub(super) const USED_UP: &str =
    "impossible sequence: later writes might never be read; copy the volumes to another store";

/// Whether there are sequences left for whoever writes, after the last group and the superblock's own.
pub(super) fn is_used_up(superblock: &Superblock, durable: u64) -> bool {
    superblock.sequence.max(durable) > SEQUENCE_START_MAX
}

/// Reads the label blocks that are needed.
pub(super) fn load_labels(
    storage: &dyn Storage,
    geometry: &Geometry,
    loader: &mut Loader,
) -> Result<()> {
    let mut buffers = [(); 2].map(|()| AlignedBuf::zeroed(BLOCK_BYTES as usize));
    for index in loader.labels_to_read() {
        let bad = read_copies(storage, geometry, RegionKind::Labels, index, &mut buffers)?;
        let copy = |part: usize| bad[part].is_empty().then_some(&buffers[part][..]);
        loader.label_block(index, [copy(0), copy(1)]);
    }
    Ok(())
}

/// Reads metadata blocks of extents again whose bitmaps have gone.
pub(super) fn load_again(
    storage: &dyn Storage,
    geometry: &Geometry,
    blocks: &[u32],
    loader: &mut Loader,
) -> Result<()> {
    let mut buffers = [(); 2].map(|()| AlignedBuf::zeroed(BLOCK_BYTES as usize));
    for index in blocks {
        let bad = read_copies(storage, geometry, RegionKind::Extents, *index, &mut buffers)?;
        let copy = |part: usize| bad[part].is_empty().then_some(&buffers[part][..]);
        loader.block_again(*index, [copy(0), copy(1)]);
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
        let bad = read_copies(storage, geometry, region, first, &mut parts)?;
        for index in 0..count {
            let at = index as usize * BLOCK_BYTES as usize;
            let copy = |part: usize| {
                let is_bad = bad[part].binary_search(&index).is_ok();
                (!is_bad).then(|| &buffers[part][at..at + BLOCK_BYTES as usize])
            };
            loader.block(region, first + index, [copy(0), copy(1)]);
        }
        first += count;
    }
    Ok(())
}

/// Reads both copies of some blocks; which of each could not be read.
pub(super) fn read_copies<B: std::ops::DerefMut<Target = [u8]>>(
    storage: &dyn Storage,
    geometry: &Geometry,
    region: RegionKind,
    first: u32,
    buffers: &mut [B; 2],
) -> Result<[Vec<u32>; 2]> {
    let [a, b] = buffers;
    let places = [0, 1].map(|copy| geometry.block_address(region, first, copy));
    let mut requests = [
        ReadRequest { offset: places[0], buf: &mut *a },
        ReadRequest { offset: places[1], buf: &mut *b },
    ];
    let read = match storage.read_many(&mut requests) {
        Err(error) if is_unreadable(&error) => read_blocks(storage, places[0], a)
            .and_then(|bad| Ok([bad, read_blocks(storage, places[1], b)?])),
        read => read.map(|()| Default::default()),
    };
    read.map_err(|error| {
        Error::io(error, format!("reading the {} from block {first} on failed", region.name()))
    })
}

#[cfg(test)]
mod tests {
    use crate::format::{Geometry, RegionKind};
    use crate::io::{open as drivers, tail as tails};
    use crate::store::{InitOptions, IoDriver, OpenOptions, Store};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    const DATA: [u8; 4096] = [7; 4096];

    /// A store with sixty volumes, closed; the last one holds [`DATA`].
    fn make(path: &Path) -> Geometry {
        let options =
            InitOptions { size: Some(64 << 20), extent_size: 64 << 10, ..InitOptions::default() };
        Store::init(path, &options).unwrap();
        let store = Store::open(path, &OpenOptions::default()).unwrap();
        (0..60).for_each(|i| drop(store.create_volume(&format!("v{i}"), 1 << 20).unwrap()));
        store.volume("v59").unwrap().write_at(0, &DATA, true).unwrap();
        let geometry = store.inner.meta().geometry;
        store.close().unwrap();
        geometry
    }

    fn damage(path: &Path, geometry: &Geometry, copies: u32) {
        let file = File::options().write(true).open(path).unwrap();
        for region in [RegionKind::Volumes, RegionKind::Snapshots] {
            for (index, copy) in (0..8).flat_map(|i| (0..copies).map(move |copy| (i, copy))) {
                let at = geometry.block_address(region, index, copy);
                file.write_all_at(&[1; 100], at + 2000).unwrap();
            }
        }
    }

    /// Bitmaps go while they are read, and not only at the end: memory has a bound at any moment. Those that the
    /// journal changes stay.
    #[test]
    fn bitmaps_are_let_go_while_they_are_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        make(&path);
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("w", 512 << 16).unwrap();
        let volume = store.volume("w").unwrap();
        for (extent, block) in (0..512).flat_map(|extent| [0, 2, 5].map(|block| (extent, block))) {
            volume.write_at((extent << 16) + block * 4096, &DATA, false).unwrap();
        }
        drop(volume);
        store.close().unwrap();
        let loaded = |memory| {
            let storage = drivers::open_storage(&path, true, IoDriver::Auto).unwrap().storage;
            let superblock = super::read_superblock(&*storage).unwrap().0;
            super::load_within(&*storage, &superblock, memory).unwrap().bitmap_bytes()
        };
        let [all, some, none] = [None, Some(3000), Some(0)].map(loaded);
        assert_eq!((all, none), (512 * 8, 0));
        assert!((2000..=3000).contains(&some), "{some}");
    }

    /// Notes of bad copies once counted as damage that makes looking on useless: with enough of them the
    /// extents were not read, volumes showed zeros, and their space was taken for free.
    #[test]
    fn many_bad_copies_are_no_damage() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let geometry = make(&path);
        damage(&path, &geometry, 1);
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        let mut found = [0; 4096];
        store.volume("v59").unwrap().read_at(0, &mut found).unwrap();
        assert!(found == DATA, "other content");
        store.close().unwrap();
    }

    /// It was looked for under the uuid that a copy proves, and none did.
    #[test]
    fn the_tail_is_found_when_no_copy_of_the_superblock_is_good() {
        if tails::pick_directory(&tails::default_candidates()).is_none() {
            println!("SKIPPED: there is no tmpfs for a tail");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let geometry = make(&path);
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.volume("v1").unwrap().write_at(0, &DATA, false).unwrap();
        drop(store);
        let file = File::options().write(true).open(&path).unwrap();
        for (at, byte) in
            [(0, 90), (super::SUPERBLOCK_SECOND, 100), (geometry.superblock_last(), 200)]
        {
            file.write_all_at(&[0xa5], at + byte).unwrap();
        }
        let plan = Store::plan_repair(&path, &crate::store::RepairOptions::default()).unwrap();
        plan.carry_out(&directory.path().join("saved")).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        let mut found = [0; 4096];
        store.volume("v1").unwrap().read_at(0, &mut found).unwrap();
        assert!(found == DATA, "what the tail held is lost");
        store.close().unwrap();
    }

    #[test]
    fn too_much_damage_is_refused_by_repair() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let geometry = make(&path);
        damage(&path, &geometry, 2);
        let options = crate::store::RepairOptions::default();
        let error = Store::plan_repair(&path, &options).err().unwrap();
        assert!(error.to_string().contains("restore-metadata"), "{error}");
    }
}
