//! Growing a volume.

use super::{Call, CallError, Controller, Fault};
use crate::rules::expand::{self, Begin};
use crate::rules::limits;
use dbs_core::{Error, Result};
use longhorn_wire::control::expansion::ExpandError;
use std::sync::Arc;

impl Controller {
    /// Begins to expand the volume; `VolumeGet` shows when that has ended, and how. If it has this size,
    /// the frontend alone is told once more: it may have failed to show it before.
    ///
    /// # Errors
    /// An expansion runs, or it cannot have this size.
    pub fn expand(self: &Arc<Self>, size: u64) -> Result<()> {
        if self.begin_expansion(size)? {
            let me = Arc::clone(self);
            let spawned = std::thread::Builder::new()
                .name("controller-expand".to_owned())
                .spawn(move || me.run_expansion(size));
            if let Err(error) = spawned {
                self.end_expansion(Err(Error::io(error, "starting a thread")), size);
            }
        }
        Ok(())
    }

    /// The first half of [`Controller::expand`]: notes that an expansion runs; says whether there is something to do.
    ///
    /// # Errors
    /// As [`Controller::expand`].
    pub fn begin_expansion(&self, size: u64) -> Result<bool> {
        let mut state = self.state();
        let up = state.frontend.as_ref().is_some_and(|frontend| frontend.is_up());
        let grows = match expand::begin(state.expanding, up, state.size, size) {
            Ok(Begin::Nothing) => return Ok(false),
            Ok(begin) => begin == Begin::Expand,
            Err(text) => {
                state.expansion_error = format!("controller failed to start expansion: {text}");
                state.expansion_failed_at = self.precise_now();
                return Err(Error::invalid(text));
            }
        };
        state.expanding = true;
        state.expansion_error.clear();
        state.expansion_failed_at.clear();
        drop(state);
        if grows {
            self.parts.path.set_expanding(true);
        }
        Ok(true)
    }

    /// The second half, which takes long: expands all replicas, then the frontend. Where that cannot show the new size to its users, the
    /// volume has it nevertheless: replicas are as large, and the frontend's next start offers it, or it
    /// shows it when the same is asked for again.
    pub fn run_expansion(&self, size: u64) {
        let grown = if self.state().size == size { Ok(()) } else { self.grow(size) };
        let outcome = grown.and_then(|()| {
            // Its users wait for I/O to see the new size: nothing may be paused here.
            let frontend = self.state().frontend.clone().filter(|frontend| frontend.is_up());
            frontend.map_or(Ok(()), |frontend| frontend.expand(size))
        });
        self.end_expansion(outcome, size);
    }

    fn grow(&self, size: u64) -> Result<()> {
        if self.options.sync_before_snapshot
            && let Err(error) = self.parts.host.sync()
        {
            self.log(false, "expand-without-sync", &[("why", &error)]);
        }
        self.expand_replicas(size)
    }

    fn end_expansion(&self, outcome: Result<()>, size: u64) {
        let mut state = self.state();
        if let Err(error) = outcome {
            self.log(true, "expand", &[("size", &size), ("error", &error)]);
            if state.expansion_error.is_empty() {
                state.expansion_error = error.to_string();
                state.expansion_failed_at = self.precise_now();
            }
        }
        state.expanding = false;
        let size = state.size;
        drop(state);
        self.parts.path.resize(size);
        self.parts.path.set_expanding(false);
    }

    fn expand_replicas(&self, size: u64) -> Result<()> {
        let _work = self.work();
        let limits = self.state().limits;
        let usage = super::snapshot::usage(&self.ask_all());
        limits::check(usage, limits).map_err(Error::invalid)?;
        let pause = self.pause();
        let members = self.active();
        let timeout = self.timeout_for_all(&members);
        let answers = self.call_each(&members, &Call::Expand(size), Some(timeout));
        let results: Vec<_> = members
            .iter()
            .zip(answers)
            .map(|(member, answer)| {
                let failure = |error: CallError| ExpandError::of_call(&error.text, error.refused);
                let result = answer.map(drop).map_err(failure);
                (member.target.address.as_str(), member.mode, result)
            })
            .collect();
        let decision = expand::decide(&results);
        let text = decision.error.clone().unwrap_or_default();
        for index in &decision.faulted {
            if let Some(member) = members.get(*index) {
                self.fault(member.id, Fault::Expansion, &text);
            }
        }
        if decision.error.is_some() {
            let mut state = self.state();
            state.expansion_error.clone_from(&text);
            state.expansion_failed_at = self.precise_now();
        }
        if !decision.expanded {
            return Err(Error::invalid(text));
        }
        self.state().size = size;
        self.parts.path.resize(size);
        drop(pause);
        self.happened("expanded", &[("size", &size)]);
        Ok(())
    }

    /// The time with fractions of seconds.
    fn precise_now(&self) -> String {
        let now = i128::from(self.parts.host.now_ns());
        jiff::Timestamp::from_nanosecond(now)
            .map_or_else(|_| String::new(), |time| time.to_string())
    }
}
