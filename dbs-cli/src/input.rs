//! The standard input of a command that can be stopped while nothing comes.

use crate::progress::Stop;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

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
        while !self.stop.asked() {
            let mut file = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)];
            match poll(&mut file, PollTimeout::from(TICK)) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return (&self.file).read(buf),
                Err(error) => return Err(error.into()),
            }
        }
        // Readers begin again after `ErrorKind::Interrupted`.
        Err(io::Error::other("stopped by a signal"))
    }
}

impl Read for Input {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buf)
    }
}
