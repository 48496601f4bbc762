//! Proving that a backup can be restored.

use crate::names::BlockName;
use crate::objects::is_verdict;
use crate::pool::{self, Rate, Work};
use crate::store::BackupStore;
use dbs_core::Result;
use serde::Serialize;

/// What is wrong with a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BadBlock {
    /// The first place in the volume that needs it.
    pub offset: u64,
    /// Its name.
    pub block: String,
    /// What is wrong.
    pub problem: String,
}

/// What a verification has found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Blocks of the volume that the backup holds.
    pub blocks: u64,
    /// Different blocks.
    pub different: u64,
    /// Bytes of blocks that were read.
    pub read: u64,
    /// Blocks that are missing or damaged, in the order of the volume.
    pub bad: Vec<BadBlock>,
    /// In a repository: packs that this or an earlier verification by the same object found damaged, perhaps only in what
    /// other packs have, too.
    pub damaged_packs: Vec<String>,
}

impl BackupStore {
    /// Looks whether all blocks of a backup are there, and with `content` whether each is what its name says. Nothing is
    /// written, and no lock is taken, so that it works without the right to write.
    ///
    /// # Errors
    /// `NotFound`, also if the backup is deleted meanwhile; `Busy` if it is in progress; `Corrupt` if its facts or those
    /// of its volume cannot be read; `Interrupted`; those of the store.
    pub fn verify(
        &self,
        volume: &str,
        backup: &str,
        content: bool,
        work: &mut Work<'_>,
    ) -> Result<Verified> {
        self.begin();
        let config = self.complete_backup(volume, backup)?;
        self.volume_to_restore(volume, Some(backup))?;
        let (size, method) = (config.block_size()?, config.method()?);
        let mut different: Vec<(BlockName, u64)> =
            config.blocks.iter().map(|block| (block.name, block.offset)).collect();
        different.sort_unstable();
        different.dedup_by_key(|(name, _)| *name);
        different.sort_unstable_by_key(|(_, offset)| *offset);
        let mut found = Verified {
            blocks: config.blocks.len() as u64,
            different: different.len() as u64,
            ..Verified::default()
        };
        if content {
            let rate = Rate::new(work.rate, &self.stop);
            let (total, mut done) = (found.different * size, 0);
            let one = |(name, offset): (BlockName, u64)| match self
                .fetch(volume, name, method, size, &rate)
            {
                Ok(_) => Ok(None),
                Err(error) if is_verdict(error.kind()) => {
                    Ok(Some(bad(name, offset, &error.to_string())))
                }
                Err(error) => Err(error),
            };
            // Together, and only if something is wrong one by one.
            let some = |run: &[(BlockName, u64)]| {
                let names: Vec<_> = run.iter().map(|(name, _)| *name).collect();
                let together =
                    run.len() > 1 && self.fetch_some(volume, &names, method, size, &rate).is_ok();
                let results = if together { &[][..] } else { run };
                let results = results.iter().map(|block| one(*block));
                Ok((run.len() as u64, results.collect::<Result<Vec<_>>>()?))
            };
            pool::each(
                work.workers,
                &self.stop,
                different.chunks(self.run(size)),
                some,
                |result| {
                    if let Some((count, results)) = result {
                        done += count * size;
                        found.bad.extend(results.into_iter().flatten());
                    }
                    if (work.progress)(done, total) { Ok(()) } else { Err(pool::interrupted()) }
                },
            )?;
            found.read = total;
        } else {
            let present = self.readable(volume, work)?;
            let missing = different.iter().filter(|(name, _)| !present.contains(*name));
            found.bad.extend(missing.map(|(name, offset)| bad(*name, *offset, "it is not there")));
        }
        found.bad.sort_unstable_by_key(|block| block.offset);
        if let Some(repository) = &self.repository {
            found.damaged_packs = repository.damaged_packs();
        }
        if !found.bad.is_empty() {
            // If somebody deletes the backup, its blocks go too.
            self.complete_backup(volume, backup)?;
        }
        Ok(found)
    }
}

fn bad(name: BlockName, offset: u64, problem: &str) -> BadBlock {
    BadBlock { offset, block: name.to_string(), problem: problem.to_owned() }
}
