//! Start and end of a volume.

use super::{Call, Called, Controller, Fault, Member, Mode, Offer, Target, parent};
use crate::rules::call_timeout::CallTimeout;
use crate::rules::start::{self, Facts, Policy, Probe, Start, StartError, State as ReplicaState};
use crate::rules::{REPLICAS_MAX, ReplicaId, timeout};
use dbs_core::{Error, Result};
use longhorn_wire::proto::ptypes;
use std::sync::atomic::Ordering;

/// A replica at a start.
struct Candidate {
    id: ReplicaId,
    target: Target,
    /// Whether it was opened, so that it is to be closed if it is not taken.
    opened: bool,
    probe: Probe,
    info: ptypes::Replica,
}

impl Controller {
    /// Connects to these replicas, opens them, and takes those that are fit and agree; the others are
    /// listed as `ERR`. The volume is to have `size` bytes, and had `current_size` when it was last
    /// seen (0 if that is not known). Does nothing without addresses or if there are replicas already.
    /// The frontend starts last.
    ///
    /// # Errors
    /// No replica is good; the frontend does not start. The replicas are closed again then.
    pub fn start(
        &self,
        addresses: &[String],
        size: u64,
        current_size: u64,
    ) -> std::result::Result<(), StartError> {
        let _work = self.work();
        if addresses.is_empty() || !self.state().members.is_empty() {
            return Ok(());
        }
        start::check_addresses(addresses)?;
        if addresses.len() > REPLICAS_MAX {
            let text = format!("a volume has at most {REPLICAS_MAX} replicas");
            return Err(StartError::Other(text));
        }
        // Later ones have nobody to share anything with.
        let upgrade = self.takes_over.swap(false, Ordering::SeqCst);
        let policy = Policy { upgrade, ..self.options.policy };
        let mut candidates = self.open_all(addresses, current_size, policy);
        let outcome = self
            .choose(&mut candidates, addresses, (size, current_size), policy)
            .and_then(|chosen| self.take(&candidates, chosen, addresses))
            .and_then(|()| if upgrade { Ok(()) } else { self.name_heads(&candidates, addresses) });
        if let Err(error) = outcome {
            self.state().members.clear();
            for candidate in &candidates {
                self.let_go(candidate);
            }
            return Err(error);
        }
        if let Some(kind) = self.options.frontend.clone()
            && let Err(error) = self.bring_up(&kind, upgrade)
        {
            // What went wrong first is what counts.
            let _ = self.close_all();
            return Err(StartError::Other(error.to_string()));
        }
        Ok(())
    }

    /// Connects to and opens all of them, each as far as it goes.
    fn open_all(&self, addresses: &[String], current_size: u64, policy: Policy) -> Vec<Candidate> {
        let mut candidates: Vec<_> = addresses
            .iter()
            .map(|address| {
                let mut state = self.state();
                state.next_id += 1;
                Candidate {
                    id: state.next_id,
                    target: Target { address: address.clone(), instance: String::new() },
                    opened: false,
                    probe: Probe::Failed(String::new()),
                    info: ptypes::Replica::default(),
                }
            })
            .collect();
        let mut going: Vec<_> = candidates.iter_mut().collect();
        going = self.step(going, &Call::Get);
        going.retain_mut(|candidate| {
            let outcome = must_be_closed(&candidate.info).and_then(|()| {
                let address = &candidate.target.address;
                let connected = self.parts.path.connect(candidate.id, address);
                connected.map_err(|error| format!("its data port: {error}"))
            });
            let failed = outcome.map_err(|why| candidate.probe = Probe::Failed(why));
            failed.is_ok()
        });
        let open = Call::Open { upgrade: policy.upgrade, expected_size: current_size };
        going = self.step(going, &open);
        for candidate in &mut going {
            candidate.opened = true;
        }
        going = self.step(going, &Call::Get);
        if addresses.len() == 1 && going.iter().any(|candidate| candidate.info.rebuilding) {
            going = self.take_incomplete(going, policy);
        }
        for candidate in going {
            candidate.probe = probe(&candidate.info);
        }
        candidates
    }

    /// A lone replica that is marked as being rebuilt. One of ours may lack acknowledged data: it is taken if that was
    /// asked for. It may be complete as well: the mark goes right after it has become `RW`, and nobody may have been left
    /// to take it away. One of upstream's is taken as by upstream's controller, as only the caller takes its mark away.
    fn take_incomplete<'a>(
        &self,
        mut going: Vec<&'a mut Candidate>,
        policy: Policy,
    ) -> Vec<&'a mut Candidate> {
        let ours = going.iter().any(|candidate| candidate.info.dbs.is_some());
        let taken = policy.salvage || !ours;
        let why = match taken {
            true => {
                "it is marked as being rebuilt: the volume may lack data, or the rebuild had ended and nobody has taken \
                 the mark away"
            }
            false => {
                "it is marked as being rebuilt: it may lack data, or the rebuild had ended and nobody has taken the mark \
                 away; start with a complete replica that is not older, or take this one as it is with --salvageRequested"
            }
        };
        for candidate in &going {
            let address = &candidate.target.address;
            self.log(true, "incomplete-replica", &[("replica", address), ("why", &why)]);
        }
        if taken {
            going = self.step(going, &Call::SetRebuilding(false));
            going = self.step(going, &Call::Get);
        }
        going
    }

    /// Makes the call to all of them; those that answer stay. One that hangs shows at the first question, and is
    /// not waited for long once another has answered. One that answered that, and takes long to open a large
    /// store, may be the only one that has all writes: it has its time.
    fn step<'a>(&self, candidates: Vec<&'a mut Candidate>, call: &Call) -> Vec<&'a mut Candidate> {
        let calls = candidates.iter().map(|c| (c.target.clone(), call.clone())).collect();
        let hurry = matches!(call, Call::Get);
        let limit = timeout::long(self.options.short_timeout);
        let timeout = hurry.then(|| CallTimeout::among_equals(limit));
        let answers = self.parts.replicas.call_all(calls, timeout);
        let settle = |(candidate, answer): (&'a mut Candidate, Called)| match answer {
            Ok(info) => {
                candidate.info = info;
                Some(candidate)
            }
            Err(error) => {
                candidate.probe = match error.unavailable {
                    true => Probe::Unavailable(error.text),
                    false => Probe::Failed(error.text),
                };
                None
            }
        };
        candidates.into_iter().zip(answers).filter_map(settle).collect()
    }

    /// Which of them are fit and agree.
    fn choose(
        &self,
        candidates: &mut [Candidate],
        addresses: &[String],
        (size, current_size): (u64, u64),
        policy: Policy,
    ) -> std::result::Result<Start, StartError> {
        let probes: Vec<_> = candidates.iter().map(|candidate| candidate.probe.clone()).collect();
        let chosen = start::choose(size, current_size, addresses, &probes);
        let mut chosen = chosen.inspect_err(|_| {
            self.log_refused(candidates, &start::weigh(size, current_size, &probes));
        })?;
        let fit = |chosen: &Start| -> Vec<usize> {
            let all = chosen.refused.iter().enumerate();
            all.filter(|(_, why)| why.is_none()).map(|(index, _)| index).collect()
        };
        let mark = self.state().unmap_mark;
        for index in fit(&chosen) {
            let Candidate { target, info, .. } = &candidates[index];
            if info.unmap_mark_disk_chain_removed != mark {
                let error = self.call(target, Call::SetUnmapMark(mark)).err();
                chosen.refused[index] = error.map(|error| error.text);
            }
        }
        let agreeing = fit(&chosen);
        let infos = candidates.iter().map(|candidate| &candidate.info);
        let disks: Vec<Vec<&str>> =
            infos.clone().map(|info| info.disks.keys().map(String::as_str).collect()).collect();
        let all: Vec<_> = infos.zip(&disks).map(|(info, disks)| facts(info, disks)).collect();
        let facts: Vec<_> = agreeing.iter().map(|index| all[*index]).collect();
        for (index, why) in agreeing.iter().zip(start::agree(policy, &facts)) {
            chosen.refused[*index] = why;
        }
        if let Some(index) = start::ahead(policy, &probes, &all, &chosen) {
            self.log_refused(candidates, &chosen);
            return Err(StartError::Other(in_the_way(&candidates[index], chosen.size)));
        }
        if fit(&chosen).is_empty() {
            self.log_refused(candidates, &chosen);
            return Err(StartError::NoReplica(addresses.to_vec()));
        }
        Ok(chosen)
    }

    fn log_refused(&self, candidates: &[Candidate], weighed: &Start) {
        for (candidate, refused) in candidates.iter().zip(&weighed.refused) {
            if let Some(why) = refused {
                let address = &candidate.target.address;
                self.log(true, "replica-refused", &[("replica", address), ("why", why)]);
            }
        }
    }

    /// Makes them the volume's replicas.
    fn take(
        &self,
        candidates: &[Candidate],
        chosen: Start,
        addresses: &[String],
    ) -> std::result::Result<(), StartError> {
        {
            let mut state = self.state();
            state.size = chosen.size;
            state.sector_size = chosen.sector_size;
            state.members = candidates
                .iter()
                .zip(&chosen.refused)
                .map(|(candidate, refused)| Member {
                    id: candidate.id,
                    target: candidate.target.clone(),
                    mode: if refused.is_some() { Mode::Err } else { Mode::Rw },
                    marked: false,
                })
                .collect();
        }
        self.parts.path.resize(chosen.size);
        self.log_refused(candidates, &chosen);
        for (candidate, refused) in candidates.iter().zip(&chosen.refused) {
            match refused {
                None => self.set_mode(candidate.id, Mode::Rw),
                Some(_) => {
                    self.faults.count(Fault::Start);
                    self.let_go(candidate);
                }
            }
        }
        // One may have failed while the others were looked at.
        match self.active().is_empty() {
            true => Err(StartError::NoReplica(addresses.to_vec())),
            false => Ok(()),
        }
    }

    /// Gives the heads of the volume's replicas one name, where one of ours does not know what made its own: a revert to
    /// where they lie that is cut off shows at the next start then.
    fn name_heads(
        &self,
        candidates: &[Candidate],
        addresses: &[String],
    ) -> std::result::Result<(), StartError> {
        let revert =
            |candidate: &Candidate| candidate.info.dbs.as_ref().map(|dbs| dbs.revert.clone());
        let (mut known, mut unknown) = (None, Vec::new());
        for member in self.active() {
            let candidate = candidates.iter().find(|candidate| candidate.id == member.id);
            match candidate.and_then(revert) {
                Some(Some(its)) => known = Some(its),
                Some(None) => unknown.push(member),
                // It is upstream's, and has no names.
                None => {}
            }
        }
        if unknown.is_empty() {
            return Ok(());
        }
        // What one knows holds for all: they have agreed.
        let revert = known.unwrap_or_else(|| self.parts.host.unique_name());
        let call = Call::Revert { disk: String::new(), created: String::new(), revert };
        // One of an older version refuses, and goes on without a name.
        let _answers = self.call_each(&unknown, &call, self.timeout());
        // One may have been taken by a newer controller, and then all have.
        match self.active().is_empty() {
            true => Err(StartError::Unavailable(addresses.to_vec())),
            false => Ok(()),
        }
    }

    fn let_go(&self, candidate: &Candidate) {
        self.parts.path.remove(candidate.id);
        if candidate.opened {
            self.parts.replicas.close_soon(&candidate.target);
        }
    }

    /// Ends the frontend, then closes all replicas. The volume can be started again.
    ///
    /// # Errors
    /// The frontend or a replica did not end well; the volume is shut down nevertheless.
    pub fn shutdown(&self) -> Result<()> {
        let stopped = self.shutdown_frontend();
        let _work = self.work();
        // One may have come up meanwhile.
        let stopped = stopped.and_then(|()| self.shutdown_frontend());
        let closed = self.close_all();
        stopped.and(closed)
    }

    /// Closes all replicas and forgets them.
    fn close_all(&self) -> Result<()> {
        let members = std::mem::take(&mut self.state().members);
        for member in &members {
            self.parts.path.remove(member.id);
        }
        let active: Vec<_> =
            members.into_iter().filter(|member| member.mode.is_written()).collect();
        let answers = self.call_each(&active, &Call::Close, self.timeout());
        let failed = active.iter().zip(answers).find_map(|(member, answer)| {
            answer.err().map(|error| super::failed(&member.target, &error))
        });
        failed.map_or(Ok(()), Err)
    }

    /// Starts a frontend of this kind, in place of one that is down.
    ///
    /// # Errors
    /// Another one is up, there is no such kind, it does not start.
    pub fn start_frontend(&self, kind: &str) -> Result<()> {
        let _work = self.work();
        {
            let state = self.state();
            if state.expanding {
                return Err(Error::busy("cannot start frontend during the engine expansion"));
            }
            if kind.is_empty() {
                return Err(Error::invalid("cannot start empty frontend"));
            }
            let other = state.frontend.as_ref().filter(|frontend| frontend.is_up());
            match other {
                Some(other) if other.is_ending() => {
                    return Err(Error::busy(format!(
                        "frontend {} is being ended, or could not be ended: end it (`frontend shutdown`), then \
                         start {kind}",
                        other.name()
                    )));
                }
                Some(other) if other.name() == kind => return Ok(()),
                Some(other) => {
                    return Err(Error::busy(format!(
                        "frontend {} is already started, cannot be set as {kind}",
                        other.name()
                    )));
                }
                None => {}
            }
        }
        self.bring_up(kind, false)
    }

    /// Starts a frontend if there are replicas; without any it starts with the volume.
    fn bring_up(&self, kind: &str, upgrade: bool) -> Result<()> {
        let frontend = self.parts.frontends.create(kind)?;
        let offer = {
            let state = self.state();
            let volume = self.options.volume.clone();
            let (size, sector_size) = (state.size, state.sector_size);
            (!state.members.is_empty()).then_some(Offer { volume, size, sector_size, upgrade })
        };
        let what =
            if upgrade { "failed to upgrade frontend" } else { "failed to start up frontend" };
        if let Some(offer) = offer {
            frontend.start(&offer).map_err(|error| error.context(what))?;
        }
        self.state().frontend = Some(frontend);
        self.happened("frontend", &[("kind", &kind)]);
        Ok(())
    }

    /// Ends the frontend; its kind is remembered.
    ///
    /// # Errors
    /// It does not end.
    pub fn shutdown_frontend(&self) -> Result<()> {
        let frontend = self.state().frontend.clone();
        frontend.map_or(Ok(()), |frontend| {
            let stopped = frontend.stop();
            stopped.inspect(|()| self.happened("frontend-down", &[("kind", &frontend.name())]))
        })
    }
}

/// Why a volume does not start without a replica that counted more than the others.
fn in_the_way(Candidate { target, info, .. }: &Candidate, size: u64) -> String {
    let (address, counted) = (&target.address, info.revision_counter);
    if info.rebuilding {
        return format!(
            "replica {address} has counted {counted} changes, more than the others, but is marked as being rebuilt; \
             start with it alone and --salvageRequested if it was complete, or leave it out"
        );
    }
    format!(
        "replica {address} has counted {counted} changes, more than the replicas whose size is {size}, but its own \
         size is {}; leave out those that are older, or give its size as that of the volume",
        info.size
    )
}

pub(super) fn must_be_closed(info: &ptypes::Replica) -> std::result::Result<(), String> {
    match ReplicaState::parse(&info.state) {
        Some(ReplicaState::Closed) => Ok(()),
        _ => Err(format!("replica must be closed, cannot add in state: {}", info.state)),
    }
}

fn probe(info: &ptypes::Replica) -> Probe {
    let sector_size = u64::try_from(info.sector_size).ok();
    match (ReplicaState::parse(&info.state), info.size.parse(), sector_size) {
        (Some(state), Ok(size), Some(sector_size)) => Probe::Open { state, size, sector_size },
        _ => Probe::Failed(format!(
            "state {:?}, size {:?}, sector size {}",
            info.state, info.size, info.sector_size
        )),
    }
}

fn facts<'a>(info: &'a ptypes::Replica, disks: &'a [&'a str]) -> Facts<'a> {
    Facts {
        counter_disabled: info.revision_counter_disabled,
        counter: info.revision_counter,
        modified_ns: info.last_modify_time,
        head_bytes: info.head_file_size,
        parent: parent(info, &info.head),
        revert: info.dbs.as_ref().and_then(|facts| facts.revert.as_deref()),
        disks,
    }
}
