//! Reading images of format 1.0.0, as the prototype of 2024 wrote them.
//!
//! Format 1.0.0 has no checksums, so all that can be said of an image is whether it contradicts
//! itself. Opening reads and bounds all tables; a contradiction in one volume (a cycle of
//! parents, an extent outside the device) is reported when that volume is used and leaves the
//! others readable. Nothing is ever written to an image. [`upgrade()`] copies one into a store.

mod layout;
mod tables;
#[cfg(test)]
mod tests;
mod upgrade;
mod view;

pub use layout::Layout;
pub use upgrade::{UpgradeReport, UpgradedVolume, upgrade};
pub use view::View;

use crate::error::{Error, Result};
use crate::info::{Labels, StoreInfo};
use layout::{EXTENT, SIZE_MIN, SNAPSHOTS, Superblock, VOLUMES};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use tables::Tables;

/// Label under which an image of layout [`Layout::Dev`] may carry a snapshot's name.
const NAME_LABEL: &str = "name";

/// A volume of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Slot in the volume table.
    pub slot: usize,
    /// Name; bytes that are not UTF-8 are shown as `\xNN`. Nothing in the format keeps it unique.
    pub name: String,
    /// Snapshot id of the writable top.
    pub head: u16,
    /// Size in bytes.
    pub size: u64,
}

/// A snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Id, the only name format 1.0.0 knows.
    pub id: u16,
    /// The next older snapshot.
    pub parent: Option<u16>,
    /// Creation time in seconds since the Unix epoch.
    pub created: i64,
    /// Taken by a person (images of layout `main` do not tell: always true).
    pub user_created: bool,
    /// Labels (layout `dev` only).
    pub labels: Labels,
}

impl Snapshot {
    /// Creation time in nanoseconds since the Unix epoch; 0 if it is not known.
    #[must_use]
    pub fn created_ns(&self) -> u64 {
        u64::try_from(self.created).unwrap_or(0).saturating_mul(1_000_000_000)
    }

    /// The label that names it, if it has a usable one, else `v1-<id>`.
    #[must_use]
    pub fn name(&self) -> String {
        match self.labels.get(NAME_LABEL).map(|name| upgrade::usable_name(name)) {
            Some(Some(name)) => name,
            _ => format!("v1-{}", self.id),
        }
    }
}

/// An image open for reading.
pub struct Image {
    file: File,
    file_size: u64,
    device_size: u64,
    tables: Tables,
    /// Extents that were handed out; none ever came back.
    allocated: u64,
    /// For each snapshot id the size of the largest volume it belongs to, 0 if to none.
    sizes: Vec<u64>,
    /// For each snapshot id the volumes it belongs to.
    owners: Vec<u16>,
    warnings: Vec<String>,
}

impl Image {
    /// Opens an image: a file or a block device. Both table layouts carry the same version
    /// number; without `layout` the one whose tables contradict themselves least is taken.
    ///
    /// # Errors
    /// `NotFound`, `Io`; `Corrupt` if it is no image, its tables are cut off or fit neither
    /// layout better; `Unsupported` for another version or a size above 64 TiB.
    pub fn open(path: &Path, layout: Option<Layout>) -> Result<Self> {
        Self::open_file(path, layout).map_err(|error| error.context(path.display()))
    }

    fn open_file(path: &Path, layout: Option<Layout>) -> Result<Self> {
        let mut file = File::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::not_found("no such file"),
            _ => Error::io(error, "opening the image"),
        })?;
        let file_size =
            file.seek(SeekFrom::End(0)).map_err(|error| Error::io(error, "finding its size"))?;
        let mut bytes = [0; Superblock::BYTES];
        tables::read_exact(&file, 0, &mut bytes, "the superblock")?;
        let superblock = Superblock::decode(&bytes)?;
        let tables = match layout {
            Some(layout) => Tables::read(&file, &superblock, layout)?,
            None => detect(&file, &superblock)?,
        };
        let mut warnings = tables.warnings.clone();
        let device_size = superblock.device_size;
        if file_size != device_size {
            warnings.push(format!(
                "the image was made {device_size} bytes long and now has {file_size}{}",
                if file_size < device_size { ": data may be missing at its end" } else { "" }
            ));
        }
        debug_assert!(device_size >= SIZE_MIN);
        let allocated = u64::from(superblock.allocated).min(tables.geometry.extents);
        let (sizes, owners) = (vec![0; SNAPSHOTS + 1], vec![0; SNAPSHOTS + 1]);
        let mut image =
            Self { file, file_size, device_size, tables, allocated, sizes, owners, warnings };
        image.assign_sizes();
        Ok(image)
    }

    /// The layout it was read with.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.tables.layout
    }

    /// Size in bytes of the device the image was made for.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.device_size
    }

    /// Facts about the image, as of a store. What the format does not have is 0 or empty.
    #[must_use]
    pub fn info(&self) -> StoreInfo {
        let total = self.tables.geometry.extents;
        StoreInfo {
            format: "1.0.0".to_owned(),
            uuid: String::new(),
            size: self.device_size,
            max_size: self.device_size,
            extent_size: EXTENT,
            extents_total: total,
            extents_free: total - self.allocated,
            extents_pending: 0,
            allocated: self.allocated * EXTENT,
            compressed: 0,
            compressed_stored: 0,
            free: 0,
            metadata: self.tables.geometry.data,
            volumes: self.tables.volumes.len() as u64,
            volumes_max: VOLUMES as u64,
            snapshots: self.tables.live_snapshots(),
            snapshots_max: SNAPSHOTS as u64,
            snapshots_deleting: 0,
            snapshots_put_off: 0,
            work_remaining: 0,
            sequence: 0,
            read_only: true,
            driver: "pread".to_owned(),
            tail: false,
            checksums: None,
            lookups: Default::default(),
            warnings: self.warnings.clone(),
        }
    }

    /// When a volume was made, in nanoseconds since the Unix epoch: its oldest layer that no other volume
    /// has, or its head, says so. 0 if none of them does.
    #[must_use]
    pub fn created_ns(&self, volume: &Volume) -> u64 {
        let chain = self.chain(volume.head).unwrap_or_default();
        let own = chain.iter().rev().filter(|layer| self.owners[usize::from(layer.id)] == 1);
        let own = own.chain(chain.first()).map(Snapshot::created_ns);
        own.into_iter().find(|created| *created > 0).unwrap_or(0)
    }

    /// Damage that did not keep it from being opened.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// All volumes, in the order of their slots.
    #[must_use]
    pub fn volumes(&self) -> Vec<Volume> {
        self.tables
            .volumes
            .iter()
            .map(|(slot, volume)| Volume {
                slot: *slot,
                name: readable_name(&volume.name),
                head: volume.head,
                size: volume.size,
            })
            .collect()
    }

    /// The volume with this name, or `#SLOT` for the one in that slot.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if several have the name.
    pub fn volume(&self, name: &str) -> Result<Volume> {
        let volumes = self.volumes();
        let slot = name.strip_prefix('#').and_then(|slot| slot.parse::<usize>().ok());
        let mut found: Vec<_> = volumes.iter().filter(|v| v.name == name).collect();
        if found.is_empty() {
            found = volumes.iter().filter(|v| Some(v.slot) == slot).collect();
        }
        match found[..] {
            [] => Err(Error::not_found(format!("the image has no volume `{name}`"))),
            [volume] => Ok(volume.clone()),
            [first, ..] => Err(Error::invalid(format!(
                "the image has {} volumes `{name}`; write #{} for the one in slot {0}",
                found.len(),
                first.slot
            ))),
        }
    }

    /// The snapshots of a volume (its head is none), oldest first.
    ///
    /// # Errors
    /// As [`Image::volume`]; `Corrupt` if its chain is.
    pub fn snapshots(&self, volume: &str) -> Result<Vec<Snapshot>> {
        let volume = self.volume(volume)?;
        let mut chain = self.chain(volume.head)?;
        chain.remove(0);
        chain.reverse();
        Ok(chain)
    }

    /// A volume (`name`) or a snapshot of it (`name@ID` or `name@NAME`) for reading.
    ///
    /// # Errors
    /// As [`Image::snapshots`]; `NotFound` for the snapshot.
    pub fn open_spec(&self, spec: &str) -> Result<View<'_>> {
        let Some((name, wanted)) = spec.rsplit_once('@') else {
            return self.view(self.volume(spec)?.head);
        };
        let snapshots = self.snapshots(name)?;
        let id = wanted.parse::<u16>().ok();
        let found = snapshots
            .iter()
            .find(|s| s.name() == wanted)
            .or_else(|| snapshots.iter().find(|s| Some(s.id) == id))
            .ok_or_else(|| {
                Error::not_found(format!("volume `{name}` of the image has no snapshot `{wanted}`"))
            })?;
        self.view(found.id)
    }

    /// The content of a head or snapshot.
    ///
    /// # Errors
    /// `Corrupt` if no volume has it, or its chain or extents contradict themselves.
    pub fn view(&self, id: u16) -> Result<View<'_>> {
        let size = self.sizes[usize::from(id)];
        if size == 0 {
            self.chain(id)?;
            return Err(Error::corrupt(format!("snapshot {id} belongs to no readable volume")));
        }
        View::new(self, id, size)
    }

    /// The chain from `head` to its root, newest first and never empty.
    fn chain(&self, head: u16) -> Result<Vec<Snapshot>> {
        let mut seen = vec![false; SNAPSHOTS + 1];
        let mut chain = Vec::new();
        let mut next = Some(head);
        while let Some(id) = next {
            let Some(slot) = self.tables.snapshot(id) else {
                return Err(Error::corrupt(format!(
                    "snapshot {id}, in the chain of head {head}, is not in the snapshot table"
                )));
            };
            if std::mem::replace(&mut seen[usize::from(id)], true) {
                return Err(Error::corrupt(format!(
                    "the chain of head {head} leads back to snapshot {id}"
                )));
            }
            next = Some(slot.parent).filter(|&parent| parent != 0);
            chain.push(Snapshot {
                id,
                parent: next,
                created: slot.created,
                user_created: slot.user_created != 0,
                labels: self.tables.labels.get(&id).cloned().unwrap_or_default(),
            });
        }
        Ok(chain)
    }

    /// Fills `sizes`; volumes with an impossible size or chain leave theirs at 0.
    fn assign_sizes(&mut self) {
        for volume in self.volumes() {
            let possible = volume.size > 0
                && volume.size.is_multiple_of(EXTENT)
                && volume.size / EXTENT <= u64::from(u32::MAX) + 1;
            if !possible {
                self.warnings.push(format!(
                    "volume `{}` has the impossible size of {} bytes and cannot be read",
                    volume.name, volume.size
                ));
                continue;
            }
            match self.chain(volume.head) {
                Ok(chain) => {
                    for snapshot in chain {
                        self.owners[usize::from(snapshot.id)] += 1;
                        let size = &mut self.sizes[usize::from(snapshot.id)];
                        *size = volume.size.max(*size);
                    }
                }
                Err(error) => {
                    let name = volume.name;
                    self.warnings.push(format!("volume `{name}` cannot be read: {error}"));
                }
            }
        }
    }
}

/// Reads the tables both ways and keeps the better fit.
fn detect(file: &File, superblock: &Superblock) -> Result<Tables> {
    let main = Tables::read(file, superblock, Layout::Main);
    let dev = Tables::read(file, superblock, Layout::Dev);
    match (main, dev) {
        (Ok(main), Ok(dev)) if main.fit > dev.fit => Ok(main),
        (Ok(main), Ok(dev)) if main.fit < dev.fit => Ok(dev),
        // Neither has an extent or a second snapshot: both readings are the same.
        (Ok(main), Ok(_)) if main.fit >= 0 => Ok(main),
        (Ok(_), Ok(_)) => Err(Error::corrupt(
            "the tables of the image fit both layouts equally well; say which layout it has, main \
             or dev",
        )),
        (Ok(tables), Err(_)) | (Err(_), Ok(tables)) => Ok(tables),
        (Err(error), Err(_)) => Err(error),
    }
}

fn readable_name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(name) => name.to_owned(),
        Err(_) => bytes.escape_ascii().to_string(),
    }
}
