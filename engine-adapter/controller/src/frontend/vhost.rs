//! The frontend `vhost-user`: the volume as the disk of a virtual machine of this machine.

use super::disk;
use crate::path::{Attached, Path};
use dbs_core::{Error, Result};
use dbs_frontend::Front;
use dbs_reactor::Io;
use dbs_vhost::VhostUser;
use std::fmt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The frontend, running. Dropping it stops it.
pub struct VhostFrontend {
    server: VhostUser,
    attached: Option<Attached>,
}

impl VhostFrontend {
    /// Listens on a socket, and serves the volume behind a path to one virtual machine at a time. Each of its queues is
    /// on one reactor of the path. A machine goes on after this process has died if it finds the same `uuid`.
    ///
    /// # Errors
    /// The socket cannot be listened on, or somebody else does.
    pub fn start(path: &Arc<Path>, name: &str, uuid: &str, socket: PathBuf) -> Result<Self> {
        let attached = path.attach(|reactor, to| {
            let to = Arc::clone(to);
            move |_: &mut Io, tags| -> Box<dyn Front> { dbs_vhost::front(reactor, tags, &to) }
        });
        let attached = attached.map_err(|e| Error::io(e, "serving virtual machines"))?;
        let (disk, to) = (disk(path, name, uuid), Arc::clone(attached.to()));
        let server = VhostUser::hosted(disk, socket, path.reactors(), to)?;
        Ok(Self { server, attached: Some(attached) })
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &FilePath {
        self.server.path()
    }

    /// Tells the machine that the volume has another size.
    pub fn follow(&self) {
        self.server.follow();
    }

    /// Stops: what is under way is answered, and the machine disconnected.
    pub fn stop(self) {}
}

impl fmt::Debug for VhostFrontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostFrontend").field("socket", &self.socket()).finish_non_exhaustive()
    }
}

impl Drop for VhostFrontend {
    fn drop(&mut self) {
        // The server waits for what the machine has under way.
        self.attached.iter().for_each(Attached::ends_delays);
        self.server.stop();
        if let Some(attached) = self.attached.take() {
            attached.detach(Duration::ZERO);
        }
    }
}
