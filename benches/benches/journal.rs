//! Journal groups: from records to sealed blocks, and found again in the ring.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dbs_core::format::journal::{GROUP_BLOCK_BYTES, encode, scan};
use std::hint::black_box;
use std::time::Duration;

const STORE: [u8; 16] = [9; 16];
/// Payloads in blocks of the journal: a few writes, a busy second, the most a group may have.
const SIZES: [usize; 3] = [1, 16, 256];
/// Bytes of the ring that is scanned.
const RING: usize = 16 << 20;

fn groups(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("journal group");
    for blocks in SIZES {
        let payload: Vec<u8> = (0..blocks * GROUP_BLOCK_BYTES).map(|i| i as u8).collect();
        group.throughput(Throughput::Bytes(payload.len() as u64));
        group.bench_with_input(BenchmarkId::new("encode", blocks), &payload, |bencher, payload| {
            bencher.iter(|| encode(black_box(payload), 7, 1, &STORE, 1 << 20));
        });
    }
    let mut ring = Vec::with_capacity(RING);
    for sequence in 1.. {
        let payload = vec![sequence as u8; 8 * GROUP_BLOCK_BYTES];
        let bytes = encode(&payload, sequence, 1, &STORE, ring.len() as u64);
        if ring.len() + bytes.len() > RING {
            break;
        }
        ring.extend(bytes);
    }
    group.throughput(Throughput::Bytes(ring.len() as u64));
    group.bench_function("scan a full ring of 16 MiB", |bencher| {
        bencher.iter(|| scan(black_box(&ring), &STORE, 0));
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = groups
}
criterion_main!(benches);
