//! The space that volumes and snapshots use: a walk over every layer of each, which ends when nobody waits for it.

use super::Progress;
use dbs_core::info::{SnapshotInfo, Usage, VolumeInfo};
use dbs_core::{ErrorKind, Result, Store};

/// Of a command whose length nobody knows before.
const ONE: Progress = Progress { done: 0, total: 1 };

/// Whether to go on, asked before each step of a walk.
type GoOn<'a> = &'a mut dyn FnMut() -> bool;

/// Of one volume or snapshot.
pub(super) fn of(
    store: &Store,
    volume: &str,
    snapshot: Option<&str>,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Usage> {
    store.usage_while(volume, snapshot, &mut || progress(ONE))
}

/// All volumes, with what they use if that was asked for.
pub(super) fn volumes(
    store: &Store,
    usage: bool,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Vec<VolumeInfo>> {
    let mut all = store.volumes(false);
    if usage {
        let of = |info: &mut VolumeInfo, go_on: GoOn<'_>| {
            info.usage = store.usage_while(&info.name, None, go_on)?;
            Ok(())
        };
        with_usage(&mut all, progress, of)?;
    }
    Ok(all)
}

/// The snapshots of a volume, alike.
pub(super) fn snapshots(
    store: &Store,
    volume: &str,
    usage: bool,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Vec<SnapshotInfo>> {
    let mut all = store.snapshots(volume, false)?;
    if usage {
        let of = |info: &mut SnapshotInfo, go_on: GoOn<'_>| {
            info.usage = store.usage_while(volume, Some(&info.name), go_on)?;
            Ok(())
        };
        with_usage(&mut all, progress, of)?;
    }
    Ok(all)
}

/// Fills in the usage of one after the other. Those that go meanwhile are left out.
fn with_usage<T>(
    all: &mut Vec<T>,
    progress: &mut dyn FnMut(Progress) -> bool,
    of: impl Fn(&mut T, GoOn<'_>) -> Result<()>,
) -> Result<()> {
    let total = all.len() as u64;
    let (mut done, mut stopped) = (0, Ok(()));
    all.retain_mut(|item| {
        let known = stopped.is_err() || {
            let found = of(item, &mut || progress(Progress { done, total }));
            let goes = found.is_ok();
            if let Err(error) = found
                && error.kind() == ErrorKind::Interrupted
            {
                stopped = Err(error);
            }
            goes
        };
        done += 1;
        known
    });
    stopped
}
