//! Where blocks are: lookups through chains, and what writes change, on a device that keeps
//! metadata only, so that nothing is copied.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dbs_benches::Outcome;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Finish, Read, Request, Start};
use dbs_core::{InitOptions, Store, Volume};
use dbs_guard::memory::Memory;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
const EXTENT: u64 = 1 << 20;
/// Bytes of the device, far more than of memory, and of its journal, which no test fills.
const DEVICE: u64 = 32 << 30;
const JOURNAL: u64 = 4 << 20;
const DEPTHS: [usize; 5] = [1, 16, 64, 256, 1000];
/// Bytes of a volume with layers; each layer has a block of each extent.
const LAYERED: u64 = 16 << 20;
/// Bytes of a volume that is written to, and writes before it is made anew.
const SIZE: u64 = 64 << 20;
const WRITES: usize = 4096;

/// A store with an open volume.
struct Prepared {
    _device: Arc<Memory>,
    store: Store,
    volume: Volume,
}

impl Prepared {
    fn new(size: u64, full: bool) -> Outcome<Self> {
        let options = InitOptions { journal_size: Some(JOURNAL), ..InitOptions::default() };
        let device = Memory::without_data(DEVICE, &options)?.format(&options)?;
        let store = device.open(true)?;
        store.create_volume("volume", size)?;
        let volume = store.volume("volume")?;
        if full {
            let bytes = vec![0; EXTENT as usize];
            for offset in (0..size).step_by(EXTENT as usize) {
                volume.write_at(offset, &bytes, false)?;
            }
        }
        volume.flush()?;
        Ok(Self { _device: device, store, volume })
    }

    fn layered(depth: usize) -> Outcome<Self> {
        let prepared = Self::new(LAYERED, true)?;
        let mut rng = fastrand::Rng::with_seed(1);
        for layer in 1..depth {
            prepared.snapshot(layer)?;
            for extent in (0..LAYERED).step_by(EXTENT as usize) {
                let offset = extent + rng.u64(..EXTENT / BLOCK) * BLOCK;
                prepared.volume.write_at(offset, &[0; BLOCK as usize], false)?;
            }
        }
        Ok(prepared)
    }

    fn snapshot(&self, number: usize) -> Outcome<()> {
        self.store.create_snapshot("volume", &number.to_string(), &SnapshotOptions::default())?;
        Ok(())
    }
}

/// Finds a block that is on the device; the read of it is the caller's.
fn look_up(volume: &Volume, offset: u64, request: &mut Request) {
    let start = volume.start_read(offset, BLOCK, request).expect("memory has no errors");
    assert_eq!(start, Start::Io);
    let read = request.finish_read(Ok(()), &[]).expect("memory has no errors");
    assert_eq!(read, Read::Done);
}

/// Writes a block, but for its bytes.
fn write(volume: &Volume, offset: u64, request: &mut Request) {
    match volume.start_write(offset, BLOCK, request).expect("memory has no errors") {
        Start::Io => {
            let finish = request.finish_write(Ok(())).expect("memory has no errors");
            assert_eq!(finish, Finish::Done, "the tail takes the records");
        }
        Start::Done => {}
        // Storage for metadata is reserved now and then.
        Start::Blocked => {
            volume.write_at(offset, &[0; BLOCK as usize], false).expect("memory has no errors");
        }
    }
}

fn lookup(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup of 4 KiB at depth");
    for depth in DEPTHS {
        let Prepared { volume, .. } = Prepared::layered(depth).expect("memory has no errors");
        let mut rng = fastrand::Rng::with_seed(2);
        let mut request = Request::new();
        group.bench_function(BenchmarkId::from_parameter(depth), |bencher| {
            bencher.iter(|| {
                let offset = rng.u64(..LAYERED / BLOCK) * BLOCK;
                look_up(&volume, offset, &mut request)
            });
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("first lookup in an extent at depth");
    for depth in DEPTHS {
        let Prepared { store, volume, .. } =
            Prepared::layered(depth).expect("memory has no errors");
        // What is remembered is forgotten with the last handle.
        drop(volume);
        let mut request = Request::new();
        group.throughput(Throughput::Elements(LAYERED / EXTENT));
        group.bench_function(BenchmarkId::from_parameter(depth), |bencher| {
            let open = || store.volume("volume").expect("it is there");
            bencher.iter_batched(
                open,
                |volume| {
                    let offsets = (0..LAYERED).step_by(EXTENT as usize);
                    offsets.for_each(|offset| look_up(&volume, offset, &mut request));
                },
                BatchSize::PerIteration,
            );
        });
    }
}

/// Writes of 4 KiB in an order drawn by lot, to volumes as `prepare` makes them.
fn writes(iterations: u64, prepare: impl Fn() -> Outcome<Prepared>) -> Duration {
    let mut rng = fastrand::Rng::with_seed(3);
    let mut blocks: Vec<u64> = (0..SIZE / BLOCK).collect();
    let mut request = Request::new();
    let mut time = Duration::ZERO;
    let mut rest = iterations as usize;
    while rest > 0 {
        rng.shuffle(&mut blocks);
        let Prepared { volume, .. } = prepare().expect("memory has no errors");
        let count = rest.min(WRITES);
        let begun = Instant::now();
        for block in &blocks[..count] {
            write(&volume, block * BLOCK, &mut request);
        }
        time += begun.elapsed();
        rest -= count;
    }
    time
}

fn update(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("write of 4 KiB");
    group.throughput(Throughput::Elements(1));
    group.bench_function("overwrite", |bencher| {
        bencher.iter_custom(|iterations| writes(iterations, || Prepared::new(SIZE, true)));
    });
    group.bench_function("first", |bencher| {
        bencher.iter_custom(|iterations| writes(iterations, || Prepared::new(SIZE, false)));
    });
    group.bench_function("after a snapshot", |bencher| {
        bencher.iter_custom(|iterations| {
            writes(iterations, || {
                let prepared = Prepared::new(SIZE, true)?;
                prepared.snapshot(0)?;
                Ok(prepared)
            })
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = lookup, update
}
criterion_main!(benches);
