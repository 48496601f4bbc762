//! Random histories of everything that changes a volume, on a set of both kinds: after every step each replica holds
//! what the model says, and so does each snapshot's layer.

use crate::support::{
    Engine, EngineOptions, Image, Kind, Lab, MIB, Mix, Replica, ReplicaOptions, check_each,
    exercise,
};
use fastrand::Rng;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const SIZE: usize = 8 * MIB;
const LARGEST: usize = 12 * MIB;
const SNAPSHOTS: usize = 6;

struct History {
    engine: Option<Engine>,
    /// The last one is away now and then.
    replicas: [Replica; 2],
    image: Image,
    /// Those that can be reverted to.
    snapshots: BTreeMap<String, Image>,
    taken: usize,
    rng: Rng,
    /// Last, since it goes with the logs.
    lab: Lab,
}

impl History {
    fn engine(&self) -> &Engine {
        self.engine.as_ref().unwrap()
    }

    fn all(&self) -> [&Replica; 2] {
        [&self.replicas[0], &self.replicas[1]]
    }

    fn mix() -> Mix {
        // Of whole blocks: upstream's replica mixes up unaligned reads beyond the end of an expanded layer.
        Mix { whole_blocks: true, writes: 70, largest: 256 << 10, ..Mix::default() }
    }

    fn step(&mut self) -> String {
        match self.rng.u8(0..100) {
            0..30 => {
                let requests = self.rng.u64(4..60);
                let address = self.engine().data();
                exercise(&address, &mut self.image, Self::mix(), requests);
                format!("{requests} requests")
            }
            30..55 if self.snapshots.len() < SNAPSHOTS => self.snapshot(),
            30..65 => self.remove(),
            65..78 => {
                self.engine().purge();
                "purge".into()
            }
            78..86 => self.revert(),
            86..90 => self.restart(self.image.len()),
            90..93 if self.image.len() < LARGEST => self.expand(),
            _ => self.rebuild(),
        }
    }

    fn snapshot(&mut self) -> String {
        self.taken += 1;
        let name = format!("s{}", self.taken);
        self.engine().snapshot(&name);
        self.snapshots.insert(name.clone(), self.image.clone());
        format!("snapshot {name}")
    }

    fn any_snapshot(&mut self) -> Option<String> {
        let names = self.snapshots.keys().cloned().collect::<Vec<_>>();
        self.rng.choice(names)
    }

    fn remove(&mut self) -> String {
        let Some(name) = self.any_snapshot() else { return "nothing to remove".into() };
        self.engine().remove_snapshot(&name);
        self.snapshots.remove(&name);
        format!("remove {name}")
    }

    fn revert(&mut self) -> String {
        let Some(name) = self.any_snapshot() else { return "nothing to revert to".into() };
        self.engine().revert(&name);
        self.image = self.snapshots[&name].clone();
        format!("revert to {name}")
    }

    fn start_engine(&mut self, options: &EngineOptions) {
        self.engine = Some(self.lab.engine("", options, &self.all()));
    }

    fn restart(&mut self, size: usize) -> String {
        let signal = *self.rng.choice(&[Signal::SIGTERM, Signal::SIGKILL]).unwrap();
        self.engine.take().unwrap().stop();
        for replica in &mut self.replicas {
            replica.stop(signal);
            replica.start();
        }
        self.start_engine(&EngineOptions::new(size));
        format!("restart with {signal}")
    }

    fn expand(&mut self) -> String {
        let size = self.image.len() + MIB;
        self.engine.take().unwrap().stop();
        self.start_engine(&EngineOptions::without_frontend(self.image.len()));
        self.engine.as_mut().unwrap().expand(size);
        self.engine.take().unwrap().stop();
        self.image.grow(size);
        for image in self.snapshots.values_mut() {
            image.grow(size);
        }
        self.start_engine(&EngineOptions::new(size));
        format!("expand to {size}")
    }

    /// The last replica is lost, misses something, and is rebuilt, from what it has or from nothing.
    fn rebuild(&mut self) -> String {
        let [_, away] = &mut self.replicas;
        if away.kind() == Kind::Stock {
            return "no rebuild: upstream takes seconds for each layer".into();
        }
        away.stop(Signal::SIGKILL);
        let empty = self.rng.bool();
        if empty {
            away.wipe();
        }
        let address = self.engine().data();
        exercise(&address, &mut self.image, Self::mix(), 40);
        self.engine().wait_for_mode(&self.replicas[1], "ERR");
        self.engine().remove_replica(&self.replicas[1]);
        let mut missed = String::new();
        for _ in 0..self.rng.u8(0..3) {
            missed += &match self.rng.u8(0..4) {
                0 => self.remove(),
                1 => self.revert(),
                2 => {
                    self.engine().purge();
                    "purge".into()
                }
                _ => self.snapshot(),
            };
            missed += ", ";
        }
        self.replicas[1].start();
        let fast = self.rng.bool();
        self.engine().add_replica(&self.replicas[1], fast);
        format!("rebuild, from nothing: {empty}, fast: {fast}, missed: {missed}")
    }

    fn check(&mut self, step: &str) {
        let all = [&self.replicas[0], &self.replicas[1]];
        check_each(step, &mut self.image, &all);
        let engine = self.engine.as_ref().unwrap();
        engine.all_rw(&all);
        for name in self.snapshots.keys() {
            engine.hash(name);
        }
    }
}

fn random_history(test: &str, first: Kind, last: Kind) {
    let Some(lab) = Lab::new(test) else { return };
    let seed = std::env::var("ENGINE_SEED")
        .map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    let seconds = std::env::var("ENGINE_SECONDS").map_or(20, |seconds| seconds.parse().unwrap());
    println!("ENGINE_SEED={seed}");
    let options = ReplicaOptions::new(SIZE);
    let replicas =
        [lab.replica(first, "", "first", &options), lab.replica(last, "", "last", &options)];
    let mut history = History {
        engine: None,
        replicas,
        image: Image::zero(SIZE),
        snapshots: BTreeMap::new(),
        taken: 0,
        rng: Rng::with_seed(seed),
        lab,
    };
    history.start_engine(&EngineOptions::new(SIZE));
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        let step = history.step();
        println!("{step}");
        history.check(&step);
    }
    let names = history.snapshots.keys().cloned().collect::<Vec<_>>();
    for name in names {
        history.engine().revert(&name);
        history.image = history.snapshots[&name].clone();
        history.check(&name);
    }
}

#[test]
fn a_random_history_beside_stock() {
    random_history("a_random_history_beside_stock", Kind::Stock, Kind::Ours);
}

#[test]
fn a_random_history_of_ours() {
    random_history("a_random_history_of_ours", Kind::Ours, Kind::Ours);
}
