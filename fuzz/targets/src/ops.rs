//! Histories of operations, crashes and faults against the model of the simulator.

use crate::input::Input;
use dbs_sim::op::{SECTORS_MAX, SNAPSHOTS, VOLUMES};
use dbs_sim::{Config, Fate, Op, Step, runner};

/// Steps of one input.
const STEPS_MAX: usize = 24;

/// Runs the steps that the bytes say, as `dbs-sim` does.
pub fn ops(data: &[u8]) {
    let mut input = Input::new(data);
    let mut config = Config::small(u64::from(input.u8()));
    // Another moment shows more than another image of the same one.
    config.images_each = 1;
    config.init.size = Some((24 + input.below(25)) * (64 << 10) + (1 << 20));
    config.init.checksums = config.seed & 4 != 0;
    let mut steps = Vec::new();
    while !input.is_empty() && steps.len() < STEPS_MAX {
        let op = op(&mut input);
        let fate = fate(&mut input);
        steps.push(Step { op, fate, seed: u64::from(input.u8()) });
    }
    if let Err(failure) = runner::replay_on(&config, &steps) {
        panic!("{failure}");
    }
}

fn fate(input: &mut Input<'_>) -> Fate {
    let kind = input.u8();
    if kind < 160 {
        return Fate::Calm;
    }
    let n = 1 + input.below(40);
    match kind % 6 {
        0 => Fate::Images([n, n + 1]),
        1 => Fate::KillAt(n),
        2 => Fate::PowerLossAt(n),
        3 => Fate::EioAt(n),
        4 => Fate::ReadEioAt(n),
        _ => Fate::EnospcFrom(1 + n / 4),
    }
}

fn op(input: &mut Input<'_>) -> Op {
    let kind = input.u8() % 36;
    let vol = input.below(u64::from(VOLUMES)) as u8;
    let mut snap = || input.below(u64::from(SNAPSHOTS)) as u8;
    match kind {
        0 => Op::CreateVolume { vol, sectors: sectors(input) },
        1 => Op::RenameVolume { vol, new: snap() % VOLUMES },
        2 => Op::ResizeVolume { vol, sectors: sectors(input) },
        3 => Op::DeleteVolume { vol },
        4 | 5 => Op::CreateSnapshot { vol, snap: snap(), labels: input.u8() },
        6 => Op::RenameSnapshot { vol, snap: snap(), new: snap() },
        7 => Op::DeleteSnapshot { vol, snap: snap() },
        8 => Op::Rollback { vol, snap: snap(), keep_size: input.flag() },
        9 => Op::Protect { vol, snap: snap(), on: input.flag() },
        10 => Op::Retire { vol, snap: snap(), on: input.flag() },
        11 => Op::Rebuilding { vol, on: input.flag() },
        12 => Op::SetLabels { vol, snap: snap(), labels: input.u8() },
        13 => Op::Clone { vol, snap: snap(), new: snap() % VOLUMES },
        14 => Op::Flatten { vol, limit: input.u8() % 8 },
        15..=18 => {
            let (at, len) = range(input);
            Op::Write { vol, at, len, fua: input.flag() }
        }
        19 => {
            let (at, len) = range(input);
            Op::Discard { vol, at, len }
        }
        20 => {
            let (at, len) = range(input);
            Op::WriteZeroes { vol, at, len, fua: input.flag() }
        }
        21 => {
            let (at, len) = range(input);
            Op::Prune { vol, at, len }
        }
        22 => Op::FlushVolume { vol },
        23 => Op::Flush,
        24 => Op::Work { steps: 1 + input.u8() % 31 },
        25 => Op::Grow { extents: input.u8() % 4 },
        26 => Op::Vacuum { limit: input.u8() % 10 },
        27 => Op::Hold { vol },
        28 => Op::Verify,
        29 => Op::Reopen,
        30 => Op::Kill,
        31 => Op::KillWithoutTail,
        32 => Op::PowerLoss,
        33 => Op::Fill { vol },
        _ => rebuild(kind == 34, vol, input),
    }
}

/// What happens to the layers of a volume that is being rebuilt.
fn rebuild(relink: bool, vol: u8, input: &mut Input<'_>) -> Op {
    let snap = input.below(u64::from(SNAPSHOTS)) as u8;
    if relink {
        let parent = |input: &mut Input<'_>| match input.u8() % (SNAPSHOTS + 1) {
            SNAPSHOTS => None,
            snap => Some(snap),
        };
        let count = input.below(5);
        let links = (0..count).map(|i| ((snap + i as u8) % SNAPSHOTS, parent(input))).collect();
        return Op::Relink { vol, links, head: parent(input), marks: input.u8() };
    }
    let (start, count) = (input.u8() % 80, 1 + input.u8() % 48);
    match input.u8() % 4 {
        0 => Op::InsertSnapshot { vol, snap, sectors: sectors(input) },
        1 => Op::WriteLayer { vol, snap, start, count },
        2 => Op::ZeroLayer { vol, snap, start, count },
        _ => Op::ClearLayer { vol, snap, start, count },
    }
}

fn sectors(input: &mut Input<'_>) -> u16 {
    let sectors = 1 + input.below(u64::from(SECTORS_MAX) - 1) as u16;
    // Whole blocks more often than not.
    if sectors.is_multiple_of(4) { sectors } else { (sectors / 8 * 8).max(8) }
}

fn range(input: &mut Input<'_>) -> (u16, u16) {
    let at = input.below(u64::from(SECTORS_MAX)) as u16;
    let len = 1 + input.below(200) as u16;
    (at, len)
}
