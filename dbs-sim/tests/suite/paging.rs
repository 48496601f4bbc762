//! Bitmaps of extents that leave memory, by seed.

use dbs_sim::paging::run;

#[test]
fn bitmaps_that_come_back_are_those_that_went() {
    for seed in 0..100 {
        run(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}
