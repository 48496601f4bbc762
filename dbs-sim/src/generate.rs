//! Random histories: each seed has its own taste.

use crate::machine::Config;
use crate::model::{Model, Volume};
use crate::op::{Long, Op, Reads, SECTORS_MAX, SNAPSHOTS, VOLUMES, snapshot_name, volume_name};
use crate::step::{Fate, Step};
use std::collections::VecDeque;

/// Kinds of operation that a taste weighs.
const KINDS: usize = 27;

/// Ordinary weights, in the order of [`Generator::op`].
const WEIGHTS: [u32; KINDS] =
    [6, 2, 3, 2, 10, 2, 7, 3, 1, 2, 5, 2, 60, 14, 10, 1, 6, 3, 12, 1, 1, 6, 2, 5, 5, 24, 9];

/// Of histories about what is held and read while trees change: handles and slow reads, clones, flatten,
/// rollback and deletion, background work, and writes that reuse what was freed at once.
const TREES: [u32; KINDS] =
    [6, 0, 1, 8, 10, 0, 14, 10, 0, 0, 16, 24, 40, 2, 1, 1, 1, 1, 30, 1, 2, 40, 0, 2, 2, 0, 0];

/// Whether extents are compressed in the history of a seed; those that planted.md names are others.
fn compresses(seed: u64) -> bool {
    seed % 8 == 6
}

/// Makes the steps of one seed's history.
pub struct Generator {
    rng: fastrand::Rng,
    weights: [u32; KINDS],
    /// Out of 256 steps, how many are disturbed.
    disturbed: u8,
    /// Whether it is about trees: most writes go to a few blocks, so that layers cover each other, and
    /// some operations come in an order that takes what is read out of sight and gives it to others.
    trees: bool,
    /// Nothing but heads is read for long.
    heads: bool,
    /// Extents are compressed now and then.
    compresses: bool,
    /// Operations of such an order that are still to come.
    plan: VecDeque<Op>,
}

impl Generator {
    /// The generator of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x5eed);
        let mut weights = WEIGHTS;
        for weight in &mut weights {
            *weight *= [0, 1, 2, 2, 2, 6][rng.usize(0..6)];
        }
        if rng.u8(0..4) == 0 {
            // Many layers, one above the other.
            (weights[4], weights[6], weights[7]) = (40, 1, 1);
        }
        // A history without volumes or writes is none.
        weights[0] = weights[0].max(8);
        weights[12] = weights[12].max(60);
        let disturbed = rng.u8(40..=160);
        let compresses = compresses(seed);
        let plan = VecDeque::new();
        Self { rng, weights, disturbed, trees: false, heads: false, compresses, plan }
    }

    /// A generator of histories without crashes, about trees that change under handles and slow reads; in a
    /// quarter of them the disk fails at times, and in another nothing but heads is read for long.
    #[must_use]
    pub fn trees(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x7ee5);
        let weights = TREES.map(|weight| weight * [1, 1, 2, 4][rng.usize(0..4)]);
        let disturbed = if seed % 4 == 3 { 12 } else { 0 };
        let (heads, compresses, plan) = (seed % 4 == 1, compresses(seed), VecDeque::new());
        Self { rng, weights, disturbed, trees: true, heads, compresses, plan }
    }

    /// The machine of this seed.
    #[must_use]
    pub fn config(seed: u64) -> Config {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0xc0f1);
        let mut config = Config::small(seed);
        config.garbage = rng.bool();
        config.tail = rng.u8(0..4) != 0;
        config.init.size = Some(u64::from(rng.u32(24..=48)) * (64 << 10) + (1 << 20));
        // The size that stores have unless they are told another, and the largest, now and then.
        config.init.extent_size = [64 << 10, 128 << 10, 1 << 20, 4 << 20][match rng.u8(0..16) {
            0..9 => 0,
            9..13 => 1,
            13..15 => 2,
            _ => 3,
        }];
        if config.init.extent_size > 128 << 10 {
            config.init.size =
                Some(u64::from(rng.u32(24..=48)) * config.init.extent_size + (4 << 20));
        }
        config.init.max_volumes = Some(rng.u32(4..=8));
        config.init.max_snapshots = Some(rng.u32(8..=40));
        config.init.checksums = rng.bool();
        config.encrypts = (2..5).contains(&(seed % 11));
        // Those that planted.md names are others.
        config.at_once = match seed % 13 {
            3 | 5 | 8 => Some(1),
            6 => Some(2),
            12 => Some(3),
            _ => None,
        };
        config
    }

    /// The next step of a history that has come to `model`.
    pub fn step(&mut self, model: &Model) -> Step {
        let op = if model.job && self.rng.u8(0..6) == 0 {
            self.go_on()
        } else if model.volumes.values().any(|v| v.secret.is_some()) && self.rng.u8(0..32) == 0 {
            Op::Rekey { vol: self.place(model, false).0 }
        } else if self.compresses && self.rng.u8(0..12) == 0 {
            self.compress(model)
        } else {
            self.planned(model).unwrap_or_else(|| self.op(model))
        };
        let fate = match &op {
            // What cannot be merged is put off, and the history goes on.
            Op::Work { .. } if !self.trees && self.rng.u8(0..4) == 0 => Fate::Unreadable,
            _ if self.rng.u8(..) < self.disturbed => self.fate(),
            _ => Fate::Calm,
        };
        Step { op, fate, seed: self.rng.u64(..) }
    }

    /// The next operation of an order that is followed, among others.
    fn planned(&mut self, model: &Model) -> Option<Op> {
        if !self.trees || self.rng.u8(0..3) == 0 {
            return None;
        }
        if self.plan.is_empty() {
            self.plan = self.order(model)?;
        }
        self.plan.pop_front()
    }

    /// A clone is read while it loses sight of its origin, whose extents others get.
    fn order(&mut self, model: &Model) -> Option<VecDeque<Op>> {
        let (origin, snap) = self.place(model, true);
        let (fua, limit, labels) = (false, u8::MAX, 0);
        let clone = self.vacant(VOLUMES, |n| model.volumes.contains_key(&volume_name(n)));
        let new = self.vacant(SNAPSHOTS, |n| n == snap);
        let at = 8 * self.rng.u16(0..3);
        let write = |vol, at, len| Op::Write { vol, at, len, fua };
        let of = match self.heads || self.rng.u8(0..4) != 0 {
            true => Reads::Head,
            false => self.reads(Some(new)),
        };
        let read = [Op::ReadBegin { vol: clone, of }, Op::ReadEnd];
        let mut order = vec![Op::Clone { vol: origin, snap, new: clone }, Op::Hold { vol: clone }];
        match self.rng.u8(0..3) {
            0 => order.push(write(clone, at, 8)),
            // All that the origin has there, mostly: nothing is left to be copied.
            1 => order.push(write(clone, 0, 40)),
            _ => {}
        }
        if self.rng.bool() {
            order.push(Op::CreateSnapshot { vol: clone, snap: new, labels });
        }
        order.extend_from_slice(&read[..self.rng.usize(1..3)]);
        order.push(match self.rng.u8(0..8) {
            0..2 => Op::Rollback { vol: clone, snap: new, keep_size: false },
            2 => Op::Begin { long: Long::Flatten { vol: clone } },
            _ => Op::Flatten { vol: clone, limit },
        });
        order.push(match self.rng.u8(0..3) {
            0 => Op::DeleteVolume { vol: origin },
            1 => Op::Rollback { vol: origin, snap: new, keep_size: false },
            _ => write(origin, at, 8),
        });
        order.push(Op::DeleteSnapshot { vol: origin, snap });
        order.extend([Op::Work { steps: 64 }, Op::Work { steps: 64 }]);
        let other = self.vacant(VOLUMES, |n| n == clone);
        order.extend((0..5).map(|extent| write(other, 128 * extent + 8 * self.rng.u16(0..12), 8)));
        order.extend(read);
        Some(order.into())
    }

    fn fate(&mut self) -> Fate {
        // Most operations make few changes; some make dozens.
        let n = match self.rng.u8(0..4) {
            0..2 => self.rng.u64(1..5),
            2 => self.rng.u64(1..12),
            _ => self.rng.u64(1..40),
        };
        let errors = if self.trees { 28 } else { 0 };
        match self.rng.u8(errors..32) {
            0..20 => Fate::Images([n, self.rng.u64(1..8)]),
            20..24 => Fate::KillAt(n),
            24..28 => Fate::PowerLossAt(n),
            28 => Fate::EioAt(n),
            29 => Fate::ReadEioAt(n),
            30 => Fate::EnospcFrom(1 + n / 4),
            _ => Fate::RefusedAt(n),
        }
    }

    fn op(&mut self, model: &Model) -> Op {
        let kind = self.kind();
        let (vol, snap) = self.place(model, matches!(kind, 5..=10 | 22 | 23));
        let new = self.vacant(VOLUMES, |n| model.volumes.contains_key(&volume_name(n)));
        let snapshots = model.volumes.get(&volume_name(vol)).map(|v| &v.snapshots);
        let new_snap = self.vacant(SNAPSHOTS, |n| {
            snapshots.is_some_and(|snapshots| snapshots.contains_key(&snapshot_name(n)))
        });
        if model.volumes.is_empty() && self.rng.u8(0..16) != 0 {
            return Op::CreateVolume { vol: new, sectors: self.size() };
        }
        match kind {
            0 => Op::CreateVolume { vol: new, sectors: self.size() },
            1 => Op::RenameVolume { vol, new },
            2 => Op::ResizeVolume { vol, sectors: self.size() },
            3 => Op::DeleteVolume { vol },
            4 => Op::CreateSnapshot {
                vol,
                snap: new_snap,
                labels: if self.rng.bool() { 0 } else { self.rng.u8(..) },
            },
            5 => Op::RenameSnapshot { vol, snap, new: new_snap },
            6 => Op::DeleteSnapshot { vol, snap },
            7 => Op::Rollback { vol, snap, keep_size: self.rng.bool() },
            8..=9 => self.mark(vol, snap, kind == 8),
            10 => Op::Clone { vol, snap, new },
            11 => self.flatten(vol),
            12 => {
                let (at, len) = self.range(model, vol);
                Op::Write { vol, at, len, fua: self.rng.u8(0..12) == 0 }
            }
            13 => {
                let (at, len) = self.range(model, vol);
                Op::Discard { vol, at, len }
            }
            14 => {
                let (at, len) = self.range(model, vol);
                match self.rng.u8(0..12) {
                    8.. if !self.trees => Op::Blank { vol, at, len },
                    kind => Op::WriteZeroes { vol, at, len, fua: kind == 0 },
                }
            }
            15 => Op::Fill { vol },
            16 => Op::FlushVolume { vol },
            17 => match self.rng.u8(0..4) {
                0 => Op::LoseTail,
                _ => Op::Flush,
            },
            18 => match self.rng.u8(1..24) {
                limit @ 20.. if !self.trees => Op::Trim { vol, limit },
                14..17 if !self.trees => Op::Begin { long: Long::Scrub },
                17..19 if !self.trees => Op::Begin { long: Long::Relearn },
                19 if !self.heads => Op::Begin { long: Long::Scrub },
                steps => Op::Work { steps },
            },
            19 => match self.rng.u8(0..3) {
                0 => Op::NewUuid { byte: 1 + vol },
                extents => Op::Grow { extents },
            },
            20 => self.vacuum(),
            21 => self.hold(model, vol),
            22 => Op::SetLabels { vol, snap, labels: self.rng.u8(..) },
            23 => Op::Retire { vol, snap, on: self.rng.u8(0..6) != 0 },
            24 => {
                let (at, len) = match self.rng.bool() {
                    true => (0, Self::sectors(model, vol)),
                    false => self.range(model, vol),
                };
                Op::Prune { vol, at, len }
            }
            25 => self.rebuild(model),
            _ => match self.rng.u8(0..16) {
                0..4 => Op::Verify,
                4..6 => Op::Reopen,
                6..11 => Op::Kill,
                11 => Op::KillWithoutTail,
                _ => Op::PowerLoss,
            },
        }
    }

    fn flatten(&mut self, vol: u8) -> Op {
        let stands = if self.trees { self.rng.u8(0..6) == 0 } else { self.rng.u8(0..3) != 0 };
        match stands {
            true => Op::Begin { long: Long::Flatten { vol } },
            false => Op::Flatten { vol, limit: self.rng.u8(0..6) },
        }
    }

    fn compress(&mut self, model: &Model) -> Op {
        let (vol, snap) = self.place(model, true);
        match self.rng.u8(0..8) {
            0..2 => Op::Begin { long: Long::Compress { vol } },
            2..5 => Op::Compress { vol, snap: Some(snap), limit: u8::MAX },
            limit => Op::Compress { vol, snap: None, limit: if limit < 7 { u8::MAX } else { 2 } },
        }
    }

    fn vacuum(&mut self) -> Op {
        match self.rng.u8(0..20) {
            limit @ 0..10 => Op::Vacuum { limit },
            _ => Op::Begin { long: Long::Vacuum },
        }
    }

    /// Something with the call that stands still.
    fn go_on(&mut self) -> Op {
        match self.rng.u8(0..8) {
            0 => Op::Stop,
            1 => Op::GoOn { steps: u8::MAX },
            steps => Op::GoOn { steps: steps - u8::from(!self.heads) },
        }
    }

    /// Something that happens to a volume that is being rebuilt, or leads there.
    fn rebuild(&mut self, model: &Model) -> Op {
        let new = self.vacant(VOLUMES, |n| model.volumes.contains_key(&volume_name(n)));
        let known: Vec<_> = model.volumes.iter().filter(|(_, v)| v.tree.is_some()).collect();
        let Some((name, volume)) = self.rng.choice(&known).copied() else {
            let aligned = |v: &Volume| v.fresh && v.head.sectors.is_multiple_of(8);
            return match model.volumes.iter().find(|(_, v)| aligned(v)) {
                Some((name, _)) => Op::Rebuilding { vol: number(name), on: true },
                None => {
                    Op::CreateVolume { vol: new, sectors: 8 * self.rng.u16(1..SECTORS_MAX / 8) }
                }
            };
        };
        let vol = number(name);
        let snaps: Vec<u8> = volume.snapshots.keys().map(|name| number(name)).collect();
        let few = snaps.len() < 2 || (snaps.len() < 5 && self.rng.u8(0..8) == 0);
        let Some(snap) = self.rng.choice(&snaps).copied().filter(|_| !few) else {
            let snap = self.vacant(SNAPSHOTS, |n| volume.snapshots.contains_key(&snapshot_name(n)));
            let most = volume.head.sectors as u16;
            let sectors = match self.rng.u8(0..4) {
                0 => (8 * self.rng.u16(1..SECTORS_MAX / 8)).min(most),
                _ => most,
            };
            return Op::InsertSnapshot { vol, snap, sectors };
        };
        let blocks = volume.snapshots[&snapshot_name(snap)].content.blocks().len() as u8;
        let extent = self.rng.bool();
        let start = match extent {
            true => self.rng.u8(0..blocks) / 16 * 16,
            false => self.rng.u8(0..blocks),
        };
        let count = match extent {
            true => 16 * self.rng.u8(1..4),
            false => self.rng.u8(1..24),
        };
        let count = count.min(blocks - start);
        match self.rng.u8(0..16) {
            0..6 => Op::WriteLayer { vol, snap, start, count },
            6..9 => Op::ZeroLayer { vol, snap, start, count },
            9..12 => Op::ClearLayer { vol, snap, start, count },
            12..15 => self.relink(vol, volume, &snaps),
            _ => Op::Rebuilding { vol, on: false },
        }
    }

    /// Another tree of most of these snapshots.
    fn relink(&mut self, vol: u8, volume: &Volume, snaps: &[u8]) -> Op {
        let sectors = |snap: &u8| volume.snapshots[&snapshot_name(*snap)].content.sectors;
        let mut order = snaps.to_vec();
        self.rng.shuffle(&mut order);
        if self.rng.u8(0..16) != 0 {
            order.sort_by_key(sectors);
        }
        let loops = self.rng.u8(0..16) == 0;
        let mut links = Vec::new();
        for i in 0..order.len() {
            let parent = match self.rng.u8(0..8) {
                0 => None,
                1 if i > 0 => Some(order[self.rng.usize(0..i)]),
                2 if loops => self.rng.choice(&order).copied(),
                _ => i.checked_sub(1).map(|below| order[below]),
            };
            links.push((order[i], parent));
        }
        let head = match self.rng.u8(0..6) {
            0 => None,
            1 => self.rng.choice(&order).copied(),
            _ => order.iter().rfind(|snap| sectors(snap) <= volume.head.sectors).copied(),
        };
        Op::Relink { vol, links, head, marks: self.rng.u8(..) & self.rng.u8(..) }
    }

    /// Something with handles that are kept, and reads that take long.
    fn hold(&mut self, model: &Model, vol: u8) -> Op {
        let held: Vec<_> = model.volumes.iter().filter(|(_, v)| v.held).collect();
        let reading = self.rng.choice(&held).map(|(name, _)| number(name));
        if self.heads {
            return match (self.rng.u8(0..8), reading) {
                (0..4, Some(vol)) => Op::ReadBegin { vol, of: Reads::Head },
                (4..6, Some(_)) => Op::ReadEnd,
                (6, Some(held)) => Op::Hold { vol: held },
                _ => Op::Hold { vol },
            };
        }
        match (self.rng.u8(0..10), reading) {
            (0..3, Some(vol)) => Op::ReadBegin { vol, of: Reads::Head },
            (3..5, _) => {
                let (vol, snap) = self.place(model, true);
                Op::ReadBegin { vol, of: self.reads(Some(snap)) }
            }
            (5..7, _) => Op::ReadEnd,
            (7, _) => Op::ReadOn,
            (8, Some(vol)) => Op::Hold { vol },
            _ => Op::Hold { vol },
        }
    }

    /// What is read of a volume, or of this snapshot of it.
    fn reads(&mut self, snap: Option<u8>) -> Reads {
        let snap = snap.filter(|_| self.rng.bool());
        match (self.rng.u8(0..3), snap) {
            (0, None) => Reads::Head,
            (0, Some(snap)) => Reads::Snapshot(snap),
            (1, snap) => Reads::Layer(snap),
            (_, snap) => Reads::Observed(snap),
        }
    }

    fn mark(&mut self, vol: u8, snap: u8, on: bool) -> Op {
        match self.rng.u8(0..4) {
            0..2 => Op::Protect { vol, snap, on },
            2 => Op::Retire { vol, snap, on },
            _ => Op::Rebuilding { vol, on },
        }
    }

    fn kind(&mut self) -> usize {
        let total: u32 = self.weights.iter().sum();
        let mut ticket = self.rng.u32(0..total);
        self.weights
            .iter()
            .position(|weight| {
                let hit = ticket < *weight;
                ticket = ticket.wrapping_sub(*weight);
                hit
            })
            .unwrap_or(12)
    }

    /// A volume and, if wanted, a snapshot; mostly such that exist.
    fn place(&mut self, model: &Model, snapshot: bool) -> (u8, u8) {
        let chance = (self.rng.u8(0..VOLUMES), self.rng.u8(0..SNAPSHOTS));
        if self.rng.u8(0..16) == 0 {
            return chance;
        }
        let volumes: Vec<_> =
            model.volumes.iter().filter(|(_, v)| !snapshot || !v.snapshots.is_empty()).collect();
        let Some((name, volume)) = self.rng.choice(&volumes) else { return chance };
        let snap = self.rng.choice(volume.snapshots.keys().collect::<Vec<_>>());
        (number(name), snap.map_or(chance.1, |name| number(name)))
    }

    /// A number, mostly one not taken.
    fn vacant(&mut self, end: u8, taken: impl Fn(u8) -> bool) -> u8 {
        let chance = self.rng.u8(0..end);
        if self.rng.u8(0..16) == 0 {
            return chance;
        }
        (0..end).map(|i| (chance + i) % end).find(|n| !taken(*n)).unwrap_or(chance)
    }

    fn size(&mut self) -> u16 {
        match self.rng.u8(0..4) {
            0 => self.rng.u16(1..SECTORS_MAX),
            1 => 256,
            _ => 8 * self.rng.u16(1..SECTORS_MAX / 8),
        }
    }

    fn sectors(model: &Model, vol: u8) -> u16 {
        model.volumes.get(&volume_name(vol)).map_or(256, |v| v.head.sectors as u16)
    }

    fn range(&mut self, model: &Model, vol: u8) -> (u16, u16) {
        let size = Self::sectors(model, vol);
        if self.trees && self.rng.u8(0..8) != 0 {
            let at = 128 * self.rng.u16(0..2) + 8 * self.rng.u16(0..3);
            let at = at.min(size.saturating_sub(8) / 8 * 8);
            return (at, (8 * self.rng.u16(1..3)).min(size - at));
        }
        let len = match self.rng.u8(0..16) {
            0..5 => 8 * self.rng.u16(1..4),
            5..11 => self.rng.u16(1..24),
            11..14 => 8 * self.rng.u16(1..24),
            14 => size,
            _ => self.rng.u16(1..200),
        };
        let len = len.clamp(1, size.max(1));
        let mut at = self.rng.u16(0..=size - len.min(size));
        // Few places, so that writes meet; and half of them aligned.
        if self.rng.bool() {
            at =
                at / 128 * 128 + self.rng.u16(0..24).min(size.saturating_sub(at / 128 * 128 + len));
        }
        if self.rng.bool() {
            at = at / 8 * 8;
        }
        // Now and then beyond the end.
        if self.rng.u8(0..64) == 0 {
            at = size;
        }
        (at, len)
    }
}

fn number(name: &str) -> u8 {
    name[1..].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Histories of mostly refused commands would test little.
    #[test]
    fn most_operations_can_succeed_and_all_kinds_occur() {
        let (mut done, mut refused) = (BTreeMap::<String, u32>::new(), 0);
        for seed in 0..300 {
            let mut generator = Generator::new(seed);
            let mut model = Model::default();
            for number in 1..=60 {
                model.job = number % 3 == 0;
                let op = generator.step(&model).op;
                match model.apply(&op, number) {
                    Ok(()) => {
                        let text = format!("{op:?}");
                        let kind = text.split([' ', '{']).next().unwrap_or_default().to_owned();
                        *done.entry(kind).or_default() += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
        }
        println!("{done:?}, {refused} refused");
        assert_eq!(done.len(), 46);
        assert!(done.values().all(|count| *count > 20), "{done:?}");
        assert!(refused < 300 * 60 / 3, "{refused} of {} refused", 300 * 60);
    }
}
