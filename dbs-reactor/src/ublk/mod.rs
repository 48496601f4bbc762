//! Block devices of the kernel that a process serves: `ublk`.
//!
//! [`Control`] makes and removes devices, with commands on `/dev/ublk-control`. Requests of a
//! device's users come over the reactor's own ring: [`Io::add_ublk_queue`](crate::Io::add_ublk_queue)
//! takes one queue of a device, [`Io::fetch`](crate::Io::fetch) hands each of its tags to the kernel
//! once, [`Handler::fetched`](crate::Handler::fetched) brings the requests, and
//! [`Io::commit`](crate::Io::commit) answers one and asks for the tag's next. Their data is
//! copied by reading and writing the device's character device at [`UblkQueue::data_offset`], as a
//! file of the reactor.
//!
//! Numbers and structures are those of `linux/ublk_cmd.h` (Linux 6.12, and what later kernels added
//! where it says so).
#![allow(unsafe_code)]

mod abi;
mod control;
mod queue;

pub use abi::{DeviceInfo, DeviceState, Discard, NewDevice, Numbers, Params, feature};
pub use control::{CONTROL_PATH, Control, block_path, char_path, open_device};
pub(crate) use queue::Mapped;
pub use queue::{UblkOp, UblkQueue, UblkRequest};

use std::io;

/// Most requests of one queue at a time.
pub const DEPTH_MAX: u16 = 4096;

/// `PR_SET_IO_FLUSHER` of `linux/prctl.h` (Linux 5.6).
const SET_IO_FLUSHER: libc::c_int = 57;

/// Marks the calling thread, and those it starts, as doing I/O for others: when memory is short
/// they are not made to wait for what they serve themselves.
///
/// # Errors
/// It needs `CAP_SYS_RESOURCE`.
pub fn serve_io_for_others() -> io::Result<()> {
    // SAFETY: a flag of the thread; no memory is involved.
    let result = unsafe { libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
