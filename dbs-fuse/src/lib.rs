//! A store as a read-only directory tree, through FUSE.
//!
//! ```text
//! store.json
//! volumes/NAME/head.raw              what the volume holds now
//! volumes/NAME/snapshots/SNAP.raw    what it held then
//! volumes/NAME/latest                link to the newest snapshot
//! volumes/NAME/info.json             the volume and its snapshots
//! volumes/NAME/map.json              where the head has data
//! ```
//!
//! Images are sparse files. The view keeps nothing from being changed or deleted: it sees volumes
//! and snapshots through [observers](dbs_core::volume::Observer). What the kernel may keep, and
//! why, is in `docs/decisions/0012-fuse.md`.

pub mod content;
mod fs;
mod mount;
pub mod mounts;
mod names;
mod node;
mod text;
mod times;
mod view;

pub use mount::{Mount, THREADS};
pub use names::{escape, unescape};
pub use view::{Options, image_path};
