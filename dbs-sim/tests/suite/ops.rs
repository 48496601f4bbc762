//! Short histories without crashes, made and shortened by proptest.

use dbs_sim::op::strategy;
use dbs_sim::{Config, Fate, Op, Step, runner};
use proptest::prelude::*;

fn check(ops: &[Op], tail: bool) -> Result<(), TestCaseError> {
    let steps: Vec<Step> =
        ops.iter().map(|op| Step { op: op.clone(), fate: Fate::Calm, seed: 0 }).collect();
    let config = Config { tail, ..Config::small(1) };
    match runner::replay_on(&config, &steps) {
        Ok(_) => Ok(()),
        Err(failure) => Err(TestCaseError::fail(failure.message)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        max_shrink_iters: 4000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_store_does_what_the_model_does(
        ops in prop::collection::vec(strategy(), 1..60),
        tail in any::<bool>(),
    ) {
        check(&ops, tail)?;
    }
}
