//! The threshold loop: one command on a small known store, disturbed at its first change of the
//! disk, at its second, and so on until it comes through.

use crate::machine::{Config, Frozen, Machine};
use crate::op::Op;
use crate::step::{Fate, Stats, Step};

/// Changes after which a command is taken to have no end.
const CHANGES_MAX: u64 = 5000;

/// Crash images of each moment.
const IMAGES_EACH: usize = 12;

/// A command and the state it meets.
#[derive(Debug, Clone)]
pub struct Case {
    /// What is done before, after [`base`].
    pub prepare: Vec<Op>,
    /// The command.
    pub command: Op,
}

/// How the command is disturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The process is killed.
    Kill,
    /// Power is lost; several images each time.
    PowerLoss,
    /// A change fails.
    Eio,
    /// A read fails.
    ReadEio,
    /// The disk is full.
    Enospc,
    /// A change is refused for lack of space, wherever it is.
    Refused,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 6] =
        [Self::Kill, Self::PowerLoss, Self::Eio, Self::ReadEio, Self::Enospc, Self::Refused];

    fn fates(self) -> &'static [fn(u64) -> Fate] {
        match self {
            Self::Kill => &[Fate::KillAt],
            Self::PowerLoss => &[
                |n| Fate::Images([n, n + 1]),
                |n| Fate::Images([n, n]),
                Fate::PowerLossAt,
                Fate::PowerLossAt,
            ],
            Self::Eio => &[Fate::EioAt],
            Self::ReadEio => &[Fate::ReadEioAt],
            Self::Enospc => &[Fate::EnospcFrom],
            Self::Refused => &[Fate::RefusedAt],
        }
    }
}

/// The state every command meets: two trees of snapshots with a clone between them, overwritten
/// and discarded places, an unaligned size, labels, protection.
#[must_use]
pub fn base() -> Vec<Op> {
    let write = |vol, at, len| Op::Write { vol, at, len, fua: false };
    vec![
        Op::CreateVolume { vol: 0, sectors: 512 },
        write(0, 0, 200),
        Op::CreateSnapshot { vol: 0, snap: 0, labels: 3 },
        write(0, 3, 20),
        write(0, 256, 100),
        Op::CreateSnapshot { vol: 0, snap: 1, labels: 0 },
        Op::Discard { vol: 0, at: 8, len: 64 },
        write(0, 120, 30),
        Op::CreateSnapshot { vol: 0, snap: 2, labels: 0 },
        Op::Clone { vol: 0, snap: 1, new: 1 },
        write(1, 16, 40),
        Op::CreateSnapshot { vol: 1, snap: 0, labels: 0 },
        Op::Protect { vol: 1, snap: 0, on: true },
        Op::CreateVolume { vol: 2, sectors: 203 },
        write(2, 100, 103),
        write(0, 40, 17),
        Op::WriteZeroes { vol: 0, at: 130, len: 19, fua: false },
    ]
}

/// Every command, in the situations that differ.
#[must_use]
pub fn cases() -> Vec<Case> {
    let plain = |command| Case { prepare: Vec::new(), command };
    let after = |prepare: &[Op], command| Case { prepare: prepare.to_vec(), command };
    let deleted = Op::DeleteSnapshot { vol: 0, snap: 1 };
    let middle = Op::DeleteSnapshot { vol: 0, snap: 2 };
    let retired = [Op::Retire { vol: 0, snap: 2, on: true }];
    // Volume 1 is a clone of the lower one.
    let shared = [
        Op::Retire { vol: 0, snap: 1, on: true },
        Op::Retire { vol: 0, snap: 2, on: true },
        Op::Write { vol: 0, at: 0, len: 200, fua: false },
    ];
    // Data of the head alone, and above a snapshot's.
    let blank = [Op::Blank { vol: 0, at: 0, len: 64 }, Op::Blank { vol: 0, at: 376, len: 136 }];
    let retired_run = [
        Op::Write { vol: 0, at: 0, len: 64, fua: false },
        Op::CreateSnapshot { vol: 0, snap: 4, labels: 0 },
        Op::Discard { vol: 0, at: 0, len: 200 },
        Op::Retire { vol: 0, snap: 2, on: true },
        Op::Retire { vol: 0, snap: 4, on: true },
        Op::DeleteSnapshot { vol: 0, snap: 4 },
    ];
    let mut all = rebuilding();
    all.extend(together());
    all.extend(vec![
        plain(Op::CreateVolume { vol: 3, sectors: 256 }),
        plain(Op::RenameVolume { vol: 0, new: 4 }),
        plain(Op::ResizeVolume { vol: 2, sectors: 401 }),
        plain(Op::ResizeVolume { vol: 0, sectors: 129 }),
        plain(Op::DeleteVolume { vol: 0 }),
        plain(Op::DeleteVolume { vol: 2 }),
        plain(Op::CreateSnapshot { vol: 0, snap: 3, labels: 0 }),
        plain(Op::CreateSnapshot { vol: 2, snap: 3, labels: 201 }),
        plain(Op::RenameSnapshot { vol: 0, snap: 1, new: 4 }),
        plain(Op::DeleteSnapshot { vol: 0, snap: 0 }),
        plain(deleted.clone()),
        plain(middle.clone()),
        plain(Op::Rollback { vol: 0, snap: 2, keep_size: false }),
        plain(Op::Rollback { vol: 0, snap: 0, keep_size: false }),
        plain(Op::Rollback { vol: 0, snap: 1, keep_size: true }),
        after(&cut_off(0), Op::Rollback { vol: 0, snap: 3, keep_size: true }),
        plain(Op::Retire { vol: 0, snap: 1, on: true }),
        plain(Op::Rebuilding { vol: 1, on: true }),
        plain(Op::Protect { vol: 0, snap: 1, on: true }),
        plain(Op::Protect { vol: 1, snap: 0, on: false }),
        plain(Op::SetLabels { vol: 0, snap: 0, labels: 203 }),
        plain(Op::Clone { vol: 0, snap: 2, new: 3 }),
        plain(Op::Flatten { vol: 1, limit: 0 }),
        plain(Op::Write { vol: 0, at: 0, len: 512, fua: false }),
        plain(Op::Write { vol: 0, at: 5, len: 150, fua: true }),
        plain(Op::Write { vol: 2, at: 1, len: 1, fua: true }),
        plain(Op::Discard { vol: 0, at: 0, len: 512 }),
        plain(Op::WriteZeroes { vol: 0, at: 3, len: 333, fua: true }),
        plain(Op::FlushVolume { vol: 0 }),
        plain(Op::Flush),
        plain(Op::Grow { extents: 2 }),
        plain(Op::NewUuid { byte: 1 }),
        after(&[Op::NewUuid { byte: 1 }, Op::Reopen], Op::NewUuid { byte: 2 }),
        plain(Op::Vacuum { limit: u8::MAX }),
        after(&[Op::DeleteVolume { vol: 2 }], Op::Vacuum { limit: u8::MAX }),
        after(std::slice::from_ref(&middle), Op::Work { steps: 100 }),
        after(&[deleted.clone(), middle.clone()], Op::Work { steps: 100 }),
        after(&[Op::DeleteVolume { vol: 0 }], Op::Work { steps: 100 }),
        after(
            &[Op::Rollback { vol: 0, snap: 0, keep_size: false }, middle],
            Op::Work { steps: 100 },
        ),
        after(&blank, Op::Trim { vol: 0, limit: u8::MAX }),
        after(&retired, Op::Prune { vol: 0, at: 0, len: 512 }),
        after(&shared, Op::Prune { vol: 0, at: 0, len: 512 }),
        after(&retired_run, Op::Prune { vol: 0, at: 0, len: 512 }),
        after(&two_copies(), Op::Work { steps: 100 }),
        after(&[deleted], Op::Write { vol: 0, at: 0, len: 128, fua: true }),
    ]);
    all
}

/// Commands on encrypted volumes, the first of a store among them.
#[must_use]
pub fn encrypted() -> Vec<Case> {
    let created = Op::CreateVolume { vol: 3, sectors: 385 };
    let write = |vol, at, len| Op::Write { vol, at, len, fua: false };
    let filled = [
        created.clone(),
        write(3, 0, 385),
        Op::CreateSnapshot { vol: 3, snap: 0, labels: 0 },
        write(3, 7, 90),
        Op::CreateSnapshot { vol: 3, snap: 1, labels: 0 },
        write(3, 60, 20),
        Op::Clone { vol: 3, snap: 0, new: 4 },
    ];
    let after = |more: &[Op], command| Case { prepare: [&filled[..], more].concat(), command };
    let delete = Op::DeleteVolume { vol: 3 };
    vec![
        Case { prepare: Vec::new(), command: created },
        after(&[], Op::Rekey { vol: 3 }),
        after(&[Op::Rekey { vol: 3 }, Op::Flush], Op::Rekey { vol: 4 }),
        after(&[Op::Rekey { vol: 3 }], Op::Clone { vol: 3, snap: 1, new: 5 }),
        after(&[], write(3, 5, 150)),
        after(&[], Op::ResizeVolume { vol: 3, sectors: 131 }),
        after(&cut_off(3), Op::Rollback { vol: 3, snap: 3, keep_size: true }),
        after(&[], delete.clone()),
        after(&[delete], Op::Work { steps: 100 }),
        after(&[], Op::Flatten { vol: 4, limit: 0 }),
        after(&[Op::DeleteVolume { vol: 0 }], Op::Vacuum { limit: u8::MAX }),
    ]
}

/// Compressing, the first extent of a store among it, and commands on what is compressed.
#[must_use]
pub fn compressed() -> Vec<Case> {
    let all = |vol| Op::Compress { vol, snap: None, limit: u8::MAX };
    let compress = [all(0), all(1), all(2)];
    let write = |vol, at, len| Op::Write { vol, at, len, fua: false };
    let after = |more: &[Op], command| Case { prepare: [&compress[..], more].concat(), command };
    let delete = |snap| Op::DeleteSnapshot { vol: 0, snap };
    let zero = Op::WriteZeroes { vol: 0, at: 264, len: 19, fua: true };
    // Zeros over a snapshot's data, beside data.
    let zeros = [Op::Discard { vol: 0, at: 160, len: 16 }, write(0, 192, 32)];
    vec![
        Case { prepare: zeros.to_vec(), command: all(0) },
        Case { prepare: [&zeros[..], &[all(0)]].concat(), command: write(0, 195, 3) },
        Case { prepare: Vec::new(), command: all(0) },
        Case {
            prepare: Vec::new(),
            command: Op::Compress { vol: 0, snap: Some(1), limit: u8::MAX },
        },
        after(&[write(0, 260, 9), write(2, 100, 9)], all(0)),
        after(&[], write(0, 5, 9)),
        after(&[], Op::Write { vol: 0, at: 250, len: 120, fua: true }),
        after(&[], write(2, 101, 1)),
        after(&[], Op::Discard { vol: 2, at: 104, len: 40 }),
        after(&[Op::Discard { vol: 2, at: 104, len: 40 }], write(2, 150, 3)),
        after(&[], zero),
        after(&[], Op::CreateSnapshot { vol: 0, snap: 3, labels: 0 }),
        after(&[], Op::Rollback { vol: 0, snap: 1, keep_size: true }),
        after(&[], Op::Flatten { vol: 1, limit: 0 }),
        after(&[delete(2)], Op::Work { steps: 100 }),
        after(&[delete(0), delete(1), delete(2)], Op::Work { steps: 100 }),
        after(&[write(0, 0, 60), delete(2)], Op::Work { steps: 100 }),
        after(&[Op::DeleteVolume { vol: 1 }], Op::Vacuum { limit: u8::MAX }),
        after(&[Op::DeleteVolume { vol: 0 }], Op::Work { steps: 100 }),
    ]
}

/// A volume being rebuilt: three layers that are not linked yet, data, zeros and holes in each, and
/// a head that was written to.
#[must_use]
pub fn rebuilt() -> Vec<Op> {
    let (vol, sectors) = (3, 384);
    let insert = |snap| Op::InsertSnapshot { vol, snap, sectors };
    let write = |snap, start, count| Op::WriteLayer { vol, snap, start, count };
    vec![
        Op::CreateVolume { vol, sectors },
        Op::Rebuilding { vol, on: true },
        insert(0),
        insert(1),
        insert(2),
        write(0, 0, 40),
        write(1, 4, 20),
        Op::ZeroLayer { vol, snap: 1, start: 8, count: 30 },
        write(2, 10, 3),
        write(2, 40, 8),
        Op::ZeroLayer { vol, snap: 2, start: 0, count: 32 },
        write(2, 20, 2),
        Op::Write { vol, at: 3, len: 30, fua: false },
        Op::Discard { vol, at: 128, len: 64 },
    ]
}

/// Three snapshots of one chain, deleted together in every order; background work has begun with the first
/// of them before the others go. Between two of them each extent is moved, merged, or hidden by zeros.
fn together() -> Vec<Case> {
    let write = |at, len| Op::Write { vol: 0, at, len, fua: false };
    let snapshot = |snap| Op::CreateSnapshot { vol: 0, snap, labels: 0 };
    let chain = [
        snapshot(3),
        write(10, 30),
        write(200, 30),
        Op::Discard { vol: 0, at: 256, len: 128 },
        snapshot(4),
        write(5, 12),
        write(390, 20),
    ];
    let orders = [[2, 3, 4], [2, 4, 3], [3, 2, 4], [3, 4, 2], [4, 2, 3], [4, 3, 2]];
    let case = |order: [u8; 3]| {
        let [first, second, third] = order.map(|snap| Op::DeleteSnapshot { vol: 0, snap });
        let deleted = [first, Op::Work { steps: 2 }, second, third];
        let prepare = chain.iter().cloned().chain(deleted).collect();
        Case { prepare, command: Op::Work { steps: 100 } }
    };
    orders.into_iter().map(case).collect()
}

/// Leaves a deleted snapshot whose merge copies something in each of two extents.
fn two_copies() -> [Op; 7] {
    let write = |at, len| Op::Write { vol: 0, at, len, fua: false };
    [
        Op::CreateSnapshot { vol: 0, snap: 3, labels: 0 },
        write(0, 8),
        write(192, 8),
        Op::CreateSnapshot { vol: 0, snap: 4, labels: 0 },
        write(16, 24),
        write(160, 24),
        Op::DeleteSnapshot { vol: 0, snap: 4 },
    ]
}

/// The layers of [`rebuilt`] in their order.
#[must_use]
pub fn linked() -> Op {
    let links = vec![(0, None), (1, Some(0)), (2, Some(1))];
    Op::Relink { vol: 3, links, head: Some(2), marks: 0 }
}

fn rebuilding() -> Vec<Case> {
    let vol = 3;
    let turned = vec![(2, None), (1, Some(2)), (0, Some(1))];
    let turned = Op::Relink { vol, links: turned, head: Some(0), marks: 1 };
    let commands = [
        Op::InsertSnapshot { vol, snap: 4, sectors: 160 },
        Op::WriteLayer { vol, snap: 1, start: 0, count: 48 },
        Op::WriteLayer { vol, snap: 2, start: 12, count: 9 },
        Op::ZeroLayer { vol, snap: 0, start: 3, count: 33 },
        Op::ClearLayer { vol, snap: 2, start: 3, count: 30 },
        Op::ClearLayer { vol, snap: 1, start: 0, count: 48 },
        Op::Write { vol, at: 0, len: 384, fua: false },
        turned,
    ];
    let mut cases = vec![Case { prepare: rebuilt(), command: linked() }];
    for command in commands {
        // What an open volume remembers of its layers must not outlive a change of them.
        let more = [linked(), Op::Hold { vol }, Op::Verify];
        let prepare = rebuilt().into_iter().chain(more).collect();
        cases.push(Case { prepare, command });
    }
    cases
}

/// Leaves a snapshot that ends within a block, over older content behind its end.
fn cut_off(vol: u8) -> [Op; 3] {
    [
        Op::ResizeVolume { vol, sectors: 131 },
        Op::CreateSnapshot { vol, snap: 3, labels: 0 },
        Op::ResizeVolume { vol, sectors: 401 },
    ]
}

/// Runs one case undisturbed, as one history.
///
/// # Errors
/// What must not be.
pub fn run_calm(case: &Case, config: &Config) -> Result<(), String> {
    let mut machine = Machine::new(config)?;
    let mut ops = base();
    ops.extend(case.prepare.iter().cloned());
    ops.extend([case.command.clone(), Op::Verify, Op::Reopen]);
    for op in ops {
        machine.step(&Step { op, fate: Fate::Calm, seed: 1 })?;
    }
    machine.verify()
}

/// Runs one case with one kind of disturbance to its end.
///
/// # Errors
/// What must not be, with the change it happened at.
pub fn run(case: &Case, kind: Kind, config: &Config) -> Result<Stats, String> {
    let (base, warm) = prepare(case, config)?;
    let mut stats = Stats::default();
    let fates = kind.fates();
    for n in 1..CHANGES_MAX {
        let mut hit = false;
        for (variant, fate) in fates.iter().enumerate() {
            let seed = n * 16 + variant as u64;
            let mut machine = base.thaw()?;
            machine.images_each = IMAGES_EACH;
            let step = |op: &Op, fate| Step { op: op.clone(), fate, seed };
            for op in &warm {
                machine.step(&step(op, Fate::Calm))?;
            }
            let result = machine.step(&step(&case.command, fate(n)));
            result.map_err(|e| format!("{:?}, {:?}: {e}", case.command, fate(n)))?;
            hit |= machine.hit();
            let mut rng = fastrand::Rng::with_seed(seed);
            let go_on = machine.verify().and_then(|()| machine.go_on(&mut rng));
            go_on.map_err(|e| format!("going on after {:?}, {:?}: {e}", case.command, fate(n)))?;
            stats += machine.stats;
        }
        if !hit {
            return Ok(stats);
        }
    }
    Err(format!("{:?} makes more than {CHANGES_MAX} changes", case.command))
}

/// Cuts power at each change of one command and, after recovery, during the next ones, with the
/// journal filled more and more: what recovery relied on must not be lost while it is repaired.
///
/// # Errors
/// What must not be, with the changes it happened at.
pub fn run_twice(config: &Config) -> Result<Stats, String> {
    let case = Case { prepare: Vec::new(), command: Op::Flush };
    let (base, _) = prepare(&case, config)?;
    let mut stats = Stats::default();
    let labels = |labels| Op::SetLabels { vol: 0, snap: 0, labels };
    for (first, filled) in (1..10).flat_map(|first| (1..8).map(move |filled| (first, filled))) {
        let seed = config.seed << 16 | first << 8 | filled;
        let mut machine = base.thaw()?;
        machine.images_each = IMAGES_EACH;
        // Metadata is written back only when the journal fills.
        let fill = (0..filled).map(|_| (labels(203), Fate::Calm));
        let commands = fill.chain([
            (Op::Protect { vol: 0, snap: 1, on: true }, Fate::PowerLossAt(first)),
            (Op::ResizeVolume { vol: 2, sectors: 401 }, Fate::Images([1, 2])),
            (labels(203), Fate::Images([2, 3])),
            (Op::Protect { vol: 0, snap: 2, on: true }, Fate::Images([3, 4])),
        ]);
        for (op, fate) in commands {
            let what = format!("{filled} groups, power lost at {first}, then {fate:?} of {op:?}");
            machine.step(&Step { op, fate, seed }).map_err(|e| format!("{what}: {e}"))?;
        }
        stats += machine.stats;
    }
    Ok(stats)
}

/// The state before the command, and the last writes before it, which are repeated each time so
/// that the cache is not empty.
fn prepare(case: &Case, config: &Config) -> Result<(Frozen, Vec<Op>), String> {
    let mut machine = Machine::new(config)?;
    let mut ops = base();
    let warm = ops.split_off(ops.len() - 2);
    ops.extend(case.prepare.iter().cloned());
    for op in ops {
        machine.step(&Step { op, fate: Fate::Calm, seed: 1 })?;
    }
    let gone = |op: &Op| matches!(op, Op::DeleteVolume { vol: 0 });
    let warm = if case.prepare.iter().any(gone) { Vec::new() } else { warm };
    Ok((machine.freeze(config.seed)?, warm))
}
