//! Stores and backup stores as read-only directory trees, through FUSE.
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
//!
//! The tree of a backup store ([`Backups`]) is
//!
//! ```text
//! store.json
//! errors.log                         why reads failed
//! volumes/NAME/TIME_BACKUP.raw       what the backup holds
//! volumes/NAME/latest                link to the newest one
//! ```
//!
//! One session (`fs.rs`, `mount.rs`) serves both: what it asks of either is the trait in `tree.rs`.

mod backups;
pub mod content;
mod fs;
mod mount;
pub mod mounts;
mod names;
mod node;
mod store;
mod tree;

pub use backups::{BackupOptions, Backups};
pub use mount::{Mount, THREADS};
pub use names::{escape, unescape};
pub use store::{Options, image_path};
