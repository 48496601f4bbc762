//! Longhorn's own instance manager, unmodified, over our engine and over upstream's: it starts replicas and
//! controllers as it does in a cluster, and steers them by its proxy. What it answers over both is compared.
//!
//! - `INSTANCE_MANAGER_BIN`: the program `longhorn-instance-manager`. In its directory, or in `PATH`, there is
//!   `grpc_health_probe`, by which it sees that a process is up. `make upstream-manager` builds both.
//! - `LONGHORN_BIN`: upstream's `longhorn`. Without it our engine alone is tried, and nothing is compared.
//!
//! Root is needed. Each test runs in namespaces of its own, with an own network, `/run`, `/host` and `/usr/local/bin`,
//! which the manager has fixed paths in; nothing outside of them sees it, and all its processes end with it. A test that
//! lacks something says `SKIPPED`.
#![allow(clippy::unwrap_used, missing_docs)]

mod apart;
mod grpc;
mod lab;
mod plain;

mod processes;
mod proxy;
#[path = "../commands/raw.rs"]
mod raw;
