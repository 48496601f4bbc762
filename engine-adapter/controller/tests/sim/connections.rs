//! Connections that break, step by step.

use crate::client::Kind;
use crate::directed::{
    BLOCKS, SIZE, answered, is_violated, modes, nothing_violated, rebuilding_by, volume,
};
use crate::parts::{Sim, controller};
use crate::replica::SECTORS;
use crate::world::{MS, OTHERS, address};
use longhorn_controller::rules::Mode;
use longhorn_controller::volume::Controller;
use std::sync::Arc;

/// Whether a flush succeeds that the only complete replica has not answered when its connections to a reactor break for
/// good, if another one has become complete meanwhile. It is asked for on that reactor; pauses flush on the first one.
pub fn a_flush_outlives_who_was_asked() -> bool {
    let (sim, controller) =
        (1..).map(rebuilding_by).find(|(sim, _)| sim.world().path.lanes() > 1).unwrap();
    {
        let mut world = sim.world();
        world.dark = true;
        world.replicas[0].blemished = true;
        for link in world.links_to(0) {
            if world.is_of(link, 1) {
                world.break_link(link, 0);
            }
        }
    }
    sim.run_for(MS);
    sim.world().ask(1, Kind::Flush, 0, 0);
    sim.run_for(100 * MS);
    controller.verify_rebuild(&address(1), "").unwrap();
    sim.run_for(OTHERS);
    assert_eq!(modes(&controller), [Mode::Err, Mode::Rw]);
    answered(&sim) == (1, 0) && !is_violated(&sim)
}

/// Whether a replica is lost that cannot be connected to anew, though nothing is asked of it.
pub fn who_is_away_for_too_long_is_lost() -> bool {
    let (sim, controller) = volume(2, 2);
    {
        let mut world = sim.world();
        world.dark = true;
        world.replicas[1].blemished = true;
        world.links_to(1).into_iter().for_each(|link| world.break_link(link, 0));
    }
    sim.run_for(6000 * MS);
    modes(&controller) == [Mode::Rw, Mode::Err] && !is_violated(&sim)
}

#[test]
fn a_connection_that_is_not_made_anew_costs_the_replica() {
    assert!(who_is_away_for_too_long_is_lost());
}

/// A volume of two replicas, of which the connections of some break again as soon as they are made anew.
fn frail(broken: &[usize]) -> (Arc<Sim>, Arc<Controller>) {
    let (sim, controller) = volume(2, 2);
    {
        let mut world = sim.world();
        world.frail = Some(0);
        for replica in broken {
            world.replicas[*replica].blemished = true;
            world.links_to(*replica).into_iter().for_each(|link| world.break_link(link, 0));
        }
    }
    (sim, controller)
}

/// Whether a replica is lost that can be connected to, but answers nothing then; nothing is asked of it.
pub fn who_answers_nothing_is_lost() -> bool {
    let (sim, controller) = frail(&[1]);
    sim.run_for(6000 * MS);
    modes(&controller) == [Mode::Rw, Mode::Err] && !is_violated(&sim)
}

/// Whether a read ends whose reply never gets through, though connections are well until then.
pub fn a_read_that_breaks_connections_ends() -> bool {
    let (sim, controller) = volume(2, 2);
    {
        let mut world = sim.world();
        world.poison = true;
        world.replicas.iter_mut().for_each(|replica| replica.blemished = true);
        world.ask(0, Kind::Read, 0, SECTORS);
    }
    sim.run_for(60_000 * MS);
    answered(&sim) == (1, 1)
        && modes(&controller) == [Mode::Err; 2]
        && sim.world().reconnects < 1000
        && !is_violated(&sim)
}

#[test]
fn a_read_does_not_go_to_and_fro_for_ever() {
    assert!(a_read_that_breaks_connections_ends());
}

/// Found by review: each time it was away anew, hundreds of times a second, for ever.
#[test]
fn connections_that_carry_nothing_cost_the_replica() {
    assert!(who_answers_nothing_is_lost());
    for seed in 0..20 {
        let (sim, controller) = frail(&[0, 1]);
        {
            let mut world = sim.world();
            world.random = fastrand::Rng::with_seed(seed);
            world.ask(0, Kind::Read, 0, SECTORS);
        }
        sim.run_for(6000 * MS);
        assert_eq!((answered(&sim), modes(&controller)), ((1, 1), vec![Mode::Err; 2]));
        let reconnects = sim.world().reconnects;
        assert!((10..500).contains(&reconnects), "{reconnects}");
        nothing_violated(&sim);
    }
}

/// Found by review: ten times a second, for ever.
#[test]
fn connections_that_break_when_they_have_answered_are_made_more_seldom() {
    let (sim, controller) = frail(&[1]);
    sim.world().frail = Some(20 * MS);
    let lanes = sim.world().path.lanes() as u64;
    let made_in = |time: u64| {
        let before = sim.world().reconnects;
        sim.run_for(time);
        (sim.world().reconnects - before) / lanes
    };
    made_in(20_000 * MS);
    let made = made_in(60_000 * MS);
    assert!((20..=120).contains(&made), "{made} in a minute");
    // When they have lasted for some time, the next ones are there at once.
    sim.world().frail = None;
    sim.run_for(30_000 * MS);
    {
        let mut world = sim.world();
        world.links_to(1).into_iter().for_each(|link| world.break_link(link, 0));
    }
    assert_eq!(made_in(800 * MS), 1);
    assert_eq!(modes(&controller), [Mode::Rw; 2]);
    nothing_violated(&sim);
}

/// Found by review: the replica was lost, as it let nobody back before its flush had ended.
#[test]
fn a_flush_outlives_its_connection() {
    let (sim, controller) = volume(2, 2);
    {
        let mut world = sim.world();
        world.flushing = 10_000 * MS;
        world.ask(0, Kind::Flush, 0, 0);
    }
    sim.run_for(1000 * MS);
    {
        let mut world = sim.world();
        world.links_to(1).into_iter().for_each(|link| world.break_link(link, 0));
        world.ask(0, Kind::Write, 0, SECTORS);
    }
    sim.run_for(5000 * MS);
    assert_eq!((answered(&sim), modes(&controller)), ((1, 0), vec![Mode::Rw; 2]));
    sim.run_for(10_000 * MS);
    assert_eq!((answered(&sim), modes(&controller)), ((2, 0), vec![Mode::Rw; 2]));
    nothing_violated(&sim);
}

#[test]
fn a_flush_that_the_last_one_has_not_answered_is_asked_of_the_next() {
    assert!(a_flush_outlives_who_was_asked());
}

/// A connection that breaks costs nothing but time, whoever has it.
#[test]
fn what_was_on_its_way_when_connections_broke_is_done_once() {
    let (sim, _) = volume(2, 0);
    sim.world().replicas.iter_mut().for_each(|replica| replica.counter_disabled = false);
    let controller = controller(&sim, true, false);
    controller.start(&[address(0), address(1)], SIZE, SIZE).unwrap();
    for round in 0..40 {
        let mut world = sim.world();
        for block in 0..BLOCKS {
            world.ask(
                0,
                if block == round % BLOCKS { Kind::Unmap } else { Kind::Write },
                block * SECTORS,
                SECTORS,
            );
            world.ask(0, Kind::Read, block * SECTORS, SECTORS);
        }
        drop(world);
        sim.run_for(300 + 40 * round as u64);
        let mut world = sim.world();
        world.links_to(round % 2).into_iter().for_each(|link| world.break_link(link, 200));
        drop(world);
        assert!(sim.run_until(OTHERS, |world| world.client.wishes.is_empty()));
    }
    let world = sim.world();
    assert!(world.reconnects >= 40, "{}", world.reconnects);
    assert_eq!(world.client.failures, 0);
    let [one, two] = [0, 1].map(|replica| &world.replicas[replica]);
    assert!(
        one.counter >= 40 * BLOCKS as i64
            && one.counter == two.counter
            && one.content() == two.content()
    );
    drop(world);
    assert_eq!(modes(&controller), [Mode::Rw; 2]);
    nothing_violated(&sim);
}
