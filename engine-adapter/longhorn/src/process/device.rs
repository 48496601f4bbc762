//! The frontends `ublk` and `tgt-blockdev`: the volume as a block device with a node of the volume's name,
//! which outlives its controller.
//!
//! A file says which device is the volume's, another one which replicas may go on with it
//! ([`Ledger`]). A controller that starts finds the device that a dead one left and takes it over, or
//! ends it; with `--upgrade` it has the one that still runs end first.

use super::ledger::{Ledger, write_durably};
use dbs_core::{Error, ErrorKind, Result};
use dbs_frontend::lock;
use dbs_reactor::ublk::{Control, DeviceInfo, DeviceState, block_path};
use dbs_service::log;
use dbs_ublk::explain;
use longhorn_controller::frontend::{UblkFrontend, UblkOptions};
use longhorn_controller::path::Path;
use longhorn_controller::volume::{Frontend, Offer};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How long an older controller may take to end. If it had all tags of a queue, the
/// kernel notices only when a request is 30 s old.
const TIMEOUT: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(20);
/// Rights of the node: those of block devices.
const NODE_MODE: u32 = 0o660;

/// Where such a frontend keeps what it needs.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// Of what the next controller must know; gone when the machine ends, as the device is.
    pub run: PathBuf,
    /// Of nodes.
    pub nodes: PathBuf,
}

impl Places {
    /// The file of a volume's ledger.
    pub fn ledger(&self, volume: &str) -> PathBuf {
        self.run.join(format!("ublk-{volume}.replicas"))
    }

    fn record(&self, volume: &str) -> PathBuf {
        self.run.join(format!("ublk-{volume}.json"))
    }
}

/// What the next controller must know of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Its number, and what the kernel knows it by.
    device: u32,
    mark: u64,
    /// Who serves it, and when that process began, in ticks: numbers are used again.
    pid: u32,
    began: u64,
}

impl Record {
    fn of(info: &DeviceInfo, mark: u64) -> Self {
        let pid = std::process::id();
        Self { device: info.id, mark, pid, began: began(pid).unwrap_or(0) }
    }

    /// Whether the process that serves it runs.
    fn is_served(&self) -> bool {
        self.pid != std::process::id() && began(self.pid) == Some(self.began)
    }
}

/// When a process began, in ticks since the machine did; `None` if it has ended.
fn began(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything; behind it the third field is next.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether a frontend of this kind is a block device.
pub(super) fn is_device(kind: &str) -> bool {
    matches!(kind, "ublk" | "tgt-blockdev")
}

/// A volume's block device.
pub(super) struct DeviceVolume {
    pub kind: String,
    pub path: Arc<Path>,
    pub options: UblkOptions,
    pub places: Places,
    pub ledger: Arc<Ledger>,
    pub running: Mutex<Option<Running>>,
}

/// A device, and its node.
pub(super) struct Running {
    frontend: UblkFrontend,
    volume: String,
    node: PathBuf,
}

impl Frontend for DeviceVolume {
    fn name(&self) -> &str {
        &self.kind
    }

    fn endpoint(&self) -> String {
        let running = lock(&self.running);
        running.as_ref().map_or_else(String::new, |running| running.node.display().to_string())
    }

    fn is_up(&self) -> bool {
        lock(&self.running).is_some()
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let frontend = match self.left_behind(offer)? {
            // Where that fails the device waits on: nothing was done to the volume.
            Some(record) => self.take_over(&record, offer).inspect_err(|_| self.ledger.leave())?,
            None => self.make(offer)?,
        };
        match self.make_node(&frontend, &offer.volume) {
            Ok(node) => {
                let (volume, device) = (offer.volume.clone(), frontend.device());
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("volume", &volume), ("device", &device.display()), ("node", &node.display())];
                log::info("attached", &fields);
                *lock(&self.running) = Some(Running { frontend, volume, node });
                Ok(())
            }
            Err(error) => {
                self.end(frontend, &offer.volume)?;
                Err(error)
            }
        }
    }

    fn expand(&self, size: u64) -> Result<()> {
        lock(&self.running).as_ref().map_or(Ok(()), |running| running.frontend.resize(size))
    }

    fn stop(&self) -> Result<()> {
        // Not under the lock: who asks for its state must not wait for its users' last requests.
        let Some(Running { frontend, volume, node }) = lock(&self.running).take() else {
            return Ok(());
        };
        let ended = self.end(frontend, &volume);
        // If it stays, it leads nowhere, and the next device's takes its place.
        let _ = fs::remove_file(node);
        ended
    }
}

impl DeviceVolume {
    /// A new device.
    fn make(&self, offer: &Offer) -> Result<UblkFrontend> {
        let mark = u64::from_le_bytes(unique()?);
        let added = |info: &DeviceInfo| {
            // From here on the next controller finds it, should this one die.
            self.ledger.begin(mark)?;
            self.save(&offer.volume, &Record::of(info, mark))
        };
        let made = UblkFrontend::start(&self.path, self.options, mark, added);
        if made.is_err() {
            self.forget(&offer.volume);
        }
        made
    }

    /// Ends a device in good order.
    fn end(&self, frontend: UblkFrontend, volume: &str) -> Result<()> {
        let removed = frontend.remove();
        // Even if it is there still: this controller does not answer it any more.
        self.ledger.end();
        if removed.is_ok() {
            self.forget(volume);
        }
        removed
    }

    /// The device that another controller of the volume left behind, or serves and is to hand over; one
    /// that may not be taken over is ended.
    fn left_behind(&self, offer: &Offer) -> Result<Option<Record>> {
        let file = self.places.record(&offer.volume);
        let Some(record) = fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok())
        else {
            return Ok(None);
        };
        let record: Record = record;
        let doing = "looking for the block device of an earlier controller";
        let mut control = Control::open().map_err(|e| explain(e, doing))?;
        let state = match control.info(record.device) {
            Ok(info) if info.mark == record.mark => info.state,
            // It is gone; a number may be another's by now.
            Ok(_) => return Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
            Err(error) => return Err(explain(error, doing)),
        };
        if state == DeviceState::Dead {
            // It was not started, or not removed to the end.
            control.delete(record.device).map_err(|e| explain(e, doing))?;
            return Ok(None);
        }
        if record.is_served() {
            self.end_older(&record, offer)?;
        }
        wait_until_left(&mut control, &record)?;
        match self.ledger.take_over(record.mark, offer.upgrade) {
            Ok(()) => Ok(Some(record)),
            Err(error) if error.kind() != ErrorKind::Busy => Err(error),
            Err(why) => {
                let device = block_path(record.device);
                let what = "the device is removed: writes that its last controller acknowledged \
                            may be missing";
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("device", &device.display()), ("error", &why), ("what", &what)];
                log::error("not-taken-over", &fields);
                control.delete(record.device).map_err(|e| explain(e, doing))?;
                Ok(None)
            }
        }
    }

    /// Has the controller that serves the device end, which leaves the device.
    fn end_older(&self, record: &Record, offer: &Offer) -> Result<()> {
        let pid = record.pid;
        if !offer.upgrade {
            let (volume, device) = (&offer.volume, block_path(record.device));
            return Err(Error::busy(format!(
                "process {pid} serves volume {volume} as {}; --upgrade takes it over",
                device.display()
            )));
        }
        // As long as it lives, a refusal costs nobody anything.
        self.ledger.check(record.mark, true)?;
        let number = i32::try_from(pid).map_err(|_| Error::invalid(format!("process {pid}")))?;
        kill(Pid::from_raw(number), Signal::SIGHUP)
            .map_err(|e| Error::io(e.into(), format!("ending process {pid}")))
    }

    fn take_over(&self, record: &Record, offer: &Offer) -> Result<UblkFrontend> {
        let frontend = UblkFrontend::recover(&self.path, record.device)?;
        let device = frontend.device();
        let now = Record { pid: std::process::id(), began: 0, ..record.clone() };
        let now = Record { began: began(now.pid).unwrap_or(0), ..now };
        self.save(&offer.volume, &now)?;
        let fields: [(&str, &dyn std::fmt::Display); 2] =
            [("volume", &offer.volume), ("device", &device.display())];
        log::info("taken_over", &fields);
        // An expansion may have been what the old controller did last.
        if let Err(error) = frontend.resize(offer.size) {
            log::warn("resized", &[("volume", &offer.volume), ("error", &error)]);
        }
        Ok(frontend)
    }

    /// Makes the node `VOLUME`, in the place of what an earlier device has left.
    fn make_node(&self, frontend: &UblkFrontend, volume: &str) -> Result<PathBuf> {
        let node = self.places.nodes.join(volume);
        let failed = |e: io::Error| Error::io(e, format!("making {}", node.display()));
        let id = frontend.info().id;
        let numbers = Control::open().and_then(|mut control| control.params(id));
        let (major, minor) = numbers.map_err(failed)?.1.block;
        fs::create_dir_all(&self.places.nodes).map_err(failed)?;
        match fs::symlink_metadata(&node) {
            Ok(there) if there.file_type().is_block_device() || there.is_symlink() => {
                fs::remove_file(&node).map_err(failed)?;
            }
            Ok(_) => return Err(failed(io::ErrorKind::AlreadyExists.into())),
            Err(_) => {}
        }
        let number = makedev(u64::from(major), u64::from(minor));
        mknod(&node, SFlag::S_IFBLK, Mode::from_bits_truncate(NODE_MODE), number)
            .map_err(|e| failed(e.into()))?;
        Ok(node)
    }

    fn save(&self, volume: &str, record: &Record) -> Result<()> {
        let file = self.places.record(volume);
        let written = serde_json::to_vec(record)
            .map_err(io::Error::other)
            .and_then(|text| write_durably(&file, &text));
        written.map_err(|e| Error::io(e, format!("writing {}", file.display())))
    }

    /// The device is gone.
    fn forget(&self, volume: &str) {
        self.ledger.end();
        // If it stays, it is seen to be of no device.
        let _ = fs::remove_file(self.places.record(volume));
    }
}

/// Waits until the controller of a device has ended entirely: nothing that it does comes later.
fn wait_until_left(control: &mut Control, record: &Record) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let mut live = || control.info(record.device).is_ok_and(|info| info.state == DeviceState::Live);
    while record.is_served() || live() {
        if Instant::now() >= deadline {
            let (device, pid) = (block_path(record.device), record.pid);
            return Err(Error::busy(format!("process {pid} does not leave {}", device.display())));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Bytes that no other device has.
fn unique() -> Result<[u8; 8]> {
    use ring::rand::{SecureRandom, SystemRandom};
    let mut bytes = [0; 8];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Error::io(io::Error::other("no random bytes"), "marking a block device"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_told_apart() {
        let own = std::process::id();
        let since = began(own).unwrap();
        assert!(since > 0);
        assert_eq!(began(0x7fff_fff0), None);
        let parent = std::os::unix::process::parent_id();
        let record = Record { device: 0, mark: 1, pid: parent, began: began(parent).unwrap() };
        assert!(record.is_served());
        assert!(!Record { began: record.began + 1, ..record.clone() }.is_served());
        assert!(!Record { pid: own, began: since, ..record }.is_served(), "not by another");
    }

    #[test]
    fn names_of_volumes_do_not_meet() {
        let places = Places { run: "/run/x".into(), nodes: "/dev/longhorn".into() };
        assert_ne!(places.record("v"), places.ledger("v"));
        assert_ne!(places.record("v.replicas"), places.ledger("v.json"));
    }
}
