//! All metadata as JSON, for people and tools.

use super::identity::uuid_text;
use super::{Store, recover};
use crate::error::{Error, ErrorKind, Result};
use crate::format::crc::{crc32c, crc32c_append};
use crate::format::slots::KeySlot;
use crate::format::{RegionKind, labels};
use crate::info::{Labels, VolumeLimits};
use crate::meta::entries::Away;
use crate::meta::{Meta, Step, Stop};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::cell::Cell;
use std::io::{self, Write};
use std::iter;
use std::rc::Rc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// The version of dumps, which is that of the format.
pub(super) const FORMAT: &str = "2.0.0";
/// That of a dump with encrypted volumes. Versions that do not know keys and families refuse it: they would restore
/// volumes that show what is encrypted as it lies there.
pub(super) const FORMAT_ENCRYPTED: &str = "2.1.0";
/// That of a dump with compressed extents: others would restore them as what their bytes are.
pub(super) const FORMAT_COMPRESSED: &str = "2.2.0";
/// Entries made into JSON under one look at the metadata.
const ENTRIES_PER_LOOK: usize = 1024;

/// Lets somebody look at the metadata, which is the same each time.
type Look<'a> = &'a dyn Fn(&mut dyn FnMut(&Meta) -> Step<()>) -> Result<()>;

/// A dump, whose entries are made as it is written: there are many.
#[derive(Serialize, Deserialize)]
pub(super) struct Dump<E> {
    pub format: String,
    pub uuid: String,
    /// What the metadata was marked with, if that is not the uuid; so are the checksums, which stay.
    pub metadata_uuid: Option<String>,
    pub created_ns: u64,
    pub size: u64,
    pub extent_size: u64,
    pub volumes_max: u32,
    pub snapshots_max: u32,
    pub spares_max: u32,
    pub extents_max: u32,
    pub sequence: u64,
    pub marks: [u32; 4],
    pub regions: Vec<DumpRegion>,
    pub volumes: Vec<DumpVolume>,
    pub snapshots: Vec<DumpSnapshot>,
    pub entries: E,
    /// None in a dump of an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32c: Option<Sum>,
}

/// The CRC32C of all bytes of the dump before its own digits.
#[derive(Clone, Default)]
pub(super) struct Sum(Rc<Cell<u32>>);

impl Serialize for Sum {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.0.get())
    }
}

impl<'de> Deserialize<'de> for Sum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        u32::deserialize(deserializer).map(|sum| Self(Rc::new(Cell::new(sum))))
    }
}

impl Sum {
    /// Whether the dump is as it was written.
    pub fn is_of(&self, dump: &[u8]) -> bool {
        const KEY: &[u8] = b"\"crc32c\": ";
        let at = dump.windows(KEY.len()).rposition(|window| window == KEY);
        at.is_some_and(|at| crc32c(&dump[..at + KEY.len()]) == self.0.get())
    }
}

/// Passes on what is written, and computes its sum.
struct Summed<'a> {
    out: &'a mut dyn Write,
    sum: Sum,
}

impl Write for Summed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.sum.0.set(crc32c_append(self.sum.0.get(), &bytes[..written]));
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct DumpRegion {
    pub name: String,
    pub offset: u64,
    pub length: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct DumpVolume {
    pub id: u32,
    pub uuid: String,
    pub name: String,
    pub size: u64,
    pub created_ns: u64,
    pub revision: u64,
    pub head: u32,
    pub flags: u32,
    #[serde(default, skip_serializing_if = "VolumeLimits::is_none")]
    pub limits: VolumeLimits,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<DumpKey>,
}

/// The wrapped key of an encrypted volume: only the secret of a user opens it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DumpKey {
    #[serde(flatten)]
    parts: KeyParts,
    family: String,
}

impl DumpKey {
    fn of(slot: &KeySlot) -> Option<Self> {
        KeyParts::of(slot).map(|parts| Self { parts, family: hex(&slot.family) })
    }

    /// # Errors
    /// `Invalid` if it is none.
    pub fn slot(&self) -> Result<KeySlot> {
        self.parts.slot(unhex(&self.family).ok_or_else(no_key)?)
    }
}

/// A key slot, but for which key it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeyParts {
    method: u8,
    secret: u8,
    lanes: u16,
    memory_kib: u32,
    passes: u32,
    salt: String,
    wrapped: String,
}

impl KeyParts {
    pub fn of(slot: &KeySlot) -> Option<Self> {
        slot.is_some().then(|| Self {
            method: slot.method,
            secret: slot.secret,
            lanes: slot.lanes.get(),
            memory_kib: slot.memory_kib.get(),
            passes: slot.passes.get(),
            salt: hex(&slot.salt),
            wrapped: hex(&slot.wrapped),
        })
    }

    /// # Errors
    /// `Invalid` if it is none.
    pub fn slot(&self, family: [u8; 16]) -> Result<KeySlot> {
        Ok(KeySlot {
            method: self.method,
            secret: self.secret,
            lanes: self.lanes.into(),
            memory_kib: self.memory_kib.into(),
            passes: self.passes.into(),
            salt: unhex(&self.salt).ok_or_else(no_key)?,
            wrapped: unhex(&self.wrapped).ok_or_else(no_key)?,
            family,
        })
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct DumpSnapshot {
    pub id: u32,
    pub uuid: String,
    pub name: String,
    pub size: u64,
    pub created_ns: u64,
    pub revision: u64,
    pub volume: u32,
    pub parent: u32,
    pub flags: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    pub labels: Labels,
}

#[derive(Serialize, Deserialize)]
pub(super) struct DumpEntry {
    pub entry: u32,
    pub snapshot: u32,
    pub extent: u32,
    pub zero_run: u32,
    #[serde(default)]
    pub lost: bool,
    /// Blocks that a compressed extent is stored in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<u16>,
    pub data: Vec<[u32; 2]>,
    pub zero: Vec<[u32; 2]>,
}

impl Store {
    /// All metadata as text for people and tools, of one moment: one JSON object. Of a store that is
    /// open for writing, what is durable is read from the device, while writes and commits go on; it
    /// takes as much memory meanwhile as the open store's metadata do.
    ///
    /// # Errors
    /// `Io` if `out` fails, or the device; `Poisoned` if the store is closed meanwhile.
    pub fn dump(&self, out: &mut dyn Write) -> Result<()> {
        let inner = &*self.inner;
        if inner.check_sound().is_err() {
            // Nothing changes any more, and what was replayed from a tail is in memory alone.
            let superblock = inner.superblock.lock().unwrap_or_else(PoisonError::into_inner);
            let created_ns = superblock.created_ns;
            drop(superblock);
            return write(out, created_ns, &|look| inner.look(|meta| look(meta)));
        }
        inner.commit()?;
        let loaded = inner.read_still(|still| {
            let (superblock, _) = recover::read_superblock(still)?;
            let mut loader = recover::load(still, &superblock)?;
            recover::load_labels(still, &superblock.geometry, &mut loader)?;
            Ok((superblock.created_ns, loader))
        });
        if inner.closing.load(Ordering::Relaxed) {
            // Its next owner may have changed what was read.
            return Err(Error::new(ErrorKind::Poisoned, "the store is being closed"));
        }
        let (created_ns, loader) = loaded?;
        let (meta, _) = loader.finish(0, [0; 16])?;
        let look = |meta: &Meta, look: &mut dyn FnMut(&Meta) -> Step<()>| match look(meta) {
            Err(Stop::Error(error)) => Err(error),
            looked => {
                looked.expect("of this one all is in memory");
                Ok(())
            }
        };
        write(out, created_ns, &|task| look(&meta, task))
    }
}

fn write(out: &mut dyn Write, created_ns: u64, look: Look<'_>) -> Result<()> {
    let (mut dump, sum) = (None, Sum::default());
    look(&mut |meta| {
        dump = Some(Dump { crc32c: Some(sum.clone()), ..of(meta, created_ns, Entries(look)) });
        Ok(())
    })?;
    serde_json::to_writer_pretty(Summed { out: &mut *out, sum }, &dump)
        .map_err(|error| Error::io(error.into(), "writing the dump failed"))?;
    writeln!(out).map_err(|error| Error::io(error, "writing the dump failed"))
}

/// Which version a dump of it has.
fn format_of(meta: &Meta) -> &'static str {
    if meta.entries.any_compressed() {
        return FORMAT_COMPRESSED;
    }
    let any = meta.snapshots().any(|(_, snapshot)| snapshot.encrypted());
    if any { FORMAT_ENCRYPTED } else { FORMAT }
}

fn of<E>(meta: &Meta, created_ns: u64, entries: E) -> Dump<E> {
    let geometry = meta.geometry;
    let regions = RegionKind::ALL.into_iter().map(|kind| (kind, geometry.region(kind)));
    let regions = regions.filter(|(_, region)| region.length > 0).map(|(kind, region)| {
        DumpRegion { name: kind.name().to_owned(), offset: region.offset, length: region.length }
    });
    Dump {
        format: format_of(meta).to_owned(),
        uuid: uuid_text(&meta.identity()),
        metadata_uuid: Some(uuid_text(&meta.uuid)),
        created_ns,
        size: geometry.size,
        extent_size: geometry.extent_bytes,
        volumes_max: geometry.volumes,
        snapshots_max: geometry.snapshots,
        spares_max: geometry.spares,
        extents_max: geometry.extents_max,
        sequence: meta.log.durable,
        marks: meta.marks(),
        regions: regions.collect(),
        volumes: volumes(meta),
        snapshots: snapshots(meta),
        entries,
        crc32c: None,
    }
}

fn volumes(meta: &Meta) -> Vec<DumpVolume> {
    let volumes = meta.volumes().map(|(id, volume)| DumpVolume {
        id: id.0,
        uuid: uuid_text(&volume.uuid),
        name: volume.name.clone(),
        size: volume.size,
        created_ns: volume.created_ns,
        revision: volume.revision,
        head: volume.head.0,
        flags: volume.flags,
        limits: volume.pace.limits(),
        key: DumpKey::of(&volume.key_slot),
    });
    volumes.collect()
}

fn snapshots(meta: &Meta) -> Vec<DumpSnapshot> {
    let snapshots = meta.snapshots().map(|(id, snapshot)| DumpSnapshot {
        id: id.0,
        uuid: uuid_text(&snapshot.uuid),
        name: snapshot.name.clone(),
        size: snapshot.size,
        created_ns: snapshot.created_ns,
        revision: snapshot.revision,
        volume: snapshot.volume.0,
        parent: snapshot.parent.0,
        flags: snapshot.flags,
        family: snapshot.encrypted().then(|| hex(&snapshot.family)),
        labels: labels::decode(&snapshot.labels).unwrap_or_default(),
    });
    snapshots.collect()
}

#[cold]
fn no_key() -> Error {
    Error::invalid("there is a key that is none")
}

/// Bytes as digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// As many bytes as there have to be, from digits.
pub(super) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let digits: Option<Vec<_>> = text.as_bytes().iter().map(digit).collect();
    let bytes: Vec<_> = digits?.chunks(2).map(|pair| pair[0] << 4 | pair[pair.len() - 1]).collect();
    bytes.try_into().ok().filter(|_| text.len() == 2 * N)
}

/// The entries, some at a time.
struct Entries<'a>(Look<'a>);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let (mut next, mut failed) = (Some(0), None);
        let some = iter::from_fn(|| {
            let (first, mut entries) = (next.take()?, Vec::new());
            let looked = (self.0)(&mut |meta| {
                entries.clear();
                next = entries_from(meta, first, &mut entries)?;
                Ok(())
            });
            failed = looked.err();
            Some(entries)
        });
        let written = serializer.collect_seq(some.flatten())?;
        failed.map_or(Ok(written), |error| Err(serde::ser::Error::custom(error)))
    }
}

/// Some entries, by their ids from `first` on, and with which one to go on.
fn entries_from(
    meta: &Meta,
    first: u32,
    out: &mut Vec<DumpEntry>,
) -> std::result::Result<Option<u32>, Away> {
    let blocks = meta.blocks_per_extent();
    let runs = |bits: crate::meta::entries::Bits| -> Vec<_> {
        bits.runs(blocks).map(|run| [run.start, run.end]).collect()
    };
    let mut ids = meta.entries.used_from(first);
    for id in ids.by_ref().take(ENTRIES_PER_LOOK) {
        let Some((snapshot, logical)) = meta.entries.owner(id) else { continue };
        out.push(DumpEntry {
            entry: id,
            snapshot,
            extent: logical,
            zero_run: meta.entries.run(id),
            lost: meta.entries.is_lost(id),
            stored: meta.entries.stored_blocks(id),
            data: runs(meta.entries.data_bits(id)?),
            zero: runs(meta.entries.zero_bits(id)?),
        });
    }
    Ok(ids.next())
}
