//! The controller's steps of a rebuild. What moves the layers is the target's sync agent; who calls for
//! all of it is the command line or a manager.

use super::{Call, Controller, Fault, Member, Target, disks, parent};
use crate::rules::Mode;
use crate::rules::rebuild::{self, File, Tree, Verify};
use crate::rules::sabotage::{Bug, is};
use dbs_core::{Error, ErrorKind, Result};
use std::collections::BTreeMap;

impl Controller {
    /// Makes a replica in mode `WO` ready for the layers of the others: what they lack is removed from
    /// it, and its head gets the metadata of theirs. Answers with the files that it is to get.
    ///
    /// I/O goes on: nothing here depends on a write, and nothing that a write depends on is changed.
    ///
    /// # Errors
    /// It is unknown, in another mode, or no replica is complete; a call failed.
    pub fn prepare_rebuild(&self, address: &str, instance: &str) -> Result<Vec<File>> {
        let _work = self.work();
        let (member, source) = self.pair(address, instance)?;
        rebuild::check_prepare(address, member.mode).map_err(Error::invalid)?;
        let (target, source) = (&member.target, &source.target);
        if !self.options.policy.counter_disabled {
            let set = self.call(target, Call::SetCounter(0));
            set.map_err(|e| super::failed(target, &e).context("failed to set revision counter"))?;
        }
        let (from_disks, from_head) = self.disks_of(source)?;
        let (to_disks, to_head) = self.disks_of(target)?;
        let plan = rebuild::plan(&from_disks, &to_disks);
        for disk in &plan.remove {
            let removed = self.call(target, Call::RemoveDisk(disk.clone()));
            removed.map_err(|error| {
                super::failed(target, &error).context(format!("cannot remove disk {disk}"))
            })?;
        }
        if !plan.remove.is_empty() {
            let disks = plan.remove.join(" ");
            let fields: [(&str, &dyn std::fmt::Display); 2] =
                [("replica", &target.address), ("disks", &disks)];
            self.log(false, "extra-disks-removed", &fields);
        }
        let (from, to) = (format!("{from_head}.meta"), format!("{to_head}.meta"));
        let copied = self.parts.replicas.copy_file((source, &from), (target, &to));
        copied.map_err(|error| super::failed(target, &error).context(format!("copying {to}")))?;
        Ok(plan.files)
    }

    /// Takes a rebuilt replica as complete if it has exactly the layers of a complete one; it becomes
    /// `ERR` otherwise. Nothing happens if it is complete already.
    ///
    /// # Errors
    /// It is not complete; it is still being rebuilt, or is to be, or there was no connection for a call, which leaves
    /// it as it is.
    pub fn verify_rebuild(&self, address: &str, instance: &str) -> Result<()> {
        let _work = self.work();
        let (member, source) = match self.pair(address, instance) {
            Ok(pair) => pair,
            Err(error) => {
                if let Ok(member) = self.replica(address)
                    && member.mode == Mode::Wo
                {
                    self.fault(
                        member.id,
                        Fault::Rebuild,
                        &format!("verifying its rebuild: {error}"),
                    );
                }
                return Err(error);
            }
        };
        match rebuild::verify(address, member.mode) {
            Verify::Complete => {
                self.unmark(&member.target);
                return Ok(());
            }
            Verify::Refuse(text) => return Err(Error::invalid(text)),
            Verify::Compare => {}
        }
        // An agent that does not say is no reason: upstream's controller does not ask.
        let status = self.parts.replicas.rebuild_status(&member.target).unwrap_or_default();
        if status.running && !is(Bug::SkipVerify) {
            return Err(Error::busy(format!("{address} is still being rebuilt")));
        }
        if status.error.is_empty() {
            self.check_filled(&member)?;
        }
        let verified = match status.error.is_empty() || is(Bug::SkipVerify) {
            true => self.compare(&member, &source),
            false => Err(Error::invalid(format!("the rebuild failed: {}", status.error))),
        };
        let verified = verified.and_then(|()| self.promote(&member, &source));
        match &verified {
            Ok(()) => self.unmark(&member.target),
            // For want of something here perhaps: nobody has said anything of it.
            Err(error) if error.kind() == ErrorKind::Busy => {}
            Err(error) => {
                self.fault(member.id, Fault::Rebuild, &format!("verifying its rebuild: {error}"));
            }
        }
        verified
    }

    /// Takes the mark away that a replica is being rebuilt: whoever asked for the rebuild does so as well, unless
    /// it has ended by now, and no start would take the replica.
    fn unmark(&self, target: &Target) {
        if let Err(error) = self.mark_complete(target) {
            self.log(
                true,
                "rebuilding-mark-stays",
                &[("replica", &target.address), ("why", &error)],
            );
        }
    }

    /// Whether all came in that a rebuild was to bring, as far as the replica says: names of layers tell
    /// nothing of one that was in the volume before.
    fn check_filled(&self, Member { target, marked, .. }: &Member) -> Result<()> {
        let info = self.call(target, Call::Get).map_err(|error| super::failed(target, &error))?;
        let is_marked = info.rebuilding || info.dbs.is_none();
        let unfilled = match info.dbs.unwrap_or_default().unfilled {
            // A call that came late: without the mark it does not say what it lacks. Nor would it at the next start.
            _ if *marked && !is_marked && !is(Bug::TrustUnmarked) => {
                self.mark_incomplete(target, true)?;
                "somebody has taken its mark away; remove it, and add it again".to_owned()
            }
            unfilled => unfilled,
        };
        if unfilled.is_empty() || is(Bug::SkipVerify) || is(Bug::TrustUnfilled) {
            return Ok(());
        }
        Err(Error::busy(format!("{} is still being rebuilt: {unfilled}", target.address)))
    }

    fn compare(&self, member: &Member, source: &Member) -> Result<()> {
        let (from, to) = (self.tree_of(&source.target)?, self.tree_of(&member.target)?);
        let from = (source.target.address.as_str(), &from);
        let to = (member.target.address.as_str(), &to);
        rebuild::compare(from, to).map_err(Error::invalid)
    }

    fn tree_of(&self, target: &Target) -> Result<Tree> {
        let info = self.call(target, Call::Get).map_err(|error| super::failed(target, &error))?;
        let (disks, head) = disks(target, &info)?;
        let parent = |disk: &str| parent(&info, disk).unwrap_or_default().to_owned();
        let parents = disks.into_keys().map(|disk| (disk.clone(), parent(&disk)));
        Ok(Tree { parents: parents.collect(), head: parent(&head) })
    }

    /// Between two writes: the counters become equal, and the replica complete.
    fn promote(&self, member: &Member, source: &Member) -> Result<()> {
        let _pause = self.pause();
        if !self.options.policy.counter_disabled && !is(Bug::SkipCounterCopy) {
            // The one compared with may have failed meanwhile: then it has not counted what others have since.
            let others = self.active();
            let is_complete = |other: &&Member| other.mode == Mode::Rw && other.id != member.id;
            let its = others.iter().filter(is_complete).find(|other| other.id == source.id);
            let Some(from) = its.or_else(|| others.iter().find(is_complete)) else {
                return Err(Error::invalid("cannot find any healthy replica"));
            };
            let (from, to) = (&from.target, &member.target);
            let info = self.call_within(from, Call::Get, self.timeout_for_one(false));
            let info = info.map_err(|error| super::failed(from, &error))?;
            let state = crate::rules::start::State::parse(&info.state);
            if !state.is_some_and(crate::rules::start::State::is_complete) {
                let (address, state) = (&from.address, &info.state);
                return Err(Error::invalid(format!(
                    "{address}: invalid state {state} for getting revision counter"
                )));
            }
            let set = Call::SetCounter(info.revision_counter);
            let set = self.call_within(to, set, self.timeout_for_one(true));
            set.map_err(|e| super::failed(to, &e).context("failed to set revision counter"))?;
        }
        // The source may have failed meanwhile; what was compared with it is still what others have.
        if !self.active().iter().any(|other| other.mode == Mode::Rw) {
            return Err(Error::invalid("cannot find any healthy replica"));
        }
        self.set_mode(member.id, Mode::Rw);
        match self.replica(&member.target.address)?.mode {
            Mode::Rw => Ok(()),
            mode => Err(Error::invalid(format!("{} became {mode}", member.target.address))),
        }
    }

    /// A replica by its address, and the complete one it is compared with: the last, as upstream has it.
    fn pair(&self, address: &str, instance: &str) -> Result<(Member, Member)> {
        let mut state = self.state();
        let members = &mut state.members;
        let member = members.iter_mut().find(|member| member.target.address == address);
        let Some(member) = member else {
            return Err(Error::not_found(format!("cannot find replica {address}")));
        };
        if !instance.is_empty() {
            instance.clone_into(&mut member.target.instance);
        }
        let member = member.clone();
        let source = state
            .members
            .iter()
            .rfind(|other| other.mode == Mode::Rw && other.id != member.id)
            .cloned();
        match source {
            Some(source) => Ok((member, source)),
            None => Err(Error::invalid("cannot find any healthy replica")),
        }
    }

    fn disks_of(&self, target: &Target) -> Result<(BTreeMap<String, u64>, String)> {
        let info = self.call(target, Call::Get).map_err(|error| super::failed(target, &error))?;
        disks(target, &info)
    }
}
