//! What follows an error of the disk: the process ends, or it goes on, and a store that takes no more changes
//! still shows what it showed.

use super::Machine;
use crate::op::Op;
use crate::outcomes::{End, Outcomes};
use crate::step::{Fate, Step};
use crate::verify::{self, Allow};
use dbs_core::{Error, ErrorKind, Store};

/// A store in which a flush, or a write of metadata, has failed.
pub(super) struct Poisoned {
    /// What may be found when it is opened again.
    outcomes: Outcomes,
    /// How its process will end.
    end: End,
}

impl Machine {
    /// Looks at what a failed operation has left, and goes on, or ends the process like this.
    pub(super) fn after_error(
        &mut self,
        failed: Option<ErrorKind>,
        outcomes: &Outcomes,
        end: End,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        let (index, found) = outcomes.compare(self.store(), End::Killed)?;
        let mut outcomes = outcomes.clone();
        let poisoned = is_poisoned(self.store())?;
        let mut flushed = false;
        if poisoned || failed == Some(ErrorKind::NoSpace) || rng.bool() {
            // Whoever flushes now is told the truth, whatever failed before.
            match self.store().flush() {
                Ok(()) if poisoned => return Err("a poisoned store is flushed".into()),
                Ok(()) => flushed = true,
                Err(error) if poisoned && error.kind() == ErrorKind::Poisoned => {}
                Err(error) => return Err(format!("flush after an error that is over: {error}")),
            }
        }
        let goes_on = rng.u8(0..4) != 0;
        if goes_on {
            self.adopt(&outcomes, index, &found, End::Killed);
        }
        match (goes_on, poisoned) {
            (true, true) => self.poisoned = Some(Poisoned { outcomes, end }),
            (true, false) if flushed => self.model.settle(),
            (true, false) => {}
            (false, _) => {
                if flushed && end != End::Killed {
                    outcomes = outcomes.flushed();
                }
                self.end(end, &outcomes, rng)?;
            }
        }
        Ok(())
    }

    /// A step in a store that takes no changes any more.
    pub(super) fn step_poisoned(
        &mut self,
        step: &Step,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        match &step.op {
            Op::ReadBegin { vol, of } => self.begin_read(*vol, *of)?,
            Op::ReadOn => self.slow.iter_mut().try_for_each(|slow| slow.read_on(&self.disk))?,
            Op::ReadEnd => self.end_reads(|_| true)?,
            Op::Verify => self.verify()?,
            op if op.ends_process() => return self.end_poisoned(rng),
            Op::Fill { .. } | Op::LoseTail => {}
            op => self.refused(op, step.fate)?,
        }
        verify::compare(self.store(), &[&self.model], Allow::Newest)
            .map_err(|e| format!("the store is poisoned: {e}"))?;
        if rng.u8(0..6) == 0 { self.end_poisoned(rng) } else { Ok(()) }
    }

    /// An operation that would change something, and must not.
    pub(super) fn refused(&mut self, op: &Op, fate: Fate) -> Result<(), String> {
        if self.model.unpredictable(op) || self.waits_for_job(op) {
            return Ok(());
        }
        self.end_reads_before(op)?;
        self.count(op, fate);
        self.number += 1;
        let mut after = self.model.clone();
        let expected = after.apply(op, self.number);
        let result = self.perform(op);
        self.note_job();
        match (&result, &expected) {
            (Ok(()), Ok(())) if writes_nothing(op) => {
                self.model = after;
                self.note_job();
                Ok(())
            }
            (Err(error), _) if matches!(error.kind(), ErrorKind::Poisoned | ErrorKind::Io) => {
                Ok(())
            }
            (Err(error), Err(kinds)) if kinds.contains(&error.kind()) => Ok(()),
            _ => Err(format!("{op:?} in a poisoned store: {result:?}")),
        }
    }

    /// Ends the process of a poisoned store.
    ///
    /// # Errors
    /// Everything that must not be.
    pub fn end_poisoned(&mut self, rng: &mut fastrand::Rng) -> Result<(), String> {
        let Some(Poisoned { outcomes, end }) = self.poisoned.take() else { return Ok(()) };
        if rng.bool() {
            self.end_reads(|_| true)?;
            let _unheard = self.stop_job();
            self.held.clear();
            let closed = self.store.take().map(Store::close);
            if !matches!(closed, Some(Err(ref error)) if error.kind() == ErrorKind::Poisoned) {
                return Err(format!("closing a poisoned store: {closed:?}"));
            }
        }
        self.end(end, &outcomes, rng)
    }
}

/// Whether the store takes no changes any more.
fn is_poisoned(store: &Store) -> Result<bool, String> {
    match store.delete_volume("nobody").map_err(|error| Error::kind(&error)) {
        Err(ErrorKind::Poisoned) => Ok(true),
        Err(ErrorKind::NotFound) => Ok(false),
        other => Err(format!("a volume that is not there is deleted: {other:?}")),
    }
}

/// Whether it may be done without writing anything.
fn writes_nothing(op: &Op) -> bool {
    let reads = matches!(op, Op::Begin { long } if !long.has_turn());
    reads || matches!(op, Op::Hold { .. } | Op::Work { .. } | Op::GoOn { .. } | Op::Stop)
}
