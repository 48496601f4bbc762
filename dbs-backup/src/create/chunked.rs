//! A backup in a repository: section 8 of `docs/repository.md`.

use super::{Created, Creation, Kept};
use crate::blocks::Source;
use crate::pool::Work;
use crate::repository::{Ended, Repository, Writer};
use dbs_core::{Error, Result};
use std::sync::atomic::Ordering;

/// Times that what is gone at the end is written again.
const ATTEMPTS: usize = 3;

impl<S: Source> Creation<'_, S> {
    /// Creates it.
    pub(super) fn run_in(
        &mut self,
        repository: &Repository,
        work: &mut Work<'_>,
    ) -> Result<Created> {
        for _ in 0..ATTEMPTS {
            match self.attempt(repository, work) {
                Ok(Some(created)) => return Ok(created),
                // What was written again is there now; only what is gone is missing.
                Ok(None) => self.options.full = false,
                Err(error) => {
                    self.keep_packs();
                    return Err(error);
                }
            }
        }
        Err(Error::busy(
            "what the backup relies on was collected again and again: it takes longer than the grace time of the repository",
        ))
    }

    /// Writes what is not there, and the manifest. None if something had gone meanwhile.
    fn attempt(&mut self, repository: &Repository, work: &mut Work<'_>) -> Result<Option<Created>> {
        let (backup, mut created, _) = self.make(work)?;
        repository.check_clear()?;
        let source = self.source;
        let size = source.size();
        let Some(writer) = self.writer() else { return Ok(None) };
        let ended = writer.finish(&backup, size, self.options.full, || source.check())?;
        created.uploaded = writer.uploaded();
        Ok(matches!(ended, Ended::Complete).then_some(created))
    }

    fn writer(&self) -> Option<&Writer> {
        match &self.kept {
            Kept::Repository(_, writer) => Some(&**writer),
            Kept::Lock(_) => None,
        }
    }

    /// Has the next backup find what this one has written.
    fn keep_packs(&self) {
        // What stopped the backup does not stop this.
        let stopped = self.store.stop.swap(false, Ordering::SeqCst);
        // If it fails, that is written again.
        let _ = self.writer().map(Writer::save);
        self.store.stop.store(stopped, Ordering::SeqCst);
    }
}
