//! Operations as calls of the store.

use crate::content::{SECTOR, SECTORS, Tag, fill};
use crate::image;
use crate::job::{compress, flatten, not_stopped};
use crate::op::{Long, Op, labels, snapshot_name, volume_name};
use crate::rebuild::link_marks;
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::{Error, Store};
use std::time::Duration;

/// Bytes of a block.
const BLOCK: u64 = (SECTOR * SECTORS) as u64;

/// Does an operation; what it writes carries `tag`.
///
/// # Errors
/// Those of the store.
pub fn perform(store: &Store, op: &Op, tag: Tag) -> Result<(), Error> {
    perform_beside(store, op, tag, None)
}

/// As [`perform`], beside a call that stands still: what that has cannot be waited for.
///
/// # Errors
/// Those of the store.
pub fn perform_beside(store: &Store, op: &Op, tag: Tag, job: Option<Long>) -> Result<(), Error> {
    match *op {
        Op::CreateVolume { vol, sectors } => {
            let (name, size) = (volume_name(vol), bytes(sectors));
            match image::is_below(sectors) {
                true => store.create_backed(&name, size, image::file()).map(drop),
                false => store.create_volume(&name, size).map(drop),
            }
        }
        Op::RenameVolume { vol, new } => store.rename_volume(&volume_name(vol), &volume_name(new)),
        Op::ResizeVolume { vol, sectors } => store.resize_volume(&volume_name(vol), bytes(sectors)),
        Op::DeleteVolume { vol } => store.delete_volume(&volume_name(vol)),
        Op::Rekey { vol } => image::rekey(store, &volume_name(vol)),
        Op::Clone { vol, snap, new } => {
            store.clone_volume(&volume_name(vol), &snapshot_name(snap), &volume_name(new)).map(drop)
        }
        Op::Flatten { vol, limit } => flatten(store, vol, &mut countdown(limit)),
        Op::Compress { vol, snap, limit } => compress(store, (vol, snap), &mut countdown(limit)),
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
        Op::Blank { vol, at, len } => {
            let zeros = vec![0; bytes(len) as usize];
            store.volume(&volume_name(vol))?.write_at(bytes(at), &zeros, false)
        }
        Op::Trim { vol, limit } => {
            let (volume, mut stop) = (store.complete_volume(&volume_name(vol))?, countdown(limit));
            let trimmed = volume.trim(false, &mut |report| stop(report.done, report.total));
            trimmed.map(drop).or_else(not_stopped)
        }
        Op::Prune { vol, at, len } => {
            store.prune(&volume_name(vol), bytes(at), bytes(len)).map(drop)
        }
        Op::InsertSnapshot { .. }
        | Op::WriteLayer { .. }
        | Op::ZeroLayer { .. }
        | Op::ClearLayer { .. }
        | Op::Relink { .. } => perform_on_layers(store, op, tag, job),
        Op::FlushVolume { vol } => store.volume(&volume_name(vol))?.flush(),
        Op::Flush => store.flush(),
        Op::Work { steps } => work_on_all(store, steps, job),
        Op::Grow { extents } => {
            let info = store.info();
            store.grow((info.size + u64::from(extents) * info.extent_size).min(info.max_size))
        }
        Op::NewUuid { byte } => store.set_uuid(Some([byte; 16])),
        Op::Vacuum { limit } => store.vacuum(&mut countdown(limit)).map(drop).or_else(not_stopped),
        _ => perform_on_snapshot(store, op),
    }
}

fn work_on_all(store: &Store, steps: u8, job: Option<Long>) -> Result<(), Error> {
    if steps.is_multiple_of(16) {
        store.retry_put_off();
    }
    work(store, u64::from(steps), job)?;
    if job != Some(Long::Relearn) {
        store.relearn_checksums(u32::from(steps))?;
    }
    match steps % 4 {
        // Without memory for checksums they are written, or lost.
        1 => store.crowd_checksums(true),
        2 => store.crowd_checksums(false),
        _ => store.close_checksums(Duration::ZERO),
    }
}

fn perform_on_snapshot(store: &Store, op: &Op) -> Result<(), Error> {
    match *op {
        Op::CreateSnapshot { vol, snap, labels: number } => {
            let options = SnapshotOptions {
                labels: labels(number),
                system: number % 2 == 1,
                ..Default::default()
            };
            store.create_snapshot(&volume_name(vol), &snapshot_name(snap), &options).map(drop)
        }
        Op::RenameSnapshot { vol, snap, new } => {
            store.rename_snapshot(&volume_name(vol), &snapshot_name(snap), &snapshot_name(new))
        }
        Op::DeleteSnapshot { vol, snap } => {
            store.delete_snapshot(&volume_name(vol), &snapshot_name(snap))
        }
        Op::Rollback { vol, snap, keep_size: false } => {
            store.rollback(&volume_name(vol), &snapshot_name(snap))
        }
        Op::Rollback { vol, snap, keep_size: true } => {
            store.rollback_keeping_size(&volume_name(vol), &snapshot_name(snap))
        }
        Op::Retire { vol, snap, on } => {
            store.set_retired(&volume_name(vol), &snapshot_name(snap), on)
        }
        Op::Rebuilding { vol, on } => store.set_rebuilding(&volume_name(vol), on),
        Op::Protect { vol, snap, on } => {
            store.set_protected(&volume_name(vol), &snapshot_name(snap), on)
        }
        Op::SetLabels { vol, snap, labels: number } => {
            store.set_labels(&volume_name(vol), &snapshot_name(snap), &labels(number))
        }
        _ => unreachable!("{op:?} is no operation on a snapshot"),
    }
}

fn perform_on_layers(store: &Store, op: &Op, tag: Tag, job: Option<Long>) -> Result<(), Error> {
    let layer = |vol, snap| store.layer(&volume_name(vol), Some(&snapshot_name(snap)));
    let range = |start: u8, count: u8| (u64::from(start) * BLOCK, u64::from(count) * BLOCK);
    match *op {
        Op::InsertSnapshot { vol, snap, sectors } => {
            let (volume, name) = (volume_name(vol), snapshot_name(snap));
            store
                .insert_snapshot(&volume, &name, bytes(sectors), &SnapshotOptions::default())
                .map(drop)
        }
        Op::WriteLayer { vol, snap, start, count } => {
            let (offset, length) = range(start, count);
            let mut buf = vec![0; length as usize];
            fill(&mut buf, offset / SECTOR as u64, tag);
            layer(vol, snap)?.write_at(offset, &buf)
        }
        Op::ZeroLayer { vol, snap, start, count } => {
            let (offset, length) = range(start, count);
            layer(vol, snap)?.zero(offset, length)
        }
        Op::ClearLayer { vol, snap, start, count } => {
            finish_work(store, job)?;
            let (offset, length) = range(start, count);
            layer(vol, snap)?.clear(offset, length)
        }
        Op::Relink { vol, ref links, head, marks } => {
            finish_work(store, job)?;
            let links: Vec<_> = links
                .iter()
                .map(|(snap, parent)| {
                    let snapshot = snapshot_name(*snap);
                    let (retired, labels) = link_marks(&snapshot, marks);
                    let parent = parent.map(snapshot_name);
                    Link { snapshot, parent, retired, labels, created_ns: 1, ..Link::default() }
                })
                .collect();
            store.relink(&volume_name(vol), &links, head.map(snapshot_name).as_deref())
        }
        _ => unreachable!("{op:?} is no operation on layers"),
    }
}

/// Merges what is deleted, as far as that can be done.
fn finish_work(store: &Store, job: Option<Long>) -> Result<(), Error> {
    while work(store, 64, job)? > 0 {}
    Ok(())
}

/// Background work, unless a call that stands still has its turn; how many steps.
fn work(store: &Store, steps: u64, job: Option<Long>) -> Result<u64, Error> {
    match job.is_some_and(Long::has_turn) {
        true => Ok(store.try_work(steps)?.map_or(0, |report| report.done)),
        false => store.work(steps).map(|report| report.done),
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
