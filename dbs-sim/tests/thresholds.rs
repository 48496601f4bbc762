//! Every command, disturbed at each of its device operations in turn.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_sim::threshold::{Kind, cases, run};
use dbs_sim::{Config, Stats};

fn all(kind: Kind) {
    let mut stats = Stats::default();
    let mut failures = Vec::new();
    for case in cases() {
        for (garbage, tail) in [(true, true), (false, false)] {
            let config = Config { garbage, tail, ..Config::small(7) };
            match run(&case, kind, &config) {
                Ok(done) => stats += done,
                Err(message) => failures.push(format!("tail {tail}: {message}")),
            }
        }
    }
    println!("{kind:?}: {stats:?}");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(stats.steps as usize > cases().len() * 20, "nothing was disturbed");
}

#[test]
fn killed_at_each_operation() {
    all(Kind::Kill);
}

#[test]
fn power_lost_at_each_operation() {
    all(Kind::PowerLoss);
}

#[test]
fn io_error_at_each_operation() {
    all(Kind::Eio);
}

#[test]
fn read_error_at_each_read() {
    all(Kind::ReadEio);
}

#[test]
fn no_space_at_each_request() {
    all(Kind::Enospc);
}
