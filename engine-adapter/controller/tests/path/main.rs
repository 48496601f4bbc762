//! The controller's data path over real sockets: our data server as replicas, and replicas written
//! here that are slow, full, hostile or do not answer.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../../data/tests/dataconn/support.rs"]
mod data_support;
#[path = "../../../../dbs-cli/tests/disk/mod.rs"]
mod disk;
mod fake;
#[allow(dead_code)]
#[path = "../../../../dbs-server/nvme/tests/nvme/host.rs"]
mod host;
mod support;

mod damage;
mod disks;
mod failures;
mod frontends;
mod local;
mod nbd;
mod null;
mod rebuilding;
mod sabotage;
mod verified;
