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

/// Nor does a disk that fails: what could not be written is not known, and nothing else is.
#[test]
fn no_error_of_the_disk_makes_a_checksum_wrong() {
    let (mut images, mut done) = (0, 0.0);
    for seed in 0..HISTORIES {
        let (judged, succeeded) = dbs_sim::intent::run_with_errors(seed).unwrap();
        images += judged;
        done += succeeded;
    }
    println!("{images} crash images");
    assert!(images > 10 * HISTORIES);
    // After some errors a store writes no more: not in most histories.
    let done = done / HISTORIES as f64;
    assert!((0.5..1.0).contains(&done), "{done} of the steps succeeded");
}

/// A leader could not be written to close its group, was forgotten, and read as it had been before the group was
/// opened: a right block was taken for damaged.
#[test]
fn a_leader_that_was_not_closed_is_not_believed() {
    dbs_sim::intent::run_with_errors(1056).unwrap();
}
