//! DBS, the Direct Block Store: many thin volumes with snapshots and clones on one block device or
//! file.
//!
//! [`Store`] is the device or file, [`Volume`] what is read and written. All calls block, and may be made
//! from many threads at once; [`volume::Request`] is for servers that do the I/O themselves.
//!
//! The store has no thread of its own: somebody calls [`Store::housekeep`] from time to time.
//!
//! `examples/` has a backup tool, a block server and an inspector. Semantic versioning applies to the interface that
//! this page shows. Other public modules are for the crates of DBS itself, and change without notice.
//!
//! ```
//! use dbs_core::{InitOptions, OpenOptions, Store};
//! use std::sync::atomic::{AtomicBool, Ordering};
//! use std::time::Duration;
//!
//! # fn main() -> dbs_core::Result<()> {
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = &directory.path().join("store");
//! Store::init(path, &InitOptions { size: Some(64 << 20), ..InitOptions::default() })?;
//! let store = Store::open(path, &OpenOptions::default())?;
//! let done = AtomicBool::new(false);
//! std::thread::scope(|scope| {
//!     scope.spawn(|| {
//!         while !done.load(Ordering::Relaxed) {
//!             match store.housekeep(Duration::from_millis(20)) {
//!                 Ok(true) => {}
//!                 Ok(false) => std::thread::sleep(Duration::from_millis(100)),
//!                 Err(error) => return eprintln!("{error}"),
//!             }
//!         }
//!     });
//!     store.create_volume("data", 1 << 30)?;
//!     let volume = store.volume("data")?;
//!     volume.write_at(4096, &[42; 512], false)?;
//!     volume.flush()?; // durable
//!     store.create_snapshot("data", "monday", &Default::default())?;
//!     volume.discard(0, 1 << 20)?;
//!     let mut sector = [0; 512];
//!     store.volume("data@monday")?.read_at(4096, &mut sector)?;
//!     assert_eq!(sector, [42; 512]);
//!     done.store(true, Ordering::Relaxed);
//!     Ok::<_, dbs_core::Error>(())
//! })?;
//! store.close()
//! # }
//! ```

pub mod crypt;
pub mod error;
pub mod info;
pub mod store;
pub mod units;
pub mod volume;

#[doc(hidden)]
pub mod format;
#[doc(hidden)]
pub mod io;
#[doc(hidden)]
pub mod limits;
#[doc(hidden)]
pub mod looks;
mod meta;
#[doc(hidden)]
pub mod sabotage;
#[doc(hidden)]
pub mod v1;

pub use crypt::Secret;
pub use error::{Damage, Error, ErrorKind, Result};
pub use io::DirectIo;
pub use meta::names::is_hidden;
pub use store::{Backing, InitOptions, IoDriver, OpenOptions, SnapshotOptions, Store, TailPlace};
pub use units::{format_size, format_time, parse_size};
pub use volume::Volume;
