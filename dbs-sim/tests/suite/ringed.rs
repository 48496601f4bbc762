//! Flushes that reactors do by themselves.

/// Histories.
const SEEDS: u64 = 400;

#[test]
fn what_a_reactor_has_flushed_survives_power_loss() {
    let [mut images, mut answered] = [0; 2];
    for seed in 0..SEEDS {
        let (more, flushes) = dbs_sim::ringed::run(seed).unwrap();
        images += more;
        answered += flushes;
    }
    println!("{images} crash images, {answered} flushes answered");
    assert!(images > SEEDS && answered > 4 * SEEDS);
}
