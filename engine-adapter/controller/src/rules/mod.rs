//! What a controller decides, without I/O, clock or threads: the same code serves the data path, the
//! owner of the volume and the simulation.
//!
//! The rules are Longhorn's where a volume that moves between its controller and this one must not
//! notice. Where ours are stricter, the module says why. All of them rest on one order: *a replica
//! that missed something becomes `ERR` before anybody is told that it happened.*

pub mod block_locks;
pub mod call_timeout;
pub mod expand;
pub mod fan_out;
pub mod heal;
pub mod io;
pub mod limits;
pub mod mode;
pub mod read;
pub mod rebuild;
pub mod sabotage;
pub mod snapshot;
pub mod start;
pub mod timeout;
pub mod widen;

pub use block_locks::BlockLocks;
pub use fan_out::{Answer, FanOut, Outcome, Verdict};
pub use mode::{Mode, Modes, REPLICAS_MAX, ReplicaId, SharedModes, Slot, Slots};
pub use read::Read;
pub use widen::Widened;
