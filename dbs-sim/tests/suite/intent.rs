//! Groups of checksums under crashes, with memory that is always too small.

/// Histories run each time.
const HISTORIES: u64 = 40;

/// Nothing that a crash leaves is taken for damaged, whatever was open, written out, or forgotten.
#[test]
fn no_crash_makes_a_checksum_wrong() {
    let mut images = 0;
    for seed in 0..HISTORIES {
        images += dbs_sim::intent::run(seed).unwrap();
    }
    println!("{images} crash images");
    assert!(images > 10 * HISTORIES);
}
