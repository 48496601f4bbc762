//! Inputs to begin with: what the targets are about, done right.

use crate::sample::{End, Sample};
use dbs_core::format::{Record, RegionKind};

#[cfg(feature = "engine")]
mod engine;
#[cfg(feature = "server")]
mod server;

/// A seed: its target, its name, its bytes.
pub type Seed = (&'static str, String, Vec<u8>);

/// All seeds, the same each time.
#[must_use]
pub fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    images(&mut seeds);
    journals(&mut seeds);
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
    #[cfg(feature = "server")]
    server::seeds(&mut seeds);
    #[cfg(feature = "engine")]
    engine::seeds(&mut seeds);
    seeds
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
