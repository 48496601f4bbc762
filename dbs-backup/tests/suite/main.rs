//! Backups to objects in memory and in a directory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cut;
mod foreign;
mod hold;
mod hostile;
mod many;
mod others;
mod read;
mod repository;
mod round;
mod s3;
mod s3_server;
mod support;
mod upstream;
