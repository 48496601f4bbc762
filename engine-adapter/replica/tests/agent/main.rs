//! The sync agent: files, purge, rebuild and clone, against our own and upstream's; and the controller's
//! volume over such replicas.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod backing;
mod backup;
mod clone;
mod controller;
mod files;
mod peer;
mod purge;
mod rebuild;
mod restore;
mod upstream;
