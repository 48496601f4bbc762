//! Settings that a running volume and its replicas share.

use super::{Call, CallError, Controller, Fault};
use crate::rules::call_timeout::CallTimeout;
use crate::rules::{limits, timeout};
use dbs_core::{Error, Result};

impl Controller {
    /// Sets whether a discard marks snapshots as removed; replicas that do not take it become `ERR`.
    ///
    /// # Errors
    /// None took it; or one has not heard of it, which leaves that one as it is: it is to be set again.
    pub fn set_unmap_mark(&self, enabled: bool) -> Result<()> {
        let _work = self.work();
        let before = std::mem::replace(&mut self.state().unmap_mark, enabled);
        let members = self.active();
        let answers = self.call_each(&members, &Call::SetUnmapMark(enabled), self.timeout_to_set());
        let never_sent = |error: &CallError| error.was_never_sent();
        if answers.iter().any(|answer| answer.as_ref().is_err_and(never_sent)) {
            self.state().unmap_mark = before;
        }
        let all_failed = answers.iter().all(std::result::Result::is_err);
        if all_failed && !members.is_empty() {
            return Err(Error::invalid(format!(
                "failed to correct Unmatched flag UnmapMarkSnapChainRemoved for all replicas, \
                 expect {enabled}"
            )));
        }
        let mut outcome = Ok(());
        for (member, answer) in members.iter().zip(answers) {
            match answer {
                Err(error) if never_sent(&error) => {
                    let error = super::failed(&member.target, &error);
                    outcome = Err(error.context("setting the unmap mark, which others have set"));
                }
                Err(error) => {
                    let why = format!("setting the unmap mark: {error}");
                    self.fault(member.id, Fault::Setting, &why);
                }
                Ok(_) => {}
            }
        }
        outcome
    }

    /// Sets how many snapshots there may be.
    ///
    /// # Errors
    /// There are more, or a replica did not take it.
    pub fn set_snapshot_max_count(&self, count: u32) -> Result<()> {
        let _work = self.work();
        let usage = super::snapshot::usage(&self.ask_all());
        limits::check_count(count, usage).map_err(Error::invalid)?;
        self.state().limits.count = count;
        self.tell_all(&Call::SetSnapshotMaxCount(count), &format!("SnapshotMaxCount to {count}"))
    }

    /// Sets how many bytes all snapshots may hold, 0 for any number.
    ///
    /// # Errors
    /// They hold more, or a replica did not take it.
    pub fn set_snapshot_max_size(&self, size: u64) -> Result<()> {
        let _work = self.work();
        let usage = super::snapshot::usage(&self.ask_all());
        limits::check_size(size, usage).map_err(Error::invalid)?;
        self.state().limits.size = size;
        self.tell_all(&Call::SetSnapshotMaxSize(size), &format!("SnapshotMaxSize to {size}"))
    }

    fn tell_all(&self, call: &Call, what: &str) -> Result<()> {
        let members = self.active();
        let answers = self.call_each(&members, call, self.timeout_to_set());
        let failed = members.iter().zip(answers).find_map(|(member, answer)| {
            let address = &member.target.address;
            answer.err().map(|error| {
                format!("failed to set flag {what} in replica {address}, err: {error}")
            })
        });
        failed.map_or(Ok(()), |text| Err(Error::invalid(text)))
    }

    /// How long replicas are waited for that make a setting durable, once one has: no other change can be made meanwhile.
    fn timeout_to_set(&self) -> Option<CallTimeout> {
        Some(CallTimeout::among_equals(timeout::long(self.options.short_timeout)))
    }

    /// From how many replicas at once a rebuild copies.
    #[must_use]
    pub fn sync_limit(&self) -> u32 {
        self.state().sync_limit
    }

    /// Sets from how many replicas at once a rebuild copies.
    ///
    /// # Errors
    /// Less than one.
    pub fn set_sync_limit(&self, limit: i32) -> Result<()> {
        match u32::try_from(limit) {
            Ok(limit) if limit > 0 => {
                self.state().sync_limit = limit;
                Ok(())
            }
            _ => Err(Error::invalid(format!(
                "invalid concurrent sync limit {limit}, which should be a positive integer"
            ))),
        }
    }
}
