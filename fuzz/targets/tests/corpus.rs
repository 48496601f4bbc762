//! Everything the fuzzer once found worth keeping, and every input that once failed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_core::sabotage::{self, Bug};
use dbs_fuzz_targets::{TARGETS, repair, seeds::seeds};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// All of the corpus together: it is for every checkout.
const CORPUS_MAX_BYTES: u64 = 300 << 10;

fn directory(kind: &str, target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(kind).join(target)
}

fn files(kind: &str, target: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory(kind, target)) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn the_corpus_and_what_once_failed_replay() {
    let mut bytes = 0;
    for (name, target) in TARGETS {
        let begin = Instant::now();
        let corpus = files("corpus", name);
        let regressions = files("regressions", name);
        assert!(!corpus.is_empty(), "{name} has no corpus");
        for file in corpus.iter().chain(&regressions) {
            let data = fs::read(file).unwrap();
            bytes += data.len() as u64;
            println!("{}", file.display());
            target(&data);
        }
        let (count, found) = (corpus.len(), regressions.len());
        println!("{name}: {count} inputs and {found} regressions in {:?}", begin.elapsed());
    }
    assert!(bytes <= CORPUS_MAX_BYTES, "{bytes} bytes of corpus: minimise it");
}

/// Changes of the corpus at random, the same each time: what a fuzzer without eyes finds. More of it
/// for each target with `DBS_FUZZ_SECONDS=60`, for one target with `DBS_FUZZ_TARGET=image`.
#[test]
fn the_corpus_with_changes_runs() {
    let seconds = std::env::var("DBS_FUZZ_SECONDS").ok();
    let time = Duration::from_secs(seconds.map_or(0, |text| text.parse().unwrap()));
    let only = std::env::var("DBS_FUZZ_TARGET").ok();
    for (name, target) in TARGETS.iter().filter(|t| only.as_deref().is_none_or(|o| o == t.0)) {
        let corpus = files("corpus", name);
        let (begin, mut count) = (Instant::now(), 0);
        // One round at least.
        for round in 0.. {
            for (index, file) in corpus.iter().enumerate() {
                count += 1;
                let mut rng = fastrand::Rng::with_seed(round << 32 | index as u64);
                let mut data = fs::read(file).unwrap();
                change(&mut data, &mut rng);
                let result = std::panic::catch_unwind(|| target(&data));
                if result.is_err() {
                    let at = std::env::temp_dir().join(format!("fuzz-{name}-{round}-{index}"));
                    fs::write(&at, &data).unwrap();
                    panic!("{name}: round {round}, {}: input in {}", file.display(), at.display());
                }
            }
            if begin.elapsed() >= time {
                break;
            }
        }
        println!("{name}: {count} changed inputs in {:?}", begin.elapsed());
    }
}

fn change(data: &mut Vec<u8>, rng: &mut fastrand::Rng) {
    for _ in 0..rng.u8(1..6) {
        let at = rng.usize(0..=data.len());
        match rng.u8(0..6) {
            0 if at < data.len() => data[at] ^= 1 << rng.u8(0..8),
            1 if at < data.len() => data[at] = rng.u8(..),
            2 => data.insert(at, rng.u8(..)),
            3 if at < data.len() => drop(data.remove(at)),
            4 => {
                let extreme = *rng.choice(&[0, 1, 0x7fff_ffff, u64::MAX, 1 << 32]).unwrap();
                let end = (at + 1 + rng.usize(0..8)).min(data.len());
                data[at..end].copy_from_slice(&extreme.to_le_bytes()[..end - at]);
            }
            _ => {
                let from = rng.usize(0..=at);
                let piece = data[from..at.min(from + 64)].to_vec();
                data.splice(at..at, piece);
            }
        }
    }
}

/// What seeds are made of changes with the formats; `DBS_FUZZ_SEEDS=1` writes them into the corpus.
#[test]
fn the_seeds_run() {
    let write = std::env::var_os("DBS_FUZZ_SEEDS").is_some();
    for (name, file, data) in seeds() {
        println!("{name}/{file}");
        let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).unwrap();
        target(&data);
        if write {
            let directory = directory("corpus", name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join(file), data).unwrap();
        }
    }
}

/// A target that cannot fail is a defect: with checksums that nobody compares, rot is taken for right.
#[test]
fn a_planted_bug_is_found() {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut input = || {
        // A closed sample, checksums left alone, one bit of the first volume's slot.
        let mut data = vec![0, 1, 0];
        data.extend(((64 << 10) + 64 + rng.u32(0..504)).to_le_bytes());
        data.push(1 << rng.u8(0..8));
        data
    };
    let inputs: Vec<_> = (0..100).map(|_| input()).collect();
    for (name, target) in [("image", dbs_fuzz_targets::image as fn(&[u8])), ("repair", repair)] {
        inputs.iter().for_each(|data| target(data));
        sabotage::set(Some(Bug::IgnoreBlockChecksum));
        let fails = |data: &&Vec<u8>| std::panic::catch_unwind(|| target(data)).is_err();
        let found = inputs.iter().filter(fails).count();
        sabotage::set(None);
        println!("{name}: {found} of {} inputs find it", inputs.len());
        assert!(found > 0, "{name}");
    }
}
