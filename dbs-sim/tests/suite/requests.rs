//! Requests beside one another and beside commands, by seed.

use dbs_sim::requests::run;

#[test]
fn requests_on_their_way_are_in_nobodys_way() {
    for seed in 0..600 {
        run(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn a_write_waits_for_one_that_changes_a_part_of_its_block() {
    dbs_sim::beside::run_held(&dbs_sim::Config::small(3)).unwrap();
}

#[test]
fn who_changes_a_part_of_a_block_waits_for_a_write_of_another_thread() {
    dbs_sim::beside::run_excluding(&dbs_sim::Config::small(3)).unwrap();
}
