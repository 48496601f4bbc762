//! What complete replicas must hold once nothing is in flight.

use super::client::Content;
use super::replica::SECTORS;
use super::world::World;

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
