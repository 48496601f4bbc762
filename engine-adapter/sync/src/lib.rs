//! Layers of a volume as sparse files, and how such files go from replica to replica.
//!
//! Upstream keeps each snapshot in a sparse file, and copies and compares those. This crate owns that view of a
//! store: [`image`] shows a layer as a file with holes and takes one in, with its checksum; [`ssync`] is upstream's
//! transfer over HTTP.
//!
//! Main types: [`image::Source`], a sparse file to read; [`image::Sink`], one that is being received;
//! [`image::Record`], the checksum that is kept of one.
//!
//! Enter at [`ssync::send`] and [`ssync::receive`].

pub mod image;
pub mod ssync;
