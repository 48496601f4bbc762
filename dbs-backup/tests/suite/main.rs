//! Backups to objects in memory and in a directory.

mod cut;
mod hostile;
mod round;
mod support;
mod upstream;
