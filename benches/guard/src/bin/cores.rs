//! What one lock costs when more than one core asks for it: requests of 4 KiB on a store in memory, by one
//! thread and by two, to one volume and to one each. No data is transferred, as that is what cores do
//! beside one another anyway: only the steps of the store are left, and the checksum of the block.

use dbs_core::volume::{Finish, Read, Request, Start};
use dbs_core::{InitOptions, Store, Volume};
use dbs_guard::Outcome;
use dbs_guard::memory::Memory;
use nix::sys::resource::{UsageWho, getrusage};
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
const EXTENT: u64 = 1 << 20;
/// Bytes of a volume.
const SIZE: u64 = 64 << 20;
/// Bytes of the device; what is not written takes no memory.
const DEVICE: u64 = 2 << 30;
/// Volumes; also the most threads.
const VOLUMES: usize = 2;
/// Each load runs as often and as long, the loads in turns.
const ROUNDS: usize = 7;
const RUN: Duration = Duration::from_millis(200);
/// Requests between two looks at the clock.
const BATCH: u64 = 500;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Overwrite,
}

/// Requests of a kind by some threads to some volumes.
struct Load {
    kind: Kind,
    threads: usize,
    volumes: usize,
    /// Of each round, requests a second, and times a thread slept for each thousand of them.
    rounds: Vec<(f64, f64)>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cores: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    for checksums in [true, false] {
        let store = prepare(checksums)?;
        let mut loads: Vec<_> = [Kind::Read, Kind::Overwrite]
            .into_iter()
            .flat_map(|kind| [(1, 1), (2, 1), (2, 2)].map(|of| (kind, of)))
            .map(|(kind, (threads, volumes))| Load { kind, threads, volumes, rounds: Vec::new() })
            .collect();
        for _ in 0..ROUNDS {
            loads.iter_mut().try_for_each(|load| load.round(&store))?;
        }
        println!("\nchecksums: {}", if checksums { "yes" } else { "no" });
        println!("{:<10} threads volumes  requests/s   ns each  against 1  sleeps/1,000", "");
        let mut alone = 0.0;
        for load in &mut loads {
            let (rate, sleeps) = load.median();
            if load.threads == 1 {
                alone = rate;
            }
            let name = if load.kind == Kind::Read { "read" } else { "overwrite" };
            let each = load.threads as f64 * 1e9 / rate;
            println!(
                "{name:<10} {:>7} {:>7} {rate:>11.0} {each:>9.0} {:>10.2} {sleeps:>13.2}",
                load.threads,
                load.volumes,
                rate / alone,
            );
        }
    }
    Ok(())
}

/// A store with full volumes of ones.
fn prepare(checksums: bool) -> Outcome<Store> {
    let options = InitOptions { extent_size: EXTENT, checksums, ..InitOptions::default() };
    let store = Memory::new(DEVICE)?.format(&options)?.open(true)?;
    let bytes = vec![1; EXTENT as usize];
    for number in 0..VOLUMES {
        store.create_volume(&number.to_string(), SIZE)?;
        let volume = store.volume(&number.to_string())?;
        for offset in (0..SIZE).step_by(EXTENT as usize) {
            volume.write_at(offset, &bytes, false)?;
        }
    }
    store.flush()?;
    Ok(store)
}

impl Load {
    fn round(&mut self, store: &Store) -> Outcome<()> {
        let start = Barrier::new(self.threads);
        let (kind, volumes) = (self.kind, self.volumes);
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let spawn = |number: usize| {
                let start = &start;
                scope.spawn(move || {
                    // A handle for each thread, as each connection has one.
                    let volume = store.volume(&(number % volumes).to_string())?;
                    start.wait();
                    work(kind, &volume, number as u64)
                })
            };
            let threads: Vec<_> = (0..self.threads).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let (mut rate, mut sleeps, mut done) = (0.0, 0.0, 0.0);
        for outcome in outcomes {
            let (requests, time, slept) = outcome?;
            rate += requests as f64 / time.as_secs_f64();
            sleeps += slept as f64;
            done += requests as f64;
        }
        self.rounds.push((rate, sleeps * 1000.0 / done));
        Ok(())
    }

    fn median(&mut self) -> (f64, f64) {
        self.rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.rounds[self.rounds.len() / 2]
    }
}

/// Requests until time is up: how many, the time, and how often the thread slept.
fn work(kind: Kind, volume: &Volume, seed: u64) -> Outcome<(u64, Duration, i64)> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut request = Request::new();
    let buffer = vec![1; BLOCK as usize];
    let slept =
        || getrusage(UsageWho::RUSAGE_THREAD).map(|usage| usage.voluntary_context_switches());
    let (before, begun, mut done) = (slept()?, Instant::now(), 0);
    while begun.elapsed() < RUN {
        for _ in 0..BATCH {
            let offset = rng.u64(..SIZE / BLOCK) * BLOCK;
            match kind {
                Kind::Read => read(volume, offset, &buffer, &mut request)?,
                Kind::Overwrite => overwrite(volume, offset, &buffer, &mut request)?,
            }
        }
        done += BATCH;
    }
    Ok((done, begun.elapsed(), slept()? - before))
}

fn read(volume: &Volume, offset: u64, buffer: &[u8], request: &mut Request) -> Outcome<()> {
    if volume.start_read(offset, BLOCK, request)? != Start::Io {
        return Err("there is nothing to read".into());
    }
    match request.finish_read(Ok(()), buffer)? {
        Read::Done => Ok(()),
        Read::Again => Err("what was read is in doubt".into()),
    }
}

/// Two threads may meet at a block: then one of them waits, as in a server.
fn overwrite(volume: &Volume, offset: u64, buffer: &[u8], request: &mut Request) -> Outcome<()> {
    if volume.start_write(offset, BLOCK, request)? != Start::Io {
        return Ok(volume.write_at(offset, buffer, false)?);
    }
    request.seal(buffer);
    match request.finish_write(Ok(()))? {
        Finish::Done => Ok(()),
        Finish::Commit => Ok(volume.flush()?),
    }
}
