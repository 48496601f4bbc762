//! Reads a volume through the Rust API, as `dbs-py/bench/reads.py` does through Python's: what one
//! call costs, in microseconds, as JSON.

use dbs_core::{OpenOptions, Result, Store};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

const BLOCK: usize = 4096;
const MIB: usize = 1 << 20;
/// Reads of a round; the fastest round counts.
const ROUNDS: usize = 5;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [store, volume] = &arguments[..] else {
        eprintln!("usage: reads STORE VOLUME");
        return ExitCode::from(2);
    };
    match measure(store, volume) {
        Ok((large, small)) => {
            println!("{{\"large_us\": {large:.3}, \"small_us\": {small:.3}}}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("reads: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(store: &str, volume: &str) -> Result<(f64, f64)> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let store = Store::open(Path::new(store), &options)?;
    let volume = store.volume(volume)?;
    let mut buf = vec![0; MIB];
    let large = fastest(&mut |at| volume.read_at(at, &mut buf), volume.size(), MIB, 256)?;
    let small =
        fastest(&mut |at| volume.read_at(at, &mut buf[..BLOCK]), volume.size(), BLOCK, 10_000)?;
    Ok((large, small))
}

/// Microseconds of one read in the fastest of some rounds. Places are those of the Python side.
fn fastest(
    read: &mut dyn FnMut(u64) -> Result<()>,
    size: u64,
    length: usize,
    reads: u64,
) -> Result<f64> {
    let places = size / length as u64;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        for number in 0..reads {
            read(number * 7919 % places * length as u64)?;
        }
        best = best.min(begun.elapsed().as_secs_f64() * 1e6 / reads as f64);
    }
    Ok(best)
}
