//! What a controller works with, on the simulated machines. A call that blocks lets time go on until it
//! is answered: the user's requests, faults and answers happen meanwhile, on the same thread.

use crate::world::{MS, World};
use dbs_core::{Error, Result};
use longhorn_controller::path::simulated::Meanwhile;
use longhorn_controller::path::{self, BackendAddress, JournalEntry, PathStats};
use longhorn_controller::rules::call_timeout::{CallTimeout, Waiting};
use longhorn_controller::rules::limits::Limits;
use longhorn_controller::rules::start::Policy;
use longhorn_controller::rules::{Mode, ReplicaId};
use longhorn_controller::volume::{
    Call, CallError, Called, Controller, DataPath, Events, Frontend, Frontends, Host, Options,
    Parts, Paused, RebuildStatus, Relay, Replicas, Target,
};
use std::fmt::Display;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long I/O may take to come to rest, flushes included.
const REST: u64 = 250_000 * MS;

/// A replica that cannot be reached.
pub fn unreachable(text: &str) -> CallError {
    CallError { unavailable: true, ..CallError::unknown(text) }
}

pub struct Sim {
    world: Mutex<World>,
    relay: Mutex<Arc<Relay>>,
}

impl Sim {
    pub fn new(world: World) -> Arc<Self> {
        Arc::new(Self { world: Mutex::new(world), relay: Mutex::default() })
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another controller is to be told from now on.
    pub fn new_relay(&self) -> Arc<Relay> {
        let relay = Arc::<Relay>::default();
        *self.relay.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&relay);
        relay
    }

    /// Lets time go on until something is so, or for so long; says whether it is.
    pub fn run_until(&self, time: u64, mut done: impl FnMut(&mut World) -> bool) -> bool {
        let limit = self.world().now + time;
        loop {
            let faulted = std::mem::take(&mut self.world().faulted);
            let relay = Arc::clone(&self.relay.lock().unwrap_or_else(PoisonError::into_inner));
            for (id, why) in faulted {
                relay.faulted(id, &why);
            }
            let mut world = self.world();
            if done(&mut world) {
                return true;
            }
            world.wake();
            if !world.step(limit) {
                return false;
            }
        }
    }

    pub fn run_for(&self, time: u64) {
        self.run_until(time, |_| false);
    }

    /// The path of the present controller.
    pub fn path(&self) -> Arc<path::Path> {
        self.world().path.real.clone().unwrap()
    }

    /// A new controller's path.
    fn new_path(self: &Arc<Self>) {
        let sim = Arc::downgrade(self);
        let meanwhile = |alive: Arc<AtomicBool>| -> Meanwhile {
            Box::new(move |done| {
                if let Some(sim) = sim.upgrade()
                    && alive.load(Ordering::SeqCst)
                    && !sim.run_until(REST, |_| done())
                {
                    sim.world().violated("I/O does not come to rest".to_owned());
                }
            })
        };
        self.world().new_path(meanwhile);
    }

    fn latency(&self) -> u64 {
        self.world().latency()
    }
}

impl Replicas for Sim {
    fn call_all(&self, calls: Vec<(Target, Call)>, timeout: Option<CallTimeout>) -> Vec<Called> {
        let (numbers, begun, complete): (Vec<_>, _, Vec<_>) = {
            let mut world = self.world();
            let calls = calls.iter().cloned();
            let numbers =
                calls.map(|(target, call)| world.send_call(&target.address, call)).collect();
            (numbers, world.now, world.path.complete().collect())
        };
        let mut waiting = Waiting::begin(timeout);
        let mut known = vec![false; numbers.len()];
        self.run_until(u64::MAX / 2, |world| {
            let now = Duration::from_micros(world.now - begun);
            for (place, number) in numbers.iter().enumerate() {
                if let Some(answer) = &world.calls[number]
                    && !std::mem::replace(&mut known[place], true)
                {
                    waiting.answered(place, answer.is_ok(), now);
                }
            }
            known.iter().all(|known| *known) || waiting.end().is_some_and(|end| end <= now)
        });
        let mut world = self.world();
        let answers: Vec<_> =
            numbers.iter().map(|number| world.calls.remove(number).flatten()).collect();
        world.check_given_up(&calls, &answers, begun, &complete);
        let late = Err(CallError::unknown("it did not answer"));
        answers.into_iter().map(|answer| answer.unwrap_or_else(|| late.clone())).collect()
    }

    fn copy_file(
        &self,
        (from, _): (&Target, &str),
        (to, _): (&Target, &str),
    ) -> std::result::Result<(), CallError> {
        let time = self.latency() + self.latency();
        self.run_for(time);
        let mut world = self.world();
        let now = world.now;
        let found = (world.replica_at(&from.address), world.replica_at(&to.address));
        if let (Some(from), Some(to)) = found {
            let well = |world: &World, replica: usize| {
                world.replicas[replica].alive && world.replicas[replica].stalled_until <= now
            };
            if well(&world, from) && well(&world, to) {
                let parent = world.replicas[from].head.parent.clone();
                world.replicas[to].head.parent = parent;
                return Ok(());
            }
        }
        Err(unreachable("the file did not arrive"))
    }

    fn rebuild_status(&self, target: &Target) -> std::result::Result<RebuildStatus, CallError> {
        let time = self.latency();
        self.run_for(time);
        let world = self.world();
        match world.replica_at(&target.address).map(|replica| &world.replicas[replica]) {
            Some(replica) if replica.alive => {
                Ok(RebuildStatus { running: replica.syncing, error: replica.sync_error.clone() })
            }
            _ => Err(unreachable("connection refused")),
        }
    }

    fn close_soon(&self, target: &Target) {
        let number = self.world().send_call(&target.address, Call::Close);
        self.run_until(1000 * MS, |world| world.calls[&number].is_some());
    }
}

struct Pause<'a>(&'a Sim, u64, Option<path::Pause>);

impl Paused for Pause<'_> {}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.2 = None;
        self.0.world().release(self.1);
    }
}

impl DataPath for Sim {
    fn connect(&self, replica: ReplicaId, address: &str) -> io::Result<()> {
        let time = self.latency();
        self.run_for(time);
        let backend = {
            let mut world = self.world();
            let found = world.replica_at(address);
            found.and_then(|found| world.dial(replica, found))
        };
        let backend = backend.ok_or(io::ErrorKind::ConnectionRefused)?;
        self.path().connect(replica, address, &BackendAddress::Simulated(backend)).map(drop)
    }

    fn set_mode(&self, replica: ReplicaId, mode: Mode) -> bool {
        let path = self.path();
        let mut world = self.world();
        if (path.mode(replica), mode) == (Some(Mode::Wo), Mode::Rw) && !world.path.paused {
            world.violated(format!("replica {replica} becomes complete amid writes"));
        }
        path.set_mode(replica, mode);
        path.mode(replica) == Some(mode)
    }

    fn remove(&self, replica: ReplicaId) {
        self.path().remove(replica);
        self.world().path.peers.remove(&replica);
    }

    fn flush(&self) {
        let mut world = self.world();
        if let Some(replica) = world.cut_when_flushed.take() {
            // It is closed and opened again: nobody connects to it anew.
            world.replicas[replica].lanes.clear();
            world.replicas[replica].blemished = true;
            for link in world.links_to(replica) {
                world.break_link(link, 0);
            }
        }
        drop(world);
        self.path().flush();
    }

    fn pause(&self, all: bool) -> Box<dyn Paused + '_> {
        self.world().path.paused = true;
        let pause = self.path().pause(all);
        let mut world = self.world();
        world.at_pause = world.client.content.clone();
        world.pauses += 1;
        world.hang_somewhere();
        let now = world.now;
        drop(world);
        Box::new(Pause(self, now, Some(pause)))
    }

    fn resize(&self, size: u64) {
        self.path().resize(size);
        let mut world = self.world();
        world.path.size = size;
        world.client.content.grow(size as usize / 512);
    }

    fn set_expanding(&self, expanding: bool) {
        self.path().set_expanding(expanding);
    }

    fn stats(&self) -> PathStats {
        self.path().stats()
    }

    fn journal(&self, _: i64) -> Vec<JournalEntry> {
        Vec::new()
    }
}

impl Frontends for Sim {
    fn create(&self, kind: &str) -> Result<Arc<dyn Frontend>> {
        Err(Error::unsupported(format!("no frontend {kind}")))
    }
}

impl Host for Sim {
    fn now_ns(&self) -> u64 {
        1_800_000_000_000_000_000 + self.world().now * 1000
    }

    fn unique_name(&self) -> String {
        let mut world = self.world();
        world.names += 1;
        format!("system-{}", world.names)
    }

    fn log(&self, _error: bool, event: &str, fields: &[(&str, &dyn Display)]) {
        let fields: Vec<_> = fields.iter().map(|(key, value)| format!("{key}={value}")).collect();
        self.world().note(format!("{event} {}", fields.join(" ")));
    }

    fn sync(&self) -> Result<()> {
        let time = self.latency();
        self.run_for(time);
        Ok(())
    }

    fn freeze(&self, _: &str) -> Result<Option<Box<dyn Paused>>> {
        Ok(None)
    }
}

/// How a controller is started here.
pub fn options(counters: bool, salvage: bool) -> Options {
    Options {
        volume: "v".to_owned(),
        policy: Policy { upgrade: false, counter_disabled: !counters, salvage },
        unmap_mark: false,
        limits: Limits { count: 250, size: 0 },
        sync_limit: 1,
        frontend: None,
        sync_before_snapshot: true,
        short_timeout: longhorn_controller::rules::timeout::DEFAULT,
    }
}

/// A new controller of what is there.
pub fn controller(sim: &Arc<Sim>, counters: bool, salvage: bool) -> Arc<Controller> {
    sim.new_path();
    let parts = Parts {
        replicas: Arc::clone(sim) as _,
        path: Arc::clone(sim) as _,
        frontends: Arc::clone(sim) as _,
        host: Arc::clone(sim) as _,
    };
    Controller::new(options(counters, salvage), parts, &sim.new_relay())
}
