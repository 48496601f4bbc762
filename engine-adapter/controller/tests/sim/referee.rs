//! What complete replicas must hold once nothing is in flight.

use crate::client::Content;
use crate::replica::SECTORS;
use crate::world::World;

/// Compares a replica with the first complete one, and with what the volume may contain.
pub fn check_replica(world: &World, first: usize, replica: usize) -> Result<(), String> {
    let (a, b) = (&world.replicas[first], &world.replicas[replica]);
    let content = &world.client.content;
    let both = (a.content(), b.content());
    compare(&format!("heads of r{first} and r{replica}"), content, &both.0, &both.1)?;
    if !a.layers.keys().eq(b.layers.keys()) {
        let (a, b): (Vec<_>, Vec<_>) = (a.layers.keys().collect(), b.layers.keys().collect());
        return Err(format!("r{first} has the layers {a:?}, r{replica} has {b:?}"));
    }
    for (disk, layer) in &a.layers {
        let Some((_, content)) = world.snapshots.get(disk) else { continue };
        let both = (a.view(layer), b.view(&b.layers[disk]));
        compare(&format!("{disk} of r{first} and r{replica}"), content, &both.0, &both.1)?;
    }
    Ok(())
}

/// What is damaged in one complete replica and not in another is healed, once all has been read.
pub fn check_healed(world: &World, complete: &[usize]) -> Result<(), String> {
    if world.weather.rot == 0 {
        return Ok(());
    }
    for replica in complete {
        let its = &world.replicas[*replica];
        for block in (0..its.size).filter(|block| its.is_rotten(*block)) {
            let has = |other: &&usize| !world.replicas[**other].is_rotten(block);
            if let Some(other) = complete.iter().find(has) {
                return Err(format!("block {block} of r{replica} stays damaged, r{other} has it"));
            }
        }
    }
    Ok(())
}

/// Complete replicas have counted the same.
pub fn check_counters(world: &World, complete: &[usize]) -> Result<(), String> {
    let counters: Vec<_> = complete.iter().map(|r| world.replicas[*r].counter).collect();
    match counters.windows(2).all(|pair| pair[0] == pair[1]) {
        true => Ok(()),
        false => Err(format!("{complete:?} are complete and have counted {counters:?}")),
    }
}

fn compare(what: &str, content: &Content, a: &[u32], b: &[u32]) -> Result<(), String> {
    for (sector, (a, b)) in a.iter().zip(b).enumerate() {
        if a != b && !content.in_doubt(sector) {
            return Err(format!(
                "{what} differ in sector {sector} of block {}: {a}, {b}",
                sector / SECTORS
            ));
        }
        for value in [a, b] {
            if !content.allows(sector, *value) {
                let possible = content.possible.get(sector);
                return Err(format!("{what}: sector {sector} is {value}, not of {possible:?}"));
            }
        }
    }
    Ok(())
}
