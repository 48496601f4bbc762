//! The frontends of a volume over iSCSI, as upstream's engine has them: `tgtd` connects to the socket of the
//! volume and is its target; for a block device, the initiator of the host makes a disk of the target, which
//! gets a node of the volume's name.
//!
//! Nothing of it outlives a controller in use: `tgtd` fails all requests as soon as its connection ends. So
//! what a dead controller left is removed by the next one. The socket comes first: as long as another
//! controller listens there, its target is not touched. A controller that runs hands nothing over
//! ([`refuse_over_iscsi`]).
//!
//! The node goes before its disk, and never comes back without it: the next disk of any volume may have the same
//! number.

mod initiator;
mod program;
mod target;
#[cfg(test)]
mod tests;

use super::device::{SYS, UBLK};
use super::ledger::Ledger;
use super::node::{self, DISKS, Kind};
use super::running::Running;
use super::socket::{self, SocketVolume};
use dbs_core::{Error, Result};
use dbs_service::log;
use initiator::Initiator;
use longhorn_controller::volume::{Frontend, Offer, thaw};
use program::{Run, System};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use target::Target;

/// What a block device over iSCSI is called.
pub(super) const ISCSI: &str = "iscsi";
/// The frontends: a target with a disk of this machine, and a target alone.
pub(super) const BLOCK_DEVICE: &str = "tgt-blockdev";
pub(super) const TARGET: &str = "tgt-iscsi";
/// What such a frontend is to be.
pub(super) struct IscsiOptions {
    /// Directory of the nodes.
    pub nodes: PathBuf,
    /// How long `tgtd` waits for the answer to a request, and the kernel for that of the disk.
    pub request_timeout: Duration,
    /// See [`IscsiOptions::request_timeout`].
    pub disk_timeout: Duration,
}

/// Refuses an upgrade of a volume that another engine serves over iSCSI, ours or Longhorn's. It is to be asked
/// before anything is done to the volume, and asks no program, so that the answer comes at once: Longhorn's
/// instance manager ends the older engine if the newer one takes long to start, but not if it has ended.
///
/// # Errors
/// `Unsupported` with the way out.
pub(super) fn refuse_over_iscsi(
    (nodes, sockets): (&Path, &Path),
    frontend: Option<&str>,
    volume: &str,
) -> Result<()> {
    let socket = socket::file_of(sockets, volume);
    let is_device = frontend.is_some_and(|kind| matches!(kind, BLOCK_DEVICE | UBLK | TARGET));
    let what = if node::kind(Path::new(SYS), nodes, volume) == Some(Kind::Other) {
        format!("{} is a disk over iSCSI", nodes.join(volume).display())
    } else if is_device && socket::is_live(&socket) {
        format!("another engine serves volume {volume} through {}", socket.display())
    } else {
        return Ok(());
    };
    Err(Error::unsupported(format!(
        "{what}, which a newer controller cannot take over; an older one that runs goes on. Detach the volume, \
         upgrade its engine, attach it again; without Longhorn's manager: `frontend shutdown` at the older \
         controller, or its end, then a start without --upgrade"
    )))
}

/// A volume over iSCSI.
pub(super) struct IscsiVolume {
    kind: &'static str,
    options: IscsiOptions,
    socket: SocketVolume,
    ledger: Arc<Ledger>,
    run: Box<dyn Run>,
    /// Where the host's processes are seen.
    proc: PathBuf,
    /// Where the kernel shows devices.
    sys: PathBuf,
    /// Of disks, below it, by their names.
    disks: PathBuf,
    running: Running<Served>,
}

struct Served {
    volume: String,
    target: String,
    /// Of the block device, if that is what it is, and there still.
    node: Option<PathBuf>,
    /// Whether its end has begun, and has not come: nobody can be sure to use it.
    is_half: bool,
}

impl IscsiVolume {
    /// A frontend of this kind, not started.
    pub fn new(
        kind: &'static str,
        options: IscsiOptions,
        socket: SocketVolume,
        ledger: Arc<Ledger>,
    ) -> Self {
        Self {
            kind,
            options,
            socket,
            ledger,
            run: Box::new(System),
            proc: initiator::host_proc(),
            sys: PathBuf::from(SYS),
            disks: PathBuf::from("/sys/class/block"),
            running: Running::default(),
        }
    }

    /// Whether there are signs of what a dead controller of the volume has left.
    pub fn is_left(&self, volume: &str) -> bool {
        self.socket.file(volume).exists() || self.has_node(volume)
    }

    fn has_node(&self, volume: &str) -> bool {
        node::kind(&self.sys, &self.options.nodes, volume) == Some(Kind::Other)
    }

    /// Removes that, as a device of another kind is to take its place. That one needs nothing of it, so it is told
    /// if it cannot be removed; whoever made a device over iSCSI later would have to.
    ///
    /// # Errors
    /// `Busy`: the controller runs.
    pub fn clear(&self, volume: &str) -> Result<()> {
        let file = self.socket.file(volume);
        if socket::is_live(&file) {
            return Err(Error::busy(format!(
                "another engine serves volume {volume} through {}: end it, or its frontend",
                file.display()
            )));
        }
        // First, so that what cannot be removed is tried once: a start over iSCSI tries it in any case.
        let gone = match fs::remove_file(&file) {
            Err(error) if file.exists() => {
                Err(Error::io(error, format!("removing {}", file.display())))
            }
            _ => Ok(()),
        };
        if let Err(error) = gone.and(self.remove_left(volume)) {
            log::warn("left", &[("volume", &volume), ("error", &error)]);
        }
        Ok(())
    }

    fn remove_left(&self, volume: &str) -> Result<()> {
        let target = target::name_of(volume);
        self.remove(volume, &target).map_err(|error| {
            error.context(format!("removing what an earlier controller of volume {volume} left"))
        })
    }

    fn target<'a>(&'a self, name: &'a str) -> Target<'a> {
        Target { run: self.run.as_ref(), name }
    }

    fn initiator<'a>(&'a self, target: &'a str) -> Initiator<'a> {
        let seconds = self.options.disk_timeout.as_secs();
        Initiator { run: self.run.as_ref(), target, proc: &self.proc, disks: &self.disks, seconds }
    }

    fn has_disk(&self) -> bool {
        self.kind == BLOCK_DEVICE
    }

    /// Makes all of it, in place of what a dead controller left.
    fn make(&self, offer: &Offer, target: &str) -> Result<Served> {
        let volume = &offer.volume;
        self.remove_left(volume)?;
        // A device of another kind that a dead controller left can never be given back to its users.
        self.ledger.end();
        let made = self.make_target(offer, target);
        made.inspect_err(|_| {
            if let Err(error) = self.remove(volume, target) {
                log::warn("left", &[("volume", volume), ("error", &error)]);
            }
        })
    }

    fn make_target(&self, offer: &Offer, target: &str) -> Result<Served> {
        let (volume, socket) = (&offer.volume, self.socket.endpoint());
        self.target(target).make(&socket, offer.size, self.options.request_timeout)?;
        let node = match self.has_disk() {
            true => Some(self.make_node(volume, &self.initiator(target).attach()?)?),
            false => None,
        };
        Ok(Served { volume: volume.clone(), target: target.to_owned(), node, is_half: false })
    }

    /// The number of a disk.
    fn number(&self, disk: &str) -> Result<u64> {
        let (major, minor) = self.numbers(disk)?;
        Ok(nix::sys::stat::makedev(u64::from(major), u64::from(minor)))
    }

    fn numbers(&self, disk: &str) -> Result<(u32, u32)> {
        let file = self.disks.join(disk).join("dev");
        let text = fs::read_to_string(&file)
            .map_err(|e| Error::io(e, format!("reading {}", file.display())))?;
        let numbers = text.trim().split_once(':');
        let numbers = numbers.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        numbers.ok_or_else(|| {
            Error::invalid(format!("{} has no numbers of a device: {text:?}", file.display()))
        })
    }

    fn make_node(&self, volume: &str, disk: &str) -> Result<PathBuf> {
        node::make(&self.options.nodes, volume, self.numbers(disk)?, Some(DISKS))
    }

    fn grow(&self, target: &str, size: u64) -> Result<()> {
        self.target(target).grow(size)?;
        match self.has_disk() {
            true => self.initiator(target).rescan(),
            false => Ok(()),
        }
    }

    /// Removes node, disk and target, as far as they are there.
    fn remove(&self, volume: &str, target: &str) -> Result<()> {
        // A disk may be there of a time when the volume had another frontend. Its users would go on with the
        // next target of the same name.
        if self.has_disk() || self.has_node(volume) {
            self.remove_disk(volume, target)?;
        }
        self.target(target).remove()
    }

    fn remove_disk(&self, volume: &str, target: &str) -> Result<()> {
        let disk = self.initiator(target).present();
        if let Ok(disk) = &disk
            && let Ok(number) = self.number(disk)
        {
            // Nobody could unmount a frozen file system, and who froze it may be dead.
            thaw(number);
        }
        node::remove(&self.options.nodes, volume)?;
        let detached = self.initiator(target).detach();
        if detached.is_err() && disk.is_ok() {
            // It is in use, and is to be found.
            let disk = self.initiator(target).present();
            if let Err(error) = disk.and_then(|disk| self.make_node(volume, &disk)) {
                log::warn("node", &[("volume", &volume), ("error", &error)]);
            }
        }
        detached
    }

    /// Ends it all; answers with what is there still.
    fn end(&self, served: Served) -> (Option<Served>, Result<()>) {
        if let Err(error) = self.remove(&served.volume, &served.target) {
            // Its users have it still, or `tgtd` has it without them; either can be ended later.
            let node = served.node.filter(|node| node.exists());
            let is_half = node.is_none();
            return (Some(Served { node, is_half, ..served }), Err(error));
        }
        (None, self.socket.stop())
    }
}

impl Frontend for IscsiVolume {
    fn name(&self) -> &str {
        self.kind
    }

    fn endpoint(&self) -> String {
        let shown = self.running.with(|served| match &served.node {
            Some(node) => node.display().to_string(),
            None if served.is_half => String::new(),
            None => served.target.clone(),
        });
        shown.unwrap_or_default()
    }

    fn block_device(&self) -> &'static str {
        if self.has_disk() && self.is_up() { ISCSI } else { "" }
    }

    fn is_up(&self) -> bool {
        self.running.is_up()
    }

    fn is_ending(&self) -> bool {
        self.running.is_ending() || self.running.with(|served| served.is_half) == Some(true)
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let target = target::name_of(&offer.volume);
        self.target(&target).ready_daemon()?;
        // As long as another controller listens there, this fails.
        self.socket.start(&Offer { upgrade: false, ..offer.clone() })?;
        let made = self.make(offer, &target);
        let served = made.or_else(|error| self.socket.stop().and(Err(error)))?;
        let node = served.node.as_ref().map_or("none".into(), |node| node.to_string_lossy());
        let durability = if self.socket.is_durable() { "power" } else { "interval" };
        let fields: [(&str, &dyn fmt::Display); 5] = [
            ("volume", &served.volume),
            ("target", &served.target),
            ("node", &node),
            ("socket", &self.socket.endpoint()),
            ("durability", &durability),
        ];
        log::info("attached", &fields);
        self.running.set(served);
        Ok(())
    }

    fn expand(&self, size: u64) -> Result<()> {
        let target = self.running.with(|served| served.target.clone());
        target.map_or(Ok(()), |target| self.grow(&target, size))
    }

    fn stop(&self) -> Result<()> {
        self.running.end(|served| self.end(served))
    }
}
