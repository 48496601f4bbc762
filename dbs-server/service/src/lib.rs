//! What a process that serves needs beside its sockets.
//!
//! This crate owns what an operator sees of a server and grants it: its [`log`], its metrics for Prometheus
//! ([`metrics`]), the memory it takes for checksums ([`memory`]), the rights of root that it gives up
//! ([`privileges`]), and what it tells systemd ([`notify`](mod@notify)). It knows no protocol.
//!
//! Main types: [`metrics::MetricsServer`], where Prometheus reads; [`metrics::Text`], what it reads;
//! [`privileges::Unprivileged`], whom a process becomes.
//!
//! Enter at [`log`].

pub mod log;
pub mod memory;
pub mod metrics;
pub mod notify;
pub mod privileges;
