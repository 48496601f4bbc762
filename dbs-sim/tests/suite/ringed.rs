//! Flushes that reactors do by themselves.

use dbs_core::sabotage::{Bug, set};

/// Histories.
const SEEDS: u64 = 400;

#[test]
fn what_a_reactor_has_flushed_survives_power_loss() {
    let [mut images, mut answered, mut ringed] = [0; 3];
    for seed in 0..SEEDS {
        let counts = dbs_sim::ringed::run(seed).unwrap();
        images += counts[0];
        answered += counts[1];
        ringed += counts[2];
    }
    println!("{images} crash images, {answered} flushes answered, {ringed} by reactors");
    assert!(images > SEEDS && answered > 4 * SEEDS && ringed > SEEDS);
}

/// The test of the test.
#[test]
fn mistakes_about_such_flushes_are_found() {
    let bugs = [
        Bug::AnswerAmidFlush,
        Bug::IgnoreFlushFailure,
        Bug::FlushUncommitted,
        Bug::ShareRunningFlush,
        Bug::FlushBesideFailure,
    ];
    for bug in bugs {
        set(Some(bug));
        let found = (0..SEEDS).find_map(|seed| dbs_sim::ringed::run(seed).err());
        set(None);
        println!("{bug:?}: {found:?}");
        assert!(found.is_some(), "{bug:?} shows nowhere");
    }
}
