//! The tables of an image read under one layout, and how well they fit it.

use super::layout::{
    EXTENT, Geometry, Layout, RECORD_BYTES, Record, SNAPSHOT_TABLE, SNAPSHOTS, SnapshotSlot,
    Superblock, VOLUME_BYTES, VOLUME_TABLE, VOLUMES, VolumeSlot, u32_at,
};
use crate::error::{Error, Result};
use crate::info::Labels;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Extent records read at once.
const RECORDS_PER_READ: usize = 4096;
/// Seconds after which a creation time is not believed (the year 4147).
const CREATED_MAX: i64 = 1 << 36;

/// One stored extent of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Extent {
    /// Position in the volume, in extents.
    pub logical: u32,
    /// Position on the device, in extents: the index of the record.
    pub physical: u32,
}

/// The tables.
pub(super) struct Tables {
    pub layout: Layout,
    pub geometry: Geometry,
    /// Slots in use with their index.
    pub volumes: Vec<(usize, VolumeSlot)>,
    /// All slots; snapshot `id` is at `id - 1`.
    snapshots: Vec<SnapshotSlot>,
    /// Labels by snapshot.
    pub labels: BTreeMap<u16, Labels>,
    /// Extents by snapshot, each list ascending and without repetition.
    extents: BTreeMap<u16, Vec<Extent>>,
    /// Entries that make sense minus entries that do not: how well the layout fits.
    pub fit: i64,
    /// Damage that was passed over.
    pub warnings: Vec<String>,
}

impl Tables {
    /// Reads the tables, as if the image had this layout. Memory: 2 MiB and 8 bytes for each
    /// extent of a live snapshot.
    pub(super) fn read(file: &File, superblock: &Superblock, layout: Layout) -> Result<Self> {
        let mut tables = Self {
            layout,
            geometry: Geometry::new(layout, superblock.device_size),
            volumes: read_volumes(file)?,
            snapshots: read_snapshots(file, layout)?,
            labels: BTreeMap::new(),
            extents: BTreeMap::new(),
            fit: 0,
            warnings: Vec::new(),
        };
        tables.judge_snapshots();
        tables.read_extents(file, u64::from(superblock.allocated))?;
        if layout == Layout::Dev {
            tables.read_labels(file)?;
        }
        Ok(tables)
    }

    /// The slot of a live snapshot.
    pub(super) fn snapshot(&self, id: u16) -> Option<&SnapshotSlot> {
        let index = usize::from(id).checked_sub(1)?;
        self.snapshots.get(index).filter(|slot| slot.is_live())
    }

    /// Snapshots and heads.
    pub(super) fn live_snapshots(&self) -> u64 {
        self.snapshots.iter().filter(|slot| slot.is_live()).count() as u64
    }

    /// The extents a snapshot holds itself, ascending.
    pub(super) fn extents(&self, id: u16) -> &[Extent] {
        self.extents.get(&id).map_or(&[], Vec::as_slice)
    }

    fn judge(&mut self, good: bool) {
        self.fit += if good { 1 } else { -1 };
    }

    fn judge_snapshots(&mut self) {
        for index in 0..self.volumes.len() {
            let head = self.volumes[index].1.head;
            self.judge(self.snapshot(head).is_some());
        }
        for index in 0..self.snapshots.len() {
            let slot = self.snapshots[index];
            if slot.is_live() {
                let parent = slot.parent == 0 || self.snapshot(slot.parent).is_some();
                let created = (1..CREATED_MAX).contains(&slot.created);
                self.judge(parent && created && slot.user_created <= 1 && slot.size == 0);
            }
        }
    }

    fn read_extents(&mut self, file: &File, allocated: u64) -> Result<()> {
        let count = allocated.min(self.geometry.extents);
        if allocated > count {
            self.warnings.push(format!(
                "{allocated} extents are marked allocated, but the device has room for {count}: \
                 the image was filled beyond its end and what lies there is lost"
            ));
        }
        let logical_end = self.volumes.iter().map(|(_, v)| v.size / EXTENT).max().unwrap_or(0);
        let mut buf = vec![0; RECORDS_PER_READ * RECORD_BYTES];
        let mut first = 0;
        while first < count {
            let records = (count - first).min(RECORDS_PER_READ as u64);
            let bytes = &mut buf[..records as usize * RECORD_BYTES];
            let offset = self.geometry.table + first * RECORD_BYTES as u64;
            read_exact(file, offset, bytes, "the extent table")?;
            for (record, physical) in bytes.chunks_exact(RECORD_BYTES).zip(first..) {
                let Record { snapshot, logical } = Record::decode(record);
                if snapshot == 0 {
                    continue;
                }
                let live = self.snapshot(snapshot).is_some();
                self.judge(live && u64::from(logical) < logical_end);
                if live {
                    // `physical < 2^26` by the bound on the device size.
                    let extent = Extent { logical, physical: physical as u32 };
                    self.extents.entry(snapshot).or_default().push(extent);
                }
            }
            first += records;
        }
        for extents in self.extents.values_mut() {
            // The later of two records for one extent is the newer: put it first, keep it.
            extents.sort_unstable_by_key(|e| (e.logical, u32::MAX - e.physical));
            extents.dedup_by_key(|e| e.logical);
            extents.shrink_to_fit();
        }
        Ok(())
    }

    fn read_labels(&mut self, file: &File) -> Result<()> {
        let start = self.layout.snapshots_end();
        let mut bytes = vec![0; (self.geometry.table - start) as usize];
        read_exact(file, start, &mut bytes, "the labels")?;
        let mut input = &bytes[..];
        let complete = parse_labels(&mut input, &mut self.labels);
        if complete.is_none() {
            self.warnings.push(
                "the labels are damaged (the prototype cut off what did not fit); those after \
                 the damage are lost"
                    .into(),
            );
        }
        let known = std::mem::take(&mut self.labels);
        self.labels = known.into_iter().filter(|(id, _)| self.snapshot(*id).is_some()).collect();
        Ok(())
    }
}

fn read_volumes(file: &File) -> Result<Vec<(usize, VolumeSlot)>> {
    let mut bytes = vec![0; VOLUMES * VOLUME_BYTES];
    read_exact(file, VOLUME_TABLE, &mut bytes, "the volume table")?;
    Ok(bytes
        .chunks_exact(VOLUME_BYTES)
        .map(VolumeSlot::decode)
        .enumerate()
        .filter(|(_, slot)| slot.head != 0)
        .collect())
}

fn read_snapshots(file: &File, layout: Layout) -> Result<Vec<SnapshotSlot>> {
    let mut bytes = vec![0; SNAPSHOTS * layout.snapshot_bytes()];
    read_exact(file, SNAPSHOT_TABLE, &mut bytes, "the snapshot table")?;
    Ok(bytes
        .chunks_exact(layout.snapshot_bytes())
        .map(|slot| SnapshotSlot::decode(layout, slot))
        .collect())
}

/// Parses the label region into `labels`; `None` where it stops making sense. Each step consumes
/// input, so the counts in it bound nothing and cost nothing.
fn parse_labels(input: &mut &[u8], labels: &mut BTreeMap<u16, Labels>) -> Option<()> {
    let snapshots = take_u32(input)?;
    for _ in 0..snapshots {
        let id = take(input, 2)?;
        let id = u16::from_le_bytes([id[0], id[1]]);
        let pairs = take_u32(input)?;
        for _ in 0..pairs {
            let key = take_text(input)?;
            let value = take_text(input)?;
            labels.entry(id).or_default().insert(key, value);
        }
    }
    Some(())
}

fn take<'a>(input: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    input.split_off(..count)
}

fn take_u32(input: &mut &[u8]) -> Option<u32> {
    take(input, 4).map(|bytes| u32_at(bytes, 0))
}

fn take_text(input: &mut &[u8]) -> Option<String> {
    let length = usize::try_from(take_u32(input)?).ok()?;
    take(input, length).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}

/// Reads a piece of the image, naming it if the file ends before it does.
pub(super) fn read_exact(file: &File, offset: u64, buf: &mut [u8], what: &str) -> Result<()> {
    file.read_exact_at(buf, offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            Error::corrupt(format!("the image is cut off: {what} (at byte {offset}) is missing"))
        }
        _ => Error::io(error, format!("reading {what} at byte {offset}")),
    })
}
