//! The part of the Python package `dbs` that is in Rust: stores and the bytes of volumes. What
//! people see of it is in `python/dbs`; docs/python.md says how it is used.

mod backup_file;
mod backups;
mod blocks;
mod buffer;
mod convert;
mod error;
mod slot;
mod store;
mod turn;
mod watch;

/// The module `dbs._dbs`.
///
/// It says that it needs the global interpreter lock: a free-threaded interpreter never tried it, and
/// the package refuses to be imported there.
#[pyo3::pymodule(gil_used = true)]
mod _dbs {
    #[pymodule_export]
    use super::backup_file::RawBackup;
    #[pymodule_export]
    use super::backups::RawBackupStore;
    #[pymodule_export]
    use super::blocks::{Blocks, WritableBlocks};
    #[pymodule_export]
    use super::convert::{format_size, parse_size};
    #[pymodule_export]
    use super::store::RawStore;
}
