//! Every command, disturbed at each of its device operations in turn.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_sim::adopt::Below;
use dbs_sim::threshold::{Case, Kind, cases, compressed, encrypted, run};
use dbs_sim::{Config, Machine, Stats};

const BOTH: &[bool] = &[true, false];

/// Runs every case with a tail, and garbage in what is lost, or without both; at least `disturbed`
/// steps must have met their fate.
fn all(kind: Kind, tails: &[bool], disturbed: u64) -> Stats {
    all_with(kind, tails, false, disturbed)
}

/// As [`all`]; if memory `is_short`, bitmaps of extents leave it whenever they can.
fn all_with(kind: Kind, tails: &[bool], is_short: bool, disturbed: u64) -> Stats {
    let config = Config { forgets: is_short, ..Config::small(7) };
    all_of(&cases(), kind, tails, &config, disturbed)
}

fn all_of(cases: &[Case], kind: Kind, tails: &[bool], config: &Config, disturbed: u64) -> Stats {
    let mut stats = Stats::default();
    let mut failures = Vec::new();
    for case in cases {
        for &tail in tails {
            let config = Config { garbage: tail, tail, ..config.clone() };
            match run(case, kind, &config) {
                Ok(done) => stats += done,
                Err(message) => failures.push(format!("tail {tail}: {message}")),
            }
        }
    }
    println!("{kind:?}: {stats:?}");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(stats.disturbed >= disturbed, "only {} disturbances", stats.disturbed);
    stats
}

/// Found by review: whatever was thawed had no memory, so that nothing was ever disturbed that had some.
#[test]
fn a_machine_goes_on_with_as_much_memory_as_before() {
    for forgets in [false, true] {
        let machine = Machine::new(&Config { forgets, ..Config::small(7) }).unwrap();
        assert_eq!(machine.freeze(1).unwrap().thaw().unwrap().forgets, forgets);
    }
}

#[test]
fn killed_at_each_operation() {
    all(Kind::Kill, BOTH, 400);
}

#[test]
fn power_lost_at_each_operation_with_a_tail() {
    all(Kind::PowerLoss, &[true], 800);
}

#[test]
fn power_lost_at_each_operation_without() {
    all(Kind::PowerLoss, &[false], 800);
}

#[test]
fn io_error_at_each_operation() {
    all(Kind::Eio, BOTH, 400);
}

/// Without memory for bitmaps, reads of the blocks whose bitmaps a command needs are among these.
#[test]
fn read_error_at_each_read() {
    let with_bitmaps = all(Kind::ReadEio, BOTH, 15).disturbed;
    let without = all_with(Kind::ReadEio, BOTH, true, 15).disturbed;
    assert!(
        without > with_bitmaps + 50,
        "{without} reads, and {with_bitmaps} with bitmaps in memory"
    );
}

#[test]
fn no_space_at_each_request() {
    all(Kind::Enospc, BOTH, 4);
}

/// Whoever is told of no space goes on writing, and must be able to.
#[test]
fn no_space_at_each_operation() {
    all(Kind::Refused, BOTH, 400);
}

#[test]
fn disturbed_without_memory_for_bitmaps() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::ReadEio) {
        all_with(kind, BOTH, true, 15);
    }
}

/// The secret of a volume is the old one then, or the new one; and what is on the disk is one or the other, too.
#[test]
fn encrypted_volumes_disturbed_at_each_operation() {
    let config = Config { encrypts: true, ..Config::small(7) };
    for kind in [Kind::Kill, Kind::PowerLoss] {
        all_of(&encrypted(), kind, &[true], &config, 80);
    }
}

/// Whatever a crash leaves, each extent is there in one form or the other, whole.
#[test]
fn compressed_extents_disturbed_at_each_operation() {
    for kind in [Kind::Kill, Kind::PowerLoss, Kind::Eio, Kind::ReadEio, Kind::Refused] {
        let tails = if kind == Kind::PowerLoss { BOTH } else { &[true] };
        all_of(&compressed(), kind, tails, &Config::small(7), 15);
    }
}

#[test]
fn power_lost_twice() {
    let mut stats = Stats::default();
    for seed in 0..4 {
        let config = Config { garbage: false, tail: false, ..Config::small(seed) };
        stats += dbs_sim::threshold::run_twice(&config).unwrap();
    }
    println!("twice: {stats:?}");
    assert!(stats.disturbed > 800, "only {} disturbances", stats.disturbed);
}

#[test]
fn a_flush_beside_one_that_fails_fails() {
    let images = dbs_sim::beside::run(&Config::small(3)).unwrap();
    assert!(images > 8, "only {images}");
}

#[test]
fn who_opens_a_page_beside_a_flush_flushes_again() {
    let images = dbs_sim::beside::run_shared(&Config::small(3)).unwrap();
    assert!(images > 8, "only {images}");
}

#[test]
fn a_long_relink_cut_off_at_each_operation() {
    let images = dbs_sim::relink::run(&Config { tail: false, ..Config::small(3) }).unwrap();
    println!("relink: {images} images");
    assert!(images > 40, "only {images}");
}

#[test]
fn a_volume_that_leaves_its_file_cut_off_at_each_operation() {
    for below in [Below::Zeros, Below::File] {
        let config = Config { tail: false, ..Config::small(3) };
        let images = dbs_sim::adopt::run(&config, below).unwrap();
        println!("adopt, on {below:?}: {images:?} images");
        // The second volume goes in the last group: few changes come after it.
        assert!(images.iter().all(|count| *count > 1), "only {images:?}");
    }
}
