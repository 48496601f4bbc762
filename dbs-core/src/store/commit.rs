//! Commit: the one place where metadata reaches the device.
//!
//! Order, and what each step rests on (`docs/format.md`, "Commit", has the crash points):
//!
//! 1. Take the records. The data each points to was written before it was recorded.
//! 2. Flush: that data is durable, and so are metadata copies written by earlier commits.
//!    Nobody else has written a group meanwhile (`elsewhere.rs`).
//! 3. Write the group, and the second copy of blocks whose first is durable since step 2.
//! 4. Flush: the group is durable; freed extents may be reused.
//! 5. Write the first copy of blocks captured at step 1; the next commit makes them durable.

use super::turns::Held;
use super::{Inner, Store};
use crate::error::{Error, Result};
use crate::io::WriteRequest;
use crate::meta::Meta;
use crate::meta::commit::{Copies, Room, WriteBack};
use crate::sabotage::{self, Bug};

/// What is said when the file of the tail was removed.
const TAIL_LOST: &str = "the file of the tail was removed while the store was open, and was made \
                         again. Had the process died in between, writes that it had just \
                         acknowledged would have been lost. Keep the tail in a directory that \
                         nobody removes";

/// Commits of one [`Store::settle`], at most.
const SETTLE_COMMITS: usize = 16;

impl Store {
    /// Commits what no flush has committed yet, and writes some metadata back so that the next
    /// open finds little to redo. For a server's spare moments; costs nothing when there is
    /// nothing to do. Whether there is more.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn settle(&self) -> Result<bool> {
        if self.inner.read_only {
            return Ok(false);
        }
        self.inner.try_again();
        self.inner.look_while_idle()?;
        if self.inner.meta().is_idle() {
            return Ok(false);
        }
        // Nobody waits for this, as they do for a commit.
        let blocks = self.inner.meta().blocks_to_capture(WriteBack::All);
        let brought = self.inner.bring_dirty(blocks);
        self.inner.commit_as(WriteBack::All)?;
        drop(brought);
        // Bitmaps of dirty blocks cannot leave memory.
        for _ in 1..SETTLE_COMMITS {
            let meta = self.inner.meta();
            if meta.log.is_idle() || !meta.are_bitmaps_crowded() {
                break;
            }
            drop(meta);
            self.inner.commit_as(WriteBack::All)?;
        }
        Ok(!self.inner.meta().is_idle())
    }
}

impl Inner {
    /// Makes everything acknowledged so far durable. Calls made while one runs share the next.
    ///
    /// # Errors
    /// `Io`, which poisons, even for want of space: what of it is on the device nobody knows. `Poisoned`.
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_as(WriteBack::Needed)
    }

    fn commit_as(&self, amount: WriteBack) -> Result<()> {
        self.check_unfailed(&[Bug::CommitAfterFailure])?;
        let Some(covers) = self.commits.take() else {
            return self.check_unfailed(&[Bug::CommitAfterFailure]);
        };
        let turn = Held::new(&self.commits, self);
        // Again: the commit that this one waited for may have failed. A group after one that is not
        // there could not be redone, and a flush after one that failed makes nothing durable.
        let unfailed = self.check_unfailed(&[Bug::CommitAfterFailure]);
        let result = unfailed.and_then(|()| self.commit_until_roomy(amount));
        let result = result.map_err(|error| self.poison_by(error));
        turn.end(Some(covers));
        self.wake();
        result
    }

    /// One commit, and more until all that waited is in a group and half of the journal is free
    /// again.
    fn commit_until_roomy(&self, amount: WriteBack) -> Result<()> {
        self.commit_once(amount)?;
        while self.has_to_go_on()? {
            self.commit_once(WriteBack::Needed)?;
        }
        Ok(())
    }

    /// Whether another commit is needed at once.
    ///
    /// # Errors
    /// Blocks that cannot be brought hold the journal. The next process needs half of it, for what the tail
    /// has: no more groups may come.
    fn has_to_go_on(&self) -> Result<bool> {
        let is_held = |meta: &Meta| meta.journal_short() && meta.log.is_held();
        if is_held(&self.meta()) {
            drop(self.bring_parked());
        }
        let meta = self.meta();
        if !is_held(&meta) {
            return Ok(meta.journal_short() || meta.staged_left());
        }
        if !sabotage::is(Bug::FillHeldJournal) {
            meta.check_none_parked()?;
        }
        Ok(meta.staged_left())
    }

    /// One commit; the caller makes sure that there is only one at a time. What takes long, the
    /// sealing and the I/O, happens without the lock.
    pub(super) fn commit_once(&self, amount: WriteBack) -> Result<()> {
        let (blocks, tail_lost, away) = {
            let mut meta = self.meta();
            let blocks = meta.blocks_to_capture(amount);
            (blocks, meta.log.take_tail_lost(), meta.dirty_away(blocks))
        };
        if tail_lost {
            self.warn(TAIL_LOST.to_owned());
        }
        let brought = (!away.is_empty()).then(|| self.bring_all(&away));
        let room = Room::new(blocks);
        let group = self.meta().begin_commit(amount, room)?;
        drop(brought);
        let sealed = group.as_ref().map(|group| (group.address, group.seal()));
        let skip = match group {
            Some(_) => sabotage::is(Bug::SkipDataFlush),
            None => sabotage::is(Bug::SkipEmptyFlush),
        };
        if !skip {
            self.flush_storage()?;
        }
        let second = self.meta().flushed();
        // A flush of what was written over writes nothing here.
        let writes = group.is_some() || !second.is_empty();
        let looked = if writes { self.look_elsewhere()? } else { None };
        let begun = self.storage.may_be_shared().then(|| self.env.now_ns());
        self.write_metadata(&second, sealed.as_ref().map(|(at, bytes)| (*at, &bytes[..])))?;
        self.meta().copies_written(&second);
        let Some(group) = group else {
            self.meta().shrink_bitmaps();
            return Ok(());
        };
        if !sabotage::is(Bug::SkipGroupFlush) {
            self.flush_storage()?;
        }
        self.note_group(&group, looked);
        self.look_after(begun)?;
        let first = self.meta().group_durable(group);
        self.write_metadata(&first, None)?;
        let mut meta = self.meta();
        meta.copies_written(&first);
        meta.shrink_bitmaps();
        Ok(())
    }

    pub(super) fn write_metadata(
        &self,
        copies: &Copies,
        group: Option<(u64, &[u8])>,
    ) -> Result<()> {
        let sealed = copies.seal();
        let all: Vec<_> = sealed.writes().chain(group).collect();
        if all.is_empty() {
            return Ok(());
        }
        self.keep_still(&all);
        let writes: Vec<_> =
            all.into_iter().map(|(offset, buf)| WriteRequest { offset, buf }).collect();
        self.storage
            .write_many(&writes)
            .map_err(|error| Error::io(error, "writing metadata failed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InitOptions, OpenOptions, TailPlace};
    use crate::volume::{Request, Start};
    use std::time::{Duration, Instant};

    /// Commits that somebody waits for do not write back for the sake of memory, unless it is twice too much.
    /// Settling does until all have left that may.
    #[test]
    fn settling_makes_room_for_bitmaps() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions {
            size: Some(64 << 20),
            extent_size: 64 << 10,
            checksums: false,
            ..InitOptions::default()
        };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 40 << 16).unwrap();
        let volume = store.volume("v").unwrap();
        let write = |block: u64| {
            let at = |extent: u64| (extent << 16) + block * 4096;
            (0..40).for_each(|extent| volume.write_at(at(extent), &[1; 4096], false).unwrap());
            store.flush().unwrap();
        };
        let captured = || store.inner.meta().blocks_to_capture(WriteBack::Needed);
        write(0);
        write(2);
        // A word for each, in a chunk of 64.
        store.set_metadata_memory(400);
        assert_eq!(captured(), 0);
        assert_eq!(store.inner.meta().entries.bitmap_bytes(), 64 * 8);
        assert!(store.inner.meta().are_bitmaps_crowded());
        let _more = store.settle().unwrap();
        assert!(!store.inner.meta().are_bitmaps_crowded());
        store.set_metadata_memory(1000);
        write(4);
        store.set_metadata_memory(100);
        assert!(captured() > 0);
    }

    const DIRTY_BLOCKS: u64 = 16 << 10;

    /// What every request waits for while metadata is written back. No test: it prints a figure.
    #[test]
    #[ignore = "measures; run with --release --nocapture"]
    fn longest_hold_of_the_lock_in_a_commit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(1 << 40), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let open = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
        let store = Store::open(&path, &open).unwrap();
        store.create_volume("v", 1 << 40).unwrap();
        let volume = store.volume("v").unwrap();
        let geometry = store.inner.meta().geometry;
        let step = u64::from(geometry.items_per_block(crate::format::RegionKind::Extents));
        let mut request = Request::new();
        let mut write = |offset| match volume.start_write(offset, 4096, &mut request).unwrap() {
            Start::Io => drop(request.finish_write(Ok(())).unwrap()),
            Start::Blocked => volume.write_at(offset, &[1; 4096], false).unwrap(),
            Start::Done => unreachable!("there is something to write"),
        };
        (0..DIRTY_BLOCKS * step).for_each(|extent| write(extent << 20));
        while store.settle().unwrap() {}
        (0..DIRTY_BLOCKS).for_each(|block| write(((block * step) << 20) + 8192));
        let mut all = Vec::new();
        while !store.inner.meta().log.is_idle() {
            all.push(holds(&store.inner));
        }
        for step in 0..4 {
            let mut times: Vec<_> = all.iter().map(|times| times[step]).collect();
            times.sort_unstable();
            let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
            println!(
                "step {step} of {} commits: median {median:?}, longest {longest:?}",
                all.len()
            );
        }
    }

    /// Found by review: commands that came while one commit ran went into one group, for which the journal had no room.
    /// The store poisoned itself; and as their records were in the tail, it could not be opened again.
    #[test]
    fn commands_beside_a_commit_make_no_group_that_has_no_room() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let open = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
        let store = Store::open(&path, &open).unwrap();
        store.create_volume("v", 1 << 20).unwrap();
        let names: Vec<_> = (0..24).map(|number| format!("s{number}")).collect();
        for name in &names {
            store.create_snapshot("v", name, &Default::default()).unwrap();
        }
        let labels = crate::info::Labels::from([("key".to_owned(), "x".repeat(7900))]);
        let (inner, store) = (&store.inner, &store);
        inner.commits.take_alone();
        std::thread::scope(|scope| {
            let commands: Vec<_> = names
                .iter()
                .map(|name| scope.spawn(|| store.set_labels("v", name, &labels)))
                .collect();
            std::thread::sleep(Duration::from_millis(300));
            inner.commits.end(None);
            commands.into_iter().for_each(|command| command.join().unwrap().unwrap());
        });
        assert_eq!(store.snapshot_info("v", "s23").unwrap().labels, labels);
    }

    /// [`Inner::commit_once`], with the time of each step that holds the lock.
    fn holds(inner: &Inner) -> [Duration; 4] {
        let mut times = [Duration::ZERO; 4];
        let room = Room::new(inner.meta().blocks_to_capture(WriteBack::All));
        let start = Instant::now();
        let group = inner.meta().begin_commit(WriteBack::All, room).unwrap();
        times[0] = start.elapsed();
        let sealed = group.as_ref().map(|group| (group.address, group.seal()));
        inner.flush_storage().unwrap();
        let start = Instant::now();
        let second = inner.meta().flushed();
        times[1] = start.elapsed();
        inner.write_metadata(&second, sealed.as_ref().map(|(at, b)| (*at, &b[..]))).unwrap();
        inner.meta().copies_written(&second);
        let Some(group) = group else { return times };
        inner.flush_storage().unwrap();
        let start = Instant::now();
        let first = inner.meta().group_durable(group);
        times[2] = start.elapsed();
        inner.write_metadata(&first, None).unwrap();
        let start = Instant::now();
        inner.meta().copies_written(&first);
        times[3] = start.elapsed();
        times
    }
}
