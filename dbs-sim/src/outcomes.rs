//! What a store may hold after its process ended, depending on how it ended.

use crate::model::Model;
use crate::op::Op;
use crate::verify::{self, Allow, Found};
use dbs_core::Store;

/// What may be found after an operation was cut off.
#[derive(Debug, Clone)]
pub struct Outcomes {
    /// The states as a power loss may find them, with all older content.
    models: Vec<Model>,
    /// The state before; a block of the only model may still be as it was.
    in_flight: Option<Model>,
}

/// The kind of end a process met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Only the process died.
    Killed,
    /// The process died and its tail was lost; the disk kept all.
    TailLost,
    /// The process died after a flush may have failed; what the flush lost is gone.
    FlushLost,
    /// The machine went down.
    PowerLost,
}

impl Outcomes {
    /// Nothing was in flight.
    #[must_use]
    pub fn settled(model: &Model) -> Self {
        Self { models: vec![model.clone()], in_flight: None }
    }

    /// `op`, leading from `before` to `after`, was in flight.
    #[must_use]
    pub fn of(op: &Op, before: &Model, after: &Model) -> Self {
        if op.is_command() {
            return Self { models: vec![before.clone(), after.clone()], in_flight: None };
        }
        Self { models: vec![after.clone()], in_flight: Some(before.clone()) }
    }

    /// What may be found by a power loss once a flush was acknowledged: nothing older.
    #[must_use]
    pub fn flushed(mut self) -> Self {
        if let Some(before) = self.in_flight.take() {
            self.models =
                self.models.into_iter().map(|model| model.in_flight_of(&before)).collect();
        } else {
            self.models.iter_mut().for_each(Model::settle);
        }
        self
    }

    /// Whether there is only one thing a living process can see.
    #[must_use]
    pub fn certain(&self) -> bool {
        self.models.len() == 1 && self.in_flight.is_none()
    }

    /// The state of this index, as [`Outcomes::compare`] gives it.
    #[must_use]
    pub fn model(&self, index: usize) -> &Model {
        &self.models[index]
    }

    /// Every state in it, to forget what ends with the process.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Model> {
        self.models.iter_mut().chain(&mut self.in_flight)
    }

    /// Finds the model that the store agrees with after this end.
    ///
    /// # Errors
    /// How it differs from all of them.
    pub fn compare(&self, store: &Store, end: End) -> Result<(usize, Found), String> {
        match (&self.in_flight, end) {
            (_, End::PowerLost | End::TailLost | End::FlushLost) => {
                let models: Vec<_> = self.models.iter().collect();
                verify::compare(store, &models, Allow::Older)
            }
            (Some(before), End::Killed) => {
                let model = self.models[0].clone().in_flight_of(before);
                verify::compare(store, &[&model], Allow::Older)
            }
            (None, End::Killed) => {
                let models: Vec<_> = self.models.iter().collect();
                verify::compare(store, &models, Allow::Newest)
            }
        }
    }
}
