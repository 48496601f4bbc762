//! What a manager does with a volume, by chance.

use crate::client::Kind;
use crate::parts::{Sim, controller};
use crate::referee::{check_counters, check_healed, check_replica};
use crate::replica::{Replica, SECTORS, Staged};
use crate::world::{MS, Weather, World, address};
use longhorn_controller::rules::Mode;
use longhorn_controller::rules::call_timeout::CallTimeout;
use longhorn_controller::rules::rebuild::File;
use longhorn_controller::rules::start::StartError;
use longhorn_controller::volume::{Call, Controller, Replicas as _, Target};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

const BLOCK_BYTES: u64 = 4096;
/// How long everything may take to come to rest.
const REST: u64 = 250_000 * MS;
/// How often everything is read, until what is damaged is healed.
const PASSES: usize = 8;

/// What a history came to.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    pub requests: u64,
    pub rebuilds: u64,
    pub snapshots: u64,
    pub restarts: u64,
    pub checks: u64,
    /// How often replicas were connected to anew.
    pub reconnects: u64,
    /// Damaged blocks of complete replicas when all was read.
    pub rotten: u64,
}

struct History {
    sim: Arc<Sim>,
    controller: Arc<Controller>,
    random: fastrand::Rng,
    counters: bool,
    faults: bool,
    stats: Stats,
    names: u64,
    /// What the last rebuild of each replica brought.
    lists: BTreeMap<usize, Vec<File>>,
}

/// Runs the history of a seed.
pub fn run(seed: u64, steps: usize) -> Result<Stats, String> {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x5eed);
    let count = random.usize(2..5);
    let counters = random.bool();
    let faults = random.u32(0..5) > 0;
    let weather = Weather {
        faults_ms: if faults { random.u64(150..1500) } else { 0 },
        wishes_ms: random.u64(3..25),
        depth: random.usize(1..12),
        full: random.u32(0..3) == 0,
        rot: if random.bool() { random.u32(10..200) } else { 0 },
    };
    let size = random.usize(8..20);
    let table = if random.u32(0..4) == 0 { random.usize(3..12) } else { usize::MAX };
    let new = |_| Replica { table, ..Replica::new(size, !counters) };
    let replicas: Vec<_> = (0..count).map(new).collect();
    let sim = Sim::new(World::new(seed, replicas, weather));
    let controller = controller(&sim, counters, false);
    let stats = Stats::default();
    let mut history = History {
        sim,
        controller,
        random,
        counters,
        faults,
        stats,
        names: 0,
        lists: BTreeMap::new(),
    };
    let outcome = history.play(count, size, steps);
    let mut world = history.sim.world();
    let first = world.violation.take().map_or(outcome, Err);
    history.stats.requests = world.client.answers;
    history.stats.reconnects = world.reconnects;
    let tail = world.log.len().saturating_sub(120);
    let log = world.log[tail..].join("\n");
    drop(world);
    first.map(|()| history.stats).map_err(|what| format!("{log}\nseed {seed}: {what}"))
}

impl History {
    fn play(&mut self, count: usize, size: usize, steps: usize) -> Result<(), String> {
        let members = self.random.usize(1..=count.min(3));
        let addresses: Vec<_> = (0..members).map(address).collect();
        let bytes = size as u64 * BLOCK_BYTES;
        // It may go wrong when something happens to a replica meanwhile.
        if self.controller.start(&addresses, bytes, bytes).is_err() {
            self.restart(true)?;
        }
        self.sim.world().busy = true;
        for _ in 0..steps {
            let pause = match self.random.u32(0..12) {
                0 => self.random.u64(4000..14_000),
                _ => self.random.u64(5..250),
            };
            self.sim.run_for(pause * MS);
            self.act()?;
            if let Some(what) = self.sim.world().violation.clone() {
                return Err(what);
            }
            if self.complete().is_empty() {
                self.restart(true)?;
            }
        }
        self.check()
    }

    fn note(&self, what: &str) {
        self.sim.world().note(what.to_owned());
    }

    fn act(&mut self) -> Result<(), String> {
        match self.random.u32(0..20) {
            0..=3 => self.snapshot()?,
            4..=10 => self.rebuild()?,
            11 => self.revert()?,
            12 | 13 => self.expand()?,
            14 => self.remove(),
            15 | 16 => {
                let quiet = self.random.bool();
                self.restart(quiet)?;
            }
            17 | 18 => self.check()?,
            _ => {}
        }
        Ok(())
    }

    fn with_mode(&self, mode: Mode) -> Vec<usize> {
        let world = self.sim.world();
        let members = self.controller.replicas();
        let those = members.iter().filter(|member| member.mode == mode);
        those.filter_map(|member| world.replica_at(&member.target.address)).collect()
    }

    fn complete(&self) -> Vec<usize> {
        self.with_mode(Mode::Rw)
    }

    /// Where nothing goes wrong, what is refused costs no replica.
    fn check_kept(&self, before: &[usize], what: &str) -> Result<(), String> {
        let now = self.complete();
        match before.iter().find(|replica| !now.contains(replica)) {
            Some(lost) if !self.faults => Err(format!("r{lost} is lost to {what}")),
            _ => Ok(()),
        }
    }

    fn snapshot(&mut self) -> Result<(), String> {
        let before = self.complete();
        self.names += 1;
        // Now and then one that is there already.
        let name = format!("s{}", self.names - u64::from(self.random.u32(0..10) == 0));
        let taken = self.controller.snapshot(&name, HashMap::new(), false);
        self.stats.snapshots += u64::from(taken.is_ok());
        self.note(&format!("snapshot {name}: {taken:?}"));
        self.check_kept(&before, "a snapshot")
    }

    fn expand(&mut self) -> Result<(), String> {
        let before = self.complete();
        let size = self.controller.volume().size as u64 + self.random.u64(1..4) * BLOCK_BYTES;
        if size > 40 * BLOCK_BYTES {
            return Ok(());
        }
        if self.controller.begin_expansion(size).is_ok_and(|begun| begun) {
            self.controller.run_expansion(size);
        }
        let volume = self.controller.volume();
        self.note(&format!("expanded to {}: {}", volume.size, volume.last_expansion_error));
        self.check_kept(&before, "an expansion")
    }

    fn remove(&mut self) {
        let complete = self.complete();
        if complete.len() > 1
            && let Some(replica) = self.random.choice(&complete)
        {
            let removed = self.controller.delete_replica(&address(*replica));
            self.note(&format!("r{replica} removed: {removed:?}"));
        }
    }

    /// Lets the user's requests come to an end.
    fn rest(&self) -> Result<(), String> {
        self.sim.world().busy = false;
        match self.sim.run_until(REST, |world| world.client.wishes.is_empty()) {
            true => Ok(()),
            false => Err("requests do not come to an end".to_owned()),
        }
    }

    fn revert(&mut self) -> Result<(), String> {
        self.rest()?;
        let names: Vec<_> = {
            let world = self.sim.world();
            let first = self.complete_in(&world);
            first.map_or_else(Vec::new, |r| world.replicas[r].layers.keys().cloned().collect())
        };
        if let Some(disk) = self.random.choice(&names) {
            let name = longhorn_wire::names::snapshot_name(disk).unwrap_or(disk);
            let reverted = self.controller.revert(name);
            self.note(&format!("revert to {disk}: {reverted:?}"));
            let mut world = self.sim.world();
            if reverted.is_ok()
                && let Some((_, content)) = world.snapshots.get(disk).cloned()
            {
                let sectors = world.client.content.possible.len();
                world.client.content = content;
                world.client.content.grow(sectors);
            }
        }
        self.sim.world().busy = true;
        Ok(())
    }

    fn complete_in(&self, world: &World) -> Option<usize> {
        let members = self.controller.replicas();
        let first = members.iter().find(|member| member.mode == Mode::Rw)?;
        world.replica_at(&first.target.address)
    }

    /// The controller ends, and another one takes over; without a complete replica the best is salvaged.
    fn restart(&mut self, quiet: bool) -> Result<(), String> {
        self.stats.restarts += 1;
        if quiet {
            self.rest()?;
        }
        let volume = self.controller.volume();
        let (complete, failed) = (self.complete(), self.with_mode(Mode::Err));
        let salvage = complete.is_empty();
        self.note(&format!("controller ends, quiet {quiet}, {complete:?} complete"));
        let mut addresses: Vec<_> = complete.iter().copied().map(address).collect();
        {
            let mut world = self.sim.world();
            world.busy = false;
            world.land();
            world.client.lose();
            let now = world.now;
            for replica in &mut world.replicas {
                replica.reset();
                replica.alive = true;
                replica.stalled_until = now;
                replica.failing_calls = 0;
            }
            // Who only missed writes is told by its counter.
            if self.counters && quiet && !salvage {
                let behind = |r: &&usize| !world.replicas[**r].tainted;
                addresses.extend(failed.iter().filter(behind).copied().map(address));
                // If the others were out of reach now, nothing would tell that it is behind.
                world.calm = true;
            }
            if salvage {
                addresses = self.best(&world);
            }
        }
        self.controller = controller(&self.sim, self.counters, salvage);
        let size = match volume.size {
            0 => self.sim.world().replicas[0].sectors() as u64 * 512,
            size => size as u64,
        };
        self.start(&addresses, size)?;
        self.started(quiet && !salvage, &complete)?;
        if salvage {
            self.rebase();
        }
        let mut world = self.sim.world();
        world.calm = false;
        world.busy = true;
        Ok(())
    }

    /// Whom a manager starts with when all have failed.
    fn best(&self, world: &World) -> Vec<String> {
        let whole = |r: &usize| !world.replicas[*r].rebuilding;
        let mut all: Vec<_> = (0..world.replicas.len()).filter(whole).collect();
        if self.counters || all.is_empty() {
            let rank = |r: &usize| (whole(r), world.replicas[*r].counter);
            all = (0..world.replicas.len()).max_by_key(rank).into_iter().collect();
        }
        all.into_iter().map(address).collect()
    }

    /// Tries until nothing happens to the replicas meanwhile.
    fn start(&mut self, addresses: &[String], size: u64) -> Result<(), String> {
        for attempt in 0..20 {
            let outcome = match attempt {
                // Perhaps none of these has the right size: they were salvaged.
                10.. => self.controller.start(addresses, size, 0),
                _ => self.controller.start(addresses, size, size),
            };
            self.note(&format!("start with {addresses:?}: {outcome:?}"));
            match outcome {
                Ok(()) => return Ok(()),
                Err(StartError::Other(text)) => return Err(text),
                Err(StartError::NoReplica(_) | StartError::Unavailable(_)) => {}
            }
            let mut world = self.sim.world();
            for replica in &mut world.replicas {
                replica.reset();
                replica.alive = true;
                replica.stalled_until = 0;
                replica.failing_calls = 0;
                if attempt >= 10 {
                    replica.size = (size / BLOCK_BYTES) as usize;
                }
            }
        }
        Err(format!("{addresses:?} do not start"))
    }

    /// Who was complete before a quiet end is complete again.
    fn started(&self, all: bool, before: &[usize]) -> Result<(), String> {
        let now = self.complete();
        match before.iter().find(|r| !now.contains(*r)) {
            Some(lost) if all && !self.faults => {
                Err(format!("r{lost} was complete, and is not after a restart"))
            }
            _ => Ok(()),
        }
    }

    /// What the salvaged replica has is what the volume has.
    fn rebase(&self) {
        let mut world = self.sim.world();
        let Some(replica) = self.complete_in(&world) else { return };
        let its = &world.replicas[replica];
        let content = its.content();
        let views: Vec<_> =
            its.layers.iter().map(|(disk, layer)| (disk.clone(), its.view(layer))).collect();
        world.client.content.rebase(&content);
        // Only a planted mistake leaves it smaller than the volume.
        let sectors = (world.path.size / 512) as usize;
        world.client.content.grow(sectors);
        for (disk, view) in views {
            world.snapshots.entry(disk).or_default().1.rebase(&view);
        }
    }

    /// A manager's rebuild of some replica that is not complete.
    fn rebuild(&mut self) -> Result<(), String> {
        let complete = self.complete();
        let count = self.sim.world().replicas.len();
        let others: Vec<_> = (0..count).filter(|r| !complete.contains(r)).collect();
        let Some(replica) = self.random.choice(&others).copied() else { return Ok(()) };
        for stale in self.with_mode(Mode::Wo).into_iter().chain([replica]) {
            self.report("removed", stale, self.controller.delete_replica(&address(stale)));
        }
        let size = self.controller.volume().size as usize / BLOCK_BYTES as usize;
        {
            let mut world = self.sim.world();
            let now = world.now;
            let its = &mut world.replicas[replica];
            if !its.alive || its.stalled_until > now {
                return Ok(());
            }
            its.reset();
            its.rebuilding = false;
            its.capacity = usize::MAX;
            if its.size > size {
                let (session, table) = (its.session, its.table);
                *its = Replica { session, table, ..Replica::new(size, its.counter_disabled) };
            } else if self.random.u32(0..8) > 0 {
                its.size = size;
            }
        }
        let created = self.controller.create_replica(&address(replica), "", true, Mode::Wo);
        self.report("created", replica, created.as_ref().copied());
        if created.is_ok() {
            self.fill(replica)?;
        }
        Ok(())
    }

    fn report<E: std::fmt::Display>(&self, what: &str, replica: usize, result: Result<(), E>) {
        let result = result.map_err(|error| error.to_string());
        self.note(&format!("r{replica} {what}: {result:?}"));
    }

    /// From the layers to the end of a rebuild, if nothing comes in between.
    fn fill(&mut self, replica: usize) -> Result<(), String> {
        let target = Target { address: address(replica), instance: String::new() };
        let session = self.sim.world().replicas[replica].session;
        let call = vec![(target.clone(), Call::SetRebuilding(true))];
        if self.sim.call_all(call, None).iter().any(Result::is_err) {
            return Ok(());
        }
        let files = match self.controller.prepare_rebuild(&target.address, "") {
            Ok(files) => files,
            Err(error) => return self.failed(replica, &error.to_string()),
        };
        match self.random.u32(0..20) {
            0 => {
                // As one may be who does not know whether anything has come in.
                let early = self.controller.verify_rebuild(&target.address, "");
                self.report("verified at once", replica, early);
            }
            1 => return self.unmarked(replica),
            2 if self.lists.contains_key(&replica) => return self.old_list(replica, session),
            _ => {}
        }
        self.sim.world().replicas[replica].syncing = true;
        for file in &files {
            let pause = if self.random.u32(0..10) == 0 { 900 } else { 40 };
            let pause = self.random.u64(1..pause);
            self.sim.run_for(pause * MS);
            match self.random.u32(0..40) {
                0 => self.snapshot()?,
                1 => {
                    // Too early, as one may be who does not know how far it is.
                    let early = self.controller.verify_rebuild(&target.address, "");
                    self.report("verified early", replica, early);
                }
                2 => return Ok(()),
                3 => self.expand()?,
                _ => {}
            }
            if let Err(why) = self.transfer(replica, session, &file.name) {
                return self.failed(replica, &why);
            }
        }
        let forgets = self.random.u32(0..20) == 0;
        {
            let mut world = self.sim.world();
            let its = &mut world.replicas[replica];
            if its.session != session {
                drop(world);
                return self.failed(replica, "it was restarted");
            }
            its.syncing = false;
            if forgets {
                drop(world);
                let verified = self.controller.verify_rebuild(&target.address, "");
                self.report("verified without a reload", replica, verified);
                return Ok(());
            }
            its.reload();
            its.filled = true;
        }
        let verified = self.controller.verify_rebuild(&target.address, "");
        self.report("verified", replica, verified.as_ref().copied());
        if let Err(error) = verified {
            let text = error.to_string();
            // All that it lacked came, so it had too many.
            let extra = ["chain not equal", "disk number", "did not come in"];
            if extra.iter().any(|extra| text.contains(extra)) {
                return Err(text);
            }
            return self.failed(replica, &text);
        }
        self.stats.rebuilds += 1;
        self.lists.insert(replica, files);
        let call = vec![(target, Call::SetRebuilding(false))];
        self.sim.call_all(call, Some(CallTimeout::at_most(Duration::from_secs(1))));
        // Whoever asks for it asks until it is done.
        self.sim.world().replicas[replica].rebuilding = false;
        Ok(())
    }

    /// The last call of an earlier rebuild comes late.
    fn unmarked(&mut self, replica: usize) -> Result<(), String> {
        let target = Target { address: address(replica), instance: String::new() };
        self.sim.call_all(vec![(target, Call::SetRebuilding(false))], None);
        self.late(replica)
    }

    /// The list of an earlier rebuild comes late.
    fn old_list(&mut self, replica: usize, session: u64) -> Result<(), String> {
        for file in self.lists[&replica].clone() {
            if let Err(why) = self.transfer(replica, session, &file.name) {
                self.note(&format!("old list of r{replica}: {why}"));
                return Ok(());
            }
        }
        {
            let mut world = self.sim.world();
            let its = &mut world.replicas[replica];
            its.reload();
            its.filled = true;
        }
        self.late(replica)
    }

    /// A call has come late, and the replica is not complete for it.
    fn late(&mut self, replica: usize) -> Result<(), String> {
        let verified = self.controller.verify_rebuild(&address(replica), "");
        self.report("verified after a late call", replica, verified.as_ref().copied());
        match verified {
            Ok(()) => Err(format!("r{replica} is complete, and a late call came")),
            Err(_) => Ok(()),
        }
    }

    /// A file comes from some complete replica.
    fn transfer(&mut self, replica: usize, session: u64, file: &str) -> Result<(), String> {
        let complete = self.complete();
        let source = self.random.choice(&complete).copied();
        let mut world = self.sim.world();
        let now = world.now;
        let well =
            |replica: &Replica| replica.alive && replica.open && replica.stalled_until <= now;
        if !well(&world.replicas[replica]) || world.replicas[replica].session != session {
            return Err("the target is gone".to_owned());
        }
        let disk = file.strip_suffix(".meta").unwrap_or(file);
        let rotten = source.map(|source| &world.replicas[source].rotten);
        let is_damaged = |disk: &str| {
            let mut holders = rotten.into_iter().flatten().map(|(holder, _)| holder);
            holders.any(|holder| holder.as_deref() == Some(disk))
        };
        let layer = source
            .map(|source| &world.replicas[source])
            .filter(|source| well(source))
            .and_then(|source| source.layers.get(disk));
        let staged = match layer {
            None => return Err(format!("no source for {file}")),
            Some(_) if disk == file && is_damaged(disk) => {
                return Err(format!("{file} is damaged in the source"));
            }
            Some(layer) if disk == file => Staged::Blocks(layer.blocks.clone()),
            Some(layer) => Staged::Parent(layer.parent.clone()),
        };
        world.replicas[replica].staged.push((disk.to_owned(), staged));
        Ok(())
    }

    /// A rebuild failed: the replica stays out of reads, whatever is asked for.
    fn failed(&mut self, replica: usize, why: &str) -> Result<(), String> {
        self.note(&format!("rebuild of r{replica} failed: {why}"));
        // One with room for a snapshot that no complete one has room for is given up for having it.
        let table = self.sim.world().replicas[replica].table;
        if !self.faults && table == usize::MAX && !why.ends_with("is damaged in the source") {
            return Err(format!("nothing happened, and the rebuild of r{replica} failed: {why}"));
        }
        {
            let mut world = self.sim.world();
            let its = &mut world.replicas[replica];
            its.syncing = false;
            if its.alive && its.open {
                why.clone_into(&mut its.sync_error);
            }
        }
        if self.random.bool() {
            let verified = self.controller.verify_rebuild(&address(replica), "");
            self.report("verified nevertheless", replica, verified);
        }
        if self.random.bool() {
            self.report("removed", replica, self.controller.delete_replica(&address(replica)));
        }
        Ok(())
    }

    /// Reads every block from every complete replica, so that damage in them is met, and healed.
    fn read_all(&mut self) -> Result<(), String> {
        if self.sim.world().weather.rot == 0 {
            return Ok(());
        }
        self.sim.world().calm = true;
        for pass in 0..PASSES {
            {
                let mut world = self.sim.world();
                let complete: Vec<_> = world.path.complete().collect();
                if pass == 0 {
                    let rotten = complete.iter().map(|r| world.replicas[*r].rotten.len());
                    self.stats.rotten += rotten.sum::<usize>() as u64;
                } else if check_healed(&world, &complete).is_ok() {
                    break;
                }
                for block in 0..world.path.size as usize / BLOCK_BYTES as usize {
                    // A reactor asks them in turn.
                    complete
                        .iter()
                        .for_each(|_| world.ask(0, Kind::Read, block * SECTORS, SECTORS));
                }
            }
            self.rest()?;
            // Healing has come to its end then, too.
            drop(self.sim.path().pause(true));
        }
        self.sim.world().calm = false;
        Ok(())
    }

    /// Once quiet: all complete replicas are identical, and are what they may be.
    fn check(&mut self) -> Result<(), String> {
        self.rest()?;
        self.stats.checks += 1;
        self.read_all()?;
        let complete = self.complete();
        {
            let world = self.sim.world();
            check_healed(&world, &complete)?;
            if self.counters {
                check_counters(&world, &complete)?;
            }
            let sectors = self.controller.volume().size as usize / 512;
            for replica in &complete {
                let its = &world.replicas[*replica];
                if its.sectors() != sectors {
                    return Err(format!("r{replica} has {} sectors, not {sectors}", its.sectors()));
                }
            }
            for replica in &complete {
                check_replica(&world, complete[0], *replica)?;
            }
        }
        self.sim.world().busy = true;
        Ok(())
    }
}
