//! The few system calls that have no safe wrapper elsewhere.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

/// From `linux/stat.h` (Linux 6.1); the libc crate does not have it for every target.
const STATX_DIOALIGN: libc::c_uint = 0x2000;

/// From `linux/fcntl.h`; the libc crate does not have it for every target.
const F_SETSIG: libc::c_int = 10;

/// What the file system says about direct I/O on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DirectIo {
    /// Offsets and lengths, and addresses in memory, must be multiples of these.
    Aligned { offset: u32, memory: u32 },
    /// The file cannot be read or written directly.
    Refused,
    /// The kernel or the file system does not say.
    Unknown,
}

mod ioctls {
    use nix::request_code_none;

    nix::ioctl_read_bad!(blk_logical_size, request_code_none!(0x12, 104), libc::c_int);
    nix::ioctl_read_bad!(blk_physical_size, request_code_none!(0x12, 123), libc::c_uint);
    nix::ioctl_write_ptr_bad!(blk_discard, request_code_none!(0x12, 119), [u64; 2]);
    nix::ioctl_readwrite!(freeze, b'X', 119, libc::c_int);
    nix::ioctl_readwrite!(thaw, b'X', 120, libc::c_int);
}

/// Logical and physical block size of a block device in bytes.
pub(super) fn block_sizes(device: &File) -> io::Result<(u32, u32)> {
    let (mut logical, mut physical) = (0, 0);
    // SAFETY: the descriptor is open for the whole call, and BLKSSZGET and BLKPBSZGET each write
    // one int to the valid address they are given.
    unsafe {
        ioctls::blk_logical_size(device.as_raw_fd(), &raw mut logical)?;
        ioctls::blk_physical_size(device.as_raw_fd(), &raw mut physical)?;
    }
    match u32::try_from(logical) {
        Ok(logical) if logical.is_power_of_two() => Ok((logical, physical.max(logical))),
        _ => {
            Err(io::Error::other(format!("the device reports a logical block of {logical} bytes")))
        }
    }
}

/// Freezes the file system that a file is on, once all it holds in memory is written.
pub(super) fn freeze(file: BorrowedFd<'_>) -> io::Result<()> {
    let mut unused = 0;
    // SAFETY: the descriptor is open for the whole call; FIFREEZE looks at no argument.
    unsafe { ioctls::freeze(file.as_raw_fd(), &raw mut unused) }?;
    Ok(())
}

/// Lets a frozen file system write again.
pub(super) fn thaw(file: BorrowedFd<'_>) -> io::Result<()> {
    let mut unused = 0;
    // SAFETY: the descriptor is open for the whole call; FITHAW looks at no argument.
    unsafe { ioctls::thaw(file.as_raw_fd(), &raw mut unused) }?;
    Ok(())
}

/// Discards a range of a block device, in bytes, aligned to its logical block.
pub(super) fn discard_blocks(device: &File, offset: u64, len_bytes: u64) -> io::Result<()> {
    let range = [offset, len_bytes];
    // SAFETY: the descriptor is open for the whole call, and BLKDISCARD reads two u64 from the
    // valid address it is given.
    unsafe { ioctls::blk_discard(device.as_raw_fd(), &raw const range) }?;
    Ok(())
}

/// Whether somebody on this machine has a regular file open for writing, in whatever container, as far as the
/// file system tells: one on the network does not. `file` must be open for reading alone.
/// On NFS the answer may be yes for a file that nobody writes: its client knows too little.
///
/// # Errors
/// `file` is another user's, and this process may not ask for such a file.
pub fn is_open_for_writing(file: &File) -> io::Result<bool> {
    let descriptor = file.as_raw_fd();
    let control = |command, argument: libc::c_int| {
        // SAFETY: the descriptor is open for the whole call, and these commands take an int.
        match unsafe { libc::fcntl(descriptor, command, argument) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // Who opens the file in this moment makes the kernel tell this process so, by a signal that ends it if it is not
    // one that nobody minds.
    control(F_SETSIG, libc::SIGURG)?;
    match control(libc::F_SETLEASE, libc::F_RDLCK) {
        Ok(()) => control(libc::F_SETLEASE, libc::F_UNLCK).map(|()| false),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(true),
            Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Asks what direct I/O on `file` needs.
pub(super) fn direct_io(file: &File) -> DirectIo {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the descriptor is open, the path is an empty C string as AT_EMPTY_PATH wants, and
    // `stat` has room for the struct the kernel writes.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            STATX_DIOALIGN,
            stat.as_mut_ptr(),
        )
    };
    // SAFETY: all bytes were zeroed above, a valid value of this struct of integers, whether or
    // not the kernel wrote to it.
    let stat = unsafe { stat.assume_init() };
    if result != 0 || stat.stx_mask & STATX_DIOALIGN == 0 {
        return DirectIo::Unknown;
    }
    match (stat.stx_dio_offset_align, stat.stx_dio_mem_align) {
        (0, _) | (_, 0) => DirectIo::Refused,
        (offset, memory) => DirectIo::Aligned { offset, memory },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_file_open_for_writing_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let writer = File::create(&path).unwrap();
        let reader = File::open(&path).unwrap();
        let other = File::open(&path).unwrap();
        assert!(is_open_for_writing(&reader).unwrap());
        drop(writer);
        assert!(!is_open_for_writing(&reader).unwrap(), "others read it");
        drop(other);
        // Nothing of the question stays: a lease would hold this up.
        File::options().write(true).open(&path).unwrap();
    }
}
