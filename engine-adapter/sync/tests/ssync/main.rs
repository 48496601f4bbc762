//! The transfer of sparse files: pairs of our two sides, layers, hostile peers, upstream's program.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod hostile;
mod layers;
mod pairs;
mod upstream;
