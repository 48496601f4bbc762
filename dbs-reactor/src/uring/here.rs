//! What the kernel gives back undone, for want of resources.
#![allow(unsafe_code)]

use super::{Op, Uring};
use nix::errno::Errno;
use std::io;
use std::os::fd::AsRawFd;

impl Uring {
    /// The kernel cancels what nobody has asked it to cancel if it can make no thread for it, as where a container may have
    /// no more of them. It has not begun it, and this thread does.
    pub(super) fn or_here(&mut self, index: u32, result: io::Result<usize>) -> io::Result<usize> {
        match result {
            Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => {
                self.carry_out(index).unwrap_or(Err(error))
            }
            result => result,
        }
    }

    /// Carries out a request of a file on this thread, which waits for it.
    fn carry_out(&mut self, index: u32) -> Option<io::Result<usize>> {
        let done = match self.ops.get_mut(index)? {
            Op::Sync { target, .. } => {
                let fd = self.targets.get(*target)?.as_raw_fd();
                // SAFETY: a descriptor that is open, and no memory.
                unsafe { libc::fdatasync(fd) as isize }
            }
            Op::Part { transfer, segment } => {
                let transfer = self.transfers.get(*transfer)?;
                let fd = self.targets.get(transfer.target)?.as_raw_fd();
                let offset = libc::off_t::try_from(segment.offset).ok()?;
                // SAFETY: `transfer` checked that the segment lies inside the buffer, which is the transfer's.
                unsafe {
                    let at = transfer.memory.as_ptr().add(segment.start);
                    match transfer.write {
                        true => libc::pwrite(fd, at.cast(), segment.len, offset),
                        false => libc::pread(fd, at.cast(), segment.len, offset),
                    }
                }
            }
            Op::Receive { .. } | Op::Fill { .. } | Op::Send { .. } => return None,
        };
        Some(Errno::result(done).map(|count| count as usize).map_err(Into::into))
    }
}

/// Whether the kernel asks to try again: no resources, a signal, or no receive buffer left.
pub(super) fn again(result: &io::Result<usize>) -> bool {
    let Err(error) = result else { return false };
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS))
}
