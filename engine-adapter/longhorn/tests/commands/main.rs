//! What steers a volume: the service of a controller, and the commands that call it.
#![allow(clippy::unwrap_used, dead_code, missing_docs)]

mod raw;
mod service;
mod support;
mod volume;
