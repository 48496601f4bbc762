//! Snapshots of all replicas at one moment, and the way back to one.

use super::{Call, CallError, Called, Controller, Fault, Member, Paused, modes};
use crate::rules::limits::{self, Usage};
use crate::rules::sabotage::{Bug, is};
use crate::rules::snapshot::{self, Decision, Said};
use crate::rules::start::State as ReplicaState;
use crate::rules::{Mode, Slot};
use dbs_core::{Error, Result};
use longhorn_wire::names::{check_new_snapshot, snapshot_disk};
use longhorn_wire::proto::ptypes;
use std::collections::HashMap;

impl Controller {
    /// Takes a snapshot of all replicas, between the same two writes on each; an empty name stands for
    /// a new one. Answers with the name. With `sync_before_snapshot` this machine's file systems are
    /// written out before, while I/O goes on.
    ///
    /// With `freeze`, the file systems on the frontend's block device are frozen meanwhile, so that nothing
    /// of what they had written is missing, nor half there; other file systems of the machine are left
    /// alone then. Where there are none, the snapshot is what it is without, and the log says so.
    ///
    /// # Errors
    /// The name or labels are impossible, a limit is reached, the name is taken, a file system cannot be
    /// frozen, all replicas are full or cannot do it, none is left.
    pub fn snapshot(
        &self,
        name: &str,
        labels: HashMap<String, String>,
        freeze: bool,
    ) -> Result<String> {
        let name = match name {
            "" => self.parts.host.unique_name(),
            name => name.to_owned(),
        };
        // What replicas would refuse, each in the middle of a pause, is refused here.
        check_new_snapshot(&name, labels.clone().into_iter().collect())?;
        self.check_snapshot(&name)?;
        if !freeze {
            self.sync();
        }
        let _work = self.work();
        self.check_snapshot(&name)?;
        let created = self.now();
        let call = Call::Snapshot { name: name.clone(), user_created: true, created, labels };
        // While I/O goes on: what they have in memory is written by it. It thaws last. Nobody is to wait
        // for a replica that hangs while they are frozen.
        if freeze {
            self.parts.path.flush();
        }
        let frozen = if freeze { self.freeze(&name)? } else { None };
        if freeze && frozen.is_none() {
            self.sync();
        }
        let pause = (!is(Bug::SnapshotWithoutPause)).then(|| self.pause());
        // It may have waited for a flush longer than file systems may be frozen.
        if frozen.as_ref().is_some_and(|frozen| !frozen.holds()) {
            return Err(Error::busy(format!(
                "snapshot {name} is not taken, as the file systems of the volume were thawed before I/O was \
                 paused; try again"
            )));
        }
        let members = self.active();
        let timeout = self.timeout_for_all(&members);
        let answers = self.call_each(&members, &call, Some(timeout));
        let outcome = self.settle_snapshot(&members, &answers);
        drop(pause);
        drop(frozen);
        outcome.inspect(|()| self.happened("snapshot", &[("name", &name)])).map(|()| name)
    }

    /// Thaws what is frozen for a snapshot: the process is about to end without it.
    pub fn thaw(&self) {
        self.parts.host.thaw();
    }

    /// Has this machine write out what its file systems have in memory, if that is asked for.
    fn sync(&self) {
        if self.options.sync_before_snapshot
            && let Err(error) = self.parts.host.sync()
        {
            self.log(false, "snapshot-without-sync", &[("why", &error)]);
        }
    }

    /// Freezes what is on the frontend's block device, if there is one.
    ///
    /// # Errors
    /// A file system cannot be frozen: whoever asked for that is not to take the snapshot for more than
    /// it is.
    fn freeze(&self, snapshot: &str) -> Result<Option<Box<dyn Paused>>> {
        let frontend = self.state().frontend.clone();
        let endpoint = frontend.map_or_else(String::new, |frontend| frontend.endpoint());
        let frozen = self.parts.host.freeze(&endpoint).map_err(|error| {
            error.context(format!(
                "snapshot {snapshot} is not taken, as a file system of the volume cannot be frozen"
            ))
        })?;
        if frozen.is_none() {
            let why = "no file system on a block device of this volume is mounted";
            self.log(false, "not-frozen", &[("snapshot", &snapshot), ("why", &why)]);
        }
        Ok(frozen)
    }

    /// Whether one more snapshot, of this name, may be taken.
    pub(super) fn check_snapshot(&self, name: &str) -> Result<()> {
        let replicas = self.ask_all();
        let limits = self.state().limits;
        limits::check(usage(&replicas), limits).map_err(Error::invalid)?;
        let disk = snapshot_disk(name);
        if replicas.iter().any(|replica| replica.disks.contains_key(&disk)) {
            return Err(Error::exists(format!("snapshot {disk} is already existing")));
        }
        Ok(())
    }

    /// What all replicas say of themselves that are part of the volume, and answer.
    pub(super) fn ask_all(&self) -> Vec<ptypes::Replica> {
        let answers = self.call_each(&self.active(), &Call::Get, self.timeout());
        answers.into_iter().filter_map(std::result::Result::ok).collect()
    }

    /// Faults those that lack the snapshot.
    pub(super) fn settle_snapshot(&self, members: &[Member], answers: &[Called]) -> Result<()> {
        let said: Vec<_> = answers
            .iter()
            .enumerate()
            .filter_map(|(index, answer)| {
                let said = match answer {
                    Ok(_) => Said::Done,
                    Err(error) => Said::of_error(&error.text, error.refused),
                };
                Some((Slot::new(index)?, said))
            })
            .collect();
        let (decision, faulted) = snapshot::decide(modes(members), &said);
        let texts: Vec<_> = members
            .iter()
            .zip(answers)
            .filter_map(|(member, answer)| Some((member, answer.as_ref().err()?)))
            .map(|(member, error)| super::failed(&member.target, error).to_string())
            .collect();
        let text = texts.join("; ");
        for slot in faulted.iter() {
            if let Some(member) = members.get(slot.index()) {
                self.fault(member.id, Fault::Snapshot, &format!("snapshot: {text}"));
            }
        }
        match decision {
            Decision::Done => Ok(()),
            Decision::Exists => Err(Error::exists(text)),
            Decision::NoSpace => Err(Error::no_space(text)),
            Decision::Refused => Err(Error::invalid(text)),
            Decision::Failed if text.is_empty() => {
                Err(Error::invalid(crate::rules::io::NO_BACKEND))
            }
            Decision::Failed => Err(Error::new(dbs_core::ErrorKind::Io, text)),
        }
    }

    /// Makes a snapshot's content that of the volume. No frontend may be up.
    ///
    /// # Errors
    /// A replica is being rebuilt, there is no such snapshot, the frontend is up, or no replica did it.
    pub fn revert(&self, name: &str) -> Result<()> {
        let _work = self.work();
        let disk = snapshot_disk(name);
        self.check_revert(name, &disk, &self.to_revert()?)?;
        if self.state().frontend.as_ref().is_some_and(|frontend| frontend.is_up()) {
            return Err(Error::busy("volume frontend enabled, aborting snapshot revert"));
        }
        self.parts.path.flush();
        // A block must not be healed with what it held before.
        let _pause = self.parts.path.pause(true);
        // Some may have failed since.
        let members = self.to_revert()?;
        let (created, revert) = (self.now(), self.parts.host.unique_name());
        let call = Call::Revert { disk: disk.clone(), created, revert };
        let timeout = self.timeout_for_all(&members);
        let answers = self.call_each(&members, &call, Some(timeout));
        self.settle_revert(&disk, &members, &answers)
            .inspect(|()| self.happened("reverted", &[("snapshot", &name)]))
    }

    /// The replicas that are to go back, if they may.
    fn to_revert(&self) -> Result<Vec<Member>> {
        let members = self.active();
        if members.is_empty() || members.iter().any(|member| member.mode != Mode::Rw) {
            return Err(Error::invalid(
                "not valid state to revert, rebuilding in process or all replica are in ERR state",
            ));
        }
        Ok(members)
    }

    /// Faults those that have not gone back, or of which that is not known.
    fn settle_revert(&self, disk: &str, members: &[Member], answers: &[Called]) -> Result<()> {
        let done = answers.iter().any(std::result::Result::is_ok);
        let did_nothing = |error: &CallError| {
            let said = Said::of_error(&error.text, error.refused);
            matches!(said, Said::NoSpace | Said::Refused)
        };
        let mut texts = Vec::new();
        for (member, answer) in members.iter().zip(answers) {
            let Err(error) = answer else { continue };
            texts.push(super::failed(&member.target, error).to_string());
            // Who did nothing is as all are where nobody did it.
            if (done || !did_nothing(error)) && !is(Bug::KeepUnreverted) {
                self.fault(member.id, Fault::Revert, &format!("revert to {disk}: {error}"));
            }
        }
        if done {
            return Ok(());
        }
        let texts = texts.join("; ");
        Err(Error::invalid(format!("failed to revert to {disk} on all replicas: {texts}")))
    }

    fn check_revert(&self, name: &str, disk: &str, members: &[Member]) -> Result<()> {
        let mut found = None;
        // No other change can be made meanwhile.
        let answers = self.call_each(members, &Call::Get, self.timeout());
        for (member, answer) in members.iter().zip(answers) {
            let replica = answer.map_err(|error| super::failed(&member.target, &error))?;
            found = found.or_else(|| replica.disks.get(disk).map(|disk| disk.removed));
        }
        match found {
            None => Err(Error::not_found(format!(
                "cannot do revert since the target snapshot {name} is not found"
            ))),
            Some(true) => Err(Error::invalid(format!("cannot revert to removed snapshot {name}"))),
            Some(false) => Ok(()),
        }
    }
}

/// The most that any of them says; those that do not know do not count.
pub(super) fn usage(replicas: &[ptypes::Replica]) -> Option<Usage> {
    let counting = replicas
        .iter()
        .filter(|r| ReplicaState::parse(&r.state).is_some_and(ReplicaState::counts_snapshots));
    limits::usage(counting.map(|replica| Usage {
        count: u32::try_from(replica.snapshot_count_usage).unwrap_or(0),
        total: u32::try_from(replica.snapshot_count_total).unwrap_or(0),
        size: u64::try_from(replica.snapshot_size_usage).unwrap_or(0),
        head: u64::try_from(replica.head_file_size).unwrap_or(0),
    }))
}
