//! Upstream's file transfer between replicas: HTTP, one receiver on a port of its own per file.
//!
//! | request | means |
//! |---|---|
//! | `GET open?begin=0&directIO=D&end=SIZE` | create the file or change its size; JSON bool: it existed before |
//! | `GET getRecordedMetadata` | JSON of [`crate::image::Record`], or 404 |
//! | `GET getChecksum?begin=B&end=E` | JSON: SHA-512 in base64, or `null` unless all of it is data |
//! | `POST sendHole?begin=B&end=E` | make a hole |
//! | `POST writeData?begin=B&end=E` | write the body |
//! | `POST close?checksum=C&checksumMethod=M` | the end; the file's checksum, if the sender knows it |
//!
//! All paths start with `/v1-ssync/`. A sender runs four workers, writes at most 2 MiB at a time,
//! and, if the file existed, asks for the checksum of each piece first and sends only what differs.
//! Two files whose recorded checksums are equal need neither `open` nor data.

mod buffers;
mod receive;
mod send;

#[cfg(feature = "testing")]
pub use receive::serve_one;
pub use receive::{ReceiveOptions, Received, receive};
pub use send::{Retry, SendOptions, Sent, send};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest;

/// What all paths start with.
const ROOT: &str = "/v1-ssync/";

/// The largest piece that is compared or written at once, in bytes.
const BATCH: u64 = 2 * 1024 * 1024;

/// The workers of a sender.
const WORKERS: usize = 4;

/// SHA-512 as it goes over the wire inside a JSON string.
fn sha512(data: &[u8]) -> String {
    STANDARD.encode(digest::digest(&digest::SHA512, data))
}
