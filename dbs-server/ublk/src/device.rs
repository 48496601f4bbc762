//! A block device from its beginning to its end, whatever carries out its requests.

use dbs_core::{Error, ErrorKind, Result};
use dbs_reactor::ublk::{
    CONTROL_PATH, Control, DeviceInfo, DeviceState, NewDevice, Params, char_path, open_device,
};
use nix::libc;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a device node may take to appear and to be given its owner.
const NODE_PATIENCE: Duration = Duration::from_secs(3);
/// How long a dead server may take to be gone entirely: its memory is given back, what it had in
/// flight ends. If it had all tags of a queue, the kernel notices only when a request is 30 s old.
const DEATH_PATIENCE: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(10);

/// What the thread of a queue starts with.
pub struct QueueStart {
    /// The character device.
    pub device: OwnedFd,
    /// Number of the device.
    pub id: u32,
    /// Number of the queue.
    pub queue: u16,
    /// Its tags: all are to go to the kernel, from the thread that serves them.
    pub depth: u16,
    /// Where it says what went wrong.
    pub health: Arc<Health>,
}

/// The thread of a queue. It ends by itself when its device is stopped.
pub trait Running: Send {
    /// The limits of its volume, if this thread knows them, delay its requests no more: the device is removed, and
    /// the kernel waits for them.
    fn ends_delays(&self) {}
    /// Answers what is under way, takes nothing more and ends: the next server goes on.
    fn leave(&self);
    /// Waits for its end.
    fn join(self: Box<Self>);
}

/// Starts the thread of a queue.
pub type Spawn<'a> = dyn FnMut(QueueStart) -> io::Result<Box<dyn Running>> + 'a;

/// Why a queue ended, if not because its device was stopped.
#[derive(Debug, Default)]
pub struct Health(Mutex<Option<String>>);

impl Health {
    /// Something went wrong; the first thing counts.
    pub fn fail(&self, error: &io::Error) {
        let mut failure = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert_with(|| error.to_string());
    }

    /// What went wrong.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A device that this process serves.
pub struct Device {
    info: DeviceInfo,
    queues: Vec<Box<dyn Running>>,
    health: Arc<Health>,
}

impl Device {
    /// Makes a device and starts it. `added` is told before anybody can use it, and may refuse.
    ///
    /// # Errors
    /// `Unsupported` if the kernel has no `ublk`, or an old one; `Exists` if the number is taken; `Io`.
    /// Nothing is left then.
    pub fn start(
        control: &mut Control,
        new: &NewDevice,
        params: &Params,
        added: impl FnOnce(&DeviceInfo) -> Result<()>,
        spawn: &mut Spawn<'_>,
    ) -> Result<Self> {
        let info = control.add(new).map_err(|e| explain(e, "making a block device"))?;
        let begun = check_flags(&info, new.flags)
            .and_then(|()| added(&info))
            .and_then(|()| {
                let set = control.set_params(info.id, params);
                set.map_err(|e| explain(e, "setting the parameters of the block device"))
            })
            .and_then(|()| Self::serve(&info, spawn));
        let device = match begun {
            Ok(device) => device,
            Err(error) => return Err(removed(control, info.id, error)),
        };
        match control.start(info.id, std::process::id()) {
            Ok(()) => Ok(device),
            Err(error) => {
                let why = device.health.failure().unwrap_or_else(|| error.to_string());
                let error = Error::new(
                    ErrorKind::Io,
                    format!("starting block device /dev/ublkb{} failed: {why}", info.id),
                );
                device.abandon();
                Err(removed(control, info.id, error))
            }
        }
    }

    /// Takes over a device whose server is gone, or will be soon, unless `give_up` says so before.
    ///
    /// # Errors
    /// `Busy` if its server is not gone after a while; `Io`. The device stays as it is.
    pub fn recover(
        control: &mut Control,
        id: u32,
        give_up: &dyn Fn() -> bool,
        spawn: &mut Spawn<'_>,
    ) -> Result<Self> {
        let info = wait_until_left(control, id, give_up)?;
        let device = Self::serve(&info, spawn)?;
        match control.end_recovery(id, std::process::id()) {
            Ok(()) => Ok(device),
            Err(error) => {
                let why = device.health.failure().unwrap_or_else(|| error.to_string());
                device.leave();
                Err(Error::new(
                    ErrorKind::Io,
                    format!("taking block device /dev/ublkb{id} over failed: {why}"),
                ))
            }
        }
    }

    /// Starts the threads of all queues.
    fn serve(info: &DeviceInfo, spawn: &mut Spawn<'_>) -> Result<Self> {
        let file = open_when_there(info.id)?;
        let health = Arc::new(Health::default());
        let mut device = Self { info: info.clone(), queues: Vec::new(), health };
        for queue in 0..info.queues {
            let begun = file.try_clone().and_then(|file| {
                let health = Arc::clone(&device.health);
                let (id, depth) = (info.id, info.depth);
                spawn(QueueStart { device: file, id, queue, depth, health })
            });
            match begun {
                Ok(running) => device.queues.push(running),
                Err(error) => {
                    device.abandon();
                    return Err(Error::io(error, "starting a queue of the block device"));
                }
            }
        }
        Ok(device)
    }

    /// Number, queues and depth as the kernel gave them.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What went wrong with a queue since.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.health.failure()
    }

    /// Removes the device: what its users have under way ends, what they ask for later fails.
    ///
    /// # Errors
    /// The kernel's; the device is not served any more even then.
    pub fn remove(self, control: &mut Control) -> Result<()> {
        let id = self.info.id;
        self.queues.iter().for_each(|queue| queue.ends_delays());
        let stopped = control.stop(id);
        match &stopped {
            // Its tags are back, which ends the threads.
            Ok(()) => self.queues.into_iter().for_each(Running::join),
            Err(_) => self.leave(),
        }
        let result = stopped.and_then(|()| control.delete(id));
        result.map_err(|e| explain(e, &format!("removing block device /dev/ublkb{id}")))
    }

    /// Stops serving; the device and its users wait for the next server.
    pub fn leave(self) {
        self.queues.iter().for_each(|queue| queue.leave());
        self.queues.into_iter().for_each(Running::join);
    }

    /// Ends threads of a device that nobody uses yet.
    fn abandon(self) {
        self.leave();
    }
}

/// A device that could not be started goes away.
fn removed(control: &mut Control, id: u32, error: Error) -> Error {
    match control.delete(id) {
        Ok(()) => error,
        Err(why) => error.context(format!("/dev/ublkc{id} could not be removed ({why})")),
    }
}

fn check_flags(info: &DeviceInfo, wanted: u64) -> Result<()> {
    if info.flags & wanted == wanted {
        return Ok(());
    }
    Err(Error::unsupported(
        "the ublk driver of this kernel is too old: Linux 6.5 or later is needed; `dbs serve --nbd` \
         works with any",
    ))
}

/// Opens the character device once it is there, and nobody else has it.
fn open_when_there(id: u32) -> Result<OwnedFd> {
    let deadline = Instant::now() + NODE_PATIENCE;
    loop {
        match open_device(id) {
            Ok(file) => return Ok(file),
            Err(_) if Instant::now() < deadline => thread::sleep(POLL),
            Err(error) => {
                let path = char_path(id);
                let hint = match error.kind() {
                    io::ErrorKind::NotFound => ": is /dev a devtmpfs, or kept up to date by udev?",
                    _ => "",
                };
                return Err(Error::io(error, format!("opening {}{hint}", path.display())));
            }
        }
    }
}

/// Waits until a dead server's device waits for the next server, and announces that.
fn wait_until_left(
    control: &mut Control,
    id: u32,
    give_up: &dyn Fn() -> bool,
) -> Result<DeviceInfo> {
    let deadline = Instant::now() + DEATH_PATIENCE;
    let named = |e: io::Error| explain(e, &format!("taking block device /dev/ublkb{id} over"));
    loop {
        let over = Instant::now() >= deadline || give_up();
        let info = control.info(id).map_err(named)?;
        if info.state == DeviceState::Quiesced {
            match control.start_recovery(id) {
                Ok(()) => return control.info(id).map_err(named),
                // A server that died while it took the device over has announced it already.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return Ok(info),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && !over => {}
                Err(e) => return Err(named(e)),
            }
        } else if info.state == DeviceState::Dead || over {
            return Err(Error::busy(format!(
                "block device /dev/ublkb{id} is not waiting for a server ({:?}, process {})",
                info.state, info.pid
            )));
        }
        thread::sleep(POLL);
    }
}

/// An error of the driver, with the way out.
#[must_use]
pub fn explain(error: io::Error, doing: &str) -> Error {
    let way_out =
        "`dbs preflight` says what this machine lacks, and `dbs serve --nbd` works without";
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO) => Error::unsupported(format!(
            "{doing}: the kernel's ublk driver is not loaded ({CONTROL_PATH} is missing); try \
             `modprobe ublk_drv`; {way_out}"
        )),
        Some(libc::EPERM | libc::EACCES) => Error::new(
            ErrorKind::Io,
            format!("{doing}: not permitted; it takes root (CAP_SYS_ADMIN); {way_out}"),
        ),
        Some(libc::ENOSYS) => {
            Error::unsupported(format!("{doing}: io_uring is not available here; {way_out}"))
        }
        Some(libc::EOPNOTSUPP) => Error::unsupported(format!(
            "{doing}: the ublk driver of this kernel is too old for this; {way_out}"
        )),
        Some(libc::EEXIST) => Error::new(
            ErrorKind::Exists,
            format!("{doing}: the device number is taken; `dbs attached` lists those of stores"),
        ),
        Some(libc::ENODEV) => Error::not_found(format!("{doing}: there is no such device")),
        _ => Error::io(error, doing.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_way_out() {
        let text = |number: i32| {
            explain(io::Error::from_raw_os_error(number), "attaching volume a").to_string()
        };
        for number in [libc::ENOENT, libc::EPERM, libc::ENOSYS, libc::EOPNOTSUPP] {
            let text = text(number);
            assert!(text.starts_with("attaching volume a: "), "{text}");
            assert!(text.contains("--nbd") && text.contains("preflight"), "{text}");
        }
        assert!(text(libc::ENOENT).contains("modprobe ublk_drv"));
        let taken = explain(io::Error::from_raw_os_error(libc::EEXIST), "x");
        assert_eq!(taken.kind(), ErrorKind::Exists);
        let gone = explain(io::Error::from_raw_os_error(libc::ENODEV), "x");
        assert_eq!(gone.kind(), ErrorKind::NotFound);
        assert_eq!(explain(io::Error::from_raw_os_error(libc::EIO), "x").kind(), ErrorKind::Io);
    }

    #[test]
    fn an_old_driver_is_refused() {
        let info = DeviceInfo {
            id: 0,
            queues: 1,
            depth: 1,
            max_io_bytes: 4096,
            state: DeviceState::Dead,
            pid: -1,
            flags: 0b0110,
            mark: 0,
        };
        assert!(check_flags(&info, 0b0010).is_ok());
        let error = check_flags(&info, 0b1010).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn the_first_failure_of_a_queue_counts() {
        let health = Health::default();
        assert_eq!(health.failure(), None);
        health.fail(&io::Error::other("one"));
        health.fail(&io::Error::other("two"));
        assert_eq!(health.failure().as_deref(), Some("one"));
    }
}
