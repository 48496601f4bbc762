//! Backups to objects in memory and in a directory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cut;
mod foreign;
mod hostile;
mod others;
mod round;
mod s3;
mod support;
mod upstream;
