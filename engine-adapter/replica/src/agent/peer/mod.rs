//! Between the sync agents of two DBS replicas: layers are compared and copied by blocks, as what
//! they are, instead of as sparse files.
//!
//! The target tells what it has of a part of a layer: for each window of at most 1 MiB with
//! anything in it the digests of its blocks, for all else that it is absent. The source answers
//! with what differs. So each side reads what it has once, in order; a target that has nothing
//! computes and sends no digests; and after a lost connection, or in another process, the transfer
//! goes on where it was. Digests of whole extents would spare 0.4 % of traffic and cost the source
//! a second reading of each that differs.

pub mod client;
pub mod layer;
pub mod offer;
pub mod service;
pub mod take;
