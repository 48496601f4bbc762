//! Metadata from a dump, for a store whose own is lost and whose data is there.

use super::dump::{
    DumpEntry, DumpKey, DumpSnapshot, DumpVolume, FORMAT, FORMAT_COMPRESSED, FORMAT_ENCRYPTED,
    unhex,
};
use super::identity::parse_uuid;
use super::pages::Pages;
use super::recover;
use super::repair::{self, OpenRepair, Repair, RepairTarget, knows_all_features};
use super::{IoDriver, Store, TailPlace};
use crate::error::{Error, ErrorKind, Result};
use crate::format::compressed::state_of;
use crate::format::geometry::REGION_KINDS;
use crate::format::journal::Scan;
use crate::format::slots::{self, KeySlot, SNAPSHOT_BACKED, SnapshotSlot, VolumeSlot};
use crate::format::superblock::{
    INCOMPAT_BACKED, INCOMPAT_COMPRESSED, INCOMPAT_ENCRYPTED, INCOMPAT_GROUPS, INCOMPAT_LOST,
    Superblock,
};
use crate::format::{Geometry, Region, RegionKind, entry, labels};
use crate::info::{RepairKind, RepairReport, RepairStep};
use crate::io::reading::ReadBy;
use crate::io::{ReadRequest, Storage, open as drivers};
use crate::limits::SEQUENCE_START_MAX;
use crate::meta::entries::SPARE_BASE;
use crate::meta::load::Loader;
use std::path::Path;
use zerocopy::{FromZeros, IntoBytes};

/// Bytes of slots in memory that any dump may take: of three hundred thousand.
const SLOTS_BYTES: u64 = 160 << 20;
/// Bytes of slots for each byte of the dump, beyond that.
const SLOTS_FACTOR: u64 = 16;

type Dump = super::dump::Dump<Vec<DumpEntry>>;

impl Store {
    /// Locks the store at `path` and plans to give it the metadata of a dump. Where there is nothing, a new
    /// file is planned, of the size that the store had: it is made when the plan is carried out.
    ///
    /// # Errors
    /// `Invalid` if the dump is none, or is of another store or of a larger one; `Corrupt` if what it
    /// says contradicts itself; `Unsupported` if the store has features that this version does not know;
    /// `Busy`, `Io`.
    pub fn plan_restore(path: &Path, dump: &[u8], driver: IoDriver) -> Result<OpenRepair> {
        let named = |error: Error| error.context(path.display());
        match drivers::open_storage(path, false, driver) {
            Ok(opened) => {
                let repair = Self::plan_restore_on(&*opened.storage, dump).map_err(named)?;
                let target = RepairTarget::Opened(opened);
                Ok(OpenRepair { target, repair, tail: TailPlace::Auto })
            }
            Err(error) if error.kind() == crate::ErrorKind::NotFound => {
                let size = superblock(&parse(dump)?)?.geometry.size;
                let absent = ReadBy::new(size, |requests: &mut [ReadRequest<'_>]| {
                    requests.iter_mut().for_each(|request| request.buf.fill(0));
                    Ok(())
                });
                let repair = Self::plan_restore_on(&absent, dump).map_err(named)?;
                let target = RepairTarget::New { path: path.to_owned(), size, driver };
                Ok(OpenRepair { target, repair, tail: TailPlace::None })
            }
            Err(error) => Err(error),
        }
    }

    /// As [`Store::plan_restore`], on storage of the caller's.
    ///
    /// # Errors
    /// As [`Store::plan_restore`].
    #[doc(hidden)]
    pub fn plan_restore_on(storage: &dyn Storage, dump: &[u8]) -> Result<Repair> {
        let (length, dump) = (dump.len() as u64, parse(dump)?);
        let superblock = superblock(&dump)?;
        let geometry = superblock.geometry;
        if storage.size_bytes() < geometry.size {
            return Err(Error::invalid(format!(
                "the dump is of a store of {} bytes, and only {} are here",
                geometry.size,
                storage.size_bytes()
            )));
        }
        if recover::identity(storage).is_some_and(|now| now.identity != superblock.identity()) {
            return Err(Error::invalid("the dump is of another store: its uuid is not this one's"));
        }
        let mut message = format!("all metadata becomes that of commit group {}", dump.sequence);
        // Above that of every copy there is: where it was cut off, an old one may be at the end.
        let others = recover::claims(storage).into_iter().map(|claim| claim.sequence);
        let sequence =
            others.filter(|sequence| *sequence < SEQUENCE_START_MAX / 2).max().unwrap_or(0);
        let now = match recover::read_superblock(storage) {
            Err(error) if error.kind() == ErrorKind::Unsupported => return Err(error),
            now => now.ok(),
        };
        if let Some((now, _)) = now {
            knows_all_features(&now)?;
            if recover::is_used_up(&now, 0) {
                return Err(Error::corrupt(recover::USED_UP));
            }
            let data = |geometry: &Geometry| {
                (geometry.extent_bytes, geometry.region(RegionKind::Data).offset)
            };
            if data(&now.geometry) != data(&geometry) {
                return Err(Error::invalid(
                    "the data of the store does not lie where that of the dump does",
                ));
            }
            let newest = recover::load(storage, &now).map_or(now.clean_sequence, |l| l.durable());
            if newest > dump.sequence {
                message += &format!(
                    "; the store is as of group {newest}: what was written since the dump is lost, and \
                     what was freed and used again since shows what is there now"
                );
            }
        }
        let marks = superblock.clean_marks;
        slots_are_worth_their_memory(&dump, length)?;
        let has = |what: fn(&DumpSnapshot) -> bool, feature: u64| {
            if dump.snapshots.iter().any(what) { feature } else { 0 }
        };
        let incompat = has(|snapshot| snapshot.flags & SNAPSHOT_BACKED != 0, INCOMPAT_BACKED)
            | has(|snapshot| snapshot.family.is_some(), INCOMPAT_ENCRYPTED);
        let compressed = dump.entries.iter().any(|entry| entry.stored.is_some());
        let incompat = incompat | if compressed { INCOMPAT_COMPRESSED } else { 0 };
        let superblock = Superblock { incompat, ..superblock };
        let mut loader = Loader::new(&superblock, Scan::default());
        fill(&mut loader, &dump, &geometry)?;
        let (meta, _) = loader.finish(0, [0; 16]).map_err(|error| error.context("the dump"))?;
        let lost = meta.snapshots().any(|(_, s)| !s.layer.lost.is_empty());
        let groups = if geometry.has_sums() { INCOMPAT_GROUPS } else { 0 };
        let incompat = groups | superblock.incompat | if lost { INCOMPAT_LOST } else { 0 };
        let new = Superblock { sequence, incompat, clean_marks: marks, ..superblock };
        let step = RepairStep {
            kind: RepairKind::Mended,
            region: "store".to_owned(),
            index: None,
            message,
        };
        let ranges = std::iter::once(0..geometry.metadata_end())
            .chain(repair::superblocks_behind(storage, &geometry))
            .collect();
        let mut report = RepairReport { steps: vec![step], ..RepairReport::default() };
        let pages = repair::damaged_pages(storage, Some(Pages::below_marks(&new)), &mut report)?;
        Ok(Repair {
            report,
            plan: Some((Box::new(meta), new)),
            pages,
            ranges,
            stand_ins: Vec::new(),
            store: superblock.uuid,
        })
    }
}

fn parse(bytes: &[u8]) -> Result<Dump> {
    let dump: Dump = serde_json::from_slice(bytes)
        .map_err(|error| Error::invalid(format!("no dump of a store's metadata: {error}")))?;
    if dump.crc32c.as_ref().is_some_and(|sum| !sum.is_of(bytes)) {
        return Err(Error::corrupt(
            "the dump is not as `dbs dump` wrote it: its checksum does not match. Use another copy of it; or, if somebody \
             changed it on purpose, remove its last field, `crc32c`",
        ));
    }
    if ![FORMAT, FORMAT_ENCRYPTED, FORMAT_COMPRESSED].contains(&dump.format.as_str()) {
        return Err(Error::invalid(format!(
            "a dump of format {}, not {FORMAT}, {FORMAT_ENCRYPTED} or {FORMAT_COMPRESSED}",
            dump.format
        )));
    }
    Ok(dump)
}

fn superblock(dump: &Dump) -> Result<Superblock> {
    let mut regions = [Region::default(); REGION_KINDS];
    for kind in RegionKind::ALL {
        let region = dump.regions.iter().find(|region| region.name == kind.name());
        regions[kind as usize - 1] = match region {
            Some(region) => Region { offset: region.offset, length: region.length },
            None if kind == RegionKind::Sums => continue,
            None => {
                return Err(Error::invalid(format!("the dump has no region `{}`", kind.name())));
            }
        };
    }
    let geometry = Geometry {
        size: dump.size,
        extent_bytes: dump.extent_size,
        volumes: dump.volumes_max,
        snapshots: dump.snapshots_max,
        spares: dump.spares_max,
        extents_max: dump.extents_max,
        regions,
    };
    geometry.validate().map_err(|error| error.context("the dump"))?;
    if dump.sequence > SEQUENCE_START_MAX {
        return Err(Error::invalid("the dump has an impossible sequence"));
    }
    let identity = parse_uuid(&dump.uuid)?;
    let marked = dump.metadata_uuid.as_deref().map_or(Ok(identity), parse_uuid)?;
    Ok(Superblock {
        uuid: marked,
        given: (marked != identity).then_some(identity),
        sequence: 0,
        created_ns: dump.created_ns,
        compat: 0,
        unknown_ro: 0,
        incompat: 0,
        geometry,
        clean_sequence: dump.sequence,
        clean_marks: dump.marks,
    })
}

/// The tables of slots reach to the last id in use, whatever is in between: a short dump with high ids
/// would take any amount of memory. A real store of which so little is left in use has had far more
/// volumes or snapshots than it has by default room for. (Entries take memory only where there are some.)
fn slots_are_worth_their_memory(dump: &Dump, length: u64) -> Result<()> {
    let end = |ids: &mut dyn Iterator<Item = u32>| u64::from(ids.max().unwrap_or(0)) + 1;
    let needed = end(&mut dump.volumes.iter().map(|v| v.id)) * size_of::<VolumeSlot>() as u64
        + end(&mut dump.snapshots.iter().map(|s| s.id)) * size_of::<SnapshotSlot>() as u64;
    let most = SLOTS_BYTES.saturating_add(length.saturating_mul(SLOTS_FACTOR));
    if needed > most {
        return Err(Error::invalid(format!(
            "the dump has {length} bytes, and its ids of volumes and snapshots are so high that their \
             tables would take {} MiB of memory: it is no dump of a store",
            needed >> 20
        )));
    }
    Ok(())
}

fn fill(loader: &mut Loader, dump: &Dump, geometry: &Geometry) -> Result<()> {
    let below = |region: RegionKind, index: u32| {
        let most = dump.marks[region.mark()].min(geometry.needed_blocks(region));
        index / geometry.items_per_block(region) < most
    };
    let outside = |what: &str, id: u32| {
        Error::invalid(format!("the dump has {what} {id}, which its marks leave no room for"))
    };
    for volume in &dump.volumes {
        let index = volume.id.wrapping_sub(1);
        if !below(RegionKind::Volumes, index) {
            return Err(outside("volume", volume.id));
        }
        loader.set_volume(index, volume_slot(volume)?);
    }
    for snapshot in &dump.snapshots {
        let index = snapshot.id.wrapping_sub(1);
        if !below(RegionKind::Snapshots, index) {
            return Err(outside("snapshot", snapshot.id));
        }
        let (uuid, (name, name_bytes)) = identity(&snapshot.uuid, &snapshot.name)?;
        let slot = SnapshotSlot {
            uuid,
            size: snapshot.size.into(),
            created_ns: snapshot.created_ns.into(),
            revision: snapshot.revision.into(),
            volume: snapshot.volume.into(),
            parent: snapshot.parent.into(),
            flags: snapshot.flags.into(),
            used: 1,
            family: family_of(snapshot)?,
            name,
            name_bytes,
            ..SnapshotSlot::new_zeroed()
        };
        loader.set_snapshot(index, slot);
        if !snapshot.labels.is_empty() {
            let encoded = labels::encode(&snapshot.labels)
                .ok_or_else(|| Error::invalid("the dump has labels that are too long"))?;
            loader.set_labels(index, &encoded);
        }
    }
    for dumped in &dump.entries {
        let (region, index) = match dumped.entry.checked_sub(SPARE_BASE) {
            Some(index) => (RegionKind::Spares, index),
            None => (RegionKind::Extents, dumped.entry),
        };
        if !below(region, index) {
            return Err(outside("entry", dumped.entry));
        }
        let bytes = encode(dumped, geometry)?;
        let parsed = entry::parse(&bytes).ok_or_else(|| outside("entry", dumped.entry))?;
        loader.set_entry(region, index, &parsed);
    }
    Ok(())
}

fn volume_slot(volume: &DumpVolume) -> Result<VolumeSlot> {
    let (uuid, (name, name_bytes)) = identity(&volume.uuid, &volume.name)?;
    Ok(VolumeSlot {
        uuid,
        size: volume.size.into(),
        created_ns: volume.created_ns.into(),
        revision: volume.revision.into(),
        head: volume.head.into(),
        flags: volume.flags.into(),
        name,
        limit_iops: volume.limits.iops.into(),
        limit_burst_seconds: volume.limits.burst_seconds.into(),
        limit_bandwidth: volume.limits.bandwidth.into(),
        key: volume.key.as_ref().map_or_else(|| Ok(KeySlot::new_zeroed()), DumpKey::slot)?,
        name_bytes,
        ..VolumeSlot::new_zeroed()
    })
}

fn family_of(snapshot: &DumpSnapshot) -> Result<[u8; 16]> {
    let Some(text) = &snapshot.family else { return Ok([0; 16]) };
    let family = unhex(text).filter(|family| *family != [0; 16]);
    family.ok_or_else(|| Error::invalid("the dump has an impossible family of keys"))
}

/// An entry in bytes.
fn encode(dumped: &DumpEntry, geometry: &Geometry) -> Result<Vec<u8>> {
    let header = entry::EntryHeader {
        snapshot: dumped.snapshot.into(),
        logical: dumped.extent.into(),
        run: dumped.zero_run.into(),
        state: match dumped.stored {
            Some(stored) => state_of(stored),
            None if dumped.lost => entry::RUN_LOST,
            None => 0,
        }
        .into(),
    };
    let mut bytes = header.as_bytes().to_vec();
    let blocks = geometry.blocks_per_extent();
    for runs in [&dumped.data, &dumped.zero] {
        let mut bits = vec![0u8; blocks as usize / 8];
        for [start, end] in runs {
            if start > end || *end > blocks {
                let text = format!("the dump has impossible blocks in entry {}", dumped.entry);
                return Err(Error::invalid(text));
            }
            (*start..*end).for_each(|block| bits[block as usize / 8] |= 1 << (block % 8));
        }
        bytes.extend_from_slice(&bits);
    }
    Ok(bytes)
}

type Name = ([u8; 256], zerocopy::byteorder::little_endian::U16);

/// Uuid and name of a slot.
fn identity(text: &str, name: &str) -> Result<([u8; 16], Name)> {
    if name.len() > crate::limits::NAME_MAX_BYTES {
        return Err(Error::invalid("the dump has a name that is too long"));
    }
    Ok((parse_uuid(text)?, slots::encode_name(name)))
}
