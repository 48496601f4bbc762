//! Commands that make, change and remove devices.

use super::abi::{
    ControlCommand, DeviceInfo, NewDevice, Numbers, Params, RawInfo, RawParams, TYPE_NUMBERS,
    command,
};
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where commands go.
pub const CONTROL_PATH: &str = "/dev/ublk-control";
/// How long a command may take that only reads or writes what the kernel knows.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one may take that waits for requests to end.
const PATIENCE_STOP: Duration = Duration::from_secs(600);

type Ring = IoUring<squeue::Entry128, cqueue::Entry>;

/// The character device that a server opens.
#[must_use]
pub fn char_path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// The block device that users open.
#[must_use]
pub fn block_path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// Opens a device's character device, which only one process can at a time.
///
/// # Errors
/// `NotFound`, `PermissionDenied`; `EBUSY` while another process has it.
pub fn open_device(id: u32) -> io::Result<OwnedFd> {
    // Without `O_NONBLOCK` a ring gives each copy of data to a thread of the kernel.
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    options.open(char_path(id)).map(OwnedFd::from)
}

/// The way to the driver. Each command waits until the kernel has answered.
pub struct Control {
    device: File,
    ring: Ring,
}

impl Control {
    /// Opens the driver's control device.
    ///
    /// # Errors
    /// `NotFound` if the driver is not there, `PermissionDenied`, or `io_uring` is not allowed.
    pub fn open() -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open(CONTROL_PATH)?;
        Ok(Self { device, ring: ring()? })
    }

    /// What the kernel can do: bits of [`feature`](super::feature).
    ///
    /// # Errors
    /// `EOPNOTSUPP` before Linux 6.5.
    pub fn features(&mut self) -> io::Result<u64> {
        self.call(command::FEATURES, u32::MAX, 0, Box::new(0u64), PATIENCE).map(|bits| *bits)
    }

    /// Makes a device; its character device appears.
    ///
    /// # Errors
    /// `EEXIST` if the number is taken, `EPERM` without `CAP_SYS_ADMIN`.
    pub fn add(&mut self, device: &NewDevice) -> io::Result<DeviceInfo> {
        let raw = device.raw();
        let info = self.call(command::ADD, raw.id, 0, Box::new(raw), PATIENCE)?;
        Ok(DeviceInfo::from(&*info))
    }

    /// What the kernel knows of a device.
    ///
    /// # Errors
    /// `ENODEV` if there is none with this number.
    pub fn info(&mut self, id: u32) -> io::Result<DeviceInfo> {
        let info =
            self.call(command::DEVICE_INFO, id, 0, Box::new(RawInfo::default()), PATIENCE)?;
        Ok(DeviceInfo::from(&*info))
    }

    /// Sets what the block device tells its users, before it is started.
    ///
    /// # Errors
    /// `EINVAL` if the kernel does not take them, `EACCES` once it was started.
    pub fn set_params(&mut self, id: u32, params: &Params) -> io::Result<()> {
        self.call(command::SET_PARAMS, id, 0, Box::new(params.raw()), PATIENCE).map(drop)
    }

    /// What the block device tells its users, and the numbers of both devices.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn params(&mut self, id: u32) -> io::Result<(Params, Numbers)> {
        let len = size_of::<RawParams>() as u32;
        let raw = RawParams { len, types: TYPE_NUMBERS, ..RawParams::default() };
        let raw = self.call(command::PARAMS, id, 0, Box::new(raw), PATIENCE)?;
        Ok((Params::from_raw(&raw), Numbers::from(&raw.numbers)))
    }

    /// Makes the block device, once all tags of all queues are with the kernel; it is read at
    /// once, to find partitions.
    ///
    /// # Errors
    /// The kernel's; `TimedOut` if a queue is not served.
    pub fn start(&mut self, id: u32, pid: u32) -> io::Result<()> {
        self.call(command::START, id, pid.into(), Box::new(()), PATIENCE).map(drop)
    }

    /// Removes the block device when its requests have ended; those that come fail.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn stop(&mut self, id: u32) -> io::Result<()> {
        self.call(command::STOP, id, 0, Box::new(()), PATIENCE_STOP).map(drop)
    }

    /// Removes a device whose character device nobody has open any more; stops it first.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn delete(&mut self, id: u32) -> io::Result<()> {
        self.call(command::DELETE, id, 0, Box::new(()), PATIENCE_STOP).map(drop)
    }

    /// Makes a device whose server is gone ready for another, which then opens the character
    /// device and hands over the tags.
    ///
    /// # Errors
    /// `EBUSY` while the old server ends.
    pub fn start_recovery(&mut self, id: u32) -> io::Result<()> {
        self.call(command::START_RECOVERY, id, 0, Box::new(()), PATIENCE).map(drop)
    }

    /// Lets requests go on, once all tags of all queues are with the kernel.
    ///
    /// # Errors
    /// The kernel's; `TimedOut` if a queue is not served.
    pub fn end_recovery(&mut self, id: u32, pid: u32) -> io::Result<()> {
        self.call(command::END_RECOVERY, id, pid.into(), Box::new(()), PATIENCE).map(drop)
    }

    /// Changes the size of a block device in use, in bytes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` before Linux 6.16.
    pub fn update_size(&mut self, id: u32, size: u64) -> io::Result<()> {
        let sectors = size / super::abi::SECTOR_BYTES;
        self.call(command::UPDATE_SIZE, id, sectors, Box::new(()), PATIENCE).map(drop)
    }

    /// Runs a command with memory that the kernel reads or fills.
    fn call<T: Plain>(
        &mut self,
        number: u32,
        id: u32,
        data: u64,
        memory: Box<T>,
        patience: Duration,
    ) -> io::Result<Box<T>> {
        let memory = Box::into_raw(memory);
        let len = size_of::<T>() as u16;
        let addr = if len == 0 { 0 } else { memory.addr() as u64 };
        let command =
            ControlCommand { device: id, queue: u16::MAX, len, addr, data, ..Default::default() };
        let entry = opcode::UringCmd80::new(Fd(self.device.as_raw_fd()), number)
            .cmd(command.bytes())
            .build();
        // SAFETY: the memory stays until the kernel has answered, and for good if it does not.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            return Err(io::Error::other("the control ring is full"));
        }
        let Some(result) = self.answer(patience)? else {
            // What the kernel has of it is given up with the old ring.
            self.ring = ring()?;
            let text = "the ublk driver does not answer";
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        };
        // SAFETY: the kernel is done with it; it came out of a box.
        let memory = unsafe { Box::from_raw(memory) };
        if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(memory) }
    }

    /// Waits for the kernel's answer.
    fn answer(&mut self, patience: Duration) -> io::Result<Option<i32>> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(entry) = self.ring.completion().next() {
                return Ok(Some(entry.result()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let time = Timespec::from(left);
            let args = SubmitArgs::new().timespec(&time);
            match self.ring.submitter().submit_with_args(1, &args) {
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::ETIME | libc::EINTR | libc::EAGAIN)
                    ) => {}
                result => drop(result?),
            }
        }
    }
}

fn ring() -> io::Result<Ring> {
    IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(4)
}

/// Memory that the kernel may fill with any bytes.
trait Plain {}
impl Plain for () {}
impl Plain for u64 {}
impl Plain for RawInfo {}
impl Plain for RawParams {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_driver_says_so() {
        if std::path::Path::new(CONTROL_PATH).exists() {
            return;
        }
        assert_eq!(Control::open().err().map(|e| e.kind()), Some(io::ErrorKind::NotFound));
        let missing = open_device(77).err().map(|e| e.kind());
        assert_eq!(missing, Some(io::ErrorKind::NotFound));
    }

    #[test]
    fn a_command_waits_for_its_answer() {
        // A file that knows no commands answers each with an error.
        let (Ok(ring), Ok(device)) = (ring(), tempfile::tempfile()) else { return };
        let mut control = Control { device, ring };
        for _ in 0..9 {
            let error = control.info(0).expect_err("no device");
            assert!(error.raw_os_error().is_some(), "{error}");
        }
        assert!(control.features().is_err());
    }
}
