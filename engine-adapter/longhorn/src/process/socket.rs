//! The frontends `nbd` and `socket` of a volume: what listens on a socket of the volume's name.

use super::running::Running;
use dbs_core::{Error, Result};
use dbs_frontend::Listen;
use dbs_frontend::tls::TlsConfig;
use dbs_service::log;
use longhorn_controller::frontend::{NbdFrontend, SocketFrontend, SocketOptions};
use longhorn_controller::path::Path;
use longhorn_controller::volume::{Frontend, Offer};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect};
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

/// The name of the frontend [`SocketVolume`].
pub const SOCKET: &str = "socket";
/// The name of the frontend [`NbdVolume`].
pub(super) const NBD: &str = "nbd";

/// The socket of an older engine, put aside, so that its clients connect to this one next time. It comes back if this
/// one does not start: the older one serves on then.
struct Aside {
    path: PathBuf,
    aside: PathBuf,
}

impl Aside {
    /// Puts the socket at `path` aside, if there is one. One that a killed start has left aside counts, too.
    fn put(path: &std::path::Path) -> Result<Self> {
        let mut aside = path.as_os_str().to_owned();
        aside.push(".older");
        let its = Self { path: path.to_owned(), aside: aside.into() };
        match fs::rename(&its.path, &its.aside) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(e, format!("replacing {}", path.display())))
            }
            _ => Ok(its),
        }
    }

    /// This one has started.
    fn forget(self) {
        // It is of no use to anybody, and the next upgrade replaces it.
        let _ = fs::remove_file(&self.aside);
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // There is none aside where there was none, or once it was forgotten.
        if matches!(fs::symlink_metadata(&self.path), Err(e) if e.kind() == io::ErrorKind::NotFound)
        {
            let _ = fs::rename(&self.aside, &self.path);
        }
    }
}

/// Whether somebody listens on a socket; also if that cannot be seen. It waits for nobody.
pub(super) fn is_live(socket: &std::path::Path) -> bool {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let connected = UnixAddr::new(socket).and_then(|address| {
        let fd = nix::sys::socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(fd.as_raw_fd(), &address)
    });
    use Errno::{ECONNREFUSED, ENAMETOOLONG, ENOENT, ENOTDIR};
    !matches!(connected, Err(ENOENT | ECONNREFUSED | ENAMETOOLONG | ENOTDIR))
}

/// The frontend `nbd` of a volume.
pub(super) struct NbdVolume {
    pub path: Arc<Path>,
    pub run: PathBuf,
    pub more: Vec<Listen>,
    pub tls: Option<TlsConfig>,
    pub running: Running<(String, NbdFrontend)>,
}

impl Frontend for NbdVolume {
    fn name(&self) -> &str {
        NBD
    }

    fn endpoint(&self) -> String {
        self.running.with(|(endpoint, _)| endpoint.clone()).unwrap_or_default()
    }

    fn is_up(&self) -> bool {
        self.running.is_up()
    }

    fn is_ending(&self) -> bool {
        self.running.is_ending()
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let volume = &offer.volume;
        let failed = |e| Error::io(e, format!("serving `{volume}`"));
        fs::create_dir_all(&self.run).map_err(failed)?;
        let socket = self.run.join(format!("nbd-{volume}.sock"));
        let older = offer.upgrade.then(|| Aside::put(&socket)).transpose()?;
        let endpoint = format!("nbd+unix:///{volume}?socket={}", socket.display());
        let addresses = [&[Listen::Unix(socket)], self.more.as_slice()].concat();
        let started = NbdFrontend::start(&self.path, volume, &addresses, self.tls.clone());
        let started = started.map_err(failed)?;
        for address in started.addresses() {
            log::info("listening", &[("volume", volume), ("nbd", address)]);
        }
        if let Some(older) = older {
            older.forget();
        }
        self.running.set((endpoint, started));
        Ok(())
    }

    /// Requests are checked against what the export was when their connection began; the next one sees
    /// the new size.
    fn expand(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        self.running.end(|(_, frontend)| {
            frontend.stop();
            (None, Ok(()))
        })
    }
}

/// The frontend `socket` of a volume.
pub(super) struct SocketVolume {
    path: Arc<Path>,
    /// Directory of the socket.
    directory: PathBuf,
    /// Whether a write is answered only when it is durable.
    durable: bool,
    running: Running<SocketFrontend>,
}

impl SocketVolume {
    /// Not started.
    pub fn new(path: Arc<Path>, directory: PathBuf, durable: bool) -> Self {
        Self { path, directory, durable, running: Running::default() }
    }

    /// Whether a write is answered only when it is durable.
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Where it is, started or not.
    pub fn file(&self, volume: &str) -> PathBuf {
        file_of(&self.directory, volume)
    }
}

/// The socket of a volume, which upstream's engine has under the same name.
pub(super) fn file_of(directory: &std::path::Path, volume: &str) -> PathBuf {
    directory.join(format!("longhorn-{volume}.sock"))
}

impl Frontend for SocketVolume {
    fn name(&self) -> &str {
        SOCKET
    }

    fn endpoint(&self) -> String {
        let address = self.running.with(|frontend| match frontend.address() {
            Listen::Unix(path) => path.display().to_string(),
            address => address.to_string(),
        });
        address.unwrap_or_default()
    }

    fn is_up(&self) -> bool {
        self.running.is_up()
    }

    fn is_ending(&self) -> bool {
        self.running.is_ending()
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let file = self.file(&offer.volume);
        let older = offer.upgrade.then(|| Aside::put(&file)).transpose()?;
        let options =
            SocketOptions { durable_writes: self.durable, ..SocketOptions::at(Listen::Unix(file)) };
        let started = SocketFrontend::start(&self.path, &options)
            .map_err(|e| Error::io(e, format!("serving `{}`", offer.volume)))?;
        if let Some(older) = older {
            older.forget();
        }
        self.running.set(started);
        Ok(())
    }

    /// Requests are checked against the size of the path, which has grown.
    fn expand(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        self.running.end(|frontend| {
            frontend.stop();
            (None, Ok(()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn whether_somebody_listens() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        assert!(!is_live(&socket));
        let listener = UnixListener::bind(&socket).unwrap();
        assert!(is_live(&socket));
        // One that is stopped, and that others wait for.
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        let waiting = std::thread::spawn({
            let socket = socket.clone();
            move || [0; 3].map(|_| UnixStream::connect(&socket).is_ok())
        });
        for _ in 0..50 {
            assert!(is_live(&socket));
        }
        drop(listener);
        let _ = waiting.join().unwrap();
        assert!(!is_live(&socket));
        // Nobody can listen there.
        assert!(!is_live(&directory.path().join("x".repeat(120))));
        assert!(!is_live(&socket.join("below")));
    }
}
