//! Images of format 1.0.0, which has no checksums: opened, read and upgraded.

use crate::input::Input;
use crate::sample::empty;
use dbs_core::ErrorKind;
use dbs_core::info::Severity;
use dbs_core::v1::{Image, Layout, upgrade};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const MIB: u64 = 1 << 20;
/// The smallest device the prototype formats.
const SIZE: u64 = 100 * MIB;
const VOLUMES: u64 = 4096;
const SNAPSHOTS: u64 = 72_192;
const LABELS: u64 = 1_317_357;
/// Changes that one input makes.
const CHANGES_MAX: usize = 24;
/// Extents copied before an upgrade is stopped: hostile tables name the same ones again and again.
const UPGRADE_MAX_BYTES: u64 = 4 * MIB;

/// A sample in either layout with bytes changed; opened with either layout.
///
/// The input: flags (bit 0: made in the layout `dev`, bits 1 and 2: opened as what), and changes.
pub fn v1(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let dev = flags & 1 != 0;
    let made = sample(dev);
    for _ in 0..CHANGES_MAX {
        if input.is_empty() {
            break;
        }
        change(&made, dev, &mut input);
    }
    let layout = match flags >> 1 & 3 {
        2 => Some(Layout::Main),
        3 => Some(Layout::Dev),
        _ => None,
    };
    let path = PathBuf::from(format!("/proc/self/fd/{}", made.as_raw_fd()));
    match Image::open(&path, layout) {
        Ok(image) => read(&image),
        Err(error) => {
            let known = [ErrorKind::Corrupt, ErrorKind::Unsupported];
            assert!(known.contains(&error.kind()), "{error} ({:?})", error.kind());
        }
    }
}

/// One record of a table, or any bytes.
fn change(file: &File, dev: bool, input: &mut Input<'_>) {
    let kind = input.u8();
    let (width, table) = if dev { (19, 1_318_912) } else { (10, 729_088) };
    let (at, most) = match kind % 8 {
        0 => (8 + input.below(16), 8),
        1 => (VOLUMES + input.below(8) * 266, 10),
        2 => (VOLUMES + input.below(8) * 266 + 10, 40),
        3 => (SNAPSHOTS + input.below(8) * width, 19),
        4 => (table + input.below(8) * 38, 38),
        5 => (LABELS + input.below(200), 24),
        6 => (input.below(2 * MIB), 16),
        _ => {
            let size = u64::from(input.u32());
            return file.set_len(size.min(2 * SIZE)).unwrap();
        }
    };
    let length = 1 + input.below(most) as usize;
    file.write_all_at(input.bytes(length), at).unwrap();
}

fn read(image: &Image) {
    let mut specs = Vec::new();
    for volume in image.volumes().iter().take(16) {
        let slot = format!("#{}", volume.slot);
        for snapshot in image.snapshots(&slot).unwrap_or_default().iter().take(16) {
            specs.push(format!("{slot}@{}", snapshot.id));
            assert!(!snapshot.name().is_empty());
        }
        specs.push(slot);
    }
    let mut buf = vec![0; 64 << 10];
    for spec in specs {
        let Ok(view) = image.open_spec(&spec) else { continue };
        let size = view.size();
        let _ = view.map(0, size, 100);
        for at in [0, size / 2 / 4096 * 4096, size.saturating_sub(buf.len() as u64)] {
            let length = buf.len().min((size - at) as usize);
            let _ = view.read_at(at, &mut buf[..length]);
        }
    }
    let (_disk, store) = empty();
    // Too large for the store, damaged, or stopped: all of it leaves a store that is good.
    let upgraded = upgrade(image, &store, &mut |done, _| done < UPGRADE_MAX_BYTES);
    if let Err(error) = upgraded {
        assert!(error.kind() != ErrorKind::Poisoned, "{error}");
    }
    let report = store.check().unwrap();
    assert!(report.worst() != Some(Severity::Corrupt), "{report:?}");
}

/// An image with a volume of three layers and an empty one.
fn sample(dev: bool) -> File {
    let file = File::from(memfd_create(c"v1", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(SIZE).unwrap();
    let put = |offset: u64, bytes: &[u8]| file.write_all_at(bytes, offset).unwrap();
    let extents: [(u16, u32, &[u64]); 4] =
        [(1, 0, &[0, 1]), (1, 9, &[255]), (2, 0, &[0, 2]), (3, 4, &[8])];
    let (width, table, data) = if dev { (19, 1_318_912, 2 * MIB) } else { (10, 729_088, MIB) };
    put(0, b"DBS@393!");
    put(8, &0x0001_0000u32.to_le_bytes());
    put(12, &(extents.len() as u32).to_le_bytes());
    put(16, &SIZE.to_le_bytes());
    for (slot, head, size, name) in [(0, 3u16, 10 * MIB, "one"), (7, 4, MIB, "two")] {
        put(VOLUMES + slot * 266, &head.to_le_bytes());
        put(VOLUMES + slot * 266 + 2, &size.to_le_bytes());
        put(VOLUMES + slot * 266 + 10, name.as_bytes());
    }
    for (id, parent) in [(1u64, 0u16), (2, 1), (3, 2), (4, 0)] {
        let at = SNAPSHOTS + (id - 1) * width;
        put(at, &parent.to_le_bytes());
        put(at + 2, &(1_700_000_000 + id).to_le_bytes());
    }
    for (index, (owner, logical, blocks)) in (0u64..).zip(extents) {
        let mut record = [0; 38];
        record[..2].copy_from_slice(&owner.to_le_bytes());
        record[2..6].copy_from_slice(&logical.to_le_bytes());
        for block in blocks {
            record[6 + *block as usize / 8] |= 1 << (block % 8);
            put(data + index * MIB + block * 4096, &[0x30 | *block as u8; 4096]);
        }
        put(table + index * 38, &record);
    }
    if dev {
        let mut labels = 1u32.to_le_bytes().to_vec();
        labels.extend(1u16.to_le_bytes());
        labels.extend(1u32.to_le_bytes());
        for text in ["name", "monday"] {
            labels.extend((text.len() as u32).to_le_bytes());
            labels.extend(text.as_bytes());
        }
        put(LABELS, &labels);
    }
    file
}
