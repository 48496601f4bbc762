//! The listening sockets of a replica: bound by the process that was started for it, used there or
//! passed to the server of its store.

use crate::agent::ports::ReceiverPorts;
use dbs_core::{Error, Result};
use dbs_frontend::ListenAddress;
use dbs_frontend::Listener;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, getsockopt, listen, socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};
use std::fs::{self, DirBuilder};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Attempts at ports in a row that are free, where the system is to choose.
const CHOICES: usize = 100;

/// Where the data server listens.
#[derive(Debug)]
pub enum DataSocket {
    /// On TCP.
    Tcp(TcpListener),
    /// On a unix socket.
    Unix(UnixListener),
}

/// All sockets of a replica.
#[derive(Debug)]
pub struct Sockets {
    /// ReplicaService.
    pub grpc: TcpListener,
    /// Data connections.
    pub data: DataSocket,
    /// SyncAgentService.
    pub agent: Option<TcpListener>,
}

/// What is to be listened on.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// gRPC; the others follow it.
    pub listen: ListenAddress,
    /// The data server's unix socket, if it has one.
    pub unix: Option<PathBuf>,
    /// Whether there is a sync agent.
    pub agent: bool,
}

impl Wanted {
    /// Binds all sockets; port 0 stands for any ports in a row.
    ///
    /// # Errors
    /// `Io` naming the address.
    pub fn bind(&self) -> Result<Sockets> {
        if self.listen.port != 0 {
            return self.bind_at(&self.listen).map_err(|e| Error::io(e, "starting the replica"));
        }
        let mut last = None;
        for _ in 0..CHOICES {
            let bound = self.listen.bind().and_then(|chosen| {
                let port = chosen.local_addr()?.port();
                drop(chosen);
                self.bind_at(&ListenAddress { host: self.listen.host.clone(), port })
            });
            match bound {
                Ok(sockets) => return Ok(sockets),
                Err(e) => last = Some(e),
            }
        }
        let last = last.unwrap_or_else(|| io::Error::other("no attempt was made"));
        Err(Error::io(last, "no free ports in a row"))
    }

    fn bind_at(&self, listen: &ListenAddress) -> io::Result<Sockets> {
        let grpc = listen.bind()?;
        let data = match &self.unix {
            None => DataSocket::Tcp(listen.plus(1)?.bind()?),
            Some(path) => DataSocket::Unix(bind_unix(path)?),
        };
        let agent = if self.agent { Some(listen.plus(2)?.bind()?) } else { None };
        Ok(Sockets { grpc, data, agent })
    }
}

impl Sockets {
    /// First and last port of so many behind the sync agent's; nothing if there are none.
    #[must_use]
    pub fn receivers(&self, count: u16) -> Option<(u16, u16)> {
        let port = self.grpc.local_addr().ok()?.port();
        let first = port.checked_add(3)?;
        (count > 0).then(|| (first, first.saturating_add(count - 1)))
    }

    /// In the order of [`Sockets::from_files`].
    #[must_use]
    pub fn files(&self) -> Vec<BorrowedFd<'_>> {
        let data = match &self.data {
            DataSocket::Tcp(listener) => listener.as_fd(),
            DataSocket::Unix(listener) => listener.as_fd(),
        };
        let agent = self.agent.as_ref().map(AsFd::as_fd);
        [self.grpc.as_fd(), data].into_iter().chain(agent).collect()
    }

    /// From files that another process has passed: they must be what they are said to be.
    ///
    /// # Errors
    /// `Invalid` if there are too few, or one is no such socket.
    pub fn from_files(
        files: &mut impl Iterator<Item = OwnedFd>,
        unix: bool,
        agent: bool,
    ) -> Result<Self> {
        let grpc = tcp(files.next())?;
        let data = if unix {
            let file = files.next().ok_or_else(missing)?;
            check_listens(&file)?;
            let listener = UnixListener::from(file);
            listener.local_addr().map_err(|e| not_listening(&e))?;
            DataSocket::Unix(listener)
        } else {
            DataSocket::Tcp(tcp(files.next())?)
        };
        let agent = if agent { Some(tcp(files.next())?) } else { None };
        Ok(Self { grpc, data, agent })
    }

    /// Where it listens, for the log.
    #[must_use]
    pub fn describe(&self) -> [String; 3] {
        let tcp = |listener: &TcpListener| {
            listener.local_addr().map_or_else(|e| e.to_string(), |address| address.to_string())
        };
        let data = match &self.data {
            DataSocket::Tcp(listener) => tcp(listener),
            DataSocket::Unix(listener) => {
                let address = listener.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or_else(|| "unix".to_owned(), |path| format!("unix:{}", path.display()))
            }
        };
        [tcp(&self.grpc), data, self.agent.as_ref().map_or_else(|| "none".to_owned(), tcp)]
    }
}

impl DataSocket {
    /// As the data server takes it.
    ///
    /// # Errors
    /// `Io` if it cannot be set up.
    pub fn into_listener(self) -> Result<Listener> {
        match self {
            Self::Tcp(listener) => Listener::from_tcp(listener),
            Self::Unix(listener) => Listener::from_unix(listener),
        }
        .map_err(|e| Error::io(e, "listening for data connections"))
    }
}

/// Receivers of a sync agent on sockets bound here, to be passed on.
///
/// # Errors
/// `Io` if none of the range can be had. Those that others use are left out.
pub fn bind_receivers(host: &str, first: u16, last: u16) -> Result<Vec<TcpListener>> {
    let address = |port| ListenAddress { host: host.to_owned(), port };
    let bound: Vec<_> = (first..=last).filter_map(|port| address(port).bind().ok()).collect();
    if bound.is_empty() && first <= last {
        let text = format!("none of the ports {first} to {last} for receiving files is free");
        return Err(Error::new(dbs_core::ErrorKind::Io, text));
    }
    Ok(bound)
}

/// Receivers from files that another process has passed.
///
/// # Errors
/// As [`Sockets::from_files`].
pub fn receivers_from(files: impl Iterator<Item = OwnedFd>) -> Result<ReceiverPorts> {
    files.map(|file| tcp(Some(file))).collect::<Result<Vec<_>>>().map(ReceiverPorts::Bound)
}

/// A listening TCP socket out of a file.
///
/// # Errors
/// `Invalid` if it is something else.
pub fn tcp(file: Option<OwnedFd>) -> Result<TcpListener> {
    let file = file.ok_or_else(missing)?;
    check_listens(&file)?;
    let listener = TcpListener::from(file);
    // Fails for a socket of another family.
    listener.local_addr().map_err(|e| not_listening(&e))?;
    Ok(listener)
}

fn check_listens(file: &OwnedFd) -> Result<()> {
    match getsockopt(file, sockopt::AcceptConn) {
        Ok(true) => Ok(()),
        Ok(false) => Err(not_listening(&"it does not listen")),
        Err(e) => Err(not_listening(&e)),
    }
}

fn missing() -> Error {
    Error::invalid("a socket is missing")
}

fn not_listening(why: &dyn std::fmt::Display) -> Error {
    Error::invalid(format!("what was passed is not the expected listening socket: {why}"))
}

/// Where the data server of a volume listens with `--data-server-protocol unix`: below `/host`, in
/// the directory that the environment (`LONGHORN_CONTROL_PATH`) names as Longhorn's.
///
/// # Errors
/// `Invalid` if the volume has no name, or one that is no file name.
pub fn unix_path(control: Option<&Path>, volume: &str) -> Result<PathBuf> {
    let bad = volume.is_empty() || volume.contains('/') || volume.contains('\0');
    if bad {
        return Err(Error::invalid(format!(
            "a data server on a unix socket needs the volume's name (--volume-name), not `{volume}`"
        )));
    }
    let usual = Path::new("/var/lib/longhorn");
    let unusable =
        |path: &&Path| !path.is_absolute() || *path == Path::new("/") || path.starts_with("/dev");
    let control = control.filter(|path| !unusable(path)).unwrap_or(usual);
    let inside = control.strip_prefix("/").unwrap_or(control);
    let name = format!("{volume}.sock");
    Ok(Path::new("/host").join(inside).join("unix-domain-socket").join(name))
}

/// Binds a unix socket for the owner of the process only, in place of an older process's. Its directory
/// is made if absent, for the owner only as well.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let named = |e: io::Error| {
        io::Error::new(e.kind(), format!("cannot listen on {}: {e}", path.display()))
    };
    if let Some(directory) = path.parent() {
        // Those above it are not ours alone.
        directory.parent().map_or(Ok(()), fs::create_dir_all).map_err(named)?;
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(named)?;
    }
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(named(e)),
        Ok(found) if !found.file_type().is_socket() => {
            let text = "something that is no socket is there";
            return Err(named(io::Error::new(io::ErrorKind::AlreadyExists, text)));
        }
        // Who listens there is an older process of the volume, which a newer one replaces, as an
        // upgrade does. Its connections live on without the file.
        Ok(_) => match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(named(e)),
            _ => {}
        },
    }
    listen_privately(path).map_err(named)
}

fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // Before the bind, so that at no time anybody else can connect.
    fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&fd, Backlog::MAXALLOWABLE)?;
    Ok(UnixListener::from(fd))
}

/// The file of a unix socket, which is removed if it is still the same when this is dropped.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    /// The file at `path`, if it is there.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let meta = fs::symlink_metadata(path).ok()?;
        Some(Self { path: path.to_owned(), identity: (meta.dev(), meta.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let now = fs::symlink_metadata(&self.path).map(|meta| (meta.dev(), meta.ino()));
        if now.is_ok_and(|now| now == self.identity) {
            // If it stays, the next process replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}
