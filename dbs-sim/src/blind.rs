//! A store of which one block of metadata cannot be read, for once: recovery refuses, or it comes to the
//! same as with that block. It never goes back to something older.

use crate::disk::{BLOCK, Faults, SimDisk};
use crate::env::SimEnv;
use crate::image;
use crate::outcomes::{End, Outcomes};
use crate::verify;
use dbs_core::io::Storage;
use dbs_core::{ErrorKind, Store};
use std::sync::Arc;

/// Opens what a crash left with a random block of the first `metadata` bytes unreadable, and, if that is
/// done, again when all can be read.
///
/// # Errors
/// What it holds that it may not.
pub fn open(
    disk: SimDisk,
    metadata: u64,
    outcomes: &Outcomes,
    rng: &mut fastrand::Rng,
) -> Result<(), String> {
    let block = BLOCK as u64;
    let at = rng.u64(0..metadata / block) * block;
    let failed = |e: String| format!("with the block at {at} unreadable: {e}");
    let disk = Arc::new(disk);
    disk.arm(Faults { read_eio_in: Some(at..at + block), ..Faults::default() });
    for blind in [true, false] {
        let env = Arc::new(SimEnv::new(rng.u64(..)));
        env.reboot();
        let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
        match Store::open_on(storage, None, env, false).map(image::given) {
            Ok(store) => {
                outcomes.compare(&store, End::PowerLost).map_err(failed)?;
                if !blind {
                    verify::check(&store).map_err(failed)?;
                }
            }
            // It is needed, or was the last good one.
            Err(error) if blind && matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {}
            Err(error) => return Err(failed(format!("open: {error}"))),
        }
        disk.arm(Faults::default());
    }
    Ok(())
}
