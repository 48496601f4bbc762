//! The command `longhorn` as processes: replicas, sync agents, the controller.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../../../dbs-cli/tests/disk/mod.rs"]
mod disk;
#[allow(dead_code)]
#[path = "../../../../dbs-server/nvme/tests/nvme/host.rs"]
mod host;
mod support;

mod agent;
mod backing;
mod backup;
mod checksums;
mod controller;
mod disks;
mod environment;
mod files;
mod flushes;
mod frontends;
mod handover;
mod iscsi;
mod life;
mod limits;
mod local;
mod moving;
mod page;
mod shared;
mod synced;
mod taking;
mod tls;

const PROGRAM: &str = env!("CARGO_BIN_EXE_longhorn");
const REPLICA: [&str; 3] = ["--volume-name", "vol", "replica"];
