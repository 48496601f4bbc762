//! The standard input and output of commands that can be stopped while nothing comes, and while nobody reads.

use crate::output::check_open;
use crate::progress::Stop;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

/// Milliseconds between two looks at whether to stop.
const TICK: u8 = 100;

/// Reads the standard input past the buffer that the library keeps of it: nothing else reads it.
pub struct Input {
    file: File,
    stop: Stop,
}

impl Input {
    /// One whose reads fail once `stop` was asked.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(stop: &Stop) -> io::Result<Self> {
        let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        Ok(Self { file, stop: stop.clone() })
    }
}

impl Read for &Input {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        wait(&self.file, PollFlags::POLLIN, &self.stop)?;
        (&self.file).read(buf)
    }
}

impl Read for Input {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buf)
    }
}

/// Writes to the standard output, past the library's buffer.
pub struct Output {
    file: File,
    stop: Stop,
}

impl Output {
    /// One whose writes to a pipe fail once `stop` was asked.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(stop: &Stop) -> io::Result<Self> {
        check_open()?;
        let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        // A write of more than a pipe has room for waits for its reader. What others have open stays as it is: this
        // is a pipe opened anew. Where that cannot be, writes wait.
        let anew = match file.metadata()?.file_type().is_fifo() {
            true => OpenOptions::new()
                .write(true)
                .custom_flags(OFlag::O_NONBLOCK.bits())
                .open("/proc/self/fd/1")
                .ok(),
            false => None,
        };
        Ok(Self { file: anew.unwrap_or(file), stop: stop.clone() })
    }
}

impl Output {
    /// Makes what was written durable.
    ///
    /// # Errors
    /// Those of the system.
    pub fn sync(&self) -> io::Result<()> {
        sync(&self.file)
    }
}

impl Write for &Output {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            match (&self.file).write(buf) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    wait(&self.file, PollFlags::POLLOUT, &self.stop)?;
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes what was written durable if it is a file or device: some tell only then that they are full.
pub fn sync(file: &File) -> io::Result<()> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() || kind.is_block_device() { file.sync_all() } else { Ok(()) }
}

/// Waits until a file can be read or written.
fn wait(file: &File, what: PollFlags, stop: &Stop) -> io::Result<()> {
    while !stop.asked() {
        match poll(&mut [PollFd::new(file.as_fd(), what)], PollTimeout::from(TICK)) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    // Readers begin again after `ErrorKind::Interrupted`.
    Err(io::Error::other("stopped by a signal"))
}
