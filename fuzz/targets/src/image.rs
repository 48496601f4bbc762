//! Images: a small store with bytes changed, whose checksums are made right again or not.

use crate::disk::{BLOCK, Disk};
use crate::exercise::{assert_detected, survive};
use crate::input::Input;
use crate::sample::{End, Sample, contents, open};
use dbs_core::format::block::{self, HEADER_BYTES};
use dbs_core::format::geometry::SUPERBLOCK_SECOND;
use dbs_core::format::{BlockKind, RegionKind};
use dbs_core::io::Storage;
use std::sync::Arc;

/// Changes that one input makes.
const CHANGES_MAX: usize = 8;

/// Where the re-sealed blocks are.
const TABLES: [(RegionKind, BlockKind); 5] = [
    (RegionKind::Volumes, BlockKind::Volumes),
    (RegionKind::Snapshots, BlockKind::Snapshots),
    (RegionKind::Labels, BlockKind::Labels),
    (RegionKind::Spares, BlockKind::Spares),
    (RegionKind::Extents, BlockKind::Extents),
];

/// Bytes laid over a store; it is opened, checked, used, closed and opened again.
///
/// The input: how the sample ended and whether checksums are mended (one byte), how many changes (one
/// byte), the changes, and the rest says how it is used.
pub fn image(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let sample = Sample::get(if flags & 1 == 0 { End::Closed } else { End::Killed });
    let mended = flags & 2 != 0;
    let disk = Arc::new(sample.disk());
    for _ in 0..usize::from(input.u8()).min(CHANGES_MAX) {
        if mended {
            mend(sample, &disk, &mut input);
        } else {
            damage(sample, &disk, &mut input);
        }
    }
    if !mended {
        // Damage under checksums is detected or harmless.
        let copy = Arc::new(disk.fork());
        match open(&copy, None, 4, flags & 4 == 0) {
            Ok(store) => assert!(contents(&store) == sample.contents, "wrong data taken for right"),
            Err(error) => assert_detected(&error, "open"),
        }
    }
    survive(&disk, || None, &mut input);
}

/// Changes metadata as rot, or a misdirected write, does.
fn damage(sample: &Sample, disk: &Disk, input: &mut Input<'_>) {
    let metadata = sample.metadata_bytes();
    let last = sample.geometry.superblock_last();
    let kind = input.u8();
    let at = input.below(metadata + BLOCK as u64);
    let at = if at < metadata { at } else { last + at - metadata };
    match kind % 4 {
        0 | 1 => {
            let mut byte = [0];
            let sector = at / 512 * 512;
            let mut old = [0; 512];
            disk.read_at(sector, &mut old).unwrap();
            byte[0] = old[(at - sector) as usize] ^ input.u8().max(1);
            disk.put(at, &byte);
        }
        2 => {
            let length = input.below(64) as usize;
            let bytes = input.bytes(length);
            let room = if at < metadata { metadata - at } else { BLOCK as u64 };
            disk.put(at, &bytes[..bytes.len().min(room as usize)]);
        }
        _ => {
            // Another block's content, or zeros.
            let from = input.below(metadata / BLOCK as u64) * BLOCK as u64;
            let mut block = [0; BLOCK];
            if input.flag() {
                disk.read_at(from, &mut block).unwrap();
            }
            disk.put(at / BLOCK as u64 * BLOCK as u64, &block);
        }
    }
}

/// Changes metadata and makes the checksums right: what somebody malicious does.
fn mend(sample: &Sample, disk: &Disk, input: &mut Input<'_>) {
    let which = usize::from(input.u8()) % (TABLES.len() + 1);
    let Some((region, kind)) = TABLES.get(which) else {
        return superblock(sample, disk, input);
    };
    let index = input.below(u64::from(sample.geometry.needed_blocks(*region))) as u32;
    let at = input.below((BLOCK - HEADER_BYTES) as u64) as usize;
    let length = 1 + input.below(40) as usize;
    let bytes = input.bytes(length);
    let lsn = if input.flag() { sample.sequence } else { input.u64() };
    for copy in 0..2 {
        let address = sample.geometry.block_address(*region, index, copy);
        let mut block = [0; BLOCK];
        disk.read_at(address, &mut block).unwrap();
        let end = (HEADER_BYTES + at + bytes.len()).min(BLOCK);
        let start = HEADER_BYTES + at;
        block[start..end].copy_from_slice(&bytes[..end - start]);
        block::seal(&mut block, *kind, &sample.uuid, address, lsn, [0; 24]);
        disk.put(address, &block);
    }
}

fn superblock(sample: &Sample, disk: &Disk, input: &mut Input<'_>) {
    // Magic, version, checksum, uuid stay: all else is to be proven.
    let at = 32 + input.below(368);
    let length = 1 + input.below(8) as usize;
    let bytes = input.bytes(length);
    for address in [0, SUPERBLOCK_SECOND, sample.geometry.superblock_last()] {
        let mut block = vec![0; BLOCK];
        disk.read_at(address, &mut block).unwrap();
        block[at as usize..][..bytes.len()].copy_from_slice(bytes);
        if !(40..48).contains(&at) {
            block[40..48].copy_from_slice(&address.to_le_bytes());
        }
        block[12..16].fill(0);
        let crc = crc32c::crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        disk.put(address, &block);
    }
}
