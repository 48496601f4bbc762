//! Clock, randomness, boots and the tail of a simulated machine.

use crate::disk::SimDisk;
use crate::lock;
use dbs_core::Result;
use dbs_core::io::TailMemory;
use dbs_core::store::Env;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Size of a tail: more than a group of the small journals takes, and less than real ones, which cost
/// more to make than all that is written to them.
const TAIL_BYTES: usize = 512 << 10;

/// First moment of every history, in nanoseconds since the Unix epoch.
const START_NS: u64 = 1_700_000_000_000_000_000;

/// A clock that ticks a millisecond at each look, and identities that follow from a seed.
#[derive(Debug)]
pub struct SimEnv {
    clock_ns: AtomicU64,
    rng: Mutex<fastrand::Rng>,
    /// Of keys: without any, all else comes out as it did.
    secrets: Mutex<fastrand::Rng>,
    boot: AtomicU64,
}

impl SimEnv {
    /// An environment whose answers follow from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            clock_ns: AtomicU64::new(START_NS),
            rng: Mutex::new(fastrand::Rng::with_seed(seed)),
            secrets: Mutex::new(fastrand::Rng::with_seed(!seed)),
            boot: AtomicU64::new(1),
        }
    }

    /// The machine starts again.
    pub fn reboot(&self) {
        self.boot.fetch_add(1, Ordering::Relaxed);
    }
}

impl Env for SimEnv {
    fn now_ns(&self) -> u64 {
        self.clock_ns.fetch_add(1_000_000, Ordering::Relaxed)
    }

    fn random(&self) -> [u8; 16] {
        lock(&self.rng).u128(..).to_le_bytes()
    }

    fn secret(&self, bytes: &mut [u8]) -> Result<()> {
        lock(&self.secrets).fill(bytes);
        Ok(())
    }

    fn boot_id(&self) -> [u8; 16] {
        u128::from(self.boot.load(Ordering::Relaxed)).to_le_bytes()
    }
}

/// The place on a simulated tmpfs where the tail outlives its process.
#[derive(Debug, Clone, Default)]
pub struct TailPlace {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    memory: Option<Vec<u8>>,
    /// The process is dead: nothing it still does counts.
    killed: bool,
    attached: bool,
    /// The file is removed, and the process that has it does not know yet.
    vanished: bool,
}

impl TailPlace {
    /// The tail, as the last process left it or empty. A process that this disk stops is dead, whatever it still does.
    #[must_use]
    pub fn attach(&self, disk: &Arc<SimDisk>) -> Box<dyn TailMemory> {
        self.attach_beside(Arc::downgrade(disk))
    }

    /// As [`TailPlace::attach`], of a process whose disk may be another kind of disk, which stops nobody.
    #[must_use]
    pub fn attach_beside(&self, disk: Weak<SimDisk>) -> Box<dyn TailMemory> {
        let mut shared = lock(&self.shared);
        shared.killed = false;
        shared.attached = true;
        let memory = shared.memory.take().unwrap_or_else(|| vec![0; TAIL_BYTES]);
        Box::new(SimTail { memory: Some(memory), unreal: None, disk, place: self.clone() })
    }

    /// The process ends now; call before dropping its store.
    pub fn kill(&self) {
        lock(&self.shared).killed = true;
    }

    /// The file is removed under the process that has it.
    pub fn vanish(&self) {
        lock(&self.shared).vanished = true;
    }

    /// Whether a process still holds the tail: somebody kept the store alive.
    #[must_use]
    pub fn attached(&self) -> bool {
        lock(&self.shared).attached
    }

    /// The machine loses power: the memory is gone.
    pub fn lose(&self) {
        lock(&self.shared).memory = None;
    }

    /// A copy of what a dead process left, if wanted.
    #[must_use]
    pub fn copy_if(&self, wanted: bool) -> Option<Vec<u8>> {
        if wanted { lock(&self.shared).memory.clone() } else { None }
    }

    /// Puts other bytes there, such as an older tail.
    pub fn put(&self, memory: Option<Vec<u8>>) {
        lock(&self.shared).memory = memory;
    }
}

/// The mapping a store holds; its bytes go back to the place when it is dropped.
struct SimTail {
    memory: Option<Vec<u8>>,
    /// What is written to by a process that is dead: its threads end a little later.
    unreal: Option<Vec<u8>>,
    disk: Weak<SimDisk>,
    place: TailPlace,
}

impl SimTail {
    fn is_dead(&self) -> bool {
        let stopped = self.disk.upgrade().is_some_and(|disk| disk.stopped());
        stopped || lock(&self.place.shared).killed
    }
}

impl TailMemory for SimTail {
    fn bytes_mut(&mut self) -> &mut [u8] {
        let is_dead = self.is_dead();
        let memory = self.memory.get_or_insert_with(|| vec![0; TAIL_BYTES]);
        match is_dead {
            true => self.unreal.get_or_insert_with(|| memory.clone()),
            false => memory,
        }
    }

    fn remove(&mut self) {
        if !self.is_dead() {
            self.memory = None;
        }
    }

    fn is_kept(&mut self) -> bool {
        let vanished = std::mem::take(&mut lock(&self.place.shared).vanished);
        if vanished {
            self.memory = Some(vec![0; TAIL_BYTES]);
        }
        !vanished
    }
}

impl Drop for SimTail {
    fn drop(&mut self) {
        let mut shared = lock(&self.place.shared);
        let vanished = std::mem::take(&mut shared.vanished);
        shared.memory = self.memory.take().filter(|_| !vanished);
        shared.attached = false;
    }
}
