//! Replicas that come and go.

use super::snapshot::usage;
use super::start::must_be_closed;
use super::{Call, Controller, Fault, Member, Target};
use crate::rules::sabotage::{Bug, is};
use crate::rules::{Mode, REPLICAS_MAX, limits, rebuild};
use dbs_core::{Error, Result};
use longhorn_wire::proto::ptypes;
use std::collections::HashMap;

impl Controller {
    /// Connects to a replica, opens it and makes it part of the volume in this mode; with
    /// `snapshot_required` all replicas take one in the same moment, from which on it gets what they
    /// get. Nothing happens if it is known already.
    ///
    /// # Errors
    /// Another one is being rebuilt, the volume is being expanded, a limit is reached; it is not closed,
    /// not reached, of another size, or could not take the snapshot.
    pub fn create_replica(
        &self,
        address: &str,
        instance: &str,
        snapshot_required: bool,
        mode: Mode,
    ) -> Result<()> {
        let _work = self.work();
        let (present, size, expanding) = {
            let state = self.state();
            if state.members.iter().any(|member| member.target.address == address) {
                return Ok(());
            }
            if state.members.len() >= REPLICAS_MAX {
                return Err(Error::invalid(format!(
                    "a volume has at most {REPLICAS_MAX} replicas; remove one first"
                )));
            }
            let modes: Vec<_> = state.members.iter().map(|member| member.mode).collect();
            (modes, state.size, state.expanding)
        };
        rebuild::check_add(&present, expanding).map_err(Error::invalid)?;
        let target = Target { address: address.to_owned(), instance: instance.to_owned() };
        let info = self.call(&target, Call::Get).map_err(|e| super::failed(&target, &e))?;
        must_be_closed(&info).map_err(Error::invalid)?;
        rebuild::check_mode(&present, mode).map_err(Error::invalid)?;
        let id = {
            let mut state = self.state();
            state.next_id += 1;
            state.next_id
        };
        let connected = self.parts.path.connect(id, address);
        connected.map_err(|error| Error::io(error, format!("the data port of {address}")))?;
        // Upstream's replica would refuse to be told twice, by whoever has it filled.
        let marks = mode == Mode::Wo && snapshot_required && info.dbs.is_some();
        let member = Member { id, target, mode, marked: marks };
        let mut counted = None;
        let joined = self.open_new(&member, size).and_then(|(its_size, opened)| {
            if size == 0 {
                let mut state = self.state();
                state.size = its_size;
                state.sector_size = u64::try_from(opened.sector_size).unwrap_or(0);
                drop(state);
                self.parts.path.resize(its_size);
            }
            if marks {
                // Before the mark: a marked replica with a higher count keeps a volume from starting (`start::ahead`).
                if !self.options.policy.counter_disabled {
                    counted = Some(opened.revision_counter);
                    let set = self.call(&member.target, Call::SetCounter(0));
                    set.map_err(|error| super::failed(&member.target, &error))?;
                }
                self.mark_incomplete(&member.target, true)?;
            }
            self.join(&member, snapshot_required)
        });
        if joined.is_err() {
            self.parts.path.remove(id);
            if marks && !info.rebuilding {
                // What it has is what it had, and so it counts. The mark goes last: a start takes no marked one.
                let set = |counter| self.call(&member.target, Call::SetCounter(counter)).is_ok();
                if counted.is_none_or(set) {
                    let _ = self.mark_incomplete(&member.target, false);
                }
            }
            self.parts.replicas.close_soon(&member.target);
        }
        joined
    }

    /// Takes the mark of a replica away that it lacks something. Of upstream's, only who filled it may.
    pub(super) fn mark_complete(&self, target: &Target) -> Result<()> {
        let info = self.call(target, Call::Get).map_err(|error| super::failed(target, &error))?;
        if info.rebuilding && info.dbs.is_some() {
            self.mark_incomplete(target, false)
        } else {
            Ok(())
        }
    }

    /// Marks a replica as one that lacks something, which outlives it and this controller; or takes the mark away.
    pub(super) fn mark_incomplete(&self, target: &Target, incomplete: bool) -> Result<()> {
        let marked = self.call(target, Call::SetRebuilding(incomplete)).map(drop);
        marked.map_err(|error| super::failed(target, &error))
    }

    /// Opens a new replica, which must be of the volume's size if it has one; answers with that, and
    /// with what an open one says of itself.
    fn open_new(&self, member: &Member, size: u64) -> Result<(u64, ptypes::Replica)> {
        let target = &member.target;
        // Only those of a start may be with an older controller.
        let call = Call::Open { upgrade: false, expected_size: size };
        self.call(target, call).map_err(|error| super::failed(target, &error))?;
        let info = self.call(target, Call::Get).map_err(|error| super::failed(target, &error))?;
        let its: u64 = info.size.parse().map_err(|_| {
            let address = &target.address;
            Error::invalid(format!("{address} says that its size is {:?}", info.size))
        })?;
        if size != 0 && its != size && !is(Bug::IgnoreSize) {
            return Err(Error::invalid(format!(
                "the size of {} is {its}, the size of the volume is {size}; expand the replica \
                 before it is added",
                target.address
            )));
        }
        Ok((its, info))
    }

    /// Makes an open replica part of the volume.
    fn join(&self, member: &Member, snapshot_required: bool) -> Result<()> {
        let is_first = self.active().is_empty();
        if snapshot_required && !is_first {
            let limits = self.state().limits;
            limits::check(usage(&self.ask_all()), limits).map_err(Error::invalid)?;
        }
        let name = self.parts.host.unique_name();
        let (created, labels) = (self.now(), HashMap::new());
        let call = Call::Snapshot { name, user_created: false, created, labels };
        let _pause = self.pause();
        // Some may have failed since.
        let before = self.active();
        if !is_first && before.iter().all(|other| other.mode != Mode::Rw) {
            return Err(Error::invalid("cannot find any healthy replica"));
        }
        if snapshot_required {
            let mut members = before.clone();
            members.push(member.clone());
            // That of the new one, which is empty, is nothing to go on with.
            let timeout = self.timeout_for_all(&before);
            let mut answers = self.call_each(&members, &call, Some(timeout));
            let own = answers.pop();
            self.settle_first(&before, &answers)?;
            if let Some(Err(error)) = own {
                return Err(super::failed(&member.target, &error));
            }
        }
        self.state().members.push(member.clone());
        let fields: [(&str, &dyn std::fmt::Display); 2] =
            [("replica", &member.target.address), ("mode", &member.mode)];
        self.happened("replica-added", &fields);
        if !self.parts.path.set_mode(member.id, member.mode) {
            self.fault(member.id, Fault::Data, "it failed before it was added");
        }
        Ok(())
    }

    /// What the replicas that were there before said, if there were any.
    fn settle_first(&self, before: &[Member], answers: &[super::Called]) -> Result<()> {
        match before.is_empty() {
            true => Ok(()),
            false => self.settle_snapshot(before, answers),
        }
    }

    /// Takes a replica out of the volume and closes it, without waiting long. Nothing happens if it is
    /// not known.
    ///
    /// # Errors
    /// It is the last complete one, and the frontend is up.
    pub fn delete_replica(&self, address: &str) -> Result<()> {
        let _work = self.work();
        let member = {
            let mut state = self.state();
            let place = state.members.iter().position(|member| member.target.address == address);
            let Some(place) = place else { return Ok(()) };
            let up = state.frontend.as_ref().is_some_and(|frontend| frontend.is_up());
            let mut complete = state.members.iter().filter(|member| member.mode == Mode::Rw);
            // One that failed, or is being rebuilt, is nothing to go on with.
            let last = complete.next().is_some_and(|one| one.target.address == address)
                && complete.next().is_none();
            if up && (last || state.members.len() == 1) {
                return Err(Error::busy("cannot remove last replica if volume is up"));
            }
            state.members.remove(place)
        };
        // First out of use: what is in flight to it fails there, and only there.
        self.parts.path.set_mode(member.id, Mode::Err);
        self.parts.path.remove(member.id);
        self.parts.replicas.close_soon(&member.target);
        self.happened("replica-removed", &[("replica", &address)]);
        Ok(())
    }

    /// Sets the mode of a replica, `RW` or `ERR`; one that is `ERR` stays so, silently.
    ///
    /// # Errors
    /// Another mode, or an unknown replica.
    pub fn update_replica(&self, address: &str, mode: Mode) -> Result<()> {
        if mode == Mode::Wo {
            return Err(Error::invalid(format!("cannot set to mode {mode}")));
        }
        let Member { id, target, .. } = self.replica(address)?;
        if mode == Mode::Err {
            // Does not wait for what may be waiting for this very replica.
            self.fault(id, Fault::Request, "it was asked for");
            return Ok(());
        }
        let _work = self.work();
        // Between two writes, as at the end of a rebuild.
        let pause = self.parts.path.pause(false);
        self.set_mode(id, mode);
        drop(pause);
        // Whoever says so knows that it lacks nothing. As long as the mark stays, no controller starts with it.
        if self.replica(address)?.mode == Mode::Rw {
            self.mark_complete(&target)?;
        }
        Ok(())
    }
}
