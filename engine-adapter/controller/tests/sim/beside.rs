//! Things that seldom happen beside one another, of a volume that is used all the time.

use crate::client::Kind;
use crate::directed::{SIZE, modes, nothing_violated, snapshot, volume_by};
use crate::parts::{Sim, controller};
use crate::referee::{check_counters, check_replica};
use crate::replica::{SECTORS, Staged};
use crate::world::{MS, OTHERS, World, address};
use longhorn_controller::rules::Mode;
use longhorn_controller::volume::Controller;
use std::sync::Arc;

/// Seeds of each scenario.
const SEEDS: u64 = 40;

/// A volume of the first so many replicas, which count, with requests under way.
fn busy(seed: u64, replicas: usize, used: usize) -> (Arc<Sim>, Arc<Controller>) {
    let (sim, _) = volume_by(seed, replicas, 0);
    sim.world().replicas.iter_mut().for_each(|replica| replica.counter_disabled = false);
    let controller = controller(&sim, true, false);
    let addresses: Vec<_> = (0..used).map(address).collect();
    controller.start(&addresses, SIZE, SIZE).unwrap();
    {
        let mut world = sim.world();
        world.weather.wishes_ms = 3;
        world.weather.depth = 8;
        world.busy = true;
    }
    some_time(&sim, 100);
    (sim, controller)
}

fn some_time(sim: &Sim, most_ms: u64) {
    let time = sim.world().random.u64(0..most_ms * MS);
    sim.run_for(time);
}

/// The connections to a replica break, all or one.
fn cut(sim: &Sim, replica: usize) {
    let mut world = sim.world();
    let mut links = world.links_to(replica);
    if world.random.bool() {
        links.truncate(1);
    }
    links.into_iter().for_each(|link| world.break_link(link, 0));
}

/// All requests are answered, and these replicas, which are complete, are the same.
fn well(sim: &Sim, controller: &Controller, complete: &[usize]) {
    sim.world().busy = false;
    assert!(sim.run_until(OTHERS, |world| world.client.wishes.is_empty()));
    let world = sim.world();
    check_counters(&world, complete).unwrap();
    for replica in complete {
        assert_eq!(world.replicas[*replica].sectors() as i64 * 512, controller.volume().size);
        check_replica(&world, complete[0], *replica).unwrap();
    }
    drop(world);
    nothing_violated(sim);
}

/// A file of a replica comes to another one.
fn transfer(world: &mut World, from: usize, to: usize, file: &str) {
    let disk = file.strip_suffix(".meta").unwrap_or(file);
    let layer = &world.replicas[from].layers[disk];
    let staged = match disk == file {
        true => Staged::Blocks(layer.blocks.clone()),
        false => Staged::Parent(layer.parent.clone()),
    };
    world.replicas[to].staged.push((disk.to_owned(), staged));
}

/// Fills a replica from another one; `meanwhile` goes between two files.
fn fill(
    (sim, controller): (&Sim, &Controller),
    from: usize,
    to: usize,
    mut meanwhile: impl FnMut(usize),
) {
    controller.create_replica(&address(to), "", true, Mode::Wo).unwrap();
    let files = controller.prepare_rebuild(&address(to), "").unwrap();
    for (index, file) in files.iter().enumerate() {
        some_time(sim, 60);
        transfer(&mut sim.world(), from, to, &file.name);
        meanwhile(index);
    }
    {
        let mut world = sim.world();
        world.replicas[to].reload();
        world.replicas[to].filled = true;
    }
    controller.verify_rebuild(&address(to), "").unwrap();
}

#[test]
fn snapshots_and_expansions_amid_a_break_cost_nothing() {
    for seed in 0..SEEDS {
        let (sim, controller) = busy(seed, 2, 2);
        cut(&sim, seed as usize % 2);
        some_time(&sim, 40);
        snapshot(&controller, "one").unwrap();
        cut(&sim, 0);
        controller.begin_expansion(2 * SIZE).unwrap();
        cut(&sim, 1);
        controller.run_expansion(2 * SIZE);
        assert_eq!(controller.volume().size as u64, 2 * SIZE);
        some_time(&sim, 40);
        assert_eq!(modes(&controller), [Mode::Rw; 2], "{seed}");
        assert!(sim.world().reconnects > 0, "{seed}");
        well(&sim, &controller, &[0, 1]);
    }
}

#[test]
fn a_revert_amid_a_break_and_healing_goes_back_on_all() {
    for seed in 0..SEEDS {
        let (sim, controller) = busy(seed, 2, 2);
        snapshot(&controller, "one").unwrap();
        some_time(&sim, 100);
        well(&sim, &controller, &[0, 1]);
        {
            let mut world = sim.world();
            world.weather.rot = 1_000_000;
            (0..4).for_each(|block| world.replicas[1].rot(block));
            (0..8).for_each(|of| world.ask(0, Kind::Read, of / 2 * SECTORS, SECTORS));
        }
        // What they have met is being healed when it is reverted.
        assert!(sim.run_until(OTHERS, |world| world.client.wishes.is_empty()));
        cut(&sim, seed as usize % 2);
        controller.revert("one").unwrap();
        {
            let mut world = sim.world();
            let (_, content) = world.snapshots["volume-snap-one.img"].clone();
            world.client.content = content;
        }
        assert_eq!(modes(&controller), [Mode::Rw; 2], "{seed}");
        well(&sim, &controller, &[0, 1]);
    }
}

#[test]
fn a_rebuild_goes_on_beside_breaks_and_snapshots() {
    for seed in 0..SEEDS {
        let (sim, controller) = busy(seed, 3, 2);
        snapshot(&controller, "one").unwrap();
        fill((&sim, &controller), seed as usize % 2, 2, |index| {
            cut(&sim, (seed as usize + index) % 3);
            if index == 1 {
                snapshot(&controller, "two").unwrap();
            }
        });
        cut(&sim, 2);
        some_time(&sim, 100);
        assert_eq!(modes(&controller), [Mode::Rw; 3], "{seed}");
        well(&sim, &controller, &[0, 1, 2]);
    }
}

/// Its disk is full: that costs nobody else anything, and it comes back when there is room.
#[test]
fn a_replica_that_gets_full_while_it_is_rebuilt_is_lost_alone() {
    for seed in 0..SEEDS {
        let (sim, controller) = busy(seed, 2, 1);
        controller.create_replica(&address(1), "", true, Mode::Wo).unwrap();
        {
            let mut world = sim.world();
            world.weather.full = true;
            world.replicas[1].capacity = world.replicas[1].used() + seed as usize % 3;
        }
        cut(&sim, seed as usize % 2);
        assert!(sim.run_until(OTHERS, |world| world.replicas[1].blemished), "{seed}");
        some_time(&sim, 5000);
        sim.run_for(4000 * MS);
        assert_eq!(modes(&controller), [Mode::Rw, Mode::Err], "{seed}");
        controller.delete_replica(&address(1)).unwrap();
        sim.world().replicas[1].capacity = usize::MAX;
        fill((&sim, &controller), 0, 1, |_| ());
        assert_eq!(modes(&controller), [Mode::Rw; 2], "{seed}");
        well(&sim, &controller, &[0, 1]);
    }
}

/// Who asks for connections to it gets none for the new member, nor does that wait for the old ones.
#[test]
fn a_replica_that_is_removed_while_it_is_away_can_be_added_again() {
    for seed in 0..SEEDS {
        let (sim, controller) = busy(seed, 2, 2);
        cut(&sim, 1);
        some_time(&sim, 3);
        controller.delete_replica(&address(1)).unwrap();
        fill((&sim, &controller), 0, 1, |index| cut(&sim, index % 2));
        assert_eq!(modes(&controller), [Mode::Rw; 2], "{seed}");
        well(&sim, &controller, &[0, 1]);
    }
}

/// Neither waits for what never comes.
#[test]
fn a_volume_can_be_shut_down_while_a_replica_is_away() {
    for seed in 0..SEEDS {
        let (sim, controller) = busy(seed, 2, 2);
        {
            let mut world = sim.world();
            (world.dark, world.busy) = (true, false);
            world.replicas[1].blemished = true;
        }
        cut(&sim, 1);
        some_time(&sim, 10);
        let begun = sim.world().now;
        controller.shutdown().unwrap();
        let world = sim.world();
        assert!(world.now - begun < 1000 * MS, "{seed}: {}", world.now - begun);
        assert!(world.replicas.iter().all(|replica| !replica.open), "{seed}");
    }
}
