//! Backups of volumes, in the layout of Longhorn's backup store.
pub mod codec;
pub mod config;
mod lock;
pub mod names;
pub mod objects;
pub mod url;
