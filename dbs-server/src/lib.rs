//! Serving one store: NBD, block devices and the control socket.

pub mod any_store;
pub mod api;
pub mod bench;
pub mod clients;
pub mod control;
pub mod frontend;
mod interpose;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod nbd;
pub mod notify;
pub mod privileges;
pub mod remote;
pub mod serve;
pub mod transfer;
pub mod ublk;
