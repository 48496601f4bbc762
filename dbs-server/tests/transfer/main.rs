//! Images in and out: files, NBD servers, stores.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../nbd/support.rs"]
mod support;

mod peers;
mod store;
