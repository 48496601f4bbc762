//! Which streams carry a volume with all its snapshots, and the clones below it.

use super::{SendOptions, StoreAccess, is_of_export, spec_of};
use dbs_control::api::MARKER;
use dbs_core::info::{SnapshotInfo, VolumeInfo};
use dbs_core::{Error, Result};
use std::collections::HashSet;

/// What stands for a snapshot that was deleted while something builds on it.
const DELETED: &str = "(hidden)";

/// The streams, in an order in which each base comes before what builds on it. Only snapshots can be
/// sent: what was written to a head after its last one is not among them.
///
/// # Errors
/// `NotFound`; `Invalid` if the volume or a clone has no snapshot, or a clone builds on one that was
/// deleted; `Busy` if one is incomplete; those of
/// the store.
pub fn plan(store: &dyn StoreAccess, volume: &str) -> Result<Vec<SendOptions>> {
    let volumes = store.volumes()?;
    let root = volumes.iter().find(|info| info.name == volume);
    let root = root.ok_or_else(|| Error::not_found(format!("no volume `{volume}`")))?;
    let mut plan = Plan { steps: Vec::new(), sent: HashSet::new() };
    let mut waiting = vec![root];
    while let Some(volume) = waiting.pop() {
        plan.add(store, volume)?;
        check_origins(store, volume, &volumes)?;
        let origin = format!("{}@", volume.name);
        let is_clone = |info: &&VolumeInfo| {
            info.origin.as_ref().is_some_and(|snapshot| snapshot.starts_with(&origin))
        };
        // The last one is taken first.
        waiting.extend(volumes.iter().rev().filter(is_clone));
    }
    if let Some((_, others)) = plan.steps.split_last_mut() {
        others.iter_mut().for_each(|step| step.more = true);
    }
    Ok(plan.steps)
}

/// A clone whose origin was deleted would be missing from the sequence.
fn check_origins(store: &dyn StoreAccess, of: &VolumeInfo, all: &[VolumeInfo]) -> Result<()> {
    let of = &of.name;
    let lost = lost_clones(store, of, all)?;
    let names: Vec<_> = lost.iter().map(|name| format!("`{name}`")).collect();
    match &names[..] {
        [] => Ok(()),
        [name] => Err(Error::invalid(format!(
            "clone {name} builds on a deleted snapshot of `{of}`, which cannot be sent: make the clone \
             independent with `dbs volume flatten {}`, and send it by itself",
            lost[0]
        ))),
        names => Err(Error::invalid(format!(
            "a clone builds on a deleted snapshot of `{of}`, which cannot be sent; the clone is perhaps \
             {}: make these independent with `dbs volume flatten`, and send them by themselves",
            names.join(" or ")
        ))),
    }
}

/// Clones of which one or more build on a deleted snapshot of a volume; of several, not all need do so.
fn lost_clones<'a>(
    store: &dyn StoreAccess,
    of: &str,
    all: &'a [VolumeInfo],
) -> Result<Vec<&'a str>> {
    let is_lost = |info: &&VolumeInfo| info.name != of && info.origin.as_deref() == Some(DELETED);
    let mut lost: Vec<_> = all.iter().filter(is_lost).map(|info| info.name.as_str()).collect();
    if lost.is_empty() {
        return Ok(lost);
    }
    let children = store.children(of, None)?;
    if let Some(name) = lost.iter().find(|name| is_among(name, &children)) {
        return Ok(vec![name]);
    }
    // A deleted layer of a clone has no name. What builds on snapshots that are there is sent.
    let unnamed = |children: &[String]| children.iter().filter(|child| *child == DELETED).count();
    let mut left = unnamed(&children);
    for snapshot in store.snapshots(of)? {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(unnamed(&store.children(of, Some(&snapshot.name))?));
    }
    if left == 0 {
        return Ok(Vec::new());
    }
    for other in all {
        let children = store.children(&other.name, None)?;
        lost.retain(|name| !is_among(name, &children));
    }
    Ok(lost)
}

fn is_among(volume: &str, children: &[String]) -> bool {
    children.iter().any(|child| child.split('@').next() == Some(volume))
}

struct Plan {
    steps: Vec<SendOptions>,
    /// Snapshots in it, as `volume@snapshot`.
    sent: HashSet<String>,
}

impl Plan {
    fn add(&mut self, store: &dyn StoreAccess, info: &VolumeInfo) -> Result<()> {
        let volume = &info.name;
        if info.rebuilding {
            return Err(Error::busy(format!(
                "volume `{volume}` is incomplete: finish the import or receive that fills it, or \
                 delete it"
            )));
        }
        let mut left = store.snapshots(volume)?;
        // A retired one need not hold what it held; one of an export goes at any time.
        left.retain(|snapshot| {
            !snapshot.retired && snapshot.name != MARKER && !is_of_export(snapshot)
        });
        if left.is_empty() {
            return Err(Error::invalid(format!(
                "volume `{volume}` has no snapshot, and only snapshots can be sent: take one with \
                 `dbs snapshot create {volume}@NAME`"
            )));
        }
        let mut last = None;
        let mut own: HashSet<_> = left.iter().map(spec_of).collect();
        while !left.is_empty() {
            let before = left.len();
            left.retain(|snapshot| {
                let waits = snapshot.parent.as_ref().is_some_and(|parent| own.contains(parent));
                if !waits {
                    own.remove(&spec_of(snapshot));
                    self.step(snapshot, &mut last);
                }
                waits
            });
            if left.len() == before {
                return Err(Error::corrupt(format!(
                    "the snapshots of `{volume}` have no first one"
                )));
            }
        }
        Ok(())
    }

    /// Adds a snapshot: as the difference to its parent, or, if that is not sent, to the one before it.
    fn step(&mut self, snapshot: &SnapshotInfo, last: &mut Option<String>) {
        let parent = snapshot.parent.as_ref().filter(|parent| self.sent.contains(*parent));
        let own = format!("{}@", snapshot.volume);
        let base = parent.or(last.as_ref());
        let base = base.map(|base| base.strip_prefix(&own).unwrap_or(base).to_owned());
        self.steps.push(SendOptions {
            volume: snapshot.volume.clone(),
            snapshot: snapshot.name.clone(),
            base,
            ..SendOptions::default()
        });
        let spec = spec_of(snapshot);
        self.sent.insert(spec.clone());
        *last = Some(spec);
    }
}
