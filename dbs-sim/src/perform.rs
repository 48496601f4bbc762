//! Operations as calls of the store.

use crate::content::{SECTOR, Tag, fill};
use crate::op::{Op, labels, snapshot_name, volume_name};
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, ErrorKind, Store};

/// Does an operation; what it writes carries `tag`.
///
/// # Errors
/// Those of the store.
pub fn perform(store: &Store, op: &Op, tag: Tag) -> Result<(), Error> {
    match *op {
        Op::CreateVolume { vol, sectors } => {
            store.create_volume(&volume_name(vol), bytes(sectors)).map(drop)
        }
        Op::RenameVolume { vol, new } => store.rename_volume(&volume_name(vol), &volume_name(new)),
        Op::ResizeVolume { vol, sectors } => store.resize_volume(&volume_name(vol), bytes(sectors)),
        Op::DeleteVolume { vol } => store.delete_volume(&volume_name(vol)),
        Op::Clone { vol, snap, new } => {
            store.clone_volume(&volume_name(vol), &snapshot_name(snap), &volume_name(new)).map(drop)
        }
        Op::Flatten { vol, limit } => {
            store.flatten(&volume_name(vol), &mut countdown(limit)).or_else(not_stopped)
        }
        Op::Write { vol, at, len, fua } => {
            let mut buf = vec![0; bytes(len) as usize];
            fill(&mut buf, u64::from(at), tag);
            store.volume(&volume_name(vol))?.write_at(bytes(at), &buf, fua)
        }
        Op::Discard { vol, at, len } => {
            store.volume(&volume_name(vol))?.discard(bytes(at), bytes(len))
        }
        Op::WriteZeroes { vol, at, len, fua } => {
            store.volume(&volume_name(vol))?.write_zeroes(bytes(at), bytes(len), fua)
        }
        Op::FlushVolume { vol } => store.volume(&volume_name(vol))?.flush(),
        Op::Flush => store.flush(),
        Op::Work { steps } => store.work(u64::from(steps)).map(drop),
        Op::Grow { extents } => {
            let info = store.info();
            store.grow((info.size + u64::from(extents) * info.extent_size).min(info.max_size))
        }
        Op::Vacuum { limit } => store.vacuum(&mut countdown(limit)).map(drop).or_else(not_stopped),
        _ => perform_on_snapshot(store, op),
    }
}

fn perform_on_snapshot(store: &Store, op: &Op) -> Result<(), Error> {
    match *op {
        Op::CreateSnapshot { vol, snap, labels: number } => {
            let options = SnapshotOptions { labels: labels(number), system: number % 2 == 1 };
            store.create_snapshot(&volume_name(vol), &snapshot_name(snap), &options).map(drop)
        }
        Op::RenameSnapshot { vol, snap, new } => {
            store.rename_snapshot(&volume_name(vol), &snapshot_name(snap), &snapshot_name(new))
        }
        Op::DeleteSnapshot { vol, snap } => {
            store.delete_snapshot(&volume_name(vol), &snapshot_name(snap))
        }
        Op::Rollback { vol, snap } => store.rollback(&volume_name(vol), &snapshot_name(snap)),
        Op::Protect { vol, snap, on } => {
            store.set_protected(&volume_name(vol), &snapshot_name(snap), on)
        }
        Op::SetLabels { vol, snap, labels: number } => {
            store.set_labels(&volume_name(vol), &snapshot_name(snap), &labels(number))
        }
        _ => unreachable!("{op:?} is no operation on a snapshot"),
    }
}

pub(crate) fn bytes(sectors: u16) -> u64 {
    u64::from(sectors) * SECTOR as u64
}

fn countdown(limit: u8) -> impl FnMut(u64, u64) -> bool {
    let mut left = limit;
    move |_, _| {
        left = left.saturating_sub(1);
        left > 0
    }
}

/// Being stopped by the progress function is what was asked for.
fn not_stopped(error: Error) -> Result<(), Error> {
    if error.kind() == ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}
