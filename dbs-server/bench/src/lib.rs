//! `dbs bench`: how fast a store, an export or a device is.
//!
//! This crate owns what is measured and how. Measurements of `dbs` against other programs are in `benches`.
//!
//! - `catalog`: the tests; `offsets`: where their requests go;
//! - `load`: keeping requests in flight on a [`Subject`] and counting their latencies;
//! - `subjects`: volumes, NBD exports, devices;
//! - `runner`: which test runs on what, after which preparation; - `report`: what comes out.
//!
//! Main types: [`Runner`], a measurement; [`Subject`], what is measured; [`Report`], what comes out.
//!
//! Enter at [`Runner`].

mod catalog;
mod cpu;
mod histogram;
mod load;
mod offsets;
mod report;
mod runner;
mod subjects;
#[cfg(test)]
mod tests;

pub use catalog::{
    AFTER_SNAPSHOT, CHAIN_DEPTHS, DEPTH, DEPTHS, FIRST_WRITE, Group, OVERWRITE, Operation, Pattern,
    TESTS, Test,
};
pub use cpu::Cpu;
pub use histogram::Histogram;
pub use load::{Load, Outcome, Queue, Subject, run};
pub use report::{CpuOf, Latency, Measurement, Report, Target, TargetKind};
pub use runner::{Ground, LENGTH_MIN_BYTES, Moment, Options, Room, Runner};
pub use subjects::{DeviceSubject, NbdSubject, VolumeSubject};
