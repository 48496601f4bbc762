//! Views as the kernel shows them: real mounts. The server is another process (`server.rs`), so that
//! nothing a test does to a mount can keep the test from ending it: killed, it takes the connection
//! with it, and whoever waits for an answer gets an error.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod calls;
mod coherence;
mod images;
mod layout;
mod readers;
mod reads;
mod server;
mod times;
mod tools;
