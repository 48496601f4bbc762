//! The frontend `ublk`: the volume as a block device of this machine.
//!
//! Each queue is on a reactor of the path, beside that reactor's share of the connections to replicas: a
//! request is fetched, sent to replicas and answered on one thread.

use crate::path::{Attached, Path};
use dbs_core::{Error, Result};
use dbs_reactor::Io;
use dbs_reactor::ublk::{Control, DeviceInfo, block_path};
use dbs_ublk::{
    Deliver, Device, carried_device, carried_front, carried_params, carried_spawner, explain,
};
use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The only driver of a reactor that brings requests of block devices.
const DRIVER: &str = "io_uring";

/// What a device is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UblkOptions {
    /// Queues, at most as many as the machine has processors; reactors have them in turn.
    pub queues: u16,
    /// Requests of a queue at a time.
    pub depth: u16,
}

/// The frontend, running. Dropping it leaves the device to the next server, which can take it over when
/// this process has ended.
pub struct UblkFrontend {
    /// First: its queues hold what is attached.
    device: Device,
    attached: Arc<Attached>,
}

impl UblkFrontend {
    /// Whether this machine can have such a device of a path.
    #[must_use]
    pub fn is_possible(path: &Path) -> bool {
        path.driver() == DRIVER && Control::open().is_ok()
    }

    /// Makes a block device of the volume behind a path. `added` is told before anybody can use it, and
    /// may refuse; the kernel keeps `mark` with the device.
    ///
    /// # Errors
    /// `Unsupported` if this machine has no `ublk`; those of [`Device::start`].
    pub fn start(
        path: &Arc<Path>,
        options: UblkOptions,
        mark: u64,
        added: impl FnOnce(&DeviceInfo) -> Result<()>,
    ) -> Result<Self> {
        let (mut control, attached) = begin(path)?;
        let new = carried_device(options.queues, options.depth, mark);
        let mut spawn = carried_spawner(path.reactors(), deliver(&attached));
        let params = carried_params(path.size());
        let device = Device::start(&mut control, &new, &params, added, &mut spawn);
        device.map(|device| Self { device, attached })
    }

    /// Takes over a device of the volume that a controller left behind which has ended, or is about to.
    /// What that had not answered is begun again.
    ///
    /// # Errors
    /// Those of [`Device::recover`]; the device stays as it is.
    pub fn recover(path: &Arc<Path>, id: u32) -> Result<Self> {
        let (mut control, attached) = begin(path)?;
        let mut spawn = carried_spawner(path.reactors(), deliver(&attached));
        let device = Device::recover(&mut control, id, &|| false, &mut spawn);
        device.map(|device| Self { device, attached })
    }

    /// Number, queues and depth as the kernel gave them.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The block device.
    #[must_use]
    pub fn device(&self) -> PathBuf {
        block_path(self.device.info().id)
    }

    /// Tells the device's users that the volume has so many bytes, if they do not know.
    ///
    /// # Errors
    /// `Unsupported` before Linux 6.16.
    pub fn resize(&self, size: u64) -> Result<()> {
        let doing = "changing the size of the block device, which gets the new size when its \
                     frontend is started again (`frontend shutdown`, `frontend start`); Linux 6.16 can \
                     change the size in use, and so can a block device over iSCSI, on any kernel \
                     (--block-device iscsi)";
        let id = self.device.info().id;
        let updated = Control::open().and_then(|mut control| match control.params(id) {
            Ok((known, _)) if known.size == size => Ok(()),
            _ => control.update_size(id, size),
        });
        updated.map_err(|error| explain(error, doing))
    }

    /// Ends the device: what its users have under way is answered, what they ask for later fails.
    ///
    /// # Errors
    /// The kernel's; the device is not served any more even then.
    pub fn remove(self) -> Result<()> {
        let Self { device, attached } = self;
        let mut control = Control::open().map_err(|e| explain(e, "removing the block device"))?;
        // The kernel waits for what the device has under way.
        attached.ends_delays();
        let removed = device.remove(&mut control);
        drop(attached);
        removed
    }
}

impl fmt::Debug for UblkFrontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UblkFrontend").field("device", &self.device()).finish_non_exhaustive()
    }
}

/// The way to the driver, and the device's parts on the path's reactors.
fn begin(path: &Arc<Path>) -> Result<(Control, Arc<Attached>)> {
    let doing = "making a block device of the volume";
    let control = Control::open().map_err(|e| explain(e, doing))?;
    if path.driver() != DRIVER {
        return Err(Error::unsupported(format!(
            "{doing}: the kernel does not allow io_uring here; the frontend `nbd` works without"
        )));
    }
    let attached = path
        .attach(|_, _| |_: &mut Io, tags| carried_front(tags))
        .map_err(|e| Error::io(e, doing))?;
    Ok((control, Arc::new(attached)))
}

fn deliver(attached: &Arc<Attached>) -> Deliver {
    let attached = Arc::clone(attached);
    Arc::new(move |reactor: usize, message: Box<dyn Any + Send>| attached.send(reactor, message))
}
