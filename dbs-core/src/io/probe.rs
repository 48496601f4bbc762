//! What is on a device or file already, so that `init` does not destroy it unasked.

pub use super::in_use::in_use;

/// Bytes at the start, and as many at the end, that [`signature`] wants to see.
pub const PROBE_BYTES: usize = 128 << 10;

/// Bytes at the start that [`image_format`] wants to see.
pub const IMAGE_BYTES: usize = 512;

/// Bytes at a fixed place that tell what is there.
struct Magic {
    what: &'static str,
    offset: usize,
    bytes: &'static [u8],
}

const fn magic(what: &'static str, offset: usize, bytes: &'static [u8]) -> Magic {
    Magic { what, offset, bytes }
}

/// Signatures counted from the start. Order matters where one thing contains another.
const MAGICS: &[Magic] = &[
    magic("a qcow2 image", 0, b"QFI\xfb"),
    magic("a QED image", 0, b"QED\0"),
    magic("a VMDK image", 0, b"KDMV"),
    magic("a VMDK image", 0, b"COWD"),
    magic("a VMDK image", 0, b"# Disk DescriptorFile"),
    magic("a VHDX image", 0, b"vhdxfile"),
    magic("a VHD image", 0, b"conectix"),
    magic("a VDI image", 64, b"\x7f\x10\xda\xbe"),
    magic("an xfs file system", 0, b"XFSB"),
    magic("a squashfs file system", 0, b"hsqs"),
    magic("a btrfs file system", 0x10040, b"_BHRfS_M"),
    magic("a bcachefs file system", 0x1018, &BCACHEFS_UUID),
    magic("a bcache device", 0x1018, &BCACHE_UUID),
    magic("an f2fs file system", 1024, b"\x10\x20\xf5\xf2"),
    magic("an erofs file system", 1024, b"\xe2\xe1\xf5\xe0"),
    magic("an HFS+ file system", 1024, b"H+\0\x04"),
    magic("an APFS container", 32, b"NXSB"),
    magic("a JFS file system", 0x8000, b"JFS1"),
    magic("a ReiserFS file system", 0x10034, b"ReIsEr"),
    magic("a Ceph BlueStore device", 0, b"bluestore block device"),
    magic("a LUKS2 encrypted device", 0, b"LUKS\xba\xbe\0\x02"),
    magic("a LUKS1 encrypted device", 0, b"LUKS\xba\xbe\0\x01"),
    magic("a LUKS encrypted device", 0, b"LUKS\xba\xbe"),
    magic("a LUKS2 encrypted device (its second header)", 0x4000, b"SKUL\xba\xbe"),
    magic("a LUKS2 encrypted device (its second header)", 0x8000, b"SKUL\xba\xbe"),
    magic("a LUKS2 encrypted device (its second header)", 0x10000, b"SKUL\xba\xbe"),
    magic("a member of an md RAID array", 0, &MD_RAID),
    magic("a member of an md RAID array", 4096, &MD_RAID),
    magic("swap space", 4096 - 10, b"SWAPSPACE2"),
    magic("swap space", 8192 - 10, b"SWAPSPACE2"),
    magic("swap space", 16384 - 10, b"SWAPSPACE2"),
    magic("swap space", 65536 - 10, b"SWAPSPACE2"),
    magic("swap space", 4096 - 10, b"SWAP-SPACE"),
    magic("a suspended system (in swap space)", 4096 - 10, b"S1SUSPEND\0"),
    magic("an ISO 9660 file system", 0x8001, b"CD001"),
    magic("a UDF file system", 0x8001, b"BEA01"),
    magic("a GPT partition table", 512, b"EFI PART"),
    magic("a GPT partition table", 4096, b"EFI PART"),
    magic("an NTFS file system", 3, b"NTFS    "),
    magic("an exFAT file system", 3, b"EXFAT   "),
    magic("a BitLocker encrypted device", 3, b"-FVE-FS-"),
    magic("a vfat file system", 54, b"FAT12   "),
    magic("a vfat file system", 54, b"FAT16   "),
    magic("a vfat file system", 82, b"FAT32   "),
];

const BCACHEFS_UUID: [u8; 16] = 0xc685_73f6_66ce_90a9_d96a_60cf_803d_f7ef_u128.to_be_bytes();
const BCACHE_UUID: [u8; 16] = 0xc685_73f6_4e1a_45ca_8265_f57f_48ba_6d81_u128.to_be_bytes();
const MD_RAID: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
const ZFS_UBERBLOCK: u64 = 0x00ba_b10c;

/// What is known to be on a device of `size` bytes that starts with `head` and ends with `tail`,
/// of [`PROBE_BYTES`] each (less if the device is smaller), as words with an article.
///
/// It errs on the side of finding something: a few bytes that look right are enough.
#[must_use]
pub fn signature(head: &[u8], tail: &[u8], size: u64) -> Option<&'static str> {
    dbs(head)
        .or_else(|| ext(head))
        .or_else(|| lvm(head))
        .or_else(|| {
            let found = MAGICS.iter().find(|magic| has(head, magic.offset, magic.bytes));
            found.map(|magic| magic.what)
        })
        .or_else(|| zfs(head, tail))
        .or_else(|| has(head, 510, b"\x55\xaa").then_some("an MBR partition table or boot sector"))
        .or_else(|| at_the_end(tail, size))
}

/// The format of an image of a disk that is not raw, as words with an article, by how it begins
/// ([`IMAGE_BYTES`] are enough). A DBS store is one.
#[must_use]
pub fn image_format(head: &[u8]) -> Option<&'static str> {
    let mut images = MAGICS.iter().filter(|magic| magic.what.ends_with(" image"));
    let image = images.find(|magic| has(head, magic.offset, magic.bytes));
    dbs(head).or(image.map(|magic| magic.what))
}

/// Whether `bytes` holds `pattern` at `offset`.
fn has(bytes: &[u8], offset: usize, pattern: &[u8]) -> bool {
    bytes.get(offset..).is_some_and(|rest| rest.starts_with(pattern))
}

fn u32_le(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(offset..)?.first_chunk()?))
}

fn dbs(head: &[u8]) -> Option<&'static str> {
    if !has(head, 0, b"DBS@393!") {
        return None;
    }
    Some(match u32_le(head, 8)? {
        0x0001_0000 => "a DBS store of version 1",
        version if version >> 16 == 2 => "a DBS store",
        _ => "a DBS store of an unknown version",
    })
}

/// The three file systems share a superblock and differ in the features that are on.
fn ext(head: &[u8]) -> Option<&'static str> {
    const SUPERBLOCK: usize = 1024;
    const HAS_JOURNAL: u32 = 0x4;
    // What ext3 knows of the incompatible (filetype, recover, journal device, meta_bg) and of the
    // read-only compatible (sparse_super, large_file, btree_dir) features.
    const EXT3_INCOMPAT: u32 = 0x2 | 0x4 | 0x8 | 0x10;
    const EXT3_RO_COMPAT: u32 = 0x1 | 0x2 | 0x4;
    if !has(head, SUPERBLOCK + 0x38, b"\x53\xef") {
        return None;
    }
    let compat = u32_le(head, SUPERBLOCK + 0x5c)?;
    let incompat = u32_le(head, SUPERBLOCK + 0x60)?;
    let ro_compat = u32_le(head, SUPERBLOCK + 0x64)?;
    Some(if incompat & !EXT3_INCOMPAT != 0 || ro_compat & !EXT3_RO_COMPAT != 0 {
        "an ext4 file system"
    } else if compat & HAS_JOURNAL != 0 {
        "an ext3 file system"
    } else {
        "an ext2 file system"
    })
}

/// The label of a physical volume is in one of the first four sectors.
fn lvm(head: &[u8]) -> Option<&'static str> {
    (0..4)
        .map(|sector| sector * 512)
        .any(|offset| has(head, offset, b"LABELONE") && has(head, offset + 24, b"LVM2 001"))
        .then_some("an LVM2 physical volume")
}

/// A pool's configuration near the start, or the uberblocks of the last label.
fn zfs(head: &[u8], tail: &[u8]) -> Option<&'static str> {
    const CONFIGURATION: usize = 16 << 10;
    let first_pair = head.get(CONFIGURATION..CONFIGURATION + 64).unwrap_or_default();
    let configured =
        first_pair.starts_with(b"\x01") && first_pair.windows(7).any(|w| w == b"version");
    let uberblock = tail.rchunks_exact(1024).any(|slot| {
        has(slot, 0, &ZFS_UBERBLOCK.to_le_bytes()) || has(slot, 0, &ZFS_UBERBLOCK.to_be_bytes())
    });
    (configured || uberblock).then_some("a member of a ZFS pool")
}

/// Signatures whose place is counted from the end.
fn at_the_end(tail: &[u8], size: u64) -> Option<&'static str> {
    let start = size.checked_sub(tail.len() as u64)?;
    let has_at = |offset: Option<u64>, pattern: &[u8]| {
        let offset = offset.and_then(|offset| offset.checked_sub(start));
        offset.is_some_and(|offset| usize::try_from(offset).is_ok_and(|at| has(tail, at, pattern)))
    };
    // A backup table outlives whatever overwrote the first.
    let gpt = [512, 4096].map(|sector| has_at(size.checked_sub(sector), b"EFI PART"));
    let md_0 = (size & !0xffff).checked_sub(0x10000);
    let md_1 = size.checked_sub(8192).map(|offset| offset & !0xfff);
    if gpt.contains(&true) {
        Some("a GPT partition table (its backup)")
    } else if has_at(md_0, &MD_RAID) || has_at(md_1, &MD_RAID) {
        Some("a member of an md RAID array")
    } else if has_at(size.checked_sub(512), b"conectix") {
        Some("a VHD image")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::{Command, Stdio};

    const SIZE: usize = 1 << 20;

    fn probe(image: &[u8]) -> Option<&'static str> {
        let length = image.len().min(PROBE_BYTES);
        signature(&image[..length], &image[image.len() - length..], image.len() as u64)
    }

    fn image(places: &[(usize, &[u8])]) -> Vec<u8> {
        let mut image = vec![0; SIZE];
        for (offset, bytes) in places {
            image[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }
        image
    }

    #[test]
    fn every_fixed_magic_is_found() {
        assert_eq!(probe(&image(&[])), None);
        for magic in MAGICS {
            let found = probe(&image(&[(magic.offset, magic.bytes)]));
            assert_eq!(found, Some(magic.what), "{:x}", magic.offset);
        }
    }

    #[test]
    fn versions_and_features_are_told_apart() {
        let ext = |compat: u8, incompat: u8, ro_compat: u8| {
            image(&[
                (1080, b"\x53\xef"),
                (1024 + 0x5c, &[compat]),
                (1024 + 0x60, &[incompat]),
                (1024 + 0x64, &[ro_compat]),
            ])
        };
        let dbs = |version: &[u8]| image(&[(0, b"DBS@393!"), (8, version)]);
        let lvm = image(&[(512, b"LABELONE"), (536, b"LVM2 001")]);
        let zfs_label = image(&[(16384, b"\x01\x01\0\0"), (16400, b"\0\0\0\x07version")]);
        for (image, what) in [
            (ext(0, 2, 3), "an ext2 file system"),
            (ext(4, 2, 3), "an ext3 file system"),
            (ext(4, 0x42, 3), "an ext4 file system"),
            (ext(4, 2, 0x10), "an ext4 file system"),
            (dbs(b"\0\0\x01\0"), "a DBS store of version 1"),
            (dbs(b"\x03\0\x02\0"), "a DBS store"),
            (dbs(b"\0\0\x03\0"), "a DBS store of an unknown version"),
            (lvm, "an LVM2 physical volume"),
            (zfs_label, "a member of a ZFS pool"),
            (image(&[(SIZE - 8192, b"\x0c\xb1\xba\0\0\0\0\0")]), "a member of a ZFS pool"),
            (image(&[(SIZE - 512, b"EFI PART")]), "a GPT partition table (its backup)"),
            (image(&[(SIZE - 0x10000, &MD_RAID)]), "a member of an md RAID array"),
            (image(&[(SIZE - 8192, &MD_RAID)]), "a member of an md RAID array"),
            (image(&[(SIZE - 512, b"conectix")]), "a VHD image"),
            (image(&[(510, b"\x55\xaa")]), "an MBR partition table or boot sector"),
            (image(&[(510, b"\x55\xaa"), (3, b"NTFS    ")]), "an NTFS file system"),
            (image(&[(510, b"\x55\xaa"), (512, b"EFI PART")]), "a GPT partition table"),
        ] {
            assert_eq!(probe(&image), Some(what));
        }
    }

    #[test]
    fn no_length_panics() {
        let full = vec![0xff; 3 * PROBE_BYTES];
        for length in (0..5000).chain([65536, PROBE_BYTES, full.len()]) {
            let _ = probe(&full[..length]);
            let _ = signature(&full[..length], &full, length as u64);
        }
        let _ = signature(&full, &full, u64::MAX);
    }

    #[test]
    fn real_tools_are_recognised() {
        for (program, arguments, size, what) in [
            ("mke2fs", &["-qFt", "ext2"][..], 8 << 20, "an ext2 file system"),
            ("mke2fs", &["-qFt", "ext3"], 8 << 20, "an ext3 file system"),
            ("mke2fs", &["-qFt", "ext4"], 8 << 20, "an ext4 file system"),
            ("mkfs.xfs", &["-qf"], 320 << 20, "an xfs file system"),
            ("mkswap", &[], 8 << 20, "swap space"),
            ("mkfs.vfat", &[], 8 << 20, "a vfat file system"),
            ("mkfs.btrfs", &["-qf"], 128 << 20, "a btrfs file system"),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(size).unwrap();
            let Some(made) = run(program, arguments, file.path()) else {
                eprintln!("skipped: no `{program}` to make {what}");
                continue;
            };
            assert!(made, "{program}");
            assert_eq!(probe(&std::fs::read(file.path()).unwrap()), Some(what));
        }
    }

    /// Whether the program succeeded; `None` if there is none.
    fn run(program: &str, arguments: &[&str], path: &Path) -> Option<bool> {
        let mut command = Command::new(program);
        command.args(arguments).arg(path).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().ok().map(|status| status.success())
    }
}
