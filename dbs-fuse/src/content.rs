//! What is inside an image: partitions and file systems, as far as it takes to mount them.

use dbs_core::volume::Observer;
use dbs_core::{Error, Result};

/// Bytes of the sectors that partition tables count in.
const SECTOR: u64 = 512;
/// Where the two superblocks that are furthest from the start of a file system end, in bytes.
const PROBE_BYTES: u64 = 0x1_1000;
/// Partitions of a GUID table that are looked at.
const PARTITIONS_MAX: u32 = 256;
/// Logical partitions that are followed from one to the next.
const LOGICAL_MAX: usize = 64;

/// A part of an image that may have a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Number as the kernel counts; none for the whole image.
    pub number: Option<u32>,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// What is in it, if that is known: the name by which the kernel mounts it.
    pub file_system: Option<&'static str>,
}

/// Where bytes come from.
pub trait Source {
    /// Bytes in all.
    fn size(&self) -> Result<u64>;

    /// Fills `buf` from `offset`, both in sectors.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
}

impl Source for Observer {
    fn size(&self) -> Result<u64> {
        Self::size(self)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_at(offset, buf)
    }
}

/// The parts of an image: the whole if it has a file system itself or no partitions, else those.
///
/// # Errors
/// Those of reading it; a damaged table only has fewer partitions.
pub fn parts(image: &dyn Source) -> Result<Vec<Part>> {
    let size = image.size()?;
    let whole =
        Part { number: None, offset: 0, length: size, file_system: file_system(image, 0, size)? };
    if whole.file_system.is_some() || size < 2 * SECTOR {
        return Ok(vec![whole]);
    }
    let mut found = guid_table(image, size)?;
    if found.is_empty() {
        found = master_record(image, size)?;
    }
    found.retain(|part| part.length > 0 && part.offset.saturating_add(part.length) <= size);
    for part in &mut found {
        part.file_system = file_system(image, part.offset, part.length)?;
    }
    if found.is_empty() { Ok(vec![whole]) } else { Ok(found) }
}

/// The part to mount: the one asked for, or the only one that has a file system.
///
/// # Errors
/// `Invalid` if there is none, or more than one; it says what there is.
pub fn choose(parts: &[Part], number: Option<u32>) -> Result<&Part> {
    let known = || {
        let lines = parts.iter().map(|part| {
            let name = part.number.map_or_else(|| "whole".to_owned(), |n| n.to_string());
            let what = part.file_system.unwrap_or("unknown");
            format!("{name} ({what}, {})", dbs_core::format_size(part.length))
        });
        lines.collect::<Vec<_>>().join(", ")
    };
    if let Some(number) = number {
        let found = parts.iter().find(|part| part.number == Some(number));
        return found.ok_or_else(|| {
            Error::invalid(format!("there is no partition {number} in it; it has: {}", known()))
        });
    }
    let mut usable = parts.iter().filter(|part| part.file_system.is_some());
    match (usable.next(), usable.next()) {
        (Some(part), None) => Ok(part),
        (Some(_), Some(_)) => Err(Error::invalid(format!(
            "it has several file systems; choose one with --partition N: {}",
            known()
        ))),
        (None, _) => Err(Error::invalid(format!("no known file system is in it: {}", known()))),
    }
}

/// Options with which the kernel mounts a file system from something that must not be written, as it
/// was when the snapshot was taken.
#[must_use]
pub fn mount_options(file_system: &str) -> &'static str {
    match file_system {
        "ext4" => "ro,noload",
        // Several snapshots of one file system have the same identity.
        "xfs" => "ro,norecovery,nouuid",
        "btrfs" => "ro,rescue=nologreplay",
        _ => "ro",
    }
}

fn file_system(image: &dyn Source, offset: u64, length: u64) -> Result<Option<&'static str>> {
    let mut start = vec![0; (PROBE_BYTES.min(length) / SECTOR * SECTOR) as usize];
    image.read(offset, &mut start)?;
    let has = |at: usize, magic: &[u8]| start.get(at..at + magic.len()) == Some(magic);
    Ok(if has(0x438, &[0x53, 0xef]) {
        // ext2 and ext3 are mounted by the same driver.
        Some("ext4")
    } else if has(0, b"XFSB") {
        Some("xfs")
    } else if has(0x1_0040, b"_BHRfS_M") {
        Some("btrfs")
    } else if has(0x400, &0xf2f5_2010_u32.to_le_bytes()) {
        Some("f2fs")
    } else if has(0, b"hsqs") {
        Some("squashfs")
    } else if has(3, b"NTFS    ") {
        Some("ntfs3")
    } else if has(3, b"EXFAT   ") {
        Some("exfat")
    } else if has(0x36, b"FAT") || has(0x52, b"FAT32") {
        Some("vfat")
    } else if has(0x8001, b"CD001") {
        Some("iso9660")
    } else {
        None
    })
}

/// The partitions of a GUID table; none if there is no such table.
fn guid_table(image: &dyn Source, size: u64) -> Result<Vec<Part>> {
    let mut header = [0; SECTOR as usize];
    image.read(SECTOR, &mut header)?;
    if &header[..8] != b"EFI PART" {
        return Ok(Vec::new());
    }
    let (table, count, bytes) = (u64_at(&header, 72), u32_at(&header, 80), u32_at(&header, 84));
    let count = count.min(PARTITIONS_MAX);
    let length = u64::from(count) * u64::from(bytes);
    let start = table.saturating_mul(SECTOR);
    let end = start.saturating_add(length.next_multiple_of(SECTOR));
    if !(128..=4096).contains(&bytes) || end > size {
        return Ok(Vec::new());
    }
    let mut entries = vec![0; (end - start) as usize];
    image.read(start, &mut entries)?;
    let mut found = Vec::new();
    for (number, entry) in (1..=count).zip(entries.chunks_exact(bytes as usize)) {
        let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
        if entry[..16].iter().any(|byte| *byte != 0) && first <= last {
            let sectors = (last - first).saturating_add(1);
            found.push(partition(number, first, sectors));
        }
    }
    Ok(found)
}

/// The partitions of a master boot record, and of the chain of records in an extended one.
fn master_record(image: &dyn Source, size: u64) -> Result<Vec<Part>> {
    let mut found = Vec::new();
    let mut record = [0; SECTOR as usize];
    image.read(0, &mut record)?;
    let mut extended = None;
    for (number, (kind, first, sectors)) in (1..).zip(record_entries(&record)) {
        match kind {
            0 => {}
            0x05 | 0x0f | 0x85 => extended = extended.or(Some(first)),
            _ => found.push(partition(number, first, sectors)),
        }
    }
    let Some(base) = extended else { return Ok(found) };
    let mut at = base;
    for number in (5..).take(LOGICAL_MAX) {
        if (at + 1).saturating_mul(SECTOR) > size {
            break;
        }
        image.read(at * SECTOR, &mut record)?;
        let entries = record_entries(&record);
        let (Some((kind, first, sectors)), Some(next)) = (entries.first(), entries.get(1)) else {
            break;
        };
        if *kind != 0 {
            found.push(partition(number, at + first, *sectors));
        }
        if next.0 == 0 || base + next.1 <= at {
            break;
        }
        at = base + next.1;
    }
    Ok(found)
}

/// Type, first sector and number of sectors of each entry.
fn record_entries(record: &[u8; SECTOR as usize]) -> Vec<(u8, u64, u64)> {
    if record[510..] != [0x55, 0xaa] {
        return Vec::new();
    }
    let entries = record[446..510].chunks_exact(16);
    entries.map(|e| (e[4], u64::from(u32_at(e, 8)), u64::from(u32_at(e, 12)))).collect()
}

fn partition(number: u32, first: u64, sectors: u64) -> Part {
    Part {
        number: Some(number),
        offset: first.saturating_mul(SECTOR),
        length: sectors.saturating_mul(SECTOR),
        file_system: None,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Image(Vec<u8>);

    impl Source for Image {
        fn size(&self) -> Result<u64> {
            Ok(self.0.len() as u64)
        }

        fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            buf.copy_from_slice(&self.0[offset as usize..][..buf.len()]);
            Ok(())
        }
    }

    fn image() -> Image {
        Image(vec![0; 4 << 20])
    }

    fn put(image: &mut Image, offset: usize, bytes: &[u8]) {
        image.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn entry(image: &mut Image, at: usize, index: usize, kind: u8, first: u32, sectors: u32) {
        let entry = at + 446 + 16 * index;
        put(image, entry + 4, &[kind]);
        put(image, entry + 8, &first.to_le_bytes());
        put(image, entry + 12, &sectors.to_le_bytes());
        put(image, at + 510, &[0x55, 0xaa]);
    }

    fn shape(image: &Image) -> Vec<(Option<u32>, u64, u64, Option<&'static str>)> {
        let found = parts(image).expect("an image in memory");
        found.iter().map(|p| (p.number, p.offset, p.length, p.file_system)).collect()
    }

    #[test]
    fn a_whole_image_is_one_part() {
        let mut image = image();
        assert_eq!(shape(&image), [(None, 0, 4 << 20, None)]);
        assert!(choose(&parts(&image).expect("in memory"), None).is_err());
        put(&mut image, 0x438, &[0x53, 0xef]);
        assert_eq!(shape(&image), [(None, 0, 4 << 20, Some("ext4"))]);
        assert!(choose(&parts(&image).expect("in memory"), Some(1)).is_err());
        assert_eq!(shape(&Image(vec![1; 512])), [(None, 0, 512, None)]);
    }

    #[test]
    fn boot_records_are_followed() {
        let mut image = image();
        entry(&mut image, 0, 0, 0x83, 64, 512);
        entry(&mut image, 0, 1, 0x0f, 1024, 4096);
        entry(&mut image, 1024 * 512, 0, 0x83, 8, 256);
        entry(&mut image, 1024 * 512, 1, 0x05, 512, 512);
        entry(&mut image, 1536 * 512, 0, 0x83, 8, 256);
        // Back to where it came from: followed no further.
        entry(&mut image, 1536 * 512, 1, 0x05, 0, 512);
        put(&mut image, 1032 * 512, b"XFSB");
        let wanted = [
            (Some(1), 64 * 512, 512 * 512, None),
            (Some(5), 1032 * 512, 256 * 512, Some("xfs")),
            (Some(6), 1544 * 512, 256 * 512, None),
        ];
        assert_eq!(shape(&image), wanted);
        let parts = parts(&image).expect("in memory");
        assert_eq!(choose(&parts, None).map(|part| part.number).ok(), Some(Some(5)));
        assert_eq!(choose(&parts, Some(6)).map(|part| part.number).ok(), Some(Some(6)));
    }

    #[test]
    fn guid_tables_are_read() {
        let mut image = image();
        entry(&mut image, 0, 0, 0xee, 1, u32::MAX);
        put(&mut image, 512, b"EFI PART");
        put(&mut image, 512 + 72, &2_u64.to_le_bytes());
        put(&mut image, 512 + 80, &128_u32.to_le_bytes());
        put(&mut image, 512 + 84, &128_u32.to_le_bytes());
        for (index, first, last) in [(0, 100_u64, 199_u64), (2, 2048, 4095), (3, 4096, 1 << 40)] {
            put(&mut image, 1024 + 128 * index, &[7; 16]);
            put(&mut image, 1024 + 128 * index + 32, &first.to_le_bytes());
            put(&mut image, 1024 + 128 * index + 40, &last.to_le_bytes());
        }
        put(&mut image, 2048 * 512 + 0x438, &[0x53, 0xef]);
        let wanted = [(Some(1), 51_200, 51_200, None), (Some(3), 1 << 20, 1 << 20, Some("ext4"))];
        assert_eq!(shape(&image), wanted);
        // Numbers out of all bounds are no table, and the record in front of it is of no size.
        put(&mut image, 512 + 72, &u64::MAX.to_le_bytes());
        assert_eq!(shape(&image), [(None, 0, 4 << 20, None)]);
    }
}
