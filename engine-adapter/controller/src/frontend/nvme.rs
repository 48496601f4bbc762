//! The frontend `nvme-tcp`: the volume as a namespace of NVMe over TCP, for hosts.

use super::disk;
use crate::path::{Attached, Path};
use dbs_core::{Error, Result};
use dbs_frontend::{Front, Listen};
use dbs_nvme::{HostedNvme, NvmeOptions, NvmeTcp};
use dbs_reactor::Io;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The frontend, running. Dropping it stops it.
pub struct NvmeFrontend {
    server: NvmeTcp,
    attached: Option<Attached>,
}

impl NvmeFrontend {
    /// Listens, and serves the volume behind a path to one host at a time, as a subsystem that is called after `uuid`.
    /// Each queue is on one reactor of the path.
    ///
    /// # Errors
    /// An address that cannot be listened on, or that others than this machine reach.
    pub fn start(path: &Arc<Path>, name: &str, uuid: &str, options: &NvmeOptions) -> Result<Self> {
        let hosted = HostedNvme::new(disk(path, name, uuid), options);
        let attached = path.attach(|_, _| {
            let front = hosted.front();
            move |_: &mut Io, tags| -> Box<dyn Front> { front(tags) }
        });
        let attached = attached.map_err(|e| Error::io(e, "serving hosts of NVMe"))?;
        let server = hosted.start(path.reactors(), attached.to())?;
        Ok(Self { server, attached: Some(attached) })
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> &[Listen] {
        self.server.addresses()
    }

    /// The name of its subsystem.
    #[must_use]
    pub fn subsystem(&self) -> String {
        self.server.subsystems().into_iter().next().unwrap_or_default()
    }

    /// Tells the host that the volume has another size.
    pub fn follow(&self) {
        self.server.follow();
    }

    /// Stops: what is under way is answered, and the host disconnected.
    pub fn stop(self) {}
}

impl fmt::Debug for NvmeFrontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeFrontend").field("addresses", &self.addresses()).finish_non_exhaustive()
    }
}

impl Drop for NvmeFrontend {
    fn drop(&mut self) {
        // The server waits for what the host has under way.
        self.attached.iter().for_each(Attached::ends_delays);
        self.server.stop();
        if let Some(attached) = self.attached.take() {
            attached.detach(Duration::ZERO);
        }
    }
}
