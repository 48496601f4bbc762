//! Backups of volumes, in one of two layouts: that of Longhorn's backup store, so that what Longhorn's engine has written
//! can be restored here, and the other way round (`docs/backup.md`); or a repository, which has what that layout forbids
//! (`docs/repository.md`).
//!
//! [`BackupStore`] is a place with backups, which a [`url::Url`] names. A backup is made from a [`Source`], and restored
//! to a [`Target`]. All calls block. An operation uses several threads until it returns; it reports progress on the
//! thread of its caller, who may end it there.

mod blocks;
pub mod catalog;
pub mod codec;
pub mod config;
mod create;
mod hold;
#[cfg(feature = "testing")]
pub mod hostile;
pub mod image;
pub mod info;
mod lock;
pub mod names;
pub mod objects;
mod pool;
mod prune;
pub mod read;
mod remove;
mod repository;
mod restore;
mod store;
pub mod system;
pub mod url;
mod verify;

pub use blocks::{Source, Target};
pub use create::{CreateOptions, Created, Creation};
pub use hold::LABEL_HELD;
pub use pool::Work;
pub use prune::{Judged, Retention};
pub use remove::Removed;
pub use repository::{Collected, InitOptions, KeyInfo, Secret};
pub use restore::{Onto, Restoration, Restored};
pub use store::BackupStore;
pub use verify::{BadBlock, Verified};
