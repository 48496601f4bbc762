//! DBS, the Direct Block Store: many thin volumes with snapshots and clones on one block device or
//! file.

pub mod error;
pub mod format;
pub mod info;
pub mod io;
pub mod limits;
mod meta;
pub mod sabotage;
pub mod store;
pub mod units;
pub mod v1;
pub mod volume;

pub use error::{Damage, Error, ErrorKind, Result};
pub use io::DirectIo;
pub use store::{InitOptions, IoDriver, OpenOptions, Store, TailPlace};
pub use units::{format_size, parse_size};
pub use volume::Volume;
