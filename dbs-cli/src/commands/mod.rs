//! The commands: each its arguments and what it does.

pub mod attach;
pub mod backup;
pub mod bench;
pub mod clients;
pub mod doctor;
pub mod encryption;
pub mod export;
pub mod import;
pub mod mount;
pub mod repair;
pub mod scrub;
pub mod serve;
pub mod snapshot;
pub mod store;
pub mod stream;
pub mod taken;
pub mod tools;
pub mod top;
pub mod volume;
