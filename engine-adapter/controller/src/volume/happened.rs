//! The last things that happened to a volume, for who looks at it.

use super::Controller;
use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};

/// How many are kept.
const KEPT: usize = 100;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When, in nanoseconds since the Unix epoch.
    pub at_ns: u64,
    /// Whether something went wrong and stays wrong.
    pub error: bool,
    /// What, as the log calls it.
    pub event: String,
    /// The rest.
    pub text: String,
}

/// Keeps them.
#[derive(Debug, Default)]
pub(super) struct Happened(Mutex<VecDeque<Event>>);

impl Controller {
    /// The last things that happened, oldest first.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let kept = self.happened.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().cloned().collect()
    }

    /// Keeps something in mind that is no news for the log.
    pub(super) fn happened(&self, event: &str, fields: &[(&str, &dyn fmt::Display)]) {
        self.keep(false, event, fields);
    }

    /// The lock is a leaf: [`Controller::log`] comes here while it has the state.
    pub(super) fn keep(&self, error: bool, event: &str, fields: &[(&str, &dyn fmt::Display)]) {
        let mut text = String::new();
        for (name, value) in fields {
            let space = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(text, "{space}{name} {value}");
        }
        let at_ns = self.parts.host.now_ns();
        let mut kept = self.happened.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(Event { at_ns, error, event: event.to_owned(), text });
    }
}
