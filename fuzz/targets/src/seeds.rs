//! Inputs to begin with: what the targets are about, done right.

use crate::sample::{End, Sample};
use dbs_core::format::geometry::{SLOTS_PER_BLOCK, SUPERBLOCK_SECOND};
use dbs_core::format::slots::{KeySlot, SLOT_BYTES};
use dbs_core::format::superblock::INCOMPAT_ENCRYPTED;
use dbs_core::format::{Record, RegionKind, SnapshotSlot, VolumeSlot};
use serde_json::{Value, json};
use std::mem::offset_of;

#[cfg(feature = "engine")]
mod engine;
#[cfg(feature = "server")]
mod nvme;
#[cfg(feature = "server")]
mod server;
#[cfg(feature = "server")]
mod vhost;

/// A seed: its target, its name, its bytes.
pub type Seed = (&'static str, String, Vec<u8>);

/// All seeds, the same each time.
#[must_use]
pub fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    images(&mut seeds);
    sums(&mut seeds);
    journals(&mut seeds);
    repairs(&mut seeds);
    keys(&mut seeds);
    restores(&mut seeds);
    let mut rng = fastrand::Rng::with_seed(3);
    for number in 0..12 {
        let mut bytes = vec![number, rng.u8(..)];
        // Two volumes, so that what follows has something to work on.
        bytes.extend([0, 0, 0, 1, 0, 0, 0, 0, 1, 200, 0, 0, 0]);
        bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take(60 + 20 * usize::from(number)));
        seeds.push(("ops", format!("history-{number}"), bytes));
    }
    for (name, flags) in [("main", 0), ("dev", 1), ("main-as-dev", 6), ("dev-as-main", 5)] {
        seeds.push(("v1", name.to_owned(), vec![flags]));
        let record = [4, 1, 2, 0, 0, 9, 0, 0, 0, 0xff, 0x0f];
        seeds.push(("v1", format!("{name}-extent"), [&[flags][..], &record].concat()));
        let parent = [3, 0, 1, 3, 0, 0, 0, 0, 0, 0, 0];
        seeds.push(("v1", format!("{name}-cycle"), [&[flags][..], &parent].concat()));
    }
    backups(&mut seeds);
    #[cfg(feature = "server")]
    server::seeds(&mut seeds);
    #[cfg(feature = "server")]
    vhost::seeds(&mut seeds);
    #[cfg(feature = "server")]
    nvme::seeds(&mut seeds);
    #[cfg(feature = "engine")]
    engine::seeds(&mut seeds);
    seeds
}

/// What each kind of file in a backup store looks like.
fn backups(seeds: &mut Vec<Seed>) {
    if cfg!(not(feature = "backup")) {
        return;
    }
    let name = "cf83e1357eefb8bdf1542850d66d8007d620e4050b5715dc83f4a921d36ce9ce";
    let volume = r#"{"Name":"v1","Size":"4194304","Labels":{"k":"v"},"CreatedTime":"2026-11-25T11:00:00Z","LastBackupName":"b1","LastBackupAt":"","BlockCount":"1","CompressionMethod":"\"lz4\"","DataEngine":"\"\""}"#;
    let backup = format!(
        r#"{{"Name":"b1","VolumeName":"v1","CreatedTime":"x","Size":"2097152","Parameters":{{"backup-block-size":"2Mi"}},"Blocks":[{{"Offset":2097152,"BlockChecksum":"{name}"}}]}}"#
    );
    let s3 = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x&amp;</NextContinuationToken><Contents><Key>a</Key></Contents><CommonPrefixes><Prefix>b/</Prefix></CommonPrefixes></ListBucketResult>";
    let azure = "<EnumerationResults><Blobs><Blob><Name>a</Name></Blob><BlobPrefix><Name>b/</Name></BlobPrefix></Blobs><NextMarker/></EnumerationResults>";
    let lz4 = [4, 0x22, 0x4d, 0x18, 0x64, 0x70, 0xb9, 0, 0, 0, 0, 5, 0x5d, 0xcc, 2];
    for (file, kind, bytes) in [
        ("volume", 0, volume.as_bytes()),
        ("backup", 1, backup.as_bytes()),
        ("url", 2, b"s3://bucket@region/p%20q/?backup=b1&nfsOptions=a%2Cb&volume=v1"),
        ("lz4", 3, &lz4),
        ("s3", 4, s3.as_bytes()),
        ("azure", 4, azure.as_bytes()),
        ("name", 5, format!("cf/83/{name}.blk").as_bytes()),
    ] {
        seeds.push(("backup", file.to_owned(), [&[kind], bytes].concat()));
    }
    // Whole stores, in Longhorn's layout (6) and as a repository (7): as they are, and with one part that says something else.
    let edit = |part: u8, action: u8, at: u16, length: u8, bytes: &[u8]| {
        [&[part, action][..], &at.to_le_bytes(), &[length], bytes].concat()
    };
    for (kind, layout, parts) in [(6, "longhorn", 5), (7, "repository", 14)] {
        seeds.push(("backup", layout.to_owned(), vec![kind]));
        for part in 0..parts {
            let edits = [edit(part, 0, 60, 2, b"99"), edit(part, 1, 40, 1, &[0xff])].concat();
            seeds.push(("backup", format!("{layout}-{part}"), [&[kind][..], &edits].concat()));
        }
    }
    // Of an index and its packs: offsets and lengths of entries.
    for (at, bytes) in [(64, [0xff; 4]), (68, [0xff; 4]), (72, [0; 4]), (16, [1, 0, 0, 0])] {
        let edits =
            [edit(7, 0, at, 4, &bytes), edit(3, 0, at.saturating_sub(32), 4, &bytes)].concat();
        seeds.push(("backup", format!("repository-entry-{at}"), [&[7][..], &edits].concat()));
    }
}

/// Steps on a store that was opened: a bit of everything.
fn usage(seed: u64, steps: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..steps * 8).map(|_| rng.u8(..)).collect()
}

fn images(seeds: &mut Vec<Seed>) {
    for (name, flags) in [("closed", 0u8), ("killed", 1)] {
        for seed in 0..3 {
            let bytes = [&[flags, 0][..], &usage(seed, 20)].concat();
            seeds.push(("image", format!("{name}-used-{seed}"), bytes));
        }
        let flipped = [&[flags, 1, 0, 0x20, 0x30, 0, 0, 1][..], &usage(3, 5)].concat();
        seeds.push(("image", format!("{name}-flipped"), flipped));
        for region in 0..6u8 {
            let change = [region, 0, 16, 0, 3, 1, 0, 0, 0, 1];
            let bytes = [&[flags | 2, 1][..], &change, &usage(u64::from(region), 5)].concat();
            seeds.push(("image", format!("{name}-mended-{region}"), bytes));
        }
    }
}

/// Stores with checksums of data: rot of data, of a page, and pages that are lies.
fn sums(seeds: &mut Vec<Seed>) {
    let geometry = &Sample::of(End::Closed, true).geometry;
    let data = geometry.region(RegionKind::Data).offset;
    let page = geometry.sums_address(0);
    for (name, at) in [("data", data + 70), ("page", page + 100)] {
        let bytes = [&[8, 1][..], &flip(at), &usage(1, 10)].concat();
        seeds.push(("image", format!("sums-rotten-{name}"), bytes));
    }
    for (name, state) in [("open", 1), ("closed", 2), ("neither", 3)] {
        let change = [6, 0, 0, 0, 3, 9, 9, 9, 9, state];
        let bytes = [&[8 | 2, 1][..], &change, &usage(2, 10)].concat();
        seeds.push(("image", format!("sums-lie-{name}"), bytes));
    }
    for (name, flags) in [("closed", 8), ("killed", 9)] {
        let bytes = [&[flags, 0][..], &usage(5, 20)].concat();
        seeds.push(("image", format!("sums-{name}-used"), bytes));
    }
}

/// One byte that is rotten.
fn flip(at: u64) -> Vec<u8> {
    [&[0][..], &(at as u32).to_le_bytes(), &[1]].concat()
}

/// Both copies of a block lost, all superblocks rotten, and what lies under good checksums.
fn repairs(seeds: &mut Vec<Seed>) {
    for (name, flags) in [("closed", 0u8), ("killed", 1), ("sums", 8)] {
        let end = if flags & 1 == 0 { End::Closed } else { End::Killed };
        let geometry = &Sample::of(end, flags & 8 != 0).geometry;
        for region in RegionKind::MARKED.into_iter().chain([RegionKind::Labels]) {
            let copies = [0, 1].map(|copy| flip(geometry.block_address(region, 0, copy) + 777));
            let bytes = [&[flags, 2][..], &copies.concat(), &usage(6, 5)].concat();
            seeds.push(("repair", format!("{name}-lost-{}", region as u32), bytes));
        }
        let metadata = geometry.region(RegionKind::Data).offset;
        // Behind the metadata, as far as the target counts, comes the last copy.
        let last = if flags & 8 == 0 { metadata } else { geometry.superblock_last() };
        let copies = [100, SUPERBLOCK_SECOND + 200, last + 300].map(flip).concat();
        let bytes = [&[flags, 3][..], &copies, &usage(7, 5)].concat();
        seeds.push(("repair", format!("{name}-superblocks"), bytes));
    }
    let ring = Sample::get(End::Killed).geometry.region(RegionKind::Journal).offset;
    for (name, flags) in [("kept", 1u8), ("lost", 5), ("with-tail", 17), ("spoilt", 37)] {
        let bytes = [&[flags, 1][..], &flip(ring + 100), &usage(8, 5)].concat();
        seeds.push(("repair", format!("journal-{name}"), bytes));
    }
    for region in 0..5u8 {
        // Ids, flags and owners are in the first bytes of slots and entries.
        let change = [region, 0, 8, 0, 7, 1, 0, 0, 0, 2, 0, 0, 0, 1];
        let bytes = [&[2, 1][..], &change, &usage(u64::from(region), 5)].concat();
        seeds.push(("repair", format!("mended-{region}"), bytes));
    }
    for (name, at) in [("sequence", 0u8), ("clean-sequence", 88), ("features", 24)] {
        // Of the highest sequence there may be nothing follows.
        let byte = if name == "features" { 4 } else { 0 };
        let change = [5, at, 0, 7, byte, 0, 0, 0, 0, 0, 0, if byte == 0 { 0x40 } else { 0 }];
        for target in ["image", "repair"] {
            let bytes = [&[2, 1][..], &change, &usage(9, 3)].concat();
            seeds.push((target, format!("highest-{name}"), bytes));
        }
    }
}

/// A volume that says it is encrypted: the whole of it, or its head alone, which builds on what is not; and one with a key that no
/// version has written.
fn keys(seeds: &mut Vec<Seed>) {
    let dump: Value = serde_json::from_slice(&Sample::get(End::Closed).dump).unwrap();
    let volumes = dump["volumes"].as_array().unwrap();
    let (key, family) = ([1, 2, 1, 0, 8, 0, 0, 0, 1, 0, 0, 0], [9; 16]);
    let bit = vec![5, 32, 0, 0, INCOMPAT_ENCRYPTED as u8];
    for (name, volume, method) in
        [("whole", "beta", 1), ("parted", "alpha", 1), ("other", "beta", 7)]
    {
        let volume = volumes.iter().find(|found| found["name"] == volume).unwrap();
        let change = |region: u8, id: &Value, field: usize, bytes: &[u8]| {
            let slot = id.as_u64().unwrap() as u32 - 1;
            let at = (slot % SLOTS_PER_BLOCK) as usize * SLOT_BYTES + field;
            let head = [&[region, (slot / SLOTS_PER_BLOCK) as u8], &(at as u16).to_le_bytes()[..]];
            [&head.concat()[..], &[bytes.len() as u8 - 1], bytes, &[1]].concat()
        };
        let slot = offset_of!(VolumeSlot, key);
        let mut key = key;
        key[0] = method;
        let changes = [
            bit.clone(),
            change(0, &volume["id"], slot, &key),
            change(0, &volume["id"], slot + offset_of!(KeySlot, family), &family),
            change(1, &volume["head"], offset_of!(SnapshotSlot, family), &family),
        ];
        for target in ["image", "repair"] {
            let bytes = [&[2, 4][..], &changes.concat(), &usage(5, 10)].concat();
            seeds.push((target, format!("keys-{name}"), bytes));
        }
    }
}

/// Dumps as they are, with single fields changed, and of a store without volumes.
fn restores(seeds: &mut Vec<Seed>) {
    for flags in [0u8, 1, 2, 4, 6, 8, 9, 10] {
        let bytes = [&[flags, 0][..], &usage(3, 5)].concat();
        seeds.push(("restore", format!("unchanged-{flags}"), bytes));
    }
    for list in 0..5u8 {
        for (number, value) in [&[0, 3][..], &[5, 2], &[6, 1, 0, b'x'], &[9]].iter().enumerate() {
            let head: &[u8] = if list == 4 { &[4] } else { &[list, 0, 2] };
            let change = [head, &[number as u8 * 3], value].concat();
            let bytes = [&[0, 1][..], &change, &usage(4, 3)].concat();
            seeds.push(("restore", format!("changed-{list}-{number}"), bytes));
        }
    }
    let mut dump: Value = serde_json::from_slice(&Sample::get(End::Closed).dump).unwrap();
    for list in ["volumes", "snapshots", "entries"] {
        dump[list] = json!([]);
    }
    seeds.push(("restore", "empty".to_owned(), [vec![16], dump.to_string().into()].concat()));
}

fn journals(seeds: &mut Vec<Seed>) {
    let sample = Sample::get(End::Killed);
    let mut records = Vec::new();
    for group in sample.scan.groups.values() {
        let mut rest = &group.payload[..];
        while let Some(record) = Record::decode(&mut rest) {
            let mut bytes = Vec::new();
            record.encode(&mut bytes);
            if !matches!(record, Record::Checkpoint { .. }) {
                records.push(bytes);
            }
        }
    }
    records.sort_by_key(|record| record[0]);
    records.dedup_by_key(|record| (record[0], record.len()));
    let run = |bytes: &[u8]| [&(bytes.len() as u16).to_le_bytes()[..], bytes].concat();
    for (number, record) in records.iter().enumerate() {
        let group = [&[1, 1, 1, 0][..], &run(record), &[0], &usage(1, 3)].concat();
        seeds.push(("journal", format!("group-{}-{number}", record[0]), group));
        let tail = [&[1, 0, 1, 0][..], &run(record), &[0], &usage(2, 3)].concat();
        seeds.push(("journal", format!("tail-{}-{number}", record[0]), tail));
    }
    let all = records.concat();
    let group = [&[0, 1, 1, 0][..], &run(&all), &[0], &usage(4, 3)].concat();
    seeds.push(("journal", "group-of-all".to_owned(), group));
    assert!(sample.geometry.region(RegionKind::Journal).length > 0);
}
