//! Simulated storage, model and crash runner for DBS; for development only.
//!
//! A history is a list of steps that follows from a seed. It runs on a real
//! [`Store`](dbs_core::Store) over a [`SimDisk`], and after every crash the store is compared
//! with a [`Model`] of what it must or may hold. `docs/testing.md` says how to use it.

pub mod adopt;
pub mod beside;
pub mod blind;
pub mod bugs;
pub mod content;
pub mod cover;
pub mod disk;
pub mod env;
pub mod generate;
pub mod heal;
pub mod image;
pub mod intent;
pub mod job;
pub mod layers;
pub mod machine;
pub mod model;
pub mod op;
pub mod outcomes;
pub mod paging;
pub mod pause;
pub mod perform;
pub mod rebuild;
pub mod relink;
pub mod requests;
pub mod ringed;
pub mod runner;
pub mod slow;
pub mod standing;
pub mod step;
pub mod threshold;
pub mod tree;
pub mod verify;

pub use disk::{CrashMode, Faults, Medium, SimDisk};
pub use env::{SimEnv, TailPlace};
pub use machine::{Config, Machine};
pub use model::Model;
pub use op::Op;
pub use runner::{Failure, replay, run, shrink};
pub use step::{Fate, Stats, Step};

/// Locks, whatever happened to other holders: after a panic the state is only looked at.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
