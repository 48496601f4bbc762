//! The frontend `ublk`: the volume as a block device of the kernel's `ublk`, with a node of the volume's name,
//! which outlives its controller. `tgt-blockdev` is the same where there is `ublk`.
//!
//! A file says which device is the volume's, another one which replicas may go on with it
//! ([`Ledger`]). A controller that starts finds the device that a dead one left and takes it over, or
//! ends it; with `--upgrade` it has the one that still runs end first.

use super::ledger::{Ledger, write_durably};
use super::node;
use super::running::Running;
use dbs_core::{Error, ErrorKind, Result};
use dbs_reactor::ublk::{Control, DeviceInfo, DeviceState, block_path};
use dbs_service::log;
use dbs_ublk::explain;
use longhorn_controller::frontend::{UblkFrontend, UblkOptions};
use longhorn_controller::path::Path;
use longhorn_controller::volume::{Frontend, Offer, forget_frozen, thaw_left};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::makedev;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The name of the frontend, and of what its device is made with.
pub(super) const UBLK: &str = "ublk";
/// Where the kernel shows devices.
pub(super) const SYS: &str = "/sys";
/// How long an older controller may take to end. If it had all tags of a queue, the
/// kernel notices only when a request is 30 s old.
const TIMEOUT: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(20);

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

    /// The file that says which device a controller has frozen file systems on.
    pub fn frozen(&self, volume: &str) -> PathBuf {
        self.run.join(format!("{volume}.frozen"))
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

    /// Whether the device is there, by what the kernel says of its number, and whether it shows one of this number.
    fn is_there(&self, info: io::Result<DeviceInfo>, shown: bool) -> Result<bool> {
        match info {
            Ok(info) => Ok(info.mark == self.mark && info.state != DeviceState::Dead),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) || !shown => Ok(false),
            Err(error) => {
                Err(explain(error, "looking for the block device of an earlier controller"))
            }
        }
    }

    /// Whether the process that serves it runs.
    fn is_served(&self) -> bool {
        is_running(self.pid, self.began)
    }
}

/// Whether another process runs that has this number and began then.
pub(super) fn is_running(pid: u32, since: u64) -> bool {
    pid != std::process::id() && began(pid) == Some(since)
}

/// Has the process of a controller end, and leave its frontend.
pub(super) fn hang_up(pid: u32) -> Result<()> {
    let number = i32::try_from(pid).map_err(|_| Error::invalid(format!("process {pid}")))?;
    kill(Pid::from_raw(number), Signal::SIGHUP)
        .map_err(|e| Error::io(e.into(), format!("ending process {pid}")))
}

/// Waits until an older controller has ended; whether that came in time.
pub(super) fn has_ended(mut ended: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + TIMEOUT;
    while !ended() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(POLL);
    }
    true
}

/// When a process began, in ticks since the machine did; `None` if it has ended.
pub(super) fn began(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything; behind it the third field is next.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// A volume's block device.
pub(super) struct DeviceVolume {
    pub path: Arc<Path>,
    pub options: UblkOptions,
    pub places: Places,
    pub ledger: Arc<Ledger>,
    pub running: Running<Served>,
}

/// A device, and its node.
pub(super) struct Served {
    frontend: UblkFrontend,
    volume: String,
    node: PathBuf,
}

impl Frontend for DeviceVolume {
    fn name(&self) -> &str {
        UBLK
    }

    fn endpoint(&self) -> String {
        self.running.with(|served| served.node.display().to_string()).unwrap_or_default()
    }

    fn block_device(&self) -> &'static str {
        if self.is_up() { UBLK } else { "" }
    }

    fn is_up(&self) -> bool {
        self.running.is_up()
    }

    fn is_ending(&self) -> bool {
        self.running.is_ending()
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
                self.running.set(Served { frontend, volume, node });
                Ok(())
            }
            Err(error) => {
                self.end(frontend, &offer.volume)?;
                Err(error)
            }
        }
    }

    fn expand(&self, size: u64) -> Result<()> {
        self.running.with(|served| served.frontend.resize(size)).unwrap_or(Ok(()))
    }

    fn stop(&self) -> Result<()> {
        self.running.end(|Served { frontend, volume, .. }| {
            let gone = node::remove(&self.places.nodes, &volume);
            (None, self.end(frontend, &volume).and(gone))
        })
    }
}

impl DeviceVolume {
    /// A new device.
    fn make(&self, offer: &Offer) -> Result<UblkFrontend> {
        let mark = u64::from_le_bytes(unique()?);
        // Of a device that is gone.
        forget_frozen(&self.places.frozen(&offer.volume));
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
        let Some(record) = self.record(&offer.volume)? else { return Ok(None) };
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
        if offer.upgrade {
            // The first request to each replica takes its store over from the older process, and may wait for what that is
            // at. A flush may wait as long as that; a read of the device's users would cost the replica.
            self.path.flush();
        }
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
                // Its users are to see the errors, not to hang.
                self.thaw_left(&offer.volume, record.device);
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
        hang_up(pid)
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
        self.thaw_left(&offer.volume, record.device);
        // An expansion may have been what the old controller did last.
        if let Err(error) = frontend.resize(offer.size) {
            log::warn("resized", &[("volume", &offer.volume), ("error", &error)]);
        }
        Ok(frontend)
    }

    fn make_node(&self, frontend: &UblkFrontend, volume: &str) -> Result<PathBuf> {
        let id = frontend.info().id;
        let numbers = Control::open().and_then(|mut control| control.params(id));
        let named = |e| Error::io(e, format!("making the node of volume {volume}"));
        node::make(&self.places.nodes, volume, numbers.map_err(named)?.1.block, None)
    }

    /// Whether the volume has such a device, which a controller serves or has left.
    ///
    /// # Errors
    /// That is not known.
    pub fn is_there(&self, volume: &str) -> Result<bool> {
        let Some(record) = self.record(volume)? else { return Ok(false) };
        let info = Control::open().and_then(|mut control| control.info(record.device));
        let shown = FilePath::new(SYS).join(format!("block/ublkb{}", record.device)).exists();
        record.is_there(info, shown)
    }

    /// Thaws what a controller that was killed had frozen on a device, and nothing that others have.
    fn thaw_left(&self, volume: &str, device: u32) {
        match Control::open().and_then(|mut control| control.params(device)) {
            Ok((_, kept)) => {
                let number = makedev(u64::from(kept.block.0), u64::from(kept.block.1));
                thaw_left(&self.places.frozen(volume), number);
            }
            Err(error) => log::warn("not-thawed", &[("volume", &volume), ("error", &error)]),
        }
    }

    fn record(&self, volume: &str) -> Result<Option<Record>> {
        let file = self.places.record(volume);
        let text = match fs::read(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text,
        };
        let read = text.and_then(|text| Ok(serde_json::from_slice(&text)?));
        read.map(Some).map_err(|error| {
            let doing = "reading which block device the volume has (if /sys/block has no ublkb, remove the file)";
            Error::io(error, format!("{}: {doing}", file.display()))
        })
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
    let mut live = || control.info(record.device).is_ok_and(|info| info.state == DeviceState::Live);
    if has_ended(|| !record.is_served() && !live()) {
        return Ok(());
    }
    let (device, pid) = (block_path(record.device), record.pid);
    Err(Error::busy(format!("process {pid} does not leave {}", device.display())))
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
    use longhorn_controller::path::{Events, PathOptions};
    use longhorn_controller::rules::ReplicaId;

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
    fn a_device_that_cannot_be_asked_for_is_not_taken_for_gone() {
        let record = Record { device: 3, mark: 7, pid: 1, began: 1 };
        let failed = |errno| Err(io::Error::from_raw_os_error(errno));
        assert!(!record.is_there(failed(libc::ENODEV), true).unwrap());
        // Without the driver there is no device.
        assert!(!record.is_there(failed(libc::ENOENT), false).unwrap());
        for errno in [libc::ENOENT, libc::EACCES, libc::EMFILE] {
            let error = record.is_there(failed(errno), true).unwrap_err();
            assert!(error.to_string().contains("block device of an earlier controller"), "{error}");
        }
    }

    #[test]
    fn a_record_that_cannot_be_read_is_no_sign_of_no_device() {
        let directory = tempfile::tempdir().unwrap();
        let places =
            Places { run: directory.path().to_owned(), nodes: directory.path().join("nodes") };
        let path = Path::new(PathOptions::default(), 1 << 20, Arc::new(NoFaults)).unwrap();
        let volume = DeviceVolume {
            path,
            options: UblkOptions { queues: 1, depth: 1 },
            ledger: Arc::new(Ledger::new(places.ledger("v"))),
            places,
            running: Running::default(),
        };
        assert!(!volume.is_there("v").unwrap());
        fs::write(volume.places.record("v"), "{").unwrap();
        let error = volume.is_there("v").unwrap_err();
        assert!(error.to_string().contains("ublk-v.json"), "{error}");
    }

    struct NoFaults;

    impl Events for NoFaults {
        fn faulted(&self, _: ReplicaId, _: &str) {}
    }

    #[test]
    fn names_of_volumes_do_not_meet() {
        let places = Places { run: "/run/x".into(), nodes: "/dev/longhorn".into() };
        assert_ne!(places.record("v"), places.ledger("v"));
        assert_ne!(places.record("v.replicas"), places.ledger("v.json"));
        assert_ne!(places.frozen("ublk-v.json"), places.record("v"));
    }
}
