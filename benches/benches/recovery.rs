//! Opening a store: after a good close, and after a crash. Reading from memory, this is what
//! making sense of the metadata costs.

use criterion::{
    BatchSize, BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use dbs_benches::Outcome;
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, Store};
use dbs_guard::memory::Memory;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
const EXTENT: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes of the devices. Only their metadata is kept.
const DEVICE: u64 = 40 * GIB;
/// Bytes mapped in each.
const MAPPED: u64 = 32 * GIB;
const JOURNAL: u64 = 4 << 20;
const VOLUMES: usize = 1000;
const DEPTH: usize = 256;

/// How much of each extent is data.
#[derive(Clone, Copy)]
enum Filling {
    All,
    /// Every other block: the bitmaps count.
    Half,
}

fn empty() -> Outcome<(Arc<Memory>, Store)> {
    let options = InitOptions {
        journal_size: Some(JOURNAL),
        // Tables that are copied quickly for every round.
        max_size: Some(DEVICE),
        max_volumes: Some(1024),
        max_snapshots: Some(2048),
        ..InitOptions::default()
    };
    let device = Memory::without_data(DEVICE, &options)?.format(&options)?;
    let store = device.open(true)?;
    Ok((device, store))
}

fn mapped(filling: Filling) -> Outcome<(Arc<Memory>, Store)> {
    let (device, store) = empty()?;
    store.create_volume("volume", MAPPED)?;
    let volume = store.volume("volume")?;
    let (length, step) = match filling {
        Filling::All => (EXTENT, EXTENT),
        Filling::Half => (BLOCK, 2 * BLOCK),
    };
    let bytes = vec![0; length as usize];
    for offset in (0..MAPPED).step_by(step as usize) {
        volume.write_at(offset, &bytes, false)?;
    }
    volume.flush()?;
    Ok((device, store))
}

fn volumes() -> Outcome<(Arc<Memory>, Store)> {
    let (device, store) = empty()?;
    for number in 0..VOLUMES {
        store.create_volume(&format!("volume{number}"), GIB)?;
    }
    Ok((device, store))
}

fn chain() -> Outcome<(Arc<Memory>, Store)> {
    let (device, store) = empty()?;
    store.create_volume("volume", GIB)?;
    let volume = store.volume("volume")?;
    for layer in 0..DEPTH as u64 {
        volume.write_at(layer * BLOCK, &[0; BLOCK as usize], false)?;
        store.create_snapshot("volume", &layer.to_string(), &SnapshotOptions::default())?;
    }
    Ok((device, store))
}

fn open(criterion: &mut Criterion, name: &str, mapped: u64, device: &Memory) {
    let mut group = criterion.benchmark_group("open");
    group.sampling_mode(SamplingMode::Flat);
    if mapped > 0 {
        group.throughput(Throughput::Bytes(mapped));
    }
    group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
        bencher.iter_batched(
            || Arc::new(device.fork()),
            |device| device.open(true).expect("it is a store"),
            BatchSize::PerIteration,
        );
    });
}

type Make = fn() -> Outcome<(Arc<Memory>, Store)>;

fn recovery(criterion: &mut Criterion) {
    let stores: [(&str, u64, Make); 5] = [
        ("an empty store", 0, empty),
        ("1000 volumes", 0, volumes),
        ("a chain of 256", 0, chain),
        ("32 GiB mapped, full extents", MAPPED, || mapped(Filling::All)),
        ("32 GiB mapped, half-filled extents", MAPPED, || mapped(Filling::Half)),
    ];
    for (name, mapped, make) in stores {
        let (device, store) = make().expect("memory has no errors");
        let crashed = device.fork();
        store.close().expect("memory has no errors");
        open(criterion, &format!("{name}, closed"), mapped, &device);
        open(criterion, &format!("{name}, after a crash"), mapped, &crashed);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = recovery
}
criterion_main!(benches);
